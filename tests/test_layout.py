# SPDX-License-Identifier: Apache-2.0
"""The rules of the house, as tests: who may include whom, what is exported, what is not done.

`python tests/test_layout.py` prints the guide lines (long files, long functions), which nothing
fails.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from building import make

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CUDA = ROOT / "cuda"
EMULATOR = ROOT / "tests" / "emulator"
PUBLIC = ("relpos.h", "device.h", "model.h", "decode.h")
HEADERS = tuple(CSRC / "include" / "relpos" / name for name in PUBLIC)
EXPORTED = ROOT / "tests" / "exported_symbols.txt"

# A file includes from its own floor or below. isa/ stands above ops/ here, because an instruction
# set compiles the operations' sources; the public headers are on no floor: everyone may see them.
FLOORS = {"include": 0, "base": 0, "ops": 1, "isa": 2, "model": 3, "file": 4, "train": 4}
FLOORS |= {"decode": 4, "api": 5}
GUIDE_FILE, GUIDE_FUNCTION = 400, 60
BUILT = (
    r"(build|dist|relpos/lib|relpos/include|[\w.]*egg-info)/|(.*/)?(\.\w*(venv|cache)|__pycache__)/"
    r"|.*\.(so|a|o)$"
)


def tracked() -> list[Path]:
    """Every file of the project: those git knows, or all of an unpacked sdist."""
    if (ROOT / ".git").exists():
        names = run("git", "ls-files")
        paths = [ROOT / name for name in names.splitlines()]
    else:
        paths = [path for path in ROOT.rglob("*") if not re.match(BUILT, name_of(path))]
    return sorted(path for path in paths if path.is_file())


def core_files() -> list[Path]:
    return sorted(p for p in CSRC.rglob("*") if p.suffix in (".c", ".h"))


def cuda_files() -> list[Path]:
    return sorted(p for p in CUDA.iterdir() if p.suffix in (".cu", ".h"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code(path: Path) -> str:
    """A C file without comments and strings, its lines where they were."""

    def blank(match: re.Match[str]) -> str:
        return '""' if match[0].startswith('"') else "\n" * match[0].count("\n") or " "

    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"'
    text = re.sub(r"(?m)^(\s*#\s*include).*$", r"\1", path.read_text())
    return re.sub(pattern, blank, text, flags=re.DOTALL)


def found(pattern: str, files: list[Path]) -> list[str]:
    """Places in the code where the pattern is, as file:line: text."""
    return [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(code(path).splitlines(), 1)
        if re.search(pattern, line)
    ]


def calls(*functions: str) -> str:
    return rf"(?<![\w.>])({'|'.join(functions)})\s*\("


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- floors --------------------------------------------------------------------------------------


def floor_of(path: Path) -> int:
    part = path.relative_to(CSRC).parts[0]
    return FLOORS["api" if part.startswith("api") else part]


def test_includes_point_down() -> None:
    upward, unknown = [], []
    for path in core_files():
        for name in re.findall(r'(?m)^\s*#\s*include\s+"([^"]+)"', path.read_text()):
            target = next((p for p in (CSRC / name, CSRC / "include" / name) if p.exists()), None)
            if target is None:
                unknown.append(f"{name_of(path)} includes {name}, which is not under csrc/")
            elif floor_of(target) > floor_of(path):
                upward.append(f"{name_of(path)} includes {name}")
    assert unknown == []
    assert upward == []


def test_the_core_does_not_call_itself_by_the_front_door() -> None:
    """What api*.c defines nobody below names: what both need has an rpi_ function further down."""
    doors = sorted(CSRC.glob("api*.c"))
    text = "".join(code(path) for path in doors)
    public = set(re.findall(r"(?m)^\w[\w *]*\b(rp_\w+)\(", text))
    exported = set(EXPORTED.read_text().split())
    assert public == exported - {"rp_last_error"}  # base/error.c's, for every floor
    below = [path for path in [*core_files(), *cuda_files()] if path not in (*doors, *HEADERS)]
    assert found(rf"\b({'|'.join(sorted(public))})\b", below) == []


def test_the_binding_comes_in_by_the_front_door() -> None:
    """Of the core, the binding sees the public headers alone."""
    files = sorted((ROOT / "relpos").glob("_*.[ch]"))
    text = "".join(path.read_text() for path in files)
    own = {path.name for path in files}
    others = set(re.findall(r'#\s*include\s+"([^"]+)"', text)) - own
    assert others == {f"relpos/{name}.h" for name in ("decode", "device", "model", "relpos")}


def test_cuda_sees_the_table_and_what_lies_below_it() -> None:
    """cuda/ fills the operation table: it knows no model, no training, no files."""
    upward = []
    for path in cuda_files():
        for name in re.findall(r'(?m)^\s*#\s*include\s+"([^"]+)"', path.read_text()):
            beside = (CUDA / name).exists() or (EMULATOR / name).exists()
            below = name.startswith(("base/", "ops/", "relpos/")) and (
                (CSRC / name).exists() or (CSRC / "include" / name).exists()
            )
            if not (beside or below or name == "isa/devices.h"):
                upward.append(f"{name_of(path)} includes {name}")
    assert upward == []


def test_three_headers_know_which_compiler_it_is() -> None:
    """Everything else of cuda/ is one source for nvcc and for the emulator."""
    knowing = {path.name for path in cuda_files() if "__CUDACC__" in code(path)}
    assert knowing <= {"gpu.h", "ptx.h", "blas.h"}


def test_headers_of_the_base_stand_alone() -> None:
    """A header of base/ needs no other include before it."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    for header in sorted((CSRC / "base").glob("*.h")):
        # clang takes a header for a program, whose inline functions nobody calls
        flags = ("-std=c11", "-Wall", "-Werror", "-Wno-unused-function")
        flags += (f"-I{CSRC}", f"-I{CSRC / 'include'}")
        run(*compiler, *flags, "-fsyntax-only", "-x", "c", header)


