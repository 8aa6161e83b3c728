# SPDX-License-Identifier: Apache-2.0
"""What is right for a case, and how far one may be from it: by derivation, not by choice.

oracle(case) has the results of relpos.reference with the error that is to be expected of each
number; compare() says in words what is further away than it may be.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from case_arrays import make_arrays
from cases import Case
from guarded_arrays import Arrays
from relpos import reference


@dataclass
class Oracle:
    """Results and gradients by name: "out", "lse", and those of reference.batched_backward.

    exact: float64 reference. plain: the same formulas in float32. size and noise: the error of an
    element in units of roundoff, if every term adds up in the worst way, and if signs are random.
    """

    exact: dict[str, np.ndarray]
    plain: dict[str, np.ndarray]
    size: dict[str, np.ndarray]
    noise: dict[str, np.ndarray]
    rows: int  # queries of all heads
    terms: int  # the most numbers added up anywhere
    kept: float  # what dropout multiplies all that it keeps by


@functools.lru_cache(maxsize=128)
def oracle(case: Case, unit: float = 0.0) -> Oracle:
    return oracle_of(case, make_arrays(case), unit)


def oracle_of(case: Case, arrays: Arrays, unit: float = 0.0) -> Oracle:
    """The oracle of arrays that a test has changed. Of tied tables: one gradient, "key[0]".

    unit: sizes and noise are those of errors of this size: they grow faster than it, where scores are
    off by enough. 0: to first order."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are tested too
        exact = _run_reference(case, arrays, np.float64)
        plain = _run_reference(case, arrays, np.float32)
        size, noise = (_sizes(case, arrays, worst, unit) for worst in (True, False))
    spans = case.spans
    queries, keys = (sum(getattr(s, side) for s in spans) for side in ("queries", "keys"))
    terms = case.D + case.Dv + (queries + keys) * case.H + 32
    kept = 1.0 if case.dropout is None else 1 / (1 - case.dropout.rate)
    return Oracle(exact, plain, size, noise, queries * case.H, terms, kept)


