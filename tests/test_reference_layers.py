# SPDX-License-Identifier: Apache-2.0
"""The oracle of the layers itself: gradients by finite differences, values by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from relpos.reference import Dropout, layers, philox4x32

OFFSETS, ORDINALS = [0, 3, 3, 4, 9], [7, 2**32 - 1, 0, 12]
ROWS, C = 9, 21


def differences(f: Callable[[], float], x: np.ndarray) -> np.ndarray:
    """df/dx by (8 (f(+h) - f(-h)) - (f(+2h) - f(-2h))) / 12h, error h^4 f^(5) / 30."""
    h, result = 2.0**-10, np.empty_like(x)
    for index in np.ndindex(x.shape):
        before, values = x[index], []
        for offset in (1, -1, 2, -2):
            x[index] = before + offset * h
            values.append(f())
        x[index] = before
        result[index] = (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * h)
    return result


def check_gradient(
    f: Callable[[], np.ndarray], dout: np.ndarray, x: np.ndarray, dx: object
) -> None:
    """dx is the gradient of sum(f() * dout) by x."""
    expected = differences(lambda: float((f() * dout).sum()), x)
    np.testing.assert_allclose(np.asarray(dx), expected, rtol=1e-8, atol=1e-9)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture
def keep() -> np.ndarray:
    return layers.packed_keep(Dropout(0.25, (1, 2), 3), OFFSETS, ORDINALS, C)


# ---- dropout -------------------------------------------------------------------------------------


def test_keep_is_the_byte_of_its_place() -> None:
    dropout = Dropout(0.3, (11, 12), 13)
    keep = layers.packed_keep(dropout, OFFSETS, ORDINALS, C)
    assert keep.shape == (ROWS, C)
    for row, ordinal, place in [(0, 7, 0), (2, 7, 2), (3, 0, 0), (4, 12, 0), (8, 12, 4)]:
        for column in (0, 5, 15, 16, 20):
            counter = np.array([column // 16, place, ordinal, 13])
            words = philox4x32(counter, np.array([11, 12]))
            byte = int(words[column % 16 // 4]) >> (8 * (column % 4)) & 255
            assert keep[row, column] == (256 / (256 - 77) if byte >= 77 else 0)


def test_places() -> None:
    np.testing.assert_array_equal(layers.packed_places(OFFSETS), [0, 1, 2, 0, 0, 1, 2, 3, 4])
    assert layers.packed_places([0]).shape == (0,)
    assert layers.packed_keep(Dropout(0.1, (0, 0)), [0], [], 5).shape == (0, 5)


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("positioned", [False, True])
def test_embed(random: np.random.Generator, keep: np.ndarray, positioned: bool) -> None:
    ids = random.integers(0, 4, ROWS)
    table, dout = random.normal(size=(5, C)), random.normal(size=(ROWS, C))
    positions = random.normal(size=(6, C)) if positioned else None
    places = layers.packed_places(OFFSETS) if positioned else None
    more = (1.5, positions, places, keep)
    dtable, dpositions = layers.embed_backward(ids, table, dout, *more)
    check_gradient(lambda: layers.embed(ids, table, *more), dout, table, dtable)
    assert not dtable[4].any()
    if positions is None:
        assert dpositions is None
    else:
        check_gradient(lambda: layers.embed(ids, table, *more), dout, positions, dpositions)
        assert dpositions is not None and not dpositions[5].any()


def test_residual(random: np.random.Generator, keep: np.ndarray) -> None:
    x, f, dout = random.normal(size=(3, ROWS, C))
    dx, df = layers.residual_backward(dout, keep)
    check_gradient(lambda: layers.residual(x, f, keep), dout, x, dx)
    check_gradient(lambda: layers.residual(x, f, keep), dout, f, df)


def test_norm(random: np.random.Generator) -> None:
    x, dy = random.normal(size=(2, ROWS, C))
    gain, shift = random.normal(size=(2, C))
    dx, dgain, dshift = layers.norm_backward(x, gain, dy, 1e-2)
    for array, gradient in ((x, dx), (gain, dgain), (shift, dshift)):
        check_gradient(lambda: layers.norm(x, gain, shift, 1e-2), dy, array, gradient)
    np.testing.assert_allclose(dx.sum(axis=1), 0, atol=1e-13)  # a constant changes nothing


@pytest.mark.parametrize("kind", ["relu", "gelu", "swiglu"])
def test_activation(random: np.random.Generator, keep: np.ndarray, kind: str) -> None:
    forward, backward = getattr(layers, kind), getattr(layers, f"{kind}_backward")
    h = 3 * random.normal(size=(ROWS, 2 * C if kind == "swiglu" else C))
    h[np.abs(h) < 0.01] = 0.5  # clear of ReLU's corner
    da = random.normal(size=(ROWS, C))
    check_gradient(lambda: forward(h, keep), da, h, backward(h, da, keep))


@pytest.mark.parametrize("rule", ["all", "others"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [1, 2, C])
def test_cross_entropy(
    random: np.random.Generator, classes: int, smoothing: float, rule: layers.Smoothing
) -> None:
    logits = 2 * random.normal(size=(ROWS, classes))
    labels = random.integers(0, classes, ROWS)
    labels[[1, 5]] = -1
    gradient = layers.cross_entropy_backward(logits, labels, smoothing, rule)
    np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-14)

    def losses() -> np.ndarray:
        return layers.cross_entropy(logits, labels, smoothing, rule).loss

    check_gradient(losses, np.ones(ROWS), logits, gradient)


# ---- values --------------------------------------------------------------------------------------


def test_norm_by_hand() -> None:
    y = layers.norm(np.array([[1.0, 2, 3, 6]]), np.array([1.0, 1, 1, 2]), np.ones(4), 0.5)
    np.testing.assert_array_equal(y, [[0, 0.5, 1, 4]])  # mean 3, variance 3.5


def test_activations_by_hand() -> None:
    x = np.array([[-1.0, 0, 1]])
    np.testing.assert_array_equal(layers.relu(x), [[0, 0, 1]])
    np.testing.assert_allclose(layers.gelu(x), [[-0.15865525393145705, 0, 0.84134474606854295]])
    h = np.concatenate([x, 2 * np.ones((1, 3))], axis=1)
    np.testing.assert_allclose(layers.swiglu(h), [[-0.5378828427399902, 0, 1.4621171572600098]])
    np.testing.assert_array_equal(layers.logistic(np.array([-1e9, 1e9])), [0, 1])


def test_labels_by_hand() -> None:
    labels = np.array([1, -1])
    np.testing.assert_allclose(
        layers.smoothed(labels, 4, 0.2, "all"), [[0.05, 0.85, 0.05, 0.05], [0, 0, 0, 0]]
    )
    np.testing.assert_allclose(
        layers.smoothed(labels, 3, 0.2, "others"), [[0.1, 0.8, 0.1], [0, 0, 0]]
    )


def test_cross_entropy_by_hand() -> None:
    """Equal logits cost log V under every smoothing; of equals, the first is a hit."""
    labels = np.array([0, 3, -1])
    result = layers.cross_entropy(np.full((3, 8), 700.0), labels, 0.3)
    np.testing.assert_allclose(result.loss, [np.log(8), np.log(8), 0])
    np.testing.assert_allclose(result.nll, [np.log(8), np.log(8), 0])
    np.testing.assert_array_equal(result.hit, [True, False, False])
    p = layers.cross_entropy(np.log([[1.0, 3.0]]), np.array([1]))
    np.testing.assert_allclose(p.nll, -np.log([0.75]))


def test_adam_by_hand() -> None:
    """The first step is the rate, against the gradient; none at all without one."""
    constants = layers.Adam(rate=0.25, epsilon=0.0, decay=0.1)
    w = np.array([1.0, -2.0])
    after, m, v = layers.adam(constants, 1, w, np.array([3.0, -5.0]), np.zeros(2), np.zeros(2))
    np.testing.assert_allclose(after, [1 - 0.25 - 0.025, -2 + 0.25 + 0.05])
    np.testing.assert_allclose(m, [0.3, -0.5])
    np.testing.assert_allclose(v, [0.18, 0.5])
    second, _, _ = layers.adam(constants._replace(decay=0.0), 2, after, np.zeros(2), m, v)
    mean, square = 0.27 / (1 - 0.81), 0.1764 / (1 - 0.98**2)
    np.testing.assert_allclose(second[0], after[0] - 0.25 * mean / np.sqrt(square))
    still, _, _ = layers.adam(layers.Adam(rate=1.0), 1, w, np.zeros(2), np.zeros(2), np.zeros(2))
    np.testing.assert_array_equal(still, w)
