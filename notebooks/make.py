# SPDX-License-Identifier: Apache-2.0
"""Makes the notebooks from their sources: `python notebooks/make.py`, after
`pip install '.[notebooks]'`.

    python notebooks/make.py                     all of them, executed, written beside the sources
    python notebooks/make.py graphs --check      executed anew, nothing is written

A source is Python in percent format: "# %%" begins a cell of code, "# %% [markdown]" one of text,
whose lines are comments. Nothing about the machine gets into an .ipynb: no paths, no times of
execution, and a fault or a word on standard error is a failure here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
LARGEST = 1_000_000  # bytes of an .ipynb
SECONDS = 600  # of a cell, on a machine that is busy with other things


def sources() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*.py") if path != Path(__file__).resolve())


def cells_of(source: Path) -> list[tuple[str, str]]:
    """("markdown" or "code", text) of every cell."""
    cells = []
    for part in re.split(r"(?m)^# %%", source.read_text())[1:]:
        head, _, text = part.partition("\n")
        text = text.strip("\n")
        if head.strip() == "[markdown]":
            cells.append(("markdown", re.sub(r"(?m)^# ?", "", text)))
        else:
            cells.append(("code", text))
    return cells


def as_notebook(source: Path) -> dict[str, Any]:
    """Without outputs."""
    made: list[dict[str, Any]] = []
    for i, (kind, text) in enumerate(cells_of(source)):
        cell = {"cell_type": kind, "id": f"cell-{i:02}", "metadata": {}, "source": text}
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def execute(source: Path) -> Any:
    """The notebook with its outputs, made in an empty folder."""
    import nbclient
    import nbformat

    notebook = nbformat.from_dict(as_notebook(source))  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
        check(source, notebook, folder)
    notebook.metadata.pop("language_info")
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.validate(notebook)
    return notebook


def check(source: Path, notebook: Any, folder: str) -> None:
    """Refuses what is not to be read by others."""
    # sys.prefix of a distribution's Python, /usr, may be in any text
    places = {folder, str(Path.home()), os.getcwd(), str(FOLDER.parent), sys.prefix} - {"/", "/usr"}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error" or output.get("name") == "stderr":
                raise SystemExit(f"{source.name}: {cell.id}: {output}")
            data = output.get("data", {})
            text = "".join(
                [output.get("text", ""), *(data.get(f"text/{k}", "") for k in ("plain", "html"))]
            )
            if found := [place for place in places if place in text]:
                raise SystemExit(f"{source.name}: {cell.id}: {found[0]} is in the output")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the notebooks from their sources.")
    parser.add_argument("names", nargs="*", help="of sources, without .py (all)")
    parser.add_argument("--check", action="store_true", help="executes them and writes nothing")
    options = parser.parse_args()
    known = {path.stem: path for path in sources()}
    for name in options.names:
        if name not in known:
            parser.error(f"{name}: expected one of {', '.join(known)}")
    for name in options.names or known:
        begun, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        notebook = execute(known[name])
        text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        if len(text.encode()) > LARGEST:
            raise SystemExit(f"{name}: {len(text.encode()):,} bytes, at most {LARGEST:,}")
        if not options.check:
            known[name].with_suffix(".ipynb").write_text(text)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cores = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        print(
            f"{name}: {time.monotonic() - begun:.0f} s, {cores:.0f} s of a core, "
            f"{len(text.encode()):,} bytes",
            flush=True,
        )


if __name__ == "__main__":
    main()
