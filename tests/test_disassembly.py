# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of the hot loops. A flag lost, a register too many or a library call in
place of the polynomial changes no result, only the speed: this sees it without a clock.

    products    nothing but fused multiply-adds on the widest registers, none of them spilled
    2^x         in vectors, without a call
    objects     no instruction that the processor might not have
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from building import make

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release" / "csrc"

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86-64 code"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump"),
]

# isa: vectors in a panel (csrc/isa/*.c), the registers
WIDTHS = {"avx2": (2, "ymm"), "avx512": (4, "zmm")}
ROWS = 6  # RPI_STRIP
MODES = ("LOAD", "ROW", "BAND")


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        """Where a jump goes."""
        found = re.match(r"([0-9a-f]+) <", self.operands) if self.name.startswith("j") else None
        return int(found[1], 16) if found else None


Function = list[Instruction]


@cache
def built() -> bool:
    make("all")
    return True


@cache
def functions(path: str) -> dict[str, Function]:
    """The functions of an object below build/release/csrc, static ones too."""
    assert built()
    command = ["objdump", "-d", "--no-show-raw-insn", "-M", "att", str(BUILD / path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, Function] = {}
    for line in listing.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            result[head[1]] = []
        elif found := re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)", line):
            result[list(result)[-1]].append(Instruction(int(found[1], 16), found[2], found[3]))
    return result


def loops(function: Function) -> list[Function]:
    """The innermost loops: from a jump's target to the jump, no other such jump between."""
    first = function[0].address
    spans = [
        (i.target, i.address)
        for i in function
        if i.target is not None and first <= i.target <= i.address
    ]
    inner = [
        (begin, end)
        for begin, end in spans
        if not any((b, e) != (begin, end) and begin <= b and e <= end for b, e in spans)
    ]
    return [[i for i in function if begin <= i.address <= end] for begin, end in inner]


def is_fma(i: Instruction) -> bool:
    return i.name.startswith(("vfmadd", "vfnmadd", "vfmsub"))


def compiled_by_gcc() -> bool:
    command = ["objdump", "-s", "-j", ".comment", str(BUILD / "isa" / "portable.o")]
    assert built()
    return "GCC" in subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("isa", WIDTHS)
def test_products_are_vector_fma_in_registers(isa: str, mode: str) -> None:
    """6 x 2 (6 x 4) sums stay in registers: no spill between the multiply-adds of a loop."""
    vectors, register = WIDTHS[isa]
    function = functions(f"isa/{isa}.o")[f"rpi_strip_NUMBERS_{ROWS}_{vectors}_{mode}"]
    framed = any(i.name == "mov" and i.operands == "%rsp,%rbp" for i in function)
    stack = re.compile(r"\(%rsp|\(%rbp" if framed else r"\(%rsp")
    hot = [loop for loop in loops(function) if any(is_fma(i) for i in loop)]
    assert hot, "no loop with a multiply-add"
    for loop in hot:
        fma = [i for i in loop if is_fma(i)]
        assert len(fma) % (ROWS * vectors) == 0
        assert all(i.name.endswith(("ps", "pd")) and register in i.operands for i in fma)
        apart = [i for i in loop if i.name in ("vmulps", "vaddps", "vmulpd", "vaddpd", "call")]
        assert not apart, f"a product apart from its sum: {apart}"
        if compiled_by_gcc():
            spilled = [i for i in loop if stack.search(i.operands)]
            assert not spilled, f"the stack inside the loop: {spilled}"


# 2^x by polynomial moves an integer to the exponent: a shift by 23, or AVX-512's own instruction.
SHIFT = re.compile(r"\$0x17,")


def is_exponent(i: Instruction, isa: str) -> bool:
    if isa == "avx512":
        return i.name == "vscalefps"
    return i.name == "vpslld" and SHIFT.search(i.operands) is not None


@pytest.mark.parametrize("name", ["weigh_strip", "differentiate_strip"])
@pytest.mark.parametrize("isa", WIDTHS)
def test_exponentials_are_vectors(isa: str, name: str) -> None:
    _, register = WIDTHS[isa]
    function = functions(f"isa/{isa}.o")[name]
    vectors = [i for loop in loops(function) for i in loop if is_exponent(i, isa)]
    assert vectors and all(register in i.operands for i in vectors)
    assert not any(i.name in ("shl", "sall", "sal") and SHIFT.search(i.operands) for i in function)
    assert not any(i.name.startswith("call") for i in function)


@pytest.mark.parametrize("isa", ["portable", *WIDTHS])
def test_no_exponential_is_a_call(isa: str) -> None:
    assert built()
    command = ["nm", "-u", str(BUILD / "isa" / f"{isa}.o")]
    called = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert not called & {"exp", "expf", "exp2", "exp2f", "pow", "powf", "fmaxf", "fmaf"}


def instructions(path: str) -> list[Instruction]:
    return [i for function in functions(path).values() for i in function]


def test_portable_code_has_no_avx() -> None:
    assert built()
    others = [str(p.relative_to(BUILD)) for p in BUILD.rglob("*.o") if p.parent.name != "isa"]
    assert len(others) >= 8
    bmi = ("andn", "bextr", "blsi", "blsr", "bzhi", "mulx", "pdep", "pext", "rorx", "sarx", "shlx")
    for path in ["isa/portable.o", "isa/dispatch.o", *others]:
        # On vectors, the names in VEX and EVEX encoding are those with v in front.
        found = [
            i
            for i in instructions(path)
            if (i.name.startswith("v") and "mm" in i.operands)
            or (i.name.startswith(bmi) and "mm" not in i.operands)  # andnps is SSE
        ]
        assert not found, f"{path}: {found[:3]}"


def test_tiles_are_those_of_one_table() -> None:
    """AVX-512's table shares its object file with AMX's, whose products alone have tiles."""
    tile = re.compile(r"tile|ldtilecfg|tdp")
    code = functions("isa/avx512.o")
    having = {name for name, function in code.items() if any(tile.match(i.name) for i in function)}
    if not having:
        pytest.skip("this compiler knows no tiles")
    assert all(name.startswith(("tiles_", "gemm_tiles")) for name in having), having
    for parts, products in ((3, 24), (1, 4)):  # six of parts for each of four tiles, or one
        found = [i for i in code[f"tiles_sum_{parts}_2_2"] if i.name == "tdpbf16ps"]
        assert len(found) in (products, 2 * products)  # clang writes two steps down


@pytest.mark.parametrize("kernel", ["gemm_sum_NATIVE_6_4", "rpi_strip_NATIVE_6_4_BAND"])
def test_words_of_bf16_are_multiplied_by_one_instruction(kernel: str) -> None:
    code = functions("isa/avx512.o")
    if kernel not in code:
        pytest.skip("this compiler knows no vdpbf16ps")
    having = {name for name, function in code.items() if any("bf16" in i.name for i in function)}
    allowed = re.compile(
        r"(gemm|rpi_strip|weigh|differentiate)_\w*NATIVE|(dots_rounded|pack_weights_\w+)_NATIVE"
        r"|tiles_round(_turned)?_native|tiles_sum_"
    )
    assert all(allowed.match(name) for name in having), having
    names = [i.name for i in code[kernel]]
    assert names.count("vdpbf16ps") in (24, 48)  # gcc makes a loop of its own of some strides
    assert not any(name.startswith("vfmadd") for name in names)


def test_avx2_code_has_no_avx512() -> None:
    beyond = re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]\b")
    found = [i for i in instructions("isa/avx2.o") if beyond.search(i.operands)]
    assert not found, found[:3]
