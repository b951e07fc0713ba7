"""The wrapper around every program's `main`: flags in, one clear sentence and an exit code out.

    def main(config, workdir): ...

    entry = cli.program(main)

    if __name__ == "__main__":
        sys.exit(entry())

Exit codes: 0 done; 1 an error of ours (with its traceback); 2 a user's mistake; 3 out of memory;
4 disk full; 5 another process of the run is gone; 130 interrupted. Codes from 2 on print one
sentence on stderr and no traceback.
A run that SIGTERM stopped has saved everything: 0 (or what ZEST_PREEMPTED_EXIT says), a sentence.
Nothing heavy is imported before the flags are read: a mistyped flag is answered at once.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from absl import flags

from zest_jax import config as config_lib
from zest_jax import lost
from zest_jax.errors import EXIT_LOST, Stopped, UserError

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_MEMORY = 3
EXIT_DISK = 4
EXIT_INTERRUPTED = 130

MEMORY_HINT = (
    "sample fewer rollouts at once, use a smaller group or batch, or shorter lengths in the config"
)

# What is wrong, what helps, and how to tell it: the system's numbers, or its words where a library
# hands on only those.
_NO_ROOM = (
    (
        "the disk is full",
        "free some space",
        (errno.ENOSPC, errno.EDQUOT),
        ("No space left", "Disk quota exceeded"),
    ),
    (
        "a file has reached the size limit of this shell or file system",
        "raise it (ulimit -f)",
        (errno.EFBIG,),
        ("File too large",),
    ),
)


def _hush_libtpu(devices: Path = Path("/dev")) -> None:
    """Lets libtpu, which the tests install for its compiler, find no TPU without a page of errors.

    Where a machine has TPU chips nothing is set.
    """
    if next(devices.glob("accel*"), None) or (devices / "vfio").exists():
        return
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def program(
    main: Callable[..., object],
    *,
    define: Callable[[flags.FlagValues], None] | None = None,
    needs_config: bool = True,
    needs_workdir: bool = True,
    memory_hint: str = MEMORY_HINT,
    arguments: Sequence[str] = (),
) -> Callable[..., int]:
    """Makes the entry point of a program.

    Args:
      main: called as `main(config, workdir)`, or as `main(config, workdir, flags)` if `define` is
        given. `config` and `workdir` are None where they are not needed and not given.
      define: adds the program's own flags to the given `FlagValues`, as in
        `flags.DEFINE_string("split", "heldout", "…", flag_values=values)`.
      needs_config: whether to refuse to run without `--config`.
      needs_workdir: whether to refuse to run without `--workdir`.
      memory_hint: what to reduce when the memory does not suffice.
      arguments: names of the text flags that arguments without a name set, in their order.

    Returns:
      `entry(argv=None) -> exit code`; `argv` counts the program's name, like `sys.argv`.
    """

    def entry(argv: Sequence[str] | None = None) -> int:
        as_program = argv is None
        argv = list(sys.argv if argv is None else argv)
        try:
            if any(arg in ("--help", "-help", "-h", "--helpfull") for arg in argv[1:]):
                print(_help(main, define))
                return EXIT_OK
            values = _flag_values(define)
            config, stray = config_lib.parse_flags(values, argv)
            if len(stray) <= len(arguments):
                for name in arguments[: len(stray)]:
                    values[name].value = stray.pop(0)
            elif len(arguments) == 1:
                raise UserError(f"several arguments are given; quote the {arguments[0]} as one.")
            elif arguments:
                raise UserError(
                    f"{len(stray)} arguments are given, and there are {len(arguments)}: "
                    f"{', '.join(arguments)}."
                )
            if stray:
                raise UserError(
                    f"unexpected argument {stray[0]!r}; flags are written --name=value."
                )
            if needs_config and config is None:
                raise UserError("no config is given; say which: --config=configs/smoke.py.")
            if needs_workdir and not values.workdir:
                raise UserError("no workdir is given; say where to write: --workdir=runs/smoke.")
            # Libraries that look at absl's own flags must not find them unparsed.
            flags.FLAGS.mark_as_parsed()
            _hush_libtpu()
            main(config, values.workdir, *((values,) if define else ()))
            return _decided(EXIT_OK, as_program)
        except (Exception, KeyboardInterrupt, Stopped) as error:
            code, sentence = explain(error, memory_hint)
            if code == EXIT_BUG:
                traceback.print_exc()
            else:
                # Threads and coroutines of a library that failed of the same cause are told of when
                # they are collected, which adds nothing.
                logging.getLogger("asyncio").setLevel(logging.CRITICAL)
                warnings.simplefilter("ignore", RuntimeWarning)
                print(f"zest_jax: {sentence}", file=sys.stderr, flush=True)
            _decided(code, as_program)
            quits = isinstance(error, KeyboardInterrupt)
            # Those that are left would wait for the one that is gone.
            abrupt = quits or getattr(error, "at_once", False) or code == EXIT_LOST
            if as_program and not isinstance(error, Stopped) and lost.one_of_several():
                why = sentence or f"an error of its own, {type(error).__name__}: {error}"[:300]
                if code == EXIT_LOST:
                    why = "its exchange with another one broke off"
                abrupt |= not lost.leave(why, waits=not quits)
            if abrupt and as_program:
                # A compiled step may still be running in a thread of its own, and dies with a
                # segmentation fault if the interpreter is taken down around it.
                sys.stdout.flush()
                os._exit(code)
            return code

    return entry


def _decided(code: int, as_program: bool) -> int:
    """The exit code, once nothing is left but the interpreter's own end: a Ctrl-C that comes there
    skips the rest of it, and is no error of ours with a traceback."""
    if as_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    return code


def explain(error: BaseException, memory_hint: str = MEMORY_HINT) -> tuple[int, str]:
    """Exit code and sentence for what a program raised; the sentence is "" for errors of ours.

    Libraries wrap what the system said, so the whole chain of causes is searched.
    """
    if isinstance(error, UserError):
        text = str(error)
        return EXIT_USER, text if text.endswith((".", "?")) else f"{text}."
    if isinstance(error, Stopped):
        return error.code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted; run the same command to resume."
    chain = list(_causes(error))
    # Before memory: TensorStore reports a full disk as RESOURCE_EXHAUSTED too.
    for cause in chain:
        for problem, cure, errnos, words in _NO_ROOM:
            says = any(word in str(cause) for word in words)
            if says or (isinstance(cause, OSError) and cause.errno in errnos):
                file = getattr(cause, "filename", "")
                where = f" (writing {file})" if file else ""
                return EXIT_DISK, (
                    f"{problem}{where}; what was saved before is kept: {cure} and run the same "
                    "command to resume."
                )
    for cause in chain:
        if _is_out_of_memory(cause):
            kind = "this machine" if isinstance(cause, MemoryError) else "the device"
            return EXIT_MEMORY, f"{kind} has no memory left: {memory_hint}."
    told = next((str(cause).strip() for cause in chain if lost.tells(cause)), "")
    if told and lost.one_of_several():
        return EXIT_LOST, lost.sentence(f" ({told.splitlines()[0][:200]})")
    return EXIT_BUG, ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and everything that it was raised from, during or as a group of; each once."""
    todo, seen = [error], set()
    while todo:
        current = todo.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        todo += [e for e in (current.__cause__, current.__context__) if e is not None]
        if isinstance(current, BaseExceptionGroup):
            todo += current.exceptions


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # By name: the class moved between JAX versions, and JAX is not to be imported here.
    names = {cls.__name__ for cls in type(error).__mro__}
    words = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "std::bad_alloc")
    return bool(names & {"XlaRuntimeError", "JaxRuntimeError"}) and any(
        word in str(error) for word in words
    )


def _flag_values(define: Callable[[flags.FlagValues], None] | None) -> flags.FlagValues:
    """Fresh flags, so that a program can be started more than once in one process."""
    values = flags.FlagValues()
    flags.DEFINE_string(
        "workdir", None, "the folder of the run; an earlier run there is resumed", values
    )
    if define:
        define(values)
    return values


def _help(main: Callable[..., object], define: Callable[[flags.FlagValues], None] | None) -> str:
    module = inspect.getmodule(main)
    values = _flag_values(define)
    lines = [
        inspect.getdoc(module) or inspect.getdoc(main) or "",
        "",
        "Flags:",
        "  --config: a config file, with its variant after a colon (configs/smoke.py:control)",
        "  --config.FIELD: overrides one field of the config (--config.solver.learning_rate=5e-7)",
    ]
    for name in sorted(values):
        flag = values[name]
        default = "" if flag.default is None else f" (default: {flag.default})"
        lines.append(f"  --{name}: {flag.help}{default}")
    return "\n".join(lines).strip()
