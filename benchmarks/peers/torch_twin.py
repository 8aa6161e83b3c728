# SPDX-License-Identifier: Apache-2.0
"""A translation model in PyTorch as anyone writes it: padded batches, masks, relations by gather.

The twin of a relpos configuration: the same parameters by the same names, the same formula, dropout in
the same places. It trains on relpos's own batches, so that only the implementation differs.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peers.torch_stacks import drop

PAD = 0


class Twin:
    """The loss of a batch as a function of parameters; pre-norm, ReLU, Shaw's relations or none."""

    def __init__(self, config: Any, parameters: dict[str, Any]) -> None:
        stacks = (config.encoder, config.decoder)
        positions = {(s.position, s.absolute) for s in stacks}
        known = positions <= {("shaw", "none"), ("none", "none")}
        known &= config.norm == "pre" and config.activation == "relu" and config.bias
        known &= config.share_embeddings and config.share_output and config.smoothing == "all"
        known &= all(s.per_layer and s.beyond == "clip" and not s.tied for s in stacks)
        known &= config.key_heads in (0, config.heads)
        known &= all(s.value_per_layer is None and s.value_per_head is None for s in stacks)
        if not known:
            raise ValueError(f"the twin cannot be {config!r}")
        self.config = config
        self.p = {
            name: torch.tensor(x, requires_grad=True) for name, x in sorted(parameters.items())
        }
        self.training = True

    def loss(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """The mean over the labels that count; int64 [sentences, length], labels -1 elsewhere."""
        seen = source != PAD
        memory = self.stack("encoder", source, seen[:, None, None, :], None, None)
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        x = self.stack("decoder", target, causal, memory, seen[:, None, None, :])
        counted = labels >= 0
        logits = x[counted] @ self.p["source_embedding.weight"].mT
        smoothing = self.config.label_smoothing
        return F.cross_entropy(logits, labels[counted], label_smoothing=smoothing)

    def stack(
        self, side: str, ids: Tensor, seen: Tensor, memory: Tensor | None, met: Tensor | None
    ) -> Tensor:
        config = getattr(self.config, side)
        x = F.embedding(ids, self.p["source_embedding.weight"]) * math.sqrt(self.config.width)
        x = self.drop(x, self.config.dropout)
        for layer in range(config.layers):
            name = f"{side}.{layer}"
            y = self.norm(f"{name}.attention", x)
            x = x + self.drop(self.attention(f"{name}.attention", y, None, seen, config))
            if memory is not None:
                y = self.norm(f"{name}.cross", x)
                x = x + self.drop(self.attention(f"{name}.cross", y, memory, met, None))
            y = self.linear(f"{name}.feed_forward.in", self.norm(f"{name}.feed_forward", x))
            y = self.drop(y.relu(), self.config.activation_dropout)
            x = x + self.drop(self.linear(f"{name}.feed_forward.out", y))
        return self.norm(side, x)

    def attention(
        self, name: str, x: Tensor, memory: Tensor | None, seen: Tensor | None, stack: Any
    ) -> Tensor:
        H = self.config.heads
        if memory is None:
            q, k, v = split(self.linear(f"{name}.qkv", x), 3, H)
        else:
            (q,) = split(self.linear(f"{name}.q", x), 1, H)
            k, v = split(self.linear(f"{name}.kv", memory), 2, H)
        scores, rows = q @ k.mT, None
        if stack is not None and stack.position == "shaw":
            place = torch.arange(q.shape[2])
            rows = (place[None, :] - place[:, None]).clamp(-stack.k, stack.k) + stack.k
            rows = rows.expand_as(scores)
            scores = scores + (q @ self.table(f"{name}.key_table").mT).gather(-1, rows)
        scores = scores * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        weights = self.drop(weights, self.config.attention_dropout)
        z = weights @ v
        if rows is not None:
            table = self.table(f"{name}.value_table")
            sums = weights.new_zeros(*weights.shape[:3], table.shape[-2])
            z = z + sums.scatter_add(-1, rows, weights) @ table
        return self.linear(f"{name}.out", z.transpose(1, 2).flatten(2))

    def table(self, name: str) -> Tensor:
        table = self.p[name]
        return table if table.dim() == 3 else table.expand(self.config.heads, -1, -1)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.p[f"{name}.weight"], self.p[f"{name}.bias"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        gain, shift = self.p[f"{name}.norm.gain"], self.p[f"{name}.norm.shift"]
        return F.layer_norm(x, gain.shape, gain, shift, self.config.norm_epsilon)

    def drop(self, x: Tensor, rate: float | None = None) -> Tensor:
        rate = self.config.dropout if rate is None else rate
        return drop(x, rate) if self.training else x


def split(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """[B, n, parts H D] -> [B, H, n, D] of each part."""
    return x.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def padded(tokens: Any, offsets: Any, fill: int) -> Tensor:
    """Sentences end to end, side by side."""
    ends = offsets.tolist()
    parts = [torch.tensor(tokens[a:b], dtype=torch.long) for a, b in pairwise(ends)]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)


def padded_batch(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        padded(batch.source, batch.source_offsets, PAD),
        padded(batch.target, batch.target_offsets, PAD),
        padded(batch.labels, batch.target_offsets, -1),
    )


class Adam:
    """torch.optim.Adam on Noam's schedule, as the configuration has both."""

    def __init__(self, twin: Twin) -> None:
        config = self.config = twin.config
        if config.schedule != "noam" or config.weight_decay:
            raise ValueError(f"the twin's update cannot be {config!r}")
        self.parameters = [*twin.p.values()]
        self.adam = torch.optim.Adam(
            self.parameters, lr=0.0, betas=(config.beta1, config.beta2), eps=config.adam_epsilon,
            fused=True,
        )  # fmt: skip
        self.step_number = 0

    def step(self) -> None:
        self.step_number += 1
        n, config = self.step_number, self.config
        rate = config.learning_rate * config.width**-0.5 * min(n**-0.5, n * config.warmup**-1.5)
        for group in self.adam.param_groups:
            group["lr"] = rate
        if config.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters, config.clip_norm)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
