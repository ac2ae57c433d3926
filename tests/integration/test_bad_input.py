"""Every rule of the operator contract refuses with a message of the contract's form: operator, argument,
rule, value. Lengths and windows have theirs in the public cases 18, 27 and 28, masks in 44, types in 34,
metadata in test_bad_metadata.py.

ValueError and TypeError from the Python functions (fag_torch and fag_kernel), RuntimeError with the same
words through torch.ops.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import harness
import numpy as np
import oracle
import pytest
import torch
from harness import Api
from oracle import CAUSAL, SLIDING_WINDOW

import fag_metadata
import fag_torch

B, S1, S2, N1, N2, D, DV = 2, 6, 8, 4, 2, 16, 8
GRAD_ONLY = ("dout", "attn_out", "softmax_lse")
FORWARD_ONLY = ("block_table",)


@dataclass(frozen=True)
class Rule:
    """One way to break the contract.

    changes: argument -> new value, or a function of the old one. argument: pattern of the name in the
    message; shows: what the message must hold; layouts: where the rule applies.
    """

    changes: dict[str, Any]
    argument: str
    shows: tuple[str, ...]
    is_type: bool = False
    layouts: tuple[str, ...] = oracle.LAYOUTS


DENSE = ("BSND", "BNSD")

RULES: dict[str, Rule] = {
    # ---- not tensors, wrong rank
    "q-none": Rule({"q": None}, "q", ("None",), is_type=True),
    "q-list": Rule({"q": [1.0, 2.0]}, "q", ("list",), is_type=True),
    "k-number": Rule({"k": 3.0}, "k", ("float",), is_type=True),
    "cu-list": Rule({"cu_seqlens_q": [0, 6, 12]}, "cu_seqlens_q", ("list",), is_type=True, layouts=("TND",)),
    "sinks-list": Rule({"sinks": [0.0] * N1}, "sinks", ("list",), is_type=True),
    "metadata-list": Rule({"metadata": [1, 2]}, "metadata", ("list",), is_type=True),
    "q-rank": Rule({"q": lambda x: x[0]}, "q", ("shape",)),
    "k-rank": Rule({"k": lambda x: x[None]}, "k", ("shape",)),
    "v-rank": Rule({"v": lambda x: x[..., 0]}, "v", ("shape",)),
    "q-scalar": Rule({"q": lambda x: x.sum()}, "q", (r"\(\)",)),
    # ---- shapes that do not fit together
    "k-batch": Rule({"k": lambda x: x[:1]}, "k", ("1",), layouts=DENSE),
    "v-batch": Rule({"v": lambda x: x[:1]}, "v", ("1",), layouts=DENSE),
    "k-head-dim": Rule({"k": lambda x: x[..., :12]}, "k", ("12", "16")),
    "v-length-tnd": Rule({"v": lambda x: x[:13]}, "v", ("13", "16"), layouts=("TND",)),
    "v-length-bsnd": Rule({"v": lambda x: x[:, :5]}, "v", ("5", "8"), layouts=("BSND",)),
    "v-length-bnsd": Rule({"v": lambda x: x[:, :, :5]}, "v", ("5", "8"), layouts=("BNSD",)),
    "v-heads-bsnd": Rule({"v": lambda x: x[:, :, :1]}, "v", ("1", "2"), layouts=("BSND",)),
    "v-heads": Rule({"v": lambda x: x[:, :1]}, "v", ("1", "2"), layouts=("BNSD", "TND")),
    "heads-not-a-multiple-bsnd": Rule(
        {"q": lambda x: x[:, :, :3]}, "(q|num_heads_q|N1)", ("3", "2"), layouts=("BSND",)
    ),
    "heads-not-a-multiple": Rule(
        {"q": lambda x: x[:, :3]}, "(q|num_heads_q|N1)", ("3", "2"), layouts=("BNSD", "TND")
    ),
    "more-kv-heads-bsnd": Rule(
        {"q": lambda x: x[:, :, :1]}, "(q|num_heads_q|N1)", ("1", "2"), layouts=("BSND",)
    ),
    "no-query-heads-bsnd": Rule(
        {"q": lambda x: x[:, :, :0]}, "(q|num_heads_q|N1)", ("0",), layouts=("BSND",)
    ),
    "no-kv-heads": Rule(
        {"k": lambda x: x[:, :0], "v": lambda x: x[:, :0]},
        "(k|num_heads_kv|N2)",
        ("0",),
        layouts=("BNSD", "TND"),
    ),
    "head-dim-0": Rule({"q": lambda x: x[..., :0], "k": lambda x: x[..., :0]}, "(q|head_dim)", ("0",)),
    "value-dim-0": Rule({"v": lambda x: x[..., :0]}, "(v|head_dim_v)", ("0",)),
    "dout-shape": Rule({"dout": lambda x: x[..., :4]}, "dout", ("4", "8")),
    "dout-rank": Rule({"dout": lambda x: x[0]}, "dout", ("shape",)),
    "attn_out-shape": Rule({"attn_out": lambda x: x[..., :4]}, "attn_out", ("4", "8")),
    "attn_out-as-q": Rule({"attn_out": lambda x: torch.cat([x, x], -1)}, "attn_out", ("16", "8")),
    "lse-shape": Rule({"softmax_lse": lambda x: x[..., :-1]}, "softmax_lse", ("shape",)),
    "lse-placeholder": Rule({"softmax_lse": lambda x: torch.zeros(1)}, "softmax_lse", (r"\(1,\)",)),
    "lse-transposed": Rule({"softmax_lse": lambda x: x.mT}, "softmax_lse", ("shape",)),
    "sinks-shape": Rule({"sinks": lambda x: x[:2]}, "sinks", (r"\(2,\)", "4")),
    "sinks-rank": Rule({"sinks": lambda x: x[None]}, "sinks", (r"\(1, 4\)",)),
    # ---- scalars
    "mask_mode-1": Rule({"mask_mode": 1}, "mask_mode", ("got 1", "0", "3", "4")),
    "mask_mode-2": Rule({"mask_mode": 2}, "mask_mode", ("got 2",)),
    "mask_mode-negative": Rule({"mask_mode": -1}, "mask_mode", ("got -1",)),
    "win_left-beyond-int32": Rule(
        {"mask_mode": SLIDING_WINDOW, "win_left": 2**31}, "win_left", (str(2**31),)
    ),
    "win_right-beyond-int32": Rule(
        {"mask_mode": SLIDING_WINDOW, "win_right": 2**31}, "win_right", (str(2**31),)
    ),
    "win_left-min": Rule({"mask_mode": SLIDING_WINDOW, "win_left": -(2**31)}, "win_left", (str(-(2**31)),)),
    "max_seqlen_q-small": Rule({"max_seqlen_q": S1 - 1}, "max_seqlen_q", (f"got {S1 - 1}", f"{S1}")),
    "max_seqlen_kv-small": Rule({"max_seqlen_kv": S2 - 1}, "max_seqlen_kv", (f"got {S2 - 1}", f"{S2}")),
    "max_seqlen_q-minus-2": Rule({"max_seqlen_q": -2}, "max_seqlen_q", ("got -2",)),
    "layout_q-lower": Rule({"layout_q": "bsnd"}, "layout_q", ("bsnd", "BSND")),
    "layout_q-unknown": Rule({"layout_q": "SBH"}, "layout_q", ("SBH",)),
    "layout_kv-lower": Rule({"layout_kv": "tnd"}, "layout_kv", ("tnd",)),
    "layout_kv-other": Rule({"layout_kv": "BNSD"}, "layout_kv", ("BNSD", "BSND"), layouts=("BSND",)),
    "layout_out-other": Rule({"layout_out": "BNSD"}, "layout_out", ("BNSD", "BSND"), layouts=("BSND",)),
    "layout_out-tnd": Rule({"layout_out": "TND"}, "layout_out", ("TND", "BNSD"), layouts=("BNSD",)),
    "layout_out-unknown": Rule({"layout_out": ""}, "layout_out", ("got",)),
    # ---- what would not be read
    "block_table": Rule({"block_table": torch.zeros(2, 2, dtype=torch.int32)}, "block_table", ("None",)),
}

PYTHON_RULES: dict[str, Rule] = {
    # The schema of torch.ops has its own words for these: there the types are the dispatcher's business.
    "mask_mode-name": Rule({"mask_mode": "diagonal"}, "mask_mode", ("diagonal", "CAUSAL")),
    "mask_mode-float": Rule({"mask_mode": 3.5}, "mask_mode", ("3.5",), is_type=True),
    "mask_mode-bool": Rule({"mask_mode": True}, "mask_mode", ("True",), is_type=True),
    "max_seqlen_q-tensor": Rule({"max_seqlen_q": torch.tensor(6)}, "max_seqlen_q", ("got",), is_type=True),
    "max_seqlen_kv-float": Rule({"max_seqlen_kv": 8.0}, "max_seqlen_kv", ("8.0",), is_type=True),
    "win_left-tensor": Rule(
        {"mask_mode": SLIDING_WINDOW, "win_left": torch.tensor(3)}, "win_left", ("got",), is_type=True
    ),
    "softmax_scale-text": Rule({"softmax_scale": "1"}, "softmax_scale", ("str",), is_type=True),
    "softmax_scale-tensor": Rule(
        {"softmax_scale": torch.tensor(0.5)}, "softmax_scale", ("got",), is_type=True
    ),
    "layout_q-none": Rule({"layout_q": None}, "layout_q", ("None",), is_type=True),
    "layout_q-number": Rule({"layout_q": 4}, "layout_q", ("4",), is_type=True),
}


def good_arguments(layout: str) -> dict[str, Any]:
    """All arguments of flash_attn_grad and flash_attn for one small call that works."""
    call = harness.uniform(layout, B, S1, S2)
    inputs = harness.random_inputs(call, B, S1, S2, N1, N2, D, DV, with_sinks=True)
    out, lse = harness.run_forward(harness.TORCH_OPS, call, inputs)
    arguments = {**inputs._asdict(), "attn_out": out, "softmax_lse": lse, **harness.op_arguments(call, D)}
    return {"metadata": None, "block_table": None, "max_seqlen_q": -1, "max_seqlen_kv": -1, **arguments}


def apply(rule: Rule, arguments: dict[str, Any]) -> dict[str, Any]:
    changed = dict(arguments)
    for name, change in rule.changes.items():
        changed[name] = change(changed[name]) if callable(change) else change
    return changed


def ops_of(rule: Rule) -> list[str]:
    """The operators that take what the rule changes."""
    ops = []
    if not any(name in GRAD_ONLY for name in rule.changes):
        ops.append("flash_attn")
    if not any(name in FORWARD_ONLY for name in rule.changes):
        ops.append("flash_attn_grad")
    return ops


def invoke(api: Api, op: str, arguments: dict[str, Any]) -> Any:
    unwanted = GRAD_ONLY if op == "flash_attn" else FORWARD_ONLY
    return getattr(api, op)(**{name: value for name, value in arguments.items() if name not in unwanted})


def assert_refused(api: Api, rule: Rule, arguments: dict[str, Any]) -> None:
    changed = apply(rule, arguments)
    held = [x for x in changed.values() if isinstance(x, torch.Tensor)]
    copies = [x.clone() for x in held]
    for op in ops_of(rule):
        with pytest.raises(api.type_error if rule.is_type else api.value_error) as caught:
            invoke(api, op, changed)
        text = str(caught.value)
        assert re.search(rf"^{op}: {rule.argument}\b", text), text
        assert "got " in text, text
        for shown in rule.shows:
            assert re.search(shown, text), f"{shown!r} is not in: {text}"
    harness.assert_same_bits(held, copies)


@pytest.mark.parametrize("name", RULES)
def test_refuses_by_name(api: Api, layout: str, name: str) -> None:
    rule = RULES[name]
    if layout not in rule.layouts:
        pytest.skip(f"the rule is about {' and '.join(rule.layouts)}")
    if name == "cu-list" and api is harness.NUMPY:
        pytest.skip("the NumPy functions take lists of lengths")
    if rule.is_type and api is harness.TORCH_OPS:
        pytest.skip("the dispatcher refuses non-tensors itself, before our code")
    assert_refused(api, rule, good_arguments(layout))


@pytest.mark.parametrize("name", PYTHON_RULES)
@pytest.mark.parametrize("api", [harness.FAG_TORCH, harness.NUMPY], ids=lambda api: api.name)
def test_python_functions_refuse_by_name(api: Api, name: str) -> None:
    assert_refused(api, PYTHON_RULES[name], good_arguments("BSND"))


def test_good_arguments_are_good(api: Api, layout: str) -> None:
    arguments = good_arguments(layout)
    for op in ("flash_attn", "flash_attn_grad"):
        assert all(torch.isfinite(x).all() for x in invoke(api, op, arguments))


@pytest.mark.parametrize("op", ["flash_attn", "flash_attn_grad"])
def test_torch_ops_and_python_use_the_same_words(layout: str, op: str) -> None:
    """One sentence per rule, whichever way one comes."""
    arguments = good_arguments(layout)
    compared = 0
    for name, rule in RULES.items():
        if layout not in rule.layouts or rule.is_type or op not in ops_of(rule):
            continue
        messages = []
        for api in harness.APIS:
            with pytest.raises(api.value_error) as caught:
                invoke(api, op, apply(rule, arguments))
            messages.append(str(caught.value))
        assert messages[0] == messages[1] == messages[2], name
        compared += 1
    assert compared > 15


def test_batch_of_70000_is_refused_by_name(api: Api, layout: str) -> None:
    b = 70000
    call = harness.uniform(layout, b, 1, 1)
    inputs = harness.ones_inputs(call, b, 1, 1, 1, 1, 1)
    with pytest.raises(api.value_error, match=r"(?s)^flash_attn: .*70000") as caught:
        harness.run_forward(api, call, inputs)
    assert "65535" in str(caught.value) or "65536" in str(caught.value)
    lse = torch.zeros(oracle.lse_shape(inputs.q, layout))
    with pytest.raises(api.value_error, match=r"(?s)^flash_attn_grad: .*70000"):
        harness.run_backward(api, call, inputs, inputs.dout, lse)


def test_batch_of_65535_works(layout: str) -> None:
    b = 65535
    call = harness.uniform(layout, b, 1, 1)
    inputs = harness.ones_inputs(call, b, 1, 1, 1, 1, 1)
    got = harness.run(harness.TORCH_OPS, call, inputs)
    assert torch.all(got.dv == 1)


@pytest.mark.parametrize("name", ["k", "v", "dout", "attn_out", "softmax_lse", "sinks"])
@pytest.mark.parametrize("api", harness.TORCH_APIS, ids=lambda api: api.name)
def test_refuses_tensors_on_another_device(api: Api, layout: str, name: str) -> None:
    rule = Rule({name: lambda x: x.to("meta")}, name, ("meta", "cpu"))
    assert_refused_somehow(api, rule, good_arguments(layout))


def assert_refused_somehow(api: Api, rule: Rule, arguments: dict[str, Any]) -> None:
    """Refused with the argument's name and both devices."""
    for op in ops_of(rule):
        with pytest.raises(api.value_error) as caught:
            invoke(api, op, apply(rule, arguments))
        text = str(caught.value)
        assert re.search(rf"{op}: {rule.argument}\b", text), text
        assert all(shown in text for shown in rule.shows), text


