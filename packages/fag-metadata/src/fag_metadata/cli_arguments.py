"""Command-line options that describe a problem, and the problem they describe.

Used by the commands `fag-metadata` and `fag-kernel`, so that both describe a problem alike.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from .errors import InvalidProblemError
from .problem import AttentionProblem
from .targets import DEFAULT_TARGET, Target, find_target

_MASKS = {"none": "NO_MASK", "no_mask": "NO_MASK", "causal": "CAUSAL", "window": "SLIDING_WINDOW"}
_MASKS["sliding_window"] = "SLIDING_WINDOW"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line instead of the usage text."""
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def add_problem_options(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    """Adds the options of the problem.

    Args:
        parser: Parser of a sub-command.
        is_required: Whether the heads must be given.
    """
    parser.set_defaults(op=parser.prog.split()[0])  # the command, for messages
    group = parser.add_argument_group("problem")
    group.add_argument(
        "--heads", type=_pair, required=is_required, metavar="N1/N2", help="query/key-value heads, or N"
    )
    group.add_argument(
        "--dim", type=_pair, default=(128, 128), metavar="D/DV", help="head dim, or D/Dv; default 128"
    )
    group.add_argument("--batch", type=int, metavar="B", help="dense batch size; default 1")
    group.add_argument("--seqlen", type=int, metavar="S", help="dense length of queries and keys")
    group.add_argument("--seqlen-q", type=int, metavar="S1", help="dense length of queries")
    group.add_argument("--seqlen-kv", type=int, metavar="S2", help="dense length of keys")
    group.add_argument(
        "--seqlens", type=_ints, metavar="S,S,..", help="lengths of packed sequences (layout TND)"
    )
    group.add_argument("--seqlens-q", type=_ints, metavar="S,S,..", help="lengths of packed queries")
    group.add_argument("--seqlens-kv", type=_ints, metavar="S,S,..", help="lengths of packed keys")
    group.add_argument(
        "--used-q", type=_ints, metavar="S,S,..", help="used lengths of the query slots (seqused_q)"
    )
    group.add_argument(
        "--used-kv", type=_ints, metavar="S,S,..", help="used lengths of the key slots (seqused_kv)"
    )
    group.add_argument("--max-seqlen-q", type=int, metavar="S1", help="bound of packed queries")
    group.add_argument("--max-seqlen-kv", type=int, metavar="S2", help="bound of packed keys")
    group.add_argument("--mask", choices=sorted(_MASKS), help="default none, or window with --window")
    group.add_argument(
        "--window", type=_window, metavar="L,R", help="window to the left and right, -1 = open"
    )
    group.add_argument(
        "--layout", choices=("BSND", "BNSD", "TND"), help="default BSND, or TND with --seqlens"
    )


def add_split_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of target and split."""
    parser.set_defaults(op=parser.prog.split()[0])
    group = parser.add_argument_group("target")
    group.add_argument("--target", default=DEFAULT_TARGET, help=f"SoC name or cpu; default {DEFAULT_TARGET}")
    group.add_argument(
        "--cores", type=_pair, metavar="C/V", help="cube and vector cores of a target of your own"
    )
    group.add_argument(
        "--split", choices=("cann", "balanced"), help="default cann for Ascend targets, else balanced"
    )
    group.add_argument("--forward-only", action="store_true", help="without the backward split")


def make_target(arguments: argparse.Namespace) -> Target:
    """Returns the target of --target or --cores.

    Raises:
        InvalidProblemError: If it is unknown or its core counts are out of range.
    """
    if arguments.cores is None:
        return find_target(arguments.op, arguments.target)
    cube, vector = arguments.cores
    return Target("custom", cube, 2 * cube if vector == cube else vector)


def has_problem(arguments: argparse.Namespace) -> bool:
    """Whether a problem was given at all."""
    return arguments.heads is not None


def make_problem(arguments: argparse.Namespace) -> AttentionProblem:
    """Returns the problem of the options.

    Raises:
        InvalidProblemError: If options contradict each other, or a value breaks a rule.
    """
    n1, n2 = arguments.heads
    d, dv = arguments.dim
    mask = _MASKS[arguments.mask] if arguments.mask else "SLIDING_WINDOW" if arguments.window else "NO_MASK"
    left, right = arguments.window or (-1, -1)
    sizes = _packed_sizes(arguments) if _is_packed(arguments) else _dense_sizes(arguments)
    return AttentionProblem.from_metadata_args(
        n1, n2, d, head_dim_v=dv, mask_mode=mask, win_left=left, win_right=right, op=arguments.op, **sizes
    )


def _is_packed(arguments: argparse.Namespace) -> bool:
    lists = (arguments.seqlens, arguments.seqlens_q, arguments.seqlens_kv)
    return any(lengths is not None for lengths in lists)


def _packed_sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    _refuse(arguments, "--seqlens", "batch", "seqlen", "seqlen_q", "seqlen_kv")
    if arguments.layout not in (None, "TND"):
        raise InvalidProblemError(
            f"{arguments.op}: --layout must be TND with --seqlens, got {arguments.layout}."
        )
    sizes: dict[str, Any] = {"layout_q": "TND"}
    for side in ("q", "kv"):
        lengths = _either(arguments, "seqlens", side)
        if any(length < 0 for length in lengths):
            raise InvalidProblemError(f"{arguments.op}: --seqlens must not be negative, got {min(lengths)}.")
        total = 0
        sizes[f"cu_seqlens_{side}"] = [0, *(total := total + length for length in lengths)]
        sizes[f"max_seqlen_{side}"] = getattr(arguments, f"max_seqlen_{side}")
        sizes[f"seqused_{side}"] = getattr(arguments, f"used_{side}")
    return sizes


def _dense_sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    _refuse(arguments, "--seqlen", "max_seqlen_q", "max_seqlen_kv")
    if arguments.layout == "TND":
        raise InvalidProblemError(
            f"{arguments.op}: --layout TND needs the lengths of the sequences. Pass --seqlens."
        )
    lists = (arguments.used_q, arguments.used_kv)
    batch = arguments.batch
    if batch is None:
        batch = next((len(used) for used in lists if used is not None), 1)
    return {
        "layout_q": arguments.layout or "BSND",
        "batch_size": batch,
        "max_seqlen_q": _either(arguments, "seqlen", "q"),
        "max_seqlen_kv": _either(arguments, "seqlen", "kv"),
        "seqused_q": arguments.used_q,
        "seqused_kv": arguments.used_kv,
    }


def _refuse(arguments: argparse.Namespace, option: str, *others: str) -> None:
    for other in others:
        if getattr(arguments, other) is not None:
            name = "--" + other.replace("_", "-")
            raise InvalidProblemError(f"{arguments.op}: {name} must not be given with {option}.")


def _either(arguments: argparse.Namespace, name: str, side: str) -> Any:
    """The option of one side, or the one of both sides."""
    own, both = getattr(arguments, f"{name}_{side}"), getattr(arguments, name)
    if own is not None and both is not None:
        raise InvalidProblemError(f"{arguments.op}: --{name} must not be given with --{name}-{side}.")
    if own is None and both is None:
        raise InvalidProblemError(
            f"{arguments.op}: --{name}-{side} must be given. Pass --{name} for both sides."
        )
    return both if own is None else own


def _pair(text: str) -> tuple[int, int]:
    """Returns both numbers of "32/8", or of "32" (= 32/32)."""
    parts = text.split("/")
    if len(parts) > 2:
        raise argparse.ArgumentTypeError(f"must be a number or two with a slash between, got {text!r}")
    try:
        return int(parts[0]), int(parts[-1])
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number or two with a slash between, got {text!r}"
        ) from None


def _ints(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, got {text!r}") from None


def _window(text: str) -> tuple[int, int]:
    sides = _ints(text)
    if len(sides) != 2:
        raise argparse.ArgumentTypeError(f"must be two numbers with a comma between, got {text!r}")
    return sides[0], sides[1]
