"""Features of Harbor's format, by the format's own names, and étude's support of each.

Generated from the parser of task folders: from the fields of its settings and the tables of what it refuses. So every
key that is added or refused there is in this list, and no key is ignored silently: a key in neither table is refused as
unknown.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel

from etude.config.section import Section
from etude.tasks.harbor import compose, folder, settings

FORMAT = "Harbor 0.26, schema 1.4"
"""The release that the tables were compared with."""
INSTRUCTIONS = {
    "FROM, COPY, ADD, ARG, SHELL, ONBUILD": "as podman does: any image, many stages",
    "RUN": "in part: as podman does, mounts, too; that of Debian 12 has no here-documents",
    "ENV": "",
    "WORKDIR": "the agent owns it",
    "USER": "in part: any but root, for which agents are the user agent",
    "ENTRYPOINT": "in part: as Harbor starts it, but as the agent's user",
    "HEALTHCHECK": "waited for",
    "CMD": "carried: neither Harbor nor étude runs it",
    "EXPOSE, LABEL, STOPSIGNAL, VOLUME": "carried: a volume is a folder like any other",
}
"""Instructions of a Dockerfile; :mod:`etude.sandboxes.images.containers` reads the image that they make."""


class Support(StrEnum):
    """Support of a feature, from full to none."""

    HONOURED = "honoured"
    PART = "in part"
    CARRIED = "carried"
    REFUSED = "refused"


MEANINGS = {
    Support.HONOURED: "as the format says",
    Support.PART: "with the difference that stands beside; other values are refused by name",
    Support.CARRIED: "decides nothing",
    Support.REFUSED: "by its name, with the fix, before anything starts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A file, key or instruction of the format."""

    name: str
    support: Support
    note: str = ""


def features() -> tuple[Feature, ...]:
    """All features, in this order: files, keys of ``task.toml``, Dockerfile instructions, compose keys."""
    refused_files = ((path, fix) for path, fix in folder.UNSUPPORTED_FILES)
    return (
        *(_feature(path, note) for path, note in folder.FILES.items()),
        *(Feature(name=path, support=Support.REFUSED, note=fix) for path, fix in refused_files),
        *(_feature(f"task.toml: {key}", settings.NOTES.get(key, "")) for key in _keys(settings.TaskSettings)),
        *(
            Feature(name=f"task.toml: {key}", support=Support.REFUSED, note=fix)
            for key, fix in settings.REFUSED.items()
        ),
        *(_feature(f"Dockerfile: {key}", note) for key, note in INSTRUCTIONS.items()),
        *(_feature(f"compose: {key}", compose.NOTES.get(key, "")) for key in _keys(compose.ComposeSettings)),
        *(
            Feature(name=f"compose: services.*.{key}", support=Support.REFUSED, note=fix)
            for key, fix in compose.REFUSED.items()
        ),
    )


def markdown() -> str:
    """The table as a page, preceded by the share of each level of support."""
    rows = features()
    lines = [f"{FORMAT}, {len(rows)} features:"]
    for support in Support:
        count = sum(row.support is support for row in rows)
        lines.append(f"{count} ({100 * count / len(rows):.0f} %) {support}, {MEANINGS[support]};")
    lines += ["none is ignored silently.", "", "| feature | | |", "|---|---|---|"]
    lines += [f"| `{row.name}` | {row.support} | {row.note} |" for row in rows]
    return "\n".join(lines) + "\n"


def _feature(name: str, note: str) -> Feature:
    """A supported feature; its note begins with the level of support unless it is fully supported."""
    for support in (Support.PART, Support.CARRIED):
        if note.startswith(support):
            return Feature(name=name, support=support, note=note.removeprefix(support).lstrip(":; "))
    return Feature(name=name, support=Support.HONOURED, note=note)


def _keys(section: type[BaseModel], above: str = "") -> Iterator[str]:
    """The keys of a section and of its subsections, joined with dots."""
    for name, field in section.model_fields.items():
        inner = _sections(field.annotation)
        for each in inner:
            part = "*." if "dict" in str(field.annotation) else ""
            yield from _keys(each, f"{above}{name}.{part}")
        if not inner:
            yield f"{above}{name}"


def _sections(annotation: object) -> list[type[BaseModel]]:
    """The sections in a type such as ``dict[str, Section]`` or ``Section | None``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [each for part in getattr(annotation, "__args__", ()) for each in _sections(part)]
