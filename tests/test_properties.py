# SPDX-License-Identifier: Apache-2.0
"""What must hold whatever the numbers are, on every instruction set of libcore.

Where a property says "the same", the same bits are meant unless a tolerance stands there.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capi
from capi import Attention, Core
from cases import (
    SENTINEL,
    Arrays,
    Case,
    Distances,
    Edges,
    Labels,
    Mask,
    Oracle,
    compare,
    hold,
    make_arrays,
    oracle,
    oracle_of,
)
from relpos import reference
from relpos.reference import Band, Dropout
from test_attention import get_core

BASE = Case(
    B=2, H=3, N=70, M=70, D=24, Dv=24, key=Band(5, 5), value=Band(5, 5), per_head=True, seed=77
)
SHARED = replace(BASE, per_head=False)
TABLES = ("key[0]", "value[0]")


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
    with np.errstate(invalid="ignore"):
        error = float(np.max(np.where(a == b, 0, np.abs(a - b)), initial=0))  # lse may be -inf
    largest = float(np.max(np.abs(a), initial=0, where=np.isfinite(a)))
    bound = 64 * float(np.finfo(core.dtype).eps) * max(1.0, largest)
    assert error <= bound, f"{case}: {what} differs by {error:.3g}, bound {bound:.3g}"


def correct(core: Core, case: Case, arrays: Arrays) -> dict[str, np.ndarray]:
    """Results and gradients, compared with the reference for these arrays."""
    results = capi.run_both(core, case, arrays)
    judge(case, results, oracle_of(case, arrays))
    return results


def judge(case: Case, results: dict[str, np.ndarray], truth: Oracle) -> None:
    faults = [compare(name, results[name], truth) for name in truth.exact]
    wrong = [fault for fault in faults if fault]
    if wrong:
        pytest.fail("\n".join([str(case), *wrong]))


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


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True])
def test_the_gradient_of_a_tied_table_is_the_sum_of_both(core: Core, per_head: bool) -> None:
    tied = replace(BASE, tied=True, per_head=per_head)
    apart = replace(tied, tied=False)
    arrays, copies = make_arrays(tied, core.dtype), make_arrays(apart, core.dtype)
    for table in copies.tables.values():
        table.view[...] = arrays["key[0]"].view
    for name in ("q", "k", "v", "dout"):
        getattr(copies, name).view[...] = getattr(arrays, name).view
    copies.remember()
    a, b = capi.run_both(core, tied, arrays), capi.run_both(core, apart, copies)
    total = b["key[0]"] + b["value[0]"]
    close(core, tied, total, a["key[0]"])
    same({"out": a["out"], "q": a["q"]}, {"out": b["out"], "q": b["q"]})


def test_equal_tables_per_head_are_a_shared_table(core: Core) -> None:
    arrays, shared = make_arrays(BASE, core.dtype), make_arrays(SHARED, core.dtype)
    for name, table in shared.tables.items():
        arrays[name].view[...] = table.view
    for name in ("q", "k", "v", "dout"):
        getattr(arrays, name).view[...] = getattr(shared, name).view
    arrays.remember()
    a, b = capi.run_both(core, BASE, arrays), capi.run_both(core, SHARED, shared)
    for name in TABLES:
        close(core, BASE, a.pop(name).sum(axis=0), b.pop(name), name)
    same(a, b)


def test_each_head_has_its_own_table(core: Core) -> None:
    """Changing the table of head 1 changes head 1 alone."""
    arrays = make_arrays(BASE, core.dtype)
    before = forward(core, BASE, arrays).copy()
    for table in arrays.tables.values():
        table.view[1] += 1
    arrays.remember()
    changed = np.any(forward(core, BASE, arrays) != before, axis=(0, 2, 3))
    assert changed.tolist() == [False, True, False]


def test_table_gradients_are_added_to_what_is_there(core: Core) -> None:
    case = replace(SHARED, value=Band(2, 9))
    arrays = make_arrays(case, core.dtype)
    forwarded = capi.run_forward(core, case, arrays)
    zero = capi.run_backward(core, case, arrays, forwarded, 0.0)
    more = capi.run_backward(core, case, arrays, forwarded, 3.0)
    for name in TABLES:
        close(core, case, zero[name] + core.dtype(3), more[name], name)
    same({n: zero[n] for n in "qkv"}, {n: more[n] for n in "qkv"})


def test_table_gradients_may_be_left_out(core: Core) -> None:
    arrays = make_arrays(BASE, core.dtype)
    forwarded = capi.run_forward(core, BASE, arrays)
    expected = capi.run_backward(core, BASE, arrays, forwarded)
    got = capi.run_backward(core, BASE, arrays, forwarded, None)
    same({n: expected[n] for n in "qkv"}, got)


# ---- maps ----------------------------------------------------------------------------------------

DISTANCES = [Band(5, 5), Band(3, 70, "none"), Band(0, 0), Band(100, 100), Band(300, 250)]
EVERY_KIND = Case(B=2, H=2, N=45, M=70, D=24, Dv=24, seed=78)
TWIN_CASES = [
    replace(EVERY_KIND, causal=True, per_head=True),
    replace(EVERY_KIND, lengths=(45, 3), key_lengths=(66, 20), starts=(4, -2), position_bias=True),
    replace(EVERY_KIND, offsets=(0, 5, 60), dropout=Dropout(0.2, (1, 2))),
]


def with_map(case: Case, map: Any) -> Case:
    """Every kind of term, all with this map."""
    return replace(case, **dict.fromkeys(reference.KINDS, map))


def twins(core: Core, one: Case, other: Case) -> list[dict[str, np.ndarray]]:
    """Results of two cases with the same numbers, whatever their maps."""
    arrays, others = make_arrays(one, core.dtype), make_arrays(other, core.dtype)
    for name, table in arrays.tables.items():
        others[name].view[...] = table.view
    others.remember()
    return [capi.run_both(core, one, arrays), capi.run_both(core, other, others)]


@pytest.mark.parametrize("case", TWIN_CASES, ids=["causal", "lengths", "packed"])
@pytest.mark.parametrize("band", DISTANCES, ids=str)
def test_buckets_that_are_distances_give_the_bits_of_the_band(
    core: Core, band: Band, case: Case
) -> None:
    buckets = Distances(band.left, band.right, band.beyond, 0, "identity")
    same(*twins(core, with_map(case, band), with_map(case, buckets)))


@pytest.mark.parametrize("case", TWIN_CASES, ids=["causal", "lengths", "packed"])
@pytest.mark.parametrize("band", DISTANCES, ids=str)
def test_positions_from_0_up_are_the_band(core: Core, band: Band, case: Case) -> None:
    positions = Distances(band.left, band.right, band.beyond, 0, "", "own")
    case = with_map(case, band)
    judge(case, twins(core, case, with_map(case, positions))[1], oracle(case))


@pytest.mark.parametrize("case", TWIN_CASES, ids=["causal", "lengths", "packed"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_labels_that_are_distances_are_the_band(core: Core, size: int, case: Case) -> None:
    labelled, case = with_map(case, Labels(11, size, "band")), with_map(case, Band(5, 5))
    judge(case, twins(core, case, labelled)[1], oracle(case))


def test_shared_labels_are_equal_labels_for_each(core: Core) -> None:
    """The same bits, whatever the bytes of a label, its head and its sequence."""
    case = with_map(replace(EVERY_KIND, starts=(0, 0)), Labels(11, 1, "band", False, False))
    for size, per_head, per_sequence, ends in ((2, True, False, False), (4, True, True, True)):
        other = with_map(case, Labels(11, size, "band", per_head, per_sequence, ends))
        same(*twins(core, case, other))


def test_edges_between_all_pairs_are_labels(core: Core) -> None:
    case = with_map(EVERY_KIND, Labels(6))
    listed = with_map(EVERY_KIND, Edges(6, 1, "full"))
    arrays = make_arrays(listed, core.dtype)
    labelled = make_arrays(case, core.dtype)
    for name, map in arrays.maps.items():
        edges = map.fields["edge_labels"].view.reshape(case.B, 1, case.N, case.M)
        labelled.maps[name].fields["labels"].view[...] = edges
        labelled[name].view[...] = arrays[name].view
    labelled.remember()
    one, other = capi.run_both(core, case, labelled), capi.run_both(core, listed, arrays)
    for name, x in one.items():
        close(core, case, x, other[name], name)


def test_edges_of_one_pair_add_up(core: Core) -> None:
    """An edge twice is an edge to a table of twice the numbers; its gradient is twice as large."""
    once, twice = (
        replace(EVERY_KIND, M=45, **{kind: Edges(4) for kind in reference.KINDS}) for _ in range(2)
    )
    arrays, repeated = make_arrays(once, core.dtype), make_arrays(twice, core.dtype)
    for name, map in arrays.maps.items():
        arrays[name].view[...] = 2 * repeated[name].view
        starts, keys, labels = (map.fields[f"edge_{x}"].view for x in ("starts", "keys", "labels"))
        fields = repeated.maps[name].fields
        fields["edge_starts"] = hold(2 * starts, np.int64)
        fields["edge_keys"] = hold(np.repeat(keys, 2), np.int32)
        fields["edge_labels"] = hold(np.repeat(labels, 2), np.int32)
    for x in (arrays, repeated):
        x.remember()
    one, other = capi.run_both(core, once, arrays), capi.run_both(core, twice, repeated)
    for name, x in one.items():
        close(core, once, x, other[name] / (2 if "[" in name else 1), name)


@pytest.mark.parametrize("kind", reference.KINDS)
@pytest.mark.parametrize("map", [Labels(3, fill="none"), Edges(3, 1, "none")], ids=str)
def test_no_relation_anywhere_is_no_term(core: Core, kind: str, map: Any) -> None:
    case = replace(EVERY_KIND, **{kind: map})
    arrays = make_arrays(case, core.dtype)
    arrays[f"{kind}[0]"].view[...] = 1e30
    arrays.remember()
    got = capi.run_both(core, case, arrays)
    expected = capi.run_both(core, EVERY_KIND, make_arrays(EVERY_KIND, core.dtype))
    assert not got.pop(f"{kind}[0]").any()
    for name, x in expected.items():
        close(core, case, x, got[name], name)


def test_two_terms_add_up(core: Core) -> None:
    """Two halves of a table are the table."""
    band = Band(9, 9)
    for kind in reference.KINDS:
        case = replace(EVERY_KIND, **{kind: band})
        halves = replace(EVERY_KIND, **{kind: (band, band)})
        arrays, halved = make_arrays(case, core.dtype), make_arrays(halves, core.dtype)
        for number in range(2):
            halved[f"{kind}[{number}]"].view[...] = arrays[f"{kind}[0]"].view / 2
        halved.remember()
        one, other = capi.run_both(core, case, arrays), capi.run_both(core, halves, halved)
        for name, x in one.items():
            close(core, case, x, other[name], name)
        close(core, case, one[f"{kind}[0]"], other[f"{kind}[1]"], kind)


def test_position_bias_is_an_addition_to_the_queries_for_the_relation(core: Core) -> None:
    """Where keys are zero, the queries themselves may have it."""
    case = replace(EVERY_KIND, key=Band(20, 20), position_bias=True)
    plain = replace(case, position_bias=False)
    arrays, added = make_arrays(case, core.dtype), make_arrays(plain, core.dtype)
    assert arrays.position_bias is not None
    arrays.k.view[...] = added.k.view[...] = 0
    added.q.view[...] += arrays.position_bias.view[:, None]
    for x in (arrays, added):
        x.remember()
    one, other = capi.run_both(core, case, arrays), capi.run_both(core, plain, added)
    bias = one.pop("position_bias")
    for name in ("out", "lse", "q", "v", "key[0]"):
        close(core, case, one[name], other[name], name)
    total = one["q"].sum(axis=(0, 2))
    assert np.max(np.abs(total - bias)) <= 1e-4 * np.max(np.abs(total))


def test_a_constant_bias_changes_the_lse_alone(core: Core) -> None:
    case = replace(EVERY_KIND, bias=Band(3, 3))
    arrays = make_arrays(case, core.dtype)
    arrays["bias[0]"].view[...] = 2
    arrays.remember()
    got = capi.run_both(core, case, arrays)
    expected = capi.run_both(core, EVERY_KIND, make_arrays(EVERY_KIND, core.dtype))
    close(core, case, expected.pop("lse") + core.dtype(2), got["lse"])
    for name, x in expected.items():
        close(core, case, x, got[name], name)
    assert abs(got["bias[0]"].sum()) < 1e-4


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


# ---- everything at once --------------------------------------------------------------------------

EVERYTHING = Case(
    B=2,
    H=2,
    N=150,
    M=150,
    D=24,
    Dv=24,
    key=(Band(5, 5), Labels(7)),
    query=(Distances(9, 9, "clip", 4, "folded"), Band(300, 300)),
    bias=(Distances(50, 50, "clip", 16, "random"), Edges(3, 4)),
    value=(Labels(7, 2, per_head=True), Distances(3, 3, "none", 0, "", "random")),
    per_head=("query", "bias"),
    position_bias=True,
    window=(90, 40),
    mask=Mask(share=0.8),
    softcap=8.0,
    dropout=Dropout(0.2, (8, 9)),
    seed=79,
)


@pytest.mark.parametrize("causal", [False, True])
def test_everything_at_once(core: Core, causal: bool) -> None:
    case = replace(EVERYTHING, causal=causal)
    correct(core, case, make_arrays(case, core.dtype))


def test_gradients_of_parameters_are_added_to_what_is_there(core: Core) -> None:
    arrays = make_arrays(EVERYTHING, core.dtype)
    forwarded = capi.run_forward(core, EVERYTHING, arrays)
    zero = capi.run_backward(core, EVERYTHING, arrays, forwarded, 0.0)
    more = capi.run_backward(core, EVERYTHING, arrays, forwarded, 3.0)
    left_out = capi.run_backward(core, EVERYTHING, arrays, forwarded, None)
    for name in (*arrays.tables, "position_bias"):
        close(core, EVERYTHING, zero[name] + core.dtype(3), more[name], name)
    same({n: zero[n] for n in "qkv"}, {n: more[n] for n in "qkv"})
    same({n: zero[n] for n in "qkv"}, left_out)


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
    EVERYTHING,
    replace(EVERYTHING, B=1, H=1, N=300, M=300, causal=True),
]


@pytest.mark.parametrize(
    "case", THREADED, ids=["heads", "one head", "packed", "few queries", "everything", "long"]
)
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
        *(arrays[name].address if name in arrays.tables else None for name in TABLES),
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
    rows = {n: core.rows(x) for n, x in zip("qkv", arrays.inputs[:3], strict=True)}
    rows["out"] = core.rows(out)
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
            kind, _, number = name.partition("[")
            target = getattr(target, kind)
            target = target[int(number[:-1])] if number else target
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
    ("overflowing left", capi.ARGUMENT, "key[0].left", {"change": _set("key[0].left", 2**63 - 1)}),
    ("negative left", capi.ARGUMENT, "key[0].left", {"change": _set("key[0].left", -1)}),
    ("negative right", capi.ARGUMENT, "value[0]", {"change": _set("value[0].right", -1)}),
    ("beyond", capi.ARGUMENT, "value[0].beyond", {"change": _set("value[0].beyond", 2)}),
    ("narrow table", capi.SHAPE, "key[0].row_stride", {"change": _set("key[0].row_stride", 23)}),
    (
        "table heads",
        capi.SHAPE,
        "value[0].head_stride",
        {"change": _set("value[0].head_stride", 3)},
    ),
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


REFUSED += [
    ("rows of a band", capi.SHAPE, "key[0].rows", {"change": _set("key[0].rows", 10)}),
    ("map", capi.ARGUMENT, "key[0].map", {"change": _set("key[0].map", 3)}),
    ("window_left", capi.ARGUMENT, "window_left", {"change": _set("window_left", -2)}),
    ("window_right", capi.ARGUMENT, "window_right", {"change": _set("window_right", BIG)}),
    ("negative softcap", capi.ARGUMENT, "softcap", {"change": _set("softcap", -1.0)}),
    ("softcap nan", capi.ARGUMENT, "softcap", {"change": _set("softcap", float("nan"))}),
    ("negative dropout", capi.ARGUMENT, "dropout", {"change": _set("dropout", -0.1)}),
    ("dropout of all", capi.ARGUMENT, "dropout", {"change": _set("dropout", 1.0)}),
    ("dropout nan", capi.ARGUMENT, "dropout", {"change": _set("dropout", float("nan"))}),
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


MAPS = Case(
    B=2,
    H=2,
    N=9,
    M=9,
    key=(Distances(2, 2, "clip", 3, "random"), Labels(5)),
    query=Distances(2, 2, "clip", 0, "", "random"),
    bias=(Edges(3, 3), Labels(4, 2, per_head=True)),
    position_bias=True,
    mask=Mask(per_head=True),
    lengths=(7, 9),
)


def _write(path: str, index: Any, value: int) -> Callable[[Arrays], None]:
    """Changes an element of a map's array: "key[0].buckets"."""

    def change(arrays: Arrays) -> None:
        name, _, member = path.partition(".")
        fields = arrays.maps[name].fields
        fields[member].view[index] = value
        arrays.remember()

    return change


