# SPDX-License-Identifier: Apache-2.0
"""Tensors as arrays of relpos, and back, over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relpos.device_array import DeviceArray
from relpos.position import arrays


class TensorArray(DeviceArray):
    """A tensor as an array on its device, over the same memory. What is made beside it is made by
    torch, in torch's memory, and schemes compute with torch."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(
            tensor.data_ptr(),
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            device=str(tensor.device),
            owner=tensor,
            stream=stream_of(tensor),
        )
        self.tensor = tensor

    def allocate(self, count: int) -> tuple[int, Any]:
        memory = torch.empty(count, dtype=torch.uint8, device=self.tensor.device)
        return memory.data_ptr(), memory

    def empty(self, shape: tuple[int, ...], dtype: str) -> TensorArray:
        made = torch.empty(shape, dtype=getattr(torch, dtype), device=self.tensor.device)
        return TensorArray(made)

    def constant(self, values: Any) -> TensorArray:
        return TensorArray(torch.from_numpy(values).to(self.tensor.device))

    def zeros_like(self) -> TensorArray:
        flat = self.tensor.new_zeros(self.reach)
        return TensorArray(flat.as_strided(self.shape, self.strides))

    def plus(self, other: Any) -> TensorArray:
        return TensorArray(self.tensor + other.tensor)

    def through(self, name: str, change: Callable[[Any], Any]) -> TensorArray:
        return TensorArray(change(self.tensor).contiguous())


def is_on_gpu(x: Tensor) -> bool:
    return bool(x.device.type == "cuda")


def stream_of(x: Tensor) -> int:
    """What torch works on now, on the device of x; 0 on the host."""
    on_gpu = x.device.type == "cuda"
    return int(torch.cuda.current_stream(x.device).cuda_stream) if on_gpu else 0


def array_of(x: Tensor) -> Any:
    """A tensor as relpos.attention takes it: the same memory. Tensor.numpy() would forbid torch to
    give that memory back, as FSDP does."""
    x = x.detach()
    return TensorArray(x) if is_on_gpu(x) else np.from_dlpack(x)


def tensor_of(x: Any) -> Tensor:
    """The way back."""
    return x.tensor if isinstance(x, TensorArray) else torch.from_numpy(np.ascontiguousarray(x))


def _real_where(x: Tensor) -> str:
    """The type of tables where x lies."""
    return "float32" if is_on_gpu(x) else arrays.real_name()


def check_table(name: str, x: Tensor) -> None:
    """A module's parameters change their type with it, as by .double()."""
    real = _real_where(x)
    got = str(x.dtype).removeprefix("torch.")
    if got not in (real, "bfloat16"):
        raise TypeError(f"{name}: expected {real} or bfloat16, got {got}; use .float()")


def table_of(x: Tensor) -> Any:
    """A parameter as an array; of bfloat16 it is widened to what the core computes with."""
    narrow = x.dtype == torch.bfloat16
    return array_of(x.detach().to(getattr(torch, _real_where(x))) if narrow else x)
