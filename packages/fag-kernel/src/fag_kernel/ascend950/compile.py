"""Triton source -> linalg (triton-ascend) -> optimised IR for Ascend 950 (the vendor's bishengir-compile-a5).

The chain stops at the vendor's last IR: IR to machine code needs CANN (finalize.py). Compiled in tuning
mode, in which the compiler fails where it would otherwise retry with fewer optimisations: what passes fits
on chip as it stands, multi-buffering included.

Needs the toolchain of constraints/ascend950.txt, which must not share an environment with stock Triton.
Nothing else in this package imports it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from fag_kernel.ascend950.artefacts import BITCODE_FOLDER
from fag_kernel.ascend950.catalog import PARAMETERS, Kernel
from fag_kernel.ascend950.errors import CompilerError
from fag_kernel.ascend950.tile_table import MEMORY_KIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Every Ascend 950 has this architecture; the variants differ in the number of cores, which no kernel knows.
ARCH: Final = "dav-c310"
TARGET: Final = "Ascend950PR_9589"
TOOLS: Final = ("triton-ascend", "ascendnpu-ir")
OPTIONS: Final = (
    f"--target={TARGET}",
    "--enable-hfusion-compile=true",
    "--enable-triton-kernel-compile=true",
    "--enable-auto-multi-buffer=true",
    "--enable-tuning-mode=true",
    "--enable-print-memory-allocated-size",
)
#: On several threads triton-ascend's compiler crashes at random, with some kernels once in 12 runs. On one
#: thread it writes the same text, and did not crash in 1800 runs.
_ONE_THREAD: Final = "--mlir-disable-threading"
REMEDY: Final = (
    "Install the toolchain into an environment of its own: pip install 'fag-kernel[ascend950-build]', or "
    "run `tox run -e ascend950`."
)
_POINTERS: Final = {"float32": "*fp32", "int32": "*i32", "int64": "*i64"}
_BYTES: Final = {"f32": 4, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "i16": 2, "i8": 1, "i1": 1}
_SPACES: Final = {"ub": "UB", "cbuf": "L1", "ca": "L0A", "cb": "L0B", "cc": "L0C"}


@dataclass(frozen=True)
class Compiled:
    """A kernel's optimised IR and what it uses on chip.

    Attributes:
        name: Symbol.
        ir: Text, free of paths of the machine that made it.
        memory: KiB per memory of tile_table.MEMORY_KIB. L0A and L0B are absent: the vendor's matrix library
            manages them inside its calls.
    """

    name: str
    ir: str
    memory: dict[str, float]


def tool_versions() -> dict[str, str]:
    """Versions of the two compilers.

    Raises:
        CompilerError: One is missing.
    """
    versions = {}
    for tool in TOOLS:
        try:
            versions[tool] = importlib.metadata.version(tool)
        except importlib.metadata.PackageNotFoundError:
            raise CompilerError(
                f"fag-kernel build: {tool} must be installed, it is missing. {REMEDY}"
            ) from None
    return versions


def compiler_path() -> Path:
    """The vendor's compiler."""
    path = Path(importlib.import_module("ascendnpuir").__file__ or "").parent / "bin" / "bishengir-compile-a5"
    if not path.exists():
        raise CompilerError(f"fag-kernel build: the compiler must be at {path}, it is missing. {REMEDY}")
    return path


class _OneThreadSubprocess:
    """What triton-ascend sees as the module subprocess; it takes no options for its compiler itself."""

    @staticmethod
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*command, _ONE_THREAD], **options)


