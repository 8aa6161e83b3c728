# SPDX-License-Identifier: Apache-2.0
"""What may be given to a call, in the words of torch."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from relpos.position import arrays
from relpos.request import integers
from relpos.torch.calls import PER_CALL
from relpos.torch.tensors import is_on_gpu

_OF_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def _type_in_autocast(x: Tensor) -> torch.dtype | None:
    """That of products where the tensor lies; None: torch.autocast is not at work there."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def as_autocast(x: Any) -> Any:
    """Within torch.autocast a tensor of the type that attention computes with: float32 on the CPU,
    and on a GPU where products are of float16. Others are left to `check_tensors`."""
    if not isinstance(x, Tensor) or x.dtype not in _OF_AUTOCAST:
        return x
    cast = _type_in_autocast(x)
    if cast is None:
        return x
    halves = is_on_gpu(x) and cast is torch.bfloat16
    return x.to(torch.bfloat16 if halves else torch.float32)


def precision_for(q: Any, precision: str | None) -> str:
    """That which was asked for, else what torch.autocast has for a tensor on the CPU."""
    if precision is not None:
        return precision
    on_host = isinstance(q, Tensor) and q.device.type == "cpu"
    return "bf16" if on_host and _type_in_autocast(q) is torch.bfloat16 else "f32"


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Whether these are tensors that attention takes. torch.compile reads this too."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        check_tensor(name, x)
        if x.device != q.device:
            raise TypeError(f"{name}: lies on {x.device}, q on {q.device}; use {name}.to(q.device)")
        _check_type(name, x, q)
        if x.dim() > 0 and x.shape[-1] > 1 and x.stride(-1) != 1 and x.numel() > 0:
            raise ValueError(
                f"{name}: the numbers of its last axis lie {x.stride(-1)} apart, expected side by "
                f"side; use {name}.contiguous()"
            )


def check_tensor(name: str, x: Tensor) -> None:
    """Whether its numbers lie in memory, each at its place. Of meta tensors torch would take the
    shapes, and give what nobody has computed."""
    if x.is_nested:
        raise TypeError(
            f"{name}: expected a dense tensor, got a nested one; use {name}.to_padded_tensor(0)"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got {x.layout}; use {name}.to_dense()")
    if x.device.type not in ("cpu", "cuda"):
        raise TypeError(
            f"{name}: lies on {x.device}, relpos computes on the CPU and on NVIDIA GPUs; "
            f"use {name}.cpu()"
        )


def check_parameters(named: Iterable[tuple[str, Any]]) -> None:
    """Tables: those of a module may be replaced, by None too."""
    for name, x in named:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        check_tensor(name, x)


def check_host(host: Iterable[Tensor | None]) -> None:
    """What the host reads, in the order of PER_CALL."""
    for name, x in zip(PER_CALL, host, strict=True):
        if x is not None:
            check_tensor(name, x)


def host_of(*counts: Any) -> list[Tensor | None]:
    """Lengths, offsets and starts as tensors, in the order of PER_CALL."""
    if torch.compiler.is_compiling():
        return [None if x is None else torch.as_tensor(x) for x in counts]
    return [
        None if x is None else _count(name, x)
        for name, x in zip(PER_CALL[:-1], counts, strict=True)
    ]


def _count(name: str, x: Any) -> Tensor:
    if isinstance(x, int | np.integer | list | tuple | np.ndarray | str):
        found = integers(name, x)  # of torch's own byte order and strides, with sentences of ours
        assert found is not None
        return torch.from_numpy(found)
    return torch.as_tensor(x)  # a tensor, or another library's array, on a GPU too


def check_mask(mask: Any) -> None:
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a bool tensor, got {type(mask).__name__}")
    if mask is not None and mask.dtype != torch.bool:
        got = str(mask.dtype).removeprefix("torch.")
        raise TypeError(f"mask: expected a bool tensor, got {got}; use mask.bool()")


def check_seed(seed: Any) -> int:
    """seed as torch takes it: below 2^63."""
    if torch.compiler.is_compiling() and not isinstance(seed, bool):
        # an int stays a variable, which operator.index and a sentence would make a constant of
        return seed if isinstance(seed, int) else operator.index(seed)
    expected = f"seed: expected an integer from 0 to 2^63 - 1, got {seed!r}"
    try:
        if isinstance(seed, bool):
            raise TypeError
        number = operator.index(seed)
    except TypeError:
        raise TypeError(expected) from None
    if not 0 <= number < 1 << 63:
        raise ValueError(expected)
    return number


def _check_type(name: str, x: Tensor, q: Tensor) -> None:
    real = arrays.real_name()
    got = str(x.dtype).removeprefix("torch.")
    if not is_on_gpu(x):
        if got != real:
            raise TypeError(f"{name}: expected {real}, got {got}; use {name}.float()")
    elif got not in ("float32", "bfloat16"):
        raise TypeError(f"{name}: expected float32 or bfloat16, got {got}; use {name}.float()")
    elif x.dtype != q.dtype:
        own = str(q.dtype).removeprefix("torch.")
        raise TypeError(f"{name}: expected {own} as q, got {got}; use {name}.to(q.dtype)")


def check_transforms(*tensors: Tensor) -> None:
    """Refuses forward-mode derivatives, which torch would take to be zero without a word, and
    transforms of torch.func, within which torch fails with a sentence that does not name relpos.
    Within functionalize the operation works."""
    if torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError("relpos.torch: has no forward-mode derivatives (jvp, jacfwd)")
    functorch = torch._C._functorch
    if any(functorch.is_gradtrackingtensor(x) or functorch.is_batchedtensor(x) for x in tensors):
        raise RuntimeError(
            "relpos.torch: cannot be inside grad, vjp, jacrev or vmap of torch.func; use "
            "torch.autograd.grad, and for vmap the batch axis"
        )
