import pytest
import torch

from cairn.engines.training.log_probs import response_logits
from cairn.engines.training.vocabulary import Softmax, read_log_probs
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
        picked = read_log_probs(logits, targets, Softmax(1.0))
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
