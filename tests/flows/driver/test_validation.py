"""What cannot work is said before anything starts, one sentence a problem."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from cairn.configs.errors import ConfigError
from cairn.configs.loader import parse
from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.sglang.installation import INTERPRETER
from cairn.flows.driver.validation import data_problems, setup_problems
from examples.quickstart.model import build_model, build_tokenizer
from tests.architectures import architecture
from tests.engines.training.builders import model_folder
from tests.mistakes import mistakes
from tests.quantized_models import fp8_folder, into_fp8, mxfp4_folder, set_config
from tests.tables import cases


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(["1 2 3"])
    tokenizer.save_pretrained(folder)
    build_model(tokenizer, seed=0).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1 2 3", "label": "1"}\n')
    return path


def config(model_folder: Path, data_file: Path, **sections: dict[str, Any]) -> RunConfig:
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(model_folder)},
        "data": {"path": str(data_file)},
        "rollout": {"num_rollout": 1, "rollout_batch_size": 2, "rollout_max_response_len": 16},
    }
    return parse({name: values.get(name, {}) | sections.get(name, {}) for name in {*values, *sections}})


def megatron(world_size: int, **options: int) -> dict[str, Any]:
    return {"engine": "megatron", "world_size": world_size, "num_gpus_per_rank": 1, "megatron": options}


def context_of(model: Path) -> int:
    return json.loads((model / "config.json").read_text())["max_position_embeddings"]


def test_a_usable_configuration_has_no_problems(model: Path, data: Path) -> None:
    usable = config(model, data)
    assert setup_problems(usable) == []
    assert data_problems(usable) == []


def test_models_and_samples_that_rows_cannot_hold_together_are_named(model: Path, tmp_path: Path, data: Path) -> None:
    packed = config(model, data, training={"sequence_packing": True})
    assert setup_problems(packed) == []
    images = {"path": str(data), "multimodal_keys": {"image": "picture"}}
    problems = setup_problems(config(model, data, data=images, training={"sequence_packing": True}))
    assert any("sequence_packing packs samples, but multimodal_keys names images" in one for one in problems)
    recurrent = architecture("qwen3_next").save(tmp_path / "recurrent")
    shared = {"world_size": 2, "context_parallel_size": 2}
    problems = setup_problems(config(recurrent, data, training=shared))
    assert any("qwen3_next has layers of kind linear_attention" in one for one in problems)


def test_a_tokenizer_s_end_token_that_stops_no_engine_is_told_before_a_new_run(
    model: Path, tmp_path: Path, data: Path
) -> None:
    """As of a base model whose tokenizer, template and demonstrations end a turn otherwise than its configs say."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    for name in ("config.json", "generation_config.json"):
        file = other / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": tokenizer.pad_token_id}))
    (problem,) = setup_problems(config(other, data))
    end = f"<|im_end|> ({tokenizer.eos_token_id})"
    assert problem.startswith(f"model.path: the tokenizer in {other} ends responses with {end}, but config.json")
    way_out = {"rollout_stop_token_ids": [tokenizer.eos_token_id]}
    assert problem.endswith(f"or set rollout.rollout_stop_token_ids=[{tokenizer.eos_token_id}]")
    assert setup_problems(config(other, data, rollout=way_out)) == []
    assert setup_problems(config(other, data, rollout={"rollout_stop": ["<|im_end|>"]})) == []
    inputs = json.loads((other / "generation_config.json").read_text())
    ends = [tokenizer.pad_token_id, tokenizer.eos_token_id]
    (other / "generation_config.json").write_text(json.dumps(inputs | {"eos_token_id": ends}))
    assert setup_problems(config(other, data)) == []
    (other / "generation_config.json").write_text("{")
    (problem,) = setup_problems(config(other, data))
    assert problem.startswith(f"model.path: {other / 'generation_config.json'} cannot be read: ")


def test_a_missing_model_folder_is_named_by_its_option(tmp_path: Path, data: Path) -> None:
    missing = f"model.path: Model folder {tmp_path / 'none'} does not exist: set the path of one that does."
    assert setup_problems(config(tmp_path / "none", data)) == [missing]
    assert setup_problems(config(tmp_path / "none", data, training=megatron(1))) == [missing]


def test_a_published_model_that_is_not_there_is_told_where_from_to_have_it(tmp_path: Path, data: Path) -> None:
    folder = tmp_path / "GLM-4.5-Air"
    assert setup_problems(config(folder, data)) == [
        f"model.path: Model folder {folder} does not exist: hf download zai-org/GLM-4.5-Air --local-dir {folder}."
    ]


