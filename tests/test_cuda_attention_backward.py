# SPDX-License-Identifier: Apache-2.0
"""Attention on a device, forward and backward, against the reference, over the cases of every core.

In f32 to the bounds of test_attention.py: three times the error of the plain float32 formula. With
operands in bfloat16 to the error that rounding these makes (see BF16_UNITS). Without a GPU the
kernels run in the emulator: under other thread orders to the same bits, under the race checker, and
under AddressSanitizer and UBSan.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capi
from building import make
from capi import BF16
from case_arrays import make_arrays
from cases import Case, Distances, Edges, Labels, Mask, random_case
from conftest import ROOT
from corners import CORNERS
from device_capi import DeviceCore, counters, from_bf16, run_cases, to_bf16
from guarded_arrays import Arrays
from relpos.reference import Band, Dropout
from test_attention import compare_case, report
from test_sanitizers import runtime
from tolerances import oracle_of

_cores: dict[tuple[int, int, bool], DeviceCore] = {}

DROPOUT = Dropout(0.1, (1, 2), 3, 4)


def device_core(
    libraries: dict[str, Path], element: int = 0, precision: int = 0, aligned: bool = False
) -> DeviceCore:
    key = (element, precision, aligned)
    if key not in _cores:
        _cores[key] = DeviceCore(
            libraries["f32"], element=element, precision=precision, aligned=aligned
        )
    return _cores[key]


# ---- the cases of every core ---------------------------------------------------------------------

# Corners at equal distances, so that every kind of them is there, those with a row of a table that is
# large, and random cases with all features. .ci/random_cases.py has every corner.
SHARES = 4
SHARED_CASES = [case for i, case in enumerate(CORNERS) if i % 13 == 0 or case.outlier]
SHARED_CASES += [random_case(seed) for seed in range(4, 196, 7)]
SHARED_CASES += [random_case(seed) for seed in range(5, 75, 7)]  # heads share keys there


@pytest.mark.parametrize("share", range(SHARES))
def test_cases_of_every_core(libraries: dict[str, Path], emulated_device: Path, share: int) -> None:
    core = device_core(libraries)
    report([compare_case(core, case) for case in SHARED_CASES[share::SHARES]])


# ---- the fast path, at the edges of tiles and bands -----------------------------------------------

SHAW = Case(H=2, N=130, M=130, D=64, Dv=64, key=Band(2, 2), value=Band(2, 2))
T5 = Distances(20, 20, "clip", 9, "folded")
SENTENCES = replace(
    SHAW, B=6, offsets=(0, 25, 57, 57, 58, 60, 85), key=Band(16, 16), value=Band(15, 16, "none")
)
BANDS = {
    "clip 2": SHAW,
    "clip 0": replace(SHAW, key=Band(0, 0), value=Band(0, 0), N=65, M=65),
    "clip 1, causal": replace(SHAW, key=Band(1, 1), value=Band(1, 1), causal=True, N=129, M=129),
    "clip 16": replace(SHAW, key=Band(16, 16), value=Band(16, 16), N=200, M=200, H=1),
    "clip 64, keys alone": replace(SHAW, key=Band(64, 64), value=None),
    "values alone, none beyond": replace(SHAW, key=None, value=Band(3, 1, "none")),
    "two parts": replace(SHAW, key=(Band(1, 1), Band(3, 5, "none")), per_head=True),
    "no band": replace(SHAW, key=None, value=None, causal=True),
    "buckets": replace(SHAW, key=Distances(20, 20, "none", 6, "random"), value=None),
    "biases": replace(SHAW, bias=T5, key=None, value=None, scale=1.0, per_head=True),
    "biases of all distances": replace(SHAW, bias=Band(200, 200), value=None, N=70, M=190),
    "dropout": replace(SHAW, dropout=DROPOUT, N=65, M=140),
    "a large row, dropout": replace(
        SHAW, H=4, value=Band(3, 3), dropout=DROPOUT, outlier=("value[0]", "first", 100.0)
    ),
    "window": replace(SHAW, window=(30, 5), dropout=DROPOUT),
    "window to the left": replace(SHAW, window=(30, -1), H=1),
    "window to the right": replace(SHAW, window=(-1, 30), H=1),
    "lengths": replace(SHAW, B=2, lengths=(130, 63), key_lengths=(0, 129)),
    "packed": replace(SHAW, B=3, offsets=(0, 64, 64, 193), causal=True, key=Band(2, 2)),
    "sentences": replace(SHAW, B=6, offsets=(0, 25, 57, 57, 58, 91, 110), key=Band(16, 16)),
    "short, of all kinds": replace(
        SHAW, B=3, N=30, M=70, lengths=(30, 1, 7), key_lengths=(70, 0, 31), bias=T5, dropout=DROPOUT
    ),
    "short, causal": replace(SHAW, B=3, N=19, M=19, key=Band(40, 40), value=None, causal=True),
    "short, plain": replace(SHAW, B=2, N=27, M=31, key=None, value=None, Dv=40),
    "single, of all kinds": replace(
        SHAW, B=3, N=30, M=29, lengths=(30, 1, 7), key_lengths=(29, 0, 13), bias=T5, dropout=DROPOUT
    ),
    "single, sentences": SENTENCES,
    "single, many": replace(SHAW, B=24, H=3, N=9, M=11, D=16, Dv=24, bias=Band(3, 4), causal=True),
    "single, values alone": replace(SHAW, N=32, M=32, key=None, value=Band(0, 0), window=(9, 3)),
    "single, unaligned": replace(
        SHAW, B=2, N=21, M=32, D=30, Dv=40, gap=3, starts=(5, 11), bias=T5
    ),
    "single, biases": replace(
        SHAW, B=3, N=20, M=23, key=None, value=None, bias=T5, starts=(0, 3, 9)
    ),
    "long": replace(SHAW, N=510, M=511, key=Band(16, 16), value=Band(5, 5)),
    "long, of all kinds": replace(SHAW, N=509, M=384, causal=True, bias=T5, dropout=DROPOUT),
    "long, plain": replace(SHAW, N=512, M=384, key=None, value=None, window=(100, 40)),
    # in bf16 and without biases dq is made by turns (backward_turns.h)
    "turns": replace(SHAW, N=510, M=384, key=Band(16, 16), value=Band(5, 5)),
    "turns, causal": replace(SHAW, N=512, M=512, causal=True, key=Band(16, 16), value=Band(16, 16)),
    "turns, more queries": replace(SHAW, N=512, M=250, causal=True, dropout=DROPOUT),
    "turns, clip 0": replace(SHAW, N=505, M=512, key=Band(0, 0), value=Band(0, 0)),
    "turns, plain": replace(SHAW, N=512, M=512, key=None, value=None, causal=True),
    "turns, plain, more queries": replace(SHAW, N=512, M=120, key=None, value=None, causal=True),
    "turns, keys alone": replace(
        SHAW, N=500, M=512, key=Band(9, 0, "none"), value=None, causal=True
    ),
    "turns, values alone": replace(
        SHAW, N=512, M=510, key=None, value=Band(2, 5), window=(300, 70)
    ),
    "turns, window": replace(SHAW, N=512, M=512, window=(100, 9), per_head=True),
    # where the first key that a tile of queries sees is the last of a block, the last the first of one
    "turns, window by a block": replace(SHAW, N=512, M=512, window=(33, 65)),
    "turns, window to the end": replace(SHAW, N=512, M=512, starts=(200,), window=(8, 150)),
    "turns, window to the right": replace(SHAW, N=512, M=512, window=(-1, 40), key=Band(1, 1)),
    "turns, window ahead": replace(SHAW, N=512, M=512, starts=(200,), window=(20, 150)),
    "turns, far": replace(SHAW, N=512, M=512, starts=(3000,), key=Band(2, 2), per_head=True),
    "turns, lengths": replace(
        SHAW, B=4, H=3, N=256, M=300, lengths=(256, 127, 0, 250), key_lengths=(0, 256, 200, 255)
    ),
    "turns, packed": replace(
        SHAW, B=5, H=3, offsets=(0, 250, 250, 505, 633, 1015), causal=True, key=Band(16, 16)
    ),
    "turns, packed, plain": replace(
        SHAW, B=3, H=3, offsets=(0, 250, 505, 999), key=None, value=None, window=(70, 200)
    ),
    "turns, two parts": replace(
        SHAW, N=500, M=512, key=(Band(1, 1), Band(3, 5, "none")), per_head=True, layout="bnhd"
    ),
    "turns, unaligned": replace(
        SHAW, B=2, N=256, M=256, D=50, Dv=35, gap=3, lengths=(256, 231), dropout=DROPOUT
    ),
    # heads that share keys, in each size of kernel
    "shared keys": replace(SHAW, H=4, key_heads=2, B=2, lengths=(130, 9), key_lengths=(0, 129)),
    "shared keys, single": replace(SENTENCES, H=6, key_heads=2, dropout=DROPOUT),
    "shared keys, short": replace(SHAW, H=4, key_heads=1, B=3, offsets=(0, 40, 40, 91), gap=8),
    "shared keys, long": replace(SHAW, H=4, key_heads=2, N=500, bias=T5, causal=True, gap=3),
    "shared keys, turns": replace(SHAW, H=4, key_heads=1, N=512, M=384, Dv=40, per_head=True),
    "starts": replace(SHAW, N=67, M=190, starts=(70,), causal=True),
    "out of reach": replace(SHAW, N=66, M=66, starts=(500,)),
    "width 32": replace(SHAW, D=32, Dv=24, layout="bnhd"),
    "width 128": replace(SHAW, D=128, Dv=100, N=70, M=70),
    "unaligned rows": replace(SHAW, D=30, Dv=40, gap=3),
}


@pytest.mark.parametrize("name", BANDS)
def test_bands_in_f32(libraries: dict[str, Path], emulated_device: Path, name: str) -> None:
    report([compare_case(device_core(libraries, aligned=True), BANDS[name])])


# A number rounded to bfloat16 is off by 2^-9 of itself or little more. `noise` says how far a result
# is off where every factor of a product and every partial sum is rounded with one unit, signs being
# random: here partial sums are exact beside the factors, which leaves less than half of it on average.
# The largest of some 1e5 normal errors is 4.5 deviations out.
BF16_UNIT = 2.0**-9
BF16_SQUARE, BF16_LARGEST = 0.5, 4.5 * 0.5


def compare_rounded(core: DeviceCore, case: Case) -> str | None:
    """compare_case where operands are rounded to bfloat16, and inputs too where they are stored so."""
    arrays = make_arrays(case, core.dtype)
    if core.where.element == BF16:
        for x in (arrays.q, arrays.k, arrays.v, arrays.dout):
            x.raw[...] = from_bf16(to_bf16(x.raw))
        arrays.remember()
    results = capi.run_both(core, case, arrays)
    truth = oracle_of(case, arrays)
    faults = []
    for name, exact in truth.exact.items():
        odd = ~np.isfinite(exact)
        if not np.array_equal(exact[odd], results[name][odd], equal_nan=True):
            faults.append(f"{name}: NaN or infinities in other places")
        with np.errstate(invalid="ignore"):
            error = np.where(odd, 0, np.abs(results[name] - exact))
        noise = np.where(np.isfinite(truth.noise[name]), truth.noise[name], 0)
        error = error / (BF16_UNIT * np.maximum(noise, 1e-30))
        largest, square = error.max(initial=0), np.sqrt(np.mean(error**2)) if error.size else 0
        if not (largest <= BF16_LARGEST and square <= BF16_SQUARE):
            faults.append(f"{name}: largest {largest:.3g}, root mean square {square:.3g}")
    return "\n  ".join([f"{core.name} {case}", *faults]) if faults else None


@pytest.mark.parametrize("element", [0, BF16])
@pytest.mark.parametrize("name", BANDS)
def test_bands_in_bf16(
    libraries: dict[str, Path], emulated_device: Path, name: str, element: int
) -> None:
    report([compare_rounded(device_core(libraries, element, BF16, aligned=True), BANDS[name])])


FULL = Case(
    B=2,
    H=2,
    N=70,
    M=70,
    D=16,
    Dv=24,
    key=(Band(4, 4), Labels(5)),
    query=(Distances(9, 9, "clip", 4, "folded"), Edges(3, 3)),
    bias=(Labels(6, 2), Band(8, 8, "none")),
    value=(Edges(9, 4, "repeated"), Distances(3, 3, "clip", 0, "", "random")),
    position_bias=True,
    per_head=("key", "bias"),
    lengths=(70, 33),
    window=(50, 9),
    mask=Mask(),
    softcap=5.0,
    dropout=DROPOUT,
)


@pytest.mark.parametrize("element", [0, BF16])
def test_every_term_in_bf16(
    libraries: dict[str, Path], emulated_device: Path, element: int
) -> None:
    report([compare_rounded(device_core(libraries, element, BF16), FULL)])


# What goes the general way: every kind of weights that its products have (backward_products.h).
WIDE_BAND = Band(200, 200)
GENERAL = {
    "unclipped": replace(SHAW, key=WIDE_BAND, value=WIDE_BAND, H=1),
    "keys and queries": replace(
        SHAW,
        key=Distances(70, 70, "clip", 33, "folded"),
        query=Distances(70, 70, "clip", 9, "folded"),
    ),
    "crossed, then one end": replace(SHAW, query=Band(3, 1), N=70, M=280, H=1, starts=(100,)),
    "position bias": replace(SHAW, key=(Band(4, 4), Labels(5)), position_bias=True, causal=True),
    "position bias, ends": replace(SHAW, key=Band(2, 2), value=None, position_bias=True, N=200),
    "labels": replace(SHAW, key=Labels(51), value=Labels(51), bias=Labels(7, 2), N=70, M=140),
    "labels beyond buckets": replace(SHAW, key=Labels(300, 2), value=Labels(600, 4), N=66, M=66),
    "long tables": replace(
        SHAW,
        key=Labels(600, 2),
        query=Labels(600, 2),
        value=None,
        position_bias=True,
        N=66,
        M=66,
        H=1,
    ),
    "labels of keys": replace(SHAW, key=None, query=Labels(130, 2), value=None, N=66, M=130),
    "edges": replace(SHAW, key=Edges(5, 4, "repeated"), query=Edges(70, 3), value=Edges(5, 3), H=1),
    "mask": replace(SHAW, mask=Mask(), dropout=DROPOUT, N=66),
    "mask of whole tiles": replace(
        SHAW, mask=Mask("patches"), key=(Band(9, 9), Labels(5)), query=Band(9, 9), N=210, M=270, H=1
    ),
    "shared keys": replace(FULL, H=4, key_heads=2, layout="bnhd"),
    "shared keys, wide": replace(SHAW, H=4, key_heads=1, D=200, query=Labels(9), N=66, M=66),
    "softcap": replace(SHAW, softcap=2.0, value=None, N=66),
    "width 200": replace(SHAW, D=200, Dv=150, key=Band(9, 9), query=Band(1, 1), N=66, M=66, H=1),
    "unaligned": replace(SHAW, D=30, Dv=44, gap=3, query=Band(5, 5), key=Labels(9)),
}


@pytest.mark.parametrize("element", [None, 0, BF16])
@pytest.mark.parametrize("name", GENERAL)
def test_the_general_way(
    libraries: dict[str, Path], emulated_device: Path, name: str, element: int | None
) -> None:
    if element is None:
        report([compare_case(device_core(libraries, aligned=True), GENERAL[name])])
    else:
        core = device_core(libraries, element, BF16, aligned=True)
        report([compare_rounded(core, GENERAL[name])])


# ---- what is added, and what is not wanted -----------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        (SHAW, 0),
        (FULL, 0),
        (replace(FULL, tied=False, key=Band(4, 4)), 0),
        (BANDS["turns, packed"], BF16),
    ],
)
def test_gradients_of_tables_are_added(
    libraries: dict[str, Path], emulated_device: Path, case: Case, precision: int
) -> None:
    """To what is there; and those that are not wanted change no bit of the others."""
    core = device_core(libraries, 0, precision, aligned=precision == BF16)
    arrays: Arrays = make_arrays(case, core.dtype)
    forward = capi.run_forward(core, case, arrays)
    zero = capi.run_backward(core, case, arrays, forward, 0.0)
    more = capi.run_backward(core, case, arrays, forward, 3.0)
    none = capi.run_backward(core, case, arrays, forward, None)
    for name, gradient in zero.items():
        if name in ("q", "k", "v"):
            assert gradient.tobytes() == more[name].tobytes() == none[name].tobytes()
        else:
            assert np.array_equal(more[name], gradient + np.float32(3))
            assert name not in none


@pytest.mark.parametrize("case", [SHAW, replace(SHAW, bias=T5), replace(SHAW, query=Band(8, 8))])
def test_workspace_is_linear_in_length(
    libraries: dict[str, Path], emulated_device: Path, case: Case
) -> None:
    """Nothing of queries x keys is kept; and from some length on sums do not grow at all."""
    core = device_core(libraries)
    call, alive = capi.describe(core, case, make_arrays(case, core.dtype))
    sizes = []
    for N in (4096, 8192, 16384):
        call.N = call.M = N
        sizes.append(core.workspace_bytes(call)[1])
    assert alive and sizes[2] - sizes[1] <= 2 * (sizes[1] - sizes[0]) + 4096


# ---- GPUs whose blocks have less memory -----------------------------------------------------------

SIZES = """
import sys
from pathlib import Path
import capi, test_cuda_attention_backward as tests
from case_arrays import make_arrays
from device_capi import DeviceCore

