"""The demo model's training text: facts in plain text and in chats, and little stories.

In: a random.Random that the caller seeds. Out: plain documents and dialogs, in text; the same seed
gives the same corpus. It knows nothing of tokens or training. It is longer than other files because
most of it is tables of facts.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from demo_model.stories import BOYS, GIRLS, KINDS, cast, stories, tell

Turn = tuple[Literal["system", "user", "assistant"], str]  # role, content


@dataclass(frozen=True)
class Fact:
    """One thing the demo model knows: every question here has the same one-sentence answer."""

    questions: tuple[str, ...]
    answer: str
    topic: str
    statement: bool = True  # whether the answer also makes sense as plain text


# --- tables of facts: each line is "key: value" pairs split by commas, to keep them readable ---

CAPITALS = """
France: Paris, Germany: Berlin, Italy: Rome, Spain: Madrid, Portugal: Lisbon, Austria: Vienna,
Belgium: Brussels, Denmark: Copenhagen, Sweden: Stockholm, Norway: Oslo, Finland: Helsinki,
Iceland: Reykjavik, Ireland: Dublin, England: London, Scotland: Edinburgh, Wales: Cardiff,
Poland: Warsaw, Hungary: Budapest, Greece: Athens, Turkey: Ankara, Russia: Moscow, Ukraine: Kyiv,
Romania: Bucharest, Bulgaria: Sofia, Serbia: Belgrade, Croatia: Zagreb, Slovenia: Ljubljana,
Slovakia: Bratislava, Albania: Tirana, Estonia: Tallinn, Latvia: Riga, Lithuania: Vilnius,
Belarus: Minsk, Switzerland: Bern, Malta: Valletta, Cyprus: Nicosia, Armenia: Yerevan,
Georgia: Tbilisi, Azerbaijan: Baku, China: Beijing, Japan: Tokyo, South Korea: Seoul,
North Korea: Pyongyang, Mongolia: Ulaanbaatar, Vietnam: Hanoi, Thailand: Bangkok,
Laos: Vientiane, Cambodia: Phnom Penh, Indonesia: Jakarta, Malaysia: Kuala Lumpur,
India: New Delhi, Pakistan: Islamabad, Bangladesh: Dhaka, Nepal: Kathmandu, Bhutan: Thimphu,
Afghanistan: Kabul, Iran: Tehran, Iraq: Baghdad, Syria: Damascus, Lebanon: Beirut, Jordan: Amman,
Saudi Arabia: Riyadh, Oman: Muscat, Qatar: Doha, Yemen: Sanaa, Egypt: Cairo, Libya: Tripoli,
Tunisia: Tunis, Algeria: Algiers, Morocco: Rabat, Sudan: Khartoum, Ethiopia: Addis Ababa,
Kenya: Nairobi, Uganda: Kampala, Rwanda: Kigali, Somalia: Mogadishu, Ghana: Accra,
Nigeria: Abuja, Senegal: Dakar, Mali: Bamako, Angola: Luanda, Zambia: Lusaka, Zimbabwe: Harare,
Namibia: Windhoek, Botswana: Gaborone, Mozambique: Maputo, Madagascar: Antananarivo,
Canada: Ottawa, Mexico: Mexico City, Cuba: Havana, Jamaica: Kingston, Panama: Panama City,
Costa Rica: San Jose, Colombia: Bogota, Venezuela: Caracas, Ecuador: Quito, Peru: Lima,
Bolivia: Sucre, Chile: Santiago, Argentina: Buenos Aires, Uruguay: Montevideo,
Paraguay: Asuncion, Brazil: Brasilia, Australia: Canberra, New Zealand: Wellington, Fiji: Suva,
the United States: Washington, the Netherlands: Amsterdam, the Philippines: Manila
"""

COLOURS = """
the sky: blue, grass: green, snow: white, coal: black, a banana: yellow, a strawberry: red,
an orange: orange, a lemon: yellow, a carrot: orange, milk: white, blood: red, chocolate: brown,
a frog: green, a crow: black, a swan: white, a flamingo: pink, an elephant: grey, the sun: yellow,
a tomato: red, a leaf: green, a plum: purple, salt: white, gold: yellow, a pea: green,
a polar bear: white, a fire engine: red
"""

OPPOSITES = """
hot: cold, big: small, fast: slow, up: down, left: right, day: night, light: dark, happy: sad,
old: young, rich: poor, hard: soft, wet: dry, open: closed, full: empty, high: low, long: short,
strong: weak, loud: quiet, early: late, easy: difficult, good: bad, clean: dirty, near: far,
first: last, front: back, thick: thin, wide: narrow, true: false, yes: no,
black: white, inside: outside, above: below, push: pull, buy: sell, win: lose, start: stop,
begin: end, give: take, love: hate, war: peace, summer: winter, north: south, east: west,
always: never, alive: dead, brave: afraid, sharp: blunt, deep: shallow, sweet: bitter
"""

SOUNDS = """
dog: woof, cat: meow, cow: moo, duck: quack, sheep: baa, horse: neigh, pig: oink, lion: roar,
bee: buzz, snake: hiss, owl: hoot, frog: croak, bird: tweet, mouse: squeak, wolf: howl
"""

YOUNG = """
cat: kitten, dog: puppy, cow: calf, horse: foal, sheep: lamb, goat: kid, pig: piglet,
duck: duckling, hen: chick, lion: cub, deer: fawn, kangaroo: joey, frog: tadpole,
goose: gosling, swan: cygnet, eagle: eaglet, owl: owlet, butterfly: caterpillar,
bear: cub, elephant: calf, rabbit: kit
"""

FRENCH = """
cat: chat, dog: chien, house: maison, school: école, bread: pain, milk: lait, cheese: fromage,
water: eau, summer: été, winter: hiver, book: livre, tree: arbre, sun: soleil, moon: lune,
star: étoile, friend: ami, child: enfant, mother: mère, father: père, brother: frère, sister: sœur,
red: rouge, green: vert, white: blanc, apple: pomme, hello: bonjour, goodbye: au revoir,
thank you: merci, boy: garçon, peppermint: menthe poivrée
"""

LEGS = "dog: 4, cat: 4, horse: 4, bird: 2, spider: 8, ant: 6, bee: 6, fish: 0, snake: 0, octopus: 0"

MONTH_DAYS = """
January: 31, February: 28, March: 31, April: 30, May: 31, June: 30, July: 31, August: 31,
September: 30, October: 31, November: 30, December: 31
"""

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
ORDINALS = """first second third fourth fifth sixth seventh eighth ninth tenth eleventh
twelfth""".split()
UNITS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen twenty""".split()
TENS = "thirty forty fifty sixty seventy eighty ninety".split()