# ---- one list of sources -------------------------------------------------------------------------


def test_core_mk_lists_every_source() -> None:
    text = (CSRC / "core.mk").read_text().replace("\\\n", " ")
    lists = dict(re.findall(r"(?m)^(\w+) *= *(.*)$", text))
    listed = lists["CORE_SOURCES"].split()
    assert len(set(listed)) == len(listed)
    here = {p.relative_to(CSRC).as_posix() for p in core_files() if p.suffix == ".c"}
    operations = {name for name in here if name.startswith("ops/")}
    assert here - operations == set(listed)
    table = (CSRC / "isa" / "table.h").read_text()
    assert operations == set(re.findall(r'#include "(ops/\w+\.c)"', table))
    headers = [path.relative_to(CSRC).as_posix() for path in HEADERS]
    assert lists["CORE_PUBLIC_HEADERS"].split() == headers


def test_cuda_mk_lists_every_source() -> None:
    text = (CUDA / "cuda.mk").read_text().replace("\\\n", " ")
    lists = dict(re.findall(r"(?m)^(\w+) *= *(.*)$", text))
    assert sorted(lists["CUDA_SOURCES"].split()) == sorted(p.name for p in CUDA.glob("*.cu"))
    others = {"race.cpp", "planted.cpp", "vectors.cpp"}
    emulator = {path.name for path in EMULATOR.glob("*.cpp")} - others
    assert set(lists["EMULATOR_SOURCES"].split()) == emulator


def test_design_names_every_file() -> None:
    """docs/design.md says what every source and header is for: by one of the two, they share it."""
    named = set(re.findall(r"(\w+)\.[ch]\b", (ROOT / "docs" / "design.md").read_text()))
    assert [name_of(path) for path in core_files() if path.stem not in named] == []


def test_every_base_file_has_its_test() -> None:
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "c").glob("test_*.c")}
    missing = {path.stem for path in (CSRC / "base").glob("*.c")} - tested
    assert missing <= {"blas"}, missing  # blas: with the products, in test_gemm.c


# ---- what libcore shows and needs ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_exported_symbols(libraries: dict[str, Path], kind: str) -> None:
    """A symbol more is a promise more, one less a break: change the list on purpose."""
    lines = run("nm", "-D", "--defined-only", libraries[kind]).splitlines()
    assert sorted(line.split()[-1] for line in lines) == EXPORTED.read_text().split()


def test_exported_symbols_are_those_of_the_headers() -> None:
    text = "".join(header.read_text() for header in HEADERS)
    declared = re.findall(r"RP_API[^;]*?\b(rp_\w+)\s*\(", text)
    assert sorted(declared) == EXPORTED.read_text().split()


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_libcore_needs_nothing_but_libc(libraries: dict[str, Path], kind: str) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", run("readelf", "-d", libraries[kind]))
    allowed = r"(libc|libm|libpthread|libdl|ld-linux[\w-]*|libasan|libubsan|libtsan)\.so\.\d+"
    assert needed and [name for name in needed if not re.fullmatch(allowed, name)] == []


