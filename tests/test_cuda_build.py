# SPDX-License-Identifier: Apache-2.0
"""How librelpos_cuda.so is built, and what nvcc made of it.

The second half looks at a build: `RELPOS_TEST_CUDA_BUILD=build/cuda`, made by `make cuda`; the step
cuda of .ci/run makes it for all architectures, which takes minutes.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Where the products of attention are, in bf16 on tensor cores.
TENSOR = (
    "attention_forward",
    "attention_backward",
    "attention_backward_band",
    "attention_backward_single",
)


# --------------------------------------------------------------------------------------------------
# Finding a compiler
# --------------------------------------------------------------------------------------------------


def toolkit(folder: Path, release: str = "13.0", codes: str = "sm_75 sm_80 sm_90 sm_100") -> Path:
    """A folder that looks like CUDA's: an nvcc that tells about itself, headers, libraries."""
    script = f"""#!/bin/sh
case $1 in
  --version) echo "Cuda compilation tools, release {release}, V{release}.1" ;;
  *) printf '%s\\n' {codes} ;;
esac
"""
    files = {
        "bin/nvcc": script,
        "include/cublas_v2.h": "",
        "include/cublas_api.h": "",
        "lib64/libcudart.so.13": "",
        "lib64/libcublas.so.13": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bin/nvcc").chmod(stat.S_IRWXU)
    return folder


def test_a_toolkit_is_found(
    nvcc: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = toolkit(tmp_path / "here")
    monkeypatch.setenv("NVCC", str(here / "bin" / "nvcc"))
    compiler = nvcc.find()
    assert compiler.nvcc == here / "bin" / "nvcc" and compiler.release == "13.0"
    assert compiler.architectures == [80, 90, 100]  # 120 is not known to this one
    assert [file.parent for file in compiler.libraries] == [here / "lib64"] * 2
    assert compiler.targets()[-1] == "-gencode=arch=compute_100,code=compute_100"


def test_a_package_s_libraries_are_found_by_programs_too(
    nvcc: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc looks into lib64; nvidia/cu13 has lib."""
    here = toolkit(tmp_path)
    (here / "lib64").rename(here / "lib")
    monkeypatch.setenv("NVCC", str(here / "bin" / "nvcc"))
    command = nvcc.find().program()
    assert command[0] == str(here / "bin" / "nvcc")
    assert {"-arch=native", f"-L{here / 'lib'}", f"-I{ROOT / 'cuda'}"} <= set(command)


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("bin/nvcc", "no nvcc: not on PATH, in CUDA_HOME, or from the package cuda-toolkit[nvcc]"),
        ("include/cublas_v2.h", "has no cuBLAS beside it: no cublas_v2.h; cuda-toolkit[cublas]"),
        ("lib64/libcudart.so.13", "has no libcudart.so.13 beside it; cuda-toolkit[cudart]"),
        ("lib64/libcublas.so.13", "has no libcublas.so.13 beside it; cuda-toolkit[cublas]"),
    ],
)
def test_what_is_missing_has_a_name(
    nvcc: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    sentence: str,
) -> None:
    here = toolkit(tmp_path)
    (here / missing).unlink()
    monkeypatch.setattr(nvcc, "toolkits", lambda: [here])
    with pytest.raises(nvcc.Missing) as told:
        nvcc.find()
    assert sentence in str(told.value)


def test_another_release_is_refused(
    nvcc: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC", str(toolkit(tmp_path, release="12.4") / "bin" / "nvcc"))
    with pytest.raises(nvcc.Missing, match=r"release 12\.4, expected release 13\.x"):
        nvcc.find()


def test_what_relpos_cuda_says(
    nvcc: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(nvcc, "toolkits", lambda: [])
    monkeypatch.setenv("RELPOS_CUDA", "1")
    with pytest.raises(SystemExit, match="RELPOS_CUDA=1, but no nvcc"):
        nvcc.build_for_package(tmp_path, tmp_path)
    monkeypatch.setenv("RELPOS_CUDA", "yes")
    with pytest.raises(SystemExit, match="RELPOS_CUDA: expected 0 or 1, got yes"):
        nvcc.build_for_package(tmp_path, tmp_path)
    monkeypatch.delenv("RELPOS_CUDA")
    nvcc.build_for_package(tmp_path, tmp_path)
    assert "relpos: without CUDA: no nvcc" in capsys.readouterr().out
    monkeypatch.setenv("RELPOS_CUDA", "0")
    nvcc.build_for_package(tmp_path, tmp_path)
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


def test_what_is_up_to_date_stays(nvcc: ModuleType, tmp_path: Path) -> None:
    source, target = tmp_path / "a.cu", tmp_path / "a.o"
    source.write_text("")
    assert not nvcc.is_fresh(target, ["nvcc", "a"])
    target.write_text("")
    target.with_suffix(".command").write_text("nvcc a")
    target.with_suffix(".d").write_text(f"{target} : {source} \\\n  {source}\n")
    assert nvcc.is_fresh(target, ["nvcc", "a"])
    assert not nvcc.is_fresh(target, ["nvcc", "b"])
    os.utime(source, (target.stat().st_mtime + 10,) * 2)
    assert not nvcc.is_fresh(target, ["nvcc", "a"])
    source.unlink()
    assert not nvcc.is_fresh(target, ["nvcc", "a"])


# --------------------------------------------------------------------------------------------------
# A build
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def built() -> Path:
    folder = os.environ.get("RELPOS_TEST_CUDA_BUILD", "")
    if not folder:
        pytest.skip("RELPOS_TEST_CUDA_BUILD names no build (`make cuda`)")
    return ROOT / folder


def architectures(built: Path) -> set[str]:
    command = (built / "table.command").read_text()
    return set(re.findall(r"code=(sm_\d+)", command))


class Kernel(NamedTuple):
    name: str
    architecture: str
    spilled: int  # bytes of registers
    shared: int  # bytes of static shared memory


def kernels(built: Path, source: str) -> list[Kernel]:
    """Every kernel of a file."""
    text = (built / f"{source}.log").read_text()
    parts = re.split(r"Compiling entry function '(\w+)' for '(sm_\d+)'", text)[1:]
    result = []
    for name, architecture, rest in zip(parts[0::3], parts[1::3], parts[2::3], strict=True):
        found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", rest)
        assert found, rest
        static = re.search(r"(\d+) bytes smem", rest)
        shared = int(static[1]) if static else 0
        result.append(Kernel(name, architecture, int(found[1]) + int(found[2]), shared))
    return result


def test_every_kernel_is_there_for_every_architecture(built: Path) -> None:
    wanted = architectures(built)
    assert wanted
    files = 0
    for log in built.glob("*.log"):
        names: dict[str, set[str]] = {}
        for name, architecture, *_ in kernels(built, log.stem):
            # the part that names the file's unit is another one for every architecture
            names.setdefault(re.sub(r"_GLOBAL__N__[0-9a-f]{8}", "", name), set()).add(architecture)
        assert all(of == wanted for of in names.values()), log.name
        files += bool(names)
    assert files >= 10


def test_the_fast_kernels_of_attention_do_not_spill(built: Path) -> None:
    """Forward's of bf16 for the usual terms. What the others spill is said, not forbidden."""
    spilled = [k for source in TENSOR for k in kernels(built, source) if k.spilled]
    for kernel in spilled:
        print(f"{kernel.spilled} bytes spilled: {kernel.architecture} {kernel.name}")
    assert [k for k in spilled if "bfloat16" in k.name and "Lb0E" in k.name] == []


def test_static_shared_memory_leaves_room_for_dynamic(built: Path) -> None:
    """cuda/gpu.h asks for leave from 40 KiB of the dynamic kind on: a card counts both in 48."""
    large = {
        log.stem
        for log in built.glob("*.log")
        for kernel in kernels(built, log.stem)
        if kernel.shared > 8 << 10
    }
    assert large == {"choose", "norm"}  # which take no other


def test_attention_multiplies_on_tensor_cores(built: Path) -> None:
    reader = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")
    if reader is None:
        pytest.skip("no cuobjdump (PyPI: nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm)")
    beside = os.environ | {"PATH": f"{Path(reader).parent}{os.pathsep}{os.environ['PATH']}"}
    for source in TENSOR:
        for architecture in sorted(architectures(built)):
            command = [reader, "-sass", "-arch", architecture, str(built / f"{source}.o")]
            code = subprocess.check_output(command, text=True, env=beside)
            assert re.search(r"\bHMMA\.16816\.F32\.BF16\b", code), (source, architecture)


def test_the_library_stands_on_cuda_alone(built: Path) -> None:
    library = str(built / "librelpos_cuda.so")
    dynamic = subprocess.check_output(["readelf", "-d", library], text=True)
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", dynamic))
    assert {"libcudart.so.13", "libcublas.so.13"} <= needed
    allowed = r"(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux.*)\.so.*"
    assert [
        n for n in needed if not re.fullmatch(rf"{allowed}|lib(cudart|cublas)\.so\.13", n)
    ] == []
    [paths] = re.findall(r"RUNPATH.*\[(.*?)\]", dynamic)
    assert paths.split(":")[0] == "$ORIGIN/../../nvidia/cu13/lib"
    lines = subprocess.check_output(["nm", "-D", "--defined-only", library], text=True)
    strong = [line.split()[-1] for line in lines.splitlines() if " T " in line]
    assert strong == ["rpc_open"]


SAYS = """
import ctypes, sys
core = ctypes.CDLL(sys.argv[1])
core.rp_last_error.restype = ctypes.c_char_p
memory = ctypes.c_void_p()
status = core.rp_device_allocate(b"cuda", ctypes.c_int64(1), ctypes.byref(memory))
print(status, core.rp_last_error().decode())
"""


def test_the_library_loads_and_looks_for_a_gpu(
    built: Path, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """On a machine without a GPU it says so, which takes that all of it was linked."""
    said = subprocess.check_output(
        [sys.executable, "-c", SAYS, str(libraries["f32"])],
        env=os.environ | {"RELPOS_CUDA_LIBRARY": str(built / "librelpos_cuda.so")},
        cwd=tmp_path,
        text=True,
    )
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert said == "50 device 'cuda': no NVIDIA driver is installed\n"
    else:
        assert said.startswith(("0 ", "50 device 'cuda': the NVIDIA driver ")), said
