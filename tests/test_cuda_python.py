# SPDX-License-Identifier: Apache-2.0
"""Models on a device from Python: training, searches, files, and what their arrays are."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos.train import CheckpointWarning, checkpoint
from small_model import BOS, EOS, assert_same_bits, pairs, sentences, small_config

SCHEMES: dict[str, dict[str, Any]] = {
    "shaw": {"position": "shaw", "k": 2},
    "transformer-xl": {"position": "transformer-xl"},
    "deberta": {"position": "deberta", "key": True, "value": True, "buckets": 4},
    "t5": {"position": "t5", "buckets": 6, "max_distance": 5},
    "alibi-learned": {"position": "alibi-learned"},
    "rope": {"position": "rope"},
    "sinusoidal": {"position": "none", "absolute": "sinusoidal"},
}


@pytest.fixture(autouse=True)
def device(emulated_device: Path) -> None:
    """The emulated one."""


def config_of(scheme: dict[str, Any], **changes: Any) -> relpos.Config:
    both = {f"{stack}__{k}": v for stack in ("encoder", "decoder") for k, v in scheme.items()}
    return small_config(**both, **changes)


def model_on(device: str, config: relpos.Config, **more: Any) -> relpos.Transformer:
    return relpos.Transformer(config, tokens=256, sentences=32, device=device, **more)


def sources() -> relpos.Batch:
    tokens = sentences(4, seed=1)
    offsets = np.cumsum([0, *map(len, tokens)])
    return relpos.Batch(np.concatenate(tokens).astype(np.int32), offsets)


def spread(config: relpos.Config, path: Path) -> Path:
    """A file of weights that tell tokens apart."""
    model = model_on("cpu", config)
    rng = np.random.default_rng(3)
    for weights in model.parameters.values():
        weights += 0.3 * rng.standard_normal(weights.shape).astype(np.float32)
    model.save(path)
    return path


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("options", [{"beam": 1}, {"beam": 3, "n_best": 2, "coverage": 0.2}])
def test_searches_find_the_same(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    config = config_of(SCHEMES[name])
    file = spread(config, tmp_path / "weights")
    found = []
    for device in ("cpu", "cuda"):
        model = relpos.Transformer.load(
            file, tokens=256, sentences=32, training=False, device=device
        )
        search = relpos.Search(begin=BOS, end=EOS, max_length=9, **options)
        found.append(model.search(sources(), search))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert [h.tokens.tolist() for h in ours] == [h.tokens.tolist() for h in theirs]
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.score, other.score, rtol=1e-4, atol=1e-5)


def test_scores_of_sampling_are_the_same(tmp_path: Path) -> None:
    """The same seed draws the same tokens, unless a draw falls between two rounded sums."""
    file = spread(config_of(SCHEMES["shaw"]), tmp_path / "weights")
    found = []
    for device in ("cpu", "cuda"):
        model = relpos.Transformer.load(file, training=False, device=device)
        search = relpos.Search(
            begin=BOS, end=EOS, max_length=9, beam=1, sample=True, top_k=5, seed=3
        )
        found.append([[h.tokens.tolist() for h in hs] for hs in model.search(sources(), search)])
    assert found[0] == found[1]


def test_one_token_at_a_time(tmp_path: Path) -> None:
    """The logits of the decoder's steps, of two models."""
    config = config_of(SCHEMES["shaw"])
    files = [spread(config, tmp_path / "one"), spread(config, tmp_path / "two")]
    found = []
    for device in ("cpu", "cuda"):
        models = [relpos.Transformer.load(f, training=False, device=device) for f in files]
        decoder = relpos.Decoder(*models)
        batch = relpos.Batch.from_pairs(sentences(3, seed=2), [[4], [5, 3], []], bos=BOS, eos=EOS)
        logits = [decoder.begin(batch, most_rows=6)]
        logits.append(decoder.step([3, 4, 5, 6, 7, 8], [0, 0, 1, 1, 2, 2]))
        logits.append(decoder.step([3, 4], [5, 1]))
        found.append(logits)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_arrays_where_they_lie() -> None:
    """What DLPack is given is the model's own memory, and outlives who asked for it."""
    model = model_on("cuda", config_of(SCHEMES["shaw"], ema=0.5))
    host = model_on("cpu", model.config)
    batch = pairs(4)
    kinds = ("parameters", "gradients", "first_moments", "second_moments", "averages")
    lies = {kind: getattr(model, kind).in_place("decoder.0.cross.out.weight") for kind in kinds}
    model.step(batch)
    for kind, array in lies.items():
        copy = getattr(model, kind)["decoder.0.cross.out.weight"]
        np.testing.assert_array_equal(array.numpy(), copy)
        assert array.__dlpack_device__() == (2, 0) and array.device == "cuda:0"
        assert array.writable == (kind in ("parameters", "gradients"))
    weights = model.parameters.in_place("source_embedding.weight")
    new = np.random.default_rng(0).standard_normal(weights.shape, dtype=np.float32)
    relpos._core.device_write(weights.device, weights.address, new)
    np.testing.assert_array_equal(model.parameters["source_embedding.weight"], new)
    assert (
        host.parameters.in_place("source_embedding.weight")
        is host.parameters["source_embedding.weight"]
    )
    for each in (model, host):
        with pytest.raises(KeyError, match="no_such"):
            each.parameters.in_place("no_such")
    capsule = weights.__dlpack__(stream=1)
    del model, lies, weights
    owner, *_, address, _, shape, _, _ = relpos._core.dlpack_take(capsule)
    found = np.empty(shape, np.float32)
    relpos._core.device_read("cuda:0", address, found)
    np.testing.assert_array_equal(found, new)
    assert owner is not None


