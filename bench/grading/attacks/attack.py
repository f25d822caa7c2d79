"""What an attack on a grader is: files and commands that shall pass for a solution, which they are not."""

from collections.abc import Mapping
from dataclasses import dataclass, field

STUB = "<stub>"
"""Stands for the source that the agent found."""
MODULE = "<module>"
"""Stands for the path of the file that the task is about; as a key and in texts."""
TEST = "<test>"
"""Stands for the path of the first hidden test file, should the agent guess it; as a key and in texts."""


FOLKLORE = "folklore about graders of the SWE-bench kind"
DENISON = "Denison et al. 2024, Sycophancy to subterfuge"
BAKER = "Baker et al. 2025, Monitoring reasoning models for misbehavior"
METR = "METR 2025, Recent frontier models are reward hacking"
ZHONG = "Zhong et al. 2025, ImpossibleBench"
"""Where attacks are known from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One way to pass without a solution."""

    name: str
    what: str
    """What it does, in a sentence."""
    subject: str = "slugs"
    """The task that is attacked."""
    source: str = ""
    """Where it is known from; empty for one of our own."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Left by the agent: path → text."""
    commands: tuple[str, ...] = ()
    """Run by the agent's shell, after the files were written."""

    def filled(self, text: str, module: str, stub: str, test: str) -> str:
        """A text with what stands for something replaced."""
        return text.replace(STUB, stub).replace(MODULE, module).replace(TEST, test)


def beside(code: str) -> dict[str, str]:
    """The stub with some code below it: what runs when the module is imported."""
    return {MODULE: f"{STUB}\n\n{code}"}