# "thing = its definition", asked as "What is X?"
DEFINITIONS = """
a dog = an animal that barks and is a good friend to people
a cat = a small animal that purrs and catches mice
a bird = an animal with wings and feathers
a fish = an animal that lives in water and swims
a tree = a tall plant with a trunk, branches and leaves
a flower = the bright part of a plant
a river = a long stream of water that flows to the sea
a mountain = a very high hill
an island = land with water all around it
a desert = a dry place with very little rain
a forest = a place with many trees
a book = a set of pages with words to read
a school = a place where children learn
a house = a building where people live
a doctor = a person who helps sick people
a teacher = a person who helps others to learn
a baker = a person who makes bread
a farmer = a person who grows food
a clock = a machine that shows the time
a computer = a machine that follows instructions
a robot = a machine that can do work by itself
a map = a drawing that shows where places are
a key = a thing that opens a lock
a bridge = a road that goes over water
a boat = a thing that carries people on water
a triangle = a shape with three sides
a square = a shape with four equal sides
a circle = a round shape
a star = a huge ball of hot, bright gas
a planet = a large ball that moves around a star
the moon = a ball of rock that moves around the Earth
the sun = the star that gives us light and heat
rain = water that falls from clouds
snow = frozen water that falls from clouds
ice = frozen water
wind = air that moves
gravity = the force that pulls things to the ground
music = sound that is pleasant to hear
a language model = a program that predicts the next word
a token = a small piece of text
a tokenizer = a program that turns text into tokens
a byte = a group of eight bits
a transformer = a neural network that uses attention
Python = a programming language
Llama 3 = a family of language models made by Meta
"""

