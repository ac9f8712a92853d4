"""Passes that are differentiated twice: attention kernels that can be, and errors that name an operation that cannot."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from torch.nn.attention import SDPBackend, sdpa_kernel

from ngsgd.errors import ConfigError

REENTRANT = ("needs gradients of gradients, which reentrant activation checkpointing does not "
             "have; use checkpoint(.., use_reentrant=False).")


def twice_differentiable() -> contextlib.AbstractContextManager[None]:
    """For forward passes: `scaled_dot_product_attention` runs its MATH kernel, the only one with a second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


@contextlib.contextmanager
def naming_missing(who: str) -> Iterator[None]:
    """For products with second derivatives: ConfigError instead of torch's RuntimeError where an operation has none."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):
            raise ConfigError(f"{who} {REENTRANT}") from error
        missing = re.search(r"derivative for (\S+) is not implemented", str(error))
        if missing is None:
            raise
        raise ConfigError(f"{who} needs second derivatives, and torch has none for {missing[1]}; write that operation with "
                          "others, leave the kernel of an attention to torch (MATH has them), or choose a method of first "
                          "derivatives, such as KFAC.") from error
