"""Vary the prompts of the corpus, so that the model answers requests that it has not seen word for word.

The corpus asks in a handful of fixed forms ("Write a short story of about 200 words. ... It is about a grey cat named
Lena who ..."). Left at that, the model would answer those forms alone and know forty names. Here every prompt is reworded
at random, and the hero of a story may become somebody else, in the prompt and the text alike: what the prompt says has
to be copied.
"""

import random
import re

STORY = re.compile(
    r"Write a short story of about 200 words\. (?P<style>.+?) It is about (?P<who>.+?) named (?P<name>\w+) who (?P<what>.+)\.$"
)
DIALOGUE = re.compile(r"Write a short conversation between (?P<a>\w+) and (?P<b>\w+)\. (?P<what>.+) Use simple words\.$")
SCENE = re.compile(r"Describe (?P<what>an? \w+(?: day)?) (?P<place>.+) in simple English, in one or two paragraphs\.$")
DEFINE = re.compile(r"What (?P<verb>is|are) (?P<thing>(?!you)[\w ]+)\?$")
EXPLAIN = re.compile(r"Explain to a child (?P<topic>.+)\. Use simple words and short sentences\.$")
PLACE = re.compile(r" (?P<place>(?:(?:in|on|at|by|near|beside) (?:a|an|the) [\w ]+|at night|at school|in winter|on a \w+ \w+))$")
ADJECTIVE = re.compile(r"\b(?:young|small|shy|little|brave|old|tired|grey) ")
QUESTIONS = {
    "why we need friends": "Why do we need friends?",
    "how a letter travels": "How does a letter travel?",
    "how to make soup": "How do you make soup?",
    "what a bridge does": "What is a bridge?",
    "how bees make honey": "How do bees make honey?",
    "how bread is made": "How is bread made?",
    "why people tell stories": "Why do people tell stories?",
    "how a clock works": "How does a clock work?",
    "what the moon is": "What is the moon?",
    "why birds fly south": "Why do birds fly south?",
    "how to plant a tree": "How do you plant a tree?",
    "what shadows are": "What are shadows?",
    "what a library is for": "What is a library?",
    "why we sleep": "Why do we sleep?",
    "how boats float": "How do boats float?",
    "why leaves fall in autumn": "Why do leaves fall in autumn?",
    "why the sea is salty": "Why is the sea salty?",
    "what rain is": "What is rain?",
}

SHE, HE = re.compile(r"\b(?:she|her)\b", re.IGNORECASE), re.compile(r"\b(?:he|him|his)\b", re.IGNORECASE)
GIRLS = """Ada Alice Amy April Bella Beth Bonnie Carla Carmen Celia Chloe Daisy Dana Dora Edith Elena Elsa Emily Emma Erin
Eva Fatima Fiona Flora Freya Gina Greta Hana Hannah Hazel Helen Holly Ines Irene Iris Jane Jasmine Joy Julia June Kira Laura
Leila Linda Lola Lucy Luna Maggie Maria Mary May Maya Mei Mila Molly Naomi Nell Nadia Paula Pearl Penny Polly Priya Rachel
Rita Rose Sally Sara Sarah Sofia Sophie Stella Sue Susan Sylvia Tara Tina Vera Violet Willow Zara""".split()
BOYS = """Adam Ahmed Albert Alex Andy Arlo Arthur Basil Bill Billy Bob Bruno Carl Charlie Chris Colin Dan David Dylan
Eddie Eli Emil Eric Ethan Felix Frank Fred Gabriel George Gus Hans Harry Ian Ivan Jacob Jake James Jim Joe Joel John Jose
Juan Karl Kenji Kevin Lars Liam Louis Lucas Luke Marco Mark Martin Matt Miguel Mike Nate Ned Nick Nico Oliver Omar Owen Pablo
Paul Pedro Philip Ralph Ravi Ray Robert Robin Roger Rory Samir Simon Stan Steve Thomas Tim Toby Tony Walter Will Yusuf""".split()

ANIMALS = set("cow turtle duck dog rabbit bird fox mouse bear cat".split())
MORE_ANIMALS = """ant badger bat beaver bee beetle butterfly camel caterpillar chicken crab cricket crow deer dinosaur dolphin donkey
dragon dragonfly duckling eagle elephant ferret firefly frog giraffe goat goose hamster hare hedgehog hen hippo horse kangaroo
kitten koala ladybug lamb lion lizard mole monkey octopus otter owl panda parrot peacock penguin pig pigeon pony puppy raccoon
raven robin rooster seal sheep snail snake sparrow spider squirrel stork swan tiger toad unicorn walrus whale wolf worm
zebra""".split()
TRADES = set("sailor librarian musician baker king shepherd nurse painter fisherman farmer teacher driver maker gardener robot".split())
MORE_TRADES = """acrobat actor astronaut blacksmith builder butcher captain carpenter clown cook dancer dentist detective doctor
elf explorer fairy firefighter ghost giant gnome hunter inventor judge juggler knight magician mayor mermaid merchant miller monk
monster pilot pirate poet postman potter prince princess queen scarecrow scientist shoemaker singer snowman soldier student
tailor traveller troll waiter weaver witch wizard writer""".split()


