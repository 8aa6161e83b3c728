# SPDX-License-Identifier: Apache-2.0
"""What `relpos train` is told: TOML files, the run's own file, the command line over both."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import Capture, relpos_says
from relpos import cli
from relpos.cli import told
from relpos.train import checkpoint, newest, trainer
from relpos.train.ending import alone
from test_cli import SMALL, run

__all__ = ["run"]  # pytest finds the fixture by its name here


def test_toml_before_python_3_11(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("width = 32\n")
    reader = told.toml_reader(path)
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=r"run\.toml: takes tomli .*pip install 'relpos\[train\]'"
    ):
        told.read_toml(path)
    monkeypatch.setitem(sys.modules, "tomli", reader)
    assert told.read_toml(path) == {"width": 32}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--preset", "paper-base"), 25_000),
        (("--preset", "paper-big-enfr-absolute"), 25_000),
        (("--preset", "paper-base", "--accumulate-tokens", "8192"), 8192),
        (("--preset", "paper-base", "--tokens", "2048"), None),
        (("--preset", "small"), None),
        ((), None),
    ],
)
def test_the_papers_batches(
    given: tuple[str, ...], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25,000 tokens a side, in several batches, unless something else is asked for."""
    seen: list[told.Told] = []

    def train_on(options: Any, what: told.Told) -> int:
        seen.append(what)
        return 0

    monkeypatch.setattr("relpos.cli.training._train_on", train_on)
    files = ("--source", "a", "--target", "b", "--output", str(tmp_path / "run"))
    assert cli.main(["train", *files, *given]) == 0
    assert seen[0].loop.get("accumulate_tokens") == expected


