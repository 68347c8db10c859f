"""Data: rows from files, data sets and generators → rendered, tokenised prompts in a reproducible order.

    source ── rows ──▶ columns checked ──▶ rendered and measured once ──▶ PromptStream.batch(k) ── [Prompt]

Runs in the controller. A batch is a function of (configuration, seed, batch number) and of nothing else, so that a
resumed run sees exactly the prompts that an uninterrupted one would have seen.
"""

from offbeat.data.chat import Renderer, decode_completions
from offbeat.data.prompts import DataPosition, EvalSet, PromptSource, PromptStream, open_eval, open_source, open_train
from offbeat.data.sources import Rows, load_rows
from offbeat.data.warmup import WarmupSet, open_warmup

__all__ = [
    "DataPosition",
    "EvalSet",
    "PromptSource",
    "PromptStream",
    "Renderer",
    "Rows",
    "WarmupSet",
    "decode_completions",
    "load_rows",
    "open_eval",
    "open_source",
    "open_train",
    "open_warmup",
]
