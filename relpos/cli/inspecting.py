# SPDX-License-Identifier: Apache-2.0
"""`relpos inspect`: where a model's heads look in a sentence, and why."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.cli.arguments import (
    USAGE,
    add_command,
    add_device,
    add_threads,
    add_unpickle,
    complain,
    count,
    use_threads,
)
from relpos.cli.decoding import refuse

if TYPE_CHECKING:
    from relpos.config import Config
    from relpos.model_maps import ModelMaps
    from relpos.translator import Translator

_INSPECT_NEXT = """\
relpos inspect: what is missing is {missing}. The folder of a run, and a sentence:

  relpos inspect run --source "Two dogs run." --out maps.html
  relpos inspect run --source "Two dogs run." --kind encoder --layer 0 --head 2 --out why.png

Of a language model it is --target "Two dogs run." instead of --source.
`relpos inspect --help` lists the rest."""

PAGES, PICTURES = (".html", ".htm"), (".png", ".svg", ".pdf")
SHOWS = ("attention", "relation", "content", "logits", "offsets", "tables")


def add_commands(commands: Any) -> None:
    command = add_command(
        commands,
        "inspect",
        "draw where a model's heads look, and why",
        "The ending of --out says what comes: .html is a page to click through, with all heads; .png,\n"
        ".svg or .pdf a picture: all heads of a --kind, those of a --layer, or of one --head the parts\n"
        "of its logits, content and relative position. Without --target the model says itself what\n"
        "comes after the source. Pictures take matplotlib, `pip install 'relpos[viz]'`.",
        _inspect,
        usage="relpos inspect MODEL --source TEXT [--target TEXT] --out FILE [options]\n"
        "       relpos inspect LANGUAGE_MODEL --target TEXT --out FILE [options]",
    )
    command.add_argument("model", nargs="?", metavar="MODEL", help="as for `relpos translate`")
    command.add_argument("--source", metavar="TEXT", help="a sentence for the encoder")
    command.add_argument(
        "--target", metavar="TEXT", help="what the decoder reads (what it says itself)"
    )
    command.add_argument(
        "-o", "--out", "--output", type=Path, metavar="FILE", dest="output",
        help=f"the page or picture; {', '.join((PAGES[0], *PICTURES))}",
    )  # fmt: skip
    group = command.add_argument_group("what is drawn")
    group.add_argument(
        "--kind",
        choices=("encoder", "decoder", "cross"),
        help="which attention: of pages all that there are, of pictures one (the first)",
    )
    group.add_argument(
        "--layer", type=int, metavar="N", help="one layer, from 0 (all; of tables 0)"
    )
    group.add_argument("--head", type=int, metavar="N", help="one head, from 0 (all)")
    group.add_argument(
        "--show",
        choices=SHOWS,
        help="of a picture: attention, the logits or a part of them, attention by offset, or the "
        "tables of relations (attention; of one head of one layer what it is made of)",
    )
    running = command.add_argument_group("running")
    running.add_argument(
        "--average", type=count, metavar="N", help="the mean of a run's last N checkpoints"
    )
    running.add_argument(
        "--best", action="store_true", help="a run's checkpoint with the best validation"
    )
    add_unpickle(running)
    add_threads(running)
    add_device(running)


def _inspect(options: argparse.Namespace) -> int:
    missing = [
        name
        for name, given in (
            ("a model", options.model),
            ("--source", _given(options)),
            ("--out", options.output),
        )
        if given is None
    ]
    if missing:
        complain(_INSPECT_NEXT.format(missing=" and ".join(missing)))
        return USAGE
    ending = options.output.suffix.lower()
    if ending not in PAGES + PICTURES:
        raise ValueError(
            f"--out: expected a file that ends in {', '.join((PAGES[0], *PICTURES))}, got "
            f"{os.fspath(options.output)!r}"
        )
    if ending in PAGES:
        if options.show is not None:
            raise ValueError("--show: is for pictures; a page has all of it to choose from")
        from relpos.viewer import AttentionViewer

        maps = _maps_of(_load(options), options)
        print(AttentionViewer(maps).save(options.output))
        return 0
    from relpos import plots  # before any work: it may be missing

    plots.canvas.use_no_display()
    print(plots.save(_picture(plots, _load(options), options), options.output))
    return 0


def _given(options: argparse.Namespace) -> object:
    """What there is to look at, None if nothing. An empty sentence is there, and wrong."""
    if options.show == "tables":
        return options.show
    return options.target if options.source is None else options.source


def _load(options: argparse.Namespace) -> Translator:
    from relpos.translator import Translator

    use_threads(options)
    return Translator.load(
        options.model, average=options.average, best=options.best, unpickle=options.unpickle,
        device=options.device, precision=options.precision,
    )  # fmt: skip


def _maps_of(
    translator: Translator, options: argparse.Namespace, kind: str | None = None
) -> ModelMaps:
    import relpos

    config = translator.models[0].config
    kind = options.kind or kind
    stacks = [config.encoder.layers, config.decoder.layers]
    layers = {"encoder": stacks[0], "decoder": stacks[1], "cross": stacks[1], None: max(stacks)}
    _check_kind(config, kind)
    for name, there in (("layer", layers[kind]), ("head", config.heads)):
        if (given := getattr(options, name)) is not None and not 0 <= given < there:
            raise ValueError(f"--{name}: expected 0 to {there - 1}, got {given}")
    if options.source is None and config.encoder.layers > 0:
        raise ValueError("--source: expected a sentence: this model has an encoder")
    if options.source is not None and not options.source.strip():
        raise ValueError(f"--source: expected a sentence, got {options.source!r}")
    if options.source is not None and config.encoder.layers == 0:
        raise ValueError("--source: this model has no encoder, it goes on from text: --target")
    maps: ModelMaps = relpos.attention_maps(
        translator,
        options.source,
        options.target,
        kinds=None if kind is None else (kind,),
        layers=None if options.layer is None else (options.layer,),
        heads=None if options.head is None else (options.head,),
    )
    return maps


def _check_kind(config: Config, kind: str | None) -> None:
    if kind in ("encoder", "cross") and config.encoder.layers == 0:
        raise ValueError(f"--kind: expected decoder, got {kind}: this model has no encoder")


def _picture(plots: Any, translator: Translator, options: argparse.Namespace) -> Any:
    """What the options ask for, as a figure or its axes."""
    config = translator.models[0].config
    first = "encoder" if config.encoder.layers > 0 else "decoder"
    kind = options.kind or first
    if options.show == "tables":
        if kind == "cross":
            raise ValueError("--kind: cross attention has no tables of relations")
        _check_kind(config, kind)
        refuse(options, ("source", "target"), "is of no use to --show tables")
        model = translator.models[0]
        return plots.tables(model, kind, options.layer or 0, head=options.head)
    maps = _maps_of(translator, options, kind)
    if options.show == "relation" and not maps.relations[kind]:
        raise ValueError(f"--show: {kind} attention of this model has no relation beside content")
    if options.show == "offsets":
        if options.layer is None:
            return plots.all_by_offset(maps, kind)
        return plots.by_offset(maps, kind, options.layer)
    if options.show is None and options.layer is not None and options.head is not None:
        return plots.content_and_relation(maps, kind)
    show = "probabilities" if options.show in (None, "attention") else options.show
    return plots.heads(maps, kind, show=show)
