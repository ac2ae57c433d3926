"""What all NPU tests share: the stand-in of the CANN runtime, clean before each test and questioned after it.

tools/npu.py starts them (tox's environment `npu`): the libraries must be on the loader's path before Python
starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "npu_runtime")]

from build import build  # noqa: E402 - both lie in the folder above
from stub import Stub, load  # noqa: E402

#: Each task on a stream waits that long before it runs, so that a missing synchronisation shows.
LATENCY_US = 200


@pytest.fixture(autouse=True)
def stub(request: pytest.FixtureRequest) -> Iterator[Stub]:
    """The stand-in. A test ends with no misuse seen, unless it is marked `misuses_runtime`, and no leak."""
    runtime = load()
    runtime.clear_violations()
    runtime.clear_failures()
    runtime.clear_calls()
    runtime.set_latency(LATENCY_US)
    before = runtime.live()
    yield runtime
    runtime.clear_failures()
    runtime.set_soc_name("Ascend950PR_9589")
    runtime.set_device_count(2)
    runtime.set_latency(0)
    runtime.wait()
    violations, after = runtime.violations(), runtime.live()
    runtime.clear_violations()
    if request.node.get_closest_marker("misuses_runtime") is None:
        assert violations == []
    for kind in ("tensors", "executors"):
        assert after[kind] == before[kind], f"{kind} leaked"


@pytest.fixture(scope="session", autouse=True)
def _executors() -> None:
    """Operators of CANN's custom package and our device kernels run, the latter in Triton's interpreter."""
    load().install_executors()


@pytest.fixture
def shortcut(stub: Stub) -> Iterator[None]:
    """CPU kernels stand in for the main device kernels: for problems that the interpreter takes long for."""
    stub.install_executors(shortcut=True)
    yield
    stub.install_executors()


@pytest.fixture(scope="session")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Another installation: takes build()'s arguments but `out`, gives the environment of a process on it."""

    def make(**options: object) -> dict[str, str]:
        here = Path(os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[0])
        out = build(tmp_path_factory.mktemp("cann"), objects=here / "objects", **options)
        return {**os.environ, "LD_LIBRARY_PATH": str(out), "ASCEND_OPP_PATH": str(out / "opp")}

    return make
