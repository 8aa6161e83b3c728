# SPDX-License-Identifier: Apache-2.0
"""The training step against the best PyTorch, against our own without relations, and its memory.

    python benchmarks/bench_step.py --json            everything, both models
    python benchmarks/bench_step.py --quick --json    the small model, some seconds each
    python benchmarks/bench_step.py --only speed --models base --peers eager,OpenNMT-py
    python benchmarks/bench_step.py --busy --json     CPU time of one thread, of every side

f32, two threads. `base` is the preset paper-base, `small` the preset small: 2,048 source and 2,048
target tokens in sentences of 32, dropout as the preset has it. A step is forward, backward, clipping
and Adam. Sides take turns in processes of their own (turns.py). README.md says what each figure means.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import turns
from bench_schemes import BUSY, least_cpu_seconds
from reports import Counted, Report, key_of, versions
from turns import Job, Json, Rounds, SideFailed, Worker

OURS, ABSOLUTE, TORCH, TWIN = "ours", "ours absolute", "torch: ", "twin"
MEMORY, PROFILE, PADDED, BF16 = "memory: ", "profile", "ours padded", " in bf16"
WRITTEN = "as written"
MODELS = {"base": "paper-base", "small": "small"}
SECTIONS = ("speed", "bf16", "relative", "memory", "profile", "flat", "lengths", "real")
TOKENS, LENGTH = 2048, 32
LENGTHS = (32, 128, 512)  # of relative over absolute
BATCHES = (512, 1024, 2048, 4096, 8192)  # tokens, of the time per token
REMEMBERED = ("nn.Transformer", "nn.Transformer as written", "eager")  # peers whose peak is told
FASTER = {"base": 1.5, "small": 2.4}
PRICE, PEAK_GB, GEMM_SHARE, FLAT = 1.02, 1.5, 0.70, 1.10
BOS, EOS, PAD = 1, 2, 0
REAL = {
    "dropout": 0.25, "attention_dropout": 0.1, "activation_dropout": 0.1, "schedule": "noam",
}  # as on Multi30k  # fmt: skip
REAL_TOKENS, REAL_BATCHES = 4096, 8

# Sentences of Multi30k's training set by their number of words, from 0 on: English, German.
WORDS = (
    (
        0, 0, 0, 3, 21, 171, 741, 1719, 2489, 3199, 3490, 3340, 2940, 2552, 2126, 1619, 1245, 947,
        700, 528, 362, 227, 195, 117, 81, 57, 43, 23, 10, 15, 9, 10, 7, 6, 4, 0, 3, 1,
    ),
    (
        0, 2, 3, 20, 159, 600, 1513, 2336, 2995, 3446, 3373, 3039, 2606, 2223, 1736, 1359, 988, 752,
        524, 405, 287, 193, 144, 75, 69, 44, 33, 22, 14, 10, 8, 7, 9, 1, 1, 1, 0, 1, 1, 1,
    ),
)  # fmt: skip
SUBWORDS = 1.3  # tokens a word


# -------------------------------------------------------------------------------------------- cases


def make_case(options: argparse.Namespace, model: str, **changes: Any) -> Json:
    case = {"model": model, "tokens": TOKENS, "length": LENGTH, "threads": options.threads}
    return case | changes


def config_of(case: Json, absolute: bool = False) -> Any:
    """The preset of a case, by ours or by its own name; absolute: sinusoids in place of relations."""
    import relpos

    config = relpos.Config.preset(MODELS.get(case["model"], case["model"]))
    changes: Json = {"max_length": max(config.max_length, case["length"])} | case.get("config", {})
    for stack in ("encoder", "decoder") if absolute else ():
        changes |= {f"{stack}.position": "none", f"{stack}.absolute": "sinusoidal"}
    return config.replace(changes)


def real_lengths(order: str, count: int, most: int) -> list[list[tuple[int, int]]]:
    """Batches of up to `most` target tokens, as (source, target) lengths of their sentences.

    order: "random", or "sorted", sentences of one length beside each other. Long sentences are
    translations of long ones: the n-th longest of both sides go together.
    """
    import numpy as np

    sides = [np.repeat(np.arange(len(words)), words) for words in WORDS]
    tokens = np.maximum(np.round(SUBWORDS * np.stack(sides, 1)), 1).astype(int)
    if order == "random":
        tokens = np.random.default_rng(0).permutation(tokens)
    batches: list[list[tuple[int, int]]] = [[]]
    for source, target in tokens.tolist():
        if sum(t + 1 for _, t in batches[-1]) + target + 1 > most:
            batches.append([])
        batches[-1].append((source, target))
    whole = batches[:-1]
    return [whole[(2 * i + 1) * len(whole) // (2 * count)] for i in range(count)]


# -------------------------------------------------------------------------------------------- sides


def build_ours(
    case: Json, absolute: bool = False, padded: bool = False, precision: Any = "f32"
) -> Job:
    import relpos

    config = config_of(case, absolute)
    batches = [batch_of(config, lengths, padded) for lengths in lengths_of(case)]
    model = relpos.Transformer(
        config,
        tokens=max(max(len(b.source), len(b.target)) for b in batches),
        sentences=max(b.sentences for b in batches),
        precision=precision,
    )

    def call() -> float:
        return [model.step(batch).loss for batch in batches][-1]

    return Job(call, first=case["model"] == "small")


def lengths_of(case: Json) -> list[list[tuple[int, int]]]:
    if "order" in case:
        return real_lengths(case["order"], case["batches"], case["tokens"])
    return [[(case["length"], case["length"] - 1)] * (case["tokens"] // case["length"])]


def batch_of(config: Any, lengths: list[tuple[int, int]], padded: bool) -> Any:
    """Random tokens of these lengths; padded: every sentence as long as the longest of its side."""
    import numpy as np

    import relpos

    draw = np.random.default_rng(0)

    def words(count: int) -> Any:
        return draw.integers(3, config.source_vocabulary, count)

    sources = [words(n) for n, _ in lengths]
    targets = [words(m) for _, m in lengths]
    if not padded:
        return relpos.Batch.from_pairs(sources, targets, bos=BOS, eos=EOS)
    n, m = (max(side) for side in zip(*lengths, strict=True))
    source = np.full((len(lengths), n), PAD)
    target, labels = np.full((len(lengths), m + 1), PAD), np.full((len(lengths), m + 1), -1)
    for i, (own, translated) in enumerate(zip(sources, targets, strict=True)):
        source[i, : len(own)] = own
        target[i, : len(translated) + 1] = [BOS, *translated]
        labels[i, : len(translated) + 1] = [*translated, EOS]
    return relpos.Batch(
        source.ravel(),
        np.arange(len(lengths) + 1) * n,
        target.ravel(),
        np.arange(len(lengths) + 1) * (m + 1),
        labels.ravel(),
    )


def build_torch(name: str, case: Json, narrow: bool = False) -> Job:
    """narrow: in torch.autocast."""
    import torch

    from peers.torch_step import PEERS
    from peers.torch_training import Batch

    torch.set_num_threads(case["threads"])
    torch.set_flush_denormal(True)
    config = config_of(case)
    if "order" in case:
        return build_torch_real(name, case, config)
    shape = shape_of(config)
    size = (case["tokens"] // case["length"], case["length"])
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, shape.vocabulary, size, generator=draw) for _ in range(3)]
    step = PEERS[name](shape, Batch(*ids))

    def call() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            return step.step()

    return Job(call, first=case["model"] == "small")


def build_torch_real(name: str, case: Json, config: Any) -> Job:
    """The same sentences as ours, padded; of a peer that knows no padding its keys are not hidden."""
    import torch

    from peers.torch_step import PEERS
    from peers.torch_training import Batch
    from peers.torch_twin import Adam, Twin, padded_batch

    packed = [batch_of(config, lengths, padded=False) for lengths in lengths_of(case)]
    batches = [padded_batch(batch) for batch in packed]
    if name == TWIN:
        import relpos

        initial = relpos.Transformer(config, tokens=64).parameters
        twin = Twin(config, {key: x.copy() for key, x in initial.items()})
        adam = Adam(twin)

        def trained(*batch: Any) -> float:
            loss = twin.loss(*batch)
            loss.backward()
            adam.step()
            return float(loss.detach())
    else:
        step = PEERS[name](shape_of(config), Batch(*batches[0]))

        def trained(*batch: Any) -> float:
            counted = torch.nonzero(batch[2].flatten() >= 0)[:, 0]
            step.batch = Batch(*batch[:2], batch[2].flatten()[counted], counted)
            return step.step()

    return Job(lambda: [trained(*batch) for batch in batches][-1])


def shape_of(config: Any) -> Any:
    """The same model for the peers, which know what the two presets need and no more."""
    from peers.torch_training import Shape

    stacks = (config.encoder, config.decoder)
    known = config.share_embeddings and config.share_output and config.activation == "relu"
    known = known and config.key_heads in (0, config.heads)
    known = known and all(s.position == "shaw" and s.per_layer and not s.tied for s in stacks)
    if not known or any({s.value_per_layer, s.value_per_head} != {None} for s in stacks):
        raise ValueError(f"the peers cannot be {config!r}")
    return Shape(
        width=config.width, heads=config.heads, feed_forward=config.feed_forward,
        vocabulary=config.target_vocabulary, encoder_layers=stacks[0].layers,
        decoder_layers=stacks[1].layers, k=stacks[0].k, per_head=stacks[0].per_head,
        pre_norm=config.norm == "pre", bias=config.bias, norm_epsilon=config.norm_epsilon,
        dropout=config.dropout, attention_dropout=config.attention_dropout,
        activation_dropout=config.activation_dropout, smoothing=config.label_smoothing,
        clip_norm=config.clip_norm, beta1=config.beta1, beta2=config.beta2,
        adam_epsilon=config.adam_epsilon,
    )  # fmt: skip


def build(side: str, case: Json) -> Job:
    narrow = side.endswith(BF16)
    side = side.removesuffix(BF16)
    if side.startswith(TORCH):
        return build_torch(side.removeprefix(TORCH), case, narrow)
    if side.startswith(MEMORY):
        return Job(lambda: peak_gb(side.removeprefix(MEMORY), case))
    if side.startswith(BUSY):
        job = build(side.removeprefix(BUSY), case)
        return Job(lambda: least_cpu_seconds(job))
    if side == PROFILE:
        return Job(lambda: profile_lines(case))
    precision = "bf16" if narrow else "f32"
    return build_ours(case, side == ABSOLUTE, side == PADDED, precision)


# -------------------------------------------------------------------------------------------- speed


def measure_speed(report: Report, options: argparse.Namespace, model: str) -> None:
    """Ours against the fastest peer, and the fastest of those written as everyone writes them."""
    case = make_case(options, model)
    found = try_peers(report, options, case, options.peers)
    written = {side: t for side, t in found.items() if side.endswith(WRITTEN)}
    best = [min(group, key=group.__getitem__) for group in (found, written) if group]
    rounds = take_turns(report, options, [OURS, *dict.fromkeys(best)], case)
    for side in rounds.times:
        report[f"{model}_tokens_per_second_{key_of(side.replace(TORCH, 'torch '))}"] = (
            TOKENS / rounds.median(side)
        )
        report[f"{model}_ms_{key_of(side.replace(TORCH, 'torch '))}"] = rounds.median(side) * 1e3
    for side, end in zip(best, ("", "_as_written"), strict=False):
        name = f"{model}_f32_vs_best_torch{end}"
        report[f"{name}_is"] = side.removeprefix(TORCH)
        limit = None if end else FASTER[model]
        report.ratio(name, rounds, side, OURS, limit, least=True)


def measure_bf16(report: Report, options: argparse.Namespace, model: str) -> None:
    """Ours in bf16 against ours in f32, and against the fastest peer in torch.autocast, whose
    products are oneDNN's by themselves."""
    case = make_case(options, model)
    names = [name for name in options.peers if "oneDNN" not in name]
    found = try_peers(report, options, case, names, BF16)
    best = min(found, key=found.__getitem__) if found else None
    rounds = take_turns(report, options, [OURS + BF16, OURS, *([best] if best else [])], case)
    for side in rounds.times:
        report[f"{model}_bf16_tokens_per_second_{key_of(side.replace(TORCH, 'torch '))}"] = (
            TOKENS / rounds.median(side)
        )
    report.ratio(f"{model}_bf16_vs_f32", rounds, OURS, OURS + BF16, None, least=True)
    if best:
        report[f"{model}_bf16_vs_best_torch_is"] = best.removeprefix(TORCH)
        report.ratio(f"{model}_bf16_vs_best_torch", rounds, best, OURS + BF16, None, least=True)


