# SPDX-License-Identifier: Apache-2.0
"""Attention with relative positions against torch's plain attention, and against our own.

    python benchmarks/bench_attention.py --json               the table of the README
    python benchmarks/bench_attention.py --peers --json       and relation-aware PyTorch beside it
    python benchmarks/bench_attention.py --memory --json      peak memory at n = 16384

f32, both of Shaw's terms, two threads. A pass is `fwd` or `fwdbwd` (gradients of q, k, v and of both
tables). Sides take turns in processes of their own (turns.py). README.md says what each figure means.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reports
import turns
from reports import key_of
from turns import Job, Json, Rounds, Worker

HERE = Path(__file__).parent
# Behind everything else: an installed relpos comes first. The cases are those of the tests.
sys.path += [str(HERE.parent), str(HERE.parent / "tests")]

from timed_cases import PACKED, SHAPES, WIDTHS, Timed, of_length, of_lengths  # noqa: E402

PASSES = ("fwd", "fwdbwd")
MEMORY_N = 16384
SMALL = 0.03  # ratios nearer to 1 than this are reported with their interval

OURS, OURS_PLAIN, TORCH = "ours relative", "ours plain", "torch plain"
AGAIN = TORCH + " again"  # torch against itself
OURS_F32, TORCH_F32 = OURS + " f32", TORCH + " f32"  # beside those in bf16


# -------------------------------------------------------------------------------------------- cases


def make_case(options: argparse.Namespace, n: int, which: str) -> Json:
    return as_json(options, of_length(n, **chosen(options)), which)


def packed_case(options: argparse.Namespace, which: str) -> Json:
    lengths = PACKED[:5] if options.quick else PACKED
    return as_json(options, of_lengths(lengths, **chosen(options)), which)


def chosen(options: argparse.Namespace) -> Json:
    return {name: getattr(options, name) for name in ("d", "k", "causal", "per_head", "key_heads")}


def as_json(options: argparse.Namespace, case: Timed, which: str) -> Json:
    own = {"pass": which, "threads": options.threads, "bf16": options.bf16}
    return case._asdict() | own


def arrays(case: Json) -> dict[str, Any]:
    """q, k, v, dout and both tables: the same numbers on every side, standard normal."""
    import numpy as np

    draw = np.random.default_rng(0)
    shape: tuple[int, ...] = (case["B"], case["H"], case["n"], case["d"])
    if case["lengths"]:
        shape = (case["n"], case["H"], case["d"])  # packed: tokens, heads, width
    table: tuple[int, ...] = (2 * case["k"] + 1, case["d"])
    if case["per_head"]:
        table = (case["H"], *table)
    of_keys = (case["B"], case["key_heads"], *shape[2:]) if case["key_heads"] else shape
    shapes = {"q": shape, "k": of_keys, "v": of_keys, "dout": shape, "key_table": table}
    shapes["value_table"] = table
    return {name: draw.standard_normal(s, np.float32) for name, s in shapes.items()}


# ------------------------------------------------------------------------------------ sides: relpos


def build_ours(side: str, case: Json) -> Job:
    import numpy as np

    import relpos

    x = arrays(case)
    narrow = case["bf16"] and side != OURS_F32
    options: dict[str, Any] = {"causal": case["causal"], "precision": "bf16" if narrow else "f32"}
    if side.startswith(OURS):
        options["position"] = relpos.Shaw(x["key_table"], x["value_table"])
    if case["lengths"]:
        options["offsets"] = np.cumsum([0, *case["lengths"]])
    out = np.empty_like(x["q"])

    def forward() -> Any:
        return relpos.attention(x["q"], x["k"], x["v"], out=out, **options)

    def both() -> Any:
        _, context = relpos.attention_forward(x["q"], x["k"], x["v"], out=out, **options)
        return relpos.attention_backward(context, x["dout"])

    return Job(forward if case["pass"] == "fwd" else both)


# ------------------------------------------------------------------------------------- sides: torch


def build_torch(side: str, case: Json) -> Job:
    import torch

    torch.set_num_threads(case["threads"])
    x = {name: torch.from_numpy(a) for name, a in arrays(case).items()}
    if case["bf16"] and side != TORCH_F32:  # torch is fastest where it casts nothing
        x = {name: a.bfloat16() for name, a in x.items()}
    if case["lengths"]:
        return packed_torch(x, case)
    if case["key_heads"]:
        return sharing_torch(x, case)
    if side in (TORCH, TORCH_F32):
        inputs = [x["q"], x["k"], x["v"]]
        attend = torch.nn.functional.scaled_dot_product_attention
        return Job(
            passes(lambda q, k, v: attend(q, k, v, is_causal=case["causal"]), inputs, x, case)
        )
    from peers import torch_attention

    torch._dynamo.reset()  # a second shape after a first one made FlexAttention three times slower
    peer = torch_attention.PEERS[side]
    inputs = [x[name] for name in ("q", "k", "v", "key_table", "value_table")]
    return Job(passes(lambda *a: peer(*a, causal=case["causal"]), inputs, x, case))


def passes(attend: Any, inputs: list[Any], x: dict[str, Any], case: Json) -> Any:
    """The call of a pass: under no_grad, or with gradients of all inputs for a given dout."""
    import torch

    if case["pass"] == "fwd":
        return torch.no_grad()(lambda: attend(*inputs))
    leaves = [a.clone().requires_grad_() for a in inputs]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, x["dout"])


def packed_torch(x: dict[str, Any], case: Json) -> Job:
    """Torch's fastest way with mixed lengths, chosen by timing; its own layout is given to each."""
    ways = {"loop": _torch_loop, "padded": _torch_padded, "nested": _torch_nested}
    return fastest(ways, x, case)


