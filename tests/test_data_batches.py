# SPDX-License-Identifier: Apache-2.0
"""relpos.data.batches: what comes in a batch, in which order, and going on from anywhere."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos.data import Batches, InOrder, Report, TokenCache, batches, order
from small_data import BOS, EOS, SIZE, Numbers, cache_of, numbers_of, random_pairs, sentence

COUNT, LONGEST = 1500, 30
PAIRS = random_pairs(COUNT, LONGEST)
BUDGET: dict[str, Any] = {"tokens": 256, "sentences": 16, "max_length": LONGEST + 1}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    return cache_of(tmp_path_factory.mktemp("pairs"), PAIRS)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    return cache_of(tmp_path_factory.mktemp("lines"), [target for _, target in PAIRS])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks an epoch, the last of them shorter."""
    monkeypatch.setattr(batches, "CHUNK", 400)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    gc.collect()
    assert threading.active_count() == before


def same(one: Any, other: Any) -> bool:
    """The same batches, to the bit."""
    names = ("source", "source_offsets", "target", "target_offsets", "labels")
    return len(one) == len(other) and all(
        np.array_equal(getattr(x, name), getattr(y, name))
        for x, y in zip(one, other, strict=True)
        for name in names
    )


def all_same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(same, one, other))


def epoch_of(cache: TokenCache, **changes: Any) -> list[tuple[relpos.Batch, ...]]:
    return list(Batches(cache, **({"epochs": 1} | BUDGET | changes)))


def told(updates: Any, side: str = "target") -> list[int]:
    return [x for update in updates for batch in update for x in numbers_of(batch, side)]


# ---- content -------------------------------------------------------------------------------------


def test_batches_are_those_of_from_pairs(pairs: TokenCache) -> None:
    encode = Numbers().encode
    for update in epoch_of(pairs):
        numbers = told([update])
        assert told([update], "source") == numbers
        expected = relpos.Batch.from_pairs(
            [encode(PAIRS[i][0]) for i in numbers],
            [encode(PAIRS[i][1]) for i in numbers],
            bos=BOS,
            eos=EOS,
        )
        assert same(update, (expected,))


