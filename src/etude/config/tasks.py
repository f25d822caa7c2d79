"""``[tasks]``, ``[sandboxes]``, ``[cheating]``: the tasks, the machines they run on, and the detection of cheating."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, PlainValidator, SerializeAsAny, model_validator

from etude.config.plugins import Registry
from etude.config.section import JsonTable, OptionsOf, Section
from etude.errors import ConfigError

FOLDER_FAMILIES = ("repository", "harbor", "requests", "suite")
"""Families whose tasks lie in a folder."""
OPTIONAL_FOLDER_FAMILIES = ("verifiers",)
"""Families that look into a folder where one is named."""
THIRD_PARTY_FAMILIES = ("verifiers", "openenv")
"""Families of other people's environments, each played by the harness of its name."""
MACHINE_FAMILIES = ("repository", "migrations", "harbor")
"""Families whose tasks need a machine around their files; those of others say so one by one."""
ENDLESS_FAMILIES = ("bugfix", "migrations", "lookup", "nextedit", "openenv")
"""Families with an endless supply of new training tasks; the others have a fixed number, and epochs."""
ANSWER_FAMILIES = ("dataset", "lookup", "nextedit", "summaries")
"""Families that ask for an answer, which an external harness has no way to give."""
MIXED_FAMILIES = ("requests", "suite")
"""Families of which some tasks ask for an answer, and some for changed files."""
ALWAYS_SOLVABLE_FAMILIES = {
    "dataset": "a single right answer",
    "harbor": "Harbor's verifiers",
    "requests": "requests, which no test grades",
    "suite": "a suite, which is measured with and never trained on",
    "lookup": "a single right answer",
    "nextedit": "a single right line",
    "summaries": "a single right line",
    "verifiers": "an environment's own rewards",
    "openenv": "an environment's own rewards",
}
"""Families whose checks cannot be made to contradict each other, and what those are."""
BUILTIN_TOOL_OPTIONS = ("files", "search", "bad_call", "correct_call", "reminded")
"""Options about the built-in harness's tools, and their demonstrations."""


class BugfixOptions(Section):
    """Planted bugs in short files, and the imperfect agent that mid-training imitates on them."""

    kinds: tuple[Literal["arith", "slice", "comp", "loop", "range"], ...] = Field(
        default=("arith", "slice", "comp"), min_length=1
    )
    """Kinds of planted-bug template in the family."""
    untrained: tuple[str, ...] = ()
    """Kinds that RL never trains on: they appear in mid-training and in evaluations, which then measure transfer."""
    hidden_label: bool = False
    """True if the right line also returns a label, a word that only the output of the failing test shows: ``return [a +
    b, 'elm']``.
    """
    files: int = Field(default=1, ge=1, le=8)
    """Files of a task; with several the prompt does not say which one has the function."""
    right_edit: float = Field(default=0.4, ge=0, le=1)
    """Demonstrations: probability that an edit is the right one."""
    read_first: float = Field(default=0.8, ge=0, le=1)
    """Demonstrations: probability of reading the file before the first edit."""
    stub: float = Field(default=0.0, ge=0, le=1)
    """Demonstrations: probability that an edit of a file that was not read writes a stub (``pass``) instead of a line
    with guessed names, so that the model has to learn to read and does not learn to guess.
    """
    test_after: float = Field(default=0.5, ge=0, le=1)
    """Demonstrations: probability of testing after an edit."""
    retry: float = Field(default=0.45, ge=0, le=1)
    """Demonstrations: probability of another try after a failing test."""
    follow_test: float = Field(default=0.0, ge=0, le=1)
    """Demonstrations: probability that an edit after a failing test uses the label that the test showed instead of a
    wrong one (``hidden_label``).
    """
    search: float = Field(default=0.0, ge=0, le=1)
    """Demonstrations: probability of searching for a file that the prompt does not name instead of reading files with
    guessed names (``files``).
    """
    bad_call: float = Field(default=0.0, ge=0, le=1)
    """Demonstrations: probability that an edit is first written as ``edit FILE:N``, which is no call."""
    correct_call: float = Field(default=1.0, ge=0, le=1)
    """Demonstrations: probability that such an edit is corrected next, instead of repeated or given up."""
    reminded: float = Field(default=0.0, ge=0, le=1)
    """Demonstrations: probability, before each message of the agent, that the user reminds it of the syntax of an edit;
    the next edit is then correct.
    """

    @model_validator(mode="after")
    def _check_demonstrations(self) -> Self:
        section = "tasks.options"
        if strange := [kind for kind in self.untrained if kind not in self.kinds]:
            raise ValueError(f"{section}.untrained: {strange[0]!r} is none of {section}.kinds = {list(self.kinds)}")
        if not set(self.kinds) - set(self.untrained):
            raise ValueError(f"{section}.untrained: RL has no task, for these are all of {section}.kinds")
        if self.hidden_label and "loop" in self.kinds:
            raise ValueError(
                f"{section}.hidden_label = true needs an answer line that returns the result, which kinds = 'loop' has "
                f"not: leave 'loop' out of {section}.kinds"
            )
        if not self.hidden_label:
            self.refuse_idle(section, ["follow_test"], "without tasks.options.hidden_label")
        if self.files == 1:
            self.refuse_idle(section, ["search"], "with tasks.options.files = 1, whose name the prompt says")
        if not self.bad_call:
            self.refuse_idle(section, ["correct_call"], "without tasks.options.bad_call")
        return self


