# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/*.md show is run: every command, every program, every table.

A fenced block of sh, python or c is run. Above it, a comment may say

    <!-- not run by the tests: the reason -->
    <!-- run in a folder of its own -->          otherwise in a copy of the repository

Commands run one after the other as a reader types them, in the environment that the first of them,
the README's installation, makes. `program.c` is the C program shown last before them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import relpos
from test_layout import ROOT, tracked

README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
LANGUAGES = ("sh", "python", "c")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    remark: str  # of the comment above it
    program: str  # the C program shown last

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    pattern = r"(?:<!-- ([^\n]*) -->\n)?```(\w+)\n(.*?)```"
    text, blocks, program = page.read_text(), [], ""
    for match in re.finditer(pattern, text, re.DOTALL):
        remark, language, content = match.groups()
        program = content if language == "c" else program
        line = text[: match.start(2)].count("\n") + 1
        blocks.append(Block(page.name, line, language, content, remark or "", program))
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page) if block.language in LANGUAGES]
LEFT_OUT = "not run by the tests: "
COMMANDS = [b for b in BLOCKS if b.language == "sh" and not b.remark.startswith(LEFT_OUT)]
INSTALL = COMMANDS[0]


def run(
    command: str,
    folder: Path,
    environment: dict[str, str] | None = None,
    timeout: float | None = None,
) -> str:
    """What bash prints; nothing of this process's settings or environment reaches it. Nothing is
    built with CUDA, which takes minutes."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RELPOS_", "VIRTUAL_ENV"))
        and name not in ("PYTHONPATH", "MAKEFLAGS")
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=kept | {"RELPOS_CUDA": "0"} | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository as a clone would have it, installed by the README's first command."""
    folder = tmp_path_factory.mktemp("readme") / "relpos"
    for path in tracked():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    printed = run(INSTALL.text, folder)
    exact = re.search(r"exact: ([\d.]+)% of .*, ([\d.]+)% with 7 to 12", printed)
    assert exact is not None, printed[-2000:]
    assert float(exact[1]) >= 99 and float(exact[2]) >= 97
    assert (folder / "relpos-demo" / "attention.png").stat().st_size > 10_000
    return folder


# ---- commands ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands(block: Block, project: Path, tmp_path: Path) -> None:
    if block == INSTALL:
        return  # the fixture has run it
    folder = tmp_path if block.remark == "run in a folder of its own" else project
    (folder / "program.c").write_text(block.program)
    path = f"{project / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    printed = run(block.text, folder, {"PATH": path})
    if "./program" in block.text:
        assert printed.splitlines()[-6:] == EXPECTED


# Row i of the values is (2i, 2i + 1). The first i + 1 of them weigh the same; 0.5 is the table's.
EXPECTED = [f"{i + 0.5:5.2f} {i + 1.5:5.2f}" for i in range(6)]
CHECKED = "all as it should be"  # the last line of a program that checks itself


ELSEWHERE = (
    "nvcc takes minutes; the step cuda of .ci/run compiles",
    "it takes a GPU",
    "it takes a GPU and CuPy",
)
IN_TORCH = "test_torch.py does, where torch is installed"


def test_what_is_left_out_is_run_elsewhere() -> None:
    """The command that runs these tests is the one thing they cannot run: .ci/run does. Of GPUs the
    page about them says what was run."""
    left_out = [b for b in BLOCKS if b.remark.startswith(LEFT_OUT)]
    of_gpus = [b.remark.removeprefix(LEFT_OUT) for b in left_out if b.page == "cuda.md"]
    assert set(of_gpus) <= set(ELSEWHERE)
    left_out = [b for b in left_out if b.page != "cuda.md" and b.remark != LEFT_OUT + IN_TORCH]
    assert [b.remark for b in left_out] == [LEFT_OUT + ".ci/run runs it, and it runs the tests"]
    assert left_out[0].text.strip() in (ROOT / ".ci" / "run").read_text().replace("  ", "")


def test_inline_commands_name_what_exists() -> None:
    """`python some/script.py` in the text: the script is there."""
    for page in PAGES:
        for name in re.findall(
            r"`(?:\$ )?(?:python|bash) ([\w./-]+\.\w+|\.ci/run)", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_the_tests_that_pages_name_exist() -> None:
    paths = [path for kind in ("py", "c") for path in (ROOT / "tests").rglob(f"test_*.{kind}")]
    sources = "".join(path.read_text() for path in paths)
    for page in PAGES:
        for name in re.findall(r"\btest_\w+(?!\w*\.)", page.read_text()):
            assert f"def {name}" in sources, f"{page.name}: {name}"


# ---- programs ------------------------------------------------------------------------------------


PROGRAMS = [b for b in BLOCKS if b.language == "python" and not b.remark.startswith(LEFT_OUT)]


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_python(block: Block, tmp_path: Path) -> None:
    package = str(Path(relpos.__file__).parent.parent)
    (tmp_path / "program.py").write_text(block.text)
    run(f"'{sys.executable}' program.py", tmp_path, {"PYTHONPATH": package})


def test_the_readme_leads_with_ten_lines_of_python() -> None:
    first = next(b for b in blocks_of(README))
    lines = [line for line in first.text.splitlines() if line.strip()]
    assert first.language == "python" and len(lines) <= 10
    assert "relpos.Shaw" in first.text and "attention_backward" in first.text


def compile_and_run(source: Path, folder: Path, timeout: float | None = None) -> str:
    """The program takes bash's place, so that time that is up ends it."""
    strict = "-std=c11 -Wall -Wextra -Wconversion -Werror"
    flags = f"{relpos.cflags()} {relpos.libs()} -lm"
    command = f"${{CC:-cc}} {strict} {source} {flags} -o p && exec ./p"
    return run(command, folder, timeout=timeout)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "c"], ids=str)
def test_c(block: Block, tmp_path: Path) -> None:
    (tmp_path / "program.c").write_text(block.text)
    lines = compile_and_run(tmp_path / "program.c", tmp_path).splitlines()
    assert lines == EXPECTED if block.page == README.name else lines[-1] == CHECKED


@pytest.mark.parametrize(
    "source", sorted((ROOT / "examples" / "c").glob("*.c")), ids=lambda p: p.name
)
def test_numbered_examples(source: Path, tmp_path: Path) -> None:
    """Each compiles alone, with what the package says, and checks itself. The one that trains has
    learned everything within a minute."""
    assert re.match(r"\d\d_", source.name)
    assert re.search(r"#define CHECK\(call\)", source.read_text())
    printed = compile_and_run(source, tmp_path, 60 if source.name == "03_train_copy.c" else None)
    assert printed.splitlines()[-1] == CHECKED


# ---- links, picture, table -----------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    broken = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert broken == []


def test_the_picture_is_light() -> None:
    assert (ROOT / "docs" / "content_and_relation.png").stat().st_size < 100_000


def test_the_table_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme_table

    text = README.read_text()
    assert readme_table.updated(text) == text, "run: python benchmarks/readme_table.py"


def test_the_table_of_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme_table

    figures = {"fwd_vs_torch_plain_n64": 1.234, "fwdbwd_vs_torch_plain_n64": 0.5}
    figures |= {"fwd_vs_torch_plain_n256": 0.8, "fwd_rel_over_plain_n256": 1.1}
    assert readme_table.table(figures).splitlines() == [
        "| n (B x H) | ours / torch plain | ours / ours plain |",
        "| --- | --- | --- |",
        "| 64 (8 x 8) | 1.23, 0.50 | - |",
        "| 256 (4 x 8) | 0.80, - | 1.10, - |",
    ]
