"""Training pipeline: from a configuration to a trained, decoded and scored model.

`build_run` is the only composition root.

    run = build_run(recipe("yesno", data={"source": "waves_yesno.tar.gz"}))
    report = run.train()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngsgd.pipeline.recipes import recipe
    from ngsgd.pipeline.run import Run, build_run
    from ngsgd.pipeline.services import Services

__all__ = ["Run", "Services", "build_run", "recipe"]

_HOME_OF = {"Run": "run", "build_run": "run", "Services": "services", "recipe": "recipes"}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ngsgd.pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ngsgd.pipeline.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
