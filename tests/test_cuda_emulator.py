# SPDX-License-Identifier: Apache-2.0
"""What the emulator of CUDA finds: planted faults, launches beyond the limits, hosts that reach
into device memory. A kernel that passes under it is only as right as these are found.

tests/emulator/planted.cpp holds the kernels.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from building import make

ROOT = Path(__file__).resolve().parent.parent
BUILDS = ("emulated", "emulated-race", "emulated-sanitized")
THREADS = 64


@pytest.fixture(scope="module")
def planted() -> dict[str, Path]:
    make("planted")
    return {build: ROOT / "build" / build / "planted" for build in BUILDS}


def run(program: Path, kernel: str, seed: int = 0, **environment: str) -> tuple[int, str]:
    """Status and all that it says. A fault leaves the frames of its threads: no leaks are sought."""
    done = subprocess.run(
        [program, kernel],
        env=os.environ | {"EMU_SEED": str(seed), "ASAN_OPTIONS": "detect_leaks=0"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout


def numbers(said: str) -> list[float]:
    return [float(word) for word in said.splitlines()[0].split()]


# --------------------------------------------------------------------------------------------------
# What is right passes, in every build and order
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    ("kernel", "result"),
    [
        ("turn_round", [float(THREADS - i) for i in range(THREADS)]),
        ("copied", [2.0 * (i + 1) for i in range(THREADS)]),
        ("copy_of_any_kind", [float(i + 1) for i in range(THREADS)]),
        ("multiply", [0.0] * THREADS),
        ("votes", [1.0] * THREADS),
        ("halves", [float(i ^ 1) if i % 32 < 16 else -1.0 for i in range(THREADS)]),
        ("much_shared", [float(THREADS - i) for i in range(THREADS)]),
        ("turns", [64.0 * (i + 1) + 57 for i in range(THREADS)]),
    ],
)
def test_right_kernels_pass(
    planted: dict[str, Path], build: str, kernel: str, result: list[float]
) -> None:
    for seed in (0, 1, 2, 7):
        status, said = run(planted[build], kernel, seed)
        assert status == 0, said
        assert numbers(said) == result


def test_a_seed_is_an_order(planted: dict[str, Path]) -> None:
    """Threads pass in order without a seed, else in an order of the seed's own."""
    orders = [tuple(numbers(run(planted["emulated"], "pass", seed)[1])) for seed in range(6)]
    assert orders[0] == tuple(range(THREADS))
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len(set(orders)) == len(orders)
    assert orders[5] == tuple(numbers(run(planted["emulated"], "pass", 5)[1]))


def test_counters(planted: dict[str, Path]) -> None:
    """Eight rows 128 bytes apart are in one bank; the padding to 144 bytes spreads them."""
    program = planted["emulated"]
    assert "mma 2, " in run(program, "multiply")[1]
    assert "ldmatrix 2, bank conflicts 56," in run(program, "load_rows_64")[1]
    assert "ldmatrix 2, bank conflicts 0," in run(program, "load_rows_72")[1]
    assert f"bytes copied {THREADS * 4}\n" in run(program, "copied")[1]


# --------------------------------------------------------------------------------------------------
# What is wrong does not
# --------------------------------------------------------------------------------------------------

FAULTS = [
    ("early_return", r"deadlock: thread 0 .* has returned; thread 3 .* waits in __syncthreads at"),
    ("divergent_barrier", r"divergent barrier: other threads wait in __syncthreads at"),
    ("divergent_vote", r"divergent barrier: other threads wait in __syncthreads"),
    ("lying_mask", r"the calling lane is not in its mask \(thread \d+ of block \(0,0,0\), __shfl"),
    ("half_a_warp", r"deadlock: .* waits in __shfl_sync at"),
    ("two_operations", r"lane \d+ waits elsewhere, in "),
    ("unaligned", r"row address not a multiple of 16 .* ldmatrix at .*planted.cpp:\d+"),
    ("missing_wait", r"cp\.async still in flight"),
    ("copy_to_host", r"invalid argument"),  # to the device
    ("copy_to_device", r"invalid argument"),
    ("copy_within", r"invalid argument"),  # from the host
    ("wide_block", r"launch of 1056 threads in a block, expected 1 to 1024"),
    ("empty_block", r"launch of 0 threads in a block"),
    ("high_grid", r"launch of a grid of 1 x 70000 x 1 blocks"),
    ("turns_not_passed", r"spins without an end"),
    ("too_much_shared", r"launch with 233472 bytes of dynamic shared memory, of 232448 allowed"),
]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("kernel", "sentence"), FAULTS, ids=[name for name, _ in FAULTS])
def test_misuse_is_a_fault(
    planted: dict[str, Path], build: str, kernel: str, sentence: str
) -> None:
    for seed in (0, 1, 2):
        status, said = run(planted[build], kernel, seed)
        assert status == 1 and re.search(f"fault: .*{sentence}", said), said


