"""Looks at the server's `/metrics` once a second while a run goes on."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import gevent

from assay_load.drive.settings import Settings
from assay_load.measure import server
from assay_load.report import result
from assay_load.stream.client import Client
from assay_load.stream.errors import StreamError
from assay_load.stream.transport import Address

SECONDS = 1.0
LAST_LOOKS = 10
"""Tries at the end of a run, a second apart, before the server counts as gone."""
GONE = "its metrics page no longer answers"


class Sampler:
    def __init__(self, settings: Settings, client: Client) -> None:
        self._path = "/metrics"
        self._client = client
        if settings.metrics_url is not None:
            address = Address.of(settings.metrics_url)
            self._path = address.base or "/metrics"
            target = replace(settings.target(""), address=replace(address, base=""))
            self._client = Client(target, client.reactor)
        self.samples: list[server.Sample] = []
        self._restarted: str | None = None
        self._failure: str | None = "no sample was taken"
        self._greenlet: Any = None

    def start(self) -> None:
        self._look()
        self._greenlet = gevent.spawn(self._go_on)

    def _go_on(self) -> None:
        while True:
            gevent.sleep(SECONDS)
            self._look()

    def _look(self) -> bool:
        wall = time.time()
        try:
            page = self._client.get(self._path, 10.0).decode(errors="replace")
        except StreamError as error:
            self._failure = str(error)
            return False
        sample = server.parse(page, wall)
        if self.samples and self._restarted is None:
            self._restarted = server.restarted(self.samples[-1], sample)
        self.samples.append(sample)
        self._failure = None if sample.values or sample.started else "no known series there"
        return True

    def finish(self, started: float) -> result.Server:
        """A last look, and the series with counters counted from the start of the run."""
        if self._greenlet is not None:
            self._greenlet.kill()
        looks = 0
        while not self._look() and self.samples:
            looks += 1
            if looks == LAST_LOOKS:
                self._restarted = self._restarted or GONE
                break
            gevent.sleep(SECONDS)
        self._client.close()
        first = self.samples[0].values if self.samples else {}
        points = [
            result.ServerPoint(
                at=sample.wall - started,
                values={
                    k: v - first.get(k, 0.0) if k in server.COUNTERS else v
                    for k, v in sample.values.items()
                },
            )
            for sample in self.samples
        ]
        begun = self.samples[0].started if self.samples else None
        return result.Server(
            points=points,
            restarted=self._restarted,
            started=begun,
            missing=self._failure if not any(s.values for s in self.samples) else None,
        )
