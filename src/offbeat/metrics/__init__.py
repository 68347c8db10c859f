"""What a run says of itself: spans, the record of a step, files that programs read, and what people see.

    stages ── spans ──▶ Timeline ── Window ──▶ step_record ──▶ metrics.jsonl ──▶ readers
                                                    └────────▶ Display       ──▶ people

Everything that computes is a pure function over values (`overlap`, `records`, `alarms`, `summary`); the edges are
`writer` (the run folder) and `display`, `live` (the terminal). Nothing here imports torch or knows a loop.
"""
