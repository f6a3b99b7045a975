"""A chat as tokens, and which of them the assistant's turns are: what a model learns of a demonstration.

A chat is rendered once, by the tokenizer's chat template, so that a model sees in training what it is given when it
answers. Where the assistant's turns lie in that

| the template | is found |
|---|---|
| marks them itself, by `{% generation %}` | where it says |
| does not | from its own renderings of the same chat (`Chats._span`) |

A turn begins where the messages before it end, with the template's generation prompt; it ends where the rest of the
chat begins, which is the same after another answer. It is learned through the special token that follows it, which is
what the model has to say to stop; what the template writes after that nobody samples, and nobody learns. A template
that writes a turn otherwise once others follow, as one that leaves out their thinking, decides what is learned of it:
what stands in the whole chat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from cairn.tasks.data.errors import BadPrompt

Messages = list[dict[str, Any]]

STEP_LOSS_MASK = "step_loss_mask"
"""Of a message: 0 leaves it out of the loss. slime has it too."""

_OTHER_ANSWER = "another answer of 7261 words"


@dataclass(frozen=True)
class Demonstrated:
    """The tokens of a prompt and of what is learned after it."""

    prompt_ids: tuple[int, ...]
    """Before the first learned token."""
    response_ids: tuple[int, ...]
    """From there on to the last one."""
    loss_mask: tuple[int, ...]
    """[R], 1 where the response's token is learned."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @classmethod
    def of(cls, ids: Sequence[int], mask: Sequence[int], where: str) -> "Demonstrated":
        """Of the tokens of a whole text, and which are learned. Raises BadPrompt if none is, or the first is."""
        if 1 not in mask:
            raise BadPrompt(f"{where} has nothing to learn: let an assistant answer in it, or remove the row")
        start, end = mask.index(1), len(mask) - mask[::-1].index(1)
        if not start:
            raise BadPrompt(f"{where} begins with what is to be learned: put a prompt before it")
        return cls(tuple(ids[:start]), tuple(ids[start:end]), tuple(mask[start:end]))

    def cut(self, length: int, where: str) -> "Demonstrated":
        """Its first `length` tokens. Raises BadPrompt if nothing is left to learn."""
        mask = [0] * len(self.prompt_ids) + [*self.loss_mask]
        return Demonstrated.of((self.prompt_ids + self.response_ids)[:length], mask[:length], where)


class Chats:
    """Renders chats with a tokenizer."""

    def __init__(self, tokenizer: Any, arguments: dict[str, Any]) -> None:
        """
        Args:
            tokenizer: a Hugging Face tokenizer with a chat template.
            arguments: further ones of the template.
        """
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._arguments = arguments
        template = tokenizer.chat_template
        self._marks_turns = isinstance(template, str) and "generation %}" in template.replace("-%}", "%}")

    def demonstrated(
        self, messages: Messages, learned: Sequence[int], tools: list[Any] | None, where: str
    ) -> Demonstrated:
        """A chat, of which the assistant's messages at the indices `learned` are. Raises BadPrompt."""
        shown = [{name: value for name, value in m.items() if name != STEP_LOSS_MASK} for m in messages]
        turns = [index for index, message in enumerate(shown) if message["role"] == "assistant"]
        if self._marks_turns:
            ids, mask = self._marked(shown, turns, learned, tools, where)
        else:
            ids, mask = self._located(shown, turns, learned, tools, where)
        return Demonstrated.of(ids, mask, where)

    def _marked(
        self, messages: Messages, turns: Sequence[int], learned: Sequence[int], tools: list[Any] | None, where: str
    ) -> tuple[list[int], list[int]]:
        found = self._template(
            messages, tools, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
        starts = [i for i, one in enumerate(mask) if one and not (i and mask[i - 1])]
        if learned and len(starts) != len(turns):
            raise BadPrompt(
                f"{where}: the chat template marks {len(starts)} turns of the assistant with {{% generation %}}, and "
                f"the chat has {len(turns)}: correct the row or the template"
            )
        for turn, start, end in zip(turns, starts, [*starts[1:], len(mask)], strict=True):
            if turn not in learned:
                mask[start:end] = [0] * (end - start)
        return ids, mask

    def _located(
        self, messages: Messages, turns: Sequence[int], learned: Sequence[int], tools: list[Any] | None, where: str
    ) -> tuple[list[int], list[int]]:
        text: str = self._template(messages, tools, where, tokenize=False)
        cuts, spans = [0], []
        for turn in turns:
            if turn in learned:
                start, end = self._span(text, messages, turn, tools, where)
                spans.append(len(cuts))
                cuts += [start, end]
        pieces = self._pieces(text, [*cuts, len(text)])
        ids: list[int] = []
        mask: list[int] = []
        for place, piece in enumerate(pieces):
            count = 0
            if place in spans:
                count = len(piece)
            elif place - 1 in spans:
                count = self._until_special(piece)
            ids += piece
            mask += [1] * count + [0] * (len(piece) - count)
        return ids, mask

    def _until_special(self, ids: Sequence[int]) -> int:
        """How many tokens end a turn: through the first special one, if nothing but space stands before it."""
        first = next((i for i, id in enumerate(ids) if id in self._special), None)
        return 0 if first is None or self._tokenizer.decode(ids[:first]).strip() else first + 1

    def _span(self, text: str, messages: Messages, turn: int, tools: list[Any] | None, where: str) -> tuple[int, int]:
        """Where the assistant's message at index `turn` begins and ends in the rendered chat."""
        before: str = self._template(messages[:turn], tools, where, tokenize=False, add_generation_prompt=True)
        other = [*messages[:turn], {"role": "assistant", "content": _OTHER_ANSWER}, *messages[turn + 1 :]]
        _, _, after = self._template(other, tools, where, tokenize=False).rpartition(_OTHER_ANSWER)
        start, end = len(before), len(text) - len(after)
        if not text.startswith(before) or not text.endswith(after) or start > end:
            raise BadPrompt(
                f"{where}: the chat template writes what stands around message {turn + 1} otherwise with it than "
                "without, so that its tokens cannot be told from the others: mark the assistant's turns in the "
                "template with {% generation %}, or remove the row"
            )
        return start, end

    def _pieces(self, text: str, cuts: Sequence[int]) -> list[list[int]]:
        """The tokens between cuts: those of the whole text where none lies across a cut, else each piece's own, which
        is how a model reads a prompt and writes what follows."""
        bounds = list(pairwise(cuts))
        if self._tokenizer.is_fast:
            whole = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            pieces: list[list[int]] = [[] for _ in bounds]
            place = 0
            for id, (start, end) in zip(whole["input_ids"], whole["offset_mapping"], strict=True):
                while place + 1 < len(bounds) and start >= bounds[place][1]:
                    place += 1
                if end > bounds[place][1]:
                    break
                pieces[place].append(id)
            else:
                return pieces
        return [self._tokenizer(text[a:b], add_special_tokens=False, verbose=False)["input_ids"] for a, b in bounds]

    def _template(self, messages: Messages, tools: list[Any] | None, where: str, **how: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **how, **self._arguments)
        except TemplateError as error:
            raise BadPrompt(f"{where}: the chat template refuses the chat ({error}): correct the row") from error
