# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check PART=...`: everything that takes a GPU, in parts of less than nine minutes.

    prepare    where there is a network: wheels of NumPy and pytest into build/gpu-wheels
    build      libcore with its own products, librelpos_cuda.so for this card, the binding
    test       the tests of cuda/ on the card, and the words of every function of ptx.h
    sanitize   compute-sanitizer's four tools over tests/gpu_small.py
    bench      benchmarks/bench_cuda.py

Needs Python, CUDA 13 and torch, and no network. A part that runs out of time ends with status 3 and
goes on from there when it is started again. What it found is in build/gpu-check/PART.json, what was
printed in PART.log.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "gpu-check"
WHEELS = ROOT / "build" / "gpu-wheels"
SITE = OUT / "site"
CUDA = ROOT / "build" / "cuda" / "librelpos_cuda.so"
PACKAGES = ("numpy", "pytest", "setuptools")
MINUTES = 8.5
MORE = 3  # status: time is up, start it again
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# These are about the emulator, or about how things are built.
NOT_ON_A_GPU = tuple(f"test_cuda_{of}.py" for of in ("emulator", "orders", "build", "vectors"))


class Part:
    """One part: its time, its log, and what is done of it already."""

    def __init__(self, name: str, minutes: float) -> None:
        self.name = name
        self.begun = time.monotonic()
        self.end = self.begun + 60 * minutes
        self.path = OUT / f"{name}.json"
        self.commit = said("git", "rev-parse", "HEAD").strip()
        self.result: dict[str, Any] = {"part": name, "commit": self.commit, "done": {}}
        OUT.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            before = json.loads(self.path.read_text())
            if before["commit"] == self.commit:
                self.result = before
        self.done: dict[str, str] = self.result["done"]  # what: "passed", "failed: ..."
        self.log = (OUT / f"{name}.log").open("a")

    def left(self) -> float:
        return self.end - time.monotonic()

    def keep(self, what: str, verdict: str) -> None:
        self.done[what] = verdict
        print(f"{what}: {verdict}", flush=True)
        self.write()

    def write(self, **more: Any) -> None:
        self.result |= more | {"machine": machine(), "command": " ".join(sys.argv)}
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")

    def run(self, *command: str | Path, **environment: str) -> tuple[int | None, str]:
        """(status, or None where time ran out; what it printed)."""
        line = " ".join(str(word) for word in command)
        self.log.write(f"$ {line}\n")
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env=os.environ | surroundings() | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            text, _ = process.communicate(timeout=max(self.left(), 1))
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()
            text, _ = process.communicate()
            status = None
        self.log.write(text + f"\n[status {status}]\n")
        self.log.flush()
        return status, text

    def step(self, what: str, *command: str | Path, **environment: str) -> bool:
        """Runs a command that is not done yet."""
        if self.done.get(what) == "passed":
            return True
        status, text = self.run(*command, **environment)
        if status is None:
            self.stop()
        self.keep(what, "passed" if status == 0 else f"failed ({status}): {text[-2000:]}")
        return status == 0

    def stop(self) -> None:
        self.write(complete=False)
        print("time is up; the same command goes on from here")
        sys.exit(MORE)

    def finish(self) -> int:
        bad = [what for what, verdict in self.done.items() if not verdict.startswith("passed")]
        seconds = round(time.monotonic() - self.begun, 1)
        self.write(complete=True, failed=bad, seconds=seconds)
        print(f"{self.name}: {len(self.done) - len(bad)} passed, {len(bad)} failed, {seconds} s")
        return 1 if bad else 0


def said(*command: str) -> str:
    try:
        return subprocess.check_output(command, text=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict[str, str]:
    names = "name,driver_version,compute_cap,clocks.sm,clocks.mem,power.limit"
    line = said("nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader", "--id=0")
    words = (word.strip() for word in line.split(","))
    card = dict(zip(names.split(","), words, strict=False))
    return card | {"nvcc": said("nvcc", "--version").strip().rsplit("\n", 1)[-1]}


def surroundings() -> dict[str, str]:
    """Settings of every command: the packages of `build`, and the library that it made."""
    paths = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",  # what was printed before time ran out is not lost
        "RELPOS_BLAS": "builtin",
        "RELPOS_CUDA": "0",
        "RELPOS_CUDA_LIBRARY": str(CUDA),
        "RELPOS_TEST_CUDA": str(CUDA),
        "RELPOS_TEST_CORE": str(ROOT / "build" / "release" / "libcore.so"),
        "RELPOS_TEST_CORE_F64": str(ROOT / "build" / "f64" / "libcore_f64.so"),
    }


