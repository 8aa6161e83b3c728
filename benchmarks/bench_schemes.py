# SPDX-License-Identifier: Apache-2.0
"""Every position scheme against our own plain attention, and against the best PyTorch for it.

    python benchmarks/bench_schemes.py --json               every scheme over plain attention
    python benchmarks/bench_schemes.py --peers --json       and the fastest PyTorch of some schemes
    python benchmarks/bench_schemes.py --memory --json      peak memory at n = 16384
    python benchmarks/bench_schemes.py --bf16 --json        both in bf16, and in f32 over that

f32 but there, d = 64, two threads, n = 1024 (1 x 8 heads) and 4096 (1 x 4), forward and forward +
backward (gradients of q, k, v and of all parameters). Sides take turns in processes of their own
(turns.py). Targets stand beside the figures. README.md says what each figure means.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import turns
from bench_attention import MEMORY_N, PASSES, SHAPES, passes
from reports import Counted, Report, key_of, versions
from turns import Job, Json, Worker

OURS, PLAIN, TORCH, BUSY = "ours", "plain", "torch: ", "busy: "
OURS_F32 = OURS + " f32"  # beside those in bf16
KINDS, EDGES, WINDOW, DOCUMENTS = 51, 8, 256, 8
LENGTHS = (1024, 4096)
TWICE = 2.0  # times as fast as the best PyTorch
MEMORY_MIB = 64.0

Arrays = dict[str, Any]
Make = Callable[[Any, Arrays], Any]  # (relpos, parameters) -> position


# ------------------------------------------------------------------------------------------ schemes


@dataclass(frozen=True)
class Bench:
    """A scheme: shapes of its parameters, what else it is given, and its targets over plain.

    shapes and extra are functions of (n, heads, width); extra makes what takes no gradient, for the
    peers as well.
    """

    position: Make | None = None
    shapes: Callable[[int, int, int], dict[str, tuple[int, ...]]] = lambda n, H, D: {}
    extra: Callable[[int, int, int], Any] = lambda n, H, D: None
    options: Json = field(default_factory=dict)  # of the scheme's side alone
    shared: Json = field(default_factory=dict)  # of both sides
    targets: tuple[float, float] | None = None  # forward, forward + backward
    mask: Callable[[int], Any] | None = None  # of n; of the scheme's side alone


def every_distance(n: int, H: int, D: int) -> dict[str, tuple[int, ...]]:
    return {"table": (2 * n - 1, D)}


def two(rows: int) -> Callable[[int, int, int], dict[str, tuple[int, ...]]]:
    return lambda n, H, D: {"key": (rows, D), "value": (rows, D)}


def xl_parameters(n: int, H: int, D: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (H * D, H * D), "content": (H, D), "position": (H, D)}


def t5_rows(n: int, H: int, D: int) -> Any:
    import numpy as np

    from relpos.position import t5_buckets

    return t5_buckets(np.arange(1 - n, n))


def alibi_fixed(n: int, H: int, D: int) -> Any:
    import numpy as np

    from relpos.position import alibi_slopes

    return alibi_slopes(H).astype(np.float32)


def labels_of(n: int, H: int, D: int) -> Any:
    import numpy as np

    return np.random.default_rng(1).integers(0, KINDS, (n, n), np.int8)


def distance_rows(n: int, H: int, D: int) -> Any:
    import numpy as np

    return np.arange(2 * n - 1)


def xl_waves(n: int, H: int, D: int) -> Any:
    import numpy as np

    from relpos.position import sinusoid

    return sinusoid(np.arange(n - 1, -n, -1), H * D, layout="halves", dtype=np.float32)


def deberta_rows(n: int, H: int, D: int) -> Any:
    import numpy as np

    from relpos.position import deberta_log_buckets

    return np.clip(deberta_log_buckets(np.arange(n - 1, -n, -1), 256, 512) + 256, 0, 511)


def edges_of(n: int, H: int, D: int) -> Any:
    import numpy as np

    draw = np.random.default_rng(1)
    keys = np.concatenate([draw.choice(n, EDGES, replace=False) for _ in range(n)])
    return np.repeat(np.arange(n), EDGES), keys, draw.integers(0, KINDS, n * EDGES)


def xl(relpos: Any, x: Arrays) -> Any:
    return relpos.TransformerXL(x["weight"], x["content"], x["position"])


def xl_projected(relpos: Any, x: Arrays) -> Any:
    """The same terms from a table made beforehand: what is left of the time is the core's."""
    from relpos.position import Scheme

    made: list[Any] = []

    class Projected(Scheme):
        def lower(self, shape: Any) -> Any:
            if not made:
                lowered = xl(relpos, x).lower(shape)
                table = dataclasses.replace(lowered.terms[0], pull=lambda raw: {"table": raw})
                made.append(dataclasses.replace(lowered, terms=(table, *lowered.terms[1:])))
            return made[0]

    return Projected()


