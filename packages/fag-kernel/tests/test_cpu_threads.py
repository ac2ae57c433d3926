"""The thread pool: fork, concurrent callers, thread counts, the caller's float state."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fag_kernel import abi

sys.path.insert(0, str(Path(__file__).parent))
from cpu_cases import CAUSAL, Case, assert_same_bits


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


def test_the_flush_to_zero_state_of_the_caller_does_not_matter():
    """Frameworks set flush-to-zero in the calling thread only; who computes what must not show."""
    torch = pytest.importorskip("torch", reason="torch is the usual way to set flush-to-zero")
    case = Case("BSND", dtype="float32", n1=4, n2=4, d=16, b=1, s1=150, s2=150)
    case.dout *= 1e-38
    expected = case.run(threads=1)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert_same_bits(case.run(threads=1), expected)
        assert_same_bits(case.run(threads=2), expected)
    finally:
        torch.set_flush_denormal(False)


def test_levels_are_ordered_and_capped():
    names = ("portable", "avx2", "avx512", "avx512_bf16")
    available = abi.cpu_levels()
    assert available == tuple(name for name in names if name in available)
    assert available[0] == "portable"
    assert abi.cpu_level() == available[-1]
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
