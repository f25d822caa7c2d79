"""Whether this machine's processor can run virtual machines: found out by booting one.

That ``/dev/kvm`` opens says little: under nested virtualisation of some kinds it does, and Debian's kernel stops at an
instruction that is not emulated. To be sure of a no takes a while, so it is noted beside the booted machines. Owns the
question and the note.
"""

from pathlib import Path

from etude.errors import SandboxError
from etude.sandbox_spec import SandboxLimits
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.qemu.templates import Templates
from etude.sandboxes.qemu.vm_spec import shape_of

PROBE_TIMEOUT_S = 20.0
"""For a boot that takes one or two."""


async def find_accelerator(templates: Templates, store: ImageStore) -> str:
    """``kvm`` if a machine boots under it, else ``tcg``."""
    if not _can_open_kvm():
        return "tcg"
    shape = shape_of("kvm", SandboxLimits())
    note = store.folder / "machines" / f"{templates.key(shape)}.refused"
    if note.exists():
        return "tcg"
    try:
        await templates.booted(shape, PROBE_TIMEOUT_S)
    except SandboxError as error:
        note.parent.mkdir(exist_ok=True)
        note.write_text(f"{error}\n", encoding="utf-8")
        return "tcg"
    return "kvm"


def _can_open_kvm() -> bool:
    try:
        with Path("/dev/kvm").open("r+b", buffering=0):
            return True
    except OSError:
        return False
