"""Hosts that differ: which route is there, which processor, who else registers operators; and `doctor`.

Each test runs its own process, since libraries and registrations are those of a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import attention
import pytest

SETUP = """
import torch, torch_npu
from stub import load
stub = load()
stub.install_executors(shortcut=True)
import fag_torch
torch.manual_seed(0)
host = [torch.randn(1, 9, n, 64, dtype=torch.float16) for n in (2, 1, 1, 2)]
q, k, v, dout = (x.to("npu") for x in host)
ops = torch.ops.cann_ops_transformer
def run(**extra):
    out, lse = ops.flash_attn(q, k, v, return_softmax_lse=True, softmax_scale=0.125, **extra)
    return ops.flash_attn_grad(q, k, v, dout, out, lse, **extra)
def used():
    names = {call.symbol for call in stub.calls()}
    stub.clear_calls()
    symbols = {"aclnn": "aclnnInnerFlashAttn", "ascend950": "rtKernelLaunch"}
    return [route for route, symbol in symbols.items() if any(name.startswith(symbol) for name in names)]
def refusal(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it was not refused")
"""


def python(code: str, environment: dict[str, str] | None = None, **variables: str) -> str:
    """Runs code in a process of its own that finds what this one finds."""
    environment = {**(environment or os.environ), **variables}
    folders = [variables.get("more_path"), os.path.dirname(attention.__file__), *sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


Variant = Callable[..., dict[str, str]]


# ---- routes ----------------------------------------------------------------------------------------------


def test_routes_in_order_and_forced() -> None:
    python(
        SETUP
        + """
run(); torch.npu.synchronize()
assert used() == ["aclnn"], "CANN's kernels come first"
run(mask_mode=3); torch.npu.synchronize()
assert used() == ["ascend950"], "CANN documents no masks"
import os
os.environ["FAG_NPU_ROUTE"] = "ascend950"
run(); torch.npu.synchronize()
assert used() == ["ascend950"]
os.environ["FAG_NPU_ROUTE"] = "aclnn"
run(mask_mode=3); torch.npu.synchronize()
assert used() == ["aclnn"], "forced, it takes what its kernels can"
sinks = torch.zeros(2).to("npu")
text = refusal(lambda: run(sinks=sinks))
assert text.startswith("flash_attn: FAG_NPU_ROUTE must name a route that takes this call, got aclnn. "
                       "Route aclnn: CANN's kernels do not read sinks."), text
torch.use_deterministic_algorithms(True)
text = refusal(run)
assert text.startswith("flash_attn_grad: FAG_NPU_ROUTE must name"), text
assert "atomics, which torch.use_deterministic_algorithms(True) forbids" in text, text
os.environ["FAG_NPU_ROUTE"] = "fastest"
assert "FAG_NPU_ROUTE must be aclnn or ascend950, got 'fastest'" in refusal(run)
del os.environ["FAG_NPU_ROUTE"]
run(); torch.npu.synchronize()
assert used() == ["aclnn", "ascend950"], "CANN's forward has no atomics"
q = q.float()
assert "it takes float16 and bfloat16, got float32" in refusal(lambda: ops.flash_attn(q, q, q))
"""
    )


def test_a_trace_places_metadata_where_the_operator_does() -> None:
    python(
        SETUP
        + """
def made():
    return ops.flash_attn_metadata(2, 1, 64, batch_size=1, max_seqlen_q=9, max_seqlen_kv=9)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
with FakeTensorMode(shape_env=ShapeEnv()):
    traced = made()
assert traced.device == made().device == torch.device("npu:0"), traced.device
"""
    )


def test_without_the_custom_package_our_kernels_run(variant: Variant) -> None:
    python(
        SETUP + 'run(); torch.npu.synchronize()\nassert used() == ["ascend950"]\n',
        variant(has_custom_package=False),
    )


def test_a_custom_package_without_the_gradient(variant: Variant) -> None:
    python(
        SETUP + 'run(); torch.npu.synchronize()\nassert used() == ["aclnn", "ascend950"]\n',
        variant(without=["aclnnInnerFlashAttnGrad"]),
    )


def test_without_any_route_every_reason_is_given(variant: Variant) -> None:
    python(
        SETUP
        + """
text = refusal(run)
assert text.startswith("flash_attn: no route can run this call on an NPU. Route aclnn: "), text
for part in ("libcust_opapi.so", "hivmc-a5", "On a CPU the same call runs."):
    assert part in text, text
""",
        variant(has_custom_package=False),
        FAG_HIVMC="",
        PATH="/usr/bin:/bin",
    )


def test_without_the_compiler_of_our_kernels() -> None:
    python(
        SETUP
        + """
run(); torch.npu.synchronize()
text = refusal(lambda: run(mask_mode=3))
assert "Route ascend950: hivmc-a5" in text, text
""",
        FAG_HIVMC="",
        PATH="/usr/bin:/bin",
    )


@pytest.mark.parametrize("soc", ["Ascend910B2", "Ascend310P3"])
def test_other_processors_are_refused_by_name(soc: str) -> None:
    python(
        SETUP
        + f"""
stub.set_soc_name({soc!r})
for call in (run, lambda: fag_torch.flash_attention(q, k, v), lambda: ops.flash_attn_metadata(
        2, 1, 64, batch_size=1, max_seqlen_q=9, max_seqlen_kv=9)):
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        assert "device must be an Ascend 950, got {soc}" in str(error), error
    else:
        raise AssertionError
assert used() == []
report = fag_torch.doctor()
assert report["route"]["npu"] is None
assert all("{soc}" in state["missing"][-1] for state in report["npu"]["routes"].values())
"""
    )


# ---- importing -------------------------------------------------------------------------------------------


def test_pc19_importing_never_loads_torch_npu() -> None:
    """public case 19, on a host that has torch_npu: it is the user who imports it, before or after."""
    python(
        """
        import sys
        import fag_torch, torch
        q = torch.randn(1, 5, 2, 8, requires_grad=True)
        fag_torch.flash_attention(q, q, q).sum().backward()
        report = fag_torch.doctor()
        assert "torch_npu" not in sys.modules
        assert report["npu"]["torch_npu"]["why"] == "torch_npu is installed but not imported"
        sizes = {"batch_size": 1, "max_seqlen_q": 5, "max_seqlen_kv": 5}
        assert fag_torch.flash_attn_metadata(2, 1, 8, **sizes).is_cpu
        import torch_npu
        x = torch.randn(1, 5, 2, 64, dtype=torch.float16).to("npu")
        from stub import load
        load().install_executors()
        fag_torch.flash_attention(x, x, x)
        torch.npu.synchronize()
        """
    )


def test_pc19_asking_for_an_npu_without_torch_npu_names_it() -> None:
    python(
        """
        import fag_torch
        sizes = {"batch_size": 1, "max_seqlen_q": 5, "max_seqlen_kv": 5}
        try:
            fag_torch.flash_attn_metadata(2, 1, 8, **sizes, device="npu")
        except NotImplementedError as error:
            assert "torch_npu is installed but not imported" in str(error)
        else:
            raise AssertionError
        """
    )


#: A stand-in for CANN's own package: it owns the namespace, and serves Meta and PrivateUse1 for its forward.
CANN_PACKAGE = """
import torch
from fag_torch.schema import CANN_SCHEMAS
library = torch.library.Library("cann_ops_transformer", "DEF")
for op, schema in CANN_SCHEMAS.items():
    library.define(op + schema)
def npu(q, *args, **kwargs):
    return q.clone(), torch.empty(7, dtype=torch.float32, device=q.device)
library.impl("flash_attn", npu, "PrivateUse1")
"""


@pytest.mark.parametrize("order", ["cann_ops_transformer, fag_torch", "fag_torch, cann_ops_transformer"])
def test_beside_the_package_of_cann(order: str, tmp_path: Path) -> None:
    """What CANN's package serves stays its own; the gradient, which it does not, and the front are ours."""
    folder = tmp_path / "cann_ops_transformer"
    folder.mkdir()
    schemas = "from fag_torch.schema import CANN_SCHEMAS\n"
    from fag_torch.schema import CANN_SCHEMAS

    (folder / "__init__.py").write_text(CANN_PACKAGE.replace(schemas, f"CANN_SCHEMAS = {CANN_SCHEMAS!r}\n"))
    python(
        f"import torch, torch_npu, {order}\n"
        + SETUP
        + """
out, lse = ops.flash_attn(q, k, v)
assert lse.shape == (7,), "CANN's forward is in charge"
right = fag_torch.flash_attention(*(x.requires_grad_() for x in (q, k, v)), return_lse=True)
right[0].backward(dout)
given = [x.detach() for x in (q, k, v, dout, *right)]
gradients = ops.flash_attn_grad(*given)
torch.npu.synchronize()
for ours, wanted in zip(gradients, (q.grad, k.grad, v.grad)):
    assert torch.equal(ours.cpu(), wanted.cpu())
keys = fag_torch.doctor()["operators"]
assert "PrivateUse1" not in keys["cann_ops_transformer::flash_attn"]["ours"], keys
assert "PrivateUse1" in keys["cann_ops_transformer::flash_attn_grad"]["ours"], keys
assert used() == ["aclnn"]  # the front's forward and both gradients
""",
        more_path=str(tmp_path),
    )


# ---- doctor ----------------------------------------------------------------------------------------------


def doctor(*arguments: str, imports: str = "torch_npu, ", **variables: str) -> dict[str, object]:
    code = f"import {imports}fag_torch.__main__ as m; m.main(['doctor', '--json', *{arguments!r}])"
    text = python(code, **variables)
    report: dict[str, object] = json.loads(text[text.index("{") :])  # torch_npu prints a warning first
    return report


def test_doctor_on_a_host_with_everything() -> None:
    report = doctor("--heads", "8/2", "--seqlen", "128", "--mask", "causal")
    npu, call = report["npu"], report["call"]
    assert npu["present"]
    assert npu["soc"] == call["target"] == "Ascend950PR_9589"
    assert report["packages"]["torch_npu"].startswith("2.13.0")
    for piece in ("torch_npu", "cann_runtime", "cann_operators", "kernel_launcher", "kernel_compiler"):
        assert npu[piece] == {"found": True, "why": None}
    assert report["route"]["npu"] == "aclnn"
    assert all(state == {"runs": True, "missing": []} for state in npu["routes"].values())
    for direction in ("forward", "backward"):
        assert call[direction]["route"] == "ascend950"
        (refusal,) = call[direction]["refusals"]
        assert (refusal["route"], refusal["kind"]) == ("aclnn", "preference")
    forced = doctor("--heads", "8/2", "--seqlen", "128", "--mask", "causal", FAG_NPU_ROUTE="aclnn")
    assert forced["call"]["backward"] == {"route": "aclnn", "refusals": []}
    assert doctor(FAG_NPU_ROUTE="ascend950")["route"]["npu"] == "ascend950"


def test_doctor_before_torch_npu_is_imported() -> None:
    report = doctor(imports="")
    assert report["npu"]["torch_npu"]["why"] == "torch_npu is installed but not imported"
    assert report["npu"]["soc"] == "Ascend950PR_9589"
    assert report["route"]["npu"] is None


def test_doctor_without_cann() -> None:
    report = doctor(imports="", LD_LIBRARY_PATH="", ASCEND_OPP_PATH="", FAG_HIVMC="", PATH="/usr/bin:/bin")
    for piece, word in (("cann_runtime", "libascendcl.so"), ("kernel_compiler", "hivmc-a5")):
        assert word in report["npu"][piece]["why"]
    assert report["npu"]["soc"] is None
