# SPDX-License-Identifier: Apache-2.0
"""relpos for torch: attention on CPU and CUDA tensors, with gradients, without copies.

    out = relpos.torch.attention(q, k, v, position=relpos.Shaw(key_table, value_table))

q, k, v and the parameters of the scheme are tensors; what requires a gradient gets one. To torch
the call is one operation, `torch.ops.relpos.attention`, and torch.compile takes it as such, with
fullgraph=True too. `Attention` is the same as a module, made once:

    self.attention = relpos.torch.Attention(relpos.Shaw(torch.nn.Parameter(table)), causal=True)
    out = self.attention(q, k, v)

Needs torch (`pip install 'relpos[torch]'`). float32; on an NVIDIA GPU also bfloat16, and then on
torch's current stream (docs/cuda.md). There are no gradients of gradients.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

try:
    import torch
except ImportError:
    raise ImportError("relpos.torch: takes torch, `pip install 'relpos[torch]'`") from None
from torch import Tensor
from torch.autograd import forward_ad

from relpos.attention import attention_backward, attention_forward, context_of
from relpos.device_array import DeviceArray
from relpos.position import arrays
from relpos.position.combine import Position, schemes_of, tables_of, with_tables
from relpos.position.terms import Lowered, Shape
from relpos.position.written import Parts, as_text, read, write
from relpos.request import Layout, Mask, Window, integers, read_request

__all__ = ["Attention", "attention"]

PER_CALL = ("lengths", "key_lengths", "offsets", "key_offsets", "query_start", "mask")


class TensorArray(DeviceArray):
    """A tensor as an array on its device, over the same memory. What is made beside it is made by
    torch, in torch's memory, and schemes compute with torch."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(
            tensor.data_ptr(),
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            device=str(tensor.device),
            owner=tensor,
            stream=_stream_of(tensor),
        )
        self.tensor = tensor

    def allocate(self, count: int) -> tuple[int, Any]:
        memory = torch.empty(count, dtype=torch.uint8, device=self.tensor.device)
        return memory.data_ptr(), memory

    def empty(self, shape: tuple[int, ...], dtype: str) -> TensorArray:
        made = torch.empty(shape, dtype=getattr(torch, dtype), device=self.tensor.device)
        return TensorArray(made)

    def constant(self, values: Any) -> TensorArray:
        return TensorArray(torch.from_numpy(values).to(self.tensor.device))

    def zeros_like(self) -> TensorArray:
        flat = self.tensor.new_zeros(self.reach)
        return TensorArray(flat.as_strided(self.shape, self.strides))

    def plus(self, other: Any) -> TensorArray:
        return TensorArray(self.tensor + other.tensor)

    def through(self, name: str, change: Callable[[Any], Any]) -> TensorArray:
        return TensorArray(change(self.tensor).contiguous())


def _is_on_gpu(x: Tensor) -> bool:
    return bool(x.device.type == "cuda")


def _stream_of(x: Tensor) -> int:
    """What torch works on now, on the device of x; 0 on the host."""
    on_gpu = x.device.type == "cuda"
    return int(torch.cuda.current_stream(x.device).cuda_stream) if on_gpu else 0


def _array_of(x: Tensor) -> Any:
    """A tensor as relpos.attention takes it: the same memory."""
    x = x.detach()
    return TensorArray(x) if _is_on_gpu(x) else x.numpy()


def _tensor_of(x: Any) -> Tensor:
    """The way back."""
    return x.tensor if isinstance(x, TensorArray) else torch.from_numpy(np.ascontiguousarray(x))


def _table_of(name: str, x: Tensor) -> Any:
    """A parameter as an array; all tables are float32 on every device."""
    types = ("float32", "bfloat16") if _is_on_gpu(x) else (str(np.dtype(arrays.REAL)),)
    got = str(x.dtype).removeprefix("torch.")
    if got not in types:  # a module's are converted with it, by .double()
        raise TypeError(f"{name}: expected {' or '.join(types)}, got {got}; use .float()")
    return _array_of(x.detach().float() if x.dtype == torch.bfloat16 else x)


class _Call(NamedTuple):
    """A call over arrays of the tensors' memory."""

    position: Position
    options: dict[str, Any]  # the keyword arguments of relpos.attention but for position
    names: list[str]  # of the gradients of the tables


