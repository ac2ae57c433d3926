"""csrc/fag_metadata/layout.h is a committed copy: an sdist of fag-kernel sees only its own folder."""

from pathlib import Path

import fag_metadata

COPY = Path(__file__).resolve().parents[1] / "csrc" / "fag_metadata" / "layout.h"
ORIGINAL = Path(fag_metadata.__file__).parent / "include" / "fag_metadata" / "layout.h"


def test_copy_is_fresh():
    assert COPY.read_bytes() == ORIGINAL.read_bytes(), f"copy {ORIGINAL} to {COPY}"
