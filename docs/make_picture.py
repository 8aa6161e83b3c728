# SPDX-License-Identifier: Apache-2.0
"""Draws docs/attention_map.png: `python docs/make_picture.py`, with relpos and matplotlib.

The picture is relpos's own output. Keys are zero, so content says nothing and the key table alone
makes the map; values are the identity, so the output is the map.
"""

from pathlib import Path

import matplotlib
import numpy as np

import relpos

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  # the backend is chosen first

N, D, k, query = 48, 16, 8, 23
INK, BAND = "#33404d", "#d9822b"

# A table such as training leaves behind: one number per distance from -k to k.
d = np.arange(-k, k + 1)
score = 2.6 * np.exp(-(((d + 2) / 1.6) ** 2)) + 1.2 * np.exp(-(((d - 4) / 1.5) ** 2))
score += np.where(d < 0, 0.5, -0.4)
key_table = np.repeat(score[:, None] / np.sqrt(D), D, axis=1).astype(np.float32)

q, keys = np.ones((1, 1, N, D), np.float32), np.zeros((1, 1, N, D), np.float32)
identity = np.eye(N, dtype=np.float32)[None, None]
weights = relpos.attention(q, keys, identity, position=relpos.Shaw(key_table))[0, 0]

plt.rcParams.update({"font.size": 9, "axes.edgecolor": INK, "text.color": INK})
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6), width_ratios=[1, 1.35])

left.imshow(np.sqrt(weights), cmap="Blues", interpolation="nearest")
for edge in (-k, k):
    i = np.arange(max(0, -edge), min(N, N - edge))
    left.plot(i + edge, i, color=BAND, linewidth=1)
left.axhline(query, color=INK, linewidth=0.8, linestyle=":")
left.set(xlabel="key j", ylabel="query i", title=f"attention map, k = {k}", xticks=[], yticks=[])

distance = np.arange(N) - query
right.axvspan(-k - 0.5, k + 0.5, color=BAND, alpha=0.12, linewidth=0)
right.bar(distance, weights[query], width=0.8, color="#3c78a8")
top = float(weights[query].max())
notes = (
    (-k - 8.3, "beyond -k:\none row of the table,\none weight"),
    (k + 9, "beyond k:\nanother row,\nanother weight"),
)
for x, note in notes:
    right.text(x, 0.45 * top, note, ha="center", fontsize=8)
right.text(0, 1.02 * top, "a row for each distance", ha="center", fontsize=8, color=BAND)
right.set(xlabel=f"distance d = j - i from query {query}", ylabel="weight", ylim=(0, 1.12 * top))
right.set_title("one row of it (dotted)")
right.spines[["top", "right"]].set_visible(False)

figure.tight_layout()
figure.savefig(Path(__file__).with_name("attention_map.png"), dpi=110, metadata={"Software": None})
