"""Base systems: their recipes and stored form; the build itself takes minutes and is tested by booting it."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from etude.errors import ConfigError
from etude.sandboxes.images.debian import BaseRecipe, build_base, open_base, remove_base
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.oci.provider import OciSandboxes
from etude.sandboxes.oci.runtimes import GVISOR


def stored(store: ImageStore, recipe: BaseRecipe) -> Path:
    """A base system that looks as if it had been built."""
    folder = store.folder / "bases" / recipe.name
    (folder / "root").mkdir(parents=True)
    (folder / "made.json").write_bytes(orjson.dumps({"digest": recipe.digest, "packages": ["python3=3.11.2"]}))
    return folder


def test_a_recipe_is_known_by_what_it_makes() -> None:
    plain = BaseRecipe()
    assert plain.digest == BaseRecipe(name="other").digest
    assert BaseRecipe(packages=("gcc", "make")).digest == BaseRecipe(packages=("make", "gcc")).digest
    digests = {plain.digest, BaseRecipe(packages=("gcc",)).digest, BaseRecipe(suite="trixie").digest}
    assert len(digests) == 3


@pytest.mark.parametrize("packages", [("",), ("-o",), ("gcc,make",), ("$(id)",)])
def test_what_is_no_package_is_refused(packages: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="not valid Debian package names"):
        BaseRecipe(packages=packages)


def test_a_name_that_leaves_the_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a valid base system name"):
        BaseRecipe(name="../x")


def test_a_stored_base_is_opened_and_not_built_again(tmp_path: Path) -> None:
    store, output = ImageStore(tmp_path / "store"), list[str]()
    folder = stored(store, BaseRecipe())
    base = build_base(store, progress=output.append)
    assert (base.folder, base.packages, output) == (folder, ("python3=3.11.2",), [])
    assert store.bases["debian"] == folder / "root"
    remove_base(store, "debian")
    assert "debian" not in store.bases


PROVIDERS: Mapping[str, Callable[[ImageStore], NamespaceSandboxes | OciSandboxes]] = {
    "ns": lambda store: NamespaceSandboxes(store=store),
    "oci": lambda store: OciSandboxes(replace(GVISOR, program="true"), store=store),
}


@pytest.mark.parametrize("kind", PROVIDERS)
def test_a_base_is_neither_replaced_nor_removed_while_a_provider_may_use_it(kind: str, tmp_path: Path) -> None:
    store, output = ImageStore(tmp_path / "store"), list[str]()
    folder = stored(store, BaseRecipe())
    provider = PROVIDERS[kind](ImageStore(store.folder))
    with pytest.raises(ConfigError, match=r"is in use: a run's sandboxes .* try again"):
        build_base(store, BaseRecipe(packages=("gcc",)), output.append)
    with pytest.raises(ConfigError, match="is in use"):
        remove_base(store, "debian")
    assert folder.is_dir() and output == []
    asyncio.run(provider.close())
    remove_base(store, "debian")
    assert "debian" not in store.bases


def test_a_missing_base_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="etude images build debian"):
        open_base(ImageStore(tmp_path / "store"))


def test_half_a_base_is_none(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    (stored(store, BaseRecipe()) / "made.json").write_text("{")
    with pytest.raises(ConfigError, match="etude images build debian"):
        open_base(store)
