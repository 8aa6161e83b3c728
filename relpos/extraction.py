# SPDX-License-Identifier: Apache-2.0
"""`relpos.attention_maps`, of a model: from sentences to `ModelMaps`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from relpos import maps
from relpos.batch import Batch, packed
from relpos.maps import AttentionMaps, Choice
from relpos.model import ATTENTIONS, Transformer
from relpos.model_maps import KINDS, ModelMaps
from relpos.position.arrays import Given, check_choice, check_integers, check_truth, describe
from relpos.position.combine import Position
from relpos.request import Integers, Layout, Mask, Window
from relpos.translation import why_failed

if TYPE_CHECKING:
    from relpos.data.subwords import Side
    from relpos.data.vocabulary import Subwords
    from relpos.search import Search
    from relpos.translator import Translator

Names = str | Iterable[str]


@overload
def attention_maps(
    q: Given,
    k: Given,
    v: Given | None = None,
    *,
    position: Position = None,
    causal: bool = False,
    lengths: Integers | None = None,
    key_lengths: Integers | None = None,
    offsets: Integers | None = None,
    key_offsets: Integers | None = None,
    query_start: Integers | None = None,
    mask: Mask = None,
    window: Window = None,
    layout: Layout = "bhnd",
    scale: float | None = None,
    softcap: float = 0.0,
    precision: str = "f32",
    heads: Choice = None,
    rows: Choice = None,
    sequences: Choice = None,
    parts: str | Iterable[str] = ("probabilities",),
) -> AttentionMaps: ...


@overload
def attention_maps(
    model: Translator,
    source: str | None,
    target: str | None = None,
    *,
    kinds: Names | None = None,
    layers: Choice = None,
    heads: Choice = None,
    parts: Names = "all",
    dropout: bool = False,
    search: Search | None = None,
) -> ModelMaps: ...


@overload
def attention_maps(
    model: Translator,
    source: list[str] | tuple[str, ...],
    target: list[str] | tuple[str, ...] | None = None,
    *,
    kinds: Names | None = None,
    layers: Choice = None,
    heads: Choice = None,
    parts: Names = "all",
    dropout: bool = False,
    search: Search | None = None,
) -> list[ModelMaps]: ...


@overload
def attention_maps(
    model: Transformer,
    source: Batch,
    *,
    kinds: Names | None = None,
    layers: Choice = None,
    heads: Choice = None,
    parts: Names = "all",
    dropout: bool = False,
) -> list[ModelMaps]: ...


@overload
def attention_maps(
    model: Transformer,
    source: Integers | None,
    target: Integers | None = None,
    *,
    kinds: Names | None = None,
    layers: Choice = None,
    heads: Choice = None,
    parts: Names = "all",
    dropout: bool = False,
) -> ModelMaps: ...


def attention_maps(*given: Any, **options: Any) -> Any:
    """Where attention looks, and why: of a model on a sentence, or of arrays.

        maps = relpos.attention_maps(translator, "Two dogs run through the snow.")
        maps = relpos.attention_maps(translator, "Two dogs run.", "Zwei Hunde rennen.")
        maps = relpos.attention_maps(model, [7, 4, 9], [1, 6, 8], layers=-1, heads=[0, 3])
        for each in relpos.attention_maps(model, batch, kinds="cross"): ...

    model: a `Translator`, whose vocabulary cuts text into tokens and writes them, or a
        `Transformer`, whose tokens are numbers.
    source: str, or int (n,) for a `Transformer`; None for a decoder alone. Or a list of str; or a
        `Batch`, which has the target as well, and graphs.
    target: as source. Of a `Transformer` it is what the decoder reads, the begin token first.
        None: a `Translator` translates the source, or goes on from it, and the maps are those of
        what it says; where kinds is "encoder" no target is needed.
    kinds: "encoder", "decoder", "cross", or several. None: all that the model has.
    layers, heads: which, each an int, a slice, or ints; negative ones count from the last. None:
        all. The axes stay, whatever is chosen.
    parts: the names of what is wanted, or "all": "probabilities", "logits", "content", and the
        relation terms by the parameter that is their table ("key_table", "bias_table", "slopes").
        Left out: "all" of a model, "probabilities" alone of arrays.
    dropout: bool. Behind the dropout that the next training step of this batch would draw. The
        probabilities are those before attention's own dropout in any case.
    search: Search. How a `Translator` translates where target is None.

    Returns `ModelMaps`; of a list or a `Batch` a list of them.

    All of it comes from one pass over the batch, which ends behind the last layer that is asked
    for. The model stays as it is: weights, gradients, what is accumulated and its counters. Memory
    is that of what is returned: (layers, heads, queries, keys) for each name and kind.

    Of arrays q, k and v, which may come first as well, it is `relpos.maps.attention_maps`, which see:
    position to precision, heads, rows, sequences and parts are of that.
    """
    whose = given[0] if given else options.get("model")
    # whoever has a Translator has imported its module
    translators = sys.modules.get("relpos.translator")
    door: Callable[..., Any] = maps.attention_maps
    if isinstance(whose, Transformer):
        door = _of_transformer
    elif translators is not None and isinstance(whose, translators.Translator):
        door = _of_translator
    names = [*inspect.signature(door).parameters]
    for name in options:
        if name not in names:
            what = "arrays" if door is maps.attention_maps else f"a {type(whose).__name__}"
            raise TypeError(
                f"attention_maps: of {what} there is no {name!r}, only {', '.join(names)}"
            )
    return door(*given, **options)


def _of_transformer(
    model: Transformer,
    source: Any,
    target: Any = None,
    *,
    kinds: Names | None = None,
    layers: Choice = None,
    heads: Choice = None,
    parts: Names = "all",
    dropout: bool = False,
) -> ModelMaps | list[ModelMaps]:
    wanted = _Wanted.read(model, kinds, layers, heads, parts)
    if isinstance(source, Batch):
        if target is not None:
            raise TypeError("target: expected None beside a Batch, which has the targets itself")
        return wanted.of(model, source, dropout)
    sides: list[Any] = []
    for name, given, stack in (
        ("source", source, model.config.encoder),
        ("target", target, model.config.decoder),
    ):
        if given is None and stack.layers > 0:
            if name == "source" or set(wanted.parts) != {"encoder"}:
                raise ValueError(f"{name}: expected the tokens that the model reads, got None")
            given = ()  # which the encoder does not see
        tokens = None if given is None else check_integers(name, given, "(n,)", (1,))
        sides += (None, None) if tokens is None else (tokens, [0, tokens.size])
    [found] = wanted.of(model, Batch(*sides), dropout)
    return found


def _of_translator(
    model: Translator,
    source: Any,
    target: Any = None,
    *,
    kinds: Names | None = None,
    layers: Choice = None,
    heads: Choice = None,
    parts: Names = "all",
    dropout: bool = False,
    search: Search | None = None,
) -> ModelMaps | list[ModelMaps]:
    from relpos.translator import unknown_in, warn_of_unknown

    if len(model.models) != 1:
        raise ValueError(
            f"model: expected one, got an ensemble of {len(model.models)}: "
            "Translator(translator.models[0], translator.subwords) is its first"
        )
    wanted = _Wanted.read(model.models[0], kinds, layers, heads, parts)
    alone = isinstance(source if source is not None else target, str)
    sources, targets = _texts("source", source, alone), _texts("target", target, alone)
    if targets is None:
        if sources is None:
            raise ValueError("source: expected text, got None for it and for target")
        if set(wanted.parts) == {"encoder"}:
            if search is not None:
                raise ValueError("search: expected None where kinds is 'encoder'")
            lines = model._given(sources, [""] * len(sources))
        else:
            lines = _said(model, sources, search)
    elif search is not None:
        raise ValueError("search: expected None where target is given")
    else:
        lines = model._given(sources, targets)
    if targets is not None or set(wanted.parts) == {"encoder"}:  # _said has warned of its own
        warn_of_unknown(*unknown_in(lines))
    found: dict[int, ModelMaps] = {}
    for several in model._batches(lines, model._budget(None), 1):
        batch = model._packed(several)
        each = wanted.of(model.models[0], batch, dropout, model.subwords)
        found |= zip((line.line for line in several), each, strict=True)
    in_order = [found[line.line] for line in lines]
    return in_order[0] if alone else in_order


def _together(*doors: Callable[..., Any]) -> inspect.Signature:
    """The options of all, by name: what help() shows. ...: none of them alone has to be given, or the
    forms have defaults of their own."""
    shown = {"given": inspect.Parameter("given", inspect.Parameter.VAR_POSITIONAL)}
    for door in doors:
        for name, option in inspect.signature(door).parameters.items():
            own = ... if option.default is inspect.Parameter.empty else option.default
            option = option.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=own)
            first = shown.setdefault(name, option)
            if first.default != own:
                shown[name] = first.replace(default=...)
    return inspect.Signature([*shown.values()])


for _form in (_of_transformer, _of_translator):
    _form.__qualname__ = "attention_maps"  # as Python's own errors shall call them
attention_maps.__signature__ = _together(  # type: ignore[attr-defined]
    _of_translator, _of_transformer, maps.attention_maps
)


def _texts(name: str, given: Any, alone: bool) -> list[str] | None:
    if given is None:
        return None
    if not isinstance(given, Iterable):
        raise TypeError(f"{name}: expected str or several, got {type(given).__name__}")
    several = [given] if isinstance(given, str) else list(given)
    for text in several:
        if not isinstance(text, str):
            raise TypeError(f"{name}: expected str or several, got {type(text).__name__}")
    if isinstance(given, str) != alone:
        raise TypeError(
            f"{name}: expected {'str' if alone else 'several str'} as on the other side, "
            f"got {type(given).__name__}"
        )
    return several


def _said(model: Translator, sources: list[str], search: Search | None) -> list[Any]:
    """Lines with what the model makes of them."""
    given = (None, sources) if model.generates else (sources, [""] * len(sources))
    lines = model._encoded(0, *given, forced=True)
    found = model._said(lines, search)
    for line in lines:
        said = found[line.line]
        if said.failed:
            why = why_failed(0 if search is None else search.no_repeat)
            raise ValueError(f"source: line {line.line}: {why}")
        tokens = said.n_best[0].tokens.tolist() if said.n_best else []
        line.target = tokens[: model.max_length]
    return lines


def _pieces_of(subwords: Subwords | None, side: Side) -> Callable[[int], str]:
    """How a token of this side is written."""
    if subwords is None:
        return str
    from relpos.data.subwords import of_side

    own = of_side(subwords, side)
    return lambda token: _piece(own, token)


def _piece(subwords: Subwords, token: int) -> str:
    """A token as the vocabulary writes it, marks of words and all."""
    piece = getattr(subwords, "piece", None)
    if piece is not None:
        return str(piece(token))
    if token in (subwords.bos, subwords.eos):
        return "<s>" if token == subwords.bos else "</s>"
    return subwords.decode([token])


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is asked for, in plain numbers."""

    parts: dict[str, dict[str, int]]  # by kind: as the core calls what has a name
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    counts: dict[str, int]  # layers of each kind
    relations: dict[str, tuple[str, ...]]  # what the logits of each kind are made of beside content

    @classmethod
    def read(
        cls, model: Transformer, kinds: Names | None, layers: Choice, heads: Choice, parts: Names
    ) -> _Wanted:
        there = {
            kind: maps.WHOLE | dict(named)
            for kind in KINDS
            if (named := model._core.attention_parts(ATTENTIONS[kind]))
        }
        chosen = list(there) if kinds is None else _names("kinds", kinds)
        for kind in chosen:
            check_choice("kinds", kind, tuple(there))
        own = {kind: there[kind] for kind in there if kind in chosen}
        relations = {
            kind: tuple(name for name in named if name not in (*maps.WHOLE, "content"))
            for kind, named in own.items()
        }
        names = _names("parts", parts)
        known = {name for named in own.values() for name in named} | {"all"}
        for name in names:
            if name not in known:
                raise ValueError(
                    f"parts: there is no {name!r} here, only {', '.join(map(repr, sorted(known)))}"
                )
        if "all" not in names:
            own = {k: {n: x for n, x in named.items() if n in names} for k, named in own.items()}
        config = model.config
        counts = {
            kind: (config.encoder if kind == "encoder" else config.decoder).layers for kind in own
        }
        numbers = maps.numbers_of("layers", layers, max(counts.values(), default=0))
        if len(set(counts.values())) > 1 and _counts_from_the_last(layers):
            raise ValueError(
                f"layers: expected 0 or more, as the kinds have different ones ({counts}), "
                f"got {layers!r}"
            )
        return cls(
            own,
            tuple(numbers),
            tuple(maps.numbers_of("heads", heads, config.heads)),
            counts,
            relations,
        )

    def of(
        self, model: Transformer, batch: Batch, dropout: bool, subwords: Subwords | None = None
    ) -> list[ModelMaps]:
        """The maps of every sentence of a batch, from one pass.

        subwords: how tokens are written; None: as numbers.
        """
        dropout = check_truth("dropout", dropout)
        heads = np.array(self.heads, np.int64)
        layers = {
            kind: np.array([x for x in self.layers if x < count], np.int64)
            for kind, count in self.counts.items()
        }
        wanted = tuple(
            (ATTENTIONS[kind], show, sentence, layers[kind], heads)
            for sentence in range(batch.sentences)
            for kind, named in self.parts.items()
            for show in named.values()
        )
        arrays = iter(model._core.attention_maps(packed(batch), dropout, wanted))
        read, said = _pieces_of(subwords, "source"), _pieces_of(subwords, "target")
        sources = _pieces(batch.source, batch.source_offsets, batch.sentences, read)
        targets = _pieces(batch.target, batch.target_offsets, batch.sentences, said)
        labels = batch.labels if batch.target is not None else None
        predicted = _pieces(labels, batch.target_offsets, batch.sentences, said)
        found = []
        for sentence in range(batch.sentences):
            by_kind = {}
            for kind, named in self.parts.items():
                own = {name: next(arrays) for name in named}
                whole = own.pop("probabilities", None), own.pop("logits", None)
                by_kind[kind] = AttentionMaps(*whole, own)
            each = sources[sentence], targets[sentence], by_kind, self.layers, self.heads
            found.append(ModelMaps(*each, predicted[sentence], self.relations))
        return found


def _names(name: str, given: Any) -> list[str]:
    if not isinstance(given, Iterable):
        raise TypeError(f"{name}: expected names, got {describe(given)}")
    names = [given] if isinstance(given, str) else list(given)
    for each in names:
        if not isinstance(each, str):
            raise TypeError(f"{name}: expected names, got {describe(each)} among them")
    return names


def _counts_from_the_last(chosen: Choice) -> bool:
    if chosen is None:
        return False
    if isinstance(chosen, slice):
        return any(x is not None and x < 0 for x in (chosen.start, chosen.stop, chosen.step))
    return bool((np.asarray(chosen) < 0).any())


def _pieces(
    tokens: Any, offsets: Any, sentences: int, piece: Callable[[int], str]
) -> list[tuple[str, ...]]:
    """How the tokens of every sentence are written; "" for -1, which stands for none."""
    if tokens is None:
        return [()] * sentences
    written = [piece(token) if token >= 0 else "" for token in tokens.tolist()]
    return [tuple(written[begin:end]) for begin, end in pairwise(offsets.tolist())]
