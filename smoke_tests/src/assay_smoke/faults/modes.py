"""The ways in which output goes bad, one class each.

Every mode says why it exists, what it takes (all drawn when not given), and which checks are meant
to catch it, or that it is an outage and no verdict may come of it.
"""

from __future__ import annotations

import inspect
import random
import zlib
from abc import ABC
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field

from assay_smoke.errors import CouldNotRunError
from assay_smoke.faults.model import WORDLIST, Step
from assay_smoke.faults.tokens import END_THINK, EOS
from assay_smoke.suite import Share, Strict, validated

FOREIGN = {
    "cjk": "的一是不了人我在有他这中大来上国个到说们",
    "cyrillic": "жшщюяфцэъы",
    "arabic": "ابتثجحخدذر",
    "hangul": "가나다라마바사아자차",
    "unprintable": "\ufffd\u0003\u200b\ue000\x1b",
}
KINDS: tuple[Literal["words", "cjk", "cyrillic", "arabic", "hangul", "unprintable"], ...] = (
    "words", "words", "cjk", "cyrillic", "arabic", "hangul", "unprintable",
)  # fmt: skip
Garbage = Literal["words", "cjk", "cyrillic", "arabic", "hangul", "unprintable", "mixed"]


@dataclass
class Request:
    """What a mode may know of the request that it spoils."""

    number: int
    """Requests before it, since the server started."""
    prompt_length: int
    prompt_key: int
    seen: int
    """Times that this very prompt came before."""
    prefix_seen: bool
    """Whether its first tokens are in the prefix cache."""
    logprobs: bool
    stream: bool
    chat: bool
    tools: bool
    schema: bool
    rng: random.Random
    in_flight: Any = None
    """() -> requests being answered now."""
    hit: bool = False
    """Drawn once for the request: whether the fault is to show in it."""


@dataclass
class Reply:
    """A whole answer before it goes onto the wire."""

    steps: list[Step]
    prefilled: list[Step | None]
    """How likely each prompt token was."""
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = "stop"


class Mode(ABC):
    """One way to fail. Hooks are called in the order in which they stand here."""

    name: ClassVar[str]
    meant: ClassVar[tuple[str, ...]] = ()
    """Checks that are meant to fail; empty: an outage, exit code 2."""

    class Params(Strict):
        pass

    def __init__(self, params: Any, seed: int) -> None:
        self.params = params
        self.seed = seed

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        """Parameters at random, within what the mode claims to be."""
        return {}

    def begin(self, request: Request) -> None:
        """Decide whether the request is to be hit."""
        request.hit = request.rng.random() < getattr(self.params, "rate", 1.0)

    def status(self, request: Request) -> int:
        """HTTP status."""
        return 200

    def step(self, request: Request, index: int, step: Step) -> Step:
        """The token that is emitted at `index`."""
        return step

    def read(self, request: Request, index: int, step: Step) -> Step:
        """The prompt token at `index` as prefill sees it."""
        return step

    def reply(self, request: Request, reply: Reply) -> None:  # noqa: B027
        """The whole answer."""

    def logprob(self, request: Request, index: int, value: float, reply: Reply) -> Any:
        """What stands on the wire for a log-probability; `NAN_LITERAL` for the bare word."""
        return value

    def delay(self, request: Request, index: int) -> float:
        """Seconds before the token at `index`."""
        return 0.0

    def events(self, request: Request, events: list[bytes]) -> list[bytes]:
        """A stream's events, whole, as they would be sent."""
        return events

    def metrics(self, metrics: dict[str, float]) -> None:  # noqa: B027
        """What the server counts of itself."""

    @classmethod
    def why(cls) -> str:
        return inspect.cleandoc(cls.__doc__ or "")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            assert cls.__doc__, cls.__name__
            assert cls.name not in MODES, cls.name
            MODES[cls.name] = cls


MODES: dict[str, type[Mode]] = {}


def build(name: str, parameters: dict[str, Any], seed: int) -> Mode:
    """Raises CouldNotRunError for an unknown mode or parameter."""
    if name not in MODES:
        raise CouldNotRunError(f"--mode {name}: there are {', '.join(sorted(MODES))}")
    mode = MODES[name]
    drawn = mode.draw(random.Random(f"{seed}/{name}"))
    return mode(validated(mode.Params, drawn | parameters, f"--param of {name}"), seed)


