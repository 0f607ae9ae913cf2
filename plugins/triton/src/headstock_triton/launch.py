"""Launching a kernel: on a GPU as it is, in Triton's interpreter as an operator that torch knows of."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Hashable, Mapping
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from headstock_triton.kernels.attend import attend
from headstock_triton.kernels.latent import latent
from headstock_triton.kernels.merge import merge
from headstock_triton.kernels.schedule import schedule
from headstock_triton.kernels.write import write
from headstock_triton.table import compiles

INTERPRETING = not isinstance(attend, triton.JITFunction)
"""Whether Triton was told, before the kernels were imported, to interpret them (`TRITON_INTERPRET=1`)."""


def _kernels() -> Mapping[str, Any]:
    """All kernels by name, those in Gluon only where this Triton was seen to compile them and has their words."""
    kernels = {"attend": attend, "latent": latent, "merge": merge, "schedule": schedule, "write": write}
    if not INTERPRETING and compiles(triton.__version__):
        with suppress(ImportError, AttributeError, TypeError):
            from headstock_triton.kernels.attend_hopper import attend_hopper
            from headstock_triton.kernels.latent_hopper import latent_hopper

            kernels |= {"attend_hopper": attend_hopper, "latent_hopper": latent_hopper}
    return MappingProxyType(kernels)


KERNELS = _kernels()
KNOWN = compiles(triton.__version__)
"""Whether it was read of this Triton what it compiles kernels for (see `kind`). Any other is asked at each launch."""

KINDS = 256
"""How many kinds of arguments a launch remembers: strides that grow with a batch may be of another kind each time."""

Grid = tuple[int, ...]
Arguments = Mapping[str, Any]
"""Tensors, None for those that are not there, descriptors of tensors, and numbers, by their names in a kernel."""


class Launch:
    """A kernel with what it is compiled for, to be run time and again with arguments that differ little.

    To find what it compiled, Triton looks at all arguments and constants, which takes three times as long as the launch
    itself. Here that is done once for each `kind` of arguments.
    """

    def __init__(self, kernel: str, constants: Mapping[str, int | bool], **options: int):
        """`constants` may have more than the kernel's own, which are the last of its parameters; `options` are
        Triton's."""
        self.kernel = kernel
        parameters: list[str] = KERNELS[kernel].arg_names
        self.constants = {name: constants[name] for name in parameters if name in constants}
        self.options = options
        self._names = parameters[: len(parameters) - len(self.constants)]
        assert [*self._names, *self.constants] == parameters, f"the constants of {kernel} come last"
        self._values = tuple(self.constants.values())
        self._compiled: dict[tuple[Hashable, ...], Any] = {}

    def __call__(self, grid: Grid, arguments: Arguments) -> None:
        """Runs the kernel on the current stream; of the arguments it takes its own."""
        given = [arguments[name] for name in self._names]
        if INTERPRETING:
            self._interpret(grid, given)
            return
        key = tuple(map(kind, given))
        compiled = self._compiled.get(key) if KNOWN else None
        if compiled is None:
            if len(self._compiled) >= KINDS:
                self._compiled.clear()
            self._compiled[key] = KERNELS[self.kernel][grid](
                *given, **self.constants, **self.options, enable_fp_fusion=True
            )
        else:
            compiled[(*grid, 1, 1)[:3]](*given, *self._values)

    def _interpret(self, grid: Grid, given: list[Any]) -> None:
        named = dict(zip(self._names, given, strict=True))
        tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
        numbers = {name: x for name, x in named.items() if isinstance(x, int | float)}
        absent = {name: None for name, x in named.items() if x is None}
        words = json.dumps([self.kernel, list(tensors), list(numbers), absent | self.constants])
        _operator()(words, list(grid), list(tensors.values()), list(numbers.values()))


def kind(x: Any) -> Hashable:
    """What the code that Triton compiles for an argument may depend on, and rather more than less.

    That is the dtype of a pointer and whether 16 divides it, the dtype and the box of a descriptor (a kernel's have one
    layout), whether an integer is 1, whether 16 divides it and how many bits it takes, and nothing of a float.
    """
    if x is None or type(x) is int:
        return x
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    if isinstance(x, float):
        return "float"
    return x.base.dtype, *x.block_shape


@cache
def _operator() -> Any:
    """A launch as a torch operator: a recording of operators, the CPU's stand-in for a graph, sees nothing else."""
    schema = "(str words, int[] grid, Tensor(a!)[] tensors, Scalar[] numbers) -> ()"
    torch.library.define("headstock_triton::launch", schema)
    torch.library.impl("headstock_triton::launch", "CPU", _interpret)
    return torch.ops.headstock_triton.launch


def _interpret(words: str, grid: list[int], tensors: list[Tensor], numbers: list[int | float]) -> None:
    kernel, names, counts, constants = json.loads(words)
    pointers = {name: _pointer(x) for name, x in zip(names, tensors, strict=True)}
    KERNELS[kernel][tuple(grid)](**pointers, **dict(zip(counts, numbers, strict=True)), **constants)


def _pointer(x: Tensor) -> Tensor:
    """One element where x begins. After a launch the interpreter copies the whole storage of each argument onto itself:
    more work than the launch for a cache, and for one that is mostly address space more than there is memory."""
    if x.numel() == 0:
        return x
    first = (ctypes.c_uint8 * x.itemsize).from_address(x.data_ptr())
    return torch.frombuffer(first, dtype=torch.uint8).view(x.dtype)
