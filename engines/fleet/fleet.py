"""The fleet: every engine of a run as Ray actors, placed, named, watched and replaced.

    cairn:<name>:rollout:0, 1, …      rollout engines, one actor on each machine of an engine
    cairn:<name>:episodes:0, 1, …     workers in which user code runs, if there is any
    cairn:<name>:router:0             the router in front of their servers, if there is one
    cairn:<name>:training:0, 1, …     ranks of the training engine
    cairn:<name>:reward_model:0       the reward model, if there is one

Each role has a placement group. In an elastic fleet each rollout engine is a role of its own, `rollout:0:0`,
`rollout:1:0`, …, which joins and leaves alone: see `cairn.engines.fleet.membership`.

On a joined cluster, actors and groups outlive a driver that is killed. The next driver of the same name takes over
those that the same version of the code made from the same configuration, and replaces the others. From then on the
earlier driver can no longer change them, even if it still runs: see `cairn.engines.fleet.fencing`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import ray

from cairn.configs.digest import digest
from cairn.configs.schema.operations import FleetConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.fleet import warm
from cairn.engines.fleet.actors import EpisodesActor, RewardModelActor, RolloutActor, RouterActor, TrainingActor
from cairn.engines.fleet.address import ray_address
from cairn.engines.fleet.calls import Deadline, map_in_threads
from cairn.engines.fleet.cluster import Cluster, ClusterError, machine_resources, seconds_until_drained
from cairn.engines.fleet.episodes import EpisodeWorkerHandle
from cairn.engines.fleet.fencing import Tenure
from cairn.engines.fleet.handles import Actor, EngineHandle
from cairn.engines.fleet.membership import Elastic, Membership
from cairn.engines.fleet.placement import Placement
from cairn.engines.fleet.remote_stream import SUBMITTING, TAKING
from cairn.engines.fleet.requirements import gpu_problem, ranks_together
from cairn.engines.fleet.reward_model import RewardModelHandle
from cairn.engines.fleet.roles import ActorRole, Bundle, in_bundles
from cairn.engines.fleet.rollout import KEEPING, RolloutHandle, RouterHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.fleet.turns import Turns, share_bundles
from cairn.engines.fleet.weights.exchange import WeightExchange
from cairn.engines.fleet.weights.transports import transport_of
from cairn.engines.processes.fingerprint import combined
from cairn.engines.rollout.plan import LaunchPlan, kind_of, served_model
from cairn.engines.types.errors import EngineError, Superseded
from cairn.storage.records import Environment
from cairn.storage.store.errors import LeaseLost, StoreError

SHARING = ("fleet.colocate", "fleet.offload_train", "fleet.offload_rollout")
"""Options on which placement and servers depend."""

LEAST_OBJECT_STORE = 512 * 1024**2
"""Bytes of shared memory for batches and results."""


class Fleet:
    """The engines of a run. Closed by `close`, or as a context manager."""

    def __init__(
        self,
        router: RouterHandle | None,
        rollout: list[RolloutHandle],
        membership: Membership,
        training: TrainingHandle,
        reward_model: RewardModelHandle | None,
        turns: Turns,
        weights: WeightExchange,
        cluster: Cluster,
        placement: Placement,
        closing: ExitStack,
    ) -> None:
        self.router = router
        """The router in front of the rollout engines' servers; None without one."""
        self.rollout = rollout
        """All rollout engines. In an elastic fleet some of them may not exist at the moment."""
        self.membership = membership
        """The membership, which says which rollout engines serve."""
        self.training = training
        """The training engine."""
        self.reward_model = reward_model
        """The reward model, None without one."""
        self.turns = turns
        """Turns of training and rollout with the memory of the GPUs that they share."""
        self.weights = weights
        """The publications of weights, and the version that each rollout engine serves."""
        self._cluster = cluster
        self._placement = placement
        self._closing = closing

    @classmethod
    def start(
        cls,
        config: RunConfig,
        *,
        name: str,
        total_steps: int,
        model_digests: Mapping[str, str] | None = None,
        load_code: Callable[[], None] | None = None,
        tenure: Tenure | None = None,
        report: Callable[[str], None] = lambda sentence: None,
        trains_only: bool = False,
        samples_only: bool = False,
    ) -> "Fleet":
        """Start or join the cluster, make all engines at the same time, and wait for them. A run that samples nothing
        has no rollout engine.

        Args:
            name: unique among the fleets of the cluster. An earlier fleet of this name is taken over.
            total_steps: optimizer steps of the whole run.
            model_digests: digests of the models of `config.model.folders`; every engine's machine must have these
                models.
            load_code: loads the user code of the training engine, in each process in which that starts. Can be
                pickled. What it raises ends the start.
            tenure: the driver's right to a fleet that its successors take over. None: no other driver will have it, and
                it ends with this process, on a joined cluster too.
            report: called with a sentence on each engine that is lost and replaced, and why, and on a silent head.
            trains_only: start the training engine alone, for a caller that samples, scores and publishes nothing.
            samples_only: start everything but the training engine, for a caller that samples with the initial weights.

        Raises:
            BadModel: an engine cannot use the model folder, or its machine has another model there.
            ClusterError: there is no cluster, or it has no room.
            EngineDied, EngineTimeout: an engine did not start within `fleet.start_timeout` seconds.
            LeaseLost, Superseded: another driver has the fleet.
        """
        config = _with_absolute_paths(config)
        config = _on_the_cluster_of_this_machine(config)
        served = served_model(config)
        if trains_only or samples_only:
            config = _without_sharing(config)
        if trains_only:
            config = _without_reward_model(config)
        plan = LaunchPlan(())
        if config.needs_rollout_engines and not trains_only:
            plan = kind_of(config.rollout.engine).plan(config.rollout, config.fleet.offloads_rollout)
        roles = rollout_role, training_role, *others = roles_of(config, plan, total_steps)
        roles = [role for role in roles if not (samples_only and role is training_role)]
        single = {role.name: role for role in others}
        at_least = config.rollout.min_num_engines if plan.engines else None
        joining = [] if at_least is None else split_by_engine(rollout_role, plan)
        deadline = Deadline(config.fleet.start_timeout)
        with ExitStack() as stack:
            cluster = Cluster.open(
                config.fleet.ray_address,
                num_cpus=math.ceil(sum(role.num_cpus for role in roles)),
                object_store_memory=_object_store_memory(config),
                timeout=deadline.remaining,
                make_warm=lambda: warm.take(config),
            )
            stack.callback(cluster.close)
            cluster.report = report
            cluster.start_workers_with(warm.threads_of(config))
            fixed = [role for role in roles if role.bundles and not (joining and role is rollout_role)]
            if config.uses_gpus and (problem := gpu_problem(config.fleet.gpu, machine_resources())):
                raise ClusterError(problem)
            placement = Placement(name, fixed, cluster, deadline, tenure, joining=joining, at_least=at_least or 0)
            started: list[EngineHandle] = []
            stack.callback(_release, started, placement, config.fleet.call_timeout)
            router = None
            if plan.router is not None:
                router = RouterHandle(
                    "router", placement.actors(single["router"])[0], plan.router, config.rollout, config.fleet
                )
            actors = chain.from_iterable(map(placement.actors, joining or [rollout_role]))
            rollout = [
                RolloutHandle(
                    f"rollout:{index}",
                    [next(actors) for _ in range(engine.nnodes)],
                    engine,
                    served,
                    config.rollout,
                    config.fleet,
                    router,
                    model_digests,
                )
                for index, engine in enumerate(plan.engines)
            ]
            if "episodes" in single:
                _assign_workers(rollout, placement.actors(single["episodes"]), config.fleet)
            if config.rollout.num_gpus_per_engine:
                for guest, ranks in zip(rollout, rollout_role.hosts, strict=False):  # no hosts where they are apart
                    guest.ranks = ranks
            training = TrainingHandle(
                "training", placement.actors(training_role), config, total_steps, model_digests, load_code
            )
            reward_model = None
            if "reward_model" in single:
                (actor,) = placement.actors(single["reward_model"])
                reward_model = RewardModelHandle("reward_model", actor, config, model_digests or {})
            scorers = [reward_model] if reward_model else []
            trainers = [] if samples_only else [training]
            engines = [*([router] if router else []), *rollout, *trainers, *_workers(rollout), *scorers]
            started += engines
            for made in engines:
                made.report = report
            membership = Membership(rollout)
            if at_least is not None:
                nodes = {one: partial(placement.nodes_of, role) for one, role in zip(rollout, joining, strict=True)}
                membership = Elastic(nodes, at_least, config.fleet, report)
                engines = [one for one in engines if one not in rollout or one in membership.members]
            turns = Turns(rollout, training, config.fleet)
            if config.fleet.colocate:  # before servers that take what memory is free
                training.start(deadline, adopt=True)
                turns.offload_training()
                engines.remove(training)
            map_in_threads(engines, lambda engine: engine.start(deadline, adopt=True))
            mapped = all(engine.maps_gpu_memory for engine in rollout)
            transport = transport_of(
                config.fleet,
                training,
                load_timeout=config.rollout.timeout,
                maps_gpu_memory=mapped,
                lag=config.rollout.weights_lag,
            )
            weights = WeightExchange(config, router, rollout, membership, training, turns, transport)
            stack.callback(weights.close)
            stack.callback(membership.close)
            membership.open()
            closing = stack.pop_all()
            return cls(
                router,
                rollout,
                membership,
                training,
                reward_model,
                turns,
                weights,
                cluster,
                placement,
                closing,
            )

    def close(self) -> None:
        """Kill all engines, release their resources, and leave the cluster; a started cluster ends. On a joined cluster
        everything stays as it is if another driver has it, or if this cannot be determined."""
        self._closing.close()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def engines(self) -> Sequence[EngineHandle]:
        """All engines that exist now."""
        single = [engine for engine in (self.router, self.reward_model) if engine is not None]
        return [*single, *self.membership.members, *_workers(self.rollout), self.training]

    @property
    def scorer(self) -> RewardModelHandle:
        """The reward model of a run that has one."""
        assert self.reward_model is not None
        return self.reward_model

    def health(self) -> dict[str, dict[str, Any] | EngineError]:
        """Return the health of every engine, or the error where it reports none, by name; within `fleet.call_timeout`
        seconds."""

        def query(engine: EngineHandle) -> dict[str, Any] | EngineError:
            try:
                return engine.health()
            except EngineError as error:
                return error

        healths = map_in_threads(self.engines, query)
        return {engine.name: health for engine, health in zip(self.engines, healths, strict=True)}

    def seconds_until_drained(self) -> float | None:
        """Return the seconds until a joined cluster drains a machine that this process is on, or an engine that may not
        leave. None if it drains none of them, and once the fleet is closed."""
        if not self._cluster.joined:
            return None
        return self._cluster.answer(
            lambda: seconds_until_drained({ray.get_runtime_context().get_node_id(), *self._placement.nodes()})
        )

    def generating_environment(self, engine: RolloutHandle) -> Environment:
        """Return the environment that computes the requests of a rollout engine: of that engine, or of all engines
        where a router distributes the requests."""
        return engine.environment if self.router is None else combined([one.environment for one in self.rollout])


