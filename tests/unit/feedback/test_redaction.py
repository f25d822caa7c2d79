"""Redaction of answers: tokens stay in their places, and the model's own words are not touched."""

import numpy as np
import pytest

from etude.feedback.redaction import Redaction, emails, secrets
from etude.tokens.chat import ChatTemplate, read_tokenizer
from etude.tokens.vocabulary import Spelling
from etude.types import LiveAnswer, Turn
from live_sessions import live_session, live_turn

TEMPLATE = ChatTemplate.train(["the quick brown fox ü"] * 20, vocab_size=300)
FILLER = TEMPLATE.encode("x")[0]


@pytest.fixture(scope="module")
def redaction(tmp_path_factory: pytest.TempPathFactory) -> Redaction:
    folder = tmp_path_factory.mktemp("model")
    TEMPLATE.save(folder)
    return Redaction([secrets, emails], Spelling(read_tokenizer(folder)), FILLER)


def redacted(
    redaction: Redaction, prompt: str, reply: str, *, earlier: Turn | None = None, message: str = ""
) -> LiveAnswer | None:
    before = [] if earlier is None else [*earlier.prompt_ids.tolist(), *earlier.completion_ids.tolist()]
    turn = live_turn([*before, *TEMPLATE.encode(prompt)], TEMPLATE.encode(reply))
    return redaction(
        LiveAnswer(
            session=live_session("s"),
            first=0,
            turns=(turn,),
            completion="c",
            follows=None,
            earlier=earlier,
            message=message,
        )
    )


@pytest.mark.parametrize(
    "secret",
    [
        "jane.doe@example.com",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "sk-proj-0123456789abcdefghij",
        "AKIAIOSFODNN7EXAMPLE",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_secret_in_a_prompt_becomes_filler_and_everything_else_stays_where_it_was(
    redaction: Redaction, secret: str
) -> None:
    prompt = f"the fox ü {secret} says ü"
    answer = redacted(redaction, prompt, "brown", message=f"mail {secret} now")
    assert answer is not None
    (turn,), original = answer.turns, TEMPLATE.encode(prompt)
    assert len(turn.prompt_ids) == len(original)
    text = TEMPLATE.decode(turn.prompt_ids.tolist())
    assert secret not in text and "x" * 4 in text
    assert text.startswith("the fox ü ") and text.endswith(" says ü")
    assert answer.message == f"mail {'█' * len(secret)} now"
    assert np.array_equal(turn.completion_ids, TEMPLATE.encode("brown"))


def test_what_has_no_secret_is_kept_as_it_is(redaction: Redaction) -> None:
    answer = redacted(redaction, "the quick ü", "brown fox", message="hi")
    assert answer is not None
    assert np.array_equal(answer.turns[0].prompt_ids, TEMPLATE.encode("the quick ü"))


def test_nothing_is_kept_where_the_model_says_a_secret(redaction: Redaction) -> None:
    assert redacted(redaction, "the quick", "write to a.b@example.org") is None


def test_what_an_earlier_turn_has_is_not_looked_at_again(redaction: Redaction) -> None:
    earlier = live_turn(TEMPLATE.encode("mail a.b@example.org"), TEMPLATE.encode("done"))
    answer = redacted(redaction, " and then", "brown", earlier=earlier)
    assert answer is not None
    assert answer.turns[0].continues(earlier)
