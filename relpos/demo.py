# SPDX-License-Identifier: Apache-2.0
"""`relpos demo`: from nothing to a model that translates, in about a minute.

A Transformer of 2 + 2 layers learns to translate the names of numbers from English to German. It is
trained on numbers with 1 to 6 groups of three digits that are not 0, and tested on numbers it has
never seen: with 1 to 6 such groups, and with 7 to 12, twice the length. What it says is exactly
right or it is wrong. With relative positions the second is as easy as the first; with sinusoidal
ones, `--compare`, it is not.
"""

from __future__ import annotations

import importlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from relpos import demo_numbers as numbers
from relpos.batch import Batch
from relpos.config import Config
from relpos.data.subwords import Words
from relpos.extraction import attention_maps
from relpos.model import Transformer
from relpos.search import Search
from relpos.train.checkpoint import STATE, TOKENIZER, checkpoints
from relpos.train.progress import Progress, clock_text
from relpos.translator import Translator

TOKENS = 2048  # of a batch, on each side; none of them padding
SENTENCES = 512
SHORT, LONG = (1, 6), (7, 12)  # groups that are not 0
TESTED = 2000  # numbers of each
STEPS = 1600
DRAWN = 45_000_321  # the number whose maps are drawn
SHOWN = (5 * 10**27 + 321, 21_000_001, 777 * 10**33 + 16 * 10**9 + 101_000_000 + 30_612)


@dataclass(frozen=True, slots=True)
class Exact:
    """The shares of numbers that were translated without any error, and what it took."""

    positions: str
    short: float
    long: float
    tested: int
    steps: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"exact: {self.short:.2%} of {self.tested:,} unseen numbers with {SHORT[0]} to "
            f"{SHORT[1]} groups, {self.long:.2%} with {LONG[0]} to {LONG[1]} "
            f"({self.positions}, {self.steps:,} steps in {clock_text(self.seconds)})"
        )


