# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU whose products take numbers rounded to bf16 (csrc/ops/attention_words.h). That
its results are as near as that allows is test_attention.py's matter, and tests/c/test_attention.c's
on every instruction set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capi
import relpos
from capi import BF16, Core
from case_arrays import make_arrays
from cases import Case
from cores import get_core
from relpos.reference import Band, Dropout

PLAIN = Case(B=2, H=2, N=150, M=201, D=40, Dv=36, scale=0.25, seed=5)
CASES = {
    "plain": PLAIN,
    "causal": replace(PLAIN, causal=True),
    "packed": replace(PLAIN, offsets=(0, 7, 7, 90), key_offsets=(0, 1, 40, 130), B=3),
    "one query": replace(PLAIN, N=1),
    "dropout": replace(PLAIN, dropout=Dropout(0.1, (1, 2))),
    "values": replace(PLAIN, value=Band(5, 5)),
}


@pytest.fixture(params=[name.replace("f32", "bf16") for name in capi.CORES])
def rounded(libraries: dict[str, Path], request: pytest.FixtureRequest) -> Core:
    return get_core(libraries, request.param)


@pytest.mark.parametrize("name", CASES)
def test_what_rounding_takes_away_is_not_seen(rounded: Core, name: str) -> None:
    """Numbers less than half a unit of bf16 off one of bf16 change no bit of what products make of them,
    there and back: q is met by keys alone, and by the gradient of scores; v by weights, and by dz."""
    case, results = CASES[name], []
    for nudge in (0.0, 0.4 * 2.0**-8):
        arrays = make_arrays(case, rounded.dtype)
        draw = np.random.default_rng(1)
        for x in (arrays.q, arrays.v):
            narrow = (x.raw.view(np.uint32) & 0xFFFF0000).view(np.float32)
            wide = narrow * (1 + nudge * draw.random(x.raw.shape))
            x.raw[...] = np.where(np.isnan(x.raw), x.raw, wide)
        arrays.remember()
        results.append(capi.run_both(rounded, case, arrays))
    for output, first in results[0].items():
        assert np.abs(first).max() > 0
        assert first.tobytes() == results[1][output].tobytes(), output


def test_it_is_another_result(rounded: Core, libraries: dict[str, Path]) -> None:
    exact = get_core(libraries, rounded.name.replace("bf16", "f32"))
    case = replace(PLAIN, key=Band(5, 5), value=Band(5, 5))
    near, far = (
        capi.run_both(core, case, make_arrays(case, core.dtype)) for core in (rounded, exact)
    )
    for name, x in near.items():
        off = np.linalg.norm(x - far[name]) / np.linalg.norm(far[name])
        assert 2.0**-14 < off < 2 * 2.0**-8, name


def qkv() -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [draw.standard_normal((2, 2, 70, 24), np.float32) for _ in range(3)]


def test_from_python(libraries: dict[str, Path]) -> None:
    """The bits of the core, and maps of the same scores."""
    q, k, v = qkv()
    tables = np.random.default_rng(4).standard_normal((2, 9, 24), np.float32)
    shaw = relpos.Shaw(*tables)
    given: dict[str, Any] = {"position": shaw, "causal": True}
    exact = relpos.attention(q, k, v, **given)
    out, ctx = relpos.attention_forward(q, k, v, **given, precision="bf16")
    assert out.tobytes() == relpos.attention(q, k, v, **given, precision="bf16").tobytes()
    assert 2.0**-12 < np.linalg.norm(out - exact) / np.linalg.norm(exact) < 2 * 2.0**-8
    back = relpos.attention_backward(ctx, v)
    far = relpos.attention_backward(relpos.attention_forward(q, k, v, **given)[1], v)
    assert 2.0**-12 < np.linalg.norm(back.q - far.q) / np.linalg.norm(far.q) < 2 * 2.0**-8
    maps = relpos.attention_maps(q, k, v, **given, precision="bf16")
    there = relpos.attention_maps(q, k, v, **given)
    off = np.abs(maps.probabilities - there.probabilities).max()
    assert 0 < off < 16 * 2.0**-8 and np.allclose(maps.probabilities.sum(-1), 1, atol=1e-5)


def test_what_is_refused(libraries: dict[str, Path]) -> None:
    case = replace(PLAIN, N=3, M=3)
    with pytest.raises(
        capi.CoreError, match="precision=RP_BF16, but this library computes in double"
    ):
        core = capi.Core(libraries["f64"], precision=BF16)
        capi.run_both(core, case, make_arrays(case, core.dtype))
    core = capi.Core(libraries["f32"], precision=BF16)
    core.where.element = BF16
    with pytest.raises(capi.CoreError, match="element=RP_BF16, but arrays on a CPU are RP_F32"):
        capi.run_both(core, case, make_arrays(case, core.dtype))
