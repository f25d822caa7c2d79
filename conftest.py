"""What holds for all tests."""

import signal


def pytest_sessionstart() -> None:
    """Let SIGINT reach the processes that tests start, also where pytest itself was started with it ignored.

    Shells do that to background jobs, and children would inherit it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
