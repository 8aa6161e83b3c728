# SPDX-License-Identifier: Apache-2.0
"""Small arrays for the tests of the binding."""

from __future__ import annotations

from typing import Any

import numpy as np

import relpos

B, H, N, D, K = 2, 3, 37, 24, 4


def rows(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def small_qkv() -> tuple[Any, Any, Any]:
    return rows(B, H, N, D, seed=1), rows(B, H, N, D, seed=2), rows(B, H, N, D, seed=3)


def small_shaw() -> relpos.Shaw:
    return relpos.Shaw(rows(2 * K + 1, D, seed=4), rows(2 * K + 1, D, seed=5))


def misaligned(*shape: int) -> Any:
    size = 4 * int(np.prod(shape))
    return np.zeros(size + 1, np.uint8)[1:].view(np.float32).reshape(shape)


def read_only(array: Any) -> Any:
    array.setflags(write=False)
    return array
