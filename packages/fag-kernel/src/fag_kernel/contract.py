"""What fag-kernel provides and accepts: interface versions, and the check of its sibling fag-metadata.

Interface versions are integers of their own, apart from package versions (contracts.toml at the root of the
repository states all of them): a package may be released alone as long as they stand. Nothing here imports
the sibling, so it can always say what is wrong.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fag_kernel._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Version of `fag_kernel.abi`, the interface offered to fag-torch. One step up for any change of a signature
#: there.
KERNEL_ABI: Final = 1

#: Interface versions of siblings that this release works with: name -> (lowest, highest).
ACCEPTS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType({"METADATA_FORMAT": (1, 1)})

#: Releases of fag-metadata that this one depends on, as in pyproject.toml: requirement, first and end
#: (exclusive).
METADATA_REQUIREMENT: Final = "fag-metadata~=0.1.0"
METADATA_RELEASES: Final = ((0, 1, 0), (0, 2))

_MEND: Final = f'pip install "fag-kernel=={__version__}" "{METADATA_REQUIREMENT}"'


def check_metadata_package(fag_metadata: Any) -> None:
    """Compare release and format version of the installed fag-metadata with the ranges accepted here.

    Args:
        fag_metadata: The imported module, or any object with its `FORMAT_VERSION` and `__version__`.

    Raises:
        ImportError: The versions do not fit: one sentence with both packages, both versions and the pip
            command. Of class fag_metadata.ContractError where that release has it.
    """
    version = getattr(fag_metadata, "__version__", "of unknown version")
    error: type[ImportError] = getattr(fag_metadata, "ContractError", ImportError)
    first, end = METADATA_RELEASES
    if not first <= _release(version) < end:
        raise error(
            f"fag-kernel {__version__} works with {METADATA_REQUIREMENT}, but found fag-metadata {version}; "
            f"mend it with: {_MEND}"
        )
    low, high = ACCEPTS["METADATA_FORMAT"]
    found = getattr(fag_metadata, "FORMAT_VERSION", None)
    if not isinstance(found, int) or not low <= found <= high:
        wanted = str(low) if low == high else f"{low} to {high}"
        raise error(
            f"fag-kernel {__version__} works with METADATA_FORMAT {wanted}, but fag-metadata {version} has "
            f"METADATA_FORMAT {found}; mend it with: {_MEND}"
        )


def missing_metadata_package(reason: ImportError) -> ImportError:
    """The error for a fag-metadata that is not there or does not import."""
    state = "is not installed" if getattr(reason, "name", None) == "fag_metadata" else "does not import"
    return ImportError(
        f"fag-kernel {__version__} needs {METADATA_REQUIREMENT}, which {state} ({reason}); "
        f"mend it with: {_MEND}"
    )


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