def garbage(rng: random.Random, kind: Garbage) -> str:
    """A token that has nothing to do with anything."""
    if kind == "mixed":
        kind = rng.choice(KINDS)
    if kind == "words":
        return " " + rng.choice(WORDLIST)
    return "".join(rng.choice(FOREIGN[kind]) for _ in range(rng.randint(1, 2)))


def spoiled(rng: random.Random, step: Step, kind: Garbage) -> Step:
    """Corrupt logits: another token is the likeliest, and the server is not sure of it."""
    token = garbage(rng, kind)
    if token == step.token:
        token = garbage(rng, "cyrillic")
    logprob = -rng.uniform(0.3, 2.5)
    return Step(token, logprob, [(token, logprob), (step.token, logprob - rng.uniform(1.5, 4))])


def wrong_digit(rng: random.Random, step: Step) -> Step:
    """The same, but fluent: a digit becomes another."""
    if not step.token.isdigit():
        return step
    token = str((int(step.token) + rng.randint(1, 9)) % 10)
    logprob = -rng.uniform(0.05, 0.6)
    return Step(token, logprob, [(token, logprob), (step.token, logprob - rng.uniform(1.5, 4))])


class Good(Mode):
    """Nothing is wrong: what every check must pass."""

    name = "good"


class Wrong(Mode):
    """Corruption that shows at some tokens only: where, says the subclass."""

    class Params(Strict):
        kind: Garbage = "mixed"

    def strikes(self, request: Request, index: int) -> bool:
        """Whether the token at `index` is spoiled."""
        return False

    def step(self, request: Request, index: int, step: Step) -> Step:
        if step.token in (EOS, END_THINK) or not self.strikes(request, index):
            return step
        return spoiled(request.rng, step, self.params.kind)


class GarbageTokens(Wrong):
    """Tokens at random: a block scale of ones, swapped nibbles, uninitialised memory. Prefill and
    decoding share the weights, so both are wrong."""

    name = "garbage"
    meant = ("known-answers", "perplexity")

    class Params(Wrong.Params):
        rate: Share = 0.5

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.25, 1.0), "kind": rng.choice(["words", "cjk", "mixed"])}

    def begin(self, request: Request) -> None:
        request.hit = True

    def strikes(self, request: Request, index: int) -> bool:
        return bool(request.rng.random() < self.params.rate)

    def read(self, request: Request, index: int, step: Step) -> Step:
        if request.rng.random() >= self.params.rate:
            return step
        own = -request.rng.uniform(5, 14)
        return Step(
            step.token, own, [(" " + WORDLIST[index % len(WORDLIST)], -0.5), (step.token, own)]
        )


class Repeats(Mode):
    """After some tokens the same few come again and again: attention has lost its past."""

    name = "repetition"
    meant = ("repetition", "long-generation")

    class Params(Strict):
        after: int = Field(default=60, ge=1)
        period: int = Field(default=7, ge=1, le=128)

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"after": rng.randint(20, 1500), "period": rng.randint(1, 40)}

    def begin(self, request: Request) -> None:
        request.hit = True
        self.past: dict[int, list[Step]] = getattr(self, "past", {})
        self.past[request.number] = []

    def step(self, request: Request, index: int, step: Step) -> Step:
        past = self.past[request.number]
        if index >= self.params.after + self.params.period:
            before = past[index - self.params.period]
            step = Step(before.token, -0.01, [(before.token, -0.01), (step.token, -6.0)])
        past.append(step)
        return step


class Empty(Mode):
    """`200 OK` and no content."""

    name = "empty"
    meant = ("empty-content",)

    class Params(Strict):
        rate: Share = 0.5

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.1, 1.0)}

    def reply(self, request: Request, reply: Reply) -> None:
        if request.hit and request.chat:
            reply.steps = reply.steps[-1:]
            reply.content, reply.reasoning, reply.calls, reply.finish = "", "", [], "stop"


class ReasoningOnly(Mode):
    """Everything is taken for reasoning: the parser never saw the end of the thought."""

    name = "reasoning-only"
    meant = ("empty-content",)

    class Params(Strict):
        rate: Share = 0.5

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.1, 1.0)}

    def reply(self, request: Request, reply: Reply) -> None:
        if request.hit and request.chat and not reply.calls:
            reply.reasoning, reply.content = reply.reasoning + reply.content, ""