# ---- the front -------------------------------------------------------------------------------------------

FRONT_RULES: dict[str, Rule] = {
    "q-list": Rule({"q": [1.0]}, "q", ("list",), is_type=True),
    "q-rank": Rule({"q": lambda x: x[0]}, "q", ("shape",)),
    "v-dtype": Rule({"v": lambda x: x.half()}, "v", ("float16", "bfloat16"), is_type=True),
    "sinks-dtype": Rule({"sinks": lambda x: x.bfloat16()}, "sinks", ("bfloat16", "float32"), is_type=True),
    "sinks-shape": Rule({"sinks": lambda x: x[:2]}, "sinks", ("4",)),
    "mask_mode": Rule({"mask_mode": 1}, "mask_mode", ("got 1",)),
    "mask_mode-name": Rule({"mask_mode": "diagonal"}, "mask_mode", ("diagonal",)),
    "win_left": Rule({"mask_mode": SLIDING_WINDOW, "win_left": -2}, "win_left", ("got -2",)),
    "window-without-mode": Rule({"mask_mode": CAUSAL, "win_right": 0}, "win_right", ("got 0",)),
    "layout": Rule({"layout": "bsnd"}, "layout", ("bsnd",)),
    "max_seqlen_q": Rule({"max_seqlen_q": S1 - 1}, "max_seqlen_q", (f"got {S1 - 1}",)),
    "max_seqlen_q-tensor": Rule({"max_seqlen_q": torch.tensor(6)}, "max_seqlen_q", ("got",), is_type=True),
    "seqused_q": Rule(
        {"seqused_q": torch.tensor([S1 + 1, 0], dtype=torch.int32)}, "seqused_q", (f"got {S1 + 1}",)
    ),
    "softmax_scale": Rule({"softmax_scale": float("nan")}, "softmax_scale", ("nan",)),
    "metadata": Rule(
        {"metadata": torch.zeros(8192, dtype=torch.int32)}, "metadata", ("flash_attn_metadata",)
    ),
}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize("name", FRONT_RULES)
def test_front_refuses_by_name(layout: str, name: str, requires_grad: bool) -> None:
    """ValueError and TypeError, also when autograd stands in between, and under the name the user called."""
    rule = FRONT_RULES[name]
    call = harness.uniform(layout, B, S1, S2)
    inputs = harness.random_inputs(call, B, S1, S2, N1, N2, D, DV, with_sinks=True)
    arguments = {**inputs._asdict(), **harness.front_arguments(call), "max_seqlen_q": None}
    del arguments["dout"]
    arguments = apply(rule, arguments)
    if requires_grad and isinstance(arguments["k"], torch.Tensor):
        arguments["k"].requires_grad_()
    with pytest.raises(TypeError if rule.is_type else ValueError) as caught:
        fag_torch.flash_attention(**arguments)
    text = str(caught.value)
    assert re.search(rf"^flash_attention: {rule.argument}\b", text), text
    for shown in rule.shows:
        assert shown in text, text


