# SPDX-License-Identifier: Apache-2.0
"""The training loop: it learns, ends when it should, goes on bit for bit, and leaves when asked."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import relpos
import text_files
from relpos.data import TokenCache, Words
from relpos.saved import find_model
from relpos.train import checkpoint, newest
from relpos.train import trainer as trainer_module
from relpos.train.ending import alone, interrupts
from relpos.train.events import Events, crc32c
from relpos.train.log import LOG, Log, Sums, read_log
from relpos.train.progress import Progress, clock_text, perplexity
from relpos.train.trainer import Outcome, Trainer, TrainingError
from small_data import Numbers
from small_model import assert_same_bits, state_of

# Where others start: in the repository Python would import the sources.
PACKAGE = Path(relpos.__file__).parent.parent

TEXT = text_files.pairs(300)
VALID = text_files.pairs(40, seed=1)


def make(folder: Path, **given: Any) -> Trainer:
    config = given.pop("config", None) or text_files.config()
    settings = {
        "validation": VALID, "subwords": text_files.vocabulary(), "tokens": 256, "sentences": 32,
        "validate_every": 20, "save_every": 25, "log_every": 5, "progress": "none",
    } | given  # fmt: skip
    data = settings.pop("data", TEXT)
    return Trainer(config, data, folder=folder, **settings)


def steps_in(folder: Path) -> list[int]:
    return [each.step for each in checkpoint.checkpoints(folder)]


def kinds_in(folder: Path, kind: str) -> list[int]:
    return [line["step"] for line in read_log(folder) if line["kind"] == kind]


# ---- a run ---------------------------------------------------------------------------------------


def test_a_run(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", config=text_files.config(steps=60))
    before = trainer.validate()
    outcome = trainer.train()
    assert (outcome.reason, outcome.step) == ("steps", 60)
    assert outcome.validation is not None and outcome.validation < before.nll - 0.3
    assert outcome.best == outcome.validation and outcome.best_step == 60
    assert trainer.validate().nll == outcome.validation
    assert outcome.nll < before.nll
    assert outcome.checkpoint == newest(tmp_path / "run")
    best = f"all steps made, at step 60, best validation {outcome.best:.4f} at step 60: "
    assert str(outcome) == f"{best}{outcome.checkpoint.folder}"
    assert steps_in(tmp_path / "run") == [20, 25, 40, 50, 60]  # best ones, and every 25
    folder = outcome.checkpoint.folder
    assert relpos.data.load_subwords(folder / "tokenizer").size == trainer.subwords.size
    assert outcome.checkpoint.config == trainer.config
    assert trainer.config.source_vocabulary == trainer.subwords.size == 28

    log = read_log(tmp_path / "run")
    trained = [line for line in log if line["kind"] == "train"]
    assert [line["step"] for line in trained] == list(range(5, 61, 5))
    assert kinds_in(tmp_path / "run", "validation") == [20, 40, 60]
    for line in trained:
        assert np.isclose(line["perplexity"], np.exp(line["nll"])) and line["tokens"] > 5 * 100
        assert line["learning_rate"] == pytest.approx(0.003) and line["gradient_norm"] > 0
        assert 0 <= line["accuracy"] <= 1 and line["epoch"] in range(10)
    assert trained[-1]["tokens_per_second"] > 0


def test_what_is_not_stored_is_computed_again(tmp_path: Path) -> None:
    settings = {"config": text_files.config(encoder__layers=2, steps=3), "validation": None}
    trained = []
    for recompute in (False, True):
        trainer = make(tmp_path / str(recompute), **settings, recompute=recompute)
        with relpos.profile(trainer.model) as profile:
            nll = trainer.train().nll
        trained.append((sum(line.operations for line in profile.lines), nll))
    assert trained[1][0] > 1.05 * trained[0][0] and trained[1][1] == trained[0][1]


def test_what_the_log_says_is_what_was_trained(tmp_path: Path) -> None:
    """Means over the labels of five steps, against the steps done by hand."""
    make(tmp_path, config=text_files.config(steps=10), validation=None).train()
    twin = make(tmp_path / "twin", validation=None)
    results = [twin.model.step(update) for update, _ in zip(twin._batches, range(10), strict=False)]
    for line, part in zip(read_log(tmp_path), (results[:5], results[5:]), strict=True):
        tokens = sum(each.tokens for each in part)
        assert line["tokens"] == tokens and line["step"] == part[-1].step
        for name in ("loss", "nll", "accuracy"):
            mean = sum(getattr(each, name) * each.tokens for each in part) / tokens
            assert line[name] == pytest.approx(mean, rel=1e-12)


def test_the_log_of_the_last_steps(tmp_path: Path) -> None:
    """Those that log_every has no line for have one of their own, also where a run goes on."""
    for steps in (3, 7, 7):
        make(tmp_path, steps=steps, validation=None, resume=True).train()
    lines = [line for line in read_log(tmp_path) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [3, 5, 7]
    twin = make(tmp_path / "twin", validation=None)
    tokens = [sum(twin.model.step(x).tokens for x in islice(twin._batches, n)) for n in (3, 2, 2)]
    assert [line["tokens"] for line in lines] == tokens


def test_validation_takes_no_tokens_a_second() -> None:
    figures = {"loss": 1.0, "nll": 1.0, "accuracy": 0.5, "gradient_norm": 1.0, "learning_rate": 1.0}
    result: Any = SimpleNamespace(step=1, attempt=1, tokens=600, **figures)
    sums = Sums()
    for seconds, paused in ((10.0, 4.0), (20.0, 8.0)):
        sums.add(result)
        line = sums.figures(result, 0, seconds, paused)
        sums.begin()
    assert line["tokens_per_second"] == 100.0


def steps_take(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[float]:
    """What time it is for trainers, in a list of one: so much later after every step."""
    now, real = [0.0], relpos.Transformer.result

    def result(model: relpos.Transformer) -> Any:
        now[0] += seconds
        return real(model)

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(relpos.Transformer, "result", result)
    return now


def slow_to_save(trainer: Trainer, wait: Callable[[], None]) -> None:
    save = trainer._save

    def slowly() -> Any:
        wait()
        return save()

    trainer._save = slowly  # type: ignore[method-assign]


def test_saving_takes_none_however_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = steps_take(monkeypatch, 2.0)
    config = text_files.config(steps=4)
    trainer = make(tmp_path, config=config, validation=None, save_every=1, log_every=1)
    slow_to_save(trainer, lambda: now.append(now.pop() + 1000))
    trainer.train()
    lines = [line for line in read_log(tmp_path) if line["kind"] == "train"][1:]
    assert [line["tokens_per_second"] for line in lines] == [line["tokens"] / 2 for line in lines]


@pytest.mark.parametrize("ending", [{"steps": 7}, {"epochs": 1}])
def test_validation_at_the_end_takes_none_either(tmp_path: Path, ending: dict[str, int]) -> None:
    """The line of the last steps is of when they ended, and comes before what is done after them."""
    trainer = make(tmp_path, **ending, validate_every=7, save_every=1)
    slow_to_save(trainer, lambda: time.sleep(0.05))
    trainer.train()
    log = read_log(tmp_path)
    rates = [line["tokens_per_second"] for line in log if line["kind"] == "train"]
    assert len(rates) >= 2 and all(rate > 0 for rate in rates[1:])
    if "steps" in ending:
        assert [line["kind"] for line in log][-2:] == ["train", "validation"]


def test_the_door() -> None:
    assert relpos.Trainer is Trainer and "Trainer" in relpos.__all__
    with pytest.raises(AttributeError, match="module 'relpos' has no attribute 'trainer'"):
        relpos.trainer  # noqa: B018


def test_a_decoder_alone(tmp_path: Path) -> None:
    config = text_files.config(encoder__layers=0, steps=30)
    lines = [source for source, _ in TEXT]
    trainer = make(tmp_path, config=config, data=lines, validation=lines[:20])
    before = trainer.validate()
    assert trainer.train().validation is not None and trainer.validate().nll < before.nll
    with pytest.raises(ValueError, match="data: expected lines, for a decoder alone, got pairs"):
        make(tmp_path / "other", config=config)
    with pytest.raises(ValueError, match="data: expected pairs, for an encoder and a decoder"):
        make(tmp_path / "third", data=lines)


def test_a_cache_of_ones_own(tmp_path: Path) -> None:
    cache = TokenCache.build(tmp_path / "cache", TEXT, text_files.vocabulary())
    trainer = make(tmp_path / "run", data=cache, config=text_files.config(steps=3))
    assert trainer.train().step == 3 and trainer.cache is cache
    with pytest.raises(ValueError, match="subwords: expected those that the token cache"):
        make(tmp_path / "other", data=cache, subwords=None)
    with pytest.raises(ValueError, match="subwords: expected the 28 tokens that .* was made with"):
        make(tmp_path / "third", data=cache, subwords=relpos.data.Words(["a"]))


def test_text_of_which_much_is_lost_is_told(tmp_path: Path) -> None:
    """With the vocabulary of another text, or lines that are longer than a model of it takes."""
    with pytest.warns(UserWarning) as told:
        make(tmp_path / "words", subwords=Words(["no", "word", "of", "these"]))
        kept = make(tmp_path / "long", config=text_files.config().replace({"max_length": 4})).report
    words, long = (str(each.message) for each in told)
    assert words == (
        "100% of all tokens are unknown: this vocabulary is of another text; subwords=None "
        "(--subwords bpe) learns one of this"
    )
    assert long == (
        f"{kept.too_long / kept.lines:.0%} of the lines are too long, and left out: max_length=N "
        "(--set max_length=N) takes longer ones"
    )
    assert {each.filename for each in told} == {__file__}  # where Trainer is called


def test_subwords_are_made_where_there_are_none(tmp_path: Path, capsys: Any) -> None:
    made = []

    def make_them() -> Any:
        made.append(1)
        return text_files.vocabulary()

    config = text_files.config(steps=2)
    make(tmp_path, config=config, subwords=make_them, progress="lines").train()
    assert "learning the subwords\n" in capsys.readouterr().err
    make(tmp_path, config=config, subwords=make_them, resume=True, steps=3).train()
    assert len(made) == 1
    with pytest.raises(ValueError, match="has checkpoints already"):
        make(tmp_path, subwords=make_them)
    assert len(made) == 1


def test_a_function_that_wraps_goes_on_as_it_began(tmp_path: Path) -> None:
    words = text_files.vocabulary()

    def wrap() -> Any:
        return relpos.data.Wrapped(words, size=words.size, bos=words.bos, eos=words.eos)

    def both() -> Any:
        return relpos.data.Sides(words, wrap())

    config = text_files.config(share_embeddings=False, steps=1)
    for name, makes in (("one", wrap), ("sides", both)):
        make(tmp_path / name, config=config, subwords=makes).train()
        again = make(tmp_path / name, config=config, subwords=makes, resume=True, steps=2)
        assert again.train().step == 2
        make(tmp_path / f"{name}-start", config=config, subwords=makes, start=again.folder)


def test_subwords_of_a_class_of_ones_own(tmp_path: Path) -> None:
    """They are given again, or read from their pickle by who says so."""
    own, run = Numbers(100), tmp_path / "run"
    numbers: dict[str, Any] = {"data": [("5 6", "6 5"), ("7 8 9", "9 8 7")], "validation": None}
    make(run, **numbers, subwords=own, steps=2).train()
    assert (run / "tokenizer" / "numbers.json").exists()
    for folder, given in ((run, {"resume": True}), (tmp_path / "new", {"start": run})):
        with pytest.raises(ValueError, match="subwords.pickle: .* an object of your own"):
            make(folder, **numbers, **given, subwords=None)
        trainer = make(folder, **numbers, **given, subwords=own, steps=3)
        assert trainer.subwords is own and trainer.train().reason == "steps"
    assert relpos.Translator.load(run, tokenizer=own).subwords is own
    assert isinstance(relpos.Translator.load(run, unpickle=True).subwords, Numbers)
    with pytest.raises(TypeError, match="tokenizer: expected the Subwords that .* tells of, got 3"):
        relpos.Translator.load(run, tokenizer=3)
    with pytest.raises(ValueError, match="subwords.json: size: expected 100, got 99"):
        relpos.Translator.load(run, tokenizer=Numbers(99))
    numbers |= {"subwords": relpos.data.Sides(Numbers(50), own)}
    numbers |= {"config": text_files.config(share_embeddings=False)}
    make(tmp_path / "sides", **numbers, steps=2).train()
    assert make(tmp_path / "sides", **numbers, steps=3, resume=True).train().step == 3


def test_subwords_that_could_not_be_read_again_are_refused_at_the_start(tmp_path: Path) -> None:
    class Half(Numbers):
        def save(self, folder: Any) -> None:
            text_files.vocabulary().save(folder)

    with pytest.raises(ValueError, match="subwords: another vocabulary than that of "):
        make(tmp_path, subwords=Half())


def test_subwords_by_default(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    sizes = {"source_vocabulary": 300, "target_vocabulary": 300}
    config = text_files.config(**sizes, max_length=64, steps=2)
    trainer = make(tmp_path, config=config, subwords=None, tokens=1024)
    assert isinstance(trainer.subwords, relpos.data.SentencePiece)
    assert trainer.subwords.size == trainer.config.source_vocabulary == 300
    trainer.train()
    again = make(tmp_path, config=config, subwords=None, tokens=1024, resume=True)
    assert again.subwords.fingerprint() == trainer.subwords.fingerprint()


# ---- its end -------------------------------------------------------------------------------------


def test_epochs_end_it(tmp_path: Path) -> None:
    outcome = make(tmp_path, epochs=2, steps=10_000).train()
    assert (outcome.reason, outcome.epoch) == ("epochs", 2)
    again = make(tmp_path, epochs=2, steps=10_000, resume=True).train()
    assert (again.reason, again.step) == ("epochs", outcome.step)
    further = make(tmp_path, epochs=3, steps=10_000, resume=True).train()
    assert further.epoch == 3 and further.step == pytest.approx(1.5 * outcome.step, abs=2)


def test_results_of_others_are_not_the_runs(tmp_path: Path) -> None:
    trainer = make(tmp_path, steps=4, validation=None, log_every=1)
    trainer.model.step(relpos.Batch.from_pairs([[5, 6]], [[6, 5]], bos=1, eos=2), wait=False)
    trainer.train()
    assert kinds_in(tmp_path, "train") == [2, 3, 4]


def test_what_is_gone_through_once(tmp_path: Path) -> None:
    """With subwords that are there an iterator is as good as a list."""
    config = text_files.config(steps=3)
    one, other = (
        make(tmp_path / name, config=config, data=data, validation=validation)
        for name, data, validation in (
            ("list", TEXT, VALID), ("iterator", (x for x in TEXT), iter(VALID)),
        )
    )  # fmt: skip
    assert one.report == other.report and one.validation_report == other.validation_report
    assert one.train().validation == other.train().validation
    for name, x in one.model.parameters.items():
        assert np.array_equal(x, other.model.parameters[name]), name
    again = make(tmp_path / "list", config=config, data=iter(TEXT), subwords=None, resume=True)
    assert again.report == one.report


def test_the_end_is_validated(tmp_path: Path) -> None:
    """Where the last step is none of validate_every's, once, and not where nothing was done."""
    config = text_files.config(steps=25)
    outcome = make(tmp_path, config=config, save_every=25).train()
    assert kinds_in(tmp_path, "validation") == [20, 25]
    assert outcome.validation is not None and outcome.best_step in (20, 25)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found == outcome.checkpoint
    told = json.loads((found.folder / checkpoint.STATE).read_text())["run"]
    assert (told["validated"], told["best"]) == (outcome.validation, outcome.best)
    again = make(tmp_path, config=config, resume=True)
    for _ in range(2):  # with nothing to do, nothing is saved
        assert again.train().checkpoint == outcome.checkpoint
    assert kinds_in(tmp_path, "validation") == [20, 25]
    assert checkpoint.checkpoints(tmp_path)[-1] == outcome.checkpoint
    later = tmp_path / "later"
    trainer = make(later, config=config, validation=None)
    trainer.train()
    for _ in range(2):  # the first has what it goes on from validated, the second finds that done
        assert make(later, config=config, resume=True).train().best_step == 25
        assert kinds_in(later, "validation") == [25]
    state = checkpoint.checkpoints(tmp_path)[-1].state
    del state["run"]["looked"]  # as of a version that did not say what was validated
    checkpoint.save(tmp_path / "old", trainer.model, state, tokenizer=trainer.subwords)
    old = make(tmp_path / "old", config=config, resume=True).train()
    assert (old.step, old.validation) == (25, outcome.validation)
    assert kinds_in(tmp_path / "old", "validation") == []
    config = text_files.config(steps=0)
    assert make(tmp_path / "none", config=config).train().best_step == 0
    short = make(tmp_path / "short", epochs=1, steps=10_000, validate_every=10_000).train()
    assert short.best_step == short.step and short.best == short.validation is not None


