"""DistributedDataParallel modules of this process.

Layers with natural gradient see in their forward pass which one runs them. Parameters of other
layers do not, and are looked up here.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Container
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_modules = weakref.WeakSet[DistributedDataParallel]()


def observe() -> None:
    """Register all modules, also those that are created later."""
    original = DistributedDataParallel.__init__
    if getattr(original, "_is_of_ngsgd", False):
        return

    @functools.wraps(original)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _modules.add(self)

    init._is_of_ngsgd = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    # Modules from before the first optimizer. isinstance would call __class__ of proxies.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _modules.update(found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel))


def module_around(parameters: Container[int]) -> DistributedDataParallel | None:
    """Return the module that averages gradients of one of the parameters, given by their ids."""
    if not _modules:
        return None
    return next((module for module in _modules if any(id(p) in parameters for p in module.parameters())), None)
