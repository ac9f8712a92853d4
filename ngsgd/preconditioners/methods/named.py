"""Combinations with a name, (C + d I)^-1 g; `ngsgd.config.traits` has their four choices.

    DiagonalNG                       C = diag F
    UnitWiseNG, LayerWiseNG, FullNG  C = F of each output, each layer, or all affine layers
    MFAC, GGT                        C = mean of g g^T of the last `rank` minibatches, or its root
    TONGA, UnitTONGA                 C = moving average of g g^T of a layer or output: eigenvectors
    FANG                             C = F: sparse factors of the inverse, by regression on biases
    SFN                              C = |H| of a layer
    ESGD, AdaHessian                 C = root of the mean of (H z)^2, or of (z H z)^2
"""

from __future__ import annotations

from ngsgd.config.traits import TRAITS
from ngsgd.preconditioners.fisher_method import FisherMethod
from ngsgd.preconditioners.methods.combination import Combination, ProductCombination


class DiagonalNG(Combination, FisherMethod):
    """Diagonal of F."""

    traits = TRAITS["diagonal"]


class UnitWiseNG(Combination, FisherMethod):
    """Unit-wise F (Roux et al. 2008): O matrices I x I per layer."""

    traits = TRAITS["unit"]


class LayerWiseNG(Combination, FisherMethod):
    """Dense F of each layer; ConfigError for a layer of more than 20 000 parameters."""

    traits = TRAITS["layer"]


class FullNG(Combination, FisherMethod):
    """Dense F of all affine layers together, for models of up to 20 000 parameters."""

    traits = TRAITS["full"]


class MFAC(Combination):
    """M-FAC (Frantar et al. 2021): `rank` gradients, of equal weight if ema_decay is 0."""

    rank: int = 32
    ema_decay: float = 0.0
    traits = TRAITS["mfac"]

    def problems(self) -> list[str]:
        return [*super().problems(), *([] if self.rank else ["rank is 0; give the number of vectors."])]


class GGT(MFAC):
    """GGT (Agarwal et al. 2019), of the mean of g g^T; options as of `MFAC`."""

    traits = TRAITS["ggt"]


class TONGA(MFAC):
    """TONGA (Le Roux et al. 2007): `rank` eigenvectors, and as many gradients since."""

    rank: int = 10
    ema_decay: float = 0.995
    traits = TRAITS["tonga"]


class UnitTONGA(TONGA):
    """TONGA with a matrix for each output of a layer (Le Roux et al. 2007, section 4)."""

    traits = TRAITS["tonga_unit"]


class FANG(Combination, FisherMethod):
    """FANG (Grosse and Salakhutdinov 2015) for affine layers.

    The gradients of the biases of a layer have a dense covariance. That of a weight depends, given
    its own bias, on no other. The inverse of such an F has exact sparse factors. Without biases it
    is the diagonal.
    """

    traits = TRAITS["fang"]


class SFN(ProductCombination):
    """Saddle-free Newton method (Dauphin et al. 2014), for layers of up to 2000 parameters."""

    traits = TRAITS["sfn"]


class ESGD(ProductCombination):
    """Equilibrated SGD (Dauphin et al. 2015), with a moving average; z is normal."""

    traits = TRAITS["esgd"]


class AdaHessian(ProductCombination):
    """AdaHessian (Yao et al. 2021) without momentum; z has signs, kernels have the mean."""

    damping: float = 1e-4
    ema_decay: float = 0.999
    traits = TRAITS["adahessian"]
