# SPDX-License-Identifier: Apache-2.0
"""How benchmarks take turns: in sittings with new processes, and what their intervals hold."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import turns  # noqa: E402

SIDE = f"""
import os, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import turns

def build(side, case):
    if side == "fails":
        raise ValueError("this side has no way")
    with open(case["told"], "a") as told:
        print(side, os.getpid(), file=told)
    return turns.Job(lambda: None, "idle")

turns.serve(build)
"""


def rounds_of(ratios: list[list[float]]) -> turns.Rounds:
    """Rounds whose sittings have these ratios of a to b."""
    flat = [ratio for own in ratios for ratio in own]
    return turns.Rounds(
        times={"a": flat, "b": [1.0] * len(flat)},
        others=[0.0] * len(flat),
        sittings=[at for at, own in enumerate(ratios) for _ in own],
    )


def test_sittings_have_new_processes(tmp_path: Path) -> None:
    script, told = tmp_path / "side.py", tmp_path / "told"
    script.write_text(SIDE)
    workers = [turns.Worker(script, side, 1) for side in ("a", "fails", "b")]
    case = {"told": str(told)}
    rounds = turns.take_turns(workers, [case] * 3, seconds=0.01, sittings=3)
    for worker in workers:
        worker.close()
    assert list(rounds.times) == ["a", "b"] and rounds.notes == {"a": "idle", "b": "idle"}
    assert rounds.failures == {"fails": "fails: ValueError: this side has no way"}
    count = len(rounds.others)
    assert count == len(rounds.sittings) >= 5 and {*map(len, rounds.times.values())} == {count}
    lines = told.read_text().split("\n")[:-1]
    begun = len(lines) // 2  # on a machine that is not quiet some sittings are never begun
    assert len({*lines}) == len(lines) == 2 * begun and begun <= 3
    assert {*rounds.sittings} <= {*range(begun)} and rounds.sittings == sorted(rounds.sittings)


def test_interval_holds_what_sittings_differ_by() -> None:
    near = [0.99, 1.0, 1.01]
    alike, apart = rounds_of([near, near]), rounds_of([near, [x + 0.2 for x in near]])
    low, high = alike.interval("a", "b")
    assert 0.99 <= low <= 1.0 <= high <= 1.01
    low, high = apart.interval("a", "b")
    assert low <= 1.01 and high >= 1.19
    together = rounds_of([[*near, *(x + 0.2 for x in near)]])
    assert apart.ratio("a", "b") == together.ratio("a", "b") == statistics.median([1.01, 1.19])


def test_quiet_rounds_keep_their_sittings() -> None:
    rounds = rounds_of([[1.0] * 4, [2.0] * 4])
    rounds.others[1] = rounds.others[5] = 0.5
    rounds.keep_quiet()
    assert rounds.sittings == [0, 0, 0, 1, 1, 1] and rounds.times["a"] == [1.0] * 3 + [2.0] * 3
