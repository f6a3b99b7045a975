"""The curriculum of longer lists shows no answer that is asked for, and pays for what it says."""

import random
from itertools import islice

from cairn.tasks.rewards.sample import Sample
from examples.longer_lists.build import LONGEST, PROMPTS, SHOWN, curriculum, demonstrations, problem
from examples.longer_lists.grader import grade
from examples.quickstart.task import is_held_out


def test_no_list_longer_than_four_digits_is_shown_sorted() -> None:
    shown = [row for row in islice(demonstrations(random.Random(0)), 5000) if row["prompt"].startswith("Sort")]
    assert len(shown) > 2000
    assert max(len(row["response"].split()) for row in shown) == SHOWN


def test_held_out_prompts_are_of_eight_digits_and_never_trained_on() -> None:
    trained = list(curriculum(random.Random(0)))
    assert len(trained) == 600 * PROMPTS
    assert not any(is_held_out(row["prompt"]) for row in trained)
    rows = [problem(random.Random(seed), LONGEST, held_out=True) for seed in range(20)]
    assert all(is_held_out(row["prompt"]) for row in rows)
    assert {len(row["label"].split()) for row in rows} == {LONGEST}


def test_half_is_paid_for_places_and_half_for_the_whole_answer() -> None:
    def paid(response: str) -> dict[str, float]:
        return grade(Sample(response, "1 2 2 9"))

    assert paid("\\boxed{1 2 2 9}") == {"reward": 1.0, "exact": 1.0}
    assert paid("\\boxed{1 2 9 2}") == {"reward": 0.25, "exact": 0.0}
    assert paid("\\boxed{1 2 2 9 9}") == {"reward": 0.4, "exact": 0.0}
    assert paid("1 2 2 9") == paid("\\boxed{}") == {"reward": 0.0, "exact": 0.0}
