"""Plans beyond the plain configuration and its victims, and all plans together.

Events of a cluster (partitions, full disks, clock steps, power loss) would be plans here, with victims of their own.
"""

from cairn.storage.ledger.commits import Step
from tests.chaos.commands import COMMANDS
from tests.chaos.matrix import CI_SET, MOMENTS, STEPS, Driver, Plan, case, every_case

MIXED = Plan(
    "mixed",
    (
        Driver(
            (
                case(0, Step.REWARD, "during", "grader"),
                case(0, Step.FILTER, "uncommitted", "gc"),
                case(1, Step.ROLLOUT, "halfway", "gc"),
                case(1, Step.TRAIN, "uncommitted", "fork"),
                case(1, Step.TRAIN, "after", "driver"),
            )
        ),
        Driver(
            (
                case(0, Step.CHECKPOINT, "loading", "training"),
                case(1, Step.TRAIN, "replaying", "training"),
                case(1, Step.CHECKPOINT, "uncommitted", "gc"),
                case(2, Step.ROLLOUT, "halfway", "delete"),
                case(2, Step.FILTER, "uncommitted", "driver"),
            )
        ),
        Driver((case(2, Step.SYNC, "before", "fork"), case(3, Step.REWARD, "during", "grader"))),
    ),
    "mixed",
)
"""Recovery of buffer, critic and retained files, a second fault within it, and commands beside it."""

JOINED_PARTIAL = Plan(
    "joined-partial",
    (
        Driver((case(0, Step.ROLLOUT, "halfway", "driver"),)),
        Driver((case(1, Step.ROLLOUT, "halfway", "rollout"), case(1, Step.TRAIN, "uncommitted", "driver"))),
        Driver((case(2, Step.TRAIN, "during", "training"), case(2, Step.SYNC, "before", "driver"))),
        Driver((case(3, Step.FILTER, "after", "driver"),)),
        Driver(),
    ),
    "joined-partial",
)
"""Drivers that find the engines of those before, one of them a step ahead of the ledger, and unfinished groups."""

LAGGED = Plan(
    "lagged",
    (
        Driver((case(0, Step.ROLLOUT, "halfway", "rollout"), case(0, Step.TRAIN, "during", "driver"))),
        Driver((case(1, Step.TRAIN, "uncommitted", "driver"),)),
        Driver((case(3, Step.ROLLOUT, "halfway", "notice"),)),
        Driver((case(3, Step.TRAIN, "during", "training"),)),
    ),
    "lagged",
)
"""Each half, wherever the other is at that time; weights that are published on the way up."""

STREAMING = Plan(
    "joined-streaming",
    (
        Driver((case(0, Step.ADMIT, "uncommitted", "driver"),)),
        Driver(
            (
                case(0, Step.ROLLOUT, "during", "rollout"),
                case(0, Step.SYNC, "updating", "update"),
                case(1, Step.CHECKPOINT, "during", "training"),
                case(1, Step.SYNC, "updating", "rollout"),
                case(2, Step.SYNC, "updating", "driver"),
            )
        ),
        Driver((case(3, Step.ROLLOUT, "during", "notice"),)),
        Driver((case(3, Step.TRAIN, "uncommitted", "driver"),)),
        Driver(
            (
                case(3, Step.SYNC, "during", "training"),
                case(3, Step.EVAL, "during", "rollout"),
                case(4, Step.TRAIN, "during", "training"),
            )
        ),
    ),
    "joined-streaming",
)
"""A stream whose driver, engines and trainer are lost, also amid updates in flight, one of which its next driver finds
in an engine; each moment is one that cannot have come before."""

STREAMING_BESIDE = Plan(
    "streaming-beside",
    (
        Driver((case(0, Step.ADMIT, "before", "gc"), case(0, Step.ROLLOUT, "during", "ray"))),
        Driver(
            (
                case(0, Step.TRAIN, "before", "training"),
                case(1, Step.ROLLOUT, "uncommitted", "gc"),
                case(1, Step.FILTER, "before", "rollout"),
                case(1, Step.TRAIN, "uncommitted", "gc"),
                case(1, Step.SYNC, "before", "training"),
                case(3, Step.ADMIT, "before", "driver"),
            )
        ),
        Driver((case(3, Step.ROLLOUT, "before", "gc"), case(3, Step.TRAIN, "before", "training"))),
    ),
    "streaming",
)
"""A stream whose engines die wherever it is, all with their Ray head too, and beside which garbage is collected; its
driver dies when it has claimed an admission and not made it."""

_AMID_ROLLOUTS = (
    Driver((case(0, Step.ROLLOUT, "halfway", "driver"),)),
    Driver((case(1, Step.ROLLOUT, "halfway", "rollout"), case(1, Step.FILTER, "after", "driver"))),
    Driver((case(2, Step.ROLLOUT, "uncommitted", "driver"),)),
    Driver((case(2, Step.TRAIN, "uncommitted", "training"), case(3, Step.FILTER, "before", "driver"))),
    Driver(),
)

_AT_TRAINING = (
    Driver((case(0, Step.TRAIN, "during", "training"), case(0, Step.TRAIN, "uncommitted", "driver"))),
    Driver(
        (
            case(1, Step.TRAIN, "during", "rank"),
            case(1, Step.CHECKPOINT, "during", "rank"),
            case(2, Step.TRAIN, "after", "driver"),
        )
    ),
    Driver((case(1, Step.CHECKPOINT, "loading", "rank"), case(2, Step.TRAIN, "replaying", "rank"))),
)
"""What becomes of a training engine of several models or ranks, or of one."""

