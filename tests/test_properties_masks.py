# SPDX-License-Identifier: Apache-2.0
"""What must hold of what hides, caps and drops: masks, rows that see nothing, windows, softcaps and
dropout.

Where a property says "the same", the same bits are meant unless a tolerance stands there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import capi
from capi import Core
from case_arrays import make_arrays
from cases import Case, Edges, Labels, Mask
from cores import every_core
from guarded_arrays import Arrays
from properties import BASE, SHARED, TABLES, TWIN_CASES, close, correct, forward, same
from relpos import reference
from relpos.reference import Band, Dropout

core = every_core  # a fixture

# ---- masks ---------------------------------------------------------------------------------------


def test_a_masked_key_has_exactly_zero_gradient(core: Core) -> None:
    case = replace(BASE, N=20, M=70, causal=True, starts=(30, 3))  # sees 50, and 23 keys
    results = capi.run_both(core, case, make_arrays(case, core.dtype))
    for b, seen in enumerate((50, 23)):
        for name in ("k", "v"):
            assert not results[name][b, :, seen:].any(), name
            assert np.all(np.any(results[name][b, :, :seen] != 0, axis=-1)), name


def test_a_masked_key_is_without_influence(core: Core) -> None:
    case = replace(SHARED, N=20, M=70, causal=True, starts=(30, 3))
    arrays = make_arrays(case, core.dtype)
    expected = capi.run_both(core, case, arrays)
    expected = {name: x.copy() for name, x in expected.items()}
    for x in (arrays.k.view, arrays.v.view):
        x[0, :, 50:], x[1, :, 23:] = 1e30, -1e30
    arrays.remember()
    same(expected, capi.run_both(core, case, arrays))


def test_rows_that_see_nothing(core: Core) -> None:
    case = replace(BASE, causal=True, starts=(-30, -200))
    results = correct(core, case, make_arrays(case, core.dtype))
    for name in ("out", "q"):
        assert not results[name][0, :, :30].any() and not results[name][1].any(), name
    assert np.all(results["lse"][0, :, :30] == -np.inf) and np.all(results["lse"][1] == -np.inf)
    assert np.all(np.isfinite(results["lse"][0, :, 30:]))
    assert not results["k"][1].any() and not results["v"][1].any()


@pytest.mark.parametrize("beyond", ["clip", "none"])
def test_causal_calls_give_no_gradient_to_rows_on_the_right(core: Core, beyond: Any) -> None:
    band = Band(5, 8, beyond)
    case = replace(BASE, causal=True, key=band, value=band)
    results = capi.run_both(core, case, make_arrays(case, core.dtype))
    for name in TABLES:
        assert not results[name][:, 6:].any(), name
        assert np.all(np.any(results[name][:, :6] != 0, axis=-1)), name


def test_rows_out_of_reach_get_no_gradient(core: Core) -> None:
    """start far to the right: every distance is beyond -left, so row 0 alone is met."""
    case = replace(BASE, starts=(500, 900))
    results = capi.run_both(core, case, make_arrays(case, core.dtype))
    for name in TABLES:
        assert not results[name][:, 1:].any(), name
    assert np.all(results["value[0]"][:, 0] != 0)


# ---- windows, masks, softcaps --------------------------------------------------------------------


def masked(core: Core, case: Case, visible: Callable[[reference.Span], Any]) -> dict[str, Any]:
    """Results of the case with a mask instead of its window and its causality."""
    other = replace(case, window=(-1, -1), causal=False, mask=Mask("all"))
    arrays = make_arrays(other, core.dtype)
    assert arrays.mask is not None
    for span in other.spans:
        reference.head_matrix(arrays.mask.map.matrices, span, 0)[...] = visible(span)
    arrays.remember()
    return capi.run_both(core, other, arrays)


@pytest.mark.parametrize("window", [(0, 0), (3, -1), (-1, 3), (16, 5), (64, 64), (0, 200)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_is_a_mask(core: Core, window: tuple[int, int], causal: bool) -> None:
    for case in TWIN_CASES:
        case = replace(case, N=150, M=150, window=window, causal=causal, key=Band(5, 5))

        def visible(span: reference.Span) -> Any:
            size = (span.queries, span.keys, span.start)
            return reference.visible_keys(*size, causal, window)

        one = capi.run_both(core, case, make_arrays(case, core.dtype))
        other = masked(core, case, visible)
        for name, x in one.items():
            close(core, case, x, other[name], name)


def test_keys_outside_the_window_have_no_influence(core: Core) -> None:
    case = replace(SHARED, N=200, M=200, window=(10, 3), starts=(-30, 20))
    arrays = make_arrays(case, core.dtype)
    expected = {name: x.copy() for name, x in capi.run_both(core, case, arrays).items()}
    for b, start in enumerate(case.starts or ()):
        seen = np.zeros(200, bool)
        seen[max(start - 10, 0) : 200 + start + 3] = True
        for name in ("k", "v"):
            assert not expected[name][b][:, ~seen].any()
            arrays[name].view[b][:, ~seen] = 1e30
    arrays.remember()
    same(expected, capi.run_both(core, case, arrays))


@pytest.mark.parametrize("per_head", [False, True])
def test_a_mask_that_hides_nothing_changes_nothing(core: Core, per_head: bool) -> None:
    expected = capi.run_both(core, BASE, make_arrays(BASE, core.dtype))
    case = replace(BASE, mask=Mask("all", per_head=per_head))
    got = capi.run_both(core, case, make_arrays(case, core.dtype))
    for name, x in expected.items():
        close(core, case, x, got[name], name)


def test_keys_that_are_masked_for_all_have_no_influence(core: Core) -> None:
    """And no gradient; a mask per head hides them from that head alone."""
    case = replace(SHARED, mask=Mask("all", per_head=True))
    arrays = make_arrays(case, core.dtype)
    assert arrays.mask is not None
    hidden = np.s_[1, 2, :, 30:50]
    arrays.mask.map.matrices[hidden] = 0
    arrays.remember()
    results = correct(core, case, arrays)
    for name in ("k", "v"):
        assert not results[name][1, 2, 30:50].any()
        assert np.all(np.any(results[name][1, :2, 30:50] != 0, axis=-1))
        arrays[name].view[1, 2, 30:50] = -1e30
    arrays.remember()
    same(results, capi.run_both(core, case, arrays))


def test_tiles_that_are_masked_are_left_out(core: Core) -> None:
    """Three documents in one sequence cost what they see: of those beside it none meets a NaN in the
    second, but for queries that are at work together with some of its own, at most 96."""
    length, case = 192, Case(B=1, H=2, N=576, M=576, key=Band(9, 9), value=Labels(3))
    case = replace(case, mask=Mask("all"))
    arrays = make_arrays(case, core.dtype)
    assert arrays.mask is not None
    document = np.arange(case.N) // length
    arrays.mask.map.matrices[...] = document[:, None] == document
    arrays.remember()
    expected = correct(core, case, arrays)
    for name in ("k", "v"):
        arrays[name].view[:, :, length : 2 * length] = np.nan
    arrays.remember()
    got = capi.run_both(core, case, arrays)
    for name in ("out", "q"):
        for rows in (np.s_[: length - 96], np.s_[2 * length + 96 :]):
            same({name: expected[name][:, :, rows]}, {name: got[name][:, :, rows]})
        assert np.isnan(got[name][:, :, length : 2 * length]).all(), name


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_rows_that_are_masked_give_zeros(core: Core, softcap: float) -> None:
    case = replace(SHARED, mask=Mask("rows", 0.5), softcap=softcap, bias=Band(1, 1))
    arrays = make_arrays(case, core.dtype)
    assert arrays.mask is not None
    nothing = ~np.any(arrays.mask.map.matrices[:, 0], axis=-1)  # (B, N)
    assert 10 < nothing.sum() < nothing.size - 10
    results = correct(core, case, arrays)
    for name in ("out", "q"):
        assert not np.moveaxis(results[name], 1, 2)[nothing].any(), name
    assert np.all(np.moveaxis(results["lse"], 1, 2)[nothing] == -np.inf)
    assert np.all(np.isfinite(np.moveaxis(results["lse"], 1, 2)[~nothing]))


def test_a_wide_softcap_is_none(core: Core) -> None:
    case = replace(SHARED, softcap=1e6)
    expected = capi.run_both(core, SHARED, make_arrays(SHARED, core.dtype))
    got = capi.run_both(core, case, make_arrays(case, core.dtype))
    for name, x in expected.items():
        close(core, case, x, got[name], name)


@pytest.mark.parametrize("size", [10.0, 1e4])
def test_scores_far_beyond_the_softcap_are_the_cap(core: Core, size: float) -> None:
    """One key at 30, one at -30, whatever their scores; gradients of the scores vanish."""
    case = replace(SHARED, B=1, H=1, N=2, M=2, key=None, value=None, softcap=30.0, scale=1.0)
    arrays = make_arrays(case, core.dtype)
    arrays.q.view[...], arrays.k.view[...] = size, [[100], [-100]]
    arrays.remember()
    results = capi.run_both(core, case, arrays)
    np.testing.assert_allclose(results["lse"], 30, rtol=1e-6)
    assert np.max(np.abs(results["q"])) < 1e-3 and np.max(np.abs(results["k"])) < 1e-3


# ---- dropout -------------------------------------------------------------------------------------


def uniform(core: Core, case: Case) -> Arrays:
    """Scores all zero, values and dz the identity: out is keep / M, and so is dv."""
    arrays = make_arrays(case, core.dtype)
    arrays.q.view[...] = 0
    for table in arrays.tables.values():
        table.view[...] = 0
    for span in case.spans:
        for h in range(case.H):
            key = (case.layout, span.batch, h, span.key_row, span.keys)
            query = (case.layout, span.batch, h, span.query_row, span.queries)
            reference.head_rows(arrays.v.view, *key)[...] = np.eye(span.keys, case.Dv)
            reference.head_rows(arrays.dout.view, *query)[...] = np.eye(span.queries, case.Dv)
    arrays.remember()
    return arrays


def dropped(core: Core, case: Case) -> np.ndarray:
    return forward(core, case, uniform(core, case)) * case.M


RATE = Dropout(0.3, (2**31 + 5, 77), 2**32 - 2, 2**32 - 1)
DROPPED = [
    Case(B=2, H=3, N=70, M=70, D=3, Dv=70, dropout=RATE),
    Case(B=3, H=2, offsets=(0, 17, 18, 100), D=8, Dv=82, dropout=RATE),
    Case(B=2, N=200, M=40, D=8, Dv=40, lengths=(200, 3), key_lengths=(33, 40), dropout=RATE),
    Case(N=5, M=257, D=8, Dv=257, layout="bnhd", dropout=RATE, value=Band(400, 400)),
    Case(H=2, N=33, M=130, D=8, Dv=130, key=Labels(4), bias=Edges(3), dropout=RATE),
]


@pytest.mark.parametrize("case", DROPPED, ids=["padded", "packed", "lengths", "wide", "maps"])
def test_the_dropout_mask_is_the_reference_one(core: Core, case: Case) -> None:
    """Forward's and backward's, whatever the tiling, packing, threads and instruction set."""
    arrays = uniform(core, case)
    for threads in (1, 3):
        core.set_threads(threads)
        forwarded = capi.run_forward(core, case, arrays)
        dv = capi.run_backward(core, case, arrays, forwarded)["v"]
        for span in case.spans:
            for h in range(case.H):
                n, m = span.queries, span.keys
                expected = reference.dropout_factors(RATE, span.batch, h, n, m)
                query = (case.layout, span.batch, h, span.query_row, n)
                out = reference.head_rows(forwarded.out.view, *query)[:, :m] * m
                np.testing.assert_allclose(out, expected, rtol=1e-5)
                key = (case.layout, span.batch, h, span.key_row, m)
                seen = reference.head_rows(dv, *key)[:, :n].T * m
                np.testing.assert_allclose(seen, expected[: case.Dv], rtol=1e-5)


def test_the_dropout_mask_depends_on_the_ordinal_of_the_sequence(core: Core) -> None:
    """A batch cut in two, its second half counted on, is the batch; another key is another mask."""
    both = Case(B=2, H=2, N=40, M=40, Dv=40, dropout=RATE)
    whole = dropped(core, both)
    second = replace(both, B=1, dropout=RATE._replace(first=(RATE.first + 1) % 2**32))
    same({"out": whole[1:]}, {"out": dropped(core, second)})
    head = replace(both, H=1, dropout=RATE._replace(site=(RATE.site + 1) % 2**32))
    same({"out": whole[:, 1:]}, {"out": dropped(core, head)})
    for change in ({"key": (1, 77)}, {"key": (2**31 + 5, 78)}, {"site": 9}, {"first": 9}):
        other = dropped(core, replace(both, dropout=RATE._replace(**change)))
        assert 0.3 < np.mean((other == 0) != (whole == 0)) < 0.55  # 2 * 0.3 * 0.7 = 0.42


@pytest.mark.parametrize("rate", [1 / 256, 0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean(core: Core, rate: float) -> None:
    """Mean and variance of the factors of 50 keys, to six deviations of each."""
    drawn = []
    for seed in range(50):
        case = Case(H=2, N=64, M=48, D=1, Dv=48, dropout=Dropout(rate, (seed, 5)))
        drawn.append(dropped(core, case))
    keep = np.stack(drawn).astype(np.float64)
    p = Dropout(rate, (0, 0)).threshold / 256
    variance, fourth = p / (1 - p), (1 - p) * (p / (1 - p)) ** 4 + p
    assert abs(keep.mean() - 1) <= 6 * np.sqrt(variance / keep.size) + 1e-6
    deviation = np.sqrt((fourth - variance**2) / keep.size)
    assert abs(keep.var() - variance) <= 6 * deviation + 1e-5 * variance


def test_lse_is_before_dropout(core: Core) -> None:
    case = replace(BASE, dropout=RATE)
    got = capi.run_forward(core, case, make_arrays(case, core.dtype)).lse.view
    expected = capi.run_forward(core, BASE, make_arrays(BASE, core.dtype)).lse.view
    close(core, case, expected, got, "lse")


def test_a_rate_that_rounds_to_zero_drops_nothing(core: Core) -> None:
    case = replace(BASE, dropout=RATE._replace(rate=0.0019))
    got = capi.run_both(core, case, make_arrays(case, core.dtype))
    expected = capi.run_both(core, BASE, make_arrays(BASE, core.dtype))
    for name, x in expected.items():
        close(core, case, x, got[name], name)
