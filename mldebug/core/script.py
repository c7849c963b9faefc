"""Run somebody's script in this process, as `python script.py` would, so that a scope can watch it."""

from __future__ import annotations

import atexit
import builtins
import difflib
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from mldebug.core.errors import UsageError
from mldebug.core.interrupt import PythonsOwn

_LIBRARY = os.path.dirname(os.__file__) + os.sep


def run_script(argv: Sequence[str], *, module: bool = False) -> None:
    """Run `argv[0]` with the arguments after it, as a script or (`module=True`) as `python -m` runs a module.

    The script sees its own `sys.argv` and `sys.path[0]` and is the `__main__` of the process, so that its classes can
    be pickled and its functions given to processes that multiprocessing spawns. A folder or zip file with a
    `__main__.py` is run as Python runs it. What was in place before comes back when the script ends.
    SystemExit and every other exception of the script pass through. A script that is not there is a UsageError.
    A process that the script forks never comes back from here: it ends as it would under Python alone.

        with SomeScope():
            run_script(["train.py", "--lr", "1e-3"])
    """
    if not argv:
        raise UsageError("no script to run", "name a script, or -m and a module")
    old_argv, old_path, old_main = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv, sys.path = list(old_argv), list(old_path)
    pid = os.getpid()
    try:
        main, code, argv0 = _find_module(argv[0]) if module else _find_script(argv[0])
        sys.argv = [argv0, *argv[1:]]
        sys.modules["__main__"] = main
        try:
            with PythonsOwn():
                exec(code, main.__dict__)
        except BaseException as exc:
            if os.getpid() != pid:
                _end_child(exc)
            raise
        if os.getpid() != pid:
            _end_child(None)
    finally:
        sys.argv, sys.path, sys.modules["__main__"] = old_argv, old_path, old_main


def check_script(name: str) -> None:
    """Raise the UsageError of `run_script` where there is no such file, before anything else is said or done.

    check_script("trian.py")  # cannot run trian.py: no such file or directory
    """
    try:
        os.stat(name)
    except OSError as exc:
        raise UsageError(f"cannot run {name}: {(exc.strerror or str(exc)).lower()}", _script_hint(name)) from None


def script_traceback(exc: BaseException) -> TracebackType | None:
    """The traceback of an exception that came out of `run_script`, from the script's first frame on."""
    found = exc.__traceback__
    while found is not None and _is_ours(found.tb_frame.f_globals):
        found = found.tb_next
    return found


def print_traceback(exc: BaseException) -> None:
    """Print what the script raised as Python would have, without the frames that ran the script."""
    exc.with_traceback(script_traceback(exc))  # the hook of Python itself looks at the exception alone
    if isinstance(exc, KeyboardInterrupt):
        _leave_out_our_end(exc.__traceback__)
    try:
        sys.excepthook(type(exc), exc, exc.__traceback__)
    except Exception:
        traceback.print_exception(type(exc), exc, exc.__traceback__)


def _leave_out_our_end(traceback: TracebackType | None) -> None:
    """Ctrl-C may come while the script's line is traced or recorded: the script's line is what counts."""
    last, ours = traceback, False
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        # What we call of Python's own library belongs to us.
        ours = _is_ours(traceback.tb_frame.f_globals) or (ours and path.startswith(("<frozen", _LIBRARY)))
        if not ours:
            last = traceback
        traceback = traceback.tb_next
    if last is not None:
        last.tb_next = None


def exit_status(exit_: SystemExit) -> int:
    """The status that Python would leave with; a message given to `sys.exit` is written to stderr, as Python does."""
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code
    print(exit_.code, file=sys.stderr)
    return 1


def _end_child(exc: BaseException | None) -> NoReturn:
    """End a process that the script has forked: reports and exit statuses of ours are the parent's."""
    status = 0
    try:
        if isinstance(exc, SystemExit):
            status = exit_status(exc)
        elif exc is not None:
            status = 130 if isinstance(exc, KeyboardInterrupt) else 1
            print_traceback(exc)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of Python does
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:  # a stream that is closed or full, Ctrl-C
        status = status or 1
    finally:
        os._exit(status & 0xFF)


def _is_ours(namespace: dict[str, object]) -> bool:
    name = str(namespace.get("__name__", ""))
    return name == "mldebug" or name.startswith("mldebug.")


def _find_script(name: str) -> tuple[ModuleType, CodeType, str]:
    path = os.path.abspath(name)
    if os.path.isdir(path) or (os.path.isfile(path) and _is_zip(path)):
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
        if spec is None:
            raise UsageError(f"cannot run {name}: it has no __main__.py", "name the script itself")
        _set_first_path(path)
        return _main_of(spec, f"the __main__.py of {name}", name)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as exc:
        raise UsageError(f"cannot run {name}: {(exc.strerror or str(exc)).lower()}", _script_hint(name)) from None
    code = compile(source, path, "exec", dont_inherit=True)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    main = _new_main(path, importlib.machinery.SourceFileLoader("__main__", path))
    return main, code, name


def _find_module(name: str) -> tuple[ModuleType, CodeType, str]:
    _set_first_path(os.getcwd())
    if name.endswith(".py"):
        raise UsageError(f"cannot run -m {name}: a module is named without .py", f"say -m {name[:-3]}, or {name} alone")
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                raise UsageError(f"cannot run -m {name}: the package has no __main__.py", "name one of its modules")
    except ModuleNotFoundError as exc:
        # Only where the name itself is missing: an import that fails inside one of its packages is the user's to see.
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise
        spec = None
    if spec is None:
        raise UsageError(
            f"cannot run -m {name}: no module of this name",
            f"modules are looked for in {os.getcwd()}, in PYTHONPATH and among the installed packages",
        )
    return _main_of(spec, f"module {name}", spec.origin or name)


def _main_of(spec: importlib.machinery.ModuleSpec, what: str, argv0: str) -> tuple[ModuleType, CodeType, str]:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise UsageError(f"cannot run {what}: it has no Python code", "only modules written in Python can be run")
    main = _new_main(spec.origin, spec.loader)
    main.__spec__ = spec
    main.__package__ = spec.parent
    return main, code, argv0


def _new_main(path: str | None, loader: object) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __loader__=loader, __file__=path, __cached__=None)
    return main


def _set_first_path(folder: str) -> None:
    """Python puts the script's folder there, and nothing at all under -P or -I."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[:1] = [folder]


def _is_zip(path: str) -> bool:
    import zipfile

    return not path.endswith(".py") and zipfile.is_zipfile(path)


def _script_hint(name: str) -> str:
    if os.path.basename(name).startswith("python"):
        return "leave the interpreter out and name the script: -- train.py --its options"
    if name == "-m":
        return "name the module after -m"
    if os.path.basename(name) in ("torchrun", "accelerate", "deepspeed", "srun", "mpirun"):
        return f"let the launcher start mldebug: {name} ... -m mldebug COMMAND -- train.py"
    folder = os.path.dirname(name) or "."
    # The ending is left out: it alone makes any two short names of scripts look alike.
    there = os.listdir(folder) if os.path.isdir(folder) else []
    names = {os.path.splitext(found)[0]: found for found in sorted(there, key=lambda found: found.endswith(".py"))}
    near = difflib.get_close_matches(os.path.splitext(os.path.basename(name))[0], sorted(names), n=1)
    if near:
        return f"did you mean {os.path.join(os.path.dirname(name), names[near[0]])}?"
    return f"the current folder is {os.getcwd()}; give the path from there"