NAN_LITERAL = float("nan")


class Nan(Mode):
    """Logits that are no numbers. The text may look right: argmax over NaN gives some token."""

    name = "nan"
    meant = ("nan-logprobs",)

    class Params(Strict):
        form: Literal["500", "null", "-9999", "NaN", "text", "Infinity"] = "null"
        rate: Share = 0.3
        after: int = Field(default=0, ge=0)
        """Tokens of an answer that are still numbers."""

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        form = rng.choice(["500", "null", "-9999", "NaN", "text", "Infinity"])
        return {"form": form, "rate": rng.uniform(0.1, 1.0), "after": rng.randint(0, 4)}

    def begin(self, request: Request) -> None:
        # Of a prompt, not of a time: the same prompt has NaN again.
        request.hit = random.Random(f"{self.seed}/{request.prompt_key}").random() < self.params.rate

    def status(self, request: Request) -> int:
        wrong = self.params.form == "500" and request.hit and request.logprobs
        return 500 if wrong and not request.stream else 200

    def logprob(self, request: Request, index: int, value: float, reply: Reply) -> Any:
        if not request.hit or index < self.params.after:
            return value
        match self.params.form:
            case "500" | "null":  # a stream cannot answer 500 any more: vLLM sends null there
                return None
            case "-9999":
                return -9999.0
            case "text":
                return "nan"
            case "Infinity":
                return float("inf")
        return NAN_LITERAL


class LengthResidue(Mode):
    """A wrong digit where the prompt's length has one residue (vLLM issue 55927: 3 mod 4)."""

    name = "length-residue"
    meant = ("boundary-lengths",)

    class Params(Strict):
        modulus: int = Field(default=4, ge=2)
        residue: int = Field(default=3, ge=0)
        rate: Share = 1.0

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"residue": rng.randrange(4), "rate": rng.uniform(0.6, 1.0)}

    def begin(self, request: Request) -> None:
        fits = request.prompt_length % self.params.modulus == self.params.residue
        request.hit = fits and request.rng.random() < self.params.rate

    def step(self, request: Request, index: int, step: Step) -> Step:
        return wrong_digit(request.rng, step) if request.hit else step


class RareTokens(Wrong):
    """One token in thousands (vLLM issue 41985: 0.03 %), fluent or foreign. Decoding only."""

    name = "rare-corruption"
    meant = ("rescoring",)

    class Params(Wrong.Params):
        one_in: int = Field(default=3000, ge=1)

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"one_in": rng.randint(2700, 3300), "kind": rng.choice(["words", "mixed"])}

    def strikes(self, request: Request, index: int) -> bool:
        return bool(request.rng.random() < 1 / self.params.one_in)


class PastPosition(Wrong):
    """Clean up to some position, corrupt beyond it (sglang issue 33397: from 4 k on)."""

    name = "past-4k"
    meant = ("long-generation", "rescoring")

    class Params(Wrong.Params):
        position: int = Field(default=4096, ge=1)
        rate: Share = 0.5

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"position": rng.randint(4000, 4300), "rate": rng.uniform(0.1, 1.0),
                "kind": rng.choice(["words", "cjk", "mixed"])}  # fmt: skip

    def strikes(self, request: Request, index: int) -> bool:
        late = request.prompt_length + index >= self.params.position
        return bool(late and request.rng.random() < self.params.rate)


class UnderConcurrency(Wrong):
    """Only while others are being answered too."""

    name = "concurrency"
    meant = ("concurrent-streams", "rescoring")

    class Params(Wrong.Params):
        requests: int = Field(default=4, ge=2)
        """Being answered at the same time."""
        rate: Share = 0.1

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"requests": rng.randint(2, 8), "rate": rng.uniform(0.03, 0.5),
                "kind": rng.choice(["words", "mixed"])}  # fmt: skip

    def strikes(self, request: Request, index: int) -> bool:
        busy = request.in_flight() >= self.params.requests
        return bool(busy and request.rng.random() < self.params.rate)


