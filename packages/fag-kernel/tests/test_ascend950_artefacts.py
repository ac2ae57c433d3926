"""What is shipped for Ascend 950: structure, hashes, keys, finalisation, errors. No Triton, no CANN, no
NPU.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fag_kernel import ascend950
from fag_kernel.__main__ import main
from fag_kernel.ascend950 import artefacts, finalize
from fag_kernel.ascend950.catalog import DTYPES, FORMS, all_kernels, launch_tiling, launches, sample_kernels
from fag_kernel.ascend950.tile_table import MEMORY_KIB, TILES
from fag_kernel.ascend950.verify import atomic_stores
from fag_kernel.plan import plan
from fag_kernel.tiling_key import TilingKey, valid_keys
from fag_metadata import AttentionProblem, Target

KERNEL = "fag_accumulate_dense_causal_d128_dv128_bf16"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A copy of the shipped files to damage."""
    return Path(shutil.copytree(artefacts.DATA, tmp_path / "data"))


# ---- what is shipped -------------------------------------------------------------------------------------


def test_binary_json_is_the_specified_configuration() -> None:
    config = ascend950.binary_json()
    assert config["op_type"] == "FlashAttnGrad"
    assert [entry["bin_filename"] for entry in config["op_list"]] == [
        "FlashAttnGrad_bf16",
        "FlashAttnGrad_fp16",
    ]
    for entry, short in zip(config["op_list"], ("bfloat16", "float16"), strict=True):
        names = ["q", "k", "v", "dout", "attn_out", "softmax_lse", "cu_seqlens_q", "cu_seqlens_kv"]
        names += ["seqused_q", "seqused_kv", "sinks", "attn_mask", "metadata"]
        assert [tensor["name"] for tensor in entry["inputs"]] == names
        assert [tensor["name"] for tensor in entry["outputs"]] == ["dq", "dk", "dv"]
        types = [short] * 5 + ["float32"] + ["int32"] * 4 + ["float32", "int8", "int32"]
        assert [tensor["dtype"] for tensor in entry["inputs"]] == types
        assert [tensor["dtype"] for tensor in entry["outputs"]] == [short] * 3
        assert [t["paramType"] for t in entry["inputs"]] == ["required"] * 6 + ["optional"] * 7
        for tensors in (entry["inputs"], entry["outputs"]):
            for index, tensor in enumerate(tensors):
                assert tensor["index"] == index
                assert (tensor["format"], tensor["shape"]) == ("ND", [-2])
                assert tensor["format_match_mode"] == "FormatAgnostic"
        assert [(attr["name"], attr["value"]) for attr in entry["attrs"]] == [
            ("softmax_scale", 0.0), ("mask_mode", 0), ("win_left", -1), ("win_right", -1),
            ("max_seqlen_q", -1), ("max_seqlen_kv", -1), ("layout_q", "BSND"), ("layout_kv", "BSND"),
            ("layout_out", "BSND"),
        ]  # fmt: skip
    bf16, fp16 = (json.dumps(entry) for entry in config["op_list"])
    assert bf16.replace("bfloat16", "float16").replace("_bf16", "_fp16") == fp16


def test_kernels_lists_every_valid_key_in_both_types() -> None:
    entries = ascend950.kernels()
    assert len(entries) == 2 * len(valid_keys()) == 112
    assert {(entry.dtype, entry.tiling_key) for entry in entries} == {
        (t, k) for t in DTYPES for k in valid_keys()
    }
    for entry in entries:
        assert entry.accumulate
        assert entry.deterministic
        assert entry.needs_workspace == any("workspace" in step.parameters for step in entry.accumulate)
        assert not any("workspace" in step.parameters for step in entry.deterministic)
        assert {"sinks", "dlse", "dsinks"} <= set(entry.sinks.parameters)
        for step in (*entry.accumulate, *entry.deterministic, entry.sinks):
            assert step.parameters[:3] == ("ffts_address", "sync_block_lock", "compiler_workspace")
            assert step.parameters[-3:] == ("grid_x", "grid_y", "grid_z")
            assert len(step.kernel) <= 49


