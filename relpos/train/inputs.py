# SPDX-License-Identifier: Apache-2.0
"""What a run is given as text, and what is wrong with it, as far as that is seen before the work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from relpos.config import Config
from relpos.data import Lines, Pairs, TokenCache

Text = Iterable[Any]  # of str, or of (source, target)
Given = Text | TokenCache | None


def check_sides(name: str, sides: int, config: Config) -> None:
    wanted = 1 if config.encoder.layers == 0 else 2
    if sides != wanted:
        what = ("lines", "a decoder alone"), ("pairs", "an encoder and a decoder")
        raise ValueError(
            f"{name}: expected {what[wanted - 1][0]}, for {what[wanted - 1][1]}, "
            f"got {what[sides - 1][0]}"
        )


def look_at(name: str, data: Given, config: Config, *, once: bool, throughout: bool) -> Any:
    """The data, of which the first item is what this configuration takes; where throughout, and if
    it can be read again, all of it can be read.

    once: nothing is learned from it before it is tokenised, so that an iterator will do.
    """
    if data is None or isinstance(data, TokenCache):
        return data
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
    check_sides(name, 1 if isinstance(first, str) else 2, config)
    if isinstance(data, Iterator):
        return chain((first,), items)
    if throughout:
        deque(items, maxlen=0)
    return data
