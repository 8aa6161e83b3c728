# SPDX-License-Identifier: Apache-2.0
"""The one list of attention cases: correctness, gradients and timing all run these.

A Case is plain data. random_case(seed) draws one, CORNERS lists those that chance would miss, and
make_arrays(case) gives the arrays. What no kernel may touch shows itself:

    outputs   every element outside the result (around it, and between rows of a wide stride) holds
              SENTINEL, and so does the result itself before the call
    inputs    every element outside, and every row beyond a length, is NaN
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from relpos import reference
from relpos.reference import Band, Dropout

SENTINEL = -12345.6875  # exact in float32
GUARD = 17  # elements around each array; odd, so that rows are not aligned
MAP_BAND, MAP_LABEL, MAP_EDGES = 0, 1, 2  # RP_MAP_...


# --------------------------------------------------------------------------------------------------
# What a case is
# --------------------------------------------------------------------------------------------------


class Distances(NamedTuple):
    """A band with buckets, or explicit positions, or both, drawn from the case's seed.

    buckets: "random" (one in rows + 1 is -1), "none" (all are), "identity" or "folded" (the absolute
    distance). positions: "own" (those of a band), "random" in every sequence, "shared" by all,
    "far" apart, or "rows" and "columns" of a plane eight wide.
    """

    left: int
    right: int
    beyond: str = "clip"
    rows: int = 0  # T; 0: as many as distances
    buckets: str = ""
    positions: str = ""


class Labels(NamedTuple):
    """A matrix of labels: "random" (one in rows + 1 is -1), "none", "sparse", or those of a "band"."""

    rows: int
    bytes: int = 1
    fill: str = "random"
    per_head: bool = False
    per_sequence: bool = True
    end_to_end: bool = False  # one after the other, as in packed batches, where padded as well


class Edges(NamedTuple):
    """A list of edges: "random", "repeated" (every pair that has one has several), "none", "full"."""

    rows: int
    per_query: int = 2
    fill: str = "random"


class Mask(NamedTuple):
    """A boolean mask: "random", "none" or "all" visible, "rows" of nothing, "blocks", the "last"."""

    fill: str = "random"
    share: float = 0.7
    per_head: bool = False
    per_sequence: bool = True
    end_to_end: bool = False


Map: TypeAlias = "Band | Distances | Labels | Edges"
Maps: TypeAlias = "Map | tuple[Map, ...] | None"


def map_rows(map: Map) -> int:
    """T of the table that a map chooses from."""
    return (map.rows or map.left + 1 + map.right) if isinstance(map, Distances) else map.rows


@dataclass(frozen=True)
class Case:
    B: int = 1
    H: int = 1
    N: int = 8
    M: int = 8
    D: int = 8
    Dv: int = 8
    key: Maps = None  # None: no such term; several: a tuple
    query: Maps = None
    bias: Maps = None
    value: Maps = None
    tied: bool = False  # one table, and one gradient, for key[0] and value[0]
    per_head: bool | tuple[str, ...] = False  # tables [H, T, width]: all, or those of these kinds
    position_bias: bool = False
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    mask: Mask | None = None
    softcap: float = 0.0
    dropout: Dropout | None = None
    lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None  # packed: N or M is ignored
    key_offsets: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    layout: str = "bhnd"  # of the sides without offsets: "bhnd" or "bnhd"
    gap: int = 0  # unused elements after each row
    scale: float | None = None  # None: 1/sqrt(D)
    spread: float = 1.0  # factor on q: large ones make the softmax sharp
    rising: bool = False  # scores grow with j, so that the running maximum keeps moving
    outlier: tuple[str, str, float] | None = None  # ("key[0]", "first", 10.0): a row of a table
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tied:
            maps = {name: map for name, _, map in self.terms}
            assert map_rows(maps["key[0]"]) == map_rows(maps["value[0]"])
            assert self.D == self.Dv

    def __str__(self) -> str:
        """Only what differs from the defaults: the case as one would type it."""
        plain = Case()
        given = (
            f"{name}={getattr(self, name)!r}"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(plain, name)
        )
        return f"Case({', '.join(given)})"

    def maps(self, kind: str) -> tuple[Map, ...]:
        """The maps of one kind of terms."""
        given = getattr(self, kind)
        if given is None:
            return ()
        return (given,) if isinstance(given, Band | Distances | Labels | Edges) else given

    @property
    def terms(self) -> list[tuple[str, reference.Kind, Map]]:
        """Name, kind and map of every term."""
        kinds = [kind for kind in reference.KINDS for _ in self.maps(kind)]
        maps = [map for kind in reference.KINDS for map in self.maps(kind)]
        return list(zip(reference.term_names(kinds), kinds, maps, strict=True))

    def table_shape(self, kind: str, map: Map) -> tuple[int, ...]:
        width = {"value": self.Dv, "bias": 1}.get(kind, self.D)
        own = self.per_head if isinstance(self.per_head, bool) else kind in self.per_head
        return (self.H, map_rows(map), width) if own else (map_rows(map), width)

    @property
    def spans(self) -> list[reference.Span]:
        return reference.spans(
            self.B,
            self.N,
            self.M,
            lengths=self.lengths,
            key_lengths=self.key_lengths,
            offsets=self.offsets,
            key_offsets=self.key_offsets,
            query_start=self.starts,
        )

    @property
    def query_offsets(self) -> tuple[int, ...] | None:
        return self.offsets

    @property
    def keys_offsets(self) -> tuple[int, ...] | None:
        """Offsets of the key side: its own, or the queries' where those serve both."""
        alone = self.key_offsets is None and self.key_lengths is None
        return self.offsets if alone else self.key_offsets

    def batch(self, arrays: Arrays, dtype: Any = np.float64) -> reference.Batch:
        """What relpos.reference is to compute with these arrays."""
        bias = arrays.position_bias
        return reference.Batch(
            self.spans,
            [
                reference.Relation(kind, arrays.tables[name].view, arrays.maps[name].map)
                for name, kind, _ in self.terms
            ],
            None if bias is None else bias.view,
            self.causal,
            self.window,
            None if arrays.mask is None else arrays.mask.map.matrices,
            self.scale,
            self.softcap,
            self.dropout,
            self.layout,  # type: ignore[arg-type]
            dtype,
        )


