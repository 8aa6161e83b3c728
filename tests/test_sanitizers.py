# SPDX-License-Identifier: Apache-2.0
"""The cases of test_attention.py against a build under AddressSanitizer and UBSan.

A process of its own, because the sanitizer must be loaded first. What it finds ends that process
with the place in the source. `make asan tsan` run the tests in C in the same way.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import capi
from building import make

ROOT = Path(__file__).resolve().parent.parent
CASES = 160

SCRIPT = """
import sys
from pathlib import Path

import capi
from cases import random_case
from corners import CORNERS
from test_attention import compare_case

libraries = {"f32": Path(sys.argv[1]), "f64": Path(sys.argv[2])}
cores = []
for name in ("f64", *capi.CORES, *(name.replace("f32", "bf16") for name in capi.CORES)):
    try:
        cores.append(capi.core_by_name(libraries, name))
    except (capi.Unavailable, capi.CoreError):
        print("cannot run here:", name)
cases = [random_case(1_000_000 + seed) for seed in range(int(sys.argv[3]))]
cases += CORNERS[:: max(1, len(CORNERS) // 40)]
wrong = 0
for i, case in enumerate(cases):
    core = cores[i % len(cores)]
    core.set_threads(1 + i % 3)
    print("case", i, core.name, case, flush=True)  # the last one, where the process ends
    if fault := compare_case(core, case):
        print("WRONG", fault)
        wrong += 1
print(len(cases), "cases,", wrong, "wrong")
sys.exit(wrong != 0)
"""


def compiler() -> str:
    return os.environ.get("CC", "cc").split()[0]


def runtime(name: str) -> Path | None:
    """A sanitizer's library, if the compiler has it (it answers with the bare name if not)."""
    found = subprocess.run(
        [compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return Path(found) if "/" in found else None


@pytest.mark.skipif(shutil.which(compiler()) is None, reason="needs a compiler")
def test_cases_under_sanitizers() -> None:
    libraries = [runtime("libasan.so"), runtime("libubsan.so")]
    if None in libraries:
        pytest.skip("this compiler has no libasan.so and libubsan.so to preload (gcc has)")
    make("sanitized")
    built = [
        ROOT / "build" / "sanitized" / "libcore.so",
        ROOT / "build" / "sanitized_f64" / "libcore_f64.so",
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(str(path) for path in libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own; leaks are counted in tests/c
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "RELPOS_BLAS": "builtin",
    }
    ran = capi.run_script(SCRIPT, *map(str, built), str(CASES), environment=environment)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said[-6000:]
    assert re.search(r"\d+ cases, 0 wrong", said)
