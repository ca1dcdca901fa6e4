"""The one error that a command reports in a line, without a traceback."""


class CommandError(Exception):
    """What the user asked for cannot be done; the text says why."""
