"""Places where the host waits for a device, and how often: the table of benchmarks/gpu/waits.md.

    python -m tests.device.waits          # rewrites the table
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "benchmarks" / "gpu" / "waits.md"
MEASURED = 16  # steps


class Wait(NamedTuple):
    """A place, in how many of 16 steps it may wait, and why."""

    file: str
    function: str
    steps: int
    often: str
    reason: str


_LOOK, _INVERSE = "once per `curvature_interval`", "once per `inverse_interval`"
_EVERY = "every step"
_FINITE = "a curvature update that is not finite is skipped"
WAITS = (
    Wait("ngsgd/optim/optimizer.py", "activity", 1, "steps 1, 2, 4, 8, 16 ...",
         "the warning about steps that limits shorten"),
    Wait("ngsgd/cluster/replicas/exchanged_tensors.py", "fill", 4, "once per `sync_every`",
         "a rank that is not finite is excluded"),
    Wait("ngsgd/cluster/replicas/exchanged_tensors.py", "marks_of", 4, "once per `sync_every`, with buffers",
         "buffers that differ between ranks are averaged"),
    Wait("ngsgd/training/parameter_vector.py", "flatten", 16, "once per job",
         "the job's result goes to the host"),
    Wait("ngsgd/training/parameter_vector.py", "load", 16, "once per job", "the job's model comes"),
    Wait("ngsgd/ops/averaging.py", "_mean_entry", 16, "once per average",
         "parameters that are not finite raise an error"),
    Wait("ngsgd/ops/averaging.py", "<genexpr>", 16, "once per average",
         "entries that are equal stay bitwise equal"),
    Wait("ngsgd/curvature/losses.py", "evaluation", 16, _LOOK, "negative weights raise an error"),
    Wait("ngsgd/curvature/graph.py", "_second_derivative", 16, "`diag_h` alone",
         "zero second derivatives are skipped"),
    Wait("ngsgd/curvature/fisher_rows.py", "_differentiated", 16, _LOOK,
         "the number of rows divides the statistics"),
    Wait("ngsgd/curvature/products.py", "<genexpr>", 16, _LOOK,
         "the number of rows divides the products"),
    Wait("ngsgd/preconditioners/estimates.py", "<genexpr>", 16, _LOOK, _FINITE),
    Wait("ngsgd/preconditioners/methods/kfac.py", "<genexpr>", 4, _LOOK, _FINITE),
    Wait("ngsgd/preconditioners/methods/kfac.py", "update_curvature", 4, _LOOK, _FINITE),
    Wait("ngsgd/ops/linalg.py", "shared_damping", 2, _INVERSE,
         "damping is shared by the traces of both factors"),
    Wait("ngsgd/preconditioners/methods/kfac.py", "_mean_square", 2, _INVERSE, "as above"),
    Wait("ngsgd/preconditioners/methods/psgd.py", "<genexpr>", 4, _LOOK, _FINITE),
    Wait("ngsgd/preconditioners/methods/kbfgs.py", "<genexpr>", 4, _LOOK, _FINITE),
    Wait("ngsgd/preconditioners/methods/kbfgs.py", "_with_inputs", 4, _LOOK,
         "a pair of zeros is skipped"),
    Wait("ngsgd/preconditioners/methods/kbfgs.py", "_norms", 8, _LOOK, "the step's length"),
    Wait("ngsgd/preconditioners/methods/shampoo.py", "invert", 2, _INVERSE,
         "QR decomposition"),
    Wait("ngsgd/preconditioners/methods/second_derivatives.py", "apply", 16, _EVERY,
         "the conjugate gradients stop by a test"),
    Wait("ngsgd/preconditioners/methods/second_derivatives.py", "solved", 16, _EVERY,
         "a vector of the span is not added to it"),
    Wait("ngsgd/preconditioners/methods/parameter_history.py", "update_curvature", 4, _LOOK,
         "a pair of no curvature is skipped"),
    Wait("ngsgd/preconditioners/methods/parameter_history.py", "apply", 16, _EVERY,
         "a gradient that is not finite leaves the state alone"),
    Wait("ngsgd/ops/linalg.py", "conjugate_gradients", 16, _EVERY, "as above"),
    Wait("ngsgd/preconditioners/fisher_method.py", "_preconditioned", 16, _EVERY,
         "rows that are not finite are skipped; `NGSGD` decides that on the device"),
    Wait("ngsgd/optim/fisher/online.py", "_raise_unless_finite", 16,
         "every step with `on_nonfinite=\"raise\"`", "the error names the minibatch"),
    Wait("ngsgd/preconditioners/methods/torch_optimizers.py", "finite", 16, _EVERY,
         "a gradient that is not finite leaves the moments alone"),
    Wait("ngsgd/ops/linalg.py", "damped_cholesky", 2, _INVERSE, "more damping where it fails"),
    Wait("ngsgd/ops/linalg.py", "damped_inverse", 2, _INVERSE, "as above"),
    Wait("ngsgd/ops/linalg.py", "eigh", 16, "once per `inverse_interval`, of KSD every step",
         "the decomposition checks its result"),
    Wait("ngsgd/ops/linalg.py", "bfgs_inverse", 8, _LOOK, "a pair of no curvature is skipped"),
    Wait("ngsgd/ops/linalg.py", "doubly_damped", 4, _LOOK, "Powell's damping"),
    Wait("ngsgd/ops/simple_natural_gradient.py", "precondition_simple", 16, _EVERY,
         "the minibatch's own Fisher matrix is inverted; rows of zeros stay as they are"),
    Wait("ngsgd/ops/simple_natural_gradient.py", "_cholesky", 16, _EVERY, "as above"),
    Wait("ngsgd/ops/simple_natural_gradient.py", "_held_out", 16, _EVERY, "as above"),
    Wait("ngsgd/hypergrad/reversible_sgd.py", "_changed", 16, _EVERY,
         "a parameter that somebody changed could not be taken back"),
    Wait("ngsgd/hypergrad/exact_momentum.py", "add_scaled", 16, _EVERY, "numbers out of range"),
    Wait("ngsgd/hypergrad/exact_momentum.py", "_in_range", 16, _EVERY, "numbers out of range"),
    Wait("ngsgd/hypergrad/exact_momentum.py", "apply_velocity", 16, _EVERY, "numbers out of range"),
)


def allowed(place: str) -> Wait | None:
    """The line of the table for a place as the audit names it."""
    found = [wait for wait in WAITS if place.endswith(f"in {wait.file}, {wait.function}")]
    return found[0] if found else None


def table() -> str:
    lines = ["| where | how often | why |", "|---|---|---|"]
    lines += [f"| `{wait.file.removeprefix('ngsgd/')}`, `{wait.function}` | {wait.often} | "
              f"{wait.reason} |" for wait in WAITS]
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The page with its table made again; it stands between two marks."""
    marks = r"(<!-- waits -->\n).*?(<!-- end of waits -->)"
    found, count = re.subn(marks, lambda match: f"{match[1]}{table()}\n{match[2]}", text, count=1,
                           flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{PAGE} has no place for the table of waits")
    return found


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