class _Spec:
    """What of a call is neither tensor nor number: torch sees its name."""

    layout: str
    name: str
    last: _Lowering | None = None  # of the last forward call

    def holder(self) -> Any:
        """What `last` is kept by."""
        return self

    def over(self, tables: Sequence[Tensor], numbers: _Numbers) -> _Call:
        """The call with these tables. Each parameter has its own array and gradient, also where one
        tensor is several of them: torch adds those up."""
        raise NotImplementedError

    def lowering(
        self, tables: Sequence[Tensor], numbers: _Numbers, shape: Shape, stream: int
    ) -> Lowered | None:
        """What the last forward call made of these tables for this shape, if it did, and on this
        stream: on another it may not be there yet, and its memory be given away too early."""
        last: _Lowering | None = self.holder().last
        versions = _versions([*tables, *numbers.others()])
        if last is None or versions is None or last.versions != versions:
            return None
        if last.name != self.name:
            return None
        if last.integers != [*numbers.integers] or last.reals != [*numbers.reals]:
            return None
        return last.lowered if last.stream == stream and last.shape.same_as(shape) else None


class _Kept(_Spec):
    """The schemes and the options themselves, under a number, which is the name. Known for as long
    as somebody holds it."""

    def __init__(self, position: Position, options: Mapping[str, Any]) -> None:
        schemes_of(position)
        self.position = position
        self.options = dict(options)
        self.layout = self.options["layout"]
        tables = tables_of(position)
        self.tensors = {name: x for name, x in tables.items() if isinstance(x, Tensor)}
        self.arrays = {name: x for name, x in tables.items() if not isinstance(x, Tensor)}
        self.name = str(next(_numbers))
        _kept[self.name] = self

    def over(self, tables: Sequence[Tensor], numbers: _Numbers) -> _Call:
        named = zip(self.tensors, tables, strict=True)
        own = {name: _table_of(name, x) for name, x in named}
        position = with_tables(self.position, self.arrays | own)
        return _Call(position, self.options | numbers.per_call(), list(self.tensors))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, (self.position, self.options)  # copies have a number of their own


class _Written(_Spec):
    """Schemes and options as a text, which is the name: those of compiled code, which may run when
    what it was made of is gone."""

    def __init__(self, text: str) -> None:
        self.name = text
        self.written = json.loads(text)
        self.layout = dict(self.written[2][1:])["layout"]

    def holder(self) -> Any:
        """One for all texts, or each of them would hold tables of its last call for good."""
        return _Written

    def over(self, tables: Sequence[Tensor], numbers: _Numbers) -> _Call:
        own = [_table_of("position", x) for x in tables]
        others = [x.cpu().numpy() for x in numbers.host[len(PER_CALL) :] if x is not None]
        parts = Parts(own, others, list(numbers.integers), list(numbers.reals))
        position, options = read(self.written, parts)
        names = {id(x): name for name, x in tables_of(position).items()}
        return _Call(position, options | numbers.per_call(), [names.get(id(x), "") for x in own])


class _Numbers(NamedTuple):
    """What of a call changes from one to the next, as the operation takes it."""

    host: Sequence[Tensor | None]  # those of PER_CALL, then others of _Written
    integers: Sequence[int]
    reals: Sequence[float]
    seed: int

    def others(self) -> list[Tensor]:
        """Labels, positions and masks of _Written, of which terms are made too."""
        return [x for x in self.host[len(PER_CALL) :] if x is not None]

    def per_call(self) -> dict[str, Any]:
        """As keyword arguments. The host reads them: what lies on a GPU is copied, and waited for."""
        given = dict(zip(PER_CALL, self.host[: len(PER_CALL)], strict=True))
        found: dict[str, Any] = {
            name: None if x is None else x.cpu().numpy()
            for name, x in given.items()
            if x is not None or name != "mask"  # which may be among the options
        }
        return found | {"seed": self.seed}


_Version = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, int]


class _Lowering(NamedTuple):
    """A scheme's terms, kept from forward to its backward: some are products to be made."""

    name: str
    versions: list[_Version]
    integers: list[int]
    reals: list[float]
    tables: list[Tensor]  # and others; held, or others could come to lie where they did
    shape: Shape
    stream: int  # it was made on
    lowered: Lowered


