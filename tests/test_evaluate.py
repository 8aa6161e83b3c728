# SPDX-License-Identifier: Apache-2.0
"""Scores are sacrebleu's, ranges are of the right sentences, perplexity is that of training."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import no_matplotlib
import text_files
from commands import Capture, relpos_says
from relpos import Search, Translator, evaluation
from relpos.data import InOrder, TokenCache, Words, read_lines, read_pairs
from relpos.translation import Score, TranslationWarning
from saved_models import VOCABULARY, random_model, save, spoil

GOLDEN = Path(__file__).resolve().parent / "golden"
MT, PE, SRC = (GOLDEN / f"mlqe.{kind}" for kind in ("mt", "pe", "src"))


def bleu_by_hand(hypotheses: list[str], references: list[str]) -> float:
    """Papineni's formula over words as they stand, where every n-gram order has a match."""
    matches, totals = np.zeros(4), np.zeros(4)
    words = 0, 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        one, other = hypothesis.split(), reference.split()
        words = words[0] + len(one), words[1] + len(other)
        for n in range(1, 5):
            grams = [tuple(one[i : i + n]) for i in range(len(one) - n + 1)]
            wanted = [tuple(other[i : i + n]) for i in range(len(other) - n + 1)]
            totals[n - 1] += len(grams)
            matches[n - 1] += sum(min(grams.count(g), wanted.count(g)) for g in set(grams))
    brevity = min(0.0, 1 - words[1] / words[0])
    return 100 * math.exp(brevity + float(np.log(matches / totals).mean()))


# ---- golden scores -------------------------------------------------------------------------------


def test_golden_scores(capsys: Capture) -> None:
    """As sacrebleu 2.6.0 gave them when these lines were chosen."""
    given = ("evaluate", "--hypothesis", MT, "--reference", PE, "--source", SRC, "--json")
    found = json.loads(relpos_says(capsys, *given, "--lowercase"))
    scores = {each["name"]: each for each in found["metrics"]}
    assert round(scores["BLEU"]["value"], 2) == 80.64
    assert round(scores["BLEU, lower case"]["value"], 2) == 80.64
    assert round(scores["chrF2"]["value"], 2) == 91.54
    assert scores["BLEU"]["more"].startswith("94.3/84.3/78.4/72.9, brevity 0.982, 281 words to 286")
    signature = r"nrefs:1\|case:(\w+)\|eff:no\|tok:13a\|smooth:exp\|version:[\d.]+"
    assert re.fullmatch(signature, scores["BLEU"]["signature"])[1] == "mixed"  # type: ignore[index]
    lower = re.fullmatch(signature, scores["BLEU, lower case"]["signature"])
    assert lower is not None and lower[1] == "lc"
    assert [(x["least"], x["most"], x["sentences"]) for x in found["by_length"]] == [
        (1, 10, 5), (11, 20, 12), (21, 30, 3),
    ]  # fmt: skip
    assert [round(x["bleu"], 2) for x in found["by_length"]] == [93.75, 71.33, 92.78]
    assert found["likelihood"] is None and found["sentences"] == 20


def test_bleu_is_the_formula() -> None:
    said, wanted = (list(read_lines(path)) for path in (MT, PE))
    found = evaluation.bleu(said, [wanted], tokenize="none")
    assert found.value == pytest.approx(bleu_by_hand(said, wanted), rel=1e-12)
    upper = [line.translate({c: c - 32 for c in range(97, 123)}) for line in said]  # ß stays
    assert evaluation.bleu(upper, [wanted]).value < 20
    lower = evaluation.bleu(upper, [wanted], lowercase=True).value
    assert lower == pytest.approx(evaluation.bleu(said, [wanted], lowercase=True).value)


CORPORA = {
    ("train", "mixed"): 70.73, ("dev", "mixed"): 69.05, ("test20", "mixed"): 72.67,
    ("train", "lc"): 70.98, ("dev", "lc"): 69.30, ("test20", "lc"): 72.86,
}  # fmt: skip


@pytest.mark.skipif(
    "RELPOS_DATA" not in os.environ, reason="RELPOS_DATA names no folder of corpora"
)
@pytest.mark.parametrize(("part", "case"), CORPORA)
def test_golden_scores_of_whole_corpora(part: str, case: str) -> None:
    folder = Path(os.environ["RELPOS_DATA"]) / "mlqe-pe"
    said, wanted = (list(read_lines(folder / f"{part}.en-de.{x}.gz")) for x in ("mt", "pe"))
    found = evaluation.bleu(said, [wanted], lowercase=case == "lc")
    assert round(found.value, 2) == CORPORA[part, case]


