# SPDX-License-Identifier: Apache-2.0
"""Attention maps: one head, all heads, content against relation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos.plots import canvas
from relpos.plots.canvas import Axes, Canvas
from relpos.plots.reading import (
    kind_of,
    name_of,
    place_of,
    shown,
    strongest,
    tokens_of,
    unit_of,
)
from relpos.position.arrays import Array, describe

if TYPE_CHECKING:
    from relpos.model_maps import ModelMaps

_ROWS, _COLUMNS = "token", "looks at"
_PREDICTS = "about to say"  # what the rows of a decoder are
_MOVED = "moved by relations"
_NO_TERMS = "no relation apart from content"
_UNTOLD = "softcap, or relations that were not asked for"  # where logits are not content
_TITLE_INCHES = 1.3  # that the longest of them takes, above a map


# --------------------------------------------------------------------------------------------------
# Where a head looks
# --------------------------------------------------------------------------------------------------


def heat_map(
    weights: Any,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    *,
    ax: Axes | None = None,
    limit: float | None = None,
    signed: bool = False,
    title: str = "",
    colour_bar: bool = True,
    unit: str = "",
) -> Axes:
    """A matrix in colours, with tokens on its axes.

        relpos.plots.heat_map(relpos.attention_maps(q, k, sequences=0, heads=3).probabilities)

    weights: (queries, keys). What is not finite is hidden, and stays blank.
    queries, keys: str each. None: numbers.
    limit: float. What has the strongest colour. None: the largest there is.
    signed: bool. From blue through white, which is 0, to red; else from white to blue.
    unit: str. What the colour bar is of.
    """
    if np.iscomplexobj(weights):
        raise TypeError(f"weights: expected real numbers, got {describe(np.asarray(weights))}")
    values = np.asarray(weights, np.float64)
    if values.ndim != 2 or values.size == 0:
        raise ValueError(f"weights: expected (queries, keys), none of them 0, got {values.shape}")
    for name, tokens, count in zip(("queries", "keys"), (queries, keys), values.shape, strict=True):
        if tokens is None:
            continue
        if not isinstance(tokens, Iterable) or not all(isinstance(each, str) for each in tokens):
            raise TypeError(f"{name}: expected several str, got {describe(tokens)}")
        if len(tokens) != count:
            raise ValueError(f"{name}: expected {count} as in weights, got {len(tokens)}")
    most = strongest(values) if limit is None else float(limit)
    if not 0 < most < np.inf:
        raise ValueError(f"limit: expected above 0 and finite, got {limit}")
    rows, columns = values.shape
    wide, high = canvas.inches(rows, columns, 2.4, 9.0)
    ax = canvas.axes_of(ax, (wide + 1.4, high + 0.9))
    drawn = canvas.image(
        ax,
        np.where(np.isfinite(values), values, np.nan),
        low=-most if signed else 0.0,
        high=most,
        colours=canvas.SIGNED if signed else canvas.SHARES,
    )
    for axis, tokens in ((ax.yaxis, queries), (ax.xaxis, keys)):
        if tokens is None:
            canvas.no_fractions(axis)
            axis.set_tick_params(labelsize=canvas.LABEL, length=2, color=canvas.FAINT)
        else:
            canvas.tokens_along(axis, tokens)
    if title:
        canvas.title(ax, title)
    if colour_bar:
        canvas.colour_bar(drawn, ax, unit)
    return ax


def head(
    maps: ModelMaps,
    kind: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    *,
    show: str = "probabilities",
    ax: Axes | None = None,
    colour_bar: bool = True,
) -> Axes:
    """One head: where it looks, or one of the reasons.

    kind: "encoder", "decoder" or "cross". None: the first that is there.
    layer, head: int, as the model counts them, from 0. None: the first that are there.
    show: "probabilities"; "logits", or a part of them by its name: "content", "relation" (the sum
        of all others), "key_table" and so on. Of these the mean of each row is taken away, which a
        softmax does not see; what is hidden stays blank.
    """
    kind = kind_of(maps, kind)
    i, j = place_of(maps, kind, layer, head)
    queries, keys = tokens_of(maps, kind)
    ax = heat_map(
        shown(maps, kind, show)[i, j],
        queries,
        keys,
        ax=ax,
        signed=show != "probabilities",
        title=name_of(maps, kind, i, j) + ("" if show == "probabilities" else f": {show}"),
        colour_bar=colour_bar,
        unit=unit_of(show),
    )
    ax.set_ylabel(_rows_of(maps, kind), fontsize=canvas.LABEL + 1)
    ax.set_xlabel(_COLUMNS, fontsize=canvas.LABEL + 1)
    return ax


def heads(
    maps: ModelMaps,
    kind: str | None = None,
    *,
    show: str = "probabilities",
    figure: Canvas | None = None,
) -> Canvas:
    """All heads of a kind, a row for each layer, in the same colours.

    kind, show: as of `head`. figure: a figure or subfigure to draw in.

    Where relations take part, each title says how much of the head's attention they move: `moved`.
    """
    kind = kind_of(maps, kind)
    values = shown(maps, kind, show)
    layers, count, rows, columns = values.shape
    most = min(3.4, max(1.2, 24 / count))
    wide, high = canvas.inches(rows, columns, min(1.6, most), most, 0.145)
    figure = canvas.figure_of(figure, (count * (wide + 0.15) + 1.7, layers * (high + 0.45) + 0.9))
    grid = figure.subplots(layers, count, squeeze=False, sharex=True, sharey=True)
    share = moved(maps, kind) if _has_relations(maps, kind) else None
    queries, keys = tokens_of(maps, kind)
    limit, signed = strongest(values), show != "probabilities"
    narrow = columns * min(wide / columns, high / rows) < min(_TITLE_INCHES, wide)
    for (i, j), ax in np.ndenumerate(grid):
        heat_map(values[i, j], queries, keys, ax=ax, limit=limit, signed=signed, colour_bar=False)
        if narrow:  # square cells would leave the titles no room
            ax.set_aspect("auto")
        said = f"layer {maps.layers_of(kind)[i]}, head {maps.heads[j]}"
        said += "" if share is None else f"\n{share[i, j]:.0%} {_MOVED}"
        ax.set_title(said, fontsize=canvas.LABEL, color=canvas.ink(ax))
        ax.label_outer()
    _name_sides(figure, maps, kind)
    bar = canvas.colour_bar(grid[0, 0].images[0], list(grid.flat))
    bar.set_label(unit_of(show), fontsize=canvas.LABEL)
    return figure


# --------------------------------------------------------------------------------------------------
# Why it looks there
# --------------------------------------------------------------------------------------------------


def content_and_relation(
    maps: ModelMaps,
    kind: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    *,
    figure: Canvas | None = None,
) -> Canvas:
    """Why one head looks where it does: content + relation = logits, and their softmax.

    The three have the same colours: red draws attention, blue keeps it away. The mean of each row is
    taken away, which a softmax does not see; hidden pairs stay blank. Under RoPE content is what
    the turned queries and keys give, and there is no relation apart from it: it is left out, as in
    cross attention.

    kind, layer, head: as of `head`. figure: a figure or subfigure to draw in.
    """
    kind = kind_of(maps, kind)
    i, j = place_of(maps, kind, layer, head)
    related = _has_terms(maps, kind)
    titles = {"content": "content", "relation": "+ relation", "logits": "= logits"}
    parts = {name: shown(maps, kind, name)[i, j] for name in titles}
    capped = not np.allclose(
        np.nan_to_num(parts["content"] + parts["relation"]),
        np.nan_to_num(parts["logits"]),
        atol=1e-3 * strongest(parts["logits"]) + 1e-4,
    )
    if capped:
        titles["logits"] = "= logits, after softcap" if related else "logits"
    if not related:  # an empty map would look like a relation that does nothing
        del parts["relation"]
    rows, across = parts["logits"].shape
    wide, high = canvas.inches(rows, across, 2.2, 5.0)
    # no wider than square cells make it, so that the names of the sides stay near
    wide = max(min(wide, high * across / rows), _TITLE_INCHES)
    columns = len(parts) + 1
    figure = canvas.figure_of(figure, (columns * (wide + 0.15) + 2.6, high + 1.5))
    grid = figure.subplots(1, columns, sharex=True, sharey=True)
    queries, keys = tokens_of(maps, kind)
    most = max(map(strongest, parts.values()))
    for ax, (name, values) in zip(grid, parts.items(), strict=False):
        heat_map(
            values, queries, keys,
            ax=ax, limit=most, signed=True, title=titles[name], colour_bar=False,
        )  # fmt: skip
    heat_map(
        shown(maps, kind, "probabilities")[i, j], queries, keys,
        ax=grid[-1], title="softmax: attention", colour_bar=False,
    )  # fmt: skip
    for ax in grid:
        ax.label_outer()
    bar = canvas.colour_bar(grid[0].images[0], list(grid[:-1]))
    bar.set_label(unit_of("logits"), fontsize=canvas.LABEL)
    bar = canvas.colour_bar(grid[-1].images[0], grid[-1])
    bar.set_label(unit_of("probabilities"), fontsize=canvas.LABEL)
    _name_sides(figure, maps, kind)
    said = _UNTOLD if capped else _NO_TERMS
    if related:
        said = f"{moved(maps, kind)[i, j]:.0%} of its attention {_MOVED}"
    figure.suptitle(
        f"{name_of(maps, kind, i, j)}: {said}",
        fontsize=canvas.TITLE + 1,
        color=canvas.ink(figure),
    )
    return figure


def moved(maps: ModelMaps, kind: str | None = None) -> Array:
    """How much of a head's attention is elsewhere than content alone would have it.

        mean over queries of 1/2 sum_j | softmax(logits)_ij - softmax(content)_ij |

    0: relations change nothing; 1: they decide. A softcap is left out of both.

    Returns float32 (layers, heads).
    """
    kind = kind_of(maps, kind)
    content, relation = shown(maps, kind, "content"), shown(maps, kind, "relation")
    apart = np.abs(_softmax(content + relation) - _softmax(content)).sum(axis=-1) / 2
    share: Array = apart.mean(axis=-1).astype(np.float32)
    return share


def _softmax(values: Array) -> Any:
    kept = np.where(np.isfinite(values), values, -np.inf)
    top = kept.max(axis=-1, keepdims=True, initial=-1e30)
    powers = np.exp(kept - top)
    return powers / np.maximum(powers.sum(axis=-1, keepdims=True), 1e-30)


def _has_terms(maps: ModelMaps, kind: str) -> bool:
    return len(maps.maps[kind].parts) > 1


def _has_relations(maps: ModelMaps, kind: str) -> bool:
    of_kind = maps.maps[kind]
    if "content" not in of_kind.parts or of_kind.logits is None or maps.missing(kind):
        return False
    return bool(maps.relation(kind).any())


def _rows_of(maps: ModelMaps, kind: str) -> str:
    return _PREDICTS if kind != "encoder" and maps.predicted_tokens else _ROWS


def _name_sides(figure: Canvas, maps: ModelMaps, kind: str) -> None:
    figure.supylabel(_rows_of(maps, kind), fontsize=canvas.LABEL + 1, color=canvas.ink(figure))
    figure.supxlabel(_COLUMNS, fontsize=canvas.LABEL + 1, color=canvas.ink(figure))
