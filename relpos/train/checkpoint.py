# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: all of a training run between two steps, in a folder that is whole or not there.

    run/
      step-000001000/           one checkpoint
        model.safetensors       the weights, with the configuration
        average.safetensors     the average of the weights, likewise, where config.ema is not 0
        optimizer.safetensors   moments, averages and counters
        config.json             the configuration once more, to be read by people
        state.json              step, attempt, epoch, place in the data, seeds, build and device
        tokenizer/              the subwords, as they save themselves
        manifest.json           size and SHA-256 of every other file, written last
      .partial-4711-0/          one that is being written, or that was cut off

Every file and folder is synced before the folder gets its name, and the run's folder after it: what
has the name of a checkpoint has all of it, also after a loss of power. Nothing older is touched
before that. What is found is checked against its manifest, and passed over if it differs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relpos.config import Config
from relpos.data import files
from relpos.data.files import named, sha256_of, sync_path
from relpos.data.subwords import save_subwords
from relpos.library import build_info, devices
from relpos.model import Transformer
from relpos.warned import warn

MODEL = "model.safetensors"
AVERAGE = "average.safetensors"
OPTIMIZER = "optimizer.safetensors"
CONFIG = "config.json"
STATE = "state.json"
TOKENIZER = "tokenizer"
MANIFEST = "manifest.json"

_FORMAT = 1
_NAME = re.compile(r"step-(\d{9,})(?:\.(\d+))?")
_PARTIAL = ".partial-"
_OURS = re.compile(
    re.escape(_PARTIAL) + r"\d+-\d+"
)  # not that of a mean, which another process may write
# What the bits of a run depend on.
_BUILD = ("version", "isa", "blas", "device", "precision")


class Saves(Protocol):
    """What writes itself into a folder: subwords do."""

    def save(self, folder: Path, /) -> object: ...


class CheckpointWarning(UserWarning):
    """Something is amiss with a checkpoint, and work goes on without it."""


class CheckpointError(OSError):
    """A checkpoint cannot be read; the sentence says which and why."""


# --------------------------------------------------------------------------------------------------
# One checkpoint
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A folder with the name of a checkpoint; those of a run sort from old to new.

    step: int. Updates made. ordinal: int. Counts the checkpoints of one step, from 0.
    folder: Path.
    """

    step: int
    ordinal: int
    folder: Path

    @classmethod
    def at(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """The checkpoint in a folder, whatever its name, after a check of every byte."""
        path = Path(folder)
        if why := flaw(path):
            raise CheckpointError(f"{path}: {why}")
        step = read_json(path / STATE).get("step")
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"{path / STATE}: expected step, a whole number, got {step!r}")
        named = _NAME.fullmatch(path.name)
        return cls(step, int((named and named[2]) or 0), path)

    @property
    def state(self) -> dict[str, Any]:
        """What `save` was given, and step, attempt and build."""
        return read_json(self.folder / STATE)

    @property
    def config(self) -> Config:
        """The configuration that the weights carry."""
        return Config.load(self.folder / MODEL)

    @property
    def average(self) -> Path | None:
        """The file with the average of the weights, to be loaded as weights, if there is one."""
        path = self.folder / AVERAGE
        return path if path.is_file() else None

    @property
    def tokenizer(self) -> Path | None:
        """The folder with the subwords, if they have been saved."""
        folder = self.folder / TOKENIZER
        return folder if folder.is_dir() else None

    def restore(self, model: Transformer) -> dict[str, Any]:
        """Puts weights, moments, averages and counters into a model; returns the state.

        Warns where build, device or precision differ in what decides rounding: the run goes on, not
        to the bit. What an older version did not save is not compared.
        """
        state = self.state
        model.restore(self.folder / MODEL)
        model.restore(self.folder / OPTIMIZER, "optimizer")
        then, now = state.get("build"), _build(model)
        changed = ", ".join(
            f"{name} {then[name]} then and {now[name]} now"
            for name in _BUILD
            if isinstance(then, dict) and name in then and then[name] != now[name]
        )
        if changed:
            message = (
                f"{self.folder}: saved by another build or device ({changed}): equal up to rounding"
            )
            warn(message, CheckpointWarning)
        return state


def checkpoints(run: str | os.PathLike[str]) -> list[Checkpoint]:
    """The checkpoints of a run by their names, from old to new, unchecked."""
    folder, found = Path(run), []
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    for name in names:
        if (parts := _NAME.fullmatch(name)) and (folder / name).is_dir():
            found.append(Checkpoint(int(parts[1]), int(parts[2] or 0), folder / name))
    return sorted(found)


def newest(run: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole; a warning tells of each that is not."""
    return next(whole(checkpoints(run)), None)


