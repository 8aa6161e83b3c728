# SPDX-License-Identifier: Apache-2.0
"""Every operation of the core in plain NumPy: documentation, and oracle of the tests.

One head of one sequence, query i at absolute position i + start, keys from 0 (DESIGN.md 2, the
terms built so far):

    d(i,j) = j - (i + start)
    r(i,j) = clip(d, -left, right) + left            row of the relation table, T = left + 1 + right
    s_ij   = scale * (q_i . k_j + q_i . wK[r(i,j)])                                             (1)
    p_ij   = exp(s_ij - lse_i) over the visible keys,  lse_i = log sum_j exp(s_ij)              (2)
    z_i    = sum_j p_ij v_j + sum_t P_i[t] wV[t],      P_i[t] = sum of p_ij where r'(i,j) = t   (3)

and for the gradient dz of the results

    dP_ij  = dz_i . v_j + dz_i . wV[r'(i,j)],          dS_ij = p_ij (dP_ij - dz_i . z_i)        (4)
    dA_i[t] = scale * sum of dS_ij where r(i,j) = t                                             (5)
    dq = scale dS k + dA wK       dk = scale dS^T q       dwK = dA^T q                          (6)
    dv = p^T dz                   dwV = P^T dz                                                  (7)

Example of r: three queries, five keys, start = 2 (the default: keys - queries), left 2, right 1:

    i = 0   0 1 2 3 3
    i = 1   0 0 1 2 3
    i = 2   0 0 0 1 2

Here n x m matrices are formed freely; the core never forms one. Nothing in this file is fast, and
nothing in it shares code with the core. `dtype` runs the same formulas in float32: the error of
that "plain formula" is what the core's error is measured against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Beyond = Literal["clip", "none"]
Layout = Literal["bhnd", "bnhd"]


class Band(NamedTuple):
    """A relation map: distances from -left to right have a row each."""

    left: int
    right: int
    beyond: Beyond = "clip"

    @property
    def rows(self) -> int:
        return self.left + 1 + self.right


# --------------------------------------------------------------------------------------------------
# Maps and masks
# --------------------------------------------------------------------------------------------------


def relation_index(
    N: int, M: int, start: int, left: int, right: int, beyond: Beyond = "clip"
) -> npt.NDArray[np.int64]:
    """r(i,j) = clip(j - (i + start), -left, right) + left, int64 (N, M).

    With beyond="none" a pair outside the band has no relation: -1.
    """
    distance = np.arange(M)[None, :] - (np.arange(N)[:, None] + start)
    index = np.clip(distance, -left, right) + left
    if beyond == "none":
        index[(distance < -left) | (distance > right)] = -1
    return index


def visible_keys(N: int, M: int, start: int, causal: bool) -> npt.NDArray[np.bool_]:
    """Which key each query may see, bool (N, M): all, or those with j <= i + start.

    Three queries, five keys, start 2: the last query meets the last key ("bottom-right").

        1 1 1 0 0
        1 1 1 1 0
        1 1 1 1 1
    """
    if not causal:
        return np.ones((N, M), bool)
    return np.arange(M)[None, :] <= np.arange(N)[:, None] + start


def take_relation(rows: Array, index: npt.NDArray[np.int64]) -> Array:
    """x_ij = rows[i, index_ij], and 0 where the index is -1: (N, T), (N, M) -> (N, M)."""
    padded = np.concatenate([rows, np.zeros_like(rows[:, :1])], axis=1)  # column -1 is zero
    return np.take_along_axis(padded, index, axis=1)


def sum_relation(x: Array, index: npt.NDArray[np.int64], T: int) -> Array:
    """y_i[t] = sum of x_ij where index_ij = t: (N, M) -> (N, T). take_relation's adjoint."""
    sums = np.zeros((x.shape[0], T + 1), x.dtype)  # column T collects the pairs without relation
    cells = np.arange(x.shape[0])[:, None] * (T + 1) + index % (T + 1)
    np.add.at(sums.reshape(-1), cells.reshape(-1), x.reshape(-1))
    return sums[:, :T]