def test_sentences_are_those_of_from_sentences(lines: TokenCache) -> None:
    encode = Numbers().encode
    updates = epoch_of(lines, bos=7, eos=8)
    assert sorted(told(updates)) == list(range(COUNT))
    for update in updates:
        sentences = [encode(PAIRS[i][1]) for i in told([update])]
        expected = relpos.Batch.from_sentences(sentences, bos=7, eos=8)
        assert same(update, (expected,)) and update[0].source is None


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("accumulate", [None, 256, 1000])
def test_every_pair_comes_once_an_epoch(
    pairs: TokenCache, shuffle: bool, accumulate: int | None
) -> None:
    updates = epoch_of(pairs, epochs=3, shuffle=shuffle, accumulate_tokens=accumulate)
    numbers = told(updates)
    assert len(numbers) == 3 * COUNT
    epochs = [numbers[i * COUNT : (i + 1) * COUNT] for i in range(3)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    if not shuffle:
        assert all(epoch == list(range(COUNT)) for epoch in epochs)
    else:
        assert epochs[0] != epochs[1] != epochs[2] != list(range(COUNT))


def test_every_epoch_puts_other_pairs_together(pairs: TokenCache) -> None:
    together = [frozenset(told([update])) for update in epoch_of(pairs, epochs=2)]
    assert len(set(together)) > 0.9 * len(together)


@pytest.mark.parametrize("accumulate", [None, 256, 1000])
def test_no_budget_is_exceeded(pairs: TokenCache, accumulate: int | None) -> None:
    updates = epoch_of(pairs, accumulate_tokens=accumulate)
    for update in updates:
        assert accumulate is not None or len(update) == 1
        for batch in update:
            assert batch.sentences <= 16
            assert batch.source.size <= 256 and batch.target.size <= 256
        for side in ("source", "target"):
            assert sum(getattr(x, side).size for x in update) <= (accumulate or 256)


def test_budgets_are_used(pairs: TokenCache) -> None:
    """A batch ends where no other pair fits; only the last of a chunk may be smaller."""
    updates = epoch_of(pairs)
    full = [
        max(x.source.size, x.target.size) + LONGEST + 1 > 256 or x.sentences == 16
        for (x,) in updates
    ]
    assert full.count(False) <= -(-COUNT // 400)
    groups = epoch_of(pairs, accumulate_tokens=1000)
    assert len(groups) < 1.2 * len(updates) * 256 / 1000


def test_budgets_may_be_filled_to_the_last_token(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, [("5 6 7 8 9", "5 6 7 8")] * 48)  # five places on each side
    updates = list(Batches(cache, tokens=20, accumulate_tokens=60, max_length=5, epochs=1))
    assert [[batch.sentences for batch in update] for update in updates] == [[4, 4, 4]] * 4
    assert [batch.target.size for batch in InOrder(cache, tokens=20)] == [20] * 12


def test_sentences_of_a_batch_are_about_as_long(pairs: TokenCache) -> None:
    def spread(**changes: Any) -> float:
        return float(
            np.mean(
                [
                    np.ptp(np.maximum(np.diff(x.source_offsets), np.diff(x.target_offsets)))
                    for (x,) in epoch_of(pairs, **changes)
                ]
            )
        )

    assert spread() < 3 < 10 < spread(shuffle=False)


def test_long_batches_do_not_come_last(pairs: TokenCache) -> None:
    lengths = [np.diff(x.target_offsets).mean() for (x,) in epoch_of(pairs)]
    assert abs(np.corrcoef(lengths, np.arange(len(lengths)))[0, 1]) < 0.5


def test_sentences_that_are_too_long_are_left_out_and_counted(pairs: TokenCache) -> None:
    fit = [
        i
        for i, (source, target) in enumerate(PAIRS)
        if len(source.split()) <= 20 and len(target.split()) + 1 <= 20
    ]
    assert 0 < len(fit) < COUNT
    for changes in ({"max_length": 20}, {"tokens": 20, "max_length": None}):
        made = Batches(pairs, **(BUDGET | {"epochs": 1} | changes))
        assert sorted(told(made)) == fit
        assert made.report == Report(COUNT, 0, COUNT - len(fit))
        ordered = InOrder(pairs, **(BUDGET | changes))
        assert [x for batch in ordered for x in numbers_of(batch)] == fit
        assert ordered.report == made.report
    said = f"{COUNT:,} read, {COUNT - len(fit):,} too long, {len(fit):,} kept"
    assert str(made.report) == said


def test_validation_is_in_order_and_whole(pairs: TokenCache, lines: TokenCache) -> None:
    for cache in (pairs, lines):
        ordered = InOrder(cache, **BUDGET)
        for _ in range(2):
            assert [x for batch in ordered for x in numbers_of(batch)] == list(range(COUNT))
        assert all(batch.target.size <= 256 and batch.sentences <= 16 for batch in ordered)


def test_a_model_takes_them(pairs: TokenCache, lines: TokenCache) -> None:
    changes = {"source_vocabulary": SIZE, "target_vocabulary": SIZE, "max_length": LONGEST + 1}
    config = relpos.Config.preset("tiny").replace(changes)
    for cache, more in ((pairs, {}), (lines, {"encoder.layers": 0})):
        model = relpos.Transformer(config.replace(more), tokens=256, sentences=16)
        for update in islice(Batches(cache, accumulate_tokens=700, **BUDGET), 3):
            result = model.step(update)
            assert result.finite and result.tokens == sum(x.target.size for x in update)
        assert sum(model.forward(x).tokens for x in InOrder(cache, **BUDGET)) > 0


# ---- order ---------------------------------------------------------------------------------------


def test_the_seed_decides(pairs: TokenCache) -> None:
    one, again = epoch_of(pairs, seed=5), epoch_of(pairs, seed=5, prefetch=0)
    assert all_same(one, again)
    assert told(one) != told(epoch_of(pairs, seed=6))


def test_the_order_is_the_same_on_every_machine() -> None:
    """Known answers, worked out in plain integers below."""
    assert order.word(1, 2, 3) == plain_word(1, 2, 3) == 0x6AE515C1C0AC7E37
    for n in (1, 2, 3, 100, 257, 5000):
        assert order.permuted(0, n, n, 42).tolist() == plain_order(n, 42)
        step, words = 0x9E3779B97F4A7C15, range(n)
        by_size = sorted(words, key=lambda x: plain_mixed((x * step + 2**64 - 9) % 2**64))
        assert order.shuffled(n, 2**64 - 9).tolist() == by_size


def plain_mixed(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 % 2**64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def plain_word(*numbers: int) -> int:
    state = 0
    for number in numbers:
        state = plain_mixed((state + 0x9E3779B97F4A7C15 + number) % 2**64)
    return state


def plain_order(n: int, key: int) -> list[int]:
    half = 4
    while 4**half < n:
        half += 1
    keys = [plain_word(key, turn) for turn in range(8)]

    def place(x: int) -> int:
        left, right = x >> half, x % 2**half
        for k in keys:
            left, right = right, left ^ plain_mixed(right ^ k) % 2**half
        x = (left << half) | right
        return x if x < n else place(x)

    return [place(x) for x in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 16, 255, 256, 257, 1000, 4097])
def test_permutations(n: int) -> None:
    whole = order.permuted(0, n, n, 7)
    assert sorted(whole.tolist()) == list(range(n))
    parts = [order.permuted(i, min(i + 10, n), n, 7) for i in range(0, n, 10)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("draw", [order.shuffled, lambda n, key: order.permuted(0, n, n, key)])
def test_orders_are_random(draw: Any) -> None:
    """Over 800 keys, each of 20 things is at each of 20 places about as often.

    chi-square of 400 cells with 361 degrees of freedom: 361 with a deviation of 27; beyond 5 of
    them a good shuffle would be once in millions of tries, and this is one try, always the same.
    Neighbours that stay neighbours are about Poisson, with mean 19/20.
    """
    counts, following = np.zeros((20, 20)), 0
    for key in range(800):
        whole = draw(20, order.word(key))
        counts[np.arange(20), whole] += 1
        following += int((np.diff(whole) == 1).sum())
    assert ((counts - 40) ** 2 / 40).sum() < 361 + 5 * 27
    assert abs(following / 800 - 19 / 20) < 5 * (1 / 800) ** 0.5


# ---- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("accumulate", [None, 900])
@pytest.mark.parametrize("shuffle", [True, False])
def test_going_on_from_every_place(
    pairs: TokenCache, prefetch: int, accumulate: int | None, shuffle: bool
) -> None:
    arguments = BUDGET | {
        "accumulate_tokens": accumulate, "epochs": 2, "prefetch": prefetch, "shuffle": shuffle,
        "seed": 3,
    }  # fmt: skip
    whole, states = [], []
    made = Batches(pairs, **arguments)
    start = made.state()
    for update in made:
        whole.append(update)
        states.append(json.loads(json.dumps(made.state())))
    assert [x["epoch"] for x in states] == sorted(x["epoch"] for x in states)
    assert states[-1]["epoch"] == made.epoch == 2 and made.position == 0
    for place in (0, 1, len(whole) // 2 - 1, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        resumed = Batches(pairs, **arguments)
        resumed.resume(states[place])
        assert resumed.state() == states[place]
        assert all_same(list(resumed), whole[place + 1 :]), place
    made.resume(start)
    assert all_same(list(made), whole)


def test_position_and_epoch(pairs: TokenCache) -> None:
    made = Batches(pairs, **BUDGET)
    assert (made.epoch, made.position) == (0, 0)
    updates = len(epoch_of(pairs))
    for number, _ in enumerate(islice(made, updates + 5), 1):
        assert (made.epoch, made.position) == divmod(number, updates)
    assert (made.epoch, made.position) == (1, 5)


def test_iteration_goes_on_where_it_was_left(pairs: TokenCache) -> None:
    whole = epoch_of(pairs)
    made = Batches(pairs, epochs=1, **BUDGET)
    first = list(islice(made, 7))
    assert all_same(first + list(made), whole)
    assert list(made) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": 1}, "state: seed: it was 0, is 1 now"),
        ({"tokens": 255}, "state: tokens: it was 256, is 255 now"),
        ({"sentences": 15}, "state: sentences: it was 16, is 15 now"),
        ({"max_length": 30}, "state: max_length: it was 31, is 30 now"),
        ({"accumulate_tokens": 512}, "state: accumulate_tokens: it was 0, is 512 now"),
        ({"shuffle": False}, "state: shuffle: it was 1, is 0 now"),
    ],
)
def test_other_batches_have_no_such_place(
    pairs: TokenCache, changes: dict[str, Any], sentence: str
) -> None:
    state = Batches(pairs, **BUDGET).state()
    with pytest.raises(ValueError, match=sentence):
        Batches(pairs, **(BUDGET | changes)).resume(state)


def test_other_data_have_no_such_place(pairs: TokenCache, tmp_path: Path) -> None:
    state = Batches(pairs, **BUDGET).state()
    changed = [*PAIRS[:-1], (PAIRS[-1][0], PAIRS[-1][1] + " 5")]
    with pytest.raises(ValueError, match="state: checksum: it was"):
        Batches(cache_of(tmp_path, changed), **BUDGET).resume(state)
    with pytest.raises(ValueError, match="state: pairs: it was 1500, is 1499 now"):
        Batches(cache_of(tmp_path, PAIRS[:-1]), **BUDGET).resume(state)


def test_the_same_tokens_with_other_borders_are_other_data(tmp_path: Path) -> None:
    for name, sides, other in (
        ("pairs", [("5 6", "7"), ("8", "9")], [("5", "6 7"), ("8", "9")]),
        ("lines", ["5 6", "7"], ["5", "6 7"]),
    ):
        one, two = (cache_of(tmp_path / f"{name}{i}", x) for i, x in enumerate((sides, other)))
        assert one.checksum == two.checksum
        state = Batches(one, tokens=8).state()
        with pytest.raises(ValueError, match="state: borders: it was"):
            Batches(two, tokens=8).resume(state)
        del state["borders"]  # as of a version that did not look at them
        Batches(two, tokens=8).resume(state)


def test_a_place_can_be_written_as_json(pairs: TokenCache) -> None:
    made = Batches(pairs, **(BUDGET | {"tokens": np.int64(256), "max_length": None}))
    made.resume(json.loads(json.dumps(made.state())))


def test_broken_states(pairs: TokenCache) -> None:
    made = Batches(pairs, epochs=1, **BUDGET)
    state = made.state()
    with pytest.raises(ValueError, match="state: batch is missing"):
        made.resume({x: y for x, y in state.items() if x != "batch"})
    with pytest.raises(ValueError, match="state: chunk: expected 0 or more, got -1"):
        made.resume(state | {"chunk": -1})
    with pytest.raises(TypeError, match="state: epoch: expected an integer, got str"):
        made.resume(state | {"epoch": "0"})
    made.resume(state | {"chunk": 9, "batch": 9})  # beyond the epoch: nothing is left of it
    assert list(made) == [] and made.state() == state | {"chunk": 9, "batch": 9}


# ---- the thread ----------------------------------------------------------------------------------


def test_the_step_does_not_wait(pairs: TokenCache) -> None:
    """While a step of 30 ms goes on, the next update is made."""
    iterator = iter(Batches(pairs, **BUDGET))
    next(iterator)
    waits = []
    for _ in range(20):
        time.sleep(0.03)
        begin = time.perf_counter()
        next(iterator)
        waits.append(time.perf_counter() - begin)
    assert np.median(waits) < 0.002


def test_no_more_is_made_ahead_than_asked(
    pairs: TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Batches(pairs, prefetch=3, **BUDGET)
    packed = []
    inner = made._packer.pack
    monkeypatch.setattr(made._packer, "pack", lambda *x: packed.append(x) or inner(*x))
    iterator = iter(made)
    next(iterator)
    time.sleep(0.2)
    assert 1 + 3 <= len(packed) <= 1 + 3 + 1  # given, ready, and the one that waits
    made.close()


class Full(Exception):
    pass


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_reaches_the_caller_in_its_place(
    pairs: TokenCache, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    made = Batches(pairs, prefetch=prefetch, **BUDGET)
    inner, count = made._packer.pack, iter(range(1000))

    def pack(*pairs: Any) -> Any:
        if next(count) == 10:
            raise Full("no memory")
        return inner(*pairs)

    monkeypatch.setattr(made._packer, "pack", pack)
    given = []
    with pytest.raises(Full, match="no memory"):
        for update in made:
            given.append(update)
    assert len(given) == made.position == 10
    rest = list(islice(made, 5))  # the error is over: the eleventh is next
    assert all_same(given + rest, epoch_of(pairs)[:15])
    made.close()


def test_the_thread_ends_with_the_iterator(pairs: TokenCache) -> None:
    before = threading.active_count()
    made = Batches(pairs, **BUDGET)
    for _ in made:
        break
    gc.collect()
    assert threading.active_count() == before
    iterator = iter(made)
    next(iterator)
    assert threading.active_count() == before + 1
    made.close()
    made.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="this iteration was closed, or another one begun"):
        next(iterator)


@pytest.mark.parametrize("prefetch", [0, 8])
def test_a_second_iteration_closes_the_first(pairs: TokenCache, prefetch: int) -> None:
    made = Batches(pairs, prefetch=prefetch, **BUDGET)
    one = iter(made)
    first = next(one)
    other = iter(made)
    second = next(other)
    assert all_same([first, second], epoch_of(pairs)[:2])
    with pytest.raises(RuntimeError, match="another one begun"):
        next(one)
    assert all_same([next(other)], epoch_of(pairs)[2:3])


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"tokens": 1}, ValueError, "tokens: expected 2 or more, got 1"),
        ({"tokens": 1.5}, TypeError, "tokens: expected an integer, got float"),
        ({"sentences": 0}, ValueError, "sentences: expected 1 or more, got 0"),
        ({"max_length": 1}, ValueError, "max_length: expected 2 or more, got 1"),
        ({"max_length": 2}, ValueError, "max_length: no sentence fits into 2 tokens: 1,500 read"),
        ({"tokens": 2}, ValueError, "tokens: no sentence fits into 2 tokens: 1,500 read"),
        ({"accumulate_tokens": 255}, ValueError, "accumulate_tokens: expected 256 or more"),
        ({"seed": -1}, ValueError, "seed: expected 0 or more, got -1"),
        ({"seed": 1 << 64}, ValueError, r"seed: expected below 2\*\*64"),
        ({"bos": -1}, ValueError, "bos: expected 0 or more, got -1"),
        ({"epochs": -1}, ValueError, "epochs: expected 0 or more, got -1"),
        ({"prefetch": -1}, ValueError, "prefetch: expected 0 or more, got -1"),
        ({"shuffle": "no"}, TypeError, "shuffle: expected True or False, got str"),
        ({"cache": "folder"}, TypeError, "cache: expected relpos.data.TokenCache, got str"),
    ],
)
def test_arguments_that_are_refused(
    pairs: TokenCache, changes: dict[str, Any], error: Any, said: str
) -> None:
    with pytest.raises(error, match=said):
        Batches(**({"cache": pairs} | BUDGET | changes))


def test_a_single_pair(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, [(sentence([5]), sentence([6]))])
    (update,) = Batches(cache, epochs=1)
    assert same(update, (relpos.Batch.from_pairs([[5]], [[6]], bos=BOS, eos=EOS),))
    assert len(list(islice(Batches(cache), 3))) == 3
