"""The entries: one line each."""

from __future__ import annotations

from benchmarks.paper.cells import UNLIMITED
from benchmarks.track.training import Entry

# fixed-length steps of other optimizers
_RIVAL = ("optimizer.graft=none", *UNLIMITED)

ENTRIES = (
    Entry("sgd", ("optimizer=sgd",), 0.004, about="plain SGD with update-norm limits"),
    Entry("momentum", ("optimizer=sgd", "optimizer.momentum=0.9"), 0.004, about="SGD, momentum 0.9, update-norm limits"),
    Entry("adam", ("optimizer=adam", *_RIVAL), 0.002),
    Entry("adamw", ("optimizer=adamw", *_RIVAL), 0.002, about="torch.optim.AdamW"),
    Entry("adamw-beta2-95", ("optimizer=adamw", *_RIVAL, "optimizer.ema_decay=0.95"), 0.002, about="beta2 0.95"),
    Entry("muon", ("optimizer=muon", *_RIVAL), 0.02, about="torch.optim.Muon, AdamW for vectors"),
    Entry("muon-momentum-8", ("optimizer=muon", *_RIVAL, "optimizer.beta1=0.8"), 0.02, about="momentum 0.8"),
    Entry("muon-momentum-9", ("optimizer=muon", *_RIVAL, "optimizer.beta1=0.9"), 0.02, about="momentum 0.9"),
    Entry("normuon", ("optimizer=normuon", *_RIVAL), 0.004, about="Muon with normalized rows"),
    Entry("scaled-adam", ("optimizer=scaled_adam", "optimizer.min_rms=0.05", *UNLIMITED), 0.02, about="icefall's"),
    Entry("soap", ("optimizer=soap", *_RIVAL), 0.002, about="basis every 10 minibatches"),
    Entry("shampoo", ("optimizer=shampoo", *UNLIMITED), 0.002, about="grafting to the gradient"),
    Entry("psgd", ("optimizer=psgd", *UNLIMITED), 0.004, about="Kronecker factors, grafting to the gradient"),
    Entry("kfac", ("optimizer=kfac",), 0.004, about="grafting to the gradient"),
    Entry("ekfac", ("optimizer=ekfac",), 0.004, about="grafting to the gradient"),
    Entry("ngsgd", ("optimizer=ngsgd",), 0.004, about="the paper's method and Kaldi's defaults"),
    Entry("ngsgd-exponential", ("optimizer=ngsgd",), 0.008, schedule="exponential", about="the schedule of ngsgd train"),
    Entry("ngsgd-momentum", ("optimizer=ngsgd", "optimizer.momentum=0.9"), 0.004, about="momentum after the estimates"),
    Entry("ngsgd-unlimited", ("optimizer=ngsgd", *UNLIMITED), 0.002, about="no update-norm limits"),
    Entry("ngsgd-alpha-1", ("optimizer=ngsgd", "optimizer.alpha=1"), 0.004, about="less smoothing"),
    Entry("ngsgd-alpha-25", ("optimizer=ngsgd", "optimizer.alpha=0.25"), 0.004, about="smoothing alpha 0.25"),
    Entry("ngsgd-alpha-6", ("optimizer=ngsgd", "optimizer.alpha=0.0625"), 0.004, about="smoothing alpha 0.0625"),
    Entry("ngsgd-rank", ("optimizer=ngsgd", "optimizer.rank_in=80", "optimizer.rank_out=120"), 0.004, about="ranks 80 and 120"),
    Entry("ngsgd-average", ("optimizer=ngsgd",), 0.008, schedule="linear", tail=0.2, about="average of the last fifth"),
    Entry("orthogonal-momentum", ("variant.momentum=0.9", "variant.estimates=none", "variant.length=orthogonal"), 0.01,
          about="NaturalMuon without estimates"),
    Entry("natural-muon", ("variant.momentum=0.9", "variant.length=orthogonal"), 0.01, about="NaturalMuon with momentum 0.9"),
    Entry("natural-rows", ("variant.momentum=0.9", "variant.length=row"), 0.01, about="momentum, estimates, rows of equal length"),
    Entry("natural-length", ("variant.rows=true", "variant.momentum=0.9", "variant.estimates=none"), 0.01,
          about="momentum of NG-SGD's gradients with fixed length"),
    Entry("root-natural", ("variant.power=0.5",), 0.01, about="square roots of Fisher factors, rows of equal length"),
    Entry("root-natural-75", ("variant.power=0.75",), 0.01, about="power 0.75"),
    Entry("simple-ng", ("optimizer=simple",), 0.004, about="the paper's simple method"),
)