def make_config(steps: int = STEPS, seed: int = 1, *, relative: bool = True) -> Config:
    """The demo's model and training; relative: bool, else it has sinusoidal positions."""
    vocabulary = len(numbers.VOCABULARY)
    changes: dict[str, Any] = {
        "width": 128, "heads": 4, "feed_forward": 256, "norm": "pre", "max_length": 128,
        "source_vocabulary": vocabulary, "target_vocabulary": vocabulary,
        "share_embeddings": True, "share_output": True,
        "encoder.layers": 2, "decoder.layers": 2,
        "dropout": 0.1, "attention_dropout": 0.1, "label_smoothing": 0.0,
        "schedule": "linear", "learning_rate": 2e-3, "warmup": min(200, max(1, steps // 8)),
        "steps": steps, "final_rate": 0.0, "beta1": 0.9, "beta2": 0.98, "seed": seed,
    }  # fmt: skip
    for stack in ("encoder", "decoder"):
        changes |= {
            f"{stack}.position": "shaw" if relative else "none",
            f"{stack}.absolute": "none" if relative else "sinusoidal",
            f"{stack}.k": 4,
        }
    return Config().replace(changes)


def as_pair(number: int) -> tuple[list[int], list[int]]:
    """A number's English and German tokens."""
    source, target = numbers.english(number), numbers.german(number)
    return [numbers.TOKENS[word] for word in source], [numbers.TOKENS[part] for part in target]


def as_batch(pairs: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """Pairs of token lists, as a model takes them."""
    sources, targets = zip(*pairs, strict=True)
    return Batch.from_pairs(sources, targets, bos=numbers.BOS, eos=numbers.EOS)


def batched(pairs: Iterator[tuple[list[int], list[int]]]) -> Iterator[Batch]:
    """Batches as full as TOKENS allows, in the order of the pairs."""
    waiting: list[tuple[list[int], list[int]]] = []
    places = 0
    for pair in pairs:
        longer = max(len(pair[0]), len(pair[1]) + 1)
        if places + longer > TOKENS or len(waiting) == SENTENCES:
            yield as_batch(waiting)
            waiting, places = [], 0
        waiting.append(pair)
        places += longer
    if waiting:
        yield as_batch(waiting)


def training_batches(seed: int) -> Iterator[Batch]:
    """Without end: numbers of 1 to 6 groups that are not for the test."""
    random = Random(f"train {seed}")

    def endless() -> Iterator[tuple[list[int], list[int]]]:
        while True:
            yield as_pair(numbers.draw_held_out(random, *SHORT, wanted=False))

    return batched(endless())


def tested_numbers(seed: int, groups: tuple[int, int], count: int) -> list[int]:
    """Different numbers of so many groups, all of them for the test alone."""
    random = Random(f"test {seed} {groups}")
    found: dict[int, None] = {}
    while len(found) < count:
        found[numbers.draw_held_out(random, *groups, wanted=True)] = None
    return list(found)


def share_exact(model: Transformer, tested: Sequence[int]) -> float:
    """Of how many numbers greedy decoding says exactly the German name.

    No decoder is needed to know: it does if and only if, given the right beginning, the right token
    has the highest score at every place.
    """
    exact = sum(
        bool(hits.all()) for batch in batched(map(as_pair, tested)) for hits in model.hits(batch)
    )
    return exact / len(tested)


def translate(model: Transformer, number: int) -> str:
    """What the model says, by greedy search, for the English name of a number."""
    source, _ = as_pair(number)
    search = Search(
        begin=numbers.BOS, end=numbers.EOS, beam=1, max_length=model.config.max_length - 1
    )
    [results] = model.search(Batch(source, [0, len(source)]), search)
    said = results[0].tokens.tolist() if results else []
    return numbers.german_text([numbers.VOCABULARY[token] for token in said])


def train(
    steps: int = STEPS,
    seed: int = 1,
    *,
    relative: bool = True,
    tested: int = TESTED,
    progress: str = "auto",
) -> tuple[Transformer, Exact]:
    """Trains a model and tests it. The same seed gives the same bits."""
    model = Transformer(
        make_config(steps, seed, relative=relative), tokens=TOKENS, sentences=SENTENCES
    )
    batches = training_batches(seed)
    begun = time.monotonic()
    with Progress(steps, kind=progress) as shown:
        for step, batch in zip(range(1, steps + 1), batches, strict=False):
            result = model.step(batch)
            shown.step(step, result.loss, result.nll, result.tokens, result.learning_rate)
    seconds = time.monotonic() - begun
    short, long = (
        share_exact(model, tested_numbers(seed, groups, tested)) for groups in (SHORT, LONG)
    )
    positions = "relative positions" if relative else "sinusoidal positions"
    return model, Exact(positions, short, long, tested, steps, seconds)


def run(
    *,
    steps: int = STEPS,
    seed: int = 1,
    compare: bool = False,
    output: str | Path = "relpos-demo",
    tested: int = TESTED,
    progress: str = "auto",
    say: Callable[[str], None] = print,
) -> list[Exact]:
    """The demo: trains, tests, shows, and leaves weights, vocabulary and a picture in a folder."""
    make_config(steps, seed)  # what is wrong with them is told before there is a folder
    folder = Path(output)
    if checkpoints(folder):
        raise ValueError(
            f"output: {folder} is the folder of a training run, which would be mixed up"
        )
    for name in ("average.json", STATE):
        if (folder / name).exists():
            raise ValueError(f"output: {folder} has a model of a training run, which would be lost")
    folder.mkdir(parents=True, exist_ok=True)
    say("English names of numbers below 10^36 into German, by a Transformer of 2 + 2 layers.")
    say(f"It is trained on numbers with {SHORT[0]} to {SHORT[1]} groups of three digits.")
    model, exact = train(steps, seed, tested=tested, progress=progress)
    say("")
    for number in SHOWN:
        said, right = translate(model, number), numbers.german_text(numbers.german(number))
        say(f"  {numbers.english_text(numbers.english(number))}")
        say(f"    {said if len(said) <= 160 else said[:159] + '…'}")
        if said != right:
            say(f"    wrong, it is {right}")
    say("")
    say(str(exact))
    results = [exact]
    model.save(folder / "model.safetensors")
    translator_of(model).subwords.save(folder / TOKENIZER)
    say(draw_maps(model, folder / "attention.png"))
    name = shlex.quote(str(folder))
    say(f'More of it: relpos inspect {name} --source "two hundred one" --out maps.html')
    if compare:
        _, other = train(steps, seed, relative=False, tested=tested, progress=progress)
        say(str(other))
        results.append(other)
    return results


def translator_of(model: Transformer) -> Translator:
    """The model with its vocabulary: names are words between spaces, as `numbers` has them."""
    return Translator(model, Words(numbers.VOCABULARY[len(Words.names) :]))


def draw_maps(model: Transformer, path: Path) -> str:
    """A picture of what the last layers look at; returns a line that says where it is."""
    try:
        plots = importlib.import_module("relpos.plots")
    except ImportError:
        return (
            f"No picture of attention: it takes matplotlib, `pip install 'relpos[viz]'`. ({path})"
        )
    source, target = " ".join(numbers.english(DRAWN)), " ".join(numbers.german(DRAWN))
    maps = attention_maps(translator_of(model), source, target, layers=-1)
    figure = plots.canvas.without_display((12, 12.5))
    for part, kind in zip(figure.subfigures(3, 1), maps.maps, strict=True):
        plots.heads(maps, kind, figure=part)
        part.suptitle(kind, fontsize=plots.canvas.TITLE)
    name = numbers.english_text(numbers.english(DRAWN))
    figure.suptitle(f"What the last layers look at in “{name}”")
    plots.save(figure, path, dpi=80)
    return f"What it looks at: {path}"
