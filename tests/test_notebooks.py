# SPDX-License-Identifier: Apache-2.0
"""The notebooks that are committed: made from their sources, executed, whole. `.ci/run --long`
executes them anew."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from test_layout import ROOT

FOLDER = ROOT / "notebooks"


def _load(path: Path) -> Any:
    """A module that is no package's; it takes nothing but Python until it executes a notebook."""
    spec = importlib.util.spec_from_file_location(f"notebooks_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _load(FOLDER / "make.py")
SOURCES = make.sources()


def notebook(source: Path) -> Any:
    return json.loads(source.with_suffix(".ipynb").read_text())


def test_there_are_notebooks() -> None:
    names = {source.stem for source in SOURCES}
    assert names == {"attention_maps", "graphs", "relative_positions", "schemes"}
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == names
    listed = set(re.findall(r"\((\w+)\.ipynb\)", (FOLDER / "README.md").read_text()))
    assert listed == names


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_cells_are_those_of_the_source(source: Path) -> None:
    """Whoever changes a source makes the notebook again: python notebooks/make.py."""
    expected = make.as_notebook(source)
    found = notebook(source)
    for cell in found["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    assert found == expected


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_executed_without_a_fault(source: Path) -> None:
    cells = [cell for cell in notebook(source)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    text = json.dumps([{**output, "data": _texts(output)} for output in outputs])
    assert re.findall(r"(?<![\w.<])/(?:home|root|tmp|usr|work|Users|opt)/", text) == []


def _texts(output: Any) -> Any:
    return {kind: x for kind, x in output.get("data", {}).items() if kind != "image/png"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_short_cells(source: Path) -> None:
    for kind, text in make.cells_of(source):
        assert len(text.splitlines()) <= 40, text
        if kind == "code":
            ast.parse(text)
    assert source.with_suffix(".ipynb").stat().st_size <= make.LARGEST


def test_cells(tmp_path: Path) -> None:
    """Of a source that is shorter than it ever would be."""
    source = tmp_path / "x.py"
    source.write_text(
        "# SPDX\n# %% [markdown]\n# # A\n#\n# text\n\n# %%\n\nx = 1\n\n# no cell: %%\n"
    )
    assert make.cells_of(source) == [
        ("markdown", "# A\n\ntext"),
        ("code", "x = 1\n\n# no cell: %%"),
    ]
