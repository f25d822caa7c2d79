"""Properties of a server process before it is started."""

from pathlib import Path

from etude.engines.api_client import LOAD_S
from etude.engines.server_process import limits_of


def test_a_larger_checkpoint_may_take_longer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    with (tmp_path / "model-00001-of-00002.safetensors").open("wb") as sparse:
        sparse.truncate(30_000_000_000)
    limits = limits_of(tmp_path, 64)
    assert (limits.vocab_size, limits.max_length, limits.load_s) == (9, 64, LOAD_S + 300)
