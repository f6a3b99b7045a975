"""`generate` of samples beside a real engine: calls, their seeds, and what is refused of a trajectory."""

import asyncio
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cairn
from cairn.engines.agents.episodes.context import Context
from cairn.engines.agents.generation.single_turn import generate as single_turn
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.places import split_place
from cairn.engines.types.trajectories import (
    BadTrajectory,
    GeneratedSample,
    SampleRequest,
    Segment,
    Trajectory,
    call_seed,
)
from cairn.engines.types.types import FinishReason, GenerateRequest, SamplingParams
from tests.engines.agents.episodes.looped import looped, stepped
from tests.engines.rollout.models import CONTEXT_LENGTH, configs, rollout_config, save_model

PARAMS = SamplingParams(max_new_tokens=6)
WORLD = [9, 10, 11]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    return TransformersEngine(save_model(configs()["qwen3"], tmp_path_factory.mktemp("model")), rollout_config())


def requests(groups: int = 2, samples: int = 2) -> list[SampleRequest]:
    return [
        SampleRequest(group, index, [20 + group, 21, 22], 1000 * group + index)
        for group in range(groups)
        for index in range(samples)
    ]


def generated(
    engine: TransformersEngine, function: Any, samples: list[SampleRequest], way: Any = looped
) -> list[GeneratedSample]:
    with closing(engine.open()) as stream:
        result = [sample for part in way(stream, samples, PARAMS, function) for sample in part]
    return sorted(result, key=lambda sample: sample.key)


both_ways = pytest.mark.parametrize("way", [looped, stepped])
"""On an event loop, as user code runs, and stepped in the engine's process, as built-in functions run."""


async def two_turns(ctx: Context, sample: SampleRequest) -> Trajectory:
    first = await ctx.sample(sample.prompt_ids)
    told = Segment.given(WORLD)
    second = await ctx.sample([*sample.prompt_ids, *first.ids, *told.ids], max_new_tokens=3)
    return Trajectory([first, told, second])


@both_ways
def test_one_turn_is_the_response_that_the_engine_gives_a_request_with_the_samples_own_seed(
    engine: TransformersEngine, way: Any
) -> None:
    requested = requests()
    raw = engine.generate([GenerateRequest(one.key, one.prompt_ids, one.seed, PARAMS) for one in requested])
    expected = {done.request_id: done for part in raw for done in part}
    for sample in generated(engine, single_turn, requested, way):
        (segment,) = sample.trajectory.segments
        done = expected[sample.key]
        assert segment.ids.tolist() == done.response_ids.tolist()
        assert segment.log_probs is not None
        assert segment.log_probs.tolist() == done.log_probs.tolist()
        assert (segment.call, segment.loss_mask.tolist()) == ("0", [1] * len(segment))
        assert sample.finish_reason == done.finish_reason


@both_ways
def test_a_second_turn_is_drawn_from_a_seed_of_its_own_after_all_that_came_before_it(
    engine: TransformersEngine, way: Any
) -> None:
    requested = requests()
    for request, sample in zip(requested, generated(engine, two_turns, requested, way), strict=True):
        first, told, second = sample.trajectory.segments
        before = [*request.prompt_ids, *first.ids, *told.ids]
        seed = call_seed(request.seed, "1")
        repeated = engine.generate([GenerateRequest((0, 0), before, seed, replace(PARAMS, max_new_tokens=3))])
        ((done,),) = list(repeated)
        assert (first.call, second.call, first.seed, second.seed) == ("0", "1", request.seed, seed)
        assert second.ids.tolist() == done.response_ids.tolist()
        trajectory = sample.trajectory
        ends = [len(first), len(WORLD), len(second)]
        assert trajectory.loss_mask.tolist() == np.repeat([1, 0, 1], ends).tolist()
        assert trajectory.log_probs.tolist()[len(first) : len(first) + len(WORLD)] == [0.0] * len(WORLD)
        assert trajectory.weight_versions.tolist() == [0] * sum(ends)


