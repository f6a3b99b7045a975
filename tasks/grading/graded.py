"""A sample with its grade, as filters and the metrics of benchmarks get it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cairn.storage.ledger.schemas import TRAJECTORY_INFOS
from cairn.storage.store.canonical import from_json
from cairn.tasks.rewards.sample import Sample, read_infos


@dataclass(frozen=True, eq=False)
class GradedSample(Sample):
    """A sample with its grade. Filters get the tokens of all trajectories in `response_ids`. What only graders read is
    empty: `response_with_special_tokens`, `segments`, `messages`, `rewards` and `roles`."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    group_id: int = 0
    sample_index: int = 0
    """Position in the group, from 0; for a benchmark, among the `n_samples_per_eval_prompt` responses to a question."""
    prompt_index: int = 0
    """Row of the data set or of the benchmark, from 0."""
    reward: float | None = None
    """Reward before the overlong penalty, which is among the components. None where the response could not be generated
    or graded: a filter gets no such sample."""
    components: dict[str, Any] = field(default_factory=dict)
    """Components that the grader recorded with the reward."""
    error: str | None = None
    """Reason why it has no reward."""
    log_probs: tuple[float, ...] = ()
    """Log-probs of `response_ids` under the rollout engine; empty where they are not recorded."""
    loss_mask: tuple[int, ...] = ()
    """1 at tokens that may be trained on, else 0; empty for a benchmark."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "GradedSample":
        """Return the sample in a row of the rollout table with its `reward` and `components`, or in a row of an
        evaluation's result."""
        return cls(
            row["response_text"],
            row["label"],
            from_json(row["metadata"] or "{}"),
            response_ids=tuple(row["response_ids"]),
            prompt=row["prompt_text"],
            prompt_ids=tuple(row["prompt_ids"] or ()),
            finish_reason=row["finish_reason"],
            status=row["status"],
            group_id=row.get("group_id", row["prompt_index"]),
            sample_index=row["sample_index"],
            prompt_index=row["prompt_index"],
            reward=row["reward"],
            components=from_json(row["components"] or "{}"),
            error=row.get("error"),
            log_probs=tuple(row["log_probs"] or ()),
            loss_mask=tuple(row.get("loss_mask", ())),
            infos=read_infos(row.get(TRAJECTORY_INFOS.name)),
        )

    @property
    def question(self) -> int:
        """Row of the benchmark, from 0."""
        return self.prompt_index

    @property
    def index(self) -> int:
        """Position among the responses to the question, from 0."""
        return self.sample_index
