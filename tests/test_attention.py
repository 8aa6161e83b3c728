# SPDX-License-Identifier: Apache-2.0
"""The chain: float64 reference, libcore_f64, every instruction set of libcore.

    reference     checked by finite differences in test_reference.py
    libcore_f64   against the reference, and by finite differences of its own forward
    libcore       every instruction set against the reference, to the error of the plain formula

2,000 random cases and every corner run on each of them. A failure names the case and the core:
paste both into compare_case() to see it again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import capi
import relpos
from capi import Core
from case_arrays import make_arrays
from cases import Case, Distances, Edges, Labels, Mask, random_case
from cores import get_core
from corners import CORNERS
from guarded_arrays import Arrays
from relpos.reference import KINDS, Band, Dropout
from timed_cases import TIMED, Timed
from tolerances import BF16_ROUNDOFF, compare, oracle

CHUNK = 100
CHUNKS = 20
CORES = ("f64", *capi.CORES, "bf16")


def compare_case(core: Core, case: Case) -> str | None:
    """None, or what is wrong with this core's results for this case."""
    try:
        results = capi.run_both(core, case, make_arrays(case, core.dtype))
    except (capi.CoreError, AssertionError) as error:
        return f"{core.name} {case}: {error}"
    faults: list[str] = []
    for unit in (0.0, 2 * BF16_ROUNDOFF) if core.rounded else (0.0,):
        truth = oracle(case, unit)
        found = [compare(name, results[name], truth, core.rounded) for name in truth.exact]
        faults = [fault for fault in found if fault]
        if not faults:
            return None
    return "\n  ".join([f"{core.name} {case}", *faults])


def report(faults: list[str | None]) -> None:
    wrong = [fault for fault in faults if fault]
    if wrong:
        pytest.fail(f"{len(wrong)} of {len(faults)} cases are wrong\n" + "\n".join(wrong[:5]))


@pytest.mark.parametrize("name", CORES)  # the faster-changing one: cores share the oracles
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_cases(libraries: dict[str, Path], chunk: int, name: str) -> None:
    core = get_core(libraries, name)
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    report([compare_case(core, random_case(seed)) for seed in seeds])


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("first", range(0, len(CORNERS), CHUNK))
def test_corners(libraries: dict[str, Path], first: int, name: str) -> None:
    core = get_core(libraries, name)
    report([compare_case(core, case) for case in CORNERS[first : first + CHUNK]])


