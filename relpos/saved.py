# SPDX-License-Identifier: Apache-2.0
"""Saved models as people name them: a checkpoint, a run, a mean, or a file of weights.

A model of gigabytes is to answer at once, so that files are checked by their sizes, and by what
reading them finds, not by their SHA-256 as training does.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos.config import Config
from relpos.data.subwords import check_vocabulary, load_subwords
from relpos.data.vocabulary import Subwords
from relpos.model import Precision, Transformer
from relpos.position.arrays import check_count
from relpos.train.average import check_same, put_mean
from relpos.train.checkpoint import (
    AVERAGE,
    MANIFEST,
    MODEL,
    STATE,
    TOKENIZER,
    Checkpoint,
    CheckpointError,
    CheckpointWarning,
    checkpoints,
    flaw,
    read_json,
    whole,
)
from relpos.warned import warn

SENTENCES = 512  # the most of a batch


@dataclass(frozen=True, slots=True)
class Saved:
    """weights: Path each; of several the mean is meant. tokenizer: Path, their vocabulary."""

    weights: tuple[Path, ...]
    tokenizer: Path


def find_model(
    path: str | os.PathLike[str], average: int | None = None, best: bool = False
) -> Saved:
    """What a path means.

    path: str or PathLike. The folder of a checkpoint, of `relpos average`, of a run (its newest
        whole checkpoint), or a file of weights. Of a folder the running average, if there is one.
    average: int. The mean of so many of a run's last checkpoints; where it has fewer, of those, and a
        CheckpointWarning says so.
    best: bool. Of a run the checkpoint that had the best validation.
    """
    where = Path(path)
    if average is not None:
        check_count("average", average, 1)
        if best:
            raise ValueError("best: average is given, the mean of the last checkpoints")
    in_run = checkpoints(where) if where.is_dir() else []
    if in_run and (best or average is not None or not (where / MODEL).exists()):
        found = find_run(in_run, average)
        if best:
            return find_model(_best_step(where, found.weights[-1].parent))
        return found
    if in_run:
        message = f"{where}: its {MODEL} is taken, not the checkpoints beside it; name one of them"
        warn(message, CheckpointWarning)
    if average is not None:
        raise ValueError(f"{where}: is no run, whose last checkpoints could be averaged")
    if best and where.exists():
        raise ValueError(f"{where}: is no run, of which the best checkpoint could be told")
    if where.is_file():
        _check_weights(where)
        return Saved((where,), where.parent / TOKENIZER)
    if not where.is_dir():
        raise FileNotFoundError(f"{where}: there is no such model")
    if (where / MANIFEST).exists() or (where / STATE).exists():
        if (why := flaw(where, thorough=False)) is not None:
            raise CheckpointError(f"{where}: {why}")
    elif not (where / MODEL).is_file():
        raise CheckpointError(f"{where}: no model here: neither {MODEL} nor a checkpoint of a run")
    return Saved((_best_of(where),), where / TOKENIZER)


def find_run(found: Sequence[Checkpoint], average: int | None = None) -> Saved:
    """The newest that is whole of a run's checkpoints, or so many of the last; a warning tells of each
    that is passed over."""
    run = found[0].folder.parent
    newest_first = list(itertools.islice(whole(found, thorough=False), average or 1))
    if not newest_first:
        raise CheckpointError(f"{run}: none of its checkpoints is whole")
    weights = tuple(each.folder / MODEL for each in reversed(newest_first))
    if average is not None and len(weights) < average:
        message = f"{run}: a mean of {len(weights)}, not of average={average}: it has no more"
        warn(message, CheckpointWarning)
    newest = weights[-1].parent
    return Saved(weights if average else (_best_of(newest),), newest / TOKENIZER)


def _check_weights(file: Path) -> None:
    try:
        Config.load(file)
    except OSError as error:
        raise CheckpointError(
            f"{error}; a model is the folder that `relpos train` leaves, or a file of its weights"
        ) from None


def _best_step(run: Path, newest: Path) -> Path:
    """The folder of the checkpoint with the best validation, as the newest one says."""
    told = read_json(newest / STATE).get("run")
    step = told.get("best_step") if isinstance(told, dict) else None
    if step is None:
        raise ValueError(f"{run}: has no best checkpoint, as nothing was validated")
    found = [each.folder for each in checkpoints(run) if each.step == step]
    if not found:
        raise CheckpointError(f"{run}: its best checkpoint, of step {step:,}, is not there")
    return found[-1]


def _best_of(folder: Path) -> Path:
    """The running average of the weights, where training has kept one: it is what was validated."""
    return folder / AVERAGE if (folder / AVERAGE).is_file() else folder / MODEL


def check_tokenizer(saved: Saved) -> None:
    """Refuses weights without the vocabulary that they were trained with."""
    if not saved.tokenizer.is_dir():
        raise FileNotFoundError(
            f"{saved.weights[-1]}: beside it is no folder {TOKENIZER}: the vocabulary is not there, "
            "which `relpos train` leaves with the weights"
        )


def load_model(
    saved: Saved,
    *,
    tokenizer: Any = None,
    unpickle: bool = False,
    batch_tokens: int,
    device: str = "cpu",
    precision: Precision = "f32",
) -> tuple[Transformer, Subwords]:
    """The model, for work without training, and its vocabulary.

    tokenizer, unpickle: as of `load_subwords`.
    batch_tokens: int. The most of a batch on each side; a single sentence always fits.
    device, precision: as of `Transformer`.
    """
    check_tokenizer(saved)
    subwords = load_subwords(saved.tokenizer, tokenizer=tokenizer, unpickle=unpickle)
    config = Config.load(saved.weights[-1])
    check_vocabulary(subwords, config)
    tokens = max(batch_tokens, config.max_length)
    if len(saved.weights) == 1:
        [file] = saved.weights
        model = Transformer.load(
            file, tokens=tokens, sentences=SENTENCES, training=False,
            device=device, precision=precision,
        )  # fmt: skip
        return model, subwords
    try:
        for each in saved.weights:
            check_same(config, Config.load(each), saved.weights[-1], each)
    except ValueError as error:  # the search has a max_length and a seed too, which are not meant
        raise ValueError(f"average: of different models: {error}") from None
    model = Transformer(
        config, tokens=tokens, sentences=SENTENCES, training=False,
        device=device, precision=precision,
    )  # fmt: skip
    put_mean(model, saved.weights)
    return model, subwords
