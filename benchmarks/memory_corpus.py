"""Made-up memories of a software team, with words as uneven as real ones.

A few words are in most texts, some hundred in some of them, and thousands of
names (services, hosts, tickets) in very few. Texts have topics, so that vectors
have neighbours. Every hundredth text is in the small space, half are in the
large one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

SMALL_SPACE, LARGE_SPACE = "team:small", "team:large"

GLUE = """
the to of and a in is for on that it with as be by this are not from or when at we an if was has only after
before then all must can do use which have no should its more than first but so any will each same one two
into out there up how what why because until while again where they their them our your
""".split()  # noqa: SIM905

SUBJECTS = """
gateway service queue worker lease token retry timeout deploy release rollback migration schema index query
table row column database replica cache memory disk network socket proxy balancer certificate secret vault
rotation login session cookie user account password permission role scope policy audit log metric trace alert
dashboard incident outage latency throughput batch stream partition offset consumer producer broker topic
event webhook callback payment invoice refund order cart checkout price currency tax discount coupon customer
email template notification push mobile web frontend backend endpoint route handler middleware request
response header body library package version dependency lockfile build pipeline test fixture mock coverage
formatter compiler runtime container image registry cluster node pod namespace volume backup restore snapshot
archive scheduler job task thread process signal mutex lock deadlock race transaction commit isolation
constraint vacuum bloat checkpoint replication failover leader election quorum shard bucket file upload
download storage quota limit throttle breaker fallback feature flag experiment rollout canary branch merge
review comment approval diff patch hotfix regression bug ticket sprint backlog roadmap design decision record
owner oncall escalation runbook postmortem
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Memory:
    content: str
    space: str

    @property
    def tags(self) -> list[str]:
        return [f"space:{self.space}"]


class Corpus:
    """The same memories and the same questions for the same seed."""

    def __init__(self, seed: int = 7) -> None:
        self._random = random.Random(seed)
        names = [f"{kind}{n}" for kind in ("svc", "host", "pay", "inc", "job") for n in range(4000)]
        self._random.shuffle(names)
        self._kinds = [
            (GLUE, _falling(len(GLUE), 1.0), 42),
            (SUBJECTS, _falling(len(SUBJECTS), 0.6), 20),
            (names, _falling(len(names), 0.7), 8),
        ]
        self._topics = [self._random.sample(SUBJECTS, 12) for _ in range(150)]

    def memories(self, count: int) -> Iterator[Memory]:
        for n in range(count):
            space = SMALL_SPACE if n % 100 == 0 else LARGE_SPACE if n % 2 else f"team:{n % 100}"
            yield Memory(" ".join([*self._words(self._random.randint(12, 50)), f"n{n}"]), space)

    def questions(self, count: int) -> list[str]:
        """Of one to eight words, each drawn as often as it is in the texts."""
        return [" ".join(self._words(self._random.randint(1, 8))) for _ in range(count)]

    def commonest(self, count: int = 10) -> list[str]:
        """The commonest words, each by itself, and all of them."""
        return [*GLUE[:count], " ".join(GLUE[:count])]

    def _words(self, count: int) -> list[str]:
        topic = self._random.choice(self._topics)
        found = []
        for _ in range(count):
            which = self._random.randrange(100)
            for words, weights, share in self._kinds:
                if which < share:
                    found += self._random.choices(words, cum_weights=weights)
                    break
                which -= share
            else:
                found.append(self._random.choice(topic))
        return found


def _falling(count: int, steepness: float) -> list[float]:
    """Running sums of 1/rank**steepness: Zipf's law."""
    return list(accumulate(1 / (rank + 1) ** steepness for rank in range(count)))
