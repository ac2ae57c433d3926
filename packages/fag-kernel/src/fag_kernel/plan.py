"""The host tiling of the gradient: how a device kernel will run a problem.

A plan is a pure function of problem, target and scale, computed natively (csrc/tiling) and cached. The route
is fag_metadata's decision, because it shapes the split too; it is verified here, never taken again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fag_kernel import _native
from fag_kernel.abi import native_problem
from fag_kernel.arrays import read_array
from fag_kernel.tiling_data import TilingData
from fag_kernel.tiling_key import TilingKey
from fag_metadata import AttentionProblem, Route, Split, UnsupportedError, check_metadata, unpack
from fag_metadata.arguments import check_softmax_scale
from fag_metadata.errors import problem_error, type_error
from fag_metadata.routes import select_route
from fag_metadata.terms import CPU_TARGET, DEFAULT_TARGET, find_target

if TYPE_CHECKING:
    from fag_metadata import Target
    from fag_metadata.routes import RouteChoice

__all__ = ["TilingPlan", "TraceRow", "plan"]

#: Bytes that CANN's libapi keeps at the start of the workspace, where a launch runs under it.
DEFAULT_LIBAPI_RESERVE_BYTES: int = _native.DEFAULT_LIBAPI_RESERVE_BYTES


class TraceRow(NamedTuple):
    """One decision of a plan.

    Attributes:
        stage: "route", "swizzle" or "key".
        name: What was decided about: a row of the route table, "swizzle", or the name of the key.
        verdict: "chosen", "capability" (it cannot) or "preference" (it is not wanted).
        reason: Why, with the values.
    """

    stage: str
    name: str
    verdict: str
    reason: str


class _Grounds(NamedTuple):
    """Choice of the route (None: it stands in the metadata), the verdict on swizzle with its reason, and why
    there is no key; empty if there is one.
    """

    choice: RouteChoice | None
    swizzle: str
    swizzle_reason: str
    key_problem: str


@dataclass(frozen=True)
class TilingPlan:
    """How the gradient of a problem runs on a target.

    Attributes:
        problem: What is computed.
        target: Machine.
        route: Kernel template and form; decided by fag_metadata.
        tiling_key: Which compiled kernel; None on the CPU target for problems without one.
        block_dim: Cores launched: those that CANN's host gives work, or more where metadata that was given to
            `plan` has ranges for more.
        is_swizzle: Whether key columns are dealt across cores instead of linear ranges.
        workspace_bytes: [libapi reserve][dq][dk][dv][padding], float32 accumulators.
        dq_offset: Byte of the dq accumulator (t1, n1, d) in the workspace.
        dk_offset: Byte of the dk accumulator (t2, n2, d).
        dv_offset: Byte of the dv accumulator (t2, n2, dv).
        tiling_data: The 192 bytes for the kernel; `fields` names them.
    """

    problem: AttentionProblem
    target: Target
    route: Route
    tiling_key: int | None
    block_dim: int
    is_swizzle: bool
    workspace_bytes: int
    dq_offset: int
    dk_offset: int
    dv_offset: int
    tiling_data: bytes
    _grounds: _Grounds = field(repr=False)

    @cached_property
    def trace(self) -> tuple[TraceRow, ...]:
        """Every decision with its reason, rejected route rows included."""
        choice, swizzle, swizzle_reason, key_problem = self._grounds
        if choice is None:
            trace = [TraceRow("route", self.route.name, "chosen", "stands in the metadata")]
        else:
            trace = [TraceRow("route", *verdict) for verdict in choice.trace]
        trace.append(TraceRow("swizzle", "swizzle", swizzle, swizzle_reason))
        if self.key is None:
            trace.append(TraceRow("key", "none", "capability", key_problem))
        else:
            trace.append(TraceRow("key", self.key.name, "chosen", "a valid key"))
        return tuple(trace)

    @cached_property
    def fields(self) -> TilingData:
        """The tiling data by name."""
        return TilingData.from_bytes(self.tiling_data)

    @cached_property
    def key(self) -> TilingKey | None:
        """The tiling key by name."""
        return None if self.tiling_key is None else TilingKey.decode(self.tiling_key)


def plan(
    problem: AttentionProblem,
    target: str | Target = DEFAULT_TARGET,
    *,
    softmax_scale: float | None = None,
    split: str | None = None,
    metadata: Any = None,
    libapi_reserve_bytes: int = DEFAULT_LIBAPI_RESERVE_BYTES,
) -> TilingPlan:
    """Plan the gradient of a problem: route, tiling key, cores, workspace, tiling data, and the reasons.

    Args:
        problem: What is computed.
        target: SoC name, "cpu", or a Target of your own.
        softmax_scale: Factor of the scores, finite; None or 0.0 = 1/sqrt(D).
        split: "cann" or "balanced", the split that the ranges come from; None = the target's default. It
            matters for the route only.
        metadata: int32 tensor of flash_attn_metadata for this problem with the gradient in it: the route is
            read from it instead of asking fag_metadata for the one of `split`, and every core that it gives
            tiles is launched.
        libapi_reserve_bytes: Bytes at the start of the workspace that are not ours, >= 0.

    Returns:
        The plan. The same arguments give the same object.

    Raises:
        InvalidProblemError: An unknown target or split, or a scale that is not finite.
        InvalidTypeError: An argument of the wrong type.
        MetadataError: metadata of another problem, or without gradient.
        UnsupportedError: No compiled kernel of the target runs this problem.

    Example:
        >>> from fag_metadata import AttentionProblem
        >>> problem = AttentionProblem.from_metadata_args(
        ...     20, 20, 128, batch_size=1, max_seqlen_q=8192, max_seqlen_kv=1024
        ... )
        >>> tiling = plan(problem, "Ascend950PR_9599")
        >>> tiling.route.name, tiling.key.name, tiling.block_dim
        ('BN2GS1S2', 'BN2GS1S2-dense-full-swizzle-d128-dv128', 36)
        >>> tiling.trace[0].verdict, tiling.trace[0].reason
        ('capability', 'needs S1 and S2 <= 128, got S1=8192, S2=1024')

    Note:
        Pure: no clock, device, environment or global state. About 1 us when cached, 40 us when not.
    """
    if not isinstance(problem, AttentionProblem):
        raise type_error("plan", "problem", "must be an AttentionProblem", type(problem).__name__)
    scale = 0.0 if softmax_scale is None else check_softmax_scale("plan", softmax_scale)
    given = None if metadata is None else _read(metadata, problem)
    return _plan(problem, find_target("plan", target), parse_split(split), given, scale, libapi_reserve_bytes)


class _Given(NamedTuple):
    """What a plan takes from metadata: the route, and how many cores have tiles."""

    route: Route
    cores: int


def _read(metadata: Any, problem: AttentionProblem) -> _Given:
    """What stands in the metadata, after its check against the problem."""
    words = read_array("plan", "metadata", metadata)
    check_metadata("plan", words, problem, True)
    view = unpack(words)
    assert view.identity is not None  # else it would not be metadata of this problem
    assert view.grad is not None
    return _Given(view.identity.route, view.grad.used_cubes)


def parse_split(split: str | None) -> Split | None:
    """The split of that name; None stays None."""
    if split is None:
        return None
    names = {member.name.lower(): member for member in Split}
    if not isinstance(split, str) or split not in names:
        raise problem_error("plan", "split", f"must be None, {' or '.join(map(repr, names))}", repr(split))
    return names[split]


@lru_cache(maxsize=512)
def _plan(
    problem: AttentionProblem,
    target: Target,
    split: Split | None,
    given: _Given | None,
    softmax_scale: float,
    libapi_reserve_bytes: int,
) -> TilingPlan:
    choice = select_route(problem, target, split)
    route, cores = given or (choice.route, 0)
    native = _native.make_plan(
        problem=native_problem(problem),
        route=int(route),
        cube_cores=target.cube_cores,
        vector_cores=target.vector_cores,
        l2_bytes=target.l2_bytes,
        libapi_reserve_bytes=libapi_reserve_bytes,
        softmax_scale=softmax_scale or 1.0 / math.sqrt(problem.d),
    )
    key_problem = native["key_problem"]
    if key_problem and target.name != CPU_TARGET:
        raise UnsupportedError(
            f"plan: problem must have a compiled kernel on {target.name}, got D={problem.d}, "
            f"Dv={problem.dv}, layout={problem.layout} ({key_problem}). Run it on the CPU."
        )
    is_swizzle = native["is_swizzle"]
    rejected = "capability" if native["swizzle_is_capability"] else "preference"
    return TilingPlan(
        problem=problem,
        target=target,
        route=route,
        tiling_key=None if key_problem else native["tiling_key"],
        block_dim=max(native["block_dim"], min(cores, target.cube_cores)),
        is_swizzle=is_swizzle,
        workspace_bytes=native["workspace_bytes"],
        dq_offset=native["dq_offset"],
        dk_offset=native["dk_offset"],
        dv_offset=native["dv_offset"],
        tiling_data=native["tiling_data"],
        _grounds=_Grounds(
            choice if route is choice.route else None,
            "chosen" if is_swizzle else rejected,
            native["swizzle_reason"],
            key_problem,
        ),
    )
