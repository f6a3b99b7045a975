"""What tests do with all rollout engines of a fleet at once, and runs with one engine at a time."""

from contextlib import ExitStack

from cairn.configs.schema.operations import FleetConfig
from cairn.engines.fleet.calls import map_in_threads
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.fleet.weights.transports import call_each, results, transport_of
from cairn.engines.fleet.weights.verification import verify_log_probs
from cairn.engines.rollout.base import RolloutEngine


def versions(fleet: Fleet) -> list[int | None]:
    """The weight version that each rollout engine reports."""
    return map_in_threads(fleet.rollout, lambda engine: engine.ask(RolloutEngine.get_weight_version))


def serve_all(fleet: Fleet, version: int) -> list[int | None]:
    """Have every rollout engine serve a published version; returns what they report then."""
    map_in_threads(fleet.rollout, lambda engine: fleet.weights.serve(engine, version))
    return versions(fleet)


def sync(fleet: Fleet) -> list[int | None]:
    """Publish what the trainer holds, and have every rollout engine serve it."""
    version = fleet.training.position().weight_version
    fleet.weights.publish(version, keep=2)
    return serve_all(fleet, version)


def send(fleet: Fleet, version: int, options: FleetConfig, lag: int = 0) -> None:
    """Update every rollout engine by another transport than the fleet's own."""
    mapped = all(engine.maps_gpu_memory for engine in fleet.rollout)
    transport = transport_of(options, fleet.training, load_timeout=60, maps_gpu_memory=mapped, lag=lag)
    publication = transport.store(version)
    transport.keep({version})
    engines = fleet.rollout
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.alone())
        results(engines, call_each(engines, RolloutEngine.begin_weight_update, version))
        transport.send(version, publication, engines)
        results(engines, call_each(engines, RolloutEngine.end_weight_update))


def verify(fleet: Fleet) -> None:
    """Compare every rollout engine with the trainer by log-probs. Raises WeightsDiffer."""
    for engine in fleet.rollout:
        verify_log_probs(fleet.training, engine, fleet.training._config)
