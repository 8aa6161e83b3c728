# SPDX-License-Identifier: Apache-2.0
"""The model beside the same weights in torch operations (model_torch.py), without dropout.

Loss and every gradient, for every option that changes the graph; and 20 updates. libcore_f64 agrees
to 1e-9. The float library may err three times as much as torch's float does with the same formula
in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capi import Core, core_by_name
from model_capi import Config, Model, Sentences
from test_model_gradients import BASE, CASES, both, spread

torch = pytest.importorskip("torch", reason="torch is not installed")
from model_torch import Pair, TorchModel, TorchTraining, gradients  # noqa: E402

torch.set_num_threads(1)  # threads of one tiny operation only wait for each other

NO_DROPOUT = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}
MORE: dict[str, dict[str, Any]] = {
    "sinusoids in halves": both(position="none", absolute="sinusoidal", sinusoid_first=3)
    | both(sinusoid_interleaved=False, sinusoid_rule="closed"),
    "music, values alone": both(position="music", key=False, value=True),
    "music, values shared": both(position="music", key=True, value=True)
    | both(value_per_layer=False, value_per_head=False),
    "music, tied": both(position="music", key=True, value=True, tied=True),
    "rope, linear scaling": both(position="rope", rope_scaling=3.0, rope_base=500.0),
    "t5, many buckets": both(position="t5", buckets=32, max_distance=128, per_layer=False),
}
EVERY = CASES | MORE


@pytest.fixture(scope="module")
def f64(libraries: dict[str, Path]) -> Core:
    return core_by_name(libraries, "f64")


@pytest.fixture(scope="module")
def f32(libraries: dict[str, Path]) -> Core:
    return core_by_name(libraries, "f32")


def pairs_for(changes: dict[str, Any], seed: int = 0) -> list[Pair]:
    """Sentences of 5, 1, 7, 9 and 3 tokens, one with nothing to translate, some labels uncounted."""
    rng = np.random.default_rng(seed)
    two = [changes.get(f"{stack}.layers", 2) != 0 for stack in ("encoder", "decoder")]
    made = []
    for n, m in ((5, 4), (1, 2), (7, 9), (9, 6), (3, 1), (0, 2)):
        source, target = (rng.integers(0, 11, length).tolist() for length in (n, m))
        predicted = target if two[1] else source
        labels = [-1 if rng.random() < 0.1 else int(rng.integers(0, 11)) for _ in predicted]
        graphs = [
            rng.integers(-1, 3, (size, size)) if has and changes.get(f"{stack}.relations") else None
            for size, has, stack in zip((n, m), two, ("encoder", "decoder"), strict=True)
        ]
        sides = [x if has else None for x, has in zip((source, target), two, strict=True)]
        made.append(Pair(sides[0], sides[1], labels, *graphs))
    return made


def packed(pairs: Sequence[Pair]) -> Sentences:
    """The same for the library."""
    columns = ("source", "target", "labels", "source_graph", "target_graph")
    lists = [[getattr(pair, column) for pair in pairs] for column in columns]
    return Sentences(*(None if values[0] is None else values for values in lists))


def assert_near(name: str, got: Any, exact: Any, allowed: float) -> None:
    error = float(np.max(np.abs(np.asarray(got, np.float64) - exact), initial=0.0))
    assert error <= allowed, f"{name}: off by {error:.1e}, allowed {allowed:.1e}"


def largest(x: Any) -> float:
    return float(np.max(np.abs(x), initial=0.0))


@pytest.mark.parametrize("name", EVERY)
def test_loss_and_gradients_in_double(f64: Core, name: str) -> None:
    changes = BASE | EVERY[name] | NO_DROPOUT
    pairs = pairs_for(changes)
    config = Config(f64, "tiny", changes)
    with Model(config) as model:
        spread(model)
        loss, count, exact = gradients(
            TorchModel(config.__getitem__), model.weights, pairs, torch.float64
        )
        result = model.backward(packed(pairs))
        assert result.tokens == count
        assert_near("loss", result.loss * count, loss, 1e-9 * loss)
        assert set(exact) == set(model.gradients)
        size = max(largest(g.numpy()) for g in exact.values())
        for parameter, gradient in exact.items():
            assert_near(parameter, model.gradients[parameter], gradient.numpy(), 1e-9 * size)


@pytest.mark.parametrize("name", EVERY)
def test_loss_and_gradients_in_float(f32: Core, name: str) -> None:
    changes = BASE | EVERY[name] | NO_DROPOUT
    pairs = pairs_for(changes)
    config = Config(f32, "tiny", changes)
    with Model(config) as model:
        spread(model)
        oracle = TorchModel(config.__getitem__)
        loss, count, exact = gradients(oracle, model.weights, pairs, torch.float64)
        theirs, _, rough = gradients(oracle, model.weights, pairs, torch.float32)
        result = model.backward(packed(pairs))
        # The floor: a rounding of the largest number that is summed, for sums that cancel.
        allowed = 3 * abs(theirs - loss) + 1e-6 * loss
        assert_near("loss", result.loss * count, loss, allowed)
        size = max(largest(g.numpy()) for g in exact.values())
        error = max(largest(rough[n].double().numpy() - g.numpy()) for n, g in exact.items())
        for parameter, gradient in exact.items():
            allowed = 3 * error + 1e-6 * size
            assert_near(parameter, model.gradients[parameter], gradient.numpy(), allowed)


TRAININGS: dict[str, dict[str, Any]] = {
    "noam": {"schedule": "noam", "learning_rate": 2.0, "warmup": 8},
    "decay, clipping": {"weight_decay": 0.1, "clip_norm": 0.5},
    "rope, norm after, swiglu": both(position="rope") | {"norm": "post", "activation": "swiglu"},
    "transformer-xl, no biases": both(position="transformer-xl") | {"bias": False},
    "deberta": both(position="deberta", buckets=0),
    "decoder alone, learned slopes": {"encoder.layers": 0} | both(position="alibi-learned"),
}
TRAINED = {"schedule": "constant", "learning_rate": 0.01, "warmup": 0, "adam_epsilon": 1e-6}


def trained(core: Core, name: str) -> tuple[Config, list[list[Pair]]]:
    changes = BASE | TRAINED | TRAININGS[name] | NO_DROPOUT
    return Config(core, "tiny", changes), [pairs_for(changes, seed) for seed in range(20)]


@pytest.mark.parametrize("name", TRAININGS)
def test_twenty_updates_in_double(f64: Core, name: str) -> None:
    """The same losses, norms, rates and weights all the way."""
    config, batches = trained(f64, name)
    with Model(config) as model:
        spread(model)
        torches = TorchTraining(TorchModel(config.__getitem__), model.weights, torch.float64)
        for t, pairs in enumerate(batches, 1):
            result = model.step(packed(pairs))
            loss, norm = torches.step(pairs)
            assert abs(result.loss - loss) <= 1e-9 * loss, t
            assert abs(result.gradient_norm - norm) <= 1e-9 * norm, t
            assert abs(result.learning_rate - torches.rate(t)) <= 1e-12 * torches.rate(t), t
        for parameter, w in torches.weights.items():
            assert_near(parameter, model.weights[parameter], w.detach().numpy(), 1e-9)


@pytest.mark.parametrize("name", TRAININGS)
def test_twenty_updates_in_float(f32: Core, name: str) -> None:
    """The losses stay as near to the trajectory in double as those of torch in float do."""
    config, batches = trained(f32, name)
    with Model(config) as model:
        spread(model)
        oracle = TorchModel(config.__getitem__)
        exact, rough = (
            TorchTraining(oracle, model.weights, dtype) for dtype in (torch.float64, torch.float32)
        )
        losses = [
            (model.step(packed(pairs)).loss, exact.step(pairs)[0], rough.step(pairs)[0])
            for pairs in batches
        ]
    ours, double, theirs = (np.array(column) for column in zip(*losses, strict=True))
    allowed = 3 * largest(theirs - double) + 1e-6 * largest(double)
    assert_near("losses", ours, double, allowed)
