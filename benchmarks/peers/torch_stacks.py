# SPDX-License-Identifier: Apache-2.0
"""The Transformer's stacks in PyTorch, written for speed on the CPU, with and without relations.

    eager      attention with a backward of its own: heads first, so that one copy serves the
               products with tables and with keys; gather and scatter_add for the relations
    compiled   plain operations without index arithmetic, for torch.compile
    gathered   as everyone writes it, for torch.compile on a GPU, where gather costs little
    dropout    a mask of random bytes, 26 of 256 for 0.1, as relpos: bernoulli_ costs several times
               as much, and inductor's own draws a number at a time; a GPU has numbers enough

Attention without relations and without dropout is torch's own kernel. Sentences are equally long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peers.torch_attention import skew, unskew
from peers.torch_training import Parameters, Shape

# ------------------------------------------------------------------------------ parameters


def initial(shape: Shape) -> Parameters:
    """Random weights under relpos's names."""
    torch.manual_seed(0)
    C, F_, HD = shape.width, shape.feed_forward, shape.width
    made: Parameters = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        bound = math.sqrt(6 / (rows + columns))
        made[f"{name}.weight"] = torch.empty(rows, columns).uniform_(-bound, bound)
        if shape.bias:
            made[f"{name}.bias"] = torch.zeros(rows)

    def norm(name: str) -> None:
        made[f"{name}.gain"] = torch.ones(C)
        if shape.bias:
            made[f"{name}.shift"] = torch.zeros(C)

    made["source_embedding.weight"] = torch.randn(shape.vocabulary, C) / math.sqrt(C)
    for stack in ("encoder", "decoder"):
        for layer in range(shape.layers(stack)):
            own = f"{stack}.{layer}"
            norm(f"{own}.attention.norm")
            matrix(f"{own}.attention.qkv", 3 * HD, C)
            matrix(f"{own}.attention.out", C, HD)
            if shape.k:
                heads = (shape.heads,) if shape.per_head else ()
                for table in ("key_table", "value_table"):
                    rows = torch.randn(*heads, 2 * shape.k + 1, shape.head_width)
                    made[f"{own}.attention.{table}"] = 0.1 * rows
            if stack == "decoder":
                norm(f"{own}.cross.norm")
                matrix(f"{own}.cross.q", HD, C)
                matrix(f"{own}.cross.kv", 2 * HD, C)
                matrix(f"{own}.cross.out", C, HD)
            norm(f"{own}.feed_forward.norm")
            matrix(f"{own}.feed_forward.in", F_, C)
            matrix(f"{own}.feed_forward.out", C, F_)
        if shape.pre_norm:
            norm(f"{stack}.norm")
    return {name: parameter.requires_grad_() for name, parameter in made.items()}


# ------------------------------------------------------------------------------ eager code


def random_bytes(x: Tensor) -> Tensor:
    """A byte for every number of x: eight of each random word."""
    words = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device).random_(
        -(2**63), None
    )
    return words.view(torch.uint8)[: x.numel()].view(x.shape)


def keep(x: Tensor, rate: float) -> Tensor:
    """0 or 1 / (1 - rate), the rate a multiple of 1/256."""
    dropped = round(256 * rate)
    return (random_bytes(x) >= dropped).to(x.dtype).mul_(256 / (256 - dropped))


def drop(x: Tensor, rate: float) -> Tensor:
    return x * keep(x, rate) if rate > 0 else x


@cache
def relations(n: int, k: int, causal: bool, device: torch.device) -> Tensor:
    """The row for each pair, int64 [n, n]; 2k + 1, a column of -inf, where the key is hidden."""
    position = torch.arange(n, device=device)
    distance = position[None, :] - position[:, None]
    rows = distance.clamp(-k, k) + k
    return rows.masked_fill(distance > 0, 2 * k + 1) if causal else rows