class RepositoryOptions(Section):
    """Tasks built from repositories (``etude tasks build``)."""

    brief: bool = False
    """Use only tasks with one wrong line, whose prompt is one line that names the function: for a small model, which is
    then mid-trained on such repairs.
    """
    unprobed: bool = False
    """Use tasks without probes as well: then canaries alone prove that the code under test did not tamper with its
    tests (``etude tasks build --unprobed`` makes such tasks).
    """
    right_edit: float = Field(default=0.4, ge=0, le=1)
    """Demonstrations (``brief``): probability that an edit is the right one."""
    read_first: float = Field(default=0.8, ge=0, le=1)
    """Demonstrations (``brief``): probability of reading the file before the edit."""
    elsewhere: float = Field(default=0.0, ge=0, le=1)
    """Demonstrations (``brief``): share of documents about short functions of the Python standard library: sessions
    with a planted bug, and instead of right code, exercises that write every line of a function with several bugs
    again. The other documents are about the tasks' own training functions, which a small model remembers; in thousands
    of other functions it has to read.
    """


class LookupOptions(Section):
    """Facts to be found in a material longer than a context."""

    pages: int = Field(default=15, ge=1, le=26)
    """Pages of a task's material, each named by a letter."""
    page_facts: int = Field(default=5, ge=1, le=20)
    """Facts on a page."""
    questions: int = Field(default=2, ge=1, le=8)
    """Facts that a task asks for."""
    question_names: int = Field(default=0, ge=0)
    """Names that questions may ask for, the others being noise; 0: all of them. Finding a value by one of a few names
    is learnt ten times sooner than by any name.
    """
    keep_fact: float = Field(default=0.8, ge=0, le=1)
    """Demonstrations: probability that a summary keeps a fact that is asked for, rather than another one."""


class NextEditOptions(Section):
    """Edits of the standard library to be continued."""

    right_edit: float = Field(default=0.4, ge=0, le=1)
    """Demonstrations: probability that a suggestion is the right one."""


