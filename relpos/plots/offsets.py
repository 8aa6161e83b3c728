# SPDX-License-Identifier: Apache-2.0
"""Attention, and the parts of the logits, by how far the key is from the query."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos.plots import canvas
from relpos.plots.canvas import Axes
from relpos.plots.maps import heat_map
from relpos.plots.reading import kind_name, kind_of, place_of, shown, unit_of
from relpos.position.arrays import Array, check_count, describe

if TYPE_CHECKING:
    from relpos.model_maps import ModelMaps

MOST_NAMED = 40  # heads; a legend of more has no room beside its axes


def by_offset(
    maps: ModelMaps,
    kind: str | None = None,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    *,
    show: str = "probabilities",
    reach: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """How far the heads of a layer look, or what the offset does to their logits: a line a head.

    kind, layer: as of `head`. heads: int each. None: all that are there.
    show: "probabilities", the mean over queries of p at offset j - i; or "relation", "content" and
        so on, as of `head`: the mean over the pairs that are so far apart.
    reach: int. The farthest offset that is drawn. None: as far as 98 % of the attention goes.
    """
    kind = kind_of(maps, kind)
    chosen = maps.heads if heads is None else heads
    if not isinstance(chosen, Iterable):
        raise TypeError(f"heads: expected several int, got {describe(chosen)}")
    places = [place_of(maps, kind, layer, each) for each in chosen]
    offsets, values = _by_offset(maps, kind, show)
    within = np.abs(offsets) <= (_reach_of(maps, kind) if reach is None else _checked(reach))
    ax = canvas.plain(canvas.axes_of(ax, (6.0, 3.2)))
    ax.axvline(0, color=canvas.FAINT, linewidth=0.8, linestyle=":")
    for n, (i, j) in enumerate(places):
        ax.plot(
            offsets[within], values[i, j][within], "o-", markersize=2.5, linewidth=1.3,
            color=canvas.colour(n, len(places)), label=f"head {maps.heads[j]}",
        )  # fmt: skip
    canvas.no_fractions(ax.xaxis)
    ax.set_xlabel("offset j - i", fontsize=canvas.LABEL + 1)
    ax.set_ylabel("mean " + unit_of(show), fontsize=canvas.LABEL + 1)
    if places:
        canvas.title(ax, f"{kind_name(kind)}, layer {maps.layers_of(kind)[places[0][0]]}")
        if len(places) <= MOST_NAMED:
            ax.legend(fontsize=canvas.LABEL, frameon=False, ncols=1 + (len(places) - 1) // 8)
    return ax


def all_by_offset(
    maps: ModelMaps,
    kind: str | None = None,
    *,
    show: str = "probabilities",
    reach: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """How far the heads of all layers look: a row of colours for each head.

    kind, show, reach: as of `by_offset`.
    """
    kind = kind_of(maps, kind)
    offsets, values = _by_offset(maps, kind, show)
    layers, count = values.shape[:2]
    within = np.abs(offsets) <= (_reach_of(maps, kind) if reach is None else _checked(reach))
    names = [f"{layer}.{head}" for layer in maps.layers_of(kind) for head in maps.heads]
    seen = values[..., within].reshape(layers * count, -1)
    ax = canvas.axes_of(ax, (7.0, min(max(0.18 * len(names), 1.6), 9.0) + 0.9))
    heat_map(seen, names, None, ax=ax, signed=show != "probabilities", colour_bar=False)
    ax.set_aspect("auto")
    first, last = offsets[within][[0, -1]]
    drawn = ax.images[-1]
    drawn.set_extent((first - 0.5, last + 0.5, len(names) - 0.5, -0.5))
    for layer in range(1, layers):
        ax.axhline(layer * count - 0.5, color=canvas.INK, linewidth=0.8)
    ax.axvline(0, color=canvas.FAINT, linewidth=0.8, linestyle=":")
    canvas.no_fractions(ax.xaxis)
    ax.set_xlabel("offset j - i", fontsize=canvas.LABEL + 1)
    ax.set_ylabel("layer.head", fontsize=canvas.LABEL + 1)
    canvas.title(ax, f"{kind_name(kind)}, by offset")
    canvas.colour_bar(drawn, ax, "mean " + unit_of(show))
    return ax


def _by_offset(maps: ModelMaps, kind: str, show: str) -> tuple[Any, Array]:
    """Offsets, and (layers, heads, offsets): the mean at each."""
    offsets = maps.offsets(kind)
    if show == "probabilities":
        return offsets, maps.mass(kind)
    values = shown(maps, kind, show)
    queries, keys = values.shape[2:]
    sums, pairs = np.zeros((2, *values.shape[:2], offsets.size))
    for i in range(queries):
        along = slice(queries - 1 - i, queries - 1 - i + keys)
        sums[..., along] += np.nan_to_num(values[:, :, i])
        pairs[..., along] += np.isfinite(values[:, :, i])
    mean: Array = np.where(pairs > 0, sums / np.maximum(pairs, 1), np.nan).astype(np.float32)
    return offsets, mean


def _reach_of(maps: ModelMaps, kind: str) -> int:
    """The offset within which 98 % of every head's attention lies."""
    offsets, mass = np.abs(maps.offsets(kind)), maps.mass(kind)
    for reach in range(4, int(offsets.max(initial=4))):
        if mass[..., offsets <= reach].sum(axis=-1).min(initial=1.0) >= 0.98:
            return reach
    return max(1, int(offsets.max(initial=1)))


def _checked(reach: Any) -> int:
    return check_count("reach", reach, 1)
