# SPDX-License-Identifier: Apache-2.0
"""Positions other than 0, 1, 2, ...: given ones, and those of a plane."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relpos.position.arrays import MAX_POSITION, Integers, Table, check_count, check_positions
from relpos.position.terms import Band, Counts, Labels, Lowered, Scheme, Shape, Side, Term

MAX_START = 1 << 40  # the core's
FEW = 16  # a table of more rows than this for each pair of a call is larger than what replaces it


def _check_scheme(name: str, scheme: Any) -> None:
    if not isinstance(scheme, Scheme):
        raise TypeError(f"{name}: expected a scheme as relpos.Shaw, got {type(scheme).__name__}")


def _check_side(name: str, positions: Integers, side: Side, B: int, rows: str) -> None:
    """Whether there is a position for every row of an array."""
    tokens = "tokens" if side.packed else rows
    if positions.shape in [(side.rows,)] + ([] if side.packed else [(B, side.rows)]):
        return
    allowed = f"({tokens}={side.rows},)"
    if not side.packed:
        allowed += f" or (B={B}, {tokens}={side.rows})"
    raise ValueError(
        f"{name}: expected integers {allowed}, got {positions.dtype} {positions.shape}"
    )


def _extremes(positions: Integers, side: Side) -> list[tuple[int, int] | None]:
    """The lowest and the highest position of every sequence, of the rows in use."""
    found: list[tuple[int, int] | None] = []
    for b, count in enumerate(side.counts):
        if side.packed:
            own = positions[side.first[b] : side.first[b] + count]
        else:
            own = (positions if positions.ndim == 1 else positions[b])[:count]
        found.append((int(own.min()), int(own.max())) if own.size else None)
    return found


def _at_pairs(
    scheme: Scheme, shape: Shape, queries: Integers, keys: Integers, rows: int
) -> Term | None:
    """The term of a scheme that would make a table of so many rows, for few pairs of positions far
    apart: with a row for every distance that there is, which the pairs have by label."""
    if shape.queries.packed or shape.keys.packed:
        return None
    sequences = math.prod(np.broadcast_shapes(queries.shape[:-1], keys.shape[:-1]))
    count = sequences * shape.queries.rows * shape.keys.rows
    if count == 0 or rows <= FEW * count:
        return None
    apart = keys[..., None, :].astype(np.int64) - queries[..., :, None]
    distances, labels = np.unique(apart, return_inverse=True)
    term = scheme.at_distances(shape, distances)
    if term is None:
        return None
    found = labels.astype(np.int32).reshape((-1, 1, *apart.shape[-2:]))
    return dataclasses.replace(term, map=Labels(found))


def at_positions(
    scheme: Scheme, shape: Shape, queries: Integers, keys: Integers, names: tuple[str, str]
) -> Lowered:
    """`scheme` lowered with every distance measured between these positions."""
    _check_side(names[0], queries, shape.queries, shape.B, "N")
    _check_side(names[1], keys, shape.keys, shape.B, "M")
    lowest, highest = 0, -1
    for q, k in zip(_extremes(queries, shape.queries), _extremes(keys, shape.keys), strict=True):
        if q is not None and k is not None:
            low, high = k[0] - q[1], k[1] - q[0]
            empty = lowest > highest
            lowest = low if empty else min(lowest, low)
            highest = high if empty else max(highest, high)
    sparse = _at_pairs(scheme, shape, queries, keys, max(highest, 0) - min(lowest, 0) + 1)
    if sparse is not None:
        return Lowered((sparse,))
    lowered = scheme.lower(dataclasses.replace(shape, lowest=lowest, highest=highest))
    terms = []
    for term in lowered.terms:
        if not isinstance(term.map, Band) or term.map.query_positions is not None:
            raise ValueError(
                f"position: the {term.kind} term of {type(scheme).__name__} does not go by "
                "distance; it takes no positions"
            )
        band = dataclasses.replace(term.map, query_positions=queries, key_positions=keys)
        terms.append(dataclasses.replace(term, map=band))
    rotation = lowered.rotation
    if rotation is not None:
        if rotation.query_positions is not None:
            raise ValueError(
                f"position: {type(scheme).__name__} has positions already; it takes no others"
            )
        rotation = dataclasses.replace(rotation, query_positions=queries, key_positions=keys)
    return dataclasses.replace(lowered, terms=tuple(terms), rotation=rotation)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CrossPositions(Scheme):
    """A scheme over given positions of queries and keys, as in encoder-decoder attention.

        d(i,j) = key_positions[j] - query_positions[i]   in place of   j - (i + start)

    scheme: any scheme whose terms go by distance (`Shaw`, `T5Bias`, `RoPE`, ...).
    query_positions: int (N,), or (B, N), packed (tokens,); below 2^30 in magnitude.
    key_positions: int (M,), or (B, M), packed (tokens,).

    Causal masks and windows go on counting rows. Gradients bear the scheme's names.
    """

    scheme: Scheme
    query_positions: Any
    key_positions: Any

    def __post_init__(self) -> None:
        _check_scheme("scheme", self.scheme)
        for name in ("query_positions", "key_positions"):
            object.__setattr__(self, name, check_positions(name, getattr(self, name)))

    def tables(self) -> dict[str, Table]:
        return self.scheme.tables()

    def with_tables(self, tables: Mapping[str, Table]) -> CrossPositions:
        return dataclasses.replace(self, scheme=self.scheme.with_tables(tables))

    def lower(self, shape: Shape) -> Lowered:
        names = ("query_positions", "key_positions")
        return at_positions(self.scheme, shape, self.query_positions, self.key_positions, names)

    def __repr__(self) -> str:
        return f"CrossPositions({self.scheme!r})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plane(Scheme):
    """Positions in a plane, row by row: one scheme for the rows' distance, one for the columns'.

        p = i + start,  (y, x) = (p // width, p % width);  keys: (j // width, j % width)
        the terms of `rows` at y_j - y_i, plus those of `columns` at x_j - x_i

    rows, columns: a scheme each, of the same kind or not. Music Transformer's and the relative
        attention of images are `Plane(Shaw(...), Shaw(...), width=...)`.
    width: int. The number of columns, at most 2^30.

    Gradients are named row_... and column_..., as row_key_table.
    """

    rows: Scheme
    columns: Scheme
    width: int = field(kw_only=True)

    def __post_init__(self) -> None:
        _check_scheme("rows", self.rows)
        _check_scheme("columns", self.columns)
        if check_count("width", self.width, 1) > MAX_POSITION:
            raise ValueError(f"width: expected 2^30 or less, got {self.width}")

    def tables(self) -> dict[str, Table]:
        both = (("row_", self.rows), ("column_", self.columns))
        return {prefix + n: x for prefix, scheme in both for n, x in scheme.tables().items()}

    def with_tables(self, tables: Mapping[str, Table]) -> Plane:
        def part(prefix: str) -> dict[str, Table]:
            return {n[len(prefix) :]: x for n, x in tables.items() if n.startswith(prefix)}

        return dataclasses.replace(
            self,
            rows=self.rows.with_tables(part("row_")),
            columns=self.columns.with_tables(part("column_")),
        )

    def lower(self, shape: Shape) -> Lowered:
        from relpos.position.combine import combine

        check_start(shape.start)
        q, k = shape.positions()
        width = int(self.width)
        names = ("query_positions", "key_positions")
        parts = []
        for prefix, scheme, places in (
            ("row_", self.rows, (q // width, k // width)),
            ("column_", self.columns, (q % width, k % width)),
        ):
            own = [_in_plane(x) for x in places]
            lowered = at_positions(scheme, shape, own[0], own[1], names)
            if lowered.rotation is not None:
                raise ValueError(
                    "position: RoPE does not go into a Plane; it turns by one position"
                )
            parts.append((type(scheme).__name__, lowered.renamed(_prefixer(prefix))))
        return combine(parts, shape.scale)

    def __repr__(self) -> str:
        return f"Plane({self.rows!r}, {self.columns!r}, width={self.width})"


def check_start(start: Counts) -> None:
    """What the core says of it, before it is computed with."""
    for number in start.tolist():
        if abs(number) > MAX_START:
            raise ValueError(f"query_start: expected a position within 2^40 of 0, got {number}")


def _in_plane(places: Counts) -> Integers:
    """Rows or columns as the core takes them."""
    far = places[np.abs(places) >= MAX_POSITION]
    if far.size > 0:
        raise ValueError(
            f"query_start: expected rows of the plane below 2^30 in magnitude, got {far[0]}; see "
            "width too"
        )
    return np.ascontiguousarray(places, np.int32)


def _prefixer(prefix: str) -> Any:
    return lambda name: prefix + name
