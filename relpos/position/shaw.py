# SPDX-License-Identifier: Apache-2.0
"""Relative position representations (Shaw, Uszkoreit and Vaswani 2018), the paper's own scheme.

A relation term is a table with one row per relation and a map that picks the row for a
query and a key. The band map clips the distance d = j - (i + start):

    row   0                 left      left + right
    d     -left or less     0         right or more

so left = right = 2 over five keys, start = 0, gives the rows

            j = 0  1  2  3  4
    i = 0       2  3  4  4  4
    i = 1       1  2  3  4  4
    i = 2       0  1  2  3  4
    i = 3       0  0  1  2  3
    i = 4       0  0  0  1  2

and with beyond="none" only the pairs within the band have a relation:

    i = 0       2  3  4  .  .
    i = 1       1  2  3  4  .
    i = 2       0  1  2  3  4
    i = 3       .  0  1  2  3
    i = 4       .  .  0  1  2
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from relpos.position.arrays import Table, as_array, check_choice, check_table, describe
from relpos.position.terms import Band, Lowered, Scheme, Shape, Term, itself

Distances = tuple[int | None, int | None]

KEY_PULL, VALUE_PULL = itself("key_table"), itself("value_table")
_map = functools.lru_cache(maxsize=64)(Band)  # making it takes longer than finding it


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Shaw(Scheme):
    """Relative position representations (Shaw, Uszkoreit and Vaswani 2018).

        s_ij  = scale * ( q_i . k_j + q_i . key_table[r(i,j)] )
        out_i = sum_j softmax_j(s_ij) ( v_j + value_table[r'(i,j)] )

    with r(i,j) = clip(j - (i + start), -left, right) + left; the module draws it.

    key_table: float32 (T, D), shared by all heads, or (H, T, D). None: no such term.
    value_table: float32 (T, Dv) or (H, T, Dv). None: no such term. The same object as
        key_table ties the two: their gradient is one sum, reported as key_table's.
    k: int. Clip distance on both sides, T = 2k + 1. Left out: taken from the number of rows,
        which must then be odd.
    left, right: int. A clip distance for each side, T = left + 1 + right; one of them is enough.
    value_k, value_left, value_right: int. The same for the value term where its band is another.
        Left out: what k, left and right say; where they say nothing, its own number of rows.
    beyond: "clip", a distance outside the band takes the row at the nearer end (the paper), or
        "none", such a pair has no relation and the term is absent for it. It is not a mask.

    The tables are used where they lie, neither copied nor converted. Systems with this row order
    (tensor2tensor, OpenNMT, CTranslate2, fairseq2) import as they are.
    """

    parameters: ClassVar[tuple[str, ...]] = ("key_table", "value_table")

    key_table: Table = None
    value_table: Table = None
    k: int | None = field(default=None, kw_only=True)
    left: int | None = field(default=None, kw_only=True)
    right: int | None = field(default=None, kw_only=True)
    value_k: int | None = field(default=None, kw_only=True)
    value_left: int | None = field(default=None, kw_only=True)
    value_right: int | None = field(default=None, kw_only=True)
    beyond: Literal["clip", "none"] = field(default="clip", kw_only=True)
    key_band: tuple[int, int] | None = field(init=False)
    value_band: tuple[int, int] | None = field(init=False)

    def __post_init__(self) -> None:
        if self.key_table is None and self.value_table is None:
            raise ValueError(
                "Shaw: give key_table, value_table or both; "
                "attention without either is position=None"
            )
        check_choice("beyond", self.beyond, ("clip", "none"))
        both = _distances("", self.k, self.left, self.right)
        own = _distances("value_", self.value_k, self.value_left, self.value_right)
        if own == (None, None):
            own, prefix = both, ""
        elif self.value_table is None:
            raise ValueError("value_k, value_left, value_right: there is no value_table")
        else:
            prefix = "value_"
        object.__setattr__(self, "key_band", _band("key_table", self.key_table, "", both))
        object.__setattr__(self, "value_band", _band("value_table", self.value_table, prefix, own))

    @property
    def tied(self) -> bool:
        """Whether one table serves both terms."""
        return self.key_table is not None and self.key_table is self.value_table

    def lower(self, shape: Shape) -> Lowered:
        terms: tuple[Term, ...] = ()
        key, value, scale = self.key_table, self.value_table, None
        if key is not None and self.key_band is not None:
            key = as_array("key_table", key)
            band = _map(*self.key_band, self.beyond)
            terms += (Term("key_table", "key", key, band, KEY_PULL),)
            scale = shape.default_scale
        if value is not None and self.value_band is not None:
            value = key if self.tied else as_array("value_table", value)
            band = _map(*self.value_band, self.beyond)
            terms += (Term("value_table", "value", value, band, VALUE_PULL),)
        return Lowered(terms, scale=scale)

    def __repr__(self) -> str:
        parts = [
            f"{name}={describe(table)}, {name[:-6]}_band={band}"
            for name, table, band in (
                ("key_table", self.key_table, self.key_band),
                ("value_table", self.value_table, self.value_band),
            )
            if table is not None
        ]
        return f"Shaw({', '.join(parts)}, beyond={self.beyond!r})"


def _distances(prefix: str, k: int | None, left: int | None, right: int | None) -> Distances:
    """(left, right) as far as they are given."""
    checked = []
    for name, value in (("k", k), ("left", left), ("right", right)):
        try:
            distance = None if value is None else operator.index(value)
        except TypeError:
            got = type(value).__name__
            raise TypeError(f"{prefix}{name}: expected an integer, got {got}") from None
        if distance is not None and distance < 0:
            raise ValueError(f"{prefix}{name}: expected 0 or more, got {distance}")
        checked.append(distance)
    k, left, right = checked
    if k is None:
        return left, right
    if left is not None or right is not None:
        raise ValueError(f"{prefix}k: give either {prefix}k or {prefix}left and {prefix}right")
    return k, k


def _band(name: str, table: Table, prefix: str, given: Distances) -> tuple[int, int] | None:
    """The band of a table: what was given of it, and the number of rows for the rest."""
    if table is None:
        return None
    rows = check_table(name, table, "(T, d) or (H, T, d)", (2, 3))[-2]
    left, right = given
    if left is None and right is None:
        if rows % 2 == 0:
            raise ValueError(
                f"{name}: {rows} rows are not 2k + 1; give {prefix}left or {prefix}right"
            )
        return rows // 2, rows // 2
    # One side alone: the other one has the rest of the rows, at least none.
    left = max(rows - 1 - (right or 0), 0) if left is None else left
    right = max(rows - 1 - left, 0) if right is None else right
    if left + 1 + right != rows:
        hint = "; value_k, value_left and value_right give it a band of its own"
        raise ValueError(
            f"{name}: a band from -{left} to {right} needs {left + 1 + right} rows, got {rows}"
            f"{hint if name == 'value_table' and prefix == '' else ''}"
        )
    return left, right
