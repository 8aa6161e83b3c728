# SPDX-License-Identifier: Apache-2.0
"""A vocabulary for each side: in caches, training, checkpoints, translation, links and maps."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import relpos
import text_files
from commands import Capture, relpos_says
from relpos.data import Sides, TokenCache, Words, Wrapped, load_subwords, of_side
from relpos.train import newest
from test_cli import SMALL, run

__all__ = ["run"]  # pytest finds the fixture by its name here

NUMBERS = "one two three four five six seven".split()
ZAHLEN = "eins zwei drei vier fünf sechs sieben acht neun zehn".split()


def vocabularies() -> Sides:
    return Sides(Words(NUMBERS), Words(ZAHLEN))


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    random = np.random.default_rng(seed)
    drawn = [random.integers(0, len(NUMBERS), random.integers(1, 6)) for _ in range(count)]
    return [(" ".join(NUMBERS[i] for i in x), " ".join(ZAHLEN[i] for i in x)) for x in drawn]


def configuration(**changes: Any) -> relpos.Config:
    return text_files.config(share_embeddings=False, **changes)


def test_each_side_has_its_own(tmp_path: Path) -> None:
    sides = vocabularies()
    assert isinstance(sides, relpos.data.Subwords)
    assert (sides.source.size, sides.target.size, sides.size) == (10, 13, 13)
    assert of_side(sides, "source") is sides.source and of_side(sides, "target") is sides.target
    assert of_side(sides.source, "target") is sides.source
    assert sides.encode("drei") == [5] == sides.encode_many(["drei"])[0]
    assert sides.decode([5]) == "drei"
    assert (sides.bos, sides.eos, sides.unknown) == (1, 2, 0)
    sides.save(tmp_path)
    again = load_subwords(tmp_path)
    assert isinstance(again, Sides) and again.fingerprint() == sides.fingerprint()
    assert again.source.decode([5]) == "three"
    assert Sides(sides.target, sides.source).fingerprint() != sides.fingerprint()
    assert repr(again) == "<Sides: <Words, 10 tokens> and <Words, 13 tokens>>"
    (tmp_path / "source" / "words.txt").write_text("\n".join(reversed(NUMBERS)) + "\n")
    with pytest.raises(ValueError, match=r"source.*subwords\.json: fingerprint: expected"):
        load_subwords(tmp_path)


def test_what_sides_cannot_be() -> None:
    words = Words(NUMBERS)
    with pytest.raises(TypeError, match="target: expected Subwords of one side, got <Sides"):
        Sides(words, vocabularies())
    with pytest.raises(TypeError, match="source: expected Subwords of one side, got 'words'"):
        Sides("words", words)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="subwords: tokens of Sides have no parts"):
        relpos.data.Splits(vocabularies(), 0.1)
    config = relpos.Config().replace({"source_vocabulary": 13, "target_vocabulary": 13})
    twice = Sides(Words(ZAHLEN), Words(ZAHLEN))
    assert config.share_embeddings
    with pytest.raises(ValueError, match="share_embeddings: expected False, as source and target"):
        relpos.data.check_vocabulary(twice, config)
    relpos.data.check_vocabulary(twice, config.replace({"share_embeddings": False}))
    apart = config.replace({"share_embeddings": False})
    with pytest.raises(ValueError, match="has 10 tokens, the model's source_vocabulary is 13"):
        relpos.data.check_vocabulary(vocabularies(), apart)


def test_objects_of_ones_own_are_given_again(tmp_path: Path) -> None:
    own = SimpleNamespace(
        encode=lambda text: [ord(x) for x in text], decode=lambda x: "".join(map(chr, x))
    )
    Sides(Wrapped(own, size=1 << 17, bos=1, eos=2), Words(ZAHLEN)).save(tmp_path)
    with pytest.raises(ValueError, match=r"source.*the vocabulary was an object of your own"):
        load_subwords(tmp_path)
    with pytest.raises(TypeError, match="tokenizer: expected a pair, as source and target have"):
        load_subwords(tmp_path, tokenizer=own)
    for given in ((own, None), load_subwords(tmp_path, tokenizer=(own, None))):
        again = load_subwords(tmp_path, tokenizer=given)
        assert isinstance(again, Sides) and again.source.encode("ab") == [97, 98]


def test_a_cache_has_the_tokens_of_both(tmp_path: Path) -> None:
    lines = [("one nine", "eins zwei zehn"), ("seven", "acht elf zwölf")]
    cache = TokenCache.build(tmp_path, lines, vocabularies(), key="x")
    assert cache.source(0).tolist() == [3, 0] and cache.target(0).tolist() == [3, 4, 12]
    assert cache.source(1).tolist() == [9] and cache.target(1).tolist() == [10, 0, 0]
    assert cache.unknown_tokens == 3 and cache.size == 13
    assert cache.is_of(13, vocabularies().fingerprint())
    assert not cache.is_of(13, Words(ZAHLEN).fingerprint())
    alone = TokenCache.build(tmp_path / "alone", ["zehn"], vocabularies())
    assert alone.target(0).tolist() == [12]


def test_an_unknown_token_is_that_of_its_side(tmp_path: Path) -> None:
    """The source knows everything, and its token 0 is a letter; large tokens are large files."""
    letters = SimpleNamespace(
        encode=lambda text: [ord(x) - ord("a") for x in text], decode=lambda x: ""
    )
    large = Wrapped(letters, size=1 << 17, bos=27, eos=28)
    cache = TokenCache.build(tmp_path, [("aab", "elf eins")], Sides(large, Words(ZAHLEN)))
    assert cache.unknown_tokens == 1 and cache.tokens.dtype == np.int32
    few = SimpleNamespace(encode=lambda text: [11], decode=lambda x: "")
    few_sides = Sides(Words(NUMBERS), Wrapped(few, size=13, bos=1, eos=2))
    cache = TokenCache.build(tmp_path, [("one", "x")], few_sides)
    assert cache.target(0).tolist() == [11]  # which the source's ten tokens do not have

    class Beyond(Words):
        def encode_many(self, texts: Any) -> list[list[int]]:
            return [[10] for _ in texts]

    with pytest.raises(ValueError, match="subwords: expected tokens from 0 to 9, got 10"):
        TokenCache.build(tmp_path, [("one", "eins")], Sides(Beyond(NUMBERS), Words(ZAHLEN)))


def test_a_model_learns_from_one_to_the_other(tmp_path: Path) -> None:
    """All the way: trained, saved, loaded, it translates, links and shows words of both."""
    config = configuration(
        steps=600, learning_rate=0.005, dropout=0.0, attention_dropout=0.0
    )  # fmt: skip
    trainer = relpos.Trainer(
        config, pairs(400), validation=pairs(40, 1),
        folder=tmp_path / "run", subwords=vocabularies(), tokens=256, progress="none",
        validate_every=250, keep=1,
    )  # fmt: skip
    assert (trainer.config.source_vocabulary, trainer.config.target_vocabulary) == (10, 13)
    names = trainer.model.parameters
    shapes = [names[f"{side}_embedding.weight"].shape[0] for side in ("source", "target")]
    assert shapes == [10, 13]
    trainer.train()
    translator = relpos.Translator.load(tmp_path / "run")
    lines = pairs(20, 2)
    said = translator.translate([source for source, _ in lines])
    # 18 to 20 by seed and rounding; with the sides mixed up none
    assert sum(a == b for a, (_, b) in zip(said, lines, strict=True)) >= 14
    [maps] = relpos.attention_maps(translator, ["one two"], ["eins zwei"])
    assert maps.source_tokens == ("one", "two") and maps.target_tokens[1:] == ("eins", "zwei")
    [links] = translator.align(["one two nine"], ["eins zwei"])
    assert links.source_words == (0, 1, 2) and links.target_words == (0, 1)
    [score] = translator.score(["one two"], ["eins zwei"])
    assert score.log_probability > np.log(0.5)


def test_links_are_of_the_words_of_each_side(tmp_path: Path) -> None:
    """Pieces of the source are joined by the source's vocabulary, in which they are other words."""
    pytest.importorskip("sentencepiece")
    english = relpos.data.SentencePiece.train([x for x, _ in pairs(300)], size=300)
    german = relpos.data.SentencePiece.train([x for _, x in pairs(300)], size=290)
    sides = Sides(english, german)
    size = {"source_vocabulary": english.size, "target_vocabulary": german.size, "max_length": 64}
    model = relpos.Transformer(configuration().replace(size), tokens=64, training=False)
    translator = relpos.Translator(model, sides)
    strange = "zwölf two xyz"
    [found] = translator.align([strange], ["eins Quark drei"])
    assert len(english.encode(strange)) == len(found.source_words) > 5
    assert [max(x) for x in (found.source_words, found.target_words)] == [2, 2]
    assert found.source_words == tuple(relpos.translator.words_of(english, english.encode(strange)))


