"""Graders that ask by HTTP, against a real server."""

import functools
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.operations import GraderRetries
from cairn.configs.schema.reward import RewardConfig
from cairn.engines.types.errors import GraderFailed, GraderUnavailable
from cairn.storage.opening import open_store
from cairn.tasks.grading.graders import get_grader
from cairn.tasks.grading.opening import open_grader
from cairn.tasks.rewards.grader import Graded
from cairn.tasks.rewards.sample import Sample
from tests.tasks.grading.outside.service import chat_completion, serving

QUICK = GraderRetries(retries=3, retry_delay_seconds=0.01)


def sample(response: str = "18", label: str | None = "18", prompt: str = "3 * 6 =") -> Sample:
    return Sample(response, label, prompt=prompt)


def graded(config: RewardConfig, samples: list[Sample], store: object = None) -> list[Graded]:
    grader = open_grader(config, QUICK, store)
    try:
        return grader.grade(samples)
    finally:
        grader.close()


def judge(url: str, /, **options) -> RewardConfig:
    options = {"url": f"{url}/v1", "model": "wise"} | options
    return RewardConfig.model_validate({"rm_type": "judge", "judge": options})


def test_a_service_is_sent_prompt_response_and_label_and_its_reply_is_the_reward():
    with serving(lambda body: 0.5 if body["response"] == "a" else {"score": 2, "why": "long"}) as service:
        config = RewardConfig(rm_type="remote_rm", rm_url=f"{service.url}/rm", reward_key="score")
        found = graded(config, [sample("a"), sample("b", None)])
    assert found == [Graded(0.5), Graded(2.0, {"why": "long"})]
    assert {"prompt": "3 * 6 =", "response": "b", "label": None} in service.requests


def test_a_reply_that_is_no_reward_fails_its_sample_alone():
    replies = {"none": {"reward": None}, "nan": {"reward": "nan"}, "text": "good", "list": [1], "other": {"score": 1}}
    with serving(lambda body: replies.get(body["response"], 1.0)) as service:
        config = RewardConfig(rm_type="remote_rm", rm_url=service.url)
        found = graded(config, [sample(response) for response in [*replies, "fine"]])
    assert [one.reward for one in found] == [None] * len(replies) + [1.0]
    assert all("returned no reward" in str(one.error) for one in found[:-1])


def test_a_reply_that_no_reader_would_take_fails_its_sample_and_is_not_kept(tmp_path):
    def nested(deep: int) -> dict[str, Any]:
        return {"reward": 1.0, "parsed": functools.reduce(lambda inner, _: [inner], range(deep), 0)}

    store = open_store(str(tmp_path))
    with serving(lambda body: nested(int(body["response"]))) as service:
        config = RewardConfig(rm_type="remote_rm", rm_url=service.url)
        for _ in range(2):  # the second one reads what the first has kept
            found = graded(config, [sample("100"), sample("300"), sample("800")], store)
            assert [one.reward for one in found] == [1.0, None, None]
    assert "nested too deeply" in str(found[1].error)


def test_what_does_not_answer_now_is_asked_again():
    left = [503, 429, 500]

    def replies(body):
        return left.pop() if left and body["response"] == "b" else 1.0

    with serving(replies) as service:
        found = graded(RewardConfig(rm_type="remote_rm", rm_url=service.url), [sample("a"), sample("b")])
    assert [one.reward for one in found] == [1.0, 1.0]
    assert found[1].tries == 4


def test_a_sample_that_is_never_answered_fails_while_others_are():
    with serving(lambda body: 500 if body["response"] == "b" else 1.0) as service:
        found = graded(RewardConfig(rm_type="remote_rm", rm_url=service.url), [sample("a"), sample("b")])
    assert found[0].reward == 1.0
    assert found[1].reward is None
    assert "HTTP status 500" in str(found[1].error)


