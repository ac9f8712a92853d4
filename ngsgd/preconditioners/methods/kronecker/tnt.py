"""TNT, tensor-normal training (Ren and Goldfarb 2021): the Fisher matrix of a layer as if its gradients were tensor normal.

    U_o = mean of G G^T,  U_i = mean of G^T G,  G: gradients of drawn targets;     tr U_o = tr U_i = c
    F ~ U_o (x) U_i / c,   P g = (U_o / sqrt c + sqrt(d) / pi I)^-1 g (U_i / sqrt c + pi sqrt(d) I)^-1,    pi as in K-FAC:
                           the same as sqrt(d) I on factors whose mean eigenvalues are equal

G is the sum over the minibatch for one draw, divided by sqrt(R): drawn derivatives have mean 0, so vec(G) vec(G)^T has the mean F.

Letters: V draws, N samples, T positions, R rows of the loss, O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ngsgd.ops.linalg import damped_inverse
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.fisher_recorder import Rows
from ngsgd.preconditioners.methods.kronecker.kfac import shared_damping
from ngsgd.preconditioners.options import FisherOptions
from ngsgd.preconditioners.states import State

_MIN_TRACE = 1e-30   # below, all gradients were zero


@dataclass(frozen=True)
class TNTOptions(FisherOptions):
    """Of TNT."""

    fisher: str = "mc"

    def problems(self) -> list[str]:
        found = super().problems()
        if self.fisher != "mc":
            found.append(f"fisher is {self.fisher!r}; it must be \"mc\": sums over samples stand for single ones only where the "
                         "derivatives have mean 0.")
        return found


class TNT(Preconditioner):
    """TNT; needs the shapes of weights alone, and the taps of a convolution count as inputs."""

    Options = TNTOptions
    looks_at_held = True

    def measure(self, name: str, rows: Rows) -> State:
        G_VOI = torch.einsum("vnto,nti->voi", rows.e_VNTO, rows.a_NTI) / rows.num_rows**0.5
        return {"outputs": (G_VOI @ G_VOI.mT).sum(dim=0), "inputs": (G_VOI.mT @ G_VOI).sum(dim=0)}

    def invert(self, name: str, known: State) -> State:
        root_c = known["outputs"].trace().clamp(min=_MIN_TRACE).sqrt()
        outputs_OO, inputs_II = known["outputs"] / root_c, known["inputs"] / root_c
        of_outputs, of_inputs = shared_damping(outputs_OO, inputs_II, self.option(name, "damping"))
        return {"outputs": damped_inverse(outputs_OO, of_outputs), "inputs": damped_inverse(inputs_II, of_inputs)}

    def factors(self, inverse: State) -> tuple[Tensor, Tensor] | None:
        return (inverse["outputs"], inverse["inputs"]) if "outputs" in inverse else None