class DatasetOptions(Section):
    """Rows of a data set: what is asked, and the right answer."""

    path: str = Field(default="", min_length=1, validate_default=True)
    """JSON lines (``.jsonl``), a Parquet file, a folder of either, or one that Hugging Face's ``save_to_disk`` made. Of
    a set of several splits, the folder of one.
    """
    heldout_path: str = ""
    """The held-out rows, in the same formats; empty: one row in ``tasks.heldout_every``, by the hash of its prompt."""
    prompt: str = Field(default="prompt", min_length=1)
    """Column with the prompt."""
    messages: str = ""
    """Column with a conversation instead of ``prompt``: a list of ``{"role": …, "content": …}`` that ends with the
    user's message, or with the assistant's, which is then the right answer if ``answer`` is empty.
    """
    answer: str = "answer"
    """Column with the right answer, a text or a number; with ``match = "choice"`` a letter, or a number from 0."""
    choices: str = ""
    """Column with the list of answers to choose from, which are appended to the prompt as ``A. …``, ``B. …``."""
    answer_after: str = ""
    """Text after whose last occurrence the answer begins, such as ``####``; what comes before it, in a model's reply or
    in the column, is not compared.
    """
    match: Literal["exact", "normalised", "choice", "math"] = "normalised"
    """Comparison of answers: ``exact``, word by word; ``normalised``, ignoring case, articles and punctuation;
    ``choice``, the letter alone; ``math``, as mathematics (``math-verify``: extra ``math``).
    """
    right_answer: float = Field(default=1.0, ge=0, le=1)
    """Demonstrations: probability that the answer is the right one, rather than that of another row."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if self.messages:
            self.refuse_idle("tasks.options", ["prompt"], "with tasks.options.messages")
        elif not self.answer:
            raise ValueError(
                "tasks.options.answer is empty: name the column of right answers, or a column of conversations that "
                "end with one (tasks.options.messages)"
            )
        if self.match != "choice":
            self.refuse_idle("tasks.options", ["choices"], f"with tasks.options.match = {self.match!r}; set 'choice'")
        return self


class VerifiersOptions(Section):
    """An environment of the ``verifiers`` package, run as it is in a Python of its own."""

    env: str = Field(default="", min_length=1, validate_default=True)
    """Name of the environment: of an installed package, or of a module in ``tasks.folder``."""
    args: JsonTable = Field(default={})
    """Keys of the environment's taskset, as its own class defines them."""
    agent: JsonTable = Field(default={})
    """Keys of the agent that the package runs, as its ``[env.agent]`` has them, such as ``harness``, ``max_turns``."""
    python: str = ""
    """The interpreter of an environment with ``verifiers``; empty looks at ``ETUDE_VERIFIERS_PYTHON``, then in
    ``.venv-environments``.
    """
    max_tasks: int = Field(default=1000, ge=1)
    """Tasks that are used: the first ones of the environment."""


class OpenEnvOptions(Section):
    """An environment that a server with OpenEnv's protocol plays."""

    url: str = Field(default="", pattern=r"^https?://", validate_default=True)
    """URL of the server, which étude neither starts nor stops."""


FAMILIES = Registry(
    "tasks.family",
    "task family",
    {
        "bugfix": "etude.tasks.bugfix:BugfixFamily.open",
        "repository": "etude.tasks.repositories.family:open_repositories",
        "migrations": "etude.tasks.migrations.family:MigrationFamily.open",
        "harbor": "etude.tasks.harbor.family:HarborTasks.open",
        "lookup": "etude.tasks.lookup:LookupFamily.open",
        "nextedit": "etude.tasks.nextedit:NextEditFamily.open",
        "summaries": "etude.tasks.summaries:SummariesFamily.open",
        "verifiers": "etude.tasks.verifiers.family:VerifiersTasks",
        "openenv": "etude.tasks.openenv:OpenEnvTasks",
        "dataset": "etude.tasks.datasets.family:DatasetTasks.open",
        "requests": "etude.tasks.requests:RequestTasks.open",
        "suite": "etude.tasks.suites:SuiteTasks.open",
    },
)
"""Families by name: each is called with its options and a :class:`~etude.protocols.FamilyContext`."""
FAMILY_OPTIONS = OptionsOf(
    "tasks",
    "family",
    {
        "bugfix": BugfixOptions,
        "repository": RepositoryOptions,
        "lookup": LookupOptions,
        "nextedit": NextEditOptions,
        "verifiers": VerifiersOptions,
        "openenv": OpenEnvOptions,
        "dataset": DatasetOptions,
    },
    names=FAMILIES,
)
GRADERS = Registry(
    "tasks.graders",
    "grader",
    {"outcome": "etude.tasks.outcomes:OutcomeGrader", "kept_files": "etude.tasks.requests:KeptFilesGrader"},
)
"""Graders by name: each is called with a task's options and a :class:`~etude.protocols.GraderContext`."""


