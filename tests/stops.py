"""A request to stop that comes after some questions, for runs in this process."""

from __future__ import annotations


class StopAfter:
    """Requests a stop after some questions of the coordinator.

    Args:
        num_questions: questions that are answered with no.
        at_once: the time to finish is over as soon as the stop is requested.
    """

    def __init__(self, num_questions: int, at_once: bool = False) -> None:
        self.left = num_questions
        self.at_once = at_once

    def requested(self) -> bool:
        self.left -= 1
        return self.left < 0

    def expired(self) -> bool:
        return self.at_once and self.requested()
