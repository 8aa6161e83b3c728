# SPDX-License-Identifier: Apache-2.0
"""What libcore refuses of a call of attention: with which status, and in which words."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capi
from capi import Attention
from case_arrays import make_arrays
from cases import Case, Distances, Edges, Labels, Mask
from cores import get_core
from guarded_arrays import SENTINEL, Arrays
from properties import BASE, SHARED, call_forward


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
    got, out = call_forward(core, BASE, arrays, **given)
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
    got, out = call_forward(core, MAPS, arrays, change=given["change"])
    message = core.lib.rp_last_error().decode()
    assert got == status, message
    assert all(word in message for word in words), message
    assert np.all(out == SENTINEL), "a refused call wrote its output"


def test_keys_of_edges_may_not_fall(libraries: dict[str, Path]) -> None:
    core = get_core(libraries, "f32-portable")
    case = replace(MAPS, bias=Edges(3, 1, "full"))
    arrays = make_arrays(case, core.dtype)
    _write("bias[0].edge_keys", 3, 0)(arrays)
    status, _ = call_forward(core, case, arrays)
    message = core.lib.rp_last_error().decode()
    assert status == capi.ARGUMENT
    assert "bias[0].edge_keys[3]=0 after 2" in message and "query 0" in message


def test_lengths_and_offsets_exclude_each_other(libraries: dict[str, Path]) -> None:
    core = get_core(libraries, "f32-portable")
    case = replace(SHARED, offsets=(0, 30, 70))
    given = _set("lengths", (30, 40))
    status, _ = call_forward(core, case, make_arrays(case, core.dtype), change=given)
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


def test_a_bad_number_of_threads_is_refused(libraries: dict[str, Path]) -> None:
    """By the first call that computes, until the number is set; reports go on."""
    with capi.environment("RELPOS_NUM_THREADS", "many"):
        core = capi.Core(libraries["f32"])
        call, alive = capi.describe(core, BASE, make_arrays(BASE, core.dtype))
        for _ in range(2):
            assert core.lib.rp_attention_workspace(ctypes.byref(call), None, None) == capi.ARGUMENT
            message = core.lib.rp_last_error().decode()
            assert message.startswith("RELPOS_NUM_THREADS: ") and message.endswith("got 'many'")
        assert core.build_info()["isa"] in capi.ISAS
    core.set_threads(2)
    assert core.lib.rp_attention_workspace(ctypes.byref(call), None, None) == 0
    del alive
