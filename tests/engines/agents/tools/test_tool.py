"""A tool: what is told of it, and what becomes of its calls."""

import asyncio
import pickle
import threading
import time
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

import cairn
from cairn.engines.agents.tools import processes as threads
from cairn.engines.agents.tools.errors import Reason


def run(tool: cairn.Tool, arguments: Any = None, key: str = "k") -> Any:
    return asyncio.run(tool.run({} if arguments is None else arguments, key))


def failure(tool: cairn.Tool, arguments: Any = None) -> cairn.ToolFailed:
    with pytest.raises(cairn.ToolFailed) as failed:
        run(tool, arguments)
    assert str(failed.value).startswith(f"{tool.name}: ")
    return failed.value


class Place(BaseModel):
    title: str
    floor: int = 0


@cairn.tool(kind="pure")
async def look_up(
    query: str,
    k: Annotated[int, Field(ge=1)] = 3,
    mode: Literal["all", "any"] = "any",
    place: Place | None = None,
    idempotency_key: str = "",
) -> dict[str, Any]:
    """Looks something up.

    In the books of the house.

    Args:
        query: what to look for
        k: how many
    """
    return {"query": query, "k": k, "floor": place and place.floor, "key": idempotency_key}


def test_a_model_is_told_of_it_what_signature_and_docstring_say():
    assert look_up.schema["function"]["name"] == "look_up"
    assert look_up.description == "Looks something up.\nIn the books of the house."
    parameters = look_up.parameters
    assert parameters["required"] == ["query"]
    assert parameters["properties"]["query"] == {"type": "string", "description": "what to look for"}
    assert parameters["properties"]["k"] == {"type": "integer", "minimum": 1, "default": 3, "description": "how many"}
    assert parameters["properties"]["mode"]["enum"] == ["all", "any"]
    assert set(parameters["properties"]) == {"query", "k", "mode", "place"}
    assert parameters["$defs"]["Place"]["properties"]["title"] == {"type": "string"}


def test_arguments_have_the_types_of_the_signature_when_it_is_called():
    assert run(look_up, {"query": "x", "k": "7", "place": {"title": "y", "floor": 2}}) == {
        "query": "x",
        "k": 7,
        "floor": 2,
        "key": "k",
    }


def test_the_key_is_of_the_call_and_no_argument():
    assert look_up.takes_key
    told = failure(look_up, {"query": "x", "idempotency_key": "mine"})
    assert "there is no argument idempotency_key" in str(told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "query is missing"),
        ({"query": "x", "k": 0}, "k: Input should be greater than or equal to 1"),
        ({"query": 1}, "query: Input should be a valid string"),
        ({"query": "x", "limit": 3}, "there is no argument limit (it takes query, k, mode, place)"),
        (["x"], "its arguments have to be an object, and not list"),
        ({"query": "x", "place": {}}, "place.title: Field required"),
    ],
)
def test_arguments_that_do_not_fit_are_told(arguments, told):
    failed = failure(look_up, arguments)
    assert told in str(failed)
    assert failed.reason == Reason.ARGUMENTS


def test_many_wrong_arguments_are_told_in_few_words():
    failed = failure(look_up, {"query": "x", **{f"no{n}" * 300: "y" * 10_000 for n in range(1000)}})
    assert "and 995 more" in str(failed)
    assert len(str(failed)) < 2000


def returning(value: Any, **options: Any) -> cairn.Tool:
    @cairn.tool(kind="pure", name="answer", **options)
    async def answer() -> Any:
        return value

    return answer


@pytest.mark.parametrize("value", ["text", "", None, True, 3, 2.5, [1, [None]], {"a": {"b": [1.5, "c"]}}])
def test_json_values_are_returned_as_they_are(value):
    assert run(returning(value)) == value


def test_long_texts_are_cut_and_it_is_said_by_how_much():
    assert run(returning("x" * 2_000_000, max_output=10)) == "xxxxxxxxxx\n[1,999,990 more characters left out]"


@pytest.mark.parametrize(
    ("value", "reason", "told"),
    [
        (b"bytes", Reason.TYPE, "a value of type bytes"),
        ([object()], Reason.TYPE, "a value of type object"),
        ({1: 2}, Reason.TYPE, "a key of type int"),
        (float("nan"), Reason.TYPE, "nan"),
        pytest.param(10**100_000, Reason.SIZE, "bits", id="number"),
        pytest.param(["x"] * 10**7, Reason.SIZE, "more than the 16,384 characters", id="list"),
        ({"a": "x" * 20_000}, Reason.SIZE, "more than the 16,384 characters"),
    ],
)
def test_other_results_are_failures_and_are_not_copied(value, reason, told):
    began = time.process_time()
    failed = failure(returning(value))
    assert failed.reason == reason
    assert told in str(failed)
    assert time.process_time() - began < 1


