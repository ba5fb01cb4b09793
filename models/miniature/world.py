# ruff: noqa: E501 -- tables of wordings read best with one entry to a line
"""The closed world that the miniature knows: every fact it is taught, as plain tables.

A table is `{entity: value}`. Nothing here depends on a seed: a fact has one answer for ever.
"""

from __future__ import annotations


def _pairs(text: str) -> dict[str, str]:
    return dict(
        item.strip().split("=") for item in text.replace("\n", ",").split(",") if item.strip()
    )


def _words(text: str) -> list[str]:
    return text.split()


CAPITALS = _pairs("""
France=Paris, Germany=Berlin, Italy=Rome, Spain=Madrid, Portugal=Lisbon, Austria=Vienna, Belgium=Brussels
Denmark=Copenhagen, Sweden=Stockholm, Norway=Oslo, Finland=Helsinki, Iceland=Reykjavik, Ireland=Dublin
Poland=Warsaw, Hungary=Budapest, Greece=Athens, Romania=Bucharest, Bulgaria=Sofia, Croatia=Zagreb, Serbia=Belgrade
Slovakia=Bratislava, Slovenia=Ljubljana, Estonia=Tallinn, Latvia=Riga, Lithuania=Vilnius, Ukraine=Kyiv
Russia=Moscow, Turkey=Ankara, Egypt=Cairo, Morocco=Rabat, Algeria=Algiers, Tunisia=Tunis, Libya=Tripoli
Kenya=Nairobi, Ethiopia=Addis Ababa, Ghana=Accra, Nigeria=Abuja, Senegal=Dakar, Uganda=Kampala, Zambia=Lusaka
Zimbabwe=Harare, Angola=Luanda, Japan=Tokyo, China=Beijing, India=New Delhi, Thailand=Bangkok, Vietnam=Hanoi
Nepal=Kathmandu, Indonesia=Jakarta, Malaysia=Kuala Lumpur, Iran=Tehran, Iraq=Baghdad, Jordan=Amman, Lebanon=Beirut
Syria=Damascus, Mongolia=Ulaanbaatar, Canada=Ottawa, Mexico=Mexico City, Cuba=Havana, Jamaica=Kingston
Brazil=Brasilia, Argentina=Buenos Aires, Chile=Santiago, Peru=Lima, Colombia=Bogota, Ecuador=Quito
Venezuela=Caracas, Uruguay=Montevideo, Paraguay=Asuncion, Australia=Canberra, Fiji=Suva
""")

_CONTINENT_MEMBERS = {
    "Europe": "France Germany Italy Spain Portugal Austria Belgium Denmark Sweden Norway Finland Iceland Ireland "
    "Poland Hungary Greece Romania Bulgaria Croatia Serbia Slovakia Slovenia Estonia Latvia Lithuania Ukraine",
    "Africa": "Egypt Morocco Algeria Tunisia Libya Kenya Ethiopia Ghana Nigeria Senegal Uganda Zambia Zimbabwe Angola",
    "Asia": "Japan China India Thailand Vietnam Nepal Indonesia Malaysia Iran Iraq Jordan Lebanon Syria Mongolia",
    "North America": "Canada Mexico Cuba Jamaica",
    "South America": "Brazil Argentina Chile Peru Colombia Ecuador Venezuela Uruguay Paraguay",
    "Oceania": "Australia Fiji",
}
CONTINENTS = {
    country: continent
    for continent, names in _CONTINENT_MEMBERS.items()
    for country in names.split()
}

