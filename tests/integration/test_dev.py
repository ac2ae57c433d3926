"""tools/dev.py and its parts: what is built anew when, and what a machine that lacks something is told."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(TOOLS))
    yield
    for name in ("console", "environments", "wheels"):
        sys.modules.pop(name, None)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one package, in place of this one."""
    import wheels

    (tmp_path / "constraints").mkdir()
    (tmp_path / "constraints" / "default.txt").write_text("pip==1\n")
    folder = tmp_path / "packages" / "fag-metadata"
    (folder / "src").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "src" / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    return folder


def test_changed_source_changes_the_hash(package: Path) -> None:
    import wheels

    before = wheels.source_hash("fag-metadata")
    (package / "src" / "a.py").write_text("a = 2\n")
    assert wheels.source_hash("fag-metadata") != before


def test_moved_bytes_between_files_change_the_hash(package: Path) -> None:
    import wheels

    (package / "src" / "b.py").write_text("b")
    before = wheels.source_hash("fag-metadata")
    (package / "src" / "a.py").write_text("a = 1\nb")
    (package / "src" / "b.py").write_text("")
    assert wheels.source_hash("fag-metadata") != before


def test_tests_caches_and_time_stamps_do_not_change_the_hash(package: Path) -> None:
    import wheels

    before = wheels.source_hash("fag-metadata")
    (package / "tests" / "test_a.py").write_text("pass\n")
    (package / "src" / "__pycache__").mkdir()
    (package / "src" / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    (package / "src" / "native.so").write_bytes(b"x")
    os.utime(package / "src" / "a.py", (1, 1))
    assert wheels.source_hash("fag-metadata") == before


def test_changed_pins_change_the_hash(package: Path) -> None:
    import wheels

    before = wheels.source_hash("fag-metadata")
    (package.parents[1] / "constraints" / "default.txt").write_text("pip==2\n")
    assert wheels.source_hash("fag-metadata") != before


def test_machine_without_a_compiler_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import console
    import wheels

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(console.Failure, match=r"needs a C\+\+ compiler, found none .*apt-get install g\+\+"):
        wheels.find_compiler()


def test_compiler_without_cxx20_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import console
    import wheels

    old = tmp_path / "old-c++"
    old.write_text("#!/bin/sh\necho 'unrecognized option -std=c++20' >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(console.Failure, match=r"knows C\+\+20 .*old-c\+\+ refused .*\n.*unrecognized option"):
        wheels.find_compiler()


def test_python_without_venv_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import console
    import environments

    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(console.Failure, match="no module ensurepip.*apt-get install python3-venv"):
        environments.check_interpreter()


def test_folder_that_is_not_ours_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import console
    import environments

    monkeypatch.setattr(environments, "CACHE", tmp_path / "cache")
    theirs = environments.Environment(tmp_path / "venv", groups=())
    theirs.path.mkdir()
    (theirs.path / "precious").touch()
    with pytest.raises(console.Failure, match="was not made by tools/dev.py. Move it away"):
        environments.prepare_tools(theirs)
    assert (theirs.path / "precious").exists()


def test_failed_step_shows_the_end_of_its_output(tmp_path: Path) -> None:
    import console

    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with pytest.raises(console.Failure, match=r"the reason\n.*a step: exit status 3.*\nAll of its output: "):
        console.run_logged("a step", command, tmp_path / "log", os.environ)


def test_command_runs_inside_the_environment_and_its_status_is_kept() -> None:
    import environments

    here = environments.Environment(Path(sys.prefix), groups=())
    code = "import sys; sys.exit(7 if sys.prefix == sys.argv[1] else 1)"
    assert environments.run_in(here, ["python", "-c", code, sys.prefix]) == 7


@pytest.mark.parametrize("words", [["nonsense"], [], ["setup", "extra"]])
def test_wrong_command_line_shows_usage(words: list[str]) -> None:
    command = [sys.executable, str(TOOLS / "dev.py"), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "usage: dev.py" in result.stderr


def test_compiled_wheel_is_for_other_machines_too() -> None:
    wheel = metadata.distribution("fag-kernel").read_text("WHEEL") or ""
    tag = re.search(r"^Tag: \w+-\w+-manylinux_2_(\d+)_", wheel, re.MULTILINE)
    assert tag, wheel
    name, version = platform.libc_ver()
    if (
        name == "glibc" and int(version.split(".")[1]) <= 36
    ):  # newer ones give more of the old names new versions
        assert int(tag[1]) <= 34


def test_wheel_that_auditwheel_refuses_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import console
    import wheels

    def refuse(*_: object) -> None:
        raise console.Failure("too recent versioned symbols")

    monkeypatch.setattr(wheels, "run_logged", refuse)
    built = tmp_path / "fag_kernel-0.1.0-cp311-cp311-linux_x86_64.whl"
    assert wheels._tagged(Path(sys.executable), built, os.environ, tmp_path / "log") == built
    assert f"{built.name} is for this machine's C library only:\ntoo recent" in capsys.readouterr().err
