"""OpenAI's Chat Completions API."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cairn.engines.agents.capture.protocol import (
    BadRequest,
    ChatReply,
    ChatRequest,
    Message,
    refuse_other_sampling,
    strings,
    whole_number,
)
from cairn.engines.types.types import SamplingParams
from cairn.storage.store.canonical import from_json


class ChatCompletions:
    """The API `POST /v1/chat/completions`."""

    def read(self, body: Mapping[str, Any], params: SamplingParams, ignored: Collection[str]) -> ChatRequest:
        """Parse the body of a request. Raises BadRequest for what is not supported."""
        refuse_other_sampling(body, params, ignored)
        choice = body.get("tool_choice") or "auto"
        if choice not in ("auto", "none") and "tool_choice" not in ignored:
            raise BadRequest(
                f"tool_choice={choice!r} is not supported, since the run sets how tokens are drawn: use auto or none"
            )
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages has to be a list with a message")
        return ChatRequest(
            messages=tuple(_message(one, number) for number, one in enumerate(messages)),
            tools=() if choice == "none" else tuple(_tool(tool) for tool in body.get("tools") or ()),
            max_new_tokens=whole_number(body, "max_completion_tokens", "max_tokens"),
            stop=strings(body, "stop"),
            model=str(body.get("model") or "policy"),
            stream=bool(body.get("stream")),
            reports_log_probs=bool(body.get("logprobs")),
            reports_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        )

    def whole(self, asked: ChatRequest, answer: ChatReply) -> dict[str, Any]:
        """Return the response as one JSON object."""
        message = {"role": "assistant", "content": _content(answer), **_more(answer)}
        if calls := _calls(answer):
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _reason(answer),
            "logprobs": _log_probs(asked, answer),
        }
        return {**_head(asked, answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def events(self, asked: ChatRequest, answer: ChatReply) -> list[str]:
        """Return the response as server-sent events."""
        calls = [{"index": number, **call} for number, call in enumerate(_calls(answer))]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": "", **_more(answer)}]
        deltas += [{"content": answer.reply.content}] if answer.reply.content else []
        deltas += [{"tool_calls": [call]} for call in calls]
        choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        if asked.reports_log_probs:
            choices[-1]["logprobs"] = _log_probs(asked, answer)
        choices.append({"index": 0, "delta": {}, "finish_reason": _reason(answer)})
        head = _head(asked, answer, "chat.completion.chunk")
        chunks = [{**head, "choices": [choice]} for choice in choices]
        chunks += [{**head, "choices": [], "usage": _usage(answer)}] if asked.reports_usage else []
        return [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]

    def error(self, told: str, status: int, code: str | None) -> dict[str, Any]:
        """Return the error object for the message `told`."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": told, "type": kind, "param": None, "code": code}}


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content, a string or a list of text parts. Raises BadRequest for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(f"the content of {where} has to be a string or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
            raise BadRequest(f"a part of {where} is of type {kind}, and only text is read")
        texts.append(part["text"])
    return "".join(texts)


def _message(given: Any, number: int) -> Message:
    where = f"message {number}"
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise BadRequest(f"{where} has to be an object with a role")
    role = "system" if given["role"] == "developer" else given["role"]
    message: Message = {"role": role, "content": text_of(given.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if given.get(name):
            message[name] = given[name]
    if role != "assistant":
        return message
    if thoughts := given.get("reasoning_content") or given.get("reasoning"):
        message["reasoning_content"] = thoughts
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [_called(call, where) for call in calls]
    return message


def _called(call: Any, where: str) -> dict[str, Any]:
    try:
        function = call["function"]
        name, arguments = function["name"], function.get("arguments") or {}
    except (KeyError, TypeError, AttributeError):
        raise BadRequest(f"a tool call of {where} has to have a function with a name and arguments") from None
    if isinstance(arguments, str):
        with suppress(ValueError):  # the template is told what the model wrote
            arguments = from_json(arguments)
    told = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **told} if call.get("id") else told


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or "name" not in (tool.get("function") or {}):
        raise BadRequest("tools has to be a list of objects of type function, each with a function that has a name")
    return dict(tool)


def _head(asked: ChatRequest, answer: ChatReply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(time.time()), "model": asked.model}


def _content(answer: ChatReply) -> str | None:
    return answer.reply.content or (None if answer.reply.tool_calls else "")


def _more(answer: ChatReply) -> dict[str, Any]:
    return {} if answer.reply.thoughts is None else {"reasoning_content": answer.reply.thoughts}


def _calls(answer: ChatReply) -> list[dict[str, Any]]:
    return [
        {
            "id": answer.call_id(number),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for number, call in enumerate(answer.reply.tool_calls)
    ]


def _reason(answer: ChatReply) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.reply.tool_calls else "stop"


def _log_probs(asked: ChatRequest, answer: ChatReply) -> dict[str, Any] | None:
    if not asked.reports_log_probs:
        return None
    log_probs = answer.exchange.segment.log_probs
    assert log_probs is not None
    return {
        "content": [
            {"token": token, "logprob": float(log_prob), "bytes": [*token.encode()], "top_logprobs": []}
            for token, log_prob in zip(answer.tokens, log_probs, strict=True)
        ],
        "refusal": None,
    }


def _usage(answer: ChatReply) -> dict[str, Any]:
    given, sampled = len(answer.exchange.prompt_ids), len(answer.exchange.segment)
    return {
        "prompt_tokens": given,
        "completion_tokens": sampled,
        "total_tokens": given + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.exchange.segment.cached_tokens},
    }
