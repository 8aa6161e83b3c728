# SPDX-License-Identifier: Apache-2.0
"""The tuple of a call: what is refused, below the schemes, and the sentence."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest

from binding_arrays import misaligned, read_only, rows
from binding_calls import (
    BIAS,
    BIASH,
    BUCKETS,
    KEY,
    KEYH,
    KEYS,
    PLACES,
    SHARED_PLACES,
    B,
    D,
    E,
    H,
    M,
    N,
    Q,
    T,
    V,
    band,
    gradients_like,
    labelled,
    make_call,
    some_labels,
    term,
)
from relpos import _core

OFFSETS, KEY_OFFSETS = np.array([0, 4, 11]), np.array([0, 9, 13])
TOKENS = rows(11, H, D, seed=21), rows(13, H, D, seed=22), rows(13, H, E, seed=23)
LABELS = some_labels(np.int8, B, H, N, M)
STARTS = np.arange(B * N + 1)
ONES = np.zeros(B * N, np.int32)
EDGES = {"map": _core.MAP_EDGES, "edge_starts": STARTS, "edge_keys": ONES, "edge_labels": ONES}


def changed(array: Any, place: Any, value: int) -> Any:
    array = array.copy()
    array[place] = value
    return array


def key_term(**fields: Any) -> dict[str, Any]:
    return {"terms": (band("key_table", _core.KEY, fields.pop("table", KEY), **fields),)}


def key_labels(labels: Any, **fields: Any) -> dict[str, Any]:
    return {"terms": (labelled("key_table", _core.KEY, KEY, labels, **fields),)}


def key_edges(**fields: Any) -> dict[str, Any]:
    return {"terms": (term("key_table", _core.KEY, KEY, **(EDGES | fields)),)}


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("terms", {"terms": [1]}, TypeError, "terms: expected a tuple of tuples"),
    ("a term", {"terms": (KEY,)}, TypeError, "terms: expected a tuple of tuples"),
    (
        "kind",
        {"terms": (band("x", 4, KEY),)},
        ValueError,
        "x: kind is 4, expected _core.KEY, QUERY, BIAS or VALUE",
    ),
    (
        "three of a kind",
        {"terms": tuple(band(f"table_{i}", _core.KEY, KEY) for i in range(3))},
        ValueError,
        "table_2: there are 2 key terms already, which is the most",
    ),
    (
        "map",
        key_term(map=3),
        ValueError,
        "attention: key_table.map=3, must be RP_MAP_BAND (0), RP_MAP_LABEL (1) or RP_MAP_EDGES (2)",
    ),
    (
        "beyond",
        key_term(beyond=2),
        ValueError,
        "attention: key_table.beyond=2, must be RP_BEYOND_CLIP (0) or RP_BEYOND_NONE (1)",
    ),
    # ---- tables
    (
        "table, dtype",
        key_term(table=KEY.astype(np.float64)),
        TypeError,
        "key_table: expected float32 (T, D=8), got float64 (6, 8); "
        "use np.ascontiguousarray(key_table, np.float32)",
    ),
    (
        "table, rank",
        key_term(table=KEY[0]),
        ValueError,
        "key_table: expected float32 (T, D=8), got float32 (8,)",
    ),
    (
        "table, heads",
        key_term(table=KEYH[:2]),
        ValueError,
        "key_table: expected float32 (H=3, T, D=8), got float32 (2, 6, 8)",
    ),
    (
        "table, width",
        {"terms": (band("value_table", _core.VALUE, KEY),)},
        ValueError,
        "value_table: expected float32 (T, Dv=6), got float32 (6, 8)",
    ),
    (
        "table, last axis",
        key_term(table=np.asfortranarray(KEY)),
        ValueError,
        "key_table: the last axis must be contiguous, got strides (4, 24) in bytes; "
        "use key_table.copy()",
    ),
    (
        "table, aligned",
        key_term(table=misaligned(T, D)),
        ValueError,
        "key_table: the array is not aligned to its elements; use key_table.copy()",
    ),
    (
        "table, rows",
        key_term(table=KEY[1:]),
        ValueError,
        "key_table: a band from -3 to 2 needs left + 1 + right rows, got 5",
    ),
    (
        "bias, rank",
        {"terms": (band("c", _core.BIAS, KEYH),)},
        ValueError,
        "c: expected float32 (T,), got float32 (3, 6, 8)",
    ),
    (
        "bias, heads",
        {"terms": (band("c", _core.BIAS, BIASH[1:]),)},
        ValueError,
        "c: expected float32 (H=3, T), got float32 (2, 6)",
    ),
    (
        "bias, gaps",
        {"terms": (band("c", _core.BIAS, rows(2 * T)[::2]),)},
        ValueError,
        "c: the last axis must be contiguous, got strides (8,) in bytes; use c.copy()",
    ),
    (
        "band, negative",
        {"terms": (term("c", _core.BIAS, BIAS, left=-1, right=6),)},
        ValueError,
        "c: left=-1 and right=6 must be from 0 to 2^40",
    ),
    # ---- buckets and positions
    (
        "buckets, dtype",
        key_term(buckets=BUCKETS.astype(np.int64)),
        TypeError,
        "buckets of key_table: expected int32 (left + 1 + right=6,), got int64 (6,); "
        "use np.ascontiguousarray(buckets, np.int32)",
    ),
    (
        "buckets, size",
        key_term(buckets=BUCKETS[1:]),
        ValueError,
        "buckets of key_table: expected int32 (left + 1 + right=6,), got int32 (5,)",
    ),
    (
        "buckets, gaps",
        key_term(buckets=np.zeros(12, np.int32)[::2]),
        ValueError,
        "buckets of key_table: the last axis must be contiguous, got strides (8,) in bytes; "
        "use buckets.copy()",
    ),
    (
        "buckets, range",
        key_term(buckets=changed(BUCKETS, 4, T)),
        ValueError,
        "attention: key_table.buckets[4]=6, must be from -1 (none) to rows - 1 = 5",
    ),
    (
        "buckets of no table",
        key_term(table=KEY[:0], buckets=BUCKETS),
        ValueError,
        "attention: key_table.rows=0, must be from 1 to 2^40",
    ),
    (
        "positions, dtype",
        key_term(query_positions=np.zeros((B, N)), key_positions=PLACES["key_positions"]),
        TypeError,
        "query_positions of key_table: expected int32 (B=2, N=11), got float64 (2, 11); "
        "use np.ascontiguousarray(query_positions, np.int32)",
    ),
    (
        "positions, size",
        key_term(query_positions=np.zeros(M, np.int32), key_positions=SHARED_PLACES["key_positions"]),
        ValueError,
        "query_positions of key_table: expected int32 (N=11,), got int32 (13,)",
    ),
    (
        "positions, of keys",
        key_term(**(PLACES | {"key_positions": np.zeros((B, N), np.int32)})),
        ValueError,
        "key_positions of key_table: expected int32 (B=2, M=13), got int32 (2, 11)",
    ),
    (
        "positions, one",
        key_term(query_positions=PLACES["query_positions"]),
        ValueError,
        "attention: key_table.key_positions is None, but query_positions are given; both or neither",
    ),
    (
        "positions, range",
        key_term(**(PLACES | {"key_positions": changed(PLACES["key_positions"], (1, 12), 1 << 30)})),
        ValueError,
        "attention: key_table.key_positions=1073741824 at row 12 of sequence 1, must be below 2^30 in "
        "magnitude",
    ),
    # ---- labels
    (
        "labels, none",
        key_labels(None),
        ValueError,
        "attention: key_table.label_bytes=0, must be 1, 2 or 4",
    ),
    (
        "labels, dtype",
        key_labels(LABELS.astype(np.int64)),
        TypeError,
        "labels of key_table: expected int8, int16 or int32 (B=2 or 1, H=3 or 1, N=11, M=13), "
        "got int64 (2, 3, 11, 13); use np.ascontiguousarray(labels, np.int32)",
    ),
    (
        "labels, unsigned",
        key_labels(LABELS.astype(np.uint8)),
        TypeError,
        "labels of key_table: expected int8, int16 or int32 (B=2 or 1, H=3 or 1, N=11, M=13), "
        "got uint8 (2, 3, 11, 13); use np.ascontiguousarray(labels, np.int32)",
    ),
    (
        "labels, rank",
        key_labels(LABELS[0, 0]),
        ValueError,
        "labels of key_table: expected int8, int16 or int32 (B=2 or 1, H=3 or 1, N=11, M=13), "
        "got int8 (11, 13)",
    ),
    (
        "labels, heads",
        key_labels(LABELS[:, :2]),
        ValueError,
        "labels of key_table: expected int8, int16 or int32 (B=2 or 1, H=3 or 1, N=11, M=13), "
        "got int8 (2, 2, 11, 13)",
    ),
    (
        "labels, order",
        key_labels(np.ascontiguousarray(LABELS.swapaxes(2, 3)).swapaxes(2, 3)),
        ValueError,
        "labels of key_table: the last axis must be contiguous, got strides (429, 143, 1, 11) in "
        "bytes; use labels.copy()",
    ),
    (
        "labels, backwards",
        key_labels(LABELS[::-1]),
        ValueError,
        "labels of key_table: strides must be whole elements forward, got strides "
        "(-429, 143, 13, 1) in bytes; use labels.copy()",
    ),
    (
        "labels, high",
        key_labels(changed(LABELS, (1, 2, 10, 12), T)),
        ValueError,
        "attention: key_table: label 6 of sequence 1, head 2, query 10, key 12; labels must be from "
        "-1 (none) to rows - 1 = 5",
    ),
    (
        "labels, low",
        key_labels(changed(LABELS, (0, 1, 2, 3), -2)),
        ValueError,
        "attention: key_table: label -2 of sequence 0, head 1, query 2, key 3; labels must be from "
        "-1 (none) to rows - 1 = 5",
    ),
    (
        "labels, flat and short",
        key_labels(np.zeros(280, np.int8), label_starts=np.array([0, 143])),
        ValueError,
        "labels of key_table: sequence 1 needs 11 x 13 from 143 on, but there are 280",
    ),
    (
        "labels, flat from before",
        key_labels(np.zeros(286, np.int8), label_starts=np.array([-1, 143])),
        ValueError,
        "labels of key_table: sequence 0 needs 11 x 13 from -1 on, but there are 286",
    ),
    (
        "labels, flat, of too few heads",
        key_labels(np.zeros((2, 286), np.int8), label_starts=np.array([0, 143])),
        ValueError,
        "labels of key_table: expected int8, int16 or int32 (H=3 or 1, count), got int8 (2, 286)",
    ),
    (
        "labels, flat by heads and short",
        key_labels(np.zeros((3, 285), np.int8), label_starts=np.array([0, 143])),
        ValueError,
        "labels of key_table: sequence 1 needs 11 x 13 from 143 on, but there are 285",
    ),
    (
        "labels, starts",
        key_labels(np.zeros(286, np.int8), label_starts=np.array([0])),
        ValueError,
        "starts of labels of key_table: expected int64 (B=2,), got int64 (1,)",
    ),
    (
        "labels, flat without starts",
        key_labels(np.zeros(286, np.int8)),
        ValueError,
        "labels of key_table: expected int8, int16 or int32 (B=2 or 1, H=3 or 1, N=11, M=13), "
        "got int8 (286,)",
    ),
    # ---- edges
    (
        "edges, starts",
        key_edges(edge_starts=STARTS[1:]),
        ValueError,
        "edge_starts of key_table: expected int64 (rows + 1=23,), got int64 (22,)",
    ),
    (
        "edges, dtype",
        key_edges(edge_keys=ONES.astype(np.int64)),
        TypeError,
        "edge_keys of key_table: expected int32 (edges,), got int64 (22,); "
        "use np.ascontiguousarray(edge_keys, np.int32)",
    ),
    (
        "edges, count",
        key_edges(edge_labels=ONES[1:]),
        ValueError,
        "edge_labels of key_table: expected int32 (edges=22,), got int32 (21,)",
    ),
    (
        "edges, end",
        key_edges(edge_keys=ONES[1:], edge_labels=ONES[1:]),
        ValueError,
        "edge_starts of key_table: the last one is 22, but there are 21 edges",
    ),
    (
        "edges, without keys",
        key_edges(edge_keys=None),
        ValueError,
        "attention: key_table.edge_keys is None",
    ),
    (
        "edges, falling",
        key_edges(edge_starts=changed(STARTS, 3, 5)),
        ValueError,
        "attention: key_table.edge_starts[4]=4 after 5, must not fall and not exceed 2^40",
    ),
    (
        "edges, key",
        key_edges(edge_keys=changed(ONES, 12, M)),
        ValueError,
        "attention: key_table.edge_keys[12]=13 of sequence 1, query 1, which has 13 keys",
    ),
    (
        "edges, label",
        key_edges(edge_labels=changed(ONES, 21, -1)),
        ValueError,
        "attention: key_table.edge_labels[21]=-1 of sequence 1, query 10, key 0; labels of edges must "
        "be from 0 to rows - 1 = 5",
    ),
    # ---- the rest of the call
    (
        "position bias",
        {"position_bias": rows(D)},
        ValueError,
        "position_bias: expected float32 (H=3, D=8), got float32 (8,)",
    ),
    (
        "position bias, shared",
        {"position_bias": np.broadcast_to(rows(D), (H, D))},
        ValueError,
        "position_bias: elements share memory, got strides (0, 4) in bytes; use position_bias.copy()",
    ),
    ("window", {"window": 3}, TypeError, "window: expected a tuple (left, right)"),
    (
        "window, range",
        {"window": (0, -2)},
        ValueError,
        "attention: window_right=-2, must be from 0 to 2^40, or -1 for no bound",
    ),
    (
        "mask, dtype",
        {"mask": LABELS},
        TypeError,
        "mask: expected bool or uint8 (B=2 or 1, H=3 or 1, N=11, M=13), got int8 (2, 3, 11, 13); "
        "use np.ascontiguousarray(mask, bool)",
    ),
    (
        "mask, keys",
        {"mask": np.ones((1, 1, N, N), bool)},
        ValueError,
        "mask: expected bool or uint8 (B=2 or 1, H=3 or 1, N=11, M=13), got bool (1, 1, 11, 11)",
    ),
    (
        "mask, short",
        {"mask": (np.ones(100, bool), np.array([0, 0]))},
        ValueError,
        "mask: sequence 0 needs 11 x 13 from 0 on, but there are 100",
    ),
    (
        "mask, starts",
        {"mask": (np.ones(286, bool), np.array([0.0, 0.0]))},
        TypeError,
        "starts of mask: expected int64 (B=2,), got float64 (2,); "
        "use np.ascontiguousarray(starts, np.int64)",
    ),
    (
        "softcap",
        {"softcap": -1.0},
        ValueError,
        "attention: softcap=-1, must be 0 (none) or from 1e-30 to 1e30",
    ),
    (
        "dropout",
        {"dropout": 0.5},
        TypeError,
        "dropout: expected a tuple (rate, key0, key1, site, first)",
    ),
    (
        "dropout, rate",
        {"dropout": (1.0, 0, 0, 0, 0)},
        ValueError,
        "attention: dropout=1, must be from 0 to below 1",
    ),
    (
        "dropout, words",
        {"dropout": (0.5, 0, 1 << 32, 0, 0)},
        ValueError,
        "dropout: key0, key1, site and first must be from 0 to 2^32 - 1, got 4294967296",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "error", "sentence"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_refused(fields: Any, error: type[Exception], sentence: str) -> None:
    call = make_call(**fields)
    backward = (Q, KEYS, V, rows(B, H, N, E), rows(B, H, N), rows(B, H, N, E))
    for pass_ in (
        lambda: _core.attention_forward(Q, KEYS, V, None, False, call),
        lambda: _core.attention_backward(*backward, (None,) * len(call[8]), None, call),
    ):
        with pytest.raises(error) as caught:
            pass_()
        assert type(caught.value) is error
        assert str(caught.value) == sentence


def test_packed_arrays_need_flat_matrices() -> None:
    for fields in (key_labels(LABELS), {"mask": LABELS == 0}):
        name = "mask" if "mask" in fields else "labels of key_table"
        call = make_call(**fields, offsets=OFFSETS, key_offsets=KEY_OFFSETS)
        with pytest.raises(ValueError) as caught:
            _core.attention_forward(*TOKENS, None, False, call)
        assert str(caught.value) == (
            f"{name}: packed arrays take a list of one matrix per sequence, or (flat, starts)"
        )


def test_bad_offsets_are_refused_before_anything_depends_on_them() -> None:
    wild = np.array([0, 1 << 62, 11])
    call = make_call(
        **key_labels(np.zeros(9, np.int8), label_starts=np.array([0, 0])),
        offsets=wild,
        key_offsets=KEY_OFFSETS,
    )
    with pytest.raises(ValueError, match=r"^attention: offsets\[1\]=4611686018427387904"):
        _core.attention_forward(*TOKENS, None, False, call)
    call = make_call(
        **key_labels(np.zeros(1, np.int8), label_starts=np.array([0, 0])),
        lengths=np.array([-5, 1 << 60]),
    )
    with pytest.raises(ValueError, match=r"^attention: lengths\[0\]=-5"):
        _core.attention_forward(Q, KEYS, V, None, False, call)


GRADIENTS: list[tuple[str, Any, Any, type[Exception], str]] = [
    (
        "no tuple",
        [np.zeros_like(KEY)],
        None,
        ValueError,
        "table_gradients: expected a tuple of 1, one for each term",
    ),
    ("count", (), None, ValueError, "table_gradients: expected a tuple of 1, one for each term"),
    (
        "dtype",
        (np.zeros(KEY.shape),),
        None,
        TypeError,
        "gradient of key_table: expected float32 (T=6, D=8), got float64 (6, 8)",
    ),
    (
        "shape",
        (np.zeros_like(KEY[1:]),),
        None,
        ValueError,
        "gradient of key_table: expected float32 (T=6, D=8), got float32 (5, 8)",
    ),
    (
        "per head",
        (np.zeros_like(KEYH),),
        None,
        ValueError,
        "gradient of key_table: expected float32 (T=6, D=8), got float32 (3, 6, 8)",
    ),
    (
        "read-only",
        (read_only(np.zeros_like(KEY)),),
        None,
        ValueError,
        "gradient of key_table: the array is read-only; give a writable one",
    ),
    (
        "layout",
        (np.zeros((T, D + 1), np.float32)[:, :D],),
        None,
        ValueError,
        "gradient of key_table: must lie in memory as its table does, got strides (36, 4) in bytes",
    ),
    (
        "overlapping",
        (np.lib.stride_tricks.as_strided(np.zeros(99, np.float32), (T, D), (16, 4)),),
        None,
        ValueError,
        "gradient of key_table: elements share memory, got strides (16, 4) in bytes; "
        "give a new array, as np.empty makes it",
    ),
    (
        "position bias",
        (None,),
        np.zeros((H, D), np.float32),
        ValueError,
        "dposition_bias: the call has no position_bias",
    ),
]


@pytest.mark.parametrize(
    ("tables", "bias", "error", "sentence"),
    [g[1:] for g in GRADIENTS],
    ids=[g[0] for g in GRADIENTS],
)
def test_gradients_refused(tables: Any, bias: Any, error: type[Exception], sentence: str) -> None:
    call = make_call(**key_term())
    out, lse = _core.attention_forward(Q, KEYS, V, None, True, call)
    assert lse is not None
    with pytest.raises(error) as caught:
        _core.attention_backward(Q, KEYS, V, out, lse, out, tables, bias, call)
    assert type(caught.value) is error and str(caught.value) == sentence


def test_position_bias_gradient_lies_as_the_bias() -> None:
    call = make_call(**key_term(), position_bias=rows(H, D))
    out, lse = _core.attention_forward(Q, KEYS, V, None, True, call)
    assert lse is not None
    for gradient, sentence in (
        (np.zeros((H, D + 1), np.float32)[:, :D], "must lie in memory as position_bias does, got"),
        (read_only(np.zeros((H, D), np.float32)), "the array is read-only; give a writable one"),
        (np.zeros((D, H), np.float32), r"expected float32 \(H=3, D=8\), got float32 \(8, 3\)"),
    ):
        with pytest.raises(ValueError, match=f"^dposition_bias: {sentence}"):
            _core.attention_backward(Q, KEYS, V, out, lse, out, (None,), gradient, call)


def test_nothing_leaks() -> None:
    everything = {
        **key_labels(LABELS),
        "mask": (np.ones(N * M, bool), np.zeros(B, np.int64)),
        "position_bias": rows(H, D),
    }
    good = make_call(**everything, dropout=(0.1, 1, 2, 3, 4), window=(9, 9))
    bad = [make_call(**fields) for _, fields, _, _ in REFUSED]
    held = [Q, KEYS, V, good, *bad]
    for call in (good, *bad):
        held += [x for x in call if x is not None]
        held += [x for t in call[8] if isinstance(t, tuple) for x in t if isinstance(x, np.ndarray)]
    tables, bias = gradients_like(good)
    held += [*tables, bias]

    def calls(times: int) -> None:
        for _ in range(times):
            out, lse = _core.attention_forward(Q, KEYS, V, None, True, good)
            assert lse is not None
            _core.attention_backward(Q, KEYS, V, out, lse, out, tables, bias, good)
            for call in bad:
                with pytest.raises((TypeError, ValueError)):
                    _core.attention_forward(Q, KEYS, V, None, False, call)

    calls(2)
    gc.collect()
    counts = [sys.getrefcount(x) for x in held]
    calls(10)
    gc.collect()
    after = [sys.getrefcount(x) for x in held]
    for i, x in enumerate(held):
        if isinstance(x, np.ndarray | tuple):
            assert after[i] == counts[i], x
