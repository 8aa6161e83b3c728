# SPDX-License-Identifier: Apache-2.0
"""The matrix product: our own, OpenBLAS in our blocks, and torch.

    python benchmarks/bench_gemm.py --output gemm_NAME.json

Compiles c/bench_gemm.c with a C compiler against libcore.a (`make`). The shapes are those of the
paper's base model, 2048 tokens through its layers and back, of the benchmarks' small one, and 1 to
32 rows, as in decoding, with weights that come from memory. Three processes take turns at each
shape. A side's time is the median of the rounds in which others took no more than 5 % of the
machine; a line whose figures come from fewer than three such rounds is marked NOT QUIET (see
README.md on what that does to torch).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import turns

HERE = Path(__file__).parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "release"
QUIET = 0.05  # share of the machine that others may take in a round that counts

# rows, columns, inner, transpose_a, transpose_b, copies of B
Shape = tuple[int, int, int, int, int, int]
TRAINING: dict[str, Shape] = {
    "attention projection": (2048, 512, 512, 0, 1, 1),
    "feed-forward in, half": (2048, 1024, 512, 0, 1, 1),
    "feed-forward out, half": (2048, 512, 1024, 0, 1, 1),
    "feed-forward in": (2048, 2048, 512, 0, 1, 1),
    "feed-forward out": (2048, 512, 2048, 0, 1, 1),
    "logits of 256 rows": (256, 32768, 512, 0, 1, 1),
    "input gradient": (2048, 512, 512, 0, 0, 1),
    "input gradient, feed-forward": (2048, 512, 2048, 0, 0, 1),
    "input gradient, logits": (256, 512, 32768, 0, 0, 1),
    "weight gradient": (512, 512, 2048, 1, 0, 1),
    "weight gradient, feed-forward": (2048, 512, 2048, 1, 0, 1),
    "weight gradient, logits": (32768, 512, 256, 1, 0, 1),
    "small projection": (2048, 128, 128, 0, 1, 1),
    "small logits": (1048, 8000, 128, 0, 1, 1),
    "small input gradient, logits": (1048, 128, 8000, 0, 0, 1),
    "small weight gradient": (128, 128, 2048, 1, 0, 1),
    "small weight gradient, logits": (8000, 128, 1048, 1, 0, 1),
}
FEW_ROWS = (1, 4, 8, 16, 32)
WEIGHTS = ((512, 512, 128), (1024, 512, 64), (32768, 512, 3))


def few_rows() -> Iterator[tuple[str, Shape]]:
    for columns, inner, copies in WEIGHTS:
        for transpose_b in (1, 0):
            for rows in FEW_ROWS:
                shape = (rows, columns, inner, 0, transpose_b, copies)
                yield f"{rows} rows, B {'transposed' if transpose_b else 'plain'}", shape


class Side:
    """A process that answers a line of a shape with a line of seconds."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = self._line()

    def ask(self, request: str) -> float:
        assert self.process.stdin is not None
        print(request, file=self.process.stdin, flush=True)
        return float(self._line().split()[0])

    def ticks(self) -> int:
        """CPU time so far, in the kernel's clock ticks."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        user, system = stat.rsplit(")", 1)[1].split()[11:13]
        return int(user) + int(system)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{self.process.args} ended")
        return line


def serve_torch() -> None:
    """The same dialogue as bench_gemm.c's."""
    import torch

    torch.set_num_threads(int(os.environ["RELPOS_NUM_THREADS"]))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for line in sys.stdin:
        rows, columns, inner, transpose_a, transpose_b, copies = map(int, line.split())
        a = torch.randn(inner, rows).T if transpose_a else torch.randn(rows, inner)
        b = [
            torch.randn(columns, inner).T if transpose_b else torch.randn(inner, columns)
            for _ in range(copies)
        ]
        c = torch.empty(rows, columns)
        seconds = []
        begin = time.perf_counter()
        while len(seconds) < 7 or (len(seconds) < 4000 and time.perf_counter() - begin < 0.1):
            start = time.perf_counter()
            torch.mm(a, b[len(seconds) % copies], out=c)
            seconds.append(time.perf_counter() - start)
        print(median(seconds[2:]), flush=True)


