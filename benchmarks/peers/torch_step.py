# SPDX-License-Identifier: Apache-2.0
"""Training steps of the Transformer in PyTorch, at their best on the CPU: the peers of bench_step.py.

    embeddings -> the stacks, by the peer -> loss over the vocabulary -> backward -> Adam

Every peer is a function of a shape and a batch whose sentences are equally long, so that nothing is
padded. What is around the stacks is torch_training.Step, the same for all; the peers that say
"as written" have embeddings and loss as everyone writes them. Absolute positions are sinusoids and
make attention plain: less work than relpos does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers import torch_products
from peers import torch_stacks as stacks
from peers.torch_training import Batch, Parameters, Shape, Step, sinusoids

# -------------------------------------------------------------------------------- our own


def own(shape: Shape, batch: Batch, attend: stacks.Attend, drop: stacks.Drop) -> Step:
    parameters = stacks.initial(shape)
    inner = stacks.Stacks(shape, attend, drop, positions(shape, batch))
    return Step(shape, batch, parameters, lambda x, y: inner(parameters, x, y))


def positions(shape: Shape, batch: Batch) -> Tensor:
    return sinusoids(max(batch.source.shape[1], batch.target.shape[1]), shape.width)


def eager(shape: Shape, batch: Batch) -> Step:
    return own(shape, batch, stacks.attend_eagerly, stacks.drop)


def eager_by_faster(shape: Shape, batch: Batch) -> Step:
    """Every product by the faster one of torch's two libraries."""
    parameters = stacks.initial(shape)
    inner = stacks.Stacks(
        shape, stacks.attend_eagerly, stacks.drop, positions(shape, batch), torch_products.linear
    )
    step = Step(shape, batch, parameters, lambda x, y: inner(parameters, x, y))
    step.output.product = torch_products.product
    return step


def compiled(shape: Shape, batch: Batch) -> Step:
    """Everything between embeddings and loss by torch.compile."""
    stacks.register_bytes()
    step = own(shape, batch, stacks.attend, stacks.drop_fused)
    step.hidden = torch.compile(step.hidden, dynamic=False)
    return step


def compiled_for_gpus(attend: stacks.Attend) -> Callable[[Shape, Batch], Step]:
    """The same with dropout by the compiler, which a GPU has numbers enough for."""

    def build(shape: Shape, batch: Batch) -> Step:
        step = own(shape, batch, attend, F.dropout)
        step.hidden = torch.compile(step.hidden, dynamic=False)
        return step

    return build


def compiled_around(shape: Shape, batch: Batch) -> Step:
    """The eager attention, with what lies between by torch.compile."""
    stacks.register_bytes()
    torch._dynamo.config.recompile_limit = 256  # the code of a sublayer is compiled for each
    step = own(shape, batch, torch.compiler.disable(stacks.attend_eagerly), stacks.drop_fused)
    step.hidden = torch.compile(step.hidden, dynamic=False)
    return step


# ------------------------------------------------------------------------------------ nn.Transformer


def nn_transformer(shape: Shape, batch: Batch) -> Step:
    """torch.nn.Transformer, absolute positions."""
    torch.manual_seed(0)
    model = nn.Transformer(
        shape.width, shape.heads, shape.encoder_layers, shape.decoder_layers, shape.feed_forward,
        shape.dropout, layer_norm_eps=shape.norm_epsilon, batch_first=True,
        norm_first=shape.pre_norm, bias=shape.bias,
    )  # fmt: skip
    if not shape.pre_norm:
        model.encoder.norm = model.decoder.norm = None
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        layer.dropout.p = shape.activation_dropout
        layer.self_attn.dropout = shape.attention_dropout
    for layer in model.decoder.layers:
        layer.multihead_attn.dropout = shape.attention_dropout
    table = (torch.randn(shape.vocabulary, shape.width) / math.sqrt(shape.width)).requires_grad_()
    parameters = {"source_embedding.weight": table} | nn_names(model)
    mask = nn.Transformer.generate_square_subsequent_mask(batch.target.shape[1])

    waves = positions(shape, batch)

    def embedded(x: Tensor) -> Tensor:
        return F.dropout(x + waves[: x.shape[1]], shape.dropout)

    def hidden(source: Tensor, target: Tensor) -> Tensor:
        out: Tensor = model(embedded(source), embedded(target), tgt_mask=mask, tgt_is_causal=True)
        return out

    return Step(shape, batch, parameters, hidden)


def nn_transformer_compiled(shape: Shape, batch: Batch) -> Step:
    step = nn_transformer(shape, batch)
    step.hidden = torch.compile(step.hidden, dynamic=False)
    return step


def nn_names(model: nn.Transformer) -> Parameters:
    """The parameters of nn.Transformer under relpos's names. Cross-attention's q, k and v are one
    matrix there: `cross.qkv`."""
    parts = {
        "self_attn.in_proj_": "attention.qkv.", "self_attn.out_proj.": "attention.out.",
        "multihead_attn.in_proj_": "cross.qkv.", "multihead_attn.out_proj.": "cross.out.",
        "linear1.": "feed_forward.in.", "linear2.": "feed_forward.out.",
    }  # fmt: skip
    norms = {
        "encoder": {"1": "attention", "2": "feed_forward"},
        "decoder": {"1": "attention", "2": "cross", "3": "feed_forward"},
    }
    named: Parameters = {}
    for name, parameter in model.named_parameters():
        stack, _, rest = name.partition(".")
        rest = rest.removeprefix("layers.")
        for theirs, ours in parts.items():
            rest = rest.replace(theirs, ours)
        for number, ours in norms[stack].items():
            rest = rest.replace(f"norm{number}.", f"{ours}.norm.")
        if "norm." in rest:
            rest = rest.replace("norm.weight", "norm.gain").replace("norm.bias", "norm.shift")
        named[f"{stack}.{rest}"] = parameter
    return named


