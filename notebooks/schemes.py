# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Seven schemes side by side
#
# Relative position enters attention in many ways. Shaw's tables add a vector to each key and value; T5 adds
# a learned number for each range of distances; ALiBi one that is not learned; RoPE turns queries and keys;
# Transformer-XL and DeBERTa let content and position meet in products of their own; sinusoids are added to
# the embeddings and are not relative at all. In `relpos` each is a word in the configuration.
#
# Here all of them learn one small task that is nothing but relative position, and are then tested on
# sequences up to sixteen times as long as those in training.

# %%
import random
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

import relpos

plt.rcParams.update(
    {"figure.dpi": 75, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
)
HUES = relpos.plots.canvas.LINES

# %% [markdown]
# ## The task: follow the arrow
#
# A sequence of letters and arrows. ←3 asks for the token three places before it; the label of every arrow
# is what it points to, and letters have none. So a query has to say *which* offset it wants: position must
# meet content.

# %%
LETTERS, FARTHEST = "abcdefgh", 6
NAMES = [*LETTERS, *(f"←{n}" for n in range(1, FARTHEST + 1))]


def example(generator, length):
    tokens, labels = [], []
    for i in range(length):
        token = generator.randrange(len(LETTERS))
        label = -1
        if i >= FARTHEST and generator.random() < 0.4:
            back = generator.randint(1, FARTHEST)
            token, label = len(LETTERS) + back - 1, tokens[i - back]
        tokens.append(token)
        labels.append(label)
    return tokens, labels


def batch(generator, lengths, count):
    sources, labels = zip(
        *(example(generator, generator.choice(lengths)) for _ in range(count)), strict=True
    )
    return relpos.Batch.from_labels(sources, labels)


tokens, labels = example(random.Random(4), 20)
print(*(f"{NAMES[token]:>2}" for token in tokens))
print(*(f"{NAMES[label] if label >= 0 else '':>2}" for label in labels))

# %% [markdown]
# ## The schemes
#
# The same encoder each time: two layers, four heads, 64 columns, an answer for each token. Only these
# fields differ. (T5's literature has one table for all layers.)

# %%
SCHEMES = {
    "Shaw": {"encoder.position": "shaw", "encoder.k": 8},
    "T5": {"encoder.position": "t5", "encoder.per_layer": False},
    "ALiBi": {"encoder.position": "alibi"},
    "RoPE": {"encoder.position": "rope"},
    "Transformer-XL": {"encoder.position": "transformer-xl"},
    "DeBERTa": {"encoder.position": "deberta"},
    "sinusoidal": {"encoder.absolute": "sinusoidal"},
    "none": {},
}
COLOURS = dict(zip(SCHEMES, [*HUES[:7], "#9aa5b1"]))
STEPS, TRAINED = 300, range(12, 33)  # lengths


# %%


def trained(scheme, steps):
    config = relpos.Config().replace(
        {
            "width": 64,
            "heads": 4,
            "feed_forward": 128,
            "max_length": 512,
            "encoder.layers": 2,
            "decoder.layers": 0,
            "source_vocabulary": len(NAMES),
            "encoder.position": "none",
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "label_smoothing": 0.0,
            "clip_norm": 1.0,
            "schedule": "linear",
            "learning_rate": 5e-3,
            "warmup": 50,
            "steps": steps,
            "seed": 1,
        }
        | SCHEMES[scheme]
    )
    model = relpos.Transformer(config, tokens=8192, sentences=512)
    generator = random.Random(1)
    curve = [model.step(batch(generator, TRAINED, 48)).accuracy for _ in range(steps)]
    return model, curve


models, curves = {}, {}
for name in SCHEMES:
    models[name], curves[name] = trained(name, STEPS)


# %%
def draw_curves(curves, width):
    ax = plt.subplots(figsize=(6.5, 3))[1]
    for name, curve in curves.items():
        smooth = np.convolve(curve, np.ones(width) / width, "valid")
        ax.plot(np.arange(len(smooth)) + width, smooth, color=COLOURS[name], label=name)
    ax.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1.03))
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    ax.grid(alpha=0.25)
    plt.show()


draw_curves(curves, 20)

# %% [markdown]
# Four of them are through in a hundred steps, and the other four are nowhere near.
#
# ## What position adds
#
# Six letters and six arrows, ←1 to ←6, every one of which points to the letter f. Of each model the head of
# the first layer whose attention the relations move most, and what they add to its logits (less the mean of
# each row). RoPE turns queries and keys instead of adding anything, so it is not here.

