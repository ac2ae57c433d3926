"""Exception types of the three FAG packages.

Every message has the form `<op>: <argument> <what must hold>, got <value>[ (<related>=<value>)]. <Remedy>.`
so that a test or a user can find the argument, the rule and the value in it. `problem_error` and `type_error`
build that text.
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
    """Builds the one form of error text.

    Args:
        op: Operator or function the user called.
        argument: Argument that breaks the rule.
        rule: What must hold, starting with "must".
        got: The offending value.
        remedy: What to do about it, one sentence without its full stop.
        **related: Other values the rule depends on.

    Returns:
        The text, one line.

    Example:
        >>> message("flash_attn", "n1", "must be a multiple of n2", 6, n2=4)
        'flash_attn: n1 must be a multiple of n2, got 6 (n2=4).'
    """
    context = ", ".join(f"{name}={value}" for name, value in related.items())
    text = f"{op}: {argument} {rule}, got {got}"
    if context:
        text += f" ({context})"
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
    """Gives errors of native code about the metadata the name of the operator that the user called.

    A ValueError that begins with "metadata:" becomes a MetadataError. A class and no generator, since it
    stands around every call of a kernel.

    Args:
        op: Operator or function the user called.

    Example:
        >>> with naming("flash_attn"):
        ...     raise ValueError("metadata: section_num must be 1, got 7.")
        Traceback (most recent call last):
        ...
        fag_metadata.errors.MetadataError: flash_attn: metadata: section_num must be 1, got 7.
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
