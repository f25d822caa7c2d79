"""One function of a release with its dependencies, extracted from all changes of the release."""

from etude.taskgen.history.changed_files import ChangedFiles
from etude.taskgen.history.proposals import Proposal, asked_by_tests, note_on, release_notes
from etude.taskgen.history.slices import Slicer
from etude.taskgen.projects import read_project

BEFORE = {
    "pyproject.toml": '[project]\nname = "tally"\nversion = "1.0"\n',
    "tally/__init__.py": "from .sums import total\n",
    "tally/sums.py": '"""Sums."""\n__all__ = ["total"]\n\n\ndef total(numbers):\n    return sum(numbers)\n',
    "tests/test_sums.py": "from tally import total\n\n\ndef test_total():\n    assert total([1]) == 1\n",
}
AFTER = {
    **BEFORE,
    "CHANGES.md": "- `total` skips what is None (#12)\n  wherever it stands\n- `mean` and `spread` are new\n",
    "tally/__init__.py": "from .sums import mean, spread, total\n",
    "tally/sums.py": '"""Sums."""\nimport math\n\n__all__ = ["mean", "spread", "total"]\n\n\n'
    "def _known(numbers):\n    return [each for each in numbers if each is not None]\n\n\n"
    "def total(numbers):\n    return math.fsum(_known(numbers))\n\n\n"
    "def mean(numbers):\n    return total(numbers) / len(_known(numbers))\n\n\n"
    "def spread(numbers):\n    return max(numbers) - min(numbers)\n",
    "tests/test_sums.py": "from tally import mean, spread, total\n\n\n"
    "def test_total():\n    assert total([1, None]) == 1\n"
    "\n\ndef test_mean():\n    assert mean([1, 3]) == 2\n\n\ndef test_spread():\n    assert spread([1, 3]) == 2\n",
}
PATH = "tally/sums.py"


def slicer() -> Slicer:
    return Slicer(ChangedFiles(before=BEFORE, after=AFTER), read_project(AFTER))


def test_the_names_of_a_release_are_those_that_it_made_or_changed() -> None:
    assert list(slicer().names()) == [(PATH, "mean"), (PATH, "spread"), (PATH, "total")]


def test_a_slice_brings_what_its_name_needs_and_exports_it() -> None:
    part = slicer().cut(PATH, "spread")
    assert part is not None
    sums, package = part.answer[PATH] or "", part.answer["tally/__init__.py"] or ""
    assert "def spread" in sums and "_known" not in sums and "math" not in sums and "mean" not in sums
    assert "return sum(numbers)" in sums
    assert "'spread'" in sums.splitlines()[1]
    assert "spread" in package and "mean" not in package
    assert "import spread, total" in part.hidden["tests/test_sums.py"].replace("\n", " ")


def test_a_slice_runs_alone() -> None:
    part = slicer().cut(PATH, "mean")
    assert part is not None
    names: dict[str, object] = {}
    exec(part.answer[PATH] or "", names)  # the text is this file's own
    mean = names["mean"]
    assert callable(mean) and mean([1, None, 3]) == 2
    assert "spread" not in names


def test_tests_of_nothing_new_have_no_import_of_it() -> None:
    hidden = slicer().nothing()["tests/test_sums.py"]
    assert hidden.startswith("from tally import total\n")
    assert "mean([1, 3])" in hidden


def test_words_and_annotations_are_no_change() -> None:
    worded = BEFORE["tally/sums.py"].replace("(numbers):\n", '(numbers: list[int]) -> int:\n    """Sum."""\n')
    files = ChangedFiles(before=BEFORE, after={**BEFORE, PATH: worded})
    assert list(Slicer(files, read_project(BEFORE)).names()) == []


def test_a_change_is_asked_for_in_the_words_of_its_release() -> None:
    notes = release_notes(ChangedFiles(before=BEFORE, after=AFTER))
    assert note_on(notes, "total") == "total skips what is None wherever it stands"
    assert note_on(notes, "nobody") == ""


def test_where_nothing_is_said_the_names_of_its_tests_ask() -> None:
    proposal = Proposal(prompt="", template="tally:tally.sums:total", path=PATH, name="total", lines=1)
    prompt = asked_by_tests(proposal, ["tests/test_sums.py::test_total_of_gaps", "tests/test_sums.py::TestIt::test_x"])
    assert prompt == "total in tally.sums does not do what it should: total of gaps, It x"
