# ruff: noqa: E501 -- tables of wordings read best with one entry to a line
"""How things are asked: wordings that training sees, and wordings that only the battery uses.

A question is `frame(noun phrase)`, or one of a relation's own sentences. `HELD_*` never reach training; a test holds
the two sides apart by comparing the wordings with the slots left open.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from . import variety, world

FRAMES = [
    "What is {np}?",
    "What's {np}?",
    "Tell me {np}.",
    "Name {np}.",
    "Give me {np}.",
    "Do you know {np}?",
    "Can you tell me {np}?",
    "Could you tell me {np}?",
    "I need to know {np}.",
    "I would like to know {np}.",
    "Please tell me {np}.",
    "Please give me {np}.",
    "I forgot {np}. What is it?",
    "Could you remind me of {np}?",
    "Let me know {np}.",
    "What would you say is {np}?",
    "Say {np}.",
    "I want to know {np}.",
    "Do you remember {np}?",
    "Can you name {np}?",
    "Write down {np}.",
    "Answer with {np}.",
    "Find {np}.",
    "Help me with {np}.",
    "I am looking for {np}.",
    "So what is {np}?",
    "And what is {np}?",
    "Tell me please, what is {np}?",
    "My question is: what is {np}?",
    "I ask you for {np}.",
    "Which is {np}?",
    "Quiz question: what is {np}?",
    "What do you know about {np}?",
    "Can you help me? I need {np}.",
    "Do you happen to know {np}?",
    "State {np}.",
    "My teacher wants to know {np}.",
    "My friend asked me for {np}.",
    "Be so kind and tell me {np}.",
    "{np}?",
]
FRAMES += variety.MORE_FRAMES
HELD_FRAMES = [
    "I can't recall {np}, can you?",
    "Would you mind telling me {np}?",
    "For my homework I must write {np}.",
    "Just for fun: {np}, please.",
    "It would be great to hear {np} from you.",
    "Any idea what {np} is?",
    "Kindly state for me {np}.",
    "You surely know {np}, don't you?",
    "Let us see if you know {np}.",
    "Complete this: {np} is",
    "I keep forgetting {np}; help me out.",
    "One more thing I need: {np}.",
]
OPENERS = [
    "",
    "",
    "",
    "",
    "",
    "",
    "Hi! ",
    "Hello! ",
    "Hey, ",
    "Quick question: ",
    "Question: ",
    "Good morning. ",
    "OK. ",
]
OPENERS += [
    "Excuse me. ",
    "Dear assistant, ",
    "Now this: ",
    "Well, ",
    "I have a question. ",
    "Next question. ",
]
CLOSERS = [
    "",
    "",
    "",
    "",
    "",
    "",
    "",
    " Thanks!",
    " Thank you.",
    " Please answer.",
    " Be brief.",
    " Answer in one sentence.",
]
CLOSERS += [" I am curious.", " It is for school.", " Keep it short.", " Please."]


@dataclass(frozen=True)
class Relation:
    """One table of facts with its wordings; `{x}` is the entity, `{y}` the value."""

    name: str
    table: dict[str, str]
    answer: str
    phrases: list[str]
    questions: list[str] = field(default_factory=list)
    held_phrases: list[str] = field(default_factory=list)
    held_questions: list[str] = field(default_factory=list)
    numeric: bool = False


_INVERSE_CAPITALS = {city: country for country, city in world.CAPITALS.items()}
_ELEMENTS = {symbol: element for element, symbol in world.SYMBOLS.items()}
_DIGITS = {word: digits for digits, word in world.NUMBER_WORDS.items()}

RELATIONS = [
    Relation(
        "capital",
        world.CAPITALS,
        "The capital of {x} is {y}.",
        [
            "the capital of {x}",
            "the capital city of {x}",
            "{x}'s capital",
            "{x}'s capital city",
            "the name of the capital of {x}",
            "the city that is the capital of {x}",
        ],
        [
            "Which city is the capital of {x}?",
            "What city is {x}'s capital?",
            "The capital of {x} is which city?",
            "Which capital does {x} have?",
            "{x}: capital?",
            "What is the capital of the country {x}?",
            "In which city is the government of {x}?",
        ],
        ["the capital town of {x}", "the country {x}'s capital"],
        [
            "If I travel to {x}, what is the capital called?",
            "On a map of {x}, which city is marked as the capital?",
            "{x} has a capital. Which one?",
        ],
    ),
    Relation(
        "country",
        _INVERSE_CAPITALS,
        "{x} is the capital of {y}.",
        [
            "the country whose capital is {x}",
            "the country with the capital {x}",
            "the country that has {x} as its capital",
            "the country of which {x} is the capital",
        ],
        [
            "{x} is the capital of which country?",
            "Which country has the capital {x}?",
            "Of which country is {x} the capital?",
            "What country has {x} as its capital?",
            "{x} is the capital of what country?",
        ],
        ["the country where {x} is the capital"],
        ["Whose capital is {x}?", "{x} serves as the capital of which country?"],
    ),
    Relation(
        "continent",
        world.CONTINENTS,
        "{x} is in {y}.",
        [
            "the continent of {x}",
            "the continent where {x} is",
            "the continent that {x} belongs to",
            "the continent on which {x} lies",
        ],
        [
            "On which continent is {x}?",
            "Which continent is {x} in?",
            "Where in the world is {x}?",
            "{x} is on which continent?",
            "To which continent does {x} belong?",
        ],
        ["the continent in which you find {x}"],
        ["If I fly to {x}, on which continent do I land?", "{x} is part of which continent?"],
    ),
    Relation(
        "language",
        world.LANGUAGES,
        "People in {x} speak {y}.",
        [
            "the language of {x}",
            "the language spoken in {x}",
            "the language that people speak in {x}",
            "the main language of {x}",
        ],
        [
            "Which language do people speak in {x}?",
            "What language is spoken in {x}?",
            "What do they speak in {x}?",
            "Which language is spoken in {x}?",
        ],
        ["the language people use in {x}"],
        [
            "Which language should I learn for a trip to {x}?",
            "In {x}, people speak which language?",
        ],
    ),
    Relation(
        "sound",
        world.SOUNDS,
        "A {x} says {y}.",
        [
            "the sound of a {x}",
            "the sound a {x} makes",
            "the noise of a {x}",
            "the noise a {x} makes",
            "the sound that a {x} makes",
        ],
        [
            "What sound does a {x} make?",
            "What does a {x} say?",
            "Which sound does a {x} make?",
            "How does a {x} sound?",
            "A {x} makes which sound?",
            "What noise does a {x} make?",
        ],
        ["the sound you hear from a {x}"],
        ["I hear a {x}. What does it sound like?", "Which noise comes from a {x}?"],
    ),
    Relation(
        "colour",
        world.COLOURS,
        "The colour of {x} is {y}.",
        [
            "the colour of {x}",
            "the color of {x}",
            "the usual colour of {x}",
            "the colour that {x} has",
        ],
        [
            "What colour is {x}?",
            "What color is {x}?",
            "Which colour is {x}?",
            "Which colour does {x} have?",
            "What colour does {x} have?",
        ],
        ["the typical color of {x}"],
        ["If I paint {x}, which colour do I need?", "{x} has which colour?"],
    ),
    Relation(
        "opposite",
        world.OPPOSITES,
        "The opposite of {x} is {y}.",
        [
            "the opposite of {x}",
            "the opposite of the word {x}",
            "the word that means the opposite of {x}",
            "the antonym of {x}",
        ],
        [
            "Which word is the opposite of {x}?",
            "What is the contrary of {x}?",
            "What word means the opposite of {x}?",
            "Not {x} but the opposite: which word?",
            "{x} is the opposite of which word?",
        ],
        ["the opposite word for {x}"],
        [
            "If something is not {x} at all but the very opposite, which word fits?",
            "Which word says the opposite of {x}?",
        ],
    ),
    Relation(
        "day_after",
        world.DAY_AFTER,
        "The day after {x} is {y}.",
        [
            "the day after {x}",
            "the day that comes after {x}",
            "the day that follows {x}",
            "the next day after {x}",
        ],
        [
            "Which day comes after {x}?",
            "What day comes after {x}?",
            "Today is {x}. What day is tomorrow?",
            "Which day follows {x}?",
            "If today is {x}, what day is tomorrow?",
        ],
        ["the day right after {x}"],
        ["It is {x} today. Which day will it be tomorrow?", "After {x} comes which day?"],
    ),
    Relation(
        "day_before",
        world.DAY_BEFORE,
        "The day before {x} is {y}.",
        ["the day before {x}", "the day that comes before {x}", "the day just before {x}"],
        [
            "Which day comes before {x}?",
            "What day comes before {x}?",
            "Today is {x}. What day was yesterday?",
            "If today is {x}, what day was yesterday?",
        ],
        ["the day right before {x}"],
        ["It is {x} today. Which day was it yesterday?", "Before {x} comes which day?"],
    ),
    Relation(
        "month_after",
        world.MONTH_AFTER,
        "The month after {x} is {y}.",
        ["the month after {x}", "the month that comes after {x}", "the month that follows {x}"],
        [
            "Which month comes after {x}?",
            "What month comes after {x}?",
            "Which month follows {x}?",
            "This month is {x}. What month is next?",
        ],
        ["the month right after {x}"],
        ["After {x} comes which month?"],
    ),
    Relation(
        "month_before",
        world.MONTH_BEFORE,
        "The month before {x} is {y}.",
        ["the month before {x}", "the month that comes before {x}", "the month just before {x}"],
        [
            "Which month comes before {x}?",
            "What month comes before {x}?",
            "This month is {x}. What was the last month?",
        ],
        ["the month right before {x}"],
        ["Before {x} comes which month?"],
    ),
    Relation(
        "month_days",
        world.DAYS_IN_MONTH,
        "{x} has {y} days.",
        [
            "the number of days in {x}",
            "the number of days that {x} has",
            "the length of {x} in days",
        ],
        [
            "How many days does {x} have?",
            "How many days are in {x}?",
            "How many days are there in {x}?",
            "{x} has how many days?",
        ],
        ["the count of days in {x}"],
        ["If I stay for all of {x}, how many days is that?"],
        numeric=True,
    ),
    Relation(
        "symbol",
        world.SYMBOLS,
        "The chemical symbol of {x} is {y}.",
        [
            "the chemical symbol of {x}",
            "the symbol of {x}",
            "the symbol for {x}",
            "the symbol of the element {x}",
            "the chemical symbol for {x}",
        ],
        [
            "Which symbol does {x} have?",
            "What is the element symbol of {x}?",
            "How is {x} written in chemistry?",
            "Which chemical symbol stands for {x}?",
        ],
        ["the letters that stand for {x} in chemistry"],
        ["In the periodic table, {x} has which symbol?", "Which symbol do chemists write for {x}?"],
    ),
    Relation(
        "element",
        _ELEMENTS,
        "The symbol {x} stands for {y}.",
        [
            "the element with the symbol {x}",
            "the element with the chemical symbol {x}",
            "the element that has the symbol {x}",
        ],
        [
            "Which element has the symbol {x}?",
            "What element has the symbol {x}?",
            "The symbol {x} stands for which element?",
            "Which element is written {x}?",
        ],
        ["the element whose symbol is {x}"],
        ["Chemists write {x}. Which element do they mean?"],
    ),
    Relation(
        "baby",
        world.BABIES,
        "A young {x} is called a {y}.",
        [
            "the name of a young {x}",
            "the name of a baby {x}",
            "the word for a young {x}",
            "the word for a baby {x}",
        ],
        [
            "What is a young {x} called?",
            "What is a baby {x} called?",
            "What do you call a young {x}?",
            "What do you call a baby {x}?",
            "How is a young {x} called?",
        ],
        ["the name for the young of a {x}"],
        ["A {x} has a baby. What is the little one called?"],
    ),
    Relation(
        "legs",
        world.LEGS,
        "A {x} has {y} legs.",
        ["the number of legs of a {x}", "the number of legs that a {x} has"],
        [
            "How many legs does a {x} have?",
            "How many legs has a {x}?",
            "A {x} has how many legs?",
            "On how many legs does a {x} walk?",
        ],
        ["the leg count of a {x}"],
        ["If I count the legs of one {x}, how many do I get?"],
        numeric=True,
    ),
    Relation(
        "sides",
        world.SIDES,
        "A {x} has {y} sides.",
        ["the number of sides of a {x}", "the number of sides that a {x} has"],
        [
            "How many sides does a {x} have?",
            "How many sides has a {x}?",
            "A {x} has how many sides?",
        ],
        ["the side count of a {x}"],
        ["If I draw a {x}, how many sides do I draw?"],
        numeric=True,
    ),
    Relation(
        "plural",
        world.PLURALS,
        "The plural of {x} is {y}.",
        ["the plural of {x}", "the plural form of {x}", "the plural of the word {x}"],
        [
            "One {x}, two what?",
            "How do you write more than one {x}?",
            "Which word is the plural of {x}?",
        ],
        ["the plural word for {x}"],
        ["I have one {x} and you have many. What is the word for many?"],
    ),
    Relation(
        "past",
        world.PASTS,
        "The past tense of {x} is {y}.",
        [
            "the past tense of {x}",
            "the past of {x}",
            "the past tense of the verb {x}",
            "the past form of {x}",
        ],
        [
            "How do you say {x} in the past?",
            "Which word is the past tense of {x}?",
            "Today I {x}. What did I do yesterday?",
        ],
        ["the past tense form of {x}"],
        ["Put the verb {x} into the past tense."],
    ),
    Relation(
        "spelling",
        world.SPELLINGS,
        "The word {x} is spelled {y}.",
        ["the spelling of {x}", "the spelling of the word {x}", "the letters of the word {x}"],
        [
            "How do you spell {x}?",
            "How is {x} spelled?",
            "Spell {x}.",
            "Spell the word {x}.",
            "Can you spell {x}?",
            "Please spell the word {x}.",
        ],
        ["the way to spell {x}"],
        ["Spell {x} letter by letter.", "Which letters do I need to write {x}?"],
    ),
    Relation(
        "first_letter",
        world.FIRST_LETTERS,
        "The first letter of {x} is {y}.",
        [
            "the first letter of {x}",
            "the first letter of the word {x}",
            "the letter that {x} begins with",
        ],
        [
            "Which letter does {x} begin with?",
            "With which letter does {x} start?",
            "What letter does the word {x} start with?",
        ],
        ["the letter at the start of {x}"],
        ["The word {x} starts with which letter?"],
    ),
    Relation(
        "last_letter",
        world.LAST_LETTERS,
        "The last letter of {x} is {y}.",
        [
            "the last letter of {x}",
            "the last letter of the word {x}",
            "the letter that {x} ends with",
        ],
        [
            "Which letter does {x} end with?",
            "With which letter does {x} end?",
            "What letter does the word {x} end with?",
        ],
        ["the letter at the end of {x}"],
        ["The word {x} ends with which letter?"],
    ),
    Relation(
        "number_word",
        world.NUMBER_WORDS,
        "The number {x} in words is {y}.",
        ["the number {x} in words", "the word for the number {x}", "{x} in words"],
        [
            "How do you write {x} in words?",
            "Write {x} in words.",
            "Write the number {x} as a word.",
        ],
        ["the number {x} as a word"],
        ["Turn the number {x} into words."],
    ),
    Relation(
        "digits",
        _DIGITS,
        "The number {x} in digits is {y}.",
        ["the number {x} in digits", "{x} in digits", "the number {x} as a figure"],
        [
            "How do you write {x} in digits?",
            "Write {x} in digits.",
            "Write the number {x} with digits.",
        ],
        ["the digits of the number {x}"],
        ["Turn the number word {x} into digits."],
        numeric=True,
    ),
]
for _relation in RELATIONS:
    _relation.questions.extend(variety.MORE_QUESTIONS[_relation.name])
    _relation.phrases.extend(variety.MORE_PHRASES[_relation.name])
RELATION = {relation.name: relation for relation in RELATIONS}

SUMS = [
    "{a} + {b}",
    "{a} plus {b}",
    "the sum of {a} and {b}",
    "the result of {a} + {b}",
    "{a} and {b} added together",
]
DIFFERENCES = [
    "{a} - {b}",
    "{a} minus {b}",
    "the result of {a} - {b}",
    "the difference of {a} and {b}",
    "{a} take away {b}",
]
PRODUCTS = [
    "{a} * {b}",
    "{a} times {b}",
    "the product of {a} and {b}",
    "{a} x {b}",
    "{a} multiplied by {b}",
]
QUOTIENTS = [
    "{a} / {b}",
    "{a} divided by {b}",
    "the result of {a} / {b}",
    "the quotient of {a} and {b}",
]
ARITHMETIC = {"+": SUMS, "-": DIFFERENCES, "*": PRODUCTS, "/": QUOTIENTS}
for _op in ARITHMETIC:
    ARITHMETIC[_op].extend(variety.MORE_SUMS[_op])
HELD_ARITHMETIC = {
    "+": ["the total of {a} and {b}", "what you get from adding {a} and {b}"],
    "-": ["what is left of {a} without {b}", "the value of {a} - {b}"],
    "*": ["the value of {a} * {b}", "what you get from {a} times {b}"],
    "/": ["the value of {a} / {b}"],
}
SUM_QUESTIONS = {
    "+": [
        "How much is {a} plus {b}?",
        "How much is {a} + {b}?",
        "Calculate {a} + {b}.",
        "Compute {a} + {b}.",
        "Add {a} and {b}.",
        "{a} + {b} = ?",
        "{a}+{b}=",
        "Work out {a} + {b}.",
        "{a} + {b}",
        "Solve {a} + {b}.",
        "What do you get if you add {a} and {b}?",
        "How much is {a} and {b} together?",
    ],
    "-": [
        "How much is {a} minus {b}?",
        "How much is {a} - {b}?",
        "Calculate {a} - {b}.",
        "Compute {a} - {b}.",
        "Subtract {b} from {a}.",
        "{a} - {b} = ?",
        "{a}-{b}=",
        "Work out {a} - {b}.",
        "{a} - {b}",
        "Take {b} away from {a}.",
    ],
    "*": [
        "How much is {a} times {b}?",
        "How much is {a} * {b}?",
        "Calculate {a} * {b}.",
        "Compute {a} * {b}.",
        "Multiply {a} by {b}.",
        "{a} * {b} = ?",
        "{a}*{b}=",
        "Work out {a} * {b}.",
        "{a} x {b} = ?",
        "Multiply {a} and {b}.",
    ],
    "/": [
        "How much is {a} divided by {b}?",
        "How much is {a} / {b}?",
        "Calculate {a} / {b}.",
        "Compute {a} / {b}.",
        "Divide {a} by {b}.",
        "{a} / {b} = ?",
        "{a}/{b}=",
        "Work out {a} / {b}.",
    ],
}
for _op in SUM_QUESTIONS:
    SUM_QUESTIONS[_op].extend(variety.MORE_SUM_QUESTIONS[_op])
HELD_SUM_QUESTIONS = {
    "+": [
        "{a} plus {b} makes?",
        "If I add {b} to {a}, what do I get?",
        "I have {a} and get {b} more. Calculate.",
    ],
    "-": ["{a} minus {b} makes?", "If I subtract {b} from {a}, what do I get?"],
    "*": ["{a} times {b} makes?", "If I multiply {a} by {b}, what do I get?"],
    "/": ["If I divide {a} by {b}, what do I get?"],
}
COMPARISONS = [
    "Which number is larger, {a} or {b}?",
    "Which is larger, {a} or {b}?",
    "Which is bigger: {a} or {b}?",
    "What is more, {a} or {b}?",
    "Is {a} or {b} the larger number?",
    "Compare {a} and {b}. Which is larger?",
    "Tell me the larger number: {a} or {b}?",
    "Name the larger number of {a} and {b}.",
]
COMPARISONS += variety.MORE_COMPARISONS
HELD_COMPARISONS = [
    "Of the numbers {a} and {b}, which one is larger?",
    "Take {a} and {b}. The larger one is?",
]

STORIES_MORE = [
    "{n} has {a} {things} and gets {b} more. How many {things} does {n} have now?",
    "There are {a} {things} in a box. {n} puts {b} more into it. How many {things} are in the box?",
    "{n} bought {a} {things} on Monday and {b} {things} on Tuesday. How many {things} are that together?",
    "{n} owns {a} {things}. A friend gives {n} {b} {things}. How many {things} does {n} own now?",
    "In the morning {n} finds {a} {things}, in the evening {b} {things}. How many {things} did {n} find?",
    "A basket holds {a} {things} and another holds {b}. How many {things} are there in total?",
]
STORIES_LESS = [
    "{n} has {a} {things} and gives away {b}. How many {things} does {n} have left?",
    "There are {a} {things} in a box. {n} takes {b} of them. How many {things} are left in the box?",
    "{n} had {a} {things} and lost {b}. How many {things} are left?",
    "{n} owns {a} {things} and sells {b}. How many {things} does {n} still have?",
    "Of {a} {things}, {n} eats {b}. How many {things} remain?",
]
STORIES_TIMES = [
    "{n} has {a} boxes with {b} {things} each. How many {things} are that?",
    "There are {a} bags. Each bag holds {b} {things}. How many {things} are there?",
    "{n} buys {b} {things} every day for {a} days. How many {things} does {n} have?",
]
STORIES_MORE += variety.MORE_STORIES_MORE
STORIES_LESS += variety.MORE_STORIES_LESS
STORIES_TIMES += variety.MORE_STORIES_TIMES
HELD_STORIES_MORE = [
    "{n} collects {a} {things}, then another {b}. How many {things} does {n} have in total?"
]
HELD_STORIES_LESS = [
    "{n} starts with {a} {things} and loses {b} of them. How many {things} are left?"
]
HELD_STORIES_TIMES = ["Each of {a} boxes contains {b} {things}. How many {things} are there?"]

# Things a user says about himself: kind -> (values, statements, questions, answer, held-out questions).
MEMORIES: dict[str, tuple[list[str], list[str], list[str], str, list[str]]] = {
    "name": (
        world.NAMES,
        [
            "My name is {v}.",
            "I am called {v}.",
            "I'm {v}.",
            "Call me {v}.",
            "People call me {v}.",
            "Hello, my name is {v}.",
        ],
        [
            "What is my name?",
            "What's my name?",
            "Do you remember my name?",
            "Who am I?",
            "Tell me my name.",
            "What was my name again?",
            "How am I called?",
            "Say my name.",
        ],
        "Your name is {v}.",
        ["Can you still recall my name?", "Which name did I tell you?"],
    ),
    "colour": (
        world.COLOUR_NAMES,
        [
            "My favourite colour is {v}.",
            "The colour I like best is {v}.",
            "I love the colour {v}.",
            "My favorite color is {v}.",
        ],
        [
            "What is my favourite colour?",
            "Which colour do I like best?",
            "What's my favorite color?",
            "Do you remember my favourite colour?",
            "Tell me my favourite colour.",
        ],
        "Your favourite colour is {v}.",
        ["Which colour did I say I like best?", "Can you still recall my favourite colour?"],
    ),
    "city": (
        list(world.CAPITALS.values()),
        ["I live in {v}.", "My home is in {v}.", "I come from {v}.", "My city is {v}."],
        [
            "Where do I live?",
            "In which city do I live?",
            "What is my city?",
            "Do you remember where I live?",
            "Tell me where I live.",
        ],
        "You live in {v}.",
        ["Which city did I say I live in?", "Can you still recall where I live?"],
    ),
    "number": (
        [str(n) for n in range(10, 100)],
        [
            "My lucky number is {v}.",
            "The number I like best is {v}.",
            "Remember the number {v}.",
            "My number is {v}.",
        ],
        [
            "What is my lucky number?",
            "Which number do I like best?",
            "What's my number?",
            "Do you remember my lucky number?",
            "Tell me my lucky number.",
        ],
        "Your lucky number is {v}.",
        ["Which number did I say is my lucky number?", "Can you still recall my lucky number?"],
    ),
    "pet": (
        world.ANIMALS,
        ["I have a pet {v}.", "My pet is a {v}.", "At home I have a {v}.", "I own a {v}."],
        [
            "Which pet do I have?",
            "What pet do I have?",
            "What is my pet?",
            "Do you remember my pet?",
            "Tell me which pet I have.",
        ],
        "You have a {v}.",
        ["Which pet did I say I have?", "Can you still recall my pet?"],
    ),
    "food": (
        world.FOODS,
        [
            "My favourite food is {v}.",
            "I like to eat {v}.",
            "I love {v}.",
            "The food I like best is {v}.",
        ],
        [
            "What is my favourite food?",
            "What do I like to eat?",
            "Which food do I like best?",
            "Do you remember my favourite food?",
            "Tell me my favourite food.",
        ],
        "Your favourite food is {v}.",
        ["Which food did I say I like best?", "Can you still recall my favourite food?"],
    ),
    "job": (
        world.JOBS,
        ["I am a {v}.", "I work as a {v}.", "My job is {v}.", "I earn my money as a {v}."],
        [
            "What is my job?",
            "What do I work as?",
            "Do you remember my job?",
            "Tell me my job.",
            "Which job do I have?",
        ],
        "You are a {v}.",
        ["Which job did I say I have?", "Can you still recall my job?"],
    ),
}

for _kind, _entry in MEMORIES.items():
    _entry[2].extend(variety.MORE_MEMORY[_kind])

# Facts hidden in long texts: kind -> (sentences, noun phrases, questions, answer, held-out questions).
NEEDLES: dict[str, tuple[list[str], list[str], list[str], str, list[str]]] = {
    "code": (
        [
            "The code of {k} is {v}.",
            "{k}'s code is {v}.",
            "The code for {k} is {v}.",
            "Note: the code of {k} is {v}.",
        ],
        ["the code of {k}", "{k}'s code", "the code for {k}", "the code that belongs to {k}"],
        ["Which code does {k} have?", "Which code belongs to {k}?", "What code does {k} have?"],
        "The code of {k} is {v}.",
        [
            "According to the text, which code does {k} have?",
            "In what is written above, {k} has which code?",
        ],
    ),
    "room": (
        [
            "{k} lives in room {v}.",
            "The room of {k} is room {v}.",
            "{k}'s room is room {v}.",
            "You find {k} in room {v}.",
        ],
        ["the room of {k}", "{k}'s room", "the room number of {k}"],
        ["In which room does {k} live?", "Where do I find {k}?", "Which room does {k} have?"],
        "{k} lives in room {v}.",
        [
            "According to the text, in which room is {k}?",
            "In what is written above, {k} has which room?",
        ],
    ),
    "object": (
        [
            "{k} carries a {v}.",
            "{k} owns a {v}.",
            "In the bag of {k} is a {v}.",
            "{k} keeps a {v} at home.",
        ],
        ["the thing that {k} owns", "the thing that {k} carries"],
        [
            "What does {k} carry?",
            "What does {k} own?",
            "Which thing does {k} own?",
            "What is in the bag of {k}?",
        ],
        "{k} owns a {v}.",
        ["According to the text, what does {k} own?", "Look up what {k} owns."],
    ),
    "city": (
        [
            "{k} comes from {v}.",
            "{k} was born in {v}.",
            "The home of {k} is {v}.",
            "{k} moved here from {v}.",
        ],
        ["the home city of {k}", "the city {k} comes from", "the home of {k}"],
        [
            "Where does {k} come from?",
            "From which city does {k} come?",
            "Where is {k} from?",
            "Where is the home of {k}?",
        ],
        "{k} comes from {v}.",
        ["According to the text, where does {k} come from?", "Look up where {k} comes from."],
    ),
}

for _kind, _needle in NEEDLES.items():
    _needle[2].extend(variety.MORE_NEEDLES[_kind])


def fill(template: str, **slots: str) -> str:
    """Fill the slots; a sentence that then begins with a small letter gets a capital one."""
    text = template.format(**slots)
    return text[0].upper() + text[1:]


def wordings(relation: Relation) -> tuple[list[str], list[str]]:
    """All (training, held-out) wordings of a relation, slots open."""
    train = [f.format(np=p) for f in FRAMES for p in relation.phrases] + relation.questions
    held = [f.format(np=p) for f in HELD_FRAMES for p in relation.phrases + relation.held_phrases]
    held += [
        f.format(np=p) for f in FRAMES for p in relation.held_phrases
    ] + relation.held_questions
    return train, held


def ask(
    rng: random.Random, phrases: list[str], questions: list[str], own_share: float = 0.4
) -> str:
    """A training wording, slots open: one of the relation's own, or a frame around a noun phrase."""
    if questions and rng.random() < own_share:
        wording = rng.choice(questions)
    else:
        wording = rng.choice(FRAMES).format(np=rng.choice(phrases))
    return variety.roughen(rng, wording)


def ask_held(
    rng: random.Random, phrases: list[str], held_phrases: list[str], held_questions: list[str]
) -> str:
    """A wording that training never saw, slots open."""
    kind = rng.random()
    if held_questions and kind < 0.4:
        return rng.choice(held_questions)
    if held_phrases and kind < 0.65:
        return rng.choice(FRAMES).format(np=rng.choice(held_phrases))
    return rng.choice(HELD_FRAMES).format(np=rng.choice(phrases))


def dress(rng: random.Random, question: str) -> str:
    """Everyday noise around a training question: greetings, thanks, casing, missing punctuation."""
    if rng.random() < 0.12:
        question = f"{variety.idle_sentence(rng)} {question}"
    question = rng.choice(OPENERS) + question + rng.choice(CLOSERS)
    dice = rng.random()
    if dice < 0.08:
        question = question.lower()
    elif dice < 0.14:
        question = question.rstrip("?.!")
    elif dice < 0.17:
        question = question.replace("?", "??")
    return question