def test_shared_names_have_the_prefix() -> None:
    """In libcore.a every name that crosses files is rp_ or rpi_: it is linked into programs."""
    make("all")
    lines = run("nm", "--defined-only", "-g", ROOT / "build" / "release" / "libcore.a").splitlines()
    names = {line.split()[-1] for line in lines if len(line.split()) == 3}
    assert names and [name for name in sorted(names) if not re.match(r"rpi?_", name)] == []


# ---- the public headers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "default", "language"), [("CC", "cc", "c11"), ("CXX", "c++", "c++17")]
)
@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_a_public_header_compiles_alone(
    variable: str, default: str, language: str, header: Path
) -> None:
    compiler = shlex.split(os.environ.get(variable, default))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no {language} compiler here: {compiler[0]}")
    strict = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror")
    kind = "c++" if language.startswith("c++") else "c"
    run(
        *compiler,
        f"-std={language}",
        *strict,
        "-fsyntax-only",
        "-x",
        kind,
        f"-I{CSRC / 'include'}",
        header,
    )


# ---- what the core does not do -------------------------------------------------------------------


def test_nothing_is_switched_off() -> None:
    assert found(r"#\s*if\s+[01]\b", core_files()) == []


def test_the_core_neither_prints_nor_exits() -> None:
    printing = calls(
        "printf", "fprintf", "vprintf", "vfprintf", "puts", "fputs", "putchar", "perror"
    )
    assert found(printing, core_files()) == []
    assert (
        found(calls("exit", "_exit", "_Exit", "quick_exit", "abort", "raise"), core_files()) == []
    )


def test_arguments_are_checked_not_asserted() -> None:
    assert found(r"\bassert\s*\(", sorted(CSRC.glob("api*.c"))) == []


def test_memory_comes_from_one_place() -> None:
    allocating = ("malloc", "calloc", "realloc", "free", "aligned_alloc", "posix_memalign")
    copying = ("strdup", "strndup", "asprintf", "alloca")
    others = [path for path in core_files() if path != CSRC / "base" / "memory.c"]
    assert found(calls(*allocating, *copying), others) == []


def test_files_are_opened_in_one_place() -> None:
    names = ("open", "openat", "creat", "fopen", "fdopen", "freopen", "opendir", "tmpfile")
    opening = calls(*names, "mmap", "munmap")
    others = [path for path in core_files() if path != CSRC / "base" / "file.c"]
    assert found(opening, others) == []


def test_libraries_are_opened_in_two_places() -> None:
    openers = (CSRC / "base" / "blas.c", CSRC / "isa" / "devices.c")
    others = [path for path in core_files() if path not in openers]
    assert found(calls("dlopen", "dlsym", "dlmopen"), others) == []
    others = [path for path in core_files() if path != CSRC / "base" / "folder.c"]
    assert found(calls("dladdr"), others) == []


def test_threads_are_made_in_one_place() -> None:
    others = [path for path in core_files() if path != CSRC / "base" / "threads.c"]
    assert found(calls("pthread_create", "thrd_create", "fork"), others) == []
    openmp = re.compile(r'(#\s*pragma\s+|_Pragma\(")omp (?!simd)')
    assert [name_of(path) for path in core_files() if openmp.search(path.read_text())] == []


def test_no_fast_math() -> None:
    for name in ("Makefile", "setup.py", "csrc/core.mk", "cuda/cuda.mk", "cuda/nvcc.py"):
        lines = (ROOT / name).read_text().splitlines()
        flags = " ".join(line for line in lines if not line.lstrip().startswith("#"))
        assert not re.search(r"-ffast.math|-Ofast|-funsafe|-fopenmp(?!-simd)", flags), name


