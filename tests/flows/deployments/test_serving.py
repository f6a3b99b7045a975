"""What `cairn up` puts on a Prefect server, and what it leaves there."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings

from cairn.flows.deployments.serving import deployments
from cairn.flows.deployments.up import start
from cairn.flows.orchestration.server import ServerFailed
from cairn.storage.store.errors import StoreRefused


def deploy(store: str) -> DeploymentResponse:
    """As a `cairn up` does that starts; returns what the server then has of one of them."""

    async def one() -> DeploymentResponse:
        (verify,) = [one for one in await deployments(store) if one.flow_name == "verify"]
        async with get_client() as client:
            return await client.read_deployment(await verify.aapply())

    return asyncio.run(one())


@pytest.mark.proof
def test_what_people_set_stays_when_the_deployments_are_made_again(api_url: str) -> None:
    with temporary_settings({PREFECT_API_URL: api_url}), get_client(sync_client=True) as client:
        first = deploy("/first")
        assert (first.schedules, first.paused, first.parameters) == ([], False, {"store": "/first"})
        body = [{"schedule": IntervalSchedule(interval=timedelta(days=1)).model_dump(mode="json"), "active": True}]
        client.request("POST", f"/deployments/{first.id}/schedules", json=body)
        client.request("PATCH", f"/deployments/{first.id}", json={"paused": True})
        redeployed = deploy("/second")
    assert redeployed.id == first.id
    assert [one.schedule.interval for one in redeployed.schedules] == [timedelta(days=1)]  # type: ignore[union-attr]
    assert redeployed.paused
    assert redeployed.parameters == {"store": "/second"}


@pytest.mark.proof
def test_a_flow_run_keeps_the_store_that_it_was_made_with(api_url: str) -> None:
    with temporary_settings({PREFECT_API_URL: api_url}), get_client(sync_client=True) as client:
        made = client.create_flow_run_from_deployment(deploy("/first").id, parameters={"run": "kept"})
        deploy("/second")
        assert client.read_flow_run(made.id).parameters == {"run": "kept", "store": "/first"}


def test_a_store_of_no_kind_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreRefused, match="unknown kind"):
        start("nosuch://x", host="127.0.0.1", port=0, ray=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/api", "nonsense"])
def test_a_configured_server_that_does_not_answer_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with temporary_settings({PREFECT_API_URL: address}), pytest.raises(ServerFailed) as refused:
        start(".", host="127.0.0.1", port=0, ray=False)
    assert address in str(refused.value)
    assert "PREFECT_API_URL" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_that_cannot_hold_the_history_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cairn").touch()
    with pytest.raises(ServerFailed, match="cannot be created"):
        start(".", host="127.0.0.1", port=0, ray=False)
