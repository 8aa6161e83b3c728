# SPDX-License-Identifier: Apache-2.0
"""relpos.data.subwords: text to tokens and back, saving, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import relpos
from relpos.data import (
    SentencePiece,
    Sides,
    Subwords,
    Words,
    Wrapped,
    check_vocabulary,
    load_subwords,
)
from small_data import Numbers

# Ours: enough different words for a vocabulary of some hundreds.
ONES = "one two three four five six seven eight nine".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
EINER = "ein zwei drei vier fünf sechs sieben acht neun".split()
ZEHNER = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()
SIZE = 320  # of which 256 are bytes
LINES = [
    (f"The {ten}-{one} dogs run.", f"Die {einer}und{zehner} Hunde laufen.")
    for ten, zehner in zip(TENS, ZEHNER, strict=True)
    for one, einer in zip(ONES, EINER, strict=True)
]


def trained(**changes: Any) -> SentencePiece:
    pytest.importorskip("sentencepiece")
    return SentencePiece.train(LINES, **({"size": SIZE} | changes))


class Letters:
    """An object of a user's own, of lower-case letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(97 + token) for token in tokens)


def letters(**changes: int) -> Wrapped:
    return Wrapped(Letters(), **({"size": 28, "bos": 26, "eos": 27} | changes))


# ---- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_there_and_back(kind: Any) -> None:
    subwords = trained(kind=kind)
    assert isinstance(subwords, Subwords)
    assert (subwords.size, subwords.unknown, subwords.bos, subwords.eos) == (SIZE, 0, 1, 2)
    texts = [text for pair in LINES for text in pair]
    encoded = subwords.encode_many(texts)
    assert encoded == [subwords.encode(text) for text in texts]
    assert [subwords.decode(tokens) for tokens in encoded] == texts
    assert not {0, 1, 2} & {token for tokens in encoded for token in tokens}
    tokens = encoded[0]
    assert subwords.decode([1, *tokens, 2]) == texts[0]
    assert "".join(map(subwords.piece, tokens)).replace("▁", " ").strip() == texts[0]


def test_bytes_spell_what_has_no_token() -> None:
    text = "<s> 色は匂へど \U0001f600"
    assert trained().decode(trained().encode(text)) == text
    without = trained(byte_fallback=False, size=120)
    assert without.unknown in without.encode(text)
    assert without.bos not in without.encode("<s>") and trained().bos not in trained().encode("<s>")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_is_the_same_every_time(kind: Any) -> None:
    one, other = trained(kind=kind), trained(kind=kind)
    assert one.fingerprint() == other.fingerprint()
    assert one.fingerprint() != trained(kind=kind, size=SIZE - 1).fingerprint()


def test_a_sample_depends_on_the_seed_alone() -> None:
    one, again, other = (trained(size=300, sentences=40, seed=seed) for seed in (1, 1, 2))
    assert one.fingerprint() == again.fingerprint() != other.fingerprint()


def test_a_sample_may_be_of_every_line() -> None:
    unknown = set()
    for seed in range(10):
        sample: Any = {"sentences": 1, "seed": seed, "byte_fallback": False, "fewer": True}
        subwords = SentencePiece.train(["abab abab", "cdcd cdcd"], size=30, **sample)
        unknown.add(subwords.unknown in subwords.encode("abab"))
    assert unknown == {False, True}


def test_words() -> None:
    words = Words.train(["b a b", " c\tb\x85a "])
    assert isinstance(words, Subwords)
    assert words.size == 6 and words.encode("a b c <s> d") == [4, 3, 5, 0, 0]
    assert words.encode_many(["a", ""]) == [[4], []]
    assert words.decode([1, 4, 3, 0, 2]) == "a b <unk>"
    assert Words.train([("b a", "b c"), ("b", "c")], size=5).encode("a b c") == [0, 3, 4]


def test_an_object_of_ones_own() -> None:
    subwords = letters()
    assert isinstance(subwords, Subwords)
    assert subwords.encode("abz") == [0, 1, 25] and subwords.unknown == -1
    assert subwords.decode([26, 0, 1, 25, 27]) == "abz"
    assert subwords.fingerprint() != letters(size=29).fingerprint()

    class Encoding:
        ids = [3, 4]

    class Fast(Letters):
        def encode(self, text: str) -> Any:
            return Encoding()

    assert Wrapped(Fast(), size=28, bos=26, eos=27).encode("?") == [3, 4]


