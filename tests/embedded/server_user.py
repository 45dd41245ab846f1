"""A process that uses an embedded server, driven line by line through its standard input.

server_user.py postgres|redis DATA_DIR            start; then "release" and "quit" on stdin
server_user.py postgres|redis DATA_DIR churn N    start and release N times
"""

import sys
from pathlib import Path

from engram.embedded import EmbeddedPostgres, EmbeddedRedis
from engram.kernel.errors import EmbeddedError

SERVERS = {"postgres": EmbeddedPostgres, "redis": EmbeddedRedis}


def say(*words: object) -> None:
    print(*words, flush=True)


def serve(server: EmbeddedPostgres | EmbeddedRedis) -> None:
    server.start()
    say("ready", server.pid)
    for line in sys.stdin:
        if line.strip() == "release":
            server.release()
            say("released")
        else:
            return


def churn(server: EmbeddedPostgres | EmbeddedRedis, times: int) -> None:
    for _ in range(times):
        with server:
            if not server.is_alive() or not server._answers():
                raise SystemExit("a server that was started does not answer")
    say("done")


def main() -> None:
    name, data_dir, *rest = sys.argv[1:]
    server = SERVERS[name](Path(data_dir))
    try:
        churn(server, int(rest[1])) if rest else serve(server)
    except EmbeddedError as error:
        say("failed", str(error).replace("\n", " | "))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