def random_mask(n: int) -> Any:
    import numpy as np

    return np.random.default_rng(1).random((n, n)) < 0.9


def documents(n: int) -> Any:
    import numpy as np

    document = np.arange(n) * DOCUMENTS // n
    return document[:, None] == document


BIAS, LABELLED, TWO_PRODUCTS = (1.04, 1.04), (1.5, 1.5), (2.0, 2.2)
BENCHES: dict[str, Bench] = {
    "t5": Bench(
        lambda relpos, x: relpos.T5Bias(x["table"]),
        lambda n, H, D: {"table": (32, H)}, t5_rows, targets=BIAS,
    ),
    "alibi": Bench(lambda relpos, x: relpos.ALiBi(), extra=alibi_fixed, targets=BIAS),
    "alibi learned": Bench(
        lambda relpos, x: relpos.ALiBi(x["slopes"]),
        lambda n, H, D: {"slopes": (H,)}, targets=BIAS,
    ),
    "shaw 16": Bench(lambda relpos, x: relpos.Shaw(x["key"], x["value"]), two(33)),
    "shaw unclipped": Bench(
        lambda relpos, x: relpos.Shaw(x["table"]), every_distance, distance_rows,
        targets=TWO_PRODUCTS,
    ),
    "music transformer": Bench(
        lambda relpos, x: relpos.MusicTransformer(x["table"]),
        lambda n, H, D: {"table": (n, D)}, shared={"causal": True},
    ),
    "transformer-xl": Bench(xl, xl_parameters, xl_waves, targets=TWO_PRODUCTS),
    "transformer-xl projected": Bench(xl_projected, xl_parameters, targets=TWO_PRODUCTS),
    "deberta v2": Bench(
        lambda relpos, x: relpos.DeBERTa(x["key"], x["value"], buckets=256, max_position=512),
        two(512), deberta_rows, targets=TWO_PRODUCTS,
    ),
    "deberta v1": Bench(
        lambda relpos, x: relpos.DeBERTa(x["key"], x["value"]), two(1024), targets=TWO_PRODUCTS
    ),
    "relative_key_query": Bench(
        lambda relpos, x: relpos.RelativeKeyQuery(x["table"]), every_distance
    ),
    "labels": Bench(
        lambda relpos, x: relpos.ShawGraph(x["key"], x["value"], labels=x["extra"]),
        two(KINDS), labels_of, targets=LABELLED,
    ),
    "edges": Bench(
        lambda relpos, x: relpos.ShawGraph(
            x["key"], x["value"], edges=relpos.EdgeList(*x["extra"])
        ),
        two(KINDS), edges_of,
    ),
    "rope": Bench(lambda relpos, x: relpos.RoPE()),
    "dropout 0.1": Bench(options={"dropout": 26 / 256, "seed": 1}, targets=(math.inf, 1.10)),
    "softcap 30": Bench(options={"softcap": 30.0}),
    "dense mask": Bench(mask=random_mask),
    "document mask": Bench(mask=documents),
    "window 256": Bench(options={"window": (WINDOW, WINDOW)}),
}  # fmt: skip


# -------------------------------------------------------------------------------------------- cases


def make_case(options: argparse.Namespace, scheme: str, n: int, which: str) -> Json:
    batch, heads = SHAPES.get(n, (1, 1))
    return {
        "scheme": scheme, "n": n, "B": batch, "H": heads, "d": options.d, "pass": which,
        "threads": options.threads, "precision": "bf16" if options.bf16 else "f32",
    }  # fmt: skip


