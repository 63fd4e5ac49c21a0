"""Which ends of a tune count as finished."""

from types import SimpleNamespace
from typing import Any

import pytest

from tune_model.pipeline.tuning import exit_code
from tune_model.tune.choice import STATUSES

FINISHED = {"tuned", "no gain", "layout", "invariant", "disturbed"}


def tuning(status: str, stopped: str = "") -> Any:
    choices = (SimpleNamespace(status="tuned"), SimpleNamespace(status=status))
    return SimpleNamespace(stopped=stopped, choices=choices)


@pytest.mark.parametrize("status", sorted(STATUSES))
def test_every_status_is_finished_or_not(status: str):
    """A finished batch-invariant tune ended with exit code 3, as if something had failed."""
    assert exit_code(tuning(status)) == (0 if status in FINISHED else 3)


def test_what_ended_early_says_so():
    assert exit_code(tuning("no gain", "budget")) == 3
    assert exit_code(tuning("no gain", "interrupted")) == 130
