"""The command line: output, --json, exit status, and errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fag_metadata import __version__, flash_attn_metadata
from fag_metadata.__main__ import main

DENSE = ["--heads", "8", "--batch", "2", "--seqlen", "300", "--mask", "causal"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = main(argv)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "dense.npy"
    sizes = {"batch_size": 2, "max_seqlen_q": 300, "max_seqlen_kv": 300, "mask_mode": "causal"}
    np.save(path, flash_attn_metadata(8, 8, 128, is_grad_enabled=True, **sizes))
    return path


def test_explain_prints_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "explain", *DENSE, "--target", "Ascend950PR_9599")
    assert (status, err) == (0, "")
    assert "Target Ascend950PR_9599: 36 cube cores" in out
    assert "Route BN2GS1S2" in out


def test_explain_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "explain", *DENSE, "--split", "balanced", "--forward-only", "--json")
    facts = json.loads(out)
    assert facts["split"] == "balanced"
    assert facts["grad"] is None
    assert facts["problem"]["n1"] == 8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--heads", "32/8", "--seqlens", "1,17,300"], {"layout": "TND", "n2": 8, "lengths_q": [1, 17, 300]}),
        (
            ["--heads", "4", "--seqlens-q", "5,6", "--seqlens-kv", "7,8", "--max-seqlen-q", "9"],
            {"lengths_q": [5, 6], "lengths_kv": [7, 8]},
        ),
        (
            ["--heads", "4", "--seqlen-q", "5", "--seqlen-kv", "70", "--layout", "BNSD"],
            {"layout": "BNSD", "b": 1},
        ),
        (["--heads", "4", "--seqlen", "50", "--used-kv", "7,9"], {"b": 2, "lengths_kv": [7, 9]}),
        (["--heads", "4", "--seqlen", "50", "--dim", "192/128"], {"d": 192, "dv": 128}),
        (
            ["--heads", "4", "--seqlen", "50", "--window", "10,-1"],
            {"mask_mode": "SLIDING_WINDOW", "win_left": 10, "win_right": -1},
        ),
        (["--heads", "4", "--seqlens", "50,60", "--used-q", "10,20"], {"lengths_q": [10, 20]}),
    ],
)
def test_options_describe_the_problem(
    capsys: pytest.CaptureFixture[str], options: list[str], expected: dict[str, object]
) -> None:
    status, out, err = run(capsys, "explain", *options, "--json")
    assert (status, err) == (0, "")
    problem = json.loads(out)["problem"]
    assert {name: problem[name] for name in expected} == expected


def test_target_of_your_own(capsys: pytest.CaptureFixture[str]) -> None:
    for cores, vectors in (("24/48", 48), ("24", 48), ("24/72", 72)):
        _, out, _ = run(capsys, "explain", *DENSE, "--cores", cores, "--json")
        facts = json.loads(out)
        assert facts["target"] == {"name": "custom", "cube_cores": 24, "vector_cores": vectors}
        assert facts["split"] == "balanced"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["explain", "--heads", "8"], "--seqlen-q must be given"),
        (["explain", "--seqlen", "8"], "the following arguments are required: --heads"),
        (["explain", "--heads", "8/3", "--seqlen", "9"], "multiple of"),
        (["explain", "--heads", "a", "--seqlen", "9"], "--heads: must be a number or two"),
        (["explain", "--heads", "8/4/2", "--seqlen", "9"], "--heads: must be a number or two"),
        (["explain", "--heads", "8", "--seqlens", "1,x"], "--seqlens: must be numbers with commas"),
        (["explain", "--heads", "8", "--seqlens", "4,-5"], "--seqlens must not be negative"),
        (
            ["explain", "--heads", "8", "--seqlens", "4", "--batch", "1"],
            "--batch must not be given with --seqlens",
        ),
        (
            ["explain", "--heads", "8", "--seqlen", "4", "--seqlen-q", "4"],
            "--seqlen must not be given with --seqlen-q",
        ),
        (["explain", "--heads", "8", "--seqlens", "4", "--layout", "BSND"], "--layout must be TND"),
        (["explain", "--heads", "8", "--seqlen", "4", "--layout", "TND"], "--layout TND needs"),
        (["explain", "--heads", "8", "--seqlen", "4", "--window", "4"], "--window: must be two numbers"),
        (
            ["explain", "--heads", "8", "--seqlen", "4", "--mask", "causal", "--window", "4,4"],
            "win_left must be -1",
        ),
        (["explain", "--heads", "8", "--seqlen", "4", "--target", "Ascend1"], "target must be a SoC name"),
        (["explain", "--heads", "8", "--seqlen", "4", "--dim", "300"], "head_dim"),
        (["plot", "--heads", "8", "--seqlen", "4", "-o", "split.bmp"], "must end in .png, .svg, .pdf"),
        (["plot", "--heads", "8", "--seqlen", "4"], "required: -o"),
        (["check", "no_such_file.npy"], "No such file"),
        (["dance"], "invalid choice"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    status, out, err = run(capsys, *options)
    assert (status, out) == (2, "")
    assert err.startswith("fag-metadata")
    assert text in err
    assert err.count("\n") == 1


def test_plot_writes_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "split.png"
    status, out, _ = run(capsys, "plot", *DENSE, "-o", str(path))
    assert (status, out) == (0, f"wrote {path}\n")
    assert path.stat().st_size > 1000
    _, out, _ = run(capsys, "plot", *DENSE, "-o", str(path), "--json")
    assert json.loads(out)["file"] == str(path)


def test_plot_without_matplotlib_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = run(capsys, "plot", *DENSE, "-o", "split.png")
    assert status == 3
    assert err == "fag-metadata plot: matplotlib must be installed. Run pip install 'fag-metadata[plot]'.\n"


def test_check_of_a_right_tensor(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    for options in ([], DENSE):
        status, out, _ = run(capsys, "check", str(saved), *options)
        assert status == 0
        assert out.startswith(f"{saved}: ok")
    status, out, _ = run(capsys, "check", str(saved), "--json")
    (report,) = json.loads(out)
    assert report["ok"]
    assert report["balance"]["grad"]["cores"] == 32


def test_check_of_another_problem_fails(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    status, out, err = run(capsys, "check", str(saved), "--heads", "8/4", "--batch", "2", "--seqlen", "300")
    assert (status, err) == (1, "")
    assert "num_heads_kv" in out


def test_check_of_a_damaged_tensor_fails(
    capsys: pytest.CaptureFixture[str], saved: Path, tmp_path: Path
) -> None:
    words = np.load(saved)
    words[16 + 5] += 1  # core 0 ends one key block later
    damaged = tmp_path / "damaged.npy"
    np.save(damaged, words)
    status, out, _ = run(capsys, "check", str(saved), str(damaged))
    assert status == 1
    assert f"{saved}: ok" in out
    assert f"{damaged}: forward: start_bn: blocks" in out
    status, out, _ = run(capsys, "check", str(damaged), "--json")
    assert status == 1
    assert json.loads(out)[0]["findings"][0]["part"] == "forward"


def test_check_of_lengths_needs_the_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ragged.npy"
    status, _, _ = run(capsys, "explain", "--heads", "2", "--seqlens", "5,300", "--save", str(path))
    assert status == 0
    status, _, err = run(capsys, "check", str(path))
    assert status == 2
    assert "cu_seqlens_q" in err
    status, out, _ = run(capsys, "check", str(path), "--heads", "2", "--seqlens", "5,300")
    assert status == 0
    assert "ok" in out


def test_check_of_something_else_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text.npy"
    text.write_text("not an array")
    floats = tmp_path / "floats.npy"
    np.save(floats, np.zeros(8192))
    zeros = tmp_path / "zeros.npy"
    np.save(zeros, np.zeros(8192, np.int32))
    status, out, err = run(capsys, "check", str(text))
    assert (status, out) == (2, "")
    assert err.startswith("fag-metadata: ")
    assert err.count("\n") == 1
    for path, part in ((floats, "must be int32"), (zeros, "must hold positive counts")):
        status, out, err = run(capsys, "check", str(path))
        assert (status, err) == (1, "")
        assert part in out
        assert out.count("\n") == 1


def test_runs_as_a_module_and_shows_its_version() -> None:
    command = [sys.executable, "-m", "fag_metadata", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"fag-metadata {__version__}\n"
