# SPDX-License-Identifier: Apache-2.0
"""Other position schemes in PyTorch, at their best on the CPU: the peers of bench_schemes.py.

Every peer is a function of (q, k, v, *parameters), q, k, v [B, H, N, D], and gives gradients to all
of them; PEERS names those of each scheme. What is whole holds [B, H, N, N]; what is in blocks
holds [B * H, block, N] and computes it again in backward:

    scores of a block = bias of the scheme (fill)  + q kT;   softmax in place;   out = p v
    backward          = ds, which the scheme sums into its parameters (collect)

The bias of a pair depends on its distance d = j - i, so its table is kept by diagonals. A block of R
queries times R + N - 1 diagonals, read back with rows one shorter, is the bias of the block: no
index, no gather. Beyond distance K, where a table is clipped, it is one number per row or column.
Labels know no diagonals: gather and scatter_add, in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Peer = Callable[..., Tensor]
FAR = 128  # T5's max_distance

# ------------------------------------------------------------------------------ the walk over blocks


class _Blocks(torch.autograd.Function):  # type: ignore[misc]
    """Attention by blocks of queries with the bias that `scheme(q, k, *parameters)` fills in.

    q is scaled already. The softmax's gradient is torch's own fused kernel, in place.
    """

    @staticmethod
    def forward(
        ctx: Any, scheme: Any, fast: Any, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, *parameters)
        ctx.scheme = scheme
        if fast is not None:
            result: Tensor = fast(q, k, v, *parameters)
            return result
        shape = v.shape
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        bias = scheme(q, k, *parameters)
        out = torch.empty_like(v)
        for first, end, (p,) in _tiles(q, 1):
            rows = slice(first, end)
            bias.fill(p, first)
            torch.softmax(p.baddbmm_(q[:, rows], k.mT), -1, out=p)
            torch.bmm(p, v, out=out[:, rows])
            bias.values(p, first, out[:, rows])
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, *parameters = ctx.saved_tensors
        shape = q.shape
        q, k, v, dout = (x.flatten(0, 1) for x in (q, k, v, gradients[0].contiguous()))
        bias = ctx.scheme(q, k, *parameters)
        bias.prepare(dout)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for first, end, (p, ds) in _tiles(q, 2):
            rows = slice(first, end)
            bias.fill(p, first)
            torch.softmax(p.baddbmm_(q[:, rows], k.mT), -1, out=p)
            dv.baddbmm_(p.mT, dout[:, rows])
            if bias.fill_values(ds, first, p):
                ds.baddbmm_(dout[:, rows], v.mT)
            else:
                torch.bmm(dout[:, rows], v.mT, out=ds)
            torch._softmax_backward_data(ds, p, -1, ds.dtype, grad_input=ds)
            bias.collect(ds, first)
            torch.bmm(ds, k, out=dq[:, rows])
            dk.baddbmm_(ds.mT, q[:, rows])
        own = bias.gradients(dq, dk)
        return None, None, dq.view(shape), dk.view(shape), dv.view(shape), *own


def _block(n: int) -> int:
    return min(128 if n >= 1024 else 64, n)


def _tiles(q: Tensor, count: int) -> Any:
    """(first, end, tiles) of every block of queries, in buffers that are used again."""
    groups, n, _ = q.shape
    buffers = [q.new_empty(groups * _block(n) * n) for _ in range(count)]
    for first in range(0, n, _block(n)):
        end = min(first + _block(n), n)
        size = (groups, end - first, n)
        yield first, end, [b[: groups * (end - first) * n].view(size) for b in buffers]


class _Scheme:
    """What most schemes do about the values: nothing."""

    def prepare(self, dout: Tensor) -> None:
        self.dout = dout

    def values(self, p: Tensor, first: int, out: Tensor) -> None:
        pass

    def fill_values(self, dp: Tensor, first: int, p: Tensor) -> bool:
        return False


# ---------------------------------------------------------------------------------------- diagonals


class _Window:
    """The columns a .. b of a block in which the distance is not clipped, and their diagonals."""

    def __init__(self, n: int, clip: int) -> None:
        self.n, self.clip, self.block = n, min(clip, n - 1), _block(n)
        # A table by diagonals: d = -reach to reach. An odd multiple of 8, so that what lies 2 reach
        # apart spreads over all sets of the cache: 5 times as fast at clip 512.
        self.reach = 8 * (-(-(self.clip + self.block) // 8) | 1)
        self.buffers: dict[tuple[int, ...], Tensor] = {}

    def columns(self, first: int, rows: int) -> tuple[int, int]:
        return max(first - self.clip, 0), min(first + rows + self.clip, self.n)

    def diagonals(self, first: int, rows: int) -> slice:
        a, b = self.columns(first, rows)
        return slice(a - (first + rows - 1) + self.reach, b - first + self.reach)

    def view(self, strip: Tensor) -> Tensor:
        """[G, R, diagonals] seen as [G, R, columns]: row r begins at place R - 1 - r."""
        groups, rows, width = strip.shape
        group, row, _ = strip.stride()
        start = strip.storage_offset() + rows - 1
        return strip.as_strided((groups, rows, width - rows + 1), (group, row - 1, 1), start)

    def strip(self, tile: Tensor, a: int, b: int) -> Tensor:
        """The transpose of view: zeros but for the columns, in a buffer that is used again."""
        groups, rows, _ = tile.shape
        size = (groups, rows, b - a + rows - 1)
        if size not in self.buffers:
            self.buffers[size] = tile.new_zeros(size)
        strip = self.buffers[size]
        self.view(strip).copy_(tile[..., a:b])
        return strip


def by_diagonals(table: Tensor, rows: Tensor, clip: int) -> Tensor:
    """[..., T, D] -> [..., 2 reach + 1, D], d = -reach to reach, distances beyond clip as clip.

    rows: int64 [2 N - 1], the row of the table for d = 1 - N to N - 1.
    """
    n = (len(rows) + 1) // 2
    window = _Window(n, clip)
    d = torch.arange(-window.reach, window.reach + 1)
    return table[..., rows[d.clamp(-window.clip, window.clip) + n - 1], :]


class _Diagonals(_Scheme):
    """qp_i . key_table[d] + k_j . query_table[d], tables [G, 2 reach + 1, D]; the latter may lack.

    The query's term is made block by block. The key's, [G, N, 2 reach + 1], once: a block reads it
    with its rows and columns exchanged.
    """

    def __init__(
        self,
        clip: int,
        q: Tensor,
        k: Tensor,
        qp: Tensor,
        table: Tensor,
        other: Tensor | None = None,
    ) -> None:
        self.window = _Window(q.shape[1], clip)
        self.shape, self.qp, self.k, self.table = qp.shape, qp.flatten(0, 1), k, table
        self.ends = torch.bmm(self.qp, table[:, [0, -1]].mT) if clip < q.shape[1] else None
        self.other = None if other is None else other.flip(1)  # by -d: block rows read forwards
        if self.other is not None:
            self.met = torch.bmm(k, self.other.mT)

    def prepare(self, dout: Tensor) -> None:
        self.dqp, self.dtable = torch.empty_like(self.qp), torch.zeros_like(self.table)
        self.dends = None if self.ends is None else torch.zeros_like(self.ends)
        if self.other is not None:
            self.dmet = torch.zeros_like(self.met)
            self.dbeyond = self.k.new_zeros(2, *self.k.shape[:2])

    def _met(self, met: Tensor, first: int, rows: int, a: int, b: int) -> Tensor:
        groups, n, width = met.shape
        start = a * width + self.window.reach + first - a
        return met.as_strided((groups, rows, b - a), (n * width, 1, width - 1), start)

    def fill(self, tile: Tensor, first: int) -> None:
        rows, window = tile.shape[1], self.window
        a, b = window.columns(first, rows)
        qp = self.qp[:, first : first + rows]
        strip = torch.bmm(qp, self.table[:, window.diagonals(first, rows)].mT)
        tile[..., a:b] = window.view(strip)
        if self.ends is not None:
            tile[..., :a] = self.ends[:, first : first + rows, :1]
            tile[..., b:] = self.ends[:, first : first + rows, 1:]
        if self.other is not None:
            tile[..., a:b] += self._met(self.met, first, rows, a, b)
            tile[..., :a] += self.met[:, None, :a, -1]
            tile[..., b:] += self.met[:, None, b:, 0]

    def collect(self, ds: Tensor, first: int) -> None:
        rows, window = ds.shape[1], self.window
        a, b = window.columns(first, rows)
        block, diagonals = slice(first, first + rows), window.diagonals(first, rows)
        strip = window.strip(ds, a, b)
        torch.bmm(strip, self.table[:, diagonals], out=self.dqp[:, block])
        self.dtable[:, diagonals].baddbmm_(strip.mT, self.qp[:, block])
        if self.dends is not None:
            self.dends[:, block, 0] = ds[..., :a].sum(-1)
            self.dends[:, block, 1] = ds[..., b:].sum(-1)
        if self.other is not None:
            self._met(self.dmet, first, rows, a, b).copy_(ds[..., a:b])
            self.dbeyond[0, :, :a] += ds[..., :a].sum(1)
            self.dbeyond[1, :, b:] += ds[..., b:].sum(1)

    def gradients(self, dq: Tensor, dk: Tensor) -> tuple[Tensor, ...]:
        if self.dends is not None:
            self.dqp.baddbmm_(self.dends, self.table[:, [0, -1]])
            self.dtable[:, [0, -1]] += torch.bmm(self.dends.mT, self.qp)
        dqp = self.dqp.view(self.shape)
        if self.other is None:
            return dqp, self.dtable
        self.dmet[..., -1] += self.dbeyond[0]
        self.dmet[..., 0] += self.dbeyond[1]
        dk.baddbmm_(self.dmet, self.other)
        return dqp, self.dtable, torch.bmm(self.dmet.mT, self.k).flip(1)


class _Bias(_Scheme):
    """c[d], [G, 2 reach + 1]: a strip of equal rows serves all blocks."""

    def __init__(self, clip: int, q: Tensor, k: Tensor, c: Tensor) -> None:
        self.window, self.c = _Window(q.shape[1], clip), c
        self.strips = c[:, None].expand(-1, self.window.block, -1).contiguous()

    def prepare(self, dout: Tensor) -> None:
        self.dc = torch.zeros_like(self.c)

    def fill(self, tile: Tensor, first: int) -> None:
        rows, window = tile.shape[1], self.window
        a, b = window.columns(first, rows)
        tile[..., a:b] = window.view(self.strips[:, :rows, window.diagonals(first, rows)])
        tile[..., :a] = self.c[:, None, :1]
        tile[..., b:] = self.c[:, None, -1:]

    def collect(self, ds: Tensor, first: int) -> None:
        rows, window = ds.shape[1], self.window
        a, b = window.columns(first, rows)
        self.dc[:, window.diagonals(first, rows)] += window.strip(ds, a, b).sum(1)
        self.dc[:, 0] += ds[..., :a].sum((1, 2))
        self.dc[:, -1] += ds[..., b:].sum((1, 2))

    def gradients(self, dq: Tensor, dk: Tensor) -> tuple[Tensor, ...]:
        return (self.dc,)


# ------------------------------------------------------------------------------------------- labels


class _Labels(_Scheme):
    """q_i . key_table[label], v_j + value_table[label]; labels int64 [N, N], tables [G, T, D]."""

    def __init__(self, labels: Tensor, q: Tensor, k: Tensor, key: Tensor, value: Tensor) -> None:
        self.labels, self.q, self.key, self.value = labels, q, key, value
        self.met = torch.bmm(q, key.mT)

    def _index(self, tile: Tensor, first: int) -> Tensor:
        return self.labels[first : first + tile.shape[1]].expand(len(tile), -1, -1)

    def fill(self, tile: Tensor, first: int) -> None:
        block = slice(first, first + tile.shape[1])
        torch.gather(self.met[:, block], -1, self._index(tile, first), out=tile)

    def values(self, p: Tensor, first: int, out: Tensor) -> None:
        out.baddbmm_(self._sums(p, first), self.value)

    def _sums(self, tile: Tensor, first: int) -> Tensor:
        sums = tile.new_zeros(*tile.shape[:2], self.key.shape[1])
        return sums.scatter_add_(-1, self._index(tile, first), tile)

    def prepare(self, dout: Tensor) -> None:
        self.dout, self.to_value = dout, torch.bmm(dout, self.value.mT)
        self.dmet, self.sums = torch.empty_like(self.met), torch.empty_like(self.met)

    def fill_values(self, dp: Tensor, first: int, p: Tensor) -> bool:
        block, index = slice(first, first + dp.shape[1]), self._index(dp, first)
        self.sums[:, block] = self._sums(p, first)
        torch.gather(self.to_value[:, block], -1, index, out=dp)
        return True

    def collect(self, ds: Tensor, first: int) -> None:
        self.dmet[:, first : first + ds.shape[1]] = self._sums(ds, first)

    def gradients(self, dq: Tensor, dk: Tensor) -> tuple[Tensor, ...]:
        dq.baddbmm_(self.dmet, self.key)
        return torch.bmm(self.dmet.mT, self.q), torch.bmm(self.sums.mT, self.dout)


# ---------------------------------------------------------------------------------------- in blocks


def _groups(table: Tensor, q: Tensor) -> Tensor:
    """A table of all heads, or of each, for every group of q: [B * H, ...]."""
    if table.dim() == 2:
        return table.expand(q.shape[0] * q.shape[1], -1, -1)
    return table.repeat(q.shape[0], 1, 1)


def _attend(scheme: Any, q: Tensor, k: Tensor, v: Tensor, *own: Tensor, fast: Any = None) -> Tensor:
    out: Tensor = _Blocks.apply(scheme, fast, q, k, v, *own)
    return out


def _scaled(q: Tensor, terms: int = 1) -> Tensor:
    return q * (q.shape[-1] * terms) ** -0.5


def t5_blocks(q: Tensor, k: Tensor, v: Tensor, bias_table: Tensor, rows: Tensor) -> Tensor:
    """Forward by torch's own kernel, whose mask has no gradient; backward in blocks."""
    full = bias_table.detach().mT[:, rows]
    table = by_diagonals(bias_table.mT[..., None], rows, FAR)[..., 0].repeat(q.shape[0], 1)
    return _attend(
        lambda *a: _Bias(FAR, *a), q, k, v, table, fast=lambda q, k, v, _: _hankel(q, k, v, full, 1.0)
    )  # fmt: skip


