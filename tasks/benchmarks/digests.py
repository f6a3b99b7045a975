"""What a benchmark's result is a result of: equal digests, equal question."""

import hashlib

from cairn.configs.digest import canonical_json
from cairn.configs.schema.benchmark import Benchmark
from cairn.configs.schema.reward import RewardConfig
from cairn.tasks.rewards import NamedGrader, get_grader


def benchmark_digests(benchmark: Benchmark, grader: NamedGrader, fingerprint: str) -> dict[str, str]:
    """sha256, in hex, of each part: `prompt` (with the columns it takes), `sampling`, `grader` (with the version of its
    code) and `source` (`fingerprint`, that of the rows wherever they lie, and the slice of them)."""
    source = benchmark.source.data or ""
    slice = source[source.rfind("@[") :] if source.endswith("]") and "@[" in source else ""
    parts = {
        "prompt": [benchmark.prompt.model_dump(mode="json"), benchmark.columns.model_dump(mode="json")],
        "sampling": benchmark.sampling.model_dump(mode="json"),
        "grader": [benchmark.grader.model_dump(mode="json"), grader.version],
        "source": [fingerprint, slice],
    }
    return {name: hashlib.sha256(canonical_json(part)).hexdigest() for name, part in parts.items()}


def grader_config(benchmark: Benchmark) -> RewardConfig:
    """What a grader pool is made from."""
    name, timeout = benchmark.grader.name, benchmark.grader.timeout
    own = "." in name
    if own:
        return RewardConfig(rm_timeout=timeout, custom_rm_path=name)
    return RewardConfig(rm_timeout=timeout, rm_type=name, rm_type_key=None)


def benchmark_grader(benchmark: Benchmark) -> NamedGrader:
    """Its grader. Raises BadPlugin if there is none of that name."""
    return get_grader(grader_config(benchmark))
