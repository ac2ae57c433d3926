"""The contract between the three packages: versions, digests, pins, and what happens when they do not fit.

The skew tests install other versions of a sibling over the installed wheels, in a throw-away virtual
environment that sees everything else of the running one. The other versions are wheels made from the
installed files.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from wheel_versions import Edit, is_installed_wheel, repack

import fag_kernel
import fag_kernel.abi
import fag_metadata
import fag_metadata.layout
import fag_torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fag-metadata", "fag-kernel", "fag-torch")
needs_wheels = pytest.mark.skipif(
    not all(map(is_installed_wheel, PACKAGES)),
    reason="the packages come from a source tree; this test takes installed wheels apart (tox has them)",
)


def tool() -> types.ModuleType:
    """tools/contracts.py as a module."""
    spec = importlib.util.spec_from_file_location("fag_tools_contracts", ROOT / "tools" / "contracts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


contracts = tool()
STATED = contracts.stated()


# ---- what contracts.toml says is so ----------------------------------------------------------------------


def test_interfaces_agree_with_contracts_toml() -> None:
    assert contracts.faults(contracts.interfaces(), STATED) == []


@pytest.mark.parametrize("name", STATED["interfaces"])
def test_accepted_versions_agree_with_contracts_toml(name: str) -> None:
    accepts = {"fag-kernel": fag_kernel.ACCEPTS, "fag-torch": fag_torch.ACCEPTS}
    stated = STATED["interfaces"][name]["accepted_by"]
    assert stated == {user: list(ranges[name]) for user, ranges in accepts.items() if name in ranges}


@needs_wheels
@pytest.mark.parametrize("package", PACKAGES)
def test_wheels_ask_for_siblings_as_contracts_toml_says(package: str) -> None:
    required = importlib.metadata.requires(package) or []
    siblings = [
        text.replace(" ", "") for text in required if text.startswith("fag") and "extra ==" not in text
    ]
    assert sorted(siblings) == STATED["requires"][package]


@needs_wheels
@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_version_is_the_modules_version(package: str) -> None:
    module = importlib.import_module(package.replace("-", "_"))
    assert importlib.metadata.version(package) == module.__version__


# ---- a change without a step of the version is found -----------------------------------------------------


def changed(module: types.ModuleType, **attributes: object) -> types.ModuleType:
    """A copy of a module with other attributes."""
    copy = types.ModuleType(module.__name__)
    vars(copy).update(vars(module), **attributes)
    return copy


def swapped_words() -> types.ModuleType:
    head = list(fag_metadata.layout.HEAD)
    head[2], head[3] = head[3], head[2]
    return changed(fag_metadata.layout, HEAD=tuple(head))


def moved_bits() -> types.ModuleType:
    first, *rest = fag_metadata.layout.IDENTITY
    return changed(fag_metadata.layout, IDENTITY=(first._replace(shift=first.shift + 1), *rest))


def another_unit() -> types.ModuleType:
    return changed(fag_metadata.layout, BWD_UNIT_KEYS=2 * fag_metadata.layout.BWD_UNIT_KEYS)


@pytest.mark.parametrize("change", [swapped_words, moved_bits, another_unit])
def test_changed_layout_without_a_step_fails(change: Callable[[], types.ModuleType]) -> None:
    found = contracts.interfaces()
    version, _ = found["METADATA_FORMAT"]
    found["METADATA_FORMAT"] = (version, contracts.digest(contracts.metadata_format(change())))
    (sentence,) = contracts.faults(found, STATED)
    assert sentence.startswith("METADATA_FORMAT: the interface changed")
    assert "Step fag_metadata.FORMAT_VERSION" in sentence


def test_documentation_of_a_field_is_not_part_of_the_layout() -> None:
    first, *rest = fag_metadata.layout.HEAD
    reworded = changed(fag_metadata.layout, HEAD=(first._replace(doc="other words"), *rest))
    assert contracts.metadata_format(reworded) == contracts.metadata_format(fag_metadata.layout)


def test_changed_kernel_interface_without_a_step_fails() -> None:
    def forward(problem: object, *, num_threads: int = 1) -> None:
        """Another signature."""

    found = contracts.interfaces()
    text = contracts.kernel_abi(changed(fag_kernel.abi, forward=forward))
    found["KERNEL_ABI"] = (found["KERNEL_ABI"][0], contracts.digest(text))
    (sentence,) = contracts.faults(found, STATED)
    assert sentence.startswith("KERNEL_ABI: the interface changed")
    assert "Step fag_kernel.KERNEL_ABI" in sentence


def test_stepped_version_must_be_stated_and_is_then_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = contracts.interfaces()
    version, _ = found["METADATA_FORMAT"]
    found["METADATA_FORMAT"] = (version + 1, "0123456789abcdef")
    (sentence,) = contracts.faults(found, STATED)
    assert (
        sentence
        == f"METADATA_FORMAT: fag_metadata.FORMAT_VERSION is {version + 1}, contracts.toml has {version}."
    )
    copy = tmp_path / "contracts.toml"
    copy.write_text((ROOT / "contracts.toml").read_text())
    monkeypatch.setattr(contracts, "CONTRACTS", copy)
    contracts.rewrite(found, ["METADATA_FORMAT"])
    assert contracts.faults(found, contracts.stated()) == []


# ---- siblings of other versions --------------------------------------------------------------------------


class Overlay:
    """A virtual environment that sees the running one's packages behind its own."""

    def __init__(self, path: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
        self.python = path / "bin" / "python"
        (site,) = path.glob("lib/python*/site-packages")
        parent = Path(fag_torch.__file__).parents[1]
        (site / "running-environment.pth").write_text(f"{parent}\n")

    def pip(self, *words: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *words]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.python), "-c", code], capture_output=True, text=True, check=False)


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    return Overlay(tmp_path / "venv")