def _assign_workers(rollout: Sequence[RolloutHandle], actors: Sequence[Actor], fleet: FleetConfig) -> None:
    """Assign episode workers to rollout engines, consecutive ones to each."""
    workers = [EpisodeWorkerHandle(f"episodes:{index}", [actor], fleet) for index, actor in enumerate(actors)]
    each = len(workers) // len(rollout)
    for index, engine in enumerate(rollout):
        engine.take_workers(workers[index * each : (index + 1) * each])


def _workers(rollout: Sequence[RolloutHandle]) -> list[EpisodeWorkerHandle]:
    return [worker for engine in rollout if engine.episodes is not None for worker in engine.episodes.workers]


def _release(engines: Sequence[EngineHandle], placement: Placement, timeout: float) -> None:
    with suppress(LeaseLost, Superseded, StoreError):
        placement.require_held()
        map_in_threads(engines, EngineHandle.kill)
        placement.require_held()
        placement.remove(Deadline(timeout))


def roles_of(config: RunConfig, plan: LaunchPlan, total_steps: int) -> list[ActorRole]:
    """Return the roles of the rollout engines, the training ranks and, if there are any, the router, the episode
    workers and the reward model."""
    rollout, training = _rollout_role(config, plan), _training_role(config, total_steps)
    if config.fleet.colocate:
        training, rollout = share_bundles(training, rollout, config)
    routers = [_router_role(config)] if plan.router is not None else []
    return [rollout, training, *routers, *_episodes_roles(config, plan), *_reward_model_roles(config)]


