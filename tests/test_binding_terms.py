# SPDX-License-Identifier: Apache-2.0
"""The tuple of a call: relation terms with every map, masks, windows, dropout, and their gradients.

Straight at relpos._core, below the schemes: cases that show that everything arrives where it is
meant to. What is refused: test_binding_terms_refused.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from binding_arrays import rows
from binding_calls import (
    BIAS,
    BIASH,
    BUCKETS,
    KEY,
    KEYH,
    KEYS,
    PLACES,
    QUERY,
    QUERYH,
    SHARED_PLACES,
    VALUE,
    VALUEH,
    WIDE,
    B,
    D,
    E,
    H,
    M,
    N,
    Q,
    V,
    band,
    gradients_like,
    labelled,
    make_call,
    random,
    some_edges,
    some_labels,
    term,
)
from relpos import _core, reference
from stand_in import batch_of

WIDE_LABELS = some_labels(np.int8, B, H, 2 * N, M + 5)
PADDED: dict[str, dict[str, Any]] = {
    "key": {"terms": (band("A", _core.KEY, KEY),)},
    "key per head": {"terms": (band("A", _core.KEY, KEYH),)},
    "query": {"terms": (band("B", _core.QUERY, QUERY),)},
    "query per head": {"terms": (band("B", _core.QUERY, QUERYH, beyond=_core.BEYOND_NONE),)},
    "bias": {"terms": (band("c", _core.BIAS, BIAS),)},
    "bias per head": {"terms": (band("c", _core.BIAS, BIASH),)},
    "value": {"terms": (band("V", _core.VALUE, VALUE),)},
    "value per head": {"terms": (band("V", _core.VALUE, VALUEH),), "causal": True},
    "wide rows": {"terms": (band("A", _core.KEY, WIDE[:, :D]), band("B", _core.QUERY, WIDE[:, D:]))},
    "buckets": {"terms": (band("A", _core.KEY, KEY, buckets=BUCKETS),)},
    "bias buckets": {"terms": (band("c", _core.BIAS, BIASH, buckets=BUCKETS),)},
    "positions": {"terms": (band("A", _core.KEY, KEY, **PLACES),)},
    "shared positions": {"terms": (band("V", _core.VALUE, VALUE, **SHARED_PLACES),)},
    "a plane": {
        "terms": (
            band("rows", _core.BIAS, BIASH, **PLACES),
            band("columns", _core.BIAS, BIAS, **SHARED_PLACES),
        )
    },
    "labels, int8": {
        "terms": (labelled("A", _core.KEY, KEY, some_labels(np.int8, B, H, N, M)),),
    },
    "labels, int16, shared by all": {
        "terms": (labelled("V", _core.VALUE, VALUE, some_labels(np.int16, 1, 1, N, M)),),
    },
    "labels, int32, shared by heads": {
        "terms": (labelled("B", _core.QUERY, QUERYH, some_labels(np.int32, B, 1, N, M)),),
    },
    "labels, shared by sequences": {
        "terms": (labelled("c", _core.BIAS, BIASH, some_labels(np.int8, 1, H, N, M)),),
    },
    "labels, a part of wider ones": {
        "terms": (labelled("A", _core.KEY, KEY, WIDE_LABELS[:, :, ::2, 2:-3]),),
    },
    "labels, broadcast": {
        "terms": (
            labelled(
                "A", _core.KEY, KEY, np.broadcast_to(some_labels(np.int8, N, M), (B, H, N, M))
            ),
        ),
        "lengths": np.array([N, 4]), "key_lengths": np.array([3, M]),
    },
    "labels, flat": {
        "terms": (
            labelled(
                "A", _core.KEY, KEY, some_labels(np.int8, 200), label_starts=np.array([100, 7])
            ),
        ),
        "lengths": np.array([N, 4]), "key_lengths": np.array([9, M]),
    },
    "edges": {"terms": (term("A", _core.KEY, KEYH, **some_edges(B * N, M)),)},
    "edges of values": {"terms": (term("V", _core.VALUE, VALUE, **some_edges(B * N, M)),)},
    "edges of biases": {
        "terms": (term("c", _core.BIAS, BIASH, **some_edges(B * N, 3)),),
        "key_lengths": np.array([3, M]),
    },
    "two of each": {
        "terms": (
            band("V", _core.VALUE, VALUE),
            band("A", _core.KEY, KEY),
            labelled("B2", _core.QUERY, QUERY, some_labels(np.int8, B, 1, N, M)),
            term("A2", _core.KEY, KEYH, **some_edges(B * N, M)),
            band("c", _core.BIAS, BIAS),
            band("B", _core.QUERY, QUERYH, buckets=BUCKETS),
            labelled("V2", _core.VALUE, VALUEH, some_labels(np.int32, 1, 1, N, M)),
            band("c2", _core.BIAS, BIASH, **PLACES),
        ),
        "position_bias": rows(H, D, seed=13),
    },
    "position bias": {
        "terms": (band("A", _core.KEY, KEY),), "position_bias": rows(H, 2 * D, seed=14)[:, D:],
    },
    "window": {"window": (2, 1)},
    "window, left alone": {"window": (2, -1), "terms": (band("V", _core.VALUE, VALUE),)},
    "mask": {"mask": random.integers(0, 2, (B, H, N, M)).astype(bool)},
    "mask of bytes": {"mask": random.integers(0, 3, (1, H, N, M)).astype(np.uint8)},
    "mask, flat": {
        "mask": (random.integers(0, 2, 200).astype(bool), np.array([57, 0])),
        "lengths": np.array([N, 4]), "key_lengths": np.array([9, M]),
    },
    "mask, flat by heads": {
        "mask": (random.integers(0, 2, (H, 230)).astype(bool)[:, 20:], np.array([57, 0])),
        "lengths": np.array([N, 4]), "key_lengths": np.array([9, M]),
    },
    "labels, flat by heads": {
        "terms": (
            labelled(
                "A", _core.KEY, KEY, some_labels(np.int16, H, 200), label_starts=np.array([100, 7])
            ),
        ),
        "lengths": np.array([N, 4]), "key_lengths": np.array([9, M]),
    },
    "softcap": {"softcap": 1.5, "scale": 1.0, "terms": (band("c", _core.BIAS, BIASH),)},
    "dropout": {"dropout": (0.4, 5, 4294967295, 3, 77), "terms": (band("V", _core.VALUE, VALUE),)},
}  # fmt: skip
OFFSETS, KEY_OFFSETS = np.array([0, 4, 11]), np.array([0, 9, 13])
TOKENS = rows(11, H, D, seed=21), rows(13, H, D, seed=22), rows(13, H, E, seed=23)
PACKED: dict[str, dict[str, Any]] = {
    "band": {"terms": (band("A", _core.KEY, KEY), band("V", _core.VALUE, VALUEH))},
    "positions": {
        "terms": (
            band(
                "A", _core.KEY, KEY,
                query_positions=random.integers(-9, 9, 11).astype(np.int32),
                key_positions=random.integers(-9, 9, 13).astype(np.int32),
            ),
        )
    },
    "labels": {
        "terms": (
            labelled(
                "A", _core.KEY, KEY, some_labels(np.int16, 70), label_starts=np.array([30, 1])
            ),
        )
    },
    "mask": {"mask": (random.integers(0, 2, 64).astype(np.uint8), np.array([28, 0]))},
    "edges": {"terms": (term("V", _core.VALUE, VALUE, **some_edges(11, 4)),)},
    "dropout": {"dropout": (0.25, 1, 2, 3, 4)},
}  # fmt: skip


def check(call: Any, q: Any, k: Any, v: Any) -> None:
    batch = batch_of(q, k, call)
    expected, expected_lse = reference.batched_forward(batch, q, k, v)
    out, lse = _core.attention_forward(q, k, v, None, True, call)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=2e-5)
    dout = rows(*out.shape, seed=31)
    tables, bias = gradients_like(call)
    dq, dk, dv = _core.attention_backward(q, k, v, out, lse, dout, tables, bias, call)
    wanted = reference.batched_backward(batch, q, k, v, dout)
    got = {"q": dq, "k": dk, "v": dv}
    names = reference.term_names(r.kind for r in batch.relations)
    for name, table in zip(names, tables, strict=True):
        got[name] = (table - 1).reshape(wanted[name].shape)  # added to what was there
    if bias is not None:
        got["position_bias"] = bias - 1
    assert set(got) == set(wanted)
    for name, gradient in got.items():
        np.testing.assert_allclose(gradient, wanted[name], rtol=2e-4, atol=2e-4, err_msg=name)
    # None: not computed, and the others are the same.
    none = _core.attention_backward(
        q, k, v, out, lse, dout, tuple(None for _ in tables), None, call
    )
    for x, name in zip(none, "qkv", strict=True):
        np.testing.assert_array_equal(x, got[name], err_msg=name)


@pytest.mark.parametrize("name", PADDED)
def test_padded(name: str) -> None:
    check(make_call(**PADDED[name]), Q, KEYS, V)


@pytest.mark.parametrize("name", PADDED)
def test_rows_first(name: str) -> None:
    call = make_call(**PADDED[name], layout="bnhd")
    check(call, *(np.ascontiguousarray(x.swapaxes(1, 2)) for x in (Q, KEYS, V)))


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str) -> None:
    check(make_call(**PACKED[name], offsets=OFFSETS, key_offsets=KEY_OFFSETS), *TOKENS)


def test_one_side_packed() -> None:
    """Positions and flat labels go by the layout of their own side."""
    places = {
        "query_positions": PLACES["query_positions"],
        "key_positions": SHARED_PLACES["key_positions"],
    }
    labels = some_labels(np.int8, N * 13)
    call = make_call(
        key_offsets=KEY_OFFSETS,
        terms=(
            band("A", _core.KEY, KEY, **places),
            labelled("V", _core.VALUE, VALUE, labels, label_starts=np.array([0, N * 9])),
        ),
    )
    check(call, Q, TOKENS[1], TOKENS[2])


def test_tied_tables_add_to_one_gradient() -> None:
    two = band("A", _core.KEY, KEY), band("B", _core.QUERY, KEY)
    call = make_call(terms=two)
    out, lse = _core.attention_forward(Q, KEYS, V, None, True, call)
    assert lse is not None
    apart = np.zeros_like(KEY), np.zeros_like(KEY)
    tied = np.zeros_like(KEY)
    _core.attention_backward(Q, KEYS, V, out, lse, out, apart, None, call)
    _core.attention_backward(Q, KEYS, V, out, lse, out, (tied, tied), None, call)
    np.testing.assert_allclose(tied, apart[0] + apart[1], rtol=1e-5, atol=1e-5)


def test_inputs_are_only_read() -> None:
    everything = PADDED["two of each"] | {"mask": np.ones((1, 1, N, M), bool)}
    arrays = [x for t in everything["terms"] for x in t if isinstance(x, np.ndarray)]
    arrays += [everything["position_bias"], everything["mask"]]
    copies = [x.copy() for x in arrays]
    call = make_call(**everything)
    out, lse = _core.attention_forward(Q, KEYS, V, None, True, call)
    assert lse is not None
    tables, bias = gradients_like(call)
    _core.attention_backward(Q, KEYS, V, out, lse, out, tables, bias, call)
    for x, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(x, copy)