# ---- saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [trained, lambda: Words.train(LINES)], ids=["pieces", "words"])
def test_it_travels_in_a_folder(tmp_path: Path, make: Any) -> None:
    subwords = make()
    subwords.save(tmp_path / "model" / "tokenizer")
    subwords.save(tmp_path / "model" / "tokenizer")  # over itself
    again = load_subwords(tmp_path / "model" / "tokenizer")
    assert type(again) is type(subwords) and again.fingerprint() == subwords.fingerprint()
    text = LINES[7][1]
    assert again.encode(text) == subwords.encode(text)
    assert type(subwords).load(tmp_path / "model" / "tokenizer").size == subwords.size
    assert len(list((tmp_path / "model" / "tokenizer").iterdir())) == 2


def test_a_wrapped_object_is_wanted_again(tmp_path: Path) -> None:
    letters().save(tmp_path)
    again = load_subwords(tmp_path, tokenizer=Letters())
    assert again.encode("abc") == [0, 1, 2] and (again.bos, again.eos) == (26, 27)
    assert load_subwords(tmp_path, tokenizer=letters()).size == 28
    with pytest.raises(ValueError, match="an object of your own, pickled there"):
        load_subwords(tmp_path)

    class Other(Letters):
        def encode(self, text: str) -> list[int]:
            return [5]

    with pytest.raises(ValueError, match="fingerprint: expected"):
        load_subwords(tmp_path, tokenizer=Other())


def test_objects_that_refuse_sentences_are_told_apart(tmp_path: Path) -> None:
    def of(letters: str) -> Wrapped:
        own = SimpleNamespace(encode=lambda text: [letters.index(x) for x in text], decode=str)
        return Wrapped(own, size=6, bos=4, eos=5)

    of("ACGT").save(tmp_path)
    assert load_subwords(tmp_path, tokenizer=of("ACGT")).encode("CAT") == [1, 0, 3]
    with pytest.raises(ValueError, match="fingerprint: expected"):
        load_subwords(tmp_path, tokenizer=of("GATC"))


def test_a_fingerprint_of_sentences_alone(tmp_path: Path) -> None:
    """As folders have it that were saved before characters were asked too."""
    path = tmp_path / "subwords.json"
    sides = Sides(letters(), Words(["a"]))
    for subwords, before in (
        (letters(), "1ce4ea0a5d9a1c241b44c1580151cf7e46c0a77e81f841929489e5dae4e4f594"),
        (sides, "b9f1586951954d651cd2f9b56a7f5f5824bb94e21f66c659f85ec5e299ca1e9d"),
    ):
        subwords.save(tmp_path)
        told = json.loads(path.read_text())
        assert told["fingerprint"] != before
        path.write_text(json.dumps(told | {"fingerprint": before}))
        assert load_subwords(tmp_path, tokenizer=subwords).fingerprint() == subwords.fingerprint()


def test_a_vocabulary_that_is_there_wants_no_other(tmp_path: Path) -> None:
    words = Words(["a", "b"])
    words.save(tmp_path)
    assert load_subwords(tmp_path, tokenizer=Words(["a", "b"])).size == words.size
    with pytest.raises(TypeError, match="^tokenizer: expected an object, got <class .*Words'>"):
        load_subwords(tmp_path, tokenizer=Words)
    for other in (Letters(), (1, 2, 3)):
        with pytest.raises(TypeError, match="^tokenizer: expected None, as .* itself, got "):
            load_subwords(tmp_path, tokenizer=other)
    for subwords in (Words(["b", "a"]), letters(), Sides(words, words)):
        with pytest.raises(ValueError, match=f"^tokenizer: another .* than that of {tmp_path}"):
            load_subwords(tmp_path, tokenizer=subwords)


