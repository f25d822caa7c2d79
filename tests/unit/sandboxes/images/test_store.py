"""The store of images: content addressing, errors, interrupted writers, disks."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, DamagedError
from etude.sandboxes.images.disks import disk_image, merged_disk
from etude.sandboxes.images.layers import AGENT, digest_tree, entries
from etude.sandboxes.images.store import ImageStore, default_folder, merged_digest

NAMES = st.text("abc.é ", min_size=1, max_size=4).filter(lambda name: name not in {".", ".."})
FILES = st.dictionaries(NAMES, st.binary(max_size=20), max_size=5)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def plant(folder: Path) -> Path:
    """A tree with everything that a layer may hold."""
    (folder / "work/inner").mkdir(parents=True)
    (folder / "usr").mkdir(mode=0o755)
    (folder / "usr/tool").write_text("#!/bin/sh\n")
    (folder / "usr/tool").chmod(0o755)
    (folder / "usr/link").symlink_to("../../etc/passwd")
    (folder / "work/inner/a").write_bytes(b"a")
    (folder / "work/inner").chmod(0o550)
    return folder


def test_a_layer_is_stored_once_under_its_content(store: ImageStore, tmp_path: Path) -> None:
    first = store.add_layer(plant(tmp_path / "one"))
    again = store.add_layer(plant(tmp_path / "two"))
    assert first == again == digest_tree(store.layer(first))
    layer = store.layer(first)
    assert (layer / "usr/tool").stat().st_mode & 0o777 == 0o755
    assert (layer / "usr/link").readlink() == Path("../../etc/passwd")
    assert (layer / "work/inner").stat().st_mode & 0o777 == 0o550
    assert [folder.name for folder in (store.folder / "layers").iterdir()] == [first]
    assert list((store.folder / "incoming").iterdir()) == []


@given(FILES, FILES)
def test_digests_differ_exactly_where_trees_do(
    tmp_path_factory: pytest.TempPathFactory, one: dict[str, bytes], two: dict[str, bytes]
) -> None:
    parent = tmp_path_factory.mktemp("trees")
    for name, files in (("one", one), ("two", two)):
        (parent / name).mkdir()
        for file, data in files.items():
            (parent / name / file).write_bytes(data)
    assert (digest_tree(parent / "one") == digest_tree(parent / "two")) == (one == two)


@pytest.mark.parametrize("change", ["content", "mode", "link", "owner", "name", "kind"])
def test_every_change_gives_another_digest(tmp_path: Path, change: str) -> None:
    if change == "owner" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    tree = plant(tmp_path / "tree")
    before = digest_tree(tree)
    match change:
        case "content":
            (tree / "usr/tool").write_text("#!/bin/sh \n")
        case "mode":
            (tree / "usr/tool").chmod(0o700)
        case "link":
            (tree / "usr/link").unlink()
            (tree / "usr/link").symlink_to("elsewhere")
        case "owner":
            os.chown(tree / "usr/tool", AGENT, AGENT)
        case "name":
            (tree / "usr/tool").rename(tree / "usr/tools")
        case _:
            (tree / "usr/tool").unlink()
            (tree / "usr/tool").mkdir(mode=0o755)
    assert digest_tree(tree) != before


def test_what_is_in_the_working_folder_is_the_agents(tmp_path: Path) -> None:
    owners = {entry.path: entry.user for entry in entries(plant(tmp_path / "tree"))}
    assert owners == {
        **dict.fromkeys(("work", "work/inner", "work/inner/a"), AGENT),
        **dict.fromkeys(("usr", "usr/tool", "usr/link"), 0),
    }


def test_a_pipe_is_no_part_of_a_layer(store: ImageStore, tmp_path: Path) -> None:
    tree = plant(tmp_path / "tree")
    os.mkfifo(tree / "usr/pipe")
    with pytest.raises(ValueError, match=r"'usr/pipe' is a socket, pipe or device"):
        store.add_layer(tree)
    assert list((store.folder / "incoming").iterdir()) == []


def test_an_image_is_opened_by_digest_and_by_name(store: ImageStore, tmp_path: Path) -> None:
    layer = store.add_layer(plant(tmp_path / "tree"))
    image = store.add([layer], environment={"A": "1"}, workdir="/app", name="mine")
    assert store.open("mine") == store.open(image.digest) == image
    assert (image.layers, image.workdir, image.environment) == ((store.layer(layer),), "/app", {"A": "1"})
    assert store.add([layer], environment={"A": "2"}).digest != image.digest
    assert [stored.names for stored in store.images] == [("mine",), ()]
    assert store.images[0].size_bytes == len("#!/bin/sh\n") + 1


def test_a_name_moves_to_the_image_that_took_it_last(store: ImageStore) -> None:
    store.add([], workdir="/one", name="mine")
    store.add([], workdir="/two", name="mine")
    assert store.open("mine").workdir == "/two"


@pytest.mark.parametrize(
    ("reference", "match"),
    [("nobody", "no image is called 'nobody'"), ("0" * 64, "etude images build"), ("../x", "is not a valid")],
)
def test_a_missing_image_is_named_with_the_fix(store: ImageStore, reference: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        store.open(reference)


def test_an_image_of_missing_parts_is_refused(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="are not in"):
        store.add(["f" * 64])
    monkeypatch.setenv("ETUDE_IMAGES", str(tmp_path / "of-the-user"))
    with pytest.raises(ConfigError, match="etude images build debian"):
        store.add([], base="debian")
    (tmp_path / "of-the-user" / "bases" / "debian" / "root").mkdir(parents=True)
    assert store.add([], base="debian").base == "debian"  # images beside tasks are over the user's base systems
    image = store.add([store.add_layer(plant(tmp_path / "tree"))])
    image.layers[0].rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match="needs layers"):
        store.open(image.digest)


def test_a_changed_layer_is_damage(store: ImageStore, tmp_path: Path) -> None:
    image = store.add([store.add_layer(plant(tmp_path / "tree"))])
    store.verify(image)
    (image.layers[0] / "usr/tool").write_text("#!/bin/bash\n")
    with pytest.raises(DamagedError, match="was changed"):
        store.verify(image)


def test_removed_images_free_their_layers(store: ImageStore, tmp_path: Path) -> None:
    layer = store.add_layer(plant(tmp_path / "tree"))
    store.add([layer], name="mine")
    assert store.collect() == 0
    assert store.remove("mine") == 1
    assert list((store.folder / "layers").iterdir()) == []
    assert list((store.folder / "incoming").iterdir()) == []
    with pytest.raises(ConfigError, match="no image is called"):
        store.remove("mine")


def test_nothing_is_removed_while_another_has_the_store_open(store: ImageStore, tmp_path: Path) -> None:
    writer = ImageStore(store.folder)
    layer = writer.add_layer(plant(tmp_path / "tree"))
    for remove in (store.collect, lambda: store.remove("mine")):
        with pytest.raises(ConfigError, match=r"is in use: .* try again"):
            remove()
        if not store.images:
            writer.add([layer], name="mine")
    with pytest.raises(ConfigError, match="is in use"):
        ImageStore(store.folder).collect()  # a refused removal has left the store open here
    assert store.open("mine").layers == (store.layer(layer),)
    del writer
    assert store.remove("mine") == 1


def test_a_process_that_was_started_does_not_hold_the_store(tmp_path: Path) -> None:
    store, other = ImageStore(tmp_path / "store"), ImageStore(tmp_path / "store")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        del other
        assert store.collect() == 0


def test_merged_disks_stay_as_long_as_their_layers(store: ImageStore, tmp_path: Path) -> None:
    layers = []
    for number in range(3):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "file").write_text(str(number))
        layers.append(store.add_layer(tmp_path / f"{number}"))
    store.add(layers, name="all")
    store.add(layers[:1], name="first")
    lowest = store.folder / "disks" / f"{merged_digest(layers[:2])}.squashfs"
    lowest.touch()
    assert merged_disk(store, [store.layer(layer) for layer in layers[:2]]) == lowest
    assert store.collect() == 0
    assert lowest.exists()
    assert store.remove("all") == 2
    assert not lowest.exists()


def test_what_a_dead_writer_left_is_swept(store: ImageStore, tmp_path: Path) -> None:
    left = plant(store.folder / "incoming/dead")
    with store.incoming() as alive:
        assert not left.exists()
        store.add_layer(plant(tmp_path / "tree"))
        assert alive.exists()


def test_no_other_user_reaches_what_images_have_also_in_an_old_store(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "lends").touch()
    (tmp_path / "tree" / "lends").chmod(0o4755)
    layer = store.layer(store.add_layer(tmp_path / "tree"))
    assert (layer / "lends").stat().st_mode & 0o7777 == 0o4755
    private = [store.folder / name for name in ("layers", "bases", "disks", "incoming")]
    assert {folder.stat().st_mode & 0o777 for folder in private} == {0o700}
    for folder in private:
        folder.chmod(0o755)
    ImageStore(store.folder)
    assert {folder.stat().st_mode & 0o777 for folder in private} == {0o700}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
@pytest.mark.parametrize("name", ["layers", "incoming"])
def test_root_reads_another_users_store_and_writes_nothing_that_the_user_could_run(
    store: ImageStore, tmp_path: Path, name: str
) -> None:
    image = store.add([store.add_layer(plant(tmp_path / "tree"))])
    (store.folder / name).chmod(0o755)
    os.chown(store.folder / name, 12345, 12345)
    assert ImageStore(store.folder).open(image.digest) == image
    assert (store.folder / name).stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match=f"{name} belongs to user 12345, .*: set ETUDE_IMAGES"):
        store.add_layer(plant(tmp_path / "other"))


def test_a_store_of_another_user_is_refused(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=f"layers belongs to user {os.getuid()}: set ETUDE_IMAGES"):
        ImageStore(store.folder)


def test_a_disk_has_the_layers_files_and_owners(store: ImageStore, tmp_path: Path) -> None:
    if shutil.which("mksquashfs") is None:
        pytest.skip("squashfs-tools are not installed")
    layer = store.layer(store.add_layer(plant(tmp_path / "tree")))
    disk = disk_image(store, layer)
    assert disk_image(store, layer) == disk
    listed = subprocess.run(["unsquashfs", "-lln", disk], capture_output=True, text=True, check=True).stdout
    owners = {line.split()[-1]: line.split()[1] for line in listed.splitlines() if "inner/a" in line or "tool" in line}
    assert owners == {"squashfs-root/work/inner/a": f"{AGENT}/{AGENT}", "squashfs-root/usr/tool": "0/0"}
    elsewhere = ImageStore(tmp_path / "elsewhere")
    assert disk_image(store, elsewhere.layer(elsewhere.add_layer(tmp_path / "tree"))) == disk


def test_the_store_is_in_the_users_cache_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETUDE_IMAGES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "etude/images"
    monkeypatch.setenv("ETUDE_IMAGES", str(tmp_path / "here"))
    assert default_folder() == tmp_path / "here"
