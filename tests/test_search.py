# SPDX-License-Identifier: Apache-2.0
"""The Python face of the search: what it takes, what it refuses, and that it is the model's."""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos import Search, _core
from saved_models import VOCABULARY, random_model, spoil, tokens
from test_layout import CSRC

LINES = ["ba be", "do", "gi ko ku fa", "ba be bi bo bu da de", "ke ki"]


def sources(lines: list[str] = LINES, prefixes: list[str] | None = None) -> relpos.Batch:
    def joined(texts: list[str]) -> Any:
        parts = [tokens(text) for text in texts]
        return [x for part in parts for x in part], np.cumsum([0, *map(len, parts)])

    return relpos.Batch(*joined(lines), *(joined(prefixes) if prefixes is not None else ()))


def next_logits(model: relpos.Transformer, source: list[int] | None, said: list[int]) -> Any:
    """What comes after bos and what was said, by a forward pass over all of it."""
    if source is None:
        batch = relpos.Batch.from_sentences([said], bos=1, eos=2)
    else:
        batch = relpos.Batch.from_pairs([source], [said], bos=1, eos=2)
    [hidden] = model.hidden(batch)
    return hidden[-1] @ model.parameters[output_of(model)].T


def output_of(model: relpos.Transformer) -> str:
    names = ("output.weight", "target_embedding.weight", "source_embedding.weight")
    return next(name for name in names if name in model.parameters)


def greedy(model: relpos.Transformer, source: list[int] | None, most: int) -> list[int]:
    said: list[int] = []
    while len(said) < most:
        token = int(next_logits(model, source, said).argmax())
        if token == 2:
            break
        said.append(token)
    return said


# ---- Search --------------------------------------------------------------------------------------


def test_it_mirrors_the_header() -> None:
    """Field for field, default for default."""
    text = (CSRC / "include" / "relpos" / "decode.h").read_text()
    struct = re.search(r"typedef struct rp_search \{(.*?)\} rp_search;", text, re.DOTALL)
    assert struct is not None
    plain = re.sub(r"/\*.*?\*/", "", struct[1], flags=re.DOTALL)
    declared = [
        name.strip(" *")
        for line in re.findall(r"(?:const )?\w+ ([^;]+);", plain)
        for name in line.split(",")
    ]
    fields = {each.name: each.default for each in dataclasses.fields(Search)}
    assert [x for x in declared if x not in ("struct_size", "suppressed_count")] == list(fields)

    body = re.search(r"rp_search_default\(void\) \{(.*?)\n\}", text, re.DOTALL)
    assert body is not None
    given = dict(re.findall(r"search\.(\w+) = ([^;]+);", body[1]))
    assert given.pop("struct_size") == "sizeof search"
    assert given.pop("penalty") == "RP_PENALTY_WU" and fields["penalty"] == "wu"
    for name, value in fields.items():
        if name not in ("penalty", "suppressed"):
            assert value == float(given.get(name, 0)), name
    assert fields["suppressed"] == () and isinstance(fields["sample"], bool)
    assert [each.name for each in dataclasses.fields(Search)] == list(_core.search_default())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam": 0}, "beam: expected 1 or more, got 0"),
        ({"beam": 2.5}, "beam: expected an integer, got float"),
        ({"n_best": 5}, "n_best: expected at most beam=4, got 5: a beam has no more"),
        ({"penalty": "google"}, "penalty: expected 'wu' or 'power' or 'none', got 'google'"),
        ({"alpha": -1}, "alpha: expected 0 or more, got -1"),
        ({"alpha": float("nan")}, "alpha: expected a finite number, got nan"),
        ({"coverage": -0.5}, "coverage: expected 0 or more, got -0.5"),
        ({"min_length": -1}, "min_length: expected 0 or more"),
        ({"min_length": 9, "max_length": 3}, "min_length: expected at most max_length=3, got 9"),
        ({"max_more": -2}, "max_more: expected 0 or more, got -2"),
        ({"no_repeat": -1}, "no_repeat: expected 0 or more"),
        ({"suppressed": (4, -1)}, f"suppressed: expected 0 to {2**31 - 1}, got -1"),
        ({"suppressed": ("a",)}, "suppressed: expected integers"),
        ({"temperature": 0}, "temperature: expected a positive finite number, got 0"),
        ({"top_k": -1}, "top_k: expected 0 or more"),
        ({"top_p": 0}, "top_p: expected above 0 and up to 1, got 0"),
        ({"top_p": 1.5}, "top_p: expected above 0 and up to 1, got 1.5"),
        ({"seed": 1 << 64}, r"seed: expected below 2\*\*64"),
        ({"begin": 1 << 31}, f"begin: expected 0 to {2**31 - 1}, got"),
        *(
            ({name: 10**23}, rf"{name}: expected at most 2\^40, got 1(0{{23}})$")
            for name in ("beam", "min_length", "max_length", "max_more", "no_repeat", "top_k")
        ),
    ],
)
def test_what_a_search_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        Search(**given)


