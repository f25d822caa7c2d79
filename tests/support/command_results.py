"""Results of commands that no sandbox ran."""

from etude.protocols import ExecResult


def ended(
    exit_code: int = 0, stdout: str = "", stderr: str = "", *, timed_out: bool = False, seconds: float = 0.0
) -> ExecResult:
    """The result of a command that ended so, with all of its output."""
    return ExecResult(
        exit_code=exit_code, stdout=stdout, stderr=stderr, timed_out=timed_out, truncated=False, seconds=seconds
    )