def test_a_sample_may_have_several_trajectories_which_share_a_call_that_is_trained_on_once(
    engine: TransformersEngine,
) -> None:
    async def anew(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        first, told, second = (await two_turns(ctx, sample)).segments
        third = await ctx.sample([*sample.prompt_ids, *WORLD])
        shared = replace(first, loss_mask=np.zeros(len(first), np.uint8))
        return [Trajectory([first]), Trajectory([shared, told, second]), Trajectory([Segment.given(WORLD), third])]

    one, several = (generated(engine, function, requests(1, 2)) for function in (two_turns, anew))
    for plain, sample in zip(one, several, strict=True):
        first, told, second = plain.trajectory.segments
        third = sample.trajectory.segments[-1]
        assert sample.finish_reason == third.finish_reason
        assert sample.lengths == (len(first), len(plain.trajectory.response_ids), len(WORLD) + len(third))
        parts = [part.response_ids.tolist() for part in sample.trajectories]
        assert parts[:2] == [first.ids.tolist(), plain.trajectory.response_ids.tolist()]
        assert parts[2] == [*WORLD, *third.ids.tolist()]
        ends = [len(first), len(first) + len(told), len(second), len(WORLD), len(third)]
        assert sample.trajectory.loss_mask.tolist() == np.repeat([1, 0, 1, 0, 1], ends).tolist()


def test_calls_side_by_side_have_ids_of_their_tasks_whoever_asks_first(engine: TransformersEngine) -> None:
    async def side_by_side(ctx: Context, sample: SampleRequest) -> Trajectory:
        async def late() -> Segment:
            for _ in range(5):
                await asyncio.sleep(0)
            return await ctx.sample(sample.prompt_ids)

        segments = await asyncio.gather(late(), ctx.sample(sample.prompt_ids))
        assert [segment.call for segment in segments] == ["t0.0", "t1.0"]
        return Trajectory([segments[1]])

    for sample in generated(engine, side_by_side, requests(1, 2)):
        assert sample.error is None
        assert sample.trajectory.segments[0].seed == call_seed(sample.index, "t1.0")


async def nothing(ctx: Context, sample: SampleRequest) -> Trajectory:
    return Trajectory([Segment.given(WORLD)])


async def other_ids(ctx: Context, sample: SampleRequest) -> Trajectory:
    segment = await ctx.sample(sample.prompt_ids)
    return Trajectory([replace(segment, ids=segment.ids + 1)])


async def another_mask(ctx: Context, sample: SampleRequest) -> Trajectory:
    segment = await ctx.sample(sample.prompt_ids)
    return Trajectory([replace(segment, loss_mask=segment.loss_mask[1:])])


async def learns_from_the_world(ctx: Context, sample: SampleRequest) -> Trajectory:
    segment = await ctx.sample(sample.prompt_ids)
    return Trajectory([segment, replace(Segment.given(WORLD), loss_mask=np.ones(3, np.uint8))])


async def another_prefix(ctx: Context, sample: SampleRequest) -> Trajectory:
    return Trajectory([Segment.given(WORLD), await ctx.sample(sample.prompt_ids)])


async def no_trajectory(ctx: Context, sample: SampleRequest) -> Any:
    return await ctx.sample(sample.prompt_ids)


async def weighs_tokens(ctx: Context, sample: SampleRequest) -> Trajectory:
    segment = await ctx.sample(sample.prompt_ids)
    return Trajectory([replace(segment, loss_mask=segment.loss_mask * 5)])


async def a_batch_of_one(ctx: Context, sample: SampleRequest) -> Trajectory:
    told = Segment(np.asarray([WORLD]), np.zeros(1, np.uint8))
    return Trajectory([await ctx.sample(sample.prompt_ids), told])


async def no_segment(ctx: Context, sample: SampleRequest) -> Any:
    return Trajectory([await ctx.sample(sample.prompt_ids), WORLD])  # type: ignore[list-item]


async def no_trajectories(ctx: Context, sample: SampleRequest) -> Any:
    return []


async def a_segment_among_them(ctx: Context, sample: SampleRequest) -> Any:
    segment = await ctx.sample(sample.prompt_ids)
    return [Trajectory([segment]), segment]


async def one_without_tokens(ctx: Context, sample: SampleRequest) -> Any:
    return [Trajectory([await ctx.sample(sample.prompt_ids)]), Trajectory([Segment.given(WORLD)])]


async def one_after_another(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
    first = await ctx.sample(sample.prompt_ids)
    return [Trajectory([first]), Trajectory([await ctx.sample([*sample.prompt_ids, *WORLD])])]


async def pays_the_world(ctx: Context, sample: SampleRequest) -> Trajectory:
    first, world, _ = (await two_turns(ctx, sample)).segments
    return Trajectory([first, replace(world, reward=1.0)])


async def pays_in_words(ctx: Context, sample: SampleRequest) -> Trajectory:
    return Trajectory([await ctx.sample(sample.prompt_ids)], reward="1")  # type: ignore[arg-type]


async def of_two_words(ctx: Context, sample: SampleRequest) -> Trajectory:
    return Trajectory([await ctx.sample(sample.prompt_ids)], role="second solver")


async def learns_twice(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
    first, *rest = (await two_turns(ctx, sample)).segments
    return [Trajectory([first]), Trajectory([first, *rest])]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (nothing, "without a sampled token; if there is none, raise an error"),
        (other_ids, "segment 1 .* has other ids than call 0 of ctx.sample returned; use that segment unchanged"),
        (another_mask, r"segment 1 .* has a loss_mask of \d for \d tokens; it needs one value per token"),
        (learns_from_the_world, "segment 2 .* trains on tokens that were not sampled"),
        (another_prefix, "segment 2 .* was sampled after 3 tokens that differ from the 6 before it in the trajectory"),
        (weighs_tokens, "segment 1 .* has a loss_mask with other values than 0 and 1"),
        (a_batch_of_one, "segment 2 .* has ids of 2 dimensions; they have to be one list"),
        (no_segment, "segment 2 .* is of type list; it has to be a cairn.Segment"),
        (no_trajectory, "generate returned Segment for a sample; return a cairn.Trajectory, or a list of them"),
        (no_trajectories, "generate returned an empty list for a sample; return a cairn.Trajectory"),
        (a_segment_among_them, "generate returned a list with Segment for a sample; return a cairn.Trajectory"),
        (one_without_tokens, "generate returned a trajectory without a sampled token"),
        (one_after_another, "segment 1 of trajectory 2 .* was sampled after 6 tokens that differ from the 3 before it"),
        (pays_the_world, "segment 2 .* has a reward, but was not sampled; set it on the sampled segment before"),
        (pays_in_words, "generate gave a trajectory the reward '1'; it has to be a number"),
        (of_two_words, "generate gave a trajectory the role 'second solver'; it has to be a word, such as 'solver'"),
        (
            learns_twice,
            "returned call 0 of ctx.sample in two trajectories, .*the same tokens in both; set it to 0 in one",
        ),
    ],
)
@both_ways
def test_what_is_no_trajectory_of_the_sample_is_refused(
    engine: TransformersEngine, function: Any, told: str, way: Any
) -> None:
    with pytest.raises(BadTrajectory, match=told):
        generated(engine, function, requests(1, 2), way)


async def made_anew(segment: Segment) -> Segment:
    """Without what the policy said of the tokens, in other types."""
    return Segment(segment.ids.tolist(), [1, *[0] * (len(segment) - 1)], segment.call)  # type: ignore[arg-type]


async def otherwise_sampled(segment: Segment) -> Segment:
    assert segment.log_probs is not None
    assert segment.weight_versions is not None
    return replace(
        segment,
        loss_mask=np.asarray([1, *[0] * (len(segment) - 1)]),
        log_probs=segment.log_probs * 0,
        weight_versions=segment.weight_versions + 3,
        seed=1,
        finish_reason=None,
    )


async def in_place(segment: Segment) -> Segment:
    segment.loss_mask[1:] = 0
    with pytest.raises(ValueError, match="read-only"):
        segment.ids[0] = 7
    return segment


@pytest.mark.parametrize("changed", [made_anew, otherwise_sampled, in_place])
def test_of_what_was_sampled_user_code_decides_the_mask_alone(engine: TransformersEngine, changed: Any) -> None:
    async def function(ctx: Context, sample: SampleRequest) -> Trajectory:
        return Trajectory(iter([await changed(await ctx.sample(sample.prompt_ids))]))  # type: ignore[arg-type]

    requested = requests(1, 2)
    for sample, untouched in zip(
        generated(engine, function, requested), generated(engine, single_turn, requested), strict=True
    ):
        (result,), (expected,) = sample.trajectory.segments, untouched.trajectory.segments
        for name in ("ids", "log_probs", "weight_versions"):
            assert getattr(result, name).tolist() == getattr(expected, name).tolist()
            assert getattr(result, name).dtype == getattr(expected, name).dtype
        assert result.loss_mask.tolist() == [1, *[0] * (len(result) - 1)]
        assert (result.seed, result.finish_reason) == (expected.seed, expected.finish_reason)
        assert sample.finish_reason == expected.finish_reason


def test_rewards_and_roles_that_user_code_gives_are_kept(engine: TransformersEngine) -> None:
    async def function(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        first, second = [await ctx.sample(sample.prompt_ids) for _ in range(2)]
        inputs = Trajectory([replace(first, reward=np.float32(0.25))], reward=1, role="solver")
        return [inputs, Trajectory([replace(second, reward=True)])][: 2 - sample.index]

    whole, one = generated(engine, function, requests(1, 2))
    assert (whole.rewards, whole.roles) == ((1.0, 1.0), ("solver", None))
    assert [segment.reward for segment in whole.trajectory.segments] == [0.25, 1.0]
    for sample, roles in ((whole, ["solver", None]), (one, ["solver"])):
        assert [(trajectory.role, trajectory.reward) for trajectory in sample.trajectories] == [
            (role, 1.0) for role in roles
        ]


def test_the_reward_of_a_trajectory_is_the_sum_of_its_turns_where_it_has_none_of_its_own(
    engine: TransformersEngine,
) -> None:
    async def function(ctx: Context, sample: SampleRequest) -> Trajectory:
        first, world, second = (await two_turns(ctx, sample)).segments
        rewards = [None, -0.5, 2.0][sample.index :]
        return Trajectory([replace(first, reward=rewards[0]), world, replace(second, reward=rewards[1])])

    alone, both = generated(engine, function, requests(1, 2))
    assert (alone.rewards, both.rewards) == ((-0.5,), (1.5,))


def test_a_reward_that_is_not_finite_fails_its_sample_alone(engine: TransformersEngine) -> None:
    async def function(ctx: Context, sample: SampleRequest) -> Trajectory:
        return Trajectory([await ctx.sample(sample.prompt_ids)], reward=[float("nan"), 0][sample.index])

    lost, retained = generated(engine, function, requests(1, 2))
    line = function.__code__.co_firstlineno
    reason = "gave a trajectory the reward nan, which is not finite"
    assert lost.error == f"generate: ValueError: {reason} (test_runner.py:{line})"
    assert retained.rewards == (0.0,)


class Unlikely(BaseException):
    """No Exception."""


async def of_no_usual_kind() -> None:
    raise Unlikely("of no usual kind")


async def exits() -> None:
    raise SystemExit(3)


async def waits_for_what_was_cancelled() -> None:
    task = asyncio.ensure_future(asyncio.sleep(100))
    task.cancel()
    await task


def test_a_number_of_tokens_that_is_none_fails_its_sample_alone(engine: TransformersEngine) -> None:
    async def halves(ctx: Context, sample: SampleRequest) -> Trajectory:
        most = ctx.max_new_tokens / (2 if sample.index else 4)  # 3.0 or 1.5
        return Trajectory([await ctx.sample(sample.prompt_ids, max_new_tokens=most)])  # type: ignore[arg-type]

    for sample in generated(engine, halves, requests(1, 2)):
        assert sample.error is not None
        assert "'float' object cannot be interpreted as an integer" in sample.error


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (of_no_usual_kind, "generate: Unlikely: of no usual kind"),
        (exits, "generate: SystemExit: 3"),
        (waits_for_what_was_cancelled, "generate: CancelledError: "),
    ],
)
@pytest.mark.timeout(30)
def test_a_sample_ends_whatever_its_generate_raises(engine: TransformersEngine, does: Any, told: str) -> None:
    async def sometimes(ctx: Context, sample: SampleRequest) -> Trajectory:
        if sample.index == 0:
            await does()
        return await single_turn(ctx, sample)

    first, second = generated(engine, sometimes, requests(1, 2))
    assert first.error is not None
    message, place = split_place(first.error)
    assert (message, second.error) == (told, None)
    assert place is not None
    assert place.startswith("test_runner.py:")


