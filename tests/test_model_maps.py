# SPDX-License-Identifier: Apache-2.0
"""The attention maps of a model, and ModelMaps: what they hold, against the model in float64; from
one pass, and without a trace; what is made of them. How one asks for them: test_model_maps_calls.py.
What the C function refuses and takes in memory: tests/c/test_model_maps.c.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest

import relpos
from mapped_models import KINDS, batch_for, everything, made
from model_reference import ReferenceModel
from relpos.maps import AttentionMaps
from relpos.model_maps import ModelMaps
from small_model import pairs, small_config, small_model
from test_model_gradients import CASES, SHAW, both

NO_DROPOUT = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}


def sentence(batch: relpos.Batch, side: str, b: int) -> Any:
    tokens, offsets = getattr(batch, side), getattr(batch, f"{side}_offsets")
    return None if tokens is None else tokens[offsets[b] : offsets[b + 1]]


# --------------------------------------------------------------------------------------------------
# What they hold
# --------------------------------------------------------------------------------------------------

# A number of float32 that comes out of a few hundred operations on numbers of about 1: measured to
# stay below 5e-6 here; a wrong sign or a neighbour's row is off by 1e-2 and more.
NEAR = 2e-5


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        SHAW, SHAW | both(per_head=True), SHAW | both(value_per_layer=False, value_per_head=False),
        SHAW | both(per_layer=False, per_head=False, value_per_layer=True, value_per_head=True),
        SHAW | {"decoder.layers": 0}, both(position="none"), SHAW | {"heads": 4, "key_heads": 2},
    ],
    ids=["shaw", "per head", "values shared", "values apart", "encoder alone", "none", "shared keys"],
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
            q, k, _ = self.heads(self.linear(p, f"{name}.qkv", x), "qkv")
            terms = Terms(self, p, name, stack, q, k)
            terms.add_scheme()
            if graph is not None:
                terms.add_labels(torch.from_numpy(np.asarray(graph, np.int64)))
            relation = torch.zeros_like(terms.content) + terms.scaled * terms.scale + terms.bias
            self.note(name, terms.content * terms.scale, relation, terms.hidden)
            return super().self_attention(p, name, x, where)

        def cross_attention(self, p: Any, name: str, x: Any, memory: Any) -> Any:
            (q,) = self.heads(self.linear(p, f"{name}.q", x), "q")
            k, _ = self.heads(self.linear(p, f"{name}.kv", memory), "kv")
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


def test_sums_of_arrays_of_any_kind() -> None:
    """By hand made maps need not be float32, nor without gaps; NaN is not hidden by a sum."""
    x = np.random.default_rng(3).random((1, 2, 3, 8))
    p = (x / x.sum(axis=-1, keepdims=True))[..., ::2]
    of = ModelMaps(("x",) * 4, ("y",) * 3, {"cross": AttentionMaps(p, None, {})}, (0,), (0, 1))
    np.testing.assert_allclose(of.entropy("cross"), -(p * np.log(p)).sum(-1), rtol=0, atol=1e-6)
    apart = np.abs(np.arange(4) - np.arange(3)[:, None])
    np.testing.assert_allclose(of.distance("cross"), (p * apart).sum((-1, -2)) / 3, atol=1e-6)
    np.testing.assert_allclose(of.mass("cross").sum(-1), p.sum((-1, -2)) / 3, rtol=0, atol=1e-6)
    p[0, 1, 2, 0] = np.nan
    for sums in (of.mass("cross"), of.entropy("cross"), of.distance("cross")):
        assert np.isfinite(sums[0, 0]).all() and np.isnan(sums[0, 1]).any()


def test_maps_that_are_no_arrays_are_refused() -> None:
    """When they are made, not by the first that reads them."""
    p = np.full((1, 1, 2, 2), 0.5, np.float32)
    for of_kind, sentence in (
        (p, r"maps\['encoder'\]: expected AttentionMaps, got float32"),
        (AttentionMaps(p.tolist(), None, {}), r"\['encoder'\].probabilities: .* array .*got list"),
        (AttentionMaps(p, p.tolist(), {}), r"\['encoder'\].logits: expected an array .*, got list"),
        (AttentionMaps(p, p, {"content": p.tolist()}), r"\.parts\['content'\]: .*, got list"),
        (AttentionMaps(p, p, None), r"\['encoder'\].parts: expected a mapping, got NoneType"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=sentence):
            ModelMaps(("a", "b"), (), {"encoder": of_kind}, (0,), (0,))
    with pytest.raises(TypeError, match="maps: expected a mapping, got NoneType"):
        ModelMaps(("a", "b"), (), None, (0,), (0,))  # type: ignore[arg-type]
    for name, of_kind in (
        ("probabilities", AttentionMaps(p[0], None, {})),
        ("logits", AttentionMaps(p, p[0], {})),
        ("parts['content']", AttentionMaps(p, p, {"content": p[0]})),
    ):
        sentence = f"maps['encoder'].{name}: expected an array (layers, heads, queries, keys), got"
        with pytest.raises(ValueError, match=re.escape(f"{sentence} float32 (1, 2, 2)")):
            ModelMaps(("a", "b"), (), {"encoder": of_kind}, (0,), (0,))
    with pytest.raises(ValueError, match="^maps: expected 'encoder' or .*, got 'encodr'$"):
        ModelMaps(("a", "b"), (), {"encodr": AttentionMaps(p, None, {})}, (0,), (0,))


def test_maps_of_nothing() -> None:
    maps = relpos.attention_maps(small_model(), [], [1])
    assert maps.maps["encoder"].logits.shape == (1, 2, 0, 0)
    assert maps.maps["cross"].probabilities.shape == (1, 2, 1, 0)
    for kind in KINDS:
        assert maps.mass(kind).shape == (1, 2, len(maps.offsets(kind)))
        assert np.isfinite(maps.distance(kind)).all() and np.isfinite(maps.entropy(kind)).all()
    assert maps.entropy("decoder").tolist() == [[[0], [0]]] and not maps.mass("cross").any()


def test_layers_of_each_kind() -> None:
    """Where encoder and decoder differ in depth, in whatever order layers are asked for."""
    model = small_model(encoder__layers=4, decoder__layers=2)
    maps = relpos.attention_maps(model, [3, 4, 5], [1, 6], layers=[3, 0, 2])
    assert maps.layers == maps.layers_of("encoder") == (3, 0, 2)
    assert maps.layers_of("decoder") == maps.layers_of("cross") == (0,)
    alone = relpos.attention_maps(model, [3, 4, 5], [1, 6], layers=[0])
    decoder = maps.maps["decoder"].probabilities
    assert np.array_equal(decoder, alone.maps["decoder"].probabilities)
    none = relpos.attention_maps(model, [3, 4, 5], [1, 6], layers=[3])
    assert none.layers_of("decoder") == () and none.maps["decoder"].probabilities.shape[0] == 0


def test_a_relation_is_float32_whatever_the_parts_are() -> None:
    parts = {"content": np.ones((1, 1, 2, 2), np.int64), "bias_table": np.full((1, 1, 2, 2), 0.5)}
    maps = relpos.ModelMaps(
        ("a", "b"), (), {"encoder": relpos.maps.AttentionMaps(None, None, parts)}, (0,), (0,)
    )
    relation = maps.relation("encoder")
    assert relation.dtype == np.float32 and (relation == 0.5).all()


@pytest.mark.parametrize("parts", [("probabilities", "content"), ("content", "key_table")])
def test_a_relation_of_some_parts_is_refused(parts: tuple[str, ...]) -> None:
    model = small_model(encoder__position="shaw", encoder__relations=5)
    batch = relpos.Batch.from_pairs(
        [[3, 4, 5]], [[3]], bos=1, eos=2, source_graphs=[np.ones((3, 3), np.int64)]
    )
    [maps] = relpos.attention_maps(model, batch, parts=parts)
    missing = ", ".join(maps.missing("encoder"))
    assert missing
    with pytest.raises(ValueError, match=f"^relation: {missing} of the logits were not asked for"):
        maps.relation("encoder")
    [whole] = relpos.attention_maps(model, batch)
    assert whole.missing("encoder") == () and whole.relation("encoder").any()
