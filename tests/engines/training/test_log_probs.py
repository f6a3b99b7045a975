import pytest
import torch

from cairn.engines.training.log_probs import entropy, response_logits, token_log_probs
from tests.engines.training.builders import VOCABULARY, tiny_model

FAMILIES = ["qwen3", "llama", "gpt_neox", "gemma2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_at_picked_positions_are_those_of_the_models_own_full_forward(family: str) -> None:
    model = tiny_model(family).eval()
    ids = torch.randint(0, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([1, 2, 39, 40, 77, 85])
    targets = torch.tensor([5, 320, 0, 17, 18, 19])
    with torch.no_grad():
        logits = response_logits(model, ids, positions)
        picked = token_log_probs(logits, logits.logsumexp(-1), targets)
        full = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.flatten(0, 1)
    expected = torch.log_softmax(full.double(), -1)[positions, targets]
    assert torch.allclose(picked.double(), expected, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_the_right_does_not_change_what_comes_before(family: str) -> None:
    model = tiny_model(family).eval()
    ids = torch.randint(0, VOCABULARY, (1, 30), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([ids, torch.zeros(1, 25, dtype=torch.int64)], dim=1)
    with torch.no_grad():
        alone = response_logits(model, ids, torch.arange(30))
        batched = response_logits(model, padded, torch.arange(30))
    assert torch.allclose(alone, batched, atol=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model()
    ids = torch.zeros(1, 8, dtype=torch.int64)
    response_logits(model, ids, torch.tensor([3]))
    assert model(input_ids=ids).logits.shape == (1, 8, VOCABULARY)


@pytest.mark.parametrize("differentiable", [True, False])
def test_entropy_is_that_of_the_categorical_distribution(differentiable: bool) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(entropy(logits, logits.logsumexp(-1), differentiable=differentiable), expected)


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize(("scale", "mean"), [(6.0, 0.0), (1.0, 100.0), (6.0, -1000.0)])
def test_entropy_in_float32_does_not_cancel(scale: float, mean: float, differentiable: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 5000, generator=draw) * scale + mean
    expected = torch.distributions.Categorical(logits=logits.double()).entropy()
    found = entropy(logits, logits.logsumexp(-1), differentiable=differentiable)
    assert (found.double() - expected).abs().max() < 2e-6


def test_the_gradient_of_the_entropy_is_that_of_finite_differences() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: entropy(x, x.logsumexp(-1), differentiable=True), logits)


def test_entropy_computed_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.engines.training.log_probs._ENTROPY_CHUNK", 100)
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    normalizer = logits.logsumexp(-1)
    chunked, whole = (entropy(logits, normalizer, differentiable=differentiable) for differentiable in (False, True))
    assert torch.allclose(chunked, whole)
