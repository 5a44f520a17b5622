"""The demo model's little stories: a grammar of casts, plots and ways to say each beat.

In: a random.Random that the caller seeds. Out: stories of about 90 to 120 words, each coherent:
one hero, one friend, their animals and pronouns all through. Most of this file is the plots' table.
"""

import random

BOYS = "Tom Max Ben Sam Leo Tim Jack Finn Oscar Theo Rex Noah Adam Peter Paul".split()
GIRLS = "Lily Mia Anna Lucy Ella Rosie Daisy Ruby Molly Nora Emma Sara Zoe Alice Kate".split()
# friends have names of their own: a small model that copies names would else befriend itself
FRIEND_BOYS = "Hugo Otto Felix Pip Bruno Gus".split()
FRIEND_GIRLS = "Nell Ivy Hazel Rosa Bella Dora".split()
KINDS = """cat dog rabbit fox bear mouse duck frog bird owl squirrel hedgehog lion elephant
boy girl""".split()
TRAITS = "little happy kind brave shy curious gentle clever".split()
HELPERS = "an old|a wise|a friendly|a kind|a big|a funny".split("|")
COLOUR_WORDS = "red blue green yellow white golden".split()
TOYS = "ball kite boat drum hat bell".split()
FOODS = "cake pie pancake pudding sandwich".split()
SPOTS = (
    "under the old tree|behind the big rock|near the river|in the tall grass|by the bridge".split(
        "|"
    )
)
HOMES = """a small house near the forest|a green valley|a quiet village|a warm house by the sea|
a little house on a hill|a garden full of flowers|a farm near the river|
a little house by the lake""".replace("\n", "").split("|")

OPENINGS = (
    "Once upon a time, there was a {trait} {kind} named {name}. {He} lived in {home}.",
    "Once upon a time, there was a {trait} {kind} named {name}. {He} lived in {home}.",
    "Once upon a time, a {trait} {kind} named {name} lived in {home}.",
    "Once upon a time, in {home}, there lived a {trait} {kind} named {name}.",
    "Long ago, there was a {trait} {kind} who lived in {home}. {His} name was {name}.",
    "There once was a {trait} {kind} called {name}. {He} lived in {home}.",
    "In {home} lived a {trait} {kind}. {His} name was {name}.",
)
MEETING = (
    "Then {he} met {helper} {fkind} named {friend}.",
    "Soon {helper} {fkind} named {friend} came by.",
    "Just then, {he} saw {helper} {fkind}. {Fhis} name was {friend}.",
)
ASKING = (
    '"What is wrong?" asked {friend}.',
    '"Why are you sad?" asked {friend}.',
    '"Can I help you?" said {friend}.',
)
THANKS = (
    '"Thank you, {friend}!" said {name}. {He} was very happy.',
    '{name} gave {friend} a big hug. "Thank you so much," {he} said.',
    '{name} smiled. "You are a good friend," {he} said.',
)
ENDINGS = (
    "From that day on, {name} and {friend} were best friends.",
    "They played together until the sun went down.",
    "That night, {name} went to sleep with a smile.",
    "And they all lived happily ever after.",
    "After that, {friend} came to visit {name} every day.",
)

