"""Sequence training and the exchange with Kaldi, from the command line to a word error rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ngsgd.training.storage.audit import audit
from tests.integration.service import Service, events, final_hash, wers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(service: Service) -> Path:
    """A run with cross-entropy."""
    return service.trained("ce")


def test_smbr_continues_a_run_and_is_bitwise_identical_after_a_stop(service: Service, start: Path) -> None:
    settings = ["objective=smbr", f"init_model={start}", "cluster.num_workers=2",
                "schedule.minibatch_size=400", "schedule.num_epochs=2"]
    assert wers(service.output("cluster=in_process", "name=whole", *settings)).keys() == {"valid",
                "test"}
    (whole,) = service.runs("whole")
    records = events(whole, "outer_iteration")
    objfs = [sum(job["objf"] for job in record["jobs"]) / len(record["jobs"]) for record in records]
    assert 0.0 < objfs[0] < objfs[-1] < 1.0  # shares of frames
    run = service.stop_and_resume("stopped", 1, *settings)
    assert final_hash(run) == final_hash(whole)
    assert audit(run / "ledger.jsonl") == []


def test_lattice_free_mmi_starts_from_nothing(service: Service, start: Path) -> None:
    run = service.trained("lfmmi", "objective=lfmmi", "schedule.minibatch_size=400",
                          "objective.chunk_frames=50")
    priors = json.loads((run / "final" / "model.json").read_text())["priors"]
    assert max(priors) == min(priors)


def test_a_chain_objective_continues_cross_entropy_with_its_priors(service: Service, start: Path) -> None:
    run = service.trained("chain", "objective=chain", f"init_model={start}",
                          "schedule.minibatch_size=400", "schedule.num_epochs=1",
                          "objective.chunk_frames=60")
    of_run, of_start = (json.loads((folder / "final" / "model.json").read_text())["priors"] for folder in (run, start))
    assert of_run == pytest.approx(of_start)


def test_a_model_exported_to_kaldi_and_imported_continues_training(service: Service, start: Path) -> None:
    there, back = service.output_dir / "kaldi", service.output_dir / "back"
    service.output(str(start), "--output", str(there), "--include-data", "--egs", "1",
                   command="export")
    assert {path.name for path in there.iterdir()} == {"final.raw", "priors.vec", "train", "valid", "test", "egs.1.ark",
                                                    "ali.ark", "lexicon.txt", "pdfs.txt"}
    service.output(str(there / "final.raw"), "--priors", str(there / "priors.vec"), "--output",
                   str(back), command="import")
    assert (back / "final" / "model.safetensors").read_bytes() == (start / "final" / "model.safetensors").read_bytes()
    service.trained("on", "objective=mmi", f"init_model={back}", "schedule.minibatch_size=400",
                    "schedule.num_epochs=1")


def test_an_incompatible_initial_model_is_reported(service: Service, start: Path) -> None:
    done = service.here("objective=mmi", "cluster=in_process", "name=none")
    assert done.returncode == 2 and "init_model=RUN" in done.stderr
    done = service.here("objective=mmi", f"init_model={start}", "model.hidden_dim=32", "cluster=in_process", "name=other")
    assert done.returncode == 2 and "other layers" in done.stderr
