# SPDX-License-Identifier: Apache-2.0
"""relpos.data.splits: tokens become others of the same spelling, as often as is asked for."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos.data import Batches, Splits, TokenCache, Words, batches
from relpos.data.order import word
from small_data import Numbers, cache_of, random_pairs
from test_data_subwords import LINES, letters, trained

CHANCE = 0.25


class Spelling(Numbers):
    """Token t is written as t letters "a", the first three as nothing: n of them can be parted in
    n - 5 ways."""

    def spellings(self) -> list[str | None]:
        return [None] * 3 + ["a" * t for t in range(3, self.size)]


SPLITS = Splits(Spelling(40), CHANCE)


def spelled(tokens: Any) -> int:
    """How many letters tokens have together."""
    return int(np.sum(tokens, dtype=np.int64))


# ---- one sequence of tokens ----------------------------------------------------------------------


def test_every_part_of_a_spelling_stays() -> None:
    tokens = np.random.default_rng(0).integers(0, 40, 5000)
    split, counts = SPLITS.apply(tokens, 7)
    assert split.dtype == np.int32 and counts.sum() == split.size > tokens.size
    ends = np.cumsum(counts)
    for token, end, count in zip(tokens, ends, counts, strict=True):
        parts = split[end - count : end]
        assert spelled(parts) == token and (count == 1 or parts.min() >= 3)
        assert token >= 6 or count == 1  # the least that can be written by two of three letters


def test_the_chance_is_that_of_each_token() -> None:
    """Token 6 has one way and its halves none: a binomial count. Token 9 has four."""
    n = 200_000
    split, counts = SPLITS.apply(np.full(n, 6), 1)
    assert set(split.tolist()) == {3, 6}
    assert abs(np.count_nonzero(counts == 2) - n * CHANCE) < 5 * (n * CHANCE * (1 - CHANCE)) ** 0.5

    split, counts = SPLITS.apply(np.full(n, 9), 2)
    firsts = split[np.cumsum(counts) - counts]
    # 3+6, 4+5, 5+4, 6+3: a six is split again with the same chance
    ways = {
        (2, 4): CHANCE / 4, (2, 5): CHANCE / 4, (2, 6): CHANCE / 4 * (1 - CHANCE),
        (2, 3): CHANCE / 4 * (1 - CHANCE), (3, 3): CHANCE / 2 * CHANCE, (1, 9): 1 - CHANCE,
    }  # fmt: skip
    for (count, first), p in ways.items():
        seen = np.count_nonzero((counts == count) & (firsts == first))
        assert abs(seen - n * p) < 5 * (n * p * (1 - p)) ** 0.5, (count, first)


def test_a_key_has_its_draws() -> None:
    tokens = np.random.default_rng(0).integers(0, 40, 500)
    one, other, third = (SPLITS.apply(tokens, key)[0] for key in (1, 1, word(1)))
    assert np.array_equal(one, other) and not np.array_equal(one, third)


def test_none_and_nothing() -> None:
    tokens = np.arange(40, dtype=np.uint16)
    for splits, given in ((Splits(Spelling(40), 0), tokens), (SPLITS, tokens[:0])):
        split, counts = splits.apply(given, 3)
        assert np.array_equal(split, given) and split.dtype == np.int32
        assert np.array_equal(counts, np.ones(len(given)))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_reads_what_was_split(kind: Any) -> None:
    subwords = trained(kind=kind)
    splits = Splits(subwords, 0.5)
    texts = [text for pair in LINES for text in pair]
    encoded = subwords.encode_many(texts)
    changed = 0
    for key, (text, tokens) in enumerate(zip(texts, encoded, strict=True)):
        split, _ = splits.apply(np.array(tokens), key)
        changed += split.size > len(tokens)
        assert subwords.decode(split.tolist()) == text
    assert changed > len(texts) // 2


def test_what_is_not_of_a_text_is_not_split() -> None:
    subwords = trained()
    spellings = subwords.spellings()
    assert len(spellings) == subwords.size and spellings[:3] == [None] * 3
    byte = [subwords.piece(t) for t, text in enumerate(spellings[3:], 3) if text is None]
    assert byte == [f"<0x{x:02X}>" for x in range(256)]


# ---- batches -------------------------------------------------------------------------------------

PAIRS = [
    tuple(" ".join(str(int(x) % 40) for x in side.split()) for side in pair)
    for pair in random_pairs(900, 30)
]
BUDGET: dict[str, Any] = {"tokens": 128, "max_length": 36, "seed": 5, "splits": SPLITS}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    return cache_of(tmp_path_factory.mktemp("pairs"), PAIRS, 40)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "CHUNK", 400)


def sentences(updates: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Source and target of every pair, bos and eos left out."""
    found = []
    for update in updates:
        for batch in update:
            sides = (batch.source, batch.source_offsets), (batch.labels, batch.target_offsets)
            source, target = (np.split(x, offsets[1:-1]) for x, offsets in sides)
            for one, other in zip(source, target, strict=True):
                found.append((tuple(one.tolist()), tuple(other[:-1].tolist())))
    return found


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_pair_comes_in_pieces_of_its_own(pairs: TokenCache, shuffle: bool) -> None:
    made = Batches(pairs, epochs=2, shuffle=shuffle, **BUDGET)
    updates = list(made)
    plain = Batches(pairs, epochs=1, shuffle=False, **(BUDGET | {"splits": None}))
    expected = sentences(plain)
    found = sentences(updates)
    assert len(found) == 2 * len(expected)
    assert found[: len(expected)] != found[len(expected) :]
    for epoch in (found[: len(expected)], found[len(expected) :]):
        letters = [tuple(map(spelled, pair)) for pair in epoch]
        wanted = [tuple(map(spelled, pair)) for pair in expected]
        assert sorted(letters) == sorted(wanted) and (shuffle or letters == wanted)
        longer = sum(len(a) + len(b) for a, b in epoch) / sum(len(a) + len(b) for a, b in expected)
        assert longer > 1 + CHANCE / 2
    for update in updates:
        for batch in update:
            assert batch.source.size <= 128 and batch.target.size <= 128
            longest = [np.diff(x).max() for x in (batch.source_offsets, batch.target_offsets)]
            assert max(longest) <= 36