# ---- flash_attn_metadata ---------------------------------------------------------------------------------

METADATA_GOOD = {"batch_size": 2, "max_seqlen_q": 6, "max_seqlen_kv": 8, "layout_q": "BSND"}
METADATA_RULES: dict[str, tuple[tuple[int, int, int], dict[str, Any], str, str]] = {
    "heads": ((6, 4, 64), {}, "num_heads_q", "6"),
    "no-heads": ((0, 4, 64), {}, "num_heads_q", "0"),
    "no-kv-heads": ((4, 0, 64), {}, "num_heads_kv", "0"),
    "head-dim-0": ((4, 4, 0), {}, "head_dim", "0"),
    "head-dim-257": ((4, 4, 257), {}, "head_dim", "257"),
    "batch": ((4, 4, 64), {"batch_size": 70000}, "batch_size", "70000"),
    "batch-negative": ((4, 4, 64), {"batch_size": -2}, "batch_size", "-2"),
    "no-length": ((4, 4, 64), {"max_seqlen_q": None}, "max_seqlen_q", "lengths"),
    "length-negative": ((4, 4, 64), {"max_seqlen_kv": -3}, "max_seqlen_kv", "-3"),
    "mask_mode": ((4, 4, 64), {"mask_mode": 1}, "mask_mode", "got 1"),
    "window": ((4, 4, 64), {"mask_mode": 3, "win_left": 2}, "win_left", "got 2"),
    "layout": ((4, 4, 64), {"layout_q": "SBH"}, "layout_q", "SBH"),
    "tnd-without-lengths": ((4, 4, 64), {"layout_q": "TND"}, "cu_seqlens_q", "TND"),
    "lengths-without-tnd": (
        (4, 4, 64),
        {"cu_seqlens_q": np.array([0, 3, 6], np.int32)},
        "cu_seqlens_q",
        "BSND",
    ),
    "seqused": ((4, 4, 64), {"seqused_kv": np.array([9, 1], np.int32)}, "max_seqlen_kv", "8"),
    "seqused-negative": ((4, 4, 64), {"seqused_kv": np.array([-1, 1], np.int32)}, "seqused_kv", "-1"),
    "seqused-count": ((4, 4, 64), {"seqused_kv": np.array([1, 1, 1], np.int32)}, "seqused_kv", "3"),
}


