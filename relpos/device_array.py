# SPDX-License-Identifier: Apache-2.0
"""Arrays on a GPU: those of other libraries, taken by DLPack where they lie, and relpos's own."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import numpy.typing as npt

from relpos import _core

A = TypeVar("A", bound="DeviceArray")
Shape = tuple[int, ...]

HOST_DEVICES = (1, 3, 11)  # DLPack: CPU, memory pinned for CUDA, for ROCm
CUDA, CUDA_MANAGED = 2, 13
CUDA_DEVICES = (CUDA, CUDA_MANAGED)
DEVICE_NAMES = {8: "a Metal device", 10: "a ROCm device"}
PER_THREAD = 2  # CUDA's name for a stream that every thread has one of
BYTES = {"float32": 4, "bfloat16": 2}
ELEMENTS = {"float32": _core.F32, "bfloat16": _core.BF16}


class DeviceArray:
    """An array in the memory of a GPU, as `relpos.attention` gives it for arrays of a GPU.

        x = cupy.from_dlpack(out)      jax.dlpack.from_dlpack(out)      torch.from_dlpack(out)

    each takes `out`, such an array, without a copy; `out.numpy()` is a copy on the host. It keeps
    the memory of the array it was made from, or its own, until nobody refers to it any more.

    shape: tuple of int.
    dtype: "float32" or "bfloat16".
    strides: tuple of int, in elements.
    device: "cuda:0", "cuda:1", ...
    stream: int. The CUDA stream that its content is made on; 0: the default stream.
    """

    __slots__ = (
        "__weakref__", "address", "device", "dtype", "owner", "shape", "source", "stream",
        "stream_owner", "strides", "waits", "writable",
    )  # fmt: skip

    def __init__(
        self,
        address: int,
        dtype: str,
        shape: Shape,
        strides: Shape,
        *,
        device: str,
        owner: Any,
        stream: int = 0,
        stream_owner: Any = None,
        writable: bool = True,
        source: Any = None,
        waits: bool = False,
    ) -> None:
        self.address = address
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.device = device
        self.owner = owner
        self.stream = stream
        self.stream_owner = stream_owner  # what keeps the stream from being destroyed
        self.writable = writable
        self.source = source  # the array of another library that it was taken from
        self.waits = waits  # its memory may be used again as soon as it is let go, on any stream

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def memory(self) -> _core.Memory:
        """As the core takes it."""
        return self.address, self.dtype, self.shape, self.strides, self.writable

    @property
    def reach(self) -> int:
        """Elements from the first to behind the last, where they lie."""
        if self.size == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype} {self.shape} on {self.device})"

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"the array lies on {self.device}; its numpy() is a copy on the host")

    def numpy(self) -> npt.NDArray[np.float32]:
        """A copy on the host, in float32, which holds bfloat16 exactly. Waits for the GPU."""
        wide = self.dtype == "float32"
        flat: npt.NDArray[Any] = np.empty(self.reach, np.float32 if wide else np.uint16)
        if flat.size > 0:
            _core.device_read(self.device, self.address, flat)
        if not wide:
            flat = (flat.astype(np.uint32) << 16).view(np.float32)
        steps = [4 * stride for stride in self.strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps).copy()

    # ---- other libraries -------------------------------------------------------------------------

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, int(self.device.partition(":")[2] or 0)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """The array for another library, which is to use it on `stream` (1 or None: the default
        one). Where that is not the stream it is made on, waits until it is there."""
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError(f"the array is on {self.device} and given as it lies; copy it there")
        own = {None: 0, 1: 0}.get(stream, stream)
        if own == PER_THREAD or own not in (-1, self.stream):  # -1: the caller sees to the order
            _core.device_wait(self.device)
        kind, index = self.__dlpack_device__()
        return _core.dlpack_give(
            self.owner, kind, index, self.address, self.dtype, self.shape, self.strides,
            self.writable, max_version is not None and max_version[0] >= 1,
        )  # fmt: skip

    # ---- arrays beside it ------------------------------------------------------------------------

    def allocate(self, count: int) -> tuple[int, Any]:
        """`count` bytes on its device: where they lie, and what they live as long as."""
        return _core.device_memory(self.device, count)

    def empty(self, shape: Shape, dtype: str) -> DeviceArray:
        """A new array on its device, in C order."""
        address, owner = self.allocate(math.prod(shape) * BYTES[dtype])
        return DeviceArray(
            address, dtype, shape, c_strides(shape), device=self.device, owner=owner,
            stream=self.stream, stream_owner=self.stream_owner,
        )  # fmt: skip

    def constant(self, values: npt.NDArray[np.float32]) -> DeviceArray:
        """A new array on its device with what the host holds."""
        made = self.empty(values.shape, "float32")
        _core.device_write(made.device, made.address, np.ascontiguousarray(values, np.float32))
        return made

    def zeros_like(self) -> DeviceArray:
        """Zeros that lie in memory as it does."""
        flat = self.constant(np.zeros(self.reach, np.float32))
        return DeviceArray(
            flat.address, "float32", self.shape, self.strides, device=self.device,
            owner=flat.owner, stream=self.stream, stream_owner=self.stream_owner,
        )  # fmt: skip

    def plus(self, other: DeviceArray) -> DeviceArray:
        """The sum of both, float32: on the host, and so waited for."""
        return self.constant(self.numpy() + other.numpy())

    def through(self, name: str, change: Callable[[Any], Any]) -> DeviceArray:
        """change(self), for schemes whose tables are made of their parameters: on the host, and so
        waited for, on the stream that copies are in order with."""
        return self.constant(change(self.on(0).numpy()))

    def on(self, stream: int) -> DeviceArray:
        """The same array, to be read on this stream. What relpos itself has computed is in order
        on any: every call waits for the one before."""
        if stream == self.stream or self.source is None:
            return self
        return from_dlpack("array", self.source, stream)


def c_strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


# --------------------------------------------------------------------------------------------------
# Other libraries
# --------------------------------------------------------------------------------------------------


def place_of(name: str, x: Any) -> str | None:
    """The GPU that an array lies on, as "cuda:0"; None: it is on the host, or no array."""
    if isinstance(x, np.ndarray):
        return None
    if isinstance(x, DeviceArray):
        return x.device
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        return None
    try:
        kind, index = (int(number) for number in x.__dlpack_device__())
    except Exception as error:  # of its library: meta tensors of torch are nowhere
        raise TypeError(f"{name}: expected an array that can be read: {error}") from None
    if kind in HOST_DEVICES:
        return None
    if kind not in CUDA_DEVICES:
        where = DEVICE_NAMES.get(kind, f"DLPack device {kind}")
        raise TypeError(
            f"{name}: lies on {where}, relpos computes on the CPU and on NVIDIA GPUs; move it first"
        )
    return f"cuda:{index}"


def current_stream(x: Any, device: str) -> tuple[int, Any] | None:
    """The stream that x's library works on now, and what it lives as long as, for the libraries
    that have one to ask for."""
    library, index = _library(x), int(device.partition(":")[2])
    if library == "torch":  # whose streams live for ever
        return int(importlib.import_module("torch").cuda.current_stream(index).cuda_stream), None
    if library == "cupy":
        cuda = importlib.import_module("cupy").cuda
        with cuda.Device(index):
            stream = cuda.get_current_stream()
            return int(stream.ptr), stream
    return None


def _library(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _exporting(x: Any, device: str) -> AbstractContextManager[Any]:
    """Around x.__dlpack__: torch gives what lies on its current device alone."""
    if _library(x) != "torch":
        return nullcontext()
    index = int(device.partition(":")[2])
    return cast(AbstractContextManager[Any], importlib.import_module("torch").cuda.device(index))


def from_dlpack(name: str, x: Any, stream: int | None = None) -> DeviceArray:
    """x, which lies on a GPU, without a copy. stream: what it is to be read on; None: what its
    library works on now, or the default stream."""
    device = place_of(name, x)
    assert device is not None
    own, owner_of_own = current_stream(x, device) or (None, None)
    chosen = stream if stream is not None else own or 0
    asked = chosen or 1  # to DLPack the default stream is 1
    try:
        with _exporting(x, device):
            try:
                capsule = x.__dlpack__(stream=asked, max_version=(1, 0))
            except TypeError:  # a library of before DLPack 1
                capsule = x.__dlpack__(stream=asked)
        owner, _, _, address, dtype, shape, strides, writable = _core.dlpack_take(capsule)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name}: no array to read without a copy: {error}") from error
    if any(step < 0 for step, count in zip(strides, shape, strict=True) if count > 1):
        raise ValueError(f"{name}: strides must be whole elements forward, got strides {strides}")
    if dtype not in BYTES:
        raise TypeError(
            f"{name}: {dtype} {shape} on {device}; of what lies on a GPU relpos takes float32 and "
            "bfloat16, all other arguments stay on the host"
        )
    return DeviceArray(
        address, dtype, shape, strides, device=device, owner=owner, stream=chosen,
        stream_owner=owner_of_own, writable=writable, source=x, waits=own != chosen,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def problem_of(name: str) -> str | None:
    """Why this device cannot be used; None: it can."""
    found = _core.devices()
    names = [line[0] for line in found]
    if name in names:
        return found[names.index(name)][-1]
    if names[-1] == "cuda":  # the line that says why there is none
        return found[-1][-1]
    return f"there is no {name}, only {', '.join(names)}"


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where the arrays of a call lie that is not computed on the host, and how it is computed."""

    like: DeviceArray  # q: what is new is made beside it
    stream: int
    stream_owner: Any
    precision: int
    waits: bool  # until the call is done, because of whose memory it reads

    @classmethod
    def of(cls, name: str, x: DeviceArray, precision: str, *others: Any) -> Placement:
        """That of x, an argument called so."""
        problem = None if x.device == "cpu" else problem_of(x.device)
        if problem is not None:
            raise _core.DeviceError(
                f"{name}: lies on {x.device}, where relpos cannot compute: {problem}"
            )
        narrow = precision == "bf16" or x.dtype == "bfloat16"
        made = cls(x, x.stream, x.stream_owner, _core.BF16 if narrow else _core.F32, x.waits)
        return made.reading(*others)

    @property
    def core(self) -> _core.Placement:
        """As the core takes it."""
        element = ELEMENTS[self.like.dtype]
        return self.like.device, self.stream, element, self.precision, self.like.allocate

    def beside(self, dout: DeviceArray) -> Placement:
        """The same on the stream of another array."""
        there = dataclasses.replace(self, stream=dout.stream, stream_owner=dout.stream_owner)
        return there.reading(dout)

    def reading(self, *others: Any) -> Placement:
        """The same where the call reads these arrays as well."""
        waits = self.waits or any(getattr(other, "waits", False) for other in others)
        return self if waits == self.waits else dataclasses.replace(self, waits=waits)

    def empty(self, shape: Shape, dtype: str | None = None) -> DeviceArray:
        """A new array for the call to write, of the type of q where no other is named."""
        made = self.like.empty(shape, dtype or self.like.dtype)
        made.stream, made.stream_owner = self.stream, self.stream_owner
        return made

    def done(self) -> None:
        """What follows every call."""
        if self.waits:
            _core.device_wait(self.like.device)