def labels_blocks(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor, labels: Tensor
) -> Tensor:
    tables = (_groups(table, q) for table in (key, value))
    return _attend(lambda *a: _Labels(labels, *a), _scaled(q), k, v, *tables)


def shaw_blocks(q: Tensor, k: Tensor, v: Tensor, key_table: Tensor, rows: Tensor) -> Tensor:
    table = _groups(by_diagonals(key_table, rows, q.shape[-2]), q)
    q = _scaled(q)
    return _attend(lambda *a: _Diagonals(q.shape[-2], *a), q, k, v, q, table)


def xl_blocks(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, u: Tensor, bias: Tensor, waves: Tensor
) -> Tensor:
    table = waves @ weight.unflatten(0, (q.shape[1], -1)).mT  # [H, 2 N - 1, D]
    table = _groups(by_diagonals(table, torch.arange(len(waves)), q.shape[-2]), q)
    qu, qv = (_scaled(q + x[:, None]) for x in (u, bias))
    return _attend(lambda *a: _Diagonals(q.shape[-2], *a), qu, k, v, qv, table)


def deberta_blocks(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, query: Tensor, rows: Tensor
) -> Tensor:
    clip = len(key)  # beyond, delta has reached an end of its range
    to_key, to_query = (_groups(by_diagonals(t, rows, clip), q) for t in (key, _scaled(query, 3)))
    q = _scaled(q, 3)
    return _attend(lambda *a: _Diagonals(clip, *a), q, k, v, q, to_key, to_query)


