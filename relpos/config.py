# SPDX-License-Identifier: Apache-2.0
"""What a model is and how it is trained: `Config`, with a `Stack` for the encoder and the decoder.

The fields are those of rp_stack and rp_config in relpos/model.h, which says what each of them does;
docs/presets.md has the numbers. Names, defaults, choices and checks are the core's own: values go
there as text and come back as what was understood.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relpos import _core
from relpos.position.arrays import check_size, check_text

_DEFAULTS = dict(_core.config_default())
_NO_CHANGES: Mapping[str, Any] = {}


def path_text(path: str | os.PathLike[str], name: str = "path") -> str:
    """A path as the text that the system can be asked for."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"{name}: expected str or PathLike, got {type(path).__name__}")
    text = os.fsdecode(path)
    check_text(name, text, sys.getfilesystemencoding(), "surrogateescape")
    return text


def no_folder(path: str | os.PathLike[str]) -> str:
    """The path of a file that a model saved; that of a checkpoint or a run is refused."""
    path = path_text(path)
    if os.path.isdir(path):
        raise IsADirectoryError(
            f"{path}: a folder, not a file: a checkpoint has its weights in "
            "model.safetensors; relpos.Translator.load takes folders"
        )
    return path


def _flag(text: str) -> bool:
    return text == "true"


def _own(text: str) -> bool | None:
    return None if text == "as-keys" else _flag(text)