def rename_hero(prompt: str, text: str, rng: random.Random) -> tuple[str, str]:
    """Give the hero of a story a name that fits the pronouns of the text, if it does not occur there already."""
    story = STORY.match(prompt)
    if not story:
        return prompt, text
    name = story["name"]
    new = rng.choice(GIRLS if len(SHE.findall(text)) > len(HE.findall(text)) else BOYS)
    if re.search(rf"\b{new}\b", text):
        return prompt, text
    swap = re.compile(rf"\b{name}\b")
    return swap.sub(new, prompt), swap.sub(new, text)


def recast_hero(prompt: str, text: str, rng: random.Random) -> tuple[str, str]:
    """Make the hero another animal or let it have another trade: a brave mouse may become a brave penguin."""
    story = STORY.match(prompt)
    noun = story and story["who"].split()[-1]
    for nouns, others in ((ANIMALS, MORE_ANIMALS), (TRADES, MORE_TRADES)):
        if noun in nouns:
            new = rng.choice(others)
            swap = re.compile(rf"\b(?:(?P<article>[Aa])n? )?{noun}(?P<plural>s?)\b")
            return swap.sub(lambda m: recast(m, new), prompt), swap.sub(lambda m: recast(m, new), text)
    return prompt, text


def recast(match: re.Match[str], noun: str) -> str:
    phrase = noun + match["plural"]
    return match["article"] + with_article("a " + phrase)[1:] if match["article"] else phrase


def reword(prompt: str, rng: random.Random) -> str:
    """One request that the same text answers: often the prompt itself, else a shorter or plainer form of it."""
    for pattern, variants in FORMS:
        match = pattern.match(prompt)
        if match and rng.random() < 0.7:
            return roughen(rng.choice(variants(match, rng)), rng)
    return roughen(prompt, rng)


def story_variants(story: re.Match[str], rng: random.Random) -> list[str]:
    who, name, what = story["who"], story["name"], story["what"]
    if rng.random() < 0.5:
        who = with_article(ADJECTIVE.sub("", who))
    tell = rng.choice(
        ["Write a short story", "Write a story", "Tell me a story", "Tell me a short story", "Please write a short story", "Can you tell me a story"]
    )
    end = "?" if tell.startswith("Can") else "."
    place = PLACE.search(what)
    deed = what[: place.start()] if place else what
    variants = [
        f"{tell} about {who}{end}",
        f"{tell} about {who}{end}",
        f"{tell} about {who} named {name}{end}",
        f"{tell} about {who} called {name}{end}",
        f"{tell} about {who} who {deed}{end}",
        f"{tell} about {who} named {name} who {deed}{end}",
        f"{tell} about {who} named {name} who {what}{end}",
        f"{tell} about {name}{end}",
        f"{tell}{end}",
    ]
    if place:
        variants.append(f"{tell} about {who} {place['place']}{end}")
    return variants


def with_article(noun_phrase: str) -> str:
    """`an farmer` becomes `a farmer`, `a otter` becomes `an otter`; anything without an article stays."""
    article, _, noun = noun_phrase.partition(" ")
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}" if article in ("a", "an") else noun_phrase


def dialogue_variants(dialogue: re.Match[str], rng: random.Random) -> list[str]:
    pair = f"{dialogue['a']} and {dialogue['b']}"
    write = rng.choice(["Write a short conversation", "Write a conversation", "Write a dialogue"])
    return [f"{write} between {pair}.", f"{write} between {pair}. {dialogue['what']}", f"{write} between two friends."]


def scene_variants(scene: re.Match[str], rng: random.Random) -> list[str]:
    what, place = scene["what"], scene["place"]
    return [f"Describe {what} {place}.", f"Describe {what}.", f"What is {what} {place} like?", f"Tell me about {what} {place}."]


def explain_variants(explain: re.Match[str], rng: random.Random) -> list[str]:
    topic = explain["topic"]
    question = QUESTIONS.get(topic, f"Can you explain {topic}?")
    return [question, question, f"Explain {topic}.", f"Tell me {topic}.", f"Can you explain {topic}?"]


def define_variants(define: re.Match[str], rng: random.Random) -> list[str]:
    thing, verb = define["thing"], define["verb"]
    return [
        f"Explain what {thing} {verb}.",
        f"Can you tell me what {thing} {verb}?",
        f"Explain to a child what {thing} {verb}. Use simple words and short sentences.",
        f"Describe {thing}.",
        f"Tell me about {thing}.",
    ]


def roughen(prompt: str, rng: random.Random) -> str:
    """People do not always type the capital or the full stop."""
    if rng.random() < 0.15:
        prompt = prompt[0].lower() + prompt[1:]
    if rng.random() < 0.2:
        prompt = prompt.rstrip(".?")
    return prompt


FORMS = (
    (STORY, story_variants),
    (DIALOGUE, dialogue_variants),
    (SCENE, scene_variants),
    (EXPLAIN, explain_variants),
    (DEFINE, define_variants),
)
