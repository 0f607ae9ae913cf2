"""The CPU's stand-in for a device graph: operators recorded with their tensors, run again on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstock.errors import HeadstockError

SYNCING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
UNINITIALISED = ("aten::empty", "aten::new_empty")


class HostSync(HeadstockError):
    """Recorded code asked the device for a value, or for a size that depends on one: a device graph cannot."""


class _Call(NamedTuple):
    """One operator with its arguments, and the tensors that it made, in which a replay must leave its results."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Tensor | None]


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorded sequence of operators, as a device graph is one of kernels.

    Python runs once, while recording; a replay repeats the operators on the very tensors they had, so numbers that
    Python worked out stay as they were, and every result lands where it first did. What is no torch operator is not
    seen: a kernel launched by other means has to be a custom operator to be recorded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []

    @torch.inference_mode()
    def replay(self) -> None:
        """Runs every operator again, in order."""
        for function, args, kwargs, made in self._calls:
            results = tree_leaves(function(*args, **kwargs))
            for kept, result in zip(made, results, strict=True):
                if kept is not None:
                    kept.copy_(result)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode composite operators arrive whole
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if _syncs(func, args):
            raise HostSync(f"{func} needs a value on the host, which a graph cannot give it")
        result = func(*args, **kwargs)
        returns = [value.alias_info for value in func._schema.returns]
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
        leaves = tree_leaves(result)
        fresh = len(returns) != len(leaves) or any(alias is None for alias in returns)
        if (fresh or writes) and not func._schema.name.startswith(UNINITIALISED):
            aliases = returns if len(returns) == len(leaves) else [None] * len(leaves)
            made = [leaf if alias is None else None for leaf, alias in zip(leaves, aliases, strict=True)]
            self._calls.append(_Call(func, args, kwargs, [m if isinstance(m, Tensor) else None for m in made]))
        return result


def record(run: Callable[[], None]) -> Recording:
    """Runs once and returns the recording. Raises HostSync, naming the operator, where a device graph could not."""
    recording = Recording()
    with recording:
        run()
    return recording


def _syncs(func: Any, args: tuple[Any, ...]) -> bool:
    if any(tag in func.tags for tag in SYNCING_TAGS) and not func._schema.name.startswith("aten::index"):
        return True
    indices = args[1] if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices or ())
