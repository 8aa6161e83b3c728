# SPDX-License-Identifier: Apache-2.0
"""Draws docs/content_and_relation.png: `python docs/make_picture.py`, with relpos and matplotlib.

Trains the model of `relpos demo`, in about a minute, and takes apart that head of its decoder's
first layer whose attention the relations move most. The same kernels make the same picture; others
make another run of the training, and perhaps another head.
"""

from pathlib import Path

import matplotlib

import relpos
from relpos import demo, demo_numbers

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  # the backend is chosen first

model, _ = demo.train(tested=1)
maps = relpos.attention_maps(
    demo.translator_of(model),
    " ".join(demo_numbers.english(demo.DRAWN)),
    " ".join(demo_numbers.german(demo.DRAWN)),
    kinds="decoder",
    layers=0,
)
head = int(relpos.plots.moved(maps)[0].argmax())
figure = plt.figure(figsize=(11.5, 3.6), layout="compressed")
relpos.plots.content_and_relation(maps, "decoder", 0, head, figure=figure)
relpos.plots.save(figure, Path(__file__).with_name("content_and_relation.png"), dpi=130)