def try_peers(
    report: Report, options: argparse.Namespace, case: Json, names: list[str], suffix: str = ""
) -> dict[str, float]:
    """Seconds of the shortest step of each peer, each alone in a process of its own."""
    found: dict[str, float] = {}
    for name in names:
        side = TORCH + name + suffix
        worker = Worker(Path(__file__), side, options.threads)
        try:
            found[side] = min(worker.prepare(case)[0], *(worker.burst(1) for _ in range(2)))
        except SideFailed as failure:
            print(f"    {str(failure).splitlines()[0][:120]}", file=sys.stderr)
        worker.close()
    for side, seconds in found.items():
        print(f"    {side}: {TOKENS / seconds:.0f} target tokens a second", flush=True)
        report[f"{case['model']}_try_tokens_per_second_{key_of(side.replace(TORCH, 'torch '))}"] = (
            TOKENS / seconds
        )
    return found


def take_turns(
    report: Report, options: argparse.Namespace, sides: list[str], *cases: Json, sittings: int = 1
) -> Rounds:
    """Rounds of these sides, each in a fresh process, once or in every sitting; cases: one for all,
    or one each."""
    given = list(cases) if len(cases) > 1 else list(cases) * len(sides)
    workers = [Counted(Path(__file__), side, options.threads) for side in sides]
    rounds = turns.take_turns(workers, given, options.seconds, sittings)
    for worker in workers:
        worker.close()
    report.failures |= {f"{given[0]} {side}": text for side, text in rounds.failures.items()}
    if rounds.times:
        times = ", ".join(f"{side} {rounds.median(side) * 1e3:.1f} ms" for side in rounds.times)
        print(f"  {times}; {len(rounds.others)} rounds", flush=True)
        report.count(rounds, max(worker.bursts for worker in workers))
    return rounds


