# SPDX-License-Identifier: Apache-2.0
"""relpos.attention_maps: against the formulas of every scheme, against relpos.reference, and which
parts of the maps can be had. What the core's maps hold pair by pair: tests/c/test_attention_maps.c.
Beside a result, and how parts add up: test_maps_parts.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from capi import run_script
from relpos import reference
from relpos.attention import context_of
from relpos.request import read_request
from scheme_examples import EXAMPLES, LABELS, B, D, H, N, Pairs, activations, parameters
from stand_in import batch_of

CLOSE = {"rtol": 0, "atol": 2e-5}


def formula(
    name: str, q: Any, k: Any, tables: Any, b: int, h: int, causal: bool
) -> tuple[Any, Any]:
    """Scores, -inf where hidden, and what each pair adds to its value, in double."""
    own = {name: np.asarray(x, np.float64) for name, x in tables.items()}
    start = k.shape[2] - q.shape[2]
    pairs = Pairs(q[b, h].astype(np.float64), k[b, h].astype(np.float64), own, h, b, start)
    s, added = EXAMPLES[name].formula(pairs)
    return np.where(pairs.d <= 0, s, -np.inf) if causal else s, added


def softmax(s: Any) -> Any:
    with np.errstate(invalid="ignore"):
        p = np.exp(s - s.max(axis=-1, keepdims=True, initial=-np.inf))
        return np.nan_to_num(p / p.sum(axis=-1, keepdims=True))


def everything(maps: relpos.AttentionMaps) -> dict[str, Any]:
    return {"probabilities": maps.probabilities, "logits": maps.logits, **maps.parts}


# --------------------------------------------------------------------------------------------------
# What they hold
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_scheme(name: str, causal: bool) -> None:
    tables = parameters(EXAMPLES[name], np.float32)
    q, k, v, _ = activations(np.float32)
    position = EXAMPLES[name].make(**tables)
    maps = relpos.attention_maps(q, k, v, position=position, causal=causal, parts="all")
    out = relpos.attention(q, k, v, position=position, causal=causal)
    shapes = {x.shape for x in everything(maps).values()}
    assert shapes == {(B, H, N, N)} and maps.probabilities.dtype == np.float32
    for b, h in np.ndindex(B, H):
        s, added = formula(name, q, k, tables, b, h, causal)
        np.testing.assert_allclose(maps.logits[b, h], s, **CLOSE)
        np.testing.assert_allclose(maps.probabilities[b, h], softmax(s), **CLOSE)
        values = v[b, h][None] + added
        z = np.einsum("ij,ijd->id", maps.probabilities[b, h].astype(np.float64), values)
        np.testing.assert_allclose(z, out[b, h], **CLOSE)
    hidden = np.isneginf(maps.logits)
    assert hidden.any() == causal
    total = sum(x.astype(np.float64) for x in maps.parts.values())
    np.testing.assert_allclose(np.where(hidden, -np.inf, total), maps.logits, **CLOSE)
    for x in (maps.probabilities, *maps.parts.values()):
        assert not x[hidden].any()


CALLS: dict[str, dict[str, Any]] = {
    "window": {"window": (3, 1)},
    "mask": {"mask": np.random.default_rng(2).random((B, H, N, N)) < 0.6, "causal": True},
    "a row without keys": {"mask": np.arange(N)[:, None] != np.full(N, 4)[None]},
    "softcap": {"softcap": 1.5, "scale": 0.9},
    "start": {"query_start": [3, -4], "causal": True},
    "lengths": {"lengths": [5, 13]},
    "key_lengths": {"key_lengths": [0, 7]},
    "both lengths": {"lengths": [5, 12], "key_lengths": [13, 6], "causal": True},
    "scale": {"scale": -0.4},
}


@pytest.mark.parametrize("name", ["shaw", "xl", "deberta v2", "t5", "rope and alibi", "plane"])
@pytest.mark.parametrize("call", CALLS)
def test_against_the_reference(call: str, name: str) -> None:
    q, k, v, _ = activations(np.float32)
    position = EXAMPLES[name].make(**parameters(EXAMPLES[name], np.float32))
    compare(q, k, v, position, CALLS[call])


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_layouts_and_cross_attention(layout: str) -> None:
    tables = parameters(EXAMPLES["shaw per head"], np.float32)
    arrays = activations(np.float32, 150, 230)[:3]  # a few tiles
    if layout == "bnhd":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    compare(*arrays, relpos.Shaw(**tables), {"causal": True, "layout": layout})


def test_packed_sequences() -> None:
    tables = parameters(EXAMPLES["xl"], np.float32)
    arrays = [x.swapaxes(1, 2).reshape(-1, H, D) for x in activations(np.float32, 10, 12)[:3]]
    call = {"offsets": [0, 6, 6, 20], "key_offsets": [0, 3, 11, 24]}
    compare(*arrays, relpos.TransformerXL(**tables), call)
    q, k, v = (x[:20] for x in arrays)
    compare(q, k, v, relpos.TransformerXL(**tables), {"offsets": [0, 6, 20]})


def compare(q: Any, k: Any, v: Any, position: Any, call: dict[str, Any]) -> None:
    """Probabilities and logits of a call against relpos.reference, which reads the same call."""
    given = dict.fromkeys(
        (
            "lengths",
            "key_lengths",
            "offsets",
            "key_offsets",
            "query_start",
            "mask",
            "window",
            "scale",
        )
    ) | {"causal": False, "layout": "bhnd", "softcap": 0.0}
    fixed: Any = {"dropout": 0.0, "seed": 0, "precision": "f32"}
    request = read_request(q, k, v, None, **given | call, **fixed)
    ctx = context_of(request, position, v, v)  # how attention itself lowers it; turns q and k
    maps = relpos.attention_maps(q, k, v, position=position, parts="all", **call)
    batch = batch_of(ctx.q, ctx.k, ctx.call)
    ragged = any("lengths" in name or "offsets" in name for name in call)
    assert isinstance(maps.probabilities, list) == ragged
    for span in batch.spans:
        own = {name: x[span.batch] for name, x in everything(maps).items()}
        for x in own.values():
            assert x.shape == (H, span.queries, span.keys)
        for h in range(H):
            head = reference.head_arguments(batch, span, h)
            rows = (
                reference.head_rows(x, batch.layout, span.batch, h, row, count).astype(np.float64)
                for x, row, count in (
                    (ctx.q, span.query_row, span.queries),
                    (ctx.k, span.key_row, span.keys),
                )
            )
            s, lse = reference.attention_scores(
                *rows,
                head["terms"],
                scale=head["scale"] or reference.default_scale(D),
                visible=head["visible"],
                position_bias=head["position_bias"],
                softcap=batch.softcap,
            )
            p = reference.attention_probabilities(s, lse)
            np.testing.assert_allclose(own["logits"][h], s, rtol=1e-5, atol=2e-5)
            np.testing.assert_allclose(own["probabilities"][h], p, **CLOSE)
            total = sum(x[h].astype(np.float64) for n, x in own.items() if n in maps.parts)
            if batch.softcap:
                total = batch.softcap * np.tanh(total / batch.softcap)
            shown = np.where(head["visible"], total, -np.inf)
            np.testing.assert_allclose(shown, own["logits"][h], rtol=1e-5, atol=2e-5)
            hidden = ~head["visible"]
            assert np.isneginf(own["logits"][h][hidden]).all()
            for n in ("probabilities", *maps.parts):
                assert not own[n][h][hidden].any(), n


def test_each_term_by_itself() -> None:
    """Every part against its own formula, and its name."""
    q, k, v, _ = activations(np.float32)
    wide = [x.astype(np.float64) for x in (q, k)]
    t = parameters(EXAMPLES["graph"], np.float32)
    maps = relpos.attention_maps(
        q, k, position=relpos.ShawGraph(**t, labels=LABELS), parts="all", sequences=1, heads=2
    )
    assert list(maps.parts) == ["content", "key_table", "bias_table"]
    label = LABELS[1, 0].astype(int)
    content = wide[0][1, 2] @ wide[1][1, 2].T / D**0.5
    key = np.take_along_axis(wide[0][1, 2] @ t["key_table"][2].T / D**0.5, label % 6, axis=1)
    bias = t["bias_table"][2][label]
    np.testing.assert_allclose(maps.parts["content"], content, **CLOSE)
    np.testing.assert_allclose(maps.parts["key_table"], np.where(label < 0, 0, key), **CLOSE)
    np.testing.assert_array_equal(maps.parts["bias_table"], np.where(label < 0, 0, bias))


NAMES = {
    "shaw tied": ["key_table"],
    "rat-sql": ["key_table", "key_table_2"],
    "xl": ["position_weight", "content_bias"],
    "deberta v1": ["key_table", "query_table"],
    "relative_key_query": ["distance_table_key", "distance_table_query"],
    "alibi": ["slopes"],
    "rope": [],
    "rope and alibi": ["slopes"],
    "plane": ["row_key_table", "column_key_table"],
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    q, k, v, _ = activations(np.float32)
    position = EXAMPLES[name].make(**parameters(EXAMPLES[name], np.float32))
    maps = relpos.attention_maps(q, k, v, position=position, parts="all")
    assert list(maps.parts) == ["content", *NAMES[name]]


def test_one_table_in_two_terms_of_a_kind() -> None:
    q, k, v, _ = activations(np.float32)
    table = parameters(EXAMPLES["shaw"], np.float32)["key_table"]
    position = (relpos.Shaw(table), relpos.Shaw(table, left=1))
    maps = relpos.attention_maps(q, k, v, position=position, parts="all")
    assert list(maps.parts) == ["content", "key_table", "key_table_2"]
    np.testing.assert_allclose(sum(maps.parts.values()), maps.logits, **CLOSE)
    assert (maps.parts["key_table"] != maps.parts["key_table_2"]).any()


def test_values_change_nothing() -> None:
    """v may be missing, and a value table may have any width then."""
    q, k, v, _ = activations(np.float32)
    wide = np.zeros((5, 3), np.float32)
    key = parameters(EXAMPLES["shaw"], np.float32)["key_table"]
    with_v = relpos.attention_maps(q, k, v, position=relpos.Shaw(key), parts="all")
    without = relpos.attention_maps(q, k, position=relpos.Shaw(key, wide), parts="all")
    for name, x in everything(with_v).items():
        np.testing.assert_array_equal(x, everything(without)[name])


def test_only_what_is_asked_for() -> None:
    q, k, v, _ = activations(np.float32)
    shaw = relpos.Shaw(**parameters(EXAMPLES["shaw"], np.float32))
    maps = relpos.attention_maps(q, k, v, position=shaw)
    assert maps.logits is None and maps.parts == {} and maps.probabilities is not None
    assert repr(maps) == f"AttentionMaps(probabilities={(B, H, N, N)})"
    maps = relpos.attention_maps(q, k, v, position=shaw, parts="key_table", lengths=[2, 1])
    assert maps.logits is None and maps.probabilities is None and list(maps.parts) == ["key_table"]
    assert repr(maps) == f"AttentionMaps(key_table={[(H, 2, 2), (H, 1, 1)]})"
    maps = relpos.attention_maps(q, k, v, parts=("logits", "content"))
    np.testing.assert_array_equal(maps.logits, maps.parts["content"])
    assert repr(relpos.attention_maps(q, k, parts=())) == "AttentionMaps()"
    with pytest.raises(AttributeError):
        maps.logits = None  # type: ignore[misc]


# --------------------------------------------------------------------------------------------------
# Which of them
# --------------------------------------------------------------------------------------------------

CHOICES = [
    ("rows", 3), ("rows", -1), ("rows", [0, 1, 2, 60, 61, 149, 5, 5]), ("rows", slice(47, 149)),
    ("rows", slice(None, None, 7)), ("rows", slice(None, None, -1)), ("rows", np.array([-150, 99])),
    ("rows", []), ("heads", 2), ("heads", [3, 0]), ("heads", slice(1, 3)), ("heads", -1),
    ("sequences", 1), ("sequences", [-1]), ("sequences", slice(0, 0)), ("sequences", (1, 0, 1)),
]  # fmt: skip


@pytest.mark.parametrize("name", ["shaw", "xl", "deberta v2", "shaw none beyond", "rope and alibi"])
def test_a_part_has_the_bits_of_the_whole(name: str) -> None:
    position = EXAMPLES[name].make(**parameters(EXAMPLES[name], np.float32))
    q, k, v, _ = activations(np.float32, 150, 230)
    call: dict[str, Any] = {"position": position, "window": (90, 20), "parts": "all"}
    whole = everything(relpos.attention_maps(q, k, v, **call))
    axes = ("sequences", "heads", "rows")
    for axis, chosen in CHOICES:
        part = everything(relpos.attention_maps(q, k, v, **call, **{axis: chosen}))
        index = [slice(None)] * 3
        index[axes.index(axis)] = list(chosen) if isinstance(chosen, tuple) else chosen
        if isinstance(chosen, list) and not chosen:
            index[axes.index(axis)] = slice(0, 0)
        for kind, x in part.items():
            expected = whole[kind][tuple(index)]
            np.testing.assert_array_equal(x, expected, strict=True, err_msg=f"{kind} {chosen}")
    one = relpos.attention_maps(q, k, v, position=position, window=(90, 20), sequences=1, heads=2,
                                rows=140)  # fmt: skip
    np.testing.assert_array_equal(one.probabilities, whole["probabilities"][1, 2, 140])


def test_a_part_of_ragged_sequences() -> None:
    q, k, v, _ = activations(np.float32)
    call: dict[str, Any] = {"lengths": [9, 4], "key_lengths": [13, 6], "causal": True}
    whole = relpos.attention_maps(q, k, v, **call).probabilities
    assert [x.shape for x in whole] == [(H, 9, 13), (H, 4, 6)]
    last = relpos.attention_maps(q, k, v, **call, rows=-1, heads=0).probabilities
    for b in range(B):
        np.testing.assert_array_equal(last[b], whole[b][0, -1])
    some = relpos.attention_maps(q, k, v, **call, rows=slice(2, 7)).probabilities
    for b in range(B):
        np.testing.assert_array_equal(some[b], whole[b][:, 2:7])
    one = relpos.attention_maps(q, k, v, **call, sequences=1).probabilities
    np.testing.assert_array_equal(one, whole[1])
    (listed,) = relpos.attention_maps(q, k, v, **call, sequences=[1]).probabilities
    np.testing.assert_array_equal(listed, whole[1])


def test_threads_change_no_bits() -> None:
    q, k, v, _ = activations(np.float32, 400, 300)
    position = EXAMPLES["shaw"].make(**parameters(EXAMPLES["shaw"], np.float32))
    before = relpos.get_threads()
    try:
        found = []
        for threads in (1, 2, 3, 8):
            relpos.set_threads(threads)
            found.append(relpos.attention_maps(q, k, v, position=position, parts="all"))
    finally:
        relpos.set_threads(before)
    for maps in found[1:]:
        for name, x in everything(maps).items():
            np.testing.assert_array_equal(x, everything(found[0])[name], err_msg=name)


@pytest.mark.parametrize("shape", [(0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    maps = relpos.attention_maps(x, x, x, parts="all")
    for found in everything(maps).values():
        assert found.shape == (*shape[:2], shape[2], shape[2])
    packed = np.zeros((0, 3, 8), np.float32)
    assert relpos.attention_maps(packed, packed, offsets=[0]).probabilities == []
    (one,) = relpos.attention_maps(packed, packed, offsets=[0, 0]).probabilities
    assert one.shape == (3, 0, 0)


def test_no_keys() -> None:
    q, k = np.zeros((1, 2, 3, 8), np.float32), np.zeros((1, 2, 0, 8), np.float32)
    for found in everything(relpos.attention_maps(q, k, parts="all")).values():
        assert found.shape == (1, 2, 3, 0)


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------

ONE_HEAD = """
import sys
import numpy as np
import relpos

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10