def test_what_a_search_can_be() -> None:
    search = Search(suppressed=[4, 5], sample=1, n_best=7)  # type: ignore[arg-type]
    assert (search.suppressed, search.sample, search.rows) == ((4, 5), True, 7)
    assert dataclasses.replace(search, sample=False, n_best=1).rows == 4
    assert Search(suppressed=[5, 4, 5] * 99).suppressed == (5, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        search.beam = 3  # type: ignore[misc]


# ---- a search ------------------------------------------------------------------------------------


def test_greedy_is_the_most_likely_token_each_time() -> None:
    model = random_model()
    found = model.search(sources(), Search(beam=1, max_length=9))
    assert len({tuple(each.tokens.tolist()) for [each] in found}) >= 4
    assert len({each.finished for [each] in found}) == 2
    for line, [best] in zip(LINES, found, strict=True):
        assert best.tokens.dtype == np.int32
        assert best.tokens.tolist() == greedy(model, tokens(line), 9)
        assert best.finished == (best.tokens.size < 9)


def test_scores_are_those_of_the_model() -> None:
    model = random_model()
    search = Search(beam=4, n_best=3, max_length=8, alpha=0.6)
    for line, found in zip(LINES, model.search(sources(), search), strict=True):
        assert len(found) == 3 and len({tuple(each.tokens.tolist()) for each in found}) == 3
        assert [each.score for each in found] == sorted((x.score for x in found), reverse=True)
        for each in found:
            batch = relpos.Batch.from_pairs([tokens(line)], [each.tokens], bos=1, eos=2)
            [scores] = model.score(batch)
            said = scores if each.finished else scores[:-1]
            expected = float(said.sum(dtype=np.float64))
            # float32 logits of a few units, rounded apart in two ways, for up to nine tokens
            assert each.log_probability == pytest.approx(expected, abs=9 * 40 * 2**-23)
            length = ((5 + said.size) / 6) ** 0.6
            assert each.score == pytest.approx(each.log_probability / length, rel=1e-12)


def test_a_beginning_is_forced() -> None:
    model = random_model()
    prefixes = ["ku ku", "", "ba", "", "fe fi fo"]
    found = model.search(sources(prefixes=prefixes), Search(beam=2, max_length=9))
    free = model.search(sources(), Search(beam=2, max_length=9))
    for prefix, [best], [other] in zip(prefixes, found, free, strict=True):
        forced = tokens(prefix)
        assert best.tokens[: len(forced)].tolist() == forced
        if not forced:
            assert best.tokens.tolist() == other.tokens.tolist()


def test_a_decoder_alone() -> None:
    model = random_model(**{"encoder.layers": 0})
    prompts = ["ba be", "", "do"]
    offsets = np.cumsum([0, *(len(tokens(x)) for x in prompts)])
    batch = relpos.Batch(target=tokens(" ".join(prompts)), target_offsets=offsets)
    found = model.search(batch, Search(beam=1, max_length=7))
    for prompt, [best] in zip(prompts, found, strict=True):
        said = tokens(prompt)
        while len(said) < 7 and (token := int(next_logits(model, None, said).argmax())) != 2:
            said.append(token)
        assert best.tokens.tolist() == said


def test_draws_are_of_the_seed() -> None:
    model = random_model()
    search = Search(sample=True, n_best=3, max_length=8, seed=5)
    drawn, again, other = (
        [[x.tokens.tolist() for x in found] for found in model.search(sources(), how)]
        for how in (search, search, dataclasses.replace(search, seed=6))
    )
    assert drawn == again and drawn != other and len(drawn[0]) == 3
    one = dataclasses.replace(search, top_k=1, n_best=1)
    for line, [best] in zip(LINES, model.search(sources(), one), strict=True):
        assert best.tokens.tolist() == greedy(model, tokens(line), 8)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.001, "min_length": 3},  # the end outweighs all else beyond any float
        {"temperature": 1e-6, "suppressed": (4, 5, 6)},
        {"temperature": 1e300, "suppressed": (5,)},  # all are alike, and one is banned
        {"temperature": 1e-300},
        {"max_length": 3, "max_more": 0, "temperature": 0.01, "top_p": 1e-12},
    ],
    ids=str,
)
def test_every_draw_has_a_result(changes: dict[str, Any]) -> None:
    """However far what is banned is ahead of what may be said."""
    model = random_model()
    model.parameters[output_of(model)][2] *= 40  # the end is very likely, or very unlikely
    search = Search(sample=True, n_best=3, seed=5, **({"max_length": 6} | changes))
    for found in model.search(sources(), search):
        assert len(found) == 3
        for each in found:
            assert np.isfinite(each.score) and each.log_probability <= 0
            assert not {*search.suppressed} & {*each.tokens.tolist()}
            assert search.min_length <= len(each.tokens) <= search.max_length