# --------------------------------------------------------------------------------------------------
# One head of one sequence
# --------------------------------------------------------------------------------------------------


def attention_scores(
    q: Array,
    k: Array,
    *,
    scale: float,
    visible: npt.NDArray[np.bool_],
    key_table: Array | None = None,
    key_index: npt.NDArray[np.int64] | None = None,
) -> tuple[Array, Array]:
    """s (N, M), -inf where not visible, and lse (N), -inf where a query sees none: (1) and (2)."""
    s = q @ k.T
    if key_table is not None and key_index is not None:
        s = s + take_relation(q @ key_table.T, key_index)
    s = np.where(visible, s * q.dtype.type(scale), -np.inf)  # (1)
    highest = _finite(np.max(s, axis=1, initial=-np.inf))
    with np.errstate(divide="ignore"):
        lse = highest + np.log(np.exp(s - highest[:, None]).sum(axis=1))  # (2)
    return s, lse


def attention_probabilities(s: Array, lse: Array) -> Array:
    """p_ij = exp(s_ij - lse_i) (2). A query that sees no key: zeros."""
    result: Array = np.exp(s - _finite(lse)[:, None])
    return result


def _finite(x: Array) -> Array:
    """0 in the place of -inf, where s - x would be -inf + inf."""
    return np.where(np.isneginf(x), x.dtype.type(0), x)


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    key_table: Array | None = None,
    key_index: npt.NDArray[np.int64] | None = None,
    value_table: Array | None = None,
    value_index: npt.NDArray[np.int64] | None = None,
    visible: npt.NDArray[np.bool_] | None = None,
    scale: float | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> tuple[Array, Array]:
    """z (N, Dv) and lse (N), equations (1) to (3).

    q: (N, D); k: (M, D); v: (M, Dv); key_table: (T, D); value_table: (T', Dv); key_index and
    value_index: (N, M) from relation_index; visible: (N, M), default all; scale: default 1/sqrt(D).
    """
    q, k, v, key_table, value_table = _cast(dtype, q, k, v, key_table, value_table)
    visible = np.ones((len(q), len(k)), bool) if visible is None else visible
    scale = default_scale(q.shape[-1]) if scale is None else scale
    s, lse = attention_scores(
        q, k, scale=scale, visible=visible, key_table=key_table, key_index=key_index
    )
    p = attention_probabilities(s, lse)
    z = p @ v
    if value_table is not None and value_index is not None:
        z = z + sum_relation(p, value_index, len(value_table)) @ value_table  # (3)
    return z, lse


def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    *,
    key_table: Array | None = None,
    key_index: npt.NDArray[np.int64] | None = None,
    value_table: Array | None = None,
    value_index: npt.NDArray[np.int64] | None = None,
    visible: npt.NDArray[np.bool_] | None = None,
    scale: float | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> dict[str, Array]:
    """Gradients of sum(z * dout), (4) to (7): "q", "k", "v", "key_table", "value_table"."""
    q, k, v, key_table, value_table, dout = _cast(dtype, q, k, v, key_table, value_table, dout)
    visible = np.ones((len(q), len(k)), bool) if visible is None else visible
    scale = default_scale(q.shape[-1]) if scale is None else scale
    s, lse = attention_scores(
        q, k, scale=scale, visible=visible, key_table=key_table, key_index=key_index
    )
    p = attention_probabilities(s, lse)
    gradients: dict[str, Array] = {"v": p.T @ dout}  # (7)
    z = p @ v
    dp = dout @ v.T
    if value_table is not None and value_index is not None:
        P = sum_relation(p, value_index, len(value_table))
        z = z + P @ value_table
        dp = dp + take_relation(dout @ value_table.T, value_index)
        gradients["value_table"] = P.T @ dout  # (7)
    ds = p * (dp - np.sum(dout * z, axis=1)[:, None])  # (4)
    ds = ds * q.dtype.type(scale)
    gradients["q"] = ds @ k
    gradients["k"] = ds.T @ q
    if key_table is not None and key_index is not None:
        dA = sum_relation(ds, key_index, len(key_table))  # (5)
        gradients["q"] = gradients["q"] + dA @ key_table
        gradients["key_table"] = dA.T @ q  # (6)
    return gradients


