"""An actor that is no engine, in a module that imports as little as its process needs."""

import os

import ray

from cairn.engines.fleet.actors import EngineActor


class Tiny(EngineActor):
    """Says where it is."""

    def health(self) -> tuple[str, str]:
        """Its node's id, and the devices that it sees."""
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]
