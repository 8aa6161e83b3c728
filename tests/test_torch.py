# SPDX-License-Identifier: Apache-2.0
"""relpos.torch: gradients by autograd, no copies, one operation to torch.compile.

gradcheck runs in double, through libcore_f64 (double_core.py) and so through the kernels themselves,
and on the stand-in core of stand_in.py, where what fails is this module or the schemes above the
core. The core's float32 is compared with torch's autograd over the formula.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import io
import itertools
import math
import subprocess
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
import scheme_examples
from capi import Core
from double_core import double_core
from stand_in import stand_in
from test_readme import BLOCKS, IN_TORCH, LEFT_OUT

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import relpos.torch  # noqa: E402

PACKAGE = Path(relpos.__file__).parent.parent
B, H, N, D = 2, 2, 4, 2
LABELS = np.random.default_rng(0).integers(-1, 3, (B, 1, N, N)).astype(np.int8)


def tensor(*shape: int, seed: int = 0, dtype: Any = None, grad: bool = True) -> Any:
    generator = torch.Generator().manual_seed(seed + 100 * sum(shape))
    drawn = (
        torch.float64 if dtype == torch.float64 else torch.float32
    )  # torch draws others its own way
    x = 0.7 * torch.randn(*shape, generator=generator, dtype=drawn)
    return x.to(dtype or drawn).requires_grad_(grad)


def qkv(dtype: Any = None) -> list[Any]:
    return [tensor(B, H, N, D, seed=i, dtype=dtype) for i in range(3)]


SCHEMES: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "none": (lambda: None, []),
    "shaw": (lambda a, b: relpos.Shaw(a, b), [(5, D), (H, 3, D)]),
    "tied": (lambda a: relpos.Shaw(a, a), [(5, D)]),
    "xl": (lambda w, u, v: relpos.TransformerXL(w, u, v), [(H * D, 6), (H, D), (H, D)]),
    "t5": (lambda a: relpos.T5Bias(a, max_distance=6), [(8, H)]),
    "deberta": (
        lambda a, b: relpos.DeBERTa(a, b, buckets=4, max_position=6),
        [(H, 8, D), (H, 8, D)],
    ),
    "rope, alibi": (lambda s: (relpos.RoPE(), relpos.ALiBi(s)), [(H,)]),
    "rat-sql": (
        lambda a, b, c: (relpos.Shaw(a), relpos.ShawGraph(b, c, labels=LABELS)),
        [(5, D), (3, D), (3, D)],
    ),
    "plane": (
        lambda a, b: relpos.Plane(relpos.Shaw(a), relpos.Shaw(b), width=3),
        [(3, D), (H, 5, D)],
    ),
    "relative_key_query": (lambda a: relpos.RelativeKeyQuery(a), [(2 * N + 1, D)]),
}


@pytest.fixture(params=["stand-in", "libcore_f64"])
def double(
    libraries: dict[str, Path], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core in double in the place of the binding."""
    if request.param == "stand-in":
        stand_in(monkeypatch)
    else:
        double_core(monkeypatch, Core(libraries["f64"]))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", SCHEMES)
def test_gradcheck(name: str) -> None:
    make, shapes = SCHEMES[name]
    tables = [tensor(*shape, seed=9 + i, dtype=torch.float64) for i, shape in enumerate(shapes)]

    def call(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        return relpos.torch.attention(q, k, v, position=make(*tables), causal=True)

    assert torch.autograd.gradcheck(call, (*qkv(torch.float64), *tables))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradcheck_of_the_options(dropout: float) -> None:
    mask = torch.rand(B, 1, N, N) < 0.8

    def call(q: Any, k: Any, v: Any) -> Any:
        return relpos.torch.attention(
            q,
            k,
            v,
            mask=mask,
            window=(3, None),
            softcap=1.5,
            lengths=[N, 3],
            dropout=dropout,
            seed=3,
        )

    assert torch.autograd.gradcheck(call, qkv(torch.float64))


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes for which Transformer-XL's terms have been made."""
    shapes, lower = [], relpos.TransformerXL.lower

    def counted(scheme: Any, shape: Any) -> Any:
        shapes.append(shape)
        return lower(scheme, shape)

    monkeypatch.setattr(relpos.TransformerXL, "lower", counted)
    return shapes


def test_backward_takes_the_terms_that_forward_made(lowerings: list[Any]) -> None:
    """Of the same parameters and shape, and of no others: Transformer-XL's are a product."""
    weight = torch.nn.Parameter(tensor(H * D, 6, seed=1, grad=False))
    attend = relpos.torch.Attention(relpos.TransformerXL(weight))

    def fresh(x: Any) -> Any:
        own = weight.detach().clone().requires_grad_()
        relpos.torch.attention(x, x, x, position=relpos.TransformerXL(own)).sum().backward()
        return own.grad

    short, long = tensor(B, H, N, D, grad=False), tensor(B, H, 3 * N, D, seed=1, grad=False)
    expected = fresh(short), fresh(long)
    lowerings.clear()
    attend(short, short, short).sum().backward()
    assert len(lowerings) == 1
    torch.testing.assert_close(weight.grad, expected[0], rtol=0, atol=0)
    weight.grad = None
    outs = [attend(x, x, x).sum() for x in (short, long)]
    outs[0].backward()  # the last forward call was of another shape
    torch.testing.assert_close(weight.grad, expected[0], rtol=0, atol=0)
    weight.grad = None
    outs[1].backward()
    torch.testing.assert_close(weight.grad, expected[1], rtol=0, atol=0)
    with torch.no_grad():
        weight.mul_(2)
    weight.grad = None
    attend(short, short, short).sum().backward()
    torch.testing.assert_close(weight.grad, fresh(short), rtol=0, atol=0)


def test_backward_on_another_stream_makes_its_terms_anew(
    lowerings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that forward made may not be there yet on this one."""
    weight = torch.nn.Parameter(tensor(H * D, 6, seed=1, grad=False))
    attend = relpos.torch.Attention(relpos.TransformerXL(weight))
    x, found = tensor(B, H, N, D, grad=False), []
    for stream in (1, 2):
        monkeypatch.setattr(relpos.torch.operation, "stream_of", lambda _: 1)
        lowerings.clear()
        weight.grad = None
        out = attend(x, x, x).sum()
        monkeypatch.setattr(relpos.torch.operation, "stream_of", lambda _, stream=stream: stream)
        out.backward()
        assert len(lowerings) == stream
        found.append(weight.grad)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def formula(q: Any, k: Any, v: Any, key: Any, value: Any, clip: int) -> Any:
    """Causal attention with Shaw's relations, by torch."""
    n = torch.arange(q.shape[2])
    r = (n[None] - n[:, None]).clamp(-clip, clip) + clip
    s = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, key[r])) / math.sqrt(q.shape[-1])
    p = torch.softmax(s.masked_fill(n[None] > n[:, None], -math.inf), -1)
    return p @ v + torch.einsum("bhij,ijd->bhid", p, value[r])


