"""Calls of CANN's runtime, seen from the other side: a fake runtime writes down what arrives."""

import pickle
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cann_fake
from cann_fake import CUSTOM_LIBRARY, LIBRARIES, PRELUDE, run

from fag_kernel import cann

pytestmark = pytest.mark.skipif(
    cann_fake.COMPILER is None, reason="needs a C++ compiler for the fake runtime"
)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    return cann_fake.build(tmp_path_factory.mktemp("cann"))


CALLS = """
def ref(address, dtype="float16", shape=(2, 3, 4), strides=(12, 4, 1), offset=0, storage=(24,)):
    return cann.TensorRef(address, dtype, shape, strides, offset, storage)

def tensors_of(symbol):
    '''A tensor for each tensor argument, and each at an address of its own: a swap of two shows.'''
    names = [name for name, kind in cann.operator_arguments(symbol) if "tensor" in kind]
    return {name: ref(4096 * (index + 1)) for index, name in enumerate(names)}

TENSORS = tensors_of(cann.GRAD)
SCALARS = dict(softmax_scale=0.1, mask_mode=4, win_left=-7, win_right=9, max_seqlen_q=2**40, max_seqlen_kv=3)
SCALARS["layout"] = "BNSD"
"""

#: What SCALARS is for the operator.
ATTRIBUTES = {
    "softmax_scale": 0.1,
    "mask_mode": 4,
    "win_left": -7,
    "win_right": 9,
    "max_seqlen_q": 2**40,
    "max_seqlen_kv": 3,
    "layout_q": "BNSD",
    "layout_kv": "BNSD",
    "layout_out": "BNSD",
}


NOTHING = {"tensors": 0, "executors": 0, "modules": 0, "functions": 0}


def script(body):
    return PRELUDE + CALLS + body


def check_first_phase(log, tensors):
    """The last call of the log has every tensor and attribute under its own name.

    Args:
        log: Calls up to the first phase.
        tensors: Tensors passed, by name.
    """
    *made, phase = log
    addresses = {entry["id"]: entry["storage"] for entry in made}
    got = {name: phase[name] for name in ATTRIBUTES}
    assert got == ATTRIBUTES
    got = {name: addresses[value] for name, value in phase.items() if name not in {*ATTRIBUTES, "symbol"}}
    assert got == {name: ref[0] for name, ref in tensors.items()}


def test_gradient_passes_every_argument_in_its_place(runtime):
    got = run(
        script("""
call = cann.prepare_grad(TENSORS, **SCALARS)
first = log()
call.run(workspace_address=8192, stream=77)
answer(first=first, second=log(), bytes=call.workspace_bytes, live=live(), tensors=TENSORS)
"""),
        runtime,
    )
    assert got["first"][-1]["symbol"] == "aclnnInnerFlashAttnGradGetWorkspaceSize"
    check_first_phase(got["first"], got["tensors"])
    assert got["bytes"] == 4096
    assert got["second"] == [
        {"symbol": "aclnnInnerFlashAttnGrad", "workspace": 8192, "bytes": 4096, "stream": 77}
    ]
    assert got["live"] == NOTHING


def test_forward_passes_every_argument_in_its_place(runtime):
    got = run(
        script("""
tensors = tensors_of(cann.FORWARD)
call = cann.prepare_forward(tensors, **SCALARS, return_softmax_lse=True)
first = log()
call.run(workspace_address=8192, stream=78)
answer(first=first, second=log(), live=live(), tensors=tensors)
"""),
        runtime,
    )
    assert got["first"][-1]["symbol"] == "aclnnInnerFlashAttnGetWorkspaceSize"
    assert got["first"][-1].pop("return_softmax_lse") == 1
    check_first_phase(got["first"], got["tensors"])
    assert got["second"] == [
        {"symbol": "aclnnInnerFlashAttn", "workspace": 8192, "bytes": 4096, "stream": 78}
    ]
    assert got["live"] == NOTHING


