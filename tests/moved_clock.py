"""A wall clock that can be moved, as a library to preload: for programs whose node has another time than others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

COMPILER = shutil.which("cc")

# The wall clock, moved by as many seconds as a file says, and the kernel's when it is told to wait until some time.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long moved(void) {
    long seconds = 0;
    FILE *file = fopen(getenv("CLOCK_FILE"), "r");
    if (file) {
        if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
        fclose(file);
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*plain)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = plain(clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += moved();
    return failed;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    int (*plain)(sem_t *, const struct timespec *) = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec real = *until;
    real.tv_sec -= moved();
    return plain(semaphore, &real);
}
"""


def build(place: Path) -> Path:
    """Compile the clock into a folder. The times of files stay the kernel's, as those of a file server do."""
    (place / "clock.c").write_text(CLOCK)
    library = place / "clock.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, place / "clock.c", "-ldl"], check=True)
    return library
