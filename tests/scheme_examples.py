# SPDX-License-Identifier: Apache-2.0
"""Every position scheme beside its formula, written out pair by pair in double.

A formula gives the scores of one head, before masks and softmax, and what each pair adds to its
value. It knows nothing of terms, maps or tables that are made: only distances and the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import relpos

B, H, N, D, P = 2, 4, 13, 8, 16  # P: rows for every distance that can be met
LABELS = np.random.default_rng(5).integers(-1, 6, (B, 1, N, N)).astype(np.int8)
QUERY_PLACES = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9])
KEY_PLACES = np.array([2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9])


# --------------------------------------------------------------------------------------------------
# The formulas
# --------------------------------------------------------------------------------------------------


@dataclass
class Pairs:
    """One head of one sequence: what a formula is given."""

    q: Any
    k: Any
    t: dict[str, Any]  # the parameters, whole
    h: int
    b: int
    start: int
    n: int = field(init=False)
    m: int = field(init=False)

    def __post_init__(self) -> None:
        self.n, self.m = len(self.q), len(self.k)

    @property
    def d(self) -> Any:
        return np.arange(self.m)[None, :] - (np.arange(self.n)[:, None] + self.start)

    def of_head(self, name: str, shared: int = 2) -> Any:
        table = self.t[name]
        return table if table.ndim == shared else table[self.h]

    @property
    def content(self) -> Any:
        return self.q @ self.k.T


def rows(table: Any, index: Any, none: Any = False) -> Any:
    """(n, m, width): a row for every pair, zeros where there is none."""
    safe = np.clip(index, 0, len(table) - 1)
    return np.where(np.broadcast_to(none, index.shape)[..., None], 0.0, table[safe])


def meets_query(x: Pairs, relations: Any) -> Any:
    return np.einsum("id,ijd->ij", x.q, relations)


def meets_key(x: Pairs, relations: Any) -> Any:
    return np.einsum("jd,ijd->ij", x.k, relations)


def shaw(x: Pairs, left: int = 2, right: int = 2) -> Any:
    r = np.clip(x.d, -left, right) + left
    s = (x.content + meets_query(x, rows(x.of_head("key_table"), r))) / math.sqrt(D)
    values = x.of_head("value_table") if "value_table" in x.t else x.of_head("key_table")
    return s, rows(values, r)


def shaw_none(x: Pairs) -> Any:
    r, out = x.d + 1, (x.d < -1) | (x.d > 3)
    return (x.content + meets_query(x, rows(x.t["key_table"], r, out))) / math.sqrt(D), 0.0


def label_of(x: Pairs) -> Any:
    return LABELS[x.b, 0, : x.n, : x.m].astype(int)


def graph(x: Pairs) -> Any:
    label = label_of(x)
    none = label < 0
    s = (x.content + meets_query(x, rows(x.of_head("key_table"), label, none))) / math.sqrt(D)
    bias = np.where(none, 0.0, x.of_head("bias_table", 1)[label])
    return s + bias, rows(x.t["value_table"], label, none)


def rat_sql(x: Pairs) -> Any:
    r, label = np.clip(x.d, -2, 2) + 2, label_of(x)
    relations = rows(x.t["key_table"], r) + rows(x.t["key_table_2"], label, label < 0)
    values = rows(x.t["value_table"], r) + rows(x.t["value_table_2"], label, label < 0)
    return (x.content + meets_query(x, relations)) / math.sqrt(D), values


def edge_graph(x: Pairs) -> Any:
    """Edges (i, 2 i mod m, i mod 3) of every sequence, and (0, 0, 1) twice more."""
    table, values = x.t["key_table"], x.t["value_table"]
    a, z = np.zeros((x.n, x.m, D)), np.zeros((x.n, x.m, D))
    for i, j, label in edges_of(x.n):
        a[i, j] += table[label]
        z[i, j] += values[label]
    return (x.content + meets_query(x, a)) / math.sqrt(D), z


def edges_of(n: int) -> list[tuple[int, int, int]]:
    return [(i, 2 * i % n, i % 3) for i in range(n)] + [(0, 0, 1), (0, 0, 1)]


def edge_list(first: int, last: int) -> relpos.EdgeList:
    """Those of all sequences, the last first; of these queries, as far as their keys are there."""
    edges = [(b, *e) for b in range(B) for e in edges_of(N) if first <= e[0] < last > e[1]]
    b, i, j, label = np.array(edges, int).reshape(-1, 4)[::-1].T
    return relpos.EdgeList(i - first, j, label, b)


def xl(x: Pairs, clamp: int | None = None, u: bool = True) -> Any:
    t = -x.d if clamp is None else np.clip(-x.d, -clamp, clamp)
    width = x.t["position_weight"].shape[1]
    angle = t[..., None] * 10000.0 ** (-2 * np.arange(width // 2) / width)
    R = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)  # (n, m, d_model)
    W = x.t["position_weight"].reshape(H, D, width)[x.h]
    s = x.content
    if u:
        s = s + (x.k @ x.t["content_bias"][x.h])[None]
    v = x.t["position_bias"][x.h] if u else 0.0
    s = s + np.einsum("id,de,ije->ij", x.q + v, W, R)
    return s / math.sqrt(D), 0.0


def music(x: Pairs) -> Any:
    table = x.of_head("key_table")
    row = x.d + len(table) - 1
    none = (x.d > 0) | (row < 0)
    return (x.content + meets_query(x, rows(table, row, none))) / math.sqrt(D), 0.0


def music_unmasked(x: Pairs) -> Any:
    row = x.d + 3
    none = abs(x.d) > 3
    s = (x.content + meets_query(x, rows(x.t["key_table"], row, none))) / math.sqrt(D)
    return s, rows(x.t["value_table"], row, none)


def t5_bucket(d: int, nb: int, far: int, both: bool) -> int:
    """As T5 writes it, number by number."""
    base, x = 0, -d
    if both:
        nb //= 2
        base, x = (nb, abs(d)) if d > 0 else (0, abs(d))
    x = max(x, 0)
    exact = nb // 2
    if x < exact:
        return base + x
    more = exact + int(math.log(x / exact) / math.log(far / exact) * (nb - exact))
    return base + min(more, nb - 1)


def t5(x: Pairs, both: bool = True, scale: float = 1.0, bias_scale: float = 1.0) -> Any:
    table = x.t["bias_table"]
    bucket = np.vectorize(lambda d: t5_bucket(int(d), len(table), 10, both))(x.d)
    return scale * x.content + bias_scale * table[bucket, x.h], 0.0


def deberta(x: Pairs, log: bool = False, paper: bool = False) -> Any:
    """Terms as there are tables."""

    def delta(g: Any, span: int) -> Any:
        if log:
            g = np.vectorize(log_bucket)(g)
        return np.clip(g + span, 0, 2 * span - 1)

    s = x.content
    if "key_table" in x.t:
        span = x.t["key_table"].shape[-2] // 2
        s = s + meets_query(x, rows(x.of_head("key_table"), delta(-x.d, span)))
    if "query_table" in x.t:
        span = x.t["query_table"].shape[-2] // 2
        index = delta(x.d if paper else -x.d, span)
        s = s + meets_key(x, rows(x.of_head("query_table"), index))
    return s / math.sqrt(D * (1 + len(x.t))), 0.0


def log_bucket(g: int, size: int = 8, far: int = 12) -> int:
    mid = size // 2
    if abs(g) <= mid:
        return g
    more = math.ceil(math.log(abs(g) / mid) / math.log((far - 1) / mid) * (mid - 1)) + mid
    return more if g > 0 else -more


def relative_key(x: Pairs, query: bool = False) -> Any:
    table = x.t["distance_table"]
    reach = len(table) // 2
    relations = rows(table, np.clip(-x.d, -reach, reach) + reach)
    s = x.content + meets_query(x, relations)
    if query:
        s = s + meets_key(x, relations)
    return s / math.sqrt(D), 0.0


def alibi(x: Pairs) -> Any:
    slope = x.t["slopes"][x.h] if x.t else 2.0 ** (-8 * (x.h + 1) / H)
    return x.content / math.sqrt(D) - slope * abs(x.d), 0.0


ANGLES = [0.5, -0.25, 2]  # of the first six columns


def rotated(x: Any, places: Any, theta: Any, interleaved: bool) -> Any:
    """As complex numbers."""
    width = 2 * len(theta)
    if interleaved:
        z = x[:, 0:width:2] + 1j * x[:, 1:width:2]
    else:
        z = x[:, : width // 2] + 1j * x[:, width // 2 : width]
    z = z * np.exp(1j * np.asarray(places)[:, None] * theta)
    turned = x.copy()
    if interleaved:
        turned[:, 0:width:2], turned[:, 1:width:2] = z.real, z.imag
    else:
        turned[:, : width // 2], turned[:, width // 2 : width] = z.real, z.imag
    return turned


def rope(
    x: Pairs,
    width: int = D,
    base: float = 10000.0,
    interleaved: bool = False,
    divide: float = 1.0,
    bias: bool = False,
    angles: Any = None,
) -> Any:
    if angles is None:
        angles = base ** (-2 * np.arange(width // 2) / width) / divide
    q = rotated(x.q, np.arange(x.n) + x.start, np.asarray(angles), interleaved)
    k = rotated(x.k, np.arange(x.m), np.asarray(angles), interleaved)
    s = q @ k.T / math.sqrt(D)
    return (s + alibi(x)[0] - x.content / math.sqrt(D) if bias else s), 0.0


def cross(x: Pairs) -> Any:
    d = KEY_PLACES[None, : x.m] - QUERY_PLACES[: x.n, None]
    r = np.clip(d, -2, 2) + 2
    s = (x.content + meets_query(x, rows(x.t["key_table"], r))) / math.sqrt(D)
    return s, rows(x.t["value_table"], r)


def cross_xl(x: Pairs) -> Any:
    other = Pairs(x.q, x.k, x.t, x.h, x.b, x.start)
    d = KEY_PLACES[None, : x.m] - QUERY_PLACES[: x.n, None]
    angle = -d[..., None] * 10000.0 ** (-2 * np.arange(3) / 6)
    R = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
    W = other.t["position_weight"].reshape(H, D, 6)[x.h]
    return (x.content + np.einsum("id,de,ije->ij", x.q, W, R)) / math.sqrt(D), 0.0


def plane(x: Pairs) -> Any:
    i, j = np.arange(x.n) + x.start, np.arange(x.m)
    y, c = j[None] // 4 - i[:, None] // 4, j[None] % 4 - i[:, None] % 4
    relations = rows(x.t["row_key_table"], np.clip(y, -1, 1) + 1)
    relations = relations + rows(x.t["column_key_table"], np.clip(c, -2, 2) + 2)
    s = (x.content + meets_query(x, relations)) / math.sqrt(D)
    return s, rows(x.t["row_value_table"], np.clip(y, -1, 1) + 1)


# --------------------------------------------------------------------------------------------------
# The schemes
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    make: Callable[..., Any]  # of the parameters, by name
    formula: Callable[[Pairs], Any]  # s (n, m), and what is added to the values (n, m, Dv)
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lengths: bool = True  # other lengths than N make sense; else make takes (first, last) as well
    most: int = 1000  # the longest length it knows

    @property
    def long(self) -> bool:
        return self.lengths and self.most > N + P


def both(rows: int, *heads: int) -> dict[str, tuple[int, ...]]:
    return {"key_table": (*heads, rows, D), "value_table": (*heads, rows, D)}


def labels_of(first: int, last: int) -> Any:
    return np.ascontiguousarray(LABELS[:, :, first:last, :last])


def graph_of(first: int = 0, last: int = N, **t: Any) -> Any:
    return relpos.ShawGraph(**t, labels=labels_of(first, last))


def edge_graph_of(first: int = 0, last: int = N, **t: Any) -> Any:
    return relpos.ShawGraph(**t, edges=edge_list(first, last))


def rat_sql_of(first: int = 0, last: int = N, **t: Any) -> Any:
    return (
        relpos.Shaw(t["key_table"], t["value_table"]),
        relpos.ShawGraph(t["key_table_2"], t["value_table_2"], labels=labels_of(first, last)),
    )


def cross_of(first: int = 0, last: int = N, **t: Any) -> Any:
    places = QUERY_PLACES[first:last], KEY_PLACES[:last]
    return relpos.CrossPositions(relpos.Shaw(**t), *places)


def cross_xl_of(first: int = 0, last: int = N, **t: Any) -> Any:
    places = [QUERY_PLACES[first:last]] * B, [KEY_PLACES[:last]] * B
    return relpos.CrossPositions(relpos.TransformerXL(**t), *places)


def plane_of(**t: Any) -> Any:
    return relpos.Plane(
        relpos.Shaw(t["row_key_table"], t["row_value_table"]),
        relpos.Shaw(t["column_key_table"]),
        width=4,
    )


DISTANCES = {"distance_table": (2 * P - 1, D)}
XL = {"position_weight": (H * D, 6), "content_bias": (H, D), "position_bias": (H, D)}
EXAMPLES: dict[str, Example] = {
    "shaw": Example(lambda **t: relpos.Shaw(**t), shaw, both(5)),
    "shaw per head": Example(lambda **t: relpos.Shaw(**t), shaw, both(5, H)),
    "shaw tied": Example(
        lambda key_table: relpos.Shaw(key_table, key_table), shaw, {"key_table": (5, D)}
    ),
    "shaw none beyond": Example(
        lambda key_table: relpos.Shaw(key_table, left=1, beyond="none"),
        shaw_none,
        {"key_table": (5, D)},
    ),
    "graph": Example(
        graph_of,
        graph,
        {"key_table": (H, 6, D), "value_table": (6, D), "bias_table": (H, 6)},
        lengths=False,
    ),
    "rat-sql": Example(
        rat_sql_of,
        rat_sql,
        both(5) | {"key_table_2": (6, D), "value_table_2": (6, D)},
        lengths=False,
    ),
    "edges": Example(edge_graph_of, edge_graph, both(3), lengths=False),
    "xl": Example(lambda **t: relpos.TransformerXL(**t), xl, XL),
    "xl clamped": Example(
        lambda **t: relpos.TransformerXL(**t, clamp_len=4), lambda x: xl(x, 4), XL
    ),
    "xl without u and v": Example(
        lambda position_weight: relpos.TransformerXL(position_weight),
        lambda x: xl(x, u=False),
        {"position_weight": (H * D, 6)},
    ),
    "music": Example(lambda **t: relpos.MusicTransformer(**t), music, {"key_table": (H, 5, D)}),
    "music unmasked": Example(
        lambda **t: relpos.MusicTransformer(**t, masked=False), music_unmasked, both(7)
    ),
    "t5": Example(lambda **t: relpos.T5Bias(**t, max_distance=10), t5, {"bias_table": (12, H)}),
    "t5 one way": Example(
        lambda **t: relpos.T5Bias(**t, max_distance=10, bidirectional=False),
        lambda x: t5(x, both=False),
        {"bias_table": (7, H)},
    ),
    "t5 scaled": Example(
        lambda **t: relpos.T5Bias(**t, max_distance=10, scale=None, bias_scale=2.5),
        lambda x: t5(x, scale=D**-0.5, bias_scale=2.5),
        {"bias_table": (12, H)},
    ),
    "deberta v1": Example(
        lambda **t: relpos.DeBERTa(**t),
        deberta,
        {"key_table": (H, 6, D), "query_table": (H, 6, D)},
    ),
    "deberta v2": Example(
        lambda **t: relpos.DeBERTa(**t, buckets=8, max_position=12),
        lambda x: deberta(x, log=True),
        {"key_table": (H, 16, D), "query_table": (H, 16, D)},
    ),
    "deberta v2, paper": Example(
        lambda **t: relpos.DeBERTa(**t, buckets=8, max_position=12, p2c="paper"),
        lambda x: deberta(x, log=True, paper=True),
        {"key_table": (H, 10, D), "query_table": (10, D)},
    ),
    "deberta v1, paper": Example(
        lambda **t: relpos.DeBERTa(**t, p2c="paper"),
        lambda x: deberta(x, paper=True),
        {"key_table": (H, 6, D), "query_table": (6, D)},
    ),
    "deberta c2p": Example(lambda **t: relpos.DeBERTa(**t), deberta, {"key_table": (H, 6, D)}),
    "deberta p2c": Example(lambda **t: relpos.DeBERTa(**t), deberta, {"query_table": (H, 6, D)}),
    "relative_key": Example(lambda **t: relpos.RelativeKey(**t), relative_key, DISTANCES, most=P),
    "relative_key, short": Example(
        lambda **t: relpos.RelativeKey(**t, beyond="clip"),
        relative_key,
        {"distance_table": (5, D)},
    ),
    "relative_key_query": Example(
        lambda **t: relpos.RelativeKeyQuery(**t),
        lambda x: relative_key(x, True),
        DISTANCES,
        most=P,
    ),
    "alibi": Example(lambda: relpos.ALiBi(), alibi),
    "alibi learned": Example(lambda **t: relpos.ALiBi(**t), alibi, {"slopes": (H,)}),
    "rope": Example(lambda: relpos.RoPE(), rope),
    "rope interleaved": Example(
        lambda: relpos.RoPE(pairing="interleaved", width=6),
        lambda x: rope(x, 6, interleaved=True),
    ),
    "rope linear": Example(
        lambda: relpos.RoPE(width=4, scaling="linear", factor=4, base=100),
        lambda x: rope(x, 4, 100.0, divide=4.0),
    ),
    "rope ntk": Example(
        lambda: relpos.RoPE(scaling="ntk", factor=2),
        lambda x: rope(x, base=10000.0 * 2.0 ** (D / (D - 2))),
    ),
    "rope angles": Example(lambda: relpos.RoPE(angles=ANGLES), lambda x: rope(x, angles=ANGLES)),
    "rope and alibi": Example(
        lambda **t: (relpos.RoPE(), relpos.ALiBi(**t)),
        lambda x: rope(x, bias=True),
        {"slopes": (H,)},
    ),
    "cross positions": Example(
        cross_of,
        cross,
        both(5),
        lengths=False,
    ),
    "cross positions, xl": Example(
        cross_xl_of,
        cross_xl,
        {"position_weight": (H * D, 6)},
        lengths=False,
    ),
    "plane": Example(
        plane_of,
        plane,
        {"row_key_table": (3, D), "row_value_table": (3, D), "column_key_table": (5, D)},
    ),
}


def parameters(example: Example, dtype: Any, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng([seed, 77])
    return {
        name: (0.5 * random.standard_normal(shape)).astype(np.float32).astype(dtype)
        for name, shape in example.parameters.items()
    }


def activations(dtype: Any, n: int = N, m: int = N, seed: int = 1) -> list[Any]:
    random = np.random.default_rng(seed)
    shapes = [(B, H, n, D), (B, H, m, D), (B, H, m, D), (B, H, n, D)]
    return [random.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def dense(example: Example, q: Any, k: Any, v: Any, tables: dict[str, Any], causal: bool) -> Any:
    """The formula, softmax and sums of all heads and sequences, in double."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    tables = {name: np.asarray(x, np.float64) for name, x in tables.items()}
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b in range(q.shape[0]):
        for h in range(H):
            x = Pairs(q[b, h], k[b, h], tables, h, b, k.shape[2] - q.shape[2])
            s, added = example.formula(x)
            if causal:
                s = np.where(x.d <= 0, s, -np.inf)
            p = np.exp(s - s.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            out[b, h] = np.einsum("ij,ijd->id", p, v[b, h][None] + added)
    return out
