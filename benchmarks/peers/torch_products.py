# SPDX-License-Identifier: Apache-2.0
"""Matrix products by that of torch's two libraries which is faster on this machine.

torch.mm and F.linear call MKL, which keeps to AVX2 on processors of AMD's; torch has oneDNN built in
too, whose code for AVX-512 asks nobody's name, and takes operands as they lie. On two cores of Zen 5
MKL reaches 225 Gflop/s and oneDNN up to 490, but for weights' gradients 120 to 340. So both are
tried where a product of new shapes comes, and the faster one is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]

_TRIES = 5
_chosen: dict[tuple[object, ...], Product] = {}


def by_onednn(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.mT, None, "none", [], "")
    return out


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b of matrices, without a gradient."""
    key = (a.shape, a.stride(), b.shape, b.stride())
    if key not in _chosen:
        _chosen[key] = min((torch.mm, by_onednn), key=lambda multiply: _seconds(multiply, a, b))
    return _chosen[key](a, b)


def _seconds(multiply: Product, a: Tensor, b: Tensor) -> float:
    times = []
    for _ in range(_TRIES):
        begun = time.perf_counter()
        multiply(a, b)
        times.append(time.perf_counter() - begun)
    return min(times)


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """x W^T + b of rows, its three products by the faster library each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        y = product(rows, weight.mT)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        dy = gradients[0]
        dbias = dy.sum(0) if ctx.needs_input_grad[2] else None
        return product(dy, weight), product(dy.mT, rows), dbias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear."""
    y: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)
    return y.unflatten(0, x.shape[:-1])
