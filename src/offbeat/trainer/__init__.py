"""The trainer process: one model, one optimizer, updates in, logprobs and weights out. Never imports an engine."""
