"""The ablations of `bench science`: arms as changes of the laboratory's recipe, and what others have published.

An :class:`Ablation` is a row of :data:`ABLATIONS`: adding one is adding a row. An arm names the keys of the recipe that
it changes; what those mean is the product's. A claim is somebody else's sentence as a comparison of two arms, so that
our measurement agrees with it, contradicts it or does not show it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

Figure: TypeAlias = Literal["sampled", "tokens"]
"""A figure of a trial's end on held-out tasks: pass rate at temperature 1, mean length of an answer."""
Expected: TypeAlias = Literal["more", "less", "alike"]
"""Comparison of two arms; ``alike``: within :data:`ALIKE`."""
WORDS: Mapping[tuple[Figure, Expected], str] = MappingProxyType(
    {
        ("sampled", "more"): "a higher pass rate than",
        ("sampled", "less"): "a lower pass rate than",
        ("sampled", "alike"): "the same pass rate as",
        ("tokens", "more"): "longer answers than",
        ("tokens", "less"): "shorter answers than",
    }
)
"""Words for a comparison."""
DEFAULT = "default"
"""The arm that changes nothing: the laboratory's recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train."""

    name: str
    changes: tuple[str, ...] = ()
    """``SECTION.KEY=VALUE``, of reinforcement learning."""
    start: tuple[str, ...] = ()
    """Recipe keys of mid-training and the model, for the same purpose."""
    seeds: int | None = None
    """Seeds on which it is trained; ``None``: the ablation's number."""
    router_noise: float = 0.0
    """Noise of the engine's routers, as a share of their spread."""
    line: str = ""
    """The line of the plot that it is a point of; empty: a line of its own, over steps."""
    x: float = 0.0
    """Its place on that line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published or assumed comparison of two arms."""

    arm: str
    than: str
    figure: Figure = "sampled"
    expected: Expected = "more"
    ours: bool = False
    """True for a guess of our own, where nothing is published."""

    @property
    def text(self) -> str:
        """The claim in words."""
        words = f"{self.arm}: {WORDS[self.figure, self.expected]} {self.than}"
        return f"{words} (our guess)" if self.ours else words


ALIKE = 0.02
"""Difference of pass rates, as a share of the tasks, that is none: two points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """One question, and the arms that answer it, on seeds for which the first arm's start has learnt something."""

    title: str
    question: str
    published: str
    """Published results and their sources."""
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    seeds: int = 8
    """Seeds of its arms, but for those that have a number of their own."""
    reading: str = ""
    """The outcome in words; the figures are from the bench."""
    axis: str = "steps"
    """Quantity on the horizontal axis of the plot."""

    def seeds_of(self, arm: Arm) -> int:
        """The number of seeds on which an arm is trained."""
        return arm.seeds or self.seeds


STALENESSES = (1, 4, 8, 16)
CORRECTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "none": ("loss.correction=none",),
        "TIS": ("loss.correction=tis",),
        "IcePop": ("loss.correction=icepop",),
        "CISPO": ("loss.kind=cispo", "loss.baseline=mean"),
    }
)
"""Correction → keys. CISPO keeps the baseline of the others, so that its weight is all that differs."""
FRESH = "fresh"
JUDGED = ("TIS, 1 old", "TIS, 4 old")
"""Arms of the default correction, of which the goal of staleness is judged."""
MORE_SEEDS = 12
"""Seeds of ablations whose differences are near the bound of :data:`ALIKE`."""
JUDGED_SEEDS = 20
"""Seeds of these arms and of the one that they are compared with."""
STALE_SEEDS = 6
"""Seeds of the other stale arms, of which there are many."""


def _stale(correction: str, staleness: int) -> Arm:
    name = f"{correction}, {staleness} old"
    return Arm(
        name=name,
        changes=(*CORRECTIONS[correction], f"rollouts.max_staleness={staleness}"),
        seeds=JUDGED_SEEDS if name in JUDGED else None,
        line=correction,
        x=staleness,
    )


