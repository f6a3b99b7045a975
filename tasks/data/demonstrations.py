"""Rows that contain responses, as samples to train on: prompts with their response, or whole chats.

| `response_key` | `apply_chat_template` | a row is |
|---|---|---|
| null | true | a chat in `input_key`; the assistant's turns are trained on, except those with a `step_loss_mask` of 0 |
| a column | true | its value as the assistant's response to the prompt; turns in the prompt are not trained on |
| a column | false | its text after the prompt's, both unchanged, and then an end token |

A row of preferences has two responses to one prompt, each as in the last two lines: `chosen_key`, `rejected_key`.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from jinja2 import TemplateError

from cairn.configs.errors import BadData, BadPrompt
from cairn.configs.schema.data import DataConfig
from cairn.engines.models.tokenizers import special_ids
from cairn.tasks.data.prompts import OverRows, Row, Rows, require_template, require_text
from cairn.tasks.data.rows import Messages, metadata_of, open_rows, prompt_of, tools_of

# Ends of the assistant's turns: the tokens that a model must emit to stop.


class TurnEnds:
    """Tokens after the words of a turn that are trained on.

    | after the words, before any other word | trained on |
    |---|---|
    | an end token of the model | up to and including the first |
    | no end token, but the chat template closes turns with special tokens | up to and including the first special one |
    | neither, and the chat ends there | an end token, which is appended |
    | neither, and the chat continues | nothing |
    """

    def __init__(self, tokenizer: Any, model_ends: Collection[int]) -> None:
        """Create the rule. `model_ends`: the tokens at which engines stop
        (`cairn.engines.models.folders.end_tokens`)."""
        own = tokenizer.eos_token_id
        self.ids = frozenset(model_ends) | ({own} if own is not None else set())
        """Tokens that end a response."""
        self.special = special_ids(tokenizer) | self.ids
        self.closes = True
        """Whether the chat template closes a turn that nothing follows with a special token."""
        self.default: int | None = own if own in model_ends or not model_ends else min(model_ends)
        """Token that is appended to a turn without an end; None if the model has none."""
        self._tokenizer = tokenizer

    def learn_from_template(self, closing: Sequence[int], opening: Sequence[int]) -> None:
        """Learn from the chat template what it writes after an answer that nothing follows, and after one that a
        question follows. A template that closes nothing ends a turn by beginning the next one: GLM-4.5's does this."""
        self.closes = any(id in self.special for id in self._gap(closing))
        self.default = next((id for id in self._gap(opening) if id in self.ids), self.default)

    def length(self, following: Sequence[int]) -> int:
        """Return how many of the tokens after a turn's words end it."""
        gap = self._gap(following)
        for wanted in (self.ids, self.special if self.closes else frozenset()):
            first = next((place for place, id in enumerate(gap) if id in wanted), None)
            if first is not None:
                return first + 1
        return 0

    def has_ended(self, ids: Sequence[int], by: Collection[int]) -> bool:
        """Return whether one of the tokens `by` is at the end of a turn, with only special tokens and space after
        it."""
        return any(id in by for id in self._gap(ids[::-1]))

    def _gap(self, ids: Iterable[int]) -> list[int]:
        """Return the tokens before the first one that is part of a word."""
        return list(takewhile(lambda id: id in self.special or not self._tokenizer.decode([id]).strip(), ids))


# Rendering of chats as tokens, and the position of the assistant's turns in them.


STEP_LOSS_MASK = "step_loss_mask"
"""Field of a message: 0 leaves the message out of the loss. slime has it too."""

_MARK = "another message of 7261 words"
"""Placeholder for a message while the template is examined."""

_ANSWER: Messages = [{"role": "assistant", "content": _MARK}]

Span = tuple[int, int]
"""Beginning and end of a turn, in characters or in tokens."""