def _versions(tables: Sequence[Tensor]) -> list[_Version] | None:
    """Which memory the tables are, and how often torch has seen it change; None: it does not count.
    Views of one tensor may begin where it does."""
    if any(table.is_inference() for table in tables):
        return None
    return [(x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x._version) for x in tables]


_numbers = itertools.count(1)
_kept: weakref.WeakValueDictionary[str, _Kept] = weakref.WeakValueDictionary()
_written = functools.lru_cache(maxsize=256)(_Written)


def _spec_of(name: str) -> _Spec:
    if name.startswith("["):
        return _written(name)
    if name not in _kept:
        raise RuntimeError(
            "relpos.torch: this graph is that of a module of another process; compile it here"
        )
    return _kept[name]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Sequence[Tensor],
    host: Sequence[Tensor | None],
    integers: Sequence[int],
    reals: Sequence[float],
    seed: int,
    spec: str,
) -> tuple[Tensor, Tensor]:
    known = _spec_of(spec)
    activations = (_array_of(x) for x in (q, k, v))
    try:
        numbers = _Numbers(host, integers, reals, seed)
        call = known.over(tables, numbers)
        out, ctx = attention_forward(*activations, position=call.position, **call.options)
    except ValueError as error:  # the core tells what to do to an array
        raise ValueError(str(error).replace(".copy()", ".contiguous()")) from error
    made_of = [*tables, *numbers.others()]
    versions = _versions(made_of)
    known.holder().last = None
    if versions is not None:
        held = [x.detach() for x in made_of]
        known.holder().last = _Lowering(
            known.name, versions, [*integers], [*reals], held, ctx.shape, _stream_of(q), ctx.lowered
        )
    return _tensor_of(out), _tensor_of(ctx.lse)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: Sequence[Tensor],
    host: Sequence[Tensor | None],
    integers: Sequence[int],
    reals: Sequence[float],
    seed: int,
    spec: str,
) -> list[Tensor]:
    known = _spec_of(spec)
    numbers = _Numbers(host, integers, reals, seed)
    call = known.over(tables, numbers)
    q_, k_, v_, out_, lse_ = (_array_of(x) for x in (q, k, v, out, lse))
    request = read_request(q_, k_, v_, None, **call.options)
    assert request.shape is not None
    lowered = known.lowering(tables, numbers, request.shape, _stream_of(q))
    ctx = context_of(request, call.position, out_, lse_, lowered)
    if dout.stride(-1) != 1 and dout.shape[-1] > 1:  # as the gradient of a sum is: expanded
        dout = dout.contiguous()
    found = attention_backward(ctx, _array_of(dout))
    result = [_tensor_of(x) for x in (found.q, found.k, found.v)]
    for name, table in zip(call.names, tables, strict=True):
        gradient = found.get(name)
        if gradient is None:
            result.append(torch.zeros_like(table, memory_format=torch.contiguous_format))
        else:
            result.append(_tensor_of(gradient).to(table.dtype).contiguous())
    return result


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    layout = _spec_of(rest[-1]).layout
    if q.ndim == 3:  # packed
        numbers = [q.shape[1], q.shape[0]]
    else:
        numbers = [q.shape[axis] for axis in ((0, 1, 2) if layout == "bhnd" else (0, 2, 1))]
    lse = torch.float32 if q.dtype == torch.bfloat16 else q.dtype
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(numbers, dtype=lse)


def _backward_shapes(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, *rest[0])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tables, host, *ctx.numbers, ctx.spec = inputs
    ctx.tables = len(tables)
    ctx.known = _spec_of(ctx.spec)  # or nobody might hold it when backward comes
    ctx.nothing = [_nothing(x) for x in (host, *ctx.numbers)]
    ctx.save_for_backward(q, k, v, *output, *tables, *host)


def _nothing(x: Any) -> Any:
    """The gradient of what has none: torch wants a list for a list of tensors, and for an empty one."""
    of_tensors = isinstance(x, list) and all(isinstance(each, Tensor) for each in x)
    return [None] * len(x) if of_tensors else None


