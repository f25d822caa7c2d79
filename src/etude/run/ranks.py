"""The ranks of a trainer, or of a phase before it, on one machine: their environments, and their common start and end.

    etude train ──one rank here──▶ continues as that rank
                └──several──▶ rank, rank, … ──the first that fails──▶ the others are killed; its status is the node's

This works like torchrun, with the same environment variables, but for a fixed list of machines: the first one hosts the
rendezvous, and the run's supervisor restarts the ranks as a group. Only the ranks import torch and wait for each other,
not the process that starts them: that shortens the trainer's start.
"""

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from etude.errors import ConfigError

POLL_S = 0.05
"""Interval at which ranks are checked."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The machines of one trainer and the number of this one, with torchrun's field names."""

    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str = ""
    """``HOST:PORT`` of the first node, the rendezvous of the ranks; on one node, any free port."""

    def environments(self, ranks: int) -> list[dict[str, str]]:
        """The environment variables of each rank on this node; ``ranks`` counts those of all nodes.

        Raises :class:`~etude.errors.ConfigError` if the nodes cannot have equally many ranks, or ``rdzv_endpoint`` or
        ``node_rank`` is invalid.
        """
        if ranks % self.nnodes:
            raise ConfigError(
                f"--nnodes {self.nnodes} does not divide {ranks} ranks (dp * parallel.cp of the recipe): each node has "
                f"as many as any other"
            )
        host, _, port = self.rdzv_endpoint.rpartition(":")
        if self.nnodes == 1:
            host, port = LOOPBACK, str(_free_port())
        if not host or not port.isdecimal() or not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"--nnodes {self.nnodes} needs --rdzv-endpoint HOST:PORT of the first node, and --node-rank from 0 to "
                f"{self.nnodes - 1}; got {self.rdzv_endpoint!r} and {self.node_rank}"
            )
        share = ranks // self.nnodes
        return [
            {
                "RANK": str(self.node_rank * share + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(share),
                "MASTER_ADDR": host,
                "MASTER_PORT": port,
            }
            for local in range(share)
        ]


ONE_NODE = Nodes()


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Run ``command`` once in each environment, at the same time, until all have ended; if one fails, kill the others.

    Returns the exit status of the first that failed, 1 if a signal killed it, and 0 if none failed.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        ranks.extend(subprocess.Popen(command, env={**os.environ, **each}) for each in environments)
        while True:
            statuses = [rank.poll() for rank in ranks]
            failed = next((status for status in statuses if status), None)
            if failed is not None:
                return failed if failed > 0 else 1
            if None not in statuses:
                return 0
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
