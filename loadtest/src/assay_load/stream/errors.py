"""How a request can fail: one `kind` each, which is what the results count."""


class StreamError(Exception):
    """A failed request. `kind` is short and has no details, so that it can be counted."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail


CONNECT = "connect"
"""No connection could be made."""
CLOSED = "connection_closed"
"""The connection ended before the answer did."""
TIMEOUT = "timeout"
MALFORMED_HTTP = "malformed_http"
MALFORMED_EVENT = "malformed_event"
NOT_A_STREAM = "not_a_stream"
"""Status 200, but no text/event-stream."""
SERVER_ERROR = "error_event"
"""The stream carried an error object."""
TRUNCATED = "truncated_stream"
"""The answer ended in good order, but without [DONE] or without a finish reason."""
NO_USAGE = "no_usage"
COUNT = "token_count"
"""The server's usage does not fit what came in the stream, or what was asked for."""
EMPTY = "empty_answer"
"""Tokens were counted, but neither content, reasoning nor a tool call came."""
WRONG_MODEL = "wrong_model"


def http_status(status: int) -> str:
    return f"http_{status}"
