"""The shipped kernels as a launcher sees them: by type and tiling key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fag_kernel.ascend950.artefacts import manifest
from fag_kernel.ascend950.catalog import DTYPES, FORMS


@dataclass(frozen=True)
class Step:
    """One launch of a gradient.

    Attributes:
        stage: "zero", "main", "columns", "rows", "cast" or "sinks".
        kernel: Name in the manifest.
        core_type: "mix" or "vector".
        grid: Rule for the number of blocks: used_cube_cores, cube_cores or vector_cores.
        parameters: Launch arguments in order.
    """

    stage: str
    kernel: str
    core_type: str
    grid: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class KernelEntry:
    """What is shipped for a type and a tiling key.

    Attributes:
        dtype: "bf16" or "fp16".
        tiling_key: The key.
        name: The key by name.
        accumulate: Launches of the form with float32 atomics.
        deterministic: Launches of the form without.
        sinks: The launch behind either form that makes the gradient of the sinks.
        needs_workspace: Whether the accumulate form uses the plan's workspace.
    """

    dtype: str
    tiling_key: int
    name: str
    accumulate: tuple[Step, ...]
    deterministic: tuple[Step, ...]
    sinks: Step
    needs_workspace: bool


def step_record(kernel: str, dtype: str) -> dict[str, Any]:
    """A kernel's record in the manifest: symbols, parameters, memory, place of its IR.

    Raises:
        ValueError: The manifest has no such kernel.
    """
    records: dict[str, dict[str, Any]] = manifest(dtype)["kernels"]
    if kernel not in records:
        raise ValueError(
            f"ascend950: kernel must be in the manifest of {dtype}, got {kernel!r}. See `fag-kernel info`."
        )
    return records[kernel]


def _steps(contents: dict[str, Any], launches: list[dict[str, str]]) -> tuple[Step, ...]:
    return tuple(
        Step(
            launch["stage"],
            launch["kernel"],
            contents["kernels"][launch["kernel"]]["core_type"],
            contents["kernels"][launch["kernel"]]["grid"],
            tuple(contents["kernels"][launch["kernel"]]["parameters"]),
        )
        for launch in launches
    )


def kernels(dtype: str | None = None) -> tuple[KernelEntry, ...]:
    """What is shipped, one entry per type and valid tiling key.

    Args:
        dtype: "bf16", "fp16", or None for both.

    Raises:
        ValueError: Another dtype.
        ArtefactError: A manifest is missing or damaged.

    Example:
        >>> len(kernels()), kernels("fp16")[0].name
        (112, 'BN2GS1S2-dense-full-d64-dv128')
    """
    entries = []
    for each in DTYPES if dtype is None else (dtype,):
        contents = manifest(each)
        for record in contents["tiling_keys"]:
            steps = {form: _steps(contents, record["launches"][form]) for form in FORMS}
            entries.append(
                KernelEntry(
                    each,
                    record["tiling_key"],
                    record["name"],
                    steps["accumulate"],
                    steps["deterministic"],
                    _steps(contents, [record["sinks"]])[0],
                    record["workspace"] == "accumulate",
                )
            )
    return tuple(entries)


def find(tiling_key: int, dtype: str) -> KernelEntry:
    """The entry of a tiling key.

    Raises:
        ValueError: No kernel is shipped for the key, or another dtype.
        ArtefactError: The manifest is missing or damaged.

    Example:
        >>> [step.stage for step in find(72, "bf16").deterministic]
        ['zero', 'columns', 'rows']
    """
    shipped = kernels(dtype)
    for entry in shipped:
        if entry.tiling_key == tiling_key:
            return entry
    raise ValueError(
        f"ascend950: tiling_key must be one of the {len(shipped)} shipped keys, got {tiling_key}. "
        "`fag-kernel info` lists them."
    )