STALENESS = Ablation(
    title="Importance correction under staleness",
    question="Every token was sampled by weights of an exact age in steps. Which correction keeps that harmless, "
    "and at which age does learning break?",
    published="AReaL ([2505.24298](https://arxiv.org/abs/2505.24298), section 5.4): plain PPO is worse at any "
    "staleness, decoupled PPO loses next to nothing with up to 8 versions. MiniMax-M1 "
    "([2506.13585](https://arxiv.org/abs/2506.13585), section 3.1) has CISPO ahead of clips. VCPO "
    "([2602.17616](https://arxiv.org/abs/2602.17616)) sees heavy-tailed ratios make gradients noisy and training "
    "collapse where asynchrony is high; M2PO ([2510.01161](https://arxiv.org/abs/2510.01161)) prosperity before a "
    "collapse where ratios are not bounded, and no loss at 256 versions where they are.",
    arms=(
        Arm(name=FRESH, seeds=JUDGED_SEEDS),
        *(_stale(correction, staleness) for correction in CORRECTIONS for staleness in STALENESSES),
    ),
    claims=(
        Claim(arm="TIS, 1 old", than=FRESH, expected="alike"),
        Claim(arm="TIS, 4 old", than=FRESH, expected="alike"),
        Claim(arm="none, 4 old", than=FRESH, expected="less"),
        Claim(arm="TIS, 8 old", than="none, 8 old"),
        Claim(arm="CISPO, 8 old", than="none, 8 old"),
        Claim(arm="TIS, 16 old", than=FRESH, expected="less", ours=True),
    ),
    seeds=STALE_SEEDS,
    reading="With the default correction, rollouts that are one or four versions old cost less than two points, "
    "as twenty seeds show. For four versions the pass rate is even the same within two points; for one "
    "version it may be higher by more, because on a single seed (21) fresh rollouts end in a policy that "
    "gets some sums wrong and stale ones do not. Without that seed, four versions cost half a point. "
    "Eight and sixteen versions cost one to five points in the mean of six seeds, most of it on one seed "
    "(2), with every correction and without one; no correction is shown to be better than none, and "
    "learning never broke.",
    axis="staleness, in versions",
)
NORMALISATION = Ablation(
    title="Standard deviation and length in the advantage",
    question="Advantages divided by their group's deviation, losses averaged within each answer first, both (GRPO), "
    "and neither.",
    published="Dr. GRPO ([2503.20783](https://arxiv.org/abs/2503.20783), section 3) has both as biases: the deviation "
    "weighs easy and hard prompts up, 1/|o| makes wrong answers grow longer; without them pass rates are as good and "
    "answers shorter. Composer 2 ([2603.24477](https://arxiv.org/abs/2603.24477), section 4.1) drops both.",
    arms=(
        Arm(name=DEFAULT),
        Arm(name="deviation", changes=("loss.baseline=mean_std",)),
        Arm(name="length", changes=("loss.aggregation=seq_mean_token_mean",)),
        Arm(name="both", changes=("loss.baseline=mean_std", "loss.aggregation=seq_mean_token_mean")),
    ),
    claims=(
        Claim(arm="both", than=DEFAULT, expected="alike"),
        Claim(arm="length", than=DEFAULT, figure="tokens"),
        Claim(arm="deviation", than=DEFAULT, expected="alike"),
    ),
    seeds=MORE_SEEDS,
    reading="As published: neither the deviation nor the length changes the pass rate by two points, and twelve "
    "seeds are enough to show it. Losses that are averaged within each answer first make answers longer, "
    "as published, but only by a fortieth of a token: a worked answer has eight tokens, and the longest "
    "that counts has fourteen.",
)
ROLLOUTS = 64
"""Rollouts of a step."""


