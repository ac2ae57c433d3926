"""The two virtual environments: `.venv` for people, one under `.tox/` for the tests.

Both hold the built wheels and the pinned versions of constraints/default.txt. The tests' one is shared by
every tox environment, so that PyTorch is installed once; it is apart from `.venv` so that nothing that a
person installs there can make a test pass. Each step leaves a stamp and is skipped while that is right.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from console import Failure, run_logged
from wheels import DIST, PACKAGES, ROOT, build_wheels

PINS = ROOT / "constraints" / "default.txt"
CACHE = ROOT / ".cache"

# Variables that would make the environment's interpreter look at another one's files.
FOREIGN = ("PYTHONHOME", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__", "VIRTUAL_ENV_PROMPT")


@dataclass(frozen=True)
class Environment:
    """A virtual environment: where it is and what goes into it besides the three wheels."""

    path: Path
    groups: tuple[
        str, ...
    ]  # of [dependency-groups] in pyproject.toml, installed first: they build the wheels

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    def variables(self) -> dict[str, str]:
        """The environment variables of a command that runs in here; caches stay inside the checkout."""
        env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        env["VIRTUAL_ENV"] = str(self.path)
        env["PATH"] = os.pathsep.join([str(self.path / "bin"), env.get("PATH", os.defpath)])
        env.setdefault("MPLCONFIGDIR", str(CACHE / "matplotlib"))
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))
        env.setdefault("VIRTUALENV_OVERRIDE_APP_DATA", str(CACHE / "virtualenv"))
        return env


USER = Environment(ROOT / ".venv", groups=("tools",))
TESTS = Environment(ROOT / ".tox" / f"installed-{sys.implementation.cache_tag}", groups=("test",))


def check_interpreter() -> None:
    """Refuses what cannot work before anything is made.

    Raises:
        Failure: Not on Linux, or this Python lacks venv or ensurepip.
    """
    if not sys.platform.startswith("linux"):
        raise Failure(f"The kernels are built and tested on Linux only, this is {sys.platform}.")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise Failure(
            f"{sys.executable} has no module {error.name}, so it cannot make a virtual environment. "
            "Install it (Debian, Ubuntu: apt-get install python3-venv) or use another Python."
        ) from None


def prepare_tools(env: Environment) -> None:
    """Makes the virtual environment and installs its groups; for USER that is tox and the build tools."""
    check_interpreter()
    with _locked():
        _prepare_tools(env)


def prepare(env: Environment) -> None:
    """Brings the environment up to date with the sources: tools, wheels, and the wheels' own requirements."""
    check_interpreter()
    with _locked():
        _prepare_tools(env)
        _prepare_wheels(env)


def _prepare_tools(env: Environment) -> None:
    interpreter = [sys.base_prefix, sys.version]
    stamps = _Stamps(env)
    if stamps.get("interpreter") != interpreter or not env.python.exists():
        if env.path.exists() and not stamps.file.exists():
            raise Failure(f"{env.path} exists and was not made by tools/dev.py. Move it away and try again.")
        shutil.rmtree(env.path, ignore_errors=True)
        env.path.mkdir(parents=True)
        stamps.put("interpreter", None)  # an interrupted creation is known as ours
        command = [sys.executable, "-m", "venv", str(env.path)]
        run_logged(f"making {_name(env)}", command, _log(env), env.variables(), "Is python3-venv complete?")
        stamps.put("interpreter", interpreter)
    wanted = _hash(PINS.read_text(), (ROOT / "pyproject.toml").read_text(), repr(env.groups))
    if stamps.get("tools") != wanted:
        stamps.put("tools", None)
        pip = _pip_install(env)
        run_logged(f"upgrading pip in {_name(env)}", [*pip, "pip"], _log(env), env.variables(), NETWORK)
        groups = [word for name in env.groups for word in ("--group", f"{ROOT / 'pyproject.toml'}:{name}")]
        what = "tox and the build tools" if env is USER else "test and build tools"
        run_logged(
            f"installing {what} into {_name(env)}", [*pip, *groups], _log(env), env.variables(), NETWORK
        )
        stamps.put("tools", wanted)


def _prepare_wheels(env: Environment) -> None:
    variables = env.variables()
    # Kept between builds, so that a change in one C++ file compiles that file.
    variables.setdefault(
        "SKBUILD_BUILD_DIR", str(ROOT / "build" / f"fag-kernel-{sys.implementation.cache_tag}")
    )
    wheels = build_wheels(env.python, variables, DIST / "build.log")
    stamps = _Stamps(env)
    wanted = {package: wheel.sources for package, wheel in wheels.items()}
    if stamps.get("wheels") == wanted:
        return
    stamps.put("wheels", None)
    pip = _pip_install(env)
    paths = [str(wheels[package].path) for package in PACKAGES]
    install = [*pip, "--no-deps", "--force-reinstall", *paths]
    run_logged(f"installing the three wheels into {_name(env)}", install, _log(env), variables)
    paths[-1] += "[demo]"
    what = f"installing PyTorch and what else is missing into {_name(env)}"
    run_logged(what, [*pip, *paths], _log(env), variables, NETWORK)
    stamps.put("wheels", wanted)


NETWORK = (
    "If the network or the package index is the reason: pip reads PIP_INDEX_URL, PIP_FIND_LINKS and the like "
    "from the environment. The same command goes on where it stopped."
)


class _Stamps:
    """What was done in an environment, as a small JSON file inside it."""

    def __init__(self, env: Environment) -> None:
        self.file = env.path / "fag-stamps.json"

    def _read(self) -> dict[str, object]:
        try:
            content = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def get(self, name: str) -> object:
        return self._read().get(name)

    def put(self, name: str, value: object) -> None:
        content = self._read() | {name: value}
        temporary = self.file.with_suffix(".new")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.file)


def _pip_install(env: Environment) -> list[str | Path]:
    return [env.python, "-m", "pip", "install", "--disable-pip-version-check", "--constraint", PINS]


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _name(env: Environment) -> str:
    return str(env.path.relative_to(ROOT))


def _log(env: Environment) -> Path:
    return env.path / "install.log"


@contextmanager
def _locked() -> Iterator[None]:
    """One preparation at a time: `tox --parallel` starts several."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_in(env: Environment, command: list[str]) -> int:
    """Runs a command inside the environment and returns its exit status; Ctrl-C goes to the command alone."""
    variables = env.variables()
    program = shutil.which(command[0], path=variables["PATH"])
    if program is None:
        raise Failure(f"{command[0]}: no such command in {_name(env)} or on PATH.")
    process = subprocess.Popen([program, *command[1:]], env=variables)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal has sent it to the command too, which may have something to finish.
            continue
