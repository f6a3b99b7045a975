"""Opening the grader that a configuration names, in processes or outside, with or without a memory."""

from collections.abc import Callable

from cairn.configs.kinds import REWARD, declared
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.operations import GraderRetries
from cairn.configs.schema.reward import RewardConfig
from cairn.storage.store import Store
from cairn.tasks.rewards import OUTSIDE
from cairn.tasks.rewards.grading import Grading, Rememberable
from cairn.tasks.rewards.outside import KEPT, outside
from cairn.tasks.rewards.outside.asking import OutsideGraders
from cairn.tasks.rewards.outside.reward_model import NAME, RewardModelGrader, Scorer
from cairn.tasks.rewards.pool import CHUNKS_PER_WORKER, GraderPool
from cairn.tasks.rewards.remembered import Remembered


def open_grader(
    config: RewardConfig,
    retries: GraderRetries | None = None,
    store: Store | None = None,
    reward_model: Callable[[], Scorer] | None = None,
) -> Grading:
    """The grader, which the caller closes. `store`: where its answers are kept, if they are. `reward_model`: gives the
    engine of `reward_model` when it is up; None: it computes in this process. Raises BadPlugin."""
    grader: Rememberable
    if config.custom_rm_path is not None or config.rm_type not in OUTSIDE:
        grader = GraderPool(config, retries)
    elif config.rm_type == NAME:
        grader = RewardModelGrader(config, reward_model)
    else:
        grader = OutsideGraders(outside(config), retries)
    if store is None or not keeps_answers(config):
        return grader
    calls = config.num_workers * max(CHUNKS_PER_WORKER, config.rm_concurrency)
    return Remembered(grader, store, calls, config.reward_key)


def keeps_answers(config: RewardConfig) -> bool:
    """Whether a grader's answers are kept. Raises BadPlugin where they cannot be."""
    path = config.custom_rm_path
    declares = config.rm_type in KEPT if path is None else declared(REWARD.load(path)).cached
    keeps = declares if config.cache is None else config.cache
    if keeps and config.group_rm:
        raise BadPlugin(
            "answers are kept by what is asked about one sample, and group_rm grades whole groups: set reward.cache to "
            "false, or group_rm"
        )
    return keeps
