# SPDX-License-Identifier: Apache-2.0
"""Attention and the training step on a GPU, against the best of PyTorch there, both in one run.

    python benchmarks/bench_cuda.py --output cuda.json                 everything
    python benchmarks/bench_cuda.py --only attention --minutes 8       goes on where the last stopped
    python benchmarks/bench_cuda.py --compile 1/4 & ... 4/4            a share of the peers' compiling
    python benchmarks/bench_cuda.py --dry-run                          the smallest, on the emulator

Attention: bf16, D = 64, B H N^2 the same work for every n, forward and backward. A round times every
side once, between two events on torch's stream, after a write that takes the cache of the GPU away;
a figure is the median of the rounds with their quartiles. Sides:

    ours plain, ours shaw (both terms, k = 16), ours key (the key term)
    torch plain      scaled_dot_product_attention as torch chooses, and by cuDNN and FlashAttention
    torch flex       FlexAttention, compiled, key term as score_mod, blocks of the future skipped
    torch gather     the formula with both terms by gather and scatter, compiled

The step: paper-base and paper-big in bf16 with 25,000 + 25,000 tokens; ours, ours with absolute
positions, and the compiled peers of peers/torch_step.py under autocast: bands by strides, and by gather.

Peers are compiled before they are timed, which takes minutes: --compile does nothing else, for a share
of them, into torch's cache (TORCHINDUCTOR_CACHE_DIR), so that several processes can share the work.

What is measured is written at once, with card, clocks, driver and command; a case that is there
already, of the same sources, is not measured again.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "tests"), str(HERE), str(ROOT)]

import torch  # noqa: E402

import capi  # noqa: E402
import device_capi  # noqa: E402
from peers import torch_attention  # noqa: E402
from sources import digest  # noqa: E402

Json = dict[str, Any]
Call = Callable[[], Any]
Peer = Callable[..., Any]

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEADS, WIDTH, CLIP, TOKENS = 16, 64, 16, 16384  # B = TOKENS / n
STEPS = ("paper-base", "paper-big")
STEP_TOKENS, SENTENCE = 25_000, 25
STEP_PEERS = ("compiled gather", "compiled skew")  # of the step
LOAD = "clocks.sm,temperature.gpu,power.draw"  # as a case has ended
ROUNDS, FLUSH = 30, 1 << 30
MORE = 3  # status: time is up, start it again

# ------------------------------------------------------------------------------------ the machine


def asked(*command: str) -> str:
    try:
        return subprocess.check_output(command, text=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""


def own_card() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def machine(dry: bool) -> Json:
    """What stands beside every figure."""
    names = "name,driver_version,clocks.mem,clocks.max.sm,power.limit"
    line = asked(
        "nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader", f"--id={own_card()}"
    )
    card = dict(zip(names.split(","), (word.strip() for word in line.split(",")), strict=False))
    return card | {
        "commit": asked("git", "rev-parse", "HEAD").strip(),
        "changed": bool(asked("git", "status", "--porcelain", "--untracked-files=no").strip()),
        "sources": digest(),
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "emulated": dry,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class Clock:
    """Seconds of a call: by events where there is a GPU."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.flushed = torch.empty(4096 if dry else FLUSH, dtype=torch.uint8, device=place(dry))

    def __call__(self, call: Call) -> float:
        self.flushed.zero_()
        if self.dry:
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000


def spread(seconds: list[float]) -> Json:
    low, middle, high = (
        statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    )
    return {"seconds": middle, "low": low, "high": high, "rounds": len(seconds)}


def take_turns(clock: Clock, sides: dict[str, Call], rounds: int) -> dict[str, Json]:
    """Every side once a round, after two calls that do not count."""
    for call in sides.values():
        for _ in range(2):
            call()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            times[name].append(clock(call))
    return {name: spread(seconds) for name, seconds in times.items()}


# -------------------------------------------------------------------------------------- attention


