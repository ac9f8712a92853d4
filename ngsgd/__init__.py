"""Natural-gradient SGD with parameter averaging, for acoustic models and any PyTorch module.

The names below are loaded on first use. `import ngsgd` is therefore fast and needs only torch and
numpy.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from ngsgd import (
        asr,
        cluster,
        curvature,
        data,
        hypergrad,
        models,
        ops,
        optim,
        pipeline,
        preconditioners,
        sequence,
        tasks,
        training,
    )
    from ngsgd.cluster.local_sgd import LocalSGD
    from ngsgd.ops.averaging import average_parameters
    from ngsgd.ops.simple_natural_gradient import precondition_simple
    from ngsgd.optim.fisher.online import OnlineNaturalGradient
    from ngsgd.optim.natural_muon import NaturalMuon
    from ngsgd.optim.ngsgd import NGSGD
    from ngsgd.pipeline.api import load, train

_HOME_OF = {"NGSGD": "ngsgd.optim.ngsgd", "NaturalMuon": "ngsgd.optim.natural_muon",
            "OnlineNaturalGradient": "ngsgd.optim.fisher.online",
            "LocalSGD": "ngsgd.cluster.local_sgd", "average_parameters": "ngsgd.ops.averaging",
            "load": "ngsgd.pipeline.api",
            "precondition_simple": "ngsgd.ops.simple_natural_gradient",
            "train": "ngsgd.pipeline.api"}

_MODULES = ("asr", "cluster", "config", "curvature", "data", "exports", "hypergrad", "models", "object_storage", "ops", "optim",
            "pipeline", "planning", "preconditioners", "runs", "sequence", "tasks", "training")

__all__ = ["NGSGD", "LocalSGD", "NaturalMuon", "OnlineNaturalGradient", "asr", "average_parameters", "cluster", "config",
           "curvature", "data", "hypergrad", "load", "models", "ops", "optim", "pipeline",
           "precondition_simple", "preconditioners", "sequence", "tasks", "train", "training"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"ngsgd.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ngsgd' has no attribute {name!r}{_hint(name)}")
    try:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"ngsgd.{name} needs the package {error.name}, which is not installed; install "
                          "ngsgd[service].") from error


def _hint(name: str) -> str:
    """The package that has the name, for a message."""
    # tools ask for names with underscores, and the import system for modules before it loads them
    if not name.startswith("_") and not importlib.util.find_spec(f"ngsgd.{name}"):
        with contextlib.suppress(ImportError):
            for package in ("optim", "preconditioners", "curvature", "hypergrad", "tasks", "asr"):
                if name in importlib.import_module(f"ngsgd.{package}").__all__:
                    return f"; it is ngsgd.{package}.{name}"
    return ""


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