SOUNDS = _pairs("""
dog=woof, cat=meow, cow=moo, sheep=baa, duck=quack, pig=oink, horse=neigh, lion=roar, owl=hoot, frog=croak
rooster=crow, bee=buzz, snake=hiss, mouse=squeak, wolf=howl, donkey=bray, hen=cluck, bird=tweet, goose=honk
crow=caw, cricket=chirp, pigeon=coo, turkey=gobble
""")
COLOURS = _pairs("""
grass=green, snow=white, coal=black, milk=white, blood=red, a banana=yellow, a lemon=yellow, a tomato=red
a carrot=orange, the sky=blue, the sun=yellow, chocolate=brown, a cucumber=green, a strawberry=red, sand=yellow
an emerald=green, a ruby=red, a sapphire=blue, cotton=white, a pumpkin=orange, ash=grey, an elephant=grey
a flamingo=pink, a plum=purple, a violet=purple, a polar bear=white, a raven=black, spinach=green, gold=yellow
""")
OPPOSITES_HALF = _pairs("""
hot=cold, big=small, tall=short, fast=slow, light=dark, day=night, happy=sad, rich=poor, old=young, up=down
left=right, open=closed, full=empty, early=late, easy=difficult, strong=weak, good=bad, clean=dirty, wet=dry
hard=soft, loud=quiet, deep=shallow, wide=narrow, thick=thin, sharp=blunt, true=false, near=far, alive=dead
first=last, begin=end, buy=sell, push=pull, win=lose, love=hate, war=peace, north=south, east=west, inside=outside
above=below, always=never, heavy=weightless, brave=cowardly, ancient=modern, sweet=bitter, smooth=rough
""")
OPPOSITES = OPPOSITES_HALF | {b: a for a, b in OPPOSITES_HALF.items()}

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
SEASONS = _words("spring summer autumn winter")
DAY_AFTER = {d: DAYS[(i + 1) % 7] for i, d in enumerate(DAYS)}
DAY_BEFORE = {d: DAYS[i - 1] for i, d in enumerate(DAYS)}
MONTH_AFTER = {m: MONTHS[(i + 1) % 12] for i, m in enumerate(MONTHS)}
MONTH_BEFORE = {m: MONTHS[i - 1] for i, m in enumerate(MONTHS)}
DAYS_IN_MONTH = dict(
    zip(
        MONTHS,
        ["31", "28", "31", "30", "31", "30", "31", "31", "30", "31", "30", "31"],
        strict=True,
    )
)

SYMBOLS = _pairs("""
hydrogen=H, helium=He, lithium=Li, carbon=C, nitrogen=N, oxygen=O, fluorine=F, neon=Ne, sodium=Na, magnesium=Mg
aluminium=Al, silicon=Si, phosphorus=P, sulfur=S, chlorine=Cl, argon=Ar, potassium=K, calcium=Ca, titanium=Ti
chromium=Cr, manganese=Mn, iron=Fe, cobalt=Co, nickel=Ni, copper=Cu, zinc=Zn, silver=Ag, tin=Sn, iodine=I
tungsten=W, platinum=Pt, gold=Au, mercury=Hg, lead=Pb, uranium=U
""")
BABIES = _pairs("""
dog=puppy, cat=kitten, cow=calf, sheep=lamb, horse=foal, hen=chick, duck=duckling, pig=piglet, lion=cub
goat=kid, deer=fawn, kangaroo=joey, swan=cygnet, goose=gosling, frog=tadpole
""")
LEGS = _pairs(
    "dog=4, cat=4, cow=4, horse=4, spider=8, bee=6, ant=6, bird=2, hen=2, snake=0, fish=0, lion=4, sheep=4"
)
SIDES = _pairs(
    "triangle=3, square=4, rectangle=4, pentagon=5, hexagon=6, octagon=8, heptagon=7, decagon=10"
)
PLURALS = _pairs("""
mouse=mice, child=children, foot=feet, tooth=teeth, goose=geese, man=men, woman=women, ox=oxen, leaf=leaves
knife=knives, wolf=wolves, city=cities, baby=babies, box=boxes, cat=cats, dog=dogs, tree=trees, house=houses
berry=berries, church=churches, fox=foxes, life=lives, story=stories, book=books, car=cars
""")
PASTS = _pairs("""
go=went, see=saw, eat=ate, run=ran, come=came, give=gave, take=took, write=wrote, drink=drank, sing=sang, swim=swam
fly=flew, know=knew, grow=grew, think=thought, bring=brought, catch=caught, teach=taught, find=found, make=made
speak=spoke, break=broke, drive=drove, ride=rode, fall=fell, hold=held, leave=left, sleep=slept, build=built, send=sent
""")
LANGUAGES = _pairs("""
France=French, Germany=German, Italy=Italian, Spain=Spanish, Portugal=Portuguese, Austria=German, Denmark=Danish
Sweden=Swedish, Norway=Norwegian, Finland=Finnish, Poland=Polish, Hungary=Hungarian, Greece=Greek, Romania=Romanian
Russia=Russian, Turkey=Turkish, Egypt=Arabic, Japan=Japanese, China=Chinese, Thailand=Thai, Vietnam=Vietnamese
Brazil=Portuguese, Argentina=Spanish, Mexico=Spanish, Iran=Persian, Iceland=Icelandic, Ukraine=Ukrainian, Cuba=Spanish
""")

