"""Public case 19: importing is light, works in any order and twice, and needs no accelerator stack."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

CALL = """
import torch, fag_torch
q = torch.randn(1, 5, 2, 8, requires_grad=True)
k, v = torch.randn(2, 1, 5, 1, 8)
fag_torch.flash_attention(q, k, v, mask_mode="causal").sum().backward()
assert q.grad.abs().max() > 0
out, lse = torch.ops.cann_ops_transformer.flash_attn(q, k, v, return_softmax_lse=True)
torch.ops.cann_ops_transformer.flash_attn_grad(q.detach(), k, v, out.detach(), out.detach(), lse.detach())
"""


def python(code, *, options=("-W", "error"), **environment):
    """Runs code in a fresh process, where every warning is an error."""
    result = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_nothing_heavy():
    loaded = python(
        """
        import sys
        import fag_torch
        print(*sorted({name.partition(".")[0] for name in sys.modules}))
        """
    ).split()
    for name in ("torch_npu", "triton", "matplotlib", "transformers", "cann_ops_transformer"):
        assert name not in loaded
    assert "fag_kernel" in loaded


def test_import_adds_little_to_torch():
    """Relative to torch itself, so that a busy machine does not matter."""
    seconds = python(
        """
        import sys, time
        a = time.process_time()
        import torch
        b = time.process_time()
        import fag_torch
        print(b - a, time.process_time() - b)
        """
    ).split()
    assert float(seconds[1]) < 0.5 * float(seconds[0])


@pytest.mark.parametrize("order", ["import fag_torch, torch", "import torch, fag_torch"])
def test_either_import_order(order):
    python(order + CALL)


def test_import_twice_reload_and_after_a_purge():
    python(
        """
        import importlib, sys
        import fag_torch
        import fag_torch
        importlib.reload(fag_torch)
        """
        + CALL.replace("\n", "\n        ")
        + """
        import gc
        before = torch.ops.cann_ops_transformer.flash_attn
        for name in [name for name in sys.modules if name.partition(".")[0] == "fag_torch"]:
            del sys.modules[name]
        del fag_torch
        gc.collect()
        """
        + CALL.replace("\n", "\n        ")
        + """
        gc.collect()
        try:
            fag_torch.flash_attn(q, k, v, mask_mode=1)
        except ValueError:
            pass
        before(q, k, v)  # who kept the operator can still call it
        """
    )


def test_spawned_child():
    python(
        """
        import multiprocessing, sys
        import fag_torch, torch
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                x = torch.randn(1, 4, 2, 8)
                out = pool.apply(fag_torch.flash_attention, (x, x, x))
            assert torch.equal(out, fag_torch.flash_attention(x, x, x))
        """,
        options=(),
    )


def test_no_file_is_written_under_home(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    python(CALL, HOME=str(home), XDG_CACHE_HOME=str(home / "cache"))
    assert list(home.iterdir()) == []


def test_without_device_autoload():
    python(CALL, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_torch_npu_that_does_not_import(tmp_path):
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object')\n")
    check = """
from fag_torch import doctor
found = doctor()["npu"]["torch_npu"]
assert found == {"found": False, "why": "torch_npu is installed but not imported"}, found
"""
    python(CALL + check, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def test_asking_for_an_npu_names_the_missing_piece():
    python(
        """
        import torch, fag_torch
        try:
            sizes = {"batch_size": 1, "max_seqlen_q": 4, "max_seqlen_kv": 4}
            fag_torch.flash_attn_metadata(4, 2, 16, **sizes, device="npu")
        except NotImplementedError as error:
            assert "torch_npu is not installed" in str(error), error
        else:
            raise AssertionError
        """
    )
