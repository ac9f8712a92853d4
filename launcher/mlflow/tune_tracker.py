"""Progress of `ngsgd tune`: a line per trial, and the same figures in MLflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ngsgd.config import RunConfig
from ngsgd.config.build import flatten
from ngsgd.hypergrad import SearchResult, SearchTrial
from ngsgd.launcher.mlflow.store import tracking_uri
from ngsgd.launcher.text import masked
from ngsgd.pipeline.tuning import Tuned


class TuneTracker:
    """Tracker of one search; MLflow's x axis is the cost in proxy runs."""

    def __init__(self, config: RunConfig, folder: Path, report: Callable[[str], None]) -> None:
        self._folder, self._report, self._best = folder, report, float("inf")
        self._client: Any = None
        self._num_trials = 0
        if config.tracking.kind == "mlflow":
            self._open(config)

    def _open(self, config: RunConfig) -> None:
        try:
            from mlflow import MlflowClient

            client = MlflowClient(tracking_uri(config))
            name = config.tracking.experiment_name or f"{config.data.corpus}-{config.model.label}-tune"
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else client.create_experiment(name)
            self._run_id = client.create_run(experiment, run_name=self._folder.name).info.run_id
            for key, value in flatten(config).items():
                if key.startswith(("tune.", "schedule.", "optimizer.")):
                    client.log_param(self._run_id, key, masked(str(value)) or "''")
            self._client = client
        except Exception as error:
            # tuning continues; trials.jsonl holds all trials
            self._give_up(error)

    def trial(self, trial: SearchTrial) -> None:
        """Report the end of a proxy run."""
        self._num_trials += 1
        mark = "*" if trial.value < self._best else " "
        self._best = min(self._best, trial.value)
        self._report(f"{trial.kind:10} {self._num_trials:4} {trial.cost:7.1f} runs  valid "
                     f"{trial.value:.4f}{mark}  best {self._best:.4f}")
        if trial.value < float("inf"):
            self._log({"tune/val": trial.value, "tune/best": self._best}, trial.cost)

    def finished(self, search: SearchResult, result: Tuned) -> None:
        """Log the result, the reports of the hypergradients, and the files."""
        for one in search.trials:
            if one.report is not None:
                self._log({"tune/hypergrad_norm": one.norm, "tune/adjoint_growth": min(one.report.adjoint_growth, 1e30),
                           "tune/spill_bytes": float(one.report.spill_bytes)}, one.cost)
        self._log({"tune/val": result.valid, "tune/test": result.held_out}, search.spent)
        if self._client is not None:
            try:
                self._client.log_artifacts(self._run_id, str(self._folder))
            except Exception as error:
                self._give_up(error)

    def close(self) -> None:
        if self._client is not None:
            try:
                self._client.set_terminated(self._run_id)
            except Exception as error:
                self._give_up(error)

    def _log(self, figures: Mapping[str, float], cost: float) -> None:
        if self._client is None:
            return
        try:
            for name, value in figures.items():
                self._client.log_metric(self._run_id, name, value, step=round(cost))
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._client = None
        reason = masked(str(error).strip().partition("\n")[0])
        self._report(f"MLflow cannot be written ({reason}); tuning continues, and {self._folder} "
                     "holds all results.")
