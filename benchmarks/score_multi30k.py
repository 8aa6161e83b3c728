# SPDX-License-Identifier: Apache-2.0
"""Scores finished Multi30k runs as benchmarks/multi30k/README.md says, and keeps a line of each.

    python benchmarks/score_multi30k.py DATA RUNS
    python benchmarks/score_multi30k.py DATA RUNS --ensemble wide-relative

DATA holds the corpus, RUNS a folder of runs, named by configuration and seed as relative-1. A run
that has its line in benchmarks/results/multi30k.jsonl is not scored again: the test set is
translated once. So it is with the ensemble of all seeds of a configuration, whose line goes to
multi30k-ensemble.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import relpos
import turns
from relpos.evaluation import bleu, evaluate
from relpos.train.checkpoint import checkpoints, read_json

RESULTS = Path(__file__).parent / "results" / "multi30k.jsonl"
ENSEMBLES = RESULTS.with_name("multi30k-ensemble.jsonl")
PAGE = Path(__file__).parent.parent / "docs" / "results.md"
CONFIGURATIONS = Path(__file__).parent / "multi30k"
AVERAGED, BEAM, ALPHAS = 10, 4, (0.6, 1.0)


def lines_of(data: Path, name: str) -> tuple[list[str], list[str]]:
    pairs = relpos.data.read_pairs(data / f"{name}.en.gz", data / f"{name}.de.gz")
    source, target = zip(*pairs, strict=True)
    return [*source], [*target]


def curve_of(run: Path) -> dict[str, Any]:
    """What the log says: the best validation, and how fast it went."""
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    found = min(
        (line for line in log if line["kind"] == "validation"), key=lambda line: line["nll"]
    )
    last = [line for line in log if line["kind"] == "train"][-1]
    return {
        "best_validation_perplexity": round(found["perplexity"], 3),
        "best_validation_step": found["step"],
        "steps": last["step"],
        "epochs": last["epoch"],
    }


def score(run: Path, data: Path) -> dict[str, Any]:
    name, _, seed = run.name.rpartition("-")
    saved = checkpoints(run)
    build = read_json(saved[-1].folder / "state.json").get("build", {})
    precision = build.get("precision", "f32")
    translator = relpos.Translator.load(run, average=AVERAGED, precision=precision)
    return (
        {
            "run": run.name,
            "configuration": f"benchmarks/multi30k/{name}.toml",
            "seed": int(seed),
            **curve_of(run),
            "averaged": [each.step for each in saved[-AVERAGED:]],
            **scores_of(translator, data),
            "trained_with": build,
        }
        | turns.machine()
        | {"command": "python benchmarks/score_multi30k.py DATA RUNS"}
    )


def score_ensemble(name: str, runs: Path, data: Path) -> dict[str, Any]:
    """Every seed's mean of its last checkpoints, and the mean of their probabilities."""
    members = sorted(path for path in runs.glob(f"{name}-[0-9]*") if (path / "log.jsonl").exists())
    translator = relpos.Translator.load(members, average=AVERAGED)
    return (
        {"ensemble": name, "members": [member.name for member in members]}
        | scores_of(translator, data)
        | turns.machine()
        | {"command": f"python benchmarks/score_multi30k.py DATA RUNS --ensemble {name}"}
    )


def scores_of(translator: relpos.Translator, data: Path) -> dict[str, Any]:
    """The length penalty is chosen on val, the test set translated once."""
    sources, references = lines_of(data, "val")
    on_val = {}
    for alpha in ALPHAS:
        search = relpos.Search(beam=BEAM, penalty="wu", alpha=alpha)
        found = translator.translate(sources, search=search)
        on_val[alpha] = bleu(found, [references]).value
    chosen = max(on_val, key=on_val.__getitem__)
    sources, references = lines_of(data, "test_2016_flickr")
    search = relpos.Search(beam=BEAM, penalty="wu", alpha=chosen)
    found = translator.translate(sources, search=search)
    result = evaluate(found, [references], sources, translator=translator, lowercase=True)
    cased, lower, chrf = result.metrics
    numbers = sum(array.size for model in translator.models for array in model.parameters.values())
    assert result.likelihood is not None
    return {
        "weights": numbers,
        "bleu_val": {str(alpha): round(value, 2) for alpha, value in on_val.items()},
        "alpha": chosen,
        "bleu": round(cased.value, 2),
        "bleu_lowercase": round(lower.value, 2),
        "chrf2": round(chrf.value, 2),
        "signature": cased.signature,
        "precisions": cased.more,
        "perplexity_test": round(result.likelihood.perplexity, 3),
        "by_length": {
            each.name: [each.sentences, round(each.bleu, 2)] for each in result.by_length
        },
    }


def table(lines: list[dict[str, Any]]) -> str:
    """The lines as docs/results.md shows them."""
    rows = [
        "| run | positions | weights | steps | alpha | val | test | lower case | chrF2 | perplexity |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        rows.append(
            f"| {line['run']} | {line['run'].rpartition('-')[0].rpartition('-')[2]} "
            f"| {line['weights']:,} | {line['steps']:,} | {line['alpha']} "
            f"| {max(line['bleu_val'].values()):.2f} | **{line['bleu']:.2f}** "
            f"| {line['bleu_lowercase']:.2f} | {line['chrf2']:.2f} | {line['perplexity_test']:.2f} |"
        )
    return "\n".join(rows)


def lengths_table(lines: list[dict[str, Any]]) -> str:
    """BLEU by words of the source."""
    names = list(lines[0]["by_length"])
    heads = [f"{name} ({lines[0]['by_length'][name][0]})" for name in names]
    rows = ["| run | " + " | ".join(heads) + " |", "|---" * (len(names) + 1) + "|"]
    for line in lines:
        cells = [f"{line['by_length'][name][1]:.2f}" for name in names]
        rows.append(f"| {line['run']} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def write_page(lines: list[dict[str, Any]]) -> None:
    """Both tables, between their marks."""
    page = PAGE.read_text()
    for name, text in (("runs", table(lines)), ("lengths", lengths_table(lines))):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(page)


def add_ensemble(name: str, runs: Path, data: Path) -> int:
    kept = ENSEMBLES.read_text().splitlines() if ENSEMBLES.exists() else []
    if name in {json.loads(line)["ensemble"] for line in kept}:
        print(f"{name}: has its line in {ENSEMBLES}", file=sys.stderr)
        return 1
    line = score_ensemble(name, runs, data)
    print(f"{name}: BLEU {line['bleu']}, lower case {line['bleu_lowercase']}", flush=True)
    with ENSEMBLES.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the corpus")
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--ensemble", help="score all seeds of a configuration together")
    options = parser.parse_args()
    if options.ensemble is not None:
        return add_ensemble(options.ensemble, options.runs, options.data)
    kept = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    done = {json.loads(line)["run"] for line in kept}
    for run in sorted(path for path in options.runs.iterdir() if (path / "log.jsonl").exists()):
        if run.name in done or not (options.runs / run.name / "done").exists():
            continue
        if not (CONFIGURATIONS / f"{run.name.rpartition('-')[0]}.toml").exists():
            print(f"{run}: no such configuration", file=sys.stderr)
            return 1
        line = score(run, options.data)
        print(f"{run.name}: BLEU {line['bleu']}, lower case {line['bleu_lowercase']}", flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
    write_page([json.loads(line) for line in RESULTS.read_text().splitlines()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