def _rollout_role(config: RunConfig, plan: LaunchPlan) -> ActorRole:
    fleet = config.fleet
    return ActorRole(
        "rollout",
        RolloutActor,
        tuple(Bundle(fleet.num_cpus_per_engine, e.num_gpus) for e in plan.engines for _ in range(e.nnodes)),
        config.rollout.num_threads,
        digest(config, ["model.path", "rollout", "fleet.num_cpus_per_engine", "fleet.call_timeout", *SHARING])[:16],
        "rollout.num_engines, rollout.num_gpus_per_engine, fleet.num_cpus_per_engine",
        groups=((SUBMITTING, 1), (TAKING, config.rollout.num_episode_workers), (KEEPING, 1)),
    )


def split_by_engine(role: ActorRole, plan: LaunchPlan) -> list[ActorRole]:
    """Split the role of the rollout engines into one role for each engine, which is placed by itself."""
    bundles = iter(role.bundles)
    return [
        replace(role, name=f"{role.name}:{index}", bundles=tuple(islice(bundles, engine.nnodes)))
        for index, engine in enumerate(plan.engines)
    ]


def _episodes_roles(config: RunConfig, plan: LaunchPlan) -> list[ActorRole]:
    """Return the role of all engines' episode workers, spread over the machines that have room; nothing if there are no
    workers."""
    count = len(plan.engines) * config.rollout.num_episode_workers
    if not count or not GenerateFunction(config.rollout.custom_generate_function_path).records:
        return []
    made_from = ["rollout.num_episode_workers", "fleet.num_cpus_per_episode_worker", "fleet.call_timeout"]
    return [
        ActorRole(
            "episodes",
            EpisodesActor,
            (Bundle(config.fleet.num_cpus_per_episode_worker),) * count,
            warm.threads_of(config) or 1,
            digest(config, made_from)[:16],
            "rollout.num_episode_workers, fleet.num_cpus_per_episode_worker",
            strategy="SPREAD",
        )
    ]


