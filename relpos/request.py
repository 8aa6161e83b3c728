# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call of attention: read, checked as far as Python can see, and made into the
tuple that the core takes."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from relpos import _core
from relpos.device_array import (
    DeviceArray,
    Placement,
    check_beside,
    memory_of,
    on_host,
    place_of,
    shares_memory,
)
from relpos.position import combine
from relpos.position.arrays import (
    as_array,
    as_integers,
    check_choice,
    check_int64,
    check_magnitude,
    check_number,
    check_truth,
    describe,
    integer_of,
    number_of,
)
from relpos.position.combine import Position
from relpos.position.graph import Pairs, matrices
from relpos.position.terms import Band, Edges, Labels, Lowered, Shape, Side, Term
from relpos.reference import philox4x32

Integers = npt.ArrayLike  # lengths, offsets and starts
Layout = Literal["bhnd", "bnhd"]
Mask = Any  # bool array, list of bool arrays, or (flat, starts)
Window = int | tuple[int | None, int | None] | None
Seed = int | tuple[int, int, int, int]
Counts = npt.NDArray[np.int64]

ARRAYS = (np.ndarray, DeviceArray)
MAX_WINDOW = 1 << 40  # the core's

KINDS = {"key": _core.KEY, "query": _core.QUERY, "bias": _core.BIAS, "value": _core.VALUE}


@dataclass(slots=True, eq=False)  # frozen it would take 3 us more to make
class Request:
    """A call as it was asked for, in the types of the core."""

    q: Any
    k: Any
    v: Any
    out: Any
    causal: bool
    lengths: Counts | None
    key_lengths: Counts | None
    offsets: Counts | None
    key_offsets: Counts | None
    query_start: Counts | None
    mask: Pairs | None
    window: tuple[int, int] | None
    layout: Layout
    scale: float | None
    softcap: float
    dropout: tuple[float, int, int, int, int] | None
    place: Placement | None  # None: the arrays lie on the host
    precision: str
    shape: Shape | None = field(init=False)  # None: the arrays do not fit each other

    def __post_init__(self) -> None:
        self.shape = _shape(self)
        if self.mask is not None and self.shape is not None:
            self.mask.check("mask", self.shape)

    @property
    def ragged(self) -> bool:
        """May sequences have different numbers of rows, or of keys?"""
        own = (self.lengths, self.key_lengths, self.offsets, self.key_offsets)
        return any(x is not None for x in own)


def read_request(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    *,
    causal: bool,
    lengths: Any,
    key_lengths: Any,
    offsets: Any,
    key_offsets: Any,
    query_start: Any,
    mask: Mask,
    window: Window,
    layout: Layout,
    scale: float | None,
    softcap: float,
    dropout: float,
    seed: Seed,
    precision: str,
) -> Request:
    """The arguments of `relpos.attention`, checked one by one."""
    q, k, v, out = _arrays(q, k, v, out)
    check_choice("precision", precision, ("f32", "bf16"))
    check_choice("layout", layout, ("bhnd", "bnhd"))
    packed = integers("offsets", offsets)
    start = integers("query_start", query_start)
    if start is not None and start.ndim == 0:
        start = np.full(np.shape(q)[:1] if packed is None else (max(packed.size - 1, 0),), start)
    return Request(
        q=q,
        k=k,
        v=v,
        out=out,
        causal=check_truth("causal", causal),
        lengths=integers("lengths", lengths),
        key_lengths=integers("key_lengths", key_lengths),
        offsets=packed,
        key_offsets=integers("key_offsets", key_offsets),
        query_start=start,
        mask=None if mask is None else matrices("mask", mask, ("bool",)),
        window=_window(window),
        layout=layout,
        scale=_scale(scale),
        softcap=_softcap(softcap),
        dropout=_dropout(dropout, seed),
        place=Placement.of("q", q, precision, k, v, out) if isinstance(q, DeviceArray) else None,
        precision=precision,
    )


def _arrays(q: Any, k: Any, v: Any, out: Any) -> tuple[Any, Any, Any, Any]:
    """The arrays of a call, all on the host or all on one GPU, there to be read on q's stream."""
    given = (q, k, v) if out is None else (q, k, v, out)
    if all(type(x) is np.ndarray for x in given):
        return q, k, v, out
    where = place_of("q", q)
    others = {"k": k, "v": v} | ({} if out is None else {"out": out})
    for name, x in others.items():
        check_beside(name, place_of(name, x), where)
    q = as_array("q", q)
    stream = q.stream if isinstance(q, DeviceArray) else None
    found = {name: as_array(name, x, stream) for name, x in others.items()}
    return q, found["k"], found["v"], found.get("out")


def make_call(request: Request, lowered: Lowered) -> _core.Call:
    """What forward and backward share, as the core takes it."""
    scale = request.scale if request.scale is not None else lowered.scale
    shape = request.shape
    if scale is None or (request.scale is None and shape and scale == shape.default_scale):
        scale = 0.0
    mask = request.mask
    return (
        request.layout,
        request.causal,
        float(scale),
        request.lengths,
        request.key_lengths,
        request.offsets,
        request.key_offsets,
        request.query_start,
        tuple([_term(term, request.place) for term in lowered.terms]),
        memory_of("position_bias", lowered.position_bias, request.place),
        request.window,
        mask if mask is None else mask.numbers if mask.starts is None else mask[:2],
        request.softcap,
        request.dropout,
        on_host(request.precision) if request.place is None else request.place.core,
    )