# ------------------------------------------------------------------------------------------ parts


def prepare(part: Part) -> int:
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:")
    part.step("wheels", *command, "--dest", WHEELS, *PACKAGES)
    return part.finish()


def build(part: Part) -> int:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index")
        part.step("packages", *command, "--find-links", WHEELS, "--target", SITE, *missing)
    jobs = f"-j{os.cpu_count()}"
    part.step("libcore", "make", jobs, "BLAS=builtin", "all", "f64")
    capability = machine().get("compute_cap", "").replace(".", "")
    only = ("--only", capability) if capability else ()
    part.step("cuda", sys.executable, "cuda/nvcc.py", "--out", CUDA.parent, *only)
    part.step("binding", sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    part.step("devices", sys.executable, "-m", "relpos", "devices")
    return part.finish()


PASSED = re.compile(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)


def run_tests(part: Part, file: Path) -> None:
    """The tests of a file that have not passed yet; what passes is kept, also if time runs out."""
    known = [what for what, verdict in part.done.items() if verdict.startswith("passed")]
    skip = [word for what in known if "::" in what for word in ("--deselect", what)]
    command = (sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "--tb=short")
    command += ("-p", "no:cacheprovider")
    status, text = part.run(*command, file.relative_to(ROOT), *skip)
    for name, verdict in PASSED.findall(text):
        part.done[name] = "passed" if verdict in ("PASSED", "SKIPPED") else f"failed: {verdict}"
    part.write()
    if status is None:
        part.stop()
    if status not in (0, 1, 5):  # passed, failed, none left
        part.keep(str(file.name), f"failed ({status}): {text[-2000:]}")
    elif status == 0 or "failed" not in text:
        part.keep(str(file.name), "passed")


def test(part: Part) -> int:
    vectors = OUT / "vectors"
    compiler = shutil.which("nvcc") or "nvcc"
    flags = ("-x", "cu", "-std=c++17", "-arch=native", "-Icuda", "-Icsrc", "-Icsrc/include")
    if part.step("vectors", compiler, *flags, "tests/emulator/vectors.cpp", "-o", vectors):
        status, text = part.run(vectors)
        head = f"# {json.dumps(machine())}\n"
        (OUT / "ptx_vectors.txt").write_text(head + text)
        part.keep("vectors run", "passed" if status == 0 else f"failed: {text[-500:]}")
    files = sorted((ROOT / "tests").glob("test_cuda_*.py"))
    for file in files:
        if file.name in NOT_ON_A_GPU or part.done.get(file.name) == "passed":
            continue
        if part.left() < 10:
            part.stop()
        run_tests(part, file)
    return part.finish()


def sanitize(part: Part) -> int:
    for tool in TOOLS:
        if part.left() < 30:
            part.stop()
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
        command += ("--target-processes", "all", sys.executable, "tests/gpu_small.py")
        part.step(tool, *command)
    return part.finish()


def bench(part: Part) -> int:
    minutes = str(max(part.left() / 60 - 1, 1))
    command = (sys.executable, "benchmarks/bench_cuda.py", "--output", OUT / "results.json")
    status, text = part.run(*command, "--minutes", minutes)
    print(text)
    if status in (None, MORE):
        part.stop()
    part.keep("bench", "passed" if status == 0 else f"failed ({status}): {text[-2000:]}")
    return part.finish()


PARTS = {"prepare": prepare, "build": build, "test": test, "sanitize": sanitize, "bench": bench}


def main() -> int:
    parser = argparse.ArgumentParser(description="What takes a GPU, in parts.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    given = parser.parse_args()
    return PARTS[given.part](Part(given.part, given.minutes))


if __name__ == "__main__":
    sys.exit(main())
