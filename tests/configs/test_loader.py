"""The loader accepts what the schema means and answers everything else with one clear sentence a problem."""

from pathlib import Path

import pytest

from cairn.configs.errors import ConfigError
from cairn.configs.loader import load, parse
from tests.configs.conftest import RECIPE
from tests.mistakes import said


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return caught.value.problems


def test_a_recipe_sets_what_it_names_and_leaves_the_rest_at_its_default(recipe: Path) -> None:
    config = load(recipe)
    assert config.rollout.rollout_batch_size == 4
    assert config.training.lr == 1e-4
    assert config.rollout.n_samples_per_prompt == 8
    assert config.data.path == "train.jsonl"


def test_overrides_reach_options_sections_lists_and_free_mappings(recipe: Path) -> None:
    config = load(
        recipe,
        [
            "training.lr=2e-5",
            "eval.benchmarks.0.path=other.jsonl",
            "rollout.rollout_stop_token_ids=[7, 8]",
            "reward.rm_type=exact_match",
            "data.apply_chat_template_kwargs.enable_thinking=false",
            "checkpoint.save_interval=",
            "seed=1",
            "seed=2",
        ],
    )
    assert config.training.lr == 2e-5
    assert config.eval.benchmarks[0].path == "other.jsonl"
    assert config.rollout.rollout_stop_token_ids == (7, 8)
    assert config.reward.rm_type == "exact_match"
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.checkpoint.save_interval is None
    assert config.seed == 2


def test_a_section_header_with_nothing_under_it_means_defaults(recipe: Path) -> None:
    recipe.write_text(RECIPE + "retry:\n")
    assert load(recipe).retry.retries == 3


def test_parse_takes_back_what_a_configuration_dumps(recipe: Path) -> None:
    config = load(recipe)
    assert parse(config.model_dump(mode="json")) == config


def test_ranks_that_share_sequences_have_one_name_for_both_engines(recipe: Path) -> None:
    ranks = ["training.world_size=2", "training.context_parallel_size=2"]
    shared = load(recipe, ranks).training
    assert (shared.ranks_of_sequence, shared.data_parallel_size, shared.packs_rows) == (2, 1, True)
    megatron = load(recipe, ["training.engine=megatron", *ranks]).training
    assert megatron.megatron == {"context_parallel_size": 2}
    assert (megatron.ranks_of_sequence, megatron.data_parallel_size, megatron.packs_rows) == (2, 1, False)