def lower(request: Request, shape: Shape, position: Position) -> Lowered:
    """The terms of a call, their tables where its arrays lie."""
    if request.place is None:
        return combine.lower(position, shape, request.scale)
    position = _on_device(position, request.place)
    request.place = request.place.reading(*combine.tables_of(position).values())
    return _constants_on_device(combine.lower(position, shape, request.scale), request.place)


def _on_device(position: Position, place: Placement) -> Position:
    """The same schemes over tables that are taken from their libraries, each once."""
    taken: dict[int, Any] = {}
    tables = combine.tables_of(position)
    for name, table in tables.items():
        check_beside(name, place_of(name, table), place.like.device)
        if id(table) not in taken:
            taken[id(table)] = as_array(name, table, place.stream)
    return combine.with_tables(position, {name: taken[id(x)] for name, x in tables.items()})


def _constants_on_device(lowered: Lowered, place: Placement) -> Lowered:
    """Tables that nobody learns are made by their schemes, on the host."""

    def there(term: Term) -> Term:
        table: Any = term.table
        if term.pull is not None or isinstance(table, DeviceArray):
            return term
        table = place.like.constant(table)
        return dataclasses.replace(term, table=table)

    return dataclasses.replace(lowered, terms=tuple(map(there, lowered.terms)))


def check_apart(out: Any, request: Request, lowered: Lowered) -> None:
    """Refuses an `out` that overlaps labels or a mask, which are read where they lie while it is
    written, or a q or k of which the core sees what it is turned to. It looks itself at all else."""
    apart = [
        (f"the labels of {term.name}", term.map.labels)
        for term in lowered.terms
        if isinstance(term.map, Labels)
    ]
    if request.mask is not None:
        apart.append(("mask", request.mask.numbers))
    if lowered.rotation is not None:
        apart += [("q", request.q), ("k", request.k)]
    for name, array in apart:
        if shares_memory(out, array):
            raise ValueError(f"out: shares memory with {name}; give an array of its own")


def _term(term: Term, place: Placement | None) -> _core.Term:
    kind = KINDS[term.kind]
    where = term.map
    table = memory_of(term.name, term.table, place)
    if isinstance(where, Band):
        beyond = _core.BEYOND_NONE if where.beyond == "none" else _core.BEYOND_CLIP
        return (
            term.name, kind, table, _core.MAP_BAND, where.left, where.right, beyond,
            where.buckets, where.query_positions, where.key_positions,
            None, None, None, None, None,
        )  # fmt: skip
    none = (0, 0, _core.BEYOND_CLIP, None, None, None)
    if isinstance(where, Labels):
        return (
            term.name, kind, table, _core.MAP_LABEL, *none,
            where.labels, where.starts, None, None, None,
        )  # fmt: skip
    assert isinstance(where, Edges)
    return (
        term.name, kind, table, _core.MAP_EDGES, *none,
        None, None, where.starts, where.keys, where.labels,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Single arguments
# --------------------------------------------------------------------------------------------------


def integers(name: str, values: Any) -> Counts | None:
    """An int64 array of its own, so that a context does not change with the caller's list."""
    if values is None:
        return None
    array = as_integers(name, values, "")
    check_magnitude(name, array)
    if array.dtype.kind not in "iu" and array.size > 0:
        raise TypeError(f"{name}: expected integers, got {describe(array)}")
    check_int64(name, array)
    return array.astype(np.int64, order="C")


def _window(window: Window) -> tuple[int, int] | None:
    """(left, right), -1 for no bound."""
    if window is None:
        return None
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"window: expected a number or (left, right), got {window!r}")
    bounds = []
    for side in sides:
        try:
            bound = -1 if side is None else operator.index(side)
        except TypeError:
            bound = None
        if bound is None or isinstance(side, bool):
            raise TypeError(f"window: expected integers or None, got {window!r}")
        if side is not None and bound < 0:
            raise ValueError(f"window: expected 0 or more on each side, or None, got {window!r}")
        if bound > MAX_WINDOW:
            raise ValueError(
                f"window: expected at most 2^40 on each side, got {window!r}; use None for no bound"
            )
        bounds.append(bound)
    return bounds[0], bounds[1]


def _scale(scale: float | None) -> float | None:
    if scale is None:
        return None
    number = number_of("scale", scale)
    if number == 0 or not math.isfinite(number):
        raise ValueError(
            f"scale: expected a finite number other than 0, got {scale}; "
            "leave it out for 1 / sqrt(D)"
        )
    return number


def _softcap(softcap: float) -> float:
    cap = check_number("softcap", softcap)
    if cap < 0:
        raise ValueError(f"softcap: expected 0 (none) or more, got {softcap}")
    return cap