def test_what_would_be_too_long_stays_whole(tmp_path: Path) -> None:
    """Sources of 12 tokens and targets of 11: there is room for two more, bos among them."""
    lines = [(" ".join(["6"] * 12), " ".join(["39"] * 11))] * 300
    cache = cache_of(tmp_path, lines, 40)
    made = Batches(cache, tokens=64, max_length=13, epochs=1, splits=SPLITS)
    found = sentences(made)
    assert len(found) == 300
    assert {len(source) for source, _ in found} == {12, 13}
    assert {len(target) for _, target in found} == {11, 12}
    assert all(spelled(x) == 72 and spelled(y) == 429 for x, y in found)
    whole = sum(pair == ((6,) * 12, (39,) * 11) for pair in found)
    assert 0 < whole < 300


def test_single_sentences(tmp_path: Path) -> None:
    lines = [target for _, target in PAIRS]
    cache = cache_of(tmp_path, lines, 40)
    letters = [
        spelled(x[:-1])
        for update in Batches(cache, shuffle=False, epochs=1, **BUDGET)
        for batch in update
        for x in np.split(batch.labels, batch.target_offsets[1:-1])
    ]
    assert letters == [spelled(list(map(int, line.split()))) for line in lines]


def test_a_chunk_of_which_nothing_fits(tmp_path: Path) -> None:
    lines = ["7 " * 50] * 400 + ["7 8"] * 10
    cache = cache_of(tmp_path, lines, 40)
    made = Batches(cache, tokens=16, shuffle=False, epochs=1, splits=SPLITS)
    assert sum(batch.sentences for update in made for batch in update) == 10


