"""A linear layer, laid out in memory for the device it runs on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """A weight [out, in] with an optional bias [out], applied to rows [T, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, as a new tensor."""
        return residual + F.linear(x, self.weight, self.bias)

    def dense(self) -> Tensor:
        """The weight as an ordinary [out, in] tensor; shares memory where it can."""
        return self.weight


class PackedLinear(Linear):
    """A weight in oneDNN's blocked layout, as torch.compile's freezing makes it.

    Reading a few rows' worth of products is bound by memory; blocks are read at twice the rate of rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias)
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._linear(x, self.weight, self.bias, "none", [], "")
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self._linear_add(x, residual, self.weight, self.bias, "add")
        return y

    def dense(self) -> Tensor:
        return self.weight.to_dense()


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN can hold weights of this dtype packed on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The layer in the fastest layout that its device and dtype have."""
    return (PackedLinear if packs(weight.dtype, weight.device) else Linear)(weight, bias)
