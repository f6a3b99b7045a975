"""The tags of thoughts, and whether a tokenizer can tell them from other text.

`cairn.tasks.rewards.boxed` looks for tags in the text with special tokens that the text without them lacks. Such a tag
has letters of a special token: where none of those has a piece of a tag at its ends, nor is one, the two texts hold the
same tags, and a grader that reads no more of the first does without it.
"""

from collections.abc import Iterable

TAGS = ("<think>", "</think>")


def makes_tags(special: Iterable[str]) -> bool:
    """Whether text can have a tag with these special tokens in it that it has not without them. Those that the classes
    of transformers have by themselves, such as `<s>`, `<unk>` and `<|endoftext|>`, make none."""
    return any(_makes(token, tag) for token in special if token for tag in TAGS)


def _makes(token: str, tag: str) -> bool:
    cuts = range(1, len(tag))
    at_the_ends = any(token.endswith(tag[:cut]) or token.startswith(tag[cut:]) for cut in cuts)
    return at_the_ends or tag in token or token in tag
