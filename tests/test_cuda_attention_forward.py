# SPDX-License-Identifier: Apache-2.0
"""Attention's forward on a device by itself: the paths that the cases of test_cuda_attention_backward
are too short or too narrow for, rows of maps, and what the kernels' speed depends on.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capi
from capi import BF16, Core, describe
from case_arrays import make_arrays
from cases import Case, Distances, Edges, Labels, Mask
from device_capi import DeviceCore, counters, from_bf16, run_cases, to_bf16
from guarded_arrays import SENTINEL, allocate
from relpos.reference import Band, Dropout
from test_attention import report
from test_cuda_attention_backward import (
    BF16_LARGEST,
    BF16_SQUARE,
    BF16_UNIT,
    DROPOUT,
    FULL,
    SHAW,
    built,
    device_core,
    library_of,
)
from test_sanitizers import runtime
from tolerances import compare, oracle_of

# ---- paths ---------------------------------------------------------------------------------------

LONG = Case(N=150, M=150, D=64, Dv=64, key=Band(149, 149), value=Band(149, 149))
LOOK = Case(H=2, N=70, M=140, D=16, Dv=16, gap=1)
TALL = Case(B=1, H=4, N=250, M=200, D=64, Dv=64)  # tiles of 128 queries
SHORT = Case(B=3, H=2, N=25, M=25, D=64, Dv=64, lengths=(25, 9, 0))  # and of 32
MANY = replace(SHORT, B=70, lengths=tuple(n % 33 for n in range(70)), N=32, M=32)  # block by block
EARLY = {"starts": (70,), "causal": True}
PATHS = {
    # bands of more columns than a block keeps, which are met tile by tile
    "long": LONG,
    "long, causal": replace(LONG, key=Band(200, 0), value=Band(200, 0), causal=True, N=70),
    "long keys, short values": replace(LONG, value=Band(3, 3), N=66),
    "short keys, long values": replace(LONG, key=Band(2, 2), N=66, dropout=DROPOUT),
    "long, none beyond": replace(LONG, key=Band(100, 100, "none"), value=None, M=260, N=66),
    "long, clipped on both sides": replace(LONG, key=Band(100, 100), N=65, M=400, value=None),
    "long, position_bias": replace(LONG, position_bias=True, N=66, H=2, D=32, Dv=32),
    "long, many heads' tables": replace(LONG, H=2, per_head=True, D=24, Dv=20, N=66),
    # query terms on a band
    "keys meet a band": replace(LOOK, query=Band(4, 4), **EARLY),
    "keys meet a long band": replace(LOOK, query=Band(149, 100, "none"), key=Band(149, 149)),
    "keys meet two bands": replace(LOOK, query=(Band(2, 2), Distances(9, 9, "clip", 4, "folded"))),
    # lookups: tables that a block keeps, and longer ones
    "labels": replace(LOOK, key=Labels(51), value=Labels(51), **EARLY),
    "labels, rising": replace(LOOK, value=Labels(51), key=Labels(3), rising=True, spread=4.0),
    "labels, many": replace(LOOK, key=Labels(300, 2), value=Labels(300, 2)),
    "labels of queries": replace(LOOK, query=Labels(9), bias=Labels(9)),
    "labels, dropped": replace(LOOK, value=(Labels(7), Labels(300, 2)), dropout=DROPOUT),
    "edges": replace(LOOK, key=Edges(9, 5), value=Edges(9, 5, "repeated"), **EARLY),
    "edges, many": replace(LOOK, key=Edges(500, 9), value=Edges(500, 9, "repeated"), bias=Edges(9)),
    "positions": replace(
        LOOK, key=Distances(9, 9, "none", 0, "", "random"), value=Distances(4, 4, "", 0, "", "far")
    ),
    "labels, position_bias": replace(LOOK, key=(Labels(5), Band(2, 2)), position_bias=True),
    "labels, position_bias, long": replace(
        LONG, key=Labels(5), N=66, D=16, Dv=16, position_bias=True
    ),
    # everything at once
    "everything": replace(FULL, key=(Band(149, 149), Labels(5)), D=64, Dv=64, B=1, lengths=None),
    "everything, wide": replace(
        FULL, key=(Band(149, 149), Labels(5)), D=128, Dv=128, B=1, H=1, N=40, lengths=None
    ),
    # heads that share keys
    "shared keys": replace(SHAW, H=6, key_heads=3, B=2, lengths=(130, 70)),
    "shared keys, long, everything": replace(
        FULL, key=(Band(149, 149), Labels(5)), B=1, H=4, key_heads=1, lengths=None, layout="bnhd"
    ),
    "shared keys, labels": replace(LOOK, H=4, key_heads=2, query=Labels(9), value=Labels(300, 2)),
    "shared keys, tall": replace(TALL, key_heads=2, key=Band(16, 16), value=Band(16, 16)),
    "shared keys, short": replace(MANY, H=4, key_heads=2, key=Band(16, 16), per_head=True),
    # masks
    "mask": replace(SHAW, mask=Mask("random", 0.5, True)),
    "mask of whole tiles": replace(SHAW, mask=Mask("patches"), N=210, M=270, H=1),
    "mask of whole tiles, long": replace(
        LONG,
        mask=Mask("patches"),
        value=(Band(149, 149), Labels(5)),
        N=210,
        M=270,
        H=1,
        D=16,
        Dv=16,
    ),
    "rows of nothing": replace(SHAW, mask=Mask("rows"), softcap=2.0, window=(9, 0)),
    "softcap": replace(SHAW, softcap=1.0, H=1, bias=Band(4, 4)),
    # widths and edges of tiles
    "width 200": replace(SHAW, D=200, Dv=150, N=40, M=70, H=1),
    "width 256": replace(SHAW, D=256, Dv=256, N=33, M=65, H=1, key=Labels(5), value=Labels(5)),
    "width 200, long": replace(
        SHAW, D=200, Dv=200, N=33, M=49, H=1, key=Band(149, 149), value=None, position_bias=True
    ),
    "width 200, long, labels": replace(
        SHAW,
        D=200,
        Dv=200,
        N=33,
        M=49,
        H=1,
        key=(Band(149, 149), Labels(300, 2)),
        value=(Band(149, 149), Labels(300, 2)),
        position_bias=True,
    ),
    "width 128, labels": replace(SHAW, D=128, Dv=128, N=40, H=1, key=Labels(5), value=Labels(5)),
    "width 128, band": replace(SHAW, D=128, Dv=128, N=66, M=140, H=1, key=Band(80, 80)),
    "width 128, a band just too long": replace(
        SHAW, D=128, Dv=128, N=66, M=130, H=1, key=Band(56, 56)
    ),
    "width 100, values alone": replace(SHAW, D=8, Dv=100, key=None, N=20, H=1),
    "width 1": replace(SHAW, D=1, Dv=1, N=65, M=63),
    "tall": TALL,
    "tall, band": replace(TALL, key=Band(16, 16), value=Band(16, 16), lengths=(190,)),
    "tall, causal, dropped": replace(
        TALL, M=250, H=5, key=Band(9, 9), value=Band(20, 20), causal=True, dropout=DROPOUT
    ),
    "tall, window, biases": replace(TALL, D=40, Dv=48, M=250, bias=Band(8, 8), window=(30, 9)),
    "tall, none beyond": replace(TALL, key=Band(3, 60, "none"), value=Band(2, 1, "none")),
    "tall, clip 0": replace(TALL, key=Band(0, 0), value=Band(0, 0), dropout=DROPOUT),
    "short": SHORT,
    "short, band": replace(SHORT, key=Band(16, 16), value=Band(16, 16)),
    "short, long band": replace(SHORT, key=Band(90, 90), value=Band(2, 70), dropout=DROPOUT),
    "short, causal": replace(SHORT, D=40, key=Band(4, 4), value=Band(4, 4), causal=True),
    "short, two tiles of keys": replace(
        SHORT, N=20, M=50, lengths=None, bias=Band(8, 8), window=(9, 9)
    ),
    "short, two tiles of queries": replace(
        SHORT, N=50, M=20, lengths=None, key=Band(3, 3, "none"), value=Band(3, 3), dropout=DROPOUT
    ),
    "short, clip 0": replace(SHORT, key=Band(0, 0), value=Band(0, 0), dropout=DROPOUT),
    "short, one column before": replace(
        SHORT, key=Band(0, 0), value=Band(0, 0), causal=True, starts=(7, 7, 7)
    ),
    "short, beyond the band": replace(
        SHORT, N=20, M=32, lengths=None, key=Band(4, 4), value=Band(20, 6), starts=(40, 9, 27)
    ),
    "short, 64 columns": replace(
        SHORT, N=32, M=32, lengths=None, key=Band(40, 23), value=Band(1, 1), scale=-0.2
    ),
    "short, keys alone": replace(SHORT, key=Band(16, 16), bias=Band(8, 8), window=(9, 9)),
    "short, values alone": replace(SHORT, value=Band(2, 30, "none"), dropout=DROPOUT, gap=8),
    "short, position_bias": replace(SHORT, key=Band(16, 16), position_bias=True),
    "short, many": replace(MANY, key=Band(16, 16), value=Band(16, 16), per_head=True),
    "short, many, plain": replace(MANY, dropout=DROPOUT, bias=Band(9, 9)),
    "one row": replace(SHAW, N=1, M=129, starts=(128,), causal=True),
    "whole tiles": replace(SHAW, N=128, M=192, causal=True, key=Band(1, 1)),
}


def forward_fault(core: DeviceCore, case: Case) -> str | None:
    """None, or what is wrong with `out` and `lse`: as compare_case and compare_rounded have it."""
    arrays = make_arrays(case, core.dtype)
    if core.where.element == BF16:
        for x in (arrays.q, arrays.k, arrays.v, arrays.dout):
            x.raw[...] = from_bf16(to_bf16(x.raw))
        arrays.remember()
    forward = capi.run_forward(core, case, arrays)
    truth = oracle_of(case, arrays)
    results = {"out": forward.out.view, "lse": forward.lse.view}
    if core.where.precision == BF16:
        faults = [rounded_fault(name, x, truth) for name, x in results.items()]
    else:
        faults = [compare(name, x, truth) for name, x in results.items()]
    faults = [fault for fault in faults if fault]
    return "\n  ".join([f"{core.name} {case}", *faults]) if faults else None


def rounded_fault(name: str, result: np.ndarray, truth: Any) -> str | None:
    exact, noise = truth.exact[name], truth.noise[name]
    odd = ~np.isfinite(exact)
    if not np.array_equal(exact[odd], result[odd], equal_nan=True):
        return f"{name}: NaN or infinities in other places"
    seen = ~odd
    error = np.abs(result[seen] - exact[seen]) / (BF16_UNIT * np.maximum(noise[seen], 1e-30))
    largest, square = error.max(initial=0), np.sqrt(np.mean(error**2)) if error.size else 0
    if largest <= BF16_LARGEST and square <= BF16_SQUARE:
        return None
    return f"{name}: largest {largest:.3g}, root mean square {square:.3g}"


@pytest.mark.parametrize(("element", "precision"), [(0, 0), (0, BF16), (BF16, BF16)])
@pytest.mark.parametrize("name", PATHS)
def test_paths(
    libraries: dict[str, Path], emulated_device: Path, name: str, element: int, precision: int
) -> None:
    core = device_core(libraries, element, precision, aligned=True)
    report([forward_fault(core, PATHS[name])])


def test_too_wide(libraries: dict[str, Path], emulated_device: Path) -> None:
    case = replace(SHAW, D=257, Dv=8, N=8, M=8)
    with pytest.raises(capi.CoreError, match=r"D=257, Dv=8 .*; a GPU takes at most 256"):
        capi.run_forward(device_core(libraries), case, make_arrays(case, np.float32))


# ---- maps ----------------------------------------------------------------------------------------

MAP_CASES = {
    "all terms": replace(FULL, mask=Mask("rows", 0.6)),
    "long": replace(LONG, N=70, position_bias=True, causal=True),
    "labels": PATHS["labels"],
    "packed": replace(SHAW, B=2, offsets=(0, 9, 73), D=20, Dv=8, bias=Band(3, 2)),
    "nothing seen": replace(SHAW, N=9, M=9, starts=(500,), window=(3, 3)),
    "shared keys": replace(FULL, H=4, key_heads=2),
}
SHOWN = (0, 1, 2, 10, 11, 20, 21, 30, 31)  # RP_SHOW_...


def map_rows(core: Core, case: Case, what: int, b: int, row: int, rows: int) -> np.ndarray:
    """Rows of the last head's map, and two columns more, which stay as they were."""
    arrays = make_arrays(case, np.float32)
    if isinstance(core, DeviceCore) and core.where.element == BF16:
        for x in (arrays.q, arrays.k):
            x.raw[...] = from_bf16(to_bf16(x.raw))
    call, alive = describe(core, case, arrays)
    keys = case.spans[b].keys
    to = allocate((rows, keys), 2, np.float32, SENTINEL)
    size = ctypes.c_int64
    function = core.lib.rp_attention_map
    function.restype, function.argtypes = ctypes.c_int, None
    status = function(
        ctypes.byref(call),
        core.rows(arrays.q),
        core.rows(arrays.k),
        what,
        *(size(n) for n in (b, case.H - 1, row, rows)),
        ctypes.c_void_p(to.address),
        size(keys + 2),
    )
    core.check(status)
    core.fetch()
    del alive
    assert to.untouched(SENTINEL)
    return to.view