# ---- ranges --------------------------------------------------------------------------------------


def test_ranges() -> None:
    sources = ["w " * n for n in (0, 1, 3, 4, 4, 9, 12)]
    good = "one two three four five"
    said = [good if n in (3, 4) else "no such thing at all" for n in range(7)]
    found = evaluation.by_length(said, [[good] * 7], sources, lengths=(3, 4, 6, 10))
    assert [(x.least, x.most, x.sentences) for x in found] == [
        (0, 3, 3), (4, 4, 2), (7, 10, 1), (11, None, 1),
    ]  # fmt: skip
    assert [x.bleu > 99 for x in found] == [False, True, False, False]
    assert [x.name for x in found] == ["0 to 3", "4 to 4", "7 to 10", "11 and more"]
    table = str(evaluation.evaluate(said, [[good] * 7], sources, lengths=(3,)))
    assert re.search(r"\n +0 to 3 +3 +\d+\.\d\d +1\.000\n +4 and more +4 +\d", table)


def test_ranges_that_are_refused() -> None:
    for lengths, got in (((20, 10), "20, 10"), ((5, 5), "5, 5"), ((0, 3), "0, 3")):
        with pytest.raises(
            ValueError, match=f"^lengths: expected rising numbers from 1 on, got {got}"
        ):
            evaluation.by_length(["a"], [["a"]], ["a"], lengths=lengths)
    for wrong, got in (([1.5], "float"), ([math.nan], "float"), ([True], "True"), ("12", "str")):
        with pytest.raises(TypeError, match=f"^lengths: expected an integer, got {got}$"):
            evaluation.by_length(["a"], [["a"]], ["a"], lengths=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^lengths: expected rising numbers from 1 on, got int$"):
        evaluation.by_length(["a"], [["a"]], ["a"], lengths=5)  # type: ignore[arg-type]
    once: Any = iter((1, 2))
    found = evaluation.by_length(["a"] * 3, [["a"] * 3], ["a", "a b", "a b c"], lengths=once)
    assert [x.most for x in found] == [1, 2, None]


def test_several_references() -> None:
    said = ["one two three four five"]
    one, other = ["one two three four six"], ["zero two three four five"]
    both = evaluation.bleu(said, [one, other])
    assert both.value > max(evaluation.bleu(said, [x]).value for x in (one, other))
    assert both.signature.startswith("nrefs:2|")
    [of_range] = evaluation.by_length(said, [one, other], ["a"])
    assert of_range.bleu == both.value


def test_words_are_those_of_the_tokenizer() -> None:
    said, wanted = ["one two three four, five"], ["one two three four , five"]
    for tokenize, alike in (("13a", True), ("none", False)):
        found = evaluation.evaluate(said, [wanted], ["a"], tokenize=tokenize)
        assert found.metrics[0].value == found.by_length[0].bleu
        assert (found.metrics[0].value > 99) == alike


def test_texts_that_are_refused() -> None:
    for translations, references, kind, sentence in (
        (["a"], ["a"], TypeError, r"references: expected lists of str, .* \[references\] is one"),
        (["a"], "a", TypeError, "references: expected lists of str, got str"),
        (["a"], [], ValueError, "references: expected one text or several, got none"),
        (["a"], [["a"], 3], TypeError, r"references\[1\]: expected a list of str, got int"),
        ("a", [["a"]], TypeError, "translations: expected a list of str, got str"),
        (None, [["a"]], TypeError, "translations: expected a list of str, got NoneType"),
        (["a", None], [["a", "b"]], TypeError, "translations: expected str, item 1 is None"),
        (["a", "b"], [["a"]], ValueError, "translations: 2 lines, the reference has 1"),
    ):
        for compare in (evaluation.evaluate, evaluation.bleu, evaluation.chrf):
            with pytest.raises(kind, match=f"^{sentence}"):
                compare(translations, references)  # type: ignore[operator]
        with pytest.raises(kind, match=f"^{sentence}"):
            evaluation.by_length(translations, references, ["a"])  # type: ignore[arg-type]
    for sources in ([], ["a", "b"]):
        with pytest.raises(
            ValueError, match=f"^sources: {len(sources)} lines, the reference has 1"
        ):
            evaluation.by_length(["a"], [["a"]], sources)
    with pytest.raises(ValueError, match="^tokenize: expected .*, got words"):
        evaluation.by_length(["a"], [["a"]], ["a"], tokenize="words")


# ---- a model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("evaluate") / "run", random_model())


def test_perplexity_is_that_of_training(run: Path, tmp_path: Path) -> None:
    """Validation of a training run has the same figures for the same text."""
    source, target = text_files.write_pairs(tmp_path, "test", 40, seed=3)
    cache = TokenCache.build(tmp_path / "cache", read_pairs(source, target), VOCABULARY)
    nll, hits, count = 0.0, 0.0, 0
    for batch in InOrder(cache, tokens=256, sentences=64, max_length=16):
        result = random_model().forward(batch)
        nll += result.nll * result.tokens
        hits += result.accuracy * result.tokens
        count += result.tokens
    sources, targets = (list(read_lines(path)) for path in (source, target))
    found = evaluation.likelihood_of(
        Translator.load(run), ["", *sources, "do"], ["da", *targets, " "]
    )
    assert found is not None and found.tokens == count
    assert found.nll == pytest.approx(nll / count, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.nll))
    assert found.accuracy == pytest.approx(hits / count)
    assert evaluation.likelihood_of(Translator.load(run), [""], ["da"]) is None


