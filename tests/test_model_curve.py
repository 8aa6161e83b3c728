# SPDX-License-Identifier: Apache-2.0
"""Ten training steps reproduce a stored loss curve, whatever has been changed since it was stored.

tests/golden/loss_curve.json has the losses and norms of libcore_f64. Initial weights, dropout, loss,
clipping, Adam and schedule all enter: a change of any of them changes the curve, and users' runs.
One that is meant is stored anew by `python tests/test_model_curve.py`, and told in the changelog.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capi import CORES, Core, core_by_name
from cores import get_core
from model_capi import Config, Model, Sentences

CURVE = Path(__file__).parent / "golden" / "loss_curve.json"
STEPS = 10
CHANGES: dict[str, Any] = {
    "width": 32, "heads": 4, "feed_forward": 48, "source_vocabulary": 40, "target_vocabulary": 40,
    "max_length": 20, "encoder.layers": 2, "decoder.layers": 2, "encoder.k": 4, "decoder.k": 4,
    "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1, "label_smoothing": 0.1,
    "schedule": "noam", "learning_rate": 1.0, "warmup": 6, "clip_norm": 0.5, "adam_epsilon": 1e-6,
    "ema": 0.9, "seed": 11,
}  # fmt: skip
SENTENCES = 12
STAGES = 60  # results that are rounded one after the other in a step, for every token on its own


def batch(step: int) -> Sentences:
    """The target is the source turned around."""
    rng = np.random.default_rng([1803, step])
    source = [rng.integers(3, 40, rng.integers(1, 19)).tolist() for _ in range(SENTENCES)]
    target = [[1, *sentence[::-1]] for sentence in source]
    return Sentences(source, target, [[*sentence[1:], 2] for sentence in target])


def curve(core: Core, nudge: float = 0, **changes: Any) -> Any:
    """[STEPS, 2]: losses and norms; initial weights are moved by so much of themselves."""
    rng = np.random.default_rng(9)
    with Model(Config(core, "tiny", CHANGES | changes), tokens=512) as model:
        for weights in model.weights.values():
            weights *= 1 + nudge * rng.standard_normal(weights.shape)
        results = [model.step(batch(step)) for step in range(STEPS)]
        return np.array([(result.loss, result.gradient_norm) for result in results])


def stored() -> Any:
    return np.array(json.loads(CURVE.read_text())["loss and norm"])


@functools.lru_cache
def sensitivity(path: Path) -> Any:
    """How far a move of every weight by one part of itself moves the curve, to first order.

    The largest so far: a move may cancel by chance in one step, not in all of them.
    """
    nudge = 2.0**-30
    core = core_by_name({"f64": path}, "f64")
    return np.maximum.accumulate(np.abs(curve(core, nudge) - curve(core)) / nudge)


def error(libraries: dict[str, Path], name: str, **changes: Any) -> Any:
    """Of a core's curve, in units of what is allowed.

    Weights are rounded once a step: a move of all by half an ulp. Stages round as much again each,
    but tokens independently, so that of their sum over T tokens only STAGES / T moves are left. Four
    deviations of all these, for losses and norms of about the size that they have.
    """
    core, expected = get_core(libraries, name), stored()
    unit = float(np.finfo(core.dtype).eps) / 2
    tokens = min(batch(step).rows for step in range(STEPS))
    moves = STEPS * (1 + STAGES / tokens)
    allowed = 4 * np.sqrt(moves) * unit * (sensitivity(libraries["f64"]) + expected)
    return np.abs(curve(core, **changes) - expected) / allowed


@pytest.mark.parametrize("name", ["f64", *CORES])
def test_ten_steps_are_as_they_were(libraries: dict[str, Path], name: str) -> None:
    found = error(libraries, name)
    assert found.max() <= 1, found.round(2).tolist()


@pytest.mark.parametrize(
    "change",
    [{"seed": 12}, {"warmup": 7}, {"dropout": 0.105}, {"clip_norm": 0.501}, {"encoder.k": 3}]
    + [{"beta2": 0.9801}, {"label_smoothing": 0.101}, {"decoder.per_head": False}],
    ids=str,
)
def test_a_small_change_is_seen(libraries: dict[str, Path], change: dict[str, Any]) -> None:
    assert error(libraries, "f64", **change).max() > 1


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    double = core_by_name({"f64": root / "build" / "f64" / "libcore_f64.so"}, "f64")
    numbers = [[repr(x) for x in row] for row in curve(double).tolist()]
    lines = ",\n".join("  [" + ", ".join(row) + "]" for row in numbers)
    CURVE.write_text('{"loss and norm": [\n' + lines + "\n]}\n")
