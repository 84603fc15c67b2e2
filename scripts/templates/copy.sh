cd {{copy}} || exit 1
bring_back() { # files that the commands wrote beside their code go to the folder of the submission
    export LC_ALL=C
    find . -name __pycache__ -prune -o -type f -print | sort | comm -23 - ../code.files |
        xargs -r -d '\n' cp -up --parents -t {{workdir}} --
}
