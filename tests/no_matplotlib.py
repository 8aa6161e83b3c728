# SPDX-License-Identifier: Apache-2.0
"""A process that has no matplotlib, for the length of a test."""

from __future__ import annotations

import sys

import pytest

import relpos


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if matplotlib were not installed."""
    for name in [name for name in sys.modules if name.startswith("relpos.plots")]:
        monkeypatch.delitem(sys.modules, name)
    if "plots" in vars(relpos):  # asking for it would import it
        monkeypatch.delattr(relpos, "plots")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
