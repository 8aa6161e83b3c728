# SPDX-License-Identifier: Apache-2.0
"""Position schemes: what `attention(..., position=...)` takes.

Each is one small file that turns its parameters into the terms of the one formula (terms.py, which
also says how to add one); docs/schemes.md has them in one table. Several in a tuple add up where
that makes sense (combine.py).
"""

from relpos.position.absolute import LearnedAbsolute, Sinusoidal, sinusoid
from relpos.position.alibi import ALiBi, alibi_slopes
from relpos.position.arrays import Array
from relpos.position.combine import Position
from relpos.position.deberta import DeBERTa, deberta_log_buckets
from relpos.position.graph import EdgeList, ShawGraph
from relpos.position.music import MusicTransformer
from relpos.position.places import CrossPositions, Plane
from relpos.position.relative_key import RelativeKey, RelativeKeyQuery
from relpos.position.rope import RoPE
from relpos.position.shaw import Shaw
from relpos.position.t5 import T5Bias, t5_buckets
from relpos.position.terms import Scheme, Shape
from relpos.position.transformer_xl import TransformerXL

__all__ = [
    "ALiBi",
    "Array",
    "CrossPositions",
    "DeBERTa",
    "EdgeList",
    "LearnedAbsolute",
    "MusicTransformer",
    "Plane",
    "Position",
    "RelativeKey",
    "RelativeKeyQuery",
    "RoPE",
    "Scheme",
    "Shape",
    "Shaw",
    "ShawGraph",
    "Sinusoidal",
    "T5Bias",
    "TransformerXL",
    "alibi_slopes",
    "deberta_log_buckets",
    "sinusoid",
    "t5_buckets",
]