def measure_busy(report: Report, options: argparse.Namespace, model: str) -> None:
    """One thread, the least CPU time of some steps: what others take is not in it.

    Caches and the bus are still shared with them, so this says where to look, not what to quote.
    """
    case = make_case(options, model, threads=1)
    found: dict[str, float] = {}
    for side in [OURS, ABSOLUTE, *(TORCH + name for name in options.peers)]:
        worker = Worker(Path(__file__), BUSY + side, threads=1)
        try:
            found[side] = float(worker.once(case))
        except SideFailed as failure:
            print(f"    {str(failure).splitlines()[0][:120]}", file=sys.stderr)
            if not side.startswith(TORCH):
                report.failures[f"cpu_{model} {side}"] = str(failure)
        worker.close()
        if side in found:
            over = f", {found[side] / found[OURS]:.3f} of ours" if OURS in found else ""
            print(f"    {side}: {found[side] * 1e3:.1f} ms of CPU{over}", flush=True)
            report[f"cpu_{model}_ms_{key_of(side.replace(TORCH, 'torch '))}"] = found[side] * 1e3


# --------------------------------------------------------------------------- relative over absolute


def measure_relative(report: Report, options: argparse.Namespace, model: str) -> None:
    prefix = "" if model == "base" else f"{model}_"
    for length in LENGTHS:
        print(f"  sentences of {length}")
        case = make_case(options, model, length=length)
        rounds = take_turns(
            report, options, [OURS, ABSOLUTE], case, sittings=1 if options.quick else 3
        )
        name = f"{prefix}rel_over_abs_len{length}"
        report.ratio(name, rounds, OURS, ABSOLUTE, PRICE if model == "base" else None)


