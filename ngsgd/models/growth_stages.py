"""Active parts of a model in each outer iteration, as numbers.

Layers are added one after another (C.7 of arXiv 1410.7455), and an output layer is split into
sub-classes (C.5). The complete model is allocated from the start, so that parameter vectors have
one size. The stage is a function of the outer iteration, and is never stored, averaged or sent. The
iterations are those of Kaldi's nnet2/train_pnorm_fast.sh.
"""

from __future__ import annotations

from dataclasses import dataclass

from ngsgd.config import ModelConfig, ScheduleConfig
from ngsgd.errors import ConfigError


@dataclass(frozen=True)
class Stage:
    """Active part of a model."""

    # hidden layers, from the input on
    num_layers: int
    # whether the output layer has sub-classes
    is_split: bool = False


@dataclass(frozen=True)
class Stages:
    """Stage of every outer iteration."""

    num_layers: int = 1
    # outer iterations between two additions; 0: all layers from the start
    add_layers_period: int = 0
    # first outer iteration with sub-classes
    first_split: int | None = None
    # rules of A6 for early outer iterations
    halves_early: bool = False

    @classmethod
    def of(cls, model: ModelConfig, schedule: ScheduleConfig, num_outer_iters: int) -> Stages:
        """Create the stages of a run.

        Raises ConfigError for a run that ends before the model is complete.
        """
        finish = model.num_layers * model.add_layers_period
        last_addition = 1 + (model.num_layers - 2) * model.add_layers_period if model.num_layers > 1 else 0
        if model.add_layers_period and last_addition >= num_outer_iters:
            raise ConfigError(f"model.add_layers_period is {model.add_layers_period}, which adds the last of "
                              f"{model.num_layers} layers after {last_addition} outer iterations, but the run has "
                              f"{num_outer_iters}; lower it or egs.samples_per_iter, or raise schedule.num_epochs.")
        first_split = (num_outer_iters + finish) // 2 + 1 if model.num_subclasses else None
        if first_split is not None and first_split >= num_outer_iters:
            raise ConfigError(f"model.num_subclasses is {model.num_subclasses}, but the run has {num_outer_iters} outer iterations "
                              f"and would split its output layer after {first_split}; lower egs.samples_per_iter or "
                              "model.add_layers_period, or raise schedule.num_epochs.")
        return cls(model.num_layers, model.add_layers_period, first_split, schedule.early_rules == "kaldi")

    def at(self, outer_iter: int) -> Stage:
        """Return the stage of an outer iteration; before the first it is that of the first."""
        num_layers = self.num_layers
        # The second layer is added in outer iteration 1, as in Kaldi.
        if self.add_layers_period:
            num_layers = min(num_layers, 2 + (outer_iter - 1) // self.add_layers_period if outer_iter > 0 else 1)
        return Stage(num_layers, self.first_split is not None and outer_iter >= self.first_split)

    def is_early(self, outer_iter: int) -> bool:
        """Return whether to keep only the best job, because averaging harms rapidly changing
        models.
        """
        return self.halves_early and (outer_iter == 0 or self.at(outer_iter).num_layers > self.at(outer_iter - 1).num_layers)
