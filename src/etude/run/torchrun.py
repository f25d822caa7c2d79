"""``torchrun`` with the exit status of its ranks, so that a supervisor knows which errors a restart would repeat.

torchrun itself ends with 1 whatever the rank ended with that failed first.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(arguments: list[str]) -> int:
    """Start ranks as ``torchrun`` does, and wait for them; returns the status of the first that failed, or 0.

    One that was killed by a signal counts as 1.
    """
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