def _default(read: Callable[[str], Any], name: str) -> Any:
    return read(_DEFAULTS[name])


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Stack:
    """One stack of layers, the encoder or the decoder: what its self-attention sees of positions.

    layers: int. 0: the stack is left out.
    absolute: "none", "sinusoidal" or "learned", added to the embeddings.
    sinusoid_interleaved, sinusoid_rule ("open", "closed"), sinusoid_first: how sinusoids lie.
    position: "none", "shaw", "transformer-xl", "music", "t5", "deberta", "relative-key",
        "relative-key-query", "alibi", "alibi-learned" or "rope".
    k, k_right: int. Shaw's clip distances; k_right -1: as k.
    beyond: "clip" or "none", what pairs farther away have.
    key, value: bool. Whether keys, values have relations.
    tied: bool. One table for keys and values.
    per_layer, per_head: bool. Whether every layer, every head has tables of its own. DeBERTa's layers
        share theirs; per_head is Shaw's, Music's, relative-key's and the graphs'.
    value_per_layer, value_per_head: bool or None. The same of tables of values; None: as keys.
    relations: int. Kinds of labels in the batch's graphs; 0: no graphs.
    relation_key, relation_value: bool. Which terms the labels have.
    buckets, max_distance: int. T5's and DeBERTa's.
    clamp: int. Transformer-XL: distances beyond count as this; 0: none.
    rope_base, rope_interleaved, rope_width, rope_rule ("linear", "ntk"), rope_scaling: RoPE's.
    window: int. Keys farther away are hidden; -1: none.
    softcap: float. Of the scores; 0: none.
    """

    layers: int = _default(int, "encoder.layers")
    absolute: str = _default(str, "encoder.absolute")
    sinusoid_interleaved: bool = _default(_flag, "encoder.sinusoid_interleaved")
    sinusoid_rule: str = _default(str, "encoder.sinusoid_rule")
    sinusoid_first: int = _default(int, "encoder.sinusoid_first")
    position: str = _default(str, "encoder.position")
    k: int = _default(int, "encoder.k")
    k_right: int = _default(int, "encoder.k_right")
    beyond: str = _default(str, "encoder.beyond")
    key: bool = _default(_flag, "encoder.key")
    value: bool = _default(_flag, "encoder.value")
    tied: bool = _default(_flag, "encoder.tied")
    per_layer: bool = _default(_flag, "encoder.per_layer")
    per_head: bool = _default(_flag, "encoder.per_head")
    value_per_layer: bool | None = _default(_own, "encoder.value_per_layer")
    value_per_head: bool | None = _default(_own, "encoder.value_per_head")
    relations: int = _default(int, "encoder.relations")
    relation_key: bool = _default(_flag, "encoder.relation_key")
    relation_value: bool = _default(_flag, "encoder.relation_value")
    buckets: int = _default(int, "encoder.buckets")
    max_distance: int = _default(int, "encoder.max_distance")
    clamp: int = _default(int, "encoder.clamp")
    rope_base: float = _default(float, "encoder.rope_base")
    rope_interleaved: bool = _default(_flag, "encoder.rope_interleaved")
    rope_width: int = _default(int, "encoder.rope_width")
    rope_rule: str = _default(str, "encoder.rope_rule")
    rope_scaling: float = _default(float, "encoder.rope_scaling")
    window: int = _default(int, "encoder.window")
    softcap: float = _default(float, "encoder.softcap")

    def __repr__(self) -> str:
        return _repr(self, "encoder.")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config:
    """The whole of a model and of its training; `Config()` is the preset "tiny".

        config = relpos.Config.preset("paper-base").replace({"encoder.k": 8, "dropout": 0.3})

    width: int, C. heads: int, H. head_width: int, D; 0: C / H. feed_forward: int, F.
    key_heads: int. Heads of keys and values, each shared by as many of queries; 0: H.
    source_vocabulary, target_vocabulary: int. Tokens go from 0 to below these.
    share_embeddings: bool. One table for source and target.
    share_output: bool. The output projection is the embedding of the target.
    scale_embeddings: bool. Times sqrt(C).
    max_length: int. Tokens of the longest sentence, on either side.
    norm: "pre" or "post". norm_epsilon: float.
    bias: bool. Linear layers have biases, norms shifts.
    activation: "relu", "gelu" or "swiglu".
    encoder, decoder: Stack.
    dropout, attention_dropout, activation_dropout: float, rates, taken to the nearest 1/256.
    label_smoothing: float. smoothing: "all" or "others", the classes that share it.
    schedule: "constant", "noam", "inverse-sqrt", "cosine" or "linear".
    learning_rate: float, the schedule's factor. warmup, steps: int. final_rate: float.
    beta1, beta2, adam_epsilon: float. weight_decay: float, decoupled.
    clip_norm: float, of the whole gradient; 0: none.
    ema: float, decay of an average of the weights; 0: none is kept.
    seed: int, of the initial weights and of dropout.
    """

    width: int = _default(int, "width")
    heads: int = _default(int, "heads")
    head_width: int = _default(int, "head_width")
    key_heads: int = _default(int, "key_heads")
    feed_forward: int = _default(int, "feed_forward")
    source_vocabulary: int = _default(int, "source_vocabulary")
    target_vocabulary: int = _default(int, "target_vocabulary")
    share_embeddings: bool = _default(_flag, "share_embeddings")
    share_output: bool = _default(_flag, "share_output")
    scale_embeddings: bool = _default(_flag, "scale_embeddings")
    max_length: int = _default(int, "max_length")
    norm: str = _default(str, "norm")
    norm_epsilon: float = _default(float, "norm_epsilon")
    bias: bool = _default(_flag, "bias")
    activation: str = _default(str, "activation")
    encoder: Stack = field(default_factory=lambda: _read_stack(_DEFAULTS, "encoder."))
    decoder: Stack = field(default_factory=lambda: _read_stack(_DEFAULTS, "decoder."))
    dropout: float = _default(float, "dropout")
    attention_dropout: float = _default(float, "attention_dropout")
    activation_dropout: float = _default(float, "activation_dropout")
    label_smoothing: float = _default(float, "label_smoothing")
    smoothing: str = _default(str, "smoothing")
    schedule: str = _default(str, "schedule")
    learning_rate: float = _default(float, "learning_rate")
    warmup: int = _default(int, "warmup")
    steps: int = _default(int, "steps")
    final_rate: float = _default(float, "final_rate")
    beta1: float = _default(float, "beta1")
    beta2: float = _default(float, "beta2")
    adam_epsilon: float = _default(float, "adam_epsilon")
    weight_decay: float = _default(float, "weight_decay")
    clip_norm: float = _default(float, "clip_norm")
    ema: float = _default(float, "ema")
    seed: int = _default(int, "seed")

    def __post_init__(self) -> None:
        for name, value in _read(Config, dict(_core.config_check(self._given()))).items():
            object.__setattr__(self, name, value)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names that `preset` knows."""
        return _core.preset_names()

    @classmethod
    def preset(cls, name: str) -> Config:
        """A configuration by name, as "paper-base"; `presets` lists them."""
        check_text("name", name)
        return cls(**_read(cls, dict(_core.config_preset(name))))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Config:
        """The configuration that a file of weights carries."""
        return cls(**_read(cls, dict(_core.config_load(no_folder(path)))))

    def replace(self, changes: Mapping[str, Any] = _NO_CHANGES, **fields: Any) -> Config:
        """The same with other values for some fields, by dotted names: {"encoder.k": 8}; those of no
        stack may be keywords: dropout=0.2."""
        if not isinstance(changes, Mapping) or not all(isinstance(name, str) for name in changes):
            raise TypeError(f"changes: expected a dict of values by name, got {changes!r}")
        named = {**changes, **fields}.items()
        given = (pair for name, value in named for pair in _pairs(name, value))
        return Config(**_read(Config, dict(_core.config_check((*self._given(), *given)))))

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Every field as (dotted name, text), as rp_config_get gives and rp_config_set takes it."""
        return _core.config_check(self._given())

    def _given(self) -> tuple[tuple[str, str], ...]:
        for name in ("encoder", "decoder"):
            if not isinstance(getattr(self, name), Stack):
                got = type(getattr(self, name)).__name__
                raise TypeError(f"{name}: expected relpos.Stack, got {got}")
        fields = ((each.name, getattr(self, each.name)) for each in dataclasses.fields(self))
        return tuple(pair for name, value in fields for pair in _pairs(name, value))

    def learning_rate_at(self, step: int) -> float:
        """The schedule's rate of an update, which count from 1."""
        return _core.learning_rate(self.pairs(), check_size("step", step, 1))

    def __repr__(self) -> str:
        return _repr(self, "")


