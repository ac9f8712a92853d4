"""Averages over sites in a run: sites counted, bytes over the slow network, and time to wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ngsgd.counting import counted


@dataclass(frozen=True)
class SiteFigures:
    """Sums over the averages of one site with the others."""

    num_rounds: int = 0
    # sites in these averages, and sites of the run in each of them
    num_counted: int = 0
    num_possible: int = 0
    # averages of the other sites without this one
    num_missed: int = 0
    sent_mb: float = 0.0
    received_mb: float = 0.0
    wait_s: float = 0.0

    @property
    def participation(self) -> float:
        """Sites counted / possible, 0 to 1; NaN without an average."""
        return self.num_counted / self.num_possible if self.num_possible else float("nan")

    @property
    def text(self) -> str:
        return (f"{counted(self.num_rounds, 'average')} over sites, participation {100 * self.participation:.4g} %; "
                f"{self.sent_mb:.3g} MB sent, {self.received_mb:.3g} MB received")


def sites_of(events: Iterable[Mapping[str, Any]]) -> SiteFigures:
    """Sum over the events "outer_iteration" of a run; the others are ignored."""
    rounds = [event["sites"] for event in events if event.get("event") == "outer_iteration" and event.get("sites")]

    def total(name: str) -> float:
        return float(sum(one.get(name, 0.0) for one in rounds))
    return SiteFigures(int(total("averages")), int(total("counted")), int(total("possible")), int(total("missed")),
                       total("sent_bytes") / 1e6, total("received_bytes") / 1e6, total("wait_s"))
