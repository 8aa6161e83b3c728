# SPDX-License-Identifier: Apache-2.0
"""The demo: the names of numbers are right, nothing of the test is trained on, and it runs."""

from __future__ import annotations

import re
import shlex
import zlib
from itertools import islice, product
from pathlib import Path
from random import Random

import numpy as np
import pytest

import no_matplotlib
from relpos import demo
from relpos import demo_numbers as numbers
from relpos.train import checkpoint

# ---- names, as dictionaries have them ------------------------------------------------------------

KNOWN = {
    1: ("one", "eins"),
    2: ("two", "zwei"),
    7: ("seven", "sieben"),
    11: ("eleven", "elf"),
    12: ("twelve", "zwölf"),
    13: ("thirteen", "dreizehn"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    18: ("eighteen", "achtzehn"),
    20: ("twenty", "zwanzig"),
    21: ("twenty-one", "einundzwanzig"),
    30: ("thirty", "dreißig"),
    36: ("thirty-six", "sechsunddreißig"),
    40: ("forty", "vierzig"),
    60: ("sixty", "sechzig"),
    66: ("sixty-six", "sechsundsechzig"),
    70: ("seventy", "siebzig"),
    77: ("seventy-seven", "siebenundsiebzig"),
    99: ("ninety-nine", "neunundneunzig"),
    100: ("one hundred", "einhundert"),
    101: ("one hundred one", "einhunderteins"),
    111: ("one hundred eleven", "einhundertelf"),
    321: ("three hundred twenty-one", "dreihunderteinundzwanzig"),
    999: ("nine hundred ninety-nine", "neunhundertneunundneunzig"),
    1000: ("one thousand", "eintausend"),
    1001: ("one thousand one", "eintausendeins"),
    1984: (
        "one thousand nine hundred eighty-four",
        "eintausendneunhundertvierundachtzig",
    ),
    21_000: ("twenty-one thousand", "einundzwanzigtausend"),
    101_101: (
        "one hundred one thousand one hundred one",
        "einhunderteintausendeinhunderteins",
    ),
    10**6: ("one million", "eine Million"),
    2 * 10**6: ("two million", "zwei Millionen"),
    10**6 + 1: ("one million one", "eine Million eins"),
    10**6 + 1000: ("one million one thousand", "eine Million eintausend"),
    21 * 10**6: ("twenty-one million", "einundzwanzig Millionen"),
    101 * 10**6: ("one hundred one million", "einhunderteine Millionen"),
    10**9: ("one billion", "eine Milliarde"),
    3 * 10**9: ("three billion", "drei Milliarden"),
    10**12: ("one trillion", "eine Billion"),
    4 * 10**15: ("four quadrillion", "vier Billiarden"),
    10**18: ("one quintillion", "eine Trillion"),
    2 * 10**21: ("two sextillion", "zwei Trilliarden"),
    10**24: ("one septillion", "eine Quadrillion"),
    5 * 10**27: ("five octillion", "fünf Quadrilliarden"),
    10**30: ("one nonillion", "eine Quintillion"),
    8 * 10**33: ("eight decillion", "acht Quintilliarden"),
    5 * 10**27 + 321: (
        "five octillion three hundred twenty-one",
        "fünf Quadrilliarden dreihunderteinundzwanzig",
    ),
    7 * 10**12 + 1_017_001: (
        "seven trillion one million seventeen thousand one",
        "sieben Billionen eine Million siebzehntausendeins",
    ),
}


@pytest.mark.parametrize("number", KNOWN)
def test_known_names(number: int) -> None:
    english = numbers.english_text(numbers.english(number))
    german = numbers.german_text(numbers.german(number))
    assert (english, german) == KNOWN[number]


# ---- every rule, backwards: from the text to the number ------------------------------------------

ONES = "one two three four five six seven eight nine ten eleven twelve".split()
TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
ENGLISH = {word: i for i, word in enumerate(ONES + TEENS, 1)}
ENGLISH |= {
    word: 10 * i
    for i, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)
}
SCALES = "thousand m b tr quadr quint sext sept oct non dec".split()
ENGLISH_SCALES = {
    scale if scale == "thousand" else f"{scale}illion": 1000**i for i, scale in enumerate(SCALES, 1)
}
GERMAN = dict(eins=1, eine=1, ein=1, zwei=2, drei=3, vier=4, fünf=5, sechs=6, sieben=7, acht=8)
GERMAN |= dict(neun=9, zehn=10, elf=11, zwölf=12, sechzehn=16, siebzehn=17)
GERMAN |= {f"{word}zehn": 10 + GERMAN[word] for word in "drei vier fünf acht neun".split()}
TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()
GERMAN |= {word: 10 * i for i, word in enumerate(TENS, 2)}
GERMAN |= {
    f"{one}und{ten}": GERMAN[one] + GERMAN[ten]
    for one, ten in product("ein zwei drei vier fünf sechs sieben acht neun".split(), TENS)
}
GERMAN_SCALES = {
    f"{scale}{ending}": 10 ** (6 * i + 3 * (ending == "iarde"))
    for i, scale in enumerate("Mill Bill Trill Quadrill Quintill".split(), 1)
    for ending in ("ion", "iarde")
}