# --------------------------------------------------------------------------------------------------
# Values and their text
# --------------------------------------------------------------------------------------------------

_READ: dict[Any, Callable[[str], Any]] = {
    "bool": _flag,
    "bool | None": _own,
    "int": int,
    "float": float,
    "str": str,
}


def _read(cls: type[Config], texts: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a Config, from the text of each."""
    flat = [each for each in dataclasses.fields(cls) if each.type in _READ]
    stacks = {name: _read_stack(texts, f"{name}.") for name in ("encoder", "decoder")}
    return {each.name: _READ[each.type](texts[each.name]) for each in flat} | stacks


def _read_stack(texts: Mapping[str, str], prefix: str) -> Stack:
    fields = dataclasses.fields(Stack)
    return Stack(**{each.name: _READ[each.type](texts[prefix + each.name]) for each in fields})


def _pairs(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if "\0" in name:
        raise ValueError(f"changes: expected the names of fields, got {name!r}")
    if isinstance(value, Stack):
        for each in dataclasses.fields(Stack):
            yield from _pairs(f"{name}.{each.name}", getattr(value, each.name))
    elif isinstance(value, str):
        check_text(name, value)
        yield name, value
    elif isinstance(value, bool | np.bool_):
        yield name, "true" if value else "false"
    elif value is None and name.endswith((".value_per_layer", ".value_per_head")):
        yield name, "as-keys"
    elif isinstance(value, int | np.integer):
        try:
            yield name, str(int(value))
        except ValueError as error:  # of too many digits
            raise ValueError(f"{name}: expected a number that can be written: {error}") from None
    elif isinstance(value, float | np.floating):
        yield name, repr(float(value))
    else:
        raise TypeError(f"{name}: expected a number, a bool or a str, got {type(value).__name__}")


def _repr(config: Stack | Config, prefix: str) -> str:
    """What differs from the defaults, as the constructor takes it."""
    shown = []
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if isinstance(value, Stack):
            differs = value != _read_stack(_DEFAULTS, f"{each.name}.")
        else:
            differs = value != _READ[each.type](_DEFAULTS[prefix + each.name])
        if differs:
            shown.append(f"{each.name}={value!r}")
    return f"{type(config).__name__}({', '.join(shown)})"
