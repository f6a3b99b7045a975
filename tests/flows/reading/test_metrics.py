"""Metrics are those of the commits, under slime's names, with shards merged and time taken from the commits."""

from pathlib import Path
from typing import Any

import pytest

from cairn.configs.loader import parse
from cairn.engines.plan.peaks import peak_tflops
from cairn.flows.iteration import iteration
from cairn.flows.reading.metrics import METRICS, eval_metrics, find_metric, iteration_metrics, step_seconds
from cairn.storage.ledger.commits import Commit, OutputFile, Step
from tests.flows.written_runs import RECIPE, config_of, new_run, write_iteration
from tests.storage.builders import ENVIRONMENT
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

CONFIG = parse(RECIPE)


def commit(step: Step, start: float, end: float, *, shard: str | None = None, epoch: int = 1, **fields: Any) -> Commit:
    return Commit(
        run="toy", iteration=0, step=step, shard=shard, attempt="a", epoch=epoch, config_digest="0" * 64,
        started_at=start, committed_at=end, environment=ENVIRONMENT, **fields,
    )  # fmt: skip


def test_counts_of_shards_add_up() -> None:
    shards = [{"samples": 3, "response_tokens": 30}, {"samples": 1, "response_tokens": 2}]
    metrics = iteration_metrics(
        [commit(Step.ROLLOUT, 0, 1, shard=f"00-00{i}", metrics=values) for i, values in enumerate(shards)], CONFIG
    )
    assert (metrics["rollout/samples"], metrics["rollout/response_tokens"]) == (4, 32)


def test_the_most_that_an_engine_had_to_do_is_that_of_all_its_shards() -> None:
    shards = [{"rollout_0/running_requests_max": most, "rollout_0/restarts": 1} for most in (3, 7, 2)]
    metrics = iteration_metrics(
        [commit(Step.ROLLOUT, i, i + 1, shard=f"00-00{i}", metrics=values) for i, values in enumerate(shards)], CONFIG
    )
    assert (metrics["rollout/rollout_0/running_requests_max"], metrics["rollout/rollout_0/restarts"]) == (7, 1)


def test_of_several_filter_rounds_the_last_counts_whatever_the_order() -> None:
    rounds = [commit(Step.FILTER, i, i + 1, shard=f"0{i}", metrics={"groups": 3 + i, "rounds": i + 1}) for i in (0, 1)]
    for commits_ in (rounds, rounds[::-1]):
        metrics = iteration_metrics(commits_, CONFIG)
        assert (metrics["rollout/groups"], metrics["rollout/rounds"]) == (4, 2)


def test_metrics_are_shown_under_the_prefix_of_their_step() -> None:
    metrics = iteration_metrics(
        [
            commit(Step.FILTER, 0, 1, metrics={"response_len/mean": 3.5, "age/dropped_groups": 1}),
            commit(Step.ADVANTAGE, 1, 2, metrics={"response_len/mean": 2.5, "advantages": 0.5, "age/max": 0}),
            commit(Step.TRAIN, 2, 3, metrics={"pg_loss": 0.1}),
        ],
        CONFIG,
    )
    shown = {name: value for name, value in metrics.items() if not name.startswith("perf/")}
    assert shown == {
        "rollout/response_len/mean": 3.5,
        "rollout/trained/response_len/mean": 2.5,
        "rollout/advantages": 0.5,
        "age/dropped_groups": 1,
        "age/max": 0,
        "train/pg_loss": 0.1,
    }


def test_time_is_where_the_commits_say() -> None:
    commits = [
        commit(Step.ROLLOUT, 100, 103, shard="00-000", metrics={"response_tokens": 60}),
        commit(Step.ROLLOUT, 101, 104, shard="00-001", metrics={"response_tokens": 40}),
        commit(Step.REWARD, 103, 105, shard="00-000"),
        commit(Step.FILTER, 106, 107, shard="00"),
        commit(Step.TRAIN, 108, 110, metrics={"tokens": 50}),
    ]
    assert step_seconds(commits) == {Step.ROLLOUT: 4, Step.REWARD: 2, Step.FILTER: 1, Step.TRAIN: 2}
    metrics = iteration_metrics(commits, CONFIG)
    assert metrics["perf/step_time"] == 10
    assert metrics["perf/rollout_time"] == 7
    assert metrics["perf/actor_train_time"] == 2
    assert metrics["perf/other_time"] == 2  # 105–106 and 107–108
    assert metrics["perf/tokens_per_gpu_per_sec"] == pytest.approx(100 / 7 / 2)  # two engines
    assert metrics["perf/actor_train_tok_per_s"] == 25


