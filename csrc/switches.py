# SPDX-License-Identifier: Apache-2.0
"""What the environment says of how setup.py builds libcore and the binding.

RELPOS_BLAS=builtin          no OpenBLAS, relpos's own matrix products
RELPOS_CUDA=1                no nvcc is an error; 0: it is not looked for (cuda/nvcc.py)
RELPOS_SYSTEM_CORE=PREFIX    use the libcore that `make install PREFIX=...` put there
RELPOS_DEBUG=1               no optimisation, asserts
RELPOS_SANITIZE=LIST         as the compiler's -fsanitize, e.g. address,undefined
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path


def one_of(name: str, *known: str) -> str:
    """A variable's value; the first is the default."""
    value = os.environ.get(name) or known[0]
    if value not in known:
        raise SystemExit(f"{name}: expected {' or '.join(known)}, got {value}")
    return value


def system_core() -> str | None:
    prefix = os.environ.get("RELPOS_SYSTEM_CORE")
    if not prefix:
        return None
    if not prefix.startswith("/"):
        raise SystemExit(f"RELPOS_SYSTEM_CORE={prefix}: must begin with /")
    for name in ("include/relpos/relpos.h", "lib/libcore.so"):
        if not Path(prefix, name).exists():
            raise SystemExit(f"RELPOS_SYSTEM_CORE={prefix}: no {name} there")
    return prefix


OPENBLAS_MACHINES = ("x86_64", "aarch64", "s390x", "riscv64")  # those it has wheels for
BLAS = one_of("RELPOS_BLAS", "openblas", "builtin")
SYSTEM_CORE = system_core()
NEEDS_OPENBLAS = not SYSTEM_CORE and BLAS != "builtin" and platform.machine() in OPENBLAS_MACHINES
SANITIZE = os.environ.get("RELPOS_SANITIZE")
VARIANT = ["-O0", "-g", "-UNDEBUG"] if one_of("RELPOS_DEBUG", "0", "1") == "1" else []
VARIANT += ["-g", "-UNDEBUG", f"-fsanitize={SANITIZE}"] if SANITIZE else []


def shown(flags: list[str]) -> str:
    """What rp_build_info says of flags, after the user's, as a text of C."""
    return json.dumps(" ".join([os.environ.get("CFLAGS", ""), *flags]).strip(), ensure_ascii=False)