def test_a_tensor_keeps_its_view_and_an_absent_one_is_null(runtime):
    got = run(
        script("""
TENSORS["q"] = ref(4096, "bfloat16", (2, 5, 3, 8), (360, 24, 8, 1), 16, (1000,))
TENSORS["seqused_q"] = ref(4096, "int32", (2,), (1,), 1, (3,))
del TENSORS["sinks"]
TENSORS["attn_mask"] = None
call = cann.prepare_grad(TENSORS, **SCALARS)
answer(log=log())
"""),
        runtime,
    )
    tensors = {entry["id"]: entry for entry in got["log"] if entry["symbol"] == "aclCreateTensor"}
    phase = got["log"][-1]
    q = tensors[phase["q"]]
    assert (q["dims"], q["strides"], q["offset"]) == ([2, 5, 3, 8], [360, 24, 8, 1], 16)
    assert (q["storage_dims"], q["storage"], q["dtype"], q["format"]) == ([1000], 4096, 27, 2)
    assert tensors[phase["seqused_q"]]["dtype"] == 3
    assert phase["sinks"] == phase["attn_mask"] == -1


def test_dtypes_have_the_numbers_of_acl(runtime):
    expected = {
        "float32": 0, "float16": 1, "int8": 2, "int32": 3, "uint8": 4, "int64": 9, "bool": 12, "bfloat16": 27,
    }  # fmt: skip
    got = run(
        script(f"""
tensors = dict(zip(TENSORS, [ref(4096, dtype) for dtype in {list(expected)}]))
cann.prepare_grad(TENSORS | tensors, **SCALARS)
answer(numbers=[entry["dtype"] for entry in log() if entry["symbol"] == "aclCreateTensor"])
"""),
        runtime,
    )
    assert got["numbers"][: len(expected)] == list(expected.values())


@pytest.mark.parametrize("symbol", ["aclnnInnerFlashAttnGradGetWorkspaceSize", "aclnnInnerFlashAttnGrad"])
def test_a_failing_phase_gives_its_code_and_text_and_leaks_nothing(runtime, symbol):
    got = run(
        script(f"""
def both_phases():
    cann.prepare_grad(TENSORS, **SCALARS).run(4096, 5)

fail({symbol!r}, 561002, "  E89999: the tiling said no\\n\\tTraceBack: line 7\\n")
error, left = error_of(both_phases), live()
answer(error=error, live=left, again=error_of(both_phases), later=live())
"""),
        runtime,
    )
    said = "E89999: the tiling said no\n\tTraceBack: line 7"
    assert got["error"] == {
        "type": "CannError",
        "call": symbol,
        "code": 561002,
        "text": f"cann: {symbol} must succeed, got code 561002: {said}",
    }
    assert got["live"] == got["later"] == NOTHING
    assert got["again"] is None


def test_a_text_that_is_no_utf_8_hides_neither_call_nor_code(runtime):
    got = run(
        script("""
fail(cann.GRAD, 561002, b"E1: \\xc4\\xe3 is cut")
answer(error=error_of(lambda: cann.prepare_grad(TENSORS, **SCALARS).run(4096, 5)))
"""),
        runtime,
    )
    assert (got["error"]["type"], got["error"]["call"], got["error"]["code"]) == (
        "CannError",
        cann.GRAD,
        561002,
    )
    assert "is cut" in got["error"]["text"]


def test_a_failing_descriptor_leaks_nothing_and_says_so(runtime):
    got = run(
        script("""
fail("aclCreateTensor", 1, "")
answer(error=error_of(cann.prepare_grad, TENSORS, **SCALARS), live=live(), log=log())
"""),
        runtime,
    )
    assert (
        got["error"]["text"]
        == "cann: aclCreateTensor must succeed, got no result: the runtime gives no reason"
    )
    assert got["error"]["code"] is None
    assert got["live"]["tensors"] == got["live"]["executors"] == 0
    assert got["log"] == []


def test_a_call_that_never_runs_frees_its_executor_where_cann_can(runtime, tmp_path):
    body = script("""
call = cann.prepare_grad(TENSORS, **SCALARS)
before = live()
del call
answer(before=before, after=live())
""")
    got = run(body, runtime)
    assert got["before"]["executors"] == 1
    assert got["before"]["tensors"] == 16
    assert got["after"]["executors"] == got["after"]["tensors"] == 0
    old = cann_fake.build(tmp_path, without="aclDestroyAclOpExecutor")
    after = run(body, old)["after"]
    assert after["tensors"] == 0
    assert after["executors"] == 1


def test_a_call_runs_once_and_with_its_workspace(runtime):
    got = run(
        script("""
call = cann.prepare_grad(TENSORS, **SCALARS)
without = error_of(call.run, 0, 5)
call.run(4096, 5)
twice = error_of(call.run, 4096, 5)
answer(without=without, twice=twice, live=live(), calls=[entry["symbol"] for entry in log()][-2:])
"""),
        runtime,
    )
    assert got["without"]["text"] == "cann: workspace must have 4096 bytes, got null."
    assert got["twice"]["text"] == "cann: aclnnInnerFlashAttnGrad must run once, got a second run()."
    assert got["calls"] == ["aclnnInnerFlashAttnGradGetWorkspaceSize", "aclnnInnerFlashAttnGrad"]
    assert got["live"]["executors"] == 0