def test_the_least_share_is_the_likeliest_token() -> None:
    """Also where that share of what is left beside the banned is 0 to a double."""
    model = random_model()
    search = Search(n_best=1, beam=1, max_length=6, suppressed=tuple(range(4, 19)))
    draws = dataclasses.replace(search, sample=True, n_best=3, top_p=5e-324)
    drawn, best = model.search(sources(), draws), model.search(sources(), search)
    for three, [greedy] in zip(drawn, best, strict=True):
        assert [x.tokens.tolist() for x in three] == [greedy.tokens.tolist()] * 3


def test_draws_of_what_is_full_already() -> None:
    for found in random_model().search(sources(), Search(sample=True, n_best=3, max_more=0)):
        assert len(found) == 3
    # coverage looks at what is forced
    full = Search(sample=True, n_best=3, max_length=1, coverage=0.2)
    for found in random_model().search(sources(prefixes=LINES[1:2] * 5), full):
        assert len(found) == 3


def test_by_the_average_of_the_weights(tmp_path: Path) -> None:
    """As the model that the average was saved as; the weights are what they were, and refused is
    an ensemble of which one has none."""
    config = relpos.Config().replace({"ema": 0.9, "learning_rate": 0.05, "warmup": 1})
    model = relpos.Transformer(config, tokens=64, sentences=8)
    batch = relpos.Batch.from_pairs([[7, 4, 9], [5, 2]], [[6, 8], [3, 3, 6]], bos=1, eos=2)
    for _ in range(5):
        model.step(batch)
    model.save(tmp_path / "average", "average")
    saved = relpos.Transformer.load(tmp_path / "average", tokens=64, training=False)
    asked = relpos.Batch(batch.source, batch.source_offsets)

    def found(which: relpos.Transformer, **given: bool) -> list[tuple[list[int], float]]:
        how = Search(max_length=6, beam=3, n_best=3, **given)  # type: ignore[arg-type]
        return [(x.tokens.tolist(), x.score) for y in which.search(asked, how) for x in y]

    by_weights = found(model)
    by_average = found(model, average=True)
    assert by_average == found(saved) != by_weights
    assert found(model) == by_weights
    pair = relpos.Decoder(model, relpos.Transformer(config, tokens=64, training=False))
    with pytest.raises(RuntimeError, match=r"average=1, but models\[1\] keeps none"):
        pair.search(asked, Search(average=True))
    assert found(model) == by_weights


