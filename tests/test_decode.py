# SPDX-License-Identifier: Apache-2.0
"""Searches against definitions: every target tried, one full pass a token, draws counted.

A model of 400 words all but a few of which are suppressed has so few targets that a beam of 400 is
never full. What is suppressed keeps its probability, so that scores are those of rp_model_score.

Tolerances. The cache computes what a whole pass does, in another order: logits of a size of some
ten, each the result of some hundred roundings in a row, and at most six places a target.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capi import ARGUMENT, ORDER, SHAPE, Core, CoreError, core_by_name
from decode_capi import NONE, POWER, WU, Decoder, Found, alignments
from model_capi import CROSS, Config, Model, Sentences

BEGIN, END, WORDS = 1, 2, (3, 4, 5, 6)
MANY, FEW = 400, 13
SMALL: dict[str, Any] = {
    "width": 16, "heads": 2, "feed_forward": 24, "max_length": 12, "decoder.k": 3, "encoder.k": 3,
    "source_vocabulary": 11, "target_vocabulary": FEW,
    "share_embeddings": False, "share_output": False,
}  # fmt: skip
OTHERS = [token for token in range(MANY) if token not in (END, *WORDS)]
PENALTIES = ((NONE, 0.6), (WU, 0.0), (WU, 0.6), (WU, 1.7), (POWER, 1.0), (POWER, 2.5))


@pytest.fixture(scope="module", params=["f32", "f64"])
def core(request: Any, libraries: dict[str, Path]) -> Core:
    return core_by_name(libraries, request.param)


def tolerance(core: Core) -> float:
    return 6 * 10 * 100 * float(np.finfo(core.dtype).eps) / 2


def model_of(core: Core, seed: int = 1, sharp: float = 4, **changes: Any) -> Model:
    """Random weights; `sharp` scales the output projection, so that words differ in likelihood."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    model = Model(
        Config(core, "tiny", SMALL | {"seed": seed} | named), tokens=4096, sentences=512, training=0
    )
    model.weights["output.weight"][:] *= sharp
    return model


def language_model(core: Core, **changes: Any) -> Model:
    return model_of(core, encoder__layers=0, **changes)


def sources(seed: int, lengths: Sequence[int] = (5, 0, 9, 1, 7)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 11, n).tolist() for n in lengths]


def batch_of(source: Any = None, prefixes: Any = None, **more: Any) -> Sentences:
    return Sentences(source, prefixes, None, **more)


# ------------------------------------------------------------------------------- every target tried


def targets(most: int, words: Sequence[int] = WORDS, least: int = 0) -> list[tuple[int, ...]]:
    """Every target: up to `most` words, those shorter than that with the end behind them."""
    ended = [(*y, END) for n in range(least, most) for y in itertools.product(words, repeat=n)]
    return ended + list(itertools.product(words, repeat=most))


def log_probabilities(models: Sequence[Model], source: Any, tried: Sequence[Any]) -> list[Any]:
    """log p of each token of each target, by whole passes; of several models of the mean."""
    read = [[BEGIN, *y[:-1]] for y in tried]
    batch = Sentences(None if source is None else [source] * len(tried), read, tried)
    scores = [model.score(batch).astype(np.float64) for model in models]
    mean = np.log(np.mean(np.exp(scores), axis=0))
    return np.split(mean, np.cumsum([len(y) for y in tried])[:-1])


def cut(x: Any, most: int = 400) -> list[Any]:
    return [x[i : i + most] for i in range(0, len(x), most)]


def covered(models: Sequence[Model], source: Any, tried: Sequence[Any]) -> list[float]:
    """sum_i log min(sum_j a_ji, 1) of each target, from the heads' maps."""
    read = [[BEGIN, *y[:-1]] for y in tried]
    batch = Sentences([source] * len(tried), read, None)
    shapes = [(len(y), len(source)) for y in tried]
    maps = [alignments(model, batch, shapes, -1, -1) for model in models]
    means = [np.mean([m[i] for m in maps], axis=0) for i in range(len(tried))]
    return [float(np.log(np.minimum(mean.sum(axis=0), 1)).sum()) for mean in means]


def divisor(penalty: int, alpha: float, length: int) -> float:
    if penalty == WU:
        return float(((5 + length) / 6) ** alpha)
    return float(length**alpha) if penalty == POWER else 1.0


