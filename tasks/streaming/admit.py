"""`admit`: the next prompts of a run that streams are admitted: from then on samples of them are generated.

Admissions follow each other, whichever iteration makes them: each begins where the one before has left the data, so
that no prompt is drawn twice or passed over in silence, whatever becomes of the driver.
"""

from collections.abc import Sequence

from cairn.storage.commits import Commit, Step
from cairn.tasks.context import RunContext
from cairn.tasks.groups import Group, fresh_group
from cairn.tasks.step import Outcome, StepCall, durable


@durable(Step.ADMIT, reads=("seed", "data", "rollout.rollout_max_prompt_len"), externals=("data", "model"))
def admit(step: StepCall, previous: Commit | None, *, count: int, without: Sequence[int] | None = None) -> Outcome:
    """Admit the `count` prompts that follow those of the admission `previous`, and are none of `without`."""
    begin = 0 if previous is None else previous.values["cursor"]
    draw = step.run.draw(begin, count, without or ())
    return Outcome(
        values={
            "number": 0 if previous is None else admission_number(previous) + 1,
            "begin": begin,
            "cursor": draw.cursor,
            "without": list(without or ()),
            "groups": [one.group_id for one in draw.rows],
        },
        metrics={"passed_over_prompts": draw.passed_over},
    )


def admission_number(admission: Commit) -> int:
    """Its place among those of the run, from 0."""
    number = admission.values["number"]
    assert isinstance(number, int)
    return number


def admitted_ids(admission: Commit) -> list[int]:
    """The ids of its groups."""
    groups = admission.values["groups"]
    assert isinstance(groups, list)
    return groups  # type: ignore[return-value]


def admitted_groups(run: RunContext, admission: Commit) -> list[Group]:
    """Its groups, of which no sample has begun."""
    without = admission.values["without"]
    assert isinstance(without, list)
    draw = run.draw(admission.values["begin"], len(admitted_ids(admission)), without)  # type: ignore[arg-type]
    return [fresh_group(run, admission.iteration, row) for row in draw.rows]
