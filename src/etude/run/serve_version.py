"""One weight version of a run behind a temporary engine and gateway.

Everything happens in a scratch run folder that contains only this version; the run itself is only read.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from etude.config.recipe import LedgerConfig, RunConfig
from etude.config.release import ReleaseConfig
from etude.errors import InfrastructureError
from etude.run.fleet_plan import process_spec
from etude.run.folder import RunFolder
from etude.run.placement import place_here
from etude.run.process_name import ENGINE, GATEWAY
from etude.run.supervision import Supervisor
from etude.run.weight_log import open_log
from etude.telemetry.log import EventLog
from etude.weights.publish import Publisher
from etude.weights.pull import pull

READY_S = 120.0
"""Longest time for engine and gateway to start: kernels may have to be compiled first."""
POLL_S = 0.2
"""Interval at which they are polled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """A version that is being served."""

    folder: RunFolder
    """The scratch folder with endpoints and keys."""
    supervisor: Supervisor
    """The supervisor of engine and gateway."""
    version: int
    digest: str


@contextlib.contextmanager
def serving_version(
    folder: RunFolder,
    version: int | None = None,
    *,
    ledger: Path | None = None,
    recipe: RunConfig | None = None,
) -> Iterator[ServedRun]:
    """Serve a version of a run (default: the newest) under its own number, with one engine and one gateway, while the
    context is open.

    Events are recorded in the permanent ``ledger``, or discarded without one. ``recipe`` replaces the run's recipe.
    Engine and gateway may still be starting: see :func:`wait_until_ready`.
    """
    pulled, recipe = pull(open_log(folder), version), recipe or folder.config()
    config = recipe.model_copy(
        update={
            "ledger": LedgerConfig(),  # nothing is stored in an external database
            "engine": recipe.engine.model_copy(update={"replicas": 1, "port": 0}),
            "gateway": recipe.gateway.model_copy(update={"replicas": 1, "port": 0}),
            "release": ReleaseConfig(),  # it serves only the evaluation
        }
    )
    with tempfile.TemporaryDirectory(prefix="etude-serving-") as temporary_folder:
        place = "" if ledger is None else str(ledger.absolute())
        scratch_run = RunFolder.create(Path(temporary_folder) / "run", config, ledger=place)
        shutil.copytree(folder.model, scratch_run.model)
        with Publisher(open_log(scratch_run)) as publisher:
            publisher.publish(pulled.state, version=pulled.version, step=pulled.version).result()
        scratch_run.endpoints.reserve(config)
        with EventLog(scratch_run.events, "supervisor") as events:
            placement = place_here(scratch_run, config)
            specs = [process_spec(name, placement.fleet, str(scratch_run.path)) for name in (ENGINE, GATEWAY)]
            supervisor = Supervisor(
                specs, placement, scratch_run, events, heartbeat_timeout_s=config.heartbeat_timeout_s
            )
            try:
                supervisor.check()
                yield ServedRun(folder=scratch_run, supervisor=supervisor, version=pulled.version, digest=pulled.digest)
            finally:
                supervisor.stop()


def wait_until_ready(served: ServedRun) -> None:
    """Wait until the gateway has an engine. Raises :class:`~etude.errors.InfrastructureError` if it takes too long."""
    url = served.folder.endpoints.url(GATEWAY) + "/healthz"
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        served.supervisor.check()
        with contextlib.suppress(URLError, OSError), urlopen(url, timeout=POLL_S * 10):
            return
        time.sleep(POLL_S)
    raise InfrastructureError(f"engine and gateway did not answer within {READY_S:g} s: see {served.folder.logs}")