# --------------------------------------------------------------------------------------------------
# Arrays
# --------------------------------------------------------------------------------------------------


@dataclass
class Strided:
    """A view with its surroundings: view[..., row, column] inside raw, a flat array."""

    raw: np.ndarray
    view: np.ndarray
    strides: tuple[int, ...] = (0, 0, 0)  # batch, head, row; in elements

    @property
    def address(self) -> int:
        """Of the view; also of an empty one, which NumPy places at the start of raw."""
        return self.raw.ctypes.data + GUARD * self.raw.itemsize

    def untouched(self, fill: float) -> bool:
        """Whether everything outside the view still holds what it was filled with."""
        outside = np.ones(self.raw.shape, bool)
        first = (self.address - self.raw.ctypes.data) // self.raw.itemsize
        if self.view.size:
            steps = tuple(s // self.view.itemsize * outside.itemsize for s in self.view.strides)
            np.lib.stride_tricks.as_strided(outside[first:], self.view.shape, steps)[...] = False
        return bool(np.all(self.raw[outside] == self.raw.dtype.type(fill)))


def allocate(shape: tuple[int, ...], gap: int, dtype: Any, fill: float, kind: str = "") -> Strided:
    """An array of this shape whose rows lie width + gap apart, guards around it, all `fill`.

    kind names what the axes mean: "bhnd", "bnhd", "packed", or "" for others.
    """
    *outer, width = shape
    size = int(np.prod(outer, dtype=np.int64)) * (width + gap)
    raw = np.full(size + 2 * GUARD, fill, dtype)
    view = raw[GUARD : GUARD + size].reshape(*outer, width + gap)[..., :width]
    W = width + gap
    strides = (0, 0, W)
    if kind == "bhnd":
        strides = (outer[1] * outer[2] * W, outer[2] * W, W)
    elif kind == "bnhd":
        strides = (outer[1] * outer[2] * W, W, outer[2] * W)
    elif kind == "packed":
        strides = (0, W, outer[1] * W)
    return Strided(raw, view, strides)


def allocate_rows(
    case: Case, side: str, width: int, dtype: Any, fill: float, gap: int | None = None
) -> Strided:
    """Rows of every sequence and head in the case's layout; side is "query" or "key"."""
    offsets = case.query_offsets if side == "query" else case.keys_offsets
    rows = case.N if side == "query" else case.M
    gap = case.gap if gap is None else gap
    if offsets is not None:
        return allocate((offsets[-1], case.H, width), gap, dtype, fill, "packed")
    outer = (case.B, case.H, rows) if case.layout == "bhnd" else (case.B, rows, case.H)
    return allocate((*outer, width), gap, dtype, fill, case.layout)


class MapArrays(NamedTuple):
    """A map, or mask, for the reference, and as the fields of rp_relation or rp_mask."""

    map: Any
    fields: dict[str, Any]  # numbers, and arrays to point to


@dataclass
class Arrays:
    """The inputs of a case in one dtype. Tied tables are one and the same object."""

    q: Strided
    k: Strided
    v: Strided
    dout: Strided
    tables: dict[str, Strided]  # "key[0]": ...
    maps: dict[str, MapArrays]
    position_bias: Strided | None = None
    mask: MapArrays | None = None
    before: list[np.ndarray] = field(default_factory=list)

    def __getitem__(self, name: str) -> Strided:
        """The array whose gradient has this name."""
        return self.tables[name] if name in self.tables else getattr(self, name)

    @property
    def inputs(self) -> list[Strided]:
        given: list[Any] = [self.q, self.k, self.v, self.dout, *self.tables.values()]
        given.append(self.position_bias)
        for map in (*self.maps.values(), self.mask):
            given += map.fields.values() if map else []
        return [x for x in given if isinstance(x, Strided)]

    def remember(self) -> None:
        """Keeps copies, for unmodified()."""
        self.before = [x.raw.copy() for x in self.inputs]

    def unmodified(self) -> bool:
        pairs = zip(self.before, self.inputs, strict=True)
        return all(old.tobytes() == new.raw.tobytes() for old, new in pairs)

    def views(self) -> tuple[Any, Any, Any, Any]:
        """q, k, v, dout as plain arrays."""
        return (self.q.view, self.k.view, self.v.view, self.dout.view)


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
            for h in range(case.H):
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
                key = (case.layout, span.batch, h, span.key_row, span.keys)
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


def hold(values: Any, dtype: Any, fill: float = -1) -> Strided:
    """Numbers in one row, with guards."""
    values = np.asarray(values, dtype)
    result = allocate(values.shape, 0, dtype, fill)
    result.view[...] = values
    return result


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


# --------------------------------------------------------------------------------------------------
# Random cases
# --------------------------------------------------------------------------------------------------

# Around every multiple of the tiles and strips in use (2 to 128), and primes.
EDGES = (0, 1, 2, 3, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 37, 47, 48, 49)
EDGES += (53, 63, 64, 65, 79, 80, 81, 95, 96, 97, 101, 127, 128)
LONG = (129, 131, 143, 144, 145, 159, 160, 161, 167, 191, 192, 193, 211, 223, 255, 256, 257)
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 20, 32, 33, 48, 64, 80, 128)


