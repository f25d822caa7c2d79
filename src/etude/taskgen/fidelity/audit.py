"""The fidelity audit: can a classifier tell production's observations from étude's, and by which features?

    production sessions ─┐                                              ┌─▶ AUC with its confidence interval
                         ├──features──▶ logistic regression, by session ─┤
    simulated sessions ──┘                                              └─▶ tells: what gives it away, with examples

An AUC of 0.5 means that it cannot. The interval counts sessions, not calls: calls of one session are alike. A model
that is trained in an environment it can tell from the real one may learn to behave only there.

The classifier sees what an agent sees, so an agent that does other things in production than in simulation is told
apart by that; compare sessions over the same kind of tasks. Owns the report; pure but for nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from etude.errors import ConfigError
from etude.regression import Array, Labels
from etude.taskgen.fidelity.classifier import Area, area, assign_folds, held_out_scores
from etude.taskgen.fidelity.features import as_matrix, common_features, features_of
from etude.taskgen.fidelity.sessions import ToolObservation
from etude.types import Json

FOLDS = 5
ROUNDS = 2
"""Times that sessions are dealt into folds: the outcome shall not hang on one deal."""
MIN_SESSIONS = 10
"""Two a fold: below that an interval says nothing."""
MAX_OBSERVATIONS = 20_000
"""Most sessions of a side; more would only take longer."""
SHOWN = 12
"""Tells in the report."""
EXAMPLE_LETTERS = 120
SEED = 0
"""The same sessions always give the same report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """A feature by which the classifier tells the two sides apart."""

    feature: str
    """Kind and value, such as ``path:/usr/lib``."""
    weight: float
    """Weight in the classifier, in standard deviations; above 0: production."""
    production_share: float
    """Share of production's sessions that show it, those that show it."""
    simulated_share: float
    production_example: str
    """A line of an observation that shows it; empty where none does."""
    simulated_example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityReport:
    """Discriminability of two sides: the classifier's accuracy and the features that tell them apart."""

    auc: Area
    production_sessions: int
    simulated_sessions: int
    production_observations: int
    simulated_observations: int
    tells: tuple[Tell, ...]
    """The plainest first."""

    @property
    def is_distinguishable(self) -> bool:
        """Return true if the classifier is surely better than a coin."""
        return self.auc.low > 0.5


def audit(production: Sequence[ToolObservation], simulated: Sequence[ToolObservation]) -> FidelityReport:
    """Compare the observations of two sides. Raises :class:`~etude.errors.ConfigError` for too few sessions."""
    sides = [_bounded(production), _bounded(simulated)]
    for name, side in zip(("production", "simulated"), sides, strict=True):
        _check_enough(name, side)
    rows = [observation for side in sides for observation in side]
    labels_N = np.repeat(np.array([1, 0]), [len(side) for side in sides])
    owners = [f"{label} {observation.session}" for label, observation in zip(labels_N, rows, strict=True)]
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    sessions_N = np.array([numbers[owner] for owner in owners])
    labels_S = np.array([int(owner[0]) for owner in numbers])
    features = [features_of(observation) for observation in rows]
    names = common_features(features, owners)
    matrix_ND = as_matrix(features, names)
    rng = np.random.default_rng(SEED)
    rounds: list[tuple[Array, Labels]] = []
    coefficients_D = np.zeros(len(names))
    for _ in range(ROUNDS):
        folds_S = assign_folds(labels_S, FOLDS, rng)
        scores_N, fitted_D = held_out_scores(matrix_ND, labels_N, sessions_N, folds_S)
        coefficients_D += fitted_D / ROUNDS
        rounds.append((scores_N, folds_S))
    return FidelityReport(
        auc=area(rounds, labels_N, sessions_N, rng),
        production_sessions=int((labels_S == 1).sum()),
        simulated_sessions=int((labels_S == 0).sum()),
        production_observations=len(sides[0]),
        simulated_observations=len(sides[1]),
        tells=_tells(matrix_ND, coefficients_D, names, rows, labels_S, sessions_N),
    )


