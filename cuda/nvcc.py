# SPDX-License-Identifier: Apache-2.0
"""Finds nvcc and cuBLAS and builds librelpos_cuda.so with them, from the list in cuda.mk.

    python cuda/nvcc.py --out FOLDER    what `make cuda` runs; setup.py calls build_for_package()

nvcc is that of NVCC or PATH, of CUDA_HOME, of /usr/local/cuda, or of the PyPI package cuda-toolkit
(nvidia/cu13 in a site-packages folder); so is cuBLAS, though not necessarily of the same place.
What is up to date is not compiled again.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "librelpos_cuda.so"
MAJOR = 13
# Where `pip install 'relpos[cuda]'` puts cuBLAS and the runtime, seen from relpos/lib.
WHEELS = "$ORIGIN/../../nvidia/cu13/lib"
BLAS_HEADERS = ("cublas_v2.h", "cublas_api.h")


class Missing(Exception):
    """There is no compiler, or no cuBLAS, for CUDA here: the sentence says which."""


def listed(file: str = "cuda/cuda.mk") -> dict[str, list[str]]:
    """The variables of a list of sources."""
    text = (ROOT / file).read_text().replace("\\\n", " ")
    return {name: shlex.split(v) for name, v in re.findall(r"(?m)^(\w+) *= *(.*)$", text)}


def wheel_folders() -> list[Path]:
    """nvidia/cu13 wherever this Python looks for packages."""
    places = [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    found = [Path(place) / "nvidia" / f"cu{MAJOR}" for place in places if place]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def toolkits() -> list[Path]:
    """Folders that may hold a toolkit, the likeliest first."""
    names = [os.environ.get("NVCC", ""), shutil.which("nvcc") or ""]
    found = [Path(name).resolve().parent.parent for name in names if name]
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    found += [Path(home) for home in homes if home] + [Path("/usr/local/cuda"), *wheel_folders()]
    return list(dict.fromkeys(found))


def first(folders: list[Path], names: tuple[str, ...]) -> Path | None:
    return next((f / name for f in folders for name in names if (f / name).exists()), None)


def output(*command: str | Path) -> str:
    done = subprocess.run([str(w) for w in command], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


@dataclass
class Compiler:
    """nvcc, and what goes with it."""

    nvcc: Path
    release: str
    architectures: list[int]
    blas_include: Path
    libraries: list[Path] = field(default_factory=list)  # cuBLAS and the runtime

    def targets(self) -> list[str]:
        """Machine code for every architecture, and PTX of the first and the last for others."""
        first, last = self.architectures[0], self.architectures[-1]
        codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in self.architectures]
        ptx = [f"-gencode=arch=compute_{n},code=compute_{n}" for n in dict.fromkeys((first, last))]
        return [*codes, *ptx]

    def program(self) -> list[str]:
        """The command that makes a program for the card of this machine, but for its files. A
        package has its libraries where nvcc does not look, and PTX may be too new for a driver."""
        folders = [f"-I{ROOT / folder}" for folder in listed()["CUDA_INCLUDES"]]
        libraries = f"-L{self.libraries[0].parent}"
        return [str(self.nvcc), "-std=c++17", "-arch=native", *folders, libraries]


def find() -> Compiler:
    folders = toolkits()
    nvcc = first(folders, ("bin/nvcc",))
    if nvcc is None:
        raise Missing("no nvcc: not on PATH, in CUDA_HOME, or from the package cuda-toolkit[nvcc]")
    release = re.search(r"release (\d+)\.(\d+)", output(nvcc, "--version"))
    if release is None or int(release[1]) != MAJOR:
        came = release[0] if release else "no version"
        raise Missing(f"{nvcc}: {came}, expected release {MAJOR}.x")
    known = output(nvcc, "--list-gpu-code")
    wanted = [int(word) for word in listed()["CUDA_ARCHITECTURES"]]
    architectures = [n for n in wanted if re.search(rf"\bsm_{n}\b", known)]
    header = first(folders, ("include/cublas_v2.h",))
    if header is None:
        raise Missing(f"{nvcc} has no cuBLAS beside it: no cublas_v2.h; cuda-toolkit[cublas]")
    libraries = []
    for name in ("cudart", "cublas"):
        file = first(folders, (f"lib64/lib{name}.so.{MAJOR}", f"lib/lib{name}.so.{MAJOR}"))
        if file is None:
            raise Missing(f"{nvcc} has no lib{name}.so.{MAJOR} beside it; cuda-toolkit[{name}]")
        libraries.append(file)
    version = f"{release[1]}.{release[2]}"
    return Compiler(nvcc, version, architectures, header.parent, libraries)


def blas_headers(compiler: Compiler, out: Path) -> Path:
    """cuBLAS's headers alone: those beside them may be of another release than nvcc."""
    folder = out / "include"
    folder.mkdir(parents=True, exist_ok=True)
    for name in BLAS_HEADERS:
        shutil.copyfile(compiler.blas_include / name, folder / name)
    return folder