def test_the_last_step_is_saved_once(tmp_path: Path) -> None:
    """It is validated before save_every has it saved, not behind it."""
    outcome = make(tmp_path, config=text_files.config(steps=25), save_every=25).train()
    assert kinds_in(tmp_path, "validation") == [20, 25]
    assert outcome.checkpoint.folder == tmp_path / "step-000000025"


def test_time_ends_it(tmp_path: Path) -> None:
    outcome = make(tmp_path, minutes=0.5 / 60, steps=10**6, validation=None).train()
    assert outcome.reason == "time" and outcome.step > 0
    again = make(tmp_path, minutes=0.5 / 60, steps=10**6, validation=None, resume=True).train()
    assert (again.reason, again.step) == ("time", outcome.step)


def test_time_goes_on_where_a_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    steps_take(monkeypatch, 600.0)
    monkeypatch.setattr("relpos.train.progress.SECONDS_BETWEEN_LINES", 0.0)
    settings = {"validation": None, "epochs": 9, "log_every": 1, "progress": "lines"}
    make(tmp_path, **settings, steps=2, minutes=60).train()
    outcome = make(tmp_path, **settings, minutes=60, resume=True).train()
    assert (outcome.reason, outcome.step) == ("time", 6)
    seconds = [line["seconds"] for line in read_log(tmp_path) if line["kind"] == "train"]
    assert seconds == [600.0 * step for step in range(1, 7)]
    assert re.search(r"step 3 .*left (40:00|39:\d\d)\n", capsys.readouterr().err)  # by a true clock


