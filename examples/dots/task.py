r"""The task: name the colour of one to four dots in a picture.

    <image>What colour are the dots?   ->   \boxed{green}

Demonstrations have the question without a picture, and a random colour: they teach the form of an answer.
"""

import io
import random

QUESTION = "What colour are the dots?"
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 220), "yellow": (230, 210, 40)}
SIDE = 32
"""Pixels of a picture's side."""

_DIAMETER, _CELL = 8, 11


def picture(rng: random.Random) -> tuple[bytes, str]:
    """A PNG, and the colour of its dots."""
    from PIL import Image, ImageDraw

    colour = rng.choice(list(COLOURS))
    image = Image.new("RGB", (SIDE, SIDE), "white")
    draw = ImageDraw.Draw(image)
    cells = [(x, y) for x in range(3) for y in range(3)]  # so that no two dots touch
    for x, y in rng.sample(cells, rng.randint(1, 4)):
        left, top = x * _CELL + rng.randint(0, 1), y * _CELL + rng.randint(0, 1)
        draw.ellipse((left, top, left + _DIAMETER, top + _DIAMETER), fill=COLOURS[colour])
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue(), colour


def demonstration(rng: random.Random) -> dict[str, str]:
    """The question and some answer."""
    return {"prompt": QUESTION, "response": f"\\boxed{{{rng.choice(list(COLOURS))}}}"}
