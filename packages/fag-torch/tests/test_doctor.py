"""`doctor()` and the command."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys

import pytest
import torch

import fag_kernel
import fag_metadata
import fag_torch
from fag_torch import npu
from fag_torch.__main__ import main
from fag_torch.diagnosis import as_text


def test_versions_and_contracts():
    report = fag_torch.doctor()
    assert report["packages"]["fag-torch"] == fag_torch.__version__
    assert report["packages"]["fag-kernel"] == fag_kernel.__version__
    assert report["packages"]["fag-metadata"] == fag_metadata.__version__
    assert report["packages"]["torch"] == torch.__version__
    assert report["contracts"]["METADATA_FORMAT"] == {
        "found": fag_metadata.FORMAT_VERSION,
        "accepted": [1, 1],
    }
    assert report["contracts"]["KERNEL_ABI"] == {"found": fag_kernel.KERNEL_ABI, "accepted": [1, 1]}


def test_cpu_level_and_threads():
    from fag_kernel import abi

    cpu = fag_torch.doctor()["cpu"]
    assert cpu["level"] == abi.cpu_level()
    assert cpu["level"] in cpu["levels"]
    assert cpu["threads"] == torch.get_num_threads()
    assert fag_torch.doctor()["route"]["cpu"] == "cpu"


def test_npu_pieces_are_looked_for():
    found = fag_torch.doctor()["npu"]
    assert not found["present"]
    for piece in ("torch_npu", "cann_runtime", "cann_operators", "compiled_kernels"):
        assert found[piece]["found"] == (found[piece]["why"] is None)
    for route in found["routes"].values():
        assert route["missing"]
        assert not route["runs"]
    assert fag_torch.doctor()["route"]["npu"] is None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a library to find")
def test_libraries_are_really_loaded(tmp_path, monkeypatch):
    """With a library in CANN's place its absence is no reason any more; a missing symbol is."""
    folder = tmp_path / "vendors" / "custom" / "op_api" / "lib"
    folder.mkdir(parents=True)
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    library = folder / npu.CUSTOM_LIBRARY
    subprocess.run(["gcc", "-shared", "-o", library, source], check=True)
    assert "does not load" in npu.missing_custom_package()
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path))
    assert npu.missing_custom_package() == f"{library} has no symbol {npu.GRAD_SYMBOL}"
    source.write_text(f"int {npu.GRAD_SYMBOL};\n")
    other = tmp_path / "custom" / "op_api" / "lib"
    other.mkdir(parents=True)
    subprocess.run(["gcc", "-shared", "-o", other / npu.CUSTOM_LIBRARY, source], check=True)
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(tmp_path / "custom"))
    assert npu.missing_custom_package() is None
    assert ctypes.CDLL(str(other / npu.CUSTOM_LIBRARY))
    missing = dict(npu.routes())["aclnn"]
    assert not any(npu.CUSTOM_LIBRARY in reason for reason in missing)


def test_report_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(fag_torch.doctor()))


def test_report_as_text(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.strip() == as_text(fag_torch.doctor())
    for part in (
        "fag-torch      0.1.0",
        "METADATA_FORMAT 1 (accepted: 1)",
        "route on cpu   cpu",
        "route on npu   none",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) < 200


def test_command_is_installed_or_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "fag_torch", "doctor", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout)["packages"]["fag-torch"] == fag_torch.__version__
    result = subprocess.run([sys.executable, "-m", "fag_torch"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "doctor" in result.stderr
