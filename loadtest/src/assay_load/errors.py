"""What ends a command with a message for the user and exit code 2."""


class InputError(Exception):
    """A file, key or flag is wrong; the text names it and the rule."""


class TargetError(Exception):
    """The server could not be used at all: nothing was measured."""
