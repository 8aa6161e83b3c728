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
from cases import Case, Distances, Mask
from cores import get_core
from device_capi import from_bf16, to_bf16
from relpos.reference import Band, Dropout

# Keys are multiplied by the scale and log2(e) first: here by 1, or nearly.
PLAIN = Case(B=2, H=2, N=150, M=201, D=40, Dv=36, scale=float(np.log(2)), seed=5)
BAND, RUNS = Band(210, 210), Distances(210, 210, "clip", 2, "random")  # no pair is beyond them
# And which of their arrays products alone meet.
CASES = {
    "plain": (PLAIN, "qkv"),
    "causal": (replace(PLAIN, causal=True), "qkv"),
    "packed": (replace(PLAIN, offsets=(0, 7, 7, 90), key_offsets=(0, 1, 40, 130), B=3), "qkv"),
    "one query": (replace(PLAIN, N=1), "qkv"),
    "many keys": (replace(PLAIN, N=530, M=600, H=1), "qkv"),
    "narrow": (replace(PLAIN, D=7, Dv=5), "qkv"),
    "dropout": (replace(PLAIN, dropout=Dropout(0.1, (1, 2))), "qkv"),
    "softcap": (replace(PLAIN, softcap=5.0), "qkv"),
    "mask": (replace(PLAIN, mask=Mask()), "qkv"),
    "window": (replace(PLAIN, window=(9, 30)), "qkv"),
    "shared keys": (replace(PLAIN, H=4, key_heads=2), "qkv"),
    "biases": (replace(PLAIN, bias=Band(5, 5)), "qkv"),
    "values": (replace(PLAIN, value=Band(5, 5)), "qk"),
    "moved queries": (replace(PLAIN, query=Band(0, 0)), "kv"),
    "keys' relations": (replace(PLAIN, query=Band(5, 5)), "qv"),
    "queries' relations": (replace(PLAIN, key=Band(5, 5)), "v"),
    "all distances": (replace(PLAIN, key=BAND, value=BAND), [*"qkv", "key[0]", "value[0]"]),
    "distances' keys": (replace(PLAIN, query=BAND), [*"qkv", "query[0]"]),
    "distances in runs": (replace(PLAIN, key=RUNS, query=RUNS), [*"qkv", "key[0]", "query[0]"]),
    "distances of moved queries": (replace(PLAIN, query=Band(0, 0), key=BAND), [*"kv", "key[0]"]),
}


@pytest.fixture(params=[name.replace("f32", "bf16") for name in capi.CORES])
def rounded(libraries: dict[str, Path], request: pytest.FixtureRequest) -> Core:
    return get_core(libraries, request.param)


def nudged(x: np.ndarray, nudge: float) -> np.ndarray:
    """Numbers of bf16, and how far from them."""
    wide = from_bf16(to_bf16(x)) * (1 + nudge * np.random.default_rng(1).random(x.shape))
    return np.where(np.isnan(x), x, wide)


@pytest.mark.parametrize("kind", CASES)
def test_what_rounding_takes_away_is_not_seen(rounded: Core, kind: str) -> None:
    """Numbers less than half a unit of bf16 off one of bf16 change no bit of what products make of
    them, there and back; of dout none but where a table's first row takes its sum."""
    case, moved = CASES[kind]
    results = []
    for nudge, of_dout in ((0.0, 0.0), (0.4 * 2.0**-8, 0.0), (0.0, 0.4 * 2.0**-8)):
        arrays = make_arrays(case, rounded.dtype)
        for name in moved:
            x = arrays.tables[name] if name in arrays.tables else getattr(arrays, name)
            x.raw[...] = nudged(x.raw, nudge)
        arrays.dout.raw[...] = nudged(arrays.dout.raw, of_dout)
        arrays.remember()
        results.append(capi.run_both(rounded, case, arrays))
    for output, first in results[0].items():
        assert np.abs(first).max() > 0
        assert first.tobytes() == results[1][output].tobytes(), output
        if output != "value[0]" or kind != "values":
            assert first.tobytes() == results[2][output].tobytes(), output


def test_keys_are_rounded_for_the_ends_of_their_relations(rounded: Core) -> None:
    """Scores are; what a table's first row has of gradients is not."""
    case = replace(PLAIN, query=Band(5, 5))
    results = []
    for nudge in (0.0, 0.4 * 2.0**-8):
        arrays = make_arrays(case, rounded.dtype)
        arrays.k.raw[...] = nudged(arrays.k.raw, nudge)
        arrays.remember()
        results.append(capi.run_forward(rounded, case, arrays))
    assert results[0].out.view.tobytes() == results[1].out.view.tobytes()


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "key[0]", "query[0]", "value[0]"])
def test_what_is_not_finite_goes_no_further(
    rounded: Core, libraries: dict[str, Path], name: str, number: float
) -> None:
    """What is a number in float32 is one: words have a half more than an odd number of keys."""
    exact = get_core(libraries, rounded.name.replace("bf16", "f32"))
    draw = np.random.default_rng(7)
    for clip in (3, 5, 200):
        case = replace(PLAIN, N=67, M=69, key=Band(clip, 3), query=Band(4, clip))
        case = replace(case, value=Band(2, clip), causal=clip == 3, per_head=())
        for _ in range(4):
            arrays = make_arrays(case, rounded.dtype)
            x = arrays.tables[name] if name in arrays.tables else getattr(arrays, name)
            x.view[tuple(draw.integers(x.view.shape))] = number
            arrays.remember()
            near, far = (capi.run_both(core, case, arrays) for core in (rounded, exact))
            for output, own in near.items():
                assert not np.any(np.isfinite(far[output]) & ~np.isfinite(own)), output


def test_large_values_beyond_the_ends(rounded: Core, libraries: dict[str, Path]) -> None:
    """What all of a row has in common leaves its gradients: dp meets the same vectors that out has,
    and dout rounded in both."""
    exact = get_core(libraries, rounded.name.replace("bf16", "f32"))
    for left, right in ((0, 0), (5, 5)):
        case = replace(PLAIN, value=Band(left, right), scale=0.25)
        arrays = make_arrays(case, np.float32)
        arrays.tables["value[0]"].raw[...] *= 100
        arrays.remember()
        near, far = (capi.run_both(core, case, arrays) for core in (rounded, exact))
        for name in ("q", "k"):
            off = np.linalg.norm(near[name] - far[name]) / np.linalg.norm(far[name])
            assert off < 4 * 2.0**-8, (left, name)


def test_it_is_another_result(rounded: Core, libraries: dict[str, Path]) -> None:
    exact = get_core(libraries, rounded.name.replace("bf16", "f32"))
    case = replace(PLAIN, key=Band(5, 5), value=Band(5, 5), scale=0.25)
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
