"""Runs one command in this process, which then ends with the command's exit code.

``python`` does not start a new interpreter: the program runs in the current one, a fork of a warm process, which saves
the start time. The differences from a new interpreter: the standard modules listed in
:mod:`etude.sandboxes.local.zygote` are loaded (and, behind ``chroot``, no others can be), ``atexit`` functions do not
run, threads end with the main one, and hashing is not randomised, so that a program's output is the same everywhere.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

PYTHON_NAMES = ("python", "python3")
"""Commands that mean the current interpreter."""
NOT_FOUND, NOT_EXECUTABLE, BAD_USAGE = 127, 126, 2
"""Exit codes, as in shells and Python."""


def run(argv: Sequence[str]) -> NoReturn:
    """Run ``python FILE …``, ``python -c CODE …`` or any other command; never returns."""
    with _ProcessEnd():
        if argv[0] in PYTHON_NAMES:
            _run_python(argv[1:])
        else:
            _replace_process(argv)
    raise AssertionError("the process outlived its end")


class _ProcessEnd:
    """Context that ends the process on exit, after a return or an exception, in the same way as the interpreter."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = 0 if error is None else 1
        if isinstance(error, SystemExit):
            code = _system_exit_code(error)
        elif error is not None:
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):
                code = code or 120  # Python's own code for lost output
        os._exit(code)


def _run_python(argv: Sequence[str]) -> None:
    match argv:
        case ["-c", source, *rest]:
            name, folder, arguments = "<string>", str(Path.cwd()), ["-c", *rest]
        case [file, *_] if not file.startswith("-"):
            try:
                source = Path(file).read_text(encoding="utf-8")
            except OSError as error:
                raise SystemExit(_complain(f"can't open file {file!r}: {error.strerror}", BAD_USAGE)) from None
            name, folder, arguments = file, str(Path(file).absolute().parent), list(argv)
        case _:
            raise SystemExit(_complain(f"expected FILE or -c CODE, got {list(argv)}", BAD_USAGE))
    main = ModuleType("__main__")
    if name != "<string>":
        main.__file__ = name
    sys.modules["__main__"] = main
    sys.argv = arguments
    sys.path.insert(0, folder)
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


def _replace_process(argv: Sequence[str]) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, other programs expect it
    try:
        os.execvp(argv[0], list(argv))
    except FileNotFoundError:
        raise SystemExit(_complain(f"{argv[0]}: not found", NOT_FOUND)) from None
    except OSError as error:
        raise SystemExit(_complain(f"{argv[0]}: {error.strerror}", NOT_EXECUTABLE)) from None


def _system_exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    return _complain(str(error.code), 1)


def _complain(message: str, code: int) -> int:
    sys.stderr.write(message + "\n")
    return code