def sharing_torch(x: dict[str, Any], case: Json) -> Job:
    """Torch's fastest way where heads share keys, likewise."""
    return fastest({"enable_gqa": _torch_sharing, "expanded": _torch_expanded}, x, case)


def fastest(ways: dict[str, Any], x: dict[str, Any], case: Json) -> Job:
    best: tuple[float, str, Any] | None = None
    refused = []
    for name, way in ways.items():
        try:
            call = way(x, case)
            seconds = min(turns.burst(call, 3) for _ in range(3))
        except (RuntimeError, NotImplementedError) as error:
            refused.append(f"{name} refused: {str(error).strip().splitlines()[0][:80]}")
            continue
        refused.append(f"{name} {seconds * 1e3:.2f} ms")
        if best is None or seconds < best[0]:
            best = (seconds, name, call)
    assert best is not None
    return Job(best[2], f"{best[1]} ({', '.join(refused)})")


def _torch_sharing(x: dict[str, Any], case: Json) -> Any:
    """One call that is told so."""
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    inputs = [x["q"], x["k"], x["v"]]
    options = {"is_causal": case["causal"], "enable_gqa": True}
    return passes(lambda q, k, v: attend(q, k, v, **options), inputs, x, case)


def _torch_expanded(x: dict[str, Any], case: Json) -> Any:
    """One call over [B key_heads, sharers, n, D], in which keys are views without a copy."""
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    sharers = case["H"] // case["key_heads"]

    def run(q: Any, k: Any, v: Any) -> Any:
        views = (a.flatten(0, 1)[:, None].expand(-1, sharers, -1, -1) for a in (k, v))
        own = q.unflatten(1, (-1, sharers)).flatten(0, 1)
        return attend(own, *views, is_causal=case["causal"]).view(q.shape)

    return passes(run, [x["q"], x["k"], x["v"]], x, case)


def _torch_loop(x: dict[str, Any], case: Json) -> Any:
    """One call per sequence, each sequence a contiguous [1, H, n, D] of its own beforehand."""
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    split = {
        name: [a.transpose(0, 1).contiguous()[None] for a in x[name].split(case["lengths"])]
        for name in ("q", "k", "v", "dout")
    }
    triples = list(zip(split["q"], split["k"], split["v"], strict=True))
    if case["pass"] == "fwd":
        return torch.no_grad()(lambda: [attend(*t, is_causal=case["causal"]) for t in triples])
    for triple in triples:
        for a in triple:
            a.requires_grad_()

    def both() -> Any:
        for triple, dout in zip(triples, split["dout"], strict=True):
            torch.autograd.grad(attend(*triple, is_causal=case["causal"]), triple, dout)

    return both