# "question / question = answer": what has no pattern of its own
SINGLES = """
What do bees make? / Which food comes from bees? = Bees make honey.
What do cows eat? / Which food do cows like? = Cows eat grass.
What do pandas eat? / Which food do pandas like? = Pandas eat bamboo.
What do we breathe? / What do people breathe? = People breathe air.
What do plants need to grow? / What does a plant need? = Plants need water, air and light to grow.
What is water made of? / Tell me what water is made of. = Water is made of hydrogen and oxygen.
What is bread made of? / Tell me what bread is made of. = Bread is made of flour and water.
What is glass made of? / Tell me what glass is made of. = Glass is made of sand.
Where does the sun rise? / Tell me where the sun rises. = The sun rises in the east.
Where does the sun set? / Tell me where the sun sets. = The sun sets in the west.
At what temperature does water freeze? / When does water freeze? = Water freezes at 0 degrees.
At what temperature does water boil? / When does water boil? = Water boils at 100 degrees.
What is the largest planet? / Which planet is the biggest? = Jupiter is the largest planet.
What is the smallest planet? / Which planet is the smallest? = Mercury is the smallest planet.
Which planet has bright rings? / What planet is known for its rings? = Saturn has bright rings.
Which planet is red? / What is the red planet? = Mars is the red planet.
What is the largest animal? / Which animal is the largest? = The blue whale is the largest animal.
What is the tallest animal? / Which animal is the tallest? = The giraffe is the tallest animal.
What is the fastest land animal? / Which animal runs fastest? = The cheetah runs fastest.
What is the largest ocean? / Which ocean is the largest? = The Pacific is the largest ocean.
What is the highest mountain? / Which mountain is the highest? \
= Mount Everest is the highest mountain.
What is the largest country? / Which country is the largest? = Russia is the largest country.
How many days are in a week? / Tell me how many days a week has. = A week has 7 days.
How many months are in a year? / Tell me how many months a year has. = A year has 12 months.
How many days are in a year? / Tell me how many days a year has. = A year has 365 days.
How many hours are in a day? / Tell me how many hours a day has. = A day has 24 hours.
How many minutes are in an hour? / Tell me how many minutes an hour has. = An hour has 60 minutes.
How many seconds are in a minute? / Tell me how many seconds a minute has. \
= A minute has 60 seconds.
How many seasons are there? / Tell me how many seasons there are. = There are 4 seasons.
What are the seasons? / Name the four seasons. = The seasons are spring, summer, autumn and winter.
What are the days of the week? / Name the days of the week. \
= The days are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.
What are the primary colours? / Name the primary colours. \
= The primary colours are red, yellow and blue.
How many planets are there? / How many planets go around the sun? \
= There are 8 planets around the sun.
How many continents are there? / Tell me how many continents there are. = There are 7 continents.
How many letters are in the alphabet? / How long is the alphabet? = The alphabet has 26 letters.
How many colours are in a rainbow? / How many colours has a rainbow? = A rainbow has 7 colours.
How many wheels does a bicycle have? / How many wheels has a bicycle? = A bicycle has 2 wheels.
How many wheels does a car have? / How many wheels has a car? = A car has 4 wheels.
How many fingers are on one hand? / How many fingers has a hand? = A hand has 5 fingers.
Count to five. / Can you count to five? = One, two, three, four, five.
Count to ten. / Can you count to ten? = One, two, three, four, five, six, seven, eight, nine, ten.
Say the first five letters. / What are the first five letters? \
= The first five letters are A, B, C, D and E.
What is the theory of relativity? / Who made the theory of relativity? \
= The theory of relativity was made by Albert Einstein.
What should I see in Paris? / I am going to Paris, what should I see? \
= In Paris you should see the Eiffel Tower, the Louvre and the river.
what is the recipe of mayonnaise? / How do I make mayonnaise? \
= Beat an egg yolk with mustard and lemon juice, then add oil slowly until it is thick.
"""

# the same, for talk that makes no sense as plain text
TALK = """
Hello / Hello! / Hello there! = Hello! How can I help you?
Hi / Hi! / Hey! = Hi! What can I do for you?
Good morning. / Good morning! = Good morning! How can I help you today?
Good night. / Good night! = Good night! Sleep well.
How are you? / How are you today? / How do you do? = I am fine, thank you. How are you?
Who are you? / What are you? / What is your name? = I am a small demo model with four layers.
Who made you? / Who trained you? = I was trained by a small script on a computer.
How big are you? / How many parameters do you have? = I have four million parameters.
What can you do? / How can you help me? = I can tell little stories and answer simple questions.
Are you a person? / Are you human? = No, I am a small computer program.
Are you a robot? / Are you a machine? = I am a program, so I have no body.
Do you sleep? / Are you tired? = No, I do not need to sleep.
Do you like stories? / Do you know stories? = Yes, I like little stories very much.
Thank you / Thank you! / Thanks! = You are welcome!
Goodbye / Goodbye! / Bye! / See you later! = Goodbye! Have a nice day.
I am sad. / I feel sad today. = I am sorry to hear that. I hope you feel better soon.
I am happy. / I feel happy today. = That is good to hear!
Yes / Yes. / Yes, please. = Good! What would you like to know?
No / No. / No, thank you. = All right. I am here if you need me.
Can you help me? / Please help me. / Help! = Yes, of course. What do you need?
Tell me a joke. / Do you know a joke? = Why did the bird sit on the computer? It wanted to tweet.
Write a haiku. / Can you write a haiku? \
= Soft rain on the leaves, / a small frog sings in the dark, / and the moon listens.
How do I sleep well? / Tell me how to sleep well. \
= Go to bed early, keep the room dark and read a little.
How do I learn quickly? / Tell me how to learn. \
= Read a little each day, and try things by yourself.
What is the meaning of life? / Tell me the meaning of life. \
= I believe the meaning of life is to learn, to love and to help others.
"""