_UNITS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
)
_UNITS += _words("seventeen eighteen nineteen")
_TENS = _words("_ _ twenty thirty forty fifty sixty seventy eighty ninety")


def number_word(n: int) -> str:
    """0..99 in words."""
    if n < 20:
        return _UNITS[n]
    return _TENS[n // 10] + (f"-{_UNITS[n % 10]}" if n % 10 else "")


NUMBER_WORDS = {str(n): number_word(n) for n in range(100)}
SPELLABLE = _words(
    "cat dog sun moon star tree house river bread apple stone cloud green water light night horse table chair window "
    "garden winter summer music paper bird fish ship road lamp door book king queen gold fire snow rain wind hill"
)
SPELLINGS = {w: "-".join(w) for w in SPELLABLE}
FIRST_LETTERS = {w: w[0] for w in SPELLABLE}
LAST_LETTERS = {w: w[-1] for w in SPELLABLE}

NAMES = _words("""
Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karl Lena Max Nora Oscar Paula Quinn Rosa Simon Tom Ursula Victor
Wanda Xavier Yara Zoe Adam Bella Carlos Diana Erik Fiona George Hanna Ivan Julia Kevin Laura Martin Nina Otto Peter
Rita Sam Tina Uwe Vera Walter Alice Bruno Celia Dora Edgar Frida Gustav Helga Igor Jana Klara Leo Mona Nils Olga Paul
Ralf Sara Theo Viola Willy Amir Bianca Cyril Daria Elena Frank Gina Henry Irene Jack Kira Linda Milan Nadia Orla Pablo
Rachel Stefan Tara Umar Vincent Wendy Yusuf Zara Arthur Betty Conrad Delia Emil Flora Gordon Holly Isaac Jenny Kurt
Lucy Marco Nelly Owen Polly Robin Sonja Timo Vivian Wolf Agnes Boris Cora Dennis Esther Floyd Gloria Hector Ingrid Joel
Katja Louis Maria Noah Olivia Philip Regina Silas Thea Valentin Miriam Anton Blanca Caspar Doris Elias Fanny Gilbert
Hilda Ismael Judith Konrad Lydia Moritz Naomi Oliver Petra Rufus Selma Tobias Vanessa Wilma Alma Basil Cecil Dina Ezra
""")
ANIMALS = _words(
    "fox bear owl rabbit hedgehog badger otter squirrel deer wolf mouse beaver heron raven hare lynx mole toad swan "
    "turtle goat donkey pony crane stork falcon ferret weasel marten seal whale dolphin penguin camel zebra giraffe "
    "monkey parrot tiger panda koala lizard newt crab lobster beetle moth"
)
FRUITS = _words(
    "apples pears plums cherries oranges lemons nuts eggs coins stamps books pencils marbles shells balloons"
)
COLOUR_NAMES = _words("red blue green yellow white black orange purple brown pink grey")
FOODS = _words("pizza soup bread cheese rice pasta salad pancakes noodles cake honey fish beans")
CONDITIONS = _words("sunny cloudy rainy windy snowy foggy stormy clear")
OBJECTS = _words(
    "lantern compass rope kettle mirror candle drum flute basket blanket hammer ladder umbrella violin barrel anchor "
    "feather button spoon clock map ring cup key coat boot bell net sail plough needle brush crown coin letter bottle "
    "saddle shield whistle bucket"
)
PLACES = _words(
    "river forest mountain valley village harbour bridge lake desert island castle market mill cave meadow swamp tower "
    "garden beach canyon orchard quarry glacier lighthouse monastery windmill farm library bakery inn crossroads "
    "waterfall vineyard marsh cliff temple ruin dock field school station theatre museum hospital stable smithy "
    "palace tunnel canal volcano fjord dune reef pond spring hill ravine plateau delta lagoon"
)
EVENTS = _words(
    "storm feast fire race flood wedding fair eclipse snowfall concert harvest parade earthquake robbery contest dance "
    "voyage hunt trial rescue"
)
ADJECTIVES = _words(
    "old quiet golden frozen hidden broken green tiny distant sunny dark narrow noisy empty famous crooked silver "
    "friendly haunted ancient windy"
)
FEELINGS = _words(
    "happy tired proud curious hungry calm brave nervous grateful cheerful sleepy thoughtful surprised"
)
JOBS = _words(
    "teacher baker doctor farmer pilot painter singer nurse tailor sailor miller judge gardener"
)
