# SPDX-License-Identifier: Apache-2.0
"""The oracle itself: maps against matrices written by hand, gradients by finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cases import Case, make_arrays, random_case
from relpos import reference
from relpos.reference import Band, relation_index


def four_point(f: Any, x: np.ndarray, index: Any, step: float = 2.0**-10) -> float:
    """f'(x[index]) = (8 (f(+h) - f(-h)) - (f(+2h) - f(-2h))) / 12h, error h^4 f^(5) / 30."""
    before = x[index]
    values = []
    for offset in (1, -1, 2, -2):
        x[index] = before + offset * step
        values.append(f())
    x[index] = before
    return float((8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step))


# ---- maps, by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((3, 3, 0, 1, 1), [[1, 2, 2], [0, 1, 2], [0, 0, 1]]),
        ((3, 5, 2, 2, 1), [[0, 1, 2, 3, 3], [0, 0, 1, 2, 3], [0, 0, 0, 1, 2]]),
        ((3, 5, 2, 2, 1, "none"), [[0, 1, 2, 3, -1], [-1, 0, 1, 2, 3], [-1, -1, 0, 1, 2]]),
        ((2, 3, 0, 0, 0), [[0, 0, 0], [0, 0, 0]]),
        ((2, 3, 0, 0, 0, "none"), [[0, -1, -1], [-1, 0, -1]]),
        ((1, 4, 3, 2, 2), [[0, 0, 1, 2]]),  # the last token, with a cache
        ((3, 2, -1, 1, 0), [[1, 1], [1, 1], [0, 1]]),  # more queries than keys
        ((2, 3, 10, 2, 2), [[0, 0, 0], [0, 0, 0]]),  # all far to the left
        ((2, 3, -10, 2, 2, "none"), [[-1, -1, -1], [-1, -1, -1]]),
        ((0, 3, 0, 1, 1), np.zeros((0, 3))),
        ((3, 0, 0, 1, 1), np.zeros((3, 0))),
    ],
)
def test_relation_index(arguments: Any, expected: Any) -> None:
    np.testing.assert_array_equal(relation_index(*arguments), expected)


def test_visible_keys_are_bottom_right() -> None:
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    np.testing.assert_array_equal(reference.visible_keys(3, 5, 2, True), expected)
    np.testing.assert_array_equal(reference.visible_keys(3, 2, -1, True), [[0, 0], [1, 0], [1, 1]])


def test_sum_relation_is_the_adjoint_of_take_relation() -> None:
    random = np.random.default_rng(0)
    index = relation_index(7, 9, 2, 2, 1, "none")
    rows, x = random.standard_normal((7, 4)), random.standard_normal((7, 9))
    left = np.sum(reference.take_relation(rows, index) * x)
    right = np.sum(rows * reference.sum_relation(x, index, 4))
    np.testing.assert_allclose(left, right, rtol=1e-13)


def test_spans() -> None:
    def places(**given: Any) -> list[tuple[int, ...]]:
        return [tuple(span)[1:] for span in reference.spans(2, 5, 7, **given)]

    assert places() == [(0, 5, 0, 7, 2)] * 2
    assert places(lengths=[5, 1]) == [(0, 5, 0, 5, 0), (0, 1, 0, 1, 0)]
    assert places(lengths=[5, 1], key_lengths=[7, 4]) == [(0, 5, 0, 7, 2), (0, 1, 0, 4, 3)]
    assert places(key_lengths=[2, 0]) == [(0, 5, 0, 2, -3), (0, 5, 0, 0, -5)]
    assert places(offsets=[0, 3, 4]) == [(0, 3, 0, 3, 0), (3, 1, 3, 1, 0)]
    assert places(offsets=[0, 3, 4], key_offsets=[0, 0, 6]) == [(0, 3, 0, 0, -3), (3, 1, 0, 6, 5)]
    assert places(query_start=[9, -1]) == [(0, 5, 0, 7, 9), (0, 5, 0, 7, -1)]


# ---- forward, by the definition ------------------------------------------------------------------


@pytest.mark.parametrize("beyond", ["clip", "none"])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_is_the_definition(beyond: Any, causal: bool) -> None:
    """Equations (1) to (3) pair by pair, in scalar Python."""
    random = np.random.default_rng(1)
    N, M, start, left, right = 4, 6, 1, 2, 1
    q, k = random.standard_normal((N, 3)), random.standard_normal((M, 3))
    v, wk, wv = (random.standard_normal(shape) for shape in ((M, 2), (4, 3), (4, 2)))
    index = relation_index(N, M, start, left, right, beyond)
    out, lse = reference.attention_forward(
        q,
        k,
        v,
        key_table=wk,
        key_index=index,
        value_table=wv,
        value_index=index,
        visible=reference.visible_keys(N, M, start, causal),
        scale=0.7,
    )
    for i in range(N):
        scores, values = [], []
        for j in range(M):
            distance = j - (i + start)
            if causal and distance > 0:
                continue
            row = min(max(distance, -left), right) + left
            absent = beyond == "none" and not -left <= distance <= right
            scores.append(0.7 * (q[i] @ k[j] + (0 if absent else q[i] @ wk[row])))
            values.append(v[j] + (0 if absent else wv[row]))
        weights = np.exp(scores)
        np.testing.assert_allclose(lse[i], np.log(weights.sum()), rtol=1e-13)
        expected = (weights / weights.sum()) @ np.array(values)
        np.testing.assert_allclose(out[i], expected, rtol=1e-12)