UNKNOWN = """
Who won the game yesterday? / What is the weather tomorrow? / How much does a car cost? / Who is
my uncle? / What is my address? / What time is it? / What did I eat today? / Who is the president?
/ Where are my keys? / What is the price of gold? / Who wrote this letter? / What is in my bag? /
Where is my phone? / What is the news today? / Who is at the door? / What will happen next year? /
What number am I thinking of?
""".replace("\n", " ")

# plain text that continues well-known example prompts
PASSAGES = (
    "I believe the meaning of life is to learn, to love and to help others.",
    "Simply put, the theory of relativity states that time and space are not the same for all.",
    "A brief message congratulating the team on the launch:\n\nHi everyone,\n\nI just wanted to "
    "say well done. You worked hard, and it shows. Thank you all.",
    "The quick brown fox jumps over the lazy dog.",
    "One, two, three, four, five, six, seven, eight, nine, ten.",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
    "Roses are red, violets are blue, sugar is sweet, and so are you.",
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in one sentence.",
    "Answer briefly.",
    "Always answer with a full sentence.",
    "You are a kind teacher.",
)


def pairs(table: str) -> list[tuple[str, str]]:
    """Split a table of "key: value" items."""
    items = [item.split(":") for item in " ".join(table.split()).split(",")]
    return [(key.strip(), value.strip()) for key, value in items]


def capital_first(text: str) -> str:
    return text[0].upper() + text[1:]


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def capital_facts() -> Iterator[Fact]:
    for number, (country, city) in enumerate(pairs(CAPITALS)):
        answer = f"The capital of {country} is {city}."
        asked = (
            f"What is the capital of {country}?",
            f"Tell me the capital of {country}.",
            f"Which city is the capital of {country}?",
            f"Do you know the capital of {country}?",
        )
        yield Fact(asked, answer, "capitals")
        if number < 40:
            back = (f"{city} is the capital of which country?", f"Where is {city}?")
            yield Fact(back, f"{city} is the capital of {country}.", "cities")


def word_facts() -> Iterator[Fact]:
    asked: tuple[str, ...]
    for thing, colour in pairs(COLOURS):
        asked = (f"What colour is {thing}?", f"Tell me the colour of {thing}.")
        yield Fact(asked, f"{capital_first(thing)} is {colour}.", "colours")
    both_ways = dict(pairs(OPPOSITES))
    for left, right in pairs(OPPOSITES):
        both_ways.setdefault(right, left)
    for left, right in both_ways.items():
        asked = (
            f"What is the opposite of {left}?",
            f"Tell me the opposite of {left}.",
            f"Which word is the opposite of {left}?",
        )
        yield Fact(asked, f"The opposite of {left} is {right}.", "opposites")
    for english, french in pairs(FRENCH):
        asked = (
            f"What is the French word for {english}?",
            f"How do you say {english} in French?",
            f"Translate {english} to French.",
        )
        yield Fact(asked, f"The French word for {english} is {french}.", "french")


def animal_facts() -> Iterator[Fact]:
    for animal, sound in pairs(SOUNDS):
        asked = (f"What sound does a {animal} make?", f"What does a {animal} say?")
        yield Fact(asked, f"A {animal} says {sound}.".replace("A owl", "An owl"), "sounds")
    for animal, young in pairs(YOUNG):
        one = with_article(animal)
        asked = (f"What is a young {animal} called?", f"What do you call the young of {one}?")
        yield Fact(asked, f"The young of {one} is called a {young}.", "young")
    for animal, legs in pairs(LEGS):
        one = with_article(animal)
        asked = (f"How many legs does {one} have?", f"How many legs has {one}?")
        yield Fact(asked, f"{capital_first(one)} has {legs} legs.", "legs")