# A plot: beats in order, each with ways to say it. MEETING, ASKING and THANKS are shared by all.
PLOTS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        (
            "{name} had a {colour} {toy} and loved it very much.",
            "{name} loved to play with {his} {colour} {toy}.",
        ),
        (
            "One day, the {toy} was gone. {name} looked everywhere, but {he} could not find it.",
            "One morning, {he} could not find the {toy}. {He} began to cry.",
        ),
        MEETING,
        ASKING,
        ('"I lost my {toy}," said {name}.', '"My {colour} {toy} is gone," said {name}.'),
        (
            "They looked for it together. At last, they found the {toy} {spot}.",
            "{friend} looked {spot}, and there was the {colour} {toy}!",
        ),
        THANKS,
        (
            "{name} learned that two can find more than one.",
            "{name} learned that it is good to ask for help.",
        ),
    ),
    (
        (
            "{name} was afraid of the dark. Every night, {he} hid under {his} blanket.",
            "When the sun went down, {name} was always afraid.",
        ),
        (
            "One evening, {he} was far from home, and it was getting dark.",
            "One night, {he} heard a strange sound outside, and {he} began to shake.",
        ),
        MEETING,
        ASKING,
        ('"I am afraid of the dark," said {name}.', '"It is so dark," said {name}.'),
        (
            '"Look up," said {friend}. The moon and the stars were shining like little lamps.',
            "{friend} sat down with {him}, and they counted the bright stars together.",
        ),
        THANKS,
        (
            "{name} learned that the night can be beautiful too.",
            "{name} learned that it is easy to be brave with a friend.",
        ),
    ),
    (
        (
            "One day, {name} made a big {food}. It smelled very good.",
            "One day, {name} got a big {food} from {his} mother.",
        ),
        (
            "{He} wanted to eat it all alone, so {he} sat down {spot}.",
            "{name} did not want to share it, so {he} hid {spot}.",
        ),
        MEETING,
        ('"I am so hungry," said {friend}.', '"I did not eat today," said {friend}.'),
        (
            "{name} looked at the {food}. Then {he} looked at {friend}.",
            "{name} thought about it for a long time.",
        ),
        (
            '"Let us share it," said {name}. They ate the {food} together, and it was very good.',
            "{name} gave half of the {food} to {friend}, and they both ate until they were full.",
        ),
        (
            '"Thank you, {name}!" said {friend}. "You are very kind."',
            "{friend} smiled and sang a happy song for {name}.",
        ),
        (
            "{name} learned that food is better when you share it.",
            "{name} learned that sharing makes everyone happy.",
        ),
    ),
    (
        (
            "More than anything, {name} wanted to swim.",
            "{name} loved the water, but {he} could not swim.",
        ),
        (
            "One day, {he} tried it alone. The water was cold, and {he} was afraid.",
            "One hot day, {he} went to the water, but {he} was afraid to go in.",
        ),
        MEETING,
        ASKING,
        ('"I cannot swim," said {name}.', '"I want to swim, but I am afraid," said {name}.'),
        (
            "{friend} showed {him} how to do it. They tried again and again, and then {name} could "
            "swim!",
            "{friend} went into the water with {him}. Day after day they tried, until {name} could "
            "swim.",
        ),
        THANKS,
        (
            "{name} learned that you should never give up.",
            "{name} learned that hard things get easy when you try.",
        ),
    ),
    (
        (
            "One day, {name} found a small seed {spot}.",
            "One spring day, {his} mother gave {name} a small seed.",
        ),
        (
            "{He} put it in the ground and waited, but nothing happened. {name} was sad.",
            "{He} planted it, but after many days there was still no flower.",
        ),
        MEETING,
        ASKING,
        ('"My seed does not grow," said {name}.', '"I want a flower," said {name}.'),
        (
            '"Give it water and wait," said {friend}. So they did, and soon there was a {colour} '
            "flower.",
            "{friend} brought water every day. One morning, a {colour} flower opened in the sun.",
        ),
        THANKS,
        (
            "{name} learned that good things take time.",
            "{name} learned that it is good to wait.",
        ),
    ),
    (
        (
            "One day, {name} went for a long walk to look for berries.",
            "One day, {name} followed a {colour} butterfly deep into the woods.",
        ),
        (
            "Soon {he} did not know the way home. {He} sat down and cried.",
            "Then it began to rain, and {name} was lost.",
        ),
        MEETING,
        ASKING,
        ('"I am lost," said {name}.', '"I cannot find my home," said {name}.'),
        (
            '"I know the way," said {friend}. They walked side by side until they saw {home}.',
            "{friend} knew the woods well. {Fhe} took {name} all the way back to {home}.",
        ),
        THANKS,
        (
            "{name} learned to stay on the path.",
            "{name} learned that there is always someone who can help.",
        ),
    ),
    (
        (
            "{name} had no friends, and {he} was often lonely.",
            "{name} was new there and did not know anyone.",
        ),
        (
            "Every day, {he} played alone with {his} {colour} {toy}.",
            "One day, {he} saw the others play, but {he} was too shy to ask.",
        ),
        MEETING,
        (
            '"Do you want to play with me?" asked {friend}.',
            '"Hello! Will you be my friend?" asked {friend}.',
        ),
        ('"Yes, please!" said {name}.', '"I would love to," said {name}.'),
        (
            "They ran and jumped and laughed all day long.",
            "They played with the {toy} {spot}, and they laughed a lot.",
        ),
        THANKS,
        (
            "{name} learned that one kind word can make a friend.",
            "{name} learned that a friend can be very near.",
        ),
    ),
    (
        (
            "One day, there was a big storm. The wind was loud, and the rain was cold.",
            "One winter day, a lot of snow fell, and it was very cold.",
        ),
        (
            "{name} looked out and saw that someone was in trouble {spot}.",
            "{name} heard a small voice {spot}. Someone was calling for help.",
        ),
        (
            "It was {helper} {fkind} named {friend}.",
            "There was {helper} {fkind}. {Fhis} name was {friend}.",
        ),
        ('"Please help me," said {friend}. "I am so cold."',),
        (
            '"Come with me," said {name}. {He} took {friend} home and made a fire.',
            "{name} ran out and brought {friend} into {his} warm room.",
        ),
        (
            "They ate hot soup together and waited for the sun.",
            "{He} gave {friend} a blanket and some warm milk.",
        ),
        (
            '"You saved me," said {friend}. "Thank you, {name}!"',
            '"Thank you, {name}," said {friend}. "You are very brave."',
        ),
        (
            "{name} learned that it feels good to help.",
            "{name} learned that even a small one can do big things.",
        ),
    ),
    (
        (
            "One day, {name} found a {colour} box {spot}.",
            "One day, {name} saw something shine {spot}. It was a {colour} box.",
        ),
        (
            "{He} pulled and pushed, but the box did not open.",
            "{name} wanted to open it, but {he} had no key.",
        ),
        MEETING,
        ('"What do you have there?" asked {friend}.', '"What is in the box?" asked {friend}.'),
        ('"I do not know," said {name}. "I cannot open it."',),
        (
            "{friend} had a little key. They opened the box, and inside was a {toy}!",
            "They pulled together, and the box opened. Inside was a beautiful {toy}.",
        ),
        (
            '"It is for both of us," said {name}, and {friend} was very happy.',
            '"Let us play with it together," said {name}.',
        ),
        (
            "{name} learned that a treasure is best when you share it.",
            "{name} learned that two are stronger than one.",
        ),
    ),
    (
        (
            "{name} wanted to sing like the others, but {his} voice was very quiet.",
            "{name} loved to sing, but {he} was too shy.",
        ),
        (
            "One day, there was a big party, and everyone was asked to sing.",
            "One evening, all the others sang by the fire, but {name} said nothing.",
        ),
        MEETING,
        ('"Why do you not sing?" asked {friend}.', '"Do you know a song?" asked {friend}.'),
        ('"I am too shy," said {name}.', '"My voice is not good," said {name}.'),
        (
            '"We can sing together," said {friend}. They sang, and everyone clapped.',
            "{friend} began to sing softly, and {name} sang too. It was beautiful.",
        ),
        THANKS,
        (
            "{name} learned that every voice is good.",
            "{name} learned to believe in {himself}.",
        ),
    ),
)


