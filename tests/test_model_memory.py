# SPDX-License-Identifier: Apache-2.0
"""The model's memory as Python sees it: views and who outlives whom, leaks, models and threads."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import relpos
from leaks import assert_nothing_leaks
from relpos import Batch, _core
from small_model import (
    BOS,
    EOS,
    assert_same_bits,
    pairs,
    sentences,
    small_config,
    small_model,
    weights,
)

# --------------------------------------------------------------------------------------------------
# Views
# --------------------------------------------------------------------------------------------------


def test_names_and_shapes() -> None:
    model = small_model(ema=0.9)
    for arrays in (model.gradients, model.first_moments, model.second_moments, model.averages):
        assert list(arrays) == list(model.parameters)
        assert [x.shape for x in arrays.values()] == [x.shape for x in model.parameters.values()]
    numbers = sum(array.size for array in model.parameters.values())
    assert repr(model.parameters) == f"<{len(model.parameters)} arrays of {numbers:,} numbers>"
    memory = relpos.model_memory(model.config, tokens=256, sentences=32)
    assert memory.parameters >= 4 * numbers
    spans = sorted((x.ctypes.data, x.ctypes.data + x.nbytes) for x in model.parameters.values())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert len(small_model().averages) == 0


def test_parameters_are_the_models_own() -> None:
    model = small_model()
    batch = pairs()
    before = model.forward(batch).loss
    name, array = next(iter(model.parameters.items()))
    assert array.dtype == np.float32 and array.flags.c_contiguous and array.flags.writeable
    assert not array.flags.owndata and array.base is model._core
    array += 0.1
    assert model.forward(batch).loss != before
    assert model.parameters[name] is array


def test_gradients_are_the_models_own() -> None:
    """Of the sum of the tokens' losses: scaled by hand, the update is another."""
    model, twin = small_model(clip_norm=1.0), small_model(clip_norm=1.0)
    for each in (model, twin):
        each.backward(pairs())
    for name, gradient in model.gradients.items():
        assert gradient.flags.writeable
        assert np.array_equal(gradient, twin.gradients[name])
    norm = np.sqrt(
        sum(float(np.square(g, dtype=np.float64).sum()) for g in model.gradients.values())
    )
    for gradient in model.gradients.values():
        gradient *= 0.5  # a power of two: exact
    result, expected = model.update(), twin.update()
    assert expected.gradient_norm == pytest.approx(norm / expected.tokens, rel=1e-5)
    assert result.gradient_norm == pytest.approx(expected.gradient_norm / 2, rel=1e-6)
    assert all(not gradient.any() for gradient in model.gradients.values())


def test_moments_and_averages_are_read_only() -> None:
    model = small_model(ema=0.5)
    for _ in range(2):
        model.step(pairs())
    for arrays in (model.first_moments, model.second_moments, model.averages):
        assert any(array.any() for array in arrays.values())
        for array in arrays.values():
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.setflags(write=True)


def test_views_outlive_the_model() -> None:
    model = small_model()
    model.step(pairs())
    core = model._core
    copies = weights(model)
    views = dict(model.parameters)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and sys.getrefcount(core) > 2
    del core
    gc.collect()
    noise = [small_model() for _ in range(3)]  # which would take the memory
    assert_same_bits(views, copies)
    last = views.popitem()[1]
    del views, noise
    gc.collect()
    assert np.isfinite(last).all()
    last += 1
    assert isinstance(last.base, _core.Model)
    last.base.step((pairs()._packed,))  # and the model behind it still works


def test_models_are_seen_by_the_collector() -> None:
    model = small_model()
    assert gc.is_tracked(model._core)
    assert type(model._core) in gc.get_referents(model._core)
    assert repr(model).startswith("Transformer(Config(") and "arrays of" in repr(model)


# --------------------------------------------------------------------------------------------------
# Over time and over threads
# --------------------------------------------------------------------------------------------------


def test_nothing_leaks() -> None:
    model = small_model(encoder__relations=2)
    tokens = sentences(4)
    graphs = [np.zeros((len(x), len(x)), int) for x in tokens]
    batch = Batch.from_pairs(tokens, tokens, bos=BOS, eos=EOS, source_graphs=graphs)
    bad = tuple(x if i != 4 else x[:-1] for i, x in enumerate(batch._packed))
    held = [batch._packed, *batch._packed[:5], *batch._packed[5], model._core]
    held += [model.parameters, next(iter(model.parameters.values())), _core.Model]

    def calls(times: int) -> None:
        for _ in range(times):
            model.step(batch)
            model.backward(batch)
            model.update()
            model.forward(batch, dropout=True)
            model.score(batch)
            model.hidden(batch)
            model.attention_maps(batch, 0, 0, "cross")
            with pytest.raises(ValueError):
                model._core.step((batch._packed, bad))
            with pytest.raises(ValueError):
                model.attention_maps(batch, 7, 0)
            model._core.parameters()
            with relpos.profile(model):
                pass

    assert_nothing_leaks(calls, 20, 200, held)


def test_models_and_configurations_do_not_leak() -> None:
    config = small_config()

    def make(times: int) -> None:
        for _ in range(times):
            relpos.Transformer(config, tokens=256, sentences=32).step(pairs())
            with pytest.raises(ValueError):
                config.replace({"heads": 3})
            with pytest.raises(ValueError):
                _core.Model((("no", "such"),), (1, 1, True, False, "cpu", 0))

    assert_nothing_leaks(make, 20, 100, [_core.Model])


def test_a_busy_model_refuses_a_second_thread() -> None:
    """While one thread trains, every call of another raises, and the training is what it would
    have been."""
    config = small_config(max_length=256)
    tokens = [np.full(255, 3 + i) for i in range(8)]
    batch = Batch.from_pairs(tokens, tokens, bos=BOS, eos=EOS)
    small = pairs()
    model, twin = (relpos.Transformer(config, tokens=2048, sentences=8) for _ in range(2))
    done = threading.Event()
    refused: list[str] = []

    def train() -> None:
        steps = 0
        while steps < 10:
            try:
                model.step(batch)
                steps += 1
            except RuntimeError as error:
                refused.append(str(error))
        done.set()

    worker = threading.Thread(target=train)
    worker.start()
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: model.forward(small),
        "score": lambda: model.score(small),
        "map": lambda: model.attention_maps(small, 0, 0),
        "update": model.update,
        "counters": lambda: model.counters,
    }
    met: set[str] = set()
    while not done.is_set():
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:
                if "accumulated" not in str(error):
                    met.add(name)
                    refused.append(str(error))
    worker.join()
    assert refused and met >= {"step", "score", "map"}
    for _ in range(10):
        twin.step(batch)
    assert_same_bits(model.parameters, twin.parameters)
    assert model.counters == twin.counters == (10, 10)


def test_models_side_by_side() -> None:
    """Different models may work in different threads: the bits are those of one alone."""
    batch = pairs()
    models = [small_model() for _ in range(4)]

    def train(model: relpos.Transformer) -> None:
        for _ in range(20):
            model.step(batch)

    threads = [threading.Thread(target=train, args=(model,)) for model in models[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    train(models[0])
    for model in models[1:]:
        assert_same_bits(model.parameters, models[0].parameters)
