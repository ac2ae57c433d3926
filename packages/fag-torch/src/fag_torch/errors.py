"""The two faces of an error: ValueError or TypeError from a Python function, RuntimeError through torch.ops.

A rule is checked once, in fag_metadata, and raises its exception there. An operator passes it on as
`OperatorError`, a RuntimeError with the same text; the Python functions of fag_torch take the original out
again.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, TypeVar

from fag_metadata.errors import InvalidTypeError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

Result = TypeVar("Result")


class OperatorError(RuntimeError):
    """A refused call of an operator in `torch.ops`.

    Attributes:
        reason: The exception of the rule that was broken, a ValueError or TypeError; its text is the same.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def through_torch_ops(kernel: Callable[..., Result]) -> Callable[..., Result]:
    """Makes an operator's implementation raise `OperatorError` where a rule is broken.

    Args:
        kernel: Implementation for one dispatch key.

    Returns:
        The same implementation with RuntimeErrors; `kernel` is its `__wrapped__`. Errors that are no broken
        rule pass unchanged.
    """

    @wraps(kernel)
    def registered(*args: Any, **kwargs: Any) -> Result:
        try:
            return kernel(*args, **kwargs)
        except (ValueError, InvalidTypeError, UnsupportedError) as reason:
            raise OperatorError(reason) from None

    return registered
