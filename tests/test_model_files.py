# SPDX-License-Identifier: Apache-2.0
"""Files of a model: safetensors, ours and the safetensors package's, and going on from them."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos import _core
from small_model import (
    assert_same_bits,
    pairs,
    small_config,
    small_model,
    state_of,
    trained,
    weights,
)


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    [size] = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    return header


# ---- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "modèle 模型.safetensors"])
def test_weights_come_back(tmp_path: Path, name: str) -> None:
    model = trained()
    model.save(tmp_path / name)
    model.save(str(tmp_path / "other"))
    assert (tmp_path / name).read_bytes() == (tmp_path / "other").read_bytes()
    loaded = relpos.Transformer.load(tmp_path / name, tokens=256, sentences=32)
    assert loaded.config == model.config == relpos.Config.load(tmp_path / name)
    assert_same_bits(loaded.parameters, model.parameters)
    assert loaded.forward(pairs()).loss == model.forward(pairs()).loss
    assert loaded.counters == (0, 0)


def test_another_configuration_of_the_same_shapes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    trained().save(path)
    config = small_config(dropout=0.3, schedule="noam", warmup=10)
    model = relpos.Transformer.load(path, config=config, tokens=64, training=False)
    assert model.config == config and len(model.gradients) == 0
    assert_same_bits(model.parameters, trained().parameters)


# ---- mapped --------------------------------------------------------------------------------------


def own_bytes() -> int:
    """Memory of this process that belongs to no file, without what earlier tests have given back to
    the heap: it would be taken again, and nobody would see it."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("the system does not tell")


def test_opened_weights_are_not_copied(tmp_path: Path) -> None:
    """A model of 50 MB of weights: opening it takes none of them, nor does using it."""
    config = small_config(source_vocabulary=400_000, width=32, share_embeddings=False)
    limits = {"tokens": 64, "sentences": 8}
    trained = relpos.Transformer(config, training=False, **limits)
    path = tmp_path / "model.safetensors"
    trained.save(path)
    size = path.stat().st_size
    assert size > 50_000_000
    batch = relpos.Batch.from_pairs([[399_999, 5]], [[4, 3]], bos=1, eos=2)
    expected = trained.forward(batch)
    before = own_bytes()
    model = relpos.Transformer.load(path, training=False, **limits)
    assert model.forward(batch) == expected
    assert float(model.parameters["source_embedding.weight"].sum()) != 0
    assert own_bytes() - before < size / 10
    read = relpos.Transformer.load(path, config=config, training=False, **limits)
    assert own_bytes() - before > size * 9 / 10
    assert read.forward(batch) == expected
    assert_same_bits(model.parameters, trained.parameters)
    assert model.config == read.config == config


def test_an_opened_model_translates_as_well(tmp_path: Path) -> None:
    model = trained(20)
    model.save(tmp_path / "model.safetensors")
    opened = relpos.Transformer.load(
        tmp_path / "model.safetensors", tokens=256, sentences=32, training=False
    )
    batch = relpos.Batch([7, 4, 9, 5, 2], [0, 3, 5])
    search = relpos.Search(begin=1, end=2, n_best=2)
    found, expected = opened.search(batch, search), model.search(batch, search)
    for one, other in zip(found, expected, strict=True):
        assert [x.tokens.tolist() for x in one] == [x.tokens.tolist() for x in other]
        assert [x.score for x in one] == [x.score for x in other]


def test_opened_weights_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    trained(2).save(path)
    model = relpos.Transformer.load(path, training=False)
    before, expected = weights(model), model.forward(pairs())
    trained(5).save(path)
    assert_same_bits(model.parameters, before)
    later = relpos.Transformer.load(path, training=False)
    path.unlink()
    assert model.forward(pairs()) == expected
    assert later.forward(pairs()).loss == trained(5).forward(pairs()).loss
    views = model.parameters  # live as long as the last of them
    del model
    assert_same_bits(views, before)


def test_opened_weights_may_be_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    trained().save(path)
    content = path.read_bytes()
    model = relpos.Transformer.load(path, training=False)
    for array in model.parameters.values():
        array[...] = 0
    assert path.read_bytes() == content
    other = relpos.Transformer.load(path, training=False)
    assert_same_bits(other.parameters, trained().parameters)
    model.restore(path)
    assert model.forward(pairs()) == other.forward(pairs())
    model.save(path)  # over the file that its weights come from
    assert path.read_bytes() == content
    assert_same_bits(other.parameters, trained().parameters)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("cut", [1, 64, 10_000])
def test_a_file_that_was_cut_short(tmp_path: Path, cut: int, training: bool) -> None:
    path = tmp_path / "model.safetensors"
    trained().save(path)
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    with pytest.raises(OSError, match=r"model\.safetensors"):
        relpos.Transformer.load(path, training=training)
    path.write_bytes(content + b"x" * cut)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        relpos.Transformer.load(path, training=training)