def arrays(case: Json) -> tuple[Arrays, Arrays]:
    """q, k, v and dout; the scheme's parameters. The same numbers on every side."""
    import numpy as np

    draw = np.random.default_rng(0)
    shape = (case["B"], case["H"], case["n"], case["d"])
    x = {name: draw.standard_normal(shape, np.float32) for name in ("q", "k", "v", "dout")}
    if case["scheme"] == "t5":  # whose scale is 1
        x["q"] *= case["d"] ** -0.5
    shapes = BENCHES[case["scheme"]].shapes(case["n"], case["H"], case["d"])
    own = {name: draw.standard_normal(s, np.float32) for name, s in shapes.items()}
    if "slopes" in own:  # random ones let scores grow with the distance: not what ALiBi is
        own["slopes"] = alibi_fixed(case["n"], case["H"], case["d"])
    if "weight" in own:
        own["weight"] *= own["weight"].shape[1] ** -0.5
    return x, own


def build_ours(case: Json, plain: bool) -> Job:
    import numpy as np

    import relpos

    bench = BENCHES[case["scheme"]]
    x, own = arrays(case)
    out = np.empty_like(x["q"])
    options: Json = bench.shared | {"precision": case["precision"]}
    if not plain:
        options |= bench.options
        if bench.mask is not None:
            options["mask"] = bench.mask(case["n"])
        if bench.position is not None:
            extra = bench.extra(case["n"], case["H"], case["d"])
            options["position"] = bench.position(relpos, own | {"extra": extra})

    def forward() -> Any:
        return relpos.attention(x["q"], x["k"], x["v"], out=out, **options)

    def both() -> Any:
        _, context = relpos.attention_forward(x["q"], x["k"], x["v"], out=out, **options)
        return relpos.attention_backward(context, x["dout"])

    return Job(forward if case["pass"] == "fwd" else both)


def build_torch(case: Json, name: str) -> Job:
    import numpy as np
    import torch

    from peers import torch_schemes

    torch.set_num_threads(case["threads"])
    x, own = ({name: torch.from_numpy(a) for name, a in part.items()} for part in arrays(case))
    extra = BENCHES[case["scheme"]].extra(case["n"], case["H"], case["d"])
    given = torch.from_numpy(extra if extra.dtype == np.float32 else extra.astype(np.int64))
    peer = torch_schemes.PEERS[case["scheme"]][name]
    inputs = [x["q"], x["k"], x["v"], *own.values()]
    return Job(passes(lambda *a: peer(*a, given), inputs, x, case))


def build(side: str, case: Json) -> Job:
    if side.startswith(TORCH):
        return build_torch(case, side.removeprefix(TORCH))
    if side == "memory":
        return Job(lambda: peak_mib(case))
    if side.startswith(BUSY):
        job = build(side.removeprefix(BUSY), case)
        return Job(lambda: least_cpu_seconds(job))
    if side == OURS_F32:
        return build_ours(case | {"precision": "f32"}, plain=False)
    return build_ours(case, side == PLAIN)


# ----------------------------------------------------------------------------------------- compare


def compare(report: Report, options: argparse.Namespace) -> None:
    """Every length, pass and scheme; fresh processes for each."""
    for n in options.shapes:
        for which in PASSES:
            batch, heads = SHAPES.get(n, (1, 1))
            print(f"\nn = {n}, B x H = {batch} x {heads}, {which}")
            for scheme in options.schemes:
                compare_scheme(report, options, make_case(options, scheme, n, which))


def compare_scheme(report: Report, options: argparse.Namespace, case: Json) -> None:
    scheme, n, which = case["scheme"], case["n"], case["pass"]
    key, end = f"{which}_{key_of(scheme)}", f"n{n}"
    sides = [OURS, PLAIN, *([OURS_F32] if options.bf16 else [])]
    if options.peers:
        best = fastest_peer(report, options, case)
        sides += [best] if best else []
    workers = [Counted(Path(__file__), side, options.threads) for side in sides]
    cases = [case] * len(workers)
    rounds = turns.take_turns(workers, cases, options.seconds, options.sittings)
    for worker in workers:
        worker.close()
    report.failures |= {f"{key}_{end} {side}": text for side, text in rounds.failures.items()}
    if not rounds.times:
        return
    times = ", ".join(f"{side} {rounds.median(side) * 1e3:.2f} ms" for side in rounds.times)
    print(f"  {scheme}: {times}; {len(rounds.others)} rounds", flush=True)
    report.count(rounds, max(worker.bursts for worker in workers))
    for side in rounds.times:
        name = "torch" if side.startswith(TORCH) else key_of(side)
        report[f"{key}_ms_{name}_{end}"] = rounds.median(side) * 1e3
    report.ratio(f"{key}_over_plain_{end}", rounds, OURS, PLAIN, target(report, case))
    report.ratio(f"{key}_bf16_vs_f32_{end}", rounds, OURS_F32, OURS, None)
    if scheme.startswith("window"):
        faster = 5.0 if n == 4096 else None
        report.ratio(f"{key}_full_over_window_{end}", rounds, PLAIN, OURS, faster, least=True)
    peer = sides[-1]
    if peer.startswith(TORCH):
        report[f"{key}_best_torch_{end}"] = peer.removeprefix(TORCH)
        report.ratio(f"{key}_best_torch_over_ours_{end}", rounds, peer, OURS, TWICE, least=True)


