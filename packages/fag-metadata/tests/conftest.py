"""Lets the test modules import the helpers beside them, which importlib mode does not by itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