# -------------------------------------------------------------------------------------------- whole


@cache
def distances(n: int) -> Tensor:
    """d = j - i, counted from 1 - n: int64 [n, n]."""
    position = torch.arange(n)
    return position[None, :] - position[:, None] + n - 1


def shift(x: Tensor) -> Tensor:
    """[..., N, 2 N - 1] by diagonals -> [..., N, N], the rel-shift; N > 1."""
    n = x.shape[-2]
    return x.flatten(-2)[..., n - 1 : -1].unflatten(-1, (n, 2 * n - 2))[..., :n]


def _product(bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.baddbmm(bias.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT)
    return scores.view(bias.shape).softmax(-1) @ v


def t5_whole(q: Tensor, k: Tensor, v: Tensor, bias_table: Tensor, rows: Tensor) -> Tensor:
    bias = bias_table[rows].mT[:, distances(q.shape[-2])]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=1.0)


def labels_whole(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor, labels: Tensor
) -> Tensor:
    q = _scaled(q)
    met = q @ key.mT
    index = labels.expand(*q.shape[:2], -1, -1)
    p = (q @ k.mT + met.gather(-1, index)).softmax(-1)
    return p @ v + torch.zeros_like(met).scatter_add(-1, index, p) @ value


def shaw_whole(q: Tensor, k: Tensor, v: Tensor, key_table: Tensor, rows: Tensor) -> Tensor:
    q = _scaled(q)
    return _product(shift(q @ key_table.mT), q, k, v)


