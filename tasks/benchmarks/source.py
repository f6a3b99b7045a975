"""Where a benchmark's rows are on this machine."""

from huggingface_hub import try_to_load_from_cache

from cairn.configs.schema.benchmark import Benchmark
from cairn.tasks.data.errors import BadData


def local_data(benchmark: Benchmark) -> str | None:
    """Path or URL of the rows: the benchmark's own `data`, else the data set's file at its revision in Hugging Face's
    cache (`HF_HOME`); None where it is not there. Fetches nothing."""
    source = benchmark.source
    if source.data is not None or source.dataset is None or source.file is None:
        return source.data
    found = try_to_load_from_cache(source.dataset, source.file, revision=source.revision, repo_type="dataset")
    return found if isinstance(found, str) else None


def require_data(benchmark: Benchmark) -> str:
    """The same. Raises BadData, with how to get them, where they are not there."""
    found = local_data(benchmark)
    if found is None:
        raise BadData(how_to_get(benchmark))
    return found


def how_to_get(benchmark: Benchmark) -> str:
    """What to do where the rows are not on this machine."""
    source = benchmark.source
    if source.dataset is None:
        return f"the benchmark {benchmark.name} names no rows: give a file with --data"
    return (
        f"the rows of {benchmark.name} are not on this machine: give a file with --data, or fetch them once with `hf "
        f"download {source.dataset} {source.file} --repo-type dataset --revision {source.revision}`"
    )