def test_the_gradient_of_the_sinks_is_one_launch_more() -> None:
    for dtype in DTYPES:
        for key in valid_keys():
            for form in FORMS:
                *others, last = launches(key, dtype, form, has_sinks=True)
                assert tuple(others) == launches(key, dtype, form)
                assert last.stage == "sinks"
                assert last.kernel.dtype == dtype
                assert dict(last.kernel.constants)["IS_TND"] == TilingKey.decode(key).is_tnd


def test_launch_tiling_adds_the_flags_to_the_plans_bytes() -> None:
    tiling = plan(AttentionProblem.from_metadata_args(
        4, 2, 64, batch_size=1, max_seqlen_q=9, max_seqlen_kv=9
    ), "Ascend950PR_9589")  # fmt: skip
    assert launch_tiling(tiling, has_dlse=False) == tiling.tiling_data + bytes(8)
    assert launch_tiling(tiling, has_dlse=True) == tiling.tiling_data + b"\1" + bytes(7)
    assert len(launch_tiling(tiling, has_dlse=True)) == 200


def test_only_the_accumulate_kernels_add_atomically() -> None:
    for kernel in sample_kernels():
        stores, atomic = atomic_stores(
            artefacts.read_ir(ascend950.step_record(kernel.name, kernel.dtype or "bf16"))
        )
        assert stores > 0
        # dq of a block, and dk and dv of a column
        assert atomic == (3 if kernel.source == "bn2gs1s2.accumulate_kernel" else 0), kernel.name
    for entry in ascend950.kernels():
        assert not any(step.kernel.startswith("fag_accumulate") for step in entry.deterministic)


def test_every_tile_divides_the_tile_of_the_metadata_and_is_used() -> None:
    for tile, _ in TILES.values():
        assert 128 % tile.bm == 128 % tile.bn == 0
    used = {
        (kernel.source.split(".")[1].removesuffix("_kernel"), constants["DA"], constants["DVA"])
        for kernel in all_kernels().values()
        if "DA" in (constants := dict(kernel.constants))
    }
    assert used == set(TILES)


def test_the_tile_table_records_the_measured_use() -> None:
    measured: dict[tuple[str, int, int], list[float]] = {}
    for dtype in DTYPES:
        for record in artefacts.manifest(dtype)["kernels"].values():
            constants, memory = record["constants"], record["memory_kib"]
            if "DA" in constants:
                family = record["source"].split(".")[1].removesuffix("_kernel")
                most = measured.setdefault((family, constants["DA"], constants["DVA"]), [0.0, 0.0, 0.0])
                for place, space in enumerate(("UB", "L1", "L0C")):
                    most[place] = max(most[place], memory[space])
    assert {row: tuple(most) for row, most in measured.items()} == {
        row: use for row, (_, use) in TILES.items()
    }


def test_recorded_memory_fits() -> None:
    for dtype in DTYPES:
        for record in artefacts.manifest(dtype)["kernels"].values():
            assert record["memory_kib"]["UB"] > 0
            assert all(used <= MEMORY_KIB[space] for space, used in record["memory_kib"].items())
            assert (record["core_type"] == "mix") == ("L0C" in record["memory_kib"])


def test_the_ir_names_no_path_of_the_machine_that_made_it() -> None:
    for kernel in sample_kernels():
        ir = artefacts.read_ir(ascend950.step_record(kernel.name, kernel.dtype or "bf16"))
        assert "site-packages" not in ir
        assert "/home/" not in ir
        assert "/tmp/" not in ir


# ---- keys: the host's and the shipped --------------------------------------------------------------------


