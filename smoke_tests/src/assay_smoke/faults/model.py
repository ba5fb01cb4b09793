"""What the fault server says while nothing is wrong.

Not a language model: it looks answers up in the suite that it is started with, finds hidden codes,
and tells stories without an end. What it needs to share with a real server is the shape of its
distributions: each next token depends on the tokens before it only, decoding and prefill agree, and
now and then two tokens are so close that the batch decides (`near ties`), as on a GPU.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from assay_smoke.faults.tokens import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, encode_text
from assay_smoke.suite import Question, Suite
from assay_smoke.text import words

NEAR_TIE_EVERY = 61
"""Of the tokens of stories, one in so many has a rival within a quarter of a nat."""
HEROES = [
    "Ada",
    "Bela",
    "Cleo",
    "Dora",
    "Enid",
    "Faye",
    "Gwen",
    "Hana",
    "Iris",
    "Jade",
    "Kaya",
    "Lena",
    "Mona",
    "Nina",
    "Olga",
    "Pia",
    "Ruth",
]
PLACES = [
    "harbour",
    "mill",
    "market",
    "garden",
    "bridge",
    "tower",
    "village",
    "meadow",
    "river",
    "orchard",
    "castle",
    "quarry",
    "lighthouse",
    "station",
    "library",
    "bakery",
    "forest",
    "island",
    "chapel",
    "museum",
    "theatre",
    "valley",
    "canal",
]
THINGS = [
    "lamp",
    "key",
    "letter",
    "barrel",
    "violin",
    "compass",
    "coat",
    "anchor",
    "basket",
    "ring",
    "clock",
    "rope",
    "mirror",
    "saddle",
    "kettle",
    "ladder",
    "whistle",
    "drum",
    "map",
]
MOODS = [
    "calm",
    "proud",
    "curious",
    "tired",
    "merry",
    "brave",
    "hungry",
    "quiet",
    "lucky",
    "patient",
    "grateful",
]
DEEDS = [
    "helped an old miller with the {thing}",
    "found a {thing} below the stairs",
    "traded the {thing} for bread",
    "carried the {thing} across the {place}",
    "lost the {thing} near the {place}",
    "painted the {thing} in two colours",
    "hid the {thing} from the wind",
]
NEIGHBOUR = {
    word: words_[(i + 1) % len(words_)]
    for words_ in (PLACES, THINGS, MOODS)
    for i, word in enumerate(words_)
}
WORDLIST = sorted(
    {
        *HEROES,
        *PLACES,
        *THINGS,
        *MOODS,
        *["the", "a", "of", "and", "then", "was", "were", "at", "by", "on"],
    }
)


def noise(*parts: Any) -> float:
    """A fixed number in [0, 1) for the same parts."""
    return zlib.crc32("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")) / 2**32


@dataclass
class Step:
    """One token and how likely it and its rivals were."""

    token: str
    logprob: float
    top: list[tuple[str, float]]
    """Best first; the token is among them."""


@dataclass
class Plan:
    """What the model will say, cut into its parts."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(name, arguments as JSON)."""
    endless: str = ""
    """Seed of a story that follows the content and never ends; empty: the answer ends."""

    def tokens(self) -> Iterator[str]:
        """What the model emits, its end included if it has one."""
        if self.reasoning:
            yield from self.reasoning
            yield END_THINK
        yield from self.content
        for name, arguments in self.calls:
            yield from encode_text(f"\n\n{name}({arguments})")
        if self.endless:
            yield from story(self.endless)
        yield EOS


def story(seed: str) -> Iterator[str]:
    """Chapters that do not repeat while anybody reads: the lists' lengths share no factor."""
    start = zlib.crc32(seed.encode())
    hero = HEROES[start % len(HEROES)]
    for n in range(1, 10**6):
        k = start + n
        place, thing, mood = PLACES[k % 23], THINGS[k % 19], MOODS[k % 11]
        deed = DEEDS[k % 7].format(thing=thing, place=PLACES[(k + 5) % 23])
        yield from encode_text(
            f"\n\nPart {n}: The {place}\nOn day {n} {hero} came to the {place} and {deed}. There"
            f" {hero} met a {MOODS[(k + 3) % 11]} stranger with a {THINGS[(k + 7) % 19]}, and both"
            f" were {mood} before night."
        )