MISTAKES = [
    (
        "training={world_size: 4, context_parallel_size: 3}",
        "training: world_size (4) is not divisible by context_parallel_size (3)",
    ),
    (
        "training={engine: megatron, sequence_packing: true}",
        "training.sequence_packing (true) has no effect while training.engine is megatron; set training.engine=torch, "
        "or leave it out",
    ),
    (
        "rollout.rollout_batchsize=8",
        "rollout.rollout_batchsize is not an option; did you mean rollout.rollout_batch_size?",
    ),
    ("rollout.lr=1", "rollout.lr is not an option; did you mean training.lr?"),
    ("training.use-kl-loss=true", "training.use-kl-loss is not an option; did you mean algorithm.use_kl_loss?"),
    ("sed=1", "sed is not an option; did you mean seed?"),
    (
        "eval.benchmarks.0.pth=x",
        "eval.benchmarks.0.pth is not an option; did you mean eval.benchmarks.0.path?",
    ),
    (
        "rollout.rollout_stop=['END', '']",
        "rollout: rollout_stop has an empty string, which every text contains: leave it out",
    ),
    ("rollout.rollout_stop=END", 'rollout.rollout_stop is "END"; it must be a valid array'),
    ("training.zzzz=1", "training.zzzz is not an option; docs/configuration.md lists all options"),
    ("rolout.num_rollout=1", "rolout is not a section; did you mean rollout?"),
    ("rollout.num_rollout=three", 'rollout.num_rollout is "three"; it must be a valid integer'),
    ("rollout.num_rollout='3'", 'rollout.num_rollout is "3"; it must be a valid integer'),
    ("rollout.num_rollout=true", "rollout.num_rollout is true; it must be a valid integer"),
    ("rollout.num_rollout=0", "rollout.num_rollout is 0; it must be greater than or equal to 1"),
    ("training.lr=.nan", "training.lr is NaN; it must be a finite number"),
    (
        "training.lr_decay_style=step",
        "training.lr_decay_style is \"step\"; it must be 'constant', 'linear', 'cosine', 'inverse-square-root' or "
        "'WSD'",
    ),
    ("model.path=null", "model.path is null; it must be a valid string"),
    ("reward=math", 'reward is "math"; it must be a section with options under it'),
    ("data.label_pattern=x", "data.label_pattern needs exactly one group in parentheses, has 0"),
    (
        "training.min_lr=1.0",
        "training: min_lr (1.0) is above lr (0.0001)",
    ),
    (
        "training.global_batch_size=16",
        "rollout.rollout_batch_size × rollout.n_samples_per_prompt = 4 × 8 = 32, but training.global_batch_size × "
        "training.num_steps_per_rollout = 16 × 1 = 16; the two must be equal",
    ),
    (
        "rollout.over_sampling_batch_size=3",
        "rollout.over_sampling_batch_size (3) is below rollout.rollout_batch_size (4); it must be at least that",
    ),
    (
        "rollout.max_age=1",
        "rollout.max_age (1) has no effect while rollout.over_sampling_batch_size (null) is not above "
        "rollout.rollout_batch_size (4), so that no group is left over to grow old; raise "
        "rollout.over_sampling_batch_size, or leave it out",
    ),
    (
        "algorithm.loss_type=sft_loss",
        "rollout.rollout_max_response_len (16) has no effect while algorithm.loss_type is sft_loss, which "
        "learns from responses that the data holds; choose another loss or estimator, or leave it out",
    ),
    (
        "data.response_key=response",
        "data.response_key (response) has no effect while algorithm.loss_type is policy_loss, which learns "
        "from responses that are sampled; set algorithm.loss_type=sft_loss, or leave it out",
    ),
    (
        "rollout.rollout_max_response_len=0",
        "rollout.rollout_max_response_len is missing: set it to the longest response in tokens",
    ),
    (
        "algorithm.lambd=0.9",
        "algorithm.lambd (0.9) has no effect while algorithm.advantage_estimator is grpo; set "
        "algorithm.advantage_estimator=ppo, or leave it out",
    ),
    (
        "algorithm={advantage_estimator: ppo, kl_coef: 0.1, use_kl_loss: true, kl_loss_coef: 0.1}",
        "algorithm: kl_loss_coef (0.1) and kl_coef (0.1) both keep the policy near the reference model, one in the "
        "loss and one in the rewards; set one of them to 0",
    ),
    (
        "algorithm={advantage_estimator: ppo, num_critic_only_steps: 1000}",
        "algorithm.num_critic_only_steps (1000) must be below rollout.num_rollout (2): the actor would never be "
        "trained",
    ),
    (
        "training.critic_lr=0.1",
        "training.critic_lr (0.1) has no effect while algorithm.advantage_estimator is grpo, which has no "
        "critic; set algorithm.advantage_estimator=ppo, or leave it out",
    ),
    (
        "model.ref_path=x",
        "model.ref_path (x) has no effect while algorithm.use_kl_loss is false and algorithm.kl_coef is 0; "
        "set algorithm.use_kl_loss=true, or leave it out",
    ),
    (
        "training={engine: megatron, lora: {r: 4}}",
        "training: lora.r is 4, but engine is megatron, and megatron-core has no adapters: set engine to torch",
    ),
    (
        "algorithm.use_opd=true",
        "algorithm.use_opd needs a teacher: set model.teacher_path to its folder, or model.teacher_url",
    ),
    (
        "model.teacher_name=large",
        "model.teacher_name (large) has no effect while model.teacher_url is null; set model.teacher_url, or "
        "leave it out",
    ),
    (
        "model.teacher_url=large",
        "model: teacher_url (large) is not an address such as http://host:30000",
    ),
    (
        "model.teacher_url=http://large:30000",
        "model: teacher_url (http://large:30000) needs teacher_name, the name of the model there, as the server "
        "reports it at /v1/models",
    ),
    (
        "model.teacher_path=large",
        "model.teacher_path (large) has no effect while algorithm.use_opd is false and "
        "algorithm.distillation_loss_coef is 0; set algorithm.use_opd=true, or leave it out",
    ),
    (
        "algorithm.opd_kl_coef=0.5",
        "algorithm.opd_kl_coef (0.5) has no effect while algorithm.use_opd is false; set "
        "algorithm.use_opd=true, or leave it out",
    ),
    (
        "algorithm.kl_loss_coef=0.1",
        "algorithm.kl_loss_coef (0.1) has no effect while algorithm.use_kl_loss is false; set "
        "algorithm.use_kl_loss=true, or leave it out",
    ),
    (
        "training={lr_decay_style: WSD, lr_wsd_decay_iters: 3}",
        "training.lr_wsd_decay_iters (3) leaves fewer of the run's 2 optimizer steps than the warm-up takes: lower it",
    ),
    (
        "algorithm={advantage_estimator: ppo, value_clip: 0.5}",
        "algorithm.value_clip (0.5) has no effect while training.num_steps_per_rollout is 1, so that values "
        "are compared with themselves; raise training.num_steps_per_rollout, or leave it out",
    ),
    (
        "algorithm.loss_type=dpo",
        "algorithm: loss_type (dpo) needs the advantages of pairs, but advantage_estimator is grpo; set "
        "advantage_estimator=dpo, which names its loss, and leave loss_type out",
    ),
    (
        "algorithm={advantage_estimator: dpo, get_mismatch_metrics: true}",
        "algorithm.get_mismatch_metrics (true) has no effect while algorithm.advantage_estimator is dpo, which learns "
        "from pairs; choose another estimator, or leave it out",
    ),
    (
        "algorithm.tis_clip=5",
        "algorithm.tis_clip (5.0) has no effect while algorithm.use_tis is false and "
        "algorithm.get_mismatch_metrics is false; set algorithm.use_tis=true, or leave it out",
    ),
    (
        "algorithm.tis_clip_low=0.5",
        "algorithm.tis_clip_low (0.5) has no effect while algorithm.use_tis is false and "
        "algorithm.get_mismatch_metrics is false; set algorithm.use_tis=true, or leave it out",
    ),
    (
        "rollout.tool_options.python.timeout=5",
        "rollout.tool_options.python.timeout (5.0) has no effect while rollout.tools is (); name the tools in "
        "rollout.tools, or leave it out",
    ),
    (
        "algorithm.clip_cov_ratio=0.3",
        "algorithm.clip_cov_ratio (0.3) has no effect while the loss is policy_loss; set "
        "algorithm.loss_type=clip_cov, or leave it out",
    ),
    (
        "algorithm={use_tis: true, tis_level: sequence}",
        "algorithm.tis_level (sequence) has no effect while algorithm.custom_tis_function_path is tis; set "
        "algorithm.custom_tis_function_path=mis, or leave it out",
    ),
    (
        "algorithm={use_tis: true, custom_tis_function_path: mis, rs_level: sequence}",
        "algorithm.rs_level (sequence) has no effect while algorithm.use_rs is false; set "
        "algorithm.use_rs=true, or leave it out",
    ),
    (
        "algorithm={use_tis: true, custom_tis_function_path: mis, tis_clip_low: 0.5}",
        "algorithm.tis_clip_low (0.5) has no effect while algorithm.tis_mode is truncate; set "
        "algorithm.tis_mode=clip, or leave it out",
    ),
    (
        "algorithm={use_tis: true, custom_tis_function_path: mis, use_rs: true, rs_lower_bound: 3}",
        "algorithm: rs_lower_bound (3.0) is above rs_upper_bound (2.0), so that every token would be "
        "rejected; by default they are tis_clip_low and tis_clip",
    ),
    (
        "algorithm.tis_batch_normalize=true",
        "algorithm.tis_batch_normalize (true) has no effect while algorithm.use_tis is false; set "
        "algorithm.use_tis=true, or leave it out",
    ),
    (
        "algorithm.opsm_delta=0.1",
        "algorithm.opsm_delta (0.1) has no effect while algorithm.use_opsm is false; set "
        "algorithm.use_opsm=true, or leave it out",
    ),
    (
        "algorithm.use_unbiased_kl=true",
        "algorithm.use_unbiased_kl (true) has no effect while algorithm.use_kl_loss is false; set "
        "algorithm.use_kl_loss=true, or leave it out",
    ),
    (
        "algorithm={use_kl_loss: true, use_unbiased_kl: true, kl_loss_type: k2}",
        "algorithm: kl_loss_type (k2) is not an unbiased estimate, even with use_unbiased_kl (true); set "
        "kl_loss_type=k3, or leave one of them out",
    ),
    (
        "algorithm.kl_loss_type=k3",
        "algorithm.kl_loss_type (k3) has no effect while algorithm.use_kl_loss is false and "
        "algorithm.kl_coef is 0; set algorithm.use_kl_loss=true, or leave it out",
    ),
    (
        "algorithm={rewards_normalization: false, grpo_std_normalization: false}",
        "algorithm.grpo_std_normalization (false) has no effect while algorithm.rewards_normalization is "
        "false; set algorithm.rewards_normalization=true, or leave it out",
    ),
    (
        "algorithm={advantage_estimator: ppo, grpo_std_normalization: false}",
        "algorithm.grpo_std_normalization (false) has no effect while algorithm.advantage_estimator is ppo; "
        "set algorithm.advantage_estimator=cispo or grpo or grpo_turns or gspo, or leave it out",
    ),
    (
        "algorithm={advantage_estimator: gspo, loss_type: cispo}",
        "algorithm: loss_type (cispo) contradicts advantage_estimator (gspo), which is trained with the loss gspo; "
        "leave one of them out",
    ),
    (
        "algorithm={advantage_estimator: cispo, eps_clip_c: 3}",
        "algorithm.eps_clip_c (3.0) has no effect while training.num_steps_per_rollout is 1 and "
        "algorithm.use_rollout_logprobs is false: every ratio is 1; change either, or leave it out",
    ),
    (
        "algorithm.eps_clip_high=0.28",
        "algorithm.eps_clip_high (0.28) has no effect while training.num_steps_per_rollout is 1 and "
        "algorithm.use_rollout_logprobs is false: every ratio is 1; change either, or leave it out",
    ),
    (
        "algorithm={use_kl_loss: true, kl_loss_coef: 0.1, kl_loss_type: k1}",
        "algorithm: kl_loss_type (k1) has a gradient of 0 on average as a loss, so kl_loss_coef (0.1) would only add "
        "noise; set kl_loss_type=k2, whose gradient is that of the divergence, or penalise the divergence in the "
        "rewards, by kl_coef",
    ),
    (
        "rollout.num_rollout=1000001",
        "rollout: num_rollout (1000001) is above 1000000, the most iterations that a ledger can number",
    ),
    (
        "rollout.rollout_top_k=0",
        "rollout: rollout_top_k is 0, which leaves nothing to draw from; set it to -1 to keep all tokens",
    ),
    (
        "rollout.rollout_top_k=1",
        "rollout: rollout_top_k is 1, which leaves one token to draw: nothing can be learned from a choice without "
        "an alternative; set it to 2 or more, or to -1 to keep all tokens",
    ),
    (
        "eval.benchmarks.0.top_k=0",
        "eval.benchmarks.0: top_k is 0, which leaves nothing to draw from; set it to -1 to keep all tokens",
    ),
    (
        "training.lora.target_modules=[]",
        "training.lora.target_modules is empty: leave it out for all-linear, or name the layers that get an adapter",
    ),
    ("training", "--set training is not of the form section.option=value"),
    ("training..lr=1", "--set training..lr=1 is not of the form section.option=value"),
    (
        "training.lr=[1",
        "--set training.lr=[1: the value is not YAML: line 1: expected ',' or ']', but got '<stream end>'",
    ),
    (
        "eval.benchmarks.1.path=x",
        "--set eval.benchmarks.1.path=x: eval.benchmarks is a list of 1; 1 is not a position in it (counted from 0)",
    ),
    (
        "model.path.x=1",
        '--set model.path.x=1: model.path holds "some/model"; it has no options',
    ),
]
"""An override that is wrong, and what is said of it."""


