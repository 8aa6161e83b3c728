# SPDX-License-Identifier: Apache-2.0
"""Alignments of chosen layers and heads, hard and soft, and `relpos align`."""

from __future__ import annotations

import gzip
import os
import re
import select
import subprocess
import sys
import unicodedata
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import relpos
from commands import Capture, relpos_prints
from relpos import Translator
from relpos.data import SentencePiece
from relpos.translator import words_of
from saved_models import VOCABULARY, random_model, save, spoil

SOURCES = ["ba be bi", "do du", "", "ku ko ka ba be", "fa", "  ", "ba be zz"]
TARGETS = ["ku ko", "da", "ba", "", "ba be bi bo", "do", "ku"]
TWO = {"decoder.layers": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("models")
    bad = random_model(**TWO)
    spoil(bad, "do")
    return SimpleNamespace(
        folder=folder,
        run=save(folder / "run", random_model(3, **TWO), random_model(1, **TWO)),
        other=save(folder / "other", random_model(2, **TWO)),
        language=save(folder / "language", random_model(**{"encoder.layers": 0})),
        bad=save(folder / "bad", bad),
    )


@pytest.fixture(scope="module")
def translator(models: SimpleNamespace) -> Translator:
    return Translator.load(models.run)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    for name, lines in (("source", SOURCES), ("target", TARGETS)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return tmp_path / "source", tmp_path / "target"


# ---- from Python ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, -1, [0, 1], [1, 1, 0]], ids=str)
@pytest.mark.parametrize("head", [None, 1, [0], [0, 1, 1]], ids=str)
def test_chosen_layers_and_heads_are_means_of_maps(
    translator: Translator, layer: Any, head: Any
) -> None:
    found = translator.align(SOURCES, TARGETS, layer=layer, head=head)
    whole = relpos.attention_maps(translator, SOURCES, TARGETS, kinds="cross")
    layers = np.atleast_1d(layer)
    heads = np.arange(2) if head is None else np.atleast_1d(head)
    for each, maps in zip(found, whole, strict=True):
        p = maps.maps["cross"].probabilities[layers][:, heads]
        np.testing.assert_allclose(each.weights, p.mean(axis=(0, 1)), rtol=0, atol=1e-6)
        n, m = len(maps.target_tokens) - 1, len(maps.source_tokens)
        assert each.weights.shape == (n + 1, m)
        best = {(int(each.weights[j].argmax()), j) for j in range(n)} if m else set()
        assert set(each.links) == best
        assert (each.source_words, each.target_words) == (tuple(range(m)), tuple(range(n)))


def test_an_ensemble_is_a_mean(models: SimpleNamespace) -> None:
    both = Translator.load([models.run, models.other])
    one, other = (Translator.load(x).align(SOURCES, TARGETS) for x in (models.run, models.other))
    for each, x, y in zip(both.align(SOURCES, TARGETS), one, other, strict=True):
        np.testing.assert_allclose(each.weights, (x.weights + y.weights) / 2, rtol=0, atol=1e-6)


def test_soft_links_are_of_words() -> None:
    """The tokens of a source word together, the mean of those of a target word."""
    text = ["Two dogs run.", "The dogs of two men run through the snow.", "Three women watch them."]
    subwords = SentencePiece.train(text, size=290)
    model = random_model(source_vocabulary=subwords.size, target_vocabulary=subwords.size)
    [each] = Translator(model, subwords).align(["watchmen run"], ["dogsnow watch them"])
    words = words_of(subwords, subwords.encode("watchmen run"))
    said = words_of(subwords, subwords.encode("dogsnow watch them"))
    assert (each.source_words, each.target_words) == (tuple(words), tuple(said))
    assert max(words) == 1 and len(words) > 3 and max(said) == 2 and len(said) > 4
    soft = np.zeros((3, 2))
    for j, row in enumerate(each.weights[:-1]):
        for i, weight in enumerate(row):
            soft[said[j], words[i]] += weight / said.count(said[j])
    np.testing.assert_allclose(each.soft, soft, rtol=0, atol=1e-6)
    np.testing.assert_allclose(each.soft.sum(axis=1), 1, rtol=0, atol=1e-6)
    assert each.weighted(0) == " ".join(
        f"{i}-{j}:{each.soft[j, i]:.3f}" for i in range(2) for j in range(3)
    )
    least = float(np.sort(each.soft.ravel())[3])
    assert len(each.weighted(least).split()) == 3 and each.weighted(1.1) == ""


def test_words_are_those_of_the_text() -> None:
    """sentencepiece reads an acute, a space that does not break and the like as spaces of its own."""
    text = ["Don´t go now, don´t run."] * 3 + ["Two dogs run through the snow."]
    subwords = SentencePiece.train(text, size=290)
    for line in ("don´t go now", "go\u00a0now run", "run \u2028 dogs  \u00b4 go", "dogs run"):
        tokens = subwords.encode(line)
        found = words_of(subwords, tokens, line)
        words = line.split()
        assert sorted(set(found)) == list(range(len(words))) and found == sorted(found)
        for number, word in enumerate(words):
            said = subwords.decode([t for t, w in zip(tokens, found, strict=True) if w == number])
            assert said.replace(" ", "") == unicodedata.normalize("NFKC", word).replace(" ", "")
    assert len(set(words_of(subwords, subwords.encode("don´t go")))) == 3
    model = random_model(source_vocabulary=subwords.size, target_vocabulary=subwords.size)
    [each] = Translator(model, subwords).align(["don´t go"], ["go don´t"])
    assert set(each.source_words) == {0, 1} == set(each.target_words)
    [said] = Translator(model, subwords).translate_all(
        ["don´t go"], search=relpos.Search(max_length=6), align=(-1, None)
    )
    assert all(i < 2 for i, _ in said.n_best[0].links or ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run\x85watch them", [0, 2]),  # one word to sentencepiece, two to Python
        ("run\x1cwatch them", [0, 2]),
        ("run\x0bwatch them", [0, 2]),
        ("\x85 run", [0]),
        ("\x85\u200b", [0]),
        ("run\u3000them", [0, 1]),
    ],
)
def test_what_parts_words_for_python_alone(text: str, words: list[int]) -> None:
    subwords = relpos.data.SentencePiece.train(["run", "watch them", "dogs watch"] * 9, 280)
    found = words_of(subwords, subwords.encode(text), text)
    assert sorted(set(found)) == words and found == sorted(found)


def test_words_are_those_that_are_said() -> None:
    """Of any tokens so many as decode makes, which drops <s> and writes " ⁇ " for the unknown."""
    text = ["Two dogs run.", "The dogs of two men run through the snow.", "Three women watch them."]
    subwords = SentencePiece.train(text, size=60, byte_fallback=False, fewer=True)
    random, sizes = np.random.default_rng(3), set()
    for _ in range(300):
        tokens = random.choice([0, 0, 1, 2, *range(subwords.size)], random.integers(1, 9)).tolist()
        found = words_of(subwords, tokens)
        words = subwords.decode(tokens).split()
        assert set(found) - {-1} == set(range(len(words))), [subwords.piece(x) for x in tokens]
        assert [number < 0 for number in found] == [x in (1, 2) for x in tokens] or not words
        sizes.add(len(words))
    assert len(sizes) > 5


def test_bytes_that_are_white_space_part_words() -> None:
    subwords = SentencePiece.train(["ba be", "be ba"] * 9, 265)
    pieces = {subwords.piece(token): token for token in range(subwords.size)}
    for byte in (9, 10, 13, 28, 32):
        said = [pieces[each] for each in ("▁ba", f"<0x{byte:02X}>", "b", "▁b")]
        assert len(subwords.decode(said).split()) == 3
        assert words_of(subwords, said) == [0, 1, 1, 2]


def test_every_token_of_the_longest_is_linked(translator: Translator) -> None:
    search = relpos.Search(min_length=translator.max_length, max_length=translator.max_length)
    [found] = translator.translate_all(["ba be bi"], search=search, align=(-1, None))
    links = found.n_best[0].links
    assert len(found.n_best[0].tokens) == translator.max_length
    assert {target for _, target in links} == set(range(translator.max_length))


def test_a_word_without_a_token() -> None:
    """As "\u200b" between two others: nothing looks anywhere when it is said."""
    weights = np.full((4, 2), 0.5, np.float32)
    each = relpos.Alignment(1, weights, (), (0, 1), (0, 2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert each.soft.tolist() == [[0.5, 0.5], [0, 0], [0.5, 0.5]]
        assert each.weighted() == "0-0:0.500 0-2:0.500 1-0:0.500 1-2:0.500"


def test_windows_have_running_numbers(translator: Translator) -> None:
    whole = translator.align(SOURCES, TARGETS)
    done: list[int] = []
    windows = ((SOURCES[i : i + 3], TARGETS[i : i + 3]) for i in range(0, 7, 3))
    found = list(translator.align_in_windows(windows, progress=done.append))
    assert [each.line for each in found] == done == [1, 2, 3, 4, 5, 6, 7]
    for each, other in zip(found, whole, strict=True):
        assert each.links == other.links
        np.testing.assert_allclose(each.weights, other.weights, rtol=0, atol=1e-6)
    with (
        pytest.raises(ValueError, match="targets: expected 1 as in sources, got 2"),
    ):
        list(translator.align_in_windows([(["ba"], ["ku", "ko"])]))
    with pytest.warns(
        relpos.TranslationWarning, match="line 2: 20 tokens, of which the model takes"
    ):
        list(translator.align_in_windows([(["ba"], ["ku"]), (["ku " * 20], ["ku"])]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layer": 2}, ValueError, "layer: expected -2 to 1, got 2"),
        ({"layer": [0, -3]}, ValueError, "layer: expected -2 to 1, got -3"),
        ({"layer": []}, ValueError, "layer: expected at least one, got none"),
        ({"layer": 0.5}, TypeError, "layer: expected integers"),
        ({"layer": None}, TypeError, "layer"),
        ({"head": 2}, ValueError, "head: expected 0 to 1, got 2"),
        ({"head": [0, -1]}, ValueError, "head: expected 0 to 1, got -1"),
        ({"head": []}, ValueError, "head: expected at least one, got none"),
        ({"head": [[0]]}, ValueError, "head: expected integers"),
        (
            {"layer": -(10**20)},
            ValueError,
            r"layer: expected integers below 2\^63 in magn.* got -10",
        ),
        (
            {"head": [0, 10**20]},
            ValueError,
            r"head: expected integers below 2\^63 in magn.* got 10",
        ),
    ],
)
def test_what_is_refused(
    translator: Translator, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        translator.align(["ba"], ["ku"], **options)


def test_the_binding_refuses_what_is_no_list(translator: Translator) -> None:
    core, batch = translator.models[0]._core, relpos.Batch([3], [0, 1], [1], [0, 1])._packed
    one = np.zeros(1, np.int64)
    for layers, heads, error, message in (
        (None, None, TypeError, "layers: expected int64, got None"),
        ([0], None, TypeError, "layers"),
        (one, one.astype(np.int32), TypeError, "heads"),
        (one[:0], None, ValueError, "layer_count=0, must be at least one"),
        (one, one[:0], ValueError, "head_count=0, must be at least 1"),
        (one + 2, None, ValueError, r"layers\[0\]=2, must be from -2 to 1"),
    ):
        with pytest.raises(error, match=message):
            core.alignments(batch, layers, heads)  # type: ignore[arg-type]


def test_a_model_without_a_source(models: SimpleNamespace) -> None:
    language = Translator.load(models.language)
    for call in (language.align, lambda *x: list(language.align_in_windows([x]))):
        with pytest.raises(ValueError, match="nothing to align to"):
            call(["ba"], ["ku"])


def test_numbers_that_are_not_finite(models: SimpleNamespace) -> None:
    translator = Translator.load(models.bad)
    with pytest.warns(
        relpos.TranslationWarning, match="line 2: the model's numbers are not finite"
    ):
        good, bad = translator.align(["ba be", "ba do"], ["ku", "ku"])
    assert not good.failed and good.links and good.weighted()
    assert bad.failed and bad.links == () and bad.pharaoh == bad.weighted() == ""


# ---- the command ---------------------------------------------------------------------------------


def test_files(
    models: SimpleNamespace, translator: Translator, capsys: Capture, files: tuple[Path, Path]
) -> None:
    given = ("align", models.run, "--source", files[0], "--target", files[1])
    expected = [each.pharaoh for each in translator.align(SOURCES, TARGETS)]
    assert [not line for line in expected] == [False, False, True, True, False, True, False]
    for where in ((), ("-o", "-")):
        said = relpos_prints(capsys, *given, *where)
        assert said.out.splitlines() == expected
        assert said.error == "relpos: warning: 1 token in 1 line unknown to the vocabulary\n"
    output = files[0].parent / "links"
    said = relpos_prints(capsys, *given, "-o", output)
    assert said.out == "" and output.read_text().splitlines() == expected
    which = ("--layer", "0", "-1", "--heads", "1")
    some = translator.align(SOURCES, TARGETS, layer=[0, -1], head=[1])
    said = relpos_prints(capsys, *given, *which)
    assert said.out.splitlines() == [each.pharaoh for each in some]
    said = relpos_prints(capsys, *given, *which, "--soft")
    assert said.out.splitlines() == [each.weighted() for each in some]
    assert re.fullmatch(r"(\d-\d:[01]\.\d{3} ?)+", said.out.splitlines()[0])
    whole = translator.align(SOURCES, TARGETS)
    for least in ("0", "0.4", "1"):
        said = relpos_prints(capsys, *given, "--soft", least, "--batch-tokens", "1")
        assert said.out.splitlines() == [each.weighted(float(least)) for each in whole]
    # the links of `relpos translate` where it is given targets
    said = relpos_prints(
        capsys, "translate", models.run, files[0], "--target", files[1], "--align"
    )  # fmt: skip
    assert said.out.splitlines() == expected
    ensemble = relpos_prints(
        capsys, "align", models.run, models.other, *given[2:], "--soft"
    )  # fmt: skip
    both = Translator.load([models.run, models.other]).align(SOURCES, TARGETS)
    assert ensemble.out.splitlines() == [each.weighted() for each in both]


def test_from_pipes_and_compressed(
    models: SimpleNamespace, translator: Translator, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "target.gz").write_bytes(gzip.compress("\r\n".join(TARGETS).encode()))
    expected = [each.pharaoh for each in translator.align(SOURCES, TARGETS)]
    given = ("align", models.run, "--target", tmp_path / "target.gz", "--source", "-")
    said = relpos_prints(capsys, *given, stdin="\n".join(SOURCES).encode())
    assert said.out.splitlines() == expected


def test_what_comes_before_a_line_that_cannot_be_read(
    models: SimpleNamespace, translator: Translator, capsys: Capture, files: tuple[Path, Path]
) -> None:
    expected = [each.pharaoh for each in translator.align(SOURCES, TARGETS)]
    bad, whole = files[0].parent / "bad", {"source": files[0], "target": files[1]}
    for side, file in whole.items():
        lines = file.read_bytes().splitlines(keepends=True)
        bad.write_bytes(b"".join([*lines[:4], b"\xff\n", *lines[5:]]))
        given = whole | {side: bad}
        options = ("--source", given["source"], "--target", given["target"])
        said = relpos_prints(capsys, "align", models.run, *options, status=1)
        assert said.out.splitlines() == expected[:4]
        assert f"{bad}: line 5, byte 1 of it" in said.error
    other = ("align", models.run, "--source", "-", "--target", files[1])
    assert relpos_prints(capsys, *other, stdin=bad.read_bytes(), status=1).out.count("\n") == 4


@pytest.mark.parametrize("sides", [("--source", "--target"), ("--target", "--source")])
def test_lines_are_answered_as_they_arrive(
    models: SimpleNamespace, tmp_path: Path, sides: tuple[str, str]
) -> None:
    arriving, there = sides
    (tmp_path / "there").write_text("ba\nbe\n")
    command = [
        sys.executable, "-m", "relpos", "align", models.run, arriving, "-",
        there, tmp_path / "there",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(relpos.__file__).parent.parent)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(2):
            process.stdin.write(b"ba\n")
            process.stdin.flush()
            assert select.select([process.stdout], [], [], 60)[0]  # it does not wait for the second
            assert process.stdout.readline() == b"0-0\n"
        process.stdin.close()
        assert process.stdout.read() == b"" and process.wait() == 0


@pytest.mark.parametrize(
    ("sources", "targets", "written", "told"),
    [
        (3, 2, 2, "target has 2 lines, .*source has 3"),
        (2, 3, 2, "target has 3 lines, .*source has 2"),
        (1, 0, 0, "target has 0 lines, .*source has 1"),
        (0, 1, 0, "target has 1 line, .*source has 0"),
        (5000, 4999, 4999, "target has 4,999 lines, .*source has 5,000"),
        (2048, 5000, 2048, "target has 5,000 lines, .*source has 2,048"),
    ],
)
def test_files_of_other_lengths(
    models: SimpleNamespace,
    capsys: Capture,
    tmp_path: Path,
    sources: int,
    targets: int,
    written: int,
    told: str,
) -> None:
    (tmp_path / "source").write_text("ba\n" * sources)
    (tmp_path / "target").write_text("ku\n" * targets)
    said = relpos_prints(
        capsys, "align", models.run, "--source", tmp_path / "source",
        "--target", tmp_path / "target", status=1,
    )  # fmt: skip
    assert said.out == "0-0\n" * written
    assert re.fullmatch(f"relpos: .*{told}: each line of one belongs to .*\n", said.error)


def test_a_line_that_fails(models: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("ba\ndo\nbe\n")
    (tmp_path / "target").write_text("ku\n" * 3)
    given = ("--source", tmp_path / "source", "--target", tmp_path / "target")
    for soft, first in (((), "0-0"), (("--soft",), "0-0:1.000")):
        said = relpos_prints(capsys, "align", models.bad, *given, *soft, status=1)
        assert said.out == f"{first}\n\n{first}\n"
        assert said.error == (
            "relpos: warning: line 2: the model's numbers are not finite, no links\n"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere: there is no such model"),
        (("--source", "nowhere"), "nowhere: No such file or directory"),
        (("--target", "nowhere"), "nowhere: No such file or directory"),
        (("--layer", "2"), "layer: expected -2 to 1, got 2"),
        (("--heads", "0", "5"), "--heads: expected 0 to 1, got 5"),
        (("-o", "{source}"), "--output: .*source is read as well"),
        (
            ("-o", "{run}/step-000000002/model.safetensors"),
            "--output: .*model.safetensors is read as well",
        ),
        (("--source", "{latin}"), "latin: line 2, byte 3 of it: 0xfc is not UTF-8"),
        (("--source", "-", "--target", "-"), "--target: standard input is --source already"),
        (("{language}",), "model: has no encoder, there is nothing to align to"),
    ],
)
def test_bad_input_is_told(
    models: SimpleNamespace,
    capsys: Capture,
    files: tuple[Path, Path],
    arguments: Any,
    message: str,
) -> None:
    folder = files[0].parent
    (folder / "latin").write_bytes("do\nGrüße\n".encode("latin-1"))
    names = {"source": files[0], "latin": folder / "latin"} | vars(models)
    given = ("--source", files[0], "--target", files[1])
    filled = [each.format(**names) for each in arguments]
    model, more = ([models.run], filled) if filled[0].startswith("-") else (filled, [])
    said = relpos_prints(capsys, "align", *model, *given, *more, status=1)
    assert re.fullmatch(rf"relpos: .*{message}.*\n", said.error), said.error
    assert files[0].read_text().splitlines() == SOURCES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "what is missing is a model and --source and --target"),
        (("run", "--source", "text"), "what is missing is --target"),
        (("--soft", "2"), "expected a share from 0 to 1, got 2"),
        (("--soft", "x"), "argument --soft: expected a share from 0 to 1, got x"),
        (("--layer", "x"), "argument --layer: invalid int value: 'x'"),
    ],
)
def test_what_was_typed_wrong(capsys: Capture, arguments: Any, message: str) -> None:
    said = relpos_prints(capsys, "align", *arguments, status=2)
    assert message in said.error and said.out == ""


def test_vocabularies_number_words() -> None:
    assert words_of(VOCABULARY, [5, 6, 7]) == [0, 1, 2]