def compile_driver() -> Path:
    subprocess.run(["make", "-s", "build/release/libcore.a"], cwd=ROOT, check=True)
    driver = BUILD / "bench_gemm"
    command = ["cc", "-std=c11", "-O3", "-Icsrc", "-Icsrc/include", "benchmarks/c/bench_gemm.c"]
    command += ["build/release/libcore.a", "-o", str(driver), "-lm", "-ldl", "-pthread"]
    subprocess.run(command, cwd=ROOT, check=True)
    return driver


def library_path() -> dict[str, str]:
    try:
        import scipy_openblas32
    except ImportError:
        return {}
    return {"LD_LIBRARY_PATH": str(scipy_openblas32.get_lib_dir())}


def machine_ticks() -> int:
    """What all processes took, and the hypervisor."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
    return user + nice + system + irq + softirq + steal


def measure(sides: list[Side], request: str, rounds: int) -> tuple[list[float], int]:
    """Median seconds of each side over the quiet rounds (or the quietest three); how many."""
    seen: list[tuple[float, list[float]]] = []
    for _ in range(3 * rounds):
        begin = time.perf_counter()
        others = sum(side.ticks() for side in sides) - machine_ticks()
        seconds = [side.ask(request) for side in sides]
        others += machine_ticks() - sum(side.ticks() for side in sides)
        ticks = (time.perf_counter() - begin) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        seen.append((others / ticks, seconds))
        if sum(share <= QUIET for share, _ in seen) >= rounds:
            break
    seen.sort(key=lambda r: r[0])
    quiet = sum(share <= QUIET for share, _ in seen)
    used = [seconds for _, seconds in seen[: max(quiet, 3)]]
    return [median(column) for column in zip(*used, strict=True)], quiet


def row(label: str, shape: Shape, seconds: list[float], bandwidth: float) -> str:
    rows, columns, inner, *_ = shape
    work, weights = 2e-9 * rows * columns * inner, 4e-9 * columns * inner
    text = f"| {label} | {rows} x {columns} x {inner} |"
    for s in seconds:
        share = f", {weights / s / bandwidth:4.0%} of memory" if rows <= max(FEW_ROWS) else ""
        text += f" {s * 1e6:.0f} us, {work / s:.0f} Gflop/s{share} |"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", help="name of a file in results/")
    parser.add_argument("--torch-side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch_side:
        serve_torch()
        return
    driver = str(compile_driver())
    threads = {name: str(options.threads) for name in ("RELPOS_NUM_THREADS", "OMP_NUM_THREADS")}
    sides = {
        "builtin": Side([driver], threads | {"RELPOS_BLAS": "builtin"}),
        "blas": Side([driver], threads | library_path() | {"RELPOS_BLAS": "openblas"}),
        "torch": Side([sys.executable, __file__, "--torch-side"], threads),
    }
    bandwidth = 1e-9 * max(sides["builtin"].ask("bandwidth") for _ in range(options.rounds))
    names = [side.name for side in sides.values()]
    print(f"memory {bandwidth:.1f} GB/s\n\n| product | shape | {' | '.join(names)} |")
    print("|---|---|---|---|---|")
    results = []
    for label, shape in [*TRAINING.items(), *few_rows()]:
        request = " ".join(map(str, shape))
        seconds, quiet = measure(list(sides.values()), request, options.rounds)
        print(row(label, shape, seconds, bandwidth), "" if quiet >= 3 else "NOT QUIET", flush=True)
        times = dict(zip(sides, seconds, strict=True))
        results.append({"label": label, "shape": shape, "seconds": times, "quiet_rounds": quiet})
    if options.output:
        record = {"command": " ".join(sys.argv), "machine": turns.machine(), "sides": names}
        record |= {"memory_gb_s": bandwidth, "results": results}
        path = HERE / "results" / options.output
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
