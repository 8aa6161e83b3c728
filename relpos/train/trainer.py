# SPDX-License-Identifier: Apache-2.0
"""The training loop: text in, checkpoints and a log out.

trainer = relpos.Trainer(
    relpos.Config.preset("small"),
    relpos.data.read_pairs("train.en", "train.de"),
    validation=relpos.data.read_pairs("valid.en", "valid.de"),
    folder="run",
)
outcome = trainer.train()

run/
  tokenizer/, cache/        the vocabulary, and the text as tokens
  log.jsonl                 what happened
  step-000001000/, ...      checkpoints
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos.config import Config
from relpos.data import (
    Batches,
    InOrder,
    Report,
    SentencePiece,
    Splits,
    Subwords,
    TokenCache,
    check_vocabulary,
    load_subwords,
    of_side,
)
from relpos.data.batches import check_seed
from relpos.data.splits import check_chance, check_spelled
from relpos.data.subwords import save_subwords, wants_object
from relpos.data.vocabulary import is_subwords
from relpos.model import Precision, StepResult, Transformer, model_memory
from relpos.position.arrays import check_count, check_truth, number_of
from relpos.saved import check_tokenizer, find_model
from relpos.train import checkpoint
from relpos.train.average import HOW
from relpos.train.checkpoint import TOKENIZER, Checkpoint
from relpos.train.ending import TrainingError, alone, interrupts
from relpos.train.inputs import (
    Text,
    called,
    check_config,
    check_folder,
    check_path,
    check_sides,
    check_subwords,
    look_at,
)
from relpos.train.log import Log, Sums
from relpos.train.progress import SECONDS_BETWEEN_LINES, Progress, check_kind, tell
from relpos.train.validation import Validation, check_bleu, validate
from relpos.warned import warn

_MUCH = 0.1  # of a text
_NOT_FINITE = 100  # steps in a row after which nobody believes in the next one


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    reason: "steps", "epochs", "time", "patience" or "interrupted".
    step, epoch: int. Updates made, epochs finished.
    nll: float. Of the last steps of training. validation, best: float or None. The nll of the last
        and of the best validation. best_step: int or None.
    checkpoint: Checkpoint. The last.
    """

    reason: str
    step: int
    epoch: int
    nll: float
    validation: float | None
    best: float | None
    best_step: int | None
    checkpoint: Checkpoint

    def __str__(self) -> str:
        best = ""
        if self.best_step is not None:
            best = f", best validation {self.best:.4f} at step {self.best_step:,}"
        return f"{_ENDED[self.reason]} at step {self.step:,}{best}: {self.checkpoint.folder}"


_ENDED = {
    "steps": "all steps made,",
    "epochs": "all epochs made,",
    "time": "time is up",
    "patience": "no better validation for long,",
    "interrupted": "interrupted, and saved",
}


