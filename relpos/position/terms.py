# SPDX-License-Identifier: Apache-2.0
"""What every scheme becomes: relation terms and their maps, as relpos.h states them.

    s_ij  = scale * ( q_i . k_j + (q_i + position_bias) . key.table[a(i,j)]
                                + k_j . query.table[b(i,j)] ) + bias.table[t(i,j)]
    out_i = sum_j p_ij ( v_j + value.table[v(i,j)] )

A scheme has parameters; its `lower(shape)` makes the terms' tables of them, for the distances that
the call can meet, and each term knows the way back: how the gradient of its table becomes the
gradient of the parameters, by name. So a new scheme is one small file: a frozen dataclass with
`parameters`, checks, and `lower`.

Distances are key minus query, d = j - (i + start), everywhere (docs/schemes.md). A band
maps them to rows, left and right >= 0:

    row   0                 left      left + right
    d     -left or less     0         right or more
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from relpos.position.arrays import Array, Integers, Table

Kind = Literal["key", "query", "bias", "value"]
Counts = npt.NDArray[np.int64]
# The gradient of a lowered table -> that of the parameters it was made of.
Pull = Callable[[Array], dict[str, Array]]

ROUNDINGS = 1e-13  # more than those of logarithms: no bucket that is a whole number is lost to them
MAX_ROWS = 1 << 26  # of a table that a scheme makes; longer ones are mistakes in positions


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The queries or the keys of a call: rows of the arrays, and where each sequence lies. Calls
    may share the arrays, which then cannot be written."""

    rows: int  # N or M of padded arrays, tokens of packed ones
    first: Counts  # (B,): first row of sequence b, counted through the whole batch
    counts: Counts  # (B,): rows in use
    packed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What a scheme may know of a call when it makes its terms."""

    H: int
    D: int
    Dv: int
    queries: Side
    keys: Side
    start: Counts  # (B,): position of query 0
    lowest: int  # the distances of the pairs that some query may see, as far as causal and
    highest: int  # window say; lowest > highest where there is no pair
    scale: float | None = None  # of the call, where it gives one

    @property
    def B(self) -> int:
        return len(self.start)

    def same_as(self, other: Shape) -> bool:
        """Whether every scheme makes the same terms for both."""
        return self is other or bool(_plain(self) == _plain(other))

    @property
    def default_scale(self) -> float:
        return 1.0 / math.sqrt(max(self.D, 1))

    def band(self, limit: int | None = None) -> tuple[int, int]:
        """(left, right) that no pair of the call exceeds; at most `limit` on each side."""
        left, right = max(-self.lowest, 0), max(self.highest, 0)
        if self.lowest > self.highest:
            left = right = 0
        if limit is not None:
            limit = operator.index(limit)  # of NumPy's types few go as far as distances do
            left, right = min(left, limit), min(right, limit)
        if left + 1 + right > MAX_ROWS:
            raise ValueError(
                f"position: distances from {-left} to {right} need a table of {left + 1 + right} "
                f"rows, at most {MAX_ROWS} are made; see query_start and the positions"
            )
        return left, right

    def positions(self) -> tuple[Counts, Counts]:
        """Where queries and keys stand: int64 (N,) or (B, N) and (M,), packed (tokens,)."""
        return _places(self.queries, self.start), _places(self.keys, np.zeros_like(self.start))


def _plain(x: Any) -> Any:
    """A shape, or a part of it, as tuples and numbers."""
    if dataclasses.is_dataclass(x):
        return tuple(_plain(getattr(x, field.name)) for field in dataclasses.fields(x))
    return tuple(x.tolist()) if isinstance(x, np.ndarray) else x


def _places(side: Side, start: Counts) -> Counts:
    if side.packed:
        return np.arange(side.rows) - np.repeat(side.first - start, side.counts)
    index = np.arange(side.rows)
    if len(start) == 0 or (start == start[0]).all():
        return index + (start[0] if len(start) else np.int64(0))
    return index + start[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """A map from distances: the row is clip(d, -left, right) + left, or buckets of that."""

    left: int
    right: int
    beyond: Literal["clip", "none"] = "clip"
    buckets: Integers | None = None  # (left + 1 + right,)
    query_positions: Integers | None = None  # (N,), (B, N) or (tokens,)
    key_positions: Integers | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A map from a matrix of labels, -1: no relation."""

    labels: npt.NDArray[np.signedinteger]  # (B|1, H|1, N, M); (count,), (H|1, count) with starts
    starts: Counts | None = None  # (B,)


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """A map from a list of labelled edges, sorted by query and key."""

    starts: Counts  # (rows + 1,): of the edges of each query
    keys: Integers
    labels: Integers


