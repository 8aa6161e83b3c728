# SPDX-License-Identifier: Apache-2.0
"""relpos.h as a C program meets it: capi.py against the header, the one call, names, the build."""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import capi
from capi import Core
from case_arrays import make_arrays
from cores import every_core, get_core
from guarded_arrays import SENTINEL
from properties import BASE, SHARED, TABLES, forward, same

core = every_core  # a fixture


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


def test_workspace_results_may_be_null(libraries: dict[str, Path]) -> None:
    core = get_core(libraries, "f32-portable")
    call, alive = capi.describe(core, BASE, make_arrays(BASE, core.dtype))
    assert core.lib.rp_attention_workspace(ctypes.byref(call), None, None) == capi.OK
    assert core.lib.rp_attention_workspace(None, None, None) == capi.ARGUMENT
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
