"""TRL for `bench.trl`: its environment, its settings and its process."""

import os
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

from cairn.configs.schema.run import RunConfig
from cairn.tasks.data.stream import Draw
from cairn.tasks.grading.graders import get_grader

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = Path(__file__).with_name("trl-requirements.txt")
ENVIRONMENT = ROOT / ".venv-trl"
DEADLINE = 600.0
"""Seconds until a response of the process at most."""


@dataclass(frozen=True)
class Step:
    """Measurements of one step, which is one iteration: seconds by part."""

    cpu: dict[str, float]
    wall: dict[str, float]
    tokens: int
    """Number of tokens of the generated responses."""
    reward: float
    """Mean reward of the trained samples."""


def install() -> None:
    """Update the environment to bench/trl-requirements.txt, with this project in it."""
    stamp = ENVIRONMENT / ".installed"
    required = REQUIREMENTS.read_text() + f"# for {ROOT}\n"
    if stamp.exists() and stamp.read_text() == required:
        return
    print(f"installing TRL into {ENVIRONMENT.name}, once", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    pip = [str(ENVIRONMENT / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    # torch first, by its own line: pip then selects the CPU build, and later installs pull in no CUDA packages.
    subprocess.run([*pip, next(line for line in required.splitlines() if line.startswith("torch=="))], check=True)
    subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    stamp.write_text(required)


def trl_settings(config: RunConfig, steps: int) -> dict[str, Any]:
    """Return options of GRPOConfig: the arithmetic of `config`, otherwise the fastest settings on a CPU.

    Nothing is logged, saved or recomputed, no reference model is loaded, and samples are scored only once, in the pass
    that trains on them.
    """
    rollout, algorithm, training = config.rollout, config.algorithm, config.training
    return {
        "per_device_train_batch_size": config.samples_per_rollout,
        "gradient_accumulation_steps": 1,  # four or eight micro-batches take as long
        "steps_per_generation": 1,
        "max_steps": steps,
        "num_generations": rollout.n_samples_per_prompt,
        "max_completion_length": rollout.rollout_max_response_len,
        "temperature": rollout.rollout_temperature,
        "top_p": rollout.rollout_top_p,
        "top_k": max(0, rollout.rollout_top_k),
        "shuffle_dataset": False,
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon": algorithm.eps_clip,
        "epsilon_high": algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high,
        "scale_rewards": "group" if algorithm.grpo_std_normalization else "none",
        "learning_rate": training.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "adam_epsilon": training.adam_eps,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.clip_grad,
        "seed": config.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }


class TrlProcess:
    """GRPOTrainer in a separate process and environment."""

    def __init__(self, config: RunConfig, drawn: Draw, folder: Path, *, threads: int) -> None:
        """Start the process and wait until it is ready.

        Args:
            drawn: the prompts of all steps, in order.
            folder: receives the trained model.
        """
        near, far = Pipe()
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TRL_EXPERIMENTAL_SILENCE": "1"}
        self._connection = near
        self._prompt_ids = iter([list(row.prompt_ids) for row in drawn.rows])
        self._process = subprocess.Popen(
            [ENVIRONMENT / "bin" / "python", "-m", "bench.trl_worker", str(far.fileno())],
            cwd=ROOT,
            env=environment,
            pass_fds=[far.fileno()],
        )
        far.close()
        steps = len(drawn.rows) // config.rollout.rollout_batch_size
        near.send(
            {
                "model": str(Path(config.model.path).resolve()),
                "prompts": [row.prompt_text for row in drawn.rows],
                "labels": [row.label for row in drawn.rows],
                "grader": get_grader(config.reward).path,
                "threads": threads,
                "options": trl_settings(config, steps) | {"output_dir": str(folder)},
            }
        )
        self._answer()

    def step(self, responses: list[list[int]] | None = None) -> Step:
        """Generate for the next prompts and train: on the passed responses, or else on its own.

        Args:
            responses: those of the first prompt, then those of the second, …
        """
        self._connection.send(responses)
        prompt_ids, *measured = self._answer()
        if prompt_ids != [next(self._prompt_ids) for _ in prompt_ids]:
            raise SystemExit("TRL took other prompts than Cairn, or other tokens of them")
        return Step(*measured)

    def finish(self) -> None:
        """Wait until the model is saved, after the last step."""
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        if not self._connection.poll(DEADLINE):
            raise SystemExit(f"TRL gave no answer for {DEADLINE:.0f} s")
        try:
            return self._connection.recv()
        except EOFError:
            raise SystemExit("TRL's process ended; what it said stands above") from None
