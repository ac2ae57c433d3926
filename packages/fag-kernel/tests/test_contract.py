"""Version skew between fag-kernel and fag-metadata is one sentence that says what to do."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fag_kernel
import fag_metadata
from fag_kernel import contract

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def module(version="0.1.3", **attributes):
    return SimpleNamespace(__version__=version, **attributes)


@pytest.mark.parametrize("version", ["0.1.0", "0.1.17", "0.1.1rc1", fag_metadata.__version__])
def test_accepts_compatible_releases(version):
    contract.check_metadata_package(module(version, FORMAT_VERSION=1))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            module("0.2.0", FORMAT_VERSION=1),
            "works with fag-metadata~=0.1.0, but found fag-metadata 0.2.0",
        ),
        (module("0.0.9", FORMAT_VERSION=1), "but found fag-metadata 0.0.9"),
        (module(FORMAT_VERSION=2), "METADATA_FORMAT 1, but fag-metadata 0.1.3 has METADATA_FORMAT 2"),
        (module(FORMAT_VERSION=0), "has METADATA_FORMAT 0"),
        (module(), "has METADATA_FORMAT None"),
        (SimpleNamespace(), "but found fag-metadata of unknown version"),
    ],
)
def test_skew_is_one_sentence_with_versions_and_command(found, says):
    with pytest.raises(ImportError) as caught:
        contract.check_metadata_package(found)
    text = str(caught.value)
    assert text.startswith(f"fag-kernel {fag_kernel.__version__} works with ")
    assert says in text
    assert text.endswith(f'pip install "fag-kernel=={fag_kernel.__version__}" "fag-metadata~=0.1.0"')
    assert "\n" not in text


def test_skew_has_the_siblings_error_class_where_it_exists():
    with pytest.raises(fag_metadata.ContractError):
        contract.check_metadata_package(module(FORMAT_VERSION=9, ContractError=fag_metadata.ContractError))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("FORMAT_VERSION = 2; __version__ = '0.1.9'", "METADATA_FORMAT 1, but fag-metadata 0.1.9 has"),
        ("import no_such_module_at_all", "which does not import (No module named 'no_such_module_at_all')"),
        (None, "which is not installed (No module named 'fag_metadata')"),
    ],
)
def test_import_raises_that_sentence(tmp_path, source, says):
    """In a fresh interpreter that sees fag_kernel and a foreign fag_metadata, or none."""
    if source is not None:
        (tmp_path / "fag_metadata.py").write_text(source)
    code = (
        "import sys, importlib.abc\n"
        f"paths = [{str(tmp_path)!r}]\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        import importlib.machinery\n"
        "        if name != 'fag_metadata': return None\n"
        "        spec = importlib.machinery.PathFinder.find_spec(name, paths)\n"
        "        if spec is None: raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "        return spec\n"
        "sys.meta_path.insert(0, Finder())\n"
        "try:\n"
        "    import fag_kernel\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    where = str(Path(fag_kernel.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {where!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert says in done.stdout, done.stderr
    assert "pip install" in done.stdout


def test_accepted_range_is_what_pyproject_depends_on():
    assert f'"{contract.METADATA_REQUIREMENT}"' in PYPROJECT.read_text()
    first, end = contract.METADATA_RELEASES
    assert f"fag-metadata~={'.'.join(map(str, first))}" == contract.METADATA_REQUIREMENT
    assert end == (first[0], first[1] + 1)


def test_provides_what_it_says():
    assert fag_kernel.KERNEL_ABI == 1
    assert fag_kernel.ACCEPTS["METADATA_FORMAT"] == (1, 1)
    assert fag_metadata.FORMAT_VERSION == 1
    with pytest.raises(TypeError):
        fag_kernel.ACCEPTS["METADATA_FORMAT"] = (1, 2)


def test_import_is_light():
    code = "import sys, fag_kernel; print(sorted({'torch', 'matplotlib', 'ml_dtypes'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_reload_is_harmless():
    importlib.reload(fag_kernel)
