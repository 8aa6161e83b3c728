# SPDX-License-Identifier: Apache-2.0
"""T5's bucketed relative bias (Raffel et al. 2020)."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from relpos.position.arrays import (
    Array,
    Table,
    as_array,
    check_count,
    check_integers,
    check_number,
    check_shape,
    check_table,
    check_truth,
    contiguous,
    shape_of,
    through,
)
from relpos.position.terms import ROUNDINGS, Band, Lowered, Scheme, Shape, Term, bucket_band

MOST = 1e30  # of what scores are multiplied with, as the core has it for scale


def t5_buckets(
    distances: npt.ArrayLike,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> npt.NDArray[np.int64]:
    """T5's bucket of each distance d = key - query.

    bidirectional: nb = num_buckets / 2, b = nb if d > 0 else 0, x = |d|
    otherwise:     nb = num_buckets,     b = 0,                  x = max(-d, 0)
    x < me:  b + x                                                              me = nb / 2
    else:    b + min(nb - 1, me + trunc( ln(x / me) / ln(max_distance / me) * (nb - me) ))
    """
    d = check_integers("distances", distances, "of any shape", range(65)).astype(np.int64)
    bidirectional = check_truth("bidirectional", bidirectional)
    nb = check_count("num_buckets", num_buckets, 4 if bidirectional else 2)
    nb //= 2 if bidirectional else 1
    max_distance = check_count("max_distance", max_distance, nb // 2 + 1)
    base = np.where(d > 0, nb, 0) if bidirectional else np.zeros_like(d)
    x = np.abs(d) if bidirectional else np.maximum(-d, 0)
    exact = nb // 2
    far = np.log(np.maximum(x, exact) / exact) / np.log(max_distance / exact) * (nb - exact)
    far = far * (1 + ROUNDINGS)
    buckets: npt.NDArray[np.int64] = base + np.where(
        x < exact, x, np.minimum(nb - 1, exact + far.astype(np.int64))
    )
    return buckets


@functools.lru_cache(maxsize=16)  # making it takes as long as a small call
def _map(num_buckets: int, far: int, bidirectional: bool, left: int, right: int) -> Band:
    return bucket_band(lambda d: t5_buckets(d, num_buckets, far, bidirectional), left, right)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class T5Bias(Scheme):
    """T5: a learned number per head and bucket of distances, added to the score.

        s_ij = scale * q_i . k_j + bias_scale * bias_table[bucket(j - (i + start)), h]

    with `t5_buckets`, exact near by and logarithmic farther out.

    bias_table: float32 (num_buckets, H), as T5's checkpoints have it
        (`relative_attention_bias.weight`). One object serves all layers of a stack.
    bidirectional: bool. True in encoders: half of the buckets for keys after the query. False in
        decoders: those share bucket 0.
    max_distance: int. From this distance on the last bucket.
    scale: float. What T5 itself uses is 1. None: 1 / sqrt(D), as OpenNMT-py.
    bias_scale: float. sqrt(D) makes x-transformers' bias.
    """

    parameters: ClassVar[tuple[str, ...]] = ("bias_table",)

    bias_table: Table
    bidirectional: bool = field(default=True, kw_only=True)
    max_distance: int = field(default=128, kw_only=True)
    scale: float | None = field(default=1.0, kw_only=True)
    bias_scale: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        check_truth("bidirectional", self.bidirectional)
        buckets, _ = check_table("bias_table", self.bias_table, "(num_buckets, H)", (2,))
        least = 4 if self.bidirectional else 2
        if buckets < least or (self.bidirectional and buckets % 2 != 0):
            kind = "even and at least 4" if self.bidirectional else "at least 2"
            raise ValueError(
                f"bias_table: expected (num_buckets, H), the first {kind}, got "
                f"{shape_of(self.bias_table)}"
            )
        exact = buckets // (4 if self.bidirectional else 2)
        check_count("max_distance", self.max_distance, exact + 1)
        if self.scale is not None and check_number("scale", self.scale) == 0:
            raise ValueError("scale: expected a number other than 0, or None for 1 / sqrt(D)")
        if abs(check_number("bias_scale", self.bias_scale)) > MOST:
            raise ValueError(
                f"bias_scale: expected at most {MOST:g} in magnitude, got {self.bias_scale}"
            )

    def lower(self, shape: Shape) -> Lowered:
        table: Array = as_array("bias_table", self.bias_table)
        check_shape("bias_table", table, num_buckets=-1, H=shape.H)
        factor = float(self.bias_scale)

        def turned(x: Any) -> Any:
            return contiguous(x.T * factor)

        far = operator.index(self.max_distance)
        term = Term(
            "bias_table",
            "bias",
            through("bias_table", table, turned),  # (H, num_buckets)
            _map(len(table), far, bool(self.bidirectional), *shape.band(far)),
            lambda raw: {"bias_table": through("bias_table", raw, turned)},
        )
        scale = shape.default_scale if self.scale is None else float(self.scale)
        return Lowered((term,), scale=scale)