# ------------------------------------------------------------------------------------------- memory


def measure_memory(report: Report, options: argparse.Namespace, model: str) -> None:
    sides = [OURS, *(TORCH + name for name in options.peers if name in REMEMBERED)]
    for side in sides:
        worker = Worker(Path(__file__), MEMORY + side, options.threads)
        name = f"{model}_peak_gb" + (
            "" if side == OURS else f"_{key_of(side.replace(TORCH, 'torch '))}"
        )
        try:
            peak = float(worker.once(make_case(options, model)))
            limit = PEAK_GB if (side, model) == (OURS, "base") else None
            report.line(name, f"{side}: {peak:.3f} GB above the imports", peak, limit, least=False)
        except SideFailed as failure:
            report.failures[name] = str(failure)
            print(f"    {failure}", file=sys.stderr)
        worker.close()


def peak_gb(side: str, case: Json) -> float:
    """In a fresh process: the high-water mark of building and three steps, over the imports."""
    if side.startswith(TORCH):
        from peers import torch_step  # noqa: F401
    import relpos  # noqa: F401

    Path("/proc/self/clear_refs").write_text("5")  # the mark falls to the present size
    before = turns.status_kib("VmRSS")
    job = build(side, case)
    for _ in range(3):
        job.call()
    return (turns.status_kib("VmHWM") - before) * 1024 / 1e9