def test_a_missing_reference_model_is_named_by_its_option(model: Path, tmp_path: Path, data: Path) -> None:
    (problem,) = setup_problems(
        config(model, data, model={"ref_path": str(tmp_path / "none")}, algorithm={"use_kl_loss": True})
    )
    assert problem.startswith(f"model.ref_path: Model folder {tmp_path / 'none'} does not exist")


def test_a_teacher_must_read_the_tokens_of_the_student(model: Path, tmp_path: Path, data: Path) -> None:
    def problems(teacher: Path) -> list[str]:
        return setup_problems(config(model, data, model={"teacher_path": str(teacher)}, algorithm={"use_opd": True}))

    assert problems(model) == []
    (problem,) = problems(tmp_path / "none")
    assert problem.startswith(f"model.teacher_path: Model folder {tmp_path / 'none'} does not exist")
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    (problem,) = problems(other)
    assert problem == (
        f"model.teacher_path: the model in {other} has another tokenizer: use a model with the policy's vocabulary"
    )
    many: dict[str, Any] = {"loss_type": "forward_kl_topk", "distillation_topk": 1_000_000}
    (problem,) = setup_problems(config(model, data, model={"teacher_path": str(model)}, algorithm=many))
    assert problem.startswith(f"algorithm.distillation_topk is 1000000, but the model in {model} has")
    few = tmp_path / "few"
    shutil.copytree(model, few)
    settings = json.loads((few / "config.json").read_text())
    known = settings["vocab_size"]
    (few / "config.json").write_text(json.dumps(settings | {"vocab_size": known - 1}))
    (problem,) = problems(few)
    assert f"has {known - 1} token ids, but {known} are sampled" in problem


@cases(
    ("option", "algorithm"),
    [("ref_path", {"use_kl_loss": True}), ("critic_path", {"advantage_estimator": "ppo"})],
)
def test_a_reference_and_a_critic_must_read_the_tokens_of_the_policy(
    option: str, algorithm: dict, model: Path, tmp_path: Path, data: Path
) -> None:
    """The other tokenizer has the same tokens, with the ids of two exchanged."""
    other = tmp_path / option
    shutil.copytree(model, other)
    assert setup_problems(config(model, data, model={option: str(other)}, algorithm=algorithm)) == []
    written = json.loads((other / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (other / "tokenizer.json").write_text(json.dumps(written))
    assert setup_problems(config(model, data, model={option: str(other)}, algorithm=algorithm)) == [
        f"model.{option}: the model in {other} has another tokenizer: use a model with the policy's vocabulary"
    ]


def test_a_missing_critic_is_named_by_its_option(model: Path, tmp_path: Path, data: Path) -> None:
    (problem,) = setup_problems(
        config(model, data, model={"critic_path": str(tmp_path)}, algorithm={"advantage_estimator": "ppo"})
    )
    assert problem.startswith(f"model.critic_path: Model folder {tmp_path} has no config.json")


def test_adapters_of_layers_that_the_model_lacks_are_named(model: Path, data: Path) -> None:
    lora: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "query"]}
    (problem,) = setup_problems(config(model, data, training={"lora": lora}))
    assert problem.startswith("training.lora.target_modules has query, which matches no linear layer")
    assert setup_problems(config(model, data, training={"lora": {"r": 4}})) == []


def test_parameters_that_an_engine_cannot_freeze_are_named(model: Path, data: Path) -> None:
    def problems(engine: str, *patterns: str) -> str:
        return " ".join(
            setup_problems(config(model, data, training={"engine": engine, "freeze_params_name_list": patterns}))
        )

    for engine in ("torch", "megatron"):
        assert problems(engine, "embed_tokens") == ""
        assert "freeze_params_name_list has 'indexer'" in problems(engine, "indexer")
    assert problems("torch", "q_proj") == ""
    assert "Megatron holds them in one tensor" in problems("megatron", "q_proj")


