"""What a lineage is made of. None stands for what has not happened, or is not known."""

import math
from collections.abc import Mapping
from typing import Any

from cairn.storage.commits import Environment
from cairn.storage.records import Record


class Made(Record):
    """The commit that says so."""

    name: str
    """`000042/train`; `cairn verify` names commits alike."""
    iteration: int
    run: str
    """That made it: of a fork's shared iterations the parent."""
    digest: str


class Prompt(Record):
    """The row of the data set."""

    data: str
    """Path or URL of the data, as the run's configuration names it."""
    data_digest: str | None
    row: int
    """From 0."""
    epoch: int
    text: str
    label: str | None
    metadata: str | None
    tokens: int


class Weights(Record):
    """A weight version that sampled tokens of the response."""

    version: int
    state_digest: str | None = None
    """Of weights and optimizer, as the train step left them; None: the run's initial weights."""
    published_digest: str | None = None
    """Of the weights as the rollout engine had to have them."""
    made_by: Made | None = None


class Sampled(Record):
    """The response and how it came about."""

    response: str
    tokens: int
    log_prob: float | None
    """Sum over the tokens, of the rollout engine; None where the data hold the response."""
    finish_reason: str
    status: str
    error: str | None
    seed: int
    engine: str
    seconds: float
    segments: int
    weights: tuple[Weights, ...]
    """Several where it was continued after an update; none where the data hold the response."""
    model_digest: str | None
    """Of the folder of the initial weights."""
    environment: Environment
    """Of the engine."""
    made_by: Made


class Grade(Record):
    """Its reward and what gave it."""

    reward: float | None
    components: str | None
    grader: str
    grader_version: str
    sources: dict[str, str]
    """Digests of the user's grader and of the modules that it imports, by the option that names it; none for Cairn's
    own, whose version is in `environment`."""
    status: str
    error: str | None
    environment: Environment
    made_by: Made


class Judgement(Record):
    """What the filter of an iteration made of its group."""

    iteration: int
    disposition: str
    reason: str | None
    mean_reward: float | None
    std_reward: float | None
    made_by: Made


class Update(Record):
    """The train step that consumed it."""

    reward: float | None
    """As the update used it; None: it follows no rewards."""
    advantage: float | None
    """Mean over the response's tokens."""
    age: int | None
    """Of its oldest token, in publications."""
    weight_version_in: int | None
    weight_version_out: int | None
    state_digest: str | None
    published_digest: str | None
    loss: float | None
    samples: int
    """Of the batch."""
    estimated_by: Made | None
    """The advantages; None: it follows none."""
    made_by: Made


class Checkpoint(Record):
    """A restore point whose weights have seen the sample."""

    iteration: int
    run: str
    state_digest: str | None
    retired: bool
    """Retention removed its files."""


class Token(Record):
    """One token of the response."""

    position: int
    token_id: int
    segment: int
    log_prob: float | None
    """Of the rollout engine; None where the data hold the response."""
    loss_mask: int
    weight_version: int
    advantage: float | None
    returned: float | None
    age: int | None
    """When it was trained on, in publications."""
    old_log_prob: float | None
    """Under the policy before the update; None: not scored."""
    ref_log_prob: float | None
    teacher_log_prob: float | None
    value: float | None
    ratio: float | None
    """Probability under the policy before the update over that under the rollout engine."""

    @classmethod
    def of(
        cls,
        *,
        position: int,
        segment: int,
        row: Mapping[str, Any],
        trained: Mapping[str, Any],
        scores: Mapping[str, float | None],
    ) -> "Token":
        """From the token's values in the tables, by column."""
        old, sampled = scores.get("log_probs"), row["log_probs"]
        return cls(
            position=position,
            segment=segment,
            token_id=row["response_ids"],
            log_prob=sampled,
            loss_mask=row["loss_mask"],
            weight_version=row["weight_versions"],
            advantage=trained["advantages"],
            returned=trained["returns"],
            age=trained["ages"],
            old_log_prob=old,
            ref_log_prob=scores.get("ref_log_probs"),
            teacher_log_prob=scores.get("teacher_log_probs"),
            value=scores.get("values"),
            ratio=None if old is None or sampled is None else math.exp(old - sampled),
        )


class Lineage(Record):
    """Where a sample came from and what it went into."""

    run: str
    iteration: int
    """That generated it."""
    shard: str | None
    group_id: int
    sample_index: int
    prompt: Prompt
    sampled: Sampled
    grade: Grade | None
    judgements: tuple[Judgement, ...]
    update: Update | None
    checkpoints: tuple[Checkpoint, ...]
    token: Token | None
