"""Forward and gradient of every problem of cases.py against the float64 reference, within the bound of
bound.py.

Each problem runs with NaN in all unused rows, through the raw operators and once more through the autograd
front.
"""

from __future__ import annotations

from itertools import combinations, product

import bound
import harness
import oracle
import pytest
import torch
from cases import ASCEND_MAX_HEAD_DIM, CASES, EXTRAS, HEAD_DIMS, Case, pairs, properties

import fag_metadata


def test_table_is_large_and_its_ids_are_unique() -> None:
    assert len(CASES) >= 400
    assert len({case.id for case in CASES}) == len(CASES)


def test_every_pair_of_properties_meets(layout: str) -> None:
    table = [case for case in CASES if case.layout == layout]
    values: dict[str, set[object]] = {}
    for case in table:
        for name, value in properties(case).items():
            values.setdefault(name, set()).add(value)
    assert values["dims"] == set(HEAD_DIMS)
    assert values["extra"] == set(EXTRAS)
    assert len(values["lengths"]) == 8
    met = set().union(*(pairs(case) for case in table))
    wanted = {(a, x, b, y) for a, b in combinations(values, 2) for x, y in product(values[a], values[b])}
    too_wide = {
        pair
        for pair in wanted
        if pair[3] == "ascend" and pair[0] == "dims" and pair[1][0] > ASCEND_MAX_HEAD_DIM
    }
    assert wanted - met == too_wide


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_within_bound(case: Case) -> None:
    call = case.call
    inputs = harness.fill_padding(call, case.inputs, float("nan"))
    metadata = metadata_of(case, call, inputs)

    got = harness.run(harness.TORCH_OPS, call, inputs, metadata=metadata)
    bound.assert_forward(call, inputs, got.out, got.lse)
    reference = bound.assert_gradients(call, inputs, got.out, got.lse, got[2:])
    assert_padding_is_zero(call, inputs, got)
    assert_not_vacuous(call, inputs, got, reference)

    front = harness.run_front(call, inputs)
    if case.plan == "ascend":  # another split may sum in another order
        bound.assert_gradients(call, inputs, front.out, front.lse, front[2:5], front.dsinks, tol_only=True)
    else:
        harness.assert_same_bits(front[:5], got, "autograd front and raw operators differ:")
        if front.dsinks is not None:
            bound.assert_dsinks(call, inputs, front.out, front.lse, front.dsinks, reference, None)


def metadata_of(case: Case, call: oracle.Call, inputs: harness.Inputs) -> torch.Tensor | None:
    if case.plan == "none":
        return None
    target = (
        "cpu" if case.plan == "cpu" else sorted(name for name in fag_metadata.TARGETS if name != "cpu")[0]
    )
    return harness.make_metadata(call, inputs.q, inputs.k, inputs.v, target=target)


def assert_padding_is_zero(call: oracle.Call, inputs: harness.Inputs, got: harness.Result) -> None:
    """Unused rows: exact zeros, lse -inf."""
    for x, side in ((got.out, "q"), (got.dq, "q"), (got.dk, "kv"), (got.dv, "kv")):
        assert torch.count_nonzero(x[~harness.used_rows(call, x, side, inputs)]) == 0
    assert torch.all(got.lse[~harness.used_lse(call, inputs)] == -torch.inf)


def assert_not_vacuous(
    call: oracle.Call, inputs: harness.Inputs, got: harness.Result, reference: oracle.Gradients
) -> None:
    """A problem in which some query sees two keys has gradients; one in which none sees a key is rare and
    must be meant."""
    sees = [oracle.visible(call, s.used_q, s.used_kv).sum(axis=1) for s in call.sequences(inputs.q, inputs.k)]
    if any((count > 1).any() for count in sees):
        for name, x, wanted in zip(bound.OUTPUTS, got[2:], reference[:3], strict=True):
            assert torch.count_nonzero(x) > 0, f"{name} is all zero"
            assert abs(wanted).max() > 0, f"the reference of {name} is all zero"
