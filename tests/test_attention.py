# SPDX-License-Identifier: Apache-2.0
"""The chain: float64 reference, libcore_f64, every instruction set of libcore.

    reference     checked by finite differences in test_reference.py
    libcore_f64   against the reference, and by finite differences of its own forward
    libcore       every instruction set against the reference, to the error of the plain formula

2,400 random cases and every corner run on each of them. A failure names the case and the core:
paste both into compare_case() to see it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capi
from capi import Core
from cases import CORNERS, Arrays, Case, compare, make_arrays, oracle, random_case

CHUNK = 100
CHUNKS = 24
CORES = ("f64", *capi.CORES)
_cores: dict[str, Core | str] = {}


def get_core(libraries: dict[str, Path], name: str) -> Core:
    """Each core once; skips where this machine cannot run it."""
    if name not in _cores:
        try:
            _cores[name] = capi.core_by_name(libraries, name)
        except (capi.Unavailable, capi.CoreError) as error:
            # Only an instruction set that the library itself says it cannot run may be missing.
            available = capi.core_by_name(libraries, name[:3]).build_info()["isa_available"]
            if name.partition("-")[2] in available.split():
                raise
            _cores[name] = str(error)
    core = _cores[name]
    if isinstance(core, str):
        pytest.skip(f"this machine cannot run {name}: {core}")
    return core


def compare_case(core: Core, case: Case) -> str | None:
    """None, or what is wrong with this core's results for this case."""
    try:
        results = capi.run_both(core, case, make_arrays(case, core.dtype))
    except (capi.CoreError, AssertionError) as error:
        return f"{core.name} {case}: {error}"
    truth = oracle(case)
    faults = [compare(name, results[name], truth) for name in truth.exact]
    faults = [fault for fault in faults if fault]
    return "\n  ".join([f"{core.name} {case}", *faults]) if faults else None


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


def test_random_cases_are_what_they_should_be() -> None:
    """A quarter with N > 128 and every clip distance strictly inside; all features occur."""
    cases = [random_case(seed) for seed in range(CHUNK * CHUNKS)]
    bands = [[b for b in (c.key, c.value) if b] for c in cases]
    inside = [
        case.N > 128 and all(max(b.left, b.right) < case.N - 1 for b in band)
        for case, band in zip(cases, bands, strict=True)
    ]
    assert len(cases) >= 2000 and sum(inside) * 4 >= len(cases)
    for feature in ("tied", "per_head", "causal", "lengths", "key_lengths", "offsets", "starts"):
        share = sum(bool(getattr(case, feature)) for case in cases) / len(cases)
        assert 0.05 < share < 0.7, (feature, share)


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
        x: np.ndarray = getattr(self.arrays, name).view
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


@pytest.mark.parametrize("seed", range(1, 121, 2))
def test_gradient_along_random_directions(libraries: dict[str, Path], seed: int) -> None:
    case = random_case(seed * 2)  # even: half of them long
    if case.spread != 1 or case.rising:
        case = Case(**{**vars(case), "spread": 1.0, "rising": False})  # smooth at this step
    differences = Differences(get_core(libraries, "f64"), case)
    random = np.random.default_rng(seed)
    for name, gradient in differences.gradients.items():
        if gradient.size:
            direction = random.standard_normal(gradient.shape)
            differences.check(name, direction / np.linalg.norm(direction))


SMALL: list[dict[str, Any]] = [
    {"N": 5, "M": 7, "D": 3, "Dv": 2, "key": (2, 1), "value": (1, 3), "causal": True},
    {"N": 7, "M": 5, "D": 2, "Dv": 3, "key": (1, 1, "none"), "value": (0, 2, "none")},
    {"N": 6, "M": 6, "D": 3, "Dv": 3, "key": (2, 2), "value": (2, 2), "tied": True},
    {"N": 18, "M": 18, "D": 1, "Dv": 1, "key": (3, 3), "value": (3, 3), "causal": True},
    {"B": 2, "H": 2, "N": 4, "M": 5, "key": (8, 8), "value": (0, 0), "per_head": True, "D": 2},
    {"B": 2, "H": 2, "N": 5, "M": 5, "D": 2, "Dv": 3, "key": (1, 1), "lengths": (3, 5)},
    {"B": 3, "H": 2, "D": 2, "Dv": 3, "value": (1, 1), "offsets": (0, 3, 3, 8), "scale": -0.5},
    {"N": 3, "M": 20, "D": 2, "Dv": 2, "key": (4, 2), "value": (4, 2), "starts": (5,)},
]


@pytest.mark.parametrize("given", SMALL, ids=str)
def test_every_element_of_small_gradients(libraries: dict[str, Path], given: Any) -> None:
    from relpos.reference import Band

    bands = {name: Band(*given[name]) for name in ("key", "value") if name in given}
    differences = Differences(get_core(libraries, "f64"), Case(**{**given, **bands, "seed": 5}))
    for name, gradient in differences.gradients.items():
        for index in np.ndindex(gradient.shape):
            direction = np.zeros(gradient.shape)
            direction[index] = 1
            if np.isnan(getattr(differences.arrays, name).view[index]):  # beyond a length
                assert gradient[index] == 0
            else:
                differences.check(name, direction)
