"""One response of the policy."""

from typing import Any

from cairn.engines.agents.slime import GenerateState as GenerateState
from cairn.engines.agents.slime import Sample, post
from cairn.engines.agents.slime import get_model_url as get_model_url


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Return a sample with the policy's response to its prompt, or after the tokens that it has."""
    state = GenerateState(args)
    if not sample.tokens:
        sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(get_model_url(args), payload)
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, *_ in pairs],
        log_probs=[log_prob for log_prob, *_ in pairs],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample
