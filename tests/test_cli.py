# SPDX-License-Identifier: Apache-2.0
"""The command line: what it says, what it returns, and that errors are sentences."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import no_matplotlib
import relpos
import text_files
from commands import Capture, relpos_prints, relpos_says
from relpos import cli
from relpos.train import checkpoint, newest
from relpos.train.average import average
from relpos.train.log import LOG, read_log

SMALL = (
    "--preset", "tiny", "--set", "width=32", "--set", "feed_forward=64", "--subwords", "words",
    "--set", "encoder.layers=1", "--set", "decoder.layers=1", "--set", "max_length=16",
    "--tokens", "256", "--sentences", "32", "--log-every", "5", "--progress", "none",
)  # fmt: skip


def relpos_warns(capture: Capture, *arguments: Any) -> list[str]:
    """What a command that does its work warns of."""
    lines = relpos_prints(capture, *arguments).error.splitlines()
    begin = "relpos: warning: "
    return [line.removeprefix(begin) for line in lines if line.startswith(begin)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of 30 steps, made once."""
    folder = tmp_path_factory.mktemp("cli")
    source, target = text_files.write_pairs(folder, "train", 200)
    valid = text_files.write_pairs(folder, "valid", 20, seed=1)
    files = ("--source", str(source), "--target", str(target))
    more = ("--validation-source", str(valid[0]), "--validation-target", str(valid[1]))
    made = folder / "run"
    loop = ("--validate-every", "10", "--save-every", "10", "--output", str(made))
    assert cli.main(["train", *files, *more, *SMALL, *loop, "--steps", "30"]) == 0
    return SimpleNamespace(folder=folder, made=made, files=files, more=more, loop=loop)


# ---- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        (), ("demo",), ("train",), ("translate",), ("generate",), ("evaluate",), ("average",),
        ("plot",), ("inspect",), ("align",), ("devices",),
    ],
)  # fmt: skip
def test_help_reads_well(capsys: Capture, command: tuple[str, ...]) -> None:
    text = relpos_says(capsys, *command, "--help")
    assert text.startswith("usage: relpos") and max(map(len, text.splitlines())) <= 100
    for option in re.findall(r"^  (--[a-z-]+)(.*(?:\n {10,}.*)*)", text, re.MULTILINE):
        assert re.search(r"[a-z]{3}", option[1]), f"{option[0]}: no help"
    if not command:
        assert all(each in text for each in ("demo", "train", "translate", "plot", "--cflags"))


def test_a_run_that_starts_with_another(run: SimpleNamespace, capsys: Capture) -> None:
    """The other's configuration and vocabulary, unless told otherwise; its weights."""
    made, output = run.made, run.folder / "tuned"
    given = ("train", *run.files, "--start", made, "--output", output, "--progress", "none")
    assert (
        "--vocabulary, or data.vocabulary in the file of --config: --start brings"
        in relpos_says(capsys, *given, "--vocabulary", 50, status=1)
    )
    assert "--subwords, or data.subwords in the file of --config: --start brings" in relpos_says(
        capsys, *given, "--subwords", "bpe", status=1
    )
    said = relpos_says(capsys, *given, "--preset", "tiny", status=1)
    assert said.startswith(
        "relpos: config: not that of start: width=64, and 32 before; feed_forward=128, and 64 before; "
        "max_length=128, and 16 before; encoder.layers=2, and 1 before; decoder.layers=2, and 1 "
        "before: cannot read "
    )  # and nothing of steps, which may differ
    assert "--text: this model has an encoder" in relpos_says(
        capsys, "train", "--text", run.files[1], *given[5:], status=1
    )
    given = (*given[:-1], "lines", "--steps", "2", "--set", "learning_rate=0.0001")
    said = relpos_says(capsys, *given)
    assert f"beginning with {made / 'step-000000030' / 'model.safetensors'}" in said
    first, tuned = (newest(folder) for folder in (made, output))
    assert first is not None and tuned is not None and tuned.step == 2
    changed = {"steps": 2, "learning_rate": 0.0001}
    assert tuned.config == first.config.replace(changed)
    models = [relpos.Transformer.load(each.folder / checkpoint.MODEL) for each in (first, tuned)]
    for name, weights in models[1].parameters.items():
        moved = np.abs(weights - models[0].parameters[name]).max()
        assert 0 < moved < 3 * 0.0001  # Adam: twice a rate at most


def test_nothing_asked_is_help(capsys: Capture) -> None:
    assert cli.main([]) == 2
    assert capsys.readouterr().out.startswith("usage: relpos")