def _dropout(rate: float, seed: Seed) -> tuple[float, int, int, int, int] | None:
    dropped = check_number("dropout", rate)
    if not 0 <= dropped < 1:
        raise ValueError(f"dropout: expected a rate from 0 to below 1, got {rate}")
    if isinstance(seed, tuple):
        words = tuple(integer_of("seed", word) for word in seed)
        if len(words) != 4 or not all(0 <= word < 1 << 32 for word in words):
            raise ValueError(f"seed: expected an integer or four words below 2^32, got {seed}")
    else:
        number = integer_of("seed", seed)
        if not 0 <= number < 1 << 64:
            raise ValueError(f"seed: expected 0 to 2^64 - 1, got {number}")
        words = (*_dropout_key(number), 0, 0) if dropped else (0, 0, 0, 0)
    return None if dropped == 0 else (dropped, words[0], words[1], words[2], words[3])


@functools.lru_cache(maxsize=64)
def _dropout_key(seed: int) -> tuple[int, int]:
    """rpi_philox_step_key(seed, 0): the first two words of Philox4x32-10."""
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint64)
    words = philox4x32(np.zeros(4, np.uint64), key, rounds=10)
    return int(words[0]), int(words[1])


# --------------------------------------------------------------------------------------------------
# The shape of a call
# --------------------------------------------------------------------------------------------------


def _shape(r: Request) -> Shape | None:
    """What schemes need to know. None where the core will refuse the arrays: its sentences about
    them are better than what could be said here."""
    q, k, v = r.q, r.k, r.v
    if not (isinstance(q, ARRAYS) and isinstance(k, ARRAYS) and isinstance(v, ARRAYS)):
        return None
    key_offsets = r.key_offsets
    key_lengths = r.key_lengths
    if key_offsets is None and key_lengths is None:
        key_offsets, key_lengths = r.offsets, r.lengths
    if q.ndim != (4 if r.offsets is None else 3):
        return None
    if k.ndim != (4 if key_offsets is None else 3) or v.ndim != k.ndim:
        return None
    heads, rows = (1, 2) if r.layout == "bhnd" else (2, 1)
    H = q.shape[heads if r.offsets is None else 1]
    widths = (int(H), int(q.shape[-1]), int(v.shape[-1]))
    if key_lengths is None and key_offsets is None and r.query_start is None:
        B, N, M = int(q.shape[0]), int(q.shape[rows]), int(k.shape[rows])
        return _shape_in_full(B, N, M, *widths, r.causal, r.window) if k.shape[0] == B else None
    queries = _side(q, rows, r.lengths, r.offsets)
    keys = _side(k, rows, key_lengths, key_offsets)
    if queries is None or keys is None or len(queries.counts) != len(keys.counts):
        return None
    start = r.query_start if r.query_start is not None else keys.counts - queries.counts
    if start.shape != (len(queries.counts),):
        return None
    return _shape_of(*widths, queries, keys, start, r.causal, r.window)


@functools.lru_cache(maxsize=16)
def _shape_in_full(
    B: int, N: int, M: int, H: int, D: int, Dv: int, causal: bool, window: tuple[int, int] | None
) -> Shape:
    """That of padded arrays of which every row is in use. Calls share it, so nobody may write."""
    queries, keys = _padded(B, N, None), _padded(B, M, None)
    assert queries is not None and keys is not None
    start = keys.counts - queries.counts
    for array in (queries.first, queries.counts, keys.first, keys.counts, start):
        array.setflags(write=False)
    return _shape_of(H, D, Dv, queries, keys, start, causal, window)


def _shape_of(
    H: int,
    D: int,
    Dv: int,
    queries: Side,
    keys: Side,
    start: Counts,
    causal: bool,
    window: tuple[int, int] | None,
) -> Shape:
    seen = (queries.counts > 0) & (keys.counts > 0)
    lowest, highest = 0, -1
    if seen.any():
        lowest = int((1 - queries.counts - start)[seen].min())
        highest = int((keys.counts - 1 - start)[seen].max())
        if causal:
            highest = min(highest, 0)
        left, right = window or (-1, -1)
        lowest = lowest if left < 0 else max(lowest, -left)
        highest = highest if right < 0 else min(highest, right)
    return Shape(H, D, Dv, queries, keys, start, lowest, highest)


def _side(x: Any, axis: int, lengths: Counts | None, offsets: Counts | None) -> Side | None:
    if offsets is None:
        return _padded(int(x.shape[0]), int(x.shape[axis]), lengths)
    if offsets.ndim != 1 or offsets.size == 0 or offsets[0] != 0 or offsets[-1] != len(x):
        return None
    counts = np.diff(offsets)
    return None if (counts < 0).any() else Side(len(x), offsets[:-1], counts, True)


def _padded(B: int, rows: int, lengths: Counts | None) -> Side | None:
    if lengths is None:
        lengths = np.full(B, rows, np.int64)
    if lengths.shape != (B,) or (lengths < 0).any() or (lengths > rows).any():
        return None
    return Side(rows, np.arange(B, dtype=np.int64) * rows, lengths, False)