def whole(found: Sequence[Checkpoint], *, thorough: bool = True) -> Iterator[Checkpoint]:
    """From the last to the first those that are whole; a warning tells of each that is not."""
    for checkpoint in reversed(found):
        if (why := flaw(checkpoint.folder, thorough=thorough)) is None:
            yield checkpoint
        else:
            message = f"{checkpoint.folder}: passed over: {why}"
            warn(message, CheckpointWarning)


def flaw(folder: Path, *, thorough: bool = True) -> str | None:
    """Why a folder is no whole checkpoint; None if it is. thorough: also by SHA-256."""
    try:
        if not folder.is_dir():
            return "there is no such folder"
        if not (folder / MANIFEST).is_file():
            return f"no checkpoint: {MANIFEST}, which is written last, is not there"
        manifest = files.read_json(folder / MANIFEST)
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except ValueError:
        return f"{MANIFEST} is no JSON object"
    listed = manifest.get("files")
    if manifest.get("format") != _FORMAT or not isinstance(listed, dict):
        return f"{MANIFEST} is not of relpos, or of a later version"
    for name in (MODEL, OPTIMIZER, CONFIG, STATE):
        if name not in listed:
            return f"{MANIFEST} does not list {name}"
    for name, entry in listed.items():
        if why := _file_flaw(folder, name, entry, thorough):
            return why
    return None


def _file_flaw(folder: Path, name: str, entry: Any, thorough: bool) -> str | None:
    parts = name.split("/")
    if not isinstance(entry, dict) or any(part in ("", ".", "..") for part in parts):
        return f"{MANIFEST} is damaged at {name!r}"
    path = folder.joinpath(*parts)
    try:
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry.get("bytes"):
            return f"{name} has {size} bytes instead of {entry.get('bytes')}"
        if thorough and sha256_of(str(path)) != entry.get("sha256"):
            return f"{name} has another content than when it was written"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None


# --------------------------------------------------------------------------------------------------
# Saving
# --------------------------------------------------------------------------------------------------

_ordinals = itertools.count()


