# SPDX-License-Identifier: Apache-2.0
"""`relpos demo`, `relpos train`, and what looks after a run: `average` and `plot`."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from relpos.cli.arguments import (
    INTERRUPTED,
    USAGE,
    add_command,
    add_device,
    add_progress,
    add_threads,
    count,
    minutes,
    share,
    use_threads,
)

_TRAIN_NEXT = """\
relpos train: what to train on? For a translation model, for example

  relpos train --source train.en --target train.de \\
      --validation-source valid.en --validation-target valid.de --output run

and for a language model, a decoder alone,

  relpos train --text train.txt --set encoder.layers=0 --output run

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
        "trained on; half of them are twice as long as any that was.",
        _demo,
    )
    command.add_argument(
        "--compare",
        action="store_true",
        help="then train the same model with sinusoidal positions instead of relative ones",
    )
    command.add_argument("--seed", type=int, default=1, metavar="N", help="of everything (1)")
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

# Options of the loop: those of `Trainer`, which also may stand in the [train] table of a TOML file.
_LOOP: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "steps": (count, "N", "updates after which to end; the schedule's length too"),
    "epochs": (count, "N", "end after so many passes over the data"),
    "minutes": (minutes, "M", "end after so many minutes"),
    "patience": (count, "N", "end after so many validations in a row without a better one"),
    "tokens": (count, "N", "the most tokens of a batch, on each side (4096)"),
    "sentences": (count, "N", "the most sentences of a batch (512)"),
    "accumulate_tokens": (count, "N", "the most tokens of an update, in several batches"),
    "split": (share, "P", "the chance that a token of the training data is split in two (0)"),
    "validate_every": (count, "N", "updates between validations (500)"),
    "save_every": (count, "N", "updates between checkpoints (1000)"),
    "save_minutes": (minutes, "M", "minutes between checkpoints, if that is earlier (10)"),
    "keep": (count, "N", "checkpoints that stay, beside the best one (20)"),
    "log_every": (count, "N", "updates to a line of the log (10)"),
}


