# SPDX-License-Identifier: Apache-2.0
"""What tests/test_cuda_step.py runs in a process of its own: training steps that the host begins
ahead of the device, what is waited for, and a digest of what they leave.

    RELPOS_TEST_CORE=.../libcore.so RELPOS_CUDA_LIBRARY=... EMU_LATE=1 python tests/late_steps.py
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # where it is built in place

import numpy as np  # noqa: E402

from capi import Core  # noqa: E402
from device_capi import counters  # noqa: E402
from model_capi import Config, Model, Sentences  # noqa: E402
from test_model_gradients import BASE, CASES  # noqa: E402

STEPS = 4
LENGTHS = 9, 4, 7, 6, 5, 8, 3, 9
LARGE = (520,)  # squared, it is staged in a block of its own


def waits() -> int:
    return counters(Path(os.environ["RELPOS_CUDA_LIBRARY"]))["waits"]


def batch(seed: int, graphs: bool, large: bool) -> Sentences:
    rng = np.random.default_rng(seed)
    lengths = LARGE if large else LENGTHS
    source, target = ([rng.integers(0, 11, n).tolist() for n in lengths] for _ in range(2))
    labels = [[-1 if token == 3 else token for token in sentence] for sentence in target]
    marks = [rng.integers(-1, 3, (n, n)) for n in lengths] if graphs else None
    return Sentences(source, None if large else target, labels, marks, None if large else marks)


def begin(model: Model, seed: int, graphs: bool, large: bool) -> None:
    """The batch is gone, and other numbers lie in its place, before the device has read it."""
    gone = [batch(seed + each, graphs, large) for each in (0, 100)[: 1 if large else 2]]
    model.begin(*gone)
    for each in gone:
        for array in each.alive:
            array[...] = 0


def train(core: Core, changes: dict[str, Any]) -> tuple[int, list[int], list[Any], list[Any], str]:
    graphs = changes.get("encoder.relations", 0) != 0
    large = changes.get("max_length", 9) > 9
    told, each, arrived = [], [], []
    with Model(Config(core, "tiny", changes), device=b"cuda", tokens=LARGE[0]) as model:
        begin(model, 0, graphs, large)
        told.append(model.result())
        before = waits()
        for t in range(STEPS):
            begin(model, t, graphs, large)
        begun = waits() - before
        told += [model.result() for _ in range(STEPS)]
        begin(model, 50, graphs, large)
        for t in range(STEPS):
            arrived.append(model.results())
            before = waits()
            begin(model, t, graphs, large)
            told.append(model.result())
            each.append(waits() - before)
        digest = hashlib.sha256()
        for kind in range(5):
            for array in model.read(kind).values():
                digest.update(array.tobytes())
        seen = [(r.step, r.loss, r.nll, r.accuracy, r.gradient_norm) for r in told]
    return begun, each, arrived, seen, digest.hexdigest()


def main() -> None:
    core = Core(Path(os.environ["RELPOS_TEST_CORE"]))
    trained = BASE | {"schedule": "constant", "learning_rate": 1e-3, "warmup": 0, "ema": 0.5}
    found: dict[str, Any] = {"begun": 0, "each result": [], "arrived": [], "told": [], "digest": []}
    large = {"max_length": LARGE[0], "encoder.layers": 1, "decoder.layers": 0}
    cases = [CASES[name] for name in ("shaw per layer", "graphs", "learned")]
    for case in (*cases, CASES["graphs"] | large):
        begun, each, arrived, told, digest = train(core, trained | case)
        found["begun"] += begun
        found["each result"] += each
        found["arrived"] += arrived
        found["told"] += told
        found["digest"].append(digest)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