def exhaustive(
    models: Sequence[Model], source: Any, tried: Sequence[Any], penalty: int, alpha: float,
    coverage: float = 0, forced: int = 0,
) -> list[Found]:  # fmt: skip
    found = []
    for part in cut(tried):
        each = log_probabilities(models, source, part)
        bonus = covered(models, source, part) if coverage else [0.0] * len(part)
        for y, parts, more in zip(part, each, bonus, strict=True):
            p = float(parts[forced:].sum())
            score = p / divisor(penalty, alpha, len(y)) + coverage * more
            ended = y[-1] == END
            found.append(Found(y[:-1] if ended else tuple(y), p, score, ended))
    return sorted(found, key=lambda f: -f.score)


def assert_same(core: Core, got: Sequence[Found], expected: Sequence[Found]) -> None:
    """The same scores in the same order, each the score of that very target."""
    assert len(got) == len(expected)
    close = tolerance(core)
    known = {(f.tokens, f.finished): f for f in expected}
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.score == pytest.approx(theirs.score, abs=close)
        own = known.get((mine.tokens, mine.finished))
        if own is None:  # a tie at the very end of the list
            assert abs(mine.score - expected[-1].score) <= close
            continue
        assert mine.log_probability == pytest.approx(own.log_probability, abs=close)
        assert mine.score == pytest.approx(own.score, abs=close)
    assert len({(f.tokens, f.finished) for f in got}) == len(got)


@pytest.mark.parametrize("n_best", [1, 7])
@pytest.mark.parametrize(("penalty", "alpha"), PENALTIES)
def test_a_beam_that_is_never_full_tries_everything(
    core: Core, penalty: int, alpha: float, n_best: int
) -> None:
    texts = sources(3)
    options = {"penalty": penalty, "alpha": alpha, "beam": MANY, "n_best": n_best}
    with model_of(core, target_vocabulary=MANY) as model, Decoder(model) as decoder:
        found = decoder.search(batch_of(texts), OTHERS, max_length=4, **options)
        for source, got in zip(texts, found, strict=True):
            best = exhaustive([model], source, targets(4), penalty, alpha)
            assert_same(core, got, best[:n_best])


@pytest.mark.parametrize("coverage", [0.2, 3.0])
@pytest.mark.parametrize("prefix", [(), (4, 3)])
def test_coverage(core: Core, coverage: float, prefix: tuple[int, ...]) -> None:
    texts = sources(4, (5, 3, 9))
    options = {"alpha": 0.6, "beam": MANY, "n_best": 5, "coverage": coverage}
    with model_of(core, target_vocabulary=MANY) as model, Decoder(model) as decoder:
        batch = batch_of(texts, [prefix] * 3) if prefix else batch_of(texts)
        found = decoder.search(batch, OTHERS, max_length=len(prefix) + 3, **options)
        tried = [(*prefix, *y) for y in targets(3)]
        for source, got in zip(texts, found, strict=True):
            best = exhaustive([model], source, tried, WU, 0.6, coverage, len(prefix))
            assert_same(core, got, best[:5])


def test_an_ensemble_is_the_mean_of_its_probabilities(core: Core) -> None:
    texts = sources(5, (4, 6))
    options = {"alpha": 0.6, "beam": MANY, "n_best": 6, "coverage": 0.5, "max_length": 4}
    models = [model_of(core, seed=s, target_vocabulary=MANY, norm=n)
              for s, n in ((1, "pre"), (2, "post"), (3, "pre"))]  # fmt: skip
    with Decoder(*models) as decoder:
        found = decoder.search(batch_of(texts), OTHERS, **options)
        for source, got in zip(texts, found, strict=True):
            best = exhaustive(models, source, targets(4), WU, 0.6, 0.5)
            assert_same(core, got, best[:6])
    for model in models:
        model.close()


