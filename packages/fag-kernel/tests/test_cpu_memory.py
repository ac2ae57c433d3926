"""How much memory a backward takes: its outputs, float32 dQ of heads that threads share, and 8 MiB a thread.

Each measurement is a process of its own that reads the high-water mark of its resident set.
"""

import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20

SCRIPT = """
import ctypes, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
from cpu_cases import Case

def kib(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])

threads = int(sys.argv[3])
Case("BSND", n1=threads, n2=threads, s1=300, s2=300).run(threads=threads)  # code and stacks
case = Case("BSND", **eval(sys.argv[2]))
# A forward would leave memory behind that is used again.
out, lse = case.dout, np.ones(case.lse_shape, np.float32)
case.metadata()
getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # what was freed must not hide what is taken
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
case.backward(out, lse, threads=threads)
print(kib("VmHWM") - before)
"""

#: Shapes whose accumulators do not fit a thread, so that its kv heads are cut: dQ of long query heads; dK and
#: dV of a group of them. And the longest that a thread may do alone. With each, the rows whose dQ is shared.
SHAPES = {
    "long-rows": ({"n1": 2, "n2": 2, "s1": 16384, "s2": 512, "d": 128}, 2 * 16384),
    "long-keys-of-groups": ({"n1": 4, "n2": 2, "s1": 1536, "s2": 12288, "d": 128}, 4 * 1536),
    "many-heads": ({"n1": 6, "n2": 6, "s1": 8192, "s2": 256, "d": 128, "dtype": "float32"}, 2 * 8192),
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the high-water mark in /proc")
@pytest.mark.parametrize("shape", SHAPES)
def test_peak_is_outputs_shared_sums_and_8_mib_a_thread(shape):
    sizes, shared_tokens = SHAPES[shape]
    threads = 2
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), repr(sizes), str(threads)],
        check=True,
        capture_output=True,
        text=True,
    )
    element_bytes = 4 if sizes.get("dtype") == "float32" else 2
    rows, keys = sizes["n1"] * sizes["s1"], sizes["n2"] * sizes["s2"]
    outputs = element_bytes * sizes["d"] * (rows + 2 * keys)
    assert 1024 * int(done.stdout) <= outputs + 4 * sizes["d"] * shared_tokens + threads * 8 * MIB