def _router_role(config: RunConfig) -> ActorRole:
    checks = [f"rollout.rollout_health_check_{name}" for name in ("interval", "timeout")]
    made_from = digest(config, ["rollout.router", "rollout.server_groups", *checks])[:16]
    return ActorRole("router", RouterActor, (Bundle(0),), 1, made_from, "rollout.router")


def _reward_model_roles(config: RunConfig) -> list[ActorRole]:
    options = config.reward.reward_model
    if options is None:
        return []
    return [
        ActorRole(
            "reward_model",
            RewardModelActor,
            (Bundle(0, options.num_gpus),),
            options.num_threads,
            digest(config, ["reward.reward_model"])[:16],
            "reward.reward_model.num_gpus",
        )
    ]


def _training_role(config: RunConfig, total_steps: int) -> ActorRole:
    training, fleet = config.training, config.fleet
    trained = ["model", "training", "algorithm", "rollout.rollout_temperature"]
    trained += ["rollout.engine", "rollout.model_path"]  # the format in which weights leave
    return ActorRole(
        "training",
        TrainingActor,
        in_bundles(training.world_size, ranks_together(config), fleet.num_cpus_per_rank, training.num_gpus_per_rank),
        training.num_threads,
        digest(config, [*trained, "fleet.num_cpus_per_rank", *SHARING])[:16] + f"-{total_steps}",
        "training.world_size, training.num_gpus_per_rank, fleet.num_cpus_per_rank, or the ranks that must be on one "
        "machine (training.megatron.tensor_model_parallel_size, expert_model_parallel_size)",
    )


def _object_store_memory(config: RunConfig) -> int:
    """Return the bytes of the object store: room for the publications that it retains, and for the one that replaces
    the oldest. Weights are published in the training's number format, which may be twice as wide as the model
    folder's."""
    transport = config.fleet.update_weight_transport
    lag = min(config.rollout.weights_lag, config.rollout.num_rollout)  # more is never published
    if (
        transport == "disk"
        or (transport == "distributed" and not lag)
        or (transport == "tensor" and _shares_gpus(config))
    ):
        return LEAST_OBJECT_STORE
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    retained = 0 if transport == "store" else lag + 2  # the initial weights alone
    return LEAST_OBJECT_STORE + (retained + 1) * 2 * weights


def _shares_gpus(config: RunConfig) -> bool:
    """Return whether every rollout engine maps weights from the memory of GPUs that it shares with training."""
    shared = config.fleet.colocate and config.rollout.num_gpus_per_engine > 0
    return shared and kind_of(config.rollout.engine).maps_gpu_memory


def _on_the_cluster_of_this_machine(config: RunConfig) -> RunConfig:
    """Return the configuration with the cluster address of the environment, if it has none itself."""
    fleet = config.fleet.model_copy(update={"ray_address": ray_address(config.fleet)})
    return config.model_copy(update={"fleet": fleet})


def _without_sharing(config: RunConfig) -> RunConfig:
    """Return the configuration for a fleet in which the training engine and the others share no GPUs and exchange no
    weights: rollout engines sample with those of the folder that they load."""
    apart = {"colocate": False, "offload_train": False, "offload_rollout": False, "update_weight_transport": "tensor"}
    fleet, rollout = config.fleet.model_copy(update=apart), config.rollout.model_copy(update={"model_path": None})
    return config.model_copy(update={"fleet": fleet, "rollout": rollout})


def _without_reward_model(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"reward": config.reward.model_copy(update={"reward_model": None})})


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths, because actors have a working folder of their own."""
    model, rollout = config.model, config.rollout
    options = ("path", "ref_path", "teacher_path", "critic_path")
    paths = {name: str(Path(path).absolute()) for name in options if (path := getattr(model, name)) is not None}
    if rollout.model_path is not None:
        rollout = rollout.model_copy(update={"model_path": str(Path(rollout.model_path).absolute())})
    reward = config.reward
    if reward.reward_model is not None:
        there = {"path": str(Path(reward.reward_model.path).absolute())}
        reward = reward.model_copy(update={"reward_model": reward.reward_model.model_copy(update=there)})
    return config.model_copy(update={"model": model.model_copy(update=paths), "rollout": rollout, "reward": reward})
