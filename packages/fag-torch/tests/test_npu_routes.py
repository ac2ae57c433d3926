"""The table that decides which route runs a call on an NPU. No NPU is needed: it is a pure function."""

from __future__ import annotations

import pytest

from fag_kernel.plan import plan
from fag_metadata import AttentionProblem, Split, UnsupportedError, metadata_for
from fag_metadata.terms import TARGETS
from fag_torch import npu_routes
from fag_torch.npu_routes import ACLNN, ASCEND950, Call, Origin, choose, parse_forced, require, target_of_soc

SOC = "Ascend950PR_9589"
TARGET = TARGETS[SOC]


def problem(n1=8, n2=2, d=128, **changes):
    sizes = {"batch_size": 2, "max_seqlen_q": 128, "max_seqlen_kv": 128, **changes}
    return AttentionProblem.from_metadata_args(n1, n2, d, **sizes)


def packed(*lengths, d=128):
    cu = [0]
    for length in lengths:
        cu.append(cu[-1] + length)
    return AttentionProblem.from_metadata_args(
        8, 2, d, layout_q="TND", cu_seqlens_q=cu, cu_seqlens_kv=cu, is_grad_enabled=True
    )


DENSE = Call(problem(), "float16", "backward")


def reasons(choice, route):
    return [refusal.reason for refusal in choice.refusals if refusal.route == route]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dense_attention_goes_to_cann(dtype, direction):
    assert choose(Call(problem(), dtype, direction), TARGET, {}) == (ACLNN, ())


def test_packed_dense_attention_goes_to_cann():
    assert choose(Call(packed(5, 7), "bfloat16", "backward"), TARGET, {}).route == ACLNN


#: What CANN's route refuses -> (call, kind, what the reason says). Ours takes each of them.
REFUSED_BY_ACLNN = {
    "sinks": (DENSE._replace(has_sinks=True), "capability", "do not read sinks"),
    "dlse": (DENSE._replace(has_dlse=True), "capability", "no gradient of the lse"),
    "deterministic": (DENSE._replace(is_deterministic=True), "capability", "atomics"),
    "narrow v": (DENSE._replace(problem=problem(head_dim_v=64)), "capability", "got D=128, Dv=64"),
    "forward of D 72": (Call(problem(d=72), "float16", "forward"), "capability", "got D=72, Dv=72"),
    "empty sequence": (DENSE._replace(problem=packed(5, 0, 7)), "capability", "length 0"),
    "no batch": (DENSE._replace(problem=problem(batch_size=0)), "capability", "empty tensors"),
    "causal": (DENSE._replace(problem=problem(mask_mode=3)), "preference", "got CAUSAL"),
    "seqused": (DENSE._replace(problem=problem(seqused_q=[5, 128])), "preference", "seqused_q"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_BY_ACLNN)
def test_what_cann_refuses_goes_to_our_kernels(name):
    call, kind, text = REFUSED_BY_ACLNN[name]
    choice = choose(call, TARGET, {})
    assert choice.route == ASCEND950
    (refusal,) = choice.refusals
    assert (refusal.route, refusal.kind) == (ACLNN, kind)
    assert text in refusal.reason


def test_forcing_lifts_preferences_and_no_capability():
    for call, kind, text in REFUSED_BY_ACLNN.values():
        choice = choose(call, TARGET, {}, ACLNN)
        assert choice.route == (ACLNN if kind == "preference" else None)
        assert kind == "preference" or text in choice.refusals[0].reason
    assert choose(DENSE, TARGET, {}, ASCEND950) == (ASCEND950, ())


def test_deterministic_forward_may_go_to_cann():
    assert choose(Call(problem(), "float16", "forward", is_deterministic=True), TARGET, {}).route == ACLNN


def test_gradient_of_cann_takes_head_dims_that_its_forward_does_not():
    assert choose(Call(problem(d=192), "float16", "backward"), TARGET, {}).route == ACLNN


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (DENSE._replace(dtype="float32"), "float16 and bfloat16, got float32"),
        (Call(problem(d=256), "float16", "backward"), "head dims end at 192"),
        (Call(packed(5, 7, d=192), "float16", "forward"), "head dims above 128 need a dense layout"),
    ],
)
def test_what_no_route_takes_has_every_reason(call, text):
    choice = choose(call, TARGET, {})
    assert choice.route is None
    with pytest.raises(UnsupportedError) as caught:
        require("flash_attn", choice, None)
    message = str(caught.value)
    assert message.startswith("flash_attn: no route can run this call on an NPU. Route aclnn: ")
    assert "Route ascend950: " in message
    assert message.endswith("On a CPU the same call runs.")
    assert text in message
    assert "\n" not in message


