# SPDX-License-Identifier: Apache-2.0
"""A model's attention in plain float64 NumPy, one sentence after another: relpos.reference put
together, for norm before, ReLU and Shaw's or no positions, with dropout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import relpos
from relpos import reference
from relpos.reference import Dropout, Term

# rpi_site of csrc/model/model.h
SITES = ("embedding", "self", "self added", "cross", "cross added", "activation", "added")


@dataclass
class Seen:
    """Of one head: what its attention adds up, and what comes of it; float64 (n, m)."""

    content: Any
    relation: Any
    logits: Any
    probabilities: Any


@dataclass
class ReferenceModel:
    """attempt None: no dropout; else the masks of that attempt. ordinal: of the sentence."""

    config: relpos.Config
    weights: Mapping[str, Any]
    attempt: int | None = None
    ordinal: int = 0
    seen: dict[tuple[str, int, int], Seen] = field(default_factory=dict)  # by kind, layer, head

    def __post_init__(self) -> None:
        self.weights = {name: np.asarray(w, np.float64) for name, w in self.weights.items()}

    def dropout(self, rate: float, stack: str, layer: int, site: str) -> Dropout:
        seed, number = self.config.seed, (self.attempt or 0)
        counter = np.array([number & 0xFFFFFFFF, number >> 32, 0, 0])
        key = reference.philox4x32(counter, np.array([seed & 0xFFFFFFFF, seed >> 32]), rounds=10)
        place = (stack == "decoder") << 15 | layer << 3 | SITES.index(site)
        rate = 0.0 if self.attempt is None else rate
        return Dropout(rate, (int(key[0]), int(key[1])), place << 12, self.ordinal)

    def keep(self, x: Any, rate: float, stack: str, layer: int, site: str) -> Any:
        drop = self.dropout(rate, stack, layer, site)
        return reference.packed_keep(drop, [0, len(x)], [self.ordinal], x.shape[1])

    # ---- the pass --------------------------------------------------------------------------------

    def run(self, source: Any, target: Any) -> ReferenceModel:
        """Fills `seen`."""
        memory = None
        if self.config.encoder.layers > 0:
            memory = self.stack("encoder", np.asarray(source), None)
        if self.config.decoder.layers > 0:
            self.stack("decoder", np.asarray(target), memory)
        return self

    def stack(self, name: str, tokens: Any, memory: Any) -> Any:
        config = self.config
        own = getattr(config, name)
        assert (config.norm, config.activation, own.absolute) == ("pre", "relu", "none")
        shared = config.share_embeddings or name == "encoder"
        table = self.weights["source_embedding.weight" if shared else "target_embedding.weight"]
        scale = math.sqrt(config.width) if config.scale_embeddings else 1.0
        x = reference.embed(tokens, table, scale)
        x = x * self.keep(x, config.dropout, name, 0, "embedding")
        for layer in range(own.layers):
            at = f"{name}.{layer}"
            z = self.self_attention(name, layer, self.norm(f"{at}.attention.norm", x))
            x = self.add(x, self.linear(f"{at}.attention.out", z), name, layer, "self added")
            if memory is not None:
                z = self.cross_attention(layer, self.norm(f"{at}.cross.norm", x), memory)
                x = self.add(x, self.linear(f"{at}.cross.out", z), name, layer, "cross added")
            h = self.linear(f"{at}.feed_forward.in", self.norm(f"{at}.feed_forward.norm", x))
            keep = self.keep(h, config.activation_dropout, name, layer, "activation")
            f = self.linear(f"{at}.feed_forward.out", reference.relu(h, keep))
            x = self.add(x, f, name, layer, "added")
        return self.norm(f"{name}.norm", x)

    def norm(self, name: str, x: Any) -> Any:
        gain, shift = self.weights[f"{name}.gain"], self.weights[f"{name}.shift"]
        return reference.norm(x, gain, shift, self.config.norm_epsilon)

    def linear(self, name: str, x: Any) -> Any:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def add(self, x: Any, f: Any, stack: str, layer: int, site: str) -> Any:
        keep = self.keep(f, self.config.dropout, stack, layer, site)
        return reference.residual(x, f, keep)

    # ---- attention -------------------------------------------------------------------------------

    def self_attention(self, stack: str, layer: int, n: Any) -> Any:
        own = getattr(self.config, stack)
        q, k, v = self.split(self.linear(f"{stack}.{layer}.attention.qkv", n), "qkv")
        visible = np.ones((len(n), len(n)), bool)
        terms: list[Any] = []
        if stack == "decoder":
            visible = np.tri(len(n), dtype=bool)
        if own.position == "shaw":
            index = reference.relation_index(len(n), len(n), 0, own.k, own.k)
            apart = own.value_per_layer is not None
            per_layer = {"key": own.per_layer}
            per_layer["value"] = own.value_per_layer if apart else own.per_layer
            for kind, each in per_layer.items():
                if getattr(own, kind):
                    where = f"{stack}.{layer}" if each else stack
                    table = self.weights[f"{where}.attention.{kind}_table"]
                    terms.append((kind, table, index))
        return self.heads(stack, stack, layer, "self", q, k, v, terms, visible)

    def cross_attention(self, layer: int, n: Any, memory: Any) -> Any:
        (q,) = self.split(self.linear(f"decoder.{layer}.cross.q", n), "q")
        k, v = self.split(self.linear(f"decoder.{layer}.cross.kv", memory), "kv")
        visible = np.ones((len(n), len(memory)), bool)
        return self.heads("cross", "decoder", layer, "cross", q, k, v, [], visible)

    def split(self, x: Any, parts: str) -> list[Any]:
        """(heads, n, width) of each part of its columns; keys and values once for every query head."""
        heads = self.config.heads
        own, found, at = self.config.key_heads or heads, [], 0
        width = self.config.head_width or self.config.width // heads
        for part in parts:
            count = heads if part == "q" else own
            columns = x[:, at : at + count * width].reshape(len(x), count, width)
            found.append(columns.transpose(1, 0, 2).repeat(heads // count, axis=0))
            at += count * width
        return found

    def heads(
        self,
        kind: str,
        stack: str,
        layer: int,
        site: str,
        q: Any,
        k: Any,
        v: Any,
        terms: Any,
        visible: Any,
    ) -> Any:
        drop = self.dropout(self.config.attention_dropout, stack, layer, site)
        scale, found = 1 / math.sqrt(q.shape[2]), []
        for h in range(len(q)):
            own = [Term(what, t[h] if t.ndim == 3 else t, index) for what, t, index in terms]
            s, lse = reference.attention_scores(q[h], k[h], own, scale=scale, visible=visible)
            content = scale * q[h] @ k[h].T * visible
            relation = np.where(visible, s, 0) - content
            p = reference.attention_probabilities(s, lse)
            self.seen[kind, layer, h] = Seen(content, relation, s, p)
            keep = reference.dropout_factors(drop, 0, h, *visible.shape)
            z, _ = reference.attention_forward(
                q[h], k[h], v[h], own, visible=visible, keep=keep, scale=scale
            )
            found.append(z)
        return np.concatenate(found, axis=1)
