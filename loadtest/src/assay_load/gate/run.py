"""The gate's way from the first look at the server to the verdict."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import gevent
import msgspec

from assay_load.drive import calibrate
from assay_load.drive.conductor import commit, processor
from assay_load.drive.run import LocalRun, run
from assay_load.drive.settings import Settings
from assay_load.errors import InputError, TargetError
from assay_load.gate import baseline as baselines
from assay_load.gate import coherence, judge
from assay_load.gate.baseline import Baseline, Identity
from assay_load.gate.policy import Load, Policy, UnderLoad
from assay_load.gate.verdict import EXIT, BoundFound, Check, Verdict, combined
from assay_load.measure import server
from assay_load.report.result import RunResult
from assay_load.stream.client import Client
from assay_load.stream.errors import StreamError
from assay_load.stream.reactor import Reactor
from assay_load.workload import schema
from assay_load.workload.schema import ClosedLoop, Stop, Workload

LOCAL_CPU = "local-cpu"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
RAMP_SECONDS = 1.0
"""Between the start of a workload and of the battery beside it."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    url: str
    out: Path
    hardware: str | None = None
    """The operator's word for the server's hardware; needed where it cannot be seen."""
    image: str | None = None
    model_revision: str | None = None
    metrics_url: str | None = None


class InvalidRunError(Exception):
    """Nothing more can be learnt: the checks so far hold the reason."""


@dataclass
class Gate:
    policy: Policy
    options: Options
    say: Say
    checks: list[Check] = field(default_factory=list)
    bounds: list[BoundFound] = field(default_factory=list)
    results: dict[str, list[RunResult]] = field(default_factory=dict)
    _started: float | None = None
    """When the server's process started, at the first look."""
    _first: server.Sample | None = None

    # --- the server -------------------------------------------------------------------------------

    def look(self) -> Identity:
        """Who answers. Adds checks of what the policy demands; raises InvalidRunError."""
        reactor = Reactor()
        client = Client(self._settings(self._any_workload()).target(""), reactor)
        try:
            served = calibrate.models(client)
            page = self._metrics_page(client)
            version = self._version(client)
        except TargetError as error:
            self.add("server", "answers", "invalid", str(error))
            raise InvalidRunError from error
        finally:
            client.close()
            reactor.close()
        self._first = server.parse(page, time.time()) if page else None
        found = re.search(r'^assay_info\{[^}]*\barch="([^"]*)"', page or "", re.MULTILINE)
        identity = Identity(
            commit=commit(),
            image=self.options.image or os.environ.get("ASSAY_IMAGE"),
            model=self.policy.server.model,
            model_revision=self.options.model_revision or os.environ.get("ASSAY_MODEL_REVISION"),
            server=version,
            arch=found[1] if found else None,
            profile=self.policy.profile,
            hardware=self._hardware(),
            url=self.options.url,
        )
        self._demand(identity, served, page)
        return identity

    def _demand(self, identity: Identity, served: list[str], page: str | None) -> None:
        wanted = self.policy.server
        problems = []
        if wanted.model not in served:
            what = ", ".join(served) or "no model"
            problems.append(f"wrong model: the server serves {what}, not {wanted.model}")
        if wanted.arch is not None and identity.arch != wanted.arch:
            problems.append(f"wrong hardware: arch {identity.arch}, not {wanted.arch}")
        if wanted.metrics and (self._first is None or not self._first.values):
            problems.append("its /metrics shows no series, so a restart would go unseen")
        if problems:
            self.add("server", "is the one meant", "invalid", "; ".join(problems))
            raise InvalidRunError
        self.add("server", "is the one meant", "pass", f"{wanted.model} on {identity.hardware}")

    def _hardware(self) -> str:
        if self.options.hardware is not None:
            return self.options.hardware
        if self.policy.hardware != LOCAL_CPU:
            return self.policy.hardware
        if urlsplit(self.options.url).hostname not in LOOPBACK:
            raise InputError("--hardware: the server is elsewhere, so its processor must be named")
        return f"{processor()}, {os.cpu_count()} cores"

    def _metrics_page(self, client: Client) -> str | None:
        try:
            return client.get("/metrics", 30.0).decode(errors="replace")
        except StreamError:
            return None

    def _version(self, client: Client) -> str | None:
        try:
            answer = msgspec.json.decode(client.get("/version", 30.0))
            return f"vLLM {answer['version']}"
        except (StreamError, msgspec.MsgspecError, KeyError, TypeError):
            return None

    def still_the_same(self) -> None:
        """The server has not been restarted since the first look."""
        reactor = Reactor()
        client = Client(self._settings(self._any_workload()).target(""), reactor)
        try:
            page = self._metrics_page(client)
        finally:
            client.close()
            reactor.close()
        reasons = [r.server.restarted for rs in self.results.values() for r in rs]
        how = next((reason for reason in reasons if reason), None)
        if how is None and self._first is not None:
            if page is None:
                how = "it no longer answers"
            else:
                how = server.restarted(self._first, server.parse(page, time.time()))
        if how is None:
            self.add("server", "ran throughout", "pass", "no restart was seen")
        else:
            self.add("server", "ran throughout", "invalid", f"the server restarted: {how}")

    # --- coherence and load -----------------------------------------------------------------------

    def battery(self, when: str) -> None:
        """Ask a suite; raises InvalidRunError if that alone settles the verdict."""
        if self.policy.coherence is None:
            return
        suite = getattr(self.policy.coherence, when)
        self.say(f"coherence, {when.replace('_', ' ')}: suite {suite.suite}, tier {suite.tier}")
        if isinstance(suite, UnderLoad):
            self._under_load(suite, when)
            return
        model = self.policy.server.model
        self.keep(coherence.ask(self.options.url, model, suite, when, self.options.out))

    def _under_load(self, suite: UnderLoad, when: str) -> None:
        beside = LocalRun(self._settings(endless(suite)))
        beside.start()
        gevent.sleep(RAMP_SECONDS)
        model = self.policy.server.model
        check = coherence.ask(self.options.url, model, suite, when, self.options.out)
        beside.wind_down()
        result = beside.wait()
        result.write(self.options.out / f"load-{when}")
        self.results.setdefault(f"{suite.workload} beside the battery", []).append(result)
        self.keep(check)
        failed = ", ".join(f"{count} {kind}" for kind, count in sorted(result.errors.items()))
        done = result.figures.requests + result.warmup_requests
        self.add(
            "coherence", f"{when}: requests beside it",
            "fail" if failed else "pass" if done else "invalid",
            f"failed: {failed}" if failed else f"{done} ended, none failed",
        )  # fmt: skip

    def load(self, load: Load, repetitions: int) -> list[RunResult]:
        settings = self._settings(schema.load(load.workload, load.scale), load.scale)
        results = self.results.setdefault(load.key, [])
        for number in range(1, repetitions + 1):
            try:
                result = run(settings)
            except TargetError as error:
                self.add(load.key, f"repetition {number}", "invalid", str(error))
                break
            result.write(self.options.out / load.key / f"run-{number}")
            results.append(result)
            figures = result.figures
            self.say(
                f"{load.key}, repetition {number} of {repetitions}: {figures.requests} requests,"
                f" {result.failed} failed, {figures.output_tokens_per_second:.1f} output tokens/s"
            )
            if not result.complete:
                break
        return results

    def _settings(self, workload: Workload, scale: str | None = None) -> Settings:
        model, page = self.policy.server.model, self.options.metrics_url
        return Settings(self.options.url, workload, scale, model, metrics_url=page)

    def _any_workload(self) -> Workload:
        first = self.policy.loads[0]
        return schema.load(first.workload, first.scale)

    # --- checks -----------------------------------------------------------------------------------

    def add(self, part: str, name: str, outcome: str, reason: str) -> None:
        self.keep(Check.model_validate(
            {"part": part, "name": name, "outcome": outcome, "reason": reason}
        ))  # fmt: skip

    def keep(self, check: Check) -> None:
        self.checks.append(check)
        self.say(f"{check.outcome}: {check.part}, {check.name}: {check.reason}")

    @property
    def sound(self) -> bool:
        return all(check.outcome == "pass" for check in self.checks)