def save(
    run: str | os.PathLike[str],
    model: Transformer,
    state: Mapping[str, Any] | None = None,
    *,
    tokenizer: Saves | None = None,
    keep: int | None = None,
    spare: frozenset[int] = frozenset(),
) -> Checkpoint:
    """Writes a checkpoint of a model between two steps, whole or not at all.

    run: str or PathLike. The run's folder; it is made where there is none.
    model: Transformer, which trains.
    state: what else a resumed run needs, as JSON can say it; step, attempt and build are added.
    tokenizer: an object with save(folder).
    keep: int. Whole checkpoints of this run up to this one that stay; None: all.
    spare: steps whose checkpoints stay beside those.

    A failure leaves the checkpoints of the run as they were. Removing old ones comes last, and a
    failure there is a warning.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep: expected 1 or more, got {keep}")
    folder = Path(run)
    step, attempt = model.counters
    whole = {**(state or {}), "step": step, "attempt": attempt, "build": _build(model)}
    try:
        saved = _save(folder, model, whole, tokenizer)
    except OSError as error:
        if (told := named(error, folder)) is not error:
            raise told from error
        raise
    if keep is not None:
        _remove_old(saved, keep, spare)
    return saved


def _save(
    folder: Path, model: Transformer, state: dict[str, Any], tokenizer: Saves | None
) -> Checkpoint:
    make_folder(folder)
    _remove_partial(folder)
    partial = folder / f"{_PARTIAL}{os.getpid()}-{next(_ordinals)}"
    with new_folder(partial):
        _write(partial, model, state, tokenizer)
        step = state["step"]
        ordinals = [each.ordinal for each in checkpoints(folder) if each.step == step]
        ordinal = max(ordinals) + 1 if ordinals else 0
        name = f"step-{step:09}" + (f".{ordinal}" if ordinal else "")
        os.rename(partial, folder / name)
    sync_path(folder)
    return Checkpoint(step, ordinal, folder / name)


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Makes one to be filled, which goes with all that is in it where that fails."""
    try:
        os.mkdir(folder)
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(
    partial: Path, model: Transformer, state: dict[str, Any], tokenizer: Saves | None
) -> None:
    model.save(partial / MODEL)
    if len(model.averages) > 0:
        model.save(partial / AVERAGE, "average")
    model.save(partial / OPTIMIZER, "optimizer")
    write_json(partial / CONFIG, dataclasses.asdict(model.config))
    write_json(partial / STATE, state)
    if tokenizer is not None:
        save_subwords(partial / TOKENIZER, tokenizer)
    listed = {}
    for path in sync_files(partial):
        name = path.relative_to(partial).as_posix()
        listed[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(str(path))}
    write_json(partial / MANIFEST, {"format": _FORMAT, "files": listed})
    sync_path(partial)


def sync_files(partial: Path) -> list[Path]:
    """Every file in a folder and below it, synced, as the folders below it are."""

    def stop(error: OSError) -> None:
        raise error  # a folder that cannot be listed would be left out in silence

    synced = []
    for folder, _, names in os.walk(partial, onerror=stop):
        for name in names:
            # The model's files are synced already, those of subwords may not be.
            sync_path(Path(folder) / name)
            synced.append(Path(folder) / name)
        if Path(folder) != partial:
            sync_path(Path(folder))
    return sorted(synced)


def _remove_old(saved: Checkpoint, keep: int, spare: frozenset[int]) -> None:
    """Those from before `saved`; later ones, from before a return to an older one, stay."""
    kept, run = 0, saved.folder.parent
    try:
        found = checkpoints(run)
    except OSError as error:
        warn(f"{run}: no old checkpoint removed: {error.strerror}", CheckpointWarning)
        return
    for checkpoint in reversed(found):
        if checkpoint > saved or flaw(checkpoint.folder, thorough=False) is not None:
            continue
        replaced = checkpoint.step == saved.step and checkpoint != saved
        if not replaced and (kept < keep or checkpoint.step in spare):
            kept += 1
            continue
        # It loses its name first, so that nobody finds half of it.
        going = run / f"{_PARTIAL}{os.getpid()}-{next(_ordinals)}"
        try:
            os.rename(checkpoint.folder, going)
            _remove(going)
        except OSError as error:
            warn(f"{checkpoint.folder}: not removed: {error.strerror or error}", CheckpointWarning)


def _remove_partial(folder: Path) -> None:
    """What runs that were cut off have left."""
    for name in os.listdir(folder):
        if _OURS.fullmatch(name):
            with suppress(OSError):
                _remove(folder / name, ignore_errors=True)


def _remove(folder: Path, ignore_errors: bool = False) -> None:
    """Of a checkpoint that lies elsewhere the link goes, and it stays."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=ignore_errors)


def make_folder(folder: Path) -> None:
    """With the folders above it, each of them synced into the one that holds it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        os.makedirs(path, exist_ok=True)
        sync_path(path.parent)


def _build(model: Transformer) -> dict[str, str]:
    """With the device by its title: which of several alike it was changes no bit."""
    info, device = build_info(), model.device
    if device != "cpu":
        name = device if ":" in device else f"{device}:0"
        device = next(each.title for each in devices() if each.name == name)
    return {
        "version": info["version"], "isa": info["isa"], "blas": info["blas"],
        "device": device, "precision": model.precision,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A new file with a JSON object, synced."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    left = memoryview(text.encode())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file."""
    try:
        return files.read_json(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
