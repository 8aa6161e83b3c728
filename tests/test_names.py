# SPDX-License-Identifier: Apache-2.0
"""docs/names.md has every public name, each with what its docstring says; and how arrays are typed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import relpos
from relpos.position.arrays import Given

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "names.md"


@pytest.fixture(scope="module")
def make_names() -> Any:
    spec = importlib.util.spec_from_file_location("make_names", ROOT / "docs" / "make_names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_would_be_written(make_names: Any) -> None:
    assert PAGE.read_text() == make_names.page(), "python docs/make_names.py writes it anew"


def test_every_name_says_what_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(rows) > 80
    for name, said in rows:
        words = re.sub(r"`\.\w+`,? ?", "", said).split()
        assert len(words) > 1, name


@pytest.mark.parametrize("module", ["data", "evaluation", "plots", "position", "train"])
def test_every_module_is_there(module: str) -> None:
    names = importlib.import_module(f"relpos.{module}").__all__
    assert [name for name in names if f"\n| `{name}` |" not in PAGE.read_text()] == []


def test_every_exported_function_is_there() -> None:
    found = re.findall(r"`(rp_\w+)`", PAGE.read_text())
    assert sorted(found) == sorted((ROOT / "tests" / "exported_symbols.txt").read_text().split())


def test_names_that_are_read_later_are_listed() -> None:
    assert set(relpos.__all__) <= set(dir(relpos))


def test_arrays_are_typed_as_what_is_taken() -> None:
    """An ndarray, or what another library exports: a checker refused tensors, which are taken."""
    for call in (relpos.attention, relpos.attention_forward, relpos.maps.attention_maps):
        found = inspect.get_annotations(call)
        assert {found[name].removesuffix(" | None") for name in "qkv"} == {"Given"}
    taken = {member for each in get_args(Given) for member in vars(each)}
    for exported in ("__dlpack__", "__array_interface__"):
        assert exported in taken and hasattr(np.ndarray, exported)