@pytest.mark.parametrize("name", MAP_CASES)
def test_maps(libraries: dict[str, Path], emulated_device: Path, name: str) -> None:
    """As the CPU shows them: sums of up to 2 (D + 2) products and a softmax, in another order."""
    host, device = capi.core_by_name(libraries, "f32"), device_core(libraries)
    case = MAP_CASES[name]
    for b, span in enumerate(case.spans):
        row = span.queries // 3
        for what in SHOWN:
            rows = min(5, span.queries - row)
            want, got = (map_rows(core, case, what, b, row, rows) for core in (host, device))
            infinite = np.isinf(want)
            assert np.array_equal(infinite, np.isinf(got)), (what, b)
            numbers = np.where(infinite, 0, want)
            sizes = np.maximum(1, np.abs(numbers).max(initial=0))
            error = np.abs(numbers - np.where(infinite, 0, got)).max(initial=0)
            assert error <= 2.0**-23 * 4 * np.sqrt(2 * (case.D + 2)) * sizes, (what, b, error)


def test_maps_of_bf16(libraries: dict[str, Path], emulated_device: Path) -> None:
    """Inputs are bfloat16; sums are f32 as always."""
    case = replace(SHAW, N=70, M=70)
    core = device_core(libraries, BF16, BF16)
    arrays = make_arrays(case, np.float32)
    for x in (arrays.q, arrays.k):
        x.raw[...] = from_bf16(to_bf16(x.raw))
    exact = oracle_of(case, arrays).exact["lse"]
    scores = map_rows(core, case, 1, 0, 0, 70).astype(np.float64)
    lse = np.log(np.sum(np.exp(scores), axis=1))
    assert np.abs(lse - exact[0, case.H - 1]).max() < 1e-4


