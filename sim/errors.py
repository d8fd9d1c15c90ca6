# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong, and what a tool can: each ends in one line, never in a traceback."""


class InputError(ValueError):
    """A value given by the user that cannot be used: names the value, the limit and the remedy.

    The command line prints it on one line and exits with 2.
    """

    def __init__(self, name: str, value: object, limit: str, remedy: str):
        self.name, self.value, self.limit, self.remedy = name, value, limit, remedy
        shown = value if isinstance(value, str) else repr(value)
        super().__init__(f"{name} is {shown}, but {limit}; {remedy}")


class ToolError(RuntimeError):
    """A tool is missing or failed, or a bench did not pass; the command line exits with 1."""
