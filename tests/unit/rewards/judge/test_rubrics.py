"""Valid and invalid rubrics."""

import pytest

from etude.errors import ConfigError
from etude.rewards.judge.prompts import About, TieRule, parse_rubric
from judges import STYLE, style_rubric


def test_a_rubric_is_read() -> None:
    rubric = style_rubric()
    assert (rubric.aspect, rubric.about, rubric.tie) == ("style", About.ANSWER, TieRule.LOWER)
    assert (rubric.lowest, rubric.highest) == (1, 5)
    assert [rubric.value(score) for score in (1, 3, 5)] == [0, 0.5, 1]


def test_every_word_is_in_the_digest() -> None:
    changes = [
        {},
        {"aspect": "tone"},
        {"version": "2"},
        {"about": "transcript"},
        {"question": "Well?"},
        {"tie": "upper"},
    ]
    digests = {style_rubric(**change).digest for change in changes}
    digests.add(parse_rubric(STYLE.replace("so-so", "so so"), "style").digest)
    assert len(digests) == len(changes) + 1


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('aspect = "style"', 'aspect = "Style!"', "a–z"),
        ('aspect = "style"\n', "", "lacks 'aspect'|exactly the keys"),
        ('tie = "lower"', 'tie = "mean"', "'mean' is not a valid TieRule"),
        ('about = "answer"', 'about = "files"', "'files' is not a valid About"),
        ("score = 3", "score = 7", "ascend by one"),
        ("score = 3", 'score = "3"', "score = '3'"),
        ("score = 3", "score = true", "score = True"),
        ('anchor = "well"', 'anchor = " "', "1 to 2000 characters"),
        ('anchor = "well"', 'text = "well"', "exactly the keys"),
        ('version = "1"', "version = 1", "version = 1"),
        ('question = "How', 'color = "red"\nquestion = "How', "exactly the keys"),
        ("scale = [", "scale = [[", "not valid TOML"),
    ],
)
def test_what_is_wrong_with_one_is_said(old: str, new: str, complaint: str) -> None:
    assert old in STYLE
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_rubric(STYLE.replace(old, new, 1), "style.toml")
    assert str(caught.value).startswith("style.toml")
