# SPDX-License-Identifier: Apache-2.0
"""Attention with every term and map in plain NumPy, and what it is made of.

One head of one sequence, query i at absolute position i + start, keys from 0 (docs/math.md). A term
has a table w of T rows and an index t(i,j): a row of the table, or none. Any number of each kind,
added up; u is the position bias:

    s_ij  = scale * (q_i . k_j + (q_i + u) . wK[a(i,j)] + k_j . wQ[b(i,j)]) + c[t(i,j)]         (1)
    s_ij <- cap * tanh(s_ij / cap)                                    where there is a softcap  (2)
    p_ij  = exp(s_ij - lse_i) over the visible keys,  lse_i = log sum_j exp(s_ij)               (3)
    p~_ij = keep_ij p_ij,                              keep_ij: 0, or 1 / the share kept        (4)
    z_i   = sum_j p~_ij v_j + sum_r P_i[r] wV[r],      P_i[r] = sum of p~_ij where v(i,j) = r   (5)

and for the gradient dz of the results

    dP_ij = keep_ij (dz_i . v_j + dz_i . wV[v(i,j)]),  dS_ij = p_ij (dP_ij - dz_i . z_i)        (6)
    ds_ij = dS_ij (1 - (s_ij / cap)^2)                 with the s of (2)                        (7)
    dA_i[r] = scale * sum of ds_ij where a(i,j) = r    dB_j[r] = scale * sum_i where b(i,j) = r (8)
    dq = scale ds k + dA wK       dwK = dA^T (q + u)   du = sum_i dA_i wK                       (9)
    dk = scale ds^T q + dB wQ     dwQ = dB^T k         dc[r] = sum of ds_ij where t(i,j) = r   (10)
    dv = p~^T dz                  dwV = P^T dz                                                 (11)

The index of a band is r(i,j) = clip(j - (i + start), -left, right) + left. Three queries, five
keys, start = 2 (the default: keys - queries), left 2, right 1:

    i = 0   0 1 2 3 3
    i = 1   0 0 1 2 3
    i = 2   0 0 0 1 2

Here n x m matrices are formed freely; the core never forms one. Nothing in this file is fast, and
nothing in it shares code with the core. `dtype` runs the same formulas in float32: the error of
that "plain formula" is what the core's error is measured against.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Beyond = Literal["clip", "none"]
Kind = Literal["key", "query", "bias", "value"]
Layout = Literal["bhnd", "bnhd"]
Pairing = Literal["interleaved", "half"]
Window = tuple[int, int]

KINDS: tuple[Kind, ...] = ("key", "query", "bias", "value")


class Term(NamedTuple):
    """One relation term of one head: what meets its table, the table, and a row of it for each pair.

    kind: "key" (a query meets the table: A), "query" (a key does: B), "bias" (c) or "value".
    table: (T, width), width D, D, 1 and Dv.
    rows: int64 (N, M), -1: no relation; or (L, N, M), where the relations of a pair add up.
    """

    kind: Kind
    table: Array
    rows: Index


def term_names(kinds: Iterable[Kind]) -> list[str]:
    """What the gradients of terms are called: "key[0]", "key[1]", "value[0]", as in relpos.h."""
    counts = dict.fromkeys(KINDS, 0)
    names = []
    for kind in kinds:
        names.append(f"{kind}[{counts[kind]}]")
        counts[kind] += 1
    return names


# --------------------------------------------------------------------------------------------------
# Maps
# --------------------------------------------------------------------------------------------------


def distances(N: int, M: int, start: int) -> Index:
    """d(i,j) = j - (i + start), int64 (N, M)."""
    return np.arange(M)[None, :] - (np.arange(N)[:, None] + start)


def band_index(
    distance: Index, left: int, right: int, beyond: Beyond = "clip", buckets: Array | None = None
) -> Index:
    """r = clip(d, -left, right) + left, or buckets[r]; int64, of distance's shape.

    With beyond="none" a pair outside the band has no relation: -1. buckets: a row of the table for
    each of the left + 1 + right distances, or -1.
    """
    index = np.clip(distance, -left, right) + left
    if buckets is not None:
        index = np.asarray(buckets, np.int64)[index]
    if beyond == "none":
        index[(distance < -left) | (distance > right)] = -1
    return index


def relation_index(
    N: int, M: int, start: int, left: int, right: int, beyond: Beyond = "clip"
) -> Index:
    """The band's r(i,j) = clip(j - (i + start), -left, right) + left, int64 (N, M)."""
    return band_index(distances(N, M, start), left, right, beyond)


