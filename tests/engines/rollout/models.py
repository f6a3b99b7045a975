"""Tiny models of several architectures, with random weights spread enough that their distributions are not flat."""

from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.types import Completion, GenerateRequest, RequestId, SamplingParams
from tests.requests import by_id, group

VOCAB_SIZE = 320
CONTEXT_LENGTH = 128
END_TOKEN = 7

Samples = dict[RequestId, Completion]


def configs() -> dict[str, PretrainedConfig]:
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT_LENGTH,
        "eos_token_id": END_TOKEN,
        "bos_token_id": None,
    }
    grouped = common | {"num_key_value_heads": 2}
    sliding = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return {
        "qwen3": Qwen3Config(**grouped, head_dim=16, tie_word_embeddings=True),
        "qwen2": Qwen2Config(**grouped, tie_word_embeddings=True),
        "qwen2-sliding": Qwen2Config(**grouped, **sliding),
        "llama": LlamaConfig(**grouped),
        "llama-dynamic-rope": LlamaConfig(
            **grouped, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        "llama-odd-widths": LlamaConfig(
            **grouped | {"vocab_size": VOCAB_SIZE + 3, "hidden_size": 40, "intermediate_size": 51, "head_dim": 10}
        ),
        "gpt-neox": GPTNeoXConfig(**common),
        "gated-delta": Qwen3_5TextConfig(
            **grouped,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
    }


def save_model(config: PretrainedConfig, folder: Path, seed: int = 0) -> str:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(folder)
    return str(folder)


def rollout_config(**changes: object) -> RolloutConfig:
    return RolloutConfig(num_rollout=1, rollout_batch_size=1, rollout_max_response_len=16).model_copy(update=changes)


def request(number: int, prompt: list[int], samples: int = 1, **params: object) -> list[GenerateRequest]:
    """A group."""
    seeds = np.random.default_rng([number, 1]).integers(2**63, size=samples).tolist()
    defaults: dict = {"max_new_tokens": 8}
    return group(number, prompt, seeds, SamplingParams(**(defaults | params)))


def random_requests(seed: int, count: int) -> list[GenerateRequest]:
    """Groups of every kind: lengths, sizes, sampling parameters."""
    draw = np.random.default_rng(seed)
    return [
        one
        for i in range(count)
        for one in request(
            i,
            draw.integers(VOCAB_SIZE, size=int(draw.choice([1, 2, 9, 16, 17, 33, 60, 90]))).tolist(),
            samples=int(draw.choice([1, 2, 3, 8])),
            max_new_tokens=int(draw.integers(1, 40)),
            temperature=float(draw.choice([0, 0.7, 1, 1])),
            top_p=float(draw.choice([0.8, 1, 1])),
            top_k=int(draw.choice([5, -1, -1])),
            stop_token_ids=tuple(draw.integers(VOCAB_SIZE, size=int(draw.choice([0, 4]))).tolist()),
            return_sampling_support=True,
        )
    ]


def collect(engine: TransformersEngine, requests: list[GenerateRequest]) -> Samples:
    return by_id(engine.generate(requests))


def same(one: Completion, other: Completion) -> bool:
    """Bit for bit, but for the time it took."""
    return (
        one.response_ids.tobytes() == other.response_ids.tobytes()
        and one.log_probs.tobytes() == other.log_probs.tobytes()
        and one.finish_reason == other.finish_reason
    )


def full_log_probs(model: torch.nn.Module, request: GenerateRequest, sample: Completion) -> np.ndarray:
    """[T] log-probs of a sample's tokens, from one forward pass of the library over the whole sequence, without a
    cache, over what they were drawn from as it is reported."""
    response = torch.from_numpy(sample.response_ids).long()
    input_ids = torch.cat([torch.as_tensor(request.input_ids), response])[None]
    with torch.no_grad():
        logits = model(input_ids=input_ids, use_cache=False).logits[0, len(request.input_ids) - 1 : -1].double()
    logits /= request.sampling_params.temperature or 1.0
    if (retained := sample.kept) is not None:
        for row, (end, count) in enumerate(zip(np.cumsum(retained.counts), retained.counts, strict=True)):
            impossible = torch.ones(logits.shape[1], dtype=torch.bool)
            impossible[retained.ids[end - count : end]] = False
            logits[row, impossible] = -torch.inf
    return torch.log_softmax(logits, -1).gather(1, response[:, None])[:, 0].numpy()
