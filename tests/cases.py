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
from typing import Any

import numpy as np

from relpos import reference
from relpos.reference import Band

SENTINEL = -12345.6875  # exact in float32
GUARD = 17  # elements around each array; odd, so that rows are not aligned


@dataclass(frozen=True)
class Case:
    B: int = 1
    H: int = 1
    N: int = 8
    M: int = 8
    D: int = 8
    Dv: int = 8
    key: Band | None = None  # None: no key term
    value: Band | None = None
    tied: bool = False  # one table, and one gradient, for both terms
    per_head: bool = False  # tables [H, T, width]
    causal: bool = False
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
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tied:
            assert self.key and self.value and self.key.rows == self.value.rows
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

    def batch(self, dtype: Any = np.float64) -> reference.Batch:
        return reference.Batch(
            self.spans,
            self.key,
            self.value,
            self.causal,
            self.scale,
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
    strides: tuple[int, int, int] = (0, 0, 0)  # batch, head, row; in elements

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


@dataclass
class Arrays:
    """The inputs of a case in one dtype. Tied tables are one and the same object."""

    q: Strided
    k: Strided
    v: Strided
    dout: Strided
    key_table: Strided | None
    value_table: Strided | None
    before: list[np.ndarray] = field(default_factory=list)

    @property
    def inputs(self) -> list[Strided]:
        given = [self.q, self.k, self.v, self.dout, self.key_table, self.value_table]
        return [x for x in given if x is not None]

    def remember(self) -> None:
        """Keeps copies, for unmodified()."""
        self.before = [x.raw.copy() for x in self.inputs]

    def unmodified(self) -> bool:
        pairs = zip(self.before, self.inputs, strict=True)
        return all(old.tobytes() == new.raw.tobytes() for old, new in pairs)

    def views(self) -> tuple[Any, ...]:
        """q, k, v, dout, key_table, value_table as plain arrays."""
        tables = [None if t is None else t.view for t in (self.key_table, self.value_table)]
        return (self.q.view, self.k.view, self.v.view, self.dout.view, *tables)


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

    def fill_table(number: int, band: Band | None, width: int) -> Strided | None:
        if band is None:
            return None
        shape = (case.H, band.rows, width) if case.per_head else (band.rows, width)
        result = allocate(shape, case.gap, dtype, np.nan)
        W = width + case.gap
        result.strides = (0, band.rows * W if case.per_head else 0, W)
        result.view[...] = stream(number).standard_normal(shape, np.float32)
        return result

    q = fill_rows(0, "query", case.D, case.spread)
    k = fill_rows(1, "key", case.D)
    v = fill_rows(2, "key", case.Dv)
    dout = fill_rows(3, "query", case.Dv)
    key_table = fill_table(4, case.key, case.D)
    value_table = key_table if case.tied else fill_table(5, case.value, case.Dv)
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
    result = Arrays(q, k, v, dout, key_table, value_table)
    result.remember()
    return result


# --------------------------------------------------------------------------------------------------
# Random cases
# --------------------------------------------------------------------------------------------------

# Around every multiple of the tiles and strips in use (2 to 128), and primes.
EDGES = (0, 1, 2, 3, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 37, 47, 48, 49)
EDGES += (53, 63, 64, 65, 79, 80, 81, 95, 96, 97, 101, 127, 128)
LONG = (129, 131, 143, 144, 145, 159, 160, 161, 167, 191, 192, 193, 211, 223, 255, 256, 257)
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 20, 32, 33, 48, 64, 80, 128)


