# SPDX-License-Identifier: Apache-2.0
"""Self-attention with relative position representations, forward and backward, and the Transformer
around it, on the CPU.

    out = relpos.attention(q, k, v, position=relpos.Shaw(key_table, value_table))

    out, ctx = relpos.attention_forward(q, k, v, position=relpos.Shaw(key_table, value_table))
    gradients = relpos.attention_backward(ctx, dout)

    model = relpos.Transformer(relpos.Config.preset("tiny"))
    result = model.step(relpos.Batch.from_pairs(sources, targets, bos=1, eos=2))

Arrays are float32 NumPy arrays, (B, H, N, D) unless said otherwise, and are never copied. `Shaw` is
one of many position schemes; `relpos.torch.attention` is the same for torch tensors.
`relpos.reference` is the same in a few lines of float64 NumPy.
"""

from relpos._core import VERSION as __version__
from relpos._core import DeviceError
from relpos.attention import (
    AttentionContext,
    Gradients,
    attention,
    attention_backward,
    attention_forward,
)
from relpos.batch import Batch
from relpos.config import Config, Stack
from relpos.library import (
    build_info,
    cflags,
    get_threads,
    include_dir,
    library_dir,
    libs,
    set_threads,
)
from relpos.maps import AttentionMaps, attention_maps
from relpos.model import (
    Memory,
    Profile,
    ProfileLine,
    StepResult,
    Transformer,
    model_memory,
    profile,
)
from relpos.position import (
    ALiBi,
    CrossPositions,
    DeBERTa,
    EdgeList,
    LearnedAbsolute,
    MusicTransformer,
    Plane,
    RelativeKey,
    RelativeKeyQuery,
    RoPE,
    Shaw,
    ShawGraph,
    Sinusoidal,
    T5Bias,
    TransformerXL,
)
from relpos.position.rope import rotate

__all__ = [
    "ALiBi",
    "AttentionContext",
    "AttentionMaps",
    "Batch",
    "Config",
    "CrossPositions",
    "DeBERTa",
    "DeviceError",
    "EdgeList",
    "Gradients",
    "LearnedAbsolute",
    "Memory",
    "MusicTransformer",
    "Plane",
    "Profile",
    "ProfileLine",
    "RelativeKey",
    "RelativeKeyQuery",
    "RoPE",
    "Shaw",
    "ShawGraph",
    "Sinusoidal",
    "Stack",
    "StepResult",
    "T5Bias",
    "Transformer",
    "TransformerXL",
    "__version__",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_maps",
    "build_info",
    "cflags",
    "get_threads",
    "include_dir",
    "library_dir",
    "libs",
    "model_memory",
    "profile",
    "rotate",
    "set_threads",
]
