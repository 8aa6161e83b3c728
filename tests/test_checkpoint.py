# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: written whole or not at all, found by themselves, gone on from bit for bit."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos.train import Checkpoint, CheckpointError, CheckpointWarning, checkpoint, newest
from relpos.train.average import average
from small_model import assert_same_bits, pairs, small_config, small_model, state_of, trained


class OneFile:
    """Subwords, as far as a checkpoint is concerned."""

    def save(self, folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "words.txt").write_text("ä\nb\n", encoding="utf-8")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def quietly_newest(run: Path) -> Checkpoint | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        return newest(run)


# ---- what is written -----------------------------------------------------------------------------


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    model = trained(3, ema=0.9)
    run = tmp_path / "some" / "run"
    saved = checkpoint.save(run, model, {"epoch": 2, "where": "Zürich"}, tokenizer=OneFile())
    assert saved == newest(run) == Checkpoint.at(saved.folder)
    assert saved == Checkpoint(3, 0, run / "step-000000003")
    files = [p.relative_to(saved.folder).as_posix() for p in saved.folder.rglob("*")]
    assert sorted(files) == [
        "average.safetensors", "config.json", "manifest.json", "model.safetensors",
        "optimizer.safetensors", "state.json", "tokenizer", "tokenizer/inner",
        "tokenizer/inner/words.txt",
    ]  # fmt: skip
    assert saved.tokenizer == saved.folder / "tokenizer" and names(run) == ["step-000000003"]
    assert saved.config == model.config
    shown = json.loads((saved.folder / "config.json").read_text())
    assert relpos.Config().replace(flat(shown)) == model.config
    state = saved.state
    assert (state["step"], state["attempt"], state["epoch"]) == (3, 3, 2)
    assert state["where"] == "Zürich" and state["build"]["isa"] == relpos.build_info()["isa"]

    other = small_model(ema=0.9)
    assert saved.restore(other) == state
    assert other.counters == (3, 3)
    assert_same_bits(state_of(other), state_of(model))


def flat(nested: dict[str, Any]) -> dict[str, Any]:
    whole = {name: value for name, value in nested.items() if not isinstance(value, dict)}
    for stack in ("encoder", "decoder"):
        whole |= {f"{stack}.{name}": value for name, value in nested[stack].items()}
    return whole


def test_the_same_step_twice(tmp_path: Path) -> None:
    """The second is whole before the first one goes, and is the newer of the two."""
    model = trained(1)
    first = checkpoint.save(tmp_path, model, {"which": 1})
    second = checkpoint.save(tmp_path, model, {"which": 2})
    assert first < second == newest(tmp_path) and second.state["which"] == 2
    third = checkpoint.save(tmp_path, model, {"which": 3}, keep=5)
    assert names(tmp_path) == ["step-000000001.2"] == [third.folder.name]
    fourth = checkpoint.save(tmp_path, model, {"which": 4})  # newer, though there is but one
    assert third < fourth == newest(tmp_path)


def test_how_many_stay(tmp_path: Path) -> None:
    model = small_model()
    for step in (100, 9, 30, 1_000_000_000, 40):
        model.counters = step, step
        checkpoint.save(tmp_path, model)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-7").mkdir()
    found = [each.step for each in checkpoint.checkpoints(tmp_path)]
    assert found == [9, 30, 40, 100, 1_000_000_000]
    model.counters = 101, 101
    checkpoint.save(tmp_path, model, keep=2, spare=frozenset({30}))
    # 1,000,000,000 is newer than 101, from before a return: not this run's to remove.
    assert [each.step for each in checkpoint.checkpoints(tmp_path)] == [30, 100, 101, 10**9]
    assert {"notes.txt", "step-7"} < set(names(tmp_path))
    with pytest.raises(ValueError, match="keep: expected 1 or more, got 0"):
        checkpoint.save(tmp_path, model, keep=0)


def test_damaged_ones_do_not_count(tmp_path: Path) -> None:
    model = small_model()
    for step in (1, 2, 3):
        model.counters = step, step
        checkpoint.save(tmp_path, model)
    for step in (2, 3):
        (tmp_path / f"step-00000000{step}" / "model.safetensors").write_bytes(b"")
    model.counters = 4, 4
    checkpoint.save(tmp_path, model, keep=2)
    assert [each.step for each in checkpoint.checkpoints(tmp_path)] == [1, 2, 3, 4]


# ---- what is found -------------------------------------------------------------------------------


def cut(folder: Path) -> str:
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return r"optimizer\.safetensors has \d+ bytes instead of \d+"


