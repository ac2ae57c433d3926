"""The demo, cut short: it trains, agrees with float64 and SDPA, draws, and ends with its line of JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fag_torch.demo import checks, data, model, train


@pytest.fixture(scope="module")
def history() -> train.History:
    return train.train(steps=4, seed=1, tokens=700, max_length=300, config=model.Config(layers=2, window=40))


def test_levels_are_listed_once_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    levels = train.fag_kernel.abi.cpu_levels
    monkeypatch.setattr(train.fag_kernel.abi, "cpu_levels", lambda: listed.append(1) or levels())
    train._has_bfloat16_products.cache_clear()
    train.train(steps=3, seed=1, tokens=200, max_length=100, config=model.Config(layers=1, window=40))
    assert len(listed) == 1


def test_command_ends_with_one_line_of_json_and_a_picture(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fag_torch",
        "demo",
        "--steps",
        "3",
        "--tokens",
        "500",
        "--out",
        "picture.png",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert list(figures) == ["first_loss", "last_loss", "grad_error", "tokens_per_s", "tokens_per_s_sdpa"]
    assert abs(figures["first_loss"] - math.log(256)) < 0.3
    assert figures["last_loss"] < figures["first_loss"]
    # After three steps the keys of a head are still nearly equal: dQ is a small difference of large sums.
    assert 0 < figures["grad_error"] < 3e-2
    assert min(figures["tokens_per_s"], figures["tokens_per_s_sdpa"]) > 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "training" in result.stderr  # the progress bar


def test_same_seed_gives_the_same_losses(history: train.History) -> None:
    again = train.train(steps=4, seed=1, tokens=700, max_length=300, config=history.model.config)
    assert again.losses == history.losses


def test_sdpa_computes_the_same_loss(history: train.History) -> None:
    speed = checks.measure_speed(history.model, history.batch, repeats=1)
    assert speed.loss == pytest.approx(speed.loss_sdpa, rel=1e-3)


def test_wrong_gradients_would_be_noticed(history: train.History, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.gradient_error(history.model, history.batch) < 1e-2

    def other_window(q, k, v, sinks, window, batch):
        return model.attend(q, k, v, sinks, 20 if window else None, batch)

    monkeypatch.setattr(checks, "attend", other_window)
    assert checks.gradient_error(history.model, history.batch) > 0.1


@pytest.mark.parametrize("window", [None, 7])
def test_reference_is_the_formula_row_by_row(window: int | None) -> None:
    q, k, v = (torch.randn(30, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64)
    ours = checks.reference_attention(q, k, v, sinks, window)
    for head in range(4):
        scores = (q[:, head] @ k[:, head // 2].T) / math.sqrt(8)
        for i in range(30):
            first = 0 if window is None else max(0, i - window + 1)
            weights = torch.cat([scores[i, first : i + 1], sinks[head, None]]).softmax(0)[:-1]
            torch.testing.assert_close(ours[i, head], weights @ v[first : i + 1, head // 2])


def test_batches_hold_whole_documents_and_the_next_byte() -> None:
    documents = [b"abc", b"defgh", b"ij"]
    batch = data.Batches(documents, tokens=9, seed=0).next()
    assert sum(batch.lengths) == 9
    assert batch.cu_seqlens.tolist()[-1] == 9
    for begin, length in zip(batch.cu_seqlens.tolist(), batch.lengths, strict=False):
        targets = bytes(batch.targets[begin : begin + length].tolist())
        assert any(document.startswith(targets) for document in documents)
        assert batch.tokens[begin] == data.START
        assert bytes(batch.tokens[begin + 1 : begin + length].tolist()) == targets[:-1]


@pytest.mark.parametrize(
    ("words", "message"), [(["--steps", "0"], "at least 1"), (["--out", "no/x.png"], "no such folder")]
)
def test_wrong_option_is_named_before_training(words: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fag_torch", "demo", *words]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert message in result.stderr
