# SPDX-License-Identifier: Apache-2.0
"""Writes the README's table of speed from a measurement in results/.

    python benchmarks/bench_attention.py --peers --json --output attention-NAME.json
    python benchmarks/readme_table.py            writes the table into README.md
    python benchmarks/readme_table.py --check    fails where README.md says something else

The table is that of SHOWN; benchmarks/README.md has those of other processors. tests/test_readme.py
runs the check: what the README claims is what was measured and committed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from bench_attention import SHAPES

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- speed: written by benchmarks/readme_table.py -->", "<!-- /speed -->"
NONE_YET = (
    "Not measured on this version yet: `python benchmarks/bench_attention.py --json` measures it."
)
SHOWN = HERE / "results" / "attention-zen4-avx512.json"
PASSES = ("fwd", "fwdbwd")
PREFIX = "fwd_vs_torch_plain_"


def pair(figures: dict[str, Any], name: str, digits: int) -> str:
    """The figure of both passes, as `forward, forward + backward`."""
    values = [figures.get(f"{which}_{name}") for which in PASSES]
    texts = ["-" if value is None else f"{value:.{digits}f}" for value in values]
    return "-" if set(texts) == {"-"} else ", ".join(texts)


def shape_of(n: int) -> str:
    batch, heads = SHAPES[n]
    return f"{n} ({batch} x {heads})"


def table(figures: dict[str, Any]) -> str:
    """The table of one measurement: a column only where there is something to put in it."""
    columns = [
        ("n (B x H)", None, 0),
        ("ours, ms", "ms_ours_relative", 2),
        ("torch plain, ms", "ms_torch_plain", 2),
        ("ours / torch plain", "vs_torch_plain", 2),
        ("ours / ours plain", "rel_over_plain", 2),
        ("best relative torch / ours", "vs_best_relative_torch", 1),
    ]
    found = (re.fullmatch(re.escape(PREFIX) + r"n(\d+)", key) for key in figures)  # no intervals
    lengths = sorted(int(match[1]) for match in found if match)
    rows = []
    for n in lengths:
        cells = [shape_of(n) if name is None else pair(figures, f"{name}_n{n}", digits)
                 for _, name, digits in columns]  # fmt: skip
        rows.append(cells)
    filled = [c for c in range(len(columns)) if any(row[c] != "-" for row in rows)]
    lines = [[columns[c][0] for c in filled], ["---"] * len(filled)]
    lines += [[row[c] for c in filled] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def caption(figures: dict[str, Any]) -> str:
    where = f"{figures['cpu']} (family/model {figures['cpu_family_model']})"
    return (
        f"Forward, forward + backward on {figures['threads']} threads of {where}, "
        f"{figures['relpos_isa']}, f32, d = {figures['d']}, k = {figures['k']}, both terms"
        f'{", causal" if figures["causal"] else ""}; "torch plain" is torch {figures["torch"]}\'s '
        "`scaled_dot_product_attention`, which has no relations. Measured "
        f"{figures['date'][:10]} at {figures['commit']} by `{figures['command']}`."
    )


def text() -> str:
    if not SHOWN.exists():
        return NONE_YET
    figures = json.loads(SHOWN.read_text())
    if figures["others_share"] > 0:
        raise SystemExit(f"{SHOWN.name}: the machine was not quiet: not for quoting")
    return f"{table(figures)}\n\n{caption(figures)}"


def updated(readme: str) -> str:
    """The README with the table that the measurements give."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    assert len(pattern.findall(readme)) == 1, "README.md: expected one pair of markers"
    return pattern.sub(lambda _: f"{BEGIN}\n{text()}\n{END}", readme)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    readme = README.read_text()
    new = updated(readme)
    if check and new != readme:
        print("README.md: the table is not that of benchmarks/results/", file=sys.stderr)
        return 1
    if not check:
        README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
