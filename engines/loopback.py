"""Services of our own on this machine are asked by this machine alone."""

import os

_HOSTS = ("127.0.0.1", "localhost", "::1")


def spare_loopback() -> None:
    """Keep proxies of the environment from loopback, in this process and those that it starts: clients of Prefect's
    server, of captures and of rollout servers would ask a proxy for them. Other hosts are asked as before."""
    given = ",".join(os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy"))
    hosts = dict.fromkeys([*filter(None, map(str.strip, given.split(","))), *_HOSTS])
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(hosts)