def xl_whole(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, u: Tensor, bias: Tensor, waves: Tensor
) -> Tensor:
    table = waves @ weight.unflatten(0, (q.shape[1], -1)).mT
    qu, qv = (_scaled(q + x[:, None]) for x in (u, bias))
    return _product(shift(qv @ table.mT), qu, k, v)


def deberta_whole(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, query: Tensor, rows: Tensor
) -> Tensor:
    n = q.shape[-2]
    index = rows[distances(n)].expand(*q.shape[:2], -1, -1)
    q = _scaled(q, 3)
    back = (_scaled(k, 3) @ query.mT).gather(-1, index.mT).mT
    return _product((q @ key.mT).gather(-1, index) + back, q, k, v)


def compiled(whole: Peer) -> Peer:
    """Inductor's loops instead of passes over [B, H, N, N]."""
    made: list[Peer] = []

    def call(*inputs: Tensor) -> Tensor:
        if not made:
            distances(inputs[0].shape[-2])
            made.append(torch.compile(whole, dynamic=False))
        return made[0](*inputs)

    return call


# -------------------------------------------------------------------------------------- torch's own


def _hankel(q: Tensor, k: Tensor, v: Tensor, c: Tensor, scale: float | None) -> Tensor:
    """scaled_dot_product_attention with c[d], [H, 2 N - 1], as a mask that takes no memory.

    With the order of the queries turned around the bias of (r, j) is c[r + j]: an array whose rows
    begin one place after each other.
    """
    n = q.shape[-2]
    mask = c.contiguous().as_strided((1, len(c), n, n), (0, c.shape[-1], 1, 1))
    out = F.scaled_dot_product_attention(q.flip(-2), k, v, attn_mask=mask, scale=scale)
    return out.flip(-2)


