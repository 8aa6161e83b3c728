# SPDX-License-Identifier: Apache-2.0
"""The viewer's page in a real Chromium: what it draws, says and does, with real keys and pointer.

Skipped where there is no Chromium; `bash .ci/run --step browser` installs one and takes a skip for
a failure.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chromium import Chromium, find_chromium
from relpos.model_maps import ModelMaps
from relpos.viewer import AttentionViewer
from viewer_maps import ODD, changed, model_maps, softmax

SOURCE = ("Two", "dogs", "run", "through", "the", "snow", "</s>")
TARGET = ("Zwei", "Hunde", "rennen", "durch", "den", "Schnee", ".", "</s>")
VIEWS = ("matrix", "lines", "alignment", "overview")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here; `apt-get install chromium` is Debian's")
    with Chromium(program, tmp_path_factory.mktemp("profile")) as running:
        yield running


class Viewed:
    """A viewer's page, opened, which complains of nothing until it is closed."""

    def __init__(self, browser: Chromium, path: Path, hash_: str = "", **how: Any) -> None:
        self.page = browser.open(path.as_uri() + hash_, **how)
        self.drawn()

    def __enter__(self) -> Viewed:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        complaints, requests = self.page.complaints(), self.page.requests()
        self.page.close()
        if kind is None:
            assert complaints == []
            assert [r for r in requests if not r.startswith(("file:", "about:"))] == []

    def drawn(self) -> None:
        """Waits until a change is drawn: what unpacks and what is measured come first."""
        self.page.wait("document.body.dataset.view !== undefined")
        self.page.evaluate("new Promise((done) => setTimeout(done, 30))")

    def press(self, keys: str, **how: Any) -> Viewed:
        """One key by name, or letters."""
        for key in [keys] if len(keys) > 1 and keys[0].isupper() else keys:
            self.page.press(key, **how)
        self.drawn()
        return self

    def click(self, selector: str) -> None:
        box = self.page.evaluate(
            f"(({{left, top, width, height}}) => [left + width / 2, top + height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        self.page.point(*box, click=True)
        self.drawn()

    def text(self, selector: str) -> str:
        found: str = self.page.evaluate(f"document.querySelector('{selector}').innerText")
        return found

    def pressed(self, group: str) -> str:
        value: str = self.page.evaluate(
            f"document.querySelector('[data-state={group}] [aria-pressed=true]').value"
        )
        return value

    def head(self) -> tuple[int, int]:
        layer, head = self.page.evaluate(
            "['layer', 'head'].map((id) => +document.getElementById(id).value)"
        )
        return layer, head

    def pixels(self, canvas: str = "#matrix-canvas") -> bytes:
        address: str = self.page.evaluate(f"document.querySelector('{canvas}').toDataURL()")
        return base64.b64decode(address.partition(",")[2])

    def colours(self, canvas: str = "#matrix-canvas") -> int:
        """How many there are."""
        return int(
            self.page.evaluate(
                f"(canvas => new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, "
                f"canvas.width, canvas.height).data.buffer)).size)(document.querySelector('{canvas}'))"
            )
        )

    def shown(self) -> list[str]:
        """The view that is there."""
        found: list[str] = self.page.evaluate(
            f"{list(VIEWS)}.filter((id) => document.getElementById(id).checkVisibility())"
        )
        return found


@pytest.fixture(scope="module")
def maps() -> ModelMaps:
    return model_maps(SOURCE, TARGET, layers=3, heads=4)


@pytest.fixture(scope="module")
def path(maps: ModelMaps, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return AttentionViewer(maps, title="Two dogs").save(
        tmp_path_factory.mktemp("viewer") / "a.html"
    )


@pytest.fixture
def viewed(browser: Chromium, path: Path) -> Iterator[Viewed]:
    with Viewed(browser, path) as opened:
        yield opened


def number(text: str) -> float:
    return float(text.replace("−", "-"))


# ---- it draws ------------------------------------------------------------------------------------


def test_it_draws(viewed: Viewed) -> None:
    assert viewed.shown() == ["matrix"] and viewed.text("#title") == "Two dogs"
    assert viewed.colours() > 20 and viewed.colours("#offsets") > 3
    label = viewed.page.evaluate("document.querySelector('#matrix-canvas').ariaLabel")
    assert label == "probability map of encoder layer 0, head 0: 7 queries by 7 keys"


def test_another_head_is_another_picture(viewed: Viewed) -> None:
    seen = {}
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft"):
        viewed.press(key)
        seen[viewed.head()] = viewed.pixels(), viewed.pixels("#offsets")
    assert list(seen) == [(0, 1), (0, 2), (1, 2), (2, 2), (2, 1)]
    for pictures in zip(*seen.values(), strict=True):
        assert len(set(pictures)) == 5
    viewed.press("ArrowUp").press("ArrowUp")
    assert viewed.head() == (0, 1) and (viewed.pixels(), viewed.pixels("#offsets")) == seen[0, 1]
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft"):  # not beyond the first
        viewed.press(key)
    assert viewed.head() == (0, 0)


def test_every_measure_and_part_is_another_picture(viewed: Viewed) -> None:
    seen = {}
    for measure in ("probability", "logit"):
        for part in "bcr":
            viewed.press(part)
            seen[viewed.pressed("measure"), viewed.pressed("part")] = viewed.pixels()
            assert measure == viewed.pressed("measure")
        viewed.press("p")
    assert len(seen) == len(set(seen.values())) == 6
    captions = set()
    for part in "bcr":
        captions.add(viewed.press(part).text("#caption"))
    assert len(captions) == 3 and any("If relative position alone decided" in c for c in captions)


def test_the_scale_and_small_values(viewed: Viewed) -> None:
    plain, legend = (
        viewed.pixels(),
        "getComputedStyle(document.querySelector('#legend-bar')).backgroundImage",
    )
    scale = viewed.page.evaluate(legend)
    assert (
        number(viewed.text("#legend-low")) == 0 and 0.5 < number(viewed.text("#legend-high")) <= 1
    )
    viewed.press("s")
    assert viewed.pixels() != plain and viewed.page.evaluate(legend) != scale
    viewed.click(".check")
    assert viewed.pixels() == plain
    viewed.press("p")
    low, high = number(viewed.text("#legend-low")), number(viewed.text("#legend-high"))
    assert low == -high < -1


def test_cross_attention_has_no_relation(viewed: Viewed) -> None:
    viewed.press("rx")
    assert (viewed.pressed("kind"), viewed.pressed("part")) == ("cross", "both")
    assert "has no relation terms" in viewed.text("#caption")
    disabled = "[...document.querySelectorAll('.parts button')].map((button) => button.disabled)"
    assert viewed.page.evaluate(disabled) == [False, True, True]
    assert viewed.press("r").pressed("part") == "both"


# ---- numbers -------------------------------------------------------------------------------------


def test_the_numbers_under_the_pointer(viewed: Viewed, maps: ModelMaps) -> None:
    encoder = maps.maps["encoder"]
    p = encoder.probabilities[0, 0]
    alone = {part: softmax(x[0, 0]) for part, x in encoder.parts.items()}
    box = viewed.page.evaluate(
        "(({x, y}) => [x, y])(document.querySelector('#matrix-canvas').getBoundingClientRect())"
    )
    across = [(step, 4) for step in range(16)]
    met = []
    for x, y in across + [(y, x) for x, y in across]:  # along a row, then down a column
        viewed.page.point(box[0] + 180 + 37 * x, box[1] + 80 + 37 * y)
        if not viewed.page.evaluate("document.querySelector('#tooltip').checkVisibility()"):
            continue
        text = re.sub(r"[\u2068\u2069]", "", viewed.text("#tooltip"))
        found = re.match(r"“(.+)” → “(.+)”, offset ([+−]?\d+)", text)
        assert found, text
        i, j = SOURCE.index(found[1]), SOURCE.index(found[2])
        met.append((i, j))
        assert number(found[3]) == j - i
        numbers = [number(x) for x in re.findall(r"(?<= |\n)[+−]?\d[\d.]*(?:e−\d+)?", text)][1:]
        wanted = [p[i, j], encoder.logits[0, 0, i, j]]
        wanted += [encoder.parts[part][0, 0, i, j] for part in ("content", "key_table")]
        wanted += [alone[part][i, j] for part in ("content", "key_table")]
        assert len(numbers) == len(wanted), text
        for got, expected in zip(numbers, wanted, strict=True):
            assert abs(got - expected) <= 6e-4 + 0.06 * abs(expected) * (abs(expected) < 1e-4), text
    turn = next(n for n in range(1, len(met)) if met[n][1] < met[n - 1][1])
    row, column = met[:turn], met[turn:]
    assert len({i for i, _ in row}) == 1 and [j for _, j in row] == sorted(j for _, j in row)
    assert len({j for _, j in column}) == 1 and [i for i, _ in column] == sorted(
        i for i, _ in column
    )
    assert {j for _, j in row} == {i for i, _ in column} == set(range(7))


def test_a_click_keeps_a_pair(viewed: Viewed) -> None:
    """As a finger needs it, which does not hover."""
    tooltip = "document.querySelector('#tooltip').checkVisibility()"
    viewed.click("#matrix-canvas")
    assert viewed.page.evaluate(tooltip)
    name = viewed.text("#strongest-name")
    assert name.endswith("looks at")
    viewed.page.point(5, 5)
    assert viewed.text("#strongest-name") == name and not viewed.page.evaluate(tooltip)
    viewed.click("#matrix-canvas")  # lets go again; still pointed at
    viewed.page.point(5, 5)
    assert viewed.text("#strongest-name") == "Point at a cell or a token"


def test_the_strongest_keys_and_what_is_said(viewed: Viewed, maps: ModelMaps) -> None:
    """Shift and an arrow choose a query and a key; a reader of the screen hears the numbers."""
    p = maps.maps["encoder"].probabilities[0, 0]
    for _ in range(3):
        viewed.press("ArrowDown", shift=True)
    order = np.argsort(-p[2])
    rows = [line.split("\t") for line in viewed.text("#strongest-body").split("\n")]
    assert [row[0] for row in rows] == [SOURCE[j] for j in order[:5]]
    for row, j in zip(rows, order, strict=False):
        parts = [x[0, 0, 2, j] for x in maps.maps["encoder"].parts.values()]
        assert np.allclose([number(x) for x in row[1:]], [p[2, j], *parts], atol=6e-4)
    said = re.sub(
        r"[\u2068\u2069]", "", viewed.page.evaluate("document.querySelector('#status').textContent")
    )
    assert said.startswith(f"“run” looks at “{SOURCE[order[0]]}” {p[2, order[0]]:.3f}")
    for _ in range(2):
        viewed.press("ArrowRight", shift=True)
    said = re.sub(
        r"[\u2068\u2069]", "", viewed.page.evaluate("document.querySelector('#status').textContent")
    )
    assert said.startswith("“run” → “dogs”, probability: ")
    assert abs(number(said.split("probability: ")[1].split(";")[0]) - p[2, 1]) < 6e-4
    assert viewed.head() == (0, 0)
    viewed.press("ArrowRight")
    said = viewed.page.evaluate("document.querySelector('#status').textContent")
    there = maps.maps["encoder"].probabilities[0, 1, 2, 1]
    assert abs(number(said.split("probability: ")[1].split(";")[0]) - there) < 6e-4
    viewed.press("Escape")
    assert viewed.text("#strongest-name") == "Point at a cell or a token"


def test_the_head_in_numbers(viewed: Viewed, maps: ModelMaps) -> None:
    viewed.press("ArrowRight").press("ArrowDown")
    assert viewed.text("#summary-name") == "Layer 1, head 1"
    distance = maps.distance("encoder")[1, 1]
    assert abs(float(viewed.text("#summary-distance").split()[0]) - distance) <= 0.006
    parts = [x[1, 1].var(axis=1).sum() for x in maps.maps["encoder"].parts.values()]
    share = round(100 * parts[1] / sum(parts))
    assert viewed.text("#summary-share-text") == f"{100 - share} % content, {share} % relation"
    mass = maps.mass("encoder")[1, 1]
    label = viewed.page.evaluate("document.querySelector('#offsets').ariaLabel")
    offset = int(maps.offsets("encoder")[mass.argmax()])
    assert label.startswith(f"Mean attention by offset, strongest: {mass.max():.3f} at {offset}")


# ---- views ---------------------------------------------------------------------------------------


def test_views_by_key_and_by_click(viewed: Viewed) -> None:
    for key, view in (("l", "lines"), ("o", "overview"), ("m", "matrix"), ("a", "lines")):
        assert viewed.press(key).shown() == [view]  # an alignment is of cross attention alone
    viewed.press("xa")
    assert viewed.shown() == ["alignment"]
    for view in ("matrix", "lines", "overview", "alignment"):
        viewed.click(f"[data-state=view] [value={view}]")
        assert viewed.shown() == [view] and viewed.pressed("view") == view
    viewed.click("[data-state=kind] [value=decoder]")
    assert viewed.pressed("kind") == "decoder" and viewed.shown() == ["lines"]


def test_lines(viewed: Viewed, maps: ModelMaps) -> None:
    viewed.press("l")
    paths = "[...document.querySelectorAll('#lines-drawing path')].map((path) => path.getAttribute('d'))"
    everything = viewed.page.evaluate(paths)
    viewed.click("#lines-queries .token:nth-child(3)")
    of_one = viewed.page.evaluate(paths)
    assert 0 < len("".join(of_one)) < len("".join(everything))
    starts = set(re.findall(r"M0 ([\d.]+)C", "".join(of_one)))
    assert len(starts) == 1
    best = maps.maps["encoder"].probabilities[0, 0, 2].argmax()
    weight = "(token) => +token.style.getPropertyValue('--weight')"
    weights = f"[...document.querySelectorAll('#lines-keys .token')].map({weight})"
    assert np.argmax(viewed.page.evaluate(weights)) == best
    viewed.press("r")
    assert np.argmax(viewed.page.evaluate(weights)) == maps.relation("encoder")[0, 0, 2].argmax()
    viewed.press("Escape")
    # the same by Tab and focus
    viewed.page.evaluate("document.querySelector('#lines-queries .token').focus()")
    assert len(set(re.findall(r"M0 ([\d.]+)C", "".join(viewed.page.evaluate(paths))))) == 1


def test_alignment_links_are_the_strongest(viewed: Viewed, maps: ModelMaps) -> None:
    viewed.press("xa")
    said = viewed.text("#alignment-queries").split()
    assert tuple(said) == TARGET and tuple(viewed.text("#alignment-keys").split()) == SOURCE
    link = viewed.page.evaluate(
        "document.querySelector('#alignment-drawing path.link').getAttribute('d')"
    )
    ends = [float(x) for x in re.findall(r" ([\d.]+) 0(?=M|$)", link)]
    middles = viewed.page.evaluate(
        "[...document.querySelectorAll('#alignment-keys .token')].map("
        "(token) => token.offsetLeft + token.offsetWidth / 2)"
    )
    found = [int(np.argmin(np.abs(np.array(middles) - end))) for end in ends]
    assert found == maps.maps["cross"].probabilities[0, 0].argmax(axis=1).tolist()


def test_all_heads(viewed: Viewed, maps: ModelMaps) -> None:
    viewed.press("o")
    count = "document.querySelectorAll('#overview .card').length"
    assert viewed.page.evaluate(count) == 3 * 4
    labels = viewed.page.evaluate(
        "[...document.querySelectorAll('.card')].map((card) => card.ariaLabel)"
    )
    distance = maps.distance("encoder")[1, 2]
    assert labels[6].startswith(f"Layer 1, head 2: mean distance {distance:.1f}, entropy ")
    pictures = "[...document.querySelectorAll('.card canvas')].map((canvas) => canvas.toDataURL())"
    assert len(set(viewed.page.evaluate(pictures))) == 12
    viewed.page.evaluate("document.querySelectorAll('.card')[6].focus()")
    viewed.press("s")
    assert viewed.page.evaluate("document.activeElement.ariaLabel") == labels[6]
    viewed.click(".card:nth-of-type(7)")
    assert viewed.head() == (1, 2) and viewed.shown() == ["matrix"]


# ---- steps ---------------------------------------------------------------------------------------


def test_decoding_steps(viewed: Viewed) -> None:
    visible = "document.querySelector('#steps').checkVisibility()"
    assert not viewed.page.evaluate(visible)
    viewed.press("d")
    assert viewed.page.evaluate(visible) and viewed.text("#step-text") == "all 8 steps"
    pictures = [viewed.pixels()]
    for _ in range(3):
        pictures.append(viewed.press(".").pixels())
    said = re.sub(r"[\u2068\u2069]", "", viewed.text("#step-text"))
    assert said == "step 3 of 8: reads “Hunde”, predicts “rennen”"
    assert len(set(pictures)) == 4
    assert viewed.text("#strongest-body").count("\n") == 2  # three keys are seen
    viewed.press("l")
    later = "document.querySelectorAll('#lines-queries .later').length"
    assert viewed.page.evaluate(later) == 5
    viewed.press(",,,")
    assert viewed.text("#step-text") == "all 8 steps" and viewed.page.evaluate(later) == 0


def test_a_query_beyond_the_step_is_let_go(viewed: Viewed) -> None:
    viewed.press("d")
    for _ in range(6):
        viewed.press("ArrowDown", shift=True)
    viewed.press("ArrowRight", shift=True).press("..")
    assert "“Zwei”" in re.sub(r"[\u2068\u2069]", "", viewed.text("#step-text"))
    shown = "document.querySelectorAll('#strongest-body tr').length"
    assert viewed.page.evaluate(shown) == 2  # keys that the second query sees


def test_playing(viewed: Viewed) -> None:
    viewed.press("d").press(" ")
    assert viewed.text("#step-text").startswith("step 1 ") and viewed.text("#play") == "❚❚"
    viewed.page.wait("document.querySelector('#step-text').textContent.startsWith('step 2 ')")
    viewed.press(" ")
    assert viewed.text("#play") == "▶"
    viewed.press("......")
    viewed.click("#play")  # from the end: begins again
    assert viewed.text("#step-text").startswith("step 1 ")
    viewed.press("o").press("m")
    assert viewed.text("#play") == "▶"  # all heads have no steps
    viewed.press("e")
    assert not viewed.page.evaluate("document.querySelector('#steps').checkVisibility()")


# ---- keys, address, theme ------------------------------------------------------------------------


def test_help_lists_every_key(viewed: Viewed) -> None:
    is_open = "document.querySelector('#help').open"
    viewed.press("?")
    assert viewed.page.evaluate(is_open)
    keys = "[...document.querySelectorAll('#help kbd')].map((key) => key.textContent)"
    listed = {"Space": " "}
    found = [listed.get(key, key) for key in viewed.page.evaluate(keys)]
    assert set("edxmlaopbcr,.st? ") <= set(found)
    viewed.press("d")  # nothing moves behind it
    assert viewed.pressed("kind") == "encoder"
    viewed.press("Escape")
    assert not viewed.page.evaluate(is_open)


def test_the_focus_is_seen(viewed: Viewed) -> None:
    reached = set()
    for _ in range(12):
        viewed.press("Tab")
        reached.add(
            viewed.page.evaluate("document.activeElement.id || document.activeElement.value")
        )
        width = "getComputedStyle(document.activeElement).outlineWidth"
        assert viewed.page.evaluate(width) == "2px"
    assert {"theme", "help-open", "encoder", "layer", "head"} <= reached


def test_the_size_of_the_matrix(viewed: Viewed) -> None:
    height = "document.querySelector('#matrix-space').offsetHeight"
    before = viewed.page.evaluate(height)
    viewed.press("+")
    assert viewed.page.evaluate(height) > 1.5 * before
    plain = viewed.pixels()
    viewed.page.evaluate("document.querySelector('#matrix').scrollTo(0, 200)")
    viewed.drawn()
    assert viewed.pixels() != plain
    viewed.press("-")
    assert viewed.page.evaluate(height) == before


def test_the_address_keeps_what_is_chosen(browser: Chromium, path: Path) -> None:
    with Viewed(browser, path) as first:
        assert first.page.evaluate("location.href") == path.as_uri()
        first.press("dpr").press("ArrowRight")
        address = first.page.evaluate("location.hash")
        drawn = first.pixels()
    assert address == "#kind=decoder&head=1&measure=logit&part=relation"
    with Viewed(browser, path, address) as again:
        assert again.head() == (0, 1) and again.pixels() == drawn
    odd = "#kind=none&layer=99&head=-3&view=<b>&part=x&step=1e9&theme=red&zoom=NaN&sentence=7"
    own = "#kind=toString&part=toString&measure=logit&constructor=1&layer=99"  # of every object
    for hash_ in (odd, own):
        with Viewed(browser, path, hash_) as harmless:
            assert harmless.head() == (2, 0) and harmless.shown() == ["matrix"]


def test_light_and_dark(browser: Chromium, path: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with Viewed(browser, path) as light:
        assert light.page.evaluate(ground) == "rgb(255, 255, 255)"
        first = light.pixels()
        light.click("#theme")
        turned = light.pixels()
    with Viewed(browser, path, dark=True) as dark:
        assert dark.page.evaluate(ground) == "rgb(18, 22, 29)"
        assert dark.pixels() == turned != first
        assert dark.press("t").pixels() == first


# ---- tokens --------------------------------------------------------------------------------------


def test_odd_tokens_are_text(browser: Chromium, tmp_path: Path) -> None:
    viewer = AttentionViewer(model_maps(ODD, ODD), title="</title><script>alert(1)</script>")
    with Viewed(browser, viewer.save(tmp_path / "odd.html")) as viewed:
        viewed.press("l")
        texts = "(tokens) => [...tokens].map((token) => token.textContent)"
        tokens = f"({texts})(document.querySelectorAll('#lines-keys .token bdi'))"
        signs = {"": "∅", " ": "␣", "\n": "↵", "\u2028": "␣"}
        assert viewed.page.evaluate(tokens) == [signs.get(token, token) for token in ODD]
        for keys in ("x", "a", "o", "m", "d"):
            viewed.press(keys)
        viewed.press("ArrowDown", shift=True)
        assert viewed.page.evaluate("document.scripts.length") == 2
        assert viewed.page.evaluate("document.images.length") == 0
        assert viewed.text("#title") == "</title><script>alert(1)</script>"


def test_several_sentences(browser: Chromium, tmp_path: Path) -> None:
    each = [model_maps(SOURCE, TARGET), model_maps(("a", "b"), ("c",), layers=1, heads=1)]
    with Viewed(browser, AttentionViewer(each).save(tmp_path / "two.html")) as viewed:
        viewed.press("ArrowDown")
        before = viewed.pixels()
        viewed.page.evaluate(
            "(select => { select.value = 1; select.dispatchEvent(new Event('change')); })"
            "(document.querySelector('#sentence'))"
        )
        viewed.drawn()
        assert viewed.head() == (0, 0) and viewed.pixels() != before
        viewed.press("lx")
        assert viewed.text("#lines-keys").split() == ["a", "b"]


# ---- without logits, or with what is broken ------------------------------------------------------


def test_probabilities_alone(browser: Chromium, tmp_path: Path) -> None:
    maps = changed(model_maps(), "encoder", logits=None, parts={})
    with Viewed(browser, AttentionViewer(maps).save(tmp_path / "p.html")) as viewed:
        viewed.press("pr")
        assert (viewed.pressed("measure"), viewed.pressed("part")) == ("probability", "both")
        viewed.press("l").press("o").press("m").press("ArrowDown", shift=True)
        assert viewed.colours() > 10 and viewed.text("#strongest-head").split() == ["key", "p"]


def test_logits_after_softcap(browser: Chromium, tmp_path: Path) -> None:
    maps = model_maps()
    logits = 2 * np.tanh(maps.maps["encoder"].logits / 2)
    capped = changed(maps, "encoder", logits=logits, probabilities=softmax(logits))
    with Viewed(browser, AttentionViewer(capped).save(tmp_path / "s.html")) as viewed:
        assert "softcap" in viewed.text("#caption")
        viewed.press("ArrowDown", shift=True).press("ArrowRight", shift=True)
        said = viewed.page.evaluate("document.querySelector('#status').textContent")
        assert abs(number(said.split("logit: ")[1].split(";")[0]) - logits[0, 0, 0, 0]) < 6e-4
        assert "softcap" not in viewed.press("r").text("#caption")
        assert viewed.press("px").text("#caption") == (
            "Logits, before softmax. This attention has no relation terms."
        )


def test_a_broken_page_says_so(browser: Chromium, path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(
        re.sub(r'("probabilities":".{40}).{8}', r"\1AAAAAAAA", text, count=1), encoding="utf-8"
    )
    page = browser.open(broken.as_uri())
    page.wait("document.querySelector('#error').checkVisibility()")
    assert "The maps cannot be shown" in page.evaluate("document.querySelector('#error').innerText")
    page.close()


# ---- small and large -----------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ["encoder", "cross"])
def test_a_phone_needs_no_scrolling_sideways(
    browser: Chromium, path: Path, view: str, kind: str
) -> None:
    with Viewed(browser, path, f"#view={view}&kind={kind}", width=360, height=740) as viewed:
        assert viewed.page.evaluate("document.documentElement.scrollWidth") <= 360
        assert viewed.page.evaluate("innerWidth") == 360
        # Nor does anything stick out that cannot scroll by itself.
        outside = """[...document.querySelectorAll('main *, header *, .controls *')].filter((each) => {
            const { right, width } = each.getBoundingClientRect();
            return width && right > 361 && !each.closest('#alignment, #overview, #matrix, .unseen');
        }).map((each) => each.outerHTML.slice(0, 80))"""
        assert viewed.page.evaluate(outside) == []


def test_two_hundred_tokens(browser: Chromium, tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(199)] + ["</s>"]
    path = AttentionViewer(model_maps(words, words, layers=2, heads=4)).save(tmp_path / "long.html")
    elements = "document.querySelectorAll('*').length"
    with Viewed(browser, path) as viewed:
        assert viewed.colours() > 50
        assert viewed.page.evaluate(elements) < 250  # tokens of the matrix are drawn
        canvas = "(({width, height}) => width * height)(document.querySelector('#matrix-canvas'))"
        viewed.press("+++")
        assert viewed.page.evaluate(canvas) < 1200 * 900  # as large as what is seen, at any size
        viewed.press("l")
        assert viewed.page.evaluate(elements) < 250 + 2 * (200 + 200)
        assert viewed.page.evaluate("document.querySelectorAll('#lines path').length") <= 16
        viewed.press("xa")
        assert viewed.page.evaluate("document.querySelectorAll('#alignment path').length") <= 16
        assert viewed.page.evaluate("document.documentElement.scrollWidth") <= 1200
        # Every press is drawn before the next is taken: a budget that only hanging exceeds.
        took = viewed.page.evaluate(
            """(async () => {
              const begun = performance.now();
              for (const key of ["m", "ArrowRight", "c", "r", "l", "o", "m"]) {
                document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
                await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
              }
              return performance.now() - begun;
            })()"""
        )
        assert took < 20_000


# ---- in a notebook -------------------------------------------------------------------------------


def test_two_viewers_in_a_notebook(browser: Chromium, tmp_path: Path) -> None:
    """Frames of their own: the page around keeps its style and its address, each its own choice."""
    frames = [AttentionViewer(model_maps(ODD, ODD, seed=seed), height=400) for seed in (0, 1)]
    notebook = tmp_path / "notebook.html"
    body = "<h1 id=title>Notebook</h1>" + "".join(frame._repr_html_() for frame in frames)
    notebook.write_text(f"<!doctype html><meta charset=utf-8>{body}", encoding="utf-8")
    page = browser.open(notebook.as_uri(), height=1000)
    page.wait("document.querySelectorAll('iframe').length === 2")
    inside = page.frames(2)
    for frame in inside:
        frame.wait("document.body.dataset.view === 'matrix'")
    pictures = [f.evaluate("document.querySelector('#matrix-canvas').toDataURL()") for f in inside]
    assert len(set(pictures)) == 2
    press = "document.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }))"
    inside[0].evaluate(press)
    inside[0].wait("document.querySelector('#head').value === '1'")
    assert inside[1].evaluate("document.querySelector('#head').value") == "0"
    assert page.evaluate("[location.hash, document.querySelector('h1').innerText]") == [
        "",
        "Notebook",
    ]
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).fontSize") == "32px"
    assert page.complaints() == []
    page.close()