@cache
def future(n: int, device: torch.device) -> Tensor:
    return torch.full((n, n), -math.inf, device=device).triu_(1)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """softmax(scale (q kT + relations)) v, [H, B, n, D] each, with the gradients in few passes.

    With heads first, queries are one matrix [B n, D] of their head for the product with a table,
    and [n, D] of a sentence for that with keys, without a copy. tables: none or two.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, rate: float, *tables: Tensor
    ) -> Tensor:
        H, B, n, D = q.shape
        scale = D**-0.5
        if tables:
            key, value = (_per_head(table, H) for table in tables)
            to_relation = F.pad(q.flatten(1, 2) @ key.mT, (0, 1), value=-math.inf)
            index = relations(n, key.shape[1] // 2, causal, q.device).expand(H, B, n, n)
            p = to_relation.view(H, B, n, -1).gather(-1, index).flatten(0, 1)
            p.baddbmm_(q.flatten(0, 1), k.flatten(0, 1).mT, beta=scale, alpha=scale)
        elif causal:
            p = torch.baddbmm(future(n, q.device), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
        else:
            p = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).mul_(scale)
        torch.softmax(p, -1, out=p)
        noise = keep(p, rate) if rate > 0 else None
        dropped = p if noise is None else p * noise
        out = torch.bmm(dropped, v.flatten(0, 1)).view(H, B, n, D)
        sums = None
        if tables:
            sums = _by_relation(dropped, index, key.shape[1])
            out.view(H, B * n, D).baddbmm_(sums, value)
        ctx.save_for_backward(q, k, v, p, noise, sums, *tables)
        ctx.causal = causal
        return out

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, p, noise, sums, *tables = ctx.saved_tensors
        H, B, n, D = q.shape
        scale = D**-0.5
        dout = gradients[0].contiguous()
        dropped = p if noise is None else p * noise
        dv = torch.bmm(dropped.mT, dout.flatten(0, 1)).view_as(v)
        own: list[Tensor] = []
        if tables:
            key, value = (_per_head(table, H) for table in tables)
            index = relations(n, key.shape[1] // 2, ctx.causal, q.device).expand(H, B, n, n)
            to_value = F.pad(dout.flatten(1, 2) @ value.mT, (0, 1)).view(H, B, n, -1)
            ds = to_value.gather(-1, index).flatten(0, 1)
            ds.baddbmm_(dout.flatten(0, 1), v.flatten(0, 1).mT)
            own = [sums.mT @ dout.flatten(1, 2)]
        else:
            ds = torch.bmm(dout.flatten(0, 1), v.flatten(0, 1).mT)
        if noise is not None:
            ds.mul_(noise)
        torch._softmax_backward_data(ds, p, -1, ds.dtype, grad_input=ds)
        ds.mul_(scale)
        dq = torch.bmm(ds, k.flatten(0, 1)).view_as(q)
        dk = torch.bmm(ds.mT, q.flatten(0, 1)).view_as(k)
        if tables:
            drelation = _by_relation(ds, index, key.shape[1])
            dq.view(H, B * n, D).baddbmm_(drelation, key)
            own.insert(0, drelation.mT @ q.flatten(1, 2))
            own = [
                g if table.dim() == 3 else g.sum(0) for g, table in zip(own, tables, strict=True)
            ]
        return dq, dk, dv, None, None, *own


def _per_head(table: Tensor, heads: int) -> Tensor:
    return table if table.dim() == 3 else table.expand(heads, -1, -1)


def _by_relation(p: Tensor, index: Tensor, count: int) -> Tensor:
    """Sums of p [H B, n, n] over the keys of each relation: [H, B n, count]."""
    sums = p.new_zeros(*index.shape[:3], count + 1)
    return sums.scatter_add_(-1, index, p.view(index.shape)).flatten(1, 2)[..., :count]


def attend_eagerly(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, rate: float, *tables: Tensor
) -> Tensor:
    out: Tensor = _Attention.apply(q, k, v, causal, rate, *tables)
    return out


# ------------------------------------------------------------------------ for the compiler


@cache
def register_bytes() -> None:
    """random_bytes as one operation that the compiler neither looks into nor takes for another's."""
    operation = torch.library.custom_op(
        "peers::random_bytes",
        random_bytes,
        mutates_args=(),
        tags=(torch.Tag.nondeterministic_seeded,),
    )
    operation.register_fake(lambda x: torch.empty_like(x, dtype=torch.uint8))


def drop_fused(x: Tensor, rate: float) -> Tensor:
    """drop with the comparison left to the compiler; its own dropout draws a number at a time."""
    if rate == 0:
        return x
    dropped = round(256 * rate)
    kept = torch.ops.peers.random_bytes(x.detach()) >= dropped
    return torch.where(kept, x * (256 / (256 - dropped)), 0.0)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, rate: float, *tables: Tensor) -> Tensor:
    """The same as plain operations, without gather and scatter, which inductor makes slow.

    The band is an array read back with another row stride (torch_attention.skew).
    """
    H, B, n, D = q.shape
    position = torch.arange(n, device=q.device)
    distance = position[None, :] - position[:, None]
    scores = q @ k.mT
    if tables:
        key, value = (_per_head(table, H) for table in tables)
        clip = key.shape[1] // 2
        to_relation = (q.flatten(1, 2) @ key.mT).unflatten(1, (B, n))
        band = skew(to_relation, n + 2 * clip)[..., clip : clip + n]
        beyond = torch.where(distance > clip, to_relation[..., -1:], 0.0)
        beyond = torch.where(distance < -clip, to_relation[..., :1], beyond)
        scores = scores + band + beyond
    scores = scores * D**-0.5
    if causal:
        scores = scores.masked_fill(distance > 0, -math.inf)
    p = drop_fused(scores.softmax(-1), rate)
    out = p @ v
    if tables:
        inner = unskew(F.pad(p, (clip, clip)), 2 * clip + 1)
        left = torch.where(distance < -clip, p, 0.0).sum(-1, keepdim=True)
        right = torch.where(distance > clip, p, 0.0).sum(-1, keepdim=True)
        first, last = inner[..., :1] + left, inner[..., -1:] + right
        sums = torch.cat((first, inner[..., 1:-1], last), -1)
        out = out + (sums.flatten(1, 2) @ value).view_as(out)
    return out


