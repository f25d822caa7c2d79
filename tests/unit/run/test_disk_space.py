"""A run's need of disk space is computed before it is made."""

from pathlib import Path

import pytest

from etude.config.loading import default_recipe
from etude.errors import UserError
from etude.run.disk_space import DiskNeed, check_disk_space
from smalldisk import small_disk

BILLION = 1_000_000_000


def test_the_need_of_a_known_model_is_what_is_kept_of_it() -> None:
    config = default_recipe(["trainer.steps=135", "numerics.dtype=bfloat16", "midtrain.tokens=1000000"])
    need = DiskNeed.of(config, BILLION)
    assert need.checkpoints == 3 * 12 * BILLION, "two are kept while a third is written"
    assert need.phases == 12 * BILLION + 3 * 4 * BILLION, "a training state; the start, what mid-training left, a copy"
    assert need.weights == 4 * BILLION + 2 * BILLION, "versions 0, 64 and 128 whole, at two thirds; 135 deltas"
    assert need.total == need.checkpoints + need.phases + need.weights
    started = config.model_copy(update={"midtrain": config.midtrain.model_copy(update={"tokens": 0})})
    assert DiskNeed.of(started, BILLION).phases == 3 * 4 * BILLION, "no step, no state"


def test_a_run_that_cannot_fit_is_refused_and_one_that_hardly_does_is_warned_of() -> None:
    need, place = DiskNeed.of(default_recipe([]), BILLION), Path("runs/here")
    with pytest.raises(UserError, match=r"disk of runs/here has .* 1,000,000,000 parameters.*choose another --out"):
        need.compare(need.total - 1, place)
    (warning,) = need.compare(2 * need.total - 1, place)
    assert "takes at least" in warning
    assert need.compare(2 * need.total, place) == []


def test_the_disk_that_is_asked_is_that_of_the_run(tmp_path: Path) -> None:
    config = default_recipe([])
    with small_disk(tmp_path / "disk") as disk, pytest.raises(UserError, match=r"has 1\.05 MB free"):
        check_disk_space(config, disk / "runs" / "new")
