"""External inputs of a run, outside its ledger: data, tokenizer, graders, and the digests of all of them."""

import hashlib
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cairn.configs.errors import ConfigError
from cairn.configs.kinds import GENERATE, user_code, written_for_slime
from cairn.configs.plugins import BadPlugin, load_callable
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.schema.run import RunConfig
from cairn.configs.view import Reader, view
from cairn.engines.models.files import folder_digest
from cairn.engines.models.tokenizers import load_tokenizer, stop_clock
from cairn.engines.processes.fingerprint import cpu_model, installed
from cairn.flows.driver.trust import require_trusted
from cairn.flows.driver.validation import longest_prompt, setup_problems
from cairn.flows.events import Event
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Environment
from cairn.storage.store import canonical
from cairn.storage.store.store import Store
from cairn.tasks.data.drawing import MixedData
from cairn.tasks.data.opening import Data, open_data, search_corpus, template_tools
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.plugin_sources import defining_file_digest, digest_of_all, source_digest
from cairn.tasks.grading.graders import row_check
from cairn.tasks.grading.opening import ReturnedRewards, grader_args, open_grader
from cairn.tasks.grading.outside.reward_model import Scorer
from cairn.tasks.grading.reward import reward
from cairn.tasks.rewards.grader import Grading

if TYPE_CHECKING:
    from cairn.engines.fleet.fleet import Fleet

DRIVER = ("numpy", "pyarrow", "tokenizers", "transformers", "math-verify", "latex2sympy2-extended", "sympy", "prefect")
"""Packages that determine the results of the driver's steps and graders."""


@dataclass(frozen=True)
class Sources:
    """External inputs of a run, outside its ledger."""

    tokenizer: Any
    data: Data
    benchmarks: dict[str, PromptData]
    digests: dict[str, str]
    """Digests of all external inputs, including models and user code; the run's manifest fixes them."""

    @classmethod
    def open(
        cls,
        config: RunConfig,
        recorded: Mapping[str, str] | None = None,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> "Sources":
        """Open the inputs that a configuration names. `recorded`: stored digests of the run's inputs, see
        `folder_digest`. `note` is called with a sentence on each option without effect.

        Raises ConfigError, BadModel, BadData and BadPlugin.
        """
        problems = setup_problems(config, note)
        if problems:
            raise ConfigError(problems)
        tokenizer = load_tokenizer(config.model.path)
        data = open_data(config, tokenizer, row_check(config.reward))
        benchmarks = {
            b.name: PromptData.open(
                b, b.path, tokenizer, row_check(config.reward.of(b.rm_type)), template_tools(config.rollout)
            )
            for b in config.eval.benchmarks
        }
        for benchmark in benchmarks.values():
            benchmark.require_all()
        return cls(tokenizer, data, benchmarks, input_digests(config, data, benchmarks, recorded or {}))

    def context(
        self,
        config: RunConfig,
        ledger: Ledger,
        fleet: "Callable[[], Fleet]",
        graders: dict[str | None, Grading],
        emit: Callable[[Event], None],
        recipe: RunConfig | None = None,
    ) -> RunContext:
        """Return a live run context with these inputs. The chat template's clock is fixed to the time when the run was
        created. `recipe`: the recipe, where the user passed one."""
        stop_clock(self.tokenizer, ledger.manifest.created_at)
        return RunContext(
            config,
            ledger,
            fleet=fleet,
            tokenizer=self.tokenizer,
            data=self.data,
            max_prompt_len=longest_prompt(config),
            benchmarks=self.benchmarks,
            graders=graders,
            environment=environment(),
            emit=emit,
            trusted=partial(require_trusted, store=ledger.store, recipe=recipe, of=f" of {ledger.run}"),
        )


def input_digests(
    config: RunConfig,
    data: Data,
    benchmarks: Mapping[str, PromptData],
    recorded: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return digests of all external inputs of a run; its manifest fixes them. `recorded`: see `folder_digest`."""
    digests = {"data": data.fingerprint}
    if isinstance(data, MixedData):
        digests |= {f"data.mixture.{name}": fingerprint for name, fingerprint in data.fingerprints.items()}
    folders = dict(config.model.folders)
    if config.rollout.model_path is not None:
        folders["rollout_model"] = config.rollout.model_path
    if config.reward.reward_model is not None:
        folders["reward_model"] = config.reward.reward_model.path
    if config.reward.custom_rm_model_path is not None:
        folders["reward_model"] = config.reward.custom_rm_model_path
    digests |= {name: folder_digest(Path(path), recorded.get(name)) for name, path in folders.items()}
    if config.model.teacher_url is not None:  # its weights cannot be read
        digests["teacher_model"] = canonical.digest({"served": config.model.teacher_name})
    digests["eval"] = canonical.digest({name: benchmark.fingerprint for name, benchmark in benchmarks.items()})
    if (corpus := search_corpus(config.rollout)) is not None:
        digests["search"] = _file_digest(corpus)
    for option, paths in user_code(config).items():
        digests[option] = digest_of_all(defining_file_digest(load_callable(path)) for path in paths)
        digests[f"{option}:modules"] = digest_of_all(map(source_digest, paths))
    return digests


def _file_digest(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise BadPlugin(f"the corpus of the tool 'search' cannot be read ({error}): correct its path") from error


def open_graders(
    config: RunConfig,
    stack: ExitStack,
    store: Store | None = None,
    reward_model: Callable[[], Scorer] | None = None,
) -> dict[str | None, Grading]:
    """Return graders by name: that of the training samples under None, those of the benchmarks under their names.

    `store`: cache of responses of paid services. `reward_model`: see `open_grader`.
    """
    reader = Reader("the grader", "`reads` of reward in cairn.tasks.grading.reward", reward.reads)

    for_slime = written_for_slime(GENERATE.load(config.rollout.custom_generate_function_path))
    tokenizer = cache(partial(load_tokenizer, config.model.path))

    def opened(own: RewardConfig) -> Grading:
        grader = open_grader(view(own, reader, "reward"), config.retry.grader, store, reward_model, grader_args(config))
        stack.callback(grader.close)
        return ReturnedRewards(grader, tokenizer) if for_slime else grader

    graders: dict[str | None, Grading] = {None: opened(config.reward)}
    for benchmark in config.eval.benchmarks:
        own = config.reward.of(benchmark.rm_type)
        graders[benchmark.name] = graders[None] if own == config.reward else opened(own)
    return graders


def environment() -> Environment:
    """Return the environment of the driver and its graders, as far as it affects bits; engines report their own."""
    return Environment(device=cpu_model(), threads=1, host=platform.node(), versions=installed(DRIVER))