def test_about_the_build(capsys: Capture) -> None:
    assert relpos_says(capsys, "--version").strip() == relpos.__version__
    assert relpos.build_info()["isa"] in relpos_says(capsys, "--build-info")
    if (Path(relpos.__file__).parent / "include").exists():
        flags = relpos_says(capsys, "--cflags", "--libs")
        assert flags.startswith("-I") and " -lcore " in flags and flags.count("\n") == 1


def test_what_to_type_next(capsys: Capture) -> None:
    said = relpos_says(capsys, "train", status=2)
    assert "relpos train --source train.en --target train.de" in said
    assert "--target is missing" in relpos_says(capsys, "train", "--source", "x", status=2)
    both = ("train", "--source", "x", "--target", "y", "--text", "z")
    assert "give --source and --target, or --text" in relpos_says(capsys, *both, status=2)


def test_presets_are_told_by_what_they_are(capsys: Capture) -> None:
    lines = relpos_says(capsys, "train", "--list-presets").splitlines()
    assert tuple(line.split()[0] for line in lines) == relpos.Config.presets()
    said = dict(line.split(maxsplit=1) for line in lines)
    assert said["paper-base"] == (
        "6 + 6 layers, width 512, shaw, 32,768 tokens, dropout 0.1, 100,000 steps"
    )
    assert ", sinusoidal, " in said["paper-base-absolute"]
    assert len(set(said.values())) == len(said) and max(map(len, lines)) <= 105


def test_flags_import_nothing_of_training() -> None:
    script = (
        "import sys; from relpos import cli; cli.main(['--version']);"
        "print([m for m in sys.modules if m.startswith(('relpos.train', 'relpos.data', 'tqdm',"
        " 'relpos.translator', 'relpos.demo', 'sentencepiece', 'matplotlib'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=Path(relpos.__file__).parent.parent,  # in the repository Python would find the sources
    )
    assert done.stdout.splitlines()[1:] == ["[]"], done.stderr


def environment() -> dict[str, str]:
    own = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    own.pop("PYTHONUNBUFFERED", None)  # with it nothing is left to be written at exit
    return own


# ---- train ---------------------------------------------------------------------------------------


def test_a_run(run: SimpleNamespace) -> None:
    found = newest(run.made)
    assert found is not None and found.step == 30
    config = found.config
    assert (config.width, config.encoder.layers, config.steps) == (32, 1, 30)
    assert config.target_vocabulary == config.source_vocabulary == len(text_files.WORDS) + 3
    assert [line["step"] for line in read_log(run.made) if line["kind"] == "validation"] == [
        10, 20, 30,
    ]  # fmt: skip


