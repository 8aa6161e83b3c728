# SPDX-License-Identifier: Apache-2.0
"""What a case of attention is, and how one is drawn: correctness and gradients all run these.

A Case is plain data; random_case(seed) draws one. corners.py lists those that chance would miss,
case_arrays.py gives a case its arrays, tolerances.py says what is right and how far one may be off.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from guarded_arrays import Arrays
from relpos import reference
from relpos.reference import Band, Dropout

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
    """A matrix of labels: "random" (one in rows + 1 is -1), "none", "sparse", those of a "band", or
    random in "patches", with none between them.
    """

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
    """A boolean mask: "random", "none" or "all" visible, "rows" of nothing, "blocks", "patches" as
    large as tiles are, "columns" of tiles that every other block sees, the "last" key."""

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
    key_heads: int = 0  # of k and v, each shared by H / key_heads of queries; 0: H
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
        assert self.key_heads == 0 or self.H % self.key_heads == 0
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

    def heads(self, side: str) -> int:
        """Of queries or of keys: "query" or "key"."""
        return self.key_heads if side == "key" and self.key_heads else self.H

    def key_head(self, head: int) -> int:
        """The head of keys that one of queries meets."""
        return head * self.heads("key") // self.H

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
# Random cases
# --------------------------------------------------------------------------------------------------

# Around every multiple of the tiles and strips in use (2 to 128), and primes.
EDGES = (0, 1, 2, 3, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 37, 47, 48, 49)
EDGES += (53, 63, 64, 65, 79, 80, 81, 95, 96, 97, 101, 127, 128)
LONG = (129, 131, 143, 144, 145, 159, 160, 161, 167, 191, 192, 193, 211, 223, 255, 256, 257)
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 20, 32, 33, 48, 64, 80, 128)


def random_case(seed: int) -> Case:
    """The case of this seed. Every fourth has N > 128 and a band, all clip distances strictly inside.

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

    terms = pick((1, 1, 1, 2, 2, 3, 3, 3) if long else (0, 1, 2, 3, 3, 3, 3, 3))
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
            fill = word(["random", "random", "rows", "blocks", "patches", "last", "all", "none"])
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
    if long and not any(isinstance(map, Band | Distances) for _, _, map in case.terms):
        free = [kind for kind in reference.KINDS if not case.maps(kind)]
        case = replace(case, **{free[0]: band()}) if free else replace(case, key=band(), tied=False)
    if seed % 7 == 5:  # some heads of queries share keys
        case = replace(case, H=case.H * pick((2, 2, 4)), key_heads=case.H)
    tables = [name for name, _, _ in case.terms]
    if tables and chance(0.15):
        where = word(["first", "first", "middle", "last"])
        case = replace(case, outlier=(word(tables), where, number([10, 1000])))
    return case
