# SPDX-License-Identifier: Apache-2.0
"""Small text files to train on: a sentence, and the same backwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import relpos
from relpos.data import Words

WORDS = [f"{a}{b}" for a in "bdfgk" for b in "aeiou"]


def sentences(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(2, 8))) for _ in range(count)]


def backwards(lines: list[str]) -> list[str]:
    return [" ".join(line.split()[::-1]) for line in lines]


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    lines = sentences(count, seed)
    return list(zip(lines, backwards(lines), strict=True))


def write_pairs(folder: Path, name: str, count: int, seed: int = 0) -> tuple[Path, Path]:
    source, target = folder / f"{name}.forwards", folder / f"{name}.backwards"
    lines = sentences(count, seed)
    source.write_text("".join(f"{line}\n" for line in lines))
    target.write_text("".join(f"{line}\n" for line in backwards(lines)))
    return source, target


def vocabulary() -> Words:
    return Words(WORDS)


def config(**changes: Any) -> relpos.Config:
    """1 + 1 layers of width 32, with dropout; keywords for dotted names have __ for the dot."""
    given = {
        "width": 32, "heads": 2, "feed_forward": 64, "max_length": 16,
        "encoder.layers": 1, "decoder.layers": 1, "encoder.k": 3, "decoder.k": 3,
        "dropout": 0.1, "attention_dropout": 0.1, "schedule": "constant", "learning_rate": 0.003,
        "warmup": 0, "steps": 60, "seed": 7,
    }  # fmt: skip
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return relpos.Config().replace(given | named)