def test_arrays_of_a_device_are_copies() -> None:
    model = model_on("cuda", config_of(SCHEMES["shaw"]))
    host = model_on("cpu", model.config)
    assert model.device == "cuda" and host.device == "cpu"
    assert list(model.parameters) == list(host.parameters)
    assert_same_bits(model.parameters, host.parameters)
    name = next(iter(model.parameters))
    with pytest.raises(ValueError, match="read-only"):
        model.parameters[name][...] = 0
    for each in (model, host):
        each.assign(name, np.ones(host.parameters[name].shape))
        assert (each.parameters[name] == 1).all()
        with pytest.raises(ValueError, match="no_such"):
            each.assign("no_such", 1)
        with pytest.raises(ValueError, match="values"):
            each.assign(name, np.ones(3))
    assert len(model.averages) == 0 and len(model.first_moments) == len(model.parameters)
    assert "on cuda" in repr(model.parameters)
    idle = model_on("cuda", model.config, training=False)
    assert len(idle.gradients) == 0 and len(idle.parameters) == len(model.parameters)


def test_an_open_model_is_copied_to_the_device(tmp_path: Path) -> None:
    file = spread(config_of(SCHEMES["shaw"]), tmp_path / "weights")
    host = relpos.Transformer.load(file, training=False)
    device = relpos.Transformer.load(file, training=False, device="cuda")
    assert_same_bits(device.parameters, host.parameters)