def test_patience_ends_it_and_the_best_one_stays(tmp_path: Path) -> None:
    """With a learning rate that ruins the model after a good beginning."""
    config = text_files.config(learning_rate=0.004, steps=10_000)
    trainer = make(tmp_path, config=config, validate_every=5, patience=3, keep=1, save_every=7)
    found = iter([3.0, 2.0, 2.5, 2.0, 2.1, 1.0])
    validation = trainer.validate()
    trainer.validate = lambda: type(validation)(next(found), 1.0, 0.0, 1)  # type: ignore[method-assign]
    outcome = trainer.train()
    assert (outcome.reason, outcome.step) == ("patience", 25)
    assert (outcome.best, outcome.best_step, outcome.validation) == (2.0, 10, 2.1)
    assert steps_in(tmp_path) == [10, 25]


def test_patience_goes_on_where_a_run_does(tmp_path: Path) -> None:
    found = iter([2.0, 2.5, 2.6, 2.7, 2.8])
    for steps, ended in ((15, ("steps", 15)), (99, ("patience", 20))):
        trainer = make(tmp_path, steps=steps, validate_every=5, patience=3, resume=True)
        like = trainer.validate()
        trainer.validate = lambda of=like: replace(of, nll=next(found))  # type: ignore[misc]
        outcome = trainer.train()
        assert (outcome.reason, outcome.step) == ended


def test_accuracy_is_of_all_labels(tmp_path: Path) -> None:
    trainer = make(tmp_path, steps=20)
    trainer.train()
    found, batches = trainer.validate(), list(trainer._validation or ())
    hits = np.concatenate([x for batch in batches for x in trainer.model.hits(batch)])
    assert len(batches) > 1 and found.tokens == hits.size
    assert found.accuracy == pytest.approx(hits.mean())


def test_what_is_not_finite_is_never_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = trainer_module.validate, iter(range(99))

    def validate(*given: Any) -> Any:
        found = real(*given)
        return replace(found, nll=math.nan) if next(calls) == 0 else found

    monkeypatch.setattr(trainer_module, "validate", validate)
    outcome = make(tmp_path, steps=40, patience=2).train()
    assert outcome.best_step == 40 and math.isfinite(outcome.best)


def test_another_validation_text_begins_its_own_best(tmp_path: Path, capsys: Any) -> None:
    before = make(tmp_path, steps=40).train()
    other = make(tmp_path, steps=40, resume=True, validation=TEXT)
    assert "goes on with another validation text" in capsys.readouterr().err
    after = other.train()  # ended already, but never looked at with this text
    assert after.best is not None and after.best != before.best
    make(tmp_path, steps=40, resume=True, validation=TEXT)
    assert capsys.readouterr().err == ""


