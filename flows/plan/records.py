"""A plan as it is told."""

from cairn.storage.records import Record


class Row(Record):
    """Memory for one thing."""

    what: str
    bytes: float


class Memory(Record):
    """What stands in the memory of one device at a time, or of one machine."""

    of: str
    """Whose memory."""
    rows: tuple[Row, ...]
    capacity: float
    """Bytes that it has."""

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(row.bytes for row in self.rows)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


class ModelFacts(Record):
    """The model that is trained."""

    name: str
    source: str
    """Where its config was read."""
    architecture: str
    parameters: int
    active_parameters: int
    """That a token goes through."""
    layers: int


class CachePlan(Record):
    """Keys and values of rollout engines."""

    bytes_per_token: float
    """On each rank, of layers that look at all tokens."""
    bytes_per_sample: float
    """Of what does not grow with a sample, or no further than a window."""
    pool: float
    """Bytes for it on each rank."""
    tokens: int
    """That it has room for on an engine, in samples of the longest kind."""
    samples_longest: int
    """As long as they may be, at a time on all engines."""
    samples_mean: int
    """Of mean length."""
    at_once: int
    """That the engines generate at a time: as many as have room, are allowed, and there are."""
    asked: int
    """Samples of an iteration's first round."""


class Transfer(Record):
    """Bytes that go somewhere."""

    bytes: float
    seconds: float
    how: str


class StepTime(Record):
    """How long a step of an iteration takes."""

    step: str
    seconds: float
    source: str
    """`rates`, or the run that it was measured in."""


class Remedy(Record):
    """What would fit."""

    options: dict[str, object]
    """With the values that they would have."""
    of: str
    """Whose memory is the fullest then, of those that had too little."""
    highest: float
    """Bytes of it."""
    capacity: float


class Plan(Record):
    """What a recipe needs."""

    recipe: str
    gpu: str
    gpus: float
    machines: int
    model: ModelFacts
    memory: tuple[Memory, ...]
    cache: CachePlan | None = None
    """None where nothing is sampled, or servers run elsewhere."""
    sync: Transfer | None = None
    checkpoint: Transfer
    steps: tuple[StepTime, ...]
    overlapped: bool
    """Whether rollout and training run side by side."""
    problems: tuple[str, ...]
    """Why it cannot run whatever the memory, or has too little."""
    remedies: tuple[Remedy, ...] = ()
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems and all(memory.fits for memory in self.memory)

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        rollout = sum(step.seconds for step in self.steps if step.step == "rollout")
        rest = sum(step.seconds for step in self.steps) - rollout
        return max(rollout, rest) if self.overlapped else rollout + rest
