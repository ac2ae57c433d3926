"""Builds the stand-in for the CANN runtime: shared objects under every library name that is asked for.

    python tests/npu_runtime/build.py --out DIR [--without SYMBOL ...] [--no-custom-package]

Then, for the process that is to use it: LD_LIBRARY_PATH=DIR, ASCEND_OPP_PATH=DIR/opp and
FAG_HIVMC=DIR/bin/hivmc-a5. Needs a C++ compiler (CXX, else c++) and nothing of CANN. Compiles what changed,
and prints nothing but errors.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).resolve().parent / "csrc"
FLAGS: Final = ("-std=c++17", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")

#: The runtime's own name, and the other libraries that torch_npu and we load: links to the same object, so
#: that all of them share one state in a process.
RUNTIME: Final = "libascendcl.so"
ALIASES: Final = (
    "libruntime.so",
    "libopapi.so",
    "libacl_op_compiler.so",
    "libhccl.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
#: A custom package of CANN, below ASCEND_OPP_PATH. Its library stands on the loader's path too, as the
#: package's own set_env.bash would have it.
VENDOR: Final = "custom_transformer"
CUSTOM: Final = "libcust_opapi.so"

#: CANN's last compiler, and the device bitcode that fag-kernel wants to find with it; ours reads none.
COMPILER: Final = "bin/hivmc-a5"
BITCODE: Final = "lib/meta_op.mix.aic.c310.bc"


def build(
    out: Path,
    without: Iterable[str] = (),
    *,
    has_custom_package: bool = True,
    objects: Path | None = None,
) -> Path:
    """Makes the libraries, an operator folder, and CANN's compiler (hivmc.py).

    Args:
        out: Folder for them; may exist.
        without: Symbols to leave out, as a CANN release without them would.
        has_custom_package: Whether CANN's custom package with flash attention is installed.
        objects: Folder of compiled files, to share between variants; None = one in `out`.

    Returns:
        `out`, absolute: the value for LD_LIBRARY_PATH.

    Raises:
        subprocess.CalledProcessError: The compiler failed; it has printed why.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    objects = objects or out / "objects"
    symbols = out / "symbols.map"
    hidden = "".join(f" {symbol};" for symbol in sorted(without))
    symbols.write_text(f"{{ global: *;{f' local:{hidden}' if hidden else ''} }};\n")

    runtime = out / RUNTIME
    _link(runtime, _compile(SOURCES, objects), symbols)
    for name in ALIASES:
        _replace_link(out / name, runtime)

    vendors = out / "opp" / "vendors"
    custom = vendors / VENDOR / "op_api" / "lib" / CUSTOM
    if not has_custom_package:
        for path in (vendors / "config.ini", custom, out / CUSTOM):
            path.unlink(missing_ok=True)
    else:
        custom.parent.mkdir(parents=True, exist_ok=True)
        (vendors / "config.ini").write_text(f"load_priority={VENDOR}\n")
        compiled = _compile(SOURCES / "custom_package", objects / "custom_package")
        _link(custom, [*compiled, str(runtime)], symbols)
        _replace_link(out / CUSTOM, custom)

    (out / COMPILER).parent.mkdir(exist_ok=True)
    with _replacing(out / COMPILER) as scratch:
        shutil.copy(SOURCES.parent / "hivmc.py", scratch)
    (out / BITCODE).parent.mkdir(exist_ok=True)
    (out / BITCODE).touch()
    return out


def _compile(sources: Path, objects: Path) -> list[str]:
    """Objects of all C++ files of a folder; the name says what they were made from, so none is ever stale."""
    objects.mkdir(parents=True, exist_ok=True)
    headers = b"".join(header.read_bytes() for header in sorted(SOURCES.glob("*.hpp")))
    command = [*_compiler(), *FLAGS]

    def make(source: Path) -> str:
        content = hashlib.sha256(source.read_bytes() + headers + repr(command).encode()).hexdigest()
        target = objects / f"{source.stem}-{content[:16]}.o"
        if not target.exists():
            with _replacing(target) as scratch:
                subprocess.run([*command, "-c", str(source), "-o", scratch], check=True)
            for old in objects.glob(f"{source.stem}-????????????????.o"):
                if old != target:
                    old.unlink(missing_ok=True)
        return str(target)

    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(make, sorted(sources.glob("*.cpp"))))


def _link(library: Path, objects: list[str], symbols: Path) -> None:
    command = [*_compiler(), "-shared", *objects, f"-Wl,--version-script={symbols}", "-ldl", "-pthread"]
    with _replacing(library) as scratch:
        subprocess.run([*command, f"-Wl,-soname,{library.name}", "-o", scratch], check=True)


@contextmanager
def _replacing(path: Path) -> Iterator[str]:
    """A file to write that takes the place of `path` once complete: a process may be using the old one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield str(scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _compiler() -> list[str]:
    return os.environ.get("CXX", "c++").split()


def _replace_link(path: Path, target: Path) -> None:
    with _replacing(path) as scratch:
        os.symlink(os.path.relpath(target, path.parent), scratch)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Builds the stand-in for the CANN runtime.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the libraries")
    parser.add_argument("--without", nargs="*", default=[], metavar="SYMBOL", help="symbols to leave out")
    parser.add_argument(
        "--objects", type=Path, help="folder of compiled files to share; in --out if not given"
    )
    parser.add_argument("--no-custom-package", action="store_true", help="no libcust_opapi.so")
    options = parser.parse_args()
    try:
        build(
            options.out,
            options.without,
            has_custom_package=not options.no_custom_package,
            objects=options.objects,
        )
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
