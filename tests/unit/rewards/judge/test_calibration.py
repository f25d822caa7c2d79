"""Agreement with people, bias, and the reports of both."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.rewards.judge.calibration import (
    Calibration,
    Indices,
    LabelledItem,
    Numbers,
    agreement_of,
    bias_of,
    correlation,
    distrust,
    dump_calibration,
    estimate,
    parse_calibration,
    parse_items,
    ranks,
    weighted_kappa,
)
from etude.rewards.judge.prompts import ReplyFault
from etude.rewards.judge.votes import Judgement, Vote, tally
from judges import style_rubric

LABELS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=2, max_size=30)
LINE = '{"task": "t", "work": "w", "label": 3}\n'


@dataclass
class MeanOf:
    """A statistic: the mean of some numbers."""

    values: Numbers

    def __call__(self, drawn: Indices) -> Numbers:
        return np.asarray(self.values[drawn].mean(-1))


def items(*labels: int, works: list[str] | None = None, author: str = "") -> list[LabelledItem]:
    texts = works or [f"text {number}" for number in range(len(labels))]
    return [
        LabelledItem(task="t", work=work, label=label, author=author) for work, label in zip(texts, labels, strict=True)
    ]


def judged(*scores: int | None) -> list[Judgement]:
    return [tally(style_rubric(), [Vote(score=score, reason="")]) for score in scores]


@given(LABELS)
def test_weighted_kappa_is_cohens(pairs: list[tuple[int, int]]) -> None:
    labels, scores = np.array(pairs, np.float64).T
    observed = chance = 0.0
    for i in range(1, 6):
        for j in range(1, 6):
            weights = (i - j) ** 2
            observed += weights * ((labels == i) & (scores == j)).mean()
            chance += weights * (labels == i).mean() * (scores == j).mean()
    expected = 1 - observed / chance if chance > 1e-12 else 0.0
    assert weighted_kappa(labels, scores) == pytest.approx(expected, abs=1e-9)


def test_a_set_of_one_label_says_nothing() -> None:
    assert weighted_kappa(np.full(9, 3.0), np.full(9, 3.0)) == 0.0


def test_rank_correlation_shares_ranks_between_equals() -> None:
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: Spearman's ρ with ties is 0.9487 (Pearson's of the ranks).
    assert ranks(np.array([1.0, 5, 5, 9])).tolist() == [1, 2.5, 2.5, 4]
    assert correlation(ranks(np.array([1.0, 5, 5, 9])), np.array([1.0, 2, 3, 4])) == pytest.approx(0.9487, abs=1e-4)
    assert correlation(ranks(np.array([1.0, 2, 3])), ranks(np.array([9.0, 4, 1]))) == pytest.approx(-1)
    assert correlation(np.array([1.0, 1, 1]), np.array([9.0, 4, 1])) == 0


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    expected = 0
    for trial in range(60):
        results = estimate(MeanOf(rng.normal(0.0, 1.0, 40)), 40, seed=trial)
        expected += results.low <= 0 <= results.high
    assert expected >= 51


def test_agreement_counts_what_was_judged() -> None:
    results = agreement_of(items(1, 2, 3, 4, 5), judged(1, 3, 3, 2, None))
    assert (results.items, results.unjudged, results.exact, results.within_one) == (4, 1, 0.5, 0.75)
    assert results.kappa.low <= results.kappa.value <= results.kappa.high
    unreadable = agreement_of(items(1), [tally(style_rubric(), [ReplyFault.NOT_JSON])])
    assert (unreadable.items, unreadable.invalid_votes, unreadable.kappa.value) == (0, 1, 0.0)


def test_a_judge_that_likes_length_is_found_out() -> None:
    works = ["word " * count for count in range(1, 31)]
    labels, scores = [3] * 30, [2] * 10 + [3] * 10 + [4] * 10
    bias = bias_of(items(*labels, works=works), judged(*scores), "m")
    assert bias.length.low > 0.5
    assert bias.verbosity.low > 0.5
    assert bias.mean_error.low < 0 < bias.mean_error.high
    fair = bias_of(items(*labels, works=works), judged(*([2, 3, 4] * 10)), "m")
    assert fair.length.low < 0 < fair.length.high


def test_a_judge_that_is_kind_to_itself_is_found_out() -> None:
    both = items(*[3] * 10, author="m") + items(*[3] * 10, author="other")
    bias = bias_of(both, judged(*[4] * 10, *[3] * 10), "m")
    assert bias.self_preference is not None
    assert bias.self_preference.low == bias.self_preference.value == 1.0
    assert bias_of(both, judged(*[4] * 20), "third").self_preference is None


def test_the_order_of_the_scale_is_compared_within_items() -> None:
    leaning = [
        tally(style_rubric(), [Vote(score=score, reason=""), Vote(score=score + 1, reason="", descending=True)])
        for score in (1, 2, 3, 4) * 3
    ]
    bias = bias_of(items(*[3] * 12), leaning, "m")
    assert bias.order is not None
    assert (bias.order.value, bias.order.low, bias.order.high) == (1.0, 1.0, 1.0)
    assert bias_of(items(3), judged(3), "m").order is None


def calibration(labels: list[int], scores: list[int | None]) -> Calibration:
    labelled = items(*labels)
    return Calibration(
        aspect="style",
        pin="p",
        model="m",
        identity="m-1",
        date="2026-01-01",
        agreement=agreement_of(labelled, judged(*scores)),
        bias=bias_of(labelled, judged(*scores), "m"),
        items=tuple(labelled),
    )


def test_a_report_is_read_back_as_it_was_written() -> None:
    results = calibration([1, 2, 3, 4, 5, 5], [1, 2, 3, 4, 4, None])
    assert parse_calibration(dump_calibration(results), "file") == results


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"bias": 3}', "null", '{"agreement": {}, "bias": {}, "items": []}'])
def test_a_report_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"style\.calibration\.json is not a calibration"):
        parse_calibration(text, "style.calibration.json")


def test_trust_takes_the_same_judge_and_enough_agreement() -> None:
    good = calibration([1, 2, 3, 4, 5] * 6, [1, 2, 3, 4, 5] * 6)
    assert distrust(good, "p", 0.85) == ""
    assert distrust(None, "p", 0.0) == "it was never calibrated"
    assert "not the one" in distrust(good, "another", 0.0)
    weak = calibration([1, 2, 3, 4, 5] * 6, [3, 1, 5, 2, 4] * 6)
    assert "judge.min_agreement is 0.9" in distrust(weak, "p", 0.9)


def test_a_set_that_is_too_small_to_tell_fails_by_itself() -> None:
    lucky = calibration([1, 5, 1, 5, 3, 3, 2, 4], [1, 5, 2, 4, 3, 1, 2, 4])
    assert lucky.agreement.kappa.value > 0.75
    assert distrust(lucky, "p", 0.75) != ""
    flawless = calibration([1, 2, 3, 4, 5, 1, 3, 5], [1, 2, 3, 4, 5, 1, 3, 5])
    assert flawless.agreement.kappa.low == 1.0
    assert "may be as low as 0.63" in distrust(flawless, "p", 0.7)  # 0.025^(1/8)


def test_a_judge_that_mostly_has_no_verdict_is_not_trusted() -> None:
    mostly = calibration([1, 2, 3, 4, 5] * 8, [*[1, 2, 3, 4, 5] * 3, *[None] * 25])
    assert distrust(mostly, "p", 0.4) == "it had no verdict on 25 of 40 items"
    assert mostly.agreement.hit_rate == 15 / 40


def test_labelled_texts_are_read() -> None:
    text = LINE * 7 + '{"task": "t", "work": "w", "label": 5, "author": "m"}\n'
    assert parse_items(text, style_rubric(), "f")[-1] == LabelledItem(task="t", work="w", label=5, author="m")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "line 3"),
        ("{}", "expected the keys"),
        ('{"task": "t", "work": "w", "label": 6}', "label 6: expected 1 to 5"),
        ('{"task": "t", "work": "w", "label": true}', "label True"),
        ('{"task": "t", "work": 1, "label": 1}', "are texts"),
        ('{"task": "t", "work": "w", "label": 1, "grade": 1}', "expected the keys"),
    ],
)
def test_a_wrong_line_is_named(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_items(LINE * 2 + line + "\n" + LINE * 9, style_rubric(), "f")


def test_too_few_items_are_refused() -> None:
    with pytest.raises(ConfigError, match="f has 7 items"):
        parse_items(LINE * 7, style_rubric(), "f")
