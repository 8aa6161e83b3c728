# SPDX-License-Identifier: Apache-2.0
"""Every position scheme: against its formula, at its check values, and what is refused.

The schemes run twice: on a stand-in core in double (what they lower to is right, and so is the way
back of the gradients, to eleven digits) and on the core (all of it together, in float32).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import relpos
from relpos.position import alibi_slopes, deberta_log_buckets, sinusoid, t5_buckets
from scheme_examples import EXAMPLES, LABELS, B, D, H, N, activations, dense, parameters
from stand_in import stand_in


@pytest.fixture(params=["double", "core"])
def real(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The type of numbers: double on the stand-in, float32 on the core."""
    if request.param == "double":
        stand_in(monkeypatch)
        yield np.float64
    else:
        yield np.float32


def tolerance(real: Any, loose: float) -> float:
    return 1e-11 if real is np.float64 else loose


# --------------------------------------------------------------------------------------------------
# Against the formulas
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", EXAMPLES)
def test_forward(name: str, causal: bool, real: Any) -> None:
    example = EXAMPLES[name]
    tables = parameters(example, real)
    shapes = [(N, N), (4, N), (1, 7)] if example.lengths else [(N, N)]
    for n, m in shapes:
        q, k, v, _ = activations(real, n, m)
        got = relpos.attention(q, k, v, position=example.make(**tables), causal=causal)
        assert got.dtype == real
        expected = dense(example, q, k, v, tables, causal)
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance(real, 2e-5))


@pytest.mark.parametrize("name", [name for name, e in EXAMPLES.items() if e.long])
def test_long_sequences(name: str) -> None:
    """Many tiles of queries and keys, on the core."""
    example = EXAMPLES[name]
    tables = parameters(example, np.float32)
    q, k, v, _ = (x[:1] for x in activations(np.float32, 70, 300))
    got = relpos.attention(q, k, v, position=example.make(**tables), causal=True)
    expected = dense(example, q, k, v, tables, True)
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", EXAMPLES)
def test_gradients(name: str, real: Any) -> None:
    """Of every parameter, by differences of the formula along three random directions each."""
    example = EXAMPLES[name]
    tables = parameters(example, real)
    q, k, v, dout = activations(real)
    _, ctx = relpos.attention_forward(q, k, v, position=example.make(**tables), causal=True)
    gradients = relpos.attention_backward(ctx, dout)
    assert list(gradients) == ["q", "k", "v", *example.parameters]
    at = {"q": q, "k": k, "v": v, **tables}

    def loss(moved: dict[str, Any]) -> float:
        own = {n: x for n, x in moved.items() if n not in ("q", "k", "v")}
        out = dense(example, moved["q"], moved["k"], moved["v"], own, True)
        return float(np.sum(out * dout))

    random, h = np.random.default_rng(3), 1e-3
    for parameter, value in at.items():
        gradient = gradients[parameter]
        assert gradient.shape == value.shape and gradient.dtype == real
        for _ in range(3):
            step = random.standard_normal(value.shape)
            step *= h / np.linalg.norm(step)
            value = value.astype(np.float64)
            near = loss(at | {parameter: value + step}) - loss(at | {parameter: value - step})
            far = loss(at | {parameter: value + 2 * step}) - loss(
                at | {parameter: value - 2 * step}
            )
            slope = (8 * near - far) / (12 * h)
            mine = float(np.sum(gradient * (step / h), dtype=np.float64))
            close = 1e-8 if real is np.float64 else 1e-4
            assert mine == pytest.approx(slope, rel=close, abs=close), parameter


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_cache_fed_token_by_token_is_one_call(name: str, real: Any) -> None:
    example = EXAMPLES[name]
    tables = parameters(example, real)
    position = example.make(**tables)
    q, k, v, _ = activations(real)
    full = relpos.attention(q, k, v, position=position, causal=True)
    # the first tokens one by one too, or at once
    for first, last in [(0, 5)] + [(i, i + 1) for i in range(N)]:
        part = relpos.attention(
            *(
                np.ascontiguousarray(x)
                for x in (q[:, :, first:last], k[:, :, :last], v[:, :, :last])
            ),
            position=position if example.lengths else example.make(first, last, **tables),
            causal=True,
        )
        np.testing.assert_allclose(
            part, full[:, :, first:last], rtol=0, atol=tolerance(real, 1e-5), err_msg=str(first)
        )


