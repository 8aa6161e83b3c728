# SPDX-License-Identifier: Apache-2.0
"""Pictures of attention, of learned relations and of training, by matplotlib.

    maps = relpos.attention_maps(translator, "Two dogs run through the snow.")
    relpos.plots.heads(maps, "encoder")                            # every head: where it looks
    relpos.plots.content_and_relation(maps, "encoder", 0, 2)       # one head: why it looks there
    relpos.plots.by_offset(maps, "encoder", 0)                     # how far its heads look

A function that draws into one pair of axes takes `ax` and returns it; one that draws several takes
`figure`, a figure or a subfigure, and returns that. None: a new one of pyplot, which a notebook
shows. Layers and heads are counted from 0, as everywhere. docs/maps.md shows what there is.

    canvas.py   axes, tokens along them, colours
    reading.py  what is read of `ModelMaps`
    maps.py     attention maps
    offsets.py  attention by offset
    tables.py   tables of relations
    curves.py   training, BLEU by length, perplexity by place
"""

try:
    import matplotlib as _matplotlib  # noqa: F401
except ImportError:
    raise ImportError("plots: takes matplotlib, `pip install 'relpos[viz]'`") from None

from relpos.plots.canvas import save
from relpos.plots.curves import bleu_by_length, curves, perplexity_by_place
from relpos.plots.maps import (
    content_and_relation,
    head,
    heads,
    heat_map,
    moved,
)
from relpos.plots.offsets import all_by_offset, by_offset
from relpos.plots.tables import (
    table_components,
    table_norms,
    table_similarity,
    tables,
    tables_of,
)

__all__ = [
    "all_by_offset",
    "bleu_by_length",
    "by_offset",
    "content_and_relation",
    "curves",
    "head",
    "heads",
    "heat_map",
    "moved",
    "perplexity_by_place",
    "save",
    "table_components",
    "table_norms",
    "table_similarity",
    "tables",
    "tables_of",
]
