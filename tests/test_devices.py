# SPDX-License-Identifier: Apache-2.0
"""Devices by name: which there are, why one cannot be used, and memory on them.

The library of GPUs is opened once in a process, so that every question is a process of its own. The
GPU is emulated (tests/emulator), and says what it is told: no driver, an old one, no memory.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import capi
import relpos

ROOT = Path(__file__).resolve().parent.parent

PRELUDE = """
import ctypes, json, sys, threading

core = ctypes.CDLL(sys.argv[1])
core.rp_last_error.restype = ctypes.c_char_p
size, pointer = ctypes.c_int64, ctypes.c_void_p

class Device(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("name", ctypes.c_char_p), ("title", ctypes.c_char_p),
        ("memory", size), ("memory_free", size), ("problem", ctypes.c_char_p),
    ]

def text(x):
    return None if x is None else x.decode()

def get(index, struct_size=ctypes.sizeof(Device)):
    device = Device(struct_size)
    status = core.rp_device_get(index, ctypes.byref(device))
    if status:
        return [status, error()]
    d = device
    return [text(d.name), text(d.title), d.memory, d.memory_free, text(d.problem)]

def error():
    return text(core.rp_last_error())

def devices():
    return [get(i) for i in range(core.rp_device_count())]

def allocate(name, bytes):
    memory = pointer(1)
    status = core.rp_device_allocate(name, size(bytes), ctypes.byref(memory))
    return status, memory

def write(name, memory, data):
    return core.rp_device_write(name, memory, data, size(len(data)))

def read(name, memory, bytes):
    data = ctypes.create_string_buffer(bytes)
    return core.rp_device_read(name, data, memory, size(bytes)), data.raw

def free(name, memory):
    return core.rp_device_free(name, memory)

def tell(x):
    print(json.dumps(x))