def flip(folder: Path) -> str:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return r"model\.safetensors has another content than when it was written"


def lose_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return r"no checkpoint: manifest\.json, which is written last, is not there"


def spoil_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"format": 1, "fi')
    return r"manifest\.json is no JSON object"


def foreign_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"short_name": "an app", "icons": []}')
    return r"manifest\.json is not of relpos, or of a later version"


def later_manifest(folder: Path) -> str:
    change(folder, lambda manifest: manifest.update(format=2))
    return r"manifest\.json is not of relpos, or of a later version"


def unlisted(folder: Path) -> str:
    change(folder, lambda manifest: manifest["files"].pop("state.json"))
    return r"manifest\.json does not list state\.json"


def climbing(folder: Path) -> str:
    change(folder, lambda manifest: manifest["files"].update({"../x": {"bytes": 0, "sha256": ""}}))
    return r"manifest\.json is damaged at '\.\./x'"


def lose_words(folder: Path) -> str:
    shutil.rmtree(folder / "tokenizer")
    return r"tokenizer/inner/words\.txt is missing"


def change(folder: Path, how: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    how(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "spoil",
    [
        cut, flip, lose_manifest, spoil_manifest, foreign_manifest, later_manifest, unlisted,
        climbing, lose_words,
    ],
)  # fmt: skip
def test_the_newest_that_is_whole(tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    model = trained(1)
    good = checkpoint.save(tmp_path, model)
    model.step(pairs())
    bad = checkpoint.save(tmp_path, model, tokenizer=OneFile())
    assert newest(tmp_path) == bad
    why = spoil(bad.folder)
    with pytest.warns(CheckpointWarning, match=f"step-000000002: passed over: {why}"):
        assert newest(tmp_path) == good
    with pytest.raises(CheckpointError, match=f"step-000000002: {why}"):
        Checkpoint.at(bad.folder)


def test_one_that_may_not_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(1)
    good = checkpoint.save(tmp_path, model)
    model.step(pairs())
    bad = checkpoint.save(tmp_path, model)
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent == bad.folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)  # root may enter any folder
    with pytest.warns(CheckpointWarning, match="000002: passed over: manifest.json cannot be read"):
        assert newest(tmp_path) == good


def test_nothing_to_find(tmp_path: Path) -> None:
    assert newest(tmp_path) is None and newest(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="nowhere: there is no such folder"):
        Checkpoint.at(tmp_path / "nowhere")


def test_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told, a device and a precision too; not what older versions did not save."""
    model, same = trained(1), relpos.build_info()
    gpu = {"device": "NVIDIA H100 80GB HBM3", "precision": "bf16"}
    build = {"version": same["version"], "isa": "other", "blas": same["blas"]}
    cpu = {"device": "cpu", "precision": "f32"}
    for changes, told in (
        (build, r"isa other then and \w+ now"),
        (build | cpu, r"isa other then and \w+ now"),
        (
            {"version": "0.0.1", "isa": same["isa"], "blas": "other"},
            r"version 0\.0\.1 then and \S+ now, blas other then and .+ now",
        ),
        (
            build | gpu | {"isa": same["isa"]},
            "device NVIDIA H100 80GB HBM3 then and cpu now, precision bf16 then and f32 now",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_build", lambda _, changes=changes: changes)
            saved = checkpoint.save(tmp_path, model)
        with pytest.warns(CheckpointWarning, match=rf"another build or device \({told}\)"):
            saved.restore(small_model())
    state = checkpoint.save(tmp_path, model).state
    assert state["build"] == build | cpu | {"isa": same["isa"]}
    for older in ({}, {"build": build | {"isa": same["isa"]}}):
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("error")
            patch.setattr(checkpoint, "read_json", lambda _, older=older: older)
            assert saved.restore(small_model()) == older


def test_what_was_cut_off_is_cleared_away(tmp_path: Path) -> None:
    """But not a mean that another process may be writing here."""
    for name in (".partial-4711-0", ".partial-average-9-4711"):
        (tmp_path / name).mkdir()
    checkpoint.save(tmp_path, trained(1))
    assert [each.name for each in tmp_path.glob(".partial-*")] == [".partial-average-9-4711"]


# ---- faults --------------------------------------------------------------------------------------

CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "listdir", "scandir")


@contextmanager
def failing(at: int) -> Iterator[list[tuple[str, Path]]]:
    """The call of that number, counted over all of CALLS, says that the disk is full; 0: none does.
    What was called, and for which path."""
    made: list[tuple[str, Path]] = []
    real = {name: getattr(os, name) for name in CALLS}
    opened: dict[int, Path] = {}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            given = arguments[0]
            made.append((name, opened.get(given, Path()) if type(given) is int else Path(given)))
            if len(made) == at:
                if name == "close":
                    real[name](*arguments)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            returned = real[name](*arguments, **keywords)
            if name == "open":
                opened[returned] = Path(given)
            return returned

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrapped(name))
        yield made


def synced(made: list[tuple[str, Path]]) -> set[Path]:
    """What was synced and not written to since, among the calls that `failing` tells of."""
    last = {path: name for name, path in made if name in ("write", "fsync")}
    return {path for path, name in last.items() if name == "fsync"}


def there(folder: Path, partial: Path) -> set[Path]:
    """All that lies in a folder, by the names that it had in another one."""
    return {partial / path.relative_to(folder) for path in folder.rglob("*")}


def test_a_loss_of_power_leaves_no_half_of_it(tmp_path: Path) -> None:
    """All is synced before the manifest is begun, the manifest before the rename, and then that."""
    with failing(0) as made:
        saved = checkpoint.save(tmp_path, trained(1, ema=0.9), tokenizer=OneFile())
    [(at, partial)] = [(i, path) for i, (name, path) in enumerate(made) if name == "rename"]
    manifest = partial / "manifest.json"
    begun = made.index(("open", manifest))
    files = there(saved.folder, partial) - {manifest}
    assert len(files) == 8 and synced(made[:begun]) == files
    assert {path for name, path in made[begun:] if name == "write"} == {manifest}
    assert synced(made[begun:at]) == {manifest, partial}
    assert synced(made[at:]) == {tmp_path}


def test_nor_half_of_a_mean(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path / "run", trained(1), tokenizer=OneFile())
    with failing(0) as made:
        average([saved], tmp_path / "means" / "mean")
    [(at, partial)] = [(i, path) for i, (name, path) in enumerate(made) if name == "rename"]
    files = there(tmp_path / "means" / "mean", partial)
    assert partial / "tokenizer" / "inner" / "words.txt" in files
    assert files | {partial, tmp_path} <= synced(made[:at])
    assert synced(made[at:]) == {tmp_path / "means"}


def test_a_mean_is_summed_in_double(tmp_path: Path) -> None:
    model, found = small_model(), []
    for step, value in ((1, 1e8), (2, 1.0), (3, -1e8)):
        model.counters = step, step
        for weights in model.parameters.values():
            weights[:] = value
        found.append(checkpoint.save(tmp_path / "run", model))
    mean = relpos.Transformer.load(average(found, tmp_path / "mean"), training=False)
    assert all((weights == np.float32(1 / 3)).all() for weights in mean.parameters.values())


def test_every_call_failing_in_turn(tmp_path: Path) -> None:
    """The old checkpoint stays, the new one is whole or not there, nothing else is left."""
    model = trained(1)
    old = checkpoint.save(tmp_path, model)
    model.step(pairs())
    before = state_of(model)
    seen = set()
    for at in range(1, 1000):
        with failing(at) as made, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                checkpoint.save(tmp_path, model, tokenizer=OneFile(), keep=3)
            except OSError as error:
                assert error.errno == errno.ENOSPC and error.filename is not None
            else:
                if len(made) < at:
                    break
                assert [str(each.message) for each in warned] == [
                    f"{tmp_path}: no old checkpoint removed: {os.strerror(errno.ENOSPC)}"
                ]
        seen.add(made[at - 1][0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of anything that is half there
            assert newest(tmp_path) is not None
        assert old in checkpoint.checkpoints(tmp_path)
        leftover = [name for name in names(tmp_path) if not name.startswith("step-")]
        assert leftover == []
        for each in checkpoint.checkpoints(tmp_path):
            if each != old:
                shutil.rmtree(each.folder)
    assert seen == set(CALLS) and at > 20
    assert_same_bits(state_of(model), before)


def test_a_full_disk_under_the_model(tmp_path: Path) -> None:
    """No file may grow beyond a limit, for the writes of the core; each limit stops another one."""
    model = trained(1)
    old = checkpoint.save(tmp_path, model)
    sizes = sorted(path.stat().st_size for path in old.folder.iterdir())
    model.step(pairs())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, *(size - 1 for size in sizes[-3:])):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match="safetensors|large|config"):
                checkpoint.save(tmp_path, model)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert names(tmp_path) == ["step-000000001"] and newest(tmp_path) == old
    assert checkpoint.save(tmp_path, model) == newest(tmp_path)


def test_an_old_one_that_cannot_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is no reason to lose the new one."""
    model = trained(1)
    checkpoint.save(tmp_path, model)
    model.step(pairs())

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(CheckpointWarning, match="step-000000001: not removed: Permission denied"):
        saved = checkpoint.save(tmp_path, model, keep=1)
    assert newest(tmp_path) == saved
    monkeypatch.undo()
    checkpoint.save(tmp_path, model)  # sweeps up what was left
    assert [name[0] for name in names(tmp_path)] == ["s", "s"]


def test_of_an_old_one_that_lies_elsewhere_the_link_goes(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    model = trained(1)
    old = checkpoint.save(run, model)
    old.folder.rename(elsewhere)
    old.folder.symlink_to(elsewhere)
    (run / ".partial-1-0").symlink_to(elsewhere)  # as older versions left them
    model.step(pairs())
    checkpoint.save(run, model, keep=1)
    assert names(run) == ["step-000000002"] and checkpoint.flaw(elsewhere) is None


def run_script(script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::UserWarning", "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    # not from here: in the repository Python would import the sources
    package = Path(relpos.__file__).parent.parent
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, cwd=package
    )


KILLED_WHILE_SAVING = """
import os, signal, sys
import test_checkpoint as here
from relpos.train import checkpoint, newest

model = here.trained(1)
before = here.Path(sys.argv[1]) / "before"
old = checkpoint.save(before, model)
model.step(here.pairs())
unbroken = here.trained(1)
for seed in (0, 2):
    unbroken.step(here.pairs(seed=seed))
lost = kept = 0
for at in range(1, 1000):
    run = before.with_name(f"run-{at}")
    here.shutil.copytree(before, run)
    child = os.fork()
    if child == 0:
        calls = 0
        def kill_at(name, real):
            def call(*arguments, **keywords):
                global calls
                calls += 1
                if calls == at:
                    if name == "write":
                        real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **keywords)
            return call
        for name in here.CALLS:
            setattr(os, name, kill_at(name, getattr(os, name)))
        checkpoint.save(run, model, tokenizer=here.OneFile(), keep=1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    found, again = newest(run), here.small_model()
    step = found.step
    assert step in (1, 2)
    lost += step == 1
    kept += step == 2
    found.restore(again)
    for seed in (0, 2)[step - 1 :]:
        again.step(here.pairs(seed=seed))
    assert again.counters == unbroken.counters == (3, 3)
    here.assert_same_bits(here.state_of(again), here.state_of(unbroken))
saved = checkpoint.save(before.with_name("run-20"), model, keep=1)
assert here.names(saved.folder.parent) == [saved.folder.name]
print(lost, kept)
"""


def test_kill_in_the_middle_of_saving(tmp_path: Path) -> None:
    """At every call that touches the disk: what is found is the old one or the new one, whole, and
    goes on from there as if nothing had been."""
    done = run_script(KILLED_WHILE_SAVING, tmp_path)
    assert done.returncode == 0, done.stderr
    lost, kept = map(int, done.stdout.split())
    assert lost > 15 and kept >= 2


TRAINED_AND_KILLED = """
import os, signal, sys
import test_checkpoint as here
from relpos.train import checkpoint

model = here.small_model(ema=0.99)
for seed in range(int(sys.argv[2])):
    model.step(here.pairs(seed=seed))
    if (seed + 1) % 50 == 0:
        checkpoint.save(sys.argv[1], model, {"seed": seed + 1}, keep=2)
model.step(here.pairs(seed=999))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_200_steps_are_100_and_kill_and_100(tmp_path: Path) -> None:
    done = run_script(TRAINED_AND_KILLED, tmp_path, 100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = newest(tmp_path)
    assert found is not None and found.step == found.state["seed"] == 100
    model = relpos.Transformer(found.config, tokens=256, sentences=32)
    assert min(model.config.dropout, model.config.attention_dropout, model.config.ema) > 0
    found.restore(model)
    for seed in range(100, 200):
        model.step(pairs(seed=seed))
    unbroken = trained(200, ema=0.99)
    assert model.counters == unbroken.counters == (200, 200)
    assert_same_bits(state_of(model), state_of(unbroken))
    without = trained(200, ema=0.99, seed=8)
    some = next(iter(without.parameters))
    assert not np.array_equal(without.parameters[some], unbroken.parameters[some])


def test_a_model_of_another_shape(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, trained(1))
    with pytest.raises(OSError, match="shape|expected"):
        saved.restore(small_model(width=32))
    assert saved.config == small_config()
    assert quietly_newest(tmp_path) == saved
