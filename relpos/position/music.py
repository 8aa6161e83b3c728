# SPDX-License-Identifier: Apache-2.0
"""Music Transformer's relative attention (Huang et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from relpos.position.arrays import Table, as_array, check_table, check_truth
from relpos.position.terms import Band, Kind, Lowered, Scheme, Shape, Term, itself


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MusicTransformer(Scheme):
    """Music Transformer: one row for every distance, none beyond the table.

        s_ij  = scale * ( q_i . k_j + q_i . key_table[d + P - 1] )
        out_i = sum_j softmax_j(s_ij) ( v_j + value_table[d + P - 1] ),   d = j - (i + start)

    key_table: float32 (P, D) or (H, P, D) where masked, the paper's E: row P - 1 is the query
        itself, row 0 what lies P - 1 before it. Unmasked (2P - 1, D) or (H, 2P - 1, D).
    value_table: float32, as key_table with the width Dv. None: no such term.
    masked: bool. Whether the table is for causal attention. Keys after the query then have no
        relation (the paper's skewing leaves garbage there, for the causal mask to hide).

    A pair outside the table has no relation, as in tensor2tensor, which pads it with zeros. Of a
    table longer than a call needs the last rows are used where masked, else the middle ones. The
    skewing of the paper is this same function.
    """

    parameters: ClassVar[tuple[str, ...]] = ("key_table", "value_table")

    key_table: Table = None
    value_table: Table = None
    masked: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_truth("masked", self.masked)
        if not self.tables():
            raise ValueError("MusicTransformer: give key_table, value_table or both")
        for name, table in self.tables().items():
            axes = "(P, d) or (H, P, d)" if self.masked else "(2P - 1, d) or (H, 2P - 1, d)"
            rows = check_table(name, table, axes, (2, 3))[-2]
            if rows == 0 or (not self.masked and rows % 2 == 0):
                raise ValueError(
                    f"{name}: expected {'at least one row' if self.masked else '2P - 1 rows'}, "
                    f"got {rows}"
                )

    def lower(self, shape: Shape) -> Lowered:
        terms = []
        kinds: dict[str, Kind] = {"key_table": "key", "value_table": "value"}
        arrays: dict[int, Table] = {}  # the same object twice stays one: tied
        for name, table in self.tables().items():
            array = arrays.setdefault(id(table), as_array(name, table))
            rows = array.shape[-2]
            left = rows - 1 if self.masked else rows // 2
            band = Band(left, 0 if self.masked else left, "none")
            terms.append(Term(name, kinds[name], array, band, itself(name)))
        return Lowered(
            tuple(terms),
            scale=None if self.key_table is None else shape.default_scale,
        )
