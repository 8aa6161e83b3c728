# SPDX-License-Identifier: Apache-2.0
"""relpos.torch on a GPU, as far as that goes without one.

What it does for tensors on a GPU is done here for tensors of the CPU (`beside_the_host`): the same
code, over the tensors' own memory, in torch's allocations, with the CPU's operations. And with the
emulated device (`on_the_emulator`): there a tensor and its array are copies of each other.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos import _core
from relpos.position import arrays

torch = pytest.importorskip("torch", reason="torch is not installed")
import relpos.torch  # noqa: E402
from test_torch import SCHEMES, B, D, H, N, qkv, tensor  # noqa: E402

Own = relpos.torch.tensors.TensorArray
OPTIONS = {"causal": False, "layout": "bhnd", "scale": None, "softcap": 0.0, "window": None}
OPTIONS |= {"dropout": 0.0, "precision": "f32", "mask": None}


class Mirror(Own):
    """A tensor's array on the emulated device: a copy, and its tensor a copy of that."""

    __slots__ = ("on_host",)

    def __init__(self, on_host: Any) -> None:
        super().__init__(on_host)
        self.on_host = on_host
        self.address, memory = _core.device_memory("cuda:0", max(self._bytes.nbytes, 1))
        self.device, self.owner = "cuda:0", memory
        if self.size > 0:
            _core.device_write("cuda:0", self.address, self._bytes)

    @property
    def _bytes(self) -> Any:
        """The memory from the first element to the last."""
        flat = torch.as_strided(self.on_host, (self.reach,), (1,))
        return flat.view(torch.uint8).numpy() if self.size > 0 else np.empty(0, np.uint8)

    @property
    def tensor(self) -> Any:
        if self.size > 0:
            back = np.empty_like(self._bytes)
            _core.device_read("cuda:0", self.address, back)
            self._bytes[:] = back
        return self.on_host

    @tensor.setter
    def tensor(self, given: Any) -> None:
        pass

    def allocate(self, count: int) -> tuple[int, Any]:
        return _core.device_memory("cuda:0", count)

    def empty(self, shape: Any, dtype: str) -> Any:
        return Mirror(torch.empty(shape, dtype=getattr(torch, dtype)))


@pytest.fixture
def beside_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (relpos.torch.tensors, relpos.torch.arguments):
        monkeypatch.setattr(module, "is_on_gpu", lambda x: True)