@dataclass(frozen=True)
class Demonstrated:
    """Tokens of a prompt and of the response to train on."""

    prompt_ids: tuple[int, ...]
    """Tokens before the first trained token."""
    response_ids: tuple[int, ...]
    """Tokens from the first to the last trained token."""
    loss_mask: tuple[int, ...]
    """[R]: 1 where the response's token is trained on."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @classmethod
    def of(cls, ids: Sequence[int], mask: Sequence[int], where: str) -> "Demonstrated":
        """Create it from the tokens of a whole text and their loss mask. Raises BadPrompt if no token is trained on, or
        the first one is."""
        if 1 not in mask:
            raise BadPrompt(f"{where} has nothing to learn: add an assistant message, or remove the row")
        start, end = mask.index(1), len(mask) - mask[::-1].index(1)
        if not start:
            raise BadPrompt(f"{where} has no prompt before the message to learn: add one")
        return cls(tuple(ids[:start]), tuple(ids[start:end]), tuple(mask[start:end]))

    def cut(self, length: int, where: str) -> "Demonstrated":
        """Return the first `length` tokens. Raises BadPrompt if none of them is trained on."""
        mask = [0] * len(self.prompt_ids) + [*self.loss_mask]
        return Demonstrated.of((self.prompt_ids + self.response_ids)[:length], mask[:length], where)


class Chats:
    """Renderer of chats, which also locates the assistant's turns.

    A chat is rendered once, by the tokenizer's chat template, so that the model sees in training what it sees when it
    generates. If the template marks the turns with `{% generation %}`, the marks locate them. Otherwise renderings of
    the same chat do (`_span`):

    - A turn begins where the messages before it end, including the template's generation prompt. Some templates render
      these messages differently once others follow, or begin a turn without thoughts differently from the generation
      prompt. Then the turn begins where the chat and that prompt diverge.
    - A turn ends where the rest of the chat begins, which is the same after another answer.
    - A turn is trained on up to and including the token that ends it (`TurnEnds`). No policy samples what the
      template writes after that token, so it is not trained on.
    - If a template renders a turn differently once others follow, for example without its thinking, the rendering in
      the whole chat counts.
    """

    def __init__(self, tokenizer: Any, arguments: dict[str, Any], model_ends: Collection[int] = ()) -> None:
        """Learn from the chat template how a turn ends.

        Args:
            tokenizer: a Hugging Face tokenizer with a chat template.
            arguments: further arguments of the template.
            model_ends: the tokens at which engines stop.

        Raises:
            BadData: neither the template, the model nor the tokenizer defines how a turn ends.
        """
        self._tokenizer = tokenizer
        self._arguments = arguments
        template = tokenizer.chat_template
        self._marks_turns = isinstance(template, str) and "generation %}" in template.replace("-%}", "%}")
        self._ends = TurnEnds(tokenizer, model_ends)
        question: Messages = [{"role": "user", "content": "?"}]
        closing, opening = (self._behind([*question, *_ANSWER, *rest], None) for rest in ([], question))
        if closing is not None:
            self._ends.learn_from_template(self._ids(closing), self._ids(opening or ""))
        if not self._ends.closes and self._ends.default is None:
            raise BadData(
                "the chat template writes no end token after an answer, and neither the model's config nor its "
                "tokenizer names one: add eos_token_id to its generation_config.json"
            )

    def demonstrated(
        self, messages: Messages, learned: Sequence[int], tools: list[Any] | None, where: str
    ) -> Demonstrated:
        """Return a chat in which the assistant's messages at the indices `learned` are trained on. Raises BadPrompt."""
        shown = [{name: value for name, value in m.items() if name != STEP_LOSS_MASK} for m in messages]
        turns = [index for index, message in enumerate(shown) if message["role"] == "assistant"]
        if self._marks_turns:
            ids, spans = self._marked(shown, turns, learned, tools, where)
        else:
            ids, spans = self._located(shown, turns, learned, tools, where)
        return Demonstrated.of(*self._with_ends(ids, spans, turns[-1:] == [len(shown) - 1] == [*learned[-1:]]), where)

    def _with_ends(self, ids: list[int], spans: Sequence[Span], ends_chat: bool) -> tuple[list[int], list[int]]:
        """Return the tokens of a chat and their loss mask: 1 for turns and their ends. `ends_chat`: whether the last
        span is the last message."""
        mask = [0] * len(ids)
        for place, (start, end) in enumerate(spans):
            # Where the template marks turns, a special token at the end of the marked text ends the turn.
            if not self._ends.has_ended(ids[start:end], self._ends.special if self._marks_turns else self._ends.ids):
                count = self._ends.length(ids[end:])
                if not count and ends_chat and place == len(spans) - 1 and self._ends.default is not None:
                    ids, mask, count = [*ids[:end], self._ends.default], [*mask[:end], 0], 1
                end += count
            mask[start:end] = [1] * (end - start)
        return ids, mask

    def _marked(
        self, messages: Messages, turns: Sequence[int], learned: Sequence[int], tools: list[Any] | None, where: str
    ) -> tuple[list[int], list[Span]]:
        encoded = self._template(
            messages, tools, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = list(encoded["input_ids"]), [0, *encoded["assistant_masks"], 0]
        changes = [place for place, (before, after) in enumerate(pairwise(mask)) if before != after]
        spans = list(zip(changes[::2], changes[1::2], strict=True))
        if learned and len(spans) != len(turns):
            raise BadPrompt(
                f"{where}: the chat template marks {len(spans)} turns of the assistant with {{% generation %}}, but "
                f"the chat has {len(turns)}: correct the row or the template"
            )
        return ids, [span for turn, span in zip(turns, spans, strict=False) if turn in learned]

    def _located(
        self, messages: Messages, turns: Sequence[int], learned: Sequence[int], tools: list[Any] | None, where: str
    ) -> tuple[list[int], list[Span]]:
        text: str = self._template(messages, tools, where, tokenize=False)
        cuts = [0]
        for turn in turns:
            if turn in learned:
                cuts += self._span(text, messages, turn, tools, where)
        ids: list[int] = []
        bounds: list[int] = []
        for piece in self._pieces(text, [*cuts, len(text)]):
            bounds.append(len(ids))
            ids += piece
        return ids, list(zip(bounds[1::2], bounds[2::2], strict=True))

    def _span(self, text: str, messages: Messages, turn: int, tools: list[Any] | None, where: str) -> Span:
        """Return the beginning and end of the assistant's message at index `turn` in the rendered chat. Raises
        BadPrompt."""
        start, end = self._start(text, messages, turn, tools), self._end(text, messages, turn, tools)
        if start is None or end is None or start > end:
            raise BadPrompt(
                f"{where}: the chat template writes other text around message {turn + 1} with it than without it, "
                "so its tokens cannot be separated from the others: mark the assistant's turns in the "
                "template with {% generation %}, or remove the row"
            )
        return start, end

    def _start(self, text: str, messages: Messages, turn: int, tools: list[Any] | None) -> int | None:
        before = self._rendered(messages[:turn], tools, True)
        if before is not None and text.startswith(before):
            return len(before)
        if not turn:
            return None
        marked = [*messages[: turn - 1], {**messages[turn - 1], "content": _MARK}]
        whole, prompted, unprompted, plain = (
            self._behind([*marked, *messages[turn:]], tools),
            self._behind(marked, tools, True),
            self._behind(marked, tools) or "",
            self._behind([*marked, {"role": "assistant", "content": "0"}, *messages[turn + 1 :]], tools) or "",
        )
        if whole is None or prompted is None or not text.endswith(whole):
            return None
        # The common prefix of prompt and chat must contain at least the header that names the speaker, and no word of
        # the turn.
        shared = _shared(whole, prompted)
        if shared < len(prompted):
            shared = min(shared, _shared(plain, prompted))
        return len(text) - len(whole) + shared if shared > _shared(unprompted, prompted) else None

    def _end(self, text: str, messages: Messages, turn: int, tools: list[Any] | None) -> int | None:
        after = self._behind([*messages[:turn], *_ANSWER, *messages[turn + 1 :]], tools)
        if after is not None and text.endswith(after):
            return len(text) - len(after)
        # A turn that calls tools may end differently from an answer: with an end token of its own.
        through = (self._rendered(messages[: turn + 1], tools) or "").rstrip()
        ended = through and self._ends.has_ended(self._ids(through), self._ends.ids)
        return len(through) if ended and text.startswith(through) else None

    def _pieces(self, text: str, cuts: Sequence[int]) -> list[list[int]]:
        """Return the tokens between cuts: those of the whole text if none crosses a cut. Otherwise each piece is
        tokenized by itself, just as a model reads a prompt and writes what follows."""
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
        return [self._ids(text[start:end]) for start, end in bounds]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _behind(self, messages: Messages, tools: list[Any] | None, generation_prompt: bool = False) -> str | None:
        """Return the rendered text after `_MARK`; None where the template rejects the messages, or does not write the
        mark."""
        _, mark, after = (self._rendered(messages, tools, generation_prompt) or "").rpartition(_MARK)
        return after if mark else None

    def _rendered(self, messages: Messages, tools: list[Any] | None, generation_prompt: bool = False) -> str | None:
        """Return the rendered messages; None where the template rejects them. `generation_prompt`: with the generation
        prompt."""
        try:
            text: str = self._template(messages, tools, "", tokenize=False, add_generation_prompt=generation_prompt)
        except Exception:  # a template raises what it likes
            return None
        return text

    def _template(self, messages: Messages, tools: list[Any] | None, where: str, **how: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **how, **self._arguments)
        except TemplateError as error:
            raise BadPrompt(f"{where}: the chat template refuses the chat ({error}): correct the row") from error


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


@dataclass(frozen=True)
class DemonstrationRow(Row):
    """Row that is ready to be trained on. Its prompt is that of the first sample."""

    samples: tuple[Demonstrated, ...]
    """Samples that are trained on together."""
    truncated: bool
    """Whether the row was longer than allowed and was cut at its end."""
    metadata: dict[str, Any] | None


class DemonstrationData(OverRows):
    """Demonstrations of one data set."""

    def __init__(
        self,
        rows: Rows,
        format: DataConfig,
        tokenizer: Any,
        max_length: int,
        *,
        pairs: bool,
        model_ends: Collection[int],
    ) -> None:
        """Create the data set. `max_length`: tokens of a prompt and its response together. Raises BadData where nothing
        defines how a response ends."""
        super().__init__(rows)
        self._tokenizer = tokenizer
        self._pairs = pairs
        self._format = format
        self._max_length = max_length
        self._chats: Chats | None = None
        self._end = TurnEnds(tokenizer, model_ends).default
        if format.apply_chat_template:
            self._chats = Chats(tokenizer, format.apply_chat_template_kwargs, model_ends)
        elif self._end is None:
            raise BadData(
                "neither the model's config nor its tokenizer names an end token, so no response would teach it to "
                "stop: add eos_token_id to its generation_config.json"
            )

    @classmethod
    def open(
        cls,
        format: DataConfig,
        path: str,
        tokenizer: Any,
        max_length: int,
        *,
        pairs: bool = False,
        model_ends: Collection[int] = (),
    ) -> "DemonstrationData":
        """Open what the data source provides for `path`, and check every row: see `open_rows`.

        Args:
            pairs: whether a row has two responses, of which the first is preferred.
            model_ends: the tokens at which engines stop (`cairn.engines.models.folders.end_tokens`).

        Raises:
            BadData: the data, or the tokenizer that must render them, cannot be used.
        """
        require_template(format, tokenizer)
        if not pairs and format.response_key is None and not format.apply_chat_template:
            raise BadData(
                "data.response_key is null and data.apply_chat_template is false: name the column of the responses, "
                f"or let {format.input_key!r} hold chats and set apply_chat_template to true"
            )
        options = ["chosen_key", "rejected_key"] if pairs else ["input_key", "response_key"]
        required = {key: option for option in options if (key := getattr(format, option)) is not None}
        optional = {key for key in (format.metadata_key, format.tool_key, format.input_key) if key is not None}
        rows = open_rows(
            format.data_source_path,
            path,
            required,
            optional - required.keys(),
            lambda row, where: _fields(row, format, pairs, where),
        )
        return cls(rows, format, tokenizer, max_length, pairs=pairs, model_ends=model_ends)

    def row(self, index: int) -> DemonstrationRow:
        """Read, render and tokenize the row at `index`.

        Raises:
            BadPrompt: the chat template rejects it, no token of it is trained on, or it is too long and skipped.
            BadData: it is too long, and the configuration refuses such rows.
        """
        format, where = self._format, f"{self.path}, row {index + 1}"
        row = self._rows.read(index)
        chats, metadata, tools = _fields(row, format, self._pairs, where)
        samples = tuple(self._demonstrated(prompt, response, tools, where) for prompt, response in chats)
        longest = max(map(len, samples))
        if longest > self._max_length:
            words = f"{where} has {longest} tokens, but at most {self._max_length} are allowed"
            match format.overlong:
                case "refuse":
                    raise BadData(f"{words}: raise data.max_length, or set data.overlong to pass_over or truncate")
                case "pass_over":
                    raise BadPrompt(f"{words}: raise data.max_length, or set data.overlong to truncate")
                case "truncate":
                    samples = tuple(sample.cut(self._max_length, where) for sample in samples)
        return DemonstrationRow(index, samples[0].prompt_ids, samples, longest > self._max_length, metadata)

    def _demonstrated(
        self, prompt: str | Messages, response: str | Messages | None, tools: list[Any] | None, where: str
    ) -> Demonstrated:
        if self._chats is None:
            return self._plain(str(prompt), str(response), where)
        before: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answer: Messages = [{"role": "assistant", "content": response}] if isinstance(response, str) else response or []
        first = len(before) if answer else 0
        messages = [*before, *answer]
        turns = [
            index
            for index, message in enumerate(messages)
            if index >= first and message["role"] == "assistant" and message.get(STEP_LOSS_MASK, 1) != 0
        ]
        require_text(json.dumps(messages, ensure_ascii=False), where)
        return self._chats.demonstrated(messages, turns[-1:] if self._format.last_turn_only else turns, tools, where)

    def _plain(self, prompt: str, response: str, where: str) -> Demonstrated:
        require_text(prompt + response, where)
        before, after = (
            self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in (prompt, response)
        )
        end = [] if self._end is None else [self._end]
        learned = [*after, *end]
        return Demonstrated.of([*before, *learned], [0] * len(before) + [1] * len(learned), where)


def _fields(
    row: dict[str, Any], format: DataConfig, pairs: bool, where: str
) -> tuple[list[tuple[str | Messages, str | Messages | None]], dict[str, Any] | None, list[Any] | None]:
    """Return the chats, metadata and tools of a row. Raises BadData if one has the wrong type."""
    return (
        _chats(row, format, pairs, where),
        metadata_of(row, format, where),
        tools_of(row, format, where),
    )


def _chats(
    row: dict[str, Any], format: DataConfig, pairs: bool, where: str
) -> list[tuple[str | Messages, str | Messages | None]]:
    """Return the prompts and responses of a row: one, or two of which the first is preferred. A response is None where
    the prompt is a whole chat. Raises BadData if one has the wrong type."""
    prompt = None
    if row.get(format.input_key) is not None:
        prompt = prompt_of(row[format.input_key], format.input_key, format, where)
    if pairs:
        chosen, rejected = (prompt_of(row[key], key, format, where) for key in (format.chosen_key, format.rejected_key))
        return _pair(prompt, chosen, rejected, format, where)
    if prompt is None:
        raise BadData(f"{where}: {format.input_key!r} is null: correct the row or name another field in input_key")
    if format.response_key is not None:
        return [(prompt, prompt_of(row[format.response_key], format.response_key, format, where))]
    if isinstance(prompt, str):
        raise BadData(
            f"{where}: {format.input_key!r} is a string and data.response_key is null: name the column of the "
            "responses, or give chats as lists of messages"
        )
    return [(prompt, None)]


def _pair(
    prompt: str | Messages | None, chosen: str | Messages, rejected: str | Messages, format: DataConfig, where: str
) -> list[tuple[str | Messages, str | Messages | None]]:
    """Return two responses to one prompt. For whole chats the prompt is their common beginning, otherwise it is
    `prompt`. Raises BadData."""
    if not isinstance(chosen, str) and not isinstance(rejected, str) and chosen[0]["role"] != "assistant":
        shared = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise BadData(
            f"{where}: {format.chosen_key!r} and {format.rejected_key!r} have no prompt: give it in "
            f"{format.input_key!r}, or let both be chats that begin with it"
        )
    if not chosen or not rejected:
        raise BadData(
            f"{where}: one of {format.chosen_key!r} and {format.rejected_key!r} is the beginning of the other: "
            "correct the row"
        )
    return [(prompt, chosen), (prompt, rejected)]