def on_host(precision: str) -> _core.Placement | None:
    """How NumPy's arrays are computed, as the core takes it."""
    return None if precision == "f32" else ("cpu", 0, _core.F32, _core.BF16, None)


def shares_memory(a: Any, b: Any) -> bool:
    """Do two arrays share an element? Also where their strides are too intricate to tell."""
    try:
        return np.shares_memory(extent(a), extent(b), 10_000)
    except RuntimeError:  # TooHardError
        return True


def extent(x: Any) -> Any:
    """x for comparing addresses: of a GPU's array one that says where it lies, not to be read."""
    if not isinstance(x, DeviceArray):
        return x
    size = BYTES[x.dtype]
    memory: Any = (ctypes.c_char * max(x.reach * size, 1)).from_address(x.address or 1)
    steps = [size * stride for stride in x.strides]
    return np.ndarray(x.shape, f"u{size}", memory, 0, steps)


def memory_of(name: str, x: Any, place: Placement | None) -> Any:
    """An array as the core takes it, or the reason why it cannot be beside the others."""
    if place is None:
        return x
    if not isinstance(x, DeviceArray):
        return x  # for the core to refuse
    check_beside(name, x.device, place.like.device)
    return x.on(place.stream).memory


def check_beside(name: str, own: str | None, other: str | None, of: str = "q") -> None:
    """Refuses arrays of one call that lie on several devices."""
    if own != other:
        raise TypeError(
            f"{name}: lies on {own or 'the host'}, {of} on {other or 'the host'}; "
            "move one of them to the other"
        )
