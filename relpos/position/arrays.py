# SPDX-License-Identifier: Apache-2.0
"""Arrays at the door: what is taken where it lies, and the sentences for what is not."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Container
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from relpos.device_array import DeviceArray, from_dlpack, place_of

Array = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]
# A parameter of a scheme: an ndarray, or any array that exports DLPack or the array interface.
Table = Any


class Exported(Protocol):
    """An ndarray, or another library's array that exports DLPack."""

    def __dlpack__(self) -> Any: ...


class Interfaced(Protocol):
    """An array that exports the array interface."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


Given = Exported | Interfaced  # q, k, v: what is used where it lies

# The core's type of numbers; tests replace core and type by double.
REAL: Any = np.float32

MAX_POSITION = 1 << 30  # relpos.h
_LIMIT = 1 << 40  # of the core's counts, RPI_LIMIT


def real_name() -> str:
    return _name_of(REAL)


@functools.cache
def _name_of(kind: Any) -> str:
    return str(np.dtype(kind))  # which takes microseconds


def as_array(name: str, x: Any, stream: int | None = None) -> Any:
    """`x` as an array over the same memory, never a copy: NumPy's or, on a GPU, a `DeviceArray`.

    Those pass. What exports neither DLPack nor the array interface passes too: it is for the
    checks that follow to refuse, by the name of the argument. stream: of a GPU, what the array is
    to be read on; None: what its library works on.
    """
    if type(x) is np.ndarray or isinstance(x, DeviceArray):
        return x
    check_unmasked(name, x, f"use {name}.filled(0), and `lengths` or `mask`")
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "__dlpack__"):
        if hasattr(x, "is_neg") and x.is_neg():  # of torch: DLPack has no word for it
            raise TypeError(
                f"{name}: the numbers in memory have the other sign; use {name}.resolve_neg()"
            )
        if getattr(x, "requires_grad", False):  # torch says no more than to detach it
            raise TypeError(
                f"{name}: no array to read without a copy: it requires gradients, and would get "
                f"none; use relpos.torch, or {name}.detach()"
            )
        if place_of(name, x) is not None:
            return from_dlpack(name, x, stream)
        try:
            found = np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            fix = _fix(name, x) if str(getattr(x, "dtype", "")) == "torch.bfloat16" else ""
            raise TypeError(f"{name}: no array to read without a copy: {error}{fix}") from error
        if found.size > 0 and found.flags.owndata:  # for a null pointer NumPy takes new memory
            raise TypeError(
                f"{name}: expected an array that can be read, got {type(x).__name__}, which has no "
                "memory of its own"
            )
        return found
    try:
        return np.asarray(x) if hasattr(x, "__array_interface__") else x
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name}: no array to read without a copy: {error}") from error


def check_unmasked(name: str, x: Any, fix: str = "fill it first") -> None:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected an array without a mask of its own, which nothing would look at: "
            f"got MaskedArray; {fix}"
        )


def on_host(name: str, x: Any) -> Any:
    """`x` as a NumPy array, for what the host reads: integers and masks."""
    where = place_of(name, x)
    if where is not None:
        raise TypeError(f"{name}: lies on {where}; relpos reads it on the host, copy it there")
    return as_array(name, x)


# ---- computing with tables, for the schemes that do ------------------------------------------------


def through(name: str, table: Any, change: Callable[[Any], Any]) -> Any:
    """change(table): with NumPy on the host, also of arrays on a device, and with torch in
    relpos.torch. `change` uses what both have, and the functions below."""
    if isinstance(table, DeviceArray):
        return table.through(name, change)
    return change(np.asarray(table))  # plain: products of np.matrix are float64


def contiguous(x: Any) -> Any:
    """x in C order."""
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def beside(x: Any, values: npt.NDArray[Any]) -> Any:
    """`values`, made by NumPy, for computing with x."""
    return values if isinstance(x, np.ndarray) else x.new_tensor(values)


def shape_of(x: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in x.shape)


def describe(x: Any) -> str:
    """What came, as in "float64 (3, 8)"."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return type(x).__name__
    kind = str(x.dtype).removeprefix("torch.")
    return f"{'text' if kind.startswith(('<U', '|S')) else kind} {shape_of(x)}"


def may_be_narrow(table: Any) -> bool:
    """Whether a table may be bfloat16: tensors of torch, which relpos.torch widens. Asked by what
    torch.compile reads in every version: to hasattr of a method those before 2.8 say no."""
    return getattr(table, "is_cuda", None) is not None


def _fix(name: str, table: Any) -> str:
    if table is None or isinstance(table, str | bytes | int | float):
        return ""
    if place_of(name, table) is not None:
        return f"; convert {name} first"
    if hasattr(table, "new_tensor"):  # torch's
        return f"; use {name}.to(torch.{real_name()})"
    return f"; use np.ascontiguousarray({name}, np.{real_name()})"


def check_table(name: str, table: Any, axes: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a table, or why it is none. Only looked at: tensors stay tensors."""
    if not _is_of_reals(table):
        expected = f"{name}: expected {real_name()} {axes}, got {describe(table)}"
        raise TypeError(expected + _fix(name, table))
    shape = shape_of(table)
    if len(shape) not in ranks:
        raise ValueError(f"{name}: expected {real_name()} {axes}, got {describe(table)}")
    return shape


def _is_of_reals(table: Any) -> bool:
    if isinstance(table, np.ndarray):
        return bool(table.dtype == REAL)
    if not hasattr(table, "shape") or not hasattr(table, "dtype"):
        return False
    dtype = str(table.dtype).removeprefix("torch.")
    return dtype == real_name() or (dtype == "bfloat16" and may_be_narrow(table))


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
            f"{name}: expected {real_name()} ({', '.join(words)}{comma}), got {describe(table)}"
        )


def integer_of(name: str, value: Any) -> int:
    """`value` as an int. A truth, which Python counts among them, is none."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {_came(value)}") from None


