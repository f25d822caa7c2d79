"""State of a Tinker server: training clients, snapshots that are sampled from, and saved weights.

    request ──▶ a job in the queue ──▶ one thread, in order of arrival ──▶ a result, kept until it is pushed out
    sample  ──▶ the engine of a snapshot, all samples at once ───────────▶ likewise

Owns what each request comes to, names and lifetimes. HTTP is :mod:`etude.tinker.server`'s, computing
:mod:`etude.tinker.training`'s and the native engine's.
"""

import asyncio
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from etude.config.inference import EngineConfig, NumericsConfig
from etude.errors import UserError
from etude.models.decoder import Decoder
from etude.run.folder import require_empty
from etude.run.numerics import published_state
from etude.run.phase_models import copy_tokenizer, save_state
from etude.run.resolve import resolve_device
from etude.tinker.jobs import Gone, Jobs, Result, ServerBusy
from etude.tinker.messages import BatchRequest, encode_output, encode_samples
from etude.tinker.sampling import SampleRequest, Snapshots
from etude.tinker.training import AdamParams, TrainingState
from etude.tokens.jinja import load_format

SILENT_S = 120.0
"""A session without a sign of life for so long gives its training clients up to others; its SDK sends one each 10 s."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
"""A name that may be part of a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerOptions:
    """Settings of a server."""

    model: Path
    """A Hugging Face checkpoint."""
    name: str
    """Its name for clients: ``base_model``."""
    folder: Path
    """Folder for saved weights."""
    device: str = "auto"
    max_length: int = 2048
    """Tokens of a prompt with its completion."""
    max_clients: int = 4
    """Training clients, each with weights and moments of its own."""
    max_samplers: int = 4
    """Sampling clients whose weights are kept; the oldest one without a call gives its place up."""