# ---- orders of threads, races, sanitizers ----------------------------------------------------------

CHILD = """
import hashlib, sys
from pathlib import Path
import numpy as np
import capi, test_cuda_attention_forward as tests
from case_arrays import make_arrays
from device_capi import DeviceCore

libcore, precision, *names = sys.argv[1:]
core = DeviceCore(Path(libcore), precision=int(precision), aligned=True)
digest, wrong = hashlib.sha256(), 0
for name in names:
    case = tests.PATHS[name]
    forward = capi.run_forward(core, case, make_arrays(case, core.dtype))
    digest.update(forward.out.view.tobytes() + forward.lse.view.tobytes())
    fault = tests.forward_fault(core, case)
    if fault:
        wrong += 1
        print(fault)
print(len(names), "cases,", wrong, "wrong, digest", digest.hexdigest())
"""
CHILD_NAMES = (
    "long, position_bias",
    "keys meet two bands",
    "labels, dropped",
    "edges",
    "mask",
    "tall, causal, dropped",
    "short, band",
    "short, many",
)
WIDE = ("width 200, long", "width 200, long, labels")
CROWDED = (
    *CHILD_NAMES,
    *WIDE,
    "everything",
    "everything, wide",
    "width 256",
    "labels",
    "long, clipped on both sides",
    "width 128, band",
    "width 128, a band just too long",
)


