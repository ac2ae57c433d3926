"""Code of one instruction-set level must not leak into code that all levels share; failures stay failures.

The linker keeps one copy of an inline function. If a level's file emitted one that other files share, that
copy might be the one with AVX-512 instructions, and older CPUs would crash in code that looks harmless.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fag_kernel import abi

SOURCES = Path(__file__).parent.parent / "csrc" / "cpu"
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
AMX_BF16 = [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"]
X86 = {"portable": [], "avx2": AVX2, "avx512": AVX512, "avx512_bf16": AVX512_BF16, "amx_bf16": AMX_BF16}
AARCH64 = {"portable": [], "neon": [], "neon_bf16": ["-march=armv8.2-a+bf16"]}
FLAGS = {"x86_64": X86, "AMD64": X86, "aarch64": AARCH64}.get(platform.machine(), {"portable": []})
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


@pytest.mark.skipif(not SOURCES.is_dir(), reason="needs the sources of the extension")
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("optimisation", ["-O0", "-O3"])
@pytest.mark.parametrize("level", FLAGS)
def test_a_level_defines_nothing_outside_its_namespace(level, optimisation, tmp_path):
    target = tmp_path / "level.o"
    source = SOURCES / f"isa_{level}.cpp"
    subprocess.run(
        [COMPILER, "-std=c++20", optimisation, "-w", *FLAGS[level], "-c", str(source), "-o", str(target)],
        check=True,
    )
    nm = subprocess.run([COMPILER, "-print-prog-name=nm"], check=True, capture_output=True, text=True)
    listing = subprocess.run(
        [nm.stdout.strip(), "-C", "--defined-only", str(target)], check=True, capture_output=True, text=True
    )
    names = [line.split(" ", 2)[1:] for line in listing.stdout.splitlines()]
    shared = [name for kind, name in names if kind in "TDBRWVu" and f"fag::cpu::{level}::" not in name]
    assert shared == [f"fag::cpu::isa_{level}"]


@pytest.mark.skipif(FLAGS is not X86, reason="an emulator's /proc/cpuinfo is that of the machine below it")
def test_no_level_is_offered_that_the_cpu_lacks():
    """Also: what is installed is not the build that emulates AVX-512 for tests."""
    features = set(Path("/proc/cpuinfo").read_text().split())
    for level in abi.cpu_levels():
        flags = (flag.removeprefix("-m").replace("-", "_") for flag in X86[level])
        needed = {flag.replace("avx512bf16", "avx512_bf16") for flag in flags}
        assert needed <= features, level


OUT_OF_MEMORY_SCRIPT = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from cpu_cases import Case, assert_same_bits
small = Case("BSND", n1=4, n2=2, d=32, s1=300, s2=300, dtype="float32")
expected = small.run(threads=3)
# Sums of more than 64 MiB: less may fit what glibc has reserved for a thread, which counts as taken already.
large = Case("BSND", n1=1, n2=1, d=256, dv=8, s1=70000, s2=256, dtype="float32")
out, lse = large.forward(threads=1)
problem, metadata = large.problem(), large.metadata()
def virtual():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
room = large.q.nbytes + (8 << 20)  # for dq and little more; its sums would need as much again
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (virtual() + room, limits[1]))
try:
    large.backward(out, lse, threads=3)
except MemoryError as error:
    print("refused:", type(error).__name__)
finally:
    resource.setrlimit(resource.RLIMIT_AS, limits)
assert_same_bits(small.run(threads=3), expected)
print("still right")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space with setrlimit")
def test_running_out_of_memory_is_an_exception_and_leaves_the_kernels_usable():
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY_SCRIPT, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["refused: MemoryError", "still right"], done.stdout