def random_case(seed: int) -> Case:
    """The case of this seed. Every fourth has N > 128 and all clip distances strictly inside.

    Half of them have Shaw's terms alone, the others anything at all.
    """
    random = np.random.default_rng([seed, 1803, 2155])

    def pick(values: Any) -> int:
        return int(random.choice(np.asarray(values)))

    def chance(share: float) -> bool:
        return bool(random.random() < share)

    long = seed % 4 == 0
    if long:
        N = pick(LONG)
        M = N if chance(0.6) else pick(LONG)
        B, H, D = pick((1, 1, 2)), pick((1, 1, 2)), pick(WIDTHS[:13])
    else:
        N = pick(EDGES)
        M = N if chance(0.6) else pick(EDGES)
        B, H, D = pick((1, 1, 2, 3)), pick((1, 2, 3)), pick(WIDTHS)
    Dv = D if chance(0.7) else pick(WIDTHS)

    def clip() -> int:
        if long:
            return pick((0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64))
        return pick((0, 1, 2, 3, 4, 8, 16, max(N - 1, 0), N, 2 * N, 2 * M))

    def band() -> Band:
        left = clip()
        right = left if chance(0.6) else clip()
        return Band(left, right, "none" if chance(0.25) else "clip")

    terms = pick((0, 1, 2, 3, 3, 3, 3, 3))
    key = band() if terms & 1 else None
    value = (key if key and chance(0.6) else band()) if terms & 2 else None
    tied = bool(key and value and key.rows == value.rows and chance(0.4))
    if tied:
        Dv = D

    lengths = key_lengths = offsets = key_offsets = None
    kind = pick((0, 0, 0, 1, 2, 3, 4, 5))

    def some_lengths(most: int) -> tuple[int, ...]:
        ends = (0, most, most, random.integers(most + 1), random.integers(most + 1))
        return tuple(pick(ends) for _ in range(B))

    def some_offsets(most: int) -> tuple[int, ...]:
        return (0, *itertools.accumulate(some_lengths(most)))

    if kind == 1:
        lengths = some_lengths(min(N, M))
    elif kind == 2:
        lengths, key_lengths = some_lengths(N), some_lengths(M)
    elif kind == 3:
        key_lengths = some_lengths(M)
    elif kind == 4:
        offsets = some_offsets(N)
    elif kind == 5:
        offsets, key_offsets = some_offsets(N), some_offsets(M)

    starts = None
    if chance(0.35):
        starts = tuple(
            pick((0, 1, max(M - N, 0), M, M + 3, -1, -N, random.integers(-N, M + 1)))
            for _ in range(B)
        )
    case = Case(
        B=B,
        H=H,
        N=N,
        M=M,
        D=D,
        Dv=Dv,
        key=key,
        value=value,
        tied=tied,
        per_head=chance(0.3),
        causal=chance(0.4),
        lengths=lengths,
        key_lengths=key_lengths,
        offsets=offsets,
        key_offsets=key_offsets,
        starts=starts,
        layout="bnhd" if chance(0.5) else "bhnd",
        gap=pick((0, 0, 0, 1, 3, 8)),
        scale=None if chance(0.7) else float(random.choice([0.25, 1.0, 0.01, -0.3])),
        spread=float(random.choice([1, 1, 1, 1, 8])),
        rising=chance(0.1),
        seed=seed,
    )

    def number(values: Any) -> float:
        return float(random.choice(values))

    def word(values: Any) -> str:
        return str(random.choice(values))

    def any_map() -> Map:
        kind = pick((0, 0, 1, 1, 2, 3, 3, 4))
        if kind == 0:
            return band()
        if kind <= 2:
            left, right, beyond = band()[:3]
            places = word(["own", "random", "shared", "far", "rows", "columns"])
            buckets = word(["random", "random", "folded", "identity", "none"])
            buckets = buckets if kind == 1 or chance(0.3) else ""
            several = buckets in ("random", "folded", "none")
            return Distances(
                left,
                right,
                beyond,
                pick((1, 2, 7, 32, 33, 51)) if several else 0,
                buckets,
                places if kind == 2 else "",
            )
        if kind == 3:
            return Labels(
                pick((1, 2, 15, 16, 51, 127)),
                pick((1, 2, 4)),
                word(["random", "random", "band", "sparse", "none"]),
                per_head=chance(0.3),
                per_sequence=chance(0.6),
                end_to_end=chance(0.3),
            )
        fill = word(["random", "random", "repeated", "full", "none"])
        return Edges(pick((1, 2, 16, 51)), pick((1, 2, 8)), fill)

    def some_maps(counts: Any) -> Maps:
        maps = tuple(any_map() for _ in range(pick(counts)))
        return maps[0] if len(maps) == 1 else maps or None

    if seed // 4 % 2:
        case = replace(
            case,
            key=some_maps((0, 1, 1, 2)),
            query=some_maps((0, 0, 1, 2)),
            bias=some_maps((0, 0, 1, 2)),
            value=some_maps((0, 1, 1, 2)),
            tied=False,
            per_head=tuple(kind for kind in reference.KINDS if chance(0.3)),
            position_bias=chance(0.4),
        )
        if chance(0.4):
            ends = (-1, -1, 0, 1, 3, 16, 40, 63, 64, 65, 100)
            case = replace(case, window=(pick(ends), pick(ends)))
        if chance(0.35):
            fill = word(["random", "random", "rows", "blocks", "last", "all", "none"])
            share = number([0.1, 0.5, 0.9])
            case = replace(case, mask=Mask(fill, share, chance(0.3), chance(0.6), chance(0.3)))
        if chance(0.25):
            case = replace(case, softcap=number([0.1, 1, 5, 30]))
        if chance(0.4):
            rate = number([0.1, 0.1, 0.5, 0.9, 0.001, 1 / 256, 255 / 256])
            words = random.integers(2**32, size=4).tolist()
            site, first = (w if chance(0.3) else w % 100 for w in words[2:])
            case = replace(case, dropout=Dropout(rate, (words[0], words[1]), site, first))
        tables = [
            map_rows(case.maps(kind)[0]) if case.maps(kind) else 0 for kind in ("key", "value")
        ]
        if tables[0] and tables[0] == tables[1] and D == Dv and chance(0.5):
            sharing = tuple(k for k in case.per_head if k not in ("key", "value"))  # type: ignore
            case = replace(case, tied=True, per_head=sharing)
    tables = [name for name, _, _ in case.terms]
    if tables and chance(0.15):
        where = word(["first", "first", "middle", "last"])
        case = replace(case, outlier=(word(tables), where, number([10, 1000])))
    return case


# --------------------------------------------------------------------------------------------------
# Corners
# --------------------------------------------------------------------------------------------------


