"""Load tests of a DeepSeek V4 endpoint with Locust, and the release gate."""

__version__ = "0.1.0"
