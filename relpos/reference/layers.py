# SPDX-License-Identifier: Apache-2.0
"""What a Transformer computes between its products and its attention, in plain float64 NumPy.

Rows are the tokens of packed sentences, end to end. Forward takes arrays and gives its result;
backward takes forward's inputs and the gradient `d...` of the result, and gives those of the inputs.
`keep` is what dropout multiplies a result with, number by number (packed_keep; 1.0: no dropout):

    embed       out_r = keep * (scale table[id_r] + positions[place of r in its sentence])
    residual    out = x + keep f
    norm        y = xhat gain + shift,   xhat = (x - mean) / sqrt(variance + epsilon), row by row
    relu        a = keep max(h, 0)
    gelu        a = keep h P(h),         P: the share of the standard normal below h
    swiglu      a = keep x s(x) y,       h = (x, y),  s(x) = 1 / (1 + e^-x)
    cross_entropy   loss_r = -sum_c y_c log softmax(logits_r)_c,   y: the smoothed label
    adam        one step of the optimiser
    wave_table  row d of a head = W R(-d),  R(t) = (sin t w, cos t w):  Transformer-XL's positions

Nothing in this file is fast, and nothing in it shares code with the core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .attention import Array, Dropout, dropout_factors

Smoothing = Literal["all", "others"]


def packed_keep(
    dropout: Dropout, offsets: Sequence[int], ordinals: Sequence[int], columns: int
) -> Array:
    """0 or 256 / (256 - threshold) for every number of a packed matrix; float64 (rows, columns).

    Row offsets[b] + i is row i of the sentence with ordinal ordinals[b], and column / 16 its block.
    """
    factors: list[Array] = [np.empty((0, columns))]
    for b, ordinal in enumerate(ordinals):
        sentence = dropout._replace(first=int(ordinal))
        factors.append(dropout_factors(sentence, 0, 0, offsets[b + 1] - offsets[b], columns))
    return np.concatenate(factors)


def packed_places(offsets: Sequence[int]) -> npt.NDArray[np.int64]:
    """The place of every row within its sentence: offsets 0 3 3 5 give 0 1 2 0 1."""
    sizes = np.diff(offsets)
    return np.arange(offsets[-1]) - np.repeat(np.asarray(offsets[:-1], np.int64), sizes)


def embed(
    ids: Array,
    table: Array,
    scale: float = 1.0,
    positions: Array | None = None,
    places: Array | None = None,
    keep: Array | float = 1.0,
) -> Array:
    """keep * (scale * table[ids] + positions[places]): (rows, C)."""
    out = scale * table[ids]
    if positions is not None and places is not None:
        out = out + positions[places]
    return np.asarray(keep * out)


def embed_backward(
    ids: Array,
    table: Array,
    dout: Array,
    scale: float = 1.0,
    positions: Array | None = None,
    places: Array | None = None,
    keep: Array | float = 1.0,
) -> tuple[Array, Array | None]:
    """dtable and dpositions (None without): rows that were taken twice get two gradients."""
    d = keep * dout
    dtable = np.zeros_like(table)
    np.add.at(dtable, ids, scale * d)
    if positions is None or places is None:
        return dtable, None
    dpositions = np.zeros_like(positions)
    np.add.at(dpositions, places, d)
    return dtable, dpositions


def residual(x: Array, f: Array, keep: Array | float = 1.0) -> Array:
    """x + keep * f."""
    return np.asarray(x + keep * f)


def residual_backward(dout: Array, keep: Array | float = 1.0) -> tuple[Array, Array]:
    """dx and df."""
    return dout, np.asarray(keep * dout)


def _normal(x: Array, epsilon: float) -> tuple[Array, Array]:
    """xhat, and 1 / sqrt(variance + epsilon) of every row."""
    centred = x - x.mean(axis=1, keepdims=True)
    rstd = 1 / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + epsilon)
    return centred * rstd, rstd


def norm(x: Array, gain: Array, shift: Array | None = None, epsilon: float = 1e-5) -> Array:
    """xhat * gain + shift: every row of x gets mean 0 and variance 1, then gain and shift."""
    y = _normal(x, epsilon)[0] * gain
    return np.asarray(y if shift is None else y + shift)


def norm_backward(
    x: Array, gain: Array, dy: Array, epsilon: float = 1e-5
) -> tuple[Array, Array, Array]:
    """dx, dgain, dshift. Every x of a row moves its mean and variance:

    dx = rstd * (g - mean(g) - xhat mean(g xhat)),  g = dy gain
    """
    xhat, rstd = _normal(x, epsilon)
    g = dy * gain
    mean_g = g.mean(axis=1, keepdims=True)
    mean_gx = (g * xhat).mean(axis=1, keepdims=True)
    dx = np.asarray(rstd * (g - mean_g - xhat * mean_gx))
    return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


def relu(h: Array, keep: Array | float = 1.0) -> Array:
    """keep * max(h, 0)."""
    return np.asarray(keep * np.maximum(h, 0))


def relu_backward(h: Array, da: Array, keep: Array | float = 1.0) -> Array:
    """The gradient passes where h is positive."""
    return np.where(h > 0, keep * da, 0.0)


def normal_share(x: Array) -> Array:
    """P(x), the share of the standard normal distribution below x."""
    values = [math.erfc(-value / math.sqrt(2)) / 2 for value in np.ravel(x)]
    return np.array(values).reshape(np.shape(x))


def gelu(h: Array, keep: Array | float = 1.0) -> Array:
    """keep * h P(h)."""
    return np.asarray(keep * h * normal_share(h))


def gelu_backward(h: Array, da: Array, keep: Array | float = 1.0) -> Array:
    """da * keep * (P(h) + h p(h)), with p = P' the density."""
    density = np.exp(-np.square(h) / 2) / math.sqrt(2 * math.pi)
    return np.asarray((normal_share(h) + h * density) * keep * da)


