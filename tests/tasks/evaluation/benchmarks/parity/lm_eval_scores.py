"""Scores of lm-evaluation-harness for answers, by its own tasks.

    .venv-lm-eval/bin/python lm_eval_scores.py answers.yaml lm_eval_scores.json

The tasks are those that the harness comes with, filters, graders and metrics of theirs included; only the rows are
others, one for every answer, and the model is one that gives the answers in order. Writes JSON: of every task its
version, and the score of each answer by each metric.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import langdetect
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

DOCS = {
    "gsm8k": lambda row: {"question": "?", "answer": f"So it is {row['label']}.\n#### {row['label']}"},
    "aime24": lambda row: {"ID": "0", "Problem": "?", "Solution": "?", "Answer": row["label"]},
    "minerva_math500": lambda row: {
        "problem": "?",
        "solution": f"So it is $\\boxed{{{row['label']}}}$.",
        "answer": row["label"],
    },
    "ifeval": lambda row: {
        "key": 0,
        "prompt": "?",
        "instruction_id_list": [row["instruction"]],
        "kwargs": [row["arguments"]],
    },
}
"""A row of each task's data set for an answer."""

MANAGER = TaskManager()

# It guesses a text's language by draws, which the harness leaves to chance.
langdetect.DetectorFactory.seed = 0


class Answers(LM):
    """A model that answers the n-th row with the n-th answer."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__()
        self._answers = answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._answers[request.doc_id] for request in requests]

    def loglikelihood(self, requests: list[Any]) -> Any:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def scores(task: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each answer by each metric of the task, behind each of its filters."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps(DOCS[task](answer)) + "\n" for answer in answers))
        config = load_yaml(MANAGER.task_index[task].yaml_path, resolve_func=True)
        split = config["test_split"]
        config |= {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(rows)}},
            "training_split": None,
            "fewshot_split": split,
            "num_fewshot": 0,
        }
        model = Answers([answer["response"] for answer in answers])
        found = simple_evaluate(model=model, tasks=[config], task_manager=MANAGER, log_samples=True, bootstrap_iters=0)
    by_metric: dict[str, list[int]] = {}
    for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"]):
        for metric in sample["metrics"]:
            if metric.startswith("inst_level"):  # of one instruction each, it is that of the prompt
                continue
            name = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
            by_metric.setdefault(name, []).append(int(sample[metric]))
    return {"version": str(found["versions"][task]), "scores": by_metric}


if __name__ == "__main__":
    row = yaml.safe_load(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({task: scores(task, row[task]) for task in row}))
