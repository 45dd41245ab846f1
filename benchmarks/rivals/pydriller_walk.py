"""PyDriller over the same repository: each commit's message and what it did to each file. Prints commits/s."""

from __future__ import annotations

import sys
import time

from pydriller import Repository

started = time.perf_counter()
count = 0
for commit in Repository(sys.argv[1]).traverse_commits():
    _ = (commit.msg, commit.author.name, [(m.new_path, m.added_lines) for m in commit.modified_files])
    count += 1
    if count == int(sys.argv[2]):
        break
print(count / (time.perf_counter() - started))
