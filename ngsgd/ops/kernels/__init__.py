"""Compiled C++ kernels: sources, and how they are built and loaded."""
