"""Options and fixtures of the integration suite, which runs against the installed wheels.

`--layout bsnd|bnsd|tnd` keeps the tests of one layout (one tox environment each). Tests that know no layout
run with `--layout bsnd` and with the default, so that the three environments together run every test exactly
once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The helper modules beside this file (oracle, bound, cases, harness) are plain modules of the suite, not a
# package.
sys.path.insert(0, str(Path(__file__).parent))

import harness
import oracle
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--layout",
        choices=["all", *(name.lower() for name in oracle.LAYOUTS)],
        default="all",
        help="run the tests of one layout only; tests without a layout run with bsnd and all",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = {
        name.strip() for mark in metafunc.definition.iter_markers("parametrize") for name in names_of(mark)
    }
    if "layout" in metafunc.fixturenames and "layout" not in own:
        metafunc.parametrize("layout", oracle.LAYOUTS, ids=str.lower)
    if "api" in metafunc.fixturenames and "api" not in own:
        metafunc.parametrize("api", harness.APIS, ids=lambda api: api.name)
    if "dtype" in metafunc.fixturenames and "dtype" not in own:
        metafunc.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def names_of(mark: pytest.Mark) -> list[str]:
    """The argument names of a parametrize mark."""
    names = mark.args[0]
    return names.split(",") if isinstance(names, str) else list(names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--layout")
    if wanted == "all":
        return
    kept = [item for item in items if layout_of(item) in (wanted, None if wanted == "bsnd" else wanted)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def layout_of(item: pytest.Item) -> str | None:
    """The layout a test item is about, lower case; None when it knows none."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    layout = params.get("layout") or getattr(params.get("case"), "layout", None)
    return None if layout is None else layout.lower()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Every test draws the same numbers, alone or in the suite."""
    torch.manual_seed(0)
