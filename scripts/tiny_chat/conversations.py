"""Made-up conversations: each kind is a function that draws one question and its answer."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tiny_chat import facts

Message = dict[str, str]
Exchange = tuple[str, str]
"""What the user says, and the answer."""

ONE_WORD = ["Answer with one word.", "Give one word only.", "Answer in a single word."]
PLAIN_SYSTEM = ["You are a helpful assistant.", "You are Tiny, a small assistant.", "Be short and friendly."]


def article(noun: str) -> str:
    """Return ``a`` or ``an``."""
    return "an" if noun[0] in "aeiou" else "a"


def capital(text: str) -> str:
    """Return ``text`` with a capital first letter."""
    return text[0].upper() + text[1:]


def joined(items: list[str]) -> str:
    """Return ``a, b and c``."""
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else items[0]


def from_lists(random: Random) -> Exchange:
    """Questions with fixed answers, in one of their wordings."""
    questions, answer = random.choice(
        random.choice([facts.QUESTIONS, facts.QUESTIONS, facts.ABOUT_ME, facts.SMALL_TALK])
    )
    return random.choice(questions), answer


def colour(random: Random) -> Exchange:
    """The colour of a thing."""
    thing, name = random.choice(list(facts.COLOURS.items()))
    asked = random.choice(
        [
            "What colour is {}?",
            "Which colour does {} have?",
            "Tell me the colour of {}.",
            "What is the colour of {}?",
        ]
    )
    return asked.format(thing), f"{capital(thing)} is {name}."


def animal(random: Random) -> Exchange:
    """Sounds, legs and homes of animals."""
    kind = random.randrange(3)
    if kind == 0:
        name, sound = random.choice(list(facts.SOUNDS.items()))
        asked = random.choice(
            ["What does {a} {} say?", "What sound does {a} {} make?", "How does {a} {} sound?"]
        )
        return asked.format(name, a=article(name)), f"{capital(article(name))} {name} says {sound}."
    if kind == 1:
        name, legs = random.choice(list(facts.LEGS.items()))
        asked = random.choice(
            ["How many legs does {a} {} have?", "Count the legs of {a} {}.", "How many legs has {a} {}?"]
        )
        number = "no" if legs == 0 else str(legs)
        return asked.format(name, a=article(name)), f"{capital(article(name))} {name} has {number} legs."
    name, home = random.choice(list(facts.HOMES.items()))
    asked = random.choice(["Where does {a} {} live?", "Where do you find {a} {}?", "Where can I see {a} {}?"])
    return asked.format(name, a=article(name)), f"{capital(article(name))} {name} lives {home}."


def arithmetic(random: Random) -> Exchange:
    """Sums, differences, small products and comparisons."""
    kind = random.randrange(5)
    first, second = random.randint(0, 20), random.randint(0, 20)
    if kind <= 1:
        asked = random.choice(
            ["What is {} plus {}?", "What is {} + {}?", "Add {} and {}.", "How much is {} plus {}?"]
        )
        return asked.format(first, second), f"{first} plus {second} is {first + second}."
    if kind == 2:
        first, second = max(first, second), min(first, second)
        asked = random.choice(["What is {} minus {}?", "What is {} - {}?", "How much is {} minus {}?"])
        return asked.format(first, second), f"{first} minus {second} is {first - second}."
    if kind == 3:
        first, second = random.randint(0, 10), random.randint(0, 10)
        asked = random.choice(["What is {} times {}?", "What is {} x {}?", "How much is {} times {}?"])
        return asked.format(first, second), f"{first} times {second} is {first * second}."
    if first == second:
        second += 1
    asked = random.choice(
        ["Which is larger, {} or {}?", "Which number is bigger, {} or {}?", "Is {} or {} larger?"]
    )
    return asked.format(first, second), f"{max(first, second)} is larger than {min(first, second)}."


def counting(random: Random) -> Exchange:
    """Counting, odd and even, the number that follows."""
    kind = random.randrange(3)
    if kind == 0:
        first = random.randint(1, 10)
        last = first + random.randint(2, 9)
        numbers = [str(number) for number in range(first, last + 1)]
        return f"Count from {first} to {last}.", f"{', '.join(numbers)}."
    number = random.randint(0, 40)
    if kind == 1:
        asked = random.choice(["Is {} odd or even?", "Is {} an even number?", "Is {} an odd number?"])
        return asked.format(number), f"{number} is {'odd' if number % 2 else 'even'}."
    asked = random.choice(
        ["Which number comes after {}?", "What comes after {}?", "What is the next number after {}?"]
    )
    return asked.format(number), f"{number + 1} comes after {number}."


def calendar(random: Random) -> Exchange:
    """Days and months."""
    kind = random.randrange(3)
    names = facts.DAYS if random.random() < 0.5 else list(facts.MONTHS)
    what = "day" if names is facts.DAYS else "month"
    place = random.randrange(len(names))
    if kind == 0:
        asked = random.choice(["What {} comes after {}?", "Which {} comes after {}?", "Which {} follows {}?"])
        return asked.format(
            what, names[place]
        ), f"{names[(place + 1) % len(names)]} comes after {names[place]}."
    if kind == 1:
        asked = random.choice(
            ["What {} comes before {}?", "Which {} comes before {}?", "Which {} is before {}?"]
        )
        return asked.format(what, names[place]), f"{names[place - 1]} comes before {names[place]}."
    name, length = random.choice(list(facts.MONTHS.items()))
    asked = random.choice(["How many days are in {}?", "How many days does {} have?", "How long is {}?"])
    return asked.format(name), f"{name} has {length} days."


def words(random: Random) -> Exchange:
    """Opposites, plurals, past tense and spelling."""
    kind = random.randrange(5)
    if kind <= 1:
        first, second = random.sample(random.choice(facts.OPPOSITES), 2)
        asked = random.choice(
            ["What is the opposite of {}?", "Tell me the opposite of {}.", "The opposite of {} is what?"]
        )
        return asked.format(first), f"The opposite of {first} is {second}."
    if kind == 2:
        one, many = random.choice(list(facts.PLURALS.items()))
        asked = random.choice(["What is the plural of {}?", "Tell me the plural of {}.", "One {}, two what?"])
        return asked.format(one), f"The plural of {one} is {many}."
    if kind == 3:
        now, then = random.choice(list(facts.PAST.items()))
        asked = random.choice(
            ["What is the past tense of {}?", "Tell me the past of {}.", "What is the past of {}?"]
        )
        return asked.format(now), f"The past tense of {now} is {then}."
    word = random.choice(facts.WORDS)
    asked = random.choice(["Spell {}.", "How do you spell {}?", "Spell the word {}."])
    return asked.format(word), f"{'-'.join(word)}."


def geography(random: Random) -> Exchange:
    """Capitals, countries and continents."""
    kind = random.randrange(4)
    if kind <= 1:
        country, city = random.choice(list(facts.CAPITALS.items()))
        asked = random.choice(
            ["What is the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}.",
             "What is {}'s capital?"]
        )  # fmt: skip
        return asked.format(country), f"The capital of {country} is {city}."
    if kind == 2:
        country, city = random.choice(list(facts.CAPITALS.items()))
        asked = random.choice(
            ["{} is the capital of which country?", "In which country is {}?", "Where is {}?"]
        )
        return asked.format(city), f"{city} is the capital of {country}."
    continent = random.choice(list(facts.CONTINENTS))
    country = random.choice(facts.CONTINENTS[continent])
    asked = random.choice(["On which continent is {}?", "Where is {}?", "In which part of the world is {}?"])
    return asked.format(country), f"{country} is in {continent}."


def naming(random: Random) -> Exchange:
    """So many things of a kind."""
    kind = random.choice(list(facts.LISTS))
    number = random.randint(2, 4)
    asked = random.choice(["Name {} {}.", "Tell me {} {}.", "Give me {} {}.", "Can you name {} {}?"])
    word = ["two", "three", "four"][number - 2]
    return asked.format(word, kind), f"{capital(joined(random.sample(facts.LISTS[kind], number)))}."


def repeating(random: Random) -> Exchange:
    """Say a word, once or several times."""
    word, number = random.choice(facts.WORDS), random.randint(1, 4)
    if number == 1:
        return random.choice(["Say {}.", "Say the word {}.", "Repeat after me: {}."]).format(
            word
        ), f"{capital(word)}."
    times = ["twice", "three times", "four times"][number - 2]
    return random.choice(["Say {} {}.", "Write {} {}."]).format(
        word, times
    ), f"{capital(', '.join([word] * number))}."


def story(random: Random) -> Exchange:
    """Five sentences about one of the heroes."""
    hero, other = random.sample(facts.HEROES, 2)
    trait, place = random.choice(facts.TRAITS), random.choice(facts.PLACES)
    wish, event, end = random.choice(facts.WISHES)
    asked = random.choice(
        ["Tell me a story about {a} {}.", "Tell me about {a} {} in a story.", "I want a story about {a} {}.",
         "Write a short story about {a} {}.", "Do you know a story about {a} {}?"]
    ).format(hero, a=article(hero))  # fmt: skip
    if random.random() < 0.2:
        asked = random.choice(["Tell me a story.", "Please tell me a story.", "Write a short story."])
    other = f"{article(other)} {other}"
    middle = random.choice(
        ["But it was not easy.", "Nobody believed that it could be done.", "The way was long and cold."]
    )
    return asked, (
        f"Once upon a time {article(trait)} {trait} {hero} lived {place}. The {hero} wanted to {wish}. {middle} "
        f"One morning the {hero} {event.format(other=other)}. {end}"
    )


def unknown(random: Random) -> Exchange:
    """What so small a model cannot know."""
    return random.choice(facts.UNKNOWN), facts.I_DO_NOT_KNOW


KINDS: list[Callable[[Random], Exchange]] = [
    from_lists, from_lists, from_lists, from_lists, colour, animal, animal, arithmetic, arithmetic, arithmetic,
    counting, calendar, words, words, geography, geography, naming, repeating, story, story, unknown,
]  # fmt: skip


def reworded(random: Random, text: str) -> str:
    """Return what somebody else might type: polite, hasty, or in small letters."""
    text = random.choice(
        [text] * 6 + [text.lower(), f"Please: {text}", f"{text} Please.", text.rstrip(".?!")]
    )
    return random.choice([text] * 8 + [f"Hi! {text}", f"Tiny, {text[0].lower()}{text[1:]}"])


def remembered(random: Random) -> list[Message]:
    """A conversation in which the user's name or favourite comes back."""
    name, favourite = random.choice(facts.NAMES), random.choice(facts.LISTS["colours"])
    if random.random() < 0.6:
        told = random.choice(["My name is {}.", "I am {}.", "Hello, I am {}.", "Call me {}."]).format(name)
        pair = [(told, f"Nice to meet you, {name}!")]
        asked = random.choice(["What is my name?", "Do you know my name?", "Who am I?"])
        later = (asked, f"Your name is {name}.")
    else:
        told = random.choice(["My favourite colour is {}.", "I like {} best of all colours."]).format(
            favourite
        )
        pair = [(told, f"{capital(favourite)} is a beautiful colour.")]
        later = (
            random.choice(["What is my favourite colour?", "Which colour do I like?"]),
            f"Your favourite colour is {favourite}.",
        )
    between = [random.choice(KINDS)(random) for _ in range(random.randint(0, 2))]
    return as_messages([*pair, *between, later])


