# SPDX-License-Identifier: Apache-2.0
"""Calls of relpos._core for the tests of the binding: the tuple with everything absent but what a
test gives, terms likewise, and arrays for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from binding_arrays import rows
from relpos import _core

B, H, N, M, D, E = 2, 3, 11, 13, 8, 6
LEFT, RIGHT, T = 3, 2, 6

random = np.random.default_rng(11)
FIELDS = {
    "map": _core.MAP_BAND, "left": 0, "right": 0, "beyond": _core.BEYOND_CLIP,
    "buckets": None, "query_positions": None, "key_positions": None,
    "labels": None, "label_starts": None,
    "edge_starts": None, "edge_keys": None, "edge_labels": None,
}  # fmt: skip
CALL = {
    "layout": "bhnd", "causal": False, "scale": 0.0,
    "lengths": None, "key_lengths": None, "offsets": None, "key_offsets": None, "query_start": None,
    "terms": (), "position_bias": None, "window": None, "mask": None, "softcap": 0.0,
    "dropout": None, "placement": None,
}  # fmt: skip


def term(name: str, kind: int, table: Any, **fields: Any) -> Any:
    return (name, kind, table, *(FIELDS | fields).values())


def make_call(**fields: Any) -> Any:
    return tuple((CALL | fields).values())


def band(name: str, kind: int, table: Any, **fields: Any) -> Any:
    return term(name, kind, table, left=LEFT, right=RIGHT, **fields)


def labelled(name: str, kind: int, table: Any, labels: Any, **fields: Any) -> Any:
    return term(name, kind, table, map=_core.MAP_LABEL, labels=labels, **fields)


def some_labels(dtype: Any, *shape: int) -> Any:
    return random.integers(-1, T, shape).astype(dtype)


def some_edges(rows: int, keys: int) -> dict[str, Any]:
    """None for most queries; some twice."""
    counts = random.integers(0, 4, rows)
    counts[::3] = 0
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    to = [np.sort(random.integers(0, keys, n)) for n in counts]
    return {
        "map": _core.MAP_EDGES,
        "edge_starts": starts,
        "edge_keys": np.concatenate(to).astype(np.int32),
        "edge_labels": random.integers(0, T, starts[-1]).astype(np.int32),
    }


Q, KEYS, V = rows(B, H, N, D, seed=1), rows(B, H, M, D, seed=2), rows(B, H, M, E, seed=3)
KEY, KEYH = rows(T, D, seed=4), rows(H, T, D, seed=5)
QUERY, QUERYH = rows(T, D, seed=6), rows(H, T, D, seed=7)
BIAS, BIASH = rows(T, seed=8), rows(H, T, seed=9)
VALUE, VALUEH = rows(T, E, seed=10), rows(H, T, E, seed=11)
WIDE = rows(T, 2 * D, seed=12)
BUCKETS = random.integers(-1, T, LEFT + 1 + RIGHT).astype(np.int32)
PLACES = {
    "query_positions": random.integers(-9, 9, (B, N)).astype(np.int32),
    "key_positions": random.integers(-9, 9, (B, M)).astype(np.int32),
}
SHARED_PLACES = {name: x[1].copy() for name, x in PLACES.items()}


def gradients_like(call: Any) -> tuple[Any, Any]:
    """Ones, laid out as the tables and the position bias."""
    terms, bias = call[8], call[9]

    def ones(table: Any) -> Any:
        if table.flags.c_contiguous:
            return np.ones(table.shape, np.float32)
        wide = np.ones((*table.shape[:-1], 2 * table.shape[-1]), np.float32)
        return wide[..., : table.shape[-1]]

    return tuple(ones(t[2]) for t in terms), None if bias is None else ones(bias)
