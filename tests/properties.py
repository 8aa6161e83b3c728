# SPDX-License-Identifier: Apache-2.0
"""What test_properties_*.py share: cases, and how results are compared.

Where a property says "the same", the same bits are meant unless a tolerance stands there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import capi
from capi import Attention, Core
from cases import Case, Distances, Edges, Labels, Mask
from guarded_arrays import SENTINEL, Arrays
from relpos.reference import Band, Dropout
from tolerances import Oracle, compare, oracle_of

BASE = Case(
    B=2, H=3, N=70, M=70, D=24, Dv=24, key=Band(5, 5), value=Band(5, 5), per_head=True, seed=77
)
SHARED = replace(BASE, per_head=False)
TABLES = ("key[0]", "value[0]")

EVERY_KIND = Case(B=2, H=2, N=45, M=70, D=24, Dv=24, seed=78)
TWIN_CASES = [
    replace(EVERY_KIND, causal=True, per_head=True),
    replace(EVERY_KIND, lengths=(45, 3), key_lengths=(66, 20), starts=(4, -2), position_bias=True),
    replace(EVERY_KIND, offsets=(0, 5, 60), dropout=Dropout(0.2, (1, 2))),
]

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


def call_forward(
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
