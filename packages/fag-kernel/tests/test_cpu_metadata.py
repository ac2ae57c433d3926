"""Metadata that was damaged: refused by the name of a field, or without influence; never a crash."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from fag_metadata.layout import grad_slices

sys.path.insert(0, str(Path(__file__).parent))
from cpu_cases import CAUSAL, WINDOW, Case, assert_same_bits

INTERESTING = np.array(
    [0, 1, -1, 2, 7, 16, 36, 64, 127, 128, 129, 255, 4096, 8192, 65535, 2**31 - 1, -(2**31), 2**30, -(2**30)],
    np.int32,
)


def cases():
    packed = {"cu_seqlens_q": (0, 130, 135, 395), "cu_seqlens_kv": (0, 140, 147, 347)}
    yield Case("TND", n1=4, n2=2, d=16, mask_mode=CAUSAL, **packed)
    yield Case("BSND", n1=2, n2=2, d=16, b=2, s1=300, s2=280, mask_mode=WINDOW, win_left=33, win_right=4)
    yield Case("BNSD", n1=2, n2=1, d=16, b=3, s1=40, s2=50, seqused_q=(40, 0, 3), seqused_kv=(50, 7, 0))
    yield Case("BSND", n1=2, n2=1, d=16, s1=3, s2=9000, target="Ascend950PR_9589")  # with merge tasks


CASES = list(cases())


def block(words):
    """The FAG block and the places in it."""
    return words[words[7] :], grad_slices(int(words[11]) >> 16 & 0xFFFF)


def refused(case, words, field):
    out, lse = case.forward()
    with pytest.raises(ValueError, match=re.escape(field)) as info:
        case.backward(out, lse, metadata=words)
    assert str(info.value).startswith("metadata: ")


def test_a_hole_an_overlap_and_a_missing_end_are_refused():
    case = CASES[0]
    for field, core, change in (
        ("start", 1, 1),
        ("start", 1, -1),
        ("end", 0, 1),
        ("end", 0, -1),
        ("start", 0, 1),
    ):
        words = case.metadata().copy()
        grad, where = block(words)
        grad[where[field]][core] += change
        refused(case, words, "grad.")
    words = case.metadata().copy()
    grad, where = block(words)
    grad[where["used_cubes"]] -= 1
    refused(case, words, "grad.end")


@pytest.mark.parametrize(
    ("name", "value"),
    [("s1", 100), ("s2", 0), ("s1", -1), ("o1", 1), ("o2", 7), ("used_cubes", 10**6), ("used_cubes", -1)],
)
def test_wrong_sizes_are_refused_by_name(name, value):
    case = CASES[0]
    words = case.metadata().copy()
    grad, where = block(words)
    grad[where[name]] = value
    refused(case, words, f"grad.{name}")


@pytest.mark.parametrize("word", [-1, 15, 8000, 2**31 - 1])
def test_a_block_outside_the_tensor_is_refused(word):
    words = CASES[0].metadata().copy()
    words[7] = word
    refused(CASES[0], words, "grad_offset")


def test_forward_only_metadata_is_refused_for_the_gradient():
    words = CASES[0].metadata().copy()
    words[7] = 0
    refused(CASES[0], words, "is_grad_enabled must be True")


@pytest.mark.parametrize(
    ("word", "value", "field"),
    [
        (0, 0, "section_num"),
        (0, 10**6, "section_num"),
        (2, 0, "m must"),
        (3, -5, "k must"),
        (4, 0, "aic"),
        (5, -1, "aiv"),
        (4, 2**31 - 1, "section_num"),
        (16, 1, "FA start"),
        (19, -1, "FA end"),
        (20, 10**6, "FA end"),
        (22, -3, "first_slot"),
    ],
)
def test_damaged_forward_words_are_refused_by_name(word, value, field):
    words = CASES[0].metadata().copy()
    words[word] = value
    with pytest.raises(ValueError, match=field):
        CASES[0].forward(metadata=words)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 500])
def test_truncated_metadata_is_refused(length):
    words = CASES[0].metadata()[:length].copy()
    for call in (CASES[0].forward, lambda **options: CASES[0].backward(*CASES[0].forward(), **options)):
        with pytest.raises(ValueError, match="metadata: "):
            call(metadata=words)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_random_damage_is_refused_or_harmless(index):
    case = CASES[index]
    expected = case.run()
    good = case.metadata()
    rng = np.random.default_rng(index)
    written = int(np.flatnonzero(good)[-1]) + 9
    messages = []
    for _ in range(400):
        words = good.copy()
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            at = rng.integers(0, 16) if rng.random() < 0.3 else rng.integers(0, written)
            damage = rng.choice(["value", "add", "bit", "copy"])
            if damage == "value":
                words[at] = rng.choice(INTERESTING)
            elif damage == "add":
                words[at] += rng.choice([-128, -2, -1, 1, 2, 128])
            elif damage == "bit":
                words[at] ^= np.int32(1) << rng.integers(0, 31)
            else:
                words[at] = words[rng.integers(0, written)]
        for run, right in (
            (case.forward, expected[:2]),
            (lambda **o: case.backward(*expected[:2], **o), expected[2:]),
        ):
            try:
                got = run(metadata=words)
            except ValueError as error:
                messages.append(str(error))
            else:
                assert_same_bits(got, right)
    assert all(message.startswith("metadata: ") for message in messages)
    assert len(messages) > 50


def test_wrong_types_are_refused():
    case = CASES[0]
    for words in (case.metadata().astype(np.int64), case.metadata()[::2], case.metadata().reshape(2, -1)):
        with pytest.raises((TypeError, ValueError)):
            case.forward(metadata=words)
