"""Words in common."""

from cairn.tasks.rewards import f1
from cairn.tasks.rewards.sample import Sample


def f1_score(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    """Return the F1 score of the words of an answer, their precision and their recall."""
    graded = f1.grade(Sample(prediction, ground_truth))
    return graded["reward"], graded["precision"], graded["recall"]
