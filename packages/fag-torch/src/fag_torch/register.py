"""Which implementation of which operator serves which dispatch key, as one table, and how they are
registered.

Schemas are defined and keys are filled only where nobody has done so: CANN's package may own any of them.
Rows of the table are looked at in order.
"""

from __future__ import annotations

from functools import wraps
from inspect import unwrap
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.library import Library, register_fake

from fag_torch import autograd, coexist, cpu, direct, inductor, meta, metadata, npu
from fag_torch.errors import through_torch_ops
from fag_torch.schema import CANN_NAMESPACE, CANN_SCHEMAS, FAG_NAMESPACE, FAG_SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_SCHEMAS: Final = {CANN_NAMESPACE: CANN_SCHEMAS, FAG_NAMESPACE: FAG_SCHEMAS}


class Row(NamedTuple):
    """One implementation.

    Attributes:
        namespace: Of torch.ops.
        op: Name of the operator.
        key: Dispatch key; "Meta" is registered as the fake implementation, which serves tracing too.
        kernel: The implementation.
        with_keyset: Whether it takes the dispatch keys first, to call the next key itself.
    """

    namespace: str
    op: str
    key: str
    kernel: Callable[..., Any]
    with_keyset: bool = False


def _rows() -> Iterator[Row]:
    for namespace, op, key, kernel in (
        (CANN_NAMESPACE, "flash_attn", "CPU", cpu.flash_attn),
        (CANN_NAMESPACE, "flash_attn", "Meta", meta.flash_attn),
        (CANN_NAMESPACE, "flash_attn", "PrivateUse1", npu.flash_attn),
        (CANN_NAMESPACE, "flash_attn_grad", "CPU", cpu.flash_attn_grad),
        (CANN_NAMESPACE, "flash_attn_grad", "Meta", meta.flash_attn_grad),
        (CANN_NAMESPACE, "flash_attn_grad", "PrivateUse1", npu.flash_attn_grad),
        # One implementation for lengths on any device, and for none at all, where there is no tensor to
        # dispatch on.
        (CANN_NAMESPACE, "flash_attn_metadata", "CompositeExplicitAutograd", metadata.flash_attn_metadata),
        (CANN_NAMESPACE, "flash_attn_metadata", "Meta", meta.flash_attn_metadata),
        (FAG_NAMESPACE, "attention_forward", "CPU", cpu.attention_forward),
        (FAG_NAMESPACE, "attention_forward", "Meta", meta.attention_forward),
        (FAG_NAMESPACE, "attention_forward", "PrivateUse1", npu.attention_forward),
        (FAG_NAMESPACE, "attention_backward", "CPU", cpu.attention_backward),
        (FAG_NAMESPACE, "attention_backward", "Meta", meta.attention_backward),
        (FAG_NAMESPACE, "attention_backward", "PrivateUse1", npu.attention_backward),
    ):
        yield Row(namespace, op, key, through_torch_ops(kernel))
    yield Row(CANN_NAMESPACE, "flash_attn", "Autograd", autograd.raw_operator("flash_attn"), True)
    yield Row(CANN_NAMESPACE, "flash_attn_grad", "Autograd", autograd.raw_operator("flash_attn_grad"), True)
    yield Row(FAG_NAMESPACE, "attention_forward", "Autograd", autograd.attention_forward, True)
    yield Row(FAG_NAMESPACE, "attention_backward", "Autograd", autograd.attention_backward, True)


#: Every registration but the refusal of vmap, which every operator has (see Registrations).
TABLE: Final = tuple(_rows())


