# SPDX-License-Identifier: Apache-2.0
"""Trains the PyTorch twin of a finished Multi30k run, and scores it as the run was scored.

    python benchmarks/twin_multi30k.py DATA RUNS/relative-1

Configuration, seed, initial weights, vocabulary, batches and their order are those of the run;
operations, gradients, update and the random numbers of dropout are torch's (peers/torch_twin.py). The
mean of the last ten checkpoints is put into a relpos model, which translates. A line is added to
benchmarks/results/multi30k-twin.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import relpos
import turns
from peers.torch_twin import Adam, Twin, padded_batch
from relpos.train.checkpoint import checkpoints
from score_multi30k import AVERAGED, lines_of, scores_of

RESULTS = Path(__file__).parent / "results" / "multi30k-twin.jsonl"


def train(run: Path, data: Path, threads: int) -> tuple[dict[str, Any], int, float]:
    """The mean of the last checkpoints, the number of updates, and real target tokens a second."""
    steps = [each.step for each in checkpoints(run)]
    loaded = relpos.Translator.load(checkpoints(run)[-1].folder)
    config = loaded.models[0].config
    subwords = loaded.subwords
    fresh = relpos.Transformer(config, tokens=4096, sentences=512)
    torch.set_num_threads(threads)
    torch.manual_seed(config.seed)
    torch.set_flush_denormal(True)
    twin = Twin(config, {name: x.copy() for name, x in fresh.parameters.items()})
    adam = Adam(twin)
    pairs = list(zip(*lines_of(data, "train"), strict=True))
    cache = relpos.data.TokenCache.build(run / "twin-cache", pairs, subwords)
    batches = relpos.data.Batches(
        cache, tokens=4096, max_length=config.max_length, seed=config.seed, epochs=30
    )
    kept: list[dict[str, Any]] = []
    began, tokens = time.monotonic(), 0
    for (batch,) in batches:
        loss = twin.loss(*padded_batch(batch))
        loss.backward()
        adam.step()
        n = adam.step_number
        tokens += len(batch.target)
        if n in steps[-AVERAGED:]:
            kept.append({name: x.detach().double().numpy() for name, x in twin.p.items()})
        if n % 100 == 0:
            speed = tokens / (time.monotonic() - began)
            print(f"step {n:,}  loss {loss.item():.3f}  {speed:,.0f} tokens/s", flush=True)
    if len(kept) != AVERAGED or adam.step_number != steps[-1]:
        raise RuntimeError(f"{run}: the run has {steps[-1]} updates, the twin {adam.step_number}")
    mean = {name: sum(each[name] for each in kept) / AVERAGED for name in kept[0]}
    return mean, adam.step_number, tokens / (time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the corpus")
    parser.add_argument("run", type=Path, help="a finished run, named by configuration and seed")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    mean, steps, speed = train(options.run, options.data, options.threads)
    translator = relpos.Translator.load(checkpoints(options.run)[-1].folder)
    for name, x in translator.models[0].parameters.items():
        x[...] = mean[name]
    line = (
        {"run": f"{options.run.name}, twin", "steps": steps, "tokens_per_second": round(speed)}
        | scores_of(translator, options.data)
        | turns.machine()
        | {"torch": torch.__version__}
        | {"command": f"python benchmarks/twin_multi30k.py DATA RUNS/{options.run.name}"}
    )
    print(f"{line['run']}: BLEU {line['bleu']}, lower case {line['bleu_lowercase']}")
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
