# SPDX-License-Identifier: Apache-2.0
"""Arrays at the door: what is taken where it lies, and the sentences for what is not."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]
# A parameter of a scheme: an ndarray, or any array that exports DLPack or the array interface.
Table = Any

REAL: npt.DTypeLike = (
    np.float32
)  # the core's type of numbers; tests replace core and type by double

HOST_DEVICES = (1, 3, 11)  # DLPack: CPU, memory pinned for CUDA, for ROCm
DEVICE_NAMES = {2: "a CUDA device", 8: "a Metal device", 10: "a ROCm device"}
MAX_POSITION = 1 << 30  # relpos.h


def as_array(name: str, x: Any) -> Any:
    """`x` as a NumPy array over the same memory, never a copy.

    ndarrays pass. What exports neither DLPack nor the array interface passes too: it is for the
    checks that follow to refuse, by the name of the argument.
    """
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "__dlpack__"):
        device = x.__dlpack_device__()[0]
        if device not in HOST_DEVICES:
            where = DEVICE_NAMES.get(int(device), f"DLPack device {int(device)}")
            raise TypeError(
                f"{name}: lies on {where}, relpos computes on the CPU; move it there first"
            )
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"{name}: no array to read without a copy: {error}") from error
    if hasattr(x, "__array_interface__"):
        return np.asarray(x)
    return x


def shape_of(x: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in x.shape)


def describe(x: Any) -> str:
    """What came, as in "float64 (3, 8)"."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')} {shape_of(x)}"


def check_table(name: str, table: Any, axes: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a table, or why it is none. Only looked at: tensors stay tensors."""
    expected = f"{name}: expected {np.dtype(REAL)} {axes}, got {describe(table)}"
    fix = f"; use np.ascontiguousarray({name}, np.{np.dtype(REAL)})"
    if not hasattr(table, "shape") or not hasattr(table, "dtype"):
        raise TypeError(expected + fix)
    if str(table.dtype).removeprefix("torch.") != str(np.dtype(REAL)):
        raise TypeError(expected + fix)
    shape = shape_of(table)
    if len(shape) not in ranks:
        raise ValueError(expected)
    return shape


def check_shape(name: str, table: Any, **axes: int) -> None:
    """Refuses a table that does not have these sizes of named axes; -1: any."""
    shape = shape_of(table)
    sizes = tuple(axes.values())
    if len(shape) != len(sizes) or any(
        want not in (-1, n) for want, n in zip(sizes, shape, strict=True)
    ):
        words = [key if size < 0 else f"{key}={size}" for key, size in axes.items()]
        comma = "," if len(words) == 1 else ""
        raise ValueError(
            f"{name}: expected {np.dtype(REAL)} ({', '.join(words)}{comma}), got {describe(table)}"
        )


def check_count(name: str, value: Any, least: int) -> int:
    """An integer argument of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}") from None
    if number < least:
        raise ValueError(f"{name}: expected {least} or more, got {number}")
    return number


def check_number(name: str, value: Any, *, positive: bool = False) -> float:
    """A finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}") from None
    if not np.isfinite(number) or (positive and number <= 0):
        kind = "a positive finite number" if positive else "a finite number"
        raise ValueError(f"{name}: expected {kind}, got {value}")
    return number


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def check_integers(name: str, values: Any, axes: str, ranks: tuple[int, ...]) -> Any:
    """An integer array, of whatever integer type."""
    array = np.asarray(as_array(name, values))
    if array.dtype.kind not in "iu" and array.size > 0:
        raise TypeError(f"{name}: expected integers {axes}, got {describe(array)}")
    if array.ndim not in ranks:
        raise ValueError(f"{name}: expected integers {axes}, got {describe(array)}")
    return array


def check_positions(name: str, values: Any) -> Integers:
    """Positions as the core takes them, an array of its own: int32 (rows,) or (B, rows)."""
    array = check_integers(name, values, "(rows,) or (B, rows)", (1, 2))
    if array.size > 0:
        low, high = int(array.min()), int(array.max())
        if low <= -MAX_POSITION or high >= MAX_POSITION:
            got = low if low <= -MAX_POSITION else high
            raise ValueError(f"{name}: expected positions below 2^30 in magnitude, got {got}")
    positions: Integers = array.astype(np.int32, order="C")
    return positions
