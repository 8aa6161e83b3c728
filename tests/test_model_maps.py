# SPDX-License-Identifier: Apache-2.0
"""relpos.attention_maps of a model, and ModelMaps: against the model in float64, from one pass, and
without a trace. What the C function refuses and takes in memory: tests/c/test_model_maps.c.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import relpos
import text_files
from model_reference import ReferenceModel
from relpos import _core
from saved_models import VOCABULARY, random_model, spoil
from small_model import (
    BOS,
    EOS,
    pairs,
    small_config,
    small_model,
)
from test_model_gradients import BASE, CASES, SHAW, both

KINDS = ("encoder", "decoder", "cross")
NO_DROPOUT = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}


def made(changes: dict[str, Any], **limits: Any) -> relpos.Transformer:
    """A model whose weights are away from zeros and ones."""
    model = relpos.Transformer(
        relpos.Config().replace(BASE | changes), **{"tokens": 64, "sentences": 8} | limits
    )
    random = np.random.default_rng(3)
    for w in model.parameters.values():
        w += 0.15 * random.standard_normal(w.shape).astype(np.float32)
    return model


def batch_for(config: relpos.Config, seed: int = 0, **more: Any) -> relpos.Batch:
    """Sentences of 5, 1, 9, 0 and 3 tokens, targets of 4, 2, 6, 3 and 1, graphs where needed."""
    random = np.random.default_rng(seed)
    sides: list[Any] = []
    graphs: dict[str, Any] = {}
    for name, stack, lengths in (
        ("source", config.encoder, (5, 1, 9, 0, 3)),
        ("target", config.decoder, (4, 2, 6, 3, 1)),
    ):
        if stack.layers == 0:
            sides += (None, None)
            continue
        sides += (random.integers(0, 11, sum(lengths)), np.cumsum([0, *lengths]))
        if stack.relations > 0:
            graphs[f"{name}_graphs"] = [random.integers(-1, 3, (n, n)) for n in lengths]
    count = len(sides[2] if sides[2] is not None else sides[0])
    return relpos.Batch(*sides, random.integers(0, 11, count), **graphs, **more)


def sentence(batch: relpos.Batch, side: str, b: int) -> Any:
    tokens, offsets = getattr(batch, side), getattr(batch, f"{side}_offsets")
    return None if tokens is None else tokens[offsets[b] : offsets[b + 1]]


def everything(maps: relpos.ModelMaps) -> dict[str, Any]:
    return {
        f"{kind} {name}": array
        for kind, own in maps.maps.items()
        for name, array in {
            "probabilities": own.probabilities, "logits": own.logits, **own.parts
        }.items()
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# What they hold
# --------------------------------------------------------------------------------------------------

# A number of float32 that comes out of a few hundred operations on numbers of about 1: measured to
# stay below 5e-6 here; a wrong sign or a neighbour's row is off by 1e-2 and more.
NEAR = 2e-5


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(
    "changes",
    [SHAW, SHAW | both(per_head=True), SHAW | {"decoder.layers": 0}, both(position="none")],
    ids=["shaw", "per head", "encoder alone", "none"],
)  # fmt: skip
def test_maps_equal_the_reference_in_float64(changes: dict[str, Any], dropout: bool) -> None:
    model = made(changes | {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.2})
    model.counters = 4, 6
    ordinals = [7, 2, 5, 9, 4]
    batch = batch_for(model.config, ordinals=ordinals)
    found = relpos.attention_maps(model, batch, dropout=dropout)
    assert len(found) == 5
    for b, maps in enumerate(found):
        attempt = 6 if dropout else None
        oracle = ReferenceModel(model.config, model.parameters, attempt, ordinals[b])
        seen = oracle.run(*(sentence(batch, side, b) for side in ("source", "target"))).seen
        assert {kind for kind, *_ in seen} == set(maps.maps)
        for (kind, layer, head), exact in seen.items():
            own = maps.maps[kind]
            for array, expected in (
                (own.probabilities, exact.probabilities),
                (own.logits, exact.logits),
                (own.parts["content"], exact.content),
                (maps.relation(kind), exact.relation),
            ):
                np.testing.assert_allclose(array[layer, head], expected, rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", CASES)
def test_maps_equal_the_model_of_torch_in_float64(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from model_torch import Pair, Terms, TorchModel

    class Recorder(TorchModel):
        """Notes what attention adds up, by the name of its layer."""

        def self_attention(self, p: Any, name: str, x: Any, where: Any) -> Any:
            stack, graph = where
            q, k, _ = self.heads(self.linear(p, f"{name}.qkv", x), 3)
            terms = Terms(self, p, name, stack, q, k)
            terms.add_scheme()
            if graph is not None:
                terms.add_labels(torch.from_numpy(np.asarray(graph, np.int64)))
            relation = torch.zeros_like(terms.content) + terms.scaled * terms.scale + terms.bias
            self.note(name, terms.content * terms.scale, relation, terms.hidden)
            return super().self_attention(p, name, x, where)

        def cross_attention(self, p: Any, name: str, x: Any, memory: Any) -> Any:
            (q,) = self.heads(self.linear(p, f"{name}.q", x), 1)
            k, _ = self.heads(self.linear(p, f"{name}.kv", memory), 2)
            content = q @ k.mT / math.sqrt(self.D)
            self.note(name, content, torch.zeros_like(content), content != content)
            return super().cross_attention(p, name, x, memory)

        def note(self, name: str, content: Any, relation: Any, hidden: Any) -> None:
            shown = ~hidden.expand_as(content)
            seen[name] = [x.numpy() for x in (content * shown, relation * shown, shown)]

    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    model = made(CASES[name] | NO_DROPOUT)
    config = model.config
    fields = dict(config.pairs())
    oracle = Recorder(fields.__getitem__)
    p = {n: torch.tensor(w, dtype=torch.float64) for n, w in model.parameters.items()}
    batch = batch_for(config)
    for b, maps in enumerate(relpos.attention_maps(model, batch)):
        sides = [sentence(batch, side, b) for side in ("source", "target")]
        given = [None if x is None else x.tolist() for x in sides]
        graphs = [
            None if every is None else every[b] for every in (batch.source_graphs, batch.target_graphs)
        ]  # fmt: skip
        seen.clear()
        oracle.hidden(p, Pair(*given, [], *graphs))
        for where, (content, relation, shown) in seen.items():
            stack, layer, what = where.split(".")
            kind = "cross" if what == "cross" else stack
            cap = getattr(config, stack).softcap if kind != "cross" else 0
            s = content + relation
            s = np.where(shown, cap * np.tanh(s / cap) if cap else s, -np.inf)
            highest = s.max(axis=-1, keepdims=True, initial=-1e9)
            e = np.exp(s - highest)
            own, at = maps.maps[kind], int(layer)
            for array, expected in (
                (own.parts["content"], content),
                (maps.relation(kind), relation),
                (own.logits, s),
                (own.probabilities, e / e.sum(axis=-1, keepdims=True)),
            ):
                size = max(
                    1.0, float(np.abs(np.where(np.isfinite(expected), expected, 0)).max(initial=0))
                )
                np.testing.assert_allclose(array[at], expected, rtol=0, atol=NEAR * size)
        assert len(seen) == sum(len(own.logits) for own in maps.maps.values())


@pytest.mark.parametrize("name", CASES)
def test_rows_are_distributions_of_the_logits(name: str) -> None:
    model = made(CASES[name])
    for maps, kind in itertools.product(
        relpos.attention_maps(model, batch_for(model.config), dropout=True), KINDS
    ):
        if kind not in maps.maps:
            continue
        own = maps.maps[kind]
        queries, keys = own.probabilities.shape[2:]
        if queries * keys == 0:
            continue
        # sums of at most 9 numbers, each rounded: 9 * 2^-24 and the roundings of the sum itself
        np.testing.assert_allclose(own.probabilities.sum(axis=-1), 1, rtol=0, atol=2e-6)
        e = np.exp(own.logits - own.logits.max(axis=-1, keepdims=True))
        np.testing.assert_allclose(
            own.probabilities, e / e.sum(axis=-1, keepdims=True), rtol=0, atol=2e-6
        )
        hidden = np.isneginf(own.logits)
        assert not own.probabilities[hidden].any()
        assert not any(part[hidden].any() for part in own.parts.values())
        assert kind != "decoder" or hidden[..., ~np.tri(queries, dtype=bool)].all()


def test_without_relations_content_is_the_logits_bit_for_bit() -> None:
    """Content is added up in the same order with and without relations, and begins at them: where
    there are none, it is the logits."""
    model = made(both(position="none") | {"encoder.layers": 1})
    for maps in relpos.attention_maps(model, batch_for(model.config)):
        for kind, own in maps.maps.items():
            shown = np.isfinite(own.logits)
            assert np.array_equal(own.parts["content"][shown], own.logits[shown]), kind
            assert not maps.relation(kind).any()


@pytest.mark.parametrize("position", ["t5", "alibi", "alibi-learned"])
def test_without_content_the_relation_is_the_logits_bit_for_bit(position: str) -> None:
    options = {"buckets": 6, "max_distance": 5} if position == "t5" else {}
    model = made(both(position=position, **options) | {"decoder.layers": 0})
    for name, w in model.parameters.items():
        if ".qkv." in name:
            w[...] = 0
    [maps, *_] = relpos.attention_maps(model, batch_for(model.config))
    own = maps.maps["encoder"]
    assert own.logits.any() and np.array_equal(maps.relation("encoder"), own.logits)
    assert not own.parts["content"].any()


# By scheme: the parts of its logits, and which parameter is the table of each; "" where it is made
# from others, or fixed.
PARTS: dict[str, dict[str, str]] = {
    "none": {},
    "shaw": {"key_table": "key_table"},
    "music": {"key_table": "key_table"},
    "t5": {"bias_table": "bias_table"},
    "alibi": {"slopes": ""},
    "alibi-learned": {"slopes": "slopes"},
    "transformer-xl": {"position_weight": "position.weight", "content_bias": "content_bias"},
    "deberta": {"key_table": "", "query_table": ""},
    "relative-key": {"distance_table": "distance_table"},
    "relative-key-query": dict.fromkeys(
        ("distance_table_key", "distance_table_query"), "distance_table"
    ),
}


@pytest.mark.parametrize("position", PARTS)
def test_parts_are_named_after_their_tables(position: str) -> None:
    options = {"t5": {"buckets": 6, "max_distance": 5}, "deberta": {"buckets": 0}}
    changes = both(position=position, **options.get(position, {}))
    parameters = PARTS[position]
    if position != "transformer-xl":  # which takes no labels beside it
        changes |= both(relations=3)
        parameters = parameters | {"relation_key_table": "relation_key_table"}
    model = made(changes)
    batch = batch_for(model.config)
    [before, *_] = relpos.attention_maps(model, batch, layers=0)
    for kind in ("encoder", "decoder"):
        parts = before.maps[kind].parts
        assert set(parts) == {"content", *parameters} and next(iter(parts)) == "content"
        assert all(part.any() for part in parts.values())
    assert list(before.maps["cross"].parts) == ["content"]
    # with a table of zeros the parts of its name are zero, and the others as they are
    for parameter in filter(None, set(parameters.values())):
        model = made(changes)
        tables = [w for n, w in model.parameters.items() if n.endswith(f".attention.{parameter}")]
        assert tables
        for table in tables:
            table[...] = 0
        [after, *_] = relpos.attention_maps(model, batch, layers=0)
        for name, array in after.maps["encoder"].parts.items():
            if parameters.get(name) == parameter:
                assert not array.any(), name
            else:
                assert np.array_equal(array, before.maps["encoder"].parts[name]), name


def test_turned_queries_and_keys_are_content() -> None:
    [maps, *_] = relpos.attention_maps(made(both(position="rope")), batch_for(made({}).config))
    assert all(list(own.parts) == ["content"] for own in maps.maps.values())
    shown = np.isfinite(maps.maps["decoder"].logits)
    own = maps.maps["decoder"]
    assert np.array_equal(own.parts["content"][shown], own.logits[shown])


# --------------------------------------------------------------------------------------------------
# One pass, without a trace
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [{}, {"recompute": True}, {"training": False}],
    ids=["training", "recompute", "neither"],
)
@pytest.mark.parametrize(
    "changes",
    [SHAW, both(position="transformer-xl"), both(position="deberta", buckets=0) | {"norm": "post"},
     SHAW | {"encoder.layers": 1, "decoder.layers": 3}],
    ids=["shaw", "transformer-xl", "deberta", "depths"],
)  # fmt: skip
def test_one_pass_gives_what_single_calls_give(
    changes: dict[str, Any], limits: dict[str, Any]
) -> None:
    """Whatever memory layers share; and in a model that has seen another batch before."""
    model = made(changes, **limits)
    batch = batch_for(model.config)
    reader = made(changes)
    reader.hidden(batch_for(model.config, 5))
    found = relpos.attention_maps(reader, batch)
    for b, maps in enumerate(found):
        for kind, own in maps.maps.items():
            for layer, head in itertools.product(range(len(own.logits)), range(2)):
                for show, array in (
                    ("probabilities", own.probabilities), ("logits", own.logits),
                    ("content", own.parts["content"]),
                ):  # fmt: skip
                    model.hidden(batch_for(model.config, 6))  # leaves its own behind
                    one = model.attention_maps(batch, layer, head, kind, sentence=b, show=show)
                    assert np.array_equal(one, array[layer, head]), (kind, layer, head, show)
    again = relpos.attention_maps(made(changes, **limits), batch)
    for one, other in zip(found, again, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(*map(values, (one, other)), strict=True))


def values(maps: relpos.ModelMaps) -> list[Any]:
    return list(everything(maps).values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
def test_extraction_leaves_no_trace(dropout: bool, recompute: bool) -> None:
    """Not in a step, nor between its parts, nor in what the model says."""

    def trained(look: bool) -> list[Any]:
        model = relpos.Transformer(
            small_config(encoder__layers=2, decoder__layers=2, ema=0.9),
            tokens=256, sentences=32, recompute=recompute,
        )  # fmt: skip
        said: list[Any] = []

        def maybe_look() -> None:
            before = {n: g.tobytes() for n, g in model.gradients.items()}, model.counters
            if look:
                relpos.attention_maps(model, pairs(seed=9), dropout=dropout)
            assert before == ({n: g.tobytes() for n, g in model.gradients.items()}, model.counters)

        for seed in range(2):
            maybe_look()
            said.append(model.step(pairs(seed=seed)))
            said.append(model.backward(pairs(seed=seed + 2)))
            maybe_look()
            said.append(model.backward(pairs(seed=seed + 4)))
            maybe_look()
            said.append(model.update())
            said += [x.tobytes() for x in model.score(pairs(seed=8))]
            maybe_look()
            said += [x.tobytes() for x in model.hidden(pairs(seed=8))]
        for arrays in (model.parameters, model.first_moments, model.second_moments, model.averages):
            said.append({n: x.tobytes() for n, x in arrays.items()})
        return said

    assert trained(look=True) == trained(look=False)


def test_dropout_is_that_of_the_coming_batch() -> None:
    """Of the present attempt, with the ordinals that the sentences would have there."""
    model = small_model()
    first, second = pairs(seed=1), pairs(seed=2)
    whole = relpos.attention_maps(model, second, dropout=True)
    model.backward(first)
    behind = relpos.attention_maps(model, second, dropout=True)
    named = relpos.Batch(
        second.source, second.source_offsets, second.target, second.target_offsets, second.labels,
        ordinals=np.arange(first.sentences, first.sentences + second.sentences),
    )  # fmt: skip
    model.zero_gradients()
    told = relpos.attention_maps(model, named, dropout=True)
    plain = relpos.attention_maps(model, second)
    for b in (0, 2):
        array = "encoder logits"
        assert np.array_equal(everything(behind[b])[array], everything(told[b])[array])
        assert not np.array_equal(everything(behind[b])[array], everything(whole[b])[array])
        assert not np.array_equal(everything(plain[b])[array], everything(whole[b])[array])
    model.step(first)
    other = relpos.attention_maps(model, second, dropout=True)
    model.counters = 0, 0
    assert not np.array_equal(
        everything(other[0])["encoder logits"],
        everything(relpos.attention_maps(model, second, dropout=True)[0])["encoder logits"],
    )


# --------------------------------------------------------------------------------------------------
# Which
# --------------------------------------------------------------------------------------------------


def test_what_is_chosen_is_part_of_the_whole() -> None:
    model = made(SHAW | {"encoder.layers": 1, "decoder.layers": 3})
    batch = batch_for(model.config)
    whole = relpos.attention_maps(model, batch)[2]
    assert (whole.layers, whole.heads) == ((0, 1, 2), (0, 1))
    assert [len(whole.maps[kind].logits) for kind in KINDS] == [1, 3, 3]
    some = relpos.attention_maps(
        model, batch, layers=[2, 0], heads=1, parts=["logits", "key_table"]
    )[2]
    assert (some.layers, some.heads) == ((2, 0), (1,))
    for kind, layers in (("encoder", [0]), ("decoder", [2, 0]), ("cross", [2, 0])):
        own = some.maps[kind]
        assert own.probabilities is None
        assert np.array_equal(own.logits, whole.maps[kind].logits[layers, 1:])
        assert list(own.parts) == ([] if kind == "cross" else ["key_table"])
    last = relpos.attention_maps(
        model, batch, kinds=["decoder", "cross"], layers=-1, parts="logits"
    )[2]
    assert last.layers == (2,) and list(last.maps) == ["decoder", "cross"]
    assert np.array_equal(last.maps["cross"].logits, whole.maps["cross"].logits[2:])
    none = relpos.attention_maps(model, batch, layers=[], heads=slice(0, 0))[2]
    assert none.maps["cross"].logits.shape == (0, 0, 6, 9)
    sliced = relpos.attention_maps(model, batch, layers=slice(1, None), kinds="cross")[2]
    assert np.array_equal(sliced.maps["cross"].logits, whole.maps["cross"].logits[1:])


def test_tokens_as_numbers() -> None:
    model = small_model()
    maps = relpos.attention_maps(model, [3, 4, 5], np.array([1, 7], np.int32))
    assert maps.tokens("encoder") == (("3", "4", "5"), ("3", "4", "5"))
    assert maps.tokens("decoder") == (("1", "7"), ("1", "7"))
    assert maps.tokens("cross") == (("1", "7"), ("3", "4", "5"))
    assert maps.predicted_tokens == ()
    assert "3 source, 2 target tokens" in repr(maps) and "cross" in repr(maps)
    alone = relpos.attention_maps(model, [3, 4, 5], kinds="encoder")
    assert np.array_equal(alone.maps["encoder"].logits, maps.maps["encoder"].logits)
    [_, _, several, *_] = relpos.attention_maps(model, pairs())
    assert several.predicted_tokens == (*several.target_tokens[1:], str(EOS))
    assert several.target_tokens[0] == str(BOS)
    language = small_model(encoder__layers=0)
    maps = relpos.attention_maps(language, None, [1, 7, 8])
    assert list(maps.maps) == ["decoder"] and maps.source_tokens == ()
    labelled = relpos.Batch.from_labels([[3, 4]], [[5, -1]])
    [maps] = relpos.attention_maps(small_model(decoder__layers=0), labelled)
    assert list(maps.maps) == ["encoder"] and maps.target_tokens == maps.predicted_tokens == ()
    assert relpos.attention_maps(model, relpos.Batch([], [0], [], [0], [])) == []


# --------------------------------------------------------------------------------------------------
# What is made of them
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_maps(kind: str) -> None:
    model = small_model(encoder__layers=2, decoder__layers=2)
    maps = relpos.attention_maps(model, [5, 6, 7, 8, 9], [1, 4, 3])
    p = maps.maps[kind].probabilities.astype(np.float64)
    layers, heads, queries, keys = p.shape
    offsets = maps.offsets(kind)
    assert offsets.tolist() == list(range(-(queries - 1), keys))
    mass = np.zeros((layers, heads, len(offsets)))
    distance = np.zeros((layers, heads))
    entropy = np.zeros((layers, heads, queries))
    for layer, head, i, j in np.ndindex(p.shape):
        at = layer, head
        mass[(*at, j - i + queries - 1)] += p[(*at, i, j)] / queries
        distance[at] += p[(*at, i, j)] * abs(j - i) / queries
        if p[(*at, i, j)] > 0:
            entropy[(*at, i)] -= p[(*at, i, j)] * math.log(p[(*at, i, j)])
    np.testing.assert_allclose(maps.mass(kind), mass, rtol=0, atol=1e-6)
    np.testing.assert_allclose(maps.mass(kind).sum(axis=-1), 1, rtol=0, atol=2e-6)
    np.testing.assert_allclose(maps.distance(kind), distance, rtol=0, atol=1e-5)
    np.testing.assert_allclose(maps.entropy(kind), entropy, rtol=0, atol=1e-5)
    for array in (maps.mass(kind), maps.distance(kind), maps.entropy(kind), maps.relation(kind)):
        assert array.dtype == np.float32


def test_maps_of_nothing() -> None:
    maps = relpos.attention_maps(small_model(), [], [1])
    assert maps.maps["encoder"].logits.shape == (1, 2, 0, 0)
    assert maps.maps["cross"].probabilities.shape == (1, 2, 1, 0)
    for kind in KINDS:
        assert maps.mass(kind).shape == (1, 2, len(maps.offsets(kind)))
        assert np.isfinite(maps.distance(kind)).all() and np.isfinite(maps.entropy(kind)).all()
    assert maps.entropy("decoder").tolist() == [[[0], [0]]] and not maps.mass("cross").any()


def test_what_was_not_asked_for_is_told() -> None:
    model = small_model()
    maps = relpos.attention_maps(model, [3], [1], kinds="cross", parts="logits")
    for call, sentence in (
        (maps.mass, "probabilities were not asked for"),
        (maps.entropy, "probabilities were not asked for"),
        (maps.distance, "probabilities were not asked for"),
        (maps.relation, "the parts of the logits were not asked for"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call("cross")
        with pytest.raises(ValueError, match="there are no maps of 'encoder' here, only 'cross'"):
            call("encoder")
        with pytest.raises(ValueError, match="kind: expected 'encoder' or"):
            call("self")


# --------------------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def translator() -> relpos.Translator:
    return relpos.Translator(random_model(**{"decoder.layers": 2}), VOCABULARY)


def test_text_and_its_translation(translator: relpos.Translator) -> None:
    maps = relpos.attention_maps(translator, "ba be zz", "ku ko")
    assert maps.source_tokens == ("ba", "be", "<unk>")
    assert maps.target_tokens == ("<s>", "ku", "ko")
    assert maps.predicted_tokens == ("ku", "ko", "</s>")
    ids = VOCABULARY.encode
    same = relpos.attention_maps(translator.models[0], ids("ba be zz"), [BOS, *ids("ku ko")])
    for name, array in everything(maps).items():
        assert np.array_equal(array, everything(same)[name]), name
    # rows of cross attention are what align shows
    [alignment] = translator.align(["ba be zz"], ["ku ko"])
    mean = maps.maps["cross"].probabilities[-1].mean(axis=0)
    np.testing.assert_allclose(alignment.weights, mean, rtol=0, atol=1e-6)


def test_the_model_translates_first(translator: relpos.Translator) -> None:
    search = relpos.Search(beam=2, max_length=6)
    texts = ["ba be bi", "", "do du ba ba be"]
    said = translator.translate_all(texts, search=search)
    found = relpos.attention_maps(translator, texts, search=search)
    for text, each, maps in zip(texts, said, found, strict=True):
        tokens = each.n_best[0].tokens.tolist() if each.n_best else []
        assert maps.source_tokens == tuple(text.split())
        assert maps.predicted_tokens == (*map(VOCABULARY.piece, tokens), "</s>")
        assert maps.target_tokens == ("<s>", *maps.predicted_tokens[:-1])
        alone = relpos.attention_maps(translator, text, search=search)
        assert alone.target_tokens == maps.target_tokens
        for name, array in everything(maps).items():
            np.testing.assert_allclose(array, everything(alone)[name], rtol=0, atol=1e-5)
    encoder = relpos.attention_maps(translator, "ba be", kinds="encoder")
    assert list(encoder.maps) == ["encoder"] and encoder.source_tokens == ("ba", "be")


def test_a_language_model_goes_on(translator: relpos.Translator) -> None:
    language = relpos.Translator(random_model(**{"encoder.layers": 0}), VOCABULARY)
    search = relpos.Search(max_more=3)
    [said] = language.generate(["ba be"], search=search)
    maps = relpos.attention_maps(language, "ba be", search=search)
    tokens = said.n_best[0].tokens.tolist()
    assert maps.target_tokens == ("<s>", *map(VOCABULARY.piece, tokens))
    given = relpos.attention_maps(language, None, "ba be")
    assert given.target_tokens == ("<s>", "ba", "be") and list(given.maps) == ["decoder"]
    both = relpos.attention_maps(language, None, ["ba be", "do"])
    assert [maps.predicted_tokens for maps in both] == [("ba", "be", "</s>"), ("do", "</s>")]


def test_marks_of_words_are_shown() -> None:
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    subwords = relpos.data.SentencePiece.train(
        text_files.sentences(300), size=24, byte_fallback=False
    )
    model = random_model(source_vocabulary=subwords.size, target_vocabulary=subwords.size)
    maps = relpos.attention_maps(relpos.Translator(model, subwords), "ba be", "do")
    assert maps.source_tokens == tuple(map(subwords.piece, subwords.encode("ba be")))
    assert "".join(maps.source_tokens) == "▁ba▁be"
    assert maps.target_tokens[0] == "<s>" and maps.predicted_tokens[-1] == "</s>"


class Letters:
    """A tokenizer of one's own."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 95 for letter in text]

    def decode(self, tokens: Any) -> str:
        return "".join(chr(token + 95) for token in tokens)