libcore, precision = sys.argv[1:]
core = DeviceCore(Path(libcore), precision=int(precision), aligned=True)
for case in tests.CROWDED[int(precision)]:
    call, alive = capi.describe(core, case, make_arrays(case, core.dtype))
    print(core.workspace_bytes(call)[1])
last = tests.CROWDED[int(precision)][-1]
check = tests.compare_rounded if int(precision) else tests.compare_case
print(check(core, last), alive is not None)
"""
WIDE = replace(SHAW, key=Band(16, 16), value=Band(16, 16), H=1, N=70, M=70)
CROWDED = {
    0: [replace(WIDE, D=32, Dv=32), WIDE],
    BF16: [replace(WIDE, D=32, Dv=32), WIDE, replace(WIDE, D=128, Dv=128)],
}


@pytest.mark.parametrize("precision", [0, BF16])
def test_little_shared_memory(
    libraries: dict[str, Path], emulated_device: Path, precision: int
) -> None:
    """99 KiB a block, as GPUs for desktops have: clip 16 goes the fast way, which its workspace shows,
    and with 64 KiB the general one."""
    library = library_of(emulated_device)
    given = {**os.environ, "RELPOS_CUDA_LIBRARY": str(library)}
    found = []
    for room in (227, 99, 64):
        ran = capi.run_script(
            SIZES,
            str(libraries["f32"]),
            str(precision),
            environment=given | {"EMU_SHARED": str(room << 10)},
        )
        *sizes, verdict = ran.stdout.split("\n")[: len(CROWDED[precision]) + 1]
        assert verdict == "None True", ran.stdout + ran.stderr
        found.append(sizes)
    assert found[0] == found[1]
    assert all(fast != general for fast, general in zip(found[1][1:], found[2][1:], strict=True))


# ---- orders of threads, races, sanitizers -------------------------------------------------------------

CHILD = """
import hashlib, sys
import numpy as np
import capi, test_cuda_attention_backward as tests
from pathlib import Path
from case_arrays import make_arrays
from device_capi import DeviceCore

