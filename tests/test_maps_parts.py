# SPDX-License-Identifier: Apache-2.0
"""The maps of one call of relpos.attention: beside its result, and parts that add up to its logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import relpos


def test_maps_beside_a_result() -> None:
    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, 2, 3, 7, 8), np.float32)
    shaw = relpos.Shaw(random.standard_normal((5, 8), np.float32))
    call: dict[str, Any] = {"position": shaw, "causal": True, "window": 4}
    dropped = {"dropout": 0.5, "seed": 3}
    out, maps = relpos.attention(q, k, v, **call, **dropped, return_maps="all")
    assert np.array_equal(out, relpos.attention(q, k, v, **call, **dropped))
    expected = relpos.attention_maps(q, k, parts="all", **call)
    assert np.array_equal(maps.probabilities, expected.probabilities)  # those before dropout
    assert np.array_equal(maps.logits, expected.logits)
    assert list(maps.parts) == list(expected.parts) == ["content", "key_table"]
    out, maps = relpos.attention(q, k, v, **call, return_maps=["logits"])
    assert maps.probabilities is None and not maps.parts
    whole = relpos.attention_maps(q, k, **call).probabilities @ v
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-5)
    packed, maps = relpos.attention(
        *(np.ascontiguousarray(x[0].transpose(1, 0, 2)) for x in (q, k, v)), offsets=[0, 3, 7],
        return_maps="probabilities",
    )  # fmt: skip
    assert packed.shape == (7, 3, 8) and [p.shape for p in maps.probabilities] == [
        (3, 3, 3),
        (3, 4, 4),
    ]
    room = np.full_like(q, 7)
    with pytest.raises(ValueError, match="return_maps: there is no 'slopes' in this call"):
        relpos.attention(q, k, v, **call, out=room, return_maps=["slopes"])
    assert (room == 7).all()
    wrong: Any
    for wrong in (3, np.array(1), np.array("all")):
        with pytest.raises(TypeError, match="return_maps: expected names"):
            relpos.attention(q, k, v, return_maps=wrong)
    with pytest.raises(ValueError, match="k"):
        relpos.attention(q, k[..., :4], v, return_maps="all")


def test_a_part_is_called_as_its_gradient_is() -> None:
    """Also where a scheme that learns nothing has a term of that name, and stands before it."""
    q, dout = np.random.default_rng(3).standard_normal((2, 1, 2, 5, 8), np.float32)
    slopes = np.array([0.3, 0.7], np.float32)
    for both in ((relpos.ALiBi(), relpos.ALiBi(slopes)), (relpos.ALiBi(slopes), relpos.ALiBi())):
        _, ctx = relpos.attention_forward(q, q, q, position=both)
        assert list(relpos.attention_backward(ctx, dout)) == ["q", "k", "v", "slopes"]
        parts = relpos.attention_maps(q, q, position=both, parts="all").parts
        np.testing.assert_allclose(parts["slopes"][0, :, 0, 1], -slopes, rtol=1e-6)
        fixed = relpos.position.alibi_slopes(2)
        np.testing.assert_allclose(parts["slopes_2"][0, :, 0, 1], -fixed, rtol=1e-6)


def test_parts_add_up_to_their_own_rounding() -> None:
    """The products of a logit are those of the content, its relation the one shown: what rounds
    is one addition, and for each of the three the step from units of log 2. A rounding is 2^-24 of
    what it gives: a part has one, the logit two; 2^-20 is for their products."""
    random = np.random.default_rng(2)
    q, k = random.standard_normal((2, 1, 2, 90, 16), np.float32)
    table = random.standard_normal((9, 16), np.float32)
    maps = relpos.attention_maps(q, k, position=relpos.Shaw(table), parts="all")
    parts = [maps.parts[name].astype(np.float64) for name in ("content", "key_table")]
    error = np.abs(sum(parts) - maps.logits)
    rounded = 2 * np.abs(maps.logits.astype(np.float64)) + sum(np.abs(x) for x in parts)
    assert np.all(error <= 2.0**-24 * rounded * (1 + 2.0**-20)) and error.any()


@pytest.mark.parametrize("case", ["shaw", "bias", "both sides"])
def test_exact_numbers_add_up_exactly(case: str) -> None:
    """Relations are added to the sums of products that are the content, in units of log 2. With a
    scale of ln 2 and small integers no sum is rounded on the way, so that what is shown is ln 2
    times an integer, rounded once; and those of content and relations add up to that of the
    logits exactly."""
    random = np.random.default_rng(1)
    q, k = (random.integers(-4, 5, (1, 2, 70, 16)).astype(np.float32) for _ in range(2))
    table = random.integers(-3, 4, (9, 16)).astype(np.float32)
    if case == "shaw":
        position: Any = relpos.Shaw(table)
    elif case == "both sides":
        position = relpos.RelativeKeyQuery(random.integers(-3, 4, (139, 16)).astype(np.float32))
    else:
        position = relpos.MusicTransformer(random.integers(-3, 4, (139, 16)).astype(np.float32))
    ln2 = np.float32(math.log(2))
    maps = relpos.attention_maps(q, k, position=position, scale=math.log(2), parts="all")

    def integers(x: Any) -> Any:
        found = np.rint(x.astype(np.float64) / math.log(2))
        assert np.array_equal(found.astype(np.float32) * ln2, x)
        return found

    content = integers(maps.parts["content"])
    assert np.array_equal(
        content[0], q[0].astype(np.float64) @ k[0].astype(np.float64).swapaxes(1, 2)
    )
    relation = sum(integers(part) for name, part in maps.parts.items() if name != "content")
    assert np.array_equal(content + relation, integers(maps.logits)) and np.any(relation)
