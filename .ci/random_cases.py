# SPDX-License-Identifier: Apache-2.0
"""More random cases than tests/test_attention.py has; on the emulated device also every corner.

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
from cases import Case, random_case  # noqa: E402
from corners import CORNERS  # noqa: E402
from device_capi import emulated  # noqa: E402
from test_attention import CHUNK, CHUNKS, CORES, compare_case  # noqa: E402

LIBRARIES = {
    "f32": ROOT / "build" / "release" / "libcore.so",
    "f64": ROOT / "build" / "f64" / "libcore_f64.so",
}
EMULATED = ROOT / "build" / "emulated" / "librelpos_cuda.so"


def wrong_in(seeds: range) -> list[str]:
    """What is wrong in these cases, on every core that this machine can run and the device."""
    cores: list[capi.Core] = [emulated(LIBRARIES["f32"], EMULATED)]
    for name in CORES:
        try:
            cores.append(capi.core_by_name(LIBRARIES, name))
        except (capi.Unavailable, capi.CoreError):
            continue  # another machine's instruction set
    return wrong([random_case(seed) for seed in seeds], cores)


def wrong_corners(corners: range) -> list[str]:
    return wrong(CORNERS[corners.start : corners.stop], [emulated(LIBRARIES["f32"], EMULATED)])


def wrong(cases: list[Case], cores: list[capi.Core]) -> list[str]:
    faults = [compare_case(core, case) for case in cases for core in cores]
    return [fault for fault in faults if fault]


def chunks(first: int, last: int) -> list[range]:
    return [range(at, min(at + CHUNK, last)) for at in range(first, last, CHUNK)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    targets = ("all", "f64", "emulated")
    subprocess.run(["make", "-j2", *targets], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    first, last = CHUNK * CHUNKS, CHUNK * CHUNKS * (1 + options.factor)
    seeds, corners = chunks(first, last), chunks(0, len(CORNERS))
    failed = 0
    with ProcessPoolExecutor(options.processes) as pool:
        in_seeds, in_corners = pool.map(wrong_in, seeds), pool.map(wrong_corners, corners)
        for what, runs, results in (("seeds", seeds, in_seeds), ("corners", corners, in_corners)):
            for run, faults in zip(runs, results, strict=True):
                failed += len(faults)
                print(f"{what} {run.start} to {run.stop - 1}: {len(faults)} wrong", flush=True)
                print(*faults, sep="\n", end="\n" if faults else "")
    print(f"{last - first} random cases, {len(CORNERS)} corners, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
