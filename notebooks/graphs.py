# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Attention over labelled graphs
#
# Section 3 of Shaw, Uszkoreit and Vaswani ([2018](https://arxiv.org/abs/1803.02155)) treats the input as
# a labelled, directed, fully connected graph; how far apart two words are is only one of the labels that
# its edges may have. Here they have others. Each token is a person; the edge from a child to its mother is
# labelled *mother*, that to its father *father*, and all other pairs have no relation. The vectors
# $a^K_{ij}$ and $a^V_{ij}$ come from tables with one row for each label.
#
# Three models get the same question. They differ in nothing but what they are told of the edges.

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
# ## Families
#
# A family begins with its youngest child; again and again somebody whose parents are unknown gets both.
# Everybody has one of eight eye colours, drawn at random: nothing is inherited here.

# %%
COLOURS, MOTHER, FATHER, NONE = 8, 0, 1, -1


def family(generator, people):
    """parents[child] = (mother, father); person 0 is the youngest."""
    parents, unknown, count = {}, [0], 1
    while count + 2 <= people:
        child = unknown.pop(generator.randrange(len(unknown)))
        parents[child] = (count, count + 1)
        unknown += parents[child]
        count += 2
    return parents, count


def places(parents):
    """Where everybody stands: parents above their child, the mother's side on the left."""
    found = {}

    def put(person, level):
        mother, father = parents.get(person, (None, None))
        if mother is not None:
            put(mother, level + 1)
        found[person] = (len(found), level)
        if father is not None:
            put(father, level + 1)

    put(0, 0)
    return found


# %%
def draw_family(ax, parents, eyes, title=""):
    at = places(parents)
    for child, both in parents.items():
        for parent, hue in zip(both, HUES):
            ax.plot(*zip(at[child], at[parent]), color=hue, linewidth=1.3, zorder=1)
    ax.scatter(
        *zip(*at.values()),
        c=[eyes[person] for person in at],
        cmap="Set2",
        vmin=0,
        vmax=7,
        s=150,
        edgecolors="#26323d",
        linewidths=0.6,
        zorder=3,
    )
    for person, (x, y) in at.items():
        ax.text(x, y, person, ha="center", va="center", fontsize=7, zorder=4)
    ax.set_title(title, fontsize=10)
    ax.margins(0.08)
    ax.set_axis_off()
    return at


generator = random.Random(4)
parents, count = family(generator, 15)
eyes = [generator.randrange(COLOURS) for _ in range(count)]
figure, ax = plt.subplots(figsize=(6.5, 3.2))
draw_family(ax, parents, eyes, "mothers by the blue line, fathers by the orange one")
plt.show()

# %% [markdown]
# ## The question
#
# Every person who has parents is asked for a colour: 30 % for that of the *father*, the others for that of
# the *mother's father*, if there is one. A token says a person's own colour and which of the two is asked;
# the order of the tokens is shuffled, so that a place in the sequence means nothing. The graph is a matrix
# of labels, row $i$ being whom token $i$ knows.


# %%
def asked_of(generator, parents, count, eyes, order):
    """Tokens, answers and graph of a family whose people come in this order."""
    place = {person: i for i, person in enumerate(order)}
    asked = [int(generator.random() < 0.7) for _ in order]
    graph, answers = np.full((count, count), NONE), np.full(count, -1)
    for child, (mother, father) in parents.items():
        graph[place[child], place[mother]] = MOTHER
        graph[place[child], place[father]] = FATHER
        if not asked[child]:
            answers[place[child]] = eyes[father]
        elif mother in parents:
            answers[place[child]] = eyes[parents[mother][FATHER]]
    return [eyes[person] + COLOURS * asked[person] for person in order], answers, graph


def example(generator, people):
    parents, count = family(generator, people)
    eyes = [generator.randrange(COLOURS) for _ in range(count)]
    return asked_of(generator, parents, count, eyes, generator.sample(range(count), count))


tokens, answers, graph = asked_of(generator, parents, count, eyes, range(count))
print("tokens ", *tokens)
print("answers", *answers.tolist(), "  (-1: nothing is asked, or nobody knows)")
figure, ax = plt.subplots(figsize=(3.2, 2.9))
relpos.plots.heat_map(
    np.where(graph < 0, np.nan, 2 * graph - 1),
    ax=ax,
    signed=True,
    limit=1.6,
    colour_bar=False,
    title="blue mother, red father, blank no relation",
)
ax.set(xlabel="key: person j", ylabel="query: person i")
plt.show()

# %% [markdown]
# ## Three models
#
# Two layers, four heads, 96 columns, no positions of any kind: an encoder alone, which gives each token
# one of eight answers. The first is given the graph, the second a graph whose two labels are one, and the
# third none.

# %%
TOLD = {"labelled edges": 2, "edges without labels": 1, "no edges": 0}
STEPS = 500


