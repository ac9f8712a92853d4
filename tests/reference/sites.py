"""Averages over sites in float64, step by step, without files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


class Sites:
    """The common model B and the parameters of each site; averaging as the outer rule."""

    def __init__(self, initial: Vector, num_jobs: Mapping[str, int]) -> None:
        self.common = initial.copy()
        self.num_jobs = num_jobs
        self.parameters = {name: initial.copy() for name in num_jobs}

    def train(self, name: str, delta: Vector) -> None:
        """A site trains alone."""
        self.parameters[name] = self.parameters[name] + delta

    def round(self, names: Sequence[str], decoded: Callable[[str, Vector], Vector]) -> None:
        """Average some sites; `decoded` returns what others read of a site's delta from B."""
        total = sum(self.num_jobs[name] for name in names)
        deltas = {name: self.parameters[name] - self.common for name in names}
        read = {name: decoded(name, delta) for name, delta in deltas.items()}
        self.common = self.common + sum(self.num_jobs[name] * read[name] for name in names) / total
        for name in names:
            self.parameters[name] = self.common + deltas[name] - read[name]
