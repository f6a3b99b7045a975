"""The grader `judge`: a language model behind an OpenAI-compatible endpoint rates a response (Zheng et al. 2023,
"Judging LLM-as-a-Judge", section 3.1, whose form of a score is the default).

The request goes to `/chat/completions`, with `reward.judge.template`. The reward is the last score in the reply. A
reply without a score, or with one out of range, fails the sample: it is no zero. The reply and its token counts are
recorded.
"""

import re
from typing import Any

from cairn.configs.schema.reward import JudgeConfig
from cairn.storage.store import canonical
from cairn.tasks.grading.outside.service import Service, source_version
from cairn.tasks.rewards.boxed import answer_of
from cairn.tasks.rewards.grader import Graded
from cairn.tasks.rewards.sample import Sample

_PLACE = re.compile(r"\{(prompt|response|answer|label)\}")


class Judge:
    """The judge. Its version covers the model and the request, but not the address: stored answers stay valid when the
    model moves."""

    name = "judge"

    def __init__(self, config: JudgeConfig, at_once: int) -> None:
        self.at_once = at_once
        self._config = config
        self._pattern = re.compile(config.pattern)
        url = f"{config.url.rstrip('/')}/chat/completions"
        self._service = Service(url, config.api_key_env, config.timeout, at_once)
        options = canonical.digest(config.model_dump(mode="json", exclude={"url", "timeout", "api_key_env"}))
        self.version = f"{source_version('judge', 'service')} {config.model} {options[:16]}"

    def question(self, sample: Sample) -> dict[str, Any]:
        """Return the body of the request. Raises ValueError where the template names the label, and the row has
        none."""
        fields = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        if "{answer}" in self._config.template:
            fields["answer"] = answer_of(sample)
        if sample.label is None and "{label}" in self._config.template:
            raise ValueError("reward.judge.template names {label}, but the row has no label")
        # Placeholders in the values stay.
        text = _PLACE.sub(lambda place: fields[place[1]] or "", self._config.template)
        system = [] if self._config.system is None else [{"role": "system", "content": self._config.system}]
        return {
            "model": self._config.model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }

    async def answer(self, question: Any) -> Graded:
        """Return the grade in the reply. Raises as `Service.post`."""
        reply = await self._service.post(question)
        try:
            content = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            return Graded(None, error="the judge's reply is not a chat completion")
        if not isinstance(content, str):
            return Graded(None, error="the judge's reply has no text")
        usage = reply.get("usage") or {}
        tokens = {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if name in usage}
        components = {"reply": content, **tokens}
        scores = [match[1] for match in self._pattern.finditer(content)]
        try:
            score = float(scores[-1])
        except (IndexError, TypeError, ValueError):
            return Graded(None, components, error=f"the judge's reply holds no score: {content[-200:]!r}")
        if not self._config.min_score <= score <= self._config.max_score:
            bounds = f"{self._config.min_score:g} to {self._config.max_score:g}"
            return Graded(None, components, error=f"the judge's score {score:g} is not in the range {bounds}")
        return Graded(score, components)

    async def close(self) -> None:
        """Close its connections."""
        await self._service.close()
