"""Version skew between the three packages is one ImportError at `import fag_torch`."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fag_torch import contracts

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
ROOT = Path(__file__).parents[3]
tomllib = pytest.importorskip("tomllib", reason="tomllib is part of Python 3.11 and newer")


def module(name, **attributes):
    made = types.ModuleType(name)
    made.__dict__.update(attributes)
    return made


def test_ranges_agree_with_the_dependencies():
    """The same fact stands in pyproject.toml, as pip reads it."""
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    stated = {text.partition("~=")[0]: text.partition("~=")[2] for text in dependencies if "~=" in text}
    assert set(stated) == set(contracts.SIBLINGS)
    for name, version in stated.items():
        low, high = contracts.SIBLINGS[name]
        assert contracts.release(version) == low
        assert high == (low[0], low[1] + 1)  # ~=X.Y.Z is >=X.Y.Z, <X.(Y+1)
        assert f'"{name}~={version}"' in contracts.MEND
    oldest = ".".join(map(str, contracts.OLDEST_TORCH))
    assert f"torch>={oldest}" in dependencies
    assert not any(text.startswith("torch==") for text in dependencies)


def test_accepted_interfaces_agree_with_contracts_toml():
    stated = tomllib.loads((ROOT / "contracts.toml").read_text())["interfaces"]
    accepted = {name: tuple(entry["accepted_by"]["fag-torch"]) for name, entry in stated.items()}
    assert accepted == dict(contracts.ACCEPTS)


def test_what_is_installed_fits():
    contracts.check()


@pytest.mark.parametrize(
    ("distribution", "attributes", "parts"),
    [
        (
            "fag-metadata",
            {"__version__": "0.2.0", "FORMAT_VERSION": 1},
            (">=0.1.0,<0.2", "fag-metadata 0.2.0"),
        ),
        (
            "fag-metadata",
            {"__version__": "0.0.9", "FORMAT_VERSION": 1},
            (">=0.1.0,<0.2", "fag-metadata 0.0.9"),
        ),
        (
            "fag-metadata",
            {"__version__": "0.1.3", "FORMAT_VERSION": 2},
            ("METADATA_FORMAT 1", "METADATA_FORMAT 2"),
        ),
        ("fag-metadata", {"__version__": "0.1.3"}, ("METADATA_FORMAT 1", "METADATA_FORMAT None")),
        ("fag-kernel", {"__version__": "1.0.0", "KERNEL_ABI": 1}, (">=0.1.0,<0.2", "fag-kernel 1.0.0")),
        (
            "fag-kernel",
            {"__version__": "0.1.9", "KERNEL_ABI": 2},
            ("KERNEL_ABI 1", "fag-kernel 0.1.9 has KERNEL_ABI 2"),
        ),
    ],
)
def test_skew_is_one_sentence(distribution, attributes, parts):
    with pytest.raises(ImportError) as caught:
        contracts.check_sibling(distribution, module(distribution, **attributes))
    text = str(caught.value)
    for part in ("fag-torch 0.1.0", distribution, f"mend it with: {contracts.MEND}", *parts):
        assert part in text
    assert "\n" not in text


@pytest.mark.parametrize("version", ["0.1.0", "0.1.7", "0.1.10rc1", "0.1.2+local.5"])
def test_compatible_releases_pass(version):
    contracts.check_sibling("fag-metadata", module("fag_metadata", __version__=version, FORMAT_VERSION=1))


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "3.0.0", "2.14.0a0+git1234"])
def test_torch_releases_that_pass(version):
    contracts.check_torch(module("torch", __version__=version))


def test_old_torch_is_named():
    with pytest.raises(
        ImportError, match=r"needs torch >= 2.6 \(tested with 2.13.0\), but found torch 2.5.1\+cpu"
    ):
        contracts.check_torch(module("torch", __version__="2.5.1+cpu"))


# ---- the whole import, in a process of its own, with a sibling put in front of the installed one
# -------------------


def import_with(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(
        [sys.executable, "-c", "import fag_torch"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def the_one_error(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0
    assert result.stderr.count("Traceback") == 1  # no chain of other errors
    last = result.stderr.strip().splitlines()[-1]
    assert "Error: " in last
    return last


def dist_info(name: str, version: str) -> dict[str, str]:
    return {
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    }


METADATA = '__version__ = "{version}"\nFORMAT_VERSION = {format}\n'
ERRORS = "class ContractError(ImportError): ...\n"


def test_newer_metadata_outside_the_range(tmp_path):
    files = {
        "fag_metadata/__init__.py": METADATA.format(version="0.2.0", format=1),
        "fag_metadata/errors.py": ERRORS,
    }
    error = the_one_error(import_with(tmp_path, files | dist_info("fag_metadata", "0.2.0")))
    assert error.startswith(
        "fag_metadata.errors.ContractError: fag-torch 0.1.0 works with fag-metadata >=0.1.0,<0.2"
    )
    assert "found fag-metadata 0.2.0" in error
    assert contracts.MEND in error


def test_distribution_version_alone_is_enough(tmp_path):
    """The distribution says 0.2.0 although the module says nothing wrong."""
    error = the_one_error(import_with(tmp_path, dist_info("fag_kernel", "0.2.0")))
    assert "fag-torch 0.1.0 works with fag-kernel >=0.1.0,<0.2, but found fag-kernel 0.2.0" in error


def test_metadata_without_the_error_class(tmp_path):
    error = the_one_error(
        import_with(tmp_path, {"fag_metadata.py": METADATA.format(version="0.1.1", format=7)})
    )
    assert error.startswith(
        "ImportError: fag-torch 0.1.0 works with METADATA_FORMAT 1, but fag-metadata 0.1.1 has"
    )
    assert "METADATA_FORMAT 7" in error


def test_refusal_by_fag_kernel_is_the_one_error(tmp_path):
    """fag-kernel finds that it does not fit fag-metadata; its sentence is passed on as it is."""
    text = "fag-kernel 0.1.4 works with format 2, but fag-metadata 0.1.0 has 1; mend it with: pip install x"
    kernel = f'from fag_metadata.errors import ContractError\nraise ContractError("{text}")\n'
    files = {"fag_kernel/__init__.py": kernel} | dist_info("fag_kernel", "0.1.4")
    error = the_one_error(import_with(tmp_path, files))
    assert error == f"fag_metadata.errors.ContractError: {text}"


def test_kernel_that_does_not_import(tmp_path):
    files = {"fag_kernel/__init__.py": 'raise ImportError("libfoo.so.1: cannot open shared object file")\n'}
    error = the_one_error(import_with(tmp_path, files | dist_info("fag_kernel", "0.1.4")))
    assert (
        "fag-torch 0.1.0 works with fag-kernel~=0.1.0, but the installed 0.1.4 does not import "
        "(libfoo.so.1: cannot open shared object file)" in error
    )
    assert contracts.MEND in error


def test_missing_sibling(tmp_path):
    finder = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'fag_kernel': raise ModuleNotFoundError('No module named fag_kernel')\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    error = the_one_error(import_with(tmp_path, {"sitecustomize.py": finder}))
    assert "fag-torch 0.1.0 works with fag-kernel~=0.1.0, but " in error
    assert contracts.MEND in error


def test_old_torch(tmp_path):
    error = the_one_error(import_with(tmp_path, {"torch.py": '__version__ = "2.5.0"\n'}))
    assert "needs torch >= 2.6 (tested with 2.13.0), but found torch 2.5.0" in error
    assert 'pip install "torch>=2.6"' in error