@pytest.mark.parametrize("name", EXAMPLES)
def test_packed_sequences(name: str, real: Any) -> None:
    """Packed sequences of different lengths are what each is alone."""
    example = EXAMPLES[name]
    if not example.lengths:
        pytest.skip("labels and explicit positions belong to one length")
    position = example.make(**parameters(example, real))
    q, k, v, dout = activations(real)
    lengths = (N, 5)
    packed = [
        np.concatenate([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lengths)])
        for x in (q, k, v, dout)
    ]
    out, ctx = relpos.attention_forward(*packed[:3], position=position, offsets=[0, N, N + 5])
    gradients = relpos.attention_backward(ctx, packed[3])
    total: dict[str, Any] = {}
    for b, n in enumerate(lengths):
        alone = [np.ascontiguousarray(x[b : b + 1, :, :n]) for x in (q, k, v, dout)]
        part, own = relpos.attention_forward(*alone[:3], position=position)
        rows = slice(0, N) if b == 0 else slice(N, N + 5)
        close = {"rtol": 0, "atol": tolerance(real, 1e-5)}
        np.testing.assert_allclose(out[rows].swapaxes(0, 1), part[0], **close)
        for parameter, gradient in relpos.attention_backward(own, alone[3]).items():
            if parameter in ("q", "k", "v"):
                mine = gradients[parameter][rows].swapaxes(0, 1)
                np.testing.assert_allclose(mine, gradient[0], rtol=0, atol=tolerance(real, 5e-5))
            else:
                total[parameter] = total.get(parameter, 0) + gradient
    for parameter, gradient in total.items():
        np.testing.assert_allclose(
            gradients[parameter], gradient, rtol=tolerance(real, 1e-4), atol=tolerance(real, 1e-4)
        )


def test_packed_labels_and_edges(real: Any) -> None:
    q, k, v, _ = activations(real)
    n = (N, 5)
    pack = [np.concatenate([x[b, :, : n[b]].swapaxes(0, 1) for b in range(B)]) for x in (q, k, v)]
    tables = parameters(EXAMPLES["edges"], real)
    labels = [np.ascontiguousarray(LABELS[b, 0, : n[b], : n[b]] % 3) for b in range(B)]
    flat = np.concatenate([x.reshape(-1) for x in labels])
    out = relpos.attention(
        *pack, position=relpos.ShawGraph(**tables, labels=labels), offsets=[0, N, N + 5]
    )
    again = relpos.attention(
        *pack,
        position=relpos.ShawGraph(**tables, labels=(flat, [0, N * N])),
        offsets=[0, N, N + 5],
    )
    b, i, j = np.concatenate(
        [[(b, *ij) for ij in np.ndindex(*x.shape)] for b, x in enumerate(labels)]
    ).T
    edges = relpos.EdgeList(i, j, flat, b)
    listed = relpos.attention(
        *pack, position=relpos.ShawGraph(**tables, edges=edges), offsets=[0, N, N + 5]
    )
    np.testing.assert_array_equal(out, again)
    np.testing.assert_allclose(out, listed, rtol=0, atol=tolerance(real, 1e-5))
    for b, rows in enumerate((slice(0, N), slice(N, N + 5))):
        alone = (np.ascontiguousarray(x[b : b + 1, :, : n[b]]) for x in (q, k, v))
        one = relpos.attention(*alone, position=relpos.ShawGraph(**tables, labels=labels[b]))
        np.testing.assert_allclose(
            out[rows].swapaxes(0, 1), one[0], rtol=0, atol=tolerance(real, 1e-5)
        )


