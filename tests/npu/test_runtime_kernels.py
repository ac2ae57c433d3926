"""The stand-in's kernel launches: what an object must hold, how arguments lie, what runs."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import raw_runtime as rt
from stub import Stub

import fag_kernel
from fag_kernel.ascend950.catalog import Form, Kernel, forward_kernel, launch_tiling, launches
from fag_kernel.ascend950.finalize import object_file
from fag_metadata import AttentionProblem, MaskMode, Target, metadata_for

B, S1, S2, N1, N2, D = 1, 5, 7, 2, 1, 8
TARGET = Target(name="small", cube_cores=2, vector_cores=2, l2_bytes=0)
SIZES = {"batch_size": B, "max_seqlen_q": S1, "max_seqlen_kv": S2}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

pytestmark = pytest.mark.usefixtures("stream")


class Loaded:
    """Kernels as objects and functions on the current device; their stub functions are the keys."""

    def __init__(self, *kernels: Kernel) -> None:
        self._objects, self._stubs = [], {}
        for kernel in kernels:
            magic = rt.MAGIC_VECTOR if kernel.core_type == "vector" else rt.MAGIC_MIX
            handle = rt.register_object(object_text(kernel.name, kernel.core_type), magic)
            self._objects.append(handle)
            self._stubs[kernel.name] = 0x1000 + handle
            name = kernel.name.encode()
            rt.call("rtFunctionRegister", handle, self._stubs[kernel.name], name, name, 0)

    def launch(self, kernel: Kernel, blocks: int, addresses: dict[str, int], stream: int) -> None:
        arguments = pack(kernel, blocks, addresses)
        rt.call("rtKernelLaunch", self._stubs[kernel.name], blocks, arguments, len(arguments), None, stream)

    def unload(self) -> None:
        for handle in self._objects:
            rt.call("rtDevBinaryUnRegister", handle)


def object_text(kernel: str, core: str) -> bytes:
    return f"FAG-STUB-OBJECT 1\nkernel: {kernel}\ncore: {core}\n".encode()


def pack(kernel: Kernel, blocks: int, addresses: dict[str, int]) -> bytes:
    pointers = [addresses[name] for name in kernel.parameters]
    return struct.pack(f"<3Q{len(pointers)}Q3i", rt.core_sync_address(), 0, 0, *pointers, blocks, 1, 1)


def loaded_now(stub: Stub) -> tuple[int, int]:
    """Objects and functions that are registered, whoever did it."""
    live = stub.live()
    return live["objects"], live["functions"]


class Problem:
    """A small problem on the device: `expected` is what the CPU kernels make of it."""

    def __init__(self, dtype: np.dtype[Any], layout: str = "BSND") -> None:
        self.dtype = "bf16" if dtype == BFLOAT16 else "fp16"
        lengths = {"cu_seqlens_q": [0, S1], "cu_seqlens_kv": [0, S2]} if layout == "TND" else {}
        layouts = dict.fromkeys(("layout_q", "layout_kv", "layout_out"), layout)
        described = {**lengths, **layouts, **({} if lengths else SIZES)}
        problem = AttentionProblem.from_metadata_args(N1, N2, D, is_grad_enabled=True, **described)
        metadata = metadata_for(problem, TARGET, is_grad_enabled=True)
        self.plan = fag_kernel.plan(problem, TARGET, metadata=metadata)

        random = np.random.default_rng(1)
        q, dout = (random.standard_normal(shape_of(layout, S1, N1)).astype(dtype) for _ in range(2))
        k, v = (random.standard_normal(shape_of(layout, S2, N2)).astype(dtype) for _ in range(2))
        given = {name: np.array(values, np.int32) for name, values in lengths.items()}
        call = {**given, **layouts}
        out, lse = fag_kernel.flash_attn(q, k, v, softmax_scale=0.0, return_softmax_lse=True, **call)
        gradients = fag_kernel.flash_attn_grad(q, k, v, dout, out, lse, **call)
        self.expected = {**dict(zip(("dq", "dk", "dv"), gradients, strict=True)), "out": out, "lse": lse}

        tiling = np.frombuffer(launch_tiling(self.plan, has_dlse=False), np.uint8)
        arrays = {"q": q, "k": k, "v": v, "dout": dout, "attn_out": out, "lse": lse, "metadata": metadata}
        self.addresses = {name: rt.upload(array) for name, array in {**arrays, "tiling": tiling}.items()}
        for name in ("dq", "dk", "dv", "out"):
            self.addresses[name] = rt.malloc(self.expected[name].nbytes)
        for name in ("cu_q", "cu_kv", "used_q", "used_kv", "sinks", "dlse"):
            self.addresses[name] = self.addresses["tiling"]
        for side in ("q", "kv"):
            if lengths:
                self.addresses[f"cu_{side}"] = rt.upload(given[f"cu_seqlens_{side}"])
        self.addresses["workspace"] = rt.malloc(self.plan.workspace_bytes) + self.plan.dq_offset

    def result(self, name: str) -> np.ndarray:
        """An output as it stands in device memory."""
        like = self.expected[name]
        return rt.read(self.addresses[name], like.dtype, like.shape)

    def assert_close(self, *names: str) -> None:
        """The named outputs differ from the CPU kernels' by a few roundings of their largest element."""
        step = 2.0**-8 if self.dtype == "bf16" else 2.0**-11
        for name in names:
            result, expected = (x.astype(np.float32) for x in (self.result(name), self.expected[name]))
            bound = 4 * step * np.abs(expected).max()
            np.testing.assert_allclose(result, expected, rtol=0, atol=bound, err_msg=name)


