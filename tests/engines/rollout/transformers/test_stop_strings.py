"""Stop strings, against decoding the whole response after each token."""

from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cairn.engines.rollout.transformers.batch import StopStrings, StopWatch
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.errors import BadModel, RequestRefused
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, SamplingParams
from examples.quickstart.model import VOCABULARY
from tests.engines.rollout.models import collect, request, rollout_config, same
from tests.requests import group

COUNT, LENGTH, PROMPT = 32, 32, [40, 41, 42]


def first_end(tokenizer: Any, ids: Sequence[int], strings: Sequence[str]) -> int | None:
    """How many tokens there are when the text first holds a string."""
    for length in range(1, len(ids) + 1):
        if any(string in tokenizer.decode(ids[:length]) for string in strings):
            return length
    return None


def requested(count: int, **params: Any) -> list[GenerateRequest]:
    return group(0, PROMPT, range(count), SamplingParams(LENGTH, **params))


@pytest.fixture(scope="module")
def engine(tiny_assets: Path) -> TransformersEngine:
    return TransformersEngine(str(tiny_assets / "model"), rollout_config())


@pytest.fixture(scope="module")
def tokenizer(tiny_assets: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_assets / "model")


@pytest.fixture(scope="module")
def vocabulary(tiny_assets: Path) -> StopStrings:
    return StopStrings(str(tiny_assets / "model"))


@pytest.fixture(scope="module")
def unstopped(engine: TransformersEngine) -> list[Completion]:
    samples = collect(engine, requested(COUNT))
    return [samples[one.request_id] for one in requested(COUNT)]


