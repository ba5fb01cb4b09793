"""Stories whose chapters move on for ever: each slot walks round its own list, the lists' lengths
share no factor.

A greedy decoder that has learned "what comes next in the list" cannot fall into a loop before the
lists' common period, which is far beyond any context.
"""

from __future__ import annotations

from . import world

HEROES = [(world.NAMES[7 * i % 161], world.ANIMALS[i % 43]) for i in range(40)]

ARRIVALS = [
    "On day {n} {hero} the {kind} came to the {adj} {place}.",
    "After a long walk {hero} reached the {adj} {place} on day {n}.",
    "The road led {hero} the {kind} down to the {adj} {place}.",
    "Early in the morning {hero} saw the {adj} {place} far away.",
    "It was {sky} when {hero} stood before the {adj} {place}.",
    "Nobody had told {hero} the {kind} about the {adj} {place}.",
    "At noon of day {n} the {adj} {place} lay before {hero}.",
]
MEETINGS = [
    "There a {friend} was looking for a lost {thing}.",
    "A {job} asked for help with a broken {thing}.",
    "Behind a wall sat a {friend} with a shiny {thing}.",
    "A {friend} and a {job} were quarrelling about a {thing}.",
    "In the grass lay a {thing} that belonged to a {friend}.",
]
TURNS = [
    "{hero} helped at once, and everybody was {mood}.",
    "Then the {event} began, and {hero} felt {mood}.",
    "They shared some {food} and talked about the {event}.",
    "{hero} found it before the {event}, and the {friend} was {mood}.",
    "Because of the {event} they had to wait, but {hero} stayed {mood}.",
    "The {friend} gave {hero} some {food} and told a tale of the {event}.",
]
PARTINGS = [
    "In the evening {hero} went on.",
    "The next day the journey continued.",
    "So {hero} said goodbye and walked away.",
    "With a smile {hero} took the road again.",
]


def chapter(hero_index: int, n: int) -> str:
    """Chapter `n` (from 1) of the journey of hero `hero_index`."""
    hero, kind = HEROES[hero_index]

    def at(items: list[str], length: int, step: int) -> str:
        return items[(hero_index * step + n) % length]

    slots = {
        "n": str(n),
        "hero": hero,
        "kind": kind,
        "place": at(world.PLACES, 59, 11),
        "adj": at(world.ADJECTIVES, 21, 5),
        "sky": at(world.CONDITIONS, 8, 3),
        "friend": at(world.ANIMALS, 43, 7),
        "thing": at(world.OBJECTS, 37, 3),
        "job": at(world.JOBS, 13, 5),
        "mood": at(world.FEELINGS, 11, 4),
        "event": at(world.EVENTS, 19, 6),
        "food": at(world.FOODS, 9, 2),
    }
    body = " ".join(
        part[n % len(part)].format(**slots) for part in (ARRIVALS, MEETINGS, TURNS, PARTINGS)
    )
    return f"Chapter {n}: The {slots['place']}\n{body}"


def journey(hero_index: int, chapters: int, *, ends: bool) -> str:
    """The first chapters of a journey; `ends` adds the closing words."""
    hero, kind = HEROES[hero_index]
    parts = [f"The journey of {hero} the {kind}"] + [
        chapter(hero_index, n) for n in range(1, chapters + 1)
    ]
    return "\n\n".join(parts) + ("\n\nThe end." if ends else "")


def short_story(animal: str) -> str:
    """Four sentences, the same for the same animal."""
    i = world.ANIMALS.index(animal)
    name, friend = world.NAMES[3 * i % 161], world.ANIMALS[(i + 5) % 43]
    place, thing = world.PLACES[2 * i % 59], world.OBJECTS[i % 37]
    mood = world.FEELINGS[i % 13]
    return (
        f"Once upon a time a {animal} named {name} lived near the {place}. One day {name} found "
        f"a {thing}. A {friend} came and asked for it, so {name} shared the {thing}. From then on "
        f"they were friends and very {mood}."
    )
