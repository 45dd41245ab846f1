"""How long a person waits for `engram --help`, and what a script pays for `import engram.logbook`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measuring import alternate, median, told, verdict

ENGRAM = str(Path(sys.executable).with_name("engram"))


def milliseconds(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return (time.perf_counter() - started) * 1000


def main() -> None:
    print("start-up")
    values = alternate(
        15,
        python=lambda: milliseconds(sys.executable, "-c", "pass"),
        help=lambda: milliseconds(ENGRAM, "--help"),
        logbook=lambda: milliseconds(sys.executable, "-c", "import engram.logbook.outbox"),
    )
    for name, measured in values.items():
        told(
            {"python": "python -c pass", "help": "engram --help"}.get(name, "import engram.logbook.outbox"),
            measured,
            "ms",
        )
    verdict(
        "engram --help against python -c pass",
        median(values["help"]) / median(values["python"]),
        8,
        at_most=True,
    )


if __name__ == "__main__":
    main()
