# SPDX-License-Identifier: Apache-2.0
"""The binding of libcore: checks arrays and calls, nothing else. Use the functions of `relpos`."""

import os
from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Small = npt.NDArray[np.int32]
Labels = npt.NDArray[np.int8] | npt.NDArray[np.int16] | npt.NDArray[np.int32]
Booleans = npt.NDArray[np.bool_] | npt.NDArray[np.uint8]

# What is an array below is this where the call has a placement:
# (address, "float32" or "bfloat16", shape, strides in elements, writable).
Memory = tuple[int, str, tuple[int, ...], tuple[int, ...], bool]

# (device, stream, element, precision, allocate: bytes -> (address, owner))
Placement = tuple[str, int, int, int, Callable[[int], tuple[int, Any]] | None]

# (name, kind, table, map, left, right, beyond, buckets, query_positions, key_positions,
#  labels, label_starts, edge_starts, edge_keys, edge_labels)
Term = tuple[
    str,
    int,
    Array,
    int,
    int,
    int,
    int,
    Small | None,
    Small | None,
    Small | None,
    Labels | None,
    Integers | None,
    Integers | None,
    Small | None,
    Small | None,
]

# (B or 1, H or 1, N, M), or (flat, starts), flat (count,) or (H or 1, count)
Mask = Booleans | tuple[Booleans, Integers]

# (layout, causal, scale or 0, lengths, key_lengths, offsets, key_offsets, query_start, terms,
#  position_bias, (window left, right), mask, softcap, (dropout rate, key0, key1, site, first),
#  placement)
Call = tuple[
    str,
    bool,
    float,
    Integers | None,
    Integers | None,
    Integers | None,
    Integers | None,
    Integers | None,
    tuple[Term, ...],
    Array | None,
    tuple[int, int] | None,
    Mask | None,
    float,
    tuple[float, int, int, int, int] | None,
    Placement | None,
]

Pairs = tuple[tuple[str, str], ...]  # (name, text), as rp_config_set takes them
# (tokens, sentences, training, recompute, device, precision)
Limits = tuple[int, int, bool, bool, str, int]
Graphs = tuple[Labels, Integers]  # (labels end to end, starts)

# (source, source_offsets, target, target_offsets, labels, source_graphs, target_graphs, ordinals)
BatchTuple = tuple[
    Small | None,
    Integers | None,
    Small | None,
    Integers | None,
    Small | None,
    Graphs | None,
    Graphs | None,
    npt.NDArray[np.uint32] | None,
]

# (loss, nll, tokens, accuracy, gradient_norm, learning_rate, step, attempt, finite, first_bad)
Result = tuple[float, float, int, float, float, float, int, int, bool, str]

VERSION: str
TERMS: int  # of one kind
KEY: int
QUERY: int
BIAS: int
VALUE: int
MAP_BAND: int
MAP_LABEL: int
MAP_EDGES: int
BEYOND_CLIP: int
BEYOND_NONE: int
SHOW_PROBABILITIES: int
SHOW_SCORES: int
SHOW_CONTENT: int
SHOW_KEY: int  # + 1: the second term of the kind
SHOW_QUERY: int
SHOW_BIAS: int
ATTENTION_ENCODER: int
ATTENTION_DECODER: int
ATTENTION_CROSS: int
SAVE_WEIGHTS: int
SAVE_AVERAGE: int
SAVE_OPTIMIZER: int
F32: int
BF16: int

class DeviceError(RuntimeError): ...

class CoreInfo(TypedDict):
    version: str
    compiler: str
    flags: str
    isa: str
    isa_available: str
    bf16: str
    blas: str
    threads: int

def attention_forward(
    q: Array, k: Array, v: Array, out: Array | None, lse: bool | Memory, call: Call, /
) -> tuple[Array, Array | None]: ...
def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    table_gradients: tuple[Array | None, ...],
    dposition_bias: Array | None,
    call: Call,
    dq: Array | Memory | None = None,
    dk: Array | Memory | None = None,
    dv: Array | Memory | None = None,
    /,
) -> tuple[Array, Array, Array]: ...
def attention_map(
    q: Array,
    k: Array,
    v: Array,
    what: int,
    b: int,
    head: int,
    row: int,
    out: Array,
    call: Call,
    /,
) -> None: ...
def map_sums(p: Array, what: str, /) -> npt.NDArray[np.float64]: ...
def rotate(
    x: Array,
    out: Array | None,
    layout: str,
    offsets: Integers | None,
    lengths: Integers | None,
    start: Integers | None,
    positions: Small | None,
    frequencies: npt.NDArray[np.float64],
    interleaved: bool,
    inverse: bool,
    placement: Placement | None = None,
    name: str = "x",
    /,
) -> Array: ...
def frequencies(pairs: int, base: float, closed: bool, /) -> npt.NDArray[np.float64]: ...
def sinusoid(
    rows: int,
    width: int,
    first: int,
    interleaved: bool,
    frequencies: npt.NDArray[np.float64],
    /,
) -> Array: ...
def wave_table(
    weight: Array, waves: Array | int, heads: int, left: int, right: int, /
) -> Array: ...  # (heads, left + 1 + right, D)
def wave_gradient(dtable: Array, waves: Array | int, left: int, right: int, /) -> Array: ...
def device_memory(device: str, count: int, /) -> tuple[int, Any]: ...  # address, owner
def device_read(device: str, address: int, array: npt.NDArray[Any], /) -> None: ...
def device_write(device: str, address: int, array: npt.NDArray[Any], /) -> None: ...
def device_wait(device: str, /) -> None: ...

