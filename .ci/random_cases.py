# SPDX-License-Identifier: Apache-2.0
"""More of tests/test_attention.py's random cases: seeds that the tests do not reach.

.venv/bin/python .ci/random_cases.py --factor 4      4 times as many, on every core, 2 processes
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import capi  # noqa: E402
from cases import random_case  # noqa: E402
from test_attention import CHUNK, CHUNKS, CORES, compare_case  # noqa: E402

LIBRARIES = {
    "f32": ROOT / "build" / "release" / "libcore.so",
    "f64": ROOT / "build" / "f64" / "libcore_f64.so",
}


def wrong_in(seeds: range) -> list[str]:
    """What is wrong in these cases, on every core that this machine can run."""
    cores = []
    for name in CORES:
        try:
            cores.append(capi.core_by_name(LIBRARIES, name))
        except (capi.Unavailable, capi.CoreError):
            continue  # another machine's instruction set
    faults = [compare_case(core, random_case(seed)) for seed in seeds for core in cores]
    return [fault for fault in faults if fault]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    subprocess.run(["make", "-j2", "all", "f64"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    first, last = CHUNK * CHUNKS, CHUNK * CHUNKS * (1 + options.factor)
    runs = [range(seed, min(seed + CHUNK, last)) for seed in range(first, last, CHUNK)]
    failed = 0
    with ProcessPoolExecutor(options.processes) as pool:
        for run, faults in zip(runs, pool.map(wrong_in, runs), strict=True):
            failed += len(faults)
            print(f"seeds {run.start} to {run.stop - 1}: {len(faults)} wrong", flush=True)
            print(*faults, sep="\n", end="\n" if faults else "")
    print(f"{last - first} random cases, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
