# SPDX-License-Identifier: Apache-2.0
"""The training step on a device: begun without waiting, asked for its result later.

The emulator counts the calls in which the host waits. With EMU_LATE=1 it does nothing before the
host waits for it, so that a result that is read too early, or memory of the host that is written
again before it was copied, shows in the bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from capi import ORDER, Core, CoreError, core_by_name
from device_capi import counters
from model_capi import OPTIMIZER, Config, Model
from test_cuda_model import TRAINED, assert_same_bits, copies, on_device
from test_model_gradients import CASES, batch_for

HERE = Path(__file__).resolve().parent

# What a step may meet, beside BASE.
KINDS: dict[str, dict[str, Any]] = {
    "shaw": TRAINED | {"clip_norm": 0.5},
    "norm after, noam": TRAINED
    | {"norm": "post", "schedule": "noam", "warmup": 4, "learning_rate": 1.0, "weight_decay": 0.01},
    "graphs, cosine": TRAINED | CASES["graphs"] | {"schedule": "cosine", "warmup": 2, "steps": 20},
    "deberta, linear": TRAINED | CASES["deberta"] | {"schedule": "linear", "steps": 20},
    "shared keys": TRAINED | {"heads": 4, "key_heads": 2},
    "t5, inverse-sqrt": TRAINED | CASES["t5"] | {"schedule": "inverse-sqrt", "warmup": 2},
}


@pytest.fixture(scope="module")
def f32(libraries: dict[str, Path], emulated_device: Path) -> Core:
    return core_by_name(libraries, "f32")


def counted(what: str) -> int:
    if os.environ.get("RELPOS_TEST_CUDA") == "gpu":
        pytest.skip(f"a GPU counts no {what}")
    return counters(Path(os.environ["RELPOS_CUDA_LIBRARY"]))[what]


def told(result: Any) -> dict[str, Any]:
    names = ("tokens", "loss", "nll", "accuracy", "gradient_norm", "learning_rate")
    names += ("step", "attempt", "finite", "first_bad")
    return {name: getattr(result, name) for name in names}


# ---------------------------------------------------------------------------------- launches


def test_all_weights_are_rounded_by_one_launch(f32: Core) -> None:
    """It is all that bf16 adds, without biases: what products are given is left rounded."""
    changes = TRAINED | {"bias": 0}
    batch, launches = batch_for(changes), []
    for precision in (0, 1):
        with on_device(f32, changes, precision=precision) as model:
            before = counted("launches")
            model.forward(batch)
            launches.append(counted("launches") - before)
    assert launches[1] == launches[0] + 1


# ---------------------------------------------------------------------------------- waiting


@pytest.mark.parametrize("limits", [{}, {"recompute": 1}, {"precision": 1}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_nothing(f32: Core, kind: str, limits: dict[str, int]) -> None:
    """From the second step on: the first makes room for what it stages."""
    batches = [batch_for(KINDS[kind], seed) for seed in range(4)]
    with on_device(f32, KINDS[kind], **limits) as model:
        model.begin(*batches[:2])
        before = counted("waits")
        for t in range(6):
            model.begin(*batches[t % 3 : t % 3 + 2])
        assert counted("waits") == before
        assert model.results() == (7, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_a_step_that_waits(f32: Core, kind: str) -> None:
    """Bit for bit, asked for one step later; and so is all that the steps leave."""
    batches = [batch_for(KINDS[kind], seed) for seed in range(4)]
    with on_device(f32, KINDS[kind]) as one, on_device(f32, KINDS[kind]) as other:
        expected = [told(one.step(*batches[t : t + 2])) for t in range(3)]
        found = []
        for t in range(3):
            other.begin(*batches[t : t + 2])
            if t > 0:
                found.append(told(other.result()))
        found.append(told(other.result()))
        assert found == expected
        assert other.results() == (0, 0) and other.counters() == (3, 3)
        assert_same_bits(copies(one), copies(other))


def test_the_host_has_its_result_at_once(f32: Core) -> None:
    batch = batch_for(TRAINED)
    with Model(Config(f32, "tiny", TRAINED)) as one, Model(Config(f32, "tiny", TRAINED)) as other:
        for _ in range(2):
            expected = told(one.step(batch))
            other.begin(batch)
            assert other.results() == (1, 1)
            assert told(other.result()) == expected
        assert_same_bits(copies(one), copies(other))


@pytest.mark.parametrize("device", [b"cpu", b"cuda"], ids=str)
def test_what_is_kept_of_results(f32: Core, device: bytes) -> None:
    batch = batch_for(TRAINED)
    with Model(Config(f32, "tiny", TRAINED), device=device) as model:
        with pytest.raises(CoreError, match="there is no result to ask for") as none:
            model.result()
        assert none.value.status == ORDER
        for _ in range(10):
            model.begin(batch)
        assert model.results()[0] == 8  # the last
        assert model.result().attempt == 3
        assert model.step(batch).attempt == 11  # its own, and in no queue
        assert [model.result().attempt for _ in range(7)] == [4, 5, 6, 7, 8, 9, 10]
        assert model.results() == (0, 0) and model.counters() == (11, 11)


@pytest.mark.parametrize("device", [b"cpu", b"cuda"], ids=str)
def test_what_needs_the_step_waits_for_it(f32: Core, device: bytes, tmp_path: Path) -> None:
    """Counters, files, and passes that tell how many updates were made."""
    batch = batch_for(TRAINED)

    def asked() -> Iterator[Callable[[Model], Any]]:
        yield lambda model: model.counters()
        yield lambda model: (model.forward(batch).step, 2)
        yield lambda model: (model.backward(batch).step, 2)

    for ask in asked():
        with Model(Config(f32, "tiny", TRAINED), device=device) as model:
            model.begin(batch)
            model.begin(batch)
            assert ask(model) == (2, 2)
            assert [model.result().step for _ in range(2)] == [1, 2]
    with Model(Config(f32, "tiny", TRAINED), device=device) as model:
        model.begin(batch)
        model.save(tmp_path / "optimizer", OPTIMIZER)
        model.begin(batch)
        model.load(tmp_path / "optimizer", OPTIMIZER)
        assert model.counters() == (1, 1)
        assert [model.result().step for _ in range(2)] == [1, 2]  # as they were made
        assert model.step(batch).step == 2


# ---------------------------------------------------------------------------------- not finite

BAD = [
    ("pre", "source_embedding.weight", b"encoder.embedding"),
    ("post", "source_embedding.weight", b"encoder.embedding"),
    ("pre", "encoder.1.attention.out.weight", b"encoder.1.attention"),
    ("pre", "decoder.0.feed_forward.norm.gain", b"decoder.0.feed_forward.norm"),
    ("pre", "decoder.norm.shift", b"decoder.norm"),
    ("post", "decoder.0.feed_forward.norm.gain", b"decoder.0.feed_forward.norm"),
    ("post", "encoder.1.feed_forward.out.bias", b"encoder.1.feed_forward"),
    ("pre", "decoder.1.cross.q.weight", b"decoder.1.cross"),
    ("post", "output.weight", b"output"),
]
APART = TRAINED | {"share_embeddings": False, "share_output": False}


@pytest.mark.parametrize("limits", [{}, {"recompute": 1}], ids=str)
@pytest.mark.parametrize(("norm", "name", "bad"), BAD)
def test_the_first_bad_place_is_told_later(
    f32: Core, norm: str, name: str, bad: bytes, limits: dict[str, int]
) -> None:
    """Of three steps the second is not finite, and it is asked for after the third has begun."""
    changes = APART | {"norm": norm}
    batches = [batch_for(changes, seed) for seed in range(2)]
    with on_device(f32, changes, **limits) as model, on_device(f32, changes, **limits) as twin:
        model.begin(*batches)
        twin.step(*batches)
        kept = twin.weights[name]
        model.write(name, 0, np.full_like(kept, np.nan))
        model.begin(*batches)
        model.write(name, 0, kept)
        after = copies(model)
        assert_same_bits(after, copies(twin))  # and the gradients are zero
        model.begin(*batches)
        results = [told(model.result()) for _ in range(3)]
    assert [r["finite"] for r in results] == [1, 0, 1]
    assert [r["first_bad"] for r in results] == [b"", bad, b""]
    assert [(r["step"], r["attempt"]) for r in results] == [(1, 1), (1, 2), (2, 3)]
    assert results[1]["learning_rate"] == 0


def test_the_first_of_several_batches_is_told(f32: Core) -> None:
    """Only the third batch meets the token whose embedding is not finite."""
    with on_device(f32, APART) as model:
        batches = [batch_for(APART, seed) for seed in range(3)]
        table = model.weights["target_embedding.weight"]
        batches[2].alive[2][:] = 10  # the target's tokens
        for batch in batches[:2]:
            batch.alive[2][batch.alive[2] == 10] = 9
        table[10] = np.inf
        model.write("target_embedding.weight", 0, table)
        result = model.step(*batches)
        assert (result.finite, result.first_bad) == (0, b"decoder.embedding")
        assert model.step(*batches[:2]).finite == 1
        for batch in batches[:2]:
            assert model.backward(batch).finite == 1
        assert model.backward(batches[2]).first_bad == b"decoder.embedding"
        assert model.backward(batches[0]).first_bad == b""
        assert model.update().first_bad == b"decoder.embedding"


@pytest.mark.parametrize("huge", [np.inf, 1e25], ids=str)
def test_a_bad_gradient_is_told_later(f32: Core, huge: float) -> None:
    changes = TRAINED | {"clip_norm": 0}
    batch = batch_for(changes)
    with on_device(f32, changes) as model:
        model.backward(batch)
        bad = model.gradients["encoder.0.attention.out.weight"]
        bad[0, 0] = huge
        model.write("encoder.0.attention.out.weight", 1, bad)
        before = copies(model)
        model.core.check(model.lib.rp_model_update(model.handle, None))
        assert not any(g.any() for g in model.gradients.values())
        for kind in ("weights", "first moments", "second moments", "averages"):
            assert_same_bits({kind: before[kind]}, copies(model))
        model.begin(batch)
        result = model.result()
        assert (result.finite, result.step, result.attempt) == (0, 0, 1)
        assert result.first_bad == b"gradient of encoder.0.attention.out.weight"
        assert model.result().step == 1


def test_no_label_counts(f32: Core) -> None:
    """Nothing moves, and that is finite."""
    batch = batch_for(TRAINED)
    batch.alive[4][:] = -1  # the labels
    with on_device(f32, TRAINED) as device, Model(Config(f32, "tiny", TRAINED)) as host:
        before = copies(device)
        assert told(device.step(batch)) == told(host.step(batch))
        assert device.counters() == host.counters() == (0, 1)
        assert_same_bits(before, copies(device))


# ---------------------------------------------------------------------------------- clipping, rates


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_is_the_host_s(f32: Core, kind: str) -> None:
    """Norms differ by the gradients' rounding; rates by that of their own dozen operations."""
    batches = [batch_for(KINDS[kind], seed) for seed in range(2)]
    with on_device(f32, KINDS[kind]) as device, Model(Config(f32, "tiny", KINDS[kind])) as host:
        for _ in range(3):
            ours, theirs = device.step(*batches), host.step(*batches)
            np.testing.assert_allclose(ours.learning_rate, theirs.learning_rate, rtol=3e-15)
            np.testing.assert_allclose(ours.gradient_norm, theirs.gradient_norm, rtol=1e-4)


