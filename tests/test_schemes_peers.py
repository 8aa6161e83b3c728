# SPDX-License-Identifier: Apache-2.0
"""Schemes beside the systems they come from, where those are installed.

With transformers: T5's attention with its bias, DeBERTa-v2's disentangled attention, LLaMA's, NeoX's and
GPT-J's rotary positions, BLOOM's ALiBi; the gradients of tables by their autograd.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import relpos

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import relpos.torch  # noqa: E402

B, H, N, D = 2, 4, 40, 8
C = H * D


def heads(x: Any) -> Any:
    """(B, N, C) -> (B, N, H, D)"""
    return x.unflatten(-1, (H, D))


def close(ours: Any, theirs: Any, atol: float = 2e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("decoder", [False, True])
def test_t5(decoder: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention, T5Config

    config = T5Config(
        d_model=C, d_kv=D, num_heads=H, is_decoder=decoder, dropout_rate=0.0,
        relative_attention_num_buckets=12, relative_attention_max_distance=25,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    torch.nn.init.normal_(layer.relative_attention_bias.weight)
    x = torch.randn(B, N, C)
    mask = torch.zeros(B, 1, N, N)
    if decoder:
        mask = mask.masked_fill(torch.ones(N, N).triu(1).bool(), torch.finfo(torch.float32).min)
    theirs = layer(x, mask)[0]
    table = layer.relative_attention_bias.weight
    theirs.square().sum().backward()
    expected, table.grad = table.grad.clone(), None

    ours = relpos.torch.attention(
        *(heads(project(x)) for project in (layer.q, layer.k, layer.v)),
        position=relpos.T5Bias(table, bidirectional=not decoder, max_distance=25),
        causal=decoder,
        layout="bnhd",
    )
    ours = layer.o(ours.flatten(2))
    close(ours, theirs)
    ours.square().sum().backward()
    close(table.grad, expected, 1e-3)


@pytest.mark.parametrize("buckets", [-1, 16])
@pytest.mark.parametrize("kinds", [["c2p", "p2c"], ["c2p"], ["p2c"]])
def test_deberta_v2(kinds: list[str], buckets: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import (
        DebertaV2Config,
        DisentangledSelfAttention,
    )

    config = DebertaV2Config(
        hidden_size=C, num_attention_heads=H, relative_attention=True, pos_att_type=kinds,
        position_buckets=buckets, max_relative_positions=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = DisentangledSelfAttention(config).eval()
    span = layer.pos_ebd_size
    assert span == (buckets if buckets > 0 else 32)
    x = torch.randn(B, N, C)
    embeddings = torch.randn(2 * span, C, requires_grad=True)
    mask = torch.ones(B, 1, N, N)
    theirs = layer(x, mask, rel_embeddings=embeddings)[0]
    theirs.square().sum().backward()
    expected, embeddings.grad = embeddings.grad.clone(), None

    def table(project: Any) -> Any:
        return heads(project(embeddings)).transpose(0, 1).contiguous()  # (H, 2 span, D)

    position = relpos.DeBERTa(
        table(layer.pos_key_proj) if "c2p" in kinds else None,
        table(layer.pos_query_proj) if "p2c" in kinds else None,
        buckets=buckets if buckets > 0 else None,
        max_position=32,
    )
    ours = relpos.torch.attention(
        *(heads(project(x)) for project in (layer.query_proj, layer.key_proj, layer.value_proj)),
        position=position,
        layout="bnhd",
    ).flatten(2)
    close(ours, theirs)
    ours.square().sum().backward()
    close(embeddings.grad, expected, 1e-3)


def test_rope_of_llama_and_gpt_j() -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as interleaved
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half

    x = torch.randn(B, H, N, D)
    angle = torch.arange(N)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
    both = torch.cat([angle, angle], -1)[None]
    ours = relpos.rotate(x, relpos.RoPE())
    close(torch.from_numpy(ours), half(x, x, both.cos(), both.sin())[0], 1e-5)
    ours = relpos.rotate(x, relpos.RoPE(pairing="interleaved"))
    theirs = interleaved(x.transpose(1, 2), angle.sin()[None], angle.cos()[None])
    close(torch.from_numpy(ours), theirs.transpose(1, 2), 1e-5)


@pytest.mark.parametrize("rule", ["llama3", "yarn"])
def test_rope_by_rules_of_transformers(rule: str) -> None:
    """Its angles; YaRN's factor of both q and k is one of the scale."""
    from transformers.models.llama import modeling_llama as llama

    rules = {
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 8.0},
    }
    config = llama.LlamaConfig(
        hidden_size=C, num_attention_heads=H, max_position_embeddings=128,
        rope_parameters={
            "rope_type": rule, "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        } | rules[rule],
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = llama.LlamaAttention(config, layer_idx=0).eval()
    embedding = llama.LlamaRotaryEmbedding(config)
    x, places = torch.randn(B, N, C), torch.arange(N)[None]
    hidden = torch.ones(N, N).triu(1).bool()
    mask = torch.zeros(B, 1, N, N).masked_fill(hidden, torch.finfo(torch.float32).min)
    theirs = layer(x, embedding(x, places), mask)[0]
    plain = 10000.0 ** (-torch.arange(0, D, 2) / D)
    assert (embedding.inv_freq - plain).abs().max() > 0.01
    ours = relpos.torch.attention(
        *(heads(project(x)) for project in (layer.q_proj, layer.k_proj, layer.v_proj)),
        position=relpos.RoPE(angles=embedding.inv_freq), causal=True, layout="bnhd",
        scale=embedding.attention_scaling**2 / math.sqrt(D),
    )  # fmt: skip
    close(layer.o_proj(ours.flatten(2)), theirs)


@pytest.mark.parametrize("count", [8, 12])
def test_alibi_of_bloom(count: int) -> None:
    """BLOOM adds slope * j: in causal rows the same as -slope * (i - j)."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.ones(1, N)
    theirs = build_alibi_tensor(mask, count, torch.float32).reshape(count, 1, N)
    slopes = relpos.position.alibi_slopes(count)
    np.testing.assert_allclose(theirs[:, 0, 1].numpy(), slopes, rtol=1e-6)
    q, k, v = (torch.randn(1, count, N, D) for _ in range(3))
    hidden = torch.ones(N, N).triu(1).bool()
    s = (q @ k.mT / D**0.5 + theirs[None]).masked_fill(hidden, -torch.inf)
    ours = relpos.torch.attention(q, k, v, position=relpos.ALiBi(), causal=True)
    close(ours, torch.softmax(s, -1) @ v)


def test_rope_of_a_part_of_a_head() -> None:
    """NeoX turns a quarter of the columns where its configuration says nothing; GPT-J rotary_dim."""
    from transformers.models.gpt_neox.modeling_gpt_neox import (
        GPTNeoXAttention,
        GPTNeoXConfig,
        GPTNeoXRotaryEmbedding,
    )
    from transformers.models.gptj.modeling_gptj import (
        GPTJAttention,
        GPTJConfig,
        GPTJRotaryEmbedding,
    )

    torch.manual_seed(0)
    x, places = torch.randn(B, N, C), torch.arange(N)[None]
    hidden = torch.ones(N, N).triu(1).bool()
    mask = torch.zeros(B, 1, N, N).masked_fill(hidden, torch.finfo(torch.float32).min)

    neox = GPTNeoXConfig(
        hidden_size=C, num_attention_heads=H // 2, attention_dropout=0.0, hidden_dropout=0.0
    )
    neox._attn_implementation = "eager"
    layer = GPTNeoXAttention(neox, layer_idx=0).eval()
    turned = GPTNeoXRotaryEmbedding(neox)(x, places)
    theirs = layer(x, mask, position_embeddings=turned)[0]
    every = layer.query_key_value(x).unflatten(-1, (H // 2, 3 * 2 * D)).chunk(3, -1)
    ours = relpos.torch.attention(
        *(y.contiguous() for y in every), position=relpos.RoPE(width=2 * D // 4), causal=True,
        layout="bnhd",
    )  # fmt: skip
    close(layer.dense(ours.flatten(2)), theirs)

    gptj = GPTJConfig(n_embd=C, n_head=H, rotary_dim=4, attn_pdrop=0.0, resid_pdrop=0.0)
    gptj._attn_implementation = "eager"
    other = GPTJAttention(gptj, layer_idx=0).eval()
    turned = GPTJRotaryEmbedding(gptj)(x, position_ids=places)
    theirs = other(x, attention_mask=mask, position_embeddings=turned)[0]
    ours = relpos.torch.attention(
        *(heads(project(x)) for project in (other.q_proj, other.k_proj, other.v_proj)),
        position=relpos.RoPE(pairing="interleaved", width=4), causal=True, layout="bnhd",
    )  # fmt: skip
    close(other.out_proj(ours.flatten(2)), theirs)


def test_relative_key_of_wav2vec2_bert() -> None:
    """Its tables count j - i, clipped on either side: Shaw's."""
    from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import (
        Wav2Vec2BertConfig,
        Wav2Vec2BertSelfAttention,
    )

    config = Wav2Vec2BertConfig(
        hidden_size=C, num_attention_heads=H, position_embeddings_type="relative_key",
        left_max_position_embeddings=5, right_max_position_embeddings=2, attention_dropout=0.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = Wav2Vec2BertSelfAttention(config).eval()
    x = torch.randn(B, N, C)
    ours = relpos.torch.attention(
        *(heads(project(x)) for project in (layer.linear_q, layer.linear_k, layer.linear_v)),
        position=relpos.Shaw(layer.distance_embedding.weight, left=5, right=2),
        layout="bnhd",
    )
    close(layer.linear_out(ours.flatten(2)), layer(x)[0])
