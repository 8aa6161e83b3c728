# SPDX-License-Identifier: Apache-2.0
"""From a token cache to batches: in which order, how large, made ahead of time.

    an epoch      a random order of all pairs, cut into chunks of 65,536
    a chunk       its pairs by length, cut into batches by a budget of tokens; those in random order
    an update     one batch, or as many one after the other as another budget of tokens holds

Nothing of an epoch is stored: a chunk is worked out from (seed, epoch, chunk) when it is its turn,
so that the position is three numbers, and going on from it gives the same batches.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from relpos.batch import Batch
from relpos.data.cache import TokenCache
from relpos.data.order import STEP, mixed, permuted, shuffled, word
from relpos.data.splits import NEVER, Splits
from relpos.data.text import Report
from relpos.position.arrays import check_count, check_truth

CHUNK = 1 << 16  # pairs
PAIRS, BATCHES, SPLITTING = 0, 1, 2  # what is put into a random order, and what else is random
BLOCK = 4096  # pairs that are split at a time
SEEDS = 1 << 64
_CLOSED = "Batches: this iteration was closed, or another one begun"

Places = npt.NDArray[np.int64]
T = TypeVar("T")


class Batches(Iterable[tuple[Batch, ...]]):
    """Updates for `Transformer.step`, without end: epoch after epoch, each in another order.

        batches = relpos.data.Batches(cache, tokens=4096, accumulate_tokens=25_000)
        for update in batches:
            result = model.step(update)

    cache: TokenCache. Of pairs, or of sentences for a decoder alone.
    tokens: int. The most of a batch on each side, bos counted. As `tokens` of the model, or less.
    sentences: int. The most of a batch. As `sentences` of the model, or less.
    max_length: int. The most of a sentence on each side, bos counted, as `max_length` of the
        configuration; longer ones are left out and counted. None: `tokens`.
    accumulate_tokens: int. The most of an update on each side, in several batches. None: an update
        is a batch.
    seed: int. Of the orders, and of what is split.
    shuffle: bool. False: every epoch in the order of the cache, neither shuffled nor sorted.
    splits: Splits. Tokens that are split, others in every epoch; a pair of which a side would be
        too long then stays whole. None: none are.
    bos, eos: int. Before and after a target; None: those of the cache.
    epochs: int. Iteration ends after so many, counted from the first; None: never.
    prefetch: int. Updates made ahead of time by a thread; 0: no thread.

    Iteration goes on where the last one left off. Every sentence that is not too long comes once an
    epoch. One iteration at a time: a second one closes the first.
    """

    def __init__(
        self,
        cache: TokenCache,
        *,
        tokens: int = 4096,
        sentences: int = 512,
        max_length: int | None = None,
        accumulate_tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        splits: Splits | None = None,
        bos: int | None = None,
        eos: int | None = None,
        epochs: int | None = None,
        prefetch: int = 8,
    ) -> None:
        self._packer = _Packer(cache, tokens, sentences, max_length, bos, eos, splits)
        self._accumulate = 0
        if accumulate_tokens is not None:
            self._accumulate = check_count("accumulate_tokens", accumulate_tokens, tokens)
        self._seed = check_seed(seed)
        self._shuffle = check_truth("shuffle", shuffle)
        self._epochs = None if epochs is None else check_count("epochs", epochs, 0)
        self._prefetch = check_count("prefetch", prefetch, 0)
        self._where = _Where()
        self._closed = 0  # times; an iteration that began before the last of them has ended
        self._ahead: _Ahead[tuple[_Where, tuple[Batch, ...]]] | None = None

    @property
    def report(self) -> Report:
        """What became of the lines, those too long for these batches included."""
        return self._packer.report

    @property
    def epoch(self) -> int:
        """Epochs of which every update has been given."""
        return self._where.epoch

    @property
    def position(self) -> int:
        """Updates given of the current epoch."""
        return self._where.position

    def state(self) -> dict[str, float]:
        """Where iteration is, for `resume`: after the update that was given last."""
        where = self._where
        place = {"epoch": where.epoch, "chunk": where.chunk, "batch": where.batch}
        return place | {"position": where.position} | self._settings()

    def resume(self, state: Mapping[str, float]) -> None:
        """Goes on after the update that was given last when `state` was taken.

        state: of Batches over the same cache and with the same arguments; else it is refused, with
            the name of what differs.
        """
        now = self._settings()
        # What older versions have no names for: none, and what they did not look at.
        before = {"split": 0, "splits": 0, "borders": now["borders"]} | dict(state)
        for name, value in now.items():
            if before.get(name) != value:
                raise ValueError(
                    f"state: {name}: it was {before.get(name)}, is {value} now; with other data or "
                    "other batches there is no going on from it"
                )
        names = ("epoch", "chunk", "batch", "position")
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(f"state: {missing[0]} is missing")
        numbers = [check_count(f"state: {name}", state[name], 0) for name in names]
        self.close()
        self._where = _Where(*numbers)

    def close(self) -> None:
        """Ends an iteration that was left half-way, and its thread; another one may be begun."""
        self._closed += 1
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        self.close()
        updates = self._updates(self._where)
        if self._prefetch == 0:
            closed = self._closed
            for self._where, update in updates:
                yield update
                if self._closed != closed:
                    raise RuntimeError(_CLOSED)
            return
        self._ahead = ahead = _Ahead(updates, self._prefetch)
        try:
            for where, update in ahead:
                self._where = where
                yield update
        finally:
            ahead.close()

    def _settings(self) -> dict[str, float]:
        packer = self._packer
        splits = packer.splits
        return {
            "seed": self._seed,
            "shuffle": int(self._shuffle),
            "split": 0 if splits is None else splits.chance,
            "splits": 0 if splits is None else splits.checksum,
            "tokens": packer.tokens,
            "sentences": packer.sentences,
            "max_length": packer.max_length,
            "accumulate_tokens": self._accumulate,
            "pairs": len(packer.cache),
            "checksum": packer.cache.checksum,
            "borders": packer.cache.borders,
        }

    def _updates(self, where: _Where) -> Iterator[tuple[_Where, tuple[Batch, ...]]]:
        """Updates from there on, each with where the next one begins."""
        while self._epochs is None or where.epoch < self._epochs:
            key = self._key(where.epoch)
            update: list[Places] = []
            filled = np.zeros(2, np.int64)
            for chunk, batch, chosen, sizes in self._batches(where):
                if update and (filled + sizes > self._accumulate).any():
                    where = _Where(where.epoch, chunk, batch, where.position + 1)
                    yield where, tuple(self._packer.pack(x, key) for x in update)
                    update, filled = [], np.zeros(2, np.int64)
                update.append(chosen)
                filled += sizes
            where = _Where(where.epoch + 1)
            if update:  # none: resumed at a place that this epoch does not have
                yield where, tuple(self._packer.pack(x, key) for x in update)

    def _key(self, epoch: int) -> int:
        """Of what is split in this epoch."""
        return word(self._seed, epoch, SPLITTING)

    def _batches(self, where: _Where) -> Iterator[tuple[int, int, Places, Places]]:
        """The rest of an epoch: (chunk, batch, the pairs in it, its tokens on both sides)."""
        first = where.batch
        for chunk in range(where.chunk, -(-len(self._packer.cache) // CHUNK)):
            chosen, sizes = self._chunk(where.epoch, chunk)
            borders = cut(sizes, self._packer.tokens, self._packer.sentences)
            order: Places = np.arange(len(borders) - 1)
            if self._shuffle:
                order = shuffled(len(order), word(self._seed, where.epoch, BATCHES, chunk))
            for batch, number in enumerate(order[first:].tolist(), first):
                part = slice(borders[number], borders[number + 1])
                yield chunk, batch, chosen[part], sizes[:, part].sum(axis=1)
            first = 0

    def _chunk(self, epoch: int, chunk: int) -> tuple[Places, Places]:
        """The pairs of a chunk that are not too long, by length, and their sizes."""
        begin, n = chunk * CHUNK, len(self._packer.cache)
        end = min(begin + CHUNK, n)
        chosen: Places = np.arange(begin, end)
        if self._shuffle:
            chosen = permuted(begin, end, n, word(self._seed, epoch, PAIRS))
        chosen, sizes = self._packer.fitting(chosen)
        sizes = self._packer.split_sizes(chosen, sizes, self._key(epoch))
        if self._shuffle:
            by_length = np.argsort(sizes.max(axis=0), kind="stable")
            chosen, sizes = chosen[by_length], sizes[:, by_length]
        return chosen, sizes


class InOrder(Iterable[Batch]):
    """Batches for validation: every sentence once, in the order of the cache, to the last.

    Arguments as of `Batches`. Those longer than max_length are left out; `report` counts them.
    """

    def __init__(
        self,
        cache: TokenCache,
        *,
        tokens: int = 4096,
        sentences: int = 512,
        max_length: int | None = None,
        bos: int | None = None,
        eos: int | None = None,
    ) -> None:
        self._packer = _Packer(cache, tokens, sentences, max_length, bos, eos)

    @property
    def report(self) -> Report:
        """What became of the lines, those too long for these batches included."""
        return self._packer.report

    def __iter__(self) -> Iterator[Batch]:
        packer = self._packer
        for begin in range(0, len(packer.cache), CHUNK):
            chosen: Places = np.arange(begin, min(begin + CHUNK, len(packer.cache)))
            chosen, sizes = packer.fitting(chosen)
            borders = cut(sizes, packer.tokens, packer.sentences)
            for first, last in pairwise(borders):
                yield packer.pack(chosen[first:last])


@dataclass(frozen=True, slots=True)
class _Where:
    """The next batch, and how many updates of the epoch came before."""

    epoch: int = 0
    chunk: int = 0
    batch: int = 0
    position: int = 0


def check_seed(seed: Any) -> int:
    number = check_count("seed", seed, 0)
    if number >= SEEDS:
        raise ValueError(f"seed: expected below 2**64, got {number}")
    return number


def cut(sizes: Places, tokens: int, sentences: int) -> list[int]:
    """Borders of batches: each as many as fit, none more than tokens on a side.

    sizes: int (sides, pairs), each up to tokens.
    """
    n = sizes.shape[1]
    sums = np.concatenate((np.zeros((len(sizes), 1), np.int64), np.cumsum(sizes, axis=1)), axis=1)
    borders = [0]
    while (begin := borders[-1]) < n:
        ends = [int(np.searchsorted(x, x[begin] + tokens, side="right")) - 1 for x in sums]
        borders.append(min(begin + sentences, *ends))
    return borders


# --------------------------------------------------------------------------------------------------
# Packing
# --------------------------------------------------------------------------------------------------


class _Packer:
    """Pairs of a cache as a Batch, in a few operations on arrays.

    Where tokens are split, which ones follows from a key and the token's place in the cache.
    """

    def __init__(
        self,
        cache: TokenCache,
        tokens: int,
        sentences: int,
        max_length: int | None,
        bos: int | None,
        eos: int | None,
        splits: Splits | None = None,
    ) -> None:
        if not isinstance(cache, TokenCache):
            raise TypeError(f"cache: expected relpos.data.TokenCache, got {type(cache).__name__}")
        if not isinstance(splits, Splits | None):
            raise TypeError(f"splits: expected relpos.data.Splits, got {type(splits).__name__}")
        if splits is not None and not cache.is_of(splits.size, splits.fingerprint):
            raise ValueError(
                f"splits: expected of the {cache.size:,} subwords that {cache.folder} was made with, "
                f"got of {splits.size:,} others"
            )
        self.cache = cache
        self.splits = None if splits is None or splits.chance == 0 else splits
        self.tokens = check_count("tokens", tokens, 2)
        self.sentences = check_count("sentences", sentences, 1)
        longest = self.tokens if max_length is None else check_count("max_length", max_length, 2)
        self.max_length = min(longest, self.tokens)
        self._bos = cache.bos if bos is None else check_count("bos", bos, 0)
        self._eos = cache.eos if eos is None else check_count("eos", eos, 0)
        blocks = range(0, len(cache), CHUNK)
        fit = sum(int(self._fit(self._sizes(slice(x, x + CHUNK))).sum()) for x in blocks)
        self.report = replace(cache.report, too_long=len(cache) - fit)
        if fit == 0:
            name = "tokens" if longest >= self.tokens else "max_length"
            raise ValueError(
                f"{name}: no sentence fits into {self.max_length} tokens: {self.report}"
            )

    def _lengths(self, chosen: Places | slice) -> Places:
        """Tokens of pairs in the cache: int (sides, pairs)."""
        target = self.cache.target_lengths[chosen].astype(np.int64)
        if self.cache.source_lengths is None:
            return target[None]
        return np.stack((self.cache.source_lengths[chosen].astype(np.int64), target))

    def _sizes(self, chosen: Places | slice) -> Places:
        return _with_bos(self._lengths(chosen))

    def _fit(self, sizes: Places) -> npt.NDArray[np.bool_]:
        return np.asarray((sizes <= self.max_length).all(axis=0))

    def fitting(self, chosen: Places) -> tuple[Places, Places]:
        """Those that are not too long, and what they take in a batch."""
        sizes = self._sizes(chosen)
        fit = self._fit(sizes)
        return chosen[fit], sizes[:, fit]

    def split_sizes(self, chosen: Places, sizes: Places, key: int) -> Places:
        """What pairs of these sizes take when their tokens have been split."""
        if self.splits is None or len(chosen) == 0:
            return sizes
        blocks = range(0, len(chosen), BLOCK)
        lengths = [self._read(chosen[x : x + BLOCK], key)[1] for x in blocks]
        return _with_bos(np.concatenate(lengths, axis=1))

    def _read(self, chosen: Places, key: int) -> tuple[npt.NDArray[Any], Places]:
        """The tokens of pairs end to end, and how many there are of each side."""
        lengths = self._lengths(chosen)
        each = lengths.sum(axis=0)
        places = _runs(self.cache.offsets[chosen], each)
        tokens = self.cache.tokens[places]
        if self.splits is None:
            return tokens, lengths
        words = mixed(places.astype(np.uint64) * np.uint64(STEP) + np.uint64(key))
        split, split_lengths = self._split(tokens, words, lengths)
        fit = self._fit(_with_bos(split_lengths))
        if not fit.all():
            words[np.repeat(~fit, each)] = NEVER
            split, split_lengths = self._split(tokens, words, lengths)
        return split, split_lengths

    def _split(self, tokens: npt.NDArray[Any], words: Any, lengths: Places) -> tuple[Any, Places]:
        assert self.splits is not None and (lengths > 0).all()  # reduceat has no empty sums
        split, counts = self.splits.apply(tokens, words)
        sides = np.add.reduceat(counts, _offsets(lengths.T.ravel())[:-1])
        return split, sides.reshape(-1, len(lengths)).T

    def pack(self, chosen: Places, key: int = 0) -> Batch:
        """key: of what is split, where something is."""
        tokens, lengths = self._read(chosen, key)
        words, source, source_offsets = tokens, None, None
        if len(lengths) == 2:
            of_source = np.repeat(np.tile((True, False), len(chosen)), lengths.T.ravel())
            source, words = tokens[of_source], tokens[~of_source]
            source_offsets = _offsets(lengths[0])
        offsets = _offsets(lengths[-1] + 1)
        target = np.empty(words.size + len(chosen), np.int32)
        labels = np.empty_like(target)
        inside = np.ones(target.size, bool)
        inside[offsets[:-1]] = False
        target[inside], target[~inside] = words, self._bos
        inside[:] = True
        inside[offsets[1:] - 1] = False
        labels[inside], labels[~inside] = words, self._eos
        return Batch(source, source_offsets, target, offsets, labels)


def _with_bos(lengths: Places) -> Places:
    """What sentences of these lengths take in a batch: a target begins with bos."""
    sizes = lengths.copy()
    sizes[-1] += 1
    return sizes


def _offsets(lengths: Places) -> Places:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))


def _runs(begins: Places, lengths: Places) -> Places:
    """begin, begin + 1, ..., for each run of these lengths, one after the other."""
    ends = np.cumsum(lengths)
    places: Places = np.arange(ends[-1]) + np.repeat(begins - (ends - lengths), lengths)
    return places


# --------------------------------------------------------------------------------------------------
# Ahead of time
# --------------------------------------------------------------------------------------------------


class _Ahead(Generic[T]):
    """Items of an iterator, made by a thread a few in advance.

    It begins when half of them are used up, and makes several then: the fewer times it runs, the
    fewer times it takes a core from a step. What goes wrong in it is raised where the item would
    have come.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items, self._depth = items, depth
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        # daemon: a program that forgets to close ends all the same
        self._thread = threading.Thread(target=self._run, name="relpos batches", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    if len(self._ready) >= self._depth:
                        self._changed.wait_for(lambda: self._closed or self._is_low())
                    if self._closed:
                        return
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _is_low(self) -> bool:
        return len(self._ready) <= self._depth // 2

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._ended or self._ready)
            if self._closed:
                raise RuntimeError(_CLOSED)
            if self._ready:
                item = self._ready.popleft()
                if self._is_low():
                    self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()
