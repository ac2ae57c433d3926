"""Optimised IR -> object for the device, on a host with CANN: the step that the shipped wheel leaves open.

`hivmc-a5` (part of CANN) is run once per kernel, at first use or by `fag-kernel build --finalize`. Objects
are cached per user, keyed by the content of the IR, the compiler and its options; a file lock keeps
processes from doing the work twice, and an object appears under its name only when it is complete.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from fag_kernel.ascend950.artefacts import BITCODE_FOLDER, manifest, read_ir
from fag_kernel.ascend950.errors import CompilerError

HIVMC: Final = "hivmc-a5"
#: As the vendor's own driver (bishengir-compile-a5 of ascendnpu-ir 1.2.0) calls it on the IR that it saves.
HIVMC_OPTIONS: Final = (
    "--enable-hfusion-compile=true",
    "--enable-triton-kernel-compile=true",
    "--only-run-hivm-pipeline=false",
)
_BITCODE_MARKER: Final = "meta_op.mix.aic.c310.bc"


def find_hivmc() -> Path | None:
    """CANN's compiler: FAG_HIVMC, PATH, then ASCEND_HOME_PATH or ASCEND_TOOLKIT_HOME; None if there is
    none.
    """
    explicit = os.environ.get("FAG_HIVMC")
    if explicit:
        return Path(explicit) if os.access(explicit, os.X_OK) else None
    found = shutil.which(HIVMC)
    if found:
        return Path(found)
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        home = os.environ.get(variable)
        if home:
            for folder in ("bin", "compiler/bin", "compiler/bishengir/bin", "bishengir/bin"):
                candidate = Path(home) / folder / HIVMC
                if os.access(candidate, os.X_OK):
                    return candidate
    return None


def _bitcode_folder(hivmc: Path) -> Path | None:
    """The vendor's device bitcode: FAG_BITCODE, beside the compiler, or in an installed ascendnpu-ir."""
    candidates = [hivmc.resolve().parent.parent / "lib", hivmc.resolve().parent / "lib"]
    explicit = os.environ.get("FAG_BITCODE")
    if explicit:
        candidates.insert(0, Path(explicit))
    try:
        import ascendnpuir
    except ImportError:
        pass
    else:
        candidates.append(Path(ascendnpuir.__file__).parent / "lib")
    return next((folder for folder in candidates if (folder / _BITCODE_MARKER).exists()), None)


def cache_folder() -> Path:
    """FAG_CACHE_DIR, else fag/ascend950 in the user's cache."""
    explicit = os.environ.get("FAG_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fag" / "ascend950"


@lru_cache(maxsize=4)
def _compiler_identity(hivmc: Path, modified: int, size: int) -> str:
    """What the compiler says about itself; its size stands in where it says nothing."""
    try:
        run = subprocess.run([str(hivmc), "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as reason:
        raise CompilerError(
            f"ascend950: {HIVMC} must run, got {reason} ({hivmc}). Try: {hivmc} --version"
        ) from None
    return f"{run.stdout}{run.stderr}{size}"


def object_file(kernel: str, dtype: str, *, target: str | None = None, data: Path | None = None) -> Path:
    """The device object of a kernel, made now if the cache has none.

    Args:
        kernel: Name in the manifest.
        dtype: "bf16" or "fp16": the entry whose manifest has it.
        target: SoC name for the compiler; None = the one that the IR was made for.
        data: Folder of the shipped files; None = the installed ones.

    Returns:
        Path of the object in the cache. It is complete, whoever made it.

    Raises:
        ValueError: The manifest has no such kernel.
        ArtefactError: The shipped IR is missing or damaged.
        CompilerError: CANN is missing, or its compiler fails; the message has the command to run.
    """
    contents = manifest(dtype, data)
    record = contents["kernels"].get(kernel)
    if record is None:
        raise ValueError(
            f"ascend950: kernel must be in the manifest of {dtype}, got {kernel!r}. See `fag-kernel info`."
        )
    ir = read_ir(record, data)
    hivmc = find_hivmc()
    if hivmc is None:
        raise CompilerError(
            f"ascend950: {HIVMC} must be found to finish {kernel}, got none. It comes with CANN: run `source "
            "${ASCEND_HOME_PATH}/set_env.sh`, or set FAG_HIVMC to its path, then `fag-kernel build "
            "--finalize`. Without CANN, use the CPU kernels."
        )
    status = hivmc.stat()
    identity = _compiler_identity(hivmc, status.st_mtime_ns, status.st_size)
    target = target or contents["target"]
    key = sha256("\0".join([record["ir"]["sha256"], identity, target, *HIVMC_OPTIONS]).encode()).hexdigest()
    folder = cache_folder()
    result = folder / f"{kernel}-{key[:20]}.o"
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{kernel}-{key[:20]}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.exists():  # another process may have made it while this one waited
                _compile(kernel, ir, target, hivmc, result)
    return result


def _compile(kernel: str, ir: str, target: str, hivmc: Path, result: Path) -> None:
    bitcode = _bitcode_folder(hivmc)
    if BITCODE_FOLDER in ir and bitcode is None:
        raise CompilerError(
            f"ascend950: device bitcode ({_BITCODE_MARKER}) must be found to finish {kernel}, got none "
            f"beside {hivmc}. Set FAG_BITCODE to its folder, or: pip install ascendnpu-ir==1.2.0"
        )
    with tempfile.TemporaryDirectory(prefix=f".{kernel}-", dir=result.parent) as scratch:
        source = Path(scratch) / f"{kernel}.mlir"
        source.write_text(ir.replace(BITCODE_FOLDER, str(bitcode)))
        output = Path(scratch) / "kernel"
        command = [str(hivmc), str(source), f"--target={target}", *HIVMC_OPTIONS, "-o", str(output)]
        try:
            run = subprocess.run(command, capture_output=True, text=True)
        except OSError as reason:
            raise CompilerError(
                f"ascend950: {HIVMC} must run, got {reason}. Run: {shlex.join(command)}"
            ) from None
        made = next((path for path in _outputs(output) if path.exists() and path.stat().st_size), None)
        if run.returncode != 0 or made is None:
            kept = result.with_suffix(".mlir")
            shutil.copyfile(source, kept)
            command[1], command[-1] = str(kept), "kernel"
            detail = (run.stderr or run.stdout).strip().splitlines()[-3:]
            raise CompilerError(
                f"ascend950: {HIVMC} must finish {kernel}, got exit status {run.returncode} and "
                f"{'no object' if made is None else 'an object'}: {' | '.join(detail) or 'no message'}. "
                f"To see it: {shlex.join(command)}"
            )
        os.replace(made, result)


def _outputs(output: Path) -> tuple[Path, ...]:
    """Where versions of the compiler put the object."""
    return output.with_suffix(".o"), output.with_name("kernel_reloc.o"), output


def finalize_all(dtype: str | None = None, key: int | None = None) -> list[Path]:
    """Objects of all kernels, or of one type or key."""
    paths = []
    for each in (dtype,) if dtype else ("bf16", "fp16"):
        contents = manifest(each)
        names: list[str] = list(contents["kernels"])
        if key is not None:
            names = _names_of_key(contents, key)
        paths += [object_file(name, each) for name in names]
    return paths


def _names_of_key(contents: dict[str, Any], key: int) -> list[str]:
    for record in contents["tiling_keys"]:
        if record["tiling_key"] == key:
            steps = [*(step for form in record["launches"].values() for step in form), record["sinks"]]
            return list(dict.fromkeys(step["kernel"] for step in steps))
    raise ValueError(f"ascend950: tiling_key must be in the manifest, got {key}. See `fag-kernel info`.")
