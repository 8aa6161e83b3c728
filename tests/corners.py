# SPDX-License-Identifier: Apache-2.0
"""CORNERS: the cases that chance would miss, and those in which something once was wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from cases import Case, Distances, Edges, Labels, Map, Mask, random_case
from relpos import reference
from relpos.reference import Band, Dropout


def _corners() -> list[Case]:
    both = {"key": Band(3, 3), "value": Band(3, 3)}
    cases = []
    # n against k, causal and not.
    for N in (0, 1, 2, 15, 16, 17, 63, 64, 65, 67, 127, 128, 129):
        for K in sorted({0, 1, max(N - 1, 0), N, 2 * N}):
            for causal in (False, True):
                band = Band(K, K)
                cases.append(Case(N=N, M=N, D=16, Dv=16, key=band, value=band, causal=causal))
    # Widths.
    for D in (1, 3, 7, 8, 16, 20, 32, 64, 80, 128, 200):
        cases.append(Case(N=33, M=33, D=D, Dv=D, **both))
        cases.append(Case(N=19, M=19, D=D, Dv=24, causal=True, **both))
        cases.append(Case(N=19, M=19, D=24, Dv=D, causal=True, **both))
    # N against M, both ways, with the start left to the default or given.
    sizes = ((1, 7), (7, 1), (1, 130), (130, 1), (33, 97), (97, 33), (64, 128), (129, 64))
    for N, M in (*sizes, (0, 5), (5, 0), (0, 0)):
        for causal in (False, True):
            cases.append(Case(N=N, M=M, causal=causal, **both))
            for start in (0, 3, -2, -N, M, M + 40, -200, 1000):
                cases.append(Case(N=N, M=M, causal=causal, starts=(start,), **both))
    # Every key on one side of every query: one row of the table, which may be its only one.
    for left, right in ((0, 0), (0, 2), (2, 0), (2, 2)):
        band = Band(left, right)
        for start in (-18, -17, -16, 16, 17, 18, 60):
            cases.append(Case(N=17, M=17, D=32, Dv=32, starts=(start,), key=band, value=band))
    # Terms and what lies beyond the band.
    for left, right in ((0, 0), (0, 5), (5, 0), (2, 9), (40, 1), (1, 200), (64, 64), (63, 65)):
        for beyond in ("clip", "none"):
            band = Band(left, right, beyond)  # type: ignore[arg-type]
            for causal in (False, True):
                shape = Case(H=2, N=71, M=71, D=16, Dv=16, causal=causal, per_head=left == 5)
                cases.append(replace(shape, key=band))
                cases.append(replace(shape, value=band))
                cases.append(replace(shape, key=band, value=band, tied=True))
                cases.append(replace(shape, key=band, value=Band(right, left)))
    shift = Case(N=40, M=40, key=Band(2, 6), value=Band(5, 3))
    cases += [shift, replace(shift, tied=True), replace(shift, tied=True, per_head=True, H=3)]
    # Nothing to see, nothing to do.
    cases += [
        Case(B=0, **both),
        Case(H=0, **both),
        Case(B=2, N=9, M=9, lengths=(0, 0), **both),
        Case(B=2, N=9, M=9, key_lengths=(0, 0), **both),
        Case(B=3, N=9, M=11, lengths=(9, 0, 4), key_lengths=(0, 11, 4), **both),
        Case(B=2, N=9, M=9, causal=True, starts=(-9, -20), **both),
        Case(B=2, offsets=(0, 0, 0), **both),
        Case(B=3, offsets=(0, 5, 5, 70), **both),
        Case(B=3, offsets=(0, 5, 5, 70), key_offsets=(0, 0, 66, 67), causal=True, **both),
        Case(N=70, M=20, causal=True, **both),  # the first fifty rows see nothing
    ]
    # One side packed, the other padded.
    cases += [
        Case(B=2, N=9, M=12, lengths=(9, 4), key_offsets=(0, 12, 31), **both),
        Case(B=2, N=9, key_offsets=(0, 12, 31), layout="bnhd", **both),
    ]
    # Numbers: sharp, flat, negative and rising scores.
    wide = Case(B=1, H=2, N=150, M=150, D=64, Dv=64, key=Band(16, 16), value=Band(16, 16))
    cases += [
        wide,
        replace(wide, causal=True),
        replace(wide, spread=30.0),
        replace(wide, rising=True),
        replace(wide, rising=True, causal=True),
        replace(wide, scale=1e-30),
        replace(wide, scale=-0.125),
        replace(wide, scale=4.0),
        replace(wide, layout="bnhd", gap=5, per_head=True),
        replace(wide, B=3, offsets=(0, 150, 163, 300), gap=2),
    ]
    cases += _more_corners()
    # Only pairs on one side are seen, and strips hold hidden ones of the other.
    for window, N in itertools.product(
        ((0, 0), (0, 5), (5, 0), (0, 30), (-1, 0), (0, -1)), (20, 70)
    ):
        for left, right in ((0, 0), (0, 3), (3, 0), (3, 2)):
            band = Band(left, right)
            shape = Case(N=N, M=N, D=16, Dv=16, window=window)
            cases.append(replace(shape, key=band, value=band))
            cases.append(replace(shape, value=band, dropout=Dropout(0.3, (1, 2))))
            cases.append(replace(shape, value=(band, Distances(9, 9, "clip", 4, "folded"))))
    return [replace(case, seed=900_000 + i) for i, case in enumerate(cases)] + _once_wrong()


def _once_wrong() -> list[Case]:
    """Cases with the numbers of runs in which something was wrong.

    In the first two kernels that subtracted row 0 from a table had a row whose log-sum-exp was off by
    six to twelve times the largest error of the plain formula. In the third dropout leaves a row
    nothing but keys of e^-25 of its sum, and `_head_sizes` in tolerances.py forgot what rounding
    s - lse does to them.
    """
    rows = {"B": 3, "D": 128, "Dv": 128, "gap": 1}
    few = Band(2, 2)
    return [
        Case(
            **rows, H=2, N=47, M=47, key=Band(8, 8), key_lengths=(0, 12, 47), spread=8.0, seed=2917
        ),
        Case(
            **rows,
            H=3,
            N=48,
            M=48,
            key=few,
            value=few,
            per_head=True,
            key_lengths=(14, 0, 14),
            layout="bnhd",
            seed=4369,
        ),
        random_case(2972),
        random_case(2597),  # small products beside large scores of query terms
        random_case(9599),  # and of bias terms
        random_case(9709),  # what underflows, times dropout's factor
    ]


def _more_corners() -> list[Case]:
    """Those of the terms, maps and masks beyond Shaw's."""
    cases = []
    # Outliers: what is small beside them must not be lost.
    wide = Case(H=2, N=150, M=150, D=64, Dv=64, key=Band(16, 16), value=Band(16, 16))
    for base in (wide, replace(wide, causal=True), replace(wide, tied=True, D=16, Dv=16)):
        for name, where, factor in itertools.product(
            ("key[0]", "value[0]"), ("first", "middle", "last"), (10.0, 1000.0)
        ):
            if not (base.tied and name == "value[0]"):
                cases.append(replace(base, outlier=(name, where, factor)))
    none = Band(16, 16, "none")
    cases += [
        replace(wide, key=none, value=none, outlier=("key[0]", "first", 1000.0)),
        replace(wide, N=40, M=300, outlier=("key[0]", "first", 1000.0)),
        replace(wide, N=300, M=40, outlier=("key[0]", "last", 1000.0)),
        replace(wide, key=None, query=Band(16, 16), outlier=("query[0]", "first", 1000.0)),
        replace(wide, key=None, bias=Band(16, 16), outlier=("bias[0]", "first", 1000.0)),
        replace(wide, key=None, bias=Labels(9), outlier=("bias[0]", "last", -1000.0)),
        replace(wide, key=Labels(9), outlier=("key[0]", "first", 1000.0)),
    ]
    # Every kind of term with every kind of map, alone.
    maps: list[Map] = [
        Band(3, 5),
        Band(0, 0),
        Band(4, 3, "none"),
        Band(100, 120),
        Band(2000, 1500),
        Distances(5, 5, "clip", 0, "identity"),
        Distances(20, 20, "none", 6, "random"),
        Distances(128, 128, "clip", 32, "folded"),
        Distances(7, 7, "clip", 3, "none"),
        Distances(0, 0, "clip", 1, "random"),
        Distances(2000, 2000, "clip", 1, "folded"),
        Distances(9, 9, "clip", 0, "", "own"),
        Distances(9, 9, "none", 0, "", "own"),
        Distances(2000, 1500, "clip", 0, "", "own"),
        Distances(300, 9, "none", 0, "", "own"),
        Distances(2000, 2000, "none", 0, "", "random"),
        Distances(300, 300, "clip", 280, "random", "own"),
        Distances(4, 9, "none", 0, "", "random"),
        Distances(4, 9, "clip", 4, "folded", "shared"),
        Distances(3, 3, "clip", 0, "", "far"),
        Distances(9, 9, "clip", 0, "", "rows"),
        Labels(1),
        Labels(51),
        Labels(51, 2, "random", True),
        Labels(51, 4, "random", True, False),
        Labels(51, 1, "sparse", False, True, True),
        Labels(1000, 2, "random"),
        Labels(3000, 2, "sparse"),
        Labels(9000, 4, "random", True),
        Labels(7, 1, "none"),
        Labels(7, 1, "band", False, False),
        Edges(1, 1),
        Edges(9, 5),
        Edges(9, 3, "repeated"),
        Edges(9, 1, "none"),
        Edges(9, 1, "full"),
        Edges(500, 9, "repeated"),
        Edges(4, 200),  # more edges than keys
    ]
    shape = Case(B=2, H=2, N=70, M=70, D=16, Dv=16, gap=1)
    for map, kind in itertools.product(maps, reference.KINDS):
        cases.append(replace(shape, **{kind: map}, lengths=(70, 33)))  # type: ignore[arg-type]
        if len(cases) % 2:
            packed = replace(shape, offsets=(0, 67, 70), causal=True, per_head=True)
            cases.append(replace(packed, **{kind: map}))  # type: ignore[arg-type]
        else:
            cross = replace(shape, N=9, M=130, layout="bnhd", starts=(3, -70))
            cases.append(replace(cross, **{kind: map}))  # type: ignore[arg-type]
    # Every kind at once, twice.
    full = replace(
        shape,
        key=(Band(4, 4), Labels(5)),
        query=(Distances(9, 9, "clip", 4, "folded"), Edges(3, 3)),
        bias=(Labels(6, 2), Band(8, 8, "none")),
        value=(Edges(9, 4, "repeated"), Distances(3, 3, "clip", 0, "", "random")),
        position_bias=True,
        per_head=("key", "bias"),
    )
    plane = (Distances(7, 7, "clip", 0, "", "rows"), Distances(7, 7, "clip", 0, "", "columns"))
    dropout = Dropout(0.1, (1, 2))
    cases += [
        full,
        replace(full, causal=True),
        replace(full, lengths=(70, 1), window=(20, 3), mask=Mask(), softcap=5.0, dropout=dropout),
        replace(full, offsets=(0, 0, 69), mask=Mask(), dropout=dropout),
        replace(full, N=33, M=65, key_lengths=(0, 64), softcap=1.0),
        replace(full, scale=0.0625, softcap=30.0, layout="bnhd"),
        replace(shape, key=plane, value=plane, bias=plane),
        replace(shape, key=plane, query=plane, tied=False, position_bias=True),
        replace(full, lengths=(0, 0)),
        replace(full, key_lengths=(0, 0)),
        replace(full, B=0),
        replace(full, H=0, per_head=False),
        replace(full, N=0),
        replace(full, M=0),
        replace(full, offsets=(0, 0, 0)),
        replace(full, mask=Mask("none")),
        replace(full, N=1, M=1),
    ]
    # position_bias with one key term of each map, and without any: no effect, gradient zero.
    for key in (None, Band(16, 16), Band(500, 500), Labels(9), Edges(9), maps[5], maps[11]):
        cases.append(replace(shape, key=key, position_bias=True))
        cases.append(replace(shape, key=key, position_bias=True, causal=True, value=Band(2, 2)))
    # Long tables that are looked up, over several blocks and chunks.
    for long_map in (
        Distances(2000, 1500, "clip", 0, "", "own"),
        Distances(2000, 2000, "none", 0, "", "random"),
        Labels(9000, 4),
        Labels(2000, 2, "sparse"),
        Edges(2000, 3),
    ):
        four = dict.fromkeys(reference.KINDS, long_map)
        several = Case(N=300, M=290, D=24, Dv=20, **four)  # type: ignore[arg-type]
        cases.append(replace(several, position_bias=True))
        cases.append(replace(several, causal=True, window=(150, 0), dropout=dropout, softcap=5.0))
    # Unclipped, a table of thousands of rows.
    for N, M in ((200, 200), (130, 257), (257, 65)):
        for K in (max(N, M) - 1, max(N, M), 3000):
            shaw = Case(N=N, M=M, D=8, Dv=8, key=Band(K, K), value=Band(K, K))
            cases += [shaw, replace(shaw, causal=True), replace(shaw, query=Band(K, K))]
    cases.append(Case(N=600, M=600, D=16, Dv=16, key=Band(599, 599), position_bias=True))
    cases.append(Case(N=300, M=300, D=16, Dv=16, key=Band(299, 0), query=Band(299, 0), causal=True))
    # Windows, at the borders of tiles.
    both: dict[str, Any] = {"key": Band(3, 3), "value": Band(3, 3)}
    for left, right in ((0, 0), (-1, 0), (0, -1), (1, 0), (5, 5), (63, 0), (64, 64), (65, 1)):
        for N, M in ((200, 200), (33, 130), (130, 33)):
            cases.append(Case(N=N, M=M, window=(left, right)))
            cases.append(Case(N=N, M=M, window=(left, right), causal=True, **both))
    cases.append(Case(N=70, M=70, window=(3, 3), starts=(200,), **both))  # none in reach
    cases.append(Case(N=70, M=70, window=(3, 3), starts=(-40,), **both))
    cases.append(Case(N=300, M=300, window=(10**6, 2**40), **both))
    # Masks.
    for fill in ("random", "none", "all", "rows", "blocks", "last"):
        for per_head, per_sequence in itertools.product((False, True), (False, True)):
            mask = Mask(fill, 0.5, per_head, per_sequence)
            cases.append(replace(shape, mask=mask, lengths=(70, 40), **both))
            cases.append(replace(shape, mask=mask, N=130, M=67, causal=per_head, **both))
            cases.append(replace(shape, mask=mask, offsets=(0, 40, 70), **both))
    # Heads of keys that several of queries share: one for all, two; of chunks more than one, whose
    # first item writes dk and dv; with nothing to see in some sequences; with every kind of term.
    few = replace(shape, H=4, key_heads=1)
    sharing = [few, replace(few, key_heads=2), replace(few, H=6, key_heads=3, layout="bnhd")]
    for sharers in sharing:
        cases += [
            replace(sharers, per_head=True, **both),
            replace(sharers, N=300, M=290, gap=0, causal=True, tied=True, **both),
            replace(sharers, N=290, M=300, B=1, window=(40, 5), per_head=True, **both),
            replace(sharers, B=3, lengths=(70, 0, 3), key_lengths=(40, 70, 0), **both),
            replace(sharers, B=3, offsets=(0, 5, 5, 140), dropout=dropout, **both),
            replace(sharers, B=3, offsets=(0, 9, 9, 9), key_offsets=(0, 0, 66, 67), **both),
            replace(sharers, mask=Mask("rows", 0.5, True), softcap=2.0, position_bias=True, **both),
            replace(sharers, key=Labels(9), value=Edges(7), query=Labels(9), bias=Labels(5)),
            replace(sharers, N=150, query=Band(90, 90), bias=Band(4, 4), per_head=True),
            replace(sharers, query=Distances(0, 0, "clip"), N=200, M=200, per_head=True),
        ]
    # Softcaps, from one that does nothing to one that makes every score the same.
    for softcap in (1e-3, 0.1, 1.0, 30.0, 1e6):
        cases.append(replace(shape, softcap=softcap, **both))
        cases.append(replace(shape, softcap=softcap, bias=Band(4, 4), causal=True, spread=8.0))
    cases.append(replace(shape, softcap=2.0, window=(9, 0), mask=Mask("rows"), **both))
    # Dropout, at the borders of tiles and of blocks of sixteen.
    for rate in (0.001, 1 / 256, 0.1, 0.5, 0.9, 255 / 256, 0.9999):
        given = Dropout(rate, (2**32 - 1, 7), 2**32 - 1, 2**32 - 1)
        cases.append(replace(shape, dropout=given, **both))
        cases.append(replace(shape, dropout=given, offsets=(0, 3, 70), causal=True, **both))
    for N in (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 160):
        cases.append(Case(H=2, N=N, M=N, dropout=dropout, **both))
        cases.append(Case(N=N, M=193 - N, dropout=dropout, value=Labels(3), causal=True))
    # Of sixteen chunks of queries one: its tail is there after the first chunk of keys, lost in the
    # next, which the band crosses, and asked for in those on the other side.
    one = {"B": 16, "H": 1, "N": 1024, "M": 2560, "lengths": (1024, *15 * (0,))}
    tail = Case(**one, D=4, Dv=4, key_lengths=(2560, *15 * (0,)), starts=16 * (1030,))
    cases.append(replace(tail, key=Band(700, 100)))
    return cases


