# SPDX-License-Identifier: Apache-2.0
"""Bytes of global memory that a training step moves a token, counted by the race checker's build of
the emulated device, in f32 and in bf16: one JSON line. For tests/test_cuda_orders.py.

    RELPOS_CUDA_LIBRARY=build/emulated-race/librelpos_cuda.so python tests/step_bytes.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import relpos
from device_capi import counters
from small_model import pairs, small_config

WIDTHS = {"width": 64, "heads": 1, "feed_forward": 128, "activation_dropout": 0.0}


def bytes_of(model: relpos.Transformer, batch: relpos.Batch) -> int:
    library = Path(os.environ["RELPOS_CUDA_LIBRARY"])
    model.step(batch)  # the first rounds what others find
    before = counters(library)["bytes"]
    model.step(batch)
    return counters(library)["bytes"] - before


def bytes_a_token(precision: str) -> float:
    """The difference of two batches: what a step moves of weights is in both."""
    model = relpos.Transformer(
        small_config(**WIDTHS), tokens=1024, sentences=128, device="cuda", precision=precision
    )
    few, many = pairs(25), pairs(75)
    tokens = [len(batch.source) + len(batch.target) for batch in (few, many)]
    return (bytes_of(model, many) - bytes_of(model, few)) / (tokens[1] - tokens[0])


def main() -> int:
    print(json.dumps({precision: bytes_a_token(precision) for precision in ("f32", "bf16")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
