"""Responses to prompts with images, by the engine for any Hugging Face model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.engines.agents.episodes.context import Context
from cairn.engines.models.vision import image_processor
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.errors import RequestRefused
from cairn.engines.types.trajectories import SampleRequest, Segment, Trajectory
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, SamplingParams
from tests.engines.agents.episodes.looped import stepped
from tests.engines.rollout.models import collect, configs, rollout_config, same, save_model
from tests.vision import asked, dots, noise, seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dots(tmp_path_factory.mktemp("root") / "dots") / "untrained"


@pytest.fixture(scope="module")
def engine(folder: Path) -> TransformersEngine:
    return TransformersEngine(str(folder), rollout_config())


@pytest.fixture(scope="module")
def requests(folder: Path) -> list[GenerateRequest]:
    return asked(folder)


def library_log_probs(folder: Path, model: torch.nn.Module, request: GenerateRequest, sample: Completion) -> np.ndarray:
    """[T] of a sample's tokens by one forward pass of the library over the whole sequence, which lays images and counts
    positions itself."""
    from io import BytesIO

    from PIL.Image import open as opened

    ids = torch.tensor([[*request.input_ids, *sample.response_ids.tolist()]])
    inputs = {}
    if request.images:
        pictures = [opened(BytesIO(image.data)) for image in request.images]
        inputs = dict(image_processor(str(folder))(images=pictures, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, -len(sample.response_ids) - 1 : -1]
    model.base_model.rope_deltas = None
    chosen = torch.from_numpy(sample.response_ids).long()[:, None]
    return torch.log_softmax(logits.double(), -1).gather(1, chosen)[:, 0].numpy()


def test_log_probs_are_those_of_the_librarys_own_pass(
    folder: Path, engine: TransformersEngine, requests: list[GenerateRequest]
) -> None:
    samples = collect(engine, requests)
    for request in requests:
        expected = library_log_probs(folder, engine._model, request, samples[request.request_id])
        assert samples[request.request_id].log_probs == pytest.approx(expected, abs=1e-5)


def test_a_sample_depends_on_its_image(engine: TransformersEngine, requests: list[GenerateRequest]) -> None:
    (one, other) = (next(r for r in requests if r.request_id == (group, 0)) for group in (1, 2))
    assert one.input_ids == other.input_ids
    alike = collect(engine, [one, replace(other, seed=one.seed)])
    assert not np.array_equal(alike[1, 0].log_probs[:1], alike[2, 0].log_probs[:1])


def test_samples_with_images_do_not_depend_on_their_company(
    engine: TransformersEngine, requests: list[GenerateRequest]
) -> None:
    assert engine.check_batch_invariance()
    together = collect(engine, requests)
    for request in requests[::4]:
        assert same(collect(engine, [request])[request.request_id], together[request.request_id])
    backwards = collect(engine, requests[::-1])
    assert all(same(sample, backwards[id]) for id, sample in together.items())


def test_a_sample_that_is_continued_goes_on_as_if_it_had_never_stopped(
    engine: TransformersEngine, requests: list[GenerateRequest]
) -> None:
    request = next(r for r in requests if len(r.images) == 2)
    whole = collect(engine, [request])[request.request_id]
    first = whole.response_ids[:4]
    rest = replace(request, input_ids=[*request.input_ids, *first.tolist()], position=4)
    result = collect(engine, [rest])[request.request_id]
    assert result.response_ids.tolist() == whole.response_ids[4:].tolist()
    assert result.log_probs == pytest.approx(whole.log_probs[4:], abs=1e-5)


def test_a_later_turn_sees_the_images_of_the_prompt(
    folder: Path, engine: TransformersEngine, requests: list[GenerateRequest]
) -> None:
    request = next(r for r in requests if len(r.images) == 2)
    asked = SampleRequest(0, 0, request.input_ids, seed=1, images=request.images)

    async def twice(ctx: Context, sample: SampleRequest) -> Trajectory:
        first = await ctx.sample(sample.prompt_ids)
        between = Segment.given([40, 41])
        return Trajectory([first, between, await ctx.sample([*sample.prompt_ids, *first.ids, *between.ids])])

    ((one,),) = [ended for ended in stepped(engine.open(), [asked], SamplingParams(5), twice) if ended]
    first, between, second = one.trajectory.segments
    before = replace(request, input_ids=[*request.input_ids, *first.ids.tolist(), *between.ids.tolist()])
    sample = Completion.empty((0,), FinishReason.STOP)
    expected = library_log_probs(folder, engine._model, before, replace(sample, response_ids=second.ids.copy()))
    assert second.log_probs == pytest.approx(expected, abs=1e-5)


def test_images_that_cannot_be_seen_are_refused(
    folder: Path, engine: TransformersEngine, requests: list[GenerateRequest], tmp_path: Path
) -> None:
    request = next(r for r in requests if len(r.images) == 1)
    whole = noise(16, 16)
    broken = replace(request.images[0], data=whole[: len(whole) // 2])
    with pytest.raises(RequestRefused, match="its image 1 is broken"):
        engine.generate([replace(request, images=(broken,))])
    with pytest.raises(RequestRefused, match="placeholders"):
        engine.generate([replace(request, images=(seen(folder, noise(64, 64)),))])
    text = TransformersEngine(save_model(configs()["qwen3"], tmp_path), rollout_config())
    with pytest.raises(RequestRefused, match="the model reads none"):
        text.generate([replace(request, input_ids=[1, 2, 3])])