def test_tokens_of_a_vocabulary_of_ones_own() -> None:
    subwords = relpos.data.Wrapped(Letters(), size=28, bos=0, eos=1)
    model = random_model(source_vocabulary=28, target_vocabulary=28)
    maps = relpos.attention_maps(relpos.Translator(model, subwords), "abc", "de")
    assert maps.source_tokens == ("a", "b", "c")
    assert maps.target_tokens == ("<s>", "d", "e")
    assert maps.predicted_tokens == ("d", "e", "</s>")


# --------------------------------------------------------------------------------------------------
# Bad input
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([3],), {}, ValueError, "target: expected the tokens that the model reads, got None"),
        ((None, [1]), {}, ValueError, "source: expected the tokens that the model reads"),
        (([0.5], [1]), {}, TypeError, "source: expected integers"),
        (([[3]], [1]), {}, ValueError, "source: expected integers"),
        (("ba", "be"), {}, TypeError, "source: expected integers"),
        (([99], [1]), {}, ValueError, r"source\[0\]=99"),
        (([3] * 13, [1]), {}, ValueError, "source sentence 0 has 13 tokens"),
        (([3], [1]), {"kinds": "self"}, ValueError, "kinds: expected 'encoder' or 'decoder'"),
        (([3], [1]), {"kinds": 3}, TypeError, "kinds: expected names"),
        (([3], [1]), {"parts": "slopes"}, ValueError, "parts: there is no 'slopes' here, only 'all'"),
        (([3], [1]), {"parts": 1}, TypeError, "parts: expected names"),
        (([3], [1]), {"layers": 1}, ValueError, "layers: expected numbers from -1 to 0, got 1"),
        (([3], [1]), {"heads": [0, 2]}, ValueError, "heads: expected numbers from -2 to 1, got 2"),
        (([3], [1]), {"heads": 0.5}, TypeError, "heads: expected integers"),
        ((), {}, TypeError, "source"),
    ],
)  # fmt: skip
def test_bad_input_is_told(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        relpos.attention_maps(small_model(), *arguments, **options)


def test_layers_are_counted_from_the_last_where_that_is_clear() -> None:
    model = made(SHAW | {"encoder.layers": 1, "decoder.layers": 3})
    batch = batch_for(model.config)
    for layers in (-1, [0, -1], slice(-1, None)):
        with pytest.raises(ValueError, match="layers: expected 0 or more, as the kinds have diff"):
            relpos.attention_maps(model, batch, layers=layers)
        [maps, *_] = relpos.attention_maps(model, batch, layers=layers, kinds=["decoder", "cross"])
        assert maps.layers[-1] == 2
    with pytest.raises(TypeError, match="target: expected None beside a Batch"):
        relpos.attention_maps(model, batch, [1])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None,), {}, ValueError, "source: expected text, got None for it and for target"),
        (("ba", ["be"]), {}, TypeError, "target: expected str as on the other side, got list"),
        ((["ba"], "be"), {}, TypeError, "target: expected several str as on the other side"),
        ((["ba"], ["be", "do"]), {}, ValueError, "targets: expected 1 as in sources, got 2"),
        (([3, 4],), {}, TypeError, "source: expected str or several, got int"),
        ((["ba", b"be"],), {}, TypeError, "source: expected str or several, got bytes"),
        (("ba", "be"), {"search": relpos.Search()}, ValueError, "search: expected None where"),
        ((None, "be"), {}, ValueError, "sources: expected one for each target, got None"),
    ],
)
def test_bad_text_is_told(
    translator: relpos.Translator,
    arguments: Any,
    options: Any,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        relpos.attention_maps(translator, *arguments, **options)


def test_an_ensemble_and_a_spoilt_model_are_told() -> None:
    several = relpos.Translator([random_model(1), random_model(2)], VOCABULARY)
    with pytest.raises(ValueError, match="model: expected one, got an ensemble of 2"):
        relpos.attention_maps(several, "ba")
    model = random_model()
    spoil(model, "do")
    with (
        pytest.raises(ValueError, match="source: line 2: the model's numbers are not finite"),
        pytest.warns(relpos.TranslationWarning),
    ):
        relpos.attention_maps(relpos.Translator(model, VOCABULARY), ["ba", "do"])


def test_the_binding_refuses_what_does_not_fit() -> None:
    model = small_model()
    core, batch = model._core, pairs()._packed
    one = np.zeros(1, np.int64)
    for wanted, error, message in (
        ([], TypeError, "must be tuple"),
        ((3,), TypeError, "wanted: expected tuples"),
        (((0, 0, 0, one),), TypeError, "wanted"),
        (((0, 0, 0, None, one),), TypeError, "layers: expected int64, got None"),
        (((0, 0, 0, one, [0]),), TypeError, "heads"),
        (((0, 0, 0, one, one.astype(np.int32)),), TypeError, "heads"),
        (((0, 0, 5, one, one),), ValueError, "sentence: expected 0 to below 5, got 5"),
        (((7, 0, 0, one, one),), ValueError, r"maps\[0\].kind=7"),
        (((0, 0, 0, one, one), (0, 9, 0, one, one)), ValueError, r"maps\[1\].show=9"),
        (((0, 0, 0, one, one + 2),), ValueError, r"maps\[0\].head=2, must be from 0 to 1"),
        (((0, 0, 0, one + 1, one),), ValueError, r"maps\[0\].layer=1, must be from 0 to 0"),
    ):
        with pytest.raises(error, match=message):
            core.attention_maps(batch, False, wanted)  # type: ignore[arg-type]
    assert core.attention_maps(batch, False, ()) == ()
    assert core.attention_parts(_core.ATTENTION_CROSS) == (("content", _core.SHOW_CONTENT),)
    assert core.attention_parts(3) == core.attention_parts(-1) == ()


def test_python_calls_it_by_its_name(translator: relpos.Translator) -> None:
    for model in (translator, translator.models[0]):
        with pytest.raises(
            TypeError, match=r"attention_maps\(\) got an unexpected keyword .*'colour'"
        ):
            relpos.attention_maps(model, "ba", "be", colour="red")  # type: ignore[call-overload]
    named = relpos.attention_maps(model=translator, source="ba", target="be")
    assert named.source_tokens == ("ba",)


# --------------------------------------------------------------------------------------------------
# The plain operation
# --------------------------------------------------------------------------------------------------


def test_maps_beside_a_result() -> None:
    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, 2, 3, 7, 8), np.float32)
    shaw = relpos.Shaw(random.standard_normal((5, 8), np.float32))
    call: dict[str, Any] = {"position": shaw, "causal": True, "window": 4}
    dropped = {"dropout": 0.5, "seed": 3}
    out, maps = relpos.attention(q, k, v, **call, **dropped, return_maps="all")
    assert np.array_equal(out, relpos.attention(q, k, v, **call, **dropped))
    expected = relpos.attention_maps(q, k, parts="all", **call)
    assert np.array_equal(maps.probabilities, expected.probabilities)  # those before dropout
    assert np.array_equal(maps.logits, expected.logits)
    assert list(maps.parts) == list(expected.parts) == ["content", "key_table"]
    out, maps = relpos.attention(q, k, v, **call, return_maps=["logits"])
    assert maps.probabilities is None and not maps.parts
    whole = relpos.attention_maps(q, k, **call).probabilities @ v
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-5)
    packed, maps = relpos.attention(
        *(np.ascontiguousarray(x[0].transpose(1, 0, 2)) for x in (q, k, v)), offsets=[0, 3, 7],
        return_maps="probabilities",
    )  # fmt: skip
    assert packed.shape == (7, 3, 8) and [p.shape for p in maps.probabilities] == [
        (3, 3, 3),
        (3, 4, 4),
    ]
    room = np.full_like(q, 7)
    with pytest.raises(ValueError, match="return_maps: there is no 'slopes' in this call"):
        relpos.attention(q, k, v, **call, out=room, return_maps=["slopes"])
    assert (room == 7).all()
    with pytest.raises(TypeError, match="return_maps: expected names"):
        relpos.attention(q, k, v, return_maps=3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="k"):
        relpos.attention(q, k[..., :4], v, return_maps="all")


