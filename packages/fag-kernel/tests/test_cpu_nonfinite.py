"""NaN, infinities, extreme lse and sinks: what is not seen must not show, what is seen may."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fag_kernel import abi

sys.path.insert(0, str(Path(__file__).parent))
from cpu_cases import CAUSAL, DTYPES, WINDOW, Case, assert_same_bits, bits, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid value|overflow):RuntimeWarning")


@pytest.fixture(params=abi.cpu_levels(), autouse=True)
def level(request):
    abi.set_cpu_level(request.param)
    yield request.param
    abi.set_cpu_level(None)


PADDED = {"b": 2, "s1": 16, "s2": 64, "seqused_q": (5, 16), "seqused_kv": (33, 0)}


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_is_not_read(dtype, layout, garbage):
    results = []
    for value in (0.0, garbage):
        case = Case(layout, dtype, n1=4, n2=2, has_sinks=True, has_dlse=True, **PADDED)
        clean = case.forward()
        in_q, in_kv = np.zeros(case.q.shape[:3] + (1,), bool), np.zeros(case.k.shape[:3] + (1,), bool)
        for i, _, s1, _, s2 in case.entries():
            for head in range(4):
                case.rows(in_q, i, 0, s1, head)[...] = True
                case.rows(in_kv, i, 0, s2, head // 2)[...] = True
        out = np.where(in_q, clean[0], np.asarray(value).astype(case.q.dtype))
        lse_used = in_q[..., 0] if layout == "BNSD" else in_q[..., 0].transpose(0, 2, 1)
        lse = np.where(lse_used, clean[1], np.float32(value))
        case.dlse = np.where(lse_used, case.dlse, np.float32(value))
        for name, used in (("q", in_q), ("dout", in_q), ("k", in_kv), ("v", in_kv)):
            array = getattr(case, name)
            setattr(case, name, np.where(used, array, np.asarray(value).astype(array.dtype)))
        results.append(
            (*case.forward(), *case.backward(np.ascontiguousarray(out), np.ascontiguousarray(lse)))
        )
    assert_same_bits(results[1], results[0])
    assert not np.any(results[0][3].astype(np.float32)[1]), "no key of the second entry is used"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 40, 150])
def test_a_bad_value_reaches_only_those_who_see_it(dtype, bad, size):
    """Causal: row `last` of q, k, v, dout is seen by or sees only what lies on or below the diagonal."""
    clean = Case("BSND", dtype, n1=1, n2=1, d=16, s1=size, s2=size, mask_mode=CAUSAL)
    out, lse = clean.forward()
    reference = (out, lse, *clean.backward(out, lse))
    last = size - 1

    def run(name, row):
        case = Case("BSND", dtype, n1=1, n2=1, d=16, s1=size, s2=size, mask_mode=CAUSAL)
        getattr(case, name)[0, row, 0, 3] = bad
        return (*case.forward(), *case.backward(out, lse))

    # The last value: the forward of earlier rows, their dq, and all of dv are as before.
    got = run("v", last)
    assert_same_bits(
        [got[0][:, :last], got[2][:, :last], got[4]], [out[:, :last], reference[2][:, :last], reference[4]]
    )
    assert not np.isfinite(got[0][0, last, 0, 3].astype(np.float32))
    # The last key: nothing of the earlier rows and keys but through row `last`.
    got = run("k", last)
    assert_same_bits([got[0][:, :last], got[2][:, :last]], [out[:, :last], reference[2][:, :last]])
    # The first query sees the first key only: all other gradients of keys are as before.
    got = run("q", 0)
    assert_same_bits(
        [got[3][:, 1:], got[4][:, 1:], got[2][:, 1:]],
        [x[:, 1:] for x in (reference[3], reference[4], reference[2])],
    )
    got = run("dout", 0)
    assert_same_bits(
        [got[3][:, 1:], got[4][:, 1:], got[2][:, 1:]],
        [x[:, 1:] for x in (reference[3], reference[4], reference[2])],
    )
    assert not np.isfinite(got[4][0, 0, 0, 3].astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bad_values_in_a_window(dtype):
    """Whatever a row of q, k, v or dout holds, rows and keys beyond the window keep their bits."""
    options = {
        "n1": 1,
        "n2": 1,
        "d": 16,
        "s1": 300,
        "s2": 300,
        "mask_mode": WINDOW,
        "win_left": 10,
        "win_right": 5,
    }
    clean = Case("BSND", dtype, **options)
    out, lse = clean.forward()
    reference = (out, *clean.backward(out, lse)[:3])
    for name in ("q", "k", "v", "dout"):
        case = Case("BSND", dtype, **options)
        getattr(case, name)[0, 140] = np.nan
        got = (case.forward()[0], *case.backward(out, lse)[:3])
        near = slice(140 - 15, 140 + 16)
        for a, b in zip(got, reference, strict=True):
            keep = np.ones(300, bool)
            keep[near] = False
            assert_same_bits([a[:, keep]], [b[:, keep]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_lse_that_is_no_number_shows(dtype):
    """exp(NaN) is NaN, not the 1 or the 0 that exponents are clamped to; other rows keep their bits."""
    case = Case("BSND", dtype, n1=1, n2=1, d=40, s1=33, s2=33, mask_mode=CAUSAL)
    out, lse = case.forward()
    dq, _, dv, _ = case.backward(out, lse)
    lse[0, 0, 20] = np.nan
    got_dq, _, got_dv, _ = case.backward(out, lse)
    assert np.isnan(got_dq[0, 20].astype(np.float32)).all()
    assert np.isnan(got_dv[0, :21].astype(np.float32)).all()
    others = np.arange(33) != 20
    assert_same_bits([got_dq[:, others], got_dv[:, 21:]], [dq[:, others], dv[:, 21:]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_score_beyond_float32_is_not_a_probability(dtype):
    """inf - inf in the forward of the one row that has such a score."""
    case = Case("BSND", dtype, n1=1, n2=1, d=40, s1=33, s2=33, mask_mode=CAUSAL)
    expected = case.forward()[0]
    case.q[0, 20, 0, 0] = 1e30
    case.k[0, 20, 0, 0] = 1e30
    out, _ = case.forward()
    assert np.isnan(out[0, 20].astype(np.float32)).all()
    assert_same_bits([out[:, :20]], [expected[:, :20]])


@pytest.mark.parametrize("word", [0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_all_ones_is_not_rounded_away(dtype, word):
    """Memory full of ones: adding half of the last place of a bfloat16 to it would give zero."""
    case = Case("BSND", dtype, n1=1, n2=1, d=40, s1=33, s2=33, mask_mode=CAUSAL, has_dlse=True)
    case.dlse.view(np.uint32)[0, 0, 20] = word
    dq, *_ = case.backward(*case.forward())
    is_nan = np.isnan(dq.astype(np.float32))
    assert is_nan[0, 20].all()
    assert is_nan.sum() == 40


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_nan_is_the_same_bits(dtype):
    """Of two NaNs that are added one is left, and which one depends on the thread that adds them."""
    case = Case("BSND", dtype, n1=2, n2=1, d=40, s1=600, s2=600, has_dlse=True)
    clean = case.forward()
    negative_nan = {2: 0xFFFF, 4: 0xFFC12345}[case.k.itemsize]
    for array in (case.q, case.k, case.v, case.dout):
        bits(array).reshape(-1)[[4011, 16003]] = negative_nan  # views: in tiles apart, both seen by all rows
        array.reshape(-1)[[9000, 22007]] = np.inf, np.nan
    for threads in (1, 2, 3, 8):
        for array in (case.forward(threads=threads)[0], *case.backward(*clean, threads=threads)[:3]):
            nans = bits(array)[np.isnan(array.astype(np.float32))]
            assert set(nans.tolist()) == {bits(np.array(np.nan, array.dtype)).item()}


@pytest.mark.parametrize("layout", ["BNSD", "TND"])
@pytest.mark.parametrize(("s1", "s2"), [(64, 64), (192, 192), (704, 704), (1, 128), (128, 1), (33, 97)])
@pytest.mark.parametrize("mask_mode", [0, CAUSAL])
def test_pc05_strongly_negative_scores_in_partial_tiles(s1, s2, mask_mode, layout):
    lengths = {"cu_seqlens_q": (0, s1), "cu_seqlens_kv": (0, s2)} if layout == "TND" else {"s1": s1, "s2": s2}
    case = Case(layout, n1=1, n2=1, d=64, mask_mode=mask_mode, **lengths)
    case.q = (case.q.astype(np.float32) * 0.1).astype(case.q.dtype)
    case.k = (case.k.astype(np.float32) * 0.1).astype(case.k.dtype)
    case.q[..., 0] = 1
    case.k[..., 0] = -120 * 8
    out, lse = case.forward()
    assert np.nanmin(np.where(np.isfinite(lse), lse, np.nan)) < -100
    dq, dk, dv, _ = (None if x is None else x.astype(np.float64) for x in case.backward(out, lse))
    reference_dq, reference_dk, reference_dv, _, noise = case.reference_backward(out, lse)
    assert all(np.all(np.isfinite(x)) for x in (dq, dk, dv))
    assert relative_error(dv, reference_dv) < 1e-2
    assert np.linalg.norm(dk - reference_dk) <= 1e-2 * np.linalg.norm(reference_dk) + 1e-6 * noise[1]
    # Column 0 of dq is -960 * scale * rowsum(dS), and the row sums are zero but for roundings: of attn_out,
    # and of dS as a bfloat16 operand.
    rest = (dq - reference_dq)[..., 1:]
    assert np.linalg.norm(rest) <= 1e-2 * np.linalg.norm(reference_dq[..., 1:]) + 1e-7 * noise[0]
    assert np.linalg.norm((dq - reference_dq)[..., 0]) <= 2.0**-8 * noise[0]


@pytest.mark.parametrize("lse_value", [-np.inf, np.inf, 0.0, np.nan, -1e30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys_are_known_by_the_mask(dtype, lse_value):
    """Causal with more queries than keys: lse, attn_out, q and dout may hold anything there."""
    case = Case("BSND", dtype, n1=2, n2=1, d=32, s1=140, s2=100, mask_mode=CAUSAL)
    out, lse = case.forward()
    assert np.all(np.isneginf(lse[:, :, :40]))
    assert not np.any(out[:, :40].astype(np.float32))
    expected = case.backward(out, lse)
    assert not np.any(expected[0][:, :40].astype(np.float32))
    lse[:, :, :40] = lse_value
    out[:, :40] = np.nan
    case.q[:, :40] = np.nan
    case.dout[:, :40] = np.inf
    assert_same_bits(case.backward(out, lse), expected)


def test_pc01_first_rows_without_keys_by_hand():
    case = Case("BSND", n1=1, n2=1, d=8, b=2, s1=4, s2=2, mask_mode=CAUSAL)
    case.q[...], case.k[...], case.v[...], case.dout[...] = 0, 1, 1, 1
    out, lse = case.forward()
    np.testing.assert_allclose(lse[0, 0], [-np.inf, -np.inf, 0, np.log(2)], rtol=1e-6)
    dq, dk, dv, _ = case.backward(out, lse)
    np.testing.assert_array_equal(dv[:, :, 0, 0].astype(np.float32), [[1.5, 0.5]] * 2)
    assert not np.any(dq.astype(np.float32))
    assert not np.any(dk.astype(np.float32))


def sink_case(sink, **options):
    case = Case("BSND", n1=1, n2=1, d=8, has_sinks=True, **options)
    case.sinks[...] = sink
    return case


def test_pc08_sink_by_hand():
    case = sink_case(0.0, s1=1, s2=1)
    case.q[...], case.k[...], case.v[...], case.dout[...] = 0, 1, 1, 1
    out, lse = case.forward()
    np.testing.assert_array_equal(out.astype(np.float32), 0.5)
    np.testing.assert_allclose(lse, 0.6931472, rtol=1e-6)
    dq, dk, dv, dsinks = case.backward(out, lse)
    np.testing.assert_allclose(dq.astype(np.float32), 0.70711, rtol=4e-3)
    np.testing.assert_array_equal(dk.astype(np.float32), 0)
    np.testing.assert_array_equal(dv.astype(np.float32), 0.5)
    np.testing.assert_allclose(dsinks, -0.5 * 8 * 0.5, rtol=1e-6)


def test_minus_infinite_sink_is_no_sink():
    case = sink_case(-np.inf, s1=50, s2=70, mask_mode=CAUSAL)
    plain = Case("BSND", n1=1, n2=1, d=8, s1=50, s2=70, mask_mode=CAUSAL)
    plain.q, plain.k, plain.v, plain.dout = case.q, case.k, case.v, case.dout
    *got, dsinks = case.run()
    *expected, _ = plain.run()
    assert_same_bits(got, expected)
    np.testing.assert_array_equal(dsinks, 0)


@pytest.mark.parametrize("sink", [np.inf, 3e38])
def test_overwhelming_sink_takes_everything(sink):
    out, lse, dq, dk, dv, dsinks = sink_case(sink, s1=50, s2=70).run()
    np.testing.assert_array_equal(lse, np.float32(sink))
    for x in (out, dq, dk, dv, dsinks):
        np.testing.assert_array_equal(x.astype(np.float32), 0)


def test_rows_with_only_a_sink():
    case = sink_case(0.5, s1=6, s2=2, mask_mode=CAUSAL, has_dlse=True)
    out, lse, dq, _, _, dsinks = case.run()
    np.testing.assert_array_equal(lse[0, 0, :4], 0.5)
    assert not np.any(out[:, :4].astype(np.float32))
    assert not np.any(dq[:, :4].astype(np.float32))
    np.testing.assert_allclose(dsinks, case.reference_backward(out, lse)[3], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_windows_up_to_int32_max_do_not_overflow(dtype):
    sizes = {"n1": 1, "n2": 1, "d": 16, "s1": 150, "s2": 170}
    causal = Case("BSND", dtype, mask_mode=CAUSAL, **sizes).run()
    full = Case("BSND", dtype, **sizes).run()
    huge = 2**31 - 1
    for left in (huge, -1, 10**6):
        assert_same_bits(
            Case("BSND", dtype, mask_mode=WINDOW, win_left=left, win_right=0, **sizes).run(), causal
        )
        for right in (huge, -1, 10**6):
            got = Case("BSND", dtype, mask_mode=WINDOW, win_left=left, win_right=right, **sizes).run()
            assert_same_bits(got, full)


def test_empty_batches_and_lengths():
    for lengths in ({"b": 0, "s1": 5, "s2": 5}, {"s1": 0, "s2": 5}, {"s1": 5, "s2": 0}, {"s1": 0, "s2": 0}):
        for mask_mode in (0, CAUSAL):
            case = Case("BNSD", n1=4, n2=2, mask_mode=mask_mode, has_sinks=True, **lengths)
            out, lse, dq, dk, dv, dsinks = case.run()
            for x in (out, dq, dk, dv):
                assert not np.any(x.astype(np.float32))
            np.testing.assert_array_equal(lse, np.broadcast_to(case.sinks[None, :, None], lse.shape))
            np.testing.assert_array_equal(dsinks, 0)
    case = Case("TND", n1=4, n2=2, d=64, dv=32, cu_seqlens_q=(0, 3, 3, 5, 5), cu_seqlens_kv=(0, 2, 6, 6, 9))
    case.q[...], case.k[...], case.v[...], case.dout[...] = 0, 1, 1, 1
    out, lse, dq, dk, dv, _ = case.run()
    np.testing.assert_array_equal(dv[:, 0, 0].astype(np.float32), [3, 3, 0, 0, 0, 0, 0, 0, 0])
    assert np.all(np.isneginf(lse[:, 3:]))
    assert not np.any(out[3:].astype(np.float32))
