# SPDX-License-Identifier: Apache-2.0
"""CTranslate2 with the weights of one of our models: the same computation, so the same answers.

It knows relative positions as OpenNMT-py trains them: Shaw's, one table for all heads of a layer.
Tokens are named by their numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ctranslate2 import Translator
from ctranslate2.specs import common_spec, transformer_spec

UNKNOWN, BEGIN, END = 0, 1, 2

_ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
}


def export(model: Any, folder: Path) -> None:
    """Writes a relpos.Transformer as a CTranslate2 model."""
    config = model.config
    if config.key_heads not in (0, config.heads):
        raise ValueError("CTranslate2's Transformer has keys for every head of queries")
    for stack in (config.encoder, config.decoder):
        apart = {stack.value_per_layer, stack.value_per_head} != {None}
        if stack.position not in ("shaw", "none") or (
            stack.position == "shaw" and (stack.per_head or apart)
        ):
            raise ValueError(
                "CTranslate2 has Shaw's positions with tables that heads share, or none"
            )
    relative = config.decoder.position == "shaw"
    spec = transformer_spec.TransformerSpec.from_config(
        (config.encoder.layers, config.decoder.layers),
        config.heads,
        with_relative_position=relative,
        pre_norm=config.norm == "pre",
        no_final_norm=config.norm == "post",
        activation=_ACTIVATIONS[config.activation],
    )
    weights = {name: np.array(array) for name, array in model.parameters.items()}
    _stack(spec.encoder, weights, "encoder", config.encoder.layers)
    _stack(spec.decoder, weights, "decoder", config.decoder.layers)
    source = weights["source_embedding.weight"]
    target = weights.get("target_embedding.weight", source)
    spec.encoder.embeddings[0].weight = source
    spec.decoder.embeddings.weight = target
    spec.decoder.projection.weight = weights.get("output.weight", target)
    for stack, own in ((spec.encoder, config.encoder), (spec.decoder, config.decoder)):
        stack.scale_embeddings = bool(config.scale_embeddings)
        if own.absolute != "none":
            raise ValueError("CTranslate2: absolute positions are not exported here")
    spec.register_source_vocabulary([str(token) for token in range(len(source))])
    spec.register_target_vocabulary([str(token) for token in range(len(target))])
    spec.config.unk_token, spec.config.bos_token = str(UNKNOWN), str(BEGIN)
    spec.config.eos_token = spec.config.decoder_start_token = str(END)
    spec.config.decoder_start_token = str(BEGIN)
    spec.config.layer_norm_epsilon = config.norm_epsilon
    spec.validate()
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def _norm(spec: Any, weights: dict[str, Any], name: str) -> None:
    spec.gamma, spec.beta = weights[f"{name}.gain"], weights[f"{name}.shift"]


def _linear(spec: Any, weights: dict[str, Any], name: str) -> None:
    spec.weight = weights[f"{name}.weight"]
    spec.bias = weights.get(f"{name}.bias", np.zeros(len(spec.weight), np.float32))


def _stack(spec: Any, weights: dict[str, Any], side: str, layers: int) -> None:
    for number in range(layers):
        layer, name = spec.layer[number], f"{side}.{number}"
        own = layer.self_attention
        _norm(own.layer_norm, weights, f"{name}.attention.norm")
        _linear(own.linear[0], weights, f"{name}.attention.qkv")
        _linear(own.linear[1], weights, f"{name}.attention.out")
        if f"{name}.attention.key_table" in weights:
            own.relative_position_keys = weights[f"{name}.attention.key_table"]
            own.relative_position_values = weights[f"{name}.attention.value_table"]
        if side == "decoder":
            _norm(layer.attention.layer_norm, weights, f"{name}.cross.norm")
            _linear(layer.attention.linear[0], weights, f"{name}.cross.q")
            _linear(layer.attention.linear[1], weights, f"{name}.cross.kv")
            _linear(layer.attention.linear[2], weights, f"{name}.cross.out")
        _norm(layer.ffn.layer_norm, weights, f"{name}.feed_forward.norm")
        _linear(layer.ffn.linear_0, weights, f"{name}.feed_forward.in")
        _linear(layer.ffn.linear_1, weights, f"{name}.feed_forward.out")
    if f"{side}.norm.gain" in weights:
        _norm(spec.layer_norm, weights, f"{side}.norm")


def translator(folder: Path, workers: int, threads: int, kind: str = "float32") -> Translator:
    """workers translate batches beside each other, each with so many threads."""
    return Translator(
        str(folder), device="cpu", inter_threads=workers, intra_threads=threads, compute_type=kind
    )


def translate(
    translator: Translator, sources: list[list[int]], beam: int, most: int, least: int = 1,
    batch: int = 0, alpha: float = 0.0, n_best: int = 1,
) -> list[Any]:  # fmt: skip
    """Results of ids; batch: sentences that a worker gets at once, 0: all of them."""
    return translator.translate_batch(
        [[str(token) for token in source] for source in sources],
        beam_size=beam,
        max_decoding_length=most,
        min_decoding_length=least,
        length_penalty=alpha,
        num_hypotheses=n_best,
        return_scores=True,
        max_batch_size=batch,
        batch_type="examples",
    )
