# SPDX-License-Identifier: Apache-2.0
"""The oracle itself: maps against matrices written by hand, gradients by finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from case_arrays import make_arrays
from cases import Case, Distances, Edges, Labels, Mask, random_case
from relpos import reference
from relpos.reference import Band, Dropout, Term, relation_index
from tolerances import merge_tied


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


def test_bucketed_index() -> None:
    distance = reference.distances(2, 5, 1)  # -1 0 1 2 3, and -2 -1 0 1 2
    buckets = np.array([3, 0, -1, 1])
    index = reference.band_index(distance, 1, 2, "clip", buckets)
    np.testing.assert_array_equal(index, [[3, 0, -1, 1, 1], [3, 3, 0, -1, 1]])
    index = reference.band_index(distance, 1, 2, "none", buckets)
    np.testing.assert_array_equal(index, [[3, 0, -1, 1, -1], [-1, 3, 0, -1, 1]])


def test_index_of_positions() -> None:
    """d = key_positions[j] - query_positions[i]; per sequence, shared by all, and packed."""
    queries, keys = np.array([[4, 0, 9], [1, 1, 9]]), np.array([[3, 4, 6], [0, 2, 9]])
    span = reference.Span(1, 0, 2, 0, 2, 77)
    band = reference.Band(1, 1, "none", None, queries, keys)
    np.testing.assert_array_equal(reference.head_index(band, span, 0), [[0, 2], [0, 2]])
    shared = band._replace(query_positions=queries[0], key_positions=keys[0])
    np.testing.assert_array_equal(reference.head_index(shared, span, 0), [[0, 1], [-1, -1]])
    packed = reference.Span(1, 1, 2, 2, 1, 77)
    np.testing.assert_array_equal(reference.head_index(shared, packed, 0), [[-1], [-1]])


def test_index_of_edges() -> None:
    """Three queries: no edge; two to one key, and one to another; one."""
    index = reference.edge_index(
        3, 4, np.array([0, 0, 3, 4]), np.array([1, 1, 3, 0]), np.array([5, 5, 2, 6])
    )
    none = [-1] * 4
    np.testing.assert_array_equal(index[0], [none, [-1, 5, -1, 2], [6, -1, -1, -1]])
    np.testing.assert_array_equal(index[1], [none, [-1, 5, -1, -1], none])
    assert reference.edge_index(2, 3, np.zeros(3), np.zeros(0), np.zeros(0)).shape == (0, 2, 3)


def test_visible_keys() -> None:
    """Bottom-right, whatever N and M; windows; masks; all at once."""
    causal = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    visible = reference.visible_keys
    np.testing.assert_array_equal(visible(3, 5, 2, True), causal)
    np.testing.assert_array_equal(visible(3, 2, -1, True), [[0, 0], [1, 0], [1, 1]])
    window = [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    np.testing.assert_array_equal(visible(3, 5, 2, False, (1, 0)), window)
    np.testing.assert_array_equal(visible(3, 5, 2, True, (1, -1)), window)
    np.testing.assert_array_equal(visible(2, 3, 0, False, (-1, 1)), [[1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(visible(2, 3, 9, False, (2, 2)), np.zeros((2, 3)))
    mask = np.array([[1, 0, 255], [0, 0, 2]])
    np.testing.assert_array_equal(visible(2, 3, 1, mask=mask), mask != 0)
    np.testing.assert_array_equal(visible(2, 3, 0, True, mask=mask), [[1, 0, 0], [0, 0, 0]])


def test_matrices_by_head_and_sequence() -> None:
    matrices = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    span = reference.Span(1, 0, 2, 0, 3, 0)
    np.testing.assert_array_equal(reference.head_matrix(matrices, span, 2), matrices[1, 2, :2, :3])
    shared = reference.head_matrix(matrices[:1, :1], span, 2)
    np.testing.assert_array_equal(shared, matrices[0, 0, :2, :3])


@pytest.mark.parametrize("edges", [False, True])
def test_sum_relation_is_the_adjoint_of_take_relation(edges: bool) -> None:
    random = np.random.default_rng(0)
    index = relation_index(7, 9, 2, 2, 1, "none")
    if edges:
        index = np.stack([index, random.integers(-1, 4, (7, 9)), index])
    rows, x = random.standard_normal((7, 4)), random.standard_normal((7, 9))
    left = np.sum(reference.take_relation(rows, index) * x)
    right = np.sum(rows * reference.sum_relation(x, index, 4))
    np.testing.assert_allclose(left, right, rtol=1e-13)


def test_spans() -> None:
    def places(**given: Any) -> list[tuple[int, ...]]:
        return [tuple(span)[1:6] for span in reference.spans(2, 5, 7, **given)]

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
        [Term("key", wk, index), Term("value", wv, index)],
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


def test_every_term_by_the_definition() -> None:
    """Equations (1) to (5) with two terms of each kind, pair by pair."""
    random = np.random.default_rng(2)
    N, M, D, Dv, T, cap = 3, 5, 4, 2, 3, 1.5
    q, k, u = (random.standard_normal(shape) for shape in ((N, D), (M, D), D))
    v = random.standard_normal((M, Dv))
    widths = {"key": D, "query": D, "bias": 1, "value": Dv}
    terms = [
        Term(kind, random.standard_normal((T, widths[kind])), random.integers(-1, T, (*L, N, M)))
        for kind in reference.KINDS
        for L in ((), (2,))
    ]
    visible, keep = random.random((N, M)) < 0.7, random.choice([0.0, 2.0], (N, M))
    visible[:, 2] = True
    out, lse = reference.attention_forward(
        q, k, v, terms, position_bias=u, visible=visible, keep=keep, scale=0.6, softcap=cap
    )

    def sum_of(kind: str, i: int, j: int) -> np.ndarray:
        rows = np.zeros(widths[kind])
        for term in terms:
            layers = term.rows.reshape(-1, N, M) if term.kind == kind else ()
            for layer in layers:
                if layer[i, j] >= 0:
                    rows = rows + term.table[layer[i, j]]
        return rows

    for i in range(N):
        weights, result = [], np.zeros(Dv)
        for j in range(M):
            s = q[i] @ k[j] + (q[i] + u) @ sum_of("key", i, j) + k[j] @ sum_of("query", i, j)
            s = 0.6 * s + sum_of("bias", i, j)[0]
            weights.append(np.exp(cap * np.tanh(s / cap)) * visible[i, j])
            result += weights[j] * keep[i, j] * (v[j] + sum_of("value", i, j))
        np.testing.assert_allclose(lse[i], np.log(sum(weights)), rtol=1e-13)
        np.testing.assert_allclose(out[i], result / sum(weights), rtol=1e-12)


def test_numbers_by_hand() -> None:
    """One query, two keys, D = 1: scores 2 (0.5 + 3 * 1) + 4 and 2 (3 + 5 * 2), and what follows."""
    key = Term("key", np.array([[3.0]]), np.array([[0, -1]]))
    query = Term("query", np.array([[7.0], [2.0]]), np.array([[-1, 1]]))
    bias = Term("bias", np.array([[4.0]]), np.array([[0, -1]]))
    value = Term("value", np.array([[10.0]]), np.array([[-1, 0]]))
    q, k, v = np.array([[0.5]]), np.array([[1.0], [5.0]]), np.array([[1.0], [2.0]])
    given: Any = {"terms": [key, query, bias, value], "scale": 2.0}
    out, lse = reference.attention_forward(q, k, v, **given, position_bias=np.array([0.5]))
    scores = np.array([2 * (0.5 + 3) + 4, 2 * (2.5 + 10)])  # 11 and 25
    np.testing.assert_allclose(lse, 25 + np.log1p(np.exp(-14.0)), rtol=1e-15)
    p = np.exp(scores - 25) / (1 + np.exp(-14.0))
    np.testing.assert_allclose(out, [[p[0] * 1 + p[1] * 12]], rtol=1e-15)
    out, _ = reference.attention_forward(q, k, v, **given, softcap=1e-9, keep=np.array([[4, 0]]))
    np.testing.assert_allclose(out, [[0.5 * 4 * 1]], rtol=1e-8)  # cap: equal scores


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_empty_rows(softcap: float) -> None:
    q, k, v = np.ones((3, 2)), np.ones((2, 2)), np.ones((2, 4))
    given: Any = {"visible": reference.visible_keys(3, 2, -1, True), "softcap": softcap}
    out, lse = reference.attention_forward(q, k, v, **given)
    assert not out[0].any() and lse[0] == -np.inf and np.all(np.isfinite(lse[1:]))
    gradients = reference.attention_backward(q, k, v, np.ones((3, 4)), **given)
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
    Case(N=5, M=6, D=3, Dv=2, query=Band(2, 1), position_bias=True),  # no key term: gradient 0
    Case(N=5, M=6, D=3, Dv=2, key=Band(2, 1), position_bias=True, H=2, scale=0.7),
    Case(N=5, M=6, D=3, Dv=2, bias=Band(2, 1, "none"), scale=0.25, per_head=True, H=2),
    Case(N=6, M=6, D=3, Dv=3, key=Distances(3, 3, "clip", 3, "random"), bias=Distances(5, 5)),
    Case(N=6, M=7, D=2, Dv=3, query=Distances(2, 2, "none", 0, "", "random"), causal=True),
    Case(B=2, H=2, N=4, M=5, D=2, Dv=2, key=Labels(3, per_head=True), value=Labels(2), gap=1),
    Case(N=4, M=5, D=2, Dv=2, **{k: Edges(3, 4, "repeated") for k in reference.KINDS}),  # type: ignore
    Case(N=5, M=5, D=2, Dv=2, key=Band(1, 1), softcap=1.5, causal=True),
    Case(N=5, M=5, D=2, Dv=2, value=Band(1, 1), dropout=Dropout(0.4, (1, 2)), H=2),
    Case(N=5, M=5, D=2, Dv=2, bias=Band(4, 4), window=(1, 2), mask=Mask("rows", 0.8)),
    Case(
        B=2,
        H=2,
        N=5,
        M=5,
        D=2,
        Dv=2,
        key=(Band(2, 2), Labels(3)),
        query=(Distances(4, 4, "clip", 2, "folded"), Edges(2)),
        bias=(Labels(4, 2), Band(1, 1)),
        value=(Edges(2, 4, "repeated"), Distances(3, 3, "none", 0, "", "shared")),
        per_head=("query", "value"),
        position_bias=True,
        softcap=3.0,
        mask=Mask("random", 0.8, per_head=True),
        dropout=Dropout(0.3, (5, 6), 7, 8),
        lengths=(5, 4),
    ),
]


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
def test_backward_against_finite_differences(case: Case) -> None:
    arrays = make_arrays(case)
    batch, (q, k, v, dout) = case.batch(arrays), arrays.views()
    used = ~np.isnan(dout)

    def loss() -> float:
        out, _ = reference.batched_forward(batch, q, k, v)
        return float(np.sum(out[used] * dout[used]))

    gradients = merge_tied(case, reference.batched_backward(batch, q, k, v, dout))
    assert list(gradients)[:3] == ["q", "k", "v"]
    for name, gradient in gradients.items():
        x = arrays[name].view
        for index in np.ndindex(x.shape):
            if np.isnan(x[index]):  # beyond a length
                assert gradient[index] == 0
                continue
            expected = four_point(loss, x, index)
            assert abs(gradient[index] - expected) < 1e-7, (name, index)


@pytest.mark.parametrize("seed", [8, 4, 5, 6, 7, 12])
def test_plain_formula_stays_in_float32(seed: int) -> None:
    case = random_case(seed)
    arrays = make_arrays(case, np.float32)
    batch, (q, k, v, dout) = case.batch(arrays, np.float32), arrays.views()
    out, lse = reference.batched_forward(batch, q, k, v)
    assert out.dtype == lse.dtype == np.float32
    gradients = reference.batched_backward(batch, q, k, v, dout)
    assert {g.dtype for g in gradients.values()} == {np.dtype(np.float32)}


# ---- dropout -------------------------------------------------------------------------------------


def test_dropout_factors_by_the_blocks_themselves() -> None:
    """Column 37 of row 5: byte 5 of block 2, which is bits 8 to 15 of word 1."""
    dropout = Dropout(0.4, (11, 12), site=2**32 - 1, first=100)
    assert dropout.threshold == 102
    keep = reference.dropout_factors(dropout, 3, 2, 6, 40)
    assert keep.shape == (6, 40) and set(np.unique(keep)) == {0.0, 256 / 154}
    block = reference.philox4x32(np.array([2, 5, 103, 1]), np.array([11, 12]))
    byte = (int(block[1]) >> 8) & 255
    assert keep[5, 37] == (0 if byte < 102 else 256 / 154)
    bytes_ = block.astype("<u4").tobytes()
    expected = np.frombuffer(bytes_, np.uint8)[:8] >= 102
    np.testing.assert_array_equal(keep[5, 32:] != 0, expected)
    np.testing.assert_array_equal(reference.dropout_factors(dropout, 3, 2, 3, 17), keep[:3, :17])


@pytest.mark.parametrize("rate", [0.0, 0.001, 1 / 256, 0.1, 0.5, 255 / 256, 0.9999])
def test_dropout_keeps_the_mean(rate: float) -> None:
    """Over 2^18 numbers: the mean is 1 to six deviations; a rate below 1/512 drops nothing.

    And one close to 1 not everything.
    """
    keep = reference.dropout_factors(Dropout(rate, (3, 4)), 0, 0, 512, 512)
    p = min(np.floor(256 * rate + 0.5), 255) / 256
    deviation = np.sqrt(p / (1 - p) / keep.size)
    assert abs(keep.mean() - 1) <= 6 * deviation
    if p == 0:
        assert np.all(keep == 1)


# ---- the rest ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("width", [None, 4, 0])
def test_rotate(pairing: Any, width: int | None) -> None:
    """Column pairs turn by position * base^(-2c / width), as complex numbers do; the rest stays."""
    x = np.random.default_rng(3).standard_normal((2, 5, 6))
    positions = np.array([0, 1, 2, 7, -3])
    turned = reference.rotate(x, positions, base=100.0, width=width, pairing=pairing)
    W = 6 if width is None else width
    for c in range(W // 2):
        pair = [2 * c, 2 * c + 1] if pairing == "interleaved" else [c, c + W // 2]
        number = (x[..., pair[0]] + 1j * x[..., pair[1]]) * np.exp(
            1j * positions * 100.0 ** (-2 * c / W)
        )
        np.testing.assert_allclose(turned[..., pair[0]], number.real, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(turned[..., pair[1]], number.imag, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(turned[..., W:], x[..., W:])
    np.testing.assert_array_equal(turned[:, 0], x[:, 0])
    back = reference.rotate(turned, -positions, base=100.0, width=width, pairing=pairing)
    np.testing.assert_allclose(back, x, atol=1e-14)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_rotated_products_depend_on_the_distance_alone(pairing: Any) -> None:
    q, k = np.random.default_rng(4).standard_normal((2, 9, 8))
    first, later = np.arange(9), np.arange(9) + 1000
    product = [
        reference.rotate(q, at, pairing=pairing) @ reference.rotate(k, at, pairing=pairing).T
        for at in (first, later)
    ]
    np.testing.assert_allclose(product[0], product[1], rtol=1e-10, atol=1e-10)


def test_gradient_of_rotate_turns_back() -> None:
    x, dz = np.random.default_rng(5).standard_normal((2, 3, 4))
    positions = np.array([1, 5, -2])
    gradient = reference.rotate(dz, -positions)
    for index in np.ndindex(x.shape):
        expected = four_point(lambda: float(np.sum(reference.rotate(x, positions) * dz)), x, index)
        assert abs(gradient[index] - expected) < 1e-7


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


@pytest.mark.parametrize(("dtype", "score"), [(np.float32, 1e9), (np.float64, 1e18)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_weights_of_scores_that_leave_lse_no_room(dtype: Any, score: float, sign: float) -> None:
    """Equal scores so large that lse is rounded to them: the weights sum to 1, and so the output is
    the mean of the values. A query that sees no key has none."""
    N, M, D = 3, 5, 4
    q, k = np.zeros((N, D)), np.zeros((M, D))
    q[:, 0], k[:, 0] = sign * score, 1.0
    v = np.random.default_rng(3).standard_normal((M, D))
    visible = np.ones((N, M), bool)
    visible[0], visible[1, 2:] = False, False
    s, lse = reference.attention_scores(
        q.astype(dtype), k.astype(dtype), scale=1.0, visible=visible
    )
    assert lse[2] == s[2, 0]  # no room for log 5
    p = reference.attention_probabilities(s, lse)
    np.testing.assert_allclose(p.sum(axis=1), [0, 1, 1], rtol=4 * np.finfo(dtype).eps)
    z, _ = reference.attention_forward(q, k, v, scale=1.0, visible=visible, dtype=dtype)
    expected = [np.zeros(D), v[:2].mean(axis=0), v.mean(axis=0)]
    np.testing.assert_allclose(z, expected, rtol=0, atol=8 * float(np.finfo(dtype).eps))
    found = reference.attention_backward(q, k, v, v[:N], scale=1.0, visible=visible, dtype=dtype)
    np.testing.assert_allclose(found["v"], p.T @ v[:N], rtol=0, atol=8 * np.finfo(dtype).eps)