# ------------------------------------------------------------------------------------------ profile


def measure_profile(report: Report, options: argparse.Namespace, model: str) -> None:
    """The share of the matrix products in a step, and what takes the rest."""
    worker = Worker(Path(__file__), PROFILE, options.threads)
    lines = worker.once(make_case(options, model))
    worker.close()
    total = sum(seconds for _, seconds in lines)
    share = sum(seconds for name, seconds in lines if is_product(name)) / total
    limit = GEMM_SHARE if model == "base" else None
    report.line(f"{model}_gemm_share", f"matrix products: {share:.1%}", share, limit, least=True)
    others: dict[str, float] = {}
    for name, seconds in lines:
        if not is_product(name):
            kind = name.rpartition(".")[2]
            others[kind] = others.get(kind, 0.0) + seconds / total
    for kind, part in sorted(others.items(), key=lambda item: -item[1]):
        report[f"{model}_share_{kind}"] = part
    largest = sorted(others.items(), key=lambda item: -item[1])[:8]
    print("    " + ", ".join(f"{kind} {part:.1%}" for kind, part in largest), flush=True)


def is_product(name: str) -> bool:
    """Whether a line of the profile is matrix products and nothing else."""
    return name.rpartition(".")[2] in ("output", "qkv", "q", "kv", "in", "out")


def profile_lines(case: Json) -> list[tuple[str, float]]:
    import relpos

    config = config_of(case)
    (batch,) = (batch_of(config, lengths, padded=False) for lengths in lengths_of(case))
    model = relpos.Transformer(config, tokens=len(batch.source), sentences=batch.sentences)
    for _ in range(2):
        model.step(batch)
    with relpos.profile(model) as profile:
        for _ in range(2 if case["model"] == "base" else 20):
            model.step(batch)
    return [(line.name, line.seconds) for line in profile.lines]


# ------------------------------------------------------------------------- size and shape of batches


def measure_flat(report: Report, options: argparse.Namespace, model: str) -> None:
    """Time per token of batches of every size, the slowest over the fastest."""
    sides = [f"{OURS}, {tokens} tokens" for tokens in BATCHES]
    rounds = take_turns(
        report, options, sides, *(make_case(options, model, tokens=tokens) for tokens in BATCHES)
    )
    if len(rounds.times) < len(sides):
        return
    each = {t: rounds.median(side) / t for t, side in zip(BATCHES, sides, strict=True)}
    for tokens, seconds in each.items():
        report[f"{model}_us_per_token_{tokens}"] = seconds * 1e6
    ratio = max(each.values()) / min(each.values())
    text = ", ".join(f"{tokens}: {seconds * 1e6:.1f} us" for tokens, seconds in each.items())
    report.line(f"{model}_flat_512_8192", f"{text}: {ratio:.3f}", ratio, FLAT, least=False)


def measure_lengths(report: Report, options: argparse.Namespace, model: str) -> None:
    """Packed against the same batches padded, in real tokens a second."""
    count = 1 if model == "base" else 4
    for order in ("random", "sorted"):
        case = make_case(options, model, order=order, batches=count)
        print(f"  sentences of real lengths, {order}")
        rounds = take_turns(report, options, [OURS, PADDED], case)
        name = f"{model}_packed_vs_padded_{order}"
        report_real_tokens(report, name, case, rounds)
        report.ratio(name, rounds, PADDED, OURS, None, least=True)