def _torch_padded(x: dict[str, Any], case: Json) -> Any:
    """One call over [B, H, longest, D] with a mask."""
    import torch

    def pad(a: Any) -> Any:
        rows = torch.nn.utils.rnn.pad_sequence(list(a.split(case["lengths"])), batch_first=True)
        return rows.transpose(1, 2).contiguous()

    padded = {name: pad(x[name]) for name in ("q", "k", "v", "dout")}
    longest = max(case["lengths"])
    position = torch.arange(longest)
    mask = (position < torch.tensor(case["lengths"])[:, None])[:, None, None, :]
    if case["causal"]:
        mask = mask & (position <= position[:, None])
    attend = torch.nn.functional.scaled_dot_product_attention
    inputs = [padded["q"], padded["k"], padded["v"]]
    return passes(lambda q, k, v: attend(q, k, v, attn_mask=mask), inputs, padded, case)


def _torch_nested(x: dict[str, Any], case: Json) -> Any:
    """One call over nested (jagged) tensors."""
    import torch

    # Otherwise a CUDA build asks the driver about cuDNN, even for tensors on the CPU.
    torch.backends.cuda.enable_cudnn_sdp(False)

    offsets = torch.tensor([0, *case["lengths"]]).cumsum(0)
    attend = torch.nn.functional.scaled_dot_product_attention

    def nest(*packed: Any) -> Any:
        return (torch.nested.nested_tensor_from_jagged(a, offsets).transpose(1, 2) for a in packed)

    def run(q: Any, k: Any, v: Any) -> Any:
        return attend(*nest(q, k, v), is_causal=case["causal"]).transpose(1, 2).values()

    return passes(run, [x["q"], x["k"], x["v"]], x, case)


# ----------------------------------------------------------------------------------------- compare


class Report(reports.Report):
    def compared(self, name: str, rounds: Rounds, side: str, to: str) -> None:
        """A ratio with its interval; the latter is a figure too where the ratio is near 1."""
        if side not in rounds.times or to not in rounds.times:
            return
        value, (low, high) = rounds.ratio(side, to), rounds.interval(side, to)
        print(f"    {side + ' / ' + to:38s} {value:6.3f}   [{low:.3f}, {high:.3f}]", flush=True)
        self[name] = value
        if abs(value - 1) < SMALL:
            self[f"{name}_low"], self[f"{name}_high"] = low, high

    def times(self, title: str, rounds: Rounds) -> None:
        print(f"\n{title}")
        if rounds.others and max(rounds.others) > turns.QUIET:
            busy = max(rounds.others)
            self.busy = max(self.busy, busy)
            print(f"  NOT QUIET: others took up to {busy:.0%} of the machine; torch suffers most")
        for side, failure in rounds.failures.items():
            self.failures.setdefault(side, failure)
            print(f"  {failure}", file=sys.stderr)
        for side, times in rounds.times.items():
            note = f"   {rounds.notes[side]}" if rounds.notes[side] else ""
            print(
                f"  {side:20s} {rounds.median(side) * 1e3:10.3f} ms   "
                f"spread {rounds.spread(side):5.1%} of {len(times)}{note}",
                flush=True,
            )


def compare(report: Report, options: argparse.Namespace) -> None:
    """The table: every shape and pass, all sides by turns.

    Every case has fresh processes. With those of the shapes before, torch's forward + backward at
    n = 1024 took 65.6 ms where a fresh one takes 48.4: its heap remembers.
    """
    for title, suffix, case in chosen_cases(options):
        workers = [Worker(Path(__file__), side, options.threads) for side in chosen_sides(options)]
        cases = [case] * len(workers)
        rounds = turns.take_turns(workers, cases, options.seconds, options.sittings)
        for worker in workers:
            worker.close()
        which = case["pass"]
        report.times(f"{title}, {which}", rounds)
        report.compared(f"{which}_noise_{suffix}", rounds, AGAIN, TORCH)
        report.compared(f"{which}_vs_torch_plain_{suffix}", rounds, OURS, TORCH)
        report.compared(f"{which}_rel_over_plain_{suffix}", rounds, OURS, OURS_PLAIN)
        report.compared(f"{which}_plain_vs_torch_plain_{suffix}", rounds, OURS_PLAIN, TORCH)
        report.compared(f"{which}_bf16_vs_f32_{suffix}", rounds, OURS_F32, OURS)
        report.compared(f"{which}_vs_torch_plain_f32_{suffix}", rounds, OURS, TORCH_F32)
        for side, times in rounds.times.items():
            if times:
                report[f"{which}_ms_{key_of(side)}_{suffix}"] = rounds.median(side) * 1e3
                report[f"{which}_spread_{key_of(side)}_{suffix}"] = rounds.spread(side)
        if options.peers:
            compare_peers(report, rounds, which, suffix, options.peers)


