"""A model of the GEMM's pipelines, searched exhaustively.

Roles are sequences of the steps that `gemm` performs, built from the same `GemmConfig`: stages,
accumulators, arrivals, transaction bytes. Barriers behave as the PTX ISA says: a phase completes
when its pending arrivals and its pending bytes are both zero, and a wait for parity p passes while
the phase of parity p is not the current one. Copies and MMAs are asynchronous: issued at one step,
they finish later, in any order that the hardware allows (MMAs of one CTA in order).

`search` walks every interleaving and reports deadlocks, writes to buffers somebody still reads,
reads of buffers that are not whole, and bytes or arrivals that overflow a phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from assay_kernels.kernels.sm100.config import GemmConfig


@dataclass(frozen=True)
class Protocol:
    """What the kernel's synchronisation is made of; a mutant changes one of these.

    Epilogue warps do the same thing at the same barriers; `warps` of them are modelled a CTA, and
    an accumulator needs as many arrivals as there are modelled warps in all.
    """

    stages: int
    acc_stages: int
    ctas: int
    warps: int
    bytes_a_cta: int  # that one CTA's copies of a stage bring
    expected_bytes: int  # that the leader's full barrier is told to wait for
    acc_releases: int
    load_phase: int = 1  # first parity that the load warp waits for
    mma_phase: int = 0
    acc_free_phase: int = 1
    epilogue_phase: int = 0
    load_waits: bool = True  # for an empty stage
    mma_waits_full: bool = True
    mma_waits_free: bool = True
    epilogue_waits: bool = True
    release_after_commit: bool = True  # stages are freed when the MMAs that read them are done
    release_after_read: bool = True  # accumulators are freed when they have been read
    free_peer: bool = True  # a commit frees the stage in the peer CTA too
    drain: bool = True  # the load warp waits for its stages before it ends

    @classmethod
    def of(cls, config: GemmConfig, *, warps: int | None = None) -> Protocol:
        """The protocol that `gemm.Gemm` compiles for `config`; `warps` shrinks the epilogue."""
        each = config.acc_releases // config.ctas if warps is None else warps
        return cls(
            stages=config.stages,
            acc_stages=config.acc_stages,
            ctas=config.ctas,
            warps=each,
            bytes_a_cta=config.stage_bytes,
            expected_bytes=config.transaction_bytes,
            acc_releases=each * config.ctas,
        )

    def barrier_arrivals(self) -> list[int]:
        """Arrivals of every barrier in the order of the kernel's initialisation."""
        return [1] * (2 * self.stages) + [1, self.acc_releases] * self.acc_stages


class Barrier(NamedTuple):
    """parity of the current phase, arrivals and bytes it still waits for."""

    parity: int
    arrivals: int
    bytes: int


class Step(NamedTuple):
    """kind: wait, expect, copy, mma, commit, read, arrive; the rest is what it acts on."""

    kind: str
    barrier: tuple[str, int, int] | None = None  # (name, CTA, index)
    parity: int = 0
    buffer: tuple[str, int, int] | None = None
    value: int = 0
    token: int = 0  # which k tile or output tile this is about


class State(NamedTuple):
    positions: tuple[int, ...]
    barriers: tuple[Barrier, ...]
    flying: tuple[Step, ...]  # copies in flight
    queue: tuple[Step, ...]  # MMAs and commits, in order
    buffers: tuple[tuple[int, ...], ...]  # what each buffer holds, a CTA's part of a stage each


@dataclass(frozen=True)
class Problem:
    kind: str  # deadlock, race, overflow
    detail: str


@dataclass(frozen=True)
class Outcome:
    problems: tuple[Problem, ...]
    states: int


def load_role(p: Protocol, cta: int, k_tiles: int, tiles: int) -> Iterator[Step]:
    """`Gemm._load`."""
    stage, phase = 0, p.load_phase
    for token in range(k_tiles * tiles):
        if p.load_waits:
            yield Step("wait", ("empty", cta, stage), phase)
        if cta == 0:
            yield Step("expect", ("full", 0, stage), value=p.expected_bytes)
        yield Step("copy", ("full", 0, stage), 0, ("stage", cta, stage), p.bytes_a_cta, token)
        stage = (stage + 1) % p.stages
        phase ^= stage == 0
    for _ in range(p.stages if p.drain else 0):
        yield Step("wait", ("empty", cta, stage), phase)
        stage = (stage + 1) % p.stages
        phase ^= stage == 0
    yield Step("leave", buffer=("stage", cta, 0))


