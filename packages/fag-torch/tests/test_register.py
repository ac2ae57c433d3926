"""What is registered, and how it lives beside CANN's own package in either import order."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import fag_torch  # noqa: F401
from fag_torch import coexist, register
from fag_torch.schema import CANN_SCHEMAS, FAG_SCHEMAS

CANN = "cann_ops_transformer"


def has(name, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def test_every_operator_serves_every_key():
    for namespace, schemas in ((CANN, CANN_SCHEMAS), ("fag", FAG_SCHEMAS)):
        for op in schemas:
            name = f"{namespace}::{op}"
            assert has(name, "Meta")
            assert has(name, "FuncTorchBatched")
            if op == "flash_attn_metadata":
                assert has(name, "CompositeExplicitAutograd")
            else:
                assert all(has(name, key) for key in ("CPU", "PrivateUse1", "Autograd"))


def test_registering_again_changes_nothing():
    before = coexist.earlier_registrations()
    rows = list(before.rows)
    assert register.register() is before
    assert before.rows == rows
    assert set(before.rows) == set(register.TABLE)


# ---- beside CANN's package
# -----------------------------------------------------------------------------------------

#: A stand-in that does what CANN's package does: owns the namespace, and serves Meta and PrivateUse1.
STAND_IN = """
import torch
library = torch.library.Library("cann_ops_transformer", {kind!r})
for op, schema in {schemas!r}.items():
    library.define(op + schema)
def meta(q, *args, **kwargs):
    return q.new_empty(q.shape), q.new_empty(3, dtype=torch.float32)
def npu(q, *args, **kwargs):
    return q.clone(), q.new_zeros(7)
if "flash_attn" in {schemas!r}:
    library.impl("flash_attn", meta, "Meta")
    library.impl("flash_attn", npu, "PrivateUse1")
"""


def stand_in(folder, ops=tuple(CANN_SCHEMAS), kind="DEF", schema=None, tail="", module="__init__"):
    """Writes a package of CANN's name that defines `ops`, with CANN's schemas or with one of its own."""
    package = folder / CANN
    package.mkdir(exist_ok=True)
    schemas = {op: schema or CANN_SCHEMAS[op] for op in ops}
    (package / f"{module}.py").write_text(STAND_IN.format(kind=kind, schemas=schemas) + tail)
    return folder


CALLS = """
q = torch.randn(1, 5, 2, 8)
out, lse = torch.ops.cann_ops_transformer.flash_attn(q, q, q, return_softmax_lse=True)
assert lse.shape == (1, 2, 5), lse.shape
grads = torch.ops.cann_ops_transformer.flash_attn_grad(q, q, q, out, out, lse)
sizes = {"batch_size": 1, "max_seqlen_q": 5, "max_seqlen_kv": 5}
words = torch.ops.cann_ops_transformer.flash_attn_metadata(2, 2, 8, **sizes)
assert torch.equal(fag_torch.flash_attn(q, q, q, metadata=words)[0], out)
leaf = q.clone().requires_grad_()
fag_torch.flash_attention(leaf, q, q).sum().backward()
"""
THEIRS = """
m = q.to("meta")
assert torch.ops.cann_ops_transformer.flash_attn(m, m, m)[1].shape == (3,), "CANN's Meta is in charge"
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
assert torch.ops.cann_ops_transformer.flash_attn.default.redispatch(keys, q, q, q)[1].shape == (7,)
"""
OURS = """
m = q.to("meta")
assert torch.ops.cann_ops_transformer.flash_attn(m, m, m)[1].shape == (1,), "our Meta is in charge"
"""


def python(folder, code, options=("-W", "error")):
    result = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Overriding" not in result.stderr
    return result.stdout


@pytest.mark.parametrize("kind", ["DEF", "FRAGMENT"])
@pytest.mark.parametrize("first", ["fag_torch", CANN])
def test_cann_package_in_either_order(tmp_path, first, kind):
    second = CANN if first == "fag_torch" else "fag_torch"
    python(
        stand_in(tmp_path, kind=kind),
        f"import torch, {first}\nimport {second}\nimport fag_torch" + CALLS + THEIRS,
    )


@pytest.mark.parametrize("first", ["fag_torch", CANN])
@pytest.mark.parametrize("ops", [("flash_attn",), ("flash_attn_grad", "flash_attn_metadata")])
def test_package_that_defines_some_of_the_operators(tmp_path, first, ops):
    second = CANN if first == "fag_torch" else "fag_torch"
    checks = THEIRS if "flash_attn" in ops else OURS
    python(
        stand_in(tmp_path, ops), f"import torch, {first}\nimport {second}\nimport fag_torch" + CALLS + checks
    )


def test_operators_held_from_before_keep_working(tmp_path):
    code = """
    import torch, fag_torch
    held = torch.ops.cann_ops_transformer.flash_attn
    overload = held.default
    q = torch.randn(1, 5, 2, 8)
    compiled = torch.compile(lambda q: fag_torch.flash_attn(q, q, q)[0], backend="aot_eager", fullgraph=True)
    want = compiled(q)
    import cann_ops_transformer
    for call in (held, overload):
        assert torch.equal(call(q, q, q, None, None, None, None, None, None, None, 1.0)[0], want)
    assert torch.equal(compiled(q), want)
    """
    python(stand_in(tmp_path), code, options=())


def test_module_that_defines_its_operators_late(tmp_path):
    """A submodule is imported long after the package: the operator was ours, and then is CANN's."""
    folder = stand_in(tmp_path, ())
    stand_in(tmp_path, ("flash_attn",), "FRAGMENT", module="late")
    python(
        folder,
        "import torch, fag_torch, cann_ops_transformer"
        + CALLS
        + OURS
        + "from cann_ops_transformer import late\n"
        + CALLS
        + THEIRS
        + "import inspect, cann_ops_transformer\n"
        + "assert 'library' in inspect.getsource(late)\n"
        + "for loader in (late.__loader__, late.__spec__.loader):\n"
        + "    assert type(loader).__name__ == 'SourceFileLoader'\n",
    )


