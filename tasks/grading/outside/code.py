"""The grader `code`: a program is right if it passes the row's hidden tests, each in a sandbox of its own.

The program is the last block between ``` fences behind the thoughts, or the whole answer if there is no block. The
row's metadata has `tests`, a list or its JSON, as in APPS and LiveCodeBench:

| a test | passes where |
|---|---|
| `{"input": "1 2\\n", "output": "3\\n"}` | the program reads the input and prints the output |
| the same, with `fn_name` in the metadata | the function of that name returns the value |
| `{"assert": "f(2) == 4"}`, or a text, `assert f(2) == 4` | the statement, after the program, does not raise |

Spaces at line ends and empty lines at the end of an output do not count. A function may be a method of a class
`Solution`; its value and its arguments, a list or one a line, are JSON. `tests` may also be a mapping of `inputs`,
`outputs` and `fn_name`. APPS writes the value of a function as a list with it, `[3]` for 3: so a list of one value also
means that value. In verl and LiveCodeBench any list means its first value. The first test that failed, and its reason,
are recorded.

A program never sees what it should print or return. It could read an assertion, which runs in the same interpreter.
"""

import json
import re
import secrets
from typing import Any

from cairn.configs.schema.reward import CodeConfig
from cairn.engines.processes import bounds, bubblewrap, sandbox
from cairn.engines.processes.bubblewrap import Confined
from cairn.engines.processes.sandbox import LOST, Ran, Sandbox, SandboxFailed
from cairn.engines.types.errors import GraderUnavailable
from cairn.storage.store import canonical
from cairn.tasks.grading.outside.service import source_version
from cairn.tasks.rewards.boxed import answer_of
from cairn.tasks.rewards.grader import Graded
from cairn.tasks.rewards.sample import Sample

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_ASSERTS = """
import json as _json, sys as _sys
_given = _json.loads(_sys.stdin.read())
_names = {"__name__": "program"}
exec(compile(_given["program"], "program.py", "exec"), _names)
exec(compile(_given["test"], "test.py", "exec"), _names)
_sys.stdout.flush()
print(_given["passed"])
"""
_CALLS = """
import json as _json, sys as _sys
_given = _json.loads(_sys.stdin.read())
_names = {"__name__": "program"}
exec(compile(_given["program"], "program.py", "exec"), _names)
_function = _names.get(_given["fn_name"])
if _function is None:
    _function = getattr(_names["Solution"](), _given["fn_name"])
_found = _function(*_given["arguments"])
_sys.stdout.flush()
print(_given["passed"] + _json.dumps(_found))
"""


class Code:
    """A sandboxed test runner. The tests of a sample run one after the other, several samples concurrently."""

    name = "code"

    def __init__(self, config: CodeConfig) -> None:
        """Open the sandbox. Raises BadPlugin where this machine has none."""
        self.at_once = config.num_workers
        self._partial_credit = config.partial_credit
        self._sandbox = Sandbox(confined(config))
        options = canonical.digest(config.model_dump(mode="json", exclude={"bwrap", "num_workers"}))
        self.version = f"{source_version('code', sandbox, bubblewrap, bounds)} {options[:16]}"

    def question(self, sample: Sample) -> dict[str, Any]:
        """Return the program and its tests. Raises ValueError where the row has no tests."""
        return {"program": program_of(answer_of(sample)), "tests": _tests(sample.metadata)}

    async def answer(self, question: Any) -> Graded:
        """Return the share of tests passed (`partial_credit`), or whether all passed.

        Raises OSError where the machine has no room, ValueError where the sandbox of this program is lost repeatedly
        while others last, and GraderUnavailable where no sandbox starts.
        """
        passed, failed = 0, None
        for number, test in enumerate(question["tests"]):
            why = await self._why_it_failed(question["program"], test)
            if why is None:
                passed += 1
                continue
            failed = failed or {"failed_test": number, "failed_why": why}
            if not self._partial_credit:
                break
        total = len(question["tests"])
        reward = passed / total if self._partial_credit else float(passed == total)
        return Graded(reward, {"passed": passed, "tests": total, **(failed or {})})

    async def close(self) -> None:
        """Do nothing: no connection is open."""

    async def _run(self, program: bytes, stdin: bytes) -> Ran:
        try:
            ran = await self._sandbox.run(program, stdin)
        except SandboxFailed as error:
            raise GraderUnavailable(str(error)) from error
        if ran.lost:
            raise ValueError(f"code: the sandbox of this program was killed from outside {LOST} times")
        return ran

    async def _why_it_failed(self, program: str, test: dict[str, Any]) -> str | None:
        if "arguments" not in test and "assert" not in test:
            ran = await self._run(_utf8(program), _utf8(test["input"]))
            return _ended(ran) or (None if _lines(ran.output) == _lines(_utf8(test["output"])) else "wrong output")
        # The program cannot print this secret, so its own output never passes for a verdict.
        passed = secrets.token_hex(16)
        if "assert" in test:
            payload = {"program": program, "test": test["assert"], "passed": passed}
            ran = await self._run(_ASSERTS.encode(), json.dumps(payload).encode())
            return _ended(ran) or (
                None if ran.output.rstrip().endswith(passed.encode()) else "it ended before the test"
            )
        payload = {"program": program, "fn_name": test["fn_name"], "arguments": test["arguments"], "passed": passed}
        ran = await self._run(_CALLS.encode(), json.dumps(payload).encode())
        if why := _ended(ran):
            return why
        _, mark, value = ran.output.rpartition(passed.encode())
        if not mark:
            return "it ended before it returned"
        try:
            return None if json.loads(value) in _accepted_values(test["value"]) else "wrong value"
        except ValueError:
            return "it returned something else than a JSON value"