def test_lengths_and_prefixes(core: Core) -> None:
    """A forced beginning is part of the target and of its length; its likelihood is not counted."""
    texts, prefixes = sources(6, (4, 6, 3)), [(5, 5), (), (6,)]
    options = {"beam": MANY, "n_best": 8, "min_length": 3, "max_length": 5, "alpha": 0.9}
    with model_of(core, target_vocabulary=MANY) as model, Decoder(model) as decoder:
        found = decoder.search(batch_of(texts, prefixes), [*OTHERS, 6], **options)
        for source, prefix, got in zip(texts, prefixes, found, strict=True):
            left = 5 - len(prefix)
            tried = targets(left, WORDS[:-1], max(3 - len(prefix), 0))
            whole = [(*prefix, *y) for y in tried]
            best = exhaustive([model], source, whole, WU, 0.9, 0, len(prefix))
            assert_same(core, got, best[:8])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_n_gram_twice(core: Core, n: int) -> None:
    texts, prefix = sources(7, (4, 6)), (3, 4)
    options = {"beam": MANY, "n_best": 10, "max_length": 6, "no_repeat": n}
    with model_of(core, target_vocabulary=MANY) as model, Decoder(model) as decoder:
        found = decoder.search(batch_of(texts, [prefix, prefix]), OTHERS, **options)
        tried = []
        for y in ((*prefix, *y) for y in targets(4)):
            words = y[:-1] if y[-1] == END else y
            grams = [words[i : i + n] for i in range(len(words) - n + 1)]
            if len(set(grams)) == len(grams):
                tried.append(y)
        for source, got in zip(texts, found, strict=True):
            best = exhaustive([model], source, tried, WU, 0.6, 0, 2)
            assert_same(core, got, best[:10])


def test_a_language_model_goes_on(core: Core) -> None:
    prefixes = [(3,), (), (5, 6, 5)]
    with language_model(core, target_vocabulary=MANY) as model, Decoder(model) as decoder:
        found = decoder.search(
            batch_of(None, prefixes), OTHERS, beam=MANY, n_best=4, max_more=3, alpha=1.0
        )
        for prefix, got in zip(prefixes, found, strict=True):
            tried = [(*prefix, *y) for y in targets(3)]
            best = exhaustive([model], None, tried, WU, 1.0, 0, len(prefix))
            assert_same(core, got, best[:4])


def test_the_end_may_come_though_a_prompt_has_it(core: Core) -> None:
    """It is none of a target's tokens, so that no n-gram of them comes twice by it."""
    with language_model(core, target_vocabulary=MANY) as model, Decoder(model) as decoder:
        batch = batch_of(None, [(5, END, 7)])
        free, once = (
            decoder.search(batch, OTHERS, beam=MANY, n_best=4, max_more=4, no_repeat=n)[0]
            for n in (0, 1)
        )
        assert any(each.finished for each in free), free
        assert any(each.finished for each in once), once
        assert all(len(set(each.tokens)) == len(each.tokens) for each in once)


def test_labelled_graphs_of_the_source(core: Core) -> None:
    texts = sources(8, (3, 5))
    rng = np.random.default_rng(1)
    graphs = [rng.integers(-1, 3, (len(x), len(x))) for x in texts]
    with model_of(core, encoder__relations=3, encoder__position="none") as model:
        batch = batch_of(texts, source_graphs=graphs)
        with Decoder(model) as decoder:
            found = decoder.search(batch, beam=3, n_best=3)
        for b, got in enumerate(found):
            for f in got:
                y = (*f.tokens, END) if f.finished else f.tokens
                one = Sentences([texts[b]], [[BEGIN, *y[:-1]]], [y], source_graphs=[graphs[b]])
                p = float(model.score(one).sum())
                assert f.log_probability == pytest.approx(p, abs=2 * tolerance(core))


# ------------------------------------------------------------------------------ one pass for a token


def greedy(models: Sequence[Model], source: Any, prefix: Any, most: int, banned: Any = ()) -> Found:
    """The likeliest token until it is the end."""
    y, p = list(prefix), 0.0
    while len(y) < most:
        batch = Sentences(None if source is None else [source], [[BEGIN, *y]], None)
        each = []
        for model in models:
            x = model.hidden(batch, 16)[-1].astype(np.float64)
            logits = model.weights["output.weight"].astype(np.float64) @ x
            each.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        log_p = np.log(np.mean(np.exp(each), axis=0))
        allowed = log_p.copy()
        allowed[list(banned)] = -math.inf
        token = int(allowed.argmax())
        p += log_p[token]
        if token == END:
            return Found(tuple(y), p, p, True)
        y.append(token)
    return Found(tuple(y), p, p, False)


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("position", ["shaw", "rope", "transformer-xl", "t5", "none"])
def test_a_beam_of_one_is_greedy(core: Core, position: str, members: int) -> None:
    texts, prefixes = sources(9), [(), (4,), (3, 3), (), (7, 8, 9)]
    shape = {"heads": 4, "key_heads": 2} if position in ("shaw", "rope") else {}
    models = [model_of(core, seed=s, decoder__position=position, **shape) for s in range(members)]
    with Decoder(*models) as decoder:
        found = decoder.search(batch_of(texts, prefixes), [7], beam=1, penalty=NONE, max_length=9)
    ends = set()
    for source, prefix, got in zip(texts, prefixes, found, strict=True):
        expected = greedy(models, source, prefix, 9, [7])
        assert got[0].tokens == expected.tokens
        assert got[0].finished == expected.finished
        assert got[0].score == pytest.approx(expected.score, abs=2 * tolerance(core))
        ends.add(expected.finished)
    for model in models:
        model.close()


