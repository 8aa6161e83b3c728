# SPDX-License-Identifier: Apache-2.0
"""relpos's commands, called in this process."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NamedTuple

import pytest

from relpos import cli

Capture = pytest.CaptureFixture[str]


class Printed(NamedTuple):
    out: str
    error: str


def relpos_prints(
    capture: Capture, *arguments: Any, status: int = 0, stdin: bytes | None = None
) -> Printed:
    """What a command prints that ends with this status."""
    if stdin is not None:
        read, write = os.pipe()
        os.write(write, stdin)
        os.close(write)
        sys.stdin = io.TextIOWrapper(os.fdopen(read, "rb"))
    try:
        found = cli.main([str(each) for each in arguments])
    except SystemExit as exit_:  # argparse's way
        found = int(exit_.code or 0)
    finally:
        sys.stdin = sys.__stdin__
    printed = Printed(*capture.readouterr())
    assert found == status, printed.error
    return printed


def relpos_says(capture: Capture, *arguments: Any, status: int = 0) -> str:
    """Standard output, or standard error where a failure is expected."""
    printed = relpos_prints(capture, *arguments, status=status)
    return printed.out if status == 0 else printed.error