@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize(
    "timed", [pytest.param(t, marks=[pytest.mark.slow] * (t.n > 2048), id=str(t)) for t in TIMED]
)
def test_timed_cases(libraries: dict[str, Path], timed: Timed, name: str) -> None:
    """What the benchmarks time; of long sequences fewer heads, since the oracle stores N x M."""
    core, case = get_core(libraries, name), timed.case()
    if not timed.lengths and timed.n > 256:
        case = replace(case, H=max(1, 2048 // timed.n))
    report([compare_case(core, case)])


def test_random_cases_are_what_they_should_be() -> None:
    """A quarter with N > 128 and a band, every clip distance strictly inside; all features occur.

    Half of them with Shaw's terms alone, and with every feature that those can have.
    """
    cases = [random_case(seed) for seed in range(CHUNK * CHUNKS)]
    maps = [[map for _, _, map in case.terms] for case in cases]
    bands = [[m for m in own if isinstance(m, Band | Distances)] for own in maps]
    inside = [
        case.N > 128 and len(band) > 0 and all(max(b.left, b.right) < case.N - 1 for b in band)
        for case, band in zip(cases, bands, strict=True)
    ]
    assert len(cases) >= 2000 and sum(inside) * 4 >= len(cases)
    new = ("query", "bias", "position_bias", "mask", "softcap", "dropout")
    shaw = [
        case
        for case, own in zip(cases, maps, strict=True)
        if all(isinstance(map, Band) for map in own)
        and len(case.maps("key")) < 2
        and len(case.maps("value")) < 2
        and case.window == (-1, -1)
        and not any(getattr(case, name) for name in new)
    ]
    assert 0.45 < len(shaw) / len(cases) < 0.6
    old = ("per_head", "causal", "lengths", "key_lengths", "offsets", "starts", "outlier")
    for some, features in ((shaw, ("tied", *old)), (cases, (*old, *new))):
        for feature in features:
            share = sum(bool(getattr(case, feature)) for case in some) / len(some)
            assert 0.05 < share < 0.7, (feature, share)
    for kind in (Band, Distances, Labels, Edges):
        assert sum(any(isinstance(m, kind) for m in own) for own in maps) * 10 > len(cases), kind
    for kind in KINDS:
        assert sum(len(case.maps(kind)) == 2 for case in cases) * 20 > len(cases), kind
    assert sum(case.window != (-1, -1) for case in cases) * 10 > len(cases)


# ---- libcore_f64 by finite differences of its own forward ----------------------------------------


class Differences:
    """sum(out * dout) of libcore_f64 along lines through the inputs."""

    def __init__(self, core: Core, case: Case) -> None:
        self.core, self.case = core, case
        self.arrays: Arrays = make_arrays(case)
        self.gradients = capi.run_backward(
            core, case, self.arrays, capi.run_forward(core, case, self.arrays)
        )

    def loss(self) -> float:
        self.arrays.remember()
        out = capi.run_forward(self.core, self.case, self.arrays).out.view
        used = ~np.isnan(self.arrays.dout.view)
        return float(np.sum(out[used] * self.arrays.dout.view[used]))

    def along(self, name: str, direction: np.ndarray, step: float = 2.0**-9) -> float:
        """The derivative along `direction`, by the four-point stencil."""
        x = self.arrays[name].view
        before = x.copy()
        values = []
        for offset in (1, -1, 2, -2):
            x[...] = before + offset * step * direction
            values.append(self.loss())
        x[...] = before
        return (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step)

    def check(self, name: str, direction: np.ndarray) -> None:
        expected = self.along(name, direction)
        got = float(np.sum(self.gradients[name] * direction))
        # An error in one element alone counts as much as that element's share of the direction.
        bound = 1e-7 * max(1.0, float(np.sqrt(np.mean(self.gradients[name] ** 2))))
        assert abs(got - expected) <= bound, (
            f"{self.case}: d{name} along a direction is {got!r}, finite differences say "
            f"{expected!r} (bound {bound:.3g})"
        )


def smooth(case: Case) -> Case:
    """Without what makes the scores too steep for this step."""
    scale = None if case.softcap and case.scale == 1 else case.scale
    softcap = max(case.softcap, 1.0) if case.softcap else 0.0
    return replace(case, spread=1.0, rising=False, outlier=None, softcap=softcap, scale=scale)


@pytest.mark.parametrize("seed", range(1, 241, 2))
def test_gradient_along_random_directions(libraries: dict[str, Path], seed: int) -> None:
    """Half of them of long cases, half of them with more than Shaw's terms; all masks are held."""
    case = smooth(random_case(seed * 2))
    differences = Differences(get_core(libraries, "f64"), case)
    random = np.random.default_rng(seed)
    for name, gradient in differences.gradients.items():
        if gradient.size:
            direction = random.standard_normal(gradient.shape)
            differences.check(name, direction / np.linalg.norm(direction))


TWO = Case(B=2, H=2, N=5, M=5, D=2, Dv=2)
SMALL = [
    Case(N=5, M=7, D=3, Dv=2, key=Band(2, 1), value=Band(1, 3), causal=True),
    Case(N=7, M=5, D=2, Dv=3, key=Band(1, 1, "none"), value=Band(0, 2, "none")),
    Case(N=6, M=6, D=3, Dv=3, key=Band(2, 2), value=Band(2, 2), tied=True),
    Case(N=18, M=18, D=1, Dv=1, key=Band(3, 3), value=Band(3, 3), causal=True),
    Case(B=2, H=2, N=4, M=5, D=2, key=Band(8, 8), value=Band(0, 0), per_head=True),
    replace(TWO, Dv=3, key=Band(1, 1), lengths=(3, 5)),
    Case(B=3, H=2, D=2, Dv=3, value=Band(1, 1), offsets=(0, 3, 3, 8), scale=-0.5),
    Case(N=3, M=20, D=2, Dv=2, key=Band(4, 2), value=Band(4, 2), starts=(5,)),
    replace(TWO, query=Band(2, 1), key=Band(1, 2)),
    replace(TWO, bias=Band(2, 1), scale=0.3, per_head=True),
    replace(TWO, key=Band(2, 2), position_bias=True, scale=0.4),
    replace(TWO, key=Band(20, 20), query=Band(20, 20), position_bias=True, causal=True),
    replace(TWO, position_bias=True),
    *(replace(TWO, **{kind: Distances(4, 4, "clip", 3, "random")}) for kind in KINDS),  # type: ignore
    *(replace(TWO, **{kind: Distances(4, 4, "none", 0, "", "random")}) for kind in KINDS),  # type: ignore
    *(replace(TWO, **{kind: Labels(3, 2, per_head=True)}) for kind in KINDS),  # type: ignore
    *(replace(TWO, **{kind: Edges(3, 3, "repeated")}) for kind in KINDS),  # type: ignore
    replace(TWO, key=Band(1, 1), softcap=1.5),
    replace(TWO, key=Band(1, 1), value=Band(1, 1), dropout=Dropout(0.4, (3, 4))),
    replace(TWO, key=Band(1, 1), window=(1, 2), mask=Mask("random", 0.7)),
    replace(
        TWO,
        key=(Band(2, 2), Labels(3)),
        query=(Distances(4, 4, "clip", 2, "folded"), Edges(2)),
        bias=(Labels(4, 2), Band(1, 1)),
        value=(Edges(2, 4, "repeated"), Distances(3, 3, "none", 0, "", "shared")),
        per_head=("query", "value"),
        position_bias=True,
        softcap=3.0,
        mask=Mask("random", 0.8, per_head=True),
        dropout=Dropout(0.3, (5, 6), 7, 8),
        lengths=(5, 4),
    ),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_element_of_small_gradients(libraries: dict[str, Path], case: Case) -> None:
    differences = Differences(get_core(libraries, "f64"), replace(case, seed=5))
    for name, gradient in differences.gradients.items():
        for index in np.ndindex(gradient.shape):
            direction = np.zeros(gradient.shape)
            direction[index] = 1
            if np.isnan(differences.arrays[name].view[index]):  # beyond a length
                assert gradient[index] == 0
            else:
                differences.check(name, direction)


@pytest.mark.parametrize("bias", [-1e8, -1e9, -1e10, -1e30])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_row_that_sees_masked_keys_alone(bias: float, dropout: float) -> None:
    """All its keys have a bias of -1e9 or so, as masks are made: a float's log-sum-exp is coarser
    than that by far, and weights must not come out beyond 1."""
    N, D = 24, 16
    random = np.random.default_rng(0)
    q, k, v, dout = (random.standard_normal((1, 1, N, D)).astype(np.float32) for _ in range(4))
    labels = np.zeros((1, 1, N, N), np.int8)
    labels[:, :, 5] = 1
    for factor in 1 + random.random(20):
        table = np.array([0, bias * factor], np.float32)
        graph = relpos.ShawGraph(bias_table=table, labels=labels)
        out, ctx = relpos.attention_forward(q, k, v, position=graph, dropout=dropout)
        gradients = relpos.attention_backward(ctx, dout)
        assert np.isfinite(out).all()
        # of sums over queries, each weight at most 1 / (1 - dropout), dout and the rest up to 5
        most = N * D * 2 * 5.0**3 / (1 - dropout) ** 2
        for x in (gradients.q, gradients.k, gradients.v, gradients.bias_table):
            assert np.abs(x).max() < most


# ---- timing --------------------------------------------------------------------------------------


def test_a_case_as_printed_is_timed(
    libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """benchmarks/bench_cases.py takes what a failure prints, and runs forward and backward of it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import bench_cases

    monkeypatch.setattr(bench_cases, "LIBRARY", libraries["f32"])
    for case in (*CORNERS, *map(random_case, range(200))):
        assert bench_cases.case_of(str(case)) == case
    assert bench_cases.case_of("17") == random_case(17)
    assert not bench_cases.without_terms(random_case(5)).terms
    for isa in ("portable", "portable plain"):
        for which in ("fwd", "fwdbwd"):
            asked = {"case": "5", "pass": which, "threads": 1}
            bench_cases.build(isa, asked).call()