@both_ways
def test_a_sample_whose_generate_raises_or_is_refused_fails_and_no_other_does(
    engine: TransformersEngine, way: Any
) -> None:
    async def sometimes(ctx: Context, sample: SampleRequest) -> Trajectory:
        if sample.index == 0:
            raise ValueError("no such tool")
        if sample.index == 1:
            await ctx.sample([20] * CONTEXT_LENGTH)
        return await single_turn(ctx, sample)

    first, second, third = generated(engine, sometimes, requests(1, 3), way)
    assert first.error is not None
    assert split_place(first.error)[0] == "generate: ValueError: no such tool"
    assert second.error is not None
    assert "leaves no room in the context" in second.error
    assert (third.error, len(third.trajectory.segments)) == (None, 1)


@both_ways
def test_what_is_aborted_in_its_first_call_goes_on_there_and_ends_as_if_it_had_not_been(
    engine: TransformersEngine, way: Any
) -> None:
    requested = requests(1, 2)
    whole = generated(engine, two_turns, requested, way)
    cut = [
        replace(
            request,
            begun=replace(
                sample.trajectory.segments[0],
                finish_reason=FinishReason.ABORT,
                **{
                    name: getattr(sample.trajectory.segments[0], name)[:2]
                    for name in ("ids", "loss_mask", "log_probs", "weight_versions")
                },
            ),
        )
        for request, sample in zip(requested, whole, strict=True)
    ]
    for before, after in zip(whole, generated(engine, two_turns, cut, way), strict=True):
        assert before.trajectory.response_ids.tolist() == after.trajectory.response_ids.tolist()
        assert np.allclose(before.trajectory.log_probs, after.trajectory.log_probs, atol=1e-5)


