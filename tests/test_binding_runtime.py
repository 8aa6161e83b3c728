# SPDX-License-Identifier: Apache-2.0
"""The binding over time and over threads, and its source."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from binding_arrays import D, read_only, rows, small_qkv, small_shaw
from leaks import assert_nothing_leaks
from relpos import _core

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(relpos.__file__).parent.parent  # where others start: here Python imports sources


@pytest.fixture
def qkv() -> tuple[Any, Any, Any]:
    return small_qkv()


@pytest.fixture
def shaw() -> relpos.Shaw:
    return small_shaw()


def test_threads_and_errors() -> None:
    before = relpos.get_threads()
    try:
        relpos.set_threads(3)
        assert relpos.get_threads() == relpos.build_info()["threads"] == 3
        with pytest.raises(ValueError, match="^threads is 1025, expected 1 to 1024"):
            relpos.set_threads(1025)
        with pytest.raises(TypeError, match="^threads: expected an integer, got str"):
            relpos.set_threads("2")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="^threads is 1099511627776, expected"):
            relpos.set_threads(2**40)
        assert relpos.get_threads() == 3
    finally:
        relpos.set_threads(before)
    assert issubclass(relpos.DeviceError, RuntimeError)
    assert f"{relpos.DeviceError.__module__}.{relpos.DeviceError.__name__}" == "relpos.DeviceError"


@pytest.mark.parametrize("path", [b"no\xff/no", "\u00e9" * 300, "x" + "\u00e9" * 300])
def test_errors_about_names_that_are_no_text(path: str | bytes) -> None:
    """Bytes that are no UTF-8, and letters that the end of libcore's sentence cuts in two."""
    with pytest.raises(OSError, match="^cannot open '"):
        _core.config_load(path)


