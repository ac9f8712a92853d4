"""Engine, optimizers and examples without speech recognition; tests/without_speech.py runs them."""

from __future__ import annotations

import pytest

from tests import without_speech


@pytest.mark.slow
def test_no_test_of_engine_optimizers_and_examples_imports_speech_recognition() -> None:
    assert without_speech.run(["--collect-only", "-q", *without_speech.FOLDERS]) == 0


@pytest.mark.slow
def test_workers_and_an_example_train_without_speech_recognition() -> None:
    files = ["tests/training/test_worker.py", "tests/examples/test_examples.py"]
    assert without_speech.run([*files, "-k", "test_worker or kfac"]) == 0
