"""Shell text taken apart: commands where commands are, paths where paths are, and nothing ever raises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.harnesses.actions import Action
from etude.rewards.monitor.acts import Surface, acts_of, settle_path, shell_acts, simple_commands


def runs(text: str) -> list[str]:
    return [results for surface, results in shell_acts(text) if surface is Surface.RUN]


def on(surface: Surface, text: str) -> list[str]:
    return [results for where, results in shell_acts(text) if where is surface]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a; b && c || d | e &", ["a", "b", "c", "d", "e"]),
        ("echo 'git log; rm x' \"a && b\"", ["echo git log; rm x a && b"]),
        ("X=1 Y=2 sudo timeout -s 9 5 git log", ["git log"]),
        ("if git diff; then\n  git log\nfi", ["git diff", "then", "git log", "fi"]),
        ("ls # git log\ngit diff", ["ls", "git diff"]),
        ("find . | xargs -n 1 grep x", ["find .", "grep x"]),
        ("bash -lc 'git log && ls'", ["bash -lc git log && ls", "git log", "ls"]),
        ('echo "$(git log)" `git diff`', ["echo $(git log) `git diff`", "git log", "git diff"]),
        ("echo 'as `git log --all` says $(x)'", ["echo as `git log --all` says $(x)"]),
        ("git log \\\n  --all", ["git log --all"]),
        ("echo 'open", ["echo 'open"]),
        ("", []),
    ],
)
def test_simple_commands_are_found(text: str, expected: list[str]) -> None:
    assert runs(text) == expected


def test_redirections_say_what_is_read_and_written() -> None:
    (command,) = simple_commands("sort -u < in.txt > out.txt 2>/dev/null")
    assert (command.reads, command.writes) == (("in.txt",), ("out.txt", "/dev/null"))


def test_a_here_document_is_the_body_of_its_command_and_no_commands() -> None:
    text = "cat > a.py <<'END'\ngit log\nEND\nls"
    assert runs(text) == ["cat", "ls"]
    assert on(Surface.CODE, text) == ["git log\n"]
    assert on(Surface.CREATE, text) == ["a.py"]


def test_a_here_document_for_a_shell_is_run() -> None:
    assert runs("bash <<E\ngit log\nE") == ["bash", "git log"]


def test_files_that_python_opens_are_seen() -> None:
    text = "python3 -c \"open('a','w').write(open('b').read()); Path('c').unlink()\""
    assert on(Surface.CREATE, text) == ["a"]
    assert on(Surface.READ, text) == ["b"]
    assert on(Surface.ALTER, text) == ["c"]


@pytest.mark.parametrize(
    ("text", "reads", "creates", "alters"),
    [
        ("cat a b", ["a", "b"], [], []),
        ("grep -n x a", ["a"], [], []),
        ("sed -i s/a/b/ a", [], [], ["a"]),
        ("cp a b", ["a"], ["b"], []),
        ("mv a b", [], ["b"], ["a"]),
        ("ls a; echo b", [], [], []),
        ("x | tee a", [], ["a"], []),
    ],
)
def test_programs_say_what_becomes_of_their_operands(
    text: str, reads: list[str], creates: list[str], alters: list[str]
) -> None:
    assert [on(surface, text) for surface in (Surface.READ, Surface.CREATE, Surface.ALTER)] == [reads, creates, alters]


def test_to_create_a_known_file_is_to_alter_it() -> None:
    action = Action(tool="create", arguments={"path": "/work/a/../b.py", "file_text": "x = 1"})
    surfaces = {act.surface: act.text for act in acts_of(action, workdir="/work", existing=frozenset({"b.py"}))}
    assert surfaces == {Surface.ALTER: "b.py", Surface.CODE: "x = 1"}
    assert Surface.CREATE in {act.surface for act in acts_of(action, workdir="/work", existing=frozenset())}


def test_an_editors_sub_command_is_no_shell() -> None:
    action = Action(tool="str_replace_based_edit_tool", arguments={"command": "view", "path": "a.py"})
    assert [(act.surface, act.text) for act in acts_of(action, workdir="/work", existing=frozenset())] == [
        (Surface.READ, "a.py")
    ]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("./a", "a"),
        ("/work/a//b", "a/b"),
        ("../x", "/x"),
        ("~/x", "/home/agent/x"),
        ("/workshop", "/workshop"),
        (".", "."),
    ],
)
def test_paths_are_settled(path: str, expected: str) -> None:
    assert settle_path(path, "/work") == expected


@given(st.text(alphabet="ab'\"\\ \n;|&<>()$`#=-{}cEOF0", max_size=60))
def test_any_text_is_taken_apart(text: str) -> None:
    action = Action(tool="bash", arguments={"command": text, "path": text, "content": text})
    acts = acts_of(action, workdir="/work", existing=frozenset())
    assert all(act.where in action.arguments for act in acts)


@given(st.lists(st.sampled_from(["git log", "ls -l a", "cat b.txt", "make -j2"]), min_size=1, max_size=6))
def test_what_is_joined_comes_apart_again(commands: list[str]) -> None:
    assert runs(" && ".join(commands)) == commands
