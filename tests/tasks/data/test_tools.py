"""The tools of a run: what its prompts, its episodes and its digests have of them."""

import re
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.data import RowFormat
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver.sources import input_digests
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.data.opening import template_tools
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.durable.context import RunContext
from cairn.tasks.generation.generation import generate_function
from tests.engines.agents.generation.chat import chat_tokenizer
from tests.mistakes import mistakes
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

OWN = '''
import cairn
from cairn.engines.agents.generation import tool_calls
from tests.mistakes import mistakes


@cairn.tool(kind="pure")
def twice(x: int) -> int:
    """Twice a number."""
    return 2 * x


async def generate(ctx, sample):
    found = [await ctx.call("calculator", {"expression": "6 * 7"}), await ctx.call("twice", {"x": 4})]
    try:
        await ctx.call("twice", {"x": "y"})
    except cairn.ToolFailed as failed:
        found.append(failed.reason)
    assert found == ["42", 8, "arguments"]
    return await tool_calls.generate(ctx, sample)
'''


def with_tools(assets: Path, folder: Path, generate: str | None = None, **rollout: Any) -> RunConfig:
    (folder / "own.py").write_text(OWN)
    options = {
        "custom_generate_function_path": generate or f"{folder / 'own.py'}:generate",
        "tools": ["calculator", f"{folder / 'own.py'}:twice"],
        "num_rollout": 1,
        **rollout,
    }
    return tiny_config(assets, rollout=options)


def calls_of(run: RunContext) -> list[tuple[str, Any, Any]]:
    calls, _ = run.calls(run.committed(0, Step.ROLLOUT, "00-000")) or (None, None)
    assert calls is not None
    return [(row["name"], row["result"], row["error"]) for row in calls.to_pylist() if row["kind"] == "tool"]


@pytest.mark.slow
def test_episodes_call_the_tools_of_their_run_by_name(tiny_assets, tmp_path):
    config = with_tools(tiny_assets, tmp_path, tool_call_format="tags")
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        found = calls_of(run)
        assert set(found) == {
            ("calculator", '"42"', None),
            ("twice", "8", None),
            ("twice", None, found[2][2]),
        }
        assert "twice: x: Input should be a valid integer" in found[2][2]
        (tmp_path / "own.py").write_text(OWN.replace("2 * x", "3 * x"))
        with pytest.raises(BadPlugin, match="was changed while the run used it"):
            generate_function(run)


def test_prompts_tell_the_model_of_the_tools_by_its_template(tiny_assets, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "six", "label": "6"}\n')
    config = with_tools(tiny_assets, tmp_path)
    tools = template_tools(config.rollout)
    assert tools is not None
    row = PromptData.open(RowFormat(), str(file), chat_tokenizer(), tools=tools).row(0)
    assert '"name": "twice", "description": "Twice a number."' in row.prompt_text
    assert row.metadata is None
    file.write_text('{"prompt": "six", "label": "6", "tools": [{"name": "of the row"}]}\n')
    row = PromptData.open(RowFormat(tool_key="tools"), str(file), chat_tokenizer(), tools=tools).row(0)
    assert "of the row" in row.prompt_text
    assert "twice" not in row.prompt_text
    assert template_tools(with_tools(tiny_assets, tmp_path, "tool_calls", tool_call_format="tags").rollout) is None


def test_the_corpus_of_search_counts_in_what_a_run_is_made_from(tiny_assets, tmp_path):
    corpus = tmp_path / "passages.jsonl"
    rollout = {"tools": ["search"], "tool_options": {"search": {"corpus": str(corpus)}}}
    config = with_tools(tiny_assets, tmp_path, "tool_calls", **rollout)

    class Rows:
        fingerprint = "of the data"

    def digest() -> str:
        return input_digests(config, Rows(), {})["search"]  # type: ignore[arg-type]

    with pytest.raises(BadPlugin, match="the corpus of the tool 'search' cannot be read"):
        digest()
    corpus.write_text('{"text": "a"}\n')
    before = digest()
    corpus.write_text('{"text": "b"}\n')
    assert digest() != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tools": ["calculator"]},
            "rollout.tools has no effect while rollout.custom_generate_function_path is single_turn",
        ),
        (
            {"tool_options": {"search": {"k": 4}}},
            r"rollout.tool_options.search.k \(4\) has no effect while rollout.tools is \(\)",
        ),
        (
            {"max_turns": 3},
            r"max_turns \(3\) has no effect while rollout.custom_generate_function_path is single_turn and no function "
            "of yours generates, grades or filters samples; set rollout",
        ),
        ({"rollout_max_context_len": 99}, r"rollout_max_context_len \(99\) has no effect while"),
        ({"custom_generate_function_path": "tool_calls"}, "tools names none"),
    ],
)
def test_options_that_nothing_would_read_are_said(options, message):
    assert re.search(message, mistakes(rollout=options))