def lower(kernel: Kernel) -> str:
    """Triton source to linalg text, with the kernel's symbol.

    Raises:
        CompilerError: triton-ascend's own compiler fails or crashes.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    ascend: Any = importlib.import_module("triton.backends.ascend.compiler")
    triton_ir: Any = importlib.import_module("triton._C.libtriton").ir
    gpu_target: Any = importlib.import_module("triton.backends.compiler").GPUTarget("npu", TARGET, 0)
    ast_source: Any = importlib.import_module("triton.compiler").ASTSource

    module_name, function_name = kernel.source.split(".")
    function = getattr(importlib.import_module(f"fag_kernel.ascend950.kernels.{module_name}"), function_name)
    short = f"*{kernel.dtype}" if kernel.dtype else "*fp16"
    signature = {name: _POINTERS.get(PARAMETERS[name][1], short) for name in kernel.parameters}
    backend = ascend.AscendBackend(gpu_target)
    options = backend.parse_options({})
    context = triton_ir.context()
    triton_ir.load_dialects(context)
    backend.load_dialects(context)
    source = ast_source(function, signature=signature, constants=dict(kernel.constants))
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = dict(
        options.__dict__,
        target=gpu_target,
        hash=kernel.name,
        compile_on_910_95=True,
        enable_select_analysis=True,
    )
    module = ascend.make_ttir(module, metadata, options)
    try:
        with mock.patch.object(ascend, "subprocess", _OneThreadSubprocess):
            text: str = ascend.ttir_to_linalg(module, metadata, options, named_ops=True)
    except subprocess.CalledProcessError as reason:
        raise CompilerError(
            f"fag-kernel build: {kernel.name} must compile for {TARGET}, got exit status "
            f"{reason.returncode} of {Path(reason.cmd[0]).name}."
        ) from None
    text = re.sub(r', mix_mode\s*=\s*"[^"]*"', "", text)
    return re.sub(rf"@{function_name}\b", f"@{kernel.name}", text)


def optimise(name: str, linalg: str) -> Compiled:
    """Linalg text to optimised IR.

    Raises:
        CompilerError: The compiler fails, reports an error, or the kernel does not fit on chip.
    """
    with tempfile.TemporaryDirectory(prefix="fag-ascend950-") as scratch:
        source = Path(scratch) / f"{name}.mlir"
        source.write_text(linalg)
        command = [
            str(compiler_path()),
            str(source),
            *OPTIONS,
            f"--save-temps={scratch}",
            "-o",
            f"{scratch}/kernel",
        ]
        # Without hivmc-a5 on PATH the compiler stops behind the last IR, which is what is wanted here.
        path = {"PATH": "/usr/bin:/bin"}
        run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **path})
        log = run.stdout + run.stderr
        final = Path(scratch) / "module.hivm.opt.mlir"
        errors = [line.strip() for line in log.splitlines() if ": error:" in line or "Assertion" in line]
        if errors or not final.exists():
            shown = "\n  ".join(errors or log.splitlines()[-3:]).replace(scratch, "")
            raise CompilerError(f"fag-kernel build: {name} must compile for {TARGET}, got\n  {shown}")
        text = final.read_text()
    text = text.replace(str(compiler_path().parent.parent / "lib"), BITCODE_FOLDER)
    used = hidden_arguments(text)
    if used:
        raise CompilerError(
            f"fag-kernel build: {name} must not need memory that the launcher does not give, its IR uses "
            f"{', '.join(used)}."
        )
    memory = measure_memory(text)
    reported = [int(bits) / 8192 for bits in re.findall(r"Allocated UB size = (\d+) bits", log)]
    if reported:
        memory["UB"] = max(memory.get("UB", 0.0), *reported)
    too_much = {space: used for space, used in memory.items() if used > MEMORY_KIB[space]}
    if too_much:
        raise CompilerError(f"fag-kernel build: {name} must fit on chip, got {too_much} KiB of {MEMORY_KIB}.")
    return Compiled(name, text, memory)


def hidden_arguments(ir: str) -> list[str]:
    """Which of the compiler's own arguments (lock, workspace) a kernel uses; the launcher passes null for
    both.
    """
    kinds = {"%arg1": "sync_block_lock", "%arg2": "compiler_workspace"}
    used: set[str] = set()
    in_kernel = False
    for line in ir.splitlines():
        if "func.func @" in line:
            in_kernel = "ffts_base_address" in line
        elif in_kernel:
            used.update(kinds[name] for name in re.findall(r"%arg[12]\b", line))
    return sorted(used)


def measure_memory(ir: str) -> dict[str, float]:
    """Highest address in use per on-chip memory, in KiB, from the buffers that the compiler placed."""
    use: dict[str, float] = {}
    constants: dict[str, int] = {}
    for line in ir.splitlines():
        if "func.func @" in line:
            constants = {}
        constant = re.match(
            r"\s*(%\w+) = (?:llvm\.mlir|arith)\.constant\(?\s*(-?\d+) : (?:i64|i32|index)", line
        )
        if constant:
            constants[constant[1]] = int(constant[2])
            continue
        buffer = re.search(
            r"pointer_cast\((%\w+)\).*: memref<([\dx]+)x(\w+),.*#hivm\.address_space<(\w+)>>$", line
        )
        if buffer and buffer[4] in _SPACES:
            elements = 1
            for extent in buffer[2].split("x"):
                elements *= int(extent)
            end = (constants[buffer[1]] + elements * _BYTES[buffer[3]]) / 1024
            space = _SPACES[buffer[4]]
            use[space] = max(use.get(space, 0.0), end)
    return use


def compile_kernel(kernel: Kernel, cache: Path | None = None) -> Compiled:
    """Compile one kernel, or take it from a cache keyed by linalg text, options and compiler versions."""
    linalg = lower(kernel)
    if cache is None:
        return optimise(kernel.name, linalg)
    key = sha256("\0".join([linalg, *OPTIONS, *tool_versions().values()]).encode()).hexdigest()
    stored = cache / f"{kernel.name}-{key[:16]}.mlir"
    if stored.exists():
        text = stored.read_text()
        return Compiled(kernel.name, text, measure_memory(text))
    compiled = optimise(kernel.name, linalg)
    cache.mkdir(parents=True, exist_ok=True)
    scratch = stored.with_suffix(f".{os.getpid()}")
    scratch.write_text(compiled.ir)
    scratch.replace(stored)
    return compiled


def compile_all(
    kernels: Iterable[Kernel],
    *,
    jobs: int,
    cache: Path | None,
    done: Callable[[Compiled | CompilerError], None],
) -> dict[str, Compiled]:
    """Compile kernels in `jobs` processes; `done` hears of each as it ends.

    Raises:
        CompilerError: At least one kernel does not compile; all are tried first.
    """
    results: dict[str, Compiled] = {}
    failures: list[CompilerError] = []
    with ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(compile_kernel, kernel, cache): kernel for kernel in kernels}
        for future in as_completed(waiting):
            try:
                compiled = future.result()
            except CompilerError as failure:
                failures.append(failure)
                done(failure)
            else:
                results[compiled.name] = compiled
                done(compiled)
    if failures:
        raise CompilerError("\n".join(map(str, failures)))
    return results
