# SPDX-License-Identifier: Apache-2.0
"""RoPE: rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from relpos import _core
from relpos.device_array import (
    DeviceArray,
    Placement,
    check_beside,
    extent,
    memory_of,
    place_of,
    shares_memory,
)
from relpos.position.arrays import (
    Integers,
    as_array,
    check_choice,
    check_count,
    check_integers,
    check_number,
    check_positions,
    check_reals,
    check_truth,
    describe,
)
from relpos.position.places import check_start
from relpos.position.terms import Counts, Lowered, Rotation, Scheme, Shape, Side

_LARGEST = 1e290  # of an angle, as the core has it


@dataclass(frozen=True, slots=True, eq=False)
class RoPE(Scheme):
    """RoPE: q and k are turned by their positions before they meet; values are not.

        s_ij = scale * (Rot_{i + start} q_i) . (Rot_j k_j)
        Rot_p: (x, y) -> (x cos t - y sin t, x sin t + y cos t) of pair c, t = p base^(-2c / width)

    pairing: "half" pairs the columns (c, c + width / 2) (NeoX, LLaMA in transformers),
        "interleaved" (2c, 2c + 1) (the paper, GPT-J). The same function up to an order of columns.
    width: int. The columns that are turned, from the first on, even; the others are left as they
        are. None: all D.
    base: float.
    scaling: None, "linear": positions divided by factor, or "ntk": base * factor^(width/(width-2)).
    factor: float. How many times longer than trained for.
    angles: float (P,). The angle per position of each of P pairs, in place of base, scaling and
        factor, for any other rule: Llama 3's, YaRN's. They turn the first 2 P columns; width, if
        given, must be 2 P. None: as above.
    rotate_keys: bool. False: the keys come turned already, as a cache keeps them (`relpos.rotate`);
        their gradient is then that of the turned keys.

    No parameters. Refused together with key and query terms, whose tables would have to be turned
    too; bias terms (ALiBi, T5) and value terms may stand beside it.
    """

    pairing: Literal["half", "interleaved"] = field(default="half", kw_only=True)
    width: int | None = field(default=None, kw_only=True)
    base: float = field(default=10000.0, kw_only=True)
    scaling: Literal["linear", "ntk"] | None = field(default=None, kw_only=True)
    factor: float = field(default=1.0, kw_only=True)
    angles: Any = field(default=None, kw_only=True)
    rotate_keys: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_truth("rotate_keys", self.rotate_keys)
        check_choice("pairing", self.pairing, ("half", "interleaved"))
        if self.width is not None and check_count("width", self.width, 0) % 2 != 0:
            raise ValueError(f"width: expected an even number of columns, got {self.width}")
        check_number("base", self.base, positive=True)
        if not 1e-6 <= check_number("factor", self.factor) <= 1e6:
            raise ValueError(f"factor: expected a number from 1e-6 to 1e6, got {self.factor}")
        if self.scaling is not None:
            check_choice("scaling", self.scaling, ("linear", "ntk"))
        elif self.factor != 1.0:
            raise ValueError("factor: without effect; give scaling='linear' or 'ntk'")
        if self.angles is not None:
            self._check_angles()

    def _check_angles(self) -> None:
        angles = check_reals("angles", self.angles, "(P,)", 1)
        if self.width is not None and self.width != 2 * len(angles):
            raise ValueError(
                f"angles: expected one for each pair of {self.width} columns, "
                f"{self.width // 2}, got {len(angles)}"
            )
        for name, default in (("base", 10000.0), ("scaling", None)):
            if getattr(self, name) != default:
                raise ValueError(f"{name}: without effect beside angles, which say it all")
        if (np.abs(angles) > _LARGEST).any():
            raise ValueError(f"angles: expected numbers up to {_LARGEST:g} in magnitude")
        object.__setattr__(self, "angles", tuple(angles.tolist()))

    def frequencies(self, D: int) -> npt.NDArray[np.float64]:
        """The angle per position of every pair of a head of width D: (width / 2,)."""
        if self.angles is not None:
            if 2 * len(self.angles) > D:
                raise ValueError(f"angles: expected at most D/2={D // 2}, got {len(self.angles)}")
            return np.array(self.angles)
        width = D if self.width is None else int(self.width)
        if width > D or width % 2 != 0:
            raise ValueError(f"width: expected an even number up to D={D}, got {width}")
        base, factor, slower = float(self.base), float(self.factor), 1.0
        if self.scaling == "linear":
            slower = factor
        elif self.scaling == "ntk":
            if width <= 2:
                raise ValueError(f"width: scaling='ntk' needs 4 columns or more, got {width}")
            power = width / (width - 2)
            if math.log(base) + power * math.log(factor) > math.log(sys.float_info.max):
                raise ValueError(f"factor: base * factor^{power:g} is beyond all floats")
            base *= factor**power
        return _core.frequencies(width // 2, base, False) / slower

    def lower(self, shape: Shape) -> Lowered:
        return Lowered(rotation=self.rotation(shape.D))

    def rotation(self, D: int) -> Rotation:
        return Rotation(self.frequencies(D), self.pairing == "interleaved", self.rotate_keys)


def turn(
    q: Any,
    k: Any,
    rotation: Rotation,
    shape: Shape,
    layout: str,
    place: Placement | None = None,
    *,
    back: bool = False,
) -> tuple[Any, Any]:
    """q and k of a call, turned; with `back` their gradients, turned back where they lie."""
    own, rest = rotation.query_positions, (layout, place, back)
    check_start(shape.start)
    if not back and len(getattr(k, "shape", ())) > 0 and k.shape[-1] != shape.D:
        raise ValueError(f"k: expected the width of q, D={shape.D}, got {describe(k)}")
    q = _turned("q", q, rotation, shape.queries, shape.start, own, *rest)
    if rotation.rotate_keys:
        own = rotation.key_positions
        k = _turned("k", k, rotation, shape.keys, np.zeros_like(shape.start), own, *rest)
    return q, k


def _turned(
    name: str,
    x: Any,
    rotation: Rotation,
    side: Side,
    start: Counts,
    positions: Integers | None,
    layout: str,
    place: Placement | None,
    back: bool,
) -> Any:
    offsets = np.append(side.first, side.rows) if side.packed else None
    if positions is not None and positions.ndim == 1 and not side.packed:
        positions = positions[None]
    lengths = None if side.packed else side.counts
    places = (layout, offsets, lengths, start if positions is None else None, positions)
    return _rotate(name, x, x if back else None, places, rotation, back, place)


Places = tuple[str, Any, Any, Any, Any]  # layout, offsets, lengths, start, positions


def _rotate(
    name: str,
    x: Any,
    out: Any,
    places: Places,
    rotation: Rotation,
    back: bool,
    place: Placement | None,
) -> Any:
    """The core's call; name: of x."""
    how = (rotation.frequencies, rotation.interleaved, back)
    if place is None:
        return _core.rotate(x, out, *places, *how, None, name)
    out = place.empty(x.shape) if out is None else out
    x, to = memory_of(name, x, place), memory_of("out", out, place)
    _core.rotate(x, to, *places, *how, place.core, name)
    return out