def _corners() -> list[Case]:
    both = {"key": Band(3, 3), "value": Band(3, 3)}
    cases = []
    # n against k, causal and not.
    for N in (0, 1, 2, 15, 16, 17, 63, 64, 65, 67, 127, 128, 129):
        for K in sorted({0, 1, max(N - 1, 0), N, 2 * N}):
            for causal in (False, True):
                band = Band(K, K)
                cases.append(Case(N=N, M=N, D=16, Dv=16, key=band, value=band, causal=causal))
    # Widths.
    for D in (1, 3, 7, 8, 16, 20, 32, 64, 80, 128, 200):
        cases.append(Case(N=33, M=33, D=D, Dv=D, **both))
        cases.append(Case(N=19, M=19, D=D, Dv=24, causal=True, **both))
        cases.append(Case(N=19, M=19, D=24, Dv=D, causal=True, **both))
    # N against M, both ways, with the start left to the default or given.
    sizes = ((1, 7), (7, 1), (1, 130), (130, 1), (33, 97), (97, 33), (64, 128), (129, 64))
    for N, M in (*sizes, (0, 5), (5, 0), (0, 0)):
        for causal in (False, True):
            cases.append(Case(N=N, M=M, causal=causal, **both))
            for start in (0, 3, -2, -N, M, M + 40, -200, 1000):
                cases.append(Case(N=N, M=M, causal=causal, starts=(start,), **both))
    # Every key on one side of every query: one row of the table, which may be its only one.
    for left, right in ((0, 0), (0, 2), (2, 0), (2, 2)):
        band = Band(left, right)
        for start in (-18, -17, -16, 16, 17, 18, 60):
            cases.append(Case(N=17, M=17, D=32, Dv=32, starts=(start,), key=band, value=band))
    # Terms and what lies beyond the band.
    for left, right in ((0, 0), (0, 5), (5, 0), (2, 9), (40, 1), (1, 200), (64, 64), (63, 65)):
        for beyond in ("clip", "none"):
            band = Band(left, right, beyond)  # type: ignore[arg-type]
            for causal in (False, True):
                shape = Case(H=2, N=71, M=71, D=16, Dv=16, causal=causal, per_head=left == 5)
                cases.append(replace(shape, key=band))
                cases.append(replace(shape, value=band))
                cases.append(replace(shape, key=band, value=band, tied=True))
                cases.append(replace(shape, key=band, value=Band(right, left)))
    shift = Case(N=40, M=40, key=Band(2, 6), value=Band(5, 3))
    cases += [shift, replace(shift, tied=True), replace(shift, tied=True, per_head=True, H=3)]
    # Nothing to see, nothing to do.
    cases += [
        Case(B=0, **both),
        Case(H=0, **both),
        Case(B=2, N=9, M=9, lengths=(0, 0), **both),
        Case(B=2, N=9, M=9, key_lengths=(0, 0), **both),
        Case(B=3, N=9, M=11, lengths=(9, 0, 4), key_lengths=(0, 11, 4), **both),
        Case(B=2, N=9, M=9, causal=True, starts=(-9, -20), **both),
        Case(B=2, offsets=(0, 0, 0), **both),
        Case(B=3, offsets=(0, 5, 5, 70), **both),
        Case(B=3, offsets=(0, 5, 5, 70), key_offsets=(0, 0, 66, 67), causal=True, **both),
        Case(N=70, M=20, causal=True, **both),  # the first fifty rows see nothing
    ]
    # One side packed, the other padded.
    cases += [
        Case(B=2, N=9, M=12, lengths=(9, 4), key_offsets=(0, 12, 31), **both),
        Case(B=2, N=9, key_offsets=(0, 12, 31), layout="bnhd", **both),
    ]
    # Numbers: sharp, flat, negative and rising scores.
    wide = Case(B=1, H=2, N=150, M=150, D=64, Dv=64, key=Band(16, 16), value=Band(16, 16))
    cases += [
        wide,
        replace(wide, causal=True),
        replace(wide, spread=30.0),
        replace(wide, rising=True),
        replace(wide, rising=True, causal=True),
        replace(wide, scale=1e-30),
        replace(wide, scale=-0.125),
        replace(wide, scale=4.0),
        replace(wide, layout="bnhd", gap=5, per_head=True),
        replace(wide, B=3, offsets=(0, 150, 163, 300), gap=2),
    ]
    cases += _more_corners()
    return [replace(case, seed=900_000 + i) for i, case in enumerate(cases)] + _once_wrong()


def _once_wrong() -> list[Case]:
    """Cases with the numbers of runs in which something was wrong.

    In the first two kernels that subtracted row 0 from a table had a row whose log-sum-exp was off by
    six to twelve times the largest error of the plain formula. In the third dropout leaves a row
    nothing but keys of e^-25 of its sum, and `_head_sizes` forgot what rounding s - lse does to them.
    """
    rows = {"B": 3, "D": 128, "Dv": 128, "gap": 1}
    few = Band(2, 2)
    return [
        Case(
            **rows, H=2, N=47, M=47, key=Band(8, 8), key_lengths=(0, 12, 47), spread=8.0, seed=2917
        ),
        Case(
            **rows,
            H=3,
            N=48,
            M=48,
            key=few,
            value=few,
            per_head=True,
            key_lengths=(14, 0, 14),
            layout="bnhd",
            seed=4369,
        ),
        random_case(2972),
    ]


