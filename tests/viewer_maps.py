# SPDX-License-Identifier: Apache-2.0
"""Attention maps made by hand, for the tests of the viewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from relpos.maps import AttentionMaps
from relpos.model_maps import ModelMaps

# What tokens may do to a page.
ODD = (
    "<script>alert(1)</script>",
    "</script>",
    "<!--",
    "-->",
    "&amp;",
    "&",
    "\"'`",
    "<img src=x onerror=alert(1)>",
    "שלום",
    "\u202eevil",
    "😀",
    "\u2028",
    " ",
    "\n",
    "",
    "\\u003c",
    "${x}",
    "$script",
    "\ud800",
    "\x00",
)


def softmax(logits: Any) -> Any:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def maps_of(
    rng: np.random.Generator,
    shape: tuple[int, int, int, int],
    *,
    causal: bool = False,
    relation: bool = True,
) -> AttentionMaps:
    """Maps of (layers, heads, queries, keys): random content, and a preferred offset in each head."""
    _, heads, queries, keys = shape
    apart = np.arange(keys) - np.arange(queries)[:, None]
    content = rng.normal(size=shape)
    liked = rng.permutation(np.arange(-heads, heads))[:heads]
    position = np.broadcast_to(4.0 * (apart == liked[:, None, None]) - 0.1 * abs(apart), shape)
    if not relation:
        position = np.zeros(shape)
    hidden = np.broadcast_to(causal & (apart > 0), shape)
    content, position = np.where(hidden, 0, content), np.where(hidden, 0, position)
    logits = np.where(hidden, -np.inf, content + position)
    parts = {"content": content, "key_table": position} if relation else {"content": content}
    return AttentionMaps(
        softmax(logits).astype(np.float32),
        logits.astype(np.float32),
        {name: part.astype(np.float32) for name, part in parts.items()},
    )


def model_maps(
    source: Sequence[str] = ("the", "dog", "runs", "</s>"),
    target: Sequence[str] = ("der", "hund", "läuft", ".", "</s>"),
    *,
    layers: int = 2,
    heads: int = 3,
    seed: int = 0,
) -> ModelMaps:
    """Of an encoder and a decoder; what crosses has no relation, as in the model."""
    rng = np.random.default_rng(seed)
    n, m = len(source), len(target)
    maps = {
        "encoder": maps_of(rng, (layers, heads, n, n)),
        "decoder": maps_of(rng, (layers, heads, m, m), causal=True),
        "cross": maps_of(rng, (layers, heads, m, n), relation=False),
    }
    read = ("<s>", *target[:-1])
    numbers = tuple(range(layers)), tuple(range(heads))
    return ModelMaps(tuple(source), read, maps, *numbers, tuple(target))


def changed(maps: ModelMaps, kind: str, **changes: Any) -> ModelMaps:
    """The same maps but for one kind's arrays."""
    old = maps.maps[kind]
    fields = {"probabilities": old.probabilities, "logits": old.logits, "parts": old.parts}
    new = {**maps.maps, kind: AttentionMaps(**(fields | changes))}
    return replace(maps, maps=new)
