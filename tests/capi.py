# SPDX-License-Identifier: Apache-2.0
"""relpos.h for ctypes: libcore as a C program sees it, once for every instruction set.

The choice of an instruction set is made once per loaded library. So each Core loads its own copy of
the file, under its own name, with RELPOS_ISA set: copies share no static state.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import relpos
from case_arrays import allocate_rows
from cases import Case
from guarded_arrays import GUARD, SENTINEL, Arrays, Strided, allocate
from relpos import reference

F32, BF16 = 0, 1  # RP_F32, RP_BF16
OK, ARGUMENT, SHAPE, MEMORY, FILE, ORDER, DEVICE = 0, 10, 11, 20, 30, 40, 50
ALIGNMENT = 64

x86 = platform.machine() in ("x86_64", "AMD64")
ISAS = ("portable", "avx2", "avx512", "amx") if x86 else ("portable", "neon")
CORES = tuple(f"f32-{isa}" for isa in ISAS)


def run_script(
    source: str, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Python source in a process of its own, with the relpos and the tests that this one has.

    With -c the current folder comes first: the repository, whose relpos may not be built.
    """
    paths = [str(Path(__file__).parent), str(Path(relpos.__file__).parent.parent)]
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:1] = {paths!r}\n{source}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


class Rows(ctypes.Structure):
    """rp_rows and rp_rows_out."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    ]


TERMS = 2  # RP_TERMS


def fields(type: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, type) for name in names]


class Relation(ctypes.Structure):
    """rp_relation."""

    _fields_ = [
        *fields(ctypes.c_void_p, "table"),
        *fields(ctypes.c_int64, "head_stride", "row_stride", "rows"),
        *fields(ctypes.c_int, "map"),
        *fields(ctypes.c_int64, "left", "right"),
        *fields(ctypes.c_int, "beyond"),
        *fields(ctypes.c_void_p, "buckets", "query_positions", "key_positions"),
        *fields(ctypes.c_int64, "query_position_stride", "key_position_stride"),
        *fields(ctypes.c_void_p, "labels"),
        *fields(ctypes.c_int, "label_bytes"),
        *fields(ctypes.c_int64, "label_batch_stride", "label_head_stride", "label_row_stride"),
        *fields(ctypes.c_void_p, "label_starts", "edge_starts", "edge_keys", "edge_labels"),
    ]


class Mask(ctypes.Structure):
    """rp_mask."""

    _fields_ = [
        *fields(ctypes.c_void_p, "data"),
        *fields(ctypes.c_int64, "batch_stride", "head_stride", "row_stride"),
        *fields(ctypes.c_void_p, "starts"),
    ]


class Attention(ctypes.Structure):
    """rp_attention."""

    _fields_ = [
        *fields(ctypes.c_size_t, "struct_size"),
        *fields(ctypes.c_int64, "B", "H", "N", "M", "D", "Dv"),
        *fields(ctypes.c_void_p, "lengths", "key_lengths", "offsets", "key_offsets"),
        *fields(ctypes.c_void_p, "query_start"),
        *fields(ctypes.c_int, "causal"),
        *fields(ctypes.c_double, "scale"),
        *fields(Relation * TERMS, *reference.KINDS),
        *fields(ctypes.c_void_p, "position_bias"),
        *fields(ctypes.c_int64, "position_bias_stride", "window_left", "window_right"),
        *fields(Mask, "mask"),
        *fields(ctypes.c_double, "softcap", "dropout"),
        *fields(ctypes.c_uint32 * 2, "dropout_key"),
        *fields(ctypes.c_uint32, "dropout_site", "dropout_first"),
        *fields(ctypes.c_void_p, "dropout_ordinals", "placement"),
        *fields(ctypes.c_int64, "key_heads"),
    ]


class Gradients(ctypes.Structure):
    """rp_attention_gradients."""

    _fields_ = [
        *fields(Rows, "q", "k", "v"),
        *fields(ctypes.c_void_p * TERMS, *reference.KINDS),
        *fields(ctypes.c_void_p, "position_bias"),
    ]


class BuildInfo(ctypes.Structure):
    """rp_build_info."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *(
            (name, ctypes.c_char_p)
            for name in ("version", "compiler", "flags", "isa", "isa_available", "blas")
        ),
        ("real_bytes", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("bf16", ctypes.c_char_p),
    ]


