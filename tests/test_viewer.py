# SPDX-License-Identifier: Apache-2.0
"""The viewer's page, without a browser: what it holds, and that nothing in it gets out of its place.

test_viewer_browser.py opens it.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import html
import json
import os
import re
import subprocess
import sys
import threading
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos.maps import AttentionMaps
from relpos.model_maps import ModelMaps
from relpos.viewer import AttentionViewer
from small_model import small_model
from viewer_maps import ODD, changed, model_maps

OWN_CODE = 300_000  # bytes, at most
PROBABILITY = 0.5 / 65534
FOLDER = Path(relpos.viewer.__file__).parent


class Reader(HTMLParser):
    """The scripts, the frames, the title and the policy of a page, as a browser splits them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self._inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag in self.found:
            self._inside = tag
            self.found[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.found[self._inside][-1] += data


def data_of(page: str) -> Any:
    data, _ = Reader(page).found["script"]
    return json.loads(data)


def unpacked(text: str, dtype: str) -> Any:
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(2, -1)
    return np.ascontiguousarray(planes[::-1].T).view(dtype).ravel()


# ---- the page ------------------------------------------------------------------------------------


def test_our_own_code_is_light() -> None:
    viewer = AttentionViewer(model_maps())
    [data, _] = Reader(viewer.html()).found["script"]
    assert 20_000 < len(viewer.html().encode()) - len(data) < OWN_CODE


def test_the_page_asks_nothing_of_a_network() -> None:
    page = AttentionViewer(model_maps()).html()
    code = page.replace(Reader(page).found["script"][0], "")  # base64 may hold //
    asking = (
        r"https?:|//[a-z]|@import|\burl\(|\bfetch\b|XMLHttp|<link|\bimport\b|sendBeacon|WebSocket"
    )
    assert not re.search(asking, code)
    loading = ("src", "href", "srcset", "action", "poster", "data")
    for tag, attributes in Reader(page).attributes:
        assert not set(attributes) & set(loading), (tag, attributes)


def test_the_policy_knows_the_script_and_the_style_and_no_other() -> None:
    reader = Reader(AttentionViewer(model_maps()).html())
    [policy] = [a["content"] for t, a in reader.attributes if "http-equiv" in a and t == "meta"]
    [style], script = reader.found["style"], reader.found["script"][1]

    def hashed(text: str) -> str:
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert policy == (
        f"default-src 'none'; script-src '{hashed(script)}'; style-src '{hashed(style)}'"
    )


def test_nothing_in_the_code_ends_its_element() -> None:
    for path in (*FOLDER.glob("*.js"), *FOLDER.glob("*.css")):
        assert not re.search(r"</(script|style)|<!--", path.read_text(encoding="utf-8")), path.name
        assert "SPDX-License-Identifier: Apache-2.0" in path.read_text(encoding="utf-8")[:80]
    # Text of the data becomes nodes by textContent and append alone.
    code = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", code)


def test_odd_tokens_stay_in_the_data() -> None:
    plain, odd = AttentionViewer(model_maps()), AttentionViewer(model_maps(ODD, ODD), title="plain")
    reader = Reader(odd.html())
    assert len(reader.found["script"]) == 2
    assert [tag for tag, _ in reader.attributes] == [
        tag for tag, _ in Reader(plain.html()).attributes
    ]
    text = reader.found["script"][0]
    assert text.isascii() and not re.search(r"[<>&]", text)
    [sentence] = json.loads(text)["sentences"]
    assert tuple(sentence["source"]) == ODD and tuple(sentence["predicted"]) == ODD
    assert tuple(sentence["target"]) == ("<s>", *ODD[:-1])


@pytest.mark.parametrize("title", ["</title><script>alert(1)</script>", "a & b", "“שלום” 😀", "$x"])
def test_a_title_is_text(title: str) -> None:
    page = AttentionViewer(model_maps(), title=title).html()
    assert Reader(page).found["title"] == [title]
    assert data_of(page)["title"] == title


def test_the_title_is_the_sentence_where_none_is_given() -> None:
    assert AttentionViewer(model_maps()).title == "the dog runs </s>"
    pieces = model_maps(("▁The", "▁dog", "s", "▁run", "</s>"))
    assert AttentionViewer(pieces).title == "The dogs run"
    assert len(AttentionViewer(model_maps(["word"] * 100)).title) == 80
    assert AttentionViewer(model_maps(["w" * 80])).title == "w" * 80
    assert AttentionViewer(model_maps(["w" * 81])).title == "w" * 79 + "…"


def test_save(tmp_path: Path) -> None:
    viewer = AttentionViewer(model_maps(ODD), title="\ud800 ü")
    path = viewer.save(os.fspath(tmp_path / "maps.html"))
    assert path == tmp_path / "maps.html"
    assert path.read_text(encoding="utf-8") == viewer.html()
    with pytest.raises(FileNotFoundError):
        viewer.save(tmp_path / "none" / "maps.html")
    (tmp_path / "link.html").symlink_to("maps.html")
    assert viewer.save(tmp_path / "link.html").is_symlink()
    assert (tmp_path / "maps.html").read_text(encoding="utf-8") == viewer.html()
    assert AttentionViewer(model_maps(), title="x").save("/dev/null").exists()
    path.chmod(0o640)
    assert viewer.save(path).stat().st_mode & 0o777 == 0o640
    assert len(viewer.save(tmp_path / f"{'x' * 250}.html").read_bytes()) > 0
    with pytest.raises(FileNotFoundError, match="'[^']*none/maps.html'$"):
        viewer.save(tmp_path / "none" / "maps.html")


def test_save_into_a_pipe(tmp_path: Path) -> None:
    read, write = os.pipe()
    (tmp_path / "link.html").symlink_to(f"/dev/fd/{write}")
    found = bytearray()

    def all_of_it() -> None:
        while piece := os.read(read, 1 << 16):
            found.extend(piece)

    reader = threading.Thread(target=all_of_it)
    reader.start()
    viewer = AttentionViewer(model_maps())
    viewer.save(tmp_path / "link.html")
    os.close(write)
    reader.join()
    os.close(read)
    assert found.decode() == viewer.html()


def test_a_page_is_saved_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = AttentionViewer(model_maps()).save(tmp_path / "maps.html")
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="maps.html"):
        AttentionViewer(model_maps(), title="another").save(path)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_in_a_notebook_it_is_a_frame_of_its_own() -> None:
    viewer = AttentionViewer(model_maps(ODD, ODD), height=500, title="<b>\"'&")
    reader = Reader(viewer._repr_html_())
    assert [tag for tag, _ in reader.attributes] == ["iframe"]
    frame = reader.attributes[0][1]
    assert frame["srcdoc"] == viewer.html() and html.unescape(frame["title"] or "") == "<b>\"'&"
    assert frame["sandbox"] == "allow-scripts" and frame["height"] == "500"
    half = AttentionViewer(model_maps(("\ud800", "b")))  # of a pair of surrogates: no UTF-8 has it
    half._repr_html_().encode()


