"""C++ kernels, and how they are compiled and loaded."""
