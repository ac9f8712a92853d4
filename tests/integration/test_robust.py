"""The recipes for unseen voices, from the command line to a word error rate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.corpora import corpus
from ngsgd.config import FeatureConfig
from ngsgd.pipeline.recipes import recipe
from tests.integration.service import Service, wers

FSDD = Path(__file__).parents[2].parent / "shared" / "data" / "fsdd"

pytestmark = pytest.mark.slow


def test_digits_robust_trains(tmp_path: Path) -> None:
    found = Service(tmp_path).output("recipe=digits_robust", "cluster=in_process",
                    "cluster.num_workers=1")
    assert wers(found).keys() == {"valid", "test"}


@pytest.mark.skipif(not FSDD.is_dir(), reason="needs ../shared/data/fsdd")
def test_fsdd_robust_mixes_recordings_and_synthetic_digits(tmp_path: Path) -> None:
    found = Service(tmp_path).output(
        "recipe=fsdd_robust", f"data.source={FSDD}", "data.synthetic_minutes=0.5",
        "cluster=in_process", "cluster.num_workers=1")
    assert wers(found).keys() == {"valid", "test"}
    (prepared,) = tmp_path.glob("data/fsdd-*")
    speakers = json.loads((prepared / "train.json").read_text())["speakers"]
    # espeak-ng's voices have an accent and a variant; half of the utterances are in another voice
    assert {"+" in name for name in speakers} == {name.startswith("vc") for name in speakers} == {True, False}
    data = replace(recipe("fsdd").data, source=str(FSDD), train_minutes=0.1, valid_minutes=0.3, test_minutes=0.3,
                   snr_db_low=30.0, snr_db_high=30.0)
    plain = corpus.prepare(data, FeatureConfig(), tmp_path / "plain", lambda _line: None)
    for name in ("valid", "test"):
        assert np.array_equal(np.load(prepared / f"{name}.features_TD.npy"), getattr(plain, name).frames.features_TD)
