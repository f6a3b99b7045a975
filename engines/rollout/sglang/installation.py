"""The installation of SGLang: its interpreter, the options of its servers, and how they are launched.

SGLang has an environment of its own: its metadata requires CUDA packages, and its pins do not suit everybody. On a
machine without a GPU the server's process gets `cpu/` on its path, which replaces what needs CUDA.
"""

import ast
import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cairn.engines.processes.libraries import environment as library_environment
from cairn.engines.processes.syntax import parsed
from cairn.engines.types.errors import EngineError

TESTED_VERSION = "0.5.23"
"""The version for which `cpu/` is made; other versions are refused without a GPU."""

INTERPRETER = "CAIRN_SGLANG_PYTHON"
"""Environment variable with the path of the interpreter that has SGLang."""

STAND_INS = Path(__file__).with_name("cpu")

SET_HERE = frozenset(
    {
        "model_path",
        "host",
        "port",
        "dtype",
        "max_running_requests",
        "skip_tokenizer_init",
        "weight_version",
        "nnodes",
        "node_rank",
        "dist_init_addr",
        "disaggregation_mode",
        "disaggregation_bootstrap_port",
    }
)
"""Options that Cairn sets itself, because they follow from other options of a run, or the engine depends on them."""

ROUTER_SET_HERE = frozenset(
    {
        "host",
        "port",
        "prometheus_host",
        "prometheus_port",
        "worker_urls",
        "prefill_urls",
        "decode_urls",
        "pd_disaggregation",
        "service_discovery",
        "mini_lb",
    }
)
"""Options of a router that Cairn sets itself, because they follow from its servers, or replace it by something else."""

_SECRETS = frozenset(
    (
        "admin_api_key",
        "api_key",
        "control_plane_api_keys",
        "oracle_connect_descriptor",
        "oracle_password",
        "postgres_db_url",
        "redis_url",
        "ssl_keyfile_password",
    )
)
"""Options of servers and routers that hold keys or passwords."""

RETIRED = {
    "cuda_graph_tc_compiler": "is of the graphs of tc_piecewise, which SGLang has no more: leave it out, and set "
    "cuda_graph_backend_prefill to breakable or disabled where it was tc_piecewise",
    "speculative_skip_dp_mlp_sync": "is decided by SGLang itself: leave it out",
}
"""What to do instead of options that older servers had, by name."""

POLICIES = (
    "cache_aware",
    "round_robin",
    "power_of_two",
    "random",
    "consistent_hashing",
    "prefix_hash",
    "manual",
    "bucket",
)
"""Policies by which a router chooses a server."""

CPU_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,  # else the idle scheduler keeps a core busy
}
"""Options of a server without a GPU. Options of the configuration override them."""

_SWITCHES = ("SGLANG_", "SGL_", "FLASHINFER_", "TRTLLM_", "AITER_")
"""Prefixes of environment variables that change what SGLang and its kernels compute."""

_PLACES = frozenset(
    (
        "SGLANG_CACHE_DIR",
        "SGLANG_JIT_CACHE_DIR",
        "SGLANG_DG_CACHE_DIR",
        "SGLANG_CUTE_AOT_CACHE_DIR",
        "SGLANG_TORCH_PROFILER_DIR",
        "SGLANG_CUDA_COREDUMP_DIR",
        "SGLANG_LOGGING_CONFIG_PATH",
        "SGLANG_HOST_IP",
        "SGLANG_LOCAL_IP_NIC",
        "SGLANG_ZMQ_ALLOWED_PEERS",
        "SGLANG_ZMQ_SOURCE_IP",
        "SGLANG_WARMUP_TIMEOUT",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
        "FLASHINFER_WORKSPACE_BASE",
    )
)
"""Such variables that only name places on the machine or set how long to wait, and change no result."""