def endless(suite: UnderLoad) -> Workload:
    """The suite's workload as a closed loop that only the suite's end ends."""
    workload = schema.load(suite.workload, suite.scale)
    changes = {
        "arrival": ClosedLoop(kind="closed-loop", concurrency=suite.concurrency),
        "stop": Stop(seconds=coherence.SECONDS),
    }
    return workload.model_copy(update=changes)


def judge_release(policy: Policy, options: Options, known: Baseline | None, say: Say) -> Verdict:
    """Coherence, load, coherence under load, coherence after load. What fails the release ends
    the run early: nothing that comes later could change the verdict to a pass."""
    gate = Gate(policy, options, say)
    started, clock = time.time(), time.monotonic()
    identity = Identity(
        commit=commit(), image=options.image, model=policy.server.model,
        model_revision=options.model_revision, server=None, arch=None, profile=policy.profile,
        hardware=options.hardware or policy.hardware, url=options.url,
    )  # fmt: skip
    try:
        identity = gate.look()
        _demand_baseline(gate, known, identity)
        gate.battery("before")
        if gate.sound:
            for load in policy.loads:
                _load_and_judge(gate, load, known)
        if gate.sound:
            gate.battery("under_load")
        if gate.sound:
            gate.battery("after")
    except InvalidRunError:
        pass
    except TargetError as error:
        gate.add("server", "answers", "invalid", str(error))
    else:
        gate.still_the_same()
    outcome = combined(gate.checks)
    return Verdict(
        verdict=outcome, exit_code=EXIT[outcome], policy=policy.name, unmeasured=policy.unmeasured,
        started=started, seconds=time.monotonic() - clock, identity=identity, checks=gate.checks,
        bounds=gate.bounds,
    )  # fmt: skip


def _demand_baseline(gate: Gate, known: Baseline | None, identity: Identity) -> None:
    if known is None:
        why = (
            f"no bound was ever measured on this hardware ({identity.hardware}):"
            " record a baseline with assay-gate baseline, and give it with --baseline"
        )
    else:
        why = baselines.mismatch(known, gate.policy, identity) or ""
    if why:
        gate.add("server", "has a baseline", "invalid", why)
        raise InvalidRunError


def _load_and_judge(gate: Gate, load: Load, known: Baseline | None) -> None:
    results = gate.load(load, gate.policy.repetitions)
    if not results:
        return
    gate.keep(judge.counts(load, results))
    if len(results) < gate.policy.repetitions or any(not r.complete for r in results):
        return
    for rule in load.bounds:
        check, found = judge.bound(load, rule, results, known)
        gate.keep(check)
        if found is not None:
            gate.bounds.append(found)


def record(policy: Policy, options: Options, repetitions: int, say: Say) -> Baseline | None:
    """A baseline of a coherent server; None, and the reasons said, if it is not one."""
    gate = Gate(policy, options, say)
    try:
        identity = gate.look()
        gate.battery("before")
        if gate.sound:
            for load in policy.loads:
                gate.keep(judge.counts(load, gate.load(load, repetitions)))
        gate.still_the_same()
    except InvalidRunError:
        return None
    if not gate.sound:
        return None
    loads = {load.key: baselines.measured(gate.results[load.key]) for load in policy.loads}
    return Baseline(recorded=time.time(), policy=policy.name, identity=identity, loads=loads)