def test_another_validation_text_of_the_same_tokens(tmp_path: Path, capsys: Any) -> None:
    before = make(tmp_path / "run", steps=1, validation=[("ba be", "bi")])
    state = before.train().checkpoint.state
    state["run"]["validates"] = state["run"]["validates"][0]  # as of a version without borders
    checkpoint.save(tmp_path / "old", before.model, state, tokenizer=before.subwords)
    for name, told in (("run", True), ("old", False)):
        make(tmp_path / name, steps=1, resume=True, validation=[("ba", "be bi")])
        assert ("goes on with another validation text" in capsys.readouterr().err) == told


def test_the_best_by_an_old_text_stays_until_there_is_another(tmp_path: Path, capsys: Any) -> None:
    """Also where a part of the run had no validation at all."""
    best = make(tmp_path, steps=20, keep=1, save_every=50).train().best_step
    assert best == 20
    make(tmp_path, steps=25, keep=1, resume=True, validation=None).train()
    assert steps_in(tmp_path) == [20, 25]
    again = {"keep": 1, "resume": True, "validation": TEXT, "validate_every": 500, "save_every": 3}
    trainer = make(tmp_path, steps=30, **again)
    assert "goes on with another validation text" in capsys.readouterr().err
    trainer._save()
    assert steps_in(tmp_path) == [20, 25]
    make(tmp_path, steps=30, **again).train()
    assert steps_in(tmp_path) == [30]


def test_checkpoints_none_of_which_is_whole_are_not_begun_over(tmp_path: Path) -> None:
    make(tmp_path, steps=5, keep=1).train()
    [only] = checkpoint.checkpoints(tmp_path)
    with (only.folder / "optimizer.safetensors").open("r+b") as file:
        file.write(b"spoilt")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with (
        pytest.warns(checkpoint.CheckpointWarning, match="passed over") as told,
        pytest.raises(checkpoint.CheckpointError, match="none of its checkpoints is whole; a run"),
    ):
        make(tmp_path, steps=9, resume=True)
    assert told[0].filename == __file__  # not a line of relpos
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_encoder_alone_is_refused_before_the_work(tmp_path: Path) -> None:
    config = text_files.config().replace({"decoder.layers": 0})
    with pytest.raises(ValueError, match=r"^config: decoder\.layers=0: an encoder alone"):
        make(tmp_path / "run", config=config)
    assert not (tmp_path / "run").exists()


def test_weights_beside_checkpoints_are_told(tmp_path: Path) -> None:
    make(tmp_path, steps=5).train()
    shutil.copy(next(tmp_path.glob("step-*/model.safetensors")), tmp_path)
    with pytest.warns(
        checkpoint.CheckpointWarning, match="is taken, not the checkpoints beside"
    ) as told:
        assert find_model(tmp_path).weights == (tmp_path / "model.safetensors",)
    assert told[0].filename == __file__
    assert find_model(tmp_path, best=True).weights[0].parent != tmp_path


def test_minutes_save_too(tmp_path: Path) -> None:
    config = text_files.config(steps=4)
    make(tmp_path, config=config, validation=None, save_every=1000, save_minutes=1e-9).train()
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_minutes_count_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_take(monkeypatch, 30.0)
    config = text_files.config(steps=8)
    make(tmp_path, config=config, validation=None, save_every=1000, save_minutes=1.5).train()
    assert steps_in(tmp_path) == [3, 6, 8]


# ---- going on ------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
import test_trainer as here
trainer = here.make(Path(sys.argv[1]))
step = trainer.model.step
def step_or_die(update, **given):
    if trainer.model.counters[0] == 37:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(update, **given)
class Model:
    def __getattr__(self, name):
        return step_or_die if name == "step" else getattr(model, name)