_NOT_INHERITED = frozenset(("PYTHONPATH", "PYTHONHOME", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"))
"""Environment variables that make a process import other modules, or read pickles as code."""

_OTHER_FLAG = re.compile(r"no_cli=True|cli_name=|Derived\(")
"""Pattern in the annotation of a field of ServerArgs that has no flag of its name."""

_FIND_FOLDER = "import importlib.util as u; s = u.find_spec({!r}); print(s.submodule_search_locations[0] if s else '')"
_FIND_VERSION = "import importlib.metadata as m; print(m.version('sglang'))"

_FIND_VERSIONS = """
import importlib.metadata as m, json, platform
found = {{"python": platform.python_version()}}
for name in {!r}:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class SGLangMissing(EngineError):
    """No SGLang can be launched here. The message says how to get one."""


@dataclass(frozen=True)
class Installation:
    """A Python interpreter that has SGLang."""

    python: Path

    @classmethod
    def find(cls) -> "Installation":
        """Return the interpreter that `CAIRN_SGLANG_PYTHON` names; otherwise this interpreter, or that of
        `.venv-sglang` next to its own environment. Where SGLang is installed belongs to the machine, not to the run.
        Raises SGLangMissing."""
        sibling = Path(sys.prefix).with_name(".venv-sglang") / "bin" / "python"
        named = os.environ.get(INTERPRETER)
        candidates = [Path(named)] if named else [Path(sys.executable), sibling]
        for candidate in candidates:
            if candidate.exists() and _run_python(candidate, _FIND_FOLDER.format("sglang")):
                return cls(candidate)
        raise SGLangMissing(
            f"SGLang is not installed for {' or '.join(map(str, candidates))}: run `make sglang-env`, or set "
            f"{INTERPRETER} to the interpreter of an environment that has it"
        )

    @cached_property
    def version(self) -> str:
        """Version of SGLang."""
        return _run_python(self.python, _FIND_VERSION)

    def versions(self, packages: Iterable[str]) -> dict[str, str]:
        """Return the versions of those packages that the interpreter has, and its own version."""
        return json.loads(_run_python(self.python, _FIND_VERSIONS.format(tuple(packages))))

    @cached_property
    def options(self) -> Mapping[str, str]:
        """Options of a server's command line, with their annotations, which show how an option is spelled. They are the
        fields of SGLang's ServerArgs that have a flag of their name, read without importing SGLang."""
        folder = Path(_run_python(self.python, _FIND_FOLDER.format("sglang"))) / "srt"
        trees = _parsed(folder / "server_args.py", *(folder / "arg_groups" / "fields").glob("*.py"))
        words = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        return {
            name: annotation
            for name, annotation in _fields(trees).items()
            if _flag(name) in words or (annotation.startswith("A[") and not _OTHER_FLAG.search(annotation))
        }

    @cached_property
    def router_options(self) -> frozenset[str]:
        """Names of all options of a router: the fields of its RouterArgs. Raises SGLangMissing where there is no
        router."""
        folder = _run_python(self.python, _FIND_FOLDER.format("sglang_router"))
        if not folder:
            raise SGLangMissing(
                f"{self.python} has no router: install sglang-router there, or leave rollout.router out"
            )
        return frozenset(_fields(_parsed(Path(folder) / "router_args.py")))

    def command(self, options: Mapping[str, Any]) -> list[str]:
        """Return the command line of a server. Options have SGLang's own names. True is a flag, and so is False if it
        has one. A list becomes several values, or JSON where SGLang reads JSON. A mapping becomes JSON."""
        words = [str(self.python), "-m", "sglang.launch_server"]
        for name, value in options.items():
            annotation = self.options.get(name, "")
            if value is True:
                words.append(_flag(name))
            elif value is False and "BooleanOptionalAction" in annotation:
                words.append(_flag(f"no_{name}"))
            elif isinstance(value, Mapping) or (isinstance(value, list | tuple) and "type_parser=json" in annotation):
                words += [_flag(name), json.dumps(value)]
            elif value is not None and value is not False:
                words += [_flag(name), *map(str, value if isinstance(value, list | tuple) else [value])]
        return words

    def environment(self, *, on_cpu: bool, num_threads: int, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a server's process: this process's variables, without those that change
        what it computes, which belongs in the configuration, and those that its libraries need. Raises SGLangMissing
        where `cpu/` does not fit.

        Args:
            variables: `rollout.sglang_env_vars`.
        """
        inherited = {name: value for name, value in os.environ.items() if _is_inherited(name)}
        environment = library_environment("sglang", inherited, variables)
        environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads)}
        if on_cpu:
            if self.version != TESTED_VERSION:
                raise SGLangMissing(
                    f"without a GPU SGLang {TESTED_VERSION} is needed and {self.python} has {self.version}: run "
                    "`make sglang-env`"
                )
            environment |= {"PYTHONPATH": str(STAND_INS), "SGLANG_USE_CPU_ENGINE": "1"}
            # Routers of experts are compiled for a GPU. On a CPU compilation takes longer than a server may be silent
            # for.
            environment["TORCHDYNAMO_DISABLE"] = "1"
        return environment


def _is_inherited(name: str) -> bool:
    return name in _PLACES or not (name in _NOT_INHERITED or name.startswith(_SWITCHES))


def option_problems(installation: Installation, section: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on options of a section that a server does not have, or that the configuration must not set."""
    known = f"SGLang {installation.version}"
    yield from _name_problems(section, options, installation.options, SET_HERE, known)


def router_problems(installation: Installation, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield such sentences for a router, also on policies that it does not have. Raises SGLangMissing where there is no
    router."""
    if not options:
        return
    known = installation.router_options
    yield from _name_problems("rollout.router", options, known, ROUTER_SET_HERE, "the router")
    for name in ("policy", "prefill_policy", "decode_policy"):
        if options.get(name) is not None and options[name] not in POLICIES:
            yield f"rollout.router.{name} is {options[name]!r}; it must be one of {', '.join(POLICIES)}"


def _name_problems(
    section: str, options: Mapping[str, Any], known: Collection[str], set_here: frozenset[str], owner: str
) -> Iterator[str]:
    for name in options:
        if name in _SECRETS:
            yield f"{section}.{name} is a secret, and configurations are recorded with the run: leave it out"
        elif name in set_here:
            yield f"{section}.{name} is set by Cairn itself; leave it out"
        elif name not in known and name in RETIRED:
            yield f"{section}.{name} {RETIRED[name]}"
        elif name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"{section}.{name} is not an option of {owner}{hint}"


def _flag(name: str) -> str:
    """Return an option's flag on the command line."""
    return f"--{name.replace('_', '-')}"


def _parsed(*sources: Path) -> list[ast.Module]:
    return [parsed(file.read_text()) for file in sources]


def _fields(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Return the fields of all classes, with their annotations."""
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    fields = [field for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    return {field.target.id: ast.unparse(field.annotation) for field in fields if isinstance(field.target, ast.Name)}


def _run_python(python: Path, program: str) -> str:
    done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise SGLangMissing(f"{python} cannot be used: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.strip()
