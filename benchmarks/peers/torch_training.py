# SPDX-License-Identifier: Apache-2.0
"""A training step in PyTorch around any stacks: embeddings, loss, update, as fast as the CPU allows.

    loss         logits of some rows at a time in one buffer that stays; softmax in place; the
                 gradient of rows and table by two products at once. Smoothing needs no pass over
                 the logits: its sums are products with the column sums of the table.
    embedding    source, target and output share a table; its gradient is one buffer that the loss
                 writes and the look-ups add rows to
    Adam         fused=True, over all parameters

`Step(..., written=True)` is the same as everyone writes it: F.embedding, one product for all logits,
F.cross_entropy. Parameters are named as relpos names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = {"cpu": 512, "cuda": 8192}  # of logits at a time

Parameters = dict[str, Tensor]
Hidden = Callable[[Tensor, Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """What a step computes, in relpos's words. k is 0 where positions are absolute."""

    width: int
    heads: int
    feed_forward: int
    vocabulary: int
    encoder_layers: int
    decoder_layers: int
    k: int = 0
    per_head: bool = True
    pre_norm: bool = True
    bias: bool = True
    norm_epsilon: float = 1e-6
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    smoothing: float = 0.1
    clip_norm: float = 0.0
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.98
    adam_epsilon: float = 1e-9

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def layers(self, stack: str) -> int:
        return self.encoder_layers if stack == "encoder" else self.decoder_layers


@dataclass(frozen=True)
class Batch:
    """int64 [sentences, length] each; where sentences are padded, the labels of the target's tokens
    that are none, and which of all these are."""

    source: Tensor
    target: Tensor
    labels: Tensor
    counted: Tensor | None = None


# ------------------------------------------------------------------------------- the vocabulary


class _LookUp(torch.autograd.Function):  # type: ignore[misc]
    """scale * table[ids]; the gradient is added to table.grad, which the loss has made."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, table: Tensor, ids: Tensor, scale: float) -> Tensor:
        ctx.table, ctx.ids, ctx.scale = table, ids, scale
        return F.embedding(ids, table.detach()).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows = gradients[0].reshape(-1, ctx.table.shape[1])
        ctx.table.grad.index_add_(0, ctx.ids.reshape(-1), rows, alpha=ctx.scale)
        return None, None, None, None


def _as_operand(x: Tensor) -> Tensor:
    """Rounded as autocast would: it leaves products alone that write into memory they are given."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out = a b; a product of narrow operands is narrow."""
    return torch.mm(a, b, out=out) if a.dtype == out.dtype else out.copy_(torch.mm(a, b))


class Output:
    """Loss over the vocabulary with its gradients, in buffers that stay.

    y = (1 - eps) [label] + eps / V;   loss = -sum y log softmax(h W^T)
    dh = (p - y) W,   dW = (p - y)^T h,   where the eps / V are products with sums

    product: of two matrices, where it is not torch.mm.
    """

    def __init__(self, table: Tensor, smoothing: float, product: Product | None = None) -> None:
        self.table, self.smoothing, self.product = table, smoothing, product
        self.logits = table.detach().new_empty(ROWS[table.device.type], len(table))
        table.grad = torch.empty_like(table)

    def __call__(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss, and the gradient of hidden; that of the table is written to its .grad."""
        table, count = self.table.detach(), len(labels)
        even = self.smoothing / len(table)
        assert table.dim() == 2 and self.table.grad is not None
        columns = table.sum(0)
        dhidden, scaled = torch.empty_like(hidden), hidden / count
        dtable = self.table.grad.copy_((-even * scaled.sum(0)).expand_as(table))
        x, w, scaled = _as_operand(hidden), _as_operand(table), _as_operand(scaled)
        loss = hidden.new_zeros(())
        for first in range(0, count, len(self.logits)):
            end = min(first + len(self.logits), count)
            rows, label = hidden[first:end], labels[first:end, None]
            logits = self._logits(x[first:end], w.mT)
            at_label = logits.gather(1, label)
            p = torch.softmax(logits, 1, out=logits)
            log_p = p.gather(1, label).clamp_min_(1e-38).log_()
            log_sum = at_label - log_p
            loss -= (1 - self.smoothing) * log_p.sum()
            loss -= even * (rows @ columns - len(table) * log_sum[:, 0]).sum()
            p.scatter_add_(1, label, p.new_full((1, 1), self.smoothing - 1).expand_as(label))
            p = _as_operand(p)
            if self.product is not None:
                dhidden[first:end] = self.product(p, w)
                dtable.add_(self.product(p.mT, scaled[first:end]))
                continue
            _multiply(p, w, dhidden[first:end])
            if p.dtype == dtable.dtype:
                dtable.addmm_(p.mT, scaled[first:end])
            else:
                dtable.add_(torch.mm(p.mT, scaled[first:end]))
        dhidden.sub_(even * columns).div_(count)
        return loss / count, dhidden

    def _logits(self, rows: Tensor, table: Tensor) -> Tensor:
        if self.product is not None:
            return self.product(rows, table)
        return _multiply(rows, table, self.logits[: len(rows)])


# -------------------------------------------------------------------------------------- a step


class Step:
    """One training step: `hidden(source vectors, target vectors)` gives [sentences, length, C]."""

    def __init__(
        self,
        shape: Shape,
        batch: Batch,
        parameters: Parameters,
        hidden: Hidden,
        written: bool = False,
    ) -> None:
        self.shape, self.batch, self.parameters, self.hidden = shape, batch, parameters, hidden
        self.table = parameters["source_embedding.weight"]
        self.written = written
        if not written:
            self.output = Output(self.table, shape.smoothing)
            self.trigger = torch.zeros((), requires_grad=True)  # gives look-ups a backward
        self.others = [p for p in parameters.values() if p is not self.table]
        self.adam = torch.optim.Adam(
            [self.table, *self.others],
            lr=shape.learning_rate,
            betas=(shape.beta1, shape.beta2),
            eps=shape.adam_epsilon,
            fused=True,
        )

    def gradients(self) -> Tensor:
        """Forward and backward: the loss; the gradients are in the parameters' .grad."""
        for parameter in self.others:
            parameter.grad = None
        return self._gradients_as_written() if self.written else self._gradients()

    def _gradients(self) -> Tensor:
        scale = math.sqrt(self.shape.width)
        source, target = (
            _LookUp.apply(self.trigger, self.table, ids, scale)
            for ids in (self.batch.source, self.batch.target)
        )
        hidden = self.hidden(source, target).flatten(0, 1)
        if self.batch.counted is not None:
            hidden = hidden.index_select(0, self.batch.counted)
        loss, dhidden = self.output(hidden.detach(), self.batch.labels.flatten())
        hidden.backward(dhidden)
        return loss

    def _gradients_as_written(self) -> Tensor:
        self.table.grad = None
        source, target = (
            F.embedding(ids, self.table) * math.sqrt(self.shape.width)
            for ids in (self.batch.source, self.batch.target)
        )
        logits = F.linear(self.hidden(source, target), self.table)
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            self.batch.labels.flatten(),
            label_smoothing=self.shape.smoothing,
        )
        loss.backward()
        return loss.detach()

    def step(self) -> float:
        loss = self.gradients()
        if self.shape.clip_norm > 0:
            nn.utils.clip_grad_norm_([self.table, *self.others], self.shape.clip_norm, foreach=True)
        self.adam.step()
        return float(loss)


@cache
def sinusoids(length: int, width: int) -> Tensor:
    """Sines in the even columns, cosines in the odd ones."""
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
