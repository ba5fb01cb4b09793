"""The launcher's own requests."""

import pytest

from assay_kernels.launcher.client import Client, NoAnswerError

from .conftest import free_port


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_the_url_is_one_that_a_client_can_use(host: str, url: str) -> None:
    assert Client(host, 8000).url == url


def test_a_server_that_is_gone_is_no_answer() -> None:
    client = Client("127.0.0.1", free_port())
    assert not client.healthy()
    with pytest.raises(NoAnswerError, match="did not answer"):
        client.status_without_key("/v1/models")
