"""A reward model: a sequence classifier with one label, whose value is the score of a prompt and its response.

| its tokenizer has | it reads |
|---|---|
| a chat template | the prompt's messages and the response as the assistant's, in that template |
| none | the prompt followed by the response, with the special tokens that the tokenizer puts around a text |

A score does not depend on its batch: sequences are padded on the right, after the last token that attention sees, and
transformers reads the value at the last token that is not padding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from cairn.configs.schema.reward import RewardModelConfig
from cairn.engines.models.configs import context_length
from cairn.engines.models.folders import check_reward_model_folder, load_reward_model
from cairn.engines.models.tokenizers import load_tokenizer, stop_clock
from cairn.engines.processes.fingerprint import TORCH, engine_environment
from cairn.engines.types.errors import BadModel
from cairn.storage.records import Environment

_NOW = datetime(2024, 7, 26, tzinfo=UTC).timestamp()
"""Time for chat templates that ask for it, so that a score is the same on every day. Llama's templates use this day
when they get no clock."""


@dataclass(frozen=True)
class PromptAndResponse:
    """A prompt and its response, to be scored."""

    messages: tuple[dict[str, Any], ...]
    """The prompt as a chat."""
    text: str
    """The prompt as a text, for a model without a chat template."""
    response: str
    """The response, without special tokens."""


@dataclass(frozen=True)
class Score:
    """Result of the model for one response."""

    value: float | None
    """The score; None where there is none, for the reason in `error`."""
    tokens: int
    """Number of tokens that the model read, or would have had to read."""
    error: str | None = None


class RewardModel:
    """The engine of the reward model. It runs in any process, computes with its own number of threads, and then
    restores the process's number.

    Args:
        options: options of the model, see `RewardModelConfig`.

    Raises:
        BadModel: the folder cannot be used, or the options require a GPU where there is none.
    """

    def __init__(self, options: RewardModelConfig) -> None:
        self._options = options
        device = "cuda" if options.num_gpus else "cpu"
        if options.num_gpus and not torch.cuda.is_available():
            raise BadModel(
                f"reward.reward_model.num_gpus is {options.num_gpus:g}, and this process sees no GPU: set it to 0"
            )
        self._device = torch.device(device)
        self._tokenizer = load_reward_tokenizer(options.path)
        stop_clock(self._tokenizer, _NOW)
        self._model = load_reward_model(options.path, getattr(torch, options.dtype), device).requires_grad_(False)
        self._longest = longest_sequence(options)
        self._padding = self._model.config.get_text_config().pad_token_id
        self.scored = 0
        """Number of sequences scored."""

    def score(self, answered: Sequence[PromptAndResponse]) -> list[Score]:
        """Return scores in the order of the inputs. A sequence has no score if it is longer than `max_length`, if the
        chat template refuses it, or if its value is not finite."""
        scores: list[Score | None] = []
        ids: list[list[int]] = []
        for sample in answered:
            try:
                tokens = self._ids(sample)
            except Exception as error:  # a template raises what it likes
                scores.append(Score(None, 0, f"the reward model's chat template refuses the chat: {error}"))
                tokens = []
            else:
                scores.append(self._refused(tokens))
            ids.append(tokens)
        left = sorted((i for i, score in enumerate(scores) if score is None), key=lambda i: len(ids[i]))
        size = 1 if self._padding is None else self._options.batch_size  # without padding there are no batches
        for start in range(0, len(left), size):
            batch = left[start : start + size]
            for i, value in zip(batch, self._values([ids[i] for i in batch]), strict=True):
                finite = isfinite(value)
                problem = None if finite else f"the reward model's score is {value}"
                scores[i] = Score(value if finite else None, len(ids[i]), problem)
        self.scored += len(left)
        return [score for score in scores if score is not None]

    def environment(self) -> Environment:
        """Return the environment that the engine computes on."""
        with self._threads():
            return engine_environment(self._device, TORCH)

    def health(self) -> dict[str, Any]:
        """Return the engine's state. Keys: model, dtype, device, num_threads, max_length (in tokens), scored (sequences
        so far)."""
        return {
            "model": self._options.path,
            "dtype": self._options.dtype,
            "device": str(self._device),
            "num_threads": self._options.num_threads,
            "max_length": self._longest,
            "scored": self.scored,
        }

    def _ids(self, one: PromptAndResponse) -> list[int]:
        if not self._tokenizer.chat_template:
            return list(self._tokenizer(one.text + one.response, verbose=False)["input_ids"])
        chat = [*one.messages, {"role": "assistant", "content": one.response}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _refused(self, ids: Sequence[int]) -> Score | None:
        if not ids:
            return Score(None, 0, "prompt and response are empty")
        if self._longest is not None and len(ids) > self._longest:
            return Score(
                None,
                len(ids),
                f"prompt and response are {len(ids)} tokens, and the reward model reads at most {self._longest}",
            )
        return None

    def _values(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the values of a batch."""
        longest = max(map(len, sequences))
        ids = torch.full((len(sequences), longest), self._padding or 0)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        with self._threads(), torch.inference_mode():
            logits = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits
        return [float(value) for value in logits[:, 0].float().cpu()]

    @contextmanager
    def _threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self._options.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def longest_sequence(options: RewardModelConfig) -> int | None:
    """Return the longest sequence in tokens: `max_length`, or the model's context; None where its config says neither,
    or where the folder cannot be used."""
    if options.max_length is not None:
        return options.max_length
    try:
        return context_length(check_reward_model_folder(options.path))
    except BadModel:
        return None


def load_reward_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer of a reward model's folder. Raises BadModel."""
    check_reward_model_folder(path)
    return load_tokenizer(path)
