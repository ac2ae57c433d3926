"""The stand-in's operators: descriptors, the two phases, and what it does with the workspace."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import raw_runtime as rt
from stub import Stub

import fag_kernel
from fag_metadata import flash_attn_metadata

B, S1, S2, N1, N2, D = 1, 5, 7, 4, 2, 8
GRAD = "aclnnInnerFlashAttnGrad"

pytestmark = pytest.mark.usefixtures("stream")


class Problem:
    """A small gradient, on the host and on the device."""

    def __init__(self, dtype: str = "float16") -> None:
        random = np.random.default_rng(0)
        self.q, self.dout = (random.standard_normal((B, S1, N1, D)).astype(dtype) for _ in range(2))
        self.k, self.v = (random.standard_normal((B, S2, N2, D)).astype(dtype) for _ in range(2))
        self.out, self.lse = fag_kernel.flash_attn(
            self.q, self.k, self.v, softmax_scale=0.0, return_softmax_lse=True
        )
        self.metadata = flash_attn_metadata(
            N1, N2, D, batch_size=B, max_seqlen_q=S1, max_seqlen_kv=S2, is_grad_enabled=True
        )
        self.expected = fag_kernel.flash_attn_grad(self.q, self.k, self.v, self.dout, self.out, self.lse)
        arrays = (self.q, self.k, self.v, self.dout, self.out, self.lse, self.metadata)
        self.inputs = [rt.tensor(rt.upload(array), array.dtype.name, array.shape) for array in arrays]
        self.addresses = [rt.malloc(array.nbytes) for array in (self.q, self.k, self.v)]
        self.outputs = [
            rt.tensor(address, dtype, array.shape)
            for address, array in zip(self.addresses, (self.q, self.k, self.v), strict=True)
        ]

    def prepare(self, **changed: int) -> tuple[int, int]:
        """Phase one; `changed` replaces inputs by name."""
        names = ("q", "k", "v", "dout", "attn_out", "softmax_lse", "metadata")
        inputs = {**dict(zip(names, self.inputs, strict=True)), **changed}
        return rt.prepare(
            GRAD, *(inputs[name] for name in names[:6]), *(None,) * 6, inputs["metadata"],
            ctypes.c_double(0.0), 0, -1, -1, -1, -1, b"BSND", b"BSND", b"BSND", *self.outputs,
        )  # fmt: skip

    def results(self) -> list[np.ndarray]:
        return [
            rt.read(address, array.dtype, array.shape)
            for address, array in zip(self.addresses, self.expected, strict=True)
        ]

    def destroy(self) -> None:
        rt.destroy(*self.inputs, *self.outputs)


def test_a_gradient_runs_on_its_stream(stub: Stub, stream: int) -> None:
    stub.set_latency(50_000)
    problem = Problem()
    size, executor = problem.prepare()
    assert size > 0
    assert stub.live()["executors"] == 1
    workspace = rt.malloc(size)
    rt.run(GRAD, workspace, size, executor, stream)
    assert all(np.isnan(result).all() for result in problem.results()), "it ran before its turn"
    problem.destroy()  # allowed once phase two has returned
    rt.synchronize(stream)
    for result, expected in zip(problem.results(), problem.expected, strict=True):
        np.testing.assert_array_equal(result, expected)
    assert stub.live()["executors"] == stub.live()["tensors"] == 0


def test_strides_and_offset_of_a_descriptor_count(stream: int) -> None:
    problem = Problem()
    storage = np.full((2, B, S1, D, N1), np.nan, np.float16)
    storage[1] = problem.q.transpose(0, 1, 3, 2)
    strided = rt.tensor(
        rt.upload(storage), "float16", problem.q.shape,
        strides=(S1 * D * N1, D * N1, 1, N1), offset=B * S1 * D * N1, storage=(storage.size,),
    )  # fmt: skip
    size, executor = problem.prepare(q=strided)
    rt.run(GRAD, rt.malloc(size), size, executor, stream)
    rt.synchronize(stream)
    np.testing.assert_array_equal(problem.results()[1], problem.expected[1])
    rt.destroy(strided)
    problem.destroy()


def test_a_workspace_that_is_used_by_others_early_is_spoiled(stub: Stub, stream: int) -> None:
    stub.set_latency(50_000)
    problem = Problem()
    size, executor = problem.prepare()
    workspace = rt.malloc(size)
    rt.run(GRAD, workspace, size, executor, stream)
    rt.write(workspace, np.zeros(4, np.float32))  # a tensor that took the memory before the operator ran
    rt.synchronize(stream)
    assert rt.read(workspace, np.uint8, (size,)).tolist() == [0xEE] * size
    problem.destroy()


@pytest.mark.misuses_runtime
def test_a_workspace_that_is_written_while_in_use_is_seen(stub: Stub, stream: int) -> None:
    problem = Problem()
    workspace = rt.malloc(1 << 14)
    rt.destroy(problem.outputs[0])
    problem.outputs[0] = rt.tensor(workspace, "float16", problem.q.shape)  # dq lies in the workspace
    size, executor = problem.prepare()
    rt.run(GRAD, workspace, size, executor, stream)
    rt.synchronize(stream)
    assert stub.violations() == [f"workspace written by others while in use: {GRAD}"]
    problem.destroy()


def test_idle_executors_do_nothing_and_succeed(stub: Stub, stream: int) -> None:
    problem = Problem()
    stub.install_idle_executors()
    size, executor = problem.prepare()
    rt.run(GRAD, rt.malloc(size), size, executor, stream)
    rt.synchronize(stream)
    stub.install_executors()
    assert all(np.isnan(result).all() for result in problem.results())
    problem.destroy()


@pytest.mark.misuses_runtime
def test_memory_freed_before_the_operator_runs_is_seen(stub: Stub, stream: int) -> None:
    stub.set_latency(50_000)
    problem = Problem()
    size, executor = problem.prepare()
    workspace = rt.malloc(size)
    rt.run(GRAD, workspace, size, executor, stream)
    rt.free(workspace)
    with pytest.raises(rt.RuntimeFault, match="memory was freed before the operator ran"):
        rt.synchronize(stream)
    assert stub.violations() == [f"use after free: {GRAD} workspace, {size} bytes on device 0"]
    problem.destroy()


@pytest.mark.misuses_runtime
def test_a_descriptor_must_live_until_phase_two(stub: Stub, stream: int) -> None:
    problem = Problem()
    size, executor = problem.prepare()
    problem.destroy()
    with pytest.raises(rt.RuntimeFault, match="destroyed between the phases"):
        rt.run(GRAD, rt.malloc(size), size, executor, stream)
    assert f"unknown or destroyed descriptor: {GRAD} q" in stub.violations()
    assert stub.live()["executors"] == 0


@pytest.mark.misuses_runtime
def test_an_executor_serves_once(stub: Stub, stream: int) -> None:
    problem = Problem()
    size, executor = problem.prepare()
    workspace = rt.malloc(size)
    rt.run(GRAD, workspace, size, executor, stream)
    with pytest.raises(rt.RuntimeFault, match="executor does not exist"):
        rt.run(GRAD, workspace, size, executor, stream)
    rt.synchronize(stream)
    assert stub.violations() == [f"unknown or used executor: {GRAD}"]
    problem.destroy()


def test_an_executor_that_is_not_wanted_can_be_destroyed(stub: Stub) -> None:
    problem = Problem()
    _, executor = problem.prepare()
    rt.call("aclDestroyAclOpExecutor", executor)
    assert stub.live()["executors"] == 0
    problem.destroy()


def test_a_missing_tensor_is_named(stub: Stub) -> None:
    problem = Problem()
    with pytest.raises(rt.RuntimeFault, match="GetWorkspaceSize dout is null") as caught:
        problem.prepare(dout=0)
    assert caught.value.code == 161001
    problem.destroy()


@pytest.mark.misuses_runtime
def test_a_wrong_argument_shows_at_the_synchronisation(stub: Stub, stream: int) -> None:
    problem = Problem()
    wrong = rt.tensor(rt.malloc(problem.lse.nbytes), "float16", problem.lse.shape)
    size, executor = problem.prepare(softmax_lse=wrong)
    rt.run(GRAD, rt.malloc(size), size, executor, stream)
    with pytest.raises(rt.RuntimeFault, match="softmax_lse must be float32") as caught:
        rt.synchronize(stream)
    assert caught.value.code == 507015
    assert any("the executor refused" in text for text in stub.violations())
    rt.destroy(wrong)
    problem.destroy()


@pytest.mark.misuses_runtime
def test_tensors_of_another_device_are_refused(stub: Stub, stream: int) -> None:
    problem = Problem()
    rt.use_device(1)
    other = rt.tensor(rt.upload(problem.q), "float16", problem.q.shape)
    rt.use_device(0)
    size, executor = problem.prepare(q=other)
    with pytest.raises(rt.RuntimeFault, match="outside of the device's live memory"):
        rt.run(GRAD, rt.malloc(size), size, executor, stream)
    assert any(text.startswith(f"wrong device (memory of device 1): {GRAD} q") for text in stub.violations())
    rt.destroy(other)
    problem.destroy()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"offset": 1}, "beyond the storage shape"),
        ({"strides": (4, -1)}, "stride is negative"),
        ({"address": 0}, "data pointer is null"),
    ],
)
def test_a_descriptor_of_no_tensor_is_refused(stub: Stub, arguments: dict, complaint: str) -> None:
    valid = {"address": rt.malloc(32), "dtype": "float16", "shape": (4, 4)}
    assert rt.tensor(**{**valid, **arguments}) == 0
    assert complaint in str(rt.recent_message())
    assert stub.live()["tensors"] == 0


def test_the_forward_runs_too(stream: int) -> None:
    problem = Problem()
    out, lse = rt.malloc(problem.out.nbytes), rt.malloc(problem.lse.nbytes)
    outputs = [rt.tensor(out, "float16", problem.out.shape), rt.tensor(lse, "float32", problem.lse.shape)]
    size, executor = rt.prepare(
        "aclnnInnerFlashAttn", *problem.inputs[:3], *(None,) * 6, problem.inputs[6], None,
        ctypes.c_double(0.0), 0, -1, -1, -1, -1, b"BSND", b"BSND", b"BSND", ctypes.c_bool(True), *outputs,
    )  # fmt: skip
    rt.run("aclnnInnerFlashAttn", rt.malloc(size), size, executor, stream)
    rt.synchronize(stream)
    np.testing.assert_array_equal(rt.read(out, np.float16, problem.out.shape), problem.out)
    np.testing.assert_array_equal(rt.read(lse, np.float32, problem.lse.shape), problem.lse)
    rt.destroy(*outputs)
    problem.destroy()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_casts_round_as_numpy_does(stream: int, dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    values = np.array([0, -0.0, 1, 1 / 3, 2049, 65519, -70000, 1e-7, 6e-8, 257.5], np.float32)
    if kind.kind == "i":
        values = np.trunc(values)
    source, target = rt.upload(values), rt.malloc(64)
    tensors = [rt.tensor(target, dtype, values.shape), rt.tensor(source, "float32", values.shape)]
    size, executor = rt.prepare("aclnnInplaceCopy", *tensors)
    rt.run("aclnnInplaceCopy", 0, size, executor, stream)
    rt.synchronize(stream)
    with np.errstate(over="ignore"):
        expected = values.astype(kind)
    np.testing.assert_array_equal(rt.read(target, kind, values.shape), expected)
    rt.destroy(*tensors)
