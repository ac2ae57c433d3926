"""Compares the interfaces between the three packages with contracts.toml, or rewrites its digests.

    dev.py run -- python tools/contracts.py             compare; exit status 1 if they differ
    dev.py run -- python tools/contracts.py --update    write the digests of stepped versions
    dev.py run -- python tools/contracts.py --rewrite   write them all (a version that is not yet released)

An interface is reduced to a canonical text: names, places, widths and signatures count, documentation does
not. Its digest stands in contracts.toml beside its version, so that nobody changes the one without stepping
the other.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from enum import EnumMeta
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONTRACTS = Path(__file__).resolve().parent.parent / "contracts.toml"
STEP = (
    "{name}: the interface changed ({found}, contracts.toml has {stated}), its version is still {version}. "
    "Step {attribute}, then run tools/contracts.py --update."
)


def metadata_format(layout: ModuleType) -> str:
    """The int32 layout as text: tables, constants and enumerations of fag_metadata.layout."""
    names = [name for name in vars(layout) if name.isupper() and name != "FORMAT_VERSION"]
    lines = [f"{name} = {_plain(getattr(layout, name))}" for name in sorted(names)]
    for name, value in sorted(vars(layout).items()):
        if isinstance(value, EnumMeta) and value.__module__ == layout.__name__:
            members: Mapping[str, Any] = value.__members__
            lines += [f"{name}.{key} = {member.value!r}" for key, member in members.items()]
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if hasattr(value, "_asdict"):  # a named field of a table; its doc is not part of the contract
        return str({key: item for key, item in value._asdict().items() if key != "doc"})
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_plain, value)) + ")"
    return repr(value)


def kernel_abi(*modules: ModuleType) -> str:
    """What fag-kernel offers as text: every public function, class, type and constant of the modules."""
    return "\n".join(
        line
        for module in modules
        for name in sorted(module.__all__)
        for line in _offered(f"{module.__name__}.{name}", getattr(module, name))
    )


def _offered(name: str, value: Any) -> Iterator[str]:
    if not callable(value) or hasattr(value, "__origin__"):
        yield f"{name} = {value}"
        return
    if not isinstance(value, type):
        yield f"{name}({_signature(inspect.signature(value))}"
        return
    yield name
    for member, method in sorted(vars(value).items()):
        if not member.startswith("_"):  # methods of native classes have no signature to look at
            has_signature = inspect.isfunction(method)
            yield f"{name}.{member}" + (f"({_signature(inspect.signature(method))}" if has_signature else "")


def _signature(signature: inspect.Signature) -> str:
    # Spelled out, since str(Signature) differs between versions of Python.
    parameters = [
        f"{parameter.kind.name} {parameter.name}: {parameter.annotation}"
        + ("" if parameter.default is parameter.empty else f" = {parameter.default!r}")
        for parameter in signature.parameters.values()
    ]
    return f"{', '.join(parameters)}) -> {signature.return_annotation}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def interfaces() -> dict[str, tuple[int, str]]:
    """Version and digest of each interface of the packages that this Python imports."""
    import fag_kernel
    import fag_metadata.layout

    offered = (import_module(name) for name in stated()["interfaces"]["KERNEL_ABI"]["modules"])
    return {
        "METADATA_FORMAT": (fag_metadata.FORMAT_VERSION, digest(metadata_format(fag_metadata.layout))),
        "KERNEL_ABI": (fag_kernel.KERNEL_ABI, digest(kernel_abi(*offered))),
    }


def stated() -> dict[str, Any]:
    """The content of contracts.toml."""
    content: dict[str, Any] = tomllib.loads(CONTRACTS.read_text())
    return content


def faults(found: Mapping[str, tuple[int, str]], contracts: Mapping[str, Any]) -> list[str]:
    """What differs between the interfaces found and contracts.toml, one sentence each; empty if nothing."""
    sentences = []
    for name, (version, text) in found.items():
        entry = contracts["interfaces"][name]
        if version != entry["version"]:
            sentences.append(
                f"{name}: {entry['attribute']} is {version}, contracts.toml has {entry['version']}."
            )
        elif text != entry["digest"]:
            words = {"name": name, "found": text, "stated": entry["digest"]}
            sentences.append(STEP.format(version=version, attribute=entry["attribute"], **words))
    return sentences


def rewrite(found: Mapping[str, tuple[int, str]], names: list[str]) -> None:
    """Writes version and digest of the named interfaces into contracts.toml."""
    text = CONTRACTS.read_text()
    for name in names:
        version, value = found[name]
        section = re.compile(rf"(\[interfaces\.{name}\].*?\nversion = )\d+(.*?\ndigest = )\"\w*\"", re.DOTALL)
        text, count = section.subn(rf'\g<1>{version}\g<2>"{value}"', text)
        if count != 1:
            raise ValueError(f"contracts.toml has no section [interfaces.{name}] with version and digest")
    CONTRACTS.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--update", action="store_true", help="write digests of interfaces whose version was stepped"
    )
    parser.add_argument(
        "--rewrite", action="store_true", help="write all; only while the version is not released"
    )
    args = parser.parse_args()
    found, contracts = interfaces(), stated()
    if args.update or args.rewrite:
        stepped = [
            name for name, (version, _) in found.items() if version > contracts["interfaces"][name]["version"]
        ]
        rewrite(found, list(found) if args.rewrite else stepped)
    sentences = faults(found, stated())
    print("\n".join(sentences) or "contracts.toml agrees with the packages")
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