def test_package_whose_import_fails(tmp_path):
    folder = stand_in(
        tmp_path,
        (),
        "FRAGMENT",
        tail="\nraise ImportError('libascendcl.so: cannot open shared object file')\n",
    )
    code = """
import torch, fag_torch
for _ in range(2):
    try:
        import cann_ops_transformer
    except ImportError as error:
        assert "libascendcl" in str(error)
    else:
        raise AssertionError
"""
    python(folder, code + CALLS + OURS)


@pytest.mark.parametrize("first", ["fag_torch", CANN])
def test_operator_with_other_arguments_is_not_served(tmp_path, first):
    """A future CANN may change a schema: ours must not run with arguments in the wrong places."""
    second = CANN if first == "fag_torch" else "fag_torch"
    folder = stand_in(tmp_path, ("flash_attn_grad",), schema="(Tensor k, Tensor q) -> Tensor")
    code = (
        f"import torch, {first}\nimport {second}\nimport fag_torch"
        + """
report = fag_torch.doctor()["operators"]["cann_ops_transformer::flash_attn_grad"]
assert report["ours"] == [] and "other arguments" in report["arguments"], report
q = torch.randn(1, 5, 2, 8)
try:
    torch.ops.cann_ops_transformer.flash_attn_grad(q, q)
except NotImplementedError as error:
    assert "CPU" in str(error)
else:
    raise AssertionError
fag_torch.flash_attn(q, q, q)
leaf = q.clone().requires_grad_()
fag_torch.flash_attention(leaf, q, q).sum().backward()
"""
    )
    python(folder, code)


@pytest.mark.parametrize("first", ["fag_torch", CANN])
def test_package_that_serves_the_cpu(tmp_path, first):
    """What its operator does on the CPU is what our function returns."""
    second = CANN if first == "fag_torch" else "fag_torch"
    tail = """
def cpu(q, *args, **kwargs):
    return q.clone(), q.new_zeros(7)
library.impl("flash_attn", cpu, "CPU")
"""
    code = f"""
import torch, {first}
import {second}
import fag_torch
q = torch.randn(1, 5, 2, 8)
for call in (fag_torch.flash_attn, torch.ops.cann_ops_transformer.flash_attn):
    out, lse = call(q, q, q)
    assert torch.equal(out, q) and lse.shape == (7,)
"""
    python(stand_in(tmp_path, tail=tail), code)


# ---- NPU tensors
# ------------------------------------------------------------------------------------------------------


def on_npu(op, *args, **kwargs):
    """Runs the implementation for PrivateUse1 without a device of that kind."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    return op.default.redispatch(keys, *args, **kwargs)


def test_npu_routes_say_what_is_missing(make_call):
    call = make_call()
    out, lse = torch.ops.cann_ops_transformer.flash_attn(*call.qkv, return_softmax_lse=True)
    tensors, scalars = call.internal()
    for name, run in {
        "flash_attn": lambda: on_npu(torch.ops.cann_ops_transformer.flash_attn, *call.qkv),
        "flash_attn_grad": lambda: on_npu(
            torch.ops.cann_ops_transformer.flash_attn_grad, *call.qkv, out, out, lse
        ),
        "flash_attention": lambda: on_npu(torch.ops.fag.attention_forward, *tensors, **scalars),
    }.items():
        with pytest.raises(RuntimeError, match=f"{name}: no route can run this call on an NPU") as caught:
            run()
        text = str(caught.value)
        assert "\n" not in text
        for part in ("Route aclnn: ", "Route ascend950: ", "torch_npu is not installed", "CANN runtime",
                     "libcust_opapi.so", "hivmc-a5"):  # fmt: skip
            assert part in text
