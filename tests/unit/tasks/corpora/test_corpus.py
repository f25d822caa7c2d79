"""Mid-training's own documents: determined by the seed, document by document, and held out by template."""

from etude.config.tasks import BugfixOptions
from etude.tasks.bugfix import BugfixFamily
from etude.tasks.corpora.corpus import demonstration_sources, stdlib_texts, tokenizer_texts
from etude.tasks.corpora.mixture import Side, Source
from etude.tasks.corpora.texts import PlainText
from etude.tasks.corpora.transcripts import TOOLS, BugfixDemonstrations
from etude.tokens.chat import ChatTemplate
from etude.types import Split

FAMILY = BugfixFamily(BugfixOptions(kinds=("arith",)), seed=0)
CHAT = ChatTemplate.train(list(tokenizer_texts(BugfixDemonstrations(FAMILY, BugfixOptions()), 0))[:2_000], 400)


def open_sources(seed: int, split: Split = Split.TRAIN) -> dict[str, Source]:
    demonstrations = BugfixDemonstrations(FAMILY, BugfixOptions(), TOOLS, split)
    side = Side(split=split, seed=seed, one_in=10)
    return demonstration_sources(demonstrations, PlainText(CHAT), side, context_weight=0.25)


def texts(source: Source, count: int) -> list[str]:
    return [CHAT.decode(source.document(index).token_ids.tolist()) for index in range(count)]


def test_a_document_is_decided_by_its_number_and_the_seed() -> None:
    one, again, other = open_sources(3), open_sources(3), open_sources(4)
    for name in ("stdlib", "code", "sessions"):
        backwards = [CHAT.decode(again[name].document(index).token_ids.tolist()) for index in reversed(range(10))]
        assert texts(one[name], 10) == backwards[::-1]
        assert texts(one[name], 10) != texts(other[name], 10)
        assert one[name].identity != other[name].identity


def test_the_heldout_side_is_of_heldout_templates() -> None:
    shown = {line.strip() for text in texts(open_sources(0, Split.HELDOUT)["code"], 50) for line in text.splitlines()}
    shown |= {line.partition(" ")[2].strip() for line in shown}
    assert shown & FAMILY.forbidden
    train = {line.strip() for text in texts(open_sources(0)["code"], 50) for line in text.splitlines()}
    train |= {line.partition(" ")[2].strip() for line in train}
    assert not train & FAMILY.forbidden


def test_modules_of_the_library_are_held_out_whole() -> None:
    train = stdlib_texts(Side(seed=0, one_in=10))
    heldout = stdlib_texts(Side(split=Split.HELDOUT, seed=0, one_in=10))
    assert train
    assert heldout
    assert not set(train) & set(heldout)


def test_a_session_counts_what_the_agent_wrote() -> None:
    document = open_sources(0)["sessions"].document(0)
    assert set(document.weights.tolist()) == {0.25, 1.0}
    assert document.token_ids[-1] == CHAT.end_id
    assert document.weights[-1] == 1