def test_a_service_that_answers_nobody_fails_the_step_and_no_sample():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = RewardConfig(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{silent.getsockname()[1]}", rm_timeout=0.1)
        with pytest.raises(GraderUnavailable, match=r"did not respond within 0\.1 s"):
            graded(config, [sample()])
    with pytest.raises(GraderUnavailable, match="does not respond"):
        graded(config, [sample()])


def test_a_refusal_of_one_question_fails_its_sample_and_one_of_any_ends_the_step(monkeypatch):
    with serving(lambda body: 400 if body["response"] == "b" else 1.0) as service:
        found = graded(RewardConfig(rm_type="remote_rm", rm_url=service.url), [sample("a"), sample("b")])
        assert "refuses this sample" in str(found[1].error)
        service.replies = lambda body: 401
        monkeypatch.setenv("OUR_API_KEY", "s3cret")
        config = RewardConfig(rm_type="remote_rm", rm_url=service.url, rm_api_key_env="OUR_API_KEY")
        with pytest.raises(GraderFailed, match="key in the environment variable OUR_API_KEY") as refused:
            graded(config, [sample()])
        assert "s3cret" not in str(refused.value)
        assert service.headers[-1]["Authorization"] == "Bearer s3cret"
        calls = len(service.requests)
        monkeypatch.delenv("OUR_API_KEY")
        with pytest.raises(GraderFailed, match="OUR_API_KEY is empty"):
            graded(config, [sample()])
        assert len(service.requests) == calls


def test_no_more_than_so_many_questions_are_under_way():
    with serving(lambda body: 1.0, seconds=0.02) as service:
        config = RewardConfig(rm_type="remote_rm", rm_url=service.url, rm_concurrency=4)
        graded(config, [sample(str(number)) for number in range(20)])
    assert service.most == 4


def test_closing_ends_what_is_under_way():
    with serving(lambda body: 1.0, seconds=30) as service:
        grader = open_grader(RewardConfig(rm_type="remote_rm", rm_url=service.url, rm_timeout=60), QUICK)
        import threading

        ended: list[object] = []

        def work() -> None:
            try:
                grader.grade([sample()])
            except GraderFailed as error:
                ended.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        deadline = time.monotonic() + 10
        while not service.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        grader.close()
        thread.join(10)
    assert "closed" in str(ended[0])


def test_a_judge_is_asked_by_the_template_and_its_last_score_counts():
    with serving(lambda body: chat_completion("[[3]], no: [[7.5]]", prompt_tokens=9, completion_tokens=4)) as service:
        config = judge(service.url, template='{prompt}|{answer}|{label}|{"json": {response}}', system="Be strict.")
        (found,) = graded(config, [sample("<think>17</think>{label}")])
    assert found == Graded(7.5, {"reply": "[[3]], no: [[7.5]]", "prompt_tokens": 9, "completion_tokens": 4})
    (request,) = service.requests
    assert request["model"] == "wise"
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    content = '3 * 6 =|{label}|18|{"json": <think>17</think>{label}}'  # what is put in is not a template
    assert request["messages"][1]["content"] == content
    assert (request["temperature"], request["max_tokens"]) == (0.0, 1024)


@pytest.mark.parametrize("reply", ["good", "[[11]]", "[[-1]]", "[[x]]", None])
def test_a_reply_without_a_score_fails_the_sample_and_is_no_zero(reply):
    with serving(lambda body: chat_completion(reply)) as service:
        (found,) = graded(judge(service.url), [sample()])
    assert found.reward is None
    assert "judge" in str(found.error)


def test_a_template_that_names_the_label_fails_rows_without_one_unasked():
    with serving(lambda body: chat_completion("[[1]]")) as service:
        config = judge(service.url, template="{response} {label}")
        found = graded(config, [sample(label=None), sample()])
    assert [one.reward for one in found] == [None, 1.0]
    assert len(service.requests) == 1


def test_the_version_tells_what_is_asked_and_not_where():
    one = get_grader(judge("http://a"))
    assert "wise" in one.version
    assert one.version == get_grader(judge("http://b", timeout=3.0, api_key_env="X_API_KEY")).version
    others = [{"model": "wiser"}, {"template": "{response}"}, {"temperature": 1.0}, {"pattern": "(.)"}, {"system": "s"}]
    versions = {get_grader(judge("http://a", **other)).version for other in others}
    assert len(versions | {one.version}) == len(others) + 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pattern": "[0-9]+"}, "exactly one group"),
        ({"pattern": "("}, "not a regular expression"),
        ({"template": "{prompt}"}, "neither"),
        ({"min_score": 5, "max_score": 5}, "set max_score higher"),
        ({"url": "http://user:secret@host/v1"}, "credentials"),
    ],
)
def test_a_judge_that_cannot_judge_is_refused(options, why):
    with pytest.raises(ValidationError, match=why):
        judge("http://host", **options)