class PoolsOptions(Section):
    """Tasks in pools of easy, normal and hard ones, by the mean reward of each when it was last tried."""

    easy_share: float = Field(default=0.25, ge=0, le=1)
    """Share of draws from the pool of easy tasks."""
    hard_share: float = Field(default=0.25, ge=0, le=1)
    """Share of draws from the pool of hard tasks; the rest are from the other tasks, including those never tried. The
    share of an empty pool goes to the others.
    """
    easy_from: float = Field(default=0.8, gt=0, le=1)
    """Mean reward from which a task is easy."""
    hard_to: float = Field(default=0.2, ge=0, lt=1)
    """Mean reward up to which a task is hard."""
    rest_epochs: float = Field(default=4.0, ge=0)
    """Epochs for which a task is left out of all pools after its rewards were all 1, or all 0."""

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if self.easy_share + self.hard_share >= 1:
            raise ValueError(
                f"tasks.selection.options: easy_share = {self.easy_share:g} and hard_share = {self.hard_share:g} leave "
                f"nothing for tasks that are neither: their sum must be below 1"
            )
        if self.hard_to >= self.easy_from:
            raise ValueError(
                f"tasks.selection.options: hard_to = {self.hard_to:g} must be below easy_from = {self.easy_from:g}"
            )
        return self


class ThompsonOptions(Section):
    """Thompson sampling: each task's pass rate p is drawn from what is known of it, and tasks by p (1 − p)."""

    uniform_share: float = Field(default=0.2, gt=0, le=1)
    """Share of draws from all tasks uniformly: no group then weighs more than 1 / ``uniform_share`` times as much as
    another.
    """
    half_life_epochs: float = Field(default=4.0, gt=0)
    """Epochs after which an observation of a task counts half, since the model changes."""


SELECTION_OPTIONS = OptionsOf("tasks.selection", "kind", {"pools": PoolsOptions, "thompson": ThompsonOptions})


