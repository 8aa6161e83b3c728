# SPDX-License-Identifier: Apache-2.0
"""TIMED: the cases whose times are told, so that what is measured is what is proved.

benchmarks/bench_attention.py times these, test_attention.py holds results and gradients of every
core to the reference. Any other Case is timed by benchmarks/bench_cases.py. Nothing of relpos is
imported here: the processes that time torch have nothing else in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cases import Case

SHAPES = {64: (8, 8), 256: (4, 8), 1024: (1, 8), 2048: (1, 8), 4096: (1, 4)}  # n: (B, H)
PACKED = [23, 57, 91, 128, 200, 311, 470, 768]  # lengths of one packed batch, 2048 tokens
WIDTHS = (32, 64, 80, 128)


class Timed(NamedTuple):
    """Both of Shaw's terms, clipped at k; as plain numbers, so that it goes from process to process."""

    n: int
    B: int
    H: int
    d: int = 64
    k: int = 16
    causal: bool = False
    per_head: bool = False
    key_heads: int = 0  # of k and v, each shared by as many heads of q; 0: H
    lengths: Sequence[int] = ()  # of a packed batch of B sequences, n tokens

    def case(self) -> Case:
        from cases import Case
        from relpos.reference import Band

        band = Band(self.k, self.k)
        return Case(
            B=self.B, H=self.H, N=self.n, M=self.n, D=self.d, Dv=self.d, key=band, value=band,
            causal=self.causal, per_head=self.per_head, key_heads=self.key_heads,
            offsets=(0, *accumulate(self.lengths)) if self.lengths else None,
        )  # fmt: skip


def of_length(n: int, **fields: Any) -> Timed:
    return Timed(n, *SHAPES.get(n, (1, 8)), **fields)


def of_lengths(lengths: Sequence[int], **fields: Any) -> Timed:
    return Timed(sum(lengths), len(lengths), 8, **fields, lengths=lengths)


TIMED = [
    *(of_length(n, causal=causal) for n in SHAPES for causal in (False, True)),
    *(of_length(n, k=k) for n in (256, 1024) for k in (4, 64)),
    *(of_length(n, d=d) for n in (256, 1024) for d in WIDTHS if d != 64),
    *(of_length(n, per_head=True) for n in (256, 1024)),
    *(of_length(n, key_heads=heads) for n in (256, 1024) for heads in (1, 2)),
    *(of_lengths(PACKED, causal=causal) for causal in (False, True)),
]
