#!/usr/bin/env python3
"""Stands in for CANN's hivmc-a5: turns optimised IR into an object that the stand-in's launches accept.

    FAG_HIVMC=DIR/bin/hivmc-a5      where build.py has put it: fag_kernel.ascend950.finalize calls it

No machine code is made. The object is a text that names the kernel and the cores it runs on, as the IR has
them, and the hash of the IR: what is launched later was really read from the package.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

VERSION = "hivmc stand-in 1"
_ENTRY = re.compile(r"func\.func @(\w+)\(%arg0: i64 \{hacc\.arg_type = #hacc\.arg_type<ffts_base_address>\}")


def main() -> int:
    """Command line of hivmc-a5, as far as it is used."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("source", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("-o", dest="output", type=Path, required=True)
    options, _ = parser.parse_known_args()
    ir = options.source.read_text()
    entries = _ENTRY.findall(ir)
    kernel = options.source.stem
    if not entries or any(not entry.startswith(kernel) for entry in entries):
        print(f"error: no entry function of {kernel} in {options.source}, got {entries}", file=sys.stderr)
        return 1
    lines = (
        "FAG-STUB-OBJECT 1",
        f"kernel: {kernel}",
        f"core: {'vector' if entries == [kernel] else 'mix'}",
        f"target: {options.target}",
        f"ir: {hashlib.sha256(ir.encode()).hexdigest()}",
    )
    options.output.with_suffix(".o").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
