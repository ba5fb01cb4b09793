"""A workload driven by Locust: users, the run from start to end, workers and master, the web UI."""

# Locust patches the standard library on import; that has to come before anything else uses it.
import locust as _locust  # noqa: F401
