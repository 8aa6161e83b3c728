# SPDX-License-Identifier: Apache-2.0
"""libcore_f64 behind the binding's own door: what relpos._core does in float32, in double.

`double_core(monkeypatch, core)` puts it in the place of `relpos._core`, and double in the place of
float32. So torch's gradcheck, which needs double, goes through all there is: autograd, the schemes,
and the kernels, in the second build of their sources (the binding itself knows float32 alone).
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import pytest

import capi
from relpos import _core
from relpos.position import arrays

KINDS = {_core.KEY: "key", _core.QUERY: "query", _core.BIAS: "bias", _core.VALUE: "value"}


class Rotation(ctypes.Structure):
    """rp_rotation."""

    _fields_ = [
        *capi.fields(ctypes.c_size_t, "struct_size"),
        *capi.fields(ctypes.c_int64, "B", "H", "N", "D"),
        *capi.fields(ctypes.c_void_p, "lengths", "offsets", "start", "positions"),
        *capi.fields(ctypes.c_int64, "position_stride"),
        *capi.fields(ctypes.c_void_p, "frequencies"),
        *capi.fields(ctypes.c_int64, "pairs"),
        *capi.fields(ctypes.c_int, "interleaved", "inverse"),
        *capi.fields(ctypes.c_void_p, "placement"),
    ]


class DoubleCore:
    """`relpos._core`, as far as relpos.attention and relpos.torch need it."""

    def __init__(self, core: capi.Core) -> None:
        self.core = core
        rotate = core.lib.rp_rotate
        rotate.restype = ctypes.c_int
        rotate.argtypes = [ctypes.POINTER(Rotation), capi.Rows, capi.Rows]

    def __getattr__(self, name: str) -> Any:
        return getattr(_core, name)

    def attention_forward(self, q: Any, k: Any, v: Any, out: Any, with_lse: bool, call: Any) -> Any:
        layout, offsets = call[0], call[5]
        a, alive = describe(q, k, v, call)
        out = np.empty((*q.shape[:-1], v.shape[-1])) if out is None else out
        H, rows = (1, 0) if offsets is not None else (1, 2) if layout == "bhnd" else (2, 1)
        lse = np.empty((q.shape[H], q.shape[rows]) if q.ndim == 3 else (len(q), a.H, a.N))
        workspace = capi.Workspace(self.core.workspace_bytes(a)[0])
        status = self.core.lib.rp_attention_forward(
            ctypes.byref(a), *(rows_of(x, layout) for x in (q, k, v, out)),
            lse.ctypes.data, workspace.address, workspace.size,
        )  # fmt: skip
        self.core.check(status)
        assert workspace.untouched() and alive
        return out, lse if with_lse else None

    def attention_backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, tables: Any, bias: Any,
        call: Any,
    ) -> Any:  # fmt: skip
        layout = call[0]
        a, alive = describe(q, k, v, call)
        found = [np.empty(x.shape) for x in (q, k, v)]
        gradients = capi.Gradients(*(rows_of(x, layout) for x in found))
        count = dict.fromkeys(KINDS.values(), 0)
        for term, to in zip(call[8], tables, strict=True):
            kind = KINDS[term[1]]
            if to is not None:
                assert to.strides == term[2].strides and to.dtype == np.float64
                getattr(gradients, kind)[count[kind]] = to.ctypes.data
            count[kind] += 1
        if bias is not None:
            gradients.position_bias = bias.ctypes.data
        workspace = capi.Workspace(self.core.workspace_bytes(a)[1])
        status = self.core.lib.rp_attention_backward(
            ctypes.byref(a), *(rows_of(x, layout) for x in (q, k, v, out)), lse.ctypes.data,
            rows_of(dout, layout), ctypes.byref(gradients), workspace.address, workspace.size,
        )  # fmt: skip
        self.core.check(status)
        assert workspace.untouched() and alive
        return tuple(found)

    def rotate(
        self, x: Any, out: Any, layout: str, offsets: Any, lengths: Any, start: Any,
        positions: Any, frequencies: Any, interleaved: bool, inverse: bool, placement: Any = None,
        name: str = "x",
    ) -> Any:  # fmt: skip
        assert offsets is None and positions is None, "not needed so far"
        B, H, N, D = sizes_of(x, layout)
        alive: list[Any] = []
        r = Rotation(ctypes.sizeof(Rotation), B, H, N, D)
        r.start, r.lengths = hold(alive, start, np.int64), hold(alive, lengths, np.int64)
        r.frequencies = hold(alive, frequencies, np.float64)
        r.pairs, r.interleaved, r.inverse = len(frequencies), interleaved, inverse
        out = np.empty(x.shape) if out is None else out
        status = self.core.lib.rp_rotate(ctypes.byref(r), rows_of(x, layout), rows_of(out, layout))
        self.core.check(status)
        return out

    def sinusoid(
        self, rows: int, width: int, first: int, interleaved: bool, frequencies: Any
    ) -> Any:
        out = np.empty((rows, width))
        status = self.core.lib.rp_sinusoid(
            *map(ctypes.c_int64, (rows, width, first)), ctypes.c_int(interleaved),
            ctypes.c_void_p(frequencies.ctypes.data), ctypes.c_void_p(out.ctypes.data),
        )  # fmt: skip
        self.core.check(status)
        return out

    def wave_table(self, weight: Any, waves: Any, heads: int, left: int, right: int) -> Any:
        D, width = weight.shape[0] // heads, weight.shape[1]
        out = np.empty((heads, left + 1 + right, D))
        self._waves("rp_wave_table", (heads, D, width, left, right), waves, weight, out)
        return out

    def wave_gradient(self, dtable: Any, waves: Any, left: int, right: int) -> Any:
        heads, _, D = dtable.shape
        out = np.zeros((heads * D, waves.shape[1]))
        self._waves("rp_wave_gradient", (heads, D, waves.shape[1], left, right), waves, dtable, out)
        return out

    def _waves(self, name: str, counts: tuple[int, ...], *given: Any) -> None:
        assert all(x.dtype == np.float64 and x.flags.c_contiguous for x in given)
        pointers = (ctypes.c_void_p(x.ctypes.data) for x in given)
        status = getattr(self.core.lib, name)(*map(ctypes.c_int64, counts), *pointers)
        self.core.check(status)


def sizes_of(x: Any, layout: str) -> tuple[int, int, int, int]:
    B, H, N, D = x.shape if layout == "bhnd" else (x.shape[0], x.shape[2], x.shape[1], x.shape[3])
    return B, H, N, D


def rows_of(x: Any, layout: str) -> capi.Rows:
    """rp_rows of an array as it lies."""
    assert x.dtype == np.float64 and (x.strides[-1] == 8 or x.shape[-1] == 1)
    steps = [stride // 8 for stride in x.strides]
    if x.ndim == 3:
        return capi.Rows(x.ctypes.data, 0, steps[1], steps[0])
    heads, rows = (1, 2) if layout == "bhnd" else (2, 1)
    return capi.Rows(x.ctypes.data, steps[0], steps[heads], steps[rows])


def hold(alive: list[Any], values: Any, dtype: Any) -> int | None:
    """The address of an array that `alive` keeps."""
    if values is None:
        return None
    array = np.ascontiguousarray(values, dtype)
    alive.append(array)
    return array.ctypes.data  # type: ignore[no-any-return]


def pair_strides(x: Any) -> tuple[int, int, int]:
    """Batch, head and row of a matrix for every pair; an axis of one is shared."""
    shared = [
        0 if n == 1 else stride // x.itemsize for n, stride in zip(x.shape, x.strides, strict=True)
    ]
    return shared[0], shared[1], x.strides[2] // x.itemsize


def describe(q: Any, k: Any, v: Any, call: Any) -> tuple[capi.Attention, list[Any]]:
    """The rp_attention of a call as the binding takes it, and what must outlive it."""
    layout, causal, scale, lengths, key_lengths, offsets, key_offsets, start, *rest = call
    terms, position_bias, window, mask, softcap, dropout, placement = rest
    assert placement is None
    alive: list[Any] = [q, k, v, call]
    a = capi.attention_default()
    if offsets is None:
        a.B, a.H, a.N, a.D = sizes_of(q, layout)
        a.M = sizes_of(k, layout)[2]
    else:
        a.B, a.H, a.D = len(offsets) - 1, *q.shape[1:]
    a.key_heads = k.shape[1 if k.ndim == 3 or layout == "bhnd" else 2]
    a.Dv, a.causal, a.scale, a.softcap = v.shape[-1], causal, scale, softcap
    for name, values in (
        ("lengths", lengths),
        ("key_lengths", key_lengths),
        ("offsets", offsets),
        ("key_offsets", key_offsets),
        ("query_start", start),
    ):
        setattr(a, name, hold(alive, values, np.int64))
    count = dict.fromkeys(KINDS.values(), 0)
    for term in terms:
        kind = KINDS[term[1]]
        point(getattr(a, kind)[count[kind]], term, kind, alive)
        count[kind] += 1
    if position_bias is not None:
        a.position_bias = position_bias.ctypes.data
        a.position_bias_stride = position_bias.strides[0] // 8
    if window is not None:
        a.window_left, a.window_right = window
    if mask is not None:
        a.mask.data = mask.ctypes.data
        a.mask.batch_stride, a.mask.head_stride, a.mask.row_stride = pair_strides(mask)
    if dropout is not None:
        a.dropout, a.dropout_key[:] = dropout[0], dropout[1:3]
        a.dropout_site, a.dropout_first = dropout[3:]
    return a, alive


def point(r: capi.Relation, term: Any, kind: str, alive: list[Any]) -> None:
    _, _, table, r.map, r.left, r.right, r.beyond, buckets, ours, theirs, labels, *rest = term
    label_starts, edge_starts, edge_keys, edge_labels = rest
    assert label_starts is None, "not needed so far"
    rows = table[..., None] if kind == "bias" else table
    r.table, r.rows = table.ctypes.data, rows.shape[-2]
    r.row_stride = rows.strides[-2] // 8 if rows.shape[-2] > 1 else max(rows.shape[-1], 1)
    r.head_stride = rows.strides[0] // 8 if rows.ndim == 3 else 0
    r.buckets = hold(alive, buckets, np.int32)
    r.query_positions, r.key_positions = (hold(alive, x, np.int32) for x in (ours, theirs))
    if ours is not None:
        r.query_position_stride = ours.shape[-1] if ours.ndim == 2 else 0
        r.key_position_stride = theirs.shape[-1] if theirs.ndim == 2 else 0
    if labels is not None:
        r.labels, r.label_bytes = labels.ctypes.data, labels.itemsize
        strides = pair_strides(labels)
        r.label_batch_stride, r.label_head_stride, r.label_row_stride = strides
    r.edge_starts = hold(alive, edge_starts, np.int64)
    r.edge_keys, r.edge_labels = (hold(alive, x, np.int32) for x in (edge_keys, edge_labels))


def double_core(monkeypatch: pytest.MonkeyPatch, core: capi.Core) -> None:
    door = DoubleCore(core)
    monkeypatch.setattr(sys.modules["relpos.attention"], "_core", door)
    for scheme in ("rope", "absolute", "transformer_xl"):
        monkeypatch.setattr(sys.modules[f"relpos.position.{scheme}"], "_core", door)
    monkeypatch.setattr(arrays, "REAL", np.float64)
