child= asked= stopping=0
ask() { # ask once: to many programs a second SIGTERM means "leave at once"
    if [ -n "$child" ] && [ "$asked" != "$child" ]; then
        asked=$child
        {{ask}}
    fi
}
trap 'stopping=1 again=1; ask' TERM INT USR1
finish() { # wait for $child and return its exit code
    [ "$stopping" = 0 ] || ask
    local again=1 code
    while [ "$again" = 1 ]; do # bash returns from `wait` after a trap, when the child may still be saving
        again=0
        wait "$child"
        code=$?
    done
    child=
    return "$code"
}
free_port() { # a port on which nobody answers on this machine
    local port=$((20000 + RANDOM % 10000))
    while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
        port=$((20000 + RANDOM % 10000))
    done
    echo "$port"
}
