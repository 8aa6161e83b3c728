# SPDX-License-Identifier: Apache-2.0
"""What a model spends its time on: `relpos.profile`, `relpos train --profile`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from types import TracebackType

from relpos import _core
from relpos.model import Transformer


@dataclass(frozen=True, slots=True)
class ProfileLine:
    """What one operation of one layer took, forward and backward apart.

    name: str, as "encoder.0.attention.qkv". backward: bool. calls: int.
    seconds, operations, bytes: float, summed over the calls; operations are those with floating
        point, counted by shapes.
    """

    name: str
    backward: bool
    calls: int
    seconds: float
    operations: float
    bytes: float


class Profile:
    """Time, operations and bytes of a model between the two ends of a with statement."""

    def __init__(self, model: Transformer) -> None:
        if not isinstance(model, Transformer):
            raise TypeError(f"model: expected relpos.Transformer, got {type(model).__name__}")
        self._core: _core.Model | None = None
        self._model = model
        self._lines: tuple[ProfileLine, ...] = ()

    def __enter__(self) -> Profile:
        self._model._core.profile(True)
        self._core = self._model._core
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lines = self.lines
        if self._core is not None:
            self._core.profile(False)
        self._core = None

    @property
    def lines(self) -> tuple[ProfileLine, ...]:
        """One for every operation of every layer, in the order of the model."""
        if self._core is None:
            return self._lines
        return tuple(ProfileLine(*line) for line in self._core.profile_lines())

    def over_layers(self) -> tuple[ProfileLine, ...]:
        """The lines with all layers of a stack in one: "encoder.*.attention.qkv"."""
        sums: dict[tuple[str, bool], ProfileLine] = {}
        for line in self.lines:
            name = re.sub(r"\.\d+\.", ".*.", line.name)
            key = name, line.backward
            before = sums.get(key, ProfileLine(name, line.backward, 0, 0.0, 0.0, 0.0))
            numbers = zip(astuple(before)[2:], astuple(line)[2:], strict=True)
            sums[key] = ProfileLine(name, line.backward, *(x + y for x, y in numbers))
        return tuple(sums.values())

    def table(self, lines: Iterable[ProfileLine] | None = None) -> str:
        """Lines as text, those that took longest first; lines: `lines` unless given."""
        chosen = sorted(self.lines if lines is None else lines, key=lambda line: -line.seconds)
        total = sum(line.seconds for line in chosen)
        width = max([len(line.name) for line in chosen], default=0)
        width = max(width, len("operation"))
        head = f"{'operation':{width}}  {'pass':8}  {'calls':>7}  {'ms':>10}  {'share':>6}"
        rows = [f"{head}  {'GFLOP/s':>8}  {'GB/s':>7}"]
        for line in chosen:
            which = "backward" if line.backward else "forward"
            share = line.seconds / total if total > 0 else 0.0
            per_second = 1e-9 / line.seconds if line.seconds > 0 else 0.0
            rows.append(
                f"{line.name:{width}}  {which:8}  {line.calls:7}  {1e3 * line.seconds:10.3f}"
                f"  {share:6.1%}  {line.operations * per_second:8.1f}  {line.bytes * per_second:7.1f}"
            )
        rows.append(f"{'all':{width}}  {'':8}  {'':7}  {1e3 * total:10.3f}")
        return "\n".join(rows)

    def __str__(self) -> str:
        return self.table()


def profile(model: Transformer) -> Profile:
    """Measures what a model does within a with statement.

        with relpos.profile(model) as profile:
            model.step(batch)
        print(profile)

    model: Transformer.
    """
    return Profile(model)
