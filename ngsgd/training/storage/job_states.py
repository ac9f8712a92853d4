"""State of jobs in a checkpoint, for outer rules whose jobs continue from their own results.

With overlap and streaming a job starts from the last result of its job slot. If jobs start before
the previous outer iteration is averaged, the next outer iteration also has a model and a plan that
are older than the checkpoint. Without this state a resumed run starts these jobs from the model,
and its numbers differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from ngsgd.training.parameter_vector import Vector

_MODEL, _OWN, _PLAN = "model", "own/", "plan"


@dataclass(frozen=True)
class JobStates:
    """What the jobs of the next outer iteration start from, in addition to the checkpoint."""

    # job -> parameters or delta that its last run ended with
    own: Mapping[int, Vector] = field(default_factory=dict)
    # model that these jobs start from; None: that of the checkpoint
    model: Vector | None = None
    # of the plan, if it was made before the checkpoint
    layer_rates: Mapping[str, float] | None = None
    excluded: tuple[str, ...] | None = None

    def write(self, path: Path) -> None:
        """Write a file."""
        arrays = {f"{_OWN}{job}": vector for job, vector in self.own.items()}
        if self.model is not None:
            arrays[_MODEL] = self.model
        plan = {"layer_rates": None if self.layer_rates is None else dict(self.layer_rates), "excluded": self.excluded}
        save_file(arrays, path, metadata={_PLAN: json.dumps(plan)})

    @classmethod
    def read(cls, path: Path, size: int) -> JobStates:
        """Read a file with vectors of `size`.

        Raises OSError, ValueError or SafetensorError if it is damaged.
        """
        with safe_open(path, framework="np") as file:
            plan = json.loads(file.metadata()[_PLAN])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if any(vector.shape != (size,) or vector.dtype != np.float32 for vector in arrays.values()):
            raise ValueError("it belongs to another model")
        excluded = plan["excluded"]
        return cls({int(name.removeprefix(_OWN)): vector for name, vector in arrays.items() if name.startswith(_OWN)},
                   arrays.get(_MODEL), plan["layer_rates"], None if excluded is None else tuple(excluded))
