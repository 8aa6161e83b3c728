# SPDX-License-Identifier: Apache-2.0
"""Writes docs/names.md, every public name with a line on what it is: `python docs/make_names.py`.

A module's names are those of its `__all__`, and what is said of them is the first sentence of their
docstrings; a function of C is found by the section of its header. A test compares.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import get_origin

DOCS = Path(__file__).resolve().parent
HEADERS = DOCS.parent / "csrc" / "include" / "relpos"
MODULES = (
    "relpos", "relpos.data", "relpos.position", "relpos.train", "relpos.evaluation", "relpos.plots",
)  # fmt: skip
HEAD = """\
# Names

Every public name of the package, and every function of libcore. `help(relpos.attention)`, an editor and
the headers say the rest. `relpos.torch`, which is not among them, has `attention` for torch tensors and
`Attention`, the same as a module; `relpos.reference` the operations in float64 NumPy. Written by
`docs/make_names.py`; a test compares.
"""


def first_sentence(text: str) -> str:
    paragraph = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return re.split(r"(?<=\.)(?<!al\.)\s", paragraph)[0].rstrip(":.")


def members(kind: type) -> list[str]:
    """Methods, functions and properties of a class's own, in their order there."""
    return [
        name
        for name, x in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isfunction(x) or isinstance(x, property | classmethod | staticmethod))
    ]


def what(name: str, x: object) -> str:
    is_class = inspect.isclass(x) and get_origin(x) is None  # to 3.10 ndarray[...] is one too
    if isinstance(x, ModuleType) or is_class or inspect.isroutine(x):
        said = first_sentence(x.__doc__ or "")
        return f"{said}." if said else ""
    return "A type, for annotations." if not isinstance(x, str) else "The version."


def rows_of(module: ModuleType, besides: set[str]) -> list[str]:
    rows = []
    for name in sorted(module.__all__, key=str.lower):
        if name in besides:
            continue
        x = getattr(module, name)
        more = ""
        if inspect.isclass(x) and (own := members(x)):
            more = " " + ", ".join(f"`.{member}`" for member in own)
        rows.append(f"| `{name}` | {what(name, x)}{more} |")
    return rows


def python_part() -> list[str]:
    lines: list[str] = []
    known: set[str] = set()
    for name in MODULES:
        module = importlib.import_module(name)
        lines += ["", f"## `{name}`", ""]
        if known & set(module.__all__):
            lines += ["Besides those that `relpos` itself has:", ""]
        lines += ["| | |", "|---|---|", *rows_of(module, known)]
        known |= set(module.__all__)
    return lines


def c_part() -> list[str]:
    """The functions of each section of each header."""
    lines = ["", "## libcore"]
    for header in sorted(HEADERS.glob("*.h")):
        lines += ["", f"`relpos/{header.name}`:", "", "| | |", "|---|---|"]
        section, found = "", dict[str, list[str]]()
        for line in header.read_text().splitlines():
            if heading := re.fullmatch(r" \* (\d+\. .*?)(?: \*/)?", line):
                section = heading[1]
            for name in re.findall(r"^RP_API\b.*?\b(rp_\w+)\(", line):
                found.setdefault(section, []).append(name)
        for section, names in found.items():
            lines.append(f"| {section} | {', '.join(f'`{name}`' for name in names)} |")
    return lines


def page() -> str:
    return "\n".join([HEAD.rstrip(), *python_part(), *c_part()]) + "\n"


if __name__ == "__main__":
    (DOCS / "names.md").write_text(page())
