# SPDX-License-Identifier: Apache-2.0
"""Arrays of another library on a GPU, as DLPack shows them, in memory of the emulated device."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from device_capi import from_bf16, to_bf16
from relpos import _core

DEVICE = "cuda:0"
KINDS = {"float32": (2, 32), "bfloat16": (4, 16), "int64": (0, 64)}


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("axes", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Plain(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [
        ("tensor", Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


_lent: dict[int, Any] = {}  # what is lent out, by the address of its description


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _give_back(description: int) -> None:
    owner = _lent.pop(description)[0]
    owner.lent -= 1


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Foreign:
    """`values` on the device, in `dtype`; version: of DLPack, 0 or 1."""

    def __init__(
        self,
        values: Any,
        dtype: str = "float32",
        *,
        version: int = 1,
        read_only: bool = False,
        major: int = 1,
        index: int = 0,
    ) -> None:
        flat = np.ascontiguousarray(values)
        if dtype == "bfloat16":
            flat = to_bf16(flat)
        elif dtype == "float32":
            flat = flat.astype(np.float32)
        self.dtype = dtype
        self.itemsize = flat.itemsize
        self.address, self.owner = _core.device_memory(DEVICE, max(flat.nbytes, 1))
        if flat.size > 0:
            _core.device_write(DEVICE, self.address, flat)
        self.shape = flat.shape
        self.strides = tuple(step // flat.itemsize for step in flat.strides)
        self.size = flat.size
        self.version, self.read_only, self.major, self.index = version, read_only, major, index
        self.lent = 0
        self.streams: list[int | None] = []

    def part(self, change: Any) -> Foreign:
        """A view: change(an array that lies as this one does) says which."""
        stand_in = np.lib.stride_tricks.as_strided(
            np.empty(0, f"u{self.itemsize}"),
            self.shape,
            [self.itemsize * s for s in self.strides],
        )
        view = change(stand_in)
        other = object.__new__(Foreign)
        other.__dict__ = dict(self.__dict__, lent=0, streams=[])
        start = stand_in.__array_interface__["data"][0]
        other.address += view.__array_interface__["data"][0] - start
        other.shape = view.shape
        other.strides = tuple(step // self.itemsize for step in view.strides)
        return other

    def numpy(self) -> Any:
        """A copy on the host, of an array without gaps."""
        flat = np.empty(self.shape, f"u{self.itemsize}")
        _core.device_read(DEVICE, self.address, flat)
        return from_bf16(flat) if self.dtype == "bfloat16" else flat.view(np.float32)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def _tensor(self, kept: list[Any]) -> Tensor:
        numbers = [(ctypes.c_int64 * len(x))(*x) for x in (self.shape, self.strides)]
        kept += numbers
        kind, bits = KINDS[self.dtype]
        # half of the way in byte_offset, which some libraries use
        return Tensor(
            self.address - 64, 2, self.index, len(self.shape), kind, bits, 1, *numbers, 64
        )

    def _capsule(self, stream: int | None, versioned: bool) -> object:
        self.streams.append(stream)
        kept: list[Any] = [self]
        tensor = self._tensor(kept)
        deleter = ctypes.cast(_give_back, ctypes.c_void_p)
        flags = 1 if self.read_only else 0
        description: Any = Plain(tensor, None, deleter)
        if versioned:
            description = Versioned(self.major, 0, None, deleter, flags, tensor)
        kept.append(description)
        address = ctypes.addressof(description)
        _lent[address] = kept
        self.lent += 1
        name = b"dltensor_versioned" if versioned else b"dltensor"
        return _new_capsule(address, name, None)

    def __dlpack__(self, *, stream: int | None = None, **more: Any) -> object:
        if self.version == 0 and more:
            raise TypeError("unexpected keyword arguments")  # as a library of before 1.0 does
        return self._capsule(stream, self.version == 1 and more.get("max_version", (0,))[0] >= 1)