def chat_text(messages: Sequence[dict[str, Any]], tools: Any, thinking: bool) -> str:
    """A conversation in V4's manner, up to where the answer begins."""
    text = BOS
    if tools:
        text += "Tools: " + json.dumps(tools)
    for message in messages:
        content = message.get("content")
        content = content if isinstance(content, str) else json.dumps(content or "")
        match message.get("role"):
            case "assistant":
                calls = message.get("tool_calls")
                text += ASSISTANT + END_THINK + content + (json.dumps(calls) if calls else "") + EOS
            case "system":
                text += content
            case "tool":
                text += USER + f"<tool_result>{content}</tool_result>"
            case _:
                text += USER + content
    return text + ASSISTANT + (THINK if thinking else END_THINK)


class Model:
    """The good model of one suite."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.book: dict[str, Plan] = {}
        for question in suite.questions:
            for thinking in (False, True):
                key = chat_text(question.messages, question.tools, thinking)
                self.book[key] = _answer(question, thinking)
        for passage in suite.passages:
            self._learn(passage.text)
        fact = re.escape(suite.needle.fact)
        self._fact = fact.replace(r"\{code\}", r"(\d+)")
        ask = re.escape(suite.needle.question.strip()).replace(r"\{name\}", r"(\w+)")
        self._ask = re.compile(ask)
        self._long = {prompt.strip() for prompt in suite.long.prompts}

    def _learn(self, text: str) -> None:
        """The assistant's turns of a passage."""
        place = text.find(ASSISTANT)
        while place >= 0:
            start = place + len(ASSISTANT)
            for marker in (END_THINK, THINK):
                if text.startswith(marker, start):
                    start += len(marker)
            end = text.find(EOS, start)
            own = text[start:] if end < 0 else text[start:end]
            self.book.setdefault(text[:start], Plan(content=encode_text(own)))
            place = text.find(ASSISTANT, start)

    def plan(self, prompt: str) -> Plan:
        """The answer to a prompt that ends where an answer begins."""
        if (known := self.book.get(prompt)) is not None:
            return known
        turn = prompt.rpartition(USER)[2].partition(ASSISTANT)[0]
        asked = self._ask.findall(turn)
        if asked:
            fact = self._fact.replace(r"\{name\}", re.escape(asked[-1]))
            if found := re.findall(fact, prompt):
                said = self.suite.needle.fact.format(name=asked[-1], code=found[-1])
                return Plan(content=encode_text(said))
        if turn.strip() in self._long or "story" in turn.casefold():
            return Plan(content=encode_text("A journey"), endless=turn.strip())
        if re.search(r"\d", turn) and (numbers := re.findall(r"\d+", turn)):
            return Plan(content=encode_text(f"The answer is {sum(map(int, numbers)) % 97}."))
        return Plan(content=list(islice(story(turn or prompt), 40)))

    def predict(self, tokens: Sequence[str]) -> list[str | None]:
        """What the model would have said at each position; None where it was not its turn."""
        wanted: list[str | None] = [None] * len(tokens)
        index = 0
        while index < len(tokens):
            if tokens[index] != ASSISTANT:
                index += 1
                continue
            start = index + 1
            if start < len(tokens) and tokens[start] in (THINK, END_THINK):
                start += 1
            plan = self.plan("".join(tokens[:start])).tokens()
            index = start
            for planned in plan:
                if index >= len(tokens) or tokens[index] == USER:
                    break
                wanted[index] = planned
                index += 1
        if ASSISTANT not in tokens:
            for i in range(1, len(tokens)):
                wanted[i] = following(tokens[max(0, i - 2) : i])
        return wanted

    def continuation(self, tokens: Sequence[str]) -> Iterator[str]:
        """What comes after a prompt of token texts."""
        if ASSISTANT in tokens:
            last = len(tokens) - 1 - list(reversed(tokens)).index(ASSISTANT)
            start = last + 1
            if start < len(tokens) and tokens[start] in (THINK, END_THINK):
                start += 1
            plan = self.plan("".join(tokens[:start])).tokens()
            yield from islice(plan, len(tokens) - start, None)
            return
        context = list(tokens[-2:])
        while True:
            token = following(context)
            yield token
            context = [*context[-1:], token]


