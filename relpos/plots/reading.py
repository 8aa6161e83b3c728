# SPDX-License-Identifier: Apache-2.0
"""What pictures read of `ModelMaps`: values by name, tokens of rows and columns, places, names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relpos.maps import AttentionMaps
from relpos.model_maps import ModelMaps
from relpos.position.arrays import Array, describe, integer_of


def shown(maps: ModelMaps, kind: str, show: str) -> Array:
    """(layers, heads, queries, keys) of a name: NaN where hidden, if the logits are there to tell,
    and of logits and their parts without the mean of each row."""
    of_kind = maps.maps[kind]
    there = {"probabilities": of_kind.probabilities, "logits": of_kind.logits, **of_kind.parts}
    known = [name for name, values in there.items() if values is not None]
    known += ["relation"] if "content" in known else []
    if show not in known:
        names = ", ".join(map(repr, known)) or "none"
        raise ValueError(f"maps: {kind} has no {show!r} to show, only {names}")
    if show != "probabilities" and of_kind.logits is None:  # nothing says what is hidden
        raise ValueError(
            f'maps: {kind} has parts but no logits; ask attention_maps for parts="all"'
        )
    values = maps.relation(kind) if show == "relation" else there[show]
    if values.shape[0] == 0 or values.shape[1] == 0:
        raise ValueError("maps: expected a layer and a head at least, got none")
    if values.size == 0:
        raise ValueError(f"maps: expected tokens on either side of {kind!r}, got none")
    if of_kind.logits is not None:  # they alone tell a hidden key from one that gets nothing
        values = np.where(np.isfinite(of_kind.logits), values, np.float32(np.nan))
    if show == "probabilities":
        return np.asarray(values)
    counts = np.isfinite(values).sum(axis=-1, keepdims=True)
    means = np.nansum(values, axis=-1, keepdims=True) / np.maximum(counts, 1)
    return np.asarray(values - means)


def tokens_of(maps: ModelMaps, kind: str) -> tuple[Sequence[str], Sequence[str]]:
    """The tokens of rows and columns; rows of a decoder are what it is about to say, if known."""
    queries, keys = maps.tokens(kind)
    if kind != "encoder" and maps.predicted_tokens:
        queries = maps.predicted_tokens
    return queries, keys


def strongest(values: Any) -> float:
    """The largest absolute value, for the strongest colour; of nothing but 0, one."""
    return float(np.max(np.abs(values[np.isfinite(values)]), initial=0.0)) or 1.0


def kind_of(maps: ModelMaps, kind: str | None) -> str:
    if not isinstance(maps, ModelMaps):
        of_arrays = isinstance(maps, AttentionMaps)
        fix = "; ModelMaps(tokens, (), {'encoder': maps}, layers, heads) names their axes"
        raise TypeError(f"maps: expected ModelMaps, got {describe(maps)}{fix if of_arrays else ''}")
    if kind is None and maps.maps:
        return next(iter(maps.maps))
    maps.tokens(str(kind))  # says what is there if that is not
    return str(kind)


def place_of(maps: ModelMaps, kind: str, layer: int | None, head: int | None) -> tuple[int, int]:
    """Where a layer and a head of the model are in the arrays."""
    shown(maps, kind, "probabilities")  # says what there is not
    return _index("layer", layer, maps.layers_of(kind)), _index("head", head, maps.heads)


def _index(name: str, wanted: int | None, there: tuple[int, ...]) -> int:
    if wanted is None:
        return 0
    number = integer_of(name, wanted)
    if number not in there:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, there))}, got {number}")
    return there.index(number)


def kind_name(kind: str) -> str:
    return "cross attention" if kind == "cross" else kind


def name_of(maps: ModelMaps, kind: str, i: int, j: int) -> str:
    return f"{kind_name(kind)}, layer {maps.layers_of(kind)[i]}, head {maps.heads[j]}"


def unit_of(show: str) -> str:
    if show == "probabilities":
        return "attention"
    return f"{show}, less the mean of its row" if show != "logits" else "less the mean of its row"