class SelectionConfig(Section):
    """``[tasks.selection]``: which training task comes next. An epoch is as many draws as there are tasks."""

    kind: Literal["in_order", "pools", "thompson"] = "in_order"
    """All tasks once an epoch, or more often those from which something can be learnt now."""
    importance_weights: bool = True
    """Weight each group by the probability of its task under uniform draws over its actual one: the gradient is then
    that of the mean over all tasks. Without weights it is that of the tasks as they are drawn (``docs/control.md``).
    """
    options: Annotated[SerializeAsAny[Section], PlainValidator(SELECTION_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[tasks.selection.options]``: keys of the kind alone."""

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if self.kind == "in_order":
            self.refuse_idle("tasks.selection", ["importance_weights"], "with tasks.selection.kind = 'in_order'")
        return self


class TaskConfig(Section):
    """``[tasks]``: the family of tasks, and what is held out of it."""

    family: Annotated[str, AfterValidator(FAMILIES)] = "bugfix"
    """Planted bugs in short files; tasks built from repositories (``etude tasks build``); database migrations on a real
    PostgreSQL; tasks in Harbor's format; facts to be found in a material longer than a context; edits of the standard
    library to be continued; functions of it to be summarised in a line; prompts with right answers out of a data set;
    other people's environments: of the ``verifiers`` package, or behind a server with OpenEnv's protocol; users'
    requests without tests, for a judge, and a suite (``docs/suites.md``), all of both held out. Or a family of your
    own (``docs/extending.md``).
    """
    folder: str = ""
    """Folder with the tasks of a ``repository``, ``harbor``, ``requests`` or ``suite`` family, or of one of your own;
    of ``verifiers``, with environments that are not installed.
    """
    impossible_share: float = Field(default=0.0, ge=0, le=0.1)
    """Share of training tasks that cannot be solved: a rollout that passes one has cheated. 1 to 2 % is enough to
    measure cheating.
    """
    heldout_every: int = Field(default=6, ge=2, le=50)
    """Holdout ratio: one template in this many is held out."""
    epochs: int = Field(default=0, ge=0)
    """Times that each training task may be used, each time in a new order; 0: as often as the steps need. A run that
    needs more is refused before it starts.
    """
    graders: dict[str, str] = Field(default={})
    """Graders of your own: the name by which tasks call one → ``module:Name`` or ``@file.py:Name``
    (``docs/extending.md``).
    """
    options: Annotated[SerializeAsAny[Section], PlainValidator(FAMILY_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[tasks.options]``: keys of the family alone."""
    selection: SelectionConfig = SelectionConfig()
    """The tasks to spend on."""

    @model_validator(mode="after")
    def _check_family(self) -> Self:
        has_choice = self.family not in FAMILIES.builtins or self.family in OPTIONAL_FOLDER_FAMILIES
        if not has_choice and (self.family in FOLDER_FAMILIES) != bool(self.folder):
            has = "needs tasks.folder, where its tasks are" if not self.folder else "has no tasks.folder; leave it out"
            raise ValueError(f"tasks.family = {self.family!r} {has}")
        if self.impossible_share and self.family in ALWAYS_SOLVABLE_FAMILIES:
            raise ValueError(
                f"tasks.impossible_share would have no effect on {ALWAYS_SOLVABLE_FAMILIES[self.family]}; leave it out"
            )
        for name in self.graders.values():
            GRADERS(name)
        if self.family in ENDLESS_FAMILIES:
            self.refuse_idle("tasks", ["epochs"], f"with tasks.family = {self.family!r}, whose tasks have no end")
        if self.selection.kind != "in_order":
            why = f"with tasks.selection.kind = {self.selection.kind!r}"
            if self.family in ENDLESS_FAMILIES:
                raise ValueError(
                    f"tasks.selection.kind = {self.selection.kind!r} chooses among tasks that come again, but those of "
                    f"tasks.family = {self.family!r} have no end: leave it out"
                )
            self.refuse_idle("tasks", ["epochs"], f"{why}, which lets a task come as often as it is worth it")
        if isinstance(self.options, DatasetOptions) and self.options.heldout_path:
            self.refuse_idle("tasks", ["heldout_every"], "with tasks.options.heldout_path, which says what is held out")
        if self.family == "suite":
            self.refuse_idle("tasks", ["heldout_every"], "with tasks.family = 'suite', all of which is held out")
        if self.family == "nextedit":  # eval.heldout_every says it of texts
            self.refuse_idle("tasks", ["heldout_every"], "with tasks.family = 'nextedit'")
        return self


class LocalOptions(Section):
    """Short programs, forked over a folder."""

    workers: int = Field(default=2, ge=1)
    """Processes that fork sandboxed commands."""
    allow_unconfined: bool = False
    """Run the model's programs even on a machine that grants no namespaces to confine them."""


class RemoteOptions(Section):
    """Servers of sandboxes on other machines (``etude sandboxes serve``), besides a fleet's own sandbox hosts."""

    url: str = ""
    """URL of the only server, also on a fleet; its key is in ``ETUDE_SANDBOXES_KEY``."""
    urls: tuple[str, ...] = ()
    """URLs of several servers instead of ``url``, with the same key: each sandbox is made on the server with the most
    room, or on one that already has its image. The sandbox hosts of a fleet need not be named.
    """
    connections: int = Field(default=0, ge=0)
    """Most connections to each server at a time, one for each call in progress; 0: as many as the limit of open files
    allows.
    """

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        table = "sandboxes.options"
        if self.url and self.urls:
            raise ValueError(
                f"{table}.url = {self.url!r} and {table}.urls = {list(self.urls)}: name one server by url, or several "
                "by urls"
            )
        for url in (self.url,) if self.url else self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{table}: {url!r} is not a URL of a server: expected http://… or https://…")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(f"{table}.urls = {list(self.urls)}: name each server once")
        return self

    def check_servers(self, *, on_fleet: bool) -> None:
        """Raise :class:`~etude.errors.ConfigError` if there is no server; ``on_fleet`` if a fleet has sandbox hosts."""
        if not (self.url or self.urls or on_fleet):
            raise ConfigError(
                "sandboxes.kind = 'remote' has no server: name one by sandboxes.options.url or several by "
                "sandboxes.options.urls, or run it on a fleet with regions[].sandbox_hosts"
            )


PROVIDERS = Registry(
    "sandboxes.kind",
    "sandbox provider",
    {
        "local": "etude.sandboxes.providers:open_local",
        "ns": "etude.sandboxes.providers:open_namespaces",
        **dict.fromkeys(("crun", "gvisor"), "etude.sandboxes.providers:open_oci"),
        "qemu": "etude.sandboxes.providers:open_qemu",
        "remote": "etude.sandboxes.providers:open_remote",
    },
)
"""Providers by name: each is called with its options and a :class:`~etude.sandboxes.providers.ProviderContext`."""
PROVIDER_OPTIONS = OptionsOf("sandboxes", "kind", {"local": LocalOptions, "remote": RemoteOptions}, names=PROVIDERS)


LentKind: TypeAlias = Literal["ns", "crun", "gvisor", "qemu"]
"""Kinds of sandbox that a server lends."""
MachineKind: TypeAlias = Literal[LentKind, "remote"]
"""Kinds that have a machine around their files."""
SandboxKind: TypeAlias = Literal["local", MachineKind]
"""All kinds: leaves of :class:`~etude.protocols.SandboxProvider`."""


class SandboxConfig(Section):
    """``[sandboxes]``: the machines on which agents' commands run."""

    kind: Annotated[str, AfterValidator(PROVIDERS)] = "local"
    """``local`` forks short programs over a folder, thousands a minute; ``ns`` is a small machine of namespaces over an
    image, ``crun`` a container over one; ``gvisor`` and ``qemu`` have a kernel of their own; ``remote`` is somewhere
    else. Or a provider of your own (``docs/extending.md``).
    """
    images: str = ""
    """Folder of images; empty: ``ETUDE_IMAGES``, else the user's cache."""
    pool_size: int = Field(default=0, ge=0)
    """Most sandboxes in a warm pool, those in use included; 0: each is made on demand."""
    options: Annotated[SerializeAsAny[Section], PlainValidator(PROVIDER_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[sandboxes.options]``: keys of the kind alone."""

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if self.kind == "local":
            self.refuse_idle("sandboxes", ["pool_size"], "with sandboxes.kind = 'local'")
        return self


Outcome: TypeAlias = Literal["keep", "quarantine", "zero"]
"""Consequences for a rollout: trained on, kept out of training, trained on with a reward of zero."""


class CheatingConfig(Section):
    """``[cheating]``: detection of cheating in rollouts, and its consequences."""

    honeypots: bool = False
    """Put baits into every sandbox: files that look like hidden tests, a solution or expected answers, and are not."""
    outcomes: dict[str, Outcome] = Field(default={})
    """Sign of cheating → its consequence, to override the default. ``low`` may well be honest, such as an edited
    visible test, and is kept; ``medium`` is what honest work hardly ever does, and is quarantined; ``high`` is what it
    never does, and is worth zero. The name of a detector, or of a grader's ``cheat_`` part, takes precedence over its
    severity.
    """