def test_a_checkpoint_tells_where_it_was_made(tmp_path: Path) -> None:
    """By what the device is, not by its number."""
    config = config_of(SCHEMES["shaw"])
    saved = checkpoint.save(tmp_path, model_on("cuda", config, precision="bf16"))
    title = relpos.devices()[1].title
    told = rf"\(device {re.escape(title)} then and cpu now, precision bf16 then and f32 now\)"
    with pytest.warns(CheckpointWarning, match=told):
        saved.restore(model_on("cpu", config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved.restore(model_on("cuda:0", config, precision="bf16"))


def test_profile_and_precision() -> None:
    model = model_on("cuda", config_of(SCHEMES["shaw"]), precision="bf16")
    assert model.precision == "bf16"
    with relpos.Profile(model) as profile:
        result = model.step(pairs())
    assert result.finite and result.step == 1
    assert sum(line.seconds for line in profile.lines) > 0


def test_what_is_refused() -> None:
    config = config_of(SCHEMES["shaw"])
    with pytest.raises(ValueError, match="precision: expected 'f32' or 'bf16', got 'f16'"):
        model_on("cuda", config, precision="f16")
    with pytest.raises(TypeError, match="device: expected str, got int"):
        model_on(3, config)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gpu"):
        model_on("gpu", config)
    with pytest.raises(RuntimeError, match="cuda:9"):
        model_on("cuda:9", config)
    with pytest.raises(ValueError, match="one device"):
        relpos.Decoder(model_on("cpu", config), model_on("cuda", config))
    with pytest.raises(ValueError, match="device is 'cuda:00', expected cpu, cuda or cuda:N"):
        model_on("cuda:00", config)
    with pytest.raises(ValueError, match=r"^device: expected a text without NUL, got 'cuda\\x00'$"):
        model_on("cuda\0", config)


def test_cuda_is_its_first_device() -> None:
    config = config_of(SCHEMES["shaw"])
    relpos.Decoder(model_on("cuda", config), model_on("cuda:0", config))


def test_a_fault_is_no_lack_of_memory(
    emulated_device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for memory may be the first to hear of a kernel that failed before."""
    if emulated_device == Path("gpu"):
        pytest.skip("the emulator is told to fail")
    config = config_of(SCHEMES["shaw"])
    decoder = relpos.Decoder(model_on("cuda", config))
    monkeypatch.setenv("EMU_FAULT", "1")
    for call in (
        lambda: model_on("cuda", config),
        lambda: decoder.begin(relpos.Batch([5], [0, 1], [BOS], [0, 1]), most_rows=6),
    ):
        with pytest.raises(relpos.DeviceError, match="^CUDA: "):
            call()


def first_gpu() -> relpos.Device:
    return next(d for d in relpos.devices() if d.name == "cuda:0")


def test_a_model_that_does_not_fit(emulated_device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever part finds no room: a sentence, and what was had before it is given back. One that
    fits is made afterwards and computes the same."""
    if emulated_device == Path("gpu"):
        pytest.skip("the emulator is told how much memory there is")
    config = config_of(SCHEMES["shaw"])
    expected = model_on("cuda", config).step(pairs()).loss
    gc.collect()
    held = first_gpu().memory - first_gpu().memory_free
    need = relpos.model_memory(config, tokens=256, sentences=32, device="cuda").total
    said = "model: no memory for {} bytes on cuda; relpos.model_memory says what they are for"
    for part in range(16):
        monkeypatch.setenv("EMU_MEMORY", str(held + need * part // 16))
        with pytest.raises(MemoryError, match=f"^{said.format(need)}$"):
            model_on("cuda", config)
        assert first_gpu().memory_free == need * part // 16
    monkeypatch.setenv("EMU_MEMORY", str(held + need))
    with pytest.raises(MemoryError, match=f"^{said.format('[0-9]{9}')}$"):
        relpos.Transformer(config, tokens=1 << 16, sentences=32, device="cuda")
    assert first_gpu().memory_free == need
    assert model_on("cuda", config).step(pairs()).loss == expected
    gc.collect()
    assert first_gpu().memory_free == need


FULL_FROM_THE_START = """
import os
import relpos
from small_model import pairs, small_config

def model(tokens):
    return relpos.Transformer(small_config(), tokens=tokens, sentences=32, device="cuda")

for room in (1000, 1000000):
    os.environ["EMU_MEMORY"] = str(room)
    try:
        model(256)
    except MemoryError as error:
        print(error, "-", relpos.devices()[1].memory_free)
os.environ["EMU_MEMORY"] = "40000000"
try:
    model(1 << 16)
except MemoryError:
    print("too large")
print(model(256).step(pairs()).finite)
"""


def test_a_gpu_that_is_full_from_the_start(emulated_device: Path, tmp_path: Path) -> None:
    """Nor has the first model, or the staging memory that comes with it, any room."""
    if emulated_device == Path("gpu"):
        pytest.skip("the emulator is told how much memory there is")
    done = subprocess.run(
        [sys.executable, "-c", FULL_FROM_THE_START],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model, staging, *others = done.stdout.splitlines()
    assert model.startswith("model: no memory for ") and model.endswith(" - 1000")
    expected = "cuda:0: 33554432 bytes of device memory for staging cannot be had - 1000000"
    assert staging == expected
    assert others == ["too large", "True"]
