"""Run slime's own examples, unchanged, from a checkout: `python slime_examples.py CHECKOUT COMMIT OUT.json [NAME…]`.

Each runs for three iterations on a tiny model that was trained to say what makes the example call its tools. Services
that an example needs are local servers of this file. `OUT.json` has what each run committed.
"""

import importlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from cairn.configs.kinds import GENERATE
from cairn.configs.loader import parse
from cairn.configs.plugins import module_of
from cairn.flows.driver.validation import setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from examples.quickstart.model import build_model, build_tokenizer
from tests.tiny_run import DirectSteps, tiny_context

ITERATIONS = 3
END = "<|im_end|>"
Pairs = Sequence[tuple[str, str]]
"""Texts that the policy reads, and what it is trained to say then."""


@dataclass(frozen=True)
class Example:
    """An example of slime, and the run around it."""

    options: dict[str, dict[str, Any]]
    rows: list[dict[str, Any]]
    says: Callable[[], Pairs]
    """Returns what the model is trained on. The example can be imported then."""
    notes: str = ""
    """What of it does not run here, and why."""
    needs: dict[str, Any] = field(default_factory=dict)


def talker(folder: Path, pairs: Pairs) -> None:
    """Write a tiny model that says the replies of `pairs`."""
    tokenizer = build_tokenizer([reply for _, reply in pairs])
    torch.manual_seed(0)
    model = build_model(tokenizer, seed=0)
    encoded = [
        [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, reply + END)]
        for prompt, reply in pairs
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(200):
        losses = []
        for prompt, reply in encoded:
            inputs = torch.tensor([prompt + reply])
            labels = torch.tensor([[-100] * len(prompt) + reply])
            loss = model(input_ids=inputs, labels=labels).loss / len(encoded)
            loss.backward()
            losses.append(loss.item() * len(encoded))
        optimizer.step()
        optimizer.zero_grad()
        if max(losses) < 5e-3:
            break
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def chat(question: str) -> str:
    """The prompt of a question, as the tiny model's template has it."""
    return f"<|im_start|>user\n{question}{END}\n<|im_start|>assistant\n"


# The examples.


def retool(slime: Path) -> Example:
    """A Python interpreter as a tool, DAPO's reward with a bonus for calls."""
    file, question, code = (
        slime / "examples/retool/generate_with_retool.py",
        "What is 6 * 7?",
        "<code>print(6*7)</code>",
    )

    def says() -> Pairs:
        module = module_of(f"{file}:generate")
        prompt = module.format_conversation_with_tools(question, tools=module.tool_registry.get_tool_specs())
        seen = f"{prompt}{code}{END}\n\n<interpreter>\nOutput:\n42\n</interpreter>\n\n"
        return [(prompt, code), (seen, "Answer: \\boxed{42}")]

    options = {
        "rollout": {"custom_generate_function_path": f"{file}:generate", "rollout_max_context_len": 1500},
        "reward": {"custom_rm_path": f"{file}:reward_func", "reward_key": "score"},
        "data": {"apply_chat_template": False, "label_key": "label"},
        "training": {"max_tokens_per_gpu": 2048, "micro_batch_size": None},
    }
    return Example(options, [{"prompt": question, "label": "42"}], says)


def search_r1(slime: Path) -> Example:
    """Search in a corpus; the example's own client of a retrieval server at port 8000, which this file runs."""
    file, question = (
        slime / "examples/search-r1/generate_with_search.py",
        "Say <answer>X</answer>. The capital of France?",
    )
    look, answer = "<think>Look.</think><search>France</search>", "<think>So.</think><answer>Paris</answer>"

    def says() -> Pairs:
        found = "\n\n<information>Doc 1(Title: France) Its capital is Paris.</information>\n\n"
        return [(chat(question), look), (chat(question) + look + found, answer)]

    options = {
        "rollout": {"custom_generate_function_path": f"{file}:generate"},
        "reward": {"custom_rm_path": f"{file}:reward_func"},
        "data": {"label_key": "reward_model"},
    }
    row = {"prompt": question, "reward_model": {"ground_truth": {"target": ["Paris"]}}}
    return Example(options, [row], says, needs={"port": 8000})


def multi_agent(slime: Path) -> Example:
    """Solvers, rewriters and a selector, whose rewards the example sets by slime's graders."""
    question, solution = "What is 2 + 2?", "Sum.</think>\\boxed{4}"

    def says() -> Pairs:
        prompts = importlib.import_module("examples.multi_agent.prompts")
        fields = {"problem_statement": chat(question), **{f"solution{number}": "\\boxed{4}" for number in range(1, 6)}}
        rewriter, selector = prompts.generate_rewriter_template(5), prompts.generate_select_template(5)
        return [
            (prompts.SOLVER_PROMPT_TEMPLATE.format(**fields), solution),
            (rewriter.format(**fields), solution),
            (selector.format(**fields), "All.</think>Judgment: 1"),
        ]

    path = "examples.multi_agent.rollout_with_multi_agents:generate_with_multi_agents"
    options = {
        "rollout": {"custom_generate_function_path": path, "rollout_max_context_len": 2000},
        "reward": {"rm_type": "deepscaler"},
        "data": {"label_key": "label"},
    }
    return Example(options, [{"prompt": question, "label": "4"}], says)


