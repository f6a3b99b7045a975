import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from cairn.configs.catalogue import published_config, published_names
from cairn.engines.models.configs import context_length
from cairn.engines.models.folders import (
    check_model_folder,
    end_tokens,
    eos_token_ids,
    load_causal_lm,
    parameter_names,
    read_config,
    save_config,
)
from cairn.engines.models.tokenizers import read_tokenizer
from cairn.engines.types.errors import BadModel
from cairn.flows.plan.subject import planned_model
from examples.quickstart.model import build_tokenizer
from tests.architectures import architecture
from tests.tables import cases


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=96,
        eos_token_id=3,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[5, 7])
    model.save_pretrained(tmp_path)
    return tmp_path


def set_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_a_loaded_model_has_the_weights_of_the_folder_in_the_asked_dtype(folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    model = load_causal_lm(folder, torch.bfloat16)
    assert not model.training
    for name, weight in saved.items():
        assert torch.equal(model.state_dict()[name], weight.to(torch.bfloat16))


def test_end_tokens_are_those_of_the_config_and_of_the_generation_config(folder: Path) -> None:
    assert eos_token_ids(load_causal_lm(folder, torch.float32)) == end_tokens(folder) == {3, 5, 7}


def test_the_context_length_is_the_configs_and_a_config_without_one_is_refused(folder: Path) -> None:
    assert context_length(check_model_folder(folder)) == 96
    with pytest.raises(BadModel, match="max_position_embeddings"):
        context_length(BertConfig(max_position_embeddings=0))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="nowhere does not exist"):
        check_model_folder(tmp_path / "nowhere")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"has no config\.json"):
        check_model_folder(tmp_path)


@cases("text", ["{", "{}", "[]", '{"model_type": "no-such-model"}', '{"model_type": "qwen3", "hidden_size": "x"}'])
def test_a_broken_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(BadModel, match=r"config\.json cannot be read"):
        check_model_folder(folder)


