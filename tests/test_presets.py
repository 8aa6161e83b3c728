# SPDX-License-Identifier: Apache-2.0
"""docs/presets.md against libcore: every number of every preset stands there, and as it is."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "presets.md"
CONFIG_BYTES = 4096  # room for an rp_config; what it really takes, it says itself

Fields = dict[str, str]


class Library:
    """What libcore says of its presets."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        for name in ("rp_preset_name", "rp_config_field", "rp_last_error"):
            getattr(self.lib, name).restype = ctypes.c_char_p

    def names(self, function: str) -> list[str]:
        result: list[str] = []
        while (name := getattr(self.lib, function)(len(result))) is not None:
            result.append(name.decode())
        return result

    def preset(self, name: str) -> Fields:
        config = ctypes.create_string_buffer(CONFIG_BYTES)
        text = ctypes.create_string_buffer(64)
        assert self.lib.rp_config_preset(name.encode(), config) == 0
        assert ctypes.c_size_t.from_buffer(config).value <= CONFIG_BYTES
        result = {}
        for field in self.names("rp_config_field"):
            size = ctypes.c_size_t(len(text))
            status = self.lib.rp_config_get(config, field.encode(), text, size)
            assert status == 0, self.lib.rp_last_error()
            result[field] = text.value.decode()
        return result


@pytest.fixture(scope="module")
def library(libraries: dict[str, Path]) -> Library:
    return Library(libraries["f32"])


# ---- the page ------------------------------------------------------------------------------------


def tables(mark: str) -> list[list[list[str]]]:
    """The tables below the comment `presets: mark`, as rows of cells, the heads first."""
    pattern = rf"<!-- presets: {mark} -->\n((?:\|.*\n)+)"
    found = []
    for match in re.finditer(pattern, PAGE.read_text()):
        lines = [line.strip("|").split("|") for line in match[1].splitlines()]
        rows = [[cell.strip() for cell in line] for line in lines]
        assert {len(row) for row in rows} == {len(rows[0])}, f"a ragged table: {rows[0]}"
        found.append([rows[0], *rows[2:]])
    assert found, f"docs/presets.md has no table {mark!r}"
    return found


def unquoted(cell: str) -> list[str]:
    """`a`, `b` -> a, b."""
    assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", cell), cell
    return re.findall(r"`([^`]+)`", cell)


def add(fields: Fields, names: list[str], value: str) -> None:
    for name in names:
        assert name not in fields, f"docs/presets.md has {name} twice"
        fields[name] = value


def documented() -> dict[str, Fields]:
    """Every field of every preset, as the page has it."""
    (head, *rows), *rest = tables("a column each")
    assert rest == []
    presets: dict[str, Fields] = {unquoted(cell)[0]: {} for cell in head[1:-1]}
    for first, *values, _ in rows:
        for fields, value in zip(presets.values(), values, strict=True):
            add(fields, unquoted(first), value)
    for _, *rows in tables("the same in all"):
        for first, value, _ in rows:
            for fields in presets.values():
                add(fields, unquoted(first), value)
    twins = {}
    for kind in ("absolute", "language"):
        changes: Fields = {}
        for _, *rows in tables(kind):
            for first, value, _ in rows:
                add(changes, unquoted(first), value)
        of = [name for name in presets if (kind == "absolute") == ("paper" in name)]
        twins |= {f"{name}-{kind}": presets[name] | changes for name in of if "t2t" not in name}
    return presets | twins


# ---- both ----------------------------------------------------------------------------------------


def test_the_page_names_every_preset(library: Library) -> None:
    names = library.names("rp_preset_name")
    assert names and sorted(documented()) == sorted(names)
    listed = re.findall(r"(?m)^\| (`[^|]*`) \|[^|]*\|$", PAGE.read_text().split("## ")[0])
    assert [name for cell in listed for name in unquoted(cell)] == names


@pytest.mark.parametrize("name", sorted(documented()))
def test_the_page_has_every_number(library: Library, name: str) -> None:
    assert documented()[name] == library.preset(name)


def test_fields_are_named_in_the_order_of_the_struct(library: Library) -> None:
    header = (PAGE.parent.parent / "csrc" / "include" / "relpos" / "model.h").read_text()
    structs = {}
    for name in ("rp_stack", "rp_config"):
        match = re.search(rf"typedef struct {name} {{(.*?)}} {name};", header, re.DOTALL)
        assert match
        code = re.sub(r"/\*.*?\*/", "", match[1], flags=re.DOTALL)
        structs[name] = re.findall(r"(\w+)(?=\s*[,;])", code)
    expected = []
    for field in structs["rp_config"][1:]:  # after struct_size
        stack = field in ("encoder", "decoder")
        expected += [f"{field}.{inner}" for inner in structs["rp_stack"]] if stack else [field]
    assert library.names("rp_config_field") == expected
