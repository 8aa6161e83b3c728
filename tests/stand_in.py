# SPDX-License-Identifier: Apache-2.0
"""A core in plain NumPy behind the binding's own door, in double: relpos.reference fed by calls.

`stand_in(monkeypatch)` puts it in the place of `relpos._core`, and double in the place of float32.
So the Python layers above the core (lowering, the way back of gradients, torch) can be checked to
twelve digits, by finite differences and by gradcheck.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from relpos import _core, reference
from relpos.position import arrays
from relpos.reference import Band, Batch, Dropout, Edges, Labels, Relation

KINDS = {_core.KEY: "key", _core.QUERY: "query", _core.BIAS: "bias", _core.VALUE: "value"}


def _pieces(flat: Any, starts: Any, spans: list[Any]) -> list[Any]:
    """One (1, n, m) or (H, n, m) for every sequence, of matrices laid end to end."""
    return [
        flat[..., starts[s.batch] : starts[s.batch] + s.queries * s.keys].reshape(
            -1 if flat.ndim == 2 else 1, s.queries, s.keys
        )
        for s in spans
    ]


def relation(term: Any, spans: list[Any]) -> Relation:
    _, kind, table, map, left, right, beyond, buckets, ours, theirs, labels, *rest = term
    label_starts, edge_starts, edge_keys, edge_labels = rest
    if kind == _core.BIAS:
        table = table[..., None]
    where: Any
    if map == _core.MAP_BAND:
        mode: Any = "none" if beyond == _core.BEYOND_NONE else "clip"
        where = Band(left, right, mode, buckets, ours, theirs)
        assert (left + 1 + right == table.shape[-2]) == (buckets is None) or buckets is not None
        assert buckets is None or len(buckets) == left + 1 + right
    elif map == _core.MAP_LABEL:
        where = Labels(labels if label_starts is None else _pieces(labels, label_starts, spans))
    else:
        where = Edges(edge_starts, edge_keys, edge_labels)
    return Relation(KINDS[kind], table, where)  # type: ignore[arg-type]


def batch_of(q: Any, k: Any, call: Any) -> Batch:
    layout, causal, scale, lengths, key_lengths, offsets, key_offsets, start, *rest = call
    terms, bias, window, mask, softcap, dropout, placement = rest
    assert placement is None
    rows = 2 if layout == "bhnd" else 1
    spans = reference.spans(
        len(q) if offsets is None else len(offsets) - 1,
        0 if q.ndim == 3 else q.shape[rows],
        0 if k.ndim == 3 else k.shape[rows],
        lengths=lengths,
        key_lengths=key_lengths,
        offsets=offsets,
        key_offsets=key_offsets,
        query_start=start,
    )
    if isinstance(mask, tuple):
        mask = _pieces(*mask, spans)
    return Batch(
        spans,
        [relation(term, spans) for term in terms],
        bias,
        causal,
        window or (-1, -1),
        mask,
        scale or None,
        softcap,
        None if dropout is None else Dropout(dropout[0], dropout[1:3], *dropout[3:]),
        layout,
    )


class StandIn:
    """`relpos._core`, as far as relpos.attention needs it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_core, name)

    def attention_forward(self, q: Any, k: Any, v: Any, out: Any, with_lse: bool, call: Any) -> Any:
        result, lse = reference.batched_forward(batch_of(q, k, call), q, k, v)
        if out is not None:
            out[...] = result
            result = out
        return result, lse if with_lse else None

    def attention_backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, tables: Any, bias: Any,
        call: Any,
    ) -> Any:  # fmt: skip
        batch = batch_of(q, k, call)
        found = reference.batched_backward(batch, q, k, v, dout)
        for name, to in zip(
            reference.term_names(r.kind for r in batch.relations), tables, strict=True
        ):
            if to is not None:
                to += found[name].reshape(to.shape)
        if bias is not None:
            bias += found["position_bias"]
        return found["q"], found["k"], found["v"]

    def rotate(
        self, x: Any, out: Any, layout: str, offsets: Any, lengths: Any, start: Any,
        positions: Any, frequencies: Any, interleaved: bool, inverse: bool, placement: Any = None,
        name: str = "x",
    ) -> Any:  # fmt: skip
        """As complex numbers."""
        bhnd = x.ndim == 4 and layout == "bhnd"
        wide = x.swapaxes(1, 2) if bhnd else x  # (B, N, H, D) or (tokens, H, D)
        if positions is None:
            counts = [wide.shape[1]] * len(x) if offsets is None else np.diff(offsets)
            parts = [first + np.arange(n) for first, n in zip(start, counts, strict=True)]
            positions = np.array(parts) if offsets is None else np.concatenate(parts)
        angle = positions[..., None, None] * frequencies * (-1 if inverse else 1)
        pairs = len(frequencies)
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
        if interleaved:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        z = (wide[..., first] + 1j * wide[..., second]) * np.exp(1j * angle)
        turned = wide.copy()
        turned[..., first], turned[..., second] = z.real, z.imag
        turned = np.ascontiguousarray(turned.swapaxes(1, 2) if bhnd else turned)
        if out is None:
            return turned
        out[...] = turned
        return out

    def sinusoid(
        self, rows: int, width: int, first: int, interleaved: bool, frequencies: Any
    ) -> Any:
        angle = np.arange(first, first + rows)[:, None] * frequencies[: width // 2]
        made = np.zeros((rows, width))
        half = width // 2
        sines, cosines = slice(0, half), slice(half, 2 * half)
        if interleaved:
            sines, cosines = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        made[:, sines], made[:, cosines] = np.sin(angle), np.cos(angle)
        return made

    def wave_table(self, weight: Any, waves: Any, heads: int, left: int, right: int) -> Any:
        """The formula as it is: every row by itself."""
        rows = _signed(waves, left, right) @ weight.T
        return np.ascontiguousarray(rows.reshape(len(rows), heads, -1).swapaxes(0, 1))

    def wave_gradient(self, dtable: Any, waves: Any, left: int, right: int) -> Any:
        rows = _signed(waves, left, right)
        return dtable.swapaxes(0, 1).reshape(len(rows), -1).T @ rows


def _signed(waves: Any, left: int, right: int) -> Any:
    """R_t for t from left down to -right, of those for t >= 0."""
    t = np.arange(left, -right - 1, -1)
    sign = np.ones((len(t), waves.shape[1]))
    sign[t < 0, : waves.shape[1] // 2] = -1
    return waves[np.abs(t)] * sign


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    core = StandIn()
    monkeypatch.setattr(sys.modules["relpos.attention"], "_core", core)
    for scheme in ("rope", "absolute", "transformer_xl"):
        monkeypatch.setattr(sys.modules[f"relpos.position.{scheme}"], "_core", core)
    monkeypatch.setattr(arrays, "REAL", np.float64)
