# SPDX-License-Identifier: Apache-2.0
"""make_arrays(case): the inputs of a case, its maps and its mask, drawn from the seed of the case."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from cases import Case, Distances, Edges, Labels, Map, Mask, map_rows
from guarded_arrays import Arrays, MapArrays, Strided, allocate, hold
from relpos import reference
from relpos.reference import Band

MAP_BAND, MAP_LABEL, MAP_EDGES = 0, 1, 2  # RP_MAP_...


def allocate_rows(
    case: Case, side: str, width: int, dtype: Any, fill: float, gap: int | None = None
) -> Strided:
    """Rows of every sequence and head in the case's layout; side is "query" or "key"."""
    offsets = case.query_offsets if side == "query" else case.keys_offsets
    rows = case.N if side == "query" else case.M
    heads = case.heads(side)
    gap = case.gap if gap is None else gap
    if offsets is not None:
        return allocate((offsets[-1], heads, width), gap, dtype, fill, "packed")
    outer = (case.B, heads, rows) if case.layout == "bhnd" else (case.B, rows, heads)
    return allocate((*outer, width), gap, dtype, fill, case.layout)


def make_arrays(case: Case, dtype: Any = np.float64) -> Arrays:
    """Inputs of a case: values exact in float32, so that every dtype sees the same numbers."""

    def stream(number: int) -> np.random.Generator:
        """One per array, so that the shape of one does not change the numbers of another."""
        return np.random.default_rng([case.seed, number])

    def fill_rows(number: int, side: str, width: int, factor: float = 1.0) -> Strided:
        random = stream(number)
        result = allocate_rows(case, side, width, dtype, np.nan)
        for span in case.spans:
            query = side == "query"
            row, rows = (span.query_row, span.queries) if query else (span.key_row, span.keys)
            for h in range(case.heads(side)):
                part = reference.head_rows(result.view, case.layout, span.batch, h, row, rows)
                values = random.standard_normal(part.shape, np.float32)
                part[...] = values * np.float32(factor)
        return result

    q = fill_rows(0, "query", case.D, case.spread)
    k = fill_rows(1, "key", case.D)
    v = fill_rows(2, "key", case.Dv)
    dout = fill_rows(3, "query", case.Dv)
    if case.rising:
        random = stream(6)
        for span in case.spans:
            for h in range(case.H):
                key = (case.layout, span.batch, case.key_head(h), span.key_row, span.keys)
                query = (case.layout, span.batch, h, span.query_row, span.queries)
                ramp = np.round(np.linspace(0, 64 * case.D, span.keys)) / 8
                reference.head_rows(k.view, *key)[:, -1] = ramp
                factor = np.float32(1) + random.random(span.queries, np.float32) / 2
                reference.head_rows(q.view, *query)[:, -1] = factor

    tables: dict[str, Strided] = {}
    maps = {}
    numbers = {"key[0]": 4, "value[0]": 5}  # of streams; the others' follow
    for number, (name, kind, map) in enumerate(case.terms, start=10):
        maps[name] = make_map(case, map, stream(number + 10))
        if case.tied and name == "value[0]":
            tables[name] = tables["key[0]"]
            continue
        shape = case.table_shape(kind, map)
        tables[name] = allocate(shape, case.gap, dtype, np.nan)
        W = shape[-1] + case.gap
        tables[name].strides = (0, shape[-2] * W if len(shape) == 3 else 0, W)
        values = stream(numbers.get(name, number)).standard_normal(shape, np.float32)
        if case.outlier and case.outlier[0] == name:
            row = {"first": 0, "middle": shape[-2] // 2, "last": -1}[case.outlier[1]]
            values[..., row, :] *= np.float32(case.outlier[2])
        tables[name].view[...] = values

    result = Arrays(q, k, v, dout, tables, maps)
    if case.position_bias:
        result.position_bias = allocate((case.H, case.D), case.gap, dtype, np.nan)
        values = stream(7).standard_normal((case.H, case.D), np.float32)
        result.position_bias.view[...] = values
    if case.mask is not None:
        result.mask = make_mask(case, case.mask, stream(8))
    result.remember()
    return result


# ---- maps and masks ------------------------------------------------------------------------------


def make_map(case: Case, map: Map, random: np.random.Generator) -> MapArrays:
    if isinstance(map, Labels):
        return _labels(case, map, random)
    if isinstance(map, Edges):
        return _edges(case, map, random)
    fields: dict[str, Any] = {"left": map.left, "right": map.right}
    fields["beyond"] = int(map.beyond == "none")
    if isinstance(map, Band):
        return MapArrays(map, fields)
    band = Band(map.left, map.right, map.beyond)  # type: ignore[arg-type]
    if map.buckets:
        T, R = map_rows(map), band.rows
        folded = np.minimum(np.abs(np.arange(R) - map.left), T - 1)
        buckets = {
            "random": random.integers(-1, T, R),
            "none": np.full(R, -1),
            "identity": np.arange(R),
            "folded": folded,
        }[map.buckets]
        fields |= {"map": MAP_BAND, "rows": T, "buckets": hold(buckets, np.int32, 2**30)}
        band = band._replace(buckets=fields["buckets"].view)
    if map.positions:
        for side in ("query", "key"):
            positions, stride = _positions(case, map, side, random)
            fields |= {f"{side}_positions": positions, f"{side}_position_stride": stride}
        band = band._replace(
            query_positions=fields["query_positions"].view,
            key_positions=fields["key_positions"].view,
        )
    return MapArrays(band, fields)


def _positions(
    case: Case, map: Distances, side: str, random: np.random.Generator
) -> tuple[Strided, int]:
    """Positions of one side, 2^31 - 1 where none is; and the stride between sequences."""
    offsets = case.query_offsets if side == "query" else case.keys_offsets
    rows = case.N if side == "query" else case.M
    shared = map.positions == "shared"
    shape = (rows,) if shared else (case.B, rows)
    result = allocate(shape if offsets is None else offsets[-1:], case.gap, np.int32, 2**31 - 1)
    stride = 0 if shared or offsets is not None else rows + case.gap

    def drawn(first: int, count: int) -> np.ndarray:
        if map.positions == "own":
            return np.arange(first, first + count)
        if map.positions == "far":
            return random.choice([1 - 2**30, -5, 0, 3, 2**30 - 1], count)
        if map.positions in ("rows", "columns"):
            place = np.arange(count)
            return place // 8 if map.positions == "rows" else place % 8
        return random.integers(0, map.left + map.right + 4, count)

    if shared and offsets is None:
        result.view[...] = drawn(0, rows)
        return result, stride
    for span in case.spans:
        query = side == "query"
        row, count = (span.query_row, span.queries) if query else (span.key_row, span.keys)
        own = result.view if offsets is not None else result.view[span.batch]
        own[row : row + count] = drawn(span.start if query else 0, count)
    return result, stride


def _matrices(
    case: Case, map: Labels | Mask, dtype: Any, fill: int, draw: Any
) -> tuple[list[np.ndarray] | np.ndarray, dict[str, Any]]:
    """Matrices for every sequence and head: as relpos.reference takes them, and data, strides, starts.

    Everything outside of them is `fill`. draw(span, heads, queries, keys) gives those of a sequence.
    """
    heads = case.H if map.per_head else 1
    packed = case.offsets is not None or case.keys_offsets is not None
    if map.per_sequence and (packed or map.end_to_end):
        spans, space = case.spans, 3  # unused labels after each matrix
        sizes = [span.queries * span.keys + space for span in spans]
        starts = [0, *itertools.accumulate(sizes)]
        data = allocate((heads, starts[-1]), case.gap, dtype, fill)
        matrices = []
        for first, span in zip(starts, spans, strict=False):
            n, m = span.queries, span.keys
            matrices.append(data.view[:, first : first + n * m].reshape(heads, n, m))
            data.view[:, first : first + n * m] = draw(span, heads, n, m).reshape(heads, n * m)
        fields = {"data": data, "starts": hold(starts[:-1], np.int64, -(2**62))}
        return matrices, fields | {"head_stride": (starts[-1] + case.gap) * map.per_head}
    sequences = case.B if map.per_sequence else 1
    rows, columns = case.N, case.M
    if packed:
        rows = max((span.queries for span in case.spans), default=0)
        columns = max((span.keys for span in case.spans), default=0)
    data = allocate((sequences, heads, rows, columns), case.gap, dtype, fill, "bhnd")
    if map.per_sequence:
        for span in case.spans:
            part = data.view[span.batch, :, : span.queries, : span.keys]
            part[...] = draw(span, heads, span.queries, span.keys)
    else:
        data.view[0] = draw(None, heads, rows, columns)
    strides = dict(zip(("batch_stride", "head_stride", "row_stride"), data.strides, strict=True))
    strides["batch_stride"] *= map.per_sequence
    strides["head_stride"] *= map.per_head
    return data.view, {"data": data, **strides}


def _labels(case: Case, map: Labels, random: np.random.Generator) -> MapArrays:
    def draw(span: reference.Span | None, heads: int, n: int, m: int) -> np.ndarray:
        if map.fill == "band":
            k = map.rows // 2
            start = 0 if span is None else span.start
            index = reference.relation_index(n, m, start, k, map.rows - 1 - k)
            return np.broadcast_to(index, (heads, n, m))
        if map.fill == "none":
            return np.full((heads, n, m), -1)
        drawn = random.integers(-1, map.rows, (heads, n, m))
        if map.fill == "patches":
            i, j = np.ogrid[:n, :m]
            return np.where((i // 50 + j // 130) % 3 == 0, drawn, -1)
        return (
            drawn if map.fill == "random" else np.where(random.random(drawn.shape) < 0.1, drawn, -1)
        )

    dtype = np.dtype(f"i{map.bytes}")
    matrices, fields = _matrices(case, map, dtype, np.iinfo(dtype).max, draw)
    fields = {"labels" if n == "data" else f"label_{n}": x for n, x in fields.items()}
    fields |= {"map": MAP_LABEL, "rows": map.rows, "label_bytes": map.bytes}
    return MapArrays(reference.Labels(matrices), fields)


def make_mask(case: Case, mask: Mask, random: np.random.Generator) -> MapArrays:
    def draw(span: reference.Span | None, heads: int, n: int, m: int) -> np.ndarray:
        shape, (i, j) = (heads, n, m), np.ogrid[:n, :m]
        seen = random.random(shape) < mask.share
        if mask.fill == "rows":
            seen &= random.random((heads, n, 1)) < 0.5
        elif mask.fill == "blocks":
            seen[...] = (i // 16 + j // 32) % 2 == 0
        elif mask.fill == "patches":
            seen[...] = (i // 100 + j // 130) % 3 == 0
        elif mask.fill == "columns":
            seen[...] = (i // 192 + j // 64) % 2 == 0
        elif mask.fill == "last":
            seen[...] = j == m - 1
        elif mask.fill in ("none", "all"):
            seen[...] = mask.fill == "all"
        return seen * random.choice(np.array([1, 2, 128, 255]), shape)

    matrices, fields = _matrices(case, mask, np.uint8, 1, draw)
    return MapArrays(reference.Labels(matrices), fields)


def _edges(case: Case, map: Edges, random: np.random.Generator) -> MapArrays:
    """Rows beyond a length have an edge too, to a key and with a label that do not exist."""
    nothing = 2**31 - 1
    rows = case.B * case.N if case.offsets is None else case.offsets[-1]
    edges = [np.array([[nothing, nothing]])] * rows  # of each query: (key, label)
    for span in case.spans:
        for i in range(span.queries):
            count = 0 if map.fill == "none" or span.keys == 0 else random.poisson(map.per_query)
            keys = random.integers(0, max(span.keys, 1), count)
            if map.fill == "full":
                keys = np.arange(span.keys)
            elif map.fill == "repeated":
                keys = np.repeat(keys, random.integers(2, 5))
            labels = random.integers(0, max(map.rows, 1), len(keys))
            edges[span.number + i] = np.stack([np.sort(keys), labels], axis=1)
    keys, labels = np.concatenate([*edges, np.empty((0, 2), np.int64)]).T
    starts = [0, *itertools.accumulate(len(own) for own in edges)]
    fields = {
        "map": MAP_EDGES,
        "rows": map.rows,
        "edge_starts": hold(starts, np.int64, 2**62),
        "edge_keys": hold(keys, np.int32, nothing),
        "edge_labels": hold(labels, np.int32, nothing),
    }
    views = (fields[f"edge_{name}"].view for name in ("starts", "keys", "labels"))
    return MapArrays(reference.Edges(*views), fields)
