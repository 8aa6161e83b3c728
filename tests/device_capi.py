# SPDX-License-Identifier: Apache-2.0
"""capi.Core for a device: the same calls, every array copied there before and back after.

What compares a core with the reference (test_attention.compare_case, properties.correct) takes a
DeviceCore as it is. Without a GPU the device is the emulated one: see emulated().
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capi import F32, Core, environment, run_script
from guarded_arrays import Strided


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, ties to even, as its bits; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class DeviceWorkspace:
    """capi.Workspace on a device: what lies around it is looked at by fetch()."""

    def __init__(self, core: DeviceCore, size: int) -> None:
        self.size = size
        self.raw = np.full(size + 512, 0xFF, np.uint8)
        self.raw[:256] = self.raw[256 + size :] = 0xA5
        self.address = core.upload(self.raw) + 256

    def untouched(self) -> bool:
        return bool(np.all(self.raw[:256] == 0xA5) and np.all(self.raw[256 + self.size :] == 0xA5))


class DeviceCore(Core):
    """libcore computing on a device; element is the type of q, k, v, out and their gradients.

    Arrays lie as in cases: unaligned. With `aligned` those of activations begin at a multiple of 16
    bytes, which kernels read 16 at a time where the strides let them.
    """

    def __init__(
        self,
        path: Path,
        device: str = "cuda",
        element: int = F32,
        precision: int = F32,
        aligned: bool = False,
    ) -> None:
        super().__init__(path, precision=precision)
        self.name = f"{device}-{('f32', 'bf16')[element]}-{('f32', 'bf16')[precision]}"
        self.device = device.encode()
        self.aligned = aligned  # q, k, v and so on begin at a multiple of 16 bytes
        self.where.device, self.where.element = self.device, element
        self.kept: list[tuple[int, np.ndarray, Any]] = []  # device address, host bytes, what for
        self.addresses: dict[int, int] = {}  # by the host's
        pointer, size, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
        for name, arguments in (
            ("rp_device_allocate", [text, size, ctypes.POINTER(pointer)]),
            ("rp_device_free", [text, pointer]),
            ("rp_device_write", [text, pointer, pointer, size]),
            ("rp_device_read", [text, pointer, pointer, size]),
        ):
            function = getattr(self.lib, name)
            function.restype, function.argtypes = ctypes.c_int, arguments

    def upload(self, host: np.ndarray, back: Any = None) -> int:
        """Copies bytes to the device; fetch() copies them back, or hands them to `back`."""
        memory = ctypes.c_void_p()
        size = max(host.nbytes, 1)
        self.check(self.lib.rp_device_allocate(self.device, size, ctypes.byref(memory)))
        assert memory.value
        self.kept.append((memory.value, host, back))
        self.check(self.lib.rp_device_write(self.device, memory, host.ctypes.data, host.nbytes))
        return memory.value

    def place(self, x: Strided, activation: bool = False) -> int:
        first = (x.address - x.raw.ctypes.data) // x.raw.itemsize
        size = 2 if activation and self.where.element else x.raw.itemsize
        known = self.addresses.get(x.raw.ctypes.data)
        if known is None:
            shift = -first * size % 16 if activation and self.aligned else 0
            known = self.upload_array(x, size == 2, shift) + shift
            self.addresses[x.raw.ctypes.data] = known
        return known + first * size

    def upload_array(self, x: Strided, bf16: bool, shift: int) -> int:
        """The array, `shift` bytes after the beginning of the device's memory."""
        before = to_bf16(x.raw) if bf16 else x.raw.copy()
        host = np.zeros(shift + before.nbytes, np.uint8)
        host[shift:] = before.view(np.uint8)

        def back(after: np.ndarray) -> None:
            """Rounded numbers that nobody wrote are those that were there, not rounded."""
            new = after[shift:].view(before.dtype)
            x.raw[...] = np.where(new == before, x.raw, from_bf16(new)) if bf16 else new

        return self.upload(host, back)

    def place_workspace(self, size: int) -> Any:
        return DeviceWorkspace(self, size)

    def placement(self) -> int:
        self.release()  # of a call that failed
        return ctypes.addressof(self.where)

    def fetch(self) -> None:
        for address, host, back in self.kept:
            self.check(self.lib.rp_device_read(self.device, host.ctypes.data, address, host.nbytes))
            if back is not None:
                back(host)
        self.release()

    def release(self) -> None:
        for address, _, _ in self.kept:
            self.check(self.lib.rp_device_free(self.device, address))
        self.kept.clear()
        self.addresses.clear()


COUNTERS = ("warp_ops", "mma", "ldmatrix", "bank_conflicts", "async_bytes", "barriers", "launches")
COUNTERS += ("waits", "contexts", "busiest", "bytes", "turns")


def counters(library: Path) -> dict[str, int]:
    """What the emulator has counted in this process (tests/emulator/counters.cpp)."""
    read = ctypes.CDLL(str(library)).emu_counters
    read.restype = ctypes.POINTER(ctypes.c_uint64)
    return dict(zip(COUNTERS, read()[: len(COUNTERS)], strict=True))


def emulated(libcore: Path, library: Path, **given: Any) -> DeviceCore:
    """A core that finds the emulated device (`make emulated`) in the place of a GPU."""
    with environment("RELPOS_CUDA_LIBRARY", str(library)):
        core = DeviceCore(libcore, **given)
        core.placement()
        core.upload(np.zeros(1, np.uint8))  # opens the library, once for the life of this copy
        core.release()
    return core


def run_cases(
    script: str,
    libraries: dict[str, Path],
    library: Path,
    precision: int,
    names: Sequence[str],
    **environment: str,
) -> str:
    """The digest of cases that a script runs in a process of its own, with that device's library."""
    given = {**os.environ, "RELPOS_CUDA_LIBRARY": str(library), **environment}
    arguments = (str(libraries["f32"]), str(precision), *names)
    ran = run_script(script, *arguments, environment=given)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said[-6000:]
    found = re.search(r"\d+ cases, 0 wrong, digest (\w+)", said)
    assert found, said[-6000:]
    return found.group(1)
