# SPDX-License-Identifier: Apache-2.0
"""_core.attention_map, below the schemes: every argument arrives, what is refused, over time and
over threads. What maps hold: test_maps.py."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import relpos
from binding_arrays import misaligned, read_only, rows
from binding_calls import (
    BIASH,
    KEYH,
    KEYS,
    QUERY,
    B,
    E,
    M,
    N,
    Q,
    V,
    band,
    labelled,
    make_call,
    some_labels,
)
from leaks import assert_nothing_leaks
from relpos import _core

CALL = make_call(
    terms=(
        band("V", _core.VALUE, rows(6, E)),
        band("A", _core.KEY, KEYH),
        band("B", _core.QUERY, QUERY),
        labelled("A2", _core.KEY, KEYH, some_labels(np.int8, B, 1, N, M)),
        band("c", _core.BIAS, BIASH),
    ),
    causal=True,
)
PARTS = [_core.SHOW_CONTENT, _core.SHOW_KEY, _core.SHOW_KEY + 1, _core.SHOW_QUERY, _core.SHOW_BIAS]
ARGUMENTS = {
    "q": Q, "k": KEYS, "v": V, "what": _core.SHOW_SCORES, "b": 1, "head": 2, "row": 0, "out": None,
    "call": CALL,
}  # fmt: skip


def show(**changes: Any) -> Any:
    given = ARGUMENTS | changes
    if given["out"] is None:
        given["out"] = np.full((N - given["row"], M), np.nan, np.float32)
    assert _core.attention_map(*given.values()) is None
    return given["out"]


def test_every_argument_arrives() -> None:
    parts = [show(what=what) for what in PARTS]
    assert all(np.isfinite(x).all() and x.any() for x in parts)
    s = show()
    hidden = np.isneginf(s)
    np.testing.assert_array_equal(hidden, np.triu(np.ones((N, M), bool), M - N + 1))
    np.testing.assert_allclose(np.where(hidden, -np.inf, sum(parts)), s, rtol=0, atol=2e-5)
    p = show(what=_core.SHOW_PROBABILITIES)
    np.testing.assert_allclose(p, np.exp(s) / np.exp(s).sum(axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_array_equal(show(row=4), s[4:])
    assert not show(what=_core.SHOW_BIAS + 1).any()  # the call has one
    for other in ({"b": 0}, {"head": 0}, {"q": Q[::-1].copy()}, {"k": KEYS[::-1].copy()}):
        assert (show(**other) != s).any(), other


def test_wider_rows_keep_what_is_behind_the_keys() -> None:
    out = np.full((2, M + 3), 7, np.float32)
    assert show(out=out, row=3) is out
    assert (out[:, M:] == 7).all()
    np.testing.assert_array_equal(out[:, :M], show()[3:5])
    call = make_call(key_lengths=np.array([M, 4]))
    out = np.full((N, M), 7, np.float32)
    show(out=out, call=call)
    assert (out[:, 4:] == 7).all() and (out[:, :4] != 7).all()


def test_nothing_to_show() -> None:
    assert show(out=np.empty((0, M), np.float32), row=N).shape == (0, M)
    none = make_call(key_lengths=np.array([0, 0]))
    assert show(out=np.empty((N, 0), np.float32), call=none).shape == (N, 0)


def out_of(*shape: int) -> Any:
    return np.empty(shape, np.float32)


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "what",
        {"what": 3},
        ValueError,
        "attention: what=3, must be RP_SHOW_PROBABILITIES=0, ",
    ),
    ("b", {"b": 2}, ValueError, "attention: b=2, must be from 0 to 1"),
    ("head", {"head": -1}, ValueError, "attention: head=-1, must be from 0 to 2"),
    (
        "rows",
        {"row": 1, "out": out_of(N, M)},
        ValueError,
        "attention: rows=11 from row=1, but sequence 1 has 11 queries",
    ),
    ("row", {"row": -1}, ValueError, "attention: rows=12 from row=-1"),
    (
        "narrow",
        {"out": out_of(N, M - 1)},
        ValueError,
        "attention: to_stride=12, must be at least the sequence's 13 keys",
    ),
    ("rank", {"out": out_of(1, N, M)}, ValueError, "out: expected float32 (I, J), got float32 (1,"),
    ("type", {"out": np.empty((N, M))}, TypeError, "out: expected float32 (I, J), got float64"),
    ("list", {"out": [[1.0]]}, TypeError, "out: expected float32 (I, J), got list"),
    ("order", {"out": out_of(M, N).T}, ValueError, "out: the last axis must be contiguous"),
    ("gaps", {"out": out_of(N, 2 * M)[:, :M]}, ValueError, "out: expected C order without gaps"),
    ("read-only", {"out": read_only(out_of(N, M))}, ValueError, "out: the array is read-only"),
    ("misaligned", {"out": misaligned(N, M)}, ValueError, "out: the array is not aligned"),
    ("q", {"q": Q.astype(np.float64)}, TypeError, "q: expected float32 (B, H, N, D), got float64"),
    ("v", {"v": V[:, :, 1:]}, ValueError, "v: expected float32 (B=2, H=3, M=13, Dv), got float32"),
    ("call", {"call": [1]}, TypeError, "must be tuple, not list"),
    ("number", {"b": 1.0}, TypeError, "float"),
    (
        "lengths",
        {"call": make_call(lengths=np.array([N + 1, 0]))},
        ValueError,
        "attention: lengths[0]=12, must be from 0 to N=11",
    ),
    (
        "a label",
        {
            "call": make_call(
                terms=(labelled("A", _core.KEY, KEYH, np.full((1, 1, N, M), 6, np.int8)),)
            )
        },
        ValueError,
        "attention: A: label 6",
    ),
]


@pytest.mark.parametrize("name", [entry[0] for entry in REFUSED])
def test_refused(name: str) -> None:
    changes, error, sentence = next(entry[1:] for entry in REFUSED if entry[0] == name)
    out = (ARGUMENTS | changes)["out"]
    before = out.copy() if isinstance(out, np.ndarray) else None
    with pytest.raises(error, match=re.escape(sentence)):
        show(**changes)
    if before is not None:
        np.testing.assert_array_equal(out, before)


def test_sums_refused() -> None:
    p = rows(3, 4)
    for given, error, sentence in (
        ((p, "mean"), ValueError, "what: expected mass, entropy or distance, got mean"),
        ((p[:, ::2], "mass"), ValueError, "p"),
        ((p.astype(np.float64), "mass"), TypeError, "p: expected float32"),
        ((p[0], "entropy"), ValueError, "p"),
        ((None, "distance"), TypeError, "p"),
    ):
        with pytest.raises(error, match=re.escape(sentence)):
            _core.map_sums(*given)  # type: ignore[arg-type]
    assert _core.map_sums(np.empty((0, 0), np.float32), "mass").shape == (0,)
    assert _core.map_sums(np.empty((2, 0), np.float32), "entropy").tolist() == [0, 0]


def test_nothing_leaks() -> None:
    out = out_of(N, M)
    held = [Q, KEYS, V, KEYH, CALL, out]

    def calls(times: int) -> None:
        for _ in range(times):
            show(out=out)
            _core.map_sums(out, "mass")
            with pytest.raises(ValueError):
                _core.map_sums(out, "mean")
            for changes in ({"b": 2}, {"out": out[:, 1:]}, {"q": Q[:1]}):
                with pytest.raises(ValueError):
                    show(**({"out": out} | changes))

    assert_nothing_leaks(calls, 100, 1000, held)


def test_eight_threads_at_once() -> None:
    expected = show()
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: show(), range(160)):
            np.testing.assert_array_equal(found, expected)


def test_maps_survive_a_changing_number_of_threads() -> None:
    """libcore sizes its workspace and then computes: with the same number of threads."""
    before, stop = relpos.get_threads(), threading.Event()

    def change() -> None:
        while not stop.is_set():
            for threads in (1, 8):
                relpos.set_threads(threads)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        expected = show()
        for _ in range(500):
            np.testing.assert_array_equal(show(), expected)
    finally:
        stop.set()
        changer.join()
        relpos.set_threads(before)


def test_the_gil_is_released() -> None:
    x, out = rows(1, 1, 8192, 64), out_of(8192, 8192)
    show(q=x, k=x, v=x, b=0, head=0, out=out, call=make_call())
    span: list[float] = []

    def work() -> None:
        started = time.perf_counter()
        show(q=x, k=x, v=x, b=0, head=0, out=out, call=make_call())
        span.extend((started, time.perf_counter()))

    worker = threading.Thread(target=work)
    ticks = []
    worker.start()
    while worker.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.0005)
    started, ended = span
    margin = (ended - started) / 10
    assert sum(started + margin < t < ended - margin for t in ticks) >= 5


def test_inputs_are_only_read() -> None:
    copies = [x.copy() for x in (Q, KEYS, V, KEYH)]
    arrays = [read_only(x.copy()) for x in (Q, KEYS, V)]
    show(q=arrays[0], k=arrays[1], v=arrays[2])
    for x, copy in zip((Q, KEYS, V, KEYH), copies, strict=True):
        np.testing.assert_array_equal(x, copy)
