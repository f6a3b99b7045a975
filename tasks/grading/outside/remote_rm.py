"""The grader `remote_rm`: `{prompt, response, label}` is posted to `reward.rm_url`, and the reply is the reward.

The reply is a number, or a mapping with the number under `reward.reward_key`; the mapping's other entries are recorded.
slime: `remote_rm`.
"""

from collections.abc import Mapping
from typing import Any

from cairn.configs.schema.reward import RewardConfig
from cairn.storage.store import canonical
from cairn.tasks.grading.outside.service import Service, source_version
from cairn.tasks.grading.worker import finite
from cairn.tasks.rewards.grader import Graded
from cairn.tasks.rewards.sample import Sample


class RemoteRM:
    """A reward service at an address. Its code is unknown here: the version covers the address and
    `reward.reward_key`."""

    name = "remote_rm"

    def __init__(self, config: RewardConfig) -> None:
        assert config.rm_url is not None
        self.at_once = config.rm_concurrency
        self._reward_key = config.reward_key
        self._service = Service(config.rm_url, config.rm_api_key_env, config.rm_timeout, config.rm_concurrency)
        options = canonical.digest({"url": config.rm_url, "reward_key": config.reward_key})
        self.version = f"{source_version('remote_rm', 'service')} {options[:16]}"

    def question(self, sample: Sample) -> dict[str, Any]:
        """Return the body of the request."""
        return {"prompt": sample.prompt, "response": sample.response, "label": sample.label}

    async def answer(self, question: Any) -> Graded:
        """Return the grade in the reply. Raises as `Service.post`."""
        reply = await self._service.post(question)
        try:
            if not isinstance(reply, Mapping):
                return Graded(finite(reply))
            if self._reward_key not in reply:
                raise ValueError(f"the service's reply has no {self._reward_key!r}")
            components = {name: value for name, value in reply.items() if name != self._reward_key}
            return Graded(finite(reply[self._reward_key]), components or None)
        except (TypeError, ValueError) as error:
            return Graded(None, error=f"the service at reward.rm_url returned no reward: {error}")

    async def close(self) -> None:
        """Close its connections."""
        await self._service.close()