class CoreError(Exception):
    """A call that returned another status than RP_OK."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status, self.message = status, message


class Unavailable(Exception):
    """This machine cannot run the instruction set asked for."""


_copies = itertools.count()


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    try:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


class Placement(ctypes.Structure):
    """rp_placement."""

    _fields_ = [
        *fields(ctypes.c_size_t, "struct_size"),
        *fields(ctypes.c_char_p, "device"),
        *fields(ctypes.c_void_p, "stream"),
        *fields(ctypes.c_int, "element", "precision"),
    ]


class Core:
    """One copy of a library, bound to one instruction set (None: left to the environment)."""

    def __init__(self, path: Path, isa: str | None = None, precision: int = F32) -> None:
        # Beside the original, so that $ORIGIN in its run path still holds.
        copy = path.with_name(f".test-{os.getpid()}-{next(_copies)}-{path.name}")
        shutil.copy(path, copy)
        try:
            with environment("RELPOS_ISA", isa) if isa else nullcontext():
                self.lib = ctypes.CDLL(str(copy))
                self._declare()
                info = self.build_info()
        finally:
            copy.unlink()
        if isa is not None and isa not in info["isa_available"].split():
            raise Unavailable(f"{isa} is not among {info['isa_available']!r}")
        if isa is not None and info["isa"] != isa:
            raise AssertionError(f"RELPOS_ISA={isa} gave {info['isa']}")
        self.where = Placement(ctypes.sizeof(Placement), None, None, F32, precision)
        real = "bf16" if self.rounded else f"f{8 * info['real_bytes']}"
        self.name = f"{real}-{info['isa']}"
        self.dtype: Any = np.float64 if info["real_bytes"] == 8 else np.float32

    def _declare(self) -> None:
        status, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
        rows, attention = Rows, ctypes.POINTER(Attention)
        for name, result, arguments in (
            ("rp_last_error", ctypes.c_char_p, []),
            ("rp_status_name", ctypes.c_char_p, [status]),
            (
                "rp_shaw_attention",
                status,
                [size] * 5 + [ctypes.c_int] + [pointer] * 6,
            ),
            (
                "rp_attention_workspace",
                status,
                [attention, ctypes.POINTER(size), ctypes.POINTER(size)],
            ),
            (
                "rp_attention_forward",
                status,
                [attention, rows, rows, rows, rows, pointer, pointer, size],
            ),
            (
                "rp_attention_backward",
                status,
                [attention, rows, rows, rows, rows, pointer, rows]
                + [ctypes.POINTER(Gradients), pointer, size],
            ),
            ("rp_set_threads", status, [ctypes.c_int]),
            ("rp_get_threads", ctypes.c_int, []),
            ("rp_build_info_get", status, [ctypes.POINTER(BuildInfo)]),
        ):
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, arguments

    def check(self, status: int) -> None:
        if status != OK:
            raise CoreError(status, self.lib.rp_last_error().decode())

    def build_info(self) -> dict[str, Any]:
        info = BuildInfo(struct_size=ctypes.sizeof(BuildInfo))
        self.check(self.lib.rp_build_info_get(ctypes.byref(info)))
        values = ((name, getattr(info, name)) for name, _ in BuildInfo._fields_)
        return {n: v.decode() if isinstance(v, bytes) else v for n, v in values}

    def set_threads(self, threads: int) -> None:
        self.check(self.lib.rp_set_threads(threads))

    # Where arrays lie that the caller places: here on the host (device_capi.py: on a device).

    def place(self, x: Strided, activation: bool = False) -> int:
        """The address that the core is given for an array: of q, k, v, out, and so on; or another."""
        return x.address

    def place_workspace(self, size: int) -> Workspace:
        return Workspace(size)

    def fetch(self) -> None:
        """Afterwards the host sees what the calls wrote."""

    def placement(self) -> int | None:
        """The address of an rp_placement."""
        return None if self.where.precision == F32 else ctypes.addressof(self.where)

    @property
    def rounded(self) -> bool:
        """Are operands of attention's products rounded to bfloat16?"""
        return self.where.precision == BF16

    def rows(self, x: Strided) -> Rows:
        return Rows(self.place(x, activation=True), *x.strides)

    def workspace_bytes(self, call: Attention) -> tuple[int, int]:
        forward, backward = ctypes.c_int64(-1), ctypes.c_int64(-1)
        status = self.lib.rp_attention_workspace(
            ctypes.byref(call), ctypes.byref(forward), ctypes.byref(backward)
        )
        self.check(status)
        return forward.value, backward.value