def test_packed_matrices_by_heads(real: Any) -> None:
    """Labels and masks of every head, in a list or end to end, forward and backward, as the padded
    arrays have them."""
    q, k, v, dout = activations(real)
    n, offsets = (N, 5), [0, N, N + 5]
    random = np.random.default_rng(5)
    labels = random.integers(-1, 3, (B, H, N, N)).astype(np.int8)
    mask = random.random((B, H, N, N)) < 0.8
    tables = parameters(EXAMPLES["edges"], real)

    def results(arrays: Any, labels: Any, mask: Any, **sides: Any) -> list[Any]:
        position = relpos.ShawGraph(**tables, labels=labels)
        out, ctx = relpos.attention_forward(*arrays[:3], position=position, mask=mask, **sides)
        return [out, *relpos.attention_backward(ctx, arrays[3]).values()]

    def pack(x: Any) -> Any:
        return np.concatenate([x[b, :, : n[b]].swapaxes(0, 1) for b in range(B)])

    packed = [pack(x) for x in (q, k, v, dout)]
    cut, seen = ([x[b, :, : n[b], : n[b]] for b in range(B)] for x in (labels, mask))
    flat, open_ = (
        np.concatenate([x.reshape(H, -1) for x in parts], axis=1) for parts in (cut, seen)
    )
    expected = results((q, k, v, dout), labels, mask, lengths=n)
    listed = results(packed, cut, seen, offsets=offsets)
    laid = results(packed, (flat, [0, N * N]), (open_, [0, N * N]), offsets=offsets)
    for ours, again, theirs in zip(listed, laid, expected, strict=True):
        np.testing.assert_array_equal(ours, again)
        theirs = pack(theirs) if theirs.ndim == 4 else theirs
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance(real, 1e-4))
    mixed = [cut[0], np.ascontiguousarray(cut[1][:1])]  # of one sequence all heads have the same
    wide = labels.copy()
    wide[1] = wide[1, :1]
    found = results(packed, mixed, [seen[0][0], seen[1][0]], offsets=offsets)[0]
    theirs = results((q, k, v, dout), wide, mask[:, :1], lengths=n)[0]
    np.testing.assert_allclose(found, pack(theirs), rtol=0, atol=tolerance(real, 1e-4))


# --------------------------------------------------------------------------------------------------
# Check values (SEMANTICS: derived from the systems' own code)
# --------------------------------------------------------------------------------------------------

T5_ENCODER = {
    -128: 15, -91: 15, -90: 14, -64: 14, -63: 13, -46: 13, -45: 12, -32: 12, -31: 11, -23: 11,
    -22: 10, -16: 10, -15: 9, -12: 9, -11: 8, -8: 8, -7: 7, -1: 1, 0: 0, 1: 17, 7: 23, 8: 24,
    11: 24, 12: 25, 16: 26, 128: 31,
}  # fmt: skip
T5_DECODER = {
    -15: 15, -16: 16, -17: 16, -20: 17, -31: 21, -32: 21, -64: 26, -112: 30, -113: 31, 0: 0, 1: 0,
    500: 0,
}  # fmt: skip


def test_t5_buckets() -> None:
    for values, both in ((T5_ENCODER, True), (T5_DECODER, False)):
        got = t5_buckets(list(values), 32, 128, both)
        assert dict(zip(values, got.tolist(), strict=True)) == values


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("far", [20, 128, 512])
@pytest.mark.parametrize("buckets", [16, 32, 128])
def test_t5_buckets_do_not_hang_on_the_precision(buckets: int, far: int, both: bool) -> None:
    """T5 computes them in float32, the core gets them from float64."""
    d = np.arange(-1199, 1200)
    nb = buckets // 2 if both else buckets
    exact = nb // 2
    if far <= exact:
        pytest.skip("the exact buckets reach farther than the distance")
    x = np.abs(d) if both else np.maximum(-d, 0)
    one = np.float32
    ratio = np.log(np.maximum(x, exact).astype(one) / one(exact)) / one(math.log(far / exact))
    more = np.minimum(exact + (ratio * one(nb - exact)).astype(np.int64), nb - 1)
    expected = np.where(x < exact, x, more) + np.where((d > 0) & both, nb, 0)
    np.testing.assert_array_equal(t5_buckets(d, buckets, far, both), expected)


def test_deberta_log_buckets() -> None:
    values = {0: 0, 1: 1, 128: 128, 300: 207, 511: 255, -300: -207, -511: -255}
    got = deberta_log_buckets(list(values), 256, 512)
    assert dict(zip(values, got.tolist(), strict=True)) == values


def test_deberta_reaches_the_ends_of_its_table() -> None:
    """With span 256: delta is 0 from 512 before on, 511 from 511 after on, and never beyond."""
    table = np.zeros((512, D), np.float32)
    scheme = relpos.DeBERTa(table, buckets=256)
    n = 700
    q = np.zeros((1, 1, n, D), np.float32)
    _, ctx = relpos.attention_forward(q, q, q, position=scheme)
    band = ctx.lowered.terms[0].map
    i = np.arange(-n + 1, n)
    row = band.buckets[np.clip(-i, -band.left, band.right) + band.left]  # of d = -(i - j)
    np.testing.assert_array_equal(row, np.clip(deberta_log_buckets(i) + 256, 0, 511))
    assert row.min() == 0 and row.max() == 511
    assert max(band.left, band.right) < 520  # the rest is left to clipping


