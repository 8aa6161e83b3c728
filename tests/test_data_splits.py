# SPDX-License-Identifier: Apache-2.0
"""relpos.data.splits: tokens become others of the same spelling, as often as is asked for."""

from __future__ import annotations

import io
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos.data import Batches, SentencePiece, Splits, TokenCache, Words, Wrapped, batches
from relpos.data.splits import NEVER
from small_data import Numbers, cache_of, random_pairs
from test_data_subwords import LINES, Letters, letters, trained

CHANCE = 0.25


class Spelling(Numbers):
    """Token t is written as t letters "a", those before the first not at all: with the third as
    the first n letters can be parted in n - 5 ways."""

    def __init__(self, size: int, first: int = 3) -> None:
        super().__init__(size)
        self.first = first

    def spellings(self) -> list[str | None]:
        return [None] * self.first + ["a" * t for t in range(self.first, self.size)]


SPLITS = Splits(Spelling(40), CHANCE)


def words_of(key: int, n: int) -> Any:
    """64 random bits for each of n tokens."""
    return np.random.default_rng(key).integers(0, 1 << 64, n, np.uint64)


def spelled(tokens: Any) -> int:
    """How many letters tokens have together."""
    return int(np.sum(tokens, dtype=np.int64))


# ---- one sequence of tokens ----------------------------------------------------------------------


def test_every_part_of_a_spelling_stays() -> None:
    tokens = np.random.default_rng(0).integers(0, 40, 5000)
    split, counts = SPLITS.apply(tokens, words_of(7, 5000))
    assert split.dtype == np.int32 and counts.sum() == split.size > tokens.size
    ends = np.cumsum(counts)
    for token, end, count in zip(tokens, ends, counts, strict=True):
        parts = split[end - count : end]
        assert spelled(parts) == token and (count == 1 or parts.min() >= 3)
        assert token >= 6 or count == 1  # the least that can be written by two of three letters


def outcomes(token: int, chance: float) -> dict[tuple[int, ...], float]:
    """What a token becomes, and how probable each is."""
    ways = range(3, token - 2)
    found = {(token,): 1 - chance if ways else 1.0}
    for first in ways:
        for one, p in outcomes(first, chance).items():
            for other, q in outcomes(token - first, chance).items():
                found[one + other] = found.get(one + other, 0) + chance / len(ways) * p * q
    return found


@pytest.mark.parametrize("token", [6, 9, 12])
def test_every_outcome_is_as_frequent_as_it_should_be(token: int) -> None:
    """Of 100,000 tokens; halves of a token that was split draw anew, the same way wherever it is."""
    n = 100_000
    split, counts = SPLITS.apply(np.full(n, token), words_of(token, n))
    ends = np.cumsum(counts)
    seen = Counter(
        tuple(split[end - count : end].tolist()) for end, count in zip(ends, counts, strict=True)
    )
    expected = outcomes(token, CHANCE)
    assert abs(sum(expected.values()) - 1) < 1e-12 and set(seen) <= set(expected)
    for parts, p in expected.items():
        assert abs(seen[parts] - n * p) < 5 * (n * p * (1 - p)) ** 0.5, parts


def test_words_decide_and_nothing_else() -> None:
    tokens = np.random.default_rng(0).integers(0, 40, 500)
    words = words_of(1, 500)
    split, counts = SPLITS.apply(tokens, words)
    place = int(counts.argmax())
    alone, _ = SPLITS.apply(tokens[place : place + 1], words[place : place + 1])
    end = counts[: place + 1].sum()
    assert np.array_equal(alone, split[end - counts[place] : end])
    other, _ = SPLITS.apply(tokens, words_of(2, 500))
    assert not np.array_equal(split, other)


