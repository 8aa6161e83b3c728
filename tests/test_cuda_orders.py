# SPDX-License-Identifier: Apache-2.0
"""Every kernel of cuda/ in several orders of threads, under the race checker, and under ASan and
UBSan: nothing is found, and all results are the same bits.

tests/gpu_small.py is what runs, each time in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from building import make
from test_sanitizers import runtime

ROOT = Path(__file__).resolve().parent.parent
SMALL = ROOT / "tests" / "gpu_small.py"


def built(target: str) -> Path:
    make(target)
    return ROOT / "build" / target / "librelpos_cuda.so"


def results(
    core: Path, library: Path, folder: Path, script: Path = SMALL, **environment: str
) -> str:
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ
        | {"RELPOS_TEST_CORE": str(core), "RELPOS_CUDA_LIBRARY": str(library)}
        | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def in_order(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("orders")
    said = results(libraries["f32"], built("emulated"), folder, EMU_SEED="0")
    assert len(said.splitlines()) >= 8
    return said


@pytest.mark.parametrize("seed", [1, 2, 7])
def test_another_order_gives_the_same_bits(
    libraries: dict[str, Path], in_order: str, tmp_path: Path, seed: int
) -> None:
    library = built("emulated")
    assert results(libraries["f32"], library, tmp_path, EMU_SEED=str(seed)) == in_order


def test_a_late_device_gives_the_same_bits(
    libraries: dict[str, Path], in_order: str, tmp_path: Path
) -> None:
    """One that does nothing before the host waits: what the host gave must still be there then."""
    library = built("emulated")
    assert results(libraries["f32"], library, tmp_path, EMU_LATE="1") == in_order


def test_the_race_checker_finds_nothing(
    libraries: dict[str, Path], in_order: str, tmp_path: Path
) -> None:
    library = built("emulated-race")
    assert results(libraries["f32"], library, tmp_path, EMU_SEED="0") == in_order


def test_the_sanitizers_find_nothing(
    libraries: dict[str, Path], in_order: str, tmp_path: Path
) -> None:
    preloaded = [runtime("libasan.so"), runtime("libubsan.so"), runtime("libstdc++.so.6")]
    if None in preloaded:
        pytest.skip("this compiler has no libasan.so and libubsan.so to preload (gcc has)")
    library = built("emulated-sanitized")
    sanitizer = {
        "LD_PRELOAD": " ".join(str(path) for path in preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "EMU_SEED": "1",
    }
    assert results(libraries["f32"], library, tmp_path, **sanitizer) == in_order


def test_a_step_moves_fewer_bytes_in_bf16(libraries: dict[str, Path], tmp_path: Path) -> None:
    """What products alone read is stored in bf16. The share was 0.57 where only operands were, beside
    f32 that they were rounded from."""
    said = results(
        libraries["f32"], built("emulated-race"), tmp_path, ROOT / "tests" / "step_bytes.py"
    )
    moved = json.loads(said)
    assert moved["bf16"] < 0.48 * moved["f32"], moved
