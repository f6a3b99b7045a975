"""Proxies of the environment are asked for nothing on this machine."""

from urllib.request import getproxies_environment, proxy_bypass_environment

import httpx
import pytest

from cairn.engines.processes.ports import bypass_proxy_for_loopback
from tests.tables import cases


@cases(
    ("given", "beside"),
    [
        ({}, []),
        ({"NO_PROXY": "", "no_proxy": ""}, []),
        ({"NO_PROXY": "corp.example"}, ["corp.example"]),
        ({"NO_PROXY": "a.example", "no_proxy": "b.example, 127.0.0.1"}, ["a.example", "b.example"]),
    ],
)
def test_loopback_is_asked_without_a_proxy_and_other_hosts_as_before(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], beside: list[str]
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    bypass_proxy_for_loopback()
    assert "http" in getproxies_environment()
    with httpx.Client() as client:
        for host in ("127.0.0.1", "localhost", "[::1]", *beside):
            assert proxy_bypass_environment(host.strip("[]"))
            assert client._transport_for_url(httpx.URL(f"http://{host}:1")) is client._transport
    assert not proxy_bypass_environment("elsewhere.example")
