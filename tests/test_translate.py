# SPDX-License-Identifier: Apache-2.0
"""Text in, text out: order, what becomes of odd lines, loading, scores, links, and the commands."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import relpos
import text_files
from commands import Capture, relpos_prints
from relpos import Search, Translator, cli
from relpos.cli import lines as cli_lines
from relpos.data import SentencePiece, Words
from relpos.train import CheckpointError, CheckpointWarning, checkpoint
from relpos.train.average import average
from relpos.translation import TranslationWarning
from relpos.translator import words_of
from saved_models import LONGEST, VOCABULARY, random_model, save, spoil, tokens

PACKAGE = Path(relpos.__file__).parent.parent
SHORT = Search(max_length=8)
LINES = text_files.sentences(60, seed=5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Runs: of three checkpoints, of a language model, and of one that knows a word it hates."""
    folder = tmp_path_factory.mktemp("models")
    bad = random_model()
    spoil(bad, "do")
    alone = {"encoder.layers": 0}
    return SimpleNamespace(
        folder=folder,
        run=save(folder / "run", *(random_model(seed) for seed in (3, 4, 1))),
        language=save(folder / "language", random_model(**alone)),
        bad=save(folder / "bad", bad),
    )


@pytest.fixture(scope="module")
def translator(models: SimpleNamespace) -> Translator:
    return Translator.load(models.run)


def one_by_one(lines: list[str], search: Search = SHORT) -> list[str]:
    """By the model alone, a sentence at a time."""
    model, said = random_model(), []
    for line in lines:
        source = tokens(line)
        [[best]] = model.search(relpos.Batch(source, [0, len(source)]), search)
        said.append(VOCABULARY.decode(best.tokens.tolist()))
    return said


# ---- translating ---------------------------------------------------------------------------------


def test_as_many_hypotheses_as_a_batch_has_tokens() -> None:
    translator = Translator(random_model(), VOCABULARY)  # of 256 tokens and 64 sentences
    search = Search(beam=16, max_length=3)
    assert len(translator.translate(["ba"] * 64, search=search)) == 64


def test_in_their_order(translator: Translator) -> None:
    """Batches are by length, answers are not."""
    assert len({len(line.split()) for line in LINES}) > 4
    expected = one_by_one(LINES)
    assert len(set(expected)) > 10
    assert translator.translate(LINES, search=SHORT) == expected
    assert translator.translate(LINES, search=SHORT, batch_tokens=20) == expected
    told: list[int] = []
    found = translator.stream(iter(LINES), search=SHORT, window=7, progress=told.append)
    assert [each.text for each in found] == expected
    assert told == list(range(1, 61))