def rotate(
    x: Any,
    rope: RoPE,
    *,
    start: Any = 0,
    positions: Any = None,
    offsets: Any = None,
    lengths: Any = None,
    layout: str = "bhnd",
    out: Any = None,
) -> Any:
    """x turned by `rope`, as attention turns q and k: for a cache of turned keys.

        (x, y) -> (x cos t - y sin t, x sin t + y cos t) of every pair c, t = position * frequency

    x: float32 (B, H, N, D), (B, N, H, D) with layout "bnhd", or packed (tokens, H, D). On a GPU
        also bfloat16, as `relpos.attention` takes arrays.
    rope: RoPE.
    start: int or int (B,). The position of row 0 of each sequence, the others following it.
    positions: int (N,) or (B, N), packed (tokens,), instead of start.
    offsets: int (B + 1,). Where packed sequences begin and end. Left out: all tokens are one.
    lengths: int (B,). Rows in use of padded arrays; those beyond give zeros, and are left alone
        where out is x.
    out: float32, to be written and returned, another library's as an ndarray over its memory; x
        itself will do. None: a new array.
    """
    if not isinstance(rope, RoPE):
        raise TypeError(f"rope: expected relpos.RoPE, got {type(rope).__name__}")
    where = place_of("x", x)
    if out is not None:
        check_beside("out", place_of("out", out), where, "x")
    x = as_array("x", x)
    there = isinstance(x, DeviceArray)
    out = None if out is None else as_array("out", out, x.stream if there else None)
    place = Placement.of("x", x, "f32", out) if there else None
    if not isinstance(x, np.ndarray | DeviceArray) or x.ndim not in (3, 4):
        raise ValueError(f"x: expected float32 (B, H, N, D) or (tokens, H, D), got {describe(x)}")
    if isinstance(out, np.ndarray | DeviceArray):
        lies = [(at.ctypes.data, at.shape, at.strides) for at in (extent(x), extent(out))]
        if lies[0] != lies[1] and shares_memory(x, out):
            raise ValueError("out: overlaps x; give x itself, or an array of its own")
    if x.ndim == 3 and offsets is None:
        offsets = [0, len(x)]
    if offsets is not None:
        offsets = check_integers("offsets", offsets, "(B + 1,)", (1,)).astype(np.int64)
        if offsets.size == 0:
            raise ValueError(
                "offsets: expected B + 1 numbers from 0 to the number of tokens, got none"
            )
    if lengths is not None:
        lengths = check_integers("lengths", lengths, "(B,)", (1,)).astype(np.int64)
    if positions is None:
        start = check_integers("start", start, "() or (B,)", (0, 1)).astype(np.int64)
        if start.ndim == 0:
            start = np.full(len(x) if offsets is None else len(offsets) - 1, start)
    else:
        if np.any(start):
            raise ValueError("start: without effect beside positions; give one of the two")
        positions, start = check_positions("positions", positions), None
        if positions.ndim == 1 and offsets is None:
            positions = positions[None]
    rotation = rope.rotation(x.shape[-1])
    places = (layout, offsets, lengths, start, positions)
    turned = _rotate("x", x, out, places, rotation, False, place)
    if place is not None:
        place.done()
    return turned
