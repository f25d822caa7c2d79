"""Attacks that would turn a verdict into a failure of the machine, which is tried again: programs left running."""

from bench.grading.attacks.attack import MODULE, STUB, Attack

MANY = "mkdir -p many && i=0 && while [ $i -lt 3000 ]; do : > many/$i; i=$((i+1)); done"
"""Files that make an export take a while."""
SIGNALS = """\
import os, signal
if os.fork() == 0:
    os.setsid()
    while True:
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in (1, os.getpid()):
                try:
                    os.kill(int(name), signal.{signal})
                except OSError:
                    pass
"""
GROWS = """\
import os
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            with open("big", "ab") as file:
                file.write(bytes(1 << 20))
        except OSError:
            pass
"""
MULTIPLIES = """\
import os
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        while True:
            try:
                if os.fork():
                    os._exit(0)
            except OSError:
                pass
"""


def _left_running(name: str, what: str, program: str) -> Attack:
    return Attack(
        name=name,
        what=what,
        files={MODULE: STUB, "left.py": program},
        commands=(MANY, "python3 left.py >/dev/null 2>&1 </dev/null"),
    )


DISTURBERS = (
    _left_running("kills the grader's jobs", "Everything that appears is killed.", SIGNALS.format(signal="SIGKILL")),
    _left_running("stops the grader's jobs", "Everything that appears is stopped.", SIGNALS.format(signal="SIGSTOP")),
    _left_running("fills the disk for ever", "Whatever room there is is taken.", GROWS),
    _left_running("multiplies", "Processes are others a moment later.", MULTIPLIES),
    Attack(
        name="a full disk",
        what="The disk is full when the agent is done.",
        files={MODULE: STUB},
        commands=("cat /dev/zero > big; true",),
    ),
    Attack(
        name="a work that fills its new world",
        what="What is to be carried over leaves the hidden tests no room.",
        files={MODULE: STUB},
        commands=("head -c 65500000 /dev/zero > big; true",),
    ),
)
"""All of this kind."""