def geo3k_vlm_multi_turn(slime: Path) -> Example:
    """An environment that scores answers of calls of a tool."""
    question = "Find x."
    call = '\\boxed{5} <tool_call>{"name": "calc_score", "arguments": {"answer": "5"}}</tool_call>'

    def says() -> Pairs:
        return [(chat(question), call)]

    options = {
        "rollout": {
            "custom_generate_function_path": "examples.geo3k_vlm_multi_turn.rollout.generate",
            "custom_config": {
                "max_turns": 3,
                "rollout_interaction_env_path": "examples.geo3k_vlm_multi_turn.env_geo3k",
            },
            "rollout_max_context_len": 900,
            "rollout_max_response_len": 900,
        },
        "reward": {"rm_type": "math"},
        "data": {"label_key": "label"},
    }
    notes = "on a model of text: the engines of images take no images in later turns"
    return Example(options, [{"prompt": question, "label": "5"}], says, notes)


def dapo_reward(slime: Path) -> Example:
    """slime's file of DAPO's reward, with its own signature."""
    question = "What is 3 + 4?"
    options = {
        "reward": {
            "custom_rm_path": f"{slime}/slime/rollout/rm_hub/math_dapo_utils.py:compute_score",
            "reward_key": "score",
        },
        "data": {"label_key": "label"},
    }
    return Example(options, [{"prompt": question, "label": "7"}], lambda: [(chat(question), "Answer: 7")])


EXAMPLES: dict[str, Callable[[Path], Example]] = {
    "retool": retool,
    "search-r1": search_r1,
    "multi_agent": multi_agent,
    "geo3k_vlm_multi_turn": geo3k_vlm_multi_turn,
    "dapo_reward": dapo_reward,
}
NOT_RUN = {
    "coding_agent_rl": "its sandboxes are E2B's, a paid service, and its agents' programs are not on this machine",
    "geo3k_vlm": "a launch script without code of its own; docs/vision.md trains on images with the same options",
}
"""Examples that cannot run here, and why. Their functions are loaded and bound."""
BOUND = {"coding_agent_rl": "examples.coding_agent_rl.generate.generate"}


class _Retrieval(BaseHTTPRequestHandler):
    """The retrieval server of Search-R1, with one document."""

    calls = 0

    def do_POST(self) -> None:
        type(self).calls += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"result": [[{"contents": '"France"\nIts capital is Paris.'.replace('"', "")}]]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def serving(port: int | None) -> Iterator[None]:
    """Serve retrieval at a port of this machine, where an example needs it."""
    if port is None:
        yield
        return
    server = ThreadingHTTPServer(("127.0.0.1", port), _Retrieval)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def run(example: Example, folder: Path) -> dict[str, Any]:
    """Train for three iterations; return what was committed."""
    talker(folder / "model", example.says())
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in example.rows * 4))
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "train.jsonl")},
        "rollout": {
            "num_rollout": ITERATIONS,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 120,
        },
        "reward": {},
        "algorithm": {"use_rollout_logprobs": True},
        "training": {"lr": 1e-5, "num_threads": 1},
        "tracking": {"tensorboard_dir": None},
    }
    config = parse({name: options | example.options.get(name, {}) for name, options in values.items()})
    problems = setup_problems(config)
    if problems:
        raise SystemExit("; ".join(problems))
    with serving(example.needs.get("port")), tiny_context(str(folder / "store"), config) as (context, _):
        for number in range(ITERATIONS):
            iteration(context, DirectSteps(context), number)
        commits = [one for number in range(ITERATIONS) for one in context.ledger.commits(number)]
        samples, rewards = (
            [row for one in commits if one.step is step for row in context.read(one).to_pylist()]
            for step in (Step.ROLLOUT, Step.REWARD)
        )
    segments = [len([one for one in row["segments"] or [{"call": "0"}] if one["call"] is not None]) for row in samples]
    return {
        "iterations": sum(one.step is Step.TRAIN for one in commits),
        "samples": len(samples),
        "failed": sum(row["error"] is not None for row in [*samples, *rewards]),
        "calls_of_the_policy": sum(segments),
        "trained_tokens": sum(sum(row["loss_mask"]) for row in samples),
        "retold_tokens": sum(row.get("retold_tokens") or 0 for row in samples),
        "mean_reward": round(sum(row["reward"] or 0.0 for row in rewards) / len(rewards), 4),
        **({"requests_to_the_service": _Retrieval.calls} if example.needs else {}),
        **({"note": example.notes} if example.notes else {}),
    }


def main(checkout: str, commit: str, out: str, *names: str) -> None:
    """Run the examples of a checkout and write the results."""
    slime = Path(checkout).resolve()
    sys.path.insert(0, str(slime))  # as slime's launch scripts do with PYTHONPATH
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        del sys.modules[name]  # Cairn's own
    results: dict[str, Any] = {}
    for name in names or EXAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run(EXAMPLES[name](slime), Path(folder))
        print(f"{name}: {results[name]}", flush=True)
    if not names:
        for name, path in BOUND.items():
            GENERATE.load(path)
            print(f"{name}: loaded and bound", flush=True)
        recorded = {"slime": commit, "examples": results, "not run": NOT_RUN}
        Path(out).write_text(json.dumps(recorded, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