def by_words(response: str, label: str | None, metadata: dict[str, Any]) -> dict[str, Any]:
    return {"reward": len(response) + len(label or "") + len(metadata)}


async def by_sample(sample: Any) -> float:
    return float(sample.prompt_ids[0] + len(sample.response))


@pytest.mark.parametrize(
    ("grader", "response", "reward"),
    [
        ("exact_match", r"\boxed{seven}", 1.0),
        ("exact_match", "eight", 0.0),
        ("gsm8k", "#### 7", None),  # a mapping of ours
        (by_words, "ab", 8.0),
        (by_sample, "abc", 23.0),
    ],
)
def test_a_grader_of_ours_or_yours_is_asked_for_a_response(
    engine: TransformersEngine, grader: Any, response: str, reward: float | None
) -> None:
    async def judged(ctx: Context, sample: SampleRequest) -> Trajectory:
        result = await ctx.judge(grader, response)
        return Trajectory([replace(await ctx.sample(sample.prompt_ids), reward=result)])

    requested = [replace(one, label="seven", metadata={"a": 1}) for one in requests(1, 1)]
    (sample,) = generated(engine, judged, requested)
    assert sample.error is None
    assert sample.rewards is not None
    assert sample.rewards[0] == (0.0 if reward is None else reward)


def test_a_grader_of_several_samples_and_a_tool_that_is_not_there_are_the_codes_fault(
    engine: TransformersEngine,
) -> None:
    async def judged(ctx: Context, sample: SampleRequest) -> Trajectory:
        if sample.index:
            with suppress(cairn.ToolFailed):  # which the policy would be told
                await ctx.call("look", {})
        else:
            await ctx.judge(lambda args, sample: 1.0, "x")
        return Trajectory([await ctx.sample(sample.prompt_ids)])

    result = [split_place(sample.error or "")[0] for sample in generated(engine, judged, requests(1, 2))]
    assert result == [
        "generate: BadPlugin: the grader '<lambda>' takes args, sample: ctx.judge passes one response at a time",
        "generate: ToolUnavailable: there is no tool 'look': name it in rollout.tools",
    ]