model, trainer.model = trainer.model, Model()
from relpos.train import checkpoint
checkpoint_save = checkpoint.save
checkpoint.save = lambda folder, _, *a, **k: checkpoint_save(folder, model, *a, **k)
trainer.train()
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def test_kill_and_resume_bit_for_bit(tmp_path: Path) -> None:
    """Data, dropout, validation and what the log says are those of a run that was never broken."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=120, cwd=PACKAGE
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert steps_in(tmp_path / "killed") == [20, 25]
    with (tmp_path / "killed" / LOG).open("a") as log:
        log.write('{"kind": "train", "step": 3')  # cut in the middle of a line

    resumed = make(tmp_path / "killed", resume=True, subwords=None)
    assert resumed.resumed is not None and resumed.model.counters == (25, 25)
    outcome = resumed.train()
    unbroken = make(tmp_path / "unbroken")
    expected = unbroken.train()
    assert_same_bits(state_of(resumed.model), state_of(unbroken.model))
    assert resumed.model.counters == unbroken.model.counters == (60, 60)
    assert figures(outcome) == figures(expected)
    logs = [
        [
            {name: line.get(name) for name in ("kind", "step", "nll", "accuracy", "epoch")}
            for line in read_log(tmp_path / run)
            if line["kind"] != "resume" and line["step"] > 25
        ]
        for run in ("killed", "unbroken")
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 9


def figures(outcome: Outcome) -> tuple[Any, ...]:
    shown = (outcome.reason, outcome.step, outcome.epoch, outcome.validation)
    return (*shown, outcome.best, outcome.best_step)


def test_a_folder_with_checkpoints(tmp_path: Path, capsys: Any) -> None:
    make(tmp_path, config=text_files.config(steps=2)).train()
    with pytest.raises(
        ValueError, match="has checkpoints already: resume=True, or --resume, goes on"
    ):
        make(tmp_path)
    with pytest.raises(ValueError, match=f"^subwords: another vocabulary than that of {tmp_path}"):
        make(tmp_path, resume=True, subwords=relpos.data.Words(["a", "b"]))
    capsys.readouterr()
    with pytest.raises(ValueError, match="^.*/step-000000002: seed: it was 1, is 5 now"):
        make(tmp_path, config=text_files.config(steps=2, seed=5), resume=True, seed=5)
    assert "goes on" not in capsys.readouterr().err
    assert make(tmp_path / "new", resume=True).resumed is None


def test_a_run_that_goes_on_with_another_configuration(tmp_path: Path, capsys: Any) -> None:
    config = text_files.config(steps=2)
    make(tmp_path, config=config).train()
    again = config.replace({"warmup": config.warmup + 1, "steps": 3})
    make(tmp_path, config=again, resume=True, progress="lines").train()
    said = (
        f"goes on with warmup={again.warmup}, and {config.warmup} before; steps=3, and 2 before\n"
    )
    assert said in capsys.readouterr().err
    wider = config.replace({"width": 2 * config.width})
    sentence = f"^config: not that of this run: width={wider.width}, and {config.width} before"
    with pytest.raises(ValueError, match=sentence):
        make(tmp_path, config=wider, resume=True)


def test_a_run_that_starts_with_the_weights_of_another(tmp_path: Path, capsys: Any) -> None:
    """Weights and subwords are those of the other; moments, counters and folder are its own."""
    config = text_files.config(steps=3).replace({"ema": 0.9})
    first = make(tmp_path / "first", config=config)
    outcome = first.train()
    averages = first.model.averages
    for start in (tmp_path / "first", outcome.checkpoint.folder):
        second = make(
            tmp_path / f"from-{start.name}", start=start, subwords=None, progress="lines",
            config=config.replace({"dropout": 0.25, "steps": 2}), data=VALID,
        )  # fmt: skip
        said = capsys.readouterr().err
        assert f"goes on with dropout=0.25, and {config.dropout} before; steps=2, and 3" in said
        assert second.started == outcome.checkpoint.folder / "average.safetensors"
        assert second.resumed is None and second.model.counters == (0, 0)
        assert second.subwords.fingerprint() == first.subwords.fingerprint()
        assert_same_bits(dict(second.model.parameters), dict(averages))
        assert_same_bits(dict(second.model.averages), dict(averages))
        assert not any(each.any() for each in second.model.first_moments.values())
    assert second.train().step == 2
    again = make(
        second.folder, start=tmp_path / "first", config=second.config, data=VALID, resume=True
    )
    assert again.started is None and again.resumed == newest(second.folder)
    whole = Trainer(
        None, VALID, folder=tmp_path / "third", start=outcome.checkpoint.folder / "model.safetensors",
        tokens=256, sentences=32, progress="none",
    )  # fmt: skip
    assert whole.config == first.config


def test_what_cannot_be_started_with(tmp_path: Path) -> None:
    config = text_files.config(steps=1)
    make(tmp_path / "first", config=config).train()
    start, folder = tmp_path / "first", tmp_path / "second"
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such model"):
        make(folder, start=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"^subwords: another vocabulary than that of {start}"):
        make(folder, start=start, subwords=relpos.data.Words(["a", "b"]))
    wider = config.replace({"width": 2 * config.width})
    with pytest.raises(ValueError, match=f"^config: not that of start: width={wider.width}, and "):
        make(folder, start=start, config=wider)
    with pytest.raises(ValueError, match="^split: tokens of Words have no parts"):
        make(folder, start=start, subwords=None, split=0.1)
    (start / "step-000000001" / "tokenizer").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match="safetensors: beside it is no folder tokenizer"):
        make(folder, start=start / "step-000000001" / "model.safetensors")
    with pytest.raises(TypeError, match="^config: expected relpos.Config, got NoneType"):
        Trainer(None, VALID, folder=folder)


def test_what_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"got str; Config\.preset\('tiny'\) makes one$"):
        make(tmp_path, config="tiny")
    for subwords in ("words", relpos.data.Words, ["ba"], 5):
        with pytest.raises(TypeError, match="^subwords: expected Subwords, or what makes them"):
            make(tmp_path, subwords=subwords)
    for made in (5, relpos.data.Words):
        with pytest.raises(TypeError, match="^subwords: expected it to make Subwords, got "):
            make(tmp_path, subwords=lambda made=made: made)
    with pytest.raises(
        ValueError, match="^validation: max_length: no sentence fits into 16 tokens"
    ):
        make(tmp_path / "long", validation=[("ba " * 40, "ba " * 40)])


def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    trainer = make(tmp_path / "one", config=text_files.config(steps=1))
    checkpoint.save(tmp_path / "other", trainer.model, tokenizer=trainer.subwords)
    with pytest.raises(OSError, match=r"state\.json: not of a Trainer: 'run'"):
        make(tmp_path / "other", resume=True)


def test_two_in_one_folder(tmp_path: Path) -> None:
    one, other = make(tmp_path), make(tmp_path)
    came: list[str] = []

    def second() -> None:
        try:
            other.train()
        except TrainingError as error:
            came.append(str(error))

    thread = threading.Thread(target=second)
    step, model = one.model.step, one.model

    class Model:
        def __getattr__(self, name: str) -> Any:
            if name == "step" and not came:
                thread.start()
                thread.join()
            return step if name == "step" else getattr(model, name)

    one.model = Model()  # type: ignore[assignment]
    one._save = lambda: checkpoint.save(one.folder, model)  # type: ignore[method-assign]
    one.train()
    assert came == [f"{tmp_path}: another process trains here"]


def test_who_is_refused_has_written_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with alone(tmp_path), pytest.raises(TrainingError, match="another process trains here"):
        make(tmp_path, subwords=relpos.data.Words(["ba", "be"]))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_one_after_the_other_in_one_folder(tmp_path: Path) -> None:
    """Both were begun before there was anything to see."""
    one, other = (make(tmp_path, config=text_files.config(steps=3)) for _ in range(2))
    saved = one.train().checkpoint
    with pytest.raises(TrainingError, match="another run has saved here since this one was begun"):
        other.train()
    assert checkpoint.checkpoints(tmp_path) == [saved]
    again = one.train()  # its own checkpoint is no other run's
    assert (again.reason, again.step, again.checkpoint) == ("steps", 3, saved)


def test_a_process_that_was_forked_within_keeps_nobody_out(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from relpos.train.ending import alone\n"
        "reading, writing = os.pipe()\n"
        "with alone(Path(sys.argv[1])):\n"
        "    if os.fork() == 0:\n"
        "        os.close(writing)\n"
        "        os.read(reading, 1)  # to the end of its parent\n"
        "        os._exit(0)\n"
        "with alone(Path(sys.argv[1])):\n"
        "    print('alone')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True, text=True, env=environment(), cwd=PACKAGE, check=False,
    )  # fmt: skip
    assert run.stdout == "alone\n", run.stderr


def test_a_log_without_a_checkpoint(tmp_path: Path) -> None:
    """What a run that died before it saved has written is not part of the next one."""
    make(tmp_path, config=text_files.config(steps=20), validation=None).train()
    for each in checkpoint.checkpoints(tmp_path):
        shutil.rmtree(each.folder)
    again = make(tmp_path, config=text_files.config(steps=10), validation=None, resume=True)
    again.train()
    assert kinds_in(tmp_path, "train") == [5, 10]
    assert kinds_in(tmp_path, "resume") == [0]


# ---- what goes wrong -----------------------------------------------------------------------------


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    trainer = make(tmp_path, validation=None)
    next(iter(trainer.model.parameters.values()))[:] = np.nan
    with pytest.raises(TrainingError, match="not finite in 100 steps in a row, first in "):
        trainer.train()
    lines = (tmp_path / LOG).read_text().splitlines()
    assert len(lines) == 100 and all('"not finite"' in line for line in lines)
    assert steps_in(tmp_path) == []


def test_those_with_a_finite_one_between_are_not_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, numbers = relpos.Transformer.result, iter(range(150))

    def result(model: relpos.Transformer) -> Any:
        found = real(model)
        return found if next(numbers) == 75 else replace(found, finite=False)

    monkeypatch.setattr(relpos.Transformer, "result", result)
    config = text_files.config(steps=150)
    assert make(tmp_path, config=config, validation=None).train().reason == "steps"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps: expected 1 or more"),
        ({"minutes": 0}, "minutes: expected more than 0, got 0"),
        ({"patience": 2, "validation": None}, "patience: there is no validation"),
        ({"keep": 0}, "keep: expected 1 or more"),
        ({"data": [("a", "b"), ("c",)]}, "expected .* of str"),
        ({"data": []}, "data: expected lines with text, got nothing"),
        ({"validation": []}, "validation: expected lines with text, got nothing"),
        ({"validation": ["a", "b"]}, "validation: expected pairs, .* got lines"),
        ({"device": "gpu"}, "device is 'gpu', expected cpu, cuda or cuda:N"),
        ({"precision": "f16"}, "precision: expected"),
        ({"tokens": 0}, "tokens: expected 1 or more"),
        (
            {"data": iter(TEXT), "subwords": None},
            "data: expected what may be gone through more than once.*got list_iterator",
        ),
        ({"data": iter(()), "tokens": 99}, "data: expected lines with text, got nothing"),
        ({"validation": (text for text in "ab")}, "validation: expected pairs, .* got lines"),
        ({"subwords": VALID}, "subwords: expected Subwords.*relpos.data.Wrapped makes them of"),
        (
            {"data": [*TEXT, "x"]},
            r"^data: expected \(source, target\) of str as at first, item 300 ",
        ),
        ({"data": [("", " ")], "subwords": None}, "^data: expected at least one that is not empty"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        make(tmp_path / "run", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": 3}, "data: expected pairs of lines, as read_pairs gives, got 3"),
        ({"data": None}, "data: expected pairs of lines, as read_pairs gives, got None"),
        (
            {"data": "train.en"},
            "data: expected pairs of lines, as read_pairs gives, got 'train.en'",
        ),
        ({"data": [1, 2]}, r"data: expected \(source, target\) of str, item 0 is 1"),
        ({"data": iter([1, 2])}, r"data: expected \(source, target\) of str, item 0 is 1"),
        ({"validation": 3}, "validation: expected pairs of lines, as read_pairs gives, got 3"),
        ({"validation": [("a", "b"), 3]}, r"validation: .* of str, item 1 is 3"),
        ({"start": 3}, "start: expected str or PathLike, got int"),
        ({"start": ""}, "start: expected a path, got ''"),
        ({"seed": -1}, "seed: expected 0 or more, got -1"),
        ({"split": 0.1}, "split: tokens of Words have no parts to be split into"),
        ({"resume": "false"}, "resume: expected True or False, got str"),
        ({"tensorboard": "no"}, "tensorboard: expected True or False, got str"),
        ({"validate_bleu": "no"}, "validate_bleu: expected True or False, got str"),
        ({"minutes": "5"}, "minutes: expected a number, got str"),
        ({"minutes": True}, "minutes: expected a number, got True"),
    ],
)
def test_what_is_told_before_the_work(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        make(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_an_error_of_the_users_stays_theirs(tmp_path: Path) -> None:
    class Theirs(ValueError):
        def __init__(self, line: int, why: str) -> None:
            super().__init__(f"pairs: line {line}: {why}")

    def spoilt() -> Any:
        yield from TEXT
        raise Theirs(300, "why")

    with pytest.raises(Theirs, match="^pairs: line 300: why$"):
        make(tmp_path, data=spoilt())


def test_what_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders: tuple[Any, ...] = (None, b"run", 3, "")
    for folder in folders:
        with pytest.raises((ValueError, TypeError), match="^folder: expected "):
            make(folder)
    assert not any(tmp_path.iterdir())


def test_any_number_of_minutes(tmp_path: Path) -> None:
    for i, minutes in enumerate((np.int64(2), np.float32(0.5), 10**400)):
        assert make(tmp_path / str(i), minutes=minutes, steps=1).train().reason == "steps"


def test_validation_is_looked_at_before_the_work(tmp_path: Path) -> None:
    """All of it: what is wrong at its end would be found hours later."""
    for name, lines in (("a", "one\ntwo\nthree\n"), ("b", "eins\nzwei\n"), ("empty", "\n \n")):
        (tmp_path / name).write_text(lines)
    uneven = relpos.data.read_pairs(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match="a has 3 lines, .*b has 2"):
        make(tmp_path / "run", validation=uneven)
    empty = relpos.data.read_pairs(tmp_path / "empty", tmp_path / "empty")
    with pytest.raises(
        ValueError, match="validation: expected text in .*empty, got 2 read, 2 empty"
    ):
        make(tmp_path / "run", validation=empty)
    assert not (tmp_path / "run").exists()


# ---- Ctrl-C --------------------------------------------------------------------------------------

LONG = """
import sys, time
from pathlib import Path
import test_trainer as here
trainer = here.make(Path(sys.argv[1]), steps=10**9, validation=None, save_every=10**9)
step = trainer.model.step
if sys.argv[2:] == ["slow"]:
    from relpos.train import checkpoint
    def save(*_, **__):
        print("saving", flush=True)
        time.sleep(60)
    checkpoint.save = save
