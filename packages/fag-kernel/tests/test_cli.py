"""fag-kernel plan and fag-kernel info."""

import json
import os
import subprocess
import sys

import pytest

import fag_kernel
from fag_kernel import TilingData, plan
from fag_kernel.__main__ import main
from fag_metadata import AttentionProblem

EXAMPLE = "--heads=20 --dim=128 --seqlen-q=8192 --seqlen-kv=1024 --target=Ascend950PR_9599"


def example():
    problem = AttentionProblem.from_metadata_args(
        20, 20, 128, batch_size=1, max_seqlen_q=8192, max_seqlen_kv=1024
    )
    return plan(problem, "Ascend950PR_9599")


def run(capsys, *arguments):
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_plan_shows_every_part(capsys):
    status, out, err = run(capsys, "plan", *EXAMPLE.split())
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "problem      BSND, B=1, N1=20, N2=20, D=128, Dv=128, S1=8192, S2=1024, NO_MASK"
    assert lines[1] == "target       Ascend950PR_9599: 36 cube and 72 vector cores, L2 128 MiB"
    for row in example().trace:
        assert row.reason in out or row.stage == "key"
    for part in (
        "route        BN2GS1S2",
        "swizzle      chosen: live heads exceed L2",
        "tiling key   96 = BN2GS1S2-dense-full-swizzle-d128-dv128",
        "block dim    36 of 36 cores",
        f"workspace    {example().workspace_bytes} bytes; dq at 0",
        "tiling data  192 bytes",
        "total_per_batch_num 512",
    ):
        assert part in out


def test_plan_as_json(capsys):
    status, out, _ = run(capsys, "plan", *EXAMPLE.split(), "--json", "--softmax-scale", "0.5")
    found = json.loads(out)
    assert status == 0
    assert found["route"] == "BN2GS1S2"
    assert found["tiling_key"] == 96
    assert found["block_dim"] == 36
    assert [row["verdict"] for row in found["trace"]][:2] == ["capability", "capability"]
    fields = TilingData.from_bytes(bytes.fromhex(found["tiling_data_hex"]))
    assert fields._asdict() == found["tiling_data"]
    assert fields.scale_value == 0.5


def test_plan_of_a_packed_problem(capsys):
    status, out, _ = run(capsys, "plan", "--heads", "8/2", "--seqlens", "1,17,300", "--mask", "causal")
    assert status == 0
    assert "TND, B=3, N1=8, N2=2" in out
    assert "tiling key   76 = BN2GS1S2-tnd-causal-d128-dv128" in out
    assert "swizzle      cannot: layout TND has no swizzle" in out


def test_plan_for_the_cpu_tells_that_there_is_no_key(capsys):
    status, out, _ = run(capsys, "plan", "--heads", "4", "--dim", "256", "--seqlen", "99", "--target", "cpu")
    assert status == 0
    assert "tiling key   none: head dims end at 192" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "20/3", "--seqlen", "9"], "fag-kernel: num_heads_q must be a multiple of"),
        (["--heads", "4", "--dim", "256", "--seqlen", "9"], "head dims end at 192"),
        (["--heads", "4", "--seqlen", "9", "--target", "Ascend910"], "target must be a SoC name"),
        (["--heads", "4", "--seqlen", "9", "--softmax-scale", "nan"], "softmax_scale must be finite"),
        (["--heads", "4", "--seqlen", "9", "--libapi-reserve-bytes", "-1"], "libapi_reserve_bytes must be"),
        (["--heads", "4"], "must be given"),
    ],
)
def test_refusals_are_one_line_and_status_2(capsys, arguments, message):
    status, out, err = run(capsys, "plan", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["plan"], ["bake"], ["plan", "--heads", "x"]])
def test_unusable_arguments_exit_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("fag-kernel")


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"fag-kernel {fag_kernel.__version__}\n"


def test_info(capsys):
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert f"fag-kernel       {fag_kernel.__version__}, KERNEL_ABI 1" in out
    assert "portable" in out
    assert "56 tiling keys" in out


def test_info_as_json_follows_the_cap_of_the_environment():
    done = subprocess.run(
        [sys.executable, "-m", "fag_kernel", "info", "--json"],
        env=os.environ | {"FAG_CPU_LEVEL": "portable"},
        capture_output=True,
        text=True,
        check=True,
    )
    info = json.loads(done.stdout)
    assert (info["cpu_level"], info["cpu_level_cap"]) == ("portable", "portable")
    assert info["cpu_levels"][0] == "portable"
    assert info["accepts"] == {"METADATA_FORMAT": [1, 1]}
    assert len(info["tiling_keys"]) == 56
