# SPDX-License-Identifier: Apache-2.0
"""The training step with batches as they come from a corpus, against the step on ready-made ones.

    python benchmarks/bench_pipeline.py --json            the presets tiny and small: two minutes
    python benchmarks/bench_pipeline.py --quick --json    tiny alone
    python benchmarks/bench_pipeline.py --noise           the step alone against itself

50,000 pairs of 5 to 51 words a side are written, tokenised into a cache, shuffled, sorted and cut into
batches of up to 4,096 tokens a side. One side steps through them with `relpos.data.Batches`, as
`relpos.Trainer` does; the other has the same batches in a list. Both take the same updates in the same
order as far as an epoch goes, in processes of their own, by turns (turns.py); before every turn that
is timed each makes as many updates that are not, so that nothing lies ready from the pause. Then a
third process tells which share of the loop's time it stood and waited for the next update.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import turns
from reports import versions, write_output
from turns import Job, Json, Rounds, SideFailed, Worker

PIPELINE, ALONE, AGAIN, WAITED = "pipeline", "alone", "alone again", "waited"
UPDATES = {"tiny": 16, "small": 3}  # a call: longer than what turns.py measures for at least
PAIRS, SHORTEST, LONGEST, TOKENS = 50_000, 5, 51, 4096
MOST = 1.02


# -------------------------------------------------------------------------------------------- sides


def batches_of(case: Json) -> Any:
    from relpos.data import Batches, TokenCache

    cache = TokenCache.open(Path(case["corpus"]))
    return Batches(cache, tokens=TOKENS, max_length=LONGEST + 1, seed=1)


def build(side: str, case: Json) -> Job:
    import relpos

    config = relpos.Config.preset(case["preset"])
    model = relpos.Transformer(config.replace({"max_length": LONGEST + 1}), tokens=TOKENS)
    updates: Any = iter(batches_of(case))
    if side == WAITED:
        return Job(lambda: share_waited(model, updates, 10 * case["updates"]))
    if side != PIPELINE:
        ready = list(itertools.islice(updates, case["ready"]))
        updates.close()
        updates = itertools.cycle(ready)

    def call() -> float:
        for update in itertools.islice(updates, case["updates"]):
            result = model.step(update)
        return result.loss

    return Job(call)


def share_waited(model: Any, updates: Any, count: int) -> float:
    """Of the time of so many updates, after one, that of waiting for the next."""
    model.step(next(updates))
    begun, waited = time.perf_counter(), 0.0
    for _ in range(count):
        before = time.perf_counter()
        update = next(updates)
        waited += time.perf_counter() - before
        model.step(update)
    return waited / (time.perf_counter() - begun)


# --------------------------------------------------------------------------------------- the corpus


def make_corpus(folder: Path, size: int) -> float:
    """A cache of pairs of random words, as many words as the model knows; its sentences' mean."""
    import numpy as np

    from relpos.data import TokenCache, Words

    draw = np.random.default_rng(0)
    words = np.array([f"w{i}" for i in range(size - 3)])

    def sentences() -> Any:
        for _ in range(PAIRS):
            lengths = draw.integers(SHORTEST, LONGEST + 1, 2)
            yield tuple(" ".join(words[draw.integers(0, len(words), n)]) for n in lengths)

    cache = TokenCache.build(folder, list(sentences()), Words(words.tolist()))
    if cache.size != size:
        sys.exit(f"the corpus has {cache.size} words, the model {size}")
    return float(np.asarray(cache.target_lengths).mean())


# ------------------------------------------------------------------------------------------ figures


def measure(
    options: argparse.Namespace, preset: str, sides: list[str], folder: Path
) -> tuple[Rounds, float]:
    """The rounds, and the share waited."""
    import relpos

    corpus = folder / preset
    mean = make_corpus(corpus, relpos.Config.preset(preset).source_vocabulary)
    updates = UPDATES[preset]
    # as many as are made at most: to warm up, and two calls in each of 101 rounds that may count
    ready = min(updates * (3 + 2 * 3 * 101), int(PAIRS * (mean + 1) / TOKENS))
    case = {"preset": preset, "corpus": str(corpus), "updates": updates, "ready": ready}
    workers = [Worker(Path(__file__), side, options.threads) for side in (*sides, WAITED)]
    try:
        rounds = turns.take_turns(workers[:-1], [case] * len(sides), options.seconds)
        return rounds, workers[-1].once(case)
    finally:
        for worker in workers:
            worker.close()


def tell(preset: str, rounds: Rounds, waited: float, sides: list[str]) -> Json:
    if rounds.failures:
        raise SideFailed("; ".join(rounds.failures.values()))
    ours, alone = sides
    ratio, (low, high) = rounds.ratio(ours, alone), rounds.interval(ours, alone)
    busy = max(rounds.others)
    ms = {side: 1e3 * rounds.median(side) / UPDATES[preset] for side in sides}
    quiet = "" if busy <= turns.QUIET else f", NOT QUIET: others took {busy:.0%}"
    print(
        f"{preset:6} {ours} {ms[ours]:.1f} ms an update, {alone} {ms[alone]:.1f}: "
        f"{ratio:.4f} [{low:.4f}, {high:.4f}], {len(rounds.others)} rounds, {waited:.2%} waited{quiet}",
        flush=True,
    )
    if ratio > MOST:
        print(f"NOT met: {preset}: at most {MOST} times the step alone")
    found: Json = {"over_alone": ratio, "over_alone_low": low, "over_alone_high": high}
    found |= {"ms": ms[ours], "ms_alone": ms[alone], "rounds": len(rounds.others)}
    found["waited_share"] = waited
    found["others_share"] = round(busy, 3)
    return {f"{name}_{preset}": value for name, value in found.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--worker", metavar="SIDE", help=argparse.SUPPRESS)
    add("--json", action="store_true", help="last line: one JSON object of flat figures")
    add("--quick", action="store_true", help="the preset tiny alone, 10 seconds")
    add("--presets", default=",".join(UPDATES), help="which of them (tiny,small)")
    add("--noise", action="store_true", help="the step alone against itself")
    add("--threads", type=int, default=2)
    add("--seconds", type=float, default=50.0, help="for each preset (50)")
    add("--output", type=Path, metavar="FILE", help="the figures as JSON; a bare name: in results/")
    options = parser.parse_args()
    options.presets = options.presets.split(",")
    if unknown := set(options.presets) - set(UPDATES):
        parser.error(f"--presets: no {', '.join(unknown)}; there are {', '.join(UPDATES)}")
    if options.quick:
        options.seconds, options.presets = min(options.seconds, 10.0), ["tiny"]
    return options


def main() -> int:
    options = parse()
    if options.worker:
        turns.serve(build)
        return 0
    figures = turns.machine() | versions(options.threads)
    sides = [AGAIN, ALONE] if options.noise else [PIPELINE, ALONE]
    met = True
    with tempfile.TemporaryDirectory(prefix="relpos-pipeline-") as folder:
        for preset in options.presets:
            rounds, waited = measure(options, preset, sides, Path(folder))
            found = tell(preset, rounds, waited, sides)
            met = met and found[f"over_alone_{preset}"] <= MOST
            figures |= found
    if options.output:
        write_output(options.output, figures)
    if options.json:
        print(json.dumps(figures))
    return 0 if met else 1


if __name__ == "__main__":
    os.environ.setdefault("RELPOS_NUM_THREADS", "2")
    sys.exit(main())