print("ready", flush=True)
print(trainer.train().reason, flush=True)
"""


def started(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LONG, *map(str, arguments)]
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=PACKAGE,
    )
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    while not (Path(arguments[0]) / LOG).exists() or not read_log(arguments[0]):
        time.sleep(0.01)
        assert run.poll() is None
    return run


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_once_saves_and_leaves(tmp_path: Path, which: signal.Signals) -> None:
    run = started(tmp_path)
    run.send_signal(which)
    out, error = run.communicate(timeout=60)
    assert (run.returncode, out) == (0, "interrupted\n"), error
    saved = newest(tmp_path)
    assert saved is not None and saved.step > 0
    more = make(tmp_path, steps=saved.step + 1, resume=True, validation=None)
    assert more.train().step == saved.step + 1


def test_twice_leaves_within_a_step(tmp_path: Path) -> None:
    """A command, while a call of minutes does not let Python's handlers run."""
    program = (
        "import hashlib\n"
        "from relpos.train.ending import interrupts, leaving_at_the_second_signal\n"
        "with leaving_at_the_second_signal(), interrupts():\n"
        "    print('ready', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=PACKAGE,
    )  # fmt: skip
    assert run.stdout is not None and run.stdout.readline() == b"ready\n"
    run.send_signal(signal.SIGINT)
    assert run.stderr is not None
    said = b"relpos: finishing the step, then saving; a second time leaves at once\n"
    assert run.stderr.readline() == said
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(1.0)
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 130
    said = b"relpos: interrupted: what came after the last checkpoint is not saved\n"
    assert run.stderr.read() == said
    run.stdout.close()
    run.stderr.close()