@pytest.mark.parametrize("given", ["-ffast-math", "-Ofast"])
def test_an_inherited_fast_math_does_nothing(given: str) -> None:
    """Neither to what is compiled nor to who loads it; and what undoes it leaves our own flags."""
    planned = run("make", "-n", "-B", f"CFLAGS={given}", "BUILD=build/none", "all")
    lines = [line.split(" -o ")[0] for line in planned.splitlines() if f" {given} " in line]
    compiled = next(line for line in lines if line.endswith(" -MMD -MP -c csrc/base/memory.c"))
    macros = run(*shlex.split(compiled.replace("-MMD -MP -c", "-E -dM")))
    assert "__FAST_MATH__" not in macros and "__FINITE_MATH_ONLY__ 0" in macros
    assert "__NO_MATH_ERRNO__" in macros
    linked = next(line for line in lines if " -shared " in line)
    parts = run("sh", "-c", f"{linked} -### -x c /dev/null 2>&1")
    assert "crtbegin" in parts and "crtfastmath" not in parts


# ---- heads, sizes, left-overs --------------------------------------------------------------------


def test_every_source_names_its_licence() -> None:
    suffixes = (".c", ".h", ".cu", ".cpp", ".py", ".pyi", ".mk")
    sources = [
        p for p in tracked() if p.suffix in suffixes or name_of(p) in ("Makefile", ".ci/run")
    ]
    heads = {name_of(p): "".join(p.read_text().splitlines(keepends=True)[:2]) for p in sources}
    line = "SPDX-License-Identifier: Apache-2.0"
    assert [name for name, head in heads.items() if line not in head] == []


def test_core_files_say_what_they_are() -> None:
    """The SPDX line, an empty one, then `name.c: what it computes` (isa/*.c: which machine)."""
    silent = []
    for path in [*core_files(), *cuda_files()]:
        lines = path.read_text().splitlines()
        if path.parent.name != "isa" and not lines[2].startswith(f" * {path.name}: "):
            silent.append(name_of(path))
    assert silent == []


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("README.md", 120),
        ("setup.py", 120),
        ("relpos/_core.c", 900),
        ("csrc/include/relpos/relpos.h", 400),
    ],
)
def test_small_files_stay_small(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_no_path_of_a_machine() -> None:
    machine = re.compile(r"(?<![\w.])/(home|root|Users|work|opt)/\w")
    places = [
        f"{name_of(path)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        if path.suffix not in (".png", ".svg")
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if machine.search(line)
    ]
    assert places == []


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
    suffixes = (".c", ".h", ".cu", ".cpp", ".py", ".md", ".mk")
    sources = [p for p in tracked() if p.suffix in suffixes]
    assert [name_of(p) for p in sources if marks.search(p.read_text())] == []


def test_tracked_files_are_light() -> None:
    assert [name_of(p) for p in tracked() if p.stat().st_size > 600_000] == []


# ---- guide lines ---------------------------------------------------------------------------------


def c_functions(path: Path) -> Iterator[tuple[int, str]]:
    """(lines, name) of the functions of a C file: those whose signature begins on an unindented
    line, however many it takes, and that close with a brace in the first column. The lines are
    those behind the signature."""
    begin, name = -1, ""
    lines = code(path).splitlines()
    for number, line in enumerate(lines):
        if begin >= 0 and line == "}":
            yield number - begin, name
            begin = -1
        elif begin < 0 and re.search(r"\)\s*\{\s*$", line):
            first = number
            while first > 0 and not re.match(r"\S", lines[first]):
                first -= 1
            head = " ".join(lines[first : number + 1])
            names = re.findall(r"(\w+)\([^()]*(?:\([^()]*\)[^()]*)*\)\s*\{\s*$", head)
            if names and re.match(r"[\w\[][^{};]*\{\s*$", head):
                begin, name = number, names[-1]


def python_functions(path: Path) -> Iterator[tuple[int, str]]:
    """(lines, name) of the functions of a Python file: from the first statement behind signature
    and docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[ast.get_docstring(node) is not None :]
            yield node.end_lineno - body[0].lineno + 1 if body else 0, node.name


def guide_lines() -> list[str]:
    lines = []
    for path in tracked():
        if path.suffix not in (".c", ".h", ".cu", ".cpp", ".py"):
            continue
        size = len(path.read_text().splitlines())
        if size > GUIDE_FILE:
            lines.append(f"{name_of(path)}: {size} lines (guide line {GUIDE_FILE})")
        functions = python_functions if path.suffix == ".py" else c_functions
        for length, name in functions(path):
            if length > GUIDE_FUNCTION:
                lines.append(f"{name_of(path)}: {name} has {length} lines ({GUIDE_FUNCTION})")
    return lines


if __name__ == "__main__":
    print(*guide_lines(), sep="\n")
