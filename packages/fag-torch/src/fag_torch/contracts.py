"""Which siblings and which torch this release works with, compared once when fag_torch is imported.

Two things are compared for each sibling: the version of its distribution (ours depends on a compatible
release) and the integer version of the interface it provides (contracts.toml at the root of the repository
states all of them). Any skew, also one that fag-kernel finds between itself and fag-metadata, is one
ImportError with the command that mends it.

This module imports neither sibling nor torch until `check()` runs, so it can always say what is wrong.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Final

from fag_torch._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Interface versions of siblings that this release works with: name -> (lowest, highest).
ACCEPTS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"METADATA_FORMAT": (1, 1), "KERNEL_ABI": (1, 1)}
)

#: Release range of each sibling, first version included, last excluded; the same as in pyproject.toml (a test
#: compares).
SIBLINGS: Final[Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]] = MappingProxyType(
    {"fag-metadata": ((0, 1, 0), (0, 2)), "fag-kernel": ((0, 1, 0), (0, 2))}
)

#: Oldest torch that the tests were seen to pass with, and the one that every change is tested with.
OLDEST_TORCH: Final = (2, 6)
TESTED_TORCH: Final = "2.13.0"

#: Sibling -> (contract, attribute of the module that holds its version).
_INTERFACES: Final = {
    "fag-metadata": ("METADATA_FORMAT", "FORMAT_VERSION"),
    "fag-kernel": ("KERNEL_ABI", "KERNEL_ABI"),
}

#: Puts all three packages into a state that fits this release, whatever was installed.
MEND: Final = f'pip install "fag-torch=={__version__}" "fag-kernel~=0.1.0" "fag-metadata~=0.1.0"'


def check() -> None:
    """Imports fag_metadata, fag_kernel and torch and compares their versions with what this release accepts.

    Raises:
        ImportError: A sibling or torch is missing, too old or too new: one sentence with both packages, both
            versions and the pip command. Of class fag_metadata.errors.ContractError where fag-metadata has
            it.
    """
    for distribution in SIBLINGS:  # fag-metadata first: fag-kernel imports it
        version = _installed_version(distribution)
        if version is not None:
            check_release(distribution, version)
        check_sibling(distribution, _import_sibling(distribution))
    check_torch(_import_torch())


def check_release(distribution: str, version: str) -> None:
    """Compares the version of a sibling with the range of releases accepted here.

    Args:
        distribution: "fag-metadata" or "fag-kernel".
        version: What is installed, or what the imported module says it is.

    Raises:
        ImportError: It is outside the range, see `check`.
    """
    low, high = SIBLINGS[distribution]
    if not low <= release(version) < high:
        raise _error(
            f"fag-torch {__version__} works with {distribution} >={_dotted(low)},<{_dotted(high)}, "
            f"but found {distribution} {version}"
        )


def check_sibling(distribution: str, module: ModuleType) -> None:
    """Compares one imported sibling with the range of releases and the interface version accepted here.

    Args:
        distribution: "fag-metadata" or "fag-kernel".
        module: The imported package.

    Raises:
        ImportError: It does not fit, see `check`.
    """
    check_release(distribution, getattr(module, "__version__", "0"))
    contract, attribute = _INTERFACES[distribution]
    oldest, newest = ACCEPTS[contract]
    found = getattr(module, attribute, None)
    if not isinstance(found, int) or not oldest <= found <= newest:
        accepted = str(oldest) if oldest == newest else f"{oldest} to {newest}"
        raise _error(
            f"fag-torch {__version__} works with {contract} {accepted}, but {distribution} "
            f"{getattr(module, '__version__', 'of unknown version')} has {contract} {found}"
        )


def check_torch(module: ModuleType) -> None:
    """Refuses a torch that lacks calls used here; any newer one is accepted.

    Args:
        module: The imported torch.

    Raises:
        ImportError: It is older than `OLDEST_TORCH`.
    """
    if release(module.__version__) < OLDEST_TORCH:
        raise _error(
            f"fag-torch {__version__} needs torch >= {_dotted(OLDEST_TORCH)} (tested with {TESTED_TORCH}), "
            f"but found torch {module.__version__}",
            f'pip install "torch>={_dotted(OLDEST_TORCH)}"',
        )


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version string, without pre-release, post-release and local parts.

    Example:
        >>> release("2.13.0+cpu"), release("0.1.0rc1")
        ((2, 13, 0), (0, 1, 0))
    """
    match = re.match(r"\d+(?:\.\d+)*", str(version))
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _import_sibling(distribution: str) -> ModuleType:
    name = distribution.replace("-", "_")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if _is_contract_error(error):  # fag-kernel refused fag-metadata: its sentence already says all
            raise
        version = _installed_version(distribution)
        state = "none is installed" if version is None else f"the installed {version} does not import"
        raise _error(
            f"fag-torch {__version__} works with {distribution}~=0.1.0, but {state} ({error})"
        ) from None


def _import_torch() -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise  # torch is there and says itself what it misses
        oldest = _dotted(OLDEST_TORCH)
        raise _error(
            f"fag-torch {__version__} needs torch >= {oldest} (tested with {TESTED_TORCH}), which is missing",
            f'pip install "torch>={oldest}"',
        ) from None


def _is_contract_error(error: ImportError) -> bool:
    return type(error).__name__ == "ContractError" or "pip install" in str(error)


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None  # a source tree on sys.path: the module's own __version__ is all there is


def _error(sentence: str, command: str = MEND) -> ImportError:
    text = f"{sentence}; mend it with: {command}"
    try:
        kind: type[ImportError] = importlib.import_module("fag_metadata.errors").ContractError
    except (ImportError, AttributeError):
        kind = ImportError
    return kind(text)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
