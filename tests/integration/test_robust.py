"""The recipes for unseen voices: from the command line to a word error rate, on a corpus of two minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.service import WER_LINE, Service

FSDD = Path(__file__).parents[2].parent / "shared" / "data" / "fsdd"

pytestmark = pytest.mark.end_to_end


def test_digits_robust_trains(tmp_path: Path) -> None:
    done = Service(tmp_path).call("recipe=digits_robust", "cluster=in_process", "cluster.num_workers=1")
    assert done.returncode == 0, done.stderr
    assert len(WER_LINE.findall(done.stdout)) == 2


@pytest.mark.skipif(not FSDD.is_dir(), reason="needs ../shared/data/fsdd")
def test_fsdd_robust_mixes_recordings_and_synthetic_digits(tmp_path: Path) -> None:
    service = Service(tmp_path)
    done = service.call("recipe=fsdd_robust", f"data.source={FSDD}", "data.synthetic_minutes=0.5", "cluster=in_process",
                        "cluster.num_workers=1")
    assert done.returncode == 0, done.stderr
    assert len(WER_LINE.findall(done.stdout)) == 2
    (words,) = tmp_path.glob("data/fsdd-*/train.json")
    content = words.read_text()
    # an espeak-ng voice, a speaker of FSDD, and other voices of theirs
    assert "en-US" in content and "jackson" in content and "vc1-" in content
