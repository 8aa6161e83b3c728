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

import inspect
from typing import Any

try:
    import torch
except ImportError:
    raise ImportError("relpos.torch: takes torch, `pip install 'relpos[torch]'`") from None
from torch import Tensor

from relpos.position.arrays import check_constant
from relpos.position.combine import Position, schemes_of, with_tables
from relpos.position.written import Parts, as_text, write
from relpos.request import Layout, Mask, Window
from relpos.torch.arguments import (
    as_autocast,
    check_host,
    check_mask,
    check_parameters,
    check_seed,
    check_tensors,
    check_transforms,
    host_of,
    precision_for,
)
from relpos.torch.calls import Kept
from relpos.torch.operation import OPERATION

__all__ = ["Attention", "attention"]


class Attention(torch.nn.Module):
    """`relpos.attention` as a module: the scheme and the options once, tensors with every call.

    position: as in `relpos.attention`. Those of its parameters that are `torch.nn.Parameter` become
        the module's, by their names, and may be replaced there; any tensor that requires a gradient
        gets one.
    causal, window, layout, scale, softcap, dropout: as in `relpos.attention`. Dropout is applied in
        training mode alone, as in torch. What is dropped follows from the `seed` of the call: give
        another one at every step.
    precision: as in `attention` of this module.

    May be called in code that torch.compile compiles, and in a model that torch.export exports.
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
        precision: str | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "causal": causal,
            "window": window,
            "layout": layout,
            "scale": scale,
            "softcap": softcap,
            "dropout": dropout,
            "mask": None,
        }
        self._precision = precision
        self._kept = {
            (training, name): Kept(position, options | {"precision": name} | dropped)
            for training, dropped in ((True, {}), (False, {"dropout": 0.0}))
            for name in (("f32", "bf16") if precision is None else (precision,))
        }
        tensors = self._a_kept().tensors
        self._own = [name for name, x in tensors.items() if isinstance(x, torch.nn.Parameter)]
        for name in self._own:
            self.register_parameter(name, tensors[name])

    def extra_repr(self) -> str:
        """The schemes, their tensors, and the options that are not as they come."""
        kept, usual = self._a_kept(), inspect.signature(Attention).parameters
        schemes = [type(x).__name__ for x in schemes_of(kept.position)]
        now = {name: getattr(self, name, None) for name in self._own}  # None: taken away
        tables = [
            f"{name}={None if x is None else tuple(x.shape)}"
            for name, x in (kept.tensors | now).items()
        ]
        options = kept.options | {"precision": self._precision}
        options = {x: options[x] for x in usual if x != "position"}
        said = [f"{x}={y!r}" for x, y in options.items() if repr(y) != repr(usual[x].default)]
        return ", ".join(schemes + tables + said)

    def _a_kept(self) -> Kept:
        """Any: all are over the same tensors."""
        return next(iter(self._kept.values()))

    def _tables(self) -> list[Tensor]:
        """The tensors of the scheme; the module's parameters as they are now, torch replaces them."""
        tensors = self._a_kept().tensors
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
        masks. seed: below 2^63, another one every step."""
        precision = precision_for(q, self._precision)
        spec, tables = self._kept[self.training, precision], self._tables()
        if torch.compiler.is_compiling():  # a graph that knows no module serves all that are alike
            own = spec.arrays | dict(zip(spec.tensors, tables, strict=True))
            return attention(
                q, k, v, position=with_tables(spec.position, own), lengths=lengths,
                key_lengths=key_lengths, offsets=offsets, key_offsets=key_offsets,
                query_start=query_start, seed=seed, **(spec.options | {"mask": mask}),
            )  # fmt: skip
        q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
        check_tensors(q, k, v)
        check_mask(mask)
        seed = check_seed(seed)
        check_parameters(zip(spec.tensors, tables, strict=True))
        check_transforms(q, k, v, *tables)
        host = host_of(lengths, key_lengths, offsets, key_offsets, query_start) + [mask]
        check_host(host)
        host = host + spec.others
        out: Tensor = OPERATION(q, k, v, tables, host, [], [], seed, spec.name)[0]
        if not out.requires_grad:
            spec.last = None  # nobody comes back for it
        return out


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
    precision: str | None = None,
) -> Tensor:
    """`relpos.attention` of tensors, differentiable by q, k, v and the parameters of `position`.

    q, k, v: float32 tensors on the CPU, or float32 or bfloat16 ones on one GPU, used where they
        lie.
    position: a scheme, or a tuple of them, made of tensors (`relpos.Shaw(key_table)` with tensors
        that may require gradients; float32, or bfloat16, which is widened) or of arrays, which then
        are constants.
    lengths, key_lengths, offsets, key_offsets, query_start: integers, as tensors or otherwise. The
        host reads them: tensors on a GPU are copied, and waited for. So is a mask.
    mask: a bool tensor, or as `relpos.attention` takes it.
    seed: int below 2^63.
    precision: "f32", "bf16", or None: "f32", but within torch.autocast what is said below.
    The others as in `relpos.attention`.

    Within torch.autocast of bfloat16, q, k and v become bfloat16 tensors on a GPU, and float32 ones
    with the precision "bf16" on the CPU. Within that of float16, which relpos does not have, they
    become float32. A program of torch.export keeps what held when it was traced.

    Returns a new tensor, of the type of q. Gradients of bfloat16 tables are summed in float32; a
    tensor that is several parameters gets the sum of theirs. In code that torch.compile compiles
    schemes of tensors may be made where they are used; those over arrays of NumPy, labels or
    positions come from outside, and their arrays may then be others in every call.
    """
    precision = precision_for(q, precision)
    q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
    check_tensors(q, k, v)
    dense = mask if isinstance(mask, Tensor) else None
    check_mask(dense)
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
    host = host_of(lengths, key_lengths, offsets, key_offsets, query_start) + [dense]
    check_host(host)
    for name, number in (("scale", scale), ("softcap", softcap), ("dropout", dropout)):
        if isinstance(number, Tensor):
            check_constant(name, number)
    seed = check_seed(seed)
    if torch.compiler.is_compiling():
        parts = Parts([], [], [], [])
        spec = _as_text(write((schemes_of(position), options), parts))
        tables, host = parts.tables, host + parts.arrays
        check_parameters([("position", x) for x in tables])
        # programs of AOTInductor make None of an empty list
        tables, integers = tables or [q.new_zeros(0)], parts.integers or [0]
        found = OPERATION(q, k, v, tables, host, integers, parts.reals, seed, spec)
    else:
        kept = Kept(position, options)
        tables = list(kept.tensors.values())
        check_parameters(kept.tensors.items())
        check_transforms(q, k, v, *tables)
        host = host + kept.others
        found = OPERATION(q, k, v, tables, host, [], [], seed, kept.name)
    out: Tensor = found[0]
    return out