GRADIENT = """
import importlib.metadata, torch, fag_torch
q = torch.randn(1, 40, 4, 64, dtype=torch.bfloat16, requires_grad=True)
k = torch.randn(1, 40, 2, 64, dtype=torch.bfloat16)
fag_torch.flash_attention(q, k, k, mask_mode="causal").sum().backward()
assert q.grad.isfinite().all() and q.grad.abs().sum() > 0
print(*(importlib.metadata.version(name) for name in ("fag-metadata", "fag-kernel", "fag-torch")))
"""


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one sentence of an import that was refused."""
    assert result.returncode == 1, result.stdout
    assert "During handling" not in result.stderr
    assert "direct cause" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    kind, _, sentence = last.partition(": ")
    assert kind.rsplit(".")[-1] in ("ImportError", "ContractError"), last
    return sentence


@needs_wheels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "version"),
    [("fag-metadata", "0.2.0"), ("fag-metadata", "0.0.9"), ("fag-kernel", "0.2.0"), ("fag-kernel", "0.0.9")],
)
def test_sibling_outside_the_range_is_one_sentence_that_mends(
    package: str, version: str, tmp_path: Path, overlay: Overlay
) -> None:
    overlay.pip("install", "--no-deps", str(repack(package, version, tmp_path / "other")))

    sentence = refusal(overlay.run("import fag_torch"))

    assert f"fag-torch {fag_torch.__version__}" in sentence
    assert f"{package} {version}" in sentence
    # The command in the message, given the released wheels as a package index, mends the environment.
    for sibling in PACKAGES:
        repack(sibling, importlib.metadata.version(sibling), tmp_path / "index")
    _, _, command = sentence.partition("mend it with: ")
    words = shlex.split(command)
    assert words[:2] == ["pip", "install"], sentence
    overlay.pip(*words[1:], "--no-index", "--find-links", str(tmp_path / "index"))
    mended = overlay.run(GRADIENT)
    assert mended.returncode == 0, mended.stderr
    assert version not in mended.stdout


@needs_wheels
@pytest.mark.slow
def test_compatible_newer_metadata_works_with_unchanged_siblings(tmp_path: Path, overlay: Overlay) -> None:
    overlay.pip("install", "--no-deps", str(repack("fag-metadata", "0.1.99", tmp_path)))
    result = overlay.run(GRADIENT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0.1.99", fag_kernel.__version__, fag_torch.__version__]


def set_version(name: str, to: int) -> Edit:
    """An edit of a source file that sets an interface version."""

    def edit(text: str) -> str:
        lines = [
            f"{name} = {to}" if line.split(":")[0].split(" =")[0] == name else line
            for line in text.split("\n")
        ]
        assert f"{name} = {to}" in lines
        return "\n".join(lines)

    return edit


@needs_wheels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "file", "attribute", "contract"),
    [
        ("fag-metadata", "fag_metadata/layout.py", "FORMAT_VERSION", "METADATA_FORMAT 2"),
        ("fag-kernel", "fag_kernel/contract.py", "KERNEL_ABI", "KERNEL_ABI 2"),
    ],
)
def test_other_interface_version_is_refused_whatever_the_release(
    package: str, file: str, attribute: str, contract: str, tmp_path: Path, overlay: Overlay
) -> None:
    other = repack(package, "0.1.7", tmp_path, {file: set_version(attribute, 2)})
    overlay.pip("install", "--no-deps", str(other))
    sentence = refusal(overlay.run("import fag_torch"))
    assert contract in sentence
    assert f"{package} 0.1.7" in sentence
    assert "pip install" in sentence
