# SPDX-License-Identifier: Apache-2.0
"""Tables of relations as training leaves them: how long their rows are, how alike, and how they lie.

A table has a row for every offset from -k to k. A softmax does not see what all rows of a key table
have in common: compare rows with each other.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos.plots import canvas
from relpos.plots.canvas import Axes, Canvas
from relpos.position.arrays import Array, check_choice, check_count

if TYPE_CHECKING:
    from relpos.model import Transformer

_NAMES = {
    "key_table": "relations of keys",
    "value_table": "relations of values",
    "distance_table": "distances",
}
_BY_OFFSET = ("shaw", "music", "relative-key", "relative-key-query")  # a row for each offset
_LABELLED = 21  # points of a plane, at most


def tables_of(model: Transformer, stack: str = "encoder", layer: int = 0) -> dict[str, Array]:
    """The tables that a layer has where its `position` is shaw, music, relative-key or
    relative-key-query, by name.

    stack: "encoder" or "decoder". layer: int, from 0.

    Returns "key_table", "value_table" or both, or "distance_table": float32 (R, d), or (H, R, d).
        R = k + 1 + k_right of shaw; of the others a row for every offset within max_length. They
        begin with the farthest key to the left; those of distance_table, which counts i - j as
        transformers does, with the farthest to the right.
    """
    if not hasattr(model, "parameters"):
        raise TypeError(
            f"model: expected relpos.Transformer, got {type(model).__name__}; a translator has "
            "its own in `models`"
        )
    check_choice("stack", stack, ("encoder", "decoder"))
    config = getattr(model.config, stack)
    if not 0 <= check_count("layer", layer, 0) < config.layers:
        raise ValueError(f"layer: expected below {config.layers}, got {layer}")
    if config.position not in _BY_OFFSET:
        raise ValueError(
            f"model: expected {stack}.position {', '.join(_BY_OFFSET[:-1])} or {_BY_OFFSET[-1]}, "
            f"whose tables have a row for each offset, got {config.position}; what any scheme adds "
            'to the logits is drawn by by_offset(maps, show="relation")'
        )
    found = {}
    for name in _NAMES:
        for place in (f"{stack}.{layer}", stack):  # its own, or the one of the whole stack
            table = model.parameters.get(f"{place}.attention.{name}")
            if table is not None:
                found[name] = table
    return found


def tables(
    model: Transformer,
    stack: str = "encoder",
    layer: int = 0,
    *,
    head: int | None = None,
    figure: Canvas | None = None,
) -> Canvas:
    """The tables of one layer: norms, cosine similarity and principal components, a row for each.

    model, stack, layer: as of `tables_of`. head: int. Of similarity and components; None: the mean
        similarity of all heads, and the components of head 0.
    figure: a figure or subfigure to draw in.
    """
    found = tables_of(model, stack, layer)
    config = getattr(model.config, stack)
    of_shaw = config.position == "shaw"
    farthest = config.k if of_shaw else model.config.max_length - 1
    clipped = of_shaw and config.beyond == "clip"
    some = any(table.ndim == 3 for table in found.values())
    figure = canvas.figure_of(figure, (11.5, 3.3 * len(found) + 0.5))
    grid = figure.subplots(len(found), 3, squeeze=False, width_ratios=(1.15, 1, 1))
    for (name, table), (left, middle, other) in zip(found.items(), grid, strict=True):
        offsets = np.arange(table.shape[-2]) - farthest
        # a table that all heads share, beside one that they do not, has no heads to choose from
        own = None if some and table.ndim == 2 else head
        if name == "distance_table":
            table = table[..., ::-1, :]
        tied = config.tied and name == "key_table"
        of = "relations of keys and values" if tied else _NAMES[name]
        table_norms(table, offsets, clipped=clipped, ax=left)
        canvas.title(left, f"{of}: length of each row")
        table_similarity(table, offsets, head=own, clipped=clipped, ax=middle)
        which = "mean of all heads" if own is None and table.ndim == 3 else f"head {own or 0}"
        canvas.title(middle, f"cosine of two rows, {which}")
        table_components(table, offsets, head=own or 0, clipped=clipped, ax=other)
        canvas.title(other, f"principal components, head {own or 0}")
    figure.suptitle(f"{stack}, layer {layer}", fontsize=canvas.TITLE + 1, color=canvas.ink(figure))
    return figure


def table_norms(
    table: Any, offsets: Any = None, *, clipped: bool = False, ax: Axes | None = None
) -> Axes:
    """The Euclidean length of each row, a line for each head.

    table: (R, d), or (H, R, d). offsets: int (R,), what each row is for. None: R odd, those around 0.
    clipped: bool. The first and the last row are for all that are farther as well.
    """
    each, places = _read(table, offsets)
    ax = canvas.plain(canvas.axes_of(ax, (5.0, 3.2)))
    for h, rows in enumerate(each):
        ax.plot(
            places, np.linalg.norm(rows, axis=1), "o-", markersize=2.5, linewidth=1.3,
            color=canvas.colour(h, len(each)), label=f"head {h}",
        )  # fmt: skip
    ax.set_ylim(bottom=0)
    _offsets_along(ax.xaxis, places, clipped)
    ax.set_xlabel("offset j - i", fontsize=canvas.LABEL + 1)
    canvas.title(ax, "length of each row")
    if len(each) > 1:
        ax.legend(fontsize=canvas.LABEL, frameon=False, ncols=1 + (len(each) - 1) // 4)
    return ax


def table_similarity(
    table: Any,
    offsets: Any = None,
    *,
    head: int | None = None,
    clipped: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """The cosine of the angle between every two rows.

    table, offsets, clipped: as of `table_norms`. head: int. None: the mean of all heads.
    """
    each, places = _read(table, offsets)
    if head is not None:
        each = each[_checked(head, each)][None]
    lengths = np.linalg.norm(each, axis=2, keepdims=True)
    unit = each / np.maximum(lengths, 1e-30)
    ax = canvas.axes_of(ax, (4.2, 3.6))
    drawn = canvas.image(
        ax, (unit @ unit.transpose(0, 2, 1)).mean(axis=0), low=-1, high=1, colours=canvas.SIGNED
    )
    edge = places[0] - 0.5, places[-1] + 0.5
    drawn.set_extent((*edge, *edge[::-1]))
    for axis in (ax.xaxis, ax.yaxis):
        _offsets_along(axis, places, clipped)
    ax.set_xlabel("offset j - i", fontsize=canvas.LABEL + 1)
    canvas.title(ax, "cosine of two rows")
    canvas.colour_bar(drawn, ax)
    return ax


def table_components(
    table: Any,
    offsets: Any = None,
    *,
    head: int = 0,
    clipped: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """The rows in the plane of their first two principal components, joined by offset.

    table, offsets, clipped: as of `table_norms`. head: int.
    """
    each, places = _read(table, offsets)
    first, last = int(places[0]), int(places[-1])
    rows = each[_checked(head, each)]
    left, lengths, _ = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    share = lengths**2 / max(float((lengths**2).sum()), 1e-30)
    at = np.zeros((len(rows), 2))
    at[:, : lengths.size] = (left * lengths)[:, :2]
    ax = canvas.plain(canvas.axes_of(ax, (4.2, 3.6)))
    ax.plot(*at.T, color=canvas.FAINT, linewidth=0.8, zorder=1)
    ax.scatter(*at.T, c=places, cmap=canvas.IN_ORDER, s=22, zorder=2)
    apart = math.ceil(len(places) / _LABELLED)
    for place, (x, y) in zip(places, at, strict=True):
        if place % apart == 0:
            ax.annotate(
                _offset(place, first, last, clipped), (x, y), xytext=(4, 3),
                textcoords="offset points",
                fontsize=canvas.LABEL - 1, color=canvas.INK, path_effects=canvas.halo(),
            )  # fmt: skip
    ax.margins(0.12)
    names = [f"component {c + 1}" for c in range(2)]
    for c, name in enumerate(names):
        said = f"{name}, {share[c]:.0%}" if c < share.size else name
        (ax.set_ylabel if c else ax.set_xlabel)(said, fontsize=canvas.LABEL + 1)
    canvas.title(ax, f"principal components, head {head}")
    return ax


def _read(table: Any, offsets: Any) -> tuple[Any, Any]:
    """(H, R, d) in double, and the offsets of its rows."""
    each = np.asarray(table, np.float64)
    if each.ndim not in (2, 3) or each.size == 0:
        raise ValueError(f"table: expected (R, d) or (H, R, d), none of them 0, got {each.shape}")
    if not np.isfinite(each).all():
        raise ValueError("table: expected finite numbers, got NaN or infinity")
    each = each.reshape(-1, *each.shape[-2:])
    rows = each.shape[1]
    if offsets is None:
        if rows % 2 == 0:
            raise ValueError(
                f"offsets: expected {rows} whole numbers, got None: an even number of rows has "
                "no middle"
            )
        offsets = np.arange(rows) - rows // 2
    places = np.asarray(offsets)
    if places.shape != (rows,) or (np.diff(places) != 1).any():
        got = f"{places.tolist()!r:.80}"
        raise ValueError(
            f"offsets: expected {rows} whole numbers, each one more than that before it, got {got}"
        )
    return each, places


def _checked(head: Any, each: Any) -> int:
    if not 0 <= check_count("head", head, 0) < len(each):
        raise ValueError(f"head: expected below {len(each)}, got {head}")
    return int(head)


def _offsets_along(axis: Any, places: Any, clipped: bool) -> None:
    """Whole numbers; at the ends of what is clipped, that all beyond is meant."""
    first, last = int(places[0]), int(places[-1])
    canvas.whole_numbers(axis, first, last, lambda x, _: _offset(round(x), first, last, clipped))


def _offset(at: int, first: int, last: int, clipped: bool) -> str:
    if clipped and first < last and at in (first, last):
        return canvas.with_minus(f"< {first + 1}" if at == first else f"> {last - 1}")
    return canvas.with_minus(f"{at}")
