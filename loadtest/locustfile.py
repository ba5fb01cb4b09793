"""`locust -f loadtest/locustfile.py --host http://127.0.0.1:8000`: see docs/load.md."""

from assay_load.drive.locustfile import ChatUser

__all__ = ["ChatUser"]