# ---- refused -------------------------------------------------------------------------------------


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no vocabulary here, subwords.json is missing"):
        load_subwords(tmp_path)
    words = Words.train(LINES)
    path = tmp_path / "subwords.json"
    for content, sentence in (
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"{}", "kind: expected sentencepiece, words, wrapped, sides, own, got None"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            load_subwords(tmp_path)
    words.save(tmp_path)
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"size": 7}))
    with pytest.raises(ValueError, match=f"size: expected 7, got {words.size}"):
        load_subwords(tmp_path)
    words.save(tmp_path)
    (tmp_path / "words.txt").write_text("a\nb\na\n")
    with pytest.raises(ValueError, match="words.txt: words: expected different ones, got 'a'"):
        load_subwords(tmp_path)
    (tmp_path / "words.txt").write_text("a\nb c\n")
    with pytest.raises(ValueError, match="words.txt: words: expected words without white space"):
        load_subwords(tmp_path)
    (tmp_path / "words.txt").write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="words.txt: .*decode"):
        load_subwords(tmp_path)
    (tmp_path / "words.txt").unlink()
    with pytest.raises(FileNotFoundError, match="words.txt"):
        load_subwords(tmp_path)


def test_broken_sentencepiece_models(tmp_path: Path) -> None:
    trained().save(tmp_path)
    path = tmp_path / "sentencepiece.model"
    whole = path.read_bytes()
    for content in (b"", b"no model", whole[: len(whole) // 2], whole[:-40]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"sentencepiece.model: model: |expected"):
            load_subwords(tmp_path)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_as_many_as_fit(kind: str) -> None:
    """A size that nobody insists on gives way on both sides."""
    most = SentencePiece.train(LINES, 50_000, kind, fewer=True).size
    with pytest.warns(
        UserWarning, match="100 tokens has no room for parts of words: .* larger one"
    ) as told:
        least = SentencePiece.train(LINES, 100, kind, fewer=True)
    assert told[0].filename == __file__
    lines = [line for pair in LINES for line in pair]
    letters = {letter for line in lines for letter in line if not letter.isspace()}
    assert 259 < least.size <= 259 + len(letters) + 1 < most
    assert least.decode(least.encode(lines[0])) == lines[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"size": 50_000}, r"size: 50,000 tokens are more than these lines give, at most \d"),
        ({"size": 50_000, "kind": "unigram"}, "size: 50,000 tokens are more than these lines give"),
        ({"size": 100}, "size: 100 tokens are too few, single characters and bytes alone need"),
        ({"size": 3}, "size: expected 4 or more, got 3"),
        ({"size": 10**12}, "size: expected at most 2,147,483,647, got 1,000,000,000,000"),
        ({"kind": "word"}, "kind: expected 'bpe' or 'unigram', got 'word'"),
        ({"character_coverage": 0}, "character_coverage: expected above 0 and up to 1, got 0"),
        ({"sentences": 0}, "sentences: expected 1 or more, got 0"),
    ],
)
def test_training_that_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        trained(**changes)


@pytest.mark.parametrize("name", ["byte_fallback", "fewer"])
def test_a_text_is_no_truth(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected True or False, got str"):
        trained(**{name: "no"})


@pytest.mark.parametrize("train", [SentencePiece.train, Words.train])
def test_lines_that_are_refused(train: Any) -> None:
    pytest.importorskip("sentencepiece")
    for lines, kind, sentence in (
        ([], ValueError, "lines: expected at least one that is not empty, got none"),
        (["", " \n"], ValueError, "lines: expected at least one that is not empty, got none"),
        ("a line", TypeError, "lines: expected several str, or pairs of str, got one str"),
        (["a", 3], TypeError, "lines: expected str, or pairs of str, item 1 is 3"),
        (["a", ("b", None)], TypeError, "lines: expected str, or pairs of str, item 1 is"),
        (["a", "ö\ud800"], ValueError, r"lines: item 1: .* got '\\ud800', half .* character 2$"),
    ):
        with pytest.raises(kind, match=sentence):
            train(lines)


def test_words_that_are_refused() -> None:
    for words, kind, sentence in (
        ([], ValueError, "words: expected at least one, got none"),
        ("abc", TypeError, "words: expected several str, got one, 'abc'"),
        (["a", 1], TypeError, "words: expected str, got int"),
        (["a", "\udc80"], ValueError, "words: expected text, got .* half of a surrogate pair"),
    ):
        with pytest.raises(kind, match=sentence):
            Words(words)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [trained, lambda: Words.train(LINES)], ids=["pieces", "words"])
def test_texts_that_are_refused(make: Any) -> None:
    subwords = make()
    with pytest.raises(TypeError, match="text: expected str, got NoneType"):
        subwords.encode(None)
    with pytest.raises(TypeError, match="texts?: expected str, got int"):
        subwords.encode_many(["a", 7])
    with pytest.raises(ValueError, match=r"text: .* got '\\ud800', half .* at character 3"):
        subwords.encode("a \ud800")
    if isinstance(subwords, SentencePiece):
        with pytest.raises(TypeError, match="model: expected bytes, got str; SentencePiece.load"):
            SentencePiece("a file")  # type: ignore[arg-type]


