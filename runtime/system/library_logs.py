"""Write logs and warnings of libraries to libraries.log in the run's folder, and errors to the console as well."""

from __future__ import annotations

import logging
import logging.handlers
import sys
from pathlib import Path

from runtime.system.redaction import redact

FOLDERS = [f"{path}/" for path in sys.path]  # a name may begin with that of another folder
LIBRARIES = tuple(x for x in FOLDERS if not __file__.startswith(x) and any(Path(x).glob("*.dist-info")))

# Holds records until the folder of the run exists, then passes them on to a file there.
waiting = logging.handlers.MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)


class LibraryLogger(logging.Logger):
    """Sends what a library logs to the file of the run; only errors go to the library's own handlers as well.

    Loggers of our own and of a user's files are as they always are.
    """

    def callHandlers(self, record: logging.LogRecord) -> None:
        """Handle a record by the file that it comes from; the text of a warning begins with that file's name."""
        origin = record.getMessage() if self.name == "py.warnings" else record.pathname
        if origin.startswith(LIBRARIES):
            if record.levelno >= logging.INFO:  # on a GPU torch's compiler sends hundreds of empty records below
                waiting.handle(record)
            if record.levelno < logging.ERROR:
                return
        super().callHandlers(record)


class WithoutSecrets(logging.Formatter):
    """A line of the log with what must not be written down taken out: clients log the URLs that they open."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def quiet_libraries() -> None:
    """Send log records and warnings of installed packages to libraries.log; call it before they are imported.

    Nothing is redirected below Python: a traceback, a crash in C code and a print are on the console, as ever.
    """
    logging.setLoggerClass(LibraryLogger)
    logging.captureWarnings(True)
    own = logging.getLogger("py.warnings")
    own.addHandler(logging.lastResort)  # standard error, for warnings of our own and of a user's files
    own.propagate = False


def write_to(folder: Path | None) -> None:
    """Write what was held back to ``libraries.log`` in the folder of the run, and from now on everything.

    None: drop it. Rank 0 writes; what libraries tell the other ranks is the same.
    """
    handler = logging.NullHandler() if folder is None else logging.FileHandler(folder / "libraries.log", delay=True)
    handler.setFormatter(WithoutSecrets("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    waiting.setTarget(handler)
    waiting.flush()
    waiting.capacity = 1  # nothing waits any longer
