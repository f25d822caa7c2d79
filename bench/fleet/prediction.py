"""A plan of the demo, calibrated by its own events, beside what they show: busy shares and seconds of a step."""

from bench.fleet.demo import RECIPE, DemoLog, run_keys
from bench.fleet.plan import FleetPlan
from bench.plan.comparison import Comparison
from etude.cli.actions.plan_run import shared_cores
from etude.config.loading import load_recipe
from etude.simulation.figures import RunFigures
from etude.simulation.fit import calibrate
from etude.simulation.run import RegionModel, simulate, skipped_steps


def prediction(log: DemoLog, plan: FleetPlan) -> Comparison | None:
    """``None`` if something went wrong on purpose or the run did not finish: a plan knows no faults.

    One process of each region computes at a time, and all share this machine's processors.
    """
    if plan.faults or log.status is None:
        return None
    config = load_recipe(RECIPE, run_keys(plan))
    regions = [RegionModel(name=each.name, engines=1, rtt_s=each.rtt_s, shares_cores=True) for each in plan.regions]
    calibration = calibrate(config, log.events, regions, cores=shared_cores(config, 0))
    skipped = skipped_steps(config)
    return Comparison(
        case="fleet demo",
        measured=RunFigures.of_events(log.events, skipped=skipped),
        predicted=RunFigures.of_events(simulate(config, calibration, regions, seed=1).logged, skipped=skipped),
    )