# (owner, device type, device index, *Memory)
def dlpack_take(
    capsule: object, /
) -> tuple[Any, int, int, int, str, tuple[int, ...], tuple[int, ...], bool]: ...
def dlpack_give(
    owner: Any,
    device_type: int,
    device_index: int,
    address: int,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    writable: bool,
    versioned: bool,
    /,
) -> object: ...
def set_threads(threads: int, /) -> None: ...
def get_threads() -> int: ...
def build_info() -> CoreInfo: ...

# (name, title, memory, memory_free, problem)
def devices() -> list[tuple[str, str, int, int, str | None]]: ...
def config_default() -> Pairs: ...
def config_preset(name: str, /) -> Pairs: ...
def config_check(pairs: Pairs, /) -> Pairs: ...
def config_load(path: str | os.PathLike[str], /) -> Pairs: ...
def preset_names() -> tuple[str, ...]: ...
def learning_rate(pairs: Pairs, step: int, /) -> float: ...

# (parameters, gradients, moments, average, constants, activations, workspace, total)
def model_memory(
    pairs: Pairs, limits: Limits, /
) -> tuple[int, int, int, int, int, int, int, int]: ...

# By the names of relpos.Search.
def search_default() -> dict[str, Any]: ...

class Model:
    def __new__(cls, pairs: Pairs, limits: Limits, /) -> Model: ...
    @classmethod
    def open(cls, limits: Limits, path: str | os.PathLike[str], /) -> Model: ...
    # tokens, sentences, training, device, precision
    def limits(self) -> tuple[int, int, bool, str, int]: ...
    def read(self, index: int, array: int, /) -> Array: ...
    def place(self, index: int, array: int, /) -> tuple[int, tuple[int, ...]]: ...
    def write(self, index: int, array: int, values: Array, /) -> None: ...
    # (name, weights, gradient, moment1, moment2, average) of each
    def parameters(
        self,
    ) -> tuple[
        tuple[str, Array | None, Array | None, Array | None, Array | None, Array | None], ...
    ]: ...
    # None: without wait
    def step(self, batches: tuple[BatchTuple, ...], wait: bool = True, /) -> Result | None: ...
    def forward(self, batch: BatchTuple, dropout: bool, average: bool, /) -> Result: ...
    def backward(self, batch: BatchTuple, wait: bool = True, /) -> Result | None: ...
    def update(self, wait: bool = True, /) -> Result | None: ...
    def result(self) -> Result: ...
    def results(self) -> tuple[int, int]: ...  # begun, done
    def zero_gradients(self) -> None: ...
    def counters(self) -> tuple[int, int]: ...
    def set_counters(self, step: int, attempt: int, /) -> None: ...
    def score(self, batch: BatchTuple, /) -> tuple[Array, npt.NDArray[np.bool_]]: ...  # log p, hits
    def hidden(self, batch: BatchTuple, /) -> Array: ...
    def attention_map(
        self, batch: BatchTuple, kind: int, layer: int, head: int, sentence: int, show: int, /
    ) -> Array: ...
    # (layers, heads, queries, keys) for each (kind, show, sentence, layers, heads)
    def attention_maps(
        self,
        batch: BatchTuple,
        dropout: bool,
        wanted: tuple[tuple[int, int, int, Integers, Integers], ...],
        /,
    ) -> tuple[Array, ...]: ...
    def attention_parts(self, kind: int, /) -> tuple[tuple[str, int], ...]: ...  # name, show
    # [targets][sources] of every sentence, end to end; heads None: all
    def alignments(
        self, batch: BatchTuple, layers: Integers, heads: Integers | None, /
    ) -> Array: ...
    def save(self, path: str | os.PathLike[str], what: int, /) -> None: ...
    def load(self, path: str | os.PathLike[str], what: int, /) -> None: ...
    def profile(self, on: bool, /) -> None: ...
    # (name, backward, calls, seconds, operations, bytes) of each
    def profile_lines(self) -> tuple[tuple[str, bool, int, float, float, float], ...]: ...

# (begin, end, beam, n_best, penalty, alpha, coverage, min_length, max_length, max_more, no_repeat,
#  suppressed, sample, temperature, top_k, top_p, seed, average)
SearchTuple = tuple[
    int,
    int,
    int,
    int,
    str,
    float,
    float,
    int,
    int,
    int,
    int,
    Small | None,
    bool,
    float,
    int,
    float,
    int,
    bool,
]

# (tokens, score, log_probability, finished)
Found = tuple[Small, float, float, bool]

class Decoder:
    def __new__(cls, models: tuple[Model, ...], /) -> Decoder: ...
    # of each sentence, best first
    def search(self, batch: BatchTuple, search: SearchTuple, /) -> list[list[Found]]: ...
    def begin(self, batch: BatchTuple, most_rows: int, /) -> Array: ...
    def step(self, parents: Integers | None, tokens: Small, /) -> Array: ...
