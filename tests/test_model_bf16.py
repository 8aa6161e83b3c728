# SPDX-License-Identifier: Apache-2.0
"""Models on the CPU whose products take numbers rounded to bf16 (csrc/ops/bf16.h)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capi import CORES, Core, CoreError, core_by_name
from cores import get_core
from model_capi import OPTIMIZER, Config, Model
from test_model import SMALL, bits, pairs, trained
from test_model_gradients import BASE, CASES, STAGES, batch_for, gradients, spread

BF16 = 1
HALF_ULP = 2.0**-9


@pytest.fixture(scope="module")
def f64(libraries: dict[str, Path]) -> Core:
    return core_by_name(libraries, "f64")


@pytest.fixture(scope="module", params=CORES)
def isa(request: Any, libraries: dict[str, Path]) -> Core:
    return get_core(libraries, request.param)


@pytest.fixture(scope="module")
def f32(libraries: dict[str, Path]) -> Core:
    return core_by_name(libraries, "f32")


# ------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_near_double(f32: Core, f64: Core, name: str) -> None:
    """The bound of test_float_is_near_double with bf16's half ulp: as often as float rounds, no more
    than that is rounded to bf16. GELU, where the case says nothing else, has no corner."""
    changes = BASE | {"activation": "gelu"} | CASES[name]
    nudge = 2.0**-24 * 64
    exact, moved = (gradients(f64, changes, n)[1] for n in (0, nudge))
    got = gradients(f32, changes, 0, precision=BF16)[1]
    stages = 4 * np.sqrt(STAGES)
    whole = np.sqrt(sum(np.sum(g * g) for g in exact.values()))
    for parameter, gradient in exact.items():
        shift = np.linalg.norm(moved[parameter] - gradient) / nudge
        error = np.linalg.norm(got[parameter] - gradient)
        bound = stages * (shift + np.linalg.norm(gradient)) + 4 * whole
        assert error <= HALF_ULP * bound, (parameter, error, shift)


def hidden_and_loss(core: Core, precision: int) -> tuple[Any, float]:
    with Model(Config(core, "tiny", BASE), precision=precision) as model:
        spread(model)
        batch = batch_for(BASE)
        return model.hidden(batch, 12), model.forward(batch).loss


def test_operands_are_rounded_and_nothing_else(isa: Core) -> None:
    """Each of two operands is off by 2^-9 of itself at most, so that a product of random signs is
    off by less than that of its size; some dozen of them follow each other."""
    (exact, loss), (near, near_loss) = (hidden_and_loss(isa, p) for p in (0, BF16))
    assert 0 < abs(near_loss - loss) <= 12 * HALF_ULP * loss
    off = np.sqrt(np.mean((near - exact) ** 2))
    assert HALF_ULP / 8 < off <= 12 * HALF_ULP  # numbers of a norm are about 1


def test_instruction_sets_round_alike(isa: Core, f32: Core) -> None:
    """What they do with the rounded numbers differs by what float rounds, and a number next to the
    middle of two of bf16 may go either way: one operand in 2^-24 / 2^-9, one way in a dozen."""
    (here, loss), (there, other_loss) = (hidden_and_loss(core, BF16) for core in (isa, f32))
    assert abs(loss - other_loss) <= HALF_ULP / 8 * loss
    assert np.sqrt(np.mean((here - there) ** 2)) < HALF_ULP / 8


# ------------------------------------------------------------------------------------------- bits


def test_threads_and_runs_do_not_change_a_bit(f32: Core) -> None:
    results = []
    for threads in (1, 2, 3, 8, 1):
        f32.set_threads(threads)
        results.append(trained(f32, precision=BF16))
    f32.set_threads(0)
    assert all(result == results[0] for result in results)
    assert results[0] != trained(f32)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_recomputing_does_not_change_a_bit(f32: Core, activation: str) -> None:
    changes = {"activation": activation}
    results = [trained(f32, 3, changes, recompute=r, precision=BF16) for r in (0, 1)]
    assert results[0] == results[1]


def test_files_are_those_of_f32(f32: Core, tmp_path: Path) -> None:
    """Weights and moments are float32 in both, and training goes on from either."""
    config = Config(f32, "tiny", SMALL)
    with Model(config, precision=BF16) as model, Model(config, precision=BF16) as other:
        for step in range(3):
            model.step(pairs(step))
        for name, what in (("weights", 0), ("optimizer", OPTIMIZER)):
            model.save(tmp_path / name, what)
            other.load(tmp_path / name, what)
        with Model(config) as exact:
            exact.load(tmp_path / "weights")
            loss = exact.forward(pairs(7)).loss
        assert abs(model.forward(pairs(7)).loss - loss) <= 12 * HALF_ULP * loss
        assert model.step(pairs(8)).loss == other.step(pairs(8)).loss
        assert bits(model) == bits(other)


# ------------------------------------------------------------------------------------------- refusals


def test_what_is_refused(f32: Core, f64: Core) -> None:
    with pytest.raises(CoreError, match="precision=RP_BF16, but this library computes in double"):
        Model(Config(f64, "tiny", BASE), precision=BF16)
    with pytest.raises(CoreError, match="precision=7, must be RP_F32 or RP_BF16"):
        Model(Config(f32, "tiny", BASE), precision=7)
