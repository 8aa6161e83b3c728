# SPDX-License-Identifier: Apache-2.0
"""The binding of libcore: checks arrays and calls, nothing else. Use the functions of `relpos`."""

from typing import TypedDict

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Small = npt.NDArray[np.int32]
Labels = npt.NDArray[np.int8] | npt.NDArray[np.int16] | npt.NDArray[np.int32]
Booleans = npt.NDArray[np.bool_] | npt.NDArray[np.uint8]

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

# (B or 1, H or 1, N, M), or (flat, starts)
Mask = Booleans | tuple[Booleans, Integers]

# (layout, causal, scale or 0, lengths, key_lengths, offsets, key_offsets, query_start, terms,
#  position_bias, (window left, right), mask, softcap, (dropout rate, key0, key1, site, first))
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
]

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

class DeviceError(RuntimeError): ...

class CoreInfo(TypedDict):
    version: str
    compiler: str
    flags: str
    isa: str
    isa_available: str
    blas: str
    threads: int

def attention_forward(
    q: Array, k: Array, v: Array, out: Array | None, with_lse: bool, call: Call, /
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
    /,
) -> Array: ...
def set_threads(threads: int, /) -> None: ...
def get_threads() -> int: ...
def build_info() -> CoreInfo: ...
