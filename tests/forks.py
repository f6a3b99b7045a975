"""Processes that need not wait for imports: forked by one that has made them, the same for all tests of a session."""

import multiprocessing
import os
from collections.abc import Mapping

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.chaos.driver", "cairn.engines.fleet.fleet", "cairn.flows.train"])


def set_environment(environment: Mapping[str, str]) -> None:
    """Replace this process's environment, also where Ray has read it: in the process that this one was forked from,
    whose own environment is that of whichever test came first."""
    from ray._private.authentication_test_utils import reset_auth_token_state

    os.environ.clear()
    os.environ.update(environment)
    reset_auth_token_state()