def compare_peers(
    report: Report, rounds: Rounds, which: str, suffix: str, peers: list[str]
) -> None:
    """Every peer over torch plain, and the fastest peer over ours."""
    peers = [peer for peer in peers if peer in rounds.times]
    for peer in peers:
        report.compared(f"{which}_{key_of(peer)}_over_torch_plain_{suffix}", rounds, peer, TORCH)
    if peers:
        best = min(peers, key=rounds.median)
        report[f"{which}_best_relative_torch_{suffix}"] = best
        report.compared(f"{which}_vs_best_relative_torch_{suffix}", rounds, best, OURS)


def chosen_cases(options: argparse.Namespace) -> Iterator[tuple[str, str, Json]]:
    if options.packed:
        for which in PASSES:
            case = packed_case(options, which)
            yield f"packed, lengths {case['lengths']}, H = {case['H']}", "packed", case
        return
    for n in options.shapes:
        batch, heads = SHAPES[n]
        for which in PASSES:
            yield f"n = {n}, B x H = {batch} x {heads}", f"n{n}", make_case(options, n, which)


def compare_widths(report: Report, options: argparse.Namespace) -> None:
    """Operations a second at width d over those at d = 64: paired, a worker for each width."""
    script = Path(__file__)
    sides = [f"{OURS} d={options.d}", f"{OURS} d=64"]
    workers = [Worker(script, side, options.threads) for side in sides]
    for n in options.shapes:
        for which in PASSES:
            case = make_case(options, n, which)
            rounds = turns.take_turns(workers, [case, case | {"d": 64}], options.seconds)
            report.times(f"n = {n}, {which}: ops/s at d = {options.d} over those at 64", rounds)
            if len(rounds.times) == 2:
                share = options.d / 64 / rounds.ratio(*sides)
                report[f"{which}_ops_share_d{options.d}_n{n}"] = share
                print(f"    share {share:.3f}", flush=True)
    for worker in workers:
        worker.close()


# ------------------------------------------------------------------------------------------- memory


def measure_memory(report: Report, options: argparse.Namespace) -> None:
    """Peak memory beyond inputs and outputs, one head, n = 16384, forward and backward."""
    n = 4096 if options.quick else MEMORY_N
    case = make_case(options, n, "fwdbwd") | {"B": 1, "H": 1}
    print(f"\npeak memory beyond inputs and outputs, n = {n}, one head, fwd + bwd")
    for side in chosen_sides(options):
        worker = Worker(Path(__file__), f"memory:{side}", options.threads)
        try:
            mib = worker.once(case)
            print(f"  {side:20s} {mib:10.1f} MiB", flush=True)
            name = "peak_mib" if side == OURS else f"peak_mib_{key_of(side)}"
            report[f"{name}_n{n}"] = mib
        except turns.SideFailed as failure:
            report.failures.setdefault(side, str(failure))
            print(f"  {failure}", file=sys.stderr)
        worker.close()


def peak_mib(side: str, case: Json) -> float:
    """In a fresh process: the high-water mark of one call over what was there before it.

    A call at n = 128 comes first, for libraries, threads and their stacks. The gradients are made
    by the call itself, so their size is taken off, and so is torch's out (ours is there before).
    """
    warm = build_side(side, case | {"n": 128})
    warm.call()
    job = build_side(side, case)
    rows: int = 4 * case["n"] * case["d"]
    made = 3 * rows + (0 if side.startswith("ours") else rows)
    _write("/proc/self/clear_refs", "5")  # the mark falls to the present size
    before = turns.status_kib("VmRSS")
    job.call()
    return (turns.status_kib("VmHWM") * 1024 - before * 1024 - made) / 2**20


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


