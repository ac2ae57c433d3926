"""`doctor()`: what is installed, what fits together, and which route a call would take here."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import fag_kernel
import fag_metadata
from fag_kernel import abi
from fag_torch import coexist, contracts, npu
from fag_torch._version import __version__


def doctor() -> dict[str, Any]:
    """Looks at this installation and machine.

    Nothing is imported or started for it; torch_npu is looked for, not loaded.

    Returns:
        A dictionary of plain values, as `fag-torch doctor --json` prints it: packages and their versions,
        contracts, cpu (instruction-set levels, threads), npu (what is there, what is missing, state of each
        route), operators (who serves which dispatch key), and route (what runs a call on each kind of
        device).

    Example:
        >>> doctor()["route"]["cpu"]
        'cpu'
    """
    states = npu.routes()
    able = [state.name for state in states if not state.missing]
    return {
        "packages": {
            "fag-torch": __version__,
            "fag-kernel": fag_kernel.__version__,
            "fag-metadata": fag_metadata.__version__,
            "torch": torch.__version__,
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
        "npu": {
            "present": npu.is_present(),
            "torch_npu": _found(npu.missing_torch_npu()),
            "cann_runtime": _found(npu.missing_runtime()),
            "cann_operators": _found(npu.missing_custom_package()),
            "compiled_kernels": _found(npu.missing_kernels()),
            "routes": {
                state.name: {"runs": not state.missing, "missing": list(state.missing)} for state in states
            },
        },
        "operators": _operators(),
        "route": {"cpu": "cpu", "npu": able[0] if able else None},
    }


def as_text(report: dict[str, Any]) -> str:
    """The report of `doctor` for people, one fact a line."""
    packages, cpu, device = report["packages"], report["cpu"], report["npu"]
    lines = [f"{name:<14} {version}" for name, version in packages.items()]
    for name in ("METADATA_FORMAT", "KERNEL_ABI"):
        contract = report["contracts"][name]
        low, high = contract["accepted"]
        accepted = str(low) if low == high else f"{low} to {high}"
        lines.append(f"{name:<14} {contract['found']} (accepted: {accepted})")
    cap = f", capped by FAG_CPU_LEVEL={cpu['cap']}" if cpu["cap"] else ""
    lines.append(f"{'cpu':<14} {cpu['level']} of {', '.join(cpu['levels'])}{cap}; {cpu['threads']} threads")
    lines.append(f"{'route on cpu':<14} {report['route']['cpu']}")
    lines.append(f"{'route on npu':<14} {report['route']['npu'] or 'none'}")
    for name, state in device["routes"].items():
        lines += [f"  {name + ':':<12} {reason}" for reason in state["missing"] or ["ready"]]
    for name, state in report["operators"].items():
        lines.append(f"{name:<44} {', '.join(state['ours']) or 'served by another package'}")
    return "\n".join(lines)


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