# ---------------------------------------------------------------------------------- late


def run_late(libraries: dict[str, Path], folder: Path, late: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, HERE / "late_steps.py"],
        env=os.environ | {"RELPOS_TEST_CORE": str(libraries["f32"]), "EMU_LATE": str(late)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_device_that_is_late(
    libraries: dict[str, Path], emulated_device: Path, tmp_path: Path
) -> None:
    """Steps begun ahead of the device, whose batches are gone before it reads them: one wait for a
    result each, none without, and the bits of a device that does everything at once."""
    if os.environ.get("RELPOS_TEST_CUDA"):
        pytest.skip("the emulated device alone can be late")
    late, prompt = (run_late(libraries, tmp_path, value) for value in (1, 0))
    assert late["begun"] == 0 and late["each result"] == [1] * len(late["each result"])
    assert late["arrived"] == [[1, 0]] * len(late["arrived"])  # none is there before it is asked
    assert prompt["begun"] == 0 and set(prompt["each result"]) == {0}
    assert late["digest"] == prompt["digest"] and late["told"] == prompt["told"]


# ---------------------------------------------------------------------------------- the loop

TRAINING = """
import json, sys
from pathlib import Path
import relpos
import test_trainer as here
from relpos.train import trainer as loop
folder, poison, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
changes = {"encoder__layers": 1, "decoder__layers": 1, "width": 16, "feed_forward": 16, "heads": 1}
config = here.text_files.config(steps=14, ema=0.5, **changes)
loop._NOT_FINITE = 4
trainer = here.make(
    folder, config=config, validation=here.VALID[:5], validate_every=5, save_every=4, log_every=3,
    device=sys.argv[4], resume=True, steps=stop, sentences=8, tokens=64,
)
begun, calls, largest = trainer.model.step, 0, 0
class Model:
    def __getattr__(self, name):
        return step if name == "step" else getattr(model, name)
def step(update, **given):
    global calls, largest
    calls += 1
    if calls == poison:
        name, array = next(iter(model.parameters.items()))
        model.assign(name, array + float("nan"))
    result = begun(update, **given)
    largest = max(largest, model.results[0])
    return result
model, trainer.model = trainer.model, Model()
save = loop.checkpoint.save
loop.checkpoint.save = lambda folder, _, *a, **k: save(folder, model, *a, **k)
try:
    print(json.dumps([trainer.train().reason, largest]))
except relpos.train.trainer.TrainingError as error:
    print(json.dumps([str(error), largest]))
"""


def train(folder: Path, *, late: int, stop: int = 14, poison: int = 0) -> tuple[str, int]:
    """Why training ended, and how many results were waited for at most."""
    root = Path(relpos.__file__).parent.parent
    places = [str(HERE), str(root), *map(os.path.abspath, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(folder), str(poison), str(stop), "cuda"],
        env=os.environ | {"EMU_LATE": str(late), "PYTHONPATH": os.pathsep.join(places)},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reason, largest = json.loads(done.stdout)
    return reason, largest


def left(folder: Path) -> tuple[list[Any], dict[str, bytes]]:
    """The log without times, and the files of the checkpoints that tensors are in."""
    log = [
        {name: value for name, value in line.items() if "second" not in name}
        for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        if line["kind"] != "resume"
    ]
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.glob("step-*/*.safetensors"))
    }
    return log, files


