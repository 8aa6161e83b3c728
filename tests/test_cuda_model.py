# SPDX-License-Identifier: Apache-2.0
"""The model on a device: the same operations, filled by cuda/, and here run by the emulator.

Device memory of the emulator cannot be read by the host, so that model code which touched it would
not live to see its result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capi import DEVICE, Core, CoreError, core_by_name
from model_capi import AVERAGE, OPTIMIZER, WEIGHTS, Config, Model
from test_model_gradients import (
    BASE,
    CASES,
    STAGES,
    assert_near,
    batch_for,
    gradients,
    spread,
)  # fmt: skip

HALF_ULP = 2.0**-24


@pytest.fixture(scope="module")
def f64(libraries: dict[str, Path]) -> Core:
    return core_by_name(libraries, "f64")


@pytest.fixture(scope="module")
def f32(libraries: dict[str, Path], emulated_device: Path) -> Core:
    return core_by_name(libraries, "f32")


def on_device(core: Core, changes: dict[str, Any], **limits: Any) -> Model:
    return Model(Config(core, "tiny", changes), device=b"cuda", **limits)


def device_gradients(
    core: Core, changes: dict[str, Any], **limits: Any
) -> tuple[float, dict[str, Any]]:
    """As `gradients` of test_model_gradients has them of a core."""
    with Model(Config(core, "tiny", changes)) as host:
        spread(host)
        weights = {name: array.copy() for name, array in host.weights.items()}
    with on_device(core, changes, **limits) as model:
        model.assign(weights)
        result = model.backward(batch_for(changes))
        return result.loss, {n: g.astype(np.float64) for n, g in model.gradients.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_device_is_near_double(f32: Core, f64: Core, name: str) -> None:
    """The bound of test_float_is_near_double: the device rounds as often. Dropout is on: it would
    be off by whole numbers with other masks."""
    changes = BASE | CASES[name]
    loss, exact = gradients(f64, changes, 0)
    moved_loss, moved = gradients(f64, changes, HALF_ULP * 64)
    got_loss, got = device_gradients(f32, changes)
    stages = 4 * np.sqrt(STAGES)
    assert abs(got_loss - loss) <= stages * (abs(moved_loss - loss) / 64 + HALF_ULP * abs(loss))
    assert_near(exact, moved, got, HALF_ULP * 64, HALF_ULP)


def test_heads_that_are_too_wide_are_refused_at_once(f32: Core) -> None:
    with pytest.raises(CoreError, match=r"D=257, Dv=257 .*head_width.* at most 256"):
        on_device(f32, BASE | {"head_width": 257})


# ---------------------------------------------------------------------------------- training


TRAINED = BASE | {"schedule": "constant", "learning_rate": 1e-3, "warmup": 0, "ema": 0.5}


def copies(model: Model) -> dict[str, dict[str, Any]]:
    kinds = ("weights", "gradients", "first moments", "second moments", "averages")
    return {kind: model.read(i) for i, kind in enumerate(kinds)}


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    for kind, arrays in one.items():
        for name, array in arrays.items():
            assert array.tobytes() == other[kind][name].tobytes(), (kind, name)


def test_a_new_model_has_the_same_weights(f32: Core) -> None:
    with Model(Config(f32, "tiny", TRAINED)) as host, on_device(f32, TRAINED) as device:
        assert_same_bits({"all": host.weights}, {"all": device.weights})
        assert_same_bits({"all": device.read(4)}, {"all": device.weights})  # where averages begin


def test_steps_are_those_of_the_host(f32: Core) -> None:
    """Adam divides a gradient by its own size: what rounding leaves of a gradient that is zero, as
    those of the keys' biases are, may become a whole step, of rate 1e-3, in either direction."""
    batches = [batch_for(TRAINED, seed) for seed in range(3)]
    with Model(Config(f32, "tiny", TRAINED)) as host, on_device(f32, TRAINED) as device:
        for _ in range(2):
            ours, theirs = device.step(*batches), host.step(*batches)
            assert (ours.tokens, ours.step, ours.attempt, ours.finite) == (
                theirs.tokens, theirs.step, theirs.attempt, 1
            )  # fmt: skip
            assert ours.accuracy == theirs.accuracy
            np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
            np.testing.assert_allclose(ours.gradient_norm, theirs.gradient_norm, rtol=1e-5)
        off = [np.abs(w - host.weights[name]).ravel() for name, w in device.weights.items()]
        assert np.concatenate(off).max() <= 2 * 2 * 1e-3
        assert np.mean(np.concatenate(off) > 1e-6) <= 0.05
        assert not any(g.any() for g in device.gradients.values())


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize(("precision", "norm"), [(0, "pre"), (1, "pre"), (1, "post")])
def test_runs_and_recomputing_change_no_bit(
    f32: Core, precision: int, norm: str, activation: str
) -> None:
    """In bf16 norms and activations leave their results rounded, also where these are made again."""
    changes = TRAINED | {"activation": activation, "norm": norm}
    batch = batch_for(changes)
    found = []
    for recompute in (0, 0, 1):
        with on_device(f32, changes, recompute=recompute, precision=precision) as model:
            model.step(batch)
            model.backward(batch)
            found.append(copies(model))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


