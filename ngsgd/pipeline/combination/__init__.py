"""Final combination of the last models of a run to one, chosen on held-out frames.

`running_mean` is the current method of Kaldi (nnet3-combine): the mean of the newest n models.
`generalized` is that of the paper (C.4 of arXiv 1410.7455, nnet-combine-fast): one weight for each
model and layer. Both score with `HeldOut`; `candidates` selects the models that a run keeps.
"""

from ngsgd.pipeline.combination.layer_weights import generalized, normalize_stddev
from ngsgd.pipeline.combination.models import Candidate, Combined, HeldOut, candidates, recompute_batchnorm, running_mean

__all__ = ["Candidate", "Combined", "HeldOut", "candidates", "generalized", "normalize_stddev",
           "recompute_batchnorm", "running_mean"]
