"""Checks of generated samples before they are kept."""

from functools import cache

from cairn.engines.types.errors import EngineError
from cairn.engines.types.trajectories import FIRST_CALL, GeneratedSample, SampleRequest


def require_versions(engine: str, request: SampleRequest, sample: GeneratedSample, versions: tuple[int, int]) -> None:
    """Raise EngineError for a sample that the engine of this name sampled from weights outside `versions` (first,
    last)."""
    carried = 0 if request.begun is None else len(request.begun)
    replayed = {record.call for record in request.recorded}
    sampled = set[int]()
    for segment in sample.trajectory.segments:
        if segment.weight_versions is not None and segment.call not in replayed:
            sampled |= {*segment.weight_versions[carried if segment.call == FIRST_CALL else 0 :].tolist()}
    first, last = versions
    others = sorted(version for version in sampled if not first <= version <= last)
    if others:
        wanted = first if first == last else f"{first} to {last}"
        raise EngineError(f"{engine} sampled with the weights of version {others[0]}, not {wanted}")


def usable(model: str, request: SampleRequest, sample: GeneratedSample) -> GeneratedSample:
    """Return the sample, or a failed one where the model cannot take the tokens after a trajectory's last call. These
    tokens come from the user's code, no engine has seen them, and they would be trained on unchecked.

    `model`: the model's folder.
    """
    for trajectory in sample.trajectories:
        if not trajectory.segments or trajectory.segments[-1].call is not None:
            continue
        context, vocabulary = _limits(model)
        ids = trajectory.response_ids
        outside = ids[(ids < 0) | (ids >= vocabulary)]
        prompt = request.prompt_ids if trajectory.prompt_ids is None else trajectory.prompt_ids
        length = len(prompt) + len(ids)
        if len(outside):
            return GeneratedSample.failed(
                request, f"generate returned token {outside[0]}, outside the model's vocabulary of {vocabulary}"
            )
        if length > context:
            return GeneratedSample.failed(
                request, f"generate returned {length} tokens, more than the model's context of {context}"
            )
    return sample


@cache
def _limits(model: str) -> tuple[int, int]:
    """Return the longest sequence and the number of token ids of a model."""
    from cairn.engines.models.configs import context_length
    from cairn.engines.models.folders import check_model_folder  # PyTorch takes seconds to import

    config = check_model_folder(model)
    return context_length(config), config.get_text_config().vocab_size