@dataclass(slots=True, eq=False)  # made at every call: frozen it would take three times as long
class Term:
    """One term: its kind, table, map, and how its gradient goes back."""

    name: str  # of the argument, in messages
    kind: Kind
    table: Array  # (T, width) or (H, T, width); bias (T,) or (H, T)
    map: Band | Labels | Edges
    pull: Pull | None  # None: nothing to learn here


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Turns pairs of q and k by position * frequency before they meet (RoPE)."""

    frequencies: npt.NDArray[np.float64]  # (width / 2,)
    interleaved: bool
    rotate_keys: bool
    query_positions: Integers | None = None
    key_positions: Integers | None = None


@dataclass(slots=True, eq=False)  # as Term
class Lowered:
    """A scheme, or several of them, as the core takes it. Nobody writes to it."""

    terms: tuple[Term, ...] = ()
    position_bias: Array | None = None  # (H, D)
    position_bias_name: str = ""  # of the parameter it is
    scale: float | None = None  # None: the scheme does not mind
    rotation: Rotation | None = None

    def of_kind(self, kind: Kind) -> list[Term]:
        return [term for term in self.terms if term.kind == kind]

    def renamed(self, rename: Callable[[str], str]) -> Lowered:
        """The same with other names of its parameters."""

        def renamed_pull(pull: Pull) -> Pull:
            return lambda raw: {rename(name): x for name, x in pull(raw).items()}

        terms = tuple(
            dataclasses.replace(
                term,
                name=rename(term.name),
                pull=None if term.pull is None else renamed_pull(term.pull),
            )
            for term in self.terms
        )
        bias_name = rename(self.position_bias_name) if self.position_bias_name else ""
        return dataclasses.replace(self, terms=terms, position_bias_name=bias_name)


S = TypeVar("S", bound="Scheme")


class Scheme:
    """The base of all position schemes: names of the parameters, and how to lower them.

    A subclass is a frozen dataclass. `parameters` names the fields that are learned, each an array
    or None; the gradients of a call bear these names (never q, k or v).
    """

    __slots__ = ()
    parameters: ClassVar[tuple[str, ...]] = ()

    def lower(self, shape: Shape) -> Lowered:
        """The terms of one call."""
        raise NotImplementedError

    def at_distances(self, shape: Shape, distances: Counts) -> Term | None:
        """For a scheme whose tables grow with the distances, and which is one term: this term with
        a row for each of these alone, mapped by whoever asks. None: it has no such way."""
        return None

    def tables(self) -> dict[str, Table]:
        """The parameters that are there, by name."""
        found = {name: getattr(self, name) for name in self.parameters}
        return {name: table for name, table in found.items() if table is not None}

    def with_tables(self: S, tables: Mapping[str, Table]) -> S:
        """The same scheme over other arrays; of the same shapes they are not checked again."""
        changed: S
        if any(tuple(x.shape) != tuple(getattr(self, name).shape) for name, x in tables.items()):
            changed = dataclasses.replace(self, **tables)  # type: ignore[type-var]
            return changed
        changed = object.__new__(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            of_field = tables.get(field.name, getattr(self, field.name))
            object.__setattr__(changed, field.name, of_field)
        return changed

    def __repr__(self) -> str:
        from relpos.position.arrays import describe

        parts = [f"{name}={describe(table)}" for name, table in self.tables().items()]
        return f"{type(self).__name__}({', '.join(parts)})"


def subclasses(scheme: type[Scheme]) -> Iterator[type[Scheme]]:
    """Every scheme there is."""
    for below in scheme.__subclasses__():
        yield below
        yield from subclasses(below)


def itself(name: str) -> Pull:
    """The table is the parameter: so are the gradients."""
    return lambda raw: {name: raw}


def bucket_band(rows_of: Callable[[Counts], Counts], left: int, right: int) -> Band:
    """The band of a function of the distance, as short as it can be: what is the same from some
    distance on is left to clipping."""
    rows = np.asarray(rows_of(np.arange(-left, right + 1)), np.int32)
    same_left = int(np.argmax(rows != rows[0])) if (rows != rows[0]).any() else len(rows)
    same_right = int(np.argmax(rows[::-1] != rows[-1])) if (rows != rows[-1]).any() else len(rows)
    cut_left = min(max(same_left - 1, 0), left)
    cut_right = min(max(same_right - 1, 0), right)
    kept = np.ascontiguousarray(rows[cut_left : len(rows) - cut_right])
    kept.flags.writeable = False  # calls may share it
    return Band(left - cut_left, right - cut_right, "clip", kept)
