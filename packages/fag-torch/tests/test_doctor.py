"""`doctor()` and the command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

import fag_kernel
import fag_metadata
import fag_torch
from fag_kernel import cann
from fag_metadata import AttentionProblem
from fag_torch import npu_host
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
    assert found["soc"] is None
    for piece in ("torch_npu", "cann_runtime", "cann_operators", "kernel_launcher", "kernel_compiler"):
        assert found[piece]["found"] == (found[piece]["why"] is None)
    for route in found["routes"].values():
        assert route["missing"]
        assert not route["runs"]
    assert fag_torch.doctor()["route"]["npu"] is None


def test_a_problem_is_judged_by_every_row(monkeypatch):
    sizes = {"batch_size": 2, "max_seqlen_q": 128, "max_seqlen_kv": 128}
    problem = AttentionProblem.from_metadata_args(8, 2, 128, mask_mode="causal", **sizes)
    call = fag_torch.doctor(problem, has_sinks=True, has_dlse=True, target="Ascend950PR_9599")["call"]
    assert call["target"] == "Ascend950PR_9599"
    for direction, wanted in (("forward", {"sinks", "CAUSAL"}), ("backward", {"sinks", "CAUSAL", "lse"})):
        assert call[direction]["route"] is None
        against = [r["reason"] for r in call[direction]["refusals"] if r["kind"] != "missing"]
        assert len(against) == len(wanted)
        assert all(any(word in reason for reason in against) for word in wanted)
    monkeypatch.setattr(npu_host, "missing", lambda direction: {"aclnn": (), "ascend950": ()})
    call = fag_torch.doctor(problem, is_deterministic=True)["call"]
    assert call["backward"]["route"] == call["forward"]["route"] == "ascend950"
    monkeypatch.setenv("FAG_NPU_ROUTE", "aclnn")
    call = fag_torch.doctor(problem)["call"]
    assert call["backward"]["route"] == "aclnn"
    assert fag_torch.doctor()["npu"]["forced"] == "aclnn"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--heads", "8/3", "--seqlen", "9"], "num_heads_q must be a multiple of num_heads_kv"),
        (["--heads", "8", "--seqlen", "9", "--target", "Ascend910B2"], "target must be a SoC name"),
        (["--heads", "8"], "--seqlen-q must be given"),
    ],
)
def test_arguments_that_are_refused(capsys, arguments, text):
    assert main(["doctor", *arguments]) == 2
    printed = capsys.readouterr()
    assert text in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_problem_by_command_line(capsys):
    arguments = ["doctor", "--heads", "8/2", "--dim", "192", "--seqlens", "5,7", "--sinks", "--deterministic"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "backward takes none on Ascend950PR_9589" in text
    for reason in (
        "CANN's kernels do not read sinks (capability)",
        "torch.use_deterministic_algorithms(True) forbids (capability)",
        "head dims above 128 need a dense layout) (capability)",
        "torch_npu is not installed (missing)",
    ):
        assert reason in text
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["call"]["forward"]["route"] is None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a library to find")
def test_libraries_are_really_loaded(tmp_path, monkeypatch):
    """With a library in CANN's place its absence is no reason any more; a missing symbol is."""

    def missing():
        return fag_torch.doctor()["npu"]["cann_operators"]["why"]

    source = tmp_path / "package.c"
    source.write_text("int nothing;\n")
    folder = tmp_path / "vendors" / "custom" / "op_api" / "lib"
    folder.mkdir(parents=True)
    assert "does not load" in missing()
    subprocess.run(["gcc", "-shared", "-o", folder / "libcust_opapi.so", source], check=True)
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path))
    assert cann.FORWARD in missing()
    assert "no symbol" in missing()


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
