"""K-FAC with exact output factors: KFLR from the columns of the loss's second derivative, KFRA from a recursion of averages.

KFRA (Botev, Ritter and Barber 2017) needs one matrix for each operation of the network, not one vector for each class and sample.

Letters: N samples, T positions, X rows, O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ngsgd.curvature import losses
from ngsgd.curvature.capture import LayerCall
from ngsgd.curvature.layers import Affine, Convolution, without_autocast
from ngsgd.curvature.second_order.kfra import factor_of, output_moment, recursion
from ngsgd.errors import ConfigError
from ngsgd.preconditioners.fisher_recorder import FisherRecorder, FisherSample
from ngsgd.preconditioners.methods.kronecker.kfac import KFAC, KroneckerOptions

_MAX_FLOATS = 1 << 26   # of the matrix of one operation


@dataclass(frozen=True)
class ExactOptions(KroneckerOptions):
    """Of KFLR and KFRA."""

    fisher: str = "exact"

    def problems(self) -> list[str]:
        found = super().problems()
        return found if self.fisher == "exact" else [*found, f"fisher is {self.fisher!r}; it must be \"exact\", or take KFAC."]


class KFLR(KFAC):
    """K-FAC with the exact output factors (Botev et al. 2017, equation 17); the same as `KFAC(fisher="exact")`."""

    Options = ExactOptions


@dataclass(frozen=True)
class _Factors:
    """Of one layer in one pass."""

    bias: str | None
    moment_II: Tensor   # sum of a a^T
    num_rows: int       # that it is the sum of
    B_OO: Tensor        # of the loss, not of its mean


class KFRA(KFAC):
    """K-FAC with the output factors of the recursion; for networks that are chains of operations (ConfigError else).

    Layers that are not affine have no factors: name them in `skip`.
    """

    Options = ExactOptions
    splits_work = False
    looks_at_held = False   # the recursion knows torch's own nodes alone

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        if narrow := [str(p.dtype) for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)]:
            raise ConfigError(f"KFRA's recursion needs parameters of float32 or float64, and the model has some of {narrow[0]}; "
                              "take KFLR, which has the same factors without averages.")

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        if not self.is_due("curvature"):
            yield
            return
        self._watched = self._watched or _AveragesRecorder(self.model, self.options.sharing,
                                                           self._layers())
        with self._watched:
            yield
        self._signal = self._watched.signal()

    def update_curvature(self, seen: FisherSample | Mapping[str, Tensor]) -> None:
        assert isinstance(self._watched, _AveragesRecorder)
        passes, weight = self._watched.passes, self._watched.total_weight
        for name in dict.fromkeys(name for found in passes for name in found):
            each = [found[name] for found in passes if name in found]
            self._bias_of[name] = each[0].bias
            # the passes are parts of one minibatch
            A_II = torch.stack([one.moment_II for one in each]).sum(dim=0) / sum(one.num_rows for one in each)
            self._average(name, {"A": A_II, "B": torch.stack([one.B_OO for one in each]).sum(dim=0) / weight})


class _AveragesRecorder(FisherRecorder):
    """Takes the factors of each pass where its loss is differentiated, in `passes`, by the name of the weight."""

    def __init__(self, model: Any, sharing: str, layers: tuple[str, ...] | None) -> None:
        super().__init__(model, fisher="exact", num_draws=1, generator=None, layers=layers)
        self._sharing = sharing
        self.passes: list[dict[str, _Factors]] = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        del self.passes[self._pass + 1:]   # those of a pass that failed

    @property
    def total_weight(self) -> float:
        """W, of the rows of all passes; 1 where all are masked."""
        return self._total_weight or 1.0

    def _differentiated(self, settings: dict[str, Any], kind: type[nn.Module], output: Tensor, target: Tensor,
                        upstream: Tensor) -> None:
        if self._capture.is_paused or not self._capture.open_calls:
            return
        with torch.no_grad(), without_autocast(output.device.type), self._capture.paused():
            view = losses.evaluation(settings, kind, output, target, upstream)
            self._pass += 1
            self._total_weight += float(view.weight_R.sum())
            calls = dict(self._capture.open_calls)
            N = self._capture.num_samples_seen(output)
            G_DD = output_moment(view, N)
            found = recursion(G_DD, get_gradient_edge(view.output), calls, N, _MAX_FLOATS, self._capture.parameters)
            self.passes.append(dict(self._factors(call, of_output_DD) for call, of_output_DD in found.items()))

    def _factors(self, call: LayerCall, of_output_DD: Tensor) -> tuple[str, _Factors]:
        if call.weight is None or not isinstance(call.kind, Affine | Convolution) or getattr(call.kind, "groups", 1) > 1:
            raise ConfigError(f"layer {call.layer} has no Kronecker factors for KFRA; name it in skip, or take KFAC.")
        a_NTI = self._capture.record(call, of_output_DD.new_zeros(1, len(call.input))).input_rows()
        if self._sharing == "reduce":
            a_NTI = a_NTI.mean(dim=1, keepdim=True)
        a_XI = a_NTI.flatten(0, 1)
        if call.bias is not None:
            a_XI = torch.cat([a_XI, a_XI.new_ones(len(a_XI), 1)], dim=1)
        return call.weight, _Factors(call.bias, a_XI.T @ a_XI, len(a_XI), factor_of(call, of_output_DD, self._sharing))
