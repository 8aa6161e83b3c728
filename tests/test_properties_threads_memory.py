# SPDX-License-Identifier: Apache-2.0
"""What must hold whatever the number of threads, and what memory a call takes: workspaces, peaks.

Where a property says "the same", the same bits are meant unless a tolerance stands there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import capi
from capi import Core
from case_arrays import make_arrays
from cases import Case, Distances, Edges, Labels, Map
from cores import every_core, get_core
from guarded_arrays import hold
from properties import BASE, EVERYTHING, SHARED, judge, same
from relpos import reference
from relpos.reference import Band, Dropout
from tolerances import oracle_of

core = every_core  # a fixture

# ---- threads -------------------------------------------------------------------------------------

THREADED = [
    BASE,
    replace(SHARED, B=1, H=1, N=300, M=300, D=16, Dv=16),
    replace(SHARED, B=3, offsets=(0, 100, 101, 260), causal=True, tied=True),
    replace(SHARED, B=1, H=2, N=3, M=150, key=Band(400, 400), value=Band(2, 0, "none")),
    EVERYTHING,
    replace(EVERYTHING, B=1, H=1, N=300, M=300, causal=True),
    replace(EVERYTHING, B=1, H=4, key_heads=2, N=300, M=300, causal=True),
]


@pytest.mark.parametrize(
    "case",
    THREADED,
    ids=["heads", "one head", "packed", "few queries", "everything", "long", "shared keys"],
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


# ---- memory --------------------------------------------------------------------------------------

MEMORY_PROBE = """
import resource, sys
import numpy as np, capi
from pathlib import Path
from case_arrays import make_arrays
from cases import Case
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


@pytest.mark.parametrize("key_heads", [1, 4])
def test_heads_that_share_keys_need_no_more_memory(
    libraries: dict[str, Path], key_heads: int
) -> None:
    """Than as many heads alone: they have slots and rows one after the other."""
    core = get_core(libraries, "f32-portable")
    core.set_threads(2)
    case = replace(SHARED, H=32, N=512, M=512, D=64, Dv=64, key=Band(16, 16), value=Band(16, 16))
    sizes = []
    for each in (replace(case, key_heads=key_heads), replace(case, H=key_heads)):
        call, alive = capi.describe(core, each, make_arrays(each, core.dtype))
        sizes.append(max(core.workspace_bytes(call)))
        del alive
    core.set_threads(0)
    assert sizes[0] <= 1.1 * sizes[1], sizes


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


@pytest.mark.parametrize("map", [Labels(20000, 4, "sparse"), Edges(20000)], ids=["labels", "edges"])
def test_rows_that_no_pair_meets_take_no_memory(libraries: dict[str, Path], map: Map) -> None:
    """Of the sums of a long table backward writes lines for the rows met, and a number for others."""
    core = get_core(libraries, "f32-portable")
    case = Case(B=1, H=2, N=70, M=70, D=64, Dv=64, key=map, value=map, position_bias=True)
    arrays = make_arrays(case, core.dtype)
    forward = capi.run_forward(core, case, arrays)
    run, written, workspace = capi.backward_call(core, case, arrays, forward)
    run()
    touched = np.count_nonzero(workspace.raw[workspace.inside] != 0xFF)
    rows, pairs, terms = 20000, 70 * 70, 2 * case.H
    most = 2**22 + terms * 4 * (rows + pairs * (64 + 1))
    assert touched <= most < terms * 4 * rows * (64 + 1), (touched, most)
    results = {"out": forward.out.view, "lse": forward.lse.view}
    results |= {name: array.view for name, array in written.items()}
    judge(case, results, oracle_of(case, arrays))


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