def target(report: Report, case: Json) -> float | None:
    """The most that the scheme may take over plain in this pass, in f32."""
    targets = BENCHES[case["scheme"]].targets
    if (
        targets is None
        or case["precision"] == "bf16"
        or (case["scheme"].startswith("dropout") and report.isa not in ("avx512", "amx"))
    ):
        return None
    return targets[PASSES.index(case["pass"])]


def fastest_peer(report: Report, options: argparse.Namespace, case: Json) -> str | None:
    """The scheme's peer of the shortest call, each tried alone in a process of its own."""
    from peers.torch_schemes import PEERS

    found: dict[str, float] = {}
    if options.peers == "first" and case["scheme"] in PEERS:
        return TORCH + next(iter(PEERS[case["scheme"]]))
    for name in PEERS.get(case["scheme"], ()):
        worker = Worker(Path(__file__), TORCH + name, options.threads)
        try:
            found[name] = min(worker.prepare(case)[0], *(worker.burst(1) for _ in range(2)))
        except turns.SideFailed as failure:
            print(f"    {str(failure).splitlines()[0][:120]}", file=sys.stderr)
        worker.close()
    for name, seconds in found.items():
        print(f"    {TORCH}{name}: {seconds * 1e3:.2f} ms", flush=True)
        key = f"{case['pass']}_{key_of(case['scheme'])}_try_ms_{key_of(name)}_n{case['n']}"
        report[key] = seconds * 1e3
    return TORCH + min(found, key=found.__getitem__) if found else None


# ----------------------------------------------------------------------------- on a busy machine


def compare_busy(report: Report, options: argparse.Namespace) -> None:
    """One thread, CPU time, the least of some calls: what others take is not in it.

    Caches and the bus are still shared with them, so this says where to look, not what to quote.
    """
    for n in options.shapes:
        for which in PASSES:
            print(f"\nn = {n}, {which}, CPU time of one thread")
            for scheme in options.schemes:
                case = make_case(options, scheme, n, which) | {"threads": 1}
                busy_scheme(report, options, case)


def busy_scheme(report: Report, options: argparse.Namespace, case: Json) -> None:
    scheme, end = case["scheme"], f"n{case['n']}"
    key = f"cpu_{case['pass']}_{key_of(scheme)}"
    sides = [OURS, PLAIN]
    if options.peers:
        from peers.torch_schemes import PEERS

        sides += [TORCH + name for name in list(PEERS.get(scheme, ()))[: _tried(options)]]
    found: dict[str, float] = {}
    for side in sides:
        worker = Worker(Path(__file__), BUSY + side, threads=1)
        try:
            found[side] = float(worker.once(case))
        except turns.SideFailed as failure:
            if not side.startswith(TORCH):
                report.failures[f"{key}_{end} {side}"] = str(failure)
        worker.close()
    if OURS not in found or PLAIN not in found:
        return
    print("  " + ", ".join(f"{side} {seconds * 1e3:.2f} ms" for side, seconds in found.items()))
    for side, seconds in found.items():
        report[f"{key}_ms_{key_of(side)}_{end}"] = seconds * 1e3
    limit = target(report, case)
    ratio = found[OURS] / found[PLAIN]
    report.line(f"{key}_over_plain_{end}", f"{scheme} / plain: {ratio:.3f}", ratio, limit, False)
    if scheme.startswith("window"):
        faster = 5.0 if case["n"] == 4096 else None
        text = f"plain / {scheme}: {1 / ratio:.3f}"
        report.line(f"{key}_full_over_window_{end}", text, 1 / ratio, faster, least=True)
    peers = {side: seconds for side, seconds in found.items() if side.startswith(TORCH)}
    if peers:
        best = min(peers, key=peers.__getitem__)
        ratio = peers[best] / found[OURS]
        report[f"{key}_best_torch_{end}"] = best.removeprefix(TORCH)
        text = f"{best} / {scheme}: {ratio:.3f}"
        report.line(f"{key}_best_torch_over_ours_{end}", text, ratio, TWICE, least=True)