def test_other_signals_do_not_count() -> None:
    """Those for which a program has handlers of Python, as tqdm for the size of the terminal."""
    program = (
        "import os, signal, time\n"
        "from relpos.train.ending import interrupts, leaving_at_the_second_signal\n"
        "signal.signal(signal.SIGWINCH, lambda *_: None)\n"
        "with leaving_at_the_second_signal(), interrupts():\n"
        "    for _ in range(3):\n"
        "        os.kill(os.getpid(), signal.SIGWINCH)\n"
        "        time.sleep(0.05)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, env=environment(), cwd=PACKAGE, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, b"")


def test_twice_leaves_at_once(tmp_path: Path) -> None:
    run = started(tmp_path, "slow")
    run.send_signal(signal.SIGINT)
    assert run.stdout is not None and run.stdout.readline() == "saving\n"
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=30)
    assert run.returncode != 0 and "KeyboardInterrupt" in error


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts() as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert not interrupted()
            signal.raise_signal(signal.SIGTERM)
            assert interrupted()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_that_are_not_pythons_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that Python is part of may have its own, which Python could not put back."""
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts():
            pass
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_pipe_that_nobody_reads_saves_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            if "step" in text:
                raise BrokenPipeError
            return len(text)

    monkeypatch.setattr("relpos.train.progress.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(sys, "stderr", Pipe())
    outcome = make(tmp_path, steps=10**6, progress="lines", validation=None).train()
    assert outcome.reason == "interrupted" and outcome.step == outcome.checkpoint.step == 1


def test_a_full_disk_under_the_progress_is_no_reason_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relpos.train.progress.SECONDS_BETWEEN_LINES", 0.0)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        for steps in (2, 5):  # the second tells what it goes on with
            config = text_files.config(steps=steps)
            text = [("ba be", "be ba")] * steps  # and that the validation text is another
            outcome = make(
                tmp_path, config=config, subwords=text_files.vocabulary, validation=text,
                resume=True, progress="lines",
            ).train()  # fmt: skip
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    assert (outcome.reason, outcome.step) == ("steps", 5)


# ---- progress ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_now_and_then() -> None:
    now, stream = [100.0], io.StringIO()
    progress = Progress(200, 50, "lines", stream, clock=lambda: now[0])
    for step in range(51, 76):
        now[0] += 1.0
        progress.step(step, 1.0, math.log(2.0), 500, 0.002)
    progress.step(76, math.nan, math.nan, 500, 0.002)
    progress.say("a line of its own")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 60 of 200  loss 1.000  perplexity 2.00  500 tokens/s  rate 0.002  left 2:20",
        "step 70 of 200  loss 1.000  perplexity 2.00  500 tokens/s  rate 0.002  left 2:10",
        "a line of its own",
    ]
    now, stream = [100.0], io.StringIO()
    progress = Progress(200, 50, "lines", stream, clock=lambda: now[0], seconds=30.0)
    other = Progress(None, 50, "lines", stream, clock=lambda: now[0], seconds=30.0)
    for step in range(51, 61):
        now[0] += 1.0
        progress.step(step, 1.0, math.log(2.0), 500, 0.002)
        other.step(step, 1.0, math.log(2.0), 500, 0.002)
    timed, open_ended = stream.getvalue().splitlines()
    assert timed.endswith("left 0:20") and "of 200" in timed
    assert open_ended.endswith("left 0:20") and " of " not in open_ended
    quiet = io.StringIO()
    Progress(10, 0, "none", quiet).say("nothing")
    assert quiet.getvalue() == ""
    with pytest.raises(ValueError, match="progress: expected 'auto', 'bar', 'lines' or 'none'"):
        Progress(10, 0, "bars")


def test_loss_and_perplexity_are_of_the_same_steps() -> None:
    now, stream = [0.0], io.StringIO()
    progress = Progress(3, 0, "lines", stream, clock=lambda: now[0])
    for step, nll in enumerate((4.0, 4.0, 2.0), 1):
        now[0] += 10.0
        progress.step(step, nll, nll, 500, 0.002)
    assert "loss 3.800  perplexity 44.70" in stream.getvalue().splitlines()[-1]  # exp(3.8)


@pytest.mark.parametrize(("missing", "extra"), [("tqdm", "train"), ("ipywidgets", "notebooks")])
def test_lines_where_no_bar_can_be(
    missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked for a bar is told. In a notebook without widgets tqdm would print each anew."""
    monkeypatch.setitem(sys.modules, missing, None)
    if extra == "notebooks":
        monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    for kind in ("bar", "auto"):
        stream = Terminal()
        progress = Progress(1, 0, kind, stream, clock=iter((0.0, 10.0)).__next__)
        progress.step(1, 2.0, 1.0, 100, 0.5)
        *told, line = stream.getvalue().splitlines()
        assert line.startswith("step 1 of 1  loss 2.000")
        sentence = f"progress: lines, for a bar takes {missing}, `pip install 'relpos[{extra}]'`"
        assert told == ([sentence] if kind == "bar" else [])


def test_a_bar_on_a_terminal() -> None:
    pytest.importorskip("tqdm")
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with Progress(20, 10, "auto", stream) as progress:
            for step in range(11, 21):
                progress.step(step, 2.0, 1.0, 100, 0.5)
            progress.say("found something")
    assert "20/20" in terminal.getvalue() and "ppl 2.72" in terminal.getvalue()
    assert "found something" in terminal.getvalue()
    assert file.getvalue() == "found something\n"


def test_a_bar_has_all_figures_in_eighty_columns() -> None:
    pytest.importorskip("tqdm")
    terminal = Terminal()
    with Progress(100_000, 49_990, "bar", terminal) as progress:
        progress._bar.dynamic_ncols = lambda _: (80, 24)
        for step in range(49_991, 50_001):
            progress.step(step, 3.123, 2.0, 4, 0.000349)
    last = terminal.getvalue().rstrip().rsplit("\r", 1)[-1]
    assert len(last) <= 80
    for figure in ("loss 3.123", "ppl 7.39", "tok/s", "lr 0.000349", "50000/100000"):
        assert figure in last