def edge_index(N: int, M: int, starts: Array, keys: Array, labels: Array) -> Index:
    """The labels of a list of edges, int64 (L, N, M); L: the most edges that one pair has.

    The edges of query i are keys[e], labels[e] for e from starts[i] to starts[i + 1] - 1.
    """
    count = np.zeros((N, M), np.int64)
    layers: list[Index] = []
    for i in range(N):
        for e in range(int(starts[i]), int(starts[i + 1])):
            j = int(keys[e])
            if count[i, j] == len(layers):
                layers.append(np.full((N, M), -1, np.int64))
            layers[count[i, j]][i, j] = labels[e]
            count[i, j] += 1
    return np.stack(layers) if layers else np.empty((0, N, M), np.int64)


def take_relation(rows: Array, index: Index) -> Array:
    """x_ij = rows[i, index_ij], and 0 where the index is -1: (N, T), (N, M) -> (N, M).

    An index (L, N, M) stands for the sum of its L layers.
    """
    nothing = np.zeros((len(rows), 1), rows.dtype)
    padded = np.concatenate([rows, nothing], axis=1)  # column -1 is zero
    result = np.zeros(index.shape[-2:], rows.dtype)
    for layer in _layers(index):
        result = result + np.take_along_axis(padded, layer, axis=1)
    return result


def sum_relation(x: Array, index: Index, T: int) -> Array:
    """y_i[t] = sum of x_ij where index_ij = t: (N, M) -> (N, T). take_relation's adjoint."""
    sums = np.zeros((len(x), T + 1), x.dtype)  # column T collects the pairs without relation
    for layer in _layers(index):
        cells = np.arange(len(x))[:, None] * (T + 1) + layer % (T + 1)
        np.add.at(sums.reshape(-1), cells.reshape(-1), x.reshape(-1))
    return sums[:, :T]


def _layers(index: Index) -> Index:
    return index[None] if index.ndim == 2 else index


def _transposed(index: Index) -> Index:
    return index.swapaxes(-1, -2)


# --------------------------------------------------------------------------------------------------
# Masks, dropout
# --------------------------------------------------------------------------------------------------


def visible_keys(
    N: int,
    M: int,
    start: int,
    causal: bool = False,
    window: Window = (-1, -1),
    mask: Array | None = None,
) -> Bool:
    """Which key each query may see, bool (N, M): all, or those that every rule given admits.

    causal: j <= i + start. window (left, right): -left <= j - (i + start) <= right, -1 for no bound.
    mask: (N, M), 0 hides. Causal, three queries, five keys, start 2 ("bottom-right"); and the same
    with window (1, -1):

        1 1 1 0 0        0 1 1 0 0
        1 1 1 1 0        0 0 1 1 0
        1 1 1 1 1        0 0 0 1 1
    """
    distance = distances(N, M, start)
    left, right = window
    visible = np.ones((N, M), bool) if mask is None else np.asarray(mask) != 0
    if causal:
        visible = visible & (distance <= 0)
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    return visible


class Dropout(NamedTuple):
    """Which probabilities are dropped: a function of these, the sequence, the head, i and j."""

    rate: float
    key: tuple[int, int]
    site: int = 0
    first: int = 0  # ordinal of the batch's sequence 0

    @property
    def threshold(self) -> int:
        """Of 256 byte values, those below this one drop their probability: at most 255 of them."""
        return min(math.floor(256 * self.rate + 0.5), 255)


