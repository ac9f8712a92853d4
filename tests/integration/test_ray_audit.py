"""The audit with Ray actors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray")

from ngsgd.config import ClusterConfig, FailureConfig, RunConfig
from ngsgd.files import read_json_lines
from ngsgd.launcher.ray.pool import RayPool
from ngsgd.training.job import JobResult, LocalRef, Outcome
from ngsgd.training.storage.audit import audit
from ngsgd.training.validation.checksums import digest
from tests.toy import Run, config, undisturbed

pytestmark = [pytest.mark.services, pytest.mark.same_process("ray"), pytest.mark.usefixtures("ray_session")]

FAULTY = 1


def audited() -> RunConfig:
    return config(failure=FailureConfig(audit_every=1), cluster=ClusterConfig(kind="ray", num_workers=3, threads_per_worker=1))


class WrongBit(RayPool):
    """The results of worker 1 have a wrong bit."""

    def wait(self, timeout_s: float) -> Outcome | None:
        outcome = super().wait(timeout_s)
        if not isinstance(outcome, JobResult) or outcome.worker != FAULTY:
            return outcome
        vector = outcome.sent.read().copy()
        vector.view(np.uint32)[0] ^= np.uint32(1)
        self.release(outcome.sent)
        return replace(outcome, sent=LocalRef(vector), digest=digest(vector))


def test_ray_workers_are_audited_and_agree(tmp_path: Path) -> None:
    run = Run(tmp_path, audited())
    end = run.train(RayPool(run.spec, 1, run.store.layout.size))
    assert end.model_sha256 == undisturbed(config()).model_sha256
    outcomes = {line["outcome"] for line in read_json_lines(run.ledger_path) if line["event"] == "audited"}
    assert outcomes == {"agreed"} and run.recorder.incidents == []


def test_a_ray_worker_with_a_wrong_bit_is_named_and_not_used_again(tmp_path: Path) -> None:
    run = Run(tmp_path, audited())
    pool = WrongBit(run.spec, 1, run.store.layout.size)
    end = run.train(pool)
    assert [one.worker for one in run.recorder.incidents if one.what == "worker_quarantined"] == [FAULTY]
    assert end.model_sha256 == undisturbed(config()).model_sha256
    assert run.recorder.records[-1].workers_alive == 2
    assert audit(run.ledger_path) == []
