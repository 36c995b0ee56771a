"""The lanes of a backend: each event loop has connections and slots of its own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from palmette.errors import EngineStopped


class Client(Protocol):
    """What talks to the server, and belongs to the event loop that it was first used on."""

    async def close(self) -> None: ...


C = TypeVar("C", bound=Client)


class Lane(Generic[C]):
    """What one event loop uses: a client, and slots for so many requests."""

    def __init__(self, client: C, max_concurrency: int) -> None:
        self.client = client
        self.slots = asyncio.Semaphore(max_concurrency)
        self._closing: asyncio.Task[None] | None = None

    def close(self) -> asyncio.Task[None]:
        """Close the connections, once. On the loop."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.client.close())
        return self._closing


class Lanes(Generic[C]):
    """The lanes of a backend to the server called `name`, made when they are first used."""

    def __init__(self, name: str, new_client: Callable[[], C], max_concurrency: int) -> None:
        self._name = name
        self._new_client = new_client
        self._max_concurrency = max_concurrency
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Lane[C]] = (
            weakref.WeakKeyDictionary()
        )
        self._is_closed = False

    def current(self) -> Lane[C]:
        """What the running event loop uses. Raises EngineStopped once closed."""
        if self._is_closed:
            raise EngineStopped(f"the backend for {self._name} was closed")
        loop = asyncio.get_running_loop()
        lane = self._by_loop.get(loop)
        if lane is None:
            lane = self._by_loop[loop] = Lane(self._new_client(), self._max_concurrency)
        return lane

    def close(self) -> None:
        """No more requests. Connections are closed soon, and what is still under way fails."""
        self._is_closed = True
        for loop, lane in list(self._by_loop.items()):
            if loop.is_running():
                loop.call_soon_threadsafe(lane.close)

    async def aclose(self) -> None:
        """As `close`, and wait until the connections of this event loop are closed."""
        self.close()
        lane = self._by_loop.get(asyncio.get_running_loop())
        if lane is not None:
            await lane.close()
