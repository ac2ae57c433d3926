"""Living beside CANN's own `cann_ops_transformer` package, whichever of the two is imported first.

Both define operators in one namespace of torch.ops, and torch refuses a second definition. If CANN's package
comes first, `register.py` adds only what is missing. If it comes later, our registrations step aside while it
is imported and then fill up what is still missing; the finder below sees that import coming. It imports
nothing by itself.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from threading import RLock
from typing import TYPE_CHECKING, Any

from fag_torch.schema import CANN_NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from fag_torch.register import Registrations


class CannPackageFinder(MetaPathFinder):
    """Finds nothing itself; wraps the loader of CANN's package so that our registrations step aside
    meanwhile.

    It is also what keeps the registrations of this process alive, and where a second import of fag_torch
    (after a purge of sys.modules) finds those of the first one.

    Attributes:
        registrations: Ours.
    """

    def __init__(self, registrations: Registrations) -> None:
        self.registrations = registrations
        self._lock = RLock()
        self._depth = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have for a module of CANN's package, with its loader wrapped."""
        if fullname.partition(".")[0] != CANN_NAMESPACE:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _AsideLoader(spec.loader, self)
                return spec
        return None

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self.registrations.step_aside(CANN_NAMESPACE)

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self.registrations.fill_up()


class _AsideLoader(Loader):
    def __init__(self, loader: Any, finder: CannPackageFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # from here on nobody sees that it was wrapped
        module.__loader__ = self._loader
        with self._finder:
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def install(registrations: Registrations) -> None:
    """Puts a finder for `registrations` in front of sys.meta_path, in place of one of an earlier import of
    fag_torch.

    Args:
        registrations: Ours, already filled up.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not is_ours(finder)]
    sys.meta_path.insert(0, CannPackageFinder(registrations))


def earlier_registrations() -> Any:
    """Those of an earlier import of fag_torch in this process, or None."""
    for finder in sys.meta_path:
        if is_ours(finder):
            return finder.registrations  # type: ignore[attr-defined]
    return None


def is_ours(finder: object) -> bool:
    """Whether a finder is this class, or the same class of an earlier import."""
    return f"{type(finder).__module__}.{type(finder).__qualname__}" == f"{__name__}.CannPackageFinder"
