# SPDX-License-Identifier: Apache-2.0
"""Names of whole numbers below 10^36, in English and in German, as tokens, by rule.

    5 * 10**27 + 321    five octillion three hundred twenty-one
                        fünf Quadrilliarden dreihunderteinundzwanzig

English counts in the short scale, in words; a hyphen is a token of its own. German counts in the
long scale, in morphemes: drei hundert ein und zwan zig, and "_" for a space. To translate one into
the other is to turn ones and tens around, to count in another scale, to know ein, eins and eine
apart, and to use the plural where there is more than one: all of it exact, so that a translation is
right or wrong.

A number is twelve groups of three digits, most of them 0. `draw` chooses how many are not.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from random import Random

GROUPS = 12  # of three digits

_ENGLISH_ONES = (
    "", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_ENGLISH_TENS = (
    "", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
)  # fmt: skip
_ENGLISH_SCALES = (
    "", "thousand", "million", "billion", "trillion", "quadrillion", "quintillion", "sextillion",
    "septillion", "octillion", "nonillion", "decillion",
)  # fmt: skip

_GERMAN_ONES = (
    "", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf",
    "zwölf",
)  # fmt: skip
_GERMAN_SHORT = {2: "zwan", 6: "sech", 7: "sieb"}  # zwanzig, sechzehn, sechzig, siebzehn, siebzig
_GERMAN_SCALES = (
    "", "tausend", "Million", "Milliarde", "Billion", "Billiarde", "Trillion", "Trilliarde",
    "Quadrillion", "Quadrilliarde", "Quintillion", "Quintilliarde",
)  # fmt: skip
SPACE = "_"

PAD, BOS, EOS = 0, 1, 2
ENGLISH = (*_ENGLISH_ONES[1:], *_ENGLISH_TENS[2:], "hundred", *_ENGLISH_SCALES[1:], "-")
GERMAN = (
    *_GERMAN_ONES[1:], "eins", "eine", *_GERMAN_SHORT.values(), "zig", "ßig", "und", "hundert",
    *_GERMAN_SCALES[1:], "en", "n", SPACE,
)  # fmt: skip
VOCABULARY = ("<pad>", "<s>", "</s>", *ENGLISH, *GERMAN)
TOKENS = {token: i for i, token in enumerate(VOCABULARY)}


def groups_of(number: int) -> list[tuple[int, int]]:
    """(group, position) of the groups that are not 0, the highest first."""
    if not 1 <= number < 1000**GROUPS:
        raise ValueError(f"number: expected 1 to 10**{3 * GROUPS} - 1, got {number}")
    groups = ((number // 1000**position % 1000, position) for position in range(GROUPS))
    return [(group, position) for group, position in groups if group > 0][::-1]


def english(number: int) -> list[str]:
    """A number's name in words: three hundred twenty - one."""
    return [word for group in groups_of(number) for word in _english_group(*group)]


@cache
def _english_group(group: int, position: int) -> tuple[str, ...]:
    hundreds, rest = divmod(group, 100)
    words = [_ENGLISH_ONES[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(_ENGLISH_TENS[rest // 10])
        if rest % 10:
            words += ["-", _ENGLISH_ONES[rest % 10]]
    elif rest:
        words.append(_ENGLISH_ONES[rest])
    if position:
        words.append(_ENGLISH_SCALES[position])
    return tuple(words)


def german(number: int) -> list[str]:
    """A number's name in morphemes: drei hundert ein und zwan zig."""
    parts: list[str] = []
    before = 0
    for group, position in groups_of(number):
        # What is below a million is one word; Millionen and above are nouns.
        if before > 1:
            parts.append(SPACE)
        parts += _german_group(group, position)
        before = position
    return parts


@cache
def _german_group(group: int, position: int) -> tuple[str, ...]:
    hundreds, rest = divmod(group, 100)
    parts = [_GERMAN_ONES[hundreds], "hundert"] if hundreds else []
    parts += _german_rest(rest, position)
    if position > 1:
        parts.append(SPACE)
    if position:
        parts.append(_GERMAN_SCALES[position])
    if position > 1 and group > 1:
        parts.append("n" if parts[-1].endswith("e") else "en")
    return tuple(parts)


def _german_rest(rest: int, position: int) -> list[str]:
    """1 to 99: ones come before tens, and one alone is ein, eins or eine by what follows."""
    if rest == 1:
        return ["eins" if position == 0 else "ein" if position == 1 else "eine"]
    if rest <= 12:
        return [_GERMAN_ONES[rest]] if rest else []
    tens, ones = divmod(rest, 10)
    if tens == 1:
        return [_GERMAN_SHORT.get(ones, _GERMAN_ONES[ones]), "zehn"]
    said = [_GERMAN_ONES[ones], "und"] if ones else []
    return [*said, _GERMAN_SHORT.get(tens, _GERMAN_ONES[tens]), "ßig" if tens == 3 else "zig"]


def english_text(words: Sequence[str]) -> str:
    """As one writes it: three hundred twenty-one."""
    return " ".join(words).replace(" - ", "-")


def german_text(parts: Sequence[str]) -> str:
    """As one writes it: dreihunderteinundzwanzig."""
    return "".join(parts).replace(SPACE, " ")


def draw(random: Random, fewest: int, most: int) -> int:
    """A number with `fewest` to `most` groups that are not 0, anywhere among the twelve.

    Four of five groups are uniform in 1..999, the others in 1..20, which would else be rare.
    """
    number = 0
    for position in random.sample(range(GROUPS), random.randint(fewest, most)):
        largest = 999 if random.random() < 0.8 else 20
        number += random.randint(1, largest) * 1000**position
    return number


def held_out(number: int) -> bool:
    """Whether a number is for the test alone: a tenth of those from 1,000 up."""
    return number >= 1000 and zlib.crc32(str(number).encode()) % 10 == 0


def draw_held_out(random: Random, fewest: int, most: int, wanted: bool) -> int:
    """The next draw that is, or is not, for the test."""
    while held_out(number := draw(random, fewest, most)) != wanted:
        pass
    return number