def test_repr() -> None:
    viewer = AttentionViewer([model_maps(), model_maps()], title="two")
    assert repr(viewer) == (
        "AttentionViewer('two', 2 sentences: encoder 2 x 3, 4 x 4, decoder 2 x 3, 5 x 5, "
        "cross 2 x 3, 5 x 4)"
    )


# ---- the numbers ---------------------------------------------------------------------------------


def test_the_numbers_come_back() -> None:
    maps = model_maps(layers=2, heads=3)
    [sentence] = data_of(AttentionViewer(maps).html())["sentences"]
    assert list(sentence["kinds"]) == ["encoder", "decoder", "cross"]
    for kind, packed in sentence["kinds"].items():
        of_kind, shape = maps.maps[kind], tuple(packed["shape"])
        assert shape == of_kind.probabilities.shape
        numbers = unpacked(packed["probabilities"], "<u2").reshape(shape)
        hidden = np.isneginf(of_kind.logits)
        assert ((numbers == 65535) == hidden).all() and hidden.any() == (kind == "decoder")
        # float32 of the array itself: half an ulp of a number up to 1
        apart = np.abs(np.where(hidden, 0, numbers / 65534) - of_kind.probabilities)
        assert apart.max() <= PROBABILITY + 2**-24
        found = {"content": of_kind.parts["content"]}
        if kind != "cross":
            found["relation"] = maps.relation(kind)
        for part, wanted in found.items():
            steps = np.array(packed[part]["steps"])
            values = unpacked(packed[part]["data"], "<i2").reshape(shape) * steps[..., None, None]
            largest = np.abs(wanted).max(axis=(2, 3), keepdims=True)
            assert (np.abs(values - wanted) <= largest / 65534 * (1 + 1e-6)).all()
        assert set(packed) - {"relation"} == {
            "shape", "layers", "heads", "probabilities", "content", "entropy", "distance",
        }  # fmt: skip
        np.testing.assert_allclose(packed["distance"], maps.distance(kind), atol=1e-6)
        np.testing.assert_allclose(packed["entropy"], maps.entropy(kind).mean(axis=2), atol=1e-6)