def test_while_it_is_read(translator: Translator) -> None:
    """No line is read before those of the window before it have been given."""
    read = 0

    def reading() -> Iterator[str]:
        nonlocal read
        for line in LINES:
            read += 1
            yield line

    found = translator.stream(reading(), search=SHORT, window=4)
    for i, each in enumerate(found):
        assert each.line == i + 1 and read == 4 * (i // 4 + 1)


def test_empty_lines(translator: Translator) -> None:
    lines = ["", "ba be", "  ", "\u2003", "do"]
    found = translator.translate_all(lines, search=SHORT)
    assert [each.text for each in found] == [
        "",
        *one_by_one(["ba be"]),
        "",
        "",
        *one_by_one(["do"]),
    ]
    assert [each.failed for each in found] == [False] * 5
    assert [len(each.n_best) for each in found] == [0, 1, 0, 0, 1]
    assert found[0].score == 0
    assert translator.translate([]) == [] and translator.translate(["", ""]) == ["", ""]


def test_what_is_too_long_is_cut(translator: Translator) -> None:
    long = " ".join(text_files.WORDS[:LONGEST]) + " gu gu"
    with pytest.warns(TranslationWarning) as told:
        found = translator.translate_all(["do", long, "ba be"], search=SHORT)
    assert [str(each.message) for each in told] == [
        "line 2: 18 tokens, of which the model takes 16: the rest is left out"
    ]
    assert told[0].filename == __file__  # not a line of relpos
    assert [each.cut for each in found] == [0, 2, 0]
    whole = " ".join(long.split()[:LONGEST])
    assert [each.text for each in found] == one_by_one(["do", whole, "ba be"])


def test_unknown_words_are_counted(translator: Translator) -> None:
    with pytest.warns(TranslationWarning) as told:
        found = translator.translate_all(["do what", "ba be", "you know what"], search=SHORT)
    assert [str(each.message) for each in told] == ["4 tokens in 2 lines unknown to the vocabulary"]
    assert [each.unknown for each in found] == [1, 0, 3]
    given = ["do what", "ba"], ["ba", "you know"]
    for look in (
        lambda: translator.score(*given),
        lambda: translator.align(*given),
        lambda: relpos.attention_maps(translator, *given),
        lambda: relpos.attention_maps(translator, ["do what", "you know"], kinds="encoder"),
    ):
        with pytest.warns(TranslationWarning) as told:
            look()
        said = "3 tokens in 2 lines unknown to the vocabulary"
        assert [str(each.message) for each in told] == [said]
        assert told[0].filename == __file__


def test_what_is_not_finite(models: SimpleNamespace) -> None:
    translator = Translator.load(models.bad)
    lines = ["ba be", "gi do", "", "do do", "ku"]
    with pytest.warns(TranslationWarning) as told:
        found = translator.translate_all(lines, search=SHORT)
    assert [str(each.message) for each in told] == [
        f"line {line}: the model's numbers are not finite, no translation" for line in (2, 4)
    ]
    assert [each.failed for each in found] == [False, True, False, True, False]
    good = one_by_one(["ba be", "ku"])
    assert [each.text for each in found] == [good[0], "", "", "", good[1]]
    assert np.isnan(found[1].score)
    with pytest.warns(TranslationWarning, match="line 2: the model's numbers.*no score"):
        scores = translator.score(["ba", "do"], ["ku", "ku"])
    assert [each.failed for each in scores] == [False, True]


def test_where_no_token_may_follow(translator: Translator) -> None:
    search = Search(no_repeat=1, min_length=8, max_length=9, suppressed=tuple(range(6, 28)))
    why = "line 1: no token is left that may follow, or the model's numbers are not finite, no tr"
    with pytest.warns(TranslationWarning, match=why):
        [found] = translator.translate_all(["ba be"], search=search)
    assert found.failed and found.text == ""
    why = "source: line 1: no token is left that may follow, or the model's numbers are not finite"
    with pytest.raises(ValueError, match=why):
        relpos.attention_maps(translator, "ba be", search=search)


def test_a_line_that_is_cut_is_told_once(models: SimpleNamespace, translator: Translator) -> None:
    with pytest.warns(TranslationWarning) as told:
        relpos.attention_maps(translator, "ba " * 50)
    assert [str(each.message).split(":")[0] for each in told] == ["line 1"]
    with pytest.warns(TranslationWarning, match="50 tokens, of which the model takes 15"):
        relpos.attention_maps(Translator.load(models.language), "ba " * 50)
    with pytest.warns(TranslationWarning) as told:
        relpos.attention_maps(translator, "ba zzz")
    assert [str(each.message) for each in told] == ["1 token in 1 line unknown to the vocabulary"]


def test_what_no_file_could_hold() -> None:
    subwords = relpos.data.SentencePiece.train(["ba be", "be ba"] * 9, 265)
    changes = {f"{side}_vocabulary": subwords.size for side in ("source", "target")}
    translator = Translator(random_model(**changes), subwords)
    with pytest.raises(ValueError, match=r"^line 2: '\\ud800' cannot be written as UTF-8"):
        translator.translate(["ba", "be \ud800"])


def test_sampling_has_no_beam() -> None:
    """So that a vocabulary of fewer tokens than a beam has may be drawn from."""
    silent = SimpleNamespace(encode=lambda text: [0] * len(text.split()), decode=lambda _: "")
    words = relpos.data.Wrapped(silent, size=3, bos=1, eos=2, unknown=0)
    changes = {f"{side}_vocabulary": words.size for side in ("source", "target")}
    translator = Translator(random_model(**changes), words)
    with pytest.warns(TranslationWarning, match="unknown to the vocabulary"):
        [found] = translator.translate_all(["ba"], search=Search(sample=True, max_length=4))
    assert not found.failed


class Arrays:
    """A vocabulary of the user's whose tokens are NumPy's."""

    def __init__(self, words: Words) -> None:
        self.words = words

    def encode_many(self, texts: Any) -> list[np.ndarray]:
        return [np.asarray(tokens) for tokens in self.words.encode_many(texts)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.words, name)


def test_tokens_that_are_arrays() -> None:
    """As training takes them."""
    arrays: Any = Arrays(VOCABULARY)
    found = [Translator(random_model(), x).translate(LINES[:5]) for x in (VOCABULARY, arrays)]
    assert found[0] == found[1]


def test_n_best(translator: Translator) -> None:
    search = Search(beam=5, n_best=3, max_length=8)
    for each in translator.translate_all(LINES[:9], search=search):
        assert len(each.n_best) == 3 and each.text == each.n_best[0].text
        scores = [candidate.score for candidate in each.n_best]
        assert scores == sorted(scores, reverse=True) and each.score == scores[0]


def test_draws_are_of_their_lines(translator: Translator) -> None:
    """Not of the batch or the window that a line happens to be in; and no line's are another's."""
    search = Search(sample=True, seed=3, max_length=8)
    drawn = translator.translate(["ba be"] * 600, search=search)
    assert drawn[:300] != drawn[300:] and len(set(drawn)) > 300
    assert drawn == translator.translate(["ba be"] * 600, search=search, batch_tokens=20)
    windows = translator.stream(["ba be"] * 600, search=search, window=7)
    assert drawn == [each.text for each in windows]


def test_a_beginning(translator: Translator) -> None:
    prefixes = ["ku", "", "fa fe"]
    said = translator.translate(LINES[:3], search=SHORT, prefixes=prefixes)
    assert said[0].startswith("ku") and said[2].startswith("fa fe")
    assert said[1] == one_by_one([LINES[1]])[0]
    with pytest.raises(ValueError, match="prefixes: expected one for each sentence, got 2"):
        translator.translate(LINES[:3], search=SHORT, prefixes=prefixes[:2])
    long = " ".join(["ku"] * 20)
    with pytest.warns(TranslationWarning, match="line 1: 20 tokens, of which the model takes 15"):
        [said] = translator.translate(["do"], prefixes=[long])
    assert said.split()[:15] == ["ku"] * 15


def test_what_is_refused(translator: Translator) -> None:
    size = VOCABULARY.size
    for search, message in (
        (Search(beam=size + 1), rf"beam: expected at most {size}, the tokens of the vocabulary"),
        (Search(sample=True, top_k=99), rf"top_k: expected at most {size}, the tokens"),
        (Search(suppressed=tuple(range(size))), "suppressed: expected tokens that leave others"),
        ({"beam": 3}, "search: expected relpos.Search, got dict"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^{message}"):
            translator.translate(["do"], search=search)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sentences: expected several str, got NoneType"):
        translator.translate(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sentences: expected several str, got one str"):
        translator.translate("do")
    for name, call in (
        ("lines", lambda: translator.stream("do")),
        ("prefixes", lambda: translator.translate(["do"], prefixes="k")),
        ("sources", lambda: translator.score("do", ["ba", "be"])),
        ("targets", lambda: translator.score(["do", "ba"], "ba")),
        ("sources", lambda: translator.align("do", ["ba", "be"])),
        ("targets", lambda: translator.align(["do", "ba"], "ba")),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected several str, got one str"):
            call()
    for align in (-1, (0,), (0, 1, 2)):
        what = re.escape(f"align: expected (layer, head), got {align}")
        with pytest.raises(TypeError, match=f"^{what}$"):
            translator.translate_all(["do"], align=align)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^sentences: expected str, got int"):
        translator.translate([3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="^prefixes: expected str, got NoneType"):
        translator.translate(["ba"], prefixes=[None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="^targets: expected str, got int"):
        translator.score(["ba"], [3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="model: has an encoder"):
        translator.generate(["do"])
    with pytest.raises(ValueError, match="targets: expected 2 as in sources, got 1"):
        translator.score(["do", "ba"], ["ba"])


def test_a_vocabulary_of_another_size() -> None:
    with pytest.raises(ValueError, match="tokenizer: has 5 tokens, the model's source_vocabulary"):
        Translator(random_model(), Words(["a", "b"]))


# ---- a language model ----------------------------------------------------------------------------


def test_generate(models: SimpleNamespace) -> None:
    translator = Translator.load(models.language)
    prompts = ["ba be", "", "ku ku ku"]
    said = [each.text for each in translator.generate(prompts, search=Search(max_length=9))]
    assert said[0].startswith("ba be") and said[2].startswith("ku ku ku") and said[1]
    draws = Search(sample=True, n_best=4, max_length=9, seed=2)
    one, other = (
        [[x.text for x in each.n_best] for each in translator.generate(prompts, search=draws)]
        for _ in range(2)
    )
    assert one == other and len(set(one[1])) > 1
    with pytest.raises(TypeError, match="prompts: expected several str, got one str"):
        translator.generate("do")
    with pytest.raises(ValueError, match="model: has no encoder"):
        translator.translate(["do"])
    [score] = translator.score(None, ["ba be"])
    assert score.tokens.shape == (3,)
    with pytest.raises(ValueError, match="sources: expected None"):
        translator.score(["a"], ["ba be"])
    with pytest.raises(ValueError, match="nothing to align to"):
        translator.align(["a"], ["ba be"])


# ---- scores and links ----------------------------------------------------------------------------


def test_scores(translator: Translator) -> None:
    targets = text_files.backwards(LINES)
    found = translator.score(LINES, targets, batch_tokens=30)
    model = random_model()
    for i, (line, target, each) in enumerate(zip(LINES, targets, found, strict=True), 1):
        batch = relpos.Batch.from_pairs([tokens(line)], [tokens(target)], bos=1, eos=2)
        [expected], [hits] = model.score(batch), model.hits(batch)
        np.testing.assert_allclose(each.tokens, expected, atol=2e-5, rtol=1e-5)
        assert each.line == i and each.hits.tolist() == hits.tolist()
        assert each.log_probability == pytest.approx(float(each.tokens.sum()), rel=1e-5)
    alone = translator.translate_all(
        LINES[:5], search=Search(beam=1, penalty="none", max_length=15)
    )
    scores = translator.score(LINES[:5], [each.text for each in alone])
    for each, score in zip(alone, scores, strict=True):
        if each.n_best[0].finished:
            assert score.log_probability == pytest.approx(each.score, abs=1e-3)
            assert score.hits.all()


@pytest.mark.parametrize("count", [LONGEST - 1, LONGEST, LONGEST + 4])
def test_a_target_that_is_cut_has_no_end(
    models: SimpleNamespace, translator: Translator, count: int
) -> None:
    """Its tokens are scored, as many as the model takes, and linked; no end is put behind them."""
    target = " ".join((text_files.WORDS * 9)[:count])
    labels = [*tokens(target), 2][:LONGEST]
    read, offsets = [1, *labels[:-1]], [0, LONGEST]
    language, model = Translator.load(models.language), random_model(**{"encoder.layers": 0})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        [score] = translator.score(["ba be"], [target])
        [alone] = language.score(None, [target])
        [aligned] = translator.align(["ba be"], [target])
        maps = relpos.attention_maps(translator, "ba be", target)
    what = "20 tokens, of which the model takes 16: the rest is left out"
    assert [str(x.message) for x in told] == [f"line 1: {what}"] * (4 if count > LONGEST else 0)
    both = relpos.Batch(tokens("ba be"), [0, 2], read, offsets, labels)
    [(expected, hits)] = random_model().scores(both)
    np.testing.assert_allclose(score.tokens, expected, rtol=1e-6)
    assert score.hits.tolist() == hits.tolist()
    [expected] = model.score(relpos.Batch(None, None, read, offsets, labels))
    np.testing.assert_allclose(alone.tokens, expected, rtol=1e-6)
    assert len(aligned.target_words) == min(count, LONGEST) == len({j for _, j in aligned.links})
    assert maps.predicted_tokens[-1] == ("</s>" if count < LONGEST else target.split()[LONGEST - 1])


def test_links(translator: Translator) -> None:
    lines, targets = ["ba be bi", "", "do"], ["ku ko", "ku", ""]
    found = translator.align(lines, targets)
    model = random_model()
    batch = relpos.Batch.from_pairs([tokens(lines[0])], [tokens(targets[0])], bos=1, eos=2)
    [weights] = model.alignments(batch)
    np.testing.assert_allclose(found[0].weights, weights, atol=1e-6)
    assert found[0].links == tuple(sorted((int(weights[j].argmax()), j) for j in range(2)))
    assert re.fullmatch(r"\d-\d \d-\d", found[0].pharaoh)
    assert [each.pharaoh for each in found[1:]] == ["", ""]
    assert [each.weights.shape for each in found] == [(3, 3), (2, 0), (1, 1)]
    [one] = translator.align(lines[:1], targets[:1], layer=0, head=1)
    assert not np.allclose(one.weights, weights)
    # Of what was said, the same as of the same target given.
    for each, line in zip(
        translator.translate_all(LINES[:9], search=SHORT, align=(-1, None)), LINES, strict=False
    ):
        [given] = translator.align([line], [each.text])
        assert each.n_best[0].links == given.links


def test_links_are_of_the_words_that_are_said(translator: Translator) -> None:
    """A model may say <s>, which the text has not."""
    search = Search(sample=True, temperature=4.0, seed=5, max_length=8)
    found = [x.n_best[0] for x in translator.translate_all(LINES, search=search, align=(-1, None))]
    assert sum(VOCABULARY.bos in each.tokens for each in found) > 3
    for each in found:
        assert {j for _, j in each.links} == set(range(len(each.text.split())))
    assert words_of(VOCABULARY, [1, 5, 1, 6, 2, 0]) == [-1, 0, -1, 1, -1, 2]


def test_links_are_of_words() -> None:
    text = ["Two dogs run.", "The dogs of two men run through the snow.", "Three women watch them."]
    subwords = SentencePiece.train(text, size=290)
    pieces = subwords.encode("watchmen run")
    assert len(pieces) > 3
    numbers = words_of(subwords, pieces)
    begins = [subwords.piece(token).startswith("▁") for token in pieces]
    assert numbers[0] == 0 and numbers[-1] == 1
    assert [b - a for a, b in zip(numbers, numbers[1:], strict=False)] == list(map(int, begins[1:]))
    assert words_of(VOCABULARY, tokens("do do da")) == [0, 1, 2]


# ---- loading -------------------------------------------------------------------------------------


def test_what_a_model_is_called(models: SimpleNamespace, tmp_path: Path) -> None:
    """A run, its newest checkpoint, the file in it, a mean of it: all the same weights."""
    newest = models.run / "step-000000003"
    found = [checkpoint.Checkpoint.at(newest)]
    average(found, tmp_path / "mean")
    for path in (models.run, str(newest), newest / "model.safetensors", tmp_path / "mean"):
        translator = Translator.load(path)
        assert translator.translate(LINES[:3], search=SHORT) == one_by_one(LINES[:3])
    with pytest.warns(
        CheckpointWarning, match="run: a mean of 3, not of average=50: it has no more"
    ) as told:
        Translator.load(models.run, average=50)
    assert told[0].filename == __file__
    mean = Translator.load(models.run, average=2)
    for name, weights in mean.models[0].parameters.items():
        both = [random_model(seed).parameters[name].astype("f8") for seed in (4, 1)]
        assert (np.mean(both, axis=0).astype("f4") == weights).all(), name


def test_a_mean_of_different_models(tmp_path: Path, capsys: Capture) -> None:
    """Told as such: a field may be called as an option of the search is, and has another value."""
    (tmp_path / "text").write_text("ba\n")
    for field, value in (("max_length", LONGEST + 1), ("seed", 2**31)):
        other = relpos.Transformer(random_model().config.replace({field: value}), tokens=64)
        run = save(tmp_path / field, random_model(), other)
        assert cli.main(["translate", str(run), str(tmp_path / "text"), "--average", "2"]) == 1
        said = capsys.readouterr().err
        assert re.match(rf"relpos: --average: of different models: {field}: {value} in ", said)


def test_a_running_average_is_what_translates(tmp_path: Path) -> None:
    model = random_model(ema=0.5)
    weights = {name: array.copy() for name, array in model.parameters.items()}
    model.save(tmp_path / "before.safetensors")
    model.restore(tmp_path / "before.safetensors")  # the average begins as the weights
    for array in model.parameters.values():
        array *= 2
    run = save(tmp_path / "run", model)
    for path, factor in ((run, 1), (run / "step-000000001", 1)):
        found = Translator.load(path).models[0].parameters
        assert all((found[name] == factor * weights[name]).all() for name in weights)
    for loaded in (
        Translator.load(run, average=1),
        Translator.load(run / "step-000000001" / "model.safetensors"),
    ):
        found = loaded.models[0].parameters
        assert all((found[name] == 2 * weights[name]).all() for name in weights)


def test_in_bf16(models: SimpleNamespace, translator: Translator, tmp_path: Path) -> None:
    """Nearly as likely to the one as to the other, and so from the command."""
    near = Translator.load(models.run, precision="bf16")
    assert [model.precision for model in near.models] == ["bf16"]
    said = near.translate(LINES, search=SHORT)
    scores = [[each.log_probability for each in t.score(LINES, said)] for t in (translator, near)]
    off = np.abs(np.subtract(*scores))
    assert 0 < off.max() < 12 * 2.0**-9 * np.abs(scores[0]).max()
    (tmp_path / "lines").write_text("\n".join(LINES) + "\n")
    command = ["translate", models.run, tmp_path / "lines", "-o", tmp_path / "said", *EIGHT]
    assert cli.main([str(each) for each in [*command, "--precision", "bf16"]]) == 0
    assert (tmp_path / "said").read_text().splitlines() == said


def test_an_ensemble(models: SimpleNamespace, tmp_path: Path) -> None:
    paths = [models.run / f"step-00000000{step}" for step in (2, 3)]
    both = Translator.load(paths)
    decoder = relpos.Decoder(random_model(4), random_model(1))
    source = tokens(LINES[0])
    [[best]] = decoder.search(relpos.Batch(source, [0, len(source)]), SHORT)
    assert both.translate(LINES[:1], search=SHORT) == [VOCABULARY.decode(best.tokens.tolist())]
    scores = [Translator.load(x).score(LINES[:1], ["ku ku"])[0].tokens for x in paths]
    [score] = both.score(LINES[:1], ["ku ku"])
    np.testing.assert_allclose(
        score.tokens, np.log(np.mean(np.exp(np.array(scores, "f8")), axis=0)), atol=1e-5
    )
    other = Words([*text_files.WORDS[1:], text_files.WORDS[0]])
    checkpoint.save(tmp_path / "other", random_model(), tokenizer=other)
    with pytest.raises(ValueError, match="other: has another vocabulary than .*step-000000002"):
        Translator.load([paths[0], tmp_path / "other"])
    with pytest.raises(ValueError, match="^tokenizer: another vocabulary than that of "):
        Translator.load(paths[0], tokenizer=other)


def cut_short(folder: Path) -> str:
    file = folder / "step-000000003" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return r"model\.safetensors has \d+ bytes instead of \d+"


def not_written(folder: Path) -> str:
    (folder / "step-000000003" / "manifest.json").unlink()
    return r"no checkpoint: manifest\.json, which is written last, is not there"


@pytest.mark.parametrize("spoil_it", [cut_short, not_written])
def test_a_checkpoint_that_is_not_whole(
    models: SimpleNamespace, tmp_path: Path, spoil_it: Any
) -> None:
    """Of a run the one before is taken; asked for by name it is refused."""
    run = Path(shutil.copytree(models.run, tmp_path / "run"))
    why = spoil_it(run)
    with pytest.raises(CheckpointError, match=why):
        Translator.load(run / "step-000000003")
    with pytest.warns(CheckpointWarning, match=f"passed over: {why}"):
        translator = Translator.load(run)
    weights = translator.models[0].parameters["output.weight"]
    assert (weights == random_model(4).parameters["output.weight"]).all()


def test_no_model(models: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such model"):
        Translator.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no model here"):
        Translator.load(tmp_path)
    with pytest.raises(ValueError, match="paths: expected a folder or several"):
        Translator.load([])
    with pytest.raises(ValueError, match="is no run, whose last checkpoints"):
        Translator.load(models.run / "step-000000003", average=2)
    alone = tmp_path / "model.safetensors"
    shutil.copy(models.run / "step-000000003" / "model.safetensors", alone)
    no_vocabulary = (
        r"model\.safetensors: beside it is no folder tokenizer: the vocabulary is not there"
    )
    with pytest.raises(FileNotFoundError, match=no_vocabulary):
        Translator.load(alone)
    shutil.copytree(models.run / "step-000000003" / "tokenizer", tmp_path / "tokenizer")
    alone.write_bytes(alone.read_bytes()[:-100])
    with pytest.raises(OSError, match=r"model\.safetensors"):
        Translator.load(alone)
    text = tmp_path / "test.en"
    text.write_text("ba be bi\n")
    with pytest.raises(
        CheckpointError, match=r"test\.en.*; a model is the folder that `relpos train`"
    ):
        Translator.load(text)


# ---- the commands --------------------------------------------------------------------------------

EIGHT = ("--max-length", "8")


def test_files(models: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    expected = "".join(f"{line}\n" for line in one_by_one(LINES))
    text = "".join(f"{line}\n" for line in LINES).encode()
    (tmp_path / "one").write_bytes(text[: text.index(b"\n", 300) + 1])
    (tmp_path / "two.gz").write_bytes(gzip.compress(text[text.index(b"\n", 300) + 1 :]))
    both = (tmp_path / "one", tmp_path / "two.gz")
    said = relpos_prints(capsys, "translate", models.run, *both, *EIGHT)
    assert (said.out, said.error) == (expected, "")
    output = tmp_path / "out"
    said = relpos_prints(capsys, "translate", models.run, "-o", output, *EIGHT, stdin=text)
    assert said.out == "" and output.read_text() == expected
    said = relpos_prints(capsys, "translate", models.run, "-", "-o", "-", *EIGHT, stdin=b"do")
    assert said.out == one_by_one(["do"])[0] + "\n"
    said = relpos_prints(capsys, "translate", models.run, both[0], "-", *EIGHT, stdin=b"\r\ndo")
    first = expected.splitlines(keepends=True)[: both[0].read_bytes().count(b"\n")]
    assert said.out == "".join(first) + "\n" + one_by_one(["do"])[0] + "\n"


def test_columns(models: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("ba be bi\n\ndo\n")
    given = ("translate", models.run, tmp_path / "source", *EIGHT)
    rows = relpos_prints(capsys, *given, "--n-best", 2, "--beam", 3).out.splitlines()
    assert [row.split("\t")[0] for row in rows] == ["1", "1", "2", "3", "3"] and rows[2] == "2\t\t"
    scores = [float(row.split("\t")[2]) for row in rows if row != "2\t\t"]
    assert scores[0] >= scores[1] and scores[2] >= scores[3]
    rows = relpos_prints(capsys, *given, "--n-best", 2, "--align").out.splitlines()
    assert [row.count("\t") for row in rows] == [3] * 5 and rows[2] == "2\t\t\t"
    rows = relpos_prints(capsys, *given, "--score", "--align").out.splitlines()
    assert rows[1] == "\t\t"
    text, score, links = rows[0].split("\t")
    [best] = Translator.load(models.run).translate_all(["ba be bi"], search=SHORT, align=(-1, None))
    assert (text, score, links) == (best.text, f"{best.score:.4f}", best.n_best[0].pharaoh)
    other = relpos_prints(capsys, *given, "--align", "--align-layer", 0, "--align-head", 0)
    assert other.out.splitlines()[0].split("\t")[0] == text


def test_given_targets(models: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("ba be bi\ndo\n")
    (tmp_path / "target").write_text("ku ko\nda\n")
    given = ("translate", models.run, tmp_path / "source", "--target", tmp_path / "target")
    translator = Translator.load(models.run)
    scores = translator.score(["ba be bi", "do"], ["ku ko", "da"])
    links = translator.align(["ba be bi", "do"], ["ku ko", "da"])
    column = [f"{each.log_probability:.4f}" for each in scores]
    assert relpos_prints(capsys, *given).out.splitlines() == column
    both = [f"{x}\t{each.pharaoh}" for x, each in zip(column, links, strict=True)]
    assert relpos_prints(capsys, *given, "--score", "--align").out.splitlines() == both
    bad = ("translate", models.bad, *given[2:], "--align")
    assert "not finite" in relpos_prints(capsys, *bad, status=1).error
    (tmp_path / "target").write_text("ku ko\n")
    said = relpos_prints(capsys, *given, status=1)
    assert said.error == (
        f"relpos: {given[4]} has 1 line, {given[2]} has 2: each line of one belongs to a line of the "
        "other\n"
    )


def test_odd_lines_are_told_by_number(models: SimpleNamespace, capsys: Capture) -> None:
    text = b"ba be\ngi do\n" + b"ku " * 20 + b"\nku what\nku\n"
    said = relpos_prints(capsys, "translate", models.bad, *EIGHT, status=1, stdin=text)
    lines = one_by_one(["ba be", "ku " * LONGEST, "ku what", "ku"])
    assert said.out.split("\n") == [lines[0], "", *lines[1:], ""]
    assert said.error.splitlines() == [
        "relpos: warning: line 3: 20 tokens, of which the model takes 16: the rest is left out",
        "relpos: warning: line 2: the model's numbers are not finite, no translation",
        "relpos: warning: 1 token in 1 line unknown to the vocabulary",
    ]


def test_no_unknown(models: SimpleNamespace, tmp_path: Path, capsys: Capture) -> None:
    model = random_model()
    model.parameters["output.weight"][0] = 4 * model.parameters["output.weight"].max(axis=0)
    run = save(tmp_path / "run", model)
    text = "".join(f"{line}\n" for line in LINES).encode()
    assert "<unk>" in relpos_prints(capsys, "translate", run, *EIGHT, stdin=text).out
    said = relpos_prints(capsys, "translate", run, *EIGHT, "--no-unknown", stdin=text).out
    assert "<unk>" not in said and said.count("\n") == len(LINES)


def test_generate_command(models: SimpleNamespace, capsys: Capture) -> None:
    given = ("generate", models.language, *EIGHT)
    one, other, third = (
        relpos_prints(capsys, *given, "--seed", seed, stdin=b"ba be\n\n").out for seed in (1, 1, 2)
    )
    assert one == other != third
    assert one.startswith("ba be") and one.count("\n") == 2
    rows = relpos_prints(capsys, *given, "--n-best", 3, stdin=b"\n").out.splitlines()
    assert len(rows) == 3 and all(row.startswith("1\t") for row in rows)
    searched = [relpos_prints(capsys, *given, "--beam", 2, stdin=b"ba\n").out for _ in range(2)]
    assert searched[0] == searched[1]


def test_line_by_line(models: SimpleNamespace, tmp_path: Path) -> None:
    """Who writes slowly into a pipe gets each answer before the next line."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGE)}
    child = subprocess.Popen(
        [sys.executable, "-m", "relpos", "translate", models.run, *EIGHT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    for line, expected in zip(LINES[:5], one_by_one(LINES[:5]), strict=True):
        child.stdin.write(f"{line}\n".encode())
        child.stdin.flush()
        assert child.stdout.readline().decode() == f"{expected}\n"
    child.stdin.close()
    assert child.stdout.read() == b"" and child.wait() == 0
    child.stdout.close()


def test_it_starts_without_what_it_does_not_need(models: SimpleNamespace, tmp_path: Path) -> None:
    script = (
        "import sys; from relpos import cli;"
        f"cli.main(['translate', {str(models.run)!r}, '--max-length', '8']);"
        "print([m for m in ('torch', 'sacrebleu', 'tqdm', 'matplotlib', 'scipy', 'sentencepiece',"
        " 'relpos.demo', 'relpos.train.trainer') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=f"{LINES[0]}\n", capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(PACKAGE)}, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.splitlines() == [*one_by_one(LINES[:1]), "[]"], done.stderr


def test_a_line_stays_a_line() -> None:
    """A byte of a vocabulary may be the end of a line."""
    assert cli_lines.one_line("a\nb\r\n\tc") == "a b   c"


def test_lines_as_they_arrive() -> None:
    read, write = os.pipe()
    windows = cli_lines.arriving(read, "here", 3)
    os.write(write, b"\xef\xbb\xbfone\r\ntw")
    assert next(windows) == ["one"]
    os.write(write, "o\u2028and\nthree\n\nfive\nsi".encode())
    assert next(windows) == ["two\u2028and", "three", "", "five"]
    os.write(write, b"x\n\xff\n")
    os.close(write)
    with pytest.raises(ValueError, match="^here: line 7, byte 1 of it: 0xff is not UTF-8 here"):
        list(windows)
    os.close(read)


@pytest.mark.parametrize("command", ["translate", "generate"])
def test_a_terminal_is_told_that_it_is_read(
    models: SimpleNamespace, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    model = models.run if command == "translate" else models.language
    for more, told in (
        ((), "reading lines from the terminal, to Ctrl-D\n"), (("--progress", "none"), ""),
    ):  # fmt: skip
        ours, theirs = os.openpty()
        os.write(ours, b"ba be\n\x04")
        with os.fdopen(theirs) as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            assert cli.main([command, str(model), *EIGHT, *more]) == 0
        os.close(ours)
        out, error = capsys.readouterr()
        assert error == told and out.count("\n") == 1


def test_lines_that_cannot_be_read(
    models: SimpleNamespace, capsys: Capture, tmp_path: Path
) -> None:
    """They are told and empty, the others are translated, and the status says that some failed."""
    text = b"ba be\ndo \xff\nka\n"
    (tmp_path / "text").write_bytes(text)
    first, last = one_by_one(["ba be", "ka"])
    for given, name in (((tmp_path / "text",), "text"), ((), "standard input")):
        found = relpos_prints(
            capsys, "translate", models.run, *given, *EIGHT, stdin=b"" if given else text, status=1
        )
        assert found.out == f"{first}\n\n{last}\n"
        assert f"{name}: line 2, byte 4 of it: 0xff is not UTF-8 here" in found.error
        assert "an empty line instead" in found.error
    given = ("generate", models.language, *EIGHT)
    expected = relpos_prints(capsys, *given, stdin=b"\n\nba be\n").out.split("\n")
    said = relpos_prints(capsys, *given, stdin=b"\xff\n\nba be\n\xff\n", status=1)
    assert said.out.split("\n") == ["", *expected[1:3], "", ""] and expected[1]


def test_gzip_is_for_files(models: SimpleNamespace, capsys: Capture) -> None:
    zipped = gzip.compress(b"ba be\n")
    said = relpos_prints(capsys, "translate", models.run, stdin=zipped, status=1).error
    assert said.startswith("relpos: standard input: is gzip, which only files may be: gzip -dc")


def test_a_gzip_file_cut_short(models: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    """What could be read of it is translated."""
    zipped = gzip.compress("".join(f"{line}\n" for line in LINES).encode())
    (tmp_path / "whole").write_bytes(gzip.compress(b"ba be\n"))
    (tmp_path / "cut").write_bytes(zipped[:-12])
    files = (tmp_path / "whole", tmp_path / "cut")
    said = relpos_prints(capsys, "translate", models.run, *files, *EIGHT, status=1)
    found, expected = said.out.splitlines(), one_by_one(["ba be", *LINES])
    assert len(found) > 1 and found == expected[: len(found)]
    assert "cut: not a whole gzip file" in said.error and "Traceback" not in said.error


def test_an_empty_line_has_no_score(
    models: SimpleNamespace, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one of which the vocabulary makes no token, as sentencepiece of what has no width."""
    (tmp_path / "target").write_text("ba\nba\n\n")
    given = ("translate", models.run, "--target", tmp_path / "target", "--score")
    rows = relpos_prints(capsys, *given, stdin=b"ba be\n\n \n").out.splitlines()
    assert float(rows[0]) < 0 and rows[1:] == ["", ""]
    rows = relpos_prints(capsys, *given, "--align", stdin=b"ba be\n\n \n").out.splitlines()
    assert rows[0].endswith("\t" + rows[0].split("\t")[1]) and rows[1:] == ["\t", "\t"]
    encode = Words.encode
    monkeypatch.setattr(Words, "encode", lambda self, x: encode(self, x.replace("\u200b", "")))
    unseen = "ba be\n\u200b\n \n".encode()
    assert relpos_prints(capsys, *given, "--align", stdin=unseen).out.splitlines() == rows


def test_a_line_that_is_not_finite_has_no_score(
    models: SimpleNamespace, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "target").write_text("ba\nba\n")
    given = ("translate", models.bad, "--target", tmp_path / "target", "--score", "--align")
    said = relpos_prints(capsys, *given, stdin=b"ba do\nba be\n", status=1)
    rows = said.out.splitlines()
    assert rows[0] == "\t" and float(rows[1].split("\t")[0]) < 0
    assert "line 1: the model's numbers are not finite" in said.error


def test_the_best_checkpoint(models: SimpleNamespace, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(models.run, run)
    newest = checkpoint.newest(run)
    assert newest is not None
    state = newest.folder / checkpoint.STATE
    told = json.loads(state.read_text())

    def says(step: int) -> None:
        state.write_text(json.dumps(told | {"run": {"best_step": step}}))
        manifest = newest.folder / checkpoint.MANIFEST
        content = json.loads(manifest.read_text())
        content["files"]["state.json"]["bytes"] = state.stat().st_size
        manifest.write_text(json.dumps(content))

    first = checkpoint.checkpoints(run)[0]
    says(first.step)
    best, of_step = Translator.load(run, best=True), Translator.load(first.folder)
    assert best.translate(LINES, search=SHORT) == of_step.translate(LINES, search=SHORT)
    assert best.translate(LINES, search=SHORT) != Translator.load(run).translate(
        LINES, search=SHORT
    )
    says(99)
    with pytest.raises(CheckpointError, match="its best checkpoint, of step 99, is not there"):
        Translator.load(run, best=True)


def test_a_long_line_arrives_in_linear_time(tmp_path: Path) -> None:
    """Copied for each of its pieces it took 40 seconds."""
    (tmp_path / "long").write_bytes(bytes(1 << 26) + b"\nshort")
    with open(tmp_path / "long", "rb") as stream:
        begin = time.process_time()
        found = [line for window in cli_lines.arriving(stream.fileno(), "", 9) for line in window]
    assert [len(line) for line in found] == [1 << 26, 5]
    assert time.process_time() - begin < 4


def test_a_pipe_that_does_not_wait() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    windows = cli_lines.arriving(read, "here", 3)
    late = threading.Timer(0.2, os.write, (write, b"one\n"))
    late.start()
    assert next(windows) == ["one"]
    late.join()
    os.close(write)
    assert list(windows) == []
    os.close(read)


def test_a_last_line_without_an_end() -> None:
    read, write = os.pipe()
    os.write(write, b"one\ntwo")
    os.close(write)
    assert list(cli_lines.arriving(read, "here", 9)) == [["one", "two"]]
    os.close(read)


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("translate", ("--beam", "99999")),
        ("translate", ("--align", "--align-layer", "99")),
        ("translate", ("--align", "--align-head", "99")),
        ("translate", ("--prefix", "{one}")),
        ("translate", ("--target", "{one}")),
        ("generate", ("--n-best", "99999")),
    ],
)
def test_what_is_refused_costs_no_result(
    models: SimpleNamespace, capsys: Capture, tmp_path: Path, command: str, wrong: Any
) -> None:
    """Though the first line is empty, which is answered without a search."""
    (tmp_path / "text").write_text("\nba be\n")
    (tmp_path / "one").write_text("ba\n")
    (tmp_path / "empty").write_text("")
    output = tmp_path / "out"
    output.write_text("of before")
    given = (command, models.run if command == "translate" else models.language)
    filled = [each.format(one=tmp_path / "one") for each in wrong]
    relpos_prints(capsys, *given, tmp_path / "text", "-o", output, *filled, status=1)
    assert output.read_text() == "of before"
    relpos_prints(capsys, *given, tmp_path / "empty", "-o", output)
    assert output.read_text() == ""


@pytest.mark.parametrize("buffered", [True, False])
def test_an_output_that_does_not_wait(buffered: bool) -> None:
    """It takes what there is room for, or nothing: neither ends the writing, or loses a line."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    lines = [f"{number} " + "x" * 70 for number in range(5000)]
    found = bytearray()

    def slowly() -> None:
        time.sleep(0.05)
        while piece := os.read(read, 1 << 14):
            found.extend(piece)

    reader = threading.Thread(target=slowly)
    reader.start()
    with open(write, "wb", buffering=-1 if buffered else 0) as stream:
        put = cli_lines.Writer(stream)
        for line in lines:
            put(line)
    reader.join()
    os.close(read)
    assert found.decode().splitlines() == lines


def test_standard_input_is_not_written_over(
    models: SimpleNamespace, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("ba be\n")
    (tmp_path / "target").write_text("ku\n")
    target = ("--target", tmp_path / "target")
    for given in (
        ("translate", models.run),
        ("translate", models.run, *target),
        ("translate", models.run, tmp_path / "target", "-"),
        ("generate", models.language),
        ("align", models.run, "--source", "-", *target),
    ):
        with open(tmp_path / "text") as stream:
            monkeypatch.setattr(sys, "stdin", stream)
            said = relpos_prints(capsys, *given, "-o", tmp_path / "text", status=1).error
        assert said == f"relpos: --output: {tmp_path / 'text'} is read as well\n"
        assert (tmp_path / "text").read_text() == "ba be\n"


def test_what_to_type_next(models: SimpleNamespace, capsys: Capture) -> None:
    said = relpos_prints(capsys, "translate", status=2).error
    assert "which model?" in said and "relpos translate run test.en" in said
    said = relpos_prints(capsys, "generate", status=2).error
    assert "relpos train --text train.txt" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("translate", "nowhere"), "nowhere: there is no such model"),
        (("translate", "{run}", "nowhere"), "nowhere: No such file or directory"),
        (("translate", "{run}", "{text}", "{run}"), "run: is a folder; models come before files"),
        (("translate", "{run}", "{text}", "--beam", "0"), "--beam: expected 1 or more, got 0"),
        (("translate", "{run}", "{text}", "--beam", "99"), "beam: expected at most 28, the tokens"),
        (("translate", "{run}", "{text}", "--n-best", "5"), "--n-best: expected at most beam=4"),
        (
            ("translate", "{run}", "{text}", "--length-penalty", "-1"),
            "--length-penalty: expected 0",
        ),
        (("translate", "{run}", "{text}", "--sample", "--top-p", "2"), "--top-p: expected above 0"),
        (("translate", "{run}", "{text}", "--seed", "0"), "--seed: is of --sample, which is not"),
        (
            ("translate", "{run}", "{text}", "--sample", "--beam", "2"),
            "--beam: is of a search, --sa",
        ),
        (
            ("translate", "{run}", "{text}", "--align-layer", "0"),
            "--align-layer: is of --align, whi",
        ),
        (
            ("translate", "{run}", "{text}", "--target", "{text}", "--n-best", "2"),
            "--n-best: --targ",
        ),
        (
            ("generate", "{language}", "{text}", "--penalty", "none"),
            "--penalty: is of a search: --b",
        ),
        (
            ("generate", "{language}", "--beam", "2", "--top-k", "2"),
            "--top-k: is of draws, --beam s",
        ),
        (
            ("evaluate", "--hypothesis", "{text}", "--reference", "{text}", "--average", "2"),
            "--average: --hypothesis says what is said",
        ),
        *(
            (
                ("evaluate", "--hypothesis", "{text}", "--reference", "{text}", option, value),
                f"{option}: --hypothesis says what is said",
            )
            for option, value in (
                ("--batch-tokens", "9"),
                ("--threads", "2"),
                ("--device", "cuda"),
                ("--precision", "bf16"),
            )
        ),
        (("translate", "{run}", "{text}", "--best"), "run: has no best checkpoint, as nothing was"),
        (("translate", "{run}", "--best", "--average", "2"), "best: average is given, the mean of"),
        (
            ("translate", "{run}/step-000000001", "--best"),
            "is no run, of which the best checkpoint",
        ),
        (("translate", "{run}", "{text}", "-o", "{text}"), "--output: .*text is read as well"),
        (
            ("translate", "{run}", "--prefix", "{latin}", "{one}"),
            "latin: line 2, byte 3 of it: 0xfc",
        ),
        (("translate", "{run}", "{text}", "--prefix", "{one}"), "--prefix: expected one for each"),
        (
            ("translate", "{run}", "{one}", "--prefix", "{text}"),
            "--prefix: expected one for each of 1 sentences, got more",
        ),
        (("translate", "{run}", "--prefix", "-"), "--prefix, --target: standard input is the text"),
        (("translate", "{run}", "{text}", "-o", "/dev/full"), "/dev/full: No space left on device"),
        (
            ("translate", "{run}", "{text}", "--align", "--align-layer", "4"),
            "--align-layer: expected -1 to 0, got 4",
        ),
        (
            ("translate", "{run}", "{text}", "--align", "--align-head", "9"),
            "--align-head: expected 0 to 1, got 9",
        ),
        (
            ("translate", "{run}", "{text}", "--align", "--align-layer", "9" * 20),
            r"--align-layer: expected integers below 2\^63 in magnitude, got 9{20}",
        ),
        (
            ("translate", "{run}", "{text}", "--max-length", "9" * 23),
            r"--max-length: expected at most 2\^40, got 9{23}",
        ),
        (
            ("translate", "{run}", "{text}", "--max-length", "3", "--max-more", "9"),
            "--max-more: does nothing beside --max-length",
        ),
        (
            ("generate", "{language}", "{text}", "--max-length", "3", "--max-more", "9"),
            "--max-more: does nothing beside --max-length",
        ),
        (
            ("translate", "{run}", "{text}", "--penalty", "none", "--length-penalty", "7"),
            "--length-penalty: is of wu and power, --penalty is none",
        ),
        (
            ("translate", "{run}", "{text}", "-o", "{run}/step-000000003/model.safetensors"),
            "--output: .*model.safetensors is read as well",
        ),
        (
            ("translate", "{run}", "{text}", "-o", "{run}/step-000000003/tokenizer/words.txt"),
            "--output: .*words.txt is read as well",
        ),
        (
            ("translate", "{run}", "{text}", "-o", "{run}/step-000000003/config.json"),
            "--output: .*config.json is read as well",
        ),
        (("translate", "{language}", "{text}"), "this model has no encoder.*relpos generate"),
        (("generate", "{run}", "{text}"), "this model has an encoder.*relpos translate"),
    ],
)
def test_bad_input_is_a_sentence(
    models: SimpleNamespace, capsys: Capture, tmp_path: Path, arguments: Any, message: str
) -> None:
    (tmp_path / "text").write_text("ba be\ndo\n")
    (tmp_path / "one").write_text("ba\n")
    (tmp_path / "latin").write_bytes("do\nGrüße\n".encode("latin-1"))
    names = {name: tmp_path / name for name in ("text", "one", "latin")} | vars(models)
    filled = [each.format(**names) for each in arguments]
    said = relpos_prints(capsys, *filled, status=1).error
    assert re.fullmatch(rf"relpos: .*{message}.*\n", said), said
    assert (tmp_path / "text").read_text() == "ba be\ndo\n"


def test_warnings_are_errors_if_you_like(translator: Translator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", TranslationWarning)
        with pytest.raises(TranslationWarning, match="line 1"):
            translator.translate(["ku " * 20])
