"""Progress lines and readable failures for the developer commands. Everything goes to stderr.

stdout stays free for what a command itself prints, so that `tools/dev.py demo | tail -n 1` is the demo's
JSON line.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LOG_LINES_SHOWN = 40


class Failure(Exception):
    """A step that cannot go on; its text is all that the user sees."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds(duration: float) -> str:
    return f"{duration:.0f} s" if duration < 100 else f"{duration // 60:.0f} min {duration % 60:02.0f} s"


class Step:
    """Names what happens now; counts seconds on a terminal, prints two plain lines elsewhere."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._done = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Step:
        self._start = time.monotonic()
        if sys.stderr.isatty():
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()
        else:
            say(f"{self.title} ...")
        return self

    def _tick(self) -> None:
        while not self._done.wait(0.5):
            elapsed = seconds(time.monotonic() - self._start)
            print(f"\r\x1b[K{self.title} ... {elapsed}", end="", file=sys.stderr, flush=True)

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        self._done.set()
        if self._ticker is not None:
            self._ticker.join()
            print("\r\x1b[K", end="", file=sys.stderr)
        outcome = "done" if kind is None else "failed"
        say(f"{self.title}: {outcome} in {seconds(time.monotonic() - self._start)}")


def run_logged(
    title: str, command: Sequence[str | Path], log: Path, env: Mapping[str, str], remedy: str = ""
) -> None:
    """Runs a command with its output in `log`; on failure shows the log's last lines.

    Raises:
        Failure: If the command cannot be started or exits with another status than 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in command]
    with Step(title), log.open("ab") as output:
        output.write(f"\n$ {' '.join(words)}\n".encode())
        output.flush()
        start = output.tell()
        with subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as process:
            status = process.wait()
        if status:
            lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
            tail = "\n".join("    " + line for line in lines[-LOG_LINES_SHOWN:])
            raise Failure(f"{tail}\n{title}: exit status {status}. {remedy}\nAll of its output: {log}")