# --------------------------------------------------------------------------------------- OpenNMT-py

# Packages that OpenNMT-py imports for transforms of text, which a step never calls.
TEXT_ONLY = (
    "ahocorasick", "ctranslate2", "fasttext", "flask", "pyonmttok", "rapidfuzz", "regex", "sacrebleu",
    "sentencepiece", "spacy", "subword_nmt", "waitress",
)  # fmt: skip


def opennmt(shape: Shape, batch: Batch) -> Step:
    """OpenNMT-py's stacks with Shaw's relations as it has them: one table for keys, values, heads.

    Its layers are pre-norm whatever the shape says: the same work but for two norms. Its pin of
    torch below 2.3 is older than what the rest needs, and nothing here minds:
    `pip install --no-deps OpenNMT-py configargparse pyyaml six`. Embeddings and loss are ours.
    """
    for name in TEXT_ONLY:
        sys.modules.setdefault(name, MagicMock())
    from onmt.decoders.transformer import TransformerDecoder
    from onmt.encoders.transformer import TransformerEncoder

    torch.manual_seed(0)
    sides = _Given(shape), _Given(shape)
    same = {"max_relative_positions": shape.k, "relative_positions_buckets": 0}
    same |= {"add_qkvbias": shape.bias, "add_ffnbias": shape.bias, "norm_eps": shape.norm_epsilon}
    size = (shape.width, shape.heads, shape.feed_forward)
    rates = (shape.dropout, shape.attention_dropout)
    encoder = TransformerEncoder(shape.encoder_layers, *size, *rates, sides[0], **same)
    decoder = TransformerDecoder(
        shape.decoder_layers, *size, False, "scaled-dot", *rates, sides[1], aan_useffn=False,
        full_context_alignment=False, alignment_layer=0, alignment_heads=0, **same,
    )  # fmt: skip
    table = (torch.randn(shape.vocabulary, shape.width) / math.sqrt(shape.width)).requires_grad_()
    parameters = {"source_embedding.weight": table}
    for stack, module in (("encoder", encoder), ("decoder", decoder)):
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:  # which come without numbers
                nn.init.xavier_uniform_(parameter)
            parameters[f"{stack}.{name}"] = parameter
    for module in (*encoder.modules(), *decoder.modules()):
        if hasattr(module, "dropout_1"):
            module.dropout_1.p = shape.activation_dropout
    lengths = torch.full((len(batch.source),), batch.source.shape[1])

    def hidden(source: Tensor, target: Tensor) -> Tensor:
        sides[0].vectors, sides[1].vectors = source, target
        memory, _, _ = encoder(batch.source[..., None], lengths)
        decoder.init_state(batch.source[..., None], memory, None)
        out: Tensor = decoder(batch.target[..., None], memory, src_len=lengths)[0]
        return out

    return Step(shape, batch, parameters, hidden)


class _Given(nn.Module):
    """In the place of OpenNMT-py's embeddings: vectors looked up already."""

    word_padding_idx = -1

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.vectors = shape, torch.empty(0)

    def forward(self, ids: Tensor, step: None = None) -> Tensor:
        x = self.vectors
        if not self.shape.k:
            x = x + sinusoids(x.shape[1], self.shape.width)
        return F.dropout(x, self.shape.dropout)


# ---------------------------------------------------------------------------------------- the list


def absolute(peer: Callable[[Shape, Batch], Step]) -> Callable[[Shape, Batch], Step]:
    return lambda shape, batch: peer(replace(shape, k=0), batch)


def as_written(peer: Callable[[Shape, Batch], Step]) -> Callable[[Shape, Batch], Step]:
    """With embeddings and loss as everyone writes them."""

    def build(shape: Shape, batch: Batch) -> Step:
        made = peer(shape, batch)
        return Step(shape, batch, made.parameters, made.hidden, written=True)

    return build


PEERS: dict[str, Callable[[Shape, Batch], Step]] = {
    "nn.Transformer": nn_transformer,
    "nn.Transformer as written": as_written(nn_transformer),
    "nn.Transformer compiled": nn_transformer_compiled,
    "eager": eager,
    "eager as written": as_written(eager),
    "eager absolute": absolute(eager),
    "eager by MKL or oneDNN": eager_by_faster,
    "eager absolute by MKL or oneDNN": absolute(eager_by_faster),
    "compiled": compiled,
    "compiled absolute": absolute(compiled),
    "compiled around attention": compiled_around,
    "compiled gather": compiled_for_gpus(stacks.attend_by_gather),
    "compiled skew": compiled_for_gpus(stacks.attend),
    "OpenNMT-py": opennmt,
    "OpenNMT-py as written": as_written(opennmt),
}
