# SPDX-License-Identifier: Apache-2.0
"""Configurations from Python: the same fields as in C, by the same table."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

import relpos
from relpos import Config, Stack, _core
from small_model import small_config
from test_layout import ROOT

HEADER = ROOT / "csrc" / "include" / "relpos" / "model.h"
C_TYPES = {"int64_t": {"int"}, "uint64_t": {"int"}, "double": {"float"}}
C_TYPES["int"] = {"bool", "bool | None", "str"}


def members(struct: str) -> dict[str, str]:
    """Names and types of a struct of model.h, in its order."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    body = re.search(rf"struct {struct} {{(.*?)\n}}", text, re.DOTALL)
    assert body is not None
    found = {}
    for kind, names in re.findall(r"(\w+) ([\w, ]+);", body[1]):
        found |= {name.strip(): kind for name in names.split(",")}
    return found


@pytest.mark.parametrize(("struct", "of"), [("rp_config", Config), ("rp_stack", Stack)])
def test_fields_are_those_of_the_header(struct: str, of: Any) -> None:
    declared = members(struct)
    declared.pop("struct_size", None)
    fields = {each.name: str(each.type) for each in dataclasses.fields(of)}
    assert list(fields) == list(declared)
    for name, kind in declared.items():
        assert fields[name] in C_TYPES.get(kind, {"Stack"}), name


def test_fields_are_those_of_the_core() -> None:
    """One name for each field, and none that Python does not know."""
    names = [name for name, _ in _core.config_default()]
    assert len(set(names)) == len(names)
    assert sorted(names) == sorted(name for name, _ in Config().pairs())


def test_defaults_are_tiny() -> None:
    assert Config() == Config.preset("tiny")
    assert Config().pairs() == _core.config_default()
    assert repr(Config()) == "Config()"


def test_presets() -> None:
    wanted = {"paper-base", "paper-big", "paper-big-enfr", "t2t-relative", "tiny", "small"}
    assert wanted <= set(Config.presets())
    base = Config.preset("paper-base")
    assert (base.width, base.heads, base.feed_forward, base.dropout) == (512, 8, 1024, 0.1)
    assert (base.encoder.layers, base.encoder.position, base.encoder.k) == (6, "shaw", 16)


@pytest.mark.parametrize("name", Config.presets())
def test_presets_come_back(name: str) -> None:
    config = Config.preset(name)
    assert Config(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)}) == config
    assert Config().replace(dict(config.pairs())) == config
    assert eval(repr(config), {"Config": Config, "Stack": Stack}) == config
    assert hash(config) == hash(Config.preset(name))


def test_every_field_can_be_set() -> None:
    """By its own type and by text; what differs is that field alone."""
    config = small_config()
    for name, text in config.pairs():
        for value in (text, read(config, name)):
            assert config.replace({name: value}) == config, name
    others = {
        "width": 32, "encoder.k": 5, "decoder.layers": 2, "norm": "post", "dropout": 1 / 3,
        "bias": not config.bias, "encoder.key": False, "encoder.beyond": "none", "ema": 0.999,
        "seed": 2**64 - 1, "activation": "gelu", "label_smoothing": 0.0, "encoder.softcap": 1e-30,
        "encoder.value_per_head": False, "decoder.value_per_layer": True, "key_heads": 1,
    }  # fmt: skip
    for name, value in others.items():
        changed = config.replace({name: value})
        assert read(changed, name) == value and type(read(changed, name)) is type(value)
        before, after = dict(config.pairs()), dict(changed.pairs())
        assert [key for key in before if before[key] != after[key]] == [name]


def test_values_are_shared_as_keys_are() -> None:
    """None says so, and is for nothing else."""
    apart = Config().replace({"encoder.value_per_head": False})
    assert repr(apart) == "Config(encoder=Stack(value_per_head=False))"
    assert apart.replace({"encoder.value_per_head": None}) == Config()
    assert Config(encoder=Stack(value_per_head=None)).pairs() == Config().pairs()
    with pytest.raises(
        TypeError, match="encoder.per_head: expected a number, a bool or a str, got"
    ):
        apart.replace({"encoder.per_head": None})


