# SPDX-License-Identifier: Apache-2.0
"""Any case of the tests, timed on every instruction set, and over the same without its terms.

    python benchmarks/bench_cases.py                          those that bench_attention.py times
    python benchmarks/bench_cases.py 17 18                    random_case(17), random_case(18)
    python benchmarks/bench_cases.py "Case(N=300, M=300)"     as a test that fails prints it

A case that is wrong is named in the tests; one that is slow is looked for here. The library is that
of `make`, called as a C program does (tests/capi.py), inputs as the tests make them: rows are not
aligned. Sides take turns in processes of their own (turns.py).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import turns
from turns import Job, Json, Worker

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]

import capi  # noqa: E402
import cases  # noqa: E402
from case_arrays import make_arrays  # noqa: E402
from timed_cases import TIMED  # noqa: E402

LIBRARY = ROOT / "build" / "release" / "libcore.so"
PLAIN = " plain"


def case_of(text: str) -> cases.Case:
    """A seed, or a case as str() writes it."""
    if text.isdigit():
        return cases.random_case(int(text))
    case = eval(text, dict(vars(cases)))
    assert isinstance(case, cases.Case), f"{text} is no Case"
    return case


def without_terms(case: cases.Case) -> cases.Case:
    none = dict.fromkeys(("key", "query", "bias", "value", "mask", "dropout", "outlier"))
    return replace(case, **none, tied=False, per_head=False, position_bias=False, softcap=0.0)


def build(side: str, asked: Json) -> Job:
    case = case_of(asked["case"])
    if side.endswith(PLAIN):
        case = without_terms(case)
    core = capi.Core(LIBRARY, side.removesuffix(PLAIN))
    core.set_threads(asked["threads"])
    arrays = make_arrays(case, core.dtype)
    forward, result, _ = capi.forward_call(core, case, arrays)
    if asked["pass"] == "fwd":
        return Job(forward)
    forward()
    backward, _, _ = capi.backward_call(core, case, arrays, result)

    def both() -> None:
        forward()
        backward()

    return Job(both)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("cases", nargs="*", help='seeds, or "Case(...)"')
    add("--worker", metavar="SIDE", help=argparse.SUPPRESS)
    add("--isa", action="append", help="as avx2; may be repeated (all that run here)")
    add("--seconds", type=float, default=2, help="about how long each case takes (2)")
    add("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.worker:
        turns.serve(build)
        return 0
    if not LIBRARY.exists():
        parser.error(f"there is no {LIBRARY}: make it by `make`")
    isas = options.isa or capi.Core(LIBRARY).build_info()["isa_available"].split()
    sides = [isa + plain for isa in isas for plain in ("", PLAIN)]
    for text in options.cases or [str(timed.case()) for timed in TIMED]:
        print(f"\n{case_of(text)}")
        for which in ("fwd", "fwdbwd"):
            asked = {"case": text, "pass": which, "threads": options.threads}
            workers = [Worker(Path(__file__), side, options.threads) for side in sides]
            rounds = turns.take_turns(workers, [asked] * len(workers), options.seconds)
            for worker in workers:
                worker.close()
            for failure in rounds.failures.values():
                print(f"  {failure}", file=sys.stderr)
            for isa in [side for side in rounds.times if not side.endswith(PLAIN)]:
                print(
                    f"  {which:7s} {isa:9s} {rounds.median(isa) * 1e3:10.3f} ms   "
                    f"over plain {rounds.ratio(isa, isa + PLAIN):6.3f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