def dropout_factors(dropout: Dropout, batch: int, head: int, N: int, M: int) -> Array:
    """keep_ij: 0 where p_ij is dropped, else 256 / (256 - threshold); float64 (N, M).

    One block of Philox for sixteen columns of a row, one byte for each, the lowest of word 0 first:

        counter = (j // 16, i, dropout.first + batch, dropout.site + head)
    """
    counter = np.empty((N, -(-M // 16), 4), np.int64)
    counter[..., 0] = np.arange(counter.shape[1])
    counter[..., 1] = np.arange(N)[:, None]
    counter[..., 2] = (dropout.first + batch) % 2**32
    counter[..., 3] = (dropout.site + head) % 2**32
    words = philox4x32(counter, np.array(dropout.key))[..., None]  # (N, blocks, 4, 1)
    drawn = (words >> np.array([0, 8, 16, 24], np.uint32)) & np.uint32(255)
    drawn = drawn.reshape(N, 16 * counter.shape[1])[:, :M]
    return np.where(drawn >= dropout.threshold, 256 / (256 - dropout.threshold), 0.0)


# --------------------------------------------------------------------------------------------------
# One head of one sequence
# --------------------------------------------------------------------------------------------------


def attention_scores(
    q: Array,
    k: Array,
    terms: Sequence[Term] = (),
    *,
    scale: float,
    visible: Bool,
    position_bias: Array | None = None,
    softcap: float = 0.0,
) -> tuple[Array, Array]:
    """s (N, M), -inf where not visible, and lse (N), -inf where a query sees none: (1) to (3)."""
    real = q.dtype.type
    s = q @ k.T
    for kind, table, index in terms:
        if kind == "key":
            s = s + take_relation(_biased(q, position_bias) @ table.T, index)
        elif kind == "query":
            s = s + take_relation(k @ table.T, _transposed(index)).T
    s = s * real(scale)
    for kind, table, index in terms:
        if kind == "bias":
            s = s + take_relation(np.broadcast_to(table[:, 0], (len(q), len(table))), index)  # (1)
    if softcap:
        s = real(softcap) * np.tanh(s / real(softcap))  # (2)
    s = np.where(visible, s, real(-np.inf))
    highest = _finite(np.max(s, axis=1, initial=-np.inf))
    with np.errstate(divide="ignore"):
        lse = highest + np.log(np.exp(s - highest[:, None]).sum(axis=1))  # (3)
    return s, lse


def attention_probabilities(s: Array, lse: Array) -> Array:
    """p_ij = exp(s_ij - lse_i) (3). A query that sees no key: zeros.

    Divided by their sum, which is 1 but for the rounding of lse: of scores of 1e9 in float32 lse is
    the highest, and they would come to 1 each.
    """
    p: Array = np.exp(s - _finite(lse)[:, None])
    total = p.sum(axis=1, keepdims=True)
    p /= np.where(total > 0, total, 1)
    return p


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    terms: Sequence[Term] = (),
    *,
    position_bias: Array | None = None,
    visible: Bool | None = None,
    keep: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dtype: npt.DTypeLike = np.float64,
) -> tuple[Array, Array]:
    """z (N, Dv) and lse (N), equations (1) to (5).

    q: (N, D); k: (M, D); v: (M, Dv); position_bias: (D,); visible: bool (N, M), default all; keep:
    (N, M), the factors of dropout, default 1; scale: default 1/sqrt(D).
    """
    q, k, v, position_bias, keep = _cast(dtype, q, k, v, position_bias, keep)
    terms = _cast_terms(dtype, terms)
    visible = np.ones((len(q), len(k)), bool) if visible is None else visible
    scale = default_scale(q.shape[-1]) if scale is None else scale
    s, lse = attention_scores(
        q, k, terms, scale=scale, visible=visible, position_bias=position_bias, softcap=softcap
    )
    p = attention_probabilities(s, lse)
    p = p if keep is None else keep * p  # (4)
    z = p @ v
    for kind, table, index in terms:
        if kind == "value":
            z = z + sum_relation(p, index, len(table)) @ table  # (5)
    return z, lse


def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    terms: Sequence[Term] = (),
    *,
    position_bias: Array | None = None,
    visible: Bool | None = None,
    keep: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dtype: npt.DTypeLike = np.float64,
) -> dict[str, Array]:
    """Gradients of sum(z * dout), (6) to (11): "q", "k", "v", term_names, "position_bias"."""
    q, k, v, dout, position_bias, keep = _cast(dtype, q, k, v, dout, position_bias, keep)
    terms = _cast_terms(dtype, terms)
    visible = np.ones((len(q), len(k)), bool) if visible is None else visible
    scale = default_scale(q.shape[-1]) if scale is None else scale
    s, lse = attention_scores(
        q, k, terms, scale=scale, visible=visible, position_bias=position_bias, softcap=softcap
    )
    p = attention_probabilities(s, lse)
    dropped = p if keep is None else keep * p  # (4)
    gradients: dict[str, Array] = {"v": dropped.T @ dout}  # (11)
    names = term_names(term.kind for term in terms)
    z = dropped @ v
    dp = dout @ v.T
    for name, (kind, table, index) in zip(names, terms, strict=True):
        if kind == "value":
            P = sum_relation(dropped, index, len(table))
            z = z + P @ table
            dp = dp + take_relation(dout @ table.T, index)
            gradients[name] = P.T @ dout  # (11)
    dp = dp if keep is None else keep * dp
    ds = p * (dp - np.sum(dout * z, axis=1)[:, None])  # (6)
    if softcap:
        slope = 1 - np.square(s / q.dtype.type(softcap))
        ds = ds * np.where(visible, slope, q.dtype.type(0))  # (7)
    scaled = ds * q.dtype.type(scale)
    dq, dk, du = scaled @ k, scaled.T @ q, np.zeros(q.shape[1:], q.dtype)
    for name, (kind, table, index) in zip(names, terms, strict=True):
        T = len(table)
        if kind == "key":
            dA = sum_relation(scaled, index, T)  # (8)
            dq = dq + dA @ table
            du = du + (dA @ table).sum(axis=0)
            gradients[name] = dA.T @ _biased(q, position_bias)  # (9)
        elif kind == "query":
            dB = sum_relation(scaled.T, _transposed(index), T)  # (8)
            dk = dk + dB @ table
            gradients[name] = dB.T @ k  # (10)
        elif kind == "bias":
            gradients[name] = sum_relation(ds, index, T).sum(axis=0)[:, None]  # (10)
    gradients["q"], gradients["k"] = dq, dk
    if position_bias is not None:
        gradients["position_bias"] = du
    return gradients


def default_scale(D: int) -> float:
    """1/sqrt(D), for the content and the relation alike."""
    return 1.0 / float(np.sqrt(max(D, 1)))


def _biased(q: Array, position_bias: Array | None) -> Array:
    return q if position_bias is None else q + position_bias


def _finite(x: Array) -> Array:
    """0 in the place of -inf, where s - x would be -inf + inf."""
    return np.where(np.isneginf(x), x.dtype.type(0), x)


def _cast(dtype: npt.DTypeLike, *arrays: Array | None) -> tuple[Any, ...]:
    return tuple(None if x is None else np.asarray(x, dtype) for x in arrays)


def _cast_terms(dtype: npt.DTypeLike, terms: Sequence[Term]) -> list[Term]:
    return [term._replace(table=np.asarray(term.table, dtype)) for term in terms]


# --------------------------------------------------------------------------------------------------
# Batches: heads, lengths, packed sequences
# --------------------------------------------------------------------------------------------------


class Band(NamedTuple):
    """A map of distances: -left to right have an entry each, as band_index says.

    Where positions are given, integers (rows) or (B, rows), the distance is key_positions[j] -
    query_positions[i]. Those of packed rows are (tokens).
    """

    left: int
    right: int
    beyond: Beyond = "clip"
    buckets: Array | None = None
    query_positions: Array | None = None
    key_positions: Array | None = None

    @property
    def rows(self) -> int:
        """T of a table without buckets."""
        return self.left + 1 + self.right


class Labels(NamedTuple):
    """A map of labels, -1: none. For each sequence (1: the same for all) and head (1) a matrix.

    matrices: (B, H, N, M), or a list of arrays (H, n, m) where the lengths differ.
    """

    matrices: Array | Sequence[Array]


class Edges(NamedTuple):
    """A map of labelled edges, as edge_index says; the queries are all rows of the query array.

    starts: (B * N + 1), or (tokens + 1) of a packed array. keys: counted within the sequence.
    """

    starts: Array
    keys: Array
    labels: Array


class Relation(NamedTuple):
    """A Term of all heads and sequences. table: (T, width), or (H, T, width) per head."""

    kind: Kind
    table: Array
    map: Band | Labels | Edges


class Span(NamedTuple):
    """One sequence: its rows in the query and in the key arrays, and where query 0 stands."""

    batch: int
    query_row: int
    queries: int
    key_row: int
    keys: int
    start: int
    number: int = 0  # of query 0 among all rows of the query array


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
        number = query_row if offsets is not None else b * N
        result.append(Span(b, query_row, queries, key_row, keys, start, number))
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
    offsets is packed: (tokens, H, width). Keys and values may have fewer heads, a divisor of H.
    position_bias: (H, D). mask: as Labels.matrices.
    """

    spans: list[Span]
    relations: Sequence[Relation] = ()
    position_bias: Array | None = None
    causal: bool = False
    window: Window = (-1, -1)
    mask: Array | Sequence[Array] | None = None
    scale: float | None = None
    softcap: float = 0.0
    dropout: Dropout | None = None
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


def head_matrix(matrices: Array | Sequence[Array], span: Span, head: int) -> Array:
    """The part (n, m) of a label matrix or mask that one head of one sequence sees."""
    heads = matrices[span.batch % len(matrices)]
    matrix: Array = heads[head % len(heads)]
    return matrix[: span.queries, : span.keys]


def head_index(map: Band | Labels | Edges, span: Span, head: int) -> Index:
    """The index of a Term from the map of a Relation."""
    n, m = span.queries, span.keys
    if isinstance(map, Labels):
        return np.asarray(head_matrix(map.matrices, span, head), np.int64)
    if isinstance(map, Edges):
        starts = map.starts[span.number : span.number + n + 1]
        return edge_index(n, m, starts, map.keys, map.labels)
    distance = distances(n, m, span.start)
    if map.query_positions is not None and map.key_positions is not None:
        ours = _positions(map.query_positions, span.batch, span.query_row, n)
        theirs = _positions(map.key_positions, span.batch, span.key_row, m)
        distance = theirs[None, :] - ours[:, None]
    return band_index(distance, map.left, map.right, map.beyond, map.buckets)


def _positions(positions: Array, batch: int, row: int, rows: int) -> Index:
    own = positions if positions.ndim == 1 else positions[batch]
    return np.asarray(own[row : row + rows], np.int64)


def head_terms(batch: Batch, span: Span, head: int) -> list[Term]:
    """The terms of one head of one sequence."""
    return [
        Term(kind, table if table.ndim == 2 else table[head], head_index(map, span, head))
        for kind, table, map in batch.relations
    ]


def head_arguments(batch: Batch, span: Span, head: int) -> dict[str, Any]:
    """The keyword arguments of attention_forward and _backward for one head of one sequence."""
    n, m, start = span.queries, span.keys, span.start
    mask = None if batch.mask is None else head_matrix(batch.mask, span, head)
    keep = None
    if batch.dropout is not None:
        keep = dropout_factors(batch.dropout, span.batch, head, n, m)
    return {
        "terms": head_terms(batch, span, head),
        "position_bias": None if batch.position_bias is None else batch.position_bias[head],
        "visible": visible_keys(n, m, start, batch.causal, batch.window, mask),
        "keep": keep,
        "scale": batch.scale,
        "softcap": batch.softcap,
        "dtype": batch.dtype,
    }


def batched_forward(batch: Batch, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """out, shaped as q but for the width, and lse. Rows beyond a length: 0 and -inf.

    Of fewer heads of k and v each serves as many heads of q, side by side.
    """
    sharers = head_count(q, batch.layout) // max(head_count(k, batch.layout), 1)
    out = np.zeros((*q.shape[:-1], v.shape[-1]), batch.dtype)
    lse = np.full(row_numbers_shape(q, batch.layout), -np.inf, batch.dtype)
    for span in batch.spans:
        for h in range(head_count(q, batch.layout)):
            query = (batch.layout, span.batch, h, span.query_row, span.queries)
            key = (batch.layout, span.batch, h // sharers, span.key_row, span.keys)
            z, row_lse = attention_forward(
                head_rows(q, *query),
                head_rows(k, *key),
                head_rows(v, *key),
                **head_arguments(batch, span, h),
            )
            head_rows(out, *query)[...] = z
            lse_row = lse[h] if q.ndim == 3 else lse[span.batch, h]
            lse_row[span.query_row : span.query_row + span.queries] = row_lse
    return out, lse


def batched_backward(batch: Batch, q: Array, k: Array, v: Array, dout: Array) -> dict[str, Array]:
    """Gradients by name, as attention_backward's, in the order "q", "k", "v", tables, bias.

    A table's are summed over the batch and over the heads that share it, as those of k and v are.
    """
    sharers = head_count(q, batch.layout) // max(head_count(k, batch.layout), 1)
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    names = term_names(relation.kind for relation in batch.relations)
    shapes |= {n: r.table.shape for n, r in zip(names, batch.relations, strict=True)}
    if batch.position_bias is not None:
        shapes["position_bias"] = batch.position_bias.shape
    gradients = {name: np.zeros(shape, batch.dtype) for name, shape in shapes.items()}
    for span in batch.spans:
        for h in range(head_count(q, batch.layout)):
            query = (batch.layout, span.batch, h, span.query_row, span.queries)
            key = (batch.layout, span.batch, h // sharers, span.key_row, span.keys)
            head = attention_backward(
                head_rows(q, *query),
                head_rows(k, *key),
                head_rows(v, *key),
                head_rows(dout, *query),
                **head_arguments(batch, span, h),
            )
            head_rows(gradients["q"], *query)[...] = head["q"]
            head_rows(gradients["k"], *key)[...] += head["k"]
            head_rows(gradients["v"], *key)[...] += head["v"]
            for name, relation in zip(names, batch.relations, strict=True):
                total = gradients[name]
                (total if relation.table.ndim == 2 else total[h])[...] += head[name]
            if "position_bias" in head:
                gradients["position_bias"][h] += head["position_bias"]
    return gradients


# --------------------------------------------------------------------------------------------------
# Rotations, matrix products, random numbers
# --------------------------------------------------------------------------------------------------


def rotate(
    x: Array,
    positions: Array,
    *,
    base: float = 10000.0,
    width: int | None = None,
    pairing: Pairing = "interleaved",
) -> Array:
    """RoPE: pairs of columns turned by the angle positions[i] * base^(-2c / width), c = 0, 1, ...

        (x, y)  ->  (x cos - y sin,  x sin + y cos)

    x: (..., N, D); positions: (N,); width: how many columns turn, from the first (default D, even).
    Pair c: columns 2c and 2c + 1 ("interleaved"), or c and c + width / 2 ("half"). The gradient
    turns back: rotate(dz, -positions).
    """
    width = x.shape[-1] if width is None else width
    c = np.arange(width // 2)
    first, second = (2 * c, 2 * c + 1) if pairing == "interleaved" else (c, c + width // 2)
    angle = np.asarray(positions, np.float64)[:, None] * base ** (-2.0 * c / max(width, 1))
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    result = x.copy()
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., first] * sin + x[..., second] * cos
    return result


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