def test_build_info() -> None:
    info = relpos.build_info()
    assert list(info) == [
        "version", "compiler", "flags", "isa", "isa_available", "bf16", "blas", "threads", "cuda",
        "numpy", "python",
    ]  # fmt: skip
    assert info["version"] == relpos.__version__
    assert info["isa"] in info["isa_available"].split()
    flags = Path("/proc/cpuinfo").read_text() if info["isa"] == "avx512" else ""
    told = {"amx": "AMX", "avx512": "AVX512-BF16" if "avx512_bf16" in flags else "none"}
    assert info["bf16"] == told.get(info["isa"], "none")
    assert "-ffp-contract=fast" in info["flags"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "not found: "),
        (b"", "cannot be read: "),
        (b"\x7fELF of something else", " does not say what it is"),
        (b"..relpos-cuda 1.2.3 CUDA 13010 for ;.", "1.2.3, CUDA 13.1, for no GPU"),
        (
            b"\0relpos-cuda 1.2.3 CUDA 13000 for 800,1200;\0",
            "1.2.3, CUDA 13.0, for compute capability 8.0 12.0",
        ),
    ],
)
def test_build_info_tells_of_the_library_for_gpus(
    content: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it finds in the file: none of these could be loaded."""
    library = tmp_path / "librelpos_cuda.so"
    if content is not None:
        library.write_bytes(content)
    monkeypatch.setenv("RELPOS_CUDA_LIBRARY", str(library))
    assert said in relpos.build_info()["cuda"]


def test_build_info_says_that_there_is_no_library_for_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RELPOS_CUDA_LIBRARY", raising=False)
    monkeypatch.setattr(relpos.library, "_PACKAGE", tmp_path)
    assert relpos.build_info()["cuda"] == "unknown: libcore is installed elsewhere"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcore.so").touch()
    assert relpos.build_info()["cuda"] == "not built"


def test_inputs_are_only_read(qkv: Any, shaw: relpos.Shaw) -> None:
    arrays = [*qkv, shaw.key_table, shaw.value_table]
    copies = [x.copy() for x in arrays]
    for x in arrays:
        x.setflags(write=False)
    out, ctx = relpos.attention_forward(*qkv, position=shaw)
    relpos.attention_backward(ctx, read_only(out))
    for x, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_subclasses_are_plain_arrays(qkv: Any) -> None:
    class Tagged(np.ndarray):  # type: ignore[type-arg]
        pass

    out = relpos.attention(*(x.view(Tagged) for x in qkv))
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, relpos.attention(*qkv))


def address_of(x: Any) -> int:
    return int(x.ctypes.data)


def test_memory_of_results_is_used_again() -> None:
    """That of 64 KiB or more, for results of the same size, and never while somebody has it."""
    q = rows(1, 4, 128, 64)
    first, second = (relpos.attention(q, q, q) for _ in range(2))
    wanted = first.copy()
    before, other = address_of(first), address_of(second)
    assert before != other and before % 64 == other % 64 == 0
    view = first[:, :, 3:]
    del first
    assert address_of(relpos.attention(q, q, q)) not in (before, other)
    np.testing.assert_array_equal(view, wanted[:, :, 3:])
    del view
    again = relpos.attention(q, q, q)
    assert address_of(again) == before
    assert again.flags.owndata and again.base is None
    np.testing.assert_array_equal(again, wanted)
    again.resize((2, 4, 128, 64), refcheck=False)  # which moves it
    np.testing.assert_array_equal(again[:1], wanted)
    assert not again[1].any()
    again.resize((16,), refcheck=False)
    np.testing.assert_array_equal(again, wanted.ravel()[:16])


KEEPS = """
import numpy as np, relpos

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10

def turned(megabytes):
    return relpos.rotate(np.zeros((1, 1, megabytes << 12, 64), np.float32), relpos.RoPE())

relpos.set_threads(1)
turned(1)
before = resident()
results = [turned(3) for _ in range(30)]
made = resident()
assert made - before > 85 << 20, made - before
del results
kept = resident() - before
assert 38 << 20 < kept < 58 << 20, kept  # 16 blocks
results = [turned(3) for _ in range(16)]
assert resident() - before < kept + (8 << 20)
results += [turned(20) for _ in range(3)]
del results
kept = resident() - before
assert 35 << 20 < kept < 75 << 20, kept  # 64 MiB
last = turned(65)
there = resident()
del last
assert there - resident() > 60 << 20  # which is more than is kept
"""


def test_memory_of_results_that_is_kept_is_bounded() -> None:
    """At most 64 MiB of 16 blocks, the oldest going first. Every block has pages of its own here, so
    that what is free is gone."""
    own = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", KEEPS], env=own, cwd=PACKAGE, check=False)
    assert done.returncode == 0


def test_nothing_leaks(shaw: relpos.Shaw) -> None:
    q, k, v = (rows(1, 2, 16, D, seed=i) for i in range(3))
    bad = q.astype(np.float64)
    held = [q, k, v, bad, shaw.key_table, shaw.value_table]

    def calls(times: int) -> None:
        for _ in range(times):
            out, ctx = relpos.attention_forward(q, k, v, position=shaw, lengths=[9], query_start=1)
            relpos.attention_backward(ctx, out)
            for error, arguments in (
                (TypeError, {"q": bad}),
                (ValueError, {"lengths": [99]}),
                (ValueError, {"out": q}),
                (ValueError, {"v": v[:, :1]}),
            ):
                with pytest.raises(error):
                    relpos.attention(**({"q": q, "k": k, "v": v} | arguments))

    assert_nothing_leaks(calls, 100, 1000, held)


def test_eight_threads_at_once(qkv: Any, shaw: relpos.Shaw) -> None:
    def call(_: int) -> tuple[Any, relpos.Gradients]:
        out, ctx = relpos.attention_forward(*qkv, position=shaw, causal=True)
        return out, relpos.attention_backward(ctx, out)

    out, gradients = call(0)
    with ThreadPoolExecutor(8) as pool:
        for other, other_gradients in pool.map(call, range(160)):
            np.testing.assert_array_equal(other, out)
            for name, gradient in gradients.items():
                np.testing.assert_array_equal(other_gradients[name], gradient)


def test_calls_survive_a_changing_number_of_threads(qkv: Any) -> None:
    """The workspace is sized before the call; more threads in between need more of it."""
    before = relpos.get_threads()
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for threads in (1, 8):
                relpos.set_threads(threads)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        expected = relpos.attention(*qkv)
        for _ in range(200):
            np.testing.assert_array_equal(relpos.attention(*qkv), expected)
    finally:
        stop.set()
        changer.join()
        relpos.set_threads(before)


@pytest.mark.parametrize("backward", [False, True])
def test_the_gil_is_released(backward: bool) -> None:
    x = rows(1, 8, 2048, 64)
    _, ctx = relpos.attention_forward(x, x, x)
    span: list[float] = []

    def work() -> None:
        started = time.perf_counter()
        if backward:
            relpos.attention_backward(ctx, x)
        else:
            relpos.attention(x, x, x)
        span.extend((started, time.perf_counter()))

    worker = threading.Thread(target=work)
    ticks = []
    worker.start()
    while worker.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.0005)
    started, ended = span
    margin = (ended - started) / 10
    assert sum(started + margin < t < ended - margin for t in ticks) >= 5


# --------------------------------------------------------------------------------------------------
# The source of the binding
# --------------------------------------------------------------------------------------------------


def binding_files() -> list[Path]:
    return sorted([*(ROOT / "relpos").glob("_*.c"), *(ROOT / "relpos").glob("_*.h")])


def code_of(path: Path) -> str:
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return re.sub(r'"(\\.|[^"\\])*"', '""', text)


# Functions that call libcore for somebody who has released the GIL.
WITHOUT_GIL = ("compute", "workspace_bytes")


def test_every_gil_release_has_its_restore() -> None:
    called: list[str] = []
    for path in binding_files():
        parts = re.split(r"\bPy_(BEGIN|END)_ALLOW_THREADS\b", code_of(path))
        assert parts[1::2] == ["BEGIN", "END"] * (len(parts) // 4), f"{path.name}: unpaired"
        for released in parts[2::4]:
            assert not re.search(r"\b(return|goto|break|continue)\b", released), released
            assert not re.search(r"\bPy\w*", released), f"Python without the GIL: {released}"
        called += [name for part in parts[2::4] for name in re.findall(r"\b(\w+)\(", part)]
        with_gil = re.findall(rf"\b({'|'.join(WITHOUT_GIL)})\(", "".join(parts[0::4]))
        assert len(with_gil) == (len(WITHOUT_GIL) if with_gil else 0), "more than the definitions"
    named = set(called) - {"if"}
    assert named >= {"rp_build_info_get", "rp_get_threads", "rp_set_threads", *WITHOUT_GIL}
    assert all(name.startswith("rp_") or name in WITHOUT_GIL for name in named), named


def test_libcore_is_called_without_the_gil_alone() -> None:
    kinds = ("attention", "rotation", "placement", "batch", "limits", "search", "model_map")
    shown = (
        "model_config",
        "model_limits",
        "decoder_result",
        "decoder_result_count",
        "last_error",
        "version",
    )
    free = {f"rp_{of}_default" for of in kinds} | {f"rp_{what}" for what in shown}  # they only look
    for path in binding_files():
        code = code_of(path)
        for name in WITHOUT_GIL:
            code = re.sub(rf"^static \w+ {name}\(.*?^}}", "", code, flags=re.DOTALL | re.MULTILINE)
        code = re.sub(r"Py_BEGIN_ALLOW_THREADS.*?Py_END_ALLOW_THREADS", "", code, flags=re.DOTALL)
        assert set(re.findall(r"\b(rp_\w+)\(", code)) <= free, path.name


def test_the_binding_stays_small() -> None:
    for path in binding_files():
        assert len(path.read_text().splitlines()) <= 400, path.name
        assert not re.search(r"^static PyObject \*?\w+( =|;)", code_of(path), re.MULTILINE)


def test_stub_names_what_the_module_has() -> None:
    tree = ast.parse((ROOT / "relpos" / "_core.pyi").read_text())
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    named |= {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    public = {name for name in vars(_core) if not name.startswith("_")}
    assert named - {"CoreInfo"} == public


def test_public_names_are_documented() -> None:
    for name in relpos.__all__:
        if name != "__version__":
            assert getattr(relpos, name).__doc__, name
