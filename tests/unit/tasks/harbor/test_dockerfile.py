"""Dockerfiles read without Docker: each step as it is meant, and what cannot be built refused with its line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.tasks.harbor.dockerfile import SEARCH_PATH, Copy, ImageFolder, RunInstruction, parse_dockerfile
from etude.tasks.harbor.settings import TaskFolderError


def test_every_step_says_where_and_with_what_it_is_done() -> None:
    parsed = parse_dockerfile(
        r"""# syntax=docker/dockerfile:1
ARG TAG=12
FROM debian:${TAG}-slim
LABEL a=b
WORKDIR /app
ENV ONE=1 TWO="2 3"
ENV PATH /opt/bin:$PATH
RUN echo $ONE && \
    # a comment inside

    echo two
WORKDIR sub
COPY --chmod=755 a.txt "b c.txt" ./
ADD tree.tar.gz /
RUN ["printf", "%s", "$ONE"]
CMD ["bash"]
""",
        source="Dockerfile",
    )
    path = f"/opt/bin:{SEARCH_PATH}"
    environment = {"ONE": "1", "TWO": "2 3", "PATH": path}
    assert (parsed.parent, parsed.workdir, parsed.environment) == ("debian:12-slim", "/app/sub", environment)
    variables = {"TAG": "12", **environment}
    assert parsed.steps == (
        ImageFolder(path="/app"),
        RunInstruction(
            line=8,
            argv=("/bin/sh", "-c", "echo $ONE &&      echo two"),
            workdir="/app",
            environment=variables,
        ),
        ImageFolder(path="/app/sub"),
        Copy(line=13, sources=("a.txt", "b c.txt"), target="/app/sub/", mode="755"),
        Copy(line=14, sources=("tree.tar.gz",), target="/", unpack=True),
        RunInstruction(line=15, argv=("printf", "%s", "$ONE"), workdir="/app/sub", environment=variables),
    )


def test_here_documents_belong_to_their_command() -> None:
    text = (
        'FROM x\nSHELL ["/bin/bash", "-ec"]\nRUN <<END\necho a\necho b\nEND\nRUN cat <<E > f\nhi\nE\nRUN echo $((1<<2))'
    )
    first, second, third = parse_dockerfile(text, source="d").steps
    assert isinstance(first, RunInstruction)
    assert isinstance(second, RunInstruction)
    assert isinstance(third, RunInstruction)
    assert first.argv == ("/bin/bash", "-ec", "echo a\necho b\n")
    assert second.argv[-1] == "cat <<E > f\nhi\nE"
    assert third.argv[-1] == "echo $((1<<2))"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no FROM"),
        ("RUN true", "FROM comes first"),
        ("FROM a AS b\nFROM c", "one stage"),
        ("FROM a\nCOPY --from=b x y", "--from cannot be had"),
        ("FROM a\nCOPY --chown=me x y", "--chown cannot be had"),
        ("FROM a\nCOPY ../x y", "files of the context"),
        ("FROM a\nADD https://x.org/y /z", "nothing is downloaded"),
        ("FROM a\nCOPY <<E /x\nhi\nE", "put the text into a file"),
        ("FROM a\nCOPY x", "expected files of the context"),
        ("FROM a\nUSER me", "always user 1000"),
        ("FROM a\nENTRYPOINT x", "nothing is started"),
        ("FROM a\nHEALTHCHECK CMD x", "nothing is started"),
        ("FROM a\nVOLUME /x", "all in its image"),
        ("FROM a\nARG V", "write a default"),
        ("FROM a\nRUN --mount=type=secret,id=x cat", "only caches"),
        ("FROM a\nRUN", "there is no command"),
        ("FROM a\nFLY away", "no such instruction"),
        ("FROM a\nENV A=${B:+c}", "of variables, only"),
        ("FROM a\nENV A='b", "No closing quotation"),
        ("FROM a\nSHELL bash", "expected a list"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(TaskFolderError, match="env/Dockerfile") as refused:
        parse_dockerfile(text, source="env/Dockerfile")
    assert words in str(refused.value)


def test_what_changes_no_file_is_passed_over() -> None:
    text = "FROM a\nLABEL x=1\nEXPOSE 80\nCMD ['x']\nRUN --mount=type=cache,target=/c --network=none true\nUSER root"
    [step] = parse_dockerfile(text, source="d").steps
    assert isinstance(step, RunInstruction)
    assert step.argv[-1] == "true"


@given(st.text(alphabet="FROM RUNCPYEVADWK\n\\#<[]{}$\"'=-/.ab:", max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_dockerfile("FROM a\n" + text, source="d")
    except TaskFolderError as refused:
        assert str(refused).startswith("d")


@given(st.dictionaries(st.from_regex(r"\A[A-Z][A-Z0-9_]{0,5}\Z"), st.from_regex(r"\A[a-z0-9 /.-]{0,12}\Z"), max_size=4))
def test_variables_are_what_they_were_set_to(variables: dict[str, str]) -> None:
    lines = [f'ENV {name}="{value}"' for name, value in variables.items()]
    parsed = parse_dockerfile("\n".join(["FROM a", *lines, "WORKDIR /w"]), source="d")
    assert parsed.environment == variables
