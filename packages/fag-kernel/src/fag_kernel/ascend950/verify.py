"""`fag-kernel verify`: the shipped files against their hashes, the binary JSON's structure, and the host's
keys.
"""

from __future__ import annotations

import re
from pathlib import Path

from fag_kernel.ascend950 import artefacts
from fag_kernel.ascend950.binary_config import make_binary_json
from fag_kernel.ascend950.catalog import DTYPES, FORMS, all_kernels, forward_kernels, launches
from fag_kernel.ascend950.errors import ArtefactError
from fag_kernel.ascend950.tile_table import MEMORY_KIB
from fag_kernel.tiling_key import valid_keys


def atomic_stores(ir: str) -> tuple[int, int]:
    """(stores to device memory, those of them that add atomically) in optimised IR.

    The compiler passes the kind to its store functions as their last argument: 0 none, 1 add.
    """
    kinds: list[int] = []
    constants: dict[str, int] = {}
    for line in ir.splitlines():
        if "func.func @" in line:
            constants = {}
        elif "llvm.mlir.constant(" in line:
            constant = re.match(r"\s*(%\w+) = llvm\.mlir\.constant\((-?\d+) : i32\)", line)
            if constant:
                constants[constant[1]] = int(constant[2])
        elif "call @store_ubuf_to_gm_" in line:
            arguments = line[line.index("(") + 1 : line.index(")")]
            kinds.append(constants[arguments.split(", ")[-1]])
    return len(kinds), sum(kind != 0 for kind in kinds)


def verify(data: Path | None = None) -> list[str]:
    """Check every shipped file.

    Args:
        data: Folder of the files; None = the installed ones.

    Returns:
        What was checked, one line each.

    Raises:
        ArtefactError: Something is missing or differs; the message names all of it.
    """
    folder = data or artefacts.DATA
    wrong: list[str] = []
    if artefacts.read_json(folder / artefacts.BINARY_JSON) != make_binary_json():
        wrong.append(f"{artefacts.BINARY_JSON} must be the specified configuration, it differs")
    checked, total = 0, 0
    for dtype in DTYPES:
        contents = artefacts.manifest(dtype, folder)
        name = f"{artefacts.entry_name(dtype)}.json"
        shipped = [record["tiling_key"] for record in contents["tiling_keys"]]
        if shipped != list(valid_keys()):
            odd = sorted(set(shipped) ^ set(valid_keys()))
            wrong.append(f"{name} must have the host's {len(valid_keys())} keys, got a difference in {odd}")
        records = contents["kernels"]
        expected = [kernel for kernel in all_kernels().values() if kernel.dtype in (None, dtype)]
        if sorted(records) != sorted(kernel.name for kernel in expected):
            odd_names = sorted(set(records) ^ {kernel.name for kernel in expected})
            wrong.append(f"{name} must have the catalogue's kernels, got a difference in {odd_names[:4]}")
        if contents["forward"] != [kernel.name for kernel in forward_kernels() if kernel.dtype == dtype]:
            wrong.append(f"{name} must list the forward kernels, it differs")
        for record in contents["tiling_keys"]:
            key = record["tiling_key"]
            for form in FORMS if key in valid_keys() else ():
                steps = [step.record for step in launches(key, dtype, form, has_sinks=True)]
                shipped_steps = [*record["launches"][form], record["sinks"]]
                if shipped_steps != steps:
                    wrong.append(f"{name}, key {key}, {form} must launch {steps}, got {shipped_steps}")
        # file by file, so that each is unpacked once
        for kernel in sorted(expected, key=lambda kernel: kernel.source):
            record = records.get(kernel.name)
            if record is None:
                continue
            if record["constants"] != dict(kernel.constants):
                wrong.append(
                    f"{kernel.name} must have the constants {dict(kernel.constants)}, got "
                    f"{record['constants']}"
                )
            over = {s: used for s, used in record["memory_kib"].items() if used > MEMORY_KIB[s]}
            if over:
                wrong.append(f"{kernel.name} must fit on chip, got {over} KiB")
            try:
                text = artefacts.read_ir(record, folder)
            except ArtefactError as reason:
                wrong.append(str(reason))
                continue
            wrong += [
                f"{kernel.name} must define {symbol}, its IR does not"
                for symbol in record["symbols"]
                if f"func.func @{symbol}(" not in text
            ]
            stores, atomic = atomic_stores(text)
            wanted = 3 if kernel.source == "bn2gs1s2.accumulate_kernel" else 0
            if stores == 0 or atomic != wanted:
                wrong.append(f"{kernel.name} must have {wanted} atomic stores, got {atomic} of {stores}")
            checked += 1
            total += len(text)
    if wrong:
        raise ArtefactError("ascend950: shipped files must be whole, got\n  " + "\n  ".join(wrong))
    return [
        f"{artefacts.BINARY_JSON}: as specified, {len(DTYPES)} entries",
        f"keys: {len(valid_keys())} per entry, the ones that the host can produce",
        f"IR: {checked} kernels, {total / 2**20:.1f} MiB unpacked, every sha256 right",
    ]
