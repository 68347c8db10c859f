"""Data: rows from files, data sets and generators → rendered, tokenised prompts in a reproducible order.

    sources.load_rows ─▶ columns checked ─▶ chat.Renderer measures once ─▶ prompts.PromptStream.batch(k) ─▶ [Prompt]

Runs in the controller. A batch is a function of (configuration, seed, batch number) and of nothing else, so that a
resumed run sees exactly the prompts that an uninterrupted one would have seen. Import from the modules: `prompts`
(`open_train`, `open_eval`), `warmup` (`open_warmup`), `chat`, `sources`.
"""
