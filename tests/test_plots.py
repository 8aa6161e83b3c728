# SPDX-License-Identifier: Apache-2.0
"""relpos.plots: that what is drawn is what the maps hold. How it looks is judged by eye."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import no_matplotlib
import relpos
from relpos.maps import AttentionMaps
from relpos.model_maps import ModelMaps
from relpos.train.log import LOG, Log
from small_model import small_model

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  # the backend is chosen first

from relpos import plots  # noqa: E402
from relpos.plots import canvas  # noqa: E402
from relpos.plots.curves import common_width, own_width, smoothed  # noqa: E402

L, H, N, M = 2, 3, 5, 7  # layers, heads, target and source tokens
SOURCE = tuple(f"s{i}" for i in range(M))
TARGET = ("<s>", *(f"t{i}" for i in range(1, N)))
PREDICTED = (*TARGET[1:], "</s>")


@pytest.fixture(autouse=True)
def closed() -> Any:
    yield
    pyplot.close("all")


def attention_of(rows: int, keys: int, causal: bool, seed: int, relation: float) -> AttentionMaps:
    random = np.random.default_rng(seed)
    content, table = random.standard_normal((2, L, H, rows, keys)).astype(np.float32)
    table = (relation * table).astype(np.float32)
    seen = np.arange(keys) <= np.arange(rows)[:, None] if causal else np.ones((rows, keys), bool)
    content, table = np.where(seen, content, 0), np.where(seen, table, 0)
    logits = np.where(seen, content + table, -np.inf).astype(np.float32)
    parts = {"content": content, **({"key_table": table} if relation else {})}
    return AttentionMaps(softmax(logits).astype(np.float32), logits, parts)


def softmax(s: Any) -> Any:
    p = np.exp(s - s.max(axis=-1, keepdims=True, initial=-1e30))
    return p / p.sum(axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def maps() -> ModelMaps:
    kinds = {
        "encoder": attention_of(M, M, False, 1, 2.0),
        "decoder": attention_of(N, N, True, 2, 2.0),
        "cross": attention_of(N, M, False, 3, 0.0),
    }
    return ModelMaps(SOURCE, TARGET, kinds, (1, 2), (0, 2, 3), PREDICTED)


def drawn(ax: Any) -> Any:
    return np.asarray(ax.images[0].get_array().filled(np.nan))


def labels(axis: Any) -> list[str]:
    axis.axes.figure.canvas.draw()
    return [each.get_text() for each in axis.get_ticklabels()]


def less_mean(s: Any) -> Any:
    """NaN where hidden, and no row has a mean."""
    s = np.where(np.isfinite(s), s, np.nan)
    return s - np.nanmean(s, axis=-1, keepdims=True)


# ---- heat maps -----------------------------------------------------------------------------------


def test_heat_map_draws_the_numbers() -> None:
    weights = np.array([[0.25, 0.75], [-np.inf, 1.0], [0.5, np.nan]])
    _, ax = pyplot.subplots()
    assert plots.heat_map(weights, ["a", "b", "c"], ["d", "e"], ax=ax, title="heads") is ax
    assert np.array_equal(drawn(ax), [[0.25, 0.75], [np.nan, 1.0], [0.5, np.nan]], equal_nan=True)
    assert ax.images[0].get_clim() == (0.0, 1.0) and ax.get_title() == "heads"
    assert labels(ax.yaxis) == ["a", "b", "c"] and labels(ax.xaxis) == ["d", "e"]
    signed = plots.heat_map([[-2.0, 1.0]], signed=True)
    assert signed.images[0].get_clim() == (-2.0, 2.0)
    assert plots.heat_map(np.zeros((2, 2)), limit=0.5).images[0].get_clim() == (0.0, 0.5)


def test_the_first_row_is_above_whatever_the_settings_are(maps: ModelMaps) -> None:
    with matplotlib.rc_context({"image.origin": "lower"}):
        for ax in (plots.heat_map(np.eye(3)), plots.all_by_offset(maps)):
            assert ax.images[0].origin == "upper" and ax.yaxis_inverted()


def test_no_grid_runs_through_the_cells() -> None:
    with pyplot.style.context("ggplot"):
        ax = plots.heat_map(np.eye(3))
        ax.figure.canvas.draw()
    assert not any(line.get_visible() for line in (*ax.get_xgridlines(), *ax.get_ygridlines()))


def test_titles_are_seen_where_the_style_is_dark(maps: ModelMaps) -> None:
    for style, colour in (("default", canvas.INK), ("dark_background", "white")):
        with pyplot.style.context(style):
            figure = plots.content_and_relation(maps)
            assert figure.axes[0].title.get_color() == colour
            assert {each.get_color() for each in figure.texts} == {colour}
            assert plots.heads(maps).axes[0].title.get_color() == colour


def test_a_token_is_text() -> None:
    tokens = ["$x^2$", "<script>", "a\nb", " ", "w" * 40, "\\$y$", "日本"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "_installed", lambda: ())  # whatever fonts there are
        shown = plots.heat_map(np.eye(7), tokens, tokens).yaxis
        with pytest.warns(UserWarning, match="missing from"):
            assert labels(shown) == [
                r"\$x^2\$", "<script>", "a·b", "␣", "w" * 15 + "…", r"\\$y\$", "日本",
            ]  # fmt: skip


def test_a_token_is_not_escaped_where_no_formula_is_read() -> None:
    with matplotlib.rc_context({"text.parse_math": False}):
        assert labels(plots.heat_map([[1.0]], ["$a"]).yaxis) == ["$a"]


@pytest.mark.parametrize("count", [3, 30, 200])
@pytest.mark.parametrize("inches", [2.0, 6.0])
def test_labels_never_overlap(count: int, inches: float) -> None:
    figure, ax = pyplot.subplots(figsize=(inches, inches))
    plots.heat_map(np.eye(count), *[[f"token{i}" for i in range(count)]] * 2, ax=ax)
    figure.canvas.draw()
    for axis, low, high in ((ax.xaxis, "x0", "x1"), (ax.yaxis, "y0", "y1")):
        boxes = [each.get_window_extent() for each in axis.get_ticklabels() if each.get_text()]
        ends = sorted((getattr(box, low), getattr(box, high)) for box in boxes)
        assert all(first[1] <= second[0] for first, second in zip(ends, ends[1:], strict=False))
        room = ax.get_window_extent().width * 72 / figure.dpi / (1.25 * canvas.LABEL)
        assert len(boxes) == count if count <= room else room / 2 - 1 <= len(boxes) <= room + 1


def test_one_head(maps: ModelMaps) -> None:
    ax = plots.head(maps, "decoder", 2, 3)
    p = maps.maps["decoder"].probabilities[1, 2]
    assert np.array_equal(drawn(ax), np.where(np.tri(N) > 0, p, np.nan), equal_nan=True)
    assert ax.get_title() == "decoder, layer 2, head 3" and ax.get_ylabel() == "about to say"
    assert labels(ax.yaxis) == list(PREDICTED) and labels(ax.xaxis) == list(TARGET)
    ax = plots.head(maps, "cross", show="content")
    np.testing.assert_allclose(
        drawn(ax), less_mean(maps.maps["cross"].logits[0, 0]), rtol=0, atol=1e-6
    )
    assert ax.get_title() == "cross attention, layer 1, head 0: content"
    assert plots.head(maps).get_title() == "encoder, layer 1, head 0"
    read = ModelMaps(SOURCE, TARGET, maps.maps, (1, 2), (0, 2, 3))
    assert labels(plots.head(read, "decoder").yaxis) == list(TARGET)


def test_all_heads(maps: ModelMaps) -> None:
    figure = plots.heads(maps, "encoder")
    grid = [ax for ax in figure.axes if ax.get_title()]
    probabilities = maps.maps["encoder"].probabilities.reshape(-1, M, M)
    assert len(grid) == L * H
    assert all(np.array_equal(drawn(ax), p) for ax, p in zip(grid, probabilities, strict=True))
    assert {ax.images[0].get_clim() for ax in grid} == {(0.0, float(probabilities.max()))}
    share = plots.moved(maps, "encoder")
    assert grid[4].get_title() == f"layer 2, head 2\n{share[1, 1]:.0%} moved by relations"
    titles = [ax.get_title() for ax in plots.heads(maps, "cross").axes]
    assert titles[0] == "layer 1, head 0"  # nothing there moves it
    mine = pyplot.figure(figsize=(9, 4)).subfigures(1, 2)[1]
    assert plots.heads(maps, "decoder", show="relation", figure=mine) is mine
    assert mine.axes[0].images[0].get_clim()[0] < 0


def test_titles_of_narrow_maps_keep_apart() -> None:
    """A long translation of two words: cells that are not square, rather than titles on titles."""
    target = tuple(f"t{i}" for i in range(7))
    cross = {"cross": attention_of(7, 2, False, 3, 2.0)}
    figure = plots.heads(ModelMaps(SOURCE[:2], target, cross, (1, 2), (0, 2, 3)), "cross")
    figure.canvas.draw()
    titles = [ax.title.get_window_extent() for ax in figure.axes if ax.get_title()][:H]
    assert all(one.x1 < other.x0 for one, other in zip(titles, titles[1:], strict=False))


# ---- content and relation --------------------------------------------------------------------------


def test_content_and_relation(maps: ModelMaps) -> None:
    figure = plots.content_and_relation(maps, "decoder", 1, 2)
    content, relation, logits, attention = figure.axes[:4]
    of = maps.maps["decoder"]
    seen = np.isfinite(of.logits[0, 1])
    for ax, part in (
        (content, of.parts["content"]), (relation, of.parts["key_table"]), (logits, of.logits),
    ):  # fmt: skip
        expected = less_mean(np.where(seen, part[0, 1], np.nan))
        np.testing.assert_allclose(drawn(ax), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(drawn(content) + drawn(relation), drawn(logits), rtol=0, atol=2e-6)
    limits = {ax.images[0].get_clim() for ax in (content, relation, logits)}
    most = max(np.nanmax(np.abs(drawn(ax))) for ax in (content, relation, logits))
    assert [*limits] == [(-most, most)]
    assert np.array_equal(np.isnan(drawn(attention)), ~seen)
    np.testing.assert_array_equal(drawn(attention)[seen], of.probabilities[0, 1][seen])
    share = plots.moved(maps, "decoder")[0, 1]
    assert figure.get_suptitle() == (
        f"decoder, layer 1, head 2: {share:.0%} of its attention moved by relations"
    )
    assert logits.get_title() == "= logits"


def test_a_softcap_is_told(maps: ModelMaps) -> None:
    of = maps.maps["encoder"]
    capped = AttentionMaps(of.probabilities, np.tanh(of.logits), of.parts)
    other = ModelMaps(SOURCE, TARGET, {"encoder": capped}, (1, 2), (0, 2, 3))
    assert plots.content_and_relation(other).axes[2].get_title() == "= logits, after softcap"


def test_no_relation_is_left_out(maps: ModelMaps) -> None:
    """Of cross attention and RoPE: no empty map, and nothing said of what relations move."""
    figure = plots.content_and_relation(maps, "cross", 1, 2)
    assert [ax.get_title() for ax in figure.axes[:3]] == [
        "content", "= logits", "softmax: attention",
    ]  # fmt: skip
    assert figure.get_suptitle() == (
        "cross attention, layer 1, head 2: no relation apart from content"
    )


def test_relations_that_were_not_asked_for_are_not_denied(maps: ModelMaps) -> None:
    of = maps.maps["encoder"]
    some = AttentionMaps(of.probabilities, of.logits, {"content": of.parts["content"]})
    figure = plots.content_and_relation(ModelMaps(SOURCE, (), {"encoder": some}, (1, 2), (0, 2, 3)))
    assert [ax.get_title() for ax in figure.axes[:2]] == ["content", "logits"]
    assert figure.get_suptitle().endswith("0: softcap, or relations that were not asked for")


def test_a_narrow_map_leaves_no_gap_beside_it() -> None:
    """Square cells of few keys are narrow; the figure is no wider than they need."""
    widths = [
        plots.content_and_relation(
            ModelMaps(
                ("x",) * keys, ("y",) * 20, {"cross": attention_of(20, keys, False, 1, 2.0)},
                (0, 1), (0, 1, 2),
            )
        ).get_figwidth()
        for keys in (10, 20)
    ]  # fmt: skip
    assert widths[1] - widths[0] > 4  # four maps of half the width, at 0.16 inches a key: 6.4


def test_moved(maps: ModelMaps) -> None:
    """Half the sum of the differences, by hand; 0 without relations, 1 where they decide."""
    of = maps.maps["decoder"]
    content = np.where(np.isfinite(of.logits), of.parts["content"], -np.inf)
    expected = np.abs(of.probabilities - softmax(content)).sum(-1).mean(-1) / 2
    np.testing.assert_allclose(plots.moved(maps, "decoder"), expected, rtol=0, atol=1e-6)
    assert not plots.moved(maps, "cross").any()
    content = np.zeros((1, 1, 2, 50), np.float32)
    content[..., 0] = 100
    table = np.zeros_like(content)
    table[..., 1] = 200
    decided = AttentionMaps(
        softmax(content + table), content + table, {"content": content, "key_table": table}
    )
    alone = ModelMaps(("x",) * 50, ("y",) * 2, {"cross": decided}, (0,), (0,))
    np.testing.assert_allclose(plots.moved(alone), [[1.0]], rtol=0, atol=1e-6)


# ---- by offset -------------------------------------------------------------------------------------


def test_by_offset(maps: ModelMaps) -> None:
    ax = plots.by_offset(maps, "encoder", 2, reach=3)
    lines = [line for line in ax.lines if line.get_label().startswith("head")]
    assert [line.get_label() for line in lines] == ["head 0", "head 2", "head 3"]
    mass = maps.mass("encoder")[1]
    for line, expected in zip(lines, mass, strict=True):
        assert line.get_xdata().tolist() == list(range(-3, 4))
        np.testing.assert_array_equal(line.get_ydata(), expected[M - 4 : M + 3])
    assert ax.get_title() == "encoder, layer 2"
    [line] = plots.by_offset(maps, "encoder", 2, [3], reach=3).lines[1:]
    np.testing.assert_array_equal(line.get_ydata(), mass[2, M - 4 : M + 3])


def test_as_far_as_nearly_all_attention_goes() -> None:
    """Where nothing else is said; of the head that looks farthest."""
    n, at = 20, np.arange(20)
    p = np.tile(np.eye(n, dtype=np.float32), (1, 2, 1, 1))
    p[0, 1, at, at], p[0, 1, at, np.where(at < 12, at + 8, at - 8)] = 0.95, 0.05
    looked = AttentionMaps(p, None, {})
    maps = ModelMaps(tuple("x" * n), (), {"encoder": looked}, (0,), (0, 1))
    for heads in ((0,), (0, 1)):
        line = plots.by_offset(maps, heads=heads).lines[-1]
        assert line.get_xdata().tolist() == list(range(-8, 9))


def test_relation_by_offset(maps: ModelMaps) -> None:
    """The mean over the pairs at an offset; where there is none, no point."""
    [line] = plots.by_offset(maps, "decoder", 1, [2], show="relation", reach=N - 1).lines[1:]
    relation = less_mean(
        np.where(np.tri(N) > 0, maps.maps["decoder"].parts["key_table"][0, 1], np.nan)
    )
    expected = [np.mean(np.diagonal(relation, d)) for d in range(1 - N, N)]
    assert np.isnan(expected[N:]).all()
    np.testing.assert_allclose(line.get_ydata(), expected, rtol=0, atol=1e-6)


def test_every_head_counts_the_pairs_that_it_sees() -> None:
    """Also where heads hide different keys."""
    each = [attention_of(N, N, causal, 4, 2.0) for causal in (True, False)]
    both = AttentionMaps(
        *(np.concatenate([getattr(x, name)[:, :1] for x in each], 1)
          for name in ("probabilities", "logits")),
        {name: np.concatenate([x.parts[name][:, :1] for x in each], 1) for name in each[0].parts},
    )  # fmt: skip
    maps = ModelMaps(TARGET, (), {"encoder": both}, (1, 2), (0, 1))
    ax = plots.by_offset(maps, layer=1, show="relation", reach=N - 1)
    table = less_mean(each[1].parts["key_table"][0, 0])
    expected = [np.mean(np.diagonal(table, d)) for d in range(1 - N, N)]
    np.testing.assert_allclose(ax.lines[2].get_ydata(), expected, rtol=0, atol=1e-6)


def test_all_by_offset(maps: ModelMaps) -> None:
    ax = plots.all_by_offset(maps, "cross", reach=2)
    mass = maps.mass("cross").reshape(L * H, -1)
    np.testing.assert_array_equal(drawn(ax), mass[:, N - 3 : N + 2])
    assert ax.images[0].get_extent()[:2] == [-2.5, 2.5]
    assert labels(ax.yaxis) == ["1.0", "1.2", "1.3", "2.0", "2.2", "2.3"]
    ax = plots.all_by_offset(maps, show="relation", reach=N - 1)
    line = plots.by_offset(maps, layer=1, show="relation", reach=N - 1).lines[1]
    np.testing.assert_array_equal(drawn(ax)[0], line.get_ydata())


def test_axes_may_hold_an_image_already(maps: ModelMaps) -> None:
    _, ax = pyplot.subplots()
    before = ax.imshow(np.eye(2))
    plots.all_by_offset(maps, "cross", reach=2, ax=ax)
    assert before.get_extent() == [-0.5, 1.5, 1.5, -0.5]
    assert ax.images[-1].get_extent()[:2] == [-2.5, 2.5]


def test_one_token_has_no_fractions_of_an_offset() -> None:
    maps = ModelMaps(("x",), (), {"encoder": attention_of(1, 1, False, 1, 2.0)}, (0, 1), (0, 1, 2))
    axes = plots.by_offset(maps).xaxis, plots.all_by_offset(maps).xaxis
    for axis in (*axes, plots.heat_map([[1.0]]).yaxis):
        assert "0" in labels(axis) and not any("." in label for label in labels(axis))


# ---- tables ----------------------------------------------------------------------------------------


def test_tables() -> None:
    table = np.random.default_rng(4).standard_normal((2, 5, 3))
    ax = plots.table_norms(table, clipped=True)
    for line, rows in zip(ax.lines, table, strict=True):
        np.testing.assert_allclose(line.get_ydata(), np.sqrt((rows**2).sum(axis=1)))
        assert line.get_xdata().tolist() == [-2, -1, 0, 1, 2]
    minus = "\N{MINUS SIGN}"
    assert labels(ax.xaxis) == [f"< {minus}1", f"{minus}1", "0", "1", "> 1"]
    [of_one] = plots.table_norms(table[0], np.arange(3, 8)).lines
    assert of_one.get_xdata().tolist() == [3, 4, 5, 6, 7]
    cosines = [
        [[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in rows] for a in rows]
        for rows in table
    ]
    image = plots.table_similarity(table, head=1)
    np.testing.assert_allclose(drawn(image), cosines[1], rtol=0, atol=1e-12)
    assert labels(image.xaxis)[0] == f"{minus}2" and image.images[0].get_clim() == (-1, 1)
    np.testing.assert_allclose(
        drawn(plots.table_similarity(table)), np.mean(cosines, axis=0), rtol=0, atol=1e-12
    )


def test_components() -> None:
    """Distances in the plane are those of rows that lie in one."""
    random = np.random.default_rng(5)
    plane = random.standard_normal((5, 2))
    directions = np.linalg.qr(random.standard_normal((6, 2)))[0]
    ax = plots.table_components(plane @ directions.T + 7.0)
    at = ax.collections[0].get_offsets()
    apart = [np.linalg.norm(x[:, None] - x[None], axis=2) for x in (np.asarray(at), plane)]
    np.testing.assert_allclose(*apart, rtol=0, atol=1e-9)
    assert sum(map(int, re.findall(r"(\d+)%", ax.get_xlabel() + ax.get_ylabel()))) in (99, 100, 101)
    assert [each.get_text() for each in ax.texts] == [
        "\N{MINUS SIGN}2", "\N{MINUS SIGN}1", "0", "1", "2",
    ]  # fmt: skip
    ends = plots.table_components(plane, clipped=True).texts
    assert [each.get_text() for each in ends][:: len(ends) - 1] == ["< \N{MINUS SIGN}1", "> 1"]
    many = plots.table_components(random.standard_normal((255, 4)))
    assert 10 < len(many.texts) <= 21 and "0" in [each.get_text() for each in many.texts]
    line = plots.table_components([[0.0], [1.0], [3.0]])
    np.testing.assert_allclose(line.collections[0].get_offsets()[:, 1], 0)


def test_tables_of_a_model() -> None:
    config = relpos.Config().replace(
        {"width": 16, "heads": 2, "feed_forward": 16, "source_vocabulary": 9,
         "target_vocabulary": 9, "encoder.layers": 2, "decoder.layers": 1, "max_length": 8,
         "encoder.k": 2, "encoder.k_right": 3, "decoder.position": "t5", "decoder.per_layer": False}
    )  # fmt: skip
    model = relpos.Transformer(config, tokens=16)
    found = plots.tables_of(model, "encoder", 1)
    assert list(found) == ["key_table", "value_table"]
    assert found["key_table"] is model.parameters["encoder.1.attention.key_table"]
    figure = plots.tables(model, "encoder", 1)
    assert figure.axes[0].lines[0].get_xdata().tolist() == [-2, -1, 0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"expected decoder\.position shaw.* got t5; .* by_offset"):
        plots.tables(model, "decoder")
    with pytest.raises(ValueError, match=r"layer: expected below 2, got 2"):
        plots.tables(model, "encoder", 2)
    apart = config.replace({"encoder.value_per_layer": False, "encoder.value_per_head": False})
    found = plots.tables_of(relpos.Transformer(apart, tokens=16), "encoder", 1)
    assert [table.shape for table in found.values()] == [(2, 6, 8), (6, 8)]
    assert len(plots.tables(relpos.Transformer(apart, tokens=16), head=1).axes) == 8
    shared = config.replace({"encoder.per_layer": False, "encoder.value": False})
    model = relpos.Transformer(shared, tokens=16)
    [(name, table)] = plots.tables_of(model, "encoder", 1).items()
    assert name == "key_table" and table.shape[-2] == 6
    assert len(plots.tables(model, "encoder", 1).axes) == 4  # three, and a colour bar


@pytest.mark.parametrize(
    ("left", "right", "ticks"),
    [
        (4, 4, range(-4, 5)),
        (8, 8, range(-8, 9, 2)),
        (11, 11, (-11, -5, 0, 5, 11)),  # 22 is not divided into ten or fewer
        (13, 13, (-13, -10, -5, 0, 5, 10, 13)),
        (127, 0, (-127, -100, -80, -60, -40, -20, 0)),
        (0, 0, (0,)),
    ],
)
def test_offsets_along_an_axis(left: int, right: int, ticks: Any) -> None:
    """Both ends are told, and what lies between, not too near to each other."""
    table = np.ones((left + 1 + right, 3))
    ax = plots.table_norms(table, np.arange(-left, right + 1))
    assert ax.xaxis.get_majorticklocs().tolist() == [*ticks]


@pytest.mark.parametrize(
    ("position", "names"),
    [
        ("music", ["key_table", "value_table"]),
        ("relative-key", ["distance_table"]),
        ("relative-key-query", ["distance_table"]),
    ],
)
def test_tables_of_every_offset(position: str, names: list[str]) -> None:
    """A row for each offset within max_length; of a causal decoder's, up to 0 where it has no more."""
    config = relpos.Config().replace(
        {"width": 16, "heads": 2, "feed_forward": 16, "source_vocabulary": 9,
         "target_vocabulary": 9, "encoder.layers": 1, "decoder.layers": 1, "max_length": 8,
         "encoder.position": position, "decoder.position": position}
    )  # fmt: skip
    model = relpos.Transformer(config, tokens=16)
    for stack, last in (("encoder", 7), ("decoder", 0 if position == "music" else 7)):
        assert list(plots.tables_of(model, stack)) == names
        figure = plots.tables(model, stack)
        assert figure.axes[0].lines[0].get_xdata().tolist() == list(range(-7, last + 1))
        assert "<" not in "".join(labels(figure.axes[0].xaxis))


