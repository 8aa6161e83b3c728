# SPDX-License-Identifier: Apache-2.0
"""The log of a run: a JSON object a line, appended to; read back without what was taken back.

{"kind": "train", "step": 10, "loss": 5.91, ...}
{"kind": "validation", "step": 500, "nll": 3.2, ...}
{"kind": "resume", "step": 400}         steps after 400, above this line, were made again
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from relpos.data.files import named
from relpos.model import StepResult
from relpos.train.events import Events
from relpos.train.progress import perplexity

LOG = "log.jsonl"
_DRAWN = frozenset(
    (
        "loss",
        "nll",
        "perplexity",
        "accuracy",
        "bleu",
        "learning_rate",
        "gradient_norm",
        "tokens_per_second",
    )
)


class Log:
    """Appends lines to a run's log; a line that a kill has cut in two stays alone.

    run: str or PathLike, the run's folder. events: a folder for TensorBoard's files, or None.
    """

    def __init__(
        self, run: str | os.PathLike[str], events: str | os.PathLike[str] | None = None
    ) -> None:
        self._events = None if events is None else Events(events)
        self._path = Path(run) / LOG
        self._file = self._path.open("a+b")
        self.has_lines = self._file.tell() > 0
        if self.has_lines:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def write(self, kind: str, figures: Mapping[str, Any]) -> None:
        """One line; numbers that are not finite are null."""
        line = {"kind": kind} | {name: _finite(value) for name, value in figures.items()}
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise named(error, self._path) from error
        if self._events is not None and kind in ("train", "validation"):
            values = {
                f"{kind}/{name}": float(value)
                for name, value in line.items()
                if name in _DRAWN and value is not None
            }
            self._events.write(line["step"], values)

    def close(self) -> None:
        """Nothing more comes."""
        with suppress(OSError):  # all is written, or why it is not has been told
            self._file.close()
        if self._events is not None:
            self._events.close()


def read_log(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's log, or of a log file, that still stand; damaged lines are left out."""
    path = Path(run)
    path = path / LOG if path.is_dir() else path
    lines: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                continue
            if line.get("kind") == "resume":  # steps rise from one resume to the next
                while lines and lines[-1]["step"] > line["step"]:
                    lines.pop()
            lines.append(line)
    return lines


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Sums:
    """Means over the labels of several steps: the figures of a line."""

    def __init__(self) -> None:
        self.nll = math.nan
        self.tokens = 0
        self._seconds: float | None = None
        self.begin()

    def begin(self) -> None:
        """The next step is the first of a new line; nll stays until then."""
        self._fresh = True

    def add(self, result: StepResult) -> None:
        if self._fresh:
            self.tokens, self._loss, self._nll, self._hits, self._fresh = 0, 0.0, 0.0, 0.0, False
        self.tokens += result.tokens
        self._loss += result.loss * result.tokens
        self._nll += result.nll * result.tokens
        self._hits += result.accuracy * result.tokens
        self.nll = self._nll / max(1, self.tokens)

    def figures(
        self, result: StepResult, epoch: int, seconds: float, paused: float
    ) -> dict[str, Any]:
        """paused: of the seconds, those of validation and checkpoints."""
        tokens = max(1, self.tokens)
        passed = None if self._seconds is None else seconds - paused - self._seconds
        self._seconds = seconds - paused
        return {
            "step": result.step,
            "attempt": result.attempt,
            "epoch": epoch,
            "loss": self._loss / tokens,
            "nll": self.nll,
            "perplexity": perplexity(self.nll),
            "accuracy": self._hits / tokens,
            "learning_rate": result.learning_rate,
            "gradient_norm": result.gradient_norm,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / passed if passed else None,
            "seconds": seconds,
        }
