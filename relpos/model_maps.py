# SPDX-License-Identifier: Apache-2.0
"""The attention of a model on one sentence: where its heads look, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from relpos import _core
from relpos.maps import AttentionMaps
from relpos.position.arrays import Array, check_choice, describe

KINDS = ("encoder", "decoder", "cross")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ModelMaps:
    """The maps of one sentence, by kind of attention, with the tokens that stand at their axes.

        maps = relpos.attention_maps(translator, "Two dogs run.")
        maps.maps["encoder"].probabilities[0, 3]        # (queries, keys) of layer 0, head 3
        maps.relation("encoder")                        # what relative position adds to the logits

    source_tokens: str each, what the encoder reads; () where there is none.
    target_tokens: str each, what the decoder reads, from the begin token on; () where there is none.
    maps: `AttentionMaps` by kind, "encoder", "decoder" or "cross": arrays float32 (layers, heads,
        queries, keys), of as many layers as that kind has.
    layers: int each, which of the model's layers were asked for; `layers_of` has those of a kind,
        which the first axis is.
    heads: int each, which heads the second axis is.
    predicted_tokens: str each, what every place of the target is to say, the end token last where the
        model has room for it; () where that is not known.
    relations: by kind the names of all parts of its logits but "content", asked for or not.
    """

    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    maps: Mapping[str, AttentionMaps]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    predicted_tokens: tuple[str, ...] = ()
    relations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.maps, Mapping):
            raise TypeError(f"maps: expected a mapping, got {describe(self.maps)}")
        for kind, of_kind in self.maps.items():
            check_choice("maps", kind, KINDS)
            if not isinstance(of_kind, AttentionMaps):
                raise TypeError(f"maps[{kind!r}]: expected AttentionMaps, got {describe(of_kind)}")
            if not isinstance(of_kind.parts, Mapping):
                got = describe(of_kind.parts)
                raise TypeError(f"maps[{kind!r}].parts: expected a mapping, got {got}")
            whole = {"probabilities": of_kind.probabilities, "logits": of_kind.logits}
            parts = {f"parts[{name!r}]": x for name, x in of_kind.parts.items()}
            for name, x in (whole | parts).items():
                if x is None or len(getattr(x, "shape", ())) == 4:
                    continue
                error = ValueError if hasattr(x, "shape") else TypeError
                raise error(
                    f"maps[{kind!r}].{name}: expected an array (layers, heads, queries, keys), "
                    f"got {describe(x)}"
                )

    def tokens(self, kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(queries, keys): the tokens of a kind's rows and of its columns."""
        self._of(kind)
        queries = self.source_tokens if kind == "encoder" else self.target_tokens
        keys = self.target_tokens if kind == "decoder" else self.source_tokens
        return queries, keys

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Which of the model's layers the first axis of a kind's arrays is: of `layers` those that
        the kind has, where encoder and decoder have different numbers of them."""
        maps = self._of(kind)
        arrays = [
            x for x in (maps.probabilities, maps.logits, *maps.parts.values()) if x is not None
        ]
        count = len(arrays[0]) if arrays else 0
        missing = set(sorted(self.layers)[count:])
        return tuple(layer for layer in self.layers if layer not in missing)

    def relation(self, kind: str) -> Array:
        """The logits' share of relative position: all parts but "content", added up.

        Returns float32 (layers, heads, queries, keys), 0 where a key is hidden.
        """
        parts = self._of(kind).parts
        if "content" not in parts:
            raise ValueError(
                'relation: the parts of the logits were not asked for: parts="all" gives them'
            )
        if missing := self.missing(kind):
            raise ValueError(
                f"relation: {', '.join(missing)} of the logits were not asked for: "
                'parts="all" gives them'
            )
        total: Array = np.zeros(np.shape(parts["content"]), np.float32)
        for name, part in parts.items():
            if name != "content":
                np.add(total, part, out=total, casting="unsafe")
        return total

    def missing(self, kind: str) -> tuple[str, ...]:
        """The parts of the logits that relation adds, and that were not asked for."""
        parts = self._of(kind).parts
        return tuple(name for name in self.relations.get(kind, ()) if name not in parts)

    def offsets(self, kind: str) -> npt.NDArray[np.int64]:
        """j - i, key minus query: from -(queries - 1) to keys - 1."""
        queries, keys = self.tokens(kind)
        return np.arange(-max(len(queries) - 1, 0), max(len(keys), 1))

    def mass(self, kind: str) -> Array:
        """How much attention goes how far: the mean over queries of the probability at j - i.

        Returns float32 (layers, heads, offsets), by `offsets`. A head's numbers sum to 1.
        """
        probabilities = self._probabilities(kind)
        mass = np.zeros((*probabilities.shape[:2], len(self.offsets(kind))), np.float32)
        for at, p in _each_head(probabilities):
            if p.size > 0:
                mass[at] = _core.map_sums(p, "mass")
        return mass

    def entropy(self, kind: str) -> Array:
        """-sum_j p_ij ln p_ij, in nats: 0 where a query looks at one key, ln n at n alike.

        Returns float32 (layers, heads, queries).
        """
        probabilities = self._probabilities(kind)
        entropy = np.zeros(probabilities.shape[:3], np.float32)
        for at, p in _each_head(probabilities):
            entropy[at] = _core.map_sums(p, "entropy")
        return entropy

    def distance(self, kind: str) -> Array:
        """How far a head looks: the mean over queries of sum_j p_ij |j - i|.

        Returns float32 (layers, heads).
        """
        probabilities = self._probabilities(kind)
        distance = np.zeros(probabilities.shape[:2], np.float32)
        for at, p in _each_head(probabilities):
            distance[at] = _core.map_sums(p, "distance")[0]
        return distance

    def _of(self, kind: str) -> AttentionMaps:
        check_choice("kind", kind, KINDS)
        if kind not in self.maps:
            there = ", ".join(map(repr, self.maps)) or "none"
            raise ValueError(f"kind: there are no maps of {kind!r} here, only {there}")
        return self.maps[kind]

    def _probabilities(self, kind: str) -> Any:
        found = self._of(kind).probabilities
        if found is None:
            raise ValueError('probabilities were not asked for: parts="all" gives them')
        return found

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind}: {maps!r}" for kind, maps in self.maps.items())
        sides = f"{len(self.source_tokens)} source, {len(self.target_tokens)} target tokens"
        return f"<ModelMaps of {sides}; layers {self.layers}, heads {self.heads}; {kinds}>"


def _each_head(maps: Array) -> Iterator[tuple[tuple[int, int], Array]]:
    """One head's map at a time, as the core reads it."""
    for layer in range(maps.shape[0]):
        for head in range(maps.shape[1]):
            yield (layer, head), np.ascontiguousarray(maps[layer, head], np.float32)
