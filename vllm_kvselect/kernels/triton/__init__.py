"""Kernels in Triton, one a file, with the functions that launch them; `kernels/cuda.py` lists them.

A launch reads nothing back: grids and shapes follow from shapes, and where the work depends on
data, programs without any return at once.
"""
