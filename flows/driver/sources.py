"""What a run reads from outside its ledger: data, tokenizer, graders, and the digests of all of it."""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.configs.errors import ConfigError
from cairn.configs.kinds import user_code
from cairn.configs.plugins import load_callable
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.schema.run import RunConfig
from cairn.configs.view import Reader, view
from cairn.engines.fingerprint import cpu_model, installed
from cairn.engines.models import check_model_folder, context_length, folder_digest
from cairn.flows.driver.validation import load_tokenizer, setup_problems
from cairn.flows.events import Event
from cairn.storage import canonical
from cairn.storage.commits import Environment
from cairn.storage.ledger import Ledger
from cairn.storage.records import FORMAT
from cairn.tasks.context import RunContext
from cairn.tasks.data import PromptData
from cairn.tasks.plugin_sources import defining_file_digest, source_digest
from cairn.tasks.reward import reward
from cairn.tasks.rewards.pool import GraderPool

if TYPE_CHECKING:
    from cairn.engines.fleet.fleet import Fleet

DRIVER = ("numpy", "pyarrow", "tokenizers", "transformers", "math-verify", "latex2sympy2-extended", "sympy", "prefect")
"""Packages that the steps of the driver and its graders rest on."""


@dataclass(frozen=True)
class Sources:
    """What a run reads from outside its ledger."""

    tokenizer: Any
    data: PromptData
    benchmarks: dict[str, PromptData]
    digests: dict[str, str]
    """Of all of it, and of models and user code; the run's manifest fixes them."""

    @classmethod
    def open(cls, config: RunConfig, began: int = FORMAT) -> "Sources":
        """`began`: format of the run's manifest. Raises ConfigError, BadModel, BadData and BadPlugin."""
        problems = setup_problems(config, began)
        if problems:
            raise ConfigError(problems)
        tokenizer = load_tokenizer(config.model.path)
        data = PromptData.open(config.data, config.data.path, tokenizer)
        benchmarks = {b.name: PromptData.open(b, b.path, tokenizer) for b in config.eval.benchmarks}
        for benchmark in benchmarks.values():
            benchmark.require_all()
        return cls(tokenizer, data, benchmarks, input_digests(config, data, benchmarks))

    def context(
        self,
        config: RunConfig,
        ledger: Ledger,
        fleet: "Callable[[], Fleet]",
        graders: dict[str | None, GraderPool],
        emit: Callable[[Event], None],
    ) -> RunContext:
        """A live run that reads from here."""
        return RunContext(
            config,
            ledger,
            fleet=fleet,
            tokenizer=self.tokenizer,
            data=self.data,
            max_prompt_len=config.rollout.rollout_max_prompt_len or longest_prompt(config),
            benchmarks=self.benchmarks,
            graders=graders,
            environment=environment(),
            emit=emit,
        )


def longest_prompt(config: RunConfig) -> int:
    """Longest prompt, in tokens, that leaves room in the context for the longest response."""
    return context_length(check_model_folder(config.model.path)) - config.rollout.rollout_max_response_len


def input_digests(config: RunConfig, data: PromptData, benchmarks: Mapping[str, PromptData]) -> dict[str, str]:
    """Digests of everything that a run reads from outside its ledger; its manifest fixes them."""
    digests = {"data": data.fingerprint}
    digests |= {name: folder_digest(Path(path)) for name, path in config.model.folders.items()}
    digests["eval"] = canonical.digest({name: benchmark.fingerprint for name, benchmark in benchmarks.items()})
    for option, paths in user_code(config).items():
        digests[option] = _one([defining_file_digest(load_callable(path)) for path in paths])
        digests[f"{option}:modules"] = _one([source_digest(path) for path in paths])
    return digests


def _one(digests: Sequence[str]) -> str:
    """Of an option of a list's members there may be several."""
    return digests[0] if len(digests) == 1 else canonical.digest(list(digests))


def open_graders(config: RunConfig, stack: ExitStack) -> dict[str | None, GraderPool]:
    """The grader of the training samples under None, those of the benchmarks under their names."""
    reader = Reader("the grader", "`reads` of reward in cairn.tasks.reward", reward.reads)

    def opened(own: RewardConfig) -> GraderPool:
        return stack.enter_context(GraderPool(view(own, reader, "reward"), config.retry.grader))

    graders: dict[str | None, GraderPool] = {None: opened(config.reward)}
    for benchmark in config.eval.benchmarks:
        own = config.reward
        if benchmark.rm_type is not None:
            own = own.model_copy(update={"rm_type": benchmark.rm_type, "custom_rm_path": None})
        same = own == config.reward
        graders[benchmark.name] = graders[None] if same else opened(own)
    return graders


def environment() -> Environment:
    """Where the driver and its graders compute, as far as it changes bits; engines tell their own."""
    return Environment(device=cpu_model(), threads=1, host=platform.node(), versions=installed(DRIVER))