n = 4096
x = np.random.default_rng(0).standard_normal((1, 8, n, 32), np.float32)
shaw = relpos.Shaw(np.zeros((9, 32), np.float32))
relpos.attention_maps(x[:, :, :64], x[:, :, :64], position=shaw, parts="all")
before = peak()
relpos.attention_maps(x, x, position=shaw, causal=True, heads=3, rows=slice(9, 25), parts="all")
few = peak()
maps = relpos.attention_maps(x, x, position=shaw, causal=True, heads=3)
print(few - before, peak() - few, maps.probabilities.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_one_head_takes_the_memory_of_one_head() -> None:
    """Of 4,096 tokens: 64 MiB. A process of its own tells the most that it ever held."""
    if "-fsanitize" in relpos.build_info()["flags"]:
        pytest.skip("a sanitizer keeps freed memory for a while")
    done = run_script(ONE_HEAD)
    assert done.returncode == 0, done.stderr
    few, one, size = map(int, done.stdout.split())
    assert size == 64 << 20
    assert few < 8 << 20  # 16 rows of four maps are 1 MiB
    assert one < size + (8 << 20)


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------

X = np.zeros((2, 4, 7, 8), np.float32)
SHAW = relpos.Shaw(np.zeros((5, 8), np.float32), np.zeros((5, 8), np.float32))
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("head", {"heads": 4}, ValueError, "heads: expected numbers from -4 to 3, got 4"),
    ("head before", {"heads": [0, -5]}, ValueError, "heads: expected numbers from -4 to 3, got -5"),
    (
        "row",
        {"rows": [0, 7]},
        ValueError,
        "rows: expected numbers from -7 to 6 in sequence 0, got 7",
    ),
    (
        "row of a short sequence",
        {"rows": 5, "lengths": [7, 4]},
        ValueError,
        "rows: expected numbers from -4 to 3 in sequence 1, got 5",
    ),
    (
        "row of an empty sequence",
        {"rows": 0, "lengths": [7, 0]},
        ValueError,
        "rows: expected none in sequence 1, where there are none, got 0",
    ),
    ("sequence", {"sequences": 2}, ValueError, "sequences: expected numbers from -2 to 1, got 2"),
    (
        "float",
        {"heads": 1.0},
        TypeError,
        "heads: expected integers (), (count,) or a slice, got float64 ()",
    ),
    (
        "bool",
        {"heads": [True, False, True, True]},
        TypeError,
        "heads: expected integers (), (count,) or a slice, got bool (4,)",
    ),
    (
        "matrix",
        {"rows": [[1], [2]]},
        ValueError,
        "rows: expected integers (), (count,) or a slice, got int64 (2, 1)",
    ),
    (
        "part",
        {"parts": ("logits", "key_tabel"), "position": SHAW},
        ValueError,
        "parts: there is no 'key_tabel' in this call, only 'probabilities', 'logits', 'content', "
        "'key_table' and 'all'",
    ),
    (
        "part of the values",
        {"parts": "value_table", "position": SHAW},
        ValueError,
        "parts: there is no 'value_table' in this call, only 'probabilities', 'logits', 'content', "
        "'key_table' and 'all'",
    ),
    ("no names", {"parts": 3}, TypeError, "parts: expected names, got int"),
    (
        "array",
        {"q": X[0]},
        ValueError,
        "q: expected float32 (B, H, N, D), got float32 (4, 7, 8)",
    ),
    (
        "keys",
        {"k": X[:, :3]},
        ValueError,
        "k: expected float32 (B=2, H=4 or a divisor, M, D=8), got float32 (2, 3, 7, 8)",
    ),
    (
        "values",
        {"v": X[:, :, :6]},
        ValueError,
        "v: expected float32 (B=2, H=4, M=7, Dv), got float32 (2, 4, 6, 8)",
    ),
    (
        "type",
        {"q": X.astype(np.float64)},
        TypeError,
        "q: expected float32 (B, H, N, D), got float64 (2, 4, 7, 8); "
        "use np.ascontiguousarray(q, np.float32)",
    ),
    ("lengths", {"lengths": [8, 1]}, ValueError, "attention: lengths[0]=8, must be from 0 to N=7"),
    (
        "position",
        {"position": 3},
        TypeError,
        "position: expected a scheme as relpos.Shaw, a tuple of them or None, got int",
    ),
    (
        "label",
        {
            "position": relpos.ShawGraph(
                np.zeros((3, 8), np.float32), labels=np.full((7, 7), 3, np.int8)
            )
        },
        ValueError,
        "label",
    ),
]


@pytest.mark.parametrize("name", [entry[0] for entry in REFUSED])
def test_refused(name: str) -> None:
    changes, error, sentence = next(entry[1:] for entry in REFUSED if entry[0] == name)
    with pytest.raises(error, match=re.escape(sentence)):
        relpos.attention_maps(**({"q": X, "k": X} | changes))
