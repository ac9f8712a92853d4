"""Sums over the uses of every parameter, for the requested quantities.

A signal (the gradient, columns of the loss Hessian, Monte Carlo samples, ..) arrives as shares. A
form (squares, norms, factors, ..) is a sum computed from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ngsgd.curvature.capture import LayerCall
from ngsgd.curvature.forms.grad_forms import DenseGrad, EmbeddingGrad, OuterProduct, RowSum, TiedGrad
from ngsgd.curvature.forms.kronecker import output_rows
from ngsgd.curvature.forms.layer_inputs import Inputs
from ngsgd.curvature.quantities import SIGNALS, Accumulators, CollectOptions, PassResults
from ngsgd.errors import ConfigError

Whole = OuterProduct | RowSum | EmbeddingGrad | TiedGrad | DenseGrad


class Accumulation:
    """Sums of every parameter.

    Args:
        asked: names of quantities.
        parameters: by name.
        options: of `collect`.
    """

    def __init__(self, asked: Iterable[str], parameters: Mapping[str, Tensor],
                 options: CollectOptions) -> None:
        self.forms: dict[str, set[str]] = defaultdict(set)   # of each signal
        for signal, form in (SIGNALS[quantity] for quantity in asked if quantity in SIGNALS):
            self.forms[signal].add(form)
        if "moments" in self.forms["gradient"]:
            self.forms["gradient"].add("squares")
        self.has_factors = any("factors" in forms for forms in self.forms.values())
        self.sums = {name: Accumulators(p.shape) for name, p in parameters.items()}
        self.weight_of: dict[str, str] = {}                  # by name of the bias
        self._weights: set[str] = set()
        self._options = options

    def note(self, call: LayerCall) -> None:
        """Register which parameters belong together."""
        if call.weight is not None:
            self._weights.add(call.weight)
        if call.weight is not None and call.bias is not None:
            self.weight_of[call.bias] = call.weight

    def accumulate(self, name: str, signal: str, share: Whole, fresh: PassResults, *,
                   without_sum: bool = False,
             signs_VN: Tensor | None = None) -> None:
        """Add the share of one block of vectors to a parameter."""
        forms = self.forms[signal]
        if "factors" in forms:
            self._take_factors(name, signal, share)
        if "individual" in forms:
            g_VNP = share.individual(0, share.num_samples)
            fresh.append(name, "individual", g_VNP)
            share = share if isinstance(share,
                                        OuterProduct) and share.is_rank_one else DenseGrad(g_VNP)
        if "norms" in forms:
            fresh.append(name, "norms", share.squared_norms())
        if "by_sample" in forms:
            fresh.add(name, "by_sample", share.squares_by_sample(signs_VN))
        if "moments" in forms and not without_sum:
            total, squares = share.moments()
            fresh.add(name, "sum", total)
            fresh.add(name, "squares", squares)
        elif "squares" in forms:
            fresh.add(name, "squares", share.sum_of_squares(signs_VN))

    def _take_factors(self, name: str, signal: str, share: Whole) -> None:
        if isinstance(share, RowSum) and name in self.weight_of:
            return  # part of the weight
        if (isinstance(share, RowSum) and name not in self._weights) or (isinstance(share, OuterProduct) and share.groups == 1):
            self.sums[name].B_OO[signal].add(output_rows(share.e_VNTO, self._options.sharing))
        else:
            raise ConfigError(f"parameter {name} has no Kronecker factors: they are defined for "
                              "Linear, Conv1d, Conv2d and Conv3d without groups and for the GEMMs "
                              "of recurrent and attention layers; exclude its layer with layers=.")

    def take_inputs(self, name: str, inputs: Inputs) -> None:
        """Add input rows to the input factor A of a weight, for all signals."""
        self.sums[name].take_inputs(inputs, self._options.sharing)

    def keep(self, signal: str, fresh: PassResults) -> None:
        """Merge the results of a loss or a backward pass into the earlier ones.

        Samples of several backward passes are concatenated; several losses in one backward pass
        have the same samples.
        """
        number = torch._C._current_graph_task_id()
        for (name, form), value in fresh.found.items():
            sums, key = self.sums[name], (signal, form)
            before = sums.found.get(key)
            if form in ("individual", "norms", "by_sample"):
                dim = 0 if form == "by_sample" else 1
                start = 0 if before is None else before.shape[dim]
                if before is not None and sums.last[key][0] == number and signal != "gradient":
                    sums.found[key] = _together(before, value, sums.last[key][1], form)
                    continue
                sums.last[key] = number, start
                sums.found[key] = value if before is None else _end_to_end(before, value, dim)
            else:
                sums.found[key] = value if before is None else before + value


def _together(before: Tensor, value: Tensor, start: int, form: str) -> Tensor:
    """Combine the results of two losses for the same samples, from `start` on.

    Add squares, append vectors.
    """
    if form == "by_sample":
        before[start:] += value
        return before
    more_VNP = value.new_zeros(len(value), *before.shape[1:])
    more_VNP[:, start:] = value
    return torch.cat([before, more_VNP])


def _end_to_end(before: Tensor, value: Tensor, dim: int) -> Tensor:
    """Concatenate samples; pad with zeros if they have fewer vectors (a loss of fewer classes)."""
    if dim == 1 and len(before) != len(value):
        V = max(len(before), len(value))
        before, value = (torch.cat([x, x.new_zeros(V - len(x), *x.shape[1:])]) for x in (before, value))
    return torch.cat([before, value], dim=dim)
