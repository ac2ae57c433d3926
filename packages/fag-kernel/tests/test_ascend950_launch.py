"""Launches of the shipped kernels, seen from the runtime's side (fake_cann.cpp); nothing is executed."""

import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cann_fake
from cann_fake import PRELUDE, run

from fag_kernel import plan
from fag_kernel.ascend950 import catalog
from fag_kernel.ascend950.artefacts import LAUNCH_PREFIX, LAUNCH_SUFFIX
from fag_kernel.ascend950.entries import step_record
from fag_kernel.ascend950.launch import blocks_of, forward_launch, gradient_launch
from fag_metadata import AttentionProblem

pytestmark = pytest.mark.skipif(
    cann_fake.COMPILER is None, reason="needs a C++ compiler for the fake runtime"
)

TARGET = "Ascend950PR_9599"


def make_plan(s1=1024, s2=1024, mask_mode=0, heads=4, **more):
    problem = AttentionProblem.from_metadata_args(
        heads, heads, 128, batch_size=1, max_seqlen_q=s1, max_seqlen_kv=s2, mask_mode=mask_mode, **more
    )
    return plan(problem, TARGET)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    return cann_fake.build(tmp_path_factory.mktemp("cann"))


#: Objects are files with the kernel's name in them; ADDRESSES has one of its own for every buffer.
LAUNCHES = """
import pathlib, struct, sys, tempfile, threading
from fag_kernel import plan
from fag_kernel.ascend950 import launch as module
from fag_kernel.ascend950.catalog import PARAMETERS
from fag_kernel.ascend950.launch import forward_launch, gradient_launch
from fag_metadata import AttentionProblem

folder = pathlib.Path(tempfile.mkdtemp())

def object_file(kernel, dtype):
    path = folder / f"{kernel}.o"
    path.write_text(f"object of {kernel}")
    return path

module.object_file = object_file

def make_plan(s1=1024, s2=1024):
    problem = AttentionProblem.from_metadata_args(4, 4, 128, batch_size=1, max_seqlen_q=s1, max_seqlen_kv=s2)
    return plan(problem, "Ascend950PR_9599")

def gradient(is_deterministic=False, has_sinks=False, has_dlse=False, **sizes):
    return gradient_launch(
        make_plan(**sizes), "bf16", is_deterministic=is_deterministic, has_sinks=has_sinks, has_dlse=has_dlse
    )

ADDRESSES = {name: 4096 * (index + 1) for index, name in enumerate(PARAMETERS)}
"""
ADDRESSES = {name: 4096 * (index + 1) for index, name in enumerate(catalog.PARAMETERS)}


def script(body):
    return PRELUDE + LAUNCHES + body


def unpack(arguments, num_parameters):
    """The arguments of a launch: prefix, parameters, grid."""
    layout = struct.Struct(f"<3Q{num_parameters}Q3i4x")
    values = layout.unpack(bytes.fromhex(arguments))
    return values[:3], values[3:-3], values[-3:]


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_kernels_are_launched_in_order_with_their_arguments(runtime, is_deterministic):
    got = run(
        script(f"""
launch = gradient(is_deterministic={is_deterministic}, has_sinks=True, has_dlse=True)
launch.load(0)
loaded = log()
launch.run(0, 77, ADDRESSES)
answer(loaded=loaded, launched=log())
"""),
        runtime,
    )
    planned = make_plan()
    form = "deterministic" if is_deterministic else "accumulate"
    kernels = [step.kernel for step in catalog.launches(planned.tiling_key, "bf16", form, has_sinks=True)]
    assert len(kernels) == 4

    binaries = [entry for entry in got["loaded"] if entry["symbol"] == "rtDevBinaryRegister"]
    functions = [entry for entry in got["loaded"] if entry["symbol"] == "rtFunctionRegister"]
    for kernel, binary, function in zip(kernels, binaries, functions, strict=True):
        assert bytes.fromhex(binary["object"]).decode() == f"object of {kernel.name}"
        assert binary["magic"] == (0x41415246 if kernel.core_type == "vector" else 0x43554245)
        assert binary["version"] == function["mode"] == 0
        assert function["kernel"] == kernel.name
    assert (
        len({entry["stub"] for entry in functions}) == len({entry["stub_name"] for entry in functions}) == 4
    )

    assert [entry["symbol"] for entry in got["launched"]] == ["rtKernelLaunch"] * 4
    for kernel, function, entry in zip(kernels, functions, got["launched"], strict=True):
        assert entry["stub"] == function["stub"]
        assert (entry["stream"], entry["shared_memory"]) == (77, 0)
        prefix, parameters, grid = unpack(entry["arguments"], len(kernel.parameters))
        assert prefix == (0xFF75, 0, 0)
        offsets = {"workspace": planned.dq_offset}
        assert parameters == tuple(ADDRESSES[name] + offsets.get(name, 0) for name in kernel.parameters)
        rules = {"used_cube_cores": planned.block_dim, "cube_cores": 36, "vector_cores": 72}
        assert entry["blocks"] == rules[kernel.grid]
        assert grid == (entry["blocks"], 1, 1)