def merge_tied(case: Case, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if case.tied:
        results["key[0]"] = results["key[0]"] + results.pop("value[0]")
    return results


def _run_reference(case: Case, arrays: Arrays, dtype: Any) -> dict[str, np.ndarray]:
    q, k, v, dout = arrays.views()
    batch = case.batch(arrays, dtype)
    out, lse = reference.batched_forward(batch, q, k, v)
    gradients = reference.batched_backward(batch, q, k, v, dout)
    return {"out": out, "lse": lse, **merge_tied(case, gradients)}


def _sizes(case: Case, arrays: Arrays, worst: bool, unit: float) -> dict[str, np.ndarray]:
    """Error per unit roundoff of every result and gradient, to first order or of this unit.

    That of a sequence's head is _head_sizes'; those of tables add up over heads and sequences.
    """
    q, k, v, dout = arrays.views()
    batch = case.batch(arrays)
    power = 1 if worst else 2
    names = [name for name, _, _ in case.terms]
    total = {"q": np.zeros(q.shape), "k": np.zeros(k.shape), "v": np.zeros(v.shape)}
    total |= {"out": np.zeros((*q.shape[:-1], case.Dv))}
    total["lse"] = np.zeros(reference.row_numbers_shape(q, case.layout))
    total |= {name: np.zeros(arrays.tables[name].view.shape) for name in names}
    if arrays.position_bias is not None:
        total["position_bias"] = np.zeros(arrays.position_bias.view.shape)
    for span in batch.spans:
        for h in range(case.H):
            query = (case.layout, span.batch, h, span.query_row, span.queries)
            key = (case.layout, span.batch, case.key_head(h), span.key_row, span.keys)
            sides = {"q": query, "out": query, "k": key, "v": key}
            head = _head_sizes(
                *(np.asarray(reference.head_rows(x, *query), np.float64) for x in (q, dout)),
                *(np.asarray(reference.head_rows(x, *key), np.float64) for x in (k, v)),
                reference.head_arguments(batch, span, h),
                worst,
                unit,
            )
            for name, x in head.items():
                if name in sides:
                    reference.head_rows(total[name], *sides[name])[...] += x**power
                elif name == "lse":
                    row = total["lse"][h] if q.ndim == 3 else total["lse"][span.batch, h]
                    row[span.query_row : span.query_row + span.queries] = x**power
                elif name == "position_bias":
                    total[name][h] += x**power
                else:
                    shared = total[name].ndim == 2
                    (total[name] if shared else total[name][h])[...] += x**power
    return {name: x ** (1 / power) for name, x in merge_tied(case, total).items()}


def _head_sizes(
    q: np.ndarray,
    dz: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    given: dict[str, Any],
    worst: bool,
    unit: float,
) -> dict[str, np.ndarray]:
    """Error per unit roundoff of equations (1) to (11) of relpos.reference, to first order.

    A product hands the errors of its factors on, and rounds each partial sum. Errors add up by
    absolute values (worst) or by squares, as independent errors do. The partial sums of n terms,
    added one after the other, then come to u sqrt(n / 6) times the root of the sum of squares:
    NumPy, which adds in parallel lanes, is better off than any tile kernel.

    A score s_ij is off by E_ij, which changes p_ij by p_ij E_ij, and s_ij - lse_i is rounded at its
    size: 25 units where dropout leaves a row nothing but what is e^-25 of its sum. The error R_i of
    the row's lse all p_ij share: that does not average out over the keys, and is carried on its own.
    So is the error of dz_i . z_i. The softcap's slope 1 - t^2 is off by what changes t.

    With a unit other than 0 a score may be off by much: p_ij changes by p_ij (exp(unit E_ij) - 1), t
    by the steepest slope that is so near, and of ds each factor what the others may have become.
    (The errors of two other factors are not multiplied: that would only allow more.)
    """
    power = 1 if worst else 2
    terms, seen, keep = given["terms"], given["visible"], given["keep"]
    u, softcap = given["position_bias"], given["softcap"]
    scale = reference.default_scale(q.shape[1]) if given["scale"] is None else given["scale"]
    names = reference.term_names(term.kind for term in terms)
    bias = np.zeros(q.shape[1]) if u is None else np.asarray(u, np.float64)
    terms = [t._replace(table=np.asarray(t.table, np.float64)) for t in terms]
    gather, collect = reference.take_relation, reference.sum_relation

    def add(*sizes: Any) -> np.ndarray:
        return sum(np.abs(x) ** power for x in sizes) ** (1 / power)  # type: ignore[return-value]

    def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (np.abs(x) ** power @ np.abs(y) ** power) ** (1 / power)

    def partial_sums(n: Any) -> Any:
        return 1 if worst else np.sqrt(1 + n / 6)

    def in_sequence(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return product(x, y) * partial_sums(x.shape[1])

    def shared(error: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Of x . y, where the elements of each row of x are off by the same error."""
        return error * (product(x, y) if worst else np.abs(x @ y))

    def gathered(rows: np.ndarray, index: np.ndarray) -> np.ndarray:
        return gather(rows**power, index) ** (1 / power)

    def collected(x: np.ndarray, error: np.ndarray, index: np.ndarray, T: int) -> np.ndarray:
        """Of sum_relation(x), the elements of x being off by error, added in sequence."""
        own = collect(np.abs(error) ** power, index, T)
        partial = collect(np.abs(x) ** power, index, T)
        return (own + partial * partial_sums(collect(np.ones_like(x), index, T)) ** power) ** (
            1 / power
        )

    def raised(error: np.ndarray) -> np.ndarray:
        """Of exp(x), relative to it, where x is off by error."""
        return np.expm1(np.minimum(unit * error, 64)) / unit if unit else error

    # (1): E, the error of a score.
    parts, plus = in_sequence(q, k.T), np.zeros((len(q), len(k)))
    for kind, table, index in terms:
        if kind == "key":
            parts = add(parts, gathered(in_sequence(add(q, bias), table.T), index))
        elif kind == "query":
            turned = index.swapaxes(-1, -2)
            parts = add(parts, gathered(in_sequence(k, table.T), turned).T)
        elif kind == "bias":
            rows = np.broadcast_to(np.abs(table[:, 0]), (len(q), len(table)))
            plus = add(plus, gathered(rows, index))
    scores = {"scale": scale, "visible": np.ones_like(seen), "position_bias": u}
    s, _ = reference.attention_scores(q, k, terms, **scores)
    E = add(parts * scale, plus) if worst else add(s, parts * scale, plus)
    # (2): t = tanh(s / softcap), each of quotient, tanh and product rounded.
    slope, slope_error = np.ones_like(s), np.zeros_like(s)
    if softcap:
        t = np.tanh(s / softcap)
        slope = 1 - t**2
        near = np.maximum(np.abs(s) - unit * E, 0)
        far = np.tanh((np.abs(s) + unit * E) / softcap)
        E = add((1 - np.tanh(near / softcap) ** 2) * E, slope * s, 2 * softcap * t)
        slope_error = add(slope, 2 * far * E / softcap)
    E = raised(E)
    # (3): R, the error of lse, and S, that of p_ij but for R.
    s, lse = reference.attention_scores(q, k, terms, **{**scores, "visible": seen}, softcap=softcap)
    p = reference.attention_probabilities(s, lse)
    lse = np.where(np.isneginf(lse), 0, lse)
    total = in_sequence(p, np.ones((len(k), 1)))
    R = add(np.sum(p * E, axis=1)[:, None], lse[:, None], total)
    sizes = {"lse": add(1, R)[:, 0]}
    R = raised(R)
    S = add(1, np.where(seen, s - lse[:, None], 0), np.where(seen, E, 0))  # exp, its argument
    # (4) and (5).
    kept = p if keep is None else p * keep
    z, z_size = kept @ v, add(product(kept * S, v), in_sequence(kept, v))
    dp, dp_size = dz @ v.T, in_sequence(dz, v.T)
    dv = kept * add(S, R)
    sizes["v"] = add(product(dv.T, dz), in_sequence(kept.T, dz))
    for name, (kind, table, index) in zip(names, terms, strict=True):
        if kind == "value":
            T = len(table)
            P = collect(kept, index, T)
            P_size = np.maximum(collect(kept * S, index, T), collected(kept, kept * S, index, T))
            z, z_size = z + P @ table, add(z_size, product(P_size, table), in_sequence(P, table))
            dp = dp + gather(dz @ table.T, index)
            dp_size = add(dp_size, gathered(in_sequence(dz, table.T), index))
            sizes[name] = add(product(add(P_size, P * R).T, dz), in_sequence(P.T, dz))
    z_size = add(z_size, z, R * z)
    sizes["out"] = z_size
    # (6) and (7). D: the error of dz . z, and what it leaves in ds, but for p.
    D = add(*np.moveaxis(dz * z_size, 1, 0), np.zeros(len(q)))[:, None]
    delta = np.sum(dz * z, axis=1)[:, None]
    if keep is not None:
        dp, dp_size = dp * keep, dp_size * keep
    dp = np.abs(dp) + np.abs(delta) if worst else dp - delta
    with_delta, ds = p * slope, p * dp * slope
    most_p, most_slope = p * (1 + unit * add(S, R)), slope + unit * slope_error
    most_dp = np.abs(dp) + unit * dp_size
    ds_size = add(
        p * S * most_dp * most_slope, most_p * most_slope * dp_size, most_p * most_dp * slope_error
    )
    for name, (kind, table, index) in zip(names, terms, strict=True):
        if kind == "bias":  # (10), not scaled
            T = len(table)
            dc, ones = collect(ds, index, T), np.ones((1, len(q)))
            dc_size = add(
                collected(ds, ds_size, index, T), dc * R, collect(with_delta, index, T) * D
            )
            sizes[name] = add(product(ones, dc_size), in_sequence(ones, dc)).T
    ds, ds_size, with_delta = (abs(scale) * x for x in (ds, ds_size, with_delta))
    # (8) to (10).
    dq = add(product(ds_size, k), in_sequence(ds, k), shared(R, ds, k), shared(D, with_delta, k))
    all_sizes = add(ds_size, ds * R, with_delta * D)
    dk = add(product(all_sizes.T, q), in_sequence(ds.T, q))
    du, ones = np.zeros((1, q.shape[1])), np.ones((1, len(q)))
    for name, (kind, table, index) in zip(names, terms, strict=True):
        T = len(table)
        if kind == "key":
            dA = collect(ds, index, T)
            dA_size = add(
                collected(ds, ds_size, index, T), dA * R, collect(with_delta, index, T) * D
            )
            row = add(product(dA_size, table), in_sequence(dA, table))
            dq = add(dq, row)
            du = add(du, product(ones, row), product(in_sequence(ones, dA), table))
            biased = add(q, bias)
            sizes[name] = add(product(dA_size.T, biased), in_sequence(dA.T, biased))
        elif kind == "query":
            turned = index.swapaxes(-1, -2)
            dB = collect(ds.T, turned, T)
            dB_size = collected(ds.T, all_sizes.T, turned, T)
            dk = add(dk, product(dB_size, table), in_sequence(dB, table))
            sizes[name] = add(product(dB_size.T, k), in_sequence(dB.T, k))
    sizes |= {"q": dq, "k": dk}
    if u is not None:
        sizes["position_bias"] = du[0]
    return sizes


BF16_ROUNDOFF = 2.0**-8  # bfloat16's unit roundoff


def compare(name: str, got: np.ndarray, truth: Oracle, rounded: bool = False) -> str | None:
    """None, or in words how `got` is too far from the reference. Derived, not chosen:

    float64   n u size, the first-order bound of any order of summing n terms with unit roundoff u.
    float32   2 times (results) or 3 times (gradients) the error of the plain float32 formula, largest
              against largest, plus a floor; and root mean square against the same. Errors count in
              units of the noise that is to be expected of that element: in rows without large
              scores, or beside a large row of a table, a small error is not hidden by theirs.

    The floor is u noise for the mean square and 6 u noise for the largest: a run compares some
    1e8 numbers, and the largest of that many normal errors is 5.7 deviations out. Where few independent
    roundings make the plain error (few rows, or a softmax with one winner) it may be small by luck,
    and says little about what is possible: there the mean square is not compared, and the floor is
    sqrt(n) u size, what n roundings of random sign amount to (Higham & Mary 2019). NaN and
    infinities must stand in the same places. What underflows, times numbers as large as any that
    are multiplied here, may be lost.

    rounded   the same and what it makes of products that both their factors are rounded to bfloat16
              beforehand: 2 u size, and 0.6 u noise as root mean square, u being its unit. (Rounding is
              off by 0.41 of it as root mean square where numbers lie evenly between powers of two.)
              To first order that is too little where scores are off by 1: `truth` may be of unit 2 u.
    """
    exact, plain, size = truth.exact[name], truth.plain[name], truth.size[name]
    if got.shape != exact.shape:
        return f"{name}: shape {got.shape}, expected {exact.shape}"
    with np.errstate(invalid="ignore"):
        odd = ~np.isfinite(exact)
        wrong = odd & ~((got == exact) | (np.isnan(got) & np.isnan(exact)))
        error = np.where(odd, 0, np.abs(got - exact))
        plain_error = np.where(odd | ~np.isfinite(plain), 0, np.abs(plain - exact))
        finite_size = np.where(np.isfinite(size), size, 0)
    unit = float(np.finfo(got.dtype).eps) / 2
    tiny = float(np.finfo(got.dtype).tiny) * 1000 * max(1.0, float(finite_size.max(initial=0)))
    tiny *= truth.kept
    mean_square, square_bound = 0.0, np.inf
    if got.dtype == np.float64:
        bound = truth.terms * unit * finite_size + tiny
    else:
        factor = 2 if name in ("out", "lse") else 3
        noise = np.where(np.isfinite(truth.noise[name]), truth.noise[name], 0)
        expected = noise + tiny / unit
        relative_plain = plain_error / expected
        stable = truth.rows >= 64 and _independent(relative_plain, name) >= 32
        floor = 6 * noise if stable else np.sqrt(truth.terms) * finite_size
        bound = factor * relative_plain.max(initial=0) * noise + unit * floor + tiny
        if stable:
            square_bound = factor * np.sqrt(np.mean(relative_plain**2)) + unit
            mean_square = np.sqrt(np.mean((error / expected) ** 2))
        if rounded:
            bound = bound + 2 * BF16_ROUNDOFF * finite_size
            square_bound += 0.6 * BF16_ROUNDOFF
    if not np.any(wrong | ~(error <= bound)) and mean_square <= square_bound:
        return None
    excess = np.where(wrong | np.isnan(error), np.inf, error / np.maximum(bound, 1e-300))
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(excess)), got.shape))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        relative = np.nanmax(np.where(exact == 0, 0, error / np.abs(exact)), initial=0)
        l2 = np.sqrt(np.nansum(error**2) / max(np.nansum(np.where(odd, 0, exact) ** 2), 1e-300))
    return (
        f"{name}: max abs {np.nanmax(error):.3g}, max rel {relative:.3g}, L2 rel {l2:.3g}, "
        f"rms {mean_square:.3g} (bound {square_bound:.3g}); at {index} got {got[index]!r}, "
        f"expected {exact[index]!r}, bound {np.broadcast_to(bound, got.shape)[index]:.3g}"
    )


def _independent(error: np.ndarray, name: str) -> float:
    """How many independent errors make up the mean square: the participation ratio of the rows.

    Those of one row share the errors of its probabilities, and count as one.
    """
    squares = error**2 if name == "lse" else np.sum(error**2, axis=-1)
    fourth = float(np.sum(squares**2))
    return float(np.sum(squares)) ** 2 / fourth if fourth > 0 else 0.0
