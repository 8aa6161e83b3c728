# SPDX-License-Identifier: Apache-2.0
"""The PyTorch peers of the benchmarks compute what they claim: a wrong peer is no peer.

Each is compared with the formula in float64, value and gradients, over clip distances inside and
beyond the length, causal and not, tables shared and per head, lengths that no block divides.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the peers of the benchmarks are written in PyTorch")

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from peers import torch_attention as peers  # noqa: E402

torch.set_num_threads(1)  # threads of one tiny call only wait for each other

NAMES = ("q", "k", "v", "key_table", "value_table")
CASES = [  # n, clip, causal, a table per head
    (64, 4, False, False),
    (50, 16, True, True),
    (130, 64, False, True),
    (33, 64, True, False),
    (200, 16, False, False),
    (96, 1, True, False),
    (1, 3, False, False),
]


def inputs(n: int, clip: int, per_head: bool) -> tuple[list[Any], Any]:
    """q, k, v and both tables, and dout: B = 2, H = 3, D = 16."""
    torch.manual_seed(n)
    activations = [torch.randn(2, 3, n, 16) for _ in range(4)]
    shape = (3, 2 * clip + 1, 16) if per_head else (2 * clip + 1, 16)
    tables = [torch.randn(shape) for _ in range(2)]
    return [*activations[:3], *tables], activations[3]


def oracle(
    q: Any, k: Any, v: Any, key_table: Any, value_table: Any, causal: bool, key_only: bool
) -> Any:
    """The formula of the file's head with its [N, N, D] arrays."""
    n, clip = q.shape[-2], key_table.shape[-2] // 2
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    relation = distance.clamp(-clip, clip) + clip
    to_relation = (q[..., :, None, :] * key_table[..., relation, :]).sum(-1)
    scores = (q @ k.mT + to_relation) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(distance > 0, -math.inf)
    p = scores.softmax(-1)
    if key_only:
        return p @ v
    return p @ v + (p[..., None] * value_table[..., relation, :]).sum(-2)


def assert_near(name: str, ours: Any, exact: Any, tolerance: float = 3e-6) -> None:
    """Largest error over largest value. Measured: at most 1.1e-6 in all cases above."""
    error = float((ours.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30))
    assert error < tolerance, f"{name}: {error:.1e} of the largest value"


def compare(peer: Any, case: tuple[int, int, bool, bool], **options: Any) -> None:
    n, clip, causal, per_head = case
    arrays, dout = inputs(n, clip, per_head)
    leaves = [a.requires_grad_() for a in arrays]
    exact = [a.detach().double().requires_grad_() for a in arrays]
    out = peer(*leaves, causal=causal, **options)
    expected = oracle(*exact, causal=causal, key_only=False)
    assert_near("out", out.detach(), expected.detach())
    ours = torch.autograd.grad(out, leaves, dout)
    theirs = torch.autograd.grad(expected, exact, dout.double())
    for name, a, b in zip(NAMES, ours, theirs, strict=True):
        assert_near(f"d{name}", a, b)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("peer", [peers.gather, peers.skewed], ids=["gather", "skewed"])
def test_whole_matrix_peer_against_float64(peer: Any, case: Any) -> None:
    compare(peer, case)


@pytest.mark.parametrize("block", [0, 32, 48])
@pytest.mark.parametrize("case", CASES)
def test_tiled_peer_against_float64(case: Any, block: int) -> None:
    compare(peers.tiled, case, block=block)


def test_plain_is_the_formula_with_zero_tables() -> None:
    arrays, _ = inputs(40, 2, False)
    exact = [a.double() for a in arrays[:3]] + [torch.zeros(5, 16).double()] * 2
    for causal in (False, True):
        expected = oracle(*exact, causal=causal, key_only=False)
        assert_near("out", peers.plain(*arrays[:3], causal=causal), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:2])
def test_compiled_peer_against_float64(case: Any) -> None:
    compare(peers.PEERS["skewed compiled"], case)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_flex_peer_has_the_key_term(causal: bool) -> None:
    """Forward only: FlexAttention has no backward on the CPU."""
    arrays, _ = inputs(64, 4, False)
    exact = oracle(*(a.double() for a in arrays), causal=causal, key_only=True)
    assert_near("out", peers.flex(*arrays, causal=causal), exact)
