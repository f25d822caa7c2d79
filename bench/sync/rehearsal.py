"""Pairs of consecutively published weights as reinforcement learning makes them: what weight codecs are measured on.

How many weights change in a step, and by how much, decides every figure of a delta codec, and random data has neither
right. So the pairs are made as a training run makes them, in a few minutes and from nothing but this machine's Python:

    standard library → tokens → pre-trained Qwen3-MoE ─┬→ policy-gradient steps at 1e-6 → old, new
                                                       ├→                          3e-6 → old, new
                                                       └→                          1e-5 → old, new

Masters are float32 and what is published is their rounding to bfloat16. A pair is taken late enough that Adam's moments
are past their first steps, which change two to three times more. This file owns making and caching the pairs; what is
measured on them is ``weights.py``'s.

Shape legend: B texts, T tokens of each, V vocabulary, G sampled continuations of each text.
"""

import copy
import hashlib
import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import python_version

import numpy as np
import numpy.typing as npt
import orjson
import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn import functional

from etude.errors import UserError
from etude.models.checkpoint import state_of
from etude.models.decoder import Decoder
from etude.models.spec import ExpertsSpec, GroupedSpec, ModelSpec
from etude.types import TensorSpec
from etude.weights.state import State, StoredTensor

CACHE = Path("~/.cache/etude/bench")
"""Cache of pairs, one folder per recipe."""

_MODEL = ModelSpec(
    vocab_size=4096,
    hidden_size=384,
    layers=4,
    attention=GroupedSpec(heads=6, kv_heads=3, head_dim=64, normed=True),
    experts=ExpertsSpec(count=8, per_token=2, size=384),
    sparse_layers=tuple(range(4)),
    max_positions=256,
)
"""17.5 million weights: the smallest model whose state fills several chunks."""

_INIT_STD = 0.02
"""Standard deviation of matrices at the start, as in large models; the size of weights determines how many change."""
_MOST_CLIPPED_NORM = 1.0
_WARMUP_STEPS = 20
_LAYOUT_FILE = "tensors.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Parameters of the pairs; equal rehearsals share a cache."""

    model: ModelSpec = _MODEL
    corpus_bytes: int = 12_000_000
    """Text of the standard library that is read at most."""
    texts: int = 16
    """B."""
    tokens: int = 128
    """T."""
    pretrain_steps: int = 200
    pretrain_rate: float = 1e-3
    rates: tuple[float, ...] = (1e-6, 3e-6, 1e-5)
    """Learning rates of reinforcement learning, a pair for each."""
    steps: int = 16
    """Policy-gradient steps; the pair is published before and after the last one."""
    samples: int = 8
    """G."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.samples < 2 or not self.rates:
            raise UserError(f"{self} makes no pair: it needs a step, two samples per text and a learning rate")

    @property
    def key(self) -> str:
        """Names the cache: 16 hex digits over every setting, and the Python whose library is the text."""
        line = orjson.dumps([asdict(self), python_version()], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(line).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedPair:
    """Weights published before and after one optimiser step, in bfloat16."""

    rate: float
    """The learning rate."""
    specs: tuple[TensorSpec, ...]
    """The tensors, in the order in which they lie in ``old`` and ``new``."""
    old: npt.NDArray[np.uint16]
    """[n] bits of all weights."""
    new: npt.NDArray[np.uint16]
    """[n] bits of all weights, one step later."""

    @property
    def changed_share(self) -> float:
        """Share of all weights that differ."""
        return float(np.count_nonzero(self.old != self.new)) / len(self.old)

    def states(self) -> tuple[State, State]:
        """Both as states over the same memory, without copies."""
        return state_over(self.specs, self.old), state_over(self.specs, self.new)


def state_over(specs: Sequence[TensorSpec], bits: npt.NDArray[np.uint16]) -> State:
    """The [n] bits of all weights as a state, whose tensors are views of them, one after the other."""
    ends = np.cumsum([math.prod(spec.shape) for spec in specs])
    parts = np.split(bits, ends[:-1])
    return {
        spec.name: StoredTensor(spec=spec, data=part.view(np.uint8)) for spec, part in zip(specs, parts, strict=True)
    }


def published_pairs(rehearsal: Rehearsal, cache: Path, say: Callable[[str], None]) -> list[PublishedPair]:
    """The pairs of a rehearsal, one per learning rate, from ``cache`` or made now and left there.

    ``say`` gets one line on which of the two it is. Making takes minutes; killed half-way, it starts again.
    """
    folder = cache.expanduser() / rehearsal.key
    if not (folder / _LAYOUT_FILE).exists():
        say(f"training a model of {_weights(rehearsal.model) / 1e6:.1f} M weights for real deltas; kept in {folder}")
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        partial.mkdir(parents=True)
        try:
            _make(rehearsal, partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    else:
        say(f"real deltas from {folder}, made by an earlier call")
    return [_load(folder, rate) for rate in rehearsal.rates]


def _make(rehearsal: Rehearsal, folder: Path) -> None:
    """Train, and save a pair per learning rate."""
    token_ids = _corpus(rehearsal)
    pretrained = Decoder(rehearsal.model)
    pretrained.initialise(rehearsal.seed, _INIT_STD)
    _pretrain(pretrained, token_ids, rehearsal)
    for rate in rehearsal.rates:
        model = copy.deepcopy(pretrained)
        steps = _policy_gradient(model, token_ids, rehearsal, rate)
        for _ in range(rehearsal.steps - 1):
            next(steps)
        np.save(folder / f"{rate:.0e}_old.npy", _published(model))
        next(steps)
        np.save(folder / f"{rate:.0e}_new.npy", _published(model))
    tensors = [[name, list(tensor.shape)] for name, tensor in sorted(state_of(pretrained).items())]
    (folder / _LAYOUT_FILE).write_bytes(orjson.dumps(tensors, option=orjson.OPT_INDENT_2))


def _load(folder: Path, rate: float) -> PublishedPair:
    tensors = orjson.loads((folder / _LAYOUT_FILE).read_bytes())
    return PublishedPair(
        rate=rate,
        specs=tuple(TensorSpec(name=name, dtype="BF16", shape=tuple(shape)) for name, shape in tensors),
        old=np.load(folder / f"{rate:.0e}_old.npy"),
        new=np.load(folder / f"{rate:.0e}_new.npy"),
    )


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _corpus(rehearsal: Rehearsal) -> Tensor:
    """[n] token ids of the standard library's source, by a tokenizer trained on it."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    missing = rehearsal.corpus_bytes
    for file in sorted(folder.glob("[!_]*/*.py")) + sorted(folder.glob("*.py")):
        if missing > 0 and "-packages" not in str(file):
            texts.append(file.read_text(encoding="utf-8", errors="ignore"))
            missing -= len(texts[-1])
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=rehearsal.model.vocab_size, show_progress=False)
    token_ids = [token for text in tokenizer.encode_batch(texts) for token in text.ids]
    return torch.tensor(token_ids, dtype=torch.long)


