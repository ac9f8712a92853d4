"""`collect`, the main entry point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ngsgd.curvature import losses
from ngsgd.curvature.collection import Collection
from ngsgd.curvature.forms.kronecker import SHARINGS
from ngsgd.curvature.quantities import NORMALIZATIONS, PRODUCTS, QUANTITIES, SIGNALS, CollectOptions
from ngsgd.errors import ConfigError


def collect(model: nn.Module, *quantities: str, loss_fn: Any = None, reduction: str | None = None,
            layers: Iterable[str] | None = None, num_samples: int | None = None, samples: Sequence[int] | None = None,
            sharing: str = "expand", normalization: str = "paper", mc_samples: int = 1,
            generator: torch.Generator | None = None, max_floats: int = 1 << 25) -> Collection:
    """Context in which `loss.backward()` also computes curvature quantities, by parameter name.

    For a loss L = c sum_n l_n over N samples, g_n is the gradient of l_n. Samples are the leading
    dimension of the input of every layer. Several backward passes in one context (gradient
    accumulation) count as one over all their samples.

        batch_grad         N x p           c g_n
        batch_l2           N               |c g_n|^2
        sum_grad_squared   p               sum_n (c g_n)^2
        second_moment      p               1/N sum_n g_n^2
        variance           p               1/N sum_n g_n^2 - (1/N sum_n g_n)^2
        diag_ggn, diag_ggn_mc              p        diagonal of the GGN, exact and sampled
        batch_diag_ggn, batch_diag_ggn_mc  N x p    the same per sample
        sqrt_ggn, sqrt_ggn_mc              V x N x p  root: the GGN is the sum of outer products
        diag_h, batch_diag_h               p, N x p  diagonal of the Hessian
        kfac, kflr, kfac_emp, kfra         Kronecker(B, A): sampled, exact, empirical, by averages
        hmp, ggnmp, pchmp                  functions: products with the block (see `Products`)

    GGN: generalized Gauss-Newton matrix.

    `q["layer.weight"].variance` has the shape and dtype of the parameter, at least float32, and is
    on its device.

    Args:
        model: the module whose layers are called; under DistributedDataParallel the wrapper or the
            wrapped module.
        quantities: names from the list above.
        loss_fn: the loss that is called inside the context: nn.CrossEntropyLoss, nn.MSELoss,
            nn.BCEWithLogitsLoss or their functional forms. First-order quantities support any loss
            that is a sum or mean over samples.
        reduction: "mean" or "sum" over samples, if loss_fn does not determine it.
        layers: names of layers, or of modules that contain them; default: all with trainable
            parameters.
        num_samples: N, if the rows of a sample are adjacent in the leading dimension of some layer.
        samples: indices of samples; sums are over these only, at a fraction of the cost.
        sharing: treatment of positions in Kronecker factors: "expand" (a target for every frame),
            "reduce" (one target for all frames of a sample) or "backpack"; see
            `ngsgd.curvature.forms.kronecker`.
        normalization: of variance and second_moment: "paper" as above, "backpack" with c g_n
            instead of g_n.
        mc_samples: number of Monte Carlo samples of the sampled quantities. Default 1.
        generator: random generator of the samples; default: torch's.
        max_floats: maximum number of backpropagated floats at a time, and of the largest matrix of
            kfra.

    Raises:
        ConfigError: an unknown quantity, or one that is undefined or unsupported for a layer, an
            operation or the loss. It is raised immediately if possible, else from the forward or
            backward pass.
        DataError: shapes that do not separate samples, or inputs changed in place.

    Source: BackPACK, arXiv 1912.10985.

    Example:
        >>> import torch
        >>> from ngsgd.curvature import collect
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> loss_fn = torch.nn.CrossEntropyLoss()
        >>> with collect(model, "variance", "kfac", loss_fn=loss_fn) as q:
        ...     loss_fn(model(torch.randn(16, 4)), torch.randint(3, (16,))).backward()
        >>> q["0.weight"].variance.shape, q["0.weight"].kfac.B_OO.shape
        (torch.Size([8, 4]), torch.Size([8, 8]))
    """
    problems = [f"there is no curvature quantity {name!r}; there are {', '.join(QUANTITIES)}." for name in quantities
                if name not in QUANTITIES]
    if not quantities:
        problems.append(f"collect() needs the names of quantities: {', '.join(QUANTITIES)}.")
    if sharing not in SHARINGS:
        problems.append(f"sharing is {sharing!r}; it must be one of {', '.join(SHARINGS)}.")
    if normalization not in NORMALIZATIONS:
        problems.append(f"normalization is {normalization!r}; it must be one of {', '.join(NORMALIZATIONS)}.")
    if reduction not in (None, "mean", "sum"):
        problems.append(f"reduction is {reduction!r}; it must be 'mean' or 'sum' over samples.")
    if num_samples is not None and num_samples < 1:
        problems.append(f"num_samples is {num_samples}; it must be at least 1.")
    if samples is not None and not len(samples):
        problems.append("samples is empty; name at least one.")
    if problems:
        raise ConfigError(problems)
    if mc_samples < 1:
        raise ConfigError(f"mc_samples is {mc_samples}; it must be at least 1.")
    if any(name in PRODUCTS or SIGNALS[name][0] != "gradient" for name in quantities):
        losses.check(loss_fn)
    moments = {"second_moment", "variance"} & set(quantities)
    needs_reduction = "kfac_emp" in quantities or (normalization == "paper" and bool(moments))
    is_inferred = needs_reduction and reduction is None
    reduction = reduction or losses.reduction_of(loss_fn)
    if reduction is None and needs_reduction:
        raise ConfigError("the variance, the second moment and the empirical K-FAC depend on whether the loss is a mean or a "
                          'sum over samples: give collect() loss_fn= or reduction="mean" or "sum".')
    options = CollectOptions(sharing, normalization, reduction, is_inferred, mc_samples, generator, max_floats)
    return Collection(model, quantities, loss_fn, options, {"layers": layers, "num_samples": num_samples, "samples": samples})
