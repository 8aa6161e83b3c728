# SPDX-License-Identifier: Apache-2.0
"""`relpos demo`, `relpos train`, and what looks after a run: `average` and `plot`."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.cli.arguments import (
    INTERRUPTED,
    USAGE,
    add_command,
    add_device,
    add_progress,
    add_threads,
    complain,
    count,
    seed,
    use_threads,
)
from relpos.cli.told import COMPUTED, KINDS, LOOP, RUN_FILE, SUBWORDS, Told, keep, told

if TYPE_CHECKING:
    from relpos.config import Config

_TRAIN_NEXT = """\
relpos train: what to train on? For a translation model, for example

  relpos train --source train.en --target train.de \\
      --validation-source valid.en --validation-target valid.de --output run

and for a language model, a decoder alone,

  relpos train --text train.txt --output run

`relpos train --help` lists the rest."""


def add_commands(commands: Any) -> None:
    _add_demo(commands)
    _add_train(commands)
    _add_average(commands)
    _add_plot(commands)


# --------------------------------------------------------------------------------------------------
# demo
# --------------------------------------------------------------------------------------------------


def _add_demo(commands: Any) -> None:
    command = add_command(
        commands,
        "demo",
        "learn to translate the names of numbers, in about a minute",
        "From English to German, up to 10^36. Nothing is downloaded: the sentences are made by\n"
        "rule, so that each translation is exactly right or wrong. Numbers of the test were never\n"
        "trained on; half of them are longer than any that was.",
        _demo,
    )
    command.add_argument(
        "--compare",
        action="store_true",
        help="then train the same model with sinusoidal positions instead of relative ones",
    )
    command.add_argument("--seed", type=seed, default=1, metavar="N", help="of everything (1)")
    command.add_argument(
        "--steps", type=count, default=1600, metavar="N", help="updates of training (1600)"
    )
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("relpos-demo"),
        metavar="DIR",
        help="where weights and a picture of attention go (relpos-demo)",
    )
    add_threads(command)
    add_progress(command)


def _demo(options: argparse.Namespace) -> int:
    from relpos import demo

    use_threads(options)
    demo.run(
        steps=options.steps,
        seed=options.seed,
        compare=options.compare,
        output=options.output,
        progress=options.progress,
    )
    return 0


# --------------------------------------------------------------------------------------------------
# train
# --------------------------------------------------------------------------------------------------


def _add_train(commands: Any) -> None:
    command = add_command(
        commands,
        "train",
        "train a model on text files",
        "Text is UTF-8 with a sentence a line, plain or gzip. It gets a vocabulary of subwords and\n"
        "is tokenised once; both are kept in the run's folder, with checkpoints and the log. Ctrl-C\n"
        "finishes the step, saves and leaves; a second one leaves at once. `--resume --output DIR`\n"
        "alone goes on bit for bit.",
        _train,
        usage="relpos train --source FILE --target FILE [--output DIR] [options]\n"
        "       relpos train --resume [--output DIR] [options]",
    )
    data = command.add_argument_group("data")
    for name, what in (
        ("source", "sentences for the encoder"),
        ("target", "their translations, line by line"),
        ("text", "sentences for a decoder alone, instead of the two"),
        ("validation-source", "--source of validation"),
        ("validation-target", "--target of validation"),
        ("validation-text", "--text of validation"),
    ):
        data.add_argument(f"--{name}", nargs="+", metavar="FILE", help=what)
    data.add_argument(
        "--subwords",
        metavar="KIND",
        help="bpe or unigram of sentencepiece, words, or a vocabulary that is there, its folder or a\n"
        "sentencepiece model (bpe)",
    )
    data.add_argument(
        "--vocabulary",
        type=count,
        metavar="N",
        help="tokens of a new one (the preset's, or as many as the text has)",
    )
    data.add_argument(
        "--separate",
        action="store_true",
        help="new ones for source and target, of --vocabulary tokens each; embeddings are not shared",
    )
    model = command.add_argument_group("model")
    model.add_argument(
        "--preset",
        metavar="NAME",
        help="the configuration to change (small, of --text small-language, or that of the run that\n"
        "--resume goes on with); see --list-presets",
    )
    model.add_argument(
        "--start",
        metavar="MODEL",
        help="a run, checkpoint or file of weights whose weights and vocabulary to begin with, and\n"
        "whose configuration, where no preset is named",
    )
    model.add_argument(
        "--list-presets", action="store_true", help="their names and sizes, and no training"
    )
    model.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML: preset, start, fields of the configuration, and tables [data] and [train] with the\n"
        "options of data and of training",
    )
    model.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of the configuration, as --set encoder.k=8; may be repeated",
    )
    model.add_argument(
        "--seed", type=seed, metavar="N", help="of weights, dropout, order and splits (1)"
    )
    loop = command.add_argument_group("training")
    for name, (check, letter, what) in LOOP.items():
        loop.add_argument(f"--{name.replace('_', '-')}", type=check, metavar=letter, help=what)
    loop.add_argument(
        "--validate-bleu",
        action="store_true",
        help="translate the validation data at each validation: BLEU, greedily",
    )
    run = command.add_argument_group("run")
    run.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="the run's folder (run)",
    )
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on from its newest checkpoint, if there is one; where no text is named, with all that\n"
        "the run was told before",
    )
    run.add_argument("--recompute", action="store_true", help="less memory, more time")
    run.add_argument(
        "--profile",
        action="store_true",
        help="at the end, a table of where the time went, by operation and kind of layer",
    )
    run.add_argument(
        "--tensorboard", action="store_true", help="event files for TensorBoard, in DIR/events"
    )
    add_threads(run)
    add_device(run)
    add_progress(run)
    command.set_defaults(**dict.fromkeys((*COMPUTED, "separate")))  # None: not given


def _train(options: argparse.Namespace) -> int:
    if options.list_presets:
        from relpos.config import Config

        for name in Config.presets():
            print(f"{name:<24}  {_of_preset(Config.preset(name))}")
        return 0
    what = told(options)
    if ("source" in what.data) != ("target" in what.data):
        missing = "--target" if "source" in what.data else "--source"
        complain(f"relpos train: {missing} is missing: a file of translations")
        return USAGE
    if what.pairs and "text" in what.data:
        complain("relpos train: give --source and --target, or --text")
        return USAGE
    if not what.pairs and "text" not in what.data:
        if options.resume:
            own = what.output / RUN_FILE
            why = f"{own}: names no text" if own.is_file() else f"{what.output}: no {RUN_FILE} here"
            complain(
                f"relpos train: {why} to go on with; a run begun from Python goes on where the text "
                "is named beside --resume"
            )
        complain(_TRAIN_NEXT)
        return USAGE
    return _train_on(options, what)


def _of_preset(config: Config) -> str:
    layers, stack = f"{config.encoder.layers} + {config.decoder.layers} layers", config.encoder
    return (
        f"{layers}, width {config.width}, "
        f"{stack.absolute if stack.position == 'none' else stack.position}, "
        f"{config.target_vocabulary:,} tokens, dropout {config.dropout:.1f}, {config.steps:,} steps"
    )


def _train_on(options: argparse.Namespace, what: Told) -> int:
    use_threads(options)

    from relpos import data
    from relpos.profiling import profile
    from relpos.train.ending import leaving_at_the_second_signal
    from relpos.train.trainer import Trainer

    _check_model(what)
    text, validation = _texts(what)
    trainer = Trainer(
        what.config, text,
        folder=what.output, validation=validation, start=what.start, resume=options.resume,
        subwords=_subwords(what, text), seed=what.config.seed, progress=options.progress, **what.loop,
    )  # fmt: skip
    with trainer._alone():  # another run, at work there or ended, keeps its file
        keep(what)
    say = print if options.progress != "none" else lambda *_: None
    unknown = trainer.unknown
    strange = f", {unknown:.2%} of all tokens unknown to them" if unknown > 0 else ""
    both = isinstance(trainer.subwords, data.Sides)
    sizes = [data.of_side(trainer.subwords, "source").size] if both else []
    sizes.append(trainer.subwords.size)
    say(f"{trainer.report}, {' and '.join(f'{x:,}' for x in sizes)} subwords{strange}")
    if trainer.validation_report is not None:
        say(f"validation: {trainer.validation_report}")
    numbers = sum(array.size for array in trainer.model.parameters.values())
    say(f"{numbers:,} weights: {trainer.config!r}")
    if trainer.resumed is not None:
        say(f"going on from {trainer.resumed.folder}")
    if trainer.started is not None:
        say(f"beginning with {trainer.started}")
    with profile(trainer.model) if options.profile else nullcontext() as profiled:
        with leaving_at_the_second_signal(quiet=options.progress == "none"):
            outcome = trainer.train()
    if profiled is not None:
        print(profiled.table(profiled.over_layers()))
    say(str(outcome))
    return INTERRUPTED if outcome.reason == "interrupted" else 0


def _check_model(what: Told) -> None:
    """Refuses a model that this data cannot train."""
    if what.config.decoder.layers == 0:
        raise ValueError(
            "decoder.layers: an encoder alone labels tokens, which text files cannot say: it is "
            "trained from Python, with relpos.Batch.from_labels"
        )
    if what.pairs and what.config.encoder.layers == 0:
        raise ValueError("--source: this model is a decoder alone: --text is for it")
    if not what.pairs and what.config.encoder.layers > 0:
        raise ValueError(
            "--text: this model has an encoder: --preset small-language has none, and "
            "--set encoder.layers=0 leaves a decoder alone"
        )
    if what.data.get("subwords") == "words" and what.loop.get("split"):
        raise ValueError("--split: whole words have no parts; --subwords bpe has")
    if what.data.get("separate"):
        if not what.pairs:
            raise ValueError("--separate: a decoder alone has one side")
        if what.loop.get("split"):
            raise ValueError("--split: is for one vocabulary, and --separate asks for two")


def _texts(what: Told) -> tuple[Any, Any]:
    """The text to train on and that of validation, or None."""
    from relpos import data

    files = what.data
    if ("validation_source" in files) != ("validation_target" in files):
        raise ValueError("--validation-source and --validation-target belong together")
    other = "validation_text" if what.pairs else "validation_source"
    if other in files:
        name, is_of = other.replace("_", "-"), "pairs" if what.pairs else "single lines"
        raise ValueError(f"--{name}: the training data is {is_of}")
    if not what.pairs:
        read = data.read_lines
        return read(files["text"]), read(v) if (v := files.get("validation_text")) else None
    for part in ("", "validation_"):
        source, target = (len(files.get(part + side, ())) for side in ("source", "target"))
        if source != target:
            name = f"--{part}target".replace("_", "-")
            raise ValueError(
                f"{name}: expected as many files as of the source, {source}, got {target}"
            )
    validation = None
    if "validation_source" in files:
        validation = data.read_pairs(files["validation_source"], files["validation_target"])
    return data.read_pairs(files["source"], files["target"]), validation


def _subwords(what: Told, text: Any) -> Any:
    """A saved vocabulary, or how a new one is made, where the run has none yet."""
    from relpos import data
    from relpos.saved import find_model

    kind = what.data.get("subwords", SUBWORDS)
    named = what.data.get("vocabulary")
    if kind not in KINDS:
        for name in ("vocabulary", "separate"):
            if what.data.get(name):
                raise ValueError(f"--{name}: {kind} is a vocabulary that is there")
        if not what.begun and not Path(kind).exists():
            kinds = ", ".join(KINDS)
            raise ValueError(f"--subwords: expected {kinds} or a vocabulary, got {kind}: not there")
        load = data.SentencePiece.load if Path(kind).is_file() else data.load_subwords
        # A run that has been begun has a copy of it, and may need no more.
        return partial(load, kind) if what.begun else load(kind)
    if what.start is not None:
        for name in ("subwords", "vocabulary", "separate"):
            if what.data.get(name):
                find_model(what.start)  # if it is not there, that is what to say
                raise ValueError(
                    f"--{name}, or data.{name} in the file of --config: --start brings a vocabulary; "
                    "leave it out"
                )
        return None

    def learn(lines: Iterable[Any], side: str, of: str = "") -> Any:
        size = named or getattr(what.config, f"{side}_vocabulary")
        try:
            if kind == "words":
                return data.Words.train(lines, size)
            return data.SentencePiece.train(lines, size, kind, fewer=named is None)
        except ValueError as error:  # by the names that things have here
            name, colon, rest = str(error).partition(": ")
            names = {"size": "--vocabulary", "lines": f"lines of {', '.join(text.files)}"}
            raise ValueError(f"{of}{names.get(name, name)}{colon}{rest}") from None

    def learn_each() -> Any:
        sides = enumerate(("source", "target"))
        return data.Sides(
            *(learn((x[i] for x in text), name, f"{name} side, ") for i, name in sides)
        )

    return learn_each if what.data.get("separate") else partial(learn, text, "target")


# --------------------------------------------------------------------------------------------------
# average, plot
# --------------------------------------------------------------------------------------------------


def _add_average(commands: Any) -> None:
    command = add_command(
        commands,
        "average",
        "the mean of a run's last checkpoints",
        "It often translates better than the last one. Checkpoints of different models are refused;\n"
        "how they were trained may differ.",
        _average,
    )
    command.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument("--last", type=count, default=20, metavar="N", help="how many (20)")
    command.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="a new folder (RUN/average-STEP)"
    )


def _average(options: argparse.Namespace) -> int:
    from relpos.train import average, checkpoint

    seen = checkpoint.checkpoints(options.run_folder)
    found = list(itertools.islice(checkpoint.whole(seen), options.last))
    if not found:
        why = "none of its checkpoints is whole" if seen else "no checkpoint here"
        raise ValueError(f"{options.run_folder}: {why}")
    output = options.output or options.run_folder / f"average-{found[0].step:09}"
    path = average.average(found[::-1], output)
    of = f"{len(found)} checkpoints, steps {found[-1].step:,} to {found[0].step:,}"
    if len(found) == 1:
        of = f"1 checkpoint, step {found[0].step:,}"
    print(f"mean of {of}: {path}")
    return 0


def _add_plot(commands: Any) -> None:
    command = add_command(
        commands,
        "plot",
        "draw the curves of runs",
        "-log p of a token in training and validation, BLEU of validation where it was asked for, and\n"
        "the learning rate, from the logs. Takes matplotlib.",
        _plot,
    )
    command.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, or log files")
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("curves.png"),
        metavar="FILE",
        help="the picture; .png, .svg or .pdf (curves.png)",
    )


def _plot(options: argparse.Namespace) -> int:
    from relpos import plots

    plots.canvas.check_ending("output", options.output)
    plots.canvas.use_no_display()
    print(plots.save(plots.curves(options.runs), options.output))
    return 0