def logistic(x: Array) -> Array:
    """1 / (1 + e^-x), where e^-x may not overflow."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x < 0, e, 1.0) / (1 + e))


def swiglu(h: Array, keep: Array | float = 1.0) -> Array:
    """keep * x s(x) y, from the halves of the columns of h (rows, 2 F): (rows, F)."""
    x, y = np.split(h, 2, axis=1)
    return np.asarray(keep * x * logistic(x) * y)


def swiglu_backward(h: Array, da: Array, keep: Array | float = 1.0) -> Array:
    """(dx, dy): (rows, 2 F)."""
    x, y = np.split(h, 2, axis=1)
    s, d = logistic(x), keep * da
    return np.concatenate([s * (1 + x * (1 - s)) * y * d, x * s * d], axis=1)


def smoothed(labels: Array, classes: int, smoothing: float, rule: Smoothing = "all") -> Array:
    """y (rows, V): what is taken from the label goes to all V classes, or to the V - 1 others.

    Rows whose label is -1 do not count: 0 everywhere. One class alone is certain.
    """
    wrong = 0.0
    if classes > 1:
        wrong = smoothing / (classes if rule == "all" else classes - 1)
    y = np.full((len(labels), classes), wrong)
    counts = np.flatnonzero(labels >= 0)
    y[counts, labels[counts]] = 1 - wrong * (classes - 1)
    y[labels < 0] = 0
    return y


def log_softmax(logits: Array) -> Array:
    """logits - log sum_c exp(logits), row by row."""
    x = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))


class CrossEntropy(NamedTuple):
    """Of every row: the loss, -log p(label), and whether the label has the highest logit."""

    loss: Array
    nll: Array
    hit: Array


def cross_entropy(
    logits: Array, labels: Array, smoothing: float = 0.0, rule: Smoothing = "all"
) -> CrossEntropy:
    """Rows whose label is -1 give 0 everywhere; of equal logits the first is the highest."""
    log_p, counts = log_softmax(logits), labels >= 0
    y = smoothed(labels, logits.shape[1], smoothing, rule)
    nll = -log_p[np.arange(len(labels)), np.maximum(labels, 0)]
    hit = counts & (logits.argmax(axis=1) == labels)
    return CrossEntropy(-(y * log_p).sum(axis=1), np.where(counts, nll, 0.0), hit)


def cross_entropy_backward(
    logits: Array, labels: Array, smoothing: float = 0.0, rule: Smoothing = "all"
) -> Array:
    """The gradient of the sum of the losses: softmax - y, and 0 in rows that do not count."""
    y = smoothed(labels, logits.shape[1], smoothing, rule)
    return np.where((labels >= 0)[:, None], np.exp(log_softmax(logits)) - y, 0.0)


class Adam(NamedTuple):
    """The constants of adam. decay acts on the weights themselves, not through the moments."""

    rate: float
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    decay: float = 0.0


def adam(
    adam: Adam, step: int, weights: Array, gradient: Array, moment1: Array, moment2: Array
) -> tuple[Array, Array, Array]:
    """Weights and moments after step 1, 2, ...:

    m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
    w = w - rate * (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon) + decay w)
    """
    m = adam.beta1 * moment1 + (1 - adam.beta1) * gradient
    v = adam.beta2 * moment2 + (1 - adam.beta2) * np.square(gradient)
    mean, square = m / (1 - adam.beta1**step), v / (1 - adam.beta2**step)
    move = mean / (np.sqrt(square) + adam.epsilon) + adam.decay * weights
    return weights - adam.rate * move, m, v


def waves(places: Array, width: int) -> Array:
    """R(t) of every place t: sines, then cosines, of frequencies 10000^(-c / half); an odd last column
    is 0."""
    half = width // 2
    angles = np.asarray(places, np.float64)[:, None] * 10000.0 ** (-np.arange(half) / max(half, 1))
    unused = np.zeros((len(angles), width - 2 * half))
    return np.concatenate([np.sin(angles), np.cos(angles), unused], axis=1)


def wave_table(weight: Array, heads: int, left: int, right: int) -> Array:
    """(H, left + 1 + right, D): what every head's projection makes of the distances from -left on.

    weight: (H D, width). A key at distance d from a query stands -d places before it.
    """
    rows = waves(-np.arange(-left, right + 1), weight.shape[1]) @ np.asarray(weight, np.float64).T
    return rows.reshape(len(rows), heads, -1).transpose(1, 0, 2)


def wave_table_backward(width: int, left: int, right: int, dtable: Array) -> Array:
    """dweight."""
    drows = np.asarray(dtable, np.float64).transpose(1, 0, 2).reshape(left + 1 + right, -1)
    return drows.T @ waves(-np.arange(-left, right + 1), width)
