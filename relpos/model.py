# SPDX-License-Identifier: Apache-2.0
"""The Transformer and its training step.

    model = relpos.Transformer(relpos.Config.preset("tiny"))
    batch = relpos.Batch.from_pairs(sources, targets, bos=1, eos=2)
    for _ in range(1000):
        result = model.step(batch)
    model.save("model.safetensors")

All of it lies in the core's memory, planned when the model is made, or in that of a GPU. Parameters
and gradients are NumPy views of it (of a GPU's: copies). A model belongs to one thread at a time: a
second call while it is at work raises RuntimeError and harms nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from relpos import _core
from relpos.batch import Batch
from relpos.batch import packed as _packed
from relpos.config import Config, no_folder, path_text
from relpos.device_array import DeviceArray, c_strides
from relpos.position.arrays import (
    Array,
    check_choice,
    check_count,
    check_integers,
    check_size,
    check_text,
    check_truth,
    check_unmasked,
    describe,
)
from relpos.search import Decoder, Hypothesis, Search

Path = str | os.PathLike[str]
Integers = npt.ArrayLike
Hits = npt.NDArray[np.bool_]
Attention = Literal["encoder", "decoder", "cross"]
What = Literal["weights", "average", "optimizer"]
Precision = Literal["f32", "bf16"]
PRECISIONS = ("f32", "bf16")  # as the core numbers them
_WRITABLE = (0, 1)  # weights and gradients: likewise

# As _core calls them.
ATTENTIONS = {
    "encoder": _core.ATTENTION_ENCODER,
    "decoder": _core.ATTENTION_DECODER,
    "cross": _core.ATTENTION_CROSS,
}
SHOWS = {
    "probabilities": _core.SHOW_PROBABILITIES,
    "logits": _core.SHOW_SCORES,
    "content": _core.SHOW_CONTENT,
    "key": _core.SHOW_KEY,
    "key_2": _core.SHOW_KEY + 1,
    "query": _core.SHOW_QUERY,
    "query_2": _core.SHOW_QUERY + 1,
    "bias": _core.SHOW_BIAS,
    "bias_2": _core.SHOW_BIAS + 1,
}
FILES = {
    "weights": _core.SAVE_WEIGHTS,
    "average": _core.SAVE_AVERAGE,
    "optimizer": _core.SAVE_OPTIMIZER,
}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step, or a part of it, has to tell.

    loss: float. The mean over the labels that count, as trained.
    nll: float. The mean of -log p(label), without smoothing.
    tokens: int. Labels that counted.
    accuracy: float. The share whose label had the highest score.
    gradient_norm: float. Of the mean loss, before clipping; 0 where nothing was updated.
    learning_rate: float. Of this update.
    step, attempt: int. Updates made, and tried, after the call.
    finite: bool. False: loss or gradient was not, and nothing has been updated.
    first_bad: str. Then: where the first number that is not finite arose.
    """

    loss: float
    nll: float
    tokens: int
    accuracy: float
    gradient_norm: float
    learning_rate: float
    step: int
    attempt: int
    finite: bool
    first_bad: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a model takes, by what they are for; total is the sum."""

    parameters: int
    gradients: int
    moments: int
    average: int
    constants: int
    activations: int
    workspace: int
    total: int


class Arrays(Mapping[str, Array]):
    """Arrays by the names that files have for them, in the order of files."""

    __slots__ = ("_arrays",)

    def __init__(self, arrays: dict[str, Array]) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def in_place(self, name: str) -> Any:
        """The array where it lies, without a copy: a NumPy view, or of a model on a GPU a
        `DeviceArray`, which DLPack takes to CuPy, JAX and torch."""
        return self._arrays[name]

    def __repr__(self) -> str:
        numbers = sum(array.size for array in self._arrays.values())
        return f"<{len(self)} arrays of {numbers:,} numbers>"


class Copies(Arrays):
    """Arrays of a model on a GPU, each copied from there when it is asked for, read-only."""

    __slots__ = ("_core", "_kind", "_places")

    def __init__(self, core: _core.Model, names: Iterable[str], kind: int) -> None:
        super().__init__({})
        self._core = core
        self._kind = kind
        self._places = {name: place for place, name in enumerate(names)}

    def __getitem__(self, name: str) -> Array:
        array = self._core.read(self._places[name], self._kind)
        array.flags.writeable = False  # writing to it would change nothing
        return array

    def in_place(self, name: str) -> DeviceArray:
        address, shape = self._core.place(self._places[name], self._kind)
        device = self._core.limits()[3]
        return DeviceArray(
            address, "float32", shape, c_strides(shape),
            device=device if ":" in device else f"{device}:0", owner=self._core,
            writable=self._kind in _WRITABLE,
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<{len(self)} arrays on {self._core.limits()[3]}>"


class Transformer:
    """A Transformer, to be trained and looked at.

    config: Config. What it is; its seed decides the initial weights.
    tokens: int. The most of a batch, on each side.
    sentences: int. The most of a batch.
    training: bool. False: no gradients and no moments; forward, scores, maps and decoding.
    recompute: bool. Activations are computed again in backward, layer by layer: less memory.
    device: str. Where it lies and is computed: "cpu", "cuda" or "cuda:1"; `relpos.devices` says
        what there is. Batches and results are NumPy arrays everywhere.
    precision: "f32", or "bf16": operands of matrix products, attention's among them, are rounded to
        bfloat16 and their sums kept in float32, as are weights and everything else. A CPU gains by it
        where it has AVX512-BF16 (`build_info`).
    """

    __slots__ = (
        "__weakref__", "_averages", "_config", "_core", "_first_moments", "_gradients",
        "_parameters", "_second_moments",
    )  # fmt: skip

    def __init__(
        self,
        config: Config,
        *,
        tokens: int = 4096,
        sentences: int = 512,
        training: bool = True,
        recompute: bool = False,
        device: str = "cpu",
        precision: Precision = "f32",
    ) -> None:
        pairs, limits = _described(
            config, tokens, sentences, training, recompute, device, precision
        )
        self._take(config, _core.Model(pairs, limits))

    def _take(self, config: Config, core: _core.Model) -> None:
        self._config = config
        self._core = core
        rows = core.parameters()
        kinds: tuple[dict[str, Array], ...] = ({}, {}, {}, {}, {})
        for name, *arrays in rows:
            for kind, array in zip(kinds, arrays, strict=True):
                if array is not None:
                    kind[name] = array
        every = [Arrays(kind) for kind in kinds]
        if self.device != "cpu":
            training = core.limits()[2]
            there = (True, training, training, training, training and config.ema != 0)
            names = [name for name, *_ in rows]
            every = [Copies(core, names if there[i] else (), i) for i in range(5)]
        self._parameters, self._gradients, *others = every
        self._first_moments, self._second_moments, self._averages = others

    @property
    def config(self) -> Config:
        """What it was made from."""
        return self._config

    @property
    def limits(self) -> tuple[int, int]:
        """(tokens, sentences): the most of a batch."""
        tokens, sentences, *_ = self._core.limits()
        return tokens, sentences

    @property
    def device(self) -> str:
        """Where it lies, as it was said: "cpu", "cuda" (which is "cuda:0"), "cuda:1", ..."""
        return self._core.limits()[3]

    @property
    def precision(self) -> str:
        """Of matrix products: "f32" or "bf16"."""
        return PRECISIONS[self._core.limits()[4]]

    # ---- arrays ----------------------------------------------------------------------------------

    @property
    def parameters(self) -> Arrays:
        """The weights by name, float32 views that may be written between calls. Of a model on a
        GPU they are read-only copies: to change its weights use `assign`, or write to the array
        that `parameters.in_place(name)` gives."""
        return self._parameters

    def assign(self, name: str, values: Any) -> None:
        """Sets a parameter, wherever the model lies.

        values: real numbers that make a float32 array of its shape.
        """
        places = list(self._parameters)
        if name not in places:
            raise ValueError(f"name: {name!r} is no parameter of this model")
        check_unmasked("values", values)
        try:
            given = np.asarray(values)
        except (TypeError, ValueError) as error:  # of rows of several lengths, of other libraries
            raise TypeError(f"values: expected an array of real numbers: {error}") from None
        if given.dtype.kind not in "fiu":
            raise TypeError(f"values: expected real numbers, got {describe(given)}")
        with np.errstate(over="ignore"):
            array = np.ascontiguousarray(given, np.float32)
        if (np.isinf(array) & ~np.isinf(given)).any():
            raise ValueError("values: expected numbers that float32 has, got larger ones")
        self._core.write(places.index(name), 0, array)

    @property
    def gradients(self) -> Arrays:
        """Of the sum of the tokens' losses, float32 views; empty without training."""
        return self._gradients

    @property
    def first_moments(self) -> Arrays:
        """Adam's means of the gradients, read-only views; empty without training."""
        return self._first_moments

    @property
    def second_moments(self) -> Arrays:
        """Adam's means of the squared gradients, read-only views; empty without training."""
        return self._second_moments

    @property
    def averages(self) -> Arrays:
        """Averages of the weights, read-only views; empty where config.ema is 0."""
        return self._averages

    # ---- the step and its parts --------------------------------------------------------------------

    @overload
    def step(self, batches: Batch | Iterable[Batch]) -> StepResult: ...
    @overload
    def step(self, batches: Batch | Iterable[Batch], *, wait: Literal[True]) -> StepResult: ...
    @overload
    def step(self, batches: Batch | Iterable[Batch], *, wait: Literal[False]) -> None: ...
    @overload
    def step(self, batches: Batch | Iterable[Batch], *, wait: bool) -> StepResult | None: ...
    def step(self, batches: Batch | Iterable[Batch], *, wait: bool = True) -> StepResult | None:
        """One update: forward and backward of each batch, then clip and Adam.

        batches: Batch, or several that count as one: the loss is the mean over the labels of all.
        wait: bool. False: returns None, on a GPU as soon as the step has begun; `result` gives its
            result later. To keep the GPU at work, begin the next step before you ask for it.

        A loss or gradient that is not finite raises nothing: `finite` is False, the weights are as
        they were, and the next attempt has other dropout.
        """
        if not isinstance(batches, Batch | Iterable):
            raise TypeError(
                f"batches: expected relpos.Batch, or several, got {type(batches).__name__}"
            )
        several = (batches,) if isinstance(batches, Batch) else tuple(batches)
        if not several:
            raise ValueError("batches: expected at least one, got none")
        return _result_of(self._core.step(tuple(map(_packed, several)), check_truth("wait", wait)))

    def result(self) -> StepResult:
        """That of the oldest step or update that was begun with wait=False and has not been asked
        for. It waits for that step, not for those behind it. The last eight are kept."""
        return StepResult(*self._core.result())

    @property
    def results(self) -> tuple[int, int]:
        """(begun, done): how many times `result` may be called, and how often it would not wait."""
        return self._core.results()

    def forward(self, batch: Batch, *, dropout: bool = False, average: bool = False) -> StepResult:
        """Loss and accuracy of a batch.

        dropout: bool. As in training.
        average: bool. With the average of the weights, which a model with config.ema keeps.
        """
        dropout, average = check_truth("dropout", dropout), check_truth("average", average)
        if dropout and average:
            raise ValueError("average: expected False with dropout=True, got True")
        return StepResult(*self._core.forward(_packed(batch), dropout, average))

    @overload
    def backward(self, batch: Batch) -> StepResult: ...
    @overload
    def backward(self, batch: Batch, *, wait: Literal[True]) -> StepResult: ...
    @overload
    def backward(self, batch: Batch, *, wait: Literal[False]) -> None: ...
    @overload
    def backward(self, batch: Batch, *, wait: bool) -> StepResult | None: ...
    def backward(self, batch: Batch, *, wait: bool = True) -> StepResult | None:
        """Forward with dropout, and backward: adds to the gradients.

        wait: bool. False: returns None, and this batch has no result of its own; that of `update`
            is of all batches together.

        The first after an update or `zero_gradients` begins a new accumulation.
        """
        return _result_of(self._core.backward(_packed(batch), check_truth("wait", wait)))

    @overload
    def update(self) -> StepResult: ...
    @overload
    def update(self, *, wait: Literal[True]) -> StepResult: ...
    @overload
    def update(self, *, wait: Literal[False]) -> None: ...
    @overload
    def update(self, *, wait: bool) -> StepResult | None: ...
    def update(self, *, wait: bool = True) -> StepResult | None:
        """Clips, updates and zeroes the gradients of all that was accumulated.

        wait: bool. As of `step`.
        """
        return _result_of(self._core.update(check_truth("wait", wait)))

    def zero_gradients(self) -> None:
        """Drops what was accumulated."""
        self._core.zero_gradients()

    @property
    def counters(self) -> tuple[int, int]:
        """(step, attempt): updates made, and tried. They decide the learning rate and dropout's
        masks, and may be set. Asking waits for all that was begun."""
        return self._core.counters()

    @counters.setter
    def counters(self, counters: tuple[int, int]) -> None:
        if not isinstance(counters, Sequence) or len(counters) != 2:
            raise TypeError(f"counters: expected (step, attempt), got {counters!r}")
        step, attempt = counters
        self._core.set_counters(check_size("step", step, 0), check_size("attempt", attempt, 0))

    # ---- looking at it -----------------------------------------------------------------------------

    def score(self, batch: Batch) -> list[Array]:
        """log p(label) of every place, without dropout; 0 where the label is -1.

        Returns float32 (n,) for each sentence.
        """
        scores, _ = self._core.score(_packed(batch))
        return batch.split(scores)

    def scores(self, batch: Batch) -> list[tuple[Array, Hits]]:
        """What `score` and `hits` give of each sentence, in one pass."""
        scores, hits = self._core.score(_packed(batch))
        return list(zip(batch.split(scores), batch.split(hits), strict=True))

    def hits(self, batch: Batch) -> list[Hits]:
        """Whether the label has the highest score of all, at every place, without dropout.

        Returns bool (n,) for each sentence; False where the label is -1. A sentence all of whose
        places are hits is exactly what greedy decoding says.
        """
        _, hits = self._core.score(_packed(batch))
        return batch.split(hits)

    def hidden(self, batch: Batch) -> list[Array]:
        """What the last norm gives, the input of the output projection, without dropout.

        Returns float32 (n, C) for each sentence.
        """
        hidden = self._core.hidden(_packed(batch))
        return batch.split(hidden)

    def attention_maps(
        self,
        batch: Batch,
        layer: int,
        head: int,
        kind: Attention = "encoder",
        *,
        sentence: int = 0,
        show: str = "probabilities",
    ) -> Array:
        """What one head of one layer does in one sentence, without dropout.

        layer, head, sentence: int, from 0.
        kind: "encoder" or "decoder", self-attention of that stack, or "cross", from the decoder to
            the encoder.
        show: "probabilities", p, 0 where a key is hidden; "logits", after softcap, -inf where
            hidden; or a part of the logits, 0 where hidden: "content", and "key", "query" and
            "bias" for the relation terms ("key_2" and so on for the second of a kind). A part
            that this attention does not have is 0.

        Returns float32 (queries, keys).
        """
        check_choice("kind", kind, tuple(ATTENTIONS))
        check_choice("show", show, tuple(SHOWS))
        parts = self._core.attention_parts
        if not parts(ATTENTIONS[kind]):
            has = " or ".join(repr(each) for each, number in ATTENTIONS.items() if parts(number))
            raise ValueError(f"kind: expected {has}, got {kind!r}")
        return self._core.attention_map(
            _packed(batch),
            ATTENTIONS[kind],
            check_size("layer", layer, 0),
            check_size("head", head, 0),
            check_size("sentence", sentence, 0),
            SHOWS[show],
        )

    def alignments(
        self, batch: Batch, layer: Integers = -1, head: Integers | None = None
    ) -> list[Array]:
        """The decoder's attention to the sources, without dropout.

        layer: int, or several, whose mean is taken. Negative ones count from the last.
        head: int, or several, whose mean is taken in each of the layers. None: all heads.

        Returns float32 (target places, source tokens) for each sentence.
        """
        weights = self._core.alignments(_packed(batch), *self._chosen(layer, head))
        targets, sources = np.diff(batch.target_offsets), np.diff(batch.source_offsets)
        ends = np.cumsum(targets * sources).tolist()
        parts = zip(ends, targets.tolist(), sources.tolist(), strict=True)
        return [weights[end - n * m : end].reshape(n, m) for end, n, m in parts]

    def _chosen(
        self, layer: Integers, head: Integers | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """The layers and heads of an alignment, if the model has them."""
        count = self._config.decoder.layers
        layers = check_numbers("layer", layer, -count, count)
        return layers, None if head is None else check_numbers("head", head, 0, self._config.heads)

    # ---- what it says ------------------------------------------------------------------------------

    def search(self, batch: Batch, search: Search | None = None) -> list[list[Hypothesis]]:
        """The targets of a batch of sources, as `Decoder.search` gives them."""
        return Decoder(self).search(batch, search)

    # ---- files -------------------------------------------------------------------------------------

    def save(self, path: Path, what: What = "weights") -> None:
        """Writes a safetensors file, whole or not at all.

        path: str or PathLike.
        what: "weights", with the configuration; "average", the averaged weights under the same
            names; or "optimizer", moments, averages and counters, what `restore` needs besides the
            weights to go on as if nothing had happened.
        """
        check_choice("what", what, tuple(FILES))
        self._core.save(path_text(path), FILES[what])

    def restore(self, path: Path, what: What = "weights") -> None:
        """Reads what `save` wrote into this model, which has the same shapes.

        A failure leaves the model as it was.
        """
        check_choice("what", what, tuple(FILES))
        self._core.load(no_folder(path), FILES[what])

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        config: Config | None = None,
        tokens: int = 4096,
        sentences: int = 512,
        training: bool = True,
        recompute: bool = False,
        device: str = "cpu",
        precision: Precision = "f32",
    ) -> Transformer:
        """A model from a file of weights.

        path: str or PathLike.
        config: Config. Instead of the one in the file, for another schedule or dropout.
        tokens to precision: as in `Transformer`.

        Without training, and with the configuration in the file, the weights are mapped, not read:
        that takes no time and no memory of their own, and several processes share them (but for
        what a search in bf16 on a CPU keeps, 2 bytes a weight of the decoder). Then the
        file may be removed, or replaced as `save` does it, but not be written into. Writing to
        `parameters` changes the model, never the file. Weights are read, not mapped, on a GPU, from
        files of other writers that have another order, and where a parameter has a number of values
        that is no multiple of 16: in memory each begins at a multiple of 64 bytes.
        """
        own = Config.load(path) if config is None else config
        if config is None and not training:
            _, limits = _described(own, tokens, sentences, training, recompute, device, precision)
            model = cls.__new__(cls)
            model._take(own, _core.Model.open(limits, path))
            return model
        model = cls(
            own, tokens=tokens, sentences=sentences, training=training, recompute=recompute,
            device=device, precision=precision,
        )  # fmt: skip
        model.restore(path)
        return model

    def __repr__(self) -> str:
        return f"Transformer({self._config!r}): {self._parameters!r}"


