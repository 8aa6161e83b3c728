# SPDX-License-Identifier: Apache-2.0
"""Token caches small enough for tests, whose every pair can be told from every other."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relpos.data import TokenCache

SIZE, BOS, EOS, UNKNOWN = 1000, 1, 2, 0


class Numbers:
    """A vocabulary whose words are their own tokens: "7 4 9" is 7, 4, 9."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.bos, self.eos, self.unknown = size, BOS, EOS, UNKNOWN

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return " ".join(str(token) for token in tokens)

    def fingerprint(self) -> str:
        return f"numbers {self.size}"

    def save(self, folder: Any) -> None:
        Path(folder, "numbers.json").write_text(json.dumps(self.size))


def sentence(tokens: Iterable[int]) -> str:
    return " ".join(map(str, tokens))


def random_pairs(count: int, longest: int = 30, seed: int = 0) -> list[tuple[str, str]]:
    """Pairs that begin with their number, in digits to base 900: no two are the same."""
    random = np.random.default_rng(seed)
    pairs = []
    for i in range(count):
        number = [3 + i // 900, 3 + i % 900]
        n, m = random.integers(0, longest - 1, 2)
        source, target = (number + random.integers(3, SIZE, x).tolist() for x in (n, m))
        pairs.append((sentence(source), sentence(target)))
    return pairs


def cache_of(folder: Path, pairs: Iterable[Any], size: int = SIZE) -> TokenCache:
    return TokenCache.build(folder, pairs, Numbers(size))


def numbers_of(batch: Any, side: str = "target") -> list[int]:
    """The numbers of a batch's pairs, in its order; of the target, after bos."""
    tokens, begins = getattr(batch, side), getattr(batch, f"{side}_offsets")[:-1]
    first = begins + (1 if side == "target" else 0)
    return [int(900 * (tokens[x] - 3) + tokens[x + 1] - 3) for x in first]


def generate(folder: Path, count: int, seed: int = 0) -> None:
    """A cache of any size, as `build` would write it: 5 to 51 tokens a side, 28 on average."""
    random = np.random.default_rng(seed)
    names = {x: f"{x}.00000000.bin" for x in ("tokens", "offsets", "source", "target")}
    folder.mkdir()
    files = {x: (folder / name).open("wb") for x, name in names.items()}
    files["offsets"].write(np.zeros(1, "<i8"))
    total = checksum = 0
    for begin in range(0, count, 100_000):
        lengths = random.integers(5, 52, (2, min(100_000, count - begin)), dtype=np.int32)
        tokens = random.integers(3, 32768, lengths.sum(), dtype=np.uint16)
        files["offsets"].write(total + np.cumsum(lengths.sum(axis=0), dtype=np.int64))
        files["source"].write(lengths[0])
        files["target"].write(lengths[1])
        files["tokens"].write(tokens)
        total += tokens.size
        checksum = zlib.crc32(tokens, checksum)
    for file in files.values():
        file.close()
    told = {"format": 1, "sides": 2, "pairs": count, "tokens": total, "dtype": "<u2"}
    told |= {"size": 32768, "bos": BOS, "eos": EOS, "unknown": UNKNOWN, "unknown_tokens": 0}
    told |= {"checksum": checksum, "report": {"lines": count}, "files": names, "identity": {}}
    (folder / "meta.json").write_text(json.dumps(told))
