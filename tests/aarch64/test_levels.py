"""Which levels an aarch64 CPU gets, and what the compiler made of their micro-kernels.

Run by tools/aarch64.py, on an emulated CPU that FAG_EMULATED_CPU names.
"""

import os
import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fag_kernel import abi

pytestmark = pytest.mark.skipif(
    "FAG_EMULATED_CPU" not in os.environ, reason="tests an emulated CPU: tox run -e aarch64"
)

ALL = ("portable", "neon", "neon_bf16")
LEVELS = {"max": ALL, "cortex-a57": ALL[:2]}
MICRO_KERNELS = [
    ("neon", "DotF32", "fmla"),
    ("neon_bf16", "DotF32", "fmla"),
    ("neon_bf16", "DotBf16x2", "bfdot"),
]


def test_the_cpu_decides_about_the_levels():
    assert platform.machine() == "aarch64"
    assert abi.cpu_levels() == LEVELS[os.environ["FAG_EMULATED_CPU"]]
    assert abi.cpu_level() == abi.cpu_levels()[-1]


@pytest.mark.parametrize("cap", ALL)
def test_the_environment_caps_them(cap):
    show = "from fag_kernel import abi; print(*abi.cpu_levels())"
    done = subprocess.run(
        [sys.executable, "-c", show],
        env=os.environ | {"FAG_CPU_LEVEL": cap}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    known = LEVELS[os.environ["FAG_EMULATED_CPU"]]
    assert tuple(done.stdout.split()) == known[: ALL.index(cap) + 1]


def disassembled(level):
    """The listing of each function of a level's object file, as the build left it."""
    (built,) = Path(os.environ["FAG_OBJECTS"]).rglob(f"isa_{level}.cpp.o")
    command = ["aarch64-linux-gnu-objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(built)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.split(r"\n(?=[0-9a-f]+ <)", listing)


def innermost_loops(listing):
    """What stands between a conditional branch backwards and its target, without another such inside."""
    code = [
        (int(address, 16), name, operands)
        for address, name, operands in re.findall(r"^ *([0-9a-f]+):\t(\S+)[ \t]*(.*)$", listing, re.MULTILINE)
    ]
    index = {address: i for i, (address, _, _) in enumerate(code)}
    spans = [
        (index[int(target[1], 16)], end)
        for end, (_, name, operands) in enumerate(code)
        if name.startswith("b.") and (target := re.match("([0-9a-f]+) <", operands))
    ]
    spans = [(begin, end) for begin, end in spans if begin < end]
    for begin, end in spans:
        if not any(begin <= a and b < end for a, b in spans):
            yield [(name, operands) for _, name, operands in code[begin : end + 1]]


@pytest.mark.parametrize(("level", "dot", "product"), MICRO_KERNELS)
def test_the_micro_kernel_keeps_its_sums_in_registers(level, dot, product):
    """A step of the reduction: 24 products by element, no broadcast by a vector unit, none on the stack."""
    block = f"gemm_block<fag::cpu::{level}::{dot}, 6, 4,"
    blocks = [listing for listing in disassembled(level) if block in listing.split("\n")[0]]
    assert len(blocks) == 2, "with and without fetching ahead"
    for listing in blocks:
        (loop,) = [loop for loop in innermost_loops(listing) if any(name == product for name, _ in loop)]
        names = Counter(name for name, _ in loop)
        assert names[product] == 24
        assert all(operands.endswith("[0]") for name, operands in loop if name == product)
        assert names["ld1r"] == names["dup"] == 0
        assert not [operands for _, operands in loop if "[sp" in operands]
        assert len(loop) <= 41
