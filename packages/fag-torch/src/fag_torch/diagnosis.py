"""`doctor()`: what is installed, what fits together, and which route a call would take here."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import torch

import fag_kernel
import fag_metadata
from fag_kernel import abi, cann
from fag_metadata import AttentionProblem, Target, UnsupportedError
from fag_metadata.terms import DEFAULT_TARGET, find_target
from fag_torch import coexist, contracts, npu_host, npu_routes
from fag_torch._version import __version__

if TYPE_CHECKING:
    from fag_torch.npu_routes import Direction

_OP: Final = "doctor"
_DIRECTIONS: Final[tuple[Direction, ...]] = ("forward", "backward")


def doctor(
    problem: AttentionProblem | None = None,
    *,
    dtype: str = "bfloat16",
    has_sinks: bool = False,
    has_dlse: bool = False,
    is_deterministic: bool | None = None,
    target: str | Target | None = None,
) -> dict[str, Any]:
    """Looks at this installation and machine, and at what would run a call on them.

    Nothing is imported or started for it; torch_npu is looked for, not loaded.

    Args:
        problem: What a call computes; None asks about no call.
        dtype: Its dtype: "float16", "bfloat16" or "float32".
        has_sinks: Whether it has sinks.
        has_dlse: Whether its backward gets a gradient of the lse.
        is_deterministic: Whether torch.use_deterministic_algorithms(True) is on; None looks.
        target: The NPU to ask about; None is the one that is there, else the default of fag-metadata.

    Returns:
        A dictionary of plain values, as `fag-torch doctor --json` prints it: packages and their versions,
        contracts, cpu (instruction-set levels, threads), npu (what is there, what is missing, state of each
        route), operators (who serves which dispatch key), route (what runs an ordinary call on each kind of
        device) and, with a problem, call (which route takes its forward and its backward on an NPU, and why
        others refuse).

    Raises:
        ValueError: There is no such target, or FAG_NPU_ROUTE names no route.

    Example:
        >>> doctor()["route"]["cpu"]
        'cpu'
        >>> sizes = {"batch_size": 1, "max_seqlen_q": 9, "max_seqlen_kv": 9}
        >>> report = doctor(AttentionProblem.from_metadata_args(8, 2, 256, **sizes))
        >>> report["call"]["backward"]["route"] is None
        True
    """
    report: dict[str, Any] = {
        "packages": {
            "fag-torch": __version__,
            "fag-kernel": fag_kernel.__version__,
            "fag-metadata": fag_metadata.__version__,
            "torch": torch.__version__,
            "torch_npu": _version("torch_npu"),
            "python": platform.python_version(),
        },
        "contracts": {
            "METADATA_FORMAT": _contract("METADATA_FORMAT", fag_metadata.FORMAT_VERSION),
            "KERNEL_ABI": _contract("KERNEL_ABI", fag_kernel.KERNEL_ABI),
            "torch": {
                "found": torch.__version__,
                "oldest": ".".join(map(str, contracts.OLDEST_TORCH)),
                "tested": contracts.TESTED_TORCH,
            },
        },
        "cpu": {
            "level": abi.cpu_level(),
            "levels": list(abi.cpu_levels()),
            "cap": os.environ.get("FAG_CPU_LEVEL"),
            "threads": torch.get_num_threads(),
        },
        "npu": _npu(),
        "operators": _operators(),
    }
    forced = npu_routes.parse_forced(_OP, os.environ.get(npu_routes.VARIABLE))
    able = [
        name for name, state in report["npu"]["routes"].items() if state["runs"] and forced in (None, name)
    ]
    report["route"] = {"cpu": "cpu", "npu": able[0] if able else None}
    if problem is not None:
        report["call"] = _call(
            problem, report["npu"]["soc"], forced, dtype, has_sinks, has_dlse, is_deterministic, target
        )
    return report


def _npu() -> dict[str, Any]:
    runtime = cann.missing_runtime()
    soc, why_not = None, runtime
    if runtime is None:
        try:
            soc = cann.soc_name()
            npu_routes.target_of_soc(_OP, soc)
        except (cann.CannError, UnsupportedError) as error:
            why_not = str(error)
    missing = {direction: npu_host.missing(direction) for direction in _DIRECTIONS}
    routes = {}
    for name in npu_routes.ROUTES:
        reasons = list(dict.fromkeys(reason for found in missing.values() for reason in found[name]))
        if runtime is None and why_not is not None:
            reasons.append(why_not)
        routes[name] = {"runs": not reasons, "missing": reasons}
    return {
        "present": npu_host.is_present(),
        "soc": soc,
        "torch_npu": _found(npu_host.missing_torch_npu()),
        "cann_runtime": _found(runtime),
        "cann_operators": _found(cann.missing_operator(cann.FORWARD) or cann.missing_operator(cann.GRAD)),
        "kernel_launcher": _found(cann.missing_launcher()),
        "kernel_compiler": _found(npu_host.missing_kernels()),
        "forced": os.environ.get(npu_routes.VARIABLE),
        "routes": routes,
    }


def _call(
    problem: AttentionProblem,
    soc: str | None,
    forced: str | None,
    dtype: str,
    has_sinks: bool,
    has_dlse: bool,
    is_deterministic: bool | None,
    target: str | Target | None,
) -> dict[str, Any]:
    machine = find_target(_OP, target or (soc if soc in fag_metadata.TARGETS else None) or DEFAULT_TARGET)
    if is_deterministic is None:
        is_deterministic = torch.are_deterministic_algorithms_enabled()
    report: dict[str, Any] = {"target": machine.name, "dtype": dtype}
    for direction in _DIRECTIONS:
        call = npu_routes.Call(
            problem, dtype, direction, has_sinks, has_dlse and direction == "backward", is_deterministic
        )
        choice = npu_routes.choose(call, machine, npu_host.missing(direction), forced)
        refusals = [refusal._asdict() for refusal in choice.refusals]
        report[direction] = {"route": choice.route, "refusals": refusals}
    return report


def as_text(report: dict[str, Any]) -> str:
    """The report of `doctor` for people, one fact a line."""
    packages, cpu, device = report["packages"], report["cpu"], report["npu"]
    lines = [f"{name:<14} {version or 'not installed'}" for name, version in packages.items()]
    for name in ("METADATA_FORMAT", "KERNEL_ABI"):
        contract = report["contracts"][name]
        low, high = contract["accepted"]
        accepted = str(low) if low == high else f"{low} to {high}"
        lines.append(f"{name:<14} {contract['found']} (accepted: {accepted})")
    cap = f", capped by FAG_CPU_LEVEL={cpu['cap']}" if cpu["cap"] else ""
    lines.append(f"{'cpu':<14} {cpu['level']} of {', '.join(cpu['levels'])}{cap}; {cpu['threads']} threads")
    lines.append(f"{'route on cpu':<14} {report['route']['cpu']}")
    forced = f"; {npu_routes.VARIABLE}={device['forced']}" if device["forced"] else ""
    lines.append(f"{'npu':<14} {device['soc'] or 'none'}")
    lines.append(f"{'route on npu':<14} {report['route']['npu'] or 'none'}{forced}")
    for name, state in device["routes"].items():
        lines += [f"  {name + ':':<12} {reason}" for reason in state["missing"] or ["ready"]]
    for direction in _DIRECTIONS if "call" in report else ():
        choice = report["call"][direction]
        lines.append(f"{direction + ' takes':<14} {choice['route'] or 'none'} on {report['call']['target']}")
        lines += [f"  {r['route'] + ':':<12} {r['reason']} ({r['kind']})" for r in choice["refusals"]]
    for name, state in report["operators"].items():
        lines.append(f"{name:<44} {', '.join(state['ours']) or 'served by another package'}")
    return "\n".join(lines)


def _version(module: str) -> str | None:
    """Version of an installed distribution, which is not imported; None if there is none."""
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        return None


def _contract(name: str, found: int) -> dict[str, Any]:
    return {"found": found, "accepted": list(contracts.ACCEPTS[name])}


def _found(missing: str | None) -> dict[str, Any]:
    return {"found": missing is None, "why": missing}


def _operators() -> dict[str, dict[str, Any]]:
    registrations = coexist.earlier_registrations()
    report: dict[str, dict[str, Any]] = {}
    for row in registrations.rows if registrations else ():
        entry = report.setdefault(f"{row.namespace}::{row.op}", {"ours": [], "arguments": "as documented"})
        entry["ours"].append(row.key)
    for name in registrations.foreign if registrations else ():
        report[name] = {"ours": [], "arguments": "defined by another package with other arguments"}
    return report
