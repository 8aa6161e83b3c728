# SPDX-License-Identifier: Apache-2.0
"""What schemes and calls refuse, by its sentence: the argument, what came, what is allowed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import relpos
from relpos.position import sinusoid, t5_buckets

B, H, N, D = 2, 4, 6, 8
EDGES = relpos.EdgeList([0, 5], [1, 2], [0, 1], [0, 1])


def rows(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def labels(*shape: int) -> Any:
    return np.zeros(shape, np.int8)


X = rows(B, H, N, D)
F = "; use np.ascontiguousarray({}, np.float32)"
V, T = ValueError, TypeError

# Schemes that cannot be made.
MADE: list[tuple[str, Any, type[Exception], str]] = [
    (
        "no rows",
        lambda: relpos.ShawGraph(rows(0, D), labels=labels(N, N)),
        V,
        f"key_table: expected at least one row, got float32 (0, {D})",
    ),
    (
        "masked",
        lambda: relpos.MusicTransformer(rows(5, D), masked="no"),
        T,
        "masked: expected True or False, got str",
    ),
    (
        "bidirectional",
        lambda: relpos.T5Bias(rows(8, H), bidirectional=rows(2)),
        T,
        "bidirectional: expected True or False, got float32 (2,)",
    ),
    (
        "beyond, an array",
        lambda: relpos.Shaw(rows(5, D), beyond=np.zeros(2, np.float32)),
        V,
        "beyond: expected 'clip' or 'none', got array([0., 0.], dtype=float32)",
    ),
    (
        "positions",
        lambda: relpos.CrossPositions(relpos.RoPE(), [[1], [1, 2]], [1]),
        T,
        "query_positions: expected integers (rows,) or (B, rows), got a list of unequal parts",
    ),
    ("slopes", lambda: relpos.position.alibi_slopes("8"), T, "heads: expected an integer, got str"),
    (
        "graph, nothing",
        lambda: relpos.ShawGraph(labels=labels(N, N)),
        V,
        "ShawGraph: give key_table, value_table or bias_table",
    ),
    (
        "graph, no labels",
        lambda: relpos.ShawGraph(rows(3, D)),
        V,
        "ShawGraph: give labels or edges, one of them",
    ),
    (
        "graph, both",
        lambda: relpos.ShawGraph(rows(3, D), labels=labels(N, N), edges=EDGES),
        V,
        "ShawGraph: give labels or edges, one of them",
    ),
    (
        "label type",
        lambda: relpos.ShawGraph(rows(3, D), labels=np.zeros((N, N), np.int64)),
        T,
        "labels: expected int8, int16 or int32 (N, M), (B, N, M) or (B|1, H|1, N, M), "
        "got int64 (6, 6); use np.asarray(labels, np.int32)",
    ),
    (
        "label rank",
        lambda: relpos.ShawGraph(rows(3, D), labels=labels(N)),
        V,
        "labels: expected int8, int16 or int32 (N, M), (B, N, M) or (B|1, H|1, N, M), "
        "got int8 (6,)",
    ),
    (
        "edges, counts",
        lambda: relpos.EdgeList([1, 2], [1], [0, 0]),
        V,
        "key: expected 2 numbers as in query, got 1",
    ),
    (
        "edges, type",
        lambda: relpos.EdgeList([1.5], [1], [0]),
        T,
        "query: expected integers (E,), got float64 (1,)",
    ),
    (
        "xl, odd",
        lambda: relpos.TransformerXL(rows(H * D, 7)),
        V,
        "position_weight: expected an even d_model, got 7",
    ),
    (
        "xl, type",
        lambda: relpos.TransformerXL(rows(H * D, 6).astype(np.float64)),
        T,
        "position_weight: expected float32 (H * D, d_model), got float64 (32, 6)"
        + F.format("position_weight"),
    ),
    (
        "music, nothing",
        lambda: relpos.MusicTransformer(),
        V,
        "MusicTransformer: give key_table, value_table or both",
    ),
    (
        "music, even",
        lambda: relpos.MusicTransformer(rows(4, D), masked=False),
        V,
        "key_table: expected 2P - 1 rows, got 4",
    ),
    (
        "t5, odd",
        lambda: relpos.T5Bias(rows(7, H)),
        V,
        "bias_table: expected (num_buckets, H), the first even and at least 4, got (7, 4)",
    ),
    (
        "t5, distance",
        lambda: relpos.T5Bias(rows(32, H), max_distance=8),
        V,
        "max_distance: expected 9 or more, got 8",
    ),
    (
        "t5, scale",
        lambda: relpos.T5Bias(rows(32, H), scale=0),
        V,
        "scale: expected a number other than 0, or None for 1 / sqrt(D)",
    ),
    (
        "t5, bias_scale",
        lambda: relpos.T5Bias(rows(32, H), bias_scale=1e39),
        V,
        "bias_scale: expected at most 1e+30 in magnitude, got 1e+39",
    ),
    (
        "deberta, nothing",
        lambda: relpos.DeBERTa(),
        V,
        "DeBERTa: give key_table (c2p), query_table (p2c) or both",
    ),
    (
        "deberta, odd",
        lambda: relpos.DeBERTa(rows(7, D)),
        V,
        "key_table: expected 2 span rows, got 7",
    ),
    (
        "deberta, p2c",
        lambda: relpos.DeBERTa(rows(8, D), p2c="book"),  # type: ignore[arg-type]
        V,
        "p2c: expected 'code' or 'paper', got 'book'",
    ),
    (
        "relative_key, even",
        lambda: relpos.RelativeKey(rows(8, D)),
        V,
        "distance_table: expected 2P - 1 rows, got 8",
    ),
    (
        "alibi",
        lambda: relpos.ALiBi([0.5]),
        T,
        "slopes: expected float32 (H,) or None, got list" + F.format("slopes"),
    ),
    ("alibi, heads", lambda: relpos.ALiBi(4), T, "slopes: expected float32 (H,) or None, got int"),
    (
        "rope, odd",
        lambda: relpos.RoPE(width=3),
        V,
        "width: expected an even number of columns, got 3",
    ),
    (
        "rope, factor",
        lambda: relpos.RoPE(factor=2),
        V,
        "factor: without effect; give scaling='linear' or 'ntk'",
    ),
    (
        "rope, angles and width",
        lambda: relpos.RoPE(width=8, angles=[1, 2, 3]),
        V,
        "angles: expected one for each pair of 8 columns, 4, got 3",
    ),
    (
        "rope, angles and base",
        lambda: relpos.RoPE(angles=[1], base=500),
        V,
        "base: without effect beside angles, which say it all",
    ),
    (
        "rope, angles and scaling",
        lambda: relpos.RoPE(angles=[1], scaling="linear", factor=2),
        V,
        "scaling: without effect beside angles, which say it all",
    ),
    (
        "rope, angles, rank",
        lambda: relpos.RoPE(angles=0.5),
        V,
        "angles: expected finite numbers (P,), got float64 ()",
    ),
    (
        "rope, angles, nan",
        lambda: relpos.RoPE(angles=[1, np.nan]),
        V,
        "angles: expected finite numbers (P,), got nan at 1",
    ),
    (
        "rope, angles, large",
        lambda: relpos.RoPE(angles=[1e300]),
        V,
        "angles: expected numbers up to 1e+290 in magnitude",
    ),
    (
        "rope, angles, beyond float64",
        lambda: relpos.RoPE(angles=np.array([np.longdouble("1e4000")])),
        V,
        "angles: expected finite numbers (P,), got inf at 0",
    ),
    (
        "rope, angles, complex",
        lambda: relpos.RoPE(angles=[1j]),
        T,
        "angles: expected finite numbers (P,), got complex128 (1,)",
    ),
    (
        "rope, angles, unequal",
        lambda: relpos.RoPE(angles=[[1], [1, 2]]),
        T,
        "angles: expected finite numbers (P,), got a list of unequal parts",
    ),
    (
        "cross, scheme",
        lambda: relpos.CrossPositions(X, [1], [1]),
        T,
        "scheme: expected a scheme as relpos.Shaw, got ndarray",
    ),
    (
        "cross, positions",
        lambda: relpos.CrossPositions(relpos.ALiBi(), [1 << 30], [1]),
        V,
        "query_positions: expected positions below 2^30 in magnitude, got 1073741824",
    ),
    (
        "plane",
        lambda: relpos.Plane(relpos.ALiBi(), relpos.ALiBi(), width=0),
        V,
        "width: expected 1 or more, got 0",
    ),
    (
        "sinusoid",
        lambda: relpos.Sinusoidal(8, layout="odd"),  # type: ignore[arg-type]
        V,
        "layout: expected 'interleaved' or 'halves', got 'odd'",
    ),
    (
        "sinusoid, start",
        lambda: relpos.Sinusoidal(8, start="a"),  # type: ignore[arg-type]
        T,
        "start: expected an integer, got str",
    ),
    (
        "plane, wide",
        lambda: relpos.Plane(relpos.ALiBi(), relpos.ALiBi(), width=2**40),
        V,
        "width: expected 2^30 or less, got 1099511627776",
    ),
    (
        "edges, unsigned",
        lambda: relpos.EdgeList([2**64 - 1], [1], [0]),
        V,
        "query: expected integers below 2^63, got 18446744073709551615",
    ),
    (
        "labels in a list",
        lambda: relpos.ShawGraph(rows(3, D), labels=[labels(N, N), labels(N)]),
        V,
        "labels[1]: expected int8, int16 or int32 (n, m) or (H|1, n, m), got int8 (6,)",
    ),
    (
        "sinusoid, layout",
        lambda: relpos.position.sinusoid([1], 4, layout="Halves"),
        V,
        "layout: expected 'interleaved' or 'halves', got 'Halves'",
    ),
    (
        "sinusoid, exponent",
        lambda: relpos.position.sinusoid([1], 4, exponent="t2"),
        V,
        "exponent: expected 'vaswani' or 't2t', got 't2'",
    ),
    (
        "sinusoid, width",
        lambda: relpos.position.sinusoid([1], -2),
        V,
        "width: expected 0 or more, got -2",
    ),
    (
        "T5's buckets of fractions",
        lambda: relpos.position.t5_buckets([1.5]),
        T,
        "distances: expected integers of any shape, got float64 (1,)",
    ),
    (
        "T5's buckets, none",
        lambda: relpos.position.t5_buckets([1], 0),
        V,
        "num_buckets: expected 4 or more, got 0",
    ),
    (
        "DeBERTa's buckets, one",
        lambda: relpos.position.deberta_log_buckets([1], 1, 5),
        V,
        "bucket_size: expected 2 or more, got 1",
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "sentence"), [m[1:] for m in MADE], ids=[m[0] for m in MADE]
)
def test_scheme_refused(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert type(caught.value) is error and str(caught.value) == sentence


def shaw(n: int = 5) -> Any:
    return relpos.Shaw(rows(n, D))


def graph(**where: Any) -> Any:
    return relpos.ShawGraph(rows(3, D), **where)


# Calls of attention over (B, H, N, D).
CALLED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("causal", {"causal": "no"}, T, "causal: expected True or False, got str"),
    (
        "causal, an array",
        {"causal": X},
        T,
        f"causal: expected True or False, got float32 {X.shape}",
    ),
    (
        "lengths",
        {"lengths": [[1], [1, 2]]},
        T,
        "lengths: expected integers, got a list of unequal parts",
    ),
    (
        "out",
        {"out": [[1], [1, 2]]},
        T,
        f"out: expected float32 (B={B}, H={H}, N={N}, Dv={D}), got list",
    ),
    (
        "maps",
        {"return_maps": [["logits"]]},
        T,
        "return_maps: expected names, got list among them",
    ),
    (
        "labels, by the table's name",
        {"position": (shaw(), graph(labels=labels(N, N) + np.int8(9)))},
        V,
        "attention: key_table_2: label 9 of sequence 0, head 0, query 0, key 0; labels must be from "
        "-1 (none) to rows - 1 = 2",
    ),
    (
        "starts of labels",
        {"position": graph(labels=(labels(2 * N * N), [0]))},
        V,
        f"starts of labels of key_table: expected int64 (B={B},), got int64 (1,)",
    ),
    (
        "no scheme",
        {"position": X},
        T,
        "position: expected a scheme as relpos.Shaw, a tuple of them or None, got ndarray",
    ),
    (
        "in a tuple",
        {"position": (shaw(), 3)},
        T,
        "position: expected a scheme as relpos.Shaw, a tuple of them or None, got int",
    ),
    (
        "three of a kind",
        {"position": (shaw(), shaw(), relpos.RelativeKey(rows(31, D)))},
        V,
        "position: at most 2 key terms, got 3 (Shaw, Shaw, RelativeKey)",
    ),
    (
        "rope and key",
        {"position": (relpos.RoPE(), shaw())},
        V,
        "position: RoPE turns q and k, but the key term of Shaw would meet them unturned; "
        "combine RoPE with bias and value terms only",
    ),
    (
        "rope and query",
        {"position": (relpos.DeBERTa(query_table=rows(4, D)), relpos.RoPE())},
        V,
        "position: RoPE turns q and k, but the query term of DeBERTa would meet them unturned; "
        "combine RoPE with bias and value terms only",
    ),
    (
        "rope twice",
        {"position": (relpos.RoPE(), relpos.RoPE(width=2))},
        V,
        "position: RoPE twice; q and k are turned once",
    ),
    (
        "two scales",
        {"position": (shaw(), relpos.T5Bias(rows(32, H)))},
        V,
        "position: Shaw has the scale 0.353553, T5Bias 1; give the scale of the call",
    ),
    (
        "two position biases",
        {"position": (relpos.TransformerXL(rows(H * D, 4), None, rows(H, D)), shaw())},
        V,
        "position: the position bias of TransformerXL would enter the key term of Shaw too; "
        "leave one of them out",
    ),
    (
        "sinusoidal",
        {"position": relpos.Sinusoidal(D)},
        V,
        "position: Sinusoidal has no term in attention; add its table(n) to the embeddings and "
        "leave position out",
    ),
    (
        "learned absolute",
        {"position": relpos.LearnedAbsolute(rows(9, D))},
        V,
        "position: LearnedAbsolute has no term in attention; add its table(n) to the embeddings "
        "and leave position out",
    ),
    (
        "heads of T5",
        {"position": relpos.T5Bias(rows(32, 3))},
        V,
        "bias_table: expected float32 (num_buckets, H=4), got float32 (32, 3)",
    ),
    (
        "heads of ALiBi",
        {"position": relpos.ALiBi(rows(3))},
        V,
        "slopes: expected float32 (H=4,), got float32 (3,)",
    ),
    (
        "width of XL",
        {"position": relpos.TransformerXL(rows(31, 4))},
        V,
        "position_weight: expected float32 (H * D=32, d_model), got float32 (31, 4)",
    ),
    (
        "u of XL",
        {"position": relpos.TransformerXL(rows(32, 4), rows(H, 7))},
        V,
        "content_bias: expected float32 (H=4, D=8), got float32 (4, 7)",
    ),
    (
        "relative_key, too short",
        {"position": relpos.RelativeKey(rows(5, D))},
        V,
        "distance_table: 5 rows reach from -2 to 2, but the call has distances from -5 to 5; "
        "beyond='clip' takes the rows at the ends",
    ),
    (
        "rope, wide",
        {"position": relpos.RoPE(width=10)},
        V,
        "width: expected an even number up to D=8, got 10",
    ),
    (
        "rope, angles, wide",
        {"position": relpos.RoPE(angles=range(5))},
        V,
        "angles: expected at most D/2=4, got 5",
    ),
    (
        "rope, ntk",
        {"position": relpos.RoPE(width=2, scaling="ntk", factor=2)},
        V,
        "width: scaling='ntk' needs 4 columns or more, got 2",
    ),
    (
        "positions, count",
        {"position": relpos.CrossPositions(shaw(), range(5), range(N))},
        V,
        "query_positions: expected integers (N=6,) or (B=2, N=6), got int32 (5,)",
    ),
    (
        "positions of labels",
        {"position": relpos.CrossPositions(graph(labels=labels(N, N)), range(N), range(N))},
        V,
        "position: the key term of ShawGraph does not go by distance; it takes no positions",
    ),
    (
        "positions far apart",
        {
            "position": relpos.CrossPositions(
                relpos.TransformerXL(rows(H * D, 4)), range(N), [-(1 << 29)] * N
            )
        },
        V,
        "position: distances from -536870917 to 0 need a table of 536870918 rows, at most 67108864 "
        "are made; see query_start and the positions",
    ),
    (
        "a plane of RoPE",
        {"position": relpos.Plane(shaw(), relpos.RoPE(), width=2)},
        V,
        "position: RoPE does not go into a Plane; it turns by one position",
    ),
    (
        "edges without sequence",
        {"position": graph(edges=relpos.EdgeList([0], [0], [0]))},
        V,
        "sequence: give that of every edge, there are 2 sequences",
    ),
    (
        "edge, label",
        {"position": graph(edges=relpos.EdgeList([0, 1], [0, 1], [2, 3], [1, 0]))},
        V,
        "label[1]: expected 0 to 2, got 3",
    ),
    (
        "edge, query",
        {"position": graph(edges=EDGES), "lengths": [6, 5]},
        V,
        "query[1]: expected 0 to 4, got 5",
    ),
    (
        "edge, key",
        {"position": graph(edges=relpos.EdgeList([0, 1], [0, -1], [2, 0], [1, 0]))},
        V,
        "key[1]: expected 0 to 5, got -1",
    ),
    (
        "edge, sequence",
        {"position": graph(edges=relpos.EdgeList([0], [0], [0], [2]))},
        V,
        "sequence[0]: expected 0 to 1, got 2",
    ),
    (
        "mask, type",
        {"mask": np.zeros((N, N))},
        T,
        "mask: expected bool (N, M), (B, N, M) or (B|1, H|1, N, M), got float64 (6, 6); "
        "use np.asarray(mask, bool)",
    ),
    (
        "mask, shape",
        {"mask": np.ones((2, N), bool)},
        V,
        "mask: expected (N=6, M=6), (B=2 or 1, N=6, M=6) or (B=2 or 1, H=4 or 1, N=6, M=6), got (2, 6)",
    ),
    (
        "mask, of keys alone",
        {"mask": np.ones((2, 1, 1, N), bool)},
        V,
        "mask: expected (N=6, M=6), (B=2 or 1, N=6, M=6) or (B=2 or 1, H=4 or 1, N=6, M=6), got "
        "(2, 1, 1, 6); use np.broadcast_to(mask, (2, 1, 6, 6))",
    ),
    (
        "mask, sequences",
        {"mask": np.ones((3, N, N), bool)},
        V,
        "mask: expected (N=6, M=6), (B=2 or 1, N=6, M=6) or (B=2 or 1, H=4 or 1, N=6, M=6), got "
        "(3, 6, 6)",
    ),
    (
        "window, sides",
        {"window": (1, 2, 3)},
        V,
        "window: expected a number or (left, right), got (1, 2, 3)",
    ),
    (
        "window, truth",
        {"window": True},
        T,
        "window: expected integers or None, got True",
    ),
    (
        "window, negative",
        {"window": (-1, 2)},
        V,
        "window: expected 0 or more on each side, or None, got (-1, 2)",
    ),
    (
        "window, fraction",
        {"window": 1.5},
        T,
        "window: expected integers or None, got 1.5",
    ),
    (
        "window, wide",
        {"window": (None, 2**70)},
        V,
        "window: expected at most 2^40 on each side, got (None, 1180591620717411303424); "
        "use None for no bound",
    ),
    (
        "masks, shape",
        {"mask": [np.ones((4, 4), bool), np.ones((N, N), bool)], "lengths": [4, 5]},
        V,
        "mask[1]: expected (n=5, m=5), the queries and keys of sequence 1, got (6, 6)",
    ),
    (
        "masks, turned",
        {"mask": [np.ones((3, 2), bool)] * 2, "lengths": [2, 2], "key_lengths": [3, 3]},
        V,
        "mask[0]: expected (n=2, m=3), the queries and keys of sequence 0, got (3, 2)",
    ),
    (
        "masks, count",
        {"mask": [np.ones((N, N), bool)], "lengths": [N, N]},
        V,
        "mask: expected a list of B=2 matrices, one per sequence, got 1",
    ),
    (
        "masks, of rows that are not in use",
        {"mask": [np.ones((N, N), bool)] * 2, "lengths": [N, 0]},
        V,
        "mask[1]: expected (n=0, m=0), the queries and keys of sequence 1, got (6, 6)",
    ),
    (
        "labels, shape",
        {"position": graph(labels=[labels(N, N), labels(N, 5)]), "lengths": [N, 5]},
        V,
        "labels[1]: expected (n=5, m=5), the queries and keys of sequence 1, got (6, 5)",
    ),
    (
        "plane, far",
        {"position": relpos.Plane(shaw(), shaw(), width=3), "query_start": 2**33},
        V,
        "query_start: expected rows of the plane below 2^30 in magnitude, got 2863311530; "
        "see width too",
    ),
    (
        "plane, farther",
        {"position": relpos.Plane(shaw(), shaw(), width=3), "query_start": 2**63 - 1},
        V,
        "query_start: expected a position within 2^40 of 0, got 9223372036854775807",
    ),
    (
        "query_start, unsigned",
        {"query_start": 2**64 - 3},
        V,
        "query_start: expected integers below 2^63, got 18446744073709551613",
    ),
    (
        "lengths, unsigned",
        {"lengths": np.array([2**63 + 1, 1], np.uint64)},
        V,
        "lengths: expected integers below 2^63, got 9223372036854775809",
    ),
    ("scale, text", {"scale": "2"}, T, "scale: expected a number, got str"),
    ("scales", {"scale": np.array([1.0, 2.0])}, T, "scale: expected a number, got ndarray"),
    (
        "scale, zero",
        {"scale": 0},
        V,
        "scale: expected a finite number other than 0, got 0; leave it out for 1 / sqrt(D)",
    ),
    ("seed, fraction", {"seed": 1.5}, T, "seed: expected an integer, got float"),
    ("seed, none", {"seed": None}, T, "seed: expected an integer, got NoneType"),
    ("seed, word", {"seed": (1, 2, 3, "a")}, T, "seed: expected an integer, got str"),
    ("softcap", {"softcap": -1}, V, "softcap: expected 0 (none) or more, got -1"),
    ("dropout", {"dropout": 1.0}, V, "dropout: expected a rate from 0 to below 1, got 1.0"),
    ("dropout, NaN", {"dropout": np.nan}, V, "dropout: expected a finite number, got nan"),
    ("seed", {"seed": -1}, V, "seed: expected 0 to 2^64 - 1, got -1"),
    (
        "seed, words",
        {"seed": (1, 2, 3)},
        V,
        "seed: expected an integer or four words below 2^32, got (1, 2, 3)",
    ),
    ("precision", {"precision": "f16"}, V, "precision: expected 'f32' or 'bf16', got 'f16'"),
    (
        "rope, start",
        {"position": relpos.RoPE(), "query_start": 1 << 41},
        V,
        "query_start: expected a position within 2^40 of 0, got 2199023255552",
    ),
    (
        "rope, base",
        {"position": relpos.RoPE(scaling="ntk", base=1e300, factor=1e5, width=4)},
        V,
        "factor: base * factor^2 is beyond all floats",
    ),
]


@pytest.mark.parametrize(
    ("changes", "error", "sentence"), [c[1:] for c in CALLED], ids=[c[0] for c in CALLED]
)
def test_call_refused(changes: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        relpos.attention(X, X, X, **changes)
    assert type(caught.value) is error and str(caught.value) == sentence


def test_rope_names_what_the_caller_gave() -> None:
    """q and k are turned before the core sees them."""
    for name, changed, sentence in (
        ("q", X.astype(np.float64), "q: expected float32 .*; use np.ascontiguousarray.q, "),
        ("k", X.astype(np.float64), "k: expected float32 .*; use np.ascontiguousarray.k, "),
        ("k", X[..., ::-1], "k: strides must be .*; use k.copy"),
        ("k", np.ascontiguousarray(X[..., :2]), f"k: expected the width of q, D={D}, got float32"),
    ):
        given = {"q": X, "k": X, "v": X} | {name: changed}
        with pytest.raises((TypeError, ValueError), match=f"^{sentence}"):
            relpos.attention(*given.values(), position=relpos.RoPE())


def test_sinusoid_refused() -> None:
    for given, sentence in (
        ((5, 4), r"positions: expected \(P,\), got float64 \(\)"),
        (([[1, 2]], 4), r"positions: expected \(P,\), got float64 \(1, 2\)"),
        (([1], 1 << 63), "width: expected at most 2\\^40"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{sentence}"):
            sinusoid(*given)
    base: Any
    for base in ("x", None, 0):
        with pytest.raises((TypeError, ValueError), match="^base: expected a"):
            sinusoid([1], 4, base=base)
    for width, small in ((7, 1e-250), (3, 1e-308)):
        with pytest.raises(
            ValueError, match="^base: expected one whose frequencies are below 1e290"
        ):
            relpos.Sinusoidal(width, exponent="t2t", base=small).table(3)
    with pytest.raises(ValueError, match="base=1e-307, so small that the last of 32 is beyond 1e"):
        relpos.RoPE(base=1e-307).frequencies(64)
    for factor in (1e-307, 1e-309, 1e7):
        with pytest.raises(ValueError, match="^factor: expected a number from 1e-6 to 1e6, got "):
            relpos.RoPE(scaling="linear", factor=factor)
    for table in (lambda: relpos.Sinusoidal(1 << 63), lambda: relpos.Sinusoidal(8).table(1 << 63)):
        with pytest.raises(ValueError, match="expected at most 2\\^40"):
            table()
    both: Any = "no"
    with pytest.raises(TypeError, match="^bidirectional: expected True or False"):
        t5_buckets([3], bidirectional=both)


def test_what_its_library_cannot_place() -> None:
    class Nowhere:
        __dlpack__ = None

        def __dlpack_device__(self) -> tuple[int, int]:
            raise ValueError("Unknown device type meta")

    nowhere: Any = Nowhere()
    for given in ((nowhere, X, X), (X, X, nowhere)):
        with pytest.raises(TypeError, match="^[qv]: expected an array that can be read: Unknown"):
            relpos.attention(*given)


def test_positions_are_given_once() -> None:
    once = relpos.CrossPositions(relpos.RoPE(), [0] * N, [0] * N)
    with pytest.raises(ValueError, match="^position: CrossPositions has positions already"):
        relpos.attention(X, X, X, position=relpos.CrossPositions(once, [0] * N, [0] * N))


def test_a_plane_of_other_scales_takes_the_calls() -> None:
    both = relpos.T5Bias(rows(8, H)), shaw()
    plane = relpos.Plane(*both, width=N)  # one row: only its columns differ
    with pytest.raises(ValueError, match="^position: T5Bias has the scale 1, Shaw 0.*; give the"):
        relpos.attention(X, X, X, position=plane)
    flat = relpos.CrossPositions(both[0], [0] * N, [0] * N), both[1]
    out = relpos.attention(X, X, X, position=plane, scale=0.4)
    expected = relpos.attention(X, X, X, position=flat, scale=0.4)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)


def test_far_positions_of_tables_that_end() -> None:
    """What is clipped needs no row for every distance."""
    far = np.array([0, 1, 2, 2**25, 2**26 - 2, 2**26 - 1])
    table = rows(11, D)
    clipped = relpos.RelativeKey(table, beyond="clip")
    out = relpos.attention(X, X, X, position=relpos.CrossPositions(clipped, far, far))
    same = relpos.Shaw(table[::-1].copy())
    expected = relpos.attention(X, X, X, position=relpos.CrossPositions(same, far, far))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)
    for buckets in (2, 4, 6, 8):
        deberta = relpos.DeBERTa(rows(8, D), buckets=buckets)
        near = relpos.attention(X, X, X, position=deberta, query_start=1 << 16)
        away = relpos.attention(X, X, X, position=deberta, query_start=1 << 40)
        np.testing.assert_array_equal(away, near)


@pytest.mark.parametrize("where", ["labels", "second"])
def test_a_label_out_of_range_is_named_with_its_place(where: str) -> None:
    wrong = labels(B, 1, N, N)
    wrong[1, 0, 2, 3] = 3
    position = graph(labels=wrong) if where == "labels" else (shaw(), graph(labels=wrong))
    sentence = "label 3 of sequence 1, head 0, query 2, key 3; labels must be from -1 .* = 2$"
    with pytest.raises(ValueError, match=sentence):
        relpos.attention(X, X, X, position=position)


def test_lists_of_labels_and_masks() -> None:
    """The matrices of a list, for packed arrays and for padded ones with lengths."""
    lengths, mask = [4, N], np.tril(np.ones((N, N), bool))
    chosen = np.random.default_rng(1).integers(-1, 3, (B, N, N)).astype(np.int8)
    whole, listed = [
        relpos.attention(X, X, X, position=graph(labels=table), mask=seen, lengths=lengths)
        for table, seen in (
            (chosen, mask),
            ([x[:n, :n] for x, n in zip(chosen, lengths, strict=True)],
             [mask[:n, :n] for n in lengths]),
        )
    ]  # fmt: skip
    assert np.array_equal(whole, listed)
    q, k = rows(2, H, D), rows(3, H, D)
    sides: dict[str, Any] = {"offsets": [0, 2], "key_offsets": [0, 3]}
    relpos.attention(q, k, k, **sides, position=graph(labels=[labels(2, 3)]))
    with pytest.raises(ValueError, match=r"^labels\[0\]: expected \(n=2, m=3\), .* got \(3, 2\)$"):
        relpos.attention(q, k, k, **sides, position=graph(labels=[labels(3, 2)]))
    with pytest.raises(ValueError, match=r"^mask\[0\]: expected \(n=2, m=3\), .* got \(3, 2\)$"):
        relpos.attention(q, k, k, **sides, mask=[np.ones((3, 2), bool)])
    whole = f"H={H} or 1, n=2, m=3"
    for wrong in ((H, 3, 2), (H + 1, 2, 3)):
        sentence = rf"\[0\]: expected \({whole}\), .* got \({', '.join(map(str, wrong))}\)$"
        with pytest.raises(ValueError, match=f"^labels{sentence}"):
            relpos.attention(q, k, k, **sides, position=graph(labels=[labels(*wrong)]))
        with pytest.raises(ValueError, match=f"^mask{sentence}"):
            relpos.attention(q, k, k, **sides, mask=[np.ones(wrong, bool)])
    with pytest.raises(ValueError, match=r"^labels\[0\]: expected \(H=4 or 1, n, m\), as others"):
        graph(labels=[labels(2, N, N), labels(4, N, N)])
    with pytest.raises(ValueError, match=r"^mask: packed arrays take a list of one matrix per seq"):
        relpos.attention(q, k, k, **sides, mask=np.ones((1, H, 2, 3), bool))
    with pytest.raises(
        ValueError, match=r"^mask: expected bool \(count,\) or \(H\|1, count\), got"
    ):
        relpos.attention(q, k, k, **sides, mask=(np.ones((1, H, 6), bool), [0]))


def test_a_plane_far_away() -> None:
    """Positions beyond 2^31, of which the rows and the columns are small."""
    scheme = relpos.Shaw(rows(5, D), rows(5, D))
    plane = relpos.Plane(scheme, scheme, width=1 << 20)
    out = relpos.attention(X, X, X, position=plane, query_start=(1 << 33) + 5)
    above = relpos.CrossPositions(scheme, [1 << 13] * N, [0] * N)  # every key 2^13 rows above
    beside = relpos.CrossPositions(scheme, range(5, 5 + N), range(N))
    expected = relpos.attention(X, X, X, position=(above, beside))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)


def test_gradients_can_be_copied() -> None:
    _, ctx = relpos.attention_forward(X, X, X, position=shaw())
    found = relpos.attention_backward(ctx, X)
    for other in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert list(other) == list(found)
        assert all(np.array_equal(other[name], x) for name, x in found.items())
        assert other.value_table is None


def test_gradients_of_tied_parameters() -> None:
    """As `Gradients` says: their sum is that of tables apart."""
    w, u, table = rows(H * D, 4), rows(H, D), rows(11, D)
    for tied, apart, names in (
        (relpos.TransformerXL(w, u, u), relpos.TransformerXL(w, u, u.copy()), 2),
        (relpos.Shaw(table, table), relpos.Shaw(table, table.copy()), 1),
        ((relpos.Shaw(table), relpos.RelativeKey(table)),
         (relpos.Shaw(table), relpos.RelativeKey(table.copy())), 2),
        (relpos.Plane(relpos.Shaw(table), relpos.Shaw(table), width=3),
         relpos.Plane(relpos.Shaw(table), relpos.Shaw(table.copy()), width=3), 1),
    ):  # fmt: skip
        sums = []
        for position in (tied, apart):
            _, ctx = relpos.attention_forward(X, X, X, position=position)
            found = relpos.attention_backward(ctx, X)
            own = [found[n] for n in found if n not in ("q", "k", "v", "position_weight")]
            assert len(own) == (names if position is tied else 2)
            sums.append(sum(own))
        np.testing.assert_allclose(*sums, rtol=1e-4, atol=1e-5)


def test_duplicate_edges_add_up() -> None:
    once = graph(edges=relpos.EdgeList([0], [1], [2], [0]))
    twice = graph(edges=relpos.EdgeList([0, 0], [1, 1], [2, 2], [0, 0]))
    double = relpos.ShawGraph(2 * once.key_table, edges=once.edges)
    np.testing.assert_allclose(
        *(relpos.attention(X, X, X, position=p) for p in (twice, double)), rtol=0, atol=1e-6
    )


def test_nan_in_a_table_stays_where_it_is_met() -> None:
    table = rows(5, D)
    table[0] = np.nan  # distances of -2 and less
    out = relpos.attention(X, X, X, position=relpos.Shaw(table))
    assert np.isfinite(out[:, :, :2]).all() and np.isnan(out[:, :, 2:]).all()


def test_empty_everything() -> None:
    for shape in ((0, H, N, D), (B, H, 0, D)):
        x = rows(*shape)
        for position in (
            relpos.TransformerXL(rows(H * D, 4), rows(H, D), rows(H, D)),
            relpos.T5Bias(rows(8, H), max_distance=9),
            relpos.ALiBi(rows(H)),
            relpos.DeBERTa(rows(6, D), rows(6, D)),
            relpos.RelativeKeyQuery(rows(3, D)),
            relpos.RoPE(),
            graph(labels=labels(1, 1, *shape[2:3], *shape[2:3])),
            graph(edges=relpos.EdgeList([], [], [], [])),
            relpos.Plane(shaw(), shaw(), width=3),
            relpos.CrossPositions(shaw(), range(shape[2]), range(shape[2])),
        ):
            out, ctx = relpos.attention_forward(x, x, x, position=position)
            gradients = relpos.attention_backward(ctx, out)
            assert out.shape == shape
            assert not any(np.any(g) for g in gradients.values())


def test_no_heads() -> None:
    x = rows(B, 0, 5, D)
    w, u = np.zeros((0, 4), np.float32), np.zeros((0, D), np.float32)
    out, ctx = relpos.attention_forward(x, x, x, position=relpos.TransformerXL(w, u, u.copy()))
    gradients = relpos.attention_backward(ctx, out)
    assert out.shape == x.shape and gradients.position_weight.shape == w.shape
    assert gradients.content_bias.shape == gradients.position_bias.shape == u.shape


def test_no_edges() -> None:
    for x in (X, X[:0], X[:1]):
        for edges in (relpos.EdgeList([], [], []), relpos.EdgeList([], [], [], [])):
            out = relpos.attention(x, x, x, position=graph(edges=edges))
            assert np.array_equal(out, relpos.attention(x, x, x))


def test_names_in_a_tuple() -> None:
    first, second = rows(5, D), rows(3, D)
    position = (relpos.Shaw(first), relpos.ShawGraph(second, labels=labels(N, N)))
    _, ctx = relpos.attention_forward(X, X, X, position=position)
    gradients = relpos.attention_backward(ctx, X)
    assert list(gradients) == ["q", "k", "v", "key_table", "key_table_2"]
    assert gradients.key_table.shape == (5, D) and gradients.key_table_2.shape == (3, D)
    assert gradients.value_table is None and gradients.slopes is None
    with pytest.raises(AttributeError, match="^there is no gradient 'tables', only q, k, v, key_"):
        gradients.tables  # noqa: B018
    both = (relpos.Shaw(first), relpos.Shaw(first, left=1))
    _, ctx = relpos.attention_forward(X, X, X, position=both)
    assert list(relpos.attention_backward(ctx, X)) == ["q", "k", "v", "key_table"]


def test_every_scheme_says_what_it_is() -> None:
    assert repr(relpos.ALiBi()) == "ALiBi()"
    assert repr(relpos.T5Bias(rows(32, H))) == "T5Bias(bias_table=float32 (32, 4))"
    assert repr(relpos.CrossPositions(relpos.ALiBi(), [1], [2])) == "CrossPositions(ALiBi())"
    assert repr(EDGES) == "EdgeList(2 edges)"
