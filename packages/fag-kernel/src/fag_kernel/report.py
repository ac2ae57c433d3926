"""What the command line shows of a plan and of this installation, as text and as values for JSON."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import fag_metadata
from fag_kernel import _native, abi
from fag_kernel._version import __version__
from fag_kernel.ascend950 import cli
from fag_kernel.contract import ACCEPTS, KERNEL_ABI, METADATA_REQUIREMENT
from fag_kernel.tiling_key import valid_keys
from fag_metadata.arguments import INPUT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fag_kernel.plan import TilingPlan

_VERDICTS = {"chosen": "chosen", "capability": "cannot", "preference": "not wanted"}


def plan_values(plan: TilingPlan) -> dict[str, Any]:
    """A plan as values for JSON; the tiling data by name and as hexadecimal bytes."""
    return {
        "target": plan.target.name,
        "route": plan.route.name,
        "trace": [row._asdict() for row in plan.trace],
        "tiling_key": plan.tiling_key,
        "tiling_key_name": None if plan.key is None else plan.key.name,
        "block_dim": plan.block_dim,
        "is_swizzle": plan.is_swizzle,
        "workspace_bytes": plan.workspace_bytes,
        "dq_offset": plan.dq_offset,
        "dk_offset": plan.dk_offset,
        "dv_offset": plan.dv_offset,
        "tiling_data": plan.fields._asdict(),
        "tiling_data_hex": plan.tiling_data.hex(),
    }


def plan_lines(plan: TilingPlan) -> Iterator[str]:
    """A plan as text, one line after the other."""
    problem, target = plan.problem, plan.target
    yield (
        f"problem      {problem.layout}, B={problem.b}, N1={problem.n1}, N2={problem.n2}, D={problem.d}, "
        f"Dv={problem.dv}, S1={problem.s1}, S2={problem.s2}, {problem.mask_mode.name}"
    )
    cache = f"L2 {target.l2_bytes >> 20} MiB" if target.l2_bytes else "L2 unknown"
    cores = f"{target.cube_cores} cube and {target.vector_cores} vector cores"
    yield f"target       {target.name}: {cores}, {cache}"
    yield f"route        {plan.route.name}"
    for row in plan.trace:
        if row.stage == "route":
            yield f"             {_VERDICTS[row.verdict]:<11}{row.name:<13} {row.reason}"
    swizzle = next(row for row in plan.trace if row.stage == "swizzle")
    yield f"swizzle      {_VERDICTS[swizzle.verdict]}: {swizzle.reason}"
    if plan.key is None:
        yield f"tiling key   none: {plan.trace[-1].reason}"
    else:
        yield f"tiling key   {plan.tiling_key} = {plan.key.name}"
    yield f"block dim    {plan.block_dim} of {target.cube_cores} cores"
    yield (
        f"workspace    {plan.workspace_bytes} bytes; dq at {plan.dq_offset}, dk at {plan.dk_offset}, "
        f"dv at {plan.dv_offset}"
    )
    yield f"tiling data  {len(plan.tiling_data)} bytes"
    for name, value in plan.fields._asdict().items():
        yield f"             {name:<20}{value}"


def info_values() -> dict[str, Any]:
    """This installation as values for JSON."""
    return {
        "version": __version__,
        "kernel_abi": KERNEL_ABI,
        "accepts": {name: list(versions) for name, versions in ACCEPTS.items()},
        "fag_metadata": fag_metadata.__version__,
        "metadata_format": fag_metadata.FORMAT_VERSION,
        "cpu_levels": list(abi.cpu_levels()),
        "cpu_levels_only_by_name": _native.cpu_levels_only_by_name(),
        "cpu_level": abi.cpu_level(),
        "cpu_level_cap": os.environ.get("FAG_CPU_LEVEL"),
        "dtypes": list(INPUT_DTYPES),
        "tiling_keys": list(valid_keys()),
        "device_kernels": cli.info_values(),
    }


def info_lines() -> Iterator[str]:
    """This installation as text."""
    info = info_values()
    low, high = ACCEPTS["METADATA_FORMAT"]
    cap = info["cpu_level_cap"]
    yield f"fag-kernel       {info['version']}, KERNEL_ABI {info['kernel_abi']}"
    yield (
        f"fag-metadata     {info['fag_metadata']} ({METADATA_REQUIREMENT}), METADATA_FORMAT "
        f"{info['metadata_format']} (works with {low}{'' if low == high else f' to {high}'})"
    )
    yield f"CPU kernels      {', '.join(info['dtypes'])}; forward and gradient"
    yield f"CPU levels       {', '.join(info['cpu_levels'])}"
    for level, reason in info["cpu_levels_only_by_name"].items():
        yield f"only by name     {level}: {reason}"
    yield f"level in use     {info['cpu_level']}{'' if cap is None else f' (FAG_CPU_LEVEL={cap})'}"
    yield f"host tiling      Ascend 950, {len(info['tiling_keys'])} tiling keys"
    yield f"device kernels   {cli.summary()}"
