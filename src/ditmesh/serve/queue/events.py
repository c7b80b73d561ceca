"""The events of a job in memory: numbered, limited in number, for any number of readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ..types import ENDED, Event, EventName

# Maximum number of events of a job. Beyond that the oldest events that later ones supersede are dropped.
MAX_EVENTS = 512
SUPERSEDED_EVENTS = frozenset({"queued", "step", "paused"})


class EventLog:
    """Events of one job.

    Readers that are late get what they missed, except for previews of which there is a newer one, and, of jobs with
    very many, steps of long ago.

    Attributes:
        events: those kept.
        ended: no more will come.
        readers: number of readers that wait for more.
    """

    def __init__(self, first: int = 1) -> None:
        """``first``: number of the first event."""
        self.events: list[Event] = []
        self.ended = False
        self.readers = 0
        self._next = first
        self._more = asyncio.Event()

    def publish(self, name: EventName, data: dict[str, Any]) -> Event | None:
        """Add an event, and return it; one with the name of a final status is the last, after which there is none."""
        if self.ended:
            return None
        if name == "preview":
            old = (entry for entry in self.events if entry.event == name and entry.data["image"] == data["image"])
            if (last := next(old, None)) is not None:
                self.events.remove(last)
        event = Event(id=self._next, event=name, data=data)
        self.events.append(event)
        self._next += 1
        if len(self.events) > MAX_EVENTS:
            past = [entry for entry in self.events if entry.event in SUPERSEDED_EVENTS][: MAX_EVENTS // 4]
            gone = {entry.id for entry in past}
            self.events = [entry for entry in self.events if entry.id not in gone]
        if name in ENDED:
            self.events = [entry for entry in self.events if entry.event != "preview"]
        self._wake(ended=name in ENDED)
        return event

    def close(self) -> None:
        """End all readers."""
        self._wake(ended=True)

    def _wake(self, ended: bool) -> None:
        self.ended = self.ended or ended
        more, self._more = self._more, asyncio.Event()
        more.set()

    async def follow(self, after: int) -> AsyncIterator[Event]:
        """Iterate over the events after number ``after``, including future ones, until the last."""
        self.readers += 1
        try:
            while True:
                # Before reading, so that events during the iteration are not missed.
                more = self._more
                for event in [one for one in self.events if one.id > after]:
                    after = event.id
                    yield event
                if more is self._more:
                    if self.ended:
                        return
                    await more.wait()
        finally:
            self.readers -= 1
