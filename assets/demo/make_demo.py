# SPDX-License-Identifier: Apache-2.0
"""Writes the demo assets: a story corpus, a tokenizer trained on it and a tiny model configuration.

The stories come from a small template grammar, written for this project: the words are below, the plots in
story_plots.txt. Every plot has its own characters, place and things, drawn once, so that a tiny model can learn
who belongs to which story within a minute; the rest of the words and sentences are drawn for each story.

Run `python make_demo.py` to write every file again, byte for byte, next to this script (or `--out FOLDER`).
"""

import argparse
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 2024
TRAIN_STORIES = 4100
VALIDATION_STORIES = 150
VOCAB_SIZE = 1536
END_OF_TEXT = "<|endoftext|>"
HERE = Path(__file__).parent

# --- Words ---

GIRLS = ["Lily", "Mia", "Anna", "Rosa", "Ella", "Zoe", "Nina", "Lucy", "Maya", "Ruby", "Emma", "Clara"]
BOYS = ["Tom", "Ben", "Max", "Sam", "Leo", "Jack", "Tim", "Noah", "Omar", "Finn", "Theo", "Hugo"]
ANIMAL_GIRLS = ["Daisy", "Poppy", "Dot", "Bella", "Hazel", "Coco", "Penny", "Olive"]
ANIMAL_BOYS = ["Pip", "Benny", "Oscar", "Rusty", "Milo", "Toby", "Biscuit", "Fuzzy"]
ANIMALS = ["rabbit", "fox", "bear", "mouse", "duck", "cat", "puppy"]
ANIMALS += ["squirrel", "hedgehog", "frog", "lamb", "pony", "otter", "badger"]
ELDERS = {"mom": True, "dad": False, "grandma": True, "grandpa": False, "aunt": True, "uncle": False}
ADJECTIVES = ["little", "small", "young", "kind", "cheerful", "curious"]
ADJECTIVES += ["playful", "clever", "friendly", "gentle", "merry", "polite"]
COLORS = ["red", "blue", "yellow", "green", "purple", "orange", "pink", "white"]
ITEMS = ["ball", "kite", "doll", "toy car", "hat", "scarf", "drum"]
ITEMS += ["book", "toy boat", "bucket", "whistle", "teddy bear", "basket"]
TREATS = ["cookie", "muffin", "apple", "pear", "pancake", "bread roll", "jam tart", "sweet orange", "plum"]
DAYS = ["sunny morning", "warm afternoon", "bright day", "cool morning", "quiet afternoon", "fine spring day"]
HOMES = ["a small house", "a cozy cottage", "a little village", "a house near the river", "a house on a hill"]
HOBBIES = ["sing", "dance", "draw", "jump in puddles", "look at the clouds", "listen to stories"]
HOBBIES += ["pick flowers", "collect shiny stones", "climb on rocks", "run in the grass", "play in the mud"]

