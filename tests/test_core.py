# SPDX-License-Identifier: Apache-2.0
"""The tests in C (tests/c), program by program, as `make test test-f64 isas` runs them: the library
as it is installed, the same with double, and under each instruction set that RELPOS_ISA may name.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest

from building import make

ROOT = Path(__file__).resolve().parent.parent
SETS = ("portable", "avx2", "avx512", "amx", "neon")
CANNOT_RUN = 77  # what test_api_attention says of a set that this machine has not


def names(variant: str) -> list[list[str]]:
    """The programs of a variant, and of those the ones that run under each instruction set."""
    command = ["make", "-s", "names", f"VARIANT={variant}"]
    try:
        said = subprocess.check_output(command, cwd=ROOT, text=True)
    except (OSError, subprocess.CalledProcessError):
        return [["none"], []]  # a test that fails, with what make says then
    return [line.split() for line in said.splitlines()]


RELEASE, CHOSEN = names("release")
CASES = [("release", name, "") for name in RELEASE]
CASES += [("f64", name, "") for name in names("f64")[0]]
CASES += [("release", name, isa) for isa in SETS for name in CHOSEN]


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    make("programs")
    make("programs", "VARIANT=f64")


def run(variant: str, program: str, isa: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "build" / variant / "tests" / program],
        cwd=folder,
        env=os.environ | ({"RELPOS_ISA": isa} if isa else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )


@functools.cache
def can_run(isa: str, folder: Path) -> bool:
    return run("release", "test_api_attention", isa, folder).returncode != CANNOT_RUN


@pytest.mark.parametrize(
    ("variant", "program", "isa"), CASES, ids=["-".join(filter(None, case)) for case in CASES]
)
def test_program(
    variant: str, program: str, isa: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if isa and not can_run(isa, tmp_path_factory.getbasetemp()):
        pytest.skip(f"this machine cannot run {isa}")
    done = run(variant, program, isa, tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"[1-9]\d* passed, 0 failed", done.stdout), done.stdout
