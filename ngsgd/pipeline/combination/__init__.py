"""The final combination of a run's last models into one, chosen on held-out frames.

`running_mean` is Kaldi's way today (nnet3-combine): the plain mean of the newest n models, n by the held-out objf.
`generalized` is the paper's (C.4 of arXiv 1410.7455, nnet-combine-fast): one weight for each model and layer.  Both score
with `HeldOut`, which recomputes batch-norm statistics; `candidates` says which models of a run to keep for them.
"""

from ngsgd.pipeline.combination.held_out import HeldOut, recompute_batchnorm
from ngsgd.pipeline.combination.layer_weights import generalized
from ngsgd.pipeline.combination.plain import running_mean
from ngsgd.pipeline.combination.records import Candidate, Combined, candidates
from ngsgd.pipeline.combination.stddev import normalize_stddev

__all__ = ["Candidate", "Combined", "HeldOut", "candidates", "generalized", "normalize_stddev", "recompute_batchnorm",
           "running_mean"]