def test_against_autograd_over_the_formula() -> None:
    def inputs() -> list[Any]:
        own = [tensor(2, 4, 70, 32, seed=i) for i in range(3)]
        return own + [tensor(9, 32, seed=i) for i in range(2)]

    ours, theirs = inputs(), inputs()
    dout = tensor(2, 4, 70, 32, seed=8, grad=False)
    out = relpos.torch.attention(*ours[:3], position=relpos.Shaw(*ours[3:]), causal=True)
    expected = formula(*theirs, 4)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    out.backward(dout)
    expected.backward(dout)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_gradcheck_of_shared_keys(layout: str) -> None:
    tables = [tensor(4, 5, D, seed=i, dtype=torch.float64) for i in (7, 8)]
    shapes = [(B, N, 4, D) if layout == "bnhd" else (B, 4, N, D)]
    shapes += 2 * [(B, N, 2, D) if layout == "bnhd" else (B, 2, N, D)]

    def call(q: Any, k: Any, v: Any, *tables: Any) -> Any:
        position = (relpos.Shaw(*tables), relpos.ALiBi(torch.ones(4, dtype=torch.float64)))
        return relpos.torch.attention(q, k, v, position=position, layout=layout)

    given = [tensor(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(call, (*given, *tables))


@pytest.mark.parametrize("heads", [1, 3])
def test_shared_keys_are_those_of_torch(heads: int) -> None:
    q, dout = tensor(2, 6, 70, 16), tensor(2, 6, 70, 16, seed=1, grad=False)
    k, v = tensor(2, heads, 70, 16, seed=2), tensor(2, heads, 70, 16, seed=3)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    ours = relpos.torch.attention(q, k, v, causal=True)
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-6)
    found, expected = (torch.autograd.grad(x, (q, k, v), dout) for x in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=2e-5)


def test_it_is_what_numpy_gets() -> None:
    q, k, v = qkv()
    tables = [tensor(5, D, seed=i) for i in range(2)]
    out = relpos.torch.attention(q, k, v, position=relpos.Shaw(*tables), lengths=[N, 4])
    out.sum().backward()  # an expanded gradient, of strides 0
    arrays = [x.detach().numpy() for x in (q, k, v)]
    position = relpos.Shaw(*(x.detach().numpy() for x in tables))
    expected, ctx = relpos.attention_forward(*arrays, position=position, lengths=[N, 4])
    gradients = relpos.attention_backward(ctx, np.ones_like(expected))
    np.testing.assert_array_equal(out.detach().numpy(), expected)
    for name, x in zip(
        ("q", "k", "v", "key_table", "value_table"), (q, k, v, *tables), strict=True
    ):
        np.testing.assert_array_equal(x.grad.numpy(), gradients[name])


TWICE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "shaw": (relpos.Shaw, (5, D)),
    "xl": (lambda u, v: relpos.TransformerXL(tensor(H * D, 6, seed=1, grad=False), u, v), (H, D)),
    "deberta": (lambda a, b: relpos.DeBERTa(a, b), (6, D)),
    "deberta, bucketed": (lambda a, b: relpos.DeBERTa(a, b, buckets=4, max_position=6), (6, D)),
    "plane of t5": (lambda a, b: relpos.Plane(relpos.T5Bias(a), relpos.T5Bias(b), width=2), (8, H)),
    "plane of alibi": (
        lambda a, b: relpos.Plane(relpos.ALiBi(a), relpos.ALiBi(b), width=2),
        (H,),
    ),
    "plane of relative_key": (
        lambda a, b: relpos.Plane(relpos.RelativeKey(a), relpos.RelativeKey(b), width=2),
        (2 * N + 1, D),
    ),
    "plane of xl": (
        lambda a, b: relpos.Plane(relpos.TransformerXL(a), relpos.TransformerXL(b), width=2),
        (H * D, 6),
    ),
    "shaw, relative_key": (lambda a, b: (relpos.Shaw(a), relpos.RelativeKey(b)), (2 * N + 1, D)),
    "shaw, deberta": (
        lambda a, b: (relpos.Shaw(a, left=3, right=2), relpos.DeBERTa(query_table=b)),
        (6, D),
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_tensor_that_is_two_parameters(name: str) -> None:
    """Its gradient is the sum of those of two tensors of its value."""
    make, shape = TWICE[name]
    q, k, v = qkv()
    one, *two = (tensor(*shape, seed=7) for _ in range(3))
    for tables in ((one, one), two):
        out = relpos.torch.attention(q, k, v, position=make(*tables), scale=0.5)
        (out * tensor(B, H, N, D, seed=8, grad=False)).sum().backward()
    assert all(x.grad.abs().max() > 1e-4 for x in two)
    torch.testing.assert_close(one.grad, two[0].grad + two[1].grad, rtol=1e-5, atol=1e-6)


def test_the_core_sees_the_tensors_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    import sys

    module = sys.modules["relpos.attention"]
    inner = module._core.attention_forward  # type: ignore[attr-defined]

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner.__self__, name) if name != "attention_forward" else self.forward

        def forward(self, q: Any, k: Any, v: Any, out: Any, lse: bool, call: Any) -> Any:
            seen.extend(x.__array_interface__["data"][0] for x in (q, k, v))
            seen.extend(term[2].__array_interface__["data"][0] for term in call[8])
            return inner(q, k, v, out, lse, call)

    monkeypatch.setattr(module, "_core", Spy())
    q, k, v = qkv()
    table = tensor(5, D)
    swapped = [x.detach().transpose(1, 2) for x in (q, k, v)]
    relpos.torch.attention(q, k, v, position=relpos.Shaw(table))
    relpos.torch.attention(*swapped, position=relpos.Shaw(table), layout="bnhd")
    assert seen == 2 * [x.data_ptr() for x in (q, k, v, table)]


def test_the_array_interfaces_of_numpy() -> None:
    """relpos.attention itself takes tensors, by DLPack, and gives arrays, which export it."""
    q, k, v = (x.detach() for x in qkv())
    table = tensor(5, D, grad=False)
    out = relpos.attention(q, k, v, position=relpos.Shaw(table))
    assert type(out) is np.ndarray
    expected = relpos.torch.attention(q, k, v, position=relpos.Shaw(table))
    torch.testing.assert_close(torch.from_dlpack(out), expected, rtol=0, atol=0)
    into = torch.empty_like(q)
    relpos.attention(q, k, v, position=relpos.Shaw(table), out=into)  # type: ignore[arg-type]
    torch.testing.assert_close(into, expected, rtol=0, atol=0)

    class Interface:
        def __init__(self, x: Any) -> None:
            self.held, self.__array_interface__ = x, x.__array_interface__

    again = relpos.attention(*(Interface(x.numpy()) for x in (q, k, v)))  # type: ignore[arg-type]
    np.testing.assert_array_equal(again, relpos.attention(q, k, v))
    with pytest.raises(TypeError, match="^q: no array to read without a copy: .*requires? grad"):
        relpos.attention(q.clone().requires_grad_(), k, v)
    with pytest.raises(TypeError, match=r"none; use relpos\.torch, or key_table\.detach\(\)$"):
        relpos.attention(q, k, v, position=relpos.Shaw(tensor(5, D, grad=True)))
    with pytest.raises(TypeError, match=r"^q: no array .*; use q\.to\(torch\.float32\)$"):
        relpos.attention(q.bfloat16(), k, v)
    with pytest.raises(TypeError, match=r"; use key_table\.to\(torch\.float32\)$"):
        relpos.attention(q, k, v, position=relpos.Shaw(table.bfloat16()))

    class Elsewhere:
        def __dlpack__(self) -> None: ...
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    with pytest.raises(TypeError, match="^k: lies on cuda:0, q on the host; move one of them"):
        relpos.attention(q, Elsewhere(), v)  # type: ignore[arg-type]


class Nowhere(torch.Tensor):
    """A tensor without storage, as DTensor and FakeTensor are."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> bool:
        return False  # is_pinned


def test_tensors_that_numpy_would_read_wrongly() -> None:
    """Of one without storage it takes new memory, of one to be negated the numbers as they lie."""
    q, k, v = (x.detach() for x in qkv())
    nowhere = "expected an array that can be read, got Nowhere, which has no memory of its own$"
    other = r"the numbers in memory have the other sign; use \w+.resolve_neg\(\)$"
    table = tensor(5, D, grad=False)
    for x, t, said in (
        (Nowhere(q.shape), Nowhere((5, D)), nowhere),
        (torch._neg_view(q), torch._neg_view(table), other),
    ):
        with pytest.raises(TypeError, match=f"^q: {said}"):
            relpos.attention(x, k, v)
        with pytest.raises(TypeError, match=f"^key_table: {said}"):
            relpos.attention(q, k, v, position=relpos.Shaw(t))
    expected = relpos.torch.attention(-q, k, v)
    assert torch.equal(relpos.torch.attention(torch._neg_view(q), k, v), expected)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda x: x.double(), "q: expected float32, got float64; use q.float()"),
        (lambda x: x.detach().numpy(), "q: expected a tensor, got ndarray"),
        (
            lambda x: x.to_sparse(),
            "q: expected a dense tensor, got torch.sparse_coo; use q.to_dense()",
        ),
        (
            lambda x: torch.nested.nested_tensor([*x.detach()]),
            "q: expected a dense tensor, got a nested one; use q.to_padded_tensor(0)",
        ),
        (
            lambda x: x.to("meta"),
            "q: lies on meta, relpos computes on the CPU and on NVIDIA GPUs; use q.cpu()",
        ),
    ],
)
def test_refused(spoil: Any, sentence: str) -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError) as caught:
        relpos.torch.attention(spoil(q), k, v)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            lambda: {"mask": torch.ones(N, N, dtype=torch.int32)},
            "mask: expected a bool tensor, got int32; use mask.bool()",
        ),
        (
            lambda: {"mask": torch.ones(N, N, dtype=torch.bool).T},
            "mask: the last axis must be contiguous, got strides (0, 0, 1, 4) in bytes; "
            "use mask.contiguous()",
        ),
        (
            lambda: {"position": relpos.Shaw(tensor(D, 5).T)},
            "key_table: the last axis must be contiguous, got strides (4, 20) in bytes; "
            "use key_table.contiguous()",
        ),
        (
            lambda: {"position": relpos.Shaw(tensor(5, D).double())},
            "key_table: expected float32 (T, d) or (H, T, d), got float64 (5, 2); "
            "use key_table.to(torch.float32)",
        ),
        (
            lambda: {"position": relpos.Shaw(tensor(5, D).to_mkldnn())},
            "key_table: expected a dense tensor, got torch._mkldnn; use key_table.to_dense()",
        ),
        (
            lambda: {"position": relpos.ALiBi(torch.ones(H).to_sparse())},
            "slopes: expected a dense tensor, got torch.sparse_coo; use slopes.to_dense()",
        ),
        (
            lambda: {"mask": torch.ones(N, N, dtype=torch.bool).to_sparse()},
            "mask: expected a dense tensor, got torch.sparse_coo; use mask.to_dense()",
        ),
        (
            lambda: {"lengths": torch.tensor([N, N]).to_sparse()},
            "lengths: expected a dense tensor, got torch.sparse_coo; use lengths.to_dense()",
        ),
        (
            lambda: {"query_start": 1 << 70},
            f"query_start: expected integers below 2^63 in magnitude, got {1 << 70}",
        ),
        (lambda: {"lengths": "all"}, "lengths: expected integers, got text ()"),
        (lambda: {"seed": 1 << 63}, f"seed: expected an integer from 0 to 2^63 - 1, got {1 << 63}"),
        (lambda: {"seed": -1}, "seed: expected an integer from 0 to 2^63 - 1, got -1"),
        (lambda: {"seed": True}, "seed: expected an integer from 0 to 2^63 - 1, got True"),
        (lambda: {"seed": 1.5}, "seed: expected an integer from 0 to 2^63 - 1, got 1.5"),
        (lambda: {"seed": None}, "seed: expected an integer from 0 to 2^63 - 1, got None"),
        (
            lambda: {"seed": (1, 2, 3, 4)},
            "seed: expected an integer from 0 to 2^63 - 1, got (1, 2, 3, 4)",
        ),
    ],
)
def test_arguments_refused(given: Any, sentence: str) -> None:
    """In the words of torch, by the function and by the module."""
    q, k, v = qkv()
    with pytest.raises((TypeError, ValueError)) as caught:
        relpos.torch.attention(q, k, v, **given())
    assert str(caught.value) == sentence
    with pytest.raises((TypeError, ValueError)) as caught:
        options = given()
        relpos.torch.Attention(options.pop("position", None))(q, k, v, **options)
    assert str(caught.value) == sentence


def test_seeds() -> None:
    """Whatever is an integer, up to the greatest."""
    q, k, v = qkv()
    for seed in ((1 << 63) - 1, 5):
        expected = relpos.attention(
            *(x.detach().numpy() for x in (q, k, v)), dropout=0.5, seed=seed
        )
        for given in (seed, np.int64(seed), torch.tensor(seed)):
            out = relpos.torch.attention(q, k, v, dropout=0.5, seed=given)
            np.testing.assert_array_equal(out.detach().numpy(), expected)


def test_strides_that_the_kernels_do_not_take() -> None:
    q, k, v = qkv()
    turned = k.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    with pytest.raises(
        ValueError, match=r"^k: the numbers of its last axis lie \d+ apart.*k\.cont"
    ):
        relpos.torch.attention(q, turned, v)
    out = relpos.torch.attention(q, turned.contiguous(), v)
    assert torch.equal(out, relpos.torch.attention(q, k, v))


def test_forward_mode_is_refused() -> None:
    """Torch would say that the derivatives are zero."""
    q, k, v = (x.detach() for x in qkv())
    key = tensor(5, D, grad=False)
    with torch.autograd.forward_ad.dual_level():
        for i in range(3):
            given = [q, k, v]
            given[i] = torch.autograd.forward_ad.make_dual(given[i], torch.ones_like(given[i]))
            with pytest.raises(
                RuntimeError, match=r"has no forward-mode derivatives \(jvp, jacfwd"
            ):
                relpos.torch.attention(*given)
        table = torch.autograd.forward_ad.make_dual(key, torch.ones_like(key))
        for position in (relpos.Shaw(table), relpos.Shaw(None, table)):
            with pytest.raises(RuntimeError, match="no forward-mode"):
                relpos.torch.attention(q, k, v, position=position)
    with pytest.raises(RuntimeError, match="no forward-mode"):
        torch.func.jvp(lambda x: relpos.torch.attention(x, k, v), (q,), (q,))


def test_transforms_are_refused() -> None:
    q, k, v = (x.detach() for x in qkv())
    key = tensor(5, D, grad=False)

    def by_q(x: Any) -> Any:
        return relpos.torch.attention(x, k, v).sum()

    def by_table(x: Any) -> Any:
        return relpos.torch.attention(q, k, v, position=relpos.Shaw(x)).sum()

    said = "^relpos.torch: cannot be inside grad, vjp, jacrev or vmap of torch.func; use "
    for call, x in ((by_q, q), (by_table, key)):
        for transform in (torch.func.grad, torch.func.jacrev):
            with pytest.raises(RuntimeError, match=said):
                transform(call)(x)
        with pytest.raises(RuntimeError, match=said):
            torch.func.vmap(call)(x.expand(2, *x.shape))
    torch.testing.assert_close(torch.func.functionalize(by_q)(q), by_q(q))


def test_gradients_of_gradients_are_refused() -> None:
    """When they are asked for; a graph for them may be made."""
    q, k, v = qkv()
    out = relpos.torch.attention(q, k, v).square().sum()
    [found] = torch.autograd.grad(out, q, create_graph=True)
    assert found.requires_grad
    with pytest.raises(RuntimeError, match="^relpos.torch: has no gradients of gradients"):
        found.sum().backward()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["function", "module", "compiled"])
def test_within_autocast(form: str, half: Any) -> None:
    """Products come in half the width, and one tensor beside them may be in all of it; relpos
    computes as without autocast, in its precision, and gradients go back to what was multiplied."""
    x, table = tensor(B, H, N, D), torch.nn.Parameter(tensor(5, D))
    linear = torch.nn.Linear(D, D)
    shaw = relpos.Shaw(table)
    same = "bf16" if half is torch.bfloat16 else "f32"
    found = []
    for is_cast in (True, False):
        precision = None if is_cast else same

        def function(q: Any, k: Any, v: Any, precision: str | None = precision) -> Any:
            return relpos.torch.attention(q, k, v, position=shaw, causal=True, precision=precision)

        module = relpos.torch.Attention(shaw, causal=True, precision=precision)
        forms = {"function": function, "module": module}
        attend = forms.get(form) or torch.compile(function, backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu", half):
            y = linear(x)
        assert y.dtype == half
        with torch.autocast("cpu", half, enabled=is_cast):
            out = attend(y if is_cast else y.float(), y if is_cast else y.float(), x)
        assert out.dtype == torch.float32
        out.square().sum().backward()
        found.append([out.detach(), *(a.grad for a in (x, table, linear.weight))])
        for a in (x, table, linear.weight):
            a.grad = None
    for a, b in zip(*found, strict=True):
        assert a.abs().max() > 0
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", ["function", "module"])
def test_a_precision_within_autocast(form: str) -> None:
    """Is what it says, and float32 without autocast is as before."""
    q, k, v = qkv()
    found = {}
    for precision in ("f32", "bf16", None):
        given: dict[str, Any] = {"causal": True, "precision": precision}
        attend = relpos.torch.Attention(**given) if form == "module" else relpos.torch.attention
        more = {} if form == "module" else given
        found[precision] = attend(q, k, v, **more)
        with torch.autocast("cpu"):
            found["cast", precision] = attend(q, k, v, **more)
    assert not torch.equal(found["f32"], found["bf16"])
    assert torch.equal(found[None], found["f32"])
    assert torch.equal(found["cast", None], found["bf16"])
    for precision in ("f32", "bf16"):
        assert torch.equal(found["cast", precision], found[precision])


def test_autocast_leaves_float64_alone() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu"), pytest.raises(TypeError, match="^q: expected float32, got float64"):
        relpos.torch.attention(q.double(), k, v)


def test_a_table_of_another_type_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^key_table: expected float32 \(T, d\) or .*, got float64"
    ):
        relpos.Shaw(tensor(5, D).double())
    q, k, v = qkv()
    module = relpos.torch.Attention(relpos.Shaw(torch.nn.Parameter(tensor(5, D)))).double()
    with pytest.raises(TypeError, match=r"^key_table: expected float32 or .*, got float64; use"):
        module(q, k, v)
    module.float()(q, k, v)
    module.key_table = None
    with pytest.raises(TypeError, match="^key_table: expected a tensor, got NoneType$"):
        module(q, k, v)
    table = torch.nn.Parameter(tensor(5, D))
    position = relpos.Shaw(table)
    table.data = table.data.half()

    def call() -> Any:
        return relpos.torch.attention(q, k, v, position=position)

    for each in (call, torch.compile(call, backend="aot_eager")):
        with pytest.raises(TypeError, match=r"^key_table: expected float32 .*, got float16"):
            each()


@pytest.mark.parametrize("form", ["function", "module", "compiled"])
def test_tables_of_bfloat16(form: str) -> None:
    """Are widened, which changes none of their numbers: those computed within torch.autocast."""
    q, k, v = qkv()
    one, other = tensor(5, D), tensor(5, D, seed=1)
    found = []
    for wide in (False, True):
        with torch.autocast("cpu"):
            key, value = (torch.nn.functional.linear(x, torch.eye(D)) for x in (one, other))
        assert key.dtype == torch.bfloat16
        key, value = (key.float(), value.float()) if wide else (key, value)

        def call(key: Any, value: Any) -> Any:
            return relpos.torch.attention(q, k, v, position=relpos.Shaw(key, value))

        if form == "module":
            out = relpos.torch.Attention(relpos.Shaw(key, value))(q, k, v)
        elif form == "compiled":
            out = torch.compile(call, backend="aot_eager", fullgraph=True)(key, value)
        else:
            out = call(key, value)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), (q, one, other))])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_memory_stays_torchs_to_give_back() -> None:
    """FSDP gives the memory of gathered parameters back, Tensor.numpy() forbids that for good."""
    q, k, v = qkv()
    key, labels = tensor(5, D), torch.zeros(N, N, dtype=torch.int8)
    position = (relpos.Shaw(key), relpos.ShawGraph(value_table=tensor(5, D, seed=1), labels=labels))
    relpos.torch.attention(q, k, v, position=position).sum().backward()
    for x in (q, k, v, key, position[1].value_table):
        assert x.untyped_storage().resizable()
        x.untyped_storage().resize_(0)


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool) -> None:
    """torch's own tests of an operation: schema, fake tensors, autograd, compiling ahead."""
    q, k, v = (tensor(11, H, D, seed=i) if packed else x for i, x in enumerate(qkv()))
    table = tensor(5, D)
    module = relpos.torch.Attention(relpos.Shaw(table, table), causal=True)
    spec = module._kept[True, "f32"]
    host = [None, None, torch.tensor([0, 4, 11]) if packed else None, None, None, None]
    arguments = (q, k, v, module._tables(), host, [], [], 0, spec.name)
    torch.library.opcheck(torch.ops.relpos.attention.default, arguments)


class Layer(torch.nn.Module):
    def __init__(self, position: Any = None, **options: Any) -> None:
        super().__init__()
        self.project = torch.nn.Linear(H * D, 3 * H * D)
        self.attention = relpos.torch.Attention(position, layout="bnhd", **options)

    def forward(self, x: Any, lengths: Any = None, seed: int = 0) -> Any:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).unbind(2)
        return self.attention(q, k, v, lengths=lengths, seed=seed).flatten(2).tanh()


