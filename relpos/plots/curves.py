# SPDX-License-Identifier: Apache-2.0
"""The curves of runs, from their logs, and BLEU by length."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.plots import canvas
from relpos.plots.canvas import Axes, Canvas
from relpos.train.log import LOG, read_log

if TYPE_CHECKING:
    from relpos.evaluation import Evaluation, TextEvaluation

_WIDTH = 50  # points over which the training curve is smoothed, at most
_LONGEST = 80  # characters of a run's name that are shown


def curves(runs: Sequence[str | os.PathLike[str]], *, figure: Canvas | None = None) -> Canvas:
    """-log p per token in training and validation, BLEU of validation where a run has it, and the
    learning rate, of runs.

    runs: folders of runs, or log files. figure: a figure or subfigure to draw in.
    """
    if isinstance(runs, str | os.PathLike):
        runs = [runs]
    logs = [read_log(run) for run in runs]
    width = common_width([len(curve(lines, "train", "nll")[0]) for lines in logs])
    for run, lines in zip(runs, logs, strict=True):
        if not curve(lines, "train", "nll")[0]:
            raise ValueError(f"{os.fspath(run)}: no training step in this log")
    figure = canvas.figure_of(figure, (8, 6))
    has_bleu = any(curve(lines, "validation", "bleu")[0] for lines in logs)
    heights = (3, 1.5, 1) if has_bleu else (3, 1)
    above, *between, below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    drawn: list[tuple[Any, str]] = []
    for i, (name, lines) in enumerate(zip(names_of(runs), logs, strict=True)):
        hue = canvas.colour(i, len(logs))
        steps, values = curve(lines, "train", "nll")
        mark = "o" if len(steps) == 1 else ""  # a line of one point is not to be seen
        above.plot(steps, values, mark, color=hue, alpha=0.25, linewidth=1)
        [line] = above.plot(
            steps, smoothed(values, min(width, own_width(len(steps)))), "-" + mark, color=hue
        )
        drawn.append((line, f"{name}, training"))
        steps, values = curve(lines, "validation", "nll")
        if steps:
            [line] = above.plot(steps, values, "o--", markersize=3.5, color=hue)
            drawn.append((line, f"{name}, validation"))
        for ax in between:
            ax.plot(*curve(lines, "validation", "bleu"), "o--", markersize=3.5, color=hue)
        below.plot(*curve(lines, "train", "learning_rate"), "-" + mark, color=hue)
    above.set_ylabel("-log p of a token")
    handles, labels = zip(*drawn, strict=True)  # given, or it leaves out what begins with _
    font = {"family": canvas.families_for("".join(labels)), "size": canvas.LABEL + 1}
    above.legend(handles, labels, prop=font, frameon=False)
    for ax in between:
        ax.set_ylabel("BLEU")
    below.set_ylabel("learning rate")
    below.set_xlabel("step")
    for ax in (above, *between, below):
        canvas.plain(ax)
    figure.align_ylabels([above, *between, below])
    return figure


def curve(lines: Sequence[dict[str, Any]], kind: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a figure, where it was finite."""
    points = [
        (line["step"], float(line[name]))
        for line in lines
        if line.get("kind") == kind and _finite(line["step"]) and _finite(line.get(name))
    ]
    return [step for step, _ in points], [value for _, value in points]


def _finite(value: Any) -> bool:
    """Is it a number, and one that a float can be?"""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def own_width(points: int) -> int:
    """Over how many points a curve of so many is smoothed."""
    return min(_WIDTH, max(1, points // 10))


def common_width(counts: Sequence[int]) -> int:
    """The same for curves that are drawn together: that of the shortest, or runs that are the same
    look different. What was given up before a tenth of the longest does not count."""
    longest = max(counts, default=0)
    return own_width(min((count for count in counts if 10 * count >= longest), default=0))


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and as many before as behind it, `width` together: it falls where the
    curve falls. The first have fewer around them, the last more before them."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for i in range(len(values)):
        reach = min(i, width // 2)
        first, end = min(i - reach, len(values) - width), min(i + reach + 1, len(values))
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def names_of(runs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """What runs are called in the legend: by their folders, with those above where they are needed
    to tell one from another."""
    paths = [Path(run).resolve() for run in runs]
    folders = [path.parent if path.name == LOG else path for path in paths]
    return [canvas.readable(_name_among(each, folders), _LONGEST) for each in folders]


def _name_among(folder: Path, folders: Sequence[Path]) -> str:
    others = [each.parts for each in folders if each != folder]
    count = 1
    while any(each[-count:] == folder.parts[-count:] for each in others):
        count += 1
    return str(Path(*folder.parts[-count:]))


def bleu_by_length(evaluation: Evaluation, *, ax: Axes | None = None) -> Axes:
    """BLEU of the sentences of each range of lengths, and how many they are.

    evaluation: Evaluation, as `relpos.evaluation.evaluate` returns it, with sources.
    """
    ranges = evaluation.by_length
    if not ranges:
        raise ValueError("plot: there is no BLEU by length without sources")
    ax = _bars(
        [each.name for each in ranges],
        [each.bleu for each in ranges],
        [f"{each.bleu:.1f}\n{_counted(each.sentences)}" for each in ranges],
        ax,
    )
    ax.set_xlabel("words of the source")
    ax.set_ylabel("BLEU")
    canvas.title(ax, f"BLEU {evaluation.metrics[0].value:.2f}, by length")
    return ax


def perplexity_by_place(evaluation: TextEvaluation, *, ax: Axes | None = None) -> Axes:
    """-log p of tokens by where in their lines they stand, and their perplexity.

    evaluation: TextEvaluation, as `relpos.evaluation.evaluate_text` returns it.
    """
    parts = [each.likelihood for each in evaluation.by_place]
    ax = _bars(
        [each.name for each in evaluation.by_place],
        [each.nll for each in parts],
        [f"{each.perplexity:.4g}\n{each.tokens:,} tokens" for each in parts],
        ax,
    )
    ax.set_xlabel("token of its line")
    ax.set_ylabel("-log p of a token")
    canvas.title(ax, f"perplexity {evaluation.likelihood.perplexity:.4g}, by place")
    return ax


def _bars(
    names: Sequence[str], heights: Sequence[float], labels: Sequence[str], ax: Axes | None
) -> Axes:
    ax = canvas.plain(canvas.axes_of(ax, (8, 4.5)))
    bars = ax.bar(names, heights, color=canvas.LINES[0], width=0.7, zorder=2)
    ax.bar_label(bars, labels, fontsize=canvas.LABEL, padding=2)
    ax.grid(False, axis="x")
    ax.margins(y=0.15)
    ax.set_ylim(bottom=0, top=max(1.0, ax.get_ylim()[1]))  # all of them may be 0
    return ax


def _counted(sentences: int) -> str:
    return f"{sentences:,} {'sentence' if sentences == 1 else 'sentences'}"