def test_parts_add_up_to_rounding() -> None:
    """What is not exact: a logit is 2 D products of rounded factors and a rescaling, content and
    relation D each and the same; each step errs by at most 2^-24 of what has been added up."""
    random = np.random.default_rng(2)
    q, k = random.standard_normal((2, 1, 2, 90, 16), np.float32)
    table = random.standard_normal((9, 16), np.float32)
    maps = relpos.attention_maps(q, k, position=relpos.Shaw(table), parts="all")
    near = np.clip(np.arange(90) - np.arange(90)[:, None], -4, 4) + 4
    size = np.abs(q) @ np.abs(k).swapaxes(2, 3)
    size += np.take_along_axis(np.abs(q) @ np.abs(table.T), near[None, None], axis=3)
    error = np.abs(maps.parts["content"].astype(np.float64) + maps.parts["key_table"] - maps.logits)
    assert np.all(error <= (4 * 16 + 12) * 2.0**-24 * size / 4) and error.any()


@pytest.mark.parametrize("case", ["shaw", "bias", "both sides"])
def test_exact_numbers_add_up_exactly(case: str) -> None:
    """Logits begin at the relations, and content is added to them, product by product, in units of
    log 2; content shows the same products from nothing. With a scale of ln 2 and small integers no
    sum is rounded on the way, so that what is shown is ln 2 times an integer, rounded once; and
    those of content and relations add up to that of the logits exactly."""
    random = np.random.default_rng(1)
    q, k = (random.integers(-4, 5, (1, 2, 70, 16)).astype(np.float32) for _ in range(2))
    table = random.integers(-3, 4, (9, 16)).astype(np.float32)
    if case == "shaw":
        position: Any = relpos.Shaw(table)
    elif case == "both sides":
        position = relpos.RelativeKeyQuery(random.integers(-3, 4, (139, 16)).astype(np.float32))
    else:
        position = relpos.MusicTransformer(random.integers(-3, 4, (139, 16)).astype(np.float32))
    ln2 = np.float32(math.log(2))
    maps = relpos.attention_maps(q, k, position=position, scale=math.log(2), parts="all")

    def integers(x: Any) -> Any:
        found = np.rint(x.astype(np.float64) / math.log(2))
        assert np.array_equal(found.astype(np.float32) * ln2, x)
        return found

    content = integers(maps.parts["content"])
    assert np.array_equal(
        content[0], q[0].astype(np.float64) @ k[0].astype(np.float64).swapaxes(1, 2)
    )
    relation = sum(integers(part) for name, part in maps.parts.items() if name != "content")
    assert np.array_equal(content + relation, integers(maps.logits)) and np.any(relation)