@pytest.mark.parametrize("position", ["shaw", "music", "relative-key", "relative-key-query"])
def test_a_row_is_drawn_at_the_offset_that_meets_it(position: str) -> None:
    """Where the maps say that the only row which is not zero counts, there the picture has it."""
    model = small_model(
        encoder__position=position, encoder__k=11, encoder__value=False, max_length=12, seed=3
    )
    [table] = plots.tables_of(model).values()
    table[:] = 0
    table[..., 14, :] = 1
    batch = relpos.Batch.from_pairs([np.arange(3, 15)], [[3]], bos=1, eos=2)
    relation = model.attention_maps(batch, 0, 0, show="key")
    [offset] = {j - i for i, j in zip(*np.nonzero(relation), strict=True)}
    lengths = plots.tables(model).axes[0].lines[0].get_xydata()
    assert [place for place, length in lengths if length > 0] == [offset]
    assert abs(offset) == 3


# ---- curves ----------------------------------------------------------------------------------------


def test_curves(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for step in range(1, 41):
        log.write("train", {"step": step, "nll": 1.0 + step % 2, "learning_rate": 0.1 * step})
    log.write("validation", {"step": 40, "nll": 1.25})
    figure = plots.curves([tmp_path, tmp_path / LOG])
    above, below = figure.axes
    raw, smooth, validation = above.lines[:3]
    assert raw.get_ydata()[:2].tolist() == [2.0, 1.0] and smooth.get_ydata()[-1] == 1.5
    assert validation.get_xydata().tolist() == [[40, 1.25]]
    np.testing.assert_allclose(below.lines[0].get_ydata()[-1], 4.0)
    assert named(plots.curves(tmp_path))[0] == f"{tmp_path.name}, training"


def test_a_smoothed_curve_falls_where_the_curve_does() -> None:
    falling = [float(100 - i) for i in range(100)]
    assert own_width(100) == 10 and own_width(0) == own_width(9) == 1
    assert common_width([500, 359]) == 35 and common_width([5000, 9]) == 50
    assert common_width([9]) == common_width([]) == 1
    assert smoothed(falling, 10)[:95] == falling[:95]
    assert smoothed(falling, 10)[-1] == 5.5  # the mean of the last ten
    assert smoothed([3.0], 1) == [3.0] and smoothed([], 1) == []


def test_numbers_that_are_none_are_not_drawn(tmp_path: Path) -> None:
    with (tmp_path / LOG).open("w") as file:
        for step, nll in enumerate(("1.5", "1" + 400 * "0", "NaN", "-Infinity", "null"), 1):
            file.write(f'{{"kind": "train", "step": {step}, "nll": {nll}}}\n')
        file.write(f'{{"kind": "train", "step": {400 * "1"}, "nll": 1.5}}\n')
    figure = plots.curves(tmp_path)
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[1, 1.5]]


