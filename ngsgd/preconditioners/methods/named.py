"""Combinations with a name, (C + d I)^-1 g; `ngsgd.config.traits` has their four choices.

C is the Fisher matrix F, the mean of g g^T, or of the Hessian.
"""

from __future__ import annotations

from ngsgd.preconditioners.fisher_method import FisherMethod
from ngsgd.preconditioners.methods.combination import Combination, ProductCombination


class DiagonalNG(Combination, FisherMethod, kind="diagonal"):
    """C = diag F."""


class UnitWiseNG(Combination, FisherMethod, kind="unit"):
    """Unit-wise F (Roux et al. 2008): O matrices I x I per layer."""


class LayerWiseNG(Combination, FisherMethod, kind="layer"):
    """Dense F of each layer; ConfigError for a layer of more than 20 000 parameters."""


class FullNG(Combination, FisherMethod, kind="full"):
    """Dense F of all affine layers together, for models of up to 20 000 parameters."""


class MFAC(Combination, kind="mfac"):
    """M-FAC (Frantar et al. 2021): C of `rank` gradients, of equal weight if ema_decay is 0."""

    rank: int = 32
    ema_decay: float = 0.0


class GGT(MFAC, kind="ggt"):
    """GGT (Agarwal et al. 2019), the root of C of `MFAC`, with its options."""


class TONGA(MFAC, kind="tonga"):
    """TONGA (Le Roux et al. 2007): `rank` eigenvectors of C, and as many gradients since."""

    rank: int = 10
    ema_decay: float = 0.995


class UnitTONGA(TONGA, kind="tonga_unit"):
    """TONGA with a matrix for each output of a layer (Le Roux et al. 2007, section 4)."""


class FANG(Combination, FisherMethod, kind="fang"):
    """FANG (Grosse and Salakhutdinov 2015) for affine layers.

    The gradients of the biases of a layer have a dense covariance. That of a weight depends, given
    its own bias, on no other. The inverse of such an F has exact sparse factors. Without biases it
    is the diagonal.
    """


class SFN(ProductCombination, kind="sfn"):
    """Saddle-free Newton method (Dauphin et al. 2014), C = |H|; up to 2000 parameters a layer."""


class ESGD(ProductCombination, kind="esgd"):
    """Equilibrated SGD (Dauphin et al. 2015): C^2 = moving average of (H z)^2, z is normal."""


class AdaHessian(ProductCombination, kind="adahessian"):
    """AdaHessian (Yao et al. 2021) without momentum: (z H z)^2, z has signs, kernels the mean."""

    damping: float = 1e-4
    ema_decay: float = 0.999
