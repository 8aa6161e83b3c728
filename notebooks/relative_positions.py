# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Relative positions from scratch
#
# Attention compares a query with a key and does not know where either of them stands. Shaw, Uszkoreit
# and Vaswani ([2018](https://arxiv.org/abs/1803.02155)) give every *pair* a vector that depends on
# how far the key is from the query, clipped at $k$:
#
# $$ s_{ij} = \frac{q_i \cdot (k_j + a^K_{ij})}{\sqrt d}, \qquad
#    z_i = \sum_j p_{ij}\,(v_j + a^V_{ij}), \qquad
#    a_{ij} = w_{\mathrm{clip}(j - i,\,-k,\,k)} $$
#
# The two tables $w^K$ and $w^V$ have $2k + 1$ rows and are learned. This notebook writes the formula
# down as it stands, finds out why nobody wants to run it like that, and takes it apart until nothing of
# the size $n \times n \times d$, nor of $n \times n$, is left.

# %%
import inspect
import os
import subprocess
import sys
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's; one core for everybody

import matplotlib.pyplot as plt
import numpy as np

import relpos

plt.rcParams.update(
    {"figure.dpi": 75, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
)
random = np.random.default_rng(0)
relpos.set_threads(1)

# %% [markdown]
# ## Which row of the table?
#
# For every pair one number, $r_{ij} = \mathrm{clip}(j - i, -k, k) + k$. Along a diagonal it does not
# change, and beyond $k$ it does not change at all. Everything below lives on these two facts.


# %%
def rows_of(n, k):
    distance = np.arange(n) - np.arange(n)[:, None]  # j - i
    return np.clip(distance, -k, k) + k


figure, ax = plt.subplots(figsize=(3.4, 2.8), layout="constrained")
relpos.plots.heat_map(rows_of(24, 4), ax=ax, title="row of the table, n = 24, k = 4")
ax.set(xlabel="key j", ylabel="query i")
plt.show()

# %% [markdown]
# ## As it stands
#
# One head. `table[rows]` makes the vectors $a_{ij}$ of all pairs: an array of $n \times n \times d$.


# %%
def softmax(s):
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def as_it_stands(q, k, v, key_table, value_table):
    rows = rows_of(len(q), len(key_table) // 2)
    a_key, a_value = key_table[rows], value_table[rows]  # (n, n, d) each
    s = np.einsum("id,ijd->ij", q, k + a_key) / np.sqrt(q.shape[1])
    p = softmax(s)
    return np.einsum("ij,ijd->id", p, v + a_value)


# %% [markdown]
# ## Ours
#
# The same from the package, on arrays of (batch, heads, $n$, $d$). They agree to the last digits that
# float32 has.


# %%
def example(n, d=64, k=16):
    q, keys, values = (random.standard_normal((n, d), np.float32) for _ in range(3))
    tables = (random.standard_normal((2 * k + 1, d), np.float32) for _ in range(2))
    return q, keys, values, *tables


def ours(q, k, v, key_table, value_table):
    batched = (x[None, None] for x in (q, k, v))  # one sentence, one head
    return relpos.attention(*batched, position=relpos.Shaw(key_table, value_table))[0, 0]


given = example(300)
print(f"largest difference: {np.abs(ours(*given) - as_it_stands(*given)).max():.1e}")

# %% [markdown]
# ## Why $n \times n \times d$ is not needed
#
# A product distributes over a sum, $q_i \cdot (k_j + a^K_{ij}) = q_i \cdot k_j + q_i \cdot a^K_{ij}$,
# and the second part takes only $2k + 1$ different values for a query, one for each row of the table. So
# multiply the query with the *table*, $n \times (2k + 1)$, and look up. On the other side
#
# $$ \sum_j p_{ij}\, a^V_{ij} = \sum_r P_{ir}\, w^V_r, \qquad P_{ir} = \sum_{j:\, r_{ij} = r} p_{ij}: $$
#
# add up the probabilities that share a row first, and multiply with the table afterwards.


# %%
def by_rows(q, k, v, key_table, value_table):
    rows = rows_of(len(q), len(key_table) // 2)
    meets = q @ key_table.T  # (n, 2k + 1): query meets relation
    s = (q @ k.T + np.take_along_axis(meets, rows, axis=1)) / np.sqrt(q.shape[1])
    p = softmax(s)
    bins = np.arange(len(q))[:, None] * len(value_table) + rows
    P = np.bincount(bins.ravel(), p.ravel(), bins.shape[0] * len(value_table))
    return p @ v + P.reshape(len(q), -1).astype(np.float32) @ value_table


print(f"largest difference: {np.abs(by_rows(*given) - as_it_stands(*given)).max():.1e}")

# %% [markdown]
# The two parts, and what a softmax makes of their sum. The relation is a band: outside of it every row
# is constant on the left and constant on the right.

# %%
small = example(40, k=6)
one = relpos.attention_maps(
    *(x[None, None] for x in small[:2]),
    position=relpos.Shaw(small[3]),
    parts="all",
    sequences=0,
    heads=0,
)
figure, axes = plt.subplots(1, 4, figsize=(11, 2.9), layout="constrained")
shown = (one.parts["content"], one.parts["key_table"], one.logits)
for ax, part, title in zip(axes, shown, ("content", "+ relation", "= logits")):
    relpos.plots.heat_map(part, ax=ax, signed=True, limit=3, title=title, colour_bar=False)
relpos.plots.heat_map(one.probabilities, ax=axes[3], title="softmax", colour_bar=False)
plt.show()

# %% [markdown]
# ## Why $n \times n$ is not needed either
#
# A softmax can be had piece by piece: keep the running maximum and the running sum, and scale what was
# added before when the maximum grows. So the core walks over *tiles* of queries and keys and keeps
# nothing of a tile but its share of the result. A tile wholly on one side of the band meets a single
# row of each table: it costs what plain attention costs. Only tiles that the band crosses cost more.


# %%
def crossed(n, k=16, tile=64):
    first = np.arange(0, n, tile)
    distance = first - first[:, None]  # of the nearest pairs, more or less
    return np.abs(distance) < k + tile


figure, axes = plt.subplots(1, 3, figsize=(8.5, 2.8), layout="constrained")
for ax, n in zip(axes, (512, 1024, 4096)):
    tiles = crossed(n)
    title = f"n = {n}: {tiles.mean():.0%} of the tiles"
    relpos.plots.heat_map(tiles, ax=ax, colour_bar=False, title=title)
plt.show()

# %% [markdown]
# ## Time
#
# The formula as it stands, NumPy by rows, and the C core: one head with $d = 64$, $k = 16$ on one core, in
# seconds of that core. Beside it the C core without relations, to see what they cost.


# %%
def seconds(function, *arguments, least=0.2):
    function(*arguments)
    times = []
    while sum(times) < least or len(times) < 3:
        begun = time.process_time()
        function(*arguments)
        times.append(time.process_time() - begun)
    return min(times)


def plain(q, k, v, *_):
    return relpos.attention(*(x[None, None] for x in (q, k, v)))


METHODS = {
    "the formula": (as_it_stands, 1024),
    "NumPy by rows": (by_rows, 4096),
    "relpos": (ours, 16384),
    "relpos, no relations": (plain, 16384),
}
# %%
SIZES = [2**e for e in range(6, 15)]
MARKS = ["s-", "^-", "o-", "o:"]


def draw(sizes, results, unit, title):
    ax = plt.subplots(figsize=(6, 3.4), layout="constrained")[1]
    for (name, values), mark, hue in zip(results.items(), MARKS, relpos.plots.canvas.LINES):
        ax.loglog(sizes[: len(values)], values, mark, color=hue, label=name, markersize=4)
    ax.set(xlabel="n", ylabel=unit, title=title)
    ax.set_xticks(sizes, sizes)
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    plt.show()


times = {
    name: [seconds(method, *example(n)) for n in SIZES if n <= most]
    for name, (method, most) in METHODS.items()
}
draw(SIZES, times, "seconds", "forward, one head")

# %%
at = SIZES.index(1024)
for name in ("the formula", "NumPy by rows"):
    print(
        f"n = 1024: relpos is {times[name][at] / times['relpos'][at]:.0f} times as fast as {name}"
    )
for n in (256, 1024, 4096):
    at = SIZES.index(n)
    more = times["relpos"][at] / times["relpos, no relations"][at] - 1
    print(f"n = {n}: relations cost {more:.0%} more time")

# %% [markdown]
# ## Memory
#
# Linux tells the most that a process has ever had. A fresh process for each size runs the same functions and
# says by how much one call has raised it, the result included.

# %%
SCRIPT = "\n".join(
    [
        "import sys, numpy as np, relpos",
        "from pathlib import Path",
        "random = np.random.default_rng(0)",
        *map(inspect.getsource, (rows_of, softmax, as_it_stands, by_rows, example, ours, plain)),
        "def megabytes(name):",
        "    lines = Path('/proc/self/status').read_text().splitlines()",
        "    return int(next(x for x in lines if name in x).split()[1]) / 1024",
        "given = example(int(sys.argv[2]))",
        "globals()[sys.argv[1]](*example(32))  # what the first call alone takes",
        "Path('/proc/self/clear_refs').write_text('5')  # the most is now",
        "before = megabytes('VmRSS')",
        "globals()[sys.argv[1]](*given)",
        "print(megabytes('VmHWM') - before)",
    ]
)


def megabytes(function, n):
    command = [sys.executable, "-c", SCRIPT, function.__name__, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return max(float(done.stdout), 0.01)


memory_sizes = SIZES[2::2]
memory = {
    name: [megabytes(method, n) for n in memory_sizes if n <= most]
    for name, (method, most) in METHODS.items()
}
draw(memory_sizes, memory, "MB", "what a call takes")

# %%
for name, values in memory.items():
    n = memory_sizes[len(values) - 1]
    print(
        f"{name}: {values[-1]:,.0f} MB at n = {n:,}; the result alone is {n * 64 * 4 / 2**20:.1f}"
    )

# %% [markdown]
# ## And backward
#
# Training needs the gradient of all of this, and the same argument holds: the gradient of a table's row
# is a sum over the pairs that met it, so it is gathered in bins of $n \times (2k + 1)$, tile by tile. A
# derivative can be checked against what it claims to be, a small step in a random direction:

# %%
q, keys, values, key_table, value_table = example(200)
batched = [x[None, None] for x in (q, keys, values)]
out, context = relpos.attention_forward(*batched, position=relpos.Shaw(key_table, value_table))
weight = random.standard_normal(out.shape, np.float32)
gradient = relpos.attention_backward(context, weight).key_table

direction = random.standard_normal(key_table.shape)
ends = [
    as_it_stands(
        *(np.float64(x) for x in (q, keys, values)),
        key_table + h * direction,
        np.float64(value_table),
    )
    for h in (-1e-4, 1e-4)
]
print(
    f"along the direction: {((ends[1] - ends[0]) * weight[0, 0]).sum() / 2e-4:.4f} by a small step"
)
print(f"                     {(gradient * direction).sum():.4f} by attention_backward")

# %%
relpos.plots.table_norms(gradient, clipped=True).set_title(
    "gradient of each row of the key table: its length"
)
plt.show()

# %% [markdown]
# The rows at the ends have gathered the gradient of every pair that is farther than $k$, all others that
# of one diagonal.

# %% [markdown]
# ## What to take away
#
# - A relation is one of $2k + 1$ vectors: multiply with the table, then look up, and add up before multiplying.
# - Outside the band nothing is left to look up. The longer the sequence, the less relations cost.
# - Nothing of $n \times n$ has to exist. A map of attention is made when somebody wants to see it, and then
#   only the rows and heads that are asked for.
