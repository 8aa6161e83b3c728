# SPDX-License-Identifier: Apache-2.0
"""Where pictures are drawn: new axes and figures, tokens along an axis, colours.

Colours are told apart by the colour-blind: Okabe and Ito's for lines, one hue from white for
shares, blue through white to red for what may be negative.
"""

from __future__ import annotations

import importlib
import io
import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib import colors, font_manager, patheffects, rc_context, rcParams, ticker
from matplotlib.axes import Axes as PlainAxes
from matplotlib.figure import Figure, FigureBase

from relpos.data.files import write_output
from relpos.position.arrays import check_number

Axes = Any  # of matplotlib
Canvas = Any  # a Figure or SubFigure of matplotlib

INK, FAINT, BLANK = "#26323d", "#9aa5b1", "#eceff2"
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#000000")
SHARES, SIGNED, IN_ORDER = "Blues", "RdBu_r", "viridis"
LABEL, TITLE = 8, 10  # points

_LONGEST = 16  # characters of a token that are shown
# Fonts that have the scripts which matplotlib's own lacks, as far as they are installed.
_FONTS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Micro Hei",
    "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai",
    "Arial Unicode MS", "Unifont",
)  # fmt: skip


def axes_of(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The axes themselves, or those of a new figure of so many inches."""
    if ax is None:
        return figure_of(None, size).subplots()
    if not isinstance(ax, PlainAxes):
        raise TypeError(f"ax: expected axes of matplotlib, got {type(ax).__name__}")
    return ax


def figure_of(figure: Canvas | None, size: tuple[float, float]) -> Canvas:
    """The figure itself, or a new one of so many inches; text keeps clear of text in it."""
    if figure is not None:
        if not isinstance(figure, FigureBase):
            raise TypeError(f"figure: expected a figure or subfigure, got {type(figure).__name__}")
        return figure
    pyplot = importlib.import_module("matplotlib.pyplot")
    return pyplot.figure(figsize=size, layout="compressed")


def without_display(size: tuple[float, float]) -> Canvas:
    """A figure of so many inches that pyplot does not know, for a file alone."""
    return Figure(figsize=size, layout="constrained")


def use_no_display() -> None:
    """For a process that draws into files alone: pyplot opens no window."""
    importlib.import_module("matplotlib").use("Agg")


def save(picture: Axes | Canvas, path: str | os.PathLike[str], *, dpi: float = 120) -> Path:
    """Writes a picture, axes or a figure, into a file whose ending says its kind: .png, .svg, .pdf.

    The same picture, drawn anew, gives the same bytes with the same matplotlib.
    """
    figure, dpi = _whole(picture), check_number("dpi", dpi, positive=True)
    if not hasattr(figure, "savefig"):
        raise TypeError(f"picture: expected axes or a figure, got {type(picture).__name__}")
    target = Path(path)
    kind = check_ending("path", target)
    # Otherwise the version and the date are in the file.
    unsaid = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}.get(kind)
    metadata = None if unsaid is None else {unsaid: None}
    drawn = io.BytesIO()
    with rc_context({"svg.hashsalt": "relpos"}):  # else the names of clips are random
        figure.savefig(drawn, format=kind[1:], dpi=dpi, metadata=metadata)
    write_output(target, drawn.getvalue())
    return target


def _whole(picture: Any) -> Any:
    """The figure that a picture is of, or is."""
    while (above := getattr(picture, "figure", None) or picture) is not picture:
        picture = above  # of axes in a subfigure that is not yet the whole
    return picture


def check_ending(name: str, path: str | os.PathLike[str]) -> str:
    """The ending of a file, which must be one that pictures have."""
    file = Path(path)
    kind = file.suffix.lower()
    if kind[1:] not in Figure().canvas.get_supported_filetypes():
        raise ValueError(
            f"{name}: expected an ending among .png, .svg, .pdf and the others of matplotlib, "
            f"got {file.name!r}"
        )
    return kind


def colour(i: int, count: int) -> Any:
    """Of line i of so many: told apart by hue, or beyond eight by order."""
    if count <= len(LINES):
        return LINES[i]
    return importlib.import_module("matplotlib").colormaps[IN_ORDER](i / (count - 1))


# --------------------------------------------------------------------------------------------------
# Tokens along an axis
# --------------------------------------------------------------------------------------------------


class _Thinned(ticker.Locator):
    """Every token's place, or every second's, third's... so that labels never overlap."""

    def __init__(self, count: int, points: float) -> None:
        self._count, self._points = count, points

    def __call__(self) -> list[int]:
        box = self.axis.axes.get_window_extent()
        pixels = box.width if self.axis.axis_name == "x" else box.height
        room = pixels * 72 / self.axis.axes.figure.dpi
        first, last = sorted(self.axis.get_view_interval())
        shown = range(max(0, math.ceil(first)), min(self._count, math.floor(last) + 1))
        step = math.ceil(max(1, len(shown)) * self._points / max(room, 1.0))
        return [i for i in shown if i % step == 0]

    def tick_values(self, first: float, last: float) -> list[int]:
        return list(range(self._count))


def tokens_along(axis: Any, tokens: Sequence[str], size: float = LABEL) -> None:
    """Labels an axis with tokens; those of the x axis stand upright."""
    texts = [readable(token) for token in tokens]
    axis.set_major_locator(_Thinned(len(texts), 1.25 * size))
    axis.set_major_formatter(
        ticker.FuncFormatter(lambda x, _: texts[round(x)] if 0 <= round(x) < len(texts) else "")
    )
    families = families_for("".join(texts))
    turned = {"labelrotation": 90} if axis.axis_name == "x" else {}
    axis.set_tick_params(length=0, pad=2, labelsize=size, labelfontfamily=families, **turned)


def readable(token: str, longest: int = _LONGEST) -> str:
    """A token, or a name, as a label: one line, not too long, no formula."""
    text = "".join(each if each.isprintable() else "·" for each in token)
    if token and not text.strip():
        text = "␣" * len(text)
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return text.replace("$", r"\$") if rcParams["text.parse_math"] else text


def families_for(text: str) -> list[str]:
    """Fonts for a text: matplotlib's own, and the installed ones where it has other scripts."""
    own = font_manager.FontProperties().get_family()
    return [*own, *_installed()] if any(ord(each) > 0x2FF for each in text) else list(own)


@cache
def _installed() -> tuple[str, ...]:
    there = set(font_manager.get_font_names())
    return tuple(name for name in _FONTS if name in there)


# --------------------------------------------------------------------------------------------------
# Axes
# --------------------------------------------------------------------------------------------------


def image(ax: Axes, values: Any, *, low: float, high: float, colours: str) -> Any:
    """A matrix in colours; what is not a number stays blank."""
    rows, columns = values.shape
    alike = 1 / 3 <= (rows + 1) / (columns + 1) <= 3
    drawn = ax.imshow(
        values,
        cmap=colours,
        vmin=low,
        vmax=high,
        aspect="equal" if alike else "auto",
        origin="upper",
        interpolation="nearest" if max(rows, columns) <= 150 else "antialiased",
    )
    ax.grid(False)
    ax.set_facecolor(BLANK)
    for spine in ax.spines.values():
        spine.set_color(FAINT)
        spine.set_linewidth(0.6)
    return drawn


def colour_bar(drawn: Any, axes: Any, label: str = "") -> Any:
    """A slim one beside the axes."""
    figure = (axes if hasattr(axes, "figure") else axes[0]).figure
    bar = figure.colorbar(drawn, ax=axes, fraction=0.046, pad=0.02, shrink=0.8, aspect=25)
    bar.ax.tick_params(labelsize=LABEL, length=2)
    bar.outline.set_linewidth(0.4)
    bar.outline.set_edgecolor(FAINT)
    if label:
        bar.set_label(label, fontsize=LABEL)
    return bar


def plain(ax: Axes) -> Axes:
    """Axes of lines: a faint grid, no box."""
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(labelsize=LABEL, color=FAINT)
    return ax


def halo() -> list[Any]:
    """Keeps text readable that stands on lines or points."""
    return [patheffects.withStroke(linewidth=2, foreground="white")]


def ink(on: Axes | Canvas) -> Any:
    """The colour of titles: that of the style where the figure is dark."""
    *light, alpha = colors.to_rgba(_whole(on).get_facecolor())
    return rcParams["text.color"] if alpha > 0 and sum(light) < 1.5 else INK


def title(ax: Axes, text: str) -> None:
    ax.set_title(text, fontsize=TITLE, color=ink(ax))


def inches(
    rows: int, columns: int, least: float, most: float, each: float = 0.16
) -> tuple[float, float]:
    """How wide and how high a map is: room for every token as far as `most` allows, square cells."""
    each = min(each, most / max(rows, columns))
    return max(columns * each, least), max(rows * each, least)


def no_fractions(axis: Any) -> None:
    """Ticks at whole numbers alone, also where there is but one."""
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def whole_numbers(axis: Any, first: int, last: int, said: Callable[[float, int], str]) -> None:
    """Ticks at both ends and, evenly between, about ten at most: where no step fits both ends, at
    its multiples that are not too near to them."""
    apart = last - first
    fits = [n for n in (1, 2, 3, 4, 5, 8, 10, 16, 20) if apart % n == 0 and apart <= 10 * n]
    if fits:
        ticks = [*range(first, last + 1, fits[0])]
    else:
        step = next(n * 10**e for e in range(20) for n in (1, 2, 5) if apart <= 10 * n * 10**e)
        multiples = range(-(-first // step) * step, last + 1, step)
        ticks = [first, *(x for x in multiples if 2 * min(x - first, last - x) > step), last]
    axis.set_major_locator(ticker.FixedLocator(ticks))
    axis.set_major_formatter(ticker.FuncFormatter(said))
    axis.set_tick_params(labelsize=LABEL)


def with_minus(text: str) -> str:
    """As matplotlib writes negative numbers."""
    return text.replace("-", "\N{MINUS SIGN}")
