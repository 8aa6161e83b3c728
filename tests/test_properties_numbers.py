# SPDX-License-Identifier: Apache-2.0
"""What must hold of numbers that are none, and of large ones: NaN, no overflow, a late maximum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capi
import relpos
from capi import Core
from case_arrays import make_arrays
from cases import Case, Distances, Edges, Labels
from cores import every_core, get_core
from properties import EVERY_KIND, SHARED, TABLES, forward
from relpos import reference
from relpos.reference import Band, Dropout
from test_attention import compare_case

core = every_core  # a fixture

LONG = Case(B=1, H=1, N=75, M=75, D=32, Dv=32, value=Band(75, 75), seed=79)
UNSEEN: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (7, 4)},
    {"softcap": 5.0},
    {"dropout": Dropout(0.2, (1, 2))},
    {"bias": Band(80, 80)},
]

# ---- NaN in a table ------------------------------------------------------------------------------

SPOILT: list[Any] = [
    Band(4, 4),
    Band(4, 4, "none"),
    Band(200, 200),
    Distances(30, 30, "clip", 9, "random"),
    Distances(30, 30, "none", 0, "", "random"),
    Labels(9),
    Labels(9, 1, "sparse"),
    Edges(9, 1),
    Distances(300, 300, "none", 0, "", "random"),
    Labels(3000, 2, "sparse"),
]


@pytest.mark.parametrize("kind", reference.KINDS)
@pytest.mark.parametrize("map", SPOILT, ids=str)
def test_nan_in_a_table_spoils_the_queries_that_meet_it(core: Core, kind: str, map: Any) -> None:
    """All of these, and no other; but a row of a value table times a sum of zero may be NaN too."""
    case = replace(EVERY_KIND, **{kind: map})
    arrays = make_arrays(case, core.dtype)
    table = arrays[f"{kind}[0]"].view
    for row in sorted({0, 4, table.shape[0] // 2, table.shape[0] - 1}):
        before = table[row, -1]
        table[row, -1] = np.nan
        arrays.remember()
        out = forward(core, case, arrays)
        table[row, -1] = before
        spoilt = np.any(np.isnan(out), axis=-1)
        for span in case.spans:
            index = reference.head_index(arrays.maps[f"{kind}[0]"].map, span, 0)
            meets = np.any(index.reshape(-1, case.N, case.M) == row, axis=(0, 2))
            assert np.all(spoilt[span.batch][:, meets]), f"row {row}: NaN was lost"
            stray = spoilt[span.batch][:, ~meets]
            assert kind == "value" or not np.any(stray), f"row {row}: NaN where none is met"


# ---- numbers that are none -----------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("row", [0, 3, 5, 10])
def test_nan_in_a_table_row_reaches_every_query_that_meets_it(
    core: Core, table: str, row: int
) -> None:
    """Row 0 is met by queries from 5 on, row 10 by those up to 64, the others likewise."""
    arrays = make_arrays(SHARED, core.dtype)
    arrays[table].view[row, 2] = np.nan
    arrays.remember()
    out = forward(core, SHARED, arrays)
    meets = np.any(reference.relation_index(70, 70, 0, 5, 5) == row, axis=1)
    spoilt = np.any(np.isnan(out), axis=-1)
    assert np.all(spoilt[:, :, meets]), "NaN was lost"


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_in_an_input_reaches_the_results(core: Core, name: str) -> None:
    """Of every query that sees it, and of no other head. (A hidden value times a probability of
    zero may be NaN too: only what lies beyond a length is not read.)"""
    case = replace(SHARED, causal=True)
    arrays = make_arrays(case, core.dtype)
    getattr(arrays, name).view[1, 2, 40, 3] = np.nan
    arrays.remember()
    spoilt = np.any(np.isnan(forward(core, case, arrays)), axis=-1)
    assert np.all(spoilt[1, 2, 40 : (41 if name == "q" else None)]), "NaN was lost"
    spoilt[1, 2] = False
    assert not spoilt.any()


@pytest.mark.parametrize("changes", UNSEEN, ids=str)
@pytest.mark.parametrize("name", [f"{p}-{isa}" for p in ("f32", "bf16") for isa in capi.ISAS])
def test_a_query_that_is_none_reaches_no_distance_that_it_does_not_see(
    libraries: dict[str, Path], name: str, changes: dict[str, Any]
) -> None:
    """Not those of the keys that its last tile would have had room for, though others see them."""
    core = get_core(libraries, name)
    case = replace(LONG, **changes)
    arrays = make_arrays(case, core.dtype)
    arrays.q.view[0, 0, 40, 0] = np.nan
    arrays.remember()
    gradient = capi.run_both(core, case, arrays)["value[0]"]
    spoilt = np.flatnonzero(np.any(np.isnan(gradient), axis=-1)) - case.N
    left, right = case.window
    nearest = -40 if left < 0 else -left
    farthest = 0 if case.causal else right if right >= 0 else case.M - 41
    assert spoilt.size > 0 and nearest <= spoilt.min() and spoilt.max() <= farthest


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_scores_do_not_overflow(core: Core, size: float) -> None:
    """Scores of 1e5, and of 1e9, where float32 resolves no less than 64: every row sees something."""
    case = replace(SHARED, key=Band(2, 2), value=None, scale=1.0)
    arrays = make_arrays(case, core.dtype)
    arrays.q.view[...] *= core.dtype(size)
    arrays.k.view[...] *= core.dtype(size)
    arrays.remember()
    results = capi.run_both(core, case, arrays)
    for name, x in results.items():
        finite = bool(np.all(np.isfinite(x)))
        assert finite, name


@pytest.mark.parametrize("size", [2.3e38, 2.4e38, np.finfo(np.float32).max])
def test_a_bias_as_large_as_floats_go(size: float) -> None:
    """Up to 2.3e38 rows that have it everywhere are as they were, beyond it is infinite."""
    q = np.random.default_rng(1).standard_normal((1, 1, 8, 8)).astype(np.float32)
    labels = np.zeros((8, 8), np.int8)
    plain = relpos.attention(q, q, q)
    for sign in (-1, 1):
        table = np.array([sign * size], np.float32)
        out = relpos.attention(q, q, q, position=relpos.ShawGraph(bias_table=table, labels=labels))
        if size < 2.35e38:
            np.testing.assert_allclose(out, plain, rtol=0, atol=1e-6)
        else:
            assert not out.any() if sign < 0 else np.isnan(out).all()


# ---- a maximum that comes late -------------------------------------------------------------------


@pytest.mark.parametrize("rise", [10.0, 1e3, 1e4])
def test_a_late_maximum_is_as_precise_as_an_early_one(core: Core, rise: float) -> None:
    """The first tile scores far below the second: what it left as maximum must not round the rest."""
    case = Case(N=7, M=128, D=64, Dv=64, starts=(0,))
    arrays = make_arrays(case, core.dtype)
    q, k = arrays.views()[:2]
    q[..., 0] = 1
    late = np.concatenate([np.full(64, -8 * rise), np.zeros(64)])
    results = {}
    for name, column in (("late", late), ("early", late[::-1])):
        k[..., 0] = column.astype(core.dtype)
        arrays.remember()
        results[name] = capi.run_forward(core, case, arrays).out.view.copy()
    truth = []
    for column in (late, late[::-1]):
        k[..., 0] = column.astype(core.dtype)
        truth.append(reference.batched_forward(case.batch(arrays), *arrays.views()[:3])[0])
    error = [np.abs(a - b).max() for a, b in zip(results.values(), truth, strict=True)]
    assert error[0] <= 8 * error[1] + 4 * np.finfo(core.dtype).eps


@pytest.mark.parametrize("scale", [0.25, 3.0, 40.0])
def test_who_sees_one_key_has_its_value(core: Core, scale: float) -> None:
    """To the bit, wherever above its score the maximum was set."""
    case = Case(B=1, H=1, N=7, M=7, D=16, Dv=16, window=(0, 0), scale=scale)
    arrays = make_arrays(case, core.dtype)
    out = capi.run_forward(core, case, arrays).out.view
    np.testing.assert_array_equal(out, arrays.v.view)


@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
def test_rising_scores_sum_as_falling_ones(core: Core, scale: float) -> None:
    """Keys in the other order: of the one every tile raises the maximum, of the other none does."""
    case = Case(B=1, H=1, N=1, M=320, D=16, Dv=16, starts=(319,), scale=scale)
    arrays = make_arrays(case, core.dtype)
    q, k, v = arrays.views()[:3]
    q[...] = 1
    k[...] = np.linspace(0, 8, case.M)[:, None].astype(core.dtype)
    arrays.remember()
    falling = capi.run_forward(core, case, arrays).out.view.copy()
    k[...], v[...] = k[:, :, ::-1].copy(), v[:, :, ::-1].copy()
    arrays.remember()
    rising = capi.run_forward(core, case, arrays).out.view
    size = np.abs(v).max() * 16 * 8 * scale * np.finfo(core.dtype).eps  # of the largest score
    np.testing.assert_allclose(rising, falling, rtol=0, atol=size)


# ---- many keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, Band(4, 4)])
@pytest.mark.parametrize("window", [(-1, -1), (60000, 50000)])
def test_sums_over_many_keys(core: Core, window: tuple[int, int], value: Band | None) -> None:
    """Numbers that all were added to, one tile after the other, were off by four times as much.

    Maxima that rise late find what was added before.
    """
    case = Case(
        N=7, M=131072, D=16, Dv=16, starts=(65536,), key=Band(4, 4), value=value, scale=1.0,
        window=window,
    )  # fmt: skip
    arrays = make_arrays(case, core.dtype)
    q, k, v, _ = arrays.views()
    q[..., 0] = 1
    k[..., 0] = np.abs(np.arange(case.M) - 65536) * (5 / 65536)
    v += 1
    arrays.remember()
    got = capi.run_forward(core, case, arrays).out.view
    exact, _ = reference.batched_forward(case.batch(arrays, np.float64), *arrays.views()[:3])
    unit = np.finfo(core.dtype).eps / 2
    error = np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)) / unit
    # 64 sums of 32 tiles: partial sums of n terms are off by sqrt(n / 6) units (tolerances.py), and
    # those of one row have errors in common, so that chance may double it
    assert error <= 2 * np.sqrt(1 + 32 / 6 + 64 / 6), error


@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("keys", [(2047, 2048), (2049, 30), (64, 4097), (5000, 0)])
def test_keys_about_where_sums_begin_anew(core: Core, keys: tuple[int, int], heads: int) -> None:
    """Chunks of any size, beside sequences that have fewer; in either direction of a walk."""
    case = Case(
        B=2, H=heads, N=7, M=max(keys), key_lengths=keys, key=Band(3, 3), value=Band(3, 3),
        starts=(1000, 2), rising=True,
    )  # fmt: skip
    assert compare_case(core, case) is None
    assert compare_case(core, replace(case, causal=True, starts=(2500, 2500))) is None