def random_case(seed: int) -> Case:
    """The case of this seed. Every fourth has N > 128 and all clip distances strictly inside."""
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
    return Case(
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
    return [replace(case, seed=900_000 + i) for i, case in enumerate(cases)]


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
    """Results and gradients by name: "out", "lse", "q", "k", "v", "key_table", "value_table".

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
    """The oracle of arrays that a test has changed. Of tied tables: one gradient, "key_table"."""
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
        results["key_table"] = results["key_table"] + results.pop("value_table")
    return results


def _run_reference(case: Case, arrays: Arrays, dtype: Any) -> dict[str, np.ndarray]:
    q, k, v, dout, key_table, value_table = arrays.views()
    batch = case.batch(dtype)
    out, lse = reference.batched_forward(batch, q, k, v, key_table, value_table)
    gradients = reference.batched_backward(batch, q, k, v, dout, key_table, value_table)
    return {"out": out, "lse": lse, **merge_tied(case, gradients)}


def _sizes(case: Case, arrays: Arrays, worst: bool) -> dict[str, np.ndarray]:
    """Error per unit roundoff of equations (1) to (7) of relpos.reference, to first order.

    A score is rounded in proportion to its size S, which changes p by p (1 + S). A product hands
    the errors of its factors on, and rounds each partial sum; errors add up by absolute values
    (worst: S too is the sum of the absolute values) or by squares, as independent errors do. The
    partial sums of n terms, added one after the other, then come to u sqrt(n / 6) times the root of
    the sum of squares: NumPy, which adds in parallel lanes, is better off than any tile kernel.
    Tables count as what is summed, their rows less row 0 (csrc/ops/band.h), where that is larger.
    """
    q, k, v, dout, key_table, value_table = arrays.views()
    batch = case.batch()
    gather, collect = reference.take_relation, reference.sum_relation
    power = 1 if worst else 2

    def add(*terms: np.ndarray) -> np.ndarray:
        return sum(np.abs(x) ** power for x in terms) ** (1 / power)  # type: ignore[return-value]

    def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (np.abs(x) ** power @ np.abs(y) ** power) ** (1 / power)

    def in_sequence(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return product(x, y) * (1 if worst else np.sqrt(1 + x.shape[1] / 6))

    def against_row_0(table: np.ndarray) -> np.ndarray:
        return np.maximum(np.abs(table), np.abs(table - table[0]))

    squares: dict[str, np.ndarray] = {"q": np.zeros(q.shape), "k": np.zeros(k.shape)}
    squares |= {"v": np.zeros(v.shape), "out": np.zeros((*q.shape[:-1], case.Dv))}
    squares["lse"] = np.zeros(reference.row_numbers_shape(q, case.layout))
    for name, table in (("key_table", key_table), ("value_table", value_table)):
        if table is not None:
            squares[name] = np.zeros(table.shape)
    scale = reference.default_scale(case.D) if case.scale is None else case.scale
    for span in batch.spans:
        for h in range(case.H):
            query = (case.layout, span.batch, h, span.query_row, span.queries)
            key = (case.layout, span.batch, h, span.key_row, span.keys)
            qh, dh = (np.asarray(reference.head_rows(x, *query), np.float64) for x in (q, dout))
            kh, vh = (np.asarray(reference.head_rows(x, *key), np.float64) for x in (k, v))
            given = reference.head_arguments(batch, span, h, key_table, value_table)
            seen, wk, wv = given["visible"], given.get("key_table"), given.get("value_table")
            s, lse = reference.attention_scores(
                qh, kh, scale=scale, visible=seen, key_table=wk, key_index=given.get("key_index")
            )
            p = reference.attention_probabilities(s, lse)
            wk_size, wv_size = (None if t is None else against_row_0(t) for t in (wk, wv))
            parts = in_sequence(qh, kh.T)
            if wk is not None:
                parts = add(parts, gather(in_sequence(qh, wk_size.T), given["key_index"]))
            s = parts * abs(scale) if worst else add(np.where(seen, s, 0), parts * scale)
            S = 1 + np.max(np.abs(s), axis=1, initial=0, where=seen)[:, None]
            # Forward.
            z, z_size = p @ vh, add(product(p * S, vh), in_sequence(p, vh))
            dp, dp_size = dh @ vh.T, in_sequence(dh, vh.T)
            if wv is not None:
                index = given["value_index"]
                P = collect(p, index, len(wv))
                z, z_size = (
                    z + P @ wv,
                    add(z_size, product(P * S, wv_size), in_sequence(P, wv_size)),
                )
                dp = dp + gather(dh @ np.asarray(wv, np.float64).T, index)
                dp_size = add(dp_size, gather(in_sequence(dh, wv_size.T), index))
                dwv = add(product((P * S).T, dh), in_sequence(P.T, dh))
                _table(squares["value_table"], h)[...] += dwv**power
            # Backward. The error of delta is the same along a row, and adds up there.
            delta = np.sum(dh * z, axis=1)[:, None]
            delta_size = add(*np.moveaxis(dh * z_size, 1, 0))[:, None] * abs(scale)
            dp = np.abs(dp) + np.abs(delta) if worst else dp - delta
            ds = p * dp * scale
            ds_size = add(ds * S, p * dp_size * scale)
            dq = add(product(ds_size, kh), in_sequence(ds, kh), p @ kh * delta_size)
            if wk is not None:
                index = given["key_index"]
                dA = collect(ds, index, len(wk))
                dA_size = collect(ds_size**power, index, len(wk)) ** (1 / power)
                dA_size = add(dA_size, collect(p, index, len(wk)) * delta_size)
                dq = add(dq, product(dA_size, wk_size), in_sequence(dA, wk_size))
                dwk = add(product(dA_size.T, qh), in_sequence(dA.T, qh))
                _table(squares["key_table"], h)[...] += dwk**power
            ds_size = add(ds_size, p * delta_size)
            dk = add(product(ds_size.T, qh), in_sequence(ds.T, qh))
            dv = add(product((p * S).T, dh), in_sequence(p.T, dh))
            reference.head_rows(squares["out"], *query)[...] = add(z_size, z) ** power
            reference.head_rows(squares["q"], *query)[...] = dq**power
            reference.head_rows(squares["k"], *key)[...] = dk**power
            reference.head_rows(squares["v"], *key)[...] = dv**power
            row = squares["lse"][h] if q.ndim == 3 else squares["lse"][span.batch, h]
            row[span.query_row : span.query_row + span.queries] = S[:, 0] ** power
    return {name: x ** (1 / power) for name, x in merge_tied(case, squares).items()}


def _table(total: np.ndarray, head: int) -> np.ndarray:
    return total if total.ndim == 2 else total[head]


def compare(name: str, got: np.ndarray, truth: Oracle) -> str | None:
    """None, or in words how `got` is too far from the reference. Derived, not chosen:

    float64   n u size, the first-order bound of any order of summing n terms with unit roundoff u.
              In a table the largest size counts: the gradients of its rows have a known sum, so
              that one of them may be the difference of that sum and the others.
    float32   2 times (results) or 3 times (gradients) the error of the plain float32 formula,
              largest against largest, plus a floor; and root mean square against the same.

    The floor is u noise for the mean square and 6 u noise for the largest: a run compares some
    1e8 numbers, and the largest of that many normal errors is 5.7 deviations out. Where few independent
    roundings make the plain error (few rows, or a softmax with one winner) it may be small by luck,
    and says little about what is possible: there the mean square is not compared, and the floor is
    sqrt(n) u size, what n roundings of random sign amount to (Higham & Mary 2019). NaN and
    infinities must stand in the same places.
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
    tiny = float(np.finfo(got.dtype).tiny) * 1000
    square_bound = np.inf
    if got.dtype == np.float64:
        if name.endswith("table"):
            finite_size = np.full_like(finite_size, finite_size.max(initial=0))
        bound = truth.terms * unit * finite_size + tiny
    else:
        factor = 2 if name in ("out", "lse") else 3
        stable = truth.rows >= 64 and _independent(plain_error, name) >= 32
        noise = np.where(np.isfinite(truth.noise[name]), truth.noise[name], 0)
        floor = 6 * noise if stable else np.sqrt(truth.terms) * finite_size
        bound = factor * plain_error.max(initial=0) + unit * floor + tiny
        if stable:
            square_bound = factor * np.sqrt(np.mean(plain_error**2)) + tiny
            square_bound += unit * np.sqrt(np.mean(noise**2))
    mean_square = np.sqrt(np.mean(error**2)) if error.size else 0.0
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
