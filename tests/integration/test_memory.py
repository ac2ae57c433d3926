"""Memory grows with the lengths, not with their product. Public case 45.

Each measurement is a process of its own: measure_memory.py resets the kernel's high-water mark of the
resident set just before the call and reads it right after.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fag_metadata

LIMIT_MIB = {"long": 64, "grouped": 96, "ragged": 64}


@pytest.mark.parametrize("what", LIMIT_MIB)
@pytest.mark.parametrize("op", ["flash_attn", "flash_attn_grad"])
def test_pc45_peak_memory_of_a_call(what: str, op: str) -> None:
    script = Path(__file__).with_name("measure_memory.py")
    done = subprocess.run(
        [sys.executable, str(script), what, op], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["largest_output"] > 0
    assert report["growth_mib"] < LIMIT_MIB[what], report


def metadata_words(**arguments: object) -> int:
    return len(fag_metadata.flash_attn_metadata(8, 2, 64, is_grad_enabled=True, **arguments))


@pytest.mark.parametrize("target", ["cpu", "Ascend950PR_9589"])
def test_pc45_metadata_does_not_grow_with_the_lengths(target: str) -> None:
    short = metadata_words(batch_size=2, max_seqlen_q=128, max_seqlen_kv=128, target=target)
    long = metadata_words(batch_size=2, max_seqlen_q=65536, max_seqlen_kv=65536, target=target)
    assert short >= 8192
    assert long <= 4 * short
    many = np.arange(0, 4097 * 4, 4, dtype=np.int32)
    packed = metadata_words(cu_seqlens_q=many, cu_seqlens_kv=many, layout_q="TND", target=target)
    assert packed <= 8192 + 16 * 108 * 4096 * 2


def test_measurement_sees_a_dense_buffer() -> None:
    """The measuring script itself: a buffer of S x S float32 shows as 256 MiB."""
    script = Path(__file__).with_name("measure_memory.py")
    done = subprocess.run(
        [sys.executable, str(script), "dense-buffer", "flash_attn"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert json.loads(done.stdout)["growth_mib"] > 200
