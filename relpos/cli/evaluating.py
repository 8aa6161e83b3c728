# SPDX-License-Identifier: Apache-2.0
"""`relpos evaluate`: how good a model is, or a translation that is there."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.cli.arguments import FAILED, USAGE, add_command, complain
from relpos.cli.decoding import (
    SAYING,
    add_running,
    add_sampling,
    add_search,
    files_of,
    load,
    refuse,
    refuse_of_the_other,
    search_of,
    shown,
)

if TYPE_CHECKING:
    from relpos.evaluation import Evaluation, TextEvaluation

_EVALUATE_NEXT = """\
relpos evaluate: what is missing is {missing}. To translate and compare,

  relpos evaluate run --source test.en --reference test.de

and to compare a translation that is there,

  relpos evaluate --hypothesis output.de --reference test.de

and what a language model thinks of a text

  relpos evaluate run --text test.txt

`relpos evaluate --help` lists the rest."""


_OF_MODELS = ("average", "best", "batch_tokens", "threads", "device", "precision")


def add_commands(commands: Any) -> None:
    command = add_command(
        commands,
        "evaluate",
        "BLEU, chrF and perplexity of a model, or of a translation that is there",
        "Translates --source and compares with --reference. BLEU and chrF are sacrebleu's, with\n"
        "their signatures; perplexity and accuracy are those of the reference's tokens, each given\n"
        "the ones before it. BLEU by the length of the source tells what becomes of long sentences.\n"
        "With --text: perplexity and accuracy of a language model, and by the place in a line.",
        _evaluate,
        usage="relpos evaluate [MODEL...] --source FILE --reference FILE [options]",
    )
    command.add_argument("models", nargs="*", metavar="MODEL", help="as for `relpos translate`")
    data = command.add_argument_group("data")
    data.add_argument("--source", metavar="FILE", help="what is translated")
    data.add_argument(
        "--reference", nargs="+", default=[], metavar="FILE", help="how it should be; or several"
    )
    data.add_argument(
        "--hypothesis", metavar="FILE", help="a translation that is there, instead of a new one"
    )
    data.add_argument(
        "--text", metavar="FILE", help="for a language model: the lines that it is scored on"
    )
    scores = command.add_argument_group("scores")
    scores.add_argument("--lowercase", action="store_true", help="BLEU of lower case beside it")
    scores.add_argument(
        "--tokenize", default="13a", metavar="KIND", help="of BLEU: 13a, intl, char, none... (13a)"
    )
    scores.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N,...",
        help="where ranges of words of the source end (10,20,30,40,50), or of places in a line of "
        "--text (8,16,32,64,...)",
    )
    scores.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="a picture of BLEU by length, or of --text by place",
    )
    scores.add_argument("--json", action="store_true", help="all of it as JSON")
    command.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where the translations go (nowhere)"
    )
    add_search(command, lengths="those of the source and --max-more")
    add_sampling(command)
    add_running(command)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        ends = tuple(int(part) for part in text.split(","))
    except ValueError:
        ends = (0,)
    if sorted(set(ends)) != list(ends) or ends[0] < 1:
        raise argparse.ArgumentTypeError(f"expected rising numbers from 1 on, got {text}")
    return ends


def _evaluate(options: argparse.Namespace) -> int:
    if options.text is not None:
        return _evaluate_text(options)
    if options.models and options.hypothesis is not None:
        complain("relpos evaluate: give a model or --hypothesis, not both")
        return USAGE
    missing = []
    if not options.models and options.hypothesis is None:
        missing.append("a model, or --hypothesis" + ("" if options.reference else ","))
    elif options.models and options.source is None:
        missing.append("--source")
    if not options.reference:
        missing.append("--reference")
    if missing:
        complain(_EVALUATE_NEXT.format(missing=" and ".join(missing)))
        return USAGE
    if options.hypothesis is not None:
        refuse(options, (*SAYING, *_OF_MODELS, "output"), "--hypothesis says what is said")
    if options.source is None:
        refuse(options, ("lengths", "plot"), "is of --source's lengths, and --source is not given")
    refuse_of_the_other(options)
    if options.output == Path("-"):
        raise ValueError("--output: expected a file, got -: standard output has the scores")
    from relpos import evaluation
    from relpos.cli.lines import STANDARD, lines_in, one_line, written

    texts = (*filter(None, (options.source, options.hypothesis)), *options.reference)
    if texts.count(STANDARD) > 1:
        raise ValueError("--source, --reference, --hypothesis: standard input is one of them alone")
    evaluation.check_asked(options.tokenize, options.plot)
    references = [lines_in([file]) for file in options.reference]
    sources = None if options.source is None else lines_in([options.source])
    inputs = chain(texts, files_of(options.models))
    failed, translator, search = False, None, None
    if options.hypothesis is None:
        assert sources is not None
        evaluation.check_counts(references, sources=sources)
        translator = load(options.models, options)
        if translator.generates:
            raise ValueError(
                "this model has no encoder, there is nothing to compare; --text FILE is for it"
            )
        search = search_of(options, translator)
    with nullcontext() if options.output is None else written(options.output, inputs) as write:
        if translator is None:
            said = lines_in([options.hypothesis])
        else:
            assert sources is not None
            with shown(options.progress, quiet=False) as tell:
                found = translator.translate_all(sources, search=search, progress=tell)
            failed = any(each.failed for each in found)
            said = [one_line(each.text) for each in found]
        if write is not None:
            for line in said:
                write(line)
    result = evaluation.evaluate(
        said, references, sources, translator=translator,
        lowercase=options.lowercase, tokenize=options.tokenize,
        lengths=options.lengths or evaluation.LENGTHS,
    )  # fmt: skip
    _tell(result, options)
    return FAILED if failed else 0


def _evaluate_text(options: argparse.Namespace) -> int:
    """A language model, on text that is there."""
    if not options.models:
        complain(_EVALUATE_NEXT.format(missing="a model"))
        return USAGE
    others = ("source", "reference", "hypothesis", *SAYING, "lowercase", "tokenize", "output")
    refuse(options, others, "is of translations, --text of what a language model thinks")
    from relpos import evaluation
    from relpos.cli.lines import lines_in

    evaluation.check_picture(options.plot)
    lines = lines_in([options.text])
    translator = load(options.models, options)
    if not translator.generates:
        raise ValueError("--text: this model has an encoder; give --source and --reference")
    with shown(options.progress, quiet=False) as tell:
        result = evaluation.evaluate_text(
            translator, lines, places=options.lengths or evaluation.PLACES, progress=tell
        )
    _tell(result, options)
    return FAILED if result.failed else 0


def _tell(result: Evaluation | TextEvaluation, options: argparse.Namespace) -> None:
    from relpos import evaluation

    if options.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        print(result)
    if options.plot is not None:
        evaluation.plot(result, options.plot)
