# SPDX-License-Identifier: Apache-2.0
"""One name for all that is built and run here, committed or not: what has been measured, or has
passed, is known again by it where a copy of the tree came without its history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".ci", "benchmarks", "csrc", "cuda", "relpos", "tests")
FILES = ("Makefile", "pyproject.toml", "setup.py")
MADE = ("__pycache__", "benchmarks/results", "relpos/include", "relpos/lib")
MADE_SUFFIXES = (".a", ".o", ".pyc", ".so")


def sources(root: Path) -> Iterator[Path]:
    """Without what building and measuring have left there."""
    yield from (root / name for name in FILES)
    for path in sorted(path for name in FOLDERS for path in (root / name).rglob("*")):
        made = any(name in path.relative_to(root).as_posix() for name in MADE)
        if path.is_file() and not made and path.suffix not in MADE_SUFFIXES:
            yield path


def digest(root: Path = ROOT) -> str:
    found = hashlib.sha256()
    for path in sources(root):
        text = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return found.hexdigest()[:16]