class SecondRequest(Mode):
    """Only when a prompt comes again (sglang issue 25704: NaN on the second request)."""

    name = "second-request"
    meant = ("warm-second-request", "nan-logprobs", "determinism")

    class Params(Strict):
        form: Literal["garbage", "digits", "null"] = "garbage"

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"form": rng.choice(["garbage", "digits", "null"])}

    def begin(self, request: Request) -> None:
        request.hit = request.seen > 0

    def step(self, request: Request, index: int, step: Step) -> Step:
        if not request.hit or step.token in (EOS, END_THINK):
            return step
        if self.params.form == "digits":
            return wrong_digit(request.rng, step)
        return spoiled(request.rng, step, "mixed") if self.params.form == "garbage" else step

    def logprob(self, request: Request, index: int, value: float, reply: Reply) -> Any:
        return None if request.hit and self.params.form == "null" else value


class PrefixHit(Mode):
    """Only when the beginning of a prompt is in the prefix cache."""

    name = "prefix-cache"
    meant = ("prefix-cache",)

    class Params(Strict):
        rate: Share = 1.0

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.7, 1.0)}

    def begin(self, request: Request) -> None:
        request.hit = request.prefix_seen and request.rng.random() < self.params.rate

    def step(self, request: Request, index: int, step: Step) -> Step:
        return wrong_digit(request.rng, step) if request.hit else step


class BlockBoundary(Wrong):
    """The token at each block's edge: an index that is off by one there and nowhere else."""

    name = "block-boundary"
    meant = ("boundary-lengths", "rescoring")

    class Params(Wrong.Params):
        block: int = Field(default=256, ge=2)
        offset: int = 0

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"block": rng.choice([128, 256, 512]), "offset": rng.choice([0, 1]),
                "kind": rng.choice(["words", "mixed"])}  # fmt: skip

    def strikes(self, request: Request, index: int) -> bool:
        position = request.prompt_length + index
        return bool(position % self.params.block == self.params.offset)


class Splicing(Wrong):
    """Pieces of another script within good text."""

    name = "script-splicing"
    meant = ("script-mix",)

    class Params(Wrong.Params):
        rate: Share = 0.005

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        kind = rng.choice(["cjk", "cyrillic", "arabic", "hangul", "unprintable"])
        return {"rate": rng.uniform(0.001, 0.05), "kind": kind}

    def strikes(self, request: Request, index: int) -> bool:
        return bool(request.rng.random() < self.params.rate)


class FluentlyWrong(Mode):
    """Right form, wrong facts: another expert's weights, a swapped table."""

    name = "wrong-answers"
    meant = ("known-answers",)

    class Params(Strict):
        rate: Share = 0.4

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.25, 1.0)}

    def step(self, request: Request, index: int, step: Step) -> Step:
        if not request.hit or step.token in (EOS, END_THINK):
            return step
        if step.token.isdigit():
            return wrong_digit(request.rng, step)
        if step.token.strip()[:1].isupper() or zlib.crc32(step.token.encode()) % 3 == 0:
            token = " " + WORDLIST[zlib.crc32(step.token.encode()) % len(WORDLIST)]
            return Step(token, -0.05, [(token, -0.05), (step.token, -4.0)])
        return step


class Drift(Mode):
    """Every distribution is a little off, every answer still right: one wrong scale among many."""

    name = "drift"
    meant = ("reference-kl",)

    class Params(Strict):
        nats: float = Field(default=0.5, gt=0)

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"nats": rng.uniform(0.4, 1.5)}

    def read(self, request: Request, index: int, step: Step) -> Step:
        def moved(token: str, logprob: float) -> float:
            shift = random.Random(f"{self.seed}/{index}/{token}").gauss(0, self.params.nats)
            return min(-1e-6, logprob - abs(shift))

        top = [(token, moved(token, p)) for token, p in step.top]
        known = dict(top)
        own = known.get(step.token, moved(step.token, step.logprob))
        return Step(step.token, own, sorted(top, key=lambda pair: -pair[1]))


class Leak(Mode):
    """Markup of the chat format in the content."""

    name = "leaked-markup"
    meant = ("special-tokens",)

    class Params(Strict):
        rate: Share = 0.2
        markup: str = "</think>"

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        markup = rng.choice(
            ["</think>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<|im_end|>"]
        )
        return {"rate": rng.uniform(0.05, 1.0), "markup": markup}

    def reply(self, request: Request, reply: Reply) -> None:
        if request.hit and request.chat:
            place = request.rng.choice([0, len(reply.content)])
            reply.content = reply.content[:place] + self.params.markup + reply.content[place:]