def test_logits_that_are_no_sum_are_kept() -> None:
    """After softcap."""
    maps = model_maps()
    capped = changed(maps, "decoder", logits=3 * np.tanh(maps.maps["decoder"].logits / 3))
    hidden = np.isneginf(maps.maps["decoder"].logits)
    capped.maps["decoder"].logits[hidden] = -np.inf
    packed = data_of(AttentionViewer(capped).html())["sentences"][0]["kinds"]["decoder"]
    values = unpacked(packed["logits"]["data"], "<i2").reshape(packed["shape"])
    values = values * np.array(packed["logits"]["steps"])[..., None, None]
    assert np.abs(values - np.where(hidden, 0, capped.maps["decoder"].logits)).max() < 1e-4


def test_logits_stay_where_a_relation_was_not_asked_for() -> None:
    """Relations that are still 0 change nothing, but the model has them."""
    maps = relpos.attention_maps(
        small_model(), [3, 4], [1], parts=("probabilities", "content", "logits")
    )
    assert maps.missing("encoder")
    maps = changed(maps, "encoder", logits=maps.maps["encoder"].parts["content"])
    packed = data_of(AttentionViewer(maps).html())["sentences"][0]["kinds"]["encoder"]
    assert "content" in packed and "logits" in packed and "relation" not in packed


def test_a_softcap_of_small_logits_is_kept() -> None:
    """To what the page promises: 1 / 65534 of a head's largest."""
    maps = model_maps()
    of = maps.maps["encoder"]
    parts = {name: 0.03 * part for name, part in of.parts.items()}
    logits = np.tanh(0.03 * of.logits / 10) * 10
    packed = data_of(AttentionViewer(changed(maps, "encoder", parts=parts, logits=logits)).html())
    packed = packed["sentences"][0]["kinds"]["encoder"]
    values = unpacked(packed["logits"]["data"], "<i2").reshape(packed["shape"])
    values = values * np.array(packed["logits"]["steps"])[..., None, None]
    largest = np.abs(logits).max(axis=(2, 3), keepdims=True)
    assert (np.abs(values - logits) <= largest / 65534 + 1e-7).all()


def test_a_part_of_zeros() -> None:
    maps = model_maps()
    parts = {name: np.zeros_like(part) for name, part in maps.maps["encoder"].parts.items()}
    flat = changed(maps, "encoder", parts=parts, logits=np.zeros_like(parts["content"]))
    packed = data_of(AttentionViewer(flat).html())["sentences"][0]["kinds"]["encoder"]
    assert not unpacked(packed["content"]["data"], "<i2").any()


def test_probabilities_alone_are_enough() -> None:
    maps = changed(model_maps(), "decoder", logits=None, parts={})
    packed = data_of(AttentionViewer(maps).html())["sentences"][0]["kinds"]["decoder"]
    assert not {"content", "relation", "logits"} & set(packed)
    numbers = unpacked(packed["probabilities"], "<u2").reshape(packed["shape"])
    assert (numbers[0, 0] == 65535).sum() == 10  # above the diagonal of 5 x 5


def test_some_layers_and_heads() -> None:
    full = model_maps(layers=3, heads=2)
    decoder = full.maps["decoder"]
    fewer = AttentionMaps(decoder.probabilities[:2], None, {})
    chosen = ModelMaps(
        full.source_tokens, full.target_tokens, {**full.maps, "decoder": fewer}, (1, 3, 5), (4, 7)
    )
    [sentence] = data_of(AttentionViewer(chosen).html())["sentences"]
    assert sentence["kinds"]["encoder"]["layers"] == [1, 3, 5]
    assert sentence["kinds"]["decoder"]["layers"] == [1, 3]
    assert sentence["kinds"]["cross"]["heads"] == [4, 7]
    assert sentence["predicted"] == []
    fields = (full.source_tokens, full.target_tokens, {**full.maps, "decoder": fewer})
    turned = ModelMaps(*fields, (5, 1, 3), (4, 7))  # what the model has not is left out, 5
    [sentence] = data_of(AttentionViewer(turned).html())["sentences"]
    assert sentence["kinds"]["decoder"]["layers"] == [1, 3]