def test_a_grader_without_whom_it_asks_is_refused():
    with pytest.raises(BadPlugin, match=r"set reward\.judge"):
        get_grader(RewardConfig(rm_type="judge"))
    with pytest.raises(BadPlugin, match=r"set reward\.rm_url"):
        get_grader(RewardConfig(rm_type="remote_rm"))


def test_an_answer_is_paid_for_once(tmp_path: Path):
    store = open_store(str(tmp_path))
    samples = [sample(str(number % 10)) for number in range(30)]
    with serving(lambda body: chat_completion(f"[[{len(body['messages'][0]['content']) % 10}]]")) as service:
        first = graded(judge(service.url), samples, store)
        assert len(service.requests) == 10  # equal questions share an answer
        assert graded(judge(service.url), samples, store) == first
        assert len(service.requests) == 10
        graded(judge(service.url, model="wiser"), samples, store)
        assert len(service.requests) == 20
        off = judge(service.url).model_copy(update={"cache": False})
        graded(off, samples, store)
    assert len(service.requests) == 50


def test_an_answer_without_a_score_is_kept_and_a_failure_to_answer_is_not(tmp_path: Path):
    store = open_store(str(tmp_path))
    with serving(lambda body: chat_completion("no") if "bad" in body["messages"][0]["content"] else 400) as service:
        samples = [sample("bad"), sample("refused")]
        first = graded(judge(service.url), samples, store)
        service.replies = lambda body: chat_completion("[[4]]")
        second = graded(judge(service.url), samples, store)
    assert [one.reward for one in first] == [None, None]
    assert [one.reward for one in second] == [None, 4.0]
    assert second[0].error == first[0].error


def test_answers_of_ones_own_grader_are_kept_if_it_says_so(tmp_path: Path):
    store, marks = open_store(str(tmp_path / "store")), tmp_path / "marks"
    body = "    open({!r}, 'a').write('x')\n    if response == 'bad': raise ValueError\n    return 1.0\n"
    source = "import cairn\n\n{}def grade(response, label, metadata):\n" + body.format(str(marks))
    for name, decorator, expected in (("kept", "@cairn.plugin(cached=True)\n", 3), ("asked", "", 8)):
        marks.unlink(missing_ok=True)
        (tmp_path / f"{name}.py").write_text(source.format(decorator))
        config = RewardConfig(custom_rm_path=f"{tmp_path / name}.py:grade")
        for _ in range(2):
            found = graded(config, [sample("a"), sample("a"), sample("bad"), sample("a")], store)
            assert [one.reward for one in found] == [1.0, 1.0, None, 1.0]
        assert len(marks.read_text()) == expected  # what failed is asked again


def test_a_kept_answer_is_of_the_grader_that_the_row_names_and_of_the_entry_that_is_the_reward(tmp_path: Path):
    store = open_store(str(tmp_path / "store"))
    config = RewardConfig(rm_type="exact_match", cache=True)
    rows = [replace(sample("cat"), label="cat", metadata=one) for one in ({}, {"rm_type": "f1"})]
    first = graded(config, rows, store)
    assert graded(config, rows, store) == first
    graders = [(one.grader, one.version) for one in graded(config, rows, store)]
    assert graders == [(name, get_grader(RewardConfig(rm_type=name)).version) for name in ("exact_match", "f1")]
    (tmp_path / "two.py").write_text("def grade(response, label, metadata):\n    return {'reward': 1, 'other': 2}\n")
    for key, expected in (("reward", 1.0), ("other", 2.0)):
        own = RewardConfig(custom_rm_path=f"{tmp_path / 'two.py'}:grade", cache=True, reward_key=key)
        assert [one.reward for one in graded(own, [sample("cat")], store)] == [expected]


def test_a_sample_that_no_service_answers_fails_after_a_resume_too(tmp_path: Path):
    """What was answered before the driver was killed is not asked again, and still shows that the service works."""
    store, config = open_store(str(tmp_path)), {"rm_type": "remote_rm", "rm_timeout": 5.0}
    with serving(lambda body: 500 if body["response"] == "bad" else 1.0) as service:
        own = RewardConfig(rm_url=service.url, **config)
        assert [one.reward for one in graded(own, [sample("good")], store)] == [1.0]
        found = graded(own, [sample("good"), sample("bad")], store)
    assert [one.reward for one in found] == [1.0, None]
