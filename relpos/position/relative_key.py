# SPDX-License-Identifier: Apache-2.0
"""relative_key and relative_key_query, as the transformers library had them (Huang et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from relpos.position.arrays import Array, Table, as_array, check_choice, check_table
from relpos.position.terms import Band, Lowered, Pull, Scheme, Shape, Term, itself


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RelativeKey(Scheme):
    """relative_key: every distance has a row that the query meets.

        s_ij = scale * ( q_i . k_j + q_i . distance_table[i - j + P - 1] )

    with i counted from start.

    distance_table: float32 (2P - 1, D) or (H, 2P - 1, D), P = max_position_embeddings:
        `distance_embedding.weight`, as it is. Its sign is i - j, opposite to the other schemes.
    beyond: "error" refuses a call with a distance outside the table, as transformers does by
        failing; "clip" takes the row at the nearer end.
    """

    parameters: ClassVar[tuple[str, ...]] = ("distance_table",)

    distance_table: Table
    beyond: Literal["error", "clip"] = field(default="error", kw_only=True)

    def __post_init__(self) -> None:
        axes = "(2P - 1, D) or (H, 2P - 1, D)"
        rows = check_table("distance_table", self.distance_table, axes, (2, 3))[-2]
        if rows % 2 == 0:
            raise ValueError(f"distance_table: expected 2P - 1 rows, got {rows}")
        check_choice("beyond", self.beyond, ("error", "clip"))

    def lower(self, shape: Shape) -> Lowered:
        given: Array = as_array("distance_table", self.distance_table)
        reach = given.shape[-2] // 2  # P - 1
        left, right = shape.band(reach if self.beyond == "clip" else None)
        if self.beyond == "error" and max(left, right) > reach:
            raise ValueError(
                f"distance_table: {2 * reach + 1} rows reach from {-reach} to {reach}, but the "
                f"call has distances from {-left} to {right}; "
                "beyond='clip' takes the rows at the ends"
            )
        left, right = min(left, reach), min(right, reach)
        if not isinstance(given, np.ndarray):  # on a GPU: the rows of the table as it is, by name
            rows = np.arange(reach + left, reach - right - 1, -1, dtype=np.int32)
            band = Band(left, right, "clip", rows)
            return self._terms(shape, given, band, itself("distance_table"))
        # Row r of the reversed part is the distance d = r - left, row P - 1 - d of the table.
        part = slice(reach - right, reach + left + 1)
        table = np.ascontiguousarray(given[..., part, :][..., ::-1, :])

        def pull(raw: Array) -> dict[str, Array]:
            gradient = np.zeros(given.shape, raw.dtype)
            gradient[..., part, :] = raw[..., ::-1, :]
            return {"distance_table": gradient}

        return self._terms(shape, table, Band(left, right), pull)

    def _terms(self, shape: Shape, table: Any, band: Band, pull: Pull) -> Lowered:
        terms = [Term("distance_table", "key", table, band, pull)]
        if isinstance(self, RelativeKeyQuery):
            terms.append(Term("distance_table", "query", table, band, pull))
        return Lowered(tuple(terms), scale=shape.default_scale)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RelativeKeyQuery(RelativeKey):
    """relative_key_query: one row meets the query and the key (method 4 of Huang et al. 2020).

        s_ij = scale * ( q_i . k_j + (q_i + k_j) . distance_table[i - j + P - 1] )

    Arguments as `RelativeKey`.
    """
