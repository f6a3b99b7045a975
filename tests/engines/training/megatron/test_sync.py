"""A version leaves the trainer once: what ranks exchange and send does not depend on the number of receivers."""

import pickle
from typing import Any

import pytest

from tests.engines.training.builders import model_folder
from tests.engines.training.megatron.sync_cases import LAYOUTS, RANKS, RECEIVERS, launched
from tests.engines.training.ranks import run_with_megatron

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]

Reports = list[Any]


@pytest.fixture(scope="module", params=LAYOUTS)
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    work = tmp_path_factory.mktemp("sync")
    family = "qwen3_moe" if "EP" in request.param else "qwen3"
    folder = work / family
    model_folder(folder, family, layers=4)
    run_with_megatron(launched, folder, work, request.param)
    ranks = range(RANKS + max(RECEIVERS))
    return [pickle.loads((work / f"{request.param}.{rank}.pickle").read_bytes()) for rank in ranks]


def test_every_receiver_has_the_published_weights(reports: Reports) -> None:
    published = reports[0]["checksum"]
    for rank in range(RANKS):
        assert reports[rank]["checksum"] == published
        assert reports[rank]["held"] == published, "a rank shares other weights"
    for receiver, checksums in enumerate(reports[RANKS:]):
        assert checksums == [published] * sum(receiver < count for count in RECEIVERS)


@pytest.mark.parametrize("way", ["broadcast", "mapped"])
def test_what_ranks_exchange_and_send_does_not_depend_on_the_number_of_receivers(reports: Reports, way: str) -> None:
    for rank in range(RANKS):
        first, *others = reports[rank][way]
        assert others == [first] * (len(RECEIVERS) - 1)
    assert reports[0][way][0]["collectives"] > 0
    assert reports[0][way][0]["sent"] > 0
