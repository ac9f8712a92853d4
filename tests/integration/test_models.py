"""Models that grow and models of a user, from the command line to a word error rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from ngsgd.training.storage.audit import audit
from tests.integration.service import Service, final_hash, wers

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
GROWING = ["model=tdnn", "model.num_layers=3", "model.tdnn_offsets='-2,-1,0,1,2 -1,1 -2,2'", "model.input_transform=lda",
           "model.num_subclasses=90", "model.add_layers_period=2"]


def test_a_missing_model_is_reported_before_data_is_prepared(service: Service) -> None:
    done = service.call("model._target_=no_such_module:Net", "name=absent")
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0 and "there is no module no_such_module" in done.stderr
    assert list(service.output_dir.iterdir()) == []


def test_a_growing_model_that_was_stopped_ends_with_the_bits_of_one_that_was_not(service: Service) -> None:
    wer = wers(service.output("cluster=in_process", "name=whole", *GROWING))
    assert wer.keys() == {"valid", "test"}
    (whole,) = service.runs("whole")
    run = service.stop_and_resume("stopped", 2, *GROWING)
    assert final_hash(run) == final_hash(whole)
    assert audit(run / "ledger.jsonl") == []
    again = service.call(str(whole), command="decode")
    assert wers(again.stdout) == wer


def test_a_module_in_the_current_directory_trains_and_is_found_again_from_elsewhere(service: Service) -> None:
    (service.output_dir / "my_model.py").write_text((EXAMPLES / "small_cnn.py").read_text())
    found = service.output("cluster=local", "name=own", "model._target_=my_model:SmallCnn",
                           "model.args={channels: 4}")
    (run,) = service.runs("own")
    again = wers(Service(EXAMPLES).output(str(run), command="decode"))
    assert again.keys() == {"valid", "test"} and again == wers(found)
