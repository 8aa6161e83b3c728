# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of the user's own, in the folder of a vocabulary and out of it."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import relpos
import text_files
from relpos import cli
from relpos.data import Sides, Words, Wrapped, load_subwords
from relpos.data.subwords import save_subwords, wants_object

LETTERS = "abcdefghijklmnopqrstuvwxyz "
SIZES = {"source_vocabulary": 29, "target_vocabulary": 29}
PAIRS = [("abc", "cba"), ("a b", "b a"), ("xyz", "zyx")]


class Letters:
    """Of lower-case letters and spaces."""

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(LETTERS[token] for token in tokens)


def letters(tokenizer: Any = None) -> Wrapped:
    return Wrapped(tokenizer or Letters(), size=29, bos=27, eos=28)


# ---- pickles -------------------------------------------------------------------------------------


def test_a_pickle_travels_and_is_read_by_who_says_so(tmp_path: Path) -> None:
    letters().save(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["subwords.json", "subwords.pickle"]
    with pytest.raises(ValueError, match=r"subwords\.pickle: .* unpickle=True\) reads it"):
        load_subwords(tmp_path)
    again = load_subwords(tmp_path, unpickle=True)
    assert isinstance(again, Wrapped) and isinstance(again.tokenizer, Letters)
    assert again.encode("a z") == [0, 26, 25] and again.decode([27, 2, 0, 28]) == "ca"
    assert again.fingerprint() == letters().fingerprint()
    Words(["a"]).save(tmp_path / "words")
    for folder in (tmp_path, tmp_path / "words"):
        with pytest.raises(TypeError, match="^unpickle: expected a bool, got str"):
            load_subwords(folder, unpickle="no")  # type: ignore[arg-type]


class Malice(Letters):
    """What a pickle can do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_is_run_unasked(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    run = tmp_path / "run"
    given: dict[str, Any] = {
        "config": text_files.config(**SIZES),
        "data": PAIRS,
        "progress": "none",
    }
    relpos.Trainer(**given, folder=run, subwords=letters(Malice(mark)), steps=1).train()
    assert load_subwords(run / "tokenizer", tokenizer=Letters()).encode("b") == [1]
    for reads in (
        lambda: load_subwords(run / "tokenizer"),
        lambda: relpos.Translator.load(run),
        lambda: relpos.Trainer(**given, folder=tmp_path / "new", start=run, steps=1),
        lambda: relpos.Trainer(**given, folder=run, resume=True, steps=2),
    ):
        with pytest.raises(ValueError, match=r"subwords\.pickle: the vocabulary was an object of"):
            reads()  # type: ignore[no-untyped-call]
    assert not mark.exists()
    with pytest.raises(TypeError, match="expected an object with encode and decode"):
        load_subwords(run / "tokenizer", unpickle=True)
    assert mark.exists()  # it would have been seen


def test_pickles_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters().save(tmp_path)
    path = tmp_path / "subwords.pickle"
    whole = path.read_bytes()
    for content, sentence in (
        (b"", "EOFError"),
        (whole[:-9], "cannot be unpickled here: "),
        (whole.replace(b"Letters", b"Lettres"), "AttributeError: .*Lettres"),
        (pickle.dumps(7), "expected an object with encode and decode"),
    ):
        path.write_bytes(content)
        with pytest.raises((ValueError, TypeError), match=sentence):
            load_subwords(tmp_path, unpickle=True)
    path.write_bytes(whole)
    monkeypatch.setattr(Letters, "encode", lambda self, text: [3] * len(text))
    with pytest.raises(ValueError, match="fingerprint: expected"):
        load_subwords(tmp_path, unpickle=True)


def test_an_object_that_cannot_be_pickled_is_given_again(tmp_path: Path) -> None:
    letters().save(tmp_path)  # what is left of it goes
    own = SimpleNamespace(encode=lambda text: [1] * len(text), decode=str)
    letters(own).save(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["subwords.json"]
    for given in ({}, {"unpickle": True}):
        with pytest.raises(ValueError, match="an object of your own, which is not in the folder"):
            load_subwords(tmp_path, **given)
    assert load_subwords(tmp_path, tokenizer=own).encode("ab") == [1, 1]


class Own:
    """Subwords that keep one of Hugging Face's themselves, under its usual name."""

    size, bos, eos, unknown = 29, 27, 28, -1

    def __init__(self) -> None:
        self.encode, self.decode = Letters().encode, Letters().decode

    def encode_many(self, texts: Any) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def fingerprint(self) -> str:
        return "letters"

    def save(self, folder: Any) -> None:
        (Path(folder) / "tokenizer.json").write_text("theirs")


def test_what_a_class_has_saved_stays_its_own(tmp_path: Path) -> None:
    save_subwords(tmp_path, Own())
    assert (tmp_path / "tokenizer.json").read_text() == "theirs"
    assert isinstance(load_subwords(tmp_path, unpickle=True), Own)
    (tmp_path / "subwords.pickle").unlink()  # as folders of before are
    assert wants_object(tmp_path) and isinstance(load_subwords(tmp_path, tokenizer=Own()), Own)
    with pytest.raises(ValueError, match="an object of your own, which is not in the folder"):
        load_subwords(tmp_path)
    save_subwords(tmp_path, Own())
    save_subwords(tmp_path, Words(["a"]))
    left = sorted(each.name for each in tmp_path.iterdir())
    assert left == ["subwords.json", "tokenizer.json", "words.txt"]
    letters().save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "theirs"


def test_one_of_two(tmp_path: Path) -> None:
    Sides(letters(), Words(["a", "b"])).save(tmp_path)
    with pytest.raises(ValueError, match=r"source.subwords\.pickle: "):
        load_subwords(tmp_path)
    again = load_subwords(tmp_path, unpickle=True)
    assert isinstance(again, Sides) and again.source.encode("b") == [1]


def test_a_run_of_it_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    relpos.Trainer(
        config=text_files.config(**SIZES), data=PAIRS, folder=run, subwords=letters(), steps=2,
        progress="none",
    ).train()  # fmt: skip
    (tmp_path / "lines").write_text("abc\nb a\n")
    translate = ["translate", str(run), str(tmp_path / "lines"), "--max-length", "4"]
    assert cli.main(translate) != 0
    assert "translate: --unpickle)" in capsys.readouterr().err
    assert cli.main([*translate, "--unpickle"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    page = tmp_path / "page.html"
    inspect = ["inspect", str(run), "--source", "abc", "--target", "cba", "--out", str(page)]
    assert cli.main([*inspect, "--unpickle"]) == 0 and page.exists()


# ---- Hugging Face's ------------------------------------------------------------------------------


class Tokenizer(Letters):
    """As much of the class of that name as is asked for."""

    def encode(self, text: str) -> Any:
        return SimpleNamespace(ids=super().encode(text))

    def to_str(self) -> str:
        return json.dumps({"letters": LETTERS})

    @staticmethod
    def from_str(text: str) -> Tokenizer:
        if json.loads(text)["letters"] != LETTERS:
            raise Exception("other letters")  # as the package does
        return Tokenizer()


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    package = ModuleType("tokenizers")
    package.Tokenizer = Tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", package)
    return Tokenizer


def real(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    package = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

    def make() -> Any:
        vocabulary = {letter: place for place, letter in enumerate(LETTERS)}
        model = package.models.BPE(vocab=vocabulary, merges=[])
        made = package.Tokenizer(model)
        made.decoder = package.decoders.Fuse()
        return made

    return make


@pytest.mark.parametrize("which", [stand_in, real])
def test_hugging_face_s_travel_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: Any
) -> None:
    make = which(monkeypatch)
    subwords = letters(make())
    letters().save(tmp_path)  # another one's pickle goes
    subwords.save(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "subwords.json",
        "subwords.tokenizer.json",
    ]
    again = load_subwords(tmp_path)
    assert isinstance(again, Wrapped) and type(again.tokenizer) is type(make())
    assert again.encode("a z") == subwords.encode("a z") == [0, 26, 25]
    assert again.decode([2, 0]) == subwords.decode([2, 0])
    assert load_subwords(tmp_path, tokenizer=make()).encode("b") == [1]
    path = tmp_path / "subwords.tokenizer.json"
    for content in (b"{", b'{"letters": ""}', b"\xff"):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"tokenizer\.json: not a tokenizer of Hugging Face's: "
        ):
            load_subwords(tmp_path)


def test_hugging_face_s_that_their_format_cannot_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with parts in Python: it is given again, and training goes on."""
    own = stand_in(monkeypatch)()

    def refuse(self: Any) -> str:
        raise Exception("Custom PreTokenizer cannot be serialized")

    monkeypatch.setattr(Tokenizer, "to_str", refuse)
    letters().save(tmp_path)
    letters(own).save(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["subwords.json"]
    assert wants_object(tmp_path) and load_subwords(tmp_path, tokenizer=own).encode("b") == [1]


def test_hugging_face_s_without_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters(stand_in(monkeypatch)()).save(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"tokenizer\.json: to read it, pip install tokenizers"):
        load_subwords(tmp_path)


def test_a_run_of_hugging_face_s_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By who gives nothing, and by a function that makes them, which is not called."""
    make = stand_in(monkeypatch)
    run = tmp_path / "run"
    given: dict[str, Any] = {
        "config": text_files.config(**SIZES), "data": PAIRS, "folder": run, "progress": "none",
    }  # fmt: skip
    relpos.Trainer(**given, subwords=letters(make()), steps=1).train()
    relpos.Trainer(**given, steps=2, resume=True).train()
    never = pytest.fail
    assert relpos.Trainer(**given, subwords=lambda: never(), steps=3, resume=True).train().step == 3
    assert isinstance(relpos.Translator.load(run).subwords, Wrapped)
