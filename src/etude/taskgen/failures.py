"""Errors for repositories from which no tasks can be made; each message names the fix.

UserError
└── RepositoryError         something is wrong with the repository or with the request
    ├── SourceError         it cannot be fetched or read, or is not Python
    ├── InstallError        its requirements cannot be installed
    ├── NoTestsError        no test was found
    ├── TestsFailError      too few of its tests pass every time
    └── CopyError           the base system has a copy of it, in which an agent could look up the answers
"""

from etude.errors import UserError


class RepositoryError(UserError):
    """No tasks can be made from this repository."""

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(message)
        self.log = log
        """End of the failing program's output."""


class SourceError(RepositoryError):
    """The repository cannot be fetched or read, or holds no Python package."""


class InstallError(RepositoryError):
    """A requirement of the package or its tests cannot be installed."""


class NoTestsError(RepositoryError):
    """No test was found."""


class TestsFailError(RepositoryError):
    """Too few tests pass every time."""

    __test__ = False  # not a test class, whatever pytest thinks of the name


class CopyError(RepositoryError):
    """The base system has a copy of the package."""
