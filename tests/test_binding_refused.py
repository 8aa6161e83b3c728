# SPDX-License-Identifier: Apache-2.0
"""The door from Python: what is refused, and the sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import relpos
from binding_arrays import misaligned, read_only, rows, small_qkv


class Arrays(dict[str, Any]):
    """Keyword arguments of a call that works, one of them to be spoilt."""

    def __init__(self, **changes: Any) -> None:
        x = {name: rows(2, 4, 7, 8, seed=i) for i, name in enumerate("qkv")}
        super().__init__(x | changes)


class Interface:
    """Told by the array interface: with changes, or by what raises one."""

    def __init__(self, change: Any) -> None:
        self.change = change

    @property
    def __array_interface__(self) -> Any:
        if isinstance(self.change, Exception):
            raise self.change
        return X.__array_interface__ | self.change


X = rows(2, 4, 7, 8)
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "dtype",
        {"q": X[0].astype(np.float64)},
        TypeError,
        "q: expected float32 (B, H, N, D), got float64 (4, 7, 8); "
        "use np.ascontiguousarray(q, np.float32)",
    ),
    (
        "half",
        {"k": X.astype(np.float16)},
        TypeError,
        "k: expected float32 (B=2, H=4 or a divisor, M, D=8), got float16 (2, 4, 7, 8); "
        "use np.ascontiguousarray(k, np.float32)",
    ),
    (
        "byte order",
        {"v": X.astype(X.dtype.newbyteorder())},
        TypeError,
        "v: expected float32 (B=2, H=4, M=7, Dv), got >f4 (2, 4, 7, 8); "
        "use np.ascontiguousarray(v, np.float32)",
    ),
    (
        "list",
        {"q": X.tolist()},
        TypeError,
        "q: expected float32 (B, H, N, D), got list; use np.ascontiguousarray(q, np.float32)",
    ),
    (
        "masked",
        {"k": np.ma.masked_invalid(X)},
        TypeError,
        "k: expected an array without a mask of its own, which nothing would look at: got "
        "MaskedArray; use k.filled(0), and `lengths` or `mask`",
    ),
    (
        "interface",
        {"q": Interface({"shape": (2, 4, -7, 8)})},
        TypeError,
        "q: no array to read without a copy: negative dimensions are not allowed",
    ),
    (
        "interface that raises",
        {"k": Interface(ValueError("nothing here"))},
        TypeError,
        "k: no array to read without a copy: nothing here",
    ),
    (
        "None",
        {"q": None},
        TypeError,
        "q: expected float32 (B, H, N, D), got NoneType",
    ),
    ("text", {"k": "k"}, TypeError, "k: expected float32 (B=2, H=4 or a divisor, M, D=8), got str"),
    ("number", {"v": 4}, TypeError, "v: expected float32 (B=2, H=4, M=7, Dv), got int"),
    ("rank", {"q": X[0]}, ValueError, "q: expected float32 (B, H, N, D), got float32 (4, 7, 8)"),
    (
        "rank, packed",
        {"offsets": [0, 7]},
        ValueError,
        "q: expected float32 (tokens, H, D), got float32 (2, 4, 7, 8)",
    ),
    (
        "heads",
        {"k": X[:, :3]},
        ValueError,
        "k: expected float32 (B=2, H=4 or a divisor, M, D=8), got float32 (2, 3, 7, 8)",
    ),
    (
        "heads of none",
        {"q": X[:, :0]},
        ValueError,
        "k: expected float32 (B=2, H=0 or a divisor, M, D=8), got float32 (2, 4, 7, 8)",
    ),
    (
        "heads of values",
        {"k": X[:, :2]},
        ValueError,
        "v: expected float32 (B=2, heads of k=2, M=7, Dv), got float32 (2, 4, 7, 8)",
    ),
    (
        "keys",
        {"v": X[:, :, :6]},
        ValueError,
        "v: expected float32 (B=2, H=4, M=7, Dv), got float32 (2, 4, 6, 8)",
    ),
    (
        "layout",
        {"layout": "bnhd", "k": X[:, :, :6]},
        ValueError,
        "k: expected float32 (B=2, M, H=7 or a divisor, D=8), got float32 (2, 4, 6, 8)",
    ),
    ("layout name", {"layout": "nhd"}, ValueError, "layout: expected 'bhnd' or 'bnhd', got 'nhd'"),
    (
        "order",
        {"q": np.asfortranarray(X)},
        ValueError,
        "q: the last axis must be contiguous, got strides (4, 8, 32, 224) in bytes; use q.copy()",
    ),
    (
        "backwards",
        {"q": X[:, :, ::-1]},
        ValueError,
        "q: strides must be whole elements forward, got strides (896, 224, -32, 4) in bytes; "
        "use q.copy()",
    ),
    (
        "misaligned",
        {"k": misaligned(2, 4, 7, 8)},
        ValueError,
        "k: the array is not aligned to its elements; use k.copy()",
    ),
    (
        "out dtype",
        {"out": X.astype(np.float64)},
        TypeError,
        "out: expected float32 (B=2, H=4, N=7, Dv=8), got float64 (2, 4, 7, 8)",
    ),
    (
        "out shape",
        {"out": np.empty((2, 4, 7, 9), np.float32)},
        ValueError,
        "out: expected float32 (B=2, H=4, N=7, Dv=8), got float32 (2, 4, 7, 9)",
    ),
    (
        "out read-only",
        {"out": read_only(np.empty_like(X))},
        ValueError,
        "out: the array is read-only; give a writable one",
    ),
    (
        "out overlaps itself",
        {
            "out": np.lib.stride_tricks.as_strided(
                np.empty(999, np.float32), X.shape, (896, 224, 4, 4)
            )
        },
        ValueError,
        "out: elements share memory, got strides (896, 224, 4, 4) in bytes; "
        "give a new array, as np.empty makes it",
    ),
    (
        "lengths, count",
        {"lengths": [1, 2, 3]},
        ValueError,
        "lengths: expected int64 (B=2,), got int64 (3,)",
    ),
    (
        "lengths, fractions",
        {"lengths": [1.0, 2.0]},
        TypeError,
        "lengths: expected integers, got float64 (2,)",
    ),
    (
        "lengths, range",
        {"lengths": [1, 8]},
        ValueError,
        "attention: lengths[1]=8, must be from 0 to N=7",
    ),
    (
        "query_start, count",
        {"query_start": [0]},
        ValueError,
        "query_start: expected int64 (B=2,), got int64 (1,)",
    ),
    (
        "key_offsets, end",
        {"k": X[0], "v": X[0], "key_offsets": [0, 1, 5]},
        ValueError,
        "k: expected float32 (tokens, H=4 or a divisor, D=8), got float32 (4, 7, 8)",
    ),
    (
        "offsets, end",
        {"q": X[0], "offsets": [0, 1, 5]},
        ValueError,
        "offsets: the last one is 5, but q has 4 tokens",
    ),
    (
        "offsets, falling",
        {"q": X[0], "k": X[0], "v": X[0], "offsets": [0, 5, 4]},
        ValueError,
        "attention: offsets[2]=4 after 5, must not fall and not exceed 2^40",
    ),
    (
        "offsets, none",
        {"offsets": []},
        ValueError,
        "offsets: expected B + 1 numbers from 0 to the number of tokens, got none",
    ),
    (
        "offsets, rank",
        {"offsets": [[0, 4]]},
        ValueError,
        "offsets: expected int64 (B + 1,), got int64 (1, 2)",
    ),
    (
        "scale 0",
        {"scale": 0},
        ValueError,
        "scale: expected a finite number other than 0, got 0; leave it out for 1 / sqrt(D)",
    ),
    (
        "scale NaN",
        {"scale": float("nan")},
        ValueError,
        "scale: expected a finite number other than 0, got nan; leave it out for 1 / sqrt(D)",
    ),
    (
        "scale infinite",
        {"scale": np.float32(np.inf)},
        ValueError,
        "scale: expected a finite number other than 0, got inf; leave it out for 1 / sqrt(D)",
    ),
    (
        "table width",
        {"position": relpos.Shaw(rows(5, 9))},
        ValueError,
        "key_table: expected float32 (T, D=8), got float32 (5, 9)",
    ),
    (
        "table heads",
        {"position": relpos.Shaw(value_table=rows(3, 5, 8))},
        ValueError,
        "value_table: expected float32 (H=4, T, Dv=8), got float32 (3, 5, 8)",
    ),
    (
        "table broadcast over heads",
        {"position": relpos.Shaw(np.broadcast_to(rows(5, 8), (4, 5, 8)))},
        ValueError,
        "key_table: elements share memory, got strides (0, 32, 4) in bytes; use key_table.copy()",
    ),
    (
        "scheme",
        {"position": X},
        TypeError,
        "position: expected a scheme as relpos.Shaw, a tuple of them or None, got ndarray",
    ),
    (
        "three schemes",
        {"position": tuple(relpos.Shaw(rows(5, 8)) for _ in range(3))},
        ValueError,
        "position: at most 2 key terms, got 3 (Shaw, Shaw, Shaw)",
    ),
]


@pytest.mark.parametrize("forward", [relpos.attention, relpos.attention_forward])
@pytest.mark.parametrize(
    ("changes", "error", "sentence"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_refused(changes: Any, error: type[Exception], sentence: str, forward: Any) -> None:
    arguments = Arrays(**changes)
    with pytest.raises(error) as caught:
        forward(**arguments)
    assert type(caught.value) is error
    assert str(caught.value) == sentence


@pytest.mark.parametrize("name", ["q", "k", "v", "key_table"])
def test_out_must_not_share_memory_with_an_input(name: str) -> None:
    arguments = Arrays()
    out = rows(2, 4, 7, 8) if name == "key_table" else arguments[name][:]
    arguments["position"] = relpos.Shaw(out[1, 2] if name == "key_table" else rows(7, 8))
    with pytest.raises(
        ValueError, match=f"^attention: out shares memory with {name}; give it an array of its own$"
    ):
        relpos.attention(**arguments, out=out)


@pytest.mark.parametrize("name", ["q", "k"])
def test_out_must_not_share_memory_with_what_is_turned(name: str) -> None:
    arguments = Arrays(position=relpos.RoPE())
    with pytest.raises(ValueError, match=f"^out: shares memory with {name}; give an array of its"):
        relpos.attention(**arguments, out=arguments[name][:])


def test_out_must_not_share_memory_with_a_position_bias() -> None:
    arguments = Arrays(out=rows(2, 4, 7, 8))
    bias = arguments["out"][0, :, 0]
    arguments["position"] = relpos.TransformerXL(rows(4 * 8, 16), position_bias=bias)
    with pytest.raises(ValueError, match="^attention: out shares memory with position_bias; give"):
        relpos.attention(**arguments)


def test_out_must_not_share_memory_with_labels() -> None:
    """They would be read as what was written there: the core has checked them before."""
    memory = np.zeros(200, np.float32)
    labels = memory.view(np.int32)[:36].reshape(6, 6)
    q, k, v = (rows(1, 2, 6, 4) for _ in range(3))
    graph = relpos.ShawGraph(rows(3, 4), labels=labels)
    with pytest.raises(ValueError, match="^out: shares memory with the labels of key_table; give"):
        relpos.attention(q, k, v, position=graph, out=memory[:48].reshape(1, 2, 6, 4))


def test_integers_that_are_too_large_are_told() -> None:
    with pytest.raises(
        ValueError, match=r"^query_start: expected integers below 2\^63 in magnitude"
    ):
        relpos.attention(*small_qkv(), query_start=2**70)


@pytest.mark.parametrize("causal", [-7, 2, np.int8(3)])
def test_truth_is_0_or_1(causal: Any) -> None:
    with pytest.raises(ValueError, match=f"^causal: expected True or False, got {causal}$"):
        relpos.attention(*small_qkv(), causal=causal)


def test_gradients_that_a_call_does_not_have_are_none() -> None:
    x, table = rows(1, 1, 4, 4), rows(3, 4)
    plane = relpos.Plane(relpos.Shaw(table), relpos.Shaw(table.copy()), width=2)
    out, ctx = relpos.attention_forward(x, x, x, position=plane)
    gradients = relpos.attention_backward(ctx, out)
    assert gradients.row_key_table.shape == table.shape
    assert gradients.value_table is gradients.row_value_table is gradients.key_table_2 is None
    with pytest.raises(AttributeError, match="there is no gradient 'row_nothing'"):
        gradients.row_nothing  # noqa: B018


def test_dout_is_checked() -> None:
    out, ctx = relpos.attention_forward(*small_qkv())
    with pytest.raises(TypeError, match="^dout: expected float32 .*, got float64"):
        relpos.attention_backward(ctx, out.astype(np.float64))
    with pytest.raises(ValueError, match=r"^dout: expected float32 \(B=2, H=3, N=37, Dv=24\), got"):
        relpos.attention_backward(ctx, out[:, :2])
    both = relpos.attention_forward(*small_qkv())  # and not taken apart
    with pytest.raises(TypeError, match="^ctx: expected the second of the two .*, got tuple"):
        relpos.attention_backward(both, out)  # type: ignore[arg-type]


SHAW_REFUSED: list[tuple[str, Callable[[], relpos.Shaw], type[Exception], str]] = [
    (
        "nothing",
        lambda: relpos.Shaw(),
        ValueError,
        "Shaw: give key_table, value_table or both; attention without either is position=None",
    ),
    (
        "list",
        lambda: relpos.Shaw([[1.0]]),  # type: ignore[arg-type]
        TypeError,
        "key_table: expected float32 (T, d) or (H, T, d), got list; "
        "use np.ascontiguousarray(key_table, np.float32)",
    ),
    (
        "dtype",
        lambda: relpos.Shaw(value_table=np.zeros((3, 8))),  # type: ignore[arg-type]
        TypeError,
        "value_table: expected float32 (T, d) or (H, T, d), got float64 (3, 8); "
        "use np.ascontiguousarray(value_table, np.float32)",
    ),
    (
        "rank",
        lambda: relpos.Shaw(rows(8)),
        ValueError,
        "key_table: expected float32 (T, d) or (H, T, d), got float32 (8,)",
    ),
    (
        "even",
        lambda: relpos.Shaw(rows(8, 4)),
        ValueError,
        "key_table: 8 rows are not 2k + 1; give left or right",
    ),
    (
        "no rows",
        lambda: relpos.Shaw(rows(0, 4)),
        ValueError,
        "key_table: 0 rows are not 2k + 1; give left or right",
    ),
    (
        "k",
        lambda: relpos.Shaw(rows(9, 4), k=3),
        ValueError,
        "key_table: a band from -3 to 3 needs 7 rows, got 9",
    ),
    (
        "one k for both",
        lambda: relpos.Shaw(rows(9, 4), rows(5, 4), k=4),
        ValueError,
        "value_table: a band from -4 to 4 needs 9 rows, got 5; "
        "value_k, value_left and value_right give it a band of its own",
    ),
    (
        "left beyond the table",
        lambda: relpos.Shaw(rows(4, 4), left=4),
        ValueError,
        "key_table: a band from -4 to 0 needs 5 rows, got 4",
    ),
    (
        "negative",
        lambda: relpos.Shaw(rows(9, 4), k=-1),
        ValueError,
        "k: expected 0 or more, got -1",
    ),
    (
        "fraction",
        lambda: relpos.Shaw(rows(9, 4), left=1.5),  # type: ignore[arg-type]
        TypeError,
        "left: expected an integer, got float",
    ),
    (
        "k and left",
        lambda: relpos.Shaw(rows(9, 4), k=4, left=4),
        ValueError,
        "k: give either k or left and right",
    ),
    (
        "value_k without a value",
        lambda: relpos.Shaw(rows(9, 4), value_k=4),
        ValueError,
        "value_k, value_left, value_right: there is no value_table",
    ),
    (
        "beyond",
        lambda: relpos.Shaw(rows(9, 4), beyond="mask"),  # type: ignore[arg-type]
        ValueError,
        "beyond: expected 'clip' or 'none', got 'mask'",
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "sentence"), [r[1:] for r in SHAW_REFUSED], ids=[r[0] for r in SHAW_REFUSED]
)
def test_shaw_refused(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert type(caught.value) is error and str(caught.value) == sentence


def test_shaw_bands() -> None:
    table = rows(9, 4)
    assert relpos.Shaw(table).key_band == (4, 4)
    assert relpos.Shaw(table, left=0).key_band == (0, 8)
    assert relpos.Shaw(table, right=8).key_band == (0, 8)
    assert relpos.Shaw(table, left=3, right=5).key_band == (3, 5)
    both = relpos.Shaw(table, rows(5, 4))
    assert (both.key_band, both.value_band, both.tied) == ((4, 4), (2, 2), False)
    assert relpos.Shaw(table, table).tied
    assert repr(relpos.Shaw(table, k=4)) == (
        "Shaw(key_table=float32 (9, 4), key_band=(4, 4), beyond='clip')"
    )
    with pytest.raises(AttributeError):
        both.k = 3  # type: ignore[misc]


def test_memory_error() -> None:
    endless = np.broadcast_to(np.float32(0), (1, 1, 1 << 46, 1))
    with pytest.raises(MemoryError):
        relpos.attention(endless, endless, endless)