def reachable_keys() -> set[int]:
    """Keys that plan() gives over problems with every combination of what a key holds."""
    keys = set()
    targets = (Target("small-l2", 2, 4, 1), Target("no-l2", 36, 72, 0))
    shapes = ((1, 128, 128), (2, 128, 128), (64, 128, 256), (64, 384, 128), (1, 384, 256), (256, 130, 200))
    for layout in ("BSND", "TND"):
        for mask, win in ((0, (-1, -1)), (3, (-1, -1)), (4, (20, 0))):
            for d, dv in ((64, 64), (72, 72), (128, 128), (192, 128), (192, 192), (130, 130)):
                for heads, s1, s2 in shapes:
                    sizes = {"batch_size": 2, "max_seqlen_q": s1, "max_seqlen_kv": s2}
                    if layout == "TND":
                        sizes = {"cu_seqlens_q": [0, s1, 2 * s1], "cu_seqlens_kv": [0, s2, 2 * s2]}
                    problem = AttentionProblem.from_metadata_args(
                        heads, heads, d, head_dim_v=dv, mask_mode=mask, win_left=win[0], win_right=win[1],
                        layout_q=layout, layout_kv=layout, layout_out=layout, **sizes,
                    )  # fmt: skip
                    for target in targets:
                        try:
                            key = plan(problem, target, split="cann").tiling_key
                        except NotImplementedError:
                            continue
                        assert key is not None
                        keys.add(key)
    return keys


def test_shipped_keys_are_the_keys_that_the_host_can_produce() -> None:
    shipped = {entry.tiling_key for entry in ascend950.kernels("bf16")}
    reachable = reachable_keys()
    assert shipped == set(valid_keys())
    assert reachable <= shipped
    # The rest is valid by the rule of the key and reached by no input: packed batches are never swizzled, and
    # dv <= d keeps v at 128 columns where q and k have 128.
    unreachable = [TilingKey.decode(key) for key in shipped - reachable]
    assert all(
        (key.is_tnd and key.is_swizzle) or (key.d_align == 128 and key.dv_align == 192) for key in unreachable
    ), [key.name for key in unreachable]


# ---- damage ----------------------------------------------------------------------------------------------


def test_verify_accepts_what_is_shipped() -> None:
    assert len(ascend950.verify()) == 3


def test_tampered_ir_is_refused(data: Path) -> None:
    import lzma

    record = ascend950.step_record(KERNEL, "bf16")
    path = data / record["ir"]["file"]
    stream = bytearray(lzma.decompress(path.read_bytes()))
    stream[record["ir"]["offset"] + 100] ^= 1
    path.write_bytes(lzma.compress(bytes(stream)))
    with pytest.raises(
        ascend950.ArtefactError, match=rf"IR of {KERNEL} must have sha256 .*, got .*Reinstall"
    ):
        artefacts.read_ir(record, data)
    with pytest.raises(ascend950.ArtefactError, match="shipped files must be whole"):
        ascend950.verify(data)


def test_damaged_file_is_refused(data: Path) -> None:
    record = ascend950.step_record(KERNEL, "bf16")
    (data / record["ir"]["file"]).write_bytes(b"not xz")
    with pytest.raises(ascend950.ArtefactError, match="must be an xz file"):
        artefacts.read_ir(record, data)


def test_missing_ir_is_refused(data: Path) -> None:
    record = ascend950.step_record(KERNEL, "bf16")
    (data / record["ir"]["file"]).unlink()
    with pytest.raises(ascend950.ArtefactError, match="the file is missing. Reinstall fag-kernel"):
        artefacts.read_ir(record, data)


def test_missing_or_foreign_manifest_is_refused(data: Path) -> None:
    path = data / "FlashAttnGrad_fp16.json"
    contents = json.loads(path.read_text())
    path.write_text(json.dumps({**contents, "format": 99}))
    with pytest.raises(ascend950.ArtefactError, match="must have format 2, got 99"):
        artefacts.manifest("fp16", data)
    path.unlink()
    with pytest.raises(ascend950.ArtefactError, match="FlashAttnGrad_fp16.json must be in"):
        artefacts.manifest("fp16", data)