def test_forced_route_that_cannot_names_itself_and_its_reasons_only():
    choice = choose(DENSE._replace(has_sinks=True), TARGET, {}, ACLNN)
    with pytest.raises(UnsupportedError, match="FAG_NPU_ROUTE must name a route") as caught:
        require("flash_attn_grad", choice, ACLNN)
    assert "got aclnn. Route aclnn: CANN's kernels do not read sinks." in str(caught.value)
    assert "ascend950" not in str(caught.value)


def test_route_variable():
    assert parse_forced("flash_attn", None) is parse_forced("flash_attn", "") is None
    assert parse_forced("flash_attn", "ascend950") == ASCEND950
    with pytest.raises(ValueError, match="flash_attn: FAG_NPU_ROUTE must be aclnn or ascend950, got 'npu'"):
        parse_forced("flash_attn", "npu")


def test_what_the_host_lacks_comes_first():
    choice = choose(DENSE._replace(has_sinks=True), TARGET, {ACLNN: ("no library", "no symbol")})
    assert [refusal.kind for refusal in choice.refusals] == ["missing", "missing", "capability"]
    assert choice.route == ASCEND950
    assert choose(DENSE, TARGET, {ACLNN: ("no library",)}).route == ASCEND950
    assert choose(DENSE, TARGET, {ASCEND950: ("no compiler",)}).route == ACLNN
    assert choose(DENSE, TARGET, {ACLNN: ("a",), ASCEND950: ("b",)}).reasons() == (
        "Route aclnn: a. Route ascend950: b."
    )


# ---- metadata of the caller ------------------------------------------------------------------------------


def of_metadata(call, target, split=None, is_grad=True):
    return call._replace(metadata=Origin.of(metadata_for(call.problem, target, split, is_grad)))


def test_own_metadata_of_the_same_target_changes_nothing():
    assert choose(of_metadata(DENSE, SOC), TARGET, {}) == (ACLNN, ())
    assert choose(of_metadata(DENSE, "Ascend950DT_9582"), TARGET, {}).route == ACLNN  # as many cores


def test_balanced_metadata_is_for_our_kernels():
    causal = DENSE._replace(problem=problem(mask_mode=3))
    choice = choose(of_metadata(causal, SOC, "balanced"), TARGET, {})
    assert choice.route == ASCEND950
    assert "CANN's kernels take metadata with split cann, got split balanced" in reasons(choice, ACLNN)


def test_balanced_metadata_may_use_more_cores_than_cann_launches():
    """fag_kernel.plan launches every core that metadata gives tiles."""
    call = Call(problem(1, 1, 64, batch_size=1, max_seqlen_q=700, max_seqlen_kv=700), "float16", "backward")
    assert plan(call.problem, SOC).block_dim < of_metadata(call, SOC, "balanced").metadata.used_cores
    assert choose(of_metadata(call, SOC, "balanced"), TARGET, {}).route == ASCEND950


@pytest.mark.parametrize("other", ["cpu", "Ascend950PR_9599"])
def test_metadata_for_other_cores_is_refused_by_both(other):
    choice = choose(of_metadata(DENSE, other), TARGET, {})
    assert choice.route is None
    for route in npu_routes.ROUTES:
        assert any(f"for the 32 cube and 64 vector cores of {SOC}" in text for text in reasons(choice, route))


def test_origin_of_forward_only_metadata():
    origin = Origin.of(metadata_for(problem(), SOC, is_grad_enabled=False))
    assert (origin.split, origin.used_cores, origin.bounds) == (Split.CANN, 0, (-1, -1))
    with_grad = Origin.of(metadata_for(problem(), SOC))
    assert with_grad == origin._replace(used_cores=with_grad.used_cores, bounds=(128, 128))
    assert with_grad.used_cores > 0


# ---- SoC -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("soc", ["Ascend910B2", "Ascend310P3", "", "cpu"])
def test_other_processors_are_refused_by_name(soc):
    with pytest.raises(UnsupportedError, match=f"flash_attn: device must be an Ascend 950, got {soc}"):
        target_of_soc("flash_attn", soc)


def test_soc_of_the_family():
    assert target_of_soc("flash_attn", SOC) is TARGET