"""

NAMES = ("name", "title", "memory", "memory_free", "problem")


@pytest.fixture
def ask(libraries: dict[str, Path], tmp_path: Path) -> Any:
    """Runs some lines in a process of their own, away from here, and gives what they tell."""

    def run(lines: str, core: str = "f32", **environment: str | Path) -> Any:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RELPOS_", "EMU_"))}
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + lines, str(libraries[core])],
            env=kept | {name: str(value) for name, value in environment.items()},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run


@pytest.fixture
def gpu(ask: Any, emulated_device: Path) -> Any:
    library = os.environ["RELPOS_CUDA_LIBRARY"]
    return lambda lines, **environment: ask(lines, RELPOS_CUDA_LIBRARY=library, **environment)


# --------------------------------------------------------------------------------------------------
# Which devices there are
# --------------------------------------------------------------------------------------------------


def test_the_cpu_and_the_gpus(gpu: Any) -> None:
    lines = [
        dict(zip(NAMES, line, strict=True)) for line in gpu("tell(devices())", EMU_DEVICES="3")
    ]
    assert [line["name"] for line in lines] == ["cpu", "cuda:0", "cuda:1", "cuda:2"]
    assert [line["problem"] for line in lines] == [None] * 4
    assert lines[0]["title"] in ("portable", "avx2", "avx512", "amx", "neon")
    assert 0 < lines[0]["memory_free"] <= lines[0]["memory"]
    assert all(line["title"] == "Emulated GPU" for line in lines[1:])
    assert all(line["memory"] == 8 << 30 and line["memory_free"] == 0 for line in lines[1:])


def test_what_get_refuses(gpu: Any) -> None:
    """What is shorter than the first version is refused, or longer than any, and so is an index beyond
    the last."""
    told = gpu("tell([get(1, 8), get(-1), get(2), get(1, 2**64 - 1)])")
    assert told[0][0] == 10 and "device.struct_size=8, must be 48: set it to" in told[0][1]
    assert told[1] == [10, "rp_device_get: index is -1, expected 0 to 1"]
    assert told[2] == [10, "rp_device_get: index is 2, expected 0 to 1"]
    assert told[3][0] == 10 and "struct_size=18446744073709551615, must" in told[3][1]


WITHOUT = [
    ({"EMU_DRIVER": "0"}, "no NVIDIA driver is installed"),
    ({"EMU_DRIVER": "12040"}, "the NVIDIA driver serves CUDA 12.4, expected 13.0 or later"),
    ({"EMU_DEVICES": "0"}, "the NVIDIA driver finds no GPU"),
]


@pytest.mark.parametrize("driver", ["13000", "13010", "13020", "14000"])
def test_any_driver_of_the_same_version_or_later(gpu: Any, driver: str) -> None:
    """The runtime may be later than the driver (the emulator's is 13.2), if both are 13."""
    told = gpu("tell([allocate(b'cuda', 8)[0], devices()[1]])", EMU_DRIVER=driver)
    assert told == [0, ["cuda:0", "Emulated GPU", 8 << 30, told[1][3], None]] and told[1][3] > 0


@pytest.mark.parametrize(("environment", "why"), WITHOUT, ids=["none", "old", "empty"])
def test_why_there_is_no_gpu(gpu: Any, environment: dict[str, str], why: str) -> None:
    lines, status, error = gpu("tell([devices(), allocate(b'cuda', 1)[0], error()])", **environment)
    assert lines[1:] == [["cuda", "", 0, 0, why]]
    assert (status, error) == (50, f"device 'cuda': {why}")


def test_a_gpu_that_is_too_old(gpu: Any) -> None:
    [_, line] = gpu("tell(devices())", EMU_CAPABILITY="75")
    assert line[1] == "Emulated GPU"
    assert line[4] == "its compute capability is 7.5, expected 8.0 or more"
    told = gpu("tell([allocate(b'cuda', 8)[0], error()])", EMU_CAPABILITY="75")
    assert told == [50, f"device 'cuda': {line[4]}"]


def test_names(gpu: Any) -> None:
    told = gpu(
        "tell([[allocate(n, 1)[0], error()] for n in (b'cuda:1', b'cuda:', b'gpu', b'cuda:x')])"
    )
    assert told[0] == [50, "device 'cuda:1': there is 1 GPU, cuda:0"]
    for (status, error), name in zip(told[1:], ("cuda:", "gpu", "cuda:x"), strict=True):
        assert (status, error) == (10, f"device is '{name}', expected cpu, cuda or cuda:N")
    [[status, error]] = gpu("tell([[allocate(b'cuda:2', 1)[0], error()]])", EMU_DEVICES="2")
    assert (status, error) == (50, "device 'cuda:2': there are 2 GPUs, cuda:0 and on")


def python_says(folder: Path, *command: str, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("EMU_")}
    package = str(Path(relpos.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, *command],
        env=kept | {"PYTHONPATH": package} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_devices_in_python(emulated_device: Path, tmp_path: Path) -> None:
    said = python_says(tmp_path, "-c", "import relpos; print(*relpos.devices(), sep='\\n')")
    cpu, gpu = said.splitlines()
    assert cpu.startswith("Device(name='cpu', title='") and cpu.endswith(", problem=None)")
    assert gpu == (
        "Device(name='cuda:0', title='Emulated GPU', memory=8589934592, memory_free=0, "
        "problem=None)"
    )


def test_devices_on_the_command_line(emulated_device: Path, tmp_path: Path) -> None:
    cpu, gpu = python_says(tmp_path, "-m", "relpos", "devices").splitlines()
    assert cpu.startswith("cpu       ") and cpu.endswith(" GiB free")
    assert gpu == "cuda:0    Emulated GPU  8.0 GiB"
    _, gpu = python_says(tmp_path, "-m", "relpos", "devices", EMU_DRIVER="0").splitlines()
    assert gpu == "cuda      cannot be used: no NVIDIA driver is installed"


OPENED = """
import ctypes, os, relpos, threading
counters = ctypes.CDLL(os.environ["RELPOS_CUDA_LIBRARY"]).emu_counters
counters.restype = ctypes.POINTER(ctypes.c_uint64)
relpos.devices()
print(counters()[8])
config = relpos.Config().replace({"encoder.layers": 1, "decoder.layers": 1})
model = relpos.Transformer(config, tokens=64, sentences=4, device="cuda:2")
model.step(relpos.Batch.from_pairs([[3, 4]], [[5]], bos=1, eos=2))
print(relpos.devices()[3].memory_free > 0, relpos.devices()[2].memory_free)
other = threading.Thread(target=lambda model: None, args=(model,))
del model
other.start()
other.join()
print(counters()[8])
"""


def test_no_gpu_is_opened_that_nobody_asked_for(emulated_device: Path, tmp_path: Path) -> None:
    """A context is half a second, and memory. The last number: bit i is GPU i."""
    if os.environ.get("RELPOS_TEST_CUDA") == "gpu":
        pytest.skip("the emulator counts contexts")
    said = python_says(tmp_path, "-c", OPENED, EMU_DEVICES="4")
    assert said.split() == ["0", "True", "0", "4"]


# --------------------------------------------------------------------------------------------------
# The library
# --------------------------------------------------------------------------------------------------

WHY = "tell([allocate(b'cuda', 1)[0], error(), devices()[1][4]])"


def test_without_the_library(ask: Any, libraries: dict[str, Path]) -> None:
    status, error, problem = ask(WHY)
    beside = libraries["f32"].parent / "librelpos_cuda.so"
    why = "relpos was built without CUDA, which takes nvcc and cuBLAS (docs/cuda.md): there is no"
    assert status == 50 and problem == f"{why} {beside}"
    assert error == f"device 'cuda': {problem}"


def test_a_library_that_is_none(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "no.so").write_text("this is no library")
    _, _, problem = ask(WHY, RELPOS_CUDA_LIBRARY=tmp_path / "no.so")
    assert problem.startswith(f"{tmp_path / 'no.so'} cannot be loaded: ")


def fake(folder: Path, *flags: str) -> Path:
    library = folder / "librelpos_cuda.so"
    command = [*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC", *flags]
    command += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'include'}"]
    subprocess.run([*command, str(ROOT / "tests" / "fake_cuda.c"), "-o", str(library)], check=True)
    return library


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ('-DFAKE_VERSION="0.0.1"', "is of relpos 0.0.1 with a table of"),
        ("-DFAKE_OPS_BYTES=8", "with a table of 8 bytes, expected"),
        ("-Drpc_open=other_door", "is no library of relpos: it has no rpc_open"),
    ],
)
def test_another_library_is_refused(ask: Any, tmp_path: Path, flag: str, words: str) -> None:
    library = fake(tmp_path, flag)
    status, error, problem = ask(WHY, RELPOS_CUDA_LIBRARY=library)
    assert status == 50 and error == f"device 'cuda': {problem}"
    assert problem.startswith(str(library)) and words in problem


