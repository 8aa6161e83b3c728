# SPDX-License-Identifier: Apache-2.0
"""The mean of the weights of several checkpoints, which translates better than the last of them."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from relpos.config import Config
from relpos.data.files import sync_path
from relpos.model import Transformer
from relpos.train.checkpoint import (
    CONFIG,
    MODEL,
    TOKENIZER,
    Checkpoint,
    make_folder,
    new_folder,
    sync_files,
    write_json,
)

# How a run is trained may change on the way, what it trains may not; its seed made the weights.
HOW = frozenset(
    (
        "schedule", "learning_rate", "warmup", "steps", "final_rate", "clip_norm", "beta1", "beta2",
        "adam_epsilon", "weight_decay", "ema", "dropout", "attention_dropout", "activation_dropout",
        "label_smoothing", "smoothing",
    )
)  # fmt: skip


def average(checkpoints: Sequence[Checkpoint], folder: str | os.PathLike[str]) -> Path:
    """Writes the mean of checkpoints, summed in float64, as weights with their vocabulary.

    checkpoints: Checkpoint each, of one model: another one is refused by the name of the field that
        differs.
    folder: str or PathLike. Made, and there only when it is whole, as a checkpoint is.

    Returns the path of the weights.
    """
    if not checkpoints:
        raise ValueError("checkpoints: expected one or more, got none")
    checked = [Checkpoint.at(each.folder) for each in checkpoints]
    config = checked[-1].config
    for each in checked:
        check_same(config, each.config, checked[-1].folder, each.folder)
    path = Path(folder)
    if path.exists():
        raise FileExistsError(f"folder: {path} is there already; give another one")
    model = Transformer(config, tokens=config.max_length, sentences=1, training=False)
    put_mean(model, [each.folder / MODEL for each in checked])

    make_folder(path.parent)
    partial = path.with_name(f".partial-mean-{path.name}-{os.getpid()}")
    with new_folder(partial):
        model.save(partial / MODEL)
        write_json(partial / CONFIG, dataclasses.asdict(config))
        steps = [each.step for each in checked]
        write_json(partial / "average.json", {"steps": steps})
        if (tokenizer := checked[-1].tokenizer) is not None:
            shutil.copytree(tokenizer, partial / TOKENIZER)
        sync_files(partial)
        sync_path(partial)
        os.rename(partial, path)
    sync_path(path.parent)
    return path / MODEL


def put_mean(model: Transformer, files: Sequence[Path]) -> None:
    """Gives a model the mean of the weights in files, summed in float64."""
    sums = {name: np.zeros(x.shape, np.float64) for name, x in model.parameters.items()}
    for file in files:
        model.restore(file)
        for name, weights in model.parameters.items():
            sums[name] += weights
    for name, total in sums.items():
        model.assign(name, total / len(files))


def check_same(one: Config, other: Config, here: Path, there: Path) -> None:
    """Refuses configurations of which one is no later state of the other."""
    others = dict(other.pairs())
    for name, value in one.pairs():
        if name not in HOW and others[name] != value:
            raise ValueError(f"{name}: {value} in {here}, {others[name]} in {there}")