def test_forward_is_one_launch_on_all_cube_cores(runtime):
    got = run(
        script("""
launch = forward_launch(make_plan(), "fp16", has_sinks=True)
launch.run(0, 5, ADDRESSES)
answer(log=log(), parameters=launch.parameters, kernels=launch.kernels)
"""),
        runtime,
    )
    assert got["kernels"] == ["fag_forward_dense_full_sinks_d128_dv128_fp16"]
    entry = got["log"][-1]
    assert entry["blocks"] == 36
    _, parameters, _ = unpack(entry["arguments"], len(got["parameters"]))
    assert parameters == tuple(ADDRESSES[name] for name in got["parameters"])
    assert "sinks" in got["parameters"]


def test_arguments_lie_as_the_manifest_says():
    """The launcher takes the order from the catalogue; the manifest promises the same to other launchers."""
    planned = make_plan()
    launch = forward_launch(planned, "fp16", has_sinks=False)
    expected = tuple(catalog.PARAMETERS[name][0] for name in launch.parameters)
    record = step_record(launch.kernels[0], "fp16")
    assert tuple(record["parameters"]) == (*LAUNCH_PREFIX, *expected, *LAUNCH_SUFFIX)


def test_a_launch_says_what_it_needs():
    planned = make_plan()
    accumulate = gradient_launch(planned, "fp16", is_deterministic=False, has_sinks=False, has_dlse=False)
    assert accumulate.workspace_bytes == planned.workspace_bytes > 0
    assert accumulate.tiling == catalog.launch_tiling(planned, False)
    assert len(accumulate.tiling) == 200
    assert (
        {"workspace", "tiling", "metadata", "q", "dq"}
        <= set(accumulate.parameters)
        <= set(catalog.PARAMETERS)
    )
    assert len(set(accumulate.parameters)) == len(accumulate.parameters)

    deterministic = gradient_launch(planned, "fp16", is_deterministic=True, has_sinks=True, has_dlse=True)
    assert deterministic.workspace_bytes == 0
    assert "workspace" not in deterministic.parameters
    assert {"sinks", "dsinks", "dlse"} <= set(deterministic.parameters)
    assert deterministic.tiling == catalog.launch_tiling(planned, True) != accumulate.tiling
    assert forward_launch(planned, "fp16", has_sinks=False).workspace_bytes == 0


def test_the_same_plan_gives_the_same_launch():
    options = {"is_deterministic": False, "has_sinks": False, "has_dlse": False}
    first = gradient_launch(make_plan(), "bf16", **options)
    assert gradient_launch(make_plan(), "bf16", **options) is first
    assert gradient_launch(make_plan(), "fp16", **options) is not first
    assert gradient_launch(make_plan(s1=2048), "bf16", **options) is not first
    assert forward_launch(make_plan(), "bf16", has_sinks=False) is forward_launch(
        make_plan(), "bf16", has_sinks=False
    )


