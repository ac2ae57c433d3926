"""Debian's packages, unpacked into a folder: no root rights, nothing outside it, their scripts do not run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from console import Failure, run_logged, say

# Lists apart from the machine's, and nothing counts as installed: what a package depends on comes along.
APT = """
Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
"""


def unpack(packages: Sequence[str], architecture: str, root: Path, log: Path, remedy: str) -> None:
    """Fetches packages and what they depend on, and unpacks them.

    Args:
        packages: Their names; found in the machine's apt sources.
        architecture: Debian's name of it, such as `arm64`.
        root: Where they find themselves at `/`; made if need be.
        log: File that collects apt's output.
        remedy: What to do where apt fails.

    Raises:
        Failure: This machine has no apt, or apt's message.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Failure(
            f"fetching {packages[0]} needs apt-get and dpkg-deb, which this machine lacks. {remedy}"
        )
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix="apt-") as name:
        apt = Path(name)
        for folder in ("state/lists/partial", "cache/archives/partial"):
            (apt / folder).mkdir(parents=True)
        (apt / "status").touch()
        (apt / "apt.conf").write_text(APT.format(folder=apt, architecture=architecture))
        env = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
        update = ["apt-get", "update", "--quiet"]
        run_logged(f"reading Debian's lists for {architecture}", update, log, env, remedy)
        fetch = ["apt-get", "install", "--download-only", "--yes", "--quiet", *packages]
        run_logged(f"fetching {packages[0]} for {architecture}", fetch, log, env, remedy)
        archives = sorted((apt / "cache" / "archives").glob("*.deb"))
        for archive in archives:
            subprocess.run(["dpkg-deb", "--extract", str(archive), str(root)], check=True)
        say(f"unpacked {len(archives)} packages into {root}")