def mma_role(p: Protocol, k_tiles: int, tiles: int) -> Iterator[Step]:
    """`Gemm._multiply`, in the leader."""
    stage, phase, acc, acc_phase = 0, p.mma_phase, 0, p.acc_free_phase
    peers = p.ctas if p.free_peer else 1
    for tile in range(tiles):
        if p.mma_waits_free:
            yield Step("wait", ("free", 0, acc), acc_phase)
        for i in range(k_tiles):
            if p.mma_waits_full:
                yield Step("wait", ("full", 0, stage), phase)
            token = tile * k_tiles + i
            yield Step("mma", None, acc, ("stage", 0, stage), i == 0, token)
            for cta in range(peers):
                kind = "commit" if p.release_after_commit else "arrive"
                yield Step(kind, ("empty", cta, stage))
            stage = (stage + 1) % p.stages
            phase ^= stage == 0
        for cta in range(p.ctas):
            yield Step("commit", ("ready", cta, acc))
        acc = (acc + 1) % p.acc_stages
        acc_phase ^= acc == 0


def epilogue_role(p: Protocol, cta: int, k_tiles: int, tiles: int) -> Iterator[Step]:
    """One warp of `Gemm._epilogue`."""
    acc, phase = 0, p.epilogue_phase
    for tile in range(tiles):
        if p.epilogue_waits:
            yield Step("wait", ("ready", cta, acc), phase)
        read = [Step("read", None, acc, value=i, token=(tile + 1) * k_tiles - 1) for i in (0, 1)]
        free = Step("arrive", ("free", 0, acc))
        # Two reads stand for the chunks: an early release comes between them.
        yield read[0]
        yield from (read[1], free) if p.release_after_read else (free, read[1])
        acc = (acc + 1) % p.acc_stages
        phase ^= acc == 0


class _Machine:
    def __init__(self, p: Protocol, k_tiles: int, tiles: int) -> None:
        self.p = p
        self.k_tiles = k_tiles
        self.roles = [list(load_role(p, cta, k_tiles, tiles)) for cta in range(p.ctas)]
        self.roles.append(list(mma_role(p, k_tiles, tiles)))
        for cta in range(p.ctas):
            self.roles += [list(epilogue_role(p, cta, k_tiles, tiles)) for _ in range(p.warps)]
        names = [("full", 0, s) for s in range(p.stages)]
        names += [("empty", cta, s) for cta in range(p.ctas) for s in range(p.stages)]
        names += [("ready", cta, a) for cta in range(p.ctas) for a in range(p.acc_stages)]
        names += [("free", 0, a) for a in range(p.acc_stages)]
        self.index = {name: i for i, name in enumerate(names)}
        self.counts = [p.acc_releases if name[0] == "free" else 1 for name in names]
        self.problems: dict[Problem, None] = {}

    def start(self) -> State:
        stages = (-1,) * (self.p.stages * self.p.ctas)
        return State(
            (0,) * len(self.roles),
            tuple(Barrier(0, count, 0) for count in self.counts),
            (),
            (),
            (stages, (-1,) * self.p.acc_stages),
        )

    def complain(self, kind: str, detail: str) -> None:
        self.problems[Problem(kind, detail)] = None

    def signal(
        self, barriers: tuple[Barrier, ...], name: tuple[str, int, int], arrivals: int, bytes_: int
    ) -> tuple[Barrier, ...]:
        at = self.index[name]
        parity, pending, left = barriers[at]
        pending -= arrivals
        left += bytes_
        if pending < 0:
            self.complain("overflow", f"{name} gets more arrivals than its phase has")
            pending = 0
        if pending == 0 and left == 0:
            parity, pending = parity ^ 1, self.counts[at]
        return (*barriers[:at], Barrier(parity, pending, left), *barriers[at + 1 :])

    def slot(self, buffer: tuple[str, int, int]) -> int:
        return buffer[1] * self.p.stages + buffer[2]

    def moves(self, s: State) -> Iterator[State]:
        for i, flying in enumerate(s.flying):
            assert flying.barrier is not None
            assert flying.buffer is not None
            stages = list(s.buffers[0])
            stages[self.slot(flying.buffer)] = flying.token
            yield s._replace(
                flying=(*s.flying[:i], *s.flying[i + 1 :]),
                barriers=self.signal(s.barriers, flying.barrier, 0, -flying.value),
                buffers=(tuple(stages), s.buffers[1]),
            )
        if s.queue:
            yield self.retire(s)
        for role, steps in enumerate(self.roles):
            if s.positions[role] < len(steps):
                moved = self.step(s, steps[s.positions[role]])
                if moved is not None:
                    at = s.positions[role] + 1
                    yield moved._replace(
                        positions=(*s.positions[:role], at, *s.positions[role + 1 :])
                    )

    def retire(self, s: State) -> State:
        """The oldest MMA or commit finishes."""
        done, queue = s.queue[0], s.queue[1:]
        if done.kind == "commit":
            assert done.barrier is not None
            return s._replace(queue=queue, barriers=self.signal(s.barriers, done.barrier, 1, 0))
        assert done.buffer is not None
        for cta in range(self.p.ctas):
            held = s.buffers[0][self.slot(("stage", cta, done.buffer[2]))]
            if held != done.token:
                self.complain("race", f"an MMA reads k tile {held} where it wants {done.token}")
        accs = list(s.buffers[1])
        accs[done.parity] = done.token
        return s._replace(queue=queue, buffers=(s.buffers[0], tuple(accs)))

    def step(self, s: State, step: Step) -> State | None:
        if step.kind == "wait":
            assert step.barrier is not None
            passed = s.barriers[self.index[step.barrier]].parity != step.parity
            return s if passed else None
        if step.kind in ("expect", "arrive"):
            assert step.barrier is not None
            return s._replace(barriers=self.signal(s.barriers, step.barrier, 1, step.value))
        if step.kind == "copy":
            for done in s.queue:
                if done.buffer is not None and step.buffer is not None:
                    if done.kind == "mma" and done.buffer[2] == step.buffer[2]:
                        self.complain("race", "a copy overwrites a stage that an MMA still reads")
            if any(flying.buffer == step.buffer for flying in s.flying):
                self.complain("race", "two copies into one stage")
            return s._replace(flying=tuple(sorted((*s.flying, step))))
        if step.kind == "mma":
            stage = step.buffer[2] if step.buffer is not None else 0
            if any(f.buffer is not None and f.buffer[2] == stage for f in s.flying):
                self.complain("race", "an MMA is issued on a stage that is still being filled")
            if step.value and not self.all_read(s, step):
                self.complain("race", "an MMA overwrites an accumulator that is still read")
            return s._replace(queue=(*s.queue, step))
        if step.kind == "commit":
            return s._replace(queue=(*s.queue, step))
        if step.kind == "leave":
            assert step.buffer is not None
            cta = step.buffer[1]
            if any(f.buffer is not None and f.buffer[1] == cta for f in s.flying):
                self.complain("race", "a CTA ends while copies into it are in flight")
            return s
        assert step.kind == "read"
        if s.buffers[1][step.parity] != step.token:
            self.complain("race", f"an accumulator is read at {s.buffers[1][step.parity]}")
        return s

    def all_read(self, s: State, mma: Step) -> bool:
        """Whether every epilogue warp is done with the accumulator that `mma` begins anew."""
        tile = mma.token // self.k_tiles
        first = self.p.ctas + 1
        for role in range(first, len(self.roles)):
            for step in self.roles[role][s.positions[role] :]:
                if step.kind == "read" and step.parity == mma.parity:
                    if (step.token + 1) // self.k_tiles - 1 < tile:
                        return False
        return True