def table(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Strings that some responses hold."""
    text = "".join(texts)
    characters = [char for char in text if not char.isascii() and char != "\ufffd"]
    pairs = [one for char, other in pairwise(text) if (one := char + other).isalnum()]
    return {
        "a character": ("e",),
        "one of several": ("3", "END", "t"),
        "a part of a special token": ("_start|",),
        "a character of several tokens": tuple(characters[:8]),
        "several tokens": (*pairs[:12],),
        "longer than most": (texts[0][5:25],),
        "a part of a character": ("\ufffd",),
        "nothing that comes": ("there is no such text",),
    }


@pytest.mark.parametrize("name", table(["."]))
def test_a_response_ends_with_the_token_that_completes_a_string(
    name: str, engine: TransformersEngine, tokenizer: Any, unstopped: list[Completion]
) -> None:
    strings = table([tokenizer.decode(sample.response_ids) for sample in unstopped])[name]
    requests = requested(COUNT, stop=strings)
    samples = collect(engine, requests)
    stopped = 0
    for one, whole in zip(requests, unstopped, strict=True):
        sample, length = samples[one.request_id], first_end(tokenizer, whole.response_ids.tolist(), strings)
        assert sample.response_ids.tolist() == whole.response_ids[:length].tolist()
        assert sample.log_probs.tolist() == whole.log_probs[:length].tolist()
        assert sample.finish_reason is (whole.finish_reason if length is None else FinishReason.STOP)
        stopped += length is not None
    assert (stopped > 0) == (name != "nothing that comes")


def test_samples_are_equal_alone_and_in_company(engine: TransformersEngine) -> None:
    stops = [("e",), (), ("3", "END"), ("t", "_start|>"), ("\ufffd",)]
    requests = [
        one for i, stop in enumerate(stops) for one in request(i, PROMPT, samples=3, max_new_tokens=16, stop=stop)
    ]
    together = collect(engine, requests)
    reverse = collect(engine, requests[::-1])
    for one in requests:
        (alone,) = collect(engine, [one]).values()
        assert same(alone, together[one.request_id])
        assert same(alone, reverse[one.request_id])


def test_a_string_may_begin_before_the_place_where_a_sample_is_continued(
    engine: TransformersEngine, tokenizer: Any, unstopped: list[Completion]
) -> None:
    continued = 0
    for one, whole in zip(requested(COUNT), unstopped, strict=True):
        ids = whole.response_ids.tolist()
        string = tokenizer.decode(ids[3:7])
        if first_end(tokenizer, ids, [string]) != 7 or "\ufffd" in string:
            continue
        params = SamplingParams(LENGTH, stop=(string,))
        rest = GenerateRequest(one.request_id, PROMPT + ids[:6], one.seed, params, position=6)
        (sample,) = collect(engine, [rest]).values()
        assert sample.response_ids.tolist() == ids[6:7]
        assert sample.finish_reason is FinishReason.STOP
        continued += 1
    assert continued > 3


def test_a_string_counts_before_the_longest_length(
    engine: TransformersEngine, tokenizer: Any, unstopped: list[Completion]
) -> None:
    params = SamplingParams(1, stop=(tokenizer.decode(unstopped[0].response_ids[:1]),))
    (sample,) = collect(engine, group(0, PROMPT, [0], params)).values()
    assert (len(sample.response_ids), sample.finish_reason) == (1, FinishReason.STOP)


def test_an_empty_string_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(RequestRefused, match="one of its stop strings is empty"):
        collect(engine, requested(1, stop=("END", "")))


def test_a_model_without_a_tokenizer_is_named_where_there_are_strings(tmp_path: Path) -> None:
    vocabulary = StopStrings(str(tmp_path))
    assert vocabulary.watch(requested(1)[0]) is None
    with pytest.raises(BadModel, match="has no tokenizer"):
        vocabulary.watch(requested(1, stop=("END",))[0])


WORDS = ["\u2581", "\u2581a", "a", "b", "\u2581the", "END", "E", "ND", "."]


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama's and Gemma's: words, and single bytes for what is none of them."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", unk_token="<unk>")


def found_at(vocabulary: StopStrings, ids: Sequence[int], strings: tuple[str, ...]) -> int | None:
    watch = StopWatch(vocabulary, strings)
    return next((index + 1 for index, token in enumerate(ids) if watch.completes(token)), None)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, StopStrings]:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_fallback().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder), StopStrings(str(folder))


@settings(max_examples=60)
@given(data=st.data())
def test_strings_in_any_bytes_are_found_as_by_decoding_all(
    tokenizer: Any, vocabulary: StopStrings, data: st.DataObject
) -> None:
    tokens = st.one_of(st.integers(0, VOCABULARY + 9), st.sampled_from(tokenizer("thé €nd 👍e")["input_ids"]))
    ids = data.draw(st.lists(tokens, min_size=1, max_size=30))
    text = tokenizer.decode(ids) or "x"
    start = data.draw(st.integers(0, len(text) - 1))
    string = text[start : start + data.draw(st.integers(1, 6))]
    assert found_at(vocabulary, ids, (string, "€n")) == first_end(tokenizer, ids, (string, "€n"))


def test_a_string_is_found_behind_the_last_byte_of_a_character_and_ids_without_text(
    fallback: tuple[Any, StopStrings],
) -> None:
    tokenizer, vocabulary = fallback
    before, (head, tail) = ([2 + byte for byte in char.encode()] for char in ("€" * 3, "é"))
    ids = [*before, head, *[900] * 9, tail]
    assert first_end(tokenizer, ids, ("é",)) == len(ids) == found_at(vocabulary, ids, ("é",))


@settings(max_examples=60)
@given(data=st.data())
def test_strings_of_words_and_bytes_are_found_as_by_decoding_all(
    fallback: tuple[Any, StopStrings], data: st.DataObject
) -> None:
    tokenizer, vocabulary = fallback
    words = st.sampled_from([[tokenizer.convert_tokens_to_ids(word)] for word in WORDS])
    characters = st.sampled_from("é€👍 x").map(lambda char: [2 + byte for byte in char.encode()])
    ids = [*chain(*data.draw(st.lists(words | characters | st.just([900]), min_size=1, max_size=20)))]
    text = tokenizer.decode(ids) or "x"
    start = data.draw(st.integers(0, len(text) - 1))
    string = text[start : start + data.draw(st.integers(1, 6))]
    assert found_at(vocabulary, ids, (string,)) == first_end(tokenizer, ids, (string,))