# Every place: how to be there, and the spots where something may lie.
PLACES = {
    "the park": ("in", "under a bench", "behind a tall tree", "next to the pond", "in the bushes"),
    "the garden": ("in", "under the rose bush", "behind the shed", "between the carrots", "next to the gate"),
    "the forest": ("in", "under a pile of leaves", "inside a hollow log", "behind a rock", "near an old oak"),
    "the beach": ("at", "under some seaweed", "behind a big rock", "next to a tide pool", "near an old boat"),
    "the farm": ("on", "in the hay", "behind the barn", "under the cart", "next to the chicken house"),
    "the meadow": ("in", "in the tall grass", "behind a bush", "next to the stream", "under a willow tree"),
    "the river": ("at", "under the bridge", "behind the reeds", "next to a flat stone", "on a pile of sand"),
}
# What to learn, how the first tries go, and the success.
SKILLS = [
    ("ride a bike", "{he} fell over again and again", "{he} rode all the way down the path"),
    ("whistle", "no sound came out, only air", "a clear and happy sound came out"),
    ("skate", "{his} legs shook and {he} sat down hard", "{he} glided along like a bird"),
    ("bake bread", "the bread came out flat and black", "the bread was round, soft and golden"),
    ("play the drum", "it only made a lot of noise", "everybody clapped along to the beat"),
    ("jump rope", "{his} feet got stuck in the rope", "{he} jumped ten times without a stop"),
    ("paint a tree", "the tree looked like a green cloud", "the tree looked as if a bird could sit in it"),
    ("catch a ball", "the ball always slipped away", "the ball landed safely in {his} arms"),
    ("fly a kite", "the kite fell down on the grass", "the kite danced high up in the sky"),
    ("tie a knot", "the string came loose every time", "the knot was neat and strong"),
]
# What is feared, where it shows up, the advice, and how it goes.
FEARS = [
    ("the dark", "the lamp went out", "Look for the stars", "saw a hundred tiny stars in the sky"),
    ("thunder", "a loud storm began", "Count slowly to ten", "counted to ten, and the storm moved away"),
    ("the big slide", "it was time to slide", "Hold on and look ahead", "slid down as fast as the wind"),
    ("deep water", "they came to the lake", "Hold my hand and kick", "kicked and kicked and did not sink"),
    ("the old bridge", "they had to cross it", "Take one small step at a time", "reached the other side"),
    ("the big goose", "it stood in the way", "Be polite", "said hello, and the goose stepped aside"),
    ("singing on a stage", "the school show began", "Sing just for me", "sang every word of the song"),
]
# Who is in trouble, what has happened, and the help.
TROUBLES = [
    ("tiny bird", "had fallen out of its nest", "put it gently back into the nest"),
    ("ladybug", "was stuck in a puddle", "held out a leaf, and it climbed up"),
    ("kitten", "could not get down from a tree", "climbed up and carried it down"),
    ("turtle", "was lying on its back", "turned it over with great care"),
    ("butterfly", "was caught in a spider web", "loosened the threads one by one"),
    ("snail", "was in the middle of a busy path", "carried it safely to the other side"),
    ("bee", "was too tired to fly", "gave it a drop of sweet water"),
    ("baby goat", "had its foot stuck in a fence", "pulled the boards apart"),
    ("little fish", "was trapped in a pool that was too small", "carried it to deeper water in a cup"),
]
# What is found, and what it does.
TREASURES = [
    ("silver bell", "It rang with a sweet and clear sound."),
    ("old map", "It showed a path to a hidden waterfall."),
    ("music box", "It played a soft and lovely tune."),
    ("golden key", "It opened the door of the old clock tower."),
    ("glass marble", "It threw little rainbows on the ground."),
    ("letter", 'It said, "Whoever finds this is my friend."'),
    ("tiny telescope", "It made the moon look very near."),
]
# What breaks, and how it is mended.
BREAKABLES = [
    ("vase", "glued the pieces together"),
    ("cup", "glued the handle back on"),
    ("flower pot", "found a new pot and planted the flower again"),
    ("lamp", "fixed the lamp with some tape and a new bulb"),
    ("picture frame", "made a new frame out of sticks"),
    ("clock", "put all the little wheels back in place"),
]
PLANTS = [
    ("sunflower", "a tall yellow flower"),
    ("pumpkin", "a fat orange pumpkin"),
    ("bean", "a long green vine"),
    ("strawberry", "a sweet red strawberry"),
    ("tomato", "a round red tomato"),
    ("tulip", "a bright tulip"),
]
# What is built, and from what.
BUILDS = [("sand castle", "sand"), ("tree house", "boards"), ("fort", "branches"), ("raft", "logs")]
BUILDS += [("windmill", "sticks"), ("tower", "blocks"), ("birdhouse", "wood"), ("little bridge", "stones")]
BOXES = ["a small wooden box", "a rusty tin", "a big chest", "a leather suitcase"]

# --- Generator ---


@dataclass
class Character:
    """Somebody in a story: `str()` is the name, `he`, `him` and `his` are the right pronouns."""

    name: str
    noun: str
    female: bool
    first: str = ""

    def __str__(self):
        return self.name

    @property
    def he(self):
        return "she" if self.female else "he"

    @property
    def him(self):
        return "her" if self.female else "him"

    @property
    def his(self):
        return "her" if self.female else "his"

    @property
    def intro(self):
        return f"a {self.noun} named {self.name}"


def make_cast(children, animals, rng):
    """Draws a hero, a friend (both children or both animals) and a grown-up. No name is used a second time."""
    pool = animals if len(animals) > 1 and rng.random() < 0.4 else children
    cast = []
    for name in (pool.pop(), pool.pop()):
        female = name in GIRLS + ANIMAL_GIRLS
        noun = rng.choice(ANIMALS) if pool is animals else ("girl" if female else "boy")
        cast.append(Character(name, noun, female))
    hero, friend = cast
    friend.first = f"{friend} the {friend.noun}" if pool is animals else f"{hero.his} friend {friend}"
    relation = rng.choice(list(ELDERS))
    elder = Character(f"{hero.his} {relation}", relation, ELDERS[relation])
    return hero, friend, elder


def draw(names, table, rng):
    """Draws a row of a table and names its columns."""
    return dict(zip(names.split(), rng.choice(table), strict=True))


def make_world(children, animals, rng):
    """Draws what all stories with the same plot share: the characters, the place and the things."""
    hero, friend, elder = make_cast(children, animals, rng)
    item, color, place = rng.choice(ITEMS), rng.choice(COLORS), rng.choice(list(PLACES))
    world = {"hero": hero, "he": hero.he, "him": hero.him, "his": hero.his, "friend": friend, "elder": elder}
    world |= {"item": item, "color": color, "thing": f"{color} {item}", "thing_a": f"a {color} {item}"}
    world |= {"place": place, "at_place": f"{PLACES[place][0]} {place}"}
    world |= draw("skill fail win", SKILLS, rng)
    world |= draw("fear moment advice brave", FEARS, rng)
    world |= draw("creature trouble rescue", TROUBLES, rng)
    world |= draw("treasure magic", TREASURES, rng)
    world |= draw("breakable mend", BREAKABLES, rng)
    world |= draw("plant crop", PLANTS, rng)
    world |= draw("build stuff", BUILDS, rng)
    world |= {"treat": rng.choice(TREATS), "box": rng.choice(BOXES)}
    for name in ("treat", "creature", "treasure"):
        world[f"{name}_a"] = f"a {world[name]}"
    return world


