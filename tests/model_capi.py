# SPDX-License-Identifier: Apache-2.0
"""model.h for ctypes: a model as a C program sees it, in float or in double.

An rp_config is a piece of memory here: its fields are set by name, as text, which is a public way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from capi import Core, CoreError, fields

CONFIG_BYTES = 4096  # more than an rp_config has

ENCODER, DECODER, CROSS = range(3)
WEIGHTS, AVERAGE, OPTIMIZER = range(3)


class Limits(ctypes.Structure):
    """rp_limits."""

    _fields_ = [
        *fields(ctypes.c_size_t, "struct_size"),
        *fields(ctypes.c_int64, "tokens", "sentences"),
        *fields(ctypes.c_int, "training", "recompute"),
        *fields(ctypes.c_char_p, "device"),
        *fields(ctypes.c_int, "precision"),
    ]


class Memory(ctypes.Structure):
    """rp_memory."""

    _fields_ = [
        *fields(ctypes.c_size_t, "struct_size"),
        *fields(ctypes.c_int64, "parameters", "gradients", "moments", "average", "constants"),
        *fields(ctypes.c_int64, "activations", "workspace", "total"),
    ]


class Parameter(ctypes.Structure):
    """rp_parameter."""

    _fields_ = [
        *fields(ctypes.c_size_t, "struct_size"),
        *fields(ctypes.c_char_p, "name"),
        *fields(ctypes.c_int, "dimensions"),
        *fields(ctypes.c_int64 * 3, "shape"),
        *fields(ctypes.c_int64, "count"),
        *fields(ctypes.c_void_p, "data", "gradient", "moment1", "moment2", "average"),
    ]


class Graphs(ctypes.Structure):
    """rp_graphs."""

    _fields_ = [
        *fields(ctypes.c_void_p, "labels"),
        *fields(ctypes.c_int, "label_bytes"),
        *fields(ctypes.c_void_p, "starts"),
    ]


class Batch(ctypes.Structure):
    """rp_batch."""

    _fields_ = [
        *fields(ctypes.c_size_t, "struct_size"),
        *fields(ctypes.c_int64, "sentences"),
        *fields(ctypes.c_void_p, "source", "target", "source_offsets", "target_offsets", "labels"),
        *fields(Graphs, "source_graphs", "target_graphs"),
        *fields(ctypes.c_void_p, "ordinals"),
    ]


class Result(ctypes.Structure):
    """rp_result."""

    _fields_ = [
        *fields(ctypes.c_size_t, "struct_size"),
        *fields(ctypes.c_int64, "tokens"),
        *fields(ctypes.c_double, "loss", "nll", "accuracy", "gradient_norm", "learning_rate"),
        *fields(ctypes.c_int64, "step", "attempt"),
        *fields(ctypes.c_int, "finite"),
        *fields(ctypes.c_char * 64, "first_bad"),
    ]


def text(value: Any) -> bytes:
    """A value as rp_config_set reads it."""
    return str(value).lower().encode() if isinstance(value, bool) else str(value).encode()


class Config:
    """An rp_config: a preset with changes by name."""

    def __init__(self, core: Core, preset: str, changes: Mapping[str, Any] | None = None) -> None:
        self.core = core
        self.memory = ctypes.create_string_buffer(CONFIG_BYTES)
        core.check(core.lib.rp_config_preset(preset.encode(), self.memory))
        for name, value in (changes or {}).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        self.core.check(self.core.lib.rp_config_set(self.memory, name.encode(), text(value)))

    def __getitem__(self, name: str) -> str:
        to = ctypes.create_string_buffer(64)
        size = ctypes.c_size_t(64)
        self.core.check(self.core.lib.rp_config_get(self.memory, name.encode(), to, size))
        return to.value.decode()


def packed(sentences: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Tokens end to end, and where each sentence begins."""
    offsets = np.cumsum([0, *(len(s) for s in sentences)]).astype(np.int64)
    tokens = [token for sentence in sentences for token in sentence]
    return np.array(tokens, np.int32), offsets


