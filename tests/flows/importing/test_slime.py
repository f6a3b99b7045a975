"""Launch scripts in slime's forms, written for these tests, as recipes; and every script of a checkout of slime."""

import os
from pathlib import Path

import pytest
import yaml

from cairn.configs.loader import load
from cairn.flows.driver.portable import portable_problems
from cairn.flows.importing.draft import Draft
from cairn.flows.importing.opening import recipe_of
from tests.commands import cairn
from tests.flows.importing.slime_scripts import results, scripts

MODEL = """\
LAYERS="${MODEL_ARGS_NUM_LAYERS:-36}"
freq=()
for ((i=0; i<LAYERS; i++)); do if (( i < 1 )); then freq+=(0); else freq+=(1); fi; done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${freq[*]}")"
MODEL_ARGS=(
   --swiglu
   --num-layers $LAYERS
   --moe-layer-freq "$FREQ"
   --rotary-base "${ROTARY:-1000000}"
)
"""

SCRIPT = """\
#!/bin/bash
pkill -9 sglang
set -ex
COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]' | wc -l)
if [ "$COUNT" -gt 0 ]; then LINKS=1; else LINKS=0; fi
if [ -z "${BASE}" ]; then
  echo "BASE is not set"
  exit 1
fi
GPUS=${GPUS:-8}
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
ROOT="${ROOT:-$(cd "${SCRIPT_DIR}/.." && pwd)}"
source "${SCRIPT_DIR}/models/own.sh"
CKPT_ARGS=(
   --hf-checkpoint $BASE/Qwen3-4B
   --ref-load $BASE/Qwen3-4B_torch_dist
   --save $BASE/out  # where it goes
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data $BASE/math.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1
   --global-batch-size 128
   --balance-data
)
EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime $BASE/aime.jsonl gsm8k $BASE/gsm8k.jsonl
   --n-samples-per-eval-prompt 16
   --eval-top-p 0.7
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
   --opsm-delta 1e-3
)
MISC_ARGS=(
   --lr 1e-6
   --adam-beta2 0.95
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
   --recompute-activations
   --attention-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-backend flash
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --custom-rm-path rewards.grade
   --use-wandb
   --wandb-key ${KEY:-a-secret}
   --no-such-flag 3
)
ray start --head --num-gpus ${GPUS}
RUNTIME="{\\"env_vars\\": {\\"PYTHONPATH\\": \\"/root/Megatron-LM/:${SCRIPT_DIR}\\", \\"X\\": \\"${LINKS}\\"}}"
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${RUNTIME}" \\
   -- python3 train.py \\
   --actor-num-nodes 1 \\
   --actor-num-gpus-per-node ${GPUS} \\
   --colocate \\
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${EVAL_ARGS[@]} ${GRPO_ARGS[@]} ${MISC_ARGS[@]}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "scripts/models").mkdir(parents=True)
    (tmp_path / "scripts/models/own.sh").write_text(MODEL)
    (tmp_path / "scripts/run.sh").write_text(SCRIPT)
    (tmp_path / "scripts/rewards.py").write_text("def grade(response, label, metadata):\n    return 1.0\n")
    return tmp_path


def imported(checkout: Path, before: str = "", after: str = "", **environment: str) -> Draft:
    """Return the recipe of the script with one text in place of another."""
    script = checkout / "scripts/run.sh"
    assert before in SCRIPT
    script.write_text(SCRIPT.replace(before, after) if before else SCRIPT)
    return recipe_of(script, {"BASE": "/data", **environment})


def test_a_script_becomes_a_recipe_that_is_valid(checkout: Path) -> None:
    draft = imported(checkout)
    assert draft.problems == []
    recipe = checkout / "recipe.yaml"
    recipe.write_text(draft.text("A test."))
    config = load(recipe)
    assert portable_problems(config) == []
    assert config.model.path == "/data/Qwen3-4B"
    assert (config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt) == (32, 8)
    assert (config.global_batch_size, config.training.num_steps_per_rollout) == (128, 2)
    assert (config.training.world_size, config.training.num_gpus_per_rank) == (8, 1)
    assert (config.rollout.num_engines, config.rollout.num_gpus_per_engine, config.fleet.colocate) == (4, 2, True)
    assert config.rollout.sglang == {"mem_fraction_static": 0.7}
    assert config.training.megatron == {
        "use_distributed_optimizer": True,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "attention_backend": "flash",
        "recompute_granularity": "selective",
    }
    assert (config.training.lr, config.training.adam_beta2, config.training.max_tokens_per_gpu) == (1e-6, 0.95, 9216)
    assert [(one.name, one.path, one.top_p) for one in config.eval.benchmarks] == [
        ("aime", "/data/aime.jsonl", 0.7),
        ("gsm8k", "/data/gsm8k.jsonl", 0.7),
    ]
    assert {one.max_response_len for one in config.eval.benchmarks} == {8192}
    assert (config.algorithm.eps_clip_high, config.algorithm.use_kl_loss) == (0.28, True)
    assert config.reward.custom_rm_path == f"{checkout}/scripts/rewards.py:grade"


def test_every_flag_is_an_option_or_has_a_comment_that_says_why_not(checkout: Path) -> None:
    draft = imported(checkout)
    left_out = draft.left_out
    assert left_out["--balance-data"].startswith("always on")
    assert left_out["--num-layers 36"] == left_out["--swiglu"] == "the model's config.json determines it"
    assert "no effect while algorithm.use_opsm is false" in left_out["--opsm-delta 1e-3"]
    assert left_out["--no-such-flag 3"] == "neither slime's nor Megatron's flag is known here"
    assert "cairn convert" in left_out["--ref-load /data/Qwen3-4B_torch_dist"]
    text = draft.text("A test.")
    assert all(f"{flag}" in text for flag in left_out)
    assert "a-secret" not in text
    assert "--wandb-key" in left_out


def test_variables_have_the_values_that_env_gives_or_their_defaults(checkout: Path) -> None:
    draft = imported(checkout, GPUS="4", BASE="/other")
    assert draft.values["training.world_size"] == 4
    assert draft.values["model.path"] == "/other/Qwen3-4B"


def test_a_script_that_serves_a_model_in_fp8_trains_the_one_in_bfloat16(checkout: Path) -> None:
    draft = imported(checkout, "$BASE/Qwen3-4B\n", "$BASE/Qwen3-4B-FP8/\n")
    assert draft.values["model.path"] == "/data/Qwen3-4B"
    assert draft.values["rollout.model_path"] == "/data/Qwen3-4B-FP8"
    assert draft.problems == []
    draft = imported(checkout, "$BASE/Qwen3-4B\n   --ref-load $BASE/Qwen3-4B_torch_dist\n", "$BASE/Qwen3-4B-FP8\n")
    assert draft.values["model.path"] == "/data/Qwen3-4B-FP8"
    assert "rollout.model_path" not in draft.values


def test_the_own_engine_of_slime_and_its_loops_are_those_of_the_recipe(checkout: Path) -> None:
    fsdp = "--train-backend fsdp --context-parallel-size 2 --fsdp-cpu-offload"
    draft = imported(checkout, "train.py \\", f"train_async.py {fsdp} --rollout-num-gpus 4 \\")
    assert draft.values["training.engine"] == "torch"
    assert draft.values["training.context_parallel_size"] == 2
    assert draft.values["training.sequence_packing"] is draft.values["training.fsdp_cpu_offload"] is True
    assert draft.values["training.gradient_checkpointing"] is True
    assert not any(name.startswith("training.megatron") for name in draft.values)
    assert draft.values["rollout.pipeline"] == "lagged"
    assert draft.values["algorithm.use_tis"] is True
    sft = "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss"
    draft = imported(checkout, "--global-batch-size 128", f"--global-batch-size 16 {sft}")
    assert draft.problems == []
    assert draft.values["algorithm.loss_type"] == "sft_loss"
    assert "rollout.rollout_max_response_len" not in draft.values


def test_a_line_that_lacks_its_backslash_and_a_file_that_is_elsewhere_are_said(checkout: Path) -> None:
    draft = imported(checkout, "   --colocate \\\n", "   --colocate\n")
    assert draft.values["model.path"] == "/data/Qwen3-4B"
    assert any("does not end with a backslash" in note for note in draft.notes)
    draft = imported(checkout, '"${SCRIPT_DIR}/models/own.sh"', "/root/slime/scripts/models/own.sh")
    assert "--swiglu" in draft.left_out
    assert any(f"{checkout}/scripts/models/own.sh is read in its place" in note for note in draft.notes)


def test_the_command_prints_a_recipe_or_writes_one_and_names_what_a_script_wants(checkout: Path) -> None:
    script = checkout / "scripts/run.sh"
    result = cairn("import", script)
    assert result.exit_code == 2
    assert "it ends with exit code 1: BASE is not set; set what it reads: --env BASE=…" in result.stderr
    result = cairn("import", script, "--env", "BASE=/data")
    assert result.exit_code == 0, result.stderr
    assert yaml.safe_load(result.stdout)["reward"]["rm_type"] == "deepscaler"
    output = checkout / "out.yaml"
    for code in (0, 2):  # an existing file is not replaced
        assert cairn("import", script, "--env", "BASE=/data", "-o", output).exit_code == code
    result = cairn("validate", output, "--no-files")
    assert result.exit_code == 0, result.stderr
    assert cairn("plan", output).exit_code == 0


@pytest.mark.proof
def test_every_script_of_a_checkout_of_slime_is_imported(tmp_path: Path) -> None:
    place = os.environ.get("CAIRN_SLIME")
    if place is None:
        pytest.skip("CAIRN_SLIME names no checkout of slime: make slime-scripts SLIME=DIR")
    found = list(results(Path(place), tmp_path))
    assert len(found) == len(scripts(Path(place)))
    assert {one.script: one.imported for one in found if one.imported != "ok"}.keys() <= {
        "scripts/run-glm4.7-30B-A3B.sh"  # its layout needs 16 ranks and has 8
    }


@pytest.mark.parametrize(
    "evaluation",
    ["3", "[1]", "{datasets: 3}", "{datasets: [3]}", "{datasets: [{name: a, path: b, rm_type: [3]}]}"]
    + [f"{{defaults: {defaults}, datasets: [{{name: a, path: b, 3: 4}}]}}" for defaults in ("3", "null", "[a]")],
)
def test_files_that_a_script_names_may_be_of_any_form(checkout: Path, evaluation: str) -> None:
    (checkout / "eval.yaml").write_text(f"eval: {evaluation}")
    (checkout / "mis.yaml").write_text("[1]")
    more = "--use-tis --custom-tis-function-path x.mis.compute_mis_weights_with_cp --custom-config-path mis.yaml"
    code = f"--custom-rm-path {'a' * 5000}.b"
    draft = imported(checkout, "--balance-data", f"--balance-data --eval-config eval.yaml {more} {code}")
    assert draft.values["algorithm.custom_tis_function_path"] == "mis"