HUNG = tuple(
    Plan(configuration, (Driver((case(1, Step.TRAIN, "computing", "hung"),)),), configuration)
    for configuration in ("hung", "hung-tensor")
)
"""A rank that stops amid an update, while another one waits for it in a collective."""

FURTHER: tuple[Plan, ...] = (
    *HUNG,
    Plan(
        "graders",
        (
            Driver(
                (
                    *(case(turn, Step.REWARD, moment, "grader") for turn, moment in enumerate(MOMENTS)),
                    case(3, Step.EVAL, "during", "grader"),
                )
            ),
        ),
    ),
    Plan("four-deaths", (Driver((case(1, Step.ROLLOUT, "during", "rollout"),) * 4), Driver()), "single"),
    Plan(
        "a-death-each", (Driver(tuple(case(turn, Step.ROLLOUT, "halfway", "rollout") for turn in range(4))),), "single"
    ),
    Plan(
        "restores",
        (
            Driver((case(2, Step.TRAIN, "after", "driver"),)),
            Driver(
                (
                    case(1, Step.CHECKPOINT, "loading", "training"),
                    case(2, Step.TRAIN, "replaying", "training"),
                    case(2, Step.TRAIN, "replaying", "driver"),
                )
            ),
            Driver((case(1, Step.CHECKPOINT, "loading", "driver"),)),
            Driver((case(2, Step.TRAIN, "replaying", "ray"),)),
            Driver((case(2, Step.TRAIN, "replaying", "rollout"), case(2, Step.SYNC, "uncommitted", "driver"))),
            Driver(),
        ),
    ),
    Plan(
        "beside",
        (
            Driver(
                tuple(
                    case(index, step, moment, COMMANDS[(index + STEPS.index(step) + turn) % len(COMMANDS)])
                    for index in (0, 1)
                    for turn, moment in enumerate(MOMENTS)
                    for step in (Step.ROLLOUT, Step.FILTER, Step.TRAIN, Step.CHECKPOINT)
                )
            ),
        ),
        "retained",
    ),
    Plan(
        "retained",
        (
            Driver((case(1, Step.CHECKPOINT, "after", "driver"),)),
            Driver((case(2, Step.CHECKPOINT, "after", "driver"),)),
            Driver((case(3, Step.TRAIN, "uncommitted", "driver"),)),
            Driver((case(3, Step.CHECKPOINT, "after", "driver"),)),
            Driver(),
        ),
        "retained",
    ),
    Plan(
        "filtered",
        (
            Driver((case(0, Step.ROLLOUT, "halfway", "driver"),)),
            Driver((case(1, Step.ROLLOUT, "before", "rollout"), case(1, Step.FILTER, "uncommitted", "driver"))),
            Driver((case(2, Step.FILTER, "after", "driver"),)),
            Driver((case(2, Step.TRAIN, "during", "training"), case(3, Step.ROLLOUT, "halfway", "driver"))),
            Driver(),
        ),
        "filtered",
    ),
    Plan("partial", _AMID_ROLLOUTS, "partial"),
    Plan("cut", _AMID_ROLLOUTS, "cut"),
    Plan("critic", _AT_TRAINING, "critic"),
    Plan("ranks", _AT_TRAINING, "ranks"),
    Plan("tensor", _AT_TRAINING, "tensor"),
    Plan(
        "joined",
        (
            *(Driver((case(0, Step.TRAIN, moment, "driver"),)) for moment in MOMENTS),
            *(Driver((case(1, Step.ROLLOUT, moment, "driver"),)) for moment in MOMENTS),
            *(Driver((case(1, Step.CHECKPOINT, moment, "driver"),)) for moment in MOMENTS),
            *(Driver((case(2, Step.SYNC, moment, "driver"),)) for moment in MOMENTS),
            Driver((case(3, Step.ROLLOUT, "during", "rollout"), case(3, Step.TRAIN, "during", "training"))),
        ),
        "joined",
    ),
    Plan(
        "fork",
        (
            Driver((case(2, Step.TRAIN, "replaying", "training"),), may_give_up=True),
            Driver((case(2, Step.CHECKPOINT, "uncommitted", "driver"),)),
            Driver((case(2, Step.CHECKPOINT, "loading", "driver"),)),
            Driver((case(3, Step.TRAIN, "after", "driver"),)),
            Driver((case(3, Step.CHECKPOINT, "loading", "training"), case(4, Step.TRAIN, "during", "training"))),
        ),
        "fork",
    ),
    Plan(
        "sglang",
        (
            Driver(
                (
                    case(0, Step.ROLLOUT, "halfway", "server"),
                    case(1, Step.ROLLOUT, "halfway", "scheduler"),
                    case(1, Step.TRAIN, "during", "driver"),
                )
            ),
            Driver((case(2, Step.ROLLOUT, "halfway", "router"), case(3, Step.ROLLOUT, "halfway", "stopped"))),
        ),
        "sglang",
    ),
    Plan(
        "sglang-partial",
        (
            Driver((case(0, Step.ROLLOUT, "halfway", "scheduler"), case(1, Step.ROLLOUT, "halfway", "driver"))),
            Driver((case(2, Step.ROLLOUT, "halfway", "router"), case(2, Step.FILTER, "after", "driver"))),
            Driver((case(3, Step.ROLLOUT, "halfway", "server"),)),
        ),
        "sglang-partial",
    ),
)
"""Victims and configurations beyond the plain ones."""


CI_PLANS = (CI_SET, JOINED_PARTIAL, LAGGED, STREAMING)
"""What the tests strike."""


def whole() -> list[Plan]:
    """Everything: every step at every moment with every victim, and what goes beyond the plain configuration."""
    return [*every_case(), *FURTHER, MIXED, JOINED_PARTIAL, LAGGED, STREAMING, STREAMING_BESIDE]
