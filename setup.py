# SPDX-License-Identifier: Apache-2.0
"""Builds libcore, from the list in csrc/core.mk, and the binding on top of it.

    relpos/_core.abi3.so         the binding; finds libcore by RPATH, which LD_LIBRARY_PATH is behind
    relpos/lib/                  libcore.so, libcore.a, librelpos_cuda.so, OpenBLAS, its licence
    relpos/include/relpos/       relpos.h, device.h, model.h, decode.h

Read from the environment, besides what setuptools reads (CC, CFLAGS and so on):
    csrc/switches.py             RELPOS_BLAS, RELPOS_SYSTEM_CORE, RELPOS_DEBUG, RELPOS_SANITIZE
    cuda/nvcc.py                 RELPOS_CUDA, NVCC, CUDA_HOME, CUDA_PATH, CXX
"""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path[:0] = ["csrc", "cuda"]
import nvcc  # noqa: E402
from switches import BLAS, NEEDS_OPENBLAS, SYSTEM_CORE, VARIANT, shown  # noqa: E402

OPENBLAS = "scipy-openblas32==0.3.34.481.3"
MK = nvcc.listed("csrc/core.mk")
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # has no limited API


def copy_openblas(folder):
    """OpenBLAS beside libcore, which looks for it there, and the licences it asks to go along."""
    wheel = next(iter(importlib.metadata.distributions(name=OPENBLAS.split("==")[0])), None)
    if wheel is None:
        raise SystemExit(
            f"relpos: {OPENBLAS} is not installed (it may have no wheel for {platform.machine()}); "
            "set RELPOS_BLAS=builtin to build with relpos's own matrix products instead"
        )
    for file in wheel.files:
        if file.name == "libscipy_openblas.so":
            shutil.copy(file.locate(), folder / file.name)
        elif file.name.startswith("LICENSE"):
            shutil.copy(file.locate(), folder / "LICENSE-openblas.txt")


class Modules(build_py):
    def run(self):  # what has been deleted since the last build goes into no wheel
        shutil.rmtree(Path(self.build_lib, "relpos"), ignore_errors=True)
        super().run()


class Build(build_ext):
    def build_extensions(self):
        if not Path(python := sysconfig.get_path("include"), "Python.h").exists():
            raise SystemExit(f"relpos: no {python}/Python.h: install python3-dev or python3-devel")
        numpy = importlib.import_module("numpy")  # metadata can be had without it
        self.force, package = True, Path(self.build_lib) / "relpos"  # switches may have changed
        shutil.rmtree(package / "lib", ignore_errors=True)
        shutil.rmtree(package / "include", ignore_errors=True)
        self.compiler.linker_so = [w for w in self.compiler.linker_so if "-Wl,-rpath" not in w]
        if not SYSTEM_CORE:
            self.build_core(package / "lib", package / "include/relpos")
        binding.library_dirs = [f"{SYSTEM_CORE or package}/lib"]
        binding.include_dirs = [f"{SYSTEM_CORE or package}/include", numpy.get_include()]
        super().build_extensions()

    def copy_extensions_to_source(self):  # editable installs
        super().copy_extensions_to_source()
        for name in ("lib", "include"):  # removed first: what is in use may not be written over
            shutil.rmtree(f"relpos/{name}", ignore_errors=True)
            if not SYSTEM_CORE:
                shutil.copytree(f"{self.build_lib}/relpos/{name}", f"relpos/{name}")

    def build_core(self, library, include):
        library.mkdir(parents=True)
        shutil.copytree("csrc/include/relpos", include)
        if BLAS != "builtin":
            copy_openblas(library)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(self.compile_core, MK["CORE_SOURCES"]))
        self.compiler.create_static_lib(objects, "core", str(library))
        flags = ["-Wl,-soname,libcore.so", *MK["CORE_LDFLAGS"], *VARIANT, *MK["CORE_LIBS"]]
        self.compiler.link_shared_object(objects, f"{library}/libcore.so", extra_postargs=flags)
        stays = self.inplace or self.editable_mode
        nvcc.build_for_package(Path(self.build_temp, "cuda"), library, stays)

    def compile_core(self, source):
        own = MK.get(f"FLAGS_{platform.machine()}_{Path(source).stem}", [])
        if source == "api.c":
            own = [f"-DRPI_BUILD_FLAGS={shown(MK['CORE_CFLAGS'] + VARIANT)}"]
        if source == "base/blas.c" and BLAS == "builtin":
            own = ["-DRPI_BLAS_BUILTIN"]
        flags = MK["CORE_CFLAGS"] + MK["CORE_WARNINGS"] + VARIANT + own
        flags += [f"-Icsrc/{folder}" for folder in MK["CORE_INCLUDES"]]
        return self.compiler.compile([f"csrc/{source}"], self.build_temp, extra_postargs=flags)[0]


binding = Extension(
    "relpos._core",
    sources=sorted(map(str, Path("relpos").glob("_*.c"))),
    define_macros=[] if FREE_THREADED else [("Py_LIMITED_API", "0x030A0000")],
    py_limited_api=not FREE_THREADED,
    libraries=["core"],
    runtime_library_dirs=[f"{SYSTEM_CORE}/lib" if SYSTEM_CORE else "$ORIGIN/lib"],
    extra_compile_args=["-std=c11", "-O2", "-fno-fast-math", "-fvisibility=hidden", *VARIANT],
    extra_link_args=["-O2", "-fno-fast-math", "-Wl,--disable-new-dtags", *VARIANT],
)

setup(
    version=re.search(r'RP_VERSION "(.*)"', Path("csrc/include/relpos/relpos.h").read_text())[1],
    ext_modules=[binding],
    cmdclass={"build_py": Modules, "build_ext": Build},
    setup_requires=[OPENBLAS] if NEEDS_OPENBLAS else [],
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
