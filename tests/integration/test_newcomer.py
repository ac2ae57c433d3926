"""What the documentation shows a newcomer works: Python blocks run, commands and links exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("packages/*/README.md"),
    ]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)[^)]*\)")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str


def blocks() -> list[Block]:
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for page, text in ((page, page.read_text()) for page in PAGES)
        for match in FENCE.finditer(text)
    ]


COMMANDS = [line for block in blocks() if block.language == "bash" for line in block.text.splitlines()]
WITH_PYTHON = sorted({block.page for block in blocks() if block.language == "python"})


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=page_name)
def test_python_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    lines = [""] * len(page.read_text().splitlines())
    for block in blocks():
        if block.page == page and block.language == "python":
            code = block.text.splitlines()
            lines[block.line : block.line + len(code)] = code  # so that a traceback names the page's lines
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(lines))
    command = [sys.executable, str(script)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_readme_begins_with_the_two_commands() -> None:
    first = next(block for block in blocks() if block.page == ROOT / "README.md")
    assert [line.split("#")[0].strip() for line in first.text.splitlines()] == [
        "python3 tools/dev.py demo",
        "python3 tools/dev.py test",
    ]


def test_ci_runs_the_readmes_test_command() -> None:
    assert "exec python3 tools/dev.py test" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_commands_of_dev_py_in_the_pages_exist() -> None:
    usage = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "dev.py"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    known = set(re.findall(r"^  (\w+)  ", usage, re.MULTILINE))
    shown = {match for line in COMMANDS for match in re.findall(r"tools/dev\.py (\w+)", line)}
    assert {"demo", "test", "setup", "run"} <= shown
    assert shown <= known


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_inside_the_repository_exist(page: Path) -> None:
    missing = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert missing == []