@pytest.mark.parametrize("name", METADATA_RULES)
@pytest.mark.parametrize("way", ["fag_metadata", "fag_torch", "torch.ops"])
def test_metadata_refuses_by_name(name: str, way: str) -> None:
    heads, changes, argument, shown = METADATA_RULES[name]
    arguments = METADATA_GOOD | changes
    if way != "fag_metadata":
        arguments = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    functions = {
        "fag_metadata": fag_metadata.flash_attn_metadata,
        "fag_torch": fag_torch.flash_attn_metadata,
        "torch.ops": harness.OPS.flash_attn_metadata,
    }
    error = RuntimeError if way == "torch.ops" else ValueError
    with pytest.raises(error, match=rf"(?s)^flash_attn_metadata: {argument}\b.*{re.escape(shown)}"):
        functions[way](*heads, **arguments)


def test_metadata_refuses_an_unknown_target_by_name() -> None:
    with pytest.raises(ValueError, match=r"(?s)^flash_attn_metadata: target .*Ascend42"):
        fag_metadata.flash_attn_metadata(4, 4, 64, target="Ascend42", **METADATA_GOOD)
    with pytest.raises(ValueError, match=r"(?s)^flash_attn_metadata: split .*fast"):
        fag_metadata.flash_attn_metadata(4, 4, 64, split="fast", **METADATA_GOOD)


def test_unknown_argument_is_refused(api: Api) -> None:
    arguments = good_arguments("BSND")
    with pytest.raises((TypeError, RuntimeError), match="window_size"):
        invoke(api, "flash_attn", {**arguments, "window_size": 3})
