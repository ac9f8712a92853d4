"""Scores of a model on fixed subsets of frames, and the average posterior used in decoding."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd.curvature import collect
from ngsgd.curvature.collection import Collection
from ngsgd.curvature.quantities import GradientNoise, gradient_noise
from ngsgd.data.reader import EgsReader, Minibatch
from ngsgd.errors import DamagedArchiveError
from ngsgd.schedules import Shard
from ngsgd.training.records import SubsetScore
from ngsgd.training.task import Evaluation

_ROWS_AT_ONCE = 8192
# floor of nnet3-am-adjust-priors in Kaldi
_MIN_PRIOR = 1e-15


def summed_loss(logits_NP: Tensor, pdf_N: Tensor, weight_N: Tensor | None) -> Tensor:
    """Minus the objf, summed over the frames, each times its weight."""
    if weight_N is None:
        return nn.functional.cross_entropy(logits_NP, pdf_N, reduction="sum")
    return (nn.functional.cross_entropy(logits_NP, pdf_N, reduction="none") * weight_N).sum()


@torch.no_grad()
def score_subset(model: nn.Module, subset: Minibatch) -> SubsetScore:
    """Objf per frame and frame accuracy, weighted if the frames have weights."""
    return _score(_logits(model, subset), subset)


@torch.no_grad()
def diagnose(model: nn.Module, train: Minibatch, valid: Minibatch, silence_classes: Sequence[int] = (),
             num_curvature_frames: int = 0) -> Evaluation:
    """Score both subsets and compute figures that reveal hidden failures.

    Figures are fractions, 0 to 1. dead_units/LAYER: units of a ReLU that are 0 on every frame of
    the training subset. `silence/recognised` and `silence/labelled`: of the validation subset. With
    `num_curvature_frames` the figures of `gradient_figures` are included.
    """
    with _peaks(model) as peaks:
        train_score = score_subset(model, train)
        figures = {f"dead_units/{layer}": float((peak_U <= 0.0).double().mean()) for layer, peak_U in peaks.items()}
    logits_NP = _logits(model, valid)
    if silence_classes:
        silence = torch.tensor(list(silence_classes))
        figures["silence/recognised"] = float(torch.isin(logits_NP.argmax(dim=1), silence).double().mean())
        figures["silence/labelled"] = float(torch.isin(valid.pdf_N, silence).double().mean())
    if num_curvature_frames:
        figures |= gradient_figures(model, train, num_curvature_frames)
    return Evaluation(train_score, _score(logits_NP, valid), figures)


@torch.no_grad()
def average_posterior(model: nn.Module, reader: EgsReader, num_frames: int = 20_000, *,
                      skip_damaged: bool = False) -> npt.NDArray[np.float64]:
    """Mean posterior of each class over about `num_frames` training frames, floored, normalized.

    With `skip_damaged` damaged archives are skipped; if none is left, the last error is raised.
    """
    total_P = torch.zeros(reader.info.num_classes, dtype=torch.float64)
    seen = 0
    damage: DamagedArchiveError | None = None
    for archive in range(reader.info.num_archives):
        try:
            for minibatch in reader.minibatches(Shard(archive, 0), _ROWS_AT_ONCE, seed=0, outer_iter=0, job=0):
                wanted_ND = minibatch.x_ND[:num_frames - seen]
                # a custom module may not support empty input
                if not len(wanted_ND):
                    break
                total_P += model(wanted_ND).softmax(dim=1).sum(dim=0, dtype=torch.float64)
                seen += len(wanted_ND)
        except DamagedArchiveError as error:
            if not skip_damaged:
                raise
            damage = error
        if seen >= num_frames:
            break
    if damage and not seen:
        raise damage
    prior_P = (total_P / seen).clamp(min=_MIN_PRIOR).numpy()
    return np.asarray(prior_P / prior_P.sum())


def _logits(model: nn.Module, subset: Minibatch) -> Tensor:
    return torch.cat([model(part) for part in subset.x_ND.split(_ROWS_AT_ONCE)])


def _score(logits_NP: Tensor, subset: Minibatch) -> SubsetScore:
    is_right_N = logits_NP.argmax(dim=1) == subset.pdf_N
    if subset.weight_N is None:
        objf = -nn.functional.cross_entropy(logits_NP, subset.pdf_N)
        return SubsetScore(float(objf), float(is_right_N.double().mean()))
    weight = subset.weight_N.double().sum()
    objf = -summed_loss(logits_NP, subset.pdf_N, subset.weight_N) / weight
    return SubsetScore(float(objf), float((is_right_N * subset.weight_N.double()).sum() / weight))


@contextlib.contextmanager
def _peaks(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Maximum output of each ReLU unit over all frames of this context; a channel is one unit."""
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def look(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            peak_U = output.detach().movedim(1, -1).flatten(0, -2).amax(dim=0)
            found[name] = torch.maximum(found[name], peak_U) if name in found else peak_U
        return look
    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if isinstance(module, nn.ReLU)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def check_layers(model: nn.Module) -> None:
    """Raise ConfigError for a model with layers that do not support per-sample gradients."""
    _collection(model)


def gradient_figures(model: nn.Module, subset: Minibatch, num_frames: int) -> dict[str, float]:
    """Compute gradient noise and curvature of the loss per layer from the first frames of a subset.

        signal_to_noise/LAYER    |g|^2 / S, of a single frame: multiply by the minibatch size
        noise_scale/model        S / |g|^2: minibatch size beyond which averaging stops to help
                                 (McCandlish et al. 2018)
        curvature_trace/LAYER    trace of the generalized Gauss-Newton matrix per frame,
                                 one Monte Carlo sample per frame

    S is the trace of the covariance of the gradient of one frame, |g|^2 the squared norm of the
    true gradient, whose estimate may be negative; figures that are not finite are omitted. At least
    2 labeled frames are needed. It takes as long as two training steps on so many frames, leaves
    torch's default generator as it is, and removes the gradients of the model.
    """
    part = Minibatch(subset.x_ND[:num_frames], subset.pdf_N[:num_frames],
                     None if subset.weight_N is None else subset.weight_N[:num_frames])
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    with torch.enable_grad(), _collection(model, loss_fn) as q:
        loss_N = loss_fn(model(part.x_ND), part.pdf_N)
        (loss_N if part.weight_N is None else loss_N * part.weight_N).mean().backward()
    model.zero_grad(set_to_none=True)
    noise = gradient_noise(q, len(part.x_ND))
    figures = {"noise_scale/model": noise[""].noise_scale, "signal_to_noise/model": noise[""].signal_to_noise}
    # a direct parameter of the model is a layer
    names_of: dict[str, list[str]] = defaultdict(list)
    for name in q:
        names_of[name.rpartition(".")[0] or name].append(name)
    for layer, names in names_of.items():
        whole = GradientNoise(sum(noise[name].trace for name in names), sum(noise[name].squared_norm for name in names))
        figures[f"signal_to_noise/{layer}"] = whole.signal_to_noise
        figures[f"curvature_trace/{layer}"] = sum(float(q[name].diag_ggn_mc.sum(dtype=torch.float64)) for name in names)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _collection(model: nn.Module, loss_fn: nn.Module | None = None) -> Collection:
    # a separate generator: training uses that of torch in another thread
    return collect(model, "variance", "second_moment", "diag_ggn_mc", loss_fn=loss_fn or nn.CrossEntropyLoss(), reduction="mean",
                   generator=torch.Generator().manual_seed(0))