def layer(**options: Any) -> Layer:
    torch.manual_seed(0)
    table = torch.nn.Parameter(tensor(5, D, grad=False))
    return Layer(relpos.Shaw(table, table), **options)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    eager, other = layer(causal=True, dropout=0.3), layer(causal=True, dropout=0.3)
    try:
        compiled = torch.compile(other, fullgraph=True, backend=backend)
        x = tensor(B, N, H * D, grad=False)
        for lengths, seed in ((None, 1), (torch.tensor([N, 3]), 2), (torch.tensor([2, N]), 3)):
            results = []
            for module in (eager, compiled):
                module.zero_grad()
                out = module(x, lengths, seed)
                out.square().sum().backward()
                results.append([out, *(p.grad for p in module.parameters())])
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        pytest.skip(f"torch cannot compile here: {str(error)[:200]}")


def test_names_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers begin anew, and inductor finds the graphs of this one: other shapes, other names."""
    names = set()
    for layout in ("bhnd", "bnhd"):
        monkeypatch.setattr(relpos.torch.calls, "_numbers", itertools.count(1))
        names.add(relpos.torch.Attention(layout=layout)._kept[True, "f32"].name)
    assert len(names) == 2


EDGES = relpos.EdgeList([0, 1, 3], [1, 1, 0], [2, 0, 1], [0, 1, 1])
MADE_OUTSIDE: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "rat-sql": SCHEMES["rat-sql"],
    "edges": (lambda a, b: relpos.ShawGraph(a, b, edges=EDGES), [(3, D), (3, D)]),
    "cross": (
        lambda a: relpos.CrossPositions(relpos.Shaw(a), [[0, 2, 4, 6], [3, 1, 2, 2]], range(N)),
        [(5, D)],
    ),
}
MADE_INSIDE = {name: value for name, value in SCHEMES.items() if name not in MADE_OUTSIDE}


def both_ways(call: Any, leaves: list[Any], *more: Any, **compiling: Any) -> None:
    """A call compiled as a whole, and as it is: the same result and gradients."""
    torch._dynamo.reset()  # what it knows of this code from other tests
    compiled = torch.compile(call, **({"fullgraph": True, "backend": "aot_eager"} | compiling))
    results = []
    for each in (call, compiled):
        out = each(*leaves, *more)
        dout = tensor(*out.shape, seed=8, grad=False)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.abs().max() > 1e-4
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*MADE_INSIDE, *(f"outside: {name}" for name in MADE_OUTSIDE)])
def test_the_function_compiled(name: str) -> None:
    """With the scheme made in the compiled code, or given to it."""
    outside = name.startswith("outside: ")
    make, shapes = (MADE_OUTSIDE if outside else MADE_INSIDE)[name.removeprefix("outside: ")]
    tables = [tensor(*shape, seed=9 + i) for i, shape in enumerate(shapes)]
    made = make(*tables) if outside else None

    def call(q: Any, k: Any, v: Any, *own: Any) -> Any:
        position = make(*own) if made is None else made
        return relpos.torch.attention(2 * q, k, v, position=position, causal=True).tanh()

    both_ways(call, [*qkv(), *tables])


def test_the_options_compiled() -> None:
    """Numbers that change from call to call, which torch.compile makes symbols of."""
    masks = [torch.rand(n, n, generator=torch.Generator().manual_seed(n)) < 0.7 for n in (4, 7)]
    table = tensor(5, D)

    def call(q: Any, k: Any, v: Any, a: Any, window: int, softcap: float, seed: int) -> Any:
        return relpos.torch.attention(
            q, k, v, position=(relpos.Shaw(a, k=2), relpos.ALiBi()), offsets=[0, 4, 11],
            mask=masks, window=(window, None), softcap=softcap, dropout=0.25, seed=seed, scale=0.7,
        )  # fmt: skip

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k, v = (tensor(11, H, D, seed=i) for i in range(3))
    for given in ((9, 1.5, 1), (3, 1.5, 2), (2, 0.5, 3), (1, 0.7, 4), (4, 0.9, 5)):
        found, expected = (each(q, k, v, table, *given) for each in (compiled, call))
        torch.testing.assert_close(found, expected)

    def at(q: Any, k: Any, v: Any, start: int) -> Any:
        return relpos.torch.attention(q, k, v, query_start=start, lengths=[4, 3], causal=True)

    compiled = torch.compile(at, fullgraph=True, backend="aot_eager")
    for start in range(3):
        torch.testing.assert_close(compiled(*qkv(), start), at(*qkv(), start))


def test_the_numbers_of_a_scheme_compiled() -> None:
    """From the second call on torch.compile makes symbols of them."""
    (q, k, v), bias = qkv(), tensor(8, H)

    def call(q: Any, scale: float, base: float) -> Any:
        position = (relpos.T5Bias(bias, bias_scale=scale), relpos.RoPE(base=base))
        return relpos.torch.attention(q, k, v, position=position)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for given in ((1.0, 1e4), (2.0, 1e4), (-0.5, 2e4), (3.25, 3e4)):
        torch.testing.assert_close(compiled(q, *given), call(q, *given))


def test_labels_of_every_call_compiled() -> None:
    """They are inputs of the compiled code, no constants of it."""
    table = tensor(3, D)

    def call(q: Any, k: Any, v: Any, graph: Any) -> Any:
        return relpos.torch.attention(q, k, v, position=graph, layout="bnhd")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k, v = (x.transpose(1, 2) for x in qkv())
    found = []
    for seed in range(3):
        labels = np.random.default_rng(seed).integers(-1, 3, (B, 1, N, N)).astype(np.int8)
        graph = relpos.ShawGraph(table, labels=labels)
        found.append(compiled(q, k, v, graph))
        torch.testing.assert_close(found[-1], call(q, k, v, graph))
    assert not torch.equal(found[0], found[1])


def test_backward_compiled_has_the_labels_and_numbers_of_its_call() -> None:
    """Two calls of the same text, forward both, then backward both."""
    table, bias = tensor(3, D), tensor(8, H)

    def of_distance(q: Any, most: int) -> Any:
        t5 = relpos.T5Bias(bias, max_distance=most, bidirectional=True)
        return relpos.torch.attention(q, q, q, position=t5)

    def of_graph(q: Any, graph: Any) -> Any:
        return relpos.torch.attention(q, q, q, position=graph)

    q = qkv()[0].detach()
    both = [np.random.default_rng(seed).integers(-1, 3, (N, N)).astype(np.int8) for seed in (0, 1)]
    graphs = [relpos.ShawGraph(table, labels=labels) for labels in both]
    calls = [(of_graph, table, graphs), (of_distance, bias, [5, 30])]
    for eager, leaf, given in calls:
        compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
        outs = [compiled(q, x) for x in given]
        for x, out in zip(given, outs, strict=True):
            [found] = torch.autograd.grad(out.square().sum(), leaf)
            [expected] = torch.autograd.grad(eager(q, x).square().sum(), leaf)
            torch.testing.assert_close(found, expected)


def test_backward_compiled_has_the_scheme_of_its_function() -> None:
    """And its constants: forward of two functions over one table, then backward of the first."""
    q, bias = qkv()[0].detach(), tensor(8, H)

    def at_first() -> Any:
        return relpos.torch.attention(q, q, q, position=relpos.T5Bias(bias))

    def of_another_number() -> Any:
        return relpos.torch.attention(q, q, q, position=relpos.T5Bias(bias, bias_scale=2.0))

    def of_another_text() -> Any:
        return relpos.torch.attention(q, q, q, position=relpos.T5Bias(bias, bidirectional=False))

    [expected] = torch.autograd.grad(at_first().square().sum(), bias)
    for other in (of_another_number, of_another_text):
        calls = (at_first, other)
        outs = [torch.compile(x, fullgraph=True, backend="aot_eager")() for x in calls]
        [found] = torch.autograd.grad(outs[0].square().sum(), bias)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", ["function", "module", "compiled", "compiled module"])
def test_what_backward_reads_again_may_not_change(form: str) -> None:
    """Labels and masks that are tensors: autograd counts their changes, as those of q, k and v."""
    x, table = tensor(5, H, D, grad=False), tensor(3, D)
    numbers, starts = torch.ones(25, dtype=torch.int8), torch.tensor([0])
    padded = torch.zeros(N, N, dtype=torch.int32)
    graph = relpos.ShawGraph(table, labels=padded)
    module = relpos.torch.Attention(graph)

    def of_labels() -> Any:
        q = tensor(B, H, N, D, grad=False)
        return (
            module(q, q, q) if "module" in form else relpos.torch.attention(q, q, q, position=graph)
        )

    def of_flat_labels() -> Any:
        flat = relpos.ShawGraph(table, labels=(numbers, starts))
        return relpos.torch.attention(x, x, x, position=flat, offsets=[0, 5])

    def of_a_flat_mask() -> Any:
        mask = (numbers.view(torch.bool), starts)
        return relpos.torch.attention(
            x, x, x, position=relpos.Shaw(table), offsets=[0, 5], mask=mask
        )

    call = torch.compile(of_labels, backend="aot_eager") if "compiled" in form else of_labels
    given = [(call, padded)]
    if form == "function":
        given += [(of_flat_labels, numbers), (of_a_flat_mask, numbers)]
    for call, changed in given:
        [expected] = torch.autograd.grad(call().sum(), table)
        before, after = call(), call()
        assert torch.equal(torch.autograd.grad(before.sum(), table)[0], expected)
        changed.add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            after.sum().backward()
    assert torch.equal(of_labels(), copy.deepcopy(module)(*3 * [tensor(B, H, N, D, grad=False)]))


def test_labels_of_inference_mode() -> None:
    """Torch does not count their changes."""
    with torch.inference_mode():
        labels = torch.zeros(N, N, dtype=torch.int32)
    q, table = qkv()[0], tensor(3, D)
    out = relpos.torch.attention(q, q, q, position=relpos.ShawGraph(table, labels=labels))
    out.sum().backward()
    assert table.grad.any()


@pytest.mark.parametrize(
    "given",
    [
        {"scale": np.float64(0.3)},
        {"scale": np.float32(0.3)},
        {"scale": torch.tensor(0.3)},
        {"seed": np.int64(5)},
        {"seed": torch.tensor(5)},
        {"causal": np.bool_(True)},
        {"window": np.int64(1)},
    ],
    ids=str,
)
def test_numbers_of_numpy_compiled(given: Any) -> None:
    def call(q: Any, k: Any, v: Any, given: Any) -> Any:
        return relpos.torch.attention(q, k, v, dropout=0.5, **given)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv(), given), call(*qkv(), given))


def test_compiled_code_holds_no_tables() -> None:
    """A text that is known for good holds nothing of its calls but the last of all."""
    compiled = torch.compile(
        lambda q, t, scheme: relpos.torch.attention(q, q, q, position=scheme(t)),
        backend="aot_eager",
    )
    q, first, second = (x.detach() for x in (qkv()[0], tensor(5, D), tensor(7, D)))
    held = weakref.ref(first.untyped_storage())
    compiled(q, first, relpos.Shaw)
    compiled(q, second, relpos.MusicTransformer)
    del first
    gc.collect()
    assert held() is None


def test_compiled_views_that_begin_at_one_place() -> None:
    """Each call goes back over the table that it had, though both begin where one tensor does."""
    q, k, v, table = *qkv(), tensor(8, D)

    def call(q: Any, k: Any, v: Any, table: Any) -> Any:
        first = relpos.torch.attention(q, k, v, position=relpos.MusicTransformer(table[:5]))
        other = relpos.MusicTransformer(table)
        second = relpos.torch.attention(first, k, v, position=other)
        stretched = relpos.MusicTransformer(table.view(4, 2 * D)[:, :D])
        return relpos.torch.attention(second, k, v, position=stretched)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = (
        torch.autograd.grad(f(q, k, v, table).square().sum(), (q, k, v, table))
        for f in (compiled, call)
    )
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


def test_compiled_code_sees_the_tensors_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = relpos.torch.operation.attention_forward

    def spy(*given: Any, position: Any, **options: Any) -> Any:
        arrays = (*given, *relpos.position.combine.tables_of(position).values())
        seen.extend(x.__array_interface__["data"][0] for x in arrays)
        return forward(*given, position=position, **options)

    monkeypatch.setattr(relpos.torch.operation, "attention_forward", spy)
    leaves = [x.detach() for x in (*qkv(), tensor(5, D))]

    def call(q: Any, k: Any, v: Any, a: Any) -> Any:
        return relpos.torch.attention(q, k, v, position=relpos.Shaw(a))

    torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    assert seen == [x.data_ptr() for x in leaves]


@pytest.mark.slow
def test_the_function_by_inductor() -> None:
    def call(q: Any, k: Any, v: Any, a: Any, b: Any) -> Any:
        out = relpos.torch.attention(q.sin(), k, v, position=relpos.Shaw(a, b), window=(2, 2))
        return out.tanh()

    leaves = [*qkv(), tensor(5, D), tensor(H, 3, D)]
    try:
        both_ways(call, leaves, backend="inductor")
    except torch._dynamo.exc.BackendCompilerFailed as error:
        pytest.skip(f"torch cannot compile here: {str(error)[:200]}")


def test_counts_of_any_kind() -> None:
    """Lists, arrays that are read-only, turned around or of other bytes: by function and module."""
    q, k, v = qkv()
    expected = relpos.torch.attention(q, k, v, lengths=torch.tensor([N - 1, 2]))
    backward, owned = np.array([2, N - 1])[::-1], np.array([N - 1, 2])
    owned.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for lengths in ([N - 1, 2], backward, owned, owned.astype(">i8")):
            assert torch.equal(relpos.torch.attention(q, k, v, lengths=lengths), expected)
            assert torch.equal(relpos.torch.Attention()(q, k, v, lengths=lengths), expected)


def test_a_mask_of_the_module_is_a_tensor() -> None:
    q, k, v = qkv()
    for mask in ([True], np.ones((N, N), bool)):
        sentence = f"^mask: expected a bool tensor, got {type(mask).__name__}$"
        with pytest.raises(TypeError, match=sentence):
            relpos.torch.Attention()(q, k, v, mask=mask)


def test_a_mask_of_keys_alone_is_expanded() -> None:
    q, k, v = qkv()
    keys = torch.ones(B, 1, 1, N, dtype=torch.bool)
    keys[..., -1] = False
    fix = rf"got \({B}, 1, 1, {N}\); use mask.expand\(\({B}, 1, {N}, {N}\)\)$"
    with pytest.raises(ValueError, match=fix):
        relpos.torch.attention(q, k, v, mask=keys)
    wide = keys.expand((B, 1, N, N))
    expected = relpos.torch.attention(q, k, v, mask=wide.contiguous())
    assert torch.equal(relpos.torch.attention(q, k, v, mask=wide), expected)


class _Function(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(tensor(5, D, grad=False))

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return relpos.torch.attention(q, k, v, position=relpos.Shaw(self.table))


class _Layer(torch.nn.Module):
    def __init__(self, position: Any) -> None:
        super().__init__()
        self.attention = relpos.torch.Attention(position, causal=True, dropout=0.1)

    def forward(self, x: Any) -> Any:
        return x + self.attention(x, x, x, seed=3)


def _layers(name: str) -> list[_Layer]:
    """Alike but for their tables."""
    example = scheme_examples.EXAMPLES[name]
    tables = [scheme_examples.parameters(example, np.float32, seed) for seed in range(12)]
    return [
        _Layer(example.make(**{x: torch.nn.Parameter(torch.from_numpy(t[x])) for x in t}))
        for t in tables
    ]


def _stream(grad: bool = True) -> Any:
    x = torch.from_numpy(scheme_examples.activations(np.float32)[0])
    return x.requires_grad_(grad)


@pytest.mark.parametrize("name", ["shaw", "t5", "graph", "xl"])
def test_layers_that_are_alike_share_a_graph(name: str) -> None:
    """More of them than torch compiles graphs of one function."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layers = _layers(name)
    x = _stream()
    leaves = [x, *(p for layer in layers for p in layer.parameters())]
    found = expected = x
    for layer in layers:
        found = torch.compile(layer, fullgraph=True, backend=counter)(found)
        expected = layer(expected)
    assert counter.frame_count == 1 and torch.equal(found, expected)
    pairs = zip(*(torch.autograd.grad(y.sum(), leaves) for y in (found, expected)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_threads_of_exported_code() -> None:
    """What is kept from forward to backward is kept for all of them in one place."""
    layer, x = _layers("xl")[0], _stream(grad=False)
    given = [part.requires_grad_() for part in (x[:, :, :-3].clone(), x)]
    run = [torch.export.export(layer, (part,)).module() for part in given]

    def gradient(i: int) -> Any:
        return torch.autograd.grad(run[i](given[i]).sum(), given[i])[0]

    expected = [gradient(i) for i in range(2)]

    def work(i: int) -> bool:
        return all(torch.equal(gradient(i % 2), expected[i % 2]) for _ in range(50))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_a_module_without_gradients_holds_no_lowered_tables() -> None:
    layer, x = _layers("xl")[0], _stream(grad=False)
    kept = layer.attention._kept[True, "f32"]
    y = layer(x)
    assert kept.last is not None
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    assert kept.last is None


def test_exported() -> None:
    """A function says in the graph what it is, and so does a module."""
    x = [a.detach() for a in qkv()]
    module = relpos.torch.Attention(relpos.Shaw(torch.nn.Parameter(tensor(5, D, grad=False))))
    for each in (module.eval(), _Function().eval()):
        exported = torch.export.export(each, tuple(x))
        assert torch.equal(exported.module()(*x), each(*x))
    with pytest.raises(RuntimeError, match="the scheme of this graph is gone, or another"):
        relpos.torch.calls.spec_of("0")


@pytest.mark.parametrize("position", [relpos.Shaw, None, relpos.ALiBi()])
def test_compiled_ahead_of_time(position: Any, tmp_path: Path) -> None:
    """Such a program calls the operation with None for an empty list."""
    inductor = importlib.import_module("torch._inductor")
    if not hasattr(inductor, "aoti_load_package"):
        pytest.skip("this torch compiles nothing ahead of time")

    class Function(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return relpos.torch.attention(q, k, v, position=position, causal=True)

    x = [a.detach() for a in qkv()]
    function = (_Function() if position is relpos.Shaw else Function()).eval()
    with torch.no_grad():
        exported = torch.export.export(function, tuple(x))
        package = str(tmp_path / "function.pt2")
        inductor.aoti_compile_and_package(exported, package_path=package)
        program = inductor.aoti_load_package(package)
        assert torch.equal(program(*x), function(*x))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_number_of_axes_where_torch_asks_for_shapes(compiled: bool) -> None:
    """In compiled code within torch's own sentence."""
    q, flat = torch.zeros(B, H, N, D), torch.zeros(N, D)
    for given, layout, said in (
        (
            (flat, flat, flat),
            "bhnd",
            r"q: expected \(B, H, N, D\), or packed \(tokens, H, D\), got",
        ),
        ((q, q, flat), "bnhd", r"v: expected \(B, M, H, Dv\), or packed \(tokens, H, Dv\), got"),
    ):

        class Function(torch.nn.Module):
            def forward(self, q: Any, k: Any, v: Any, layout: Any = layout) -> Any:
                return relpos.torch.attention(q, k, v, layout=layout)

        with pytest.raises(Exception, match=rf"{said} float32 \(4, 2\)"):
            if compiled:
                torch.compile(Function(), backend="aot_eager")(*given)
            else:
                torch.export.export(Function(), given)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_lies_nowhere_is_refused(compiled: bool) -> None:
    """Of meta tensors torch takes the shapes alone: the result would be memory as it comes."""
    q, k, v = (x.detach() for x in qkv())
    table = torch.empty(5, D, device="meta")

    def attend(x: Any, **options: Any) -> Any:
        return relpos.torch.attention(x, k, v, **options)

    call = torch.compile(attend, backend="aot_eager") if compiled else attend
    lengths = torch.ones(B, dtype=torch.int64, device="meta")
    for options, name in (
        ({"position": relpos.Shaw(table)}, "key_table"),
        ({"lengths": lengths}, "lengths"),
        ({"mask": torch.ones(N, N, dtype=torch.bool, device="meta")}, "mask"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: lies on meta, relpos computes on"):
            call(q, **options)
    if not compiled:
        own = torch.nn.Parameter(tensor(5, D, grad=False))
        module = relpos.torch.Attention(relpos.Shaw(own)).to("meta")
        with pytest.raises(TypeError, match="^key_table: lies on meta"):
            module(q, k, v)


def test_numbers_that_would_be_learned_are_refused() -> None:
    q, k, v = qkv()
    learned = torch.nn.Parameter(torch.tensor(0.5))
    for name in ("scale", "softcap", "dropout"):
        with pytest.raises(TypeError, match=f"^{name}: expected a number, got a tensor that req"):
            relpos.torch.attention(q, k, v, **{name: learned})
    with pytest.raises(TypeError, match="^scale: expected a number, got a tensor that requires"):
        relpos.T5Bias(tensor(8, H), scale=learned)
    relpos.torch.attention(q, k, v, scale=learned.detach())


def test_the_module_says_what_it_is() -> None:
    table = torch.nn.Parameter(tensor(5, D))
    module = relpos.torch.Attention((relpos.Shaw(table), relpos.ALiBi()), causal=True, dropout=0.1)
    assert repr(module) == f"Attention(Shaw, ALiBi, key_table=(5, {D}), causal=True, dropout=0.1)"
    module.key_table = torch.nn.Parameter(tensor(7, D))
    assert f"key_table=(7, {D})" in repr(module)
    module.key_table = None
    assert "key_table=None" in repr(module)
    assert repr(relpos.torch.Attention(precision="bf16")) == "Attention(precision='bf16')"


def test_the_module() -> None:
    module = layer(dropout=0.5)
    assert [name for name, _ in module.named_parameters()] == [
        "project.weight",
        "project.bias",
        "attention.key_table",
        "attention.value_table",
    ][:3]
    x = tensor(B, N, H * D, grad=False)
    assert not torch.equal(module(x, seed=1), module(x, seed=2))
    module.eval()
    assert torch.equal(module(x, seed=1), module(x, seed=2))
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(module), torch.load(saved, weights_only=False)):
        assert torch.equal(twin(x), module(x))
        with torch.no_grad():
            twin.attention.key_table += 1.0
        assert not torch.equal(twin(x), module(x))


def replaced(how: str, module: Any, table: Any, x: Any) -> tuple[Any, Any]:
    """What the module gives with another key_table, and the gradient of that."""
    if how == "functional_call":
        own = table.clone().requires_grad_()
        out = torch.func.functional_call(module, {"key_table": own}, (x, x, x))
        return out, torch.autograd.grad(out.sum(), own)[0]
    if how == "assignment":
        module.key_table = torch.nn.Parameter(table.clone())
    elif how == "load_state_dict":
        state = {**module.state_dict(), "key_table": table.clone()}
        module.load_state_dict(state, assign=True)
    elif how == "copy":
        module.key_table = torch.nn.Parameter(table.clone())
        module = copy.deepcopy(module)
    else:

        class Shifted(torch.nn.Module):
            def forward(self, original: Any) -> Any:
                return original - original.detach() + table

        torch.nn.utils.parametrize.register_parametrization(module, "key_table", Shifted())
    out = module(x, x, x)
    own = dict(module.named_parameters(remove_duplicate=False))
    leaf = own["parametrizations.key_table.original" if how == "parametrize" else "key_table"]
    return out, torch.autograd.grad(out.sum(), leaf)[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "how", ["assignment", "load_state_dict", "copy", "functional_call", "parametrize"]
)
def test_replaced_parameters(how: str, tied: bool) -> None:
    """The module takes its parameters as they are when it is called, each by its name."""
    key, value, new = (tensor(5, D, seed=i, grad=False) for i in range(3))
    value = key if tied else value
    first = torch.nn.Parameter(key.clone())
    module = relpos.torch.Attention(
        relpos.Shaw(first, first if tied else torch.nn.Parameter(value.clone())), causal=True
    )
    x = tensor(B, H, N, D, grad=False)
    module(x, x, x)
    if tied and how == "functional_call":
        value = new  # torch replaces both
    fresh = [new.clone().requires_grad_(), value.clone().requires_grad_()]
    expected = relpos.torch.attention(x, x, x, position=relpos.Shaw(*fresh), causal=True)
    gradients = torch.autograd.grad(expected.sum(), fresh)
    out, gradient = replaced(how, module, new, x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    both = tied and how in ("functional_call", "parametrize")  # one leaf still
    wanted = gradients[0] + gradients[1] if both else gradients[0]
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_terms_are_those_of_tables_that_come_and_go() -> None:
    """A table made for one call may lie where that of another did. This large, malloc often gives the
    same place again."""
    table = torch.nn.Parameter(tensor(2000, 64, seed=1, grad=False))
    module = relpos.torch.Attention(relpos.DeBERTa(table))
    x = tensor(1, 2, N, 64, grad=False)

    def call(factor: float) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return torch.func.functional_call(
                module, {"key_table": factor * table}, (x, x, x)
            ).sum()

    def first(others: int) -> Any:
        outs = [call(factor) for factor in (0.3, 0.9)[: 1 + others]]
        return torch.autograd.grad(outs[0], table)[0]

    torch.testing.assert_close(first(1), first(0), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(B, H, 0, D), (0, H, N, D), (B, 0, N, D)])
@pytest.mark.parametrize("strides", [None, (0, 0, 0, 0)])
def test_empty_tensors(shape: tuple[int, ...], strides: Any) -> None:
    """Forward and backward; NumPy's empty arrays have strides of 0."""
    q, k, v, dout = (torch.zeros(0).as_strided(shape, strides or (1,) * 4) for _ in range(4))
    if strides is None:
        q, k, v, dout = (x.contiguous() for x in (q, k, v, dout))
    inputs = [*(x.requires_grad_() for x in (q, k, v)), torch.nn.Parameter(tensor(5, D))]
    position = relpos.Shaw(inputs[3])
    for call in (
        relpos.torch.Attention(position),
        functools.partial(relpos.torch.attention, position=position),
    ):
        out = call(q, k, v)
        assert out.shape == shape
        gradients = torch.autograd.grad(out, inputs, dout)
        assert [x.shape for x in gradients] == [x.shape for x in inputs]
        assert not gradients[3].any()


def test_nothing_is_kept() -> None:
    from relpos.torch.calls import _kept

    before = len(_kept)
    q, k, v = qkv()
    table = tensor(5, D)
    for _ in range(20):
        relpos.torch.attention(q, k, v, position=relpos.Shaw(table)).sum().backward()
    assert len(_kept) == before


def test_what_the_page_shows() -> None:
    """docs/schemes.md; the other tests of pages do without torch. relpos.torch needs no import."""
    [block] = [each for each in BLOCKS if each.remark == LEFT_OUT + IN_TORCH]
    subprocess.run([sys.executable, "-c", block.text], check=True, cwd=PACKAGE)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "relpos.torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ImportError, match=r"^relpos\.torch: takes torch, `pip install 'relpos\[torch"
    ):
        importlib.import_module("relpos.torch")
