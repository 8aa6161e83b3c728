# SPDX-License-Identifier: Apache-2.0
"""Self-attention with relative position representations, forward and backward, and the Transformer
around it.

    out = relpos.attention(q, k, v, position=relpos.Shaw(key_table, value_table))

    out, ctx = relpos.attention_forward(q, k, v, position=relpos.Shaw(key_table, value_table))
    gradients = relpos.attention_backward(ctx, dout)

    model = relpos.Transformer(relpos.Config.preset("tiny"))
    result = model.step(relpos.Batch.from_pairs(sources, targets, bos=1, eos=2))

    trainer = relpos.Trainer(config, relpos.data.read_pairs(source, target), folder="run")
    outcome = trainer.train()

    translator = relpos.Translator.load("run")
    translator.translate(["Two dogs run through the snow."])

Attention takes float32 NumPy arrays, (B, H, N, D) unless said otherwise, and never copies them.
`Shaw` is one of many position schemes; `relpos.torch.attention` is the same for torch tensors, and
`relpos.reference` the same in plain float64 NumPy.
"""

import importlib
from typing import TYPE_CHECKING, Any

try:
    from relpos._core import VERSION as __version__
except ModuleNotFoundError as error:
    if error.name != "relpos._core":
        raise
    raise ImportError(
        f"{__path__[0]} holds relpos's sources, which are not built here, and hides an installed "
        "relpos: run Python in another folder"
    ) from None
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
from relpos.device_array import DeviceArray
from relpos.extraction import attention_maps
from relpos.library import (
    Device,
    build_info,
    cflags,
    devices,
    get_threads,
    include_dir,
    library_dir,
    libs,
    set_threads,
)
from relpos.maps import AttentionMaps
from relpos.model import (
    Memory,
    StepResult,
    Transformer,
    model_memory,
)
from relpos.model_maps import ModelMaps
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
from relpos.profiling import Profile, ProfileLine, profile
from relpos.search import Decoder, Hypothesis, Search

if TYPE_CHECKING:
    from relpos import data as data
    from relpos import evaluation as evaluation
    from relpos import plots as plots
    from relpos import torch as torch
    from relpos import train as train
    from relpos.train.trainer import Trainer
    from relpos.translation import Alignment as Alignment
    from relpos.translation import Candidate as Candidate
    from relpos.translation import Score as Score
    from relpos.translation import Translation as Translation
    from relpos.translation import TranslationWarning as TranslationWarning
    from relpos.translator import Translator as Translator
    from relpos.viewer import AttentionViewer as AttentionViewer

__all__ = [
    "ALiBi",
    "Alignment",
    "AttentionContext",
    "AttentionMaps",
    "AttentionViewer",
    "Batch",
    "Candidate",
    "Config",
    "CrossPositions",
    "DeBERTa",
    "Decoder",
    "Device",
    "DeviceArray",
    "DeviceError",
    "EdgeList",
    "Gradients",
    "Hypothesis",
    "LearnedAbsolute",
    "Memory",
    "ModelMaps",
    "MusicTransformer",
    "Plane",
    "Profile",
    "ProfileLine",
    "RelativeKey",
    "RelativeKeyQuery",
    "RoPE",
    "Score",
    "Search",
    "Shaw",
    "ShawGraph",
    "Sinusoidal",
    "Stack",
    "StepResult",
    "T5Bias",
    "Trainer",
    "Transformer",
    "TransformerXL",
    "Translation",
    "TranslationWarning",
    "Translator",
    "__version__",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_maps",
    "build_info",
    "cflags",
    "devices",
    "get_threads",
    "include_dir",
    "library_dir",
    "libs",
    "model_memory",
    "profile",
    "rotate",
    "set_threads",
]


# Module by name: what is not needed for attention is imported when it is asked for.
_LATER = {
    "Alignment": "relpos.translation",
    "AttentionViewer": "relpos.viewer",
    "Candidate": "relpos.translation",
    "Score": "relpos.translation",
    "Trainer": "relpos.train.trainer",
    "Translation": "relpos.translation",
    "TranslationWarning": "relpos.translation",
    "Translator": "relpos.translator",
}


def __getattr__(name: str) -> Any:
    if name in ("data", "evaluation", "plots", "torch", "train"):
        return importlib.import_module(f"relpos.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'relpos' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
