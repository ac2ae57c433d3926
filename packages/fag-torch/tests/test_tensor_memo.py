"""What is remembered about a tensor lives as long as its contents."""

from __future__ import annotations

import gc

import torch

from fag_torch.tensor_memo import TensorMemo, version_of


def remember(memo, tensor, value="seen"):
    memo.put(tensor, value, version_of(tensor))
    return tensor


def test_value_is_found_for_the_same_tensor_only():
    memo = TensorMemo()
    x = remember(memo, torch.zeros(3))
    assert memo.get(x) == "seen"
    for other in (x.clone(), x.view(3), x.detach()):
        assert memo.get(other) is None


def test_an_edit_in_place_forgets():
    memo = TensorMemo()
    x = remember(memo, torch.zeros(3))
    x[0] = 1
    assert memo.get(x) is None
    remember(memo, x, "anew")
    assert memo.get(x) == "anew"
    x.view(3).add_(1)  # a view shares the counter
    assert memo.get(x) is None


def test_an_edit_between_looking_and_remembering_is_not_lost():
    memo = TensorMemo()
    x = torch.zeros(3)
    version = version_of(x)
    x.add_(1)
    memo.put(x, "old", version)
    assert memo.get(x) is None


def test_a_freed_tensor_leaves_nothing_behind():
    memo = TensorMemo()
    for _ in range(100):  # ids are used again
        assert memo.get(remember(memo, torch.zeros(3))) == "seen"
        assert len(memo) == 0


def test_a_tensor_that_only_autograd_holds_is_still_known():
    memo = TensorMemo()
    x = torch.ones(3)
    remember(memo, x)
    y = (x * torch.ones(3, requires_grad=True)).sum()
    del x
    gc.collect()
    (saved,) = (t for t in (y.grad_fn.next_functions[0][0]._saved_self,) if t is not None)
    assert memo.get(saved) == "seen"


def test_nothing_is_remembered_without_a_version_counter():
    memo = TensorMemo()
    with torch.inference_mode():
        x = torch.zeros(3)
    remember(memo, x)
    assert memo.get(x) is None
    assert len(memo) == 0


def test_another_storage_is_another_content() -> None:
    """`x.data = y` steps no counter."""
    memo = TensorMemo()
    x = torch.zeros(3)
    memo.put(x, "zeros", version_of(x))
    x.data = torch.ones(3)
    assert memo.get(x) is None
    memo.put(x, "ones", version_of(x))
    x.data = x.data[:2]
    assert memo.get(x) is None
