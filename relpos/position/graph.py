# SPDX-License-Identifier: Apache-2.0
"""Shaw's relations over a labelled directed graph (section 3.2 of the paper; RAT-SQL, GREAT)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from relpos.position import terms
from relpos.position.arrays import (
    Table,
    as_array,
    check_integers,
    check_table,
    describe,
    on_host,
)
from relpos.position.terms import Kind, Lowered, Scheme, Shape, Term, itself


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EdgeList:
    """The labelled edges of a batch of graphs, in any order.

    query, key: int (E,). Edge e goes from query[e] to key[e], both counted within their sequence.
    label: int (E,). Its relation, a row of the tables.
    sequence: int (E,). The sequence of the batch it belongs to. May be left out for one sequence.

    Several edges between the same two nodes add up: each adds its row of the table. Pairs without
    an edge have no relation and stay visible.
    """

    query: Any
    key: Any
    label: Any
    sequence: Any = None
    _last: list[Any] = field(init=False, default_factory=list)  # (key, edges) of the last call

    def __post_init__(self) -> None:
        for name in ("query", "key", "label", "sequence"):
            given = getattr(self, name)
            if given is None and name == "sequence":
                continue
            array = check_integers(name, given, "(E,)", (1,)).astype(np.int64)
            if name != "query" and len(array) != len(self.query):
                raise ValueError(
                    f"{name}: expected {len(self.query)} numbers as in query, got {len(array)}"
                )
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def __reduce__(self) -> tuple[Any, ...]:
        """By the constructor: copies are read-only too, which NumPy does not keep."""
        return EdgeList, (self.query, self.key, self.label, self.sequence)

    def sorted(self, shape: Shape, rows: int) -> terms.Edges:
        """The edges by query and key; `rows` is the height of the tables. Layers share the work."""
        sides = (shape.queries, shape.keys)
        key = (rows, *((s.rows, s.packed, s.first.tobytes(), s.counts.tobytes()) for s in sides))
        last: tuple[Any, terms.Edges] | None = self._last[0] if self._last else None
        if last is None or last[0] != key:
            last = (key, self._sort(shape, rows))
            self._last[:] = [last]
        return last[1]

    def _sort(self, shape: Shape, rows: int) -> terms.Edges:
        sequence = self.sequence
        if sequence is None:
            if shape.B != 1 and len(self.query) > 0:
                raise ValueError(
                    f"sequence: give that of every edge, there are {shape.B} sequences"
                )
            sequence = np.zeros_like(self.query)
        _check_range("sequence", sequence, np.full_like(sequence, shape.B))
        _check_range("query", self.query, shape.queries.counts[sequence])
        _check_range("key", self.key, shape.keys.counts[sequence])
        _check_range("label", self.label, np.full_like(sequence, rows))
        row = shape.queries.first[sequence] + self.query
        order = np.lexsort((self.label, self.key, row))
        total = shape.queries.rows if shape.queries.packed else shape.queries.rows * shape.B
        starts = np.zeros(total + 1, np.int64)
        np.cumsum(np.bincount(row, minlength=total), out=starts[1:])
        return terms.Edges(
            starts, self.key[order].astype(np.int32), self.label[order].astype(np.int32)
        )

    def __repr__(self) -> str:
        return f"EdgeList({len(self.query)} edges)"


def _check_range(name: str, values: Any, below: Any) -> None:
    bad = np.flatnonzero((values < 0) | (values >= below))
    if len(bad):
        e = int(bad[0])
        raise ValueError(f"{name}[{e}]: expected 0 to {int(below[e]) - 1}, got {int(values[e])}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShawGraph(Scheme):
    """Shaw's relations given as labels: attention over a labelled, directed graph.

        s_ij  = scale * ( q_i . k_j + q_i . key_table[label_ij] )
        out_i = sum_j softmax_j(s_ij) ( v_j + value_table[label_ij] )

    and, where bias_table is given, + bias_table[label_ij] on the score, not scaled. Label -1: no
    relation, the terms are absent for that pair; it is not a mask. Combine with `Shaw` in a tuple
    for distances besides labels (RAT-SQL).

    key_table: float32 (T, D) or (H, T, D). None: no such term.
    value_table: float32 (T, Dv) or (H, T, Dv). The same object as key_table ties the two.
    bias_table: float32 (T,) or (H, T).
    labels: int8, int16 or int32, from 0 to T - 1 or -1, used where it lies: (N, M) for all, or
        (B, N, M), or (B|1, H|1, N, M). For packed arrays a list of one (n, m) or (H|1, n, m) per
        sequence (copied into one), or (flat, starts): the matrices end to end, (count,) or
        (H|1, count), and int (B,) where each begins. They are checked, and then read again: no
        thread may change them during a call. Backward reads them, too: they must still be what
        forward saw, which for tensors, in relpos.torch, torch checks.
    edges: `EdgeList(query, key, label, sequence)` instead of labels.
    """

    parameters: ClassVar[tuple[str, ...]] = ("key_table", "value_table", "bias_table")

    key_table: Table = None
    value_table: Table = None
    bias_table: Table = field(default=None, kw_only=True)
    labels: Any = field(default=None, kw_only=True)
    edges: EdgeList | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.tables():
            raise ValueError("ShawGraph: give key_table, value_table or bias_table")
        for name, table in self.tables().items():
            if name == "bias_table":
                rows = check_table(name, table, "(T,) or (H, T)", (1, 2))[-1]
            else:
                rows = check_table(name, table, "(T, d) or (H, T, d)", (2, 3))[-2]
            if rows == 0:
                raise ValueError(f"{name}: expected at least one row, got {describe(table)}")
        if (self.labels is None) == (self.edges is None):
            raise ValueError("ShawGraph: give labels or edges, one of them")
        if self.edges is not None and not isinstance(self.edges, EdgeList):
            raise TypeError(f"edges: expected relpos.EdgeList, got {type(self.edges).__name__}")
        if self.labels is not None:
            object.__setattr__(self, "labels", matrices("labels", self.labels, LABEL_TYPES))

    @property
    def tied(self) -> bool:
        """Whether one table serves keys and values."""
        return self.key_table is not None and self.key_table is self.value_table

    def lower(self, shape: Shape) -> Lowered:
        made: list[Term] = []
        arrays: dict[int, Any] = {}
        kinds: dict[str, Kind] = {"key_table": "key", "value_table": "value", "bias_table": "bias"}
        maps: dict[int, terms.Edges] = {}
        for name, table in self.tables().items():
            array = arrays.setdefault(id(table), as_array(name, table))
            rows = array.shape[-1 if name == "bias_table" else -2]
            if self.edges is None:
                self.labels.check("labels", shape)
                flat, starts = self.labels.numbers, self.labels.starts
                where: terms.Labels | terms.Edges = terms.Labels(flat, starts)
            else:
                if rows not in maps:
                    maps[rows] = self.edges.sorted(shape, rows)
                where = maps[rows]
            made.append(Term(name, kinds[name], array, where, itself(name)))
        return Lowered(
            tuple(made),
            scale=None if self.key_table is None else shape.default_scale,
        )


LABEL_TYPES = ("int8", "int16", "int32")


class Pairs(NamedTuple):
    """Numbers for pairs of a query and a key, as the core takes them."""

    numbers: Any  # (B|1, H|1, N, M); where there are starts (count,) or (H|1, count)
    starts: Any = None  # int64 (B,)
    sizes: tuple[tuple[int, ...], ...] | None = None  # of the matrices of a list, or of one array
    tensor: Any = None  # of torch, the same memory and axes: it counts how often that changes

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies have memory of their own, which no tensor is."""
        return Pairs, (self.numbers, self.starts, self.sizes)

    def check(self, name: str, shape: Shape) -> None:
        """Refuses an array that does not fit, by the axes that it came with, and a list whose
        matrices have not the shapes of their sequences: laid end to end they would be cut at wrong
        places."""
        if self.sizes is None:
            return
        if self.starts is None:
            return self._check_padded(name, shape, self.sizes[0])
        if len(self.sizes) != shape.B:
            raise ValueError(
                f"{name}: expected a list of B={shape.B} matrices, one per sequence, "
                f"got {len(self.sizes)}"
            )
        counts = zip(shape.queries.counts.tolist(), shape.keys.counts.tolist(), strict=True)
        for b, (size, own) in enumerate(zip(self.sizes, counts, strict=True)):
            heads = size[:-2]
            if size[-2:] != own or heads not in ((), (1,), (shape.H,)):
                each = f"H={shape.H} or 1, " if heads else ""
                raise ValueError(
                    f"{name}[{b}]: expected ({each}n={own[0]}, m={own[1]}), the queries and keys "
                    f"of sequence {b}, got {size}"
                )

    def _check_padded(self, name: str, shape: Shape, size: tuple[int, ...]) -> None:
        if shape.queries.packed or shape.keys.packed:  # the core says what those take
            return
        B, H, N, M = shape.B, shape.H, shape.queries.rows, shape.keys.rows
        allowed = {2: ((N,), (M,)), 3: ((B, 1), (N,), (M,)), 4: ((B, 1), (H, 1), (N,), (M,))}
        several = allowed[len(size)]
        if all(n in sizes for n, sizes in zip(size, several, strict=True)):
            return
        wide = (*size[:-2], N, M)
        fits = size[-1] == M and all(n in sizes for n, sizes in zip(wide, several, strict=True))
        fix = f"; use np.broadcast_to({name}, {wide})" if fits and size[-2] == 1 else ""
        raise ValueError(
            f"{name}: expected ({N=}, {M=}), ({B=} or 1, {N=}, {M=}) or ({B=} or 1, {H=} or 1, "
            f"{N=}, {M=}), got {size}{fix}"
        )