def test_a_plan_without_a_kernel_is_refused():
    problem = AttentionProblem.from_metadata_args(4, 4, 256, batch_size=1, max_seqlen_q=64, max_seqlen_kv=64)
    with pytest.raises(
        ValueError, match=r"ascend950: plan must have a tiling key, got none for target cpu\."
    ):
        gradient_launch(plan(problem, "cpu"), "fp16", is_deterministic=False, has_sinks=False, has_dlse=False)


def test_a_missing_address_is_named_and_nothing_is_launched(runtime):
    got = run(
        script("""
launch = gradient()
launch.load(0)
log()
some = {name: address for name, address in ADDRESSES.items() if name not in ("dk", "tiling")}
answer(error=error_of(launch.run, 0, 5, some), log=log())
"""),
        runtime,
    )
    assert got["error"]["type"] == "ValueError"
    assert got["error"]["text"] == (
        "ascend950: addresses must have every parameter of the launch, got none for tiling, dk."
    )
    assert got["log"] == []


def test_a_launch_of_no_blocks_is_left_out(runtime):
    """A problem in which no core has work: the passes that clear and cast still run on all vector cores."""
    got = run(
        script("""
import dataclasses
empty = dataclasses.replace(make_plan(), block_dim=0)
launch = gradient_launch(empty, "bf16", is_deterministic=False, has_sinks=False, has_dlse=False)
launch.run(0, 5, ADDRESSES)
launched = [entry for entry in log() if entry["symbol"] == "rtKernelLaunch"]
answer(kernels=launch.kernels, blocks=[entry["blocks"] for entry in launched])
"""),
        runtime,
    )
    assert len(got["kernels"]) == 3
    assert got["blocks"] == [72, 72]


@pytest.mark.parametrize("symbol", ["rtDevBinaryRegister", "rtFunctionRegister"])
def test_a_refused_kernel_leaves_nothing_half_made(runtime, symbol):
    got = run(
        script(f"""
launch = gradient()
fail({symbol!r}, 507001, "E2: no room")
error, left = error_of(launch.load, 0), live()
launch.run(0, 5, ADDRESSES)
answer(error=error, left=left, later=live())
"""),
        runtime,
    )
    assert got["error"]["text"] == f"cann: {symbol} must succeed, got code 507001: E2: no room"
    assert (got["error"]["call"], got["error"]["code"]) == (symbol, 507001)
    assert got["left"]["modules"] == got["left"]["functions"] == 0
    assert got["later"]["modules"] == got["later"]["functions"] == 3


@pytest.mark.parametrize("symbol", ["rtGetC2cCtrlAddr", "rtKernelLaunch"])
def test_a_refused_launch_says_why_and_the_next_one_works(runtime, symbol):
    got = run(
        script(f"""
launch = gradient()
launch.load(0)
fail({symbol!r}, 107003, "EE9999: stream is gone")
error, _ = error_of(launch.run, 0, 5, ADDRESSES), log()
launch.run(0, 5, ADDRESSES)
answer(error=error, launched=len(log()))
"""),
        runtime,
    )
    assert got["error"]["text"] == f"cann: {symbol} must succeed, got code 107003: EE9999: stream is gone"
    assert got["launched"] == 3


def test_kernels_are_registered_once_per_device(runtime):
    got = run(
        script("""
first, second = gradient(), gradient(s1=2048)  # the same tiling key
first.load(0), first.load(0), second.load(0)
once = live()["functions"]
wrong = error_of(first.load, 1)
ctypes.CDLL(None).setenv(b"FAKE_DEVICE", b"1", 1)
first.load(1)
answer(once=once, wrong=wrong, twice=live()["functions"], same=first.kernels == second.kernels)
"""),
        runtime,
    )
    assert got["same"]
    assert got["once"] == 3
    assert (
        got["wrong"]["text"] == "ascend950: device must be the current one to load kernels, got 1 while 0 is."
    )
    assert got["twice"] == 6


