# SPDX-License-Identifier: Apache-2.0
"""Warnings that name the line of whoever called relpos."""

from __future__ import annotations

import sys
import warnings


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """However many of relpos's own frames lie between."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "relpos":
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=depth)
