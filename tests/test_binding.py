# SPDX-License-Identifier: Apache-2.0
"""The door from Python: what is taken as it lies, what is refused and how, and what it costs.

That the numbers are right is test_attention.py's to show; here a few cases show that every
argument reaches the core.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos import _core, reference
from relpos.reference import Band, Batch

ROOT = Path(__file__).resolve().parent.parent
B, H, N, D, K = 2, 3, 37, 24, 4


def rows(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


@pytest.fixture
def qkv() -> tuple[Any, Any, Any]:
    return rows(B, H, N, D, seed=1), rows(B, H, N, D, seed=2), rows(B, H, N, D, seed=3)


@pytest.fixture
def shaw() -> relpos.Shaw:
    return relpos.Shaw(rows(2 * K + 1, D, seed=4), rows(2 * K + 1, D, seed=5))


# --------------------------------------------------------------------------------------------------
# Every argument arrives
# --------------------------------------------------------------------------------------------------

T = 2 * K + 1
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: what Python is given, what the reference is given
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "scale": ({"scale": -0.3}, {"scale": -0.3}),
    "lengths": ({"lengths": [30, 0]}, {"lengths": (30, 0)}),
    "key_lengths": ({"key_lengths": (5, 37)}, {"key_lengths": (5, 37)}),
    "both lengths": (
        {"lengths": np.array([3, 37], np.uint8), "key_lengths": [9, 9], "causal": True},
        {"lengths": (3, 37), "key_lengths": (9, 9), "causal": True},
    ),
    "start": ({"query_start": [5, -3], "causal": True}, {"query_start": (5, -3), "causal": True}),
    "one start": ({"query_start": 2}, {"query_start": (2, 2)}),
}
SCHEMES: dict[str, tuple[Callable[[], relpos.Shaw | None], Band | None, Band | None]] = {
    "none": (lambda: None, None, None),
    "both": (lambda: relpos.Shaw(rows(T, D, seed=4), rows(T, D, seed=5)), Band(K, K), Band(K, K)),
    "key": (lambda: relpos.Shaw(rows(T, D, seed=4), k=K), Band(K, K), None),
    "value": (lambda: relpos.Shaw(value_table=rows(1, D)), None, Band(0, 0)),
    "per head": (
        lambda: relpos.Shaw(rows(H, T, D), rows(H, 3, D), value_k=1),
        Band(K, K),
        Band(1, 1),
    ),
    "sides": (
        lambda: relpos.Shaw(rows(6, D), rows(8, D), left=2, value_right=0, beyond="none"),
        Band(2, 3, "none"),
        Band(7, 0, "none"),
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", WAYS)
def test_arguments_reach_the_core(qkv: Any, way: str, scheme: str) -> None:
    given, meant = WAYS[way]
    make, key_band, value_band = SCHEMES[scheme]
    position = make()
    tables = (position.key_table, position.value_table) if position else (None, None)
    counts = ("lengths", "key_lengths", "query_start")
    batch = Batch(
        reference.spans(B, N, N, **{name: meant[name] for name in counts if name in meant}),
        key_band,
        value_band,
        meant.get("causal", False),
        meant.get("scale"),
    )
    dout = rows(B, H, N, D, seed=6)
    out, lse = reference.batched_forward(batch, *qkv, *tables)
    expected = reference.batched_backward(batch, *qkv, dout, *tables)

    got, ctx = relpos.attention_forward(*qkv, position=position, **given)
    gradients = relpos.attention_backward(ctx, dout)
    np.testing.assert_allclose(got, out, rtol=0, atol=2e-5)
    np.testing.assert_allclose(ctx.lse, lse, rtol=1e-5, atol=2e-5)
    assert list(gradients) == list(expected)
    for name, gradient in gradients.items():
        assert gradient.shape == expected[name].shape and gradient.dtype == np.float32
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-4, err_msg=name)
    np.testing.assert_array_equal(relpos.attention(*qkv, position=position, **given), got)


def test_widths_and_lengths_of_queries_and_keys_may_differ() -> None:
    q, k, v = rows(B, H, 5, D), rows(B, H, 9, D), rows(B, H, 9, 7)
    position = relpos.Shaw(rows(T, D), rows(3, 7), value_k=1)
    out, ctx = relpos.attention_forward(q, k, v, position=position)
    batch = Batch(reference.spans(B, 5, 9), Band(K, K), Band(1, 1))
    expected, _ = reference.batched_forward(
        batch, q, k, v, *(position.key_table, position.value_table)
    )
    np.testing.assert_allclose(out, expected, atol=2e-5)
    gradients = relpos.attention_backward(ctx, out)
    assert {name: x.shape for name, x in gradients.items()} == {
        "q": q.shape,
        "k": k.shape,
        "v": v.shape,
        "key_table": (T, D),
        "value_table": (3, 7),
    }


# --------------------------------------------------------------------------------------------------
# Layouts, without a copy
# --------------------------------------------------------------------------------------------------


def test_bnhd_is_bhnd_transposed(qkv: Any, shaw: relpos.Shaw) -> None:
    out, ctx = relpos.attention_forward(*qkv, position=shaw, causal=True)
    dout = rows(*out.shape, seed=7)
    gradients = relpos.attention_backward(ctx, dout)
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (*qkv, dout)]
    for arrays in (swapped, [x.swapaxes(1, 2) for x in (*qkv, dout)]):  # contiguous; a view
        other, other_ctx = relpos.attention_forward(
            *arrays[:3], position=shaw, causal=True, layout="bnhd"
        )
        np.testing.assert_array_equal(other.swapaxes(1, 2), out)
        other_gradients = relpos.attention_backward(other_ctx, arrays[3])
        for name in ("q", "k", "v"):
            np.testing.assert_array_equal(other_gradients[name].swapaxes(1, 2), gradients[name])
        for name in ("key_table", "value_table"):
            np.testing.assert_array_equal(other_gradients[name], gradients[name])


def test_packed_is_padded_with_lengths(qkv: Any, shaw: relpos.Shaw) -> None:
    lengths = [20, 33]
    padded, ctx = relpos.attention_forward(*qkv, position=shaw, lengths=lengths)
    padded_gradients = relpos.attention_backward(ctx, padded)

    def pack(x: Any) -> Any:
        return np.concatenate([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lengths)])

    packed, ctx = relpos.attention_forward(*map(pack, qkv), position=shaw, offsets=[0, 20, 53])
    assert packed.shape == (53, H, D) and ctx.lse.shape == (H, 53)
    np.testing.assert_array_equal(packed, pack(padded))
    gradients = relpos.attention_backward(ctx, packed)
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(gradients[name], pack(padded_gradients[name]))
    np.testing.assert_array_equal(gradients["key_table"], padded_gradients["key_table"])


def test_each_side_may_be_packed(shaw: relpos.Shaw) -> None:
    q, k, v = rows(B, H, 5, D), rows(11, H, D), rows(11, H, D, seed=1)
    out = relpos.attention(q, k, v, position=shaw, key_offsets=[0, 4, 11])
    for b, keys in enumerate((slice(0, 4), slice(4, 11))):
        one = relpos.attention(
            q[b : b + 1], *(x[None, keys].swapaxes(1, 2) for x in (k, v)), position=shaw
        )
        np.testing.assert_allclose(out[b], one[0], atol=1e-5)
    both = relpos.attention(
        np.concatenate([x.swapaxes(0, 1) for x in q]),
        k,
        v,
        position=shaw,
        offsets=[0, 5, 10],
        key_offsets=[0, 4, 11],
    )
    np.testing.assert_array_equal(both, np.concatenate([x.swapaxes(0, 1) for x in out]))


def test_strided_views_are_used_where_they_lie() -> None:
    """q, k and v interleaved as one projection leaves them, and gradients of such."""
    fused = rows(2, 600, 3, 8, 64)  # (B, N, 3, H, D)
    q, k, v = (fused[:, :, i] for i in range(3))
    expected = relpos.attention(*map(np.ascontiguousarray, (q, k, v)), layout="bnhd")
    relpos.attention(q, k, v, layout="bnhd")
    tracemalloc.start()
    out, ctx = relpos.attention_forward(q, k, v, layout="bnhd")
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(out, expected)
    assert ctx.q is q and ctx.k is k and ctx.v is v and ctx.out is out
    assert kept < out.nbytes + ctx.lse.nbytes + 20_000
    np.testing.assert_array_equal(relpos.attention_backward(ctx, v).q.shape, q.shape)


def test_broadcast_inputs(qkv: Any, shaw: relpos.Shaw) -> None:
    q, k, v = qkv
    k, v = k[:, :1], v[:, :1]  # multi-query attention: one head of keys
    wide = [np.broadcast_to(x, q.shape) for x in (k, v)]
    assert wide[0].strides[1] == 0
    np.testing.assert_array_equal(
        relpos.attention(q, *wide, position=shaw),
        relpos.attention(q, *map(np.ascontiguousarray, wide), position=shaw),
    )
    out, ctx = relpos.attention_forward(q, *wide, position=shaw)
    dout = np.broadcast_to(np.float32(1), out.shape[:-1])[..., None] * np.ones(D, np.float32)
    assert relpos.attention_backward(ctx, dout).k.shape == q.shape


def test_out_is_written_and_returned(qkv: Any) -> None:
    expected = relpos.attention(*qkv)
    for layout in ("bhnd", "strided", "interleaved with q"):
        q = qkv[0]
        if layout == "bhnd":
            out = np.empty_like(expected)
        elif layout == "strided":
            out = np.full((B, H, N, D + 3), 7, np.float32)[..., :D]
        else:
            pair = np.stack([q, q], axis=2)
            q, out = pair[:, :, 0], pair[:, :, 1]
        before = q.copy()
        got, ctx = relpos.attention_forward(q, *qkv[1:], out=out)
        assert got is out and ctx.out is out
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(q, before)
        if layout == "strided":
            assert (out.base[..., D:] == 7).all()


def test_tables_with_wide_rows(qkv: Any) -> None:
    """Both tables side by side in one array: their gradients lie likewise."""
    side_by_side = rows(T, 2 * D)
    key, value = side_by_side[:, :D], side_by_side[:, D:]
    out, ctx = relpos.attention_forward(*qkv, position=relpos.Shaw(key, value))
    plain, plain_ctx = relpos.attention_forward(
        *qkv, position=relpos.Shaw(key.copy(), value.copy())
    )
    np.testing.assert_array_equal(out, plain)
    gradients, expected = (relpos.attention_backward(c, out) for c in (ctx, plain_ctx))
    for name in ("key_table", "value_table"):
        assert gradients[name].shape == (T, D)
        np.testing.assert_array_equal(gradients[name], expected[name])


def test_tied_tables_have_one_gradient(qkv: Any) -> None:
    table = rows(T, D)
    out, ctx = relpos.attention_forward(*qkv, position=relpos.Shaw(table, table))
    tied = relpos.attention_backward(ctx, out)
    assert list(tied) == ["q", "k", "v", "key_table"] and tied.value_table is None
    _, ctx = relpos.attention_forward(*qkv, position=relpos.Shaw(table, table.copy()))
    two = relpos.attention_backward(ctx, out)
    np.testing.assert_allclose(
        tied["key_table"], two["key_table"] + two["value_table"], rtol=1e-5, atol=1e-5
    )


def test_gradients_are_a_mapping(qkv: Any) -> None:
    _, ctx = relpos.attention_forward(*qkv, position=(relpos.Shaw(rows(T, D)),))
    gradients = relpos.attention_backward(ctx, qkv[0])
    assert len(gradients) == 4 and dict(gradients)["key_table"] is gradients.key_table
    assert gradients.value_table is None and "value_table" not in gradients
    with pytest.raises(KeyError):
        gradients["value_table"]
    with pytest.raises(KeyError):
        gradients["__class__"]


def test_a_context_serves_many_times(qkv: Any, shaw: relpos.Shaw) -> None:
    lengths = np.array([30, 37])
    out, ctx = relpos.attention_forward(*qkv, position=shaw, lengths=lengths)
    first = relpos.attention_backward(ctx, out)
    lengths[:] = 0  # the context has its own
    second = relpos.attention_backward(ctx, out)
    for name, gradient in first.items():
        assert gradient is not second[name]
        np.testing.assert_array_equal(gradient, second[name])


def test_a_context_outlives_a_change_of_its_arrays(qkv: Any) -> None:
    q, k, v = (x.copy() for x in qkv)
    out, ctx = relpos.attention_forward(q, k, v)
    with pytest.raises(ValueError, match="resize"):
        q.resize((1, 1, 1, 1))
    q.resize((1, 1, 1, 1), refcheck=False)
    with pytest.raises(ValueError, match=r"^k: expected float32 \(B=1, H=1, M, D=1\), got float32"):
        relpos.attention_backward(ctx, out)


@pytest.mark.parametrize("shape", [(0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8)])
def test_empty_arrays(shape: tuple[int, ...]) -> None:
    x = rows(*shape)
    position = relpos.Shaw(rows(3, 8), rows(3, 8))
    out, ctx = relpos.attention_forward(x, x, x, position=position)
    gradients = relpos.attention_backward(ctx, out)
    assert out.shape == shape and gradients.q.shape == shape
    assert not np.any(gradients.key_table) and not np.any(gradients.value_table)
    packed = rows(0, 3, 8)
    assert relpos.attention(packed, packed, packed, offsets=[0]).shape == (0, 3, 8)
    assert relpos.attention(packed, packed, packed, offsets=[0, 0, 0]).shape == (0, 3, 8)


def test_no_keys_gives_zeros() -> None:
    q, k = rows(2, 3, 4, 8), rows(2, 3, 0, 8)
    out, ctx = relpos.attention_forward(q, k, k)
    assert not out.any() and np.all(ctx.lse == -np.inf)
    assert not relpos.attention_backward(ctx, out).q.any()


# --------------------------------------------------------------------------------------------------
# What is refused, and the sentence
# --------------------------------------------------------------------------------------------------


class Arrays(dict[str, Any]):
    """Keyword arguments of a call that works, one of them to be spoilt."""

    def __init__(self, **changes: Any) -> None:
        x = {name: rows(2, 4, 7, 8, seed=i) for i, name in enumerate("qkv")}
        super().__init__(x | changes)


def misaligned(*shape: int) -> Any:
    size = 4 * int(np.prod(shape))
    return np.zeros(size + 1, np.uint8)[1:].view(np.float32).reshape(shape)


def read_only(array: Any) -> Any:
    array.setflags(write=False)
    return array


X = rows(2, 4, 7, 8)
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "dtype",
        {"q": X[0].astype(np.float64)},
        TypeError,
        "q: expected float32 (B, H, N, D), got float64 (4, 7, 8); "
        "use np.ascontiguousarray(q, np.float32)",
    ),
    (
        "half",
        {"k": X.astype(np.float16)},
        TypeError,
        "k: expected float32 (B=2, H=4, M, D=8), got float16 (2, 4, 7, 8); "
        "use np.ascontiguousarray(k, np.float32)",
    ),
    (
        "byte order",
        {"v": X.astype(X.dtype.newbyteorder())},
        TypeError,
        "v: expected float32 (B=2, H=4, M=7, Dv), got >f4 (2, 4, 7, 8); "
        "use np.ascontiguousarray(v, np.float32)",
    ),
    (
        "list",
        {"q": X.tolist()},
        TypeError,
        "q: expected float32 (B, H, N, D), got list; use np.ascontiguousarray(q, np.float32)",
    ),
    (
        "None",
        {"q": None},
        TypeError,
        "q: expected float32 (B, H, N, D), got NoneType; use np.ascontiguousarray(q, np.float32)",
    ),
    ("rank", {"q": X[0]}, ValueError, "q: expected float32 (B, H, N, D), got float32 (4, 7, 8)"),
    (
        "rank, packed",
        {"offsets": [0, 7]},
        ValueError,
        "q: expected float32 (tokens, H, D), got float32 (2, 4, 7, 8)",
    ),
    (
        "heads",
        {"k": X[:, :3]},
        ValueError,
        "k: expected float32 (B=2, H=4, M, D=8), got float32 (2, 3, 7, 8)",
    ),
    (
        "keys",
        {"v": X[:, :, :6]},
        ValueError,
        "v: expected float32 (B=2, H=4, M=7, Dv), got float32 (2, 4, 6, 8)",
    ),
    (
        "layout",
        {"layout": "bnhd", "k": X[:, :, :6]},
        ValueError,
        "k: expected float32 (B=2, M, H=7, D=8), got float32 (2, 4, 6, 8)",
    ),
    ("layout name", {"layout": "nhd"}, ValueError, "layout: expected 'bhnd' or 'bnhd', got 'nhd'"),
    (
        "order",
        {"q": np.asfortranarray(X)},
        ValueError,
        "q: the last axis must be contiguous, got strides (4, 8, 32, 224) in bytes; use q.copy()",
    ),
    (
        "backwards",
        {"q": X[:, :, ::-1]},
        ValueError,
        "q: strides must be whole elements forward, got strides (896, 224, -32, 4) in bytes; "
        "use q.copy()",
    ),
    (
        "misaligned",
        {"k": misaligned(2, 4, 7, 8)},
        ValueError,
        "k: the array is not aligned to its elements; use k.copy()",
    ),
    (
        "out dtype",
        {"out": X.astype(np.float64)},
        TypeError,
        "out: expected float32 (B=2, H=4, N=7, Dv=8), got float64 (2, 4, 7, 8)",
    ),
    (
        "out shape",
        {"out": np.empty((2, 4, 7, 9), np.float32)},
        ValueError,
        "out: expected float32 (B=2, H=4, N=7, Dv=8), got float32 (2, 4, 7, 9)",
    ),
    (
        "out read-only",
        {"out": read_only(np.empty_like(X))},
        ValueError,
        "out: the array is read-only; give a writable one",
    ),
    (
        "out overlaps itself",
        {
            "out": np.lib.stride_tricks.as_strided(
                np.empty(999, np.float32), X.shape, (896, 224, 4, 4)
            )
        },
        ValueError,
        "out: elements share memory, got strides (896, 224, 4, 4) in bytes; "
        "give a new array, as np.empty makes it",
    ),
    (
        "lengths, count",
        {"lengths": [1, 2, 3]},
        ValueError,
        "lengths: expected int64 (B=2,), got int64 (3,)",
    ),
    (
        "lengths, fractions",
        {"lengths": [1.0, 2.0]},
        TypeError,
        "lengths: expected integers, got float64 (2,)",
    ),
    (
        "lengths, range",
        {"lengths": [1, 8]},
        ValueError,
        "attention: lengths[1]=8, must be from 0 to N=7",
    ),
    (
        "query_start, count",
        {"query_start": [0]},
        ValueError,
        "query_start: expected int64 (B=2,), got int64 (1,)",
    ),
    (
        "key_offsets, end",
        {"k": X[0], "v": X[0], "key_offsets": [0, 1, 5]},
        ValueError,
        "k: expected float32 (tokens, H=4, D=8), got float32 (4, 7, 8)",
    ),
    (
        "offsets, end",
        {"q": X[0], "offsets": [0, 1, 5]},
        ValueError,
        "offsets: the last one is 5, but q has 4 tokens",
    ),
    (
        "offsets, falling",
        {"q": X[0], "k": X[0], "v": X[0], "offsets": [0, 5, 4]},
        ValueError,
        "attention: offsets[2]=4 after 5, must not fall and not exceed 2^40",
    ),
    (
        "offsets, none",
        {"offsets": []},
        ValueError,
        "offsets: expected B + 1 numbers from 0 to the number of tokens, got none",
    ),
    (
        "offsets, rank",
        {"offsets": [[0, 4]]},
        ValueError,
        "offsets: expected int64 (B + 1,), got int64 (1, 2)",
    ),
    (
        "scale 0",
        {"scale": 0},
        ValueError,
        "scale: expected a finite number other than 0, got 0; leave it out for 1 / sqrt(D)",
    ),
    (
        "scale NaN",
        {"scale": float("nan")},
        ValueError,
        "scale: expected a finite number other than 0, got nan; leave it out for 1 / sqrt(D)",
    ),
    (
        "scale infinite",
        {"scale": np.float32(np.inf)},
        ValueError,
        "scale: expected a finite number other than 0, got inf; leave it out for 1 / sqrt(D)",
    ),
    (
        "table width",
        {"position": relpos.Shaw(rows(5, 9))},
        ValueError,
        "key_table: expected float32 (T, D=8), got float32 (5, 9)",
    ),
    (
        "table heads",
        {"position": relpos.Shaw(value_table=rows(3, 5, 8))},
        ValueError,
        "value_table: expected float32 (H=4, T, Dv=8), got float32 (3, 5, 8)",
    ),
    (
        "table broadcast over heads",
        {"position": relpos.Shaw(np.broadcast_to(rows(5, 8), (4, 5, 8)))},
        ValueError,
        "key_table: elements share memory, got strides (0, 32, 4) in bytes; use key_table.copy()",
    ),
    ("scheme", {"position": X}, TypeError, "position: expected relpos.Shaw or None, got ndarray"),
    (
        "two schemes",
        {"position": (relpos.Shaw(rows(5, 8)), relpos.Shaw(rows(5, 8)))},
        ValueError,
        "position: expected one scheme, got 2",
    ),
]


@pytest.mark.parametrize("forward", [relpos.attention, relpos.attention_forward])
@pytest.mark.parametrize(
    ("changes", "error", "sentence"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_refused(changes: Any, error: type[Exception], sentence: str, forward: Any) -> None:
    arguments = Arrays(**changes)
    with pytest.raises(error) as caught:
        forward(**arguments)
    assert type(caught.value) is error
    assert str(caught.value) == sentence


@pytest.mark.parametrize("name", ["q", "k", "v", "key_table"])
def test_out_must_not_share_memory_with_an_input(name: str) -> None:
    arguments = Arrays()
    table = rows(7, 8)
    arguments["position"] = relpos.Shaw(table)
    shared = table if name == "key_table" else arguments[name]
    out = np.lib.stride_tricks.as_strided(shared, (2, 4, 7, 8), (0, 0, 32, 4))
    if name != "key_table":
        out = shared[:]
    with pytest.raises(
        ValueError, match=f"^out: shares memory with {name}; give an array of its own$"
    ):
        relpos.attention(**arguments, out=out)


def test_dout_is_checked(qkv: Any) -> None:
    out, ctx = relpos.attention_forward(*qkv)
    with pytest.raises(TypeError, match="^dout: expected float32 .*, got float64"):
        relpos.attention_backward(ctx, out.astype(np.float64))
    with pytest.raises(ValueError, match=r"^dout: expected float32 \(B=2, H=3, N=37, Dv=24\), got"):
        relpos.attention_backward(ctx, out[:, :2])


SHAW_REFUSED: list[tuple[str, Callable[[], relpos.Shaw], type[Exception], str]] = [
    (
        "nothing",
        lambda: relpos.Shaw(),
        ValueError,
        "Shaw: give key_table, value_table or both; attention without either is position=None",
    ),
    (
        "list",
        lambda: relpos.Shaw([[1.0]]),  # type: ignore[arg-type]
        TypeError,
        "key_table: expected float32 (T, d) or (H, T, d), got list; "
        "use np.ascontiguousarray(key_table, np.float32)",
    ),
    (
        "dtype",
        lambda: relpos.Shaw(value_table=np.zeros((3, 8))),  # type: ignore[arg-type]
        TypeError,
        "value_table: expected float32 (T, d) or (H, T, d), got float64 (3, 8); "
        "use np.ascontiguousarray(value_table, np.float32)",
    ),
    (
        "rank",
        lambda: relpos.Shaw(rows(8)),
        ValueError,
        "key_table: expected float32 (T, d) or (H, T, d), got float32 (8,)",
    ),
    (
        "even",
        lambda: relpos.Shaw(rows(8, 4)),
        ValueError,
        "key_table: 8 rows are not 2k + 1; give left or right",
    ),
    (
        "no rows",
        lambda: relpos.Shaw(rows(0, 4)),
        ValueError,
        "key_table: 0 rows are not 2k + 1; give left or right",
    ),
    (
        "k",
        lambda: relpos.Shaw(rows(9, 4), k=3),
        ValueError,
        "key_table: a band from -3 to 3 needs 7 rows, got 9",
    ),
    (
        "one k for both",
        lambda: relpos.Shaw(rows(9, 4), rows(5, 4), k=4),
        ValueError,
        "value_table: a band from -4 to 4 needs 9 rows, got 5; "
        "value_k, value_left and value_right give it a band of its own",
    ),
    (
        "left beyond the table",
        lambda: relpos.Shaw(rows(4, 4), left=4),
        ValueError,
        "key_table: a band from -4 to 0 needs 5 rows, got 4",
    ),
    (
        "negative",
        lambda: relpos.Shaw(rows(9, 4), k=-1),
        ValueError,
        "k: expected 0 or more, got -1",
    ),
    (
        "fraction",
        lambda: relpos.Shaw(rows(9, 4), left=1.5),  # type: ignore[arg-type]
        TypeError,
        "left: expected an integer, got float",
    ),
    (
        "k and left",
        lambda: relpos.Shaw(rows(9, 4), k=4, left=4),
        ValueError,
        "k: give either k or left and right",
    ),
    (
        "value_k without a value",
        lambda: relpos.Shaw(rows(9, 4), value_k=4),
        ValueError,
        "value_k, value_left, value_right: there is no value_table",
    ),
    (
        "beyond",
        lambda: relpos.Shaw(rows(9, 4), beyond="mask"),  # type: ignore[arg-type]
        ValueError,
        "beyond: expected 'clip' or 'none', got 'mask'",
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "sentence"), [r[1:] for r in SHAW_REFUSED], ids=[r[0] for r in SHAW_REFUSED]
)
def test_shaw_refused(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert type(caught.value) is error and str(caught.value) == sentence


def test_shaw_bands() -> None:
    table = rows(9, 4)
    assert relpos.Shaw(table).key_band == (4, 4)
    assert relpos.Shaw(table, left=0).key_band == (0, 8)
    assert relpos.Shaw(table, right=8).key_band == (0, 8)
    assert relpos.Shaw(table, left=3, right=5).key_band == (3, 5)
    both = relpos.Shaw(table, rows(5, 4))
    assert (both.key_band, both.value_band, both.tied) == ((4, 4), (2, 2), False)
    assert relpos.Shaw(table, table).tied
    assert repr(relpos.Shaw(table, k=4)) == (
        "Shaw(key_table=float32 (9, 4), key_band=(4, 4), beyond='clip')"
    )
    with pytest.raises(AttributeError):
        both.k = 3  # type: ignore[misc]


def test_memory_error(qkv: Any) -> None:
    endless = np.broadcast_to(np.float32(0), (1, 1, 1 << 46, 1))
    with pytest.raises(MemoryError):
        relpos.attention(endless, endless, endless)


def test_threads_and_errors() -> None:
    before = relpos.get_threads()
    try:
        relpos.set_threads(3)
        assert relpos.get_threads() == relpos.build_info()["threads"] == 3
        with pytest.raises(
            ValueError, match="^rp_set_threads: threads is 1025, expected 1 to 1024"
        ):
            relpos.set_threads(1025)
        with pytest.raises(TypeError):
            relpos.set_threads("2")  # type: ignore[arg-type]
        assert relpos.get_threads() == 3
    finally:
        relpos.set_threads(before)
    assert issubclass(relpos.DeviceError, RuntimeError)
    assert f"{relpos.DeviceError.__module__}.{relpos.DeviceError.__name__}" == "relpos.DeviceError"


def test_build_info() -> None:
    info = relpos.build_info()
    assert list(info) == [
        "version", "compiler", "flags", "isa", "isa_available", "blas", "threads", "numpy", "python",
    ]  # fmt: skip
    assert info["version"] == relpos.__version__
    assert info["isa"] in info["isa_available"].split()
    assert "-ffp-contract=fast" in info["flags"]


# --------------------------------------------------------------------------------------------------
# Behaviour over time and over threads
# --------------------------------------------------------------------------------------------------


def test_inputs_are_only_read(qkv: Any, shaw: relpos.Shaw) -> None:
    arrays = [*qkv, shaw.key_table, shaw.value_table]
    copies = [x.copy() for x in arrays]
    for x in arrays:
        x.setflags(write=False)
    out, ctx = relpos.attention_forward(*qkv, position=shaw)
    relpos.attention_backward(ctx, read_only(out))
    for x, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_subclasses_are_plain_arrays(qkv: Any) -> None:
    class Tagged(np.ndarray):  # type: ignore[type-arg]
        pass

    out = relpos.attention(*(x.view(Tagged) for x in qkv))
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, relpos.attention(*qkv))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_nothing_leaks(shaw: relpos.Shaw) -> None:
    q, k, v = (rows(1, 2, 16, D, seed=i) for i in range(3))
    bad = q.astype(np.float64)
    held = [q, k, v, bad, shaw.key_table, shaw.value_table, None]

    def calls(times: int) -> None:
        for _ in range(times):
            out, ctx = relpos.attention_forward(q, k, v, position=shaw, lengths=[9], query_start=1)
            relpos.attention_backward(ctx, out)
            for error, arguments in (
                (TypeError, {"q": bad}),
                (ValueError, {"lengths": [99]}),
                (ValueError, {"out": q}),
                (ValueError, {"v": v[:, :1]}),
            ):
                with pytest.raises(error):
                    relpos.attention(**({"q": q, "k": k, "v": v} | arguments))

    calls(100)
    gc.collect()
    counts = [sys.getrefcount(x) for x in held]
    resident = resident_bytes()
    calls(1000)
    gc.collect()
    after = [sys.getrefcount(x) for x in held]
    assert after[:-1] == counts[:-1]
    assert abs(after[-1] - counts[-1]) < 100  # None
    if "-fsanitize" not in relpos.build_info()["flags"]:  # which keeps freed memory for a while
        assert resident_bytes() - resident < 1 << 20


def test_eight_threads_at_once(qkv: Any, shaw: relpos.Shaw) -> None:
    def call(_: int) -> tuple[Any, relpos.Gradients]:
        out, ctx = relpos.attention_forward(*qkv, position=shaw, causal=True)
        return out, relpos.attention_backward(ctx, out)

    out, gradients = call(0)
    with ThreadPoolExecutor(8) as pool:
        for other, other_gradients in pool.map(call, range(160)):
            np.testing.assert_array_equal(other, out)
            for name, gradient in gradients.items():
                np.testing.assert_array_equal(other_gradients[name], gradient)


def test_calls_survive_a_changing_number_of_threads(qkv: Any) -> None:
    """The workspace is sized before the call; more threads in between need more of it."""
    before = relpos.get_threads()
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for threads in (1, 8):
                relpos.set_threads(threads)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        expected = relpos.attention(*qkv)
        for _ in range(200):
            np.testing.assert_array_equal(relpos.attention(*qkv), expected)
    finally:
        stop.set()
        changer.join()
        relpos.set_threads(before)


@pytest.mark.parametrize("backward", [False, True])
def test_the_gil_is_released(backward: bool) -> None:
    x = rows(1, 8, 2048, 64)
    _, ctx = relpos.attention_forward(x, x, x)
    span: list[float] = []

    def work() -> None:
        started = time.perf_counter()
        if backward:
            relpos.attention_backward(ctx, x)
        else:
            relpos.attention(x, x, x)
        span.extend((started, time.perf_counter()))

    worker = threading.Thread(target=work)
    ticks = []
    worker.start()
    while worker.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.0005)
    started, ended = span
    margin = (ended - started) / 10
    assert sum(started + margin < t < ended - margin for t in ticks) >= 5


# --------------------------------------------------------------------------------------------------
# The source of the binding
# --------------------------------------------------------------------------------------------------


def binding_source() -> str:
    text = (ROOT / "relpos" / "_core.c").read_text()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r'"(\\.|[^"\\])*"', '""', text)


def test_every_gil_release_has_its_restore() -> None:
    parts = re.split(r"\bPy_(BEGIN|END)_ALLOW_THREADS\b", binding_source())
    assert parts[1::2] == ["BEGIN", "END"] * (len(parts) // 4), "unpaired"
    for released in parts[2::4]:
        assert not re.search(r"\b(return|goto|break|continue)\b", released), released
        assert not re.search(r"\bPy\w*", released), f"Python without the GIL: {released}"
    called = [name for part in parts[2::4] for name in re.findall(r"\b(rp_\w+)\(", part)]
    assert sorted(called) == [
        "rp_attention_backward",
        "rp_attention_forward",
        "rp_build_info_get",
        "rp_get_threads",
        "rp_set_threads",
    ]


def test_the_binding_stays_small() -> None:
    assert len((ROOT / "relpos" / "_core.c").read_text().splitlines()) <= 900
    assert not re.search(r"^static PyObject \*?\w+( =|;)", binding_source(), re.MULTILINE)


def test_stub_names_what_the_module_has() -> None:
    tree = ast.parse((ROOT / "relpos" / "_core.pyi").read_text())
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    named |= {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    public = {name for name in vars(_core) if not name.startswith("_")}
    assert named - {"CoreInfo"} == public


def test_public_names_are_documented() -> None:
    for name in relpos.__all__:
        if name != "__version__":
            assert getattr(relpos, name).__doc__, name