class TinkerService:
    """Used by one event loop, of which ``jobs.run`` is a task."""

    def __init__(self, options: TinkerOptions) -> None:
        """Raises :class:`~etude.errors.UserError` for a model that is none."""
        self.options = options
        self.jobs = Jobs()
        self._device = resolve_device("auto") if options.device == "auto" else options.device
        self._numerics = NumericsConfig(replay="off")
        self._chat = load_format(options.model)
        self._clients: dict[str, TrainingState] = {}
        self._snapshots = Snapshots(options.max_samplers, EngineConfig(max_length=options.max_length), self._chat)
        self._seen_s: dict[str, float] = {}

    def open_session(self) -> str:
        """A new session's id."""
        session = f"session-{secrets.token_hex(8)}"
        self.see(session)
        return session

    def see(self, session: str) -> None:
        """Take note of a session's sign of life."""
        self._seen_s[session] = time.monotonic()

    def close_session(self, session: str) -> None:
        """Give up a session's training clients now; its samplers stay until newer ones take their place."""
        self._seen_s.pop(session, None)
        self._drop_silent()

    def create_client(self, request_id: str, model_id: str, path: str = "", *, optimiser: bool = False) -> None:
        """Begin a training client, from the model, or from what is saved at a path, with its moments if ``optimiser``.

        Raises :class:`ServerBusy` where there are as many as there may be, and :class:`Gone` without a session.
        """
        self._drop_silent()
        if (session := model_id.split(":")[0]) not in self._seen_s:
            raise Gone(f"there is no session {session!r}: make a new ServiceClient")
        if model_id not in self._clients and len(self._clients) >= self.options.max_clients:
            raise ServerBusy(f"{len(self._clients)} training clients are there, which is all this server may have")
        file = self._saved_state(path) if path else None

        def create() -> Result:
            state = TrainingState(self.options.model, self._numerics, self._device)
            if file is not None:
                state.load(file, optimiser=optimiser)
            self._clients[model_id] = state
            created: Result = {"type": "create_model", "model_id": model_id}
            return {"type": "load_weights", "path": path, "model_id": model_id} if path else created

        self.jobs.submit(request_id, lambda: asyncio.to_thread(create))

    def train(self, request_id: str, request: BatchRequest) -> None:
        """Queue a batch."""
        state = self._client(request.model_id)

        def compute() -> Result:
            return encode_output(*state.forward_backward(request))

        self.jobs.submit(request_id, lambda: asyncio.to_thread(compute))

    def step(self, request_id: str, model_id: str, params: AdamParams) -> None:
        """Queue an optimiser step."""
        state = self._client(model_id)

        def compute() -> Result:
            return {"type": "optim_step", "metrics": dict(state.optim_step(params))}

        self.jobs.submit(request_id, lambda: asyncio.to_thread(compute))

    def save(self, request_id: str, model_id: str, name: str) -> None:
        """Queue saving weights and moments; the result has their path."""
        state, file = self._client(model_id), self._file(model_id, "weights", name)

        def save() -> Result:
            state.save(file)
            return {"type": "save_weights", "path": f"tinker://{model_id}/weights/{name}"}

        self.jobs.submit(request_id, lambda: asyncio.to_thread(save))

    def load(self, request_id: str, model_id: str, path: str, *, optimiser: bool) -> None:
        """Queue going on from saved weights."""
        state, file = self._client(model_id), self._saved_state(path)

        def load() -> Result:
            state.load(file, optimiser=optimiser)
            return {"type": "load_weights", "path": path, "model_id": model_id}

        self.jobs.submit(request_id, lambda: asyncio.to_thread(load))

    def export(self, request_id: str, model_id: str, name: str) -> None:
        """Queue writing a Hugging Face checkpoint; the result has its path."""
        state, folder = self._client(model_id), self._file(model_id, "sampler_weights", name)

        def write() -> Result:
            require_empty(folder)
            save_state(folder, state.model.spec, published_state(state.model, self._numerics), self._chat, {})
            copy_tokenizer(self.options.model, folder)
            return {"type": "save_weights_for_sampler", "path": f"tinker://{model_id}/sampler_weights/{name}"}

        self.jobs.submit(request_id, lambda: asyncio.to_thread(write))

    def sample_from_client(self, request_id: str, model_id: str) -> None:
        """Queue a snapshot of a training client's weights; the result has the id of a sampler of them."""
        state = self._client(model_id)

        async def snapshot() -> Result:
            sampler = self._snapshots.add(await asyncio.to_thread(state.snapshot))
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

        self.jobs.submit(request_id, snapshot)

    async def sample_from_checkpoint(self, path: str | None) -> str:
        """A sampler of saved weights, of either kind, or of the model itself; returns its id. Raises :class:`Gone`."""
        saved = None if path is None else self.saved(path)

        def snapshot() -> Decoder:
            checkpoint = self.options.model if saved is None or saved.is_file() else saved
            state = TrainingState(checkpoint, self._numerics, self._device)
            if saved is not None and saved.is_file():
                state.load(saved, optimiser=False)
            return state.snapshot()

        return self._snapshots.add(await asyncio.to_thread(snapshot))

    def sample(self, request_id: str, sampler_id: str, request: SampleRequest) -> None:
        """Begin to sample; all completions at once. Raises :class:`Gone`."""
        self._snapshots.get(sampler_id)

        async def sample() -> Result:
            return encode_samples(*await self._snapshots.sample(sampler_id, request, request_id))

        self.jobs.start(request_id, sample)

    def require_sampler(self, sampler_id: str) -> None:
        """Raises :class:`Gone` where there is none of that id."""
        self._snapshots.get(sampler_id)

    def has_client(self, model_id: str) -> bool:
        """True for a training client that is there."""
        return model_id in self._clients

    def saved(self, path: str) -> Path:
        """The file or folder of a ``tinker://`` path. Raises :class:`Gone`."""
        parts = path.removeprefix("tinker://").split("/")
        if len(parts) != 3 or parts[1] not in ("weights", "sampler_weights"):
            raise UserError(f"{path!r}: expected tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME")
        file = self._file(*parts)
        if not file.exists():
            raise Gone(f"nothing is saved at {path!r}")
        return file

    def _saved_state(self, path: str) -> Path:
        """The file of a training state."""
        file = self.saved(path)
        if not file.is_file():
            raise UserError(f"{path!r} is for sampling only: training continues from a state that save_state saved")
        return file

    def close(self) -> None:
        """Stop all sampling."""
        self.jobs.close()
        self._snapshots.close()

    def _drop_silent(self) -> None:
        """Forget clients of sessions that are over, or whose program died."""
        now_s = time.monotonic()
        self._seen_s = {name: seen_s for name, seen_s in self._seen_s.items() if now_s - seen_s < SILENT_S}
        self._clients = {name: state for name, state in self._clients.items() if name.split(":")[0] in self._seen_s}

    def _client(self, model_id: str) -> TrainingState:
        if model_id not in self._clients:
            raise Gone(f"there is no training client {model_id!r}")
        return self._clients[model_id]

    def _file(self, model_id: str, kind: str, name: str) -> Path:
        for part in (model_id, name):
            if not NAME.fullmatch(part):
                raise UserError(f"the name {part!r} has more than letters, digits, '.', '_' and '-' in it")
        folder = self.options.folder / model_id / kind
        return folder / f"{name}.safetensors" if kind == "weights" else folder / name
