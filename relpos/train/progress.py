# SPDX-License-Identifier: Apache-2.0
"""Progress that people can live with: a bar on a terminal and in notebooks, plain lines elsewhere.

    step 400 of 1,600  loss 0.512  perplexity 1.67  41,200 tokens/s  rate 0.00171  left 0:42

The bar is tqdm's, where it is installed, and in notebooks ipywidgets too. Lines come at most every
few seconds, so that a log file stays readable.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

SECONDS_BETWEEN_LINES = 10.0
# All figures in the 80 columns of a terminal: without tqdm's share and steps a second.
_BAR = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
_SHARE = 0.1  # of a step's loss and nll in those that are shown; the log has each step's own


def perplexity(nll: float) -> float:
    """exp(nll), and infinity where that is too large."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def clock_text(seconds: float) -> str:
    """As 0:42, 12:05 or 3:07:09."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def check_kind(kind: str) -> str:
    """The kind of progress, if there is such a kind."""
    if kind not in ("auto", "bar", "lines", "none"):
        raise ValueError(f"progress: expected 'auto', 'bar', 'lines' or 'none', got {kind!r}")
    return kind


def tell(line: str, stream: TextIO | None = None) -> None:
    """A line on standard error or `stream`, whose full disk or lost reader ends nothing."""
    with suppress(OSError):
        print(line, file=stream or sys.stderr, flush=True)


class Progress:
    """Shows a run that goes on; one object for one run.

    total: int. Updates of the whole run; None: nobody knows.
    start: int. Updates made already.
    kind: "auto", a bar where there is a terminal or notebook and tqdm; "bar"; "lines"; or "none".
    stream: where to; None: standard error.
    """

    def __init__(
        self,
        total: int | None,
        start: int = 0,
        kind: str = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = math.inf,
    ) -> None:
        check_kind(kind)
        self._total, self._step, self._kind = total, start, kind
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._begun = self._shown = clock()
        self._most = seconds  # that it may take
        self._start = start
        self._tokens = 0
        self._loss = self._nll = math.nan  # of no step yet
        self._bar = _make_bar(total, start, kind, self._stream)
        self.unread = False  # whoever read it has gone

    def step(self, step: int, loss: float, nll: float, tokens: int, rate: float) -> None:
        """Tells of an update: its number, loss, nll, target tokens and learning rate."""
        if not math.isfinite(loss):
            return
        self._loss, self._nll = _smoothed(self._loss, loss), _smoothed(self._nll, nll)
        self._tokens += tokens
        before, self._step = self._step, step
        now = self._clock()
        if self._bar is not None:
            with self._until_unread():
                self._bar.set_postfix_str(self._figures(now, rate), refresh=False)
                self._bar.update(step - before)
        elif self._kind != "none" and now - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = now
            of = "" if self._total is None else f" of {self._total:,}"
            open_ended = self._total is None and self._most == math.inf
            left = "" if open_ended else f"  left {clock_text(self._left(now))}"
            self._print(f"step {step:,}{of}  {self._figures(now, rate)}{left}")

    def say(self, line: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            with self._until_unread():
                self._bar.write(line, file=self._stream)
        elif self._kind != "none":
            self._print(line)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            with self._until_unread():
                self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _figures(self, now: float, rate: float) -> str:
        per_second = self._tokens / max(now - self._begun, 1e-9)
        words = ("perplexity", "tokens/s", "rate") if self._bar is None else ("ppl", "tok/s", "lr")
        return (
            f"loss {self._loss:.3f}  {words[0]} {perplexity(self._nll):.2f}  "
            f"{per_second:,.0f} {words[1]}  {words[2]} {rate:.3g}"
        )

    @contextmanager
    def _until_unread(self) -> Iterator[None]:
        """A pipe whose reader has gone ends what is shown, not the run."""
        try:
            yield
        except BrokenPipeError:
            self.unread, self._kind, self._bar = True, "none", None
        except OSError:  # a full disk under a log of it
            self._kind, self._bar = "none", None

    def _left(self, now: float) -> float:
        made, passed, left = self._step - self._start, now - self._begun, math.inf
        if self._total is not None and made > 0:
            left = (self._total - self._step) * passed / made
        return max(min(left, self._most - passed), 0.0)

    def _print(self, line: str) -> None:
        with self._until_unread():
            print(line, file=self._stream, flush=True)


def _smoothed(shown: float, new: float) -> float:
    return new if math.isnan(shown) else shown + _SHARE * (new - shown)


def _make_bar(total: int | None, start: int, kind: str, stream: TextIO) -> Any:
    """tqdm's bar, or None. Of the one that was asked for in vain this tells."""
    if kind not in ("auto", "bar"):
        return None
    notebook = "ipykernel" in sys.modules
    if kind == "auto" and not notebook and not stream.isatty():
        return None
    try:
        if notebook:  # without widgets tqdm would write a bar below the other
            importlib.import_module("ipywidgets")
        module = importlib.import_module("tqdm.auto" if notebook else "tqdm")
    except ImportError as error:
        if kind == "bar":
            extra = "notebooks" if notebook else "train"
            takes = f"a bar takes {error.name}, `pip install 'relpos[{extra}]'`"
            tell(f"progress: lines, for {takes}", stream)
        return None
    short = {} if notebook or total is None else {"bar_format": _BAR}
    return module.tqdm(
        total=total, initial=start, file=None if notebook else stream, unit="step",
        dynamic_ncols=True, **short,
    )  # fmt: skip
