# SPDX-License-Identifier: Apache-2.0
"""The operation `torch.ops.relpos.attention`: forward, backward, shapes of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relpos.attention import attention_backward, attention_forward, context_of
from relpos.position.arrays import describe
from relpos.request import read_request
from relpos.torch.calls import Lowering, Numbers, spec_of, versions_of
from relpos.torch.tensors import array_of, stream_of, tensor_of


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
    known = spec_of(spec)
    activations = (array_of(x) for x in (q, k, v))
    try:
        numbers = Numbers(host, integers, reals, seed)
        call = known.over(tables, numbers)
        out, ctx = attention_forward(*activations, position=call.position, **call.options)
    except ValueError as error:  # which tells what to do to an array
        said = str(error).replace(".copy()", ".contiguous()")
        raise ValueError(said.replace("np.broadcast_to(mask, ", "mask.expand(")) from error
    made_of = [*tables, *numbers.others()]
    versions = versions_of(made_of)
    known.holder().last = None
    if versions is not None:
        held = [x.detach() for x in made_of]
        known.holder().last = Lowering(
            known.name, versions, [*integers], [*reals], held, ctx.shape, stream_of(q), ctx.lowered
        )
    return tensor_of(out), tensor_of(ctx.lse)


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
    known = spec_of(spec)
    numbers = Numbers(host, integers, reals, seed)
    call = known.over(tables, numbers)
    q_, k_, v_, out_, lse_ = (array_of(x) for x in (q, k, v, out, lse))
    request = read_request(q_, k_, v_, None, **call.options)
    assert request.shape is not None
    lowered = known.lowering(tables, numbers, request.shape, stream_of(q))
    ctx = context_of(request, call.position, out_, lse_, lowered)
    if dout.stride(-1) != 1 and dout.shape[-1] > 1:  # as the gradient of a sum is: expanded
        dout = dout.contiguous()
    found = attention_backward(ctx, array_of(dout))
    result = [tensor_of(x) for x in (found.q, found.k, found.v)]
    for name, table in zip(call.names, tables, strict=True):
        gradient = found.get(name)
        if gradient is None:
            result.append(torch.zeros_like(table, memory_format=torch.contiguous_format))
        else:
            result.append(tensor_of(gradient).to(table.dtype).contiguous())
    return result


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    layout = spec_of(rest[-1]).layout
    for name, x, rows, width in (("q", q, "N", "D"), ("v", v, "M", "Dv")):
        if x.ndim not in (3, 4):
            axes = f"H, {rows}" if layout == "bhnd" else f"{rows}, H"
            raise ValueError(
                f"{name}: expected (B, {axes}, {width}), or packed (tokens, H, {width}), "
                f"got {describe(x)}"
            )
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
    ctx.known = spec_of(ctx.spec)  # or nobody might hold it when backward comes
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


def _refuse(*_: Any) -> None:
    raise RuntimeError("relpos.torch: has no gradients of gradients (double backward)")


# What the host stages for a call is not there again when a CUDA graph is replayed. Older versions of
# torch have no word for that.
_unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
_how: dict[str, Any] = {"mutates_args": (), "device_types": ("cpu", "cuda")}
_how |= {} if _unsafe is None else {"tags": (_unsafe,)}
OPERATION: Any = torch.library.custom_op("relpos::attention", **_how)(_forward)
OPERATION.register_fake(_forward_shapes)
OPERATION.register_autograd(_differentiate, setup_context=_save)
_backward_operation: Any = torch.library.custom_op("relpos::attention_backward", **_how)(_backward)
_backward_operation.register_fake(_backward_shapes)
_backward_operation.register_autograd(_refuse)