def test_what_a_language_model_thinks(capsys: Capture, tmp_path: Path) -> None:
    """The figures of validation; by place the same tokens, each counted once."""
    changes = {"encoder.layers": 0}
    folder = save(tmp_path / "run", random_model(**changes))
    lines = text_files.sentences(40, seed=5)
    text = tmp_path / "text"
    text.write_text("\n".join(["", *lines, " "]) + "\n")
    cache = TokenCache.build(tmp_path / "cache", read_lines(text), VOCABULARY)
    nll, hits, count = 0.0, 0.0, 0
    for batch in InOrder(cache, tokens=256, sentences=64, max_length=16):
        result = random_model(**changes).forward(batch)
        nll += result.nll * result.tokens
        hits += result.accuracy * result.tokens
        count += result.tokens
    told = json.loads(
        relpos_says(capsys, "evaluate", folder, "--text", text, "--lengths", "3,5", "--json")
    )
    assert (told["lines"], told["failed"]) == (40, 0)
    found = told["likelihood"]
    assert found["tokens"] == count and found["nll"] == pytest.approx(nll / count, rel=1e-5)
    assert found["accuracy"] == pytest.approx(hits / count)
    assert found["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    places = told["by_place"]
    assert [(x["least"], x["most"]) for x in places] == [(1, 3), (4, 5), (6, None)]
    assert places[0]["tokens"] == 3 * 40  # two words and the end, at least
    assert sum(x["tokens"] for x in places) == count
    assert sum(x["nll"] * x["tokens"] for x in places) == pytest.approx(nll, rel=1e-5)
    scores = Translator.load(folder).score(None, lines)
    by_hand = -np.concatenate([x.tokens[5:] for x in scores]).mean(dtype=np.float64)
    assert places[2]["nll"] == pytest.approx(by_hand)


def test_a_language_model_is_told_as_a_table_and_drawn(capsys: Capture, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", random_model(**{"encoder.layers": 0}))
    text = tmp_path / "text"
    text.write_text("ba be bi\n\n")
    picture = tmp_path / "places.png"
    said = relpos_says(capsys, "evaluate", folder, "--text", text, "--plot", picture)
    assert said.startswith("1 line\n\nperplexity ") and "% of 4 tokens\n" in said
    assert re.search(r"^ +1 to 8 +4 +[\d.]+ +\d", said, flags=re.MULTILINE)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_texts_of_language_models_that_are_refused(
    run: Path, capsys: Capture, tmp_path: Path
) -> None:
    language, text, empty = tmp_path / "run", tmp_path / "text", tmp_path / "empty"
    save(language, random_model(**{"encoder.layers": 0}))
    text.write_text("ba\n")
    empty.write_text("\n\n")
    for given, status, sentence in (
        (("--text", text), 2, "missing is a model"),
        ((run, "--text", text), 1, "this model has an encoder; give --source and --reference"),
        ((language, "--text", empty), 1, "relpos: --text: 2 lines, none of which has tokens"),
        ((language, "--text", text, "--beam", "2"), 1, "--beam: is of translations, --text of"),
        ((language, "--text", text, "--source", text), 1, "--source: is of translations"),
        ((language, "--source", text, "--reference", text), 1, "--text FILE is for it"),
    ):
        assert sentence in relpos_says(capsys, "evaluate", *given, status=status)
    for call, message in (
        (lambda: evaluation.evaluate_text(Translator.load(run), ["ba"]), "^translator: expected"),
        (lambda: evaluation.evaluate_text(Translator.load(language), ["ba"], places=(3, 2)),
         "^places: expected rising numbers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


def test_a_perplexity_beyond_numbers() -> None:
    score = Score(1, -1500.0, np.full(2, -750, np.float32), np.zeros(2, bool), 1)
    translator: Any = SimpleNamespace(_given=lambda *_: [], _scored=lambda _: [score])
    found = evaluation.likelihood_of(translator, ["ba"], ["ku"])
    assert found is not None and (found.nll, found.perplexity) == (750, math.inf)
    result = evaluation.Evaluation(1, (evaluation.Metric("BLEU", 0, ""),), found, ())
    assert "\nperplexity inf, accuracy 0.00% of 2 tokens" in str(result)
    assert '"perplexity": null' in json.dumps(result.as_json(), allow_nan=False)


class Pieces(Words):
    """As sentencepiece makes no token of what has no width."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text.replace("\u200b", ""))


def test_pairs_without_a_token_do_not_count() -> None:
    """Training drops them, whatever a side is written with."""
    translator = Translator(random_model(), Pieces(text_files.WORDS))
    found = evaluation.likelihood_of(translator, ["ba", "\u200b", "do"], ["ku", "ku", "\u200b"])
    alone = evaluation.likelihood_of(translator, ["ba"], ["ku"])
    assert found is not None and alone is not None and found.tokens == alone.tokens == 2
    assert found.nll == pytest.approx(alone.nll, rel=1e-5)


def test_a_model_is_evaluated(run: Path, capsys: Capture, tmp_path: Path) -> None:
    source, target = text_files.write_pairs(tmp_path, "test", 30, seed=3)
    output = tmp_path / "said"
    given = ("--source", source, "--reference", target, "--max-length", 8, "--beam", 2)
    said = relpos_says(capsys, "evaluate", run, *given, "-o", output, "--progress", "none")
    expected = Translator.load(run).translate(
        read_lines(source), search=Search(beam=2, max_length=8)
    )
    assert output.read_text().splitlines() == expected
    score = evaluation.bleu(expected, [list(read_lines(target))])
    assert said.startswith(f"30 sentences\n\nBLEU   {score.value:6.2f}  {score.signature}\n")
    assert re.search(r"\nperplexity \d+(\.\d+)?, accuracy \d+\.\d\d% of \d+ tokens", said)
    again = relpos_says(capsys, "evaluate", "--hypothesis", output, "--reference", target)
    assert again.splitlines()[:4] == said.splitlines()[:4] and "perplexity" not in again
    given = ("--hypothesis", output, "--reference", target, "--tokenize", "char")
    assert "|tok:char|" in relpos_says(capsys, "evaluate", *given)


def test_not_finite(capsys: Capture, tmp_path: Path) -> None:
    model = random_model()
    spoil(model, "do")
    run = save(tmp_path / "run", model)
    (tmp_path / "source").write_text("ba be\ndo\n")
    (tmp_path / "target").write_text("be ba\ndo\n")
    given = ("--source", tmp_path / "source", "--reference", tmp_path / "target")
    said = relpos_says(capsys, "evaluate", run, *given, "--max-length", 8, status=1)
    assert "relpos: warning: line 2: the model's numbers are not finite, no translation" in said


def test_lines_are_told_by_their_number() -> None:
    """Those that are empty don't count, and are counted."""
    model = random_model()
    spoil(model, "do")
    translator = Translator(model, VOCABULARY)
    with pytest.warns(TranslationWarning) as told:
        found = evaluation.likelihood_of(translator, ["", "ba", "do"], ["da", "ku", "ku"])
    assert [str(each.message) for each in told] == [
        "line 3: the model's numbers are not finite, no score"
    ]
    assert found is not None and found.tokens == 2
    with pytest.raises(
        ValueError, match="sources: expected what the translator is to read, got None"
    ):
        evaluation.evaluate(["ku"], [["ku"]], translator=translator)


def test_a_picture(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "lengths.png"
    given = ("evaluate", "--hypothesis", MT, "--reference", PE, "--plot", picture)
    relpos_says(capsys, *given, "--source", SRC, "--lengths", "5,10,15,20")
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = relpos_says(capsys, *given, status=1)
    assert said == "relpos: --plot: is of --source's lengths, and --source is not given\n"


def test_options_that_would_do_nothing(capsys: Capture, tmp_path: Path) -> None:
    given = ("evaluate", "--hypothesis", MT, "--reference", PE)
    for option, value in (("--lengths", "3,4"), ("--output", tmp_path / "out")):
        assert relpos_says(capsys, *given, option, value, status=1).startswith(
            f"relpos: {option}: "
        )
    assert not any(tmp_path.iterdir())


def test_a_picture_of_no_kind(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    given = ("evaluate", tmp_path, "--source", SRC, "--reference", PE, "--plot", "x.doc")
    assert "relpos: --plot: expected an ending among" in relpos_says(capsys, *given, status=1)


def test_no_picture_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    no_matplotlib.hide(monkeypatch)
    given = ("--hypothesis", MT, "--reference", PE, "--source", SRC, "--plot", tmp_path / "x.png")
    said = relpos_says(capsys, "evaluate", *given, status=1)
    assert said == "relpos: plots: takes matplotlib, `pip install 'relpos[viz]'`\n"


# ---- bad input -----------------------------------------------------------------------------------


def test_what_to_type_next(capsys: Capture) -> None:
    for given, missing in (
        ((), "a model, or --hypothesis, and --reference"),
        (("run",), "--source and --reference"),
        (("--reference", "r"), "a model, or --hypothesis"),
        (("run", "--reference", "r"), "--source"),
    ):
        said = relpos_says(capsys, "evaluate", *given, status=2)
        assert f"what is missing is {missing}." in said
        assert "relpos evaluate run --source test.en --reference test.de" in said
    both = ("evaluate", "run", "--hypothesis", "h", "--reference", "r")
    assert "give a model or --hypothesis" in relpos_says(capsys, *both, status=2)


def test_bad_input(run: Path, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("one\n")
    (tmp_path / "none").write_text("")
    short = ("evaluate", "--hypothesis", tmp_path / "short")
    said = relpos_says(capsys, *short, "--reference", PE, status=1)
    assert said == (
        "relpos: --hypothesis: 1 lines, the reference has 20: line i of one must be line i of the "
        "other\n"
    )
    nothing = ("evaluate", "--hypothesis", tmp_path / "none", "--reference", tmp_path / "none")
    assert "expected a line at least" in relpos_says(capsys, *nothing, status=1)
    kind = (*short, "--reference", tmp_path / "short", "--tokenize", "words")
    assert "tokenize: expected " in relpos_says(capsys, *kind, status=1)
    # What cannot be had is told before the work, not behind it; and nothing is overwritten for it.
    whole = ("evaluate", tmp_path, "--source", PE, "--reference", PE)
    assert "tokenize: " in relpos_says(capsys, *whole, "--tokenize", "words", status=1)
    there = tmp_path / "there"
    there.write_text("a translation of before")
    said = relpos_says(capsys, *whole, "--output", there, status=1)
    assert "no model here" in said and there.read_text() == "a translation of before"
    said = relpos_says(capsys, "evaluate", run, *whole[2:], "-o", tmp_path / "no" / "x", status=1)
    assert said.endswith("x: No such file or directory\n")
    said = relpos_says(capsys, "evaluate", run, *whole[2:], "-o", "-", status=1)
    assert "--output: expected a file, got -: standard output has the scores" in said
    missing = (*short, "--reference", tmp_path / "nowhere")
    assert "nowhere: No such file" in relpos_says(capsys, *missing, status=1)
    for wrong in ("5,5", "0,3", "a"):
        said = relpos_says(capsys, *short, "--reference", PE, "--lengths", wrong, status=2)
        assert "--lengths" in said
    twice = ("evaluate", tmp_path, "--source", "-", "--reference", PE, "-")
    assert "standard input is one of them alone" in relpos_says(capsys, *twice, status=1)
    # The text is compared before the model is loaded.
    given = ("--source", tmp_path / "short", "--reference", PE)
    assert "--source: 1 lines" in relpos_says(capsys, "evaluate", tmp_path, *given, status=1)
    alone = save(tmp_path / "alone", random_model(**{"encoder.layers": 0}))
    given = ("--source", PE, "--reference", PE)
    assert "has no encoder" in relpos_says(capsys, "evaluate", alone, *given, status=1)


def test_a_tokenizer_that_cannot_be_had(capsys: Capture, tmp_path: Path) -> None:
    """Told before the work, in a sentence."""
    if importlib.util.find_spec("MeCab") is not None:
        pytest.skip("ja-mecab can be had here")
    (tmp_path / "lines").write_text("a\n")
    given = ("--hypothesis", tmp_path / "lines", "--reference", tmp_path / "lines")
    said = relpos_says(capsys, "evaluate", *given, "--tokenize", "ja-mecab", status=1)
    assert "tokenize: ja-mecab cannot be had: " in said and "Traceback" not in said


def test_without_sacrebleu(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    given = ("evaluate", "--hypothesis", MT, "--reference", PE)
    said = relpos_says(capsys, *given, status=1)
    assert said == "relpos: evaluate: takes sacrebleu, `pip install 'relpos[train]'`\n"
