# SPDX-License-Identifier: Apache-2.0
"""Training runs: the loop, checkpoints that survive anything, and the mean of several.

`relpos.Trainer` is the loop; docs/cli.md shows the same from a shell.
"""

from relpos.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointWarning,
    checkpoints,
    newest,
)

__all__ = ["Checkpoint", "CheckpointError", "CheckpointWarning", "checkpoints", "newest"]
