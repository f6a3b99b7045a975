"""TRL's GRPOTrainer, one step on command: the process that `bench.trl` starts in TRL's own environment.

    python -m bench.trl_worker DESCRIPTOR

DESCRIPTOR is the file descriptor of a pipe. The first message contains the settings (see `bench.trl_process`), then one
for each step the responses to train on, or None for TRL's own. The reply contains the step's measurements. At the end
the model is saved. From this project it imports only the meter and the grader, which need only the standard library.
"""

import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.meter import Meter
from cairn.configs.plugins import load_callable
from cairn.tasks.rewards.sample import Sample


class MeteredTrainer(GRPOTrainer):
    """TRL's trainer, unchanged except for marks when samples are generated and when they are ready to train on."""

    def __init__(self, task: dict[str, Any], connection: Connection) -> None:
        self.connection = connection
        grade = load_callable(task["grader"])

        def reward(completions: list[str], label: list[str | None], **_: Any) -> list[float]:
            self.rewards = [float(grade(Sample(text, right))) for text, right in zip(completions, label, strict=True)]
            return self.rewards

        super().__init__(
            model=task["model"],
            reward_funcs=reward,
            args=GRPOConfig(**task["options"]),
            train_dataset=Dataset.from_dict({"prompt": task["prompts"], "label": task["labels"]}),
            processing_class=AutoTokenizer.from_pretrained(task["model"]),
            rollout_func=roll_out,
            callbacks=[OnCommand(self)],
        )
        self.remove_callback(PrinterCallback)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        scored = super()._generate_and_score_completions(inputs)
        self.meter.mark("reward")
        return scored


def roll_out(prompts: list[str], trainer: MeteredTrainer) -> dict[str, Any]:
    """Generate as the trainer does by itself; then replace its responses by the passed ones, if there are any."""
    trainer.prompt_ids, images, others = trainer._tokenize_prompts(prompts)
    responses, _ = trainer._generate_single_turn(trainer.prompt_ids, images, others, trainer.num_generations)
    trainer.meter.mark("generation")
    trainer.tokens = sum(map(len, responses))
    return {"prompt_ids": trainer.prompt_ids, "completion_ids": trainer.supplied or responses, "logprobs": None}


class OnCommand(TrainerCallback):
    """Begins each step on command, and replies with its measurements."""

    def __init__(self, trainer: MeteredTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.supplied = self._trainer.connection.recv()
        self._trainer.meter = Meter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer
        trainer.meter.mark("training")
        prompt_ids = trainer.prompt_ids[:: trainer.num_generations]
        reward = sum(trainer.rewards) / len(trainer.rewards)
        trainer.connection.send((prompt_ids, trainer.meter.cpu, trainer.meter.wall, trainer.tokens, reward))


def main() -> None:
    """Serve until all steps are done."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    connection = Connection(int(sys.argv[1]))
    task = connection.recv()
    torch.set_num_threads(task["threads"])
    trainer = MeteredTrainer(task, connection)
    connection.send("ready")
    trainer.train()
    trainer.model.save_pretrained(task["options"]["output_dir"])
    connection.send("saved")


if __name__ == "__main__":
    main()
