# SPDX-License-Identifier: Apache-2.0
"""The command line on a device: what was trained there goes on here, and translates there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import relpos
import text_files
from commands import Capture, relpos_says
from relpos.train import checkpoint, newest
from test_cli import SMALL, relpos_warns

RATE = 1e-3
TRAINED = (
    *SMALL, "--set", "schedule=constant", "--set", f"learning_rate={RATE}", "--set", "warmup=0",
)  # fmt: skip


@pytest.fixture(autouse=True)
def device(emulated_device: Path) -> None:
    """The emulated one."""


def weights_of(run: Path) -> np.ndarray:
    found = newest(run)
    assert found is not None and found.step == 3
    model = relpos.Transformer.load(found.folder / checkpoint.MODEL, training=False)
    return np.concatenate([x.ravel() for x in model.parameters.values()])


def test_trained_there_gone_on_with_here(tmp_path: Path, capsys: Capture) -> None:
    """The bound is that of test_cuda_model.test_steps_are_those_of_the_host."""
    here, there, title = tmp_path / "here", tmp_path / "there", relpos.devices()[1].title
    source, target = text_files.write_pairs(tmp_path, "train", 50)
    command = ("train", "--source", source, "--target", target, *TRAINED, "--output")
    relpos_says(capsys, *command, here, "--steps", 3)
    relpos_says(capsys, *command, there, "--steps", 2, "--device", "cuda")
    found = newest(there)
    assert found is not None and found.step == 2 and found.state["build"]["device"] == title
    on = ("train", "--resume", "--output", there, "--steps", 3, "--progress", "none")
    [told] = relpos_warns(capsys, *on, "--device", "cpu")
    assert f"saved by another build or device (device {title} then and cpu now)" in told
    off = np.abs(weights_of(here) - weights_of(there))
    assert off.max() <= 2 * 3 * RATE and np.mean(off > 1e-6) <= 0.05

    said = [
        relpos_says(capsys, "translate", there, source, "--device", where, "--beam", 2)
        for where in ("cpu", "cuda")
    ]
    assert said[0] == said[1] and len(set(said[0].splitlines())) > 5
    for command in (on, ("translate", there, source)):
        assert "cuda:99" in relpos_says(capsys, *command, "--device", "cuda:99", status=1)
