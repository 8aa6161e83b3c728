# SPDX-License-Identifier: Apache-2.0
""".ci/gpu_check.py, as far as that goes without a GPU: what is done is not done again, what is new
is, and what hangs is ended."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from sources import FILES, digest  # noqa: E402

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="for Python 3.12")

FEW = """
import os
import pytest

def begun(name):
    with open("begun", "a") as file:
        file.write(name)

def test_a():
    begun("a")

def test_ab():
    begun("b")
    assert os.path.exists("mended")

@pytest.mark.parametrize("x", ["[", "a b::c"])
def test_of(x):
    begun("c")

def test_not_here():
    begun("d")
    pytest.skip("not here")
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, in a tree of its own."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / ".ci" / "gpu_check.py")
    assert spec and spec.loader
    monkeypatch.setattr(sys, "path", sys.path.copy())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in FILES:
        (tmp_path / name).write_text("")
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "OUT", tmp_path / "build")
    monkeypatch.setattr(module, "digest", lambda: digest(tmp_path))
    monkeypatch.setattr(module, "toolkit", lambda: None)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".ci"))
    return module


@pytest.mark.parametrize("processes", [0, 2])
def test_what_has_been_tested_is_not_tested_again(
    check: ModuleType, tmp_path: Path, processes: int
) -> None:
    file = tmp_path / "tests" / "test_few.py"
    file.write_text(FEW)
    part = check.Part("test", 1)
    check.run_tests(part, [file], processes)
    assert part.finish() == 1
    assert part.result["failed"] == ["tests/test_few.py::test_ab", "pytest"]
    assert part.result["skipped"] == ["tests/test_few.py::test_not_here"]
    (tmp_path / "mended").touch()
    part = check.Part("test", 1)
    check.run_tests(part, [file], processes)
    assert part.finish() == 0 and len(part.done) == (7 if processes else 6)
    assert sorted((tmp_path / "begun").read_text()) == sorted("abccdb")
    file.write_text(FEW + "\n")
    assert check.Part("test", 1).done == {}


def test_what_was_built_is_what_counts(tmp_path: Path) -> None:
    for name in (*FILES, "cuda/a.cu"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = digest(tmp_path)
    for name in ("relpos/lib/libcore.a", "tests/__pycache__/x", "README.md", "build/log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert digest(tmp_path) == before
    (tmp_path / "cuda" / "a.cu").rename(tmp_path / "cuda" / "b.cu")
    assert digest(tmp_path) != before


def test_what_hangs_is_ended_with_all_that_it_started(check: ModuleType) -> None:
    """The second one has what is printed open for as long as it lives."""
    begun = time.monotonic()
    part = check.Part("test", 0)
    assert part.run("sh", "-c", "echo here; sleep 100 & sleep 100") == (None, "here\n")
    with pytest.raises(SystemExit) as ended:
        part.step("hangs", "sleep", "100")
    assert ended.value.code == check.MORE and part.done == {}
    assert time.monotonic() - begun < 50


def test_a_program_that_is_not_there_is_a_failure(check: ModuleType) -> None:
    part = check.Part("sanitize", 1)
    assert not part.step("tool", "no-such-program")
    assert part.done["tool"].startswith("failed (127): ") and part.finish() == 1


def test_built_is_what_can_be_used(check: ModuleType, tmp_path: Path) -> None:
    """A library that finds no GPU is no success."""
    (tmp_path / "relpos.py").write_text(
        "from types import SimpleNamespace as Device\n"
        "def devices():\n"
        "    return [Device(name='cpu', problem=None), Device(name='cuda:0', problem=WHY)]\n"
        "WHY = None\n"
    )
    part = check.Part("build", 1)
    assert part.step("usable", sys.executable, "-c", check.USABLE)
    with (tmp_path / "relpos.py").open("a") as module:
        module.write("WHY = 'no driver'\n")
    assert not part.step("not usable", sys.executable, "-c", check.USABLE)
    assert "no driver" in part.done["not usable"]


def test_the_card_that_is_used_is_the_one_that_is_named(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(check, "said", lambda *command: asked.extend(command) or "")
    monkeypatch.setattr(check, "toolkit", lambda: None)
    for cards, own in ((None, "0"), ("3,1", "3"), ("GPU-ab", "GPU-ab")):
        if cards is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cards)
        check.machine()
        assert asked[-1] == f"--id={own}"
        assert check.surroundings()["CUDA_VISIBLE_DEVICES"] == (cards or "0")
