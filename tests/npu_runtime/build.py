"""Builds the stand-in for the CANN runtime: one shared object under every library name that is asked for.

    python tests/npu_runtime/build.py --out DIR [--without SYMBOL ...]

Then, for the process that is to use it: LD_LIBRARY_PATH=DIR and ASCEND_OPP_PATH=DIR/opp. Needs a C++ compiler (CXX,
else c++) and nothing of CANN. Compiles what changed, and prints nothing but errors.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
FLAGS = ("-std=c++17", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")

#: The object's own name first; the others are links to it, so all of them share one state in a process.
LIBRARIES = (
    "libascendcl.so",
    "libruntime.so",
    "libopapi.so",
    "libacl_op_compiler.so",
    "libhccl.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
#: Where a custom package of CANN puts its operators, below ASCEND_OPP_PATH.
VENDOR = "custom_transformer"
CUSTOM_LIBRARY = f"vendors/{VENDOR}/op_api/lib/libcust_opapi.so"


def build(out: Path, without: Iterable[str] = ()) -> Path:
    """Makes the libraries and an operator folder.

    Args:
        out: Folder for them; may exist.
        without: Symbols to leave out, as a CANN release without them would.

    Returns:
        `out`, absolute: the value for LD_LIBRARY_PATH.

    Raises:
        subprocess.CalledProcessError: The compiler failed; it has printed why.
    """
    out = out.resolve()
    objects = out / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "c++").split()
    newest_header = max(header.stat().st_mtime_ns for header in SOURCES.glob("*.hpp"))
    made = []
    for source in sorted(SOURCES.glob("*.cpp")):
        target = objects / f"{source.stem}.o"
        newest = max(newest_header, source.stat().st_mtime_ns)
        if not target.exists() or target.stat().st_mtime_ns < newest:
            subprocess.run([*compiler, *FLAGS, "-c", str(source), "-o", str(target)], check=True)
        made.append(str(target))
    versions = objects / "symbols.map"
    hidden = "".join(f" {symbol};" for symbol in sorted(without))
    versions.write_text(f"{{ global: *;{f' local:{hidden}' if hidden else ''} }};\n")
    library = out / LIBRARIES[0]
    link = [*compiler, "-shared", *made, f"-Wl,--version-script={versions}", "-ldl", "-pthread"]
    subprocess.run([*link, "-o", str(library)], check=True)
    custom = out / "opp" / CUSTOM_LIBRARY
    custom.parent.mkdir(parents=True, exist_ok=True)
    (out / "opp" / "vendors" / "config.ini").write_text(f"load_priority={VENDOR}\n")
    for link_path in (*(out / name for name in LIBRARIES[1:]), out / "libcust_opapi.so", custom):
        link_path.unlink(missing_ok=True)
        link_path.symlink_to(library)
    return out


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Builds the stand-in for the CANN runtime.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the libraries")
    parser.add_argument("--without", nargs="*", default=[], metavar="SYMBOL", help="symbols to leave out")
    options = parser.parse_args()
    try:
        build(options.out, options.without)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