def _more_corners() -> list[Case]:
    """Those of the terms, maps and masks beyond Shaw's."""
    cases = []
    # Outliers: what is small beside them must not be lost.
    wide = Case(H=2, N=150, M=150, D=64, Dv=64, key=Band(16, 16), value=Band(16, 16))
    for base in (wide, replace(wide, causal=True), replace(wide, tied=True, D=16, Dv=16)):
        for name, where, factor in itertools.product(
            ("key[0]", "value[0]"), ("first", "middle", "last"), (10.0, 1000.0)
        ):
            if not (base.tied and name == "value[0]"):
                cases.append(replace(base, outlier=(name, where, factor)))
    none = Band(16, 16, "none")
    cases += [
        replace(wide, key=none, value=none, outlier=("key[0]", "first", 1000.0)),
        replace(wide, N=40, M=300, outlier=("key[0]", "first", 1000.0)),
        replace(wide, N=300, M=40, outlier=("key[0]", "last", 1000.0)),
        replace(wide, key=None, query=Band(16, 16), outlier=("query[0]", "first", 1000.0)),
        replace(wide, key=None, bias=Band(16, 16), outlier=("bias[0]", "first", 1000.0)),
        replace(wide, key=None, bias=Labels(9), outlier=("bias[0]", "last", -1000.0)),
        replace(wide, key=Labels(9), outlier=("key[0]", "first", 1000.0)),
    ]
    # Every kind of term with every kind of map, alone.
    maps: list[Map] = [
        Band(3, 5),
        Band(0, 0),
        Band(4, 3, "none"),
        Band(100, 120),
        Band(2000, 1500),
        Distances(5, 5, "clip", 0, "identity"),
        Distances(20, 20, "none", 6, "random"),
        Distances(128, 128, "clip", 32, "folded"),
        Distances(7, 7, "clip", 3, "none"),
        Distances(0, 0, "clip", 1, "random"),
        Distances(2000, 2000, "clip", 1, "folded"),
        Distances(9, 9, "clip", 0, "", "own"),
        Distances(9, 9, "none", 0, "", "own"),
        Distances(2000, 1500, "clip", 0, "", "own"),
        Distances(300, 9, "none", 0, "", "own"),
        Distances(2000, 2000, "none", 0, "", "random"),
        Distances(300, 300, "clip", 280, "random", "own"),
        Distances(4, 9, "none", 0, "", "random"),
        Distances(4, 9, "clip", 4, "folded", "shared"),
        Distances(3, 3, "clip", 0, "", "far"),
        Distances(9, 9, "clip", 0, "", "rows"),
        Labels(1),
        Labels(51),
        Labels(51, 2, "random", True),
        Labels(51, 4, "random", True, False),
        Labels(51, 1, "sparse", False, True, True),
        Labels(1000, 2, "random"),
        Labels(3000, 2, "sparse"),
        Labels(9000, 4, "random", True),
        Labels(7, 1, "none"),
        Labels(7, 1, "band", False, False),
        Edges(1, 1),
        Edges(9, 5),
        Edges(9, 3, "repeated"),
        Edges(9, 1, "none"),
        Edges(9, 1, "full"),
        Edges(500, 9, "repeated"),
        Edges(4, 200),  # more edges than keys
    ]
    shape = Case(B=2, H=2, N=70, M=70, D=16, Dv=16, gap=1)
    for map, kind in itertools.product(maps, reference.KINDS):
        cases.append(replace(shape, **{kind: map}, lengths=(70, 33)))  # type: ignore[arg-type]
        if len(cases) % 2:
            packed = replace(shape, offsets=(0, 67, 70), causal=True, per_head=True)
            cases.append(replace(packed, **{kind: map}))  # type: ignore[arg-type]
        else:
            cross = replace(shape, N=9, M=130, layout="bnhd", starts=(3, -70))
            cases.append(replace(cross, **{kind: map}))  # type: ignore[arg-type]
    # Every kind at once, twice.
    full = replace(
        shape,
        key=(Band(4, 4), Labels(5)),
        query=(Distances(9, 9, "clip", 4, "folded"), Edges(3, 3)),
        bias=(Labels(6, 2), Band(8, 8, "none")),
        value=(Edges(9, 4, "repeated"), Distances(3, 3, "clip", 0, "", "random")),
        position_bias=True,
        per_head=("key", "bias"),
    )
    plane = (Distances(7, 7, "clip", 0, "", "rows"), Distances(7, 7, "clip", 0, "", "columns"))
    dropout = Dropout(0.1, (1, 2))
    cases += [
        full,
        replace(full, causal=True),
        replace(full, lengths=(70, 1), window=(20, 3), mask=Mask(), softcap=5.0, dropout=dropout),
        replace(full, offsets=(0, 0, 69), mask=Mask(), dropout=dropout),
        replace(full, N=33, M=65, key_lengths=(0, 64), softcap=1.0),
        replace(full, scale=0.0625, softcap=30.0, layout="bnhd"),
        replace(shape, key=plane, value=plane, bias=plane),
        replace(shape, key=plane, query=plane, tied=False, position_bias=True),
        replace(full, lengths=(0, 0)),
        replace(full, key_lengths=(0, 0)),
        replace(full, B=0),
        replace(full, H=0, per_head=False),
        replace(full, N=0),
        replace(full, M=0),
        replace(full, offsets=(0, 0, 0)),
        replace(full, mask=Mask("none")),
        replace(full, N=1, M=1),
    ]
    # position_bias with one key term of each map, and without any: no effect, gradient zero.
    for key in (None, Band(16, 16), Band(500, 500), Labels(9), Edges(9), maps[5], maps[11]):
        cases.append(replace(shape, key=key, position_bias=True))
        cases.append(replace(shape, key=key, position_bias=True, causal=True, value=Band(2, 2)))
    # Long tables that are looked up, over several blocks and chunks.
    for long_map in (
        Distances(2000, 1500, "clip", 0, "", "own"),
        Distances(2000, 2000, "none", 0, "", "random"),
        Labels(9000, 4),
        Labels(2000, 2, "sparse"),
        Edges(2000, 3),
    ):
        four = dict.fromkeys(reference.KINDS, long_map)
        several = Case(N=300, M=290, D=24, Dv=20, **four)  # type: ignore[arg-type]
        cases.append(replace(several, position_bias=True))
        cases.append(replace(several, causal=True, window=(150, 0), dropout=dropout, softcap=5.0))
    # Unclipped, a table of thousands of rows.
    for N, M in ((200, 200), (130, 257), (257, 65)):
        for K in (max(N, M) - 1, max(N, M), 3000):
            shaw = Case(N=N, M=M, D=8, Dv=8, key=Band(K, K), value=Band(K, K))
            cases += [shaw, replace(shaw, causal=True), replace(shaw, query=Band(K, K))]
    cases.append(Case(N=600, M=600, D=16, Dv=16, key=Band(599, 599), position_bias=True))
    cases.append(Case(N=300, M=300, D=16, Dv=16, key=Band(299, 0), query=Band(299, 0), causal=True))
    # Windows, at the borders of tiles.
    both: dict[str, Any] = {"key": Band(3, 3), "value": Band(3, 3)}
    for left, right in ((0, 0), (-1, 0), (0, -1), (1, 0), (5, 5), (63, 0), (64, 64), (65, 1)):
        for N, M in ((200, 200), (33, 130), (130, 33)):
            cases.append(Case(N=N, M=M, window=(left, right)))
            cases.append(Case(N=N, M=M, window=(left, right), causal=True, **both))
    cases.append(Case(N=70, M=70, window=(3, 3), starts=(200,), **both))  # none in reach
    cases.append(Case(N=70, M=70, window=(3, 3), starts=(-40,), **both))
    cases.append(Case(N=300, M=300, window=(10**6, 2**40), **both))
    # Masks.
    for fill in ("random", "none", "all", "rows", "blocks", "last"):
        for per_head, per_sequence in itertools.product((False, True), (False, True)):
            mask = Mask(fill, 0.5, per_head, per_sequence)
            cases.append(replace(shape, mask=mask, lengths=(70, 40), **both))
            cases.append(replace(shape, mask=mask, N=130, M=67, causal=per_head, **both))
            cases.append(replace(shape, mask=mask, offsets=(0, 40, 70), **both))
    # Softcaps, from one that does nothing to one that makes every score the same.
    for softcap in (1e-3, 0.1, 1.0, 30.0, 1e6):
        cases.append(replace(shape, softcap=softcap, **both))
        cases.append(replace(shape, softcap=softcap, bias=Band(4, 4), causal=True, spread=8.0))
    cases.append(replace(shape, softcap=2.0, window=(9, 0), mask=Mask("rows"), **both))
    # Dropout, at the borders of tiles and of blocks of sixteen.
    for rate in (0.001, 1 / 256, 0.1, 0.5, 0.9, 255 / 256, 0.9999):
        given = Dropout(rate, (2**32 - 1, 7), 2**32 - 1, 2**32 - 1)
        cases.append(replace(shape, dropout=given, **both))
        cases.append(replace(shape, dropout=given, offsets=(0, 3, 70), causal=True, **both))
    for N in (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 160):
        cases.append(Case(H=2, N=N, M=N, dropout=dropout, **both))
        cases.append(Case(N=N, M=193 - N, dropout=dropout, value=Labels(3), causal=True))
    return cases