def test_what_is_empty_is_left_out() -> None:
    """A sentence without words, and a stack without the layers that were asked for."""
    full = model_maps()
    p = full.maps["encoder"].probabilities
    no_layers = changed(full, "encoder", probabilities=p[:0], logits=None, parts={})
    [sentence] = data_of(AttentionViewer(no_layers).html())["sentences"]
    assert list(sentence["kinds"]) == ["decoder", "cross"]
    nothing = AttentionMaps(np.empty((2, 3, 5, 0), np.float32), None, {})
    maps = {"decoder": full.maps["decoder"], "cross": nothing}
    no_source = ModelMaps((), full.target_tokens, maps, full.layers, full.heads)
    [sentence] = data_of(AttentionViewer(no_source).html())["sentences"]
    assert list(sentence["kinds"]) == ["decoder"]


def test_maps_of_models() -> None:
    """What attention_maps gives is what the viewer takes, whatever the model consists of."""
    both = relpos.attention_maps(small_model(decoder__layers=2), [1, 2, 3], [1, 5], layers=[1, 0])
    [sentence] = data_of(AttentionViewer(both).html())["sentences"]
    layers = {kind: packed["layers"] for kind, packed in sentence["kinds"].items()}
    assert layers == {"encoder": [0], "decoder": [1, 0], "cross": [1, 0]}
    assert (
        "relation" in sentence["kinds"]["decoder"] and "logits" not in sentence["kinds"]["decoder"]
    )
    decoder = relpos.attention_maps(small_model(encoder__layers=0), None, [1, 2, 3])
    assert "decoder 1 x 2, 3 x 3)" in repr(AttentionViewer(decoder, title="1"))
    batch = relpos.Batch.from_pairs([[3, 4], []], [[5, 6, 7], [8]], bos=1, eos=2)
    several = AttentionViewer(relpos.attention_maps(small_model(), batch))
    first, second = data_of(several.html())["sentences"]
    assert first["predicted"] == ["5", "6", "7", "2"] and list(second["kinds"]) == ["decoder"]


def test_several_sentences() -> None:
    each = [model_maps(seed=seed) for seed in range(3)]
    sentences = data_of(AttentionViewer(each).html())["sentences"]
    assert len(sentences) == 3 and sentences[1] != sentences[2]
    assert sentences[1] == data_of(AttentionViewer(each[1]).html())["sentences"][0]


# ---- what is refused -----------------------------------------------------------------------------


def refused(error: type[Exception], message: str, *arguments: Any, **named: Any) -> None:
    with pytest.raises(error, match=re.escape(message)):
        AttentionViewer(*arguments, **named)


def test_arguments_that_are_refused() -> None:
    maps = model_maps()
    refused(TypeError, "maps: expected ModelMaps or a list of them, got", {"a": maps})
    refused(TypeError, "maps: expected ModelMaps or a list of them, got", "maps")
    refused(TypeError, "maps[1]: expected ModelMaps, got", [maps, maps.maps["encoder"]])
    refused(ValueError, "maps: expected ModelMaps or a list of them, got an empty list", [])
    refused(TypeError, "title: expected str or None, got", maps, title=3)
    refused(ValueError, "height: expected an int of 200 or more, got 199", maps, height=199)
    assert AttentionViewer(maps, height=200)
    refused(ValueError, "height: expected an int of 200 or more, got 700.5", maps, height=700.5)


