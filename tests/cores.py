# SPDX-License-Identifier: Apache-2.0
"""Every core that this machine can run, loaded once: one by its name, or each in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import capi
from capi import Core

_cores: dict[str, Core | str] = {}


def get_core(libraries: dict[str, Path], name: str) -> Core:
    """Each core once; skips where this machine cannot run it."""
    if name not in _cores:
        try:
            _cores[name] = capi.core_by_name(libraries, name)
        except (capi.Unavailable, capi.CoreError) as error:
            # Only an instruction set that the library itself says it cannot run may be missing.
            available = capi.core_by_name(libraries, name.partition("-")[0]).build_info()[
                "isa_available"
            ]
            if name.partition("-")[2] in available.split():
                raise
            _cores[name] = str(error)
    core = _cores[name]
    if isinstance(core, str):
        pytest.skip(f"this machine cannot run {name}: {core}")
    return core


@pytest.fixture(params=capi.CORES)
def every_core(libraries: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Core]:
    """The fixture of a test for all of libcore: `core = every_core`."""
    result = get_core(libraries, request.param)
    yield result
    result.set_threads(0)
