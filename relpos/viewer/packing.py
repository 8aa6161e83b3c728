# SPDX-License-Identifier: Apache-2.0
"""Attention maps as text that a page can hold: 16-bit numbers, deflated, in base64.

    probabilities   q / 65534, so to 1 / 131068 = 7.6e-6;   q = 65535: this key is hidden
    logits          q * step, q from -32767 to 32767, a step for each head: to half a step, which is
                    the head's largest logit / 65534

The low bytes of an array stand behind its high bytes, which are alike and deflate well.
numbers.js reads this.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from relpos.model_maps import KINDS, ModelMaps
from relpos.position.arrays import describe

HIDDEN = 65535
ONE = 65534  # a probability of 1
LARGEST = 32767  # a head's largest logit, in its steps
_DEFLATE = 6
_OUTSIDE = 1e-4  # how far from [0, 1] rounding may take a probability


def pack_model_maps(maps: ModelMaps, name: str) -> dict[str, Any]:
    """One sentence, as the page reads it. name: what to call it in errors."""
    for side in ("source_tokens", "target_tokens", "predicted_tokens"):
        _check_tokens(getattr(maps, side), f"{name}.{side}")
    predicted, target = len(maps.predicted_tokens), len(maps.target_tokens)
    if predicted not in (0, target):
        raise ValueError(f"{name}.predicted_tokens: expected 0 or {target} tokens, got {predicted}")
    packed = {kind: _pack_kind(maps, kind, name) for kind in KINDS if kind in maps.maps}
    # An empty sentence has nothing to look at, nor has a kind without the layers asked for.
    kinds = {kind: of_kind for kind, of_kind in packed.items() if 0 not in of_kind["shape"]}
    if not kinds:
        raise ValueError(
            f"{name}: expected maps of {', '.join(KINDS)}, got none with anything in it"
        )
    return {
        "source": list(maps.source_tokens),
        "target": list(maps.target_tokens),
        "predicted": list(maps.predicted_tokens),
        "kinds": kinds,
    }


def _check_tokens(tokens: Any, name: str) -> None:
    if isinstance(tokens, str):
        raise TypeError(f"{name}: expected a tuple of str, got str")
    for token in tokens:
        if not isinstance(token, str):
            raise TypeError(f"{name}: expected a tuple of str, got {describe(token)} among them")


def _pack_kind(maps: ModelMaps, kind: str, sentence: str) -> dict[str, Any]:
    of_kind, name = maps.maps[kind], f"{sentence}.maps[{kind!r}]"
    if of_kind.probabilities is None:
        raise ValueError(f'{name}: has no probabilities; ask attention_maps for parts="all"')
    probabilities = np.asarray(of_kind.probabilities)
    shape = _check_shape(probabilities, maps, kind, f"{name}.probabilities")
    if 0 in shape:
        return {"shape": list(shape)}
    logits, content, relation = _logits(maps, kind, name, shape)
    hidden = probabilities == 0 if logits is None else np.isneginf(logits)
    packed: dict[str, Any] = {
        "shape": list(shape),
        "layers": [int(layer) for layer in maps.layers_of(kind)],
        "heads": [int(head) for head in maps.heads],
        "probabilities": pack_probabilities(probabilities, hidden, f"{name}.probabilities"),
        "entropy": _plain(maps.entropy(kind).mean(axis=2)),
        "distance": _plain(maps.distance(kind)),
    }
    if content is not None:
        packed["content"] = pack_logits(content, f"{name}.parts")
    if relation is not None:
        packed["relation"] = pack_logits(relation, f"{name}.parts")
    summed = not maps.missing(kind) and _is_sum(logits, hidden, content, relation)
    if logits is not None and not summed:
        packed["logits"] = pack_logits(np.where(hidden, 0, logits), f"{name}.logits")
    return packed


def _check_shape(x: Any, maps: ModelMaps, kind: str, name: str) -> tuple[int, ...]:
    """The shape, once it is what the tokens, layers and heads say."""
    queries, keys = (len(tokens) for tokens in maps.tokens(kind))
    wanted = f"(layers, {len(maps.heads)} heads, {queries} queries, {keys} keys)"
    if not np.issubdtype(x.dtype, np.floating):
        raise TypeError(f"{name}: expected floating {wanted}, got {describe(x)}")
    if x.ndim != 4 or x.shape[1:] != (len(maps.heads), queries, keys):
        raise ValueError(f"{name}: expected {wanted}, got {x.shape}")
    if x.shape[0] > len(maps.layers):
        raise ValueError(
            f"{name}: expected at most {len(maps.layers)} layers, as many as the maps name, "
            f"got {x.shape[0]}"
        )
    return tuple(x.shape)


def _logits(maps: ModelMaps, kind: str, name: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """(logits, content, relation), None where they are not there."""
    of_kind = maps.maps[kind]
    logits = None if of_kind.logits is None else np.asarray(of_kind.logits)
    parts = {part: np.asarray(x) for part, x in of_kind.parts.items()}
    named = {f"{name}.parts[{part!r}]": x for part, x in parts.items()}
    if logits is not None:
        named[f"{name}.logits"] = logits
    for own, x in named.items():
        if x.shape != shape:
            raise ValueError(f"{own}: expected {shape}, as the probabilities, got {x.shape}")
    if "content" not in parts:
        return logits, None, None
    if logits is None:  # nothing says whether the parts are all of them, nor what is hidden
        raise ValueError(f'{name}: has parts but no logits; ask attention_maps for parts="all"')
    whole = len(parts) > 1 and not maps.missing(kind)
    return logits, parts["content"], maps.relation(kind) if whole else None


def _is_sum(logits: Any, hidden: Any, content: Any, relation: Any) -> bool:
    """Whether the logits are what the page adds up itself. They are not after softcap."""
    if content is None:
        return False
    parts = [content] if relation is None else [content, relation]
    apart = np.abs(np.where(hidden, 0, sum(parts) - np.where(hidden, 0, logits)))
    largest = np.max([np.abs(part).max(axis=(2, 3)) for part in parts], axis=0)
    return bool((apart.max(axis=(2, 3)) <= largest / (2 * LARGEST)).all())


def pack_probabilities(probabilities: Any, hidden: Any, name: str) -> str:
    """Base64 of round(65534 p), and 65535 where hidden."""
    if not np.isfinite(probabilities).all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
    low, high = float(probabilities.min()), float(probabilities.max())
    if low < -_OUTSIDE or high > 1 + _OUTSIDE:
        raise ValueError(f"{name}: expected numbers from 0 to 1, got {low:g} to {high:g}")
    numbers = np.rint(np.clip(probabilities, 0, 1) * np.float64(ONE))
    numbers[hidden] = HIDDEN
    return _text(numbers.astype("<u2"))


def pack_logits(logits: Any, name: str) -> dict[str, Any]:
    """{"data": base64 of round(x / step), "steps": (layers, heads)}."""
    if not np.isfinite(logits).all():
        raise ValueError(
            f"{name}: expected finite numbers (-inf in .logits where hidden), got NaN or infinity"
        )
    largest = np.abs(logits).max(axis=(2, 3)).astype(np.float64)
    steps = np.where(largest > 0, largest / LARGEST, 1.0)
    numbers = np.rint(logits / steps[:, :, None, None])
    return {"data": _text(numbers.astype("<i2")), "steps": steps.tolist()}


def _text(numbers: Any) -> str:
    planes = np.frombuffer(numbers.tobytes(), np.uint8).reshape(-1, 2).T[::-1]
    return base64.b64encode(zlib.compress(planes.tobytes(), _DEFLATE)).decode("ascii")


def _plain(numbers: Any) -> list[list[float]]:
    return [[round(float(x), 6) for x in row] for row in numbers]