#: A change of a call, and how it is refused.
REFUSALS = {
    "del tensors['q']": "q must be a tensor, got none or another type.",
    "tensors['dq'] = None": "dq must be a tensor, got none or another type.",
    "tensors['dlse'] = ref(1)": "arguments must be those of aclnnInnerFlashAttnGrad, got dlse.",
    "scalars['layout'] = 'SBH'": "layout_q must be BSND, BNSD or TND, got none or another type.",
    "scalars['win_left'] = 'all'": "win_left must be int64, got none or another type.",
    "tensors['k'] = ref(1, 'float64')": (
        "dtype must be one of float32, float16, int8, int32, uint8, int64, bool, bfloat16, got float64."
    ),
    "tensors['k'] = ref(1, strides=(4, 1))": (
        "strides must be one per dimension, got 2 strides for 3 dimensions."
    ),
}


@pytest.fixture(scope="module")
def refusals(runtime):
    return run(
        script(f"""
errors = {{}}
for change in {list(REFUSALS)}:
    tensors, scalars = dict(TENSORS), dict(SCALARS)
    exec(change)
    errors[change] = error_of(cann.prepare_grad, tensors, **scalars)
answer(errors=errors, live=live())
"""),
        runtime,
    )


@pytest.mark.parametrize("change", REFUSALS)
def test_wrong_arguments_are_refused_by_name(refusals, change):
    error = refusals["errors"][change]
    assert (error["type"], error["text"]) == ("ValueError", "cann: " + REFUSALS[change])
    assert refusals["live"] == NOTHING


def test_memset_queues_zeros_and_nothing_for_no_bytes(runtime):
    got = run(
        script("""
cann.memset_async(4096, 100, 7)
cann.memset_async(4096, 0, 7)
calls = log()
fail("aclrtMemsetAsync", 107000, "EE1001: bad stream")
answer(calls=calls, error=error_of(cann.memset_async, 1, 1, 1))
"""),
        runtime,
    )
    assert got["calls"] == [
        {
            "symbol": "aclrtMemsetAsync",
            "address": 4096,
            "capacity": 100,
            "value": 0,
            "bytes": 100,
            "stream": 7,
        }
    ]
    assert got["error"]["text"] == "cann: aclrtMemsetAsync must succeed, got code 107000: EE1001: bad stream"


def test_soc_name_and_a_runtime_that_does_not_know_it(runtime):
    got = run(
        script("""
name = cann.soc_name()
fail("aclrtGetSocName", 1, "no device")
answer(name=name, error=error_of(cann.soc_name))
"""),
        runtime,
    )
    assert got["name"] == "Ascend950PR_9599"
    assert got["error"]["text"] == "cann: aclrtGetSocName must succeed, got no result: no device"


MISSING = """
import json
from fag_kernel import cann
print(json.dumps([cann.missing_runtime(), cann.missing_launcher(), cann.missing_operator(cann.GRAD)]))
"""


def test_nothing_is_missing_in_a_complete_runtime(runtime):
    assert run(MISSING, runtime) == [None, None, None]


def test_without_cann_everything_is_missing_and_says_why(tmp_path):
    (tmp_path / "vendors").mkdir()
    runtime, launcher, operator = run(MISSING, tmp_path)
    not_found = "cannot open shared object file: No such file or directory"
    assert (
        runtime == launcher == f"the CANN runtime (libascendcl.so) does not load: libascendcl.so: {not_found}"
    )
    assert operator == (
        f"CANN's custom operator package (libcust_opapi.so) does not load: libcust_opapi.so: {not_found}"
    )


@pytest.mark.parametrize(
    ("symbol", "which", "reason"),
    [
        ("aclrtMemsetAsync", 0, "libascendcl.so has no symbol aclrtMemsetAsync"),
        ("rtKernelLaunch", 1, "libruntime.so has no symbol rtKernelLaunch"),
        (
            "aclnnInnerFlashAttnGrad",
            2,
            "libcust_opapi.so has no symbol aclnnInnerFlashAttnGradGetWorkspaceSize",
        ),
        ("aclCreateTensor", 2, "libopapi.so has no symbol aclCreateTensor"),
    ],
)
def test_a_missing_symbol_is_named(tmp_path, symbol, which, reason):
    reasons = run(MISSING, cann_fake.build(tmp_path, without=symbol))
    assert reasons[which] == reason