# %%
row = [NAMES.index(name) for name in "a b c d e f ←1 ←2 ←3 ←4 ←5 ←6".split()]
figure, axes = plt.subplots(1, 5, figsize=(11.5, 2.7), layout="constrained")
for ax, name in zip(axes, ("Shaw", "Transformer-XL", "DeBERTa", "T5", "ALiBi")):
    [maps] = relpos.attention_maps(
        models[name], relpos.Batch.from_labels([row], [[-1] * len(row)]), layers=0
    )
    maps = replace(maps, source_tokens=tuple(NAMES[token] for token in row))
    head = int(relpos.plots.moved(maps)[0].argmax())
    relpos.plots.head(maps, "encoder", 0, head, show="relation", ax=ax, colour_bar=False)
    ax.set(title=name, ylabel="", xlabel="")
plt.show()

# %% [markdown]
# The first three find f for every arrow, without a word of content: the query says how far, and its product
# with the relation is large at that offset, if a little blurred in this head of Transformer-XL. Letters, which
# ask for nothing, get next to nothing. T5 and ALiBi add the same at an offset *whatever the query says*: every
# head has one pattern for all rows, and to tell six arrows apart heads must be combined later. Sinusoids are
# added to the letters themselves, and have to be found there first.
#
# ## Longer than in training

# %%
LENGTHS = (16, 32, 64, 128, 256, 512)


def tested(model):
    """The share of right answers by length, of the same sequences for every model."""
    batches = [batch(random.Random(n), [n], 8192 // n // 4) for n in LENGTHS]
    return [model.forward(each).accuracy for each in batches]


def table_of(right):
    print(f"{'length':16}", *(f"{n:>7}" for n in LENGTHS))
    for name, shares in right.items():
        print(f"{name:16}", *(f"{share:7.1%}" for share in shares))


right = {name: tested(model) for name, model in models.items()}
table_of(right)

# %%
ax = plt.subplots(figsize=(6.5, 3))[1]
ax.axvspan(TRAINED[0], TRAINED[-1], color="#eceff2", zorder=0)
for name, shares in right.items():
    ax.plot(LENGTHS, shares, "o-", markersize=3.5, color=COLOURS[name], label=name)
ax.set_xscale("log", base=2)
ax.set_xticks(LENGTHS, LENGTHS)
ax.set(xlabel="length (grey: those of training)", ylabel="share of right answers", ylim=(0, 1.03))
ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
ax.grid(alpha=0.25)
plt.show()

# %% [markdown]
# ## With more patience
#
# Three hundred steps are few. The others get five times as many:

# %%
PATIENT = ["T5", "ALiBi", "sinusoidal"]
patient_curves = {}
for name in PATIENT:
    models[name], patient_curves[name] = trained(name, 5 * STEPS)
draw_curves(patient_curves, 50)
table_of({name: tested(models[name]) for name in PATIENT})

# %% [markdown]
# T5 gets there with patience, and so do sinusoids, if less surely where sequences are as long as in training
# at most. On longer ones both fall off, the more the longer. ALiBi, whose numbers only ever say "nearer is
# better", does not get there.
#
# ## What to make of it
#
# - **Position that meets content** (Shaw, Transformer-XL, DeBERTa, RoPE) is what this task asks for, and is
#   learned at once. A number by distance alone is less: enough for "look nearby", not for "look where this token
#   points".
# - **Longer than training**: Shaw, Transformer-XL and DeBERTa hardly notice sequences of twice and four times
#   the length. RoPE learns as fast, but its angles at distances that were never trained do harm, the more of
#   them the longer the sequence.
# - At sixteen times the length even the best lose a little: the right key competes with 511 others.
#
# One small task, one seed, small models, and nothing tuned for any of them. It shows what the schemes *can* tell
# a head, and not which of them is the best for language.

# %%
longest = {name: tested(models[name])[-1] for name in SCHEMES}
assert min(right[name][2] for name in ("Shaw", "Transformer-XL", "DeBERTa", "RoPE")) > 0.9
assert longest["RoPE"] < 0.6 < min(longest[name] for name in ("Shaw", "Transformer-XL", "DeBERTa"))
assert max(longest["T5"], longest["sinusoidal"], longest["ALiBi"]) < 0.6