def test_none_and_nothing() -> None:
    tokens = np.arange(40, dtype=np.uint16)
    never = np.full(40, NEVER)
    almost = Splits(Spelling(40), np.nextafter(1, 0))
    words = words_of(3, 40)
    for splits, given, drawn in (
        (Splits(Spelling(40), 0), tokens, words),
        (Splits(Spelling(40), 0), tokens, words * np.uint64(0)),
        (SPLITS, tokens[:0], words[:0]),
        (SPLITS, tokens, never),
        (almost, tokens, never),
    ):
        split, counts = splits.apply(given, drawn)
        assert np.array_equal(split, given) and split.dtype == np.int32
        assert np.array_equal(counts, np.ones(len(given)))
    split, _ = almost.apply(tokens, words)
    assert split.max() == 5 and spelled(split) == spelled(tokens)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_reads_what_was_split(kind: Any) -> None:
    subwords = trained(kind=kind)
    splits = Splits(subwords, 0.5)
    texts = [text for pair in LINES for text in pair]
    encoded = subwords.encode_many(texts)
    changed = 0
    for key, (text, tokens) in enumerate(zip(texts, encoded, strict=True)):
        split, _ = splits.apply(np.array(tokens), words_of(key, len(tokens)))
        changed += split.size > len(tokens)
        assert subwords.decode(split.tolist()) == text
    assert changed > len(texts) // 2


