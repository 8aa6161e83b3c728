# SPDX-License-Identifier: Apache-2.0
"""Attention, forward and backward, over NumPy arrays.

This layer is lenient about small things (lists of lengths, one number for all sequences) and
strict about big ones: arrays of activations and tables go to the core as they lie. The core
refuses what it cannot use without a copy and says how to convert it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from relpos import _core
from relpos.position import Array, Band, Position, Shaw, one_scheme

Layout = Literal["bhnd", "bnhd"]
Integers = npt.ArrayLike


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AttentionContext:
    """What `attention_backward` needs of a forward call. It refers to the arrays, it does not
    copy them: their content must still be what forward saw."""

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array  # log-sum-exp of each query's scores: (B, H, N), or (H, tokens) where packed
    position: Shaw | None
    call: _core.Call = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Gradients(Mapping[str, Array]):
    """The gradients of one call, as attributes and by name.

    Each has the shape of what it belongs to. An attribute is None, and the name is missing,
    where the call had no such table. Tied tables have one gradient, `key_table`.
    """

    q: Array
    k: Array
    v: Array
    key_table: Array | None = None
    value_table: Array | None = None

    def __getitem__(self, name: str) -> Array:
        if name in ("q", "k", "v", "key_table", "value_table"):
            gradient: Array | None = getattr(self, name)
            if gradient is not None:
                return gradient
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from ("q", "k", "v")
        if self.key_table is not None:
            yield "key_table"
        if self.value_table is not None:
            yield "value_table"

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Gradients({', '.join(f'{name}={x.shape}' for name, x in self.items())})"


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    position: Position = None,
    causal: bool = False,
    lengths: Integers | None = None,
    key_lengths: Integers | None = None,
    offsets: Integers | None = None,
    key_offsets: Integers | None = None,
    query_start: Integers | None = None,
    layout: Layout = "bhnd",
    scale: float | None = None,
    out: Array | None = None,
) -> Array:
    """Attention with relative positions.

        s_ij  = scale * ( q_i . k_j + q_i . key_table[r(i,j)] )
        p_ij  = softmax over the keys j that query i may see
        out_i = sum_j p_ij ( v_j + value_table[r'(i,j)] )

    q: float32 (B, H, N, D).
    k: float32 (B, H, M, D).
    v: float32 (B, H, M, Dv).
    position: `Shaw(...)` with the tables, which says what r(i,j) is. None: no relation terms.
    causal: bool. Query i sees the keys j <= i + start.
    lengths: int (B,). Rows in use of padded arrays; `lengths` alone serves queries and keys.
        Rows beyond a length are not read; they give zeros.
    key_lengths: int (B,). The same for the keys alone.
    offsets: int (B + 1,). The arrays are packed: q is (tokens, H, D), k and v likewise, and
        sequence b owns the rows offsets[b] to offsets[b + 1] - 1. `offsets` alone serves
        queries and keys.
    key_offsets: int (B + 1,). The same for the keys alone.
    query_start: int or int (B,). Absolute position of query 0, key 0 standing at 0.
        None: keys - queries of the sequence, so that the last query meets the last key.
    layout: "bhnd", or "bnhd" for padded arrays (B, N, H, D). Strided views of either will do,
        as long as the last axis is contiguous.
    scale: float. None: 1 / sqrt(D).
    out: float32, to be written and returned. None: a new array.

    Returns float32 (B, H, N, Dv), in the layout of q. A query that may see no key gives zeros.

    Band and causal mask, N = 3, M = 5, start = 2 (the default), left = 2, right = 1. A number is
    the row of the relation table, x a key that a causal query does not see:

               not causal            causal
        j =    0  1  2  3  4         0  1  2  3  4
        i = 0  0  1  2  3  3         0  1  2  x  x
        i = 1  0  0  1  2  3         0  0  1  2  x
        i = 2  0  0  0  1  2         0  0  0  1  2
    """
    scheme = one_scheme(position)
    call = _call(
        q, scheme, causal, lengths, key_lengths, offsets, key_offsets, query_start, layout, scale
    )
    if out is not None:
        _check_apart(out, q, k, v, scheme)
    return _core.attention_forward(q, k, v, out, False, call)[0]


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    position: Position = None,
    causal: bool = False,
    lengths: Integers | None = None,
    key_lengths: Integers | None = None,
    offsets: Integers | None = None,
    key_offsets: Integers | None = None,
    query_start: Integers | None = None,
    layout: Layout = "bhnd",
    scale: float | None = None,
    out: Array | None = None,
) -> tuple[Array, AttentionContext]:
    """`attention`, and with it what `attention_backward` needs.

    Takes the arguments of `attention` and returns (out, ctx). ctx keeps q, k, v, out and the
    tables alive and one number per query and head of its own; nothing of size N x M.
    """
    scheme = one_scheme(position)
    call = _call(
        q, scheme, causal, lengths, key_lengths, offsets, key_offsets, query_start, layout, scale
    )
    if out is not None:
        _check_apart(out, q, k, v, scheme)
    out, lse = _core.attention_forward(q, k, v, out, True, call)
    assert lse is not None
    return out, AttentionContext(q, k, v, out, lse, scheme, call)


def attention_backward(ctx: AttentionContext, dout: Array) -> Gradients:
    """The gradients of sum(out * dout) by q, k, v and the tables.

        dP_ij = dout_i . ( v_j + value_table[r'(i,j)] )
        dS_ij = p_ij ( dP_ij - dout_i . out_i )
        dq_i  = scale * sum_j dS_ij ( k_j + key_table[r(i,j)] )
        dk_j  = scale * sum_i dS_ij q_i
        dv_j  = sum_i p_ij dout_i
        dkey_table[t]   = scale * sum of dS_ij q_i over r(i,j) = t
        dvalue_table[t] = sum of p_ij dout_i over r'(i,j) = t

    ctx: from `attention_forward`. It may be used more than once.
    dout: float32, the shape of out.

    Returns `Gradients`, each in the shape of what it belongs to. Tables shared by all heads, and
    tied tables, get the sum over their uses.
    """
    dkey_table = dvalue_table = None
    if ctx.position is not None:
        dkey_table = _zeros_like(ctx.position.key_table)
        dvalue_table = dkey_table if ctx.position.tied else _zeros_like(ctx.position.value_table)
    dq, dk, dv = _core.attention_backward(
        ctx.q, ctx.k, ctx.v, ctx.out, ctx.lse, dout, dkey_table, dvalue_table, ctx.call
    )
    if dvalue_table is dkey_table:
        dvalue_table = None
    return Gradients(dq, dk, dv, dkey_table, dvalue_table)


def _call(
    q: Array,
    scheme: Shaw | None,
    causal: bool,
    lengths: Integers | None,
    key_lengths: Integers | None,
    offsets: Integers | None,
    key_offsets: Integers | None,
    query_start: Integers | None,
    layout: Layout,
    scale: float | None,
) -> _core.Call:
    """The arguments that forward and backward share, as the core takes them."""
    if scale is None:
        scale = 0.0
    elif scale == 0 or not math.isfinite(scale):
        raise ValueError(
            f"scale: expected a finite number other than 0, got {scale}; leave it out for 1 / sqrt(D)"
        )
    packed = _integers("offsets", offsets)
    start = _integers("query_start", query_start)
    if start is not None and start.ndim == 0:
        start = np.full(np.shape(q)[:1] if packed is None else (max(packed.size - 1, 0),), start)
    key = value = None
    if scheme is not None:
        key = _relation(scheme.key_table, scheme.key_band, scheme)
        value = _relation(scheme.value_table, scheme.value_band, scheme)
    return (
        layout,
        bool(causal),
        float(scale),
        _integers("lengths", lengths),
        _integers("key_lengths", key_lengths),
        packed,
        _integers("key_offsets", key_offsets),
        start,
        key,
        value,
    )


def _relation(table: Array | None, band: Band | None, scheme: Shaw) -> _core.Relation | None:
    if table is None or band is None:
        return None
    beyond = _core.BEYOND_NONE if scheme.beyond == "none" else _core.BEYOND_CLIP
    return table, *band, beyond


def _integers(name: str, values: Integers | None) -> npt.NDArray[np.int64] | None:
    """An int64 array of its own, so that a context does not change with the caller's list."""
    if values is None:
        return None
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size > 0:
        raise TypeError(f"{name}: expected integers, got {array.dtype} {array.shape}")
    return array.astype(np.int64, order="C")


def _check_apart(out: Array, q: Array, k: Array, v: Array, scheme: Shaw | None) -> None:
    """Refuses an `out` that overlaps an input: rows are written while others are still read."""
    inputs = {"q": q, "k": k, "v": v}
    if scheme is not None:
        inputs |= {
            name: table
            for name, table in (
                ("key_table", scheme.key_table),
                ("value_table", scheme.value_table),
            )
            if table is not None
        }
    for name, array in inputs.items():
        try:
            shared = np.shares_memory(out, array, max_work=10_000)
        except RuntimeError:  # TooHardError: the strides are too intricate to tell
            shared = True
        if shared:
            raise ValueError(f"out: shares memory with {name}; give an array of its own")


def _zeros_like(table: Array | None) -> Array | None:
    """Zeros that lie in memory as the table does: the core adds gradients at equal strides."""
    if table is None:
        return None
    zeros = np.zeros_like(table, subok=False)
    if zeros.strides != table.strides:
        reach = sum((n - 1) * s for n, s in zip(table.shape, table.strides, strict=True))
        flat = np.zeros(reach // table.itemsize + 1 if table.size else 0, np.float32)
        zeros = np.lib.stride_tricks.as_strided(flat, table.shape, table.strides)
    return zeros