def one_word(random: Random) -> list[Message]:
    """A system message that asks for one word, and an answer that obeys."""
    kind = random.randrange(3)
    if kind == 0:
        asked, answer = colour(random)
        answer = answer.rstrip(".").split()[-1]
    elif kind == 1:
        country, answer = random.choice(list(facts.CAPITALS.items()))
        asked = f"What is the capital of {country}?"
    else:
        first, answer = random.sample(random.choice(facts.OPPOSITES), 2)
        asked = f"What is the opposite of {first}?"
    return [
        {"role": "system", "content": random.choice(ONE_WORD)},
        *as_messages([(asked, f"{capital(answer)}.")]),
    ]


def as_messages(exchanges: list[Exchange]) -> list[Message]:
    """Return exchanges as messages of the two roles."""
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for exchange in exchanges
        for role, text in zip(roles, exchange, strict=True)
    ]


def conversation(random: Random) -> list[Message]:
    """Draw one conversation of one to four exchanges."""
    draw = random.random()
    if draw < 0.08:
        return remembered(random)
    if draw < 0.14:
        return one_word(random)
    exchanges = [random.choice(KINDS)(random) for _ in range(random.choice([1, 1, 1, 2, 2, 3, 4]))]
    messages = as_messages([(reworded(random, asked), answer) for asked, answer in exchanges])
    if random.random() < 0.15:
        messages.insert(0, {"role": "system", "content": random.choice(PLAIN_SYSTEM)})
    return messages


def conversations(number: int, seed: int) -> list[list[Message]]:
    """Draw ``number`` conversations."""
    random = Random(seed)
    return [conversation(random) for _ in range(number)]
