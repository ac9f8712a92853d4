"""Final combination of the last models of a run to one, chosen on held-out frames.

`running_mean` is the current method of Kaldi (nnet3-combine): the mean of the newest n models, with
n chosen by the held-out objf. `generalized` is the method of the paper (C.4 of arXiv 1410.7455,
nnet-combine-fast): one weight for each model and layer. Both score with `HeldOut`, which recomputes
batch-norm statistics. `candidates` selects the models of a run to keep for them.
"""

from ngsgd.pipeline.combination.held_out import HeldOut, recompute_batchnorm
from ngsgd.pipeline.combination.layer_weights import generalized
from ngsgd.pipeline.combination.plain import running_mean
from ngsgd.pipeline.combination.records import Candidate, Combined, candidates
from ngsgd.pipeline.combination.stddev import normalize_stddev

__all__ = ["Candidate", "Combined", "HeldOut", "candidates", "generalized", "normalize_stddev", "recompute_batchnorm",
           "running_mean"]
