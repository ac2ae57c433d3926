"""`fag-kernel build`: compile the kernels and write the shipped files."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fag_kernel.ascend950 import artefacts
from fag_kernel.ascend950.binary_config import TYPE_NAMES, make_binary_json
from fag_kernel.ascend950.catalog import (
    DTYPES,
    FORMS,
    GRID_RULES,
    PARAMETERS,
    TILING_RULE,
    DType,
    Kernel,
    all_kernels,
    forward_kernels,
    launches,
)
from fag_kernel.ascend950.compile import ARCH, OPTIONS, TARGET, Compiled, compile_all, tool_versions
from fag_kernel.ascend950.errors import CompilerError
from fag_kernel.ascend950.tile_table import MEMORY_KIB
from fag_kernel.tiling_key import TilingKey, valid_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

WORKSPACE_RULES = {
    "accumulate": (
        "TilingPlan.workspace_bytes; the kernel's `workspace` is its address plus TilingPlan.dq_offset"
    ),
    "none": "0 bytes",
}


class Progress:
    """One line per kernel in a log, a bar on a terminal."""

    def __init__(self, total: int, out: TextIO | None = None) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._out = out or sys.stderr

    def __call__(self, result: Compiled | CompilerError) -> None:
        """Count and show one result."""
        self._done += 1
        text = str(result) if isinstance(result, CompilerError) else memory_line(result.name, result.memory)
        if self._out.isatty():
            filled = 30 * self._done // self._total
            seconds = int(time.monotonic() - self._start)
            text = (
                f"\r\x1b[2K[{'=' * filled}{' ' * (30 - filled)}] {self._done}/{self._total} {seconds}s {text}"
            )
            self._out.write(text + ("\n" if isinstance(result, CompilerError) else ""))
        else:
            self._out.write(f"[{self._done}/{self._total}] {text}\n")
        self._out.flush()

    def close(self) -> None:
        """End the bar."""
        if self._out.isatty():
            self._out.write("\n")


def memory_line(name: str, memory: dict[str, float]) -> str:
    """A kernel's on-chip use, as in "UB 241.5/248 L1 240/512"."""
    use = " ".join(
        f"{space} {memory[space]:g}/{limit}" for space, limit in MEMORY_KIB.items() if memory.get(space)
    )
    return f"{name}: {use} KiB"


def selected(dtype: DType | None, key: int | None) -> dict[str, Kernel]:
    """The kernels of one type, of one tiling key, or all."""
    if key is None:
        return {
            name: kernel
            for name, kernel in all_kernels().items()
            if dtype is None or kernel.dtype in (None, dtype)
        }
    return {
        step.kernel.name: step.kernel
        for each in ([dtype] if dtype else DTYPES)
        for form in FORMS
        for step in launches(key, each, form, has_sinks=True)
    }


def build(
    *,
    dtype: DType | None = None,
    key: int | None = None,
    jobs: int = 2,
    out: Path | None = None,
    cache: Path | None = None,
    names: Iterable[str] | None = None,
    is_written: bool = True,
) -> dict[str, Compiled]:
    """Compile and, if everything was asked for, write the shipped files.

    Args:
        dtype: "bf16", "fp16", or None for both.
        key: One tiling key, or None for all and the forward.
        jobs: Compiler processes.
        out: Folder of the files; None = the package's own. Written only if nothing restricts the set.
        cache: Folder for compiled IR by content, so that a second build compiles what changed; None = none.
        names: Only these of the kernels.
        is_written: False compiles and writes nothing.

    Returns:
        What was compiled, by name.

    Raises:
        CompilerError: The toolchain is missing, or a kernel does not compile or fit.
        ValueError: Unknown key or dtype.
    """
    versions = tool_versions()
    kernels = selected(dtype, key)
    if names is not None:
        wanted = set(names)
        kernels = {name: kernel for name, kernel in kernels.items() if name in wanted}
    progress = Progress(len(kernels))
    compiled = compile_all(kernels.values(), jobs=jobs, cache=cache, done=progress)
    progress.close()
    if is_written and dtype is None and key is None and names is None:
        write(out or artefacts.DATA, compiled, versions)
    return compiled


def write(data: Path, compiled: dict[str, Compiled], versions: dict[str, str]) -> None:
    """Write binary JSON, manifests and packed IR of a complete build."""
    kernels = all_kernels()
    groups = {
        name: f"{kernel.source.split('.')[1].removesuffix('_kernel')}_{kernel.dtype or 'any'}"
        for name, kernel in kernels.items()
    }
    passes = {name for name, kernel in kernels.items() if kernel.source.startswith("passes.")}
    places = artefacts.pack(
        data, {name: ("passes" if name in passes else groups[name], compiled[name].ir) for name in kernels}
    )
    (data / artefacts.BINARY_JSON).write_text(json.dumps(make_binary_json(), indent=1) + "\n")
    for dtype in DTYPES:
        records = {
            name: kernel_record(kernel, compiled[name], places[name])
            for name, kernel in kernels.items()
            if kernel.dtype in (None, dtype)
        }
        _write_json(
            data / f"{artefacts.entry_name(dtype)}.json",
            {
                "format": artefacts.MANIFEST_FORMAT,
                "bin_filename": artefacts.entry_name(dtype),
                "dtype": TYPE_NAMES[dtype],
                "arch": ARCH,
                "target": TARGET,
                "compilers": versions,
                "compiler_options": list(OPTIONS),
                "grid_rules": GRID_RULES,
                "workspace_rules": WORKSPACE_RULES,
                "tiling_rule": TILING_RULE,
                "memory_kib": MEMORY_KIB,
                "tiling_keys": [key_record(key, dtype) for key in valid_keys()],
                "forward": [kernel.name for kernel in forward_kernels() if kernel.dtype == dtype],
                "kernels": records,
            },
        )


def key_record(key: int, dtype: DType) -> dict[str, Any]:
    """What a tiling key launches."""
    fields = TilingKey.decode(key)
    return {
        "tiling_key": key,
        "name": fields.name,
        "workspace": "accumulate" if fields.template == "BN2GS1S2" else "none",
        "launches": {form: [step.record for step in launches(key, dtype, form)] for form in FORMS},
        "sinks": launches(key, dtype, FORMS[0], has_sinks=True)[-1].record,
    }


def kernel_record(kernel: Kernel, compiled: Compiled, place: dict[str, Any]) -> dict[str, Any]:
    """What a launcher must know of a kernel."""
    symbols = (
        [f"{kernel.name}_mix_aic", f"{kernel.name}_mix_aiv"] if kernel.core_type == "mix" else [kernel.name]
    )
    return {
        "name": kernel.name,
        "symbols": symbols,
        "source": kernel.source,
        "constants": dict(kernel.constants),
        "core_type": kernel.core_type,
        "grid": kernel.grid,
        "parameters": [
            *artefacts.LAUNCH_PREFIX,
            *(PARAMETERS[name][0] for name in kernel.parameters),
            *artefacts.LAUNCH_SUFFIX,
        ],
        "memory_kib": {space: round(used, 3) for space, used in sorted(compiled.memory.items())},
        "ir": place,
    }


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    """Write JSON with a line per top-level value, and one per record where a value is a table of records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, value in contents.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            text = f"[\n{rows}\n ]"
        elif isinstance(value, dict) and any(isinstance(row, dict) for row in value.values()):
            rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in value.items())
            text = f"{{\n{rows}\n }}"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(name)}: {text}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
