"""Answers in boxes, compared as mathematics."""

from cairn.tasks.rewards.boxed import last_boxed
from cairn.tasks.rewards.math import is_right


def extract_answer(passage: str) -> str | None:
    """Return the content of the last box in a text; None without one."""
    return last_boxed(passage)


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    """Whether the content of the last box is mathematically equal to the answer, which may be in a box too."""
    answer = extract_answer(solution_str)
    return answer is not None and is_right(answer, extract_answer(str(ground_truth)) or str(ground_truth))


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Whether two answers are mathematically equal."""
    return is_right(given_answer, ground_truth)


grade_answer_mathd = grade_answer_sympy