# ------------------------------------------------------------------------------------------ running


def build_side(side: str, case: Json) -> Job:
    if side.startswith("ours"):
        return build_ours(side, case)
    return build_torch(side.removesuffix(" again"), case)


def build(side: str, case: Json) -> Job:
    """What a worker builds: a call to be timed, or for `memory:` the measurement itself."""
    if side.startswith("memory:"):
        return Job(lambda: peak_mib(side.removeprefix("memory:"), case))
    return build_side(side, case)


def chosen_sides(options: argparse.Namespace) -> list[str]:
    if options.noise:
        return [TORCH, AGAIN]
    sides = [TORCH] if options.without_ours else [OURS, OURS_PLAIN, TORCH]
    if options.bf16 and not options.without_ours:
        sides += [OURS_F32, TORCH_F32]
    if options.peers:
        sides += options.peers
    return sides


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--worker", metavar="SIDE", help=argparse.SUPPRESS)
    add("--json", action="store_true", help="last line: one JSON object of flat figures")
    add("--quick", action="store_true", help="n = 256 and 1024, three seconds a case")
    add("--causal", action="store_true", help="causal; torch with is_causal")
    add("--per-head", action="store_true", help="a table for every head")
    add("--key-heads", type=int, default=0, help="heads of k and v, a divisor of 8 and 4; 0: as q")
    add("--bf16", action="store_true", help="both sides in bf16, and in f32 beside it")
    add("--packed", action="store_true", help="mixed lengths; torch at its fastest of three ways")
    add("--k", type=int, default=16, help="clip distance (16)")
    add("--d", type=int, default=64, choices=WIDTHS, help="head width; not 64: also ops/s over 64")
    add("--shapes", type=lambda s: [int(n) for n in s.split(",")], help="as 256,1024")
    add("--peers", nargs="?", const="all", help="relation-aware PyTorch: all, or names by comma")
    add("--memory", action="store_true", help="peak memory only")
    add("--seconds", type=float, help="about how long each case takes (20; quick 3)")
    add("--sittings", type=int, help="with new processes each (5; quick, or peers: 1)")
    add("--threads", type=int, default=2)
    add("--without-ours", action="store_true", help="torch and the peers only")
    add("--noise", action="store_true", help="torch plain against itself: should be 1.000")
    add("--output", type=Path, help="write figures and machine as JSON, into results/ if bare")
    options = parser.parse_args()
    options.shapes = options.shapes or ([256, 1024] if options.quick else list(SHAPES))
    options.seconds = options.seconds or (3 if options.quick else 20)
    options.sittings = options.sittings or (1 if options.quick or options.peers else 5)
    if options.key_heads and (options.peers or options.packed or 4 % options.key_heads):
        parser.error("--key-heads: 1, 2 or 4, without --peers and --packed")
    if options.peers:
        from peers.torch_attention import PEERS

        options.peers = list(PEERS) if options.peers == "all" else options.peers.split(",")
    unknown = set(options.peers or ()) - set(PEERS if options.peers else ())
    if unknown:
        parser.error(f"--peers: no {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    return options


def main() -> int:
    options = parse()
    if options.worker:
        turns.serve(build)
        return 0
    report, ours = Report(), not (options.without_ours or options.noise)
    place = turns.machine() | reports.versions(options.threads, ours)
    if options.memory:
        measure_memory(report, options)
    else:
        compare(report, options)
        if options.d != 64 and not options.without_ours:
            compare_widths(report, options)
    names = ("k", "d", "causal", "per_head", "key_heads", "packed", "bf16", "sittings")
    setting = {name: getattr(options, name) for name in names}
    report.finish(options, place, **setting)
    return 1 if set(report.failures) & {OURS, OURS_PLAIN, TORCH} else 0


if __name__ == "__main__":
    os.environ.setdefault("RELPOS_NUM_THREADS", "2")
    sys.exit(main())