REFUSED_MAPS: list[tuple[str, int, tuple[str, ...], dict[str, Any]]] = [
    ("no buckets' rows", capi.SHAPE, ("key[0].rows=0",), {"change": _set("key[0].rows", 0)}),
    (
        "bucket",
        capi.ARGUMENT,
        ("key[0].buckets[3]=3", "2"),
        {"write": _write("key[0].buckets", 3, 3)},
    ),
    (
        "bucket -2",
        capi.ARGUMENT,
        ("key[0].buckets[0]=-2",),
        {"write": _write("key[0].buckets", 0, -2)},
    ),
    (
        "far query",
        capi.ARGUMENT,
        ("query[0].query_positions=1073741824", "row 6", "sequence 0"),
        {"write": _write("query[0].query_positions", (0, 6), 2**30)},
    ),
    (
        "far key",
        capi.ARGUMENT,
        ("query[0].key_positions=-1073741824", "row 8", "sequence 1"),
        {"write": _write("query[0].key_positions", (1, 8), -(2**30))},
    ),
    (
        "one side",
        capi.ARGUMENT,
        ("key_positions", "NULL"),
        {"change": _set("query[0].key_positions", None)},
    ),
    (
        "no labels",
        capi.ARGUMENT,
        ("key[1].labels", "NULL"),
        {"change": _set("key[1].labels", None)},
    ),
    (
        "label bytes",
        capi.ARGUMENT,
        ("key[1].label_bytes=3",),
        {"change": _set("key[1].label_bytes", 3)},
    ),
    ("label rows", capi.SHAPE, ("key[1].rows",), {"change": _set("key[1].rows", -1)}),
    (
        "label too large",
        capi.ARGUMENT,
        ("key[1]", "label 5 ", "sequence 1", "head 0", "query 3", "key 4", "4"),
        {"write": _write("key[1].labels", (1, 0, 3, 4), 5)},
    ),
    (
        "label too small",
        capi.ARGUMENT,
        ("bias[1]", "label -2 ", "sequence 0", "head 1", "query 6", "key 6"),
        {"write": _write("bias[1].labels", (0, 1, 6, 6), -2)},
    ),
    (
        "label stride",
        capi.SHAPE,
        ("key[1].labels",),
        {"change": _set("key[1].label_row_stride", -9)},
    ),
    (
        "edge start",
        capi.SHAPE,
        ("bias[0].edge_starts[0]=1",),
        {"write": _write("bias[0].edge_starts", 0, 1)},
    ),
    (
        "falling edges",
        capi.SHAPE,
        ("bias[0].edge_starts[4]=-1",),
        {"write": _write("bias[0].edge_starts", 4, -1)},
    ),
    (
        "edge key",
        capi.ARGUMENT,
        ("bias[0].edge_keys[0]=7", "sequence 0", "7 keys"),
        {"write": _write("bias[0].edge_keys", 0, 7)},
    ),
    (
        "edge label",
        capi.ARGUMENT,
        ("bias[0].edge_labels[0]=3", "2"),
        {"write": _write("bias[0].edge_labels", 0, 3)},
    ),
    (
        "edge label -1",
        capi.ARGUMENT,
        ("bias[0].edge_labels[0]=-1",),
        {"write": _write("bias[0].edge_labels", 0, -1)},
    ),
    (
        "no edge keys",
        capi.ARGUMENT,
        ("bias[0].edge_keys",),
        {"change": _set("bias[0].edge_keys", None)},
    ),
    (
        "no edge labels",
        capi.ARGUMENT,
        ("edge_labels",),
        {"change": _set("bias[0].edge_labels", None)},
    ),
    (
        "no edges",
        capi.ARGUMENT,
        ("bias[0].edge_starts",),
        {"change": _set("bias[0].edge_starts", None)},
    ),
    ("mask stride", capi.SHAPE, ("mask",), {"change": _set("mask.head_stride", -1)}),
    ("bias stride", capi.SHAPE, ("position_bias",), {"change": _set("position_bias_stride", 7)}),
]


