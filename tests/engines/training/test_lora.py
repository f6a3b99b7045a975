"""Adapters in place of all weights: the updates are peft's, the engine's promises stay what they are."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.training import LoraConfig
from cairn.engines.models.folders import load_causal_lm
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.training.sharding import whole
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.training.torch.lora import lora_problems
from cairn.engines.types.errors import EngineError
from cairn.engines.weights.fingerprint import weights_checksum
from cairn.storage.opening import open_store
from cairn.storage.store.canonical import unseal
from cairn.storage.store.store import Store
from tests.engines.rollout.models import rollout_config
from tests.engines.training.builders import make_batch, make_engine, model_folder, weights_of
from tests.engines.training.ranks import run_ranks

pytestmark = pytest.mark.timeout(900)  # the first test waits for the launches

EPS = 1e-5  # of Adam, large enough for a gradient near zero not to turn its rounding into a step of full size
LORA = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]}
REFERENCE = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.05, kl_loss_type="k3")
BATCH = make_batch(14, old=True, ref=True)


def engine_with(folder: Path, **options: Any) -> TorchEngine:
    return make_engine(folder, **{"lora": LORA, "algorithm": REFERENCE, "lr": 1e-2, "adam_eps": EPS, **options})


def updates(engine: TorchEngine, count: int, first: int = 0) -> list[dict[str, float]]:
    return [
        engine.train(BATCH, num_steps=1, expected_version=version, input_digest=str(version)).metrics
        for version in range(first, first + count)
    ]


def names_in(store: Store, folder: str) -> set[str]:
    """Names of the whole tensors in a checkpoint of one rank."""
    return {name for name, *_ in unseal(store.read(f"{folder}/00000.index.json"))["tensors"]}


def adapters_of(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: whole(tensor.detach()).clone() for name, tensor in engine._state()["parameters"]}


def peft_updates(
    folder: Path, adapters: dict[str, torch.Tensor], count: int
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], dict[str, torch.Tensor]]:
    """The same updates in a plain loop over peft's own model: final adapters, metrics, and merged weights."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA)  # type: ignore[arg-type]
    model = peft.get_peft_model(load_causal_lm(folder, torch.float32), config)
    trained = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == adapters.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(adapters[name])
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.98), eps=EPS, weight_decay=0.0)
    history = []
    assert BATCH.advantages is not None
    assert BATCH.old_log_probs is not None
    assert BATCH.ref_log_probs is not None
    for _ in range(count):
        optimizer.zero_grad()
        total = torch.tensor(0.0)
        for i, ids in enumerate(BATCH.input_ids):
            length, mask = BATCH.response_lengths[i], torch.from_numpy(BATCH.loss_mask[i]).float()
            tokens = torch.from_numpy(ids.astype(np.int64))
            table = torch.log_softmax(model(input_ids=tokens[None]).logits[0, -length - 1 : -1], -1)
            log_probs = table[torch.arange(length), tokens[-length:]]
            advantage, old, ref = (
                torch.from_numpy(field[i]) for field in (BATCH.advantages, BATCH.old_log_probs, BATCH.ref_log_probs)
            )
            ratio = (log_probs - old).exp()
            loss = torch.max(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
            loss = loss + 0.05 * (torch.exp(ref - log_probs) - 1 - (ref - log_probs))
            total = total + (loss * mask).sum() / mask.sum() / len(BATCH)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        history.append({"loss": total.item(), "grad_norm": norm.item()})
    final = {name: parameter.detach().clone() for name, parameter in trained.items()}
    merged = {name: parameter.detach() for name, parameter in model.merge_and_unload().named_parameters()}
    return final, history, merged


def test_five_updates_equal_those_of_peft_in_a_plain_loop(folder: Path, store: Store) -> None:
    engine = engine_with(folder, max_tokens_per_gpu=150)
    expected, history, merged = peft_updates(folder, adapters_of(engine), 5)
    for found, metrics in zip(updates(engine, 5), history, strict=True):
        assert {name: found[name] for name in metrics} == pytest.approx(metrics, rel=1e-4)
    found_adapters = adapters_of(engine)
    for name, adapter in expected.items():
        assert torch.allclose(found_adapters[name], adapter, atol=1e-5), name
    exported = weights_of(engine)
    assert exported.keys() == merged.keys()
    for name, weight in merged.items():
        assert torch.allclose(exported[name], weight, atol=1e-5), name


def test_adapters_begin_without_effect_and_the_same_every_time(folder: Path, store: Store) -> None:
    engine = engine_with(folder)
    assert engine.weights_checksum() == make_engine(folder).weights_checksum()
    assert engine.state_digest() == engine_with(folder).state_digest()
    first = adapters_of(engine)
    assert all(bool(adapter.any()) == ("lora_A" in name) for name, adapter in first.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_weights_are_the_base_plus_scale_times_b_times_a(folder: Path, store: Store, dtype: str) -> None:
    engine = engine_with(folder, dtype=dtype)
    updates(engine, 2)
    adapters, base = adapters_of(engine), load_causal_lm(folder, getattr(torch, dtype))
    assert {adapter.dtype for adapter in adapters.values()} == {torch.float32}
    exported = weights_of(engine)
    changed = set()
    for name, weight in base.named_parameters():
        layer = name.removesuffix(".weight")
        expected = weight.detach().float()
        if f"{layer}.lora_A.default.weight" in adapters:
            a, b = (adapters[f"{layer}.lora_{factor}.default.weight"] for factor in "AB")
            expected = expected + 3.0 * (b @ a)
            changed.add(layer.rpartition(".")[2])
        assert exported[name].equal(expected.to(exported[name].dtype)), name
    assert changed == set(LORA["target_modules"])  # type: ignore[call-overload]
    assert weights_checksum(exported.items()) == engine.weights_checksum()


def test_a_checkpoint_holds_the_adapters_alone_and_goes_on_bitwise(folder: Path, store: Store) -> None:
    straight, saved, loaded = (engine_with(folder) for _ in range(3))
    updates(straight, 4)
    updates(saved, 2)
    saved.save(store, "saved")
    names = names_in(store, "saved")
    assert {name.partition(".")[0] for name in names} == {"parameters", "exp_avg", "exp_avg_sq"}
    assert all("lora_A" in name or "lora_B" in name for name in names)
    assert len(names) == 3 * 2 * 2 * 3  # kinds, factors, layers, targets
    loaded.load(store, "saved")
    assert updates(loaded, 2, first=2) == updates(saved, 2, first=2)
    assert loaded.state_digest() == straight.state_digest()
    assert loaded.weights_checksum() == straight.weights_checksum()


def test_the_exported_folder_has_the_log_probs_of_the_trainer_and_peft_can_add_its_adapters(
    folder: Path, tmp_path: Path
) -> None:
    engine = engine_with(folder)
    updates(engine, 3)
    engine.export_hf(tmp_path / "out")
    merged = make_engine(tmp_path / "out")
    assert merged.weights_checksum() == engine.weights_checksum()
    pairs = zip(engine.score(BATCH, "actor"), merged.score(BATCH, "actor"), strict=True)
    assert max(np.abs(one - other).max() for one, other in pairs) < 1e-5
    adapted = peft.PeftModel.from_pretrained(load_causal_lm(folder, torch.float32), tmp_path / "out" / "adapter")
    assert weights_checksum(adapted.merge_and_unload().named_parameters()) == engine.weights_checksum()


def test_a_rollout_engine_takes_the_merged_weights_in_buckets(folder: Path) -> None:
    engine = engine_with(folder)
    updates(engine, 2)
    receiver = TransformersEngine(str(folder), rollout_config())
    receiver.begin_weight_update(2)
    for bucket in engine.export_weights(50_000):
        receiver.update_weights(bucket)
    receiver.end_weight_update()
    assert receiver.weights_checksum() == engine.weights_checksum() != make_engine(folder).weights_checksum()


def test_the_reference_is_the_model_without_its_adapters(folder: Path) -> None:
    engine, base = engine_with(folder), make_engine(folder)
    expected = base.score(BATCH, "actor")
    first = engine.score(BATCH, "ref")
    updates(engine, 2)
    trained, later = engine.score(BATCH, "actor"), engine.score(BATCH, "ref")
    for values, before, after, own in zip(expected, first, later, trained, strict=True):
        assert (before == values).all()
        assert (after == values).all()
        assert np.abs(own - values).max() > 1e-3
    assert updates(engine, 1, first=2)[0]["grad_norm"] > 0


def test_recomputed_activations_give_the_same_update(folder: Path) -> None:
    stored, recomputed = engine_with(folder), engine_with(folder, gradient_checkpointing=True)
    assert updates(stored, 2) == updates(recomputed, 2)
    assert stored.state_digest() == recomputed.state_digest()


def test_a_critic_beside_adapters_is_trained_whole(folder: Path, store: Store) -> None:
    algorithm = AlgorithmConfig(advantage_estimator="ppo", use_kl_loss=True, kl_loss_coef=0.05, kl_loss_type="k3")
    batch = dataclasses.replace(BATCH, values=BATCH.advantages, returns=BATCH.advantages)
    with_critic, without = engine_with(folder, algorithm=algorithm), engine_with(folder)
    result = with_critic.train(batch, num_steps=1, expected_version=0, input_digest="0")
    assert result.metrics["critic_grad_norm"] > 0
    updates(without, 1)
    assert with_critic.weights_checksum() == without.weights_checksum()
    with_critic.save(store, "both")
    names = {name.partition(".")[2] for name in names_in(store, "both")}
    critics = {name for name in names if name.startswith("critic.")}
    assert all("lora" in name for name in names - critics)
    assert not any("lora" in name for name in critics)
    assert len(critics) > len(names - critics)
    loaded = engine_with(folder, algorithm=algorithm)
    loaded.load(store, "both")
    assert loaded.state_digest() == result.state_digest


def test_an_offload_changes_nothing(folder: Path) -> None:
    plain, offloaded = engine_with(folder), engine_with(folder)
    for version in range(2):
        updates(plain, 1, first=version)
        updates(offloaded, 1, first=version)
        offloaded.offload()
        with pytest.raises(EngineError, match="offloaded"):
            offloaded.score(BATCH, "actor")
        assert all(weight.equal(weights_of(plain)[name]) for name, weight in weights_of(offloaded).items())
        offloaded.onload()
    assert offloaded.state_digest() == plain.state_digest()


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
def test_all_linear_layers_of_other_families_are_adapted_but_the_output(
    tmp_path: Path, store: Store, family: str
) -> None:
    model = model_folder(tmp_path / "model", family)
    engine = engine_with(model, lora={"r": 2, "lora_alpha": 4})
    updates(engine, 1)
    names = adapters_of(engine)
    assert not any("lm_head" in name or "embed" in name for name in names)
    engine.export_hf(tmp_path / "out")
    assert make_engine(tmp_path / "out").weights_checksum() == engine.weights_checksum()


def test_targets_that_the_model_lacks_are_refused_before_weights_are_loaded(folder: Path) -> None:
    (problem,) = lora_problems(LoraConfig(r=2, target_modules=["q_proj", "proj"]), str(folder))
    assert problem == (
        "training.lora.target_modules has proj, which matches no linear layer of the model; it has "
        "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    )
    (problem,) = lora_problems(LoraConfig(r=2, target_modules=["lm_head"]), str(folder))
    assert "has lm_head, whose weight is also the model's input embedding" in problem
    assert lora_problems(LoraConfig(r=2, target_modules=["layers.1.mlp.up_proj"]), str(folder)) == []


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")
def test_a_mixture_of_experts_has_adapters_beside_its_experts(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", "qwen3_moe")
    for targets in ("all-linear", ["gate_proj", "up_proj", "down_proj"]):
        (problem,) = lora_problems(LoraConfig(r=2, target_modules=targets), str(model))
        assert "not a linear layer and cannot be adapted here (nor can experts in one tensor): use linear" in problem
    engine = engine_with(model, lora={"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"]})
    updates(engine, 1)
    engine.export_hf(tmp_path / "out")
    assert make_engine(tmp_path / "out").weights_checksum() == engine.weights_checksum()


def cases(folder: Path, work: Path, rank: int, world_size: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    store = open_store(str(work / "store"))
    for dtype, count in (("float32", 5), ("bfloat16", 1)):
        engine = engine_with(
            folder, dtype=dtype, max_tokens_per_gpu=120, clip_grad=0.1, rank=rank, world_size=world_size
        )
        report[f"{dtype} initial"] = [engine.state_digest(), engine.weights_checksum()]
        report[f"{dtype} ref"] = [values.tolist() for values in engine.score(BATCH, "ref")]
        report[f"{dtype} metrics"] = updates(engine, count)
        report[f"{dtype} checksum"] = engine.weights_checksum()
        weights = weights_of(engine)
        report[f"{dtype} exported"] = weights_checksum(weights.items()) if weights else None
        report[f"{dtype} weights"] = {name: weight.tolist() for name, weight in weights.items()}
        engine.save(store, f"{dtype}-{world_size}")
        report[f"{dtype} digest"] = engine.state_digest()
        engine.export_hf(work / f"hf-{dtype}-{world_size}")
    return report


def launched(rank: int, world_size: int, folder: Path, work: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=world_size)
    (work / f"report-{rank}.json").write_text(json.dumps(cases(folder, work, rank, world_size)))
    dist.destroy_process_group()


@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_train_and_give_out_what_one_does(ranks: tuple[dict[str, Any], ...], dtype: str) -> None:
    one, two, _ = ranks
    assert two[f"{dtype} initial"] == one[f"{dtype} initial"]
    rel, atol = (1e-4, 1e-5) if dtype == "float32" else (2e-2, 5e-2)
    for found, expected in zip(two[f"{dtype} ref"], one[f"{dtype} ref"], strict=True):
        np.testing.assert_allclose(found, expected, atol=atol)
    for expected, found in zip(one[f"{dtype} metrics"], two[f"{dtype} metrics"], strict=True):
        assert expected["grad_norm"] > 0.1  # clipped
        assert {name: found[name] for name in ("loss", "grad_norm")} == pytest.approx(
            {name: expected[name] for name in ("loss", "grad_norm")}, rel=rel
        )
    for name, expected in one["float32 weights"].items():
        np.testing.assert_allclose(two["float32 weights"][name], expected, atol=1e-5, rtol=0, err_msg=name)
    assert two[f"{dtype} exported"] == two[f"{dtype} checksum"]
    assert (
        weights_checksum(load_causal_lm(two["work"] + f"/hf-{dtype}-2", torch.float32).named_parameters())
        == two[f"{dtype} checksum"]
    )


def test_adapters_of_two_ranks_load_on_one(ranks: tuple[dict[str, Any], ...], folder: Path) -> None:
    _, first, second = ranks
    assert {name for name in second if second[name] != first[name]} <= {
        f"{dtype} {what}" for dtype in ("float32", "bfloat16") for what in ("weights", "exported")
    }
    engine = engine_with(folder)
    engine.load(open_store(first["work"] + "/store"), "float32-2")
    assert engine.state_digest() == first["float32 digest"]
    assert engine.weights_checksum() == first["float32 checksum"]


@pytest.fixture(scope="module")
def ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """What one rank reports, and both of two."""
    work = tmp_path_factory.mktemp("work")
    reports = [cases(folder, work, 0, 1)]
    run_ranks(launched, 2, folder, work, world_size=2)
    reports += [json.loads((work / f"report-{rank}.json").read_text()) for rank in range(2)]
    return tuple({**report, "work": str(work)} for report in reports)
