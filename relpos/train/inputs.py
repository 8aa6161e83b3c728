# SPDX-License-Identifier: Apache-2.0
"""What a run is given as text, and what is wrong with it, as far as that is seen before the work."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from relpos.config import Config
from relpos.data import Lines, Pairs, Subwords, TokenCache
from relpos.data.text import has_sides
from relpos.train.checkpoint import MODEL, STATE

Text = Iterable[Any]  # of str, or of (source, target)


def check_path(name: str, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}: expected str or PathLike, got {type(value).__name__}")
    if value == "":
        raise ValueError(f"{name}: expected a path, got ''")
    return Path(value)


def check_config(config: Any) -> Config:
    """Of a model that text can train."""
    if not isinstance(config, Config):
        made = f"; Config.preset({config!r}) makes one" if isinstance(config, str) else ""
        raise TypeError(f"config: expected relpos.Config, got {type(config).__name__}{made}")
    if config.decoder.layers == 0:
        raise ValueError(
            "config: decoder.layers=0: an encoder alone labels tokens, which text cannot say: "
            "Transformer.step trains it, with Batch.from_labels"
        )
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack.layers and stack.relations:
            raise ValueError(
                f"config: {side}.relations={stack.relations}: labels of pairs of tokens, which "
                "text does not have: Transformer.step trains them, with graphs in its Batch"
            )
    return config


def check_subwords(subwords: Any) -> None:
    """None, a vocabulary, or a function that makes one."""
    made_or_makes = isinstance(subwords, Subwords) or callable(subwords)
    if isinstance(subwords, str | type) or not (subwords is None or made_or_makes):
        raise TypeError(
            f"subwords: expected Subwords, or what makes them, got {subwords!r:.80}; "
            "relpos.data.Wrapped makes them of an object with encode and decode"
        )


def check_folder(folder: Path, resume: bool, *, begun: bool) -> None:
    """One for a run of its own. begun: it has checkpoints."""
    for name in () if begun else (MODEL, STATE):
        if (folder / name).exists():
            raise ValueError(
                f"folder: {folder} has a model of its own, {name}, whose vocabulary would be "
                "lost; a run wants a folder of its own"
            )
    if not resume and begun:
        raise ValueError(
            f"folder: {folder} has checkpoints already: resume=True, or --resume, goes on "
            "from the newest; a new run wants a folder of its own"
        )


@contextmanager
def called(name: str, *others: str) -> Iterator[None]:
    """What goes wrong within with an argument of one of the other names is told of `name`; an error
    of a class of the user's stays as it is."""
    try:
        yield
    except (ValueError, TypeError) as error:
        own, colon, rest = str(error).partition(": ")
        if own not in others or type(error) not in (ValueError, TypeError):
            raise
        raise type(error)(f"{name}{colon}{rest}") from None


def _sides_of(config: Config) -> int:
    return 1 if config.encoder.layers == 0 else 2


def check_sides(name: str, sides: int, config: Config) -> None:
    wanted = _sides_of(config)
    if sides != wanted:
        what = ("lines", "a decoder alone"), ("pairs", "an encoder and a decoder")
        raise ValueError(
            f"{name}: expected {what[wanted - 1][0]}, for {what[wanted - 1][1]}, "
            f"got {what[sides - 1][0]}"
        )


def look_at(
    name: str, data: Text | TokenCache, config: Config, *, once: bool, throughout: bool
) -> Any:
    """The data, of which the first item is what this configuration takes; where throughout, and if
    it can be read again, all of it is.

    once: nothing is learned from it before it is tokenised, so that an iterator will do.
    """
    if isinstance(data, TokenCache):
        return data
    sides = _sides_of(config)
    wanted = ("lines, as read_lines", "pairs of lines, as read_pairs")[sides - 1]
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise TypeError(f"{name}: expected {wanted} gives, got {data!r:.80}")
    if isinstance(data, Iterator) and not once:
        raise TypeError(
            f"{name}: expected what may be gone through more than once, as a list, as the subwords "
            f"are learned from it first, got {type(data).__name__}"
        )
    items = iter(data)
    first = next(items, None)
    if first is None:
        if isinstance(data, Lines | Pairs):
            files = ", ".join(dict.fromkeys(data.files))
            raise ValueError(f"{name}: expected text in {files}, got {data.report}")
        raise ValueError(f"{name}: expected lines with text, got nothing")
    for given in (1, 2):
        if has_sides(first, given):
            check_sides(name, given, config)
    again = chain((first,), items)
    if isinstance(data, Iterator) and has_sides(first, sides):
        return again
    for i, item in enumerate(again if throughout else (first,)):
        if not has_sides(item, sides):
            what = ("str", "(source, target) of str")[sides - 1]
            raise TypeError(f"{name}: expected {what}, item {i} is {item!r:.80}")
    return data
