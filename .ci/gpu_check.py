# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check PART=...`: everything that takes a GPU, in parts of less than nine minutes.

    prepare    where there is a network: wheels of NumPy and pytest into build/gpu-wheels
    build      libcore with its own products, librelpos_cuda.so for this card, the binding
    test       the tests of cuda/ on the card, and the words of every function of ptx.h; by several
               processes where pytest-xdist is
    sanitize   compute-sanitizer's four tools over tests/gpu_small.py
    bench      benchmarks/bench_cuda.py

Needs Python 3.12, CUDA 13 and torch, and no network. A part that runs out of time ends with status 3
(with 2 under make, as what fails does) and goes on from there when it is started again. What it found
is in build/gpu-check/PART.json, what was printed in PART.log. Another tree begins from the start.

It is also what makes pytest go on: `-p gpu_check` leaves out the tests that are done.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "cuda")]

import nvcc  # noqa: E402

from sources import digest  # noqa: E402

OUT = ROOT / "build" / "gpu-check"
WHEELS = ROOT / "build" / "gpu-wheels"
SITE = OUT / "site"
CUDA = ROOT / "build" / "cuda" / "librelpos_cuda.so"
PACKAGES = {
    "numpy": "numpy",
    "pytest": "pytest",
    "xdist": "pytest-xdist",
    "setuptools": "setuptools",
}
MINUTES = 8.5
MORE = 3  # status: time is up, start it again
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SHARES = 8  # of tests/gpu_small.py, each a step of its own
DONE = ("passed", "skipped")
CHECKERS = 8  # at once
PROCESSES = 12  # of pytest: most of a test's time is NumPy's
# These are about the emulator, or about how things are built.
NOT_ON_A_GPU = tuple(f"test_cuda_{of}.py" for of in ("emulator", "orders", "build", "vectors"))


class Part:
    """One part: its time, its log, and what is done of it already."""

    def __init__(self, name: str, minutes: float) -> None:
        self.name = name
        self.begun = time.monotonic()
        self.end = self.begun + 60 * minutes
        self.path = OUT / f"{name}.json"
        self.sources = digest()
        self.result = found(name, self.sources)
        self.result |= {"part": name, "sources": self.sources, "complete": False}
        self.result["commit"] = said("git", "rev-parse", "HEAD").strip()
        OUT.mkdir(parents=True, exist_ok=True)
        # what: "passed", "skipped", "failed: ..."
        self.done: dict[str, str] = self.result.setdefault("done", {})
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
        status: int | None
        try:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env=os.environ | surroundings() | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
            )
        except OSError as error:  # there is no such program
            status, text = 127, str(error)
        else:
            status, text = self.wait(process)
        self.log.write(text + f"\n[status {status}]\n")
        self.log.flush()
        return status, text

    def wait(self, process: subprocess.Popen[str]) -> tuple[int | None, str]:
        """Ends it with all that it has started, when time is up or this program is ended."""
        try:
            text, _ = process.communicate(timeout=max(self.left(), 1))
            return process.returncode, text
        except subprocess.TimeoutExpired:
            return None, end(process)
        except BaseException:
            end(process)
            raise

    def step(self, what: str, *command: str | Path, **environment: str) -> bool:
        """Runs a command that is not done yet."""
        if self.done.get(what) in DONE:
            return True
        status, text = self.run(*command, **environment)
        if status is None:
            self.stop()
        self.keep(what, "passed" if status == 0 else f"failed ({status}): {text[-2000:]}")
        return status == 0

    def stop(self) -> None:
        self.write()
        print("time is up; the same command goes on from here")
        sys.exit(MORE)

    def finish(self) -> int:
        bad = [what for what, verdict in self.done.items() if verdict not in DONE]
        skipped = [what for what, verdict in self.done.items() if verdict == "skipped"]
        seconds = round(time.monotonic() - self.begun, 1)
        self.write(complete=True, failed=bad, skipped=skipped, seconds=seconds)
        passed = len(self.done) - len(bad) - len(skipped)
        counts = f"{passed} passed, {len(skipped)} skipped, {len(bad)} failed"
        for what in bad:
            print(f"{what}: {self.done[what][:60]}")
        print(f"{self.name}: {counts}, {seconds} s")
        return 1 if bad else 0


