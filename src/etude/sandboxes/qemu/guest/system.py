"""Linux system calls that Python does not wrap, made through libc. No policy."""

import ctypes
import fcntl
import os
import socket
import struct
import time

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2
PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_SET_NAME = 38, 24, 15
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207
BLKFLSBUF = 0x1261
SIOCSIFADDR, SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x8913, 0x8914, 1
LAST_CAPABILITY = 40
SYS_PIVOT_ROOT = 155
"""Its number on x86-64; libc has no function for it."""


def write(path: str, text: str) -> None:
    """Write to a kernel file with as little code as possible, because a fresh copy has none of it in memory."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount. Raises ``OSError`` naming the target."""
    data = options.encode() if options else None
    done = LIBC.mount(source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), data)
    _check(done, f"mount {source} on {target}")


def unmount(target: str) -> None:
    """Detach a mount: at once for new users, at last for current ones."""
    _check(LIBC.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def unshare(kinds: int) -> None:
    """Move into new namespaces; a process namespace applies to children created from now on."""
    _check(LIBC.unshare(kinds), "unshare")


def join(process: int, kinds: int) -> None:
    """Move into namespaces of a process that is open as ``process``; a mount namespace brings its root along."""
    _check(LIBC.setns(process, kinds), "setns")


def pivot_root() -> None:
    """Make the current folder, a mount, the root, and detach the old root."""
    _check(LIBC.syscall(SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    unmount(".")


def prctl(option: int, value: int) -> None:
    """Call ``prctl`` for this process."""
    _check(LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option}, {value})")


def drop_bounding(keep: frozenset[int]) -> None:
    """Drop all capabilities but ``keep`` from the bounding set of programs that this process runs."""
    for number in range(LAST_CAPABILITY + 1):
        if number not in keep:
            prctl(PR_CAPBSET_DROP, number)


def set_clock(now_ns: int) -> None:
    """Set the time of day."""
    time.clock_settime_ns(time.CLOCK_REALTIME, now_ns)


def reseed(entropy: bytes) -> None:
    """Reseed the kernel's random number generator with fresh bytes."""
    device = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, RNDADDENTROPY, struct.pack("ii", len(entropy) * 8, len(entropy)) + entropy)
        fcntl.ioctl(device, RNDRESEEDCRNG)
    finally:
        os.close(device)


def forget_cached(device: str) -> None:
    """Drop cached contents of a disk that has been replaced."""
    disk = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(disk, BLKFLSBUF)
    finally:
        os.close(disk)


def raise_loopback(addresses: tuple[str, ...] = ()) -> None:
    """Bring the loopback interface up, with more IPv4 addresses if there are any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        for number, address in enumerate(("", *addresses)):
            name = f"lo:{number}" if number else "lo"
            if address:
                target = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
                fcntl.ioctl(channel, SIOCSIFADDR, struct.pack("16s16s", name.encode(), target))
            flags = struct.unpack("16sh14x", fcntl.ioctl(channel, SIOCGIFFLAGS, struct.pack("16s16x", name.encode())))
            fcntl.ioctl(channel, SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags[1] | IFF_UP))


def _check(result: int, words: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{words}: {os.strerror(number)}")
