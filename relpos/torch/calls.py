# SPDX-License-Identifier: Apache-2.0
"""A call as the operation of torch takes it: tensors, numbers, and a name for all the rest."""

from __future__ import annotations

import functools
import itertools
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relpos.position.combine import Position, schemes_of, tables_of, with_tables
from relpos.position.graph import ShawGraph, matrices
from relpos.position.terms import Lowered, Shape
from relpos.position.written import Parts, read
from relpos.torch.tensors import check_table, table_of

PER_CALL = ("lengths", "key_lengths", "offsets", "key_offsets", "query_start", "mask")


class Call(NamedTuple):
    """A call over arrays of the tensors' memory."""

    position: Position
    options: dict[str, Any]  # the keyword arguments of relpos.attention but for position
    names: list[str]  # of the gradients of the tables


class Spec:
    """What of a call is neither tensor nor number: torch sees its name."""

    layout: str
    name: str
    last: Lowering | None = None  # of the last forward call

    def holder(self) -> Any:
        """What `last` is kept by."""
        return self

    def over(self, tables: Sequence[Tensor], numbers: Numbers) -> Call:
        """The call with these tables. Each parameter has its own array and gradient, also where one
        tensor is several of them: torch adds those up."""
        raise NotImplementedError

    def lowering(
        self, tables: Sequence[Tensor], numbers: Numbers, shape: Shape, stream: int
    ) -> Lowered | None:
        """What the last forward call made of these tables for this shape, if it did, and on this
        stream: on another it may not be there yet, and its memory be given away too early."""
        last: Lowering | None = self.holder().last
        versions = versions_of([*tables, *numbers.others()])
        if last is None or versions is None or last.versions != versions:
            return None
        if last.name != self.name:
            return None
        if last.integers != [*numbers.integers] or last.reals != [*numbers.reals]:
            return None
        return last.lowered if last.stream == stream and last.shape.same_as(shape) else None


class Kept(Spec):
    """The schemes and the options themselves, under a number. Known for as long as somebody holds it.
    The name has also what shapes are made by: inductor keeps graphs on the disk by what is in them,
    and another process gives the same numbers to other schemes."""

    def __init__(self, position: Position, options: Mapping[str, Any]) -> None:
        schemes = schemes_of(position)
        self.position = position
        mask = options["mask"]
        read = None if mask is None else matrices("mask", mask, ("bool",))
        self.options = {**options, "mask": read}
        self.layout = self.options["layout"]
        tables = tables_of(position)
        self.tensors = {name: x for name, x in tables.items() if isinstance(x, Tensor)}
        self.arrays = {name: x for name, x in tables.items() if not isinstance(x, Tensor)}
        pairs = [x.labels for x in schemes if isinstance(x, ShawGraph)] + [self.options["mask"]]
        self.others = [x.tensor for x in pairs if x is not None and x.tensor is not None]
        self.name = f"{next(_numbers)} {self.layout}"
        _kept[self.name] = self

    def over(self, tables: Sequence[Tensor], numbers: Numbers) -> Call:
        for name, x in zip(self.tensors, tables, strict=True):
            check_table(name, x)
        own = dict(zip(self.tensors, map(table_of, tables), strict=True))
        position = with_tables(self.position, self.arrays | own)
        return Call(position, self.options | numbers.per_call(), list(self.tensors))

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self.position, self.options)  # copies have a number of their own


class Holder:
    """Has the `last` of many."""

    last: Lowering | None = None


# One for all texts, or each of them would hold tables of its last call for good. An object, and not a
# class: threads that set an attribute of a class together have crashed Python.
_of_texts = Holder()


class Written(Spec):
    """Schemes and options as a text, which is the name: those of compiled code, which may run when
    what it was made of is gone."""

    def __init__(self, text: str) -> None:
        self.name = text
        self.written = json.loads(text)
        self.layout = dict(self.written[2][1:])["layout"]

    def holder(self) -> Any:
        return _of_texts

    def over(self, tables: Sequence[Tensor], numbers: Numbers) -> Call:
        own = [table_of(x) for x in tables]
        others = [x.cpu().numpy()[()] for x in numbers.others()]  # single ones as NumPy's scalars
        parts = Parts(own, others, list(numbers.integers), list(numbers.reals))
        position, options = read(self.written, parts)
        known = {id(x): name for name, x in tables_of(position).items()}
        names = [known.get(id(x), "") for x in own]  # "": a number of NumPy, as scale may be
        for name, x in zip(names, tables, strict=True):
            if name:
                check_table(name, x)
        return Call(position, options | numbers.per_call(), names)


class Numbers(NamedTuple):
    """What of a call changes from one to the next, as the operation takes it."""

    host: Sequence[Tensor | None]  # those of PER_CALL, then others of the call
    integers: Sequence[int]
    reals: Sequence[float]
    seed: int

    def others(self) -> list[Tensor]:
        """Labels and masks, of Written positions too, of which terms are made."""
        return [x for x in self.host[len(PER_CALL) :] if x is not None]

    def per_call(self) -> dict[str, Any]:
        """As keyword arguments. The host reads them: what lies on a GPU is copied, and waited for."""
        given = dict(zip(PER_CALL, self.host[: len(PER_CALL)], strict=True))
        found: dict[str, Any] = {
            name: None if x is None else x.cpu().numpy()
            for name, x in given.items()
            if x is not None or name != "mask"  # which may be among the options
        }
        return found | {"seed": self.seed}


_Version = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, int]


class Lowering(NamedTuple):
    """A scheme's terms, kept from forward to its backward: some are products to be made."""

    name: str
    versions: list[_Version]
    integers: list[int]
    reals: list[float]
    tables: list[Tensor]  # and others; held, or others could come to lie where they did
    shape: Shape
    stream: int  # it was made on
    lowered: Lowered


def versions_of(tables: Sequence[Tensor]) -> list[_Version] | None:
    """Which memory the tables are, and how often torch has seen it change; None: it does not count.
    Views of one tensor may begin where it does."""
    if any(table.is_inference() for table in tables):
        return None
    return [(x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x._version) for x in tables]


_numbers = itertools.count(1)
_kept: weakref.WeakValueDictionary[str, Kept] = weakref.WeakValueDictionary()
_written = functools.lru_cache(maxsize=256)(Written)


def spec_of(name: str) -> Spec:
    if name.startswith("["):
        return _written(name)
    if name not in _kept:
        raise RuntimeError(
            "relpos.torch: the scheme of this graph is gone, or another process has it; make the "
            "graph anew"
        )
    return _kept[name]
