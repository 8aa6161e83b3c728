# SPDX-License-Identifier: Apache-2.0
"""What a run of `relpos train` is told: by TOML files, then by the command line.

Both say the same things by the same names, so that the command line is read as one more file. A run
keeps all that it was told in its own file, RUN_FILE, which a later command goes on with. What the
run began with, its vocabulary and the model it started from, no later command can change.
"""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import difflib
import errno
import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos import _core
from relpos.cli.arguments import PRECISIONS, count, minutes, share
from relpos.warned import warn

if TYPE_CHECKING:
    from relpos.config import Config

RUN_FILE = "run.toml"  # in the run's folder
_HEAD = "# What this run was told, written by `relpos train`."
KINDS = ("bpe", "unigram", "words")  # of new subwords
SUBWORDS = KINDS[0]  # where none is named
_PRESET, _LANGUAGE = "small", "small-language"  # where nothing names one: of pairs, of text
_PAPER, _PAPER_TOKENS = "paper-", 25_000  # its presets, and an update of theirs

# name: (what checks a text, its letter in the help, what it is)
_Option = tuple[Callable[[str], Any], str, str]

# Options of the loop, of `Trainer`, by their names in the table [train].
LOOP: dict[str, _Option] = {
    "steps": (count, "N", "updates after which to end; the schedule's length too"),
    "epochs": (count, "N", "end after so many passes over the data"),
    "minutes": (minutes, "M", "end after so many minutes"),
    "patience": (count, "N", "end after so many validations in a row without a better one"),
    "tokens": (count, "N", "the most tokens of a batch, on each side (4096)"),
    "sentences": (count, "N", "the most sentences of a batch (512)"),
    "accumulate_tokens": (
        count,
        "N",
        "the most of an update, in several batches (a paper's preset: 25,000)",
    ),
    "split": (share, "P", "the chance that a token of the training data is split in two (0)"),
    "validate_every": (count, "N", "updates between validations (500)"),
    "save_every": (count, "N", "updates between checkpoints (1000)"),
    "save_minutes": (minutes, "M", "minutes between checkpoints, if that is earlier (10)"),
    "keep": (count, "N", "checkpoints that stay, beside the best one (20)"),
    "log_every": (count, "N", "updates to a line of the log (10)"),
}
# What else it may have.
COMPUTED: dict[str, type | tuple[str, ...]] = {
    "device": str, "precision": PRECISIONS, "recompute": bool, "tensorboard": bool, "output": str,
    "validate_bleu": bool,
}  # fmt: skip
# The table [data].
_TRAINED_ON = ("source", "target", "text")
FILES = (*_TRAINED_ON, "validation_source", "validation_target", "validation_text")
_VOCABULARY: dict[str, type | Callable[[str], Any]] = {
    "subwords": str, "vocabulary": count, "separate": bool,
}  # fmt: skip
# What stands beside the fields of the configuration, and what no file has.
_MODEL = ("preset", "start")
_LINE_ALONE = ("threads", "progress", "profile", "resume", "config", "set", "list_presets")
# What to do about the vocabulary and the start that a run has.
_ELSEWHERE = "leave it out, or begin a new run in another folder"
_SIZES = ("source_vocabulary", "target_vocabulary")


@dataclass(frozen=True, slots=True)
class Told:
    """preset: what `config` is changed from. start: str or None. output: Path.

    data: files and vocabulary, what of them was named. loop: what `Trainer` takes, likewise.
    begun: bool. There is a run that goes on, and its own file has told what it began with.
    """

    preset: str
    config: Config
    start: str | None
    output: Path
    data: dict[str, Any]
    loop: dict[str, Any]
    begun: bool

    @property
    def pairs(self) -> bool:
        return "source" in self.data or "target" in self.data


