"""The memory in which a process of user code says whose turn it is."""

import tempfile
from pathlib import Path

import pytest

from cairn.engines.agents.episodes.watchdog import Heartbeat
from cairn.storage.store.errors import NoSpace
from tests.small_disk import fill, small_disk, why_not


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_folder_of_temporary_files_that_is_full_is_named_and_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "full", 64 << 10) as disk:
        ballast = fill(disk)
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with pytest.raises(NoSpace, match=f"cannot write to {disk}"), Heartbeat.shared():
            pass
        ballast.unlink()
        with Heartbeat.shared() as (heartbeat, _):
            fill(disk)
            heartbeat.beat()
            assert heartbeat.last > 0