def test_each_mistake_and_each_option_without_effect_gets_one_sentence_that_names_it(recipe: Path) -> None:
    found = {override: said(lambda note, one=override: load(recipe, [one], note)) for override, _ in MISTAKES}
    of_pairs = "rollout.rollout_max_response_len (16) has no effect while algorithm.advantage_estimator is dpo"
    own = {override: tuple(one for one in said if of_pairs not in one) for override, said in found.items()}
    assert own == {override: (sentence,) for override, sentence in MISTAKES}


def test_all_problems_are_listed_at_once(recipe: Path) -> None:
    found = problems(recipe, "training.lr=-1", "rollout.num_rollout=0", "modle.path=x", "eval.benchmarks.0.top_p=2")
    assert len(found) == 4
    assert [sentence.split()[0] for sentence in found] == [
        "rollout.num_rollout",
        "training.lr",
        "eval.benchmarks.0.top_p",
        "modle",
    ]


def test_a_missing_option_is_named_with_what_it_is(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {}\nrollout: {num_rollout: 1, rollout_batch_size: 1, rollout_max_response_len: 1}\n")
    assert problems(recipe) == (
        "model.path is required and missing: Folder of a Hugging Face causal LM with its tokenizer",
        "data is required and missing",
    )


def test_a_key_that_stands_twice_is_an_error_with_its_line(recipe: Path) -> None:
    recipe.write_text(RECIPE + "  lr: 1e-5\n")
    assert problems(recipe) == (f"{recipe} is not YAML: line 13: the key 'lr' appears twice",)


def test_broken_yaml_is_an_error_with_its_line(recipe: Path) -> None:
    recipe.write_text("model:\n  path: a\n path: b\n")
    (sentence,) = problems(recipe)
    assert sentence.startswith(f"{recipe} is not YAML: line 3: ")


def test_what_yaml_can_write_and_no_configuration_can_hold_is_one_sentence(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for text, says in {
        "model: &m {path: x, ref_path: *m}\n": "a value in it contains itself",
        f"model: {'[' * 2000}{']' * 2000}\n": "is not YAML: it is nested too deeply",
        "seed: !!float x\n": "is not YAML: a value does not fit its tag: ",
        "seed: !!timestamp 2026-01-02\n": "is not YAML: line 1: could not determine a constructor",
        "seed: !!binary aGk=\n": "is not YAML: line 1: could not determine a constructor",
        "a: &a0 [1]\n" + "".join(f"b{n}: &a{n + 1} [{f'*a{n},' * 10}]\n" for n in range(9)): "has more than 1,000,000",
        f"seed: {'9' * 5000}\n": "is not YAML: line 1: the number has 5000 digits",
        'model: {path: "\\ud83d"}\n': "half of a surrogate pair",
    }.items():
        recipe.write_text(text)
        (sentence,) = problems(recipe)
        assert says in sentence


def test_a_file_that_is_missing_or_holds_no_options_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert problems(missing) == (f"{missing} does not exist; recipes are in configs/recipes/",)
    missing.write_text("- 1\n")
    assert problems(missing) == (f"{missing} does not hold options; it should begin with a section such as `model:`",)
    missing.write_bytes(b"\xff\xfe\x00")
    assert problems(missing)[0].startswith(f"{missing} cannot be read as a text file: ")


def test_a_recipe_with_a_base_says_only_what_differs(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "larger").mkdir()
    larger = tmp_path / "larger" / "recipe.yaml"
    larger.write_text(
        "base: ../recipe.yaml\nmodel: {path: larger}\nrollout: {rollout_batch_size: 8, sglang: {tp_size: 2}}\n"
    )
    largest = tmp_path / "largest.yaml"
    largest.write_text(
        "base: larger/recipe.yaml\nrollout: {engine: sglang, sglang: {ep_size: 2}}\n"
        "eval: {benchmarks: [{name: other, path: other.jsonl, max_response_len: 8}]}\n"
    )
    config = load(largest, ["rollout.num_rollout=3"])
    assert (config.model.path, config.data.path, config.training.lr) == ("larger", "train.jsonl", 1e-4)
    assert (config.rollout.num_rollout, config.rollout.rollout_batch_size) == (3, 8)
    assert config.rollout.sglang == {"tp_size": 2, "ep_size": 2}
    assert [benchmark.name for benchmark in config.eval.benchmarks] == ["other"]  # lists are not merged
    assert load(recipe).model.path == "some/model"


def test_a_base_that_is_none_is_an_error_that_names_both_files(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text("base: none.yaml\n")
    assert problems(recipe) == (f"{tmp_path}/none.yaml does not exist; it is the base of {recipe}",)
    recipe.write_text("base: [none.yaml]\n")
    assert problems(recipe) == (f'{recipe}: base is ["none.yaml"]; it must name another recipe, relative to this one',)
    (tmp_path / "other.yaml").write_text("base: recipe.yaml\n")
    recipe.write_text("base: other.yaml\n")
    assert problems(recipe) == (f"{tmp_path}/other.yaml: base is recipe.yaml, which itself has other.yaml as a base",)


def test_yaml_values_follow_the_core_schema(recipe: Path) -> None:
    kwargs = "data.apply_chat_template_kwargs="
    values = "{a: 1e-4, b: no, c: 2026-01-02, d: 0x10, e: 010, f: ~, g: .5, h: 1_000, i: 1:30, j: -3}"
    assert load(recipe, [kwargs + values]).data.apply_chat_template_kwargs == {
        "a": 1e-4, "b": "no", "c": "2026-01-02", "d": 16, "e": 10, "f": None, "g": 0.5, "h": "1_000", "i": "1:30",
        "j": -3,
    }  # fmt: skip


def test_anchors_and_merges_may_override_without_counting_as_twice(recipe: Path) -> None:
    recipe.write_text(
        RECIPE.replace(
            "    - {name: heldout, path: test.jsonl, max_response_len: 16}",
            "    - &a {name: one, path: test.jsonl, max_response_len: 16}\n    - {<<: *a, name: two}",
        )
    )
    first, second = load(recipe).eval.benchmarks
    assert (first.name, second.name, second.path) == ("one", "two", "test.jsonl")