run_child = partial(run_cases, CHILD)


@pytest.mark.parametrize("precision", [0, BF16])
def test_orders_of_threads(
    libraries: dict[str, Path], emulated_device: Path, precision: int
) -> None:
    library = library_of(emulated_device)
    found = {
        run_child(libraries, library, precision, CHILD_NAMES, EMU_SEED=str(seed))
        for seed in range(4)
    }
    assert len(found) == 1


@pytest.mark.parametrize("precision", [0, BF16])
def test_little_shared_memory(
    libraries: dict[str, Path], emulated_device: Path, precision: int
) -> None:
    """99 KiB a block, as GPUs for desktops have: what does not fit is met tile by tile, or one by
    one."""
    library = library_of(emulated_device)
    run_child(libraries, library, precision, CROWDED, EMU_SHARED=str(99 << 10))


@pytest.mark.parametrize("precision", [0, BF16])
def test_no_races(libraries: dict[str, Path], emulated_device: Path, precision: int) -> None:
    library_of(emulated_device)
    run_child(libraries, built("emulated-race"), precision, CHILD_NAMES)
    run_child(libraries, built("emulated-race"), precision, WIDE, EMU_SHARED=str(99 << 10))


@pytest.mark.parametrize("precision", [0, BF16])
def test_sanitizers_find_nothing(
    libraries: dict[str, Path], emulated_device: Path, precision: int
) -> None:
    library_of(emulated_device)
    preloaded = [runtime("libasan.so"), runtime("libubsan.so")]
    if None in preloaded:
        pytest.skip("this compiler has no libasan.so and libubsan.so to preload (gcc has)")
    run_child(
        libraries,
        built("emulated-sanitized"),
        precision,
        CHILD_NAMES,
        LD_PRELOAD=" ".join(map(str, preloaded)),
        ASAN_OPTIONS="detect_leaks=0",  # Python's own
        UBSAN_OPTIONS="print_stacktrace=1",
    )


