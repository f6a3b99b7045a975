"""A response to a prompt of IFEval is right if it follows all of the prompt's instructions, as written (`strict`).

Beside it stands whether it does once Markdown's stars, its first or its last line are left out (`loose`), and how many
instructions it follows in either way: accuracy by instruction is `followed_strict` over `instructions`. Rows have
`instruction_id_list` and `kwargs` in their metadata. An instruction that cannot be checked fails the sample, and is
named.
"""

from itertools import product
from typing import Any

from cairn.tasks.rewards.boxed import answer_of
from cairn.tasks.rewards.instructions import follows
from cairn.tasks.rewards.sample import Sample


def grade(sample: Sample) -> dict[str, Any]:
    """1 if all instructions are followed, else 0. Raises ValueError without instructions, and CannotCheck."""
    names, arguments = sample.metadata.get("instruction_id_list"), sample.metadata.get("kwargs")
    if not names or not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError("ifeval needs instruction_id_list and kwargs in the row's metadata, one for one")
    response = answer_of(sample)
    given = list(zip(names, arguments, strict=True))
    strict = [follows(name, one, response) for name, one in given]
    loose = [any(follows(name, one, text) for text in _loosened(response)) for name, one in given]
    return {
        "reward": float(all(strict)),
        "strict": float(all(strict)),
        "loose": float(all(loose)),
        "instructions": len(names),
        "followed_strict": sum(strict),
        "followed_loose": sum(loose),
    }


def _loosened(response: str) -> list[str]:
    """The response with and without its first line, its last line and its stars."""
    lines = response.split("\n")
    texts = ["\n".join(lines[first : len(lines) - last]).strip() for first, last in product((0, 1), (0, 1))]
    return [response, *texts[1:], *(text.replace("*", "") for text in [response, *texts[1:]])]
