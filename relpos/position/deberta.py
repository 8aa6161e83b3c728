# SPDX-License-Identifier: Apache-2.0
"""DeBERTa's disentangled attention (He et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from relpos.position.arrays import (
    Array,
    Table,
    as_array,
    check_choice,
    check_count,
    check_integers,
    check_table,
)
from relpos.position.terms import (
    ROUNDINGS,
    Band,
    Kind,
    Lowered,
    Scheme,
    Shape,
    Term,
    bucket_band,
    itself,
)


def deberta_log_buckets(
    x: npt.ArrayLike, bucket_size: int = 256, max_position: int = 512
) -> npt.NDArray[np.int64]:
    """DeBERTa v2's logarithmic buckets of x = i - j: odd, exact up to bucket_size / 2.

    g(x) = x                                                      where |x| <= mid
    g(x) = sign(x) ( ceil( ln(|x| / mid) / ln((max_position - 1) / mid) (mid - 1) ) + mid )
    """
    x = check_integers("x", x, "of any shape", range(65)).astype(np.int64)
    mid = check_count("bucket_size", bucket_size, 2) // 2
    max_position = check_count("max_position", max_position, mid + 2)
    size = np.abs(x)
    ratio = np.log(np.maximum(size, mid) / mid) / math.log((max_position - 1) / mid)
    far = np.ceil(ratio * (mid - 1) * (1 - ROUNDINGS)).astype(np.int64) + mid
    buckets: npt.NDArray[np.int64] = np.where(size <= mid, x, np.sign(x) * far)
    return buckets


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DeBERTa(Scheme):
    """DeBERTa: content meets position, position meets content.

        s_ij  = ( q_i . k_j + q_i . key_table[delta(i,j)] + k_j . query_table[delta'] ) / sqrt(D sf)
        delta = clip( g(i - j) + span, 0, 2 span - 1 ),   sf = 1 + the number of terms

    with i counted from start. delta' is delta(i,j), as the released code and every checkpoint have
    it, or delta(j,i), as the paper writes.

    key_table: float32 (2 span, D) or (H, 2 span, D), content to position: the relative embeddings
        times W_kr (`pos_key_proj`; `key_proj` with share_att_key). None: no such term.
    query_table: float32, the same shape, position to content: times W_qr (`pos_query_proj`).
        None: no such term. The same object as key_table ties the two.
    buckets: int. Position_buckets of v2 and v3: g is `deberta_log_buckets`. None: g(x) = x, as v1.
    max_position: int. max_relative_positions, with buckets alone.
    p2c: "code" or "paper", what delta' is.

    The sign is i - j, opposite to the other schemes; the tables are taken in DeBERTa's order. The
    projections are the caller's, once for all heads and positions.
    """

    parameters: ClassVar[tuple[str, ...]] = ("key_table", "query_table")

    key_table: Table = None
    query_table: Table = None
    buckets: int | None = field(default=None, kw_only=True)
    max_position: int = field(default=512, kw_only=True)
    p2c: Literal["code", "paper"] = field(default="code", kw_only=True)

    def __post_init__(self) -> None:
        tables = self.tables()
        if not tables:
            raise ValueError("DeBERTa: give key_table (c2p), query_table (p2c) or both")
        for name, table in tables.items():
            rows = check_table(name, table, "(2 span, D) or (H, 2 span, D)", (2, 3))[-2]
            if rows == 0 or rows % 2 != 0:
                raise ValueError(f"{name}: expected 2 span rows, got {rows}")
        check_choice("p2c", self.p2c, ("code", "paper"))
        if self.buckets is not None:
            half = check_count("buckets", self.buckets, 2) // 2
            check_count("max_position", self.max_position, half + 2)

    def lower(self, shape: Shape) -> Lowered:
        terms: list[Term] = []
        kinds: dict[str, Kind] = {"key_table": "key", "query_table": "query"}
        shared: dict[tuple[int, bool], Any] = {}
        arrays: dict[int, Any] = {}  # the same object twice stays one
        for name, table in self.tables().items():
            array = arrays.setdefault(id(table), as_array(name, table))
            turned = name == "query_table" and self.p2c == "paper"
            sign = 1 if turned else -1  # of d in g: g(i - j) or g(j - i)
            if (id(table), turned) not in shared:
                make = _identity if self.buckets is None else self._bucketed
                shared[id(table), turned] = make(array, sign, shape)
            lowered, band, pull = shared[id(table), turned]
            terms.append(Term(name, kinds[name], lowered, band, pull(name)))
        scale = 1.0 / math.sqrt(max(shape.D, 1) * (1 + len(terms)))
        tied = self.key_table is not None and self.key_table is self.query_table
        if tied:  # one parameter, whichever of its lowered tables a gradient comes from
            terms = [_pulling(term, "key_table") for term in terms]
        return Lowered(tuple(terms), scale=scale)

    def _bucketed(self, array: Array, sign: int, shape: Shape) -> tuple[Any, Band, Any]:
        """The table as it is and a bucket for every distance."""
        span = array.shape[-2] // 2
        assert self.buckets is not None
        size, far = self.buckets, self.max_position

        def row(d: Any) -> npt.NDArray[np.int64]:
            g = deberta_log_buckets(sign * d, size, far)
            rows: npt.NDArray[np.int64] = np.minimum(np.maximum(g + span, 0), 2 * span - 1)
            return rows

        return array, bucket_band(row, *shape.band(self._settled(span))), itself

    def _settled(self, span: int) -> int | None:
        """A distance beyond which rows are those at the end of the table; None: far off."""
        assert self.buckets is not None
        mid = int(self.buckets) // 2
        if span <= mid or mid == 1:
            return span + 1
        steps = (span - mid) / (mid - 1)
        far = math.log(mid) + steps * math.log((int(self.max_position) - 1) / mid)
        return None if far > 24 * math.log(2) else math.ceil(math.exp(far)) + 1


def _identity(array: Array, sign: int, shape: Shape) -> tuple[Any, Band, Any]:
    """Row sign * d + span: a band, of the reversed table where the sign is that of i - j. On a GPU
    of the table as it is, through rows that are named one by one."""
    span = array.shape[-2] // 2
    if sign > 0:
        return array, Band(span, span - 1), itself
    if not isinstance(array, np.ndarray):
        rows = np.arange(2 * span - 1, -1, -1, dtype=np.int32)
        return array, Band(span - 1, span, "clip", rows), itself

    def pull(name: str) -> Callable[[Array], dict[str, Array]]:
        return lambda raw: {name: np.ascontiguousarray(raw[..., ::-1, :])}

    return np.ascontiguousarray(array[..., ::-1, :]), Band(span - 1, span), pull


def _pulling(term: Term, name: str) -> Term:
    inner = term.pull
    assert inner is not None

    def pull(raw: Array) -> dict[str, Array]:
        (gradient,) = inner(raw).values()
        return {name: gradient}

    return Term(term.name, term.kind, term.table, term.map, pull)
