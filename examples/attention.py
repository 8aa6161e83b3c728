# SPDX-License-Identifier: Apache-2.0
"""Relative positions in ten minutes: `python examples/attention.py`, NumPy alone.

The table is a sharp preference for the key two places to the left. Attention then copies, whatever
the content; the map over positions shows it, and its gradient is checked against a difference.
"""

import numpy as np

import relpos

B, H, N, D, k = 1, 2, 12, 16, 4
rng = np.random.default_rng(0)
q, keys = np.ones((B, H, N, D), np.float32), np.zeros((B, H, N, D), np.float32)
values = rng.standard_normal((B, H, N, D), np.float32)

# Row r of the table belongs to the distance j - i = r - k.
key_table = np.zeros((2 * k + 1, D), np.float32)
key_table[k - 2] = 3.0

out, ctx = relpos.attention_forward(q, keys, values, position=relpos.Shaw(key_table), causal=True)
print("row i is value i - 2:", np.allclose(out[:, :, 2:], values[:, :, :-2], atol=1e-3))

# With the identity as values, the output is the attention map.
identity = np.broadcast_to(np.eye(N, dtype=np.float32), (B, H, N, N))
weights = relpos.attention(q, keys, identity, position=relpos.Shaw(key_table), causal=True)
for row in weights[0, 0]:
    print(" ".join("#" if weight > 0.5 else "." for weight in row))

# A step along the gradient of the table changes the output as the gradient says.
dout = rng.standard_normal(out.shape, np.float32)
gradients = relpos.attention_backward(ctx, dout)
step = 0.05 * rng.standard_normal(key_table.shape, np.float32)
there, back = (
    relpos.attention(q, keys, values, position=relpos.Shaw(key_table + s), causal=True)
    for s in (step, -step)
)
print("difference", float(((there - back) / 2 * dout).sum()))
print("gradient  ", float((gradients["key_table"] * step).sum()))