def test_going_on(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    command = ("train", *run.files, *run.more, *SMALL, *run.loop)
    said = relpos_says(capsys, *command, status=1)
    assert said == (
        f"relpos: --output: {run.made} has checkpoints already: resume=True, or --resume, goes "
        "on from the newest; a new run wants a folder of its own\n"
    )
    # With lines, in a copy: what it says on the way.
    shown = [each if each != "none" else "lines" for each in command]
    shown[shown.index("--output") + 1] = str(tmp_path / "run")

    shutil.copytree(run.made, tmp_path / "run")
    assert cli.main([*shown, "--resume", "--steps", "40"]) == 0
    out, error = capsys.readouterr()
    assert f"going on from {tmp_path / 'run' / 'step-000000030'}" in out
    assert "200 read, 200 kept, 28 subwords\n" in out
    assert "validation: 20 read, 20 kept\n" in out
    assert re.search(r"all steps made, at step 40, best validation \d\.\d{4} at step \d+: ", out)
    assert "step 40  validation" in error


def test_going_on_as_it_was(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    """Without a preset it has the configuration that it had; a changed one is always told."""
    made = tmp_path / "run"
    shutil.copytree(run.made, made)
    command = ("train", *run.files, *run.more, "--tokens", 256, "--sentences", 32, "--resume")
    quiet = ("--progress", "none", "--output", made)
    assert cli.main([str(x) for x in (*command, *quiet, "--steps", 31)]) == 0
    found, before = newest(made), newest(run.made)
    assert found is not None and before is not None and found.step == 31
    assert found.config == before.config.replace({"steps": 31})
    assert "goes on with steps=31, and 30 before\n" in capsys.readouterr().err
    rate = ("--set", "learning_rate=0.003", "--steps", 32)
    assert cli.main([str(x) for x in (*command, *quiet, *rate)]) == 0
    assert "learning_rate=0.003, and 0.002 before" in capsys.readouterr().err


def test_what_is_said_is_checked_together(
    run: SimpleNamespace, capsys: Capture, tmp_path: Path
) -> None:
    """Of a schedule that the steps make long enough, of --separate, of what a later layer mends."""
    told = ("--set", "schedule=linear", "--set", "warmup=6000")
    given = ("train", *run.files, *SMALL, *told, "--steps", 60_000, "--epochs", 1)
    relpos_says(capsys, *given, "--output", tmp_path / "long")
    on = ("train", "--resume", "--output", tmp_path / "long", "--progress", "none")
    for more in (("--steps", 70_000, "--epochs", 2), ("--epochs", 3)):
        relpos_says(capsys, *on, *more)  # the second reads what the first has kept
    found = newest(tmp_path / "long")
    assert found is not None and (found.config.warmup, found.config.steps) == (6000, 70_000)
    again = ("--config", tmp_path / "long" / "run.toml", "--epochs", 1, "--progress", "none")
    relpos_says(capsys, "train", *again, "--output", tmp_path / "again")
    late = ("--start", run.made, "--set", "schedule=linear", "--set", "warmup=31", "--steps", 32)
    relpos_says(capsys, "train", *run.files, *late, *again[2:], "--output", tmp_path / "tuned")
    sizes = ("--set", "source_vocabulary=90", "--set", "target_vocabulary=91")
    apart = ("train", *run.files, *SMALL, "--separate", *sizes, "--steps", 1)
    relpos_says(capsys, *apart, "--output", tmp_path / "apart")
    shared = relpos_says(
        capsys, *apart, "--set", "share_embeddings=1", "--output", tmp_path / "x", status=1
    )
    assert "share_embeddings: expected false with --separate, got true" in shared
    (tmp_path / "six.toml").write_text("preset = 'tiny'\nheads = 6\n")
    six = ("train", *run.files, "--config", tmp_path / "six.toml", "--subwords", "words")
    quiet = ("--steps", 1, "--progress", "none", "--output", tmp_path / "six")
    said = relpos_says(capsys, *six, *quiet, status=1)
    assert said.startswith(f"relpos: {tmp_path / 'six.toml'}: config: width=64, must be a multiple")
    relpos_says(capsys, *six, *quiet, "--set", "width=96")


def test_a_model_is_not_trained_over(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    """Of a mean, and of a checkpoint, the vocabulary would be another run's."""
    mean = tmp_path / "mean"
    relpos_says(capsys, "average", run.made, "--output", mean)
    shutil.copytree(run.made / "step-000000030", tmp_path / "one")
    for folder in (mean, tmp_path / "one"):
        before = {x: x.read_bytes() for x in folder.rglob("*") if x.is_file()}
        said = relpos_says(capsys, "train", *run.files, *SMALL, "--output", folder, status=1)
        assert said.startswith(f"relpos: --output: {folder} has a model of its own, ")
        said = relpos_says(capsys, "demo", "--output", folder, status=1)
        assert said.startswith(f"relpos: --output: {folder} has a model of a training run")
        assert before == {x: x.read_bytes() for x in folder.rglob("*") if x.is_file()}


def test_an_average_begun_or_ended_on_the_way(
    run: SimpleNamespace, capsys: Capture, tmp_path: Path
) -> None:
    shutil.copytree(run.made, tmp_path / "run")
    on = ("train", "--resume", "--output", tmp_path / "run", "--set", "ema=0.9")
    said = relpos_says(capsys, *on, "--progress", "none", "--steps", 31, status=1)
    assert said.startswith("relpos: config: not that of this run: ema=0.9, and 0 before: ")


def test_a_lost_standard_error_is_no_failure(run: SimpleNamespace) -> None:
    command = f"relpos translate {shlex.quote(str(run.made))} /dev/null"
    script = f"{shlex.quote(sys.executable)} -m {command} --average 99 2>/dev/full"
    given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ran = subprocess.run(["sh", "-c", script], capture_output=True, env=given, cwd=run.folder)
    assert ran.returncode == 0, ran


def test_a_name_that_begins_as_options_do(
    run: SimpleNamespace, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-odd").write_text("\n")
    assert relpos_says(capsys, "translate", run.made, "--beam", 1, "--", "-odd") == "\n"
    assert relpos_says(capsys, "translate", run.made, "--", "-odd") == "\n"


LIMITED = """
import os, resource, sys
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
os.execv(sys.executable, [sys.executable, "-m", "relpos", *sys.argv[2:]])
"""


def test_no_space_for_a_checkpoint(run: SimpleNamespace, tmp_path: Path) -> None:
    """A sentence and a status; with space the run goes on from the last one, bit for bit."""
    made, last = tmp_path / "run", "step-000000030"
    shutil.copytree(run.made, made)
    shutil.rmtree(made / last)
    before = sorted(made.rglob("*"))
    most = (run.made / last / checkpoint.OPTIMIZER).stat().st_size - 1
    command = ("train", "--resume", "--output", str(made), "--progress", "none")
    failed = subprocess.run(
        [sys.executable, "-c", LIMITED, str(most), *command],
        capture_output=True, text=True, env=environment(), cwd=tmp_path,
    )  # fmt: skip
    told = rf"relpos: cannot write '{made}/\S+/optimizer\.safetensors': File too large\n"
    assert re.fullmatch(told, failed.stderr) and failed.returncode == 1
    assert sorted(made.rglob("*")) == before
    assert cli.main([*command]) == 0
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        assert (made / last / name).read_bytes() == (run.made / last / name).read_bytes()


def test_subwords_by_themselves(capsys: Capture, tmp_path: Path) -> None:
    """Few lines give few tokens; a model of sentencepiece is taken as it is."""
    pytest.importorskip("sentencepiece")
    source, target = text_files.write_pairs(tmp_path, "train", 50)
    files = ("train", "--source", source, "--target", target, "--steps", 1)  # small, of 8,000
    rest = ("--set", "max_length=128", "--progress", "lines", "--tokens", 256)
    said = relpos_says(capsys, *files, *rest, "--output", tmp_path / "run")
    assert (found := re.search(r"50 kept, (\d+) subwords\n", said)) and 256 < int(found[1]) < 999
    model = tmp_path / "run" / "tokenizer" / "sentencepiece.model"
    given = (*files, *rest, "--output", tmp_path / "other", "--subwords", model)
    assert f"50 kept, {found[1]} subwords\n" in relpos_says(capsys, *given)
    said = relpos_says(capsys, *given, "--vocabulary", "99", status=1)
    assert said == f"relpos: --vocabulary: {model} is a vocabulary that is there\n"


def test_a_share_of_unknown_tokens_is_told(capsys: Capture, tmp_path: Path) -> None:
    source, target = text_files.write_pairs(tmp_path, "train", 50)
    few = ("--subwords", "words", "--vocabulary", 10, "--steps", 1, "--preset", "tiny")
    given = ("train", "--source", source, "--target", target, *few, "--output", tmp_path / "run")
    given = (*given, "--set", "max_length=32", "--progress", "lines")
    said = relpos_says(capsys, *given)
    assert re.search(r"50 kept, 10 subwords, [1-9]\d\.\d\d% of all tokens unknown to them\n", said)
    assert relpos_warns(capsys, *given[:-4], "--output", tmp_path / "other") == [
        "62% of all tokens are unknown: a larger vocabulary (--vocabulary N) knows more, and one of "
        "parts of words (subwords=None, --subwords bpe) all"
    ]
    own = ("--subwords", tmp_path / "run" / "tokenizer", "--steps", 1, "--output", tmp_path / "own")
    assert relpos_warns(capsys, *given[:5], *own, "--preset", "tiny") == [
        "62% of all tokens are unknown: this vocabulary is of another text; subwords=None "
        "(--subwords bpe) learns one of this"
    ]


@pytest.mark.parametrize(
    "preset",
    [
        ("small-language", "--set", "width=32", "--set", "feed_forward=16"),
        ("tiny-language", "--preset", "tiny-language"),
        ("tiny", "--preset", "tiny", "--set", "encoder.layers=0"),
    ],
    ids=["by itself", "a preset of its own", "of another"],
)
def test_a_language_model(preset: tuple[str, ...], capsys: Capture, tmp_path: Path) -> None:
    source, _ = text_files.write_pairs(tmp_path, "train", 100)
    given = ("--text", source, "--validation-text", source, "--output", tmp_path / "run")
    until = ("--subwords", "words", "--progress", "none", "--steps", "3", "--validate-every", "2")
    relpos_says(capsys, "train", *given, *preset[1:], *until)
    found = newest(tmp_path / "run")
    assert found is not None
    assert (found.config.encoder.layers, found.config.decoder.layers) == (0, 2)
    assert f'preset = "{preset[0]}"\n' in (tmp_path / "run" / "run.toml").read_text()


def test_bleu_of_validation(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    given = ("train", *run.files, *SMALL, "--output", tmp_path / "run", "--steps", 2)
    said = relpos_says(capsys, *given, "--validate-bleu", status=1)
    assert said == "relpos: --validate-bleu: there is no validation to translate\n"
    assert (
        cli.main([str(x) for x in (*given, *run.more, "--validate-bleu", "--progress", "lines")])
        == 0
    )
    assert re.search(r"accuracy \d+\.\d%  BLEU \d+\.\d\d  the best", capsys.readouterr().err)
    assert "validate_bleu = true\n" in (tmp_path / "run" / "run.toml").read_text()


def test_profile(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    output = ("--output", tmp_path / "run", "--steps", "7", "--validate-every", "7")
    said = relpos_says(capsys, "train", *run.files, *run.more, *SMALL, *output, "--profile")
    rows = {(words[0], words[1]): words for line in said.splitlines() if (words := line.split())}
    assert rows["operation", "pass"][2:] == ["calls", "ms", "share", "GFLOP/s", "GB/s"]
    updates = rows["update", "backward"]
    assert updates[2] == "7" and float(updates[3]) > 0
    for name in ("encoder.*.feed_forward.in", "decoder.*.attention", "decoder.*.cross.kv", "loss"):
        assert (name, "forward") in rows
    backward = rows["encoder.*.attention.qkv", "backward"]
    assert float(backward[5]) > 0 and backward[4].endswith("%")
    shares = [float(words[4][:-1]) for words in rows.values() if words[4:] and words[4][-1] == "%"]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))  # each of them rounded


@pytest.mark.parametrize("progress", ["none", "lines"])
def test_ctrl_c(run: SimpleNamespace, tmp_path: Path, progress: str) -> None:
    output = tmp_path / "run"
    command = ("train", *run.files, *SMALL, "--output", str(output), "--steps", str(10**9))
    command = (*command, "--progress", progress)
    child = subprocess.Popen(
        [sys.executable, "-m", "relpos", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path,
    )  # fmt: skip
    while not (output / LOG).exists() or not read_log(output):
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    if progress == "lines":
        told, _, error = error.rpartition("\n")
        assert told.endswith(
            "relpos: finishing the step, then saving; a second time leaves at once"
        )
    assert (child.returncode, error) == (130, "")
    assert newest(output) is not None


# ---- bad input -----------------------------------------------------------------------------------


def no_file(folder: Path) -> tuple[tuple[Any, ...], str]:
    return ("--source", folder / "none", "--target", folder / "b"), "none: No such file"


def unequal(folder: Path) -> tuple[tuple[Any, ...], str]:
    (folder / "a").write_text("one\ntwo\nthree\n")
    (folder / "b").write_text("eins\n")
    return ("--source", folder / "a", "--target", folder / "b"), "has 3 lines, .*b has 1"


def not_utf8(folder: Path) -> tuple[tuple[Any, ...], str]:
    (folder / "a").write_bytes(b"one\ntw\xffo\n")
    (folder / "b").write_text("eins\nzwei\n")
    return ("--source", folder / "a", "--target", folder / "b"), "a: line 2, byte 3"


def nothing_in_it(folder: Path) -> tuple[tuple[Any, ...], str]:
    (folder / "a").write_text("\n\n")
    (folder / "b").write_text("\n\n")
    return (
        "--source",
        folder / "a",
        "--target",
        folder / "b",
    ), "data: expected text in .*a, .*b, got 2 read, 2 empty, 0 kept"


def too_many_tokens(folder: Path) -> tuple[tuple[Any, ...], str]:
    pytest.importorskip("sentencepiece")
    for name in "ab":
        (folder / name).write_text("one two\nthree four\n")
    given = ("--source", folder / "a", "--target", folder / "b", "--subwords", "bpe")
    given = (*given, "--vocabulary", "8000")
    return given, "--vocabulary: 8,000 tokens are more than these lines give"


def too_few_tokens(folder: Path) -> tuple[tuple[Any, ...], str]:
    return (*too_many_tokens(folder)[0][:4], "--vocabulary", 2), "--vocabulary: expected 4"


def lines_for_an_encoder(folder: Path) -> tuple[tuple[Any, ...], str]:
    given = ("--text", folder / "a", "--preset", "small")
    return given, "--text: this model has an encoder: --preset small-language has none"


def pairs_for_a_decoder(folder: Path) -> tuple[tuple[Any, ...], str]:
    given = no_file(folder)[0]
    return (*given, "--set", "encoder.layers=0"), "--source: this model is a decoder alone"


def an_encoder_alone(folder: Path) -> tuple[tuple[Any, ...], str]:
    given = no_file(folder)[0]
    return (*given, "--set", "decoder.layers=0"), "decoder.layers: an encoder alone labels tokens"


def labels_for_text(folder: Path) -> tuple[tuple[Any, ...], str]:
    given = no_such_subwords(folder)[0][:4]
    return (
        *given,
        "--set",
        "encoder.relations=3",
    ), "encoder.relations=3: labels of pairs of tokens"


def no_such_field(folder: Path) -> tuple[tuple[Any, ...], str]:
    given = no_file(folder)[0]
    return (*given, "--set", "encoder.kk=3"), r"encoder\.kk"


def no_equals(folder: Path) -> tuple[tuple[Any, ...], str]:
    return (*no_file(folder)[0], "--set", "k"), "--set: expected NAME=VALUE"


def no_such_preset(folder: Path) -> tuple[tuple[Any, ...], str]:
    return (*no_file(folder)[0], "--preset", "huge"), "preset.*huge"


def no_such_subwords(folder: Path) -> tuple[tuple[Any, ...], str]:
    unequal(folder)
    (folder / "b").write_text("eins\nzwei\ndrei\n")
    given = ("--source", folder / "a", "--target", folder / "b")
    return (*given, "--subwords", "bp"), (
        "--subwords: expected bpe, unigram, words or a vocabulary, got bp: not there"
    )


def no_such_start(folder: Path) -> tuple[tuple[Any, ...], str]:
    given = (*no_such_subwords(folder)[0][:4], "--preset", "tiny")
    return (*given, "--start", folder / "nowhere"), "nowhere: there is no such model"


def too_many_threads(folder: Path) -> tuple[tuple[Any, ...], str]:
    given = no_such_subwords(folder)[0][:4]
    return (*given, "--threads", 100_000), "--threads is 100000, expected 1 to 1024.*"


def no_such_device(folder: Path) -> tuple[tuple[Any, ...], str]:
    given = no_such_subwords(folder)[0][:4]
    return (*given, "--device", "gpu"), "--device is 'gpu', expected cpu, cuda or cuda:N"


def half_validation(folder: Path) -> tuple[tuple[Any, ...], str]:
    given = ("--source", folder / "a", "--target", folder / "b", "--validation-source", "x")
    return given, "--validation-source and --validation-target belong together"


@pytest.mark.parametrize(
    "spoil",
    [
        no_file, unequal, not_utf8, nothing_in_it, no_such_field, no_equals, no_such_preset,
        no_such_subwords, half_validation, too_many_tokens, too_few_tokens, lines_for_an_encoder,
        pairs_for_a_decoder, an_encoder_alone, labels_for_text, no_such_start, too_many_threads,
        no_such_device,
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(
    capsys: Capture, tmp_path: Path, spoil: Callable[[Path], tuple[tuple[Any, ...], str]]
) -> None:
    given, message = spoil(tmp_path)
    words = () if "--subwords" in given else ("--subwords", "words")
    quiet = ("--output", tmp_path / "run", "--progress", "none")
    said = relpos_says(capsys, "train", *given, *words, *quiet, status=1)
    assert re.fullmatch(rf"relpos: .*{message}.*\n", said), said


@pytest.mark.parametrize("wrong", [("--steps", "0"), ("--minutes", "-1"), ("--nothing",)])
def test_wrong_usage(capsys: Capture, wrong: tuple[str, ...]) -> None:
    said = relpos_says(capsys, "train", "--text", "x", *wrong, status=2)
    assert said.splitlines()[-1].startswith("relpos") and "error" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("train", "--soruce", "x"),
            "unrecognized arguments: --soruce x (the nearest is --source)",
        ),
        (
            ("train", "--learning-rate", "3"),
            "arguments: --learning-rate 3 (a field of the configuration: --set learning_rate=3)",
        ),
        (
            ("train", "--encoder.k=3", "--dropout"),
            "--encoder.k=3 --dropout (a field of the configuration: --set encoder.k=3)",
        ),
        (
            ("train", "--max_lenght=3"),
            "--max_lenght=3 (the nearest is a field of the configuration: --set max_length=3)",
        ),
        (("train", "--warmup"), "--warmup (a field of the configuration: --set warmup=VALUE)"),
        (("train", "--resume", "run"), "arguments: run (the folder is --output run)"),
        (
            ("train", "--threads", "-1"),
            "--threads: expected a whole number, or 0 for the default, got -1",
        ),
        (
            ("train", "--text", "x", "--steps", "many"),
            "--steps: expected a whole number, 1 to 2,147,483,647, got many",
        ),
        (("train", "--tokens", "1" + 30 * "0"), "--tokens: expected a whole number, 1 to"),
        (("train", "--split", "1"), "--split: expected 0 or more and below 1, got 1"),
        (("train", "--split", "half"), "--split: expected 0 or more and below 1, got half"),
        (
            ("train", "--text", "x", "--minutes", "few"),
            "--minutes: expected minutes above 0, got few",
        ),
        (("train", "--seed", "-1"), "--seed: expected a whole number, 0 to 2^64 - 1, got -1"),
        (("demo", "--seed", str(1 << 64)), "--seed: expected a whole number, 0 to 2^64 - 1, got"),
        (("align", "run", "--sauce", "x"), "unrecognized arguments: --sauce"),
        (("align", "--soft", "x"), "--soft: expected a share from 0 to 1, got x"),
        (("evaluate", "--lengths", "x"), "--lengths: expected rising numbers from 1 on, got x"),
    ],
)
def test_wrong_usage_is_of_its_command(
    capsys: Capture, given: tuple[str, ...], message: str
) -> None:
    said = relpos_says(capsys, *given, status=2)
    assert said.startswith(f"usage: relpos {given[0]} ") and message in said


def test_models_and_files_may_stand_apart(capsys: Capture, tmp_path: Path) -> None:
    given = ("translate", tmp_path / "none", "--beam", "1", tmp_path / "text")
    said = relpos_says(capsys, *given, status=1)
    assert said == f"relpos: {tmp_path / 'text'}: No such file or directory\n"


def test_lines_that_are_too_long_are_told(
    run: SimpleNamespace, capsys: Capture, tmp_path: Path
) -> None:
    given = ("train", *run.files, *SMALL, "--set", "max_length=4", "--steps", "1")
    said = relpos_says(capsys, *given, "--progress", "lines", "--output", tmp_path / "run")
    found = re.match(r"200 read, (\d+) too long, (\d+) kept, ", said)
    assert found and 0 < int(found[1]) == 200 - int(found[2])
    for more, way in (
        (("--set", "max_length=4"), "max_length=N (--set max_length=N)"),
        (("--tokens", 4), "tokens=N (--tokens N)"),
        (("--set", "max_length=8"), None),
    ):
        given = ("train", *run.files, *SMALL, *more, "--steps", "1")
        said = relpos_warns(capsys, *given, "--output", tmp_path / str(way))
        share = f"{min(int(found[1]) / 200, 0.99):.0%} of the lines are too long, and left out"
        assert said == ([f"{share}: {way} takes longer ones"] if way else [])


# ---- streams that are not there, or cannot say it --------------------------------------------------


def relpos_under(closed: str, *arguments: Any, **more: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, some of whose streams the shell has closed."""
    command = shlex.join([sys.executable, "-m", "relpos", *map(str, arguments)])
    return subprocess.run(
        ["sh", "-c", f"{command} {closed}"],
        capture_output=True, text=True, env=environment() | more, cwd="/", check=False,
    )  # fmt: skip


def test_closed_streams(run: SimpleNamespace) -> None:
    done = relpos_under("<&- >&-", "translate", run.made, "--beam", "1")
    assert (done.returncode, done.stderr) == (0, "")
    done = relpos_under("2>&-", "translate", run.made, run.files[1], "--beam", "1")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 200
    done = relpos_under("2>&-", "translate", run.folder / "none")
    assert (done.returncode, done.stdout) == (1, "")


def test_what_the_terminal_cannot_say(run: SimpleNamespace) -> None:
    """The mean is there, and where it is can be told: no reason to fail."""
    output = run.folder / "Mittel ü"
    done = relpos_under("", "average", run.made, "--output", output, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "Mittel \\xfc" in done.stdout
    full = relpos_under("> /dev/full", "translate", run.made, run.files[1], "--beam", "1")
    assert (full.returncode, full.stderr) == (1, "relpos: No space left on device\n")


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("devices",), ("average",)])
def test_what_was_printed_is_written_before_the_end(
    run: SimpleNamespace, tmp_path: Path, arguments: tuple[Any, ...]
) -> None:
    """Or Python would tell of it at exit, in its own words and with its own status."""
    each = [arguments] * 2
    if arguments == ("average",):
        each = [("average", run.made, "--output", tmp_path / name) for name in "ab"]
    full = relpos_under("> /dev/full", *each[0])
    said = "relpos: standard output: No space left on device\n"
    assert (full.returncode, full.stderr) == (1, said)
    gone = relpos_under("| true", *each[1])
    assert gone.stderr == ""


# ---- average -------------------------------------------------------------------------------------


def test_average(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    output = tmp_path / "mean"
    said = relpos_says(capsys, "average", run.made, "--last", 2, "--output", output)
    assert said == f"mean of 2 checkpoints, steps 20 to 30: {output / 'model.safetensors'}\n"
    models = [
        relpos.Transformer.load(run.made / f"step-0000000{step}" / "model.safetensors")
        for step in (20, 30)
    ]
    mean = relpos.Transformer.load(output / "model.safetensors", training=False)
    for name, weights in mean.parameters.items():
        one, other = (model.parameters[name].astype("f8") for model in models)
        assert ((one + other) / 2).astype("f4").tobytes() == weights.tobytes(), name
    assert relpos.data.load_subwords(output / "tokenizer").size == len(text_files.WORDS) + 3
    said = relpos_says(capsys, "average", run.made, "-o", output, status=1)
    assert said == f"relpos: --output: {output} is there already; give another one\n"
    own = run.made / "average-000000030"
    own.mkdir()  # where the mean is written if nothing else is said
    said = relpos_says(capsys, "average", run.made, status=1)
    own.rmdir()
    assert said == f"relpos: --output: {own} is there already; give another one\n"
    said = relpos_says(capsys, "average", tmp_path, status=1)
    assert said == f"relpos: {tmp_path}: no checkpoint here\n"


def test_average_of_different_ones(tmp_path: Path, capsys: Capture) -> None:
    otherwise: dict[str, Any] = {
        "learning_rate": 0.5, "dropout": 0.3, "attention_dropout": 0.0, "activation_dropout": 0.2,
        "label_smoothing": 0.0, "smoothing": "others", "weight_decay": 0.1, "ema": 0.9,
        "beta1": 0.8, "beta2": 0.9, "adam_epsilon": 1e-6, "clip_norm": 2.0, "schedule": "noam",
    }  # fmt: skip
    for step, changes in ((1, {}), (2, otherwise), (3, {"encoder.k": 2}), (4, {"seed": 9})):
        model = relpos.Transformer(text_files.config().replace(changes), tokens=64)
        model.counters = step, step
        checkpoint.save(tmp_path, model)
    found = checkpoint.checkpoints(tmp_path)
    with pytest.raises(ValueError, match=r"seed: 9 in .*step-000000004, 7 in .*step-000000001"):
        average((found[0], found[3]), tmp_path / "mean")  # other weights from the beginning
    shutil.rmtree(found[3].folder)
    said = relpos_says(capsys, "average", tmp_path, status=1)
    assert re.fullmatch(r"relpos: encoder\.k: 2 in .*step-000000003, 3 in .*\n", said)
    average(found[:2], tmp_path / "mean")  # trained otherwise it is no other model
    (found[0].folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(OSError, match="step-000000001: model.safetensors has 0 bytes"):
        average(found[:2], tmp_path / "other")
    assert not (tmp_path / "other").exists()
    damaged = found[1].folder / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")  # as long as it was: its sum tells
    cli.main(["average", str(tmp_path), "--last", "2", "--output", str(tmp_path / "last")])
    said = capsys.readouterr()
    assert said.out == f"mean of 1 checkpoint, step 3: {tmp_path / 'last' / 'model.safetensors'}\n"
    assert "step-000000002: passed over: model.safetensors has another content" in said.err
    assert (tmp_path / "last" / "model.safetensors").read_bytes() == (
        found[2].folder / "model.safetensors"
    ).read_bytes()
    for each in found[:3]:
        (each.folder / "model.safetensors").write_bytes(b"")
    said = relpos_says(capsys, "average", tmp_path, status=1)
    assert said.splitlines()[3:] == [f"relpos: {tmp_path}: none of its checkpoints is whole"]


# ---- plot ----------------------------------------------------------------------------------------


def test_plot(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    relpos_says(capsys, "plot", run.made, run.made / LOG, "-o", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = relpos_says(capsys, "plot", tmp_path / "no run", "-o", "curves.doc", status=1)
    assert said.startswith("relpos: --output: expected an ending among ")


def test_plot_without_matplotlib(
    run: SimpleNamespace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_matplotlib.hide(monkeypatch)
    said = relpos_says(capsys, "plot", run.made, status=1)
    assert said == "relpos: plots: takes matplotlib, `pip install 'relpos[viz]'`\n"


def test_nothing_to_plot(capsys: Capture, tmp_path: Path) -> None:
    said = relpos_says(capsys, "plot", tmp_path, status=1)
    assert said == f"relpos: {tmp_path / LOG}: No such file or directory\n"
    (tmp_path / LOG).write_text("\n")
    said = relpos_says(capsys, "plot", tmp_path, status=1)
    assert said == f"relpos: {tmp_path}: no training step in this log\n"
