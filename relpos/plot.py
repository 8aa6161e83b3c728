# SPDX-License-Identifier: Apache-2.0
"""`relpos plot`: the curves of runs, from their logs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relpos.train.log import LOG, read_log

_WIDTH = 50  # points over which the training curve is smoothed, at most


def curve(lines: Sequence[dict[str, Any]], kind: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a figure, where it was finite."""
    points = [
        (line["step"], float(line[name]))
        for line in lines
        if line.get("kind") == kind and isinstance(line.get(name), int | float)
    ]
    return [step for step, _ in points], [value for _, value in points]


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, over a tenth of the curve or less."""
    width = min(_WIDTH, max(1, len(values) // 10))
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    first = [max(0, i + 1 - width) for i in range(len(values))]
    return [(sums[i + 1] - sums[first[i]]) / (i + 1 - first[i]) for i in range(len(values))]


def plot(runs: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> Path:
    """Draws -log p per token in training and validation, and the learning rate, of runs.

    runs: folders of runs, or log files. path: the picture, whose ending says its kind.
    """
    logs = [(name_of(run), read_log(run)) for run in runs]
    for run, (_, lines) in zip(runs, logs, strict=True):
        if not curve(lines, "train", "nll")[0]:
            raise ValueError(f"{os.fspath(run)}: no training step in this log")
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError("plot: takes matplotlib, `pip install 'relpos[viz]'`") from None
    figure = figures.Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for i, (name, lines) in enumerate(logs):
        steps, values = curve(lines, "train", "nll")
        above.plot(steps, values, color=f"C{i}", alpha=0.25)
        above.plot(steps, smoothed(values), color=f"C{i}", label=f"{name}, training")
        steps, values = curve(lines, "validation", "nll")
        if steps:
            above.plot(steps, values, "o--", color=f"C{i}", label=f"{name}, validation")
        below.plot(*curve(lines, "train", "learning_rate"), color=f"C{i}")
    above.set_ylabel("-log p of a token")
    above.legend()
    above.grid(alpha=0.3)
    below.set_ylabel("learning rate")
    below.set_xlabel("step")
    below.grid(alpha=0.3)
    target = Path(path)
    figure.savefig(target, dpi=100)
    return target


def name_of(run: str | os.PathLike[str]) -> str:
    """What a run is called in the legend."""
    path = Path(run).resolve()
    return path.parent.name if path.name == LOG else path.name
