"""Exception types of the three FAG packages.

Every message has the form `<op>: <argument> <what must hold>, got <value>[ (<related>=<value>)]. <Remedy>.`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class InvalidProblemError(ValueError):
    """An argument has a value with which no implementation could run."""


class InvalidTypeError(TypeError):
    """An argument has the wrong dtype, or is not an array or number at all."""


class MetadataError(ValueError):
    """A metadata tensor is corrupt, truncated, or was made for another problem."""


class UnsupportedError(NotImplementedError):
    """The problem is valid, but no implementation that is present can run it."""


class ContractError(ImportError):
    """Two installed FAG packages do not fit together."""


def message(op: str, argument: str, rule: str, got: object, *, remedy: str = "", **related: object) -> str:
    """Builds the text of an error: `rule` starts with "must", `remedy` has no full stop."""
    text = f"{op}: {argument} {rule}, got {got}"
    if related:
        text += f" ({', '.join(f'{name}={value}' for name, value in related.items())})"
    return f"{text}. {remedy}." if remedy else f"{text}."


def problem_error(
    op: str, argument: str, rule: str, got: object, *, remedy: str = "", **related: object
) -> InvalidProblemError:
    """Returns an InvalidProblemError with the text of `message`."""
    return InvalidProblemError(message(op, argument, rule, got, remedy=remedy, **related))


def type_error(
    op: str, argument: str, rule: str, got: object, *, remedy: str = "", **related: object
) -> InvalidTypeError:
    """Returns an InvalidTypeError with the text of `message`."""
    return InvalidTypeError(message(op, argument, rule, got, remedy=remedy, **related))


class naming:
    """Turns a ValueError of native code that begins with "metadata:" into a MetadataError of the operator.

    A class and no generator, since it stands around every call of a kernel.
    """

    __slots__ = ("op",)

    def __init__(self, op: str) -> None:
        self.op = op

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, ValueError) and str(error).startswith("metadata:"):
            raise MetadataError(f"{self.op}: {error}") from None
