# SPDX-License-Identifier: Apache-2.0
"""What must hold whatever the numbers are: rows that sum to one, positions, batches, packs, layouts.

Where a property says "the same", the same bits are meant unless a tolerance stands there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import capi
from capi import Core
from case_arrays import make_arrays
from cases import Distances
from cores import every_core
from properties import BASE, SHARED, TABLES, call_forward, close, correct, forward, same
from relpos.reference import Band

core = every_core  # a fixture

# ---- rows of attention ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_rows_sum_to_one(core: Core, causal: bool) -> None:
    case = replace(BASE, causal=causal)
    arrays = make_arrays(case, core.dtype)
    arrays.v.view[...], arrays["value[0]"].view[...] = 1, 0
    arrays.remember()
    np.testing.assert_allclose(forward(core, case, arrays), 1, rtol=1e-6)


def test_value_table_of_ones_counts_each_row_once(core: Core) -> None:
    arrays = make_arrays(BASE, core.dtype)
    arrays.v.view[...], arrays["value[0]"].view[...] = 0, 1
    arrays.remember()
    np.testing.assert_allclose(forward(core, BASE, arrays), 1, rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_zero_tables_are_plain_attention(core: Core, causal: bool) -> None:
    case = replace(BASE, causal=causal)
    plain = replace(case, key=None, value=None)
    arrays, plain_arrays = make_arrays(case, core.dtype), make_arrays(plain, core.dtype)
    for table in arrays.tables.values():
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
    q, k, table = arrays.q.view, arrays.k.view, arrays["key[0]"].view
    for b, start in enumerate(case.starts or ()):
        for h, i in np.ndindex(case.H, case.N):
            row = min(max(0 - (i + start), -1), 2) + 1
            expected = 0.5 * (q[b, h, i] @ (k[b, h, 0] + table[row]))
            assert abs(lse[b, h, i] - expected) < 1e-5


def test_lse_may_be_null(core: Core) -> None:
    arrays = make_arrays(BASE, core.dtype)
    expected = capi.run_forward(core, BASE, arrays).out.view
    status, out = call_forward(core, BASE, arrays, lse=None)
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
    for name, table in arrays.tables.items():
        later[name].view[...] = table.view
    # The seven in front are at score -3e4 in every row: probability exactly zero.
    for x in (arrays, later):
        x.q.view[..., 0] = 100
        x["key[0]"].view[:, 0] = 0
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
        for table, rows in zip(arrays.tables.values(), middle, strict=True):
            table.view[...] = 10  # never met
            table.view[K - N + 1 : K + N] = rows
        arrays.remember()
        result = capi.run_both(core, wide, arrays)
        for name in TABLES:
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
    for name in TABLES:
        table = wider[name].view
        table[...] = 0
        table[1:-1] = arrays[name].view
    wider.remember()
    got, expected = capi.run_both(core, none, arrays), capi.run_both(core, clip, wider)
    for name in TABLES:
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


CACHED = {
    "shaw": {},
    "query": {"query": Band(50, 0), "position_bias": True},
    "bias": {"bias": Distances(20, 20, "clip", 9, "random"), "window": (12, 0), "softcap": 4.0},
}


@pytest.mark.parametrize("terms", CACHED)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_a_cache_fed_token_by_token_is_one_causal_call(core: Core, layout: str, terms: str) -> None:
    case = replace(BASE, N=37, M=37, causal=True, layout=layout, **CACHED[terms])  # type: ignore
    arrays = make_arrays(case, core.dtype)
    whole = forward(core, case, arrays)
    for given in (True, False):  # query_start given, or its default
        for m in range(1, case.M + 1):
            starts = (m - 1,) * case.B if given else None
            step = replace(case, N=1, starts=starts, key_lengths=(m,) * case.B)
            part = make_arrays(step, core.dtype)
            part.k, part.v = arrays.k, arrays.v
            part.tables = arrays.tables
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
    for name in TABLES:
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
