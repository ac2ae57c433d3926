"""Command-line options that describe a problem, and the problem they describe, for every command of fag."""

from __future__ import annotations

import argparse
from itertools import accumulate
from typing import Any, NoReturn

from .errors import InvalidProblemError
from .problem import AttentionProblem
from .terms import DEFAULT_TARGET, Target, find_target

_MASKS = {"none": "no_mask", "no_mask": "no_mask", "causal": "causal"}
_MASKS["window"] = _MASKS["sliding_window"] = "sliding_window"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line instead of the usage text."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit status 2."""
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def add_problem_options(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    """Adds the options of the problem; `is_required`: whether the heads must be given."""
    parser.set_defaults(op=parser.prog.split()[0])  # the command, for messages
    group = parser.add_argument_group("problem")
    group.add_argument("--heads", type=_pair, required=is_required, metavar="N1/N2", help="heads, or N")
    group.add_argument("--dim", type=_pair, default=(128, 128), metavar="D/DV", help="head dim; default 128")
    for name, kind, metavar, text in _SIZES:
        group.add_argument(name, type=kind, metavar=metavar, help=text)
    group.add_argument("--mask", choices=sorted(_MASKS), help="default none, or window with --window")
    group.add_argument("--layout", choices=("BSND", "BNSD", "TND"), help="default BSND; TND with --seqlens")


def add_split_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of target and split."""
    parser.set_defaults(op=parser.prog.split()[0])
    group = parser.add_argument_group("target")
    group.add_argument("--target", default=DEFAULT_TARGET, help=f"SoC name or cpu; default {DEFAULT_TARGET}")
    text = "cube and vector cores of a target of your own"
    group.add_argument("--cores", type=_pair, metavar="C/V", help=text)
    text = "default cann for Ascend targets, else balanced"
    group.add_argument("--split", choices=("cann", "balanced"), help=text)
    group.add_argument("--forward-only", action="store_true", help="without the backward split")


def make_target(arguments: argparse.Namespace) -> Target:
    """Returns the target of --target or --cores; InvalidProblemError if there is none like it."""
    if arguments.cores is None:
        return find_target(arguments.op, arguments.target)
    cube, vector = arguments.cores
    return Target("custom", cube, 2 * cube if vector == cube else vector)


def has_problem(arguments: argparse.Namespace) -> bool:
    """Whether a problem was given at all."""
    return arguments.heads is not None


def make_problem(arguments: argparse.Namespace) -> AttentionProblem:
    """Returns the problem; InvalidProblemError if options contradict each other or a value breaks a rule."""
    n1, n2 = arguments.heads
    d, dv = arguments.dim
    mask = _MASKS[arguments.mask or ("window" if arguments.window else "none")]
    left, right = arguments.window or (-1, -1)
    is_packed = any(vars(arguments)[name] is not None for name in ("seqlens", "seqlens_q", "seqlens_kv"))
    sizes = _packed_sizes(arguments) if is_packed else _dense_sizes(arguments)
    return AttentionProblem.from_metadata_args(
        n1, n2, d, head_dim_v=dv, mask_mode=mask, win_left=left, win_right=right, op=arguments.op, **sizes
    )


def _packed_sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    _refuse(arguments, "--seqlens", "batch", "seqlen", "seqlen_q", "seqlen_kv")
    if arguments.layout not in (None, "TND"):
        raise _error(arguments, f"--layout must be TND with --seqlens, got {arguments.layout}.")
    sizes: dict[str, Any] = {"layout_q": "TND"}
    for side in ("q", "kv"):
        lengths = _either(arguments, "seqlens", side)
        if any(length < 0 for length in lengths):
            raise _error(arguments, f"--seqlens must not be negative, got {min(lengths)}.")
        sizes[f"cu_seqlens_{side}"] = [0, *accumulate(lengths)]
        sizes[f"max_seqlen_{side}"] = getattr(arguments, f"max_seqlen_{side}")
        sizes[f"seqused_{side}"] = getattr(arguments, f"used_{side}")
    return sizes


def _dense_sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    _refuse(arguments, "--seqlen", "max_seqlen_q", "max_seqlen_kv")
    if arguments.layout == "TND":
        raise _error(arguments, "--layout TND needs the lengths of the sequences. Pass --seqlens.")
    used = next((used for used in (arguments.used_q, arguments.used_kv) if used is not None), [1])
    return {
        "layout_q": arguments.layout or "BSND",
        "batch_size": len(used) if arguments.batch is None else arguments.batch,
        "max_seqlen_q": _either(arguments, "seqlen", "q"),
        "max_seqlen_kv": _either(arguments, "seqlen", "kv"),
        "seqused_q": arguments.used_q,
        "seqused_kv": arguments.used_kv,
    }


def _error(arguments: argparse.Namespace, text: str) -> InvalidProblemError:
    return InvalidProblemError(f"{arguments.op}: {text}")


def _refuse(arguments: argparse.Namespace, option: str, *others: str) -> None:
    for other in others:
        if getattr(arguments, other) is not None:
            raise _error(arguments, f"--{other.replace('_', '-')} must not be given with {option}.")


def _either(arguments: argparse.Namespace, name: str, side: str) -> Any:
    """The option of one side, or the one of both sides."""
    own, both = getattr(arguments, f"{name}_{side}"), getattr(arguments, name)
    if own is None and both is None:
        raise _error(arguments, f"--{name}-{side} must be given. Pass --{name} for both sides.")
    if own is None:
        return both
    _refuse(arguments, f"--{name}-{side}", name)
    return own


def _pair(text: str) -> tuple[int, int]:
    """Returns both numbers of "32/8", or of "32" (= 32/32)."""
    try:
        first, *others = map(int, text.split("/"))
        (second,) = others or (first,)
    except ValueError:
        text = f"must be a number or two with a slash between, got {text!r}"
        raise argparse.ArgumentTypeError(text) from None
    return first, second


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


_LIST = "S,S,.."
_SIZES = (
    ("--batch", int, "B", "dense batch size; default 1"),
    ("--seqlen", int, "S", "dense length of queries and keys"),
    ("--seqlen-q", int, "S1", "dense length of queries"),
    ("--seqlen-kv", int, "S2", "dense length of keys"),
    ("--seqlens", _ints, _LIST, "lengths of packed sequences (layout TND)"),
    ("--seqlens-q", _ints, _LIST, "lengths of packed queries"),
    ("--seqlens-kv", _ints, _LIST, "lengths of packed keys"),
    ("--used-q", _ints, _LIST, "used lengths of the query slots (seqused_q)"),
    ("--used-kv", _ints, _LIST, "used lengths of the key slots (seqused_kv)"),
    ("--max-seqlen-q", int, "S1", "bound of packed queries"),
    ("--max-seqlen-kv", int, "S2", "bound of packed keys"),
    ("--window", _window, "L,R", "window to the left and right, -1 = open"),
)
