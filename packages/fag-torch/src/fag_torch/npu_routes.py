"""Which route runs a call on an NPU, decided by a table; refusals are kept and shown.

A pure function of the call, the target and what the host lacks: nothing here looks at a device, a library
or the environment. `npu_host.py` finds out what is there, `npu.py` runs what is chosen.

1. `aclnn`: CANN's own kernels, through its custom operator package.
2. `ascend950`: the kernels that fag-kernel ships.

A row of a route either says what its kernels are able to do ("capability"), or what is wanted of them
("preference"). Naming a route by FAG_NPU_ROUTE lifts preferences, never capabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from fag_kernel import plan
from fag_metadata import MaskMode, Route, Split, Target, UnsupportedError, unpack
from fag_metadata.errors import problem_error
from fag_metadata.terms import CPU_TARGET, TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from fag_metadata import AttentionProblem

Direction = Literal["forward", "backward"]
Kind = Literal["missing", "capability", "preference"]

ACLNN: Final = "aclnn"
ASCEND950: Final = "ascend950"
ROUTES: Final = (ACLNN, ASCEND950)

#: Environment variable that names the only route to use.
VARIABLE: Final = "FAG_NPU_ROUTE"

_DTYPES: Final = ("float16", "bfloat16")

#: Head dims of CANN's forward; its gradient takes all up to the second.
_ACLNN_FORWARD_DIMS: Final = (64, 128, 256)
_ACLNN_MAX_DIM: Final = 192


class Origin(NamedTuple):
    """What metadata that a caller passes was made for.

    Attributes:
        split: How its ranges were chosen.
        template: Kernel template that they are for.
        cube_cores: Cube cores of its target.
        vector_cores: Vector cores of its target.
        used_cores: Cube cores that have tiles of the gradient; 0 without gradient.
        bounds: Query and key length that those tiles were counted with; -1 without gradient.
    """

    split: Split
    template: Route
    cube_cores: int
    vector_cores: int
    used_cores: int
    bounds: tuple[int, int]

    @classmethod
    def of(cls, words: NDArray[np.int32]) -> Origin:
        """Reads the head of metadata that has passed its check."""
        view = unpack(words)
        assert view.identity is not None
        used, bounds = 0, (-1, -1)
        if view.grad is not None:
            used, bounds = view.grad.used_cubes, (view.grad.s1, view.grad.s2)
        return cls(view.identity.split, view.identity.route, view.aic, view.aiv, used, bounds)


class Call(NamedTuple):
    """What of a call decides about its route.

    Attributes:
        problem: What is computed.
        dtype: Name of the dtype of q.
        direction: "forward" or "backward".
        has_sinks: Whether sinks are given.
        has_dlse: Whether there is a gradient of the lse; backward only.
        is_deterministic: Whether torch.use_deterministic_algorithms(True) is on.
        metadata: Of metadata that the caller passes; None: it is made for the target here.
    """

    problem: AttentionProblem
    dtype: str
    direction: Direction
    has_sinks: bool = False
    has_dlse: bool = False
    is_deterministic: bool = False
    metadata: Origin | None = None


class Refusal(NamedTuple):
    """Why a route does not take a call.

    Attributes:
        route: Name of the route.
        kind: "missing" (this host lacks something), "capability" or "preference".
        reason: A phrase with the value that decided.
    """

    route: str
    kind: Kind
    reason: str


class Choice(NamedTuple):
    """The route of a call; None if every one refuses it. Refusals in the order of the table."""

    route: str | None
    refusals: tuple[Refusal, ...]

    def reasons(self) -> str:
        """All refusals as one sentence per route."""
        parts = []
        for route in ROUTES:
            reasons = [refusal.reason for refusal in self.refusals if refusal.route == route]
            if reasons:
                parts.append(f"Route {route}: {'; '.join(reasons)}.")
        return " ".join(parts)


class Row(NamedTuple):
    """One thing that must hold for a route: `reason` gives a phrase where it does not, else None."""

    route: str
    kind: Kind
    reason: Callable[[Call, Target], str | None]


def _dtype(call: Call, target: Target) -> str | None:
    if call.dtype in _DTYPES:
        return None
    return f"it takes {' and '.join(_DTYPES)}, got {call.dtype}"


def _no_sinks(call: Call, target: Target) -> str | None:
    return "CANN's kernels do not read sinks" if call.has_sinks else None


def _no_dlse(call: Call, target: Target) -> str | None:
    return "CANN's gradient takes no gradient of the lse" if call.has_dlse else None


def _may_use_atomics(call: Call, target: Target) -> str | None:
    if not (call.is_deterministic and call.direction == "backward"):
        return None
    return "CANN's gradient adds with atomics, which torch.use_deterministic_algorithms(True) forbids"


def _aclnn_dims(call: Call, target: Target) -> str | None:
    d, dv = call.problem.d, call.problem.dv
    if call.direction == "forward":
        if dv == d and d in _ACLNN_FORWARD_DIMS:
            return None
        return f"CANN's forward takes D = Dv: {', '.join(map(str, _ACLNN_FORWARD_DIMS))}, got D={d}, Dv={dv}"
    if dv == d <= _ACLNN_MAX_DIM:
        return None
    return f"CANN's gradient is used for D = Dv up to {_ACLNN_MAX_DIM}, got D={d}, Dv={dv}"


def _nothing_empty(call: Call, target: Target) -> str | None:
    problem = call.problem
    if problem.b and not problem.has_empty_sequence:
        return None
    return "CANN refuses empty tensors and sequences of length 0"


def _cann_split(call: Call, target: Target) -> str | None:
    if call.metadata is None or call.metadata.split is Split.CANN:
        return None
    return f"CANN's kernels take metadata with split cann, got split {call.metadata.split.name.lower()}"


def _cores(call: Call, target: Target) -> str | None:
    origin = call.metadata
    wanted = (target.cube_cores, target.vector_cores)
    if origin is None or (origin.cube_cores, origin.vector_cores) == wanted:
        return None
    made_for = f"{origin.cube_cores} cube and {origin.vector_cores} vector cores"
    return (
        f"metadata must be made for the {wanted[0]} cube and {wanted[1]} vector cores of {target.name}, "
        f"got one for {made_for}"
    )


def _documented_mask(call: Call, target: Target) -> str | None:
    if call.problem.mask_mode is MaskMode.NO_MASK:
        return None
    return f"CANN documents its kernels for mask_mode NO_MASK only, got {call.problem.mask_mode.name}"


def _documented_lengths(call: Call, target: Target) -> str | None:
    if call.problem.seqused_q is None and call.problem.seqused_kv is None:
        return None
    return "CANN's documented combinations have no seqused_q and seqused_kv"


def _has_kernel(call: Call, target: Target) -> str | None:
    """What the plan of the gradient says; the forward kernels have the same limits."""
    try:
        plan(call.problem, target)
    except UnsupportedError as error:
        return str(error).removeprefix("plan: ").removesuffix(" Run it on the CPU.").rstrip(".")
    return None


ROWS: Final = (
    Row(ACLNN, "capability", _dtype),
    Row(ACLNN, "capability", _no_sinks),
    Row(ACLNN, "capability", _no_dlse),
    Row(ACLNN, "capability", _may_use_atomics),
    Row(ACLNN, "capability", _aclnn_dims),
    Row(ACLNN, "capability", _nothing_empty),
    Row(ACLNN, "capability", _cann_split),
    Row(ACLNN, "capability", _cores),
    Row(ACLNN, "preference", _documented_mask),
    Row(ACLNN, "preference", _documented_lengths),
    Row(ASCEND950, "capability", _dtype),
    Row(ASCEND950, "capability", _has_kernel),
    Row(ASCEND950, "capability", _cores),
)


def choose(
    call: Call, target: Target, missing: Mapping[str, tuple[str, ...]], forced: str | None = None
) -> Choice:
    """Chooses the first route that takes a call.

    Args:
        call: See Call.
        target: The NPU.
        missing: Route -> what the host lacks for it, each a phrase.
        forced: The only route to consider, its preferences lifted; None considers all.

    Returns:
        The route, with every reason against the ones before it; or all reasons.

    Example:
        >>> from fag_metadata import AttentionProblem
        >>> sizes = dict(batch_size=2, max_seqlen_q=128, max_seqlen_kv=128)
        >>> problem = AttentionProblem.from_metadata_args(8, 2, 128, mask_mode="causal", **sizes)
        >>> choice = choose(Call(problem, "float16", "backward"), TARGETS["Ascend950PR_9589"], {})
        >>> choice.route, choice.refusals[0].kind
        ('ascend950', 'preference')
    """
    refusals: list[Refusal] = []
    for route in ROUTES:
        if forced not in (None, route):
            continue
        found = [Refusal(route, "missing", reason) for reason in missing.get(route, ())]
        for row in ROWS:
            if row.route == route and not (forced and row.kind == "preference"):
                reason = row.reason(call, target)
                if reason is not None:
                    found.append(Refusal(route, row.kind, reason))
        if not found:
            return Choice(route, tuple(refusals))
        refusals += found
    return Choice(None, tuple(refusals))


def require(op: str, choice: Choice, forced: str | None) -> str:
    """The chosen route, or the error that says why there is none.

    Raises:
        UnsupportedError: Every route refuses the call, or the one of FAG_NPU_ROUTE does.
    """
    if choice.route is not None:
        return choice.route
    if forced is None:
        text = f"{op}: no route can run this call on an NPU. {choice.reasons()} On a CPU the same call runs."
    else:
        text = (
            f"{op}: {VARIABLE} must name a route that takes this call, got {forced}. {choice.reasons()} "
            f"Without {VARIABLE} the other routes are tried."
        )
    raise UnsupportedError(text)


def parse_forced(op: str, value: str | None) -> str | None:
    """The value of FAG_NPU_ROUTE; None and "" force nothing.

    Raises:
        InvalidProblemError: There is no such route.
    """
    if not value:
        return None
    if value not in ROUTES:
        raise problem_error(op, VARIABLE, f"must be {' or '.join(ROUTES)}", repr(value))
    return value


def target_of_soc(op: str, soc: str) -> Target:
    """The target of a SoC name.

    Args:
        op: Operator the user called, for the message.
        soc: As aclrtGetSocName gives it.

    Raises:
        UnsupportedError: It is not an Ascend 950.
    """
    if soc not in TARGETS or soc == CPU_TARGET:
        raise UnsupportedError(
            f"{op}: device must be an Ascend 950, got {soc}. The kernels exist for that family only."
        )
    return TARGETS[soc]
