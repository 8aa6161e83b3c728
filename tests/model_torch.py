# SPDX-License-Identifier: Apache-2.0
"""The model in torch operations, a sentence at a time, with whole [n, n, D] arrays: an oracle.

It knows of relpos only the names of fields and parameters, and the functions of relpos.position
that say which row a distance has. Gradients are autograd's, the update is torch.optim.AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import relpos
from relpos.position import alibi_slopes, deberta_log_buckets, sinusoid, t5_buckets

Setting = Callable[[str], str]  # the text of a field, as rp_config_get gives it
Parameters = Mapping[str, Tensor]
Sentence = Sequence[int]


@dataclass(frozen=True)
class Pair:
    """One sentence of a batch; graphs are integers [n, n]."""

    source: Sentence | None
    target: Sentence | None
    labels: Sentence  # of the target, or of the source of an encoder alone
    source_graph: Any = None
    target_graph: Any = None


class TorchModel:
    """A configuration as a function of parameters."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.C, self.H = self.integer("width"), self.integer("heads")
        self.D = self.integer("head_width") or self.C // self.H
        self.key_heads = self.integer("key_heads") or self.H
        self.two = all(self.integer(f"{stack}.layers") for stack in ("encoder", "decoder"))

    def integer(self, name: str) -> int:
        return int(self.setting(name))

    def number(self, name: str) -> float:
        return float(self.setting(name))

    def flag(self, name: str) -> bool:
        return self.setting(name) == "true"

    # ---- loss ------------------------------------------------------------------------------------

    def loss(self, p: Parameters, batch: Iterable[Pair]) -> tuple[Tensor, int]:
        """The sum over the labels that count, and how many those are."""
        total: Any = 0.0
        count = 0
        for pair in batch:
            counted = [(i, label) for i, label in enumerate(pair.labels) if label >= 0]
            if not counted:
                continue
            places, labels = zip(*counted, strict=True)
            logits = self.hidden(p, pair)[list(places)] @ self.output(p).mT
            total = total + self.cross_entropy(logits, torch.tensor(labels))
            count += len(labels)
        return total, count

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        eps, V = self.number("label_smoothing"), logits.shape[-1]
        one = F.one_hot(labels, V).to(logits)
        if self.setting("smoothing") == "all":
            wanted = (1 - eps) * one + eps / V
        else:
            wanted = (1 - eps) * one + eps / (V - 1) * (1 - one)
        return -(wanted * logits.log_softmax(-1)).sum()

    def embedding(self, p: Parameters, stack: str) -> Tensor:
        apart = stack == "decoder" and not (self.two and self.flag("share_embeddings"))
        return p["target_embedding.weight" if apart else "source_embedding.weight"]

    def output(self, p: Parameters) -> Tensor:
        if not self.flag("share_output"):
            return p["output.weight"]
        return self.embedding(p, "decoder" if self.integer("decoder.layers") else "encoder")

    # ---- stacks ----------------------------------------------------------------------------------

    def hidden(self, p: Parameters, pair: Pair) -> Tensor:
        memory = x = None
        if pair.source is not None:
            x = memory = self.stack(p, "encoder", pair.source, pair.source_graph, None)
        if pair.target is not None:
            x = self.stack(p, "decoder", pair.target, pair.target_graph, memory)
        assert x is not None
        return x

    def stack(
        self, p: Parameters, stack: str, tokens: Sentence, graph: Any, memory: Tensor | None
    ) -> Tensor:
        x = self.embedding(p, stack)[list(tokens)]
        if self.flag("scale_embeddings"):
            x = x * math.sqrt(self.C)
        x = x + self.absolute(p, stack, len(tokens)).to(x)
        for layer in range(self.integer(f"{stack}.layers")):
            own = f"{stack}.{layer}"
            x = self.add(p, f"{own}.attention", x, self.self_attention, (stack, graph))
            if memory is not None:
                x = self.add(p, f"{own}.cross", x, self.cross_attention, memory)
            x = self.add(p, f"{own}.feed_forward", x, self.feed_forward, None)
        return self.norm(p, f"{stack}.norm", x) if self.setting("norm") == "pre" else x

    def absolute(self, p: Parameters, stack: str, n: int) -> Tensor:
        kind = self.setting(f"{stack}.absolute")
        if kind == "learned":
            return p[f"{stack}.positions.weight"][:n]
        if kind == "none":
            return torch.zeros(n, self.C)
        first = self.integer(f"{stack}.sinusoid_first")
        waves = sinusoid(
            np.arange(first, first + n),
            self.C,
            layout="interleaved" if self.flag(f"{stack}.sinusoid_interleaved") else "halves",
            exponent="t2t" if self.setting(f"{stack}.sinusoid_rule") == "closed" else "vaswani",
        )
        return torch.from_numpy(waves)

    def add(self, p: Parameters, name: str, x: Tensor, inner: Any, argument: Any) -> Tensor:
        """A sublayer and its residual connection."""
        if self.setting("norm") == "pre":
            return x + inner(p, name, self.norm(p, f"{name}.norm", x), argument)
        return self.norm(p, f"{name}.norm", x + inner(p, name, x, argument))

    def norm(self, p: Parameters, name: str, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        y = (x - mean) / torch.sqrt(variance + self.number("norm_epsilon")) * p[f"{name}.gain"]
        return y + p[f"{name}.shift"] if self.flag("bias") else y

    def linear(self, p: Parameters, name: str, x: Tensor) -> Tensor:
        y = x @ p[f"{name}.weight"].mT
        return y + p[f"{name}.bias"] if self.flag("bias") else y

    def feed_forward(self, p: Parameters, name: str, x: Tensor, _: None) -> Tensor:
        h = self.linear(p, f"{name}.in", x)
        kind = self.setting("activation")
        if kind == "swiglu":
            gate, value = h.chunk(2, -1)
            a = gate * torch.sigmoid(gate) * value
        else:
            a = h.clamp_min(0) if kind == "relu" else h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        return self.linear(p, f"{name}.out", a)

    # ---- attention -------------------------------------------------------------------------------

    def heads(self, x: Tensor, parts: str) -> list[Tensor]:
        """[n, columns of all parts] -> [H, n, D] of each: heads of keys are there for all that share
        them."""
        counts = [self.H if part == "q" else self.key_heads for part in parts]
        columns = x.split([count * self.D for count in counts], -1)
        return [
            each.unflatten(-1, (count, self.D))
            .transpose(0, 1)
            .repeat_interleave(self.H // count, 0)
            for each, count in zip(columns, counts, strict=True)
        ]

    def cross_attention(self, p: Parameters, name: str, x: Tensor, memory: Tensor) -> Tensor:
        (q,) = self.heads(self.linear(p, f"{name}.q", x), "q")
        k, v = self.heads(self.linear(p, f"{name}.kv", memory), "kv")
        if len(memory) == 0:  # a query without keys: zeros
            z = torch.zeros_like(q)
        else:
            z = torch.softmax(q @ k.mT / math.sqrt(self.D), -1) @ v
        return self.linear(p, f"{name}.out", z.transpose(0, 1).flatten(1))

    def self_attention(self, p: Parameters, name: str, x: Tensor, where: Any) -> Tensor:
        stack, graph = where
        q, k, v = self.heads(self.linear(p, f"{name}.qkv", x), "qkv")
        terms = Terms(self, p, name, stack, q, k)
        terms.add_scheme()
        if graph is not None:
            terms.add_labels(torch.from_numpy(np.asarray(graph, np.int64)))
        scores = (terms.content + terms.scaled) * terms.scale + terms.bias
        cap = self.number(f"{stack}.softcap")
        if cap > 0:
            scores = cap * torch.tanh(scores / cap)
        probabilities = torch.softmax(scores.masked_fill(terms.hidden, -math.inf), -1)
        z = probabilities @ v
        for rows in terms.values:
            z = z + torch.einsum("hij,hijd->hid", probabilities, rows)
        return self.linear(p, f"{name}.out", z.transpose(0, 1).flatten(1))


class Terms:
    """What positions add to the scores and values of one sentence, pair by pair.

    scores = (content + scaled) * scale + bias;   values: arrays [H, n, n, D] to be added to v_j
    """

    def __init__(
        self, model: TorchModel, p: Parameters, name: str, stack: str, q: Tensor, k: Tensor
    ) -> None:
        self.model, self.p, self.name, self.stack = model, p, name, stack
        self.q, self.k = q, k
        position = torch.arange(q.shape[1])
        self.distance = position[None, :] - position[:, None]  # key minus query
        self.causal = stack == "decoder"
        window = self.integer("window")
        self.hidden = (self.distance > 0) & self.causal
        if window >= 0:
            self.hidden = self.hidden | (self.distance.abs() > window)
        self.content, self.scale = q @ k.mT, model.D**-0.5
        self.scaled: Any = 0.0
        self.bias: Any = 0.0
        self.values: list[Tensor] = []

    def integer(self, name: str) -> int:
        return self.model.integer(f"{self.stack}.{name}")

    def flag(self, name: str) -> bool:
        return self.model.flag(f"{self.stack}.{name}")

    def parameter(self, name: str) -> Tensor:
        """A layer's own, or that of all layers of the stack."""
        keys = self.flag("per_layer")
        of_values = {"as-keys": keys, "true": True, "false": False}
        values = of_values[self.model.setting(f"{self.stack}.value_per_layer")]
        per_layer = values if name.endswith("value_table") else keys
        own = self.name if per_layer else f"{self.stack}.attention"
        return self.p[f"{own}.{name}"]

    def rows(self, name: str, index: Tensor, present: Tensor) -> Tensor:
        """Rows of a table [T, D] or [H, T, D] for every pair, [H, n, n, D]; zeros where absent."""
        table = self.parameter(name)
        if table.dim() == 2:
            table = table.expand(self.model.H, -1, -1)
        return table[:, index.clamp(0, table.shape[1] - 1)] * present[..., None].to(table)

    def meet(self, x: Tensor, rows: Tensor) -> Tensor:
        """x_i . rows_ij, [H, n, n]."""
        return torch.einsum("hid,hijd->hij", x, rows)

    def meet_keys(self, rows: Tensor) -> Tensor:
        """k_j . rows_ij."""
        return torch.einsum("hjd,hijd->hij", self.k, rows)

    def add_pair(self, prefix: str, index: Tensor, present: Tensor, key: bool, value: bool) -> None:
        """A key term and a value term over one index, with tables of their own or one."""
        if key:
            self.scaled += self.meet(self.q, self.rows(f"{prefix}key_table", index, present))
        if value:
            table = "key_table" if self.flag("tied") else "value_table"
            self.values.append(self.rows(prefix + table, index, present))

    def add_labels(self, labels: Tensor) -> None:
        key, value = self.flag("relation_key"), self.flag("relation_value")
        self.add_pair("relation_", labels, labels >= 0, key, value)

    def add_scheme(self) -> None:
        position = self.model.setting(f"{self.stack}.position")
        if position != "none":
            getattr(self, position.replace("-", "_"))()

    def shaw(self) -> None:
        left, right = self.integer("k"), self.integer("k_right")
        right = left if right < 0 else right
        inside = (self.distance >= -left) & (self.distance <= right)
        clipped = self.model.setting(f"{self.stack}.beyond") == "clip"
        index = self.distance.clamp(-left, right) + left
        present = inside | clipped
        self.add_pair("", index, present, self.flag("key"), self.flag("value"))

    def music(self) -> None:
        index = self.distance + self.model.integer("max_length") - 1
        present = (self.distance <= 0) | (not self.causal)
        self.add_pair("", index, present, self.flag("key"), self.flag("value"))

    def transformer_xl(self) -> None:
        t, clamp = -self.distance, self.integer("clamp")
        if clamp > 0:
            t = t.clamp(-clamp, clamp)
        waves = torch.from_numpy(sinusoid(t.flatten().numpy(), self.model.C, layout="halves"))
        made = waves.to(self.q) @ self.parameter("position.weight").mT
        made = made.view(*t.shape, self.model.H, self.model.D).permute(2, 0, 1, 3)
        u, v = self.parameter("content_bias"), self.parameter("position_bias")
        self.scaled = self.meet(self.q + v[:, None], made) + (u[:, None] @ self.k.mT)

    def t5(self) -> None:
        buckets, far = self.integer("buckets"), self.integer("max_distance")
        index = t5_buckets(self.distance.numpy(), buckets, far, not self.causal)
        self.bias = self.parameter("bias_table")[:, torch.from_numpy(index)]
        self.scale = 1.0

    def deberta(self) -> None:
        model, buckets = self.model, self.integer("buckets")
        x = -self.distance.numpy()
        if buckets > 0:
            x = deberta_log_buckets(x, buckets, self.integer("max_distance"))
        span = buckets or model.integer("max_length")
        index = torch.from_numpy(x + span).clamp(0, 2 * span - 1)
        embedded = self.p[f"{self.stack}.relative_embedding.weight"]
        query, key, _ = model.heads(model.linear(self.p, f"{self.name}.qkv", embedded), "qkv")
        if self.flag("key"):
            self.scaled += self.meet(self.q, key[:, index])
        if self.flag("value"):
            self.scaled += self.meet_keys(query[:, index])
        self.scale = (model.D * (1 + self.flag("key") + self.flag("value"))) ** -0.5

    def relative_key(self) -> None:
        index = -self.distance + self.model.integer("max_length") - 1
        rows = self.rows("distance_table", index, torch.ones_like(index))
        self.scaled += self.meet(self.q, rows)
        if self.model.setting(f"{self.stack}.position") == "relative-key-query":
            self.scaled += self.meet_keys(rows)

    relative_key_query = relative_key

    def alibi(self) -> None:
        slopes = torch.from_numpy(alibi_slopes(self.model.H)).to(self.q)
        self.bias = -slopes[:, None, None] * self.distance.abs()

    def alibi_learned(self) -> None:
        self.bias = -self.parameter("slopes")[:, None, None] * self.distance.abs()

    def rope(self) -> None:
        setting = self.model.setting
        scaling = self.model.number(f"{self.stack}.rope_scaling")
        rope = relpos.RoPE(
            width=self.integer("rope_width") or None,
            base=self.model.number(f"{self.stack}.rope_base"),
            scaling=None if scaling == 1 else setting(f"{self.stack}.rope_rule"),  # type: ignore[arg-type]
            factor=scaling,
        )
        frequencies = torch.from_numpy(rope.frequencies(self.model.D))
        angle = torch.arange(self.q.shape[1])[:, None] * frequencies
        q, k = (self.turned(x, angle.to(x)) for x in (self.q, self.k))
        self.content = q @ k.mT

    def turned(self, x: Tensor, angle: Tensor) -> Tensor:
        pairs = angle.shape[1]
        turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if self.flag("rope_interleaved"):
            a, b = turning[..., 0::2], turning[..., 1::2]
        else:
            a, b = turning.chunk(2, -1)
        c, d = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        both = (
            torch.stack((c, d), -1).flatten(-2)
            if self.flag("rope_interleaved")
            else torch.cat((c, d), -1)
        )
        return torch.cat((both, rest), -1)


# ---- training ------------------------------------------------------------------------------------


def gradients(
    model: TorchModel, weights: Mapping[str, Any], batch: Sequence[Pair], dtype: torch.dtype
) -> tuple[float, int, dict[str, Tensor]]:
    """The summed loss, the labels that count, and every gradient of the sum."""
    leaves = {name: torch.tensor(w, dtype=dtype).requires_grad_() for name, w in weights.items()}
    loss, count = model.loss(leaves, batch)
    loss.backward()
    found = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
    return float(loss.detach()), count, found


def decays(name: str) -> bool:
    """Whether weight decay is for it: matrices and tables of vectors."""
    return name.endswith((".weight", "key_table", "value_table", "distance_table"))


class TorchTraining:
    """Weights, and steps of AdamW over them with the schedule and the clipping of the model."""

    def __init__(self, model: TorchModel, weights: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.model, self.count = model, 0
        self.weights = {
            n: torch.tensor(w, dtype=dtype).requires_grad_() for n, w in weights.items()
        }
        groups: list[dict[str, Any]] = []
        for decay in (True, False):
            own = [w for name, w in self.weights.items() if decays(name) == decay]
            rate = model.number("weight_decay") if decay else 0.0
            groups.append({"params": own, "weight_decay": rate})
        betas = model.number("beta1"), model.number("beta2")
        self.adam = torch.optim.AdamW(groups, betas=betas, eps=model.number("adam_epsilon"))

    def rate(self, t: int) -> float:
        factor, warmup = self.model.number("learning_rate"), self.model.number("warmup")
        if self.model.setting("schedule") == "noam":
            return factor * self.model.C**-0.5 * min(t**-0.5, t * warmup**-1.5)
        assert self.model.setting("schedule") == "constant" and warmup == 0
        return factor

    def step(self, batch: Sequence[Pair]) -> tuple[float, float]:
        """The mean loss, and the norm of its gradient."""
        self.count += 1
        self.adam.zero_grad()
        loss, count = self.model.loss(self.weights, batch)
        (loss / count).backward()
        own = list(self.weights.values())
        for w in own:
            w.grad = torch.zeros_like(w) if w.grad is None else w.grad
        norm = math.sqrt(sum(float((w.grad.double() ** 2).sum()) for w in own))
        clip = self.model.number("clip_norm")
        if 0 < clip < norm:
            for w in own:
                w.grad *= clip / norm
        for group in self.adam.param_groups:
            group["lr"] = self.rate(self.count)
        self.adam.step()
        return float(loss.detach()) / count, norm