def core_by_name(libraries: dict[str, Path], name: str) -> Core:
    """ "f32", "f64", or with an instruction set: "f32-avx2". "bf16": "f32" where attention's operands
    are rounded to that."""
    real, _, isa = name.partition("-")
    rounded = real == "bf16"
    return Core(libraries["f32" if rounded else real], isa or None, BF16 if rounded else F32)


class Workspace:
    """Aligned memory of exactly so many bytes, all NaN, between two guards."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.raw = np.full(size + 3 * 256, 0xFF, np.uint8)
        first = 256 + -(self.raw.ctypes.data + 256) % ALIGNMENT
        self.inside = slice(first, first + size)
        self.raw[:first] = self.raw[first + size :] = 0xA5

    @property
    def address(self) -> int:
        return self.raw.ctypes.data + self.inside.start

    def untouched(self) -> bool:
        before, after = self.raw[: self.inside.start], self.raw[self.inside.stop :]
        return bool(np.all(before == 0xA5) and np.all(after == 0xA5))


def attention_default() -> Attention:
    """rp_attention_default(), which is inline."""
    return Attention(struct_size=ctypes.sizeof(Attention), window_left=-1, window_right=-1)


def place(name: str) -> tuple[str, int]:
    """Where the structs have a term: "key[1]" -> "key", 1."""
    kind, _, number = name.rstrip("]").partition("[")
    return kind, int(number)


def describe(core: Core, case: Case, arrays: Arrays) -> tuple[Attention, list[Any]]:
    """The rp_attention of a case, and what must outlive it."""
    call = attention_default()
    alive: list[Any] = [arrays]
    for name in ("B", "H", "key_heads", "N", "M", "D", "Dv", "causal", "softcap"):
        setattr(call, name, getattr(case, name))
    for name, values in (
        ("lengths", case.lengths),
        ("key_lengths", case.key_lengths),
        ("offsets", case.offsets),
        ("key_offsets", case.key_offsets),
        ("query_start", case.starts),
    ):
        if values is not None:
            array = np.array(values, np.int64)
            alive.append(array)
            setattr(call, name, array.ctypes.data)
    call.scale = case.scale or 0.0
    call.placement = core.placement()
    for name, table in arrays.tables.items():
        kind, number = place(name)
        relation = getattr(call, kind)[number]
        relation.table = core.place(table)
        relation.head_stride, relation.row_stride = table.strides[1:]
        _point(relation, arrays.maps[name].fields)
    if arrays.position_bias is not None:
        call.position_bias = core.place(arrays.position_bias)
        call.position_bias_stride = case.D + case.gap
    call.window_left, call.window_right = case.window
    if arrays.mask is not None:
        _point(call.mask, arrays.mask.fields)
    if case.dropout is not None:
        call.dropout, call.dropout_site = case.dropout.rate, case.dropout.site
        call.dropout_key[:], call.dropout_first = case.dropout.key, case.dropout.first
    return call, alive


def _point(struct: ctypes.Structure, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(struct, name, value.address if isinstance(value, Strided) else value)


@dataclass
class Forward:
    out: Strided
    lse: Strided


def lse_shape(case: Case) -> tuple[int, ...]:
    if case.offsets is not None:
        return (case.H, case.offsets[-1])
    return (case.B, case.H, case.N)


def forward_call(
    core: Core, case: Case, arrays: Arrays
) -> tuple[Callable[[], None], Forward, Workspace]:
    """rp_attention_forward of the case, to be called as often as one likes, and where it writes."""
    call, alive = describe(core, case, arrays)
    workspace = core.place_workspace(core.workspace_bytes(call)[0])
    out = allocate_rows(case, "query", case.Dv, core.dtype, SENTINEL)
    lse = allocate(lse_shape(case), 0, core.dtype, SENTINEL)
    rows = [core.rows(x) for x in (arrays.q, arrays.k, arrays.v, out)]
    results = (core.place(lse), workspace.address, workspace.size)
    alive += [out, lse, workspace]

    def run(_alive: Any = alive) -> None:
        core.check(core.lib.rp_attention_forward(ctypes.byref(call), *rows, *results))

    return run, Forward(out, lse), workspace


def run_forward(core: Core, case: Case, arrays: Arrays) -> Forward:
    """rp_attention_forward of the case; asserts that nothing outside the results was written."""
    run, result, workspace = forward_call(core, case, arrays)
    run()
    core.fetch()
    assert workspace.untouched(), "forward wrote beyond its workspace"
    assert result.out.untouched(SENTINEL), "forward wrote beyond out"
    assert result.lse.untouched(SENTINEL), "forward wrote beyond lse"
    assert arrays.unmodified(), "forward changed its inputs"
    return result


def backward_call(
    core: Core, case: Case, arrays: Arrays, forward: Forward, tables_hold: float | None = 0.0
) -> tuple[Callable[[], None], dict[str, Strided], Workspace]:
    """rp_attention_backward, likewise; gradients of parameters start at `tables_hold`.

    tables_hold None: no gradients of tables and position_bias are asked for. Rows of out and lse
    beyond a length are NaN here: backward must not read them either. Tied tables: one gradient,
    "key[0]".
    """
    call, alive = describe(core, case, arrays)
    workspace = core.place_workspace(core.workspace_bytes(call)[1])
    out = allocate_rows(case, "query", case.Dv, core.dtype, np.nan)
    lse = allocate(lse_shape(case), 0, core.dtype, np.nan)
    for span in case.spans:
        for h in range(case.H):
            query = (case.layout, span.batch, h, span.query_row, span.queries)
            part = reference.head_rows(forward.out.view, *query)
            reference.head_rows(out.view, *query)[...] = part
            head = (h,) if case.offsets is not None else (span.batch, h)
            used = slice(span.query_row, span.query_row + span.queries)
            lse.view[head][used] = forward.lse.view[head][used]
    written = {
        "q": allocate_rows(case, "query", case.D, core.dtype, SENTINEL),
        "k": allocate_rows(case, "key", case.D, core.dtype, SENTINEL),
        "v": allocate_rows(case, "key", case.Dv, core.dtype, SENTINEL),
    }
    gradients = Gradients(*(core.rows(written[name]) for name in ("q", "k", "v")))
    parameters = dict(arrays.tables)
    if arrays.position_bias is not None:
        parameters["position_bias"] = arrays.position_bias
    for name, values in parameters.items() if tables_hold is not None else ():
        target = "key[0]" if case.tied and name == "value[0]" else name
        if target == name:
            written[name] = allocate(values.view.shape, case.gap, core.dtype, SENTINEL)
            written[name].view[...] = tables_hold
        if name == "position_bias":
            gradients.position_bias = core.place(written[name])
        else:
            kind, number = place(name)
            getattr(gradients, kind)[number] = core.place(written[target])
    rows = [core.rows(x) for x in (arrays.q, arrays.k, arrays.v, out)]
    given = (core.place(lse), core.rows(arrays.dout))
    space = (workspace.address, workspace.size)
    alive += [out, lse, workspace, written]

    def run(_alive: Any = alive) -> None:
        status = core.lib.rp_attention_backward(
            ctypes.byref(call), *rows, *given, ctypes.byref(gradients), *space
        )
        core.check(status)

    return run, written, workspace


def run_backward(
    core: Core, case: Case, arrays: Arrays, forward: Forward, tables_hold: float | None = 0.0
) -> dict[str, np.ndarray]:
    """Gradients by name; asserts that nothing outside of them was written."""
    run, written, workspace = backward_call(core, case, arrays, forward, tables_hold)
    run()
    core.fetch()
    assert workspace.untouched(), "backward wrote beyond its workspace"
    for name, array in written.items():
        assert array.untouched(SENTINEL), f"backward wrote beyond the gradient of {name}"
    assert arrays.unmodified(), "backward changed its inputs"
    return {name: array.view for name, array in written.items()}


def run_both(core: Core, case: Case, arrays: Arrays) -> dict[str, np.ndarray]:
    """Results and gradients by name, as tolerances.Oracle names them."""
    forward = run_forward(core, case, arrays)
    gradients = run_backward(core, case, arrays, forward)
    return {"out": forward.out.view, "lse": forward.lse.view, **gradients}


assert GUARD * 4 % ALIGNMENT, "arrays are to be unaligned, so that nothing relies on alignment"