def test_a_model_folder_without_tokenizer_is_an_error(model: Path, tmp_path: Path, data: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*", "special*"))
    assert setup_problems(config(bare, data)) == [
        f"model.path: {bare} has no tokenizer: put the model's own there, next to its weights"
    ]
    (bare / "tokenizer.json").write_text("{")
    (problem,) = setup_problems(config(bare, data))
    assert problem.startswith(f"model.path: {bare} has no tokenizer that can be loaded (")


def test_lengths_are_held_against_the_context(model: Path, data: Path) -> None:
    context = context_of(model)
    holds = f"the context of the model in {model} has {context} tokens"
    rollout = {"rollout_max_prompt_len": context - 15}
    assert setup_problems(config(model, data, rollout=rollout)) == [
        f"rollout.rollout_max_prompt_len + rollout.rollout_max_response_len = {context - 15} + 16 = {context + 1}, "
        f"but {holds}; lower one of them"
    ]
    assert setup_problems(config(model, data, rollout={"rollout_max_prompt_len": context - 16})) == []
    assert setup_problems(config(model, data, rollout={"rollout_max_response_len": context})) == [
        f"rollout.rollout_max_response_len is {context}, which leaves no room for a prompt: {holds}; lower it"
    ]
    benchmark = {"name": "b", "path": str(data), "max_response_len": context + 1}
    assert setup_problems(config(model, data, eval={"benchmarks": [benchmark]})) == [
        f"eval.benchmarks.0.max_response_len is {context + 1}, which leaves no room for a prompt: {holds}; lower it"
    ]


def test_user_code_that_cannot_be_had_is_named(model: Path, data: Path) -> None:
    benchmark = {"name": "b", "path": str(data), "max_response_len": 4, "rm_type": "maths"}
    problems = setup_problems(
        config(
            model,
            data,
            algorithm={"advantage_estimator": "gppo"},
            reward={"custom_rm_path": "no_such_module.grade"},
            rollout={"dynamic_sampling_filter": "check_reward"},
            eval={"benchmarks": [benchmark]},
        )
    )
    assert len(problems) == 4
    assert problems[0].startswith("algorithm.advantage_estimator: there is no advantage estimator 'gppo'")
    lacking = "'no_such_module.grade' cannot be loaded: no module named 'no_such_module'"
    assert problems[1].startswith(f"reward.custom_rm_path: {lacking}")
    assert problems[2].startswith("rollout.dynamic_sampling_filter: there is no filter 'check_reward'")
    assert problems[3].startswith("eval.benchmarks.0: there is no grader 'maths'")


def test_calls_of_tools_that_would_not_be_read_are_refused_before_a_run_begins(model: Path, data: Path) -> None:
    rollout = {"num_rollout": 1, "rollout_batch_size": 2, "rollout_max_response_len": 16, "tools": ["calculator"]}
    rollout["custom_generate_function_path"] = "tool_calls"
    calling = config(model, data, rollout=rollout)
    assert setup_problems(calling) == [
        f"rollout.tool_call_format: the model in {model} cannot call tools, since the chat template renders no tool "
        "calls: set rollout.tool_call_format=tags, or use a model whose template supports tools"
    ]
    assert setup_problems(config(model, data, rollout=rollout | {"tool_call_format": "tags"})) == []


@cases("ids", [(-1,), (0, 10**6)])
def test_an_id_that_is_no_token_ends_no_response_of_a_new_run(model: Path, data: Path, ids: tuple[int, ...]) -> None:
    stopping = config(model, data, rollout={"rollout_stop_token_ids": ids})
    (problem,) = setup_problems(stopping)
    assert problem.startswith(f"rollout.rollout_stop_token_ids has {ids[-1]}, which is not a token of the model")


def test_bad_data_is_named_by_file_and_line(model: Path, data: Path) -> None:
    data.write_text('{"prompt": "1", "label": "1"}\n{"prompt": "1"\n')
    (problem,) = data_problems(config(model, data))
    assert problem.startswith(f"data: {data}, line 2 is not JSON")


def test_training_rows_are_rendered_and_those_that_give_no_prompt_are_told(model: Path, data: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": "none"}}]
    bad = json.dumps({"prompt": [{"role": "assistant", "tool_calls": calls}], "label": "1"}) + "\n"
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{% for name in c.function.arguments | items %}{{ name }}{% endfor %}{% endfor %}{% endfor %}"
    )
    data.write_text('{"prompt": "1 2 3", "label": "1"}\n' + bad)
    notes: list[str] = []
    assert data_problems(config(model, data), notes.append) == []
    (note,) = notes
    assert note.startswith(
        f"data: 1 of 2 rows give no prompt, and a run skips them; the first: {data}, row 2: the chat"
    )
    data.write_text(bad)
    (problem,) = data_problems(config(model, data))
    assert problem.startswith(f"data: none of 1 rows gives a prompt; the first: {data}, row 1: the chat template")
    data.write_text('{"prompt": "1 2 3", "label": "1"}\n')
    (problem,) = data_problems(config(model, data, rollout={"rollout_max_prompt_len": 1}))
    assert "none of 1 rows gives a prompt" in problem
    assert "where 1 are allowed: raise rollout_max_prompt_len" in problem


def test_every_data_file_is_looked_at(model: Path, data: Path, tmp_path: Path) -> None:
    benchmark = {"name": "b", "path": str(tmp_path / "none.jsonl"), "max_response_len": 4}
    problems = data_problems(config(model, data, data={"label_key": "answer"}, eval={"benchmarks": [benchmark]}))
    assert [problem.split(":")[0] for problem in problems] == ["data", "eval.benchmarks.0"]


def test_data_elsewhere_is_left_for_the_run_to_open(model: Path, data: Path) -> None:
    assert data_problems(config(model, data, data={"path": "s3://no-such-bucket/train.jsonl"})) == []


IMPOSSIBLE: list[tuple[dict[str, dict[str, Any]], str]] = [
    (
        {"fleet": {"update_weight_transport": "distributed"}},
        "fleet.update_weight_transport is distributed, which rollout.engine=transformers cannot receive",
    ),
    (
        {
            "rollout": {"engine": "sglang", "pipeline": "lagged", "external_urls": ["http://a:1"]},
            "algorithm": {"use_tis": True},
            "fleet": {"check_weight_update_equal": True, "update_weight_transport": "distributed"},
        },
        "fleet.check_weight_update_equal compares log-probs with the trainer's, which already has",
    ),
    (
        {
            "rollout": {"engine": "sglang", "external_urls": ["http://a:1"]},
            "fleet": {
                "check_weight_update_equal": True,
                "update_weight_transport": "distributed",
                "offload_train": True,
            },
        },
        "fleet.check_weight_update_equal compares log-probs with the trainer's, whose memory offload_train",
    ),
    (
        {
            "rollout": {"engine": "sglang", "num_gpus_per_engine": 2},
            "training": {"world_size": 2, "num_gpus_per_rank": 1},
            "fleet": {
                "colocate": True,
                "offload_rollout": True,
                "update_weight_transport": "disk",
                "update_weight_disk_dir": "weights",
            },
        },
        "fleet.update_weight_transport is disk, but a server of several GPUs that released its cache",
    ),
    (
        {"rollout": {"engine": "sglang", "external_urls": ["http://a:1"]}},
        "fleet.update_weight_transport is tensor, which needs servers on the machines of their engines",
    ),
    (
        {
            "rollout": {"engine": "sglang", "external_urls": ["http://a:1"]},
            "fleet": {"colocate": True, "update_weight_transport": "distributed"},
        },
        "rollout.external_urls are servers whose memory Cairn does not control",
    ),
    (
        {
            "rollout": {"num_engines": 2, "num_gpus_per_engine": 2, "rollout_batch_size": 2},
            "training": {"world_size": 2, "num_gpus_per_rank": 1},
            "fleet": {"colocate": True},
        },
        "2 × 2 are more than training.world_size = 2",
    ),
    (
        {
            "rollout": {"engine": "sglang", "num_gpus_per_engine": 1},
            "training": {"num_gpus_per_rank": 1},
            "fleet": {"colocate": True, "update_weight_transport": "distributed"},
        },
        "under fleet.colocate trainer and servers are on the same GPUs",
    ),
    (
        {"rollout": {"engine": "sglang", "num_gpus_per_engine": 16}, "training": {"num_gpus_per_rank": 1}},
        "is tensor, which puts weights into the memory of an engine's first machine",
    ),
    (
        {
            "rollout": {"engine": "sglang", "num_gpus_per_engine": 0.5},
            "training": {"num_gpus_per_rank": 0.5},
            "fleet": {"update_weight_transport": "distributed"},
        },
        "training ranks or engines with less than a GPU may share one",
    ),
    (
        {
            "rollout": {"engine": "sglang", "num_gpus_per_engine": 1},
            "fleet": {"update_weight_transport": "distributed"},
        },
        "not all on GPUs or all on CPUs",
    ),
    (
        {
            "rollout": {"num_gpus_per_engine": 0.5},
            "training": {"num_gpus_per_rank": 1},
            "fleet": {"colocate": True},
        },
        "rollout.num_gpus_per_engine is 0.5: make it a whole number",
    ),
    ({"rollout": {"num_gpus_per_engine": 2}}, "an engine of rollout.engine=transformers computes on one GPU"),
    ({"training": {"num_gpus_per_rank": 2}}, "a rank computes on one GPU: set it to 1"),
    (
        {"training": {"num_gpus_per_rank": 0.5, "world_size": 2}},
        "two of the 2 ranks would have one GPU, which NCCL refuses",
    ),
    (
        {"training": megatron(8, tensor_model_parallel_size=8), "rollout": {"num_gpus_per_node": 4}},
        "training.megatron.tensor_model_parallel_size (8) is above a machine's rollout.num_gpus_per_node (4)",
    ),
    (
        {"training": megatron(12, expert_model_parallel_size=12)},
        "training.megatron.expert_model_parallel_size takes 12 ranks, not a multiple of a machine's",
    ),
    (
        {
            "training": megatron(24, tensor_model_parallel_size=4),
            "rollout": {"engine": "sglang", "num_engines": 4, "num_gpus_per_engine": 6},
            "fleet": {"colocate": True},
        },
        "12 training ranks must be on one machine",
    ),
    (
        {
            "rollout": {"engine": "sglang", "sglang": {"speculative_algorithm": "EAGLE"}},
            "fleet": {"offload_rollout": True},
        },
        "no update restores the layers that draft tokens",
    ),
    (
        {"training": {"engine": "megatron", "megatron": {"nccl_ub": True}}, "fleet": {"colocate": True}},
        "training.megatron.nccl_ub keeps addresses in it",
    ),
]
"""Sections whose engines cannot work together, and part of what is said of them."""


def test_a_way_of_sending_weights_or_sharing_gpus_that_engines_cannot_take_is_named(model: Path, data: Path) -> None:
    base = {"num_rollout": 1, "rollout_batch_size": 24, "rollout_max_response_len": 16}
    unnamed = {}
    for sections, problem in IMPOSSIBLE:
        inputs = sections | {"rollout": base | sections.get("rollout", {})}
        found = setup_problems(config(model, data, **inputs))
        if not any(problem in sentence for sentence in found):
            unnamed[problem] = found
    assert unnamed == {}


def test_servers_that_run_elsewhere_need_no_sglang_here_and_take_no_options(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERPRETER, "/nowhere/python")
    base = {"num_rollout": 1, "rollout_batch_size": 2, "rollout_max_response_len": 16, "engine": "sglang"}
    elsewhere = base | {"external_urls": ["http://a:1"]}
    sections = {"fleet": {"update_weight_transport": "distributed"}}
    assert setup_problems(config(model, data, rollout=elsewhere, **sections)) == []
    assert any("SGLang is not installed" in found for found in setup_problems(config(model, data, rollout=base)))
    own = elsewhere | {"sglang": {"tp_size": 2}}
    assert config(model, data, rollout=own, **sections).rollout.sglang == {}
    assert "rollout.sglang has no effect while rollout.external_urls names servers" in mistakes(rollout=own, **sections)


def test_what_servers_of_quantised_weights_cannot_do_is_named(data: Path, tmp_path: Path) -> None:
    rollout = {"engine": "sglang", "num_rollout": 1, "rollout_batch_size": 2, "rollout_max_response_len": 16}
    fp8_folder("qwen3", tmp_path / "fp8")
    fleet = {"update_weight_transport": "disk", "update_weight_disk_dir": "weights", "check_weight_update_equal": True}
    problems = "\n".join(setup_problems(config(tmp_path / "fp8", data, rollout=rollout, fleet=fleet)))
    for sentence in (
        "for which SGLang has no kernels without a GPU",
        "set rollout.dtype to bfloat16",
        "in FP8 would read unquantised weights",
        "check_weight_update_equal allows log-probs to differ",
    ):
        assert sentence in problems
    served = rollout | {"dtype": "bfloat16", "num_gpus_per_engine": 1}
    problems = "\n".join(setup_problems(config(tmp_path / "fp8", data, rollout=served)))
    assert "FP8" not in problems
    problems = "\n".join(setup_problems(config(tmp_path / "fp8", data, rollout=rollout | {"engine": "transformers"})))
    assert "FP8" not in problems
    mxfp4_folder(tmp_path / "mxfp4")
    problems = "\n".join(setup_problems(config(tmp_path / "mxfp4", data, rollout=served)))
    assert "in four bits, in which no weights are sent" in problems
    online = served | {"sglang": {"quantization": "fp8"}}
    problems = "\n".join(setup_problems(config(architecture("qwen3").save(tmp_path / "plain"), data, rollout=online)))
    assert "rollout.sglang.quantization rounds weights only when a server starts" in problems


def test_servers_may_load_the_model_in_fp8_and_no_other_model(model: Path, data: Path, tmp_path: Path) -> None:
    rollout = {"engine": "sglang", "num_rollout": 1, "rollout_batch_size": 2, "rollout_max_response_len": 16}
    rollout |= {"dtype": "bfloat16", "num_gpus_per_engine": 1}

    def copy(name: str) -> Path:
        return shutil.copytree(model, tmp_path / name)

    def problems(served: Path, **options: Any) -> list[str]:
        return setup_problems(config(model, data, rollout=rollout | {"model_path": str(served), **options}))

    into_fp8(fp8 := copy("fp8"))
    assert problems(fp8) == []
    (problem,) = problems(fp8, num_gpus_per_engine=0)
    assert problem.startswith(f"{fp8} is in FP8, for which SGLang has no kernels without a GPU")
    (problem,) = problems(tmp_path / "none")
    assert problem.startswith(f"rollout.model_path: Model folder {tmp_path / 'none'} does not exist")
    set_config(other := copy("config"), rms_norm_eps=0.5, transformers_version="1", use_cache=False)
    (problem,) = problems(other)
    assert problem.startswith(
        f"rollout.model_path: the config.json in {other} has rms_norm_eps=0.5, and that in {model}"
    )
    into_fp8(ends := copy("ends"))
    (ends / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (problem,) = problems(ends)
    assert problem.startswith(
        f"rollout.model_path: responses end at tokens [2, 7] by the configs in {ends}, and at [2]"
    )
    into_fp8(shapes := copy("shapes"), {"model.norm.weight": torch.ones(3)})
    (problem,) = problems(shapes)
    assert problem.startswith(
        f"rollout.model_path: the weight model.norm.weight has shape (3,) in {shapes}, and has shape"
    )
    into_fp8(more := copy("more"), {"model.layers.0.mlp.bias": torch.ones(3)})
    (problem,) = problems(more)
    assert f"has shape (3,) in {more}, and is missing in {model}: use a folder of the model that is trained" in problem
    tokenizer = AutoTokenizer.from_pretrained(words := copy("words"))
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(words)
    (problem,) = problems(words)
    assert problem.startswith(f"rollout.model_path: the model in {words} has another tokenizer")
    notes: list[str] = []
    options = rollout | {"engine": "transformers", "model_path": str(fp8)}
    assert setup_problems(config(model, data, rollout=options), notes.append) == []
    assert "rollout.model_path has no effect while rollout.engine is transformers; leave it out" in notes


def test_layers_that_sglang_would_take_for_others_are_named(data: Path, tmp_path: Path) -> None:
    rollout = {"engine": "sglang", "num_rollout": 1, "rollout_batch_size": 2, "rollout_max_response_len": 16}
    mixed = model_folder(tmp_path / "mixed", "qwen3_moe")
    problems = setup_problems(config(mixed, data, rollout=rollout))
    assert any("treats every layer of a qwen3_moe model as a mixture of experts" in found for found in problems)
    text = (mixed / "config.json").read_text()
    (mixed / "config.json").write_text(text.replace('"mlp_only_layers": [\n    1\n  ]', '"mlp_only_layers": []'))
    assert (mixed / "config.json").read_text() != text
    problems = setup_problems(config(mixed, data, rollout=rollout))
    assert not any("mixture of experts" in found for found in problems)


def test_models_that_servers_without_a_gpu_do_not_serve_are_named(data: Path, tmp_path: Path) -> None:
    rollout = {"engine": "sglang", "num_rollout": 1, "rollout_batch_size": 2, "rollout_max_response_len": 16}
    model = str(architecture("deepseek_v3").save(tmp_path))
    found = setup_problems(config(model, data, rollout=rollout))
    assert any(re.search(r"servers do not serve deepseek_v3 models without a GPU \(.+\)", one) for one in found)
    found = setup_problems(config(model, data, rollout=rollout | {"num_gpus_per_engine": 1}))
    assert not any("without a GPU (" in one for one in found)


def test_the_disk_needs_a_folder(model: Path, data: Path) -> None:
    with pytest.raises(ConfigError, match="the transport disk needs a folder"):
        config(model, data, fleet={"update_weight_transport": "disk"})
    with pytest.raises(ConfigError, match="no other transport reads it"):
        config(model, data, fleet={"update_weight_disk_dir": "/somewhere"})
