# SPDX-License-Identifier: Apache-2.0
"""Rotary positions through the binding: numbers, properties, layouts, refusals.

Every instruction set, and double, is tests/c/test_rotate.c's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import relpos
from relpos import _core, reference

B, H, N, D = 3, 4, 70, 24
LAYOUTS = ("bhnd", "bnhd", "packed")
OFFSETS = np.array([0, 31, 31, 100], np.int64)
STARTS = np.array([0, 9000, -40], np.int64)
UNIT = float(np.finfo(np.float32).eps) / 2

Array = npt.NDArray[Any]


def frequencies(width: int, base: float = 10000.0) -> npt.NDArray[np.float64]:
    return base ** (-np.arange(0, width, 2) / max(width, 1))


def numbers(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def turn(
    x: Array,
    layout: str = "bhnd",
    *,
    out: Array | None = None,
    offsets: Array | None = None,
    lengths: Array | None = None,
    start: Array | None = None,
    positions: Array | None = None,
    width: int | None = None,
    pairing: str = "half",
    inverse: bool = False,
) -> Array:
    return _core.rotate(
        x,
        out,
        layout,
        offsets,
        lengths,
        start,
        positions,
        frequencies(x.shape[-1] if width is None else width),
        pairing == "interleaved",
        inverse,
    )


def by_complex_numbers(x: Array, positions: Array, width: int, pairing: str) -> Array:
    """(x + iy) e^(i p w) in float64; x (..., N, D), positions (N,)."""
    half = width // 2
    first, second = (slice(0, width, 2), slice(1, width, 2))
    if pairing == "half":
        first, second = slice(0, half), slice(half, width)
    result = x.astype(np.float64)
    turned = (result[..., first] + 1j * result[..., second]) * np.exp(
        1j * positions.astype(np.float64)[:, None] * frequencies(width)
    )
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def assert_near(got: Array, exact: Array) -> None:
    """Sine, cosine, two products and a sum: five roundings of numbers no larger than a pair's."""
    size = np.sqrt(np.sum(exact**2, axis=-1, keepdims=True))  # of the row: no pair is longer
    assert np.max(np.abs(got - exact) / size) < 5 * np.sqrt(2) * UNIT


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("width", [24, 10, 2, 0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formula(layout: str, width: int, pairing: str) -> None:
    options: dict[str, Any] = {"width": width, "pairing": pairing, "start": STARTS}
    if layout == "packed":
        x = numbers(100, H, D)
        got = turn(x, offsets=OFFSETS, **options)
        rows = [slice(*OFFSETS[b : b + 2]) for b in range(B)]
        pieces = [(got[r].swapaxes(0, 1), x[r].swapaxes(0, 1)) for r in rows]
    else:
        x = numbers(B, H, N, D) if layout == "bhnd" else numbers(B, N, H, D)
        got = turn(x, layout, **options)
        heads_first = [a if layout == "bhnd" else a.swapaxes(1, 2) for a in (got, x)]
        pieces = list(zip(*heads_first, strict=True))
    for b, (z, piece) in enumerate(pieces):
        positions = STARTS[b] + np.arange(piece.shape[1])
        exact = by_complex_numbers(piece, positions, width, pairing)
        if piece.size:
            assert_near(z, exact)
        assert np.array_equal(z[..., width:], piece[..., width:])
        same = reference.rotate(piece.astype(np.float64), positions, width=width, pairing=pairing)  # type: ignore[arg-type]
        np.testing.assert_allclose(same, exact, rtol=0, atol=1e-10)


def test_far_positions() -> None:
    """Angles beyond what the fast sine takes, and at its border."""
    x = numbers(1, 1, 6, D)
    positions = np.array([12_999_999, 13_000_001, 2**30, -(2**30), 2**31 - 1, 0], np.int32)
    got = turn(x, positions=positions[None])
    exact = by_complex_numbers(x, positions, D, "half")
    assert np.max(np.abs(got - exact)) < 1e-6 * 5
    assert np.array_equal(got[..., 5, :], x[..., 5, :])


def test_in_place() -> None:
    x = numbers(B, H, N, D)
    expected = turn(x, start=STARTS)
    assert turn(x, start=STARTS, out=x) is x
    both, rope = numbers(B, H, N + 1, D), relpos.RoPE()
    with pytest.raises(ValueError, match="^out: overlaps x; give x itself"):
        relpos.rotate(both[:, :, :N], rope, out=both[:, :, 1:])
    assert relpos.rotate(both[:, :, :N], rope, out=both[:, :, :N]) is not None
    assert np.array_equal(x, expected)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_inverse(pairing: str) -> None:
    """Undoes it, and is its adjoint: what backward needs."""
    x, dz = numbers(B, H, N, D), numbers(B, H, N, D, seed=1)
    z = turn(x, start=STARTS, width=20, pairing=pairing)
    dx = turn(dz, start=STARTS, width=20, pairing=pairing, inverse=True)
    undone = turn(z, start=STARTS, width=20, pairing=pairing, inverse=True)
    np.testing.assert_allclose(undone, x, rtol=0, atol=2e-6)
    left, right = np.vdot(z.astype(float), dz), np.vdot(x.astype(float), dx)
    assert abs(left - right) < 1e-6 * np.sqrt(x.size)


def test_norm() -> None:
    x = numbers(B, H, N, D)
    z = turn(x, start=STARTS)
    norms = [np.linalg.norm(a.astype(float), axis=-1) for a in (x, z)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-6)


def test_only_the_distance_counts() -> None:
    """q_i . k_j stays when both move on by the same number of places."""
    q, k = numbers(1, H, N, D), numbers(1, H, N, D, seed=1)
    scores = []
    for moved in (0, 1, 517, -3000):
        start = np.array([moved], np.int64)
        z = [turn(x, start=start).astype(float) for x in (q, k)]
        scores.append(z[0] @ z[1].swapaxes(-1, -2))
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], rtol=0, atol=1e-5)