def render(report: FidelityReport) -> str:
    """A fidelity report as text, one fact a line."""
    auc = report.auc
    verdict = "can be told apart" if report.is_distinguishable else "cannot be told apart by this"
    lines = [
        f"AUC {auc.value:.3f} (95 % interval {auc.low:.3f} to {auc.high:.3f}; 0.5 is indistinguishable): "
        f"the sides {verdict}",
        f"production: {report.production_observations} observations in {report.production_sessions} sessions; "
        f"simulated: {report.simulated_observations} in {report.simulated_sessions}",
    ]
    for tell in report.tells if report.is_distinguishable else ():
        lines.append(
            f"{tell.feature:32} {tell.production_share:6.1%} of production's sessions, {tell.simulated_share:6.1%} of "
            f"simulated ones"
        )
        examples = (("production", tell.production_example), ("simulated", tell.simulated_example))
        lines += [f"    {side}: {example}" for side, example in examples if example]
    return "\n".join(lines)


def to_json(report: FidelityReport) -> dict[str, Json]:
    """A fidelity report as JSON."""
    return {
        "auc": report.auc.value,
        "auc_low": report.auc.low,
        "auc_high": report.auc.high,
        "distinguishable": report.is_distinguishable,
        "production": {"sessions": report.production_sessions, "observations": report.production_observations},
        "simulated": {"sessions": report.simulated_sessions, "observations": report.simulated_observations},
        "tells": [asdict(tell) for tell in report.tells],
    }


def _bounded(side: Sequence[ToolObservation]) -> list[ToolObservation]:
    """Whole sessions, as many as are taken."""
    taken: list[ToolObservation] = []
    sessions: dict[str, list[ToolObservation]] = {}
    for observation in side:
        sessions.setdefault(observation.session, []).append(observation)
    for members in sessions.values():
        if taken and len(taken) + len(members) > MAX_OBSERVATIONS:
            break
        taken += members
    return taken


def _check_enough(name: str, side: Sequence[ToolObservation]) -> None:
    sessions = len({observation.session for observation in side})
    if sessions < MIN_SESSIONS:
        raise ConfigError(
            f"the {name} side has {sessions} sessions with {len(side)} observations: an audit needs at least "
            f"{MIN_SESSIONS} sessions a side, and says little below 30; record more"
        )


def _tells(
    matrix_ND: Array,
    coefficients_D: Array,
    names: Sequence[str],
    rows: Sequence[ToolObservation],
    labels_S: Labels,
    sessions_N: Labels,
) -> tuple[Tell, ...]:
    """The features with the largest coefficients in standard deviations."""
    weights_D = coefficients_D * matrix_ND.std(axis=0)
    tells: list[Tell] = []
    for index in np.argsort(-np.abs(weights_D))[:SHOWN]:
        has_S = np.bincount(sessions_N, matrix_ND[:, index], len(labels_S)) > 0
        tells.append(
            Tell(
                feature=names[index],
                weight=float(weights_D[index]),
                production_share=float(has_S[labels_S == 1].mean()),
                simulated_share=float(has_S[labels_S == 0].mean()),
                production_example=_example(rows, matrix_ND[:, index] * labels_S[sessions_N], names[index]),
                simulated_example=_example(rows, matrix_ND[:, index] * (1 - labels_S[sessions_N]), names[index]),
            )
        )
    return tuple(tells)


def _example(rows: Sequence[ToolObservation], has_N: Array, feature: str) -> str:
    """The line that shows a feature in the first observation that has it; for one of form, its call and first line."""
    if not has_N.any():
        return ""
    observation = rows[int(np.argmax(has_N > 0))]
    kind, _, value = feature.partition(":")
    lines = [line for line in observation.observation.splitlines() if line.strip()]
    if kind in ("size", "lines", "ending", "form", "latency", "exit"):
        call = " ".join((observation.tool, *observation.arguments.values())).strip()
        return f"{call} → {lines[0] if lines else ''}"[:EXAMPLE_LETTERS]
    sought = value.partition(" ")[0].strip("*").split("(")[0].lower()
    return next((line.strip() for line in lines if sought in line.lower()), lines[0] if lines else "")[:EXAMPLE_LETTERS]
