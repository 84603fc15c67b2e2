"""Run the steps of the Dockerfile in a root file system of their own, without Docker.

    debootstrap --variant=minbase bookworm /tmp/root && python tests/docker_steps.py /tmp/root
    python tests/docker_steps.py /tmp/root --then 'python grpo.py --dry_run'      and a command in the finished image

FROM is the folder ROOT, an unpacked Debian of the release that the Dockerfile names. COPY leaves out what .dockerignore
names, and RUN is `chroot ROOT /bin/sh -c ...` with the values of ARG and ENV. Root alone may do this. ``--bind FOLDER``
shows a folder of this machine inside, such as a mirror of packages, and ``--env NAME=VALUE`` sets a variable there.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Step = tuple[str, str]  # instruction, what follows it on its line


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
        found += [(source, name) for name in kept]
    return found


def patterns_of(project: Path = ROOT) -> list[str]:
    """Return the patterns in .dockerignore."""
    return [line.strip() for line in (project / ".dockerignore").read_text().splitlines() if line.strip()]


class Image:
    """A root file system to which steps are applied."""

    def __init__(self, root: Path, given: dict[str, str], extra: dict[str, str]):
        self.root, self.given = root, given
        self.place = "/"
        self.env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **extra}

    def apply(self, step: Step) -> None:
        """Apply one instruction. Raises CalledProcessError where a command fails, ValueError for an unknown one."""
        name, rest = step
        if name == "ARG":
            key, equals, default = rest.partition("=")
            if key in self.given or equals:
                self.env[key] = self.given.get(key, default)
        elif name == "ENV":
            key, _, value = rest.partition("=")
            self.env[key] = value.replace("$PATH", self.env["PATH"])
        elif name == "WORKDIR":
            self.place = rest
            self.inside(rest).mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = rest.split()
            self.copy(sources, target)
        elif name == "RUN":
            self.run(rest)
        elif name not in ("FROM", "CMD"):
            raise ValueError(f"{name}: an instruction that this program does not know")

    def inside(self, path: str) -> Path:
        """Return the place of a path of the image on this machine."""
        return self.root / os.path.join(self.place, path).lstrip("/")

    def copy(self, sources: list[str], target: str) -> None:
        """Copy files as COPY does: a folder's contents, a file into a target that ends in /."""
        for source, name in copied(sources, patterns_of()):
            is_file = (ROOT / source).is_file()
            below = os.path.basename(name) if is_file else os.path.relpath(name, source)
            place = self.inside(target) / below if target.endswith(("/", ".")) or not is_file else self.inside(target)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place, follow_symlinks=False)

    def run(self, command: str) -> None:
        """Run a shell's command line inside, in the folder of WORKDIR."""
        line = ["chroot", str(self.root), "/bin/sh", "-c", f"cd {self.place} && {command}"]
        subprocess.run(line, env=self.env, check=True)


@contextlib.contextmanager
def mounted(root: Path, folders: list[str]):
    """Bind folders of this machine into the root, /proc and /dev among them, and take them out at the end."""
    places = []
    try:
        for folder in ("/proc", "/dev", *folders):
            place = root / folder.lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--rbind", folder, str(place)], check=True)
            subprocess.run(["mount", "--make-rslave", str(place)], check=True)
            places.append(place)
        yield
    finally:
        for place in reversed(places):
            subprocess.run(["umount", "-R", "-l", str(place)], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="an unpacked Debian, which the steps change")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as of docker build")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable inside")
    parser.add_argument("--bind", action="append", default=[], metavar="FOLDER", help="a folder of this machine inside")
    parser.add_argument("--then", metavar="COMMAND", help="a command after the last step")
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("error: chroot and mount need root")
    pairs = [dict(word.split("=", 1) for word in words) for words in (args.build_arg, args.env)]
    image = Image(args.root.resolve(), *pairs)
    shutil.copy2("/etc/resolv.conf", image.root / "etc" / "resolv.conf")
    with mounted(image.root, args.bind):
        for step in [*steps((ROOT / "Dockerfile").read_text()), *([("RUN", args.then)] if args.then else [])]:
            started = time.monotonic()
            print(f"--- {' '.join(step)[:110]}", flush=True)
            image.apply(step)
            print(f"    {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
