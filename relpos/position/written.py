# SPDX-License-Identifier: Apache-2.0
"""Schemes and options as a text, and the arrays and numbers that it leaves out, in lists.

For relpos.torch in compiled code: the text is a constant of it, arrays and numbers are inputs.
torch.compile reads `write`; `read` makes the same schemes over whatever takes the places.

    (Shaw(t, k=2), None)   ["tuple", ["relpos.position.shaw:Shaw", ["key_table", ["table", 0]],
                                      ["k", ["integer", 0]], ...], null]      tables [t], integers [2]
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import torch

from relpos.position.graph import EdgeList, Pairs
from relpos.position.terms import Scheme, subclasses


class Parts(NamedTuple):
    """What a text leaves out."""

    tables: list[Any]  # tensors of real numbers; where they are read, arrays
    arrays: list[Any]  # of others, which the host reads
    integers: list[int]
    reals: list[float]


def write(x: Any, parts: Parts) -> Any:
    """x in tuples, names and classes; arrays and numbers go to the end of their lists."""
    if x is None or isinstance(x, bool | str):
        return x
    if isinstance(x, int):
        return _left_out("integer", parts.integers, x)
    if isinstance(x, float):
        return _left_out("real", parts.reals, x)
    if isinstance(x, Pairs):
        numbers = x.numbers if x.tensor is None else x.tensor
        sizes = None if x.starts is None else x.sizes  # of one array they are the tensor's
        return (Pairs, ("numbers", write(numbers, parts)), ("starts", write(x.starts, parts)),
                ("sizes", write(sizes, parts)))  # fmt: skip
    if isinstance(x, tuple | list):
        return ("list" if isinstance(x, list) else "tuple", *[write(part, parts) for part in x])
    if isinstance(x, dict):
        return ("dict", *[(name, write(part, parts)) for name, part in x.items()])
    if isinstance(x, Scheme | EdgeList):
        scheme: Any = x  # a dataclass, as all of them
        fields = [each.name for each in dataclasses.fields(scheme) if each.init]
        return (type(x), *[(name, write(getattr(x, name), parts)) for name in fields])
    tensor = torch.as_tensor(x)
    if tensor.dtype.is_floating_point:
        return _left_out("table", parts.tables, tensor)
    return _left_out("array", parts.arrays, tensor)


def _left_out(kind: str, others: list[Any], x: Any) -> tuple[str, int]:
    others.append(x)
    return kind, len(others) - 1


def as_text(written: Any) -> str:
    """What `write` gives, in one line."""
    return json.dumps(written, default=_name)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def read(written: Any, parts: Parts) -> Any:
    """What was written, by `json.loads` of its text, over these parts."""
    if not isinstance(written, list):
        return written
    kind, *rest = written
    if kind in ("table", "array", "integer", "real"):
        return getattr(parts, f"{kind}s")[rest[0]]
    if kind in ("tuple", "list"):
        values = [read(part, parts) for part in rest]
        return values if kind == "list" else tuple(values)
    fields = {name: read(part, parts) for name, part in rest}
    return fields if kind == "dict" else _class(kind)(**fields)


def _class(name: str) -> Any:
    known = (*subclasses(Scheme), EdgeList, Pairs)
    found = [kind for kind in known if _name(kind) == name]
    if not found:
        raise LookupError(f"position: there is no scheme {name} here; import its module first")
    return found[-1]  # dataclass(slots=True) makes a class anew, the first may still be there