def test_a_value_that_holds_itself_is_a_failure():
    value: list[Any] = []
    value.append(value)
    assert failure(returning(value)).reason == Reason.TYPE


def test_what_a_tool_raises_is_told_by_its_name():
    @cairn.tool(kind="pure")
    async def divide(a: float, b: float) -> float:
        return a / b

    assert str(failure(divide, {"a": 1, "b": 0})) == "divide: ZeroDivisionError: float division by zero"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
def test_no_error_of_a_tool_ends_more_than_its_call(error):
    @cairn.tool(kind="pure")
    async def leave() -> None:
        raise error

    assert failure(leave).reason == Reason.RAISED


def test_a_coroutine_that_hangs_is_cancelled_and_not_waited_for():
    cancelled = []

    @cairn.tool(kind="pure", timeout=0.05)
    async def hang() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(True)
                if len(cancelled) > 1:  # at the end of the loop
                    raise

    failed = failure(hang)
    assert failed.reason == Reason.DEADLINE
    assert "longer than 0.05 s" in str(failed)
    assert cancelled


class Counter:
    """An environment: its state is that of the episode."""

    def __init__(self) -> None:
        self.count = 0

    def known(self, intent: cairn.Intent) -> Any:
        return self.count

    @cairn.tool(kind="deterministic", timeout=5)
    def add(self, number: int = 1) -> int:
        """Adds."""
        self.count += number
        return self.count

    @cairn.tool(kind="effects", reconcile=known)
    async def send(self) -> None: ...


def test_a_method_is_the_tool_of_its_instance():
    one, other = Counter(), Counter()
    assert run(one.add, {"number": 2}) == 2
    assert run(one.add) == 3
    assert (one.count, other.count) == (3, 0)
    assert set(one.add.parameters["properties"]) == {"number"}
    assert one.send.reconcile is not None
    assert one.send.reconcile(None) == 3  # type: ignore[arg-type]


def test_a_closure_runs_in_a_thread_of_its_own_and_is_left_there_when_it_is_late():
    release, threads_seen = threading.Event(), []

    @cairn.tool(kind="pure", timeout=0.05)
    def hang() -> None:
        threads_seen.append(threading.current_thread())
        release.wait(30)

    assert failure(hang).reason == Reason.DEADLINE
    assert threads_seen[0] is not threading.main_thread()
    release.set()
    threads_seen[0].join()


def test_no_more_than_so_many_threads_are_late(monkeypatch):
    monkeypatch.setattr(threads, "MOST_LATE", 2)
    release = threading.Event()

    @cairn.tool(kind="pure", timeout=0.01)
    def hang() -> None:
        release.wait(30)

    for _ in range(2):
        failure(hang)
    late = list(threads._late)
    with pytest.raises(cairn.ToolUnavailable, match="2 tool calls still run"):
        run(hang)
    release.set()
    for thread in late:
        thread.join()
    assert run(Counter().add) == 1


def test_what_is_no_tool_is_told_when_it_is_made():
    with pytest.raises(ValueError, match="use pure, deterministic or effects"):
        cairn.tool(kind="none", name="x")(lambda: 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give it a `name`"):
        cairn.tool(kind="pure")(lambda: 1)
    with pytest.raises(TypeError, match="passed by name"):
        cairn.tool(kind="pure", name="x")(lambda *args: 1)
    with pytest.raises(ValueError, match="reconcile is for tools with effects"):
        cairn.tool(kind="pure", name="x", reconcile=lambda intent: 1)(lambda: 1)

    def several() -> Any:
        yield 1

    with pytest.raises(TypeError, match="a generator"):
        cairn.tool(kind="pure")(several)


def test_failures_and_the_answer_of_reconcile_go_through_pipes():
    failed = pickle.loads(pickle.dumps(cairn.ToolFailed("x: y", Reason.DIED)))
    assert (str(failed), failed.reason) == ("x: y", Reason.DIED)
    assert pickle.loads(pickle.dumps(cairn.NOT_DONE)) is cairn.NOT_DONE


def test_the_tasks_of_a_tool_are_known_as_the_episodes_and_not_counted():
    from cairn.engines.agents.episodes.recorder import begin_sample, next_call, outside_code, sample_of, task_factory

    @cairn.tool(kind="pure")
    async def fan_out() -> int:
        task = asyncio.current_task()
        assert task is not None
        assert sample_of(task) == (0, 1), "whom the watchdog blames"
        with pytest.raises(RuntimeError, match="cannot call the context"):
            next_call()
        return sum(await asyncio.gather(*(asyncio.sleep(0, n) for n in range(3))))

    async def episode() -> str:
        begin_sample((0, 1))
        with outside_code():
            assert await fan_out.run({}, "k") == 3
        return await asyncio.create_task(child())

    async def child() -> str:
        return next_call()

    with asyncio.Runner() as runner:
        runner.get_loop().set_task_factory(task_factory)
        assert runner.run(episode()) == "t0.0"
