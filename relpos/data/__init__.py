# SPDX-License-Identifier: Apache-2.0
"""From text files to batches.

    pairs = relpos.data.read_pairs("train.en.gz", "train.de.gz")
    subwords = relpos.data.SentencePiece.train((x for pair in pairs for x in pair), size=8000)
    cache = relpos.data.TokenCache.build("cache", pairs, subwords)
    for update in relpos.data.Batches(cache, tokens=4096, max_length=256):
        model.step(update)

docs/data.md says more.
"""

from relpos.data.batches import Batches, InOrder
from relpos.data.cache import TokenCache
from relpos.data.pieces import SentencePiece
from relpos.data.splits import Splits
from relpos.data.subwords import (
    Sides,
    Words,
    Wrapped,
    check_vocabulary,
    load_subwords,
    of_side,
)
from relpos.data.text import Lines, Pairs, Report, read_lines, read_pairs
from relpos.data.vocabulary import Subwords

__all__ = [
    "Batches",
    "InOrder",
    "Lines",
    "Pairs",
    "Report",
    "SentencePiece",
    "Sides",
    "Splits",
    "Subwords",
    "TokenCache",
    "Words",
    "Wrapped",
    "check_vocabulary",
    "load_subwords",
    "of_side",
    "read_lines",
    "read_pairs",
]