def cast(rng: random.Random, kind: str | None = None) -> dict[str, str]:
    """Choose who and what a story is about: the words that its templates name."""
    kind = kind or rng.choice(KINDS)
    hero_is_boy = kind == "boy" or (kind != "girl" and rng.random() < 0.5)
    friend_is_boy = rng.random() < 0.5
    he, him, his = ("he", "him", "his") if hero_is_boy else ("she", "her", "her")
    name = rng.choice(BOYS if hero_is_boy else GIRLS)
    friend = rng.choice(FRIEND_BOYS if friend_is_boy else FRIEND_GIRLS)
    animals = [other for other in KINDS[:-2] if other != kind]
    return {
        "kind": kind,
        "name": name,
        "he": he,
        "him": him,
        "his": his,
        "himself": him + "self",
        "He": he.capitalize(),
        "His": his.capitalize(),
        "friend": friend,
        "fkind": rng.choice(animals),
        "Fhe": "He" if friend_is_boy else "She",
        "Fhis": "His" if friend_is_boy else "Her",
        "helper": rng.choice(HELPERS),
        "trait": rng.choice(TRAITS),
        "home": rng.choice(HOMES),
        "colour": rng.choice(COLOUR_WORDS),
        "toy": rng.choice(TOYS),
        "food": rng.choice(FOODS),
        "spot": rng.choice(SPOTS),
    }


def tell(rng: random.Random, names: dict[str, str]) -> str:
    """Tell one story about this cast."""
    beats = (OPENINGS, *rng.choice(PLOTS), ENDINGS)
    return " ".join(rng.choice(beat) for beat in beats).format_map(names)


def stories(rng: random.Random, count: int = 1000) -> list[str]:
    """Return `count` different stories."""
    unique: dict[str, None] = {}  # a dict keeps the order; a set would not
    while len(unique) < count:
        unique[tell(rng, cast(rng))] = None
    return list(unique)