def test_wrapping_that_is_refused() -> None:
    with pytest.raises(TypeError, match="an object with encode and decode, object has no encode"):
        Wrapped(object(), size=9, bos=1, eos=2)
    with pytest.raises(ValueError, match="eos: expected a token below size=9, got 9"):
        Wrapped(Letters(), size=9, bos=1, eos=9)
    with pytest.raises(ValueError, match=r"^tokenizer: encode\(\): expected 0 to 27, .* got -32"):
        letters().encode("A")


class Odd(Letters):
    """Gives what it is told to."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def encode(self, text: str) -> Any:
        return self._given

    def decode(self, tokens: list[int]) -> Any:
        return self._given


@pytest.mark.parametrize("given", [[3.7, 4.2], ["5", "6"], "345", [3, True], {3, 4}, 3, None])
def test_what_is_no_token_is_not_made_one(given: Any) -> None:
    subwords = Wrapped(Odd(given), size=30, bos=1, eos=2)
    with pytest.raises(TypeError, match=r"^tokenizer: encode\(\): expected integers, got "):
        subwords.encode_many(["a"])
    with pytest.raises(TypeError, match="^tokens: expected integers, got "):
        Words(["a", "b", "c"]).decode(given)


def test_integers_of_any_kind() -> None:
    for given in ((3, 4), np.array([3, 4], np.uint16), b"\3\4", iter([3, 4])):
        assert Wrapped(Odd(given), size=30, bos=1, eos=2).encode("a") == [3, 4]


@pytest.mark.parametrize("given", [None, b"ab", ["a"]])
def test_what_is_no_text_is_not_made_one(given: Any) -> None:
    got = type(given).__name__
    with pytest.raises(TypeError, match=rf"^tokenizer: decode\(\): expected str, got {got}"):
        Wrapped(Odd(given), size=30, bos=1, eos=2).decode([3])


@pytest.mark.parametrize("subwords", [Words.train(LINES), letters()], ids=["words", "wrapped"])
def test_tokens_beyond_the_vocabulary_cannot_be_said(subwords: Any) -> None:
    with pytest.raises(ValueError, match=f"expected 0 to {subwords.size - 1}, .* got 1000"):
        subwords.decode([3, 1000])


def test_tokens_beyond_the_pieces_cannot_be_said() -> None:
    with pytest.raises(ValueError, match="expected 0 to 319, the vocabulary's, got -1"):
        trained().decode([3, -1])
    with pytest.raises(ValueError, match="expected 0 to 319, the vocabulary's, got 320"):
        trained().piece(SIZE)


def test_a_vocabulary_that_does_not_fit_the_model() -> None:
    config = relpos.Config().replace({"source_vocabulary": 1000, "target_vocabulary": 1000})
    check_vocabulary(Numbers(1000), config)
    with pytest.raises(ValueError, match="has 999 tokens, the model's source_vocabulary is 1,000"):
        check_vocabulary(Numbers(999), config)
    language = config.replace({"encoder.layers": 0, "source_vocabulary": 1000})
    with pytest.raises(ValueError, match="has 999 tokens, the model's target_vocabulary is 1,000"):
        check_vocabulary(Numbers(999), language)


# ---- what importing costs ------------------------------------------------------------------------


def test_nothing_heavy_is_imported() -> None:
    """The bare package needs NumPy alone; without sentencepiece the sentence says what to do."""
    program = """
import sys
import relpos, relpos.data
print([x for x in ("sentencepiece", "tqdm", "sacrebleu", "matplotlib") if x in sys.modules])
sys.modules["sentencepiece"] = None
for make, given in ((relpos.data.SentencePiece, b""), (relpos.data.SentencePiece.train, ["a b"])):
    try:
        make(given)
    except ImportError as error:
        print(error)
"""
    package = str(Path(relpos.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=package, check=True
    )
    assert done.stdout.splitlines() == [
        "[]",
        "sentencepiece is not installed: pip install 'relpos[train]'",
        "sentencepiece is not installed: pip install 'relpos[train]', or use whole words, "
        "relpos.data.Words or --subwords words",
    ]
