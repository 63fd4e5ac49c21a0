"""The root of every error this project raises for something the caller can act on.

Subclasses live beside the code that raises them. Not for internal faults: those stay ordinary exceptions.
"""

__all__ = ["TuneModelError"]


class TuneModelError(Exception):
    """Something the caller can act on: the message says what was seen, what was expected and what to do.

    Attributes:
        exit_code: What the command line exits with when this error ends a command.
    """

    exit_code: int = 2