def is_fresh(target: Path, command: list[str]) -> bool:
    """The same command made it, from files that have not changed since."""
    line, needs = target.with_suffix(".command"), target.with_suffix(".d")
    if not (target.exists() and needs.exists() and line.exists()):
        return False
    if line.read_text() != shlex.join(command):
        return False
    words = shlex.split(needs.read_text().replace("\\\n", " "))
    files = [Path(word) for word in words if not word.endswith(":")]
    made = target.stat().st_mtime
    return all(file.exists() and file.stat().st_mtime <= made for file in files)


def compile_one(compiler: Compiler, name: str, out: Path, flags: list[str]) -> tuple[Path, str]:
    target = out / Path(name).with_suffix(".o")
    command = [str(compiler.nvcc), *flags, "-MD", "-MF", str(target.with_suffix(".d"))]
    command += ["-c", str(ROOT / "cuda" / name), "-o", str(target)]
    log = target.with_suffix(".log")  # what ptxas says of registers and spills
    if not is_fresh(target, command):
        target.with_suffix(".command").unlink(missing_ok=True)  # until it is whole
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        log.write_text(done.stdout + done.stderr)
        if done.returncode != 0:
            return target, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        target.with_suffix(".command").write_text(shlex.join(command))
    return target, ""


def build(out: Path, compiler: Compiler, jobs: int | None = None, stays: bool = False) -> Path:
    """Compiles what has changed and links FOLDER/librelpos_cuda.so; stays: for use on this machine,
    with the very libraries that were found."""
    mk = listed()
    out.mkdir(parents=True, exist_ok=True)
    flags = [*mk["CUDA_FLAGS"], *compiler.targets(), "-Xptxas=-v", "-Werror=all-warnings"]
    flags += [f"-Xcompiler={','.join(['-fPIC', '-fvisibility=hidden', *mk['CUDA_WARNINGS']])}"]
    flags += [f"-I{ROOT / folder}" for folder in mk["CUDA_INCLUDES"]]
    flags += ["-isystem", str(blas_headers(compiler, out))]
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        sources = mk["CUDA_SOURCES"]
        made = list(pool.map(lambda name: compile_one(compiler, name, out, flags), sources))
    faults = [fault for _, fault in made if fault]
    if faults:
        raise RuntimeError("\n".join(faults))
    return link(compiler, [target for target, _ in made], out / LIBRARY, stays)


def link(compiler: Compiler, objects: list[Path], library: Path, stays: bool) -> Path:
    # a toolkit of the system stays where it is; a package may have been there for this build alone
    folders = dict.fromkeys(file.parent for file in compiler.libraries)
    packages = {"site-packages", "dist-packages"}
    paths = [WHEELS, *(str(f) for f in folders if stays or packages.isdisjoint(f.parts))]
    command = [
        *shlex.split(os.environ.get("CXX", "c++")),
        "-shared",
        "-Wl,-z,defs",
        "-o",
        str(library),
    ]
    command += [*map(str, objects), *(f"-Wl,-rpath,{path}" for path in paths)]
    command += [str(file) for file in compiler.libraries] + ["-ldl", "-lpthread", "-lrt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return library


def build_for_package(out: Path, library: Path, stays: bool = False) -> None:
    """Puts librelpos_cuda.so beside libcore where it can be built. RELPOS_CUDA=1 insists."""
    wish = os.environ.get("RELPOS_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"RELPOS_CUDA: expected 0 or 1, got {wish}")
    if wish == "0":
        return
    try:
        compiler = find()
    except Missing as missing:
        if wish == "1":
            raise SystemExit(f"relpos: RELPOS_CUDA=1, but {missing}") from None
        print(f"relpos: without CUDA: {missing}")
        return
    shutil.copy(build(out.resolve(), compiler, stays=stays), library / LIBRARY)


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds librelpos_cuda.so.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cuda")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="architectures, as 80 90")
    given = parser.parse_args()
    try:
        compiler = find()
    except Missing as missing:
        print(f"CUDA: {missing}", file=sys.stderr)
        return 2
    if given.only:
        compiler.architectures = given.only
    print(f"nvcc {compiler.release}, {compiler.nvcc}; sm {compiler.architectures}")
    try:
        print(build(given.out.resolve(), compiler, given.jobs, stays=True))
    except RuntimeError as fault:
        print(fault, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
