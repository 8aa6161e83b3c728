# SPDX-License-Identifier: Apache-2.0
"""Timing by turns: every side is a process of its own, and no two compute at the same time.

    parent:   ask A, wait, pause, ask B, wait, pause, ask C, ...   (one round)
    worker:   sleep in read()  ->  one untimed call, `count` timed calls, answer  ->  sleep

A round gives one time per side under nearly the same conditions, so a ratio is the median of the
rounds' ratios: what slows the machine for seconds slows both sides of a pair. Separate processes,
because two libraries in one process share a heap, a thread pool and its spinning threads. The pause
lets the threads of the side before go to sleep (GNU OpenMP spins for about a millisecond).

Where a process lies in memory decides some two percent of its speed for as long as it lives. So where
that matters a case is measured in several sittings, each with new processes, and intervals hold what
sittings differ by.

What other processes do is not symmetrical: a thread pool that spins at its barriers (torch's) loses
up to ten times, one that sleeps hardly anything. So the CPU time of strangers is read from /proc
for every round, and rounds in which they took more than 5 % of the machine do not count.

A benchmark defines `build(side, case) -> Job`, calls `serve(build)` when started with --worker, and
otherwise gives a list of Worker to `take_turns`. Requests and answers are one JSON object a line.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Json = dict[str, Any]

PAUSE = 0.01  # seconds between turns
BURST = 0.05  # seconds that one turn lasts at least, where a call is shorter
WARM_UP = 0.3  # seconds of untimed calls when a case is new
QUIET = 0.05  # a round counts if other processes took no more of the machine than this
PATIENCE = 3  # times the seconds asked for, to wait for quiet rounds

# Blocks up to 1 GiB stay in the heap instead of going back to the system after each call: without
# this, n x n temporaries cost a page fault per 4 KiB (a factor of 2.4 for eager torch at n = 1024).
# It is set for every side alike.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


@dataclass(frozen=True)
class Job:
    """What a side does for a case: one call, and a remark for the reader (which variant it is).

    first: whether a turn begins with a call that is not timed. Calls of seconds need none.
    """

    call: Callable[[], Any]
    note: str = ""
    first: bool = True


# ------------------------------------------------------------------------------------ worker's side


def serve(build: Callable[[str, Json], Job]) -> None:
    """Answer the parent's requests until it closes the pipe. Prints go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job: Job | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "case" in request:
                job = None  # frees the last case's arrays first
                job = build(request["side"], request["case"])
            assert job is not None
            answer: Json = _answer(job, request)
        except Exception as error:  # the parent decides what a failure means
            answer = {"error": f"{type(error).__name__}: {str(error).strip()[:400]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(job: Job, request: Json) -> Json:
    if request["do"] == "once":
        return {"result": job.call()}
    if request["do"] == "settle":
        return {"seconds": _settle(job.call), "note": job.note}
    return {"seconds": burst(job.call, request["count"], job.first)}


def _settle(call: Callable[[], Any]) -> float:
    """Warm up; the shortest time of a call."""
    best, start = float("inf"), time.perf_counter()
    calls = 0
    while calls < 3 or time.perf_counter() - start < WARM_UP:
        best = min(best, burst(call, 1, first=False))
        calls += 1
    return best


def burst(call: Callable[[], Any], count: int, first: bool = True) -> float:
    """Seconds per call over `count` calls, after one call that fetches data and wakes threads."""
    if first:
        call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def status_kib(name: str) -> int:
    """KiB of this process's memory that the system calls so: VmRSS, VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")


# ------------------------------------------------------------------------------------ parent's side


class SideFailed(Exception):
    """A side could not do what it was asked; the text is its own message."""


class Worker:
    """A side in a process of its own: `script --worker side`."""

    def __init__(self, script: Path, side: str, threads: int) -> None:
        self.side = side
        self._command = [sys.executable, str(script), "--worker", side]
        self._environment = os.environ | ENVIRONMENT
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RELPOS_NUM_THREADS"):
            self._environment[name] = str(threads)
        self._process = self._begin()

    def _begin(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, text=True, env=self._environment
        )

    def renew(self) -> None:
        """A new process, which has no case yet."""
        self.close()
        self._process = self._begin()

    def prepare(self, case: Json) -> tuple[float, str]:
        """Build a case; the shortest time of a call, and the side's remark."""
        answer = self._ask({"do": "settle", "side": self.side, "case": case})
        return answer["seconds"], answer["note"]

    def once(self, case: Json) -> Any:
        """What the job's call returns (as JSON) when it is called once, with no warm-up."""
        return self._ask({"do": "once", "side": self.side, "case": case})["result"]

    def burst(self, count: int) -> float:
        return float(self._ask({"do": "burst", "count": count})["seconds"])

    def ticks(self) -> int:
        """Clock ticks of CPU that all threads of the process have used."""
        stat = _read(f"/proc/{self._process.pid}/stat").rpartition(")")[2].split()
        return int(stat[11]) + int(stat[12]) if stat else 0

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: Json) -> Json:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SideFailed(f"{self.side}: the process ended")
        answer: Json = json.loads(line)
        if "error" in answer:
            raise SideFailed(f"{self.side}: {answer['error']}")
        return answer