def shape_of(layout: str, rows: int, heads: int) -> tuple[int, ...]:
    return {"BSND": (B, rows, heads, D), "BNSD": (B, heads, rows, D), "TND": (rows, heads, D)}[layout]


class Gradient(Problem):
    """Its gradient, ready to be launched."""

    def __init__(self, dtype: np.dtype[Any], form: Form = "deterministic", layout: str = "BSND") -> None:
        super().__init__(dtype, layout)
        assert self.plan.tiling_key is not None
        self.steps = launches(self.plan.tiling_key, self.dtype, form)
        self.loaded = Loaded(*(step.kernel for step in self.steps))

    def launch(self, stream: int) -> None:
        grids = {"used_cube_cores": self.plan.block_dim, "cube_cores": 2, "vector_cores": 2}
        for step in self.steps:
            self.loaded.launch(step.kernel, grids[step.kernel.grid], self.addresses, stream)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("form", ["accumulate", "deterministic"])
def test_a_gradient_is_that_of_the_cpu_kernels(
    stub: Stub, stream: int, dtype: np.dtype[Any], form: Form
) -> None:
    before = loaded_now(stub)
    gradient = Gradient(dtype, form, "TND")
    assert loaded_now(stub) != before
    gradient.launch(stream)
    rt.synchronize(stream)
    gradient.assert_close("dq", "dk", "dv")
    gradient.loaded.unload()
    assert loaded_now(stub) == before


@pytest.mark.usefixtures("shortcut")
@pytest.mark.parametrize("layout", ["BSND", "BNSD", "TND"])
@pytest.mark.parametrize("form", ["accumulate", "deterministic"])
def test_the_shortcut_gives_the_bits_of_the_cpu_kernels(stream: int, form: Form, layout: str) -> None:
    gradient = Gradient(np.dtype(np.float16), form, layout)
    gradient.launch(stream)
    rt.synchronize(stream)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(gradient.result(name), gradient.expected[name])
    gradient.loaded.unload()


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_a_forward_is_that_of_the_cpu_kernels(
    request: pytest.FixtureRequest, stream: int, layout: str, is_short: bool
) -> None:
    if is_short:
        request.getfixturevalue("shortcut")
    problem = Problem(np.dtype(np.float16), layout)
    problem.addresses["lse"] = rt.malloc(problem.expected["lse"].nbytes)
    kernel = forward_kernel(
        "fp16", is_tnd=layout == "TND", mask_mode=MaskMode.NO_MASK, d=D, dv=D, has_sinks=False
    )
    loaded = Loaded(kernel)
    loaded.launch(kernel, TARGET.cube_cores, problem.addresses, stream)
    rt.synchronize(stream)
    problem.assert_close("out", "lse")
    loaded.unload()


