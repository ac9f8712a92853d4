"""Imported by the fork server, for all workers that it will start: code as it is now, and compiled kernels.

A worker that replaces a dead one computes with the same kernels even if the cache or the compiler has disappeared since.
"""

from ngsgd.cluster import fingerprint

fingerprint.code_digest()
fingerprint.kernels()