def test_what_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    given = {"folder": tmp_path / "run", "subwords": vocabularies(), "progress": "none"}
    with pytest.raises(ValueError, match="share_embeddings"):
        relpos.Trainer(text_files.config(), pairs(40), **given)
    with pytest.raises(ValueError, match="tokens of Sides have no parts"):
        relpos.Trainer(configuration(), pairs(40), split=0.1, **given)
    assert not (tmp_path / "run" / "tokenizer").exists()


def test_a_run_with_two_of_its_own(run: SimpleNamespace, capsys: Capture, tmp_path: Path) -> None:
    output = tmp_path / "run"
    words = run.folder / "sevens"
    lines = Path(run.files[3]).read_text()
    words.write_text(re.sub(r"\bba\b", "bx", lines))
    files = ("--source", run.files[1], "--target", words)
    given = ("train", *files, *SMALL, "--output", output)
    quiet = ("--steps", 2, "--separate")
    shown = [each if each != "none" else "lines" for each in (*given, *quiet, "--vocabulary", 99)]
    assert "200 kept, 28 and 28 subwords\n" in relpos_says(capsys, *shown)
    found = newest(output)
    assert found is not None and not found.config.share_embeddings
    subwords = load_subwords(found.tokenizer)
    assert isinstance(subwords, Sides)
    assert [x.encode("ba bx").count(0) for x in (subwords.source, subwords.target)] == [1, 1]
    assert subwords.source.encode("bx") == [0] != subwords.target.encode("bx")
    assert "separate = true\n" in (output / "run.toml").read_text()
    relpos_says(capsys, "train", "--resume", "--output", output, "--steps", 3, "--progress", "none")
    again = newest(output)
    assert again is not None and again.step == 3

    other = (*given[:-1], tmp_path / "other", "--separate", "--steps", 1)
    kept = [x for x in other if x not in ("--subwords", "words")]
    for wrong, sentence in (
        ((*other, "--split", 0.1), "--split: whole words have no parts"),
        ((*kept, "--split", 0.1), "--split: is for one vocabulary, and --separate asks for two"),
        ((*kept, "--subwords", found.tokenizer), "is a vocabulary that is there"),
        (
            (*kept, "--start", output),
            "--separate, or data.separate in the file of --config: --start brings",
        ),
    ):
        assert sentence in relpos_says(capsys, *wrong, status=1)
    alone = ("train", "--text", words, *SMALL, "--set", "encoder.layers=0", "--separate")
    assert "--separate: a decoder alone has one side" in relpos_says(capsys, *alone, status=1)
    shared = (*given, *quiet, "--set", "share_embeddings=true", "--output", tmp_path / "third")
    assert relpos_says(capsys, *shared, status=1) == (
        "relpos: share_embeddings: expected false with --separate, got true\n"
    )
    sizes = ("--set", "share_embeddings=false", "--set", "source_vocabulary=9")
    own = (
        *given[:-2],
        *quiet,
        *sizes,
        "--set",
        "target_vocabulary=12",
        "--output",
        tmp_path / "own",
    )
    relpos_says(capsys, *own)
    found_own = newest(tmp_path / "own")
    assert found_own is not None
    made = found_own.config.source_vocabulary, found_own.config.target_vocabulary
    assert made == (9, 12)
    # One vocabulary is none of two, whoever says it.
    with pytest.raises(ValueError, match="^subwords: another vocabulary than that of"):
        relpos.Trainer(
            None, relpos.data.read_pairs(run.files[1], words), folder=output, resume=True,
            subwords=Words(NUMBERS), progress="none",
        )  # fmt: skip
    # Sides that are there: the configuration must not share what cannot be shared.
    taken = (*kept[:-3], "--steps", 1, "--subwords", found.tokenizer)
    assert "share_embeddings: expected False" in relpos_says(capsys, *taken, status=1)
    relpos_says(capsys, *taken, "--set", "share_embeddings=false")
