# SPDX-License-Identifier: Apache-2.0
"""What must hold whatever the numbers are, on every instruction set of libcore.

Where a property says "the same", the same bits are meant unless a tolerance stands there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capi
from capi import Attention, Core
from cases import SENTINEL, Arrays, Case, compare, make_arrays, oracle_of
from relpos import reference
from relpos.reference import Band
from test_attention import get_core

BASE = Case(
    B=2, H=3, N=70, M=70, D=24, Dv=24, key=Band(5, 5), value=Band(5, 5), per_head=True, seed=77
)
SHARED = replace(BASE, per_head=False)


@pytest.fixture(params=capi.CORES)
def core(libraries: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Core]:
    result = get_core(libraries, request.param)
    yield result
    result.set_threads(0)


def forward(core: Core, case: Case, arrays: Arrays) -> np.ndarray:
    return capi.run_forward(core, case, arrays).out.view


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(b[name]).tobytes(), name


def close(core: Core, case: Case, a: np.ndarray, b: np.ndarray, what: str = "out") -> None:
    """Equal up to the rounding of numbers of ordinary size added up in another order."""
    error = float(np.max(np.abs(a - b), initial=0))
    bound = 64 * float(np.finfo(core.dtype).eps) * max(1.0, float(np.max(np.abs(a), initial=0)))
    assert error <= bound, f"{case}: {what} differs by {error:.3g}, bound {bound:.3g}"


def correct(core: Core, case: Case, arrays: Arrays) -> dict[str, np.ndarray]:
    """Results and gradients, compared with the reference for these arrays."""
    results = capi.run_both(core, case, arrays)
    truth = oracle_of(case, arrays)
    faults = [compare(name, results[name], truth) for name in truth.exact]
    wrong = [fault for fault in faults if fault]
    if wrong:
        pytest.fail("\n".join([str(case), *wrong]))
    return results


# ---- rows of attention ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_rows_sum_to_one(core: Core, causal: bool) -> None:
    case = replace(BASE, causal=causal)
    arrays = make_arrays(case, core.dtype)
    assert arrays.value_table is not None
    arrays.v.view[...], arrays.value_table.view[...] = 1, 0
    arrays.remember()
    np.testing.assert_allclose(forward(core, case, arrays), 1, rtol=1e-6)


def test_value_table_of_ones_counts_each_row_once(core: Core) -> None:
    arrays = make_arrays(BASE, core.dtype)
    assert arrays.value_table is not None
    arrays.v.view[...], arrays.value_table.view[...] = 0, 1
    arrays.remember()
    np.testing.assert_allclose(forward(core, BASE, arrays), 1, rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_zero_tables_are_plain_attention(core: Core, causal: bool) -> None:
    case = replace(BASE, causal=causal)
    plain = replace(case, key=None, value=None)
    arrays, plain_arrays = make_arrays(case, core.dtype), make_arrays(plain, core.dtype)
    for table in (arrays.key_table, arrays.value_table):
        assert table is not None
        table.view[...] = 0
    arrays.remember()
    got, expected = capi.run_both(core, case, arrays), capi.run_both(core, plain, plain_arrays)
    for name, x in expected.items():
        close(core, case, x, got[name], name)


def test_lse_is_the_log_sum_exp_of_the_scores(core: Core) -> None:
    """Natural, with the scale and the relation: one key, so that lse is its score."""
    case = replace(SHARED, N=3, M=1, starts=(0, 1), key=Band(1, 2), scale=0.5)
    arrays = make_arrays(case, core.dtype)
    lse = capi.run_forward(core, case, arrays).lse.view
    q, k, _, _, table, _ = arrays.views()
    for b, start in enumerate(case.starts or ()):
        for h, i in np.ndindex(case.H, case.N):
            row = min(max(0 - (i + start), -1), 2) + 1
            expected = 0.5 * (q[b, h, i] @ (k[b, h, 0] + table[row]))
            assert abs(lse[b, h, i] - expected) < 1e-5


def test_lse_may_be_null(core: Core) -> None:
    arrays = make_arrays(BASE, core.dtype)
    expected = capi.run_forward(core, BASE, arrays).out.view
    status, out = _call_forward(core, BASE, arrays, lse=None)
    assert status == capi.OK
    same({"out": out}, {"out": expected})


# ---- positions -----------------------------------------------------------------------------------


def test_shifting_queries_and_keys_changes_nothing(core: Core) -> None:
    """Rows moved along by 9 in longer arrays, keys before them hidden by the lengths of a pack."""
    case = replace(SHARED, B=1, N=40, M=40, causal=True)
    shifted = replace(case, B=2, offsets=(0, 9, 49))
    arrays, moved = make_arrays(case, core.dtype), make_arrays(shifted, core.dtype)
    for name in ("q", "k", "v", "dout"):
        source, target = getattr(arrays, name).view, getattr(moved, name).view
        target[9:] = np.moveaxis(source[0], 0, 1)
    moved.remember()
    same(
        {"out": np.moveaxis(forward(core, case, arrays)[0], 0, 1)},
        {"out": forward(core, shifted, moved)[9:]},
    )


def test_only_the_distance_counts(core: Core) -> None:
    """Queries that start 7 later against keys with 7 more in front, which no query may tell apart:
    the scores of the last keys are those of before."""
    case = replace(SHARED, B=1, H=1, N=20, M=20, starts=(0,), key=Band(3, 3), value=Band(3, 3))
    late = replace(case, M=27, starts=(7,))
    arrays, later = make_arrays(case, core.dtype), make_arrays(late, core.dtype)
    for name in ("q", "dout"):
        getattr(later, name).view[...] = getattr(arrays, name).view
    for name in ("k", "v"):
        getattr(later, name).view[0, 0, 7:] = getattr(arrays, name).view[0, 0]
        getattr(later, name).view[0, 0, :7] = 0
    for name in ("key_table", "value_table"):
        getattr(later, name).view[...] = getattr(arrays, name).view
    # The seven in front are at score -3e4 in every row: probability exactly zero.
    for x in (arrays, later):
        x.q.view[..., 0] = 100
        assert x.key_table is not None
        x.key_table.view[:, 0] = 0
    arrays.k.view[..., 0] = later.k.view[..., 0] = 0
    later.k.view[0, 0, :7, 0] = -3000
    arrays.remember()
    later.remember()
    close(core, case, forward(core, case, arrays), forward(core, late, later))


@pytest.mark.parametrize("causal", [False, True])
def test_wide_bands_are_unclipped(core: Core, causal: bool) -> None:
    """K = N - 1, K = N and K = 4 N agree where their tables do."""
    N = 33
    case = replace(SHARED, N=N, M=N, causal=causal)
    results = []
    for K in (N - 1, N, 4 * N):
        wide = replace(case, key=Band(K, K), value=Band(K, K))
        arrays = make_arrays(wide, core.dtype)
        middle = np.random.default_rng(3).standard_normal((2, 2 * N - 1, case.D))
        for table, rows in zip((arrays.key_table, arrays.value_table), middle, strict=True):
            assert table is not None
            table.view[...] = 10  # never met
            table.view[K - N + 1 : K + N] = rows
        arrays.remember()
        result = capi.run_both(core, wide, arrays)
        for name in ("key_table", "value_table"):
            outside = np.delete(result[name], np.s_[K - N + 1 : K + N], axis=0)
            assert not outside.any(), f"rows out of reach have a gradient in {name}"
            result[name] = result[name][K - N + 1 : K + N]
        results.append(result)
    for other in results[1:]:
        for name, x in results[0].items():
            close(core, case, x, other[name], name)


def test_distances_beyond_the_band_are_equal(core: Core) -> None:
    """Keys beyond the band may change places."""
    case = replace(SHARED, B=1, H=1, N=1, M=60, starts=(30,), key=Band(4, 4), value=Band(4, 4))
    arrays = make_arrays(case, core.dtype)
    before = forward(core, case, arrays).copy()
    for name in ("k", "v"):
        x = getattr(arrays, name).view[0, 0]
        x[:26], x[35:] = x[:26][::-1].copy(), np.roll(x[35:], 7, axis=0)
    arrays.remember()
    close(core, case, before, forward(core, case, arrays))


def test_no_relation_beyond_the_band(core: Core) -> None:
    """ "none" with K: a clipped table of K + 1 with zeros at its ends."""
    none = replace(SHARED, key=Band(4, 6, "none"), value=Band(2, 3, "none"))
    clip = replace(SHARED, key=Band(5, 7), value=Band(3, 4))
    arrays, wider = make_arrays(none, core.dtype), make_arrays(clip, core.dtype)
    for name in ("key_table", "value_table"):
        table = getattr(wider, name).view
        table[...] = 0
        table[1:-1] = getattr(arrays, name).view
    wider.remember()
    got, expected = capi.run_both(core, none, arrays), capi.run_both(core, clip, wider)
    for name in ("key_table", "value_table"):
        expected[name] = expected[name][1:-1]
    for name, x in expected.items():
        close(core, none, x, got[name], name)


def test_one_row_is_position_blind(core: Core) -> None:
    """k = 0: every order of the keys gives the same."""
    case = replace(SHARED, key=Band(0, 0), value=Band(0, 0))
    arrays = make_arrays(case, core.dtype)
    before = forward(core, case, arrays).copy()
    for name in ("k", "v"):
        getattr(arrays, name).view[...] = getattr(arrays, name).view[:, :, ::-1].copy()
    arrays.remember()
    close(core, case, before, forward(core, case, arrays))


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_a_cache_fed_token_by_token_is_one_causal_call(core: Core, layout: str) -> None:
    case = replace(BASE, N=37, M=37, causal=True, layout=layout)
    arrays = make_arrays(case, core.dtype)
    whole = forward(core, case, arrays)
    for given in (True, False):  # query_start given, or its default
        for m in range(1, case.M + 1):
            starts = (m - 1,) * case.B if given else None
            step = replace(case, N=1, starts=starts, key_lengths=(m,) * case.B)
            part = make_arrays(step, core.dtype)
            part.k, part.v = arrays.k, arrays.v
            part.key_table, part.value_table = arrays.key_table, arrays.value_table
            rows = np.s_[:, :, m - 1] if layout == "bhnd" else np.s_[:, m - 1]
            one = np.s_[:, :, 0] if layout == "bhnd" else np.s_[:, 0]
            part.q.view[one] = arrays.q.view[rows]
            part.remember()
            close(core, case, whole[rows], forward(core, step, part)[one], f"m={m}")


# ---- batches -------------------------------------------------------------------------------------


def test_permuting_the_batch_permutes_the_results(core: Core) -> None:
    case = replace(BASE, B=3, lengths=(70, 11, 64), key_lengths=(50, 70, 1), starts=(0, -4, 9))
    order = [2, 0, 1]

    def permuted(values: Any) -> Any:
        return tuple(values[i] for i in order)

    other = replace(
        case,
        lengths=permuted(case.lengths),
        key_lengths=permuted(case.key_lengths),
        starts=permuted(case.starts),
    )
    arrays, moved = make_arrays(case, core.dtype), make_arrays(other, core.dtype)
    for name in ("q", "k", "v", "dout"):
        getattr(moved, name).view[...] = getattr(arrays, name).view[order]
    moved.remember()
    a, b = capi.run_both(core, case, arrays), capi.run_both(core, other, moved)
    for name in ("key_table", "value_table"):
        close(core, case, a.pop(name), b.pop(name), name)
    same({name: x[order] for name, x in a.items()}, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_packed_equals_padded(core: Core, causal: bool, layout: str) -> None:
    lengths, keys = (70, 13, 0, 64), (70, 31, 5, 0)
    padded = replace(
        BASE, B=4, causal=causal, layout=layout, lengths=lengths, key_lengths=keys, gap=3
    )
    packed = replace(
        padded,
        lengths=None,
        key_lengths=None,
        gap=0,
        offsets=(0, *np.cumsum(lengths).tolist()),
        key_offsets=(0, *np.cumsum(keys).tolist()),
    )
    arrays, tight = make_arrays(padded, core.dtype), make_arrays(packed, core.dtype)

    def pack(x: np.ndarray, counts: tuple[int, ...]) -> np.ndarray:
        x = x if layout == "bnhd" else np.moveaxis(x, 1, 2)
        return np.concatenate([x[b, :n] for b, n in enumerate(counts)])

    for name, counts in (("q", lengths), ("dout", lengths), ("k", keys), ("v", keys)):
        getattr(tight, name).view[...] = pack(getattr(arrays, name).view, counts)
    tight.remember()
    a, b = capi.run_both(core, padded, arrays), capi.run_both(core, packed, tight)
    a["lse"] = np.concatenate([a["lse"][i, :, :n] for i, n in enumerate(lengths)], axis=1)
    for name, counts in (("out", lengths), ("q", lengths), ("k", keys), ("v", keys)):
        a[name] = pack(a[name], counts)
    same(a, b)


def test_both_layouts_and_any_row_stride_give_the_same_bits(core: Core) -> None:
    expected = capi.run_both(core, BASE, make_arrays(BASE, core.dtype))
    for layout, gap in (("bhnd", 5), ("bnhd", 0), ("bnhd", 7)):
        case = replace(BASE, layout=layout, gap=gap)
        arrays, source = make_arrays(case, core.dtype), make_arrays(BASE, core.dtype)
        swap = layout == "bnhd"
        for name in ("q", "k", "v", "dout"):
            x = getattr(source, name).view
            getattr(arrays, name).view[...] = np.moveaxis(x, 1, 2) if swap else x
        arrays.remember()
        got = capi.run_both(core, case, arrays)
        for name in ("out", "q", "k", "v") if swap else ():
            got[name] = np.moveaxis(got[name], 1, 2)
        same(expected, got)


def test_nothing_beyond_a_length_is_read(core: Core) -> None:
    """make_arrays fills what lies beyond with NaN; results are finite, zero or -inf there."""
    case = replace(BASE, lengths=(40, 0), key_lengths=(33, 70), gap=2)
    results = correct(core, case, make_arrays(case, core.dtype))
    assert not results["out"][0, :, 40:].any() and not results["out"][1].any()
    assert np.all(results["lse"][0, :, 40:] == -np.inf) and np.all(results["lse"][1] == -np.inf)
    assert not results["q"][0, :, 40:].any() and not results["k"][0, :, 33:].any()
    assert not results["v"][0, :, 33:].any() and not results["k"][1].any()


def test_batch_stride_of_packed_arrays_is_ignored(core: Core) -> None:
    case = replace(SHARED, B=2, N=0, M=0, offsets=(0, 30, 50))
    arrays = make_arrays(case, core.dtype)
    expected = forward(core, case, arrays).copy()
    for x in (arrays.q, arrays.k, arrays.v):
        x.strides = (1, *x.strides[1:])
    same({"out": forward(core, case, arrays)}, {"out": expected})


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
    for name in ("key_table", "value_table"):
        assert not results[name][:, 6:].any(), name
        assert np.all(np.any(results[name][:, :6] != 0, axis=-1)), name


def test_rows_out_of_reach_get_no_gradient(core: Core) -> None:
    """start far to the right: every distance is beyond -left, so row 0 alone is met."""
    case = replace(BASE, starts=(500, 900))
    results = capi.run_both(core, case, make_arrays(case, core.dtype))
    for name in ("key_table", "value_table"):
        assert not results[name][:, 1:].any(), name
    assert np.all(results["value_table"][:, 0] != 0)


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True])
def test_the_gradient_of_a_tied_table_is_the_sum_of_both(core: Core, per_head: bool) -> None:
    tied = replace(BASE, tied=True, per_head=per_head)
    apart = replace(tied, tied=False)
    arrays, copies = make_arrays(tied, core.dtype), make_arrays(apart, core.dtype)
    assert arrays.key_table and copies.key_table and copies.value_table
    for table in (copies.key_table, copies.value_table):
        table.view[...] = arrays.key_table.view
    for name in ("q", "k", "v", "dout"):
        getattr(copies, name).view[...] = getattr(arrays, name).view
    copies.remember()
    a, b = capi.run_both(core, tied, arrays), capi.run_both(core, apart, copies)
    total = b["key_table"] + b["value_table"]
    close(core, tied, total, a["key_table"])
    same({"out": a["out"], "q": a["q"]}, {"out": b["out"], "q": b["q"]})


def test_equal_tables_per_head_are_a_shared_table(core: Core) -> None:
    arrays, shared = make_arrays(BASE, core.dtype), make_arrays(SHARED, core.dtype)
    for name in ("key_table", "value_table"):
        getattr(arrays, name).view[...] = getattr(shared, name).view
    for name in ("q", "k", "v", "dout"):
        getattr(arrays, name).view[...] = getattr(shared, name).view
    arrays.remember()
    a, b = capi.run_both(core, BASE, arrays), capi.run_both(core, SHARED, shared)
    for name in ("key_table", "value_table"):
        close(core, BASE, a.pop(name).sum(axis=0), b.pop(name), name)
    same(a, b)


def test_each_head_has_its_own_table(core: Core) -> None:
    """Changing the table of head 1 changes head 1 alone."""
    arrays = make_arrays(BASE, core.dtype)
    before = forward(core, BASE, arrays).copy()
    assert arrays.key_table and arrays.value_table
    arrays.key_table.view[1] += 1
    arrays.value_table.view[1] += 1
    arrays.remember()
    changed = np.any(forward(core, BASE, arrays) != before, axis=(0, 2, 3))
    assert changed.tolist() == [False, True, False]


def test_table_gradients_are_added_to_what_is_there(core: Core) -> None:
    case = replace(SHARED, value=Band(2, 9))
    arrays = make_arrays(case, core.dtype)
    forwarded = capi.run_forward(core, case, arrays)
    zero = capi.run_backward(core, case, arrays, forwarded, 0.0)
    more = capi.run_backward(core, case, arrays, forwarded, 3.0)
    for name in ("key_table", "value_table"):
        close(core, case, zero[name] + core.dtype(3), more[name], name)
    same({n: zero[n] for n in "qkv"}, {n: more[n] for n in "qkv"})


def test_table_gradients_may_be_left_out(core: Core) -> None:
    arrays = make_arrays(BASE, core.dtype)
    forwarded = capi.run_forward(core, BASE, arrays)
    expected = capi.run_backward(core, BASE, arrays, forwarded)
    got = capi.run_backward(core, BASE, arrays, forwarded, None)
    same({n: expected[n] for n in "qkv"}, got)


# ---- numbers that are none -----------------------------------------------------------------------


@pytest.mark.parametrize("table", ["key_table", "value_table"])
@pytest.mark.parametrize("row", [0, 3, 5, 10])
def test_nan_in_a_table_row_reaches_every_query_that_meets_it(
    core: Core, table: str, row: int
) -> None:
    """Row 0 is met by queries from 5 on, row 10 by those up to 64, the others likewise."""
    arrays = make_arrays(SHARED, core.dtype)
    getattr(arrays, table).view[row, 2] = np.nan
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


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_scores_do_not_overflow(core: Core, size: float) -> None:
    """Scores of 1e5 and, forward, of 1e9, where float32 resolves no less than 64."""
    case = replace(SHARED, key=Band(2, 2), value=None, scale=1.0)
    arrays = make_arrays(case, core.dtype)
    arrays.q.view[...] *= core.dtype(size)
    arrays.k.view[...] *= core.dtype(size)
    arrays.remember()
    if size > 1e3:
        results = {"out": forward(core, case, arrays)}
    else:
        results = capi.run_both(core, case, arrays)
    for name, x in results.items():
        finite = bool(np.all(np.isfinite(x)))
        assert finite, name


# ---- threads -------------------------------------------------------------------------------------

THREADED = [
    BASE,
    replace(SHARED, B=1, H=1, N=300, M=300, D=16, Dv=16),
    replace(SHARED, B=3, offsets=(0, 100, 101, 260), causal=True, tied=True),
    replace(SHARED, B=1, H=2, N=3, M=150, key=Band(400, 400), value=Band(2, 0, "none")),
]


@pytest.mark.parametrize("case", THREADED, ids=["heads", "one head", "packed", "few queries"])
def test_any_number_of_threads_gives_the_same_bits(core: Core, case: Case) -> None:
    """1, 2, 3 and 8 threads, 25 times each: 100 repeats."""
    arrays = make_arrays(case, core.dtype)
    core.set_threads(1)
    expected = capi.run_both(core, case, arrays)
    for _ in range(25):
        for threads in (1, 2, 3, 8):
            core.set_threads(threads)
            assert core.lib.rp_get_threads() == threads
            same(expected, capi.run_both(core, case, arrays))


# ---- one call, and refusals ----------------------------------------------------------------------


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("tables", ["both", "key", "value", "none"])
def test_the_one_call(core: Core, causal: int, tables: str) -> None:
    case = replace(SHARED, causal=bool(causal))
    case = replace(case, key=case.key if tables in ("both", "key") else None)
    case = replace(case, value=case.value if tables in ("both", "value") else None)
    arrays = make_arrays(case, core.dtype)
    out = capi.allocate_rows(case, "query", case.Dv, core.dtype, SENTINEL)
    status = core.lib.rp_shaw_attention(
        case.B,
        case.H,
        case.N,
        case.D,
        5,
        causal,
        arrays.q.address,
        arrays.k.address,
        arrays.v.address,
        arrays.key_table.address if arrays.key_table else None,
        arrays.value_table.address if arrays.value_table else None,
        out.address,
    )
    core.check(status)
    same({"out": out.view}, {"out": forward(core, case, arrays)})
    assert out.untouched(SENTINEL) and arrays.unmodified()


def _call_forward(
    core: Core,
    case: Case,
    arrays: Arrays,
    *,
    change: Callable[[Attention], None] = lambda call: None,
    lse: Any = 0,
    workspace_less: int = 0,
    misalign: int = 0,
    null: str = "",
    stride: tuple[str, int] | None = None,
) -> tuple[int, np.ndarray]:
    """rp_attention_forward with one thing changed; the status and out."""
    call, alive = capi.describe(core, case, arrays)
    workspace = capi.Workspace(core.workspace_bytes(call)[0] + 64)
    out = capi.allocate_rows(case, "query", case.Dv, core.dtype, SENTINEL)
    change(call)
    rows = {n: capi.rows(x) for n, x in zip("qkv", arrays.inputs[:3], strict=True)}
    rows["out"] = capi.rows(out)
    if null in rows:
        rows[null].data = None
    if stride:
        rows[stride[0]].row_stride = stride[1]
    lse_array = capi.allocate(capi.lse_shape(case), 0, core.dtype, SENTINEL)
    status = core.lib.rp_attention_forward(
        None if null == "attention" else ctypes.byref(call),
        rows["q"],
        rows["k"],
        rows["v"],
        rows["out"],
        None if lse is None else lse_array.address,
        None if null == "workspace" else workspace.address + misalign,
        workspace.size - 64 - workspace_less,
    )
    assert workspace.untouched()
    del alive
    return status, out.view


def _set(path: str, value: Any) -> Callable[[Attention], None]:
    def change(call: Attention) -> None:
        target: Any = call
        *outer, last = path.split(".")
        for name in outer:
            target = getattr(target, name)
        if isinstance(value, tuple):
            array = np.array(value, np.int64)
            call.keep = array
            setattr(target, last, array.ctypes.data)
        else:
            setattr(target, last, value)

    return change


BIG = 2**62
REFUSED: list[tuple[str, int, str, dict[str, Any]]] = [
    ("struct_size", capi.ARGUMENT, "struct_size", {"change": _set("struct_size", 8)}),
    ("zero struct_size", capi.ARGUMENT, "struct_size", {"change": _set("struct_size", 0)}),
    ("negative B", capi.SHAPE, "B", {"change": _set("B", -1)}),
    ("negative H", capi.SHAPE, "H", {"change": _set("H", -1)}),
    ("negative N", capi.SHAPE, "N", {"change": _set("N", -1)}),
    ("negative M", capi.SHAPE, "M", {"change": _set("M", -1)}),
    ("no D", capi.SHAPE, "D", {"change": _set("D", 0)}),
    ("negative Dv", capi.SHAPE, "Dv", {"change": _set("Dv", -5)}),
    ("huge N", capi.SHAPE, "N", {"change": _set("N", BIG)}),
    ("huge D", capi.SHAPE, "D", {"change": _set("D", BIG)}),
    ("overflowing left", capi.ARGUMENT, "key", {"change": _set("key.left", 2**63 - 1)}),
    ("negative left", capi.ARGUMENT, "key.left", {"change": _set("key.left", -1)}),
    ("negative right", capi.ARGUMENT, "value", {"change": _set("value.right", -1)}),
    ("beyond", capi.ARGUMENT, "value.beyond", {"change": _set("value.beyond", 2)}),
    ("narrow table", capi.SHAPE, "key.row_stride", {"change": _set("key.row_stride", 23)}),
    ("table heads", capi.SHAPE, "value.head_stride", {"change": _set("value.head_stride", 3)}),
    ("scale inf", capi.ARGUMENT, "scale", {"change": _set("scale", float("inf"))}),
    ("scale nan", capi.ARGUMENT, "scale", {"change": _set("scale", float("nan"))}),
    ("long length", capi.SHAPE, "lengths[1]", {"change": _set("lengths", (1, 71))}),
    ("negative length", capi.SHAPE, "lengths[0]", {"change": _set("lengths", (-1, 1))}),
    ("long keys", capi.SHAPE, "key_lengths[0]", {"change": _set("key_lengths", (71, 1))}),
    ("falling", capi.SHAPE, "offsets[2]", {"change": _set("offsets", (0, 5, 4))}),
    ("first offset", capi.SHAPE, "offsets[0]", {"change": _set("offsets", (1, 5, 6))}),
    ("falling keys", capi.SHAPE, "key_offsets[1]", {"change": _set("key_offsets", (0, -1, 4))}),
    ("workspace size", capi.MEMORY, "workspace", {"workspace_less": 1}),
    ("workspace alignment", capi.ARGUMENT, "workspace", {"misalign": 32}),
    ("no workspace", capi.ARGUMENT, "workspace", {"null": "workspace"}),
    ("no attention", capi.ARGUMENT, "NULL", {"null": "attention"}),
    *((f"no {n}", capi.ARGUMENT, n, {"null": n}) for n in ("q", "k", "v", "out")),
    ("narrow out", capi.SHAPE, "out", {"stride": ("out", 23)}),
    *((f"backward {n}", capi.SHAPE, n, {"stride": (n, -24)}) for n in ("q", "k", "v", "out")),
    ("huge stride", capi.SHAPE, "q", {"stride": ("q", BIG)}),
]


@pytest.mark.parametrize(
    ("status", "word", "given"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_bad_input_is_refused(
    libraries: dict[str, Path], status: int, word: str, given: Any
) -> None:
    """With the status that names the kind, and a sentence that names the argument."""
    core = get_core(libraries, "f32-portable")
    arrays = make_arrays(BASE, core.dtype)
    got, out = _call_forward(core, BASE, arrays, **given)
    message = core.lib.rp_last_error().decode()
    names = core.lib.rp_status_name
    assert got == status, f"{names(got)!r}, expected {names(status)!r}: {message}"
    assert word in message, message
    assert np.all(out == SENTINEL), "a refused call wrote its output"


def test_lengths_and_offsets_exclude_each_other(libraries: dict[str, Path]) -> None:
    core = get_core(libraries, "f32-portable")
    case = replace(SHARED, offsets=(0, 30, 70))
    given = _set("lengths", (30, 40))
    status, _ = _call_forward(core, case, make_arrays(case, core.dtype), change=given)
    assert status == capi.ARGUMENT
    assert "lengths" in core.lib.rp_last_error().decode()


@pytest.mark.parametrize("missing", ["gradients", "lse", "out", "dout", "q", "k", "v"])
def test_backward_refuses_null(libraries: dict[str, Path], missing: str) -> None:
    """ "q", "k" and "v" are those of the gradients."""
    core = get_core(libraries, "f32-portable")
    arrays = make_arrays(BASE, core.dtype)
    forwarded = capi.run_forward(core, BASE, arrays)
    call, alive = capi.describe(core, BASE, arrays)
    workspace = capi.Workspace(core.workspace_bytes(call)[1])
    gradients = capi.Gradients()
    held = []
    for name, width, side in (("q", BASE.D, "query"), ("k", BASE.D, "key"), ("v", BASE.Dv, "key")):
        held.append(capi.allocate_rows(BASE, side, width, core.dtype, SENTINEL))
        setattr(gradients, name, capi.rows(held[-1]))
        if name == missing:
            getattr(gradients, name).data = None
    out, dout = capi.rows(forwarded.out), capi.rows(arrays.dout)
    if missing == "out":
        out.data = None
    if missing == "dout":
        dout.data = None
    status = core.lib.rp_attention_backward(
        ctypes.byref(call),
        capi.rows(arrays.q),
        capi.rows(arrays.k),
        capi.rows(arrays.v),
        out,
        None if missing == "lse" else forwarded.lse.address,
        dout,
        None if missing == "gradients" else ctypes.byref(gradients),
        workspace.address,
        workspace.size,
    )
    message = core.lib.rp_last_error().decode()
    assert status == capi.ARGUMENT, message
    assert missing in message and "NULL" in message, message
    assert all(np.all(x.view == SENTINEL) for x in held)
    del alive


def test_workspace_results_may_be_null(libraries: dict[str, Path]) -> None:
    core = get_core(libraries, "f32-portable")
    call, alive = capi.describe(core, BASE, make_arrays(BASE, core.dtype))
    assert core.lib.rp_attention_workspace(ctypes.byref(call), None, None) == capi.OK
    assert core.lib.rp_attention_workspace(None, None, None) == capi.ARGUMENT
    del alive


def test_threads_out_of_range_are_refused(libraries: dict[str, Path]) -> None:
    core = get_core(libraries, "f32-portable")
    for threads in (-1, 1025):
        assert core.lib.rp_set_threads(threads) == capi.ARGUMENT
        assert "threads" in core.lib.rp_last_error().decode()
    core.set_threads(0)
    assert core.lib.rp_get_threads() >= 1


def test_an_unknown_instruction_set_is_refused(libraries: dict[str, Path]) -> None:
    """By the first call that computes, and again by the next."""
    with capi.environment("RELPOS_ISA", "vax"):
        core = capi.Core(libraries["f32"])
    call, alive = capi.describe(core, BASE, make_arrays(BASE, core.dtype))
    for _ in range(2):
        assert core.lib.rp_attention_workspace(ctypes.byref(call), None, None) == capi.ARGUMENT
        message = core.lib.rp_last_error().decode()
        assert "RELPOS_ISA" in message and "vax" in message
    assert core.build_info()["isa"] not in capi.ISAS
    del alive


def test_names_of_statuses(libraries: dict[str, Path]) -> None:
    core = get_core(libraries, "f32-portable")
    names = {0: "OK", 10: "ERROR_ARGUMENT", 11: "ERROR_SHAPE", 20: "ERROR_MEMORY"}
    names |= {30: "ERROR_FILE", 40: "ERROR_ORDER", 50: "ERROR_DEVICE"}
    for status, name in names.items():
        assert core.lib.rp_status_name(status) == f"RP_{name}".encode()
    assert core.lib.rp_status_name(7) == b"unknown status"


def test_build_info(core: Core) -> None:
    info = core.build_info()
    assert info["real_bytes"] == np.dtype(core.dtype).itemsize
    assert info["isa"] in info["isa_available"].split()
    assert info["threads"] == core.lib.rp_get_threads()
    assert all(info[name] for name in ("version", "compiler", "blas"))


# ---- memory --------------------------------------------------------------------------------------

MEMORY_PROBE = """
import resource, sys
import numpy as np, capi
from pathlib import Path
from cases import Case, make_arrays
from relpos.reference import Band
from relpos import reference

