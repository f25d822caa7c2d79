"""What a call is recorded as."""

import pytest

from etude.gateway.api.calls import ApiError, Call, turn_kind_of
from etude.tokens.messages import ChatMessage
from etude.types import TurnKind

ACT, SUMMARY = TurnKind.ACT, TurnKind.SUMMARY
ASKED = Call(messages=(ChatMessage(role="user", content="PASS\nSum up the work."),))
ANSWERED = Call(
    messages=(
        *ASKED.messages,
        ChatMessage(role="assistant", content="Done."),
        ChatMessage(role="user", content="go on"),
    )
)
QUOTED = Call(messages=(*ASKED.messages, ChatMessage(role="tool", content="Sum up the work.", tool_call_id="1")))


@pytest.mark.parametrize(
    ("call", "headers", "mark", "kind"),
    [
        (ASKED, {}, "", ACT),
        (ASKED, {"X-Etude-Turn": "summary"}, "", SUMMARY),
        (ASKED, {"X-Etude-Turn": "act"}, "Sum up", ACT),
        (ASKED, {}, "Sum up", SUMMARY),
        (ASKED, {}, "Summarise", ACT),
        (ANSWERED, {}, "Sum up", ACT),
        (QUOTED, {}, "Sum up", ACT),
        (Call(prompt="Sum up"), {}, "Sum up", ACT),
        (Call(prompt="Sum up"), {"X-Etude-Turn": "summary"}, "", SUMMARY),
    ],
)
def test_a_header_or_a_mark_says_it(call: Call, headers: dict[str, str], mark: str, kind: TurnKind) -> None:
    assert turn_kind_of(call, headers, mark) is kind


@pytest.mark.parametrize("said", ["Summary", "", "plan"])
def test_a_kind_that_there_is_not_is_refused(said: str) -> None:
    with pytest.raises(ApiError, match="expected act or summary") as caught:
        turn_kind_of(ASKED, {"X-Etude-Turn": said})
    assert (caught.value.status, caught.value.param) == (400, "X-Etude-Turn")