def default_scale(D: int) -> float:
    """1/sqrt(D), for the content and the relation alike."""
    return 1.0 / float(np.sqrt(max(D, 1)))


def _cast(dtype: npt.DTypeLike, *arrays: Array | None) -> tuple[Any, ...]:
    return tuple(None if x is None else np.asarray(x, dtype) for x in arrays)


# --------------------------------------------------------------------------------------------------
# Batches: heads, lengths, packed sequences
# --------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """One sequence: its rows in the query and in the key arrays, and where query 0 stands."""

    batch: int
    query_row: int
    queries: int
    key_row: int
    keys: int
    start: int


def spans(
    B: int,
    N: int,
    M: int,
    *,
    lengths: Sequence[int] | None = None,
    key_lengths: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    key_offsets: Sequence[int] | None = None,
    query_start: Sequence[int] | None = None,
) -> list[Span]:
    """The sequences of a batch. lengths, or offsets, alone serve queries and keys.

    start defaults to keys - queries, counted in lengths: the last query meets the last key.
    """
    if key_lengths is None and key_offsets is None:
        key_lengths, key_offsets = lengths, offsets
    result = []
    for b in range(B):
        query_row, queries = _side(b, N, lengths, offsets)
        key_row, keys = _side(b, M, key_lengths, key_offsets)
        start = keys - queries if query_start is None else int(query_start[b])
        result.append(Span(b, query_row, queries, key_row, keys, start))
    return result


def _side(
    b: int, rows: int, lengths: Sequence[int] | None, offsets: Sequence[int] | None
) -> tuple[int, int]:
    if offsets is not None:
        return int(offsets[b]), int(offsets[b + 1]) - int(offsets[b])
    return 0, rows if lengths is None else int(lengths[b])


class Batch(NamedTuple):
    """What stays the same between forward and backward of a batched call.

    Padded arrays are (B, H, rows, width) or, with layout "bnhd", (B, rows, H, width); a side with
    offsets is packed: (tokens, H, width). Tables are (T, width), or (H, T, width) per head.
    """

    spans: list[Span]
    key_band: Band | None = None
    value_band: Band | None = None
    causal: bool = False
    scale: float | None = None
    layout: Layout = "bhnd"
    dtype: npt.DTypeLike = np.float64


def head_rows(x: Array, layout: str, batch: int, head: int, row: int, rows: int) -> Array:
    """The view (rows, width) of one head of one sequence."""
    if x.ndim == 3:  # packed
        return x[row : row + rows, head]
    if layout == "bnhd":
        return x[batch, row : row + rows, head]
    return x[batch, head, row : row + rows]


def head_count(x: Array, layout: str) -> int:
    return int(x.shape[1] if x.ndim == 3 or layout == "bhnd" else x.shape[2])


def row_numbers_shape(x: Array, layout: str) -> tuple[int, ...]:
    """Shape of one number per query: (B, H, N), packed (H, tokens)."""
    if x.ndim == 3:
        return (x.shape[1], x.shape[0])
    return x.shape[:3] if layout == "bhnd" else (x.shape[0], x.shape[2], x.shape[1])


def head_arguments(
    batch: Batch, span: Span, head: int, key_table: Array | None, value_table: Array | None
) -> dict[str, Any]:
    """The keyword arguments of attention_forward and _backward for one head of one sequence."""
    n, m, start = span.queries, span.keys, span.start
    result: dict[str, Any] = {
        "visible": visible_keys(n, m, start, batch.causal),
        "scale": batch.scale,
        "dtype": batch.dtype,
    }
    for name, table, band in (
        ("key", key_table, batch.key_band),
        ("value", value_table, batch.value_band),
    ):
        if table is not None and band is not None:
            result[f"{name}_table"] = table if table.ndim == 2 else table[head]
            result[f"{name}_index"] = relation_index(n, m, start, *band)
    return result


