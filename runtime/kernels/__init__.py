"""Kernels of our own: the operations of a step, made for a kind of processor."""