def read_english(text: str) -> int:
    total = group = 0
    for word in text.replace("-", " ").split():
        if word in ENGLISH_SCALES:
            total, group = total + group * ENGLISH_SCALES[word], 0
        elif word == "hundred":
            group *= 100
        else:
            group += ENGLISH[word]
    return total + group


def read_german_group(text: str) -> int:
    hundreds, _, rest = text.rpartition("hundert")
    return 100 * (GERMAN[hundreds] if hundreds else 0) + (GERMAN[rest] if rest else 0)


def read_german(text: str) -> int:
    total, words = 0, text.split()
    while len(words) > 1:
        group, noun = words[0], words[1]
        words = words[2:]
        one = group == "eine"
        plural = noun if one else re.sub(r"(?<=ion)en$|(?<=iarde)n$", "", noun)
        assert one == (plural == noun), f"{group} {noun}"
        assert not group.endswith(("eins", "ein")), group
        total += read_german_group(group) * GERMAN_SCALES[plural]
    for word in words:
        thousands, _, rest = word.rpartition("tausend")
        assert not thousands.endswith(("eins", "eine")) and not rest.endswith(("ein", "eine"))
        total += 1000 * (read_german_group(thousands) if thousands else 0)
        total += read_german_group(rest) if rest else 0
    return total


def test_every_group_at_every_place() -> None:
    for position, group in product(range(numbers.GROUPS), range(1, 1000)):
        number = group * 1000**position
        assert read_english(numbers.english_text(numbers.english(number))) == number
        assert read_german(numbers.german_text(numbers.german(number))) == number


def test_numbers_of_many_groups() -> None:
    random = Random(5)
    longest = demo.make_config().max_length
    drawn = [numbers.draw(random, 1, 12) for _ in range(2000)]
    for number in [*drawn, 1000**12 - 1, 1_001_001_001, *(1000**i + 1 for i in range(1, 12))]:
        english, german = numbers.english(number), numbers.german(number)
        assert read_english(numbers.english_text(english)) == number
        assert read_german(numbers.german_text(german)) == number
        assert set(english) <= set(numbers.ENGLISH) and set(german) <= set(numbers.GERMAN)
        assert len(german) + 1 <= longest


def test_the_vocabulary() -> None:
    assert len(numbers.VOCABULARY) == len(set(numbers.VOCABULARY)) == 78
    assert numbers.VOCABULARY[numbers.BOS] == "<s>" and numbers.VOCABULARY[numbers.EOS] == "</s>"
    used = {token for n in range(1, 1000) for token in numbers.english(n) + numbers.german(n)}
    for position in range(1, numbers.GROUPS):
        for group in (1, 2):
            number = group * 1000**position
            used |= {*numbers.english(number), *numbers.german(number)}
    used |= {numbers.SPACE}
    assert used == {*numbers.ENGLISH, *numbers.GERMAN}


@pytest.mark.parametrize("number", [0, -1, 1000**12])
def test_numbers_without_a_name(number: int) -> None:
    with pytest.raises(ValueError, match=r"expected 1 to 10\*\*36 - 1, got"):
        numbers.english(number)


# ---- what is trained on, and what is not ---------------------------------------------------------