def _tried(options: argparse.Namespace) -> int | None:
    return 1 if options.peers == "first" else None


def least_cpu_seconds(job: Job) -> float:
    """After a first call, the least of 3 to 25 calls in about a second and a half."""
    job.call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 1.5 and len(times) < 25):
        start = time.process_time()
        job.call()
        times.append(time.process_time() - start)
    return min(times)


# ------------------------------------------------------------------------------------------- memory


def measure_memory(report: Report, options: argparse.Namespace) -> None:
    n = 4096 if options.quick else MEMORY_N
    print(f"\npeak memory beyond inputs and outputs, n = {n}, one head, fwd + bwd")
    for scheme in options.schemes:
        case = make_case(options, scheme, n, "fwdbwd") | {"B": 1, "H": 1}
        worker = Worker(Path(__file__), "memory", options.threads)
        name = f"peak_mib_{key_of(scheme)}_n{n}"
        try:
            mib = float(worker.once(case))
            report.line(name, f"{scheme}: {mib:.1f} MiB", mib, MEMORY_MIB, least=False)
        except turns.SideFailed as failure:
            report.failures[name] = str(failure)
            print(f"    {failure}", file=sys.stderr)
        worker.close()


def peak_mib(case: Json) -> float:
    """In a fresh process: the high-water mark of one call over what was there before it.

    A call at n = 128 comes first, for libraries, threads and their stacks. What the call returns is
    taken off: the gradients.
    """
    build_ours(case | {"n": 128}, plain=False).call()
    job = build_ours(case, plain=False)
    Path("/proc/self/clear_refs").write_text("5")  # the mark falls to the present size
    before = turns.status_kib("VmRSS")
    gradients = job.call()
    peak = (turns.status_kib("VmHWM") - before) * 1024
    return float(peak - sum(array.nbytes for array in gradients.values())) / 2**20


# ------------------------------------------------------------------------------------------ running


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--worker", metavar="SIDE", help=argparse.SUPPRESS)
    add("--json", action="store_true", help="last line: one JSON object of flat figures")
    add("--quick", action="store_true", help="n = 1024 alone, a second each")
    add("--schemes", type=lambda s: s.split(","), help=f"by comma: {', '.join(BENCHES)}")
    add("--d", type=int, default=64, help="head width")
    add("--shapes", type=lambda s: [int(n) for n in s.split(",")], help="as 1024,4096")
    add(
        "--peers",
        nargs="?",
        const="all",
        choices=("all", "first"),
        help="the fastest PyTorch of a scheme as well; first: the first of its list, others untried",
    )
    add(
        "--busy",
        action="store_true",
        help="CPU time of one thread, for a machine that is not quiet",
    )
    add("--memory", action="store_true", help="peak memory only")
    add("--bf16", action="store_true", help="ours and plain in bf16, and ours in f32 beside them")
    add("--seconds", type=float, help="about how long each case takes (6; quick 1)")
    add("--sittings", type=int, help="with new processes each (3; quick, or peers: 1)")
    add("--threads", type=int, default=2)
    add("--output", type=Path, help="write figures and machine as JSON, into results/ if bare")
    options = parser.parse_args()
    options.shapes = options.shapes or ([1024] if options.quick else list(LENGTHS))
    options.sittings = options.sittings or (1 if options.quick or options.peers else 3)
    options.seconds = options.seconds or (1 if options.quick else 6)
    options.schemes = options.schemes or list(BENCHES)
    if unknown := set(options.schemes) - set(BENCHES):
        parser.error(f"--schemes: no {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    if options.bf16 and (options.peers or options.busy or options.memory):
        parser.error("--bf16: times ours alone; not with --peers, --busy or --memory")
    return options


def main() -> int:
    options = parse()
    if options.worker:
        turns.serve(build)
        return 0
    place = turns.machine() | versions(options.threads)
    report = Report(place["relpos_isa"])
    if options.memory:
        measure_memory(report, options)
    elif options.busy:
        compare_busy(report, options)
    else:
        compare(report, options)
    report.finish(options, place, d=options.d, sittings=options.sittings)
    return 1 if any(TORCH not in key for key in report.failures) else 0


if __name__ == "__main__":
    os.environ.setdefault("RELPOS_NUM_THREADS", "2")
    sys.exit(main())
