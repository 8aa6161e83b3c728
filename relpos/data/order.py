# SPDX-License-Identifier: Apache-2.0
"""Random orders from integer arithmetic alone: the same on every machine, with every NumPy.

A permutation of n things is a Feistel network over the next power of four: eight rounds of a mixing
function swap and scramble the two halves of a number's bits, which is a permutation whatever the
function is; numbers of n and more go through again. Place i of the order costs no memory and
needs no other place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WORD = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
ROUNDS = 8
LEAST_HALF = 4  # bits: with fewer, few of the orders can be had

Numbers = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


def word(*numbers: int) -> int:
    """64 bits that depend on every one of these integers, and on their order."""
    state = 0
    for number in numbers:
        state = _mixed((state + STEP + number) & WORD)
    return state


def _mixed(x: int) -> int:
    """The finaliser of splitmix64, of an integer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def mixed(numbers: Numbers) -> Numbers:
    """The same of an array."""
    x = numbers ^ (numbers >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x = x * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def permuted(begin: int, end: int, n: int, key: int) -> Places:
    """Places begin to end of the order of 0 to n - 1 that belongs to the key."""
    half = max(((n - 1).bit_length() + 1) // 2, LEAST_HALF)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    keys = [np.uint64(word(key, turn)) for turn in range(ROUNDS)]
    numbers = np.arange(begin, end, dtype=np.uint64)
    outside = np.ones(numbers.size, bool)
    while outside.any():
        left, right = numbers[outside] >> shift, numbers[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (mixed(right ^ round_key) & mask)
        numbers[outside] = (left << shift) | right
        outside[outside] = numbers[outside] >= np.uint64(n)
    return numbers.astype(np.int64)


def shuffled(n: int, key: int) -> Places:
    """The order of 0 to n - 1 that belongs to the key, at once: of n words of splitmix64 by size."""
    numbers = np.arange(n, dtype=np.uint64) * np.uint64(STEP) + np.uint64(key)
    return np.argsort(mixed(numbers), kind="stable")
