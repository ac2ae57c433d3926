"""`fag-kernel build`, `fag-kernel verify` and the kernel table of `fag-kernel info`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fag_kernel.ascend950 import artefacts
from fag_kernel.ascend950.catalog import DTYPES, all_kernels, sample_kernels
from fag_kernel.ascend950.entries import kernels
from fag_kernel.ascend950.errors import ArtefactError
from fag_kernel.ascend950.tile_table import MEMORY_KIB
from fag_kernel.ascend950.verify import verify

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


def add_commands(commands: Any, informer: argparse.ArgumentParser) -> None:
    """Add the sub-commands to `fag-kernel` and the table to its `info`."""
    builder = commands.add_parser(
        "build",
        help="compile the Ascend 950 kernels, or finish the shipped ones with CANN",
        description="Compile Triton sources to optimised IR (needs the extra ascend950-build), or with "
        "--finalize the shipped IR to device objects (needs CANN).",
    )
    builder.add_argument(
        "--soc", choices=("ascend950",), default="ascend950", help="family; default ascend950"
    )
    builder.add_argument("--dtype", choices=DTYPES, help="only this type")
    builder.add_argument("--key", type=int, metavar="N", help="only the kernels of this tiling key")
    builder.add_argument("--jobs", type=int, default=2, metavar="J", help="compiler processes; default 2")
    builder.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the files; default: the package's own"
    )
    builder.add_argument(
        "--cache", type=Path, metavar="DIR", help="keep IR by content, to compile only what changed"
    )
    builder.add_argument("--sample", action="store_true", help="one kernel per family, mask and head dim")
    builder.add_argument(
        "--compare", action="store_true", help="write nothing; fail if the IR is not the shipped one"
    )
    builder.add_argument("--finalize", action="store_true", help="make device objects from the shipped IR")
    builder.set_defaults(run=run_build)
    verifier = commands.add_parser("verify", help="check the shipped Ascend 950 files: hashes, schema, keys")
    verifier.set_defaults(run=run_verify)
    informer.add_argument(
        "--kernels", action="store_true", help="table of the Ascend 950 kernels and their memory"
    )
    informer.add_argument("--model", action="store_true", help="the time model beside published timings")


def run_build(arguments: argparse.Namespace) -> None:
    """Compile, compare or finish."""
    if arguments.finalize:
        from fag_kernel.ascend950.finalize import finalize_all

        for path in finalize_all(arguments.dtype, arguments.key):
            print(path)
        return
    from fag_kernel.ascend950.build import build

    names = [kernel.name for kernel in sample_kernels()] if arguments.sample else None
    compiled = build(
        dtype=arguments.dtype,
        key=arguments.key,
        jobs=arguments.jobs,
        out=arguments.out,
        cache=arguments.cache,
        names=names,
        is_written=not arguments.compare,
    )
    print(f"{len(compiled)} of {len(all_kernels())} kernels compiled; every one fits on chip")
    if arguments.compare:
        compare({name: result.ir for name, result in compiled.items()})
        print(f"{len(compiled)} kernels are the shipped ones, byte for byte")


def compare(ir: dict[str, str]) -> None:
    """Compare freshly compiled IR with what is shipped.

    Raises:
        ArtefactError: A kernel differs, or is not shipped.
    """
    shipped = {
        name: record for dtype in DTYPES for name, record in artefacts.manifest(dtype)["kernels"].items()
    }
    odd = [
        name for name, text in ir.items() if name not in shipped or artefacts.read_ir(shipped[name]) != text
    ]
    if odd:
        raise ArtefactError(
            f"ascend950: shipped IR must be what the sources compile to, got a difference in {len(odd)} "
            f"kernels: {', '.join(odd[:4])}. Run `fag-kernel build`."
        )


def run_verify(arguments: argparse.Namespace) -> None:
    """Check the shipped files and say what was checked."""
    print("\n".join(verify()))


def info_values() -> list[dict[str, Any]]:
    """One row per shipped entry, for JSON."""
    return [{"dtype": entry.dtype, "tiling_key": entry.tiling_key, "name": entry.name} for entry in kernels()]


def summary() -> str:
    """One line on what is shipped."""
    try:
        versions = artefacts.manifest("bf16")["compilers"]
        entries = kernels()
    except ArtefactError as reason:
        return f"none: {reason}"
    keys = len({entry.tiling_key for entry in entries})
    tools = ", ".join(f"{tool} {version}" for tool, version in versions.items())
    return f"Ascend 950: {keys} tiling keys in {' and '.join(DTYPES)} as IR ({tools}); CANN finishes them"


def kernel_lines() -> Iterator[str]:
    """The kernels of each entry with tile and on-chip use."""
    spaces = [space for space in MEMORY_KIB if space not in ("L0A", "L0B")]
    yield "On-chip use in KiB as the compiler placed it; L0A and L0B belong to its matrix library (64 each)."
    for dtype in DTYPES:
        contents = artefacts.manifest(dtype)
        yield ""
        yield f"{contents['bin_filename']} ({contents['target']}, {contents['arch']})"
        heads = "".join(f"{f'{space}/{MEMORY_KIB[space]}':>11}" for space in spaces)
        yield f"  {'kernel':<50}{'tile':>9}{heads}"
        for name, record in contents["kernels"].items():
            constants = record["constants"]
            tile = "x".join(str(constants[size]) for size in ("BM", "BN", "CHUNK") if size in constants)
            use = "".join(f"{record['memory_kib'].get(space, 0):>11g}" for space in spaces)
            yield f"  {name:<50}{tile:>9}{use}"
        yield f"  {'tiling key':<50}launches (accumulate | deterministic)"
        for entry in contents["tiling_keys"]:
            forms = " | ".join(
                ", ".join(step["stage"] for step in steps) for steps in entry["launches"].values()
            )
            yield f"  {entry['tiling_key']:>5} {entry['name']:<44}{forms}"


def model_lines() -> Iterator[str]:
    """The time model beside the published timings."""
    from fag_kernel.ascend950.model import compare_with_published

    yield "A MODEL of these kernels, not a measurement; published: CANN's kernel on 36 cores, D = 128."
    yield from compare_with_published()


def run_info(arguments: argparse.Namespace) -> bool:
    """Print the tables that were asked for; False if none was."""
    if arguments.kernels:
        sys.stdout.writelines(f"{line}\n" for line in kernel_lines())
    if arguments.model:
        sys.stdout.writelines(f"{line}\n" for line in model_lines())
    return bool(arguments.kernels or arguments.model)
