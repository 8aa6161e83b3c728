# SPDX-License-Identifier: Apache-2.0
"""The twins of PTX instructions: against NumPy, and against what a GPU said.

tests/emulator/vectors.cpp runs every function of cuda/ptx.h; tests/golden/ptx_vectors.txt is what it
printed on an H100, by `make gpu-check PART=test`. A new function of ptx.h asks for a GPU.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from building import make

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests" / "golden" / "ptx_vectors.txt"

# What blocks share by turns is newer than the last GPU that was there; NumPy knows it below.
UNRECORDED = ("add_four", "pass_turn")

Vectors = dict[str, np.ndarray]


def parse(text: str) -> Vectors:
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {name: np.array([int(w, 16) for w in words], np.uint32) for name, *words in lines}


@pytest.fixture(scope="module")
def twins() -> Vectors:
    make("build/emulated/vectors")
    return parse(subprocess.check_output([ROOT / "build" / "emulated" / "vectors"], text=True))


def faults(ours: Vectors, theirs: Vectors) -> list[str]:
    """Names whose words differ. The order in which an mma adds is the GPU's own, its 16 products of
    numbers up to 4 and the sum before them below 300; ex2.approx is right to two units."""
    wrong = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        a, b = ours[name].view(np.float32), theirs[name].view(np.float32)
        if name == "mma_bf16":
            same = np.abs(a - b) <= 17 * 300 * 2.0**-24
        elif name == "exp2_approx":
            with np.errstate(invalid="ignore"):
                same = (ours[name] == theirs[name]) | (np.abs(a - b) <= 2 * np.spacing(np.abs(a)))
        else:
            same = ours[name] == theirs[name]
        if not np.all(same):
            wrong.append(name)
    return wrong


def test_the_twins_are_what_a_gpu_said(twins: Vectors) -> None:
    recorded = parse(RECORDED.read_text())
    assert faults(twins, recorded) == sorted(UNRECORDED)
    assert not recorded.keys() & set(UNRECORDED)  # else they are recorded


def test_every_function_of_ptx_h_is_run(twins: Vectors) -> None:
    text = (ROOT / "cuda" / "ptx.h").read_text()
    names = set(re.findall(r"__device__ inline \w+ (\w+)\(", text))
    names -= {"smem_address", "cp_async_commit", "cp_async_wait"}  # the copy's
    names -= {"prefetch_line", "read_after_turn"}  # which leave nothing to see
    names -= {"put_four", "get_four"}  # a part of add_four's
    names -= {"draw_number", "look_at_turn", "await_turn"}  # of pass_turn's
    assert names == twins.keys()


def test_a_difference_is_seen(twins: Vectors) -> None:
    """The comparison with a GPU's words, tried on words that are wrong."""
    assert faults(twins, twins) == []
    for name, words in twins.items():
        other = words.copy()
        other[17 if name != "cp_async16" else 0] ^= 0x00800000
        assert faults(twins, twins | {name: other}) == [name]
    assert faults(twins, {}) == sorted(twins)


def mixed(x: np.ndarray) -> np.ndarray:
    """vectors.cpp's."""
    x = x.astype(np.uint32)
    x = (x ^ 61) ^ (x >> 16)
    x = x * np.uint32(9)
    x ^= x >> 4
    x = x * np.uint32(0x27D4EB2D)
    return x ^ (x >> 15)


def number(x: np.ndarray) -> np.ndarray:
    return ((mixed(x) >> 8).astype(np.int64) - (1 << 23)).astype(np.float32) / np.float32(1 << 21)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint32)


def test_mma_multiplies_as_the_manual_lays_it_out(twins: Vectors) -> None:
    """The registers of all lanes put into matrices by PTX's picture of m16n8k16."""
    a, b, d = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for lane in range(32):
        row, column = lane // 4, lane % 4 * 2
        x = number(np.arange(64) + lane * 64)
        rounded = (to_bf16(x) << 16).view(np.float32)
        for r in range(4):
            i, k = row + 8 * (r % 2), column + 8 * (r // 2)
            a[i, k : k + 2] = rounded[2 * r : 2 * r + 2]
            d[row + 8 * (r // 2), column + r % 2] = x[32 + r]
        for r in range(2):
            b[column + 8 * r : column + 8 * r + 2, row] = rounded[16 + 2 * r : 18 + 2 * r]
    exact = a @ b + d
    said = twins["mma_bf16"].view(np.float32).reshape(32, 4)
    for lane in range(32):
        for r in range(4):
            expected = exact[lane // 4 + 8 * (r // 2), lane % 4 * 2 + r % 2]
            assert abs(said[lane, r] - expected) <= 17 * 300 * 2.0**-24


@pytest.mark.parametrize("matrices", [2, 4])
def test_ldmatrix_hands_out_rows_or_columns(twins: Vectors, matrices: int) -> None:
    numbers = to_bf16((mixed(np.arange(256)) % 256).astype(np.float32)).reshape(4, 8, 8)
    for name, tiles in (("", numbers), ("_trans", numbers.transpose(0, 2, 1))):
        said = twins[f"ldmatrix_x{matrices}{name}"].reshape(32, 4)
        for lane in range(32):
            for q in range(matrices):
                low, high = tiles[q, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
                assert said[lane, q] == low | high << 16
        assert not said[:, matrices:].any()


def test_numbers_are_rounded_to_the_nearest(twins: Vectors) -> None:
    i = np.arange(12, 128)
    low, high = mixed(2 * i).view(np.float32), mixed(2 * i + 1).view(np.float32)
    finite = np.isfinite(low) & np.isfinite(high)
    expected = to_bf16(low) | to_bf16(high) << 16
    assert np.array_equal(twins["pack_bf16"][12:][finite], expected[finite])


def test_powers_of_two(twins: Vectors) -> None:
    said = twins["exp2_approx"].view(np.float32)[12:]
    exact = np.exp2(16 * number(np.arange(12, 128)).astype(np.float64))
    assert np.all(np.abs(said - exact) <= exact * 2.0**-22)


def test_four_numbers_are_added_where_they_lie(twins: Vectors) -> None:
    i = np.arange(128)
    assert np.array_equal(twins["add_four"].view(np.float32), number(i) + number(4000 + i))


def test_turns_are_passed_on(twins: Vectors) -> None:
    lane, word = np.divmod(np.arange(128), 4)
    assert np.array_equal(twins["pass_turn"], lane + 1 + word)
