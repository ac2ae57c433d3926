"""The real compiler on the real sources: what is shipped is what they compile to, and what does not fit is
refused.

Runs in the tox environment `ascend950`, which has the toolchain:

    tox run -e ascend950
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fag_kernel.__main__ import main
from fag_kernel.ascend950 import CompilerError, artefacts, step_record
from fag_kernel.ascend950.catalog import all_kernels
from fag_kernel.ascend950.compile import (
    compile_kernel,
    hidden_arguments,
    lower,
    measure_memory,
    optimise,
    tool_versions,
)

pytestmark = pytest.mark.compile
if importlib.util.find_spec("ascendnpuir") is None or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton-ascend and ascendnpu-ir: tox run -e ascend950", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs TRITON_INTERPRET unset: it replaces the compiler", allow_module_level=True)

SAMPLE = (
    "fag_accumulate_dense_causal_d128_dv128_bf16",
    "fag_rows_tnd_window_d64_dv64_fp16",
    "fag_bn2_full_d128_dv128_bf16",
    "fag_zero_accumulators_tnd",
    "fag_sink_gradients_tnd_dv64_bf16",
    "fag_forward_dense_full_sinks_d64_dv64_fp16",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_sources_compile_to_the_shipped_ir(name: str) -> None:
    kernel = all_kernels()[name]
    compiled = compile_kernel(kernel)
    record = step_record(name, kernel.dtype or "bf16")
    assert compiled.ir == artefacts.read_ir(record)
    assert {space: round(used, 3) for space, used in compiled.memory.items()} == record["memory_kib"]
    assert hidden_arguments(compiled.ir) == []


def test_the_compilers_are_those_of_the_manifest() -> None:
    assert artefacts.manifest("bf16")["compilers"] == tool_versions()


def test_a_kernel_that_does_not_fit_is_refused() -> None:
    kernel = all_kernels()["fag_accumulate_dense_full_d128_dv128_bf16"]
    constants = {**dict(kernel.constants), "BM": 128, "BN": 128}
    with pytest.raises(
        CompilerError, match=r"(?s)must compile for Ascend950PR_9589, got.*overflow, requires"
    ):
        compile_kernel(dataclasses.replace(kernel, constants=tuple(constants.items())))


def test_broken_input_is_refused_with_the_compilers_words() -> None:
    with pytest.raises(CompilerError, match="nonsense must compile for Ascend950PR_9589, got"):
        optimise("nonsense", "module { nonsense }")


def test_the_first_compiler_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    run = subprocess.run

    def watched(command: list[str], **options: object) -> object:
        commands.append(command)
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", watched)
    lower(all_kernels()["fag_zero_accumulators_tnd"])
    assert [Path(command[0]).name for command in commands] == ["triton-adapter-opt"]
    assert "--mlir-disable-threading" in commands[0]


def test_a_crash_of_the_first_compiler_is_a_compiler_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> str:
        raise subprocess.CalledProcessError(-11, ["bin/triton-adapter-opt", "kernel.ttir.mlir"])

    monkeypatch.setattr("triton.backends.ascend.compiler.ttir_to_linalg", crash)
    with pytest.raises(CompilerError, match="must compile .*, got exit status -11 of triton-adapter-opt"):
        lower(all_kernels()["fag_zero_accumulators_dense"])


def test_memory_is_read_from_the_placed_buffers() -> None:
    text = """
  func.func @k_mix_aiv(%arg0: i64) {
    %0 = llvm.mlir.constant(1024 : i64) : i64
    %1 = hivm.hir.pointer_cast(%0) : memref<64x64xf32, #hivm.address_space<ub>>
    %2 = hivm.hir.pointer_cast(%0) : memref<8x4x16x16xbf16, #hivm.address_space<cbuf>>
"""
    assert measure_memory(text) == {"UB": 17.0, "L1": 17.0}


def test_cache_gives_the_same_text_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = all_kernels()["fag_zero_accumulators_dense"]
    first = compile_kernel(kernel, tmp_path)
    monkeypatch.setattr("fag_kernel.ascend950.compile.optimise", lambda *_: pytest.fail("compiled again"))
    assert compile_kernel(kernel, tmp_path) == first


def test_build_command_of_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--soc", "ascend950", "--dtype", "bf16", "--key", "1", "--compare"]) == 0
    captured = capsys.readouterr()
    assert "2 kernels are the shipped ones, byte for byte" in captured.out
    assert "fag_bn2_full_d64_dv64_bf16: UB " in captured.err
    assert sys.modules.get("torch_npu") is None