libcore, precision, *names = sys.argv[1:]
core = DeviceCore(Path(libcore), precision=int(precision), aligned=True)
digest, wrong = hashlib.sha256(), 0
for name in names:
    case = tests.CHILD_CASES[name]
    results = capi.run_both(core, case, make_arrays(case, core.dtype))
    for array in results.values():
        digest.update(np.ascontiguousarray(array).tobytes())
    check = tests.compare_rounded if int(precision) else tests.compare_case
    fault = check(core, case)
    if fault:
        wrong += 1
        print(fault)
print(len(names), "cases,", wrong, "wrong, digest", digest.hexdigest())
"""
CHILD_CASES = {
    "band": replace(SHAW, N=70, M=130, dropout=DROPOUT),
    "causal": replace(SHAW, N=66, M=66, causal=True, H=1, bias=T5),
    "blind": replace(SHAW, N=70, M=0),
    "hidden": replace(SHAW, N=66, M=66, causal=True, starts=(-99,)),
    "full": replace(FULL, N=33, M=66, lengths=None),
    "labels": Case(N=65, M=40, key=Labels(300, 2), value=Labels(7), query=Edges(4)),
    "large": replace(SHAW, N=509, M=120, key=Band(16, 16), bias=T5, dropout=DROPOUT),
    "short": replace(BANDS["sentences"], causal=True, bias=T5, dropout=DROPOUT, H=1),
    "single": replace(BANDS["single, sentences"], causal=True, bias=T5, dropout=DROPOUT, H=1),
    "diagonals": replace(SHAW, query=Band(70, 70), bias=T5, H=1, N=70, M=200),
    # in bf16 three tiles a block, with little cache padding before others
    "dealt": replace(SHAW, B=6, H=3, N=96, M=96, causal=True, lengths=(0, 96, 40, 96, 96, 7)),
    "long": replace(GENERAL["long tables"], N=33, M=66),
    "turns": replace(BANDS["turns, packed"], H=2, offsets=(0, 240, 505), dropout=DROPOUT, B=2),
    "turns, window": replace(BANDS["turns, window"], key_lengths=(470,)),
    "turns, plain": replace(BANDS["turns, plain"], N=500, M=256),
    "shared keys": replace(FULL, N=33, M=66, lengths=None, H=4, key_heads=2),
}


run_child = partial(run_cases, CHILD)


def library_of(device: Path) -> Path:
    if str(device) == "gpu":
        pytest.skip("the emulator's own")
    return Path(os.environ["RELPOS_CUDA_LIBRARY"])


@pytest.mark.parametrize("precision", [0, BF16])
def test_orders_of_threads(
    libraries: dict[str, Path], emulated_device: Path, precision: int
) -> None:
    """Whatever order blocks, warps and lanes come in, the bits are the same; and those that wait for
    each other may be at work together."""
    library = library_of(emulated_device)
    names = list(CHILD_CASES)
    found = {
        run_child(libraries, library, precision, names, EMU_SEED=str(seed), EMU_BLOCKS=str(blocks))
        for seed, blocks in ((0, 1), (1, 1), (2, 3), (3, 40))
    }
    assert len(found) == 1


@pytest.mark.parametrize("precision", [0, BF16])
def test_little_cache(libraries: dict[str, Path], emulated_device: Path, precision: int) -> None:
    """Lists of tiles are sorted sequence by sequence, or by two, and heads go side by side or not."""
    library = library_of(emulated_device)
    for cache in (1, 3 * 200 * 128 * 4):
        run_child(libraries, library, precision, ["full", "dealt"], EMU_CACHE=str(cache))


def built(target: str) -> Path:
    make(target)
    return ROOT / "build" / target / "librelpos_cuda.so"


@pytest.mark.parametrize("precision", [0, BF16])
def test_no_races(libraries: dict[str, Path], emulated_device: Path, precision: int) -> None:
    library_of(emulated_device)
    names = list(CHILD_CASES)
    run_child(libraries, built("emulated-race"), precision, names)


@pytest.mark.parametrize("precision", [0, BF16])
def test_sanitizers_find_nothing(
    libraries: dict[str, Path], emulated_device: Path, precision: int
) -> None:
    library_of(emulated_device)
    preloaded = [runtime("libasan.so"), runtime("libubsan.so")]
    if None in preloaded:
        pytest.skip("this compiler has no libasan.so and libubsan.so to preload (gcc has)")
    names = list(CHILD_CASES)
    run_child(
        libraries,
        built("emulated-sanitized"),
        precision,
        names,
        LD_PRELOAD=" ".join(map(str, preloaded)),
        ASAN_OPTIONS="detect_leaks=0",  # Python's own
        UBSAN_OPTIONS="print_stacktrace=1",
    )


# ---- what speed depends on ---------------------------------------------------------------------------


def counted(libraries: dict[str, Path], library: Path, case: Case) -> dict[str, int]:
    """What backward alone costs in bf16."""
    core = device_core(libraries, BF16, BF16, aligned=True)
    arrays = make_arrays(case, core.dtype)
    forward = capi.run_forward(core, case, arrays)
    before = counters(library)
    capi.run_backward(core, case, arrays, forward)
    after = counters(library)
    return {name: after[name] - before[name] for name in after}


def test_what_takes_long_begins_first(libraries: dict[str, Path], emulated_device: Path) -> None:
    """As in forward, in both passes: of queries the last see most keys, of keys the first are seen
    most."""
    library = library_of(emulated_device)
    case = Case(B=3, H=4, N=512, M=512, D=64, Dv=64, causal=True)
    cost = counted(libraries, library, case)
    assert cost["busiest"] == cost["mma"] // 8


@pytest.mark.parametrize("heads", [1, 4])
def test_a_tile_beyond_the_band_costs_what_plain_attention_costs(
    libraries: dict[str, Path], emulated_device: Path, heads: int
) -> None:
    """Products on tensor cores: seven of a pair of tiles, an eighth of one for sums of rows beyond the
    band, and what else a band adds grows with N alone. With more heads, and so enough blocks, these are
    of 128 rows, and five products, since dq is made by turns."""
    library = library_of(emulated_device)
    products = 7 if heads == 1 else 5
    tile = heads * 64 * 64 * 64 // (16 * 8 * 16)  # mma of one product of two tiles
    more = []
    for N in (256, 512):
        plain = Case(N=N, M=N, D=64, Dv=64, H=heads)
        shaw = replace(plain, key=Band(16, 16), value=Band(16, 16))
        costs = [counted(libraries, library, case) for case in (plain, shaw)]
        assert costs[0]["mma"] == products * tile * (N // 64) ** 2
        assert costs[0]["bank_conflicts"] == costs[1]["bank_conflicts"] == 0
        more.append(costs[1]["mma"] - costs[0]["mma"] - tile // 8 * (N // 64) ** 2)
    # of 33 distances, which fill 6 of 8 columns of tiles, both passes make cells, for two terms: one
    # of each tile, the other of three tiles' rows; three products at most bring them to dq and tables;
    # by turns the pass over queries weighs once more what crosses: 192 keys by 128 queries
    per_row = (2 * 6 / 8 + 3 * 2 * 6 / 8 + 3 + (0 if heads == 1 else 2 * 3)) * tile
    assert more[0] <= 4 * per_row
    assert more[1] - more[0] <= 4 * per_row


def test_turns_are_taken(libraries: dict[str, Path], emulated_device: Path) -> None:
    """Where their names say so; and not where there are biases."""
    library = library_of(emulated_device)
    for name in [name for name in BANDS if name.startswith("turns")]:
        assert counted(libraries, library, BANDS[name])["turns"] > 0, name
        assert counted(libraries, library, replace(BANDS[name], bias=T5))["turns"] == 0


FEWER = """
from pathlib import Path
import test_cuda_attention_backward as own
from dataclasses import replace
core = Path({core!r})
case = replace(own.SHAW, H=1, N=510, M=384)
print(own.counted({{"f32": core}}, Path({library!r}), case)["turns"])
"""


@pytest.mark.parametrize(("wish", "turns"), [("1", True), ("4", False), ("-1", False)])
def test_fewer_multiprocessors(
    libraries: dict[str, Path], emulated_device: Path, wish: str, turns: bool
) -> None:
    """A call that is too small for four is large enough for one."""
    text = FEWER.format(core=str(libraries["f32"]), library=str(library_of(emulated_device)))
    environment = os.environ | {"RELPOS_CUDA_MULTIPROCESSORS": wish}
    ran = capi.run_script(text, environment=environment)
    assert ran.returncode == 0, ran.stderr
    assert (int(ran.stdout) > 0) == turns


def test_rows_of_padding_are_zero_by_turns(
    libraries: dict[str, Path], emulated_device: Path
) -> None:
    """Whatever the keys beside them hold."""
    core = device_core(libraries, 0, BF16, aligned=True)
    case = replace(SHAW, B=2, H=4, N=256, M=256, lengths=(256, 230), key_lengths=(256, 250))
    arrays = make_arrays(case, core.dtype)
    arrays.v.view[..., 100, :] = np.inf
    arrays.remember()
    results = capi.run_both(core, case, arrays)
    assert np.isnan(results["q"][1, :, 229]).any()
    assert not results["q"][1, :, 230:].any()


def turned_case(seed: int) -> Case:
    """Long sequences, so that dq is made by turns: any window, place and lengths."""
    random = np.random.default_rng(seed)

    def draw(*of: object) -> object:
        return of[random.integers(len(of))]

    def rows() -> int:
        return int(128 * random.integers(2, 6) - random.integers(0, 9))

    left, right = (int(random.integers(0, 300)) for _ in range(2))
    bands = [Band(int(random.integers(0, 17)), int(random.integers(0, 17))) for _ in range(2)]
    case = Case(
        H=4, N=rows(), M=rows(), D=64, Dv=64, key=draw(bands[0], None), value=draw(bands[1], None)
    )
    case = replace(case, window=draw((-1, -1), (left, right), (-1, right), (left, -1)))
    case = replace(case, causal=bool(random.integers(2)), per_head=bool(random.integers(2)))
    if random.integers(2):
        return replace(case, starts=(int(random.integers(-300, 900)),))
    if random.integers(2):
        return case
    ends = [0, *np.cumsum([rows() for _ in range(2)]).tolist()]
    return replace(case, B=2, H=2, offsets=tuple(ends))


@pytest.mark.parametrize("seed", range(24))
def test_turns_in_any_window(libraries: dict[str, Path], emulated_device: Path, seed: int) -> None:
    report([compare_rounded(device_core(libraries, 0, BF16, aligned=True), turned_case(seed))])


def masked_case(seed: int) -> Case:
    """Masks that hide whole tiles, beside bands that cross some of them and whatever else."""
    random = np.random.default_rng(seed)

    def draw(*of: Any) -> Any:
        return of[random.integers(len(of))]

    def band() -> Band:
        most = draw(2, 20, 300)
        return Band(int(random.integers(most)), int(random.integers(most)), draw("clip", "none"))

    H, N, M = draw(1, 2), int(random.integers(65, 300)), int(random.integers(65, 300))
    fill = draw("patches", "columns", "columns", "none", "last")
    case = Case(H=H, N=N, M=M, D=8, Dv=8, mask=Mask(fill, per_head=draw(False, True)))
    case = replace(case, key=draw(None, band(), band()), value=draw(None, band(), band()))
    case = replace(case, query=draw(None, None, band()), bias=draw(None, None, band()))
    if random.integers(4) == 0:
        case = replace(case, value=(case.value, Labels(9)) if case.value else Labels(9))
    case = replace(case, starts=draw(None, None, (int(random.integers(-200, 200)),)))
    case = replace(case, causal=draw(False, True), window=draw((-1, -1), (90, 100)))
    return replace(case, dropout=draw(None, DROPOUT), softcap=draw(0.0, 0.0, 3.0))


@pytest.mark.parametrize("seed", range(12))
def test_masks_of_whole_tiles(libraries: dict[str, Path], emulated_device: Path, seed: int) -> None:
    core = device_core(libraries, 0, BF16 if seed % 3 == 2 else 0)
    report([(compare_rounded if seed % 3 == 2 else compare_case)(core, masked_case(seed))])


@pytest.mark.parametrize("causal", [False, True])
def test_turns_give_the_same_bits_again(
    libraries: dict[str, Path], emulated_device: Path, causal: bool
) -> None:
    """Whichever block is fast: that shows on a GPU, where all of a sequence's are at work at once."""
    times, H, N = (20, 16, 4096) if str(emulated_device) == "gpu" else (2, 4, 512)
    core = device_core(libraries, BF16, BF16, aligned=True)
    case = Case(H=H, N=N, M=N, D=64, Dv=64, key=Band(16, 16), value=Band(16, 16), causal=causal)
    arrays = make_arrays(case, core.dtype)
    forward = capi.run_forward(core, case, arrays)
    first = capi.run_backward(core, case, arrays, forward)
    for _ in range(times - 1):
        again = capi.run_backward(core, case, arrays, forward)
        assert [name for name in first if not np.array_equal(first[name], again[name])] == []


