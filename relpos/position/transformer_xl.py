# SPDX-License-Identifier: Apache-2.0
"""Transformer-XL's relative positions (Dai et al. 2019)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from relpos import _core
from relpos.position import arrays
from relpos.position.absolute import sinusoids
from relpos.position.arrays import (
    Array,
    Table,
    as_array,
    beside,
    check_count,
    check_shape,
    check_table,
    contiguous,
    through,
)
from relpos.position.terms import Band, Lowered, Scheme, Shape, Term

KEPT = 256  # distances: sinusoids are made for multiples, so that a growing cache needs few of them

MOST_KEPT = 1 << 22  # numbers: 16 MiB; of more the core makes a thousand distances at a time


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TransformerXL(Scheme):
    """Transformer-XL: sinusoids of the distance, projected, and two learned queries.

        s_ij = scale * ( (q_i + u) . k_j + (q_i + v) . (W_kR R_t) ),   t = (i + start) - j = -d
        R_t  = [ sin(t w) ; cos(t w) ],   w_c = 10000^(-2c / d_model)

    position_weight: float32 (H * D, d_model), W_kR, d_model even.
    content_bias: float32 (H, D), u. None: no such term.
    position_bias: float32 (H, D), v. None: no such term.
    clamp_len: int. Distances farther than this count as this. None: not clamped.

    Unclipped: any length; causal or not. Here R is indexed by the paper's t = i - j, the negative
    of the distance elsewhere in relpos. In the released code W_kR is `r_net.weight`, u `r_w_bias`,
    v `r_r_bias`; share one object over the layers where `untie_r` is off. No other scheme with a
    key term may stand beside it: v belongs to this one.
    """

    parameters: ClassVar[tuple[str, ...]] = ("position_weight", "content_bias", "position_bias")

    position_weight: Table
    content_bias: Table = None
    position_bias: Table = None
    clamp_len: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _, width = check_table("position_weight", self.position_weight, "(H * D, d_model)", (2,))
        if width % 2 != 0 or width == 0:
            raise ValueError(f"position_weight: expected an even d_model, got {width}")
        for name in ("content_bias", "position_bias"):
            if getattr(self, name) is not None:
                check_table(name, getattr(self, name), "(H, D)", (2,))
        if self.clamp_len is not None:
            check_count("clamp_len", self.clamp_len, 0)

    def lower(self, shape: Shape) -> Lowered:
        H, D = shape.H, shape.D
        weight: Array = as_array("position_weight", self.position_weight)
        check_shape("position_weight", weight, **{"H * D": H * D, "d_model": -1})
        left, right = shape.band(self.clamp_len)
        width = weight.shape[1]

        def project(x: Any) -> Any:
            """The table: (H, T, D)."""
            if H == 0:  # which divides nothing
                return beside(x, np.zeros((0, left + 1 + right, D), arrays.REAL))
            if isinstance(x, np.ndarray):
                waves = _kept_or_made(max(left, right), width)
                return _core.wave_table(contiguous(x), waves, H, left, right)
            rows = (beside(x, _both_sides(left, right, width)) @ x.T).reshape(-1, H, D)
            return contiguous(rows.swapaxes(0, 1))

        def project_back(x: Any) -> Any:
            if H == 0:
                return beside(x, np.zeros((0, width), arrays.REAL))
            if isinstance(x, np.ndarray):
                return _core.wave_gradient(x, _kept_or_made(max(left, right), width), left, right)
            flat = contiguous(x.swapaxes(0, 1)).reshape(-1, H * D)
            return flat.T @ beside(x, _both_sides(left, right, width))

        def pull_weight(raw: Array) -> dict[str, Array]:
            return {"position_weight": through("position_weight", raw, project_back)}

        table = through("position_weight", weight, project)
        terms = [Term("position_weight", "key", table, Band(left, right), pull_weight)]
        if self.content_bias is not None:
            u = as_array("content_bias", self.content_bias)
            check_shape("content_bias", u, H=H, D=D)
            terms.append(
                Term(
                    "content_bias",
                    "query",
                    # one row, which every key meets
                    through("content_bias", u, lambda x: x[:, None, :]),
                    Band(0, 0),
                    lambda raw: {
                        "content_bias": through("content_bias", raw, lambda x: x[:, 0, :])
                    },
                )
            )
        v = None
        if self.position_bias is not None:
            v = as_array("position_bias", self.position_bias)
            check_shape("position_bias", v, H=H, D=D)
        return Lowered(
            tuple(terms),
            position_bias=v,
            position_bias_name="" if v is None else "position_bias",
            scale=shape.default_scale,
        )


def _kept_or_made(most: int, width: int) -> Array | int:
    """R_t as the core takes them: kept, or where they would take much memory their width, and the
    core makes them on the way."""
    return _waves(most, width) if (most + 1) * width <= MOST_KEPT else width


def _waves(most: int, width: int) -> Array:
    """R_t for t from 0 to `most`: what all layers and steps of a length share, so kept."""
    return _kept_waves((most // KEPT + 1) * KEPT, width, np.dtype(arrays.REAL))[: most + 1]


@functools.lru_cache(maxsize=2)  # an encoder's and a decoder's
def _kept_waves(n: int, width: int, dtype: np.dtype[Any]) -> Array:
    waves = sinusoids(n, width, layout="halves", base=10000.0)
    assert waves.dtype == dtype
    waves.setflags(write=False)
    return waves


def _both_sides(left: int, right: int, width: int) -> Array:
    """R_t for t from left down to -right, for where the core does not compute."""
    waves = _waves(max(left, right), width)
    after = waves[1 : right + 1].copy()
    after[:, : width // 2] *= -1
    return np.concatenate([waves[left::-1], after])