def test_positions() -> None:
    """Explicit ones give the bits of the same ones counted; a row of them serves all sequences."""
    x = numbers(B, H, N, D)
    where = (STARTS[:, None] + np.arange(N)).astype(np.int32)
    assert np.array_equal(turn(x, positions=where), turn(x, start=STARTS))
    assert np.array_equal(turn(x, positions=where[1:2]), turn(x, start=np.full(B, STARTS[1])))
    tokens = numbers(100, H, D)
    counted = np.concatenate([STARTS[b] + np.arange(OFFSETS[b + 1] - OFFSETS[b]) for b in range(B)])
    packed = turn(tokens, offsets=OFFSETS, positions=counted.astype(np.int32))
    assert np.array_equal(packed, turn(tokens, offsets=OFFSETS, start=STARTS))


def test_lengths() -> None:
    """Rows beyond a length are zeros, whatever stood there; in place they stay."""
    lengths = np.array([N, 13, 0], np.int64)
    x = numbers(B, H, N, D)
    whole = turn(x)
    for b, n in enumerate(lengths):
        x[b, :, n:] = np.nan
    z = turn(x, lengths=lengths)
    for b, n in enumerate(lengths):
        assert np.array_equal(z[b, :, :n], whole[b, :, :n])
        assert not z[b, :, n:].any()
    turn(x, lengths=lengths, out=x)
    for b, n in enumerate(lengths):
        assert np.array_equal(x[b, :, :n], whole[b, :, :n])
        assert np.isnan(x[b, :, n:]).all()


def test_views() -> None:
    """Heads and rows of a larger array, read and written where they lie."""
    big, into = numbers(B, N, 3, H, D + 5), np.full((B, N, 2, H, D + 5), 7, np.float32)
    x, out = big[:, :, 1, :, :D], into[:, :, 1, :, :D]
    expected = turn(np.ascontiguousarray(x), "bnhd")
    assert turn(x, "bnhd", out=out) is out
    assert np.array_equal(out, expected)
    into[:, :, 1, :, :D] = 7
    assert (into == 7).all()


def test_threads() -> None:
    x = numbers(8, 8, 200, 64)
    before = relpos.get_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            relpos.set_threads(threads)
            results.append(turn(x))
    finally:
        relpos.set_threads(before)
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize("shape", [(0, H, N, D), (B, 0, N, D), (B, H, 0, D)])
def test_empty(shape: tuple[int, ...]) -> None:
    assert turn(np.empty(shape, np.float32)).shape == shape


def test_nan_stays_in_its_pair() -> None:
    x = numbers(1, 1, 2, 8)
    x[0, 0, 0, 1], x[0, 0, 1, 2] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        z = turn(x)
    assert np.flatnonzero(~np.isfinite(z)).tolist() == [1, 5, 8 + 2, 8 + 6]


@pytest.mark.parametrize(
    ("error", "sentence", "rope", "given"),
    [
        (TypeError, "rope: expected relpos.RoPE, got ALiBi", relpos.ALiBi(), {}),
        (
            ValueError,
            "start: without effect beside positions; give one of the two",
            relpos.RoPE(),
            {"start": 5, "positions": range(N)},
        ),
        (
            ValueError,
            "start: expected integers below 2^63, got 18446744073709551613",
            relpos.RoPE(),
            {"start": 2**64 - 3},
        ),
    ],
)
def test_python_refuses(
    error: type[Exception], sentence: str, rope: Any, given: dict[str, Any]
) -> None:
    with pytest.raises(error) as caught:
        relpos.rotate(numbers(B, H, N, D), rope, **given)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("error", "sentence", "change"),
    [
        (TypeError, "x: expected float32", {"x": np.zeros((B, H, N, D))}),
        (ValueError, "x: expected float32", {"x": numbers(N, H, D)}),
        (ValueError, "layout: expected 'bhnd' or 'bnhd'", {"layout": "nhd"}),
        (ValueError, "out: expected float32", {"out": numbers(B, H, N, D + 1)}),
        (ValueError, "out: elements share memory", {"out": np.zeros(D, np.float32)}),
        (TypeError, "start: expected int64", {"start": np.zeros(B, np.int32)}),
        (ValueError, "start: expected int64", {"start": np.zeros(B + 1, np.int64)}),
        (ValueError, "lengths.1.=71, must be from 0 to N=70", {"lengths": np.array([1, 71, 2])}),
        (TypeError, "positions: expected int32", {"positions": np.zeros((B, N), np.int64)}),
        (ValueError, "positions: expected int32", {"positions": np.zeros((2, N), np.int32)}),
        (
            ValueError,
            "both positions and start",
            {"positions": np.zeros((1, N), np.int32), "start": STARTS},
        ),
        (TypeError, "frequencies: expected float64", {"frequencies": np.ones(4, np.float32)}),
        (ValueError, "pairs=13, must be from 0 to 12", {"frequencies": np.ones(13)}),
        (ValueError, "frequencies.2.=inf", {"frequencies": np.array([1, 1, np.inf])}),
    ],
)
def test_refused(error: type[Exception], sentence: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "x": numbers(B, H, N, D),
        "out": None,
        "layout": "bhnd",
        "offsets": None,
        "lengths": None,
        "start": None,
        "positions": None,
        "frequencies": frequencies(D),
    }
    arguments |= change
    if "out" in change and arguments["out"].ndim == 1:
        arguments["out"] = np.broadcast_to(arguments["out"], (B, H, N, D))
        arguments["out"].flags.writeable = True
    with pytest.raises(error, match=sentence):
        _core.rotate(*arguments.values(), False, False)