def attend_by_gather(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, rate: float, *tables: Tensor
) -> Tensor:
    """The same by an index for each pair."""
    H, B, n, _ = q.shape
    scores = q @ k.mT
    if tables:
        key, value = (_per_head(table, H) for table in tables)
        index = relations(n, key.shape[1] // 2, False, q.device).expand(H, B, n, n)
        to_relation = (q.flatten(1, 2) @ key.mT).unflatten(1, (B, n))
        scores = scores + to_relation.gather(-1, index)
    scores = scores * q.shape[-1] ** -0.5
    if causal:
        scores = scores + future(n, q.device)
    p = F.dropout(scores.softmax(-1), rate)
    out = p @ v
    if tables:
        sums = torch.zeros_like(to_relation, dtype=p.dtype).scatter_add(-1, index, p)
        out = out + (sums.flatten(1, 2) @ value).view_as(out)
    return out


# ---------------------------------------------------------------------------- the stacks

Attend = Callable[..., Tensor]
Drop = Callable[[Tensor, float], Tensor]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Stacks:
    """Encoder and decoder as functions of parameters under relpos's names."""

    shape: Shape
    attend: Attend
    drop: Drop
    waves: Tensor  # sinusoids, where there are no relations
    multiply: Linear = F.linear

    def __call__(self, p: Parameters, source: Tensor, target: Tensor) -> Tensor:
        memory = self.stack(p, "encoder", source, None)
        return self.stack(p, "decoder", target, memory)

    def stack(self, p: Parameters, stack: str, x: Tensor, memory: Tensor | None) -> Tensor:
        shape = self.shape
        if not shape.k:
            x = x + self.waves[: x.shape[1]]
        x = self.drop(x, shape.dropout)
        for layer in range(shape.layers(stack)):
            own = f"{stack}.{layer}"
            x = self.sublayer(p, f"{own}.attention", x, self.self_attention, stack == "decoder")
            if memory is not None:
                x = self.sublayer(p, f"{own}.cross", x, self.cross_attention, memory)
            x = self.sublayer(p, f"{own}.feed_forward", x, self.feed_forward, None)
        return self.norm(p, f"{stack}.norm", x) if shape.pre_norm else x

    def sublayer(self, p: Parameters, name: str, x: Tensor, inner: Any, argument: Any) -> Tensor:
        if self.shape.pre_norm:
            y = inner(p, name, self.norm(p, f"{name}.norm", x), argument)
            return x + self.drop(y, self.shape.dropout)
        return self.norm(
            p, f"{name}.norm", x + self.drop(inner(p, name, x, argument), self.shape.dropout)
        )

    def norm(self, p: Parameters, name: str, x: Tensor) -> Tensor:
        gain, shift = p[f"{name}.gain"], p.get(f"{name}.shift")
        return F.layer_norm(x, gain.shape, gain, shift, self.shape.norm_epsilon)

    def linear(self, p: Parameters, name: str, x: Tensor) -> Tensor:
        return self.multiply(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    def self_attention(self, p: Parameters, name: str, x: Tensor, causal: bool) -> Tensor:
        tables = (p[f"{name}.key_table"], p[f"{name}.value_table"]) if self.shape.k else ()
        z = self.attention(causal, tables, (self.linear(p, f"{name}.qkv", x), 3))
        return self.linear(p, f"{name}.out", z)

    def cross_attention(self, p: Parameters, name: str, x: Tensor, memory: Tensor) -> Tensor:
        q, kv = self.linear(p, f"{name}.q", x), self.linear(p, f"{name}.kv", memory)
        return self.linear(p, f"{name}.out", self.attention(False, (), (q, 1), (kv, 2)))

    def attention(
        self, causal: bool, tables: tuple[Tensor, ...], *joined: tuple[Tensor, int]
    ) -> Tensor:
        """[B, n, H D] from q, k and v, which lie side by side in arrays of so many parts.

        Torch's own kernel where it can: it takes rows as they lie. Else heads come first, by a copy.
        """
        H, rate = self.shape.heads, self.shape.attention_dropout
        parted = [x.unflatten(-1, (parts, H, -1)) for x, parts in joined]  # [B, n, parts, H, D]
        if not tables and rate == 0:
            rows = [part for x in parted for part in x.permute(2, 0, 3, 1, 4).unbind(0)]
            z = F.scaled_dot_product_attention(*rows, is_causal=causal)
            return z.transpose(1, 2).flatten(2)
        heads = [y for x in parted for y in x.permute(2, 3, 0, 1, 4).contiguous().unbind(0)]
        z = self.attend(*heads, causal, rate, *tables)
        return z.permute(1, 2, 0, 3).flatten(2)

    def feed_forward(self, p: Parameters, name: str, x: Tensor, _: None) -> Tensor:
        h = self.linear(p, f"{name}.in", x)
        a = self.drop(
            h.relu_() if self.attend is attend_eagerly else h.relu(), self.shape.activation_dropout
        )
        return self.linear(p, f"{name}.out", a)
