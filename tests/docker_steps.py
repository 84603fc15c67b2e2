"""Run the steps of the Dockerfile in a root file system of their own, without Docker.

    debootstrap --variant=minbase bookworm /tmp/root && python tests/docker_steps.py /tmp/root
    python tests/docker_steps.py /tmp/root --then 'python grpo.py --dry_run'      and a command in the finished image

FROM is the folder ROOT, an unpacked Debian of the release that the Dockerfile names. COPY leaves out what .dockerignore
names. All steps are one shell script, run by chroot: root alone may do this. ``--bind FOLDER`` shows a folder of this
machine inside, such as a mirror of packages, and ``--env NAME=VALUE`` sets a variable there, of an ARG as well.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Step = tuple[str, str]  # instruction, what follows it on its line
HOME = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}


def steps(text: str) -> list[Step]:
    """Return the instructions of a Dockerfile, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines()]


def ignored(path: str, patterns: list[str]) -> bool:
    """Return True if .dockerignore leaves a path out: a pattern names it or a folder that it is in."""
    parts = path.split("/")
    heads = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    for pattern in patterns:
        anywhere = pattern.removeprefix("**/")
        names = parts if anywhere != pattern else heads
        if any(fnmatch.fnmatch(name, anywhere) for name in names):
            return True
    return False


def copied(sources: list[str], patterns: list[str], project: Path = ROOT) -> list[str]:
    """Return the files that COPY takes. Raises FileNotFoundError for a source without any."""
    found = []
    for source in sources:
        place = project / source
        walk = [place] if place.is_file() else [p for p in sorted(place.rglob("*")) if p.is_file() or p.is_symlink()]
        names = [os.path.relpath(path, project) for path in walk]
        kept = [name for name in names if not ignored(name, patterns)]
        if not kept:
            raise FileNotFoundError(f"COPY {source}: no such file, or .dockerignore leaves it out")
        found += kept
    return found


def patterns_of(project: Path = ROOT) -> list[str]:
    """Return the patterns in .dockerignore."""
    return [line.strip() for line in (project / ".dockerignore").read_text().splitlines() if line.strip()]


def as_shell(step: Step) -> str:
    """Return an instruction as a line of the shell; a file of this project is copied to the path that it has here."""
    name, rest = step
    if name == "ARG":
        key, equals, default = rest.partition("=")
        return f"export {key}=${{{key}:-{default}}}" if equals else ":"
    if name == "COPY":
        lines = "".join(f"{file}\n" for file in copied(rest.split()[:-1], patterns_of()))
        return f"printf %s {shlex.quote(lines)} | tar -C /project -cT - | tar -x --no-same-owner"
    others = {"FROM": ":", "CMD": ":", "ENV": f"export {rest}", "RUN": f"({rest})"}
    return (others | {"WORKDIR": f"mkdir -p {rest}; cd {rest}"})[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="an unpacked Debian, which the steps change")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable inside")
    parser.add_argument("--bind", action="append", default=[], metavar="FOLDER", help="a folder of this machine inside")
    parser.add_argument("--then", default=":", metavar="COMMAND", help="a command after the last step")
    args = parser.parse_args()
    root = args.root.resolve()
    shutil.copy2("/etc/resolv.conf", root / "etc" / "resolv.conf")
    lines = ["set -eu", *map(as_shell, steps((ROOT / "Dockerfile").read_text())), args.then]
    (root / "steps.sh").write_text("\n".join(lines) + "\n")
    mounts = ["set -e"]  # of a name space of their own, which ends with its process
    for folder, place in [(ROOT, "/project"), *((name, name) for name in ("/proc", "/dev", *args.bind))]:
        (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mounts.append(f"mount --rbind {folder} {root}{place}")
    line = ["unshare", "--mount", "sh", "-c", "\n".join([*mounts, f"exec chroot {root} /bin/sh /steps.sh"])]
    return subprocess.run(line, env=HOME | dict(word.split("=", 1) for word in args.env)).returncode


if __name__ == "__main__":
    sys.exit(main())
