# SPDX-License-Identifier: Apache-2.0
"""Beam search and greedy search against CTranslate2 with the same weights.

    python benchmarks/bench_decode.py --json
    python benchmarks/bench_decode.py --run RUN --text test.en --json     a trained model, real text

`base` is the preset paper-base with relation tables that heads share (CTranslate2 has no others) and
random weights: 64 sources of 20 tokens, beam 4, every target 20 tokens long; then one source,
greedy. CTranslate2 gets the fastest of its settings, tried first: two workers of one thread or one
of two, whole batches or parts. Sides take turns in processes of their own (turns.py); the peak of
memory is that of a fresh process. --run is a folder of `relpos train` with such tables.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import turns
from reports import Counted, Report, key_of, versions
from turns import Job, Json, SideFailed, Worker

OURS, NARROW, PEER, INT8 = "ours", "ours bf16", "CTranslate2 f32", "CTranslate2 int8"
MEMORY, START = "memory: ", "start: "
SENTENCES, TOKENS, BEAM = 64, 20, 4
FASTER, PEAK_MB, SINGLE, FIRST = 1.4, 500, 1.0, 0.7
BEGIN, END = 1, 2
SETTINGS = ((2, 1, 0), (2, 1, 16), (2, 1, 8), (1, 2, 0), (1, 2, 32))  # workers, threads, batch


# -------------------------------------------------------------------------------------------- cases


def random_sources(count: int, vocabulary: int) -> list[list[int]]:
    import numpy as np

    draw = np.random.default_rng(0)
    return [[*draw.integers(3, vocabulary, TOKENS).tolist()] for _ in range(count)]


def make_weights(folder: Path) -> None:
    """The base model in both formats."""
    import relpos
    from peers import ctranslate2_decode

    shared = {"encoder.per_head": False, "decoder.per_head": False}
    config = relpos.Config.preset("paper-base").replace(shared)
    model = relpos.Transformer(config, tokens=64, sentences=1, training=False)
    model.save(folder / "model.safetensors")
    ctranslate2_decode.export(model, folder / "peer")


def read_text(path: Path) -> list[str]:
    raw = path.read_bytes()
    return (
        (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode().rstrip("\n").split("\n")
    )


def make_run(run: Path, text: Path, folder: Path) -> None:
    """A trained model in both formats, and its text as tokens."""
    import relpos
    from peers import ctranslate2_decode
    from relpos.train import newest

    checkpoint = newest(run)
    model = relpos.Transformer.load(checkpoint.folder / "model.safetensors", training=False)
    model.save(folder / "model.safetensors")
    ctranslate2_decode.export(model, folder / "peer")
    subwords = relpos.data.load_subwords(checkpoint.tokenizer)
    sources = [[*subwords.encode(line), END] for line in read_text(text)]
    (folder / "sources.json").write_text(json.dumps(sources))


def sources_of(case: Json) -> list[list[int]]:
    if case["sentences"] == 0:
        sources: list[list[int]] = json.loads((Path(case["folder"]) / "sources.json").read_text())
        return sources
    return random_sources(case["sentences"], 32768)


# -------------------------------------------------------------------------------------------- sides


def packed(sentences: list[list[int]]) -> tuple[list[int], list[int]]:
    """End to end, and where each begins."""
    offsets = [0, *itertools.accumulate(map(len, sentences))]
    return [*itertools.chain.from_iterable(sentences)], offsets


def batches_of(sources: list[list[int]], sentences: int) -> list[list[int]]:
    """Numbers of sources, those of like length together."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    return [order[at : at + sentences] for at in range(0, len(order), sentences)]


def build_ours(case: Json, precision: Any = "f32") -> Job:
    import relpos

    sources = sources_of(case)
    model = relpos.Transformer.load(
        Path(case["folder"]) / "model.safetensors", training=False,
        tokens=max(SENTENCES * BEAM, sum(sorted(map(len, sources))[-SENTENCES:])),
        sentences=SENTENCES, precision=precision,
    )  # fmt: skip
    forced = case["sentences"] != 0
    length = {"min_length": TOKENS, "max_length": TOKENS} if forced else {}
    search = relpos.Search(
        begin=BEGIN, end=END, beam=case["beam"], penalty="power", alpha=case["alpha"], **length
    )

    def call() -> list[list[int]]:
        found: list[list[int]] = [[]] * len(sources)
        for batch in batches_of(sources, SENTENCES):
            chosen = relpos.Batch(*packed([sources[i] for i in batch]))
            for i, results in zip(batch, model.search(chosen, search), strict=True):
                found[i] = results[0].tokens.tolist()
        return found

    return Job(call, first=case["sentences"] == 1)