class Trainer:
    """Trains a Transformer on text, in a folder of its own.

    config: Config. The vocabularies take the size of the subwords. None: that of the run that is
        resumed, or of `start`.
    data: pairs of str for an encoder and a decoder, or str for a decoder alone: what
        `relpos.data.read_pairs` and `read_lines` give, or any iterable, which is gone through more
        than once where subwords are learned from it; or a TokenCache.
    folder: str or PathLike. Where all of the run lies.
    validation: as data; None: there is none. Where config.ema is not 0, the average of the weights
        is what is validated, and what decides which checkpoint is the best.
    subwords: Subwords, or a function that makes them, which is called if the run has none yet, or
        if they can't be read from its folder, as most objects of your own can't
        (`relpos.data.load_subwords`); `relpos.data.Sides` where source and target have one each.
        None: sentencepiece's BPE, trained on data, with the configuration's target_vocabulary as
        its size, or as many as the data gives.
    start: str or PathLike. A model, named as for `Translator.load`, whose weights and subwords the
        run begins with; where its configuration differs from `config`, that is reported. Moments
        and schedule begin anew.
    resume: bool. Goes on from the newest whole checkpoint in `folder`, if there is one; where its
        configuration differs from `config`, that is reported. False: a folder with checkpoints is
        refused.

    tokens, sentences: int. The most of a batch, on each side.
    accumulate_tokens: int. The most of an update on each side, in several batches; None: one batch.
    split: float. The chance that a token of the training data is two others, spelled alike (see
        `relpos.data.Splits`); 0: none is.
    seed: int. Of the order of the data, and of what is split; the configuration has that of weights
        and dropout.

    steps: int. Training ends after so many updates; None: config.steps, which alone is the
        schedule's length.
    epochs, minutes, patience: end it earlier: passes over the data, minutes in all, validations
        in a row without a better one. None: they don't.

    validate_bleu: bool. Validation data is translated too, greedily: its BLEU is in the log.
    validate_every, save_every: int. Updates between. save_minutes: float. Saves after so long, if
        that comes first. At its end a run is validated and saved; if interrupted, only saved.
    keep: int. Checkpoints that stay, the best validation's beside them.
    log_every: int. Updates to a line of the log.
    progress: "auto", a bar on terminals and in notebooks, else lines; "bar", "lines" or "none".
    recompute, device, precision: as of `Transformer`.
    tensorboard: bool. The log's figures go into event files in `folder`/events too.
    """

    def __init__(
        self,
        config: Config | None,
        data: Text | TokenCache,
        *,
        folder: str | os.PathLike[str],
        validation: Text | TokenCache | None = None,
        subwords: Subwords | Callable[[], Subwords] | None = None,
        start: str | os.PathLike[str] | None = None,
        resume: bool = False,
        tokens: int = 4096,
        sentences: int = 512,
        accumulate_tokens: int | None = None,
        split: float = 0.0,
        seed: int = 1,
        steps: int | None = None,
        epochs: int | None = None,
        minutes: float | None = None,
        patience: int | None = None,
        validate_every: int = 500,
        validate_bleu: bool = False,
        save_every: int = 1000,
        save_minutes: float = 10.0,
        keep: int = 20,
        log_every: int = 10,
        progress: str = "auto",
        recompute: bool = False,
        device: str = "cpu",
        precision: Precision = "f32",
        tensorboard: bool = False,
    ) -> None:
        self.folder = check_path("folder", folder)
        begins = None if start is None else check_path("start", start)
        resume = check_truth("resume", resume)
        self._seen = checkpoint.checkpoints(self.folder)
        found = checkpoint.newest(self.folder) if resume else None
        if resume and found is None and self._seen:
            raise checkpoint.CheckpointError(
                f"{self.folder}: none of its checkpoints is whole; a run that begins anew wants a "
                "folder of its own, and may start with the weights of one of these"
            )
        begin = None if begins is None or found is not None else find_model(begins)
        if begin is not None:
            check_tokenizer(begin)
        if config is None and found is not None:
            config = found.config
        elif config is None and begin is not None:
            config = Config.load(begin.weights[-1])
        config = check_config(config)
        check_subwords(subwords)
        self._steps = config.steps if steps is None else check_count("steps", steps, 1)
        self._epochs = None if epochs is None else check_count("epochs", epochs, 1)
        self._minutes = math.inf if minutes is None else _check_minutes("minutes", minutes)
        self._patience = None if patience is None else check_count("patience", patience, 1)
        if patience is not None and validation is None:
            raise ValueError("patience: there is no validation to be patient with")
        self._validate_every = check_count("validate_every", validate_every, 1)
        self._validate_bleu = check_truth("validate_bleu", validate_bleu)
        if self._validate_bleu:
            check_bleu(config, validation is not None)
        self._save_every = check_count("save_every", save_every, 1)
        self._save_minutes = _check_minutes("save_minutes", save_minutes)
        self._keep = check_count("keep", keep, 1)
        self._log_every = check_count("log_every", log_every, 1)
        self._progress = check_kind(progress)
        self._tensorboard = check_truth("tensorboard", tensorboard)

        # What would be found out after hours of tokenising is better known before.
        model_memory(
            config, tokens=tokens, sentences=sentences, recompute=recompute,
            device=device, precision=precision,
        )  # fmt: skip
        check_count("tokens", tokens, 2)
        if accumulate_tokens is not None:
            check_count("accumulate_tokens", accumulate_tokens, tokens)
        check_seed(seed)
        if check_chance("split", split) > 0 and isinstance(subwords, Subwords):
            check_spelled("split", subwords)
        there = begin if found is None else found
        saved = None if there is None else there.tokenizer
        once = saved is not None or isinstance(subwords, Subwords)
        data = look_at("data", data, config, once=once, throughout=False)
        if validation is not None:
            validation = look_at("validation", validation, config, once=True, throughout=True)

        check_folder(self.folder, resume, begun=bool(self._seen))
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if saved is not None:
                self.subwords = _subwords_of(saved, subwords)
            else:
                self.subwords = self._make_subwords(subwords, data, config)
            source, target = (of_side(self.subwords, x).size for x in ("source", "target"))
            self.config = config.replace({"source_vocabulary": source, "target_vocabulary": target})
            check_vocabulary(self.subwords, self.config)
            if split > 0:
                check_spelled("split", self.subwords)
            splits = None if split == 0 else Splits(self.subwords, split)
            if found is None or found.tokenizer is None:
                save_subwords(self.folder / TOKENIZER, self.subwords)
                # What a class of the user's has saved may not be what is read.
                _subwords_of(self.folder / TOKENIZER, self.subwords)
            self.cache = self._tokenised("data", data, "train")
            self._batches = Batches(
                self.cache,
                tokens=tokens, sentences=sentences, max_length=config.max_length,
                accumulate_tokens=accumulate_tokens, seed=seed, epochs=epochs,
                splits=splits,
            )  # fmt: skip
            self._validation: InOrder | None = None
            self._validates: list[int] | None = None  # which text
            if validation is not None:
                lines = self._tokenised("validation", validation, "validation")
                self._validates = [lines.checksum, lines.borders]
                try:
                    self._validation = InOrder(
                        lines, tokens=tokens, sentences=sentences,
                        max_length=config.max_length,
                    )  # fmt: skip
                except ValueError as error:
                    raise ValueError(f"validation: {error}") from None
        self.model = Transformer(
            self.config, tokens=tokens, sentences=sentences, recompute=recompute,
            device=device, precision=precision,
        )  # fmt: skip
        self._best: float | None = None
        self._best_step: int | None = None
        self._spared: int | None = None  # the best by another text: kept until this has its own
        self._validated: float | None = None
        self._looked: int | None = None  # the step of the last validation
        self._stale = 0
        self._seconds = 0.0
        self._saved: Checkpoint | None = None  # where what there is now has been saved
        self.resumed = found
        self.started: Path | None = None
        if found is not None:
            self._resume(found)
        elif begin is not None:
            [weights] = begin.weights
            self._restored(Config.load(weights), lambda m: m.restore(weights), weights, "start")
            self.started = weights
        if found is None:
            way = "this vocabulary is of another text"
            if saved is None and isinstance(subwords, Subwords):
                way += "; subwords=None (--subwords bpe) learns one of this"
            elif saved is None:
                way = (
                    "a larger vocabulary (--vocabulary N) knows more, and one of parts of words "
                    "(subwords=None, --subwords bpe) all"
                )
            self._warn_of_losses(way)

    @property
    def report(self) -> Report:
        """What became of the lines: how many there are, were empty, or are too long for a batch."""
        return self._batches.report

    @property
    def unknown(self) -> float:
        """The share of the data's tokens that the vocabulary does not know."""
        return self.cache.unknown_tokens / len(self.cache.tokens)

    @property
    def validation_report(self) -> Report | None:
        """The same of the validation data; None: there is none."""
        return None if self._validation is None else self._validation.report

    def _warn_of_losses(self, way: str) -> None:
        """Training goes on, but of another text than the user has. way: to fewer unknown tokens."""
        lost = self.report.too_long / self.report.lines
        if lost > _MUCH:
            short = self.model.limits[0] < self.config.max_length
            more = "tokens=N (--tokens N)" if short else "max_length=N (--set max_length=N)"
            share = _percent(lost)
            warn(f"{share} of the lines are too long, and left out: {more} takes longer ones")
        if self.unknown > _MUCH:
            warn(f"{_percent(self.unknown)} of all tokens are unknown: {way}")

    # ---- before ----------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around what is written into the folder: a TrainingError where another run is at work
        there, or has saved since this one was begun."""
        with alone(self.folder):
            if set(checkpoint.checkpoints(self.folder)) - set(self._seen):
                raise TrainingError(
                    f"{self.folder}: another run has saved here since this one was begun: "
                    "resume=True, or --resume, goes on from the newest"
                )
            yield

    def _make_subwords(
        self,
        given: Subwords | Callable[[], Subwords] | None,
        data: Text | TokenCache,
        config: Config,
    ) -> Subwords:
        """Those given, or new ones."""
        if isinstance(given, Subwords):
            return given
        if isinstance(data, TokenCache):
            raise ValueError("subwords: expected those that the token cache was made with")
        self._say("learning the subwords")
        if given is None:
            with called("data", "pairs", "lines"):
                return SentencePiece.train(data, config.target_vocabulary, fewer=True)
        return _made(given)

    def _say(self, line: str) -> None:
        if self._progress != "none":
            tell(line)

    def _teller(self, name: str) -> Callable[[int], None]:
        """Tells how many lines have been tokenised, now and then."""
        told = time.monotonic()

        def now_and_then(lines: int) -> None:
            nonlocal told
            if time.monotonic() - told >= SECONDS_BETWEEN_LINES:
                told = time.monotonic()
                self._say(f"tokenising {name}: {lines:,} lines")

        return now_and_then

    def _tokenised(self, name: str, data: Text | TokenCache, folder: str) -> TokenCache:
        if isinstance(data, TokenCache):
            cache = data
        else:
            where = self.folder / "cache" / folder
            with called(name, "pairs", "lines"):
                cache = TokenCache.build(where, data, self.subwords, progress=self._teller(folder))
        if not cache.is_of(self.subwords.size, self.subwords.fingerprint()):
            raise ValueError(
                f"subwords: expected the {cache.size:,} tokens that {cache.folder} was made with, "
                f"got {self.subwords.size:,} others"
            )
        check_sides(name, cache.sides, self.config)
        return cache

    def _restored(
        self, then: Config, restore: Callable[[Transformer], Any], where: Path, whose: str
    ) -> Any:
        """What restore returns; what the configuration has otherwise is told, or why it fails."""
        before = dict(then.pairs())
        changed = {
            name: f"{name}={value}, and {before[name]} before"
            for name, value in self.config.pairs()
            if before[name] != value
        }
        try:
            state = restore(self.model)
        except OSError as error:
            averaged = (self.config.ema != 0) != (then.ema != 0)  # what one of them lacks
            may = {*HOW, "seed"} - ({"ema"} if averaged else set())
            other = [changed[name] for name in changed if name not in may]
            if other:
                raise ValueError(
                    f"config: not that of {whose}: {'; '.join(other)}: {error}"
                ) from None
            raise
        if changed:  # told even to those who want no progress
            tell(f"{where}: goes on with {'; '.join(changed.values())}")
        return state

    def _resume(self, found: Checkpoint) -> None:
        state = found.state
        try:
            run = state["run"]
            with called(f"{found.folder}", "state"):
                self._batches.resume(run["data"])
            self._best, self._best_step = run["best"], run["best_step"]
            if self._best is not None and not math.isfinite(self._best):  # of older versions
                self._best = self._best_step = None
            self._validated, self._stale = run["validated"], run["stale"]
            self._seconds = run["seconds"]
            self._looked = run.get("looked", found.step)  # older versions do not say
            before, self._spared = run.get("validates"), run.get("spared")
        except (KeyError, TypeError) as error:
            raise checkpoint.CheckpointError(
                f"{found.folder / checkpoint.STATE}: not of a Trainer: {error}"
            ) from None
        self._restored(found.config, found.restore, found.folder, "this run")
        self._saved = found
        now = self._validates
        if now is not None and before == now[0]:  # older versions have the tokens' alone
            before = now
        if None not in (before, now) and before != now:
            tell(
                f"{found.folder}: goes on with another validation text: the best of the old one "
                "does not count"
            )
            self._spared = self._kept_step
            self._best = self._best_step = self._validated = self._looked = None
            self._stale = 0
        if now is None:
            self._validates = before

    # ---- the loop --------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Trains until something ends it, and saves.

        Ctrl-C or SIGTERM finishes the step, saves and returns, and so does a pipe for the progress
        whose reader has gone. A second signal raises KeyboardInterrupt.
        """
        log = None
        with self._alone(), interrupts() as interrupted:
            try:
                log = Log(self.folder, self.folder / "events" if self._tensorboard else None)
                if self.resumed is not None or log.has_lines:
                    log.write("resume", {"step": self.model.counters[0]})
                total = self._steps if self._epochs is None else None  # nobody knows it
                left = 60 * self._minutes - self._seconds
                with Progress(
                    total, self.model.counters[0], self._progress, seconds=left
                ) as progress:
                    return self._train(log, progress, interrupted)
            finally:
                self._batches.close()
                if log is not None:
                    log.close()
                    self._seen = checkpoint.checkpoints(self.folder)

    def _train(self, log: Log, progress: Progress, interrupted: Callable[[], bool]) -> Outcome:
        run = _Run(self, log, progress)
        updates = iter(self._batches)
        while True:
            reason = self._reason(run.expected, interrupted() or progress.unread)
            if run.behind and (reason is not None or run.is_due()):
                run.catch_up()
                continue  # what has been begun may change the answer
            if reason is not None:
                break
            if (update := next(updates, None)) is None:
                reason = "epochs"
                break
            run.begin(update)
        run.catch_up()
        run.log_the_last()
        if reason != "interrupted":
            run.validate_the_last()
        return Outcome(
            reason, run.step, self._batches.epoch, run.recent.nll, self._validated, self._best,
            self._best_step, self._saved or self._save(),
        )  # fmt: skip

    def _reason(self, step: int, interrupted: bool) -> str | None:
        """Why training ends before the next step, if it does."""
        if step >= self._steps:
            return "steps"
        if interrupted:
            return "interrupted"
        if self._seconds >= 60 * self._minutes:
            return "time"
        if self._patience is not None and self._stale >= self._patience:
            return "patience"
        return None

    def validate(self) -> Validation:
        """The model as it is, on all of the validation data, without dropout.

        Where it keeps an average of the weights, with that.
        """
        if self._validation is None:
            raise ValueError("validation: there is none")
        return validate(
            self.model, self._validation, self.subwords if self._validate_bleu else None
        )

    def _validate(self, step: int, log: Log, progress: Progress) -> bool:
        """Validates, tells, and says whether it was the best so far."""
        found = self.validate()
        log.write("validation", {"step": step} | found.figures())
        self._validated, self._looked = found.nll, step
        better = math.isfinite(found.nll) and (self._best is None or found.nll < self._best)
        if better:
            self._best, self._best_step, self._stale = found.nll, step, 0
        else:
            self._stale += 1
        progress.say(f"step {step:,}  {found}" + ("  the best so far" if better else ""))
        return better

    @property
    def _kept_step(self) -> int | None:
        """Of the checkpoint that stays as the best."""
        return self._spared if self._best_step is None else self._best_step

    def _save(self) -> Checkpoint:
        run = {
            "data": self._batches.state(),
            "best": self._best,
            "best_step": self._best_step,
            "validated": self._validated,
            "looked": self._looked,
            "validates": self._validates,
            "spared": self._spared,
            "stale": self._stale,
            "seconds": self._seconds,
        }
        spare = frozenset(() if self._kept_step is None else (self._kept_step,))
        self._saved = checkpoint.save(
            self.folder, self.model, {"epoch": self._batches.epoch, "run": run},
            tokenizer=self.subwords, keep=self._keep, spare=spare,
        )  # fmt: skip
        return self._saved


