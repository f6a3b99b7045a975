"""The tool `search`: passages of a corpus ranked by BM25 (Lucene's variant, as `bm25s` computes it).

The corpus is a JSONL or Parquet file with one passage per row. The first call builds the index and stores it next to
the file, in a folder `<file>.bm25-<digest>`. Where that is not writable, each process builds its own.
"""

import hashlib
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from cairn.configs.schema.rollout import SearchTool, ToolOptions
from cairn.engines.agents.tools.errors import ToolUnavailable
from cairn.engines.agents.tools.tool import Tool

_ANALYSIS = "1 lower-case words, English stop words"
"""Text analysis of the index, part of its digest."""


class Search:
    """Search in one corpus."""

    def __init__(self, options: SearchTool) -> None:
        self._options = options
        self._opening = threading.Lock()

    def search(self, query: str) -> str:
        """Searches a collection of texts, and returns the passages that go best with the query.

        Args:
            query: words that the passages should have
        """
        import bm25s

        index, passages = self._opened
        words = bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)
        known = [[word for word in words[0] if word in index.vocab_dict]]
        if not known[0]:
            return "nothing found"
        rows, scores = index.retrieve(known, k=min(self._options.k, len(passages)), show_progress=False, n_threads=0)
        best = [int(row) for row, score in zip(rows[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(f"[{place}] {passages[row].as_py()}" for place, row in enumerate(best, 1)) or "nothing found"

    def prepare(self) -> None:
        """Build the index, or load it. Raises ToolUnavailable."""
        with self._opening:
            _ = self._opened

    @cached_property
    def _opened(self) -> tuple[Any, Any]:
        """The index and the passages."""
        try:
            import bm25s
        except ImportError:
            raise ToolUnavailable("search: it needs bm25s: pip install 'cairn-rl[search]'") from None
        file = Path(str(self._options.corpus)).expanduser()
        try:
            passages = _passages(file, self._options)
            digest = hashlib.sha256(f"{_ANALYSIS} {bm25s.__version__}".encode())
            for passage in passages:
                digest.update(passage.as_py().encode() + b"\0")
        except Exception as error:  # the library raises exceptions of its own, and so do the codecs below it
            raise ToolUnavailable(f"search: the corpus {file} cannot be read: {error}") from error
        folder = file.with_name(f"{file.name}.bm25-{digest.hexdigest()[:16]}")
        if not folder.is_dir():
            index = bm25s.BM25()
            words = bm25s.tokenize(passages.to_pylist(), stopwords="en", show_progress=False)
            index.index(words, show_progress=False)
            with suppress(OSError):
                _save(index, folder)
            return index, passages
        return bm25s.BM25.load(str(folder), mmap=True), passages


def tool(options: ToolOptions) -> Tool:
    """Return the tool of a run. Raises BadPlugin where no corpus is configured."""
    from cairn.configs.plugins import BadPlugin

    if options.search.corpus is None:
        raise BadPlugin("the tool 'search' needs a corpus: set rollout.tool_options.search.corpus to its file")
    own = Search(options.search)
    return Tool(
        own.search,
        kind="pure",
        timeout=options.search.timeout,
        max_output=options.search.max_output,
        prepare=own.prepare,
    )


def _passages(file: Path, options: SearchTool) -> Any:
    """Return one text per row, title first. Raises the library's errors."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        table = pq.read_table(file)
    else:
        import pyarrow.json as pj

        table = pj.read_json(file)
    for key in (options.text_key, options.title_key):
        if key is not None and key not in table.column_names:
            raise KeyError(f"it has no column {key!r}")
    texts = pc.fill_null(table[options.text_key].cast(pa.string()), "")
    if options.title_key is not None:
        titles = pc.fill_null(table[options.title_key].cast(pa.string()), "")
        texts = pc.binary_join_element_wise(titles, texts, "\n")
    if len(texts) == 0:
        raise ValueError("it has no row")
    return texts.combine_chunks()


def _save(index: Any, folder: Path) -> None:
    """Store the index atomically: several processes may store it at the same time."""
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        index.save(str(made), show_progress=False)
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
