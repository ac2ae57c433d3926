"""Runs a script against fake_cann.cpp, in a process of its own: libraries that a process has loaded stay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "fake_cann.cpp"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
LIBRARIES = ("libascendcl.so", "libruntime.so", "libopapi.so")
#: Where CANN looks for a custom package below ASCEND_OPP_PATH.
CUSTOM_LIBRARY = "vendors/custom/op_api/lib/libcust_opapi.so"

#: What scripts find: log() is what the runtime was called with since the last time, live() what it gave out,
#: fail() lets the next call of a symbol fail, answer() gives the test its result.
PRELUDE = """
import ctypes, json
from fag_kernel import cann

fake = ctypes.CDLL("libascendcl.so")
fake.fake_log.restype = ctypes.c_char_p

def log():
    return json.loads(fake.fake_log())

def live():
    return {what: fake.fake_live(what.encode()) for what in ("tensors", "executors", "modules", "functions")}

def fail(symbol, code=507000, text="E99999: something broke"):
    fake.fake_fail(symbol.encode(), code, text if isinstance(text, bytes) else text.encode())

def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "call": getattr(error, "call", None),
                "code": getattr(error, "code", None)}
    return None

def answer(**values):
    print(json.dumps(values))
"""


@cache
def _compiled(without: str) -> bytes:
    """The runtime without a symbol, compiled once per session."""
    assert COMPILER is not None
    # As CANN's own library is known to the dynamic loader: under its name, whatever its folder.
    options = ["-Wl,-soname,libascendcl.so", *([f"-DWITHOUT_{without}"] if without else [])]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "fake_cann.so"
        command = [
            COMPILER,
            "-std=c++17",
            "-O0",
            "-w",
            "-shared",
            "-fPIC",
            *options,
            str(SOURCE),
            "-o",
            str(made),
        ]
        subprocess.run(command, check=True)
        return made.read_bytes()


def build(
    folder: Path, *, without: str = "", libraries: tuple[str, ...] = (*LIBRARIES, CUSTOM_LIBRARY)
) -> Path:
    """Makes the runtime.

    Args:
        folder: Where the libraries go; returned.
        without: A symbol to leave out.
        libraries: Names under which it is found: one object, as far as the dynamic loader is concerned.
    """
    first, *others = libraries
    made = folder / first
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_bytes(_compiled(without))
    for name in others:
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(made)
    return folder


def run(script: str, folder: Path, **environment: str) -> Any:
    """What the script answers. `folder` is where the libraries are."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_")}
    variables |= {"LD_LIBRARY_PATH": str(folder), "ASCEND_OPP_PATH": str(folder), **environment}
    done = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
