# SPDX-License-Identifier: Apache-2.0
"""Attention with Shaw's relative positions in PyTorch, four ways: the peers of bench_attention.py.

    r(i,j) = clip(j - i, -K, K) + K
    out_i  = sum_j softmax_j( (q_i . k_j + q_i . key_table[r]) / sqrt(D) ) (v_j + value_table[r])

Every peer is a function of (q, k, v, key_table, value_table, causal) with q, k, v [B, H, N, D] and
tables [2K + 1, D] or [H, 2K + 1, D], and gives gradients to all five. They differ in what they do
about the band; `|`, `/` and `|` below are the three runs of one tile of queries:

    keys ->      left run, relation 0 | band, one relation per diagonal / right run, relation 2K
    gather       an index matrix [N, N] picks the term; scatter_add sums the buckets
    skewed       the right run is a masked constant, the band an array read with another row stride
    tiled        blocks of queries with a backward of its own; only the window around the band pays
    flex         FlexAttention's score_mod; key term only

`gather` and `skewed` hold [B, H, N, N], `tiled` holds [B, H, block, N]. K >= 1. What was tried and
found slower is in ../README.md, with figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Peer = Callable[..., Tensor]


# ---------------------------------------------------------------- torch without relative positions


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Torch's own attention: the time everything is compared with."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


# ------------------------------------------------------------------------------- gather and scatter


@cache
def relation_index(n: int, clip: int, device: torch.device) -> Tensor:
    """r(i,j), int64 [n, n]."""
    position = torch.arange(n, device=device)
    return (position[None, :] - position[:, None]).clamp(-clip, clip) + clip


def gather(
    q: Tensor, k: Tensor, v: Tensor, key_table: Tensor, value_table: Tensor, causal: bool = False
) -> Tensor:
    """The formula as everyone writes it, without the [N, N, D] array."""
    n = q.shape[-2]
    index = relation_index(n, key_table.shape[-2] // 2, q.device).expand(*q.shape[:-1], n)
    q = q * q.shape[-1] ** -0.5
    to_relation = q @ key_table.mT  # [B, H, N, T]
    scores = q @ k.mT + to_relation.gather(-1, index)
    if causal:
        scores = scores.masked_fill(_future(n, q.device), -math.inf)
    p = scores.softmax(-1)
    buckets = torch.zeros_like(to_relation).scatter_add(-1, index, p)
    return p @ v + buckets @ value_table


@cache
def _future(n: int, device: torch.device) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1)


# ------------------------------------------------------------------------------------------- skewed


def skew(band: Tensor, columns: int) -> Tensor:
    """[..., R, C] -> [..., R, columns]: row i moves i places to the right, zeros elsewhere.

    A row padded to `columns + 1` and read back with rows of `columns` slips by one each row.
    """
    rows, width = band.shape[-2:]
    padded = F.pad(band, (0, columns + 1 - width)).flatten(-2)
    return padded[..., : rows * columns].unflatten(-1, (rows, columns))


def unskew(wide: Tensor, width: int) -> Tensor:
    """The inverse and the transpose of skew: [..., R, columns] -> [..., R, width]."""
    rows, columns = wide.shape[-2:]
    padded = F.pad(wide.flatten(-2), (0, rows))
    return padded.unflatten(-1, (rows, columns + 1))[..., :width]


def skewed(
    q: Tensor, k: Tensor, v: Tensor, key_table: Tensor, value_table: Tensor, causal: bool = False
) -> Tensor:
    """No index arithmetic: strides in the band, one masked constant beside it. To be compiled.

    Softmax forgets constants and its rows sum to one, so relation 0 is subtracted from both tables:
    the left run then has no term at all.
    """
    n, clip = q.shape[-2], key_table.shape[-2] // 2
    position = torch.arange(n, device=q.device)
    distance = position[None, :] - position[:, None]
    first = value_table[..., :1, :]
    q = q * q.shape[-1] ** -0.5
    to_relation = q @ (key_table[..., 1:, :] - key_table[..., :1, :]).mT
    bias = skew(to_relation, n + 2 * clip)[..., clip - 1 : clip - 1 + n]
    bias = bias + torch.where(distance > clip, to_relation[..., -1:], 0.0)
    scores = torch.baddbmm(bias.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT)
    if causal:
        scores = scores.masked_fill(distance > 0, -math.inf)
    p = scores.softmax(-1).unflatten(0, q.shape[:2])
    inner = unskew(F.pad(p, (clip - 1, clip)), 2 * clip)[..., :-1]
    last = torch.where(distance >= clip, p, 0.0).sum(-1, keepdim=True)
    buckets = torch.cat((inner, last), -1)
    return p @ v + buckets @ (value_table[..., 1:, :] - first) + first


# -------------------------------------------------------------------------------------------- tiled


class _Window:
    """The columns that the band crosses in a block of R queries, W = R + 2K - 2 of them.

    Row r of the window meets relation clip(w + 1 - r, 0, 2K) in column w, so reading rows with a
    stride one short (or one long) of their width turns diagonals into columns:

        spread[r] = 0 ... 0 | relation 1 ... 2K | relation 2K ...    added to the scores
        gather[r] = row r of the window from column r on             summed into the buckets
    """

    def __init__(self, groups: int, rows: int, clip: int, like: Tensor) -> None:
        self.rows, self.clip = rows, clip
        self.width = rows + 2 * clip - 2
        self.spread = like.new_zeros(groups, rows, self.width + rows - 1)
        self.padded = like.new_zeros(groups, rows, self.width + rows)

    def add(self, tile: Tensor, first: int, to_relation: Tensor) -> None:
        """tile[r, j] += to_relation[r, relation(r, j)] for relations 1 to 2K (0 is zero)."""
        start, a, b = self._columns(tile, first)
        inner = self.rows + 2 * self.clip - 2
        self.spread[..., self.rows - 1 : inner] = to_relation[..., :-1]
        self.spread[..., inner:] = to_relation[..., -1:]
        bias = self._slip(self.spread, self.width, self.rows - 1, -1)
        tile[..., a:b] += bias[..., a - start : b - start]
        tile[..., b:] += to_relation[..., -1:]

    def buckets(self, tile: Tensor, first: int) -> Tensor:
        """Sums of tile over relations 1 to 2K: [groups, rows, 2K]. The transpose of add."""
        start, a, b = self._columns(tile, first)
        if a - start:
            self.padded[..., : a - start] = 0
        if b - start < self.width:
            self.padded[..., b - start : self.width] = 0
        self.padded[..., a - start : b - start] = tile[..., a:b]
        diagonals = self._slip(self.padded, self.width, 0, 1)
        inner = 2 * self.clip - 1
        last = diagonals[..., inner:].sum(-1, keepdim=True)
        if b < tile.shape[-1]:
            last += tile[..., b:].sum(-1, keepdim=True)
        return torch.cat((diagonals[..., :inner], last), -1)

    def _columns(self, tile: Tensor, first: int) -> tuple[int, int, int]:
        start = first - self.clip + 1
        end = min(start + self.width, tile.shape[-1])
        return start, max(start, 0), max(end, 0)

    def _slip(self, array: Tensor, width: int, offset: int, step: int) -> Tensor:
        groups, rows, stride = array.shape
        return array.as_strided((groups, rows, width), (rows * stride, stride + step, 1), offset)


class _Tiles:
    """One pass over blocks of queries, with the buffers that it reuses."""

    def __init__(self, q: Tensor, clip: int, causal: bool, block: int, tiles: int) -> None:
        self.n = q.shape[1]
        self.causal, self.block, self.clip = causal, min(block, self.n), clip
        self.buffers = [q.new_empty(q.shape[0] * self.block * self.n) for _ in range(tiles)]
        self.q = q
        self.window = _Window(q.shape[0], self.block, clip, q)

    def __iter__(self) -> Any:
        for first in range(0, self.n, self.block):
            end = min(first + self.block, self.n)
            if self.window.rows != end - first:  # the last block of a length it does not divide
                self.window = _Window(self.q.shape[0], end - first, self.clip, self.q)
            columns = end if self.causal else self.n
            size = (self.q.shape[0], end - first, columns)
            yield first, end, columns, [b[: math.prod(size)].view(size) for b in self.buffers]

    def probabilities(
        self, tile: Tensor, first: int, q: Tensor, k: Tensor, to_relation: Tensor
    ) -> Tensor:
        torch.bmm(q, k[:, : tile.shape[-1]].mT, out=tile)
        self.window.add(tile, first, to_relation)
        if self.causal:
            rows = tile.shape[1]
            tile[..., first:].masked_fill_(_future(rows, tile.device), -math.inf)
        return torch.softmax(tile, -1, out=tile)


def _rest(table: Tensor, heads: int, groups: int) -> Tensor:
    """Rows 1 to 2K less row 0, one table per group: [groups, 2K, D]."""
    rest = table[..., 1:, :] - table[..., :1, :]
    if rest.dim() == 2:
        return rest.expand(groups, -1, -1)
    return rest.repeat(groups // heads, 1, 1)


def _table_gradient(rest: Tensor, first: Tensor, table: Tensor) -> Tensor:
    """[groups, 2K, D] and row 0's own part [groups, 1, D] -> the table's shape."""
    both = torch.cat((first - rest.sum(1, keepdim=True), rest), 1)
    if table.dim() == 2:
        return both.sum(0)
    return both.unflatten(0, (-1, table.shape[0])).sum(0)


class _Tiled(torch.autograd.Function):  # type: ignore[misc]
    """Blocks of queries in buffers that stay in the cache, nothing [N, N], recompute in backward.

    A softmax forgets constants and its rows sum to one, so relation 0 is subtracted from both
    tables and costs nothing; the rest is a window around the band and one number per row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_table: Tensor,
        value_table: Tensor,
        causal: bool,
        block: int,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, key_table, value_table)
        ctx.causal, ctx.block = causal, block
        heads = q.shape[1]
        shape = v.shape
        q, k, v = (x.flatten(0, 1) for x in (q * q.shape[-1] ** -0.5, k, v))
        key_rest, value_rest = (_rest(t, heads, len(q)) for t in (key_table, value_table))
        to_relation = torch.bmm(q, key_rest.mT)
        buckets = torch.empty_like(to_relation)
        out = torch.empty_like(v)
        tiles = _Tiles(q, key_table.shape[-2] // 2, causal, block, 1)
        for first, end, columns, (p,) in tiles:
            rows = slice(first, end)
            tiles.probabilities(p, first, q[:, rows], k, to_relation[:, rows])
            torch.bmm(p, v[:, :columns], out=out[:, rows])
            buckets[:, rows] = tiles.window.buckets(p, first)
        out.baddbmm_(buckets, value_rest)
        return out.view(shape).add_(value_table[..., :1, :])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, key_table, value_table = ctx.saved_tensors
        shape, heads, scale = q.shape, q.shape[1], q.shape[-1] ** -0.5
        q, k, v = (x.flatten(0, 1) for x in (q * scale, k, v))
        dout = gradients[0].contiguous().flatten(0, 1)
        key_rest, value_rest = (_rest(t, heads, len(q)) for t in (key_table, value_table))
        to_relation = torch.bmm(q, key_rest.mT)
        to_value = torch.bmm(dout, value_rest.mT)
        drelation, buckets = torch.empty_like(to_relation), torch.empty_like(to_value)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        tiles = _Tiles(q, key_table.shape[-2] // 2, ctx.causal, ctx.block, 2)
        for first, end, columns, (p, ds) in tiles:
            rows, seen = slice(first, end), slice(0, columns)
            tiles.probabilities(p, first, q[:, rows], k, to_relation[:, rows])
            dv[:, seen].baddbmm_(p.mT, dout[:, rows])
            buckets[:, rows] = tiles.window.buckets(p, first)
            torch.bmm(dout[:, rows], v[:, seen].mT, out=ds)
            tiles.window.add(ds, first, to_value[:, rows])
            torch._softmax_backward_data(ds, p, -1, ds.dtype, grad_input=ds)
            drelation[:, rows] = tiles.window.buckets(ds, first)
            torch.bmm(ds, k[:, seen], out=dq[:, rows])
            dk[:, seen].baddbmm_(ds.mT, q[:, rows])
        dq.baddbmm_(drelation, key_rest)
        dkey = _table_gradient(torch.bmm(drelation.mT, q), torch.zeros_like(q[:, :1]), key_table)
        dvalue = _table_gradient(
            torch.bmm(buckets.mT, dout), dout.sum(1, keepdim=True), value_table
        )
        return (
            dq.mul_(scale).view(shape),
            dk.view(shape),
            dv.view(gradients[0].shape),
            dkey,
            dvalue,
            None,
            None,
        )


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_table: Tensor,
    value_table: Tensor,
    causal: bool = False,
    block: int = 0,
) -> Tensor:
    """Hand-tiled, 64 or 128 queries at a time: the fastest of 32, 64, 128 and 256 at every n."""
    block = block or (128 if q.shape[-2] >= 1024 else 64)
    out: Tensor = _Tiled.apply(q, k, v, key_table, value_table, causal, block)
    return out


# --------------------------------------------------------------------------------------------- flex


def _flex(q: Tensor, k: Tensor, v: Tensor, to_relation: Tensor, clip: int, mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + to_relation[b, h, i, (j - i).clamp(-clip, clip) + clip]

    out: Tensor = flex_attention(q, k, v, score_mod=score, block_mask=mask)
    return out


@cache
def _causal_blocks(n: int, device: str) -> Any:
    """What is to be skipped: blocks of the future."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: j <= i, None, None, n, n, device=device)


def flex(
    q: Tensor, k: Tensor, v: Tensor, key_table: Tensor, value_table: Tensor, causal: bool = False
) -> Tensor:
    """The key term alone: a score_mod sees a score, never a value, so value_table is not used.

    On the CPU it has no backward ("FlexAttention does not support backward on CPU"). The product
    with the table stays outside: torch 2.13 fails to compile a score_mod that captures it.
    """
    to_relation = (q @ key_table.mT) * q.shape[-1] ** -0.5
    mask = _causal_blocks(q.shape[-2], str(q.device)) if causal else None
    return _compiled(_flex)(q, k, v, to_relation, key_table.shape[-2] // 2, mask)


@cache
def _compiled(function: Peer) -> Peer:
    torch._dynamo.config.recompile_limit = 64  # one specialisation for every shape
    compiled: Peer = torch.compile(function, dynamic=False)
    return compiled


def skewed_compiled(*inputs: Tensor, causal: bool = False) -> Tensor:
    return _compiled(skewed)(*inputs, causal=causal)


# What bench_attention.py --peers runs, under the names of its report.
PEERS: dict[str, Peer] = {
    "gather": gather,
    "skewed compiled": skewed_compiled,
    "tiled": tiled,
    "flex key only": flex,
}
