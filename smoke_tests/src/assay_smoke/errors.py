"""Reasons for which a run says nothing about coherence: exit code 2, never 1.

What a server *says* in a whole answer, however broken, is never one of these: that is a finding.
"""


class CouldNotRunError(Exception):
    """No verdict: the message says what stood in the way."""


class SuiteError(CouldNotRunError):
    """A suite, reference or data file that cannot be used; names the file and the rule."""


class UnavailableError(CouldNotRunError):
    """The server could not be reached, broke off, took too long, or answered 5xx."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RefusedError(CouldNotRunError):
    """The server refused a request: 4xx, or 503 from a closed door."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BudgetError(CouldNotRunError):
    """The tier's tokens are spent."""
