# SPDX-License-Identifier: Apache-2.0
"""`relpos align`: which words belong together, of sentences and their translations."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

from relpos.cli.arguments import FAILED, USAGE, add_command, add_output, complain
from relpos.cli.decoding import add_running, files_of, load, shown

_NEXT = """\
relpos align: what is missing is {missing}. For example

  relpos align run --source test.en --target test.de

`relpos align --help` lists the rest."""

_LEAST = 0.01  # that is written of --soft


def add_commands(commands: Any) -> None:
    command = add_command(
        commands,
        "align",
        "link the words of sentences with those of their translations",
        "Writes a line for each pair of lines, the links of words in Pharaoh's format: 0-0 1-2 links\n"
        "the first word of the source with the first of the target, and the second with the third.\n"
        "Every token of the target is linked to the source token that the decoder looks at most when\n"
        "it says it; links are those of their words.\n"
        "An empty line gives an empty line. Files are read side by side and answered as they arrive.",
        _align,
        usage="relpos align MODEL... --source FILE --target FILE [options]",
    )
    command.add_argument("models", nargs="*", metavar="MODEL", help="as for `relpos translate`")
    command.add_argument("--source", metavar="FILE", help="sentences, - for standard input")
    command.add_argument("--target", metavar="FILE", help="their translations, as many lines")
    add_output(command)
    group = command.add_argument_group("which attention")
    group.add_argument(
        "--layer",
        type=int,
        nargs="+",
        default=[-1],
        metavar="N",
        help="layers of the decoder, whose mean is taken (-1: the last)",
    )
    group.add_argument(
        "--heads",
        type=int,
        nargs="+",
        metavar="N",
        help="heads of these layers, from 0, whose mean is taken (all)",
    )
    group.add_argument(
        "--soft",
        type=_share,
        nargs="?",
        const=_LEAST,
        metavar="P",
        help=f"0-0:0.981, every pair of words with its weight, from P on ({_LEAST})",
    )
    add_running(command)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, got {text}")
    return value


def _align(options: argparse.Namespace) -> int:
    there = (
        ("a model", options.models),
        ("--source", options.source),
        ("--target", options.target),
    )
    missing = [name for name, given in there if not given]
    if missing:
        complain(_NEXT.format(missing=" and ".join(missing)))
        return USAGE
    from relpos.cli.lines import STANDARD, written

    files = (options.source, options.target)
    if files == (STANDARD, STANDARD):
        raise ValueError("--target: standard input is --source already")
    for file in files:
        if file != STANDARD:
            os.stat(file)  # before the model is loaded
    translator = load(options.models, options)
    failed = False
    quiet = options.output is None and sys.stdout.isatty()
    with (
        written(options.output, chain(files, files_of(options.models))) as write,
        shown(options.progress, quiet=quiet) as tell,
    ):
        for each in translator.align_in_windows(
            _side_by_side(*files), layer=options.layer, head=options.heads, progress=tell
        ):
            failed |= each.failed
            write(each.pharaoh if options.soft is None else each.weighted(options.soft))
    return FAILED if failed else 0


def _side_by_side(source: str, target: str) -> Iterator[tuple[list[str], list[str]]]:
    """Lines of both files, as many of one as of the other, as they arrive."""
    from relpos.cli.lines import uneven, windows_of
    from relpos.translator import WINDOW

    files = [windows_of([source], WINDOW), windows_of([target], WINDOW)]
    left: list[list[str]] = [[], []]  # what has come, and the other file has not got to
    read = 0
    while True:
        for side, windows in enumerate(files):
            left[side] = left[side] or next(windows, [])
        most = min(map(len, left))
        if most == 0:
            break
        yield left[0][:most], left[1][:most]
        read += most
        left = [lines[most:] for lines in left]
    sources, targets = (
        read + len(lines) + sum(map(len, windows))
        for lines, windows in zip(left, files, strict=True)
    )
    if sources != targets:
        raise uneven(source, sources, target, targets)