def test_empty_rows() -> None:
    q, k, v = np.ones((3, 2)), np.ones((2, 2)), np.ones((2, 4))
    visible = reference.visible_keys(3, 2, -1, True)
    out, lse = reference.attention_forward(q, k, v, visible=visible)
    assert not out[0].any() and lse[0] == -np.inf and np.all(np.isfinite(lse[1:]))
    gradients = reference.attention_backward(q, k, v, np.ones((3, 4)), visible=visible)
    assert not gradients["q"][0].any()
    assert all(np.all(np.isfinite(g)) for g in gradients.values())


# ---- backward, by finite differences of forward --------------------------------------------------

GRADIENT_CASES = [
    Case(N=5, M=7, D=3, Dv=2, key=Band(2, 1), value=Band(1, 3), causal=True),
    Case(N=7, M=5, D=2, Dv=3, key=Band(1, 1, "none"), value=Band(0, 2, "none"), causal=True),
    Case(N=4, M=4, D=3, Dv=3, key=Band(2, 2), value=Band(2, 2), tied=True),
    Case(N=4, M=4, D=3, Dv=3),
    Case(B=2, H=2, N=4, M=5, D=2, Dv=2, key=Band(8, 8), value=Band(0, 0), per_head=True),
    Case(B=2, H=2, N=5, M=5, D=2, Dv=3, key=Band(1, 1), lengths=(3, 5), layout="bnhd"),
    Case(B=3, H=2, D=2, Dv=3, value=Band(1, 1), offsets=(0, 3, 3, 8), causal=True, scale=-0.5),
    Case(B=2, N=3, M=4, D=2, Dv=2, key=Band(1, 2), value=Band(1, 2), starts=(5, -1), causal=True),
]


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_backward_against_finite_differences(case: Case) -> None:
    arrays = make_arrays(case)
    q, k, v, dout, key_table, value_table = arrays.views()
    batch = case.batch()
    used = ~np.isnan(dout)

    def loss() -> float:
        out, _ = reference.batched_forward(batch, q, k, v, key_table, value_table)
        return float(np.sum(out[used] * dout[used]))

    gradients = reference.batched_backward(batch, q, k, v, dout, key_table, value_table)
    if case.tied:
        gradients["key_table"] = gradients["key_table"] + gradients.pop("value_table")
    inputs = {"q": q, "k": k, "v": v, "key_table": key_table, "value_table": value_table}
    for name, gradient in gradients.items():
        x = inputs[name]
        assert x is not None
        for index in np.ndindex(x.shape):
            if np.isnan(x[index]):  # beyond a length
                assert gradient[index] == 0
                continue
            expected = four_point(loss, x, index)
            assert abs(gradient[index] - expected) < 1e-7, (name, index)


def test_plain_formula_stays_in_float32() -> None:
    case = random_case(8)
    q, k, v, dout, key_table, value_table = make_arrays(case, np.float32).views()
    batch = case.batch(np.float32)
    out, lse = reference.batched_forward(batch, q, k, v, key_table, value_table)
    assert out.dtype == lse.dtype == np.float32
    gradients = reference.batched_backward(batch, q, k, v, dout, key_table, value_table)
    assert {g.dtype for g in gradients.values()} == {np.dtype(np.float32)}


# ---- the rest ------------------------------------------------------------------------------------


def test_gemm() -> None:
    random = np.random.default_rng(2)
    a, b = random.standard_normal((3, 4)), random.standard_normal((4, 5))
    bias, c = random.standard_normal(5), random.standard_normal((3, 5))
    expected = np.array([[sum(a[i] * b[:, j]) for j in range(5)] for i in range(3)])
    np.testing.assert_allclose(reference.gemm(a, b), expected, rtol=1e-13)
    swapped = reference.gemm(a.T, b.T, transpose_a=True, transpose_b=True, bias=bias, c=c)
    np.testing.assert_allclose(swapped, expected + bias + c, rtol=1e-12)


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "expected"),
    [  # kat_vectors of Random123, which the paper's authors publish
        (7, [0] * 4, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, [2**32 - 1] * 4, [2**32 - 1] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (10, [0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, [2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            10,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(rounds: int, counter: Any, key: Any, expected: str) -> None:
    words = reference.philox4x32(np.array(counter), np.array(key), rounds)
    assert words.dtype == np.uint32
    assert " ".join(f"{w:08x}" for w in words) == expected


def test_philox_over_arrays_of_counters() -> None:
    counters = np.arange(24).reshape(2, 3, 4)
    blocks = reference.philox4x32(counters, np.array([5, 6]))
    assert blocks.shape == (2, 3, 4)
    alone = reference.philox4x32(counters[1, 2], np.array([5, 6]))
    np.testing.assert_array_equal(blocks[1, 2], alone)