def test_eight_threads_register_each_kernel_once(runtime):
    got = run(
        script("""
sys.setswitchinterval(1e-6)
launches = [gradient(), gradient(s1=2048), gradient(is_deterministic=True), gradient(has_sinks=True)]
start, errors = threading.Barrier(8), []

def work(index):
    start.wait()
    for launch in launches[index % 4:] + launches[:index % 4]:
        error = error_of(launch.run, 0, index, ADDRESSES)
        errors.extend([error] if error else [])

threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
calls = log()
answer(errors=errors, kernels=sorted({name for launch in launches for name in launch.kernels}),
       registered=sorted(entry["kernel"] for entry in calls if entry["symbol"] == "rtFunctionRegister"),
       launched=sum(entry["symbol"] == "rtKernelLaunch" for entry in calls))
"""),
        runtime,
    )
    assert got["errors"] == []
    assert got["registered"] == got["kernels"]
    assert got["launched"] == 8 * (3 + 3 + 3 + 4)


def test_without_a_runtime_a_launch_says_what_is_missing(tmp_path):
    got = run(
        """
import json
from fag_kernel import cann, plan
from fag_kernel.ascend950.launch import forward_launch
from fag_metadata import AttentionProblem
problem = AttentionProblem.from_metadata_args(4, 4, 128, batch_size=1, max_seqlen_q=64, max_seqlen_kv=64)
launch = forward_launch(plan(problem, "Ascend950PR_9599"), "fp16", has_sinks=False)
try:
    launch.run(0, 0, dict.fromkeys(launch.parameters, 1))
except cann.CannError as error:
    print(json.dumps(str(error)))
""",
        tmp_path,
    )
    assert got.startswith(
        "cann: the runtime must be complete, got: the CANN runtime (libascendcl.so) does not load"
    )


def test_objects_come_from_the_finaliser(runtime, tmp_path):
    """The whole way: shipped IR, a stand-in for CANN's compiler, the runtime."""
    compiler = tmp_path / "hivmc-a5"
    compiler.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "if '--version' not in sys.argv:\n"
        "    source = open(sys.argv[1]).read()\n"
        "    open(sys.argv[sys.argv.index('-o') + 1] + '.o', 'w').write('made of %d' % len(source))\n"
    )
    compiler.chmod(0o755)
    (tmp_path / "bitcode").mkdir()
    (tmp_path / "bitcode" / "meta_op.mix.aic.c310.bc").touch()
    got = run(
        PRELUDE
        + """
from fag_kernel import plan
from fag_kernel.ascend950.launch import gradient_launch
from fag_metadata import AttentionProblem
problem = AttentionProblem.from_metadata_args(4, 4, 128, batch_size=1, max_seqlen_q=64, max_seqlen_kv=64)
launch = gradient_launch(
    plan(problem, "Ascend950PR_9599"), "fp16", is_deterministic=False, has_sinks=False, has_dlse=False
)
launch.load(0)
answer(log=log(), kernels=launch.kernels)
""",
        runtime,
        FAG_HIVMC=str(compiler),
        FAG_BITCODE=str(tmp_path / "bitcode"),
        FAG_CACHE_DIR=str(tmp_path / "cache"),
    )
    binary, function = got["log"]
    assert bytes.fromhex(binary["object"]).startswith(b"made of ")
    assert [function["kernel"]] == got["kernels"]
    assert len(list((tmp_path / "cache").glob("*.o"))) == 1


def test_every_kernel_of_the_catalogue_has_a_number_of_blocks():
    planned = make_plan()
    for kernel in catalog.all_kernels().values():
        assert blocks_of(kernel, planned) > 0