def test_weights_are_rounded_anew_where_they_change(f32: Core) -> None:
    """What one call left rounded is no other's."""
    batch = batch_for(TRAINED)
    with (
        on_device(f32, TRAINED, precision=1) as one,
        on_device(f32, TRAINED, precision=1) as other,
    ):
        one.step(batch, batch)
        one.step(batch)
        weights = one.read(0)
        losses = [one.forward(batch).loss]
        other.assign(weights)
        losses.append(other.forward(batch).loss)
        other.assign(other.read(4))
        losses.append(other.forward(batch).loss)
        other.assign(weights)
        losses.append(other.forward(batch).loss)
    assert losses[0] == losses[1] == losses[3] != losses[2]


def test_accumulation_is_a_step(f32: Core) -> None:
    batches = [batch_for(TRAINED, seed) for seed in range(2)]
    with on_device(f32, TRAINED) as one, on_device(f32, TRAINED) as other:
        one.step(*batches)
        for batch in batches:
            other.backward(batch)
        other.update()
        assert_same_bits(copies(one), copies(other))


def test_a_number_that_is_not_finite_is_named(f32: Core) -> None:
    batch = batch_for(TRAINED)
    with Model(Config(f32, "tiny", TRAINED)) as host, on_device(f32, TRAINED) as device:
        weights = {name: array.copy() for name, array in host.weights.items()}
        weights["decoder.1.feed_forward.in.weight"][0, 0] = np.inf
        results = []
        for model in (host, device):
            model.assign(weights)
            results.append(model.step(batch))
            assert_same_bits({"all": model.weights}, {"all": weights})
        assert [r.finite for r in results] == [0, 0]
        assert results[0].first_bad == results[1].first_bad != b""
        assert [r.attempt for r in results] == [1, 1]


# ---------------------------------------------------------------------------------- looking at it


def test_what_a_model_shows(f32: Core) -> None:
    batch = batch_for(BASE)
    with Model(Config(f32, "tiny", BASE)) as host, on_device(f32, BASE) as device:
        ours, theirs = device.score_and_hits(batch), host.score_and_hits(batch)
        np.testing.assert_allclose(ours[0], theirs[0], atol=2e-5)
        np.testing.assert_array_equal(ours[1], theirs[1])
        np.testing.assert_allclose(device.hidden(batch, 12), host.hidden(batch, 12), atol=2e-5)
        for kind, shape in ((0, (7, 7)), (1, (6, 6)), (2, (6, 7))):
            maps = [m.map(batch, kind, 1, 1, 3, shape) for m in (device, host)]
            np.testing.assert_allclose(*maps, atol=2e-6)