def _came(value: Any) -> str:
    return str(value) if isinstance(value, bool | np.bool_) else type(value).__name__


def check_constant(name: str, value: Any) -> None:
    """Refuses a tensor that would not get the gradient it asks for."""
    if getattr(value, "requires_grad", False):
        raise TypeError(
            f"{name}: expected a number, got a tensor that requires a gradient, which it would not "
            "get: detach it"
        )


def number_of(name: str, value: Any) -> float:
    """`value` as a float, infinite where it is an integer beyond all floats. Texts and truths are
    none, nor are tensors that want a gradient."""
    if type(value) is float:
        return value
    check_constant(name, value)
    try:
        if isinstance(value, str | bytes | bool | np.bool_):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {_came(value)}") from None
    except OverflowError:
        return math.inf


def check_count(name: str, value: Any, least: int) -> int:
    """An integer argument of at least `least`."""
    number = integer_of(name, value)
    if number < least:
        raise ValueError(f"{name}: expected {least} or more, got {number}")
    return number


def check_size(name: str, value: Any, least: int) -> int:
    """A count that the core takes."""
    number = check_count(name, value, least)
    if number > _LIMIT:
        raise ValueError(f"{name}: expected at most 2^40, got {number}")
    return number


def check_number(name: str, value: Any, *, positive: bool = False) -> float:
    """A finite number; of torch.compile it may be a symbol, which comparisons take."""
    number = number_of(name, value)
    if not -math.inf < number < math.inf or (positive and number <= 0):
        kind = "a positive finite number" if positive else "a finite number"
        raise ValueError(f"{name}: expected {kind}, got {value}")
    return number


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def check_text(name: str, value: Any, encoding: str = "utf-8", errors: str = "strict") -> None:
    """A text that the core can be given; encoding, errors: as of str.encode."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected str, got {type(value).__name__}")
    if "\0" in value:
        raise ValueError(f"{name}: expected a text without NUL, got {value!r}")
    try:
        value.encode(encoding, errors)
    except UnicodeEncodeError:
        coded = encoding.upper()
        raise ValueError(f"{name}: expected a text that has {coded}, got {value!r}") from None


def check_truth(name: str, value: Any) -> bool:
    """True or False, or what NumPy has for them, or 1 or 0."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, int | np.bool_ | np.integer):
        raise TypeError(f"{name}: expected True or False, got {describe(value)}")
    if value not in (0, 1):
        raise ValueError(f"{name}: expected True or False, got {value}")
    return bool(value)


def check_reals(name: str, values: Any, axes: str, rank: int) -> npt.NDArray[np.float64]:
    """Finite numbers of whatever real type, in an array of their own."""
    expected = f"{name}: expected finite numbers {axes}"
    try:
        array = np.asarray(on_host(name, values))
    except ValueError:  # lists of different lengths within a list
        raise TypeError(f"{expected}, got a {type(values).__name__} of unequal parts") from None
    if array.dtype.kind not in "fiu" and array.size > 0:
        raise TypeError(f"{expected}, got {describe(array)}")
    if array.ndim != rank:
        raise ValueError(f"{expected}, got {describe(array)}")
    with np.errstate(over="ignore"):  # of long doubles
        numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all():
        at = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise ValueError(f"{expected}, got {numbers.flat[at]} at {at}")
    return numbers


def as_integers(name: str, values: Any, axes: str) -> npt.NDArray[Any]:
    """What is to be integers, as an array."""
    try:
        return np.asarray(on_host(name, values))
    except ValueError:  # lists of different lengths within a list
        raise TypeError(
            f"{name}: expected integers{axes}, got a {type(values).__name__} of unequal parts"
        ) from None


def check_integers(name: str, values: Any, axes: str, ranks: Container[int]) -> Any:
    """An integer array, of whatever integer type."""
    array = as_integers(name, values, f" {axes}")
    check_magnitude(name, array)
    if array.dtype.kind not in "iu" and array.size > 0:
        raise TypeError(f"{name}: expected integers {axes}, got {describe(array)}")
    if array.ndim not in ranks:
        raise ValueError(f"{name}: expected integers {axes}, got {describe(array)}")
    check_int64(name, array)
    return array


def check_magnitude(name: str, array: npt.NDArray[Any]) -> None:
    """Refuses integers so large that NumPy has no type for them."""
    for each in array.flat if array.dtype.kind == "O" else ():
        if isinstance(each, int) and not -(1 << 63) <= each < 1 << 63:
            raise ValueError(f"{name}: expected integers below 2^63 in magnitude, got {each}")


def check_int64(name: str, array: npt.NDArray[Any]) -> None:
    """Refuses unsigned integers that would be negative ones in int64."""
    if array.dtype.kind == "u" and array.size > 0 and int(array.max()) >= 1 << 63:
        raise ValueError(f"{name}: expected integers below 2^63, got {int(array.max())}")


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