def groups_in(number: int) -> int:
    return sum(1 for position in range(12) if number // 1000**position % 1000)


def test_the_split() -> None:
    random = Random(0)
    for wanted in (False, True):
        for _ in range(300):
            number = numbers.draw_held_out(random, 1, 6, wanted)
            rule = number >= 1000 and zlib.crc32(str(number).encode("ascii")) % 10 == 0
            assert rule == wanted and 1 <= groups_in(number) <= 6
    assert not any(numbers.held_out(number) for number in range(1, 1000))
    share = np.mean([numbers.held_out(n) for n in range(1000, 101_000)])
    assert abs(share - 0.1) < 0.005


def test_what_is_drawn() -> None:
    random = Random(1)
    drawn = [numbers.draw(random, 1, 6) for _ in range(4000)]
    counts = np.bincount([groups_in(n) for n in drawn], minlength=7)
    assert counts[0] == 0 and np.all(np.abs(counts[1:] / 4000 - 1 / 6) < 0.03)
    groups = [n // 1000**i % 1000 for n in drawn for i in range(12)]
    small = np.mean([group <= 20 for group in groups if group])
    assert abs(small - (0.2 + 0.8 * 20 / 999)) < 0.02
    at = np.array([sum(n // 1000**i % 1000 > 0 for n in drawn) for i in range(12)])
    assert np.all(np.abs(at / at.mean() - 1) < 0.1)


def test_batches_hold_what_was_drawn() -> None:
    for batch in islice(demo.training_batches(3), 20):
        assert batch.target.size <= demo.TOKENS and batch.source.size <= demo.TOKENS
        assert batch.target.size > demo.TOKENS - 120
        sources = np.split(batch.source, batch.source_offsets[1:-1])
        for source, labels in zip(sources, batch.split(batch.labels), strict=True):
            english = [numbers.VOCABULARY[token] for token in source]
            german = [numbers.VOCABULARY[token] for token in labels]
            number = read_english(numbers.english_text(english))
            assert german == [*numbers.german(number), "</s>"]
            assert not numbers.held_out(number) and 1 <= groups_in(number) <= 6


def test_tested_numbers() -> None:
    for groups in (demo.SHORT, demo.LONG):
        tested = demo.tested_numbers(1, groups, 200)
        assert len(set(tested)) == 200 and all(map(numbers.held_out, tested))
        assert {groups_in(number) for number in tested} == {*range(groups[0], groups[1] + 1)}
        assert tested == demo.tested_numbers(1, groups, 200) != demo.tested_numbers(2, groups, 200)


# ---- the whole -----------------------------------------------------------------------------------


def test_a_short_run(tmp_path: Path) -> None:
    said: list[str] = []
    [exact, other] = demo.run(
        steps=6, seed=2, compare=True, output=tmp_path / "to look at", progress="none",
        say=said.append, tested=20,
    )  # fmt: skip
    assert (exact.positions, other.positions) == ("relative positions", "sinusoidal positions")
    assert exact.short == exact.long == 0.0 and exact.steps == 6
    lines = [line for line in said if line.startswith("exact: ")]
    assert lines == [str(exact), str(other)]
    assert re.match(r"exact: 0\.00% of 20 unseen numbers with 1 to 6 groups, 0\.00% with", lines[0])
    assert any("five octillion three hundred twenty-one" in line for line in said)
    again, _ = demo.train(6, 2, tested=20, progress="none")
    saved = demo.Transformer.load(tmp_path / "to look at" / "model.safetensors", training=False)
    assert saved.config == again.config == demo.make_config(6, 2)
    for name, weights in again.parameters.items():
        assert np.array_equal(weights, saved.parameters[name]), name
    translator = demo.Translator.load(tmp_path / "to look at")
    assert translator.subwords.encode("two hundred one") == [
        numbers.TOKENS[word] for word in ("two", "hundred", "one")
    ]
    hint = said[said.index(lines[0]) + 2].partition(": ")[2]
    assert shlex.split(hint)[:4] == ["relpos", "inspect", str(tmp_path / "to look at"), "--source"]
    pytest.importorskip("matplotlib")
    assert (tmp_path / "to look at" / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_the_folder_of_a_run_is_left_alone(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, demo.Transformer(demo.make_config(6, 2), tokens=64))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="^output: .* is the folder of a training run"):
        demo.run(steps=6, output=tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_seed_that_is_none_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seed"):
        demo.run(seed=-1, output=tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_no_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_matplotlib.hide(monkeypatch)
    said: list[str] = []
    demo.run(steps=2, seed=2, output=tmp_path, progress="none", say=said.append, tested=2)
    assert any("it takes matplotlib" in line for line in said)
    assert not (tmp_path / "attention.png").exists()


def test_exact_is_what_greedy_decoding_says() -> None:
    """A model that has learned three numbers and no more."""
    model = demo.Transformer(
        demo.make_config(150, 1).replace(
            {"width": 64, "dropout": 0, "attention_dropout": 0, "schedule": "constant"}
        ),
        tokens=demo.TOKENS,
    )
    known = [1, 21_000_001, 317]
    batch = demo.as_batch([demo.as_pair(number) for number in known])
    for _ in range(150):
        model.step(batch)
    tested = [*known, 5_618_402, 999_999]
    right = [
        demo.translate(model, number) == numbers.german_text(numbers.german(number))
        for number in tested
    ]
    assert right[:3] == [True] * 3 and not all(right)
    assert demo.share_exact(model, tested) == sum(right) / len(tested)
