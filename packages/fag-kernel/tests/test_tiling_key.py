"""The tiling key: bits, the rule of valid keys, and that the host makes only valid ones."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fag_kernel.plan import plan
from fag_kernel.tiling_key import D_ALIGNS, DV_ALIGNS, MASKS, TEMPLATES, TilingKey, valid_keys
from fag_metadata import AttentionProblem, MaskMode, Target

ALL_FIELDS = [
    TilingKey(*fields)
    for fields in itertools.product(
        TEMPLATES,
        (False, True),
        MASKS,
        (False, True),
        D_ALIGNS,
        DV_ALIGNS,
        (False, True),
        (False, True),
    )
]


def rule_of_the_page(key: TilingKey) -> bool:
    """spec/host-tiling.md, "Valid keys", sentence by sentence."""
    if key.template not in ("BN2GS1S2", "BN2"):
        return False
    if key.template == "BN2":
        return (
            not key.is_tnd
            and not key.is_swizzle
            and key.d_align != 192
            and (key.d_align != 64 or key.dv_align == 128)
            and (not key.needs_zero or (key.is_multiblk and key.mask_mode != MaskMode.NO_MASK))
        )
    return (
        not key.is_multiblk
        and not key.needs_zero
        and (key.d_align != 64 or key.dv_align == 128)
        and (key.d_align == 64 or key.dv_align <= key.d_align)
        and (
            key.d_align != 192
            or (not key.is_tnd and (key.mask_mode == MaskMode.NO_MASK or not key.is_swizzle))
        )
    )


@pytest.mark.parametrize(
    ("key", "number"),
    [
        (TilingKey(), 0),
        (TilingKey(template="BN2"), 1),
        (TilingKey(is_tnd=True), 1 << 2),
        (TilingKey(mask_mode=MaskMode.CAUSAL), 1 << 3),
        (TilingKey(mask_mode=MaskMode.SLIDING_WINDOW), 2 << 3),
        (TilingKey(is_swizzle=True), 1 << 5),
        (TilingKey(d_align=128), 1 << 6),
        (TilingKey(d_align=192, dv_align=192), (2 << 6) | (1 << 8)),
        (TilingKey(template="BN2", is_multiblk=True), (1 << 9) | 1),
        (
            TilingKey(
                template="BN2", mask_mode=MaskMode.CAUSAL, d_align=128, is_multiblk=True, needs_zero=True
            ),
            0b11001001001,
        ),
    ],
)
def test_bits_of_each_field(key, number):
    assert key.encode() == number
    assert TilingKey.decode(number) == key


def test_encode_and_decode_are_inverse():
    numbers = [key.encode() for key in ALL_FIELDS]
    assert len(set(numbers)) == len(ALL_FIELDS)
    assert [TilingKey.decode(number) for number in numbers] == ALL_FIELDS


def test_valid_keys_are_those_of_the_page():
    assert {key.encode() for key in ALL_FIELDS if rule_of_the_page(key)} == set(valid_keys())
    assert [key.is_valid for key in ALL_FIELDS] == [rule_of_the_page(key) for key in ALL_FIELDS]


def test_56_keys_32_of_template_0_and_24_of_template_1():
    templates = [TilingKey.decode(number).template for number in valid_keys()]
    assert (len(templates), templates.count("BN2GS1S2"), templates.count("BN2")) == (56, 32, 24)
    assert list(valid_keys()) == sorted(valid_keys())


def test_names_are_unique():
    assert len({TilingKey.decode(number).name for number in valid_keys()}) == 56


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (TilingKey(template="BN2S2"), "template must be BN2GS1S2 or BN2"),
        (TilingKey(dv_align=192), "d_align 64 goes with dv_align 128"),
        (TilingKey(d_align=128, dv_align=192), "dv_align must not exceed d_align"),
        (TilingKey(is_multiblk=True), "no multi-block form"),
        (TilingKey(d_align=192, is_tnd=True), "need a dense layout"),
        (TilingKey(d_align=192, mask_mode=MaskMode.CAUSAL, is_swizzle=True), "have no swizzle"),
        (TilingKey(template="BN2", is_tnd=True), "needs a dense layout"),
        (TilingKey(template="BN2", is_swizzle=True), "has no swizzle"),
        (TilingKey(template="BN2", d_align=192), "up to 128"),
        (TilingKey(template="BN2", is_multiblk=True, needs_zero=True), "masked multi-block only"),
    ],
)
def test_invalid_key_says_why(key, reason):
    assert not key.is_valid
    assert reason in key.why_invalid


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (2048, "tiling_key must be below 2048, got 2048"),
        (3 << 3, "fields with a meaning, got 24"),
        (3 << 6, "got 192"),
    ],
)
def test_decode_rejects(number, message):
    with pytest.raises(ValueError, match=message):
        TilingKey.decode(number)


def test_encode_rejects_values_without_bits():
    with pytest.raises(ValueError, match="d_align must be one of 64, 128, 192, got 96"):
        TilingKey(d_align=96).encode()


# ---- what the host produces
# --------------------------------------------------------------------------------------

# One core and a tiny L2: swizzle is wanted as soon as the problem has enough tiles.
EAGER = Target(name="eager", cube_cores=1, vector_cores=2, l2_bytes=1)
CALM = Target(name="calm", cube_cores=1, vector_cores=2, l2_bytes=0)


def grid():
    """Small problems over everything the key depends on."""
    lengths = [(100, 100), (256, 256), (512, 256), (640, 130), (130, 640)]
    masks = [(0, -1, -1), (3, -1, -1), (4, 10, 0), (4, 50, 300)]
    for layout, (s1, s2), (n1, n2), (d, dv), (mask, left, right) in itertools.product(
        ("BSND", "BNSD", "TND"),
        lengths,
        ((1, 1), (2, 1), (256, 256)),
        ((64, 64), (64, 8), (128, 128), (128, 72), (192, 192), (192, 128)),
        masks,
    ):
        if layout == "TND" and d > 128:
            continue
        sizes = {"cu_seqlens_q": [0, s1], "cu_seqlens_kv": [0, s2]}
        if layout != "TND":
            sizes = {"batch_size": 1, "max_seqlen_q": s1, "max_seqlen_kv": s2}
        yield AttentionProblem.from_metadata_args(
            n1, n2, d, head_dim_v=dv, layout_q=layout, mask_mode=mask, win_left=left, win_right=right, **sizes
        )


def test_every_valid_key_is_reached_or_unreachable():
    reached = {plan(problem, target).tiling_key for problem in grid() for target in (EAGER, CALM)}
    assert reached <= set(valid_keys())
    # Two reasons why no input leads to a key: swizzle is for dense layouts (csrc/tiling/swizzle.cpp asks
    # before all else), and Dv <= D (a rule of every problem), so dv_align 192 comes with d_align 192 only.
    # The two tests below break if either ceases to hold.
    unreachable = {
        number
        for number in valid_keys()
        if ((key := TilingKey.decode(number)).is_tnd and key.is_swizzle)
        or (key.dv_align == 192 and key.d_align == 128)
    }
    assert set(valid_keys()) - reached == unreachable
    assert len(unreachable) == 14


def test_unreachable_because_dv_cannot_exceed_d():
    with pytest.raises(ValueError, match="head_dim_v must be a head dim Dv in 1..D, got Dv=129"):
        AttentionProblem.from_metadata_args(
            1, 1, 128, head_dim_v=129, batch_size=1, max_seqlen_q=1, max_seqlen_kv=1
        )


def test_unreachable_because_tnd_is_never_swizzled():
    for problem in grid():
        if problem.layout == "TND":
            row = plan(problem, EAGER).trace[-2]
            assert (row.verdict, row.reason) == ("capability", "layout TND has no swizzle")


@st.composite
def problems(draw):
    layout = draw(st.sampled_from(["BSND", "BNSD", "TND"]))
    n2 = draw(st.sampled_from([1, 3, 8, 32]))
    d = draw(st.integers(1, 192))
    mask = draw(st.sampled_from([0, 3, 4]))
    sizes = {
        "head_dim_v": draw(st.integers(1, d)),
        "mask_mode": mask,
        "win_left": draw(st.sampled_from([-1, 0, 100, 2**31 - 1])) if mask == 4 else -1,
        "win_right": draw(st.sampled_from([-1, 0, 100, 2**31 - 1])) if mask == 4 else -1,
        "layout_q": layout,
    }
    length = st.integers(0, 3000)
    if layout == "TND":
        b = draw(st.integers(0, 5))
        for side in ("cu_seqlens_q", "cu_seqlens_kv"):
            total = [0]
            for _ in range(b):
                total.append(total[-1] + draw(length))
            sizes[side] = total
    else:
        b = draw(st.sampled_from([0, 1, 4, 64]))
        sizes |= {"batch_size": b, "max_seqlen_q": draw(length), "max_seqlen_kv": draw(length)}
        if draw(st.booleans()):
            used = [draw(st.integers(0, sizes["max_seqlen_q"])) for _ in range(b)]
            sizes["seqused_q"] = used
    return AttentionProblem.from_metadata_args(n2 * draw(st.sampled_from([1, 4])), n2, d, **sizes)


@settings(max_examples=300, deadline=None)
@given(problem=problems(), cores=st.integers(1, 40), l2=st.sampled_from([0, 1, 10**7, 2**27]))
def test_the_host_makes_only_valid_keys(problem, cores, l2):
    target = Target(name="any", cube_cores=cores, vector_cores=2 * cores, l2_bytes=l2)
    if problem.layout == "TND" and problem.d > 128:
        with pytest.raises(NotImplementedError, match="head dims above 128 need a dense layout"):
            plan(problem, target)
        return
    tiling = plan(problem, target)
    assert tiling.tiling_key in valid_keys()
    key = tiling.key
    assert (key.template == "BN2") == (tiling.route.name != "BN2GS1S2")
    assert key.is_multiblk == (tiling.route.name == "BN2_MULTIBLK")
    assert key.is_tnd == (problem.layout == "TND")
    assert key.mask_mode == problem.mask_mode
    assert key.is_swizzle == tiling.is_swizzle
    assert key.d_align == (64 if problem.d <= 64 else 128 if problem.d <= 128 else 192)
    assert key.dv_align == (192 if problem.dv > 128 and problem.d > 64 else 128)