class Registrations:
    """What fag_torch has registered in this process.

    Attributes:
        rows: The rows of TABLE that are registered now.
        foreign: Qualified names of operators that someone else has defined with other arguments than CANN
            documents; ours do not serve them.
        anchors: What is never taken back: an operator whose last registration is removed dies, and whoever
            still holds it (a compiled graph) holds a dangling handle.
    """

    def __init__(self, anchors: list[Library] | None = None) -> None:
        self.rows: list[Row] = []
        self.foreign: list[str] = []
        self._libraries: dict[str, Library] = {}
        self.anchors = _anchors() if anchors is None else anchors

    def fill_up(self) -> None:
        """Defines the operators and serves the dispatch keys that nobody has taken."""
        for namespace, schemas in _SCHEMAS.items():
            if namespace in self._libraries:
                continue
            library = self._libraries[namespace] = Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
            usable = set()
            for op, schema in schemas.items():
                if not hasattr(getattr(torch.ops, namespace), op):
                    library.define(op + schema)  # type: ignore[no-untyped-call]
                    usable.add(op)
                elif _has_arguments_of(namespace, op, schema):
                    usable.add(op)
                else:
                    self.foreign.append(f"{namespace}::{op}")
            for row in TABLE:
                if row.namespace == namespace and row.op in usable:
                    self._add(library, row)

    def step_aside(self, *namespaces: str) -> None:
        """Takes back what `fill_up` did, so that someone else can define and serve the same.

        Args:
            *namespaces: Of torch.ops.
        """
        for row in self.rows:
            if row.namespace in namespaces:
                for served in (direct.OPERATORS, direct.FUNCTIONS):
                    served.pop(f"{row.namespace}::{row.op}", None)
        self.rows = [row for row in self.rows if row.namespace not in namespaces]
        self.foreign = [name for name in self.foreign if name.partition("::")[0] not in namespaces]
        for namespace in namespaces:
            self._libraries.pop(namespace, None)  # takes its registrations with it: the last reference goes
            for op in _SCHEMAS[
                namespace
            ]:  # older releases of torch keep the packet of an operator that is gone
                vars(getattr(torch.ops, namespace)).pop(op, None)

    def _add(self, library: Library, row: Row) -> None:
        name = f"{row.namespace}::{row.op}"
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, row.key):
            return
        if row.key == "Meta":
            register_fake(name, _traced(row), lib=library)
        else:
            library.impl(row.op, row.kernel, row.key, with_keyset=row.with_keyset)  # type: ignore[no-untyped-call]
            if row.key == "CPU":
                direct.OPERATORS[name] = row.kernel
                direct.FUNCTIONS[name] = unwrap(row.kernel)
        self.rows.append(row)


def register() -> Registrations:
    """Registers everything once per process.

    A second import of fag_torch after its modules were purged from sys.modules replaces the registrations of
    the first.

    Returns:
        What is registered.
    """
    earlier = coexist.earlier_registrations()
    if isinstance(
        earlier, Registrations
    ):  # importlib.reload(fag_torch): this module, and its class, are the same
        return earlier
    if earlier is None:
        registrations = Registrations()
    else:
        earlier.step_aside(*_SCHEMAS)
        registrations = Registrations(earlier.anchors)
    registrations.fill_up()
    coexist.install(registrations)
    return registrations


def _traced(row: Row) -> Callable[..., Any]:
    """A fake implementation that tells Inductor of the operator: it traces before it generates code."""

    @wraps(row.kernel)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        inductor.keep_arguments(row.namespace, row.op)
        return row.kernel(*args, **kwargs)

    return kernel


def _anchors() -> list[Library]:
    anchors = []
    for namespace, schemas in _SCHEMAS.items():
        library = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        for op in schemas:
            shown = op if namespace == CANN_NAMESPACE else cpu.FRONT
            refusal = autograd.refuse_vmap(shown)
            for key in (
                "FuncTorchBatched",
                "Batched",
            ):  # torch.vmap, and is_grads_batched of torch.autograd.grad
                library.impl(op, refusal, key)  # type: ignore[no-untyped-call]
        anchors.append(library)
    return anchors


def _has_arguments_of(namespace: str, op: str, schema: str) -> bool:
    there = getattr(getattr(torch.ops, namespace), op).default._schema
    ours = torch._C.parse_schema(f"{namespace}::{op}{schema}")
    return [a.name for a in there.arguments] == [a.name for a in ours.arguments]