def build_peer(case: Json, kind: str) -> Job:
    from peers import ctranslate2_decode as peer

    workers, threads, batch = case["setting"]
    translator = peer.translator(Path(case["folder"]) / "peer", workers, threads, kind)
    sources = sources_of(case)
    forced = case["sentences"] != 0
    least, most = (TOKENS, TOKENS) if forced else (1, 256)

    def call() -> list[list[int]]:
        results = peer.translate(
            translator, sources, case["beam"], most, least, batch, case["alpha"]
        )
        return [[int(token) for token in result.hypotheses[0]] for result in results]

    return Job(call, first=case["sentences"] == 1)


def build(side: str, case: Json) -> Job:
    if side.startswith(MEMORY):
        return Job(lambda: peak_mb(side.removeprefix(MEMORY), case))
    if side in (OURS, NARROW):
        return build_ours(case, "bf16" if side == NARROW else "f32")
    return build_peer(case, "float32" if side.startswith(PEER) else "int8")


def peak_mb(side: str, case: Json) -> float:
    """Of a whole fresh process, interpreter and weights included."""
    job = build(side, case)
    job.call()
    return turns.status_kib("VmHWM") * 1024 / 1e6


# ------------------------------------------------------------------------------------------ measure


def best_setting(report: Report, options: argparse.Namespace, case: Json, side: str) -> Json | None:
    """The case with the fastest of the peer's settings."""
    found: dict[tuple[int, int, int], float] = {}
    settings = SETTINGS if case["sentences"] != 1 else ((1, 1, 0), (1, 2, 0))
    for setting in settings:
        worker = Worker(Path(__file__), side, options.threads)
        try:
            tried = case | {"setting": setting}
            found[setting] = min(worker.prepare(tried)[0], *(worker.burst(1) for _ in range(2)))
        except SideFailed as failure:
            print(f"    {str(failure).splitlines()[0][:120]}", file=sys.stderr)
        worker.close()
    if not found:
        report.failures[side] = "no setting works"
        return None
    for setting, seconds in found.items():
        print(f"    {side}, {setting}: {seconds * 1e3:.1f} ms", flush=True)
    return case | {"setting": min(found, key=found.__getitem__)}


def measure(report: Report, options: argparse.Namespace, name: str, case: Json) -> None:
    print(f"\n{name}", flush=True)
    count = len(sources_of(case))
    sides, cases = [OURS, NARROW], [case, case]
    for side in (PEER, INT8):
        chosen = best_setting(report, options, case, side)
        if chosen is not None:
            sides.append(side)
            cases.append(chosen)
    workers = [Counted(Path(__file__), side, options.threads) for side in sides]
    rounds = turns.take_turns(workers, cases, options.seconds)
    for worker in workers:
        worker.close()
    report.failures |= {f"{name} {side}": text for side, text in rounds.failures.items()}
    report.count(rounds, max(worker.bursts for worker in workers))
    for side in rounds.times:
        rate = count / rounds.median(side)
        print(f"  {side}: {rounds.median(side) * 1e3:.1f} ms, {rate:.1f} sentences/s", flush=True)
        report[f"{name}_sentences_per_second_{key_of(side)}"] = rate
    goals = {"beam": FASTER, "single": 1 / SINGLE}
    if PEER in rounds.times:
        limit = goals.get(name)
        report.ratio(f"{name}_f32_vs_ctranslate2_f32", rounds, PEER, OURS, limit, least=True)
    if INT8 in rounds.times:
        report.ratio(f"{name}_f32_vs_ctranslate2_int8", rounds, INT8, OURS, None, least=True)
        report.ratio(f"{name}_bf16_vs_ctranslate2_int8", rounds, INT8, NARROW, None, least=True)
    report.ratio(f"{name}_bf16_vs_f32", rounds, OURS, NARROW, None, least=True)
    for side, own in zip(sides, cases, strict=True):
        if name == "single":
            continue
        worker = Worker(Path(__file__), MEMORY + side, options.threads)
        peak = float(worker.once(own))
        worker.close()
        limit = PEAK_MB if (side, name) == (OURS, "beam") else None
        report.line(
            f"{name}_peak_mb_{key_of(side)}", f"{side}: {peak:.0f} MB", peak, limit, least=False
        )