@pytest.fixture
def on_the_emulator(emulated_device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (relpos.torch.tensors, relpos.torch.arguments):
        monkeypatch.setattr(module, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(relpos.torch.tensors, "TensorArray", Mirror)
    monkeypatch.setattr(arrays, "may_be_narrow", lambda table: True)


def leaves(shapes: list[tuple[int, ...]]) -> list[Any]:
    return [*qkv(), *(tensor(*shape, seed=9 + i) for i, shape in enumerate(shapes))]


def run(make: Any, given: list[Any], dtype: Any = None, **options: Any) -> list[Any]:
    """out and the gradients of all that is given."""
    for x in given:
        x.grad = None
    q, k, v = (x.to(dtype) for x in given[:3])
    out = relpos.torch.attention(q, k, v, position=make(*given[3:]), causal=True, **options)
    out.backward(tensor(*out.shape, seed=4, dtype=out.dtype, grad=False).to(out.device))
    return [out.detach(), *(x.grad for x in given)]


def assert_near(found: list[Any], expected: list[Any]) -> None:
    """Sums of less than a hundred products of numbers of about 1, rounded to 24 bits."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=100 * 2.0**-24 * 4)


@pytest.mark.parametrize("place", ["beside_the_host", "on_the_emulator"])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name: str, place: str, request: pytest.FixtureRequest) -> None:
    make, shapes = SCHEMES[name]
    given = leaves(shapes)
    expected = run(make, given)
    request.getfixturevalue(place)
    assert_near(run(make, given), expected)


@pytest.mark.parametrize("place", ["beside_the_host", "on_the_emulator"])
@pytest.mark.parametrize("scheme", ["t5", "alibi", "relative_key"])
def test_one_table_of_two_schemes(scheme: str, place: str, request: pytest.FixtureRequest) -> None:
    """Under one name: the sum of what both of them make of it."""
    make, shape = {
        "t5": (lambda a: (relpos.T5Bias(a, max_distance=6), relpos.T5Bias(a)), (8, H)),
        "alibi": (lambda a: (relpos.ALiBi(a), relpos.ALiBi(a)), (H,)),
        "relative_key": (lambda a: (relpos.RelativeKey(a), relpos.RelativeKey(a)), (2 * N + 1, D)),
    }[scheme]
    given = leaves([shape])
    expected = run(make, given)
    request.getfixturevalue(place)
    assert_near(run(make, given), expected)


@pytest.mark.parametrize("place", ["beside_the_host", "on_the_emulator"])
def test_every_option(place: str, request: pytest.FixtureRequest) -> None:
    options: dict[str, Any] = {
        "mask": torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(1)) < 0.8,
        "lengths": torch.tensor([N, 3]),
        "window": (3, None),
        "softcap": 1.5,
        "dropout": 0.25,
        "seed": 3,
    }
    make, given = SCHEMES["shaw"][0], leaves([(5, D), (H, 3, D)])
    expected = run(make, given, **options)
    request.getfixturevalue(place)
    assert_near(run(make, given, **options), expected)


@pytest.mark.usefixtures("beside_the_host")
def test_the_core_sees_the_tensors_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(_core, name)

        def attention_forward(self, q: Any, k: Any, v: Any, out: Any, lse: Any, call: Any) -> Any:
            told.extend(x[0] for x in (q, k, v, *(term[2] for term in call[8]), out))
            return _core.attention_forward(q, k, v, out, lse, call)

    monkeypatch.setattr(sys.modules["relpos.attention"], "_core", Spy())
    q, k, v = qkv()
    table = tensor(5, D)
    out = relpos.torch.attention(q, k, v, position=relpos.Shaw(table))
    assert told == [x.data_ptr() for x in (q, k, v, table, out)]
    told.clear()
    swapped = [x.detach().transpose(1, 2) for x in (q, k, v)]
    relpos.torch.attention(*swapped, position=relpos.Shaw(table), layout="bnhd")
    assert told[:4] == [x.data_ptr() for x in (q, k, v, table)]


@pytest.mark.usefixtures("beside_the_host")
def test_what_lies_beside_a_tensor_is_torchs() -> None:
    x = Own(tensor(B, N, H, D, grad=False).transpose(1, 2))
    assert (x.shape, x.strides, x.dtype) == ((B, H, N, D), (N * H * D, D, H * D, 1), "float32")
    address, memory = x.allocate(100)
    assert address == memory.data_ptr() and memory.numel() == 100
    made = x.empty((2, 3), "bfloat16")
    assert made.tensor.dtype == torch.bfloat16 and made.shape == (2, 3)
    zeros = x.zeros_like()
    assert zeros.strides == x.strides and not zeros.tensor.any()


@pytest.mark.usefixtures("on_the_emulator")
@pytest.mark.parametrize("name", ["shaw", "xl", "t5", "deberta", "rope, alibi", "rat-sql"])
def test_bfloat16(name: str) -> None:
    """Results are bfloat16, gradients of tables as the tables. On the way to a gradient numbers are
    rounded at most eight times to half a unit in 8 bits (operands, tables, probabilities, results);
    twice that for what cancels in the softmax's gradient."""
    make, shapes = SCHEMES[name]
    given = leaves(shapes)
    for x in given:
        x.data = x.data.bfloat16().float()
    exact = run(make, given)
    found = run(make, given, torch.bfloat16)
    assert found[0].dtype == torch.bfloat16
    narrow = [x.detach().bfloat16().requires_grad_() for x in given]
    for ours, theirs in zip([*run(make, narrow), *found], [*exact, *exact], strict=True):
        off = (ours.float() - theirs).norm() / theirs.norm()
        assert off < 2 * 8 * 2.0**-9
    assert all(x.grad.dtype == torch.bfloat16 for x in narrow)


@pytest.mark.usefixtures("on_the_emulator")
def test_gradients_are_of_the_tables_types() -> None:
    """As torch.compile is told (`test_shapes_for_the_compiler`)."""
    q, k, v = (x.detach().bfloat16() for x in qkv())
    for dtype in (torch.float32, torch.bfloat16):
        tables = [tensor(5, D, grad=False).to(dtype)]
        spec = relpos.torch.calls.Kept(relpos.Shaw(*tables), OPTIONS)
        rest = (tables, 6 * [None], [], [], 0, spec.name)
        out, lse = torch.ops.relpos.attention(q, k, v, *rest)
        found = torch.ops.relpos.attention_backward(out, q, k, v, out, lse, *rest)
        assert [x.dtype for x in (out, lse)] == [torch.bfloat16, torch.float32]
        assert [x.dtype for x in found] == [*3 * [torch.bfloat16], dtype]


@pytest.mark.usefixtures("on_the_emulator")
def test_precision() -> None:
    q, k, v = (x.detach() for x in qkv())
    exact, near = (relpos.torch.attention(q, k, v, precision=p) for p in ("f32", "bf16"))
    assert near.dtype == torch.float32
    assert 0 < (near - exact).norm() / exact.norm() < 4 * 2.0**-8


on_a_gpu = pytest.mark.skipif(
    os.environ.get("RELPOS_TEST_CUDA") != "gpu" or not torch.cuda.is_available(),
    reason="needs a GPU that torch knows, and RELPOS_TEST_CUDA=gpu",
)


@on_a_gpu
@pytest.mark.parametrize("name", SCHEMES)
def test_tensors_of_a_gpu(name: str) -> None:
    make, shapes = SCHEMES[name]
    given = leaves(shapes)
    expected = run(make, given)
    there = [x.detach().cuda().requires_grad_() for x in given]
    with torch.cuda.stream(torch.cuda.Stream()):  # and not on the default one
        found = [x.cpu() for x in run(make, there)]
    assert_near(found, expected)


@on_a_gpu
def test_dlpack_of_a_gpu() -> None:
    q, k, v = (x.detach().cuda() for x in qkv())
    table = tensor(5, D, grad=False).cuda()
    out = relpos.attention(q, k, v, position=relpos.Shaw(table))
    expected = relpos.torch.attention(q, k, v, position=relpos.Shaw(table))
    torch.testing.assert_close(torch.from_dlpack(out), expected, rtol=0, atol=0)


@on_a_gpu
def test_compiled_on_a_gpu() -> None:
    module = relpos.torch.Attention(relpos.Shaw(torch.nn.Parameter(tensor(5, D, grad=False))))
    module.cuda()
    q, k, v = (x.detach().cuda() for x in qkv())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), module(q, k, v), rtol=0, atol=0)


