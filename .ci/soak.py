# SPDX-License-Identifier: Apache-2.0
"""The same calls for minutes, with a changing number of threads: same bits, no growing memory."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import relpos

SETTLED = 100  # calls after which memory should no longer grow
ALLOWED_KIB = 20_000


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    end = time.monotonic() + 60 * parser.parse_args().minutes
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 4, 333, 64), np.float32) for _ in range(3))
    shaw = relpos.Shaw(random.standard_normal((33, 64), np.float32), k=16)
    first: dict[bool, list[np.ndarray]] = {}
    calls, before = 0, 0
    while time.monotonic() < end:
        causal = calls % 2 == 0
        relpos.set_threads(1 + calls % 3)
        out, ctx = relpos.attention_forward(q, k, v, position=shaw, causal=causal)
        results = [out, *relpos.attention_backward(ctx, out).values()]
        known = first.setdefault(causal, results)
        if not all(np.array_equal(a, b) for a, b in zip(known, results, strict=True)):
            print(f"call {calls} gave other bits")
            return 1
        calls += 1
        if calls == SETTLED:
            before = resident_kib()
    grown = resident_kib() - before
    print(f"{calls} calls of forward and backward, {grown} KiB more than after {SETTLED}")
    return 0 if calls > SETTLED and grown < ALLOWED_KIB else 1


if __name__ == "__main__":
    sys.exit(main())
