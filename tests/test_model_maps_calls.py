# SPDX-License-Identifier: Apache-2.0
"""relpos.attention_maps of a model as one calls it: which maps, of numbers or of text, and what
is refused.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import relpos
import text_files
from mapped_models import KINDS, batch_for, everything, made
from relpos import _core, extraction
from saved_models import VOCABULARY, random_model, spoil
from small_model import BOS, EOS, pairs, small_model
from test_model_gradients import SHAW

# --------------------------------------------------------------------------------------------------
# Which
# --------------------------------------------------------------------------------------------------


def test_what_is_chosen_is_part_of_the_whole() -> None:
    model = made(SHAW | {"encoder.layers": 1, "decoder.layers": 3})
    batch = batch_for(model.config)
    whole = relpos.attention_maps(model, batch)[2]
    assert (whole.layers, whole.heads) == ((0, 1, 2), (0, 1))
    assert [len(whole.maps[kind].logits) for kind in KINDS] == [1, 3, 3]
    some = relpos.attention_maps(
        model, batch, layers=[2, 0], heads=1, parts=["logits", "key_table"]
    )[2]
    assert (some.layers, some.heads) == ((2, 0), (1,))
    for kind, layers in (("encoder", [0]), ("decoder", [2, 0]), ("cross", [2, 0])):
        own = some.maps[kind]
        assert own.probabilities is None
        assert np.array_equal(own.logits, whole.maps[kind].logits[layers, 1:])
        assert list(own.parts) == ([] if kind == "cross" else ["key_table"])
    last = relpos.attention_maps(
        model, batch, kinds=["decoder", "cross"], layers=-1, parts="logits"
    )[2]
    assert last.layers == (2,) and list(last.maps) == ["decoder", "cross"]
    assert np.array_equal(last.maps["cross"].logits, whole.maps["cross"].logits[2:])
    none = relpos.attention_maps(model, batch, layers=[], heads=slice(0, 0))[2]
    assert none.maps["cross"].logits.shape == (0, 0, 6, 9)
    sliced = relpos.attention_maps(model, batch, layers=slice(1, None), kinds="cross")[2]
    assert np.array_equal(sliced.maps["cross"].logits, whole.maps["cross"].logits[1:])


def test_tokens_as_numbers() -> None:
    model = small_model()
    maps = relpos.attention_maps(model, [3, 4, 5], np.array([1, 7], np.int32))
    assert maps.tokens("encoder") == (("3", "4", "5"), ("3", "4", "5"))
    assert maps.tokens("decoder") == (("1", "7"), ("1", "7"))
    assert maps.tokens("cross") == (("1", "7"), ("3", "4", "5"))
    assert maps.predicted_tokens == ()
    assert "3 source, 2 target tokens" in repr(maps) and "cross" in repr(maps)
    alone = relpos.attention_maps(model, [3, 4, 5], kinds="encoder")
    assert np.array_equal(alone.maps["encoder"].logits, maps.maps["encoder"].logits)
    [_, _, several, *_] = relpos.attention_maps(model, pairs())
    assert several.predicted_tokens == (*several.target_tokens[1:], str(EOS))
    assert several.target_tokens[0] == str(BOS)
    language = small_model(encoder__layers=0)
    maps = relpos.attention_maps(language, None, [1, 7, 8])
    assert list(maps.maps) == ["decoder"] and maps.source_tokens == ()
    labelled = relpos.Batch.from_labels([[3, 4]], [[5, -1]])
    [maps] = relpos.attention_maps(small_model(decoder__layers=0), labelled)
    assert list(maps.maps) == ["encoder"] and maps.target_tokens == maps.predicted_tokens == ()
    assert relpos.attention_maps(model, relpos.Batch([], [0], [], [0], [])) == []


# --------------------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def translator() -> relpos.Translator:
    return relpos.Translator(random_model(**{"decoder.layers": 2}), VOCABULARY)


def test_text_and_its_translation(translator: relpos.Translator) -> None:
    maps = relpos.attention_maps(translator, "ba be zz", "ku ko")
    assert maps.source_tokens == ("ba", "be", "<unk>")
    assert maps.target_tokens == ("<s>", "ku", "ko")
    assert maps.predicted_tokens == ("ku", "ko", "</s>")
    ids = VOCABULARY.encode
    same = relpos.attention_maps(translator.models[0], ids("ba be zz"), [BOS, *ids("ku ko")])
    for name, array in everything(maps).items():
        assert np.array_equal(array, everything(same)[name]), name
    # rows of cross attention are what align shows
    [alignment] = translator.align(["ba be zz"], ["ku ko"])
    mean = maps.maps["cross"].probabilities[-1].mean(axis=0)
    np.testing.assert_allclose(alignment.weights, mean, rtol=0, atol=1e-6)


def test_the_model_translates_first(translator: relpos.Translator) -> None:
    search = relpos.Search(beam=2, max_length=6)
    texts = ["ba be bi", "", "do du ba ba be"]
    said = translator.translate_all(texts, search=search)
    found = relpos.attention_maps(translator, texts, search=search)
    for text, each, maps in zip(texts, said, found, strict=True):
        tokens = each.n_best[0].tokens.tolist() if each.n_best else []
        assert maps.source_tokens == tuple(text.split())
        assert maps.predicted_tokens == (*map(VOCABULARY.piece, tokens), "</s>")
        assert maps.target_tokens == ("<s>", *maps.predicted_tokens[:-1])
        alone = relpos.attention_maps(translator, text, search=search)
        assert alone.target_tokens == maps.target_tokens
        for name, array in everything(maps).items():
            np.testing.assert_allclose(array, everything(alone)[name], rtol=0, atol=1e-5)
    encoder = relpos.attention_maps(translator, "ba be", kinds="encoder")
    assert list(encoder.maps) == ["encoder"] and encoder.source_tokens == ("ba", "be")


def test_a_language_model_goes_on(translator: relpos.Translator) -> None:
    language = relpos.Translator(random_model(**{"encoder.layers": 0}), VOCABULARY)
    search = relpos.Search(max_more=3)
    [said] = language.generate(["ba be"], search=search)
    maps = relpos.attention_maps(language, "ba be", search=search)
    tokens = said.n_best[0].tokens.tolist()
    assert maps.target_tokens == ("<s>", *map(VOCABULARY.piece, tokens))
    given = relpos.attention_maps(language, None, "ba be")
    assert given.target_tokens == ("<s>", "ba", "be") and list(given.maps) == ["decoder"]
    both = relpos.attention_maps(language, None, ["ba be", "do"])
    assert [maps.predicted_tokens for maps in both] == [("ba", "be", "</s>"), ("do", "</s>")]


def test_marks_of_words_are_shown() -> None:
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    subwords = relpos.data.SentencePiece.train(
        text_files.sentences(300), size=24, byte_fallback=False
    )
    model = random_model(source_vocabulary=subwords.size, target_vocabulary=subwords.size)
    maps = relpos.attention_maps(relpos.Translator(model, subwords), "ba be", "do")
    assert maps.source_tokens == tuple(map(subwords.piece, subwords.encode("ba be")))
    assert "".join(maps.source_tokens) == "▁ba▁be"
    assert maps.target_tokens[0] == "<s>" and maps.predicted_tokens[-1] == "</s>"


class Letters:
    """A tokenizer of one's own."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 95 for letter in text]

    def decode(self, tokens: Any) -> str:
        return "".join(chr(token + 95) for token in tokens)