def test_bf16_rounds_the_operands_of_products_alone(f32: Core) -> None:
    """Operands with 8 bits: each of the two is off by 2^-9 of itself or little more, so a product of
    random signs is off by less than that of its size; some dozen of them follow each other."""
    batch = batch_for(BASE)
    losses, hidden = [], []
    for precision in (0, 1):
        with on_device(f32, BASE, precision=precision) as model:
            losses.append(model.forward(batch).loss)
            hidden.append(model.hidden(batch, 12))
    assert 0 < abs(losses[1] - losses[0]) <= 12 * 2.0**-9 * losses[0]
    off = np.sqrt(np.mean((hidden[1] - hidden[0]) ** 2))
    assert 2.0**-12 < off <= 12 * 2.0**-9  # numbers of a norm are about 1


@pytest.mark.parametrize("classes", [11, 12])
def test_gradients_in_bf16(f32: Core, classes: int) -> None:
    """Rounding what ReLU is given moves some through its corner, so that little is promised but
    that each is the same gradient. Those of 12 logits are left rounded in the logits' place."""
    changes = BASE | {"source_vocabulary": classes, "target_vocabulary": classes}
    exact, got = (device_gradients(f32, changes, precision=p)[1] for p in (0, 1))
    whole = np.sqrt(sum(np.sum(g * g) for g in exact.values()))
    for parameter, gradient in exact.items():
        error = np.linalg.norm(got[parameter] - gradient)
        assert error <= np.linalg.norm(gradient) / 5 + whole * 2.0**-9, parameter


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_near_double(f32: Core, f64: Core, name: str) -> None:
    """The bound of test_the_device_is_near_double with bf16's half ulp in place of float's: what is
    stored in bf16 between two products, and what is not, adds no more than a rounding. GELU, where
    the case says nothing else, has no corner."""
    changes = BASE | {"activation": "gelu"} | CASES[name]
    half_ulp, nudge = 2.0**-9, HALF_ULP * 64
    exact, moved = (gradients(f64, changes, n)[1] for n in (0, nudge))
    got = device_gradients(f32, changes, precision=1)[1]
    assert_near(exact, moved, got, nudge, half_ulp)


# ---------------------------------------------------------------------------------- files


HELD = {
    WEIGHTS: ["weights"],
    OPTIMIZER: ["first moments", "second moments", "averages"],
    AVERAGE: ["averages"],
}


@pytest.mark.parametrize("what", HELD)
def test_files_are_the_same(f32: Core, tmp_path: Path, what: int) -> None:
    """From the device to the host and back, bit for bit, also what follows."""
    batch = batch_for(TRAINED)
    with on_device(f32, TRAINED) as device, Model(Config(f32, "tiny", TRAINED)) as host:
        device.step(batch)
        before = copies(device)
        device.save(tmp_path / "device", what)
        host.save(tmp_path / "untrained", what)
        host.load(tmp_path / "device", what)
        host.save(tmp_path / "host", what)
        assert (tmp_path / "host").read_bytes() == (tmp_path / "device").read_bytes()
        device.load(tmp_path / "untrained", what)
        device.load(tmp_path / "host", what)
        assert_same_bits({kind: before[kind] for kind in HELD[what]}, copies(device))


def test_a_file_that_fails_changes_nothing(f32: Core, tmp_path: Path) -> None:
    with on_device(f32, TRAINED) as device:
        device.save(tmp_path / "whole")
        whole = (tmp_path / "whole").read_bytes()
        (tmp_path / "short").write_bytes(whole[: len(whole) // 2])
        before = copies(device)
        with pytest.raises(CoreError, match="short"):
            device.load(tmp_path / "short")
        assert_same_bits(before, copies(device))


# ---------------------------------------------------------------------------------- refusals


def test_what_is_refused(f32: Core) -> None:
    config = Config(f32, "tiny", BASE)
    with pytest.raises(CoreError, match="precision=7"):
        Model(config, device=b"cuda", precision=7)
    with pytest.raises(CoreError, match="gpu") as refused:
        Model(config, device=b"gpu")
    assert refused.value.status != 0
    with pytest.raises(CoreError) as absent:
        Model(config, device=b"cuda:99")
    assert absent.value.status == DEVICE
