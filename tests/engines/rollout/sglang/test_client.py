"""What a server does to a connection comes out as the engine's own error."""

import socket
import struct
import threading

import pytest

from cairn.engines.rollout.sglang.server import Control
from cairn.engines.types.errors import EngineDied, EngineTimeout


def test_a_connection_that_is_reset_means_that_the_server_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as dying:

        def accept_and_reset() -> None:
            connection, _ = dying.accept()
            connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        threading.Thread(target=accept_and_reset, daemon=True).start()
        url = f"http://127.0.0.1:{dying.getsockname()[1]}"
        with pytest.raises(EngineDied, match=f"the SGLang server at {url} is gone or out of reach: /v1/loads: .*reset"):
            Control(url, timeout=60).call("/v1/loads")


def test_a_server_that_is_silent_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineTimeout, match=f"the SGLang server at {url} did not answer /v1/loads in time"):
            Control(url, timeout=0.2).call("/v1/loads")