def told(options: argparse.Namespace) -> Told:
    """The run's own file, if it goes on and no text is named; --config; then the command line."""
    from relpos.config import Config

    line = _of_the_line(options)
    files = [] if options.config is None else [_read(options.config)]
    for each in (*files, line):
        _check_names(each)
    output = Path(_last([*(each.train for each in files), line.train], "output", "run"))
    own = _own(output)
    named = any(name in each.data for each in (*files, line) for name in _TRAINED_ON)
    goes_on = own if options.resume and _has_checkpoints(output) else None
    layers, before = [*files, line], None
    if options.resume and own is not None and not named:
        before = _read(own)
    elif goes_on is not None:
        with suppress(ImportError):  # Python 3.10 without tomli: the command says everything itself
            before = _read(goes_on)
    if goes_on is not None and before is not None:
        _drop_sizes(layers, before, output)
    if before is not None and not named:
        layers.insert(0, before)
    preset = _last([each.model for each in layers], "preset")
    by_itself = _LANGUAGE if any("text" in each.data for each in layers) else _PRESET
    start = _last([each.model for each in layers], "start")
    if preset is None and (weights := _before(options.resume, output, start)) is not None:
        config = Config.load(weights)
    else:
        wheres = [each.where for each in layers if "preset" in each.model]
        with _said_in(wheres[-1] if wheres else ""):
            config = Config.preset(preset or by_itself)
    fields: dict[str, Any] = {}
    data: dict[str, Any] = {}
    loop: dict[str, Any] = {}
    for each in layers:
        if "steps" in each.fields:
            loop.pop("steps", None)  # of a layer below
        fields |= each.fields
        data |= each.data
        loop |= each.train
    loop.pop("output", None)
    if "steps" in loop:
        fields["steps"] = loop["steps"]
    if data.get("separate"):
        if fields.get("share_embeddings") in (True, "true", "1"):
            raise ValueError("share_embeddings: expected false with --separate, got true")
        fields["share_embeddings"] = False
    config = _replaced(config, fields, layers)
    begun_with = before.model.get("preset") if before is not None else None
    paper = (preset or begun_with or by_itself).startswith(_PAPER)
    sized = loop.keys() & {"tokens", "accumulate_tokens"}
    if paper and not sized and (before is None or "accumulate_tokens" in before.train):
        loop["accumulate_tokens"] = _PAPER_TOKENS
    preset = preset or by_itself
    found = Told(preset, config, start, output, data, loop, begun=False)
    if goes_on is not None and before is not None:
        return _as_begun(found, before)
    return found


def _replaced(config: Config, fields: dict[str, Any], layers: list[_Layer]) -> Config:
    """With all that was said, checked together: what one layer says another may mend. The message
    names the layer that is wrong by itself, if one is."""
    try:
        return config.replace(fields)
    except (ValueError, TypeError) as error:
        for each in layers:
            try:
                config.replace(each.fields)
            except (ValueError, TypeError) as alone:
                if str(alone) == str(error):
                    raise ValueError(f"{each.where}{error}") from None
        raise ValueError(str(error)) from None


def keep(what: Told) -> None:
    """Writes the run's own file, which means the same in any folder."""
    from relpos.data.files import write_file

    path = what.output / RUN_FILE
    try:
        text = "\n".join(
            [
                _HEAD,
                "# `relpos train --resume --output FOLDER` goes on with it, and with",
                "# `relpos train --config FOLDER/run.toml --output OTHER` it is done again.",
                *_lines(what),
                "",
            ]
        )
    except UnicodeDecodeError:
        warn(f"{path}: not written: a file's name is not UTF-8")
        path.unlink(missing_ok=True)
        return
    write_file(path, text.encode())


# --------------------------------------------------------------------------------------------------
# The run's own file
# --------------------------------------------------------------------------------------------------


def _own(output: Path) -> Path | None:
    """The file, if it is there; one that somebody else has written is not to be lost."""
    path = output / RUN_FILE
    if path.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "a folder, where the run's own file would be", str(path)
        )
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.readline().rstrip() != _HEAD.encode():
            raise ValueError(
                f"{path}: was not written by `relpos train`, which keeps there what a run is told: "
                "it wants another name or place"
            )
    return path


def _has_checkpoints(output: Path) -> bool:
    from relpos.train.checkpoint import checkpoints

    return bool(checkpoints(output))


def _as_begun(what: Told, before: _Layer) -> Told:
    """With the vocabulary and the start that the run has had from its beginning. before: its own
    file."""
    data, begins = dict(what.data), before.model.get("start")
    for name in _VOCABULARY:
        had = before.data.get(name)
        if name == "subwords" and had is None and data.get(name) == SUBWORDS and begins is None:
            had = SUBWORDS  # said now, and meant then
        _check_had(name, had, data.pop(name, None))
        if had is not None:
            data[name] = had
    _check_had("start", begins, what.start)
    preset = before.model.get("preset", _PRESET)
    config = what.config.replace(_sizes_asked(before))
    return dataclasses.replace(
        what, preset=preset, config=config, start=begins, data=data, begun=True
    )