def program_of(answer: str) -> str:
    """Return the program in an answer."""
    blocks = _BLOCK.findall(answer[: answer.rfind("```") + 3])  # no block ends after the last fence
    return str(blocks[-1]) if blocks else answer


def confined(config: CodeConfig) -> Confined:
    """Return the limits of a test."""
    return Confined(
        "the grader 'code'",
        "reward.code.bwrap",
        config.bwrap,
        config.python,
        config.test_timeout,
        config.cpu_time,
        config.memory,
        config.processes,
        config.file_size,
    )


def _tests(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tests of a row in one form. Raises ValueError where there are none, or they are malformed."""
    tests, name = _value(metadata.get("tests")), metadata.get("fn_name")
    if isinstance(tests, dict):
        name = tests.get("fn_name", name)
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("code needs `inputs` and `outputs` in the row's tests, one for one")
        tests = [{"input": stdin, "output": wanted} for stdin, wanted in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, list) or not tests:
        raise ValueError("code needs `tests` in the row's metadata, but there are none")
    return [_test(test, name) for test in tests]


def _test(test: Any, name: Any) -> dict[str, Any]:
    if isinstance(test, str):
        return {"assert": test}
    if isinstance(test, dict) and isinstance(test.get("assert"), str):
        text = test["assert"]
        return {"assert": text if text.lstrip().startswith("assert") else f"assert {text}"}
    if not isinstance(test, dict) or "input" not in test or "output" not in test:
        raise ValueError("code needs each of the row's tests to have `input` and `output`, or `assert`")
    stdin, wanted = test["input"], test["output"]
    if name is None:
        if not isinstance(stdin, str) or not isinstance(wanted, str):
            raise ValueError("code needs texts as `input` and `output` of the row's tests, unless fn_name is set")
        return {"input": stdin, "output": wanted}
    arguments = [_value(line) for line in stdin.splitlines() if line.strip()] if isinstance(stdin, str) else stdin
    if not isinstance(arguments, list):
        raise ValueError(
            "code needs a list of arguments, or one argument per line, as `input` of the row's tests with fn_name"
        )
    return {"fn_name": str(name), "arguments": arguments, "value": _value(wanted)}


def _value(text: Any) -> Any:
    """Return a JSON value, parsed where it is written as a text."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _accepted_values(value: Any) -> list[Any]:
    """Return the values that are right: APPS wraps the value of a function in a list, `[3]` for 3, without a mark."""
    return [value, *value] if isinstance(value, list) and len(value) == 1 else [value]


def _ended(ran: Ran) -> str | None:
    if ran.out_of_memory:
        return "it took too much memory"
    if ran.late:
        return "it took too long"
    if ran.flooded:
        return "it printed too much"
    if ran.code:
        last = ran.errors.decode(errors="replace").strip().rpartition("\n")[2]
        return f"exit code {ran.code}: {last[:200]}"
    return None


def _lines(output: bytes) -> list[bytes]:
    return [line.rstrip() for line in output.rstrip().split(b"\n")]


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