def found(name: str, sources: str) -> dict[str, Any]:
    """What a part has found of these sources."""
    path = OUT / f"{name}.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return before if before.get("sources") == sources else {}


def end(process: subprocess.Popen[str]) -> str:
    """Ends it and what it has started; what they have printed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def said(*command: str) -> str:
    try:
        return subprocess.check_output(command, text=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""


def visible() -> str:
    """The cards that programs see; the first is the one that is used, and that machine() names."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0")


def machine() -> dict[str, str]:
    names = "name,driver_version,compute_cap,clocks.sm,clocks.mem,power.limit"
    own = visible().partition(",")[0]
    line = said("nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader", f"--id={own}")
    words = (word.strip() for word in line.split(","))
    card = dict(zip(names.split(","), words, strict=False))
    compiler = said(str(toolkit() / "nvcc"), "--version") if toolkit() else ""
    return card | {"nvcc": compiler.strip().rsplit("\n", 1)[-1]}


@functools.cache
def toolkit() -> Path | None:
    """The folder of nvcc, and of compute-sanitizer."""
    try:
        return nvcc.find().nvcc.parent
    except nvcc.Missing:
        return None


def joined(*paths: object) -> str:
    return os.pathsep.join(str(path) for path in paths if path)


def surroundings() -> dict[str, str]:
    """Settings of every command: the packages of `build`, and the library that it made."""
    return {
        "PATH": joined(toolkit(), os.environ.get("PATH")),
        "PYTHONPATH": joined(SITE, ROOT, ROOT / ".ci", os.environ.get("PYTHONPATH")),
        "PYTHONUNBUFFERED": "1",  # what was printed before time ran out is not lost
        "CUDA_VISIBLE_DEVICES": visible(),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # nvidia-smi's
        "BLAS": "builtin",  # to make, also where tests call it
        "RELPOS_BLAS": "builtin",
        "RELPOS_CUDA": "0",
        "RELPOS_CUDA_LIBRARY": str(CUDA),
        "RELPOS_TEST_CUDA": "gpu",
        "RELPOS_TEST_CORE": str(ROOT / "build" / "release" / "libcore.so"),
        "RELPOS_TEST_CORE_F64": str(ROOT / "build" / "f64" / "libcore_f64.so"),
    }


# ------------------------------------------------------------------------------------------ parts


def prepare(part: Part) -> int:
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:")
    part.step("wheels", *command, "--dest", WHEELS, *PACKAGES.values())
    return part.finish()


# Prints what there is, and fails unless that is a GPU that can be used.
USABLE = """
import sys, relpos
print(*relpos.devices(), sep="\\n")
sys.exit(all(d.problem or not d.name.startswith("cuda") for d in relpos.devices()))
"""