@pytest.mark.misuses_runtime
@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("q", lambda address: 0, "q must point to 160 bytes of live memory of device 0, got 0 bytes"),
        ("q", lambda address: address + 2, "q must point to 160 bytes of live memory of device 0, got 158"),
        ("dk", lambda address: 64, "dk must point to 112 bytes"),
        ("tiling", lambda address: address + 8, "tiling must point to 200 bytes"),
    ],
)
def test_a_wrong_address_shows_at_the_synchronisation(
    stub: Stub, stream: int, name: str, change: Any, complaint: str
) -> None:
    gradient = Gradient(np.dtype(np.float16))
    main = gradient.steps[-1 if name in gradient.steps[-1].kernel.parameters else -2].kernel
    addresses = {**gradient.addresses, name: change(gradient.addresses[name])}
    gradient.loaded.launch(main, gradient.plan.block_dim, addresses, stream)
    with pytest.raises(rt.RuntimeFault, match=complaint):
        rt.synchronize(stream)
    assert len(stub.violations()) == 1
    gradient.loaded.unload()


@pytest.mark.misuses_runtime
@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda packed: packed[:-4], "arguments must have"),
        (lambda packed: struct.pack("<Q", 1) + packed[8:], "ffts_address must be"),
        (lambda packed: packed[:8] + struct.pack("<Q", 1) + packed[16:], "must be null"),
        (lambda packed: packed[:-4] + struct.pack("<i", 2), "grid must be"),
    ],
)
def test_arguments_lie_as_the_manifest_says(stub: Stub, stream: int, spoil: Any, complaint: str) -> None:
    gradient = Gradient(np.dtype(np.float16))
    kernel, blocks = gradient.steps[-1].kernel, gradient.plan.block_dim
    packed = spoil(pack(kernel, blocks, gradient.addresses))
    stub_function = gradient.loaded._stubs[kernel.name]
    rt.call("rtKernelLaunch", stub_function, blocks, packed, len(packed), None, stream)
    with pytest.raises(rt.RuntimeFault, match=complaint):
        rt.synchronize(stream)
    gradient.loaded.unload()


@pytest.mark.misuses_runtime
def test_a_kernel_runs_on_the_device_that_it_was_loaded_on(stub: Stub) -> None:
    gradient = Gradient(np.dtype(np.float16))
    rt.use_device(1)
    other = rt.new_stream()
    with pytest.raises(rt.RuntimeFault, match="loaded on another device"):
        gradient.launch(other)
    assert any(text.startswith("wrong device: fag_") for text in stub.violations())
    rt.use_device(0)
    gradient.loaded.unload()


def test_an_object_must_be_one_and_for_its_cores() -> None:
    with pytest.raises(rt.RuntimeFault, match="no device object"):
        rt.register_object(b"\x7fELF", rt.MAGIC_MIX)
    with pytest.raises(rt.RuntimeFault, match="kind of core"):
        rt.register_object(object_text("k", "vector"), rt.MAGIC_MIX)


def test_a_function_must_be_in_the_object(stub: Stub) -> None:
    before = loaded_now(stub)
    handle = rt.register_object(object_text("k", "mix"), rt.MAGIC_MIX)
    with pytest.raises(rt.RuntimeFault, match="no function other, it has k"):
        rt.call("rtFunctionRegister", handle, 0x2000, b"other", b"other", 0)
    rt.call("rtFunctionRegister", handle, 0x2000, b"k", b"k", 0)
    with pytest.raises(rt.RuntimeFault, match="registered already"):
        rt.call("rtFunctionRegister", handle, 0x2000, b"k", b"k", 0)
    rt.call("rtDevBinaryUnRegister", handle)
    assert loaded_now(stub) == before


@pytest.mark.misuses_runtime
def test_an_unregistered_function_is_not_launched(stub: Stub, stream: int) -> None:
    with pytest.raises(rt.RuntimeFault, match="not registered"):
        rt.call("rtKernelLaunch", 0x3000, 1, b"", 0, None, stream)
    assert stub.violations() == ["unknown or unregistered function: rtKernelLaunch"]


def test_the_packages_kernels_become_objects() -> None:
    for kernel in (_pass_of("zero"), _pass_of("main")):
        text = object_file(kernel.name, "fp16").read_bytes()
        assert f"kernel: {kernel.name}\ncore: {kernel.core_type}\n".encode() in text
        magic = rt.MAGIC_VECTOR if kernel.core_type == "vector" else rt.MAGIC_MIX
        rt.call("rtDevBinaryUnRegister", rt.register_object(text, magic))


def _pass_of(stage: str) -> Kernel:
    return next(step.kernel for step in launches(72, "fp16", "accumulate") if step.stage == stage)