def test_what_helps_where_cublas_is_missing(ask: Any, tmp_path: Path) -> None:
    """A library that needs one which is not there, as ours without relpos[cuda]."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    (tmp_path / "empty.c").write_text("int rpi_nothing;\n")
    needed, library = tmp_path / "libcublas.so.13", tmp_path / "librelpos_cuda.so"
    shared = [*compiler, "-shared", "-fPIC", str(tmp_path / "empty.c")]
    subprocess.run([*shared, "-Wl,-soname,libcublas.so.13", "-o", str(needed)], check=True)
    linked = ["-Wl,--no-as-needed", str(needed), "-o", str(library)]
    subprocess.run([*shared, *linked], check=True)
    needed.unlink()
    _, _, problem = ask(WHY, RELPOS_CUDA_LIBRARY=library)
    assert problem.startswith("CUDA's libraries cannot be loaded (libcublas.so.13: cannot open")
    assert problem.endswith("`pip install 'relpos[cuda]'` brings them")


def test_a_problem_outlives_the_next_failure(ask: Any) -> None:
    code = "d = Device(ctypes.sizeof(Device)); core.rp_device_get(0, ctypes.byref(d)); "
    code += "said = text(d.problem); allocate(b'elsewhere', 1); tell([said, text(d.problem)])"
    said, still = ask(code, RELPOS_ISA="none")
    assert said == still and said.startswith("RELPOS_ISA: 'none' is unknown; available here: ")


def test_a_number_of_threads_is_no_matter_of_a_device(ask: Any) -> None:
    """Told as it is, and memory goes back, while RELPOS_NUM_THREADS is to be put right."""
    code = "core.rp_set_threads(2); status, memory = allocate(b'cpu', 64); core.rp_set_threads(0); "
    code += "d = Device(ctypes.sizeof(Device)); core.rp_device_get(0, ctypes.byref(d)); "
    code += (
        "tell([status, allocate(b'cpu', 64)[0], free(b'cpu', memory), text(d.title), d.problem])"
    )
    taken, refused, freed, title, problem = ask(code, RELPOS_NUM_THREADS="abc")
    assert (taken, refused, freed, problem) == (0, capi.ARGUMENT, 0, None) and title not in (
        "",
        "none",
    )


def test_double_has_no_device(ask: Any) -> None:
    status, error, problem = ask(WHY, core="f64")
    assert (status, problem) == (50, "libcore_f64 computes on the CPU alone")


# --------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------

ROUND_TRIP = """
import os
name = {name!r}
told = []
status, memory = allocate(name, 3_000_000)
for bytes in (0, 1, 100, 65_536, 65_537, 3_000_000):
    data = os.urandom(bytes)
    wrote = write(name, memory, data)
    status, back = read(name, memory, bytes)
    told.append([wrote, status, back == data])
