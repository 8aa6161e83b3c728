# SPDX-License-Identifier: Apache-2.0
"""`relpos translate` and `relpos generate`: what a trained model says."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.cli.arguments import (
    FAILED,
    USAGE,
    add_command,
    add_device,
    add_output,
    add_progress,
    add_threads,
    add_unpickle,
    complain,
    count,
    use_threads,
)
from relpos.warned import warn

if TYPE_CHECKING:
    from relpos.search import Search
    from relpos.translation import Candidate, Translation
    from relpos.translator import Translator

_TRANSLATE_NEXT = """\
relpos translate: which model? The folder that `relpos train` has left, for example

  relpos translate run test.en
  echo "Two dogs run." | relpos translate run

`relpos translate --help` lists the rest."""

_GENERATE_NEXT = """\
relpos generate: which model? The folder of a language model, for example

  relpos train --text train.txt --output run
  echo "Two dogs" | relpos generate run

`relpos generate --help` lists the rest."""

_SECONDS_BETWEEN_LINES = 10.0


def add_commands(commands: Any) -> None:
    _add_translate(commands)
    _add_generate(commands)


# --------------------------------------------------------------------------------------------------
# Options that they share
# --------------------------------------------------------------------------------------------------

# Fields of Search by what they are called here.
_FIELDS = {
    "beam": "beam",
    "n_best": "n_best",
    "penalty": "penalty",
    "alpha": "length_penalty",
    "coverage": "coverage",
    "min_length": "min_length",
    "max_length": "max_length",
    "max_more": "max_more",
    "no_repeat": "no_repeat",
    "sample": "sample",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "seed": "seed",
}


def add_running(command: Any) -> None:
    group = command.add_argument_group("running")
    group.add_argument(
        "--average", type=count, metavar="N", help="the mean of a run's last N checkpoints"
    )
    group.add_argument(
        "--best", action="store_true", help="a run's checkpoint with the best validation"
    )
    add_unpickle(group)
    group.add_argument(
        "--batch-tokens",
        type=count,
        default=2048,
        metavar="N",
        help="source tokens at the same time (2048): fewer take less memory",
    )
    add_threads(group)
    add_device(group)
    add_progress(group, "nothing")


def add_search(command: Any, *, lengths: str, several: str = "", source: bool = True) -> None:
    group = command.add_argument_group("search")
    add = group.add_argument
    add("--beam", type=int, metavar="N", help="hypotheses a line (4); 1: greedy")
    if several:
        add("--n-best", type=int, metavar="N", help=several)
    add(
        "--penalty",
        choices=("wu", "power", "none"),
        help="what divides the log-probability of L tokens: wu, ((5 + L) / 6)^A (the default), "
        "power, L^A, or none",
    )
    add("--length-penalty", type=float, metavar="A", help="that A (0.6); more favours long ones")
    if source:
        add("--coverage", type=float, metavar="B", help="penalty for sources not looked at (0)")
    add("--min-length", type=int, metavar="N", help="tokens, at least (0)")
    add("--max-length", type=int, metavar="N", help=f"tokens, at most ({lengths})")
    add("--max-more", type=int, metavar="N", help="tokens beyond those (50)")
    add("--no-repeat", type=int, metavar="N", help="no N-gram of tokens twice (they may)")
    add("--no-unknown", action="store_true", help="never says the unknown token")


def add_sampling(command: Any, *, choice: bool = True) -> None:
    group = command.add_argument_group("sampling")
    add = group.add_argument
    if choice:
        add("--sample", action="store_true", help="draws at random instead of searching")
    add("--temperature", type=float, metavar="T", help="below 1 more likely, above 1 bolder (1)")
    add("--top-k", type=int, metavar="K", help="from the K most likely tokens (from all)")
    add("--top-p", type=float, metavar="P", help="from the fewest with probability P together (1)")
    add("--seed", type=int, metavar="N", help="of the draws; the same gives the same (0)")


def search_of(options: argparse.Namespace, translator: Translator) -> Search:
    from relpos.search import Search

    given = {
        field: value
        for field, name in _FIELDS.items()
        if (value := getattr(options, name, None)) is not None
    }
    unknown, end = translator.subwords.unknown, translator.subwords.eos
    if options.no_unknown and unknown >= 0 and unknown != end:  # of some vocabularies one token
        given["suppressed"] = (unknown,)
    return Search(**given)


_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_SEARCHING = ("beam", "penalty", "length_penalty", "coverage")
_SAID = ("sample", "n_best", "min_length", "max_length", "max_more", "no_repeat", "no_unknown")
SAYING = (*_SEARCHING, *_SAMPLING, *_SAID)


def refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Options that would do nothing, where they are given."""
    for name in names:
        value = getattr(options, name, None)
        default = options.parser.get_default(name)
        if value is not None and value is not False and value != default:
            raise ValueError(f"--{name.replace('_', '-')}: {why}")