@pytest.mark.parametrize(
    ("status", "words", "given"), [r[1:] for r in REFUSED_MAPS], ids=[r[0] for r in REFUSED_MAPS]
)
def test_bad_maps_are_refused(
    libraries: dict[str, Path], status: int, words: tuple[str, ...], given: dict[str, Any]
) -> None:
    """With the place of what is wrong; what is wrong in an array, by backward as well."""
    core = get_core(libraries, "f32-portable")
    arrays = make_arrays(MAPS, core.dtype)
    forwarded = capi.run_forward(core, MAPS, arrays)
    if "write" in given:
        given["write"](arrays)
        for run in (capi.run_forward, lambda *x: capi.run_backward(*x, forwarded)):
            with pytest.raises(capi.CoreError) as error:
                run(core, MAPS, arrays)
            assert error.value.status == status
            assert all(word in error.value.message for word in words), error.value.message
        return
    got, out = _call_forward(core, MAPS, arrays, change=given["change"])
    message = core.lib.rp_last_error().decode()
    assert got == status, message
    assert all(word in message for word in words), message
    assert np.all(out == SENTINEL), "a refused call wrote its output"


def test_keys_of_edges_may_not_fall(libraries: dict[str, Path]) -> None:
    core = get_core(libraries, "f32-portable")
    case = replace(MAPS, bias=Edges(3, 1, "full"))
    arrays = make_arrays(case, core.dtype)
    _write("bias[0].edge_keys", 3, 0)(arrays)
    status, _ = _call_forward(core, case, arrays)
    message = core.lib.rp_last_error().decode()
    assert status == capi.ARGUMENT
    assert "bias[0].edge_keys[3]=0 after 2" in message and "query 0" in message


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
        setattr(gradients, name, core.rows(held[-1]))
        if name == missing:
            getattr(gradients, name).data = None
    out, dout = core.rows(forwarded.out), core.rows(arrays.dout)
    if missing == "out":
        out.data = None
    if missing == "dout":
        dout.data = None
    status = core.lib.rp_attention_backward(
        ctypes.byref(call),
        core.rows(arrays.q),
        core.rows(arrays.k),
        core.rows(arrays.v),
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


MIRRORED = {
    "rp_rows": capi.Rows,
    "rp_rows_out": capi.Rows,
    "rp_relation": capi.Relation,
    "rp_mask": capi.Mask,
    "rp_attention": capi.Attention,
    "rp_attention_gradients": capi.Gradients,
    "rp_build_info": capi.BuildInfo,
}


def test_capi_is_the_header(tmp_path: Path) -> None:
    """Every size and offset as the compiler has them, and rp_attention_default byte by byte."""
    expected, lines = [], []
    for name, type in MIRRORED.items():
        expected.append(f"{name} {ctypes.sizeof(type)}")
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for member, *_ in type._fields_:
            expected.append(f"{name}.{member} {getattr(type, member).offset}")
            lines.append(f'printf("{name}.{member} %zu\\n", offsetof({name}, {member}));')
    lines += ["rp_attention a = rp_attention_default(); const unsigned char *x = (void *)&a;"]
    lines += ['for (size_t i = 0; i < sizeof a; i++) printf("%02x", x[i]);']
    expected.append(bytes(capi.attention_default()).hex())
    source = tmp_path / "mirror.c"
    body = "\n".join(lines)
    source.write_text(
        f"#include <relpos/relpos.h>\n#include <stdio.h>\nint main(void) {{\n{body}\n}}\n"
    )
    include = Path(__file__).resolve().parent.parent / "csrc" / "include"
    compiler = os.environ.get("CC", "cc").split()[0]
    subprocess.run(
        [compiler, "-std=c11", f"-I{include}", str(source), "-o", str(tmp_path / "mirror")],
        check=True,
    )
    said = subprocess.run([str(tmp_path / "mirror")], check=True, capture_output=True, text=True)
    assert said.stdout.split("\n") == expected


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


BIG_SHAPE = Case(N=16384, M=16384, D=64, Dv=64)
LONG: dict[str, Case] = {
    "shaw": replace(BIG_SHAPE, key=Band(16, 16), value=Band(16, 16)),
    "unclipped": replace(BIG_SHAPE, key=Band(16383, 16383), value=Band(16383, 16383)),
    "transformer-xl": replace(BIG_SHAPE, key=Band(16383, 0), position_bias=True, causal=True),
    "deberta": replace(BIG_SHAPE, **dict.fromkeys(("key", "query"), Band(256, 255))),  # type: ignore
    "t5": replace(BIG_SHAPE, bias=Distances(128, 128, "clip", 32, "folded")),
    "window and dropout": replace(BIG_SHAPE, window=(256, 0), dropout=Dropout(0.1, (1, 2))),
    "labels": replace(BIG_SHAPE, key=Labels(51), value=Labels(51)),
    "edges": replace(BIG_SHAPE, key=Edges(51), value=Edges(51)),
}
FAR = Distances(16383, 16383, "clip", 0, "", "random")
PLACED = {
    place: replace(BIG_SHAPE, **dict.fromkeys(("key", "query", "value"), map))  # type: ignore
    for place, map in (("in order", FAR._replace(positions="own")), ("anywhere", FAR))
}


@pytest.mark.parametrize("name", LONG)
def test_workspaces_of_every_scheme_are_small(libraries: dict[str, Path], name: str) -> None:
    """One head of 16,384, two threads: under 64 MiB."""
    core = get_core(libraries, "f32-portable")
    core.set_threads(2)
    case = replace(LONG[name], N=1, M=1)
    arrays = make_arrays(case, core.dtype)
    call, alive = capi.describe(core, case, arrays)
    call.N = call.M = 16384
    starts = hold(np.zeros(16385), np.int64)
    for kind in reference.KINDS:
        for relation in getattr(call, kind):
            relation.label_row_stride = 16384
            if relation.map == 2:
                relation.edge_starts = starts.address
    sizes = core.workspace_bytes(call)
    core.set_threads(0)
    assert max(sizes) <= 64 * 2**20, sizes
    del alive


@pytest.mark.parametrize("name", PLACED)
def test_workspaces_between_positions_are_small(libraries: dict[str, Path], name: str) -> None:
    """The same, where what is needed depends on the positions: three unclipped terms."""
    core = get_core(libraries, "f32-portable")
    core.set_threads(2)
    case = replace(PLACED[name], D=1, Dv=1)
    call, alive = capi.describe(core, case, make_arrays(case, core.dtype))
    call.D = call.Dv = 64
    for kind in ("key", "query", "value"):
        getattr(call, kind)[0].row_stride = 64
    sizes = core.workspace_bytes(call)
    core.set_threads(0)
    assert max(sizes) <= 64 * 2**20, sizes
    del alive


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
        truth.append(reference.batched_forward(case.batch(arrays), *arrays.views()[:3])[0])
    error = [np.abs(a - b).max() for a, b in zip(results.values(), truth, strict=True)]
    assert error[0] <= 8 * error[1] + 4 * np.finfo(core.dtype).eps