def test_maps_that_are_refused() -> None:
    maps = model_maps()
    encoder = maps.maps["encoder"]
    p = encoder.probabilities

    def with_(error: type[Exception], message: str, **changes: Any) -> None:
        refused(error, message, changed(maps, "encoder", **changes))

    here = "maps.maps['encoder']"
    with_(ValueError, f'{here}: has no probabilities; ask attention_maps for parts="all"',
          probabilities=None)  # fmt: skip
    with_(ValueError, f"{here}.probabilities: expected (layers, 3 heads, 4 queries, 4 keys), got "
          "(2, 3, 3, 4)", probabilities=p[:, :, 1:])  # fmt: skip
    with_(ValueError, "expected at most 2 layers, as many as the maps name, got 4",
          probabilities=np.concatenate([p, p]))  # fmt: skip
    with_(TypeError, "expected floating", probabilities=(p > 0.5).astype(int))
    with_(
        ValueError, f"{here}.probabilities: expected numbers from 0 to 1, got", probabilities=2 * p
    )
    with_(ValueError, "expected finite numbers, got NaN", probabilities=p * np.nan)
    with_(ValueError, f"{here}.logits: expected (2, 3, 4, 4), as the probabilities, got (2, 3, 4, 1)",
          logits=encoder.logits[..., :1])  # fmt: skip
    with_(ValueError, f"{here}.parts['content']: expected (2, 3, 4, 4), as the prob",
          parts={"content": p[:1]})  # fmt: skip
    with_(ValueError, f"{here}.parts: expected finite numbers", parts={"content": p + np.inf})
    with_(ValueError, f'{here}: has parts but no logits; ask attention_maps for parts="all"',
          logits=None)  # fmt: skip
    other = (maps.layers, maps.heads)
    refused(ValueError, "maps: expected maps of encoder, decoder, cross, got none with anything",
            ModelMaps(("a",), (), {}, *other))  # fmt: skip
    refused(ValueError, "got none with anything in it", model_maps(layers=0))
    refused(TypeError, "maps[1].source_tokens: expected a tuple of str, got int among them",
            [maps, ModelMaps((1, 2), (), maps.maps, *other)])  # fmt: skip
    refused(TypeError, "maps.source_tokens: expected a tuple of str, got",
            ModelMaps("abcd", (), maps.maps, *other))  # fmt: skip
    refused(ValueError, "maps.predicted_tokens: expected 0 or 5 tokens, got 1",
            ModelMaps(maps.source_tokens, maps.target_tokens, maps.maps, *other, ("a",)))  # fmt: skip


# ---- the package ---------------------------------------------------------------------------------


def test_it_needs_no_matplotlib_and_is_not_imported_before_it_is_asked_for(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["matplotlib"] = None
import relpos
assert "relpos.viewer" not in sys.modules
from viewer_maps import model_maps
assert "<canvas" in relpos.AttentionViewer(model_maps()).html()
assert "AttentionViewer" in relpos.__all__
"""
    package = Path(relpos.__file__).parent.parent
    path = os.pathsep.join(map(str, (package, Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# ---- colours -------------------------------------------------------------------------------------


def lightness(colour: str) -> float:
    """The relative luminance of #rrggbb, from 0 to 1, by which contrast is reckoned."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def test_colours_tell_their_order_by_lightness_alone() -> None:
    """So that every kind of colour vision, and a grey printer, reads them."""
    code = (FOLDER / "colours.js").read_text(encoding="utf-8")
    ramps = re.findall(r"(sequential|diverging): \[(.*?)\]", code)
    assert [name for name, _ in ramps] == ["sequential", "diverging"] * 2  # light, dark
    for number, (name, stops) in enumerate(ramps):
        steps = np.diff([lightness(stop) for stop in re.findall(r"#\w{6}", stops)])
        steps *= 1 if number >= 2 else -1  # the strongest are dark on light and light on dark
        if name == "diverging":
            steps[: len(steps) // 2] *= -1
        assert (steps > 0).all(), (name, number, steps)


def test_text_is_told_from_its_ground() -> None:
    """4.5 : 1, as WCAG asks of text; the bars of content and relation apart from the paper, 3 : 1."""
    style = (FOLDER / "viewer.css").read_text(encoding="utf-8")
    themes = re.findall(r":root(?:\[data-theme=\"dark\"\])? \{(.*?)\}", style, re.DOTALL)
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", theme))

        def contrast(one: str, other: str, colours: dict[str, str] = colours) -> float:
            light, dark = sorted((lightness(colours[one]), lightness(colours[other])))[::-1]
            return (light + 0.05) / (dark + 0.05)

        for text in ("ink", "faint"):
            assert contrast(text, "paper") >= 4.5 and contrast(text, "ground") >= 4.5
        for mark in ("content", "relation", "accent", "positive", "negative"):
            assert contrast(mark, "paper") >= 3
        assert contrast("content", "relation") >= 1.5
