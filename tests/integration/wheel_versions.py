"""Wheels of other versions, made from the files of an installed wheel: what the skew tests install."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

Edit = Callable[[str], str]


def is_installed_wheel(package: str) -> bool:
    """Whether the package was installed from a wheel, and not put on the path as a source tree."""
    try:
        files = importlib.metadata.files(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(str(file).endswith("/_version.py") for file in files or ())


def repack(package: str, version: str, folder: Path, edits: Mapping[str, Edit] | None = None) -> Path:
    """Writes a wheel with the installed files of a package under another version.

    Args:
        package: Name of an installed distribution.
        version: Version of the wheel; stands in its metadata and in its _version.py.
        folder: Where the wheel is written.
        edits: File in the wheel -> change of its text.

    Returns:
        The wheel.
    """
    distribution = importlib.metadata.distribution(package)
    old, name = distribution.version, package.replace("-", "_")
    changes = dict(edits or {})
    contents: dict[str, bytes] = {}
    for file in distribution.files or ():
        path = str(file)
        if path.startswith("..") or path.endswith(
            (".pyc", "/RECORD", "/INSTALLER", "/REQUESTED", "/direct_url.json")
        ):
            continue
        data = (Path(str(distribution.locate_file(file)))).read_bytes()
        if path == f"{name}/_version.py":
            data = re.sub(rb'__version__ = "[^"]*"', f'__version__ = "{version}"'.encode(), data)
        if path.endswith(".dist-info/METADATA"):
            data = re.sub(rb"(?m)^Version: .*$", f"Version: {version}".encode(), data, count=1)
        if path in changes:
            data = changes.pop(path)(data.decode()).encode()
        contents[path.replace(f"{name}-{old}.dist-info", f"{name}-{version}.dist-info")] = data
    assert not changes, f"no such files in {package}: {sorted(changes)}"
    return _write(contents, name, version, folder)


def _write(contents: dict[str, bytes], name: str, version: str, folder: Path) -> Path:
    info = f"{name}-{version}.dist-info"
    tags = re.findall(rb"(?m)^Tag: (.*)$", contents[f"{info}/WHEEL"])
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{tags[0].decode()}.whl"
    record = []
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in contents.items():
            archive.writestr(path, data)
            text = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={text},{len(data)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,", ""]))
    return wheel
