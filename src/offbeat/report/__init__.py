"""`offbeat report`: one HTML page about a run, from the files of its folder, with no network.

    metrics.jsonl ─ curves ─┐
    config, journal ─ header ─┤
    trace.json ─ timeline ───┼─ collect ─▶ one JSON value + packed texts ─ page ─▶ report.html
    samples.jsonl ─ samples ─┘

Each file may be missing, half-written or still growing: what is whole is shown, and the page says what was not. All
that a model or a data set wrote is data in the page, never markup. Apart from `collect` and `page`, which read and
write files, the modules are functions of values. No torch here.
"""