def test_what_is_not_finite_has_no_result() -> None:
    model = random_model()
    before = model.search(sources(), Search(max_length=8))
    spoil(model, "do")
    after = model.search(sources(), Search(max_length=8))
    assert [len(found) for found in after] == [1, 0, 1, 1, 1]
    for one, other in zip(before, after, strict=True):
        assert not other or one[0].tokens.tolist() == other[0].tokens.tolist()


def test_what_is_not_finite_in_one_hypothesis_alone() -> None:
    model, source = random_model(), tokens(LINES[0])
    second = int(np.argsort(next_logits(model, source, []))[-2])
    model.parameters["target_embedding.weight"][second] = np.nan
    for beam, results in ((1, 1), (2, 0)):
        how = Search(beam=beam, max_length=2, suppressed=[2])
        assert len(model.search(sources(LINES[:1]), how)[0]) == results


# ---- token by token ------------------------------------------------------------------------------


def log_softmax(logits: Any) -> Any:
    whole = logits.astype(np.float64)
    return whole - np.log(np.exp(whole).sum(axis=-1, keepdims=True))


def test_step_by_step() -> None:
    model = random_model()
    line = tokens("gi ko ku fa")
    decoder = relpos.Decoder(model)
    logits = decoder.begin(relpos.Batch(line, [0, 4], [1], [0, 1]), most_rows=3)
    assert logits.shape == (1, VOCABULARY.size) and logits.dtype == np.float32
    np.testing.assert_allclose(logits[0], next_logits(model, line, []), atol=1e-5, rtol=1e-5)
    logits = decoder.step([5, 6], parents=[0, 0])
    for row, said in zip(logits, ([5], [6]), strict=True):
        np.testing.assert_allclose(row, next_logits(model, line, said), atol=1e-5, rtol=1e-5)
    logits = decoder.step([7, 8, 9], parents=[1, 1, 0])
    logits = decoder.step([3, 3, 4])
    for row, said in zip(logits, ([6, 7, 3], [6, 8, 3], [5, 9, 4]), strict=True):
        np.testing.assert_allclose(row, next_logits(model, line, said), atol=1e-5, rtol=1e-5)


def test_a_beginning_of_nothing_goes_on_with_nothing() -> None:
    model = random_model()
    decoder = relpos.Decoder(model)
    nothing = relpos.Batch([], [0], [], [0])
    for _ in range(2):
        assert decoder.begin(nothing, most_rows=4).shape == (0, model.config.target_vocabulary)
        assert decoder.step([]).shape == (0, model.config.target_vocabulary)
        decoder.begin(sources(prefixes=["ba"] * len(LINES)), most_rows=8)


def test_an_ensemble_has_the_mean_probabilities() -> None:
    models = random_model(1), random_model(4)
    line = tokens("do da")
    decoder = relpos.Decoder(*models)
    logits = decoder.begin(relpos.Batch(line, [0, 2], [1], [0, 1]), most_rows=1)
    several = [np.exp(log_softmax(next_logits(model, line, []))) for model in models]
    expected = np.log(np.mean(several, axis=0))
    np.testing.assert_allclose(logits[0], expected, atol=2e-5, rtol=2e-5)
    [[best]] = decoder.search(relpos.Batch(line, [0, 2]), Search(beam=1, max_length=1))
    assert best.tokens.tolist() == [int(expected.argmax())] or int(expected.argmax()) == 2


def test_an_ensemble_of_twins_is_the_twin() -> None:
    """Also of what is left where all that is likely is suppressed: less than a float can hold."""
    models = random_model(1), random_model(1)
    for model in models:
        model.parameters["output.weight"][...] *= 200
    line = relpos.Batch(tokens("do da"), [0, 2])
    one = log_softmax(next_logits(models[0], tokens("do da"), []))
    likely = np.argsort(-one)
    banned = [int(token) for token in likely if one[token] > -150]
    search = Search(max_length=1, beam=2, n_best=2, suppressed=banned)
    assert one[likely[len(banned)]] < -150 and len(banned) < VOCABULARY.size - 1
    [alone], [together] = (
        relpos.Decoder(*own).search(line, search) for own in (models[:1], models)
    )
    assert [t.tokens.tolist() for t in together] == [t.tokens.tolist() for t in alone]
    assert len(together) == 2
    for a, b in zip(alone, together, strict=True):
        assert abs(a.log_probability - b.log_probability) < 1e-6 * abs(a.log_probability)


