"""The Locust user: one client of a chat endpoint."""

from __future__ import annotations

from typing import Any

from locust import User, task
from locust.exception import StopUser


class ChatUser(User):
    """Runs one session after the other, as the workload plans them, on a connection of its own."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._driver = environment.load_test.driver
        self._client = self._driver.client() if self._driver else None

    @task
    def session(self) -> None:
        if self._driver is None or self._client is None:
            raise StopUser
        planned = self._driver.next_session()
        if planned is None:
            self._client.close()
            raise StopUser
        session, due = planned
        self._driver.run(session, due, self._client)
        if self._driver.closed_loop:
            self._driver.pause(session)

    def on_stop(self) -> None:
        if self._client is not None:
            self._client.close()
