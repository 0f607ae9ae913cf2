"""What the kernels of Hopper share, in Gluon: what has two names, and the arithmetic of softmax states.

Gluon calls no function of Triton's, so that some of `state` is here once more.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Both were renamed after Triton 3.6.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def finite(x):
    """`state.finite`."""
    return gl.where(x == float("-inf"), 0.0, x)


@gluon.jit
def log2(x):
    """`state.log2`."""
    return gl.where(x > 0, gl.log2(gl.where(x > 0, x, 1.0)), float("-inf"))


@gluon.jit
def work(items, item):
    """`state.work`."""
    at = items + item * 8
    row, tile, split, splits = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    first, count, low, high = gl.load(at + 4), gl.load(at + 5), gl.load(at + 6), gl.load(at + 7)
    return row, tile, split, splits, first, count, low, high
