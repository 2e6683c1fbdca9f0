"""Where a worker says it is when its card is behind the host."""

from typing import Any

from gpp.runtime.hang_detection.status import TRAINING, AbstractStatus
from gpp.runtime.worker.clock import CardStatus


class Said(AbstractStatus):
    """Notes the positions that it is told."""

    def __init__(self) -> None:
        self.index = -1

    def at(self, index: int) -> None:
        self.index = index

    def waiting(self, waits: bool) -> None:
        return None

    def begin(self, phase: int, step: int) -> None:
        self.index = 0

    def enter(self, phase: int) -> None:
        return None


class SlowCard:
    """A card whose events are done when the test says so."""

    def __init__(self) -> None:
        self.events: list[SlowCard.Event] = []

    class Event:
        done = False

        def record(self) -> None:
            return None

        def query(self) -> bool:
            return self.done

    def event(self) -> Event:
        self.events.append(SlowCard.Event())
        return self.events[-1]


def test_the_position_is_that_of_the_card_and_not_of_the_host() -> None:
    said, card = Said(), SlowCard()
    slow: Any = card
    status = CardStatus(said, slow)
    status.begin(TRAINING, 0)
    for index in range(4):
        status.at(index)
    status.look()
    assert said.index == 0
    card.events[0].done = card.events[1].done = card.events[3].done = True
    status.look()
    assert said.index == 1  # number 1 has begun, and what stands before 2 is not over
    card.events[2].done = True
    status.look()
    assert said.index == 3
    status.at(4)
    status.begin(TRAINING, 1)
    card.events[4].done = True
    status.look()
    assert said.index == 0  # an event of the step before says nothing of this one
