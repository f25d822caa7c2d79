"""A call that is ready for engines, and who asked for it."""

from dataclasses import dataclass, replace

from etude.gateway.api.calls import Call
from etude.gateway.capture.conversations import Conversation, Prompt
from etude.gateway.http.request_log import Visit
from etude.gateway.routing.admission import TrafficClass
from etude.protocols import SamplingParams
from etude.types import TurnKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and under which conditions."""

    conversation: Conversation
    traffic: TrafficClass
    deadline: float
    """When the call must be over, on the gateway's clock."""
    account: str = ""
    """The key whose share of the engines it takes."""
    request_id: str = ""
    """By which a retry of this call is known; empty for none."""
    retried: bool = False
    """Whether the caller says that this is a retry, without saying of what."""
    min_version: int | None = None
    """Oldest weight version that may answer."""
    kind: TurnKind = TurnKind.ACT
    """What the call is recorded as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A call that is ready for engines."""

    call: Call
    caller: Caller
    prompt: Prompt
    params: SamplingParams
    visit: Visit
    """Where it is noted what the call takes, as it takes it: a caller that hangs up has used up as much."""

    @property
    def session(self) -> str:
        """The session's id: all its calls go to one engine, which has read what they begin with."""
        return self.caller.conversation.session_id

    @property
    def ends_early(self) -> bool:
        """Whether something but the model may end the reply."""
        return bool(self.call.sampling.stops) or self.call.single_call

    @property
    def bulky(self) -> bool:
        """Whether the engine's record holds more than tokens. It comes with the last token: that is waited for."""
        return self.params.want_routes or self.params.truncates

    def params_of(self, index: int) -> SamplingParams:
        """Of one reply: with the caller's seed each reply has another one, or all would be the same."""
        seed = self.params.seed
        return self.params if seed is None or index == 0 else replace(self.params, seed=seed + index)
