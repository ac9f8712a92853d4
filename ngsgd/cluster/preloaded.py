"""Modules and compiled kernels that the fork server loads for all workers that it starts.

A worker that replaces a dead one uses the same code and kernels, even if the cache or the compiler
has disappeared since.
"""

from ngsgd.cluster import fingerprint

fingerprint.code_digest()
fingerprint.kernels()
