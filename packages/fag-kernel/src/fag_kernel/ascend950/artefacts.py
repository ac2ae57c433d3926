"""The shipped files: manifests, packed IR, and every check that stands between a file and its use.

    data/flash_attn_grad_binary.json     what the operator registry reads
    data/FlashAttnGrad_bf16.json         manifest of an entry: tiling keys, launches, kernels
    data/FlashAttnGrad_fp16.json
    data/ir/<group>.xz                   optimised IR of the kernels of a family and type

An IR file is found through the manifest only (file, offset, length, sha256), and its hash is compared
before anything is done with the text.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from fag_kernel.ascend950.catalog import DTYPES, DType
from fag_kernel.ascend950.errors import ArtefactError

MANIFEST_FORMAT: Final = 2
DATA: Final = Path(__file__).parent / "data"
BINARY_JSON: Final = "flash_attn_grad_binary.json"
REMEDY: Final = "Reinstall fag-kernel: pip install --force-reinstall --no-deps fag-kernel."

#: Stands in the packed IR for the folder of the vendor's device bitcode.
BITCODE_FOLDER: Final = "@FAG_BITCODE_FOLDER@"

#: Bytes in front of a kernel's own arguments, as triton-ascend launches it.
LAUNCH_PREFIX: Final = ("ffts_address", "sync_block_lock", "compiler_workspace")
LAUNCH_SUFFIX: Final = ("grid_x", "grid_y", "grid_z")


def entry_name(dtype: DType) -> str:
    """Name of the entry of a type in the binary JSON and of its manifest."""
    return f"FlashAttnGrad_{dtype}"


def read_json(path: Path) -> Any:
    """Contents of a shipped JSON file.

    Raises:
        ArtefactError: It is missing or is no JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ArtefactError(
            f"ascend950: {path.name} must be in {path.parent}, it is missing. {REMEDY}"
        ) from None
    except ValueError as reason:
        raise ArtefactError(f"ascend950: {path.name} must be JSON, got {reason}. {REMEDY}") from None


@lru_cache(maxsize=8)
def _manifest(dtype: DType, data: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = read_json(data / f"{entry_name(dtype)}.json")
    if manifest.get("format") != MANIFEST_FORMAT:
        raise ArtefactError(
            f"ascend950: {entry_name(dtype)}.json must have format {MANIFEST_FORMAT}, got "
            f"{manifest.get('format')!r}. {REMEDY}"
        )
    return manifest


def manifest(dtype: str, data: Path | None = None) -> dict[str, Any]:
    """The manifest of an entry.

    Args:
        dtype: "bf16" or "fp16".
        data: Folder of the files; None = the installed ones.

    Raises:
        ValueError: Another dtype.
        ArtefactError: The file is missing, damaged or of another format.
    """
    if dtype not in DTYPES:
        raise ValueError(f"ascend950: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    return _manifest(dtype, data or DATA)


@lru_cache(maxsize=2)
def _group_text(path: Path, modified: int) -> bytes:
    return lzma.decompress(path.read_bytes())


def read_ir(record: dict[str, Any], data: Path | None = None) -> str:
    """The optimised IR of a kernel.

    Args:
        record: The kernel's record in a manifest.
        data: Folder of the files; None = the installed ones.

    Raises:
        ArtefactError: The file is missing or damaged, or the text is not the one that was shipped.
    """
    place = record["ir"]
    path = (data or DATA) / place["file"]
    try:
        group = _group_text(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        raise ArtefactError(
            f"ascend950: IR of {record['name']} must be in {place['file']}, the file is missing. {REMEDY}"
        ) from None
    except lzma.LZMAError as reason:
        raise ArtefactError(
            f"ascend950: {place['file']} must be an xz file, got {reason}. {REMEDY}"
        ) from None
    text = group[place["offset"] : place["offset"] + place["bytes"]]
    digest = hashlib.sha256(text).hexdigest()
    if digest != place["sha256"]:
        raise ArtefactError(
            f"ascend950: IR of {record['name']} must have sha256 {place['sha256'][:16]}..., got "
            f"{digest[:16]}... ({place['file']}). {REMEDY}"
        )
    return text.decode()


def pack(data: Path, ir: dict[str, tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Write the IR files; returns the place of each kernel.

    Args:
        data: Folder; its ir/ is replaced.
        ir: Kernel name -> (group, text). Kernels of a group are alike, so one stream packs them 40 times
            smaller.
    """
    folder = data / "ir"
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[str]] = {}
    for name, (group, _) in ir.items():
        groups.setdefault(group, []).append(name)
    for stale in folder.glob("*.xz"):
        if stale.stem not in groups:
            stale.unlink()
    places: dict[str, dict[str, Any]] = {}
    for group, names in groups.items():
        stream = bytearray()
        for name in names:
            text = ir[name][1].encode()
            digest = hashlib.sha256(text).hexdigest()
            places[name] = {
                "file": f"ir/{group}.xz",
                "offset": len(stream),
                "bytes": len(text),
                "sha256": digest,
            }
            stream += text
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26}]
        (folder / f"{group}.xz").write_bytes(
            lzma.compress(bytes(stream), format=lzma.FORMAT_XZ, check=lzma.CHECK_SHA256, filters=filters)
        )
    return places
