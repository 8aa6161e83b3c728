# SPDX-License-Identifier: Apache-2.0
"""Does a call keep what it was given, or memory?"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import relpos


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def assert_nothing_leaks(
    calls: Callable[[int], None], few: int, many: int, held: Sequence[Any]
) -> None:
    """`many` calls after `few` leave the references to `held` and the process's memory as they were."""
    calls(few)
    gc.collect()
    counts, none = [sys.getrefcount(x) for x in held], sys.getrefcount(None)
    resident = resident_bytes()
    calls(many)
    gc.collect()
    # Not in the assert, which holds references of its own.
    after, none_after = [sys.getrefcount(x) for x in held], sys.getrefcount(None)
    assert after == counts
    if sys.version_info < (3, 12):  # from there on nobody has to count None
        assert abs(none_after - none) < 100
    if "-fsanitize" not in relpos.build_info()["flags"]:  # which keeps freed memory for a while
        assert resident_bytes() - resident < 1 << 20