def test_the_papers_batches_go_on(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    """A job's command says the same every time, and the preset need not be said again."""
    sizes = [f"--set={x}" for x in ("width=16", "heads=2", "feed_forward=16", "max_length=16")]
    sizes += [f"--set={stack}.layers=1" for stack in ("encoder", "decoder")]
    own = ("--subwords", "words", "--save-every", "1", "--output", tmp_path / "run", "--resume")
    given = ("train", *run.files, *own, "--progress", "none", *sizes)
    relpos_says(capsys, *given, "--preset", "paper-base", "--steps", "1")
    relpos_says(capsys, *given, "--preset", "paper-base", "--steps", "2")
    relpos_says(capsys, *given, "--steps", "3")
    found = newest(tmp_path / "run")
    assert found is not None and found.step == 3
    assert "accumulate_tokens = 25000\n" in (tmp_path / "run" / "run.toml").read_text()


def test_toml(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'preset = "tiny"\nwidth = 32\nfeed_forward = 64\ndropout = 0.2\nmax_length = 16\n'
        "[encoder]\nk = 5\n[decoder]\nk = 6\n"
        "[train]\nsteps = 4\ntokens = 256\nsave_minutes = 2\nminutes = inf\nsplit = 0\n"
    )
    output = tmp_path / "run"
    given = ("--config", path, "--subwords", "words", "--progress", "none", "--output", output)
    relpos_says(capsys, "train", *run.files, *given, "--set", "encoder.k=3", "--steps", "2")
    found = newest(output)
    assert found is not None and found.step == 2
    config = found.config
    assert (config.dropout, config.encoder.k, config.decoder.k, config.steps) == (0.2, 3, 6, 2)

    for wrong, message in (
        ("[encoder]\nkk = 5\n", r"encoder\.kk"),
        ("width = [1]\n", "width: expected a number"),
        ("[train]\nstep = 4\n", r"train\.step: no such option; the nearest is steps"),
        (
            "[train]\nx = 4\n",
            r"train\.x: no such option; there are steps, epochs, .*, validate_bleu",
        ),
        ("[train]\nlearning_rate = 1\n", r"train\.learning_rate: belongs at the top, before any "),
        ("[train]\nseed = 1\n", r"train\.seed: belongs at the top, before any table"),
        ("[data]\npreset = 'tiny'\n", r"data\.preset: belongs at the top, before any table"),
        ("[encoder]\ndropout = 0\n", r"encoder\.dropout: belongs at the top, before any table"),
        ("source = 'x'\n", r"source: belongs in \[data\]"),
        ("[data]\ntokens = 4\n", r"data\.tokens: belongs in \[train\]"),
        ("k = 4\n", r"k: belongs in \[encoder\] or \[decoder\]"),
        ("threads = 1\n", r"threads: is of the command line alone"),
        (
            "[training]\ntokens = 4\n",
            r"no table \[training\]; there are \[encoder\], \[decoder\], \[data\], \[train\]",
        ),
        ("preset = 'smal'\n", "config: there is no preset 'smal'; the nearest is 'small'"),
        (
            "[train]\nsteps = 1.5\n",
            r"train\.steps: expected a whole number, 1 to 2,147,483,647, got 1\.5",
        ),
        ("[train]\nsteps = true\n", r"train\.steps: expected a whole number, .*, got True"),
        ("[train]\nminutes = 0\n", r"train\.minutes: expected minutes above 0, got 0"),
        ("[train]\nsplit = 1\n", r"train\.split: expected 0 or more and below 1, got 1"),
        ("[train]\nsplit = 'x'\n", r"train\.split: expected a number, got 'x'"),
        ("train = 5\n", r"train: expected a table"),
        ("preset = 5\n", "preset: expected a name, got 5"),
        ("start = [1]\n", r"start: expected a name, got \[1\]"),
        ("data = 5\n", r"data: expected a table, \[data\], got 5"),
        ("[data]\nsources = 'x'\n", r"data\.sources: no such option; the nearest is source"),
        ("[data]\nx = 4\n", r"data\.x: no such option; there are source, target, .*, separate"),
        ("[data]\ntext = 5\n", r'data\.text: expected a file, "train\.en", or several, got 5'),
        ("[data]\ntext = []\n", r"data\.text: expected a file, .* got \[\]"),
        ("[data]\ntext = ['x', 5]\n", r"data\.text: expected a file, .* got \['x', 5\]"),
        ("[data]\nsubwords = 5\n", r"data\.subwords: expected text in quotes, got 5"),
        ("[data]\nvocabulary = 0\n", r"data\.vocabulary: expected a whole number, .* got 0"),
        ("[train]\nprecision = 'f16'\n", r"train\.precision: expected f32 or bf16, got 'f16'"),
        ("[train]\nrecompute = 1\n", r"train\.recompute: expected true or false, got 1"),
        ("[train]\ndevice = 1\n", r"train\.device: expected text in quotes, got 1"),
        ("width = \n", "not TOML"),
    ):
        path.write_text(wrong)
        output = tmp_path / "never"
        said = relpos_says(
            capsys, "train", *run.files, "--config", path, "--output", output, status=1
        )
        assert re.fullmatch(rf"relpos: {re.escape(str(path))}: .*{message}.*\n", said), said
        assert not output.exists()


def test_every_option_has_its_place() -> None:
    own = vars(parsed("train")).keys() - vars(parsed()).keys() - {"parser"}
    assert "threads" in own and [name for name in own if told._place_of(name) is None] == []


def test_a_folder_in_the_files_place(run: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.toml").mkdir()
    said = relpos_says(capsys, "train", *run.files, "--output", tmp_path, status=1)
    assert said == f"relpos: {tmp_path / 'run.toml'}: a folder, where the run's own file would be\n"
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_byte_order_mark_is_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbfpreset = 'tiny'\r\n")
    assert told.read_toml(path) == {"preset": "tiny"}


def weights_of(folder: Path, step: int) -> bytes:
    return (folder / f"step-{step:09}" / checkpoint.MODEL).read_bytes()


def test_a_run_goes_on_by_itself(
    run: SimpleNamespace, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 steps and 20 more from another folder, told nothing, are 40 steps; so is run.toml again."""
    folder = tmp_path / "work"
    folder.mkdir()
    for each in (*run.files[1::2], *run.more[1::2]):
        shutil.copy(each, folder)
    files = [Path(x).name if x[0] != "-" else x for x in (*run.files, *run.more)]
    options = ("--seed", 3, "--set", "dropout=0.2", "--tensorboard") if tensorboard() else ()
    command = ("train", *files, *SMALL, *options, "--save-every", 10, "--validate-every", 10)
    monkeypatch.chdir(folder)
    relpos_says(capsys, *command, "--output", "whole", "--set", "steps=40")
    relpos_says(capsys, *command, "--output", "parts", "--set", "steps=40", "--steps", 40)
    kept = (folder / "parts" / told.RUN_FILE).read_text()
    assert "\nsteps = 40\n" in kept.partition("[train]")[2]
    for step in (30, 40):
        shutil.rmtree(folder / "parts" / f"step-{step:09}")
    monkeypatch.chdir(tmp_path)
    going_on = ("train", "--resume", "--output", folder / "parts", "--progress", "none")
    relpos_says(capsys, *going_on)
    assert weights_of(folder / "parts", 40) == weights_of(folder / "whole", 40)
    assert (folder / "parts" / told.RUN_FILE).read_text() == kept
    if options:
        assert len(list((folder / "parts" / "events").iterdir())) == 2

    own = folder / "whole" / told.RUN_FILE
    relpos_says(capsys, "train", "--config", own, "--output", "again", "--progress", "none")
    assert weights_of(tmp_path / "again", 40) == weights_of(folder / "whole", 40)
    assert (tmp_path / "again" / told.RUN_FILE).read_text() == own.read_text()

    # What the command line says is kept too, and validation may be named without the rest.
    shown = (*going_on[:-1], "lines", "--steps", 50, "--validation-source")
    relpos_says(capsys, *shown, run.more[1], "--validation-target", run.more[3])
    config = told.told(parsed("train", *map(str, going_on[1:]))).config
    found = newest(folder / "parts")
    assert found is not None and found.step == 50 and config.steps == 50
    sizes = {
        name: found.config.source_vocabulary for name in ("source_vocabulary", "target_vocabulary")
    }
    assert config.replace(sizes) == found.config


def tensorboard() -> bool:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        return False
    return True


def parsed(*arguments: str) -> Any:
    return cli._parse(arguments)


def test_nothing_to_go_on_with(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    said = relpos_says(capsys, "train", "--resume", "--output", tmp_path, status=2)
    assert said.startswith(f"relpos train: {tmp_path}: no run.toml here to go on with; a run ")
    assert "what to train on?" in said
    own = tmp_path / told.RUN_FILE
    own.write_text(f"{told._HEAD}\npreset = 'tiny'\n")
    said = relpos_says(capsys, "train", "--resume", "--output", tmp_path, status=2)
    assert said.startswith(f"relpos train: {own}: names no text to go on with; a run ")
    own.write_text(f"{told._HEAD}\n[data]\ntext = 5\n")
    said = relpos_says(capsys, "train", "--resume", "--output", tmp_path, status=1)
    assert said.startswith(f"relpos: {own}: data.text: expected a file")
    # Where nothing has been trained, a command with a text of its own is as it stands.
    given = ("train", *run.files, *SMALL, "--steps", 1, "--resume", "--output", tmp_path)
    relpos_says(capsys, *given)
    assert str(run.files[1]) in (tmp_path / told.RUN_FILE).read_text()


def test_everything_in_toml(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    output, path = tmp_path / "run", tmp_path / "it.toml"
    path.write_text(
        f"preset = 'tiny'\nmax_length = 16\nseed = 5\n[data]\nsource = '{run.files[1]}'\n"
        f"target = ['{run.files[3]}', '{run.files[3]}']\nsubwords = 'words'\nvocabulary = 20\n"
        f"[train]\noutput = '{output}'\nsteps = 2\ntokens = 256\nrecompute = true\n"
        "precision = 'f32'\ndevice = 'cpu'\ntensorboard = false\n"
    )
    quiet = ("--config", path, "--progress", "none")
    said = relpos_says(capsys, "train", *quiet, status=1)
    assert said == "relpos: --target: expected as many files as of the source, 1, got 2\n"
    source = ("--source", run.files[1], run.files[1], "--seed", "6")
    relpos_says(capsys, "train", *quiet, *source)
    found = newest(output)
    assert found is not None and (found.step, found.config.seed) == (2, 6)
    assert found.config.target_vocabulary == 20
    loop = told.told(parsed("train", "--config", str(path), "--tensorboard")).loop
    assert loop == {
        "steps": 2, "tokens": 256, "recompute": True, "precision": "f32", "device": "cpu",
        "tensorboard": True,
    }  # fmt: skip
    options = ("--recompute", "--device", "cuda:1", "--precision", "bf16", "--validate-bleu")
    assert told.told(parsed("train", *options)).loop == {
        "recompute": True, "device": "cuda:1", "precision": "bf16", "validate_bleu": True,
    }  # fmt: skip


def test_options_reach_the_trainer(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    given = ("train", *run.files, *SMALL, "--steps", 1, "--output", tmp_path / "run")
    said = relpos_says(capsys, *given, "--device", "nowhere", status=1)
    assert said.startswith("relpos: ") and "nowhere" in said
    assert not (tmp_path / "run").exists()
    relpos_says(capsys, *given, "--tensorboard", "--precision", "bf16")
    assert (tmp_path / "run" / "events").is_dir()
    (state,) = (tmp_path / "run").glob("step-*/state.json")
    assert json.loads(state.read_text())["build"]["precision"] == "bf16"


def test_the_last_to_say_it_is_right(run: SimpleNamespace, tmp_path: Path) -> None:
    """The number of steps too, which is a field and an option."""
    shutil.copytree(run.made, tmp_path / "run")
    path = tmp_path / "more.toml"
    path.write_text("steps = 99\n")
    going_on = ("train", "--resume", "--output", str(tmp_path / "run"))

    def steps(*more: str) -> tuple[int, int | None]:
        found = told.told(parsed(*going_on, *more))
        return found.config.steps, found.loop.get("steps")

    assert steps() == (30, 30)
    assert steps("--set", "steps=40") == (40, None)
    assert steps("--config", str(path)) == (99, None)
    assert steps("--config", str(path), "--steps", "50") == (50, 50)
    path.write_text("steps = 99\n[train]\nsteps = 98\n")
    assert steps("--config", str(path)) == (98, 98)


def test_what_a_run_began_with_stays(
    run: SimpleNamespace, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vocabulary and the model it started from, though both are gone; others are refused."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run.made, "made")
    shutil.copytree(Path(run.made) / "tokenizer", "voc")
    shown = [each for each in SMALL if each not in ("--subwords", "words")]
    shown[shown.index("none")] = "lines"
    started = ("train", *run.files, "--tokens", 256, "--progress", "lines", "--steps", 2)
    relpos_says(capsys, *started, "--start", "made", "--output", "from")
    relpos_says(
        capsys, "train", *run.files, *shown, "--steps", 2, "--subwords", "voc", "--output", "own"
    )
    for name in ("made", "voc"):
        shutil.rmtree(name)
    monkeypatch.chdir(run.folder)
    for name, line in (("from", 'start = "{}/made"'), ("own", 'subwords = "{}/voc"')):
        folder = tmp_path / name
        assert line.format(tmp_path) in (folder / told.RUN_FILE).read_text()
        kept = (folder / told.RUN_FILE).read_text()
        going_on = ("train", "--resume", "--output", folder, "--steps", 3)
        assert f"going on from {folder / 'step-000000002'}" in relpos_says(capsys, *going_on)
        assert (folder / told.RUN_FILE).read_text() == kept.replace("steps = 2", "steps = 3")
        for option, value in (("start", run.made), ("subwords", "unigram"), ("vocabulary", 77)):
            said = relpos_says(capsys, *going_on, f"--{option}", value, status=1)
            assert said.startswith(f"relpos: --{option}: this run was begun with"), said
            assert said.endswith(
                f", got {value}; leave it out, or begin a new run in another folder\n"
            )
        said = relpos_says(capsys, *going_on, "--separate", status=1)
        assert said.startswith("relpos: --separate: this run was begun without it, got True")
    # Every checkpoint cut short: it does not begin again over what can be saved of them.
    for each in (tmp_path / "from").glob("step-*"):
        (each / "model.safetensors").write_bytes(b"")
    said = relpos_says(capsys, "train", "--resume", "--output", tmp_path / "from", status=1)
    assert (
        f"{tmp_path}/from: none of its checkpoints is whole; a run that begins anew wants" in said
    )


def test_the_folder_above_a_link_is_that_of_what_it_means(
    run: SimpleNamespace, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """link/../x is not x: the files are as they were named, from the root."""
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "far" / "away"
    there.mkdir(parents=True)
    (tmp_path / "link").symlink_to(there)
    shutil.copy(run.files[1], tmp_path / "far" / "lines")
    shutil.copytree(run.made, tmp_path / "far" / "made")
    shutil.copytree(Path(run.made) / "tokenizer", tmp_path / "far" / "voc")
    files = ("train", "--source", "link/../lines", "--target", "link/../lines", "--steps")
    started = (*files, 1, "--tokens", 256, "--progress", "none", "--start", "link/../made")
    relpos_says(capsys, *started, "--output", "from")
    given = [each for each in SMALL if each not in ("--subwords", "words")]
    relpos_says(capsys, *files, 1, *given, "--subwords", "link/../voc", "--output", "own")
    for name, line in (("from", 'start = "{}/made"'), ("own", 'subwords = "{}/voc"')):
        text = (tmp_path / name / told.RUN_FILE).read_text()
        assert line.format(tmp_path / "link" / "..") in text
        assert f'source = ["{tmp_path}/link/../lines"]' in text
    # Named in another way it is the same.
    going_on = ("train", "--resume", "--output", "own", "--steps", 2, "--subwords")
    relpos_says(capsys, *going_on, "far/voc")
    said = relpos_says(capsys, *going_on, "voc", status=1)
    assert said.startswith(f"relpos: --subwords: this run was begun with {tmp_path}/link/../voc, ")


@pytest.mark.parametrize("sides", [("source", "target"), ("source",), ("target",)])
def test_the_vocabulary_of_a_run_has_its_size(
    run: SimpleNamespace, capsys: Capture, sides: tuple[str, ...]
) -> None:
    """Another one is refused as --vocabulary is, with a text and without."""
    found = newest(run.made)
    assert found is not None
    had = found.config.target_vocabulary

    def going_on(*files: str, size: int) -> list[str]:
        sizes = (x for side in sides for x in ("--set", f"{side}_vocabulary={size}"))
        return ["train", "--resume", "--output", str(run.made), *files, *sizes]

    for files in ((), run.files):
        said = relpos_says(capsys, *going_on(*files, size=300), status=1)
        assert said == (
            f"relpos: {sides[0]}_vocabulary: this run has {had}, got 300; leave it out, or begin a "
            "new run in another folder\n"
        )
        for size in (had, 256):  # what it has, and what the preset asked for
            config = told.told(parsed(*going_on(*files, size=size))).config
            assert (config.source_vocabulary, config.target_vocabulary) == (256, 256)


def test_what_was_meant_may_be_said(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    """The kind of subwords that a run has by default."""
    short = ("--preset", "tiny", "--set", "max_length=16", "--tokens", 256, "--progress", "none")
    given = ("train", *run.files, *short, "--vocabulary", 300)
    relpos_says(capsys, *given, "--output", tmp_path, "--steps", 1)
    going_on = ("train", "--resume", "--output", tmp_path, "--steps", 2, "--progress", "none")
    relpos_says(capsys, *going_on, "--subwords", "bpe")
    said = relpos_says(capsys, *going_on, "--subwords", "unigram", status=1)
    assert "--subwords: this run was begun with bpe, got unigram" in said


def test_names_of_no_letters(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    given = ("train", *run.files, "--output", tmp_path / "run")
    for name in ("output", "start", "subwords", "preset", "source", "validation-source"):
        said = relpos_says(capsys, *given, f"--{name}", "", status=1)
        assert said == f"relpos: --{name}: expected a name, got ''\n"
    file = tmp_path / "run.toml"
    for name, toml in (
        ("start", 'start = ""'), ("data.source", '[data]\nsource = ["a", ""]'),
        ("data.subwords", '[data]\nsubwords = ""'), ("train.output", '[train]\noutput = ""'),
    ):  # fmt: skip
        file.write_text(toml)
        said = relpos_says(capsys, "train", "--config", file, status=1)
        assert said == f"relpos: {file}: {name}: expected a name, got ''\n"
    said = relpos_says(capsys, *given, "--device", "", status=1)
    assert "cpu, cuda or cuda:N" in said


def test_the_whole_command_again_says_the_same(
    run: SimpleNamespace, capsys: Capture, tmp_path: Path
) -> None:
    """The file stays what another run can be made from."""
    output = tmp_path / "run"
    given = ("train", *run.files, *SMALL, "--vocabulary", 20, "--output", output, "--steps")
    relpos_says(capsys, *given, 2)
    kept = (output / told.RUN_FILE).read_text()
    relpos_says(capsys, *given, 3, "--resume")
    assert (output / told.RUN_FILE).read_text() == kept.replace("steps = 2", "steps = 3")
    bare = ("train", *run.files, "--tokens", 256, "--sentences", 32, "--progress", "none")
    relpos_says(capsys, *bare, "--output", output, "--steps", 4, "--resume")
    text = (output / told.RUN_FILE).read_text()
    assert 'subwords = "words"\nvocabulary = 20\n' in text and "source_vocabulary" not in text
    again = ("train", "--config", output / told.RUN_FILE, "--progress", "none", "--output")
    relpos_says(capsys, *again, tmp_path / "again")
    found = newest(tmp_path / "again")
    assert found is not None and found.step == 4 and found.config.source_vocabulary == 20


@pytest.mark.parametrize("names", [(), ("files",), ("files", "config")])
def test_its_own_file_is_read_once(
    names: tuple[str, ...], run: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether the command names a text, so that it is no layer of what is told, or not."""
    more: list[str] = [str(each) for each in run.files] if "files" in names else []
    if "config" in names:
        config = tmp_path / "more.toml"
        config.write_text("dropout = 0.2\n")
        more += ["--config", str(config)]
    seen: list[str] = []
    read = told.read_toml
    monkeypatch.setattr(told, "read_toml", lambda path: (seen.append(path.name), read(path))[1])
    found = told.told(parsed("train", "--resume", "--output", str(run.made), *more))
    assert found.begun
    assert seen.count(told.RUN_FILE) == 1 and len(seen) == 1 + ("config" in names)


def test_nobody_elses_file_is_written(
    run: SimpleNamespace, capsys: Capture, tmp_path: Path
) -> None:
    """Neither one that was written by hand, nor that of a run that is at work."""
    path = tmp_path / told.RUN_FILE
    path.write_text("# mine\nmax_length = 16\n")
    given = ("train", *run.files, *SMALL, "--steps", 1, "--output", tmp_path)
    said = relpos_says(capsys, *given, "--config", path, status=1)
    assert said.startswith(f"relpos: {path}: was not written by `relpos train`")
    assert path.read_text() == "# mine\nmax_length = 16\n"
    path.unlink()
    relpos_says(capsys, *given)
    kept = path.read_text()
    with alone(tmp_path):
        said = relpos_says(
            capsys, "train", "--resume", "--output", tmp_path, "--steps", 5, status=1
        )
    assert "another process trains here" in said and path.read_text() == kept


def test_a_run_that_comes_too_late_leaves_the_file_of_the_other(
    run: SimpleNamespace, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that has begun and ended while this one read its text."""
    path, begin = tmp_path / told.RUN_FILE, trainer.Trainer.__init__

    def late(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        (tmp_path / "step-000000004").mkdir()
        path.write_text("# the other's\n")

    monkeypatch.setattr(trainer.Trainer, "__init__", late)
    given = ("train", *run.files, *SMALL, "--steps", 1, "--output", tmp_path)
    assert "another run has saved here" in relpos_says(capsys, *given, status=1)
    assert path.read_text() == "# the other's\n"


def test_a_file_may_be_called_as_an_option(
    run: SimpleNamespace, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("output").write_bytes(b"ba \xff\n")
    Path("text").write_text("[train]\nx = 1\n")
    said = relpos_says(
        capsys, "train", "--source", "output", "--target", "output", *SMALL, status=1
    )
    assert said.startswith("relpos: output: line 1")
    said = relpos_says(capsys, "train", *run.files, "--config", "text", status=1)
    assert said.startswith("relpos: text: train.x: no such option")


def test_a_name_that_toml_cannot_have(
    run: SimpleNamespace, capsys: Capture, tmp_path: Path
) -> None:
    """Training is as ever, and a run file that would tell something else is not left."""
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")
    shutil.copy(run.files[1], strange)
    own = tmp_path / "run" / told.RUN_FILE
    own.parent.mkdir()
    own.write_text(f"{told._HEAD}\n")
    given = ("train", "--source", strange, "--target", run.files[3], "--output", tmp_path / "run")
    assert cli.main([str(x) for x in (*given, *SMALL, "--steps", 1)]) == 0
    assert f"{own}: not written: a file's name is not UTF-8" in capsys.readouterr().err
    assert not own.exists() and newest(own.parent) is not None


def test_a_locale_without_unicode(run: SimpleNamespace, tmp_path: Path) -> None:
    """Names with its letters are written as ever, and read."""
    (tmp_path / "wö").mkdir()
    shutil.copy(run.files[1], tmp_path / "wö" / "sö")
    given = ["train", "--source", "sö", "--target", "sö", *SMALL, "--output", "lö c", "--steps"]
    going_on = ["train", "--resume", "--output", "lö c", "--progress", "none", "--steps"]
    package = str(Path(told.__file__).parents[2])
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": package}
    for command, steps in ((given, 1), (going_on, 2)):
        done = subprocess.run(
            [sys.executable, "-m", "relpos", *command, str(steps)],
            capture_output=True, text=True, cwd=tmp_path / "wö", env=os.environ | locale, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
        text = (tmp_path / "wö" / "lö c" / told.RUN_FILE).read_text()
        assert f'source = ["{tmp_path}/wö/sö"]' in text and f"steps = {steps}\n" in text


@pytest.mark.parametrize(
    "value", [True, False, 3, -1.5e-7, float("inf"), 'a "b" \\ \x7f\x01\nü', ["a", "b c"]]
)
def test_values_are_read_as_they_were_written(value: object, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f"value = {told._as_toml(value)}\n")
    assert told.read_toml(path) == {"value": value}
