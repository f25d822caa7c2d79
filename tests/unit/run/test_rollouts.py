"""What a run counts on before its rollouts start, and what it shows to an external harness."""

import asyncio
from pathlib import Path

import pytest

from etude.config.recipe import EvalConfig, default_recipe
from etude.errors import ConfigError
from etude.rollouts.fake import FakeSandboxes
from etude.run.folder import RunFolder
from etude.run.rollouts import check_sandboxes, evaluations_due, harness_mounts, write_harness
from etude.worlds import Capability


def test_a_harness_gets_its_files_and_nothing_else_of_the_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    place = write_harness(folder, {"a.yaml": "x: 1\n"})
    assert write_harness(folder, {"a.yaml": "x: 2\n"}) == place
    assert [(path.name, path.read_text()) for path in place.iterdir()] == [("a.yaml", "x: 2\n")]
    assert place.stat().st_mode & 0o005 == 0o005
    assert place.parent.stat().st_mode & 0o077 == 0


def test_mounts_are_folders_of_this_machine(tmp_path: Path) -> None:
    assert harness_mounts([str(tmp_path)]) == {str(tmp_path): tmp_path}
    with pytest.raises(ConfigError, match="no-such-folder"):
        harness_mounts([str(tmp_path / "no-such-folder")])


def test_rl_is_measured_on_the_way_between_its_ends() -> None:
    assert list(evaluations_due(40, EvalConfig(every_steps=10))) == [10, 20, 30]
    assert list(evaluations_due(5, EvalConfig(every_steps=10))) == []
    assert not evaluations_due(40, EvalConfig())
    assert not evaluations_due(40, EvalConfig(enabled=False, every_steps=10))


class Sandboxes(FakeSandboxes):
    """Claim what they are told to."""

    def __init__(self, *claims: Capability) -> None:
        super().__init__()
        self._claims = frozenset(claims)

    async def capabilities(self) -> frozenset[Capability]:
        return self._claims


CONFINED = (Capability.CONFINED, Capability.NETWORK_OFF)


@pytest.mark.parametrize("claim", [Capability.FORK, Capability.LIVE_FORK])
def test_rollouts_branch_where_sandboxes_can_be_forked(claim: Capability) -> None:
    config = default_recipe(["credit.kind=shared_prefix", "credit.branches=2", "sandboxes.kind=ns"])
    asyncio.run(check_sandboxes(Sandboxes(*CONFINED, claim), config))
    with pytest.raises(ConfigError, match=r"credit\.branches = 2 forks sandboxes, which sandboxes\.kind = 'ns'"):
        asyncio.run(check_sandboxes(Sandboxes(*CONFINED), config))


def test_programs_of_a_model_are_locked_in_or_let_out_on_purpose() -> None:
    asyncio.run(check_sandboxes(Sandboxes(*CONFINED), default_recipe()))
    with pytest.raises(ConfigError, match="does not keep sandboxes network off"):
        asyncio.run(check_sandboxes(Sandboxes(*CONFINED[:1]), default_recipe()))
    asyncio.run(check_sandboxes(Sandboxes(), default_recipe(["rollouts.allow_unconfined=true"])))