def matrices(name: str, given: Any, types: tuple[str, ...]) -> Pairs:
    """Numbers for pairs, in any of the ways that callers give them; what this returns will do."""
    if isinstance(given, Pairs):
        return given
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ValueError(
                f"{name}: expected (flat, starts) for packed arrays, got {len(given)} parts"
            )
        starts = check_integers(f"{name} starts", given[1], "(B,)", (1,)).astype(np.int64)
        flat = on_host(name, given[0])
        axes = "(count,) or (H|1, count)"
        numbers = _typed(name, flat, types, axes, (1, 2))
        return Pairs(numbers, starts, tensor=_counting(given[0]))
    if isinstance(given, list):
        names = [f"{name}[{b}]" for b in range(len(given))]
        parts = [
            _typed(own, on_host(own, part), types, "(n, m) or (H|1, n, m)", (2, 3))
            for own, part in zip(names, given, strict=True)
        ]
        return _end_to_end(names, parts, types)
    axes = "(N, M), (B, N, M) or (B|1, H|1, N, M)"
    matrix = _typed(name, on_host(name, given), types, axes, (2, 3, 4))
    index = {2: (None, None), 3: (slice(None), None), 4: ()}[matrix.ndim]
    tensor = _counting(given)
    tensor = None if tensor is None else tensor[index]
    return Pairs(matrix[index], sizes=(matrix.shape,), tensor=tensor)


