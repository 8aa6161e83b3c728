# SPDX-License-Identifier: Apache-2.0
"""The command line: `relpos train`, `relpos translate` and the rest.

    cc program.c $(python -m relpos --cflags --libs)

A sub-command imports what it needs when it runs, so that flags are printed at once.

    arguments.py    what the commands share
    training.py     demo, train, average, plot
    told.py         what a run of training is told, by files and by the command line
    decoding.py     translate, generate
    aligning.py     align
    evaluating.py   evaluate
    inspecting.py   inspect
    lines.py        lines in, lines out
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from relpos import _core, library
from relpos.cli import aligning, decoding, evaluating, inspecting, training
from relpos.cli.arguments import FAILED, INTERRUPTED, USAGE, Run, add_command, complain, flush

_DESCRIPTION = """\
Trains Transformers with relative positions, translates, and tells how to link with libcore.

  relpos demo                                     see it work, in about a minute
  relpos train --source train.en --target train.de --output run
  relpos translate run test.en                    a translation for each line
  relpos generate run                             goes on from a beginning: language models
  relpos evaluate run --source test.en --reference test.de
  relpos align run --source test.en --target test.de
  relpos inspect run --source "Two dogs run." --out maps.html
  relpos average run                              the mean of its last checkpoints
  relpos plot run                                 its curves
  relpos devices                                  the CPU and the GPUs here
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; what goes wrong is a sentence on standard error and a status of 1."""
    _prepare_streams()
    try:
        options = _parse(arguments)
    except SystemExit as left:  # after --help, or what cannot be read
        if not _flushed(tell=not left.code) and not left.code:
            return FAILED
        raise
    status = _run(options)
    return status if _flushed(tell=status == 0) else status or FAILED


def _run(options: argparse.Namespace) -> int:
    run: Run = options.run
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return run(options)
        except KeyboardInterrupt:
            complain("relpos: interrupted")
            return INTERRUPTED
        except BrokenPipeError:  # whoever read the output has gone
            return FAILED
        except (OSError, ValueError, TypeError, RuntimeError, ImportError, MemoryError) as error:
            complain(f"relpos: {_sentence(error, options)}")
            return FAILED


def _flushed(*, tell: bool) -> bool:
    """Whether all that was printed is written. A standard error that is full, or has lost its reader,
    is no failure."""
    error = _drained(sys.stdout)
    if error and tell and not isinstance(error, BrokenPipeError):
        complain(f"relpos: standard output: {error.strerror}")
    _drained(sys.stderr)
    return error is None


def _drained(stream: IO[str]) -> OSError | None:
    """Why not all that is buffered is written. What is not is not tried again at exit, where Python
    would tell of it in words of its own, and with another status."""
    try:
        flush(stream)
    except OSError as error:
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        return error
    return None


def _prepare_streams() -> None:
    """Makes the standard streams safe to use, however the shell has left them."""
    # A closed one is None here, and the next file to be opened would get its number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    # A letter that the terminal has no code for is no reason to end after an hour's work.
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.errors == "strict":
        out.reconfigure(errors="backslashreplace")


# What the package calls otherwise than the command line does; `config` is no file there.
_OPTIONS = {
    "alpha": ("length-penalty",), "config": (), "folder": ("output",),
    "head": ("head", "heads", "align-head"), "layer": ("layer", "align-layer"),
    "prefixes": ("prefix",), "references": ("reference",), "sources": ("source",),
    "targets": ("target",), "texts": ("text",), "translations": ("hypothesis",),
}  # fmt: skip


def _sentence(error: Exception, options: argparse.Namespace) -> str:
    """What went wrong; an argument is named as the option that gave it, if there is one."""
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}"
    sentence = str(error) or type(error).__name__
    found = re.match(r"(\w+)(?:\[(\d+)\])?(?=: | is )", sentence)
    if found is None:
        return sentence
    name, number = found.groups()
    which = "" if number is None else f", number {int(number) + 1}"  # of several that were given
    command = getattr(options, "parser", None)
    known = () if command is None else command._option_string_actions
    for each in _OPTIONS.get(name, (name.replace("_", "-"),)):
        if f"--{each}" in known and name not in _values(options):
            return f"--{each}{which}{sentence[found.end() :]}"
    return sentence


def _values(options: argparse.Namespace) -> set[str]:
    """All that was given: a file may be called as an option is."""
    several = (x if isinstance(x, list) else [x] for x in vars(options).values())
    return {str(each) for values in several for each in values}


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    complain(f"relpos: warning: {message}")


# --------------------------------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------------------------------


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; what a command does not know is told with that command's usage."""
    parser = _make_parser()
    options, unknown = parser.parse_known_args(arguments)
    words = unknown[: unknown.index("--")] if "--" in unknown else unknown
    if not any(word.startswith("-") and word != "-" for word in words):
        unknown = [*words, *unknown[len(words) + 1 :]]
        # Of models and files argparse takes those alone that stand together: `run --beam 1 test.en`.
        for name in ("paths", "models", "runs"):
            if hasattr(options, name):
                setattr(options, name, [*getattr(options, name), *unknown])
                unknown = []
    if unknown:
        of: argparse.ArgumentParser = getattr(options, "parser", parser)
        of.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown, options, of)}")
    return options


