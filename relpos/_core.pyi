# SPDX-License-Identifier: Apache-2.0
"""The binding of libcore: checks arrays and calls, nothing else. Use the functions of `relpos`."""

from typing import TypedDict

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

# (table, left, right, beyond)
Relation = tuple[Array, int, int, int]

# (layout, causal, scale or 0, lengths, key_lengths, offsets, key_offsets, query_start, key, value)
Call = tuple[
    str,
    bool,
    float,
    Integers | None,
    Integers | None,
    Integers | None,
    Integers | None,
    Integers | None,
    Relation | None,
    Relation | None,
]

VERSION: str
BEYOND_CLIP: int
BEYOND_NONE: int

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
    dkey_table: Array | None,
    dvalue_table: Array | None,
    call: Call,
    /,
) -> tuple[Array, Array, Array]: ...
def set_threads(threads: int, /) -> None: ...
def get_threads() -> int: ...
def build_info() -> CoreInfo: ...