def _differentiate(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, *rest = ctx.saved_tensors
    tables, host = rest[: ctx.tables], rest[ctx.tables :]
    found = _backward_operation(dout, q, k, v, out, lse, tables, host, *ctx.numbers, ctx.spec)
    return (*found[:3], list(found[3:]), *ctx.nothing, None)


# What the host stages for a call is not there again when a CUDA graph is replayed. Older versions of
# torch have no word for that.
_unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
_how: dict[str, Any] = {"mutates_args": (), "device_types": ("cpu", "cuda")}
_how |= {} if _unsafe is None else {"tags": (_unsafe,)}
_operation: Any = torch.library.custom_op("relpos::attention", **_how)(_forward)
_operation.register_fake(_forward_shapes)
_operation.register_autograd(_differentiate, setup_context=_save)
_backward_operation: Any = torch.library.custom_op("relpos::attention_backward", **_how)(_backward)
_backward_operation.register_fake(_backward_shapes)


def _check(q: Any, k: Any, v: Any) -> None:
    """Whether these are tensors that attention takes. torch.compile reads this too."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.device.type not in ("cpu", "cuda"):
            raise TypeError(
                f"{name}: lies on {x.device}, relpos computes on the CPU and on NVIDIA GPUs; "
                f"use {name}.cpu()"
            )
        if x.device != q.device:
            raise TypeError(f"{name}: lies on {x.device}, q on {q.device}; use {name}.to(q.device)")
        _check_type(name, x, q)
        if x.dim() > 0 and x.shape[-1] > 1 and x.stride(-1) != 1 and x.numel() > 0:
            raise ValueError(
                f"{name}: the numbers of its last axis lie {x.stride(-1)} apart, expected side by "
                f"side; use {name}.contiguous()"
            )


_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # from torch 2.7 on


def _host(*counts: Any) -> list[Tensor | None]:
    """Lengths, offsets and starts as tensors, in the order of PER_CALL."""
    if torch.compiler.is_compiling():
        return [None if x is None else torch.as_tensor(x) for x in counts]
    return [
        None if x is None else _count(name, x)
        for name, x in zip(PER_CALL[:-1], counts, strict=True)
    ]


def _count(name: str, x: Any) -> Tensor:
    if isinstance(x, int | np.integer | list | tuple | np.ndarray | str):
        found = integers(name, x)  # of torch's own byte order and strides, with sentences of ours
        assert found is not None
        return torch.from_numpy(found)
    return torch.as_tensor(x)  # a tensor, or another library's array, on a GPU too


def _check_mask(mask: Any) -> None:
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a bool tensor, got {type(mask).__name__}")
    if mask is not None and mask.dtype != torch.bool:
        got = str(mask.dtype).removeprefix("torch.")
        raise TypeError(f"mask: expected a bool tensor, got {got}; use mask.bool()")


def _check_seed(seed: Any) -> int:
    """seed as torch takes it: below 2^63."""
    if torch.compiler.is_compiling():
        return seed  # type: ignore[no-any-return]
    expected = f"seed: expected an integer from 0 to 2^63 - 1, got {seed!r}"
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(expected) from None
    if not 0 <= number < 1 << 63:
        raise ValueError(expected)
    return number


def _check_type(name: str, x: Tensor, q: Tensor) -> None:
    real = str(np.dtype(arrays.REAL))
    got = str(x.dtype).removeprefix("torch.")
    if not _is_on_gpu(x):
        if got != real:
            raise TypeError(f"{name}: expected {real}, got {got}; use {name}.float()")
    elif got not in ("float32", "bfloat16"):
        raise TypeError(f"{name}: expected float32 or bfloat16, got {got}; use {name}.float()")
    elif x.dtype != q.dtype:
        own = str(q.dtype).removeprefix("torch.")
        raise TypeError(f"{name}: expected {own} as q, got {got}; use {name}.to(q.dtype)")


class Attention(torch.nn.Module):
    """`relpos.attention` as a module: the scheme and the options once, tensors with every call.

    position: as in `relpos.attention`. Those of its parameters that are `torch.nn.Parameter` become
        the module's, by their names, and may be replaced there; any tensor that requires a gradient
        gets one.
    causal, window, layout, scale, softcap, dropout, precision: as in `relpos.attention`. Dropout is
        applied in training alone, as in torch.

    May be called in code that torch.compile compiles.
    """

    def __init__(
        self,
        position: Position = None,
        *,
        causal: bool = False,
        window: Window = None,
        layout: Layout = "bhnd",
        scale: float | None = None,
        softcap: float = 0.0,
        dropout: float = 0.0,
        precision: str = "f32",
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "causal": causal,
            "window": window,
            "layout": layout,
            "scale": scale,
            "softcap": softcap,
            "dropout": dropout,
            "precision": precision,
            "mask": None,
        }
        self._training = _Kept(position, options)
        self._evaluation = _Kept(position, options | {"dropout": 0.0})
        tensors = self._training.tensors
        self._own = [name for name, x in tensors.items() if isinstance(x, torch.nn.Parameter)]
        for name in self._own:
            self.register_parameter(name, tensors[name])

    def _tables(self) -> list[Tensor]:
        """The tensors of the scheme; the module's parameters as they are now, torch replaces them."""
        tensors = self._training.tensors
        return [getattr(self, name) if name in self._own else tensors[name] for name in tensors]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: Any = None,
        key_lengths: Any = None,
        offsets: Any = None,
        key_offsets: Any = None,
        query_start: Any = None,
        mask: Tensor | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Tensors as `attention` takes them; integers for lengths, offsets and query_start, best as
        tensors on the CPU; a bool tensor for mask, not with offsets: `attention` takes packed
        masks. seed: below 2^63, another one every step.

        Cannot be exported (`torch.export`); `attention` can."""
        if _is_exporting():
            raise RuntimeError(
                "relpos.torch: an Attention module cannot be exported, its scheme being known to "
                "this process alone; call relpos.torch.attention in a module of your own, which can"
            )
        _check(q, k, v)
        _check_mask(mask)
        seed = _check_seed(seed)
        spec, tables = self._training if self.training else self._evaluation, self._tables()
        _check_tangents(q, k, v, *tables)
        host = _host(lengths, key_lengths, offsets, key_offsets, query_start) + [mask]
        out: Tensor = _operation(q, k, v, tables, host, [], [], seed, spec.name)[0]
        return out


def _check_tangents(*tensors: Tensor) -> None:
    """Forward-mode derivatives: torch would take them to be zero, and say nothing."""
    if torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError("relpos.torch: has no forward-mode derivatives (jvp, jacfwd)")


_as_text: Any = torch.compiler.assume_constant_result(as_text)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    position: Position = None,
    causal: bool = False,
    lengths: Any = None,
    key_lengths: Any = None,
    offsets: Any = None,
    key_offsets: Any = None,
    query_start: Any = None,
    mask: Mask = None,
    window: Window = None,
    layout: Layout = "bhnd",
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    seed: int = 0,
    precision: str = "f32",
) -> Tensor:
    """`relpos.attention` of tensors, differentiable by q, k, v and the parameters of `position`.

    q, k, v: float32 tensors on the CPU, or float32 or bfloat16 ones on one GPU, used where they
        lie.
    position: a scheme, or a tuple of them, made of tensors (`relpos.Shaw(key_table)` with tensors
        that may require gradients) or of arrays, which then are constants.
    lengths, key_lengths, offsets, key_offsets, query_start: integers, as tensors or otherwise. The
        host reads them: tensors on a GPU are copied, and waited for. So is a mask.
    mask: a bool tensor, or as `relpos.attention` takes it.
    seed: int below 2^63.
    The others as in `relpos.attention`.

    Returns a new tensor, of the type of q. Gradients of bfloat16 tables are summed in float32; a
    tensor that is several parameters gets the sum of theirs. In code that torch.compile compiles
    schemes may be made where they are used, but for those with labels or positions: these come from
    outside, and their arrays may then be others in every call.
    """
    _check(q, k, v)
    dense = mask if isinstance(mask, Tensor) else None
    _check_mask(dense)
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "layout": layout,
        "scale": scale,
        "softcap": softcap,
        "dropout": dropout,
        "precision": precision,
        "mask": mask if dense is None else None,
    }
    host = _host(lengths, key_lengths, offsets, key_offsets, query_start) + [dense]
    seed = _check_seed(seed)
    if torch.compiler.is_compiling():
        parts = Parts([], [], [], [])
        spec = _as_text(write((schemes_of(position), options), parts))
        tables, host = parts.tables, host + parts.arrays
        found = _operation(q, k, v, tables, host, parts.integers, parts.reals, seed, spec)
    else:
        kept = _Kept(position, options)
        tables = list(kept.tensors.values())
        _check_tangents(q, k, v, *tables)
        found = _operation(q, k, v, tables, host, [], [], seed, kept.name)
    out: Tensor = found[0]
    return out
