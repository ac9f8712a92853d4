"""Operators that handle many tensors of a GPU in one launch: Triton kernels, torch operations."""