class Ours:
    """libcore's attention over torch's arrays, by their addresses."""

    def __init__(self, core: capi.Core, dry: bool) -> None:
        self.lib, self.check = core.lib, core.check
        stream = None if dry else torch.cuda.current_stream().cuda_stream
        bf16 = device_capi.BF16
        size = ctypes.sizeof(device_capi.Placement)
        self.where = device_capi.Placement(size, b"cuda", stream, bf16, bf16)
        self.workspace: Json = {}  # bytes of forward and of backward, by terms

    def prepare(self, x: Json, terms: tuple[str, ...], causal: bool) -> tuple[Call, Call]:
        q = x["q"]
        b, h, n, d = q.shape
        a = capi.Attention(struct_size=ctypes.sizeof(capi.Attention), B=b, H=h, N=n, M=n, D=d, Dv=d)
        a.window_left = a.window_right = -1
        a.causal = causal
        a.placement = ctypes.addressof(self.where)
        for kind in terms:
            term = getattr(a, kind)[0]
            term.table, term.row_stride, term.rows = x[kind].data_ptr(), d, 2 * CLIP + 1
            term.left = term.right = CLIP
        rows = {name: self.rows(x[name]) for name in ("q", "k", "v", "dout")}
        made = {name: torch.empty_like(q) for name in ("out", "q", "k", "v")}
        numbers: Json = {"dtype": torch.float32, "device": q.device}
        lse = torch.empty(b, h, n, **numbers)
        forward, backward = ctypes.c_int64(), ctypes.c_int64()
        sizes = (ctypes.byref(forward), ctypes.byref(backward))
        self.check(self.lib.rp_attention_workspace(ctypes.byref(a), *sizes))
        self.workspace[" ".join(terms) or "plain"] = [forward.value, backward.value]
        bytes_needed = max(forward.value, backward.value, 1) + 256
        memory = torch.empty(bytes_needed, dtype=torch.uint8, device=q.device)
        place = (memory.data_ptr() + 255) // 256 * 256
        gradients = capi.Gradients(**{name: self.rows(made[name]) for name in ("q", "k", "v")})
        tables = {kind: torch.zeros(2 * CLIP + 1, d, **numbers) for kind in terms}
        for kind, table in tables.items():
            getattr(gradients, kind)[0] = table.data_ptr()
        kept = (a, rows, made, lse, memory, gradients, tables, x)  # for as long as the calls live
        out, workspace = self.rows(made["out"]), (ctypes.c_void_p(place), forward)

        def run_forward(kept: Any = kept) -> None:
            self.check(
                self.lib.rp_attention_forward(
                    ctypes.byref(a), rows["q"], rows["k"], rows["v"], out,
                    ctypes.c_void_p(lse.data_ptr()), *workspace,
                )
            )  # fmt: skip

        def run_backward(kept: Any = kept) -> None:
            self.check(
                self.lib.rp_attention_backward(
                    ctypes.byref(a), rows["q"], rows["k"], rows["v"], out,
                    ctypes.c_void_p(lse.data_ptr()), rows["dout"], ctypes.byref(gradients),
                    ctypes.c_void_p(place), backward,
                )
            )  # fmt: skip

        run_forward()
        return run_forward, run_backward

    @staticmethod
    def rows(x: torch.Tensor) -> capi.Rows:
        return capi.Rows(x.data_ptr(), *x.stride()[:3])


def place(dry: bool) -> torch.device:
    """Where arrays are made. Not by torch.set_default_device: torch.compile stops where that is on."""
    return torch.device("cpu" if dry else "cuda")


