"""What all NPU tests share: the stand-in of the CANN runtime, clean before each test and questioned after it.

tools/npu.py starts them (tox's environment `npu`): the libraries must be on the loader's path before Python
starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "npu_runtime")]

import raw_runtime as rt  # noqa: E402 - lies in one of these folders, like the next one
from stub import Stub, load  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Leaves out what triton-ascend's interpreter says about itself, some ten thousand times."""
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning")


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
def stream() -> Iterator[int]:
    """A stream of device 0, which is current, without torch."""
    rt.use_device(0)
    handle = rt.new_stream()
    yield handle
    rt.call("aclrtDestroyStream", handle)


@pytest.fixture
def shortcut(stub: Stub) -> Iterator[None]:
    """CPU kernels stand in for the main device kernels: for problems that the interpreter takes long for."""
    stub.install_executors(shortcut=True)
    yield
    stub.install_executors()


@pytest.fixture(scope="session")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Another installation, by what build.py lets it lack: gives the environment of a process on it."""

    def make(without: Sequence[str] = (), has_custom_package: bool = True) -> dict[str, str]:
        here = Path(os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[0])
        out = tmp_path_factory.mktemp("cann")
        command = [sys.executable, str(HERE.parent / "npu_runtime" / "build.py"), "--out", str(out)]
        command += ["--objects", str(here / "objects"), "--without", *without]
        command += [] if has_custom_package else ["--no-custom-package"]
        subprocess.run(command, check=True)
        return {**os.environ, "LD_LIBRARY_PATH": str(out), "ASCEND_OPP_PATH": str(out / "opp")}

    return make