def batched_forward(
    batch: Batch,
    q: Array,
    k: Array,
    v: Array,
    key_table: Array | None = None,
    value_table: Array | None = None,
) -> tuple[Array, Array]:
    """out, shaped as q but for the width, and lse. Rows beyond a length: 0 and -inf."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]), batch.dtype)
    lse = np.full(row_numbers_shape(q, batch.layout), -np.inf, batch.dtype)
    for span in batch.spans:
        for h in range(head_count(q, batch.layout)):
            query = (batch.layout, span.batch, h, span.query_row, span.queries)
            key = (batch.layout, span.batch, h, span.key_row, span.keys)
            z, row_lse = attention_forward(
                head_rows(q, *query),
                head_rows(k, *key),
                head_rows(v, *key),
                **head_arguments(batch, span, h, key_table, value_table),
            )
            head_rows(out, *query)[...] = z
            lse_row = lse[h] if q.ndim == 3 else lse[span.batch, h]
            lse_row[span.query_row : span.query_row + span.queries] = row_lse
    return out, lse


def batched_backward(
    batch: Batch,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    key_table: Array | None = None,
    value_table: Array | None = None,
) -> dict[str, Array]:
    """Gradients by name; a table's are summed over the batch and over the heads that share it."""
    gradients = {name: np.zeros(x.shape, batch.dtype) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, table, band in (
        ("key_table", key_table, batch.key_band),
        ("value_table", value_table, batch.value_band),
    ):
        if table is not None and band is not None:
            gradients[name] = np.zeros(table.shape, batch.dtype)
    for span in batch.spans:
        for h in range(head_count(q, batch.layout)):
            query = (batch.layout, span.batch, h, span.query_row, span.queries)
            key = (batch.layout, span.batch, h, span.key_row, span.keys)
            head = attention_backward(
                head_rows(q, *query),
                head_rows(k, *key),
                head_rows(v, *key),
                head_rows(dout, *query),
                **head_arguments(batch, span, h, key_table, value_table),
            )
            head_rows(gradients["q"], *query)[...] = head["q"]
            head_rows(gradients["k"], *key)[...] = head["k"]
            head_rows(gradients["v"], *key)[...] = head["v"]
            for name in ("key_table", "value_table"):
                if name in head:
                    total = gradients[name]
                    (total if total.ndim == 2 else total[h])[...] += head[name]
    return gradients


# --------------------------------------------------------------------------------------------------
# Matrix products and random numbers
# --------------------------------------------------------------------------------------------------


def gemm(
    a: Array,
    b: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Array | None = None,
    c: Array | None = None,
    dtype: npt.DTypeLike = np.float64,
) -> Array:
    """op(a) . op(b), plus bias (columns) on every row, plus c where accumulating."""
    a, b, bias, c = _cast(dtype, a, b, bias, c)
    result: Array = (a.T if transpose_a else a) @ (b.T if transpose_b else b)
    if bias is not None:
        result = result + bias
    return result if c is None else result + c


def philox4x32(counter: Array, key: Array, rounds: int = 7) -> npt.NDArray[np.uint32]:
    """Philox4x32 (Salmon et al. 2011): counter (..., 4), key (..., 2), uint32 -> uint32 (..., 4).

    One round, with (hi, lo) the halves of a 64-bit product:

        x0, x1, x2, x3  <-  hi(M1 x2) ^ x1 ^ k0,  lo(M1 x2),  hi(M0 x0) ^ x3 ^ k1,  lo(M0 x0)
        k0, k1          <-  k0 + W0,  k1 + W1
    """
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    x0, x1, x2, x3 = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    k0, k1 = np.moveaxis(np.asarray(key, np.uint64), -1, 0)
    for _ in range(rounds):
        product0 = np.uint64(0xD2511F53) * x0
        product1 = np.uint64(0xCD9E8D57) * x2
        x0, x1, x2, x3 = (
            (product1 >> half) ^ x1 ^ k0,
            product1 & low,
            (product0 >> half) ^ x3 ^ k1,
            product0 & low,
        )
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack([x0, x1, x2, x3], axis=-1).astype(np.uint32)