def report_real_tokens(report: Report, name: str, case: Json, rounds: Rounds) -> None:
    real = sum(m + 1 for lengths in lengths_of(case) for _, m in lengths)
    for side in rounds.times:
        report[f"{name}_tokens_per_second_{key_of(side.replace(TORCH, 'torch '))}"] = (
            real / rounds.median(side)
        )


def measure_real(report: Report, options: argparse.Namespace, model: str) -> None:
    """Batches of real lengths, sorted, in real tokens a second: ours against the best PyTorch twin."""
    if model != "small":
        return
    case = make_case(
        options, model, order="sorted", batches=REAL_BATCHES, tokens=REAL_TOKENS, config=REAL
    )
    peers = [TORCH + TWIN] + [TORCH + name for name in options.peers if name == "eager"]
    rounds = take_turns(report, options, [OURS, *peers], case)
    report_real_tokens(report, f"{model}_real", case, rounds)
    if found := {side: rounds.median(side) for side in peers if side in rounds.times}:
        best = min(found, key=found.__getitem__)
        report[f"{model}_real_vs_best_torch_is"] = best.removeprefix(TORCH)
        report.ratio(f"{model}_real_vs_best_torch", rounds, best, OURS, FASTER[model], least=True)


# ------------------------------------------------------------------------------------------ running


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--worker", metavar="SIDE", help=argparse.SUPPRESS)
    add("--json", action="store_true", help="last line: one JSON object of flat figures")
    add("--quick", action="store_true", help="the small model, without peers that are compiled")
    add("--models", type=lambda s: s.split(","), help="base,small")
    add("--only", type=lambda s: s.split(","), help=f"by comma: {', '.join(SECTIONS)}")
    add("--peers", type=lambda s: s.split(","), help="by comma, as torch_step.PEERS names them")
    add("--busy", action="store_true", help="CPU time of one thread, where it is never quiet")
    add("--seconds", type=float, help="about how long each comparison takes (90; quick 5)")
    add("--threads", type=int, default=2)
    add("--output", type=Path, help="write figures and machine as JSON, into results/ if bare")
    options = parser.parse_args()
    options.models = options.models or (["small"] if options.quick else list(MODELS))
    options.only = options.only or list(SECTIONS)
    options.seconds = options.seconds or (5 if options.quick else 90)
    for name, allowed in (("models", MODELS), ("only", SECTIONS)):
        if unknown := set(getattr(options, name)) - set(allowed):
            parser.error(f"--{name}: no {', '.join(unknown)}; there are {', '.join(allowed)}")
    return options


def peers_of(options: argparse.Namespace) -> list[str]:
    """The peers to try: those asked for, or all of torch_step that can be had."""
    try:
        from peers.torch_step import PEERS
    except ImportError as error:
        print(f"no peers: {error}", file=sys.stderr)
        return []
    if unknown := set(options.peers or ()) - set(PEERS):
        sys.exit(f"--peers: no {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return options.peers or [n for n in PEERS if not (options.quick and "compiled" in n)]


MEASURE = {
    "speed": measure_speed,
    "bf16": measure_bf16,
    "relative": measure_relative,
    "memory": measure_memory,
    "profile": measure_profile,
    "flat": measure_flat,
    "lengths": measure_lengths,
    "real": measure_real,
}


def main() -> int:
    options = parse()
    if options.worker:
        turns.serve(build)
        return 0
    options.peers = peers_of(options)
    place = turns.machine() | versions(options.threads)
    report = Report(place["relpos_isa"])
    for model in options.models:
        for section in [] if options.busy else options.only:
            print(f"\n{model}: {section}", flush=True)
            MEASURE[section](report, options, model)
        if options.busy:
            print(f"\n{model}: CPU time of one thread", flush=True)
            measure_busy(report, options, model)
    report.finish(options, place)
    return 1 if report.failures else 0


if __name__ == "__main__":
    os.environ.setdefault("RELPOS_NUM_THREADS", "2")
    sys.exit(main())
