"""``[tasks]``, ``[sandboxes]``, ``[cheating]``: what is practised, where, and what is looked for."""

from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from etude.config.section import Section

OF_FOLDER = ("repository", "harbor")
"""Families whose tasks lie in a folder."""
OF_REPOSITORY = ("brief", "unprobed")
"""Keys of ``[tasks]`` that other families know nothing of."""
OF_BUGFIX = ("kinds", "hidden_cases")
"""Likewise."""
OF_LOOKUP = ("pages", "page_facts", "asked", "askable")
"""Likewise."""


OF_ONE_ANSWER = {
    "harbor": "Harbor's verifiers",
    "lookup": "a single right answer",
    "nextedit": "a single right line",
    "summaries": "a single right line",
}
"""Families whose checks cannot be made to contradict each other, and what those are."""


class TaskConfig(Section):
    """``[tasks]``: what is practised and how it is held out."""

    family: Literal["bugfix", "repository", "migrations", "harbor", "lookup", "nextedit", "summaries"] = "bugfix"
    """Planted bugs in short files; tasks built from repositories (``etude tasks build``); database migrations on a real
    PostgreSQL; tasks in Harbor's format; facts to be found in a material longer than a context;
    functions of the standard library to be told in a line; edits of it to be gone on with.
    """
    folder: str = ""
    """Where the tasks of a ``repository`` or ``harbor`` family lie."""
    brief: bool = False
    """Of a ``repository`` family only the tasks of one wrong line, asked for in a line that names its function: for a
    small model, which then is mid-trained on such repairs.
    """
    unprobed: bool = False
    """Take tasks of a ``repository`` family without probes, too: what code under test makes of its tests is then proved
    by canaries alone (``etude tasks build --unprobed`` makes such tasks).
    """
    impossible_share: float = Field(default=0.0, ge=0, le=0.1)
    """Share of training tasks that cannot be done: who passes one has cheated. 1 to 2 % is a meter."""
    kinds: tuple[Literal["arith", "slice", "comp", "loop", "range"], ...] = ("arith", "slice", "comp")
    """Kinds of planted-bug template in the family."""
    heldout_every: int = Field(default=6, ge=2, le=50)
    """One template in so many is held out."""
    hidden_cases: int = Field(default=10, ge=2, le=50)
    """Cases that grade a rollout; the agent never sees them."""
    pages: int = Field(default=15, ge=1, le=26)
    """Pages of a lookup task's material, each named by a letter."""
    page_facts: int = Field(default=5, ge=1, le=20)
    """Facts on a page."""
    asked: int = Field(default=2, ge=1, le=8)
    """Facts that are asked for."""
    askable: int = Field(default=0, ge=0)
    """Names that are ever asked for, the others being noise; 0: all of them. Finding a value by one of a few names is
    learnt ten times sooner than by any name.
    """

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if (self.family in OF_FOLDER) != bool(self.folder):
            has = "needs tasks.folder, where its tasks are" if not self.folder else "has no tasks.folder; leave it out"
            raise ValueError(f"tasks.family = {self.family!r} {has}")
        if self.impossible_share and self.family in OF_ONE_ANSWER:
            raise ValueError(
                f"tasks.impossible_share would have no effect on {OF_ONE_ANSWER[self.family]}; leave it out"
            )
        own = {"repository": OF_REPOSITORY, "bugfix": OF_BUGFIX, "lookup": OF_LOOKUP}
        idle = [name for family, names in own.items() if family != self.family for name in names]
        idle += ["heldout_every"] if self.family == "nextedit" else []  # eval.heldout_every says it of texts
        self.refuse_idle("tasks", idle, f"with tasks.family = {self.family!r}")
        return self


class SandboxConfig(Section):
    """``[sandboxes]``: where agents' commands run."""

    kind: Literal["local", "ns", "gvisor", "qemu", "remote"] = "local"
    """``local`` forks short programs over a folder, thousands a minute; ``ns`` is a small machine of namespaces over an
    image; ``gvisor`` and ``qemu`` have a kernel of their own; ``remote`` is somewhere else.
    """
    url: str = ""
    """Of a ``remote`` server (``etude sandboxes serve``); its key is in ``ETUDE_SANDBOXES_KEY``."""
    images: str = ""
    """Folder of images; empty: ``ETUDE_IMAGES``, else the user's cache."""
    warm: int = Field(default=0, ge=0)
    """Most sandboxes that a warm pool holds, those in use included; 0: each is made when it is asked for."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if (self.kind == "remote") != bool(self.url):
            raise ValueError(f"sandboxes.kind = {self.kind!r} and sandboxes.url = {self.url!r} do not go together")
        if self.warm and self.kind == "local":
            raise ValueError("sandboxes.warm would have no effect with sandboxes.kind = 'local'; leave it out")
        return self


Outcome: TypeAlias = Literal["keep", "quarantine", "zero"]
"""What becomes of a rollout: trained on, kept out of training, trained on with a reward of zero."""


class CheatingConfig(Section):
    """``[cheating]``: what is looked for in rollouts, and what becomes of those in which it was found."""

    honeypots: bool = False
    """Lay baits in every sandbox: hidden tests, a solution, expected answers that are none."""
    on_low: Outcome = "keep"
    """What may well be honest, such as an edited visible test."""
    on_medium: Outcome = "quarantine"
    """What honest work hardly ever does."""
    on_high: Outcome = "zero"
    """What honest work never does."""
    exceptions: dict[str, Outcome] = Field(default={})
    """Name of a detector, or of a grader's ``cheat_`` part → what follows from it."""
