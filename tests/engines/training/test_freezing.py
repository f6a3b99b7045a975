"""Parameters that stay as they are, by their names: one rank here, two in test_sharded.py, Megatron's updates in
megatron/test_parity.py and test_checkpoint.py."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.folders import check_model_folder, load_causal_lm
from cairn.engines.training.freezing import freezing_problems
from cairn.engines.training.megatron.families import family_of
from cairn.engines.training.megatron.freezing import freezing_problems as freezing_problems_of_megatron
from cairn.engines.training.megatron.freezing import frozen_tensors
from cairn.engines.training.torch.export import export_checkpoint
from cairn.engines.types.errors import BadModel, EngineError
from cairn.storage.store.store import Store
from tests.engines.training.builders import make_batch, make_engine, model_folder, weights_of

BATCH = make_batch(old=True)


def test_an_update_is_that_of_a_plain_loop_that_hands_adamw_the_rest_alone(folder: Path) -> None:
    """Two clipped steps of the negative log-likelihood, whose norm counts the trained gradients alone."""
    engine = make_engine(
        folder,
        algorithm=AlgorithmConfig(loss_type="sft_loss", calculate_per_token_loss=True),
        only_train_params_name_list=("q_proj", r"^model\.norm"),
        weight_decay=0.1,
        clip_grad=0.5,
    )
    norms = [
        engine.train(BATCH, num_steps=1, expected_version=version, input_digest="d").metrics["grad_norm"]
        for version in range(2)
    ]

    model = load_causal_lm(folder, torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trained = {n: p for n, p in model.named_parameters() if "q_proj" in n or n == "model.norm.weight"}
    matrices, vectors = ([p for p in trained.values() if (p.dim() == 2) == matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-8)
    for norm in norms:
        model.zero_grad()
        total = torch.zeros(())
        for ids, length, mask in zip(BATCH.input_ids, BATCH.response_lengths, BATCH.loss_mask, strict=True):
            tokens = torch.from_numpy(ids).long()
            log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            total -= (log_probs[-length:] * torch.from_numpy(mask)).sum()
        (total / sum(int(mask.sum()) for mask in BATCH.loss_mask)).backward()
        assert torch.nn.utils.clip_grad_norm_(trained.values(), 0.5).item() == pytest.approx(norm, rel=1e-4)
        optimizer.step()
    for name, weight in weights_of(engine).items():
        assert weight.equal(before[name]) == (name not in trained), name
        np.testing.assert_allclose(weight, model.state_dict()[name], atol=1e-5, rtol=0, err_msg=name)


def test_a_frozen_model_goes_on_from_its_checkpoint_and_is_exported_whole(
    folder: Path, store: Store, tmp_path: Path
) -> None:
    engine = make_engine(folder, freeze_params_name_list=("embed_tokens", "mlp"))
    assert engine.weights_checksum() == make_engine(folder).weights_checksum()
    engine.train(BATCH, num_steps=1, expected_version=0, input_digest="d")
    engine.save(store, "one")
    digests = []
    for _ in range(2):
        engine.train(BATCH, num_steps=1, expected_version=1, input_digest="d")
        digests.append(engine.state_digest())
        engine.load(store, "one")
    assert digests[0] == digests[1]
    export_checkpoint(store, "one", folder, tmp_path / "hf", dtype=torch.float32, lora=TrainingConfig().lora)
    exported = dict(load_causal_lm(tmp_path / "hf", torch.float32).named_parameters())
    assert all(weight.equal(exported[name]) for name, weight in weights_of(engine).items())
    with pytest.raises(EngineError, match=r"whether model\.embed_tokens\.weight is trained"):
        make_engine(folder).load(store, "one")


def test_a_critic_beside_a_frozen_actor_is_trained_whole(folder: Path) -> None:
    engine = make_engine(
        folder, algorithm=AlgorithmConfig(advantage_estimator="ppo"), freeze_params_name_list=("embed_tokens",)
    )
    kinds = engine._state()
    missing = {name for name, _ in kinds["parameters"]} - {name for name, _ in kinds["exp_avg"]}
    assert missing == {"model.embed_tokens.weight"}


def test_names_that_the_model_lacks_are_refused_before_weights_are_loaded(folder: Path) -> None:
    def refused(**lists: tuple[str, ...]) -> str:
        (problem,) = freezing_problems(TrainingConfig(**lists), str(folder))  # type: ignore[arg-type]
        return problem

    near = refused(freeze_params_name_list=("embed_tokens", r"layers\.0\.self_attn\.query"))
    assert r"training.freeze_params_name_list has 'layers\\.0\\.self_attn\\.query'" in near
    assert "model.layers.0.self_attn." in near
    assert "tied output layer" in refused(freeze_params_name_list=("lm_head",))
    assert "leaves no parameter to train" in refused(freeze_params_name_list=("model",))
    assert freezing_problems(TrainingConfig(only_train_params_name_list=("mlp",)), str(folder)) == []
    with pytest.raises(BadModel, match="only_train_params_name_list has 'indexer'"):
        make_engine(folder, only_train_params_name_list=("indexer",))


def test_megatron_freezes_whole_tensors_of_its_own_by_the_names_of_the_library(folder: Path, tmp_path: Path) -> None:
    def refused(folder: Path, *patterns: str) -> str:
        found = freezing_problems_of_megatron(
            TrainingConfig(engine="megatron", freeze_params_name_list=patterns), str(folder)
        )
        return " ".join(found)

    assert refused(folder, r"layers\.0\.", "mlp", "k_norm", "embed_tokens", "input_layernorm") == ""
    assert refused(folder, "self_attn.[qkv]_proj", "(up|gate)_proj") == ""
    key, *others = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "kqv")
    assert f"freezes {key} but not {' and '.join(others)}, and Megatron holds" in refused(folder, r"1\..*k_proj")
    assert "mlp.up_proj.weight but not model.layers.0.mlp.gate_proj.weight" in refused(folder, "up_proj")
    assert "'linear_qkv', which matches no parameter" in refused(folder, "linear_qkv")
    assert "leaves no parameter to train" in refused(folder, "model")
    experts = model_folder(tmp_path, "qwen3_moe")  # its first layer alone has some, all of them in two tensors
    assert refused(experts, "experts.gate_up_proj", "mlp.gate.weight") == ""
    assert "mlp.experts.gate_up_proj" in refused(experts, r"experts\.0")


def test_megatron_freezes_all_experts_that_the_library_has_in_one_tensor(tmp_path: Path) -> None:
    config = check_model_folder(model_folder(tmp_path, "qwen3_moe"))
    training = TrainingConfig(engine="megatron", freeze_params_name_list=("experts.down_proj",))
    names = {f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(4)}
    assert frozen_tensors(family_of(config), config, training) == names


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"only_train_params_name_list": ["a"], "freeze_params_name_list": ["b"]}, "exclude each other"),
        ({"freeze_params_name_list": ["("]}, "is not a regular expression"),
        ({"freeze_params_name_list": [""]}, "is in every name"),
        ({"freeze_params_name_list": ["a"], "lora": {"r": 8}}, "trains only adapters"),
    ],
)
def test_lists_that_say_nothing_clear_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TrainingConfig.model_validate(options)
