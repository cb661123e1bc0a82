"""Kernels in Triton, one a file, with the functions that launch them; `kernels/cuda.py` lists them.

A launch reads nothing back: grids and shapes follow from shapes, and where the work depends on
data, programs without any return at once.

Triton compiles a kernel anew for integers of another kind: 1, and multiples of 16. So those that
follow from a prompt's length or a budget are not specialised. Those that are the same as long as a
server runs are, strides of keys and values among them, which tell how wide loads may be.
"""
