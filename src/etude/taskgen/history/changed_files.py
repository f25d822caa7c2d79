"""The texts of a project before and after a change, and which of them are sources and tests. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from etude.taskgen.projects import Project, is_test_file


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFiles:
    """The texts of a project before and after a change."""

    before: Mapping[str, str]
    after: Mapping[str, str]

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths whose texts differ, sorted."""
        paths = self.before.keys() | self.after.keys()
        return tuple(sorted(path for path in paths if self.before.get(path) != self.after.get(path)))

    def sources(self, project: Project) -> tuple[str, ...]:
        """Changed modules of the project."""
        return tuple(path for path in self.changed if path.endswith(".py") and project.is_source(path))

    def tests(self, project: Project) -> tuple[str, ...]:
        """Test modules that are new or other ones after it."""
        return tuple(path for path in self.changed if path in self.after and is_test_file(path))

    def lines(self, project: Project) -> int:
        """Lines that it adds to the project's modules, or takes out of them."""
        return sum(changed_lines(self.before.get(path, ""), self.after.get(path, "")) for path in self.sources(project))

    def hidden(self, project: Project) -> dict[str, str]:
        """Texts of tests as they are after it: those that it changed, and what all tests read."""
        changed = set(self.changed)
        return {
            path: text
            for path, text in self.after.items()
            if project.is_test(path)
            and (path in changed or path.endswith("conftest.py"))
            and not project.is_source(path)
        }


def changed_lines(before: str, after: str) -> int:
    """Lines that are in one of two texts and not in the other, counted once for each time."""
    old, new = Counter(before.splitlines()), Counter(after.splitlines())
    return ((old - new) + (new - old)).total()