def test_bytes_are_those_of_the_committed_files() -> None:
    def file(size: int) -> OutputFile:
        return OutputFile(path="a/b", bytes=size, sha256="0" * 64)

    commits = [
        commit(Step.ROLLOUT, 0, 1, shard="00-000", outputs=(file(3), file(4))),
        commit(Step.CHECKPOINT, 1, 2, outputs=(file(100),)),
    ]
    metrics = iteration_metrics(commits, CONFIG)
    assert (metrics["perf/snapshot_bytes"], metrics["perf/checkpoint_bytes"]) == (7, 100)


def test_the_time_between_two_drivers_does_not_count() -> None:
    commits = [commit(Step.ROLLOUT, 0, 2, shard="00-000"), commit(Step.TRAIN, 1000, 1003, epoch=2)]
    metrics = iteration_metrics(commits, CONFIG)
    assert (metrics["perf/step_time"], metrics["perf/other_time"]) == (5, 0)


def test_evaluations_stand_at_the_iterations_that_their_weights_were_trained_for(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path), training={"num_steps_per_rollout": 2}, eval={"eval_interval": 1})
    points = eval_metrics(write_iteration(ledger, 0))
    assert {trained: metrics["eval/heldout"] for trained, metrics in points.items()} == {0: 0.25, 1: 0.5}
    assert points[0]["eval/heldout-truncated_ratio"] == 0
    assert points[0]["eval/heldout/response_len/mean"] == 3


def test_evaluations_of_a_fork_that_takes_other_steps_stand_where_its_iterations_do() -> None:
    """Two iterations of four steps are its parent's, and its own have one."""
    own = commit(Step.EVAL, 0, 1, shard="h-v000009", metrics={"h": 0.5}, weight_version_in=9, weight_version_out=9)
    assert list(eval_metrics([own.model_copy(update={"iteration": 2})])) == [3]


def test_every_metric_of_a_written_run_is_documented(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path), eval={"eval_interval": 1}, checkpoint={"save_interval": 1})
    commits = write_iteration(ledger, 0)
    names = {*iteration_metrics(commits, config_of(ledger))}
    names |= {name for metrics in eval_metrics(commits).values() for name in metrics}
    assert len(names) > 30
    assert [name for name in sorted(names) if find_metric(name) is None] == []


