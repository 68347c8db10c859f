"""The journal: what became of every sample that was ever asked for.

    issued ─▶ generated ─▶ rewarded ─▶ trained(step)
       └──────────┴────────────┴─────▶ dropped(reason)

`journal.jsonl` only grows: one event a line, never rewritten. A checkpoint remembers how long the journal was when it
was made. A run continued from that checkpoint says so with a `resumed` line: what stands between the two belongs to
work that is done again, and is superseded. What is left is the run's *surviving line*, and on it every issued sample
ends exactly once. `account` proves it, or says where it does not hold.

A sample is named by (`prompt_id`, `epoch`, `sample_index`), never by its text or its place.
"""

from offbeat.journal.account import Account, account, staleness_problems
from offbeat.journal.events import Resumed, SampleId, read_journal
from offbeat.journal.writer import Journal, open_journal

__all__ = [
    "Account",
    "Journal",
    "Resumed",
    "SampleId",
    "account",
    "open_journal",
    "read_journal",
    "staleness_problems",
]