def test_what_is_refused() -> None:
    model = random_model()
    with pytest.raises(ValueError, match="expected a model or several"):
        relpos.Decoder()
    with pytest.raises(TypeError, match="models: expected relpos.Transformer, got str"):
        relpos.Decoder("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"models\[0\]: expected relpos\._core\.Model"):
        _core.Decoder(("model",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="models"):
        _core.Decoder(())
    with pytest.raises(TypeError, match="search: expected relpos.Search, got dict"):
        model.search(sources(), {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch: expected relpos.Batch"):
        model.search([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beam"):
        model.search(sources(), Search(beam=VOCABULARY.size + 1))
    with pytest.raises(ValueError, match="source"):
        model.search(relpos.Batch(target=[3], target_offsets=[0, 1]))
    with pytest.raises(ValueError, match="source"):
        model.search(relpos.Batch([99], [0, 1]))
    decoder = relpos.Decoder(model)
    with pytest.raises(ValueError, match=r"most_rows: expected at most 2\^40, got 1(0{23})$"):
        decoder.begin(relpos.Batch([4], [0, 1], [1], [0, 1]), most_rows=10**23)
    with pytest.raises(RuntimeError):
        decoder.step([3])
    decoder.begin(relpos.Batch([4], [0, 1], [1], [0, 1]), most_rows=2)
    for wrong, kind in (
        ({"tokens": [3, 4, 5]}, ValueError),  # more rows than were said
        ({"tokens": [3], "parents": [1]}, ValueError),
        ({"tokens": [99]}, ValueError),
        ({"tokens": [-1]}, ValueError),
        ({"tokens": ["a"]}, TypeError),
        ({"tokens": [3, 4], "parents": [0]}, ValueError),
    ):
        decoder.begin(relpos.Batch([4], [0, 1], [1], [0, 1]), most_rows=2)
        with pytest.raises(kind):
            decoder.step(**wrong)


def test_two_threads_do_not_meet() -> None:
    """One of them works, the other is told so; results are whole."""
    model = random_model()
    decoder = relpos.Decoder(model)
    expected = [best.tokens.tolist() for [best] in decoder.search(sources(), Search(max_length=14))]
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(50):
            try:
                found = decoder.search(sources(), Search(max_length=14))
            except RuntimeError:
                continue
            if [best.tokens.tolist() for [best] in found] != expected:
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_decoder_holds_its_model() -> None:
    decoder = relpos.Decoder(random_model())
    expected = random_model().search(sources(), Search(max_length=8))
    found = decoder.search(sources(), Search(max_length=8))
    assert [x.tokens.tolist() for [x] in found] == [x.tokens.tolist() for [x] in expected]


# ---- alignments ----------------------------------------------------------------------------------


def test_alignments_are_attention() -> None:
    model = random_model(**{"decoder.layers": 2})
    targets = ["ku", "fa fe fi", "", "ba", "do do"]
    batch = relpos.Batch.from_pairs(
        [tokens(x) for x in LINES], [tokens(x) for x in targets], bos=1, eos=2
    )
    heads = range(model.config.heads)
    for layer in (0, 1, -1):
        for head in (None, *heads):
            for b, found in enumerate(model.alignments(batch, layer, head)):
                maps = [
                    model.attention_maps(batch, layer % 2, h, "cross", sentence=b)
                    for h in heads
                    if head in (None, h)
                ]
                np.testing.assert_allclose(found, np.mean(maps, axis=0), atol=1e-6)
                assert found.shape == (len(tokens(targets[b])) + 1, len(tokens(LINES[b])))
    for wrong in ((2, None), (-3, None), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match="layer" if wrong[1] is None else "head"):
            model.alignments(batch, *wrong)
    assert model.alignments(relpos.Batch.from_pairs([], [], bos=1, eos=2)) == []
    alone = random_model(**{"encoder.layers": 0})
    with pytest.raises(ValueError):
        alone.alignments(relpos.Batch.from_sentences([[3, 4]], bos=1, eos=2))
