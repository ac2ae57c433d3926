"""Host time of a call on an NPU, beyond what the runtime takes.

    python tools/npu.py --run benchmarks/npu_overhead.py          in tox's environment npu

The genuine torch_npu on the stand-in for CANN's runtime. Counted is the time of a call, minus the time that
threads spent inside the stand-in's functions meanwhile; so torch's dispatcher, torch_npu's allocator and our
own code count, and the device does not. The tasks of the device run afterwards, so that the stand-in's
executor (Python) does not take part in the measurement.

Calls come in bursts. Printed are the median of all calls, which the limit is for, and that of the quickest
burst: on a machine with other work the two differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "npu_runtime"))

import torch  # noqa: E402
import torch_npu  # noqa: E402, F401
from stub import Stub, load  # noqa: E402

import fag_torch  # noqa: E402, F401

#: Microseconds that a backward call may cost.
LIMIT_US = 120.0
_SIZES = {"b": 1, "s": 16, "n1": 2, "n2": 1, "d": 64}
_ASIDE_US = 100_000
_BURST = 20


def measure(stub: Stub, call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Host time of a call in microseconds, without the stand-in's own: see the head of this file."""
    for _ in range(3):
        call()
    torch.npu.synchronize()
    bursts: list[list[float]] = []
    while len(bursts) * _BURST < repeats:
        times: list[float] = []
        stub.set_latency(_ASIDE_US)
        for _ in range(_BURST):
            inside, start = stub.host_seconds(), time.perf_counter()
            call()
            total = time.perf_counter() - start
            times.append(total - (stub.host_seconds() - inside))
        stub.set_latency(0)
        stub.wait()
        bursts.append(times)
    return {
        "median_us": 1e6 * statistics.median(time for times in bursts for time in times),
        "best_burst_us": 1e6 * min(map(statistics.median, bursts)),
    }


def calls() -> dict[str, Callable[[], object]]:
    """What is measured, on one small problem."""
    z = _SIZES
    q, dout = (torch.randn(z["b"], z["s"], z["n1"], z["d"]).half().to("npu") for _ in range(2))
    k, v = (torch.randn(z["b"], z["s"], z["n2"], z["d"]).half().to("npu") for _ in range(2))
    ops = torch.ops.cann_ops_transformer
    sizes = {"batch_size": z["b"], "max_seqlen_q": z["s"], "max_seqlen_kv": z["s"], "is_grad_enabled": True}
    metadata = ops.flash_attn_metadata(z["n1"], z["n2"], z["d"], **sizes)
    out, lse = ops.flash_attn(q, k, v, return_softmax_lse=True, softmax_scale=z["d"] ** -0.5)
    return {
        "flash_attn_grad": lambda: ops.flash_attn_grad(q, k, v, dout, out, lse),
        "flash_attn_grad, metadata given": lambda: ops.flash_attn_grad(
            q, k, v, dout, out, lse, metadata=metadata
        ),
        "flash_attn": lambda: ops.flash_attn(q, k, v, return_softmax_lse=True),
        "flash_attn_metadata": lambda: ops.flash_attn_metadata(z["n1"], z["n2"], z["d"], **sizes),
    }


def main() -> int:
    """Prints the table; 1 if a backward call costs more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200, help="calls of each kind; default 200")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args()
    stub = load()
    stub.install_executors(shortcut=True)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for route in ("aclnn", "ascend950"):
        os.environ["FAG_NPU_ROUTE"] = route
        results[route] = {name: measure(stub, call, options.repeats) for name, call in calls().items()}
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        for route, measured in results.items():
            for name, found in measured.items():
                print(
                    f"{route:<10} {name:<34} {found['median_us']:7.1f} us, "
                    f"quickest burst {found['best_burst_us']:6.1f} us"
                )
    slow = [
        f"{name} by {route}: {found['median_us']:.1f} us"
        for route, measured in results.items()
        for name, found in measured.items()
        if "grad" in name and found["median_us"] > LIMIT_US
    ]
    if slow:
        print(f"over the limit of {LIMIT_US:.0f} us: {'; '.join(slow)}", file=sys.stderr)
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