def search(
    protocol: Protocol, *, k_tiles: int = 3, tiles: int = 3, limit: int = 2_000_000
) -> Outcome:
    """Every interleaving of `tiles` output tiles of `k_tiles` stages each.

    Stops at the first state with a problem. Raises RuntimeError past `limit` states.
    """
    machine = _Machine(protocol, k_tiles, tiles)
    begin = machine.start()
    seen = {begin}
    stack = [begin]
    ends = tuple(len(role) for role in machine.roles)
    while stack:
        state = stack.pop()
        following = list(machine.moves(state))
        if machine.problems:
            break
        if not following:
            if state.positions != ends or state.flying or state.queue:
                stuck = [
                    machine.roles[i][at] for i, at in enumerate(state.positions) if at < ends[i]
                ]
                machine.complain("deadlock", f"waiting: {[s.barrier for s in stuck]}")
                break
        for new in following:
            if new not in seen:
                seen.add(new)
                stack.append(new)
        if len(seen) > limit:
            raise RuntimeError(f"more than {limit} states")
    return Outcome(tuple(machine.problems), len(seen))


def mutants(p: Protocol) -> dict[str, Protocol]:
    """One mistake each. Every one must be found by `search`."""
    changed = {
        "load warp does not wait": replace(p, load_waits=False),
        "load warp waits for the wrong phase": replace(p, load_phase=0),
        "MMA does not wait for a full stage": replace(p, mma_waits_full=False),
        "MMA waits for the wrong phase of a stage": replace(p, mma_phase=1),
        "MMA does not wait for a free accumulator": replace(p, mma_waits_free=False),
        "MMA waits for the wrong phase of an accumulator": replace(p, acc_free_phase=0),
        "epilogue does not wait": replace(p, epilogue_waits=False),
        "epilogue waits for the wrong phase": replace(p, epilogue_phase=1),
        "too few bytes expected": replace(p, expected_bytes=p.expected_bytes - 512),
        "too many bytes expected": replace(p, expected_bytes=p.expected_bytes + 512),
        "stage released before the MMA is done": replace(p, release_after_commit=False),
        "accumulator released before it is read": replace(p, release_after_read=False),
        "one arrival too few frees an accumulator": replace(p, acc_releases=p.acc_releases - 1),
        "one arrival too many is needed": replace(p, acc_releases=p.acc_releases + 1),
        "load warp leaves while copies are in flight": replace(p, drain=False),
    }
    if p.ctas == 2:
        changed["bytes of one CTA only"] = replace(p, expected_bytes=p.bytes_a_cta)
        changed["the peer's stage is not freed"] = replace(p, free_peer=False)
    if p.acc_releases < 2:
        del changed["one arrival too few frees an accumulator"]
    return changed
