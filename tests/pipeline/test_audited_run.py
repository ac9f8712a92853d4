"""A run with a worker that computes wrong results: events, ledger, why, status and verify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ngsgd
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.errors import AuditError
from ngsgd.files import read_json_lines
from ngsgd.launcher import cli
from ngsgd.pipeline.services import PoolRequest, Services
from ngsgd.runs.verification import Request
from ngsgd.training.verification.repetition import Sample
from ngsgd.training.worker_pool import WorkerPool
from tests.tasks import blobs
from tests.training.auditing.faulty import FAULTY, WrongBit

EVERY = 8


def faulty_pool(request: PoolRequest) -> WorkerPool:
    return ProcessPool(request.spec, request.spec.settings.cluster.num_workers, request.num_threads, request.num_parameters,
                       log_directory=request.log_directory, agreement=request.agreement, make_worker=WrongBit)


@pytest.mark.slow
@pytest.mark.faults
def test_a_faulty_worker_among_four_is_named_and_its_earlier_results_are_found(tmp_path: Path,
                                                                               capsys: pytest.CaptureFixture[str]) -> None:
    run = ngsgd.train(blobs.make_task, num_workers=4, num_epochs=24, batch_size=16, output_dir=tmp_path, quiet=True,
                      services=Services(make_pool=faulty_pool), failure={"audit_every": EVERY}, checkpoint={"num_to_keep": 1000})
    lines = read_json_lines(run.folder.ledger)
    # other audits with a run of the worker end with it
    end, *others = [line for line in lines if line["event"] == "audited" and line["faulty"]]
    assert end["outcome"] == "decided" and {one["outcome"] for one in others} <= {"distrusted", "decided"}
    assert all(line["faulty"] == [FAULTY] for line in (end, *others))
    counted = [line for line in lines if line["event"] == "accepted" and line["worker"] == FAULTY]
    # fewer if the turn of another worker comes first
    assert 0 < len(counted) < EVERY and all(line["outer_iter"] < end["outer_iter"] for line in counted)
    (incident,) = [line for line in read_json_lines(run.folder.events) if line.get("what") == "worker_quarantined"]
    assert incident["worker"] == FAULTY

    capsys.readouterr()
    assert cli.main(["why", str(run.folder.path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["culprit"], answer["domain"]) == ("machine", "infrastructure")
    assert any(f"worker {FAULTY} (process" in one["text"] for one in answer["evidence"])
    assert cli.main(["status", str(run.folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["why"] == answer

    # a repetition finds exactly the wrong results that were averaged before
    found = run.verify(Request(Sample.parse("100%")))
    wrong = {(check.job.outer_iter, check.job.job) for check in found.checks if check.outcome == "differs"}
    assert wrong == {(line["outer_iter"], line["job"]) for line in counted}
    with pytest.raises(AuditError, match=f"worker {FAULTY}"):
        found.require_equal()
