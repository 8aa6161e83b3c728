# SPDX-License-Identifier: Apache-2.0
"""libcore itself: what was built, its threads, and how a C program links with it."""

from __future__ import annotations

import mmap
import os
import platform
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from relpos import _core
from relpos.position.arrays import check_count

_PACKAGE = Path(__file__).resolve().parent
_MOST = (1 << 31) - 1  # that the core can be told


class BuildInfo(TypedDict):
    """What `build_info` returns."""

    version: str
    compiler: str
    flags: str
    isa: str
    isa_available: str
    bf16: str
    blas: str
    threads: int
    cuda: str
    numpy: str
    python: str


def build_info() -> BuildInfo:
    """What this build is and what it chose on this machine: belongs in every bug report.

    "bf16" is what multiplies it on the CPU ("AVX512-BF16", "AMX"), "none" where it gains nothing.
    Of "cuda" it says whether the library for GPUs is there and what it was made of; the library is
    looked into and not loaded. Whether it works here `devices` says.
    """
    return {
        **_core.build_info(),
        "cuda": _cuda(),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _cuda() -> str:
    """Version, CUDA and compute capabilities of librelpos_cuda.so, where libcore looks for it."""
    given = os.environ.get("RELPOS_CUDA_LIBRARY")
    file = Path(given) if given else _PACKAGE / "lib" / "librelpos_cuda.so"
    if not given and not (file.parent / "libcore.so").exists():
        return "unknown: libcore is installed elsewhere"
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as all_:
            found = re.search(rb"relpos-cuda (\S{1,40}) CUDA (\d{4,6}) for ([\d,]{0,99});", all_)
            words = [] if found is None else [word.decode() for word in found.groups()]
    except FileNotFoundError:
        return f"not found: {file}" if given else "not built"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    if not words:
        return f"{file} does not say what it is"
    cuda = int(words[1])
    capabilities = [f"{int(each) / 100:.1f}" for each in words[2].split(",") if each]
    made_for = "compute capability " + " ".join(capabilities) if capabilities else "no GPU"
    return f"{words[0]}, CUDA {cuda // 1000}.{cuda % 1000 // 10}, for {made_for}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What can compute: this processor, or a GPU.

    name: str. What a `device` argument takes: "cpu", "cuda:0".
    title: str. What it is.
    memory: int. Bytes, 0 where that is unknown; memory_free: int. Those of them free now, 0 where
        that is unknown: of a GPU that this process does not use.
    problem: str or None. Why it cannot be used; None: it can.
    """

    name: str
    title: str
    memory: int
    memory_free: int
    problem: str | None


def devices() -> list[Device]:
    """What can compute here, the CPU first; without a GPU one more line says why."""
    return [
        Device(name=name, title=title, memory=memory, memory_free=free, problem=problem)
        for name, title, memory, free, problem in _core.devices()
    ]


def set_threads(threads: int) -> None:
    """Sets the number of threads of every later call, the caller's included.

    threads: int. 0 returns to the default: RELPOS_NUM_THREADS, else OMP_NUM_THREADS, else the
        cores this process may run on. Results do not depend on it.
    """
    number = check_count("threads", threads, 0)
    if number > _MOST:
        raise ValueError(f"threads is {number}, expected 1 to 1024, or 0 for the default")
    _core.set_threads(number)


def get_threads() -> int:
    """The number of threads that a call uses."""
    return _core.get_threads()


def include_dir() -> Path:
    """The folder for -I; relpos.h, model.h, decode.h and device.h lie in its relpos/."""
    return _installed(_PACKAGE / "include", "relpos/relpos.h")


def library_dir() -> Path:
    """The folder of libcore.so and libcore.a."""
    return _installed(_PACKAGE / "lib", "libcore.so")


def cflags() -> str:
    """What the compiler of a C program needs, as words of a shell."""
    return shlex.quote(f"-I{include_dir()}")


def libs() -> str:
    """What the linker of a C program needs; it then finds libcore.so where that lies."""
    folder = library_dir()
    return shlex.join([f"-L{folder}", "-lcore", f"-Wl,-rpath,{folder}"])


def _installed(folder: Path, content: str) -> Path:
    if not (folder / content).exists():
        raise FileNotFoundError(
            f"{folder / content}: not here; this relpos was built on an installed libcore: "
            "ask `pkg-config --cflags --libs relpos`"
        )
    return folder