def _sizes_asked(before: _Layer) -> dict[str, int]:
    """Those of the vocabulary: text may have given fewer, which is what a checkpoint knows."""
    from relpos.config import Config

    preset = Config.preset(before.model.get("preset", _PRESET))
    return {x: before.fields.get(x, getattr(preset, x)) for x in _SIZES}


def _drop_sizes(layers: list[_Layer], before: _Layer, output: Path) -> None:
    """Of a run that goes on: what is said of them now may be what was asked for or is had, no more."""
    from relpos.config import Config

    for each in layers:
        for name in sorted(each.fields.keys() & _SIZES):
            given = str(each.fields.pop(name))
            had = getattr(Config.load(_newest(output)), name)
            if given not in (str(had), str(_sizes_asked(before)[name])):
                raise ValueError(
                    f"{each.where}{name}: this run has {had}, got {given}; {_ELSEWHERE}"
                )


def _check_had(name: str, had: Any, given: Any) -> None:
    """Refuses what a run that goes on was not begun with."""
    if given is None or given == had or (not given and not had):
        return
    paths = isinstance(given, str) and isinstance(had, str) and os.path.isabs(had)
    if paths and os.path.realpath(given) == os.path.realpath(had):
        return
    began = "without it" if had is None else f"with {had}"
    raise ValueError(f"--{name}: this run was begun {began}, got {given}; {_ELSEWHERE}")


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one file says, or the command line. where: what a message about it begins with."""

    where: str
    model: dict[str, str]  # preset, start
    fields: dict[str, Any]  # of the configuration, by dotted names
    data: dict[str, Any]
    train: dict[str, Any]


@contextmanager
def _said_in(where: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}{error}") from None


def _check_names(layer: _Layer) -> None:
    """Refuses those of no letters: a folder without a name would be the one where we are."""
    names = {"preset", "start", "output", "subwords", *FILES}
    for table, values in (("", layer.model), ("data.", layer.data), ("train.", layer.train)):
        for name, value in values.items():
            nameless = value == "" or (isinstance(value, list) and "" in value)
            if name in names and nameless:
                option = f"--{name.replace('_', '-')}"
                called = f"{layer.where}{table}{name}" if layer.where else option
                raise ValueError(f"{called}: expected a name, got ''")


def _last(tables: list[dict[str, Any]], name: str, default: Any = None) -> Any:
    for each in reversed(tables):
        if name in each:
            return each[name]
    return default


def _of_the_line(options: argparse.Namespace) -> _Layer:
    def given(*names: str) -> dict[str, Any]:
        values = ((name, getattr(options, name)) for name in names)
        return {name: value for name, value in values if value is not None}

    fields: dict[str, Any] = {}
    for each in options.set:
        name, equals, value = each.partition("=")
        if not equals:
            raise ValueError(f"--set: expected NAME=VALUE, as encoder.k=8, got {each!r}")
        fields[name.strip()] = value.strip()
    return _Layer(
        "", given("preset", "start"), fields | given("seed"),
        given(*FILES, *_VOCABULARY), given(*LOOP, *COMPUTED),
    )  # fmt: skip


def _read(path: Path) -> _Layer:
    table = read_toml(path)
    where = f"{path}: "
    model: dict[str, str] = {}
    for name in _MODEL:
        if name in table:
            model[name] = _as_given(_checked(f"{where}{name}", "a name", str, table.pop(name)))
    data = _table(path, table, "data", {**dict.fromkeys(FILES, _as_files), **_VOCABULARY})
    loop = {name: check for name, (check, _, _) in LOOP.items()}
    train = _table(path, table, "train", {**loop, **COMPUTED})
    for name, value in table.items():
        if isinstance(value, dict) and name not in ("encoder", "decoder"):
            raise ValueError(
                f"{where}no table [{name}]; there are [encoder], [decoder], [data], [train]"
            )
    fields = dict(_flat(table))
    known = dict(_core.config_default())
    for name in fields:
        if name not in known and (place := _place_of(name.rpartition(".")[2])):
            raise ValueError(f"{where}{name}: {place}")
    return _Layer(where, model, fields, data, train)


def _place_of(name: str) -> str | None:
    """Where a file has what is called so, if it has."""
    fields = dict(_core.config_default())
    if name in _MODEL or name in fields:
        return "belongs at the top, before any table"
    if name in FILES or name in _VOCABULARY:
        return "belongs in [data]"
    if name in LOOP or name in COMPUTED:
        return "belongs in [train]"
    if f"encoder.{name}" in fields:
        return "belongs in [encoder] or [decoder]"
    return "is of the command line alone" if name in _LINE_ALONE else None


def _table(path: Path, whole: dict[str, Any], table: str, known: dict[str, Any]) -> dict[str, Any]:
    """One table of a file, checked, and taken out of it."""
    found = whole.pop(table, {})
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {table}: expected a table, [{table}], got {found!r}")
    checked = {}
    for name, value in found.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            there = f"the nearest is {near[0]}" if near else f"there are {', '.join(known)}"
            why = _place_of(name) or f"no such option; {there}"
            raise ValueError(f"{path}: {table}.{name}: {why}")
        checked[name] = _as(f"{path}: {table}.{name}", known[name], value)
    return checked


def _as(name: str, kind: Any, value: Any) -> Any:
    if kind is str:
        return _as_given(_checked(name, "text in quotes", str, value))
    if kind is bool:
        return _checked(name, "true or false", bool, value)
    if isinstance(kind, tuple):
        if value not in kind:
            raise ValueError(f"{name}: expected {' or '.join(kind)}, got {value!r}")
        return value
    if kind is _as_files:
        return _as_files(name, value)
    try:
        if isinstance(value, str):
            raise argparse.ArgumentTypeError(f"expected a number, got {value!r}")
        kind(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{name}: {error}") from None
    return value


def _checked(name: str, expected: str, kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return value


def _as_files(name: str, value: Any) -> list[str]:
    several = [value] if isinstance(value, str) else value
    if not (isinstance(several, list) and several and all(isinstance(x, str) for x in several)):
        raise ValueError(f'{name}: expected a file, "train.en", or several, got {value!r}')
    return [*map(_as_given, several)]


def _as_given(text: str) -> str:
    """As the command line gives it, where a path has other letters if the locale is not UTF-8's."""
    return os.fsdecode(text.encode())


