"""The thread pool: fork, concurrent callers, thread counts, the caller's float state."""

import contextlib
import ctypes
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from fag_kernel import _native, abi

sys.path.insert(0, str(Path(__file__).parent))
from cpu_cases import CAUSAL, LEVELS, Case, assert_same_bits


def small():
    return Case("BSND", n1=4, n2=2, d=32, b=2, s1=150, s2=130, mask_mode=CAUSAL, has_sinks=True)


def num_threads_of_process():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own():
    case = small()
    expected = case.run(threads=3)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert_same_bits(case.run(threads=3), expected)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert_same_bits(case.run(threads=3), expected)


def test_concurrent_callers_get_their_own_results():
    cases = [Case("BSND", n1=2, n2=1, d=16, s1=200 + i, s2=150, mask_mode=CAUSAL, seed=i) for i in range(6)]
    expected = [case.run(threads=1) for case in cases]
    failures = []

    def work(i):
        try:
            for _ in range(10):
                assert_same_bits(cases[i].run(threads=1 + i % 4), expected[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_no_more_threads_than_asked_for():
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from cpu_cases import Case\n"
        "case = Case('BSND', n1=8, n2=8, d=16, b=2, s1=300, s2=300)\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "case.run(threads=1); before = count()\n"
        "case.run(threads=1); assert count() == before\n"
        "case.run(threads=3); case.run(threads=2); case.run(threads=3)\n"
        "assert count() == before + 2, (before, count())\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)],
        check=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )


OPENMP_SCRIPT = """
import os, sys
import torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(3)

def use_openmp():
    x = torch.randn(600, 600)
    return (x @ x).sum()

def count():
    return len(os.listdir("/proc/self/task"))

def run_in_child(work):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def import_and_run():
    from cpu_cases import Case
    Case("BSND", n1=4, n2=2, d=32, s1=300, s2=300).run(threads=3)

use_openmp()
if sys.argv[2] == "late":  # the child loads the kernels after OpenMP's threads were lost in the fork
    run_in_child(import_and_run)
from cpu_cases import Case, assert_same_bits
case = Case("BSND", n1=4, n2=2, d=32, s1=300, s2=300)
expected = case.run(threads=1)
before = count()
for _ in range(3):
    assert_same_bits(case.run(threads=3), expected)
    use_openmp()
started = count() - before
assert started == (2 if os.environ.get("FAG_CPU_OPENMP") == "0" else 0), started
run_in_child(lambda: assert_same_bits(case.run(threads=3), expected))
assert_same_bits(case.run(threads=3), expected)
"""


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads are borrowed where /proc counts them"
)
@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("wish", ["1", "0"])
def test_openmp_threads_of_torch_are_borrowed_but_never_in_a_forked_child(when, wish):
    pytest.importorskip("torch", reason="torch brings the OpenMP threads")
    done = subprocess.run(
        [sys.executable, "-c", OPENMP_SCRIPT, str(Path(__file__).parent), when],
        env=os.environ | {"FAG_CPU_OPENMP": wish},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


# Calls too small to wake a thread for, but not to use one that spins: OpenMP's first team starts a thread.
WAIT_POLICY_SCRIPT = """
import os, sys, threading, time
import torch
sys.path.insert(0, sys.argv[1])
from cpu_cases import Case
threading.Thread(target=threading.Event().wait, daemon=True).start()  # teams are no larger than the process
case = Case("BSND", n1=1, n2=1, d=64, s1=75, s2=75)
metadata = case.metadata()
before, starts = len(os.listdir("/proc/self/task")), []
for _ in range(300):
    starts.append(time.perf_counter())
    case.forward(threads=2, metadata=metadata)
print(len(os.listdir("/proc/self/task")) - before, min(b - a for a, b in zip(starts, starts[1:])))
"""


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads are borrowed where /proc counts them"
)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="more threads than cores never spin")
@pytest.mark.parametrize(
    ("policy", "borrowed"),
    [("passive", 0), (" \tPassive\n", 0), ("active", 1), ("passively", 1)],
)
def test_the_wait_policy_is_read_as_openmp_reads_it(policy, borrowed):
    pytest.importorskip("torch", reason="torch brings the OpenMP threads")
    done = subprocess.run(
        [sys.executable, "-c", WAIT_POLICY_SCRIPT, str(Path(__file__).parent)],
        env=os.environ | {"OMP_WAIT_POLICY": policy, "OMP_THREAD_LIMIT": "2", "FAG_CPU_OPENMP": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    threads, shortest = done.stdout.split()
    if float(shortest) > 1e-3:
        pytest.skip("a millisecond passes from call to call, too long to count on spinning threads")
    assert int(threads) == borrowed


@pytest.mark.parametrize("threads", [0, -1])
def test_thread_counts_below_one_are_refused(threads):
    with pytest.raises(ValueError, match="num_threads must be at least 1"):
        small().run(threads=threads)


def test_more_threads_than_work():
    case = Case("BSND", n1=1, n2=1, d=8, s1=3, s2=3)
    assert_same_bits(case.run(threads=200), case.run(threads=1))


def test_tiny_calls_in_a_row():
    case = Case("BSND", n1=2, n2=2, d=8, s1=5, s2=7)
    expected = case.run(threads=1)
    for _ in range(300):
        assert_same_bits(case.run(threads=4), expected)


# Where glibc's fenv_t holds the control word of the vector units, and the bits in it.
FLOAT_CONTROL = {
    "x86_64": {"offset": 28, "flush": 0x8040, "upward": 0x4000},  # MXCSR: FTZ and DAZ; RC
    "aarch64": {"offset": 0, "flush": 1 << 24, "upward": 1 << 22},  # FPCR: FZ; RMode
}


@contextlib.contextmanager
def float_control(name):
    """Sets the bits of FLOAT_CONTROL in the calling thread, as frameworks do (torch.set_flush_denormal)."""
    layout, libm = FLOAT_CONTROL[platform.machine()], ctypes.CDLL(None)
    before = (ctypes.c_uint32 * 8)()
    assert libm.fegetenv(before) == 0
    changed = type(before)(*before)
    changed[layout["offset"] // 4] |= layout[name]
    assert libm.fesetenv(changed) == 0
    try:
        yield
    finally:
        assert libm.fesetenv(before) == 0


def subnormal_sum():
    return np.full(1, 2e-39, np.float32) + np.full(1, 1e-45, np.float32)


def inexact_sum():
    return np.ones(1, np.float32) + np.full(1, 1e-9, np.float32)


@pytest.mark.skipif(
    platform.machine() not in FLOAT_CONTROL or platform.libc_ver()[0] != "glibc",
    reason="knows the layout of glibc's fenv_t on x86-64 and aarch64 only",
)
@pytest.mark.parametrize(("name", "shows"), [("flush", subnormal_sum), ("upward", inexact_sum)])
def test_the_float_state_of_the_caller_does_not_matter(name, shows):
    """It belongs to the calling thread only; who computes what must not show."""
    case = Case("BSND", dtype="float32", n1=4, n2=4, d=16, b=1, s1=150, s2=150)
    case.dout *= 1e-38
    expected, usual = case.run(threads=1), shows()
    with float_control(name):
        changed = shows()
        alone, together, after = case.run(threads=1), case.run(threads=2), shows()
    assert changed != usual, "the state has an effect"
    assert after == changed, "the caller has its state back"
    assert_same_bits(alone, expected)
    assert_same_bits(together, expected)


def test_levels_are_ordered_and_capped():
    available = abi.cpu_levels()
    assert available == tuple(name for name in LEVELS if name in available)
    assert available[0] == "portable"
    by_name = _native.cpu_levels_only_by_name()
    assert set(by_name) == {"amx_bf16"} & set(available), "never run on hardware"
    assert abi.cpu_level() == [name for name in available if name not in by_name][-1]
    show = "from fag_kernel import abi; print(abi.cpu_levels(), abi.cpu_level())"
    for i, name in enumerate(available):
        done = subprocess.run(
            [sys.executable, "-c", show],
            env=os.environ | {"FAG_CPU_LEVEL": name},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == f"{available[: i + 1]} {name}"


def test_an_unknown_level_is_refused_by_name():
    with pytest.raises(ValueError, match=r"name must be one of portable.*, got 'sse9'"):
        abi.set_cpu_level("sse9")
    done = subprocess.run(
        [sys.executable, "-c", "from fag_kernel import abi; abi.cpu_level()"],
        env=os.environ | {"FAG_CPU_LEVEL": "avx1024"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "FAG_CPU_LEVEL must be one of portable" in done.stderr
    assert "got 'avx1024'" in done.stderr


def test_setting_a_level_takes_effect_and_none_goes_back():
    best = abi.cpu_level()
    abi.set_cpu_level("portable")
    assert abi.cpu_level() == "portable"
    abi.set_cpu_level(None)
    assert abi.cpu_level() == best
