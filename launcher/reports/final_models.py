"""Whether the final models of several runs are bitwise identical."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ngsgd.counting import counted
from ngsgd.files import sha256
from ngsgd.launcher.reports import comparison
from ngsgd.launcher.reports.comparison import ComparedRun
from ngsgd.runs.run_folder import RunFolder


@dataclass(frozen=True)
class Identity:
    """Final models that should be identical, and the number of those that are not."""

    num_compared: int
    # from the first one of their settings and seed
    num_different: int
    # whether they have equal settings and seeds, or only happen to be identical
    are_equal_runs: bool

    @property
    def sentence(self) -> str:
        """For people."""
        if not self.num_different:
            which = " of equal settings and seed" if self.are_equal_runs else ""
            return f"The final models{which} are bitwise identical."
        return (f"{self.num_different} of {counted(self.num_compared, 'final model differs', 'final models differ')} from another "
                "one of equal settings and seed; "
                "ngsgd info RUN prints the numeric fingerprint of a run.")


def identity(runs: Sequence[ComparedRun]) -> Identity | None:
    """Compare the final models; None where there are no two to compare."""
    digests = {id(run): digest for run in runs if (digest := final_digest(run.folder))}
    finished = [run for run in runs if id(run) in digests]
    if len(finished) > 1 and len(set(digests.values())) == 1:
        return Identity(len(finished), 0, are_equal_runs=False)
    different = comparison.differences(finished).values()
    groups: dict[str, list[str]] = {}
    for index, run in enumerate(finished):
        groups.setdefault(repr([values[index] for values in different]), []).append(digests[id(run)])
    repeated = [found for found in groups.values() if len(found) > 1]
    if not repeated:
        return None
    return Identity(sum(map(len, repeated)), sum(digest != found[0] for found in repeated for digest in found), are_equal_runs=True)


def final_digest(folder: RunFolder) -> str:
    """SHA-256 of the parameters of the final model; empty before the end of a run."""
    try:
        return sha256(folder.final / "model.safetensors")
    except OSError:
        return ""
