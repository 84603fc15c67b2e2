"""Grade programs: ``code_tests`` reads the tests of a row and judges by them, ``sandbox`` runs what a model wrote."""

from __future__ import annotations

from graders.code import sandbox


def prepare(unsafe: bool) -> str:
    """Prepare this process for programs, and start the server of its sandboxes, which the first one would wait for.

    ``unsafe``: the value of --allow_unsafe_code_exec. Returns the reason why the kernel offers no sandbox, or "".
    """
    sandbox.allow_unsafe = unsafe
    return sandbox.namespaces_refused()
