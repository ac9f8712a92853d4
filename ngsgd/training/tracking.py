"""Trackers receive the records of a run from the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord


class Tracker(Protocol):
    """Receives records; must return without delay and must not raise.

    A subclass defines only the methods that it needs.
    """

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        return

    def incident(self, incident: Incident) -> None:
        return

    def finished(self, report: FinalReport) -> None:
        return

    def close(self, status: str) -> None:
        """End the run; `status` is FINISHED, FAILED or KILLED."""
        return


class Trackers:
    """Passes every record to all trackers, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        for tracker in self.trackers:
            tracker.outer_iteration(record)

    def incident(self, incident: Incident) -> None:
        for tracker in self.trackers:
            tracker.incident(incident)

    def finished(self, report: FinalReport) -> None:
        for tracker in self.trackers:
            tracker.finished(report)

    def close(self, status: str) -> None:
        for tracker in self.trackers:
            tracker.close(status)
