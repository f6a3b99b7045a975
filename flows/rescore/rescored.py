"""What grading a run's samples again came to: the table of samples, the figures of iterations, and both for people."""

import pyarrow as pa
import pyarrow.compute as pc

from cairn.flows.text.markdown import code, table
from cairn.storage.records import Record

PASSED_OVER = {
    "retired": "the run does not keep their tables any more",
    "redacted": "they were redacted",
    "not graded": "the run has not graded them yet",
}
"""Why samples may be passed over."""

HEADER = ("iteration", "samples", "mean before", "mean after", "changed", "failed before", "failed after")

RESCORED = pa.schema(
    [
        pa.field("iteration", pa.int64(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("reward_before", pa.float32()),  # null: failed
        pa.field("reward_after", pa.float32()),  # null: failed
        pa.field("error_after", pa.string()),
        pa.field("grader", pa.string(), nullable=False),  # the one that graded now …
        pa.field("grader_version", pa.string(), nullable=False),  # … and its version
    ]
)
"""A row a sample."""


class Figures(Record):
    """Of the samples of an iteration, or of all. A mean is over the samples that have a reward; None if none has."""

    samples: int
    changed: int
    """Samples whose reward is another now; those that fail now or do not fail any more are among them."""
    mean_before: float | None
    mean_after: float | None
    failed_before: int
    failed_after: int

    @classmethod
    def of(cls, rows: pa.Table) -> "Figures":
        """Those of a table RESCORED."""
        before, after = rows["reward_before"], rows["reward_after"]
        return cls(
            samples=rows.num_rows,
            changed=sum(one != other for one, other in zip(before.to_pylist(), after.to_pylist(), strict=True)),
            mean_before=pc.mean(before).as_py(),
            mean_after=pc.mean(after).as_py(),
            failed_before=before.null_count,
            failed_after=after.null_count,
        )


class Rescored(Record):
    """What the rewards of a run would have been."""

    run: str
    grader: str
    grader_version: str
    iterations: dict[int, Figures]
    overall: Figures
    passed_over: dict[str, int]
    """Samples by the reason, see PASSED_OVER."""

    def sentences(self) -> list[str]:
        """On what was passed over."""
        return [_passed_over(count, PASSED_OVER[why]) for why, count in self.passed_over.items()]

    def conclusion(self) -> str:
        """All of it in one sentence."""
        all_, own = self.overall, f"{self.grader} {self.grader_version}"
        return (
            f"{all_.changed} of {all_.samples} samples of run {self.run} get another reward from {own}: mean "
            f"{spelled(all_.mean_before)} → {spelled(all_.mean_after)}, failed {all_.failed_before} → "
            f"{all_.failed_after}"
        )

    def lines(self) -> list[tuple[str, ...]]:
        """The cells of a table under HEADER: a line an iteration, and one for all."""
        named = [*((str(index), one) for index, one in self.iterations.items()), ("all", self.overall)]
        return [
            (
                *(name, str(one.samples), spelled(one.mean_before), spelled(one.mean_after)),
                *(str(one.changed), str(one.failed_before), str(one.failed_after)),
            )
            for name, one in named
        ]

    def markdown(self) -> str:
        """The table, and what was passed over."""
        heading = f"{code(self.run)} graded again by {code(f'{self.grader} {self.grader_version}')}"
        return "\n\n".join([heading, table(HEADER, self.lines()), *self.sentences()])


def spelled(mean: float | None) -> str:
    """A mean reward for people."""
    return "–" if mean is None else f"{mean:.4f}"


def _passed_over(count: int, why: str) -> str:
    return f"{count} samples are passed over: {why}" if count > 1 else f"1 sample is passed over: {why}"
