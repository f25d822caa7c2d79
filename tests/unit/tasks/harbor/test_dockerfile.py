"""Dockerfiles that need no image, and their meaning."""

import pytest

from etude.tasks.harbor.dockerfile import PlainDockerfile, plain_dockerfile

PLAIN = """# syntax=docker/dockerfile:1
FROM python:3.12-slim

LABEL a="b c"
WORKDIR /app
ENV A=b \\
    # between
    C="d e"
COPY one two/ ./
EXPOSE 80
CMD ["python3"]
"""


def test_text_in_the_working_folder_of_a_known_base_system_needs_no_image() -> None:
    assert plain_dockerfile(PLAIN) == PlainDockerfile(
        workdir="/app", environment={"A": "b", "C": "d e"}, copies=(("one", "two/", "./"),)
    )


@pytest.mark.parametrize(
    "line",
    [
        "RUN true",
        "USER me",
        'ENTRYPOINT ["/x"]',
        "HEALTHCHECK CMD true",
        "COPY --chown=1 a b",
        "COPY a* b",
        "COPY a $B",
        "COPY <<END a",
        "ADD a b",
        "WORKDIR sub",
        "WORKDIR /other",
        "ENV A=$B",
        "ENV A b",
        "ARG A=b",
        "FROM debian:12 AS second",
        'COPY "a',
        "NONSENSE x",
    ],
)
def test_whatever_else_is_said_is_for_podman(line: str) -> None:
    assert plain_dockerfile(f"FROM debian:12\nWORKDIR /app\n{line}\n") is None


@pytest.mark.parametrize("text", ["", "WORKDIR /app", "FROM alpine:3", "FROM debian:12 AS first", "FROM $BASE"])
def test_an_unknown_beginning_is_for_podman(text: str) -> None:
    assert plain_dockerfile(text) is None
