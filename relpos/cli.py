# SPDX-License-Identifier: Apache-2.0
"""The command line: `cc program.c $(python -m relpos --cflags --libs)`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from relpos import _core, library


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was asked for: compiler and linker flags on one line, then the rest."""
    parser = argparse.ArgumentParser(
        prog="python -m relpos", description="How to link with libcore, and what it is."
    )
    parser.add_argument("--cflags", action="store_true", help="flags for the C compiler")
    parser.add_argument("--libs", action="store_true", help="flags for the linker")
    parser.add_argument("--version", action="store_true", help="the version")
    parser.add_argument("--build-info", action="store_true", help="the build, as JSON")
    options = parser.parse_args(arguments)
    if not any(vars(options).values()):
        parser.print_help()
        return 2
    flags = []
    try:
        if options.cflags:
            flags.append(library.cflags())
        if options.libs:
            flags.append(library.libs())
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    if flags:
        print(*flags)
    if options.version:
        print(_core.VERSION)
    if options.build_info:
        print(json.dumps(library.build_info(), indent=2))
    return 0
