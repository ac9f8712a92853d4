"""What a test does to the environment ends with it: the second one reads what the first one set."""

from __future__ import annotations

import os

import mlflow
import pytest

KEPT = "NGSGD_TEST_ENVIRONMENT"


@pytest.mark.parametrize("is_first", [True, False])
def test_the_environment_of_a_test_ends_with_it(is_first: bool) -> None:
    assert KEPT not in os.environ and "MLFLOW_TRACKING_URI" not in os.environ
    assert not mlflow.is_tracking_uri_set()
    os.environ[KEPT] = "set"
    mlflow.set_tracking_uri("http://127.0.0.1:1")
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:1"
