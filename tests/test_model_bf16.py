# SPDX-License-Identifier: Apache-2.0
"""Models on the CPU whose products take numbers rounded to bf16 (csrc/ops/bf16.h)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capi import BF16, CORES, Core, CoreError, core_by_name
from cores import get_core
from decode_capi import Decoder, Found
from model_capi import OPTIMIZER, Config, Limits, Memory, Model, Sentences
from test_model import SMALL, bits, pairs, trained
from test_model_gradients import BASE, CASES, assert_near, batch_for, gradients, spread

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
    assert_near(exact, moved, got, nudge, HALF_ULP)


def hidden_and_loss(core: Core, precision: int) -> tuple[Any, float]:
    with Model(Config(core, "tiny", BASE), precision=precision) as model:
        spread(model)
        batch = batch_for(BASE)
        return model.hidden(batch, 12), model.forward(batch).loss


def test_operands_are_rounded_and_nothing_else(isa: Core) -> None:
    """Each of two operands is off by 2^-9 of itself or little more, so a product of random signs is
    off by less than that of its size; some dozen of them follow each other."""
    (exact, loss), (near, near_loss) = (hidden_and_loss(isa, p) for p in (0, BF16))
    assert 0 < abs(near_loss - loss) <= 12 * HALF_ULP * loss
    off = np.sqrt(np.mean((near - exact) ** 2))
    assert HALF_ULP / 8 < off <= 12 * HALF_ULP  # numbers of a norm are about 1


ALONE = BASE | {"share_embeddings": False, "share_output": False}


def test_every_weight_is_rounded_for_every_product(isa: Core) -> None:
    """What is less than half a unit of bf16 off a number of bf16 changes no bit of loss or gradients,
    though it is the weights' of all products, there and back."""
    found = []
    for nudge in (0.0, 0.4 * 2.0**-8):
        rng = np.random.default_rng(5)
        with Model(Config(isa, "tiny", ALONE), precision=BF16) as model:
            spread(model)
            for name, weights in model.weights.items():
                if weights.ndim == 2 and name.endswith("weight") and "embedding" not in name:
                    narrow = (weights.view(np.uint32) & 0xFFFF0000).view(np.float32)
                    weights[...] = narrow * (1 + nudge * rng.random(narrow.shape))
                    assert nudge == 0 or (weights != narrow).mean() > 0.9
            loss = model.backward(batch_for(ALONE)).loss
            found.append((loss, {n: g.tobytes() for n, g in model.gradients.items()}))
    assert found[0] == found[1]


def test_the_gradients_of_weights_are_products_of_rounded_numbers(isa: Core) -> None:
    """Of one row they are a product each, of two numbers of 8 bits: 16 bits, where float has 24."""
    changes = {**ALONE, "encoder.layers": 0}
    with Model(Config(isa, "tiny", changes), precision=BF16) as model:
        spread(model)
        model.backward(Sentences(None, [[3]], [[4]]))
        seen = 0
        for name, gradient in model.gradients.items():
            if gradient.ndim == 2 and name.endswith("weight") and "embedding" not in name:
                seen += 1
                assert gradient.any() or "qkv" in name, name
                assert not (gradient.view(np.uint32) & 0xFF).any(), name
        assert seen == 2 * 4 + 1  # qkv, out and two of feed-forward in each layer, and the output


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


# ------------------------------------------------------------------------------------------- searches

WORDS = {"max_length": 24, "source_vocabulary": 97, "target_vocabulary": 101, "width": 48,
         "share_embeddings": False, "share_output": False}  # fmt: skip


def sources() -> list[list[int]]:
    draw = np.random.default_rng(4)
    return [draw.integers(3, 97, n).tolist() for n in (5, 0, 9, 1, 7)]


def searched(model: Model, **options: Any) -> list[list[Found]]:
    with Decoder(model) as decoder:
        return decoder.search(Sentences(sources(), None, None), max_more=12, **options)


@pytest.mark.parametrize("beam", [1, 4, 9])
def test_searches_keep_weights_rounded_and_change_no_bit(f32: Core, beam: int) -> None:
    """A model that trains keeps none, and rounds what its products read: 5 rows and fewer, up to
    32, and more."""
    found = []
    for training in (0, 1):
        with Model(Config(f32, "tiny", WORDS), training=training, precision=BF16) as model:
            spread(model)
            found.append(searched(model, beam=beam, n_best=beam))
            for weights in model.weights.values():
                weights *= 1.25  # what was rounded is no other call's
            found.append(searched(model, beam=beam, n_best=beam))
            written = {name: weights.copy() for name, weights in model.weights.items()}
            batch = Sentences(sources(), [[1, 3]] * 5, [[3, 2]] * 5)
            searched(model)
            model.weights["output.weight"][...] *= 2
            losses = [model.forward(batch).loss]
        with Model(Config(f32, "tiny", WORDS), training=0, precision=BF16) as fresh:
            for name, weights in written.items():
                fresh.weights[name][...] = weights
            fresh.weights["output.weight"][...] *= 2
            losses.append(fresh.forward(batch).loss)
        assert losses[0] == losses[1]
    assert found[0] == found[2] and found[1] == found[3] and found[0] != found[1]


def test_weights_that_are_kept_are_told(f32: Core) -> None:
    config = Config(f32, "tiny", WORDS)
    told = []
    for precision in (0, BF16):
        memory = Memory(struct_size=ctypes.sizeof(Memory))
        limits = Limits(ctypes.sizeof(Limits), 64, 16, 0, 0, None, precision)
        where = ctypes.byref(limits), ctypes.byref(memory)
        f32.check(f32.lib.rp_model_memory(config.memory, *where))
        told.append(memory.constants)
    with Model(config) as model:
        kept = sum(
            w.size for name, w in model.weights.items()
            if w.ndim == 2 and (name.startswith("decoder.") and "_table" not in name
                                or name == "output.weight")
        )  # fmt: skip
    assert 2 * kept <= told[1] - told[0] <= 2.5 * kept


def test_a_search_scores_as_a_whole_pass_does(f32: Core) -> None:
    """Words are scored from a cache, in products of few rows: attention's sums in another order move
    some operands to the next number of bf16."""
    limits = {"training": 0, "precision": BF16, "tokens": 512}
    with Model(Config(f32, "tiny", WORDS), **limits) as model:
        spread(model)
        found = [each[0] for each in searched(model)]
        targets = [[1, *each.tokens][: len(each.tokens) + each.finished] for each in found]
        labels = [[*each.tokens, 2][: len(each.tokens) + each.finished] for each in found]
        scores = model.score(Sentences(sources(), targets, labels))
        parts = np.split(scores, np.cumsum([len(target) for target in targets])[:-1])
        for each, part in zip(found, parts, strict=True):
            whole = float(np.sum(part))
            assert abs(whole - each.log_probability) <= 12 * HALF_ULP * (1 + abs(whole))


# ------------------------------------------------------------------------------------------- refusals


def test_what_is_refused(f32: Core, f64: Core) -> None:
    with pytest.raises(CoreError, match="precision=RP_BF16, but this library computes in double"):
        Model(Config(f64, "tiny", BASE), precision=BF16)
    with pytest.raises(CoreError, match="precision=7, must be RP_F32 or RP_BF16"):
        Model(Config(f32, "tiny", BASE), precision=7)
