# SPDX-License-Identifier: Apache-2.0
"""Attention maps as one HTML page to click through: `AttentionViewer`.

The page is page.html with viewer.css, the scripts and the data put into it. It asks no network for
anything, and nothing in it comes from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from relpos.data.files import write_output
from relpos.model_maps import ModelMaps
from relpos.position.arrays import describe
from relpos.viewer.packing import pack_model_maps

# In this order they are one script.
SCRIPTS = ("numbers.js", "colours.js", "matrix.js", "lines.js", "panels.js", "viewer.js")


class AttentionViewer:
    """An interactive page that shows attention maps, and how much of them is relative position.

        viewer = relpos.AttentionViewer(relpos.attention_maps(model, source, target))
        viewer.save("maps.html")        # one file that opens from disk, without a network
        display(viewer)                 # in a notebook

    maps: `ModelMaps`, or several of them, among which the page has a choice.
    title: str. What stands above. None: the first sentence's tokens.
    height: int. Of the frame in a notebook, in pixels, at least 200.

    The page holds the maps as 16-bit numbers: probabilities to 7.6e-6, the logits of a head to
    1 / 65534 of its largest.
    """

    def __init__(
        self, maps: ModelMaps | Sequence[ModelMaps], *, title: str | None = None, height: int = 760
    ) -> None:
        several = [maps] if isinstance(maps, ModelMaps) else maps
        if isinstance(several, str | bytes) or not isinstance(several, Sequence):
            raise TypeError(f"maps: expected ModelMaps or a list of them, got {describe(maps)}")
        if not several:
            raise ValueError("maps: expected ModelMaps or a list of them, got an empty list")
        for number, each in enumerate(several):
            if not isinstance(each, ModelMaps):
                raise TypeError(f"maps[{number}]: expected ModelMaps, got {describe(each)}")
        if not isinstance(title, str | None):
            raise TypeError(f"title: expected str or None, got {describe(title)}")
        if not isinstance(height, int) or isinstance(height, bool) or height < 200:
            raise ValueError(f"height: expected an int of 200 or more, got {height!r}")
        names = ["maps"] if several is not maps else [f"maps[{i}]" for i in range(len(several))]
        packed = [pack_model_maps(each, n) for each, n in zip(several, names, strict=True)]
        self.title = _title(several[0]) if title is None else title
        self.height = height
        self._data = _as_json({"title": self.title, "sentences": packed})
        self._shows = f"{len(several)} sentence{'s'[: len(several) > 1]}: {_shows(packed[0])}"

    def html(self) -> str:
        """The page."""
        script = "\n".join(_file(name) for name in SCRIPTS)
        style = _file("viewer.css")
        return Template(_file("page.html")).substitute(
            title=_as_ascii(self.title),
            script_hash=_hash(script),
            style_hash=_hash(style),
            style=style,
            script=script,
            data=self._data,
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page to a file."""
        target = Path(path)
        write_output(target, self.html().encode())
        return target

    def _repr_html_(self) -> str:
        # In a frame of its own neither its style nor its script meets those of the notebook.
        return (
            '<iframe sandbox="allow-scripts" style="width: 100%; border: 0; border-radius: 8px" '
            f'height="{self.height}" title="{_as_ascii(self.title)}" '
            f'srcdoc="{html.escape(self.html())}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"AttentionViewer({self.title!r}, {self._shows})"


def _file(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """By which the page's policy knows its own script and style, and no other runs."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _as_ascii(text: str) -> str:
    """As HTML has it, also what no encoding can write: half of a surrogate pair."""
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _as_json(data: Any) -> str:
    """JSON that cannot end the <script> around it: no `<` is left, and nothing but ASCII."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _title(maps: ModelMaps) -> str:
    tokens = maps.source_tokens or maps.target_tokens
    pieces = any("▁" in token for token in tokens)  # sentencepiece's mark of a space
    words = [token for token in tokens if not re.fullmatch(r"</?\w+>", token)]  # no </s>
    text = "".join(words).replace("▁", " ").strip() if pieces else " ".join(tokens)
    return text if len(text) <= 80 else text[:79] + "…"


def _shows(packed: dict[str, Any]) -> str:
    """The kinds of a sentence, as "encoder 6 x 8, 12 x 12"."""
    return ", ".join(
        "{} {} x {}, {} x {}".format(kind, *of_kind["shape"])
        for kind, of_kind in packed["kinds"].items()
    )