def _groups_of(size: int) -> Arm:
    changes = (f"rollouts.group_size={size}", f"rollouts.groups_per_step={ROLLOUTS // size}")
    return Arm(name=f"groups of {size}", changes=changes, line="policy gradient", x=size)


GROUPS = Ablation(
    title="Group size at equal rollouts",
    question="Sixty-four rollouts a step as sixteen groups of four, eight of eight (the default), four of sixteen, or "
    "one of sixty-four.",
    published="ScaleRL ([2510.13786](https://arxiv.org/abs/2510.13786), section 5) splits a fixed batch into 8 to 32 "
    "generations a prompt and finds the curves nearly the same.",
    arms=(Arm(name=DEFAULT, line="policy gradient", x=8), *map(_groups_of, (4, 16, 64))),
    claims=(
        Claim(arm="groups of 16", than=DEFAULT, expected="alike"),
        Claim(arm="groups of 4", than=DEFAULT, expected="alike", ours=True),
        Claim(arm="groups of 64", than=DEFAULT, expected="less", ours=True),
    ),
    seeds=MORE_SEEDS,
    reading="Groups of sixteen end one and a half points below groups of eight, and are not higher on ten of "
    "twelve seeds; the interval extends beyond two points, so neither the same nor a lower pass rate is "
    "shown. Groups of four end within two points on eleven seeds; on one (2) they end in a policy that "
    "gets some sums wrong, fifteen points lower, which widens the interval. One group of sixty-four, a "
    "single prompt per step, is worse on every seed, by three to eleven points.",
    axis="rollouts of a group",
)
KL = Ablation(
    title="k1 in the reward against k3 in the loss",
    question="A penalty with one coefficient keeps the policy near its start, either in the reward of whole "
    "rollouts or in the loss.",
    published="Composer 2 (section 4.1, figure 4) takes k1, since k3's variance explodes once policies differ. *A "
    "Comedy of Estimators* ([2512.21852](https://arxiv.org/abs/2512.21852)): the gradient is right with k1 in the "
    "reward and biased with k3 in the loss; unbiased ones do better in and out of domain.",
    arms=(
        Arm(name=DEFAULT),
        Arm(name="k1 in the reward", changes=("loss.reference_beta=0.03",)),
        Arm(name="k3 in the loss", changes=("loss.kl_coef=0.03", "loss.kl_estimator=k3")),
    ),
    claims=(Claim(arm="k1 in the reward", than="k3 in the loss"),),
    reading="As published, by one point: k1 in the reward costs almost nothing of the pass rate, k3 in the loss "
    "about a point on seven of eight seeds.",
)
EPOCHS = (2, 4, 16)
PROMPTS_OF_A_RUN = 640
"""Groups of a run: its prompts, where each comes once."""
PROMPTS = Ablation(
    title="Prompts once against epochs",
    question="The same number of rollouts, of prompts that occur once or are repeated up to sixteen times.",
    published="Composer 2 (section 4.1) never trains on a prompt twice. *Reasoning with 1-shot RLVR* "
    "([2504.20571](https://arxiv.org/abs/2504.20571)) learns most of what there is from one prompt, over and over.",
    arms=(
        Arm(name=DEFAULT, line="fresh rollouts", x=1),
        *(
            Arm(
                name=f"{epochs} epochs",
                changes=(f"tasks.options.prompts={PROMPTS_OF_A_RUN // epochs}",),
                line="fresh rollouts",
                x=epochs,
            )
            for epochs in EPOCHS
        ),
    ),
    claims=(
        Claim(arm="16 epochs", than=DEFAULT, expected="alike"),
        Claim(arm="2 epochs", than=DEFAULT, expected="alike", ours=True),
    ),
    reading="With prompts that occur twice or four times the pass rate ends within two points of that with unique "
    "prompts, on every seed. With forty prompts, sixteen times each, seven of eight seeds end lower, by "
    "up to four points: a small cost, but eight seeds do not show that it stays below two points.",
    axis="epochs",
)
BUDGETS = (120_000, 150_000, 300_000)
MIDTRAINING = Ablation(
    title="Mid-training tokens against the gain of RL",
    question="The same RL from starts with more and more mid-training: does their held-out cross-entropy predict "
    "the result of RL?",
    published="Composer 2 (section 3.1, figure 2): of three budgets of continued pretraining, lower loss goes with "
    "higher reward after RL.",
    arms=(
        Arm(name=DEFAULT, line="after RL", x=200),
        *(
            Arm(
                name=f"{tokens // 1000},000 tokens",
                start=(f"midtrain.tokens={tokens}",),
                line="after RL",
                x=tokens / 1000,
            )
            for tokens in BUDGETS
        ),
    ),
    claims=(
        Claim(arm=DEFAULT, than="120,000 tokens"),
        Claim(arm=DEFAULT, than="150,000 tokens"),
        Claim(arm="300,000 tokens", than=DEFAULT),
    ),
    reading="As published: cross-entropy predicts the result of RL. Of 32 starts, the 21 with a loss of at most "
    "0.384 end at 81 to 95 %, for any budget; above that, the result follows the loss: 0.45 gives 63 %, "
    "0.48 gives 53 %, 0.51 gives 45 %, and 0.52 to 0.70 give 15 to 38 %. Among the good starts the loss "
    "predicts little. The number of tokens predicts less than the loss: one start with 300,000 tokens "
    "(seed 8) has a loss of 0.54. The table only has seeds on which the default's start has learnt, which "
    "favours the default in its means; the order of single starts does not depend on that.",
    axis="thousand tokens of mid-training",
)
WEIGHTS = (0.02, 0.1)
EFFORT = Ablation(
    title="What an effort penalty buys",
    question="Each sampled token is subtracted from the reward, with a concave price: how much shorter do answers "
    "become, and at what cost?",
    published="Composer 2 (section 4.2) has such a penalty so that easy requests are answered quickly and hard ones "
    "are thought about; it publishes no trade.",
    arms=(
        Arm(name=DEFAULT),
        *(
            Arm(
                name=f"weight {weight:g}",
                changes=(f"effort.weight={weight}", "effort.prices.final_tokens=1.0"),
            )
            for weight in WEIGHTS
        ),
    ),
    claims=(
        Claim(arm="weight 0.02", than=DEFAULT, figure="tokens", expected="less"),
        Claim(arm="weight 0.1", than=DEFAULT, figure="tokens", expected="less"),
        Claim(arm="weight 0.02", than=DEFAULT, expected="alike", ours=True),
        Claim(arm="weight 0.1", than=DEFAULT, expected="less", ours=True),
    ),
    seeds=MORE_SEEDS,
    reading="A light penalty shortens answers by a hundredth of a token, which is shown but useless: answers are "
    "either worked out or given at once, and the working is worth more than its few tokens cost. A heavy "
    "penalty saves one token of eight and costs sixteen points of the pass rate, since after the same "
    "number of steps more answers are still given at once; greedily all are worked out, and nearly all "
    "are right.",
)
FORMATS = ("fp8", "nvfp4")
QUANTISED = Ablation(
    title="Experts in 8 and 4 bits against bfloat16",
    question="Inputs and weights of experts are rounded to 8 or 4 bits in every forward pass, of engine and trainer "
    "alike; gradients pass straight through.",
    published="Composer 2 trains with NVFP4 forward passes. With a scale per tensor in place of one per token, or fast "
    "division, training diverged.",
    arms=(
        Arm(name="bfloat16", changes=("numerics.dtype=bfloat16",)),
        *(Arm(name=form, changes=("numerics.dtype=bfloat16", f"numerics.experts={form}")) for form in FORMATS),
    ),
    claims=tuple(Claim(arm=form, than="bfloat16", expected="alike") for form in FORMATS),
    reading="As published: neither format costs anything. Eight seeds show that both pass rates equal bfloat16's "
    "within two points, before RL and after it. The scales are those of Composer's kernels, one for each "
    "token, in exact emulation; the scales that diverged there were not tried.",
)
DEEPER = ("model.shape.layers=4", "midtrain.tokens=200_000")
BFLOAT16 = ("numerics.dtype=bfloat16", "numerics.arithmetic=fast")
NOISE = 0.3
DEEPER_SEEDS = 5
"""Seeds of the deeper model, whose trials take four times as long."""
REPLAY = Ablation(
    title="Router replay on a deeper mixture of experts",
    question="Four sparse layers in bfloat16; noise in the engine's routers makes it send tokens to other experts "
    "than the trainer would.",
    published="R3 ([2510.11370](https://arxiv.org/abs/2510.11370), sections 3 and 5): routes that differ between "
    "engine and trainer make RL of MoE models collapse, replayed ones do not. Composer 2 (section 5) replays with a "
    "plausibility filter.",
    arms=(
        Arm(name="same routers", start=DEEPER, changes=(*BFLOAT16, "numerics.replay=off")),
        Arm(name="noise, no replay", start=DEEPER, changes=(*BFLOAT16, "numerics.replay=off"), router_noise=NOISE),
        Arm(name="noise, replay", start=DEEPER, changes=(*BFLOAT16, "numerics.replay=completion"), router_noise=NOISE),
    ),
    claims=(
        Claim(arm="noise, no replay", than="same routers", expected="less"),
        Claim(arm="noise, replay", than="noise, no replay"),
    ),
    seeds=DEEPER_SEEDS,
    reading="Not as published, at this size: with noise in the engine's routers and no replay the mismatch k3 is "
    "0.01, which replay removes, and the pass rate is the same with or without either, within half a "
    "point on five seeds. Four layers and eighty steps are few; this says nothing about larger "
    "mismatches.",
)

