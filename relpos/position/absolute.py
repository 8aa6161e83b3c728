# SPDX-License-Identifier: Apache-2.0
"""Absolute positions: tables that are added to the embeddings, before attention sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from relpos import _core
from relpos.position.arrays import (
    Array,
    Table,
    as_array,
    check_choice,
    check_count,
    check_number,
    check_size,
    check_table,
    describe,
    integer_of,
    shape_of,
)
from relpos.position.terms import Scheme, Shape

MAX_FIRST = 1 << 40  # the core's
HIGHEST_FREQUENCY = 1e290  # the core's: times any position still a float


def sinusoid(
    positions: npt.ArrayLike,
    width: int,
    *,
    layout: str = "interleaved",
    exponent: str = "vaswani",
    base: float = 10000.0,
    dtype: npt.DTypeLike = np.float64,
) -> npt.NDArray[Any]:
    """Sines and cosines of positions (P,) at falling frequencies: (P, width), computed in float64.

    interleaved   column 2c: sin(p w_c),  column 2c + 1: cos(p w_c)
    halves        [ sin(p w_c) ; cos(p w_c) ], a last column of zeros where width is odd
    vaswani       w_c = base^(-2c / width)
    t2t           w_c = base^(-c / (width // 2 - 1)), from 1 to 1 / base exactly
    """
    width = check_size("width", width, 0)
    check_choice("layout", layout, ("interleaved", "halves"))
    check_choice("exponent", exponent, ("vaswani", "t2t"))
    base = check_number("base", base, positive=True)
    p = np.asarray(positions, np.float64)
    if p.ndim != 1:
        raise ValueError(f"positions: expected (P,), got {describe(p)}")
    p = p[:, None]
    half = width // 2
    waves = np.zeros((len(p), width), dtype)
    angle = p * _frequencies(width, layout, exponent, base)
    if layout == "interleaved":
        sines, cosines = waves[:, 0::2], waves[:, 1::2]
    else:
        sines, cosines = waves[:, :half], waves[:, half : 2 * half]
    np.sin(angle, out=sines, casting="same_kind")
    np.cos(angle[:, : cosines.shape[1]], out=cosines, casting="same_kind")
    return waves


def _frequencies(width: int, layout: str, exponent: str, base: float) -> npt.NDArray[np.float64]:
    """w_c of every sine: where they are interleaved an odd width has one more."""
    half = width // 2
    sines = (width + 1) // 2 if layout == "interleaved" else half
    if exponent == "vaswani":
        return np.ascontiguousarray(_core.frequencies(width, base, False)[::2][:sines])
    closed = _core.frequencies(half, base, True)
    if sines == half:
        return closed
    with np.errstate(over="ignore"):
        last = np.float64(base) ** (-half / max(half - 1, 1))
    if not last <= HIGHEST_FREQUENCY:
        raise ValueError(f"base: expected one whose frequencies are below 1e290, got {base}")
    return np.append(closed, last)


def sinusoids(
    n: int, width: int, *, first: int = 0, layout: str, exponent: str = "vaswani", base: float
) -> Array:
    """`sinusoid` of the positions from `first` on, made by the core: (n, width)."""
    interleaved = layout == "interleaved"
    even = width + width % 2 if interleaved else width  # the core's tables end with a cosine
    angles = _frequencies(width, layout, exponent, base)
    made: Array = _core.sinusoid(n, even, first, interleaved, angles)
    return made if even == width else np.ascontiguousarray(made[:, :width])


class Absolute(Scheme):
    """The base of what has no term: given to attention, it says where it belongs."""

    __slots__ = ()

    def lower(self, shape: Shape) -> NoReturn:
        raise ValueError(
            f"position: {type(self).__name__} has no term in attention; add its table(n) to the "
            "embeddings and leave position out"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sinusoidal(Absolute):
    """Sinusoidal positions (Vaswani et al. 2017), in every variant in use.

        x_p + table(n)[p],   see `sinusoid` for the columns

    width: int. d_model, the width of the embeddings (multiply those by sqrt(d_model) first).
    layout: "interleaved" (the paper, Joey NMT, OpenNMT-py's default) or "halves" (tensor2tensor,
        OpenNMT-tf, Sockeye, Transformer-XL; OpenNMT-py's SinusoidalConcat).
    exponent: "vaswani", w_c = base^(-2c / width) (the paper, Joey, Sockeye), or "t2t",
        base^(-c / (width / 2 - 1)) (tensor2tensor, OpenNMT-tf).
    base: float.
    start: int. The position of row 0.
    """

    width: int
    layout: Literal["interleaved", "halves"] = field(default="interleaved", kw_only=True)
    exponent: Literal["vaswani", "t2t"] = field(default="vaswani", kw_only=True)
    base: float = field(default=10000.0, kw_only=True)
    start: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_size("width", self.width, 1)
        check_choice("layout", self.layout, ("interleaved", "halves"))
        check_choice("exponent", self.exponent, ("vaswani", "t2t"))
        check_number("base", self.base, positive=True)
        integer_of("start", self.start)

    def table(self, n: int, offset: int = 0) -> Array:
        """Rows for n positions from start + offset on: float32 (n, width)."""
        return sinusoids(
            check_size("n", n, 0),
            int(self.width),
            first=self._first(offset),
            layout=self.layout,
            exponent=self.exponent,
            base=float(self.base),
        )

    def _first(self, offset: int) -> int:
        first = integer_of("start", self.start) + integer_of("offset", offset)
        if abs(first) > MAX_FIRST:
            raise ValueError(f"start + offset: expected a position within 2^40 of 0, got {first}")
        return first


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LearnedAbsolute(Absolute):
    """Learned absolute positions: a row for each, up to a longest length.

        x_p + embedding[p]

    embedding: float32 (P, d_model).
    """

    parameters: ClassVar[tuple[str, ...]] = ("embedding",)

    embedding: Table

    def __post_init__(self) -> None:
        check_table("embedding", self.embedding, "(P, d_model)", (2,))

    def table(self, n: int, offset: int = 0) -> Array:
        """Rows for n positions from `offset` on: float32 (n, d_model), a view."""
        offset = check_count("offset", offset, 0)
        last = offset + check_count("n", n, 0)
        rows = shape_of(self.embedding)[0]
        if last > rows:
            raise ValueError(f"embedding: {rows} rows, but position {last - 1} is asked for")
        part: Array = as_array("embedding", self.embedding)[offset:last]
        return part

    def gradient(self, d: Any, offset: int = 0) -> Array:
        """The gradient of `embedding`, from d, that of table(n, offset): (..., n, d_model), summed
        over the leading axes."""
        d = as_array("d", d)
        P, width = shape_of(self.embedding)
        is_array = isinstance(d, np.ndarray) and d.dtype.kind == "f"
        if not is_array or d.ndim < 2 or d.shape[-1] != width:
            error = ValueError if is_array else TypeError
            raise error(f"d: expected floats (..., n, d_model={width}), got {describe(d)}")
        offset = check_count("offset", offset, 0)
        if offset + d.shape[-2] > P:
            last = offset + d.shape[-2] - 1
            raise ValueError(f"d: expected rows for positions below {P}, got one for {last}")
        summed = d.reshape(math.prod(d.shape[:-2]), *d.shape[-2:]).sum(axis=0)
        total = np.zeros((P, width), summed.dtype)
        total[offset : offset + len(summed)] = summed
        return total
