"""The wheel: small, for any Python 3, and NumPy is all it needs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists() or importlib.util.find_spec("hatchling") is None,
    reason="hatchling, which builds the wheel, is not installed",
)
def test_wheel_is_small_and_pure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 100_000
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        needs = [
            line for line in archive.read(metadata).decode().split("\n") if line.startswith("Requires-Dist")
        ]
    assert {"fag_metadata/py.typed", "fag_metadata/include/fag_metadata/layout.h"} <= set(names)
    assert [need for need in needs if "extra ==" not in need] == ["Requires-Dist: numpy>=1.26"]
