"""flash_attn and flash_attn_grad on NumPy arrays: results, kinds of arrays, and what is refused."""

import doctest
import importlib

import ml_dtypes
import numpy as np
import pytest

import fag_kernel
from fag_kernel import flash_attn, flash_attn_grad
from fag_metadata import flash_attn_metadata

BF16 = ml_dtypes.bfloat16
# Relative L2 error of an output: the rounding of the type, with room for 16-bit operands of five products.
BOUND = {np.dtype(np.float32): 2e-6, np.dtype(np.float16): 2e-3, np.dtype(BF16): 1e-2}

# Axes that turn a (b, s, n, d) array into each dense layout.
AXES = {"BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3)}


def to_layout(array, layout):
    if layout == "TND":
        return array.reshape(-1, *array.shape[2:])
    return np.ascontiguousarray(array.transpose(AXES[layout]))


def from_layout(array, layout, b):
    if layout == "TND":
        return array.reshape(b, -1, *array.shape[1:])
    return array.transpose(AXES[layout])


def reference(q, k, v, dout, *, scale, mask=0, left=-1, right=-1, sinks=None, out=None, lse=None):
    """(out, lse), or with the forward's out and lse the gradient (dq, dk, dv). float64, (b, s, n, d)."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    g = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, g, axis=2), np.repeat(v, g, axis=2)
    scores = scale * np.einsum("bind,bjnd->bnij", q, k)
    s1, s2 = scores.shape[-2:]
    i, j = np.arange(s1)[:, None] + s2 - s1, np.arange(s2)
    seen = np.ones((s1, s2), bool)
    if mask == 3:
        seen = j <= i
    elif mask == 4:
        seen = ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))
    scores = np.where(seen, scores, -np.inf)
    if lse is None:
        columns = scores
        if sinks is not None:
            sink = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (*scores.shape[:3], 1))
            columns = np.concatenate([scores, sink], axis=-1)
        top = columns.max(axis=-1, keepdims=True, initial=-1e300)
        lse = (top + np.log(np.exp(columns - top).sum(axis=-1, keepdims=True)))[..., 0]
    p = np.exp(scores - lse[..., None].astype(np.float64))
    if out is None:
        return np.einsum("bnij,bjnd->bind", p, v), lse
    delta = (dout * out.astype(np.float64)).sum(-1).transpose(0, 2, 1)[..., None]
    ds = p * (np.einsum("bind,bjnd->bnij", dout, v) - delta)
    dq = scale * np.einsum("bnij,bjnd->bind", ds, k)
    dk = scale * np.einsum("bnij,bind->bjnd", ds, q)
    dv = np.einsum("bnij,bind->bjnd", p, dout)
    return dq, *(x.reshape(*x.shape[:2], -1, g, x.shape[3]).sum(3) for x in (dk, dv))


def error(found, wanted):
    return np.linalg.norm(found.astype(np.float64) - wanted) / max(np.linalg.norm(wanted), 1e-30)


def arrays(dtype=np.float32, b=2, s1=70, s2=90, n1=4, n2=2, d=24, dv=16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((b, s1, n1, d), (b, s2, n2, d), (b, s2, n2, dv), (b, s1, n1, dv))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "TND"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("mask", "left", "right"), [("no_mask", -1, -1), (3, -1, -1), ("Sliding_Window", 20, 5)]
)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_agrees_with_the_formulas(layout, dtype, mask, left, right, has_sinks):
    q, k, v, dout = arrays(dtype)
    sinks = np.linspace(-1, 2, 4, dtype=np.float32) if has_sinks else None
    options = {"mask_mode": mask, "win_left": left, "win_right": right, "sinks": sinks, "softmax_scale": 0.25}
    options |= dict.fromkeys(("layout_q", "layout_kv", "layout_out"), layout)
    if layout == "TND":
        options |= {"cu_seqlens_q": [0, 70, 140], "cu_seqlens_kv": np.array([0, 90, 180], np.int32)}
    inputs = [to_layout(x, layout) for x in (q, k, v)]
    out, lse = flash_attn(*inputs, return_softmax_lse=True, **options)
    grads = flash_attn_grad(*inputs, to_layout(dout, layout), out, lse, **options)

    code = {"no_mask": 0, 3: 3, "Sliding_Window": 4}[mask]
    math = {"scale": 0.25, "mask": code, "left": left, "right": right}
    out = from_layout(out, layout, 2)
    lse = lse.reshape(4, 2, 70).transpose(1, 0, 2) if layout == "TND" else lse
    wanted_out, wanted_lse = reference(q, k, v, dout, sinks=sinks, **math)
    assert error(out, wanted_out) < BOUND[out.dtype]
    assert np.abs(lse - wanted_lse).max() < 2e-5
    for found, wanted in zip(grads, reference(q, k, v, dout, out=out, lse=lse, **math), strict=True):
        assert found.dtype == dtype
        assert error(from_layout(found, layout, 2), wanted) < BOUND[found.dtype]


def test_padding_is_zero_and_lse_minus_infinity():
    q, k, v, dout = arrays(b=2)
    used = {"seqused_q": [50, 0], "seqused_kv": np.array([90, 13], np.int32)}
    q[0, 50:] = k[1, 13:] = v[1, 13:] = dout[0, 50:] = np.nan
    out, lse = flash_attn(q, k, v, return_softmax_lse=True, **used)
    assert not out[0, 50:].any()
    assert not out[1].any()
    assert np.isneginf(lse[0, :, 50:]).all()
    assert np.isfinite(out).all()
    dq, dk, dv = flash_attn_grad(q, k, v, dout, out, lse, softmax_scale=1.0, **used)
    assert not dq[0, 50:].any()
    assert not dq[1].any()
    assert not dk[1].any()
    assert not dv[1].any()
    assert dk[0].any()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_forward_may_turn_bnsd_into_bsnd():
    q, k, v, _ = (to_layout(x, "BNSD") for x in arrays())
    plain, _ = flash_attn(q, k, v, layout_q="BNSD", layout_kv="BNSD", layout_out="BNSD")
    turned, _ = flash_attn(q, k, v, layout_q="BNSD", layout_kv="BNSD", layout_out="BSND")
    assert turned.flags.c_contiguous
    assert np.array_equal(turned, plain.transpose(0, 2, 1, 3))


def test_lse_is_a_placeholder_unless_asked_for():
    q, k, v, _ = arrays()
    assert flash_attn(q, k, v)[1].tolist() == [0.0]
    assert flash_attn(q, k, v, return_softmax_lse=True)[1].shape == (2, 4, 70)


def test_default_scales_are_canns():
    q, k, v, dout = arrays(s1=1, s2=2, n1=1, n2=1)
    same = dict(zip(("q", "k", "v"), (q, k, v), strict=True))
    assert np.array_equal(flash_attn(**same)[0], flash_attn(**same, softmax_scale=1.0)[0])
    out, lse = flash_attn(**same, softmax_scale=24**-0.5, return_softmax_lse=True)
    assert np.array_equal(flash_attn(**same, softmax_scale=0.0)[0], out)
    for found, wanted in zip(
        flash_attn_grad(q, k, v, dout, out, lse),
        flash_attn_grad(q, k, v, dout, out, lse, softmax_scale=24**-0.5),
        strict=True,
    ):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    "shape", [{"b": 0}, {"s1": 0}, {"s2": 0}, {"s1": 1, "s2": 1}], ids=["b0", "s1-0", "s2-0", "one"]
)
def test_empty_and_smallest_problems(shape):
    q, k, v, dout = arrays(**shape)
    out, lse = flash_attn(q, k, v, return_softmax_lse=True)
    grads = flash_attn_grad(q, k, v, dout, out, lse, softmax_scale=1.0)
    assert [x.shape for x in (out, *grads)] == [dout.shape, q.shape, k.shape, v.shape]
    if shape == {"s2": 0}:
        assert np.isneginf(lse).all()
        assert not out.any()
        assert not grads[0].any()
    if shape == {"s1": 0}:
        assert not grads[1].any()
        assert not grads[2].any()


def test_same_bits_for_every_number_of_threads():
    q, k, v, dout = arrays(BF16, s1=300, s2=500)
    results = []
    for num_threads in (1, 2, 3, 8, np.int64(2), None):
        options = {"mask_mode": "causal", "softmax_scale": 0.2, "num_threads": num_threads}
        out, lse = flash_attn(q, k, v, return_softmax_lse=True, **options)
        results.append((out, lse, *flash_attn_grad(q, k, v, dout, out, lse, **options)))
    for result in results[1:]:
        assert [x.tobytes() for x in result] == [x.tobytes() for x in results[0]]


# ---- kinds of arrays
# -------------------------------------------------------------------------------------------------


def transposed(x):
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def reversed_rows(x):
    return np.ascontiguousarray(x[:, ::-1])[:, ::-1]


def sliced(x):
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)
    wide[..., 2:-1] = x
    return wide[..., 2:-1]


def stepped(x):
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def misaligned(x):
    raw = np.empty(x.nbytes + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(x.tobytes(), np.uint8)
    return raw.view(x.dtype).reshape(x.shape)


def odd_strides(x):
    """Fields of packed records: strides that are no whole number of elements."""
    records = np.zeros(x.shape[:-1], [("pad", np.uint8), ("x", x.dtype, x.shape[-1:])])
    records["x"] = x
    return records["x"]


def big_endian(x):
    return x.astype(x.dtype.newbyteorder(">"))


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


class WithDlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **_):
        return self.array.__dlpack__()


class WithArray:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


@pytest.mark.parametrize(
    "form",
    [
        transposed,
        reversed_rows,
        sliced,
        stepped,
        misaligned,
        odd_strides,
        big_endian,
        read_only,
        np.asfortranarray,
        WithDlpack,
        WithArray,
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_any_array_gives_the_same_bits(form, dtype):
    q, k, v, dout = arrays(dtype)
    sinks = np.ones(4, np.float32)
    options = {"softmax_scale": 0.3, "mask_mode": "causal"}
    out, lse = flash_attn(q, k, v, sinks=sinks, return_softmax_lse=True, **options)
    grads = flash_attn_grad(q, k, v, dout, out, lse, sinks=sinks, **options)
    other = flash_attn(
        *(form(x) for x in (q, k, v)), sinks=big_endian(sinks), return_softmax_lse=True, **options
    )
    other_grads = flash_attn_grad(
        *(form(x) for x in (q, k, v, dout, out)), lse.transpose().copy().transpose(), **options
    )
    for found, wanted in zip((*other, *other_grads), (out, lse, *grads), strict=True):
        assert found.tobytes() == wanted.tobytes()
        assert found.flags.c_contiguous
        assert found.dtype == wanted.dtype


def test_expanded_gradient_with_stride_zero():
    q, k, v, dout = arrays(BF16)
    ones = np.broadcast_to(np.ones((), BF16), dout.shape)
    out, lse = flash_attn(q, k, v, return_softmax_lse=True)
    for found, wanted in zip(
        flash_attn_grad(q, k, v, ones, out, lse),
        flash_attn_grad(q, k, v, np.ones(dout.shape, BF16), out, lse),
        strict=True,
    ):
        assert found.tobytes() == wanted.tobytes()


def test_tensors_of_another_framework():
    torch = pytest.importorskip("torch", reason="torch is not installed; any DLPack exporter would do")
    q, k, v, dout = (torch.from_numpy(x.astype(np.float32)).bfloat16() for x in arrays())
    native = [x.float().numpy().astype(BF16) for x in (q, k, v, dout)]
    out, lse = flash_attn(q, k, v, return_softmax_lse=True)
    assert out.dtype == BF16
    assert out.tobytes() == flash_attn(*native[:3])[0].tobytes()
    grads = flash_attn_grad(q, k, v, dout, torch.from_numpy(out.view(np.int16)).view(torch.bfloat16), lse)
    assert [x.tobytes() for x in grads] == [x.tobytes() for x in flash_attn_grad(*native, out, lse)]
    with pytest.raises(TypeError, match="flash_attn: k must be readable on the CPU, got Tensor"):
        flash_attn(q, k.to("meta"), v)
    with pytest.raises(
        TypeError, match="flash_attn: q must be readable on the CPU, got Tensor .*require gradient"
    ):
        flash_attn(q.requires_grad_(), k, v)


def test_inputs_stay_and_outputs_are_fresh():
    q, k, v, dout = arrays()
    out, lse = flash_attn(q, k, v, return_softmax_lse=True)
    inputs = [q, k, v, dout, out, lse]
    before = [x.tobytes() for x in inputs]
    first, second = (flash_attn_grad(*inputs, softmax_scale=1.0) for _ in range(2))
    assert [x.tobytes() for x in inputs] == before
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]
    for result in first:
        assert not any(np.shares_memory(result, x) for x in (*inputs, *second))


def test_attn_mask_is_canns_constant_or_refused():
    q, k, v, _ = arrays()
    constant = np.triu(np.ones((2048, 2048), np.int8), 1)
    plain, _ = flash_attn(q, k, v, mask_mode="causal")
    for mask in (constant, constant.astype(bool), constant.astype(np.uint8)):
        assert np.array_equal(flash_attn(q, k, v, mask_mode="causal", attn_mask=mask)[0], plain)
    with pytest.raises(ValueError, match="attn_mask must be CANN's constant"):
        flash_attn(q, k, v, mask_mode="causal", attn_mask=1 - constant)
    with pytest.raises(ValueError, match="attn_mask must be None with mask_mode NO_MASK"):
        flash_attn(q, k, v, attn_mask=constant)


# ---- metadata
# -----------------------------------------------------------------------------------------------------------

SIZES = {"batch_size": 2, "max_seqlen_q": 70, "max_seqlen_kv": 90}


@pytest.mark.parametrize("target", ["cpu", "Ascend950PR_9589"])
@pytest.mark.parametrize("wrap", [np.asarray, WithDlpack, lambda x: np.repeat(x, 2)[::2]])
def test_metadata_of_any_target_serves_both_functions(target, wrap):
    q, k, v, dout = arrays()
    words = wrap(flash_attn_metadata(4, 2, 24, head_dim_v=16, is_grad_enabled=True, target=target, **SIZES))
    out, lse = flash_attn(q, k, v, metadata=words, return_softmax_lse=True)
    grads = flash_attn_grad(q, k, v, dout, out, lse, metadata=words, softmax_scale=1.0)
    plain = reference(q, k, v, dout, scale=1.0, out=out, lse=lse)
    assert all(error(found, wanted) < 2e-6 for found, wanted in zip(grads, plain, strict=True))


def test_metadata_that_does_not_fit_is_refused_by_field():
    q, k, v, dout = arrays()
    out, lse = flash_attn(q, k, v, return_softmax_lse=True)
    forward_only = flash_attn_metadata(4, 2, 24, head_dim_v=16, **SIZES)
    assert flash_attn(q, k, v, metadata=forward_only)[0].tobytes() == out.tobytes()
    with pytest.raises(ValueError, match="flash_attn_grad: metadata.*is_grad_enabled"):
        flash_attn_grad(q, k, v, dout, out, lse, metadata=forward_only)
    with pytest.raises(ValueError, match="flash_attn: metadata.*mask_mode"):
        flash_attn(q, k, v, mask_mode=3, metadata=forward_only)
    with pytest.raises(ValueError, match="must be made by flash_attn_metadata"):
        flash_attn(q, k, v, metadata=np.zeros(8192, np.int32))
    with pytest.raises(TypeError, match="flash_attn: metadata must be an int32 array, got int64"):
        flash_attn(q, k, v, metadata=forward_only.astype(np.int64))
    with pytest.raises(TypeError, match="flash_attn: metadata must be an array, got list"):
        flash_attn(q, k, v, metadata=forward_only.tolist())


# ---- refusals
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"q": "text"}, TypeError, "flash_attn: q must be an array, got str"),
        ({"k": None}, TypeError, "flash_attn: k must be an array, got NoneType"),
        ({"v": np.float32(1)}, TypeError, "flash_attn: v must be an array, got float32"),
        ({"q": np.array(1.0, np.float32)}, ValueError, "flash_attn: q must have shape"),
        ({"q": np.zeros((2, 70, 4, 24))}, TypeError, "flash_attn: q must be float16, bfloat16 or float32"),
        ({"k": np.zeros((2, 90, 2, 24), np.float16)}, TypeError, "flash_attn: k must have the dtype of q"),
        ({"sinks": np.zeros(3, np.float32)}, ValueError, "flash_attn: sinks must have shape"),
        ({"sinks": np.zeros(4)}, TypeError, "flash_attn: sinks must be float32, got float64"),
        ({"block_table": np.zeros(1)}, ValueError, "flash_attn: block_table must be None, got shape"),
        ({"softmax_scale": np.nan}, ValueError, "flash_attn: softmax_scale must be finite"),
        ({"mask_mode": 1}, ValueError, "flash_attn: mask_mode must be"),
        ({"win_left": 3}, ValueError, "flash_attn: win_left must be -1 with mask_mode NO_MASK, got 3"),
        ({"layout_q": "bsnd"}, ValueError, "flash_attn: layout_q must be BSND, BNSD or TND"),
        ({"seqused_q": [71, 0]}, ValueError, "flash_attn: seqused_q must not exceed"),
        ({"max_seqlen_q": 69}, ValueError, "flash_attn: max_seqlen_q must be -1 or at least"),
        ({"num_threads": 0}, ValueError, "flash_attn: num_threads must be at least 1, got 0"),
        ({"num_threads": -1}, ValueError, "flash_attn: num_threads must be at least 1, got -1"),
        ({"num_threads": 1.5}, TypeError, "flash_attn: num_threads must be an int or None, got float"),
        ({"num_threads": True}, TypeError, "flash_attn: num_threads must be an int or None, got bool"),
    ],
)
def test_rejects(changes, kind, message):
    q, k, v, _ = arrays()
    with pytest.raises(kind, match=message):
        flash_attn(**({"q": q, "k": k, "v": v} | changes))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"dout": np.zeros((2, 70, 4, 24), np.float32)}, ValueError, "flash_attn_grad: dout must have shape"),
        ({"attn_out": np.zeros((2, 70, 4, 16), np.float16)}, TypeError, "attn_out must have the dtype of q"),
        ({"softmax_lse": np.zeros((2, 4, 70))}, TypeError, "softmax_lse must be float32, got float64"),
        ({"softmax_lse": np.zeros((2, 70, 4), np.float32)}, ValueError, "softmax_lse must have shape"),
        ({"softmax_lse": 0}, TypeError, "flash_attn_grad: softmax_lse must be an array, got int"),
        ({"layout_out": "BNSD"}, ValueError, "flash_attn_grad: layout_out must equal layout_q"),
        ({"num_threads": 0}, ValueError, "flash_attn_grad: num_threads must be at least 1"),
    ],
)
def test_grad_rejects(changes, kind, message):
    q, k, v, dout = arrays()
    out, lse = flash_attn(q, k, v, return_softmax_lse=True)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "attn_out": out, "softmax_lse": lse}
    with pytest.raises(kind, match=message):
        flash_attn_grad(**(inputs | changes))


def test_bfloat16_without_ml_dtypes_names_the_extra(monkeypatch):
    from fag_kernel import arrays as module

    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(
        TypeError, match='q must not be bfloat16 without.*pip install "fag-kernel\\[bfloat16\\]"'
    ):
        module.bfloat16("flash_attn", "q")


@pytest.mark.parametrize("name", ["numpy_api", "plan", "tiling_key"])
def test_docstring_examples(name):
    module = importlib.import_module(f"fag_kernel.{name}")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


def test_public_names():
    assert fag_kernel.flash_attn is flash_attn
    assert set(fag_kernel.__all__) <= set(dir(fag_kernel))