def _batches(token_ids: Tensor, rehearsal: Rehearsal, seed: int) -> Iterator[Tensor]:
    """Texts [B, T + 1] from random places, without end."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(rehearsal.tokens + 1)
    while True:
        starts = torch.randint(len(token_ids) - len(window), (rehearsal.texts, 1), generator=generator)
        yield token_ids[starts + window]


def _pretrain(model: Decoder, token_ids: Tensor, rehearsal: Rehearsal) -> None:
    """Next-token prediction with a warm-up and a cosine down to a tenth, in place."""
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = _batches(token_ids, rehearsal, rehearsal.seed)
    for step in range(rehearsal.pretrain_steps):
        warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / rehearsal.pretrain_steps)
        optimiser.param_groups[0]["lr"] = rehearsal.pretrain_rate * warmup * cosine
        texts_BT = next(batches)
        logits_BTV = _logits(model, texts_BT[:, :-1])
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), texts_BT[:, 1:].flatten())
        _step(model, optimiser, loss)


def _policy_gradient(model: Decoder, token_ids: Tensor, rehearsal: Rehearsal, rate: float) -> Iterator[float]:
    """Steps on the policy gradient, in place; gives out the mean reward of each.

    In every place of a text the model draws its own next token, G times; a sample's reward is the share of tokens that
    it got right, its advantage the normalised difference from the G samples of the same text (GRPO, arXiv 2402.03300).
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    generator = torch.Generator().manual_seed(rehearsal.seed + 1)
    for texts_BT in _batches(token_ids, rehearsal, rehearsal.seed + 2):
        logs_BTV = _logits(model, texts_BT[:, :-1]).log_softmax(-1)
        shares_nV = logs_BTV.detach().exp().flatten(0, 1)
        drawn_nG = torch.multinomial(shares_nV, rehearsal.samples, replacement=True, generator=generator)
        drawn_BTG = drawn_nG.view(*logs_BTV.shape[:2], -1)
        rewards_BG = (drawn_BTG == texts_BT[:, 1:, None]).float().mean(1)
        spread_B1 = rewards_BG.std(1, keepdim=True) + 1e-4
        advantages_BG = (rewards_BG - rewards_BG.mean(1, keepdim=True)) / spread_B1
        loss = -(advantages_BG[:, None] * logs_BTV.gather(-1, drawn_BTG)).mean()
        _step(model, optimiser, loss)
        yield float(rewards_BG.mean())


def _logits(model: Decoder, texts_BT: Tensor) -> Tensor:
    """[B,T] → [B,T,V]."""
    hidden_NH = model.forward_packed(texts_BT.flatten(), (texts_BT.shape[1],) * len(texts_BT))
    logits_BTV: Tensor = model.logits(hidden_NH).unflatten(0, texts_BT.shape)
    return logits_BTV


def _step(model: Decoder, optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _MOST_CLIPPED_NORM)
    optimiser.step()


# ── states ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _published(model: Decoder) -> npt.NDArray[np.uint16]:
    """[n] bits of all tensors by ascending name, rounded to bfloat16."""
    tensors = [tensor.to(torch.bfloat16).flatten() for _, tensor in sorted(state_of(model).items())]
    bits: npt.NDArray[np.uint16] = torch.cat(tensors).view(torch.uint16).numpy()
    return bits


def _weights(spec: ModelSpec) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(spec).parameters())