def test_shapes_for_the_compiler() -> None:
    """What torch.compile is told of a call's results: device and types."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = relpos.torch.Attention(relpos.Shaw(tensor(5, D)))
    for dtype in (torch.float32, torch.bfloat16):
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(B, H, N, D, device="cuda", dtype=dtype)
            table = torch.empty(5, D, device="cuda")
            rest = ([table], 6 * [None], [], [], 0, module._kept[True, "f32"].name)
            out, lse = torch.ops.relpos.attention(x, x, x, *rest)
            gradients = torch.ops.relpos.attention_backward(out, x, x, x, out, lse, *rest)
        assert (out.shape, out.dtype, out.device.type) == (x.shape, dtype, "cuda")
        assert (lse.shape, lse.dtype, lse.device.type) == ((B, H, N), torch.float32, "cuda")
        assert [(g.shape, g.dtype) for g in gradients] == [
            *3 * [(x.shape, dtype)],
            (table.shape, torch.float32),
        ]


@pytest.mark.usefixtures("beside_the_host")
def test_compiled() -> None:
    module = relpos.torch.Attention(relpos.Shaw(torch.nn.Parameter(tensor(5, D, grad=False))))
    q, k, v = (x.detach() for x in qkv())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), module(q, k, v), rtol=0, atol=0)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return torch.device("cuda:1")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda q, k: (q, k.as_subclass(Elsewhere)),
            "k: lies on cuda:1, q on cpu; use k.to(q.device)",
        ),
        (
            lambda q, k: (q.half().as_subclass(Elsewhere), k),
            "q: expected float32 or bfloat16, got float16; use q.float()",
        ),
        (
            lambda q, k: (q.as_subclass(Elsewhere), k.bfloat16().as_subclass(Elsewhere)),
            "k: expected float32 as q, got bfloat16; use k.to(q.dtype)",
        ),
    ],
)
def test_refused(spoil: Any, sentence: str) -> None:
    q, k, v = (x.detach() for x in qkv())
    q, k = spoil(q, k)
    with pytest.raises(TypeError) as caught:
        relpos.torch.attention(q, k, v)
    assert str(caught.value) == sentence


@pytest.mark.usefixtures("on_the_emulator")
def test_nothing_is_left_on_the_device() -> None:
    import gc

    if os.environ.get("RELPOS_TEST_CUDA") == "gpu":
        pytest.skip("a GPU's memory is counted in large pieces")

    def free() -> int:
        gc.collect()
        return _core.devices()[1][3]

    make, given = SCHEMES["xl"][0], leaves(SCHEMES["xl"][1])
    run(make, given)
    before = free()
    for _ in range(5):
        run(make, given)
    assert free() == before
