"""Public case 19: importing and calling on a machine without the accelerator stack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL_STEP = """
import torch, fag_torch
q = torch.randn(1, 5, 2, 8, dtype=torch.bfloat16, requires_grad=True)
out = fag_torch.flash_attention(q, q, q)
out.float().pow(2).sum().backward()
assert torch.count_nonzero(q.grad) > 0
"""


def python(
    code: str, tmp_path: Path, *, path: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, with a HOME of its own."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FAG_", "TORCH_"))}
    variables = {**inherited, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), **environment}
    if path is not None:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), inherited.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=180, cwd=tmp_path
    )


def assert_fine(done: subprocess.CompletedProcess[str], warnings: int = 0) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Warning") <= warnings, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        SMALL_STEP,
        "import fag_torch\n" + SMALL_STEP,
        "import fag_metadata, fag_kernel, fag_torch\n" + SMALL_STEP,
        "import importlib, fag_torch\nimportlib.reload(fag_torch)\nimport fag_torch\n" + SMALL_STEP,
    ],
    ids=["torch-first", "ours-first", "all-three-first", "twice-and-reload"],
)
def test_pc19_imports_in_any_order(code: str, tmp_path: Path) -> None:
    assert_fine(python(code, tmp_path))


def test_pc19_works_with_a_torch_npu_that_cannot_load(tmp_path: Path) -> None:
    stub = tmp_path / "site" / "torch_npu"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')\n")
    done = python(SMALL_STEP, tmp_path, path=stub.parent, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert_fine(done, warnings=1)


def test_pc19_works_in_a_spawned_child(tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    body = "\n".join("    " + line for line in SMALL_STEP.strip().splitlines())
    script.write_text(
        f"import multiprocessing\ndef work():\n{body}\n"
        "if __name__ == '__main__':\n"
        "    import fag_torch\n    work()\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    child.start(); child.join(120)\n    assert child.exitcode == 0, child.exitcode\n"
    )
    assert_fine(python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", tmp_path))


def test_works_in_a_forked_child(tmp_path: Path) -> None:
    """The parent's threads are gone in the child: the pool must notice. (Small tensors: torch's own OpenMP
    pool does not survive a fork, so nothing of torch's may run in parallel here.)"""
    code = (
        "import os, torch, fag_torch\n"
        "torch.set_num_threads(3)\n"
        "def work():\n"
        "    q = torch.randn(2, 130, 4, 16, dtype=torch.bfloat16)\n"
        "    out, lse = torch.ops.cann_ops_transformer.flash_attn(q, q, q, return_softmax_lse=True)\n"
        "    grad = torch.ops.cann_ops_transformer.flash_attn_grad\n"
        "    dq, _, _ = grad(q, q, q, q, out, lse, softmax_scale=1.0)\n"
        "    assert torch.count_nonzero(dq) > 0\n"
        "work()\n"
        "for _ in range(3):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        try:\n"
        "            work()\n"
        "            os._exit(0)\n"
        "        except BaseException:\n"
        "            os._exit(1)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "work()\n"
    )
    assert_fine(python(code, tmp_path), warnings=3)


def test_pc19_writes_nothing_under_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o555)
    assert_fine(python(SMALL_STEP, tmp_path))
    assert list(home.iterdir()) == []


def test_pc19_asking_for_an_npu_names_what_is_missing(tmp_path: Path) -> None:
    code = (
        "import fag_torch\n"
        "sizes = dict(batch_size=1, max_seqlen_q=5, max_seqlen_kv=5)\n"
        "fag_torch.flash_attn_metadata(4, 4, 64, device='npu', **sizes)\n"
    )
    done = python(code, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "npu" in last
    assert "torch_npu" in last


def test_import_is_light(tmp_path: Path) -> None:
    code = (
        "import sys, fag_torch\n"
        "heavy = {'torch_npu', 'triton', 'matplotlib', 'transformers', 'torch._inductor.compile_fx'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    assert_fine(python(code, tmp_path))