def test_a_bar_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel, without a front end: the widgets that one would show are told of."""
    pytest.importorskip("ipywidgets")
    manager = pytest.importorskip("jupyter_client.manager")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))
    program = (
        "from relpos.train.progress import Progress\n"
        "with Progress(20, 10) as progress:\n"
        "    for step in range(11, 21):\n"
        "        progress.step(step, 2.0, 1.0, 100, 0.5)\n"
        "    progress.say('found something')\n"
    )
    kernel = manager.KernelManager(kernel_name="python3")
    kernel.start_kernel(cwd=str(tmp_path))
    client = kernel.client()
    client.start_channels()
    told: list[dict[str, Any]] = []
    try:
        client.wait_for_ready(timeout=60)
        reply = client.execute_interactive(
            program, store_history=False, timeout=60, output_hook=told.append
        )
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok", reply["content"]
    shown = [each["content"]["data"] for each in told if each["msg_type"] == "display_data"]
    assert len(shown) == 1 and "application/vnd.jupyter.widget-view+json" in shown[0]
    states = [each["content"]["data"]["state"] for each in told if "comm" in each["msg_type"]]
    assert [s["max"] for s in states if s.get("_model_name") == "FloatProgressModel"] == [20.0]
    assert [s["value"] for s in states if isinstance(s.get("value"), float)][-1] == 20.0
    assert any("20/20" in str(s.get("value")) and "2.72" in str(s.get("value")) for s in states)
    lines = [each["content"]["text"] for each in told if each["msg_type"] == "stream"]
    assert "".join(lines) == "found something\n"


def test_numbers_for_people() -> None:
    assert [clock_text(x) for x in (0, 61.4, 3599.6, 11229, math.inf)] == [
        "0:00", "1:01", "1:00:00", "3:07:09", "?",
    ]  # fmt: skip
    assert perplexity(0.0) == 1.0 and perplexity(1e6) == math.inf


# ---- the average of the weights ------------------------------------------------------------------


def test_the_average_is_what_is_validated(tmp_path: Path) -> None:
    config = text_files.config(steps=40, ema=0.95)
    trainer = make(tmp_path / "run", config=config)
    outcome = trainer.train()
    found = trainer.validate()
    assert found.nll == outcome.validation
    last = outcome.checkpoint
    assert last.average is not None and last.average.parent == last.folder
    batches = list(trainer._validation or ())

    def nll_of(path: Path) -> float:
        model = relpos.Transformer.load(path, tokens=256, sentences=32, training=False)
        results = [model.forward(batch) for batch in batches]
        return sum(x.nll * x.tokens for x in results) / sum(x.tokens for x in results)

    assert nll_of(last.average) == found.nll
    assert nll_of(last.folder / checkpoint.MODEL) != found.nll
    assert_same_bits(
        trainer.model.averages,
        relpos.Transformer.load(last.average, training=False).parameters,
    )
    # what is trained does not change by being looked at
    twin = make(tmp_path / "twin", config=config, validation=None)
    assert_same_bits(state_of(twin.train() and twin.model), state_of(trainer.model))
    # and a run that goes on has the same average
    half = make(tmp_path / "half", config=config, steps=25)
    half.train()
    again = make(tmp_path / "half", config=config, resume=True)
    assert again.train().validation == found.nll
    assert_same_bits(state_of(again.model), state_of(trainer.model))


def test_no_average_where_none_is_kept(tmp_path: Path) -> None:
    trainer = make(tmp_path, config=text_files.config(steps=20))
    saved = trainer.train().checkpoint
    assert saved.average is None and not (saved.folder / checkpoint.AVERAGE).exists()


# ---- BLEU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_bleu_of_validation(ema: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the checkpoint's greedy translations, in the log, where drawn, and said."""
    pytest.importorskip("sacrebleu")
    config = text_files.config(steps=60, ema=ema)
    given = {"validate_bleu": True, "tensorboard": True, "progress": "lines", "config": config}
    trainer = make(tmp_path / "run", **given)
    outcome = trainer.train()
    greedy = relpos.Search(beam=1)
    translator = relpos.Translator.load(outcome.checkpoint.folder)
    said = translator.translate([source for source, _ in VALID], search=greedy)
    expected = relpos.evaluation.bleu(said, [[target for _, target in VALID]]).value
    lines = [line for line in read_log(tmp_path / "run") if line["kind"] == "validation"]
    assert [line["step"] for line in lines] == [20, 40, 60]
    assert lines[-1]["bleu"] == expected == trainer.validate().bleu
    assert 0 < expected < 100
    told = capsys.readouterr().err
    assert f"  BLEU {expected:.2f}" in told and "tokenized" not in told
    [events] = (tmp_path / "run" / "events").iterdir()
    assert events.read_bytes().count(b"validation/bleu") == 3
    # what is trained does not change by being asked, and who does not ask has no figure
    twin = make(tmp_path / "twin", config=config)
    twin.train()
    assert_same_bits(state_of(twin.model), state_of(trainer.model))
    assert twin.validate().bleu is None and "bleu" not in read_log(tmp_path / "twin")[-1]


def test_where_there_can_be_no_bleu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="validate_bleu: there is no validation to translate"):
        make(tmp_path / "run", validation=None, validate_bleu=True)
    config = text_files.config(encoder__layers=0)
    lines = [source for source, _ in TEXT]
    with pytest.raises(ValueError, match="validate_bleu: a decoder alone translates nothing"):
        make(tmp_path / "run", config=config, data=lines, validation=lines, validate_bleu=True)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ImportError, match="validate_bleu: takes sacrebleu, `pip install"):
        make(tmp_path / "run", validate_bleu=True)
    assert not (tmp_path / "run").exists()


# ---- TensorBoard ---------------------------------------------------------------------------------


def test_events_are_what_the_format_says(tmp_path: Path) -> None:
    """Records, checks and protocol buffers, read back without TensorBoard."""
    assert crc32c(b"123456789") == 0xE3069283 and crc32c(bytes(32)) == 0x8A9136AA
    events = Events(tmp_path / "events")
    events.write(
        300, {"train/loss": 1.5, "bad": float("nan"), "none": None, "huge": 1e39, "low": -1e39}
    )
    events.close()
    [path] = (tmp_path / "events").iterdir()
    assert ".tfevents." in path.name
    content, records = path.read_bytes(), []
    # as every file of TensorBoard's begins
    assert content[:12] == b"\x18" + bytes(7) + b'\xa3\x7fK"'
    while content:
        [length] = struct.unpack("<Q", content[:8])
        record, content = content[12 : 12 + length], content[16 + length :]
        records.append(record)
    assert records[0][9:] == b"\x1a\x0dbrain.Event:2"
    value = b"\x0a\x0atrain/loss\x15" + struct.pack("<f", 1.5)
    summary = b"\x0a" + bytes([len(value)]) + value
    assert records[1][9:] == b"\x10\xac\x02\x2a" + bytes([len(summary)]) + summary


def test_tensorboard_reads_a_run(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    make(tmp_path, config=text_files.config(steps=20), tensorboard=True).train()
    read = accumulator.EventAccumulator(str(tmp_path / "events"))
    read.Reload()
    for kind, name in (("train", "loss"), ("train", "learning_rate"), ("validation", "nll")):
        shown = [(each.step, each.value) for each in read.Scalars(f"{kind}/{name}")]
        lines = [each for each in read_log(tmp_path) if each["kind"] == kind]
        assert shown == [(each["step"], np.float32(each[name])) for each in lines] and shown


# ---- the log -------------------------------------------------------------------------------------


def test_a_log_is_read_without_what_was_taken_back(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for step in (10, 20, 30):
        log.write("train", {"step": step, "loss": float(step), "nll": float("nan")})
    log.close()
    with (tmp_path / LOG).open("ab") as file:
        file.write(b"[" * 100_000 + b"\n")
        file.write(b'\xff\xfe\n[1]\n{"kind": "train"}\n{"kind": "train", "st')
    log = Log(tmp_path)
    log.write("resume", {"step": 20})
    log.write("train", {"step": 30, "loss": 31.0})
    log.close()
    lines = read_log(tmp_path)
    assert lines == read_log(tmp_path / LOG)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("train", 10), ("train", 20), ("resume", 20), ("train", 30),
    ]  # fmt: skip
    assert lines[0]["nll"] is None and lines[-1]["loss"] == 31.0
    for text in (tmp_path / LOG).read_text(errors="replace").splitlines()[:3]:
        json.loads(text, parse_constant=lambda name: pytest.fail(name))


def test_a_full_disk_under_the_log(tmp_path: Path) -> None:
    """Its file is named, and closing it fails no second time, nor leaves the other one open."""
    (tmp_path / LOG).symlink_to("/dev/full")
    log = Log(tmp_path, tmp_path / "events")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / LOG}'"):
        log.write("train", {"step": 10, "loss": 1.0})
    log.close()
    assert log._events is not None and log._events._file.closed
