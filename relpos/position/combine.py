# SPDX-License-Identifier: Apache-2.0
"""One scheme or several in a call: what adds up, and what makes no sense together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from relpos.position.arrays import Table
from relpos.position.terms import Kind, Lowered, Scheme, Shape

Position = Scheme | tuple[Scheme, ...] | None

TERMS = 2  # RP_TERMS: terms of one kind


def schemes_of(position: Position) -> tuple[Scheme, ...]:
    """The schemes of a call: `position` itself, or those in the tuple; None is left out."""
    if isinstance(position, Scheme):
        return (position,)
    given: tuple[Any, ...] = position if isinstance(position, tuple) else (position,)
    for scheme in given:
        if scheme is not None and not isinstance(scheme, Scheme):
            raise TypeError(
                "position: expected a scheme as relpos.Shaw, a tuple of them or None, "
                f"got {type(scheme).__name__}"
            )
    return tuple(scheme for scheme in given if scheme is not None)


def _renames(tables: Sequence[dict[str, Table]]) -> list[dict[str, str]]:
    """Names of parameters over a tuple of schemes: a name that an earlier scheme has takes the
    number of the scheme, key_table_2. The same object under the same name stays one parameter."""
    taken: dict[str, Table] = {}
    result = []
    for number, own in enumerate(tables, 1):
        names = {}
        for name, table in own.items():
            new = name
            if name in taken and taken[name] is not table:
                new = f"{name}_{number}"
            taken[new] = table
            names[name] = new
        result.append(names)
    return result


def tables_of(position: Position) -> dict[str, Table]:
    """Every parameter of a call, by the name its gradient will have."""
    schemes = schemes_of(position)
    own = [scheme.tables() for scheme in schemes]
    return {
        new: own[i][name] for i, names in enumerate(_renames(own)) for name, new in names.items()
    }


def with_tables(position: Position, tables: dict[str, Table]) -> tuple[Scheme, ...]:
    """The same schemes over other arrays, named as by `tables_of`."""
    schemes = schemes_of(position)
    renames = _renames([scheme.tables() for scheme in schemes])
    return tuple(
        scheme.with_tables({name: tables[new] for name, new in names.items()})
        for scheme, names in zip(schemes, renames, strict=True)
    )


def lower(position: Position, shape: Shape, scale: float | None) -> Lowered:
    """The terms of a call. scale: the caller's, which settles what the schemes would use."""
    schemes = schemes_of(position)
    if not schemes:
        return Lowered(scale=scale)
    if scale is not None:
        shape = dataclasses.replace(shape, scale=scale)
    parts = [(type(scheme).__name__, scheme.lower(shape)) for scheme in schemes]
    if len(parts) > 1:  # the names within one scheme differ
        renames = _renames([scheme.tables() for scheme in schemes])
        for i, names in enumerate(renames):
            if any(name != new for name, new in names.items()):
                who, lowered = parts[i]
                parts[i] = who, lowered.renamed(_renamer(names))
    return combine(parts, scale)


def _renamer(names: dict[str, str]) -> Callable[[str], str]:
    return lambda name: names.get(name, name)


def combine(parts: Sequence[tuple[str, Lowered]], scale: float | None) -> Lowered:
    """The sum of several lowered schemes, each with its name for messages."""
    if len(parts) == 1 and scale is None and _is_simple(parts[0][1]):
        return parts[0][1]
    terms = tuple([term for _, part in parts for term in part.terms])
    kinds: tuple[Kind, ...] = ("key", "query", "bias", "value")
    for kind in kinds if len(terms) > TERMS else ():
        owners = [who for who, part in parts for term in part.terms if term.kind == kind]
        if len(owners) > TERMS:
            raise ValueError(
                f"position: at most {TERMS} {kind} terms, got {len(owners)} ({', '.join(owners)})"
            )
    rotations = [(who, part.rotation) for who, part in parts if part.rotation is not None]
    if len(rotations) > 1:
        raise ValueError("position: RoPE twice; q and k are turned once")
    if rotations:
        for who, part in parts:
            for term in part.terms:
                if term.kind in ("key", "query"):
                    raise ValueError(
                        f"position: RoPE turns q and k, but the {term.kind} term of {who} would "
                        "meet them unturned; combine RoPE with bias and value terms only"
                    )
    biases = [(who, part) for who, part in parts if part.position_bias is not None]
    if biases and sum(bool(part.of_kind("key")) for _, part in parts) > 1:
        others = [who for who, part in parts if part.of_kind("key") and who != biases[0][0]]
        raise ValueError(
            f"position: the position bias of {biases[0][0]} would enter the key term of "
            f"{', '.join(others) or 'the other one'} too; leave one of them out"
        )
    if len(parts) == 1 and scale is None:
        return parts[0][1]
    return Lowered(
        terms,
        position_bias=biases[0][1].position_bias if biases else None,
        position_bias_name=biases[0][1].position_bias_name if biases else "",
        scale=_scale(parts, scale),
        rotation=rotations[0][1] if rotations else None,
    )


def _is_simple(part: Lowered) -> bool:
    """Has it nothing that could be one too many?"""
    return len(part.terms) <= TERMS and part.rotation is None and part.position_bias is None


def _scale(parts: Sequence[tuple[str, Lowered]], given: float | None) -> float | None:
    if given is not None:
        return given
    wanted = [(who, part.scale) for who, part in parts if part.scale is not None]
    for who, scale in wanted[1:]:
        if not math.isclose(scale, wanted[0][1], rel_tol=1e-12):
            raise ValueError(
                f"position: {wanted[0][0]} has the scale {wanted[0][1]:.6g}, {who} {scale:.6g}; "
                "give the scale of the call"
            )
    return wanted[0][1] if wanted else None