def _counting(given: Any) -> Any:
    """A tensor of torch whose changes are counted, as those of inference mode are not."""
    return given if hasattr(given, "new_tensor") and not given.is_inference() else None


def _end_to_end(names: list[str], parts: list[Any], types: tuple[str, ...]) -> Pairs:
    """The matrices of a list in one array: (count,), or (H, count) where heads have their own."""
    heads = max([len(part) for part in parts if part.ndim == 3], default=1)
    for name, part in zip(names, parts, strict=True):
        if part.ndim == 3 and len(part) not in (1, heads):
            raise ValueError(
                f"{name}: expected (H={heads} or 1, n, m), as others of the list, got {part.shape}"
            )
    rows = [np.zeros((heads, 0), parts[0].dtype if parts else types[0])]
    for part in parts:
        n, m = part.shape[-2:]
        rows.append(np.broadcast_to(part, (heads, n, m)).reshape(heads, n * m))
    flat = np.concatenate(rows, axis=1)
    starts = np.cumsum([own.shape[1] for own in rows[:-1]], dtype=np.int64)[: len(parts)]
    return Pairs(flat[0] if heads == 1 else flat, starts, tuple(part.shape for part in parts))


def _typed(name: str, array: Any, types: tuple[str, ...], axes: str, ranks: tuple[int, ...]) -> Any:
    allowed = " or ".join(", ".join(types).rsplit(", ", 1))
    expected = f"{name}: expected {allowed} {axes}, got {describe(array)}"
    fix = "bool" if types[-1] == "bool" else f"np.{types[-1]}"
    if not isinstance(array, np.ndarray) or str(array.dtype) not in types:
        raise TypeError(f"{expected}; use np.asarray({name}, {fix})")
    if array.ndim not in ranks:
        raise ValueError(expected)
    return array