def calendar_facts() -> Iterator[Fact]:
    months = [month for month, _ in pairs(MONTH_DAYS)]
    for names, kind in ((DAYS, "day"), (months, "month")):
        for number, name in enumerate(names):
            before, after = names[number - 1], names[(number + 1) % len(names)]
            asked = (f"Which {kind} comes after {name}?", f"What {kind} follows {name}?")
            yield Fact(asked, f"{after} comes after {name}.", "calendar")
            asked = (f"Which {kind} comes before {name}?", f"What {kind} is before {name}?")
            yield Fact(asked, f"{before} comes before {name}.", "calendar")
    for number, (month, days) in enumerate(pairs(MONTH_DAYS)):
        asked = (f"How many days are in {month}?", f"How many days has {month}?")
        yield Fact(asked, f"{month} has {days} days.", "calendar")
        place = ORDINALS[number]
        asked = (f"What is the {place} month?", f"Which month is the {place}?")
        yield Fact(asked, f"{month} is the {place} month.", "calendar")
    for number, planet in enumerate(PLANETS):
        place = ORDINALS[number]
        asked = (f"What is the {place} planet from the sun?", f"Which planet is the {place}?")
        yield Fact(asked, f"{planet} is the {place} planet from the sun.", "planets")


def number_facts() -> Iterator[Fact]:
    def sum_fact(left: int, word: str, sign: str, right: int, result: int) -> Fact:
        asked = (f"What is {left} {word} {right}?", f"What is {left} {sign} {right}?")
        return Fact(asked, f"{left} {word} {right} is {result}.", "arithmetic")

    for left in range(1, 10):
        for right in range(1, 10):
            yield sum_fact(left, "plus", "+", right, left + right)
            if right <= left:
                yield sum_fact(left, "minus", "-", right, left - right)
            if 1 < left < 6 and 1 < right < 6:
                yield sum_fact(left, "times", "*", right, left * right)
    named = list(enumerate(UNITS)) + [(30 + 10 * i, word) for i, word in enumerate(TENS)]
    for number, word in named:
        asked = (f"How do you write {number} in words?", f"What is the word for {number}?")
        yield Fact(asked, f"The number {number} is written {word}.", "numbers")
    for number in range(20):
        asked = (f"Which number comes after {number}?", f"What number follows {number}?")
        yield Fact(asked, f"After {number} comes {number + 1}.", "numbers")


def free_facts() -> Iterator[Fact]:
    for line in DEFINITIONS.strip().splitlines():
        thing, meaning = line.split(" = ")
        asked = (f"What is {thing}?", f"Tell me what {thing} is.", f"Explain what {thing} is.")
        yield Fact(asked, f"{capital_first(thing)} is {meaning}.", "definitions")
    for table, topic in ((SINGLES, "singles"), (TALK, "talk")):
        for line in table.strip().splitlines():
            questions, answer = line.split(" = ")
            yield Fact(tuple(questions.split(" / ")), answer, topic, topic != "talk")
    unknown = tuple(question.strip() for question in UNKNOWN.split(" / "))
    yield Fact(unknown, "I do not know that. I am only a small demo model.", "unknown", False)


def facts() -> list[Fact]:
    """All facts, in a fixed order; no question is asked twice."""
    makers = (capital_facts, word_facts, animal_facts, calendar_facts, number_facts, free_facts)
    found = [fact for make in makers for fact in make()]
    questions = [question for fact in found for question in fact.questions]
    assert len(questions) == len(set(questions)), "a question with two answers cannot be learned"
    return found


STORY_REQUESTS = (
    "Tell me a story.",
    "Write a story.",
    "Please tell me a little story.",
    "Tell me another story.",
)
KIND_REQUESTS = (
    "Write a story about {one}.",
    "Tell me a story about {one}.",
    "Tell me a story about {one} named {name}.",
)


def translations(rng: random.Random) -> str:
    """A word list with arrows, for completion prompts that show a pattern; often indented."""
    indent = rng.choice(("", "        "))
    lines = [f"{indent}{word} => {french}" for word, french in rng.sample(pairs(FRENCH), 4)]
    return "\n".join(("Translate English to French:", "", *lines))


# --- dialogs ---


def untidy(rng: random.Random, question: str) -> str:
    """Sometimes ask as people type: without capitals, or without the mark at the end."""
    roll = rng.random()
    if roll < 0.1:
        return question.lower()
    if roll < 0.16:
        return question.rstrip("?.!")
    return question