# ---- what speed depends on -------------------------------------------------------------------------

TILE = 64 * 64 * 64 // (16 * 8 * 16)  # mma of one product of two tiles


def counted(libraries: dict[str, Path], library: Path, case: Case) -> dict[str, int]:
    core = device_core(libraries, BF16, BF16, aligned=True)
    arrays = make_arrays(case, core.dtype)
    before = counters(library)
    capi.run_forward(core, case, arrays)
    after = counters(library)
    return {name: after[name] - before[name] for name in after}


def test_a_tile_beyond_the_band_costs_what_plain_attention_costs(
    libraries: dict[str, Path], emulated_device: Path
) -> None:
    """Two products of a pair of tiles; a band adds its own to a tile of queries, however many keys
    there are: 33 columns, as six tiles of eight with the keys' table and as three of sixteen with the
    values'."""
    library = library_of(emulated_device)
    for N in (256, 512):
        plain = Case(N=N, M=N, D=64, Dv=64)
        shaw = replace(plain, key=Band(16, 16), value=Band(16, 16))
        costs = [counted(libraries, library, case) for case in (plain, shaw)]
        assert costs[0]["mma"] == 2 * TILE * (N // 64) ** 2
        assert costs[1]["mma"] - costs[0]["mma"] == N // 64 * TILE * (6 * 8 + 48) // 64
        assert costs[0]["bank_conflicts"] == costs[1]["bank_conflicts"] == 0
        assert costs[0]["barriers"] <= N // 64 * (N // 64 + 4)


def test_long_sequences_are_read_for_32_rows(
    libraries: dict[str, Path], emulated_device: Path
) -> None:
    """Where tiles of 128 queries fill the GPU: keys and values cross shared memory half as often, the
    queries of a warp once a tile of keys more."""
    library = library_of(emulated_device)
    few = counted(libraries, library, Case(N=256, M=256, D=64, Dv=64))
    many = counted(libraries, library, Case(H=4, N=256, M=256, D=64, Dv=64))
    assert many["mma"] == 4 * few["mma"] == 4 * 2 * TILE * 4 * 4
    assert few["ldmatrix"] == few["mma"] // 2 + 4 * TILE // 8
    assert many["ldmatrix"] == many["mma"] // 4 + many["mma"] // 16
    assert many["async_bytes"] < 4 * few["async_bytes"] * 0.6
    assert many["barriers"] <= 4 * few["barriers"] // 2
    causal = counted(libraries, library, Case(H=4, N=256, M=256, D=64, Dv=64, causal=True))
    # of the last 64 keys of a tile the first two warps see none
    assert causal["mma"] == 4 * 2 * TILE * (1 + 2 + 3 + 4)


def test_what_takes_long_begins_first(libraries: dict[str, Path], emulated_device: Path) -> None:
    """Where blocks see more keys or fewer, as with causal=True, eight places that take them in turn are
    done together. Sequence by sequence, the last tile first, one has 7 % more to do."""
    library = library_of(emulated_device)
    case = Case(B=3, H=4, N=512, M=512, D=64, Dv=64, causal=True)
    cost = counted(libraries, library, case)
    assert cost["busiest"] == cost["mma"] // 8


def test_short_sequences_are_padded_to_32(
    libraries: dict[str, Path], emulated_device: Path
) -> None:
    library = library_of(emulated_device)
    short = counted(libraries, library, Case(B=8, N=25, M=25, D=64, Dv=64))
    longer = counted(libraries, library, Case(B=8, N=40, M=40, D=64, Dv=64))
    assert longer["mma"] == 8 * 2 * TILE * 3 // 4  # the fourth warp has no queries
    assert short["mma"] == 8 * 2 * TILE // 4


def test_short_sequences_meet_32_columns_of_a_band(
    libraries: dict[str, Path], emulated_device: Path
) -> None:
    """A warp's queries and keys are 47 distances, 32 of them within 16. Blocks go on to the next
    sequence with the vectors that they have: three barriers each, and one to begin with."""
    library = library_of(emulated_device)
    plain = Case(B=200, H=2, N=25, M=25, D=64, Dv=64)
    costs = [counted(libraries, library, plain)]
    costs += [counted(libraries, library, replace(plain, key=Band(16, 16), value=Band(16, 16)))]
    blocks = 4 * 8  # of as many multiprocessors
    assert costs[1]["mma"] - costs[0]["mma"] == 400 * 2 * (2 + 2) * 16 * 64 * 16 // (16 * 8 * 16)
    assert costs[0]["bank_conflicts"] == costs[1]["bank_conflicts"] == 0
    assert costs[0]["barriers"] == 2 * 400
    assert costs[1]["barriers"] == 3 * 400 + blocks


def test_what_position_hides_costs_nothing(
    libraries: dict[str, Path], emulated_device: Path
) -> None:
    library = library_of(emulated_device)
    plain = Case(N=512, M=512, D=64, Dv=64)
    causal = counted(libraries, library, replace(plain, causal=True))
    window = counted(libraries, library, replace(plain, window=(64, 0)))
    assert causal["mma"] == 2 * TILE * (8 * 9 // 2)
    assert window["mma"] == 2 * TILE * (8 + 7)  # 64 keys back are in the tile before, all of them


def test_what_a_mask_hides_costs_nothing(libraries: dict[str, Path], emulated_device: Path) -> None:
    """Every other tile of keys, for three of queries."""
    library = library_of(emulated_device)
    plain = Case(N=384, M=384, D=64, Dv=64, mask=Mask("all"))
    costs = [
        counted(libraries, library, replace(plain, mask=Mask(fill)))["mma"]
        for fill in ("all", "columns", "none")
    ]
    assert costs == [2 * TILE * 36, 2 * TILE * 18, 0]


def test_labels_cost_a_table(libraries: dict[str, Path], emulated_device: Path) -> None:
    """Tables that are kept add products to a tile of queries, not to a pair of tiles."""
    library = library_of(emulated_device)
    plain = Case(N=256, M=256, D=64, Dv=64)
    labelled = replace(plain, key=Labels(48), value=Labels(48))
    costs = [counted(libraries, library, case)["mma"] for case in (plain, labelled)]
    assert costs[1] - costs[0] == 4 * TILE * (48 + 48) // 64


def test_dropout_is_that_of_the_cpu(libraries: dict[str, Path], emulated_device: Path) -> None:
    """Of every pair: values of one number each say which keys were kept."""
    case = Case(H=2, N=70, M=200, D=4, Dv=200, scale=1e-30, dropout=Dropout(0.4, (5, 6), 7, 8))
    outs = []
    for core in (capi.core_by_name(libraries, "f32"), device_core(libraries)):
        arrays = make_arrays(case, np.float32)
        arrays.v.view[...] = np.eye(200)
        arrays.remember()
        outs.append(capi.run_forward(core, case, arrays).out.view)
    assert np.array_equal(outs[0] != 0, outs[1] != 0)
    assert 0.55 < np.mean(outs[0] != 0) < 0.65
    assert np.abs(outs[0] - outs[1]).max() < 1e-7
