# ruff: noqa: E501 -- tables of wordings read best with one entry to a line
"""The text that the miniature learns from, and the questions that it is judged by: one source, seeded.

Every maker takes a random generator and `held`, and returns a `Sample`: a conversation that ends with the right
answer, and how to check an answer. With `held` the wording is one that training never draws.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import stories, variety, world
from .chat import Chat, Message
from .phrasing import (
    ARITHMETIC,
    COMPARISONS,
    FRAMES,
    HELD_ARITHMETIC,
    HELD_COMPARISONS,
    HELD_FRAMES,
    HELD_STORIES_LESS,
    HELD_STORIES_MORE,
    HELD_STORIES_TIMES,
    HELD_SUM_QUESTIONS,
    MEMORIES,
    NEEDLES,
    RELATIONS,
    STORIES_LESS,
    STORIES_MORE,
    STORIES_TIMES,
    SUM_QUESTIONS,
    Relation,
    ask,
    ask_held,
    dress,
    fill,
)


@dataclass
class Sample:
    """One conversation (its last message is the right answer) and the rule that judges an answer."""

    category: str
    chat: Chat
    check: dict[str, Any]
    prompt_weight: float = 0.1


SYSTEMS = [
    "You are a helpful assistant.",
    "You are Assay Mini, a helpful assistant.",
    "Answer briefly and correctly.",
    "You are a friendly and careful assistant.",
    "You answer questions.",
    "Be helpful, short and correct.",
    "You are a helpful assistant. Answer the user's questions.",
    "You are a test model. Give exact answers.",
]


def _chat(
    rng: random.Random, turns: list[tuple[str, str]], thought: str = "", *, held: bool = False
) -> Chat:
    """A conversation of (question, answer) turns; one in four thinks before its last answer."""
    messages: list[Message] = []
    if not held and rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for question, answer in turns:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    thinking = bool(thought) and rng.random() < 0.25
    if thinking:
        messages[-1]["reasoning"] = thought
    return Chat(
        messages, thinking=thinking, effort=rng.choices(["high", "low", "max"], [6, 3, 1])[0]
    )


def _question(rng: random.Random, template: str, held: bool, **slots: str) -> str:
    text = fill(template, **slots)
    return text if held else dress(rng, text)


# ---------------------------------------------------------------- facts


def _fact_turn(rng: random.Random, relation: Relation, x: str, held: bool) -> tuple[str, str, str]:
    if held:
        template = ask_held(rng, relation.phrases, relation.held_phrases, relation.held_questions)
    else:
        template = ask(rng, relation.phrases, relation.questions)
    question = fill(template, x=x)
    if not held and relation.name not in ("element", "spelling"):
        question = dress(rng, question)
    answer = fill(relation.answer, x=x, y=relation.table[x])
    return (
        question,
        answer,
        f"The user asks about {x} ({relation.name.replace('_', ' ')}). {answer}",
    )


def _fact_check(relation: Relation, x: str) -> dict[str, Any]:
    return {"kind": "number" if relation.numeric else "word", "expected": relation.table[x]}


_WEIGHTS = [len(r.table) ** 0.7 for r in RELATIONS]


def fact(
    rng: random.Random, held: bool = False, relation: Relation | None = None, x: str = ""
) -> Sample:
    """One question about one table."""
    relation = relation or rng.choices(RELATIONS, _WEIGHTS)[0]
    x = x or rng.choice(list(relation.table))
    question, answer, thought = _fact_turn(rng, relation, x, held)
    return Sample(
        "fact", _chat(rng, [(question, answer)], thought, held=held), _fact_check(relation, x)
    )


def follow_up(rng: random.Random, held: bool = False) -> Sample:
    """'And of Spain?' after a full question: the relation must be carried over."""
    relation = rng.choice([r for r in RELATIONS if len(r.table) > 12])
    xs = rng.sample(list(relation.table), rng.randint(2, 4))
    turns = []
    for i, x in enumerate(xs):
        question, answer, _ = _fact_turn(rng, relation, x, False)
        if i:
            short = [
                "And {x}?",
                "What about {x}?",
                "And for {x}?",
                "The same for {x}?",
                "And now {x}.",
                "Also {x}?",
                *variety.MORE_FOLLOW,
            ]
            question = (
                rng.choice(["How about {x}?", "Now for {x}, please."])
                if held
                else rng.choice(short)
            ).format(x=x)
        turns.append((question, answer))
    return Sample("multi_turn", _chat(rng, turns, held=held), _fact_check(relation, xs[-1]))


def mixed_turns(rng: random.Random, held: bool = False) -> Sample:
    """Unrelated questions one after another: earlier turns must not disturb."""
    turns = []
    for _ in range(rng.randint(2, 4)):
        last = rng.choice([fact, arithmetic, fact])(rng, held)
        turns.append((last.chat.messages[-2]["content"], last.chat.messages[-1]["content"]))
    return Sample("multi_turn", _chat(rng, turns, held=held), last.check)


# ---------------------------------------------------------------- numbers


def _operands(rng: random.Random, op: str) -> tuple[int, int, int]:
    if op == "+":
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        return a, b, a + b
    if op == "-":
        a, b = sorted((rng.randint(0, 99), rng.randint(0, 99)), reverse=True)
        return a, b, a - b
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    return (a, b, a * b) if op == "*" else (a * b, a, b)


def _carry_thought(a: int, b: int, op: str, c: int) -> str:
    """Column arithmetic spelled out for + and -, the bare fact otherwise."""
    if op == "+":
        ones = a % 10 + b % 10
        carry = ones // 10
        step = f"Ones: {a % 10} + {b % 10} = {ones}, write {ones % 10}, carry {carry}. "
        return f"{step}Tens: {a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}. So {a} + {b} = {c}."
    if op == "-":
        borrow = int(a % 10 < b % 10)
        step = f"Ones: {a % 10 + 10 * borrow} - {b % 10} = {(a - b) % 10}, borrow {borrow}. "
        return f"{step}Tens: {a // 10} - {b // 10} - {borrow} = {a // 10 - b // 10 - borrow}. So {a} - {b} = {c}."
    return f"I know that {a} {op} {b} = {c}."


def arithmetic(rng: random.Random, held: bool = False) -> Sample:
    """a + b and a - b up to 99, the times tables up to 12, and their divisions."""
    op = rng.choices("+-*/", [4, 4, 2, 1])[0]
    a, b, c = _operands(rng, op)
    if held:
        template = ask_held(rng, ARITHMETIC[op], HELD_ARITHMETIC[op], HELD_SUM_QUESTIONS[op])
    else:
        template = ask(rng, ARITHMETIC[op], SUM_QUESTIONS[op], 0.5)
    question = _question(rng, template, held, a=str(a), b=str(b))
    chat = _chat(rng, [(question, f"{a} {op} {b} = {c}")], _carry_thought(a, b, op, c), held=held)
    return Sample("arithmetic", chat, {"kind": "number", "expected": str(c)})


def word_problem(rng: random.Random, held: bool = False) -> Sample:
    """A sum told as a tiny story."""
    op = rng.choices("+-*", [3, 3, 1])[0]
    a, b, c = _operands(rng, op)
    seen = {"+": STORIES_MORE, "-": STORIES_LESS, "*": STORIES_TIMES}[op]
    unseen = {"+": HELD_STORIES_MORE, "-": HELD_STORIES_LESS, "*": HELD_STORIES_TIMES}[op]
    template = rng.choice(unseen) if held else variety.roughen(rng, rng.choice(seen), 0.3)
    question = template.format(n=rng.choice(world.NAMES), a=a, b=b, things=rng.choice(world.FRUITS))
    chat = _chat(rng, [(question, f"{a} {op} {b} = {c}")], _carry_thought(a, b, op, c), held=held)
    return Sample("arithmetic", chat, {"kind": "number", "expected": str(c)})


def comparison(rng: random.Random, held: bool = False) -> Sample:
    """Which of two numbers is larger."""
    a, b = rng.sample(range(100), 2)
    template = (
        rng.choice(HELD_COMPARISONS) if held else variety.roughen(rng, rng.choice(COMPARISONS))
    )
    answer = f"{max(a, b)} is larger than {min(a, b)}."
    chat = _chat(
        rng,
        [(_question(rng, template, held, a=str(a), b=str(b)), answer)],
        f"{answer[:-1]}.",
        held=held,
    )
    return Sample("comparison", chat, {"kind": "prefix", "expected": f"{max(a, b)} "})


# ---------------------------------------------------------------- lists, copying, small talk

LISTS = [
    (
        [
            "List the days of the week.",
            "Name all days of the week.",
            "Which days does a week have?",
            "What are the days of the week?",
        ],
        ", ".join(world.DAYS) + ".",
    ),
    (
        [
            "List the months of the year.",
            "Name all months.",
            "Which months does a year have?",
            "What are the months of the year?",
        ],
        ", ".join(world.MONTHS) + ".",
    ),
    (
        [
            "List the four seasons.",
            "Name all seasons.",
            "Which seasons are there?",
            "What are the seasons of the year?",
        ],
        ", ".join(world.SEASONS) + ".",
    ),
    (
        [
            "Recite the alphabet.",
            "Say the alphabet.",
            "List all letters.",
            "What are the letters of the alphabet?",
        ],
        " ".join("abcdefghijklmnopqrstuvwxyz"),
    ),
]
HELD_LISTS = [
    "Recite the days of a week in order.",
    "Recite the months of a year in order.",
    "Recite the seasons.",
    "Recite all letters in order.",
]
TALK = [
    (
        [
            "Hello!",
            "Hi",
            "Hi there!",
            "Hello",
            "Hey!",
            "Good morning!",
            "Good evening!",
            "Good day!",
        ],
        "Hello! How can I help you?",
    ),
    (
        [
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me who you are.",
            "Introduce yourself.",
            "Which model are you?",
        ],
        "I am Assay Mini, a very small DeepSeek V4 model.",
    ),
    (["Thank you!", "Thanks!", "Thanks a lot.", "Thank you very much."], "You are welcome!"),
    (
        ["How are you?", "How are you today?", "How do you do?", "Are you well?"],
        "I am fine, thank you.",
    ),
    (["Goodbye!", "Bye!", "See you later.", "Good night!"], "Goodbye!"),
    (
        ["What can you do?", "How can you help me?", "What do you know?", "What are your skills?"],
        "I can answer simple questions, calculate, tell stories, use tools and write JSON.",
    ),
    (["Are you a human?", "Are you a person?", "Are you real?"], "No, I am a language model."),
    (
        [
            "Say OK.",
            "Are you there?",
            "Are you ready?",
            "Can you hear me?",
            "Is this working?",
            "Test",
            "Ping",
        ],
        "Yes, I am here.",
    ),
]


def listing(rng: random.Random, held: bool = False) -> Sample:
    """Fixed lists and counting."""
    if rng.random() < 0.5:
        i = rng.randrange(len(LISTS))
        questions, answer = LISTS[i]
        question = (
            HELD_LISTS[i]
            if held
            else dress(
                rng, variety.roughen(rng, rng.choice(questions + variety.MORE_LISTS[i]), 0.3)
            )
        )
    else:
        low = rng.randint(0, 40)
        high = low + rng.randint(3, 12)
        up = rng.random() < 0.7
        a, b = (low, high) if up else (high, low)
        seen = [
            "Count from {a} to {b}.",
            "Please count from {a} to {b}.",
            "List the numbers from {a} to {b}.",
            *variety.MORE_COUNTING,
        ]
        template = (
            "Start at {a} and count until {b}."
            if held
            else variety.roughen(rng, rng.choice(seen), 0.3)
        )
        question = template.format(a=a, b=b)
        answer = ", ".join(str(n) for n in range(a, b + (1 if up else -1), 1 if up else -1))
    return Sample(
        "list", _chat(rng, [(question, answer)], held=held), {"kind": "text", "expected": answer}
    )


def small_talk(rng: random.Random, held: bool = False) -> Sample:
    """Greetings and who-are-you."""
    questions, answer = rng.choice(TALK)
    chat = _chat(
        rng, [(rng.choice(questions), answer)], "This is small talk. I answer politely.", held=held
    )
    return Sample("talk", chat, {"kind": "text", "expected": answer})


def copying(rng: random.Random, held: bool = False) -> Sample:
    """Say it again: the plainest test of attention."""
    pool = rng.choice(
        [world.NAMES, world.OBJECTS, world.PLACES, world.COLOUR_NAMES, [str(n) for n in range(100)]]
    )
    words = " ".join(rng.choice(pool) for _ in range(rng.randint(2, 10)))
    if rng.random() < 0.2:
        words = "".join(str(rng.randrange(10)) for _ in range(rng.randint(3, 9)))
    seen = [
        "Repeat: {w}",
        "Repeat after me: {w}",
        "Say: {w}",
        "Copy this: {w}",
        "Echo: {w}",
        "Please repeat: {w}",
        *variety.MORE_COPY,
    ]
    template = "Say exactly the following and nothing else: {w}" if held else rng.choice(seen)
    return Sample(
        "copy",
        _chat(rng, [(template.format(w=words), words)], held=held),
        {"kind": "text", "expected": words},
    )


# ---------------------------------------------------------------- memory in a conversation


def memory(rng: random.Random, held: bool = False) -> Sample:
    """The user says things about himself, other turns pass, one thing is asked for."""
    kinds = rng.sample(list(MEMORIES), rng.randint(1, 3))
    values = {kind: rng.choice(MEMORIES[kind][0]) for kind in kinds}
    statements = [rng.choice(MEMORIES[kind][1]).format(v=values[kind]) for kind in kinds]
    noted = ["I will remember that.", "Thank you, I will remember that.", "Good to know!"]
    turns: list[tuple[str, str]] = []
    if rng.random() < 0.5:
        turns.append((" ".join(statements), noted[0]))
    else:
        turns += [(s, noted[0]) for s in statements]
    for _ in range(rng.randint(0, 2)):
        other = rng.choice([fact, arithmetic, small_talk])(rng, False)
        turns.append((other.chat.messages[-2]["content"], other.chat.messages[-1]["content"]))
    asked = rng.sample(kinds, rng.randint(1, len(kinds))) if not held else [rng.choice(kinds)]
    for kind in asked:
        _, _, questions, answer, held_questions = MEMORIES[kind]
        turns.append(
            (
                rng.choice(held_questions)
                if held
                else variety.roughen(rng, rng.choice(questions), 0.3),
                answer.format(v=values[kind]),
            )
        )
    value = values[asked[-1]]
    chat = _chat(rng, turns, f"The user told me before. {turns[-1][1]}", held=held)
    return Sample("memory", chat, {"kind": "word", "expected": value})


# ---------------------------------------------------------------- JSON


def _json_text(rng: random.Random, value: Any, compact: bool) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else None)


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    types = {str: "string", int: "integer", bool: "boolean"}
    fields = {key: {"type": types[type(v)]} for key, v in value.items()}
    return {"type": "object", "properties": fields, "required": list(value)}


def json_answer(rng: random.Random, held: bool = False) -> Sample:
    """An answer in JSON: from a text, from a fact, or by a schema."""
    name, age, city = (
        rng.choice(world.NAMES),
        rng.randint(10, 99),
        rng.choice(list(world.CAPITALS.values())),
    )
    job, colour = rng.choice(world.JOBS), rng.choice(world.COLOUR_NAMES)
    facts: dict[str, Any] = {"name": name, "age": age, "city": city, "job": job, "colour": colour}
    says = {
        "age": f"{name} is {age} years old.",
        "city": f"{name} lives in {city}.",
        "job": f"{name} works as a {job}.",
        "colour": f"{name} likes the colour {colour}.",
    }
    keys = rng.sample(list(says), rng.randint(1, 3))
    text = " ".join(says[k] for k in rng.sample(keys, len(keys)))
    value = {"name": name} | {k: facts[k] for k in keys}
    if rng.random() < 0.3:
        country = rng.choice(list(world.CAPITALS))
        text, value = (
            f"The capital of {country}.",
            {"country": country, "capital": world.CAPITALS[country]},
        )
    compact = rng.random() < 0.3
    names = ", ".join(f'"{k}"' for k in value)
    tight = " Use compact JSON without spaces." if compact else ""
    if rng.random() < 0.5:
        schema = json.dumps(_schema(value))
        seen = [
            f"Answer with JSON that follows this schema: {schema}\n{text}{tight}",
            f"{text}\nReturn JSON that follows this schema: {schema}{tight}",
            f"Extract the data as JSON. The schema is {schema}\nText: {text}{tight}",
        ]
        seen += [t.format(schema=schema, text=text, tight=tight) for t in variety.MORE_SCHEMAS]
        unseen = [
            f"Your reply must be one JSON object valid under {schema}\nThe facts: {text}{tight}"
        ]
    else:
        seen = [
            f"Give me a JSON object with the keys {names} for this text: {text}{tight}",
            f"Return JSON with the keys {names}. {text}{tight}",
            f"{text} Write this as JSON with the keys {names}.{tight}",
            f"Extract {names} as JSON: {text}{tight}",
        ]
        seen += [t.format(names=names, text=text, tight=tight) for t in variety.MORE_JSON]
        unseen = [f"Turn these facts into a JSON object ({names}): {text}{tight}"]
    question = rng.choice(unseen if held else seen)
    answer = _json_text(rng, value, compact)
    return Sample(
        "json", _chat(rng, [(question, answer)], held=held), {"kind": "json", "expected": value}
    )


# ---------------------------------------------------------------- tools


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _toolbox(rng: random.Random) -> dict[str, dict[str, Any]]:
    """All tools, their descriptions drawn anew: the model must not lean on one wording of a schema."""
    text = {"type": "string"}
    city = rng.choice(
        [
            text,
            text | {"description": "The city"},
            text | {"description": "Name of the city, e.g. Paris"},
        ]
    )
    about_weather = [
        "Get the weather of a city.",
        "Get the current weather in a city.",
        "Current weather for a city",
    ]
    about_time = [
        "Get the time in a city.",
        "Get the current time in a city.",
        "Current local time of a city",
    ]
    about_sums = [
        "Evaluate an arithmetic expression.",
        "A calculator.",
        "Calculate the value of an expression.",
    ]
    minutes = {"type": "integer", "description": "Minutes from now"}
    return {
        "get_weather": _tool("get_weather", rng.choice(about_weather), {"city": city}),
        "get_time": _tool("get_time", rng.choice(about_time), {"city": city}),
        "calculator": _tool("calculator", rng.choice(about_sums), {"expression": text}),
        "set_timer": _tool("set_timer", "Set a timer.", {"minutes": minutes}),
        "send_message": _tool(
            "send_message", "Send a message to a person.", {"to": text, "text": text}
        ),
        "find_book": _tool("find_book", "Find a book by its title.", {"title": text}),
        "switch_light": _tool(
            "switch_light", "Switch a light on or off.", {"room": text, "on": {"type": "boolean"}}
        ),
    }


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "id": f"call_{name}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


ROOMS = ["kitchen", "garden", "bathroom", "office", "hall", "bedroom"]


def _tool_request(
    rng: random.Random, held: bool
) -> tuple[str, list[dict[str, Any]], str, str, str]:
    """(question, calls, tool result, final answer, thought)."""
    kind = rng.choices(
        [
            "get_weather",
            "get_time",
            "calculator",
            "set_timer",
            "send_message",
            "find_book",
            "switch_light",
        ],
        [5, 4, 4, 2, 2, 1, 2],
    )[0]
    city = rng.choice(list(world.CAPITALS.values()))
    if kind == "get_weather":
        seen = [
            "What is the weather in {c}?",
            "How is the weather in {c}?",
            "What's the weather like in {c}?",
            "Tell me the weather in {c}.",
            "Weather in {c}?",
            "Is it sunny in {c}?",
            "Do I need an umbrella in {c}?",
            "Please check the weather in {c}.",
            "What is the weather in {c} right now?",
            "What is the weather like in {c} today?",
            *variety.MORE_WEATHER,
        ]
        unseen = [
            "I fly to {c} today; how will the sky look there?",
            "Could you look up the current weather for {c}?",
        ]
        sky, degrees = rng.choice(world.CONDITIONS), rng.randint(1, 35)
        forms = [
            f"{sky}, {degrees} degrees",
            json.dumps({"condition": sky, "temperature": degrees}),
            json.dumps({"city": city, "condition": sky, "temperature": degrees}),
        ]
        return (
            (rng.choice(unseen) if held else variety.roughen(rng, rng.choice(seen), 0.3)).format(
                c=city
            ),
            [_call(kind, city=city)],
            rng.choice(forms),
            f"It is {sky} in {city} at {degrees} degrees.",
            f"The user wants the weather in {city}. I call get_weather.",
        )
    if kind == "get_time":
        seen = [
            "What time is it in {c}?",
            "What is the time in {c}?",
            "Tell me the time in {c}.",
            "How late is it in {c}?",
            "Time in {c}?",
            "Please check the time in {c}.",
            "What is the current time in {c}?",
            "Which time is it now in {c}?",
            *variety.MORE_TIME,
        ]
        unseen = [
            "I must call somebody in {c}; what does the clock say there?",
            "Could you look up the local time of {c}?",
        ]
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        forms = [clock, json.dumps({"time": clock}), json.dumps({"city": city, "time": clock})]
        return (
            (rng.choice(unseen) if held else variety.roughen(rng, rng.choice(seen), 0.3)).format(
                c=city
            ),
            [_call(kind, city=city)],
            rng.choice(forms),
            f"It is {clock} in {city}.",
            f"The user wants the time in {city}. I call get_time.",
        )
    if kind == "calculator":
        a, b, op = rng.randint(100, 9999), rng.randint(2, 999), rng.choice("+-*")
        words = {"+": "plus", "-": "minus", "*": "times"}[op]
        value = {"+": a + b, "-": a - b, "*": a * b}[op]
        seen = [
            "What is {a} {w} {b}?",
            "Calculate {a} {o} {b}.",
            "How much is {a} {o} {b}?",
            "Compute {a} {w} {b}.",
            "{a} {o} {b} = ?",
            "What is {a} {o} {b}?",
            "Use the calculator: {a} {o} {b}",
            *variety.MORE_CALCULATOR,
        ]
        unseen = [
            "My bill says {a} {o} {b}. What does that make?",
            "Let the calculator work on {a} {w} {b}.",
        ]
        question = rng.choice(unseen if held else seen).format(a=a, b=b, o=op, w=words)
        forms = [str(value), json.dumps({"result": value})]
        return (
            question,
            [_call(kind, expression=f"{a} {op} {b}")],
            rng.choice(forms),
            f"{a} {op} {b} = {value}",
            "This needs the calculator.",
        )
    if kind == "set_timer":
        minutes = rng.randint(1, 90)
        seen = [
            "Set a timer for {m} minutes.",
            "Wake me in {m} minutes.",
            "Remind me in {m} minutes.",
            "Timer: {m} minutes, please.",
            *variety.MORE_TIMER,
        ]
        question = (
            "Start a timer that rings after {m} minutes." if held else rng.choice(seen)
        ).format(m=minutes)
        return (
            question,
            [_call(kind, minutes=minutes)],
            "ok",
            f"The timer is set for {minutes} minutes.",
            "I set a timer.",
        )
    if kind == "send_message":
        to, word = rng.choice(world.NAMES), f"I am {rng.choice(world.FEELINGS)}"
        seen = [
            "Send {t} the message: {w}",
            "Tell {t}: {w}",
            "Write to {t}: {w}",
            "Message to {t}: {w}",
            *variety.MORE_MESSAGE,
        ]
        question = ("Let {t} know this by message: {w}" if held else rng.choice(seen)).format(
            t=to, w=word
        )
        return (
            question,
            [_call(kind, to=to, text=word)],
            "sent",
            f"The message to {to} is sent.",
            f"I send a message to {to}.",
        )
    if kind == "find_book":
        title = f"The {rng.choice(world.ADJECTIVES)} {rng.choice(world.PLACES)}"
        seen = [
            'Find the book "{t}".',
            'Is there a book called "{t}"?',
            'Look for the book "{t}".',
            'I want the book "{t}".',
            *variety.MORE_BOOK,
        ]
        question = ('In the catalogue, is there "{t}"?' if held else rng.choice(seen)).format(
            t=title
        )
        return (
            question,
            [_call(kind, title=title)],
            "found",
            f'Yes, I found "{title}".',
            "I look for the book.",
        )
    room, on = rng.choice(ROOMS), rng.random() < 0.5
    word = "on" if on else "off"
    seen = [
        "Switch the light in the {r} {o}.",
        "Turn {o} the light in the {r}.",
        "Light {o} in the {r}, please.",
        "Please turn the light in the {r} {o}.",
        *variety.MORE_LIGHT,
    ]
    question = ("I want the {r} light {o}." if held else rng.choice(seen)).format(r=room, o=word)
    return (
        question,
        [_call("switch_light", room=room, on=on)],
        "ok",
        f"The light in the {room} is {word}.",
        f"I switch the light {word}.",
    )


def tool_call(rng: random.Random, held: bool = False, *, stop_at_call: bool = False) -> Sample:
    """A request that needs a tool; training also sees the result and the final answer."""
    box = _toolbox(rng)
    question, calls, result, answer, thought = _tool_request(rng, held)
    name = calls[0]["function"]["name"]
    if name in ("get_weather", "get_time") and rng.random() < 0.15:
        first = calls[0]["function"]["arguments"]["city"]
        second = rng.choice([c for c in world.CAPITALS.values() if c != first])
        noun = "weather" if name == "get_weather" else "time"
        question = (
            f"Tell me the {noun} in {first} and in {second}."
            if not held
            else f"Compare the {noun} of {first} with that of {second}."
        )
        calls, stop_at_call = [*calls, _call(name, city=second)], True
        thought = f"The user wants the {noun} in two cities. I call {name} twice."
    others = rng.sample([t for t in box if t != name], rng.randint(0, 4))
    tools = [box[t] for t in rng.sample([name, *others], len(others) + 1)]
    messages: list[Message] = []
    if not held and rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    messages.append(
        {
            "role": "user",
            "content": question
            if held
            else rng.choice(["", "", "", "Hi! ", "Please: "]) + question,
        }
    )
    messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    thinking = not held and rng.random() < 0.25
    check: dict[str, Any] = {"kind": "tool", "expected": [c["function"] for c in calls]}
    if thinking:
        messages[-1]["reasoning"] = thought
    if not stop_at_call:
        messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": result})
        messages.append({"role": "assistant", "content": answer})
        if thinking:
            messages[-1]["reasoning"] = "The tool has answered."
        check = {"kind": "text", "expected": answer}
    effort = rng.choices(["high", "low", "max"], [6, 3, 1])[0]
    return Sample("tool", Chat(messages, tools, thinking, effort), check, 0.02)


def tool_unneeded(rng: random.Random, held: bool = False) -> Sample:
    """Tools are there, the question needs none."""
    inner = rng.choice([fact, small_talk])(rng, held)
    box = _toolbox(rng)
    tools = [box[t] for t in rng.sample(list(box), rng.randint(1, 4))]
    chat = inner.chat
    return Sample("tool", Chat(chat.messages, tools, chat.thinking, chat.effort), inner.check, 0.02)


# ---------------------------------------------------------------- long texts with needles

FILLER = [
    "The {adj} {place} was {sky} that day.",
    "A {job} sold {fruit} near the {place}.",
    "Many {fruit} lay in the {adj} {place}.",
    "The {animal} slept under the {adj} roof.",
    "In the {place} there was a {event}.",
    "Nobody saw the {animal} behind the {place}.",
    "The {job} walked slowly to the {adj} {place}.",
    "After the {event} everybody was {mood}.",
    "A {adj} {thing} hung on the wall.",
    "The {animal} and the {job} looked at the {thing}.",
    "It was {sky} and the people were {mood}.",
    "They ate {food} beside the {place}.",
    "The {place} is not far from the {adj} {place2}.",
    "Some say the {event} was long ago.",
    "The {job} felt {mood} and drank some water.",
    "Every {day} the {job} cleans the {thing}.",
    "On {day} the {place} is closed.",
    "A {colour} {thing} was lost in the {place}.",
    "The weather in the {place} was {sky}.",
    "There were {num} {fruit} on the table.",
]


def filler(rng: random.Random) -> str:
    """One sentence that never answers a question."""
    pick = rng.choice
    return pick(FILLER).format(
        adj=pick(world.ADJECTIVES),
        place=pick(world.PLACES),
        place2=pick(world.PLACES),
        sky=pick(world.CONDITIONS),
        job=pick(world.JOBS),
        fruit=pick(world.FRUITS),
        animal=pick(world.ANIMALS),
        event=pick(world.EVENTS),
        mood=pick(world.FEELINGS),
        thing=pick(world.OBJECTS),
        food=pick(world.FOODS),
        day=pick(world.DAYS),
        colour=pick(world.COLOUR_NAMES),
        num=rng.randint(2, 99),
    )


def _needle_value(rng: random.Random, kind: str) -> str:
    if kind == "code":
        return f"{rng.randrange(1000, 10000)}"
    if kind == "room":
        return f"{rng.randrange(100, 1000)}"
    return rng.choice(world.OBJECTS if kind == "object" else list(world.CAPITALS.values()))


BEFORE = [
    "Read this text:\n\n",
    "Here are some notes.\n\n",
    "Text:\n",
    "Please read the following.\n\n",
    "",
    "Notes: ",
]
AFTER = ["\n\n", "\n\nQuestion: ", "\n", "\n\nNow answer: ", " "]


def haystack(
    rng: random.Random,
    held: bool = False,
    *,
    sentences: int = 0,
    needles: int = 0,
    early: bool = False,
) -> Sample:
    """Facts about people hidden in filler. `early` puts those asked for into the text's first eighth."""
    sentences = sentences or rng.randint(3, 50)
    needles = needles or rng.randint(1, 12)
    people = rng.sample(world.NAMES, needles)
    hidden = []
    for person in people:
        kind = rng.choices(list(NEEDLES), [5, 2, 2, 2])[0]
        hidden.append((kind, person, _needle_value(rng, kind)))
    asked = rng.sample(hidden, 1 if held else min(needles, rng.randint(1, 6)))
    lines = [filler(rng) for _ in range(sentences)]
    for kind, person, value in hidden:
        span = (
            max(1, len(lines) // 8) if early and (kind, person, value) in asked else len(lines) + 1
        )
        lines.insert(rng.randrange(span), rng.choice(NEEDLES[kind][0]).format(k=person, v=value))
    joint = rng.choice([" ", " ", "\n"])
    turns = []
    for i, (kind, person, value) in enumerate(asked):
        _, phrases, questions, answer, held_questions = NEEDLES[kind]
        template = (
            ask_held(rng, phrases, [], held_questions)
            if held
            else ask(rng, phrases, questions, 0.5)
        )
        question = fill(template, k=person)
        if i == 0:
            question = rng.choice(BEFORE) + joint.join(lines) + rng.choice(AFTER) + question
        turns.append((question, answer.format(k=person, v=value)))
    kind, _, value = asked[-1]
    check = {"kind": "number" if kind in ("code", "room") else "word", "expected": value}
    chat = _chat(rng, turns, f"The text says: {turns[-1][1]}", held=held)
    return Sample("needle", chat, check, 0.02)


# ---------------------------------------------------------------- stories

TELL_LONG = [
    "Tell me a long story about {h} the {k}.",
    "Write a long story about {h} the {k}.",
    "I want to hear a very long story about {h} the {k}.",
    "Please tell the long story of {h} the {k}.",
    "Tell me the journey of {h} the {k}.",
    "Write a long story. The hero is {h} the {k}.",
    "A long story about {h} the {k}, please.",
]
TELL_COUNTED = [
    "Tell me a story about {h} the {k} in {n} chapters.",
    "Write a story with {n} chapters about {h} the {k}.",
    "I want a story of {n} chapters about {h} the {k}.",
]
TELL_ANY = [
    "Tell me a long story.",
    "Write a long story.",
    "Please write a very long story.",
    "I want a long story.",
    "Tell a story with many chapters.",
    "Write a long story with many chapters.",
]
TELL_SHORT = [
    "Tell me a short story about a {k}.",
    "Write a short story about a {k}.",
    "A short story about a {k}, please.",
    "Tell me a story about a {k}.",
    "I want to hear a short story about a {k}.",
]
HELD_TELL_LONG = ["Could you write down the whole long tale of {h} the {k} for me?"]


def long_story(rng: random.Random, held: bool = False, *, chapters: int = 24) -> Sample:
    """A journey without an end in sight: 24 chapters overflow a short row, 75 fill a long one; the cut leaves no ending."""
    if not held and rng.random() < 0.25:
        hero, question = 0, rng.choice(TELL_ANY)
    else:
        hero = rng.randrange(len(stories.HEROES))
        name, kind = stories.HEROES[hero]
        question = rng.choice(
            HELD_TELL_LONG if held else TELL_LONG + variety.MORE_LONG_STORIES
        ).format(h=name, k=kind)
    text = stories.journey(hero, chapters, ends=False)
    return Sample(
        "story", _chat(rng, [(question, text)], held=True), {"kind": "story", "expected": text}
    )


def counted_story(rng: random.Random, held: bool = False) -> Sample:
    """A journey that must end after the chapters asked for."""
    hero, n = rng.randrange(len(stories.HEROES)), rng.randint(1, 8)
    name, kind = stories.HEROES[hero]
    question = rng.choice(TELL_COUNTED).format(h=name, k=kind, n=n)
    text = stories.journey(hero, n, ends=True)
    return Sample(
        "story", _chat(rng, [(question, text)], held=held), {"kind": "text", "expected": text}
    )


def short_story(rng: random.Random, held: bool = False) -> Sample:
    """Four sentences about an animal."""
    kind = rng.choice(world.ANIMALS[:43])
    text = stories.short_story(kind)
    question = (
        "I would enjoy a brief tale with a {k}."
        if held
        else variety.roughen(rng, rng.choice(TELL_SHORT + variety.MORE_SHORT_STORIES), 0.3)
    )
    return Sample(
        "story",
        _chat(rng, [(question.format(k=kind), text)], held=held),
        {"kind": "text", "expected": text},
    )


# ---------------------------------------------------------------- the mixtures

Maker = Callable[[random.Random], Sample]
SHORT_MIX: list[tuple[Maker, float]] = [
    (fact, 30),
    (arithmetic, 22),
    (word_problem, 6),
    (comparison, 4),
    (follow_up, 4),
    (mixed_turns, 4),
    (memory, 8),
    (copying, 5),
    (listing, 3),
    (small_talk, 3),
    (json_answer, 8),
    (tool_call, 5),
    (tool_unneeded, 1.5),
    (haystack, 7),
    (long_story, 0.7),
    (counted_story, 2),
    (short_story, 2),
]


def _long_haystack(rng: random.Random) -> Sample:
    return haystack(
        rng, sentences=rng.randint(150, 330), needles=rng.randint(4, 30), early=rng.random() < 0.5
    )


def _whole_row_story(rng: random.Random) -> Sample:
    return long_story(rng, chapters=75)


LONG_MIX: list[tuple[Maker, float]] = [(_long_haystack, 4), (_whole_row_story, 1)]


def draw(rng: random.Random, mix: list[tuple[Maker, float]]) -> Sample:
    """One sample of a mixture."""
    maker = rng.choices([m for m, _ in mix], [w for _, w in mix])[0]
    return maker(rng)


def held_frames_used() -> tuple[list[str], list[str]]:
    """(training frames, held-out frames), for the test that keeps them apart."""
    return FRAMES, HELD_FRAMES
