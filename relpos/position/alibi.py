# SPDX-License-Identifier: Apache-2.0
"""ALiBi: attention with linear biases (Press, Smith and Lewis 2022)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from relpos.position import arrays
from relpos.position.arrays import (
    Array,
    Table,
    as_array,
    beside,
    check_count,
    check_shape,
    check_table,
    through,
)
from relpos.position.terms import Band, Counts, Lowered, Scheme, Shape, Term


def alibi_slopes(heads: int) -> npt.NDArray[np.float64]:
    """The published slopes: 2^(-8 (t + 1) / h) for h a power of two, t = 0 to h - 1.

    For other counts those of the power of two below, c, then every second of those of 2c.
    """
    heads = check_count("heads", heads, 0)
    if heads == 0:
        return np.zeros(0)
    if heads > 1 << 20:
        raise ValueError(f"heads: expected at most 2^20, got {heads}")
    below = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * np.arange(1, below + 1) / below)
    finer = 2.0 ** (-8.0 * np.arange(1, 2 * below + 1) / (2 * below))
    return np.concatenate([slopes, finer[::2][: heads - below]])


_published = functools.lru_cache(maxsize=16)(alibi_slopes)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ALiBi(Scheme):
    """ALiBi: a penalty per head that grows with the distance.

        s_ij = scale * q_i . k_j - slopes[h] * |j - (i + start)|

    slopes: float32 (H,), learned: they take a gradient. None: the published ones,
        `alibi_slopes(H)`, fixed.

    Symmetric where attention is not causal. Not scaled. Code that adds slope * j instead gives the
    same softmax.
    """

    parameters: ClassVar[tuple[str, ...]] = ("slopes",)

    slopes: Table = None

    def __post_init__(self) -> None:
        if self.slopes is not None:
            check_table("slopes", self.slopes, "(H,) or None", (1,))

    def lower(self, shape: Shape) -> Lowered:
        left, right = shape.band()
        rows = np.arange(-left, right + 1, dtype=np.int32)
        return Lowered((self._term(shape, np.abs(rows, out=rows), Band(left, right)),))

    def at_distances(self, shape: Shape, distances: Counts) -> Term:
        return self._term(shape, np.abs(distances), Band(0, 0))

    def _term(self, shape: Shape, magnitudes: npt.NDArray[Any], found_by: Band) -> Term:
        """A row for each of these distances."""
        distance = magnitudes.astype(arrays.REAL)
        if self.slopes is None:
            slopes: Any = _published(shape.H).astype(arrays.REAL)
        else:
            slopes = as_array("slopes", self.slopes)
            check_shape("slopes", slopes, H=shape.H)

        def pull(raw: Array) -> dict[str, Array]:
            return {"slopes": through("slopes", raw, lambda x: -(x @ beside(x, distance)))}

        table = through("slopes", slopes, lambda x: x[:, None] * -beside(x, distance))
        learned = self.slopes is not None
        return Term("slopes", "bias", table, found_by, pull if learned else None)
