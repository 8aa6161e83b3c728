# SPDX-License-Identifier: Apache-2.0
"""Arrays on a GPU, taken and given without a copy: here the emulated one (tests/emulator), whose
memory the host cannot read, and arrays of a library made up for it (foreign.py)."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from binding_arrays import rows
from device_capi import from_bf16, to_bf16
from foreign import Foreign
from relpos import _core
from relpos.device_array import DeviceArray
from relpos.position.terms import Band, Lowered, Term, itself

B, H, N, M, D, E, T = 2, 2, 19, 23, 16, 24, 7
HALF_ULP = 2.0**-24

random = np.random.default_rng(5)
LABELS = random.integers(-1, T, (B, 1, N, M)).astype(np.int8)
EDGES = relpos.EdgeList(
    random.integers(0, N, 60), random.integers(0, M, 60), random.integers(0, T, 60),
    random.integers(0, B, 60),
)  # fmt: skip
PLACES = random.integers(0, 9, (B, N)), random.integers(0, 9, (B, M))

Make = Callable[..., Any]
SCHEMES: dict[str, tuple[Make, list[tuple[int, ...]]]] = {
    "none": (lambda: None, []),
    "shaw": (lambda a, b: relpos.Shaw(a, b), [(T, D), (T, E)]),
    "shaw of each head, one-sided": (
        lambda a, b: relpos.Shaw(a, b, left=4, value_left=2),
        [(H, T, D), (H, T, E)],
    ),
    "music": (lambda a: relpos.MusicTransformer(a), [(T, D)]),
    "relative_key": (lambda a: relpos.RelativeKey(a, beyond="clip"), [(T, D)]),
    "relative_key_query": (lambda a: relpos.RelativeKeyQuery(a, beyond="clip"), [(H, T, D)]),
    "deberta": (lambda a, b: relpos.DeBERTa(a, b), [(8, D), (8, D)]),
    "deberta of the paper, tied": (lambda a: relpos.DeBERTa(a, a, p2c="paper"), [(8, D)]),
    "deberta with buckets": (
        lambda a, b: relpos.DeBERTa(a, b, buckets=4, max_position=6),
        [(H, 8, D), (H, 8, D)],
    ),
    "alibi": (lambda: relpos.ALiBi(), []),
    "alibi, learned": (lambda a: relpos.ALiBi(a), [(H,)]),
    "t5": (lambda a: relpos.T5Bias(a, max_distance=9, bias_scale=2.0), [(8, H)]),
    "transformer-xl": (
        lambda a, b, c: relpos.TransformerXL(a, b, c),
        [(H * D, 6), (H, D), (H, D)],
    ),
    "rope": (lambda: relpos.RoPE(), []),
    "rope, alibi": (lambda: (relpos.RoPE(pairing="interleaved"), relpos.ALiBi()), []),
    "labels": (
        lambda a, b, c: relpos.ShawGraph(a, b, bias_table=c, labels=LABELS),
        [(T, D), (T, E), (H, T)],
    ),
    "edges": (lambda a: relpos.ShawGraph(a, edges=EDGES), [(T, D)]),
    "rat-sql": (
        lambda a, b: (relpos.Shaw(a), relpos.ShawGraph(b, labels=LABELS)),
        [(T, D), (T, D)],
    ),
    "places": (lambda a: relpos.CrossPositions(relpos.Shaw(a), *PLACES), [(T, D)]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, lengths": {"causal": True, "lengths": [N, 4], "key_lengths": [M, 9]},
    "mask, softcap": {"mask": random.random((B, 1, N, M)) < 0.7, "softcap": 2.0},
    "dropout, window": {"dropout": 0.25, "seed": 7, "window": (5, 3)},
}

pytestmark = pytest.mark.usefixtures("emulated_device")


def qkv() -> list[Any]:
    return [rows(B, H, N, D, seed=1), rows(B, H, M, D, seed=2), rows(B, H, M, E, seed=3)]


def tables_for(shapes: list[tuple[int, ...]]) -> list[Any]:
    return [0.5 * rows(*shape, seed=10 + i) for i, shape in enumerate(shapes)]


def assert_near(ours: Any, expected: Any, ulp: float = HALF_ULP) -> None:
    """Both are sums of at most some hundred products, each rounded: so is their difference."""
    most = float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0))  # lse may be -inf
    np.testing.assert_allclose(ours, expected, rtol=0, atol=100 * ulp * max(most, 1.0))


def both_ways(arrays: list[Any], position: Any, dout: Any, **options: Any) -> dict[str, Any]:
    out, ctx = relpos.attention_forward(*arrays, position=position, **options)
    return {"out": out, "lse": ctx.lse, **relpos.attention_backward(ctx, dout)}


class Twice(relpos.position.Scheme):
    """A scheme of one's own, whose table becomes two."""

    parameters = ("table",)

    def __init__(self, table: Any) -> None:
        self.table = table

    def with_tables(self, tables: Any) -> Twice:
        return Twice(tables["table"])

    def lower(self, shape: Any) -> Lowered:
        band, terms = Band(T // 2, T // 2), []
        for _ in range(2):
            own = self.table.constant(self.table.numpy())
            terms.append(Term("table", "key", own, band, itself("table")))
        return Lowered(tuple(terms), scale=shape.default_scale)


def test_gradients_of_one_parameter_add_up() -> None:
    """Those of two tables that were made of it; where both terms read it there is one anyway."""
    table, dout = rows(T, D), rows(B, H, N, E, seed=4)
    halves = both_ways(qkv(), (relpos.Shaw(table), relpos.Shaw(table.copy())), dout)
    there = [Foreign(x) for x in (*qkv(), table)]
    found = both_ways(there[:3], Twice(there[3]), Foreign(dout))
    assert type(found["table"]) is DeviceArray
    assert_near(found["table"].numpy(), halves["key_table"] + halves["key_table_2"])
    reach = rows(2 * M - 1, D)
    both = relpos.RelativeKey(reach), relpos.RelativeKey(reach)
    expected = both_ways(qkv(), both, dout)["distance_table"]
    far = Foreign(reach)
    both = relpos.RelativeKey(far), relpos.RelativeKey(far)
    assert_near(both_ways(there[:3], both, Foreign(dout))["distance_table"].numpy(), expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_the_hosts(name: str) -> None:
    make, shapes = SCHEMES[name]
    tables, dout = tables_for(shapes), rows(B, H, N, E, seed=4)
    expected = both_ways(qkv(), make(*tables), dout)
    there = [Foreign(x) for x in (*qkv(), *tables)]
    found = both_ways(there[:3], make(*there[3:]), Foreign(dout))
    assert found.keys() == expected.keys()
    for key, x in found.items():
        assert type(x) is DeviceArray
        assert (x.shape, x.dtype, x.device) == (expected[key].shape, "float32", "cuda:0")
        assert_near(x.numpy(), expected[key])
    assert relpos.attention(*there[:3], position=make(*there[3:])).shape == (B, H, N, E)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_the_hosts(name: str) -> None:
    tables, dout = tables_for([(T, D), (T, E)]), rows(B, H, N, E, seed=4)
    expected = both_ways(qkv(), relpos.Shaw(*tables), dout, **OPTIONS[name])
    there = [Foreign(x) for x in (*qkv(), *tables)]
    found = both_ways(there[:3], relpos.Shaw(*there[3:]), Foreign(dout), **OPTIONS[name])
    for key, x in found.items():
        assert_near(x.numpy(), expected[key])


def test_packed() -> None:
    arrays = [rows(9, H, D, seed=1), rows(12, H, D, seed=2), rows(12, H, E, seed=3)]
    options: dict[str, Any] = {"offsets": [0, 4, 9], "key_offsets": [0, 7, 12], "causal": True}
    dout, table = rows(9, H, E, seed=4), rows(T, D, seed=5)
    expected = both_ways(arrays, relpos.Shaw(table), dout, **options)
    there = [Foreign(x) for x in arrays]
    found = both_ways(there, relpos.Shaw(Foreign(table)), Foreign(dout), **options)
    for key, x in found.items():
        assert_near(x.numpy(), expected[key])


def bf16(x: Any) -> Any:
    """Rounded to bfloat16 and back."""
    return from_bf16(to_bf16(x))


@pytest.mark.parametrize("name", ["none", "shaw", "labels", "rope"])
def test_bfloat16(name: str) -> None:
    """Of arrays that are bfloat16 numbers: what differs is the rounding of products' operands and
    of results, by half a unit in the last place of 8 bits each."""
    make, shapes = SCHEMES[name]
    tables, dout = tables_for(shapes), bf16(rows(B, H, N, E, seed=4))
    arrays = [bf16(x) for x in qkv()]
    expected = both_ways(arrays, make(*tables), dout)
    there = [Foreign(x, "bfloat16") for x in arrays]
    found = both_ways(there, make(*map(Foreign, tables)), Foreign(dout, "bfloat16"))
    for key, x in found.items():
        wide = key not in ("out", "q", "k", "v")
        assert x.dtype == ("float32" if wide else "bfloat16")
        off = np.linalg.norm(x.numpy() - expected[key]) / np.linalg.norm(expected[key])
        assert off < 4 * 2.0**-8, key
    assert relpos.attention(*there).dtype == "bfloat16"


def test_precision() -> None:
    there = [Foreign(x) for x in qkv()]
    exact = relpos.attention(*there).numpy()
    near = relpos.attention(*there, precision="bf16")
    assert near.dtype == "float32"
    off = np.linalg.norm(near.numpy() - exact) / np.linalg.norm(exact)
    assert 0 < off < 4 * 2.0**-8
    with pytest.raises(ValueError, match="^precision: expected 'f32' or 'bf16', got 'f16'"):
        relpos.attention(*there, precision="f16")


# ---- no copies -----------------------------------------------------------------------------------


class Spy:
    """`relpos._core`, telling what memory its calls are given."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def __getattr__(self, name: str) -> Any:
        return getattr(_core, name)

    def attention_forward(self, *given: Any) -> Any:
        self.told += [*given[:4], *(term[2] for term in given[5][8])]
        return _core.attention_forward(*given)


@pytest.mark.parametrize("version", [0, 1])
def test_the_core_sees_the_arrays_own_memory(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys.modules["relpos.attention"], "_core", Spy(told))
    there = [Foreign(x, version=version) for x in qkv()]
    table, out = Foreign(rows(T, D), version=version), Foreign(rows(B, H, N, E), version=version)
    found = relpos.attention(*there, position=relpos.Shaw(table), out=out)  # type: ignore[arg-type]
    assert [x[0] for x in told] == [x.address for x in (*there, out, table)]
    expected = relpos.attention(*qkv(), position=relpos.Shaw(rows(T, D)))
    assert_near(out.numpy(), expected)
    assert_near(found.numpy(), expected)  # type: ignore[attr-defined]


def test_views() -> None:
    """q, k and v beside each other in one array, the heads after the rows."""
    wide = rows(B, N, H, 3, D, seed=7)
    whole, table = Foreign(wide), rows(T, D)
    host = [wide[:, :, :, i] for i in range(3)]
    there = [whole.part(lambda x, i=i: x[:, :, :, i]) for i in range(3)]
    wide_table = Foreign(np.repeat(table, 2, axis=1))
    narrow = wide_table.part(lambda x: x[:, :D])
    position = relpos.Shaw(narrow)
    table = np.repeat(table, 2, axis=1)[:, :D]
    expected = both_ways(host, relpos.Shaw(table), rows(B, N, H, D), layout="bnhd")
    found = both_ways(there, position, Foreign(rows(B, N, H, D)), layout="bnhd")
    for key, x in found.items():
        assert_near(x.numpy(), expected[key])
    assert found["key_table"].strides == (2 * D, 1)  # as the table lies


def test_results_go_on_without_a_copy() -> None:
    there = [Foreign(x) for x in qkv()]
    out = relpos.attention(*there)
    assert isinstance(out, DeviceArray)
    assert out.__dlpack_device__() == (2, 0)
    for version, name in (((1, 0), "dltensor_versioned"), (None, "dltensor")):
        capsule = out.__dlpack__(stream=1, max_version=version)
        assert f'"{name}"' in repr(capsule)
        owner, kind, index, *memory = _core.dlpack_take(capsule)
        assert (kind, index, *memory) == (2, 0, *out.memory)
        with pytest.raises(BufferError, match="nobody has taken"):
            _core.dlpack_take(capsule)
        del owner
    again = relpos.attention(out, Foreign(rows(B, H, M, E)), Foreign(qkv()[2]))  # type: ignore[arg-type]
    assert again.shape == (B, H, N, E)
    with pytest.raises(BufferError, match="copy it there"):
        out.__dlpack__(dl_device=(1, 0))
    with pytest.raises(TypeError, match="its numpy"):
        np.asarray(out)
    assert repr(out) == f"DeviceArray(float32 {(B, H, N, E)} on cuda:0)"


def test_rotate() -> None:
    x, rope = rows(B, H, N, D), relpos.RoPE()
    expected = relpos.rotate(x, rope, start=3)
    there = Foreign(x)
    assert_near(relpos.rotate(there, rope, start=3).numpy(), expected)
    relpos.rotate(there, rope, start=3, out=there)
    assert_near(there.numpy(), expected)
    narrow = relpos.rotate(Foreign(x, "bfloat16"), rope, start=3)
    assert narrow.dtype == "bfloat16"
    np.testing.assert_allclose(narrow.numpy(), expected, rtol=2**-7, atol=2**-7)


def test_maps() -> None:
    table, options = rows(T, D), {"parts": "all", "causal": True, "lengths": [N, 5]}
    options["key_lengths"] = [M, 9]
    expected = relpos.attention_maps(*qkv(), position=relpos.Shaw(table), **options)
    there = [Foreign(x) for x in qkv()]
    found = relpos.attention_maps(*there, position=relpos.Shaw(Foreign(table)), **options)
    for ours, theirs in zip(found.probabilities, expected.probabilities, strict=True):
        assert_near(ours, theirs)
    for ours, theirs in zip(found.parts["key_table"], expected.parts["key_table"], strict=True):
        assert_near(ours, theirs)
    _, maps = relpos.attention(*there, return_maps="probabilities")
    assert_near(maps.probabilities, relpos.attention_maps(*qkv()).probabilities)


# ---- streams -------------------------------------------------------------------------------------


def test_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without a current stream is met on the default one, 1 to DLPack; another one on
    its own, and all arrays of the call with it."""
    there = [Foreign(x) for x in qkv()]
    waits: list[str] = []
    monkeypatch.setattr("relpos.device_array._core.device_wait", waits.append)
    out: Any = relpos.attention(*there)
    assert [x.streams for x in there] == [[1]] * 3
    assert out.stream == 0
    assert waits == ["cuda:0"]  # for nobody knows on which stream their memory is used again
    monkeypatch.setattr(
        "relpos.device_array.current_stream",
        lambda x, device: (77, stream) if x is there[0] else (78, None),
    )
    stream = object()
    placements: list[Any] = []
    monkeypatch.setattr(
        sys.modules["relpos.attention"],
        "_core",
        type(
            "Core",
            (),
            {
                "attention_forward": staticmethod(lambda *given: placements.append(given[-1][-1])),
                "DeviceError": _core.DeviceError,
            },
        ),
    )
    out = relpos.attention(*there)
    assert [x.streams for x in there] == [[1, 77]] * 3
    assert out.stream == placements[0][1] == 77
    assert out.stream_owner is stream  # a later call may work on it
    assert waits == ["cuda:0"] * 2  # for the memory of k and v, which is used again on 78
    out.__dlpack__(stream=77)
    out.__dlpack__(stream=-1)
    assert waits == ["cuda:0"] * 2
    out.__dlpack__(stream=1)
    out.__dlpack__(stream=None)
    out.__dlpack__(stream=2)  # another stream in every thread
    assert waits == ["cuda:0"] * 5


def test_parameters_are_read_behind_what_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, by a copy that is in order with the default stream, not with the library's."""
    monkeypatch.setattr("relpos.device_array.current_stream", lambda x, device: (77, object()))
    there = [Foreign(x) for x in qkv()]
    for scheme, shape in ((relpos.T5Bias, (8, H)), (relpos.ALiBi, (H,))):
        table = Foreign(rows(*shape))
        relpos.attention(*there, position=scheme(table))  # type: ignore[operator]
        assert table.streams[-1] == 1


def test_nothing_is_allocated_beside_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that only the call has is freed at its end, which waits for the GPU, and a stream that
    is being captured takes no allocation."""
    there = [Foreign(x) for x in (*qkv(), *tables_for([(T, D), (T, E)]))]
    out: Any = Foreign(np.zeros((B, H, N, E), np.float32))
    asked: list[int] = []
    allocate = _core.device_memory
    monkeypatch.setattr(
        "relpos.device_array._core.device_memory",
        lambda device, count: (asked.append(count), allocate(device, count))[1],
    )
    for options in OPTIONS.values():
        relpos.attention(*there[:3], position=relpos.Shaw(*there[3:]), out=out, **options)
    assert asked == []
    relpos.attention(*there[:3])
    assert asked == [B * H * N * E * 4]


def test_strides_that_run_backwards_are_refused_by_name() -> None:
    q, k, v = (Foreign(x) for x in qkv())
    out = Foreign(np.zeros((B, H, N, E), np.float32)).part(lambda x: x[:, :, ::-1])
    for call in (
        lambda: relpos.attention(q, k, v, out=out),
        lambda: relpos.rotate(q, relpos.RoPE(), out=Foreign(qkv()[0]).part(lambda x: x[:, ::-1])),
    ):
        with pytest.raises(ValueError, match="^out: strides must be whole elements forward, got "):
            call()


def test_whose_memory_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array of another stream than the call's, tables and `out` among them."""
    q, k, v, table, turned = (Foreign(x) for x in (*qkv(), np.zeros((T, D), np.float32), qkv()[0]))
    waits: list[str] = []
    monkeypatch.setattr("relpos.device_array._core.device_wait", waits.append)
    known = [q, k, v]
    monkeypatch.setattr(
        "relpos.device_array.current_stream",
        lambda x, device: (0, None) if any(x is one for one in known) else None,
    )
    relpos.attention(q, k, v)
    relpos.rotate(q, relpos.RoPE())
    assert waits == []
    relpos.attention(q, k, v, position=relpos.Shaw(table))
    assert waits == ["cuda:0"]
    relpos.rotate(q, relpos.RoPE(), out=turned)
    assert waits == ["cuda:0"] * 2


def test_torch_is_asked_on_the_device_of_its_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives what lies on its current device alone."""
    at: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            at.append(self.index)

        def __exit__(self, *_: object) -> None:
            at.append(-1)

    class Cuda:
        device = Device

        @staticmethod
        def current_stream(index: int) -> Any:
            return type("Stream", (), {"cuda_stream": 0})

    monkeypatch.setitem(sys.modules, "torch", type("Torch", (), {"cuda": Cuda}))
    monkeypatch.setattr("relpos.device_array._library", lambda x: "torch")
    there = [Foreign(x) for x in qkv()]
    relpos.attention(*there)
    assert at == [0, -1] * 3


def test_a_stream_that_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("RELPOS_TEST_CUDA") == "gpu":
        pytest.skip("the emulator is told which stream is being captured")
    there = [Foreign(x) for x in qkv()]
    out: Any = Foreign(np.zeros((B, H, N, E), np.float32))
    monkeypatch.setenv("EMU_CAPTURES", "77")
    monkeypatch.setattr("relpos.device_array.current_stream", lambda x, device: (77, None))
    with pytest.raises(_core.DeviceError, match="is being captured in a CUDA graph"):
        relpos.attention(*there, out=out)
    monkeypatch.setattr("relpos.device_array.current_stream", lambda x, device: (78, None))
    relpos.attention(*there, out=out)


# ---- life and death ------------------------------------------------------------------------------


@pytest.fixture
def freed(emulated_device: Path) -> Iterator[Callable[[], int]]:
    """How much memory the device has free."""
    if emulated_device == Path("gpu"):
        pytest.skip("a GPU's memory is counted in large pieces")

    def free() -> int:
        gc.collect()
        return _core.devices()[1][3]

    yield free


def test_arrays_live_as_long_as_they_are_needed(freed: Callable[[], int]) -> None:
    there = [Foreign(x) for x in qkv()]
    table, dout = Foreign(rows(T, D)), Foreign(rows(B, H, N, E))
    for version in (0, 1):
        for x in there:
            x.version = version
        relpos.attention(*there, position=relpos.Shaw(table))
        assert [x.lent for x in (*there, table)] == [0] * 4
        out, ctx = relpos.attention_forward(*there, position=relpos.Shaw(table))
        assert [x.lent for x in (*there, table)] == [1] * 4
        before = freed()
        gradients = relpos.attention_backward(ctx, dout)  # type: ignore[arg-type]
        assert freed() < before and dout.lent == 0
        del gradients
        assert freed() == before  # neither workspaces nor gradients are left
        del ctx, out
        gc.collect()
        assert [x.lent for x in (*there, table)] == [0] * 4


def test_a_result_outlives_its_name(freed: Callable[[], int]) -> None:
    there = [Foreign(x) for x in qkv()]
    before = freed()
    out: Any = relpos.attention(*there)
    expected, capsule = out.numpy(), out.__dlpack__(max_version=(1, 0))
    owner, _, _, address, *_ = _core.dlpack_take(capsule)
    del out
    assert freed() < before
    again = np.empty_like(expected)
    _core.device_read("cuda:0", address, again)
    np.testing.assert_array_equal(again, expected)
    del owner
    assert freed() == before
    kept = relpos.attention(*there).__dlpack__()  # type: ignore[attr-defined]
    assert freed() < before
    del kept  # a capsule that nobody takes
    assert freed() == before


def test_nothing_leaks(freed: Callable[[], int]) -> None:
    there = [Foreign(x) for x in (*qkv(), rows(T, D), rows(B, H, N, E))]

    def calls(times: int) -> None:
        for _ in range(times):
            _, ctx = relpos.attention_forward(*there[:3], position=relpos.Shaw(there[3]))
            relpos.attention_backward(ctx, there[4])  # type: ignore[arg-type]
            for error, arrays in (
                (ValueError, (there[0], there[1], there[4])),
                (TypeError, (there[0], rows(B, H, M, D), there[2])),
            ):
                with pytest.raises(error):
                    relpos.attention(*arrays)

    calls(3)
    gc.collect()
    before, counts = freed(), [sys.getrefcount(x) for x in there]
    calls(20)
    assert freed() == before
    assert [sys.getrefcount(x) for x in there] == counts
    assert [x.lent for x in there] == [0] * 5


@pytest.mark.alone
def test_many_masks_take_no_more_room_than_they_may() -> None:
    """What the host gives is kept on the GPU in 256 MiB: of masks of 64 MiB four."""
    batch, n, count = 64, 1024, 8
    q, k, v = (Foreign(rows(batch, 1, n, 1, seed=i)) for i in range(3))
    size = batch * n * n
    whole = np.ones(size + 64 * count, bool)
    masks = [whole[64 * i :][:size].reshape(batch, 1, n, n) for i in range(count)]

    def used_after(sequences: int, count: int) -> int:
        there = [x.part(lambda x: x[:sequences]) for x in (q, k, v)]
        for mask in masks[:count]:
            given = {"mask": mask[:sequences], "lengths": [1] * sequences}  # a pair of each
            out: Any = relpos.attention(*there, **given)
            np.testing.assert_array_equal(out.numpy()[:, 0, 0], v.numpy()[:sequences, 0, 0])
            del out
        gc.collect()
        _, _, total, free, _ = _core.devices()[1]
        return total - free

    before = used_after(batch, 1)
    for sequences in (batch, batch // 4, batch):
        assert used_after(sequences, count) - before <= 256 << 20


# ---- what is refused -----------------------------------------------------------------------------


def foreign_qkv() -> dict[str, Any]:
    return dict(zip("qkv", map(Foreign, qkv()), strict=True))


class LessThanAxes(Foreign):
    """That counts its axes wrongly."""

    def _tensor(self, kept: list[Any]) -> Any:
        tensor = super()._tensor(kept)
        tensor.axes = -1
        return tensor


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "k on the host": (
        lambda: {"k": qkv()[1]},
        TypeError,
        "k: lies on the host, q on cuda:0; move one of them to the other",
    ),
    "q on the host": (
        lambda: {"q": qkv()[0]},
        TypeError,
        "k: lies on cuda:0, q on the host; move one of them to the other",
    ),
    "out on the host": (
        lambda: {"out": np.empty((B, H, N, E), np.float32)},
        TypeError,
        "out: lies on the host, q on cuda:0; move one of them to the other",
    ),
    "another GPU": (
        lambda: {"v": Foreign(qkv()[2], index=1)},
        TypeError,
        "v: lies on cuda:1, q on cuda:0; move one of them to the other",
    ),
    "a table on the host": (
        lambda: {"position": relpos.Shaw(rows(T, D))},
        TypeError,
        "key_table: lies on the host, q on cuda:0; move one of them to the other",
    ),
    "types": (
        lambda: {"k": Foreign(qkv()[1], "bfloat16")},
        TypeError,
        f"k: expected float32 (B={B}, H={H} or a divisor, M, D={D}), got bfloat16 "
        f"({B}, {H}, {M}, {D}); convert k first",
    ),
    "a table of another type": (
        lambda: {"position": relpos.Shaw(Foreign(rows(T, D), "bfloat16"))},
        TypeError,
        f"key_table: expected float32 (T, d) or (H, T, d), got bfloat16 ({T}, {D}); "
        "convert key_table first",
    ),
    "a table of another width": (
        lambda: {"position": relpos.Shaw(Foreign(rows(T, D + 1)))},
        ValueError,
        f"key_table: expected float32 (T, D={D}), got float32 ({T}, {D + 1})",
    ),
    "integers": (
        lambda: {"q": Foreign(np.zeros((B, H, N, D), np.int64), "int64")},
        TypeError,
        f"q: int64 ({B}, {H}, {N}, {D}) on cuda:0; of what lies on a GPU relpos takes float32 and "
        "bfloat16, all other arguments stay on the host",
    ),
    "shape": (
        lambda: {"v": Foreign(rows(B, H, M + 1, E))},
        ValueError,
        f"v: expected float32 (B={B}, H={H}, M={M}, Dv), got float32 ({B}, {H}, {M + 1}, {E})",
    ),
    "order": (
        lambda: {"q": Foreign(rows(B, H, D, N)).part(lambda x: x.swapaxes(2, 3))},
        ValueError,
        "q: the last axis must be contiguous, got strides (608, 304, 1, 19) in elements; "
        "make q contiguous first",
    ),
    "read-only": (
        lambda: {"out": Foreign(rows(B, H, N, E), read_only=True)},
        ValueError,
        "out: the array is read-only; give a writable one",
    ),
    "out overlaps": (
        lambda: overlapping(),
        ValueError,
        "attention: out shares memory with v; give it an array of its own",
    ),
    "lengths": (
        lambda: {"lengths": Foreign(np.array([N, 3]), "int64")},
        TypeError,
        "lengths: lies on cuda:0; relpos reads it on the host, copy it there",
    ),
    "mask": (
        lambda: {"mask": Foreign(rows(N, M))},
        TypeError,
        "mask: lies on cuda:0; relpos reads it on the host, copy it there",
    ),
    "DLPack 2": (
        lambda: {"q": Foreign(qkv()[0], major=2)},
        TypeError,
        "q: no array to read without a copy: DLPack: version 2.0, expected 1",
    ),
    "axes": (
        lambda: {"q": LessThanAxes(qkv()[0])},
        TypeError,
        "q: no array to read without a copy: DLPack: expected 0 axes or more, got -1",
    ),
    "no such GPU": (
        lambda: {name: Foreign(x, index=9) for name, x in zip("qkv", qkv(), strict=True)},
        relpos.DeviceError,
        "q: lies on cuda:9, where relpos cannot compute: there is no cuda:9, only cpu, cuda:0",
    ),
}


def overlapping() -> dict[str, Any]:
    whole = Foreign(rows(2, B, H, M, E))
    first = whole.part(lambda x: x[0])
    return {"v": first, "out": first.part(lambda x: x[:, :, 2 : 2 + N])}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, error, sentence = REFUSED[name]
    with pytest.raises(error) as caught:
        relpos.attention(**(foreign_qkv() | make()))
    assert str(caught.value) == sentence


def test_backward_refuses_another_place() -> None:
    _, ctx = relpos.attention_forward(**foreign_qkv())
    with pytest.raises(TypeError, match="^dout: lies on the host, the call on cuda:0; move"):
        relpos.attention_backward(ctx, rows(B, H, N, E))
    _, ctx = relpos.attention_forward(*qkv())
    with pytest.raises(TypeError, match="^dout: lies on cuda:0, the call on the host; move"):
        relpos.attention_backward(ctx, Foreign(rows(B, H, N, E)))  # type: ignore[arg-type]


def test_without_the_library(tmp_path: Path) -> None:
    """In a process of its own: a library is looked for once."""
    code = """
import relpos
from relpos import _core

class There:
    shape, dtype = (1, 1, 2, 4), "float32"
    def __dlpack_device__(self):
        return 2, 0
    def __dlpack__(self, **given):
        return _core.dlpack_give(self, 2, 0, 64, "float32", self.shape, (8, 8, 4, 1), True, True)

x = There()
for call in (lambda: relpos.attention(x, x, x), lambda: relpos.rotate(x, relpos.RoPE())):
    try:
        call()
    except relpos.DeviceError as error:
        print(error)
"""
    nowhere = str(tmp_path / "librelpos_cuda.so")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RELPOS_CUDA_LIBRARY": nowhere, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    for line, name in zip(done.stdout.splitlines(), "qx", strict=True):
        assert line.startswith(f"{name}: lies on cuda:0, where relpos cannot compute: ")
        assert nowhere in line


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError, match="^cuda:0 has no "):
        _core.device_memory("cuda:0", 1 << 60)
    there = foreign_qkv()

    def none_left(device: str, count: int) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr("relpos.device_array._core.device_memory", none_left)
    with pytest.raises(MemoryError, match="^none left$"):
        relpos.attention(**there)
