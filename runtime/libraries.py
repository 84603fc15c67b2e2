"""What libraries say: to libraries.log in the run's folder. Errors, and whatever is not known, stay on the console."""

from __future__ import annotations

import logging
import logging.handlers
import sysconfig
import warnings
from pathlib import Path
from typing import TextIO

from runtime.redaction import redact

LIBRARIES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])

# Holds records until the folder of the run exists, then passes them on to a file there.
waiting = logging.handlers.MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)


class LibraryLogger(logging.Logger):
    """Sends what a library logs to the file of the run; only errors go to the library's own handlers as well.

    Loggers of our own and of a user's files are as they always are.
    """

    def callHandlers(self, record: logging.LogRecord) -> None:
        if record.pathname.startswith(LIBRARIES):
            waiting.handle(record)
            if record.levelno < logging.ERROR:
                return
        super().callHandlers(record)


class WithoutSecrets(logging.Formatter):
    """A line of the log with what must not be written down taken out: clients log the URLs that they open."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def quiet_libraries() -> None:
    """From now on, send log records and warnings of installed packages to the file. Call it before importing them.

    Nothing is redirected below Python: a traceback, a crash in C code and a print are on the console, as ever.
    """
    if logging.getLoggerClass() is LibraryLogger:
        return
    logging.setLoggerClass(LibraryLogger)
    show = warnings.showwarning

    def show_own(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is None and filename.startswith(LIBRARIES):
            text = warnings.formatwarning(message, category, filename, lineno, line)
            waiting.handle(logging.LogRecord("warnings", logging.WARNING, filename, lineno, text, None, None))
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_own


def write_to(folder: Path | None) -> None:
    """Write what was held back to ``libraries.log`` in the folder of the run, and from now on everything.

    None: drop it. Rank 0 writes; what libraries tell the other ranks is the same.
    """
    handler: logging.Handler = logging.NullHandler()
    if folder is not None:
        handler = logging.FileHandler(folder / "libraries.log", delay=True)
        handler.setFormatter(WithoutSecrets("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = waiting.target
    waiting.setTarget(handler)
    waiting.flush()
    waiting.capacity = 1  # nothing waits any longer
    if before is not None:
        before.close()