@pytest.mark.parametrize("damage", ["key", "launch", "sinks", "kernel", "binary", "memory"])
def test_verify_names_what_is_wrong(data: Path, damage: str) -> None:
    path = data / "FlashAttnGrad_bf16.json"
    contents = json.loads(path.read_text())
    if damage == "key":
        del contents["tiling_keys"][0]
    elif damage == "launch":
        contents["tiling_keys"][0]["launches"]["accumulate"].pop()
    elif damage == "sinks":
        contents["tiling_keys"][0]["sinks"]["stage"] = "cast"
    elif damage == "kernel":
        del contents["kernels"][KERNEL]
    elif damage == "memory":
        contents["kernels"][KERNEL]["memory_kib"]["UB"] = 300
    else:
        (data / artefacts.BINARY_JSON).write_text("{}")
    path.write_text(json.dumps(contents))
    wanted = {
        "key": "must have the host's 56 keys, got a difference in",
        "launch": "key 0, accumulate must launch",
        "sinks": "key 0, deterministic must launch",
        "kernel": "must have the catalogue's kernels",
        "binary": "must be the specified configuration",
        "memory": "must fit on chip, got {'UB': 300} KiB",
    }
    with pytest.raises(ascend950.ArtefactError, match=wanted[damage]):
        ascend950.verify(data)


def test_unknown_key_dtype_form_and_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="tiling_key must be one of the 56 shipped keys, got 2047"):
        ascend950.find(2047, "bf16")
    with pytest.raises(ValueError, match="tiling_key must be one of the 56 valid keys, got 3"):
        launches(3, "bf16", "accumulate")
    for call in (ascend950.kernels, lambda dtype: ascend950.find(0, dtype), artefacts.manifest):
        with pytest.raises(ValueError, match="dtype must be one of bf16, fp16, got 'float32'"):
            call("float32")
    with pytest.raises(ValueError, match="form must be one of accumulate, deterministic, got 'atomic'"):
        launches(0, "bf16", "atomic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernel must be in the manifest of fp16"):
        ascend950.object_file(KERNEL, "fp16")


# ---- finalisation ----------------------------------------------------------------------------------------

FAKE = """#!/bin/sh
# Stands in for CANN's compiler: takes its arguments, writes its input's digest as the object.
[ "$1" = "--version" ] && { echo "fake hivmc VERSION"; exit 0; }
echo "$@" >> "$(dirname "$0")/calls"
grep -q @FAG_BITCODE_FOLDER@ "$1" && { echo "placeholder left" >&2; exit 3; }
BODY
while [ "$1" != "-o" ]; do input="$1"; shift; done
sleep 0.2
echo object > "$2.o"
"""


