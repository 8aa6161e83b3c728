# SPDX-License-Identifier: Apache-2.0
"""Every kernel of cuda/ a few times over small shapes, with a digest of all that came out: what
compute-sanitizer looks at (`make gpu-check PART=sanitize`), which takes a hundred times as long as
the work itself, and tests/test_cuda_orders.py.

    RELPOS_CUDA_LIBRARY=build/emulated/librelpos_cuda.so python tests/gpu_small.py
    ...                                                  python tests/gpu_small.py 2/8    a share
    ...                                                  python tests/gpu_small.py 2/8 f32
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]
sys.path.append(str(ROOT))  # where it is built in place

import numpy as np  # noqa: E402

import capi  # noqa: E402
import relpos  # noqa: E402
from capi import BF16, F32  # noqa: E402
from case_arrays import make_arrays  # noqa: E402
from corners import CORNERS  # noqa: E402
from device_capi import DeviceCore  # noqa: E402
from small_model import BOS, EOS, pairs, sentences, small_config  # noqa: E402

EVERY = 60  # of the corners


class Digest:
    """Of arrays, bit by bit."""

    def __init__(self) -> None:
        self.sum = hashlib.sha256()

    def add(self, *arrays: Any) -> None:
        for array in arrays:
            self.sum.update(np.ascontiguousarray(array).tobytes())

    def __str__(self) -> str:
        return self.sum.hexdigest()[:16]


def attention(core: Path, element: int, precision: int) -> str:
    device = DeviceCore(core, element=element, precision=precision)
    done, digest = 0, Digest()
    for case in CORNERS[::EVERY]:
        arrays = make_arrays(case, np.float32)
        try:
            forward = capi.run_forward(device, case, arrays)
            gradients = capi.run_backward(device, case, arrays, forward)
        except capi.CoreError as error:
            if error.status == capi.DEVICE:
                raise
            continue  # the same refusal as on the CPU
        digest.add(forward.out.raw, forward.lse.raw, *gradients.values())
        done += 1
    return f"{device.name} {done} cases {digest}"


def training(position: str, precision: str, activation: str) -> str:
    stacks = {f"{stack}__position": position for stack in ("encoder", "decoder")}
    hidden = 30 if activation == "relu" else 32  # a row ends between borders, or on one
    config = small_config(**stacks, activation=activation, feed_forward=hidden, ema=0.9)
    model = relpos.Transformer(config, tokens=256, sentences=32, device="cuda", precision=precision)
    digest = Digest()
    for seed in range(2):
        result = model.step(pairs(seed=seed))
        assert result.finite, result
        digest.add(result.loss)
    digest.add(*model.parameters.values(), *model.averages.values())
    search = relpos.Search(begin=BOS, end=EOS, max_length=6, beam=2, coverage=0.2)
    tokens = sentences(3)
    offsets = np.cumsum([0, *map(len, tokens)])
    batch = relpos.Batch(np.concatenate(tokens).astype(np.int32), offsets)
    for found in model.search(batch, search):
        for hypothesis in found:
            digest.add(hypothesis.tokens, hypothesis.score)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model")
        other = relpos.Transformer.load(Path(folder) / "model", device="cuda")
    digest.add(relpos.Decoder(model, other).search(batch, search)[0][0].score)
    digest.add(model.attention_maps(pairs(), 0, 1, "decoder"))
    return f"{position} {precision} {activation} {digest}"


def main() -> int:
    core = Path(os.environ.get("RELPOS_TEST_CORE", ROOT / "build" / "release" / "libcore.so"))
    types = ((F32, F32), (F32, BF16), (BF16, BF16))
    models = (
        ("shaw", "f32", "relu"),
        ("shaw", "bf16", "swiglu"),
        ("shaw", "bf16", "relu"),
        ("t5", "bf16", "gelu"),
        ("deberta", "f32", "relu"),
        ("rope", "f32", "relu"),
    )
    pieces = [partial(attention, core, *each) for each in types]
    for position, precision, activation in models:
        pieces.append(partial(training, position, *sys.argv[2:] or [precision], activation))
    share, shares = map(int, (sys.argv[1] if len(sys.argv) > 1 else "1/1").split("/"))
    for piece in pieces[share - 1 :: shares]:
        print(piece(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
