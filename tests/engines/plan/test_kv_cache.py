"""What a sample takes of a cache, against the library's caches and closed forms."""

import pytest
import torch
from transformers import DynamicCache

from cairn.engines.plan.rates import cache_need
from cairn.engines.plan.serving import Serving, default_static_fraction, serving_problems
from cairn.engines.plan.tensors import model_of
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
