"""A server leaves nothing behind, however its owner ends, and says why it did not start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.rollout.plan import Place
from cairn.engines.rollout.sglang.installation import (
    RETIRED,
    STAND_INS,
    TESTED_VERSION,
    Installation,
    SGLangMissing,
    option_problems,
    router_problems,
)
from cairn.engines.rollout.sglang.launch import code_problem, launch
from cairn.engines.rollout.sglang.launch_plan import ServerPlan
from cairn.engines.rollout.sglang.server import Server
from cairn.engines.types.errors import EngineDied, EngineError
from tests.waiting import wait_for

SERVER = """
import mmap, os, subprocess, time
from multiprocessing.shared_memory import SharedMemory
by_python = SharedMemory(create=True, size=8)
with open(f"/dev/shm/sglang_loads_{os.getpid()}", "wb+") as by_hand:
    by_hand.truncate(8)
    mapped = mmap.mmap(by_hand.fileno(), 8)
subprocess.Popen(["sleep", "600"])
print(f"/dev/shm/{by_python.name}", by_hand.name, flush=True)
time.sleep(600)
"""
OWNER = """
import sys, time
from pathlib import Path
from cairn.engines.rollout.sglang.server import Server
from tests.waiting import wait_for
server = Server([sys.executable, "-c", sys.argv[2]], {}, 1, Path(sys.argv[1]))
print(server._process.pid, flush=True)
time.sleep(600)
"""


def started(log: Path, guard: int) -> tuple[list[psutil.Process], list[Path]]:
    """The family of a server that runs `SERVER`, and its shared memory."""
    (said,) = wait_for(lambda: log.exists() and log.read_text().splitlines(), 60)
    family = [psutil.Process(guard), *psutil.Process(guard).children(recursive=True)]
    assert len(family) == 5, "guard and its parent, server, its child and its resource tracker"
    segments = [Path(path) for path in said.split()]
    assert all(segment.exists() for segment in segments)
    return family, segments


def assert_gone(family: list[psutil.Process], segments: list[Path]) -> None:
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert not [segment for segment in segments if segment.exists()]


@pytest.mark.proof
def test_a_server_dies_with_an_owner_that_is_killed_and_leaves_no_shared_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "log"), SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = started(tmp_path / "log", int(owner.stdout.readline()))
        owner.kill()
    assert_gone(*left)


@pytest.mark.proof
def test_a_server_that_is_ended_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    server = Server([sys.executable, "-c", SERVER], {}, 1, tmp_path / "log")
    left = started(tmp_path / "log", server._process.pid)
    server.stop()
    assert_gone(*left)


@pytest.mark.proof
def test_a_server_leaves_nothing_where_ray_kills_the_children_of_its_actor(tmp_path: Path) -> None:
    server = Server([sys.executable, "-c", SERVER], {}, 1, tmp_path / "log")
    left = started(tmp_path / "log", server._process.pid)
    server._process.kill()
    assert_gone(*left)


@pytest.mark.proof
def test_a_server_that_is_killed_takes_along_what_it_started(tmp_path: Path) -> None:
    server = Server([sys.executable, "-c", SERVER], {}, 1, tmp_path / "log")
    family, segments = started(tmp_path / "log", server._process.pid)
    family[2].kill()
    assert_gone(family, segments[:1])
    segments[1].unlink(missing_ok=True)


def test_a_server_that_ends_while_it_starts_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = Server([sys.executable, "-c", "import sys; sys.exit('no such card')"], {}, 1, tmp_path / "log")
    with pytest.raises(EngineDied, match=r"(?s)ended while it started; its log is .*no such card"):
        server.wait_ready(30)


def test_the_end_of_a_log_is_shown_without_the_requests_that_came_after_it(tmp_path: Path) -> None:
    request = 'INFO:     127.0.0.1:51234 - "GET /v1/loads HTTP/1.1" 200 OK'
    words = ["import sys", f"print('lost\\n' * 20000, 'out of memory', *[{request!r}] * 60, sep='\\n')", "sys.exit(1)"]
    server = Server([sys.executable, "-c", "\n".join(words)], {}, 1, tmp_path / "log")
    with pytest.raises(EngineDied, match="out of memory") as ended:
        server.wait_ready(60)
    assert "/v1/loads" not in str(ended.value)
    assert str(ended.value).count("lost") < 30


def test_unknown_options_and_those_that_cairn_sets_are_named() -> None:
    problems = list(
        option_problems(
            Installation.find(),
            "rollout.sglang",
            {
                "rpc_ipc_name": "x",
                "attention_backnd": "triton",
                "port": 1,
                "tp_size": 2,
                "api_key": "hunter2",
                **dict.fromkeys(RETIRED, True),
                "attn_dp_size": 2,
                "enable_dp_attention": True,
            },
        )
    )
    assert problems == [
        f"rollout.sglang.rpc_ipc_name is not an option of SGLang {TESTED_VERSION}; did you mean otlp_service_name?",
        f"rollout.sglang.attention_backnd is not an option of SGLang {TESTED_VERSION}; did you mean attention_backend?",
        "rollout.sglang.port is set by Cairn itself; leave it out",
        "rollout.sglang.api_key is a secret, and configurations are recorded with the run: leave it out",
        *(f"rollout.sglang.{name} {advice}" for name, advice in RETIRED.items()),
    ]


def test_options_that_a_router_does_not_have_are_named() -> None:
    requested = {"policy": "round_robbin", "cache_treshold": 0.5, "worker_urls": [], "retry_max_retries": 2}
    assert list(router_problems(Installation.find(), requested)) == [
        "rollout.router.cache_treshold is not an option of the router; did you mean cache_threshold?",
        "rollout.router.worker_urls is set by Cairn itself; leave it out",
        "rollout.router.policy is 'round_robbin'; it must be one of cache_aware, round_robin, power_of_two, random, "
        "consistent_hashing, prefix_hash, manual, bucket",
    ]
    assert list(router_problems(Installation.find(), {"policy": "consistent_hashing", "log_level": "info"})) == []


def test_a_command_line_spells_options_as_sglang_does() -> None:
    options = {
        "tp_size": 2,
        "disable_radix_cache": True,
        "enable_metrics": False,
        "lora_strict_loading": False,
        "lora_paths": ["a", "b"],
        "sidecar_args": ["c"],
        "mm_process_config": {"image": True},
        "quantization": None,
    }
    assert Installation.find().command(options)[1:] == [
        *("-m", "sglang.launch_server", "--tp-size", "2", "--disable-radix-cache", "--no-lora-strict-loading"),
        *("--lora-paths", "a", "b", "--sidecar-args", '["c"]', "--mm-process-config", '{"image": true}'),
    ]


def test_a_server_inherits_nothing_that_changes_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    retained = {"SGLANG_CACHE_DIR": "/cache", "CUDA_VISIBLE_DEVICES": "0", "NCCL_SOCKET_IFNAME": "eth0"}
    dropped = {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "SGLANG_AN_OPTION_OF_TOMORROW": "1",
        "SGL_FORCE_SHUTDOWN": "1",
        "FLASHINFER_NVFP4_4OVER6": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "PYTHONPATH": "/elsewhere",
    }
    for name, value in (retained | dropped).items():
        monkeypatch.setenv(name, value)
    environment = Installation.find().environment(on_cpu=False, num_threads=1, variables={})
    assert {name: environment[name] for name in retained} == retained
    assert dropped.keys() & environment.keys() == set()


@pytest.mark.parametrize("place", ["config", "text_config"])
def test_a_model_folder_with_code_of_its_own_is_given_to_no_server_unasked(place: str, tmp_path: Path) -> None:
    code = {"auto_map": {"AutoModel": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(code if place == "config" else {"text_config": code}))
    config = RolloutConfig(engine="sglang", num_rollout=1, rollout_batch_size=1, rollout_max_response_len=8)
    with pytest.raises(EngineError, match=r"names its own code \(auto_map\), which SGLang may run"):
        launch(str(tmp_path), config, "cpu", ServerPlan(), Place(), tmp_path / "log", 1)
    assert code_problem(str(tmp_path), {"trust_remote_code": True}) is None


def test_stand_ins_are_set_for_that_process_alone_and_another_version_of_sglang_is_refused_them() -> None:
    installation = Installation.find()
    before = dict(os.environ)
    environment = installation.environment(on_cpu=True, num_threads=1, variables={})
    assert environment["PYTHONPATH"] == str(STAND_INS)
    assert environment["SGLANG_USE_CPU_ENGINE"] == environment["TORCHDYNAMO_DISABLE"] == "1"
    assert dict(os.environ) == before
    assert "PYTHONPATH" not in installation.environment(on_cpu=False, num_threads=1, variables={})

    another = Installation(installation.python)
    another.__dict__["version"] = "0.5.20"
    with pytest.raises(SGLangMissing, match=f"without a GPU SGLang {TESTED_VERSION} is needed and .* has 0.5.20"):
        another.environment(on_cpu=True, num_threads=1, variables={})
    assert another.environment(on_cpu=False, num_threads=1, variables={})