def _hint(unknown: Sequence[str], options: argparse.Namespace, of: argparse.ArgumentParser) -> str:
    """What may have been meant by what a command does not know."""
    name, equals, value = unknown[0].partition("=")
    if not name.startswith("-"):
        return f" (the folder is --output {name})" if getattr(options, "resume", False) else ""
    fields = dict(_core.config_default()) if hasattr(options, "set") else {}
    as_options = {f"--{field.replace('_', '-')}": field for field in fields}
    known, name = of._option_string_actions, name.replace("_", "-")
    near = difflib.get_close_matches(name, [*known, *as_options], 1)
    if not near:
        return ""
    if near[0] in known:
        return f" (the nearest is {near[0]})"
    nearest = "" if near[0] == name else "the nearest is "
    if not equals:
        value = unknown[1] if unknown[1:] and not unknown[1].startswith("--") else "VALUE"
    return f" ({nearest}a field of the configuration: --set {as_options[near[0]]}={value})"


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="relpos",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=lambda options: _about(options, parser))
    parser.add_argument("--cflags", action="store_true", help="flags for the C compiler")
    parser.add_argument("--libs", action="store_true", help="flags for the linker")
    parser.add_argument("--version", action="store_true", help="the version")
    parser.add_argument("--build-info", action="store_true", help="the build, as JSON")
    commands = parser.add_subparsers(title="commands", metavar="command")
    training.add_commands(commands)
    decoding.add_commands(commands)
    evaluating.add_commands(commands)
    aligning.add_commands(commands)
    inspecting.add_commands(commands)
    add_command(
        commands,
        "devices",
        "list the CPU and the GPUs here",
        "Names are what --device takes. A line that ends in a sentence cannot be used: it says why.",
        _devices,
    )
    return parser


# --------------------------------------------------------------------------------------------------
# About the build
# --------------------------------------------------------------------------------------------------


def _about(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Compiler and linker flags on one line, then the rest."""
    if not (options.cflags or options.libs or options.version or options.build_info):
        parser.print_help()
        return USAGE
    flags = []
    if options.cflags:
        flags.append(library.cflags())
    if options.libs:
        flags.append(library.libs())
    if flags:
        print(*flags)
    if options.version:
        print(_core.VERSION)
    if options.build_info:
        print(json.dumps(library.build_info(), indent=2))
    return 0


def _devices(options: argparse.Namespace) -> int:
    for device in library.devices():
        words = [f"{device.name:<8}", device.title]
        if device.memory:
            free, all_of_it = (n / 2**30 for n in (device.memory_free, device.memory))
            known = f"{free:.1f} of {all_of_it:.1f} GiB free" if free else f"{all_of_it:.1f} GiB"
            words.append(known)
        if device.problem:
            words.append(f"cannot be used: {device.problem}")
        print("  ".join(word for word in words if word))
    return 0