def test_greedy_searches_end_and_are_cut_off(core: Core) -> None:
    """That the test above has met both."""
    finished = []
    with model_of(core) as model, Decoder(model) as decoder:
        for seed in range(8):
            found = decoder.search(batch_of(sources(seed)), beam=1, max_length=9)
            finished += [f.finished for (f,) in found]
    assert len(set(finished)) == 2


def plain_beam(model: Model, source: Any, beam: int, n_best: int, most: int) -> list[Found]:
    """The search to the bitter end, without dropping anything."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    closed = []
    while live:
        batch = Sentences([source] * len(live), [[BEGIN, *y] for _, y in live], None)
        hidden = model.hidden(batch, 16).astype(np.float64)
        ends = np.cumsum([len(y) + 1 for _, y in live]) - 1
        candidates = []
        for (p, y), x in zip(live, hidden[ends], strict=True):
            logits = model.weights["output.weight"].astype(np.float64) @ x
            log_p = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            candidates += [(p + log_p[t], (*y, t)) for t in range(len(log_p))]
        candidates = sorted(candidates, reverse=True)[:beam]
        live = []
        for p, y in candidates:
            finished = y[-1] == END
            if finished or len(y) == most:
                score = p / divisor(WU, 0.6, len(y))
                closed.append(Found(y[:-1] if finished else y, p, score, finished))
            else:
                live.append((p, y))
    return sorted(closed, key=lambda f: -f.score)[:n_best]


@pytest.mark.parametrize(("beam", "n_best"), [(2, 1), (3, 3), (4, 2), (13, 5)])
def test_dropping_loses_nothing(core: Core, beam: int, n_best: int) -> None:
    with model_of(core) as model, Decoder(model) as decoder:
        for seed in range(6):
            texts = sources(seed)
            found = decoder.search(batch_of(texts), beam=beam, n_best=n_best, max_length=8)
            for source, got in zip(texts, found, strict=True):
                assert_same(core, got, plain_beam(model, source, beam, n_best, 8))


# --------------------------------------------------------------------- nothing depends on the others


def every_search(decoder: Decoder, model: Model) -> list[list[Found]]:
    texts = sources(11, (5, 0, 9, 1, 7, 3))
    found = []
    for options in ({}, {"coverage": 0.3, "n_best": 3}, {"sample": 1, "n_best": 4}):
        found += decoder.search(batch_of(texts), max_length=9, seed=5, **options)
    return found


def test_threads_do_not_change_a_bit(core: Core) -> None:
    results = []
    for threads in (1, 2, 3):
        core.set_threads(threads)
        with model_of(core) as model, Decoder(model) as decoder:
            results.append(every_search(decoder, model))
            results.append(every_search(decoder, model))
    core.set_threads(0)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("options", [{"n_best": 4}, {"sample": 1, "n_best": 3}])
def test_a_sentence_alone(core: Core, options: dict[str, Any]) -> None:
    """The same results but for rounding, draws by ordinals."""
    texts = sources(12)
    given = {"max_length": 9, "seed": 8} | options
    with model_of(core) as model, Decoder(model) as decoder:
        together = decoder.search(batch_of(texts, ordinals=range(20, 25)), **given)
        for b, text in enumerate(texts):
            (alone,) = decoder.search(batch_of([text], ordinals=[20 + b]), **given)
            assert len(alone) == len(together[b]) == given["n_best"]
            for one, other in zip(alone, together[b], strict=True):
                assert (one.tokens, one.finished) == (other.tokens, other.finished)
                assert one.score == pytest.approx(other.score, abs=tolerance(core))


def test_a_sentence_whose_logits_are_not_finite(core: Core) -> None:
    """It alone has no results."""
    texts = [[3, 4, 5], [3, 9, 5], [4, 4]]
    for options in ({}, {"sample": 1, "n_best": 2}, {"beam": 1}, {"coverage": 1.0}):
        for bad in (np.nan, np.inf):
            with model_of(core) as model, Decoder(model) as decoder:
                sound = decoder.search(batch_of(texts), max_length=6, **options)
                model.weights["source_embedding.weight"][9] = bad
                found = decoder.search(batch_of(texts), max_length=6, **options)
                assert found[1] == []
                assert [found[0], found[2]] == [sound[0], sound[2]]
                assert len(sound[1]) > 0


def test_empty_batches_and_sources(core: Core) -> None:
    with model_of(core) as model, Decoder(model) as decoder:
        assert decoder.search(batch_of([])) == []
        found = decoder.search(batch_of([[], []]), max_more=4, coverage=0.4)
        assert [len(f) for f in found] == [1, 1]
        assert found[0][0] == found[1][0]
        assert len(found[0][0].tokens) <= 4
        (nothing,) = decoder.search(batch_of([[]]), max_more=0)
        assert nothing == [Found((), 0.0, 0.0, False)]


def test_default_lengths(core: Core) -> None:
    """Source and max_more, and never more than the model has places for."""
    with model_of(core) as model, Decoder(model) as decoder:
        texts = sources(1, (2, 5, 12))
        found = decoder.search(batch_of(texts), [END], max_more=3)
        assert [len(f[0].tokens) for f in found] == [5, 8, 12]
        assert not any(f[0].finished for f in found)
        found = decoder.search(batch_of(texts), max_more=3, min_length=7)
        assert [len(f[0].tokens) for f in found][0] == 7  # which is more than 5
        found = decoder.search(batch_of(texts), [END], max_more=3, min_length=7)
        assert [len(f[0].tokens) for f in found] == [7, 8, 12]
        found = decoder.search(batch_of(texts), max_more=3, min_length=99)
        assert [len(f[0].tokens) for f in found] == [12, 12, 12]
        (whole,) = decoder.search(batch_of([[3]], [[4, 5, 6]]), max_length=2)
        assert whole == [Found((4, 5, 6), 0.0, 0.0, False)]
        (most,) = decoder.search(batch_of([[3]], [[4] * 11]), [END], max_length=12)
        assert len(most[0].tokens) == 12


def test_where_nothing_may_be_said(core: Core) -> None:
    with model_of(core) as model, Decoder(model) as decoder:
        for sample in (0, 1):
            (found,) = decoder.search(batch_of([[3]]), range(FEW), sample=sample)
            assert found == []


# ----------------------------------------------------------------------------------------- sampling


def chi_square(counts: Any, expected: Any) -> float:
    """How unlikely such counts are: normal deviates of a chi-square (Wilson and Hilferty)."""
    some = expected > 0
    assert counts[~some].sum() == 0
    if some.sum() == 1:
        return 0.0
    freedom = some.sum() - 1
    x = float(((counts - expected)[some] ** 2 / expected[some]).sum())
    spread = 2 / (9 * freedom)
    return float(((x / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def next_words(model: Model, source: Any, temperature: float = 1) -> Any:
    batch = Sentences([source], [[BEGIN]], None)
    x = model.hidden(batch, 16)[-1].astype(np.float64)
    logits = model.weights["output.weight"].astype(np.float64) @ x / temperature
    p = np.exp(logits - logits.max())
    return p / p.sum()


@pytest.mark.parametrize("vocabulary", [FEW, MANY])
@pytest.mark.parametrize(
    ("options", "suppressed"),
    [
        ({}, ()),
        ({"temperature": 0.5}, ()),
        ({"temperature": 3.0}, (4, 9)),
        ({"top_k": 3}, ()),
        ({"top_k": 300}, ()),
        ({"top_p": 0.7}, (0, 5)),
        ({"top_p": 0.999}, ()),
        ({"top_k": 4, "top_p": 0.5}, (3,)),
    ],
)
def test_draws_have_their_probabilities(
    core: Core, vocabulary: int, options: dict[str, Any], suppressed: tuple[int, ...]
) -> None:
    draws, source = 2000, [3, 1, 4]
    sharp = 4 if vocabulary == FEW else 1  # a flat one, where the likeliest 128 are not enough
    with model_of(core, target_vocabulary=vocabulary, sharp=sharp) as model:
        p = next_words(model, source, options.get("temperature", 1))
        with Decoder(model) as decoder:
            (found,) = decoder.search(
                batch_of([source]), suppressed, sample=1, n_best=draws, max_length=1, seed=3,
                penalty=NONE, **options,
            )  # fmt: skip
    assert len(found) == draws
    said = np.array([END if f.finished else f.tokens[0] for f in found])
    values = np.array([f.log_probability for f in found])
    np.testing.assert_allclose(values, np.log(p)[said], atol=tolerance(core))
    kept = p.copy()
    kept[list(suppressed)] = 0
    order = np.argsort(-kept, kind="stable")
    before = np.cumsum(kept[order]) - kept[order]
    out = order[before >= options.get("top_p", 1) * kept.sum()]
    if options.get("top_p", 1) < 1:
        kept[out] = 0
    kept[order[options.get("top_k") or vocabulary :]] = 0
    counts = np.bincount(said, minlength=vocabulary)
    assert chi_square(counts, draws * kept / kept.sum()) < 4


def test_draws_of_next_to_nothing(core: Core) -> None:
    """Where all but e^-200 of the probability is not to be said, the rest has its own all the same."""
    draws, source, loud = 2000, [3, 1, 4], 6
    with model_of(core) as model:
        p = next_words(model, source)
        x = model.hidden(Sentences([source], [[BEGIN]], None), 16)[-1].astype(np.float64)
        model.weights["output.weight"][loud] += 200 * x / (x @ x)
        with Decoder(model) as decoder:
            (found,) = decoder.search(
                batch_of([source]), [loud], sample=1, n_best=draws, max_length=1, seed=3,
                penalty=NONE,
            )  # fmt: skip
    p[loud] = 0
    said = [END if f.finished else f.tokens[0] for f in found]
    assert chi_square(np.bincount(said, minlength=FEW), draws * p / p.sum()) < 4


def test_draws_are_independent(core: Core) -> None:
    """Of seeds, draws, sentences and places: pairs of words are as likely as their product says."""
    with model_of(core) as model, Decoder(model) as decoder:
        options = {"sample": 1, "n_best": 200, "max_length": 2, "penalty": NONE}
        (one, two) = decoder.search(batch_of([[3], [3]]), seed=1, **options)
        (again, _) = decoder.search(batch_of([[3], [3]]), seed=1, **options)
        (other, _) = decoder.search(batch_of([[3], [3]]), seed=2, **options)
        assert one == again
        assert len({tuple(f.tokens for f in x) for x in (one, two, other)}) == 3
        pairs = targets(2, [t for t in range(FEW) if t != END])
        each = log_probabilities([model], [3], pairs)
        p = np.array([math.exp(x.sum()) for x in each])
        assert p.sum() == pytest.approx(1, abs=1e-4)
        big = p >= 5 / 600  # classes of which fewer than five are expected count as one
        counts = np.zeros(len(pairs))
        for f in (*one, *two, *other):
            counts[pairs.index((*f.tokens, END) if f.finished else f.tokens)] += 1
        counts = np.append(counts[big], counts[~big].sum())
        expected = np.append(p[big], p[~big].sum()) * 600
        assert chi_square(counts, expected) < 4


# -------------------------------------------------------------------------- one token at a time, maps


@pytest.mark.parametrize("members", [1, 2])
def test_one_token_at_a_time(core: Core, members: int) -> None:
    """Rows that part, stop and go on: logits are those of whole passes."""
    texts, starts = sources(14, (4, 0, 6)), [[BEGIN, 4, 5], [BEGIN], [BEGIN, 3]]
    models = [model_of(core, seed=s) for s in range(members)]

    def whole(source: Any, target: Any) -> Any:
        each = []
        for model in models:
            x = model.hidden(Sentences([source], [target], None), 16)[-1].astype(np.float64)
            logits = model.weights["output.weight"].astype(np.float64) @ x
            each.append(logits if members == 1 else logits - np.log(np.exp(logits).sum()))
        return each[0] if members == 1 else np.log(np.mean(np.exp(each), axis=0))

    steps: list[tuple[list[int] | None, list[int]]] = [
        ([0, 0, 2, 1, 2], [3, 4, 5, 6, 7]), (None, [8, 9, 10, 3, 4]), ([4, 1], [5, 6]), ([], []),
    ]  # fmt: skip
    with Decoder(*models) as decoder:
        rows = list(zip(texts, starts, strict=True))
        logits = decoder.begin(batch_of(texts, starts), 5)
        for parents, tokens in steps:
            expected = np.array([whole(*row) for row in rows]).reshape(len(rows), FEW)
            np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance(core))
            from_rows = parents if parents is not None else range(len(tokens))
            rows = [(rows[p][0], [*rows[p][1], t]) for p, t in zip(from_rows, tokens, strict=True)]
            logits = decoder.step(tokens, parents)
    for model in models:
        model.close()


def test_alignments_are_maps(core: Core) -> None:
    texts, read = sources(15, (4, 0, 6, 3)), [[1, 3, 4], [1], [], [1, 5, 6, 7, 8]]
    shapes = [(len(y), len(x)) for x, y in zip(texts, read, strict=True)]
    with model_of(core) as model:
        batch = Sentences(texts, read, None)
        maps = {
            (layer, head, b): model.map(batch, CROSS, layer, head, b, shapes[b])
            for layer in range(2) for head in range(2) for b in (0, 3)
        }  # fmt: skip
        for layer, at in ((0, 0), (1, 1), (-1, 1), (-2, 0)):
            for head in (-1, 0, 1):
                heads = (0, 1) if head < 0 else (head,)
                found = alignments(model, batch, shapes, layer, head)
                for b in (0, 3):
                    mean = np.mean([maps[at, h, b] for h in heads], axis=0)
                    np.testing.assert_allclose(found[b], mean, rtol=0, atol=tolerance(core))


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"begin": FEW}, "search: begin=13, must be from 0 to 12"),
        ({"end": -1}, "search: end=-1, must be from 0 to 12"),
        ({"beam": 0}, "search: beam=0, must be from 1 to the vocabulary's 13"),
        ({"beam": 14}, "search: beam=14, must be from 1 to the vocabulary's 13"),
        ({"n_best": 5}, "search: n_best=5, must be from 1 to beam=4"),
        ({"n_best": 0}, "search: n_best=0"),
        ({"penalty": 3}, "search: penalty=3, must be RP_PENALTY_NONE=0"),
        ({"alpha": -0.1}, "search: alpha=-0.1, must be finite and not negative"),
        ({"alpha": math.nan}, "search: alpha=nan"),
        ({"coverage": math.inf}, "search: coverage=inf"),
        ({"min_length": -1}, "search: min_length=-1"),
        ({"min_length": 4, "max_length": 3}, "search: min_length=4 is more than max_length=3"),
        ({"max_length": -2}, "search: max_length=-2"),
        ({"max_more": -2}, "search: max_more=-2"),
        ({"no_repeat": -2}, "search: no_repeat=-2"),
        ({"suppressed": [3, 13]}, "search: suppressed[1]=13, must be from 0 to 12"),
        ({"suppressed": [3] * 14}, "search: suppressed_count=14"),
        ({"sample": 1, "temperature": 0}, "search: temperature=0, must be finite and above 0"),
        ({"sample": 1, "top_k": -1}, "search: top_k=-1"),
        ({"sample": 1, "top_p": 0}, "search: top_p=0, must be above 0 and at most 1"),
        ({"sample": 1, "top_p": 1.1}, "search: top_p=1.1"),
        ({"sample": 1, "n_best": 0}, "search: n_best=0 draws"),
        ({"average": 1}, "search: average=1, but models[0] keeps none; its ema is 0"),
    ],
)
def test_a_search_that_is_refused(core: Core, options: dict[str, Any], sentence: str) -> None:
    with model_of(core) as model, Decoder(model) as decoder:
        before = decoder.search(batch_of([[3, 4]]))
        with pytest.raises(CoreError) as refused:
            decoder.search(batch_of([[5]]), **options)
        assert refused.value.status == (ORDER if "average" in options else ARGUMENT)
        assert refused.value.message.startswith(sentence)
        assert decoder.results(1) == before


def test_batches_that_are_refused(core: Core) -> None:
    with model_of(core) as model, Decoder(model) as decoder:
        for batch, options, status, sentence in (
            (batch_of([[3], [11]]), {}, ARGUMENT, "batch: source[1]=11 (token 0 of sentence 1)"),
            (batch_of([[3]], [[FEW]]), {}, ARGUMENT, "batch: target[0]=13"),
            (batch_of([[3] * 13]), {}, SHAPE, "batch: source sentence 0 has 13 tokens"),
            (batch_of([[3]], [[4] * 12]), {}, SHAPE, "batch: target sentence 0 has 12 tokens and"),
            (batch_of(None, [[3]]), {}, ARGUMENT, "batch: source_offsets is NULL"),
            (batch_of([[3]] * 400), {"beam": 11}, SHAPE, "search: 400 sentences of beam=11 are"),
            (batch_of([[3]] * 2), {"sample": 1, "n_best": 4000}, SHAPE, "search: 2 sentences of n"),
            (batch_of([[]] * 500, [[4] * 8] * 500), {"beam": 1}, SHAPE, "batch: target has 4500"),
        ):  # fmt: skip
            with pytest.raises(CoreError) as refused:
                decoder.search(batch, **options)
            assert refused.value.status == status
            assert refused.value.message.startswith(sentence)
    with language_model(core) as model, Decoder(model) as decoder:
        with pytest.raises(CoreError, match="batch: source is given, but the model has no encoder"):
            decoder.search(batch_of([[3]], [[4]]))
        with pytest.raises(CoreError, match="search: coverage=1, but the model has no source"):
            decoder.search(batch_of(None, [[4]]), coverage=1.0)


def test_models_that_cannot_decode(core: Core) -> None:
    with (
        model_of(core, decoder__layers=0) as encoder,
        model_of(core, decoder__relations=3) as graphs,
        model_of(core) as model,
        model_of(core, target_vocabulary=MANY) as larger,
        model_of(core, source_vocabulary=12) as foreign,
        language_model(core) as alone,
    ):
        for models, sentence in (
            ([encoder], "models[0] has decoder.layers=0"),
            ([graphs], "models[0] has decoder.relations=3"),
            ([model, larger], "models[1] has target_vocabulary=400, but models[0] has 13"),
            ([model, foreign], "models[1] has source_vocabulary=12, but models[0] has 11"),
            ([model, alone], "models[1] has encoder.layers=0, but models[0] has 2"),
            ([alone, model], "models[1] has encoder.layers=2, but models[0] has 0"),
            ([model, model], "models[0] and models[1] are one"),
        ):
            with pytest.raises(CoreError) as refused:
                Decoder(*models)
            assert refused.value.status == ARGUMENT
            assert refused.value.message.startswith(f"decoder: {sentence}")


def test_steps_that_are_refused(core: Core) -> None:
    with model_of(core) as model, Decoder(model) as decoder:
        with pytest.raises(CoreError) as refused:
            decoder.step([3])
        assert refused.value.status == ORDER
        batch = batch_of([[3], [4]], [[BEGIN], [BEGIN] * 11])
        with pytest.raises(CoreError, match="most_rows=1, must be from the batch's 2 sentences"):
            decoder.begin(batch, 1)
        with pytest.raises(CoreError, match="target sentence 1 is empty"):
            decoder.begin(batch_of([[3], [4]], [[BEGIN], []]), 2)
        with pytest.raises(CoreError, match="target is NULL"):
            decoder.begin(batch_of([[3], [4]]), 2)
        first = decoder.begin(batch, 3)
        for tokens, parents, sentence in (
            ([3] * 4, [0] * 4, "rows=4, must be from 0 to most_rows=3"),
            ([3] * 3, None, "parents is NULL, but rows=3 are more than the 2 before"),
            ([3, 3], [0, 2], "parents[1]=2, must be one of the 2 rows before"),
            ([3, 13], [0, 1], "tokens[1]=13, must be from 0 to 12"),
        ):
            with pytest.raises(CoreError) as refused:
                decoder.step(tokens, parents)
            assert sentence in refused.value.message
        after = decoder.step([3, 3, 4], [0, 1, 0])
        with pytest.raises(CoreError, match="row 0 would be longer than max_length=12"):
            decoder.step([3], [1])
        assert np.array_equal(first, decoder.begin(batch, 3))
        assert np.array_equal(after, decoder.step([3, 3, 4], [0, 1, 0]))


def test_results_that_are_not_there(core: Core) -> None:
    with model_of(core) as model, Decoder(model) as decoder:
        with pytest.raises(CoreError, match="sentence=0, but the last search was of 0"):
            decoder.results(1)
        decoder.search(batch_of([[3]]))
        with pytest.raises(CoreError, match="sentence=1, but the last search was of 1"):
            decoder.results(2)
        place = ctypes.c_int64(0), ctypes.c_int64(1), ctypes.create_string_buffer(64)
        assert core.lib.rp_decoder_result(decoder.handle, *place) == ARGUMENT


def test_alignments_that_are_refused(core: Core) -> None:
    with model_of(core) as model, language_model(core) as alone:
        batch = Sentences([[3]], [[4]], None)
        for layer, head, sentence in (
            (2, 0, r"layers\[0\]=2, must be from -2 to 1"),
            (-3, 0, r"layers\[0\]=-3"),
            (0, 2, r"heads\[0\]=2, must be from 0 to 1"),
        ):
            with pytest.raises(CoreError, match=sentence):
                alignments(model, batch, [(1, 1)], layer, head)
        with pytest.raises(CoreError, match="no attention from a decoder to an encoder"):
            alignments(alone, Sentences(None, [[4]], None), [(1, 1)], 0, 0)
