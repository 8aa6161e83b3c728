# SPDX-License-Identifier: Apache-2.0
"""What must hold of terms: their tables, the maps that choose from them, and everything at once.

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
from cases import Case, Distances, Edges, Labels
from cores import every_core
from guarded_arrays import Strided, hold
from properties import (
    BASE,
    EVERY_KIND,
    EVERYTHING,
    SHARED,
    TABLES,
    TWIN_CASES,
    close,
    correct,
    forward,
    judge,
    same,
)
from relpos import reference
from relpos.reference import Band
from tolerances import oracle

core = every_core  # a fixture

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


@pytest.mark.parametrize("rows", [4, 200], ids=["by tables", "by pairs"])
def test_terms_over_one_list_of_edges_have_the_bits_of_terms_over_copies(
    core: Core, rows: int
) -> None:
    """Where edges lie is found once for all terms over them; labels may differ."""
    case = replace(EVERY_KIND, M=600, **dict.fromkeys(reference.KINDS, Edges(rows, 3)))
    copied, shared = make_arrays(case, core.dtype), make_arrays(case, core.dtype)
    for arrays in (copied, shared):
        first = arrays.maps["key[0]"].fields
        for map in arrays.maps.values():
            for name in ("edge_starts", "edge_keys"):
                given = first[name]
                map.fields[name] = given if arrays is shared else hold(given.view, given.view.dtype)
            labels = np.resize(map.fields["edge_labels"].view, len(first["edge_keys"].view))
            map.fields["edge_labels"] = hold(labels, np.int32)
        arrays.remember()
    same(capi.run_both(core, case, copied), capi.run_both(core, case, shared))


PLACED = Distances(5, 4, positions="random")
FAR = Distances(400, 390, positions="random")
LABELLED = Labels(6, bytes=2, per_head=True, per_sequence=False)
NEARLY_ONE_MAP: dict[str, tuple[Any, Any]] = {
    "left": (PLACED, PLACED._replace(left=4)),
    "right": (PLACED, PLACED._replace(right=3)),
    "beyond": (PLACED, PLACED._replace(beyond="none")),
    "buckets": (PLACED, PLACED._replace(buckets="folded")),
    "head stride": (LABELLED, LABELLED._replace(per_head=False)),
    "long table": (LABELLED, LABELLED._replace(rows=400)),
    "left, long tables": (FAR, FAR._replace(left=300)),
    "beyond, long tables": (FAR, FAR._replace(beyond="none")),
    "nothing, long tables": (FAR, FAR),
    "nothing, long tables by labels": (LABELLED._replace(rows=400), LABELLED._replace(rows=400)),
}


@pytest.mark.parametrize("differs", NEARLY_ONE_MAP)
def test_terms_over_the_same_arrays_have_the_bits_of_terms_over_copies(
    core: Core, differs: str
) -> None:
    """What terms look up in one map is found once; maps that differ in anything are two."""
    one, other = NEARLY_ONE_MAP[differs]
    case = replace(EVERY_KIND, key=one, query=one, bias=other, value=other)
    copied, shared = make_arrays(case, core.dtype), make_arrays(case, core.dtype)
    for arrays in (copied, shared):
        for map in arrays.maps.values():
            for name, given in arrays.maps["key[0]"].fields.items():
                if isinstance(given, Strided):
                    copy = replace(given, raw=given.raw.copy())
                    map.fields[name] = given if arrays is shared else copy
        arrays.remember()
    same(capi.run_both(core, case, copied), capi.run_both(core, case, shared))


def test_terms_over_edges_of_other_keys_that_start_alike(core: Core) -> None:
    case = replace(EVERY_KIND, key=Edges(4, 3), value=Edges(4, 3))
    copied, shared = make_arrays(case, core.dtype), make_arrays(case, core.dtype)
    for arrays in (copied, shared):
        first, second = (arrays.maps[name].fields for name in ("key[0]", "value[0]"))
        starts, keys = first["edge_starts"], first["edge_keys"].view
        rows = np.split(case.M - 1 - keys, starts.view[1:-1])
        second["edge_starts"] = starts if arrays is shared else hold(starts.view, np.int64)
        second["edge_keys"] = hold(np.concatenate([row[::-1] for row in rows]), np.int32)
        second["edge_labels"] = hold(first["edge_labels"].view, np.int32)
        arrays.remember()
    same(capi.run_both(core, case, copied), capi.run_both(core, case, shared))


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


# ---- everything at once --------------------------------------------------------------------------


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
