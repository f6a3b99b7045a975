"""A view of a configuration gives what was declared, whatever way it is asked."""

import pickle

import pytest
from pydantic import ValidationError

from cairn.configs.schema.run import RunConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.configs.view import Reader, UndeclaredRead, view

CONFIG = RunConfig.model_validate(
    {
        "model": {"path": "/m"},
        "data": {"path": "/d"},
        "rollout": {"num_rollout": 1, "rollout_batch_size": 4, "rollout_max_response_len": 8},
    }
)


def seen(*reads: str) -> RunConfig:
    return view(CONFIG, Reader("step toy", "`reads` of toy", reads))


def test_what_was_declared_is_read_and_nothing_beside_it() -> None:
    config = seen("rollout.rollout_batch_size")
    assert config.rollout.rollout_batch_size == 4
    undeclared = r"^step toy reads rollout\.num_engines without .* add it to `reads` of toy"
    with pytest.raises(UndeclaredRead, match=undeclared):
        _ = config.rollout.num_engines
    with pytest.raises(UndeclaredRead, match=r"reads seed "):
        _ = config.seed
    with pytest.raises(UndeclaredRead, match=r"reads training\.lora "):
        _ = config.training.lora.r
    with pytest.raises(UndeclaredRead, match=r"reads tracking "):
        _ = config.tracking.tensorboard_dir


def test_a_section_stands_for_all_its_options() -> None:
    config = seen("data", "training.lora")
    assert config.data is CONFIG.data
    assert config.training.lora.lora_alpha == CONFIG.training.lora.lora_alpha


def test_what_changes_no_bits_may_be_read_by_all() -> None:
    config = seen("seed")
    assert config.rollout.timeout == CONFIG.rollout.timeout
    assert config.model.folders == {"model": "/m"}


def test_methods_and_properties_read_through_the_view() -> None:
    config = seen("algorithm.kl_coef", "algorithm.num_critic_only_steps", "rollout.rollout_top_p")
    assert config.algorithm.trains_actor(0)
    with pytest.raises(UndeclaredRead, match=r"algorithm\.use_kl_loss"):
        _ = config.algorithm.reads_kl
    with pytest.raises(UndeclaredRead, match=r"rollout\.rollout_top_k"):
        _ = config.rollout.cuts_vocabulary


def test_a_copy_with_other_values_is_a_view_too() -> None:
    rates = ("critic", "critic_lr", "critic_lr_warmup_iters", "lr", "lr_warmup_iters", "lr_warmup_fraction")
    critic = seen(*(f"training.{name}" for name in rates)).training.of_critic
    assert critic.lr == CONFIG.training.lr
    with pytest.raises(UndeclaredRead, match=r"training\.dtype"):
        _ = critic.dtype


def test_a_section_that_is_read_as_a_whole_has_nothing_undeclared() -> None:
    training: TrainingConfig = seen("training.lr").training
    assert training.model_dump().keys() == {"lr", "timeout", "distributed_timeout_minutes"}
    assert training != CONFIG.training
    with pytest.raises(ValidationError, match="frozen"):
        training.lr = 2.0
    assert not hasattr(training, "no_such_option")
    copy = pickle.loads(pickle.dumps(training))
    with pytest.raises(UndeclaredRead, match=r"reads training\.dtype "):
        _ = copy.dtype