def test_a_name_with_a_slash_in_it_does_not_fall_into_a_family() -> None:
    assert find_metric("eval/heldout").name == "eval/<benchmark>"
    assert find_metric("eval/heldout-failed_samples").name == "eval/<benchmark>-failed_samples"
    assert find_metric("rollout/dynamic_filter/drop_zero_std_0").name == "rollout/dynamic_filter/drop_<reason>"
    assert find_metric("eval/heldout/unheard_of") is None
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_every_metric_that_a_run_writes_is_documented(tiny_assets: Path, tmp_path: Path) -> None:
    benchmark = {"name": "heldout", "path": str(tiny_assets / "heldout.jsonl"), "max_response_len": 4}
    model = str(tiny_assets / "model")
    config = tiny_config(
        tiny_assets,
        model={"path": model, "teacher_path": model},
        rollout={"dynamic_sampling_filter": "check_reward_nonzero_std_with_fallback", "num_rollout": 1},
        algorithm={
            "use_rollout_logprobs": False,
            "use_tis": True,
            "custom_tis_function_path": "mis",
            "use_rs": True,
            "rs_veto_threshold": 1e-4,
            "tis_batch_normalize": True,
            "get_mismatch_metrics": True,
            "use_opsm": True,
            "use_kl_loss": True,
            "advantage_estimator": "ppo",
            "kl_coef": 0.1,
            "use_opd": True,
            "distillation_loss_coef": 0.1,
            "distillation_topk": 4,
        },
        training={"num_steps_per_rollout": 2},
        eval={"eval_interval": 1, "benchmarks": [benchmark]},
    )
    with tiny_context(str(tmp_path), config) as (run, _):
        commits = iteration(run, DirectSteps(run), 0)
    shown = iteration_metrics(commits, config)
    points = eval_metrics(commits)
    assert sorted(points) == [0, 1]
    names = [*shown, *points[0]]
    assert [name for name in names if find_metric(name) is None] == []
    written = {metric.name for name in names if (metric := find_metric(name)) is not None}
    families = {
        "rollout/zero_std/count_<reward>",
        "rollout/dynamic_filter/drop_<reason>",
        "rollout/failed/<name>",
        "rollout/source/<source>/raw_reward",
        "rollout/source/<source>/samples",
        "eval/<benchmark>/metric/<name>",
    }
    requested = {"alarm/<name>", "perf/mfu"}
    servers = {"perf/cache_hit_rate"}
    experts = {"train/routing_mismatch"}
    workers = {"rollout/<engine>/tokens_in_flight_max", "rollout/<engine>/episode_worker_restarts"}
    demonstrations = {"rollout/cut_rows", *(metric.name for metric in METRICS if "/dpo/" in metric.name)}
    of_episodes = (
        *("rollout/policy_calls", "rollout/retold_", "rollout/role/", "rollout/sampled_tokens", "rollout/tool_"),
        *("rollout/turns/", "rollout/world_tokens"),
    )
    episodes = {metric.name for metric in METRICS if metric.name.startswith(of_episodes)}
    failures = {"retries/<error>", "perf/retry_wait_time", "recovery/replayed_steps"}
    streams = {f"rollout/{name}" for name in ("engines", "open_groups", "interrupted_samples", "recomputed_tokens")}
    streams |= {"perf/update_stall_time", "age/stale_tokens", "age/down_weighted_tokens"}
    requested |= {metric.name for metric in METRICS if metric.source == "waits"}  # tests.flows.reading.test_balance
    imported = {"rollout/step"}  # tests.flows.traces.test_importing
    others = families | imported | servers | experts | workers | demonstrations | episodes | failures | streams
    assert {metric.name for metric in METRICS} - written - requested - others == set()


def test_utilization_is_the_work_per_second_of_what_a_device_can_do(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path), training={"world_size": 2, "dtype": "bfloat16"})
    facts = {"metrics": {"flops": 3e15}, "timings": {"update": 10.0}}
    commits = [
        commit.model_copy(update=facts) if commit.step is Step.TRAIN else commit
        for commit in write_iteration(ledger, 0)
    ]
    config = config_of(ledger)
    on_cpu = iteration_metrics(commits, config)
    assert on_cpu["perf/actor_train_tflops"] == 150  # 3e15 in 10 s by 2 ranks
    assert "perf/mfu" not in on_cpu
    configured = config.model_copy(update={"tracking": config.tracking.model_copy(update={"peak_tflops": 300.0})})
    assert iteration_metrics(commits, configured)["perf/mfu"] == 0.5
    h100 = ENVIRONMENT.model_copy(update={"device": "NVIDIA H100 80GB HBM3"})
    on_gpu = [commit.model_copy(update={"environment": h100}) for commit in commits]
    assert iteration_metrics(on_gpu, config)["perf/mfu"] == pytest.approx(150 / 989.4)


@pytest.mark.parametrize(
    ("device", "peak"), [("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L40S", 362.05), ("NVIDIA L4", 121), ("a CPU", None)]
)
def test_peaks_go_by_the_names_that_devices_have(device: str, peak: float | None) -> None:
    assert peak_tflops(device, "bfloat16") == peak
    assert peak_tflops(device, "float32") is None


def test_sglangs_cache_hit_rate_is_that_of_all_shards(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path), rollout={"engine": "sglang"})
    commits = write_iteration(ledger, 0)
    tokens = {"prompt_tokens": 400, "cached_tokens": 100}
    commits = [
        commit.model_copy(update={"metrics": {**commit.metrics, **tokens}}) if commit.step is Step.ROLLOUT else commit
        for commit in commits
    ]
    assert iteration_metrics(commits, config_of(ledger))["perf/cache_hit_rate"] == 0.25
