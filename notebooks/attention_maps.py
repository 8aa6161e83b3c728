# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Attention maps: where a head looks, and why
#
# A map of attention shows *where* a head looks. With relative positions one can ask more: the logits are a
# sum of what the tokens say to each other and of what their distance says,
#
# $$ s_{ij} = \underbrace{\frac{q_i \cdot k_j}{\sqrt d}}_{\text{content}}
#           + \underbrace{\frac{q_i \cdot a^K_{ij}}{\sqrt d}}_{\text{relation}}, $$
#
# and both parts can be drawn. This notebook trains the package's demo, a small Transformer that turns the
# English names of numbers into German ones, finds the heads that use position, and takes it away from them
# to see whether they needed it.

# %%

import matplotlib.pyplot as plt
import numpy as np

import relpos
from relpos import demo, demo_numbers
from relpos.data import Words

plt.rcParams.update(
    {"figure.dpi": 75, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
)
HUES = relpos.plots.canvas.LINES

# %% [markdown]
# ## The task
#
# German says *one and twenty*, counts in another scale, has plurals, and tells *ein*, *eins* and *eine* apart.
# Names are made by rule, so that a translation is exactly right or wrong.

# %%
for number in (21_000_001, 45_000_321):
    english, german = demo_numbers.english(number), demo_numbers.german(number)
    print(" ".join(english), " ".join(german), sep="\n    ")

# %% [markdown]
# ## Training
#
# Two layers on each side, four heads, relative positions up to 4 in encoder and decoder, no others.
# `relpos demo` takes 1,600 steps; 600 will do here.

# %%
STEPS = 600
model = relpos.Transformer(demo.make_config(STEPS), tokens=demo.TOKENS, sentences=demo.SENTENCES)
batches = demo.training_batches(seed=1)
curve = [model.step(next(batches)).nll for _ in range(STEPS)]

figure, ax = plt.subplots(figsize=(5.5, 2.6))
ax.semilogy(range(1, STEPS + 1), curve, color=HUES[0], linewidth=0.8)
ax.set(xlabel="step", ylabel="-log p of a token")
ax.grid(alpha=0.25)
plt.show()

# %% [markdown]
# Numbers it has never seen, as long as those of training, and up to twice as long:

# %%
short = demo.tested_numbers(1, demo.SHORT, 500)
long = demo.tested_numbers(1, demo.LONG, 500)
for name, numbers in (("1 to 6 groups of digits", short), ("7 to 12", long)):
    print(f"{name}: {demo.share_exact(model, numbers):.1%} exactly right")

# %% [markdown]
# ## The maps of one number
#
# A `Translator` knows how tokens are written. Of a sentence and its translation it gives the maps of all
# layers and heads in one pass; training and translating themselves never form one.

# %%
translator = relpos.Translator(model, Words(demo_numbers.VOCABULARY[3:]))


def sides(number):
    return " ".join(demo_numbers.english(number)), " ".join(demo_numbers.german(number))


maps = relpos.attention_maps(translator, *sides(45_000_321))
relpos.plots.heads(maps, "encoder")
plt.show()

# %% [markdown]
# Above each map stands how much of that head's attention goes elsewhere than its content alone would send
# it: half the sum of $|\,\mathrm{softmax}(\text{content} + \text{relation}) -
# \mathrm{softmax}(\text{content})\,|$, the mean over queries. 0 % is a head that does not care where words
# stand, 100 % one that cares for nothing else.
#
# ## Content or relation?
#
# One number may be an accident. The mean over sixty of them, for every head of encoder and decoder:

# %%
sixty = [relpos.attention_maps(translator, *sides(number)) for number in short[:60]]
share = {
    kind: np.mean([relpos.plots.moved(each, kind) for each in sixty], axis=0)
    for kind in ("encoder", "decoder")
}
names = [f"{layer}.{head}" for layer in range(2) for head in range(4)]
figure, axes = plt.subplots(1, 2, figsize=(7.5, 2.5), sharey=True, layout="constrained")
for ax, (kind, values), hue in zip(axes, share.items(), HUES):
    ax.bar(names, 100 * values.ravel(), color=hue, width=0.7)
    ax.set(title=kind, xlabel="layer.head")
axes[0].set_ylabel("% moved by relations")
plt.show()

# %% [markdown]
# The head of the encoder that relations move most, taken apart. Red draws attention, blue keeps it away;
# the first two pictures add up to the third.


# %%
def place_of(values, pick):
    return tuple(map(int, np.unravel_index(pick(values), values.shape)))


most, least = place_of(share["encoder"], np.argmax), place_of(share["encoder"], np.argmin)
relpos.plots.content_and_relation(maps, "encoder", *most)
plt.show()

# %% [markdown]
# And the one that they move least:

# %%
relpos.plots.content_and_relation(maps, "encoder", *least)
plt.show()

# %% [markdown]
# ## How far?
#
# The mean attention by offset, of all heads of the encoder over all sixty numbers:

# %%
reach = np.arange(-8, 9)
mass = np.zeros((len(names), reach.size))
for each in sixty:
    offsets, of_number = each.offsets("encoder"), each.mass("encoder").reshape(len(names), -1)
    mass[:, np.isin(reach, offsets)] += of_number[:, np.isin(offsets, reach)] / len(sixty)

figure, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
relpos.plots.heat_map(mass, names, [f"{offset}" for offset in reach], ax=ax)
ax.set(xlabel="offset j - i", ylabel="layer.head", aspect="auto", title="mean attention")
plt.show()

# %% [markdown]
# And the tables that training has left behind, of the encoder's first layer. A row for each offset; what is
# farther than 4 shares the last row of its side.

# %%
relpos.plots.tables(model, "encoder", 0, head=0)
plt.show()

# %% [markdown]
# ## Do they need it?
#
# A picture is no proof. So take the relations away from one head after the other, by writing zeros into its
# key table, and count how many numbers are still right: once the heads that relations move most come first,
# once those that they move least.

# %%
places = [(kind, layer, head) for kind in share for layer in range(2) for head in range(4)]
places.sort(key=lambda place: -share[place[0]][place[1:]])
tables = {place: model.parameters["{}.{}.attention.key_table".format(*place)] for place in places}
kept = {place: tables[place][place[2]].copy() for place in places}
tested = short[:250]


def taken_away(order):
    """The share that is right when none, one, two... of the heads have lost their relations."""
    right = [demo.share_exact(model, tested)]
    for place in order:
        tables[place][place[2]] = 0
        right.append(demo.share_exact(model, tested))
    for place in order:
        tables[place][place[2]] = kept[place]
    return right


falling = {"most moved first": taken_away(places), "least moved first": taken_away(places[::-1])}

# %%
figure, ax = plt.subplots(figsize=(5.5, 3))
for (name, right), hue, mark in zip(falling.items(), HUES, "os"):
    ax.plot(range(len(right)), [100 * each for each in right], mark + "-", color=hue, label=name)
ax.set(xlabel="heads without relations, of 16", ylabel="% exactly right", ylim=(-3, 103))
ax.grid(alpha=0.25)
ax.legend(frameon=False)
plt.show()

# %%
half = {name: right[8] for name, right in falling.items()}
for name, right in half.items():
    print(f"{name}: {right:.1%} with half of the heads")
assert half["most moved first"] < half["least moved first"]

# %% [markdown]
# The measure that was taken from the maps alone finds the heads that the model cannot do without. One head
# by itself is rarely missed: others do the same work. (The value tables were left as they are, and cross
# attention has no relations at all.)
#
# ## To click through
#
# The same maps as a page of one file, which needs no network: every layer and head, with content and
# relation to choose from. `relpos inspect MODEL --source "..." --out maps.html` makes it from the shell.

# %%
relpos.AttentionViewer(maps, height=640)
