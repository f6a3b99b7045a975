r"""The task: pictures of one to four dots of one colour, and a question about either.

    <image>How many dots are there?    ->   \boxed{3}
    <image>What colour are the dots?   ->   \boxed{green}

Demonstrations have the questions without a picture, and any of the answers: they teach what an answer looks like.
"""

import io
import random

QUESTIONS = {"count": "How many dots are there?", "colour": "What colour are the dots?"}
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 220), "yellow": (230, 210, 40)}
ANSWERS = {"count": ("1", "2", "3", "4"), "colour": tuple(COLOURS)}
SIDE = 32
"""Pixels of a picture's side."""

_RADIUS = 4


def picture(rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """A PNG and what is right about it, by the kind of question."""
    from PIL import Image, ImageDraw

    count, colour = rng.randint(1, 4), rng.choice(list(COLOURS))
    image = Image.new("RGB", (SIDE, SIDE), "white")
    draw = ImageDraw.Draw(image)
    cells = [(x, y) for x in range(3) for y in range(3)]  # so that no two dots touch
    for x, y in rng.sample(cells, count):
        left, top = x * 11 + rng.randint(0, 1), y * 11 + rng.randint(0, 1)
        draw.ellipse((left, top, left + 2 * _RADIUS, top + 2 * _RADIUS), fill=COLOURS[colour])
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue(), {"count": str(count), "colour": colour}


def demonstration(rng: random.Random) -> dict[str, str]:
    """A question and one of its answers."""
    kind = rng.choice(list(QUESTIONS))
    return {"prompt": QUESTIONS[kind], "response": f"\\boxed{{{rng.choice(ANSWERS[kind])}}}"}
