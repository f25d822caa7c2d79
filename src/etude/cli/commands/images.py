"""`etude images`: base systems and images that sandboxes start from. Owns the options and the output."""

from typing import Annotated

import typer

from etude.cli.options import group

app = group()


@app.command()
def build(
    name: Annotated[str, typer.Argument()] = "debian",
    *,
    package: Annotated[
        list[str], typer.Option(default_factory=list, show_default=False, help="One more package; may be repeated.")
    ],
) -> None:
    """Build a base system with a kernel from Debian packages."""
    from etude.cli.console import OUT
    from etude.sandboxes.images.debian import BaseRecipe, build_base
    from etude.sandboxes.images.store import ImageStore

    base = build_base(ImageStore(), BaseRecipe(name=name, packages=tuple(package)))
    OUT.out(f"{base.name}: {len(base.packages)} packages in {base.folder}")


@app.command()
def add(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder with a Dockerfile, a registry's name[@digest], an archive, an OCI layout folder."
        ),
    ],
    *,
    name: Annotated[str, typer.Option(help="Another name for the image.")] = "",
) -> None:
    """Fetch or build a container image, by podman or skopeo with your own settings."""
    from etude.cli.console import OUT
    from etude.sandboxes.images.containers import add_image
    from etude.sandboxes.images.store import ImageStore

    image = add_image(ImageStore(), source, name=name)
    OUT.out(f"{image.digest}: {len(image.layers)} layers, user {image.user.uid}, in {image.workdir}")


@app.command("ls")
def list_images() -> None:
    """List the base systems and images of this user."""
    from rich.table import Table

    from etude.cli.console import OUT
    from etude.sandbox_spec import SCRATCH
    from etude.sandboxes.images.debian import open_base
    from etude.sandboxes.images.store import ImageStore

    store = ImageStore()
    table = Table("kind", "name", "digest", title=str(store.folder), title_justify="left")
    for name in sorted(store.bases.keys() - {SCRATCH}):
        table.add_row("base", name, open_base(store, name).digest[:16])
    for stored in store.images:
        table.add_row("image", ", ".join(stored.names), stored.image.digest[:16])
    OUT.print(table)


@app.command("rm")
def remove(name: str) -> None:
    """Remove a base system or an image, and the layers that nothing else uses, while no run has the images open."""
    from etude.cli.console import OUT
    from etude.sandboxes.images.debian import remove_base
    from etude.sandboxes.images.store import ImageStore

    store = ImageStore()
    if name in store.bases:
        remove_base(store, name)
        layers = store.collect()
    else:
        layers = store.remove(name)
    OUT.out(f"removed {name}, and {layers} layers")
