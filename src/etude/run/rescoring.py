"""Scoring of one rollout's tokens again, under the stored weights of the version that sampled them.

The trainer scores a share of every batch (:mod:`etude.trainer.mismatch`) while it has the weights in memory. Here the
weights are loaded from the weight store, much later. This module owns the loading and the assignment of scores to
turns; the trainer's rule decides which tokens are comparable. It computes on the trainer's device, as the trainer does.

Shape legend: L tokens of a trajectory, C sampled tokens of a turn, N compared tokens.
"""

import numpy as np
import torch

from etude.config.recipe import RunConfig
from etude.errors import EtudeError
from etude.models.checkpoint import load_spec
from etude.models.experts import Routing
from etude.run.folder import RunFolder
from etude.run.numerics import frozen_base, load_published, training_model
from etude.run.resolve import check_devices
from etude.run.weight_log import open_log
from etude.trainer.batching.build import build_trajectories
from etude.trainer.batching.turn_spans import places
from etude.trainer.mismatch import comparable
from etude.trainer.replay import producers, replay
from etude.trainer.scores import sampled_logprobs, sampled_tokens
from etude.types import Floats, Mask, Rollout, Trajectory
from etude.weights.pull import pull
from etude.weights.tensors import to_tensors


class Rescoring:
    """Computes the differences of rollouts one at a time; weights of a version are loaded on demand.

    Raises :class:`~etude.errors.ConfigError` if this machine cannot compute like the run's trainer.
    """

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        check_devices(config, ("trainer",))
        self._numerics = config.numerics
        self._log = open_log(folder)
        base = frozen_base(folder.model, config)
        spec = load_spec(folder.model, config.model.impl)
        self._model = training_model(spec, self._numerics, config.trainer.device, base)
        self._model.eval().requires_grad_(False)
        self._loaded: int | None = None
        self._missing: dict[int, str] = {}

    def differences(self, rollout: Rollout) -> tuple[list[Floats], list[str]]:
        """For each turn [C] log π_trainer − log π_engine, NaN where unknown; and the reasons.

        Payloads of turns must have been fetched.
        """
        trajectories = build_trajectories(rollout, 0.0)
        mismatches = [np.full(len(trajectory.token_ids), np.nan, np.float32) for trajectory in trajectories]
        for version in sorted({int(version) for turn in rollout.turns for version in turn.versions}):
            masks = [comparable(trajectory, version) for trajectory in trajectories]
            if any(mask.any() for mask in masks) and self._load(version):
                for trajectory, mask, differences_L in zip(trajectories, masks, mismatches, strict=True):
                    if mask.any():
                        self._compare(trajectory, mask, differences_L)
        turns = [
            np.full(len(turn.completion_ids), np.nan, np.float32) if place is None else mismatches[place[0]][place[1]]
            for turn, place in zip(rollout.turns, places(rollout.turns, trajectories), strict=True)
        ]
        return turns, self._reasons(rollout)

    def _load(self, version: int) -> bool:
        """Load the weights of ``version``; false if that is impossible."""
        if version == self._loaded or version in self._missing:
            return version == self._loaded
        try:
            load_published(self._model, to_tensors(pull(self._log, version).state), self._numerics)
        except EtudeError as error:
            self._missing[version] = str(error)
            return False
        self._loaded = version
        return True

    @torch.inference_mode()
    def _compare(self, trajectory: Trajectory, mask_L: Mask, differences_L: Floats) -> None:
        device = self._model.embedding.device
        tokens = sampled_tokens([trajectory], [mask_L], device)
        routing = None
        if self._numerics.replay != "off":
            routes = replay([(trajectory, producers(mask_L))], device)
            routing = Routing(replay=routes, floor=self._numerics.replay_floor)
        differences_N = sampled_logprobs(self._model, tokens, routing) - tokens.engine_logprobs_N
        differences_L[tokens.places_N.cpu().numpy()] = differences_N.cpu().numpy()

    def _reasons(self, rollout: Rollout) -> list[str]:
        """Distinct reasons why tokens have no mismatch."""
        versions = [{int(version) for version in turn.versions} for turn in rollout.turns]
        gone = sorted({version for several in versions for version in several} & self._missing.keys())
        reasons = [f"no mismatch for tokens of v{version}: {self._missing[version]}" for version in gone]
        if any(len(several) > 1 for several in versions):
            reasons.append("no mismatch for turns that several weight versions sampled: their context mixes versions")
        return reasons
