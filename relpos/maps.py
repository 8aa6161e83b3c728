# SPDX-License-Identifier: Apache-2.0
"""Attention for the eye: probabilities, logits, and the logits split by term.

Attention itself never forms such a map. Here the rows that are asked for are computed again, by the
same kernels, one head after another; nothing else is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from relpos import _core
from relpos.device_array import memory_of
from relpos.position import arrays, combine
from relpos.position.arrays import Array, Given, check_integers, describe
from relpos.position.combine import Position
from relpos.position.rope import turn
from relpos.position.terms import Lowered, Shape, Term
from relpos.request import Integers, Layout, Mask, Request, Window, lower, make_call, read_request

Choice = Integers | slice | None  # an int, ints, a slice, as an index of NumPy; None: all
Map = Any  # float32 array, or a list of one for each sequence

# As _core calls them.
WHOLE = {
    "probabilities": _core.SHOW_PROBABILITIES,
    "logits": _core.SHOW_SCORES,
    "content": _core.SHOW_CONTENT,
}
KINDS = {"key": _core.SHOW_KEY, "query": _core.SHOW_QUERY, "bias": _core.SHOW_BIAS}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AttentionMaps:
    """The maps of one call, as far as they were asked for.

    probabilities: float32 (..., rows, keys). p, rows of which sum to 1; 0 where a key is hidden.
        None: not asked for.
    logits: float32 (..., rows, keys). s, after softcap; -inf where hidden. None: not asked for.
    parts: by name, float32 (..., rows, keys): "content", scale * q_i . k_j, and every relation
        term; 0 where hidden, and where it is -inf itself. All of them add up to the logits before
        softcap.
    """

    probabilities: Map
    logits: Map
    parts: Mapping[str, Map]

    def __repr__(self) -> str:
        named = {"probabilities": self.probabilities, "logits": self.logits, **self.parts}
        found = [f"{name}={_shape_of(x)}" for name, x in named.items() if x is not None]
        return f"AttentionMaps({', '.join(found)})"


def _shape_of(x: Map) -> str:
    return str([part.shape for part in x]) if isinstance(x, list) else str(x.shape)


def attention_maps(
    q: Given,
    k: Given,
    v: Given | None = None,
    *,
    position: Position = None,
    causal: bool = False,
    lengths: Integers | None = None,
    key_lengths: Integers | None = None,
    offsets: Integers | None = None,
    key_offsets: Integers | None = None,
    query_start: Integers | None = None,
    mask: Mask = None,
    window: Window = None,
    layout: Layout = "bhnd",
    scale: float | None = None,
    softcap: float = 0.0,
    precision: str = "f32",
    heads: Choice = None,
    rows: Choice = None,
    sequences: Choice = None,
    parts: str | Iterable[str] = ("probabilities",),
) -> AttentionMaps:
    """What attention does with its keys: which it looks at, and why.

        s_ij = content_ij + the relation terms;   s_ij = softcap * tanh(s_ij / softcap)
        p_ij = softmax over the keys j that query i may see

        maps = relpos.attention_maps(q, k, position=shaw, sequences=0, heads=3, parts="all")
        plt.imshow(maps.probabilities)                  # (N, M)
        plt.imshow(maps.parts["key_table"])             # what the relations add to the logits

    q, k, v, position to precision: as in `attention`; v may be left out, it changes nothing. The
        probabilities are those before dropout. `RoPE` turns q and k first, so that content is
        what the turned ones give.
    heads, rows, sequences: which, each an int, a slice, or ints; negative ones count from the end
        of each sequence. As in an index of NumPy an int takes its axis away. None: all.
    parts: the names of what is wanted, or "all": "probabilities", "logits", "content", and the
        relation terms by the parameter that is their table, as gradients are named ("key_table",
        "bias_table", "slopes"; Transformer-XL's v is part of "position_weight"). One table in two
        terms makes them distance_table_key and distance_table_query (`RelativeKeyQuery`).

    Returns `AttentionMaps` with arrays (B, heads, rows, keys). Where a call has lengths or offsets,
    a list of one array (heads, rows, keys) for each sequence, without padding, so that rows of
    probabilities sum to 1 and pictures have no margin; sequences=b gives that one alone.

    Takes the memory of what it returns: (heads, rows, keys) for each name. Rows far apart cost a
    call each.
    """
    request = read_request(
        q, k, k if v is None else v, None,
        causal=causal, lengths=lengths, key_lengths=key_lengths, offsets=offsets,
        key_offsets=key_offsets, query_start=query_start, mask=mask, window=window, layout=layout,
        scale=scale, softcap=softcap, dropout=0.0, seed=0, precision=precision,
    )  # fmt: skip
    combine.schemes_of(position)
    shape = request.shape
    if shape is None:  # the arrays do not fit each other: the core says what is wrong with them
        call, nothing = make_call(request, Lowered()), np.empty((0, 0), arrays.REAL)
        given = _as_core(request, request.q, request.k)
        _core.attention_map(*given, 0, 0, 0, 0, nothing, call)
        raise RuntimeError("attention_maps: the core took arrays that this layer could not read")
    choice = _Choice.read(shape, request.ragged, sequences, heads, rows)
    return _shown(request, shape, position, parts, choice)


def maps_of_call(request: Request, position: Position, parts: str | Iterable[str]) -> AttentionMaps:
    """All sequences and heads of a call of attention, which names its parts return_maps."""
    assert request.shape is not None
    combine.schemes_of(position)
    choice = _Choice.read(request.shape, request.ragged, None, None, None)
    return _shown(request, request.shape, position, parts, choice, "return_maps")


def _shown(
    request: Request,
    shape: Shape,
    position: Position,
    parts: str | Iterable[str],
    choice: _Choice,
    argument: str = "parts",
) -> AttentionMaps:
    maps = _maps(request, shape, position, parts, choice, argument)
    found = {name: choice.as_indexed(x) for name, x in maps.items()}
    return AttentionMaps(found.pop("probabilities", None), found.pop("logits", None), found)


def _as_core(request: Request, q: Any, k: Any) -> tuple[Any, Any, Any]:
    place = request.place
    return memory_of("q", q, place), memory_of("k", k, place), memory_of("v", request.v, place)


def _maps(
    request: Request,
    shape: Shape,
    position: Position,
    parts: str | Iterable[str],
    choice: _Choice,
    argument: str,
) -> dict[str, list[Array] | Array]:
    """By name: one array (heads, rows, keys) for each sequence, or all of them in one."""
    lowered = lower(request, shape, position)
    seen = tuple(term for term in lowered.terms if term.kind != "value")
    wanted = _wanted(argument, parts, seen)
    q, k = request.q, request.k
    if lowered.rotation is not None:
        q, k = turn(q, k, lowered.rotation, shape, request.layout, request.place)
    q, k, v = _as_core(request, q, k)
    call = make_call(request, dataclasses.replace(lowered, terms=seen))
    maps = {}
    for name, what in wanted.items():
        maps[name] = choice.room()
        for of_sequence, b, rows in zip(maps[name], choice.sequences, choice.rows, strict=True):
            for to, head in zip(of_sequence, choice.heads, strict=True):
                for place, row, count in _runs(rows):
                    own = to[place : place + count]
                    _core.attention_map(q, k, v, what, b, head, row, own, call)
    return maps


# --------------------------------------------------------------------------------------------------
# Names
# --------------------------------------------------------------------------------------------------


def _terms_by_name(terms: Iterable[Term]) -> dict[str, int]:
    """What the core calls each term, by the name of its parameter. Where one is the table of
    several, the kind is added, and then a number, first to those that nothing learns: the others
    have the names of their gradients."""
    terms = tuple(terms)
    names: dict[int, str] = {}
    for i in sorted(range(len(terms)), key=lambda i: terms[i].pull is None):
        name = terms[i].name
        if any(other.name == name and other.kind != terms[i].kind for other in terms):
            name = f"{name}_{terms[i].kind}"
        names[i] = f"{name}_2" if name in names.values() else name
    found: dict[str, int] = {}
    counts = dict.fromkeys(KINDS, 0)
    for i, term in enumerate(terms):
        found[names[i]] = KINDS[term.kind] + counts[term.kind]
        counts[term.kind] += 1
    return found


def _wanted(argument: str, parts: str | Iterable[str], terms: Iterable[Term]) -> dict[str, int]:
    """What is asked for, by name, as the core calls it."""
    known = WHOLE | _terms_by_name(terms)
    try:
        names = [parts] if isinstance(parts, str) else list(parts)
    except TypeError:
        raise TypeError(f"{argument}: expected names, got {describe(parts)}") from None
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument}: expected names, got {describe(name)} among them")
        if name not in known and name != "all":
            there = ", ".join(map(repr, known))
            raise ValueError(
                f"{argument}: there is no {name!r} in this call, only {there} and 'all'"
            )
    return {name: what for name, what in known.items() if name in names or "all" in names}


# --------------------------------------------------------------------------------------------------
# Sequences, heads and rows
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """Which part of the maps is wanted, in plain numbers."""

    sequences: list[int]
    heads: list[int]
    rows: list[list[int]]  # of each sequence
    keys: list[int]  # how many
    padded: tuple[int, int] | None  # (rows, keys) of every sequence where all are alike
    index: tuple[Any, ...]  # of the axes sequences, heads, rows

    @classmethod
    def read(cls, shape: Shape, ragged: bool, sequences: Any, heads: Any, rows: Any) -> _Choice:
        chosen = numbers_of("sequences", sequences, shape.B)
        of_each = [
            numbers_of("rows", rows, int(shape.queries.counts[b]), f" in sequence {b}")
            for b in chosen
        ]
        padded = None
        if not ragged:
            of_any = of_each[0] if of_each else numbers_of("rows", rows, shape.queries.rows)
            padded = (len(of_any), shape.keys.rows)
        return cls(
            chosen,
            numbers_of("heads", heads, shape.H),
            of_each,
            [int(shape.keys.counts[b]) for b in chosen],
            padded,
            tuple(_index(x) for x in (sequences, heads, rows)),
        )

    def room(self) -> list[Array] | Array:
        """Where one map of every sequence goes."""
        H = len(self.heads)
        if self.padded is not None:
            return np.empty((len(self.sequences), H, *self.padded), arrays.REAL)
        sizes = zip(self.rows, self.keys, strict=True)
        return [np.empty((H, len(rows), keys), arrays.REAL) for rows, keys in sizes]

    def as_indexed(self, maps: list[Array] | Array) -> Map:
        """Without the axes that an int takes away."""
        if not isinstance(maps, list):
            return maps[self.index]
        each = [x[self.index[1:]] for x in maps]
        return each[0] if self.index[0] == 0 else each


def numbers_of(name: str, given: Any, count: int, where: str = "") -> list[int]:
    """The numbers, of 0 to count - 1, that an index chooses."""
    if given is None or isinstance(given, slice):
        try:
            return list(range(count)[given or slice(None)])
        except (TypeError, ValueError) as error:
            expected = "a slice of integers, its step not 0"
            raise type(error)(f"{name}: expected {expected}, got {given}") from None
    numbers = np.atleast_1d(check_integers(name, given, "(), (count,) or a slice", (0, 1)))
    for number in numbers:
        if not -count <= number < count:
            allowed = f"numbers from {-count} to {count - 1}{where}"
            if count == 0:
                allowed = f"none{where}, where there are none"
            raise ValueError(f"{name}: expected {allowed}, got {number}")
    return [int(number) % count for number in numbers]


def _index(chosen: Any) -> Any:
    """What an index does to its axis: an int takes it away."""
    is_one = chosen is not None and not isinstance(chosen, slice) and np.ndim(chosen) == 0
    return 0 if is_one else slice(None)


def _runs(rows: list[int]) -> Iterator[tuple[int, int, int]]:
    """(place in the list, first row, how many) of every run of rows one after another."""
    place = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1:
            yield place, rows[place], end - place
            place = end
