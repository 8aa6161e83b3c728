# SPDX-License-Identifier: Apache-2.0
"""Projected sinusoids (Transformer-XL) and the core's sinusoids, from Python.

tests/c/test_waves.c holds the kernels against the formula on every instruction set; here are the
door, and what the scheme makes of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import relpos
from relpos import _core, reference
from relpos.position import sinusoid, transformer_xl

H, D = 3, 5
SIDES = [(0, 0), (9, 0), (0, 9), (7, 3), (3, 7), (300, 257)]
UNIT = 2.0**-24


def signed(waves: Any, left: int, right: int) -> Any:
    """R_t for t from left down to -right, of those for t >= 0; nothing in an odd last column."""
    t = np.arange(left, -right - 1, -1)
    half = waves.shape[1] // 2
    sign = np.ones((len(t), waves.shape[1]))
    sign[t < 0, :half] = -1
    sign[:, 2 * half :] = 0
    return waves[np.abs(t)].astype(np.float64) * sign


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("width", [2, 7, 64])
@pytest.mark.parametrize(("left", "right"), SIDES)
def test_projection_and_its_gradient(left: int, right: int, width: int) -> None:
    """As many roundings as there are steps in the sums, each of the sum of the magnitudes."""
    weight, waves = numbers(H * D, width), numbers(max(left, right) + 1, width, seed=1)
    R = signed(waves, left, right)
    table = _core.wave_table(weight, waves, H, left, right)
    assert table.shape == (H, len(R), D) and table.dtype == np.float32

    def by_head(x: Any) -> Any:
        return x.reshape(len(R), H, D).swapaxes(0, 1)

    exact, size = by_head(R @ weight.T.astype(np.float64)), by_head(abs(R) @ abs(weight).T)
    assert (abs(table - exact) <= (width / 2 + 1) * UNIT * size).all()
    dtable = numbers(H, len(R), D, seed=2)
    dweight = _core.wave_gradient(dtable, waves, left, right)
    rows = dtable.swapaxes(0, 1).reshape(len(R), H * D).astype(np.float64)
    assert dweight.shape == weight.shape and dweight.dtype == np.float32
    bound = (max(left, right) + 4) * UNIT * (abs(rows).T @ abs(R))
    assert (abs(dweight - rows.T @ R) <= bound).all()


@pytest.mark.parametrize(("left", "right"), SIDES)
def test_the_reference(left: int, right: int) -> None:
    """The core's table, where it makes the sinusoids itself; and backward is forward's transpose."""
    width, weight = 8, numbers(H * D, 8)
    table = reference.wave_table(weight, H, left, right)
    ours = _core.wave_table(weight, width, H, left, right)
    size = abs(weight).sum(axis=1).reshape(H, 1, D)
    assert (abs(table - ours) <= (width + 2) * UNIT * size).all()
    dtable = numbers(*table.shape, seed=2)
    dweight = reference.wave_table_backward(width, left, right, dtable)
    assert dweight.shape == weight.shape
    assert (dweight * weight).sum() == pytest.approx((dtable * table).sum(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_the_scheme_is_its_table(causal: bool) -> None:
    """Shaw's key term over the table that the formula gives: the same result, and its gradient
    times the sinusoids is that of the weight; more distances than are made at a time."""
    n, width = 290, 2 * H * D
    q, k, v, dout = (numbers(1, H, n, D, seed=seed) for seed in range(4))
    weight = numbers(H * D, width, seed=5) * np.float32(width**-0.5)
    right = 0 if causal else n - 1
    R = sinusoid(np.arange(n - 1, -right - 1, -1), width, layout="halves")
    table = (R @ weight.T).reshape(len(R), H, D).swapaxes(0, 1).astype(np.float32)
    shaw = relpos.Shaw(np.ascontiguousarray(table), left=n - 1)
    xl = relpos.TransformerXL(weight)
    expected, of_shaw = relpos.attention_forward(q, k, v, position=shaw, causal=causal)
    got, of_xl = relpos.attention_forward(q, k, v, position=xl, causal=causal)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    dtable = relpos.attention_backward(of_shaw, dout)["key_table"]
    rows = dtable.swapaxes(0, 1).reshape(len(R), H * D).astype(np.float64)
    dweight = relpos.attention_backward(of_xl, dout)["position_weight"]
    bound = 1e-5 * (abs(rows).T @ abs(R)).max()
    np.testing.assert_allclose(dweight, rows.T @ R, rtol=0, atol=bound)


def test_any_strides_of_the_weight() -> None:
    q, k, v, dout = (numbers(1, H, 9, D, seed=seed) for seed in range(4))
    weight = numbers(H * D, 6, seed=5)
    turned = np.asfortranarray(weight)
    for x in (weight, turned):
        out, context = relpos.attention_forward(q, k, v, position=relpos.TransformerXL(x))
        gradient = relpos.attention_backward(context, dout)["position_weight"]
        if x is weight:
            first = out, gradient
    np.testing.assert_array_equal(out, first[0])
    np.testing.assert_array_equal(gradient, first[1])


def test_sinusoids_are_kept() -> None:
    """One table serves calls of similar lengths and both directions."""
    transformer_xl._kept_waves.cache_clear()
    xl = relpos.TransformerXL(numbers(H * D, 6))
    for n in (9, 10, 200):
        q, k, v = (numbers(1, H, n, D, seed=seed) for seed in range(3))
        for causal in (False, True):
            relpos.attention(q, k, v, position=xl, causal=causal)
    made = transformer_xl._kept_waves.cache_info()
    assert made.misses == 1 and made.hits == 5 and made.maxsize is not None


@pytest.mark.parametrize("exponent", ["vaswani", "t2t"])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("width", [1, 2, 3, 8, 9])
def test_sinusoids_are_the_formula(width: int, layout: Any, exponent: Any) -> None:
    """The core's, against NumPy's in float64: a rounding, and an angle's in double."""
    scheme = relpos.Sinusoidal(width, layout=layout, exponent=exponent, base=100.0, start=-3)
    half = width // 2
    p = np.arange(2, 9)[:, None]
    steps = width / 2 if exponent == "vaswani" else max(half - 1, 1)
    angle = p * 100.0 ** (-np.arange(half + 1) / steps)
    expected = np.zeros((7, width))
    if layout == "interleaved":
        expected[:, 0::2] = np.sin(angle)[:, : (width + 1) // 2]
        expected[:, 1::2] = np.cos(angle)[:, :half]
    else:
        expected[:, :half], expected[:, half : 2 * half] = (
            np.sin(angle[:, :half]),
            np.cos(angle[:, :half]),
        )
    table = scheme.table(7, offset=5)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, expected, rtol=0, atol=UNIT + 1e-14)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda w, r: _core.wave_table(w.astype(np.float64), r, 3, 2, 2), "weight: expected"),
        (lambda w, r: _core.wave_table(w, r[:, :4], 3, 2, 2), "waves: expected float32"),
        (lambda w, r: _core.wave_table(w, r, 3, 2, 3), "distances up to 3, got 3"),
        (lambda w, r: _core.wave_table(w, 4, 3, 2, 2), "expected the weight's width 6, got 4"),
        (lambda w, r: _core.wave_gradient(numbers(3, 5, 5), -1, 2, 2), "waves: expected 0 or more"),
        (lambda w, r: _core.wave_table(w, r, 4, 2, 2), "a divisor of the weight's 15 rows, got 4"),
        (lambda w, r: _core.wave_table(w, r, 0, 2, 2), "a divisor of the weight's 15 rows, got 0"),
        (lambda w, r: _core.wave_table(w, r, 3, -1, 2), "left: expected 0 or more, got -1"),
        (
            lambda w, r: _core.wave_table(w, 6, 3, 2**63 - 1, 0),
            r"left: expected at most 2\^40, got",
        ),
        (lambda w, r: _core.wave_gradient(w, 6, 1, 2**62), r"right: expected at most 2\^40, got"),
        (lambda w, r: _core.wave_gradient(w, r, 2, 2), "dtable: expected float32"),
        (lambda w, r: _core.wave_gradient(numbers(3, 4, 5), r, 2, 2), "dtable: expected float32"),
        (lambda w, r: _core.frequencies(-1, 10.0, False), "pairs: expected 0 or more, got -1"),
        (lambda w, r: _core.frequencies(2, 0.0, False), "base=0"),
        (lambda w, r: _core.sinusoid(-1, 4, 0, False, np.ones(2)), "rows: expected 0 or more"),
        (lambda w, r: _core.sinusoid(2, 4, 0, False, np.ones(1)), "frequencies: expected width"),
        (lambda w, r: _core.sinusoid(2, 4, 0, False, [1.0, 1.0]), "frequencies: expected float64"),
        (lambda w, r: _core.sinusoid(2, 4, 1 << 50, False, np.ones(2)), "first="),
    ],
)
def test_refused(call: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem.replace("(", r"\(")):
        call(numbers(15, 6), numbers(3, 6, seed=1))


@pytest.mark.parametrize("causal", [False, True])
def test_sinusoids_that_are_made_on_the_way(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not kept gives the same but for roundings of the sinusoids."""
    n = 1100
    q, k, v, dout = (numbers(1, H, n, D, seed=s) for s in range(4))
    scheme = relpos.TransformerXL(numbers(H * D, 8, seed=4), None, numbers(H, D, seed=5))
    results = []
    for most in (transformer_xl.MOST_KEPT, 0):
        monkeypatch.setattr(transformer_xl, "MOST_KEPT", most)
        transformer_xl._kept_waves.cache_clear()
        out, ctx = relpos.attention_forward(q, k, v, position=scheme, causal=causal)
        gradients = relpos.attention_backward(ctx, dout)
        kept = transformer_xl._kept_waves.cache_info().currsize
        assert kept == (1 if most else 0)
        results.append((out, gradients.position_weight))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * abs(one).max())


def test_long_sinusoids_are_not_kept() -> None:
    """Of 16,384 distances and d_model 1,024 they would be 64 MiB."""
    most, width = 16383, 1024
    assert transformer_xl._kept_or_made(most, width) == width
    assert transformer_xl._kept_or_made(4095, width).shape == (4096, width)
