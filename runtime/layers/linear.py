"""A linear map that keeps its weight in the layout that multiplies fastest on its device."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

# The row count for which oneDNN chooses the layout. Measured on a Zen 5 core pair: hints of 16,
# 64 and 512 give the same speed at every row count from 1 to 700; a hint of 1 costs up to 1.4x.
_LAYOUT_ROWS = 64


class LinearMap(Protocol):
    """What a model asks of a linear map: `x @ weight.T + bias`, for x of shape [rows, in_features].

    `Linear` is the one there is; `LlamaModel(linear=...)` takes another maker.
    """

    @property
    def is_batch_invariant(self) -> bool:
        """A promise: a row's result has the same bits whatever rows stand beside it, and however
        many, on any number of threads.
        """
        ...

    @property
    def num_bytes(self) -> int: ...

    def shares_memory_with(self, weight: torch.Tensor) -> bool:
        """Whether this map multiplies with `weight` itself, not with a copy in another layout."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, out_features]"""
        ...

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The products as float32, not rounded to a narrower type on the way."""
        ...

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`self(x) + residual`. [rows, out_features]"""
        ...


class MakeLinear(Protocol):
    """A way to compute linear maps."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearMap:
        """The map of `weight` [out_features, in_features]."""
        ...


class Linear:
    """`x @ weight.T + bias`, for x of shape [rows, in_features].

    On a CPU the weight is laid out once for oneDNN, as torch's own freezing pass does. Against
    `F.linear` this is 2 to 3 times as fast in float32, and a row's result does not depend on how
    many rows stand beside it: to the bit, on the processors it was tried on. Where torch lacks
    those operators, it is `F.linear`, which promises neither.
    """

    is_batch_invariant = False  # found on some processors, promised for none

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._is_packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
        else:
            self._weight = weight
        self._doubles_single_row = self._is_packed and self._treats_a_single_row_apart()

    def shares_memory_with(self, weight: torch.Tensor) -> bool:
        """Whether this map multiplies with `weight` itself, not with a copy in another layout."""
        return not self._is_packed and self._weight.data_ptr() == weight.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, out_features]"""
        if not self._is_packed:
            return F.linear(x, self._weight, self.bias)
        num_rows = x.shape[0]
        if num_rows == 0:
            return x.new_empty(0, self.out_features)
        if num_rows == 1 and self._doubles_single_row:
            return self._multiply(x.repeat(2, 1))[:1]
        return self._multiply(_padded(x))[:num_rows]

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The products as float32, not rounded to bfloat16 on the way. [rows, out_features]

        oneDNN sums in float32 and rounds at the end. A second pass that starts from the negated
        first result gives what that rounding took away, to bfloat16 precision: 16 bits in all,
        for another reading of the weight and no more memory.
        """
        y = self(x)
        if y.dtype is torch.float32 or not self._is_packed:
            return y.float()
        return y.float() + self.plus(x, -y).float()

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`self(x) + residual`, rounded once where the operators allow it. [rows, out_features]"""
        num_rows = x.shape[0]
        if not self._is_packed or num_rows == 0:
            return self(x) + residual
        if num_rows == 1 and self._doubles_single_row:
            return self._multiply_add(x.repeat(2, 1), residual.repeat(2, 1))[:1]
        return self._multiply_add(_padded(x), _padded(residual))[:num_rows]

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self.bias, "none", [], ""
        )
        return y

    def _multiply_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._weight, self.bias, "add"
        )
        return y

    def _treats_a_single_row_apart(self) -> bool:
        """Whether one row is summed in another order than several are, as oneDNN does for long
        rows. Subtracting the result from itself shows what rounding to bfloat16 would hide.
        """
        key = (self.out_features, self.in_features, self.dtype)
        if key not in _SINGLE_ROW_APART:
            x = torch.linspace(-1, 1, self.in_features).sin().mul(3).to(self.dtype).repeat(2, 1)
            negated = -self._multiply(x)
            several = self._multiply_add(x, negated)[:1]
            single = self._multiply_add(x[:1], negated[:1])
            _SINGLE_ROW_APART[key] = not torch.equal(single, several)
        return _SINGLE_ROW_APART[key]


# Up to so many rows, row counts are multiples of the step: 60 different ones up to 512.
_ROW_STEPS = ((16, 1), (64, 4), (128, 8), (512, 16), (2048, 64))


def _padded(x: torch.Tensor) -> torch.Tensor:
    """`x` with rows of zeros added, so that few different row counts occur.

    oneDNN compiles a product for each shape it meets and keeps many: with a batch of another size
    in every step that took 10 ms now and then and, over 16,000 requests, 450 MB.
    """
    num_rows = x.shape[0]
    step = next((step for most, step in _ROW_STEPS if num_rows <= most), 256)
    missing = -num_rows % step
    return F.pad(x, (0, 0, 0, missing)) if missing else x


# Decided once for each shape and type: (out_features, in_features, dtype).
_SINGLE_ROW_APART: dict[tuple[int, int, torch.dtype], bool] = {}


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch can lay out a CPU weight of `dtype` for oneDNN, tried on a small one.

    The operators are torch's own but not part of its stable interface, so they are checked by
    their result before they are relied on.
    """
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    try:
        with torch.inference_mode():
            weight = torch.arange(-8.0, 8.0).reshape(4, 4).to(dtype) / 8
            x = torch.arange(12.0).reshape(3, 4).to(dtype) / 8
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
            plain = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
            added = torch.ops.mkldnn._linear_pointwise.binary(x, plain, packed, None, "add")
            expected = x.float() @ weight.float().T
            return torch.allclose(plain.float(), expected, atol=0.02) and torch.allclose(
                added.float(), 2 * expected, atol=0.05
            )
    except (RuntimeError, AttributeError, TypeError):
        return False