CHECKED = [
    ("missing_barrier", r".*(race|has not written).*planted.cpp:\d+"),
    ("read_of_nothing", r"read of shared memory that this block has not written.*planted.cpp:\d+"),
    ("half_written", r"read of global memory that nobody has written.*planted.cpp:\d+"),
    ("copy_of_nothing", r"copy of global memory that nobody has written, offset 0"),
    ("blocks_meet", r"write-after-write race in global memory.* of another block"),
    ("store_beyond_shared", r"access outside device memory.*planted.cpp:\d+"),
    ("store_beyond_global", r"access outside device memory.*planted.cpp:\d+"),
    ("reads_the_host", r"access outside device memory.*planted.cpp:\d+"),
]


@pytest.mark.parametrize(("kernel", "sentence"), CHECKED, ids=[name for name, _ in CHECKED])
def test_the_race_checker_finds(planted: dict[str, Path], kernel: str, sentence: str) -> None:
    """In any order: it is not the outcome that is judged."""
    for seed in (0, 1, 2, 7):
        status, said = run(planted["emulated-race"], kernel, seed)
        assert status == 1 and re.search(f"fault: checker: {sentence}", said), said


@pytest.mark.parametrize(
    ("kernel", "sentence"),
    [
        ("store_beyond_shared", r"heap-buffer-overflow .*\n?.*planted.cpp"),
        ("store_beyond_global", r"use-after-poison .*\n?.*planted.cpp"),
        ("store_beyond_member", r"runtime error: index 64 out of bounds"),
    ],
)
def test_the_sanitizers_find(planted: dict[str, Path], kernel: str, sentence: str) -> None:
    status, said = run(planted["emulated-sanitized"], kernel)
    assert status != 0 and re.search(sentence, said), said[-3000:]


def test_blocks_that_wait_for_each_other(planted: dict[str, Path]) -> None:
    """With several at work their numbers' order is kept by waiting alone: without it, it is lost."""
    right = [64.0 * (i + 1) + 57 for i in range(THREADS)]
    seen = set()
    for seed in range(1, 7):
        for blocks in ("2", "6"):
            status, said = run(planted["emulated"], "turns", seed, EMU_BLOCKS=blocks)
            assert status == 0 and numbers(said) == right
            said = run(planted["emulated"], "turns_not_awaited", seed, EMU_BLOCKS=blocks)[1]
            seen.add(tuple(numbers(said)))
    assert seen - {tuple(right)}


def test_a_missing_barrier_shows_in_the_plain_build(planted: dict[str, Path]) -> None:
    """One warp runs ahead, and reads what the other has not written yet."""
    status, said = run(planted["emulated"], "missing_barrier")
    right = [float(THREADS - i) for i in range(THREADS)]
    assert status == 0 and numbers(said) != right


def test_a_store_beyond_shared_shows_in_the_plain_build(planted: dict[str, Path]) -> None:
    status, said = run(planted["emulated"], "store_beyond_shared")
    assert status == 1 and "fault: a store outside the dynamic shared memory" in said


def test_a_host_that_reads_device_memory_crashes(planted: dict[str, Path]) -> None:
    status, said = run(planted["emulated"], "the_host_reads")
    assert status == -signal.SIGSEGV and "x[0]" not in said
    assert run(planted["emulated"], "the_host_reads", EMU_OPEN="1") == (0, "x[0] = 1\n")
