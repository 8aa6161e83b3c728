# SPDX-License-Identifier: Apache-2.0
"""`relpos inspect`: which picture comes of which words, and what is told instead of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import no_matplotlib
import relpos
from commands import Capture, relpos_says
from saved_models import random_model, save

TWO = {"encoder.layers": 2, "decoder.layers": 2}
SENTENCE = ("--source", "ba be do")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("inspect") / "run", random_model(1, **TWO))


def inspect(capture: Capture, *arguments: Any, status: int = 0) -> str:
    return relpos_says(capture, "inspect", *arguments, status=status)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The functions of relpos.plots that were called, with what."""
    pytest.importorskip("matplotlib")
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def watch(name: str) -> None:
        real = getattr(relpos.plots, name)

        def called(*given: Any, **more: Any) -> Any:
            calls.append((name, given, more))
            return real(*given, **more)

        monkeypatch.setattr(relpos.plots, name, called)

    for name in ("heads", "content_and_relation", "by_offset", "all_by_offset", "tables"):
        watch(name)
    return calls


@pytest.mark.parametrize(
    "words, function, more, layers, heads",
    [
        ((), "heads", {"show": "probabilities"}, (0, 1), (0, 1)),
        (("--kind", "cross", "--layer", 1), "heads", {"show": "probabilities"}, (1,), (0, 1)),
        (("--head", 1, "--show", "relation"), "heads", {"show": "relation"}, (0, 1), (1,)),
        (("--layer", 1, "--head", 0), "content_and_relation", {}, (1,), (0,)),
        (
            ("--layer", 1, "--head", 0, "--show", "attention"),
            "heads", {"show": "probabilities"}, (1,), (0,),
        ),
        (("--kind", "decoder", "--show", "offsets"), "all_by_offset", {}, (0, 1), (0, 1)),
        (("--layer", 1, "--show", "offsets"), "by_offset", {}, (1,), (0, 1)),
    ],
)  # fmt: skip
def test_pictures(
    run: Path, capsys: Capture, tmp_path: Path, drawn: Any,
    words: Any, function: str, more: Any, layers: Any, heads: Any,
) -> None:  # fmt: skip
    picture = tmp_path / "maps.png"
    said = inspect(capsys, run, *SENTENCE, "--target", "be ba", *words, "--out", picture)
    assert said == f"{picture}\n" and picture.read_bytes().startswith(b"\x89PNG")
    [(name, (maps, kind, *_), found)] = drawn
    assert (name, found) == (function, more)
    assert kind == (words[1] if "--kind" in words else "encoder") and list(maps.maps) == [kind]
    assert (maps.layers, maps.heads) == (layers, heads)
    assert maps.source_tokens == ("ba", "be", "do")
    if kind != "encoder":
        assert maps.target_tokens == ("<s>", "be", "ba")


def test_tables_need_no_sentence(run: Path, capsys: Capture, tmp_path: Path, drawn: Any) -> None:
    picture = tmp_path / "tables.svg"
    inspect(capsys, run, "--show", "tables", "--kind", "decoder", "--layer", 1, "-o", picture)
    assert b"<svg" in picture.read_bytes()
    assert [(name, given[1:]) for name, given, _ in drawn] == [("tables", ("decoder", 1))]
    told = inspect(
        capsys, run, "--show", "tables", "--source", "ba", "--out", picture, status=1
    )  # fmt: skip
    assert told == "relpos: --source: is of no use to --show tables\n"
    told = inspect(capsys, run, "--show", "tables", "--kind", "cross", "--out", picture, status=1)
    assert told == "relpos: --kind: cross attention has no tables of relations\n"
    nothing = ("--source", "ba", "--target", "ba", "--show", "relation", "--kind", "cross")
    told = inspect(capsys, run, *nothing, "--out", picture, status=1)
    assert told == "relpos: --show: cross attention of this model has no relation beside content\n"


def test_no_picture_of_no_relation(capsys: Capture, tmp_path: Path, drawn: Any) -> None:
    """Zeros would look as if position did nothing, which under RoPE is wrong."""
    turned = save(tmp_path / "turned", random_model(1, **{"encoder.position": "rope"}))
    words = (turned, *SENTENCE, "--kind", "encoder", "--show", "relation")
    told = inspect(capsys, *words, "--out", tmp_path / "x.png", status=1)
    assert told == (
        "relpos: --show: encoder attention of this model has no relation beside content\n"
    )
    assert not drawn


def test_maps_of_rounded_products(run: Path, capsys: Capture, tmp_path: Path) -> None:
    pages = []
    for words in ((), ("--precision", "f32"), ("--precision", "bf16")):
        inspect(capsys, run, *SENTENCE, "--target", "be ba", *words, "-o", tmp_path / "maps.html")
        pages.append((tmp_path / "maps.html").read_bytes())
    assert pages[0] == pages[1] != pages[2]