def _result_of(found: _core.Result | None) -> StepResult | None:
    return None if found is None else StepResult(*found)


def check_numbers(name: str, given: Integers, least: int, end: int) -> npt.NDArray[np.int64]:
    """One integer or several, from `least` to below `end`."""
    array = np.atleast_1d(check_integers(name, given, "() or (count,)", (0, 1)))
    if array.size == 0:
        raise ValueError(f"{name}: expected at least one, got none")
    for number in array.tolist():
        if not least <= number < end:
            allowed = f"{least} to {end - 1}" if least < end else "none, this model has none"
            raise ValueError(f"{name}: expected {allowed}, got {number}")
    return np.ascontiguousarray(array, np.int64)


def model_memory(
    config: Config,
    *,
    tokens: int = 4096,
    sentences: int = 512,
    training: bool = True,
    recompute: bool = False,
    device: str = "cpu",
    precision: Precision = "f32",
) -> Memory:
    """What a model would take, told without making it; arguments as of `Transformer`.

    Of a model whose weights `Transformer.load` maps, `parameters` are pages of the file instead.
    """
    described = _described(config, tokens, sentences, training, recompute, device, precision)
    return Memory(*_core.model_memory(*described))


def _described(
    config: Config,
    tokens: int,
    sentences: int,
    training: bool,
    recompute: bool,
    device: str,
    precision: Precision,
) -> tuple[_core.Pairs, _core.Limits]:
    """A model as the core takes it."""
    if not isinstance(config, Config):
        raise TypeError(f"config: expected relpos.Config, got {type(config).__name__}")
    check_text("device", device)
    most = check_count("tokens", tokens, 1), check_count("sentences", sentences, 1)
    for name, number in zip(("tokens", "sentences"), most, strict=True):
        if number >= 1 << 31:
            raise ValueError(f"{name}: expected less than 2^31, got {number}")
    check_choice("precision", precision, PRECISIONS)
    how = check_truth("training", training), check_truth("recompute", recompute)
    return config.pairs(), (*most, *how, device, PRECISIONS.index(precision))