def build(part: Part) -> int:
    part.done.clear()  # make and nvcc.py know themselves what is there already
    missing = [of for name, of in PACKAGES.items() if importlib.util.find_spec(name) is None]
    if missing:
        command = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index")
        part.step("packages", *command, "--find-links", WHEELS, "--target", SITE, *missing)
    jobs = f"-j{os.cpu_count()}"
    part.step("libcore", "make", jobs, "all", "f64")
    capability = machine().get("compute_cap", "").replace(".", "")
    only = ("--only", capability) if capability else ()
    part.step("cuda", sys.executable, "cuda/nvcc.py", "--out", CUDA.parent, *only)
    part.step("binding", sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    part.step("devices", sys.executable, "-c", USABLE)
    return part.finish()


VERDICTS = "PASSED|FAILED|ERROR|SKIPPED"
# Of pytest -v, without and with pytest-xdist.
VERDICT = re.compile(
    rf"^(?:(tests/\S+::.*?) ({VERDICTS})|\[gw\d+\] \[ *\d+%\] ({VERDICTS}) (tests/\S+::.*?) *$)",
    re.MULTILINE,
)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """pytest's hook: the tests that are done are not run again."""
    done = json.loads(Path(os.environ["GPU_CHECK_DONE"]).read_text())["done"]
    items[:] = [item for item in items if done.get(item.nodeid) not in DONE]


def run_tests(part: Part, files: list[Path], processes: int = 0) -> None:
    """The tests of these files that are not done yet; what is done is kept, also if time runs out.
    Those that look at the whole GPU come when the others are done."""
    if processes:
        run_pytest(part, "pytest", files, "-n", str(processes), "-m", "not alone")
        run_pytest(part, "pytest, alone", files, "-m", "alone")
    else:
        run_pytest(part, "pytest", files)


def run_pytest(part: Part, what: str, files: list[Path], *options: str) -> None:
    part.write()
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "gpu_check"]
    command += options
    names = [str(file.relative_to(ROOT)) for file in files]
    status, text = part.run(
        *command, *names,
        GPU_CHECK_DONE=str(part.path),
        RELPOS_CUDA_MULTIPROCESSORS="4",  # as the emulator, since cases are small: docs/cuda.md
    )  # fmt: skip
    for alone, verdict, shared, name in VERDICT.findall(text):
        ended = (verdict or shared).lower()
        part.done[alone or name] = ended if ended in DONE else f"failed: {ended}"
    part.write()
    if status is None:
        part.stop()
    part.keep(what, "passed" if status in (0, 5) else f"failed ({status}): {text[-2000:]}")


def test(part: Part) -> int:
    vectors = OUT / "vectors"
    command = (*nvcc.find().program(), "-x", "cu", "tests/emulator/vectors.cpp")
    if part.step("vectors", *command, "-o", vectors):
        status, text = part.run(vectors)
        head = f"# {json.dumps(machine())}\n"
        (OUT / "ptx_vectors.txt").write_text(head + text)
        part.keep("vectors run", "passed" if status == 0 else f"failed: {text[-500:]}")
    files = sorted((ROOT / "tests").glob("test_cuda_*.py"))
    parallel = importlib.util.find_spec("xdist") is not None
    processes = min(PROCESSES, os.cpu_count() or 1) if parallel else 0
    run_tests(part, [file for file in files if file.name not in NOT_ON_A_GPU], processes)
    return part.finish()


def sanitize(part: Part) -> int:
    """Several at once: most of the time is the checker's, on the host.

    initcheck does not see what Hopper's bulk copies write, by which cuBLAS leaves products of bf16
    (torch.mm's are as unwritten to it): under it models compute in f32."""

    def look(tool: str, share: int) -> None:
        models = ("f32",) if tool == "initcheck" else ()
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
        command += ("--target-processes", "all", sys.executable, "tests/gpu_small.py")
        part.step(f"{tool} {share}/{SHARES}", *command, f"{share}/{SHARES}", *models)

    with ThreadPoolExecutor(min(CHECKERS, os.cpu_count() or 1)) as pool:
        every = [pool.submit(look, *of) for of in itertools.product(TOOLS, range(1, SHARES + 1))]
        for one in every:
            try:
                one.result()
            except SystemExit:  # time is up
                pool.shutdown(cancel_futures=True)
                raise
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    part = Part(given.part, given.minutes)
    built = found("build", part.sources)
    if given.part not in ("prepare", "build") and (not built.get("complete") or built["failed"]):
        parser.error("this tree is not built: build comes first")
    return PARTS[given.part](part)


if __name__ == "__main__":
    sys.exit(main())
