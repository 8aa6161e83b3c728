# SPDX-License-Identifier: Apache-2.0
"""Memory of an epoch over many pairs: none a pair.

RELPOS_TEST_PAIRS=36000000 does it for the paper's English-French data (5 GB of disk, two minutes).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import relpos
from small_data import generate

PAIRS = int(os.environ.get("RELPOS_TEST_PAIRS", "400000"))

# RLIMIT_DATA counts what a process has for itself, and not files that it has mapped for reading.
PROGRAM = """
import json, resource, sys, time
from relpos.data import Batches, TokenCache

def own():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("RssAnon"))

cache = TokenCache.open(sys.argv[1])
before = own()
resource.setrlimit(resource.RLIMIT_DATA, (600 << 20, 600 << 20))
begin, cpu = time.perf_counter(), time.process_time()
made = Batches(cache, tokens=4096, accumulate_tokens=25_000, max_length=512, epochs=1)
ready, most, sentences, updates = time.perf_counter() - begin, 0, 0, 0
for update in made:
    sentences += sum(batch.sentences for batch in update)
    updates += 1
    if updates % 100 == 0:
        most = max(most, own())
told = {"sentences": sentences, "updates": updates, "own": most - before, "ready_s": ready}
told |= {"wall_s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}
print(json.dumps(told))
"""


def epoch(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        capture_output=True,
        text=True,
        cwd=Path(relpos.__file__).parent.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_an_epoch_takes_no_memory_a_pair(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    generate(folder, PAIRS)
    bytes_on_disk = sum(path.stat().st_size for path in folder.glob("*.bin"))
    told = epoch(folder)
    print(f"{bytes_on_disk / PAIRS:.1f} bytes a pair on disk", told)
    assert told["sentences"] == PAIRS
    # a chunk's pairs, lengths and order, and some updates ahead, whatever the number of pairs; the
    # tokens of 400,000 would be 45 MB, the order of 36,000,000 288 MB
    assert told["own"] < 16 << 20
    # 28 tokens of 2 bytes on each side, and 16 bytes for where they are
    assert abs(bytes_on_disk / PAIRS - (2 * 28 * 2 + 16)) < 2