def test_what_is_not_of_a_text_is_not_split() -> None:
    subwords = trained()
    spellings = subwords.spellings()
    assert len(spellings) == subwords.size and spellings[:3] == [None] * 3
    byte = [subwords.piece(t) for t, text in enumerate(spellings[3:], 3) if text is None]
    assert byte == [f"<0x{x:02X}>" for x in range(256)]
    assert all(text in (None, subwords.piece(t)) for t, text in enumerate(spellings))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_symbols_of_a_user_stay(kind: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    symbols = ["##", "###", "The"]
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter([text for pair in LINES for text in pair]), model_writer=written,
        vocab_size=60, model_type=kind, user_defined_symbols=symbols, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    subwords = SentencePiece(written.getvalue())
    spellings = subwords.spellings()
    assert len(spellings) == subwords.size
    unwritten = {subwords.piece(t) for t, text in enumerate(spellings) if text is None}
    assert unwritten == {"<unk>", "<s>", "</s>", *symbols}


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
    monkeypatch.setattr(batches, "BLOCK", 150)


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


def test_each_place_epoch_and_seed_has_its_own(tmp_path: Path) -> None:
    """One pair again and again, over two chunks: how it is split is all that can be told apart."""
    cache = cache_of(tmp_path, [("30 31 32", "33 34 35")] * 800, 40)

    def of(seed: int, epochs: int) -> list[Any]:
        made = Batches(cache, tokens=64, shuffle=False, seed=seed, epochs=epochs, splits=SPLITS)
        return sentences(made)

    two = of(5, 2)
    assert two == of(5, 2) and len(two) == 1600
    parts = [two[x : x + 400] for x in range(0, 1600, 400)] + [of(6, 1)[:400]]
    for i, one in enumerate(parts):
        assert len(set(one)) > 100
        for other in parts[:i]:
            alike = sum(x == y for x, y in zip(one, other, strict=True))
            whole = (1 - CHANCE) ** 6  # the most frequent outcome
            assert alike < 400 * 3 * whole


def test_splits_do_not_depend_on_chunks(pairs: TokenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    given = BUDGET | {"shuffle": False, "epochs": 1}
    one = sentences(Batches(pairs, **given))
    monkeypatch.setattr(batches, "CHUNK", 1 << 16)
    assert sentences(Batches(pairs, **given)) == one


@pytest.mark.parametrize("taken", [1, 5, 40, 41, 42, 70])
def test_going_on_from_the_middle(pairs: TokenCache, taken: int) -> None:
    made = Batches(pairs, epochs=2, accumulate_tokens=300, **BUDGET)
    assert len(list(islice(made, taken))) == taken
    state = json.loads(json.dumps(made.state()))
    rest = sentences(made)
    resumed = Batches(pairs, epochs=2, accumulate_tokens=300, **BUDGET)
    resumed.resume(state)
    assert rest and sentences(resumed) == rest


def test_other_splits_have_no_such_place(pairs: TokenCache) -> None:
    state = Batches(pairs, **BUDGET).state()
    for other, said in (
        (None, "split: it was 0.25, is 0 now"),
        (Splits(Spelling(40), 0), "split: it was 0.25, is 0 now"),
        (Splits(Spelling(40), 0.1), "split: it was 0.25, is 0.1 now"),
        (Splits(Spelling(40, 4), CHANCE), r"splits: it was \d+, is \d+ now"),
    ):
        with pytest.raises(ValueError, match=f"state: {said}"):
            Batches(pairs, **(BUDGET | {"splits": other})).resume(state)
    plain = Batches(pairs, **(BUDGET | {"splits": None}))
    old = {name: x for name, x in plain.state().items() if not name.startswith("split")}
    for same in (plain, Batches(pairs, **(BUDGET | {"splits": Splits(Spelling(40), 0)}))):
        same.resume(old)  # of a version that had none
        same.resume(plain.state())


# ---- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [-0.1, 1, 1.5, float("nan")])
def test_chances(chance: Any) -> None:
    with pytest.raises(ValueError, match=r"chance: expected .*, got"):
        Splits(Spelling(40), chance)
    with pytest.raises(TypeError, match="chance: expected a number, got NoneType"):
        Splits(Spelling(40), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("subwords", [Words(["one", "two"]), letters()])
def test_tokens_without_parts(subwords: Any) -> None:
    name = type(subwords).__name__
    with pytest.raises(ValueError, match=f"subwords: tokens of {name} have no parts to be split"):
        Splits(subwords, 0.1)


@pytest.mark.parametrize("subwords", [None, "bpe", SentencePiece])
def test_what_is_no_vocabulary(subwords: Any) -> None:
    with pytest.raises(TypeError, match="subwords: expected Subwords, got"):
        Splits(subwords, 0.1)


@pytest.mark.parametrize("given", [None, ["a"], [3] * 40])
def test_spellings_that_are_none(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subwords = Spelling(40)
    monkeypatch.setattr(subwords, "spellings", lambda: given)
    with pytest.raises(
        TypeError, match=r"expected spellings\(\) to give a list of 40, str or None"
    ):
        Splits(subwords, 0.1)


def test_of_another_vocabulary(pairs: TokenCache, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="splits: expected of the 40 subwords that .* got of 41 oth"
    ):
        Batches(pairs, splits=Splits(Spelling(41), 0.1))
    with pytest.raises(TypeError, match=r"splits: expected relpos\.data\.Splits, got float"):
        Batches(pairs, splits=0.1)  # type: ignore[arg-type]
    bpe, unigram = trained(size=310), trained(kind="unigram", size=310)
    cache = TokenCache.build(tmp_path, LINES, bpe)
    Batches(cache, splits=Splits(bpe, 0.1))
    with pytest.raises(
        ValueError, match="splits: expected of the 310 subwords .* got of 310 others"
    ):
        Batches(cache, splits=Splits(unigram, 0.1))
    with pytest.raises(
        ValueError, match="subwords: expected the 310 tokens that .* got 310 others"
    ):
        relpos.Trainer(
            relpos.Config.preset("tiny"), cache, folder=tmp_path / "run", subwords=unigram
        )


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


class OfOnesOwn(Wrapped):
    """A vocabulary of a user's, with parts."""

    def spellings(self) -> list[str | None]:
        return [chr(97 + token) if token < 26 else None for token in range(self.size)]


def test_a_vocabulary_of_ones_own_goes_on(tmp_path: Path) -> None:
    own = OfOnesOwn(Letters(), size=28, bos=26, eos=27)
    lines = [("abc" * n, "cba" * n) for n in range(1, 9)]
    config = relpos.Config.preset("tiny").replace({"max_length": 64, "steps": 2})
    given: dict[str, Any] = {"subwords": own, "progress": "none", "split": 0.2}
    relpos.Trainer(config, lines, folder=tmp_path, steps=1, **given).train()
    again = relpos.Trainer(config, lines, folder=tmp_path, resume=True, **given)
    assert again.train().step == 2


def test_a_run_without_parts_is_refused_before_the_work(tmp_path: Path) -> None:
    config = relpos.Config.preset("tiny")
    with pytest.raises(ValueError, match="split: expected 0 or more and below 1, got 2"):
        relpos.Trainer(config, LINES, folder=tmp_path / "run", split=2)
    assert not (tmp_path / "run").exists()
    words = Words.train(text for pair in LINES for text in pair)
    with pytest.raises(ValueError, match="split: tokens of Words have no parts"):
        relpos.Trainer(config, LINES, folder=tmp_path / "run", subwords=words, split=0.1)
    assert not (tmp_path / "run").exists()
