"""An aarch64 system in a folder: Debian's Python with NumPy, PyTorch and pytest, run by qemu.

Debian's packages for arm64 are fetched with lists apart from the machine's and only unpacked: no root rights,
nothing outside `.cache/aarch64`. It is made anew when this file or the pins change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import debian
from console import Failure, run_logged
from environments import CACHE, PINS

FOLDER = CACHE / "aarch64"
SYSTEM = FOLDER / "root"
LOG = FOLDER / "log.txt"
#: A script that runs the emulated interpreter; as sys.executable it lets tests start processes.
PYTHON = SYSTEM / "usr" / "bin" / "python-emulated"
SITE_PACKAGES = SYSTEM / "usr" / "lib" / "python3" / "dist-packages"

MINOR = sys.version_info.minor
#: What this machine needs, by program; the Debian package that brings it.
PROGRAMS = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
DEBIAN_PACKAGES = (f"python3.{MINOR}", f"libpython3.{MINOR}-dev", "libstdc++6", "libgomp1")
#: Pinned as everywhere; what they need comes along.
TEST_PACKAGES = ("numpy", "ml_dtypes", "pytest", "pytest-xdist", "hypothesis", "matplotlib")
#: The newest PyTorch whose wheel for aarch64 on PyPI is a CPU build, and what it imports. Named one by one:
#: pip would choose what it requires by the machine that it runs on.
TORCH_PACKAGES = (
    "torch==2.10.0", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy",
    "typing-extensions",
)  # fmt: skip
PLATFORMS = ("linux", "manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28")

# -L: where the loader finds libraries; -0: what Python takes for its path, from which it finds its modules.
EMULATED_PYTHON = """#!/bin/sh
exec {qemu} -cpu "${{FAG_EMULATED_CPU:-max}}" -L {root} -0 "$0" {root}/usr/bin/python3.{minor} "$@"
"""


def check_programs() -> None:
    """Refuses to start where a program is missing.

    Raises:
        Failure: It names what is missing and what to install.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        packages = " ".join(PROGRAMS[program] for program in missing)
        raise Failure(
            f"the cross build and the emulation need {' and '.join(missing)}, which this machine lacks. "
            f"Debian 12: apt-get install {packages}. Other systems will not do: the Python for aarch64 comes "
            "from Debian's package lists."
        )


def make_system() -> None:
    """Unpacks the system, unless it lies there already.

    Raises:
        Failure: A package cannot be had; the message shows what apt or pip said.
    """
    wanted = hashlib.sha256(Path(__file__).read_bytes() + PINS.read_bytes()).hexdigest()
    stamp = FOLDER / "made-from"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    SYSTEM.mkdir(parents=True)
    remedy = (
        f"The machine's apt sources must be Debian's, of a release that has Python 3.{MINOR} for arm64 "
        "(Debian 12: 3.11); call the environment with that Python."
    )
    debian.unpack(DEBIAN_PACKAGES, "arm64", SYSTEM, LOG, remedy)
    script = EMULATED_PYTHON.format(qemu=shutil.which("qemu-aarch64-static"), root=SYSTEM, minor=MINOR)
    PYTHON.write_text(script)
    PYTHON.chmod(0o755)
    pip_install("the test packages for aarch64", [*TEST_PACKAGES], ["--constraint", str(PINS)])
    pip_install("PyTorch for aarch64", [*TORCH_PACKAGES], ["--no-deps"])
    stamp.write_text(wanted)


def pip_install(what: str, packages: Sequence[str], options: Sequence[str] = ()) -> None:
    """Installs wheels for aarch64 into the system, with this machine's pip.

    Args:
        what: For the progress line.
        packages: Requirements or files of wheels.
        options: More options of pip.

    Raises:
        Failure: pip's message.
    """
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_aarch64")]
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--upgrade"]
    into = ["--target", str(SITE_PACKAGES), "--only-binary=:all:", *platforms]
    run_logged(f"installing {what}", [*pip, *into, *options, *packages], LOG, os.environ)