CORNERS = _corners()

# Shapes of the speed table, (B, H, N): d = 64, k = 16, both terms.
TIMED = [
    Case(B=B, H=H, N=N, M=N, D=64, Dv=64, key=Band(16, 16), value=Band(16, 16))
    for B, H, N in ((8, 8, 64), (4, 8, 256), (1, 8, 1024), (1, 8, 2048), (1, 4, 4096))
]


# --------------------------------------------------------------------------------------------------
# What is right, and how far one may be from it
# --------------------------------------------------------------------------------------------------


@dataclass
class Oracle:
    """Results and gradients by name: "out", "lse", and those of reference.batched_backward.

    exact: float64 reference. plain: the same formulas in float32. size and noise: the error of an
    element in units of roundoff, if every term adds up in the worst way, and if signs are random.
    """

    exact: dict[str, np.ndarray]
    plain: dict[str, np.ndarray]
    size: dict[str, np.ndarray]
    noise: dict[str, np.ndarray]
    rows: int  # queries of all heads
    terms: int  # the most numbers added up anywhere


@functools.lru_cache(maxsize=128)
def oracle(case: Case) -> Oracle:
    return oracle_of(case, make_arrays(case))


def oracle_of(case: Case, arrays: Arrays) -> Oracle:
    """The oracle of arrays that a test has changed. Of tied tables: one gradient, "key[0]"."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are tested too
        exact = _run_reference(case, arrays, np.float64)
        plain = _run_reference(case, arrays, np.float32)
        size, noise = _sizes(case, arrays, worst=True), _sizes(case, arrays, worst=False)
    spans = case.spans
    queries, keys = (sum(getattr(s, side) for s in spans) for side in ("queries", "keys"))
    terms = case.D + case.Dv + (queries + keys) * case.H + 32
    return Oracle(exact, plain, size, noise, queries * case.H, terms)


def merge_tied(case: Case, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if case.tied:
        results["key[0]"] = results["key[0]"] + results.pop("value[0]")
    return results


def _run_reference(case: Case, arrays: Arrays, dtype: Any) -> dict[str, np.ndarray]:
    q, k, v, dout = arrays.views()
    batch = case.batch(arrays, dtype)
    out, lse = reference.batched_forward(batch, q, k, v)
    gradients = reference.batched_backward(batch, q, k, v, dout)
    return {"out": out, "lse": lse, **merge_tied(case, gradients)}


def _sizes(case: Case, arrays: Arrays, worst: bool) -> dict[str, np.ndarray]:
    """Error per unit roundoff of every result and gradient, to first order.

    That of a sequence's head is _head_sizes'; those of tables add up over heads and sequences.
    """
    q, k, v, dout = arrays.views()
    batch = case.batch(arrays)
    power = 1 if worst else 2
    names = [name for name, _, _ in case.terms]
    total = {"q": np.zeros(q.shape), "k": np.zeros(k.shape), "v": np.zeros(v.shape)}
    total |= {"out": np.zeros((*q.shape[:-1], case.Dv))}
    total["lse"] = np.zeros(reference.row_numbers_shape(q, case.layout))
    total |= {name: np.zeros(arrays.tables[name].view.shape) for name in names}
    if arrays.position_bias is not None:
        total["position_bias"] = np.zeros(arrays.position_bias.view.shape)
    for span in batch.spans:
        for h in range(case.H):
            query = (case.layout, span.batch, h, span.query_row, span.queries)
            key = (case.layout, span.batch, h, span.key_row, span.keys)
            sides = {"q": query, "out": query, "k": key, "v": key}
            head = _head_sizes(
                *(np.asarray(reference.head_rows(x, *query), np.float64) for x in (q, dout)),
                *(np.asarray(reference.head_rows(x, *key), np.float64) for x in (k, v)),
                reference.head_arguments(batch, span, h),
                worst,
            )
            for name, x in head.items():
                if name in sides:
                    reference.head_rows(total[name], *sides[name])[...] = x**power
                elif name == "lse":
                    row = total["lse"][h] if q.ndim == 3 else total["lse"][span.batch, h]
                    row[span.query_row : span.query_row + span.queries] = x**power
                elif name == "position_bias":
                    total[name][h] += x**power
                else:
                    shared = total[name].ndim == 2
                    (total[name] if shared else total[name][h])[...] += x**power
    return {name: x ** (1 / power) for name, x in merge_tied(case, total).items()}


def _head_sizes(
    q: np.ndarray, dz: np.ndarray, k: np.ndarray, v: np.ndarray, given: dict[str, Any], worst: bool
) -> dict[str, np.ndarray]:
    """Error per unit roundoff of equations (1) to (11) of relpos.reference, to first order.

    A product hands the errors of its factors on, and rounds each partial sum. Errors add up by
    absolute values (worst) or by squares, as independent errors do. The partial sums of n terms,
    added one after the other, then come to u sqrt(n / 6) times the root of the sum of squares:
    NumPy, which adds in parallel lanes, is better off than any tile kernel.

    A score s_ij is off by E_ij, which changes p_ij by p_ij E_ij, and s_ij - lse_i is rounded at its
    size: 25 units where dropout leaves a row nothing but what is e^-25 of its sum. The error R_i of
    the row's lse all p_ij share: that does not average out over the keys, and is carried on its own.
    So is the error of dz_i . z_i. The softcap's slope 1 - t^2 is off by what changes t.
    """
    power = 1 if worst else 2
    terms, seen, keep = given["terms"], given["visible"], given["keep"]
    u, softcap = given["position_bias"], given["softcap"]
    scale = reference.default_scale(q.shape[1]) if given["scale"] is None else given["scale"]
    names = reference.term_names(term.kind for term in terms)
    bias = np.zeros(q.shape[1]) if u is None else np.asarray(u, np.float64)
    terms = [t._replace(table=np.asarray(t.table, np.float64)) for t in terms]
    gather, collect = reference.take_relation, reference.sum_relation

    def add(*sizes: Any) -> np.ndarray:
        return sum(np.abs(x) ** power for x in sizes) ** (1 / power)  # type: ignore[return-value]

    def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (np.abs(x) ** power @ np.abs(y) ** power) ** (1 / power)

    def partial_sums(n: Any) -> Any:
        return 1 if worst else np.sqrt(1 + n / 6)

    def in_sequence(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return product(x, y) * partial_sums(x.shape[1])

    def shared(error: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Of x . y, where the elements of each row of x are off by the same error."""
        return error * (product(x, y) if worst else np.abs(x @ y))

    def gathered(rows: np.ndarray, index: np.ndarray) -> np.ndarray:
        return gather(rows**power, index) ** (1 / power)

    def collected(x: np.ndarray, error: np.ndarray, index: np.ndarray, T: int) -> np.ndarray:
        """Of sum_relation(x), the elements of x being off by error, added in sequence."""
        own = collect(np.abs(error) ** power, index, T)
        partial = collect(np.abs(x) ** power, index, T)
        return (own + partial * partial_sums(collect(np.ones_like(x), index, T)) ** power) ** (
            1 / power
        )

    # (1): E, the error of a score.
    parts, plus = in_sequence(q, k.T), np.zeros((len(q), len(k)))
    for kind, table, index in terms:
        if kind == "key":
            parts = add(parts, gathered(in_sequence(add(q, bias), table.T), index))
        elif kind == "query":
            turned = index.swapaxes(-1, -2)
            parts = add(parts, gathered(in_sequence(k, table.T), turned).T)
        elif kind == "bias":
            rows = np.broadcast_to(np.abs(table[:, 0]), (len(q), len(table)))
            plus = add(plus, gathered(rows, index))
    scores = {"scale": scale, "visible": np.ones_like(seen), "position_bias": u}
    s, _ = reference.attention_scores(q, k, terms, **scores)
    E = add(parts * scale, plus) if worst else add(s, parts * scale, plus)
    # (2): t = tanh(s / softcap), each of quotient, tanh and product rounded.
    slope, slope_error = np.ones_like(s), np.zeros_like(s)
    if softcap:
        t = np.tanh(s / softcap)
        slope = 1 - t**2
        E = add(slope * E, slope * s, 2 * softcap * t)
        slope_error = add(slope, 2 * t * E / softcap)
    # (3): R, the error of lse, and S, that of p_ij but for R.
    s, lse = reference.attention_scores(q, k, terms, **{**scores, "visible": seen}, softcap=softcap)
    p = reference.attention_probabilities(s, lse)
    lse = np.where(np.isneginf(lse), 0, lse)
    total = in_sequence(p, np.ones((len(k), 1)))
    R = add(np.sum(p * E, axis=1)[:, None], lse[:, None], total)
    S = add(1, np.where(seen, s - lse[:, None], 0), np.where(seen, E, 0))  # exp, its argument
    sizes = {"lse": add(1, R)[:, 0]}
    # (4) and (5).
    kept = p if keep is None else p * keep
    z, z_size = kept @ v, add(product(kept * S, v), in_sequence(kept, v))
    dp, dp_size = dz @ v.T, in_sequence(dz, v.T)
    dv = kept * add(S, R)
    sizes["v"] = add(product(dv.T, dz), in_sequence(kept.T, dz))
    for name, (kind, table, index) in zip(names, terms, strict=True):
        if kind == "value":
            T = len(table)
            P = collect(kept, index, T)
            P_size = np.maximum(collect(kept * S, index, T), collected(kept, kept * S, index, T))
            z, z_size = z + P @ table, add(z_size, product(P_size, table), in_sequence(P, table))
            dp = dp + gather(dz @ table.T, index)
            dp_size = add(dp_size, gathered(in_sequence(dz, table.T), index))
            sizes[name] = add(product(add(P_size, P * R).T, dz), in_sequence(P.T, dz))
    z_size = add(z_size, z, R * z)
    sizes["out"] = z_size
    # (6) and (7). D: the error of dz . z, and what it leaves in ds, but for p.
    D = add(*np.moveaxis(dz * z_size, 1, 0), np.zeros(len(q)))[:, None]
    delta = np.sum(dz * z, axis=1)[:, None]
    if keep is not None:
        dp, dp_size = dp * keep, dp_size * keep
    dp = np.abs(dp) + np.abs(delta) if worst else dp - delta
    with_delta, ds = p * slope, p * dp * slope
    ds_size = add(ds * S, with_delta * dp_size, p * dp * slope_error)
    for name, (kind, table, index) in zip(names, terms, strict=True):
        if kind == "bias":  # (10), not scaled
            T = len(table)
            dc, ones = collect(ds, index, T), np.ones((1, len(q)))
            dc_size = add(
                collected(ds, ds_size, index, T), dc * R, collect(with_delta, index, T) * D
            )
            sizes[name] = add(product(ones, dc_size), in_sequence(ones, dc)).T
    ds, ds_size, with_delta = (abs(scale) * x for x in (ds, ds_size, with_delta))
    # (8) to (10).
    dq = add(product(ds_size, k), in_sequence(ds, k), shared(R, ds, k), shared(D, with_delta, k))
    all_sizes = add(ds_size, ds * R, with_delta * D)
    dk = add(product(all_sizes.T, q), in_sequence(ds.T, q))
    du, ones = np.zeros((1, q.shape[1])), np.ones((1, len(q)))
    for name, (kind, table, index) in zip(names, terms, strict=True):
        T = len(table)
        if kind == "key":
            dA = collect(ds, index, T)
            dA_size = add(
                collected(ds, ds_size, index, T), dA * R, collect(with_delta, index, T) * D
            )
            row = add(product(dA_size, table), in_sequence(dA, table))
            dq = add(dq, row)
            du = add(du, product(ones, row), product(in_sequence(ones, dA), table))
            biased = add(q, bias)
            sizes[name] = add(product(dA_size.T, biased), in_sequence(dA.T, biased))
        elif kind == "query":
            turned = index.swapaxes(-1, -2)
            dB = collect(ds.T, turned, T)
            dB_size = collected(ds.T, all_sizes.T, turned, T)
            dk = add(dk, product(dB_size, table), in_sequence(dB, table))
            sizes[name] = add(product(dB_size.T, k), in_sequence(dB.T, k))
    sizes |= {"q": dq, "k": dk}
    if u is not None:
        sizes["position_bias"] = du[0]
    return sizes