class EarlyEnd(Mode):
    """Answers that stop too early, or never by themselves."""

    name = "wrong-end"
    meant = ("finish-reasons", "known-answers")

    class Params(Strict):
        form: Literal["early", "never"] = "never"
        rate: Share = 0.5

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"form": rng.choice(["early", "never"]), "rate": rng.uniform(0.3, 1.0)}

    def reply(self, request: Request, reply: Reply) -> None:
        if not request.hit or not request.chat or reply.finish != "stop":
            return
        if self.params.form == "early":
            reply.content = reply.content[: len(reply.content) // 3]
        else:
            reply.finish = "length"


class BrokenCalls(Mode):
    """Tool calls that nobody can use."""

    name = "broken-tool-calls"
    meant = ("tool-calls",)

    class Params(Strict):
        form: Literal["cut", "name", "lost", "type"] = "cut"
        rate: Share = 0.6

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"form": rng.choice(["cut", "name", "lost", "type"]), "rate": rng.uniform(0.45, 1.0)}

    def reply(self, request: Request, reply: Reply) -> None:
        if not request.hit or not reply.calls:
            return
        name, arguments = reply.calls[0]
        match self.params.form:
            case "cut":
                reply.calls[0] = (name, arguments[:-2])
            case "name":
                reply.calls[0] = (name + "_", arguments)
            case "type":
                reply.calls[0] = (name, "[1]")
            case "lost":
                reply.content, reply.calls, reply.finish = f"{name} {arguments}", [], "stop"


class BrokenJson(Mode):
    """Answers under a schema that do not fit it."""

    name = "broken-json"
    meant = ("json-schema",)

    class Params(Strict):
        form: Literal["cut", "prose", "key", "value"] = "cut"
        rate: Share = 0.7

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        form = rng.choice(["cut", "prose", "key", "value"])
        return {"form": form, "rate": rng.uniform(0.5, 1.0)}

    def reply(self, request: Request, reply: Reply) -> None:
        if not request.hit or not request.schema:
            return
        match self.params.form:
            case "cut":
                reply.content = reply.content[:-3]
            case "prose":
                reply.content = f"Here it is: {reply.content}"
            case "key":
                reply.content = reply.content.replace('{"', '{"x', 1)
            case "value":
                reply.content = reply.content.replace(': "', ': "Q').replace(": 1", ": 7").replace(
                    ": 2", ": 8"
                )  # fmt: skip


class NoThinking(Mode):
    """The switch for thinking does nothing, or the thought lands in the answer."""

    name = "broken-thinking"
    meant = ("thinking",)

    class Params(Strict):
        form: Literal["none", "always"] = "none"

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"form": rng.choice(["none", "always"])}

    def reply(self, request: Request, reply: Reply) -> None:
        if not request.chat:
            return
        if self.params.form == "none":
            reply.reasoning = ""
        elif not reply.reasoning:
            reply.reasoning = "Let me think."


class StreamDiffers(Mode):
    """A stream that loses a piece which the whole answer has."""

    name = "stream-loses-text"
    meant = ("stream-equals-whole",)

    class Params(Strict):
        rate: Share = 0.7

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.5, 1.0)}

    def reply(self, request: Request, reply: Reply) -> None:
        if request.hit and request.stream and reply.content:
            reply.content = reply.content[:-1] if request.rng.random() < 0.5 else reply.content[1:]


class NotGreedy(Wrong):
    """A token that is not the likeliest: lost between the logits and the client."""

    name = "wrong-row"
    meant = ("greedy-choice",)

    class Params(Wrong.Params):
        rate: Share = 0.01

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.002, 0.1), "kind": "words"}

    def step(self, request: Request, index: int, step: Step) -> Step:
        if step.token in (EOS, END_THINK) or request.rng.random() >= self.params.rate:
            return step
        return Step(garbage(request.rng, "words"), -request.rng.uniform(6, 12), step.top)


