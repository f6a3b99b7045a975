"""GSM8K, AIME, MATH-500 and IFEval are graded as lm-evaluation-harness grades them.

`answers.yaml` holds answers, `lm_eval_scores.json` what the harness gave them, which is found out anew by its own tasks
in an environment of its own (`make lm-eval-env`). To record it after a change of the answers:

    .venv-lm-eval/bin/python tests/tasks/evaluation/benchmarks/parity/lm_eval_scores.py \
        tests/tasks/evaluation/benchmarks/parity/answers.yaml
        tests/tasks/evaluation/benchmarks/parity/lm_eval_scores.json
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cairn.configs.catalogue import load_benchmark
from cairn.configs.plugins import load_callable
from cairn.tasks.evaluation.benchmarks.rows import benchmark_grader
from cairn.tasks.rewards.sample import Sample

HERE = Path(__file__).parent
ROOT = HERE.parents[4]
PYTHON = ROOT / ".venv-lm-eval" / "bin" / "python"
ANSWERS: dict[str, list[dict[str, Any]]] = yaml.safe_load((HERE / "answers.yaml").read_text())
RECORDED: dict[str, Any] = json.loads((HERE / "lm_eval_scores.json").read_text())
COMPARED = [
    ("gsm8k", "gsm8k", "exact_match,flexible-extract", "reward"),
    ("gsm8k-5shot", "gsm8k", "exact_match,strict-match", "reward"),
    ("aime2024", "aime24", "exact_match", "reward"),
    ("aime2025", "aime24", "exact_match", "reward"),
    ("math500", "minerva_math500", "math_verify", "reward"),
    ("ifeval", "ifeval", "prompt_level_strict_acc", "reward"),
    ("ifeval", "ifeval", "prompt_level_loose_acc", "loose"),
]
"""Benchmark; task, and its metric; what the grader says of it. The tasks aime24 and aime25 have one grader."""


def sample(answer: dict[str, Any]) -> Sample:
    if "instruction" not in answer:
        return Sample(answer["response"], answer["label"])
    rows = {"instruction_id_list": [answer["instruction"]], "kwargs": [answer["arguments"]]}
    return Sample(answer["response"], None, rows)


@pytest.mark.parametrize(("name", "task", "metric", "key"), COMPARED)
def test_answers_get_the_scores_of_lm_evaluation_harness(name: str, task: str, metric: str, key: str) -> None:
    benchmark = load_benchmark(name)
    assert benchmark.follows is not None
    assert benchmark.follows.task == (task if name != "aime2025" else "aime25")
    assert benchmark.follows.version == RECORDED[task]["version"]
    grade = load_callable(benchmark_grader(benchmark).path)
    expected = RECORDED[task]["scores"][metric]
    scores = [grade(sample(answer))[key] for answer in ANSWERS[task]]
    assert len(scores) == len(expected) >= 60
    others = [a for a, one, other in zip(ANSWERS[task], scores, expected, strict=True) if one != other]
    # What is judged otherwise is what is said to be, each with a reason.
    assert others == [answer for answer in ANSWERS[task] if "differs" in answer]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-lm-eval; make it with `make lm-eval-env`")
def test_the_recorded_scores_are_those_that_the_harness_gives(tmp_path: Path) -> None:
    command = [PYTHON, HERE / "lm_eval_scores.py", HERE / "answers.yaml", tmp_path / "scores.json"]
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "scores.json").read_text()) == RECORDED
