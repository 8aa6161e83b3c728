# SPDX-License-Identifier: Apache-2.0
"""Runs with untrained models, whose weights are large enough that every sentence differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import relpos
import text_files
from relpos.data import Words
from relpos.train import checkpoint

VOCABULARY = Words(text_files.WORDS)
LONGEST = 16  # as text_files.config has it


def random_model(seed: int = 1, **changes: Any) -> relpos.Transformer:
    given = {"source_vocabulary": VOCABULARY.size, "target_vocabulary": VOCABULARY.size}
    given |= {"share_embeddings": False, "share_output": False}
    model = relpos.Transformer(text_files.config(**given | changes), tokens=256, sentences=64)
    random = np.random.default_rng(seed)
    for name, weights in model.parameters.items():
        if not name.endswith("norm.weight"):
            weights[...] = random.normal(0, 0.35, weights.shape)
    return model


def save(run: Path, *models: relpos.Transformer) -> Path:
    """A run whose checkpoints have these models."""
    for step, model in enumerate(models, 1):
        model.counters = step, step
        checkpoint.save(run, model, tokenizer=VOCABULARY)
    return run


def tokens(text: str) -> list[int]:
    return VOCABULARY.encode(text)


def spoil(model: relpos.Transformer, word: str) -> None:
    """Every sentence with this word is not a number to the model."""
    model.parameters["source_embedding.weight"][tokens(word)[0]] = np.nan