@cases(
    ("options", "entry"),
    [
        ({"text_config": {}}, "text_config"),
        ({"text_config": {"model_type": "qwen3", "num_hidden_layers": 1}}, "text_config"),
        ({"text_config": 5}, "text_config"),
        ({"get_text_config": 5}, "config.json"),
        ({"model_type": "kimi_k25"}, "text_config"),
        ({"model_type": "kimi_k25", "text_config": "qwen3"}, "config.json"),
        ({"model_type": "kimi_k25", "text_config": {"model_type": "qwen3", "to_dict": 5}}, "to_dict"),
        ({"model_type": "kimi_k25", "text_config": {"model_type": "qwen3", "text_config": {}}}, "text_config"),
        ({"model_type": ["kimi_k25"]}, "config.json"),
    ],
)
def test_entries_that_hide_the_language_models_config_are_refused(
    options: dict[str, Any], entry: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copied = shutil.copytree(folder, tmp_path_factory.mktemp("copied"), dirs_exist_ok=True)
    set_config(copied, **options)
    for read in (check_model_folder, parameter_names):
        with pytest.raises(BadModel, match=re.escape(entry)):
            read(copied)


def test_a_model_that_is_no_causal_language_model_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(BadModel, match=r"clip .* is not a causal language model"):
        check_model_folder(folder)


def test_a_type_that_has_anothers_architecture_is_read_as_that_and_runs_no_code(tmp_path: Path) -> None:
    folder = architecture("qwen2").save(tmp_path)
    expected = load_causal_lm(folder, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    ahead = {"model.mtp_layers.0.input_proj.weight": torch.ones(64, 128)}
    save_file({**tensors, **ahead}, folder / "model.safetensors", metadata={"format": "pt"})
    set_config(
        folder,
        model_type="mimo",
        architectures=["MiMoForCausalLM"],
        auto_map={"AutoConfig": "configuration_mimo.MiMoConfig"},
        num_nextn_predict_layers=1,
    )
    model = load_causal_lm(folder, torch.float32)
    assert model.config.model_type == "qwen2"
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert all(value.equal(expected.state_dict()[name]) for name, value in model.state_dict().items())


@cases(
    ("options", "place"),
    [
        ({"attn_implementation": "somebody/kernel"}, "attn_implementation"),
        ({"_attn_implementation": "flash_attention_2"}, "_attn_implementation"),
        ({"attn_implementation": {"": "sdpa", "text_config": "somebody/kernel"}}, "attn_implementation"),
        ({"experts_implementation": "sonicmoe"}, "experts_implementation"),
        ({"vision_config": {"attn_implementation": "paged|somebody/kernel"}}, "vision_config.attn_implementation"),
        ({"vision_config": {"a": [{"_experts_implementation_internal": "x"}]}}, "_experts_implementation_internal"),
        ({"model_type": "unheard_of", "auto_map": {"AutoConfig": "c.C"}}, "auto_map"),
        (
            {"vision_config": {"model_type": "unheard_of", "auto_map": {"AutoModel": "a/b--c.C"}}},
            "vision_config.auto_map",
        ),
        ({"audio_config": {"quantization_config": {"quant_method": "x"}}}, "audio_config.quantization_config"),
        ({"backbone_config": {"use_timm_backbone": True}}, "backbone_config.use_timm_backbone"),
    ],
)
def test_a_folder_that_names_code_or_kernels_is_refused(
    options: dict[str, Any], place: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copied = shutil.copytree(folder, tmp_path_factory.mktemp("copied"), dirs_exist_ok=True)
    set_config(copied, **options)
    for read in (check_model_folder, planned_model, lambda path: load_causal_lm(path, torch.float32)):
        with pytest.raises(BadModel, match=re.escape(place)) as refused:
            read(str(copied))
        assert "remove it, no code that a model names is fetched or run" in str(refused.value)


def test_a_folder_with_an_adapter_of_another_model_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/model", "peft_type": "LORA"}')
    with pytest.raises(BadModel, match="holds an adapter"):
        load_causal_lm(folder, torch.float32)


def test_missing_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadModel, match="save its weights as safetensors"):
        check_model_folder(folder)


def test_a_torn_weight_file_is_named(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadModel, match=r"model\.safetensors is broken"):
        check_model_folder(folder)


def test_an_index_that_names_a_missing_shard_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModel, match="lacks its weight file model-00002-of-00002"):
        check_model_folder(folder)


def test_a_weight_that_the_file_lacks_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadModel, match=r"lacks the weights model\.norm\.weight"):
        load_causal_lm(folder, torch.float32)


def test_a_weight_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    set_config(folder, vocab_size=65)
    with pytest.raises(BadModel, match=r"embed_tokens\.weight .* \(64, 32\) .* \(65, 32\)"):
        load_causal_lm(folder, torch.float32)


def test_the_part_of_a_head_that_is_rotated_is_read_where_minimax_publishes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_config("MiniMax-M2.5")))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(tmp_path), dtype=torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.shape == (64 // 2,)  # of a head of 128


@cases("name", published_names())
def test_a_written_config_says_of_the_architecture_all_that_the_published_one_does(name: str, tmp_path: Path) -> None:
    published = published_config(name)
    assert published is not None
    folder, written = tmp_path / name, tmp_path / name / "written"
    written.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published))
    config = read_config(folder).get_text_config()
    save_config(config, folder, written)
    said_anew = {"architectures", "auto_map", "quantization_config", "rope_scaling", "rope_theta", "torch_dtype"}
    published = published.get("text_config", published)
    assert set(published) - said_anew <= set(json.loads((written / "config.json").read_text()))
    read, of_program = read_config(written).to_dict(), {"_name_or_path", "transformers_version"}
    assert {key: value for key, value in config.to_dict().items() if key not in of_program and read[key] != value} == {}


def test_a_type_without_a_class_of_the_librarys_keeps_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_config("Kimi-K2-Instruct")))
    written = build_tokenizer(["a b"])
    written.save_pretrained(tmp_path)
    assert read_tokenizer(tmp_path).get_vocab() == written.get_vocab()