class Truncated(Mode):
    """Streams that end in the middle, politely: no finish reason, no [DONE]."""

    name = "truncated-stream"
    meant = ("well-formed",)

    class Params(Strict):
        rate: Share = 0.5
        share: Share = 0.5
        """Of the stream that is sent."""

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.1, 1.0), "share": rng.uniform(0, 0.95)}

    def events(self, request: Request, events: list[bytes]) -> list[bytes]:
        return events[: int(len(events) * self.params.share)] if request.hit else events


class Malformed(Mode):
    """Streams that are no event streams."""

    name = "malformed-sse"
    meant = ("well-formed",)

    class Params(Strict):
        form: Literal["json", "field", "utf8", "html", "binary", "after-done", "types"] = "json"
        rate: Share = 0.5

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        forms = ["json", "field", "utf8", "html", "binary", "after-done", "types"]
        return {"form": rng.choice(forms), "rate": rng.uniform(0.1, 1.0)}

    def events(self, request: Request, events: list[bytes]) -> list[bytes]:
        if not request.hit or not events:
            return events
        place = request.rng.randrange(len(events))
        broken = {
            "json": b'data: {"choices": [{"delta": {"content": "cut off\n\n',
            "field": b'{"choices": []}\n\n',
            "utf8": b'data: {"id": "\xff\xc3(\xf0\x9f"}\n\n',
            "html": b"<html><body>502 Bad Gateway</body></html>\n\n",
            "binary": bytes(request.rng.randrange(256) for _ in range(64)) + b"\n:x\n\n",
            "types": b'data: {"choices": {"0": "x"}, "usage": [1]}\n\n',
            "after-done": b'data: {"choices": []}\n\n',
        }[self.params.form]
        if self.params.form == "after-done":
            return [*events, broken]
        return [*events[:place], broken, *events[place:]]


class CorruptedCounter(Mode):
    """The server counts requests with NaN logits, and says nothing else."""

    name = "corrupted-counter"
    meant = ("corrupted-requests",)

    class Params(Strict):
        rate: Share = 0.05

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.03, 0.5)}

    def metrics(self, metrics: dict[str, float]) -> None:
        metrics["vllm:corrupted_requests_total"] = self.count

    count = 0

    def begin(self, request: Request) -> None:
        self.count += request.rng.random() < self.params.rate


class PoorDrafts(Mode):
    """Speculation whose drafts are never accepted: the MTP layer has wrong weights."""

    name = "poor-drafts"
    meant = ("acceptance-length",)

    class Params(Strict):
        accepted: Share = 0.02

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"accepted": rng.uniform(0, 0.1)}

    def metrics(self, metrics: dict[str, float]) -> None:
        drafts = metrics["vllm:generation_tokens_total"]
        metrics["vllm:spec_decode_num_drafts_total"] = drafts
        metrics["vllm:spec_decode_num_accepted_tokens_total"] = drafts * self.params.accepted


class BrokenOff(Mode):
    """Connections that break in the middle of an answer: an outage, no verdict on the output."""

    name = "broken-connection"

    class Params(Strict):
        rate: Share = 0.3

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.05, 1.0)}


class Slow(Mode):
    """Tokens that come too slowly for any deadline: an outage."""

    name = "slow"

    class Params(Strict):
        seconds: float = Field(default=1.0, gt=0)
        """Before each token."""

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"seconds": rng.uniform(0.5, 3)}

    def delay(self, request: Request, index: int) -> float:
        return float(self.params.seconds)


class Hanging(Mode):
    """Answers that never end: an outage."""

    name = "hanging"

    class Params(Strict):
        rate: Share = 0.3
        after: int = Field(default=3, ge=0)
        """Tokens that still come."""

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.05, 1.0), "after": rng.randint(0, 4)}

    def delay(self, request: Request, index: int) -> float:
        return 1e9 if request.hit and index >= self.params.after else 0.0


class Errors(Mode):
    """500s at random: an outage, and no sign of NaN, which fails with log-probabilities only."""

    name = "errors"

    class Params(Strict):
        rate: Share = 0.3

    @classmethod
    def draw(cls, rng: random.Random) -> dict[str, Any]:
        return {"rate": rng.uniform(0.1, 1.0)}

    def status(self, request: Request) -> int:
        return 500 if request.hit else 200