def test_a_damaged_library_is_named_without_its_folder(tmp_path):
    cann_fake.build(tmp_path, libraries=LIBRARIES)
    broken = tmp_path / CUSTOM_LIBRARY
    broken.parent.mkdir(parents=True)
    broken.write_text("not a library")
    reason = run(MISSING, tmp_path)[2]
    assert reason.startswith(
        "CANN's custom operator package (libcust_opapi.so) does not load: libcust_opapi.so: "
    )
    assert str(tmp_path) not in reason
    assert "/" not in reason


@pytest.fixture
def packages(tmp_path):
    """Three custom packages, each with a log of its own; the first by name lacks the operator."""
    for name in ("a", "b", "c"):
        without = "aclnnInnerFlashAttnGrad" if name == "a" else ""
        cann_fake.build(tmp_path, without=without, libraries=(f"vendors/{name}/op_api/lib/libcust_opapi.so",))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "own", "chosen"),
    [
        (None, "", "b"),
        ("# a comment\nload_priority=c,a\n", "", "c"),
        (None, "none:vendors/c", "c"),
        ("load_priority=c\n", "vendors/a:vendors/b", "b"),
    ],
    ids=["by-name", "by-config", "by-variable", "variable-first"],
)
def test_the_first_custom_package_with_the_operator_is_called(runtime, packages, config, own, chosen):
    if config is not None:
        (packages / "vendors" / "config.ini").write_text(config)
    got = run(
        script(f"""
cann.prepare_grad(TENSORS, **SCALARS)
logs = {{}}
for name in "abc":
    library = ctypes.CDLL(f"{packages}/vendors/{{name}}/op_api/lib/libcust_opapi.so")
    library.fake_log.restype = ctypes.c_char_p
    logs[name] = json.loads(library.fake_log())
answer(called=[name for name, log in logs.items() if log])
"""),
        runtime,
        ASCEND_OPP_PATH=str(packages),
        ASCEND_CUSTOM_OPP_PATH=":".join(str(packages / folder) for folder in own.split(":") if folder),
    )
    assert got["called"] == [chosen]


def test_what_was_missing_is_looked_for_again(runtime, tmp_path):
    """The user may ask before torch_npu is imported: its libraries are found by name once they are loaded."""
    got = run(
        f"""
import ctypes, json
from fag_kernel import cann
before = cann.missing_runtime()
ctypes.CDLL({str(runtime / "libascendcl.so")!r})
print(json.dumps([before, cann.missing_runtime()]))
""",
        tmp_path,
    )
    assert got[0] is not None
    assert got[1] is None


def test_errors_of_a_missing_runtime_say_what_to_do(tmp_path):
    (tmp_path / "vendors").mkdir()
    got = run(
        """
import json
from fag_kernel import cann
try:
    cann.soc_name()
except cann.CannError as error:
    print(json.dumps([str(error), error.call, error.code]))
""",
        tmp_path,
    )
    assert got[0].startswith(
        "cann: the runtime must be complete, got: the CANN runtime (libascendcl.so) does not load: "
    )
    assert got[0].endswith("Source the set_env.sh of CANN.")
    assert got[1:] == [None, None]


def test_importing_loads_no_library(runtime):
    loaded = run(
        """
import json
import fag_kernel.cann, fag_kernel.ascend950
print(json.dumps("libascendcl" in open("/proc/self/maps").read()))
""",
        runtime,
    )
    assert loaded is False


def test_errors_survive_the_way_between_processes():
    error = pickle.loads(pickle.dumps(cann.CannError("rtKernelLaunch", 507000, "E1: stream is gone")))
    assert (error.call, error.code, error.text) == ("rtKernelLaunch", 507000, "E1: stream is gone")
    assert str(error) == "cann: rtKernelLaunch must succeed, got code 507000: E1: stream is gone"


def test_another_operator_is_refused():
    with pytest.raises(ValueError, match=r"operator must be one whose arguments are known, got aclnnAdd\."):
        cann.operator_arguments("aclnnAdd")


def test_both_operators_take_metadata_and_sinks():
    for symbol in (cann.GRAD, cann.FORWARD):
        kinds = dict(cann.operator_arguments(symbol))
        assert kinds["sinks"] == kinds["metadata"] == "optional tensor"
