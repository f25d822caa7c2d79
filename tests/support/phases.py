"""All phases of a run in the process of a test."""

from etude.run.folder import RunFolder
from etude.run.phase_folders import phases_of
from etude.run.phases import run_phase


def run_phases(folder: RunFolder) -> None:
    """Run every missing phase of the recipe in this process, and publish version 0."""
    for phase in phases_of(folder.config()):
        run_phase(folder, phase)
