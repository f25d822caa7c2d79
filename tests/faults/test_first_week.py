"""A user's first week, with the installed wheel and outside the checkout: no file of étude's is changed.

The checkpoint is made by transformers. Tasks, agent, grader, reward function, loss, advantage, sink, sandboxes and
engine are the examples of ``docs/extending.md``, in the user's own folder beside the recipe.
"""

import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from chat_formats import TEMPLATES, make_tokenizer

CHECKOUT = Path(__file__).parents[2]
EXAMPLES = CHECKOUT / "examples" / "extend"
STEPS = 3
USER_ERROR = 2
DEADLINE_S = 600.0
"""A bound on what hangs, not on what a busy machine is slow at."""
READ_RUN = """
import sys
from pathlib import Path

import etude

assert Path(etude.__file__).is_relative_to(sys.prefix), etude.__file__
run = etude.open("runs/week")
assert all({"near", "exact", "variety"} <= step.reward_parts.keys() for step in run.steps())
print(len(run.steps()), len(run.rollouts(purpose="train", reward=">0").to_pandas()), run.report()["finished"])
"""

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


class Home:
    """A user's folder, and the programs of the environment with the installed wheel."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self._programs = folder, programs

    def run(self, program: str, *arguments: str, status: int = 0) -> str:
        """Run a program and return its output; the test fails if its exit status is not ``status``."""
        command = [str(self._programs / program), *arguments]
        ended = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        output = ended.stdout + ended.stderr
        assert ended.returncode == status, f"{' '.join(command)}: {ended.returncode}\n{output[-4000:]}"
        return output


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An environment with the wheel of this checkout and, further down its path, the packages that étude needs."""
    environment, wheels = tmp_path / "environment", tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = tmp_path / "source"
    shutil.copytree(CHECKOUT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    shutil.copytree(CHECKOUT / "recipes", source / "recipes")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (wheel,) = wheels.glob("etude-*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True, capture_output=True)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    (packages / "needs.pth").write_text("\n".join(site.getsitepackages()))
    shutil.rmtree(source)
    folder = tmp_path / "home"
    folder.mkdir()
    return Home(folder, environment / "bin")


def save_checkpoint(folder: Path) -> None:
    """Write a small Llama with random weights and a chat template, as transformers writes one."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers annotates it in part
        tokenizer_object=make_tokenizer(), eos_token="<|im_end|>"
    )
    tokenizer.chat_template = (TEMPLATES / "qwen.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        eos_token_id=end,
        pad_token_id=end,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)


@pytest.mark.heavy("a minute")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers
def test_a_first_week_from_the_installed_wheel(home: Home) -> None:
    shutil.copytree(EXAMPLES, home.folder / "week")
    save_checkpoint(home.folder / "checkpoint")
    recipe = ["week", "--set", "model.checkpoint=checkpoint"]
    curve = 'log.to=[{kind="@sink.py:RewardCurve", options={file="rewards.txt"}}]'

    # The evening before: a recipe that comes with the wheel is found, in a folder that has none.
    assert 'name = "quickstart"' in home.run("etude", "run", "quickstart", "--dry-run")

    # Monday: a typing error is found before anything is started, and leaves nothing behind.
    refused = home.run(
        "etude", "run", *recipe, "--set", "tasks.options.largst=9", "--out", "runs/week", status=USER_ERROR
    )
    assert "did you mean 'tasks.options.largest'" in refused
    assert not (home.folder / "runs").exists()

    # Tuesday: would it run here? Wednesday: it does, and the run outlives the folder of its recipe.
    ready = home.run("etude", "check", *recipe)
    assert "session" in ready
    home.run("etude", "run", *recipe, "--set", curve, "--set", "trainer.steps=1", "--out", "runs/week")
    shutil.rmtree(home.folder / "week")
    home.run("etude", "run", "--resume", "runs/week", "--set", f"trainer.steps={STEPS}")
    lines = (home.folder / "runs" / "week" / "rewards.txt").read_text().splitlines()
    rewards = [float(line.split()[1]) for line in lines]
    assert len(rewards) == STEPS
    assert all(0 < reward <= 1 for reward in rewards)

    # Friday: what has happened, and the model to take home.
    steps, rewarded, finished = home.run("python", "-c", READ_RUN).split()[-3:]
    assert (int(steps), finished) == (STEPS, "True")
    assert int(rewarded) > 0
    assert "?" in home.run("etude", "show", "runs/week", "--group", "0")
    home.run("etude", "weights", "export", "runs/week", "model")
    assert (home.folder / "model" / "tokenizer.json").is_file()