@pytest.mark.parametrize("what", ["weights", "optimizer"])
def test_of_half_a_file_nothing_is_read(tmp_path: Path, what: Any) -> None:
    path, model, other = tmp_path / "file", trained(), small_model()
    model.save(path, what)
    content, before = path.read_bytes(), state_of(other)
    for damaged in (content[:-1], content + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(OSError, match="file"):
            other.restore(path, what)
        assert_same_bits(state_of(other), before)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(OSError, match=r"model\.safetensors"):
        _core.Model.open((64, 8, False, False, "cpu", 0), path)
    trained().save(path)
    with pytest.raises(ValueError, match="training=1, must be 0"):
        _core.Model.open((64, 8, True, False, "cpu", 0), path)
    with pytest.raises(TypeError):
        _core.Model.open((64, 8, False, False, "cpu", 0), 3)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        _core.Model.open((64, 8), path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens: expected 1 or more"):
        relpos.Transformer.load(path, training=False, tokens=0)


# ---- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ema", [0, 0.9])
def test_going_on_is_as_if_nothing_had_happened(tmp_path: Path, ema: float) -> None:
    """With dropout: weights, moments, averages and masks have the bits of an unbroken run."""
    unbroken = trained(3, ema=ema)
    unbroken.save(tmp_path / "weights")
    unbroken.save(tmp_path / "optimizer", "optimizer")
    resumed = relpos.Transformer.load(tmp_path / "weights", tokens=256, sentences=32)
    resumed.restore(tmp_path / "optimizer", "optimizer")
    assert resumed.counters == unbroken.counters == (3, 3)
    assert_same_bits(state_of(resumed), state_of(unbroken))
    for seed in range(3, 8):
        assert resumed.step(pairs(seed=seed)) == unbroken.step(pairs(seed=seed))
    assert_same_bits(state_of(resumed), state_of(unbroken))
    without = relpos.Transformer.load(tmp_path / "weights", tokens=256, sentences=32)
    for seed in range(3, 8):
        without.step(pairs(seed=seed))
    some = next(iter(without.parameters))
    assert not np.array_equal(without.parameters[some], unbroken.parameters[some])


def test_averages_are_weights_too(tmp_path: Path) -> None:
    model = trained(ema=0.5)
    model.save(tmp_path / "average", "average")
    loaded = relpos.Transformer.load(tmp_path / "average", tokens=256, sentences=32)
    assert_same_bits(loaded.parameters, model.averages)
    before = state_of(model)
    assert model.forward(pairs(), average=True).loss == loaded.forward(pairs()).loss
    assert model.forward(pairs()).loss != loaded.forward(pairs()).loss
    assert_same_bits(state_of(model), before)
    with pytest.raises(RuntimeError, match="it keeps no average"):
        relpos.Transformer.load(tmp_path / "average", training=False).forward(pairs(), average=True)
    with pytest.raises(ValueError, match="average: expected False with dropout=True, got True"):
        model.forward(pairs(), average=True, dropout=True)
    with pytest.raises((ValueError, RuntimeError), match="ema|average"):
        trained().save(tmp_path / "none", "average")
    assert not (tmp_path / "none").exists()


# ---- against the safetensors package -------------------------------------------------------------


def test_the_package_reads_ours(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    numpy_files = pytest.importorskip("safetensors.numpy")
    model = trained(ema=0.5)
    path = tmp_path / "model.safetensors"
    model.save(path)
    assert_same_bits(
        dict(sorted(numpy_files.load_file(path).items())), dict(sorted(model.parameters.items()))
    )
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    assert {name: metadata[name] for name, _ in model.config.pairs()} == dict(model.config.pairs())
    model.save(tmp_path / "optimizer", "optimizer")
    state = numpy_files.load_file(tmp_path / "optimizer")
    found = [x.tobytes() for x in state.values()]
    for arrays in (model.first_moments, model.second_moments, model.averages):
        assert all(array.tobytes() in found for array in arrays.values())


def test_ours_reads_the_packages(tmp_path: Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    model = trained()
    random = np.random.default_rng(3)
    given = {n: random.standard_normal(x.shape, np.float32) for n, x in model.parameters.items()}
    path = tmp_path / "model.safetensors"
    model.save(path)
    numpy_files.save_file(given, path, metadata=header_of(path)["__metadata__"])
    loaded = relpos.Transformer.load(path, tokens=256, sentences=32)
    assert_same_bits(loaded.parameters, {name: given[name] for name in loaded.parameters})
    config = {"format": "relpos 1"} | dict(model.config.pairs())
    numpy_files.save_file(dict(reversed(given.items())), path, config)
    opened = relpos.Transformer.load(path, training=False)
    assert_same_bits(opened.parameters, {name: given[name] for name in opened.parameters})
    numpy_files.save_file(given, path)  # without a configuration
    model.restore(path)
    assert_same_bits(model.parameters, {name: given[name] for name in model.parameters})
    with pytest.raises(OSError, match="model.safetensors"):
        relpos.Config.load(path)


def test_the_layout_of_a_file(tmp_path: Path) -> None:
    """Without the package: header, shapes, and the data where the header says."""
    model = trained()
    path = tmp_path / "model.safetensors"
    model.save(path)
    header = header_of(path)
    assert dict(model.config.pairs()).items() <= header.pop("__metadata__").items()
    assert set(header) == set(model.parameters)
    content = path.read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    assert begin % 64 == 0
    for name, entry in header.items():
        assert entry["dtype"] == "F32" and tuple(entry["shape"]) == model.parameters[name].shape
        first, end = entry["data_offsets"]
        assert content[begin + first : begin + end] == model.parameters[name].tobytes()
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(content) - begin


# ---- what is refused -----------------------------------------------------------------------------


def write(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def without_one(header: dict[str, Any]) -> str:
    name = next(name for name in header if name != "__metadata__")
    del header[name]
    return name


def with_another(header: dict[str, Any]) -> str:
    name = next(name for name in header if name != "__metadata__")
    header["encoder.surplus"] = header[name]
    return "encoder.surplus"


def of_another_shape(header: dict[str, Any]) -> str:
    name = next(n for n, entry in header.items() if len(entry.get("shape", ())) == 2)
    header[name]["shape"].reverse()
    header[name]["shape"].append(1)
    return name


def of_another_type(header: dict[str, Any]) -> str:
    name = next(name for name in header if name != "__metadata__")
    header[name]["dtype"] = "I32"
    return name


@pytest.mark.parametrize("spoil", [without_one, with_another, of_another_shape, of_another_type])
def test_tensors_that_do_not_fit(tmp_path: Path, spoil: Callable[[dict[str, Any]], str]) -> None:
    model = trained()
    path = tmp_path / "model.safetensors"
    trained(5).save(path)
    header, content = header_of(path), path.read_bytes()
    data = content[8 + struct.unpack("<Q", content[:8])[0] :]
    name = spoil(header)
    write(path, header, data)
    before = state_of(model)
    with pytest.raises(OSError, match=name.replace(".", r"\.")):
        model.restore(path)
    assert_same_bits(state_of(model), before)


def test_files_that_are_none(tmp_path: Path) -> None:
    model = trained()
    before = state_of(model)
    path = tmp_path / "model.safetensors"
    model.save(path)
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    damaged = {
        "empty": b"",
        "seven bytes": content[:7],
        "header cut": content[: 8 + size // 2],
        "data cut": content[:-1],
        "data longer": content + b"\0",
        "a length beyond all": struct.pack("<Q", 2**63) + content[8:],
        "no JSON": content[:8] + b"x" * size + content[8 + size :],
        "text": b"these are no tensors, and the first eight bytes say a length that is not there",
    }
    for what, bytes_ in damaged.items():
        path.write_bytes(bytes_)
        with pytest.raises(OSError):
            model.restore(path)
        if what != "data cut" and what != "data longer":
            with pytest.raises(OSError):
                relpos.Transformer.load(path)
        assert_same_bits(state_of(model), before)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    model = trained()
    nowhere = tmp_path / "no" / "folder"
    for call in (
        lambda: model.save(nowhere),
        lambda: model.restore(nowhere),
        lambda: relpos.Transformer.load(nowhere),
        lambda: relpos.Config.load(nowhere),
        lambda: model.save(tmp_path),
    ):
        with pytest.raises(OSError, match=str(tmp_path)):
            call()
    for call in (
        lambda: model.restore(tmp_path),
        lambda: relpos.Transformer.load(tmp_path),
        lambda: relpos.Transformer.load(tmp_path, training=False),
        lambda: relpos.Transformer.load(str(tmp_path), config=model.config),
        lambda: relpos.Config.load(tmp_path),
    ):
        with pytest.raises(IsADirectoryError, match=f"{tmp_path}: a folder.* model.safetensors"):
            call()
    with pytest.raises(ValueError, match="what: expected 'weights' or 'average' or 'optimizer'"):
        model.save(tmp_path / "x", "everything")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_path(tmp_path: Path) -> None:
    model = trained()
    cases: list[tuple[Any, type[Exception], str]] = [
        (None, TypeError, "expected str or PathLike, got NoneType"),
        (True, TypeError, "expected str or PathLike, got bool"),
        ("a\0b", ValueError, r"expected a text without NUL, got 'a\\x00b'"),
        ("\ud800", ValueError, r"expected a text that has UTF-8, got '\\ud800'"),
    ]
    for path, error, sentence in cases:
        for call in (model.save, model.restore, relpos.Transformer.load, relpos.Config.load):
            with pytest.raises(error, match=f"^path: {sentence}$"):
                call(path)
        for paths in (path, [path]):
            with pytest.raises(error, match=f"^paths: {sentence}$"):
                relpos.Translator.load(paths)
    for name in (b"as bytes \xff", "as text \udcff"):  # what no UTF-8 has is a name all the same
        path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
        for each in (path, os.fsdecode(path)):
            model.save(each)  # type: ignore[arg-type]
            assert relpos.Config.load(each) == model.config  # type: ignore[arg-type]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """A file that may not grow to its size, as on a full disk."""
    model = trained()
    path = tmp_path / "model.safetensors"
    model.save(path)
    before = path.read_bytes()
    model.step(pairs())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, hard))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors"):
            model.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    model.save(path)
    assert path.read_bytes() != before


def test_an_optimizer_is_not_weights(tmp_path: Path) -> None:
    model = trained()
    before = state_of(model)
    model.save(tmp_path / "optimizer", "optimizer")
    model.save(tmp_path / "weights")
    with pytest.raises(OSError):
        model.restore(tmp_path / "optimizer")
    with pytest.raises(OSError):
        model.restore(tmp_path / "weights", "optimizer")
    other = small_model(width=32)
    weights_before = weights(other)
    with pytest.raises(OSError, match="shape|32|16"):
        other.restore(tmp_path / "weights")
    assert_same_bits(other.parameters, weights_before)
    assert_same_bits(state_of(model), before)


def test_counters_that_cannot_be(tmp_path: Path) -> None:
    """More updates than were tried."""
    path, model = tmp_path / "optimizer", trained()
    model.counters = 3, 3
    model.save(path, "optimizer")
    path.write_bytes(path.read_bytes().replace(b'"attempt":"3"', b'"attempt":"2"'))
    with pytest.raises(OSError, match="has step 3 and attempt 2"):
        small_model().restore(path, "optimizer")


def test_counters_that_are_saved_can_be_read(tmp_path: Path) -> None:
    model, other = trained(1), trained(1)
    most = 2**40
    model.counters = (most - 2, most - 1)
    model.step(pairs())
    assert model.counters == (most - 1, most)
    model.save(tmp_path / "optimizer", "optimizer")
    other.restore(tmp_path / "optimizer", "optimizer")
    assert other.counters == (most - 1, most)
    before = state_of(model)
    with pytest.raises(RuntimeError, match=rf"attempt={most}, of at most 2\^40"):
        model.step(pairs())
    model.backward(pairs())
    with pytest.raises(RuntimeError, match=rf"attempt={most}, of at most 2\^40"):
        model.update()
    assert model.counters == (most - 1, most)
    assert_same_bits(state_of(model), before)


def test_sizes_without_tensors_are_not_believed(tmp_path: Path) -> None:
    """A file of a few kB says 16 GB of weights; with less memory than that it is refused by name."""
    path = tmp_path / "model.safetensors"
    trained(1).save(path)
    header = header_of(path)
    told = header["__metadata__"]
    told.update({"width": "32768", "heads": "8", "feed_forward": "65536"})
    for tensors in ({}, {n: x for n, x in header.items() if n != "__metadata__"}):
        text = json.dumps({"__metadata__": told, **tensors}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        code = f"""
import resource, relpos
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
for training in (False, True):
    try:
        relpos.Transformer.load({str(path)!r}, training=training)
    except OSError as error:
        assert "source_embedding.weight" in str(error), error
        assert "is missing" in str(error) or "32768]" in str(error), error
    else:
        raise AssertionError(training)
"""
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(relpos.__file__).parent.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


# ---- pipes ---------------------------------------------------------------------------------------


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    model, other = trained(), small_model()
    model.save(tmp_path / "model.safetensors")
    read, write = os.pipe()

    def feed() -> None:
        with os.fdopen(write, "wb") as pipe:
            pipe.write((tmp_path / "model.safetensors").read_bytes())

    feeder = threading.Thread(target=feed)
    feeder.start()
    other.restore(f"/dev/fd/{read}")
    feeder.join()
    os.close(read)
    assert_same_bits(other.parameters, model.parameters)


def test_a_fifo_without_a_writer_is_not_waited_for(tmp_path: Path) -> None:
    """In a process of its own: no signal would end the wait."""
    os.mkfifo(tmp_path / "fifo")
    code = "import relpos; relpos.Config.load('fifo')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.endswith("'fifo': it ends after 0 bytes, where 8 more were expected\n")