def _add_train(commands: Any) -> None:
    command = add_command(
        commands,
        "train",
        "train a model on text files",
        "Text is UTF-8 with a sentence a line, plain or gzip. It gets a vocabulary of subwords and\n"
        "is tokenised once; both are kept in the run's folder, with checkpoints and the log. Ctrl-C\n"
        "finishes the step, saves and leaves; a second one leaves at once. --resume goes on bit\n"
        "for bit.",
        _train,
        usage="relpos train --source FILE --target FILE [--output DIR] [options]",
    )
    data = command.add_argument_group("data")
    for name, what in (
        ("source", "sentences for the encoder"),
        ("target", "their translations, line by line"),
        ("text", "sentences for a decoder alone, instead of the two"),
        ("validation-source", "the same for validation"),
        ("validation-target", "the same for validation"),
        ("validation-text", "the same for validation"),
    ):
        data.add_argument(f"--{name}", nargs="+", default=[], metavar="FILE", help=what)
    data.add_argument(
        "--subwords",
        metavar="KIND",
        help="bpe or unigram of sentencepiece, words, or a vocabulary that is there, its folder or a\n"
        "sentencepiece model (bpe)",
    )
    data.add_argument(
        "--vocabulary", type=count, metavar="N", help="tokens of a new one (the preset's, at most)"
    )
    model = command.add_argument_group("model")
    model.add_argument(
        "--preset",
        metavar="NAME",
        help="the configuration to change (small, or that of the run that --resume goes on with);\n"
        "see --list-presets",
    )
    model.add_argument(
        "--start",
        metavar="MODEL",
        help="a run, checkpoint or file of weights whose weights and vocabulary to begin with, and\n"
        "whose configuration, where no preset is named",
    )
    model.add_argument("--list-presets", action="store_true", help="their names, and no training")
    model.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML: preset, fields of the configuration, and a table [train] with the options of\n"
        "training, below",
    )
    model.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of the configuration, as --set encoder.k=8; may be repeated",
    )
    model.add_argument(
        "--seed", type=int, metavar="N", help="of weights, dropout, order and splits (1)"
    )
    loop = command.add_argument_group("training")
    for name, (check, letter, what) in _LOOP.items():
        loop.add_argument(f"--{name.replace('_', '-')}", type=check, metavar=letter, help=what)
    run = command.add_argument_group("run")
    run.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("run"),
        metavar="DIR",
        help="the run's folder (run)",
    )
    run.add_argument(
        "--resume", action="store_true", help="go on from its newest checkpoint, if there is one"
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


def _train(options: argparse.Namespace) -> int:
    from relpos.config import Config

    if options.list_presets:
        print(*Config.presets(), sep="\n")
        return 0
    pairs = bool(options.source or options.target)
    if bool(options.source) != bool(options.target):
        missing = "--target" if options.source else "--source"
        print(f"relpos train: {missing} is missing: a file of translations", file=sys.stderr)
        return USAGE
    if pairs and options.text:
        print("relpos train: give --source and --target, or --text", file=sys.stderr)
        return USAGE
    if not pairs and not options.text:
        print(_TRAIN_NEXT, file=sys.stderr)
        return USAGE
    return _train_on(options, pairs)


def _train_on(options: argparse.Namespace, pairs: bool) -> int:
    use_threads(options)
    config, loop = configured(options)

    from relpos import data
    from relpos.profiling import profile
    from relpos.train.ending import leaving_at_the_second_signal
    from relpos.train.trainer import Trainer

    if config.decoder.layers == 0:
        raise ValueError(
            "decoder.layers: an encoder alone labels tokens, which text files cannot say: it is "
            "trained from Python, with relpos.Batch.from_labels"
        )
    if pairs and config.encoder.layers == 0:
        raise ValueError("--source: this model is a decoder alone: --text is for it")
    if not pairs and config.encoder.layers > 0:
        raise ValueError(
            "--text: this model has an encoder: --set encoder.layers=0 leaves a decoder alone"
        )
    if options.subwords == "words" and loop.get("split"):
        raise ValueError("--split: whole words have no parts; --subwords bpe has")
    side = "" if pairs else "text"
    if bool(options.validation_source) != bool(options.validation_target):
        raise ValueError("--validation-source and --validation-target belong together")
    if options.validation_text if pairs else options.validation_source:
        wrong = "--validation-text" if pairs else "--validation-source"
        raise ValueError(f"{wrong}: the training data is {'pairs' if pairs else 'single lines'}")
    text: Any
    validation: Any = None
    if side:
        text = data.read_lines(options.text)
        if options.validation_text:
            validation = data.read_lines(options.validation_text)
    else:
        text = data.read_pairs(options.source, options.target)
        if options.validation_source:
            validation = data.read_pairs(options.validation_source, options.validation_target)
    trainer = Trainer(
        config, text,
        folder=options.output, validation=validation, start=options.start, resume=options.resume,
        subwords=_subwords(options, config, text),
        seed=config.seed, progress=options.progress, recompute=options.recompute,
        device=options.device, precision=options.precision,
        tensorboard=options.tensorboard, **loop,
    )  # fmt: skip
    say = print if options.progress != "none" else lambda *_: None
    unknown = trainer.cache.unknown_tokens / len(trainer.cache.tokens)
    strange = f", {unknown:.2%} of all tokens unknown to them" if unknown > 0 else ""
    say(f"{trainer.report}, {trainer.subwords.size:,} subwords{strange}")
    if trainer.validation_report is not None:
        say(f"validation: {trainer.validation_report}")
    numbers = sum(array.size for array in trainer.model.parameters.values())
    say(f"{numbers:,} weights: {trainer.config!r}")
    if trainer.resumed is not None:
        say(f"going on from {trainer.resumed.folder}")
    if trainer.started is not None:
        say(f"beginning with {trainer.started}")
    with profile(trainer.model) if options.profile else nullcontext() as profiled:
        with leaving_at_the_second_signal():
            outcome = trainer.train()
    best = ""
    if outcome.best_step is not None:
        best = f", best validation {outcome.best:.4f} at step {outcome.best_step:,}"
    if profiled is not None:
        print(profiled.table(profiled.over_layers()))
    say(f"{_ENDED[outcome.reason]} at step {outcome.step:,}{best}: {outcome.checkpoint.folder}")
    return INTERRUPTED if outcome.reason == "interrupted" else 0


_ENDED = {
    "steps": "all steps made,",
    "epochs": "all epochs made,",
    "time": "time is up",
    "patience": "no better validation for long,",
    "interrupted": "interrupted, and saved",
}


def _subwords(options: argparse.Namespace, config: Any, text: Any) -> Any:
    """A saved vocabulary, or how a new one is made, where the run has none yet."""
    from relpos import data

    kind: Any = options.subwords or "bpe"
    size = options.vocabulary or config.target_vocabulary
    if kind not in ("words", "bpe", "unigram"):
        if options.vocabulary is not None:
            raise ValueError(f"--vocabulary: {kind} is a vocabulary that is there")
        return data.SentencePiece.load(kind) if Path(kind).is_file() else data.load_subwords(kind)
    if options.start is not None:
        for name in ("subwords", "vocabulary"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name}: --start brings a vocabulary")
        return None

    def train() -> Any:
        try:
            if kind == "words":
                return data.Words.train(text, size)
            return data.SentencePiece.train(text, size, kind, fewer=options.vocabulary is None)
        except ValueError as error:  # by the names that things have here
            name, colon, rest = str(error).partition(": ")
            names = {"size": "--vocabulary", "lines": f"lines of {', '.join(text.files)}"}
            raise ValueError(f"{names.get(name, name)}{colon}{rest}") from None

    return train


def configured(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Configuration and options of the loop: the preset, the TOML file, then the command line."""
    from relpos.config import Config

    told = _read_toml(options.config) if options.config is not None else {}
    named = told.pop("preset", None)
    preset = options.preset or named
    if not isinstance(preset, str | None):
        raise ValueError(f"{options.config}: preset: expected a name, got {preset!r}")
    if preset is None and (before := _before(options)) is not None:
        config = Config.load(before)
    else:
        config = Config.preset(preset or "small")
    loop = _loop_of(told.pop("train", {}), options.config)
    if told:
        try:
            config = config.replace(_flat(told))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{options.config}: {error}") from None
    for given in options.set:
        name, equals, value = given.partition("=")
        if not equals:
            raise ValueError(f"--set: expected NAME=VALUE, as encoder.k=8, got {given!r}")
        config = config.replace({name.strip(): value.strip()})
    loop |= {name: value for name in _LOOP if (value := getattr(options, name)) is not None}
    if "steps" in loop:
        config = config.replace({"steps": loop["steps"]})
    if options.seed is not None:
        config = config.replace({"seed": options.seed})
    return config, loop


def _before(options: argparse.Namespace) -> Path | None:
    """The weights that a run goes on from, or starts with, whose configuration it has."""
    from relpos.saved import find_model
    from relpos.train.checkpoint import checkpoints

    if options.resume and checkpoints(options.output):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the trainer looks closer, and says what it finds
            return find_model(options.output).weights[-1]
    return None if options.start is None else find_model(options.start).weights[-1]


def _loop_of(table: Any, path: Path | None) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ValueError(f"{path}: train: expected a table, [train], got {table!r}")
    for name, value in table.items():
        if name not in _LOOP:
            known = ", ".join(_LOOP)
            raise ValueError(f"{path}: train.{name}: no such option; there are {known}")
        try:
            if isinstance(value, str):
                raise argparse.ArgumentTypeError(f"expected a number, got {value!r}")
            _LOOP[name][0](str(value))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{path}: train.{name}: {error}") from None
    return dict(table)


def _read_toml(path: Path) -> dict[str, Any]:
    tomllib = _toml_reader()
    with path.open("rb") as file:
        try:
            table: dict[str, Any] = tomllib.load(file)
            return table
        except ValueError as error:
            raise ValueError(f"{path}: not TOML: {error}") from None


def _toml_reader() -> Any:
    """Python's own from 3.11 on, before that the package which that was made from."""
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError("--config: takes tomli before Python 3.11, `pip install 'relpos[train]'`")


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted names."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


# --------------------------------------------------------------------------------------------------
# average, plot
# --------------------------------------------------------------------------------------------------


def _add_average(commands: Any) -> None:
    command = add_command(
        commands,
        "average",
        "the mean of a run's last checkpoints",
        "It often translates better than the last one. Checkpoints of different configurations are\n"
        "refused.",
        _average,
    )
    command.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument("--last", type=count, default=20, metavar="N", help="how many (20)")
    command.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="a new folder (RUN/average-STEP)"
    )


def _average(options: argparse.Namespace) -> int:
    from relpos.train import average, checkpoint

    found: list[checkpoint.Checkpoint] = []
    for each in reversed(checkpoint.checkpoints(options.run_folder)):
        if (why := checkpoint.flaw(each.folder, thorough=False)) is not None:
            print(f"relpos: warning: {each.folder}: passed over: {why}", file=sys.stderr)
        elif len(found) < options.last:
            found.append(each)
    if not found:
        raise ValueError(f"{options.run_folder}: no checkpoint here")
    output = options.output or options.run_folder / f"average-{found[0].step:09}"
    path = average.average(found[::-1], output)
    print(
        f"mean of {len(found)} checkpoints, steps {found[-1].step:,} to {found[0].step:,}: {path}"
    )
    return 0


def _add_plot(commands: Any) -> None:
    command = add_command(
        commands,
        "plot",
        "draw the curves of runs",
        "-log p of a token in training and validation, and the learning rate, from the logs. Takes\n"
        "matplotlib.",
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

    plots.canvas.use_no_display()
    print(plots.save(plots.curves(options.runs), options.output))
    return 0