def test_the_best_checkpoint(run: Path, capsys: Capture, tmp_path: Path) -> None:
    words = (*SENTENCE, "--out", tmp_path / "maps.html")
    told = inspect(capsys, run, "--best", *words, status=1)
    assert told.endswith(": has no best checkpoint, as nothing was validated\n")


def test_a_page(
    run: Path, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no matplotlib, and has every kind unless one is asked for."""
    no_matplotlib.hide(monkeypatch)
    page = tmp_path / "maps.html"
    assert inspect(capsys, run, *SENTENCE, "--out", page) == f"{page}\n"
    text = page.read_text()
    assert "<html" in text and all(f'"{kind}"' in text for kind in ("encoder", "decoder", "cross"))
    inspect(capsys, run, *SENTENCE, "--kind", "encoder", "--out", page)
    assert len(page.read_text()) < len(text)


def test_a_language_model(capsys: Capture, tmp_path: Path, drawn: Any) -> None:
    model = random_model(2, **{"encoder.layers": 0, "source_vocabulary": 0})
    alone = save(tmp_path / "alone", model)
    picture = tmp_path / "maps.png"
    inspect(capsys, alone, "--target", "ba be", "--out", picture)
    [(_, (maps, kind), _)] = drawn
    assert kind == "decoder" and maps.target_tokens == ("<s>", "ba", "be")
    for words in (("--kind", "encoder", "--layer", 0), ("--kind", "encoder", "--show", "tables")):
        told = inspect(capsys, alone, "--target", "ba", *words, "--out", picture, status=1)
        assert told == "relpos: --kind: expected decoder, got encoder: this model has no encoder\n"
    told = inspect(capsys, alone, *SENTENCE, "--out", picture, status=1)
    assert told == "relpos: --source: this model has no encoder, it goes on from text: --target\n"


def test_layers_are_those_of_the_kind(capsys: Capture, tmp_path: Path) -> None:
    """The decoder has more of them, and the look of it at the source is one of each of its layers."""
    uneven = save(tmp_path / "uneven", random_model(1, **TWO | {"encoder.layers": 1}))
    words = (uneven, *SENTENCE, "--target", "ba", "--out", tmp_path / "maps.html", "--layer", 1)
    for kind in ("decoder", "cross"):
        inspect(capsys, *words, "--kind", kind)
    told = inspect(capsys, *words, "--kind", "encoder", status=1)
    assert told == "relpos: --layer: expected 0 to 0, got 1\n"


def test_endings_in_capitals(run: Path, capsys: Capture, tmp_path: Path) -> None:
    page = tmp_path / "MAPS.HTML"
    assert inspect(capsys, run, *SENTENCE, "--out", page) == f"{page}\n"
    assert "<html" in page.read_text()


def test_what_to_type_next(run: Path, capsys: Capture) -> None:
    told = inspect(capsys, status=2)
    assert "what is missing is a model and --source and --out" in told
    assert 'relpos inspect run --source "Two dogs run." --out maps.html' in told
    assert 'Of a language model it is --target "Two dogs run." instead of --source.' in told
    assert "missing is --out." in inspect(capsys, run, *SENTENCE, status=2)


@pytest.mark.parametrize(
    "words, message",
    [
        ((*SENTENCE, "--out", "maps.doc"), "--out: expected a file that ends in .html, .png, .svg, "
         ".pdf, got 'maps.doc'"),
        ((*SENTENCE, "--out", "m.html", "--show", "logits"), "--show: is for pictures; a page has "
         "all of it to choose from"),
        ((*SENTENCE, "--out", "m.html", "--layer", "2"), "--layer: expected 0 to 1, got 2"),
        ((*SENTENCE, "--out", "m.html", "--head", "-1"), "--head: expected 0 to 1, got -1"),
        ((*SENTENCE, "--out", "M.HTML", "--show", "logits"), "--show: is for pictures; a page has "
         "all of it to choose from"),
        (("--source", "", "--out", "m.html"), "--source: expected a sentence, got ''"),
        (("--source", " ", "--target", "ba", "--out", "m.png"), "--source: expected a sentence, "
         "got ' '"),
        (("--target", "ba", "--out", "m.html"), "--source: expected a sentence: this model has an "
         "encoder"),
    ],
)  # fmt: skip
def test_refused(
    run: Path, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    words: Any, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert inspect(capsys, run, *words, status=1) == f"relpos: {message}\n"
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(
    run: Path, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before any work is done."""
    no_matplotlib.hide(monkeypatch)
    monkeypatch.setitem(sys.modules, "relpos.translator", None)
    told = inspect(capsys, run, *SENTENCE, "--out", tmp_path / "maps.png", status=1)
    assert told == "relpos: plots: takes matplotlib, `pip install 'relpos[viz]'`\n"