def exact_share(x: int, near: int, far: int, count: int) -> tuple[int, int]:
    """ln(x / near) / ln(far / near) * count in integers, rounded down and up."""
    power = 0
    while power < count and x**count * near ** (power + 1) >= far ** (power + 1) * near**count:
        power += 1
    whole = x**count * near**power == far**power * near**count
    return power, power + (not whole)


@pytest.mark.parametrize(
    ("buckets", "far"), [(20, 160), (18, 128), (40, 320), (18, 4096), (16, 32), (18, 64), (32, 129)]
)
def test_buckets_begin_where_the_formula_has_them(buckets: int, far: int) -> None:
    """Whole numbers of buckets too, which the roundings of logarithms may miss."""
    sizes = range(buckets // 2, far)
    near, count = buckets // 2, buckets - buckets // 2
    expected = [near + exact_share(x, near, far, count)[0] for x in sizes]
    got = t5_buckets([-x for x in sizes], buckets, far, bidirectional=False)
    assert got.tolist() == expected
    expected = [near + exact_share(x, near, far, near - 1)[1] for x in sizes]
    assert deberta_log_buckets(list(sizes), buckets, far + 1).tolist() == expected


def test_alibi_slopes() -> None:
    np.testing.assert_array_equal(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    twelve = alibi_slopes(12)
    np.testing.assert_array_equal(twelve[:8], alibi_slopes(8))
    np.testing.assert_allclose(twelve[8:], [0.7071, 0.3536, 0.1768, 0.0884], atol=5e-5)
    for heads in (1, 2, 3, 5, 16, 20, 71):
        slopes = alibi_slopes(heads)
        assert len(slopes) == heads == len(set(slopes)) and (slopes > 0).all() and slopes.max() < 1


def test_transformer_xl_is_its_shift(real: Any) -> None:
    """The released way: (q + v) R over klen - 1 ... 0, one zero column before it, seen as
    [klen + 1, q], the first row dropped. Right where causal attention looks."""
    rng = np.random.default_rng(0)
    n, m, width = 4, 9, 6
    q, k = (rng.standard_normal((1, 1, rows, D)).astype(real) for rows in (n, m))
    weight = rng.standard_normal((D, width)).astype(real)
    u, v = (rng.standard_normal((1, D)).astype(real) for _ in range(2))
    t = np.arange(m - 1, -1, -1.0)
    R = sinusoid(t, width, layout="halves")
    raw = (q[0, 0] + v).astype(np.float64) @ (R @ weight.T.astype(np.float64)).T  # (q, klen)
    padded = np.concatenate([np.zeros((n, 1)), raw], axis=1).reshape(m + 1, n)
    shifted = padded[1:].reshape(n, m)
    s = ((q[0, 0] + u).astype(np.float64) @ k[0, 0].T.astype(np.float64) + shifted) / math.sqrt(D)
    s[np.arange(m)[None] > np.arange(n)[:, None] + m - n] = -np.inf
    p = np.exp(s - s.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    got = relpos.attention(
        q,
        k,
        np.eye(m, dtype=real)[None, None],
        position=relpos.TransformerXL(weight, u, v),
        causal=True,
    )
    np.testing.assert_allclose(got[0, 0], p, rtol=0, atol=tolerance(real, 1e-5))


def test_music_transformer_is_its_skewing(real: Any) -> None:
    """Pad a column of zeros, see [L + 1, L], drop the first row."""
    L = N
    q, k, v, _ = activations(real)
    E = np.random.default_rng(0).standard_normal((L, D)).astype(real)
    got = relpos.attention(q, k, v, position=relpos.MusicTransformer(E), causal=True)
    raw = q.astype(np.float64) @ E.T.astype(np.float64)
    padded = np.concatenate([np.zeros((B, H, L, 1)), raw], axis=3).reshape(B, H, L + 1, L)
    s = (q.astype(np.float64) @ k.swapaxes(2, 3) + padded[:, :, 1:]) / math.sqrt(D)
    s = np.where(np.tril(np.ones((L, L), bool)), s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(got, p @ v, rtol=0, atol=tolerance(real, 2e-5))


def test_sinusoids() -> None:
    """The variants in use: 2 layouts, 2 exponent rules, a start."""
    p, d = 7, 10
    paper = relpos.Sinusoidal(d).table(9)
    for c in range(d // 2):
        angle = p * 10000 ** (-2 * c / d)
        assert paper[p, 2 * c] == pytest.approx(math.sin(angle), abs=1e-6)
        assert paper[p, 2 * c + 1] == pytest.approx(math.cos(angle), abs=1e-6)
    halves = relpos.Sinusoidal(d, layout="halves").table(9)
    np.testing.assert_array_equal(halves[:, : d // 2], paper[:, 0::2])
    np.testing.assert_array_equal(halves[:, d // 2 :], paper[:, 1::2])
    t2t = relpos.Sinusoidal(d, layout="halves", exponent="t2t").table(9)
    for c in range(d // 2):
        angle = p * 10000 ** (-c / (d // 2 - 1))
        assert t2t[p, c] == pytest.approx(math.sin(angle), abs=1e-6)
        assert t2t[p, d // 2 + c] == pytest.approx(math.cos(angle), abs=1e-6)
    assert math.asin(sinusoid([1], d, layout="halves", exponent="t2t")[0, d // 2 - 1]) == (
        pytest.approx(1e-4, rel=1e-12)  # the last timescale is exactly 10000
    )
    odd = relpos.Sinusoidal(7, layout="halves", exponent="t2t").table(3)
    assert odd.shape == (3, 7) and not odd[:, 6].any()
    later = relpos.Sinusoidal(d, start=2).table(4, offset=3)
    np.testing.assert_array_equal(later, paper[5:9])
    assert paper.dtype == np.float32
    assert relpos.Sinusoidal(5).table(2).shape == (2, 5)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint16, np.uint32, np.uint64])
def test_integers_of_numpy_are_those_of_python(kind: type) -> None:
    """Whatever has to be computed with them on the way, and however little they hold."""
    rows = 300
    q = np.random.default_rng(5).standard_normal((1, H, rows, D), np.float32)
    draw = np.random.default_rng(6).standard_normal
    bias, weight = draw((32, H), np.float32), draw((H * D, 4), np.float32)
    table = draw((2 * 64, D), np.float32)
    for make in (
        lambda x: relpos.T5Bias(bias, max_distance=x(100)),
        lambda x: relpos.TransformerXL(weight, clamp_len=x(100)),
        lambda x: relpos.DeBERTa(table, table, buckets=x(64), max_position=x(120)),
        lambda x: relpos.Plane(relpos.T5Bias(bias), relpos.T5Bias(bias), width=x(20)),
        lambda x: relpos.RoPE(width=x(2)),
    ):
        found = relpos.attention(q, q, q, position=make(kind))
        expected = relpos.attention(q, q, q, position=make(int))
        np.testing.assert_array_equal(found, expected)
    waves = relpos.Sinusoidal(kind(8), start=kind(120)).table(2, offset=kind(100))
    np.testing.assert_array_equal(waves, relpos.Sinusoidal(8, start=120).table(2, offset=100))
    for exponent in ("vaswani", "t2t"):
        found = sinusoid([3, 5], kind(101), exponent=exponent, base=kind(100))
        np.testing.assert_array_equal(found, sinusoid([3, 5], 101, exponent=exponent, base=100.0))
    learned = relpos.LearnedAbsolute(np.zeros((300, 4), np.float32))
    assert learned.table(kind(100), offset=kind(120)).shape == (100, 4)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_tables_that_are_matrices() -> None:
    """np.matrix has products and axes of its own, for the schemes that compute with tables."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 4, 6)).astype(np.float32)
    bias, weight, u = (rng.standard_normal(s).astype(np.float32) for s in ((8, 2), (12, 4), (2, 6)))
    for make, tables in (
        (lambda t: relpos.T5Bias(t, bias_scale=0.5), (bias,)),
        (lambda w, u: relpos.TransformerXL(w, u), (weight, u)),
    ):
        found = []
        for kind in (np.asarray, np.asmatrix):
            out, ctx = relpos.attention_forward(q, q, q, position=make(*map(kind, tables)))
            gradients = relpos.attention_backward(ctx, out)
            found.append([out, *gradients.values()])
        for own, plain in zip(*found, strict=True):
            np.testing.assert_array_equal(own, plain)


def test_learned_positions() -> None:
    table = np.arange(12, dtype=np.float32).reshape(6, 2)
    learned = relpos.LearnedAbsolute(table)
    assert np.shares_memory(learned.table(3, 1), table)
    np.testing.assert_array_equal(learned.table(3, 1), table[1:4])
    gradient = learned.gradient(np.ones((5, 3, 2), np.float32), 1)
    np.testing.assert_array_equal(gradient[:, 0], [0, 5, 5, 5, 0, 0])
    with pytest.raises(ValueError, match="^embedding: 6 rows, but position 6 is asked for$"):
        learned.table(4, 3)


@pytest.mark.parametrize(
    ("d", "offset", "error", "sentence"),
    [
        (
            np.ones((3, 1)),
            0,
            ValueError,
            "d: expected floats (..., n, d_model=2), got float64 (3, 1)",
        ),
        (np.ones(2), 0, ValueError, "d: expected floats (..., n, d_model=2), got float64 (2,)"),
        (
            np.ones(2, np.int8),
            0,
            TypeError,
            "d: expected floats (..., n, d_model=2), got int8 (2,)",
        ),
        ([[1.0, 2.0]], 0, TypeError, "d: expected floats (..., n, d_model=2), got list"),
        (np.ones((3, 2)), 4, ValueError, "d: expected rows for positions below 6, got one for 6"),
        (np.ones((3, 2)), -1, ValueError, "offset: expected 0 or more, got -1"),
    ],
)
def test_learned_positions_refuse(
    d: Any, offset: int, error: type[Exception], sentence: str
) -> None:
    learned = relpos.LearnedAbsolute(np.zeros((6, 2), np.float32))
    with pytest.raises(error) as caught:
        learned.gradient(d, offset)
    assert type(caught.value) is error and str(caught.value) == sentence


@pytest.mark.parametrize("axes", [(N, N), (1, N, N), (1, 1, N, N), (B, 1, N, N)])
def test_a_mask_for_all_sequences_or_heads(real: Any, axes: tuple[int, ...]) -> None:
    q, k, v, _ = activations(real)
    seen = np.random.default_rng(3).random((N, N)) < 0.6
    every = np.ascontiguousarray(np.broadcast_to(seen, (B, H, N, N)))
    mask = np.ascontiguousarray(np.broadcast_to(seen, axes))
    np.testing.assert_array_equal(
        relpos.attention(q, k, v, mask=mask), relpos.attention(q, k, v, mask=every)
    )


def test_rope_turns_alike_up_to_an_order_of_columns(real: Any) -> None:
    q, k, v, _ = activations(real)
    order = np.arange(D).reshape(2, D // 2).T.reshape(-1)  # (c, c + D/2) side by side
    half = relpos.attention(q, k, v, position=relpos.RoPE())
    paired = relpos.attention(
        *(np.ascontiguousarray(x[..., order]) for x in (q, k)),
        v,
        position=relpos.RoPE(pairing="interleaved"),
    )
    np.testing.assert_allclose(half, paired, rtol=0, atol=tolerance(real, 1e-5))


def test_rope_with_turned_keys(real: Any) -> None:
    """A cache keeps turned keys: each is turned once, when it comes."""
    q, k, v, dout = activations(real)
    plain = relpos.RoPE(width=6)
    kept = relpos.RoPE(width=6, rotate_keys=False)
    cache = np.concatenate(
        [relpos.rotate(np.ascontiguousarray(k[:, :, i : i + 1]), plain, start=i) for i in range(N)],
        axis=2,
    )
    np.testing.assert_array_equal(cache, relpos.rotate(k, plain, positions=range(N)))
    expected, ctx = relpos.attention_forward(q, k, v, position=plain)
    got, other = relpos.attention_forward(q, cache, v, position=kept)
    np.testing.assert_array_equal(got, expected)
    # the gradient of turned keys, turned back, is that of the keys
    one, two = (relpos.attention_backward(c, dout).k for c in (ctx, other))
    back = relpos.rotate(two, plain, positions=-np.arange(N))
    np.testing.assert_allclose(back, one, rtol=0, atol=tolerance(real, 1e-5))


# --------------------------------------------------------------------------------------------------
# Options of a call
# --------------------------------------------------------------------------------------------------


def test_labels_of_a_band_are_the_band(real: Any) -> None:
    q, k, v, dout = activations(real)
    tables = parameters(EXAMPLES["shaw"], real)
    d = np.arange(N)[None] - np.arange(N)[:, None]
    labels = (np.clip(d, -2, 2) + 2).astype(np.int16)
    i, j = (x.reshape(-1) for x in np.indices((N, N)))
    shuffled = np.random.default_rng(0).permutation(B * N * N)
    edges = relpos.EdgeList(
        *(np.tile(x, B)[shuffled] for x in (i, j, labels.reshape(-1))),
        np.repeat(np.arange(B), N * N)[shuffled],
    )
    results = []
    for position in (
        relpos.Shaw(**tables),
        relpos.ShawGraph(**tables, labels=labels),
        relpos.ShawGraph(**tables, edges=edges),
    ):
        out, ctx = relpos.attention_forward(q, k, v, position=position)
        results.append((out, relpos.attention_backward(ctx, dout)))
    for out, gradients in results[1:]:
        np.testing.assert_allclose(out, results[0][0], rtol=0, atol=tolerance(real, 1e-5))
        for name, gradient in gradients.items():
            expected = results[0][1][name]
            np.testing.assert_allclose(gradient, expected, rtol=0, atol=tolerance(real, 1e-4))


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_alibi_over_far_positions_makes_no_row_for_each_distance(
    learned: bool, batches: bool, real: Any
) -> None:
    """2 H (2^30 - 1) rows would be 17 GB and more; the pairs of the call have 180 distances."""
    import tracemalloc

    rng = np.random.default_rng(5)
    n, m, far = 9, 10, 2**30 - 1
    places = [rng.integers(-far, far, (B, x) if batches else x) for x in (n, m)]
    places[0][..., 0], places[1][..., -1] = -far, far
    q, k, v = (rng.standard_normal((B, H, x, D)).astype(real) for x in (n, m, m))
    dout = rng.standard_normal((B, H, n, D)).astype(real)
    slopes = (rng.random(H) * 1e-9).astype(real)
    scheme = relpos.ALiBi(slopes if learned else None)
    tracemalloc.start()
    out, ctx = relpos.attention_forward(
        q, k, v, position=relpos.CrossPositions(scheme, *places), lengths=[n, n - 2],
        key_lengths=[m - 1, m], causal=False,
    )  # fmt: skip
    gradients = relpos.attention_backward(ctx, dout)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    used = np.asarray(slopes if learned else alibi_slopes(H), np.float64)
    apart = np.abs(places[1][..., None, :] - places[0][..., :, None]).astype(np.float64)
    apart = np.broadcast_to(apart, (B, n, m))[:, None]
    scores = q.astype(np.float64) @ k.swapaxes(2, 3) / math.sqrt(D) - used[:, None, None] * apart
    for b, length in enumerate((m - 1, m)):
        scores[b, :, :, length:] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = p @ v
    expected[1, :, n - 2 :] = 0
    np.testing.assert_allclose(out, expected, atol=tolerance(real, 1e-5), rtol=0)
    if not learned:
        return
    dout[1, :, n - 2 :] = 0
    ds = p * (dout @ v.swapaxes(2, 3) - (dout * expected).sum(-1, keepdims=True))
    dslopes = -(ds * apart).sum((0, 2, 3))
    np.testing.assert_allclose(
        gradients.slopes, dslopes, rtol=tolerance(real, 1e-5), atol=far * 1e-5
    )


def single_pairs(kind: str, random: np.random.Generator) -> Any:
    """A scheme that gives the only pair several numbers: they add up to less than they are."""
    if kind == "edges":
        table = random.standard_normal((15, 16)).astype(np.float32)
        nowhere = np.zeros(40, np.int64)
        return relpos.ShawGraph(
            table, edges=relpos.EdgeList(nowhere, nowhere, random.integers(0, 15, 40))
        )
    large, small = (np.float32(x * random.standard_normal()) for x in (100, 1))
    return tuple(
        relpos.ShawGraph(bias_table=np.array([x], np.float32), labels=np.zeros((1, 1), np.int8))
        for x in (large, small - large)
    )


@pytest.mark.parametrize("kind", ["edges", "biases"])
def test_a_single_key_has_all_the_weight(kind: str) -> None:
    """But for how the log-sum-exp is rounded, and exp2's error: a sum that forward and backward
    begin with other numbers has two values, and the weight is off by their difference."""
    random = np.random.default_rng(0)
    one = np.ones((1, 1, 1, 1), np.float32)
    for _ in range(200):
        q, k = random.standard_normal((2, 1, 1, 1, 16)).astype(np.float32)
        _, context = relpos.attention_forward(q, k, one, position=single_pairs(kind, random))
        weight = relpos.attention_backward(context, one).v.item()
        assert abs(weight - 1) <= 4 * 2.0**-24 * (1 + abs(context.lse.item()))


def test_t5_by_label(real: Any) -> None:
    q, k, v, _ = activations(real)
    table = parameters(EXAMPLES["t5"], real)["bias_table"]
    d = np.arange(N)[None] - np.arange(N)[:, None]
    labels = t5_buckets(d, 12, 10).astype(np.int32)
    graph = relpos.ShawGraph(bias_table=np.ascontiguousarray(table.T), labels=labels)
    np.testing.assert_allclose(
        relpos.attention(q, k, v, position=graph, scale=1.0),
        relpos.attention(q, k, v, position=relpos.T5Bias(table, max_distance=10)),
        rtol=0,
        atol=tolerance(real, 1e-5),
    )


def test_masks_and_windows(real: Any) -> None:
    q, k, v, _ = activations(real)
    d = np.arange(N)[None] - np.arange(N)[:, None]
    inside = (d >= -3) & (d <= 1)
    expected = relpos.attention(q, k, v, mask=inside)
    close = {"rtol": 0, "atol": tolerance(real, 1e-5)}
    np.testing.assert_allclose(relpos.attention(q, k, v, window=(3, 1)), expected, **close)
    tall = np.broadcast_to(inside, (B, H, N, N))
    np.testing.assert_allclose(relpos.attention(q, k, v, mask=tall), expected, **close)
    np.testing.assert_allclose(relpos.attention(q, k, v, mask=tall[:, 0]), expected, **close)
    causal = relpos.attention(q, k, v, window=(None, 0))
    np.testing.assert_allclose(relpos.attention(q, k, v, causal=True), causal, **close)
    both = relpos.attention(q, k, v, window=2)
    np.testing.assert_allclose(relpos.attention(q, k, v, mask=abs(d) <= 2), both, **close)
    pack = [np.concatenate([x[b].swapaxes(0, 1) for b in range(B)]) for x in (q, k, v)]
    packed = relpos.attention(*pack, mask=[inside] * B, offsets=[0, N, 2 * N])
    for b in range(B):
        part = packed[b * N : (b + 1) * N].swapaxes(0, 1)
        np.testing.assert_allclose(part, expected[b], **close)


def test_softcap_and_scale(real: Any) -> None:
    q, k, v, _ = activations(real)
    s = 0.8 * q.astype(np.float64) @ k.swapaxes(2, 3)
    p = np.exp(2 * np.tanh(s / 2))
    p /= p.sum(axis=-1, keepdims=True)
    got = relpos.attention(q, k, v, scale=0.8, softcap=2.0)
    np.testing.assert_allclose(got, p @ v, rtol=0, atol=tolerance(real, 2e-5))
    # a scale of the call goes before that of the scheme
    table = np.zeros((12, H), real)
    got = relpos.attention(q, k, v, position=relpos.T5Bias(table), scale=0.8, softcap=2.0)
    np.testing.assert_allclose(got, p @ v, rtol=0, atol=tolerance(real, 2e-5))


def test_dropout_goes_by_the_seed(real: Any) -> None:
    q, k, v, _ = activations(real)
    first = relpos.attention(q, k, v, dropout=0.3, seed=5)
    np.testing.assert_array_equal(first, relpos.attention(q, k, v, dropout=0.3, seed=5))
    assert (first != relpos.attention(q, k, v, dropout=0.3, seed=6)).any()
    assert (first != relpos.attention(q, k, v)).any()
    words = relpos.reference.philox4x32(
        np.zeros(4, np.uint64), np.array([5, 0], np.uint64), rounds=10
    )
    named = (int(words[0]), int(words[1]), 0, 0)
    np.testing.assert_array_equal(first, relpos.attention(q, k, v, dropout=0.3, seed=named))
    np.testing.assert_array_equal(
        relpos.attention(q[1:], k[1:], v[1:], dropout=0.3, seed=(*named[:3], 1)), first[1:]
    )
