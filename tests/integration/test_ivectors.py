"""i-vectors and causal features end to end: trained, resumed, decoded frame by frame, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import kaldiio
import numpy as np
import pytest

from tests.integration.service import Service, final_hash

pytestmark = pytest.mark.slow

SETTINGS = ["features.cmvn=online", "ivectors.dim=4", "ivectors.num_gaussians=8"]


@pytest.fixture(scope="module")
def run(service: Service) -> Path:
    return service.trained("whole", "cluster.num_workers=2", *SETTINGS)


def test_streaming_gives_the_words_of_offline_decoding(service: Service, run: Path) -> None:
    service.output(str(run), "--streaming", "--chunk-frames", "5", command="decode")
    found = json.loads((run / "decode" / "streaming.json").read_text())
    assert found["num_same"] == found["num_utterances"] > 0
    assert found["what"] == "means, i-vectors, network and search"
    # the network's context is wider than the i-vectors'
    assert found["latency_ms"] == pytest.approx(10 * (5 + 5 - 1) + 12.5)


def test_a_stopped_run_resumes_with_its_extractor_bitwise_identically(service: Service, run: Path) -> None:
    stopped = service.stop_and_resume("stopped", 1, "cluster.num_workers=2", *SETTINGS)
    assert final_hash(stopped) == final_hash(run)
    extractor = (run / "ivectors.safetensors").read_bytes()
    assert (run / "final" / "ivectors.safetensors").read_bytes() == extractor
    for path in (service.output_dir / "data").glob("ivectors-*"):  # files outside the run folder
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = json.loads((run / "decode" / "wer.json").read_text())
    service.output(str(run), command="decode")
    assert json.loads((run / "decode" / "wer.json").read_text()) == before
    # none was trained
    assert not list((service.output_dir / "data").glob("ivectors-*.safetensors"))


def test_sequence_training_takes_the_extractor_of_the_run_that_it_starts_from(service: Service, run: Path) -> None:
    mmi = service.trained("mmi", "objective=mmi", f"init_model={run}",
                          "schedule.minibatch_size=400", "schedule.num_epochs=1", *SETTINGS)
    assert (mmi / "ivectors.safetensors").read_bytes() == (run / "ivectors.safetensors").read_bytes()


def test_ivectors_go_to_kaldi(service: Service, run: Path) -> None:
    there = service.output_dir / "kaldi"
    service.output(str(run), "--output", str(there), "--include-data", "--egs", "1",
                   command="export")
    assert "input-node name=ivector dim=4" in (there / "final.raw").read_text()
    feats, rows = (kaldiio.load_scp(str(there / "test" / name)) for name in ("feats.scp", "ivector_online.scp"))
    assert {utt_id: len(rows[utt_id]) for utt_id in rows} == {utt_id: -(-len(feats[utt_id]) // 10) for utt_id in feats}
    assert np.shape(kaldiio.load_mat(str(there / "test" / "global_cmvn.stats"))) == (2, 41)
