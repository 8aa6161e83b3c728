# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the compiled core, once per session.

RELPOS_TEST_CORE and RELPOS_TEST_CORE_F64 name other libraries to test (an installed one, one built
under a sanitizer); without them `make all f64` runs once.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

# Two workers share the cores: NumPy's BLAS is not to wait for both of them in each.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# What a script has put into the background ignores it, and so would the programs that are sent it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))  # capi and cases, whatever the import mode

from building import make  # noqa: E402

# The files that take longest, which begin first: what comes last has one of the workers idle.
LONGEST = (
    "test_readme.py", "test_core.py", "test_attention.py", "test_package.py", "test_cuda_step.py",
    "test_sanitizers.py", "test_cuda_orders.py", "test_cuda_attention_backward.py",
    "test_cuda_attention_forward.py", "test_cuda_ops.py", "test_properties_terms.py",
)  # fmt: skip


# What says nothing new under another Python: what asks for libcore to reach it by ctypes, and these.
CORE = (
    "test_core.py", "test_sanitizers.py", "test_disassembly.py", "test_reference.py",
    "test_reference_layers.py", "test_cuda_emulator.py", "test_cuda_ops.py", "test_cuda_orders.py",
    "test_cuda_build.py", "test_cuda_vectors.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    for item in items:
        if item.path.name in CORE or "libraries" in getattr(item, "fixturenames", ()):
            item.add_marker("core")


@pytest.fixture(scope="session")
def libraries() -> dict[str, Path]:
    """Paths of libcore ("f32") and libcore_f64 ("f64")."""
    given = {
        "f32": os.environ.get("RELPOS_TEST_CORE", ""),
        "f64": os.environ.get("RELPOS_TEST_CORE_F64", ""),
    }
    built = {
        "f32": ROOT / "build" / "release" / "libcore.so",
        "f64": ROOT / "build" / "f64" / "libcore_f64.so",
    }
    if not all(given.values()):
        make("all", "f64")
    return {name: Path(given[name] or built[name]) for name in built}


@pytest.fixture(scope="session")
def emulated_device() -> Path:
    """The library of CUDA kernels for a CPU (tests/emulator), found in the place of a GPU's;
    RELPOS_TEST_CUDA names another, RELPOS_TEST_CUDA=gpu the real one beside libcore."""
    given = os.environ.get("RELPOS_TEST_CUDA", "")
    if given != "gpu":
        library = Path(given) if given else ROOT / "build" / "emulated" / "librelpos_cuda.so"
        if not given:
            make("emulated")
        os.environ["RELPOS_CUDA_LIBRARY"] = str(library)
    return Path(given)


@pytest.fixture
def nvcc() -> ModuleType:
    """cuda/nvcc.py, which finds the compiler."""
    spec = importlib.util.spec_from_file_location("nvcc", ROOT / "cuda" / "nvcc.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["nvcc"] = module  # its dataclass looks for itself
    spec.loader.exec_module(module)
    return module