@pytest.fixture
def cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a fake hivmc-a5 and bitcode, found through FAG_HIVMC, and an empty cache."""
    home = tmp_path / "cann"
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / "lib" / "meta_op.mix.aic.c310.bc").write_bytes(b"bc")
    write_fake(home)
    monkeypatch.setenv("FAG_HIVMC", str(home / "bin" / "hivmc-a5"))
    monkeypatch.setenv("FAG_CACHE_DIR", str(tmp_path / "cache"))
    return home


def write_fake(home: Path, version: str = "1.0", body: str = "") -> None:
    path = home / "bin" / "hivmc-a5"
    path.write_text(FAKE.replace("VERSION", version).replace("BODY", body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def calls(home: Path) -> list[str]:
    path = home / "bin" / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_finalize_makes_an_object_once_and_caches_it(cann: Path) -> None:
    path = ascend950.object_file(KERNEL, "bf16")
    assert path.read_text() == "object\n"
    assert ascend950.object_file(KERNEL, "bf16") == path
    assert len(calls(cann)) == 1
    assert (
        "--target=Ascend950PR_9589 --enable-hfusion-compile=true --enable-triton-kernel-compile=true"
        in calls(cann)[0]
    )
    assert [item.name for item in path.parent.glob(".*")] == []


def test_finalize_runs_again_for_another_compiler_or_target(cann: Path) -> None:
    first = ascend950.object_file(KERNEL, "bf16")
    assert ascend950.object_file(KERNEL, "bf16", target="Ascend950PR_9599") != first
    write_fake(cann, version="2.00")
    assert ascend950.object_file(KERNEL, "bf16") != first
    assert len(calls(cann)) == 3


def test_finalize_works_once_for_many_at_a_time(cann: Path) -> None:
    code = f"from fag_kernel import ascend950; print(ascend950.object_file({KERNEL!r}, 'bf16'))"
    with ThreadPoolExecutor(4) as pool:
        runs = list(
            pool.map(
                lambda _: subprocess.run([sys.executable, "-c", code], capture_output=True, text=True),
                range(4),
            )
        )
    assert {run.returncode for run in runs} == {0}, runs[0].stderr
    assert len({run.stdout for run in runs}) == 1
    assert len(calls(cann)) == 1


def test_finalize_without_cann_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("FAG_HIVMC", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ascend950.CompilerError, match=r"hivmc-a5 must be found .* comes with CANN: run `source"
    ):
        ascend950.object_file(KERNEL, "bf16")
    assert main(["build", "--finalize", "--key", "72", "--dtype", "bf16"]) == 1


def test_finalize_finds_cann_by_its_variables(
    cann: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FAG_HIVMC")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ASCEND_HOME_PATH", str(cann))
    assert finalize.find_hivmc() == cann / "bin" / "hivmc-a5"


@pytest.mark.parametrize("body", ["echo broken >&2; exit 7", "exit 0"], ids=["fails", "makes-nothing"])
def test_a_failing_compiler_is_reported_with_its_command(cann: Path, body: str) -> None:
    write_fake(cann, body=body)
    status = "7 and no object: broken" if "7" in body else "0 and no object: no message"
    with pytest.raises(
        ascend950.CompilerError, match=f"must finish {KERNEL}, got exit status {status}"
    ) as caught:
        ascend950.object_file(KERNEL, "bf16")
    command = str(caught.value).split("To see it: ")[1].split()
    assert command[0] == str(cann / "bin" / "hivmc-a5")
    assert Path(command[1]).exists()
    write_fake(cann)
    assert ascend950.object_file(KERNEL, "bf16").exists()


def test_missing_bitcode_is_reported(cann: Path) -> None:
    try:
        import ascendnpuir  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("ascendnpu-ir is installed and has the bitcode")
    shutil.rmtree(cann / "lib")
    with pytest.raises(ascend950.CompilerError, match="device bitcode .* must be found"):
        ascend950.object_file(KERNEL, "bf16")


def test_finalize_of_a_key_makes_its_kernels(cann: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--finalize", "--key", "72", "--dtype", "bf16"]) == 0
    names = {step.kernel.name for form in FORMS for step in launches(72, "bf16", form, has_sinks=True)}
    assert {Path(line).name.rsplit("-", 1)[0] for line in capsys.readouterr().out.split()} == names


# ---- command line ----------------------------------------------------------------------------------------


def test_import_needs_no_triton_and_no_torch() -> None:
    code = (
        "import sys, fag_kernel.ascend950 as a, fag_kernel.__main__\n"
        "a.binary_json(); a.kernels(); a.verify()\n"
        "sys.exit(any(name in sys.modules for name in ('triton', 'torch', 'ascendnpuir')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_info_shows_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--kernels"]) == 0
    out = capsys.readouterr().out
    for name in all_kernels():
        assert name in out
    assert "UB/248" in out
    assert main(["info"]) == 0
    assert "Ascend 950: 56 tiling keys in bf16 and fp16" in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["device_kernels"]) == 112


def test_verify_command(
    capsys: pytest.CaptureFixture[str], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["verify"]) == 0
    assert "every sha256 right" in capsys.readouterr().out
    monkeypatch.setattr(artefacts, "DATA", data)
    shutil.rmtree(data / "ir")
    assert main(["verify"]) == 1
    assert "the file is missing" in capsys.readouterr().err


def test_build_without_the_toolchain_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, importlib.metadata as m; old = m.version\n"
        "def version(name):\n"
        "    if name in ('triton-ascend', 'ascendnpu-ir'): raise m.PackageNotFoundError(name)\n"
        "    return old(name)\n"
        "m.version = version\n"
        "from fag_kernel.__main__ import main; sys.exit(main(['build', '--key', '0']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert run.returncode == 1
    assert "triton-ascend must be installed, it is missing" in run.stderr
    assert "pip install 'fag-kernel[ascend950-build]'" in run.stderr