told.append(free(name, memory))
told.append(free(name, None))
tell(told)
"""


@pytest.mark.parametrize("name", [b"cpu", b"cuda", b"cuda:0"])
def test_there_and_back(gpu: Any, name: bytes) -> None:
    assert gpu(ROUND_TRIP.format(name=name)) == [[0, 0, True]] * 6 + [0, 0]


def test_small_writes_go_round(gpu: Any) -> None:
    """More than the staging memory holds, the same place with other bytes among them."""
    lines = """
import os
status, memory = allocate(b"cuda", 60_000 * 700)
data = ctypes.create_string_buffer(60_000)
sent = []
for i in range(700):
    sent.append(os.urandom(8) * 7_500)
    ctypes.memmove(data, sent[-1], 60_000)
    core.rp_device_write(b"cuda", pointer(memory.value + i * 60_000), data, size(60_000))
tell([read(b"cuda", memory, 60_000 * 700)[1] == b"".join(sent)])
"""
    assert gpu(lines) == [True]


def test_two_devices_have_memory_of_their_own(gpu: Any) -> None:
    lines = """
one, two = (allocate(name, 8)[1] for name in (b"cuda:0", b"cuda:1"))
write(b"cuda:0", one, b"zero....")
write(b"cuda:1", two, b"one.....")
tell([one.value != two.value, text(read(b"cuda:0", one, 8)[1]), text(read(b"cuda:1", two, 8)[1])])
"""
    assert gpu(lines, EMU_DEVICES="2") == [True, "zero....", "one....."]


def test_threads_take_turns(gpu: Any) -> None:
    lines = """
wrong = []
def work(number):
    status, memory = allocate(b"cuda", 5000)
    for i in range(50):
        data = bytes([number * 50 + i & 255]) * 5000
        if write(b"cuda", memory, data) or read(b"cuda", memory, 5000) != (0, data):
            wrong.append((number, i))
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
tell(wrong)
"""
    assert gpu(lines) == []


def test_what_memory_refuses(gpu: Any) -> None:
    lines = """
status, memory = allocate(b"cuda", 2_000_000)
told = [[status, memory.value]]
status, memory = allocate(b"cuda", -1)
told.append([status, memory.value, error()])
for call in (core.rp_device_write, core.rp_device_read):
    told.append([call(b"cuda", None, b"x", size(1)), error()])
    told.append([call(b"cuda", b"x", None, size(1)), error()])
    told.append([call(b"cuda", b"x", b"x", size(-1)), error()])
told.append([core.rp_device_allocate(b"cuda", size(1), None), error()])
tell(told)
"""
    told = gpu(lines, EMU_MEMORY="1000000")
    assert told[0] == [20, None]
    assert told[1] == [10, None, "rp_device_allocate: bytes is -1, expected 0 or more"]
    for at, name in ((2, "write"), (5, "read")):
        assert told[at] == [10, f"rp_device_{name}: to is NULL"]
        assert told[at + 1] == [10, f"rp_device_{name}: from is NULL"]
        assert told[at + 2] == [10, f"rp_device_{name}: bytes is -1, expected 0 or more"]
    assert told[8] == [10, "rp_device_allocate: memory is NULL"]


def test_too_little_memory_is_a_sentence(gpu: Any) -> None:
    status, error = gpu("tell([allocate(b'cuda', 1 << 40)[0], error()])")
    assert status == 20
    assert error == "rp_device_allocate: cuda has no 1099511627776 bytes of memory left"


def test_a_fault_is_no_lack_of_memory(gpu: Any) -> None:
    """Whoever asks for memory may be the first to hear of a kernel that failed."""
    lines = """
import os
status, memory = allocate(b"cuda", 8)
os.environ["EMU_FAULT"] = "1"
told = [allocate(b"cuda", 8)[0], write(b"cuda", memory, b"staged.."), error()]
tell(told + [os.environ.pop("EMU_FAULT"), write(b"cuda", memory, b"staged..")])
"""
    allocated, staged, why, _, after = gpu(lines)
    assert (allocated, staged, after) == (50, 50, 0)
    assert why.startswith("CUDA: ") and "memory" not in why


@pytest.mark.parametrize("touch", ["ctypes.string_at(memory, 4)", "ctypes.memset(memory, 0, 4)"])
def test_the_host_cannot_reach_the_device(
    libraries: dict[str, Path], emulated_device: Path, tmp_path: Path, touch: str
) -> None:
    """What the model's tests rest on: code of the host that touched device memory would end."""
    lines = (
        f"{PRELUDE}\nstatus, memory = allocate(b'cuda', 100)\nprint(status)\n{touch}\nprint('!')"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", lines, str(libraries["f32"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-11, "0\n")