def named(figure: Any) -> list[str]:
    return [each.get_text() for each in figure.axes[0].get_legend().get_texts()]


@pytest.mark.filterwarnings("ignore:Glyph")  # where no font has it
def test_a_run_is_called_by_its_folder(tmp_path: Path) -> None:
    """Whatever that has in its name, with what is above it where there is another of that name."""
    strange = os.fsdecode(b"a\xff")
    names = ("_hidden", "lr=$3e-4$", r"a$\frac{$b", strange, "日本", "e1/run", "e2/run")
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        Log(tmp_path / name).write("train", {"step": 10, "nll": 1.0, "learning_rate": 0.1})
    figure = plots.curves([tmp_path / name for name in names])
    plots.save(figure, tmp_path / "curves.svg")
    said = ("_hidden", r"lr=\$3e-4\$", r"a\$\frac{\$b", "a·", *names[-3:])
    assert named(figure) == [f"{each}, training" for each in said]
    family = figure.axes[0].get_legend().get_texts()[0].get_fontfamily()
    assert family == canvas.families_for("日本")


def test_bleu_has_a_curve_where_a_run_has_it(tmp_path: Path) -> None:
    for name, bleu in (("with", {"bleu": 31.5}), ("without", {})):
        (tmp_path / name).mkdir()
        log = Log(tmp_path / name)
        log.write("train", {"step": 10, "nll": 1.0, "learning_rate": 0.1})
        log.write("validation", {"step": 10, "nll": 1.5} | bleu)
    figure = plots.curves([tmp_path / "with", tmp_path / "without"])
    assert [ax.get_ylabel() for ax in figure.axes] == ["-log p of a token", "BLEU", "learning rate"]
    drawn = [line.get_xydata().tolist() for line in figure.axes[1].lines]
    assert drawn == [[[10, 31.5]], []]
    assert len(plots.curves(tmp_path / "without").axes) == 2