def arrays(n: int, heads: int, dry: bool = False) -> Json:
    draw = torch.Generator(place(dry)).manual_seed(0)
    shape = (max(1, TOKENS // n), heads, n, WIDTH)
    if heads != HEADS:  # the dry run
        shape = (1, heads, n, WIDTH)
    x: Json = {
        name: torch.randn(shape, generator=draw, device=draw.device).to(torch.bfloat16)
        for name in ("q", "k", "v", "dout")
    }
    for kind in ("key", "value"):
        table = torch.randn(2 * CLIP + 1, WIDTH, generator=draw, device=draw.device)
        x[kind] = table * WIDTH**-0.5
    return x


def torch_side(peer: Any, x: Json, causal: bool, tables: bool) -> tuple[Call, Call]:
    inputs = [x[name].detach().clone().requires_grad_() for name in ("q", "k", "v")]
    if tables:
        inputs += [x[name].to(torch.bfloat16).requires_grad_() for name in ("key", "value")]

    def forward() -> Any:
        with torch.no_grad():
            return peer(*inputs, causal=causal)

    out = peer(*inputs, causal=causal)

    def backward() -> None:
        for one in inputs:
            one.grad = None
        out.backward(x["dout"], retain_graph=True)

    return forward, backward


def by_backend(name: str) -> Peer:
    """Torch's own attention, by one of its libraries."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def peer(*inputs: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return torch_attention.plain(*inputs, causal=causal)

    return peer


def torch_makers(
    x: Json, causal: bool, compiled: bool
) -> dict[str, Callable[[], tuple[Call, Call]]]:
    """By name: what makes (forward, backward) of a peer."""
    plain: dict[str, Peer] = {"torch plain": torch_attention.plain}
    plain |= {"torch cudnn": by_backend("CUDNN_ATTENTION")}
    plain |= {"torch flash": by_backend("FLASH_ATTENTION")}
    relative: dict[str, Peer] = {"torch flex": torch_attention.flex}
    relative["torch gather"] = torch.compile(torch_attention.gather, dynamic=False)
    makers = {}
    for name, peer in (relative if compiled else plain).items():
        makers[name] = partial(torch_side, peer, x, causal, compiled)
    return makers


def attention_sides(ours: Ours, x: Json, causal: bool, compiled: bool) -> Json:
    """By name: (forward, backward), or why there is none."""
    makers: dict[str, Callable[[], tuple[Call, Call]]] = {
        "ours plain": lambda: ours.prepare(x, (), causal),
        "ours shaw": lambda: ours.prepare(x, ("key", "value"), causal),
        "ours key": lambda: ours.prepare(x, ("key",), causal),
    }
    makers |= torch_makers(x, causal, compiled=False)
    makers |= torch_makers(x, causal, compiled=True) if compiled else {}
    sides: Json = {}
    for name, make in makers.items():
        try:
            sides[name] = make()
            for call in sides[name]:  # what is compiled by its first call is
                call()
        except Exception as error:  # a peer that cannot: its row says so
            if name.startswith("ours"):
                raise
            sides[name] = f"{type(error).__name__}: {str(error)[:300]}"
            torch.cuda.empty_cache()
    return sides


def compile_share(share: str) -> None:
    """The k-th of n shares of what torch compiles here; the longest first."""
    k, n = (int(word) for word in share.split("/"))
    work: list[Callable[[], Any]] = []
    for model in STEPS:
        work += [partial(torch_step, case_of(model), peer) for peer in STEP_PEERS]
    for length in LENGTHS:
        for causal in (False, True):
            work.append(partial(compile_attention, length, causal))
    for one in work[k - 1 :: n]:
        one()
        torch.cuda.empty_cache()


def compile_attention(n: int, causal: bool) -> None:
    for make in torch_makers(arrays(n, HEADS), causal, compiled=True).values():
        try:
            for call in make():
                call()
        except Exception as error:
            print(f"n={n}, causal={causal}: {type(error).__name__}: {str(error)[:300]}")


def measure_attention(report: Report, ours: Ours, options: argparse.Namespace) -> None:
    heads = 1 if options.dry_run else HEADS
    for n in (64,) if options.dry_run else options.lengths:
        for causal in (False, True):
            names = [f"attention {p} n={n} causal={causal}" for p in ("forward", "backward")]
            if all(report.has(name) for name in names):
                continue
            report.leave_in_time()
            x = arrays(n, heads, options.dry_run)
            sides = attention_sides(ours, x, causal, not (options.dry_run or options.quick))
            failed = {name: why for name, why in sides.items() if isinstance(why, str)}
            pairs = x["q"].shape[0] * heads * n * n / (2 if causal else 1)
            for part, factor in ((0, 4), (1, 10)):
                calls = {name: side[part] for name, side in sides.items() if name not in failed}
                results = take_turns(report.clock, calls, options.rounds)
                for result in results.values():
                    result["tflops"] = factor * pairs * WIDTH / result["seconds"] / 1e12
                report.add(names[part], results, failed)
            report.memory(names[1], ours.workspace)


# ------------------------------------------------------------------------------------------- step


def config_of_step(model: str, dry: bool, absolute: bool = False) -> Any:
    import bench_step
    import relpos

    return relpos.Config.preset("tiny") if dry else bench_step.config_of(case_of(model), absolute)


def case_of(model: str, tokens: int = STEP_TOKENS) -> Json:
    return {"model": model, "tokens": tokens, "length": SENTENCE, "threads": 2}


def step_sides(model: str, tokens: int, dry: bool) -> Json:
    import bench_step
    import relpos

    case = case_of(model, tokens)
    sides: Json = {}
    precision = "bf16"
    torch.cuda.empty_cache()  # what the peers before have let go is ours to ask for
    for name, absolute in (("ours", False), ("ours absolute", True)):
        config = config_of_step(model, dry, absolute)
        batch = bench_step.batch_of(config, bench_step.lengths_of(case)[0], False)
        room = max(len(batch.source), len(batch.target))
        transformer = relpos.Transformer(
            config, tokens=room, sentences=batch.sentences, device="cuda", precision=precision
        )
        sides[name] = lambda t=transformer, b=batch: t.step(b)
    if not dry:
        sides |= {f"torch {peer}": torch_step(case, peer) for peer in STEP_PEERS}
    return sides


def flops_of(config: Any, tokens: int) -> float:
    """Of a step's products: weights six a number and token, attention in the same ratio."""
    C, F, n = config.width, config.feed_forward, SENTENCE
    width = config.head_width or C // config.heads
    wide, keys = config.heads * width, (config.key_heads or config.heads) * width
    encoder = 2 * C * (wide + keys) + 2 * C * F + 2 * n * wide
    decoder = 4 * C * (wide + keys) + 2 * C * F + 3 * n * wide
    layers = config.encoder.layers * encoder + config.decoder.layers * decoder
    return 6.0 * tokens * (layers + C * config.target_vocabulary)


def torch_step(case: Json, peer: str) -> Call | str:
    import bench_step
    from peers.torch_step import PEERS
    from peers.torch_training import Batch

    shape = bench_step.shape_of(bench_step.config_of(case))
    size = (case["tokens"] // case["length"], case["length"])
    ids = [torch.randint(3, shape.vocabulary, size, device="cuda") for _ in range(3)]

    def call() -> float:
        with torch.autocast("cuda", torch.bfloat16):
            return step.step()

    try:
        with place(dry=False):
            step = PEERS[peer](shape, Batch(*ids))
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return call


def measure_steps(report: Report, options: argparse.Namespace) -> None:
    for model in STEPS[:1] if options.dry_run else STEPS:
        name = f"step {model}"
        if report.has(name):
            continue
        report.leave_in_time()
        tokens = 2 * SENTENCE if options.dry_run else STEP_TOKENS
        sides = step_sides(model, tokens, options.dry_run)
        failed = {side: why for side, why in sides.items() if isinstance(why, str)}
        calls = {side: call for side, call in sides.items() if side not in failed}
        results = take_turns(report.clock, calls, options.rounds)
        flops = flops_of(config_of_step(model, options.dry_run), tokens)
        for result in results.values():
            result["tokens_a_second"] = 2 * tokens / result["seconds"]
            result["tflops"] = flops / result["seconds"] / 1e12
        report.add(name, results, failed)
        report.memory(name)
        del sides, calls  # before the next one's are made


# ----------------------------------------------------------------------------------------- report


class Report:
    """The file of results, written after every case."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path: Path = options.output
        self.machine = machine(options.dry_run)
        self.clock = Clock(options.dry_run)
        self.end = time.monotonic() + 60 * options.minutes
        self.cases: Json = {}
        if self.path.exists():
            before = json.loads(self.path.read_text())
            if before["machine"].get("sources") == self.machine["sources"]:
                self.cases = before["cases"]

    def has(self, name: str) -> bool:
        return name in self.cases

    def leave_in_time(self) -> None:
        if time.monotonic() > self.end:
            print("time is up; the same command goes on from here")
            sys.exit(MORE)

    def add(self, name: str, results: dict[str, Json], failed: dict[str, str]) -> None:
        load = asked(
            "nvidia-smi", f"--query-gpu={LOAD}", "--format=csv,noheader", f"--id={own_card()}"
        )
        self.cases[name] = {"sides": results, "failed": failed, "after": f"{LOAD}: {load.strip()}"}
        print(name)
        for side, r in sorted(results.items()):
            more = [f"{r[k]:.4g} {k}" for k in ("tflops", "tokens_a_second") if k in r]
            quartiles = f"({1e3 * r['low']:.4f} to {1e3 * r['high']:.4f})"
            print(f"  {side:<16} {1e3 * r['seconds']:9.4f} ms {quartiles} {' '.join(more)}")
        for side, why in failed.items():
            print(f"  {side:<16} failed: {why}")
        self.write()

    def memory(self, name: str, workspace: Json | None = None) -> None:
        """The most that torch's side held, and ours beside arrays; a model's is in its plan."""
        if workspace is not None:
            self.cases[name]["workspace_bytes"] = dict(workspace)
        if torch.cuda.is_available():
            self.cases[name]["torch_peak_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(
            json.dumps({"machine": self.machine, "cases": self.cases}, indent=1) + "\n"
        )
        fresh.replace(self.path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, default=ROOT / "build" / "gpu-check" / "bench.json")
    add("--only", choices=("attention", "step"))
    add("--minutes", type=float, default=math.inf, help="stop between cases after that long")
    add("--rounds", type=int, default=ROUNDS)
    add("--core", type=Path, default=ROOT / "build" / "release" / "libcore.so")
    add("--lengths", type=int, nargs="+", default=LENGTHS, help="of attention")
    add("--quick", action="store_true", help="attention without the peers that are compiled")
    add("--compile", metavar="K/N", help="compile this share of the peers, and nothing else")
    add("--dry-run", action="store_true", help="small, on the CPU, with the emulated library")
    options = parser.parse_args()
    if options.output.parent == Path("."):
        options.output = HERE / "results" / options.output
    if options.dry_run:
        options.rounds = min(options.rounds, 2)
    elif not torch.cuda.is_available():
        parser.error("torch sees no GPU (--dry-run needs none)")
    return options


def main() -> int:
    options = parse()
    if options.dry_run:
        os.environ.setdefault("EMU_OPEN", "1")  # torch's arrays are the host's
    if options.compile:
        compile_share(options.compile)
        return 0
    report = Report(options)
    print(json.dumps(report.machine))
    if options.only != "step":
        core = capi.Core(options.core)
        measure_attention(report, Ours(core, options.dry_run), options)
    if options.only != "attention":
        measure_steps(report, options)
    print(report.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