def _before(resume: bool, output: Path, start: str | None) -> Path | None:
    """The weights that a run goes on from, or starts with, whose configuration it has."""
    from relpos.saved import find_model

    if resume and _has_checkpoints(output):
        return _newest(output)
    return None if start is None else find_model(start).weights[-1]


def _newest(output: Path) -> Path:
    from relpos.saved import find_run
    from relpos.train.checkpoint import checkpoints

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainer looks closer, and says what it finds
        return find_run(checkpoints(output)).weights[-1]


def read_toml(path: Path) -> dict[str, Any]:
    reader = toml_reader(path)
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # as some editors write it
    try:
        table: dict[str, Any] = reader.loads(text.decode())
        return table
    except ValueError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None


def toml_reader(path: Path) -> Any:
    """Python's own from 3.11 on, before that the package which that was made from."""
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError(f"{path}: takes tomli before Python 3.11, `pip install 'relpos[train]'`")


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted names."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


def _lines(what: Told) -> Iterator[str]:
    from relpos.config import Config

    yield f"preset = {_as_toml(what.preset)}"
    if what.start is not None:
        yield f"start = {_as_toml(_as_written(what.start))}"
    preset = Config.preset(what.preset)
    without = ("steps",) if "steps" in what.loop else ()
    yield from _differences(what.config, preset, without)
    for name in ("encoder", "decoder"):
        different = list(_differences(getattr(what.config, name), getattr(preset, name)))
        if different:
            yield from ("", f"[{name}]", *different)
    data = dict(what.data)
    for name in FILES:
        if name in data:
            data[name] = [_as_written(each) for each in data[name]]
    if data.get("subwords", SUBWORDS) not in KINDS:
        data["subwords"] = _as_written(data["subwords"])
    for name, table in (("data", data), ("train", what.loop)):
        if table:
            yield from ("", f"[{name}]", *(f"{key} = {_as_toml(x)}" for key, x in table.items()))


def _as_written(path: str) -> str:
    """From the root, in Unicode; a name that is not UTF-8 is a UnicodeDecodeError."""
    return os.fsencode(Path(path).absolute()).decode()


def _differences(config: Any, preset: Any, without: tuple[str, ...] = ()) -> Iterator[str]:
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value) or each.name in without:
            continue
        if value != getattr(preset, each.name):
            yield f"{each.name} = {_as_toml(value)}"


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON's strings are TOML's, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_as_toml, value))}]"
    return repr(value)