core = capi.Core(Path(sys.argv[1]))
N = int(sys.argv[2])
case = Case(N=N, M=N, D=64, Dv=64, key=Band(16, 16), value=Band(16, 16))
arrays = make_arrays(case, core.dtype)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
call, alive = capi.describe(core, case, arrays)
sizes = core.workspace_bytes(call)
before = peak()
forward = capi.run_forward(core, case, arrays)
capi.run_backward(core, case, arrays, forward)
print(*sizes, peak() - before)
"""


def _memory(libraries: dict[str, Path], N: int) -> list[int]:
    done = capi.run_script(MEMORY_PROBE, str(libraries["f32"]), str(N))
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_peak_memory_is_small(libraries: dict[str, Path]) -> None:
    """One head of 16,384: workspaces, and all that the process grows by, under 64 MiB.

    The growth includes what the harness needs: results, gradients, copies of out and lse, masks of
    the canaries (35 MiB of arrays), so that is allowed on top.
    """
    N = 16384
    forward_bytes, backward_bytes, growth = _memory(libraries, N)
    limit = 64 * 2**20
    assert forward_bytes <= limit and backward_bytes <= limit
    harness = 4 * N * (5 * 64 + 2) + 2 * (N * 64 * 5) + 2**22
    assert growth - harness <= limit, (growth, harness)


def test_workspace_is_linear_in_the_length(libraries: dict[str, Path]) -> None:
    core = get_core(libraries, "f32-portable")
    sizes = []
    for N in (4096, 8192, 16384):
        band = Band(16, 16)
        case = Case(N=N, M=N, D=64, Dv=64, key=band, value=band)
        small = replace(case, N=1, M=1)
        call, alive = capi.describe(core, small, make_arrays(small, core.dtype))
        call.N = call.M = N
        sizes.append(sum(core.workspace_bytes(call)))
        del alive
    assert sizes[2] - sizes[1] <= 2.1 * (sizes[1] - sizes[0]) + 2**16


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
        truth.append(reference.batched_forward(case.batch(), *arrays.views()[:3], None, None)[0])
    error = [np.abs(a - b).max() for a, b in zip(results.values(), truth, strict=True)]
    assert error[0] <= 8 * error[1] + 4 * np.finfo(core.dtype).eps