class Sentences:
    """An rp_batch and the arrays it points into."""

    def __init__(
        self,
        source: Sequence[Sequence[int]] | None,
        target: Sequence[Sequence[int]] | None,
        labels: Sequence[Sequence[int]] | None,
        source_graphs: Sequence[Any] | None = None,
        target_graphs: Sequence[Any] | None = None,
        ordinals: Sequence[int] | None = None,
    ) -> None:
        given = source if target is None else target
        assert given is not None
        self.alive: list[Any] = []
        self.rows = sum(map(len, given))
        self.struct = Batch(struct_size=ctypes.sizeof(Batch), sentences=len(given))
        for name, sentences in (("source", source), ("target", target)):
            if sentences is not None:
                tokens, offsets = packed(sentences)
                self._point(name, tokens)
                self._point(f"{name}_offsets", offsets)
        if labels is not None:
            self._point("labels", packed(labels)[0])
        if ordinals is not None:
            self._point("ordinals", np.array(ordinals, np.uint32))
        for name, graphs in (("source_graphs", source_graphs), ("target_graphs", target_graphs)):
            if graphs is not None:
                flat = np.concatenate([np.asarray(g, np.int8).ravel() for g in graphs])
                starts = np.cumsum([0, *(np.asarray(g).size for g in graphs)])[:-1]
                self._graphs(name, flat, starts.astype(np.int64))

    def _point(self, name: str, array: Any) -> None:
        self.alive.append(array)
        setattr(self.struct, name, array.ctypes.data)

    def _graphs(self, name: str, flat: Any, starts: Any) -> None:
        self.alive += [flat, starts]
        setattr(self.struct, name, Graphs(flat.ctypes.data, 1, starts.ctypes.data))


