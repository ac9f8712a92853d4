"""Passes that are differentiated twice: kernels with a second derivative, errors for others."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from torch.nn.attention import SDPBackend, sdpa_kernel

from ngsgd.errors import ConfigError

REENTRANT = ("needs gradients of gradients, which reentrant activation checkpointing does not "
             "support; use checkpoint(.., use_reentrant=False).")


def twice_differentiable() -> contextlib.AbstractContextManager[None]:
    """Context in which attention runs its MATH kernel, the only one with a second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


@contextlib.contextmanager
def naming_missing(who: str) -> Iterator[None]:
    """Context that raises ConfigError and names an operation without a second derivative."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):
            raise ConfigError(f"{who} {REENTRANT}") from error
        if (missing := re.search(r"derivative for (\S+) is not implemented", str(error))) is None:
            raise
        raise ConfigError(f"{who} needs second derivatives, and torch has none for {missing[1]}; "
                          "replace that operation, let torch choose the kernel of an attention "
                          "(MATH has them), or choose a first-order method, such as KFAC.") from error
