"""Aliases of former module names.

Importing one imports the new module with a DeprecationWarning.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

MOVED = {
    "ngsgd.asr.augment": "ngsgd.asr.features.augment",
    "ngsgd.asr.corpus": "ngsgd.asr.corpora.corpus",
    "ngsgd.asr.decoding": "ngsgd.asr.decode.decoding",
    "ngsgd.asr.graphs": "ngsgd.asr.lang.graphs",
    "ngsgd.asr.scoring": "ngsgd.asr.decode.scoring",
    "ngsgd.asr.streaming": "ngsgd.asr.decode.streaming",
    "ngsgd.curvature.damped": "ngsgd.curvature.second_order.damped",
    "ngsgd.curvature.noise": "ngsgd.curvature.second_order.noise",
    "ngsgd.egs": "ngsgd.data",
    "ngsgd.egs.archives": "ngsgd.data.archives",
    "ngsgd.egs.nnet3_examples": "ngsgd.data.nnet3_examples",
    "ngsgd.egs.reader": "ngsgd.data.reader",
    "ngsgd.models.stages": "ngsgd.models.growth_stages",
    "ngsgd.ops.native": "ngsgd.ops.kernels.native",
    "ngsgd.sequence.path_sums": "ngsgd.sequence.forward_backward",
    "ngsgd.training.audit": "ngsgd.training.storage.audit",
    "ngsgd.training.checkpoint": "ngsgd.training.storage.checkpoint",
    "ngsgd.training.process": "ngsgd.cluster.process",
}


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        # Frames of the import system are not counted.
        warnings.warn(f"{spec.name} is now {new}; the old name will be removed.",
                      DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import has set __spec__ to the spec of the old name.
        old = module.__spec__
        assert old is not None
        module.__spec__ = old.loader_state


def install() -> None:
    """Register the old names in the import system."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        # First: the path of a moved package would find its modules under two names.
        sys.meta_path.insert(0, _MovedModules())