def following(context: Sequence[str]) -> str:
    """The next word of plain text: a fixed function of the last two tokens."""
    return " " + WORDLIST[int(noise("next", *context) * len(WORDLIST))]


def _answer(question: Question, thinking: bool) -> Plan:
    expected = question.expected
    match question.kind:
        case "number":
            said = f"The answer is {expected}."
        case "word":
            said = f"It is {expected}."
        case "prefix":
            said = f"{expected} is the one."
        case "text":
            said = str(expected)
        case "json":
            said = json.dumps(expected, ensure_ascii=False)
        case "tool":
            calls = [(c["name"], json.dumps(c["arguments"])) for c in expected]
            reasoning = encode_text("A tool can tell.") if thinking else []
            return Plan(reasoning, [], calls)
    topic = " ".join(words(str(question.messages[-1].get("content") or ""))[:6])
    reasoning = encode_text(f"The question is about {topic}. {said}") if thinking else []
    return Plan(reasoning, encode_text(said))


class Scores:
    """Log-probabilities of one request: those of the model, with the noise of a batch."""

    def __init__(self, seed: Any, jitter: float = 0.001, listed: int = 8) -> None:
        self.seed = zlib.crc32(repr(seed).encode())
        self.jitter = jitter
        self.listed = listed
        """Rivals that anybody asked for."""

    def step(self, planned: str, context: Sequence[str], index: int) -> Step:
        """The next token where `planned` is what the model means to say."""
        rivals = self.rivals(planned, context)
        first, second = self.pair(planned, context)
        shake = zlib.crc32(index.to_bytes(4, "big"), self.seed) / 2**31 - 1
        if second is not None:
            a, b = -0.7 + 0.1 * shake, -0.75 - 0.1 * shake
            ranked = sorted([(first, a), (second, b)], key=lambda pair: -pair[1])
            top = [*ranked, *((t, p - 1) for t, p in rivals[:1])]
            return Step(ranked[0][0], ranked[0][1], top)
        logprob = self.sure(planned, context) + self.jitter * (shake - 1)
        return Step(planned, logprob, [(planned, logprob), *rivals])

    @staticmethod
    def sure(planned: str, context: Sequence[str]) -> float:
        return -0.01 - 0.1 * noise("sure", planned, *context[-2:])

    @staticmethod
    def pair(planned: str, context: Sequence[str]) -> tuple[str, str | None]:
        """(token, rival that is as likely): only words of stories have one."""
        word = planned.strip()
        other = NEIGHBOUR.get(word)
        if other is None or noise(planned, *context[-4:]) * NEAR_TIE_EVERY >= 1:
            return planned, None
        return planned, planned.replace(word, other)

    def rivals(self, planned: str, context: Sequence[str]) -> list[tuple[str, float]]:
        count = self.listed
        start = int(noise("rival", planned, *context[-2:]) * len(WORDLIST))
        chosen = (" " + WORDLIST[(start + 7 * i) % len(WORDLIST)] for i in range(count + 1))
        others = [token for token in chosen if token != planned][:count]
        return [(token, -5.5 - 0.6 * i) for i, token in enumerate(others)]

    def read(self, token: str, planned: str | None, context: Sequence[str], index: int) -> Step:
        """How likely a token of a prompt was."""
        if planned is None:
            own = -0.2 - 1.6 * noise("read", token, *context[-2:]) ** 2
            rest = [(t, p + 3.0 + min(0, own)) for t, p in self.rivals(token, context)]
            return Step(token, own, sorted([(token, own), *rest], key=lambda pair: -pair[1]))
        step = self.step(planned, context, index)
        known = dict(step.top)
        if token in known:
            return Step(token, known[token], step.top)
        return Step(token, -9.0 - 6.0 * noise("unlikely", token, *context[-2:]), step.top)