def test_tokens_of_a_vocabulary_of_ones_own() -> None:
    subwords = relpos.data.Wrapped(Letters(), size=28, bos=0, eos=1)
    model = random_model(source_vocabulary=28, target_vocabulary=28)
    maps = relpos.attention_maps(relpos.Translator(model, subwords), "abc", "de")
    assert maps.source_tokens == ("a", "b", "c")
    assert maps.target_tokens == ("<s>", "d", "e")
    assert maps.predicted_tokens == ("d", "e", "</s>")


# --------------------------------------------------------------------------------------------------
# Bad input
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([3],), {}, ValueError, "target: expected the tokens that the model reads, got None"),
        ((None, [1]), {}, ValueError, "source: expected the tokens that the model reads"),
        (([0.5], [1]), {}, TypeError, "source: expected integers"),
        (([[3]], [1]), {}, ValueError, "source: expected integers"),
        (("ba", "be"), {}, TypeError, "source: expected integers"),
        (([99], [1]), {}, ValueError, r"source\[0\]=99"),
        (([3] * 13, [1]), {}, ValueError, "source sentence 0 has 13 tokens"),
        (([3], [1]), {"kinds": "self"}, ValueError, "kinds: expected 'encoder' or 'decoder'"),
        (([3], [1]), {"kinds": 3}, TypeError, "kinds: expected names"),
        (([3], [1]), {"parts": "slopes"}, ValueError, "parts: there is no 'slopes' here, only 'all'"),
        (([3], [1]), {"parts": 1}, TypeError, "parts: expected names"),
        (([3], [1]), {"parts": [["content"]]}, TypeError, "parts: expected names, got list among"),
        (([3], [1]), {"kinds": [3]}, TypeError, "kinds: expected names, got int among"),
        (([3], [1]), {"layers": 1}, ValueError, "layers: expected numbers from -1 to 0, got 1"),
        (([3], [1]), {"heads": [0, 2]}, ValueError, "heads: expected numbers from -2 to 1, got 2"),
        (([3], [1]), {"heads": 0.5}, TypeError, "heads: expected integers"),
        (([3], [1]), {"heads": slice("a", None)}, TypeError, "heads: expected a slice of integ"),
        (([3], [1]), {"layers": slice(0, 1, 0)}, ValueError, "layers: expected a slice of integ"),
        (([3], [1]), {"dropout": "no"}, TypeError, "dropout: expected True or False, got str"),
        ((), {}, TypeError, "source"),
    ],
)  # fmt: skip
def test_bad_input_is_told(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        relpos.attention_maps(small_model(), *arguments, **options)


def test_layers_are_counted_from_the_last_where_that_is_clear() -> None:
    model = made(SHAW | {"encoder.layers": 1, "decoder.layers": 3})
    batch = batch_for(model.config)
    for layers in (-1, [0, -1], slice(-1, None)):
        with pytest.raises(ValueError, match="layers: expected 0 or more, as the kinds have diff"):
            relpos.attention_maps(model, batch, layers=layers)
        [maps, *_] = relpos.attention_maps(model, batch, layers=layers, kinds=["decoder", "cross"])
        assert maps.layers[-1] == 2
    for wrong in ("x", [[0], [1, 2]], 0.5, [None]):
        with pytest.raises(TypeError, match="layers: expected integers"):
            relpos.attention_maps(model, batch, layers=wrong)
    with pytest.raises(TypeError, match=r"layers: expected a slice .*got slice\('a', None, None\)"):
        relpos.attention_maps(model, batch, layers=slice("a", None))
    with pytest.raises(TypeError, match="target: expected None beside a Batch"):
        relpos.attention_maps(model, batch, [1])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((None,), {}, ValueError, "source: expected text, got None for it and for target"),
        (("ba", ["be"]), {}, TypeError, "target: expected str as on the other side, got list"),
        ((["ba"], "be"), {}, TypeError, "target: expected several str as on the other side"),
        ((["ba"], ["be", "do"]), {}, ValueError, "targets: expected 1 as in sources, got 2"),
        (([3, 4],), {}, TypeError, "source: expected str or several, got int"),
        ((5,), {}, TypeError, "source: expected str or several, got int"),
        (("ba", 5), {}, TypeError, "target: expected str or several, got int"),
        ((["ba", b"be"],), {}, TypeError, "source: expected str or several, got bytes"),
        (("ba", "be"), {"search": relpos.Search()}, ValueError, "search: expected None where"),
        (
            ("ba",),
            {"search": relpos.Search(), "kinds": "encoder"},
            ValueError,
            "search: expected None where kinds is 'encoder'",
        ),
        ((None, "be"), {}, ValueError, "sources: expected one for each target, got None"),
    ],
)
def test_bad_text_is_told(
    translator: relpos.Translator,
    arguments: Any,
    options: Any,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        relpos.attention_maps(translator, *arguments, **options)


def test_an_ensemble_and_a_spoilt_model_are_told() -> None:
    several = relpos.Translator([random_model(1), random_model(2)], VOCABULARY)
    with pytest.raises(ValueError, match="model: expected one, got an ensemble of 2"):
        relpos.attention_maps(several, "ba")
    model = random_model()
    spoil(model, "do")
    with pytest.raises(ValueError, match="source: line 2: the model's numbers are not finite"):
        relpos.attention_maps(relpos.Translator(model, VOCABULARY), ["ba", "do"])


def test_the_binding_refuses_what_does_not_fit() -> None:
    model = small_model()
    core, batch = model._core, pairs()._packed
    one = np.zeros(1, np.int64)
    for wanted, error, message in (
        ([], TypeError, "must be tuple"),
        ((3,), TypeError, "wanted: expected tuples"),
        (((0, 0, 0, one),), TypeError, "wanted"),
        (((0, 0, 0, None, one),), TypeError, "layers: expected int64, got None"),
        (((0, 0, 0, one, [0]),), TypeError, "heads"),
        (((0, 0, 0, one, one.astype(np.int32)),), TypeError, "heads"),
        (((0, 0, 5, one, one),), ValueError, "sentence: expected 0 to below 5, got 5"),
        (((7, 0, 0, one, one),), ValueError, r"maps\[0\].kind=7"),
        (((0, 0, 0, one, one), (0, 9, 0, one, one)), ValueError, r"maps\[1\].show=9"),
        (((0, 0, 0, one, one + 2),), ValueError, r"maps\[0\].head=2, must be from 0 to 1"),
        (((0, 0, 0, one + 1, one),), ValueError, r"maps\[0\].layer=1, must be from 0 to 0"),
    ):
        with pytest.raises(error, match=message):
            core.attention_maps(batch, False, wanted)  # type: ignore[arg-type]
    assert core.attention_maps(batch, False, ()) == ()
    assert core.attention_parts(_core.ATTENTION_CROSS) == (("content", _core.SHOW_CONTENT),)
    assert core.attention_parts(3) == core.attention_parts(-1) == ()


def test_python_calls_it_by_its_name(translator: relpos.Translator) -> None:
    shared = "model, source, target, kinds, layers, heads, parts, dropout"
    x = np.zeros((1, 1, 2, 4), np.float32)
    for given, name, sentence in (
        (
            (translator, "ba"),
            "colour",
            f"of a Translator there is no 'colour', only {shared}, search",
        ),
        (
            (translator.models[0],),
            "causal",
            f"of a Transformer there is no 'causal', only {shared}",
        ),
        (
            (translator.models[0],),
            "search",
            f"of a Transformer there is no 'search', only {shared}",
        ),
        (
            (x, x),
            "kinds",
            "of arrays there is no 'kinds', only q, k, v, position, .*, sequences, parts",
        ),
        ((x, x), "positon", "of arrays there is no 'positon', only q, k, v, position, .*"),
    ):
        with pytest.raises(TypeError, match=f"^attention_maps: {sentence}$"):
            relpos.attention_maps(*given, **{name: True})  # type: ignore[call-overload]
    named = relpos.attention_maps(model=translator, source="ba", target="be")
    assert named.source_tokens == ("ba",)
    assert relpos.attention_maps(q=x, k=x, causal=True).probabilities.shape == (1, 1, 2, 2)


def test_its_options_are_spelt_out() -> None:
    """For help() and editors: those of arrays and of models, with the defaults that they have, but
    for parts, whose default the text says."""
    shown = inspect.signature(relpos.attention_maps).parameters
    for door in (relpos.maps.attention_maps, extraction._of_translator, extraction._of_transformer):
        for name, parameter in inspect.signature(door).parameters.items():
            assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
            given = name == "parts" or parameter.default is parameter.empty
            assert shown[name].default == (... if given else parameter.default)
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != "parts":
                assert shown[name].annotation == parameter.annotation
    inspect.signature(relpos.attention_maps).bind(1, 2)  # none of them is asked for
    assert 'Left out: "all" of a model, "probabilities"' in str(relpos.attention_maps.__doc__)


def test_what_was_not_asked_for_is_told() -> None:
    model = small_model()
    maps = relpos.attention_maps(model, [3], [1], kinds="cross", parts="logits")
    for call, sentence in (
        (maps.mass, "probabilities were not asked for"),
        (maps.entropy, "probabilities were not asked for"),
        (maps.distance, "probabilities were not asked for"),
        (maps.relation, "the parts of the logits were not asked for"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call("cross")
        with pytest.raises(ValueError, match="there are no maps of 'encoder' here, only 'cross'"):
            call("encoder")
        with pytest.raises(ValueError, match="kind: expected 'encoder' or"):
            call("self")
