# SPDX-License-Identifier: Apache-2.0
"""What a benchmark found: lines for the reader, flat figures for the machine."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import turns
from turns import Json, Rounds, Worker

HERE = Path(__file__).parent


class Counted(Worker):
    """A worker that knows how many turns it had: rounds that did not count leave no other trace."""

    bursts = 0

    def burst(self, count: int) -> float:
        self.bursts += 1
        return super().burst(count)


class Report:
    """Of a whole run."""

    def __init__(self, isa: str = "") -> None:
        self.figures: Json = {}
        self.failures: dict[str, str] = {}
        self.busy = 0.0  # of the rounds that count, where it exceeds what a quiet round allows
        self.rounds = self.quiet = 0
        self.missed: list[str] = []
        self.isa = isa

    def __setitem__(self, name: str, value: float | str) -> None:
        self.figures[name] = float(f"{value:.4g}") if isinstance(value, float) else value

    def line(self, name: str, text: str, value: float, limit: float | None, least: bool) -> None:
        """One figure beside its target."""
        self[name] = value
        verdict = ""
        if limit is not None and math.isfinite(limit):
            met = value >= limit if least else value <= limit
            verdict = f"{'at least' if least else 'at most'} {limit:.2f}: " + (
                "met" if met else "NOT met"
            )
            if not met:
                self.missed.append(f"{name} = {value:.3f} ({verdict})")
        print(f"    {text:62s} {verdict}", flush=True)

    def ratio(
        self,
        name: str,
        rounds: Rounds,
        side: str,
        to: str,
        limit: float | None,
        least: bool = False,
    ) -> None:
        if side not in rounds.times or to not in rounds.times:
            return
        value, (low, high) = rounds.ratio(side, to), rounds.interval(side, to)
        self[f"{name}_low"], self[f"{name}_high"] = low, high
        text = f"{side} / {to}: {value:.3f} [{low:.3f}, {high:.3f}]"
        self.line(name, text, value, limit, least)

    def count(self, rounds: Rounds, turns_taken: int) -> None:
        quiet = sum(share <= turns.QUIET for share in rounds.others)
        self.rounds += turns_taken
        self.quiet += quiet
        if quiet < len(rounds.others):
            busy = max(rounds.others)
            self.busy = max(self.busy, busy)
            print(f"    NOT QUIET: others took up to {busy:.0%} of the machine")

    def finish(self, options: argparse.Namespace, place: Json, **setting: Any) -> None:
        """What is said of all of it; the figures into the file that is asked for."""
        if self.rounds:
            self["quiet_share"] = self.quiet / self.rounds
            print(f"\nquiet: {self.quiet} of {self.rounds} rounds")
        for text in self.missed:
            print(f"NOT met: {text}")
        flat = self.figures | {"others_share": round(self.busy, 3)} | setting | place
        if options.output:
            write_output(options.output, flat | {"failures": self.failures})
        if options.json:
            print(json.dumps(flat))


def key_of(name: str) -> str:
    """A name as a part of a figure's."""
    return re.sub(r"\W+", "_", name)


def versions(threads: int, ours: bool = True) -> Json:
    """Versions of both sides, and what relpos chose to run on."""
    from importlib.metadata import PackageNotFoundError, version

    found: Json = {"threads": threads}
    for package in ("numpy", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    if ours:
        import relpos

        tree = Path(relpos.__file__).parent == HERE.parent / "relpos"
        found["relpos_from"] = "tree" if tree else "installed"
        found |= {f"relpos_{name}": value for name, value in relpos.build_info().items()}
    return found


def write_output(path: Path, document: Json) -> None:
    if path.parent == Path("."):
        path = HERE / "results" / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
