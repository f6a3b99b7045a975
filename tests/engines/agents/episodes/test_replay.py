"""What a sample's code was given is recorded, and given to it again: by the process of user code, on a real engine."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.trajectories import CallKind, CallRecord, GeneratedSample, Origin, Recorded, SampleRequest
from cairn.engines.types.types import SamplingParams
from tests.engines.agents.episodes.test_samples import SEARCH, bits

PARAMS = SamplingParams(max_new_tokens=20)
TURNS = 3


class Broken(Exception):
    """The process that generates is lost."""


def function(name: str, timeout: float = 60.0) -> GenerateFunction:
    return GenerateFunction(f"tests.engines.agents.episodes.episodes.{name}", SEARCH, timeout=timeout)


def requested(folder: Path, count: int = 1, **metadata: Any) -> list[SampleRequest]:
    origin = Origin("run-1", 4, attempt="00.000001-ab")
    words = {"folder": str(folder), "turns": TURNS, **metadata}
    return [SampleRequest(7, index, [20, 21, 22], 100 + index, metadata=words, origin=origin) for index in range(count)]


def generated(
    engine: SampleEngine,
    samples: Sequence[SampleRequest],
    name: str,
    records: list[CallRecord],
    until: int | None = None,
) -> dict[tuple[int, int], GeneratedSample]:
    """What comes of samples; all that is recorded is durable at once. Raises Broken after so many records."""
    actual: dict[tuple[int, int], GeneratedSample] = {}
    stream: Iterator[list[GeneratedSample] | Recorded] = engine.generate(samples, PARAMS, function(name))
    for reported in stream:
        if isinstance(reported, list):
            actual |= {sample.key: sample for sample in reported}
            continue
        for record in reported.records:
            if len(records) == until:
                stream.close()  # type: ignore[attr-defined]
                raise Broken
            records.append(record)
        if reported.awaited:
            engine.acknowledge(reported.number)
    return actual


def lines(folder: Path) -> list[str]:
    file = folder / "done"
    return file.read_text().splitlines() if file.exists() else []


def count(done: Sequence[str], word: str) -> int:
    return sum(line.startswith(word) for line in done)


def only(actual: dict[tuple[int, int], GeneratedSample]) -> GeneratedSample:
    (sample,) = actual.values()
    return sample


@pytest.fixture
def engine(qwen3: TransformersEngine) -> SampleEngine:
    return SampleEngine(qwen3.open, qwen3.abort)


def test_an_episode_that_is_lost_anywhere_goes_on_from_what_is_recorded(engine: SampleEngine, tmp_path: Path) -> None:
    whole: list[CallRecord] = []
    folder = tmp_path
    (sample,) = requested(folder)
    expected = only(generated(engine, [sample], "agent", whole))
    assert expected.error is None
    done = lines(folder)
    answers = [record for record in whole if record.order is not None]
    assert [record.order for record in answers] == list(range(len(answers)))
    assert {record.kind for record in whole} == {*CallKind}
    draw = random.Random(0)
    for cut in {1, len(whole) - 1, *draw.sample(range(2, len(whole) - 1), 6)}:
        (folder / "done").unlink()
        records = list(whole[:cut])
        intents = {record.call for record in records if record.order is None}
        answered = {record.call: record for record in records if record.order is not None}
        replayed = only(generated(engine, [replace(sample, recorded=tuple(records))], "agent", records))
        again = lines(folder)
        if intents - answered.keys():
            assert "(tool pay)" in (replayed.error or "")
            continue
        assert bits(replayed) == bits(expected)
        for word in ("look", "pay", "grade", "fail"):
            recorded = sum(record.name == word for record in answered.values())
            assert count(again, word) == count(done, word) - recorded, "what is recorded was done again, or more"
        assert count(again, "add") == count(done, "add"), "the world's state was not built up again"
        times = [record.result for record in answered.values() if record.kind is CallKind.NOW]
        assert [line.split()[1] for line in again if line.startswith("now")][: len(times)] == times
        assert [record.order for record in records if record.order is not None] == list(range(len(answers)))


@pytest.mark.parametrize(
    ("tool", "amount", "error", "done"),
    [
        ("pay", 3, "pay", []),
        ("pay_once", 3, None, ["pay 3 as run-1//7/0/c0"]),
        ("pay_traceably", 3, None, ["reconcile run-1//7/0/c0"]),
        ("pay_traceably", -3, None, ["reconcile run-1//7/0/c0", "pay -3"]),
    ],
)
def test_an_effect_that_may_have_happened_is_not_repeated_blindly(
    engine: SampleEngine, tmp_path: Path, tool: str, amount: int, error: str | None, done: list[str]
) -> None:
    (sample,) = requested(tmp_path, tool=tool, amount=amount)
    records: list[CallRecord] = []
    with pytest.raises(Broken):  # when the intent is durable, and nobody knows whether more has happened
        generated(engine, [sample], "pays", records, until=2)
    assert [(record.call, record.order) for record in records] == [("0", 0), ("c0", None)]
    (tmp_path / "done").unlink(missing_ok=True)
    actual = only(generated(engine, [replace(sample, recorded=tuple(records))], "pays", records))
    assert lines(tmp_path) == done
    if error is None:
        assert actual.error is None
    else:
        assert actual.error is not None
        assert 'call c0 (tool pay) with {"amount":3' in actual.error
        assert "may have been done" in actual.error


def test_an_intent_is_durable_before_its_effect_and_the_answer_before_the_code_has_it(
    engine: SampleEngine, tmp_path: Path
) -> None:
    (sample,) = requested(tmp_path, tool="pay", amount=1)
    stream = engine.generate([sample], PARAMS, function("pays"))
    seen = []
    for reported in stream:
        if isinstance(reported, list):
            seen.append("ended")
            continue
        seen += [f"{record.call}:{record.order}" for record in reported.records] + [f"done {len(lines(tmp_path))}"]
        if reported.awaited:
            engine.acknowledge(reported.number)
    assert [one for one in seen if one != "done 0"] == ["0:0", "c0:None", "c0:1", "done 1", "ended"]
    assert seen.index("c0:None") < len(seen) - 1 - seen[::-1].index("done 0") < seen.index("c0:1")


def test_code_that_does_something_else_is_told_of_by_the_call(engine: SampleEngine, tmp_path: Path) -> None:
    (sample,) = requested(tmp_path, tool="pay", amount=1)
    records: list[CallRecord] = []
    only(generated(engine, [sample], "pays", records))
    (other,) = requested(tmp_path, tool="pay", amount=2)
    actual = only(generated(engine, [replace(other, recorded=tuple(records))], "pays", []))
    assert actual.error is not None
    assert 'makes call c0 (tool pay) with {"amount":2' in actual.error
    assert 'where call c0 (tool pay) with {"amount":1' in actual.error
    longer: list[CallRecord] = []
    (more,) = requested(tmp_path, turns=2)
    only(generated(engine, [more], "agent", longer))
    (fewer,) = requested(tmp_path, turns=1)
    actual = only(generated(engine, [replace(fewer, recorded=tuple(longer))], "agent", []))
    message = "generate: EpisodeDiverged: the code ended without call 1 (sample), which is recorded"
    assert actual.error is not None
    assert actual.error.startswith(f"{message} (")