def test_short_sequences_are_read_once(libraries: dict[str, Path], emulated_device: Path) -> None:
    """Five products of a sequence; a band adds its cells, their way to dq and to the tables."""
    library = library_of(emulated_device)
    product = 32 * 32 * 64 // (16 * 8 * 16)
    plain = Case(B=8, N=25, M=25, D=64, Dv=64)
    shaw = replace(plain, key=Band(16, 16), value=Band(16, 16))
    for case, products in ((plain, 5), (shaw, 5 + 2 * 48 / 32 + 3 * 48 / 32)):
        cost = counted(libraries, library, case)
        assert cost["mma"] == 8 * product * products
        assert cost["bank_conflicts"] == 0


def test_gradients_of_tables_take_one_launch(
    libraries: dict[str, Path], emulated_device: Path
) -> None:
    """But tied ones, of which one comes after the other."""
    library = library_of(emulated_device)
    keys = Case(N=25, M=25, D=64, Dv=64, key=Band(16, 16))
    both = replace(keys, value=Band(16, 16))
    cases = (keys, both, replace(both, tied=True))
    launches = [counted(libraries, library, case)["launches"] for case in cases]
    assert launches == [launches[0], launches[0], launches[0] + 1]


def test_the_general_way_multiplies_on_tensor_cores(
    libraries: dict[str, Path], emulated_device: Path
) -> None:
    """Three passes make p~ and ds, of two products each, and three more are gradients of rows. In tiles
    that it crosses, a band costs two a pass, and two for each gradient; a short table one for each."""
    library = library_of(emulated_device)
    tile = 64 * 64 * 64 // (16 * 8 * 16)
    plain = Case(N=256, M=256, D=64, Dv=64, mask=Mask())  # which goes this way
    products = {
        "plain": (plain, 2 * 2 + 3),  # the third pass has no table to go for
        "disentangled": (
            replace(plain, key=Band(255, 255), query=Band(255, 255)),
            3 * 6 + 3 + 4 + 4,
        ),
        "labels": (replace(plain, key=Labels(51), value=Labels(51)), 3 * 2 + 3 + 1 + 2),
    }
    for name, (case, expected) in products.items():
        found = counted(libraries, library, case)["mma"] / (tile * 4 * 4)
        # products with the table itself are made once for each tile of queries, not each pair
        assert expected <= found <= expected + 0.5, (name, found)


def test_what_a_mask_hides_costs_nothing_backward(
    libraries: dict[str, Path], emulated_device: Path
) -> None:
    library = library_of(emulated_device)
    plain = Case(N=384, M=384, D=64, Dv=64, key=Labels(5), mask=Mask("all"))
    costs = [
        counted(libraries, library, replace(plain, mask=Mask(fill)))["mma"]
        for fill in ("all", "columns", "none")
    ]
    once = costs[2]  # what rows meet of the table
    assert costs[0] - once == 2 * (costs[1] - once) > 20 * once > 0