ABLATIONS: Mapping[str, Ablation] = MappingProxyType(
    {
        "staleness": STALENESS,
        "normalisation": NORMALISATION,
        "group-size": GROUPS,
        "kl": KL,
        "epochs": PROMPTS,
        "mid-training": MIDTRAINING,
        "effort": EFFORT,
        "formats": QUANTISED,
        "replay": REPLAY,
    }
)
"""Name on the command line → the ablation."""
ELSEWHERE = (
    (
        "Asynchronous against synchronous, to the same quality",
        "AReaL (2505.24298): up to 2.8 times as fast to the same pass rate",
        "`python -m bench loop`, `loop --quality`",
        "[training.md](training.md)",
    ),
    (
        "Experts in FP8, MXFP8, NVFP4 against bfloat16",
        "Composer 2 (2603.24477): RL with NVFP4 forward passes",
        "`python -m bench quantised`",
        "nowhere yet: no figures are committed",
    ),
    (
        "Summaries trained, masked, none, room for all",
        "Cursor, [self-summarization](https://cursor.com/blog/self-summarization): trained summaries halve errors",
        "`python -m bench summaries`",
        "[summaries.md](summaries.md)",
    ),
    (
        "A hint on one turn against the reward alone",
        "Composer 2.5, [post](https://cursor.com/blog/composer-2-5): textual feedback corrects single turns",
        "`python -m bench hints`",
        "[hints.md](hints.md)",
    ),
    (
        "Which skills RL finds, by how rarely they were imitated",
        "DAPO (2503.14476): groups without a signal are sampled again",
        "`python -m bench exploration`",
        "[quickstart](../recipes/quickstart/README.md)",
    ),
    (
        "How much mismatch router replay removes",
        "R3 (2510.11370), Composer 2, section 5",
        "`python -m bench numerics`",
        "[numerics.md](numerics.md)",
    ),
)
"""Question, published result, bench and document of ablations that take whole runs."""
