"""The command `fag-torch demo`: trains, checks, draws, and ends with one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

MAX_LENGTH = 2048  # of a document, in bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, checks, draws; the last line of stdout is one line of JSON.

    Args:
        argv: Command line without the program's name; None: sys.argv.

    Returns:
        Exit status: 0, or 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="fag-torch demo", description="Train a small byte-level GPT on the standard library's sources."
    )
    parser.add_argument("--steps", type=_positive, default=120, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="the picture (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=_positive, default=4096, help="bytes per step (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if not args.out.absolute().parent.is_dir():
        parser.error(f"--out: no such folder: {args.out.parent}")
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("\nstopped; nothing was written", file=sys.stderr)
        return 130


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _run(args: argparse.Namespace) -> int:
    try:
        from fag_torch.demo.report import draw
        from fag_torch.demo.train import train
    except ModuleNotFoundError as missing:
        if missing.name not in ("matplotlib", "tqdm"):
            raise
        print(f'The demo needs {missing.name}: pip install "fag-torch[demo]"', file=sys.stderr)
        return 2
    from fag_torch.demo.checks import gradient_error, measure_speed
    from fag_torch.demo.model import Config

    config = Config()
    history = train(args.steps, args.seed, args.tokens, MAX_LENGTH, config)
    print(
        f"loss {history.first_loss:.3f} -> {history.last_loss:.3f} nats per byte "
        f"in {args.steps} steps, {history.seconds:.0f} s"
    )
    error = gradient_error(history.model, history.batch)
    print(f"attention gradients of the last batch against float64: largest relative error {error:.1e}")
    speed = measure_speed(history.model, history.batch)
    print(
        f"forward and backward, {len(history.batch.lengths)} documents of {min(history.batch.lengths)} to "
        f"{max(history.batch.lengths)} bytes: "
        f"fag_torch {speed.tokens_per_s:,.0f} tokens/s (loss {speed.loss:.4f}), "
        f"SDPA padded {speed.tokens_per_s_sdpa:,.0f} tokens/s (loss {speed.loss_sdpa:.4f})"
    )
    draw(history, speed, error, args.out)
    print(f"picture: {args.out}")
    result = {
        "first_loss": round(history.first_loss, 4),
        "last_loss": round(history.last_loss, 4),
        "grad_error": float(f"{error:.3g}"),
        "tokens_per_s": round(speed.tokens_per_s),
        "tokens_per_s_sdpa": round(speed.tokens_per_s_sdpa),
    }
    print(json.dumps(result), flush=True)
    return 0
