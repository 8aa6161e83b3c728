# SPDX-License-Identifier: Apache-2.0
"""Arrays that show what no kernel may touch.

    outputs   every element outside the result (around it, and between rows of a wide stride) holds
              SENTINEL, and so does the result itself before the call
    inputs    every element outside, and every row beyond a length, is NaN

The inputs of a case are made in case_arrays.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

SENTINEL = -12345.6875  # exact in float32
GUARD = 17  # elements around each array; odd, so that rows are not aligned


@dataclass
class Strided:
    """A view with its surroundings: view[..., row, column] inside raw, a flat array."""

    raw: np.ndarray
    view: np.ndarray
    strides: tuple[int, ...] = (0, 0, 0)  # batch, head, row; in elements

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


def hold(values: Any, dtype: Any, fill: float = -1) -> Strided:
    """Numbers in one row, with guards."""
    values = np.asarray(values, dtype)
    result = allocate(values.shape, 0, dtype, fill)
    result.view[...] = values
    return result


class MapArrays(NamedTuple):
    """A map, or mask, for the reference, and as the fields of rp_relation or rp_mask."""

    map: Any
    fields: dict[str, Any]  # numbers, and arrays to point to


@dataclass
class Arrays:
    """The inputs of a case in one dtype. Tied tables are one and the same object."""

    q: Strided
    k: Strided
    v: Strided
    dout: Strided
    tables: dict[str, Strided]  # "key[0]": ...
    maps: dict[str, MapArrays]
    position_bias: Strided | None = None
    mask: MapArrays | None = None
    before: list[np.ndarray] = field(default_factory=list)

    def __getitem__(self, name: str) -> Strided:
        """The array whose gradient has this name."""
        return self.tables[name] if name in self.tables else getattr(self, name)

    @property
    def inputs(self) -> list[Strided]:
        given: list[Any] = [self.q, self.k, self.v, self.dout, *self.tables.values()]
        given.append(self.position_bias)
        for map in (*self.maps.values(), self.mask):
            given += map.fields.values() if map else []
        return [x for x in given if isinstance(x, Strided)]

    def remember(self) -> None:
        """Keeps copies, for unmodified()."""
        self.before = [x.raw.copy() for x in self.inputs]

    def unmodified(self) -> bool:
        pairs = zip(self.before, self.inputs, strict=True)
        return all(old.tobytes() == new.raw.tobytes() for old, new in pairs)

    def views(self) -> tuple[Any, Any, Any, Any]:
        """q, k, v, dout as plain arrays."""
        return (self.q.view, self.k.view, self.v.view, self.dout.view)
