"""What a sample takes of a cache, against the library's caches and closed forms."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from cairn.engines.plan.library import model_of
from cairn.engines.plan.rates import cache_need
from cairn.engines.plan.serving import Serving, default_static_fraction, served_parameters, serving_problems
from tests.architectures import architecture
from tests.engines.plan.test_parameters import published


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "glm4", "minimax_m2"])
def test_a_token_takes_what_the_librarys_cache_holds_of_it(name: str) -> None:
    made = architecture(name).make()
    cache = DynamicCache()
    with torch.no_grad():
        made(torch.arange(3, 13)[None], past_key_values=cache, use_cache=True)
    stored = sum(states.numel() * 4 for keys, values, *_ in cache for states in (keys, values))
    assert cache_need(model_of(made.config), 4).of(10) == stored


def test_latent_attention_keeps_a_latent_vector_and_a_rotary_key_on_every_rank() -> None:
    need = cache_need(published("DeepSeek-V3"), 2, ranks=8)
    assert need.per_token == 61 * (512 + 64) * 2


def test_a_rank_has_one_key_value_head_at_least() -> None:
    model = published("Qwen3-30B-A3B")
    assert [cache_need(model, 2, ranks).per_token for ranks in (1, 4, 8)] == [98304, 24576, 24576]


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    need = cache_need(published("gpt-oss-20b"), 2)
    each = 8 * 2 * 64 * 2
    assert need.of(1000) == 12 * each * 1000 + 12 * each * 128


def test_a_delta_network_keeps_a_state_whatever_the_length() -> None:
    need = cache_need(published("Qwen3-Next-80B-A3B-Thinking"), 2)
    state = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 4 * 32 * 128 * 128
    assert need.of(500) - need.of(0) == 500 * 12 * 2 * 256 * 2 * 2
    assert need.of(0) == 36 * state


def test_sglangs_own_choice_leaves_what_its_rule_reserves() -> None:
    gpu = 81559
    reserved = 512 + 1.5 * 8192 + 1024 + 2 * 512
    assert default_static_fraction(gpu * 2**20, Serving(8), {}) == pytest.approx((gpu - reserved) / gpu, abs=1e-3)
    gpu, fewer = 40960, {"max_running_requests": 64}  # no graph is larger than what may run
    reserved = 512 + 1.5 * 4096 + 1024 + 2 * 64
    assert default_static_fraction(gpu * 2**20, Serving(8), fewer) == pytest.approx((gpu - reserved) / gpu, abs=1e-3)


@pytest.mark.parametrize(
    ("serving", "sentence"),
    [
        (Serving(6, dense_tensor=1), "must divide the model's 32 attention heads"),
        (Serving(8, data=3), "must divide tp_size"),
        (Serving(8, dense_tensor=1, expert=3), "must divide the engine's 8 ranks"),
        (Serving(8, dense_tensor=1, expert=1), None),
        (Serving(8, dense_tensor=1, expert=8), None),
    ],
)
def test_what_sglangs_ranks_cannot_divide_is_told(serving: Serving, sentence: str | None) -> None:
    problems = list(serving_problems(published("Qwen3-30B-A3B"), serving, {}))
    assert bool(problems) == (sentence is not None)
    assert sentence is None or sentence in problems[0]


def test_shared_experts_embedding_and_head_are_divided_as_sglang_does() -> None:
    model, hidden = published("GLM-4.5"), 5120
    plain = Serving(16, data=2, dense_tensor=1, expert=16)
    whole = replace(plain, exchanges_tokens=True)
    shared = 89 * 3 * hidden * 1536
    assert served_parameters(model, whole) - served_parameters(model, plain) == shared * (1 - 1 / 16)
    own_heads, vocabulary = replace(plain, data_head=True), 151552 * hidden
    assert served_parameters(model, own_heads) - served_parameters(model, plain) == vocabulary * (1 / 8 - 1 / 16)
    whole_embedding = replace(plain, data=16)
    attention = sum(one.size for one in model.tensors if ".self_attn." in one.name and len(one.shape) == 2)
    assert served_parameters(model, whole_embedding) - served_parameters(model, plain) == pytest.approx(
        (vocabulary + attention) * (1 - 1 / 8), rel=1e-3
    )


def test_blocks_of_fp8_are_not_cut() -> None:
    serving = Serving(32, data=32, dense_tensor=1, expert=32)
    (problem,) = serving_problems(published("Kimi-K2-Instruct"), serving, {})
    assert "the shared experts' width of 2048, in FP8 blocks of 128, cannot be cut over 32 ranks" in problem
    for fitting in (replace(serving, exchanges_tokens=True), replace(serving, tensor=16, data=16, expert=16)):
        assert not list(serving_problems(published("Kimi-K2-Instruct"), fitting, {}))