class Model:
    """An rp_model. Of one on a device `weights` and `gradients` are copies; `assign` writes."""

    def __init__(self, config: Config, **limits: Any) -> None:
        self.core, self.lib = config.core, config.core.lib
        self.handle = ctypes.c_void_p()
        given = Limits(ctypes.sizeof(Limits), 64, 16, 1, 0)
        for name, value in limits.items():
            setattr(given, name, value)
        self.core.check(
            self.lib.rp_model_create(config.memory, ctypes.byref(given), ctypes.byref(self.handle))
        )
        self.lib.rp_model_parameter_count.restype = ctypes.c_int64
        self.views: dict[str, dict[str, Any]] = {"data": {}, "gradient": {}, "moment1": {}}
        for kind in ("moment2", "average"):
            self.views[kind] = {}
        self.shapes: dict[str, Any] = {}
        for index in range(self.lib.rp_model_parameter_count(self.handle)):
            self._look_at(index)

    def _look_at(self, index: int) -> None:
        p = Parameter(struct_size=ctypes.sizeof(Parameter))
        where = ctypes.byref(p)
        self.core.check(self.lib.rp_model_parameter(self.handle, ctypes.c_int64(index), where))
        shape = self.shapes[p.name.decode()] = tuple(p.shape[: p.dimensions])
        real = ctypes.c_double if self.core.dtype == np.float64 else ctypes.c_float
        for kind, views in self.views.items():
            address = getattr(p, kind)
            if address:
                memory = (real * p.count).from_address(address)
                views[p.name.decode()] = np.frombuffer(memory, self.core.dtype).reshape(shape)

    def close(self) -> None:
        if self.handle:
            self.lib.rp_model_free(self.handle)
        self.handle = ctypes.c_void_p()
        self.views = {}

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def weights(self) -> dict[str, Any]:
        return self.views["data"] or self.read(0)

    @property
    def gradients(self) -> dict[str, Any]:
        return self.views["gradient"] if self.views["data"] else self.read(1)

    def read(self, array: int) -> dict[str, Any]:
        """Copies of all parameters' arrays of one kind: RP_ARRAY_..."""
        found = {}
        for index, (name, shape) in enumerate(self.shapes.items()):
            found[name] = np.full(shape, np.nan, self.core.dtype)
            to = ctypes.c_void_p(found[name].ctypes.data)
            numbers = ctypes.c_int64(index), ctypes.c_int(array)
            self.core.check(self.lib.rp_model_read(self.handle, *numbers, to))
        return found

    def assign(self, weights: Mapping[str, Any]) -> None:
        for name in self.shapes:
            self.write(name, 0, weights[name])

    def write(self, name: str, array: int, values: Any) -> None:
        """One parameter's array of one kind: RP_ARRAY_..."""
        values = np.ascontiguousarray(values, self.core.dtype)
        numbers = ctypes.c_int64(list(self.shapes).index(name)), ctypes.c_int(array)
        pointer = ctypes.c_void_p(values.ctypes.data)
        self.core.check(self.lib.rp_model_write(self.handle, *numbers, pointer))

    def _result(self, name: str, *arguments: Any) -> Result:
        result = Result(struct_size=ctypes.sizeof(Result))
        function = getattr(self.lib, name)
        self.core.check(function(self.handle, *arguments, ctypes.byref(result)))
        return result

    def step(self, *batches: Sentences) -> Result:
        structs = (Batch * len(batches))(*(b.struct for b in batches))
        return self._result("rp_model_step", structs, ctypes.c_int64(len(batches)))

    def begin(self, *batches: Sentences) -> None:
        """A step without a result."""
        structs = (Batch * len(batches))(*(b.struct for b in batches))
        count = ctypes.c_int64(len(batches))
        self.core.check(self.lib.rp_model_step(self.handle, structs, count, None))

    def result(self) -> Result:
        return self._result("rp_model_result")

    def results(self) -> tuple[int, int]:
        begun, done = ctypes.c_int64(-1), ctypes.c_int64(-1)
        pointers = ctypes.byref(begun), ctypes.byref(done)
        self.core.check(self.lib.rp_model_results(self.handle, *pointers))
        return begun.value, done.value

    def counters(self) -> tuple[int, int]:
        step, attempt = ctypes.c_int64(-1), ctypes.c_int64(-1)
        pointers = ctypes.byref(step), ctypes.byref(attempt)
        self.core.check(self.lib.rp_model_counters(self.handle, *pointers))
        return step.value, attempt.value

    def forward(self, batch: Sentences, dropout: bool = False) -> Result:
        return self._result(
            "rp_model_forward", ctypes.byref(batch.struct), ctypes.c_int(int(dropout))
        )

    def backward(self, batch: Sentences) -> Result:
        return self._result("rp_model_backward", ctypes.byref(batch.struct))

    def update(self) -> Result:
        return self._result("rp_model_update")

    def zero_gradients(self) -> None:
        self.core.check(self.lib.rp_model_zero_gradients(self.handle))

    def score(self, batch: Sentences) -> Any:
        return self.score_and_hits(batch)[0]

    def score_and_hits(self, batch: Sentences) -> tuple[Any, Any]:
        scores = np.full(batch.rows, np.nan, self.core.dtype)
        hits = np.full(batch.rows, 7, np.int8)
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (scores, hits)]
        self.core.check(self.lib.rp_model_score(self.handle, ctypes.byref(batch.struct), *pointers))
        return scores, hits

    def hidden(self, batch: Sentences, width: int) -> Any:
        to = np.full((batch.rows, width), np.nan, self.core.dtype)
        pointer = ctypes.c_void_p(to.ctypes.data)
        self.core.check(self.lib.rp_model_hidden(self.handle, ctypes.byref(batch.struct), pointer))
        return to

    def map(
        self, batch: Sentences, kind: int, layer: int, head: int, sentence: int, shape: Any
    ) -> Any:
        to = np.full(shape, np.nan, self.core.dtype)
        numbers = [ctypes.c_int64(x) for x in (layer, head, sentence)]
        self.core.check(
            self.lib.rp_model_attention_map(
                self.handle, ctypes.byref(batch.struct), ctypes.c_int(kind), *numbers,
                ctypes.c_int(0), ctypes.c_void_p(to.ctypes.data),
            )
        )  # fmt: skip
        return to

    def save(self, path: Any, what: int = WEIGHTS) -> None:
        self.core.check(self.lib.rp_model_save(self.handle, str(path).encode(), ctypes.c_int(what)))

    def load(self, path: Any, what: int = WEIGHTS) -> None:
        self.core.check(self.lib.rp_model_load(self.handle, str(path).encode(), ctypes.c_int(what)))


__all__ = ["Config", "CoreError", "Model", "Sentences"]