def test_training_on_a_device_that_is_late(
    libraries: dict[str, Path], emulated_device: Path, tmp_path: Path
) -> None:
    """The same lines and the same checkpoints as where every result is there at once, also when the
    run was left in between; and the host has begun a step that it was not told of."""
    if os.environ.get("RELPOS_TEST_CUDA"):
        pytest.skip("the emulated device alone can be late")
    assert train(tmp_path / "prompt", late=0) == ("steps", 1)
    assert train(tmp_path / "late", late=1) == ("steps", 2)
    assert train(tmp_path / "broken", late=1, stop=6) == ("steps", 2)
    assert train(tmp_path / "broken", late=1) == ("steps", 2)
    log, files = left(tmp_path / "prompt")
    steps = [line["step"] for line in log if line["kind"] == "train"]
    assert steps == [3, 6, 9, 12, 14] and len(files) == 3 * 6  # of 4, 5, 8, 10, 12, 14
    assert left(tmp_path / "late") == (log, files)
    resumed, others = left(tmp_path / "broken")
    assert others | files == others and resumed[-3:] == log[-3:]


def test_training_that_is_not_finite_on_a_device_that_is_late(
    libraries: dict[str, Path], emulated_device: Path, tmp_path: Path
) -> None:
    """After the first bad step every result is waited for."""
    if os.environ.get("RELPOS_TEST_CUDA"):
        pytest.skip("the emulated device alone can be late")
    ends = [train(tmp_path / str(late), late=late, poison=7)[0] for late in (0, 1)]
    assert ends[0] == ends[1] and "not finite in 4 steps in a row, first in enc" in ends[0]
    logs = [left(tmp_path / str(late)) for late in (0, 1)]
    assert logs[0] == logs[1] and [line["step"] for line in logs[0][0][-4:]] == [6] * 4
