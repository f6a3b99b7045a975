"""The answer to a problem of GSM8K is right if the number after the first `####` is the label's: the filter
`strict-match` of lm-evaluation-harness's task `gsm8k` (version 3.0). See `cairn.tasks.rewards.gsm8k`."""

from typing import Any

from cairn.configs.kinds import plugin
from cairn.tasks.rewards.gsm8k import extracted
from cairn.tasks.rewards.sample import Sample


@plugin(mark="`####`")
def grade(sample: Sample) -> dict[str, Any]:
    """Return 1 if the number after `####` is the label, else 0. Raises ValueError without a label."""
    answers = extracted(sample)
    return {"reward": answers["strict"], **answers, "answer": answers["strict_answer"]}