def alibi_masked(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    n = q.shape[-2]
    return _hankel(q, k, v, -slopes[:, None] * torch.arange(1 - n, n).abs(), None)


def _flex(q: Tensor, k: Tensor, v: Tensor, score: Any, scale: float | None = None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    attend = torch.compile(flex_attention, dynamic=False)
    out: Tensor = attend(q, k, v, score_mod=score, scale=scale)
    return out


def alibi_flex(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Forward only, as all of FlexAttention on the CPU."""
    return _flex(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (j - i).abs())


def t5_flex(q: Tensor, k: Tensor, v: Tensor, bias_table: Tensor, rows: Tensor) -> Tensor:
    c, n = bias_table.mT[:, rows].contiguous(), q.shape[-2]
    return _flex(q, k, v, lambda s, b, h, i, j: s + c[h, j - i + n - 1], 1.0)


def shaw_flex(q: Tensor, k: Tensor, v: Tensor, key_table: Tensor, rows: Tensor) -> Tensor:
    met, n = _scaled(q) @ key_table.mT, q.shape[-2]
    return _flex(q, k, v, lambda s, b, h, i, j: s + met[b, h, i, j - i + n - 1])


# What bench_schemes.py --peers runs: by scheme, under the names of its report. What was tried and
# found slower is in ../README.md.
PEERS: dict[str, dict[str, Peer]] = {
    "t5": {
        "sdpa, backward in blocks": t5_blocks,
        "sdpa whole": t5_whole,
        "flex": t5_flex,
    },
    "alibi": {"sdpa": alibi_masked, "flex": alibi_flex},
    "labels": {
        "in blocks": labels_blocks,
        "whole": labels_whole,
        "whole compiled": compiled(labels_whole),
    },
    "shaw unclipped": {
        "in blocks": shaw_blocks,
        "rel-shift": shaw_whole,
        "rel-shift compiled": compiled(shaw_whole),
        "flex": shaw_flex,
    },
    "transformer-xl": {
        "in blocks": xl_blocks,
        "rel-shift": xl_whole,
        "rel-shift compiled": compiled(xl_whole),
    },
    "deberta v2": {
        "in blocks": deberta_blocks,
        "whole": deberta_whole,
        "whole compiled": compiled(deberta_whole),
    },
}