def test_going_on_from_the_middle(pairs: TokenCache) -> None:
    made = Batches(pairs, epochs=2, accumulate_tokens=300, **BUDGET)
    first = len(list(islice(made, 5)))
    state = json.loads(json.dumps(made.state()))
    rest = sentences(made)
    resumed = Batches(pairs, epochs=2, accumulate_tokens=300, **BUDGET)
    resumed.resume(state)
    assert first == 5 and sentences(resumed) == rest

    for other, said in ((None, "is 0 now"), (Splits(Spelling(40), 0.1), r"is \d+ now")):
        changed = Batches(pairs, accumulate_tokens=300, **(BUDGET | {"splits": other}))
        with pytest.raises(ValueError, match=rf"state: splits: it was {SPLITS.checksum}, {said}"):
            changed.resume(state | {"epoch": 0})
    plain = Batches(pairs, tokens=128, seed=5)
    old = {name: value for name, value in plain.state().items() if name != "splits"}
    plain.resume(old)  # of a version that had none


# ---- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [-0.1, 1, 1.5, float("nan"), "0.1", True, None])
def test_chances(chance: Any) -> None:
    with pytest.raises(ValueError, match=r"split: expected 0 or more and below 1, got"):
        Splits(Spelling(40), chance)


@pytest.mark.parametrize("subwords", [Words(["one", "two"]), letters()])
def test_tokens_without_parts(subwords: Any) -> None:
    with pytest.raises(
        ValueError, match=f"split: tokens of {type(subwords).__name__} have no parts"
    ):
        Splits(subwords, 0.1)


def test_of_another_vocabulary(pairs: TokenCache) -> None:
    with pytest.raises(
        ValueError, match="splits: expected of a vocabulary of 40, the cache's, got"
    ):
        Batches(pairs, splits=Splits(Spelling(41), 0.1))
    with pytest.raises(TypeError, match=r"splits: expected relpos\.data\.Splits, got float"):
        Batches(pairs, splits=0.1)  # type: ignore[arg-type]


def test_what_it_says() -> None:
    assert repr(SPLITS) == "<Splits of 34 of 40 tokens, chance 0.25>"


# ---- a run ---------------------------------------------------------------------------------------


def test_a_run_with_splits(tmp_path: Path) -> None:
    subwords = trained(size=400)
    config = relpos.Config.preset("tiny").replace({"max_length": 64, "steps": 6})
    given: dict[str, Any] = {"subwords": subwords, "tokens": 256, "progress": "none", "split": 0.2}
    whole = relpos.Trainer(config, LINES, folder=tmp_path / "whole", **given)
    whole.train()
    relpos.Trainer(config, LINES, folder=tmp_path / "parts", steps=3, **given).train()
    again = relpos.Trainer(config, LINES, folder=tmp_path / "parts", resume=True, **given)
    again.train()
    for name, x in whole.model.parameters.items():
        assert np.array_equal(x, again.model.parameters[name]), name
    plain = relpos.Trainer(config, LINES, folder=tmp_path / "plain", **(given | {"split": 0}))
    plain.train()
    assert any(
        not np.array_equal(x, plain.model.parameters[name])
        for name, x in whole.model.parameters.items()
    )


def test_a_run_without_parts_is_refused_before_the_work(tmp_path: Path) -> None:
    config = relpos.Config.preset("tiny")
    with pytest.raises(ValueError, match="split: expected 0 or more and below 1, got 2"):
        relpos.Trainer(config, LINES, folder=tmp_path / "run", split=2)
    assert not (tmp_path / "run").exists()
    words = Words.train(text for pair in LINES for text in pair)
    with pytest.raises(ValueError, match="split: tokens of Words have no parts"):
        relpos.Trainer(config, LINES, folder=tmp_path / "run", subwords=words, split=0.1)
    assert not (tmp_path / "run" / "cache").exists()