def same_answers(report: Report, options: argparse.Namespace, name: str, case: Json) -> None:
    """On how many sentences both say the same."""
    found = []
    for side in (OURS, PEER):
        own = case | {"setting": (1, options.threads, 16)}
        found.append(build(side, own).call())
    share = sum(a == b for a, b in zip(*found, strict=True)) / len(found[0])
    print(f"  the same answer: {share:.1%} of {len(found[0])} sentences", flush=True)
    report[f"{name}_same_answers"] = share


def measure_start(report: Report, options: argparse.Namespace, folder: Path) -> None:
    """Seconds from the start of the command to the first sentence."""
    import subprocess

    import relpos

    # the package that this process has, not the sources of where it was started
    environment = os.environ | {"PYTHONPATH": str(Path(relpos.__file__).parent.parent)}
    times = []
    for _ in range(5):
        begun = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "relpos", "translate", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment,
        ) as process:  # fmt: skip
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("w7 w8 w9\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            times.append(time.monotonic() - begun)
            process.stdin.close()
        if not answer or process.returncode != 0:
            raise SystemExit(f"relpos translate ended with {process.returncode}")
    best = sorted(times)[len(times) // 2]
    report.line("first_sentence_s", f"first sentence after {best:.2f} s", best, FIRST, least=False)


def make_checkpoint(folder: Path) -> None:
    """The base model as `relpos train` leaves one."""
    import relpos
    from relpos.train import checkpoint

    words = relpos.data.Words([f"w{number}" for number in range(32768 - 4)])
    shared = {"encoder.per_head": False, "decoder.per_head": False}
    size = {"source_vocabulary": words.size, "target_vocabulary": words.size}
    config = relpos.Config.preset("paper-base").replace(shared | size)
    model = relpos.Transformer(config, tokens=64, sentences=1)
    checkpoint.save(folder, model, {}, tokenizer=words, keep=1)


# ------------------------------------------------------------------------------------------ running


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--worker", metavar="SIDE", help=argparse.SUPPRESS)
    add("--json", action="store_true", help="last line: one JSON object of flat figures")
    add("--run", type=Path, help="folder of a run, for real text")
    add("--text", type=Path, help="the real text, a sentence a line, plain or gzip")
    add("--seconds", type=float, default=60, help="about how long each comparison takes")
    add("--threads", type=int, default=2)
    add("--output", type=Path, help="write figures and machine as JSON, into results/ if bare")
    options = parser.parse_args()
    return options


def main() -> int:
    options = parse()
    if options.worker:
        turns.serve(build)
        return 0
    place = turns.machine() | versions(options.threads)
    report = Report(place["relpos_isa"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_weights(folder)
        case: Json = {"folder": temporary, "beam": BEAM, "alpha": 0.0, "sentences": SENTENCES}
        measure(report, options, "beam", case)
        same_answers(report, options, "beam", case)
        measure(report, options, "single", case | {"sentences": 1, "beam": 1})
    with tempfile.TemporaryDirectory() as temporary:
        make_checkpoint(Path(temporary))
        measure_start(report, options, Path(temporary))
    if options.run:
        with tempfile.TemporaryDirectory() as temporary:
            make_run(options.run, options.text, Path(temporary))
            case = {"folder": temporary, "beam": BEAM, "alpha": 1.0, "sentences": 0}
            measure(report, options, "real", case)
            same_answers(report, options, "real", case)
    report.finish(options, place)
    return 1 if report.failures else 0


if __name__ == "__main__":
    os.environ.setdefault("RELPOS_NUM_THREADS", "2")
    sys.exit(main())