def _tiled() -> list[Case]:
    """Large enough for products by AMX (attention_plan.h: tiles_pay), in both passes or in one."""
    band: dict[str, Any] = {"key": Band(16, 16), "value": Band(16, 16)}
    wide = Case(B=1, H=16, N=193, M=193, D=64, Dv=64, **band)
    cases = [replace(wide, N=N, M=M) for N, M in ((192, 192), (192, 300), (257, 193), (96, 128))]
    cases += [replace(wide, D=D, Dv=Dv) for D, Dv in ((32, 33), (33, 32), (80, 48), (100, 72))]
    cases += [replace(wide, causal=True, N=N, M=M) for N, M in ((193, 193), (200, 260), (260, 200))]
    for left, right in ((0, 0), (3, 40), (500, 2), (192, 192)):
        for beyond in ("clip", "none"):
            map = Band(left, right, beyond)
            cases.append(replace(wide, key=map, value=map, causal=beyond == "none"))
    plain = replace(wide, key=None, value=None)
    cases += [plain, replace(plain, causal=True), replace(plain, window=(70, 5))]
    cases += [replace(plain, query=map, bias=map) for map in (Band(8, 8), Labels(9), Edges(9))]
    cases += [replace(plain, value=map, key=map) for map in (Labels(400, 2), Edges(5, 3))]
    packed = replace(wide, B=3, H=6, N=0, M=0)
    cases += [
        replace(wide, B=2, H=8, lengths=(193, 50)),
        replace(wide, B=2, H=8, key_lengths=(193, 129), layout="bnhd", gap=1),
        replace(packed, offsets=(0, 200, 260, 470), causal=True),
        replace(wide, starts=(-70,)),
        replace(wide, window=(64, 65), per_head=True),
        replace(wide, mask=Mask("blocks", 0.5, False, False)),
        replace(wide, mask=Mask("rows", 0.5, True, False), softcap=5.0),
        replace(wide, dropout=Dropout(0.2, (5, 6), 7, 8)),
        replace(wide, position_bias=True, tied=True, spread=8.0),
        replace(wide, outlier=("key[0]", "first", 1000.0)),
        replace(wide, outlier=("key[0]", "last", 1000.0)),
    ]
    cases += [replace(wide, key_heads=4), replace(wide, key_heads=1, causal=True, N=300)]
    # Several chunks of queries and of keys: of forward, and of both passes.
    cases.append(replace(wide, H=2, N=1100, M=1100, D=32, Dv=32))
    cases.append(replace(wide, H=8, N=400, M=600, D=32, Dv=40))
    # What a tile of keys keeps of a band from block to block of queries: skew.h.
    keeping = Case(H=16, N=500, M=600, D=32, Dv=24, key=None, value=None, query=Band(700, 700))
    cases += [
        keeping,
        replace(keeping, query=Band(150, 250), key=Band(9, 9), causal=True, per_head=True),
        replace(keeping, query=Band(90, 300, "none"), window=(200, 120), N=600),
        replace(keeping, query=Band(700, 700), B=3, N=0, M=0, offsets=(0, 450, 450, 840)),
        # of fewer heads chunks are single blocks: here folded windows as wide as others
        replace(keeping, query=Distances(400, 400, "clip", 300, "folded"), N=700, M=130, H=3),
        replace(keeping, query=Distances(400, 400, "clip", 100, "folded"), N=900, M=300, D=8),
        replace(keeping, query=(Band(700, 700), Distances(9, 9, "none", 5, "random"))),
    ]
    # Masks that hide whole tiles, which are left out; "columns" between two that would keep lines
    # for each other.
    patches = Mask("patches", 0.5, False, False)
    patched = replace(wide, H=2, N=500, M=600, mask=patches)
    cases += [
        patched,
        replace(patched, causal=True, key=Band(150, 150, "none"), value=Band(150, 150, "none")),
        replace(patched, key=None, value=None, query=Band(700, 700), bias=Band(700, 700), D=32),
        replace(keeping, mask=patches, softcap=3.0, key=Labels(51), value=Labels(51)),
        replace(
            patched,
            key=(Distances(300, 300), Labels(900, 2)),
            query=(Labels(5), Distances(9, 9, "none", 5, "random")),
            value=(Edges(9, 4), Labels(900, 2)),
            dropout=Dropout(0.2, (5, 6), 7, 8),
        ),
        replace(
            patched,
            B=3,
            N=0,
            M=0,
            offsets=(0, 300, 310, 620),
            position_bias=True,
            mask=patches._replace(end_to_end=True),
        ),
    ]
    columns = Mask("columns", 0.5, False, False)
    cases += [
        replace(keeping, N=600, mask=columns),
        replace(keeping, N=600, mask=columns, query=Band(150, 250), key=Band(9, 9), per_head=True),
    ]
    # Edges and labels so sparse that most strips have none in a tile, over several chunks and their
    # ends: taken by rows of tables, of those met, pair by pair, and beside terms of every other kind.
    sparse = replace(wide, H=2, N=700, M=1100, D=20, Dv=24, **dict.fromkeys(reference.KINDS))
    patched_labels = (Labels(9, 1, "patches"), Labels(3000, 2, "patches"), Labels(70, 4, "patches"))
    for some in (Edges(3, 1), Edges(300, 2), *patched_labels):
        listed = replace(sparse, **dict.fromkeys(reference.KINDS, some))
        cases += [
            replace(listed, position_bias=True),
            replace(
                listed, causal=True, window=(300, 0), softcap=5.0, dropout=Dropout(0.1, (1, 2))
            ),
            replace(listed, B=3, N=0, M=0, offsets=(0, 400, 401, 1000), mask=patches),
            replace(sparse, key=some, value=some, outlier=("key[0]", "first", 1000.0)),
            replace(sparse, query=(Band(700, 700), some), key=(Labels(9), some), value=some),
        ]
    return [replace(case, seed=910_000 + i) for i, case in enumerate(cases)]


CORNERS = _corners() + _tiled()
