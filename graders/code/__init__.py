"""Grade programs: ``code_tests`` reads the tests of a row and judges by them, ``sandbox`` runs what a model wrote."""

from __future__ import annotations

from graders.code import exchange, sandbox
from graders.code.code_tests import code_error, names_wanted, program_in, read_tests, run_tests
from graders.text import LONGEST_ANSWER, after_thinking

__all__ = ["code_error", "exchange", "judge", "prepare"]  # exchange.py runs in the sandbox, as text


def prepare(unsafe: bool) -> str:
    """Prepare this process for programs, and start the server of its sandboxes, which the first one would wait for.

    ``unsafe``: the value of --allow_unsafe_code_exec. Returns the reason why the kernel offers no sandbox, or "".
    """
    sandbox.allow_unsafe = unsafe
    return sandbox.namespaces_refused()


def judge(response: str, truth: str, row: dict) -> tuple[bool, str | None]:
    """Return (whether the program of a response passes all tests, the program or None if there is none).

    Raises ValueError, saying why, for tests that no program can be judged by.
    """
    try:
        tests = read_tests(truth, row)
        program = program_in(after_thinking(response), names_wanted(tests))
        if not program.strip() or len(program) > 100 * LONGEST_ANSWER:
            return False, None
        return not run_tests(program, tests), program
    except (AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"tests: {type(error).__name__}: {error}") from error