def compare(name: str, got: np.ndarray, truth: Oracle) -> str | None:
    """None, or in words how `got` is too far from the reference. Derived, not chosen:

    float64   n u size, the first-order bound of any order of summing n terms with unit roundoff u.
    float32   2 times (results) or 3 times (gradients) the error of the plain float32 formula, largest
              against largest, plus a floor; and root mean square against the same. Errors count in
              units of the noise that is to be expected of that element: in rows without large
              scores, or beside a large row of a table, a small error is not hidden by theirs.

    The floor is u noise for the mean square and 6 u noise for the largest: a run compares some
    1e8 numbers, and the largest of that many normal errors is 5.7 deviations out. Where few independent
    roundings make the plain error (few rows, or a softmax with one winner) it may be small by luck,
    and says little about what is possible: there the mean square is not compared, and the floor is
    sqrt(n) u size, what n roundings of random sign amount to (Higham & Mary 2019). NaN and
    infinities must stand in the same places. What underflows, times numbers as large as any that
    are multiplied here, may be lost.
    """
    exact, plain, size = truth.exact[name], truth.plain[name], truth.size[name]
    if got.shape != exact.shape:
        return f"{name}: shape {got.shape}, expected {exact.shape}"
    with np.errstate(invalid="ignore"):
        odd = ~np.isfinite(exact)
        wrong = odd & ~((got == exact) | (np.isnan(got) & np.isnan(exact)))
        error = np.where(odd, 0, np.abs(got - exact))
        plain_error = np.where(odd | ~np.isfinite(plain), 0, np.abs(plain - exact))
        finite_size = np.where(np.isfinite(size), size, 0)
    unit = float(np.finfo(got.dtype).eps) / 2
    tiny = float(np.finfo(got.dtype).tiny) * 1000 * max(1.0, float(finite_size.max(initial=0)))
    mean_square, square_bound = 0.0, np.inf
    if got.dtype == np.float64:
        bound = truth.terms * unit * finite_size + tiny
    else:
        factor = 2 if name in ("out", "lse") else 3
        noise = np.where(np.isfinite(truth.noise[name]), truth.noise[name], 0)
        expected = noise + tiny / unit
        relative_plain = plain_error / expected
        stable = truth.rows >= 64 and _independent(relative_plain, name) >= 32
        floor = 6 * noise if stable else np.sqrt(truth.terms) * finite_size
        bound = factor * relative_plain.max(initial=0) * noise + unit * floor + tiny
        if stable:
            square_bound = factor * np.sqrt(np.mean(relative_plain**2)) + unit
            mean_square = np.sqrt(np.mean((error / expected) ** 2))
    if not np.any(wrong | ~(error <= bound)) and mean_square <= square_bound:
        return None
    excess = np.where(wrong | np.isnan(error), np.inf, error / np.maximum(bound, 1e-300))
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(excess)), got.shape))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.nanmax(np.where(exact == 0, 0, error / np.abs(exact)), initial=0)
        l2 = np.sqrt(np.nansum(error**2) / max(np.nansum(np.where(odd, 0, exact) ** 2), 1e-300))
    return (
        f"{name}: max abs {np.nanmax(error):.3g}, max rel {relative:.3g}, L2 rel {l2:.3g}, "
        f"rms {mean_square:.3g} (bound {square_bound:.3g}); at {index} got {got[index]!r}, "
        f"expected {exact[index]!r}, bound {np.broadcast_to(bound, got.shape)[index]:.3g}"
    )


def _independent(error: np.ndarray, name: str) -> float:
    """How many independent errors make up the mean square: the participation ratio of the rows.

    Those of one row share the errors of its probabilities, and count as one.
    """
    squares = error**2 if name == "lse" else np.sum(error**2, axis=-1)
    fourth = float(np.sum(squares**2))
    return float(np.sum(squares)) ** 2 / fourth if fourth > 0 else 0.0