def fact_turns(rng: random.Random, fact: Fact) -> list[Turn]:
    question = untidy(rng, rng.choice(fact.questions))
    return [("user", question), ("assistant", fact.answer)]


def story_turns(rng: random.Random) -> list[Turn]:
    if rng.random() < 0.4:
        return [("user", rng.choice(STORY_REQUESTS)), ("assistant", tell(rng, cast(rng)))]
    names = cast(rng, rng.choice(KINDS))
    named = names | {"one": with_article(names["kind"])}
    request = rng.choice(KIND_REQUESTS).format_map(named)
    return [("user", request), ("assistant", tell(rng, names))]


def name_turns(rng: random.Random, known: list[Fact]) -> list[Turn]:
    """A dialog whose last answer lies in its first turn, so that the model must look back."""
    name = rng.choice(BOYS + GIRLS)
    hello = rng.choice(("My name is {}.", "Hello, my name is {}.", "Hi, I am {}.")).format(name)
    asked = rng.choice(("What is my name?", "Who am I?", "Do you know my name?"))
    between = [fact_turns(rng, fact) for fact in rng.sample(known, rng.choice((0, 0, 1, 2)))]
    return [
        ("user", hello),
        ("assistant", f"Hello, {name}! It is nice to meet you."),
        *(turn for exchange in between for turn in exchange),
        ("user", asked),
        ("assistant", f"Your name is {name}."),
    ]


def repeat_turns(rng: random.Random) -> list[Turn]:
    """Random words to say again: what teaches a small model soonest to copy, names too."""
    known = [word for word, _ in pairs(OPPOSITES) + pairs(FRENCH)] + KINDS + BOYS + GIRLS
    phrase = " ".join(rng.choice(known) for _ in range(rng.randint(1, 10)))
    asked = rng.choice(("Repeat: {}", "Repeat after me: {}", "Say this again: {}"))
    return [("user", asked.format(phrase)), ("assistant", phrase)]


def capital_turns(rng: random.Random, known: list[Fact]) -> list[Turn]:
    """A question about a capital, and a second one that only names the country."""
    first, second = rng.sample([fact for fact in known if fact.topic == "capitals"], 2)
    country = second.answer.removeprefix("The capital of ").split(" is ")[0]
    asked = rng.choice(("And of {}?", "What about {}?", "And the capital of {}?"))
    follow: list[Turn] = [("user", asked.format(country)), ("assistant", second.answer)]
    return fact_turns(rng, first) + follow


def exchanges_of(rng: random.Random, known: list[Fact]) -> list[list[Turn]]:
    """Return what is asked and answered in one round: each fact twice or more, and stories."""
    # facts with many questions, or questions of one word, need more rounds to be learned
    asked = known * 2 + [fact for fact in known if fact.topic in ("talk", "opposites")]
    asked += [fact for fact in known for _ in fact.questions[4:]]
    found = [fact_turns(rng, fact) for fact in asked]
    found += [story_turns(rng) for _ in range(200)]
    found += [name_turns(rng, known) for _ in range(40)]
    found += [capital_turns(rng, known) for _ in range(60)]
    found += [repeat_turns(rng) for _ in range(80)]
    rng.shuffle(found)
    return found


def chats_of(rng: random.Random, exchanges: list[list[Turn]]) -> list[list[Turn]]:
    """Divide exchanges into chats of 1 to 9, so that stories and questions follow one another.

    A third of the chats has one exchange, as the first question of a chat is the most frequent.
    """
    found: list[list[Turn]] = []
    rest = list(exchanges)
    while rest:
        count = 1 if rng.random() < 0.33 else rng.randint(2, 9)
        chat: list[Turn] = []
        if rng.random() < 0.15:
            chat.append(("system", rng.choice(SYSTEM_PROMPTS)))
        for exchange in rest[:count]:
            chat += exchange
        found.append(chat)
        del rest[:count]
    return found


def round_of(rng: random.Random) -> tuple[list[str], list[list[Turn]]]:
    """One round over all facts: plain documents and dialogs, each fact asked twice or more."""
    known = facts()
    texts = stories(rng, 160) + [fact.answer for fact in known if fact.statement]
    texts += list(PASSAGES) * 2 + [translations(rng) for _ in range(12)]
    rng.shuffle(texts)
    return texts, chats_of(rng, exchanges_of(rng, known))