def read(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_values_are_what_the_core_understood() -> None:
    config = Config(
        width=np.int64(32), heads=4, dropout=0, bias=np.True_, learning_rate=np.float64(0.1)
    )
    kinds = (int, int, float, bool, float)
    values = (config.width, config.heads, config.dropout, config.bias, config.learning_rate)
    assert tuple(map(type, values)) == kinds
    assert values == (32, 4, 0.0, True, 0.1)


def test_replace_takes_keywords() -> None:
    """As dataclasses.replace does; what has a dot stands in a dict beside them."""
    named = Config().replace(
        {"encoder.k": 8, "width": 32}, dropout=0.25, decoder=Stack(k=5), width=16
    )
    assert named == Config().replace(
        {"encoder.k": 8, "decoder": Stack(k=5), "width": 16, "dropout": 0.25}
    )
    assert Config().replace() == Config()
    with pytest.raises(ValueError, match="there is no field 'drop'; the nearest is 'dropout'"):
        Config().replace(drop=0.2)


def test_replace_takes_a_stack() -> None:
    config = Config().replace({"encoder": Stack(layers=3, k=5), "decoder.k": 4})
    assert (config.encoder.layers, config.encoder.k, config.decoder.k) == (3, 5, 4)
    assert config.decoder.layers == Config().decoder.layers


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().width = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'widht'"):
        Config(widht=3)  # type: ignore[call-arg]


REFUSED = [
    ({"encoder.kk": 8}, ValueError, r"encoder\.kk.*encoder\.k\b"),
    ({"droput": 0.1}, ValueError, r"droput.*dropout"),
    ({"norm": "prex"}, ValueError, r"norm.*prex.*pre.*post"),
    ({"encoder.position": "shwa"}, ValueError, r"encoder\.position.*shwa.*shaw"),
    ({"width": 16.5}, ValueError, "width.*16.5"),
    ({"width": -16}, ValueError, "width.*-16"),
    ({"width": 2**70}, ValueError, f"width.*{2**70}"),
    ({"bias": "maybe"}, ValueError, "bias.*maybe.*true.*false"),
    ({"dropout": 1.5}, ValueError, r"dropout.*1\.5"),
    ({"dropout": float("nan")}, ValueError, "dropout.*nan"),
    ({"width": 18, "heads": 4, "head_width": 0}, ValueError, "heads|width"),
    ({"encoder.layers": 0, "decoder.layers": 0}, ValueError, "layers"),
    ({"width": None}, TypeError, "width: expected a number, a bool or a str, got NoneType"),
    ({"encoder": {"k": 8}}, TypeError, "encoder: expected a number, a bool or a str, got dict"),
    ({"encoder": 3}, ValueError, "encoder"),
    ({"a\0b": 3}, ValueError, r"changes: expected the names of fields, got 'a\\x00b'"),
    ({"norm": "pre\0"}, ValueError, r"norm: expected a text without NUL, got 'pre\\x00'"),
]


def test_what_cannot_be_written_is_refused_by_name() -> None:
    for changes, sentence in (
        ({"width": 10**5000}, "^width: expected a number that can be written: Exceeds "),
        ({"norm": "\ud800"}, r"^norm: expected a text that has UTF-8, got '\\ud800'$"),
    ):
        with pytest.raises(ValueError, match=sentence):
            relpos.Config().replace(changes)


@pytest.mark.parametrize(("changes", "error", "sentence"), REFUSED, ids=str)
def test_refused(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        Config().replace(changes)


def test_refused_by_the_constructor() -> None:
    with pytest.raises(ValueError, match=r"dropout.*1\.5"):
        Config(dropout=1.5)
    with pytest.raises(ValueError, match=r"encoder\.k.*-2"):
        Config(encoder=Stack(k=-2))
    with pytest.raises(TypeError, match="decoder: expected relpos.Stack, got dict"):
        Config(decoder={"k": 8})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="paper-bose.*paper-base"):
        Config.preset("paper-bose")
    with pytest.raises(ValueError, match=r"name: expected a text without NUL, got 'tiny\\x00'"):
        Config.preset("tiny\0")
    with pytest.raises(ValueError, match=r"name: expected a text that has UTF-8, got '\\ud800'"):
        Config.preset("\ud800")


def test_pairs_of_the_binding() -> None:
    for pairs, sentence in (
        (["width"], "expected a tuple of pairs"),
        (("width",), "expected pairs"),
        ((("width",),), "exactly 2 arguments"),
        ((("width", 3),), "must be str"),
    ):
        with pytest.raises(TypeError, match=sentence):
            _core.config_check(pairs)  # type: ignore[arg-type]


def test_learning_rates() -> None:
    """The formulas of model.h, in Python."""
    c = Config().replace({"learning_rate": 2.0, "warmup": 40, "steps": 200, "final_rate": 0.1})
    noam = c.replace({"schedule": "noam"})
    inverse = c.replace({"schedule": "inverse-sqrt"})
    constant = c.replace({"schedule": "constant", "warmup": 0})
    for t in (1, 7, 40, 41, 1000):
        expected = 2.0 * c.width**-0.5 * min(t**-0.5, t * 40**-1.5)
        assert noam.learning_rate_at(t) == pytest.approx(expected, rel=1e-14)
        expected = 2.0 * min(t / 40, (40 / t) ** 0.5)
        assert inverse.learning_rate_at(t) == pytest.approx(expected, rel=1e-14)
        assert constant.learning_rate_at(t) == 2.0
    for name in ("cosine", "linear"):
        falling = c.replace({"schedule": name})
        assert falling.learning_rate_at(40) == pytest.approx(2.0, rel=1e-14)
        assert falling.learning_rate_at(200) == pytest.approx(0.2, rel=1e-12)
        rates = [falling.learning_rate_at(t) for t in range(40, 201)]
        assert rates == sorted(rates, reverse=True)
    with pytest.raises(ValueError, match="step: expected 1 or more, got 0"):
        c.learning_rate_at(0)
    with pytest.raises(ValueError, match=r"step: expected at most 2\^40, got 11805"):
        c.learning_rate_at(2**70)
    with pytest.raises(TypeError, match="step: expected an integer, got float"):
        c.learning_rate_at(1.5)  # type: ignore[arg-type]


def test_devices_that_are_no_texts() -> None:
    for make in (relpos.model_memory, relpos.Transformer):
        with pytest.raises(ValueError, match=r"^device: expected a text that has UTF-8, got '"):
            make(Config(), device="\ud800")


def test_memory_is_told_beforehand() -> None:
    config = small_config()
    memory = relpos.model_memory(config, tokens=256, sentences=32)
    parts = dataclasses.astuple(memory)
    assert all(part >= 0 for part in parts) and sum(parts[:-1]) == memory.total
    assert memory.parameters == memory.gradients and memory.moments == 2 * memory.gradients
    assert memory.average == 0
    averaged = relpos.model_memory(config.replace({"ema": 0.9}), tokens=256, sentences=32)
    assert averaged.average == averaged.parameters == memory.parameters
    idle = relpos.model_memory(config, tokens=256, sentences=32, training=False)
    assert idle.gradients == idle.moments == 0 and idle.total < memory.total
    deep = config.replace({"encoder.layers": 6, "decoder.layers": 6})
    stored = relpos.model_memory(deep, tokens=256, sentences=32)
    again = relpos.model_memory(deep, tokens=256, sentences=32, recompute=True)
    assert again.activations < stored.activations
    with pytest.raises(ValueError, match="tokens: expected 1 or more, got 0"):
        relpos.model_memory(config, tokens=0)
    with pytest.raises(TypeError, match=r"config: expected relpos\.Config, got str"):
        relpos.model_memory("tiny")  # type: ignore[arg-type]