class _Run:
    """The steps of a run, and what is done after each of them.

    A GPU is given a step before it is asked for the result of the one before, so that it never
    waits; what follows of a result is done when it is there. On the CPU that is at once. Where a
    step may be followed by something that needs the model as it is then, its result is waited for
    before the next step begins.
    """

    def __init__(self, trainer: Trainer, log: Log, progress: Progress) -> None:
        self.step = trainer.model.counters[0]
        self.recent = Sums()
        # the last, its epoch and the seconds until it came, and of those the paused ones; None: it is
        # in the log
        self._result: tuple[StepResult, int, float, float] | None = None
        self._trainer, self._log, self._progress = trainer, log, progress
        self._epochs: deque[int] = deque()  # of the steps that have been begun
        self._bad = 0
        self._paused = 0.0  # by validation and checkpoints
        self._before = trainer._seconds
        self._begun = self._saved = time.monotonic()
        while trainer.model.results[0] > 0:  # those of others
            trainer.model.result()

    @property
    def behind(self) -> int:
        """Steps that have been begun and whose results are not here."""
        return len(self._epochs)

    @property
    def expected(self) -> int:
        """Updates made when all that has been begun is done, if all of it is finite."""
        return self.step + self.behind

    def is_due(self) -> bool:
        """May something have to be done before the next step begins?"""
        trainer = self._trainer
        validates = trainer._validation is not None
        return (
            self._bad > 0
            or (validates and self.expected % trainer._validate_every == 0)
            or self._saves(self.expected)
        )

    def _saves(self, step: int) -> bool:
        trainer = self._trainer
        late = time.monotonic() - self._saved >= 60 * trainer._save_minutes
        return step % trainer._save_every == 0 or late

    def begin(self, update: Any) -> None:
        """A step. It takes the result of the one before, and its own if that is there."""
        model = self._trainer.model
        model.step(update, wait=False)
        self._epochs.append(self._trainer._batches.epoch)
        while self.behind > 1 or (self.behind > 0 and model.results[1] > 0):
            self._take()

    def catch_up(self) -> None:
        """Waits for all results."""
        while self.behind > 0:
            self._take()

    def _take(self) -> None:
        """One result, and what follows of it."""
        trainer, log = self._trainer, self._log
        result = trainer.model.result()
        epoch = self._epochs.popleft()
        self.step = result.step
        trainer._seconds = self._before + time.monotonic() - self._begun
        if not result.finite:
            self._bad += 1
            figures = {"step": result.step, "attempt": result.attempt}
            log.write("not finite", figures | {"first_bad": result.first_bad})
            if self._bad == _NOT_FINITE:
                raise TrainingError(
                    f"loss or gradient was not finite in {self._bad} steps in a row, first in "
                    f"{result.first_bad}: a lower learning rate or a longer warm-up may help"
                )
            return
        self._bad, trainer._saved = 0, None
        self.recent.add(result)
        self._result = result, epoch, trainer._seconds, self._paused
        self._progress.step(
            result.step, result.loss, result.nll, result.tokens, result.learning_rate
        )
        if result.step % trainer._log_every == 0 or result.step >= trainer._steps:
            self.log_the_last()
        if self.behind == 0:
            begun = time.monotonic()
            self._look_and_save(result.step)
            self._paused += time.monotonic() - begun

    def log_the_last(self) -> None:
        """A line of the steps since the one before it, if there are any."""
        if self._result is not None:
            self._log.write("train", self.recent.figures(*self._result))
            self.recent.begin()
            self._result = None

    def _look_and_save(self, step: int) -> None:
        """Validation and checkpoint, where they are due; the model is that of this step."""
        trainer = self._trainer
        better = False
        looks = step % trainer._validate_every == 0 or step >= trainer._steps
        if trainer._validation is not None and looks:
            better = trainer._validate(step, self._log, self._progress)
        if self._saves(step) or better:
            trainer._save()
            self._saved = time.monotonic()

    def validate_the_last(self) -> None:
        """What the run has come to, where the last step was not one to be looked at."""
        trainer = self._trainer
        if trainer._validation is not None and self.step != trainer._looked:
            trainer._validate(self.step, self._log, self._progress)
            trainer._save()


def _percent(share: float) -> str:
    """Rounded, but 100% only where it is all."""
    return f"{share if share == 1 else min(share, 0.99):.0%}"


def _check_minutes(name: str, value: float) -> float:
    minutes = number_of(name, value)
    if not minutes > 0:
        raise ValueError(f"{name}: expected more than 0, got {value}")
    return minutes


def _made(makes: Callable[[], Subwords]) -> Subwords:
    own = makes()
    if not is_subwords(own):
        raise TypeError(f"subwords: expected it to make Subwords, got {own!r:.80}")
    return own


def _subwords_of(folder: Path, given: Subwords | Callable[[], Subwords] | None) -> Subwords:
    """Those that were saved, which what is given must not contradict."""
    own: Subwords | None = None
    if isinstance(given, Subwords):
        own = given
    elif given is not None and wants_object(folder):
        own = _made(given)
    with called("subwords", "tokenizer"):
        subwords = load_subwords(folder, tokenizer=own)
    return subwords if own is None else own
