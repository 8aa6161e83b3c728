# SPDX-License-Identifier: Apache-2.0
"""What tests build: by `make`, one at a time, since workers of pytest share the folder build/."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"


def make(*targets: str) -> None:
    """Makes targets of the Makefile, or fails the test with what the compiler said."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed
        made = subprocess.run(
            ["make", "-j2", *targets], cwd=ROOT, capture_output=True, text=True, check=False
        )
    if made.returncode != 0:
        said = made.stdout[-2000:] + made.stderr[-4000:]
        pytest.fail(f"make {' '.join(targets)} failed:\n{said}", pytrace=False)