def batch(generator, told, sizes, families=48):
    sources, labels, graphs = zip(
        *(example(generator, generator.choice(sizes)) for _ in range(families)), strict=True
    )
    if told == 0:
        graphs = None
    elif told == 1:
        graphs = [np.minimum(graph, 0) for graph in graphs]
    return relpos.Batch.from_labels(sources, labels, graphs=graphs)


# %%
def trained(told):
    config = relpos.Config().replace(
        {
            "width": 96,
            "heads": 4,
            "feed_forward": 192,
            "max_length": 256,
            "encoder.layers": 2,
            "decoder.layers": 0,
            "source_vocabulary": 2 * COLOURS,
            "encoder.position": "none",
            "encoder.relations": told,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "label_smoothing": 0.0,
            "schedule": "linear",
            "learning_rate": 5e-3,
            "warmup": 50,
            "steps": STEPS,
            "clip_norm": 1.0,
            "seed": 1,
        }
    )
    model = relpos.Transformer(config, tokens=4096, sentences=512)
    generator = random.Random(1)
    curve = [model.step(batch(generator, told, range(11, 32))).accuracy for _ in range(STEPS)]
    return model, curve


# %%
models, curves = {}, {}
for name, told in TOLD.items():
    models[name], curves[name] = trained(told)

# %%
figure, ax = plt.subplots(figsize=(6, 3))
for (name, curve), hue in zip(curves.items(), HUES):
    smooth = np.convolve(curve, np.ones(20) / 20, "valid")
    ax.plot(np.arange(len(smooth)) + 20, smooth, color=hue, label=name)
ax.axhline(1 / COLOURS, color="#9aa5b1", linestyle=":", label="one of eight, at random")
ax.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1.03))
ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# The first model climbs twice: it learns who is whose father, which answers one kind of question, and a while
# later to ask the mother what she has learned about hers.
#
# ## Families of other sizes
#
# Training had 11 to 31 people. And others?

# %%
SIZES = (7, 15, 31, 63, 127)
right = {
    name: [
        models[name].forward(batch(random.Random(7), told, [n], 3000 // n)).accuracy for n in SIZES
    ]
    for name, told in TOLD.items()
}
print(f"{'people':22}", *(f"{n:>7}" for n in SIZES))
for name, shares in right.items():
    print(f"{name:22}", *(f"{share:7.1%}" for share in shares))
assert min(right["labelled edges"]) > 0.9 > 0.7 > max(right["edges without labels"])

# %% [markdown]
# An edge says the same in a family of any size, so what was learned from at most 31 people holds for 127.
# Without labels a model can do no better than to guess among the two parents or the four grandparents, and
# without edges among everybody: in small families that is right now and then.
#
# ## Who asks whom
#
# The family of the first picture again, its people in the order of their numbers. Where does the attention
# of those who have parents go, in each head?

# %%
[maps] = relpos.attention_maps(
    models["labelled edges"], relpos.Batch.from_labels([tokens], [answers], graphs=[graph])
)
p = maps.maps["encoder"].probabilities[:, :, sorted(parents)]  # (layers, heads, children, people)
of_children = graph[sorted(parents)]
to = {"mother": of_children == MOTHER, "father": of_children == FATHER}
to["everybody else"] = ~(to["mother"] | to["father"])

figure, ax = plt.subplots(figsize=(6.5, 2.8))
names = [f"{layer}.{head}" for layer in maps.layers for head in maps.heads]
below = np.zeros(len(names))
for (name, pairs), hue in zip(to.items(), [*HUES[:2], "#d5dade"]):
    mass = (p * pairs).sum(axis=-1).mean(axis=-1).ravel()
    ax.bar(names, mass, bottom=below, color=hue, label=name, width=0.7)
    below += mass
ax.set(xlabel="layer.head", ylabel="attention", ylim=(0, 1))
ax.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
plt.show()

# %% [markdown]
# And is it the label that sends it there, or the colour? The logits of the head whose attention the
# relations move most, in parts:

# %%
maps = replace(maps, source_tokens=tuple(map(str, range(count))))  # people by their numbers
share = relpos.plots.moved(maps)
layer, head = map(int, np.unravel_index(np.argmax(share), share.shape))
relpos.plots.content_and_relation(maps, "encoder", layer, head)
plt.show()

# %% [markdown]
# So that is how two layers answer a question of two steps. In the first, heads look at the father of everybody,
# whatever is asked: from then on each person's row has the father's colour in it. In the second, heads look at
# the mother, and what they find there is her father's. The answer takes both, and a third step would take a
# third layer.
#
# Nothing in this is about families. The edges may be those of a syntax tree, of a program, of a molecule or of
# the columns of a database. `relpos.ShawGraph` is the same for attention over arrays, and with an `EdgeList`
# a pair may have several relations.