def make_slots(world, rng):
    """Adds to a world what is different in every story, but stays the same throughout one."""
    adjective, hero = rng.choice(ADJECTIVES), world["hero"]
    slots = world | {"kind": f"a {adjective} {hero.noun}", "intro": f"a {adjective} {hero.noun} named {hero}"}
    slots |= {"day": rng.choice(DAYS), "home": rng.choice(HOMES), "hobby": rng.choice(HOBBIES)}
    slots |= zip(("spot1", "spot2", "spot3"), rng.sample(PLACES[world["place"]][1:], 3), strict=True)
    slots["number"] = rng.choice(["two", "three", "four", "six"])
    return slots


def load_templates():
    """Reads the templates: the opening, and the plots by name."""
    text = (HERE / "story_plots.txt").read_text(encoding="utf-8").replace("\n  ", " ")
    sections = dict(section.split("\n", 1) for section in re.split("^# ", text, flags=re.MULTILINE)[1:])
    for name, body in sections.items():
        sections[name] = re.sub("<([a-z ]+)>", lambda match: sections[match[1]].strip(), body).strip() + "\n"
    plots = [body for name, body in sections.items() if name.startswith("plot: ")]
    return sections["opening"], plots


def choose(template, rng):
    """Replaces every choice "[a|b]" by one of its branches, the innermost first."""
    choice = re.compile(r"\[([^\[\]]*)\]")
    while choice.search(template):
        template = choice.sub(lambda match: rng.choice(match[1].split("|")), template)
    return template


def polish(text):
    """Puts in "an" before vowels and capitals at sentence starts, and joins the lines.

    After a quote that ends with "!" or "?", only a new line starts a sentence: 'Look!" he said' goes on.
    """
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text.strip())
    start = r"((?:^|[.!?]\s|\.\"\s|[!?]\"\n)\s*)([a-z])"
    text = re.sub(start, lambda match: match[1] + match[2].upper(), text)
    return " ".join(text.split())


def make_story(template, world, rng):
    """Writes one story from a template."""
    slots = make_slots(world, rng)
    text = choose(template, rng).format_map(slots)
    return polish(text.format_map(slots))  # some words, such as those of SKILLS, have slots themselves


def make_stories(count, rng):
    """Writes `count` different stories, with all plots in turn, and shuffles them."""
    opening, plots = load_templates()
    children, animals = GIRLS + BOYS, ANIMAL_GIRLS + ANIMAL_BOYS
    rng.shuffle(children)
    rng.shuffle(animals)
    episodes = [(opening + plot, make_world(children, animals, rng)) for plot in plots]
    stories = {}  # a dict drops duplicates and, unlike a set, keeps the order
    while len(stories) < count:
        stories[make_story(*episodes[len(stories) % len(episodes)], rng)] = None
    stories = list(stories)
    rng.shuffle(stories)
    return stories


# --- Files ---


def write_text(path, text):
    """Writes UTF-8 with plain newlines, on every operating system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))


def write_json(path, content):
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_stories(path, stories):
    write_text(path, "".join(json.dumps({"text": story}) + "\n" for story in stories))


def train_tokenizer(stories):
    """Trains a byte-level BPE tokenizer: every text can be encoded, and decoding gives the same text back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(stories, trainer)
    return tokenizer


def tokenizer_config():
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }


def model_config(vocab_size, end_of_text_id):
    """A tiny SmolLM3 shaped like the 3B one: 4 query heads per key-value head, no RoPE in the last layer."""
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rms_norm_eps": 1e-06,
        "initializer_range": 0.08,
        "tie_word_embeddings": True,
        "use_cache": False,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
        "pad_token_id": None,  # as padding index the end-of-text embedding would get no gradient
    }


def main():
    parser = argparse.ArgumentParser(description="Write the demo stories, tokenizer and model configuration.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to")
    out = parser.parse_args().out

    stories = make_stories(TRAIN_STORIES + VALIDATION_STORIES, random.Random(SEED))
    train, validation = stories[:TRAIN_STORIES], stories[TRAIN_STORIES:]
    write_stories(out / "stories" / "train.jsonl", train)
    write_stories(out / "stories" / "validation.jsonl", validation)

    tokenizer = train_tokenizer(train)
    write_text(out / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    write_json(out / "tokenizer_config.json", tokenizer_config())
    config = model_config(tokenizer.get_vocab_size(), tokenizer.token_to_id(END_OF_TEXT))
    write_json(out / "config.json", config)
    print(f"Wrote {len(train)} + {len(validation)} stories and {tokenizer.get_vocab_size()} tokens to {out}")


if __name__ == "__main__":
    main()