def refuse_of_the_other(options: argparse.Namespace) -> None:
    """Those of a search where --sample draws, and of drawing where it does not."""
    if options.sample:
        refuse(options, _SEARCHING, "is of a search, --sample draws")
    else:
        refuse(options, _SAMPLING, "is of --sample, which is not given")
    _refuse_overruled(options)


def _refuse_overruled(options: argparse.Namespace) -> None:
    """Those to which another one leaves nothing."""
    if options.max_length:
        refuse(options, ("max_more",), "does nothing beside --max-length")
    if options.penalty == "none":
        refuse(options, ("length_penalty",), "is of wu and power, --penalty is none")


def _models_and_files(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Models come first: folders, and files of weights. The rest is text."""
    models = 0
    while models < len(paths) and (
        os.path.isdir(paths[models]) or paths[models].endswith(".safetensors")
    ):
        models += 1
    for path in paths[max(models, 1) :]:
        if os.path.isdir(path):
            raise ValueError(f"{path}: is a folder; models come before files of text")
    if models == 0:  # what is not there is told so where it is looked for
        return [paths[0]], list(paths[1:])
    return list(paths[:models]), list(paths[models:])


def load(models: Sequence[str], options: argparse.Namespace) -> Translator:
    from relpos.translator import Translator

    use_threads(options)
    return Translator.load(
        models, average=options.average, best=options.best, unpickle=options.unpickle,
        batch_tokens=options.batch_tokens, device=options.device, precision=options.precision,
    )  # fmt: skip


def files_of(models: Sequence[str]) -> Iterator[str]:
    """What models are made of, which is not to be written over: weights in use are mapped."""
    from relpos.train.checkpoint import TOKENIZER, checkpoints

    for model in map(Path, models):
        folders = [model, *(each.folder for each in checkpoints(model))] if model.is_dir() else []
        yield str(model)
        for folder in folders:
            yield from map(str, (*folder.glob("*.safetensors"), *folder.glob("*.json")))
        for folder in folders or [model.parent]:
            yield from map(str, (folder / TOKENIZER).rglob("*.*"))


@contextmanager
def shown(kind: str, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Tells how many lines are done: a bar on terminals, lines where they are asked for.

    quiet: the terminal is needed for other things.
    """
    bar = None
    if kind == "bar" or (kind == "auto" and sys.stderr.isatty() and not quiet):
        try:
            bar = importlib.import_module("tqdm").tqdm(unit=" lines", dynamic_ncols=True)
        except ImportError:
            kind = "lines"
    told = time.monotonic()

    def show(done: int) -> None:
        nonlocal told
        if bar is not None:
            bar.update(done - bar.n)
        elif kind == "lines" and time.monotonic() - told >= _SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            complain(f"{done:,} lines")

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


def _talks(options: argparse.Namespace, files: Sequence[str]) -> bool:
    """Whether the terminal shows what comes in or out."""
    return _asks(files) or (options.output is None and sys.stdout.isatty())


def _asks(files: Sequence[str]) -> bool:
    """Whether lines are read from a terminal."""
    return (not files or "-" in files) and sys.stdin.isatty()


def _say_if_it_asks(options: argparse.Namespace, files: Sequence[str]) -> None:
    if _asks(files) and options.progress != "none":
        complain("reading lines from the terminal, to Ctrl-D")


# --------------------------------------------------------------------------------------------------
# translate
# --------------------------------------------------------------------------------------------------


def _add_translate(commands: Any) -> None:
    command = add_command(
        commands,
        "translate",
        "translate text, line by line",
        "MODEL is the folder of a run, whose newest checkpoint translates, of one checkpoint or of\n"
        "a mean, or a file of weights with its vocabulary beside it; several are an ensemble. FILE\n"
        "is UTF-8 with a sentence a line, plain or gzip; without one, standard input is read, and\n"
        "answered as it arrives. An empty line gives an empty line. A line that is too long is cut,\n"
        "and one that cannot be translated is empty; both are told by their number.",
        _translate,
        usage="relpos translate MODEL... [FILE...] [options]",
    )
    command.add_argument("paths", nargs="*", metavar="MODEL, FILE", help="models, then text")
    add_output(command)
    add_search(
        command,
        several="so many results a line, best first, as number, text and score",
        lengths="those of the source and --max-more",
    )
    add_sampling(command)
    group = command.add_argument_group("more than text")
    group.add_argument("--prefix", metavar="FILE", help="what each translation begins with")
    group.add_argument(
        "--target", metavar="FILE", help="translations to be scored or aligned instead of made"
    )
    group.add_argument(
        "--score", action="store_true", help="a column with the score; of --target, log p"
    )
    group.add_argument(
        "--align",
        action="store_true",
        help="a column with the links of words, as 0-0 1-2 (source-target, from 0)",
    )
    group.add_argument(
        "--align-layer", type=int, metavar="N", help="layer of the links (-1: the last)"
    )
    group.add_argument(
        "--align-head", type=int, metavar="N", help="its head, from 0 (the mean of all)"
    )
    add_running(command)


def _translate(options: argparse.Namespace) -> int:
    if not options.paths:
        complain(_TRANSLATE_NEXT)
        return USAGE
    from relpos.cli.lines import STANDARD, lines_in, windows_of, written
    from relpos.translator import WINDOW

    if options.target is not None:
        refuse(options, (*SAYING, "prefix"), "--target says what is said")
    refuse_of_the_other(options)
    if not options.align:
        refuse(options, ("align_layer", "align_head"), "is of --align, which is not given")
    layer = -1 if options.align_layer is None else options.align_layer
    models, files = _models_and_files(options.paths)
    for file in (*files, *filter(None, (options.prefix, options.target))):
        if file != "-":
            os.stat(file)  # before the model is loaded
    if "-" in (options.prefix, options.target) and (not files or "-" in files):
        raise ValueError("--prefix, --target: standard input is the text already")
    translator = load(models, options)
    if translator.generates:
        raise ValueError("this model has no encoder, it goes on from text: relpos generate")
    search = search_of(options, translator)
    _say_if_it_asks(options, files)
    if options.target is not None:
        return _with_targets(options, translator, models, files, layer)
    align = (layer, options.align_head) if options.align else None
    prefixes = None if options.prefix is None else lines_in([options.prefix])
    bad = Bad()
    failed = False
    inputs = chain(files or (STANDARD,), filter(None, [options.prefix]), files_of(models))
    with (
        written(options.output, inputs) as write,
        shown(options.progress, quiet=_talks(options, files)) as tell,
    ):
        for each in translator.in_windows(
            windows_of(files, WINDOW, bad), search=search, prefixes=prefixes, align=align,
            progress=tell,
        ):  # fmt: skip
            failed |= each.failed
            for line in _lines_of(each, options):
                write(line)
    return FAILED if failed or bad.seen else 0


class Bad:
    """Warns of lines that cannot be read, so that the others are answered. seen: bool."""

    seen = False

    def __call__(self, said: str) -> str:
        from relpos.translation import TranslationWarning

        self.seen = True
        warn(f"{said}: an empty line instead", TranslationWarning)
        return _Unread()


class _Unread(str):
    """An empty line that stands for one that cannot be read."""


def _noting(windows: Iterator[list[str]], unread: set[int]) -> Iterator[list[str]]:
    """The windows as they are; the numbers of lines that cannot be read go into `unread`."""
    read = 0
    for window in windows:
        unread.update(i for i, x in enumerate(window, read + 1) if isinstance(x, _Unread))
        read += len(window)
        yield window


def _lines_of(translation: Translation, options: argparse.Namespace) -> list[str]:
    """What is written of a translation: a line, or one for each of its n best."""
    number = None if options.n_best is None else translation.line
    found = translation.n_best or (None,)
    return [_columns(each, number, options) for each in (found[:1] if number is None else found)]


def _columns(candidate: Candidate | None, number: int | None, options: argparse.Namespace) -> str:
    """Empty ones where there is no candidate."""
    from relpos.cli.lines import one_line

    columns = [] if number is None else [str(number)]
    columns.append(one_line(candidate.text) if candidate else "")
    if number is not None or options.score:
        columns.append(f"{candidate.score:.4f}" if candidate else "")
    if options.align:
        columns.append(candidate.pharaoh if candidate else "")
    return "\t".join(columns)


def _with_targets(
    options: argparse.Namespace,
    translator: Translator,
    models: Sequence[str],
    files: Sequence[str],
    layer: int,
) -> int:
    """Scores, links or both of targets that are given, a line each."""
    from relpos.cli.lines import STANDARD, lines_in, uneven, written

    sources, targets = lines_in(files), lines_in([options.target])
    if len(sources) != len(targets):
        name = ", ".join(files) or "standard input"
        raise uneven(name, len(sources), options.target, len(targets))
    columns: list[list[str]] = [[] for _ in targets]
    failed = False
    inputs = chain(files or (STANDARD,), (options.target,), files_of(models))
    with (
        written(options.output, inputs) as write,
        shown(options.progress, quiet=_talks(options, files)) as tell,
    ):
        if options.score or not options.align:
            scores = translator.score(sources, targets, progress=tell)
            failed = any(each.failed for each in scores)
            for column, each in zip(columns, scores, strict=True):
                there = each.source_tokens > 0 and not each.failed  # none gives an empty line
                column.append(f"{each.log_probability:.4f}" if there else "")
        if options.align:
            links = translator.align(sources, targets, layer=layer, head=options.align_head)
            failed |= any(each.failed for each in links)
            for column, link in zip(columns, links, strict=True):
                column.append(link.pharaoh)
        for column in columns:
            write("\t".join(column))
    return FAILED if failed else 0


# --------------------------------------------------------------------------------------------------
# generate
# --------------------------------------------------------------------------------------------------


def _add_generate(commands: Any) -> None:
    command = add_command(
        commands,
        "generate",
        "go on from text with a language model",
        "MODEL is that of a decoder alone, named as for `relpos translate`. Each line of FILE, or of\n"
        "standard input, is a beginning, which it goes on from; from an empty one it begins by\n"
        "itself. It draws at random, the same each time for the same seed, or searches: --beam.",
        _generate,
        usage="relpos generate MODEL... [FILE...] [options]",
    )
    command.add_argument("paths", nargs="*", metavar="MODEL, FILE", help="models, then beginnings")
    add_output(command)
    add_sampling(command, choice=False)
    add_search(
        command,
        several="so many draws or results a line, as number, text and score",
        lengths="those of the beginning and --max-more",
        source=False,
    )
    add_running(command)


def _generate(options: argparse.Namespace) -> int:
    if not options.paths:
        complain(_GENERATE_NEXT)
        return USAGE
    from relpos.cli.lines import STANDARD, windows_of, written
    from relpos.translation import Translation
    from relpos.translator import WINDOW

    if options.beam is None:
        refuse(options, _SEARCHING, "is of a search: --beam")
    else:
        refuse(options, _SAMPLING, "is of draws, --beam searches")
    _refuse_overruled(options)
    models, files = _models_and_files(options.paths)
    for file in files:
        if file != "-":
            os.stat(file)
    translator = load(models, options)
    if not translator.generates:
        raise ValueError("this model has an encoder, it translates: relpos translate")
    options.sample = options.beam is None
    options.score = options.align = False
    search = search_of(options, translator)
    _say_if_it_asks(options, files)
    bad, unread = Bad(), set[int]()
    failed = False
    with (
        written(options.output, chain(files or (STANDARD,), files_of(models))) as write,
        shown(options.progress, quiet=_talks(options, files)) as tell,
    ):
        windows = _noting(windows_of(files, WINDOW, bad), unread)
        for each in translator.in_windows(windows, search=search, progress=tell):
            # It goes on from an empty line, and from one that cannot be read says nothing.
            said = Translation(each.line) if each.line in unread else each
            failed |= said.failed
            for line in _lines_of(said, options):
                write(line)
    return FAILED if failed or bad.seen else 0