@dataclass
class Rounds:
    """Seconds per call of every side, round by round."""

    times: dict[str, list[float]] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)  # share of the machine that others took
    sittings: list[int] = field(default_factory=list)  # in which one a round was
    notes: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def median(self, side: str) -> float:
        return statistics.median(self.times[side])

    def spread(self, side: str) -> float:
        """Distance of the quartiles over the median."""
        low, middle, high = statistics.quantiles(self.times[side], n=4)
        return (high - low) / middle

    def ratio(self, side: str, to: str) -> float:
        """Median of the paired ratios: time of `side` over time of `to`."""
        return statistics.median(self._ratios(side, to))

    def interval(self, side: str, to: str) -> tuple[float, float]:
        """95 % bootstrap interval of ratio(side, to): sittings are drawn, and rounds of each."""
        groups: dict[int, list[float]] = {}
        for sitting, ratio in zip(self.sittings, self._ratios(side, to), strict=True):
            groups.setdefault(sitting, []).append(ratio)
        draw, own = random.Random(0), list(groups.values())
        medians = sorted(
            statistics.median(
                ratio
                for group in draw.choices(own, k=len(own))
                for ratio in draw.choices(group, k=len(group))
            )
            for _ in range(1000)
        )
        return medians[24], medians[974]

    def keep_quiet(self) -> None:
        """Leave out the rounds that other processes disturbed, but keep at least the quietest 5."""
        order = sorted(range(len(self.others)), key=self.others.__getitem__)
        quiet = sum(share <= QUIET for share in self.others)
        kept = sorted(order[: max(quiet, 5)])
        self.others = [self.others[i] for i in kept]
        self.sittings = [self.sittings[i] for i in kept]
        self.times = {side: [t[i] for i in kept] for side, t in self.times.items()}

    def _ratios(self, side: str, to: str) -> list[float]:
        return [a / b for a, b in zip(self.times[side], self.times[to], strict=True)]


def take_turns(
    workers: Sequence[Worker], cases: Sequence[Json], seconds: float, sittings: int = 1
) -> Rounds:
    """Rounds of turns for about `seconds`, 5 to 101 that count, longer if others disturb.

    cases: one per worker. A side that fails is left out and named in `failures`. Each round starts
    with another side, so that none always follows the same neighbour; each of the sittings, which
    share the rounds, with new processes.
    """
    rounds = Rounds()
    counts: dict[Worker, int] = {}
    cost = 0.0
    given = dict(zip(workers, cases, strict=True))
    for worker, case in given.items():
        try:
            once, rounds.notes[worker.side] = worker.prepare(case)
        except SideFailed as failure:
            rounds.failures[worker.side] = str(failure)
            continue
        counts[worker] = max(1, round(BURST / once))
        cost += once * (counts[worker] + 1) + PAUSE
    ready = list(counts)
    rounds.times = {worker.side: [] for worker in ready}
    wanted = max(5, min(101, int(seconds / max(cost, 1e-3))))
    deadline = time.monotonic() + PATIENCE * max(seconds, wanted * cost)
    turn = quiet = sitting = 0
    while ready and (turn < 5 or (quiet < wanted and time.monotonic() < deadline)):
        if quiet * sittings >= wanted * (sitting + 1):
            sitting += 1
            for worker in ready:
                worker.renew()
                worker.prepare(given[worker])
        start, before, clock = turn % len(ready), _others_seconds(ready), time.monotonic()
        for worker in ready[start:] + ready[:start]:
            time.sleep(PAUSE)
            rounds.times[worker.side].append(worker.burst(counts[worker]))
        machine_seconds = (time.monotonic() - clock) * (os.cpu_count() or 1)
        rounds.others.append((_others_seconds(ready) - before) / machine_seconds)
        rounds.sittings.append(sitting)
        quiet += rounds.others[-1] <= QUIET
        turn += 1
    rounds.keep_quiet()
    return rounds


def _others_seconds(workers: Sequence[Worker]) -> float:
    """CPU seconds since boot that went to neither idling nor to these workers."""
    fields = _read("/proc/stat").split("\n")[0].split()[1:9]
    if not fields:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
    busy = user + nice + system + irq + softirq + steal
    return (busy - sum(worker.ticks() for worker in workers)) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------------------- where and what


def machine() -> Json:
    """What a figure depends on, as flat JSON: CPU, its vector units, system, commit, command, date."""
    info = _cpu_info()
    flags = set(info.get("flags", info.get("Features", "")).split())
    return {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cpu_family_model": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "cores": os.cpu_count(),
        "avx2": "avx2" in flags,
        "avx512": "avx512f" in flags,
        "amx": "amx_tile" in flags,
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": _commit(),
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_info() -> dict[str, str]:
    pairs = (line.split(":", 1) for line in _read("/proc/cpuinfo").splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