def test_a_curve_of_one_point_is_seen(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write("train", {"step": 10, "nll": 1.0, "learning_rate": 0.1})
    above, below = plots.curves([tmp_path]).axes
    assert [each.get_marker() for each in (*above.lines, *below.lines)] == ["o", "o", "o"]


def test_nothing_right_is_no_axis_below_0() -> None:
    ranges = (relpos.evaluation.Range(1, None, 3, 0.0, 1.0),)
    metrics = (relpos.evaluation.Metric("BLEU", 0.0, ""),)
    ax = plots.bleu_by_length(relpos.evaluation.Evaluation(3, metrics, None, ranges))
    assert ax.get_ylim() == (0.0, 1.0)


def test_bleu_by_length() -> None:
    ranges = (relpos.evaluation.Range(1, 10, 1, 31.5, 1.0),
              relpos.evaluation.Range(11, None, 1200, 22.25, 1.0))  # fmt: skip
    result = relpos.evaluation.Evaluation(
        1201, (relpos.evaluation.Metric("BLEU", 28.0, ""),), None, ranges
    )
    _, mine = pyplot.subplots()
    ax = plots.bleu_by_length(result, ax=mine)
    assert ax is mine and [bar.get_height() for bar in ax.patches] == [31.5, 22.25]
    said = [each.get_text() for each in ax.texts]
    assert said == ["31.5\n1 sentence", "22.2\n1,200 sentences"]
    with pytest.raises(ValueError, match="no BLEU by length without sources"):
        plots.bleu_by_length(relpos.evaluation.Evaluation(1, (), None, ()))


# ---- files, and what is wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_saved_twice_is_the_same(maps: ModelMaps, tmp_path: Path, kind: str) -> None:
    for name in ("a", "b"):
        assert plots.save(plots.head(maps), tmp_path / f"{name}.{kind}").exists()
    assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_a_picture_is_saved_whole_or_not_at_all(
    maps: ModelMaps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plots.save(plots.head(maps), tmp_path / "a.png")
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="a.png"):
        plots.save(plots.heads(maps), path)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_axes_of_a_subfigure_are_saved(maps: ModelMaps, tmp_path: Path) -> None:
    part = pyplot.figure().subfigures(1, 2)[0]
    assert plots.save(plots.head(maps, ax=part.subplots()), tmp_path / "part.png").exists()


def test_refused(maps: ModelMaps, tmp_path: Path) -> None:
    alone = AttentionMaps(maps.maps["encoder"].probabilities, None, {})
    bare = ModelMaps(SOURCE, (), {"encoder": alone}, (1, 2), (0, 2, 3))
    table = np.ones((2, 5, 3))
    for call, message in (
        (lambda: plots.heat_map(np.zeros(3)), r"weights: expected \(queries, keys\).*got \(3,\)"),
        (lambda: plots.heat_map(np.zeros((0, 3))), r"weights: .*none of them 0, got \(0, 3\)"),
        (lambda: plots.heat_map(np.eye(2), ["a"]), "queries: expected 2 as in weights, got 1"),
        (lambda: plots.heat_map(np.eye(2) * 1j), r"weights: expected real numbers, got complex128"),
        (lambda: plots.heat_map([[1j]]), r"weights: expected real numbers, got complex128 \(1, 1\)"),
        (lambda: plots.heat_map(np.eye(2), [1, 2]), "queries: expected several str, got list"),
        (lambda: plots.heat_map(np.eye(2), None, 2), "keys: expected several str, got int"),
        (lambda: plots.heat_map(np.eye(2), limit=0), "limit: expected above 0 and finite, got 0"),
        (lambda: plots.head(maps, "encoder", 0), "layer: expected one of 1, 2, got 0"),
        (lambda: plots.head(maps, "encoder", 1, 1), "head: expected one of 0, 2, 3, got 1"),
        (lambda: plots.head(maps, "encoder", True), "layer: expected an integer, got True"),
        (lambda: plots.head(maps, "encoder", 1.0), "layer: expected an integer, got float"),
        (lambda: plots.head(maps, head=np.arange(3)), "head: expected an integer, got ndarray"),
        (lambda: plots.by_offset(maps, "encoder", 1, 3), "heads: expected several int, got int"),
        (lambda: plots.head(maps, "both"), "kind: "),
        (lambda: plots.heads(maps.maps["encoder"]), "ModelMaps, got AttentionMaps; ModelMaps.tokens"),
        (lambda: plots.heads(bare, "decoder"), "kind: "),
        (lambda: plots.heads(bare, show="relation"), "maps: encoder has no 'relation' to show, only"),
        (lambda: plots.content_and_relation(bare), "maps: encoder has no 'content' to show, only"),
        (lambda: plots.moved(bare), "has no 'content' to show, only 'probabilities'$"),
        (lambda: plots.by_offset(maps, reach=0), "reach: "),
        (lambda: plots.table_norms(np.ones((4, 3))), "offsets: expected 4 whole numbers, got None"),
        (lambda: plots.table_norms(table, [1, 2]), "offsets: expected 5 whole numbers"),
        (lambda: plots.table_norms(np.ones(3)), r"table: expected \(R, d\) or \(H, R, d\)"),
        (lambda: plots.table_components(table * np.nan), "table: expected finite numbers, got NaN"),
        (lambda: plots.table_similarity(table, head=2), "head: expected below 2, got 2"),
        (lambda: plots.save(plots.head(maps), tmp_path / "x.doc"), r"among .png, .svg, .pdf and .*doc"),
        (lambda: plots.curves([tmp_path]), "log.jsonl"),
        (lambda: plots.head(maps, ax=[0]), "ax: expected axes of matplotlib, got list"),
        (lambda: plots.heads(maps, figure=pyplot.axes()), "figure: expected a figure or subfigure"),
        (lambda: plots.save(plots.head(maps), tmp_path / "x.png", dpi="x"), "dpi: expected a number"),
        (lambda: plots.save(plots.head(maps), tmp_path / "x.png", dpi=0), "dpi: expected a positive"),
        (lambda: plots.save(maps, tmp_path / "x.png"), "picture: expected axes or a fig.* ModelMaps"),
        (lambda: plots.heads([maps]), "maps: expected ModelMaps, got list"),
        (lambda: plots.moved(maps.maps["encoder"]), "maps: expected ModelMaps, got AttentionMaps"),
        (lambda: plots.by_offset(small_model()), "maps: expected ModelMaps, got Transformer"),
        (lambda: plots.tables(maps), "model: expected relpos.Transformer, got ModelMaps"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError, OSError), match=message):
            call()
    assert plots.heads(bare, "encoder").axes[0].get_title() == "layer 1, head 0"
    empty = ModelMaps((), (), {"encoder": attention_of(0, 0, False, 1, 1.0)}, (1, 2), (0, 2, 3))
    for plot in (plots.heads, plots.head, plots.content_and_relation, plots.by_offset, plots.moved):
        with pytest.raises(ValueError, match="maps: expected tokens on either side of 'encoder'"):
            plot(empty)


def test_parts_without_logits_are_refused(maps: ModelMaps) -> None:
    """Nothing says which keys are hidden, and hidden ones would count as 0."""
    of = maps.maps["decoder"]
    blind = AttentionMaps(of.probabilities, None, of.parts)
    blind = ModelMaps((), TARGET, {"decoder": blind}, (1, 2), (0, 2, 3))
    for call in (
        lambda: plots.moved(blind),
        lambda: plots.head(blind, show="content"),
        lambda: plots.by_offset(blind, show="relation"),
        lambda: plots.content_and_relation(blind),
    ):
        with pytest.raises(ValueError, match="maps: decoder has parts but no logits; ask"):
            call()
    assert plots.heads(blind).axes[0].get_title() == "layer 1, head 0"


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    no_matplotlib.hide(monkeypatch)
    with pytest.raises(
        ImportError, match=r"plots: takes matplotlib, `pip install 'relpos\[viz\]'`"
    ):
        _ = relpos.plots
