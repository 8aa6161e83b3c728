# SPDX-License-Identifier: Apache-2.0
"""The operations of cuda/, but for attention: the tests in C of the CPU's, on a device.

tests/c/device_table.h puts the arrays of every call on the device, in exactly as much memory as the
entry may touch, and brings them back. So each entry meets the edges and the derived tolerances of
its twin: the same formulas in long double, ties, labels that do not count, numbers that are not
finite, arrays in place of others. Without a GPU the device is the emulated one, and then blocks and
threads also come in other orders, under the checker of races and under sanitizers; whatever the
build and the order, the bits of all results are the same.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from building import make
from test_sanitizers import runtime

ROOT = Path(__file__).resolve().parent.parent
RELEASE, EMULATED = ROOT / "build" / "release", ROOT / "build" / "emulated"
LIBRARY = "librelpos_cuda.so"

PROGRAMS = (
    "test_gemm",
    "test_linear",
    "test_norm",
    "test_embed",
    "test_residual",
    "test_activation",
    "test_cross_entropy",
    "test_sums",
    "test_adam",
    "test_rotate",
    "test_attend_rows",
    "test_choose",
)
# Those whose threads share memory or add numbers up together.
SHARING = ("test_norm", "test_embed", "test_cross_entropy", "test_sums")
SHARING += ("test_linear", "test_attend_rows", "test_choose")

DEVICE = {"RELPOS_TEST_DEVICE": "cuda", "RELPOS_TEST_SMALL": "tiny"}
# Device memory stays open to the host: what protects it takes most of the time.
OPEN = {"EMU_OPEN": "1"}


@pytest.fixture(scope="module", autouse=True)
def programs(emulated_device: Path) -> None:
    """On this machine's device or the emulated one."""
    make(*(str(RELEASE.relative_to(ROOT) / "tests" / name) for name in PROGRAMS))


def on_a_gpu() -> bool:
    return os.environ.get("RELPOS_TEST_CUDA") == "gpu"


def variant(name: str) -> dict[str, str]:
    """Another build of the emulated device."""
    if os.environ.get("RELPOS_TEST_CUDA"):
        pytest.skip("RELPOS_TEST_CUDA names the device: there are no other builds of it")
    make(name)
    return {"RELPOS_CUDA_LIBRARY": str(ROOT / "build" / name / LIBRARY)}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The bits of a program as it comes: threads in order, device memory open."""

    @functools.cache
    def of(program: str) -> str:
        return bits(program, tmp_path_factory.mktemp(program), **OPEN)

    return of


def bits(program: str, tmp_path: Path, **environment: str) -> str:
    """Of all results of a run without a failure."""
    done = subprocess.run(
        [RELEASE / "tests" / program],
        cwd=tmp_path,
        env=os.environ | DEVICE | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0 and re.search(r"\d+ passed, 0 failed", done.stdout), done.stdout
    found = re.search(r"^bits ([0-9a-f]{16})$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return found[1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_on_the_cpu(program: str, tmp_path: Path) -> None:
    """With device memory that the host cannot touch."""
    bits(program, tmp_path, RELPOS_TEST_SMALL="1")


@pytest.mark.parametrize("program", PROGRAMS)
def test_arrays_between_borders(
    program: str, expected: Callable[[str], str], tmp_path: Path
) -> None:
    """Where no load of 16 bytes fits, numbers are read one by one: the bits are the same."""
    found = bits(program, tmp_path, **OPEN, RELPOS_TEST_SHIFT="1")
    if program in ("test_gemm", "test_linear") and on_a_gpu():
        return  # cuBLAS has other kernels for such arrays, which may add up in another order
    assert found == expected(program)


@pytest.mark.parametrize("program", SHARING)
def test_any_order(program: str, expected: Callable[[str], str], tmp_path: Path) -> None:
    """Warps, lanes and blocks in orders of their own."""
    for seed in (1, 2, 5):
        assert bits(program, tmp_path, **OPEN, EMU_SEED=str(seed)) == expected(program)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_races(program: str, expected: Callable[[str], str], tmp_path: Path) -> None:
    assert bits(program, tmp_path, **OPEN, **variant("emulated-race")) == expected(program)


@pytest.mark.parametrize("program", PROGRAMS)
def test_sanitized(program: str, expected: Callable[[str], str], tmp_path: Path) -> None:
    """The sanitizers' libraries have to be loaded first."""
    libraries = [runtime(name) for name in ("libasan.so", "libubsan.so")]
    if not all(libraries):
        pytest.skip("the compiler has no AddressSanitizer")
    environment = variant("emulated-sanitized") | {
        "LD_PRELOAD": ":".join(str(library) for library in libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    assert bits(program, tmp_path, **OPEN, **environment) == expected(program)


def test_random_numbers(tmp_path: Path, nvcc: ModuleType) -> None:
    """cuda/philox.h: the published answers, base/rng.h's blocks, ops/keep.h's masks."""
    program = tmp_path / "philox_answers"
    source = ROOT / "tests" / "cuda" / "philox_answers.cu"
    if on_a_gpu():
        command = [*nvcc.find().program(), str(source)]
    else:
        folders = [f"-I{ROOT / folder}" for folder in ("cuda", "csrc", "csrc/include")]
        listed = re.search(r"EMULATOR_SOURCES = (.*)", (ROOT / "cuda" / "cuda.mk").read_text())
        assert listed  # other programs' objects may lie beside these
        names = [Path(name).with_suffix(".o") for name in listed[1].split()]
        emulator = [str(EMULATED / "emulator" / name) for name in names]
        compiler = os.environ.get("CXX", "c++").split()
        options = ["-std=c++17", "-Wno-unknown-pragmas", f"-I{ROOT / 'tests' / 'emulator'}"]
        command = [*compiler, *options, *folders, "-x", "c++", str(source)]
        command += ["-x", "none", *emulator, "-ldl", "-pthread"]
    made = subprocess.run(
        [*command, "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    said = subprocess.run([program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.returncode == 0 and re.search(r"[1-9]\d+ compared, 0 wrong", said.stdout), (
        said.stdout
    )
