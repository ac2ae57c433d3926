"""What fag-kernel provides and accepts: interface versions, and the check of its sibling fag-metadata.

Interface versions are integers of their own, apart from package versions (contracts.toml at the root of the
repository states all of them): a package may be released alone as long as they stand.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fag_kernel._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Version of `fag_kernel.abi`, the interface offered to fag-torch. One step up for any change of a signature there.
KERNEL_ABI: Final = 1

#: Interface versions of siblings that this release works with: name -> (lowest, highest).
ACCEPTS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType({"METADATA_FORMAT": (1, 1)})

#: Range of fag-metadata that this release depends on, as in pyproject.toml.
METADATA_REQUIREMENT: Final = "fag-metadata~=0.1.0"


def check_metadata_package(fag_metadata: Any) -> None:
    """Compare the format version of the installed fag-metadata with the range accepted here.

    Args:
        fag_metadata: The imported module, or any object with its `FORMAT_VERSION` and `__version__`.

    Raises:
        ImportError: The versions do not fit; one sentence with both packages, both versions and the pip command.
            Of class fag_metadata.ContractError where that release has it.
    """
    low, high = ACCEPTS["METADATA_FORMAT"]
    found = getattr(fag_metadata, "FORMAT_VERSION", None)
    if isinstance(found, int) and low <= found <= high:
        return
    wanted = str(low) if low == high else f"{low} to {high}"
    error: type[ImportError] = getattr(fag_metadata, "ContractError", ImportError)
    raise error(
        f"fag-kernel {__version__} works with metadata format {wanted}, but the installed fag-metadata "
        f"{getattr(fag_metadata, '__version__', '(unknown version)')} has format {found}; "
        f'mend it with: pip install "fag-kernel=={__version__}" "{METADATA_REQUIREMENT}"'
    )
